"""The messages that a member gets next, row by row, where priority lanes or shared keys matter."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.core.core_tuning import DRAWN_MAX
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import CachedFrames
from tailrace.core.selection.key_cursors import key_cursors
from tailrace.core.selection.key_queues import KeyQueues
from tailrace.core.selection.lane_feeds import lane_feeds
from tailrace.core.selection.lane_queues import LaneQueues, View
from tailrace.core.selection.lanes import STRICT, WEIGHTED, Feed, LaneTurn
from tailrace.core.selection.selection_terms import LedgerView, Selection, Traits, Want

__all__ = ["LedgerView", "RowSelector", "Selection", "Traits", "Want"]


class RowSelector:
    """A cache over the ledger, never stored: rebuilt at the first question after a start or `forget`.

    `select` only reads: asked twice, it gives the same answer, and nothing is taken before `leased` says so.
    It keeps what it learned from frames, and whose turn it would be. So an answer may go further than that of
    a new selector where a frame is not cached any more or a window is full, and is the same everywhere else.
    `now_us` does not go back. The other methods report what happened to messages; they take flat spans as
    facts have them, and also messages that the selector has not seen yet.
    """

    def __init__(self, policy: GroupPolicy) -> None:
        self._policy = policy
        self.for_keys = True
        """Whether it was only needed for keys of several members so far, and not for lanes."""
        self._turn = LaneTurn(STRICT if policy.priority_mode == "strict" else WEIGHTED)
        self._drawn: dict[tuple[str, int, int, int], LaneTurn] = {}
        """Selections since the last lease, by member, count, first and last offset: whose turn it is if they
        are leased."""
        self._ahead: dict[int, int] = {}
        """Messages in flight that were drawn ahead of their lane's turn, and the lane that owes for each."""
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
            feeds = key_cursors(queues, view, starved_us, self._policy.expired_to_dlq)
        else:
            feeds = lane_feeds(queues, view, starved_us)
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

    def lanes_matter(self) -> None:
        """It is needed for lanes, too: it stays when keys of several members do not matter any more."""
        self.for_keys = False

    def held_back(self) -> bool:
        """Whether, since the last call, a member was refused urgent messages because their lane owed too
        much. After other deliveries there may be some for it."""
        held_back, self._held_back = self._held_back, False
        return held_back

    def takers(self) -> list[str]:
        """Members to whom alone a message was offered since the last call, because others of its key are in
        flight to them."""
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
        """Messages are settled, in any state: expired, dead-lettered, trimmed, or settled by an operator."""
        self._landed(spans)
        if self._queues is not None:
            self._queues.settled(spans)

    def unstarted(self, spans: Sequence[int]) -> None:
        """Messages that no handler got are about to be `returned`: their lanes do not owe for them."""
        for lane in self._landed(spans):
            self._turn.undo(lane)

    def _landed(self, spans: Sequence[int]) -> list[int]:
        """Messages are not in flight any more; return the lanes that owed for them."""
        ahead, lanes = self._ahead, []
        for first, end in zip(spans[::2], spans[1::2], strict=True):
            if not ahead:
                break
            known = range(first, end) if end - first <= len(ahead) else [o for o in ahead if first <= o < end]
            lanes += [ahead.pop(offset) for offset in known if offset in ahead]
        return lanes

    def returned(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """(first, end, due_us): messages can be delivered again when they are due: nacked, timed out, given
        back or redriven."""
        if self._ahead:
            self._landed([bound for run in runs for bound in run[:2]])
        if self._queues is not None:
            self._queues.returned(runs)

    def dying(self, spans: Sequence[int]) -> None:
        """Messages are on their way to the dead letters, and hold their keys."""
        self._landed(spans)
        if self._queues is not None:
            self._queues.dying(spans)

    def forget(self) -> None:
        """Start again from the ledger: the group was reset."""
        self._queues = None
        self._drawn.clear()
        self._ahead.clear()
