"""Who is woken, how what is free is split, what credit there is, and that no wake-up is lost.

Also covers `broker/partition/credit_waiters.py` and `core/queue/in_flight.py`.
"""

import random
from collections import Counter
from typing import Any

import pytest

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model.commands import AlterTopic, DeleteTopic
from tailrace.core.model.group_commands import DeleteGroup, Heartbeat, JoinGroup, Membership
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import EvictMember, GrantTo, LeaseRun, PauseLeases, ResetTo
from tailrace.core.model.queue_commands import Ack, GiveBack, Lease, Nack
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.selection.lanes import LANES, OWED_MAX
from tailrace.errors import Full
from tests.broker.queue.test_fetch_request import Valve
from tests.broker.queue.test_lease_verbs import count_decisions, make
from tests.broker.queue_engine import SESSION_MS, Answers, QueueEngine, got, values

LONG_MS = 60_000


def shared(partitions: int = 1, **options: Any) -> QueueEngine:
    return make(partitions=partitions, assignment="shared", **{"ordering": "none", **options})


def wait_all(broker: QueueEngine, count: int, **fields: Any) -> list[Answers]:
    """As many members, each of which waits with a request on its own connection."""
    return [broker.begin_lease(member=f"m{n}", wait_ms=LONG_MS, **fields) for n in range(count)]


def give_back(broker: QueueEngine, *messages: Any) -> None:
    for item in messages:
        span = [item.offset, item.offset + 1]
        assert not isinstance(broker.ask(GiveBack("t", item.partition, "g", [(item.lease, span)])), Refusal)


# ------------------------------------------------------------------------------------------- who is woken


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_an_ack_that_frees_nothing_wakes_nobody(ordering: str) -> None:
    broker = shared(ordering=ordering)
    broker.send(b"a", b"b", b"c", keys=[b"k", b"l", None])
    held = broker.lease(member="worker")
    waiting = wait_all(broker, 50)
    decided = count_decisions(broker)
    broker.ack(held[0])
    assert [type(command) for command in decided] == [Ack]
    assert waiting == [[]] * 50


def test_as_many_are_woken_as_there_are_messages_in_order_of_arrival() -> None:
    broker = shared()
    waiting = wait_all(broker, 20)
    decided = count_decisions(broker)
    broker.send(b"a", b"b", b"c")
    assert [values(got(answers)) for answers in waiting if answers] == [[b"a"], [b"b"], [b"c"]]
    assert [command.member for command in decided if type(command) is LeaseRun] == ["m0", "m1", "m2"]


def test_who_found_nothing_keeps_its_place_in_the_line() -> None:
    broker = shared(ordering="key")
    broker.send(b"a", b"b", keys=[b"k", b"k"])
    (first,) = broker.lease(member="other", count_max=1)
    waiting = wait_all(broker, 3)
    broker.send(b"late", keys=[b"k"])  # For the member that has the key: m0 looked in vain.
    broker.send(b"free")
    assert [bool(answers) for answers in waiting] == [True, False, False]
    broker.ack(first)
    assert values(got(waiting[1])) == [b"b"]


def test_a_freed_key_wakes_one() -> None:
    broker = shared(ordering="key")
    broker.send(*(b"%d" % n for n in range(10)), keys=[b"k"] * 10)
    (first,) = broker.lease(member="other", count_max=1)
    waiting = wait_all(broker, 50)
    decided = count_decisions(broker)
    broker.ack(first)
    assert len([command for command in decided if type(command) is LeaseRun]) == 1
    assert [bool(answers) for answers in waiting] == [True] + [False] * 49


def test_back_offs_beside_a_hot_key_wake_one_each() -> None:
    broker = shared(ordering="key")
    broker.send(*(b"%d" % n for n in range(10)), keys=[b"%d" % n for n in range(10)])
    broker.send(*(b"hot" for _ in range(100)), keys=[b"hot"] * 100)
    held = broker.lease(member="worker", count_max=11)
    assert values(held) == [b"%d" % n for n in range(10)] + [b"hot"]
    waiting = wait_all(broker, 50)
    for seconds, message in enumerate(held[:10], 1):
        broker.nack(message, delay_ms=1_000 * seconds)
    decided = count_decisions(broker)
    broker.pass_s(10.5)
    assert [values(got(answers)) for answers in waiting if answers] == [[b"%d" % n] for n in range(10)]
    assert sum(type(command) is LeaseRun for command in decided) == 10, "99 wait for the hot key"


def test_what_belongs_to_a_members_key_comes_to_it_although_others_waited_longer() -> None:
    broker = shared(ordering="key")
    broker.send(b"a", keys=[b"k"])
    broker.lease(member="holder")
    waiting = wait_all(broker, 10)
    mine = broker.begin_lease(member="holder", wait_ms=LONG_MS)
    broker.send(b"b", keys=[b"k"])
    assert values(got(mine)) == [b"b"]
    assert waiting == [[]] * 10


def test_a_request_that_was_woken_and_is_gone_passes_it_on() -> None:
    broker = shared()
    gate = OpenGate()
    first = broker.begin_lease(member="a", wait_ms=LONG_MS, gate=gate)
    second = broker.begin_lease(member="b", wait_ms=LONG_MS)
    broker.runtime().wakeups.committed(0)
    pump, turn = broker.engine.pump, broker.engine.pump.turn

    def leaves_first() -> None:
        if any(part.roused for job in gate.fetches for part in job._parts):  # type: ignore[attr-defined]
            for job in list(gate.fetches):
                job.drop()
        turn()

    pump.turn = leaves_first  # type: ignore[method-assign]
    broker.send(b"only")
    assert first == []
    assert values(got(second)) == [b"only"]


def test_a_receiver_without_room_does_not_keep_it_from_others() -> None:
    broker = shared()
    valve = Valve()
    first = broker.begin_lease(member="a", wait_ms=LONG_MS, gate=valve)
    second = broker.begin_lease(member="b", wait_ms=LONG_MS)
    valve.shut = True
    broker.send(b"one")
    assert first == []
    assert values(got(second)) == [b"one"]
    broker.send(b"two")
    valve.open()
    broker.settle()
    assert values(got(first)) == [b"two"]


def test_a_member_without_credit_does_not_keep_it_from_others() -> None:
    broker = shared(in_flight_max=1)
    broker.send(b"a")
    (held,) = broker.lease(member="full")
    waiting = broker.begin_lease(member="full", wait_ms=LONG_MS)
    other = broker.begin_lease(member="other", wait_ms=LONG_MS)
    broker.send(b"b")
    assert values(got(other)) == [b"b"]
    broker.send(b"c")
    assert waiting == []
    broker.ack(held)
    assert values(got(waiting)) == [b"c"]


def test_the_groups_credit_goes_to_who_waits_longest_and_is_passed_on() -> None:
    broker = shared(partitions=2, group_in_flight_max=2)
    broker.send(b"a", b"b", partition=0)
    held = broker.lease(member="full")
    waiting = [broker.begin_lease(member=f"m{n}", partitions=[n % 2], wait_ms=LONG_MS) for n in range(6)]
    broker.send(b"c", b"d", partition=1)
    decided = count_decisions(broker)
    broker.ack(held[0])
    # m0 comes first and finds nothing in its partition; m1 does.
    assert [bool(answers) for answers in waiting] == [False, True, False, False, False, False]
    assert len(decided) <= 3
    broker.ack(held[1])
    assert [bool(answers) for answers in waiting] == [False, True, False, True, False, False]


def test_everybody_hears_of_a_pause_that_is_over_and_of_another_owner() -> None:
    broker = shared()
    broker.tell(broker.runtime(), PauseLeases("g", True))
    broker.send(b"a", b"b", b"c")
    waiting = wait_all(broker, 3)
    assert waiting == [[]] * 3
    broker.tell(broker.runtime(), PauseLeases("g", False))
    assert [len(got(answers)) for answers in waiting] == [1, 1, 1]
    waiting = wait_all(broker, 3)
    broker.tell(broker.runtime(), GrantTo("g", "m", 9))
    assert [answers[0][0].code for answers in waiting] == ["fenced"] * 3  # type: ignore[union-attr]


def test_the_cost_of_waiting_is_the_same_for_many_connections_of_one_member_name() -> None:
    """A newer request of the same member on the same connection is found without looking at the others."""
    broker = shared()
    gate = OpenGate()
    for n in range(40):
        broker.begin_lease(member=f"m{n}", wait_ms=LONG_MS, gate=gate)
    older = broker.begin_lease(member="m0", wait_ms=LONG_MS, gate=gate)
    newer = broker.begin_lease(member="m0", wait_ms=LONG_MS, gate=gate)
    assert got(older) == []
    assert newer == []


# ------------------------------------------------------------------------------------------------- shares


def test_what_is_free_is_split_among_the_members_that_wait() -> None:
    broker = shared()
    waiting = wait_all(broker, 10)
    broker.send(*(b"%d" % n for n in range(95)))
    assert [len(got(answers)) for answers in waiting] == [10, 10, 10, 10, 10, 9, 9, 9, 9, 9]


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_lanes_and_keys_are_split_too(ordering: str) -> None:
    broker = shared(ordering=ordering)
    waiting = wait_all(broker, 5)
    columns = {"priorities": [n % 5 for n in range(40)], "keys": [b"%d" % n for n in range(40)]}
    broker.send(*(b"%d" % n for n in range(40)), **columns)
    assert [len(got(answers)) for answers in waiting] == [8] * 5


def test_what_was_given_back_is_split() -> None:
    broker = shared()
    broker.send(*(b"%d" % n for n in range(40)))
    held = broker.lease(member="greedy")
    waiting = wait_all(broker, 4)
    lease = held[0].lease
    broker.ask(GiveBack("t", 0, "g", [(lease, [0, 40])]))
    assert [len(got(answers)) for answers in waiting] == [10] * 4


def test_two_requests_of_one_member_count_once() -> None:
    broker = shared()
    other = broker.begin_lease(member="b", wait_ms=LONG_MS)
    one = [broker.begin_lease(member="a", wait_ms=LONG_MS) for _ in range(3)]
    broker.send(*(b"%d" % n for n in range(10)))
    assert len(got(other)) == 5
    assert sum(len(got(answers)) for answers in one if answers) == 5


def test_nobody_else_waits_so_all_of_it_goes_at_once() -> None:
    broker = shared()
    waiting = broker.begin_lease(member="a", wait_ms=LONG_MS)
    broker.send(*(b"%d" % n for n in range(100)))
    assert len(got(waiting)) == 100


# ------------------------------------------------------------------------------------- more urgent ones only


@pytest.mark.parametrize("mode", ["strict", "weighted"])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_who_has_enough_is_given_only_what_is_more_urgent(mode: str, ordering: str) -> None:
    broker = shared(ordering=ordering, priority_mode=mode)
    broker.send(*(b"%d" % n for n in range(10)), keys=[b"%d" % n for n in range(10)])
    broker.lease(member="a", count_max=3)
    assert broker.lease(member="a", above=2) == []
    waiting = broker.begin_lease(member="a", above=2, wait_ms=LONG_MS)
    broker.send(b"low", b"same", keys=[b"x", b"y"], priorities=[3, 2])
    assert waiting == []
    broker.send(b"urgent", b"high", b"low", keys=[b"u", b"v", b"w"], priorities=[0, 1, 4])
    assert values(got(waiting)) == [b"urgent", b"high"]


def test_an_idle_member_comes_before_one_that_has_enough() -> None:
    broker = shared()
    busy = broker.begin_lease(member="busy", above=2, wait_ms=LONG_MS)
    idle = broker.begin_lease(member="idle", wait_ms=LONG_MS)
    broker.send(b"urgent", priorities=[0])
    assert values(got(idle)) == [b"urgent"]
    assert busy == []


def test_urgent_messages_are_split_among_those_that_have_enough() -> None:
    broker = shared()
    waiting = [broker.begin_lease(member=f"m{n}", above=2, wait_ms=LONG_MS) for n in range(3)]
    broker.send(*(b"%d" % n for n in range(4 * 3)), priorities=[n % 2 * 2 for n in range(4 * 3)])
    assert 2 * len(waiting) <= OWED_MAX
    assert [len(got(answers)) for answers in waiting] == [2] * 3


def test_the_least_choosy_one_is_woken_first() -> None:
    broker = shared()
    choosy = broker.begin_lease(member="a", above=1, wait_ms=LONG_MS)
    other = broker.begin_lease(member="b", above=4, wait_ms=LONG_MS)
    broker.send(b"normal", priorities=[3])
    assert choosy == []
    assert values(got(other)) == [b"normal"]


def test_ordinary_messages_cost_those_that_have_enough_nothing() -> None:
    broker = shared()
    for n in range(50):
        broker.begin_lease(member=f"m{n}", above=2, wait_ms=LONG_MS)
    decided = count_decisions(broker)
    broker.send(b"a", b"b", b"c")
    assert [command for command in decided if type(command) is LeaseRun] == []


def test_a_newer_request_for_anything_replaces_one_for_what_is_urgent() -> None:
    broker = shared()
    gate = OpenGate()
    urgent = broker.begin_lease(member="a", above=2, wait_ms=LONG_MS, gate=gate)
    anything = broker.begin_lease(member="a", wait_ms=LONG_MS, gate=gate)
    assert got(urgent) == []
    broker.send(b"a")
    assert values(got(anything)) == [b"a"]


def test_weighted_shares_hold_although_somebody_always_asks_for_what_is_urgent() -> None:
    broker = shared(priority_mode="weighted")
    many = 4_000
    for _ in range(4):
        broker.send(*[b"x"] * many, priorities=[n % 2 * 2 for n in range(many)])
    lanes: list[int] = []
    while len(lanes) < 2_000:
        for above in (2, None):
            for item in broker.lease(member="m", count_max=1 + len(lanes) % 3, above=above):
                lanes.append(item.offset % 2 * 2)
                broker.ack(item)
    for start in range(0, 1_000, 100):
        shares = Counter(lanes[start : start + 1_000])
        # 50 to 15, with what the empty lanes leave to the heaviest.
        assert 0.9 * 850 <= shares[0] <= 1.1 * 850, shares


# ------------------------------------------------------------------------------------------------- hungry


def members(broker: QueueEngine, *names: str) -> dict[str, Membership]:
    known = {}
    for name in names:
        ((known[name], _),) = broker.submit(  # type: ignore[assignment]
            JoinGroup(
                "g", name, ["t"], {"session_ms": SESSION_MS, "assignment": "shared", "ordering": "none"}
            )
        )
    for name in names:
        ((known[name], _),) = broker.submit(Heartbeat("g", name, 0))  # type: ignore[assignment]
    return known


def poll(broker: QueueEngine, known: dict[str, Membership], name: str) -> Answers:
    return broker.submit(Heartbeat("g", name, known[name].version, [], 30_000))


def test_who_holds_messages_hears_of_a_member_that_waits() -> None:
    broker = QueueEngine()
    broker.create(partitions=2)
    known = members(broker, "busy", "idle")
    broker.send(*(b"%d" % n for n in range(10)), partition=1)
    held = broker.lease(member="busy")
    told = poll(broker, known, "busy")
    mine = poll(broker, known, "idle")
    waiting = broker.begin_lease(member="idle", wait_ms=LONG_MS)
    broker.pass_s(0.05)
    ((answer, _),) = told
    assert isinstance(answer, Membership)
    assert answer.hungry == [("t", 1)]
    assert mine == []
    told = poll(broker, known, "busy")
    broker.pass_s(0.04)
    assert told == []  # Not more often than every 100 ms,
    broker.pass_s(0.1)
    assert told  # but again while the other waits.
    give_back(broker, *held[5:])
    assert len(got(waiting)) == 1


def test_nobody_is_told_who_holds_a_single_message_or_nothing() -> None:
    broker = QueueEngine()
    broker.create(partitions=2)
    known = members(broker, "a", "b", "c")
    broker.send(b"one")
    broker.lease(member="a")
    polls = [poll(broker, known, name) for name in ("a", "b")]
    waiting = [broker.begin_lease(member=name, wait_ms=LONG_MS) for name in ("b", "c")]
    broker.pass_s(1)
    assert polls == [[], []]
    assert waiting == [[], []]


def test_nobody_is_told_when_the_one_that_waits_has_enough() -> None:
    broker = QueueEngine()
    broker.create()
    known = members(broker, "a", "b")
    broker.send(b"one", b"two")
    broker.lease(member="a")
    told = poll(broker, known, "a")
    broker.begin_lease(member="b", above=2, wait_ms=LONG_MS)
    broker.pass_s(1)
    assert told == []


def test_it_costs_nothing_when_nobody_waits_any_more() -> None:
    broker = QueueEngine()
    broker.create()
    known = members(broker, "a", "b")
    broker.send(b"one", b"two")
    broker.lease(member="a")
    broker.begin_lease(member="b", wait_ms=1_000)
    broker.pass_s(2)
    told = poll(broker, known, "a")
    broker.pass_s(5)
    assert told == []
    assert broker.engine.leasing.book.hunger._waiting == {}


# ------------------------------------------------------------------------------------------------- credit


def recount(broker: QueueEngine, group: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for runtime in broker.engine.topics.queues():
        if runtime.fault is None:
            ledger = runtime.state.queues._ledgers.get(group)
            found.update(ledger.in_flight if ledger is not None else {})
    return found


def counted(broker: QueueEngine, group: str) -> Counter[str]:
    flights = broker.engine.leasing.book.credit.find(group)
    if flights is None:
        return Counter()
    assert flights.total == sum(flights.by_member.values())
    return Counter(flights.by_member)


@pytest.mark.parametrize("seed", range(12))
def test_credit_is_what_a_recount_says_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    broker = QueueEngine()
    broker.create("t", partitions=2)
    broker.create("u", partitions=1)
    for topic in ("t", "u"):
        for group in ("g", "h"):
            broker.enlist(group=group, topic=topic, assignment="shared", ordering="none")
    held: list[tuple[str, str, Any]] = []
    topics = ["t", "u"]

    def act() -> None:
        kind = chance.randrange(13)
        topic, group = chance.choice(topics), chance.choice(["g", "h"])
        runtimes = broker.engine.topics.get(topic).runtimes
        runtime = chance.choice(runtimes)
        if kind < 4:
            broker.send(*[b"x"] * chance.randrange(1, 9), topic=topic, partition=runtime.partition)
        elif kind < 7:
            answers = broker.begin_lease(
                group=group, topic=topic, member=chance.choice("abc"), count_max=4, lease_ms=5_000
            )
            if answers and not isinstance(answers[0][0], Refusal):
                held.extend((group, topic, item) for item in got(answers))
        elif kind == 7 and held:
            group, topic, item = held.pop(chance.randrange(len(held)))
            if topic in topics:
                broker.ask(Ack(topic, item.partition, group, [(item.lease, [item.offset, item.offset + 1])]))
        elif kind == 8:
            broker.pass_s(chance.choice([0.5, 6]))
        elif kind == 9:
            command = chance.choice([ResetTo(group, 0), EvictMember(group, "a")])
            runtime.submit(command, b"", lambda reply, parts: None)
            broker.settle()
        elif kind == 10:
            log = runtime.log
            log.fail_next(Full("no space"))  # type: ignore[attr-defined]
            broker.publish(b"lost", topic=topic, partition=runtime.partition)
            broker.pass_s(3)
        elif kind == 11:
            broker.restart()
        elif chance.random() < 0.3:
            act_rarely(topic, group)

    def act_rarely(topic: str, group: str) -> None:
        kind = chance.randrange(3)
        if kind == 0:
            count = len(broker.engine.topics.get(topic).runtimes)
            broker.ask(AlterTopic(topic, {"partitions": count + 1}))
        elif kind == 1 and topic == "u":
            topics.remove("u")
            broker.ask(DeleteTopic("u"))
        elif kind == 2:
            broker.submit(DeleteGroup(group, force=True))

    for _ in range(40):
        act()
        for group in ("g", "h"):
            assert counted(broker, group) == recount(broker, group)


# ------------------------------------------------------------------------------------- no wake-up is lost


def unserved(broker: QueueEngine) -> list[str]:
    """Requests that wait although a partition would give them something now."""
    found = []
    for job in broker.engine.leasing.book.jobs:
        request = job.request
        for partition, generation in request.partitions:
            runtime = broker.runtime(request.topic, partition)
            policy = runtime.state.queues.policy(request.group)
            assert policy is not None
            credit = broker.engine.leasing.book.credit.left(
                request.group, request.member, policy.in_flight_max, policy.group_in_flight_max
            )
            if credit <= 0 or job._parked or job._pace is not None or not job._begun:
                continue
            command = LeaseRun(
                *(request.group, request.member, generation, 1, 1, 1 << 20, runtime.end_offset),
                above=LANES if request.above is None else request.above,
            )
            wall_us = runtime.pump.clock.wall_us()
            decision = runtime.state.decide(command, TurnInput(runtime.time_us(), wall_us, 0, runtime.cache))
            if decision.facts:
                found.append(f"{request.member} (above {request.above}) could have {decision.facts}")
    return found


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_what_it_could_have(seed: int) -> None:
    chance = random.Random(seed)
    options = {
        "ordering": chance.choice(["none", "key", "key"]),
        "priority_mode": chance.choice(["strict", "weighted"]),
        "in_flight_max": chance.choice([2, 5, 6]),
        "group_in_flight_max": chance.choice([6, 100_000]),
    }
    broker = shared(partitions=chance.choice([1, 3]), **options)
    runtimes = broker.engine.topics.get("t").runtimes
    held: list[Any] = []
    waiting: list[Answers] = []
    gates = [Valve() for _ in range(4)]

    def act() -> None:
        kind = chance.randrange(12)
        if kind < 3:
            many = chance.randrange(1, 5)
            broker.send(
                *[b"x"] * many,
                partition=chance.randrange(len(runtimes)),
                keys=[chance.choice([None, b"a", b"b", b"c"]) for _ in range(many)],
                priorities=[chance.randrange(5) for _ in range(many)] if seed % 3 else None,
            )
        elif kind < 7:
            number = chance.randrange(8)
            partitions = chance.sample(range(len(runtimes)), chance.randrange(1, len(runtimes) + 1))
            fields = {"count_max": chance.choice([1, 3, 500]), "above": chance.choice([None, None, 1, 2, 4])}
            waiting.append(
                broker.begin_lease(
                    member=f"m{number}",
                    partitions=partitions,
                    wait_ms=chance.choice([200, 5_000]),
                    lease_ms=chance.choice([500, 30_000]),
                    gate=gates[number % 4],
                    **fields,
                )
            )
        elif kind < 9 and held:
            broker.ack(held.pop(chance.randrange(len(held))))
        elif kind == 9 and held:
            item = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.5:
                give_back(broker, item)
            else:
                nack(broker, item, chance.choice([0, 300]))
        elif kind == 10:
            broker.pass_s(chance.choice([0.001, 0.1, 1]))
        elif kind == 11:
            number = chance.randrange(4)
            if chance.random() < 0.5:
                for job in list(gates[number].fetches):
                    job.drop()
            else:
                gates[number].shut = not gates[number].shut
                if not gates[number].shut:
                    gates[number].open()
            broker.settle()

    for _ in range(250):
        act()
        for answers in [answers for answers in waiting if answers]:
            waiting.remove(answers)
            if not isinstance(answers[0][0], Refusal):
                held += got(answers)
        assert unserved(broker) == []


def nack(broker: QueueEngine, item: Any, delay_ms: int) -> None:
    span = [item.offset, item.offset + 1]
    broker.ask(Nack("t", item.partition, "g", item.lease, span, delay_ms=delay_ms))


def test_requests_name_a_lane() -> None:
    broker = shared()
    for above in (0, 5, -1):
        reply = broker.ask(Lease("t", "g", "m", [(0, 1)], above=above))
        assert isinstance(reply, Refusal)
        assert "above" in reply.message
