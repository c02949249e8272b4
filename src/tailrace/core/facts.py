"""Facts: what the log of a partition says has happened; replaying them is the only way that state changes.

`Appended` is never encoded: it is a data frame, made again from the frame's header and body at replay. All
others are small and share facts frames. The number in front of an encoded fact is its tag: stored bytes
depend on it, so tags are never given twice. Fields are only ever added at the end, with a default.
"""

from __future__ import annotations

import msgspec

from tailrace.core.model import BatchView


class Appended(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A batch took the offsets [base_offset, base_offset + view.count)."""

    base_offset: int
    view: BatchView
    append_time_us: int
    producer_id: int = 0
    producer_epoch: int = 0
    producer_sequence: int = 0


class ProducerClaimed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A named producer was taken over: lower epochs are fenced, the next batch has sequence 0."""

    producer_id: int
    epoch: int
    time_us: int


class ProducerAdvanced(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A batch consisted of duplicates only: its sequence is used up, nothing was appended.

    `base_offset` is the end of the partition at that moment and `count` is 0.
    """

    producer_id: int
    epoch: int
    sequence: int
    base_offset: int
    count: int
    time_us: int


class Trimmed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Everything below `offset` is gone."""

    offset: int


Fact = ProducerClaimed | ProducerAdvanced | Trimmed
"""What a facts frame holds, for the codec; `Appended` has frames of its own."""
