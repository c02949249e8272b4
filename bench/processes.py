"""Child processes of a benchmark: started, heard line by line, watched and always ended."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parent.parent
STOP_TIMEOUT_S = 20.0
READY_TIMEOUT_S = 60.0
ANON_SAMPLE_S = 0.05
SERVE_ADDRESSES = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")

Answer = TypeVar("Answer")


class BenchmarkFailed(Exception):
    """A figure could not be measured, or what was measured is not what was meant to be."""


class Child:
    """A Python process that answers with lines of JSON on its standard output."""

    def __init__(self, name: str, arguments: list[str], *, log: Path) -> None:
        self.name = name
        self._log = log
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with log.open("ab") as errors:
            self.spawned_at = time.perf_counter()
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        # A thread reads, so that a child which talks more than it is listened to never blocks on a full pipe.
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answer(self, kind: type[Answer], timeout_s: float) -> Answer:
        """The next line of the child, decoded."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise BenchmarkFailed(
                f"{self.name}: no answer within {timeout_s:.0f} s{self._last_words()}"
            ) from None
        if line is None:
            raise BenchmarkFailed(f"{self.name}: ended without an answer{self._last_words()}")
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise BenchmarkFailed(f"{self.name}: {line[:200]!r} is not {kind.__name__}: {error}") from error

    def tell(self, line: str) -> None:
        """Write one line to the child's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """End the process without warning, as a crash does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask the process to end; kill it when it does not."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace").strip()
        return f"; its last words:\n{text[-2000:]}" if text else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Broker(Child):
    """A real `tailrace serve` on a folder; `startup_s` is the time from its start to its ready line."""

    def __init__(self, data: Path, *, log: Path, flags: Sequence[str] = (), scheme: str = "tailrace") -> None:
        super().__init__(
            "broker",
            ["-m", "tailrace.cli", "serve", "--json", "--data", str(data), *SERVE_ADDRESSES, *flags],
            log=log,
        )
        self.data = data
        try:
            ready: dict[str, Any] = self.answer(dict, READY_TIMEOUT_S)
            self.startup_s = time.perf_counter() - self.spawned_at
            self.url = f"{scheme}://{ready['listen']}"
            self.metrics_url = f"http://{ready['http_listen']}/metrics"
        except BaseException:
            self.stop()
            raise

    def anon_mb(self) -> float:
        """Memory of its own (RssAnon): neither page cache nor mapped files."""
        return anonymous_mb(self.pid)

    def handed_out(self, topic: str) -> int:
        """Messages of a topic that were handed to consumers, those included that they gave back."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(
            rf'^tailrace_delivered_messages(?:_total)?{{topic="{topic}"}} (\S+)', text, re.MULTILINE
        )
        if found is None:
            raise BenchmarkFailed(f"the broker's metrics do not say what was delivered of {topic!r}")
        return int(float(found[1]))


def anonymous_mb(pid: int) -> float:
    """RssAnon of a process in MB."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024 / 1e6
    raise BenchmarkFailed(f"/proc/{pid}/status has no RssAnon")


class AnonymousPeak:
    """Watches RssAnon of a process while the block runs: `mb` is the greatest value, `first_mb` the first."""

    def __init__(self, pid: int) -> None:
        self.mb = self.first_mb = anonymous_mb(pid)
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(ANON_SAMPLE_S) and self._sample():
            pass

    def _sample(self) -> bool:
        try:
            self.mb = max(self.mb, anonymous_mb(self._pid))
        except (FileNotFoundError, ProcessLookupError, BenchmarkFailed):
            return False  # it has ended: whoever waits for its answer reports that
        return True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._sample()
