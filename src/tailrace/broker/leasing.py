"""The verbs of queues: leasing messages, settling them, and the places of groups."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tailrace.broker.delivery import Gate
from tailrace.broker.host import Topics
from tailrace.broker.lease_job import LeaseJob
from tailrace.broker.metrics import Metrics
from tailrace.broker.pump import Pump
from tailrace.broker.shard import NOTHING, Shard
from tailrace.core.commands import Done, Offsets, Reply
from tailrace.core.delivery_commands import (
    Ack,
    Commit,
    Committed,
    Extend,
    Lease,
    Nack,
    Reject,
    Reopen,
    SettleOffsets,
)
from tailrace.core.inner_commands import MoveCursor
from tailrace.core.model import Refusal
from tailrace.errors import InvalidRequest, NotFound
from tailrace.format.frame import Buffer
from tailrace.ports import Respond

PARTITIONS_MAX = 10_000
COUNT_MAX = 100_000
LEASES_MAX = 10_000
SPANS_MAX = 200_000
LEASE_MS_MAX = 12 * 3_600_000
DELAY_MS_MAX = 365 * 24 * 3_600_000
NAME_MAX = 256
ERROR_MAX = 1024
REASONS = ("rejected", "poison", "backpressure")
_SERVED_MAX = 10_000
_IDS = 512
_OFFSET_END = 1 << 62


class Leasing:
    """The part of the gateway that clients of queues speak to."""

    def __init__(
        self, topics: Topics, pump: Pump, metrics: Metrics, entropy: Callable[[int], bytes] = os.urandom
    ) -> None:
        self.topics = topics
        self.pump = pump
        self.metrics = metrics
        self.jobs: set[LeaseJob] = set()
        self._entropy = entropy
        self._ids: Iterator[int] = iter(())
        self._served: dict[tuple[str, str, str], int] = {}
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {
            Lease: self._lease,
            Ack: self._ack,
            Nack: self._nack,
            Reject: self._reject,
            Extend: self._extend,
            Commit: self._commit,
            Committed: self._committed,
            Reopen: self._spans,
            SettleOffsets: self._spans,
        }

    def close(self) -> None:
        """Tell those that wait that there is nothing for them."""
        for job in list(self.jobs):
            job.give_up()

    def _shard(self, topic: str, partition: int) -> Shard:
        shards = self.topics.get(topic).shards
        if not 0 <= partition < len(shards):
            raise NotFound(f"topic {topic!r} has partitions 0 to {len(shards) - 1}, not {partition}")
        shard = shards[partition]
        if not shard.machine.delivers:
            raise InvalidRequest(f"topic: {topic!r} is internal and has no messages to lease")
        return shard

    # -- leases

    def _lease(self, request: Lease, body: Buffer, respond: Respond, gate: Gate) -> None:
        places = request.partitions
        if not 1 <= len(places) <= PARTITIONS_MAX:
            raise InvalidRequest(f"partitions: 1 to {PARTITIONS_MAX}, not {len(places)}")
        if len(places) > 1 and len({partition for partition, _ in places}) < len(places):
            raise InvalidRequest("partitions: one is listed twice")
        if not 1 <= request.count_max <= COUNT_MAX:
            raise InvalidRequest(f"count_max: 1 to {COUNT_MAX}, not {request.count_max}")
        if request.bytes_max < 1:
            raise InvalidRequest(f"bytes_max: at least 1, not {request.bytes_max}")
        if not 1 <= len(request.member) <= NAME_MAX:
            raise InvalidRequest(f"member: 1 to {NAME_MAX} characters, not {len(request.member)}")
        if request.lease_ms is not None:
            _within(request.lease_ms, "lease_ms", 1, LEASE_MS_MAX)
        shards = [self._shard(request.topic, partition) for partition, _ in places]
        first = 0
        if len(places) > 1:
            first = self._after_served(request)
        LeaseJob(request, shards, first, self, gate, respond).start()

    def _after_served(self, request: Lease) -> int:
        """Which of its partitions to ask first: the one behind that which was served last."""
        served = self._served.get((request.topic, request.group, request.member), -1)
        for index, (partition, _) in enumerate(request.partitions):
            if partition == served:
                return (index + 1) % len(request.partitions)
        return 0

    def served(self, request: Lease, partition: int) -> None:
        """A member was given messages of a partition: next time the others come first."""
        if len(request.partitions) > 1:
            if len(self._served) >= _SERVED_MAX:
                self._served.clear()  # Only fairness depends on it, for one round.
            self._served[request.topic, request.group, request.member] = partition

    def new_lease(self) -> int:
        """A random number that is never 0."""
        for number in self._ids:
            if number:
                return number
        self._ids = iter(struct.unpack(f"<{_IDS}Q", self._entropy(8 * _IDS)))
        return self.new_lease()

    def credit(self, request: Lease) -> int:
        """How many messages the member may still be given: the limits count over all partitions."""
        shards = self.topics.get(request.topic).shards
        group, member = request.group, request.member
        policy = shards[0].state.queues.policy(group)
        if policy is None:
            return request.count_max  # The partition itself refuses.
        of_member = of_group = 0
        for shard in shards:
            mine, everybodys = shard.state.queues.in_flight(group, member)
            of_member += mine
            of_group += everybodys
        credit: int = min(policy.in_flight_max - of_member, policy.group_in_flight_max - of_group)
        return credit

    # -- settling

    def _ack(self, request: Ack, body: Buffer, respond: Respond, gate: Gate) -> None:
        if not 1 <= len(request.leases) <= LEASES_MAX:
            raise InvalidRequest(f"leases: 1 to {LEASES_MAX}, not {len(request.leases)}")
        for _, spans in request.leases:
            check_spans(spans)
        self._shard(request.topic, request.partition).submit(request, b"", respond)

    def _nack(self, request: Nack, body: Buffer, respond: Respond, gate: Gate) -> None:
        if request.delay_ms is not None:
            _within(request.delay_ms, "delay_ms", 0, DELAY_MS_MAX)
        if len(request.error) > ERROR_MAX:
            raise InvalidRequest(f"error: at most {ERROR_MAX} characters, not {len(request.error)}")
        self._spans(request, body, respond, gate)

    def _reject(self, request: Reject, body: Buffer, respond: Respond, gate: Gate) -> None:
        if request.reason not in REASONS:
            raise InvalidRequest(f"reason: one of {', '.join(REASONS)}, not {request.reason[:80]!r}")
        if len(request.error) > ERROR_MAX:
            raise InvalidRequest(f"error: at most {ERROR_MAX} characters, not {len(request.error)}")
        self._spans(request, body, respond, gate)

    def _spans(
        self, request: Nack | Reject | Reopen | SettleOffsets, body: Buffer, respond: Respond, gate: Gate
    ) -> None:
        check_spans(request.spans)
        self._shard(request.topic, request.partition).submit(request, b"", respond)

    def _extend(self, request: Extend, body: Buffer, respond: Respond, gate: Gate) -> None:
        _within(request.lease_ms, "lease_ms", 1, LEASE_MS_MAX)
        if not 1 <= len(request.leases) <= LEASES_MAX:
            raise InvalidRequest(f"leases: 1 to {LEASES_MAX}, not {len(request.leases)}")
        self._shard(request.topic, request.partition).submit(request, b"", respond)

    # -- places of groups

    def _commit(self, request: Commit, body: Buffer, respond: Respond, gate: Gate) -> None:
        if not 1 <= len(request.positions) <= PARTITIONS_MAX:
            raise InvalidRequest(f"positions: 1 to {PARTITIONS_MAX}, not {len(request.positions)}")
        targets = []
        for partition, generation, offset in request.positions:
            shard = self._shard(request.topic, partition)
            if not 0 <= offset <= shard.end_offset:
                raise InvalidRequest(f"positions: offset {offset} of partition {partition} is not in the log")
            targets.append((shard, MoveCursor(request.group, request.member, generation, offset)))
        collect = _Collected(
            len(targets), lambda replies: respond(_first_refusal(replies) or Done(), NOTHING)
        )
        for index, (shard, command) in enumerate(targets):
            shard.submit(command, b"", collect.taker(index))

    def _committed(self, request: Committed, body: Buffer, respond: Respond, gate: Gate) -> None:
        shards = self.topics.get(request.topic).shards

        def over(replies: Sequence[Any]) -> None:
            offsets = [reply.offsets[0] for reply in replies if isinstance(reply, Offsets)]
            respond(_first_refusal(replies) or Offsets(offsets), NOTHING)

        collect = _Collected(len(shards), over)
        for index, shard in enumerate(shards):
            place = shard.state.queues.committed(request.group)
            shard.answer(collect.taker(index), Offsets([-1 if place is None else place]))


class _Collected:
    """Replies of several partitions to one request."""

    def __init__(self, count: int, over: Callable[[Sequence[Any]], None]) -> None:
        self._replies: list[Any] = [None] * count
        self._left = count
        self._over = over

    def taker(self, index: int) -> Respond:
        """Who takes the reply of one of them."""

        def take(reply: Reply, parts: Sequence[Buffer]) -> None:
            self._replies[index] = reply
            self._left -= 1
            if not self._left:
                self._over(self._replies)

        return take


def _first_refusal(replies: Sequence[Any]) -> Refusal | None:
    return next((reply for reply in replies if type(reply) is Refusal), None)


def check_spans(spans: Sequence[int]) -> None:
    """Refuse what is not a list of ascending spans of offsets."""
    if not 2 <= len(spans) <= SPANS_MAX or len(spans) % 2:
        raise InvalidRequest(f"spans: pairs of first offset and end are needed, not {len(spans)} numbers")
    if spans[0] < 0 or spans[-1] >= _OFFSET_END:
        raise InvalidRequest(f"spans: {spans[0]} to {spans[-1]} are no offsets")
    if len(spans) == 2:
        if spans[0] >= spans[1]:
            raise InvalidRequest(f"spans: [{spans[0]}, {spans[1]}) is empty")
        return
    before = -1
    for index, bound in enumerate(spans):
        if bound < before or (index % 2 and bound == before):
            raise InvalidRequest(f"spans: they ascend and none is empty, but {bound} follows {before}")
        before = bound


def _within(value: int, name: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name}: {low} to {high}, not {value}")
