"""The book of lease requests: those under way, their numbers, the ids of leases, and who was served last."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Protocol

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.credit_waiters import CreditWaiter
from tailrace.broker.queue.hunger import Hunger
from tailrace.broker.runtime.pump import Pump
from tailrace.core.model.access import Caller
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Lease
from tailrace.core.process.credit_process import CreditProcess
from tailrace.ports import Gate

_SERVED_MAX = 10_000
_IDS = 512


class LeaseJob(Protocol):
    """A lease request under way."""

    request: Lease

    @property
    def caller(self) -> Caller:
        """Who waits for messages."""
        ...

    def supersede(self, newer: LeaseJob) -> None:
        """The member has sent another request: ask no more, and answer with what there is."""
        ...

    def begin_late(self) -> None:
        """The request before this one is over: begin, unless this one is over as well."""
        ...

    def evict(self, refusal: Refusal) -> None:
        """The member is gone: refuse, and give back the messages leased for it."""
        ...

    def hang_up(self) -> None:
        """Answer with nothing."""
        ...

    def give_up(self) -> None:
        """The broker closes: answer with nothing."""
        ...


class InFlightCeiling(Protocol):
    """Quotas, as leases see them."""

    @property
    def active(self) -> bool:
        """Whether there is any."""
        ...

    def in_flight_left(self, caller: Caller, group: str, member: str) -> int | None:
        """How many more messages a member may lease as far as its caller is concerned; None: any number."""
        ...


class LeaseBook:
    """What all lease requests of a node share."""

    def __init__(
        self,
        pump: Pump,
        metrics: Metrics,
        credit: CreditProcess[CreditWaiter],
        hunger: Hunger,
        entropy: Callable[[int], bytes],
        *,
        ceiling: InFlightCeiling,
    ) -> None:
        self.pump = pump
        self.ceiling = ceiling
        self.metrics = metrics
        self.credit = credit
        self.hunger = hunger
        self.jobs: dict[LeaseJob, None] = {}
        """Lease requests under way, in order of arrival."""
        self.latest: dict[tuple[Gate, str, str, str], LeaseJob] = {}
        """By receiver, topic, group and member: the latest request under way."""
        self._number = 0
        self._entropy = entropy
        self._ids: Iterator[int] = iter(())
        self._served: dict[tuple[str, str, str], int] = {}

    def after_served(self, request: Lease) -> int:
        """Index of the partition to ask first: the one after the partition served last."""
        served = self._served.get((request.topic, request.group, request.member), -1)
        for index, (partition, _) in enumerate(request.partitions):
            if partition == served:
                return (index + 1) % len(request.partitions)
        return 0

    def served(self, request: Lease, partition: int) -> None:
        """A member got messages of a partition: next time the others come first."""
        if len(request.partitions) > 1:
            if len(self._served) >= _SERVED_MAX:
                self._served.clear()  # Only fairness depends on it, for one round.
            self._served[request.topic, request.group, request.member] = partition

    def new_lease(self) -> int:
        """A random lease id, never 0."""
        for number in self._ids:
            if number:
                return number
        self._ids = iter(struct.unpack(f"<{_IDS}Q", self._entropy(8 * _IDS)))
        return self.new_lease()

    def next_number(self) -> int:
        """The number of a new request; later requests have greater numbers."""
        self._number += 1
        return self._number
