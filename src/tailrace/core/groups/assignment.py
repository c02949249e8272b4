"""Which member gets which partition: sticky, balanced within one, and nothing moves that need not.

A pure function of the present holders and of the members. First what is free goes to those with least; then
single partitions move from the fullest to the emptiest, until no two members that could share differ by more
than one. Where members subscribe to different topics, a partition may have to move through a third member:
the shortest such chain is taken. Every step lowers the sum of the squares of the loads, so it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from tailrace.core.model.group_commands import Place


class _Loads:
    """Who holds what while an assignment is worked out."""

    def __init__(self, members: Mapping[str, Sequence[str]]) -> None:
        self.rank = {member: rank for rank, member in enumerate(members)}
        self.total = dict.fromkeys(members, 0)
        self.held: dict[str, dict[str, list[int]]] = {member: {} for member in members}
        self.subscribers: dict[str, list[str]] = {}
        for member, topics in members.items():
            for topic in dict.fromkeys(topics):
                self.subscribers.setdefault(topic, []).append(member)

    def give(self, member: str, place: Place) -> None:
        self.total[member] += 1
        self.held[member].setdefault(place[0], []).append(place[1])

    def pass_on(self, topic: str, giver: str, taker: str) -> None:
        """The newest partition of a topic moves: those that a member has had longest stay."""
        partition = self.held[giver][topic].pop()
        self.total[giver] -= 1
        self.give(taker, (topic, partition))

    def count(self, member: str, topic: str) -> int:
        return len(self.held[member].get(topic, ()))

    def emptiest(self, topic: str) -> str | None:
        """Who takes a free partition of a topic: the least loaded, in doubt who has least of the topic."""
        members = self.subscribers.get(topic)
        if not members:
            return None
        return min(members, key=lambda m: (self.total[m], self.count(m, topic), self.rank[m]))

    def topic_between(self, giver: str, taker: str) -> str | None:
        """A topic of which one can give to the other, the one that evens the topics out best."""
        best: tuple[int, str] | None = None
        for topic, partitions in self.held[giver].items():
            if partitions and taker in self.subscribers.get(topic, ()):
                gain = len(partitions) - self.count(taker, topic)
                if best is None or gain > best[0]:
                    best = gain, topic
        return None if best is None else best[1]

    def chain(self, giver: str) -> list[tuple[str, str, str]] | None:
        """The shortest way, as (topic, from, to), by which a member can give one partition to somebody who
        has at least two less; None when there is none."""
        came: dict[str, tuple[str, str]] = {}
        seen, ring = {giver}, deque([giver])
        enough = self.total[giver] - 2
        while ring:
            reached: list[str] = []
            for member in ring:
                for topic, partitions in self.held[member].items():
                    for other in self.subscribers.get(topic, ()) if partitions else ():
                        if other not in seen:
                            seen.add(other)
                            came[other] = (topic, member)
                            reached.append(other)
            takers = [member for member in reached if self.total[member] <= enough]
            if takers:
                return self._way(giver, min(takers, key=lambda m: (self.total[m], self.rank[m])), came)
            ring = deque(reached)
        return None

    def _way(self, giver: str, taker: str, came: dict[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
        steps = []
        while taker != giver:
            topic, member = came[taker]
            if member == giver:
                topic = self.topic_between(giver, taker) or topic
            steps.append((topic, member, taker))
            taker = member
        return steps


def assign(members: Mapping[str, Sequence[str]], holders: Mapping[Place, str]) -> dict[Place, str]:
    """Who shall have each place. `members` are in the order of joining, with the topics that they want;
    `holders` says who has each place now ("" = nobody). A place that nobody wants belongs to nobody."""
    loads = _Loads(members)
    wanted = {topic: set(subscribers) for topic, subscribers in loads.subscribers.items()}
    free = []
    for place in sorted(holders):
        holder = holders[place]
        if holder and holder in wanted.get(place[0], ()):
            loads.give(holder, place)
        else:
            free.append(place)
    for place in free:
        member = loads.emptiest(place[0])
        if member is not None:
            loads.give(member, place)
    _even_out(loads)
    result = dict.fromkeys(holders, "")
    for member, topics in loads.held.items():
        for topic, partitions in topics.items():
            for partition in partitions:
                result[(topic, partition)] = member
    return result


def _even_out(loads: _Loads) -> None:
    """Move single partitions from the fullest to the emptiest while that brings two members closer."""
    stuck: set[str] = set()
    while True:
        givers = [member for member in loads.total if member not in stuck]
        if len(givers) < 1 or len(loads.total) < 2:
            return
        giver = max(givers, key=lambda m: (loads.total[m], loads.rank[m]))
        if loads.total[giver] < 2:
            return
        chain = loads.chain(giver)
        if chain is None:
            stuck.add(giver)  # Whoever it can reach has enough; moves of others only bring those closer.
            continue
        for topic, member, other in chain:
            loads.pass_on(topic, member, other)
        stuck.clear()


def one_for_all(members: Mapping[str, Sequence[str]], holders: Mapping[Place, str]) -> dict[Place, str]:
    """The assignment of an exclusive group: the member that is active has all it wants, the others stand by.
    Who is active stays so; after it the one that joined first is."""
    held = {holder for holder in holders.values() if holder in members}
    active = next((member for member in members if member in held), next(iter(members), ""))
    topics = set(members.get(active, ()))
    return {place: active if place[0] in topics else "" for place in holders}
