"""Verbs of queues: lease messages, settle them, read and move the cursors of groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.credit_waiters import CreditWaiter
from tailrace.broker.queue.hunger import Hunger, Tell
from tailrace.broker.queue.lease_book import InFlightCeiling, LeaseBook
from tailrace.broker.queue.lease_request import LeaseRequest
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, together
from tailrace.broker.topics import Topics
from tailrace.core.model.access import Caller
from tailrace.core.model.commands import Done, Offsets, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import EvictMember, MoveCursor
from tailrace.core.model.queue_commands import (
    Ack,
    Commit,
    Committed,
    Extend,
    GiveBack,
    Lease,
    Nack,
    RejectMessages,
)
from tailrace.core.process.credit_process import CreditProcess
from tailrace.core.queue.lease_decision import LEASE_MS_MAX
from tailrace.core.selection.lanes import LANES
from tailrace.errors import Fenced, InvalidRequest
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, Respond

PARTITIONS_MAX = 10_000
COUNT_MAX = 100_000
MEMBER_MAX = 256
ERROR_MAX = 1024
"""Length to which error texts are cut."""


class LeaseVerbs:
    """Answers the requests of consumers."""

    def __init__(
        self,
        topics: Topics,
        pump: Pump,
        metrics: Metrics,
        credit: CreditProcess[CreditWaiter],
        tell: Tell,
        entropy: Callable[[int], bytes] = os.urandom,
        *,
        ceiling: InFlightCeiling,
    ) -> None:
        self.topics = topics
        hunger = Hunger(topics, pump, credit, tell)
        self.book = LeaseBook(pump, metrics, credit, hunger, entropy, ceiling=ceiling)
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {
            Lease: self._lease,
            Ack: self._settle,
            Nack: self._fail,
            GiveBack: self._settle,
            RejectMessages: self._fail,
            Extend: self._settle,
            Commit: self._commit,
            Committed: self._committed,
        }

    def close(self) -> None:
        """Answer all waiting requests with nothing."""
        for job in list(self.book.jobs):
            job.give_up()

    def evict(self, group: str, member: str) -> None:
        """A member is gone: end its waiting requests, so that they take no messages for nobody."""
        refusal = Refusal(Fenced.code, f"{member!r} is no member of group {group!r} any more")
        for job in list(self.book.jobs):
            if job.request.group == group and job.request.member == member:
                job.evict(refusal)

    def recheck(self, refused: Callable[[Caller, Lease], Refusal | None]) -> None:
        """Rights have changed: end the waiting requests that may not be made any more."""
        for job in list(self.book.jobs):
            refusal = refused(job.caller, job.request)
            if refusal is not None:
                job.evict(refusal)

    def overslept(self, group: str, member: str) -> None:
        """A lease of a member has timed out: the member seems to stand still. End its waiting requests, or it
        would get the same message again and hold it for another lease. If it lives, it asks anew."""
        for job in list(self.book.jobs):
            if job.request.group == group and job.request.member == member:
                job.hang_up()

    # -- leases

    def _lease(self, request: Lease, body: Buffer, respond: Respond, gate: Gate) -> None:
        places = request.partitions
        if not 1 <= len(places) <= PARTITIONS_MAX:
            raise InvalidRequest(f"partitions: 1 to {PARTITIONS_MAX}, not {len(places)}")
        if len(places) > 1 and len({partition for partition, _ in places}) < len(places):
            raise InvalidRequest("partitions: one is listed twice")
        if not 0 <= request.count_max <= COUNT_MAX:
            raise InvalidRequest(f"count_max: 0 to {COUNT_MAX}, not {request.count_max}")
        if request.bytes_max < 1:
            raise InvalidRequest(f"bytes_max: at least 1, not {request.bytes_max}")
        if not 1 <= len(request.member) <= MEMBER_MAX:
            raise InvalidRequest(f"member: 1 to {MEMBER_MAX} characters, not {len(request.member)}")
        lease_ms = request.lease_ms
        if lease_ms is not None and not 1 <= lease_ms <= LEASE_MS_MAX:
            raise InvalidRequest(f"lease_ms: 1 to {LEASE_MS_MAX}, not {lease_ms}")
        above = request.above
        if above is not None and not 0 < above < LANES:
            raise InvalidRequest(f"above: 1 to {LANES - 1}, not {above}")
        runtimes = [self.topics.partition(request.topic, partition) for partition, _ in places]
        if request.held is not None:
            for runtime in runtimes:
                evict = EvictMember(request.group, request.member, request.held)
                runtime.submit(evict, b"", lambda reply, parts: None)
        job = LeaseRequest(request, runtimes, self.book, gate, respond)
        job.start(self.book.after_served(request) if len(places) > 1 else 0)

    # -- settling

    def _settle(self, request: Ack | GiveBack | Extend, body: Buffer, respond: Respond, gate: Gate) -> None:
        self.topics.partition(request.topic, request.partition).submit(request, b"", respond)

    def _fail(self, request: Nack | RejectMessages, body: Buffer, respond: Respond, gate: Gate) -> None:
        if len(request.error) > ERROR_MAX:
            request = msgspec.structs.replace(request, error=request.error[:ERROR_MAX])
        self.topics.partition(request.topic, request.partition).submit(request, b"", respond)

    # -- cursors of groups

    def _commit(self, request: Commit, body: Buffer, respond: Respond, gate: Gate) -> None:
        if not 1 <= len(request.positions) <= PARTITIONS_MAX:
            raise InvalidRequest(f"positions: 1 to {PARTITIONS_MAX}, not {len(request.positions)}")
        targets = []
        for partition, generation, offset in request.positions:
            runtime = self.topics.partition(request.topic, partition)
            if not 0 <= offset <= runtime.end_offset:
                raise InvalidRequest(f"positions: offset {offset} of partition {partition} is not in the log")
            targets.append((runtime, MoveCursor(request.group, request.member, generation, offset)))
        collect = _Collected(len(targets), partial(_committed_all, respond))
        for index, (runtime, command) in enumerate(targets):
            runtime.submit(command, b"", partial(collect.take, index))

    def _committed(self, request: Committed, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtimes = self.topics.get(request.topic).runtimes
        collect = _Collected(len(runtimes), partial(_first_offsets, request.topic, respond))
        for index, runtime in enumerate(runtimes):
            first = runtime.first_unsettled(request.group)
            runtime.answer(partial(collect.take, index), Offsets([-1 if first is None else first]))


class _Collected:
    """Collects the replies of several partitions to one request."""

    def __init__(self, count: int, over: Callable[[Sequence[Any]], None]) -> None:
        self._replies: list[Any] = [None] * count
        self._left = count
        self._over = over

    def take(self, index: int, reply: Reply, parts: Sequence[Buffer]) -> None:
        """One partition has replied."""
        self._replies[index] = reply
        self._left -= 1
        if not self._left:
            self._over(self._replies)


def _committed_all(respond: Respond, replies: Sequence[Any]) -> None:
    refusal = next((reply for reply in replies if type(reply) is Refusal), None)
    respond(refusal or Done(), NOTHING)


def _first_offsets(topic: str, respond: Respond, replies: Sequence[Any]) -> None:
    offsets = [reply.offsets[0] for reply in replies if isinstance(reply, Offsets)]
    ill = {index: reply for index, reply in enumerate(replies) if type(reply) is Refusal}
    respond(together(topic, ill) or Offsets(offsets), NOTHING)
