"""Groups of real consumer processes under load, while members and the broker are killed, stopped and moved.

Each test has a short form and, marked `long`, the same with more rounds.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.group_workload import (
    GROUP,
    TOPIC,
    Members,
    Publisher,
    drained,
    heard_of,
    history_of,
    owners,
    until,
)
from tests.history.group_history import Finished, GroupHistory, Spot
from tests.history.record import now_ns

LEASE_MS = SESSION_MS = 2000
MARGIN_MS = 4000
"""What a busy machine may add to every bound; and all the time for which it let processes stand still."""
ROUNDS_MORE = 6
"""So many rounds say nothing about time, because a process stood still, before a test gives up."""
QUICK: dict[str, Any] = {
    "lease_ms": LEASE_MS,
    "session_ms": SESSION_MS,
    "heartbeat_ms": 400,
    "max_attempts": 1000,
}
PARTITIONS = 6

Scenario = Callable[[BrokerProcess, tailrace.Client], Coroutine[Any, Any, None]]


def play(folder: Path, scenario: Scenario, *, durability: str = "interval", limit_s: float = 100.0) -> None:
    """Run a scenario against a broker of its own that has the topic."""

    async def main(broker: BrokerProcess) -> None:
        async with asyncio.timeout(limit_s), tailrace.connect(broker.url, timeout=20) as client:
            await client.admin().create_topic(TOPIC, partitions=PARTITIONS, durability=durability)
            await scenario(broker, client)

    with BrokerProcess(folder / "data").start() as broker:
        asyncio.run(main(broker))
        assert broker.stop() == 0


async def balanced(client: tailrace.Client, *names: str) -> None:
    """Wait until some members share the partitions evenly, and nobody else has any."""

    async def so() -> bool:
        counts = Counter(member for member, _ in (await owners(client)).values())
        return set(counts) == set(names) and max(counts.values()) - min(counts.values()) <= 1

    await until(so, f"{names} share the partitions")


# ------------------------------------------------------------------------------ a member is killed


async def killed_members(
    folder: Path, broker: BrokerProcess, client: tailrace.Client, rounds: int, seed: int
) -> None:
    rng = random.Random(seed)
    with Members(folder, broker.url, options=QUICK, work_ms=20, concurrency=8) as members:
        alive, dead = ["m0", "m1", "m2"], []
        members.start(*alive)
        async with Publisher(broker.url, members, rate=200) as publisher:
            calm = 0
            for number in range(ROUNDS_MORE + rounds):
                await balanced(client, *alive)
                await members.at_work(20, *alive)
                before = await owners(client)
                victim = rng.choice(alive)
                killed_ns, held = await members.kill_at_work(victim)
                alive.remove(victim)
                dead.append(victim)
                await balanced(client, *alive)
                after = await owners(client)
                await members.at_work(20, *alive)
                window = (killed_ns, now_ns())
                kept = {place: held for place, held in before.items() if held[0] != victim}
                if is_calm(history_of(members), *window):
                    calm += 1
                    # Owner and generation of what stays are untouched; what was the victim's has new ones.
                    assert {place: after[place] for place in kept} == kept
                    assert all(after[place][1] > before[place][1] for place in before.keys() - kept.keys())
                    expect_undisturbed(history_of(members), set(kept), set(alive), window)
                if calm == rounds:
                    break
                members.start(f"m{number + 3}")
                alive.append(f"m{number + 3}")
            assert calm == rounds, "the machine stood still again and again: nothing can be said about time"
            await publisher.end()
            await drained(client)
            expect_redelivered(history_of(members, publisher), victim, killed_ns, set(kept))
            await expect_traced(client, history_of(members), victim, killed_ns, held)
        await members.end(but=tuple(dead))
        history_of(members, publisher).expect_clean()


def is_calm(history: GroupHistory, killed_ns: int, to_ns: int) -> bool:
    """Whether processes did not stand still for so long that sessions or messages may have suffered."""
    late_ns = history.lateness_ns(killed_ns - SESSION_MS * 500_000, to_ns)
    return sum(late_ns) < 0.3 * SESSION_MS * 1_000_000


def expect_undisturbed(
    history: GroupHistory, kept: set[int], members: set[str], window: tuple[int, int]
) -> None:
    """Nobody lost a partition, and what stays was delivered all the time."""
    revoked = [r for r in history.moved if r.change == "revoked" and r.at_ns > window[0]]
    assert not [row for row in revoked if row.member in members]
    gaps = {partition: history.longest_gap_ns(partition, *window) / 1e6 for partition in range(PARTITIONS)}
    worst_kept = max(gaps[partition] for partition in kept)
    best_moved = min(gaps[partition] for partition in gaps.keys() - kept)
    assert worst_kept < 0.7 * SESSION_MS, gaps
    assert worst_kept < best_moved, gaps


def expect_redelivered(history: GroupHistory, victim: str, killed_ns: int, kept: set[int]) -> None:
    """What the victim held, in its hands or in its memory, is with others after a lease time."""
    late_ns = killed_ns + in_time_ns(history, killed_ns)
    sent = {
        (s.partition, s.offset) for s in history.sends if s.return_ns < killed_ns and s.partition not in kept
    }
    left = {spot for spot in sent if spot not in history.acks or history.acks[spot][0].return_ns > killed_ns}
    by_others = {r.spot for r in history.got if r.member != victim and r.at_ns < late_ns}
    # Of what was in its hands, it may have settled a few without living to see the answer.
    assert left - history.in_hand(killed_ns, victim) <= by_others


def in_time_ns(history: GroupHistory, killed_ns: int) -> int:
    """How long it may take until others have what a victim held."""
    usual_ns = (LEASE_MS + MARGIN_MS) * 1_000_000
    return usual_ns + sum(history.lateness_ns(killed_ns, killed_ns + 5 * usual_ns))


async def expect_traced(
    client: tailrace.Client, history: GroupHistory, victim: str, killed_ns: int, held: set[Spot]
) -> None:
    """The trace of a message that was in the victim's hands tells of both deliveries, and of the end."""
    again = {row.spot: row.member for row in history.got if row.member != victim and row.spot in held}
    assert again.keys() == held
    for (partition, offset), member in list(again.items())[:3]:
        (life,) = await client.trace(TOPIC, partition=partition, offset=offset)
        assert life.status == "settled"
        lost_us, found_us = delivery_times(life, victim, member)
        assert 0 < found_us - lost_us < in_time_ns(history, killed_ns) / 1000


def delivery_times(life: tailrace.Life, *members: str) -> list[int]:
    """When a message was last delivered to each of some members."""
    return [
        max(e.time_us for e in life.events if (e.group, e.event, e.member) == (GROUP, "delivered", member))
        for member in members
    ]


def test_a_killed_member_loses_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    play(tmp_path, lambda broker, client: killed_members(tmp_path, broker, client, 1, seed=1))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(2, 5))
def test_many_killed_members(tmp_path: Path, seed: int) -> None:
    play(tmp_path, lambda broker, client: killed_members(tmp_path, broker, client, 8, seed), limit_s=380)


async def killed_sharers(
    folder: Path, broker: BrokerProcess, client: tailrace.Client, rounds: int, seed: int
) -> None:
    rng = random.Random(seed)
    options = {**QUICK, "assignment": "shared", "ordering": "key"}
    with Members(folder, broker.url, options=options, work_ms=20, concurrency=8) as members:
        alive, dead = ["m0", "m1", "m2"], []
        members.start(*alive)
        async with Publisher(broker.url, members, rate=200) as publisher:
            for number in range(rounds):
                await members.at_work(20, *alive)
                victim = rng.choice(alive)
                killed_ns, held = await members.kill_at_work(victim)
                alive.remove(victim)
                dead.append(victim)
                members.start(f"m{number + 3}")
                alive.append(f"m{number + 3}")
                await redelivered(members, held, victim)
                assert now_ns() - killed_ns < in_time_ns(history_of(members), killed_ns)
            await members.at_work(20, *alive)
        await drained(client)
        await members.end(but=tuple(dead))
        history_of(members, publisher).expect_clean()


async def redelivered(members: Members, spots: set[Spot], victim: str) -> None:
    """Wait until others got what the victim had in its hands."""

    async def so() -> bool:
        others = {row.spot for row in history_of(members).got if row.member != victim}
        return spots <= others

    await until(so, f"{spots} are delivered again")


def test_a_killed_member_of_a_shared_group_keeps_the_order_of_keys(tmp_path: Path) -> None:
    play(tmp_path, lambda broker, client: killed_sharers(tmp_path, broker, client, 1, seed=1))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(2, 5))
def test_many_killed_members_of_a_shared_group(tmp_path: Path, seed: int) -> None:
    play(tmp_path, lambda broker, client: killed_sharers(tmp_path, broker, client, 10, seed), limit_s=380)


# ------------------------------------------------------------------------------ the broker is killed

AHEAD = 60
"""Messages that a member leases ahead: together with what is in its hands, all that a kill can repeat."""


async def killed_broker(
    folder: Path, broker: BrokerProcess, client: tailrace.Client, rounds: int, seed: int
) -> None:
    rng = random.Random(seed)
    options = {**QUICK, "lease_ms": 3000, "session_ms": 6000, "prefetch": AHEAD, "batch_size": AHEAD // 2}
    kills: list[int] = []
    with Members(folder, broker.url, options=options, work_ms=3) as members:
        members.start("m0", "m1")
        async with Publisher(broker.url, members, rate=300) as publisher:
            await balanced(client, "m0", "m1")
            for _ in range(rounds):
                await members.at_work(20 + rng.randrange(60))
                broker.kill()
                kills.append(now_ns())
                await asyncio.to_thread(broker.start)
            await heard_of(client, time.time_ns() // 1000, "m0", "m1")
            await members.at_work(50)
        await drained(client)
        assert {member for member, _ in (await owners(client)).values()} == {"m0", "m1"}
        await members.end()
        history = history_of(members, publisher, kills)
    history.expect_clean()
    expect_few_repeats(history, lease_ms=3000)


def expect_few_repeats(history: GroupHistory, lease_ms: int) -> None:
    """What came twice was in flight at a kill: leased, and not confirmed as settled."""
    repeats = 0
    for spot, rows in history.repeated().items():
        for before, after in pairwise(rows):
            repeats += 1
            told = history.outcome.get((spot, before.lease))
            assert told is not None, f"nobody was killed but the broker: {before}"
            assert told.outcome != "ok", f"{after} although {told}"
            since_ns = before.at_ns - lease_ms * 1_000_000
            near = any(since_ns < kill < after.at_ns for kill in history.kills)
            assert near, f"{before} and {after}, and the broker was not killed"
    in_flight = AHEAD + AHEAD // 2 + 4
    assert repeats <= len(history.kills) * 2 * in_flight


@pytest.mark.parametrize("durability", ["interval", "fsync"])
def test_what_was_settled_stays_settled_when_the_broker_is_killed(tmp_path: Path, durability: str) -> None:
    def scenario(broker: BrokerProcess, client: tailrace.Client) -> Coroutine[Any, Any, None]:
        return killed_broker(tmp_path, broker, client, 2, seed=1)

    play(tmp_path, scenario, durability=durability)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("durability", ["interval", "fsync"])
@pytest.mark.parametrize("seed", range(2, 4))
def test_many_kills_of_the_broker(tmp_path: Path, durability: str, seed: int) -> None:
    def scenario(broker: BrokerProcess, client: tailrace.Client) -> Coroutine[Any, Any, None]:
        return killed_broker(tmp_path, broker, client, 20, seed)

    play(tmp_path, scenario, durability=durability, limit_s=380)


# ------------------------------------------------------------------------------ a member is stopped


async def stopped_member(
    folder: Path, broker: BrokerProcess, client: tailrace.Client, assignment: str, rounds: int
) -> None:
    options = {**QUICK, "assignment": assignment, "prefetch": 40, "batch_size": 20}
    with Members(folder, broker.url, options=options, work_ms=40) as members:
        members.start("sleeper", "other")
        async with Publisher(broker.url, members, rate=100) as publisher:
            for _ in range(rounds):
                await members.at_work(10)
                try:
                    held = await members.stop_at_work("sleeper")
                    taken = await taken_over(client, members, held)
                finally:
                    members["sleeper"].signal(signal.SIGCONT)
                await members.at_work(20)
                expect_told(members, taken)
        await drained(client)
        await members.end()
        history_of(members, publisher).expect_clean(ordered=False)


async def taken_over(client: tailrace.Client, members: Members, held: set[Spot]) -> set[Spot]:
    """Wait until the sleeper is no member and the other got its messages; those that it got."""
    taken: set[Spot] = set()

    async def so() -> bool:
        nonlocal taken
        taken = {row.spot for row in members["other"].got()} & held
        group = await client.groups().describe(GROUP)
        return bool(taken) and [row["member"] for row in group.members] == ["other"]

    await until(so, f"another member got some of {held}")
    return taken


def expect_told(members: Members, taken: set[Spot]) -> None:
    """The sleeper could not settle what others had got meanwhile, and was told."""
    rows = [row for row in members["sleeper"].history.rows() if isinstance(row, Finished)]
    first = {row.spot: row.outcome for row in reversed(rows)}
    assert {first.get(spot) for spot in taken} == {"lost"}


@pytest.mark.parametrize("assignment", ["partitions", pytest.param("shared", marks=pytest.mark.long)])
def test_a_stopped_member_is_replaced_told_and_goes_on(tmp_path: Path, assignment: str) -> None:
    play(tmp_path, lambda broker, client: stopped_member(tmp_path, broker, client, assignment, 1))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_a_member_that_is_stopped_again_and_again(tmp_path: Path, assignment: str) -> None:
    def scenario(broker: BrokerProcess, client: tailrace.Client) -> Coroutine[Any, Any, None]:
        return stopped_member(tmp_path, broker, client, assignment, 10)

    play(tmp_path, scenario, limit_s=380)


# ------------------------------------------------------------------------------ members come and go


async def rolling(
    folder: Path, broker: BrokerProcess, client: tailrace.Client, assignment: str, changes: int
) -> None:
    options = {**QUICK, "session_ms": 6000, "lease_ms": 6000, "assignment": assignment}
    with Members(folder, broker.url, options=options, work_ms=3) as members:
        members.start("steady")
        members.start("x", "y", "z", stay_s=0.7)

        async def changed() -> bool:
            return len({row.member for row in history_of(members).got}) > changes

        async with Publisher(broker.url, members, keys=30, rate=300) as publisher:
            await until(changed, f"{changes} members have come", timeout_s=300)
        await drained(client)
        await members.end()
        history = history_of(members, publisher)
    history.expect_clean()
    # Everybody left in peace, so nothing had to come twice.
    assert not history.repeated()


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_members_that_come_and_go(tmp_path: Path, assignment: str) -> None:
    play(tmp_path, lambda broker, client: rolling(tmp_path, broker, client, assignment, 9))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_members_that_come_and_go_for_long(tmp_path: Path, assignment: str) -> None:
    def scenario(broker: BrokerProcess, client: tailrace.Client) -> Coroutine[Any, Any, None]:
        return rolling(tmp_path, broker, client, assignment, 120)

    play(tmp_path, scenario, limit_s=380)
