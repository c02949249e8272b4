"""`tailrace dlq` against a real broker: list, show, redrive, purge.

Covers `cli/commands/dead_letter.py`.
"""

import json
import os
import subprocess
from itertools import count

import pytest

from tailrace.errors import EDGES
from tests.cli.conftest import Broker

_numbers = count()


@pytest.fixture
def topic(broker: Broker) -> str:
    """A topic whose messages x (key 1), y (key 2) and z (no key) were rejected by the group of its name."""
    name = f"dead-{next(_numbers)}"
    broker.rows("topic", "create", name, "--partitions", "1")
    for value, key in (("x", ("--key", "1")), ("y", ("--key", "2")), ("z", ())):
        broker.rows("publish", name, value, *key, "--header", f"mark={value}")
    assert broker.run("consume", name, "-g", name, "--exec", "exit 65", "--max", "3").status == 0
    assert len(broker.letters(name, 3)) == 3
    return name


def test_list(broker: Broker, topic: str) -> None:
    first, second, third = broker.rows("dlq", "list", topic)
    assert (first["partition"], first["offset"]) == (0, 0)
    assert (first["origin_topic"], first["origin_partition"], first["origin_offset"]) == (topic, 0, 0)
    assert (first["group"], first["reason"], first["error"]) == (topic, "rejected", "exit status 65")
    assert (first["attempts"], first["deliveries"]) == (0, 1)
    assert (first["key"], first["value"]) == ("1", "x")
    assert first["origin_time"] < first["first_delivery"] <= first["last_delivery"]
    assert first["last_member"]
    assert {"name": "mark", "value": "x"} in first["headers"]
    assert (second["value"], third["value"], third["key"]) == ("y", "z", None)
    assert [row["value"] for row in broker.rows("dlq", "list", topic, "--max", "2")] == ["x", "y"]
    assert broker.rows("dlq", "list", topic, "--group", "nobody") == []
    assert broker.rows("dlq", "list", topic, "--reason", "poison") == []
    assert len(broker.rows("dlq", "list", topic, "--group", topic, "--reason", "rejected")) == 3
    assert [row["value"] for row in broker.rows("dlq", "list", topic, "--key", "2")] == ["y"]
    assert broker.rows("dlq", "list", topic, "--key", "3") == []
    # The name of the dead-letter topic itself is understood, too.
    assert len(broker.rows("dlq", "list", f"{topic}.dlq")) == 3


def test_list_and_show_for_people(broker: Broker, topic: str) -> None:
    lines = broker.run("dlq", "list", topic).out.splitlines()
    assert lines[0].split() == ["PLACE", "ORIGIN", "GROUP", "REASON", "ATTEMPTS", "ERROR", "VALUE"]
    assert lines[1].split() == ["0:0", f"{topic}/0@0", topic, "rejected", "0", "exit", "status", "65", "x"]
    shown = broker.run("dlq", "show", topic, "0:1").out
    assert "\nreason            rejected\n" in shown
    assert "\nvalue             y\n" in shown
    assert shown.endswith("\n  mark: y\n")
    assert "tailrace-" not in shown


def test_show(broker: Broker, topic: str) -> None:
    (letter,) = broker.rows("dlq", "show", topic, "0:2")
    assert (letter["value"], letter["origin_offset"]) == ("z", 2)
    broker.rows("dlq", "purge", topic, "--yes")
    assert broker.rows("dlq", "show", topic, "0:2") == [letter]  # it is read, not taken


@pytest.mark.parametrize(
    ("place", "code", "told"),
    [
        ("0:9", "not_found", "offset 9"),
        ("7:0", "not_found", "has partitions 0 to 0, not 7"),
        ("here", "invalid_request", "is not PARTITION:OFFSET"),
        ("0:-1", "invalid_request", "is not PARTITION:OFFSET"),
        ("0", "invalid_request", "is not PARTITION:OFFSET"),
    ],
)
def test_places_where_nothing_is(broker: Broker, topic: str, place: str, code: str, told: str) -> None:
    done = broker.run("dlq", "show", topic, place)
    assert done.status == EDGES[code].exit
    assert told in done.err


def test_topics_without_dead_letters(broker: Broker) -> None:
    broker.rows("topic", "create", "healthy", "--partitions", "1")
    assert broker.run("dlq", "list", "healthy").err == "no dead letters\n"
    assert broker.rows("dlq", "list", "healthy") == []
    assert broker.run("dlq", "redrive", "healthy").out == "0 sent back\n"
    assert broker.run("dlq", "purge", "healthy", "--yes").out == "0 dropped\n"
    assert broker.run("dlq", "show", "healthy", "0:0").status == EDGES["not_found"].exit
    for command in (("list",), ("redrive",), ("purge", "--yes")):
        mistyped = broker.run("dlq", command[0], "helthy", *command[1:])
        assert mistyped.status == EDGES["not_found"].exit
        assert "there is no topic 'helthy'" in mistyped.err


@pytest.mark.parametrize("command", [("list",), ("redrive", "--dry-run"), ("redrive",), ("purge", "--yes")])
def test_a_reason_that_nothing_dies_of_is_refused(
    broker: Broker, topic: str, command: tuple[str, ...]
) -> None:
    done = broker.run("dlq", command[0], topic, *command[1:], "--reason", "zz")
    assert (done.status, done.out) == (EDGES["invalid_request"].exit, "")
    reasons = "max_attempts, max_deliveries, rejected, expired, poison"
    assert done.err == f"error: --reason: one of {reasons}, not 'zz'\n"
    assert len(broker.rows("dlq", "list", topic)) == 3


def test_redrive_goes_to_the_group_that_gave_up(broker: Broker, topic: str) -> None:
    assert len(broker.rows("consume", topic, "-g", f"{topic}-other", "--max", "3")) == 3
    (dry,) = broker.rows("dlq", "redrive", topic, "--dry-run")
    rest = {"held": 0, "failed": 0, "problems": []}
    assert dry == {"topic": topic, "count": 3, "reopened": 0, "republished": 0, "dry_run": True, **rest}
    told = broker.run("dlq", "redrive", topic, "--key", "2", "--dry-run").out
    assert told == "1 would be sent back: leave --dry-run out to do it\n"
    (done,) = broker.rows("dlq", "redrive", topic, "--key", "2", "--rate", "1000")
    assert done == {"topic": topic, "count": 1, "reopened": 1, "republished": 0, "dry_run": False, **rest}
    (again,) = broker.rows("consume", topic, "-g", topic, "--max", "1")
    assert (again["value"], again["offset"], again["attempt"]) == ("y", 1, 1)
    assert [row["value"] for row in broker.rows("dlq", "list", topic)] == ["x", "z"]
    assert broker.run("dlq", "redrive", topic, "--group", topic).out == "2 sent back\n"
    assert broker.rows("dlq", "list", topic) == []
    assert len(broker.rows("consume", topic, "-g", topic, "--max", "2")) == 2
    assert broker.rows("consume", topic, "-g", f"{topic}-other", "--wait", "0.2") == []


def test_redrive_of_what_was_trimmed_makes_copies(broker: Broker, topic: str) -> None:
    broker.rows("topic", "trim", topic, "--partition", "0", "--to-offset", "2")
    done = broker.run("dlq", "redrive", topic)
    assert done.out == "3 sent back, 2 of them as copies of what is gone\n"
    rows = broker.rows("consume", topic, "-g", topic, "--max", "3")
    assert sorted(row["value"] for row in rows) == ["x", "y", "z"]


def test_redrive_says_what_could_not_be_sent_back(broker: Broker, topic: str) -> None:
    broker.run("group", "delete", topic)
    done = broker.run("dlq", "redrive", topic)
    assert (done.status, done.out) == (1, "0 sent back\n")
    assert "not sent back: " in done.err
    assert "3 could not be sent back and stay where they are" in done.err
    assert len(broker.rows("dlq", "list", topic)) == 3


def test_rate_has_to_be_above_zero(broker: Broker, topic: str) -> None:
    assert broker.run("dlq", "redrive", topic, "--rate", "0").status == 2


def test_purge_asks_and_needs_somebody_to_ask(broker: Broker, topic: str) -> None:
    for flags in ((), ("--json",)):
        done = broker.run("dlq", "purge", topic, *flags)
        assert done.status == EDGES["invalid_request"].exit
        assert "--yes" in done.err
    here, there = os.openpty()
    asked = broker.start("dlq", "purge", topic, stdin=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.close(there)
    os.write(here, b"n\n")
    out, err = asked.communicate(timeout=30)
    os.close(here)
    assert (asked.returncode, out.strip()) == (1, b"")
    assert b"Drop dead letters of" in err
    assert b"nothing was dropped" in err
    (done,) = broker.rows("dlq", "purge", topic, "--key", "1", "-y")
    assert done == {"topic": topic, "purged": 1}
    assert [row["value"] for row in broker.rows("dlq", "list", topic)] == ["y", "z"]
    assert broker.run("dlq", "purge", topic, "--yes").out == "2 dropped\n"
    # Looking at them and dropping them leaves no group behind that a person would see.
    assert json.dumps(broker.rows("group", "list")).count("_redrive") == 0
