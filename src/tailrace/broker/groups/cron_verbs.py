"""Verbs of schedules: put, delete and list them; and the messages of their ticks.

`core.process.cron_process` says when a tick is published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from zoneinfo import ZoneInfoNotFoundError

import msgspec
from cronsim import CronSimError

from tailrace.broker.groups.cron_times import latest_tick_us, next_tick_us, zone_of
from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.runtime.framing import publish_batch
from tailrace.broker.runtime.process_driver import ProcessKind
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING
from tailrace.broker.topics import Topics
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.groups.cron_schedules import CronSchedule
from tailrace.core.model.commands import Publish
from tailrace.core.model.group_commands import DeleteSchedule, ListSchedules, PutSchedule, ScheduleList
from tailrace.core.model.identifiers import (
    KEY_BYTES_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    TopicPartition,
    hash128,
    partition_of,
)
from tailrace.core.model.internal_commands import PublishBatch
from tailrace.core.model.topic_options import check_name
from tailrace.core.process.cron_process import CronProcess, MayTick
from tailrace.core.publish.publish_rules import over_limit
from tailrace.errors import InvalidRequest, NotFound
from tailrace.format import batch
from tailrace.format.builder import make_ids
from tailrace.format.frame import Buffer, crc32c
from tailrace.format.small import measure
from tailrace.ports import Gate, Respond

log = logging.getLogger("tailrace.cron")

TTL_MS_MAX = 10 * 365 * 86_400_000
CRON_MAX = 200
_SECOND = 1_000_000


class CronVerbs:
    """Answers requests about schedules."""

    def __init__(self, topics: Topics, pump: Pump, coordinators: GroupDirectory) -> None:
        self._topics = topics
        self._pump = pump
        self._coordinators = coordinators
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {
            PutSchedule: self._put,
            DeleteSchedule: self._delete,
            ListSchedules: self._list,
        }

    def _find(self, name: str) -> CronSchedule | None:
        home = self._coordinators.home(name)
        return None if home is None else home.schedule(name)

    # -- verbs

    def _put(self, request: PutSchedule, body: Buffer, respond: Respond, gate: Gate) -> None:
        problems = problems_of(request)
        if problems:
            raise InvalidRequest(f"schedule: {'; '.join(problems)}", problems=problems)
        host = self._topics.get(request.topic)
        wall_us = self._pump.clock.wall_us()
        publish, message = message_of(request, wall_us, wall_us, len(host.runtimes))
        view = measure(message, publish.columns)  # Raises for what no topic takes.
        problem = over_limit(view, host.info.options, wall_us)
        if problem is not None:
            respond(problem, NOTHING)
            return

        self._coordinators.submit(request.name, self._owned(request, gate.caller.user), respond)

    def _owned(self, request: PutSchedule, user: str) -> PutSchedule:
        """The request with the owner of the schedule: who puts it, unless it is only paused or resumed."""
        known = self._find(request.name)
        if known is not None and known.put.paused != request.paused:
            before = msgspec.structs.replace(request, owner=known.put.owner)
            if msgspec.structs.replace(before, paused=known.put.paused) == known.put:
                return before
        return msgspec.structs.replace(request, owner=user)

    def _delete(self, request: DeleteSchedule, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._coordinators.require_well(request.name)
        if self._find(request.name) is None:
            raise NotFound(f"there is no schedule {request.name[:80]!r}")

        self._coordinators.submit(request.name, request, respond)

    def _list(self, request: ListSchedules, body: Buffer, respond: Respond, gate: Gate) -> None:
        lost = self._coordinators.lost()
        if lost is not None:
            respond(lost, NOTHING)
            return
        found = [
            schedule
            for home in self._coordinators.runtimes()
            for schedule in home.schedules()
            if schedule.put.name.startswith(request.prefix)
        ]
        found.sort(key=lambda schedule: schedule.put.name)
        respond(ScheduleList([self._shown(schedule) for schedule in found]), NOTHING)

    def _shown(self, schedule: CronSchedule) -> dict[str, Any]:
        put = schedule.put
        fields = {field: getattr(put, field) for field in PutSchedule.__struct_fields__}
        after_us = max(schedule.after_us, self._pump.clock.wall_us())
        next_us = None if put.paused else next_tick_us(put, after_us)
        return {**fields, "next_us": next_us, "last_us": schedule.last_us or None}


def cron(home: TopicPartition, may: MayTick) -> ProcessKind:
    """The process that publishes the ticks of a coordinator's schedules."""
    return ProcessKind(partial(_make, home, may), CronProcess.WATCHES, log)


def _make(home: TopicPartition, may: MayTick, state: Coordinator) -> CronProcess:
    return CronProcess(home, state.recurrences.by_name, CronTicks(), may)


class CronTicks:
    """See `core.process.cron_process.Ticks`."""

    def next_us(self, put: PutSchedule, after_us: int) -> int | None:
        """The first tick after a time."""
        return next_tick_us(put, after_us)

    def latest_us(self, put: PutSchedule, after_us: int, now_us: int) -> int | None:
        """The last tick in (after, now]."""
        return latest_tick_us(put, after_us, now_us)

    def message(
        self, put: PutSchedule, since_us: int, tick_us: int, partitions: int, want_keys: bool
    ) -> tuple[PublishBatch, Buffer]:
        """The message of a tick, and its body."""
        publish, body = message_of(put, since_us, tick_us, partitions)
        return publish_batch(publish, measure(body, publish.columns, want_keys=want_keys), body), body


def message_of(put: PutSchedule, since_us: int, tick_us: int, partitions: int) -> tuple[Publish, Buffer]:
    """The message of a tick; every call gives the same bytes."""
    identity = f"schedule/{put.name}/{tick_us // _SECOND}".encode()
    low, high = hash128(identity)
    value = b"" if put.value is None and put.key is None else put.value  # No value is for tombstones.
    columns, body = batch.encode(
        [value],
        ids=make_ids(1, tick_us // 1000, low & ((1 << 62) - 1), high & 0xFFF),
        timestamps=tick_us,
        keys=None if put.key is None else [put.key],
        headers=[[*put.headers, ("tailrace-schedule", put.name.encode())]],
        priorities=None if put.priority == PRIORITY_DEFAULT else [put.priority],
        expires_at=None if put.ttl_ms is None else tick_us + put.ttl_ms * 1000,
    )
    partition = partition_of(put.name.encode() if put.key is None else put.key, partitions)
    producer = hash128(f"schedule/{put.name}/{since_us}".encode())[0] or 1
    return Publish(put.topic, partition, columns, crc32c(body), producer, tick_us // _SECOND), body


def problems_of(put: PutSchedule) -> list[str]:
    """All problems with a schedule, each with the name of its field."""
    problems = [f"name: {problem}" for problem in check_name(put.name)]
    zone_known = _zone_known(put.zone)
    if not zone_known:
        problems.append(f"zone: there is no time zone {put.zone[:80]!r}")
    problems += _cron_problems(put if zone_known else msgspec.structs.replace(put, zone="UTC"))
    if not 0 <= put.priority <= PRIORITY_MAX:
        problems.append(f"priority: 0 to {PRIORITY_MAX}, not {put.priority}")
    if put.ttl_ms is not None and not 1 <= put.ttl_ms <= TTL_MS_MAX:
        problems.append(f"ttl_ms: 1 to {TTL_MS_MAX}, not {put.ttl_ms}")
    if put.key is not None and len(put.key) > KEY_BYTES_MAX:
        problems.append(f"key: {len(put.key)} bytes, {KEY_BYTES_MAX} are allowed")
    return problems


def _cron_problems(put: PutSchedule) -> list[str]:
    if len(put.cron) > CRON_MAX:
        return [f"cron: {len(put.cron)} characters, {CRON_MAX} are allowed"]
    try:
        return [] if next_tick_us(put, 0) is not None else [f"cron: {put.cron!r} never comes"]
    except CronSimError as error:
        return [f"cron: {put.cron!r}: {error}"]
    except (ValueError, AssertionError):  # Its parser lets these through for some malformed fields.
        return [f"cron: {put.cron!r} cannot be read"]


def _zone_known(name: str) -> bool:
    try:
        return bool(name and zone_of(name))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
