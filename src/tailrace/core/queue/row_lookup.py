"""Keys and expiry times of messages, for decisions that need them: from facts, or else from frames."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.core.collections.span_map import flat, pairs
from tailrace.core.model.identifiers import HAS_EXPIRES_AT, HAS_KEY, CachedFrames
from tailrace.core.queue.frame_index import FrameIndex
from tailrace.core.queue.leases import LiveLease
from tailrace.core.queue.ledger import Ledger


class FrameMissing(Exception):
    """A decision needs a frame that is not cached; it is made again when the frame is."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the frame of offset {offset} is not at hand")
        self.offset = offset


def key_at(at_hand: CachedFrames, offset: int) -> int:
    """The key of one message; 0: none."""
    frame = at_hand.columns(offset)
    if frame is None:
        raise FrameMissing(offset)
    return 0 if frame.key_hashes is None else int(frame.key_hashes[offset - frame.base_offset])


class KeyLookup:
    """Keys for one decision about one group. Nothing is looked up if the group is not ordered by key."""

    def __init__(self, ledger: Ledger, traits: FrameIndex, at_hand: CachedFrames) -> None:
        self._ledger = ledger
        self._traits = traits
        self._at_hand = at_hand

    def of_spans(self, spans: Sequence[int]) -> dict[int, int]:
        """Keys by offset, without messages that have none."""
        found: dict[int, int] = {}
        if not self._ledger.keyed:
            return found
        for first, end in pairs(spans):
            if not self._traits.columns(first, end) & HAS_KEY:
                continue
            while first < end:
                frame = self._at_hand.columns(first)
                if frame is None:
                    raise FrameMissing(first)
                stop = min(end, frame.end_offset)
                if frame.key_hashes is not None:
                    keys = frame.key_hashes[first - frame.base_offset : stop - frame.base_offset].tolist()
                    found.update({first + at: key for at, key in enumerate(keys) if key})
                first = stop
        return found

    def of_lease(self, lease: LiveLease) -> dict[int, int]:
        """Keys by offset of the messages that a lease still has, or of more. Keys found in frames are kept as
        long as the lease lives, so that a decision about many leases succeeds even if their frames are never
        cached together."""
        known = self._ledger.keys_of_lease.get(lease.id)
        if known is None:
            if lease.keys:
                offsets = (offset for first, end in pairs(lease.spans) for offset in range(first, end))
                known = {offset: key for offset, key in zip(offsets, lease.keys, strict=True) if key}
            else:
                left = self._ledger.left_of(lease)
                known = self.of_spans(flat([(first, end) for first, end, _, _ in left]))
            self._ledger.keys_of_lease[lease.id] = known
        return known

    def row(self, known: dict[int, int], spans: Sequence[int]) -> list[int]:
        """Keys as facts have them: one for each message, or none at all if no message has a key."""
        if not known:
            return []
        keys = [known.get(offset, 0) for first, end in pairs(spans) for offset in range(first, end)]
        return keys if any(keys) else []


class RowLookup:
    """Rows found in frames. They are kept until the decision is made, so that it succeeds even if the frames
    are never cached together."""

    def __init__(self, traits: FrameIndex) -> None:
        self._traits = traits
        self._found: dict[int, tuple[int, int]] = {}

    def look(self, spans: Sequence[int], at_hand: CachedFrames, *, keyed: bool) -> dict[int, tuple[int, int]]:
        """Key (0: none) and expiry (0: never) by offset. An offset that is left out has neither, or no key
        that matters."""
        wanted = HAS_EXPIRES_AT | (HAS_KEY if keyed else 0)
        for first, end in pairs(spans):
            if not self._traits.columns(first, end) & wanted:
                continue
            while first < end:
                if first in self._found:
                    first += 1
                    continue
                frame = at_hand.columns(first)
                if frame is None:
                    raise FrameMissing(first)
                stop = min(end, frame.end_offset)
                part = slice(first - frame.base_offset, stop - frame.base_offset)
                keys = [0] * (stop - first) if frame.key_hashes is None else frame.key_hashes[part].tolist()
                ends = [0] * (stop - first) if frame.expires_us is None else frame.expires_us[part].tolist()
                self._found.update(zip(range(first, stop), zip(keys, ends, strict=True), strict=True))
                first = stop
        found, self._found = self._found, {}
        return found
