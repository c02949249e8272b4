"""The framing: messages survive any cut, lengths are checked before memory is taken, any bytes are fine."""

import contextlib
import struct
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format.wire import (
    GREETING_BYTES_MAX,
    HEADER_BYTES_MAX,
    PREAMBLE,
    PREFIX,
    PREFIX_BYTES,
    SCRATCH_BYTES,
    WireReader,
    prefix,
)

BODY_MAX = 1 << 20
Parts = list[tuple[int, bytes, bytes]]


def feed(reader: WireReader, data: bytes, cuts: Iterator[int]) -> Parts:
    """Give bytes to a reader as a socket does: never more than its window, in pieces as the cuts say."""
    found: Parts = []
    at = 0
    while at < len(data):
        window = reader.window()
        assert len(window), "a window is never empty"
        size = min(len(window), max(1, next(cuts)), len(data) - at)
        window[:size] = data[at : at + size]
        at += size
        found += [(number, header, bytes(body)) for number, header, body in reader.filled(size)]
    return found


def endless(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([4095, 4096, 8191, 8192, 8193, SCRATCH_BYTES - 1, SCRATCH_BYTES, 200_000]),
)
MESSAGES = st.lists(st.tuples(st.integers(0, 2**64 - 1), SIZES, SIZES), max_size=12)
CUTS = st.lists(st.one_of(st.integers(1, 40), st.sampled_from([4096, 65_536, 10**6])), min_size=1, max_size=9)


def content(size: int, seed: int) -> bytes:
    return struct.pack("<Q", seed) * (size // 8) + b"z" * (size % 8)


@settings(max_examples=50)
@given(MESSAGES, CUTS)
@example([(1, 5, 200_000), (2, 5, 200_000), (3, 5, 10)], [10**6])
@example([(1, 200_000, 0), (2, 70_000, 9000)], [1000])
def test_messages_survive_any_cut(messages: list[tuple[int, int, int]], cuts: list[int]) -> None:
    sent = [(number, content(header, 1), content(body, number % 1000)) for number, header, body in messages]
    data = b"".join(prefix(header, len(body), number) + body for number, header, body in sent)
    reader = WireReader(BODY_MAX)
    assert feed(reader, data, endless(cuts)) == sent
    assert not reader.partial
    assert (reader.partial_bytes, reader.expected_bytes) == (0, 0)


@settings(max_examples=30)
@given(st.integers(1, 30), CUTS)
def test_greeting_then_larger_messages(size: int, cuts: list[int]) -> None:
    reader = WireReader(0, preamble=PREAMBLE, header_bytes_max=GREETING_BYTES_MAX)
    steps = endless(cuts)
    hello = b"h" * size
    assert feed(reader, PREAMBLE + prefix(hello, 0, 0), steps) == [(0, hello, b"")]
    reader.body_bytes_max, reader.header_bytes_max = BODY_MAX, HEADER_BYTES_MAX
    body = b"b" * 100_000
    assert feed(reader, prefix(b"next", len(body), 7) + body, steps) == [(7, b"next", body)]


@given(st.binary(max_size=400), st.booleans(), CUTS)
def test_any_bytes_give_messages_or_a_clear_error(data: bytes, greeted: bool, cuts: list[int]) -> None:
    reader = WireReader(BODY_MAX, preamble=b"" if greeted else PREAMBLE, header_bytes_max=GREETING_BYTES_MAX)
    with contextlib.suppress(InvalidRequest, TooLarge):
        feed(reader, data, endless(cuts))
    assert len(reader._scratch) <= max(SCRATCH_BYTES, GREETING_BYTES_MAX + PREFIX_BYTES)


@pytest.mark.parametrize(
    ("lengths", "what"),
    [
        ((HEADER_BYTES_MAX + 1, 0), "a header of 1048577 bytes"),
        ((2**32 - 1, 0), "a header of 4294967295 bytes"),
        ((0, BODY_MAX + 1), "a body of 1048577 bytes"),
        ((5, 2**32 - 1), "a body of 4294967295 bytes"),
    ],
)
def test_lengths_above_the_limit_are_refused_from_the_prefix_alone(
    lengths: tuple[int, int], what: str
) -> None:
    reader = WireReader(BODY_MAX)
    scratch = len(reader._scratch)
    with pytest.raises(TooLarge, match=what):
        feed(reader, PREFIX.pack(*lengths, 1), endless([16]))
    assert len(reader._scratch) == scratch


def test_a_peer_that_answers_http_is_named() -> None:
    with pytest.raises(InvalidRequest, match="the peer answers in HTTP"):
        feed(WireReader(BODY_MAX), b"HTTP/1.1 400 Bad Request\r\n", endless([16]))


def test_lengths_at_the_limit_are_taken() -> None:
    reader = WireReader(BODY_MAX)
    header, body = b"h" * HEADER_BYTES_MAX, b"b" * BODY_MAX
    assert feed(reader, prefix(header, BODY_MAX, 1) + body, endless([10**6])) == [(1, header, body)]


@pytest.mark.parametrize("wrong", [b"GET / HTTP/1.1", b"TRLX", b"\x16\x03\x01", b"TRL\x00"])
def test_other_protocols_are_named_as_soon_as_they_differ(wrong: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the port of the native protocol"):
        feed(WireReader(0, preamble=PREAMBLE), wrong, endless([1]))


def test_progress_of_a_large_body_is_visible() -> None:
    size = 4 * BODY_MAX
    reader = WireReader(size)
    assert not reader.partial
    feed(reader, prefix(b"head", size, 1) + b"x", endless([10_000]))
    assert reader.partial
    assert reader.expected_bytes == size
    assert reader.partial_bytes == size // 2, "the buffer has its first huge page"
    feed(reader, b"x" * (size - 2), endless([100_000]))
    assert reader.partial_bytes == size - 1
    feed(reader, b"x", endless([1]))
    assert not reader.partial
    assert reader.partial_bytes == 0


def test_small_bodies_do_not_keep_the_scratch_buffer() -> None:
    """A body that is kept (in a queue, a log) must not change when the next bytes arrive."""
    reader = WireReader(BODY_MAX)
    ((_, _, first),) = list(_fill(reader, prefix(b"a", 5, 1) + b"first"))
    ((_, _, second),) = list(_fill(reader, prefix(b"a", 6, 2) + b"second"))
    assert (bytes(first), bytes(second)) == (b"first", b"second")


def _fill(reader: WireReader, data: bytes) -> Iterator[tuple[int, bytes, object]]:
    reader.window()[: len(data)] = data
    yield from reader.filled(len(data))
