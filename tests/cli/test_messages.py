"""publish and read against a real broker: every option, streams, pipes that close, and Ctrl-C.

Covers `cli/lines.py`, `cli/commands/message_options.py`, `cli/commands/publish.py` and
`cli/commands/read.py`.
"""

import base64
import json
import os
import pty
import select
import signal
import subprocess

import pytest

from tailrace.errors import EDGES
from tests.cli.conftest import Broker, run


@pytest.fixture
def topic(broker: Broker, request: pytest.FixtureRequest) -> str:
    """A topic with one partition, named after the test."""
    name = request.node.name.replace("[", "/").rstrip("]").replace("_", "-")
    broker.rows("topic", "create", name, "--partitions", "1", "--option", "durability=interval")
    return name


def values(rows: list[dict[str, object]]) -> list[object]:
    return [row["value"] for row in rows]


def test_arguments_come_back_in_order(broker: Broker, topic: str) -> None:
    results = broker.rows(
        "publish", topic, "one", "zwei", "三", "--key", "k", "--header", "a=b", "--priority", "1"
    )
    assert [(row["partition"], row["offset"], row["sequence"]) for row in results] == [
        (0, 0, 1),
        (0, 1, 2),
        (0, 2, 3),
    ]
    assert not any(row["duplicate"] for row in results)
    rows = broker.rows("read", topic)
    assert values(rows) == ["one", "zwei", "三"]
    first = rows[0]
    assert (first["topic"], first["partition"], first["offset"], first["sequence"]) == (topic, 0, 0, 1)
    assert (first["key"], first["headers"], first["priority"]) == ("k", [{"name": "a", "value": "b"}], 1)
    assert (first["id"], first["append_time"]) == (results[0]["id"], results[0]["append_time"])
    assert first["expires_at"] is None


def test_plain_output_is_tab_separated_and_escaped(broker: Broker, topic: str) -> None:
    published = broker.run("publish", topic, "a\tb", "\x1b[31mred", "--key", "k\n")
    assert [line.split("\t")[:3] for line in published.out.splitlines()] == [["0", "0", "1"], ["0", "1", "2"]]
    lines = [line.split("\t") for line in broker.run("read", topic).out.splitlines()]
    assert [(line[0], line[1], line[3], line[4]) for line in lines] == [
        ("0", "0", "k\\n", "a\\tb"),
        ("0", "1", "k\\n", "\\x1b[31mred"),
    ]


@pytest.mark.parametrize("dash", [(), ("-",)])
def test_lines_of_standard_input(broker: Broker, topic: str, dash: tuple[str, ...]) -> None:
    results = broker.rows("publish", topic, *dash, stdin=b"one\r\n\ntwo\n\xff\xfe\nunfinished")
    assert [row["offset"] for row in results] == [0, 1, 2, 3, 4]
    rows = broker.rows("read", topic)
    assert values([row for row in rows if "value" in row]) == ["one", "", "two", "unfinished"]
    assert base64.b64decode(str(rows[3]["value_base64"])) == b"\xff\xfe"
    assert "value" not in rows[3]


def test_what_read_prints_publish_takes(broker: Broker, topic: str) -> None:
    lines = [
        {
            "value": "v",
            "key": "k",
            "headers": {"h": "1"},
            "priority": 4,
            "timestamp": "2026-01-31T12:00:00.000001Z",
        },
        {
            "value_base64": "/w==",
            "key_base64": "/g==",
            "headers": [{"name": "b", "value_base64": "gA=="}],
            "dedup_id": "d",
        },
        {"value": "", "expires_at": "2126-01-01T00:00:00Z", "partition": 0},
        {"key": "k", "value": None},
    ]
    stdin = "\n\n".join(map(json.dumps, lines)).encode()
    assert len(broker.rows("publish", topic, "--jsonl", stdin=stdin)) == 4
    original = broker.run("read", topic, "--json")
    copy = f"{topic}.copy"
    broker.rows("topic", "create", copy, "--partitions", "1")
    broker.rows("publish", copy, "--jsonl", stdin=original.out.encode())
    own = {"topic", "id", "append_time"}
    stripped = [
        [{name: field for name, field in row.items() if name not in own} for row in rows]
        for rows in (original.rows, broker.rows("read", copy))
    ]
    assert stripped[0] == stripped[1]
    assert stripped[0][0]["timestamp"] == "2026-01-31T12:00:00.000001Z"
    assert stripped[0][1]["headers"] == [{"name": "b", "value_base64": "gA=="}]
    assert stripped[0][3]["value"] is None


def test_bad_line_ends_the_stream_after_what_came_before(broker: Broker, topic: str) -> None:
    done = broker.run(
        "publish",
        topic,
        "--jsonl",
        "--json",
        stdin=b'{"value": "a"}\n{"value": "b"}\n{"valeu": 1}\n{"value": "c"}',
    )
    assert done.status == 2
    assert [row["offset"] for row in done.rows] == [0, 1]
    error = json.loads(done.err)
    assert error["error"] == "invalid_request"
    assert error["message"].startswith("line 3: ")
    assert "valeu" in error["message"]
    assert values(broker.rows("read", topic)) == ["a", "b"]


def test_refused_message_names_its_line(broker: Broker, topic: str) -> None:
    done = run("publish", topic, TAILRACE_URL=broker.url, stdin=b"small\n" + b"x" * (1 << 20) + b"y\nnever")
    assert done.status == 13
    assert "1 messages were acknowledged" in done.err
    assert "error: line 2: " in done.err
    assert values(broker.rows("read", topic)) == ["small"]


def test_endless_line_is_refused_without_being_held(broker: Broker, topic: str) -> None:
    done = run("publish", topic, TAILRACE_URL=broker.url, stdin=b"ok\n" + b"x" * (25 * 1024 * 1024))
    assert done.status == 13
    assert "line 2: longer than" in done.err


def test_many_lines(broker: Broker, topic: str) -> None:
    count = 30_000
    lines = [str(number) for number in range(count)]
    done = broker.run("publish", topic, stdin="\n".join(lines).encode())
    assert [int(line.split("\t")[1]) for line in done.out.splitlines()] == list(range(count))
    read = broker.run("read", topic)
    assert [line.split("\t")[4] for line in read.out.splitlines()] == lines


def test_expected_sequence(broker: Broker, topic: str) -> None:
    broker.rows("publish", topic, "one", "--expect-sequence", "1")
    done = broker.run("publish", topic, "two", "--expect-sequence", "1", "--json")
    assert done.status == 9
    error = json.loads(done.err)
    assert (error["error"], error["outcome"], error["details"]["current_sequence"]) == (
        "sequence_conflict",
        "none",
        1,
    )
    broker.rows("publish", topic, "two", "--expect-sequence", "2")
    assert values(broker.rows("read", topic)) == ["one", "two"]


def test_expected_key_sequence(broker: Broker) -> None:
    broker.rows("topic", "create", "aggregates", "-o", "key_index=on")
    command = ("publish", "aggregates", "created", "--key", "order-1", "--expect-key-sequence")
    broker.rows(*command, "0")
    assert broker.run(*command, "0").status == 9
    broker.rows(*command, "1")


def test_dedup_id_gives_the_first_offset(broker: Broker, topic: str) -> None:
    (first,) = broker.rows("publish", topic, "a", "--dedup-id", "once")
    (again,) = broker.rows("publish", topic, "a", "--dedup-id", "once")
    assert (first["duplicate"], again["duplicate"]) == (False, True)
    assert again["offset"] == first["offset"]
    assert len(broker.rows("read", topic)) == 1


@pytest.mark.parametrize("flag", ["--dedup-id=x", "--expect-sequence=1", "--expect-key-sequence=0"])
def test_expectations_are_for_one_message(broker: Broker, flag: str) -> None:
    for more in (["a", "b"], ["-"]):
        done = broker.run("publish", "nowhere", *more, flag)
        assert done.status == 2
        assert "go with exactly one VALUE" in done.err


def test_ttl_sets_the_expiry(broker: Broker, topic: str) -> None:
    broker.rows("publish", topic, "a", "--ttl", "1h")
    (row,) = broker.rows("read", topic)
    assert row["expires_at"] > row["timestamp"]


def test_a_delayed_message_has_no_place_yet(broker: Broker, topic: str) -> None:
    (row,) = broker.rows("publish", topic, "later", "--delay", "1h")
    assert (row["offset"], row["sequence"], row["duplicate"]) == (None, None, False)
    assert row["deliver_at"] > row["append_time"]
    assert broker.rows("read", topic) == []
    assert broker.run("publish", topic, "x", "--delay", "soon").status == 2


def test_partitions_and_keys(broker: Broker) -> None:
    broker.rows("topic", "create", "three", "--partitions", "3")
    for partition in range(3):
        broker.rows("publish", "three", f"to {partition}", "--partition", str(partition))
    assert values(broker.rows("read", "three", "--partition", "1")) == ["to 1"]
    assert sorted(map(str, values(broker.rows("read", "three", "--partition", "2", "--partition", "0")))) == [
        "to 0",
        "to 2",
    ]
    keyed = {row["partition"] for row in broker.rows("publish", "three", *"abcdefgh", "--key", "same")}
    assert len(keyed) == 1
    assert broker.run("read", "three", "--partition", "3").status == 2
    assert broker.run("publish", "three", "x", "--partition", "3").status in (2, 3)


def test_ranges(broker: Broker, topic: str) -> None:
    moments = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z", "2026-01-04T00:00:00Z"]
    lines = [json.dumps({"value": str(n), "timestamp": moment}) for n, moment in enumerate(moments)]
    broker.rows("publish", topic, "--jsonl", stdin="\n".join(lines).encode())

    def read(*flags: str) -> list[object]:
        return values(broker.rows("read", topic, *flags))

    assert read("--from", "2") == ["2", "3"]
    assert read("--from", "1", "--to", "3") == ["1", "2"]
    assert read("--from", "2026-01-02", "--to", "2026-01-04") == ["1", "2"]
    assert read("--from", "2026-01-02T00:00:00.000001Z") == ["2", "3"]
    assert read("--from", "latest") == []
    assert read("--from", "4") == []
    assert read("--from", "-1h") == []
    assert read("--to", "0") == []
    assert read("--to", "99", "--from", "3") == ["3"]
    assert read("--max", "3") == ["0", "1", "2"]
    for first, last in (("3", "1"), ("2026-01-03", "2026-01-02")):
        done = broker.run("read", topic, "--from", first, "--to", last)
        assert (done.status, done.out) == (EDGES["invalid_request"].exit, "")
        assert "--to: " in done.err
        assert "lies before --from" in done.err


def test_an_offset_that_is_not_there_is_told_and_not_passed_over(broker: Broker, topic: str) -> None:
    broker.rows("publish", topic, "a", "b", "c")
    broker.rows("topic", "trim", topic, "--partition", "0", "--to-offset", "2")
    for offset in ("0", "1", "4", "99"):
        for flags in ((), ("--follow",), ("--partition", "0")):
            done = broker.run("read", topic, "--from", offset, *flags)
            assert (done.status, done.out) == (EDGES["not_found"].exit, "")
            told = f"--from: {topic}/0 has no offset {offset}, it goes from 2 to its end, 3\n"
            assert done.err.startswith(f"error: {told}hint: --from earliest")
    error = json.loads(broker.run("read", topic, "--from", "99", "--json").err)
    assert error["details"] == {"partition": 0, "start_offset": 2, "end_offset": 3}
    for start in ((), ("--from", "earliest"), ("--from", "2"), ("--from", "2020-01-01")):
        assert values(broker.rows("read", topic, *start)) == ["c"]
    assert broker.rows("read", topic, "--from", "3") == []


def test_follow_shows_new_messages_and_ends_with_ctrl_c(broker: Broker, topic: str) -> None:
    broker.rows("publish", topic, "old")
    reader = broker.start("read", topic, "--follow", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert reader.stdout is not None
    assert json.loads(reader.stdout.readline())["value"] == "old"
    broker.rows("publish", topic, "new")
    assert json.loads(reader.stdout.readline())["value"] == "new"
    reader.send_signal(signal.SIGINT)
    out, err = reader.communicate(timeout=30)
    assert (reader.returncode, out, err) == (130, b"", b"")


def test_follow_with_max_ends_by_itself(broker: Broker, topic: str) -> None:
    broker.rows("publish", topic, "a", "b")
    assert values(broker.rows("read", topic, "--follow", "--max", "2")) == ["a", "b"]
    assert broker.run("read", topic, "--follow", "--to", "1").status == 2


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_closed_pipe_is_quiet(broker: Broker, topic: str, form: tuple[str, ...]) -> None:
    broker.run("publish", topic, stdin=b"\n".join([b"x" * 100] * 5000))
    reader = broker.start("read", topic, *form, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stderr is not None
    reader.stdout.readline()
    reader.stdout.close()
    assert reader.stderr.read() == b""
    assert reader.wait(30) == 141
    reader.stderr.close()


def test_interactive_input_is_sent_line_by_line_and_ctrl_c_needs_no_key(broker: Broker, topic: str) -> None:
    """On a terminal, every line is acknowledged before the next is typed."""
    here, there = pty.openpty()
    writer = broker.start(
        "publish", topic, "--json", stdin=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.close(there)
    assert writer.stdout is not None
    for offset, line in enumerate([b"typed\n", b"again\n"]):
        os.write(here, line)
        assert json.loads(writer.stdout.readline())["offset"] == offset
    writer.send_signal(signal.SIGINT)
    _, err = writer.communicate(timeout=30)
    assert (writer.returncode, err) == (130, b"")
    os.close(here)


def on_terminal(broker: Broker, *arguments: str, stdin: bytes | None = None, **env: str) -> tuple[int, str]:
    """Run a command whose output is a terminal; exit status and all that it shows."""
    here, there = pty.openpty()
    pipes = {"stdin": subprocess.PIPE if stdin is not None else there}
    command = broker.start(*arguments, env={"TERM": "xterm", **env}, stdout=there, stderr=there, **pipes)
    os.close(there)
    if stdin is not None and command.stdin is not None:
        command.stdin.write(stdin)
        command.stdin.close()
    shown = b""
    while select.select([here], [], [], 30)[0]:
        try:
            chunk = os.read(here, 65_536)
        except OSError:
            break  # The other side is closed: the command has ended.
        shown += chunk
    os.close(here)
    return command.wait(30), shown.decode("utf-8")


def test_terminal_gets_colour_tables_and_a_count(broker: Broker, topic: str) -> None:
    status, shown = on_terminal(broker, "publish", topic, "value \x1b]0;title\x07")
    assert status == 0
    assert "partition" in shown
    assert "append_time" in shown
    status, shown = on_terminal(broker, "read", topic, NO_COLOR="")
    assert status == 0
    assert "\x1b[" in shown
    assert "value \\x1b]0;title\\x07" in shown
    assert "\x1b]0;title" not in shown
    status, shown = on_terminal(broker, "publish", topic, stdin=b"1\n2\n3\n")
    assert status == 0
    assert "3 messages acknowledged" in shown


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_plain_text_on_a_terminal_that_wants_it(
    broker: Broker, topic: str, variable: tuple[str, str]
) -> None:
    broker.rows("publish", topic, "value")
    status, shown = on_terminal(broker, "read", topic, **{variable[0]: variable[1]})
    assert (status, shown.split("\t")[-1]) == (0, "value\r\n")
    assert "\x1b" not in shown


def test_embedded_url_works_on_a_folder(broker: Broker, tmp_path: object) -> None:
    url = f"embedded:{tmp_path}/data"
    broker.rows("topic", "create", "t", "--url", url)
    broker.rows("publish", "t", "a", "--url", url)
    assert values(broker.rows("read", "t", "--url", url)) == ["a"]
