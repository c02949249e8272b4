"""Bodies of a few rows in plain Python: the check of a foreign one, and the values of one that is read.

Opening a batch in pyarrow and checking it with numpy costs the same for one row as for hundreds, so a client
that publishes one message at a time would pay mostly for that. Bodies of few rows with only ids, values,
times and keys, as this SDK writes them, are proved here. All others, and all that seem wrong, go through
`batch.open_body`, which also words the refusal. Consumers that lease such messages pay for the same reason;
they get the values by `plain_rows`.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from tailrace.core.model.identifiers import HAS_KEY, KEY_BYTES_MAX, VALUE_BYTES_MAX, BatchView
from tailrace.errors import TailraceError
from tailrace.format.batch import TIME_US_END, open_body
from tailrace.format.frame import Buffer
from tailrace.format.message import MessageLayout, head_bytes, inspect

ROWS_MAX = 8
BYTES_MAX = 64 * 1024


def measure(body: Buffer, columns: int, *, want_keys: bool = False) -> BatchView:
    """Prove that a foreign body is valid and within all limits; raises `InvalidRequest` or `TooLarge`."""
    if columns & ~HAS_KEY == 0 and not want_keys and len(body) <= BYTES_MAX:
        view = _quick(body, columns)
        if view is not None:
            return view
    return open_body(body, columns, want_keys=want_keys)[0]


class PlainRows(NamedTuple):
    """A body that is proved, and its values."""

    body: Buffer
    values: list[bytes]


def plain_rows(body: Buffer, columns: int) -> PlainRows | None:
    """The rows of a body that is proved here; None if it is not, and has to be opened by `batch.decode`."""
    if columns & ~HAS_KEY or len(body) > BYTES_MAX:
        return None
    message = _shape(bytes(body[: head_bytes(columns)]), len(body), columns)
    if message is None or _measured(body, columns, message) is None:
        return None
    start, buffers = message.start, message.buffers
    ends = struct.unpack_from(f"<{message.rows + 1}i", body, start + buffers[6])
    at = start + buffers[8]
    return PlainRows(body, [bytes(body[at + first : at + end]) for first, end in pairwise(ends)])


@lru_cache(maxsize=1024)
def _shape(head: bytes, size: int, columns: int) -> MessageLayout | None:
    """The layout of a body of `size` bytes by its head; None if it is not one for this module. The messages
    of a producer have few different heads, so each is inspected once.
    """
    try:
        message = inspect(head + bytes(size - len(head)), columns)
    except TailraceError:
        return None
    rows = message.rows
    if rows > ROWS_MAX or not message.own or message.nodes != (rows, 0) * (len(message.nodes) // 2):
        return None
    lengths = message.buffers[1::2]
    # Per column: validity and data of the id; validity, offsets and data of columns of variable length.
    if lengths[1] < 16 * rows or lengths[6] < 8 * rows:
        return None
    if columns & HAS_KEY and lengths[11] < 8 * rows:
        return None
    return message


def _quick(body: Buffer, columns: int) -> BatchView | None:
    message = _shape(bytes(body[: head_bytes(columns)]), len(body), columns)
    return None if message is None else _measured(body, columns, message)


def _measured(body: Buffer, columns: int, message: MessageLayout) -> BatchView | None:
    rows = message.rows
    value_max = _longest(body, message, 3)
    if not 0 <= value_max <= VALUE_BYTES_MAX:
        return None
    key_max = 0
    if columns & HAS_KEY:
        key_max = _longest(body, message, 8)
        if not 0 <= key_max <= KEY_BYTES_MAX:
            return None
    times = struct.unpack_from(f"<{rows}q", body, message.start + message.buffers[12])
    greatest = max(times)
    if min(times) < 0 or greatest >= TIME_US_END:
        return None
    return BatchView(rows, columns, len(body), greatest, key_max, 0, value_max)


def _longest(body: Buffer, message: MessageLayout, buffer: int) -> int:
    """Length of the longest item of the column with these offsets; -1 if the offsets are invalid."""
    buffers = message.buffers
    if buffers[2 * buffer + 1] < 4 * message.rows + 4:
        return -1
    offsets = struct.unpack_from(f"<{message.rows + 1}i", body, message.start + buffers[2 * buffer])
    before = offsets[0]
    longest = 0
    if before < 0:
        return -1
    for after in offsets[1:]:
        if after < before:
            return -1
        longest = max(longest, after - before)
        before = after
    return longest if before <= buffers[2 * buffer + 3] else -1
