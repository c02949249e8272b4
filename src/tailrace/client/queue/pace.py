"""How fast an application takes messages, and so how many to lease for it: by time, not by count.

A member should hold what it handles in about `AHEAD_MS`: less, and a fast handler waits for the network;
more, and others of its group idle while messages lie here. The time for a message is measured as it goes. It
starts so that one message is held. A slow sample counts at once, a quick one for three quarters, so that the
number held grows at most fourfold with each: 1, 4, 16, … Nor is a message believed to take less than on the
average over the last `AHEAD_MS`, because slow and quick ones may be mixed. That is an average over time: a
message of 5 ms after five hundred of 10 µs has made it 20 µs, and is no reason to give back what is in hand.
The messages that handlers have count as held.

A batch has a cost of its own beside that of its messages (a transaction, most often). Only the latter says
how large a batch may be: it is the difference between two batches of different sizes. So a consumer of
batches whose handler takes 200 ms for 1 message and 201 ms for 2 soon gets hundreds, and one whose handler
takes 200 ms for each message gets one.
"""

from __future__ import annotations

from math import exp

from tailrace.client.sdk_tuning import AHEAD_MS

_SHARE_OF_QUICK = 0.75
_QUICK_MS = 1.0
_QUICK_MAX = 32
"""What takes less than that is reckoned with together, so many at once."""
_MESSAGE_MS_MIN = 1e-4
_AGEING_MS_MIN = 0.02
"""What is known ages by so much at least with each message, so that a very quick past is forgotten, too."""
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
        self._past_ms = self._past_count = 0.0
        """Time and messages of the past, the later the more."""
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

    def begin(self, workers: int) -> None:
        """So many handlers are going to run side by side; 0: no more."""
        self.workers, self.busy, self.takers = workers, 0, 0

    def waits(self, more: int) -> None:
        """So many handlers more wait for a message."""
        self.takers += more

    def parked(self) -> None:
        """A message came that waits behind its key."""
        self.behind += 1

    def started(self) -> None:
        """A message came that could be started."""
        self.behind = 0

    def took(self, count: int, ms: float) -> None:
        """The application took messages, and comes back for more after this time."""
        self._measured(count, ms)
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
        self._measured(1, ms / self.workers)

    def _reckon(self) -> None:
        """Those that have gathered count as so many of the same time."""
        count = self._quick
        if count:
            self._measured(count, self._quick_ms / max(1, self.workers))
            self._quick, self._quick_ms = 0, 0.0

    def took_batch(self, count: int, ms: float) -> None:
        """The application took a batch, and comes back for another after this time."""
        self._measured(count, ms)
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

    def _measured(self, count: int, ms: float) -> None:
        """So many messages took so long together."""
        one, known = ms / count, self._latest_ms
        self._latest_ms = one if one > known else known + (one - known) * _SHARE_OF_QUICK
        aged = max(ms, count * _AGEING_MS_MIN) / AHEAD_MS
        kept = exp(-aged)
        weight = (1 - kept) / aged  # The beginning of a long sample is the past, too.
        self._past_ms = self._past_ms * kept + ms * weight
        self._past_count = self._past_count * kept + count * weight
        self.average_ms = self._past_ms / self._past_count
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
