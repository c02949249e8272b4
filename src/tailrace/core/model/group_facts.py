"""Facts of the internal topic of groups: membership, assignment, schedules, staged decisions.

Their tags are apart from those of data partitions (`core.facts`), so that a log is never read as the other
kind. The same rules hold: tags are never given twice, fields are only added at the end, with a default.
"""

from __future__ import annotations

import msgspec

from tailrace.core.model.group_options import GroupPolicy


class GroupCreated(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """A group exists, on topics with so many partitions each."""

    group: str
    policy: GroupPolicy
    topics: list[tuple[str, int]]
    time_us: int
    id: int = 0
    """Tells it from others of its name; 0: of a release that gave no ids."""
    topic_ids: dict[str, int] = {}


class TopicsEnlisted(msgspec.Struct, frozen=True, array_like=True, tag=102):
    """A group is on these topics too, or one of its topics has more partitions now."""

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
    """Somebody became a member, or wants other topics than before."""

    group: str
    member: str
    topics: list[str]
    client: str
    time_us: int


class MemberLeft(msgspec.Struct, frozen=True, array_like=True, tag=105):
    """A member left, was not heard of for a whole session (reason "silent"), or did not come back after its
    connection was closed ("disconnected"). What it owned and nobody was assigned in the same decision belongs
    to nobody."""

    group: str
    member: str
    reason: str
    time_us: int


class Revoking(msgspec.Struct, frozen=True, array_like=True, tag=106):
    """Owners shall give up places, as (topic, partition, next owner)."""

    group: str
    moves: list[tuple[str, int, str]]
    time_us: int


class Assigned(msgspec.Struct, frozen=True, array_like=True, tag=107):
    """Places belong to members ("" = to nobody) under a generation, as (topic, partition, member,
    generation). One that was being divided keeps its generation."""

    group: str
    moves: list[tuple[str, int, str, int]]
    time_us: int


class GenerationsRaised(msgspec.Struct, frozen=True, array_like=True, tag=108):
    """The partitions themselves went on to these generations (a reset): (topic, partition, generation)."""

    group: str
    places: list[tuple[str, int, int]]
    time_us: int


class PauseChanged(msgspec.Struct, frozen=True, array_like=True, tag=109):
    """A group leases no more, or again."""

    group: str
    paused: bool
    time_us: int


class GroupDeleted(msgspec.Struct, frozen=True, array_like=True, tag=110):
    """A group is gone with all its members. Its partitions have still to forget it, one by one; those of a
    release without ids were told at once."""

    group: str
    time_us: int
    id: int = 0
    """-1: it is carried to the partitions, and has no id."""


class GroupForgotten(msgspec.Struct, frozen=True, array_like=True, tag=114):
    """Soft. Partitions have nothing of a deleted group any more: (topic, partition)."""

    group: str
    id: int
    places: list[tuple[str, int]]
    time_us: int


class PlacesEnlisted(msgspec.Struct, frozen=True, array_like=True, tag=115):
    """Soft. Partitions have confirmed that they have the group: (topic, partition). One that has it no more
    has lost it."""

    group: str
    places: list[tuple[str, int]]
    time_us: int


class TopicsShared(msgspec.Struct, frozen=True, array_like=True, tag=116):
    """Every member takes from every partition of these topics from now on, whoever had them before. Their
    generations stay."""

    group: str
    topics: list[str]
    time_us: int


class TopicsDivided(msgspec.Struct, frozen=True, array_like=True, tag=117):
    """Topics are shared no more: their places, as (topic, partition, next owner), go to one member each. The
    next owner takes from its place already; the other members are to finish with it. Also names places of
    which the next owner is another one now."""

    group: str
    topics: list[str]
    moves: list[tuple[str, int, str]]
    time_us: int


class PlacesLeft(msgspec.Struct, frozen=True, array_like=True, tag=118):
    """A member has finished with places that are being divided: (topic, partition)."""

    group: str
    member: str
    places: list[tuple[str, int]]
    time_us: int


class OptionsChanged(msgspec.Struct, frozen=True, array_like=True, tag=119):
    """A group has other options."""

    group: str
    policy: GroupPolicy
    time_us: int


class SchedulePut(msgspec.Struct, frozen=True, array_like=True, tag=111):
    """A recurring schedule was made or replaced; the fields are those of `PutSchedule`. Ticks count after
    `wall_us`; where that is 0 (facts of earlier releases), after `time_us`."""

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


class ScheduleDeleted(msgspec.Struct, frozen=True, array_like=True, tag=112):
    """A schedule is gone."""

    name: str
    time_us: int


class ScheduleTicked(msgspec.Struct, frozen=True, array_like=True, tag=113):
    """The message of this tick is published; earlier ticks that were missed are never made up for."""

    name: str
    tick_us: int
    time_us: int


Target = tuple[str, int, str]
"""Topic, partition, attempt."""


TargetGroup = tuple[str, str, list[int]]
"""Attempt, topic, partitions: the targets that follow each other with the same attempt and topic. So a job of
200 tasks that write to 100 partitions is 200 groups, not 20,000 targets."""


class StagedDecided(msgspec.Struct, frozen=True, array_like=True, tag=120):
    """Hard. These attempts are the writer's version."""

    writer: str
    version: int
    attempts: list[Target]
    """Only of releases that knew no groups."""
    time_us: int
    grouped: list[TargetGroup] = []
    attempt: str = ""
    """Of a decision without targets: whose it is."""
    topic_ids: dict[str, int] = {}
    """Which topics the names meant: one that is made again under its name is another."""


class StagedDone(msgspec.Struct, frozen=True, array_like=True, tag=121):
    """Soft. Every target has confirmed the writer's last version; losing this means to ask them again."""

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
"""What a facts frame of the internal topic holds, for the codec."""
