"""`tailrace worker` against a real broker: the handlers of a module, until a signal says stop.

Covers `cli/commands/worker.py`.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import EDGES
from tests.cli.conftest import Broker, environment, invoke

APP = """
import msgspec
from tailrace.bus import Bus, Message

bus = Bus("NAME", exclusive=False)
blocking = __import__("tailrace.sync").sync.Bus("NAME-b", exclusive=False)
other = 7


@bus.command(key="text")
class Shout(msgspec.Struct):
    text: str


@bus.handler(Shout)
async def shout(message: Message[Shout]) -> None:
    print(message.data.text.upper(), flush=True)


@blocking.command()
class Whisper(msgspec.Struct):
    text: str


@blocking.handler(Whisper)
def whisper(message: Message[Whisper]) -> None:
    print(message.data.text.lower(), flush=True)
"""
SEND = """
import asyncio, sys, tailrace
from app import Shout, bus

async def main():
    async with tailrace.connect() as client, bus.attach(client):
        for text in sys.argv[1:]:
            await bus.send(Shout(text))

asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with an application."""
    (tmp_path / "app.py").write_text(APP.replace("NAME", request.node.name[:60].replace("[", "-").strip("]")))
    (tmp_path / "send.py").write_text(SEND)
    (tmp_path / "broken.py").write_text("import something_that_is_not_installed\n")
    return tmp_path


def lines_of(process: subprocess.Popen[bytes], count: int) -> list[str]:
    """The next lines that it prints; nothing may stay in a buffer where `select` does not see it."""
    assert process.stdout is not None
    printed = b""
    while printed.count(b"\n") < count:
        assert select.select([process.stdout], [], [], 30)[0], printed
        printed += os.read(process.stdout.fileno(), 65_536)
    return printed.decode().splitlines()


def send(broker: Broker, folder: Path, *texts: str) -> None:
    env = environment(TAILRACE_URL=broker.url)
    subprocess.run([sys.executable, "send.py", *texts], cwd=folder, env=env, check=True, timeout=30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_handles_what_comes_and_ends_in_order(
    broker: Broker, folder: Path, number: signal.Signals
) -> None:
    worker = broker.start(
        *("worker", "app:bus", "--concurrency", "2"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    send(broker, folder, "one", "two")
    assert sorted(lines_of(worker, 2)) == ["ONE", "TWO"]
    worker.send_signal(number)
    out, err = worker.communicate(timeout=30)
    assert (worker.returncode, out) == (0, b"")
    assert err.splitlines()[-1] == b"stopped: nothing is left under way"
    assert b"2 at a time" in err


def test_a_blocking_bus_works_as_well(broker: Broker, folder: Path) -> None:
    worker = broker.start(
        "worker", "app:blocking", cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    script = (
        "import app, tailrace.sync\n"
        "with tailrace.sync.connect() as client, app.blocking.attach(client):\n"
        "    app.blocking.send(app.Whisper('HUSH'))\n"
    )
    env = environment(TAILRACE_URL=broker.url)
    subprocess.run([sys.executable, "-c", script], cwd=folder, env=env, check=True, timeout=30)
    assert lines_of(worker, 1) == ["hush"]
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=30)
    assert worker.returncode == 0


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("app", "write it as MODULE:BUS"),
        (":bus", "write it as MODULE:BUS"),
        (".app:bus", "write it as MODULE:BUS"),
        ("app.:bus", "write it as MODULE:BUS"),
        ("nothing:bus", "'nothing': there is no such module here"),
        ("app.sub:bus", "there is no such module here"),
        ("app:missing", "there is no 'missing'"),
        ("app:other.missing", "there is no 'missing'"),
        ("app:other", "is not a Bus but int"),
    ],
)
def test_what_is_no_bus(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, told: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    done = invoke("worker", target)
    assert done.status == EDGES["invalid_request"].exit
    assert told in done.err
    sys.modules.pop("app", None)


def test_a_module_that_breaks_shows_why(broker: Broker, folder: Path) -> None:
    worker = broker.start("worker", "broken:bus", cwd=folder, stderr=subprocess.PIPE)
    _, err = worker.communicate(timeout=30)
    assert worker.returncode == 1
    assert b"No module named 'something_that_is_not_installed'" in err


def test_unknown_groups_and_no_broker(broker: Broker, folder: Path) -> None:
    wrong = broker.start("worker", "app:bus", "--group", "nobody", cwd=folder, stderr=subprocess.PIPE)
    _, err = wrong.communicate(timeout=30)
    assert wrong.returncode == EDGES["invalid_request"].exit, err
    assert b"nobody" in err
    env = environment(TAILRACE_URL="tailrace://127.0.0.1:1")
    command = [sys.executable, "-c", "from tailrace.cli.app import main; main()", "worker", "app:bus"]
    done = subprocess.run(
        [*command, "--timeout", "0.3"], cwd=folder, env=env, capture_output=True, timeout=30
    )
    assert done.returncode in (EDGES["unavailable"].exit, EDGES["timeout"].exit), done.stderr
    assert b"Traceback" not in done.stderr
