"""A process with a client of its own on a data folder; it does what it is told, one line after the other.

As a program (`python -m tests.e2e.folder_client URL`) it says `ready`, then answers each line that it reads:
`publish TEXT` with the offset, `read` with all values, `fork` with the id of a child that only stays there,
`close` by ending well. An error is answered with `error CODE: message`.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0
TOPIC = "t"


class FolderClient:
    """The process, for a test. Use it as a context manager: it is always ended."""

    def __init__(self, url: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
        environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.folder_client", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.pid = self._process.pid
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def ready(self) -> Self:
        """Wait until its client is open."""
        assert self.answer() == "ready"
        return self

    def ask(self, line: str) -> str:
        """Tell it something, and wait for what it says."""
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        """Tell it something, and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def values(self) -> list[str]:
        """What is in the topic, as it sees it."""
        found: list[str] = json.loads(self.ask("read"))
        return found

    def close(self) -> None:
        """Let it end well."""
        assert self.ask("close") == "closed"
        assert self._process.wait(ANSWER_S) == 0

    def kill(self) -> None:
        """SIGKILL; harmless when it has ended."""
        self._process.kill()
        self._process.wait(ANSWER_S)

    def answer(self) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        give_up_s = time.monotonic() + ANSWER_S
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._process.stdout], [], [], give_up_s - time.monotonic())
            assert readable, "it did not answer in time"
            part = os.read(self._process.stdout.fileno(), 65536)
            assert part, f"it ended with {self._process.wait(ANSWER_S)}"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


def holder_of(folder: Path) -> int:
    """The process that works in a data folder."""
    return int((folder / "topics" / "LOCK").read_text().split()[1])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _fork() -> int:
    """A child that stays until it is killed, and knows nothing of this."""
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


async def _answer(client: Any, line: str) -> str:
    verb, _, text = line.partition(" ")
    if verb == "publish":
        async with client.producer(TOPIC) as producer:
            return str((await producer.publish(text.encode())).offset)
    if verb == "fork":
        return str(_fork())
    async with client.reader(TOPIC, start="earliest", stop_at_end=True) as reader:
        return json.dumps([message.value.decode() async for message in reader])


async def _work(url: str) -> None:
    import tailrace
    from tailrace.errors import TailraceError

    async with tailrace.connect(url) as client:
        await client.admin().create_topic(TOPIC, partitions=1, if_missing=True)
        _say("ready")
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if line == "close":
                break
            try:
                _say(await _answer(client, line))
            except TailraceError as error:
                _say(f"error {error.code}: {error.message}")
    _say("closed")


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1]))
