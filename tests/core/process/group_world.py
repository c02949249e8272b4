"""A seeded world for the processes of a coordinator: groups, members, and partitions that lag behind.

The coordinator and the partitions are the real state machines; their logs are those of `process_model`. Both
processes of the coordinator run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.core.catalog.catalog import change
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model import internal_commands as inner
from tailrace.core.model.commands import CreateTopic, Reply
from tailrace.core.model.facts import Enlisted
from tailrace.core.model.group_facts import GroupDeleted
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.core.process import process as core
from tailrace.core.process.deletion_process import DeletionProcess
from tailrace.core.process.grant_process import GrantProcess, Recheck
from tests.core.process.process_model import ProcessWorld, require
from tests.core.turns import at

HOME = TopicPartition("_groups", 0)
PLACES = [TopicPartition("t", number) for number in range(3)]
T0 = 1_700_000_000_000_000
GROUPS = ("g", "h")
MEMBERS = ("ann", "bob", "eve")
OPTIONS = ({"max_attempts": 3}, {"max_attempts": 5}, {"lease_ms": 5_000})


class Marked:
    """The tag of an effect, with the process that it belongs to."""

    def __init__(self, owner: int, tag: Any) -> None:
        self.owner = owner
        self.tag = tag


class SideBySide:
    """Several processes with one home: each gets its own answers."""

    def __init__(self, *processes: core.Process) -> None:
        self.processes = processes

    def step(self, event: core.Event, now: core.Now) -> Sequence[core.Effect]:
        if isinstance(event, core.Answered | core.Due):
            mark = event.tag
            assert isinstance(mark, Marked)
            steps = [(mark.owner, self.processes[mark.owner].step(event._replace(tag=mark.tag), now))]
        else:
            steps = [(owner, each.step(event, now)) for owner, each in enumerate(self.processes)]
        return [
            effect._replace(tag=Marked(owner, effect.tag))
            if isinstance(effect, core.Submit | core.After)
            else effect
            for owner, effects in steps
            for effect in effects
        ]


class GroupWorld(ProcessWorld):
    """Groups come and go, members join and leave, partitions are reset and opened again."""

    def __init__(
        self,
        seed: int,
        grants: type[GrantProcess] = GrantProcess,
        deletions: type[DeletionProcess] = DeletionProcess,
    ) -> None:
        super().__init__(seed)
        self._kinds = grants, deletions
        self._time_us = T0
        made = change(self.catalog, CreateTopic("t", {"partitions": len(PLACES)}), 0)
        assert not isinstance(made, Refusal)
        self.catalog, _ = made
        self.coordinator = Coordinator(TopicOptions())
        self.partitions = {place: Partition(TopicOptions()) for place in PLACES}
        for name in (HOME, *PLACES):
            self.log(name)
        self._stored = 0
        """The facts of the coordinator of which the processes were told."""
        self._promised: dict[tuple[str, int, TopicPartition], int] = {}
        """By group, its id and partition: the greatest generation that a member was told."""

    # -- logs and machines

    def make(self) -> core.Process:
        machine = self.coordinator
        grants, deletions = self._kinds
        self.grants = grants(HOME, machine.groups.by_name, machine.deletions)
        self._stored = len(self.log(HOME).facts)
        return SideBySide(self.grants, deletions(HOME, machine.deletions))

    def crashed(self) -> None:
        self.coordinator = Coordinator(TopicOptions())
        for decided in self.log(HOME).facts:
            self._apply(self.coordinator, decided)
        for place in PLACES:
            self._reopen(place)
        for (group, number, place), generation in self._promised.items():
            queues = self.partitions[place].queues
            reached = queues.grant(group)
            known = queues.id_of(group) != number or (reached is not None and reached[1] >= generation)
            gone = queues.id_of(group) is None and not self._deleted(group, number)
            require(known and not gone, f"{group} was told of {generation} on {place}, which has {reached}")

    def _deleted(self, group: str, number: int) -> bool:
        found = self.coordinator.groups.by_name.get(group)
        return found is None or found.id != number

    def _reopen(self, place: TopicPartition) -> None:
        self.partitions[place] = Partition(TopicOptions())
        for decided in self.log(place).facts:
            self._apply(self.partitions[place], decided)

    @staticmethod
    def _apply(machine: Any, decided: Any) -> None:
        """The facts of one decision, which are in the log as one."""
        for fact in decided:
            machine.apply(fact)

    def decide(self, target: TopicPartition, command: Any, body: Any = b"") -> Reply:
        self._time_us += 1_000
        machine: Any = self.coordinator if target == HOME else self.partitions[target]
        decision = machine.decide(command, at(self._time_us))
        for fact in decision.facts:
            self._look_at(target, fact)
        if decision.facts:
            self._apply(machine, decision.facts)
            self.log(target).facts.append(tuple(decision.facts))
        return decision.reply

    def _look_at(self, target: TopicPartition, fact: Any) -> None:
        """A group does not go on with what a deleted one of its name has left behind."""
        if isinstance(fact, Enlisted):
            queues = self.partitions[target].queues
            old = queues.id_of(fact.name)
            deleted = old != fact.id and (fact.name, old) in self._deletions()
            require(not deleted, f"{fact.name} {fact.id} goes on where {old} was deleted")

    def _deletions(self) -> set[tuple[str, int]]:
        log = self.log(HOME)
        facts = [fact for decided in log.facts[: log.synced] for fact in decided]  # type: ignore[attr-defined]
        return {(fact.group, fact.id) for fact in facts if isinstance(fact, GroupDeleted)}

    def sync(self, log: Any) -> None:
        super().sync(log)
        if log is self.log(HOME):
            stored, self._stored = log.facts[self._stored :], len(log.facts)
            facts = [fact for decided in stored for fact in decided]
            watched = [fact for fact in facts if type(fact) in GrantProcess.WATCHES]
            if watched:
                self.tell(core.FactsStored(watched))

    # -- what happens

    def happen(self) -> None:
        random, group = self.random, self.random.choice(GROUPS)
        found = self.coordinator.groups.by_name.get(group)
        sizes, ids, member = [("t", len(PLACES))], {"t": 1}, random.choice(MEMBERS)
        acts: list[Any] = [inner.Join(group, member, sizes, GroupPolicy(), topic_ids=ids)] * 3
        if found is not None:
            acts += [inner.Leave(group, name) for name in found.members]
            acts += [inner.SetPaused(group, random.random() < 0.5), inner.DropGroup(group, force=True)]
            acts += [inner.ChangeOptions(group, random.choice(OPTIONS)), inner.PassTime(group)]
            acts += [
                inner.ConfirmReleased(group, held.owner, [place])
                for place, held in found.places.items()
                if held.revoking and held.owner
            ]
        act = random.choice((*acts, "reset", "reopen"))
        if act == "reset":
            if found is not None:
                self.decide(random.choice(PLACES), inner.ResetTo(group, 0))
                self.later(core.Asked(Recheck(group)))
        elif act == "reopen":
            place = random.choice(PLACES)
            self.log(place).crash(random)
            self.drop_waiting(self.log(place))
            self._reopen(place)
            self.later(core.Asked(Recheck(topic=place.topic, partition=place.partition)))
        else:
            self.decide(HOME, act)

    def told(self, what: str) -> None:
        for name in list(self.coordinator.groups.by_name):
            group = self.coordinator.groups.by_name[name]
            if not self.grants.ready(group):
                continue
            for assignment in self.grants.assignments(group).values():
                for topic, number, generation in assignment.owned:
                    self._promise(name, group.id, TopicPartition(topic, number), generation)

    def _promise(self, group: str, number: int, place: TopicPartition, generation: int) -> None:
        key = group, number, place
        self._promised[key] = max(generation, self._promised.get(key, 0))
        synced = Partition(TopicOptions())
        log = self.log(place)
        for decided in log.facts[: log.synced]:
            self._apply(synced, decided)
        reached = synced.queues.grant(group)
        known = reached is not None and reached[1] >= generation and synced.queues.id_of(group) == number
        require(known, f"{group} is told of {generation} on {place}, which has synced {reached}")

    def check(self) -> None:
        if not self.healed or self._pending:
            return
        require(not list(self.coordinator.deletions.pending()), "a deletion was forgotten on its way")
        for place, partition in self.partitions.items():
            queues = partition.queues
            for name in queues.names():
                require((name, queues.id_of(name)) not in self._deletions(), f"{name} is left on {place}")
            for name, group in self.coordinator.groups.by_name.items():
                held = group.places[place]
                have = queues.grant(name), queues.is_shared(name), queues.policy(name), queues.id_of(name)
                want = (held.owner, held.generation), "t" in group.shared or held.dividing
                require(
                    have == (*want, group.policy, group.id), f"{name} on {place}: {have} instead of {want}"
                )
                require(queues.is_paused(name) == group.paused, f"{name} on {place} pauses, or does not")
        for name, group in self.coordinator.groups.by_name.items():
            require(self.grants.ready(group) and self.grants.settled(group), f"{name} is not settled")
