"""Load for tests of groups with faults: consumer processes that note what they do, a publisher, and waiting.

As a program it is one consumer process: `python -m tests.e2e.group_workload CONFIG`, until SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

import tailrace
from tailrace.errors import LeaseLost, NotFound, TailraceError
from tests.history.group_history import (
    Finished,
    Got,
    GroupHistory,
    HistoryFile,
    Late,
    Moved,
    Outcome,
    Row,
    Spot,
    encode_row,
)
from tests.history.record import Sent, Value, decode_value, encode_value, now_ns

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
LOOK_S = 0.03
TIMEOUT_S = 20.0
TOPIC, GROUP = "t", "g"
SHORTEST_WORK = 0.5
"""Handlers take at least this part of `work_ms`."""
AHEAD_S = 5.0
"""The publisher is so much ahead of the members at most: a machine that is busy with something else must not
leave more to do at the end than a test has time for."""
LATE_S = 0.25
"""What comes later than this is noted."""


class MemberConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer process does."""

    url: str
    member: str
    history: str
    options: dict[str, Any]
    concurrency: int = 4
    work_ms: float = 0.0
    """How long a handler takes, about."""
    bad_key: str = ""
    """Messages of this key always fail."""
    stay_s: float | None = None
    """Leave and join again after such a time, about; None: stay until the end."""


async def watch(member: str, note: Callable[[Late], None]) -> None:
    """Note when this process could not go on as soon as it wanted to."""
    while True:
        due_ns = now_ns() + int(LOOK_S * 1e9)
        await asyncio.sleep(LOOK_S)
        if now_ns() - due_ns > LATE_S * 1e9:
            note(Late(member, due_ns, now_ns()))


# ------------------------------------------------------------------------------------ the consumer process


class GroupMember:
    """The work of one consumer process."""

    def __init__(self, config: MemberConfig) -> None:
        self._config = config
        self._file = os.open(config.history, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._rng = random.Random(config.member)
        self._stop = asyncio.Event()
        self._life = 0

    def note(self, row: Row) -> None:
        """At once: a kill must not lose it."""
        os.write(self._file, encode_row(row))

    async def run(self) -> None:
        """Consume until SIGTERM."""
        watching = asyncio.create_task(watch(self._config.member, self.note))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        async with tailrace.connect(self._config.url, timeout=TIMEOUT_S, wait=TIMEOUT_S) as client:
            while not self._stop.is_set():
                await self._live(client)
                if not self._stop.is_set():
                    await asyncio.sleep(self._rng.random() * 0.2)
        watching.cancel()

    async def _live(self, client: tailrace.Client) -> None:
        """One membership; each has a name of its own."""
        config = self._config
        self._life += 1
        member = config.member if config.stay_s is None else f"{config.member}.{self._life}"
        consumer = client.consumer(
            TOPIC,
            GROUP,
            member=member,
            on_assigned=lambda places: self._moved(member, "assigned", places),
            on_revoked=lambda places: self._moved(member, "revoked", places),
            **config.options,
        )
        async with consumer:
            running = asyncio.create_task(
                consumer.run(
                    lambda delivery: self._handle(member, delivery),
                    concurrency=config.concurrency,
                    settle=False,
                )
            )
            stopped = asyncio.create_task(self._stop.wait())
            stay_s = None if config.stay_s is None else config.stay_s * (0.2 + self._rng.random())
            await asyncio.wait((running, stopped), timeout=stay_s, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            consumer.stop()
            await running

    def _moved(self, member: str, change: Any, places: set[tuple[str, int]]) -> None:
        self.note(Moved(member, change, sorted(partition for _, partition in places), now_ns()))

    async def _handle(self, member: str, delivery: tailrace.Delivery) -> None:
        place = (member, delivery.partition, delivery.offset, delivery.lease)
        key = (delivery.key or b"").decode()
        value = decode_value(delivery.value)
        self.note(Got(*place, key, value, delivery.attempt, delivery.deliveries, now_ns()))
        if self._config.work_ms:
            await asyncio.sleep(self._config.work_ms / 1000 * (SHORTEST_WORK + self._rng.random()))
        bad = bool(key) and key == self._config.bad_key
        call_ns = now_ns()
        outcome: Outcome = "ok"
        try:
            if bad:
                await delivery.nack(error="this key is bad")
            else:
                await delivery.ack()
        except LeaseLost:
            outcome = "lost"
        except TailraceError as error:
            print(f"{place}: {error!r}", file=sys.stderr, flush=True)
            outcome = "unknown"
        self.note(Finished(*place, "nack" if bad else "ack", outcome, call_ns, now_ns()))


# ------------------------------------------------------------------------------------------- the test's side


class ConsumerProcess:
    """A consumer process as the test sees it."""

    def __init__(self, folder: Path, url: str, member: str, **fields: Any) -> None:
        self.member = member
        path = folder / f"{member}.history"
        self.config = MemberConfig(url=url, member=member, history=str(path), **fields)
        self.log = folder / f"{member}.log"
        self.history = HistoryFile(path)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.group_workload", msgspec.json.encode(self.config).decode()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                stdout=log,
                stderr=log,
            )

    def got(self) -> list[Got]:
        """What it has got so far."""
        return [row for row in self.history.rows() if isinstance(row, Got)]

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; harmless when it has ended."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """SIGTERM: it finishes what is under way and leaves. The exit status."""
        self.process.terminate()
        return self.process.wait(LIMIT_S)

    def words(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-2000:]


class Members:
    """The consumer processes of a test; whatever happens, they end with it."""

    def __init__(self, folder: Path, url: str, **fields: Any) -> None:
        self._folder = folder
        self._url = url
        self._fields = fields
        self.all: dict[str, ConsumerProcess] = {}
        self.late: list[Late] = []
        """When the process of the test was late."""

    def start(self, *names: str, **fields: Any) -> None:
        """Start some, without waiting for them."""
        for name in names:
            self.all[name] = ConsumerProcess(self._folder, self._url, name, **{**self._fields, **fields})

    def __getitem__(self, name: str) -> ConsumerProcess:
        return self.all[name]

    def rows(self) -> list[Row]:
        """The rows of all."""
        return [*self.late, *(row for process in self.all.values() for row in process.history.rows())]

    def settled(self) -> int:
        """How many messages they have settled, about: each is two rows."""
        return sum(len(process.history.rows()) for process in self.all.values()) // 2

    async def at_work(self, count: int, *names: str) -> None:
        """Wait until each of some (default: of all) has got so many more messages."""
        chosen = [self.all[name] for name in names or self.all]
        before = {process: len(process.got()) for process in chosen}

        async def so() -> bool:
            return all(len(process.got()) >= before[process] + count for process in chosen)

        await until(so, f"{count} more messages for each of {[process.member for process in chosen]}")

    async def stop_at_work(self, name: str) -> set[Spot]:
        """SIGSTOP one while it has messages in its hands: those that it surely has not settled."""
        victim = self.all[name]
        settles_ns = int(victim.config.work_ms * 1e6 * SHORTEST_WORK)
        held: set[Spot] = set()

        async def so() -> bool:
            nonlocal held
            victim.signal(signal.SIGSTOP)
            stopped_ns = now_ns()
            held = {row.spot for row in victim.got() if row.at_ns > stopped_ns - settles_ns}
            if not held:
                victim.signal(signal.SIGCONT)
            return bool(held)

        await until(so, f"{name} is at work")
        return held

    async def kill_at_work(self, name: str) -> tuple[int, set[Spot]]:
        """SIGKILL one while it has messages in its hands; the time, and those that it surely had not settled.

        It is stopped first, to look at its hands: to others that is the same death.
        """
        held = await self.stop_at_work(name)
        self.all[name].kill()
        return now_ns(), held

    async def end(self, *, but: tuple[str, ...] = ()) -> None:
        """End all gracefully; those that were not killed say that all was well."""
        for name, process in self.all.items():
            if name not in but:
                assert await asyncio.to_thread(process.end) == 0, process.words()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.all.values():
            process.kill()
            if error is not None:
                error.add_note(f"the last words of {process.member}:\n{process.words()}")


class Publisher:
    """Publishes messages with keys, steadily, until it is stopped; notes every result. It waits for members
    that cannot keep up."""

    def __init__(
        self, url: str, members: Members, *, keys: int = 40, rate: int = 400, name: str = "p"
    ) -> None:
        self._url = url
        self._members = members
        self._keys = keys
        self._rate = rate
        self._name = name
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.sends: list[Sent] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        self._watching = asyncio.create_task(watch("", self._members.late.append))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        assert self._watching is not None
        self._watching.cancel()
        if kind is not None:
            self._task.cancel()
        else:
            await self.end()

    async def end(self) -> None:
        """Publish no more, and wait for all results."""
        self._stop.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        rng = random.Random(self._name)
        waiting: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        begun_s, counter, most = loop.time(), 0, 0
        async with (
            tailrace.connect(self._url, timeout=LIMIT_S, wait=LIMIT_S) as client,
            client.producer(TOPIC, timeout=LIMIT_S) as producer,
        ):
            while not self._stop.is_set():
                # What a slow moment held back comes later: the rate is an average.
                wanted = (loop.time() - begun_s) * self._rate
                if wanted > most:
                    most = self._members.settled() + int(AHEAD_S * self._rate)
                while counter < min(wanted, most) and not self._stop.is_set():
                    value = Value(self._name, counter)
                    counter += 1
                    call_ns = now_ns()
                    key = f"k{rng.randrange(self._keys)}".encode()
                    receipt = await producer.send(encode_value(value), key=key)
                    waiting.add(asyncio.create_task(self._settle(receipt, value, call_ns)))
                waiting = {task for task in waiting if not task.done()}
                await asyncio.sleep(0.01)
            await asyncio.gather(*waiting)

    async def _settle(self, receipt: Awaitable[Any], value: Value, call_ns: int) -> None:
        result = await receipt
        self.sends.append(Sent(value, TOPIC, "ok", result.partition, result.offset, call_ns, now_ns()))


async def until(so: Callable[[], Awaitable[bool]], what: str, timeout_s: float = LIMIT_S) -> None:
    """Ask again and again: what other processes do cannot be waited for in any other way.

    The time is counted in looks: where there is little of the machine for the others, there is little for
    this process, too.
    """
    for _ in range(int(timeout_s / LOOK_S)):
        if await so():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


async def drained(client: tailrace.Client, timeout_s: float = LIMIT_S) -> None:
    """Wait until the group has settled everything; as long as it comes nearer to that, it takes its time."""
    last: list[dict[str, Any]] = []
    left = 0

    async def so() -> bool:
        nonlocal last
        last = (await client.groups().describe(GROUP)).partitions
        return not any(row["lag"] or row["in_flight"] or row["dying"] for row in last)

    async def less() -> bool:
        return await so() or sum(row["lag"] for row in last) < left

    try:
        while not await so():
            left = sum(row["lag"] for row in last)
            await until(less, "the group has settled something more", timeout_s)
    except AssertionError as error:
        error.add_note("\n".join(str(row) for row in last))
        raise


async def heard_of(client: tailrace.Client, since_us: int, *names: str) -> None:
    """Wait until each of some members has shown itself after a time."""

    async def so() -> bool:
        rows = (await client.groups().describe(GROUP)).members
        seen = {row["member"]: row["last_seen_us"] for row in rows}
        return all(seen.get(name, 0) > since_us for name in names)

    await until(so, f"heartbeats of {names}")


async def owners(client: tailrace.Client) -> dict[int, tuple[str, int]]:
    """Owner and generation of every partition; nothing before the first member has made the group."""
    try:
        rows = (await client.groups().describe(GROUP)).partitions
    except NotFound:
        return {}
    return {row["partition"]: (row["member"], row["generation"]) for row in rows}


def history_of(
    members: Members, publisher: Publisher | None = None, kills: Sequence[int] = ()
) -> GroupHistory:
    """All that was noted."""
    return GroupHistory(members.rows(), [] if publisher is None else publisher.sends, kills)


if __name__ == "__main__":
    asyncio.run(GroupMember(msgspec.json.decode(sys.argv[1], type=MemberConfig)).run())
