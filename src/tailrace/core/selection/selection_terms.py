"""Question and answer of the row selector, and what it sees of a ledger and of frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from tailrace.core.model.identifiers import PRIORITY_MAX


class Want(msgspec.Struct, frozen=True):
    """A member wants up to `count_max` messages of about `bytes_max` bytes below `end_offset` now.

    `now_us` is the partition's time; `wall_us` is the time with which `expires_at` is compared.
    `keyed`: keys matter (ordering is by key, and some frame from the first unsettled message on has keys).
    `above`: only messages of lanes that are more urgent than this one.
    """

    member: str
    count_max: int
    bytes_max: int
    end_offset: int
    now_us: int
    wall_us: int
    keyed: bool
    above: int = PRIORITY_MAX + 1


class Selection(msgspec.Struct, frozen=True):
    """The answer. `offsets` are in the order of delivery, with the key hash of each in `keys` (0: none) where
    keys matter (else empty). `lapsed` have expired, in offset order: they are to be settled in the same
    decision.

    `missing` is an offset whose frame has to be cached before more can be selected. Offsets and expired
    messages in the same answer are valid without it.
    """

    offsets: list[int]
    keys: list[int]
    lapsed: list[int]
    missing: int | None


class LedgerView(Protocol):
    """The unsettled messages of a group, as selection sees them. The sets are disjoint. `keys` has one hash
    per message, in offset order, or nothing where the ledger does not know the keys."""

    @property
    def cursor(self) -> int:
        """Nothing at or above it was ever leased or settled."""
        ...

    def fresh_spans(self, first: int, end: int) -> Iterable[tuple[int, int]]:
        """Spans below the cursor that were never delivered, clipped to [first, end), ascending."""
        ...

    def back_rows(self) -> Iterable[tuple[int, int, int, Sequence[int]]]:
        """(first, end, due_us, keys) of runs that were delivered before and are not leased."""
        ...

    def leased_rows(self) -> Iterable[tuple[str, int, int, Sequence[int]]]:
        """(member, first, end, keys) of runs in flight."""
        ...

    def dying_rows(self) -> Iterable[tuple[int, int, Sequence[int]]]:
        """(first, end, keys) of runs on their way to the dead letters."""
        ...


class Traits(Protocol):
    """What is known of the frames of a partition without opening them."""

    def lanes(self, offset: int) -> tuple[int, int]:
        """The lanes (a bit each) that rows from `offset` on may have, and the end of the run for which that
        holds: above `offset`, and not above the end of the partition unless it is the last run."""
        ...
