"""Messages that were delivered too often: their last delivery ends without an ack, and they die."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tailrace.core.model import facts
from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done
from tailrace.core.queue import ledger_snapshot
from tests.core.desk import Desk, keyed, plain


def dying(desk: Desk) -> list[tuple[int, str, int, int, str]]:
    """(offset, reason, deliveries, failures, error) of what has to be buried."""
    rows = desk.partition.queues.dying("g", 100)
    return [(row.offset, row.reason, row.deliveries, row.failures, row.error) for row in rows]


def gone(desk: Desk, member: str = "ada") -> Any:
    """A member dies, and comes again."""
    decision = desk.do(inner.EvictMember("g", member))
    if desk.policy.assignment != "shared":
        _, generation = desk.partition.queues.grant("g") or ("", 0)
        desk.do(inner.GrantTo("g", "", generation + 1))
        desk.do(inner.GrantTo("g", "ada", generation + 2))
    return decision


def ask(desk: Desk, **fields: Any) -> Any:
    """As the broker does: what is set apart only when there is nothing else."""
    reply = desk.ask(**fields)
    return desk.ask(alone=True) if isinstance(reply, Done) else reply


def take(desk: Desk, **fields: Any) -> list[int]:
    reply = ask(desk, **fields)
    return [] if isinstance(reply, Done) else [run[0] + i for run in reply.runs for i in range(run[1])]


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_one_that_kills_its_member_each_time_dies_with_its_last_delivery(assignment: str) -> None:
    desk = Desk(*plain(3), assignment=assignment, max_attempts=2, max_deliveries=3)
    take(desk)
    desk.ack(0, 1, 2, 3)
    for _ in range(2):
        assert gone(desk).soft
        assert take(desk) == [1]
        assert not dying(desk)
    decision = gone(desk)
    assert not decision.soft
    assert dying(desk) == [
        (1, "max_deliveries", 3, 0, "the member that had it was gone, or lost the partition")
    ]
    assert take(desk) == []
    desk.do(inner.BuryDone("g", [1, 2], "t.dlq", [0, 0]))
    assert desk.figures()["lag"] == 0
    assert desk.figures()["dead_lettered"] == 1


def test_a_partition_that_is_taken_by_force_ends_a_delivery_too() -> None:
    desk = Desk(*plain(1), max_attempts=1, max_deliveries=2)
    for generation in (2, 3):
        assert take(desk) == [0]
        decision = desk.do(inner.GrantTo("g", "ada", generation))
    assert [type(fact).__name__ for fact in decision.facts] == ["GivenBack", "Dying", "Granted"]
    assert [row[:4] for row in dying(desk)] == [(0, "max_deliveries", 2, 0)]


def test_expiries_are_failures_and_the_limit_of_attempts_comes_first() -> None:
    desk = Desk(*plain(1), max_attempts=2, max_deliveries=2)
    for _ in range(2):
        assert take(desk) == [0]
        desk.wait(31)
    assert dying(desk) == [(0, "max_attempts", 2, 2, "the lease expired")]


def test_an_expiry_after_deaths_counts_as_a_failure_of_the_last_delivery() -> None:
    desk = Desk(*plain(1), max_attempts=3, max_deliveries=3)
    for _ in range(2):
        take(desk)
        gone(desk)
    take(desk)
    decision = desk.wait(31)
    assert not decision.soft
    assert dying(desk) == [(0, "max_deliveries", 3, 1, "the lease expired")]
    assert desk.figures()["failures"] == 1


@pytest.mark.parametrize("failure", [True, False])
def test_a_nack_ends_the_last_delivery_too(failure: bool) -> None:
    desk = Desk(*plain(1), max_attempts=2, max_deliveries=2)
    take(desk)
    gone(desk)
    take(desk)
    decision = desk.do(wire.Nack("t", 0, "g", desk.leases, [0, 1], error="no", failure=failure))
    assert not decision.soft
    assert dying(desk) == [(0, "max_deliveries", 2, int(failure), "no")]


def test_giving_back_what_was_not_started_never_kills() -> None:
    desk = Desk(*plain(2), max_attempts=1, max_deliveries=1)
    for _ in range(50):
        assert take(desk) == [0, 1]
        assert desk.do(wire.GiveBack("t", 0, "g", [(desk.leases, [0, 2])])).soft
    for _ in range(50):
        assert take(desk) == [0, 1]
        assert desk.do(inner.EvictMember("g", "ada", [])).soft, "an answer that never arrived"
    assert not dying(desk)
    take(desk)
    gone(desk)
    assert [row[:2] for row in dying(desk)] == [(0, "max_deliveries"), (1, "max_deliveries")]


def test_zero_is_no_limit() -> None:
    desk = Desk(*plain(1), max_attempts=1, max_deliveries=0)
    for delivery in range(1, 60):
        assert ask(desk).runs == [(0, 1, delivery, 0)]
        gone(desk)
    assert not dying(desk)


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_the_rest_of_its_key_goes_on_when_the_dead_letter_is_stored(assignment: str) -> None:
    desk = Desk(*keyed("aab"), assignment=assignment, max_attempts=1, max_deliveries=2)
    assert desk.lease(count=1) == [0]
    gone(desk)
    assert desk.lease(alone=True) == [0]
    gone(desk)
    assert take(desk) == [2], "a dying message holds its key"
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert take(desk) == [1]


def test_messages_behind_a_failure_of_their_key_do_not_die_of_it() -> None:
    desk = Desk(*keyed("aa"), assignment="partitions", max_attempts=2, max_deliveries=2)
    for _ in range(4):
        assert desk.lease() == [0, 1]
        desk.do(wire.Nack("t", 0, "g", desk.leases, [0, 1], 0, failure=False))
        if dying(desk):
            break
    assert [row[:2] for row in dying(desk)] == [(0, "max_deliveries")]
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert desk.lease() == [1]
    assert desk.ack(1, 2) == []


def test_a_redriven_message_begins_again() -> None:
    desk = Desk(*plain(1), max_attempts=1, max_deliveries=2)
    for _ in range(2):
        take(desk)
        gone(desk)
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    desk.do(wire.Reopen("t", 0, "g", [0, 1]))
    assert ask(desk).runs == [(0, 1, 1, 0)]
    gone(desk)
    assert ask(desk).runs == [(0, 1, 2, 0)]


def test_counts_survive_a_replay() -> None:
    desk = Desk(*plain(1), max_attempts=1, max_deliveries=3)
    for _ in range(2):
        take(desk)
        gone(desk)
    stored = [msgspec.msgpack.encode(fact) for fact in desk.facts[1:]]
    other = Desk(*plain(1), max_attempts=1, max_deliveries=3)
    other.do(inner.Delist("g"))
    for data in stored:
        other.partition.apply(msgspec.msgpack.decode(data, type=facts.Fact))
    other.leases = desk.leases
    for play in (desk, other):
        assert ask(play).runs == [(0, 1, 3, 0)]
        gone(play)
        assert [row[:3] for row in dying(play)] == [(0, "max_deliveries", 3)]


# -- members that end take others with them ------------------------------------------------------------------


def test_what_ended_with_its_member_three_times_is_leased_alone() -> None:
    desk = Desk(*plain(5), max_deliveries=20)
    for _ in range(3):
        assert desk.lease(count=4) == [0, 1, 2, 3]
        gone(desk)
    assert desk.lease() == [4], "others go on"
    assert desk.lease(alone=True) == [0], "one of them, and nothing else"
    gone(desk)
    assert desk.lease() == [4]
    assert [desk.lease(alone=True) for _ in range(5)] == [[1], [2], [3], [0], []]


def test_it_goes_like_any_other_when_it_has_waited_for_too_long() -> None:
    desk = Desk(*plain(3), starvation_ms=5_000)
    for _ in range(3):
        assert desk.lease() == [0, 1, 2]
        gone(desk)
    assert desk.lease() == []
    desk.wait(4.9)
    assert desk.lease() == []
    desk.wait(0.1)
    assert desk.lease() == [0, 1, 2]
    assert desk.lease(alone=True) == []


def test_expiries_set_apart_and_nacks_do_not() -> None:
    desk = Desk(*plain(2), max_attempts=10)
    for _ in range(4):
        desk.lease()
        desk.nack(0, 2, delay_ms=0)
    assert desk.lease() == [0, 1], "a handler that says no is alive"
    desk.wait(31)
    assert desk.lease() == []
    assert desk.lease(alone=True) == [0]


@pytest.mark.parametrize("attempts", [2, 3])
def test_the_last_attempt_is_alone_after_an_expiry(attempts: int) -> None:
    desk = Desk(*plain(2), max_attempts=attempts)
    for _ in range(attempts - 1):
        assert desk.lease() == [0, 1]
        desk.wait(31)
    assert desk.lease() == []
    assert desk.lease(alone=True) == [0]


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_order_holds_among_those_set_apart(assignment: str) -> None:
    desk = Desk(*keyed("aab"), assignment=assignment)
    for _ in range(3):
        assert desk.lease() == [0, 1, 2]
        gone(desk)
    assert desk.lease(alone=True) == [0]
    other = "bob" if assignment == "shared" else "ada"
    assert desk.lease(other, alone=True) == [2], "somebody has the key of 1"
    desk.ack(0, 1, lease=desk.leases - 1)
    assert desk.lease(alone=True) == [1]


def test_a_partition_in_order_waits_for_the_one_set_apart() -> None:
    desk = Desk(*plain(2), ordering="partition")
    for _ in range(3):
        assert desk.lease() == [0, 1]
        gone(desk)
    assert desk.lease() == []
    assert desk.lease(alone=True) == [0]
    assert desk.lease(alone=True) == []
    desk.ack(0, 1, lease=desk.leases - 1)
    assert desk.lease(alone=True) == [1]


def test_what_is_set_apart_is_in_a_snapshot() -> None:
    desk = Desk(*plain(2))
    for _ in range(3):
        desk.lease()
        gone(desk)
    (ledger,) = desk.partition.queues._ledgers.values()
    columns = [memoryview(bytes(column)) for column in ledger_snapshot.freeze(ledger)()]
    again = ledger_snapshot.ledger_of(columns, desk.now_us)
    ledger_snapshot.verify(again)
    assert list(again.suspects()) == list(ledger.suspects()) == [(3, 0, 0, 0)]
