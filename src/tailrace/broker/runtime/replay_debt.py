"""What a restart would have to replay: estimated per partition, and bounded by snapshots where most is owed.

A restart loads the newest snapshot of a partition and replays the frames behind it, one partition after the
other. So the node keeps the *sum* of those replays small, whoever caused them: frames that were written since
the last snapshot, and frames that the last start replayed already. Without the second half a broker that is
killed again and again would replay more at every start, and never reach the point at which it takes a
snapshot.

The estimate counts frames and bytes with the times of `FRAME_US`, `FACT_BYTE_US` and `DATA_BYTE_US`. It reads
no clock: the same load leads to the same snapshots.

`due` bounds the price, too:

* nothing happens while the whole node would replay for less than `us_max`; above it, those that owe most are
  first, until the rest is half of it;
* a snapshot has to save at least `us_min`: it costs a few syncs;
* a partition writes at most one byte of snapshots for two bytes of log, and one snapshot in `REST_US`;
* at most `UNDER_WAY_MAX` partitions store one at the same time.

So after SIGKILL a start replays for about `us_max`, plus what could not be worth a snapshot yet: below
`us_min` for each partition, the frames of the last `REST_US`, and for a partition with a large state as much
log as two snapshots of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from tailrace.format.frame import DATA, FACTS, SCHEDULED, STAGED, Header

REST_US = 1_000_000
FAILED_REST_US = 60_000_000
"""After a snapshot that could not be stored."""
UNDER_WAY_MAX = 2
LOG_BYTES_PER_SNAPSHOT_BYTE = 2

FRAME_US = {DATA: 25, SCHEDULED: 150, STAGED: 50, FACTS: 50}
"""Microseconds to read, check and apply a frame, by kind; measured on a slow core, with small batches."""
OTHER_FRAME_US = 10
FACT_BYTE_US = 0.2
DATA_BYTE_US = 0.001


class ReplayBounds(msgspec.Struct, frozen=True):
    """How much a node may have to replay, in microseconds; less in simulations, whose logs are short."""

    us_max: int = 150_000
    """All partitions together."""
    us_min: int = 5_000
    """What a snapshot has to save."""


class ReplayDebt:
    """What lies behind the newest snapshot of one partition."""

    __slots__ = ("bytes", "rest_until_us", "snapshot_bytes", "us")

    def __init__(self, snapshot_bytes: int = 0) -> None:
        self.us = 0.0
        self.bytes = 0
        self.snapshot_bytes = snapshot_bytes
        self.rest_until_us = 0

    def add(self, header: Header) -> None:
        """One more frame to replay."""
        kind, size = header.kind, header.size
        self.bytes += size
        self.us += FRAME_US.get(kind, OTHER_FRAME_US) + size * (
            FACT_BYTE_US if kind == FACTS else DATA_BYTE_US
        )

    def pay(self, now_us: int) -> None:
        """A snapshot of everything so far is begun."""
        self.us = 0.0
        self.bytes = 0
        self.rest_until_us = now_us + REST_US

    def owe(self, us: float, size: int, now_us: int) -> None:
        """That snapshot came to nothing: what it would have covered counts again."""
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
    """A partition that may take a snapshot of itself."""

    debt: ReplayDebt

    @property
    def saving(self) -> bool:
        """Whether a snapshot is under way."""
        ...


Owing = TypeVar("Owing", bound=Debtor)


def due(partitions: Iterable[Owing], now_us: int, bounds: ReplayBounds) -> list[Owing]:
    """Which partitions of a node should take a snapshot now, those that owe most first."""
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
