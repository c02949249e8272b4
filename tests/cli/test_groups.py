"""`tailrace group` against a real broker: enlist, list, describe, pause, reset, delete.

Covers `cli/commands/group.py`.
"""

import json
import signal
import subprocess
from itertools import count

import pytest

from tailrace.errors import EDGES
from tests.cli.conftest import Broker
from tests.cli.test_messages import on_terminal

_numbers = count()


@pytest.fixture
def topic(broker: Broker) -> str:
    """A topic of two partitions with two messages each."""
    name = f"grouped-{next(_numbers)}"
    broker.rows("topic", "create", name, "--partitions", "2")
    for partition in "01":
        broker.rows("publish", name, "a", "b", "--partition", partition)
    return name


def test_life_of_a_group(broker: Broker, topic: str) -> None:
    group = f"{topic}-life"
    (made,) = broker.rows("group", "enlist", group, topic, "-o", "max-attempts=3", "-o", "expired_to_dlq=on")
    assert (made["group"], made["topics"], made["member_count"]) == (group, [topic], 0)
    assert (made["options"]["max_attempts"], made["options"]["expired_to_dlq"]) == (3, True)
    assert (made["paused"], made["warnings"]) == (False, [])
    (listed,) = broker.rows("group", "list", group)
    assert (listed["group"], listed["lag"]) == (group, 4)
    (described,) = broker.rows("group", "describe", group)
    assert [row["partition"] for row in described["partitions"]] == [0, 1]
    row = described["partitions"][0]
    assert (row["topic"], row["member"], row["committed"], row["end_offset"]) == (topic, None, 0, 2)
    assert (row["lag"], row["in_flight"], row["dead_lettered"]) == (2, 0, 0)
    assert row["oldest_age_ms"] >= 0
    assert broker.rows("group", "delete", group) == [{"group": group, "state": "deleted"}]
    assert broker.rows("group", "list", group) == []


def test_enlist_twice(broker: Broker, topic: str) -> None:
    group = f"{topic}-twice"
    assert broker.run("group", "enlist", group, topic).out == f"group {group} is enlisted on {topic}\n"
    done = broker.run("group", "enlist", group, topic)
    assert done.status == EDGES["already_exists"].exit
    assert "hint: see it with `tailrace group describe`" in done.err
    broker.rows("topic", "create", f"{topic}.more", "--partitions", "1")
    (same,) = broker.rows("group", "enlist", group, f"{topic}.more", "--if-missing")
    assert same["topics"] == [topic, f"{topic}.more"]


def test_what_may_surprise_is_told(broker: Broker, topic: str) -> None:
    done = broker.run("group", "enlist", f"{topic}-w", topic, "-o", "ordering=partition")
    assert done.status == 0
    assert done.err == "note: ordering = 'partition' is strict: priorities are ignored\n"
    (described,) = broker.rows("group", "describe", f"{topic}-w")
    assert len(described["warnings"]) == 1


def test_lists_for_people(broker: Broker, topic: str) -> None:
    group = f"{topic}-people"
    broker.rows("group", "enlist", group, topic)
    lines = broker.run("group", "list", "--topic", topic).out.splitlines()
    assert lines[0].split() == ["GROUP", "TOPICS", "MODE", "MEMBERS", "LAG", "STATE"]
    assert lines[1].split() == [group, topic, "queue", "0", "4", "-"]
    none = broker.run("group", "list", "nobody-is-called-so")
    assert none.err == "no groups yet: `tailrace consume TOPIC --group NAME` makes one\n"
    described = broker.run("group", "describe", group).out
    assert "\nlease_ms             30000\n" in described
    assert "\nmembers              0\n" in described
    assert "MEMBER  CLIENT" not in described
    assert described.splitlines()[-1].split()[:6] == [topic, "1", "-", "0", "2", "2"]
    status, shown = on_terminal(broker, "group", "describe", group, NO_COLOR="", COLUMNS="200")
    assert status == 0
    assert "partitions" in shown
    assert "in flight" in shown


def test_members_are_shown(broker: Broker, topic: str) -> None:
    group = f"{topic}-m"
    consumer = broker.start("consume", topic, "-g", group, "--json", stdout=subprocess.PIPE)
    assert consumer.stdout is not None
    for _ in range(4):
        consumer.stdout.readline()
    (described,) = broker.rows("group", "describe", group)
    (member,) = described["members"]
    assert member["client"].endswith(f"/{consumer.pid}")
    assert member["since"].endswith("Z")
    assert member["last_seen"].endswith("Z")
    assert member["owned"] == [{"topic": topic, "partition": 0}, {"topic": topic, "partition": 1}]
    assert [row["member"] for row in described["partitions"]] == [member["member"]] * 2
    table = broker.run("group", "describe", group).out
    assert table.splitlines()[-6].split() == ["MEMBER", "CLIENT", "PARTITIONS", "SINCE"]
    for command in (("reset", group, topic, "--to", "earliest"), ("delete", group)):
        done = broker.run("group", *command)
        assert done.status == EDGES["invalid_request"].exit
        assert "has 1 member" in done.err
    (plan,) = broker.rows("group", "reset", group, topic, "--to", "earliest", "--force")
    assert plan["done"] is True
    for _ in range(4):
        assert json.loads(consumer.stdout.readline())["deliveries"] == 1
    consumer.send_signal(signal.SIGTERM)
    assert consumer.wait(30) == 0
    consumer.stdout.close()


def test_pause_and_resume(broker: Broker, topic: str) -> None:
    group = f"{topic}-p"
    broker.rows("group", "enlist", group, topic)
    assert broker.rows("group", "pause", group) == [{"group": group, "state": "paused"}]
    assert broker.run("group", "list", group).out.splitlines()[1].endswith("paused")
    assert "\nstate                paused\n" in broker.run("group", "describe", group).out
    assert broker.rows("consume", topic, "-g", group, "--wait", "0.3") == []
    assert broker.run("group", "pause", group, "--resume").out == f"group {group} is resumed\n"
    assert len(broker.rows("consume", topic, "-g", group, "--max", "4")) == 4


def test_reset_by_every_kind_of_point(broker: Broker, topic: str) -> None:
    group = f"{topic}-r"
    broker.rows("group", "enlist", group, topic)

    def reset(*flags: str) -> tuple[bool, list[tuple[int, int]]]:
        (plan,) = broker.rows("group", "reset", group, topic, *flags)
        assert [change["partition"] for change in plan["changes"]] == list(range(len(plan["changes"])))
        return plan["done"], [(change["before"], change["after"]) for change in plan["changes"]]

    assert reset("--to", "latest", "--dry-run") == (False, [(0, 2), (0, 2)])
    assert reset("--to", "latest") == (True, [(0, 2), (0, 2)])
    assert reset("--to", "1") == (True, [(2, 1), (2, 1)])
    assert reset("--to", "0", "--partition", "0") == (True, [(1, 0)])
    assert reset("--to", "-1h") == (True, [(0, 0), (1, 0)])
    assert reset("--to", "2100-01-01") == (True, [(0, 2), (0, 2)])
    assert reset("--to", "earliest") == (True, [(2, 0), (2, 0)])
    dry = broker.run("group", "reset", group, topic, "--to", "latest", "--dry-run")
    assert dry.out.splitlines()[1].split() == ["0", "0", "2", "2"]
    assert dry.err == "nothing was changed: leave --dry-run out to do it\n"
    done = broker.run("group", "reset", group, topic, "--to", "latest")
    assert done.err == f"group {group} is reset on {topic}\n"
    assert broker.rows("consume", topic, "-g", group, "--wait", "0.2") == []


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (("--to", "yesterday"), 2, "none of earliest, latest"),
        (("--to", "3"), 2, "3 is not in it"),
        (("--to", "1", "--partition", "7"), 2, "there is no partition 7"),
        (("--to", "latest", "--partition", "0"), 2, "--partition goes with an offset"),
        ((), 2, "--to"),
    ],
)
def test_resets_that_cannot_be(
    broker: Broker, topic: str, flags: tuple[str, ...], status: int, told: str
) -> None:
    group = f"{topic}-bad"
    broker.rows("group", "enlist", group, topic)
    done = broker.run("group", "reset", group, topic, *flags)
    assert done.status == status
    assert told in done.err


@pytest.mark.parametrize(
    "command",
    [
        ("describe", "nobody"),
        ("pause", "nobody"),
        ("pause", "nobody", "--resume"),
        ("reset", "nobody", "TOPIC", "--to", "latest"),
        ("delete", "nobody"),
        ("delete", "nobody", "--force"),
    ],
)
def test_group_that_is_not_there(broker: Broker, topic: str, command: tuple[str, ...]) -> None:
    done = broker.run("group", *(topic if word == "TOPIC" else word for word in command))
    assert done.status == EDGES["not_found"].exit
    assert done.err == "error: there is no group 'nobody'\nhint: `tailrace group list` shows what is there\n"


def test_topics_that_do_not_fit(broker: Broker, topic: str) -> None:
    missing = broker.run("group", "enlist", f"{topic}-n", "nowhere")
    assert missing.status == EDGES["not_found"].exit
    assert "hint: `tailrace topic list`" in missing.err
    assert broker.rows("group", "list", f"{topic}-n") == []
    broker.rows("group", "enlist", f"{topic}-o", topic)
    broker.rows("topic", "create", f"{topic}.else", "--partitions", "1")
    other = broker.run("group", "reset", f"{topic}-o", f"{topic}.else", "--to", "latest")
    assert other.status == EDGES["not_found"].exit
    assert "is not on topic" in other.err


def test_every_problem_of_an_enlisting_is_told(broker: Broker, topic: str) -> None:
    done = broker.run("group", "enlist", "g", topic, "-o", "lease_ms=1", "-o", "mod=queue", "--json")
    assert done.status == EDGES["invalid_request"].exit
    assert len(json.loads(done.err)["details"]["problems"]) == 2
    for name in ("bad name", "x" * 246, "a//b"):
        assert broker.run("group", "enlist", name, topic).status == EDGES["invalid_request"].exit, name
    for key in ("group", "topics", "timeout", "if-missing"):
        assert broker.run("group", "enlist", "g", topic, "-o", f"{key}=1").status == 2, key


def test_alter(broker: Broker, topic: str) -> None:
    group = f"{topic}-altered"
    broker.rows("group", "enlist", group, topic)
    (altered,) = broker.rows("group", "alter", group, "-o", "lease-ms=5000", "-o", "assignment=shared")
    assert (altered["options"]["lease_ms"], altered["options"]["assignment"]) == (5000, "shared")
    (described,) = broker.rows("group", "describe", group)
    assert (described["options"]["lease_ms"], described["options"]["max_attempts"]) == (5000, 5)
    assert [row["shared"] for row in described["partitions"]] == [True, True]
    assert "(shared)" in broker.run("group", "describe", group).out
    done = broker.run("group", "alter", group, "-o", "max_attempts=7", "-o", "reconnect_grace_ms=500")
    assert (done.status, done.out) == (0, f"group {group} has max_attempts = 7, reconnect_grace_ms = 500\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "mode=stream"], "mode is 'queue' and cannot be changed"),
        (["-o", "ordering=none"], "ordering is 'key' and cannot be changed"),
        (["-o", "lease=5"], "did you mean 'lease_ms'"),
        (["-o", "lease_ms=0"], "lease_ms is from 10 to"),
        ([], "name at least one option"),
    ],
)
def test_alterations_that_are_refused(broker: Broker, topic: str, options: list[str], said: str) -> None:
    broker.rows("group", "enlist", f"{topic}-kept", topic)
    done = broker.run("group", "alter", f"{topic}-kept", *options)
    assert done.status == EDGES["invalid_request"].exit
    assert said in done.err


def test_altering_nobody(broker: Broker) -> None:
    done = broker.run("group", "alter", "nobody", "-o", "lease_ms=500")
    assert done.status == EDGES["not_found"].exit


def test_a_member_that_asks_for_others_is_told_the_command(broker: Broker, topic: str) -> None:
    group = f"{topic}-other"
    broker.rows("group", "enlist", group, topic, "-o", "lease_ms=5000")
    done = broker.run("consume", topic, "--group", group, "-o", "lease_ms=6000")
    assert done.status == EDGES["invalid_request"].exit
    assert f"tailrace group alter {group} -o lease_ms=6000" in done.err
