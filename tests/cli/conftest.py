"""A real broker in a process of its own, and the command line run against it in another."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from tailrace.cli.app import app

SRC = str(Path(__file__).parents[2] / "src")
RUN = [sys.executable, "-c", "from tailrace.cli.app import main; main()"]


class Done(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


def environment(**more: str) -> dict[str, str]:
    """A clean environment: nothing of the developer's shell steers the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return {**kept, "PYTHONPATH": SRC, "PYTHONWARNINGS": "error", **more}


def run(*arguments: str, stdin: bytes = b"", **env: str) -> Done:
    """Run a command line to its end."""
    done = subprocess.run(
        [*RUN, *arguments], input=stdin, capture_output=True, timeout=60, env=environment(**env)
    )
    return Done(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


def invoke(*arguments: str, stdin: bytes = b"", **env: str) -> Done:
    """Run a command line inside this process, which is quicker. It must read its input to the end."""
    cleared = {name: None for name in os.environ if name.startswith("TAILRACE_")}
    with tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        usual = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            result = CliRunner().invoke(app, list(arguments), env={**cleared, **env})
        finally:
            os.dup2(usual, 0)
            os.close(usual)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return Done(result.exit_code, result.stdout, result.stderr)


class Broker:
    """`tailrace serve` on ports of the system's choice."""

    def __init__(self, data: Path, *flags: str) -> None:
        self.data = data
        command = [*RUN, "serve", "--json", "--data", str(data), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, "--http-listen", "127.0.0.1:0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the broker did not start: {self.stop()}")
        self.ready: dict[str, Any] = json.loads(line)
        self.url = f"tailrace://{self.ready['listen']}"

    def run(self, *arguments: str, stdin: bytes = b"") -> Done:
        """Run a command line against this broker, inside this process."""
        return invoke(*arguments, stdin=stdin, TAILRACE_URL=self.url)

    def rows(self, *arguments: str, stdin: bytes = b"") -> list[dict[str, Any]]:
        """The JSON lines of a command that must succeed."""
        done = self.run(*arguments, "--json", stdin=stdin)
        assert done.status == 0, done.err
        return done.rows

    def letters(self, topic: str, count: int) -> list[dict[str, Any]]:
        """The dead letters of a topic, as soon as there are so many: they are written after the rejection."""
        for _ in range(200):
            found = self.rows("dlq", "list", topic)
            if len(found) >= count:
                return found
        pytest.fail(f"{topic} has {found}, not {count} dead letters")

    def start(self, *arguments: str, env: Mapping[str, str] = {}, **pipes: Any) -> subprocess.Popen[bytes]:
        """Start a command line and leave it running."""
        command = [*RUN, *arguments]
        return subprocess.Popen(command, env=environment(TAILRACE_URL=self.url, **env), **pipes)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it with a signal; exit status and what it wrote to standard error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            _, err = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, err = self.process.communicate()
            pytest.fail(f"the broker did not end within 30 s: {err.decode('utf-8')}")
        return self.process.returncode, err.decode("utf-8")

    def __enter__(self) -> "Broker":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is left running, whatever became of the test."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for the tests of a file; each test uses topics of its own."""
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running
        status, err = running.stop()
        assert status == 0, err
