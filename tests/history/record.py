"""Histories: what clients saw, one row per operation, and payloads that prove themselves.

Every value is `process-counter-padding-checksum`. A history is recorded on the client's side only, by one
monotonic clock, with three outcomes: `ok`, `fail` (certainly without effect) and `unknown`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

Outcome = Literal["ok", "fail", "unknown"]


class Value(NamedTuple):
    """Who sent a message, and the how-many-eth of that sender's it is."""

    process: str
    counter: int


def encode_value(value: Value, padding: int = 0) -> bytes:
    """A payload that says what it is and has a checksum."""
    head = b"%s-%d-%s-" % (value.process.encode(), value.counter, b"x" * padding)
    return head + b"%08x" % zlib.crc32(head)


def decode_value(payload: bytes | None) -> Value | None:
    """The value of a payload; None when it is not one that was made here, or was changed."""
    if payload is None or len(payload) < 9 or payload[-8:] != b"%08x" % zlib.crc32(payload[:-8]):
        return None
    process, counter, _, _ = payload.decode().split("-", 3)
    return Value(process, int(counter))


class Sent(msgspec.Struct, frozen=True):
    """A send and what the client was told; partition and offset are there when the outcome is ok."""

    value: Value
    topic: str
    outcome: Outcome
    partition: int | None = None
    offset: int | None = None
    call_ns: int = 0
    return_ns: int = 0


class Read(msgspec.Struct, frozen=True):
    """A message as one reader got it; `value` None: the payload was damaged."""

    reader: str
    topic: str
    partition: int
    offset: int
    value: Value | None
    at_ns: int = 0


class Drained(msgspec.Struct, frozen=True):
    """The complete content of a partition at the end: from `start` to `end`, as one reader got it."""

    topic: str
    partition: int
    start: int
    end: int
    reader: str


Row = Sent | Read | Drained


class History:
    """Rows in the order in which they were noted."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.rows: list[Row] = list(rows)

    def note(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)

    @property
    def sends(self) -> list[Sent]:
        """All sends."""
        return [row for row in self.rows if isinstance(row, Sent)]

    @property
    def reads(self) -> list[Read]:
        """All reads."""
        return [row for row in self.rows if isinstance(row, Read)]

    @property
    def drains(self) -> list[Drained]:
        """What was read to the end."""
        return [row for row in self.rows if isinstance(row, Drained)]


def now_ns() -> int:
    """The one clock of a history."""
    return time.monotonic_ns()
