"""Facts of the internal topic of groups: membership, assignment, schedules, staged decisions.

Their tags differ from those of data partitions (`core.model.facts`), so that a log is never read as one of
the other kind. The same rules hold: no tag is used twice, and fields are only added at the end, with a
default.
"""

from __future__ import annotations

import msgspec

from tailrace.core.model.group_options import GroupPolicy


class GroupCreated(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """A group exists, on topics with these numbers of partitions."""

    group: str
    policy: GroupPolicy
    topics: list[tuple[str, int]]
    time_us: int
    id: int = 0
    """Tells the group from others of its name; 0: of a release without ids."""
    topic_ids: dict[str, int] = {}


class TopicsEnlisted(msgspec.Struct, frozen=True, array_like=True, tag=102):
    """A group is on these topics, too, or topics of it have more partitions now."""

    group: str
    topics: list[tuple[str, int]]
    time_us: int
    topic_ids: dict[str, int] = {}


class TopicsDropped(msgspec.Struct, frozen=True, array_like=True, tag=103):
    """Topics of a group were deleted."""

    group: str
    topics: list[str]
    time_us: int


class MemberJoined(msgspec.Struct, frozen=True, array_like=True, tag=104):
    """A client became a member, or a member wants other topics than before."""

    group: str
    member: str
    topics: list[str]
    client: str
    time_us: int


class MemberLeft(msgspec.Struct, frozen=True, array_like=True, tag=105):
    """A member left, was silent for a whole session (reason "silent"), or did not come back after its
    connection was closed ("disconnected"). Its partitions have no owner, unless the same decision assigns
    them."""

    group: str
    member: str
    reason: str
    time_us: int


class Revoking(msgspec.Struct, frozen=True, array_like=True, tag=106):
    """Owners are asked to give up partitions: (topic, partition, next owner)."""

    group: str
    moves: list[tuple[str, int, str]]
    time_us: int


class Assigned(msgspec.Struct, frozen=True, array_like=True, tag=107):
    """Partitions belong to members ("": to none) under a generation: (topic, partition, member, generation).
    A partition that was being divided keeps its generation."""

    group: str
    moves: list[tuple[str, int, str, int]]
    time_us: int


class GenerationsRaised(msgspec.Struct, frozen=True, array_like=True, tag=108):
    """The partitions themselves have raised their generations, by a reset: (topic, partition, generation)."""

    group: str
    places: list[tuple[str, int, int]]
    time_us: int


class PauseChanged(msgspec.Struct, frozen=True, array_like=True, tag=109):
    """Leasing of a group pauses or resumes."""

    group: str
    paused: bool
    time_us: int


class GroupDeleted(msgspec.Struct, frozen=True, array_like=True, tag=110):
    """A group is gone with all its members. Its partitions still have to forget it, one by one."""

    group: str
    time_us: int
    id: int = 0
    """-1: the group has no id, and its deletion is still carried to the partitions."""


class GroupForgotten(msgspec.Struct, frozen=True, array_like=True, tag=114):
    """Soft. Partitions have forgotten a deleted group: (topic, partition)."""

    group: str
    id: int
    places: list[tuple[str, int]]
    time_us: int


class PlacesEnlisted(msgspec.Struct, frozen=True, array_like=True, tag=115):
    """Soft. Partitions have confirmed that the group is enlisted there: (topic, partition). If such a
    partition does not know the group later, it has lost it."""

    group: str
    places: list[tuple[str, int]]
    time_us: int


class TopicsShared(msgspec.Struct, frozen=True, array_like=True, tag=116):
    """Every member may lease from every partition of these topics from now on. The generations of the
    partitions stay."""

    group: str
    topics: list[str]
    time_us: int


class TopicsDivided(msgspec.Struct, frozen=True, array_like=True, tag=117):
    """Topics are shared no more: their partitions go to one member each: (topic, partition, next owner). The
    next owner may lease already; the other members are asked to finish. Also has partitions whose next owner
    has changed meanwhile."""

    group: str
    topics: list[str]
    moves: list[tuple[str, int, str]]
    time_us: int


class PlacesLeft(msgspec.Struct, frozen=True, array_like=True, tag=118):
    """A member has finished with partitions that are being divided: (topic, partition)."""

    group: str
    member: str
    places: list[tuple[str, int]]
    time_us: int


class OptionsChanged(msgspec.Struct, frozen=True, array_like=True, tag=119):
    """A group gets other options."""

    group: str
    policy: GroupPolicy
    time_us: int


class SchedulePut(msgspec.Struct, frozen=True, array_like=True, tag=111):
    """A recurring schedule was created or replaced; the fields are those of `PutSchedule`. Its ticks are
    those after `wall_us` or, if that is 0 (in facts of earlier releases), after `time_us`."""

    name: str
    topic: str
    cron: str
    zone: str
    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes]]
    priority: int
    ttl_ms: int | None
    paused: bool
    time_us: int
    wall_us: int = 0
    owner: str = ""
    """Empty: made while the broker had no users, or by the broker's owner."""


class ScheduleDeleted(msgspec.Struct, frozen=True, array_like=True, tag=112):
    """A schedule was deleted."""

    name: str
    time_us: int


class ScheduleTicked(msgspec.Struct, frozen=True, array_like=True, tag=113):
    """The message of this tick is published; earlier ticks that were missed are never caught up on."""

    name: str
    tick_us: int
    time_us: int


Target = tuple[str, int, str]
"""Topic, partition, attempt."""


TargetGroup = tuple[str, str, list[int]]
"""Attempt, topic, partitions: consecutive targets with the same attempt and topic. So a job of 200 tasks that
write to 100 partitions is 200 groups, not 20,000 targets."""


class StagedDecided(msgspec.Struct, frozen=True, array_like=True, tag=120):
    """Hard. A version of a writer is decided: these attempts."""

    writer: str
    version: int
    time_us: int
    grouped: list[TargetGroup] = []
    attempt: str = ""
    """The attempt of a decision without targets."""
    topic_ids: dict[str, int] = {}
    """The ids of the topics: a topic that is created again under its name is another one."""


class StagedDone(msgspec.Struct, frozen=True, array_like=True, tag=121):
    """Soft. Every target has confirmed the writer's last version. If this fact is lost, they are asked
    again."""

    writer: str
    version: int
    time_us: int


StagedDecisionFact = StagedDecided | StagedDone
GroupFact = (
    GroupCreated
    | TopicsEnlisted
    | TopicsDropped
    | MemberJoined
    | MemberLeft
    | Revoking
    | Assigned
    | GenerationsRaised
    | PauseChanged
    | GroupDeleted
    | PlacesEnlisted
    | TopicsShared
    | TopicsDivided
    | PlacesLeft
    | OptionsChanged
)
ScheduleFact = SchedulePut | ScheduleDeleted | ScheduleTicked
CoordinationFact = GroupFact | GroupForgotten | ScheduleFact | StagedDecisionFact
"""All facts that a facts frame of the internal topic may hold, for the codec."""
