"""The cron runner: every tick of a recurring schedule publishes one message, exactly once.

    timer, at the tick ──▶ publish, synced ──▶ TickDone on the coordinator ──▶ timer for the next tick

The publish is synced whatever its topic promises (`broker.runtime.assurance`), and only then recorded. If the
broker dies between the two, the restart publishes the tick again, and the partition recognises it: a schedule
is a producer of its own since it was put, and the tick (in seconds) is that producer's epoch, which the
partition remembers for seven days. A repeated tick is a duplicate; a tick older than the newest is fenced.

    02:00  published (epoch 02:00), the broker dies before TickDone
    02:05  restart: the schedule still waits for 02:00 ──▶ published again ──▶ duplicate ──▶ TickDone

Ticks have no dedup ids, which would take room in the topic's dedup window. After a time without a broker only
the latest of the missed ticks is published.

Ticks are times of the wall clock. If a tick was published while that clock was ahead, it is not published
again after the clock was put back: the schedule continues after its last tick, or at once when it is deleted
and put again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfoNotFoundError

import msgspec
from cronsim import CronSimError

from tailrace.broker.groups.cron_times import latest_tick_us, next_tick_us, zone_of
from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.runtime.framing import publish_batch
from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.broker.runtime.turn import NOTHING
from tailrace.broker.topics import Topics
from tailrace.core.groups.cron_schedules import CronSchedule
from tailrace.core.model.commands import Publish, Reply
from tailrace.core.model.group_commands import DeleteSchedule, ListSchedules, PutSchedule, ScheduleList
from tailrace.core.model.identifiers import (
    KEY_BYTES_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    Refusal,
    hash128,
    partition_of,
)
from tailrace.core.model.internal_commands import TickDone
from tailrace.core.model.topic_options import check_name
from tailrace.core.publish.publish_rules import over_limit
from tailrace.errors import InvalidRequest, NotFound
from tailrace.format import batch
from tailrace.format.builder import make_ids
from tailrace.format.frame import Buffer, crc32c
from tailrace.format.small import measure
from tailrace.ports import Gate, Respond

log = logging.getLogger("tailrace.cron")

RETRY_US = 1_000_000
TTL_MS_MAX = 10 * 365 * 86_400_000
CRON_MAX = 200
_SECOND = 1_000_000


class CronRunner:
    """Answers requests about schedules, and keeps the timer of each."""

    def __init__(self, topics: Topics, pump: Pump, coordinators: GroupDirectory) -> None:
        self._topics = topics
        self._pump = pump
        self._coordinators = coordinators
        self._timers: dict[str, Timer] = {}
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {
            PutSchedule: self._put,
            DeleteSchedule: self._delete,
            ListSchedules: self._list,
        }

    def start(self) -> None:
        """After recovery: set the timer of every schedule; one that missed ticks publishes the latest at
        once."""
        for _, machine in self._coordinators.machines():
            for name in machine.recurrences.by_name:
                self._arm(name)

    def _find(self, name: str) -> CronSchedule | None:
        machine = self._coordinators.of(name)
        return None if machine is None else machine.recurrences.by_name.get(name)

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

        def put(reply: Reply, parts: Any) -> None:
            self._arm(request.name)
            respond(reply, NOTHING)

        self._coordinators.submit(request.name, request, put)

    def _delete(self, request: DeleteSchedule, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._coordinators.require_well(request.name)
        if self._find(request.name) is None:
            raise NotFound(f"there is no schedule {request.name[:80]!r}")

        def deleted(reply: Reply, parts: Any) -> None:
            self._arm(request.name)
            respond(reply, NOTHING)

        self._coordinators.submit(request.name, request, deleted)

    def _list(self, request: ListSchedules, body: Buffer, respond: Respond, gate: Gate) -> None:
        lost = self._coordinators.lost()
        if lost is not None:
            respond(lost, NOTHING)
            return
        found = [
            recurrence
            for _, machine in self._coordinators.machines()
            for name, recurrence in machine.recurrences.by_name.items()
            if name.startswith(request.prefix)
        ]
        found.sort(key=lambda recurrence: recurrence.put.name)
        respond(ScheduleList([self._shown(recurrence) for recurrence in found]), NOTHING)

    def _shown(self, recurrence: CronSchedule) -> dict[str, Any]:
        put = recurrence.put
        fields = {field: getattr(put, field) for field in PutSchedule.__struct_fields__}
        after_us = max(recurrence.after_us, self._pump.clock.wall_us())
        next_us = None if put.paused else next_tick_us(put, after_us)
        return {**fields, "next_us": next_us, "last_us": recurrence.last_us or None}

    # -- ticks

    def _arm(self, name: str, not_before_us: int = 0) -> None:
        """Set the timer for the next tick of a schedule, whatever it was set for before."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if self._coordinators.lost(name) is not None:
            later_us = self._pump.clock.now_us() + RETRY_US
            self._timers[name] = self._pump.at(later_us, lambda now_us: self._arm(name))
            return  # The next tick is not known now.
        recurrence = self._find(name)
        if recurrence is None or recurrence.put.paused:
            return
        next_us = next_tick_us(recurrence.put, recurrence.after_us)
        if next_us is not None:
            due_us = max(next_us, not_before_us)
            self._timers[name] = self._pump.at_wall(due_us, lambda wall_us: self._tick(name, wall_us))

    def _tick(self, name: str, wall_us: int) -> None:
        if self._coordinators.lost(name) is not None:
            self._arm(name)
            return
        recurrence = self._find(name)
        if recurrence is None or recurrence.put.paused:
            return
        tick_us = latest_tick_us(recurrence.put, recurrence.after_us, wall_us)
        host = self._topics.find(recurrence.put.topic)
        if tick_us is None:
            self._arm(name)
            return
        if host is None:
            self._again(name, f"there is no topic {recurrence.put.topic!r}")
            return
        publish, body = message_of(recurrence.put, recurrence.since_us, tick_us, len(host.runtimes))
        runtime = host.runtimes[publish.partition]

        def published(reply: Reply, parts: Any) -> None:
            if isinstance(reply, Refusal) and reply.code != "fenced":
                self._again(name, reply.message)
            else:  # Fenced: a later tick is there already, so this one is over.
                self._coordinators.submit(name, TickDone(name, tick_us), recorded)

        def recorded(reply: Reply, parts: Any) -> None:
            if isinstance(reply, Refusal):
                self._again(name, reply.message)
            else:
                self._arm(name)

        view = measure(body, publish.columns, want_keys=runtime.options.key_index)
        runtime.submit(publish_batch(publish, view, body), body, runtime.surely(published))

    def _again(self, name: str, why: str) -> None:
        """A tick could not be published: try again later. A newer tick that comes before takes its place."""
        log.warning("schedule %s: %s; it is tried again", name, why)
        self._arm(name, self._pump.clock.wall_us() + RETRY_US)


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
