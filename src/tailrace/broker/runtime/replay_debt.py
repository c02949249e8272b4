"""Replay debt: the time a restart would spend on replay, estimated per partition and bounded by snapshots.

A restart loads the newest snapshot of each partition and replays the frames after it, one partition after the
other. So the node bounds the *sum* of those replays. Two kinds of frames count: those written since the last
snapshot, and those that the last start had to replay. Without the second kind, a broker that is killed again
and again would replay more at every start and never come to take a snapshot.

The estimate counts frames and bytes with the costs `FRAME_US`, `FACT_BYTE_US` and `DATA_BYTE_US`. It reads no
clock, so the same load leads to the same snapshots. For example, 600 facts frames of 500 bytes each cost
600 * (50 + 500 * 0.2) = 90,000 µs.

`due` chooses the partitions that take a snapshot, and bounds what snapshots cost:

* below `us_max` for the whole node nothing happens; above it, the partitions that owe most take a snapshot,
  until the others owe half of `us_max` at most;
* a snapshot has to save at least `us_min`, because it costs a few syncs;
* a partition writes at most one byte of snapshots per two bytes of log, and one snapshot per `REST_US`;
* at most `UNDER_WAY_MAX` snapshots are stored at the same time.

With `us_max` = 150,000 and `us_min` = 5,000:

    partition         a        b        c       d        sum
    owes (µs)         90,000   50,000   27,000  3,000    170,000   more than us_max
    a pays            0        50,000   27,000  3,000     80,000   more than us_max / 2, so one more
    b pays            0        0        27,000  3,000     30,000   enough

So after SIGKILL a start replays for about `us_max`, plus the debt that no snapshot could pay yet: less than
`us_min` per partition, the frames of the last `REST_US`, and, for a partition with a large state, as much log
as two snapshots of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from tailrace.format.frame import DATA, FACTS, SCHEDULED, STAGED, Header

REST_US = 1_000_000
FAILED_REST_US = 60_000_000
"""Time without another try after a snapshot that could not be stored."""
UNDER_WAY_MAX = 2
LOG_BYTES_PER_SNAPSHOT_BYTE = 2

FRAME_US = {DATA: 25, SCHEDULED: 150, STAGED: 50, FACTS: 50}
"""Microseconds to read, check and apply a frame, by kind; measured on a slow core, with small batches."""
OTHER_FRAME_US = 10
FACT_BYTE_US = 0.2
DATA_BYTE_US = 0.001


class ReplayBounds(msgspec.Struct, frozen=True):
    """Bounds on the replay of a node, in microseconds; lower in simulations, whose logs are short."""

    us_max: int = 150_000
    """All partitions together."""
    us_min: int = 5_000
    """Least debt that is worth a snapshot."""


class ReplayDebt:
    """Cost of the frames after the newest snapshot of one partition."""

    __slots__ = ("bytes", "rest_until_us", "snapshot_bytes", "us")

    def __init__(self, snapshot_bytes: int = 0) -> None:
        self.us = 0.0
        self.bytes = 0
        self.snapshot_bytes = snapshot_bytes
        self.rest_until_us = 0

    def add(self, header: Header) -> None:
        """Count one more frame to replay."""
        kind, size = header.kind, header.size
        self.bytes += size
        self.us += FRAME_US.get(kind, OTHER_FRAME_US) + size * (
            FACT_BYTE_US if kind == FACTS else DATA_BYTE_US
        )

    def pay(self, now_us: int) -> None:
        """A snapshot of everything so far begins: the debt is paid."""
        self.us = 0.0
        self.bytes = 0
        self.rest_until_us = now_us + REST_US

    def stored(self, snapshot_bytes: int) -> None:
        """The newest snapshot, which is stored, has this size."""
        self.snapshot_bytes = snapshot_bytes

    def owe(self, us: float, size: int, now_us: int) -> None:
        """The snapshot failed: the frames that it would have covered count again."""
        self.us += us
        self.bytes += size
        self.rest_until_us = now_us + FAILED_REST_US

    def worth_it(self, now_us: int, us_min: int) -> bool:
        """Whether a snapshot saves more than it costs."""
        return (
            self.us >= us_min
            and self.bytes >= LOG_BYTES_PER_SNAPSHOT_BYTE * self.snapshot_bytes
            and now_us >= self.rest_until_us
        )


class Debtor(Protocol):
    """Of a partition that may take a snapshot of itself: its maintenance."""

    debt: ReplayDebt
    """Cost of its replay."""

    @property
    def saving(self) -> bool:
        """Whether a snapshot is under way."""
        ...


Owing = TypeVar("Owing", bound=Debtor)


def due(partitions: Iterable[Owing], now_us: int, bounds: ReplayBounds) -> list[Owing]:
    """Choose the partitions of a node that should take a snapshot now, the greatest debt first."""
    owing = [partition for partition in partitions if partition.debt.us > 0]
    left_us = sum(partition.debt.us for partition in owing)
    if left_us <= bounds.us_max:
        return []
    free = UNDER_WAY_MAX - sum(partition.saving for partition in owing)
    chosen: list[Owing] = []
    for partition in sorted(owing, key=lambda partition: -partition.debt.us):
        if len(chosen) >= free or left_us <= bounds.us_max / 2:
            break
        if not partition.saving and partition.debt.worth_it(now_us, bounds.us_min):
            chosen.append(partition)
            left_us -= partition.debt.us
    return chosen
