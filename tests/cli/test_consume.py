"""`tailrace consume` against a real broker: modes, acknowledgements, commands, and how it ends.

Covers `cli/commands/consume.py`.
"""

import base64
import json
import signal
import subprocess
from itertools import count
from pathlib import Path

import pytest

from tailrace.errors import EDGES
from tests.cli.conftest import Broker

_numbers = count()


@pytest.fixture
def topic(broker: Broker) -> str:
    """A topic of one partition with the messages a, b and c of one key."""
    name = f"consumed-{next(_numbers)}"
    broker.rows("topic", "create", name, "--partitions", "1")
    broker.rows("publish", name, "a", "b", "c", "--key", "k")
    return name


def values(rows: list[dict[str, object]]) -> list[object]:
    return [row["value"] for row in rows]


def figures(broker: Broker, group: str) -> dict[str, object]:
    """What the group is at on its one partition."""
    (described,) = broker.rows("group", "describe", group)
    (row,) = described["partitions"]
    return dict(row)


# ------------------------------------------------------------------------------------------ acknowledging


def test_what_was_printed_is_acknowledged(broker: Broker, topic: str) -> None:
    rows = broker.rows("consume", topic, "--group", f"{topic}-g", "--max", "2")
    assert values(rows) == ["a", "b"]
    assert [(row["attempt"], row["deliveries"]) for row in rows] == [(1, 1), (1, 1)]
    state = figures(broker, f"{topic}-g")
    # With --max nothing is delivered that will not be looked at.
    assert (state["committed"], state["deliveries"], state["in_flight"]) == (2, 2, 0)
    plain = broker.run("consume", topic, "-g", f"{topic}-g", "--wait", "0.3").out
    assert [line.split("\t")[4] for line in plain.splitlines()] == ["c"]
    assert broker.rows("consume", topic, "-g", f"{topic}-g", "--wait", "0.2") == []
    assert values(broker.rows("consume", topic, "-g", f"{topic}-other", "-n", "3")) == ["a", "b", "c"]


def test_ack_first_and_never(broker: Broker, topic: str) -> None:
    command = ("consume", topic, "-g", f"{topic}-g", "--max", "1", "--ack")
    assert values(broker.rows(*command, "never")) == ["a"]
    (again,) = broker.rows(*command, "first")
    assert (again["value"], again["attempt"], again["deliveries"]) == ("a", 1, 2)
    assert values(broker.rows(*command, "after")) == ["b"]
    assert figures(broker, f"{topic}-g")["failures"] == 0


def test_several_topics_and_options_of_the_group(broker: Broker, topic: str) -> None:
    broker.rows("topic", "create", f"{topic}.more", "--partitions", "1")
    broker.rows("publish", f"{topic}.more", "d")
    flags = ("-g", f"{topic}-g", "-o", "lease-ms=5000", "-o", "ordering=none", "--wait", "0.5")
    assert sorted(map(str, values(broker.rows("consume", topic, f"{topic}.more", *flags)))) == list("abcd")
    (group,) = broker.rows("group", "describe", f"{topic}-g")
    assert (group["options"]["lease_ms"], group["options"]["ordering"]) == (5000, "none")
    assert group["topics"] == [topic, f"{topic}.more"]


# --------------------------------------------------------------------------------------------------- exec


def test_exec_settles_by_the_exit_status(broker: Broker, topic: str, tmp_path: Path) -> None:
    """0 acknowledges, 65 rejects, anything else fails: then it is tried again, and its key waits for it."""
    log = tmp_path / "log"
    script = (
        "read value; "
        f'echo "$TAILRACE_TOPIC $TAILRACE_PARTITION $TAILRACE_OFFSET $TAILRACE_ATTEMPT" '
        f'"$TAILRACE_MESSAGE_KEY $TAILRACE_GROUP $value" >> {log}; '
        'case "$value.$TAILRACE_ATTEMPT" in a.1) exit 3;; b.*) exit 65;; esac'
    )
    done = broker.run(
        "consume", topic, "-g", f"{topic}-g", "--exec", script, "--max", "4", "-o", "backoff_ms=20"
    )
    assert done.status == 0, done.err
    group = f"{topic}-g"
    assert log.read_text().splitlines() == [
        f"{topic} 0 0 1 k {group} a",
        f"{topic} 0 0 2 k {group} a",
        f"{topic} 0 1 1 k {group} b",
        f"{topic} 0 2 1 k {group} c",
    ]
    assert done.err.splitlines() == [
        f"{topic}/0@0: exit status 3, attempt 1 failed",
        f"{topic}/0@1: exit status 65, to the dead letters",
    ]
    (letter,) = broker.letters(topic, 1)
    assert (letter["reason"], letter["error"], letter["value"]) == ("rejected", "exit status 65", "b")
    assert figures(broker, group)["failures"] == 1


def test_exec_hands_on_bytes_and_the_address_of_the_broker(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    value = b"\x00\xff" * 100_000
    lines = json.dumps({"value_base64": base64.b64encode(value).decode(), "key": None})
    broker.rows("publish", topic, "--jsonl", stdin=lines.encode())
    told = "[$TAILRACE_URL][$TAILRACE_MESSAGE_KEY][$TAILRACE_ID][$TAILRACE_KEY]"
    script = f'cat > {tmp_path}/$TAILRACE_OFFSET; echo "{told}"'
    consumer = broker.start(
        *("consume", topic, "-g", f"{topic}-g", "--exec", script, "--max", "4"),
        env={"TAILRACE_MESSAGE_KEY": "of somebody else", "TAILRACE_KEY": "private.key"},
        stdout=subprocess.PIPE,
    )
    out, _ = consumer.communicate(timeout=30)
    assert consumer.returncode == 0
    assert [(tmp_path / str(n)).read_bytes() for n in range(4)] == [b"a", b"b", b"c", value]
    ids = [row["id"] for row in broker.rows("read", topic)]
    keys = ["k", "k", "k", ""]
    expected = [f"[{broker.url}][{key}][{id_}][private.key]" for key, id_ in zip(keys, ids, strict=True)]
    assert out.decode().splitlines() == expected


def test_exec_holds_little_for_itself(broker: Broker, topic: str) -> None:
    broker.run("publish", topic, stdin=b"\n".join([b"x"] * 100))
    group = f"{topic}-g"
    consumer = broker.start(
        *("consume", topic, "-g", group, "--exec", "echo started; sleep 60"), stdout=subprocess.PIPE
    )
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == b"started\n"
    assert 1 <= int(str(figures(broker, group)["in_flight"])) <= 10
    consumer.send_signal(signal.SIGINT)
    consumer.communicate(timeout=30)


def test_exec_that_reads_nothing_is_fine(broker: Broker, topic: str) -> None:
    broker.rows("publish", topic, "x" * 900_000)
    done = broker.run("consume", topic, "-g", f"{topic}-g", "--exec", "true", "--max", "4")
    assert (done.status, done.err) == (0, "")
    assert figures(broker, f"{topic}-g")["lag"] == 0


def test_exec_after_acknowledging_first_cannot_take_it_back(broker: Broker, topic: str) -> None:
    done = broker.run(
        "consume", topic, "-g", f"{topic}-g", "--ack", "first", "--exec", "exit 9", "--max", "1"
    )
    assert done.err == f"{topic}/0@0: exit status 9, and it is acknowledged already\n"
    assert figures(broker, f"{topic}-g")["committed"] == 1


def test_ctrl_c_ends_the_command_and_gives_the_message_back(broker: Broker, topic: str) -> None:
    group = f"{topic}-g"
    consumer = broker.start(
        *("consume", topic, "-g", group, "--exec", "echo started; sleep 60 & wait"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == b"started\n"
    consumer.send_signal(signal.SIGINT)
    # The pipe ends when the last of the command's processes has gone.
    out, err = consumer.communicate(timeout=30)
    assert (consumer.returncode, out, err) == (130, b"", b"")
    state = figures(broker, group)
    assert (state["in_flight"], state["failures"], state["committed"]) == (0, 0, 0)


def test_sigterm_finishes_what_is_under_way(broker: Broker, topic: str, tmp_path: Path) -> None:
    group, gate = f"{topic}-g", tmp_path / "gate"
    consumer = broker.start(
        *("consume", topic, "-g", group, "--exec", f"echo started; until [ -e {gate} ]; do sleep 0.02; done"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == b"started\n"
    consumer.send_signal(signal.SIGTERM)
    gate.touch()
    out, err = consumer.communicate(timeout=30)
    assert (consumer.returncode, err) == (0, b"")
    state = figures(broker, group)
    # The signal may have come before the gate was seen: one message is done, not three.
    assert (out, state["committed"], state["in_flight"]) == (b"", 1, 0)


# -------------------------------------------------------------------------------------------------- modes


def test_stream_goes_on_where_it_stopped(broker: Broker, topic: str) -> None:
    command = ("consume", topic, "-g", f"{topic}-s", "--mode", "stream", "--max", "2", "--wait", "0.5")
    rows = broker.rows(*command)
    assert values(rows) == ["a", "b"]
    assert "attempt" not in rows[0]
    assert values(broker.rows(*command)) == ["c"]
    assert values(broker.rows(*command)) == []
    (group,) = broker.rows("group", "list", f"{topic}-s")
    assert (group["options"]["mode"], group["lag"]) == ("stream", 0)


def test_broadcast_has_no_group(broker: Broker, topic: str) -> None:
    command = ("consume", topic, "--mode", "broadcast", "--wait", "0.3")
    for _ in range(2):
        assert values(broker.rows(*command, "-o", "start=earliest", "--max", "2")) == ["a", "b"]
    assert broker.rows(*command) == []  # it starts at the end unless told otherwise
    assert broker.rows("group", "list", "--topic", topic) == []


def test_exclusive_stands_by_or_is_refused(broker: Broker, topic: str) -> None:
    group = f"{topic}-x"
    command = ("consume", topic, "-g", group, "--mode", "exclusive", "--json")
    first = broker.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert first.stdout is not None
    assert [json.loads(first.stdout.readline())["value"] for _ in range(3)] == ["a", "b", "c"]
    refused = broker.run(*command, "--no-standby")
    assert refused.status == EDGES["fenced"].exit
    assert "tailrace group describe" in json.loads(refused.err)["hint"]
    second = broker.start(*command, "--max", "1", stdout=subprocess.PIPE)
    while not any(row["member_count"] == 2 for row in broker.rows("group", "list", group)):
        assert second.poll() is None
    first.send_signal(signal.SIGTERM)
    assert first.communicate(timeout=30) == (b"", b"")
    broker.rows("publish", topic, "d")
    out, _ = second.communicate(timeout=30)
    assert json.loads(out)["value"] == "d"


# ----------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("-g", "g", "--ack", "sometimes"), "--ack: after, first, never"),
        (("-g", "g", "--ack", "never", "--exec", "true"), "--exec settles by the exit status"),
        (("-g", "g", "--mode", "stream", "--exec", "true"), "--mode stream settles nothing"),
        (("--mode", "broadcast", "--ack", "first"), "--mode broadcast settles nothing"),
        (("-g", "g", "--mode", "broadcast"), "leave --group out"),
        (("-g", "g", "--mode", "fast"), "queue, exclusive, stream or broadcast"),
        (("-g", "g", "--no-standby"), "goes with --mode exclusive"),
        ((), "--group is missing"),
        (("-g", "bad name"), "may have only letters"),
        (("-g", "_own"), "_"),
        (("-g", "g", "-o", "group=h"), "'group' is not an option of groups"),
        (("-g", "g", "-o", "mode=stream"), "'mode' is not an option of groups"),
        (("-g", "g", "-o", "prefetch=1"), "'prefetch' is not an option of groups"),
        (("-g", "g", "-o", "lease_ms"), "is not KEY=VALUE"),
        (("-g", "g", "-o", "leas_ms=10"), "did you mean 'lease_ms'?"),
        (("-g", "g", "-o", "lease_ms=1", "-o", "start=never"), "lease_ms is from 10 to"),
        (("-g", "g", "--max", "0"), "--max"),
        (("-g", "g", "--wait", "0"), "--wait"),
    ],
)
def test_wrong_command_lines(broker: Broker, topic: str, flags: tuple[str, ...], told: str) -> None:
    done = broker.run("consume", topic, *flags)
    assert done.status in (EDGES["invalid_request"].exit, EDGES["denied"].exit), done
    assert told in done.err
    assert done.out == ""
    assert broker.rows("group", "list", "g") == []


def test_options_that_contradict_the_group(broker: Broker, topic: str) -> None:
    broker.rows("group", "enlist", f"{topic}-g", topic, "-o", "lease_ms=1000")
    done = broker.run("consume", topic, "-g", f"{topic}-g", "-o", "lease_ms=2000", "--json")
    assert done.status == 2
    assert json.loads(done.err)["details"]["problems"] == ["lease_ms is 1000, not 2000"]


def test_topic_that_is_not_there(broker: Broker) -> None:
    done = broker.run("consume", "nowhere", "-g", "g")
    assert done.status == EDGES["not_found"].exit
    assert "hint: `tailrace topic list`" in done.err


def test_closed_pipe_gives_back_what_was_not_seen(broker: Broker, topic: str) -> None:
    broker.run("publish", topic, stdin=b"\n".join([b"x" * 100] * 3000))
    consumer = broker.start(
        "consume", topic, "-g", f"{topic}-g", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert consumer.stdout is not None
    assert consumer.stderr is not None
    consumer.stdout.readline()
    consumer.stdout.close()
    assert consumer.stderr.read() == b""
    assert consumer.wait(30) == 141
    consumer.stderr.close()
    state = figures(broker, f"{topic}-g")
    assert (state["in_flight"], state["failures"]) == (0, 0)
    assert 0 < int(str(state["lag"])) < 3003
