"""Leases in the shell: what is answered and when, who is woken, and that nothing goes to who is gone.

Also covers `broker/queue/lease_book.py`, `broker/queue/lease_request.py` and `broker/queue/lease_part.py`.
"""

import gc
from typing import Any

import pytest

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.broker.queue.lease_request import LeaseRequest
from tailrace.core.model.commands import DeleteTopic, Done, Offsets, TrimTopic
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import GrantTo, PauseLeases
from tailrace.core.model.queue_commands import (
    Ack,
    Commit,
    Committed,
    Extend,
    Extended,
    Lease,
    Leases,
    Nack,
    RejectMessages,
    Reopen,
    Settled,
    SettleOffsets,
)
from tailrace.core.model.turn_input import TurnInput
from tests.broker.queue.test_fetch_request import Valve
from tests.broker.queue_engine import Answers, QueueEngine, got, grants, values


def make(partitions: int = 1, ring: int = 1 << 20, **options: Any) -> QueueEngine:
    broker = QueueEngine()
    broker.create(partitions=partitions, ring_buffer_bytes=ring)
    broker.enlist(**options)
    return broker


def waiting_places(broker: QueueEngine) -> int:
    return sum(len(line) for queue in broker.engine.topics.queues() for line in queue.wakeups._lines.values())


# ------------------------------------------------------------------------------------------------- answers


def test_plain_messages_come_in_the_stored_frames_without_a_copy() -> None:
    broker = make()
    broker.send(*(b"%d" % number for number in range(500)))
    parts: list[Any] = []
    request = Lease("t", "g", "m", [(0, 1)])
    broker.engine.gateway.submit(request, b"", lambda reply, body: parts.extend(body))
    broker.settle()
    (stored,) = broker.runtime().tail.frames(0, 1)
    assert parts[1] is stored.body


def test_messages_come_with_their_counters_and_leases() -> None:
    broker = make()
    broker.send(b"a", b"b", b"c")
    first = broker.lease(count_max=2)
    assert [(item.offset, item.value, item.deliveries, item.failures) for item in first] == [
        (0, b"a", 1, 0),
        (1, b"b", 1, 0),
    ]
    assert first[0].lease == first[1].lease
    second = broker.lease()
    assert values(second) == [b"c"]
    assert second[0].lease != first[0].lease
    assert broker.ack(*first, *second) == Settled()
    assert broker.ask(Committed("t", "g")) == Offsets([3])
    assert broker.lease() == []


@pytest.mark.parametrize("ring", [0, 1 << 20])
def test_an_answered_request_leaves_no_garbage(ring: int) -> None:
    """What it leased would stay in memory until a collection, and cause collections all the time."""
    broker = make(partitions=2, ring=ring)
    for partition in (0, 1):
        broker.send(b"a", b"b", b"c", partition=partition, priorities=[0, 2, 4])

    def work() -> None:
        for message in broker.lease(count_max=4):
            broker.nack(message, failure=False)
        broker.begin_lease(wait_ms=1_000)
        broker.begin_lease(wait_ms=1_000)
        broker.pass_s(2)

    work()
    gc.collect()
    gc.disable()
    try:
        work()
        jobs = [item for item in gc.get_objects() if isinstance(item, LeaseRequest)]
    finally:
        gc.enable()
    assert jobs == []


@pytest.mark.parametrize("ring", [0, 600, 1 << 20])
def test_cold_and_hot_give_the_same_messages_in_order(ring: int) -> None:
    broker = make(ring=ring)
    expected = [b"%d" % number for number in range(40)]
    for value in expected:
        broker.send(value)
    seen: list[bytes] = []
    while len(seen) < 40:
        batch = broker.lease(count_max=7)
        assert batch
        seen += values(batch)
        broker.ack(*batch)
    assert seen == expected


def test_a_retry_in_a_cold_frame_comes_alone() -> None:
    broker = make(ring=0)
    for number in range(10):
        broker.send(b"%d" % number, b"+")
    held = broker.lease(count_max=20)
    broker.nack(held[4], delay_ms=0)
    (again,) = broker.lease()
    assert (again.value, again.deliveries, again.failures) == (b"2", 2, 1)


def test_only_what_is_committed_is_leased() -> None:
    broker = make()
    broker.threads.holding = True
    waiting = broker.begin_lease(wait_ms=1000)
    published = broker.publish(b"a")
    assert (published, waiting) == ([], [])
    broker.threads.run_held()
    broker.settle()
    assert published
    assert values(got(waiting)) == [b"a"]


def test_a_lease_does_not_wait_for_the_disk_and_an_ack_does() -> None:
    broker = make()
    broker.send(b"a")
    broker.threads.holding = True
    (message,) = broker.lease()
    assert not broker.threads.held
    acked = broker.submit(Ack("t", 0, "g", [(message.lease, [0, 1])]))
    assert acked == []
    broker.threads.run_held()
    broker.settle()
    assert acked == [(Settled(), b"")]


def test_partitions_take_turns() -> None:
    broker = make(partitions=3)
    for partition in range(3):
        broker.send(*(b"%d" % partition for _ in range(4)), partition=partition)
    seen = [values(broker.lease(count_max=2)) for _ in range(6)]
    assert seen == [[b"%d" % (number % 3)] * 2 for number in range(6)]


def test_one_answer_has_messages_of_all_partitions() -> None:
    broker = make(partitions=3)
    for partition in (0, 2):
        broker.send(b"%d" % partition, partition=partition)
    assert sorted(values(broker.lease())) == [b"0", b"2"]


def test_bytes_are_bounded_by_whole_frames() -> None:
    broker = make()
    for _ in range(4):
        broker.send(bytes(1000))
    assert len(broker.lease(bytes_max=4000)) == 2
    assert len(broker.lease(bytes_max=1)) == 1


# ------------------------------------------------------------------------------------------------- waiting


def test_waits_until_something_is_committed() -> None:
    broker = make(partitions=2)
    waiting = broker.begin_lease(wait_ms=1000)
    broker.pass_s(0.9)
    assert waiting == []
    broker.send(b"a", partition=1)
    assert values(got(waiting)) == [b"a"]
    assert waiting_places(broker) == 0


def test_is_answered_with_nothing_when_the_time_is_up() -> None:
    broker = make(partitions=2)
    waiting = broker.begin_lease(wait_ms=1000)
    broker.pass_s(1.1)
    assert got(waiting) == []
    assert waiting_places(broker) == 0
    assert not broker.engine.leasing.book.jobs


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_request_for_nothing_ends_the_one_before_and_is_answered_at_once(partitions: int) -> None:
    """A member withdraws its poll before it gives up a partition, and waits for the answer."""
    broker = make(partitions)
    gate = OpenGate()
    first = broker.begin_lease(wait_ms=60_000, gate=gate)
    assert first == []
    second = broker.begin_lease(count_max=0, gate=gate)
    assert grants(first) == grants(second) == []
    alone = broker.begin_lease(count_max=0, gate=gate)
    assert grants(alone) == []
    broker.send(b"a")
    assert values(broker.lease(gate=gate)) == [b"a"]


def test_costs_nothing_while_nothing_happens() -> None:
    broker = make()
    broker.begin_lease(wait_ms=60_000)
    entry = broker.runtime().entry
    decided = count_decisions(broker)
    broker.pass_s(59)
    assert decided == []
    assert broker.runtime().entry == entry


def count_decisions(broker: QueueEngine) -> list[Any]:
    state = broker.runtime().state
    decided: list[Any] = []
    decide = state.decide

    def counted(command: Any, turn: TurnInput) -> Any:
        decided.append(command)
        return decide(command, turn)

    state.decide = counted  # type: ignore[method-assign]
    return decided


def test_a_message_that_waits_for_its_back_off_with_nobody_there_is_no_busy_loop() -> None:
    broker = make()
    broker.send(b"a")
    (message,) = broker.lease()
    broker.nack(message, delay_ms=100)
    decided = count_decisions(broker)
    broker.pass_s(3600)
    assert len(decided) < 5


def test_a_nacked_message_comes_when_its_delay_is_over() -> None:
    broker = make()
    broker.send(b"a")
    (message,) = broker.lease()
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.nack(message, delay_ms=5_000)
    broker.pass_s(4.9)
    assert waiting == []
    broker.pass_s(0.2)
    (again,) = got(waiting)
    assert (again.deliveries, again.failures) == (2, 1)


def test_a_nack_without_delay_wakes_at_once() -> None:
    broker = make()
    broker.send(b"a")
    (message,) = broker.lease()
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.nack(message, failure=False)
    (again,) = got(waiting)
    assert (again.deliveries, again.failures) == (2, 0)


def test_whose_lease_ran_out_is_given_nothing_until_it_asks_again() -> None:
    """It stands still, as far as can be told: it would hold the message for a second lease."""
    broker = make(lease_ms=10_000, partitions=2)
    broker.send(b"a", b"b")
    first = broker.lease()
    waiting = broker.begin_lease(wait_ms=60_000)
    elsewhere = broker.begin_lease(wait_ms=60_000, partitions=[1])
    broker.pass_s(9.9)
    assert waiting == elsewhere == []
    broker.pass_s(0.2)
    assert waiting == elsewhere == [(Leases([]), b"")]
    broker.send(b"c", partition=1)
    again = broker.lease()
    assert sorted((item.value, item.deliveries, item.failures) for item in again) == [
        (b"a", 2, 1),
        (b"b", 2, 1),
        (b"c", 1, 0),
    ]
    assert broker.ask(Ack("t", 0, "g", [(first[0].lease, [0, 2])])) == Settled([(first[0].lease, [0, 2])])


def test_what_ran_out_goes_to_another_member_at_once() -> None:
    broker = make(lease_ms=10_000, assignment="shared")
    broker.enlist(member="other", assignment="shared", lease_ms=10_000)
    broker.send(b"a")
    broker.lease()
    first = broker.begin_lease(wait_ms=60_000)
    other = broker.begin_lease(member="other", wait_ms=60_000)
    broker.pass_s(10.1)
    assert first == [(Leases([]), b"")]
    assert [(item.value, item.failures) for item in got(other)] == [(b"a", 1)]


def test_an_answer_says_how_long_it_was_waited_for() -> None:
    broker = make()
    broker.send(b"a")
    ((at_once, _),) = broker.begin_lease()
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.pass_s(7)
    broker.send(b"b")
    ((late, _),) = waiting
    assert isinstance(at_once, Leases)
    assert isinstance(late, Leases)
    assert (at_once.waited_ms, late.waited_ms) == (0, 7_000)


def test_an_extended_lease_expires_later() -> None:
    broker = make(lease_ms=10_000)
    broker.send(b"a")
    (message,) = broker.lease()
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.pass_s(5)
    reply = broker.ask(Extend("t", 0, "g", [message.lease], 20_000))
    assert reply == Extended(broker.clock.now_us() + 20_000_000)
    broker.pass_s(19.9)
    assert waiting == []
    broker.pass_s(0.2)
    assert got(waiting) == []
    assert values(broker.lease()) == [b"a"]


def test_a_lease_expires_with_nobody_waiting_and_is_counted() -> None:
    broker = make(lease_ms=1_000, max_attempts=2)
    broker.send(b"a")
    broker.lease()
    broker.pass_s(2)
    assert broker.runtime().state.queues.figures("g")["failures"] == 1


def test_what_one_group_leaves_lying_does_not_hide_what_another_waits_for() -> None:
    broker = make(lease_ms=10_000)
    broker.enlist(group="idle")
    broker.send(b"a")
    (left,) = broker.lease(group="idle")
    broker.nack(left, group="idle", delay_ms=1_000)
    broker.lease()
    broker.pass_s(5)
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.pass_s(5.1)
    assert got(waiting) == []
    assert values(broker.lease()) == [b"a"]


def test_credit_comes_back_with_an_ack() -> None:
    broker = make(in_flight_max=2)
    broker.send(b"a", b"b", b"c")
    held = broker.lease()
    assert values(held) == [b"a", b"b"]
    waiting = broker.begin_lease(wait_ms=60_000)
    assert waiting == []
    broker.ack(held[0])
    assert values(got(waiting)) == [b"c"]


def test_credit_counts_over_all_partitions_also_those_not_asked_for() -> None:
    broker = make(partitions=3, in_flight_max=3)
    for partition in range(3):
        broker.send(b"%d" % partition, b"x", partition=partition)
    held = broker.lease(partitions=[0, 1])
    assert len(held) == 3
    waiting = broker.begin_lease(partitions=[2], wait_ms=60_000)
    assert waiting == []
    broker.ack(held[0])
    assert len(got(waiting)) == 1
    assert waiting_places(broker) == 0


def test_the_groups_limit_counts_over_members() -> None:
    broker = make(assignment="shared", ordering="none", group_in_flight_max=3)
    broker.send(*(b"%d" % number for number in range(10)))
    first = broker.lease(member="a", count_max=2)
    second = broker.lease(member="b", count_max=2)
    assert (len(first), len(second)) == (2, 1)
    waiting = broker.begin_lease(member="c", wait_ms=60_000)
    broker.ack(*first)
    assert len(got(waiting)) == 2


def test_a_grant_and_a_resume_wake() -> None:
    broker = make()
    broker.send(b"a")
    runtime = broker.runtime()
    broker.tell(runtime, PauseLeases("g", True))
    waiting = broker.begin_lease(wait_ms=60_000)
    assert waiting == []
    broker.tell(runtime, PauseLeases("g", False))
    assert values(got(waiting)) == [b"a"]


def test_a_member_that_lost_the_partition_is_told_at_once() -> None:
    broker = make()
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.tell(broker.runtime(), GrantTo("g", "other", 7))
    refusal = refused(waiting)
    assert (refusal.code, refusal.details["generation"]) == ("fenced", 7)


def test_groups_wake_on_their_own_acks_only() -> None:
    broker = make()
    broker.enlist(group="other", member="m")
    broker.send(b"a")
    (message,) = broker.lease()
    broker.lease(group="other")
    broker.begin_lease(group="other", wait_ms=60_000)
    decided = count_decisions(broker)
    broker.ack(message)
    assert [type(command) for command in decided] == [Ack]


def refused(answers: Answers) -> Refusal:
    ((reply, _),) = answers
    assert isinstance(reply, Refusal), reply
    return reply


# -------------------------------------------------------------------------------------- receivers and ends


def test_a_newer_request_of_a_member_is_served_after_the_older() -> None:
    """Two at a time would hand over messages in the wrong order: here the older one waits for the disk."""
    broker = make()
    broker.send(b"old", b"one", expires_at=[broker.clock.now_us() + 1000, None])
    broker.pass_s(1)
    broker.send(b"two", b"three")
    gate = Valve()
    broker.threads.holding = True
    older = broker.begin_lease(gate=gate, count_max=1, wait_ms=60_000)
    between = broker.begin_lease(gate=gate, count_max=1, wait_ms=60_000)
    newer = broker.begin_lease(gate=gate, count_max=1, wait_ms=60_000)
    stranger = broker.begin_lease(gate=Valve(), count_max=1)
    assert older == between == newer == []
    assert values(got(stranger)) == [b"two"]
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert values(got(older)) == [b"one"]
    assert got(between) == [], "its sender has asked again"
    broker.pass_s(1)
    assert values(got(newer)) == [b"three"]
    assert not gate.fetches


def test_an_older_request_that_waits_makes_way_for_a_newer() -> None:
    broker = make()
    gate = Valve()
    older = broker.begin_lease(gate=gate, wait_ms=60_000)
    newer = broker.begin_lease(gate=gate, wait_ms=60_000)
    assert got(older) == []
    broker.send(b"a")
    assert values(got(newer)) == [b"a"]


def test_leases_of_which_a_member_never_heard_come_back_with_its_next_request() -> None:
    broker = make()
    broker.send(b"a", b"b", b"c")
    (known,) = broker.lease(count_max=1)
    broker.lease(count_max=1)
    found = broker.lease(held=[known.lease])
    assert [(m.value, m.deliveries, m.failures) for m in found] == [(b"b", 1, 0), (b"c", 1, 0)]
    assert broker.ack(known) == Settled([])


def test_a_receiver_that_goes_away_while_waiting_gets_nothing() -> None:
    broker = make()
    gate = Valve()
    waiting = broker.begin_lease(wait_ms=60_000, gate=gate)
    (job,) = gate.fetches
    job.drop()
    broker.send(b"a")
    assert waiting == []
    assert values(broker.lease()) == [b"a"]
    assert not gate.fetches


def test_a_receiver_that_goes_away_before_the_turn_gets_nothing() -> None:
    broker = make()
    broker.send(b"a")
    gate = Valve()
    broker.engine.gateway.submit(Lease("t", "g", "m", [(0, 1)]), b"", lambda reply, parts: None, gate)
    for job in list(gate.fetches):
        job.drop()
    broker.settle()
    (message,) = broker.lease()
    assert (message.value, message.deliveries) == (b"a", 1)


def test_what_was_leased_for_a_receiver_that_goes_away_is_given_back() -> None:
    """A lease that is decided together with a hard fact is answered later: meanwhile the receiver may go."""
    broker = make()
    broker.send(b"old", b"new", expires_at=[broker.clock.now_us() + 1000, None])
    broker.pass_s(1)
    broker.threads.holding = True
    gate = Valve()
    waiting = broker.begin_lease(gate=gate)
    assert waiting == []
    for job in list(gate.fetches):
        job.drop()
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert waiting == []
    (message,) = broker.lease()
    assert (message.value, message.deliveries, message.failures) == (b"new", 1, 0)


def test_a_late_answer_whose_frames_have_left_memory_reads_them_again() -> None:
    broker = make(ring=0)
    broker.send(b"old", b"new", expires_at=[broker.clock.now_us() + 1000, None])
    broker.pass_s(1)
    broker.threads.holding = True
    waiting = broker.begin_lease()
    for _ in range(3):
        broker.runtime().cache._cold.clear()
        broker.threads.run_held(1)
        broker.settle()
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert values(got(waiting)) == [b"new"]


def test_a_receiver_without_room_leases_nothing_until_it_has_some() -> None:
    broker = make()
    broker.send(b"a")
    gate = Valve()
    gate.shut = True
    waiting = broker.begin_lease(wait_ms=60_000, gate=gate)
    broker.send(b"b")
    assert waiting == []
    assert broker.runtime().state.queues.holders("g") == set()
    gate.open()
    broker.settle()
    assert values(got(waiting)) == [b"a", b"b"]


def test_small_answers_are_paced() -> None:
    broker = make()
    gate = Valve()
    broker.send(b"a")
    assert values(got(broker.begin_lease(wait_ms=1000, gate=gate))) == [b"a"]
    broker.send(b"b")
    waiting = broker.begin_lease(wait_ms=1000, gate=gate)
    broker.send(b"c")
    assert waiting == []
    broker.pass_s(0.001)
    assert values(got(waiting)) == [b"b", b"c"]


def test_a_topic_that_is_deleted_answers_who_waits() -> None:
    broker = make()
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.submit(DeleteTopic("t"))
    assert refused(waiting).code == "not_found"


def test_an_answer_that_fails_on_its_way_loses_no_fact() -> None:
    broker = make()
    broker.send(b"a")

    def broken(reply: Any, parts: Any) -> None:
        raise RuntimeError("the way back is broken")

    broker.engine.gateway.submit(Lease("t", "g", "m", [(0, 1)]), b"", broken)
    with pytest.raises(RuntimeError):
        broker.settle()
    broker.restart()
    assert broker.runtime().fault is None
    assert len(broker.runtime().state.queues.holders("g")) == 1


def test_closing_answers_who_waits() -> None:
    broker = make()
    broker.send(b"a")
    broker.lease()
    waiting = broker.begin_lease(wait_ms=60_000)
    closed: list[bool] = []
    broker.engine.close(lambda: closed.append(True))
    broker.settle()
    assert got(waiting) == []
    assert closed == [True]


def test_an_ill_partition_does_not_stop_the_others() -> None:
    broker = make(partitions=2)
    broker.runtime(partition=0).fault = Refusal("corrupt", "it is broken")
    waiting = broker.begin_lease(wait_ms=60_000)
    assert waiting == []
    broker.send(b"a", partition=1)
    assert values(got(waiting)) == [b"a"]
    broker.runtime(partition=1).fault = Refusal("corrupt", "it is broken, too")
    assert refused(broker.begin_lease(wait_ms=60_000)).code == "corrupt"


def test_who_waited_in_vain_is_told_of_a_damaged_partition() -> None:
    broker = make(partitions=2)
    broker.runtime(partition=0).fault = Refusal("corrupt", "it is broken")
    assert got(broker.begin_lease(wait_ms=0)) == []
    waiting = broker.begin_lease(wait_ms=1_000)
    broker.pass_s(0.9)
    assert waiting == []
    broker.pass_s(0.2)
    assert refused(waiting) == Refusal("corrupt", "it is broken")


def test_trimmed_messages_are_not_waited_for() -> None:
    broker = make(ring=0)
    broker.send(b"a")
    broker.send(b"b")
    broker.ask(TrimTopic("t", 0, 1))
    assert values(broker.lease()) == [b"b"]


def test_leases_and_what_is_settled_survive_a_restart() -> None:
    broker = make()
    broker.send(b"a", b"b")
    first, second = broker.lease()
    broker.ack(first)
    broker.restart()
    assert broker.lease() == []
    assert broker.ack(second) == Settled()
    assert broker.ask(Committed("t", "g")) == Offsets([2])


def test_timers_go_on_after_a_restart() -> None:
    broker = make(lease_ms=10_000)
    broker.send(b"a")
    broker.lease()
    broker.restart()
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.pass_s(9.9)
    assert waiting == []
    broker.pass_s(0.2)
    assert got(waiting) == []
    assert values(broker.lease()) == [b"a"]


# ----------------------------------------------------------------------------------------- the other verbs


def test_operators_settle_and_reopen() -> None:
    broker = make()
    broker.send(b"a", b"b", b"c")
    assert not isinstance(broker.ask(SettleOffsets("t", 0, "g", [0, 2])), Refusal)
    held = broker.lease()
    assert values(held) == [b"c"]
    broker.ack(*held)
    waiting = broker.begin_lease(wait_ms=1000)
    assert not isinstance(broker.ask(Reopen("t", 0, "g", [1, 2])), Refusal)
    assert values(got(waiting)) == [b"b"]


def test_streams_commit_their_places() -> None:
    broker = make(partitions=2, mode="stream")
    for partition in range(2):
        broker.send(b"a", b"b", partition=partition)
    assert broker.ask(Commit("t", "g", "m", [(0, 1, 2), (1, 1, 1)])) == Done()
    assert broker.ask(Committed("t", "g")) == Offsets([2, 1])
    assert broker.ask(Committed("t", "nobody")) == Offsets([-1, -1])
    assert broker.ask(Commit("t", "g", "m", [(0, 0, 1), (1, 1, 2)])).code == "fenced"
    assert broker.ask(Commit("t", "g", "m", [(0, 1, 3)])).code == "invalid_request"


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Lease("t", "g", "m", []), "partitions"),
        (Lease("t", "g", "m", [(0, 1), (0, 1)]), "twice"),
        (Lease("t", "g", "m", [(0, 1)], count_max=-1), "count_max"),
        (Lease("t", "g", "m", [(0, 1)], bytes_max=0), "bytes_max"),
        (Lease("t", "g", "", [(0, 1)]), "member"),
        (Lease("t", "g", "m", [(0, 1)], lease_ms=0), "lease_ms"),
        (Lease("t", "g", "m", [(0, 1)], above=5), "above"),
        (Ack("t", 0, "g", []), "leases"),
        (Ack("t", 0, "g", [(5, [1])]), "spans"),
        (Ack("t", 0, "g", [(5, [1, 1])]), "empty"),
        (Ack("t", 0, "g", [(5, [3, 4, 1, 2])]), "offsets"),
        (Ack("t", 0, "g", [(5, [-1, 2])]), "offsets"),
        (Nack("t", 0, "g", 5, [0, 1], delay_ms=-1), "delay_ms"),
        (RejectMessages("t", 0, "g", 5, [0, 1], reason="because"), "reason"),
        (Extend("t", 0, "g", [5], 0), "lease_ms"),
        (Extend("t", 0, "g", [], 1), "leases"),
        (Commit("t", "g", "m", []), "positions"),
        (Reopen("t", 0, "g", []), "spans"),
    ],
)
def test_bad_requests_name_the_field(request_: Any, word: str) -> None:
    refusal = make().ask(request_)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "invalid_request"
    assert word in refusal.message


def test_unknown_places_are_not_found() -> None:
    broker = make()
    assert broker.ask(Lease("t", "g", "m", [(1, 1)])).code == "not_found"
    assert broker.ask(Lease("nowhere", "g", "m", [(0, 1)])).code == "not_found"
    assert broker.ask(Lease("t", "nobody", "m", [(0, 1)], wait_ms=60_000)).code == "not_found"


def test_lease_ids_are_random_and_never_zero() -> None:
    broker = make()
    leasing = broker.engine.leasing
    assert len({leasing.book.new_lease() for _ in range(2000)}) == 2000
    leasing.book._entropy = lambda count: bytes(count - 8) + b"\1" * 8
    leasing.book._ids = iter(())
    assert leasing.book.new_lease() == 0x0101010101010101
    assert grants(broker.begin_lease()) == []


def test_who_hangs_up_is_given_nothing() -> None:
    """A killed process has said its last word, but its connection still takes an answer."""
    broker = make()
    gate = Valve()
    waiting = broker.begin_lease(wait_ms=60_000, gate=gate)
    (job,) = gate.fetches
    job.hang_up()
    assert len(waiting) == 1
    broker.send(b"a")
    (message,) = broker.lease()
    assert (message.value, message.deliveries) == (b"a", 1)


def test_no_more_partitions_are_asked_than_have_to_be() -> None:
    broker = make(partitions=3, assignment="shared", ordering="key")
    for partition in range(3):
        broker.send(b"a", b"b", partition=partition, keys=[b"k", b"k"])
    asked: list[int] = []
    for runtime in broker.engine.topics.get("t").runtimes:
        submit = runtime.submit

        def counted(work: Any, body: Any, respond: Any, runtime: Any = runtime, submit: Any = submit) -> None:
            asked.append(runtime.partition)
            submit(work, body, respond)

        runtime.submit = counted
    assert [item.partition for item in broker.lease(count_max=1)] == [0]
    assert asked == [0]
    asked.clear()
    # Something seems to be there, and is of a key that another member has.
    assert [item.partition for item in broker.lease(member="other", count_max=1)] == [1]
    assert asked == [0, 1]
    assert len(broker.lease(member="third")) == 2
