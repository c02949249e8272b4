"""A real `tailrace serve` in a process of its own: started, killed, started again, and always ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SRC = str(Path(__file__).parents[2] / "src")
READY_S = 30.0
STOP_S = 30.0


class NotReady(Exception):
    """The broker ended, or said nothing, instead of getting ready; the text is what it wrote."""


def inject(*rules: str, paths: Sequence[str] = ()) -> list[str]:
    """A strace prefix that injects faults (`fdatasync:error=EIO:when=3`), if wanted into some paths only."""
    calls = ",".join(dict.fromkeys(rule.partition(":")[0] for rule in rules))
    prefix = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"]
    for rule in rules:
        prefix += ["-e", f"inject={rule}"]
    for path in paths:
        prefix += ["-P", path]
    return prefix


class BrokerProcess:
    """One data folder and, most of the time, one broker process on it. Use it as a context manager.

    The first start picks free ports; later starts use the same ones, so that clients find it again.
    """

    def __init__(self, data: Path, *flags: str, **settings: int | str) -> None:
        self.data = data
        self.log = data.with_name(data.name + ".log")
        self.listen = self.http_listen = "127.0.0.1:0"
        self.pid = 0
        self.urls: list[str] = []
        """All that it listens on, as clients write it."""
        self._flags = flags
        self._settings = {f"TAILRACE_{name.upper()}": str(value) for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What a client connects to."""
        return self.urls[0] if self.urls else f"tailrace://{self.listen}"

    @property
    def address(self) -> tuple[str, int]:
        """The native port."""
        host, _, port = self.listen.rpartition(":")
        return host, int(port)

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def start(self, prefix: Sequence[str] = ()) -> Self:
        """Start and wait until it is ready; `prefix` goes before the command (see `inject`)."""
        self.launch(prefix)
        ready = self._ready_line()
        self.listen, self.http_listen, self.pid = ready["listen"], ready["http_listen"], ready["pid"]
        self.urls = ready["urls"]
        return self

    def launch(self, prefix: Sequence[str] = ()) -> None:
        """Start without waiting."""
        assert not self.running, "it runs already"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
        command = [sys.executable, "-m", "tailrace.cli", "serve", "--json", "--data", str(self.data)]
        addresses = ["--listen", self.listen, "--http-listen", self.http_listen]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*prefix, *command, *addresses, *self._flags],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**kept, **self._settings, "PYTHONPATH": SRC},
                start_new_session=True,
            )

    def _ready_line(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + READY_S
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self.kill()
                raise NotReady(f"not ready within {READY_S:.0f} s: {self.words()}")
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                self.wait()
                raise NotReady(self.words())
            line += piece
        ready: dict[str, Any] = json.loads(line)
        return ready

    def words(self) -> str:
        """The end of what it wrote to standard error, by all processes on this folder."""
        return self.log.read_text(errors="replace")[-4000:]

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for its end; the exit status."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the broker itself (not to strace before it)."""
        os.kill(self.pid, number)

    def stop(self) -> int:
        """SIGTERM, and wait; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash; harmless when it has ended."""
        if self._process is None:
            return
        if self._process.poll() is None:
            # Its session is its own, so that a strace and what it traces end together.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def restart(self, prefix: Sequence[str] = ()) -> Self:
        """SIGKILL and start again on the same ports."""
        self.kill()
        return self.start(prefix)

    def anonymous_mb(self) -> float:
        """RssAnon of the broker in MB."""
        with open(f"/proc/{self.pid}/status") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024 / 1e6
        raise AssertionError("no RssAnon")

    def open_files(self) -> int:
        """Open descriptors of the broker."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if error is not None:
            error.add_note(f"the broker's last words:\n{self.words()}")


def eventually(check: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait, bounded, until something of another process is so."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        select.select([], [], [], 0.02)
