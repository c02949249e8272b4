"""Cron: every tick of a recurring schedule publishes one message, exactly once.

    1  the tick's message on its partition, synced whatever its topic promises
    2  ScheduleTicked on the coordinator ──▶ the timer for the next tick

    power fails before 1          the schedule still waits for the tick
    power fails between 1 and 2   the next life publishes the tick again, and the partition recognises it

A schedule is a producer of its own since it was put, and the tick (in seconds) is that producer's epoch. The
partition remembers it for seven days: a repeated tick is a duplicate, one older than the newest is fenced.

    02:00  published (epoch 02:00), the broker dies before it is recorded
    02:05  restart: the schedule still waits for 02:00 ──▶ published again ──▶ duplicate ──▶ recorded

Ticks have no dedup ids, which would take room in the topic's dedup window. After a time without a broker only
the latest of the missed ticks is published. A tick that cannot be published is tried again after `RETRY_US`;
a newer one that comes before takes its place.

While the home log is damaged nothing is published: what is missing may be that the schedule was deleted. The
life after the damage goes on with the latest tick.

A schedule publishes with the rights of its owner, who last put its message or its times. While the owner may
not publish to the topic, ticks are left out, one by one and each with a line in the log; when the right is
back, the schedule goes on with its next tick.

Ticks are times of the wall clock. If a tick was published while that clock was ahead, it is not published
again after the clock was put back: the schedule continues after its last tick, or at once when it is deleted
and put again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from tailrace.core.groups.cron_schedules import CronSchedule
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import PutSchedule
from tailrace.core.model.group_facts import ScheduleDeleted, SchedulePut, ScheduleTicked
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import PublishBatch, TickDone
from tailrace.core.process.process import (
    Answered,
    AtWall,
    Begun,
    Cancel,
    Due,
    Effect,
    Event,
    FactsStored,
    Log,
    Now,
    Submit,
)
from tailrace.errors import Fenced

RETRY_US = 1_000_000

MayTick = Callable[[str, str], bool]
"""Whether the owner of a schedule may publish to a topic now."""


class Ticks(Protocol):
    """The times of ticks, by the rules of time zones, and the messages of ticks. Always gives the same."""

    def next_us(self, put: PutSchedule, after_us: int) -> int | None:
        """The first tick after a time; None if there is none."""
        ...

    def latest_us(self, put: PutSchedule, after_us: int, now_us: int) -> int | None:
        """The last tick in (after, now]; None if there is none."""
        ...

    def message(
        self, put: PutSchedule, since_us: int, tick_us: int, partitions: int, want_keys: bool
    ) -> tuple[PublishBatch, bytes | bytearray | memoryview]:
        """The message of a tick, and its body."""
        ...


class _CronTag(NamedTuple):
    what: Literal["tick", "publish", "record"]
    name: str
    tick_us: int = 0
    place: TopicPartition | None = None


class CronProcess:
    """The schedules of one coordinator."""

    WATCHES: frozenset[type] = frozenset((SchedulePut, ScheduleDeleted, ScheduleTicked))

    def __init__(
        self, home: TopicPartition, schedules: Mapping[str, CronSchedule], ticks: Ticks, may: MayTick
    ) -> None:
        self._home = home
        self._schedules = schedules
        self._ticks = ticks
        self._may = may

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """See `Process.step`."""
        if isinstance(event, Due):
            assert isinstance(event.tag, _CronTag)
            return self._due(event.tag.name, now)
        if isinstance(event, Answered):
            assert isinstance(event.tag, _CronTag)
            return self._answered(event.tag, event.reply, now)
        if isinstance(event, FactsStored):
            names = list(dict.fromkeys(fact.name for fact in event.facts))
        else:
            assert isinstance(event, Begun)
            names = list(self._schedules)
        return [effect for name in names for effect in self._arm(name)]

    def _arm(self, name: str, not_before_us: int = 0) -> Sequence[Effect]:
        """Wait for the next tick of a schedule, whatever was waited for before."""
        schedule, tag = self._schedules.get(name), _CronTag("tick", name)
        if schedule is None or schedule.put.paused:
            return (Cancel(tag),)
        next_us = self._ticks.next_us(schedule.put, schedule.after_us)
        return (Cancel(tag) if next_us is None else AtWall(tag, max(next_us, not_before_us)),)

    def _due(self, name: str, now: Now) -> Sequence[Effect]:
        schedule = self._schedules.get(name)
        if schedule is None or schedule.put.paused or now.damaged:
            return ()
        put = schedule.put
        tick_us = self._ticks.latest_us(put, schedule.after_us, now.wall_us)
        if tick_us is None:
            return self._arm(name)
        if not self._may(put.owner, put.topic):
            return self._denied(put, now)
        topic = now.catalog.topics.get(put.topic)
        if topic is None:
            return self._again(name, f"there is no topic {put.topic!r}", now)
        options = topic.options
        command, body = self._ticks.message(
            put, schedule.since_us, tick_us, options.partitions, options.key_index
        )
        target = TopicPartition(put.topic, command.publish.partition)
        return (Submit(_CronTag("publish", name, tick_us), target, command, body, topic.id),)

    def _answered(self, tag: _CronTag, reply: Reply, now: Now) -> Sequence[Effect]:
        if isinstance(reply, Refusal) and (tag.what == "record" or reply.code != Fenced.code):
            return self._again(tag.name, reply.message, now)
        if tag.what == "record":
            return ()  # The fact sets the timer.
        # Fenced: a later tick is there already, so this one is over.
        done = TickDone(tag.name, tag.tick_us)
        return (Submit(tag._replace(what="record"), self._home, done, sure=False),)

    def _denied(self, put: PutSchedule, now: Now) -> Sequence[Effect]:
        """Leave a tick out, and look again at the next one."""
        tag = _CronTag("tick", put.name)
        next_us = self._ticks.next_us(put, now.wall_us)
        text = f"schedule {put.name}: its owner, {put.owner!r}, may not publish to {put.topic!r}"
        told = Log("warning", text + "; its tick is left out")
        return (told, Cancel(tag) if next_us is None else AtWall(tag, next_us))

    def _again(self, name: str, why: str, now: Now) -> Sequence[Effect]:
        text = f"schedule {name}: {why}; it is tried again"
        return (Log("warning", text), *self._arm(name, now.wall_us + RETRY_US))
