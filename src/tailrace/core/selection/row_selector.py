"""The pool: the careful selection of messages of one group, where priority lanes or shared keys matter."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import CachedFrames
from tailrace.core.selection.key_queues import KeyQueues
from tailrace.core.selection.lane_queues import LaneQueues, View
from tailrace.core.selection.lanes import STRICT, WEIGHTED, Feed, LaneTurn
from tailrace.core.selection.selection_terms import LedgerView, Selection, Traits, Want

__all__ = ["LedgerView", "RowSelector", "Selection", "Traits", "Want"]

DRAWN_MAX = 1_024
"""So many selections without a lease are remembered, then forgotten."""


class RowSelector:
    """A cache, never stored: it is rebuilt from the ledger when it is asked after a start or `forget`.

    `select` only reads: asked twice, it answers the same, and nothing is taken out before `leased` says so.
    It remembers the frames that it has looked at, and whose turn it would be; so an answer may go further
    than without, where a frame is not at hand any more or a window is full, and is the same everywhere else.
    `now_us` does not go back. The other methods say what happened to messages; they take flat spans as facts
    have them, and messages that the pool has not seen yet are fine.
    """

    def __init__(self, policy: GroupPolicy) -> None:
        self._policy = policy
        self.for_keys = True
        """It was only ever needed for keys of several members, and not for lanes."""
        self._turn = LaneTurn(STRICT if policy.priority_mode == "strict" else WEIGHTED)
        self._drawn: dict[tuple[str, int, int, int], LaneTurn] = {}
        """Of selections since the last lease: whose turn it is when they are leased, by member, count, first
        and last offset."""
        self._ahead: dict[int, int] = {}
        """Messages in flight that were drawn ahead of the turn of a lane, which owes for them."""
        self._queues: LaneQueues | KeyQueues | None = None
        self._held_back = False

    def select(self, want: Want, source: LedgerView, traits: Traits, at_hand: CachedFrames) -> Selection:
        """The messages that go to a member next."""
        if not isinstance(self._queues, KeyQueues if want.keyed else LaneQueues):
            self._queues = KeyQueues(source) if want.keyed else LaneQueues(source)
        queues, view = self._queues, View(want, source, traits, at_hand)
        starved_us = want.now_us - self._policy.starvation_ms * 1000
        feeds: Sequence[Feed] | int
        expiring = isinstance(queues, KeyQueues) and queues.expiring
        if isinstance(queues, KeyQueues):
            feeds = queues.feeds(view, starved_us, self._policy.expired_to_dlq)
        else:
            feeds = queues.feeds(view, starved_us)
        if isinstance(feeds, int):
            return Selection([], [], [], feeds)
        turn = self._turn.copy()
        offsets, missing = turn.draw(feeds, want.count_max, want.bytes_max, starved_us, want.above)
        self._held_back = self._held_back or turn.held_back
        keys: list[int] = []
        if isinstance(queues, KeyQueues):
            queues.put_back()
            if queues.expiring and not expiring:
                return self.select(want, source, traits, at_hand)  # Lanes have to show one row at a time.
            keys = [queues.rows[offset].key for offset in offsets]
        if offsets:
            if len(self._drawn) >= DRAWN_MAX:
                self._drawn.clear()
            self._drawn[want.member, len(offsets), min(offsets), max(offsets)] = turn
        return Selection(offsets, keys, sorted(view.lapsed), missing)

    def held_back(self) -> bool:
        """Whether, since this was asked last, somebody was not given urgent messages because their lane had
        more than its share: when others were given some, there may be."""
        held_back, self._held_back = self._held_back, False
        return held_back

    def takers(self) -> list[str]:
        """Members to whom alone something was offered since this was asked last, because others of its key
        are in flight to them."""
        return self._queues.takers() if isinstance(self._queues, KeyQueues) else []

    def leased(self, member: str, spans: Sequence[int], keys: Sequence[int]) -> None:
        """Messages are in flight to a member; `keys` as in `facts.Leased`."""
        if self._queues is None or not spans:
            return
        count = sum(spans[1::2]) - sum(spans[::2])
        drawn = self._drawn.get((member, count, spans[0], spans[-1] - 1))
        if drawn is not None:
            self._turn = drawn
            self._ahead.update(drawn.ahead)
        else:
            self._turn.skip(count)
        self._drawn.clear()
        self._queues.leased(member, spans, keys)

    def acked(self, spans: Sequence[int]) -> None:
        """Messages that were in flight are settled."""
        self._landed(spans)
        if self._queues is not None:
            self._queues.acked(spans)

    def settled(self, spans: Sequence[int]) -> None:
        """Messages are settled, wherever they were: lapsed, buried, collected, by an operator."""
        self._landed(spans)
        if self._queues is not None:
            self._queues.settled(spans)

    def unstarted(self, spans: Sequence[int]) -> None:
        """Messages are about to be `returned` that no handler got: none of them had its turn."""
        for lane in self._landed(spans):
            self._turn.undo(lane)

    def _landed(self, spans: Sequence[int]) -> list[int]:
        """Messages are not in flight any more; the lanes that owe for some of them."""
        ahead, lanes = self._ahead, []
        for first, end in zip(spans[::2], spans[1::2], strict=True):
            if not ahead:
                break
            known = range(first, end) if end - first <= len(ahead) else [o for o in ahead if first <= o < end]
            lanes += [ahead.pop(offset) for offset in known if offset in ahead]
        return lanes

    def returned(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """(first, end, due_us): messages are not leased and can be delivered (again) when they are due:
        nacked, expired, given back, reopened."""
        if self._ahead:
            self._landed([bound for run in runs for bound in run[:2]])
        if self._queues is not None:
            self._queues.returned(runs)

    def dying(self, spans: Sequence[int]) -> None:
        """Messages are on their way to the dead letters: not deliverable, and they hold their key."""
        self._landed(spans)
        if self._queues is not None:
            self._queues.dying(spans)

    def forget(self) -> None:
        """The group was reset: start again from the ledger."""
        self._queues = None
        self._drawn.clear()
        self._ahead.clear()
