"""Watch over the space of the data folder: tells when it runs low, when it is full, and when that is over.

    low     less is free than the option asks, or than a tenth of a small file system: a warning
    full    some write found no space, or at the start there was no room for the reserve

While the disk is full, requests that bring messages (publish, stage, create a topic) are refused with `Full`
and outcome none before they reach a log, and delayed messages are not released. The reserve is released part
by part, so that everything else continues: leases, acknowledgements, trims, deletions, snapshots. Retention
is applied every few seconds. Full ends when three times the reserve is free and the reserve is held again, so
that a disk on the brink does not change its state every second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.pump import Pump
from tailrace.errors import Full
from tailrace.ports import Room, SpaceGauge

log = logging.getLogger("tailrace.storage")

CHECK_US = 1_000_000
LOW_SHARE = 10
"""The bound for "low" is at most one part in this many of the file system, whatever the option says."""
RESUME = 3
"""Full ends when this many reserves are free, one of which is held from then on."""
FULL_US_MIN = 3_000_000
"""Least duration of "full"; a message larger than the free space would begin and end it again and again."""
FREE_US = 2_000_000
"""Period of retention while the disk is full."""
RETRY_AFTER_MS = 1000
MIB = 1024 * 1024


class SpaceWatch:
    """Watches the space of one node. All methods except `open` run on the pump's thread."""

    def __init__(
        self,
        pump: Pump,
        metrics: Metrics,
        gauge: SpaceGauge | None,
        low_bytes: int,
        free: Callable[[], None],
    ) -> None:
        self._pump = pump
        self._metrics = metrics
        self._gauge = gauge
        self._low_bytes = low_bytes
        self._free = free
        """Called while the disk is full: apply retention now."""
        self._room = Room(0, 0, 0)
        self._since_us = self._freed_us = 0
        self._low = False
        self._checking = self._releasing = False

    def open(self) -> None:
        """Take the reserve, before the logs are opened; without room for it the disk is full. Blocking."""
        if self._gauge is not None:
            self._room = self._gauge.measure()
            if not self._gauge.hold():
                self._begin()

    def start(self) -> None:
        """Begin to watch."""
        if self._gauge is not None:
            self._note(self._room)
            self._pump.every(CHECK_US, lambda now_us: self._check())

    def filled(self) -> None:
        """A write found no space: release a part of the reserve for the writes that still go on."""
        if self._gauge is None or self._releasing:
            return
        if not self._pump.full:
            self._measure_now()
            self._begin()
        self._releasing = True
        self._pump.threads.run(self, self._gauge.release, self._released)
        self._check()

    def _released(self, result: object, error: Exception | None) -> None:
        if error is not None:
            log.error("the reserve cannot be let go: %s", error)
        self._pump.at(self._pump.clock.now_us() + CHECK_US, self._may_release)

    def _may_release(self, now_us: int) -> None:
        self._releasing = False

    def _measure_now(self) -> None:
        assert self._gauge is not None
        try:
            self._note(self._gauge.measure())
        except OSError as error:
            log.error("the room of the data folder cannot be told: %s", error)

    def _begin(self) -> None:
        self._pump.refuse_messages(True)
        self._since_us = self._pump.clock.now_us()
        self._freed_us = 0
        self._measured()
        log.error("%s", self.trouble)

    @property
    def trouble(self) -> str | None:
        """Why publishing is refused; None if it is not."""
        if not self._pump.full:
            return None
        return (
            f"no space is left on the disk of the data folder ({self._text()}): publishing is refused, "
            "reading and acknowledging go on; free space, trim or delete topics, and publishing goes on by "
            "itself"
        )

    def warnings(self) -> list[str]:
        """A warning if space is low."""
        if not self._low or self._pump.full:
            return []
        return [f"space is running low on the disk of the data folder: {self._text()}"]

    def _text(self) -> str:
        return f"{self._room.free_bytes // MIB:,} MiB free of {self._room.total_bytes // MIB:,}"

    def refuse(self) -> None:
        """Raise `Full` while publishing is refused."""
        if self._pump.full:
            raise Full(f"nothing was stored: {self.trouble}", retry_after_ms=RETRY_AFTER_MS)

    # -- looking

    def _check(self) -> None:
        """Measure the room, on a thread because a file system may be slow."""
        if self._checking or self._gauge is None:
            return
        self._checking = True
        gauge, now_us = self._gauge, self._pump.clock.now_us()
        if self._pump.full and now_us >= self._freed_us + FREE_US:
            self._freed_us = now_us
            self._free()
        late = self._pump.full and now_us - self._since_us >= FULL_US_MIN
        self._pump.threads.run(self, partial(_look, gauge, late), self._looked)

    def _looked(self, found: Any, error: Exception | None) -> None:
        self._checking = False
        if error is not None:
            log.error("the room of the data folder cannot be told: %s", error)
            return
        room, over = found
        self._note(room)
        if over:
            self._end()

    def _end(self) -> None:
        self._pump.refuse_messages(False)
        self._measured()
        seconds = (self._pump.clock.now_us() - self._since_us) / 1e6
        log.warning("there is space again (%s): publishing goes on after %.0f s", self._text(), seconds)

    def _note(self, room: Room) -> None:
        self._room = room
        limit = min(self._low_bytes, room.total_bytes // LOW_SHARE)
        if not self._low and room.free_bytes < limit:
            self._low = True
            for text in self.warnings():
                log.warning("%s", text)
        elif self._low and room.free_bytes > limit + limit // 10:
            self._low = False
            log.info("space is not low any more: %s", self._text())
        self._measured()

    def _measured(self) -> None:
        room = self._room
        self._metrics.storage(
            full=self._pump.full, low=self._low, free_bytes=room.free_bytes, total_bytes=room.total_bytes
        )


def _look(gauge: SpaceGauge, late: bool) -> tuple[Room, bool]:
    """The room of the data folder, and whether a full disk is full no more; blocking."""
    room = gauge.measure()
    return room, late and room.free_bytes >= RESUME * room.reserve_bytes and gauge.hold()
