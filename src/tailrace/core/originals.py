"""What has to be known of messages that are to be opened again: their keys, and when they expire."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.core.key_lookup import FrameMissing
from tailrace.core.model import HAS_EXPIRES_AT, HAS_KEY, AtHand
from tailrace.core.spans import pairs
from tailrace.core.traits import FrameTraits


class Originals:
    """Rows found in frames. They are kept until the decision is made, so that it gets there even if the
    frames are never at hand together."""

    def __init__(self, traits: FrameTraits) -> None:
        self._traits = traits
        self._found: dict[int, tuple[int, int]] = {}

    def look(self, spans: Sequence[int], at_hand: AtHand, *, keyed: bool) -> dict[int, tuple[int, int]]:
        """Key (0: none) and expiry (0: never) by offset; what is not there has neither, or no key that
        matters."""
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
