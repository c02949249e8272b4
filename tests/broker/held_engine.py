"""An engine on virtual time whose storage work can be held back and let go piece by piece."""

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.broker.access.passwords import CHEAP, Passwords
from tailrace.broker.engine import Engine
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.clock import ManualClock
from tailrace.cluster.embedded import MemoryCoordinator
from tailrace.cluster.identity_file import MemoryIdentities
from tailrace.core.model.commands import CreateTopic, Fetch, Publish, Reply, Request, TopicInfo
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import crc32c
from tailrace.ports import IdentityStore, LogStore, Registry
from tailrace.storage.memory_log import MemoryLog, MemoryStore


class HeldThreads:
    """See `ports.Threads`: work waits in one line; `run_held` does it."""

    def __init__(self) -> None:
        self.held: list[tuple[Callable[[], object], Any]] = []
        self.holding = False
        self._finished: list[tuple[Any, object, Exception | None]] = []
        self.forgotten: list[object] = []

    def append(self, log: Any, frames: Sequence[Any], sync: bool, done: Any) -> None:
        self._take(lambda: log.append(frames, sync=sync), done)

    def run(self, log: object, work: Callable[[], object], done: Any) -> None:
        self._take(work, done)

    def read(self, work: Callable[[], object], done: Any) -> None:
        self._take(work, done)

    def _take(self, work: Callable[[], object], done: Any) -> None:
        self.held.append((work, done))
        if not self.holding:
            self.run_held()

    def run_held(self, count: int = 1 << 30) -> None:
        """Do the oldest pieces of work; their owners hear of it at the next drain."""
        for _ in range(min(count, len(self.held))):
            work, done = self.held.pop(0)
            try:
                self._finished.append((done, work(), None))
            except Exception as error:
                self._finished.append((done, None, error))

    def tell(self, done: Any, result: object) -> None:
        self._finished.append((done, result, None))

    def completed(self) -> list[tuple[Any, object, Exception | None]]:
        finished, self._finished = self._finished, []
        return finished

    def forget(self, log: object) -> None:
        self.forgotten.append(log)

    def close(self) -> None:
        self.run_held()


class HeldEngine:
    """A broker in hand: requests in, replies out, time as the test wants it."""

    def __init__(
        self,
        store: LogStore | None = None,
        coordinator: Registry | None = None,
        identities: IdentityStore | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.threads = HeldThreads()
        self.store = store if store is not None else MemoryStore()
        self.coordinator = coordinator if coordinator is not None else MemoryCoordinator()
        self.known = identities if identities is not None else MemoryIdentities()
        self.engine = self._start()

    def _start(self) -> Engine:
        return self.open_engine({"file": self.store})

    def open_engine(self, stores: dict[str, LogStore], **fields: Any) -> Engine:
        """A process of the broker begins."""
        self._armed_us: int | None = None
        known: dict[str, Any] = {
            "identities": self.known,
            "passwords": Passwords(self.threads.read, CHEAP),
        }
        engine = Engine(self.clock, self.threads, stores, self.coordinator, arm=self._arm, **known, **fields)
        engine.open()
        return engine

    def _arm(self, due_us: int) -> None:
        """One timer, like that of an event loop: what was named last counts."""
        self._armed_us = due_us

    def restart(self, wall_s: float = 0) -> None:
        """End the process and start another one on the same store, with a wall clock that was put forward by
        so much meanwhile, or back."""
        self.clock.skew_us += int(wall_s * 1e6)
        self.clock.start_again()
        self.threads.held.clear()
        self.threads.completed()
        self.store.close()
        self.engine = self._start()

    def settle(self) -> None:
        """Run until nothing is left that could go on by itself."""
        pump = self.engine.pump
        while pump.busy or pump.drain():
            pump.turn()

    def pass_s(self, seconds: float) -> None:
        """Let time pass, with all that falls due in it."""
        until_us = self.clock.now_us() + int(seconds * 1e6)
        pump = self.engine.pump
        self.settle()
        while (due_us := self._armed_us) is not None and due_us <= until_us:
            self._armed_us = None
            self.clock.set_us(max(due_us, self.clock.now_us()))
            pump.tick()
            self.settle()
        self.clock.set_us(until_us)

    def submit(self, request: Request, body: Any = b"", **gate: Any) -> list[tuple[Reply, bytes]]:
        """Send a request; the list gets its answer when there is one."""
        answers: list[tuple[Reply, bytes]] = []
        self.engine.gateway.submit(
            request, body, lambda reply, parts: answers.append((reply, b"".join(parts))), **gate
        )
        self.settle()
        return answers

    def ask(self, request: Request, body: Any = b"") -> Any:
        """The answer that has to be there at once."""
        ((reply, _),) = self.submit(request, body)
        return reply

    def create(self, name: str = "t", **options: Any) -> TopicInfo:
        """Make a topic of one partition."""
        reply = self.ask(CreateTopic(name, {"partitions": 1, **options}))
        assert isinstance(reply, TopicInfo), reply
        return reply

    def publish(self, *values: bytes, topic: str = "t", **fields: Any) -> list[tuple[Reply, bytes]]:
        """Send a batch."""
        columns, body = arrow.encode(
            list(values), ids=bytes(16 * len(values)), timestamps=self.clock.now_us(), dedup_ids=None
        )
        partition = fields.pop("partition", 0)
        return self.submit(Publish(topic, partition, columns, crc32c(body), **fields), body)

    def runtime(self, topic: str = "t", partition: int = 0) -> QueuePartition:
        """A partition at work."""
        return self.engine.topics.get(topic).runtimes[partition]

    def log(self, topic: str = "t", partition: int = 0) -> MemoryLog:
        """The log of a partition."""
        log = self.runtime(topic, partition).log
        assert isinstance(log, MemoryLog)
        return log

    def values(self, topic: str = "t", partition: int = 0, offset: int = 0) -> list[bytes]:
        """What a reader is given from an offset on, in one fetch."""
        ((reply, data),) = self.submit(Fetch(topic, [(partition, offset)], 1 << 20, 0))
        assert not hasattr(reply, "code"), reply
        return values_of(data)


def values_of(data: bytes) -> list[bytes]:
    """The values in raw frames."""
    return [
        value
        for header, body in frame.walk(data)
        if header.kind == frame.DATA
        for value in arrow.decode(body, header.columns)["value"].to_pylist()
    ]
