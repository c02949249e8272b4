"""The scrub: sealed segments are read from the disk and checked, slowly, so that damage is found early.

The scrub runs once per period over all logs, and on request over some of them. Requested scrubs are done in
order of arrival, before the periodic one continues. Pieces of about `STEP_BYTES` are read on a reader thread
with pauses between them, so that the scrub keeps below its rate in bytes per second and never delays the
loop. The store keeps a note of its progress, from which a restart continues. Damage is quarantined, as after
any read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.broker.topics import Topics
from tailrace.core.model.damage_commands import Scrub, ScrubState
from tailrace.errors import StorageFault
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, LogStore, Respond, Scrubbed

log = logging.getLogger("tailrace.scrub")

STEP_BYTES = 1024 * 1024
PERIODIC_BYTES_PER_S = 8 * 1024 * 1024
ASKED_BYTES_PER_S = 64 * 1024 * 1024
"""Rate of a requested scrub, for which somebody waits."""
NOTE_BYTES = 64 * 1024 * 1024
"""Bytes between two notes, which a restart may read again."""
FIRST_US = 3_600_000_000
"""Time from the first start of a broker to its first scrub."""
NOTE = "scrub"
ENDED_MAX = 1000
"""Results of ended scrubs that are kept."""

Wanted = tuple[str | None, int | None]
"""A topic and a partition to scrub; None stands for all."""


class Note(msgspec.Struct, frozen=True):
    """Progress of the periodic scrub, which reads logs in the order of their names."""

    begun_us: int = 0
    ended_us: int = 0
    name: str = ""
    """The log that is read now; empty at the end."""
    entry: int = 0


class _Job:
    """One scrub of some logs."""

    def __init__(
        self, wanted: Wanted, names: list[str], total: int, begun_us: int, *, periodic: bool
    ) -> None:
        self.wanted = wanted
        self.names = names
        self.total = total
        self.begun_us = begun_us
        self.ended_us = 0
        self.periodic = periodic
        self.entry = self.bytes = self.unnoted = 0
        self.damage: list[str] = []

    def state(self) -> ScrubState:
        done = self.total - len(self.names)
        running = not self.ended_us
        return ScrubState(running, done, self.total, self.bytes, self.damage, self.begun_us, self.ended_us)


class ScrubRunner:
    """The scrub of a node, and the verb for it. All methods run on the pump's thread."""

    def __init__(self, topics: Topics, pump: Pump, store: LogStore, metrics: Metrics, period_us: int) -> None:
        self._topics = topics
        self._pump = pump
        self._store = store
        self._metrics = metrics
        self._period_us = period_us
        self._jobs: list[_Job] = []
        """Scrubs to do, the running one first; requested ones go before the periodic one."""
        self._ended: dict[Wanted, _Job] = {}
        """The last result for each request, the newest at the end."""
        self._busy = self._closed = False
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {Scrub: self._scrub}

    def start(self) -> None:
        """After recovery: continue the last scrub, or set the timer for the next one."""
        try:
            raw = self._store.load_note(NOTE)
            note = Note() if raw is None else msgspec.json.decode(raw, type=Note)
        except (StorageFault, msgspec.MsgspecError) as error:
            log.error("how far the scrub was cannot be read, it begins anew: %s", error)
            note = Note()
        self._metrics.scrub_ended(note.ended_us)
        if not self._period_us:
            return
        now_us = self._pump.clock.now_us()
        if note.name:
            names = [name for name in self._names(None, None) if name >= note.name]
            total = len(self._names(None, None))
            job = _Job((None, None), names, total, note.begun_us, periodic=True)
            job.entry = note.entry if names and names[0] == note.name else 0
            self._add(job)
        else:
            first_us = now_us + min(FIRST_US, self._period_us)
            # A note from the future: the clock was put back since.
            due_us = min(note.begun_us, now_us) + self._period_us if note.begun_us else first_us
            self._pump.at(max(due_us, now_us), self._begin)

    def _begin(self, now_us: int) -> None:
        names = self._names(None, None)
        self._add(_Job((None, None), names, len(names), now_us, periodic=True))

    def _names(self, topic: str | None, partition: int | None) -> list[str]:
        return sorted(runtime.name for runtime in self._runtimes(topic, partition))

    def _runtimes(self, topic: str | None, partition: int | None) -> list[PartitionRuntime[Any]]:
        if topic is None:
            return list(self._topics.runtimes())
        host = self._topics.known(topic)
        return list(host.runtimes) if partition is None else [host.partition(partition)]

    def _scrub(self, request: Scrub, body: Buffer, respond: Respond, gate: Gate) -> None:
        wanted = (request.topic, request.partition)
        if request.begin:
            names = self._names(*wanted)
            self._add(_Job(wanted, names, len(names), self._pump.clock.now_us(), periodic=False))
        job = self._newest(wanted)
        respond(ScrubState(False, 0, 0, 0) if job is None else job.state(), NOTHING)

    def _newest(self, wanted: Wanted) -> _Job | None:
        """The job for this request that began last. If there is none for a request about everything, the
        running job or the last one."""
        jobs = [
            job for job in (*self._jobs, self._ended.get(wanted)) if job is not None and job.wanted == wanted
        ]
        if not jobs and wanted == (None, None):
            jobs = self._jobs[:1] or list(self._ended.values())[-1:]
        return max(jobs, key=lambda job: job.begun_us, default=None)

    # -- at work

    def _add(self, job: _Job) -> None:
        if job.periodic:
            self._jobs.append(job)
        else:
            # A repeated request begins anew.
            asked = [other for other in self._jobs if not other.periodic and other.wanted != job.wanted]
            self._jobs = [*asked, job, *(other for other in self._jobs if other.periodic)]
        if not self._busy:
            self._busy = True
            self._step()

    def close(self) -> None:
        """Stop, and note the progress."""
        self._closed = True
        for job in self._jobs:
            if job.periodic and job.names:
                self._note(job)

    def _step(self) -> None:
        if self._closed:
            return
        while self._jobs:
            job = self._jobs[0]
            runtime = self._next(job)
            if runtime is not None:
                work = partial(runtime.log.scrub, job.entry, STEP_BYTES)
                self._pump.threads.read(work, partial(self._read, job, runtime))
                return
            self._end(self._jobs.pop(0))
        self._busy = False

    def _next(self, job: _Job) -> PartitionRuntime[Any] | None:
        """The partition that a job reads next; deleted and faulty ones are passed over."""
        known = {runtime.name: runtime for runtime in self._topics.runtimes()} if job.names else {}
        while job.names:
            runtime = known.get(job.names[0])
            if runtime is not None and runtime.gone is None:
                if runtime.fault is None:
                    return runtime
                job.damage.append(f"{runtime.topic}/{runtime.partition}: {runtime.fault.message}")
            self._through(job)
        return None

    def _through(self, job: _Job) -> None:
        del job.names[0]
        job.entry = 0
        if job.periodic and job.names:
            self._note(job)

    def _read(self, job: _Job, runtime: PartitionRuntime[Any], result: Any, error: Exception | None) -> None:
        read = 0
        if error is not None:
            self._damage(job, f"{runtime.topic}/{runtime.partition}: {refuse(error).message}")
            self._through(job)
        else:
            read = self._took(job, runtime, result)
        rate = PERIODIC_BYTES_PER_S if job.periodic else ASKED_BYTES_PER_S
        pause_us = 1 + read * 1_000_000 // rate
        self._pump.at(self._pump.clock.now_us() + pause_us, lambda now_us: self._step())

    def _took(self, job: _Job, runtime: PartitionRuntime[Any], found: Scrubbed) -> int:
        job.bytes += found.bytes
        job.unnoted += found.bytes
        self._metrics.scrubbed(found.bytes)
        for problem in found.problems:
            self._damage(job, f"{runtime.topic}/{runtime.partition}: {problem}")
        if found.next_entry is None:
            self._through(job)
        else:
            job.entry = found.next_entry
            if job.periodic and job.unnoted >= NOTE_BYTES:
                self._note(job)
        return found.bytes

    def _damage(self, job: _Job, text: str) -> None:
        log.error("the scrub found damage: %s", text)
        job.damage.append(text)
        self._metrics.scrub_found_damage()

    def _note(self, job: _Job) -> None:
        job.unnoted = 0
        self._save(Note(job.begun_us, 0, job.names[0], job.entry))

    def _end(self, job: _Job) -> None:
        now_us = self._pump.clock.now_us()
        job.ended_us = now_us
        other = self._ended.pop(job.wanted, job)
        self._ended[job.wanted] = max(other, job, key=lambda ended: ended.begun_us)
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        if not job.periodic:
            return
        self._metrics.scrub_ended(now_us)
        self._save(Note(job.begun_us, now_us))
        log.info("the scrub read %d bytes, and found damage in %d places", job.bytes, len(job.damage))
        if self._period_us:
            self._pump.at(max(min(job.begun_us, now_us) + self._period_us, now_us + 1), self._begin)

    def _save(self, note: Note) -> None:
        raw = msgspec.json.encode(note)
        self._pump.threads.run(self, lambda: self._store.save_note(NOTE, raw), _noted)


def _noted(result: object, error: Exception | None) -> None:
    if error is not None:  # Harmless: after a restart the scrub begins anew.
        log.error("how far the scrub is cannot be noted: %s", error)
