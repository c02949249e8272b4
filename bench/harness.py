"""Runs the cases of a suite: scratch folders, brokers, roles, limits, repetitions and their medians."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from bench import bare_server, machine
from bench.certificates import CertificateFiles
from bench.load import Job, Load, Produced, Received
from bench.processes import BenchmarkFailed, Broker, Child
from bench.results import Bar, Figure, Sample, figures, readable

SCRATCH = Path(__file__).resolve().parent / ".scratch"
RUNS = 3
ROLE_PATIENCE_S = 300.0


Limits = dict[tuple[int, float, bool, bool], float]
"""Frames a second of the bare server, by size of frame, seconds, whether one by one and whether through
TLS."""


class Case(msgspec.Struct, frozen=True):
    """One question: how long it takes, which figures answer it, and the function that measures them once."""

    figures: tuple[str, ...]
    seconds: float
    measure: Callable[[Run], list[Sample]]
    runs_max: int = RUNS
    """A case that takes very long is not repeated."""


class Suite(msgspec.Struct, frozen=True):
    """Cases and the bars that their figures are held against."""

    name: str
    bars: tuple[Bar, ...]
    cases: tuple[Case, ...]


class Outcome(msgspec.Struct, frozen=True):
    """What came of one load: both reports, with every message accounted for."""

    produced: Produced
    received: Received


class Run:
    """One repetition of one case: its folder, its time, its share of the disk, and what it may start."""

    def __init__(self, folder: Path, *, seconds: float, scale: float, limits: Limits | None) -> None:
        self.folder = folder
        self.seconds = seconds
        self.scale = scale
        self.bytes_max = machine.space_budget(folder)
        self._limits = limits

    def scaled(self, count: int) -> int:
        """A number of messages, fewer in a quick run."""
        return max(1, int(count * self.scale))

    @contextmanager
    def broker(
        self, data: str = "data", *, keep: bool = False, flags: Sequence[str] = (), scheme: str = "tailrace"
    ) -> Iterator[Broker]:
        """A broker on a folder of this run; it ends with the block, and so do its data unless kept."""
        if not (self.folder / data).exists():
            machine.settle()
        log = self.folder / "broker.log"
        with Broker(self.folder / data, log=log, flags=flags, scheme=scheme) as broker:
            yield broker
        if not keep:
            shutil.rmtree(self.folder / data)

    def drive(self, broker: Broker, load: Load, topic: str = "bench") -> Outcome:
        """Create a topic, let a reader and a producer loose on it, and check that every message arrived."""
        asyncio.run(_create(broker.url, topic, load))
        with self.role(_receiver(load), Job(broker.url, topic, load)) as reader:
            reader.answer(dict, ROLE_PATIENCE_S)
            with self.role("producer", Job(broker.url, topic, load)) as producer:
                produced = producer.answer(Produced, load.seconds + ROLE_PATIENCE_S)
                # Told while the producer still leaves, so that its exit does not count as the reader's time.
                received = self._received(reader, load, produced.sent)
        return Outcome(produced, received)

    def fill(self, broker: Broker, load: Load, topic: str = "bench") -> int:
        """Create a topic and publish to it with nobody reading; returns how many messages it holds."""
        return self.produce(broker.url, load, topic).sent

    def produce(self, url: str, load: Load, topic: str = "bench") -> Produced:
        """Create a topic by one of a broker's addresses and publish to it with nobody reading."""
        asyncio.run(_create(url, topic, load))
        with self.role("producer", Job(url, topic, load)) as producer:
            return producer.answer(Produced, load.seconds + ROLE_PATIENCE_S)

    def reread(self, broker: Broker, load: Load, expected: int, topic: str = "bench") -> Received:
        """Read or consume a topic that is already written from its beginning, and check the count."""
        with self.role(_receiver(load), Job(broker.url, topic, load)) as reader:
            reader.answer(dict, ROLE_PATIENCE_S)
            return self._received(reader, load, expected)

    def _received(self, reader: Child, load: Load, expected: int) -> Received:
        reader.tell(str(expected))
        received = reader.answer(Received, ROLE_PATIENCE_S)
        if received.received != expected:
            raise BenchmarkFailed(f"{expected} messages were sent and {received.received} received")
        if received.value_bytes != expected * load.value_bytes:
            raise BenchmarkFailed(f"{received.value_bytes} bytes of values came from {expected} messages")
        return received

    def role(self, role: str, job: msgspec.Struct) -> Child:
        """A process of `bench.roles` with its job."""
        argument = msgspec.json.encode(job).decode()
        return Child(role, ["-m", f"bench.roles.{role}", argument], log=self.folder / f"{role}.log")

    def limit(
        self,
        *,
        batch: int,
        value_bytes: int,
        one_by_one: bool = False,
        through: CertificateFiles | None = None,
    ) -> float:
        """Messages a second that the bare server takes in frames of this size, with certificates through TLS;
        measured once a repetition. 0 where limits are not asked for."""
        if self._limits is None:
            return 0.0
        job = bare_server.Transfer(
            path=str(SCRATCH / "bare"),
            frame_bytes=bare_server.frame_bytes(batch, value_bytes),
            seconds=self.seconds,
            bytes_max=self.bytes_max,
            one_by_one=one_by_one,
            **({} if through is None else msgspec.structs.asdict(through)),
        )
        key = (job.frame_bytes, job.seconds, job.one_by_one, through is not None)
        if key not in self._limits:
            machine.settle()
            try:
                self._limits[key] = bare_server.measure(job, self.folder / "bare.log")
            finally:
                Path(job.path).unlink(missing_ok=True)
        return self._limits[key] * batch


def _receiver(load: Load) -> str:
    return "consumer" if load.group else "reader"


async def _create(url: str, topic: str, load: Load) -> None:
    import tailrace  # here: what needs no broker also runs without one

    async with tailrace.connect(url) as client:
        await client.admin().create_topic(topic, partitions=load.partitions, durability=load.durability)


class Plan(msgspec.Struct, frozen=True):
    """What of a suite is run: all of it unless said otherwise."""

    only: tuple[str, ...] = ()
    runs: int = RUNS
    seconds: float | None = None
    probed: bool = True
    """Whether the limits of this machine are measured, too: its disk, its memory, and the bare server."""

    @property
    def partial(self) -> bool:
        """Whether the figures are less than the suite promises."""
        return bool(self.only) or self.runs < RUNS or self.seconds is not None

    def chosen(self, suite: Suite) -> list[Case]:
        """The cases that answer the names asked for."""
        known = {name for case in suite.cases for name in case.figures}
        unknown = [name for name in self.only if name not in known]
        if unknown:
            raise machine.Unfit(
                f"no figure is called {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        return [case for case in suite.cases if not self.only or set(case.figures) & set(self.only)]


class Report(msgspec.Struct, frozen=True):
    """What a suite found, and which cases could not be measured."""

    figures: list[Figure]
    failures: list[str]


def execute(suite: Suite, plan: Plan, console: Console) -> Report:
    """Run every chosen case, all of them once before any of them again, and take the medians."""
    cases = plan.chosen(suite)
    cores = machine.pin()
    SCRATCH.mkdir(exist_ok=True)
    try:
        machine.refuse_memory(machine.filesystem(SCRATCH))
        machine.space_budget(SCRATCH)
        common = machine.conditions(SCRATCH) if plan.probed else {}
        if plan.partial:
            common["partial"] = True
        console.print(
            f"{suite.name} on cores {cores}:", ", ".join(f"{key} {value}" for key, value in common.items())
        )
        samples: list[Sample] = []
        failures: dict[Case, str] = {}
        for number in range(1, plan.runs + 1):
            limits: Limits | None = {} if plan.probed else None
            for case in cases:
                if case in failures or number > case.runs_max:
                    continue
                try:
                    found = _once(case, plan, limits)
                except (
                    Exception
                ) as error:  # a case that fails must not hide the others: it is reported at the end
                    failures[case] = (
                        f"{case.figures[0]}: {[type(error).__name__, *str(error).splitlines()][-1]}"
                    )
                    notes = getattr(error, "__notes__", [])
                    told = "\n".join([f"{type(error).__name__}: {error}", *notes])
                    console.print(f"run {number}/{plan.runs} {case.figures[0]} FAILED: {told}", markup=False)
                else:
                    samples.extend(found)
                    _tell(console, f"run {number}/{plan.runs}", found)
        return Report(figures(samples, suite.bars, common), list(failures.values()))
    finally:
        shutil.rmtree(SCRATCH)


def _once(case: Case, plan: Plan, limits: Limits | None) -> list[Sample]:
    """Measure a case once, in a folder of its own that is gone afterwards."""
    folder = SCRATCH / f"{case.figures[0]}-{time.time_ns()}"
    folder.mkdir()
    seconds = case.seconds if plan.seconds is None else plan.seconds
    try:
        found = case.measure(Run(folder, seconds=seconds, scale=seconds / case.seconds, limits=limits))
        # A case that knows better how long it took says so itself.
        return [
            msgspec.structs.replace(sample, conditions={"seconds": seconds, **sample.conditions})
            for sample in found
        ]
    except Exception as error:
        log = folder / "broker.log"
        error.add_note(
            f"log of the broker: {log.read_text(errors='replace')[-2000:] if log.exists() else None}"
        )
        raise
    finally:
        shutil.rmtree(folder)


def _tell(console: Console, run: str, samples: Sequence[Sample]) -> None:
    for sample in samples:
        share = f", {sample.value / sample.limit:.1%} of the limit" if sample.limit else ""
        console.print(f"{run} {sample.name}: {readable(sample.value)} {sample.unit}{share}", highlight=False)
