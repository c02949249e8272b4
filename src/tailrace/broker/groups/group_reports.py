"""Reports on groups for operators: lists, one group in detail; and resets of their cursors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

from tailrace.broker.group_metrics import Place
from tailrace.broker.groups.group_verbs import GroupVerbs, info_of
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.queue.time_lookup import locate
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse, together
from tailrace.broker.topic_host import TopicHost
from tailrace.broker.topics import Topics
from tailrace.core.groups.group_membership import in_use
from tailrace.core.groups.group_state import Extent, GroupState
from tailrace.core.model.commands import EARLIEST, LATEST, Reply
from tailrace.core.model.group_commands import (
    DescribeGroup,
    GroupInfo,
    GroupList,
    ListGroups,
    ResetGroup,
    ResetPlan,
)
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import Look, ResetTo
from tailrace.errors import InvalidRequest, NotFound, StorageFault
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, PartitionLog, Respond

_FIGURES = (
    "in_flight",
    "waiting",
    "held",
    "dying",
    "deliveries",
    "failures",
    "dead_lettered",
    "lapsed",
    "collected",
)
Change = tuple[int, int, int]
"""Partition, committed before, committed after."""


class _Oldest(NamedTuple):
    """Where the oldest unsettled message of a group is, for the row of its partition."""

    row: dict[str, Any]
    log: PartitionLog
    offset: int
    end: int
    now_us: int


class GroupReports:
    """Answers requests for lists, descriptions and resets of groups."""

    def __init__(self, topics: Topics, pump: Pump, coordination: GroupVerbs) -> None:
        self._topics = topics
        self._pump = pump
        self._coordination = coordination
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {
            ListGroups: self._list,
            DescribeGroup: self._describe,
            ResetGroup: self._reset,
        }

    def _list(self, request: ListGroups, body: Buffer, respond: Respond, gate: Gate) -> None:
        """List groups. Internal groups are shown only to a prefix that begins like them. If the storage of a
        coordinator failed, the request is refused, because the list would look complete."""
        lost = self._coordination.coordinators.lost()
        if lost is not None:
            respond(lost, NOTHING)
            return
        found = [
            group
            for group in self._coordination.coordinators.groups()
            if group.name.startswith(request.prefix)
            and (not group.name.startswith("_") or request.prefix.startswith("_"))
            and (request.topic is None or request.topic in group.topics)
        ]
        infos = [self._shown(group, lag=self._lag(group)) for group in found]
        for name, runtimes in self._coordination.unknown.find().items():
            topics = {runtime.topic for runtime in runtimes}
            if name.startswith(request.prefix) and (request.topic is None or request.topic in topics):
                infos.append(self._stranger(name, runtimes))
        respond(GroupList(sorted(infos, key=lambda info: info.group)), NOTHING)

    def _shown(self, group: GroupState, **fields: Any) -> GroupInfo:
        """Describe a group, with a warning for each topic that is unknown."""
        info = info_of(group, **fields)
        lost = [topic for topic in group.topics if self._topics.find(topic) is None]
        lost_text = "topic {!r} is not known: what the group has there is kept, see `/readyz`"
        return msgspec.structs.replace(info, warnings=info.warnings + [lost_text.format(t) for t in lost])

    @staticmethod
    def _stranger(
        name: str, runtimes: list[QueuePartition], rows: list[dict[str, Any]] | None = None
    ) -> GroupInfo:
        """Describe a group that only partitions know."""
        policy = runtimes[0].policy(name)
        assert policy is not None
        group = GroupState(name, policy, 0)
        group.topics = {runtime.topic: Extent(0, 0) for runtime in runtimes}
        lag = sum(runtime.figures(name).get("lag", 0) for runtime in runtimes)
        info = info_of(group, lag=lag, partitions=rows or [], known=False)
        text = "no coordinator knows this group; it is kept: enlist it or join it to go on, or delete it"
        return msgspec.structs.replace(info, warnings=[text])

    def _runtime(self, place: tuple[str, int]) -> QueuePartition | None:
        host = self._topics.find(place[0])
        return None if host is None or place[1] >= len(host.runtimes) else host.runtimes[place[1]]

    def _lag(self, group: GroupState) -> int:
        runtimes = (self._runtime(place) for place in group.all_places())
        return sum(runtime.figures(group.name).get("lag", 0) for runtime in runtimes if runtime is not None)

    # -- one group

    def _describe(self, request: DescribeGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        if self._coordination.find(request.group) is None:
            strangers = self._coordination.unknown.find().get(request.group)
            if strangers:
                none = GroupState(request.group, GroupPolicy(), 0)
                rows = [self._row(none, runtime.topic, runtime.partition, runtime) for runtime in strangers]
                respond(self._stranger(request.group, strangers, rows), NOTHING)
                return
        self._coordination.must_find(request.group)
        looked = partial(self._looked, request.group, respond)
        self._coordination.coordinators.submit(request.group, Look(), looked)

    def _looked(self, name: str, respond: Respond, reply: Reply, parts: Any) -> None:
        """What was decided before the request is durable: describe the group as it is now."""
        group = self._coordination.find(name)
        if isinstance(reply, Refusal):
            respond(reply, NOTHING)
        elif group is None:
            respond(Refusal(NotFound.code, f"group {name!r} was deleted"), NOTHING)
        else:
            self._report(group, respond)

    def _report(self, group: GroupState, respond: Respond) -> None:
        rows: list[dict[str, Any]] = []
        oldest: list[_Oldest] = []
        for place in group.all_places():
            runtime = self._runtime(place)
            if runtime is None:
                continue
            row = self._row(group, place[0], place[1], runtime)
            rows.append(row)
            if runtime.lost is None and row["committed"] < runtime.end_offset:
                end, now_us = runtime.end_offset, runtime.time_us()
                oldest.append(_Oldest(row, runtime.log, row["committed"], end, now_us))
        lag = sum(row["lag"] or 0 for row in rows)
        info = self._shown(group, members=self._members(group), partitions=rows, lag=lag)
        if oldest:
            work = partial(_append_times, oldest)
            self._pump.threads.read(work, partial(_answer_with_ages, info, oldest, respond))
        else:
            respond(info, NOTHING)

    def _row(self, group: GroupState, topic: str, number: int, runtime: QueuePartition) -> dict[str, Any]:
        """Describe one partition; values are null where its state was dropped."""
        held = group.places.get((topic, number))
        figures = runtime.figures(group.name)
        unknown = None if runtime.lost is not None else 0
        return {
            "topic": topic,
            "partition": number,
            "member": "" if held is None else held.owner,
            "shared": held is not None and (topic in group.shared or held.dividing),
            "generation": figures.get("generation", 0) if held is None else held.generation,
            "committed": figures.get("committed", runtime.end_offset if unknown is not None else None),
            "end_offset": runtime.end_offset,
            "lag": figures.get("lag", unknown),
            "oldest_age_ms": unknown,
            **{name: figures.get(name, unknown) for name in _FIGURES},
            "fault": None if runtime.fault is None else runtime.fault.message,
        }

    def _members(self, group: GroupState) -> list[dict[str, Any]]:
        rows = []
        for member in group.members.values():
            session = self._coordination.sessions.get(group.name, member.id)
            owned = [] if session is None or session.assignment is None else session.assignment.owned
            rows.append(
                {
                    "member": member.id,
                    "client": member.client,
                    "owned": [[topic, number] for topic, number, _ in owned],
                    "since_us": member.joined_us,
                    "last_seen_us": 0 if session is None else session.seen_us,
                }
            )
        return rows

    # -- resets

    def _reset(self, request: ResetGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        group = self._coordination.must_find(request.group)
        if request.topic not in group.topics:
            raise NotFound(f"group {group.name!r} is not on topic {request.topic!r}", topic=request.topic)
        host = self._topics.get(request.topic)
        if group.members and not (request.force or request.dry_run):
            respond(in_use(group, "it is reset"), NOTHING)
            return
        if request.offsets is not None:
            self._planned(request, host, self._given(request.offsets, host), respond)
        elif request.timestamp_us == EARLIEST:
            offsets = [runtime.start_offset for runtime in host.runtimes]
            self._planned(request, host, dict(enumerate(offsets)), respond)
        elif request.timestamp_us == LATEST:
            offsets = [runtime.end_offset for runtime in host.runtimes]
            self._planned(request, host, dict(enumerate(offsets)), respond)
        elif request.timestamp_us < 0:
            raise InvalidRequest(f"timestamp_us: a time, {EARLIEST} or {LATEST}, not {request.timestamp_us}")
        else:
            self._find_time(request, host, respond)

    @staticmethod
    def _given(offsets: list[tuple[int, int]], host: TopicHost[QueuePartition]) -> dict[int, int]:
        problems = []
        for partition, offset in offsets:
            if not 0 <= partition < len(host.runtimes):
                problems.append(f"there is no partition {partition}")
                continue
            runtime = host.runtimes[partition]
            if not runtime.start_offset <= offset <= runtime.end_offset:
                reach = f"{runtime.start_offset} to {runtime.end_offset}"
                problems.append(f"partition {partition} goes from {reach}, {offset} is not in it")
        if len(dict(offsets)) < len(offsets):
            problems.append("a partition is listed twice")
        if problems:
            raise InvalidRequest("offsets: " + "; ".join(problems[:20]), problems=problems[:20])
        return dict(offsets)

    def _find_time(self, request: ResetGroup, host: TopicHost[QueuePartition], respond: Respond) -> None:
        runtimes = [(runtime.log, runtime.start_offset, runtime.end_offset) for runtime in host.runtimes]

        work = partial(_locate_each, runtimes, request.timestamp_us)
        self._pump.threads.read(work, partial(self._located, request, host, respond))

    def _located(
        self,
        request: ResetGroup,
        host: TopicHost[QueuePartition],
        respond: Respond,
        offsets: Any,
        error: Exception | None,
    ) -> None:
        if error is not None:
            respond(refuse(error), NOTHING)
        else:
            self._planned(request, host, dict(enumerate(offsets)), respond)

    def _planned(
        self, request: ResetGroup, host: TopicHost[QueuePartition], offsets: dict[int, int], respond: Respond
    ) -> None:
        """The offsets are known: show the changes, or make them, each partition by itself."""
        ill = {number: fault for number in offsets if (fault := host.runtimes[number].fault) is not None}
        refusal = together(request.topic, ill)
        if refusal is not None:
            respond(refusal, NOTHING)  # Before any of them is moved.
            return
        changes = [
            (partition, host.runtimes[partition].figures(request.group).get("committed", 0), offset)
            for partition, offset in sorted(offsets.items())
        ]
        if request.dry_run or not changes:
            respond(ResetPlan(changes, done=not request.dry_run), NOTHING)
            return
        replies: list[Reply] = []
        moved = partial(self._moved, request.group, changes, replies, respond)
        for partition, _, offset in changes:
            host.runtimes[partition].submit(ResetTo(request.group, offset), b"", moved)

    def _moved(
        self,
        group: str,
        changes: list[Change],
        replies: list[Reply],
        respond: Respond,
        reply: Reply,
        parts: Any,
    ) -> None:
        """One more partition has moved the group, or refused; answer when all of them have."""
        replies.append(reply)
        if len(replies) < len(changes):
            return
        # The generations of the partitions have grown: the coordinator follows, and tells the members.
        self._coordination.recheck(group)
        problem = next((each for each in replies if isinstance(each, Refusal)), None)
        if problem is None:
            respond(ResetPlan(changes, done=True), NOTHING)
        else:
            respond(Refusal(problem.code, problem.message, "unknown", problem.details), NOTHING)


def appended_us(log: PartitionLog, offset: int, end: int) -> int | None:
    """Append time of the first message at or after an offset; None without any. Blocking."""
    for part in log.read(offset, end, 1):
        for header, _ in frame.walk(part, check=False):
            if header.kind == frame.DATA and header.base_offset + header.span > offset:
                return header.append_time_us
    return None


def _append_times(oldest: list[_Oldest]) -> list[int | StorageFault | None]:
    return [_appended_or_fault(each.log, each.offset, each.end) for each in oldest]


def _answer_with_ages(
    info: GroupInfo, oldest: list[_Oldest], respond: Respond, found: Any, error: Exception | None
) -> None:
    """The append times are read: add the ages to the rows of a description, which is the answer."""
    if error is not None:
        respond(refuse(error), NOTHING)
        return
    for each, time_us in zip(oldest, found, strict=True):
        if isinstance(time_us, StorageFault):  # The others are described all the same.
            each.row["fault"] = each.row["fault"] or time_us.message
        else:
            each.row["oldest_age_ms"] = 0 if time_us is None else max(0, each.now_us - time_us) // 1000
    respond(info, NOTHING)


def _locate_each(logs: list[tuple[PartitionLog, int, int]], timestamp_us: int) -> list[int]:
    return [locate(log, start, end, timestamp_us) for log, start, end in logs]


def _appended_or_fault(log: PartitionLog, offset: int, end: int) -> int | StorageFault | None:
    try:
        return appended_us(log, offset, end)
    except StorageFault as fault:
        return fault


def stats_of_all(topics: Topics) -> Iterator[Place]:
    """Stats of every group on every partition, for metrics."""
    for host in topics.queue_hosts():
        for partition, runtime in enumerate(host.runtimes):
            for group in runtime.group_ids():
                figures = runtime.figures(group)
                age_s: float | None = 0.0
                if figures["lag"]:
                    time_us = runtime.cache.append_time_us(figures["committed"])
                    age_s = None if time_us is None else max(0, runtime.time_us() - time_us) / 1e6
                yield group, host.info.name, partition, figures, age_s
