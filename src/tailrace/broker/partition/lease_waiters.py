"""Waiters of one partition: readers and lease requests that found nothing, and the timer that wakes them.

Readers wait for more to be committed, and all of them look then. Lease requests wait in the line of their
group (`waiting_line`). Waking all of them would make an ack more expensive the more members wait, so only as
many are woken as there may be messages for, in order of arrival:

    event                                                   requests that are woken
    n messages are committed                                n, of each group
    messages are given back, nacked, rejected, evicted …    one per message
    an ack                                                  none; with ordered keys, one per message
    back-offs are over, of messages that all may have       one per message
    a lease has timed out, a trim                           as many as messages are free
    a grant, a reset, a pause or its end, new options       all of the group
    the state is another one, or lost                       all

and never more than messages are free. Suppose r1, r2 and r3 of three members wait, and two messages are
committed:

    r1 and r2 are woken, r3 is not
    r1 asks: 2 messages are free, 3 members wait: its share is 1. It gets 1 and leaves the line
    r2 asks: 1 message is free, 2 members wait: its share is 1. It gets 1 and leaves the line

No wake-up may be lost, or a message would lie free while members wait:

    `passed`    a woken request cannot ask (no room, no credit, answered just now): the next one is woken
    `in_vain`   it asked and found nothing, though something is free: those are woken that alone may have it,
                for messages of a key in flight belong to the member that has the key
    `took`      it wanted only urgent messages and got some: the next one of its kind is woken

Commands of a turn are noted as they are decided (`decided`) and acted on when the turn is over (`turned`):
requests that were decided in the same turn and found nothing are in the line by then.

One timer per partition fires when the first lease times out or the first back-off ends. It submits
`ExpireLeases`, and wakes those who can have what became free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from tailrace.broker.partition.hot_tail import HotTail
from tailrace.broker.partition.waiting_line import Waiter, WaitingLine
from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.core.collections.span_map import count
from tailrace.core.log_head import LogHead
from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as delivery
from tailrace.core.model.commands import TrimTopic
from tailrace.core.model.identifiers import PRIORITY_DEFAULT
from tailrace.core.partition import Partition
from tailrace.core.partition_clock import PartitionClock
from tailrace.core.queue.group_queues import GroupQueues
from tailrace.core.selection.lanes import LANES
from tailrace.format.frame import Buffer
from tailrace.ports import Respond

GRAIN_US = 1_000
"""Least time between two firings of the timer: thousands of back-offs that end together are one event."""
RETRY_US = 100_000
_NEVER = 1 << 62
_ALL = 1 << 62

_FREES_SOME = frozenset(
    (
        delivery.Ack,
        delivery.Nack,
        delivery.GiveBack,
        delivery.RejectMessages,
        delivery.Reopen,
        delivery.SettleOffsets,
        inner.EvictMember,
        inner.BuryDone,
        inner.LeaseRun,
        inner.HoldRun,
    )
)
"""Commands that may free messages of the group that they name; a lease does when it finds expired ones."""
_CHANGES_GROUP = frozenset((inner.Enlist, inner.Delist, inner.GrantTo, inner.PauseLeases, inner.ResetTo))
"""Commands after which waiting requests may get another answer."""
_FREES_ALL = frozenset((TrimTopic, inner.Sweep))

Action = Callable[[], None]


class WaitersTell(NamedTuple):
    """Who hears of what waiters notice."""

    submit: Callable[[Any, Buffer, Respond], None]
    """Queue a command for the next turn."""
    overslept: Callable[[str, str], None]
    """A lease of this group and member has timed out; called before that is decided."""
    limits: Callable[[str], None]
    """The limits of messages in flight of this group may have changed."""


class LeaseWaiters:
    """The waiters of one partition, and the timer for leases and back-offs that end."""

    def __init__(self, pump: Pump, well: Callable[[], bool], tell: WaitersTell) -> None:
        self._pump = pump
        self._well = well
        """Whether the partition takes commands."""
        self._tell = tell
        self._queues: GroupQueues
        self._head: LogHead
        self._tail: HotTail
        self._clock: PartitionClock
        self._watchers: dict[Action, None] = {}
        self._lines: dict[str, WaitingLine] = {}
        self._freeing: list[tuple[Any, Sequence[Any]]] = []
        """Commands of this turn that may have freed messages, with their facts."""
        self._freed_all = False
        self._time_passed = False
        self._leased: dict[str, None] = {}
        """Groups that leased messages in this turn, so that lanes may have shares again."""
        self._changed_groups: dict[str, None] = {}
        self._changed = False
        self._timer: Timer | None = None
        self._due_us = _NEVER
        self._fired_us = 0

    def adopt(self, state: Partition, tail: HotTail, clock: PartitionClock) -> None:
        """The state of the partition is another one."""
        self._queues, self._head, self._tail, self._clock = state.queues, state.head, tail, clock

    # -- readers

    def watch(self, action: Action) -> None:
        """Call `action` once when more is committed."""
        self._watchers[action] = None

    def unwatch(self, action: Action) -> None:
        """Forget a watcher; harmless if it was called already."""
        self._watchers.pop(action, None)

    def _tell_watchers(self) -> None:
        if self._watchers:
            watchers, self._watchers = self._watchers, {}
            for action in watchers:
                action()

    # -- lease requests

    def wait(self, group: str, waiter: Waiter) -> None:
        """Put a request that found nothing into the line of its group."""
        line = self._lines.get(group)
        if line is None:
            line = self._lines[group] = WaitingLine()
        line.join(waiter)

    def leave(self, group: str, waiter: Waiter) -> None:
        """Take a request out of the line; harmless if it is not in it."""
        line = self._lines.get(group)
        if line is not None:
            line.leave(waiter)
            if not line:
                del self._lines[group]

    def sharers(self, group: str, waiter: Waiter) -> int:
        """The number of members that share the free messages when this one asks."""
        line = self._lines.get(group)
        return 1 if line is None else line.sharers(waiter.member, waiter.above)

    def nothing_above(self, group: str, above: int) -> bool:
        """Whether surely no message is more urgent than this lane, now: who wants such may wait unasked."""
        queues = self._queues
        usual = above <= PRIORITY_DEFAULT and self._well() and queues.policy(group) is not None
        return usual and not queues.laned(group)

    def share(self, group: str, waiter: Waiter) -> int:
        """The most messages that a request may get if it asks now."""
        return -(-self._free(group) // self.sharers(group, waiter))

    def hungry(self, group: str) -> Collection[str]:
        """The members that wait for messages of any lane."""
        line = self._lines.get(group)
        return () if line is None else line.hungry

    def passed(self, group: str) -> None:
        """A woken request could not ask: wake the next one."""
        self._rouse(group, 1)

    def in_vain(self, group: str, waiter: Waiter) -> None:
        """A woken request found nothing: wake the members that alone may have the free messages."""
        line = self._lines.get(group)
        if line is not None and len(line) > 1 and self._free(group):
            for member in self._queues.takers(group):
                for other in line.of_member(member) if member != waiter.member else ():
                    other.wake(False)

    def took(self, group: str, waiter: Waiter) -> None:
        """A woken request got messages: if it wanted urgent ones only, wake the next of its kind."""
        if waiter.above < LANES:
            self._rouse(group, 1)

    def _free(self, group: str) -> int:
        return self._queues.free(group, self._tail.end_offset, self._time_us())

    def _time_us(self) -> int:
        return max(self._clock.time_us(self._pump.clock.now_us()), self._head.append_time_us)

    def _rouse(self, group: str, many: int) -> None:
        """Wake requests for `many` messages, and for no more than are free."""
        line = self._lines.get(group)
        if line is None:
            return
        left = min(many, self._free(group))
        while left > 0 and (waiter := line.next(LANES)) is not None:
            left -= waiter.wake(True)
        if left > 0 and line.choosy:
            self._rouse_choosy(group, line)

    def _rouse_all(self) -> None:
        """Wake requests of all groups for all free messages."""
        for group in list(self._lines):
            self._rouse(group, _ALL)

    def _rouse_due(self) -> None:
        """Wake requests for messages that are available because time passed. Not for all that is free: that
        includes what waits behind a key in flight, and with a hot key all would ask in vain each time."""
        for group, many in self._queues.came_due(self._time_us()).items():
            if many != 0:
                self._rouse(group, _ALL if many is None else many)

    def _rouse_choosy(self, group: str, line: WaitingLine) -> None:
        """Wake one request that wants urgent messages only; `took` wakes the next."""
        urgent = self._queues.laned(group)
        for above in range(LANES - 1, 0 if urgent else PRIORITY_DEFAULT, -1):
            while (waiter := line.next(above)) is not None:
                if waiter.wake(True):
                    return

    def wake_all(self) -> None:
        """Wake everybody: the state was replaced or dropped."""
        self._tell_watchers()
        for group in list(self._lines):
            self._wake_group(group)

    def _wake_group(self, group: str) -> None:
        line = self._lines.get(group)
        for waiter in line.all_idle() if line is not None else ():
            waiter.wake(False)

    # -- events

    def committed(self, messages: int) -> None:
        """More messages were committed."""
        self._tell_watchers()
        for group in list(self._lines) if self._lines else ():
            self._rouse(group, messages)

    def decided(self, command: Any, facts: Sequence[Any], soft: bool) -> None:
        """Note a command whose facts were applied, until the turn is over."""
        kind = type(command)
        if kind in _FREES_SOME:
            self._changed = True
            if soft and kind is inner.LeaseRun:
                self._leased[command.group] = None
            else:
                self._freeing.append((command, facts))
        elif kind in _CHANGES_GROUP:
            self._changed = True
            self._changed_groups[command.group] = None
        elif kind is inner.ExpireLeases:
            self._changed = self._time_passed = True
            self._freed_all = self._freed_all or bool(facts)
        elif kind in _FREES_ALL:
            self._changed = self._freed_all = True
        elif kind is delivery.Extend:
            self._changed = True

    def _freed_by(self, command: Any, facts: Sequence[Any]) -> int:
        """The number of messages that a command may have freed. An ack frees nothing but keys: the next
        message of each."""
        if type(command) is not delivery.Ack:
            return sum(count(fact.spans) for fact in facts)
        policy = self._queues.policy(command.group)
        if policy is None or policy.ordering == "none":
            return 0
        return sum(count(spans) for fact in facts for _, spans in fact.leases)

    def turned(self) -> None:
        """A turn is over and its replies to leases are out: wake requests for the messages that it freed, and
        set the timer anew."""
        if not self._changed:
            return
        self._changed = False
        if self._freeing:
            freeing, self._freeing = self._freeing, []
            freed: dict[str, int] = {}
            for command, facts in freeing:
                if command.group in self._lines:
                    freed[command.group] = freed.get(command.group, 0) + self._freed_by(command, facts)
            for group, many in freed.items():
                self._rouse(group, many)
        if self._freed_all:
            self._freed_all = False
            self._rouse_all()
        if self._time_passed:
            self._time_passed = False
            self._rouse_due()
        if self._leased:
            leased, self._leased = self._leased, {}
            for group in leased:
                line = self._lines.get(group)
                if line is not None and line.choosy and self._queues.held_back(group):
                    self._rouse_choosy(group, line)
        if self._changed_groups:
            groups, self._changed_groups = self._changed_groups, {}
            for group in groups:
                self._tell.limits(group)
                self._wake_group(group)
        self.arm()

    def arm(self) -> None:
        """Set the timer for the next lease or back-off that ends, unless it is set for an earlier time."""
        time_us = self._queues.next_due_us()
        if time_us is None:
            return
        due_us = self._clock.steady_us(time_us)
        if due_us <= self._fired_us:
            due_us = self._fired_us + RETRY_US  # It was due then and is still: a frame has to be read first.
        else:
            due_us = max(due_us, self._fired_us + GRAIN_US)
        if due_us < self._due_us:
            if self._timer is not None:
                self._timer.cancel()
            self._due_us = due_us
            self._timer = self._pump.at(due_us, self._due)

    def _due(self, now_us: int) -> None:
        self._timer, self._due_us, self._fired_us = None, _NEVER, now_us
        if self._well():
            for group, member in self._queues.overdue(self._clock.time_us(now_us)):
                self._tell.overslept(group, member)
            self._changed = True  # `turned` sets the timer for what is due after this.
            # Submitted before the commands of the requests that are woken below.
            self._tell.submit(inner.ExpireLeases(), b"", _expired)
            self._rouse_due()

    def stop(self) -> None:
        """Stop the timer: the partition is closed or deleted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _expired(reply: object, parts: object) -> None:
    """Ignore the reply. A refusal means that the partition is closed; opening it sets the timer again."""
