"""docs/tutorial.md walked through: its programs, and every one of its commands in order, on a real broker."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import invoke
from tests.e2e.broker_process import SRC, BrokerProcess, eventually

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
POST = "python post.py ada@example.org"
WORKER = "tailrace worker mailer:bus --concurrency 4"
ELSEWHERE = ["make run", ". .venv/bin/activate"]
SHORT = [f"-o{option}" for option in ("lease_ms=1000", "session_ms=1000", "heartbeat_ms=200")]
PATIENCE_S = 30.0


class Walk:
    """The folder of the reader, the broker, and the worker in the other terminal."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        self.folder = folder
        self.broker = broker
        self.env = {**os.environ, "PYTHONPATH": SRC, "TAILRACE_URL": broker.url}
        self.worker: subprocess.Popen[bytes] | None = None

    def do(self, command: str) -> str:
        """One command of the page; what it printed."""
        assert COMMANDS.pop(0) == command, "the page has other commands, or another order"
        words = shlex.split(command)
        if command == WORKER:
            arguments = [sys.executable, "-m", "tailrace.cli", *words[1:]]
            self.worker = subprocess.Popen(arguments, cwd=self.folder, env=self.env, stderr=subprocess.PIPE)
            assert self.worker.stderr is not None
            assert b"working on 'post'" in self.worker.stderr.readline()
        elif words[0] == "python":
            arguments = [sys.executable, *words[1:]]
            subprocess.run(arguments, cwd=self.folder, env=self.env, check=True, timeout=PATIENCE_S)
        else:
            assert words[0] == "tailrace"
            done = invoke(*words[1:], TAILRACE_URL=self.broker.url)
            assert done.status == 0, (command, done.err)
            return done.out
        return ""

    def ask(self, *words: str) -> str:
        """A command that is not on the page."""
        done = invoke(*words, TAILRACE_URL=self.broker.url)
        assert done.status == 0, (words, done.err)
        return done.out

    def sent(self) -> list[str]:
        """What the handler of the page wrote."""
        path = self.folder / "sent.txt"
        return path.read_text().splitlines() if path.exists() else []

    def stop(self) -> None:
        """Ctrl-C in the terminal of the worker."""
        if self.worker is not None:
            self.worker.terminate()
            self.worker.communicate(timeout=PATIENCE_S)


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    programs = [block for language, block in BLOCKS if language == "python"]
    for name, program in zip(("mailer.py", "post.py"), programs, strict=True):
        (folder / name).write_text(program)
    with BrokerProcess(tmp_path / "data").start() as broker:
        walk = Walk(folder, broker)
        try:
            yield walk
        finally:
            walk.stop()


def test_the_tutorial(walk: Walk) -> None:
    COMMANDS[:] = [line for line in COMMANDS if line not in ELSEWHERE]
    walk.do("tailrace topic create mail")
    walk.do("""tailrace publish mail '{"to": "ada", "text": "hello"}' --key ada""")
    assert '{"to": "ada", "text": "hello"}' in walk.do("tailrace read mail")
    assert "hello" in walk.do("tailrace consume mail --group senders --max 1")
    assert walk.do("tailrace consume mail --group senders --wait 1") == ""
    walk.do("tailrace consume mail --group archive --max 1 --exec 'cat >> archive.txt'")
    assert (walk.folder / "archive.txt").read_text() == '{"to": "ada", "text": "hello"}'
    assert [line.split()[0] for line in walk.do("tailrace group list").splitlines()[1:]] == [
        "archive",
        "senders",
    ]
    # The same worker with the same group, but nobody waits for half a minute.
    walk.ask("topic", "create", "post.commands")
    walk.ask("group", "enlist", "post", "post.commands", *SHORT)
    walk.do(WORKER)
    walk.do(f"{POST} one two three")
    ada = "ada@example.org: "
    three = [f"{ada}{text} (delivery 1)" for text in ("one", "two", "three")]
    eventually(lambda: walk.sent() == three, "three mails")
    walk.do(f"{POST} crash four")
    assert walk.worker is not None
    assert walk.worker.wait(PATIENCE_S) == -9
    walk.worker.communicate()
    assert walk.sent() == [*three, f"{ada}crash (delivery 1)"]
    walk.do(WORKER)
    eventually(lambda: len(walk.sent()) >= 6, "the mails after the crash")
    assert walk.sent()[4] == f"{ada}crash (delivery 2)"
    assert walk.sent()[5].startswith(f"{ada}four ")
    assert "post.commands" in walk.do("tailrace group describe post")
    trace = walk.do("tailrace trace post.commands --key ada@example.org")
    assert trace.count(" delivered ") >= 6
    walk.broker.kill()
    walk.broker.start()
    walk.do(f"{POST} five")
    eventually(lambda: any("five" in line for line in walk.sent()), "the mail after the restart")
    walk.do("python post.py nobody hello")
    eventually(lambda: len(walk.ask("dlq", "list", "post.commands").splitlines()) == 2, "a dead letter")
    assert "that is no address" in walk.do("tailrace dlq list post.commands")
    walk.stop()
    handler = (walk.folder / "mailer.py").read_text()
    (walk.folder / "mailer.py").write_text(handler.replace('"@" not in message.data.to', "False"))
    assert walk.do("tailrace dlq redrive post.commands --dry-run").startswith("1 would be sent back")
    assert walk.do("tailrace dlq redrive post.commands") == "1 sent back\n"
    COMMANDS.insert(0, WORKER)
    walk.do(WORKER)
    eventually(lambda: walk.sent()[-1] == "nobody: hello (delivery 1)", "the redriven mail")
    walk.do("""tailrace publish mail '{"to": "ada"}' --delay 10s""")
    assert '{"to": "ada"}' in walk.do("tailrace delayed list mail")
    made = walk.do(
        """tailrace schedule put nightly mail '0 3 * * *' '{"report": true}' --zone Europe/Lisbon"""
    )
    assert made.startswith("schedule nightly publishes next at ")
    assert "Europe/Lisbon" in walk.do("tailrace schedule list")
    assert COMMANDS == []
