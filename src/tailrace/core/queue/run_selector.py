"""The messages that a member gets next, run by run, where neither lanes nor keys of several members matter.

Messages that were delivered before and are due go first, then those never delivered, each in offset order.
With ordering=partition all go in offset order, and none passes a message that waits or is dying. If messages
of a key keep their order, those whose key is held back are set aside when selection meets them (see
`core.queue.backlog`, which has an example). Only messages in cached frames are taken: the first frame that is
not cached ends the selection, so that no message is overtaken unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from tailrace.core.model.identifiers import HAS_EXPIRES_AT, HAS_KEY, CachedFrames, Columns
from tailrace.core.queue.backlog import BACK
from tailrace.core.queue.frame_index import FrameIndex
from tailrace.core.queue.ledger import Ledger

RETRY, NEW, AHEAD = range(3)

Candidate = tuple[int, int, int, int, int, int]
"""First, end, kind, deliveries and failures so far, key (known only for retries)."""


class RunSelector:
    """One selection: `runs` (first, end, deliveries, failures) in the order of delivery, `lapsed` offsets of
    expired messages with their keys (0: none), and the offset of a `missing` frame without which there cannot
    be more."""

    def __init__(
        self, ledger: Ledger, traits: FrameIndex, at_hand: CachedFrames, time_us: int, wall_us: int
    ) -> None:
        self._ledger = ledger
        self._traits = traits
        self._at_hand = at_hand
        self._time_us = time_us
        self._wall_us = wall_us
        self._strict = ledger.policy.ordering == "partition"
        self._to_dead_letters = ledger.policy.expired_to_dlq
        self._looks_at_keys = ledger.keyed and bool(ledger.backlog.blockers or self._to_dead_letters)
        self._dead_keys: set[int] = set()
        """Keys of messages that this very decision sends to the dead letters: these keys are held from now
        on."""
        self._gone: dict[int, int] = {}
        """By key: how many of the messages that held it back are leased by this very decision."""
        self._released: set[int] = set()
        """Keys that no message holds back after that."""
        self._held: list[tuple[int, int]] = []
        self._count_left = 0
        self._bytes_left = 0
        self.runs: list[tuple[int, int, int, int]] = []
        self.lapsed: list[tuple[int, int]] = []
        self.missing: int | None = None

    def select(self, count_max: int, bytes_max: int, end_offset: int) -> None:
        """Fill `runs`, `lapsed` and `missing`."""
        backlog = self._ledger.backlog
        backlog.advance(self._time_us)
        self._count_left, self._bytes_left = count_max, bytes_max
        scanned = backlog.scanned
        for candidate in self._in_line(end_offset) if self._strict else self._by_turn(end_offset):
            came_to = self._go_through(candidate)
            if candidate[2] == AHEAD:
                scanned = came_to
            if came_to < candidate[1]:
                break
        if self._looks_at_keys and not self._strict:
            backlog.scan(scanned, self._held)

    def only(self, offset: int, deliveries: int, failures: int, key: int, bytes_max: int) -> None:
        """Select one message that was delivered before."""
        self._count_left, self._bytes_left = 1, bytes_max
        self._go_through((offset, offset + 1, RETRY, deliveries, failures, key))

    # -------------------------------------------------------------------------------------------- candidates

    def _by_turn(self, end_offset: int) -> Iterator[Candidate]:
        """Retries, then messages never delivered, with redriven ones among them, by offset."""
        backlog = self._ledger.backlog
        if backlog.ready:
            for first, end in backlog.ready.spans():
                for start, stop, value in backlog.back.within(first, end):
                    deliveries, failures, _, _, _, _, key = BACK.unpack(value)
                    yield start, stop, RETRY, deliveries, failures, key
        if self._gone:
            blockers = backlog.blockers
            self._released = {key for key, many in self._gone.items() if many == len(blockers[key])}
        if backlog.open or backlog.renewed or self._released:
            yield from merge(self._open(), self._renewed(), self._freed())
        if backlog.scanned < end_offset:
            yield backlog.scanned, end_offset, AHEAD, 0, 0, 0

    def _open(self) -> Iterator[Candidate]:
        for first, end in self._ledger.backlog.open.spans():
            yield first, end, NEW, 0, 0, 0

    def _renewed(self) -> Iterator[Candidate]:
        backlog = self._ledger.backlog
        for first, end in backlog.renewed.spans():
            for start, stop, value in backlog.back.within(first, end):
                yield start, stop, RETRY, 0, 0, BACK.unpack(value)[6]

    def _freed(self) -> list[Candidate]:
        """Messages that were set aside for keys that no message holds back any more."""
        backlog = self._ledger.backlog
        return sorted(
            (offset, offset + 1, NEW, 0, 0, 0)
            for key in self._released
            for offset in backlog.held.get(key, ())
            if offset >= backlog.cursor or offset in backlog.fresh
        )

    def _in_line(self, end_offset: int) -> Iterator[Candidate]:
        """All messages in offset order, up to the first that must not be passed."""
        backlog = self._ledger.backlog
        limit = end_offset if backlog.dying.first is None else backlog.dying.first
        for first, end, value in merge(backlog.back, backlog.fresh):
            if first >= limit:
                return
            if not value:
                yield first, min(end, limit), NEW, 0, 0, 0
                continue
            deliveries, failures, _, _, _, due_us, _ = BACK.unpack(value)
            if due_us > self._time_us:
                return
            yield first, min(end, limit), RETRY, deliveries, failures, 0
        if backlog.cursor < limit:
            yield backlog.cursor, limit, AHEAD, 0, 0, 0

    # --------------------------------------------------------------------------------------------- looking

    def _go_through(self, candidate: Candidate) -> int:
        """Take messages of a candidate; return how far selection came. If that is not the candidate's end,
        the selection is over."""
        at, end, kind, deliveries, _, key = candidate
        if kind == RETRY and not deliveries and key and self._older_is_held(key, at):
            return end
        while at < end:
            if self._count_left <= 0 or self._bytes_left <= 0:
                return at
            reach = min(self._at_hand.reach(at, self._bytes_left), end)
            if reach <= at:
                self.missing = at
                return at
            if self._plain(at, reach, kind, key):
                reach = min(reach, at + self._count_left)
                self._pick(at, reach, candidate)
                if reach < end or kind == AHEAD:
                    return reach
                frame = self._at_hand.columns(at)
                if frame is not None:
                    self._charge(frame, reach - at)
            else:
                reach = self._look(at, reach, candidate)
                if self._strict and self._to_dead_letters and self.lapsed:
                    return at
            at = reach
        return at

    def _plain(self, first: int, end: int, kind: int, key: int) -> bool:
        """Whether the rows can be taken without looking at their columns."""
        columns = self._traits.columns(first, end)
        if columns & HAS_EXPIRES_AT:
            return False
        if kind == RETRY:
            return key not in self._dead_keys
        return not (columns & HAS_KEY and self._looks_at_keys)

    def _look(self, first: int, end: int, candidate: Candidate) -> int:
        """Check the rows of one frame, one by one; return how far selection came."""
        _, _, kind, _, _, key = candidate
        frame = self._at_hand.columns(first)
        assert frame is not None, f"{first} is in reach and not at hand"
        end = min(end, frame.end_offset)
        part = slice(first - frame.base_offset, end - frame.base_offset)
        ended, keys = None, [key] * (end - first)
        if frame.expires_us is not None:
            times = frame.expires_us[part]
            over = (times > 0) & (times <= self._wall_us)
            ended = over.tolist() if over.any() else None
        if kind != RETRY and frame.key_hashes is not None and self._ledger.keyed:
            keys = frame.key_hashes[part].tolist()
        at, picked, room = first, 0, self._count_left
        if ended is None and not self._dead_keys and self._ledger.backlog.blockers.keys().isdisjoint(keys):
            end = min(end, first + room)
            self._pick(first, end, candidate)
            self._charge(frame, end - first)
            return end
        for offset, its_key in zip(range(first, end), keys, strict=True):
            if picked == room:
                end = offset
                break
            if its_key and self._waits(its_key, offset, kind):
                pass
            elif ended is not None and ended[offset - first]:
                self._lapse(offset, its_key, kind)
                if self._strict and self._to_dead_letters:
                    end = offset
                    break
            else:
                picked += 1
                continue
            if offset > at:
                self._pick(at, offset, candidate)
            at = offset + 1
        if end > at:
            self._pick(at, end, candidate)
        self._charge(frame, picked)
        return end

    def _waits(self, key: int, offset: int, kind: int) -> bool:
        """Whether a message has to wait for its key; then one that was never delivered is set aside."""
        if key in self._dead_keys:
            return True
        if kind == RETRY or key in self._released or not self._ledger.backlog.waits_behind(key, offset):
            return False
        self._held.append((key, offset))
        return True

    def _older_is_held(self, key: int, offset: int) -> bool:
        """Whether a redriven message has to wait for an older one of its key that was set aside."""
        backlog = self._ledger.backlog
        if any(older < offset and older in backlog.fresh for older in backlog.held.get(key, ())):
            return True
        return any(its_key == key and older < offset for its_key, older in self._held)

    def _lapse(self, offset: int, key: int, kind: int) -> None:
        self.lapsed.append((offset, key))
        if key and self._to_dead_letters:
            self._dead_keys.add(key)
        elif key and kind == RETRY:
            self._gone[key] = self._gone.get(key, 0) + 1

    def _pick(self, first: int, end: int, candidate: Candidate) -> None:
        _, _, kind, deliveries, failures, key = candidate
        many = end - first
        self._count_left -= many
        if key and kind == RETRY:
            self._gone[key] = self._gone.get(key, 0) + many
        if self.runs and self.runs[-1][1:] == (first, deliveries, failures):
            first = self.runs.pop()[0]
        self.runs.append((first, end, deliveries, failures))

    def _charge(self, frame: Columns, rows: int) -> None:
        """Count the bytes of rows, by the average size of a row of their frame."""
        self._bytes_left -= frame.nbytes * rows // (frame.end_offset - frame.base_offset)
