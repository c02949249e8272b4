"""Recurring schedules: every tick once, whatever happens to the broker, in the time of a real zone."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tailrace.broker.cron import latest_tick_us, message_of, next_tick_us, problems_of
from tailrace.core.commands import AlterTopic, DeleteTopic, Done, ListTopics
from tailrace.core.group_commands import DeleteSchedule, ListSchedules, PutSchedule, ScheduleList
from tailrace.core.inner_commands import PublishBatch
from tailrace.core.model import Refusal
from tailrace.errors import Full
from tailrace.format import batch, frame
from tailrace.format.small import measure
from tests.broker.held_engine import HeldEngine


def us(text: str) -> int:
    """Microseconds of a UTC time."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


def text(us_value: int | None) -> str | None:
    return (
        None if us_value is None else datetime.fromtimestamp(us_value / 1e6, UTC).strftime("%m-%d %H:%M:%S")
    )


def ticks(cron: str, zone: str, after: str, count: int) -> list[str | None]:
    put, at, found = PutSchedule("s", "t", cron, zone), us(after), []
    for _ in range(count):
        tick = next_tick_us(put, at)
        found.append(text(tick))
        assert tick is not None
        at = tick
    return found


def broker_at(moment: str = "2026-03-01T10:00:30") -> HeldEngine:
    broker = HeldEngine()
    broker.clock.set_us(us(moment))
    broker.create()
    return broker


def rows(broker: HeldEngine, topic: str = "t") -> list[dict[str, Any]]:
    shard = broker.shard(topic)
    return [
        row
        for part in shard.log.read(0, shard.end_offset, 1 << 30)
        for header, body in frame.walk(part)
        if header.kind == frame.DATA
        for row in batch.decode(body, header.columns).to_pylist()
    ]


def test_every_tick_publishes_one_message() -> None:
    broker = broker_at()
    put = PutSchedule("s", "t", "* * * * *", "UTC", b"v", b"k", [("h", b"1")], 1, 60_000)
    assert broker.ask(put) == Done()
    broker.pass_s(29)
    assert rows(broker) == []
    broker.pass_s(1)
    (row,) = rows(broker)
    assert (row["value"], row["key"], row["priority"]) == (b"v", b"k", 1)
    assert row["timestamp"] == datetime(2026, 3, 1, 10, 1, tzinfo=UTC)
    assert row["expires_at"] == row["timestamp"] + timedelta(minutes=1)
    assert [(header["key"], header["value"]) for header in map(_pair, row["headers"])] == [
        ("h", b"1"),
        ("tailrace-schedule", b"s"),
    ]
    broker.pass_s(600)
    assert len(rows(broker)) == 11
    assert len({row["id"] for row in rows(broker)}) == 11
    (shown,) = broker.ask(ListSchedules()).schedules
    assert (shown["name"], text(shown["last_us"]), text(shown["next_us"])) == (
        "s",
        "03-01 10:11:00",
        "03-01 10:12:00",
    )


def _pair(header: Any) -> dict[str, Any]:
    return dict(zip(("key", "value"), header, strict=True)) if isinstance(header, tuple) else header


def test_a_tick_happens_once_across_restarts() -> None:
    broker = broker_at()
    broker.ask(PutSchedule("s", "t", "* * * * *", value=b"v"))
    for _ in range(5):
        broker.pass_s(60)
        broker.restart()
        broker.settle()
    assert len(rows(broker)) == 5


def test_a_tick_that_was_published_but_not_recorded_is_not_published_again() -> None:
    broker = broker_at()
    put = PutSchedule("s", "t", "0 * * * *", value=b"v")
    broker.ask(put)
    # What a crash between the two leaves behind: the message is there, the record is not.
    publish, body = message_of(put, us("2026-03-01T11:00:00"), 1)
    broker.clock.set_us(us("2026-03-01T11:00:00"))
    broker.shard().submit(
        PublishBatch(publish, measure(body, publish.columns)), body, lambda reply, parts: None
    )
    broker.settle()
    assert len(rows(broker)) == 1
    broker.clock.set_us(us("2026-03-01T11:40:00"))  # Longer than the topic's dedup window.
    broker.restart()
    broker.pass_s(1)
    assert len(rows(broker)) == 1
    assert text(broker.ask(ListSchedules()).schedules[0]["last_us"]) == "03-01 11:00:00"
    broker.pass_s(3600)
    assert len(rows(broker)) == 2


def test_of_the_missed_ticks_only_the_latest_is_made_up_for() -> None:
    broker = broker_at()
    broker.ask(PutSchedule("s", "t", "*/10 * * * *", value=b"v"))
    broker.clock.set_us(us("2026-03-03T07:45:00"))
    broker.restart()
    broker.pass_s(1)
    assert [row["timestamp"] for row in rows(broker)] == [datetime(2026, 3, 3, 7, 40, tzinfo=UTC)]
    broker.pass_s(300)
    assert len(rows(broker)) == 2


def test_years_of_downtime_cost_nothing() -> None:
    put = PutSchedule("s", "t", "* * * * * *")
    started = time.perf_counter()
    assert latest_tick_us(put, us("2001-01-01T00:00:00"), us("2026-01-01T00:00:00")) == us(
        "2026-01-01T00:00:00"
    )
    yearly = PutSchedule("s", "t", "0 0 29 2 *")
    assert (
        text(latest_tick_us(yearly, us("2001-01-01T00:00:00"), us("2026-01-01T00:00:00"))) == "02-29 00:00:00"
    )
    assert latest_tick_us(yearly, us("2025-01-01T00:00:00"), us("2026-01-01T00:00:00")) is None
    assert time.perf_counter() - started < 1


def test_spring_forward_in_berlin() -> None:
    """02:30 does not exist on 29 March 2026: the tick comes right after the gap, on that day only."""
    found = ticks("30 2 * * *", "Europe/Berlin", "2026-03-27T12:00:00", 3)
    assert found == ["03-28 01:30:00", "03-29 01:00:00", "03-30 00:30:00"]
    hours = ticks("0 * * * *", "Europe/Berlin", "2026-03-29T00:00:00", 2)
    assert hours == ["03-29 01:00:00", "03-29 02:00:00"]


def test_autumn_back_in_berlin() -> None:
    """02:30 comes twice on 25 October 2026: a daily tick happens in the first of them only, also when the
    broker looks during the second; an hourly one happens in both."""
    found = ticks("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00", 2)
    assert found == ["10-25 00:30:00", "10-26 01:30:00"]
    put = PutSchedule("s", "t", "30 2 * * *", "Europe/Berlin")
    second_pass = us("2026-10-25T01:10:00")
    assert text(next_tick_us(put, second_pass)) == "10-26 01:30:00"
    assert text(latest_tick_us(put, us("2026-10-24T12:00:00"), second_pass)) == "10-25 00:30:00"
    hours = ticks("30 * * * *", "Europe/Berlin", "2026-10-24T23:45:00", 3)
    assert hours == ["10-25 00:30:00", "10-25 01:30:00", "10-25 02:30:00"]


def test_pausing_replacing_and_deleting() -> None:
    broker = broker_at()
    broker.ask(PutSchedule("s", "t", "* * * * *", value=b"1"))
    broker.pass_s(60)
    broker.ask(PutSchedule("s", "t", "* * * * *", value=b"1", paused=True))
    assert broker.ask(ListSchedules()).schedules[0]["next_us"] is None
    broker.pass_s(600)
    assert len(rows(broker)) == 1
    broker.ask(PutSchedule("s", "t", "*/5 * * * *", value=b"2"))
    broker.pass_s(1)
    assert len(rows(broker)) == 1, "what was missed in the pause is not made up for"
    broker.pass_s(300)
    assert [row["value"] for row in rows(broker)] == [b"1", b"2"]
    assert broker.ask(DeleteSchedule("s")) == Done()
    assert broker.ask(DeleteSchedule("s")).code == "not_found"
    broker.pass_s(3600)
    assert len(rows(broker)) == 2
    assert broker.ask(ListSchedules()) == ScheduleList([])


def test_bad_schedules_are_refused_with_the_names_of_the_fields() -> None:
    broker = broker_at()
    refusal = broker.ask(PutSchedule("_s", "t", "61 * * * *", "Mars/Olympus", priority=9, ttl_ms=0))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "invalid_request"
    fields = [problem.split(":")[0] for problem in refusal.details["problems"]]
    assert fields == ["name", "zone", "cron", "priority", "ttl_ms"]
    assert broker.ask(PutSchedule("s", "gone", "* * * * *")).code == "not_found"
    assert broker.ask(PutSchedule("s", "t", "* * * * *", value=b"x" * 2_000_000)).code == "too_large"
    assert broker.ask(ListTopics(internal=True)).topics[0].name == "t", "a refusal makes nothing"


@pytest.mark.parametrize(
    "cron",
    ["", "* * * *", "0 0 30 2 *", "x * * * *", "9" * 5000, "* * * * 5L/2", "* * * * MON#9", "-1 * * * *"],
)
def test_crons_that_cannot_be(cron: str) -> None:
    (problem,) = problems_of(PutSchedule("s", "t", cron))
    assert problem.startswith("cron: ")


@pytest.mark.parametrize("zone", ["", "Europe", "../etc/passwd", "Nowhere/At/All", "\0"])
def test_zones_that_are_not(zone: str) -> None:
    (problem,) = problems_of(PutSchedule("s", "t", "* * * * *", zone))
    assert problem.startswith("zone: ")


def test_a_full_disk_delays_a_tick_and_never_doubles_it() -> None:
    broker = broker_at()
    broker.ask(PutSchedule("s", "t", "0 * * * *", value=b"v"))
    broker.log().fail_next(Full("no space", outcome="none"))
    broker.pass_s(3570)
    assert rows(broker) == []
    broker.pass_s(10)
    assert len(rows(broker)) == 1
    broker.pass_s(3600)
    assert len(rows(broker)) == 2


def test_a_topic_that_is_gone_and_comes_back() -> None:
    broker = broker_at()
    broker.ask(PutSchedule("s", "t", "* * * * *", value=b"v"))
    broker.ask(DeleteTopic("t"))
    broker.pass_s(100)
    broker.create()
    broker.pass_s(60)
    assert 1 <= len(rows(broker)) <= 2
    broker.ask(AlterTopic("t", {"partitions": 4}))
    broker.pass_s(300)
    total = sum(broker.shard("t", number).end_offset for number in range(4))
    assert 6 <= total <= 7
