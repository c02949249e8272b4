"""What is set apart lies by its deliveries: the next one is found without looking at the others."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections.span_blocks import Run
from tailrace.core.collections.span_map import Runs
from tailrace.core.model import internal_commands as inner
from tailrace.core.queue.apart import Apart
from tailrace.core.queue.group_queues import GroupQueues
from tests.core.desk import SECOND, Desk, keyed

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 5), st.integers(1, 4)))


@given(steps)
def test_it_is_a_set_ordered_by_deliveries(history: list[tuple[bool, int, int, int]]) -> None:
    apart, known = Apart(), dict[int, int]()
    for add, first, many, deliveries in history:
        offsets = range(first, first + many)
        if add and known.keys().isdisjoint(offsets):
            apart.add(first, first + many, deliveries, 10 * deliveries)
            known.update(dict.fromkeys(offsets, deliveries))
        elif not add:
            apart.cut(first, first + many, deliveries, 10 * deliveries)
            known = {o: d for o, d in known.items() if o not in offsets or d != deliveries}
        wanted = [offset for _, offset in sorted((d, o) for o, d in known.items())]
        assert [offset for start, stop in apart for offset in range(start, stop)] == wanted
        assert [o for start, stop in apart.union().spans() for o in range(start, stop)] == sorted(known)
        assert (apart.total, apart.least) == (len(known), min(known.values(), default=None))
        assert bool(apart) == bool(known)
        late = [sum(10 * d > time_us for d in known.values()) for time_us in range(0, 45, 5)]
        assert [apart.starving_after(time_us) for time_us in range(0, 45, 5)] == late


def looked_at(count: int) -> int:
    """How many messages are looked at to find the next one of so many that are set apart."""
    desk = Desk(*keyed("".join(chr(0x4E00 + n) for n in range(count))))
    for _ in range(3):
        desk.lease("ada", count)
        desk.do(inner.EvictMember("g", "ada"))
    queues: GroupQueues = desk.partition.queues
    ledger = queues._ledgers["g"]
    assert ledger.apart.total == count
    seen = 0

    class Counted(Runs):
        """Runs that count how many of them are looked at."""

        def since(self, offset: int) -> Iterator[Run]:
            nonlocal seen
            for run in super().since(offset):
                seen += 1
                yield run

        def within(self, first: int, end: int) -> list[Run]:
            nonlocal seen
            found = super().within(first, end)
            seen += len(found)
            return found

    counted = Counted()
    for first, end, value in ledger.backlog.back:
        counted.put(first, end, value)
    ledger.backlog.back = counted
    assert queues.apart("g") == 3
    alone = inner.LeaseRun("g", "ada", 1, 99, 9, 1 << 20, count, alone=True)
    decision = desk.partition.decide(alone, desk.turn())
    assert decision.facts[0].spans == [0, 1]
    return seen


def test_the_next_one_of_many_is_found_without_the_others() -> None:
    assert looked_at(600) <= looked_at(20) + 5


def free(desk: Desk) -> int:
    return desk.partition.queues.free("g", desk.partition.end_offset, desk.now_us)


def test_what_is_set_apart_is_free_once_also_when_it_starves() -> None:
    desk = Desk(*keyed("ab"), starvation_ms=30_000)
    for _ in range(3):
        assert len(desk.lease("ada")) == 2
        desk.do(inner.EvictMember("g", "ada"))
    assert free(desk) == 2
    desk.now_us += 30 * SECOND
    assert free(desk) == 2
    desk.publish(*keyed("c"))
    assert free(desk) == 3
    assert len(desk.lease("ada", 1)) == 1
    assert free(desk) == 2


def test_of_two_that_starve_at_other_times_each_is_free_once() -> None:
    desk = Desk(*keyed("ab"), assignment="shared", starvation_ms=30_000)
    for seconds in (5, 5, 5):
        for member in ("ada", "bob"):
            assert len(desk.lease(member, 1)) == 1
        desk.do(inner.EvictMember("g", "ada"))
        desk.now_us += seconds * SECOND
        desk.do(inner.EvictMember("g", "bob"))
    apart = desk.partition.queues._ledgers["g"].apart
    for seconds, late in ((24, 2), (3, 1), (4, 0)):
        desk.now_us += seconds * SECOND
        assert (free(desk), apart.total, apart.starving_after(desk.now_us)) == (2, 2, late)
