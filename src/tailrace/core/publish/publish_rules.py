"""Rules of a publish: limits of a batch, options that a topic does not support, and delayed rows."""

from __future__ import annotations

import numpy as np

from tailrace.core.collections.hash_table import group_rows, present_rows
from tailrace.core.model.commands import Publish, Published
from tailrace.core.model.identifiers import (
    ANY_KEY_SEQUENCE,
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    HAS_DEDUP_ID,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    TIMESTAMP_AHEAD_US_MAX,
    BatchView,
    Refusal,
)
from tailrace.core.model.topic_options import DURABILITIES, TopicOptions
from tailrace.core.publish.dedup import DedupWindow, Filtered, Mask
from tailrace.core.publish.delayed_dedup import DelayedDedup
from tailrace.core.publish.producers import BatchResult
from tailrace.errors import InvalidRequest, TooLarge


def over_limit(view: BatchView, options: TopicOptions, wall_us: int) -> Refusal | None:
    """Refuse a batch that is above a limit, naming the first one."""
    if (
        view.nbytes <= BATCH_BYTES_MAX
        and 0 < view.count <= BATCH_ROWS_MAX
        and view.value_bytes_max <= options.message_bytes_max
        and view.key_bytes_max <= KEY_BYTES_MAX
        and view.header_bytes_max <= HEADER_BYTES_MAX
        and view.timestamp_max_us <= wall_us + TIMESTAMP_AHEAD_US_MAX
    ):
        return None
    if not view.count:
        return Refusal(InvalidRequest.code, "the batch has no messages")
    for what, size, most in (
        ("the batch has {} messages", view.count, BATCH_ROWS_MAX),
        ("the batch has {} bytes", view.nbytes, BATCH_BYTES_MAX),
        ("a key has {} bytes", view.key_bytes_max, KEY_BYTES_MAX),
        ("the headers of a message have {} bytes", view.header_bytes_max, HEADER_BYTES_MAX),
        ("a value has {} bytes (message_bytes_max)", view.value_bytes_max, options.message_bytes_max),
    ):
        if size > most:
            return Refusal(
                TooLarge.code,
                f"{what.format(size)}, the limit is {most}",
                details={"size": size, "limit": most},
            )
    ahead = view.timestamp_max_us - wall_us
    text = f"a timestamp lies {ahead} us ahead of the broker's clock, the limit is {TIMESTAMP_AHEAD_US_MAX}"
    return Refusal(InvalidRequest.code, text)


def unfit(publish: Publish, view: BatchView, options: TopicOptions) -> Refusal | None:
    """Refuse options of a request that this topic, or this release, does not support."""
    columns, expected = view.columns, publish.expected_key_sequences
    if columns & HAS_OFFSET_DELTA:
        return Refusal(InvalidRequest.code, "offset_delta is not for producers")
    if publish.acks is not None:
        if publish.acks not in DURABILITIES:
            return Refusal(
                InvalidRequest.code, f"acks is one of {', '.join(DURABILITIES)}, not {publish.acks[:80]!r}"
            )
        if DURABILITIES.index(publish.acks) > DURABILITIES.index(options.durability):
            text = f"acks = {publish.acks!r} is more than the topic's durability {options.durability!r}"
            return Refusal(InvalidRequest.code, text)
    if publish.expected_sequence < 0:
        return Refusal(
            InvalidRequest.code, f"expected_sequence is 0 or more, not {publish.expected_sequence}"
        )
    if expected is not None:
        if len(expected) != view.count:
            text = f"expected_key_sequences has {len(expected)} numbers for {view.count} messages"
            return Refusal(InvalidRequest.code, text)
        if not options.key_index and any(number != ANY_KEY_SEQUENCE for number in expected):
            return Refusal(InvalidRequest.code, "expected_key_sequences needs a topic with key_index = on")
        if not columns & HAS_KEY and any(number != ANY_KEY_SEQUENCE for number in expected):
            return Refusal(InvalidRequest.code, "expected_key_sequences needs messages with keys")
    assert view.dedup_ids is not None or not columns & HAS_DEDUP_ID, "the view lacks the dedup ids"
    assert view.keys is not None or not (options.key_index and columns & HAS_KEY), "the view lacks the keys"
    return None


def late_rows(view: BatchView, wall_us: int) -> Mask | None:
    """Which rows are delayed, that is due only after a wall time; None if there are none. Rows due in the
    past are due now."""
    if view.deliver_at_us is None:
        return None
    late: Mask = view.deliver_at_us > wall_us
    return late if late.any() else None


def unplaced(publish: Publish) -> Refusal | None:
    """Refuse expected sequences in a publish with delayed rows: those get their offsets only later."""
    expected = publish.expected_key_sequences or ()
    if not publish.expected_sequence and all(number == ANY_KEY_SEQUENCE for number in expected):
        return None
    what = "expected_sequence" if publish.expected_sequence else "expected_key_sequences"
    return Refusal(InvalidRequest.code, f"{what}: a delayed message has no place until it is due")


def mixed(found: Filtered) -> Refusal:
    rows = [row for row, _ in found.duplicates]
    text = f"expected_sequence with a batch of which only some messages are new: {len(rows)} are duplicates"
    return Refusal(InvalidRequest.code, text, details={"duplicates": rows[:100]})


def repeat_late(
    view: BatchView, late: Mask, result: BatchResult, known: DedupWindow, others: DelayedDedup
) -> Published:
    """The answer to a retry of a batch with delayed rows: its first result.

    Rows are delayed by the wall time of the first attempt, as then. A delayed row was a duplicate if its id
    was first stored at another time than this batch.
    """
    ids = view.dedup_ids
    if ids is None:
        return Published(result.base_offset, result.append_time_us, None, np.flatnonzero(late).tolist())
    stored = others.times(ids) == result.append_time_us
    given = present_rows(ids)
    stored[given[group_rows(ids[given]).rank > 0]] = False
    bare = np.ones(len(ids), np.bool_)
    bare[given] = False
    scheduled = late & (stored | bare)
    doubles, prompt = np.flatnonzero(late & ~scheduled), np.flatnonzero(~late)
    places = known.places(ids)
    places = np.where(places < 0, others.places(ids, result.append_time_us), places)
    duplicates = list(zip(doubles.tolist(), places[doubles].tolist(), strict=True))
    if result.base_offset < 0:
        duplicates += zip(prompt.tolist(), places[prompt].tolist(), strict=True)
    elif len(prompt) != result.count:
        again = known.recall(ids[prompt], result.base_offset, result.count)
        duplicates += [(int(prompt[row]), offset) for row, offset in again]
    duplicates.sort()
    base_offset = result.base_offset
    if not result.count:
        base_offset = duplicates[0][1] if duplicates else -1
    waits = np.flatnonzero(scheduled).tolist()
    return Published(base_offset, result.append_time_us, duplicates or None, waits or None)
