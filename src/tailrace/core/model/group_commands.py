"""Commands to the coordinator of a group: membership, administration, and recurring schedules."""

from __future__ import annotations

from typing import Any

from tailrace.core.model.identifiers import Command

Place = tuple[str, int]
"""Topic and partition."""


class CreateGroup(Command, frozen=True, tag="create_group"):
    """Enlist a group on topics before any member connects; options as in `core.model.group_options`. With
    `if_missing`, an existing group is the answer, and is enlisted on topics that it was not on yet."""

    group: str
    topics: list[str]
    options: dict[str, Any] = {}
    if_missing: bool = False


class DeleteGroup(Command, frozen=True, tag="delete_group"):
    """Forget a group and its state on every topic; refused while it has members, unless forced."""

    group: str
    force: bool = False


class ListGroups(Command, frozen=True, tag="list_groups"):
    """List groups by name, or only those of one topic."""

    prefix: str = ""
    topic: str | None = None


class DescribeGroup(Command, frozen=True, tag="describe_group"):
    """Describe a group: its members, its assignment and, per partition, lag, oldest age, messages in flight,
    waiting and dying, and failures."""

    group: str


class PauseGroup(Command, frozen=True, tag="pause_group"):
    """Pause or resume leasing for a whole group; members stay."""

    group: str
    paused: bool


class AlterGroup(Command, frozen=True, tag="alter_group"):
    """Change options of a group, except mode and ordering; options that are not named stay. Answered when
    every partition has them durably; members learn of them at once."""

    group: str
    options: dict[str, Any]


class ResetGroup(Command, frozen=True, tag="reset_group"):
    """Move a group on one topic to a point: EARLIEST, LATEST or a time in `timestamp_us`, or to explicit
    (partition, offset) pairs. Drops leases, attempts and back-offs. Refused while members are connected
    unless forced; with `dry_run` nothing is changed."""

    group: str
    topic: str
    timestamp_us: int = -2
    offsets: list[tuple[int, int]] | None = None
    dry_run: bool = False
    force: bool = False


class JoinGroup(Command, frozen=True, tag="join_group"):
    """Become a member. A new group is created with these options; options that contradict an existing group
    are refused. `wait`: stand by in an exclusive group instead of being refused. A member that joins again
    under the same id (after a reconnect) keeps what it had. `incarnation` tells two clients with one id
    apart: the one that joined later has the id, and the other is `Fenced` for good, even if it joins
    `again`."""

    group: str
    member: str
    topics: list[str]
    options: dict[str, Any] = {}
    wait: bool = True
    client: str = ""
    incarnation: str = ""
    again: bool = False


class Heartbeat(Command, frozen=True, tag="heartbeat"):
    """A sign of life, and the long poll for changes: answered at once if the membership differs from
    `version`, else after `wait_ms`. `released` confirms partitions that were to be given up. A newer
    heartbeat of the same member ends the wait of the older one."""

    group: str
    member: str
    version: int = 0
    released: list[Place] = []
    wait_ms: int = 0
    incarnation: str = ""


class LeaveGroup(Command, frozen=True, tag="leave_group"):
    """Stop being a member; leases are given back without a failure, partitions move at once."""

    group: str
    member: str
    incarnation: str = ""


class PutSchedule(Command, frozen=True, tag="put_schedule"):
    """Create or replace a recurring schedule: the broker publishes one message at every tick of the cron
    expression in its time zone."""

    name: str
    topic: str
    cron: str
    zone: str = "UTC"
    value: bytes | None = None
    key: bytes | None = None
    headers: list[tuple[str, bytes]] = []
    priority: int = 2
    ttl_ms: int | None = None
    paused: bool = False
    owner: str = ""
    """The user whose rights its ticks need. The broker writes it, whatever a client says."""


class DeleteSchedule(Command, frozen=True, tag="delete_schedule"):
    """Remove a schedule; `NotFound` if there is none."""

    name: str


class ListSchedules(Command, frozen=True, tag="list_schedules"):
    """List schedules by name, with their next tick."""

    prefix: str = ""


GroupRequest = (
    CreateGroup
    | DeleteGroup
    | ListGroups
    | DescribeGroup
    | PauseGroup
    | AlterGroup
    | ResetGroup
    | JoinGroup
    | Heartbeat
    | LeaveGroup
    | PutSchedule
    | DeleteSchedule
    | ListSchedules
)


class Membership(Command, frozen=True, tag="membership"):
    """The assignment of a member now. `owned` are (topic, partition, generation); `revoking` are those among
    them with which it has to finish, and which it confirms by `released`. `version` grows with every change
    that concerns the member. `state` is "active", "standby" (exclusive groups) or "paused"; `options` are the
    group's.

    `hungry` are partitions of which the member holds leases while another member waits in vain for messages:
    it should give back (`GiveBack`) messages that no handler has got yet. They are named once, in an answer
    that comes early for this, and again after a while if the other member still waits."""

    version: int
    owned: list[tuple[str, int, int]]
    revoking: list[Place]
    state: str
    options: dict[str, Any] = {}
    hungry: list[Place] = []


class GroupInfo(Command, frozen=True, tag="group"):
    """A group; `members` and `partitions` (one dict each) on describe only.

    A member: member, client, owned, since_us, last_seen_us. A partition: topic, partition, member, shared,
    generation, committed, end_offset, lag, oldest_age_ms, in_flight, waiting, held, dying, deliveries,
    failures, dead_lettered, lapsed, collected.
    """

    group: str
    topics: list[str]
    options: dict[str, Any]
    paused: bool = False
    member_count: int = 0
    lag: int = 0
    created: bool = False
    members: list[dict[str, Any]] = []
    partitions: list[dict[str, Any]] = []
    warnings: list[str] = []
    """Surprising effects of its options (`core.model.group_options.warnings_of`), and problems of the
    group."""
    known: bool = True
    """False: partitions know the group, but no coordinator does."""


class GroupList(Command, frozen=True, tag="groups"):
    """Groups, sorted by name."""

    groups: list[GroupInfo]


class ResetPlan(Command, frozen=True, tag="reset_plan"):
    """The changes of a reset, made or planned: (partition, committed before, committed after)."""

    changes: list[tuple[int, int, int]]
    done: bool


class ScheduleList(Command, frozen=True, tag="schedules"):
    """Schedules: dicts with the fields of `PutSchedule` and next_us, last_us."""

    schedules: list[dict[str, Any]]


GroupReply = Membership | GroupInfo | GroupList | ResetPlan | ScheduleList
