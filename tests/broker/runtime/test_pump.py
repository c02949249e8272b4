"""The pump: turns, timers in order, cancelled ones that cost nothing."""

import pytest

from tailrace.broker.runtime.clock import ManualClock
from tailrace.broker.runtime.pump import PRUNE_MIN, Pump
from tests.broker.held_engine import HeldThreads


class Member:
    """Counts its turns, and may ask for another one."""

    def __init__(self, pump: Pump, again: int = 0) -> None:
        self._pump, self._again, self.turns = pump, again, 0

    def turn(self, now_us: int, wall_us: int) -> None:
        self.turns += 1
        if self._again:
            self._again -= 1
            self._pump.ready(self)


def make() -> tuple[ManualClock, Pump, list[str], list[int]]:
    clock, wakes, armed = ManualClock(0), list[str](), list[int]()
    return clock, Pump(clock, HeldThreads(), lambda: wakes.append("wake"), armed.append), wakes, armed


def test_wakes_once_per_turn_and_members_that_ask_again_come_next_time() -> None:
    _, pump, wakes, _ = make()
    first, second = Member(pump, again=1), Member(pump)
    pump.ready(first)
    pump.ready(second)
    assert wakes == ["wake"]
    pump.turn()
    assert (first.turns, second.turns, pump.busy) == (1, 1, True)
    pump.turn()
    assert (first.turns, second.turns, pump.busy) == (2, 1, False)


class SlowClock(ManualClock):
    """The process is put aside for 15 ms at every reading."""

    def now_us(self) -> int:
        self.set_us(super().now_us() + 15_000)
        return super().now_us()

    def wall_us(self) -> int:
        return self.now_us()


def test_what_is_due_by_the_wall_clock_is_not_stored_at_an_earlier_time() -> None:
    pump = Pump(SlowClock(0), HeldThreads(), lambda: None, lambda due_us: None)
    seen: list[tuple[int, int]] = []

    class Reader:
        def turn(self, now_us: int, wall_us: int) -> None:
            seen.append((now_us, wall_us))

    pump.ready(Reader())
    pump.turn()
    ((now_us, wall_us),) = seen
    assert wall_us <= now_us


def test_timers_run_in_order_and_only_when_due() -> None:
    clock, pump, _, armed = make()
    seen: list[tuple[str, int]] = []
    pump.at(30, lambda now: seen.append(("late", now)))
    pump.at(10, lambda now: seen.append(("early", now)))
    pump.at(10, lambda now: seen.append(("same", now)))
    cancelled = pump.at(5, lambda now: seen.append(("never", now)))
    cancelled.cancel()
    assert armed == [30, 10, 5]
    assert pump.next_deadline_us() == 10
    clock.set_us(12)
    pump.tick()
    assert seen == [("early", 12), ("same", 12)]
    assert armed[-1] == 30
    clock.set_us(30)
    pump.tick()
    assert seen[-1] == ("late", 30)
    assert pump.next_deadline_us() is None


def test_every_goes_on_from_when_it_ran() -> None:
    clock, pump, _, _ = make()
    seen: list[int] = []
    pump.every(10, seen.append)
    for now_us in (9, 10, 35, 44, 45):
        clock.set_us(now_us)
        pump.tick()
    assert seen == [10, 35, 45]


def test_a_timer_set_while_another_runs_is_armed() -> None:
    clock, pump, _, armed = make()

    def chain(now_us: int) -> None:
        pump.at(15, lambda later: None)

    pump.at(10, chain)
    clock.set_us(10)
    pump.tick()
    assert armed[-1] == 15


def test_cancelled_timers_do_not_gather() -> None:
    _, pump, _, _ = make()
    kept = [pump.at(1_000_000, lambda now: None) for _ in range(10)]
    for _ in range(20 * PRUNE_MIN):
        pump.at(2_000_000, lambda now: None).cancel()
    assert len(pump._timers._heap) <= PRUNE_MIN + len(kept)
    assert pump.next_deadline_us() == 1_000_000


def test_drain_hands_out_results_and_errors() -> None:
    _, pump, _, _ = make()
    seen: list[object] = []
    pump.threads.run(object(), lambda: 7, lambda result, error: seen.append(result))
    pump.threads.run(object(), lambda: 1 / 0, lambda result, error: seen.append(type(error)))
    assert pump.drain()
    assert seen == [7, ZeroDivisionError]
    assert not pump.drain()


def test_a_failure_is_raised_and_takes_nothing_from_the_others() -> None:
    clock, pump, _, armed = make()

    class Broken:
        def turn(self, now_us: int, wall_us: int) -> None:
            raise ZeroDivisionError

    other = Member(pump)
    pump.ready(Broken())
    pump.ready(other)
    with pytest.raises(ZeroDivisionError):
        pump.turn()
    assert other.turns == 1

    seen: list[object] = []
    pump.threads.run(object(), lambda: 1, lambda result, error: Broken().turn(0, 0))
    pump.threads.run(object(), lambda: 2, lambda result, error: seen.append(result))
    with pytest.raises(ZeroDivisionError):
        pump.drain()
    assert seen == [2]

    pump.at(5, lambda now_us: Broken().turn(now_us, now_us))
    pump.at(9, seen.append)
    clock.set_us(5)
    with pytest.raises(ZeroDivisionError):
        pump.tick()
    assert armed[-1] == 9


def test_requests_of_one_connection_get_their_turn_at_once_those_of_many_share_one() -> None:
    _, pump, wakes, _ = make()
    alone, member = Member(pump), Member(pump)
    pump.gather(True)
    pump.ready(alone)
    pump.gather(False)
    assert (alone.turns, wakes) == (1, [])
    for _ in range(3):
        pump.gather(True)
        if not pump.busy:
            pump.ready(member)
        pump.gather(False, True)
    assert (member.turns, wakes) == (0, ["wake"])
    pump.turn()
    assert member.turns == 1
    pump.ready(member)
    assert wakes == ["wake", "wake"]


def test_a_timer_by_one_clock_does_not_take_the_place_of_an_earlier_one_by_the_other() -> None:
    clock, pump, _, armed = make()
    wall_us = clock.wall_us()
    fired: list[str] = []
    pump.at(100_000, lambda now_us: fired.append("steady"))
    pump.at_wall(wall_us + 60_000_000, lambda now_us: fired.append("wall"))
    assert armed[-1] == 100_000
    clock.set_us(armed[-1])
    pump.tick()
    assert (fired, armed[-1]) == (["steady"], 60_000_000)
    pump.at(90_000_000, lambda now_us: fired.append("late"))
    assert armed[-1] == 60_000_000
