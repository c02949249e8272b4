"""A whole broker inside the test process: the real core in memory, with virtual time, without sockets.

Whoever submits a request runs the broker until nothing is left to do, under one lock; the replies go to the
loop of the client that asked. So a test is as quick as the calls it makes, and nothing in it depends on how
long something takes.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any

from tailrace.broker.access.passwords import CHEAP, Passwords
from tailrace.broker.engine import Engine
from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.broker.runtime.clock import ManualClock
from tailrace.broker.runtime.turn import refuse
from tailrace.client.admin.dead_letter_reader import DeadLetter
from tailrace.client.admin.dead_letters import SUFFIX as DLQ_SUFFIX
from tailrace.client.admin.group_admin import Group
from tailrace.client.admin.schedules import Scheduled
from tailrace.client.client import Client
from tailrace.client.messages import Message, Rows, Topic, moment
from tailrace.client.rpc.calls import error_of
from tailrace.cluster.embedded import MemoryCoordinator
from tailrace.cluster.identity_file import MemoryIdentities
from tailrace.connect import connect
from tailrace.core.model.commands import CreateTopic, Reply, Request, TopicInfo
from tailrace.core.model.group_commands import CreateGroup, DescribeGroup, GroupInfo, GroupList, ListGroups
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import ListScheduled, ScheduledList
from tailrace.errors import InvalidRequest, NotFound, StorageFault, Timeout
from tailrace.format import batch, codec, frame
from tailrace.format.frame import Buffer
from tailrace.ports import LogStore, Respond
from tailrace.storage.memory_log import MemoryStore
from tailrace.storage.threads import InlineThreads

HOPS = 10
"""Rounds of a loop without a new request after which its tasks count as waiting: a reply needs two or three
to reach its task."""
ROUNDS_MAX = 10_000
SYNC_CHECK_US = 60_000_000
"""Rarer than on a real broker: there is no disk to sync, and days of virtual time shall pass in an
instant."""
LOOP_S_MAX = 10.0
_LOST = Refusal("unavailable", "the connection broke before the answer came", "unknown")
_CLOSED = Refusal("unavailable", "the client or the test's broker is closed", "none")
_READ_BYTES = 1 << 62
SCHEDULED_MAX = 1_000
"""So many delayed messages are shown at most."""

_numbers = itertools.count(1)
_brokers: weakref.WeakValueDictionary[str, LocalBroker] = weakref.WeakValueDictionary()


class VirtualClock(ManualClock):
    """The broker's time: it begins at the real time and stands still until `advance` moves it."""

    def __init__(self, move: Callable[[int], None]) -> None:
        super().__init__(time.time_ns() // 1000)
        self._move = move
        self._put_us = 0

    @property
    def now(self) -> datetime:
        """The virtual time, as a clock on the wall shows it."""
        return moment(self.wall_us())

    def wall_ns(self) -> int:
        """See `ClientClock`: clients live in the virtual time, too."""
        return self.wall_us() * 1000

    def elapsed_ms(self) -> float:
        """See `ClientClock`."""
        return (self.now_us() - self._put_us) / 1000

    def put(self, duration: float | timedelta) -> None:
        """Put the wall clock forward, or back with a negative duration, as somebody who corrects it: no time
        passes by it. The broker notices when time goes on."""
        if not isinstance(duration, timedelta):
            duration = timedelta(seconds=duration)
        self.skew_us += duration // timedelta(microseconds=1)

    def start_again(self) -> None:
        """See `ManualClock.start_again`; for clients no time has passed."""
        self._put_us += self.skew_us
        super().start_again()

    def advance(self, duration: float | timedelta) -> None:
        """Let time pass, in seconds or as a timedelta: all that falls due happens in order, each at its own
        time.

        Clients on other threads (`tailrace.sync`) have reacted when this returns; for those on the loop that
        the caller runs on, `await broker.settle()` afterwards."""
        if not isinstance(duration, timedelta):
            duration = timedelta(seconds=duration)
        if duration < timedelta(0):
            raise InvalidRequest(f"virtual time never goes back: {duration}")
        self._move(self.now_us() + duration // timedelta(microseconds=1))


class LocalBroker:
    """A broker for one test. `tailrace.connect(broker.url)` reaches it from any loop and thread of the
    process.

    Topics are as on a real broker, except that nothing is written to a disk: after `restart`, topics with
    file storage have their messages still, those with memory storage have lost them."""

    def __init__(self) -> None:
        self.name = f"test-{next(_numbers)}"
        self.clock = VirtualClock(self._advance)
        self._lock = threading.Lock()
        self._store = MemoryStore()
        self._coordinator = MemoryCoordinator()
        self._identities = MemoryIdentities()
        self._links: set[_Link] = set()
        self._closed = False
        self._requests = 0
        self._replies = 0
        self._engine = self._start()
        _brokers[self.name] = self

    @property
    def url(self) -> str:
        """What to connect to."""
        return f"local:{self.name}"

    def client(self, *, timeout: float = 30.0) -> Client:
        """A client of this broker, to use with `async with`."""
        return connect(self.url, timeout=timeout)

    def __enter__(self) -> LocalBroker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it: whoever waits, and whoever asks from now on, hears that the broker is gone."""
        with self._lock:
            self._closed = True
            self._break_links()
        _brokers.pop(self.name, None)

    # -- what tests do to it

    def restart(self) -> None:
        """As after a SIGKILL and a new start: all state is rebuilt from the logs. Requests under way end with
        an unknown outcome, and clients go on by themselves. The new process goes by the wall clock as it is
        (`clock.put`)."""
        with self._lock:
            self._require_open()
            self.clock.start_again()
            self._store.close()
            for entry in self._engine.topics.catalog.topics.values():
                if entry.options.storage == "memory":
                    for partition in range(entry.options.partitions):
                        self._store.remove(f"{entry.folder}/{partition}")
            self._engine = self._start()
            self._break_links()

    def fail_next(self, error: StorageFault | None = None) -> None:
        """Let the next write to storage fail, by default with a `StorageFault`, after which the partition
        takes no writes until `restart`. After `errors.Full` writes are refused until the clock has gone on
        for a second."""
        if error is None:
            error = StorageFault("the disk failed because the test asked for it")
        if not isinstance(error, StorageFault):
            raise InvalidRequest(f"error: a StorageFault is needed, not {type(error).__name__}")
        with self._lock:
            self._store.fail_next(error)

    def create_topic(self, name: str, **options: Any) -> Topic:
        """Create a topic without a client."""
        reply = self._ask(CreateTopic(name, options))
        assert isinstance(reply, TopicInfo)
        return Topic.of(reply)

    def create_group(self, name: str, topics: str | Sequence[str], **options: Any) -> Group:
        """Enlist a group without a client."""
        names = [topics] if isinstance(topics, str) else list(topics)
        reply = self._ask(CreateGroup(name, names, options))
        assert isinstance(reply, GroupInfo)
        return Group.of(reply)

    def groups(self) -> list[Group]:
        """All groups, each with its members and its place in every partition."""
        reply = self._ask(ListGroups())
        assert isinstance(reply, GroupList)
        return [self.group(info.group) for info in reply.groups]

    def group(self, name: str) -> Group:
        """A group, with its members and its place in every partition."""
        reply = self._ask(DescribeGroup(name))
        assert isinstance(reply, GroupInfo)
        return Group.of(reply)

    def dead_letters(self, topic: str) -> list[DeadLetter]:
        """All dead letters of a topic, those that were redriven or purged, too; by partition and offset."""
        try:
            messages = self.published(topic + DLQ_SUFFIX)
        except NotFound:
            return []
        return [DeadLetter.of(message) for message in messages]

    def scheduled(self, topic: str) -> list[Scheduled]:
        """Delayed messages of a topic that wait for their time, the next due first."""
        reply = self._ask(ListScheduled(topic, SCHEDULED_MAX))
        assert isinstance(reply, ScheduledList)
        return [Scheduled.of(topic, fields) for fields in reply.messages]

    def _ask(self, request: Request) -> Reply:
        """A request of the test itself; it is answered before this returns."""
        replies: list[Reply] = []
        with self._lock:
            self._require_open()
            self._engine.gateway.submit(request, b"", lambda reply, parts: replies.append(reply))
            self._run()
        (reply,) = replies
        if isinstance(reply, Refusal):
            raise error_of(reply)
        return reply

    def published(self, topic: str) -> list[Message]:
        """All committed messages of a topic, by partition and offset, without a client."""
        messages: list[Message] = []
        with self._lock:
            runtimes = self._engine.topics.get(topic).runtimes
            for partition, runtime in enumerate(runtimes):
                start = runtime.state.start_offset
                for part in runtime.log.read(start, runtime.end_offset, _READ_BYTES):
                    for header, body in frame.walk(part):
                        rows = Rows(topic, partition, header, batch.decode(body, header.columns))
                        messages += rows.messages(rows.first_row(start))
        return messages

    async def settle(self) -> None:
        """Let the tasks of this loop, and of clients on other threads, run until they ask the broker for
        nothing more."""
        for _ in range(ROUNDS_MAX):
            before = self._requests
            for _ in range(HOPS):
                await asyncio.sleep(0)
            self._settle_threads()
            if self._requests == before:
                return
        raise Timeout(f"clients keep asking: {self._requests} requests so far")

    async def advance(self, duration: float | timedelta) -> None:
        """Let time pass while the tasks of this loop go on: whatever falls due on the way, they react to it
        before time moves on. Consumers keep their sessions, which a leap of `clock.advance` ends."""
        await self.settle()
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        until_us = self.clock.now_us() + int(seconds * 1_000_000)
        while self.clock.now_us() < until_us:
            with self._lock:
                due_us = self._engine.pump.next_deadline_us()
            replies = self._replies
            self._advance(until_us if due_us is None else min(due_us, until_us))
            if self._replies > replies:
                await self.settle()

    # -- running

    def _start(self) -> Engine:
        stores: dict[str, LogStore] = {"file": self._store, "memory": self._store}
        threads = InlineThreads(lambda: None)
        engine = Engine(
            self.clock,
            threads,
            stores,
            self._coordinator,
            sync_check_us=SYNC_CHECK_US,
            identities=self._identities,
            passwords=Passwords(threads.read, CHEAP),
        )
        engine.open()
        return engine

    def _require_open(self) -> None:
        if self._closed:
            raise error_of(_CLOSED)

    def _run(self) -> None:
        pump = self._engine.pump
        while True:
            if pump.busy:
                pump.turn()
            elif not pump.drain():
                return

    def _advance(self, until_us: int) -> None:
        while True:
            with self._lock:
                self._require_open()
                pump = self._engine.pump
                due_us = pump.next_deadline_us()
                last = due_us is None or due_us > until_us
                self.clock.set_us(max(until_us if due_us is None or last else due_us, self.clock.now_us()))
                replies = self._replies
                pump.tick()
                self._run()
                replied = self._replies > replies
            if replied or last:
                self._settle_threads()
            if last:
                return

    def _settle_threads(self) -> None:
        """Let the loops of other threads work off what they were sent, until they ask for nothing more."""
        me = threading.get_ident()
        for _ in range(ROUNDS_MAX):
            with self._lock:
                before = self._requests
                loops = {link.loop for link in self._links if link.thread != me}
            for loop in loops:
                _round_trip(loop)
            if self._requests == before:
                return
        raise Timeout(f"clients keep asking: {self._requests} requests so far")

    def _break_links(self) -> None:
        for link in list(self._links):
            self._break(link)

    def _break(self, link: _Link) -> None:
        waiting, link.waiting = link.waiting, {}
        for respond in waiting.values():
            self._post(link, respond, _LOST, ())
        for job in list(link.gate.fetches):
            job.drop()  # As when a connection breaks: nothing is leased to who is gone.

    def _post(self, link: _Link, respond: Respond, reply: Reply, parts: Sequence[Buffer]) -> None:
        """Hand a reply to the client's loop; in the order of the replies, because the lock is held."""
        self._replies += 1
        try:
            if link.thread == threading.get_ident():
                link.loop.call_soon(respond, reply, parts)
            else:
                link.loop.call_soon_threadsafe(respond, reply, parts)
        except RuntimeError:
            self._links.discard(link)  # Its loop is closed: the client ended without closing.

    def submit(self, link: _Link, request: Request, body: Buffer, respond: Respond) -> None:
        """Take a request of a client and do all that it leads to."""
        with self._lock:
            self._requests += 1
            if self._closed or link not in self._links:
                self._post(link, respond, _CLOSED, ())
                return
            number = self._requests
            link.waiting[number] = respond

            def answer(reply: Reply, parts: Sequence[Buffer]) -> None:
                waiting = link.waiting.pop(number, None)
                if waiting is not None:
                    self._post(link, waiting, reply, parts)

            try:
                request = codec.checked(request)
            except InvalidRequest as error:
                answer(refuse(error), ())
                return
            self._engine.gateway.submit(request, body, answer, link.gate)
            self._run()

    def link(self) -> _Link:
        """A connection for a client on the running loop."""
        with self._lock:
            self._require_open()
            link = _Link(self.clock, self.submit, self.unlink)
            self._links.add(link)
        return link

    def unlink(self, link: _Link) -> None:
        """The client has closed."""
        with self._lock:
            self._break(link)
            self._links.discard(link)
            self._run()


class _Forgotten(dict[str, int]):
    """When answers were given; nobody remembers."""

    def __setitem__(self, key: str, value: int) -> None:
        pass


class _Link:
    """`BrokerVerbs` of one client: remembers its loop, and what it waits for."""

    def __init__(
        self,
        clock: VirtualClock,
        submit: Callable[[_Link, Request, Buffer, Respond], None],
        unlink: Callable[[_Link], None],
    ) -> None:
        self._submit = submit
        self._unlink = unlink
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.waiting: dict[int, Respond] = {}
        self.gate = OpenGate()
        # Pacing of answers, which is for load, would wait for time that stands still.
        self.gate.answered_us = _Forgotten()

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """See `BrokerVerbs.submit`; the reply comes in a later round of the loop."""
        self._submit(self, request, body, respond)

    async def close(self) -> None:
        """Let go; what waits for an answer is told that it is unknown."""
        self._unlink(self)


def _round_trip(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until a loop of another thread has gone round a few times; one that does not run is left alone."""
    done = threading.Event()
    left = HOPS

    def hop() -> None:
        nonlocal left
        left -= 1
        if left:
            loop.call_soon(hop)
        else:
            done.set()

    if not loop.is_running():
        return
    try:
        loop.call_soon_threadsafe(hop)
    except RuntimeError:
        return  # It was closed in this moment.
    give_up_s = time.monotonic() + LOOP_S_MAX
    while not done.wait(0.05):
        if not loop.is_running():
            return
        if time.monotonic() > give_up_s:
            raise Timeout(f"a client's event loop has been blocked for {LOOP_S_MAX:g} s")


async def open_local(name: str) -> _Link:
    """Connect to the broker of a name, as `connect("local:NAME")` does."""
    broker = _brokers.get(name)
    if broker is None:
        raise NotFound(f"there is no test broker {name!r} in this process; its test may be over")
    return broker.link()
