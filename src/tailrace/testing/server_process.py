"""A real broker for tests: `tailrace serve` as a process of its own, to be killed and started again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import tailrace
from tailrace.errors import Unavailable

READY_S = 60.0
STOP_S = 30.0
LOG_BYTES_SHOWN = 20_000


class ServerProcess:
    """A broker process. It starts when its address is first asked for; a restart keeps the address and the
    data."""

    def __init__(self, folder: Path | str, *flags: str, ready_s: float = READY_S) -> None:
        self.data = Path(folder) / "data"
        self._flags = flags
        self._ready_s = ready_s
        self._log_path = Path(folder) / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._listen = self._http_listen = "127.0.0.1:0"
        self._url = self._http_url = ""

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """What to connect to; `tailraces://` where the flags or the configuration name a certificate."""
        self.start()
        return self._url

    @property
    def http_url(self) -> str:
        """Health and metrics: `/readyz`, `/metrics`."""
        self.start()
        return self._http_url

    @property
    def pid(self) -> int:
        """The process."""
        return self.start().pid

    @property
    def log(self) -> str:
        """The end of what the server wrote to standard error, over all its restarts."""
        if not self._log_path.exists():
            return ""
        return self._log_path.read_bytes()[-LOG_BYTES_SHOWN:].decode("utf-8", "replace")

    def start(self) -> subprocess.Popen[bytes]:
        """Start it unless that was done before; returns when it takes requests. After `kill` or `stop`, use
        `restart`."""
        if self._process is None:
            self._process = self._spawn()
        return self._process

    def kill(self) -> None:
        """SIGKILL; harmless when it does not run."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM, as an operator stops it; waits and returns the exit status."""
        process = self.start()
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Unavailable(f"the server did not stop within {STOP_S:g} s:\n{self.log}") from None

    def restart(self) -> None:
        """Kill it if it runs, and start it on the same data and addresses."""
        self.kill()
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tailrace.cli", "serve", "--json", "--data", str(self.data)]
        command += ["--listen", self._listen, "--http-listen", self._http_listen, *self._flags]
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=_environment()
            )
        try:
            ready = self._await_ready(process)
        except BaseException:
            process.kill()
            process.wait(STOP_S)
            raise
        self._listen, self._http_listen = ready["listen"], ready["http_listen"]
        self._url = ready["urls"][0]
        self._http_url = f"http{'s' if self._url.startswith('tailraces:') else ''}://{self._http_listen}"
        return process

    def _await_ready(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The first line on standard output; it says where the server listens."""
        assert process.stdout is not None
        give_up_s = time.monotonic() + self._ready_s
        line = b""
        with process.stdout as pipe:
            while not line.endswith(b"\n"):
                left_s = give_up_s - time.monotonic()
                readable, _, _ = select.select([pipe], [], [], max(0.0, left_s))
                if not readable:
                    raise Unavailable(f"the server was not ready within {self._ready_s:g} s:\n{self.log}")
                part = os.read(pipe.fileno(), 65536)
                if not part:
                    raise Unavailable(
                        f"the server did not start (status {process.wait(STOP_S)}):\n{self.log}"
                    )
                line += part
        ready: dict[str, Any] = msgspec.json.decode(line)
        return ready


def _environment() -> dict[str, str]:
    """Nothing of the caller's TAILRACE_* steers the server; it runs the same Tailrace as the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    source = str(Path(tailrace.__file__).parents[1])
    others = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = source if not others else f"{source}{os.pathsep}{others}"
    return kept
