"""`tailrace worker` as a process: a signal drains it, a second one ends it, and a kill loses nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tests.e2e.broker_process import SRC, BrokerProcess, eventually

APPLICATION = '''
"""An application whose jobs wait while there is a file of the name `hold`."""

import asyncio
import os

import msgspec

from tailrace.bus import Bus

bus = Bus("shop")


@bus.command
class Job(msgspec.Struct):
    number: int


@bus.handler(Job)
async def work(message):
    note("begun", message)
    while os.path.exists("hold"):
        await asyncio.sleep(0.01)
    note("done", message)


def note(what, message):
    with open("notes", "a") as file:
        file.write(f"{what} {message.data.number} {os.getpid()}\\n")
'''

JOBS = 6
GROUP = "shop"
QUICK: dict[str, Any] = {"lease_ms": 1500, "session_ms": 1500, "heartbeat_ms": 400, "max_attempts": 1000}


class Shop:
    """The application's folder, the broker, and the notes of its workers."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        self.folder = folder
        self.broker = broker
        self.workers: list[subprocess.Popen[bytes]] = []
        (folder / "shop_application.py").write_text(APPLICATION)
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        async with tailrace.connect(self.broker.url) as client:
            await client.admin().create_topic("shop.commands", partitions=1)
            await client.groups().create(GROUP, "shop.commands", mode="exclusive", **QUICK)
            headers = [("tailrace-type", b"Job")]
            async with client.producer("shop.commands") as producer:
                for number in range(JOBS):
                    await producer.send(b'{"number":%d}' % number, headers=headers)

    @property
    def hold(self) -> Path:
        """While it is there, jobs wait."""
        return self.folder / "hold"

    def worker(self) -> subprocess.Popen[bytes]:
        """Start a worker."""
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.cli", "worker", "shop_application:bus"],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": SRC, "TAILRACE_URL": self.broker.url},
                stdout=log,
                stderr=log,
            )
        self.workers.append(process)
        return process

    def notes(self, what: str) -> list[tuple[int, int]]:
        """Job and process of each note of a kind."""
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(number), int(pid)) for kind, number, pid in map(str.split, lines) if kind == what]

    def jobs(self, what: str) -> list[int]:
        """The jobs of a kind of notes."""
        return [number for number, _ in self.notes(what)]

    def until_begun(self, count: int) -> None:
        """Wait until so many jobs were begun."""

        def so() -> bool:
            assert self.workers[-1].poll() is None, self.words()
            return len(self.notes("begun")) >= count

        eventually(so, f"{count} jobs are begun", 30)

    def state(self) -> tuple[int, int, int]:
        """Lag, messages in flight and failures of the group."""

        async def ask() -> tuple[int, int, int]:
            async with tailrace.connect(self.broker.url) as client:
                (row,) = (await client.groups().describe(GROUP)).partitions
                return row["lag"], row["in_flight"], row["failures"]

        return asyncio.run(ask())

    def words(self) -> str:
        """What the workers wrote."""
        log = self.folder / "worker.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""


@contextmanager
def shop(folder: Path) -> Iterator[Shop]:
    with BrokerProcess(folder / "data").start() as broker:
        found = Shop(folder, broker)
        try:
            yield found
        except BaseException as error:
            error.add_note(f"the workers' last words:\n{found.words()}")
            raise
        finally:
            for process in found.workers:
                process.kill()
                process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_lets_the_worker_finish_what_is_under_way(tmp_path: Path, number: signal.Signals) -> None:
    with shop(tmp_path) as it:
        it.hold.touch()
        first = it.worker()
        it.until_begun(1)
        first.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0.5)  # It waits for its job.
        it.hold.unlink()
        assert first.wait(20) == 0, it.words()
        assert it.jobs("begun") == it.jobs("done") == [0]
        # The job is settled; the others went back at once, without a failure.
        assert it.state() == (JOBS - 1, 0, 0)
        second = it.worker()
        eventually(lambda: it.state()[0] == 0, "the second worker does the rest", 30)
        second.send_signal(number)
        assert second.wait(20) == 0
        assert it.jobs("begun") == it.jobs("done") == list(range(JOBS))


@pytest.mark.parametrize("ending", ["two signals", "kill"])
def test_what_a_worker_leaves_behind_is_done_by_the_next(tmp_path: Path, ending: str) -> None:
    with shop(tmp_path) as it:
        it.hold.touch()
        first = it.worker()
        it.until_begun(1)
        if ending == "kill":
            first.kill()
            assert first.wait(20) == -signal.SIGKILL
        else:
            first.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                first.wait(0.5)
            first.terminate()
            assert first.wait(20) == 1, it.words()
        assert it.jobs("done") == []
        it.hold.unlink()
        second = it.worker()
        eventually(lambda: it.state()[0] == 0, "the second worker does everything", 30)
        second.terminate()
        assert second.wait(20) == 0, it.words()
        assert it.notes("begun")[0] == (0, first.pid)
        assert it.notes("done") == [(number, second.pid) for number in range(JOBS)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_workers_that_are_killed_again_and_again(tmp_path: Path) -> None:
    with shop(tmp_path) as it:
        it.hold.touch()
        for count in range(1, 9):
            process = it.worker()
            it.until_begun(count)
            process.send_signal(signal.SIGTERM if count % 2 else signal.SIGKILL)
            process.kill()
            process.wait()
        it.hold.unlink()
        last = it.worker()
        eventually(lambda: it.state()[0] == 0, "the last worker does everything", 60)
        last.terminate()
        assert last.wait(20) == 0, it.words()
        assert sorted(set(it.jobs("done"))) == list(range(JOBS))
