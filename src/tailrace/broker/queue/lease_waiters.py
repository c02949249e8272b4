"""Who waits for something on one partition, and when to look again.

Readers wait for more to be committed; all of them look then. Lease requests that found nothing wait in the
line of their group, and are woken when more is committed, when a command freed something (a nack or expiry
makes messages available, an ack may free a key, a grant or a resume lets them lease), or when a back-off or a
lease is over. Only as many are woken as something was freed for, in order of arrival, so that an ack costs
the same however many wait.

No wake-up is lost: whoever was woken and could not ask passes it on to the next one (`passed`). Whoever asked
and found nothing although something is free passes it on to those who alone may have it (`in_vain`): messages
of a key in flight go to the member that has the key. One that wants only urgent messages and got some lets
the next one of its kind look (`took`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from tailrace.broker.queue.waiting_line import Waiter, WaitingLine
from tailrace.broker.runtime.pump import Timer
from tailrace.core.collections.span_map import count
from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as delivery
from tailrace.core.model.commands import TrimTopic
from tailrace.core.model.identifiers import PRIORITY_DEFAULT
from tailrace.core.selection.lanes import LANES

if TYPE_CHECKING:
    from tailrace.broker.runtime.partition_runtime import PartitionRuntime

GRAIN_US = 1_000
"""At most so often does time alone wake anybody: thousands of back-offs end in each other's company."""
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
"""Commands that may free something for the group that they name. A lease does so when messages lapsed."""
_CHANGES_GROUP = frozenset((inner.Enlist, inner.Delist, inner.GrantTo, inner.PauseLeases, inner.ResetTo))
"""Commands after which whoever waits may have to be told something else."""
_FREES_ALL = frozenset((inner.ExpireLeases, TrimTopic, inner.Sweep))

Action = Callable[[], None]


class LeaseWaiters:
    """The waiting ones of one partition, and the timer for what becomes due."""

    def __init__(self, shard: PartitionRuntime) -> None:
        self._shard = shard
        self._watchers: dict[Action, None] = {}
        self._lines: dict[str, WaitingLine] = {}
        self._freeing: list[tuple[Any, Sequence[Any]]] = []
        """Commands of this turn that may have freed something, with their facts. Requests that were decided
        before them in the same turn come into the line only when the turn is over."""
        self._freed_all = False
        self._leased: dict[str, None] = {}
        """Groups of which somebody was given something, so that lanes may have shares again."""
        self._changed_groups: dict[str, None] = {}
        self._changed = False
        self._timer: Timer | None = None
        self._due_us = _NEVER
        self._fired_us = 0

    # -- readers

    def watch(self, action: Action) -> None:
        """Call once when more is committed."""
        self._watchers[action] = None

    def unwatch(self, action: Action) -> None:
        """Forget a watcher; harmless when it was called already."""
        self._watchers.pop(action, None)

    def _tell_watchers(self) -> None:
        if self._watchers:
            watchers, self._watchers = self._watchers, {}
            for action in watchers:
                action()

    # -- lease requests

    def wait(self, group: str, waiter: Waiter) -> None:
        """It found nothing: it is woken when there may be something for it."""
        line = self._lines.get(group)
        if line is None:
            line = self._lines[group] = WaitingLine()
        line.join(waiter)

    def leave(self, group: str, waiter: Waiter) -> None:
        """It does not wait any more; harmless when it did not."""
        line = self._lines.get(group)
        if line is not None:
            line.leave(waiter)
            if not line:
                del self._lines[group]

    def sharers(self, group: str, waiter: Waiter) -> int:
        """Among how many members what is free is to be split when one of them asks."""
        line = self._lines.get(group)
        return 1 if line is None else line.sharers(waiter.member, waiter.above)

    def share(self, group: str, waiter: Waiter) -> int:
        """How many messages somebody who asks now may be given, at the most."""
        return -(-self._free(group) // self.sharers(group, waiter))

    def hungry(self, group: str) -> Collection[str]:
        """The members that wait for whatever there is."""
        line = self._lines.get(group)
        return () if line is None else line.hungry

    def passed(self, group: str) -> None:
        """Somebody was woken and could not ask."""
        self._rouse(group, 1)

    def in_vain(self, group: str, waiter: Waiter) -> None:
        """Somebody was woken and found nothing."""
        line = self._lines.get(group)
        if line is not None and len(line) > 1 and self._free(group):
            for member in self._shard.state.queues.takers(group):
                for other in line.of_member(member) if member != waiter.member else ():
                    other.wake(False)

    def took(self, group: str, waiter: Waiter) -> None:
        """Somebody was woken and was given something."""
        if waiter.above < LANES:
            self._rouse(group, 1)

    def _free(self, group: str) -> int:
        shard = self._shard
        time_us = max(shard.time_us(), shard.state.append_time_us)
        return shard.state.queues.free(group, shard.end_offset, time_us)

    def _rouse(self, group: str, many: int) -> None:
        """Wake those for whom so many messages may be."""
        line = self._lines.get(group)
        if line is None:
            return
        left = min(many, self._free(group))
        while left > 0 and (waiter := line.next(LANES)) is not None:
            left -= waiter.wake(True)
        if left > 0 and line.choosy:
            self._rouse_choosy(group, line)

    def _rouse_all(self) -> None:
        """Wake those for whom there is something, in all groups."""
        for group in list(self._lines):
            self._rouse(group, _ALL)

    def _rouse_choosy(self, group: str, line: WaitingLine) -> None:
        """Wake one of those that want urgent messages only; the next one when that was given some."""
        urgent = self._shard.state.queues.laned(group)
        for above in range(LANES - 1, 0 if urgent else PRIORITY_DEFAULT, -1):
            while (waiter := line.next(above)) is not None:
                if waiter.wake(True):
                    return

    def wake_all(self) -> None:
        """The state is another one, or there is none: everybody looks."""
        self._tell_watchers()
        for group in list(self._lines):
            self._wake_group(group)

    def _wake_group(self, group: str) -> None:
        line = self._lines.get(group)
        for waiter in line.all_idle() if line is not None else ():
            waiter.wake(False)

    # -- what happens

    def committed(self, messages: int) -> None:
        """More messages can be read."""
        self._tell_watchers()
        for group in list(self._lines) if self._lines else ():
            self._rouse(group, messages)

    def decided(self, command: Any, facts: Sequence[Any], soft: bool) -> None:
        """Facts of a command were applied."""
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
        elif kind in _FREES_ALL:
            self._changed = self._freed_all = True
        elif kind is delivery.Extend:
            self._changed = True

    def _freed_by(self, command: Any, facts: Sequence[Any]) -> int:
        """For how many requests there may be something. An ack frees nothing but keys, the next one of
        each."""
        if type(command) is not delivery.Ack:
            return sum(count(fact.spans) for fact in facts)
        policy = self._shard.state.queues.policy(command.group)
        if policy is None or policy.ordering == "none":
            return 0
        return sum(count(spans) for fact in facts for _, spans in fact.leases)

    def turned(self) -> None:
        """A turn is over and its replies to leases are out: wake whom it freed something for, and see what is
        due next."""
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
        if self._leased:
            leased, self._leased = self._leased, {}
            for group in leased:
                line = self._lines.get(group)
                if line is not None and line.choosy and self._shard.state.queues.held_back(group):
                    self._rouse_choosy(group, line)
        if self._changed_groups:
            groups, self._changed_groups = self._changed_groups, {}
            for group in groups:
                if self._shard.credit is not None:
                    self._shard.credit.changed(group)
                self._wake_group(group)
        self.arm()

    def arm(self) -> None:
        """Set the timer for what is due next; one that is set for an earlier moment stays."""
        time_us = self._shard.state.queues.next_due_us()
        if time_us is None:
            return
        due_us = self._shard.clock.steady_us(time_us)
        if due_us <= self._fired_us:
            due_us = self._fired_us + RETRY_US  # It could not be done then: a frame has to be read for it.
        else:
            due_us = max(due_us, self._fired_us + GRAIN_US)
        if due_us < self._due_us:
            if self._timer is not None:
                self._timer.cancel()
            self._due_us = due_us
            self._timer = self._shard.pump.at(due_us, self._due)

    def _due(self, now_us: int) -> None:
        self._timer, self._due_us, self._fired_us = None, _NEVER, now_us
        shard = self._shard
        if shard.fault is None:
            for group, member in shard.state.queues.overdue(shard.clock.time_us(now_us)):
                shard.overslept(group, member)
            self._changed = True  # What is due after that is looked for when the turn is over.
            # In front of the commands of those who are woken.
            shard.submit(inner.ExpireLeases(), b"", _expired)
            self._rouse_all()

    def stop(self) -> None:
        """The partition is closed or gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _expired(reply: object, parts: object) -> None:
    """Nobody waits for it. When it is refused, the partition is closed; it comes again when it opens."""


class Late:
    """A command that is made only when its turn has come, from what is known then; None: not any more."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
