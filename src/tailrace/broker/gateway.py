"""The gateway: each request is checked and routed to its partition or to the catalog, or refused.

Whatever a request contains, the answer is a reply or a refusal of that request alone. The gateway never
raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from tailrace.broker.access.audit import Audit
from tailrace.broker.access.authority import FILTERED, Authority
from tailrace.broker.access.quotas import Quotas
from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.queue.fetch_request import FetchRequest, OpenGate
from tailrace.broker.queue.time_lookup import locate
from tailrace.broker.runtime.framing import publish_batch
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.broker.topics import Topics
from tailrace.broker.upkeep.space_watch import SpaceWatch
from tailrace.core.access.audited_requests import AUDITED
from tailrace.core.model.access import Caller
from tailrace.core.model.commands import (
    EARLIEST,
    LATEST,
    AlterTopic,
    ClaimProducer,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    Fetch,
    FindOffsets,
    ListTopics,
    Offsets,
    Ping,
    Pong,
    Publish,
    Reply,
    Request,
    TrimTopic,
)
from tailrace.core.model.group_commands import Heartbeat
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import StageRows
from tailrace.errors import Denied, InvalidRequest, TailraceError, Unauthenticated, Unavailable
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.format.small import measure
from tailrace.ports import Gate, PartitionLog, Respond, Verb

log = logging.getLogger("tailrace.gateway")
FETCH_PARTITIONS_MAX = 10_000


_TAKES_SPACE = frozenset((Publish, StageRows, CreateTopic))
"""Refused while the disk is full."""
_GUARDED = FILTERED | {Heartbeat}
"""Their answers depend on rights at the time of the answer."""


class _OpenRequest:
    """A request that may wait for long, and is answered once: by its verb, or because rights have changed."""

    def __init__(
        self, caller: Caller, request: Request, respond: Respond, over: Callable[[_OpenRequest], None]
    ) -> None:
        self.caller = caller
        self.request = request
        self._respond: Respond | None = respond
        self._over = over

    def answer(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        """Answer, unless that was done before."""
        respond, self._respond = self._respond, None
        if respond is not None:
            self._over(self)
            respond(reply, parts)

    def evict(self, refusal: Refusal) -> None:
        """The caller may not wait for this any longer."""
        self.answer(refusal, NOTHING)


class Gateway:
    """`BrokerVerbs` of one node. All methods run on the pump's thread."""

    def __init__(
        self,
        topics: Topics,
        pump: Pump,
        metrics: Metrics,
        space: SpaceWatch,
        authority: Authority,
        parts: Sequence[VerbPart] = (),
        *,
        quotas: Quotas,
        audit: Audit,
    ) -> None:
        self._topics = topics
        self._space = space
        self._quotas = quotas
        self._audit = audit
        self._pump = pump
        self._metrics = metrics
        self._authority = authority
        self._closing = False
        self._gate = OpenGate()
        self._jobs: dict[FetchRequest, None] = {}
        self._open: dict[_OpenRequest, None] = {}
        """Long polls of which no other part of the broker can be told to end them."""
        verbs: dict[type[Any], Verb] = {
            Ping: self._ping,
            Publish: self._publish,
            Fetch: self._fetch,
            FindOffsets: self._find,
            ClaimProducer: self._claim,
            TrimTopic: self._trim,
            CreateTopic: self._catalog,
            AlterTopic: self._catalog,
            DeleteTopic: self._catalog,
            ListTopics: self._list,
            DescribeTopic: self._describe,
        }
        for part in parts:
            verbs.update(part.verbs)
        self._verbs = {
            kind: (str(kind.__struct_config__.tag), kind in AUDITED, verb) for kind, verb in verbs.items()
        }
        self.gather = pump.gather

    def submit(self, request: Request, body: Buffer, respond: Respond, gate: Gate | None = None) -> None:
        """Take a request; `respond` is called exactly once."""
        gate = self._gate if gate is None else gate
        try:
            caller, quotas = gate.caller, self._quotas
            if quotas.active:
                quotas.charge(caller, request, body)
                respond = quotas.metered(caller, respond)
            if caller.proof != "owner":
                refusal = self._authority.refusal(caller, request)
                if refusal is not None:
                    self._metrics.refused(refusal.code)
                    self._audit.refused(caller, request, refusal)
                    respond(refusal, NOTHING)
                    return
                if type(request) in _GUARDED:
                    respond = self._guarded(caller, request, respond)
            if self._closing:
                raise Unavailable("the broker is shutting down; connect again in a moment")
            name, audited, verb = self._verbs[type(request)]
            self._metrics.requested(name)
            if audited:
                respond = self._audit.watched(caller, request, respond)
            if quotas.active:
                quotas.check_room(request)
            if self._pump.full and type(request) in _TAKES_SPACE:
                self._space.refuse()
            verb(request, body, respond, gate)
        except TailraceError as error:
            self._metrics.refused(error.code)
            refusal = refuse(error)
            if isinstance(error, Denied | Unauthenticated) and type(request) not in AUDITED:
                self._audit.refused(gate.caller, request, refusal)
            respond(refusal, NOTHING)
        except Exception as error:
            log.exception("request %s failed", type(request).__name__)
            self._metrics.refused("error")
            respond(refuse(error), NOTHING)

    def _guarded(self, caller: Caller, request: Request, respond: Respond) -> Respond:
        """The way of an answer to somebody whose rights are limited, or may be before it leaves."""
        respond = partial(self._show, caller, respond)
        if type(request) in FILTERED:
            return respond
        waiting = _OpenRequest(caller, request, respond, self._answered)
        self._open[waiting] = None
        return waiting.answer

    def _show(self, caller: Caller, respond: Respond, reply: Reply, parts: Sequence[Buffer]) -> None:
        respond(self._authority.visible(caller, reply), parts)

    def _answered(self, waiting: _OpenRequest) -> None:
        self._open.pop(waiting, None)

    def recheck(self) -> None:
        """Rights have changed: refuse the requests that wait and may not be made any more."""
        jobs: list[FetchRequest | _OpenRequest] = [*self._jobs, *self._open]
        for waiting in jobs:
            refusal = self._authority.refusal(waiting.caller, waiting.request)
            if refusal is not None:
                waiting.evict(refusal)

    def close(self) -> None:
        """Refuse new requests, and answer waiting fetches with what there is."""
        self._closing = True
        for job in list(self._jobs):
            job.expire(0)

    def _counted(self, respond: Respond) -> Respond:
        return partial(self._count, respond)

    def _count(self, respond: Respond, reply: Reply, parts: Any) -> None:
        if type(reply) is Refusal:
            self._metrics.refused(reply.code)
        respond(reply, parts)

    # -- messages

    def _ping(self, request: Ping, body: Buffer, respond: Respond, gate: Gate) -> None:
        respond(Pong(), NOTHING)

    def _publish(self, request: Publish, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if frame.crc32c(body) != request.crc:
            raise InvalidRequest("crc: the body does not match its checksum; it was damaged on the way")
        view = measure(body, request.columns, want_keys=runtime.options.key_index)
        runtime.submit(publish_batch(request, view, body), body, respond)

    def _fetch(self, request: Fetch, body: Buffer, respond: Respond, gate: Gate) -> None:
        if not 1 <= len(request.positions) <= FETCH_PARTITIONS_MAX:
            raise InvalidRequest(
                f"positions: 1 to {FETCH_PARTITIONS_MAX} partitions, not {len(request.positions)}"
            )
        if len({partition for partition, _ in request.positions}) < len(request.positions):
            raise InvalidRequest("positions: a partition is listed twice")
        if request.bytes_max < 1:
            raise InvalidRequest(f"bytes_max: at least 1, not {request.bytes_max}")
        runtimes = [self._topics.partition(request.topic, partition) for partition, _ in request.positions]
        job = FetchRequest(
            request, runtimes, self._pump, self._metrics, gate, self._counted(respond), self._over
        )
        self._jobs[job] = None
        job.start()

    def _over(self, job: FetchRequest) -> None:
        self._jobs.pop(job, None)

    def _find(self, request: FindOffsets, body: Buffer, respond: Respond, gate: Gate) -> None:
        host = self._topics.get(request.topic)
        if request.timestamp_us == EARLIEST:
            respond(Offsets([runtime.start_offset for runtime in host.runtimes]), NOTHING)
        elif request.timestamp_us == LATEST:
            respond(Offsets([runtime.latest_offset for runtime in host.runtimes]), NOTHING)
        elif request.timestamp_us < 0:
            raise InvalidRequest(f"timestamp_us: a time, {EARLIEST} or {LATEST}, not {request.timestamp_us}")
        else:
            spans = [(s.log, s.start_offset, s.end_offset, s.latest_offset) for s in host.runtimes]
            work = partial(_located, spans, request.timestamp_us)
            self._pump.threads.read(work, partial(_tell_offsets, respond))

    def _claim(self, request: ClaimProducer, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._topics.partition(request.topic, request.partition).submit(request, b"", respond)

    def _trim(self, request: TrimTopic, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if request.offset > runtime.end_offset:
            raise InvalidRequest(f"offset: {request.offset} is beyond the end, {runtime.end_offset}")
        runtime.submit(request, b"", partial(_trimmed, runtime, respond))

    # -- catalog

    def _catalog(
        self, request: CreateTopic | AlterTopic | DeleteTopic, body: Buffer, respond: Respond, gate: Gate
    ) -> None:
        caller = gate.caller
        if isinstance(request, CreateTopic) and not self._administers(caller, request.name):
            # To make sure that it is there was allowed, because it is; in line behind its deletion it would
            # be made.
            respond(self._topics.describe(request.name), NOTHING)
            return
        self._topics.change(request, self._counted(respond), by=caller.user)

    def _administers(self, caller: Caller, topic: str) -> bool:
        return self._authority.may(caller, "administer-topic", "topic", topic)

    def _list(self, request: ListTopics, body: Buffer, respond: Respond, gate: Gate) -> None:
        respond(self._topics.listing(request.prefix, request.internal), NOTHING)

    def _describe(self, request: DescribeTopic, body: Buffer, respond: Respond, gate: Gate) -> None:
        respond(self._topics.describe(request.name), NOTHING)


class VerbPart(Protocol):
    """A part of the broker that answers some kinds of requests."""

    verbs: dict[type[Any], Verb]


def _located(spans: list[tuple[PartitionLog, int, int, int]], timestamp_us: int) -> list[int]:
    """The offsets of a time in several logs, given with start, end and latest offset; blocking."""
    found = [(locate(log, start, end, timestamp_us), end, latest) for log, start, end, latest in spans]
    return [at if at < end else latest for at, end, latest in found]


def _tell_offsets(respond: Respond, found: Any, error: Exception | None) -> None:
    respond(Offsets(found) if error is None else refuse(error), NOTHING)


def _trimmed(runtime: QueuePartition, respond: Respond, reply: Reply, parts: Any) -> None:
    respond(reply, parts)
    if type(reply) is not Refusal:
        runtime.upkeep.free()
