"""`tailrace publish --delay`, `delayed`, `schedule` and `trace` against a real broker.

Covers `cli/commands/schedule.py` and `cli/commands/trace.py`.
"""

import json
from itertools import count

import pytest

from tailrace.errors import EDGES
from tests.cli.conftest import Broker
from tests.cli.test_messages import on_terminal

FOREIGN = "c9c4d38c-6beb-4986-a10c-2b7ad8fd0f2b"
"""An id that is no UUIDv7."""
_numbers = count()


@pytest.fixture
def topic(broker: Broker) -> str:
    name = f"timed-{next(_numbers)}"
    broker.rows("topic", "create", name, "--partitions", "1")
    return name


# ------------------------------------------------------------------------------------------------- delays


def test_delayed_messages_wait_in_order_and_can_be_cancelled(broker: Broker, topic: str) -> None:
    (late,) = broker.rows("publish", topic, "late", "--deliver-at", "2100-01-01T00:00:00Z", "--key", "k")
    (soon,) = broker.rows("publish", topic, "soon", "--delay", "1h")
    assert (late["scheduled"], late["offset"], late["deliver_at"]) == (
        True,
        None,
        "2100-01-01T00:00:00.000000Z",
    )
    first, second = broker.rows("delayed", "list", topic)
    assert (first["id"], first["value"], first["partition"]) == (soon["id"], "soon", 0)
    assert (second["id"], second["deliver_at"], second["key"]) == (late["id"], late["deliver_at"], "k")
    assert len(broker.rows("delayed", "list", topic, "--max", "1")) == 1
    table = broker.run("delayed", "list", topic).out.splitlines()
    assert table[0].split() == ["DUE", "PARTITION", "ID", "KEY", "VALUE"]
    assert table[2].split() == [late["deliver_at"], "0", late["id"], "k", "late"]
    assert broker.run("delayed", "cancel", topic, soon["id"]).out == f"{soon['id']} is cancelled\n"
    (again,) = broker.rows("delayed", "cancel", topic, soon["id"])
    assert again == {"id": soon["id"], "cancelled": True}
    assert [row["value"] for row in broker.rows("delayed", "list", topic)] == ["late"]


def test_what_is_due_is_appended(broker: Broker, topic: str) -> None:
    broker.rows("publish", topic, "soon", "--delay", "50ms")
    (row,) = broker.rows("read", topic, "--follow", "--max", "1")
    assert (row["value"], row["offset"]) == ("soon", 0)
    assert row["append_time"] >= row["deliver_at"]
    nothing = broker.run("delayed", "list", topic)
    assert (nothing.status, nothing.err) == (0, "nothing waits\n")
    (done,) = broker.run("delayed", "cancel", topic, row["id"], "--json").rows
    assert done["cancelled"] is False


def test_a_time_that_has_passed_is_now(broker: Broker, topic: str) -> None:
    (row,) = broker.rows("publish", topic, "x", "--deliver-at", "2020-01-01")
    assert (row["offset"], row["scheduled"], row["deliver_at"]) == (0, False, None)


def test_lines_of_json_can_be_delayed(broker: Broker, topic: str) -> None:
    lines = [
        {"value": "1", "deliver_at": "2100-01-01T00:00:00Z"},
        {"value": "2", "deliver_at": "2020-01-01T00:00:00Z"},
        {"value": "3", "deliver_at": None},
    ]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    rows = broker.rows("publish", topic, "--jsonl", stdin=stdin)
    assert [row["scheduled"] for row in rows] == [True, False, False]
    assert [row["value"] for row in broker.rows("read", topic)] == ["2", "3"]


def test_results_of_delayed_messages_for_people(broker: Broker, topic: str) -> None:
    line = broker.run("publish", topic, "x", "--delay", "1h").out.split("\t")
    assert line[:3] == ["0", "-", "-"]
    assert len(line) == 6
    status, shown = on_terminal(broker, "publish", topic, "x", "--delay", "1h", COLUMNS="200", NO_COLOR="")
    assert status == 0
    assert "deliver_at" in shown


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--delay", "soon"), "--delay: 'soon' is not a span of time"),
        (("--deliver-at", "soon"), "--deliver-at: 'soon' is not a time"),
        (("--delay", "1s", "--deliver-at", "2100-01-01"), "pass one of --delay and --deliver-at"),
        (("--delay", "1h", "--expect-sequence", "1"), "expected_sequence"),
    ],
)
def test_delays_that_cannot_be(broker: Broker, topic: str, flags: tuple[str, ...], told: str) -> None:
    done = broker.run("publish", topic, "x", *flags)
    assert done.status == EDGES["invalid_request"].exit
    assert told in done.err
    assert broker.rows("delayed", "list", topic) == []


def test_cancelling_what_does_not_wait(broker: Broker, topic: str) -> None:
    (row,) = broker.rows("publish", topic, "x", "--delay", "1h")
    unknown = FOREIGN
    done = broker.run("delayed", "cancel", topic, unknown, row["id"])
    assert done.status == EDGES["not_found"].exit
    assert done.out == f"{row['id']} is cancelled\n"
    assert f"error: not waiting on {topic}: {unknown}\nhint: `tailrace trace {topic} ID`" in done.err
    assert broker.run("delayed", "cancel", topic, "no-id").status == EDGES["invalid_request"].exit
    assert broker.run("delayed", "cancel", "nowhere", unknown).status == EDGES["not_found"].exit
    assert broker.run("delayed", "list", "nowhere").status == EDGES["not_found"].exit


# ---------------------------------------------------------------------------------------------- schedules


def test_life_of_a_schedule(broker: Broker, topic: str) -> None:
    name = f"{topic}-nightly"
    flags = ("--zone", "Europe/Lisbon", "--key", "k", "--header", "a=b", "--priority", "1", "--ttl", "1h")
    (made,) = broker.rows("schedule", "put", name, topic, "30 3 1 1 *", "report", *flags)
    assert (made["schedule"], made["topic"], made["cron"]) == (name, topic, "30 3 1 1 *")
    assert (made["zone"], made["key"], made["value"]) == ("Europe/Lisbon", "k", "report")
    assert (made["headers"], made["priority"], made["ttl"]) == ([{"name": "a", "value": "b"}], 1, 3600.0)
    assert made["next"].endswith("-01-01T03:30:00.000000Z")
    assert (made["last"], made["paused"]) == (None, False)
    assert broker.rows("schedule", "list", name) == [made]
    table = broker.run("schedule", "list", name).out.splitlines()
    assert table[0].split() == ["SCHEDULE", "TOPIC", "CRON", "ZONE", "OWNER", "NEXT", "STATE"]
    assert broker.rows("schedule", "pause", name) == [{"schedule": name, "state": "paused"}]
    (paused,) = broker.rows("schedule", "list", name)
    assert (paused["paused"], paused["next"], paused["ttl"]) == (True, None, 3600.0)
    assert broker.run("schedule", "list", name).out.splitlines()[1].endswith("paused")
    assert broker.run("schedule", "pause", name, "--resume").out == f"schedule {name} is resumed\n"
    assert broker.rows("schedule", "list", name) == [made]
    replaced = broker.run("schedule", "put", name, topic, "0 0 1 1 *", "other").out
    assert replaced.startswith(f"schedule {name} publishes next at ")
    assert broker.run("schedule", "delete", name).out == f"schedule {name} is deleted\n"
    assert broker.run("schedule", "list", name).err == "no schedules: `tailrace schedule put` makes one\n"


def test_a_schedule_publishes(broker: Broker, topic: str) -> None:
    name = f"{topic}-ticks"
    broker.rows("schedule", "put", name, topic, "* * * * * *", "tick", "--key", "k")
    first, second = broker.rows("read", topic, "--follow", "--max", "2")
    broker.rows("schedule", "delete", name)
    assert [first["value"], second["value"], second["key"]] == ["tick", "tick", "k"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("TOPIC", "61 * * * *", "v"), "invalid_request", "cron"),
        (("TOPIC", "nightly", "v"), "invalid_request", "cron"),
        (("TOPIC", "0 3 * * *", "v", "--zone", "Mars/Phobos"), "invalid_request", "'Mars/Phobos'"),
        (("TOPIC", "0 3 * * *", "v", "--ttl", "soon"), "invalid_request", "--ttl"),
        (("TOPIC", "0 3 * * *", "v", "--header", "x"), "invalid_request", "--header"),
        (("TOPIC", "0 3 * * *", "v", "--priority", "7"), "invalid_request", "--priority"),
        (("nowhere", "0 3 * * *", "v"), "not_found", "`tailrace topic list`"),
    ],
)
def test_schedules_that_cannot_be(
    broker: Broker, topic: str, arguments: tuple[str, ...], code: str, told: str
) -> None:
    given = [topic if word == "TOPIC" else word for word in arguments]
    done = broker.run("schedule", "put", "never", *given)
    assert done.status == EDGES[code].exit
    assert told in done.err
    assert broker.rows("schedule", "list", "never") == []


def test_schedule_that_is_not_there(broker: Broker) -> None:
    for command in (("pause",), ("delete",)):
        done = broker.run("schedule", *command, "nothing")
        assert done.status == EDGES["not_found"].exit
        assert "hint: `tailrace schedule list`" in done.err


# -------------------------------------------------------------------------------------------------- trace


@pytest.fixture
def lived(broker: Broker, topic: str) -> str:
    """A topic with a message that was nacked and acked (offset 0, key k), and a free one (1), for `g`."""
    broker.rows("publish", topic, "a", "--key", "k", "--header", "traceparent=00-1-2-01")
    broker.rows("publish", topic, "b")
    group = f"{topic}-g"
    broker.run("consume", topic, "-g", group, "--exec", "exit 3", "--max", "1", "-o", "backoff_ms=1")
    rows = broker.rows("consume", topic, "-g", group, "--max", "1", "-o", "backoff_ms=1")
    if rows[0]["value"] == "b":  # it was handed out while a waited
        rows = broker.rows("consume", topic, "-g", group, "--max", "1", "-o", "backoff_ms=1")
    assert rows[0]["value"] == "a"
    return topic


def test_trace_by_place_and_by_id(broker: Broker, lived: str) -> None:
    (life,) = broker.rows("trace", lived, "0:0")
    assert (life["topic"], life["partition"], life["offset"], life["key"]) == (lived, 0, 0, "k")
    assert (life["status"], life["groups"]) == ("settled", {f"{lived}-g": "settled"})
    assert life["traceparent"] == "00-1-2-01"
    events = [event["event"] for event in life["events"] if event["event"] != "given_back"]
    assert events == ["published", "appended", "delivered", "nacked", "delivered", "acked"]
    delivered = next(event for event in life["events"] if event["event"] == "delivered")
    assert (delivered["attempt"], delivered["delivery"], delivered["group"]) == (1, 1, f"{lived}-g")
    assert delivered["member"]
    assert delivered["deadline"] > delivered["time"]
    nacked = next(event for event in life["events"] if event["event"] == "nacked")
    assert nacked["error"] == "exit status 3"
    assert broker.rows("trace", lived, life["id"]) == [life]
    assert broker.rows("trace", lived, life["id"], "--full") == [life]


def test_trace_draws_a_timeline(broker: Broker, lived: str) -> None:
    lines = broker.run("trace", lived, "0:0").out.splitlines()
    assert lines[0].startswith(f"{lived}/0@0  ")
    assert lines[0].endswith("  key=k  settled")
    assert lines[1] == "  traceparent 00-1-2-01"
    assert any("└─" in line and "acked" in line for line in lines)
    assert any("nacked" in line and line.endswith("attempt 1: exit status 3") for line in lines)
    assert lines[-1] == f"  {lived}-g: settled"
    status, shown = on_terminal(broker, "trace", lived, "0:0", NO_COLOR="", COLUMNS="200")
    assert status == 0
    assert "\x1b[" in shown


def test_trace_searches(broker: Broker, lived: str) -> None:
    def found(*flags: str) -> list[int]:
        return [row["offset"] for row in broker.rows("trace", lived, *flags)]

    assert found() == [0, 1]
    assert found("--key", "k") == [0]
    assert found("--key", "nothing") == []
    assert 0 in found("--status", "settled")
    assert found("--status", "dead") == []
    assert found("--since", "-1h") == [0, 1]
    assert found("--until", "-1h") == []
    limited = broker.run("trace", lived, "--max", "1")
    assert limited.err == "there is more: narrow the search, or raise --max\n"
    assert broker.run("trace", lived, "--key", "nothing").err == "nothing found\n"


def test_trace_of_what_waits_and_of_what_was_cancelled(broker: Broker, topic: str) -> None:
    (row,) = broker.rows("publish", topic, "x", "--delay", "1h")
    (life,) = broker.rows("trace", topic, row["id"])
    assert (life["status"], life["offset"]) == ("scheduled", None)
    scheduled = next(event for event in life["events"] if event["event"] == "scheduled")
    assert scheduled["deliver_at"] == row["deliver_at"]
    broker.rows("delayed", "cancel", topic, row["id"])
    assert [life["status"] for life in broker.rows("trace", topic, row["id"])] == ["cancelled"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("0:99",), "not_found", "beyond the end"),
        (("7:0",), "not_found", "has partitions 0 to 0, not 7"),
        (("01900000-0000-7000-8000-000000000000",), "not_found", "has no message"),
        ((FOREIGN,), "invalid_request", "hint: --full searches everything"),
        ((FOREIGN, "--full"), "not_found", "has no message"),
        (("something",), "invalid_request", "neither the id of a message nor PARTITION:OFFSET"),
        (("--status", "fine"), "invalid_request", "error: --status: one of"),
        (("--since", "fine"), "invalid_request", "--since"),
        (("--since", "2030-01-01", "--until", "2020-01-01"), "invalid_request", "--until: 2020-01-01T00"),
        (("--until", "2020-01-01"), "invalid_request", "error: --until: longer ago than"),
        (("0:0", "--key", "k"), "invalid_request", "--key, --since and --until search"),
    ],
)
def test_traces_of_nothing(
    broker: Broker, lived: str, arguments: tuple[str, ...], code: str, told: str
) -> None:
    done = broker.run("trace", lived, *arguments)
    assert done.status == EDGES[code].exit
    assert told in done.err
    assert broker.run("trace", "nowhere", *arguments[:1]).status in (2, 3)
