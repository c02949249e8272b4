"""How many messages a consumer holds, by what its handler was seen to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from tailrace.client.queue.handler_runner import HandlerRunner
from tailrace.client.queue.pace import Pace


def test_it_starts_with_one_message() -> None:
    pace = Pace()
    assert (pace.wanted(), pace.ahead()) == (1, 0)


@pytest.mark.parametrize(("message_ms", "held"), [(200, 1), (100, 1), (20, 5), (1, 100)])
def test_what_is_done_in_a_tenth_of_a_second_is_held(message_ms: float, held: int) -> None:
    pace = Pace()
    for _ in range(40):
        pace.took(1, message_ms)
    assert abs(pace.wanted() - held) <= 1
    assert pace.ahead() == pace.wanted() - 1, "the message that the handler has counts"


def test_a_fast_handler_soon_gets_much_and_a_slow_message_counts_at_once() -> None:
    pace = Pace()
    counts = []
    for _ in range(6):
        pace.took(pace.wanted(), 0.001 * pace.wanted())
        counts.append(pace.wanted())
    assert 2 < counts[0] <= 4
    assert counts[-1] > 1000
    pace.took(1, 150)
    assert (pace.wanted(), pace.ahead()) == (1, 0)


def test_quick_messages_between_slow_ones_are_not_believed() -> None:
    pace = Pace()
    for _ in range(20):
        for ms in (200, 0, 0, 0):
            pace.took(1, ms)
            assert pace.wanted() <= 4


@pytest.mark.parametrize("busy", [0, 3, 10])
def test_several_handlers_get_one_each_when_they_are_slow(busy: int) -> None:
    pace = Pace()
    pace.workers, pace.busy, pace.takers = 10, busy, 10 - busy
    for _ in range(100):
        pace.worked(200)
    assert pace.wanted() == max(1, 10 - busy)
    pace.busy = 10
    assert pace.ahead() == 0


def batches(cost_ms: Callable[[int], float], rounds: int) -> list[int]:
    pace, sizes = Pace(), []
    for _ in range(rounds):
        count = min(500, pace.wanted())
        sizes.append(count)
        pace.took_batch(count, cost_ms(count))
    return sizes


def test_batches_grow_while_their_messages_cost_little() -> None:
    assert batches(lambda count: 200 + 0.01 * count, 12)[-1] == 500


def test_batches_stay_small_when_their_messages_cost_much() -> None:
    sizes = batches(lambda count: 200.0 * count, 40)
    assert max(sizes) <= 2
    assert sum(sizes) < 50


def test_a_slow_batch_among_quick_ones_is_forgotten() -> None:
    slow = iter([False] * 12 + [True] + [False] * 40)
    sizes = batches(lambda count: 5000.0 if next(slow) else 50 + 0.01 * count, 50)
    assert sizes[12] == 500
    assert sizes[-1] == 500


def test_quick_messages_of_handlers_gather_and_count_before_anything_is_asked_for() -> None:
    pace = Pace()
    pace.workers = 10
    for _ in range(1000):
        pace.worked(0.01)
    assert pace.message_ms < 0.01
    for _ in range(5):
        pace.worked(0.01)
    pace.worked(200)
    assert pace.message_ms == pytest.approx(20)
    assert pace.wanted() == 5
    first = Pace()
    first.workers = 10
    first.worked(0.01)
    assert 1 < first.wanted() <= 4


async def _run_counted(count: int) -> int:
    """Looks at the clock while so many messages at hand are handled, by ten at a time."""
    left, looks = list(range(count)), 0

    def now_ms() -> float:
        nonlocal looks
        looks += 1
        return 0.0

    class Source:
        async def next(self) -> Any:
            raise StopAsyncIteration

        def ready(self) -> Any:
            return left.pop() if left else None

        def next_rank(self) -> int | None:
            return 0 if left else None

    async def handler(delivery: object) -> None:
        pass

    source = Source()
    runner = HandlerRunner(
        source.next,
        cast(Any, source),
        handler,
        concurrency=10,
        settle=False,
        ordering="none",
        parked_max=1,
        pace=Pace(),
        now_ms=now_ms,
    )
    await runner.run()
    assert not left
    return looks


def test_a_message_that_is_at_hand_costs_one_look_at_the_clock() -> None:
    assert asyncio.run(_run_counted(1000)) <= 1000 + 2 * 10
