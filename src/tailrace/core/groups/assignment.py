"""Which member gets which partition: sticky, balanced within one, and nothing moves that need not.

`assign` is a pure function of the present holders and of the members, in three steps:

1. A partition stays with its holder while that member wants its topic.
2. A free partition goes to the member with the lowest load among those that want its topic; then to the one
   with the fewest partitions of that topic; then to the one that joined first.
3. Single partitions move from the member with the highest load to one with at least two fewer, until no such
   move is left. A member gives up the partition of a topic that it got last.

    t has 6 partitions; a holds 0 1 2, b holds 3 4 5, and c joins. The loads are 3 3 0.
    b (the later of the two with 3) gives 5 to c: 3 2 1. Then a gives 2 to c: 2 2 2, done.
    a 0 1    b 3 4    c 2 5

Where members want different topics, two that differ may have no topic in common. Then partitions move along a
chain of members, each passing one on; the shortest chain is taken.

    a wants x and holds x0 x1 x2; b wants x and y and holds y0 y1; c wants y and holds nothing: 3 2 0.
    a has nothing that c wants. The chain is a, b, c: a gives x2 to b, and b gives y1 to c: 2 2 1.

Each chain takes one partition from a load L and adds one to a load of at most L - 2, and changes no load
between. So the sum of the squares of the loads falls with every chain, and the search ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from tailrace.core.model.group_commands import Place


class _Loads:
    """Which member holds which partitions while an assignment is worked out."""

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
        """Move the partition of a topic that the giver got last."""
        partition = self.held[giver][topic].pop()
        self.total[giver] -= 1
        self.give(taker, (topic, partition))

    def count(self, member: str, topic: str) -> int:
        return len(self.held[member].get(topic, ()))

    def emptiest(self, topic: str) -> str | None:
        """The member that gets a free partition of a topic; None if no member wants it."""
        members = self.subscribers.get(topic)
        if not members:
            return None
        return min(members, key=lambda m: (self.total[m], self.count(m, topic), self.rank[m]))

    def topic_between(self, giver: str, taker: str) -> str | None:
        """A topic of which one member can give to the other: that in which the two differ most."""
        best: tuple[int, str] | None = None
        for topic, partitions in self.held[giver].items():
            if partitions and taker in self.subscribers.get(topic, ()):
                gain = len(partitions) - self.count(taker, topic)
                if best is None or gain > best[0]:
                    best = gain, topic
        return None if best is None else best[1]

    def chain(self, giver: str) -> list[tuple[str, str, str]] | None:
        """The shortest chain, as steps (topic, from, to) from its end to its beginning, by which a member can
        give one partition to a member with at least two fewer; None if there is none."""
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
    """The next holder of each partition. `members` are in the order of joining, with the topics that they
    want; `holders` has the present holder of each partition ("": none). A partition of a topic that no member
    wants has no holder."""
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
    """Move single partitions from members with a high load to members with at least two fewer."""
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
            stuck.add(giver)  # No member within its reach has two fewer. A move of others may change that.
            continue
        for topic, member, other in chain:
            loads.pass_on(topic, member, other)
        stuck.clear()


def one_for_all(members: Mapping[str, Sequence[str]], holders: Mapping[Place, str]) -> dict[Place, str]:
    """The assignment of an exclusive group: the active member has all partitions that it wants, the others
    stand by. The active member stays active; after it the one that joined first is next."""
    held = {holder for holder in holders.values() if holder in members}
    active = next((member for member in members if member in held), next(iter(members), ""))
    topics = set(members.get(active, ()))
    return {place: active if place[0] in topics else "" for place in holders}
