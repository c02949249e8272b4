"""How fast an application takes messages, and so how many to lease for it: by time, not by count.

A member should hold what it handles in about `AHEAD_MS`: less, and a fast handler waits for the network;
more, and others of its group idle while messages lie here. The time for a message is measured as it goes. It
starts so that one message is held. A slow sample counts at once, a quick one for three quarters, so that the
number held grows at most fourfold with each: 1, 4, 16, … Nor is a message believed to take less than on the
average, because slow and quick ones may be mixed. The messages that handlers have count as held.

A batch has a cost of its own beside that of its messages (a transaction, most often). Only the latter says
how large a batch may be: it is the difference between two batches of different sizes. So a consumer of
batches whose handler takes 200 ms for 1 message and 201 ms for 2 soon gets hundreds, and one whose handler
takes 200 ms for each message gets one.
"""

from __future__ import annotations

AHEAD_MS = 100.0
_SHARE_OF_QUICK = 0.75
_SHARE = 1 / 4
_SHARE_OF_WORKER = 1 / 16
"""What one sample counts for in the average."""
_QUICK_MS = 1.0
_QUICK_MAX = 32
"""What takes less than that is reckoned with together, so many at once."""
_MESSAGE_MS_MIN = 1e-4
_GROWTH = 4
_ALIKE = 1.5
"""Batches whose sizes differ by less than this factor say nothing about the cost of a message."""
_DOUBT = 0.9
"""What is known of that cost is believed less with each batch that says nothing about it."""


class Pace:
    """The pace of one consumer. `busy` handlers have a message each, `takers` wait for one."""

    def __init__(self) -> None:
        self.message_ms = AHEAD_MS
        self.average_ms = 0.0
        """The same without caution: what is in hand is judged by it."""
        self._latest_ms = AHEAD_MS
        self.busy = 0
        self.takers = 0
        self.behind = 0
        """Messages that came since one could be started last: all of them wait behind their keys."""
        self.workers = 0
        """Handlers that run side by side, when it is the consumer who calls them; else 0."""
        self._quick = 0
        self._quick_ms = 0.0
        self._batch = 0
        self._compared: tuple[int, float] | None = None
        self._batch_message_ms: float | None = None
        self._batch_count = 0

    def took(self, count: int, ms: float) -> None:
        """The application took messages, and comes back for more after this time."""
        self._measured(ms / count, _SHARE)
        self._batch = self._batch_count = 0

    def worked(self, ms: float) -> None:
        """One of several handlers had a message for this time. Quick ones gather: to reckon with each would
        take longer than some of them."""
        if ms < _QUICK_MS:
            self._quick += 1
            self._quick_ms += ms
            if self._quick == _QUICK_MAX:
                self._reckon()
            return
        self._reckon()
        self._measured(ms / self.workers, _SHARE_OF_WORKER)

    def _reckon(self) -> None:
        """Those that have gathered count as so many of the same time."""
        count = self._quick
        if count:
            share = 1 - (1 - _SHARE_OF_WORKER) ** count
            self._measured(self._quick_ms / (count * max(1, self.workers)), share)
            self._quick, self._quick_ms = 0, 0.0

    def took_batch(self, count: int, ms: float) -> None:
        """The application took a batch, and comes back for another after this time."""
        self._measured(ms / count, _SHARE)
        self._batch = count
        self._batch_count = min(_fitting(self._cost_in(count, ms)), count * _GROWTH)

    def ahead(self) -> int:
        """How many messages to hold beside those that handlers have."""
        self._reckon()
        return max(0, int(AHEAD_MS / self.message_ms) - max(1, self.busy, self._batch))

    def wanted(self) -> int:
        """How many messages to ask for when none is at hand and somebody waits."""
        if self._batch_count:
            return self._batch_count
        self._reckon()
        return max(1, self.takers + self.behind, int(AHEAD_MS / self.message_ms) - self.busy)

    def _measured(self, ms: float, share: float) -> None:
        known = self._latest_ms
        self._latest_ms = ms if ms > known else known + (ms - known) * _SHARE_OF_QUICK
        self.average_ms += (ms - self.average_ms) * share
        self.message_ms = max(_MESSAGE_MS_MIN, self._latest_ms, self.average_ms)

    def _cost_in(self, count: int, ms: float) -> float:
        """What each further message adds to the time of a batch."""
        before, self._compared = self._compared, (count, ms)
        if before is None:
            # Nothing to compare with: a second message is worth a try.
            return AHEAD_MS / (2 * count)
        known = self._batch_message_ms
        if max(count, before[0]) >= _ALIKE * min(count, before[0]):
            cost = max(0.0, (ms - before[1]) / (count - before[0]))
            if known is not None and cost < known:
                cost = known + (cost - known) * _SHARE_OF_QUICK
        elif known is None:
            return AHEAD_MS / (2 * count)
        else:
            # A batch that became slower may owe that to its messages; otherwise larger ones are tried.
            cost = max(known * _DOUBT, (ms - before[1]) / count)
            if ms <= before[1] * _ALIKE:
                self._compared = before
        self._batch_message_ms = cost
        return cost


def _fitting(message_ms: float) -> int:
    """How many messages of such a cost fit, at least one."""
    return max(1, int(AHEAD_MS / max(_MESSAGE_MS_MIN, message_ms)))
