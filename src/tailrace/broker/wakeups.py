"""Who waits for something to be delivered on one partition, and when to look again.

Whoever found nothing to lease waits here, by group. It is woken once, when more is committed, when a command
freed something for its group (an ack frees credit or a key, a nack or expiry makes messages available, a
grant or a resume lets it lease), or when a message's back-off or a lease is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tailrace.broker.pump import Timer
from tailrace.core import delivery_commands as delivery
from tailrace.core import inner_commands as inner
from tailrace.core.commands import TrimTopic

if TYPE_CHECKING:
    from tailrace.broker.shard import Shard

GRAIN_US = 1_000
"""At most so often does time alone wake anybody: thousands of back-offs end in each other's company."""
RETRY_US = 100_000
_NEVER = 1 << 62

_FREES_GROUP = frozenset(
    (
        delivery.Ack,
        delivery.Nack,
        delivery.GiveBack,
        delivery.Reject,
        delivery.Reopen,
        delivery.SettleOffsets,
        inner.Enlist,
        inner.Delist,
        inner.GrantTo,
        inner.EvictMember,
        inner.PauseLeases,
        inner.ResetTo,
        inner.BuryDone,
        inner.LeaseRun,
        inner.HoldRun,
    )
)
"""Commands that may free something for the group that they name. A lease does so when messages lapsed."""
_FREES_ALL = frozenset((inner.ExpireLeases, TrimTopic, inner.Sweep))

Action = Callable[[], None]


class Wakeups:
    """The waiting ones of one partition, and the timer for what becomes due."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._waiting: dict[str, dict[Action, None]] = {}
        self._freed: dict[str, None] = {}
        self._changed = False
        self._timer: Timer | None = None
        self._due_us = _NEVER
        self._fired_us = 0

    def wait(self, group: str, action: Action) -> None:
        """Call once when there may be something for a group."""
        self._waiting.setdefault(group, {})[action] = None

    def leave(self, group: str, action: Action) -> None:
        """Do not call; harmless when it was called already."""
        waiting = self._waiting.get(group)
        if waiting is not None:
            waiting.pop(action, None)
            if not waiting:
                del self._waiting[group]

    def wake_all(self) -> None:
        """More is committed, or the state is another one."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for actions in waiting.values():
                for action in actions:
                    action()

    def decided(self, command: Any, soft: bool) -> None:
        """Facts of a command were applied."""
        kind = type(command)
        if kind in _FREES_GROUP:
            self._changed = True
            if not (soft and kind is inner.LeaseRun) and command.group in self._waiting:
                self._freed[command.group] = None
        elif kind in _FREES_ALL:
            self._changed = True
            self._freed.update(dict.fromkeys(self._waiting))
        elif kind is delivery.Extend:
            self._changed = True

    def turned(self) -> None:
        """A turn is over and its replies to leases are out: wake whom it freed something for, and see what is
        due next."""
        if not self._changed:
            return
        self._changed = False
        if self._freed:
            freed, self._freed = self._freed, {}
            for group in freed:
                for action in self._waiting.pop(group, ()):
                    action()
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
            self.wake_all()

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
