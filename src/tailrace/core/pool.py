"""The pool: the careful selection of messages of one group, where priority lanes or shared keys matter."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.core.model import AtHand
from tailrace.core.policy import GroupPolicy
from tailrace.core.selection import LedgerView, Selection, Traits, Want

__all__ = ["LedgerView", "Pool", "Selection", "Traits", "Want"]


class Pool:
    """A cache, never stored: it is rebuilt from the ledger when it is asked after a start or `forget`.

    `select` only reads: what it answered is taken out by `leased`. The other methods say what happened to
    messages; they take flat spans as facts have them, and messages that the pool has not seen yet are fine.
    """

    def __init__(self, policy: GroupPolicy) -> None:
        self._policy = policy

    def select(self, want: Want, source: LedgerView, traits: Traits, at_hand: AtHand) -> Selection:
        """The messages that go to a member next."""
        raise NotImplementedError

    def leased(self, member: str, spans: Sequence[int], keys: Sequence[int]) -> None:
        """Messages are in flight to a member; `keys` as in `facts.Leased`."""

    def settled(self, spans: Sequence[int]) -> None:
        """Messages are done: acked, lapsed, buried, collected, settled by an operator."""

    def returned(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """(first, end, due_us): messages are not leased and can be delivered (again) when they are due:
        nacked, expired, given back, reopened."""

    def dying(self, spans: Sequence[int]) -> None:
        """Messages are on their way to the dead letters: not deliverable, and they hold their key."""

    def forget(self) -> None:
        """The group was reset: start again from the ledger."""
