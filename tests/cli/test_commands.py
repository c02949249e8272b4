"""Topics, serve, log files, help, completion and the way every command ends.

Covers `cli/app.py`, `cli/broker_wait.py`, `cli/execution.py`, `cli/parameters.py`, `cli/commands/about.py`,
`cli/commands/log.py`, `cli/commands/serve.py` and `cli/commands/topic.py`.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from tailrace.cli.app import app
from tailrace.errors import EDGES
from tailrace.testing import ServerProcess
from tests.cli.conftest import RUN, Broker, environment, invoke, run

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
ENTRY = PROJECT["project"]["scripts"]["tailrace"]
HEAVY = (
    "pyarrow",
    "numpy",
    "uvloop",
    "asyncio",
    "prometheus_client",
    "tailrace.client",
    "tailrace.broker",
    "tailrace.core",
)


# ------------------------------------------------------------------------------------------------- topics


def test_life_of_a_topic(broker: Broker) -> None:
    (created,) = broker.rows("topic", "create", "orders/eu", "--partitions", "2", "-o", "retention-ms=60000")
    assert (created["topic"], created["options"]["partitions"]) == ("orders/eu", 2)
    assert created["options"]["retention_ms"] == 60_000
    assert broker.run("topic", "create", "orders/eu").status == EDGES["already_exists"].exit
    (same,) = broker.rows("topic", "create", "orders/eu", "--if-missing")
    assert same["id"] == created["id"]
    assert [row["topic"] for row in broker.rows("topic", "list", "orders/")] == ["orders/eu"]
    assert broker.rows("topic", "list", "nothing-like-it") == []
    (altered,) = broker.rows("topic", "alter", "orders/eu", "--partitions", "3", "-o", "retention_ms=null")
    assert (altered["options"]["partitions"], altered["options"]["retention_ms"]) == (3, None)
    assert [row["partition"] for row in altered["partitions"]] == [0, 1, 2]
    assert broker.rows("topic", "delete", "orders/eu", "--yes") == [{"deleted": "orders/eu"}]
    assert broker.run("topic", "describe", "orders/eu").status == EDGES["not_found"].exit


def test_every_problem_of_a_creation_is_told(broker: Broker) -> None:
    done = broker.run("topic", "create", "bad name", "-o", "partitons=1", "-o", "durability=never", "--json")
    assert done.status == EDGES["invalid_request"].exit
    assert len(json.loads(done.err)["details"]["problems"]) == 3


def test_list_and_describe_for_people(broker: Broker) -> None:
    broker.rows("topic", "create", "people", "--partitions", "1", "-o", "retention_count=5")
    listed = broker.run("topic", "list", "people").out.splitlines()
    assert listed[0].split() == ["TOPIC", "PARTITIONS", "DURABILITY", "STORAGE", "RETENTION"]
    assert listed[1].split() == ["people", "1", "fsync", "file", "count=5"]
    described = broker.run("topic", "describe", "people").out
    pairs = [line.split() for line in described.splitlines()]
    assert ["retention_count", "5"] in pairs
    assert ["retention_ms", "-"] in pairs
    assert described.splitlines()[-1].split() == ["0", "0", "0", "0", "0", "-"]


def test_trim_by_offset_and_by_time(broker: Broker) -> None:
    broker.rows("topic", "create", "trimmed", "--partitions", "1")
    lines = [json.dumps({"value": str(n), "timestamp": f"2026-01-0{n + 1}T00:00:00Z"}) for n in range(6)]
    broker.rows("publish", "trimmed", "--jsonl", stdin="\n".join(lines).encode())
    (topic,) = broker.rows("topic", "trim", "trimmed", "--partition", "0", "--to-offset", "2")
    assert topic["partitions"][0]["start_offset"] == 2
    (topic,) = broker.rows("topic", "trim", "trimmed", "--to-time", "2026-01-05")
    assert topic["partitions"][0]["start_offset"] == 4
    assert [row["value"] for row in broker.rows("read", "trimmed")] == ["4", "5"]
    for wrong in (
        [],
        ["--to-offset", "1"],
        ["--to-offset", "1", "--to-time", "-1h"],
        ["--to-time", "-1h", "--partition", "7"],
    ):
        assert broker.run("topic", "trim", "trimmed", *wrong).status == 2, wrong


def test_delete_asks_and_needs_somebody_to_ask(broker: Broker) -> None:
    broker.rows("topic", "create", "kept")
    done = broker.run("topic", "delete", "kept")
    assert done.status == 2
    assert "--yes" in done.err
    here, there = os.openpty()
    asked = broker.start(
        "topic", "delete", "kept", stdin=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.close(there)
    os.write(here, b"n\n")
    _, err = asked.communicate(timeout=30)
    os.close(here)
    assert asked.returncode == 1
    assert b"Delete topic kept with 0 messages?" in err
    assert broker.run("topic", "describe", "kept").status == 0


def test_options_with_the_names_of_parameters_are_refused(broker: Broker) -> None:
    for name in ("timeout", "name", "if-missing"):
        assert broker.run("topic", "create", "x", "-o", f"{name}=1").status == 2
    assert broker.run("topic", "alter", "x").status == 2


# -------------------------------------------------------------------------------------------------- serve


def page(broker: Broker, path: str) -> bytes:
    """A page of the HTTP listener, head and body."""
    host, _, port = broker.ready["http_listen"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_ready_line_names_real_addresses(broker: Broker) -> None:
    assert broker.ready["event"] == "ready"
    assert broker.ready["pid"] == broker.process.pid
    answer = page(broker, "/metrics")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"tailrace_connections" in answer


def test_what_a_broker_with_users_prints_next_works_as_it_stands(tmp_path: Path) -> None:
    data = str(tmp_path / "a folder")
    added = run("user", "add", "anna", "--generate", "--url", f"embedded:{data}")
    assert added.status == 0, added.err
    places = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    with subprocess.Popen(
        [*RUN, "serve", "--data", data, *places], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(6)]
            assert lines[2].startswith("next, in another terminal, as the user who runs the broker")
            for line in lines[3:]:
                done = run(*shlex.split(line)[1:])
                assert done.status == 0, (line, done.err)
        finally:
            process.kill()


def test_taken_ports_name_the_flag(broker: Broker, tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "d"))
    native, http = broker.ready["listen"], broker.ready["http_listen"]
    taken = run("serve", *data, "--listen", native, "--http-listen", "127.0.0.1:0")
    assert taken.status == EDGES["unavailable"].exit
    assert f"{native} is taken" in taken.err
    assert "hint: choose another address with --listen" in taken.err
    taken = run("serve", *data, "--listen", "127.0.0.1:0", "--http-listen", http, "--json")
    assert taken.status == EDGES["unavailable"].exit
    assert json.loads(taken.err)["details"] == {"address": http, "option": "--http-listen"}


def test_second_broker_on_the_same_folder_is_refused(broker: Broker) -> None:
    ports = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    done = run("serve", "--data", str(broker.data), *ports)
    assert done.status == EDGES["unavailable"].exit
    assert f"pid {broker.process.pid}" in done.err
    assert "choose another folder" in done.err


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = run(
        "serve", "--data", str(tmp_path / "file"), "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"
    )
    assert done.status == EDGES["storage_fault"].exit
    assert "Traceback" not in done.err
    assert "--data" in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_gracefully_and_data_stays(tmp_path: Path, number: int) -> None:
    with Broker(tmp_path / "data") as first:
        first.rows("topic", "create", "t", "--partitions", "1")
        first.rows("publish", "t", "kept")
        status, err = first.stop(number)
        assert status == 0, err
    with Broker(tmp_path / "data") as second:
        assert [row["value"] for row in second.rows("read", "t")] == ["kept"]
        assert second.stop()[0] == 0


def test_check_config_prints_what_is_in_force(tmp_path: Path) -> None:
    path = tmp_path / "tailrace.toml"
    path.write_text('log_level = "debug"\n[limits]\nidle_ms = 5000\n')
    done = invoke("serve", "--check-config", "--config", str(path), "--listen", "127.0.0.1:1")
    assert done.status == 0
    assert 'listen = "127.0.0.1:1"\n' in done.out
    assert "idle_ms = 5000\n" in done.out
    again = tmp_path / "again.toml"
    again.write_text(done.out)
    assert invoke("serve", "--check-config", "--config", str(again)).out == done.out
    (record,) = invoke("serve", "--check-config", "--config", str(path), "--json").rows
    assert record["limits"]["idle_ms"] == 5000


def test_check_config_lists_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "tailrace.toml"
    path.write_text("log_levl = 1\n[limits]\nidle_ms = 1\n")
    done = invoke("serve", "--check-config", "--config", str(path), "--listen", "0.0.0.0:1")
    assert done.status == 2
    assert done.err.count("\n  - ") == 3
    assert f"{path}:1 log_levl: unknown option, did you mean log_level?" in done.err


# ---------------------------------------------------------------------------------------------- log files


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A data folder with two messages, written and closed."""
    url = f"embedded:{tmp_path}/data"
    for command in (("topic", "create", "t", "--partitions", "1"), ("publish", "t", "one", "two")):
        assert invoke(*command, "--url", url).status == 0
    return tmp_path / "data"


def test_inspect_lists_files(stored: Path) -> None:
    rows = invoke("log", "inspect", str(stored), "--json").rows
    segment = next(row for row in rows if row["kind"] == "segment")
    assert segment["log"].endswith("t~1/0")
    assert (segment["base_offset"], segment["end_offset"], segment["problem"]) == (0, 2, "")
    assert segment["last_append"].endswith("Z")
    plain = invoke("log", "inspect", str(stored / "topics" / "t~1" / "0")).out
    assert plain.startswith("t~1/0\nFILE")
    assert "0-2" in plain


def test_verify_tells_good_from_damaged(stored: Path) -> None:
    done = invoke("log", "verify", str(stored))
    assert (done.status, done.out) == (0, "1 logs checked, all messages are well\n")
    segment = next((stored / "topics").rglob("*.log"))
    content = bytearray(segment.read_bytes())
    place = content.index(b"one")
    content[place] ^= 1
    segment.write_bytes(content)
    damaged = invoke("log", "verify", str(stored), "--json")
    assert damaged.status == EDGES["corrupt"].exit
    (row,) = damaged.rows
    assert [problem["fatal"] for problem in row["problems"]][:1] == [True]
    assert json.loads(damaged.err)["error"] == "corrupt"


def test_damage_is_shown_everywhere_and_nothing_is_cut(stored: Path) -> None:
    """What docs/operations.md says about a quarantined partition."""
    invoke("publish", "t", "three", "--url", f"embedded:{stored}")
    segment = next((stored / "topics").rglob("*.log"))
    content = bytearray(segment.read_bytes())
    content[content.index(b"three")] ^= 1
    segment.write_bytes(content)
    for snapshot in stored.rglob("*.snap"):
        snapshot.unlink()  # Else the frame is not replayed, and damage shows only when it is read.
    with Broker(stored) as broker:
        assert page(broker, "/readyz").startswith(b"HTTP/1.1 503")
        assert b"t/0" in page(broker, "/readyz")
        assert b'quarantined{partition="0",topic="t"} 1.0' in page(broker, "/metrics")
        (topic,) = broker.rows("topic", "describe", "t")
        assert topic["partitions"][0]["fault"]
        assert broker.run("publish", "t", "four").status == EDGES["corrupt"].exit
        readable = broker.run("read", "t", "--json")
        assert [row["value"] for row in readable.rows] == ["one", "two"]
        assert readable.status == EDGES["corrupt"].exit, "what lies behind them is not missed in silence"
        status, err = broker.stop()
        assert status == 0, err
    assert len(segment.read_bytes()) == len(content)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_folders_without_logs(tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert invoke("log", command, str(path)).status == EDGES["not_found"].exit


# -------------------------------------------------------------------------------------- help and the ends


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["topic", "--help"],
        ["publish", "-h"],
        ["version"],
        ["completion", "show", "--shell", "bash"],
    ],
)
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    program = f"""
import sys
sys.argv = ["tailrace", *{arguments!r}]
from tailrace.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert done.stdout


def test_every_command_takes_json_and_has_help() -> None:
    commands = [
        *(("topic", name) for name in ("create", "list", "describe", "alter", "trim", "delete")),
        *(("log", name) for name in ("inspect", "verify")),
        *(("completion", name) for name in ("install", "show")),
        ("serve",),
        ("publish",),
        ("read",),
        ("version",),
    ]
    for command in commands:
        page = invoke(*command, "--help").out
        assert "--json" in page, command
        if command[0] in ("topic", "publish", "read"):
            assert "--url" in page, command
            assert "--timeout" in page, command


def test_misuse_is_told_in_words_and_as_json() -> None:
    done = invoke("topic", "craete", "x")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert "create" in done.err
    assert "hint: `tailrace topic --help`" in done.err
    as_json = invoke("publish", "--json")
    assert json.loads(as_json.err)["error"] == "invalid_request"
    assert invoke("topic").err.startswith("Usage: tailrace topic")
    assert invoke("read", "t", "--from", "someday").status == 2


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def _talkative(command: TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The commands that have --url, by their words."""
    for name, child in command.commands.items():
        if isinstance(child, TyperGroup):
            yield from _talkative(child, (*path, name))
        elif any(parameter.name == "url" for parameter in child.params):
            yield (*path, name)


def test_nobody_listens() -> None:
    """Every command that talks to a broker says so at once, and can be told to wait."""
    port = _free_port()
    begun_s = time.monotonic()
    done = invoke("topic", "list", "--url", f"tailrace://127.0.0.1:{port}")
    assert time.monotonic() - begun_s < 10, "the default timeout is 30 s"
    assert done.status == EDGES["unavailable"].exit
    told, hint = done.err.splitlines()
    advice = f"start one with `tailrace serve --listen 127.0.0.1:{port}`"
    assert told == f"error: no broker at 127.0.0.1:{port}: nobody listens there; {advice}"
    assert "--wait SECONDS" in hint
    assert invoke("topic", "list", "--url", "http://x").status == 2
    commands = list(_talkative(get_command(app)))
    assert len(commands) >= 30
    assert {("worker",), ("pipeline", "run"), ("topic", "list"), ("consume",)} <= set(commands)
    for command in commands:
        assert "--wait SECONDS" in invoke(*command, "--help").out, command


def test_a_broker_is_waited_for(tmp_path: Path) -> None:
    port = _free_port()
    waiting = subprocess.Popen(
        [*RUN, "topic", "create", "late", "--url", f"tailrace://127.0.0.1:{port}", "--wait", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert waiting.stderr is not None
    assert b"no broker at" in waiting.stderr.readline()
    with ServerProcess(tmp_path, "--listen", f"127.0.0.1:{port}") as server:
        server.start()
        out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err
    assert b"late" in out
    assert f"connected to the broker at 127.0.0.1:{port}" in err.decode()


def test_a_pipeline_without_a_broker_starts_no_spark() -> None:
    url = f"tailrace://127.0.0.1:{_free_port()}"
    done = invoke("pipeline", "run", "compact", "--topic", "t", "-o", "table=/nowhere", "--url", url)
    assert done.status == EDGES["unavailable"].exit
    assert "error: no broker at" in done.err
    assert "Spark" not in done.err


@pytest.mark.parametrize(
    ("command", "as_json"),
    [
        (["version"], False),
        (["version", "--json"], True),
        (["--help"], False),
        (["publish", "--help"], False),
        (["serve", "--check-config"], False),
        (["completion", "show", "--shell", "bash"], False),
    ],
)
@pytest.mark.parametrize(
    ("redirection", "told"),
    [
        (">/dev/full", "standard output cannot be written: No space left on device"),
        (">&-", "standard output is closed"),
    ],
)
def test_output_that_cannot_be_written_is_told_in_one_line(
    command: list[str], as_json: bool, redirection: str, told: str
) -> None:
    done = redirected(redirection, *command)
    assert done.returncode == EDGES["error"].exit
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert (json.loads(lines[0])["message"] if as_json else lines[0].removeprefix("error: ")) == told


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_the_status_is_the_same_where_nobody_can_be_told(redirection: str, tmp_path: Path) -> None:
    url = f"embedded:{tmp_path}"
    assert redirected(redirection, "topic", "list", "--url", url).returncode == 0  # with a remark
    assert redirected(redirection, "topic", "describe", "t", "--url", url).returncode == 3
    assert redirected(redirection, "topic").returncode == 2


def test_a_closed_input_is_an_empty_one(tmp_path: Path) -> None:
    url = f"embedded:{tmp_path}"
    assert redirected("<&-", "topic", "create", "t", "--url", url).returncode == 0
    assert redirected("<&-", "publish", "t", "--url", url).returncode == 0
    done = redirected("<&-", "topic", "delete", "t", "--url", url)
    assert (done.returncode, done.stderr) == (
        2,
        "error: deleting a topic needs --yes when nobody can be asked\n",
    )


def redirected(redirection: str, *command: str) -> "subprocess.CompletedProcess[str]":
    """A command line run by a shell that redirects one of its files."""
    script = f'exec "$@" {redirection}'
    return subprocess.run(
        ["sh", "-c", script, "sh", *RUN, *command],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("topic trim T --partition 0 --to-offset 99", "--to-offset: 99 is beyond the end, 1"),
        ("group reset T T --to 99", "--to: partition 0 goes from 0 to 1, 99 is not in it"),
        ("consume T -g T --mode zz", "--mode: queue, exclusive, stream or broadcast, not 'zz'"),
        ("publish T v --ttl 0s", "--ttl: more than 0, not '0s'"),
        ("schedule put T T '* * * * *' v --ttl 0s", "--ttl: more than 0, not '0s'"),
        ("schedule put T T '* * * * *' v --ttl 9999w", "--ttl, in ms: 1 to 315360000000"),
        ("schedule put T T '* * * * *' v --zone Nowhere/X", "--zone: there is no time zone 'Nowhere/X'"),
    ],
)
def test_errors_name_the_options_that_were_given(broker: Broker, command: str, told: str) -> None:
    broker.rows("topic", "create", "named", "--partitions", "1", "--if-missing")
    broker.rows("group", "enlist", "named", "named", "--if-missing")
    if not broker.rows("read", "named"):
        broker.rows("publish", "named", "v")
    done = broker.run(*("named" if word == "T" else word for word in shlex.split(command)))
    assert done.status == EDGES["invalid_request"].exit
    assert done.err.startswith(f"error: {told}")


def test_groups_of_a_topic_that_is_not_there(broker: Broker) -> None:
    broker.rows("topic", "create", "lonely", "--partitions", "1", "--if-missing")
    assert broker.rows("group", "list", "--topic", "lonely") == []
    done = broker.run("group", "list", "--topic", "lonley")
    assert (done.status, done.out) == (EDGES["not_found"].exit, "")
    assert "there is no topic 'lonley'" in done.err


def test_the_commands_of_the_readme_work_in_its_order(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\.venv/bin/tailrace (.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    with Broker(tmp_path / "data") as broker:
        first = program.replace("tailrace://127.0.0.1:7400", broker.url)
        done = subprocess.run(
            [sys.executable, "-c", first], capture_output=True, env=environment(), timeout=60
        )
        assert (done.returncode, done.stdout) == (0, b"0 b'hello' attempt 1\n"), done.stderr
        for command in commands:
            status, out, err = broker.run(*shlex.split(command))
            assert status == 0, (command, err)
        assert out.endswith("\thello\n")


def test_errors_are_escaped() -> None:
    done = invoke("read", "t", "--from", "\x1b[31mred")
    assert "\x1b" not in done.err
    assert done.status == 2


def test_completion_knows_the_commands(tmp_path: Path) -> None:
    words = {"_TAILRACE_COMPLETE": "complete_bash", "COMP_WORDS": "tailrace topic c", "COMP_CWORD": "2"}
    done = subprocess.run(RUN, capture_output=True, text=True, env=environment(**words), timeout=60)
    assert done.stdout.split() == ["create"]
    assert "_TAILRACE_COMPLETE" in invoke("completion", "show", "--shell", "zsh").out
    assert invoke("completion", "show", "--shell", "tcsh").status == 2
    installed = run("completion", "install", "--shell", "bash", "--json", HOME=str(tmp_path))
    assert Path(installed.rows[0]["path"]).is_relative_to(tmp_path)


def test_version() -> None:
    assert invoke("version").out.startswith("tailrace ")
    assert set(invoke("version", "--json").rows[0]) == {"tailrace", "python"}


@pytest.mark.parametrize("module", ["typer", "tailrace.cli.app"])
def test_ctrl_c_while_a_command_is_being_loaded_ends_it_without_a_word(module: str) -> None:
    program = f"""
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
sys.argv = ["tailrace", "version"]
from importlib.metadata import EntryPoint
EntryPoint("tailrace", {ENTRY!r}, "console_scripts").load()()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_an_exit_status_once_a_command_runs() -> None:
    program = f"""
import os, signal
from importlib.metadata import EntryPoint
main = EntryPoint("tailrace", {ENTRY!r}, "console_scripts").load()
from tailrace.cli import app
app.main = lambda: os.kill(os.getpid(), signal.SIGINT)
try:
    main()
except KeyboardInterrupt:
    print("as usual")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "as usual\n", "")
