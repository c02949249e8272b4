"""One partition of a lease request: all that the request asks of it, and its place in the line there.

A request has a part for each of its partitions, and no other way to them. A question is asked in a turn of
the partition, and what it asks for is decided when the turn has come:

    the request      the part                     the partition
    ask()       ──▶  submit                  ──▶  its turn: make() asks the request how many are wanted
    decided()   ◀──  reply                   ◀──  leased, nothing there, or refused
    wait()      ──▶  joins the line of the group
    woken()     ◀──  wake()                  ◀──  there may be messages now
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.queue.lease_book import LeaseBook
from tailrace.broker.runtime.turn import Late
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import LeaseRun, RunLeased
from tailrace.core.model.queue_commands import GiveBack, Lease
from tailrace.format.frame import Buffer, Frame
from tailrace.format.gathering import gather


class LeaseAsker(Protocol):
    """A lease request, as its parts see it."""

    request: Lease
    number: int
    above: int
    book: LeaseBook
    bytes_left: int
    """Bytes of messages that are still wanted."""

    def wanted(self, policy: GroupPolicy | None) -> int:
        """The number of messages to ask for now; 0 if the request is over, has enough, or has no credit."""
        ...

    def unasked(self, part: LeasePart) -> None:
        """The turn of a part has come, and nothing was wanted."""
        ...

    def decided(self, part: LeasePart, reply: Any) -> None:
        """A partition has leased messages, has none, or refuses."""
        ...

    def woken(self, part: LeasePart) -> bool:
        """A part was woken; true when the partition is asked."""
        ...


class LeasePart:
    """One partition of a lease request, as a `Waiter` in the line there."""

    __slots__ = (
        *("above", "alone", "asked", "asked_us", "generation", "ill", "job", "member", "number", "partition"),
        *("passing", "roused", "runtime", "waits"),
    )

    def __init__(self, job: LeaseAsker, partition: int, generation: int, runtime: QueuePartition) -> None:
        self.job = job
        self.member = job.request.member
        self.number = job.number
        self.above = job.above
        self.partition = partition
        self.generation = generation
        self.runtime = runtime
        self.asked = True
        """Whether the partition will be asked, or was asked and has not answered."""
        self.asked_us = 0
        """Time of the last question that may have leased something."""
        self.waits = False
        self.roused = False
        """Whether the partition is asked because this waiter was woken."""
        self.passing = False
        self.alone = False
        """Whether the question is for one message that is set apart."""
        self.ill: Refusal | None = None
        """Refusal of a partition whose storage failed."""

    # -- questions

    def ask(self) -> None:
        """Ask the partition in its next turn."""
        self.runtime.submit(Late(self.make), b"", self.reply)

    def make(self) -> LeaseRun | None:
        """The turn has come: ask for as much as is still wanted, of the messages committed by now."""
        job, runtime = self.job, self.runtime
        request = job.request
        count = job.wanted(runtime.policy(request.group))
        if count <= 0:
            job.unasked(self)
            return None
        self.asked_us = job.book.pump.clock.now_us()
        sharers = runtime.wakeups.sharers(request.group, self)
        self.leave_line()  # It takes its share now: of the rest it has none.
        return LeaseRun(
            request.group,
            request.member,
            self.generation,
            job.book.new_lease(),
            count,
            job.bytes_left,
            runtime.end_offset,
            request.lease_ms,
            self.above,
            sharers,
            self.alone,
        )

    def reply(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        """The partition has answered."""
        self.asked = False
        self.job.decided(self, reply)

    def frames(self, leased: RunLeased) -> Sequence[Frame] | int:
        """The leased messages; or an offset whose frame has to be loaded first."""
        cache = self.runtime.cache
        found = cache.frames(leased.spans)
        return found if isinstance(found, int) else gather(found, leased.runs, cache.opened)

    def load(self, offset: int, loaded: Callable[[Exception | None], None]) -> None:
        """Load the frame that holds an offset."""
        self.runtime.cache.load(offset, loaded)

    def give_back(self, leased: RunLeased) -> None:
        """Give back messages that nobody has seen: they are available again, without a counted delivery."""
        request, leases = self.job.request, [(leased.lease, leased.spans)]
        give_back = GiveBack(request.topic, self.partition, request.group, leases)
        self.runtime.submit(give_back, b"", lambda reply, parts: None)

    # -- what is there

    @property
    def gone(self) -> Refusal | None:
        """Set when the topic was deleted."""
        return self.runtime.gone

    def nothing_above(self) -> bool:
        """See `LeaseWaiters.nothing_above`."""
        return self.runtime.wakeups.nothing_above(self.job.request.group, self.above)

    def share(self) -> int:
        """See `LeaseWaiters.share`."""
        return self.runtime.wakeups.share(self.job.request.group, self)

    def apart(self) -> int | None:
        """See `QueuePartition.apart`."""
        return self.runtime.apart(self.job.request.group)

    # -- the line

    def wait(self) -> None:
        """Wait in the line of the group."""
        self.waits = True
        self.runtime.wakeups.wait(self.job.request.group, self)

    def leave_line(self) -> None:
        """Wait there no more."""
        if self.waits:
            self.waits = False
            self.runtime.wakeups.leave(self.job.request.group, self)

    def wake(self, passing: bool) -> bool:
        """Ask again: there may be messages now."""
        self.passing = passing
        return self.job.woken(self)

    def pass_on(self) -> None:
        """If it was woken and cannot use that, wake the next one."""
        roused, self.roused = self.roused, False
        if roused:
            self.runtime.wakeups.passed(self.job.request.group)

    def in_vain(self) -> None:
        """See `LeaseWaiters.in_vain`."""
        self.runtime.wakeups.in_vain(self.job.request.group, self)

    def took(self) -> None:
        """See `LeaseWaiters.took`."""
        self.runtime.wakeups.took(self.job.request.group, self)
