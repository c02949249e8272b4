"""Deletions of groups are carried to the data partitions until each has confirmed.

    GroupDeleted, synced on the coordinator ──▶ Delisted, synced on each partition ──▶ GroupForgotten

    power fails before 1          the group lives
    power fails between 1 and 2   the next life finds the deletion, and asks the partition again
    power fails between 2 and 3   the partition is asked again, and has nothing to forget

Each step is synced before the next begins; the last one may be lost, and is repeated. A faulty partition, or
one whose topic is unknown, has not confirmed: its deletion is kept, and carried again when the partition is
opened or in the next life. Only a topic that the catalog records as deleted takes its groups along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from tailrace.core.groups.group_deletions import GroupDeletion
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_facts import GroupDeleted
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import ConfirmForgotten, Delist
from tailrace.core.process.process import (
    After,
    Answered,
    Begun,
    Due,
    Effect,
    Event,
    FactsStored,
    Now,
    Submit,
    Tell,
)
from tailrace.errors import Corrupt, NotFound, StorageFault

RETRY_US = 1_000_000
AWAY = frozenset((Corrupt.code, StorageFault.code, NotFound.code))
"""Codes of partitions that are asked again only when they are opened."""


class PendingDeletions(Protocol):
    """The state of the coordinator that this process is derived from."""

    def pending(self) -> Iterator[GroupDeletion]:
        """The deletions that some partition still has to confirm."""
        ...


class _DeletionTag(NamedTuple):
    what: Literal["delist", "confirm"]
    group: str
    id: int
    place: TopicPartition
    topic_id: int


class DeletionProcess:
    """Carries the deletions of one coordinator."""

    WATCHES: frozenset[type] = frozenset((GroupDeleted,))

    def __init__(self, home: TopicPartition, deletions: PendingDeletions) -> None:
        self._home = home
        self._deletions = deletions
        self._durable: set[tuple[str, int]] = set()
        """Groups and ids of deletions that no crash takes back: only these are carried."""
        self._under_way: dict[str, set[tuple[int, TopicPartition]]] = {}

    def leaving(self, group: str) -> bool:
        """Whether some partition is about to forget a deleted group of this name."""
        return group in self._under_way

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """See `Process.step`."""
        if isinstance(event, Answered):
            return self._answered(event.tag, event.reply) if isinstance(event.tag, _DeletionTag) else ()
        if isinstance(event, Due):
            assert isinstance(event.tag, _DeletionTag)
            return (self._send(event.tag),)
        if isinstance(event, Begun):
            self._durable = {(deletion.group, deletion.id) for deletion in self._deletions.pending()}
        elif isinstance(event, FactsStored):
            self._durable |= {
                (fact.group, max(fact.id, 0)) for fact in event.facts if type(fact) is GroupDeleted
            }
        # Otherwise a partition may be there again. Carry whatever is not under way.
        durable = [each for each in self._deletions.pending() if (each.group, each.id) in self._durable]
        return [effect for deletion in durable for effect in self._carry(deletion, now)]

    def _carry(self, deletion: GroupDeletion, now: Now) -> list[Effect]:
        effects: list[Effect] = []
        busy = self._under_way.setdefault(deletion.group, set())
        for topic, number, topic_id in deletion.places:
            place = TopicPartition(topic, number)
            tag = _DeletionTag("delist", deletion.group, deletion.id, place, topic_id)
            if now.catalog.was_deleted(topic_id):
                effects.append(self._send(tag._replace(what="confirm")))
            elif (deletion.id, place) not in busy:
                busy.add((deletion.id, place))
                effects.append(self._send(tag))
        return effects + self._check_left(deletion.group)

    def _send(self, tag: _DeletionTag) -> Submit:
        if tag.what == "delist":
            return Submit(tag, tag.place, Delist(tag.group, tag.id), topic_id=tag.topic_id)
        # If it is lost, the next life asks the partition again.
        return Submit(tag, self._home, ConfirmForgotten(tag.group, tag.id, [tag.place]), sure=False)

    def _answered(self, tag: _DeletionTag, reply: Reply) -> list[Effect]:
        if isinstance(reply, Refusal) and (tag.what == "confirm" or reply.code not in AWAY):
            return [After(tag, RETRY_US)]
        if tag.what == "confirm":
            return []
        self._under_way[tag.group].discard((tag.id, tag.place))
        effects: list[Effect] = []
        if not isinstance(reply, Refusal):
            effects.append(self._send(tag._replace(what="confirm")))
        return effects + self._check_left(tag.group)

    def _check_left(self, group: str) -> list[Effect]:
        if self._under_way.get(group):
            return []
        self._under_way.pop(group, None)
        return [Tell(group)]
