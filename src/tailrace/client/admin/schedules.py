"""Delayed messages that wait, and recurring schedules."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tailrace.client.messages import Result, moment
from tailrace.client.publish.message_fields import Headers, check_fields
from tailrace.client.rpc.calls import ask
from tailrace.client.sdk_tuning import LIST_MAX
from tailrace.core.model.commands import DescribeTopic, TopicInfo
from tailrace.core.model.group_commands import DeleteSchedule, ListSchedules, PutSchedule, ScheduleList
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, VALUE_BYTES_MAX
from tailrace.core.model.queue_commands import Cancelled, CancelScheduled, ListScheduled, ScheduledList
from tailrace.errors import InvalidRequest, NotFound
from tailrace.ports import BrokerVerbs


class Schedule(msgspec.Struct, frozen=True):
    """A recurring schedule: what is published where at every tick of its cron expression."""

    name: str
    topic: str
    cron: str
    zone: str
    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes]]
    priority: int
    ttl: float | None
    paused: bool
    next_time: datetime | None = None
    last_time: datetime | None = None
    owner: str = ""
    """The user whose rights its ticks need; empty: those of the broker itself."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Schedule:
        """From the reply of the broker."""
        ttl_ms = fields.get("ttl_ms")
        return cls(
            fields["name"],
            fields["topic"],
            fields["cron"],
            fields.get("zone", "UTC"),
            fields.get("value"),
            fields.get("key"),
            [(name, bytes(value)) for name, value in fields.get("headers") or ()],
            fields.get("priority", PRIORITY_DEFAULT),
            None if ttl_ms is None else ttl_ms / 1000,
            fields.get("paused", False),
            _time(fields.get("next_us")),
            _time(fields.get("last_us")),
            fields.get("owner", ""),
        )


class Scheduled(msgspec.Struct, frozen=True):
    """A delayed message that waits for its time."""

    topic: str
    partition: int
    id_bytes: bytes
    deliver_at: datetime
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]

    @classmethod
    def of(cls, topic: str, fields: dict[str, Any]) -> Scheduled:
        """From the reply of the broker."""
        return cls(
            topic,
            fields["partition"],
            bytes(fields["id"]),
            moment(fields["deliver_at_us"]),
            fields.get("key"),
            fields.get("value"),
            [(name, bytes(value)) for name, value in fields.get("headers") or ()],
        )


class Schedules:
    """Recurring schedules. Every call takes a `timeout` in seconds; None means the client's."""

    def __init__(self, verbs: BrokerVerbs, timeout: float) -> None:
        self._verbs = verbs
        self._timeout = timeout

    def _time(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    async def put(
        self,
        name: str,
        topic: str,
        cron: str,
        *,
        zone: str = "UTC",
        value: bytes | None = None,
        key: bytes | None = None,
        headers: Headers | None = None,
        priority: int = PRIORITY_DEFAULT,
        ttl: float | None = None,
        paused: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Create or replace a schedule: at every tick of the cron expression, in its time zone, the broker
        publishes this message, once. `ttl` is in seconds."""
        for what, text in (("name", name), ("topic", topic), ("cron", cron), ("zone", zone)):
            if not isinstance(text, str):
                raise InvalidRequest(f"{what}: text is needed, not {type(text).__name__}")
        # The topic may allow less; that is for the broker to say.
        fields = check_fields(
            value, VALUE_BYTES_MAX, key=key, headers=headers, priority=priority, ttl=ttl, now_us=0
        )
        request = PutSchedule(
            name,
            topic,
            cron,
            zone,
            None if value is None else bytes(value),
            fields.get("key"),
            fields.get("headers", []),
            priority,
            None if ttl is None else round(ttl * 1000),
            paused,
        )
        await ask(self._verbs, request, self._time(timeout))

    async def delete(self, name: str, *, timeout: float | None = None) -> None:
        """Remove a schedule."""
        await ask(self._verbs, DeleteSchedule(name), self._time(timeout), repeatable=False)

    async def list(self, prefix: str = "", *, timeout: float | None = None) -> list[Schedule]:
        """Schedules by name, with their next tick."""
        reply = await ask(self._verbs, ListSchedules(prefix), self._time(timeout))
        assert isinstance(reply, ScheduleList)
        return [Schedule.of(fields) for fields in reply.schedules]

    async def pause(self, name: str, *, timeout: float | None = None) -> None:
        """Let a schedule rest; ticks that pass meanwhile are not made up for."""
        await self._switch(name, True, timeout)

    async def resume(self, name: str, *, timeout: float | None = None) -> None:
        """Let a schedule go on."""
        await self._switch(name, False, timeout)

    async def _switch(self, name: str, paused: bool, timeout: float | None) -> None:
        found = [schedule for schedule in await self.list(name, timeout=timeout) if schedule.name == name]
        if not found:
            raise NotFound(f"there is no schedule {name!r}")
        old = found[0]
        await self.put(
            name,
            old.topic,
            old.cron,
            zone=old.zone,
            value=old.value,
            key=old.key,
            headers=old.headers,
            priority=old.priority,
            ttl=old.ttl,
            paused=paused,
            timeout=timeout,
        )


async def cancel(verbs: BrokerVerbs, result: Result, timeout: float) -> bool:
    """Cancel a delayed message by what publishing it returned. True: it will never be delivered; False: it
    was released already, or was not delayed."""
    request = CancelScheduled(result.topic, result.partition, [result.id_bytes])
    reply = await ask(verbs, request, timeout)
    assert isinstance(reply, Cancelled)
    return reply.done[0]


async def cancel_id(verbs: BrokerVerbs, topic: str, id: UUID, timeout: float) -> bool:
    """Cancel a delayed message by its id alone: every partition is asked."""
    if not isinstance(id, UUID):
        raise InvalidRequest(f"id: a UUID is needed, not {type(id).__name__}; `UUID(text)` makes one")
    info = await ask(verbs, DescribeTopic(topic), timeout)
    assert isinstance(info, TopicInfo)
    for partition in range(len(info.partitions)):
        reply = await ask(verbs, CancelScheduled(topic, partition, [id.bytes]), timeout)
        assert isinstance(reply, Cancelled)
        if reply.done[0]:
            return True
    return False


async def scheduled(verbs: BrokerVerbs, topic: str, limit: int, timeout: float) -> list[Scheduled]:
    """Delayed messages of a topic that wait, the next due first."""
    if type(limit) is not int or not 1 <= limit <= LIST_MAX:
        raise InvalidRequest(f"limit: 1 to {LIST_MAX}, not {limit!r}")
    reply = await ask(verbs, ListScheduled(topic, limit), timeout)
    assert isinstance(reply, ScheduledList)
    return [Scheduled.of(topic, fields) for fields in reply.messages]


def _time(time_us: int | None) -> datetime | None:
    return moment(time_us) if time_us else None
