"""The fields of a message on their way into a batch: each is checked before it is buffered with others.

One bad message must not fail the batch that it would share, so everything that the broker would refuse is
refused here, by the name of the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from tailrace.client.messages import to_us
from tailrace.client.publish.partition_flow import PendingBatch
from tailrace.client.sdk_tuning import BATCH_BYTES, BATCH_ROWS, ROW_BYTES, TTL_S_MAX
from tailrace.core.model.identifiers import (
    ANY_KEY_SEQUENCE,
    DEDUP_ID_BYTES_MAX,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    TIMESTAMP_AHEAD_US_MAX,
)
from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c

Headers = Mapping[str, bytes] | Iterable[tuple[str, bytes]]
Delay = float | timedelta
"""Seconds, or a timedelta."""
Fields = dict[str, Any]
"""The fields that a message has, under the names of `_LISTS`, its `value`, and its `size` in a batch."""

_LISTS = {
    "key": "keys",
    "headers": "headers",
    "priority": "priorities",
    "timestamp": "timestamps",
    "deliver_at": "deliver_ats",
    "expires_at": "expires",
    "dedup_id": "dedup_ids",
}


def check_fields(
    value: Buffer | None,
    value_max: int,
    *,
    key: Buffer | None = None,
    headers: Headers | None = None,
    timestamp: datetime | int | None = None,
    priority: int | None = None,
    ttl: float | None = None,
    expires_at: datetime | int | None = None,
    dedup_id: Buffer | None = None,
    delay: Delay | None = None,
    deliver_at: datetime | int | None = None,
    now_us: int,
) -> Fields:
    """The fields that are there, as they will be stored; raises `InvalidRequest` or `TooLarge`. Spans of time
    count from `now_us`."""
    fields: Fields = {"value": value}
    size = value_bytes(value)
    if size > value_max:
        raise too_large("value", size, value_max)
    if key is not None:
        fields["key"] = key = _bytes(key, "key", KEY_BYTES_MAX)
        size += len(key)
    elif value is None:
        raise InvalidRequest("value: None (a tombstone) needs a key")
    if dedup_id is not None:
        fields["dedup_id"] = _bytes(dedup_id, "dedup_id", DEDUP_ID_BYTES_MAX)
    if headers is not None:
        fields["headers"], more = _headers(headers)
        size += more
    if priority is not None:
        if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
            raise InvalidRequest(f"priority: 0 to {PRIORITY_MAX}, not {priority!r}")
        fields["priority"] = priority
    if delay is not None or deliver_at is not None:
        add_delay(fields, delay, deliver_at, now_us)
    if timestamp is not None or ttl is not None or expires_at is not None:
        _check_times(fields, timestamp, ttl, expires_at, now_us)
    fields["size"] = size + ROW_BYTES
    return fields


def add_delay(fields: Fields, delay: Delay | None, deliver_at: datetime | int | None, now_us: int) -> None:
    """Say when a message is due, unless that is at once; refuses what is no time."""
    if delay is None:
        assert deliver_at is not None
        at_us = to_us(deliver_at, "deliver_at", InvalidRequest)
    else:
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        if deliver_at is not None or type(seconds) not in (int, float) or not seconds >= 0:
            raise InvalidRequest(
                "delay: seconds (0 or more) or a timedelta, and not together with deliver_at"
            )
        if not seconds:
            return
        if not seconds < (arrow.TIME_US_END - now_us) / 1e6:
            raise InvalidRequest("delay: too far, it would end after the year 9999")
        at_us = now_us + math.ceil(seconds * 1e6)
    if not 0 <= at_us < arrow.TIME_US_END:
        raise InvalidRequest("deliver_at: a time between the years 1970 and 9999")
    fields["deliver_at"] = at_us


def _check_times(
    fields: Fields,
    timestamp: datetime | int | None,
    ttl: float | None,
    expires_at: datetime | int | None,
    now_us: int,
) -> None:
    if timestamp is not None:
        fields["timestamp"] = at_us = to_us(timestamp, "timestamp", InvalidRequest)
        if not 0 <= at_us <= now_us + TIMESTAMP_AHEAD_US_MAX:
            raise InvalidRequest("timestamp: before 1970, or more than an hour ahead")
    if ttl is not None:
        if expires_at is not None or not isinstance(ttl, int | float) or not 0 < ttl < TTL_S_MAX:
            raise InvalidRequest("ttl: a positive number of seconds, and not together with expires_at")
        fields["expires_at"] = now_us + int(ttl * 1e6)
    elif expires_at is not None:
        fields["expires_at"] = to_us(expires_at, "expires_at", InvalidRequest)
    if not 0 <= fields.get("expires_at", 0) < arrow.TIME_US_END:
        raise InvalidRequest("expires_at: a time between the years 1970 and 9999")


def check_expectations(sequence: int, key_sequence: int | None) -> None:
    """Refuse expectations that no log could meet; of a key, -1 means any number."""
    if type(sequence) is not int or sequence < 0:
        raise InvalidRequest(f"expected_sequence: 0 (append) or the sequence to take, not {sequence!r}")
    if key_sequence is not None and (type(key_sequence) is not int or key_sequence < ANY_KEY_SEQUENCE):
        raise InvalidRequest(f"expected_key_sequence: how many the key has so far, not {key_sequence!r}")


def value_bytes(value: Any) -> int:
    """Length of a value; refuses what is no bytes."""
    if value is None:
        return 0
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    raise InvalidRequest(f"value: bytes are needed, not {type(value).__name__}; encode it first")


def fitting(values: Sequence[Buffer | None], at: int, value_max: int) -> tuple[int, int]:
    """How many of the values make the next batch, and its size; refuses what is no message."""
    chunk = values if not at and len(values) <= BATCH_ROWS else values[at : at + BATCH_ROWS]
    if set(map(type, chunk)) == {bytes}:
        lengths = list(map(len, chunk))  # type: ignore[arg-type]
    else:
        lengths = [value_bytes(value) for value in chunk]
        if None in chunk:
            raise InvalidRequest("value: None (a tombstone) needs a key")
    if max(lengths) > value_max:
        raise too_large("value", max(lengths), value_max)
    size = sum(lengths) + ROW_BYTES * len(chunk)
    if size <= 8 * BATCH_BYTES:
        return len(chunk), size
    total = rows = 0
    for length in lengths:
        if rows and total + length > 8 * BATCH_BYTES:
            break
        total += length + ROW_BYTES
        rows += 1
    return rows, total


def too_large(what: str, size: int, limit: int) -> TooLarge:
    """The error that names a field above its limit."""
    return TooLarge(f"{what}: {size} bytes, the limit is {limit}", limit=limit)


def _bytes(data: Any, what: str, limit: int) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidRequest(f"{what}: bytes are needed, not {type(data).__name__}; encode it first")
    if len(data) > limit:
        raise too_large(what, len(data), limit)
    return bytes(data)


def _headers(headers: Any) -> tuple[list[tuple[str, bytes]], int]:
    """The pairs and their bytes."""
    if not isinstance(headers, Iterable):
        raise InvalidRequest(f"headers: a mapping or pairs are needed, not {type(headers).__name__}")
    pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
    size = 0
    for pair in pairs:
        match pair:
            case (str(name), bytes(data)):
                size += len(data)
            case _:
                raise InvalidRequest(f"headers: pairs of str and bytes are needed, not {pair!r}")
        try:
            size += len(name.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"headers: the name {name!r} is no Unicode text: {error}") from None
    if size > HEADER_BYTES_MAX:
        raise too_large("headers", size, HEADER_BYTES_MAX)
    return pairs, size


def add_fields(batch: PendingBatch, fields: Fields) -> None:
    """Append a message to the parallel lists of a batch; a list begins when a message first needs it."""
    row = len(batch.values)
    batch.values.append(fields["value"])
    if len(fields) == 2:
        return  # Nothing but the value.
    batch.fielded = True
    for field, slot in _LISTS.items():
        item = fields.get(field)
        if item is not None:
            column = getattr(batch, slot)
            if column is None:
                column = []
                setattr(batch, slot, column)
            column.extend([None] * (row - len(column)))
            column.append(item)


def are_alike(values: Sequence[Any], keys: Sequence[Any] | None, priorities: Sequence[Any] | None) -> bool:
    """Whether all values are bytes with good keys and priorities, which is the rule and quickly told. When
    they are not, somebody has to look at each for what is wrong with it, if anything is."""
    if set(map(type, values)) != {bytes}:
        return False
    if keys is not None and (
        len(keys) != len(values) or set(map(type, keys)) != {bytes} or max(map(len, keys)) > KEY_BYTES_MAX
    ):
        return False
    return priorities is None or (
        len(priorities) == len(values)
        and set(map(type, priorities)) == {int}
        and min(priorities) >= 0
        and max(priorities) <= PRIORITY_MAX
    )


def add_columns(
    batch: PendingBatch,
    at: int,
    keys: Sequence[Any] | None,
    priorities: Sequence[int] | None,
    deliver_at_us: int | None,
) -> int:
    """Fill the lists beside the values of a batch from place `at` of columns that were checked; bytes that
    this adds."""
    rows, more = len(batch.values), 0
    if deliver_at_us is not None:
        batch.deliver_ats, batch.fielded = [deliver_at_us] * rows, True
    if priorities is not None:
        batch.priorities, batch.fielded = list(priorities[at : at + rows]), True
    if keys is not None:
        batch.keys, batch.fielded = list(keys[at : at + rows]), True
        more = sum(map(len, batch.keys))
    return more


def encode_batch(batch: PendingBatch, ids: bytes, compression: str | None, now_us: int) -> None:
    """Turn the lists of a batch into its body; `now_us` is the time of messages without one."""
    values, rows = batch.values, len(batch.values)
    batch.ids = ids
    if not batch.fielded and compression is None:
        if rows == 1 and type(values[0]) is bytes:
            batch.body = arrow.encode_one(values[0], ids, now_us)
        else:
            batch.columns, batch.body = arrow.encode(values, ids=ids, timestamps=now_us)
        batch.crc = crc32c(batch.body)
        return
    timestamps: Any = now_us
    if batch.timestamps is not None:
        given = _whole(batch.timestamps, rows)
        timestamps = [now_us if time_us is None else time_us for time_us in given]
    priorities = batch.priorities
    if priorities is not None:
        given = _whole(priorities, rows)
        priorities = [PRIORITY_DEFAULT if priority is None else priority for priority in given]
    batch.columns, batch.body = arrow.encode(
        values,
        ids=ids,
        timestamps=timestamps,
        keys=_whole(batch.keys, rows),
        headers=_whole(batch.headers, rows),
        priorities=priorities,
        deliver_at=batch.deliver_ats,
        expires_at=_whole(batch.expires, rows),
        dedup_ids=_whole(batch.dedup_ids, rows),
        compression=compression,
    )
    batch.crc = crc32c(batch.body)


def _whole(column: list[Any] | None, rows: int) -> Any:
    """A column as long as the batch: messages behind the last that used it have none."""
    if column is not None and len(column) < rows:
        column.extend([None] * (rows - len(column)))
    return column
