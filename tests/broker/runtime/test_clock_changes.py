"""A wall clock that is put forward or back, over a restart and while the broker runs."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tailrace.core.model.commands import Publish, Published
from tailrace.core.model.group_commands import ListSchedules, PutSchedule
from tailrace.core.model.queue_commands import Extend, Extended, Trace, TraceFound
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.partition import Partition
from tailrace.core.partition_clock import PartitionClock
from tailrace.format import batch as arrow
from tailrace.format import frame
from tests.broker.queue_engine import QueueEngine, got, values

HOUR_S = 3600.0
SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
BACK = pytest.mark.parametrize("back_s", [HOUR_S, 5.0, 400 * 24 * HOUR_S])


def make(**options: object) -> QueueEngine:
    broker = QueueEngine()
    broker.create(**options)
    broker.enlist(lease_ms=3_000)
    return broker


def after_one_fast_append() -> QueueEngine:
    """The clock was an hour fast for one start of the broker and one append; now it is right."""
    broker = make()
    broker.restart(HOUR_S)
    broker.send(b"appended under a fast clock")
    broker.restart(-HOUR_S)
    (message,) = broker.lease()
    broker.ack(message)
    return broker


# ------------------------------------------------------------ durations after a restart


@BACK
def test_a_lease_is_over_after_its_time_though_the_clock_went_back(back_s: float) -> None:
    broker = make()
    broker.send(b"a")
    broker.lease()
    broker.restart(-back_s)
    broker.pass_s(2.9)
    assert broker.lease() == []
    broker.pass_s(0.3)
    assert values(broker.lease()) == [b"a"]
    broker.pass_s(2.7)
    assert broker.lease() == [], "a new lease has its whole length, too"
    broker.pass_s(0.5)
    assert values(broker.lease()) == [b"a"]


@BACK
def test_a_back_off_is_over_after_its_time_though_the_clock_went_back(back_s: float) -> None:
    broker = make()
    broker.send(b"a")
    (message,) = broker.lease()
    broker.nack(message, delay_ms=2_000)
    broker.restart(-back_s)
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.pass_s(1.9)
    assert not waiting
    broker.pass_s(0.3)
    assert values(got(waiting)) == [b"a"]


def test_the_time_without_a_broker_counts_when_the_clock_is_ahead() -> None:
    broker = make()
    broker.send(b"a")
    broker.lease()
    broker.restart(10)
    assert broker.lease() == []
    broker.pass_s(0.1)
    assert values(broker.lease()) == [b"a"], "its lease had ended before the start"


def test_extending_goes_by_the_same_time() -> None:
    broker = make()
    broker.send(b"a")
    broker.restart(-HOUR_S)
    (message,) = broker.lease()
    broker.pass_s(2.5)
    reply = broker.ask(Extend("t", 0, "g", [message.lease], 3_000))
    assert isinstance(reply, Extended)
    assert not reply.lost
    broker.pass_s(2.5)
    broker.ack(message)
    broker.pass_s(10)
    assert broker.lease() == []


def test_dedup_ids_are_forgotten_after_their_window() -> None:
    broker = make(dedup_window_ms=10_000)
    broker.send(b"a", dedup_ids=[b"x"])
    broker.restart(-HOUR_S)
    broker.pass_s(9)
    broker.send(b"b", dedup_ids=[b"x"])
    assert broker.values() == [b"a"]
    broker.pass_s(1.3)
    broker.send(b"c", dedup_ids=[b"x"])
    assert broker.values() == [b"a", b"c"]


def test_retention_by_time_goes_on() -> None:
    broker = make(retention_ms=120_000, durability="interval")
    broker.send(b"a")
    broker.restart(-HOUR_S)
    broker.pass_s(60)
    assert broker.runtime().state.start_offset == 0
    broker.pass_s(130)
    assert broker.runtime().state.start_offset == 1


def test_a_member_that_does_not_give_up_loses_its_partition_in_time() -> None:
    broker = QueueEngine()
    broker.create(partitions=2)
    options = {"assignment": "partitions", "revoke_timeout_ms": 5_000}
    broker.enlist(**options)
    broker.restart(-HOUR_S)
    broker.pass_s(4)
    broker.enlist(member="n", **options)
    broker.pass_s(6)
    granted = {broker.runtime(partition=number).state.queues.grant("g") for number in range(2)}
    assert {member for member, _ in granted if member} == {"m", "n"}


# ------------------------------------------------------------ times that users said


def test_one_append_under_a_fast_clock_releases_nothing_early() -> None:
    broker = after_one_fast_append()
    due_us = broker.clock.wall_us() + 10 * SECOND_US
    broker.send(b"later", deliver_at=[due_us])
    broker.send(b"past", deliver_at=[broker.clock.wall_us() - 1])
    (message,) = broker.lease()
    assert message.value == b"past"
    broker.ack(message)
    broker.pass_s(9.9)
    assert broker.lease() == [], "it is not due by the wall clock"
    broker.pass_s(0.2)
    assert values(broker.lease()) == [b"later"]


def test_delayed_messages_wait_for_the_wall_clock_over_a_restart() -> None:
    broker = make()
    due_us = broker.clock.wall_us() + 10 * SECOND_US
    broker.send(b"later", deliver_at=[due_us])
    broker.restart(-HOUR_S)
    broker.pass_s(HOUR_S + 9.9)
    assert broker.values() == []
    broker.pass_s(0.2)
    assert broker.values() == [b"later"]


def test_one_append_under_a_fast_clock_expires_nothing_early() -> None:
    broker = after_one_fast_append()
    broker.send(b"lives", expires_at=[broker.clock.wall_us() + 10 * SECOND_US])
    assert values(broker.lease()) == [b"lives"]
    broker.pass_s(11)
    assert broker.lease() == []
    assert broker.runtime().state.queues.figures("g")["lapsed"] == 1


def test_leases_run_after_one_append_under_a_fast_clock() -> None:
    broker = after_one_fast_append()
    broker.send(b"a")
    assert values(broker.lease()) == [b"a"]
    broker.pass_s(2.9)
    assert broker.lease() == []
    broker.pass_s(0.3)
    assert values(broker.lease()) == [b"a"]


def test_a_timestamp_is_compared_with_the_wall_clock() -> None:
    broker = after_one_fast_append()
    now_us = broker.clock.wall_us()
    columns, body = arrow.encode([b"a"], ids=bytes(16), timestamps=now_us + HOUR_US + SECOND_US)
    reply = broker.ask(Publish("t", 0, columns, frame.crc32c(body)), body)
    assert getattr(reply, "code", None) == "invalid_request"


def test_a_retry_of_delayed_messages_is_told_the_same_as_before() -> None:
    """Which rows waited is found again by the wall clock of then, not by the append time, also at replay."""
    broker = after_one_fast_append()
    now_us = broker.clock.wall_us()
    times = [now_us + 5 * SECOND_US, now_us - 5, now_us + 7 * SECOND_US]
    columns, body = arrow.encode(
        [b"a", b"b", b"c"], ids=arrow.make_ids(3, now_us // 1000, 7, 7), timestamps=now_us, deliver_at=times
    )
    request = Publish("t", 0, columns, frame.crc32c(body), producer_id=7)
    first = broker.ask(request, body)
    assert isinstance(first, Published)
    assert first.scheduled == [0, 2]
    assert broker.ask(request, body) == first
    broker.restart(-60)
    assert broker.ask(request, body) == first


def test_a_schedule_that_is_put_after_a_fast_append_ticks_at_its_next_minute() -> None:
    broker = make()
    broker.restart(HOUR_S)
    broker.ask(PutSchedule("other", "t", "0 0 1 1 *", value=b"v"))
    broker.restart(-HOUR_S)
    broker.ask(PutSchedule("other", "t", "* * * * *", value=b"v"))
    (shown,) = broker.ask(ListSchedules()).schedules
    assert shown["next_us"] <= broker.clock.wall_us() + 60 * SECOND_US
    broker.pass_s(61)
    assert broker.values() == [b"v"]


# ------------------------------------------------------------ while the broker is running


def test_a_clock_that_is_put_forward_releases_what_is_due_by_it_and_ends_no_lease() -> None:
    broker = make()
    broker.send(b"a")
    broker.lease()
    broker.send(b"later", deliver_at=[broker.clock.wall_us() + HOUR_US // 2])
    broker.pass_s(1)
    broker.clock.skew_us = HOUR_US
    broker.pass_s(1)
    assert broker.values() == [b"a", b"later"], "noticed within a second"
    assert values(broker.lease()) == [b"later"], "the other one is leased for another second"
    broker.pass_s(1.1)
    assert values(broker.lease()) == [b"a"]


def test_a_clock_that_is_put_back_lets_delayed_messages_wait_for_it() -> None:
    broker = make()
    due_us = broker.clock.wall_us() + 10 * SECOND_US
    broker.send(b"later", deliver_at=[due_us])
    broker.pass_s(9)
    broker.clock.skew_us = -HOUR_US
    broker.pass_s(HOUR_S)
    assert broker.values() == []
    broker.pass_s(1.1)
    assert broker.values() == [b"later"]


def test_messages_that_are_due_before_those_that_were_released_are_released_too() -> None:
    """The clock was ahead when the first ones were released: times of later releases lie before theirs."""
    broker = make()
    broker.clock.skew_us = HOUR_US
    for number in range(3):
        broker.send(b"fast %d" % number, deliver_at=[broker.clock.wall_us() + SECOND_US])
        broker.pass_s(2)
    broker.clock.skew_us = 0
    for number in range(100):
        broker.send(b"right %d" % number, deliver_at=[broker.clock.wall_us() + (5 - number % 5) * SECOND_US])
    broker.pass_s(6)
    assert len(broker.values()) == 103
    assert len(set(broker.values())) == 103
    broker.runtime().state.check()


# ------------------------------------------------------------ the log


def test_append_times_never_go_back_and_come_back_to_the_wall_clock() -> None:
    broker = make()
    broker.send(b"a")
    broker.restart(-10)
    times, walls = [], []
    for _ in range(30):
        broker.send(b"b")
        broker.pass_s(50)
    for header, _ in broker.log().scan(0, 1 << 60):
        if header.kind == frame.DATA:
            times.append(header.append_time_us)
            walls.append(header.wall_us)
    assert times == sorted(times)
    assert times[-1] == walls[-1], "ten seconds are taken back within a thousand"
    assert times[3] > walls[3]


def test_a_trace_finds_messages_by_the_time_of_their_id_under_either_clock() -> None:
    for jump_s, restarts in ((-HOUR_S, True), (HOUR_S, False), (-HOUR_S, False)):
        broker = make()
        broker.send(b"before")
        if restarts:
            broker.restart(jump_s)
        else:
            broker.clock.skew_us = int(jump_s * 1e6)
        ident = arrow.make_ids(1, broker.clock.wall_us() // 1000, 9, 9)
        columns, body = arrow.encode([b"a"], ids=ident, timestamps=broker.clock.wall_us())
        broker.ask(Publish("t", 0, columns, frame.crc32c(body)), body)
        found = broker.ask(Trace("t", id=bytes(ident)))
        assert isinstance(found, TraceFound), found
        assert [message["offset"] for message in found.messages] == [1], (jump_s, restarts)


# ------------------------------------------------------------ planted mistakes


@pytest.mark.parametrize(
    "check",
    [
        lambda: test_a_lease_is_over_after_its_time_though_the_clock_went_back(HOUR_S),
        lambda: test_a_back_off_is_over_after_its_time_though_the_clock_went_back(HOUR_S),
        test_dedup_ids_are_forgotten_after_their_window,
        test_retention_by_time_goes_on,
        test_leases_run_after_one_append_under_a_fast_clock,
        test_a_member_that_does_not_give_up_loses_its_partition_in_time,
    ],
)
def test_durations_on_wall_time_are_noticed(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartitionClock, "time_us", lambda self, now_us: now_us)
    monkeypatch.setattr(PartitionClock, "steady_us", lambda self, time_us: time_us)
    with pytest.raises((AssertionError, ValueError)):
        check()


@pytest.mark.parametrize(
    "check",
    [
        test_one_append_under_a_fast_clock_releases_nothing_early,
        test_one_append_under_a_fast_clock_expires_nothing_early,
        test_a_timestamp_is_compared_with_the_wall_clock,
        test_a_retry_of_delayed_messages_is_told_the_same_as_before,
    ],
)
def test_absolute_times_on_the_partition_clock_are_noticed(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = Partition.decide

    def by_one_clock(self: Partition, command: Any, turn: TurnInput) -> Any:
        return decide(self, command, msgspec.structs.replace(turn, wall_us=turn.now_us))

    monkeypatch.setattr(Partition, "decide", by_one_clock)
    with pytest.raises((AssertionError, ValueError)):
        check()
