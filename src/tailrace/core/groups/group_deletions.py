"""Deletions of groups on their way to the data partitions: facts, kept until every partition has confirmed.

A partition that does not know a deleted group may have forgotten the group, or never have heard of it. A
partition with a group that its coordinator does not know may be ahead of an older copy of the coordinator's
log. So absence proves nothing: a partition forgets a group only because a deletion names it, by name and id,
and a deletion is forgotten only when the last partition has confirmed it. A group that is created again under
the same name has another id, and no deletion of the first one touches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_facts import GroupForgotten
from tailrace.core.model.internal_commands import ConfirmForgotten
from tailrace.core.model.turn_input import TurnInput


class GroupDeletion(msgspec.Struct, frozen=True, array_like=True):
    """A deleted group, and the partitions that have not confirmed: topic, partition, id of the topic."""

    group: str
    id: int
    places: list[tuple[str, int, int]]


class GroupDeletions:
    """The deletions of one coordinator that some partition still has to confirm."""

    COMMANDS: tuple[type, ...] = (ConfirmForgotten,)
    FACTS: tuple[type, ...] = (GroupForgotten,)

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], dict[Place, int]] = {}
        self.last_id = 0
        """The greatest id of a deleted group that is known."""

    def pending(self) -> Iterator[GroupDeletion]:
        """The deletions that some partition still has to confirm."""
        for (group, group_id), places in list(self._places.items()):
            yield GroupDeletion(group, group_id, [(*place, topic_id) for place, topic_id in places.items()])

    def ids(self, group: str, place: Place) -> list[int]:
        """Ids of the groups of a name that a partition still has to forget."""
        return [
            number for (name, number), places in self._places.items() if name == group and place in places
        ]

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a confirmation. If the fact is lost, the partitions are asked again."""
        assert isinstance(command, ConfirmForgotten)
        known = self._places.get((command.group, command.id), {})
        places = [place for place in command.places if tuple(place) in known]
        if not places:
            return Decision(NOTHING, Done())
        return Decision((GroupForgotten(command.group, command.id, places, turn.now_us),), Done(), soft=True)

    def add(self, group: str, group_id: int, places: Iterable[tuple[str, int, int]]) -> None:
        """Add the deletion of a group that is on these partitions."""
        self.last_id = max(self.last_id, group_id)
        left = {(topic, number): topic_id for topic, number, topic_id in places}
        if left:
            self._places[group, group_id] = left

    def apply(self, fact: Any) -> None:
        """Apply a fact."""
        assert isinstance(fact, GroupForgotten)
        left = self._places[fact.group, fact.id]
        for topic, number in fact.places:
            left.pop((topic, number), None)
        if not left:
            del self._places[fact.group, fact.id]

    def packed(self) -> bytes:
        """The state for a snapshot."""
        return msgspec.msgpack.encode(list(self.pending()))

    def load(self, data: bytes) -> None:
        """Restore the state from a snapshot."""
        self._places = {}
        for item in msgspec.msgpack.decode(data, type=list[GroupDeletion]):
            self.add(item.group, item.id, item.places)

    def verify(self) -> None:
        """Assert the invariants."""
        assert all(self._places.values()), "a deletion that all have confirmed is forgotten"
