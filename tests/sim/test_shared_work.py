"""Work that is shared among consumers on the real broker, in virtual time: how long it takes, who waits.

Covers `client/queue/parking.py` and `sim/actors/sim_workers.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.sim.actors import sim_workers
from tailrace.sim.actors.sim_workers import Worker
from tailrace.sim.worlds.fairness_world import FairnessWorld


def world_with(monkeypatch: pytest.MonkeyPatch, pace_ms: int, **wanted: Any) -> FairnessWorld:
    """A quiet world of some kind, whose handlers all take the same time."""
    monkeypatch.setitem(sim_workers.PACES_MS, "even", (pace_ms,))
    wanted = {"partitions": 3, "_keys": 0, "_fails": 0, "_lanes": "one", **wanted}
    for seed in range(20_000):
        world = FairnessWorld(seed)
        if all(getattr(world, name) == value for name, value in wanted.items()):
            return world
        world.end()
    raise AssertionError(f"no seed gives {wanted}")


def work_off(world: FairnessWorld, count: int, members: int, limit_s: float) -> float:
    """How many seconds it takes members that are there to handle so many messages."""
    for _ in range(members):
        world.workers.append(Worker(world, f"w{len(world.workers)}", 1, "even"))
    world.run_for(1)
    began_s = world.seconds()
    for number in range(count):
        world._store([world._task(2, number % world.partitions)])
    while not all(task.handled for task in world.accounts.tasks.values()):
        world.run_for(0.02)
        assert world.seconds() - began_s < limit_s, "it takes too long"
    return world.seconds() - began_s


def test_ten_workers_share_a_hundred_slow_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, 200, assignment="shared")
    try:
        assert work_off(world, 100, 10, 30) <= 2.6
    finally:
        world.end()


def test_a_member_that_joins_gets_what_a_slow_one_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was fast and holds much; then it becomes slow."""
    world = world_with(monkeypatch, 0, assignment="shared")
    try:
        work_off(world, 300, 1, 30)
        monkeypatch.setitem(sim_workers.PACES_MS, "even", (200,))
        assert work_off(world, 60, 5, 30) <= 60 * 0.2 / 6 * 1.3 + 0.5
        assert {name for task in world.accounts.tasks.values() for name in task.starts} == {
            "w0", "w1", "w2", "w3", "w4", "w5"
        }  # fmt: skip
    finally:
        world.end()


def test_what_only_its_holder_may_have_is_not_given_back_to_a_hungry_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits behind a message of its key that a slow handler has, and would come back at once: its holder
    asks for what is more urgent than the message that it has parked behind the other handler."""
    kind = {"assignment": "shared", "ordering": "key", "priority_mode": "strict", "_lanes": "all"}
    world = world_with(monkeypatch, 0, partitions=1, **kind)
    try:
        world.workers.append(Worker(world, "w0", 2, "even"))
        world.run_for(1)
        world._store([world._task(2, 0) for _ in range(300)])
        world.run_for(2)
        monkeypatch.setitem(sim_workers.PACES_MS, "even", (1500,))
        for key, lane, count in ((b"a", 2, 2), (b"b", 0, 20)):
            tasks = [world._task(lane, 0) for _ in range(count)]
            for task in tasks:
                task.key = key
            world._store(tasks)
            world.run_for(0.1)
        world.workers.append(Worker(world, "w1", 1, "even"))
        world.run_for(4)
        assert tasks[1].starts, "it goes on"
        assert max(task.grants - len(task.starts) for task in tasks) <= 2
        free = world._task(2, 0)
        world._store([free])
        world.run_for(0.2)
        assert free.starts, "the other member waits for what it may have"
    finally:
        world.end()


@pytest.mark.parametrize("mode", ["strict", "weighted"])
def test_an_urgent_message_waits_for_the_message_under_way(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    world = world_with(monkeypatch, 20, priority_mode=mode, partitions=1, _lanes="all")
    try:
        world.workers.append(Worker(world, "w0", 1, "even"))
        world.run_for(1)
        world._store([world._task(2, 0) for _ in range(500)])
        world.run_for(2)
        waits_ms = []
        for _ in range(10):
            urgent = world._task(0, 0)
            world._store([urgent])
            began_s = world.seconds()
            while not urgent.starts:
                world.run_for(0.001)
            waits_ms.append((world.seconds() - began_s) * 1000)
            world.run_for(0.33)
        # The news travel for up to 10 ms each way in this world, and a write takes up to 5 ms.
        assert sorted(waits_ms)[len(waits_ms) // 2] <= 60
        assert max(waits_ms) <= 100
    finally:
        world.end()
