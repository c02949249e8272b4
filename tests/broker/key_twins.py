"""Keys that share a hash: murmur3 can be run backwards, so a twin of a key is computed, not searched for."""

from __future__ import annotations

import struct

from tailrace.core.model.identifiers import hash128

MASK = (1 << 64) - 1
C1, C2 = 0x87C37B91114253D5, 0x4CF5AD432745937F
ADD1, ADD2 = 0x52DCE729, 0x38495AB5
FIVE = pow(5, -1, 1 << 64)
MIX1, MIX2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


def _left(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & MASK


def _right(value: int, bits: int) -> int:
    return _left(value, 64 - bits)


def _block(h1: int, h2: int, k1: int, k2: int) -> tuple[int, int]:
    h1 = (_left(h1 ^ (_left(k1 * C1 & MASK, 31) * C2 & MASK), 27) + h2) & MASK
    h1 = (h1 * 5 + ADD1) & MASK
    h2 = (_left(h2 ^ (_left(k2 * C2 & MASK, 33) * C1 & MASK), 31) + h1) & MASK
    return h1, (h2 * 5 + ADD2) & MASK


def _leading_to(h1: int, h2: int, to1: int, to2: int) -> tuple[int, int]:
    """The block that turns one state into another."""
    mixed = _right(((to1 - ADD1) * FIVE - h2) & MASK, 27) ^ h1
    k1 = _right(mixed * pow(C2, -1, 1 << 64) & MASK, 31) * pow(C1, -1, 1 << 64) & MASK
    mixed = _right(((to2 - ADD2) * FIVE - to1) & MASK, 31) ^ h2
    k2 = _right(mixed * pow(C1, -1, 1 << 64) & MASK, 33) * pow(C2, -1, 1 << 64) & MASK
    return k1, k2


def _unmix(value: int) -> int:
    value ^= value >> 33
    value = value * pow(MIX2, -1, 1 << 64) & MASK
    value ^= value >> 33
    value = value * pow(MIX1, -1, 1 << 64) & MASK
    return value ^ value >> 33


def _state_of(low: int, high: int, length: int) -> tuple[int, int]:
    """The state before the last steps, which lead to a hash."""
    high = (high - low) & MASK
    low = (low - high) & MASK
    h1, h2 = _unmix(low), _unmix(high)
    h2 = (h2 - h1) & MASK
    h1 = (h1 - h2) & MASK
    return h1 ^ length, h2 ^ length


def twin(key: bytes, *, whole: bool, number: int = 0) -> bytes:
    """A key of 32 bytes with the same low half of the hash, or with the whole."""
    low, high = hash128(key)
    if not whole:
        high ^= 1 + number
    first = struct.pack("<QQ", number, 77)
    state = _block(0, 0, number, 77)
    found = first + struct.pack("<QQ", *_leading_to(*state, *_state_of(low, high, 32)))
    assert found != key
    assert hash128(found) == (low, high)
    return found
