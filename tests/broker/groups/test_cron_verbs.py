"""Recurring schedules: every tick once, whatever happens to the broker, in the time of a real zone.

Also covers `broker/groups/cron_times.py` and `core/groups/cron_schedules.py`.
"""

import itertools
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.broker.groups.cron_times import latest_tick_us, next_tick_us
from tailrace.broker.groups.cron_verbs import message_of, problems_of
from tailrace.core.model.commands import AlterTopic, DeleteTopic, Done, ListTopics
from tailrace.core.model.group_commands import DeleteSchedule, ListSchedules, PutSchedule, ScheduleList
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import PublishBatch
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
    runtime = broker.runtime(topic)
    return [
        row
        for part in runtime.log.read(0, runtime.end_offset, 1 << 30)
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
    since_us = broker.clock.wall_us()
    broker.ask(put)
    # What a crash between the two leaves behind: the message is there, the record is not.
    publish, body = message_of(put, since_us, us("2026-03-01T11:00:00"), 1)
    broker.clock.set_us(us("2026-03-01T11:00:00"))
    broker.runtime().submit(
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


def test_ticks_need_no_room_in_the_dedup_window() -> None:
    broker = broker_at()
    broker.ask(AlterTopic("t", {"dedup_max": 1}))
    broker.ask(PutSchedule("s", "t", "*/10 * * * * *", value=b"v"))
    for _ in range(10):
        broker.pass_s(30)
        broker.restart()
        broker.settle()
    seconds = [row["timestamp"].timestamp() for row in rows(broker)]
    assert len(seconds) == 30
    assert {later - earlier for earlier, later in itertools.pairwise(seconds)} == {10}


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
    started = time.process_time()
    assert latest_tick_us(put, us("2001-01-01T00:00:00"), us("2026-01-01T00:00:00")) == us(
        "2026-01-01T00:00:00"
    )
    yearly = PutSchedule("s", "t", "0 0 29 2 *")
    assert (
        text(latest_tick_us(yearly, us("2001-01-01T00:00:00"), us("2026-01-01T00:00:00"))) == "02-29 00:00:00"
    )
    assert latest_tick_us(yearly, us("2025-01-01T00:00:00"), us("2026-01-01T00:00:00")) is None
    assert time.process_time() - started < 1


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


@pytest.mark.parametrize(
    ("cron", "zone", "day", "expected"),
    [
        ("*/30 2 * * *", "Europe/Berlin", "2027-03-28", ["03:00+0200"]),
        ("*/30 2 * * *", "Europe/Berlin", "2027-10-31", ["02:00+0200", "02:30+0200"]),
        ("*/20 * 2 * * *", "Europe/Berlin", "2027-03-28", ["03:00+0200"]),
        ("0 2,3 * * *", "Europe/Berlin", "2027-03-28", ["03:00+0200"]),
        ("0 */8,2 * * *", "Europe/Berlin", "2027-03-28", ["00:00+0100", "03:00+0200", "08:00+0200"]),
        ("30 1-3 * * *", "Europe/Berlin", "2027-03-28", ["01:30+0100", "03:00+0200", "03:30+0200"]),
        ("30 1-3 * * *", "America/New_York", "2027-11-07", ["01:30-0400", "02:30-0500", "03:30-0500"]),
        ("15 */6 * * *", "America/New_York", "2027-03-14", ["00:15-0500", "06:15-0400", "12:15-0400"]),
        ("0 */2 * * *", "Europe/Berlin", "2027-10-31", ["00:00+0200", "02:00+0200", "02:00+0100"]),
        ("30 * * * *", "Europe/Berlin", "2027-03-28", ["00:30+0100", "01:30+0100", "03:30+0200"]),
        ("*/30 2 * * *", "Australia/Lord_Howe", "2027-04-04", ["02:00+1030", "02:30+1030"]),
        ("0 */2 * * *", "Australia/Lord_Howe", "2027-04-04", ["00:00+1100", "02:00+1030", "04:00+1030"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2027-04-04", ["01:45+1100"]),
        ("45 * * * *", "Australia/Lord_Howe", "2027-04-04", ["00:45+1100", "01:45+1100", "01:45+1030"]),
        ("15 2 * * *", "Australia/Lord_Howe", "2027-10-03", ["02:30+1100"]),
        ("0 12 * * *", "Pacific/Apia", "2011-12-31", ["00:00+1400", "12:00+1400"]),
    ],
)
def test_the_day_on_which_clocks_are_put(cron: str, zone: str, day: str, expected: list[str]) -> None:
    midnight = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone))
    put, at_us = PutSchedule("s", "t", cron, zone), int(midnight.timestamp()) * 1_000_000 - 1
    found = list[datetime]()
    while len(found) < len(expected):
        tick_us = next_tick_us(put, at_us)
        assert tick_us is not None
        found.append(datetime.fromtimestamp(tick_us / 1e6, midnight.tzinfo))
        at_us = tick_us
    assert [tick.strftime("%H:%M%z") for tick in found] == expected
    assert {tick.date() for tick in found} == {midnight.date()}


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
CHANGES = [us(f"2027-{day}") for day in ("03-14", "03-28", "04-03", "10-02", "10-31", "11-07", "06-01")]
PARTS = st.sampled_from(["0", "30", "*/15", "5,35,50", "7-40/11"])
HOURS = st.sampled_from(["*", "*/2", "*/3", "2", "1", "0-23", "1-3", "1,2", "2/12"])


@given(PARTS, HOURS, st.sampled_from(ZONES), st.sampled_from(CHANGES), st.integers(0, 20 * 3600))
@example("0", "1-3", "Europe/Berlin", us("2027-10-31"), 3600)
def test_ticks_are_what_a_wall_clock_shows(
    minutes: str, hour: str, zone: str, day_us: int, from_s: int
) -> None:
    """Against every minute of some days: what the clock shows, and what it leaves out."""
    minute = timedelta(minutes=1)
    put, tz = PutSchedule("s", "t", f"{minutes} {hour} * * *", zone), ZoneInfo(zone)
    naive = set[datetime]()
    for tick in CronSim(f"{minutes} {hour} * * *", datetime(1999, 12, 31, 23, 59)):
        if tick >= datetime(2000, 1, 2):
            break
        naive.add(tick)
    begin_us = day_us + from_s * 1_000_000
    end_us = begin_us + 86_400_000_000
    expected, shown = list[int](), set[datetime]()
    every, both = hour in ("*", "0-23"), hour in ("*", "*/2", "*/3", "0-23")
    before = datetime.fromtimestamp(day_us // 1_000_000 - 7200, tz).replace(tzinfo=None)
    for second in range(day_us // 1_000_000 - 7200, end_us // 1_000_000 + 1, 60):
        local = datetime.fromtimestamp(second, tz).replace(tzinfo=None)
        left_out = (before + timedelta(minutes=more) for more in range(1, (local - before) // minute))
        missed = any(one.replace(2000, 1, 1) in naive for one in left_out)
        matches = local.replace(2000, 1, 1) in naive and (both or local not in shown)
        if matches or (missed and not every):
            expected.append(second * 1_000_000)
        shown.add(local)
        before = local
    at_us, found = begin_us, list[int]()
    while (tick_us := next_tick_us(put, at_us)) is not None and tick_us <= end_us:
        found.append(tick_us)
        at_us = tick_us
    assert found == [tick_us for tick_us in expected if tick_us > begin_us]
    assert latest_tick_us(put, begin_us, end_us) == (found[-1] if found else None)


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


def test_a_damaged_coordinator_publishes_nothing() -> None:
    """What is missing in its state may be that the schedule was deleted."""
    broker = broker_at()
    broker.ask(PutSchedule("s", "t", "* * * * *", value=b"v"))
    broker.pass_s(60)
    home = broker.engine.coordinators.home("s")
    assert home is not None
    home.fault = Refusal("corrupt", "it is damaged")
    broker.pass_s(180)
    assert len(rows(broker)) == 1
    home.fault = None
    home.processes.end()
    home.restart()
    broker.pass_s(1)
    assert len(rows(broker)) == 2, "the latest of those that were missed"


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
    total = sum(broker.runtime("t", number).end_offset for number in range(4))
    assert 6 <= total <= 7
