"""Commands that the broker gives to its own partitions and coordinators; clients cannot send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.core.model.commands import Publish
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import PRIORITY_MAX, BatchView, CutBody, Times


class PublishBatch(msgspec.Struct, frozen=True, eq=False):
    """A publish, with the view that the shell has derived from its body."""

    publish: Publish
    view: BatchView
    body: CutBody | None = None
    """Gives the sizes of what is stored; without it these are upper bounds where rows are left out."""


class Sweep(msgspec.Struct, frozen=True):
    """Trim a partition. Retention keeps everything from `retention_offset` on. An ephemeral topic also drops
    messages below the `committed` end that all groups have settled. With `again`, the beginning of the
    partition is recorded even if nothing is dropped, so that the next snapshot is of a later entry."""

    retention_offset: int
    committed: int = 0
    again: bool = False


class RecordLoss(msgspec.Struct, frozen=True):
    """Record that the loss of these offsets was accepted; `spans` is flat."""

    spans: list[int]


# ----------------------------------------------------------------------------------------------- delivery


class LeaseRun(msgspec.Struct, frozen=True):
    """Lease up to `count_max` messages (and about `bytes_max` bytes) below `end_offset`, the committed end,
    to a member. `lease` is a random 64-bit number, `generation` the one that the member was granted. Only
    messages of lanes more urgent than `above` are wanted (`LANES`: all). `sharers` members wait for free
    messages, this one included, so it gets its share. `alone`: the member holds no message and there is no
    other for it, so it takes one that is set apart.

    The reply is `RunLeased`, or `Done` if there is nothing to lease now.
    """

    group: str
    member: str
    generation: int
    lease: int
    count_max: int
    bytes_max: int
    end_offset: int
    lease_ms: int | None = None
    above: int = PRIORITY_MAX + 1
    sharers: int = 1
    alone: bool = False


class RunLeased(msgspec.Struct, frozen=True):
    """The reply to `LeaseRun`: `runs` are (first, count, deliveries, failures) with this delivery counted, in
    the order of delivery; `spans` are the same offsets, ascending. The shell makes a `Grant` of it for the
    member.
    """

    lease: int
    deadline_us: int
    runs: list[tuple[int, int, int, int]]
    spans: list[int]


class HoldRun(msgspec.Struct, frozen=True):
    """`HoldOffsets` with a lease number, for messages below `end_offset`, the committed end."""

    group: str
    member: str
    lease: int
    spans: list[int]
    end_offset: int
    lease_ms: int


class Enlist(msgspec.Struct, frozen=True):
    """Add a group; does nothing if it exists with the same policy and id. `start` None: as the policy says.
    State of a group of that name under another id is kept, and continues under this id."""

    group: str
    policy: GroupPolicy
    start: int | None = None
    id: int = 0


class Delist(msgspec.Struct, frozen=True):
    """Forget a group, but not another of the same name; `id` None: any of that name."""

    group: str
    id: int | None = None


class ReportGroup(msgspec.Struct, frozen=True):
    """Report what the partition holds of a group; changes nothing. The reply is `GroupHeld`."""

    group: str


class GroupHeld(msgspec.Struct, frozen=True):
    """The reply to `ReportGroup`: where the partition begins, and what it holds of the group; without a
    `policy` it does not have the group."""

    start_offset: int
    id: int = 0
    member: str = ""
    generation: int = 0
    shared: bool = False
    paused: bool = False
    policy: GroupPolicy | None = None


class GrantTo(msgspec.Struct, frozen=True):
    """The coordinator gives the partition to a member ("": to none), or to all members of the group
    (`shared`), under a generation. Under a higher generation, messages leased to the owner before come back.
    Within one generation a partition becomes shared, or one member's again, and all leases in flight stay."""

    group: str
    member: str
    generation: int
    shared: bool = False


class EvictMember(msgspec.Struct, frozen=True):
    """Give back the leases of a member without a failure. Usually the member is gone. If it has only lost an
    answer, the leases that it has `held` stay, and the others were never delivered. `left`: it left by
    itself, so none of its messages is suspected of having ended it."""

    group: str
    member: str
    held: list[int] | None = None
    left: bool = False


class PauseLeases(msgspec.Struct, frozen=True):
    """Pause or resume leasing for a group."""

    group: str
    paused: bool


class ResetTo(msgspec.Struct, frozen=True):
    """Start a group again from an offset; the generation grows by one."""

    group: str
    offset: int


class MoveCursor(msgspec.Struct, frozen=True):
    """Store the offset that a stream group has committed."""

    group: str
    member: str
    generation: int
    offset: int


class ExpireLeases(msgspec.Struct, frozen=True):
    """Time out leases whose deadline has passed."""


class BuryDone(msgspec.Struct, frozen=True):
    """The dead letters of these messages of a group are durable: `places` are flat (partition, offset) of the
    dead letters."""

    group: str
    spans: list[int]
    topic: str
    places: list[int]


# ------------------------------------------------------------------------------------- delays and staging


class ReleaseDue(msgspec.Struct, frozen=True, eq=False):
    """Append due rows, gathered into one body: they get offsets.

    `refs` are all rows that wait up to (`until_us`, `until_ref`), in that order (see `DelayQueue.due`);
    without refs only the number of rows is checked. The reply is `Published`, or `Done` if other rows are due
    by now: then nothing happens.
    """

    view: BatchView
    crc: int
    until_us: int
    until_ref: int
    refs: Times | None = None


class StageBatch(msgspec.Struct, frozen=True, eq=False):
    """Store a batch under an attempt, as its `number`-th on this partition; the body goes with it."""

    writer: str
    attempt: str
    view: BatchView
    crc: int
    number: int = 0


class CheckStaged(msgspec.Struct, frozen=True):
    """Check that attempts (see `facts.Staged`) are stored with these numbers of batches (-1: any): `Done`, or
    `NotFound` whose `missing` has the attempts that are not."""

    attempts: list[int]
    batches: list[int]


class ApplyStaged(msgspec.Struct, frozen=True, eq=False):
    """Append the staged batches of these decided attempts, in this order.

    The command travels without batches. The partition that decides it reads the frames at `entries` back from
    its own log (see `StagedFrames`), and gives one view, checksum and body for each. A batch of which some
    rows are due and others are not is given as two, so that each is appended, or waits, as a whole."""

    writer: str
    version: int
    attempts: list[str]
    entries: list[int] | None = None
    """None: the batches are not read yet."""
    views: Sequence[BatchView] = ()
    crcs: Sequence[int] = ()
    bodies: Sequence[bytes | bytearray | memoryview] = ()


class StagedFrames(msgspec.Struct, frozen=True):
    """The frames that an `ApplyStaged` needs, and the bytes that they count. `lost`: this many attempts of it
    have no frame."""

    entries: list[int]
    nbytes: int
    lost: int = 0


class DropStaged(msgspec.Struct, frozen=True):
    """Drop undecided attempts (see `facts.Staged`) that were aborted, lost or are too old."""

    attempts: list[int]


Sizes = list[tuple[str, int]]
"""(topic, number of partitions)."""


class Look(msgspec.Struct, frozen=True):
    """Change nothing; the reply leaves when everything decided before is durable."""


class MakeGroup(msgspec.Struct, frozen=True):
    """Create a group; with `if_missing`, an existing one is enlisted on further topics."""

    group: str
    policy: GroupPolicy
    topics: Sizes
    if_missing: bool = False
    topic_ids: dict[str, int] = {}


class Join(msgspec.Struct, frozen=True):
    """Become a member; a new group is created. `options` are those that the member insists on."""

    group: str
    member: str
    topics: Sizes
    policy: GroupPolicy
    options: dict[str, Any] = {}
    wait: bool = True
    client: str = ""
    topic_ids: dict[str, int] = {}


class Leave(msgspec.Struct, frozen=True):
    """Remove a member, for a reason: see `facts.MemberLeft`."""

    group: str
    member: str
    reason: str = "left"


class ConfirmReleased(msgspec.Struct, frozen=True):
    """A member has given up partitions that were being revoked."""

    group: str
    member: str
    places: list[Place]


class PassTime(msgspec.Struct, frozen=True):
    """Move partitions whose revocation has timed out, and divide shared topics that have had enough
    partitions for long enough."""

    group: str


class ChangeOptions(msgspec.Struct, frozen=True):
    """Change options of a group; options that are not named stay."""

    group: str
    options: dict[str, Any]


class ResizeTopics(msgspec.Struct, frozen=True):
    """Topics have these numbers of partitions now; 0: the topic with this id was deleted. A topic with
    another id than the group knows was deleted and created again."""

    group: str
    topics: Sizes
    topic_ids: dict[str, int] = {}


class RaiseGenerations(msgspec.Struct, frozen=True):
    """Partitions have a higher generation than the group knows: (topic, partition, generation)."""

    group: str
    places: list[tuple[str, int, int]]


class SetPaused(msgspec.Struct, frozen=True):
    """Pause or resume a group."""

    group: str
    paused: bool


class DropGroup(msgspec.Struct, frozen=True):
    """Delete a group; refused while it has members, unless forced."""

    group: str
    force: bool = False


class ConfirmForgotten(msgspec.Struct, frozen=True):
    """Partitions have forgotten a deleted group."""

    group: str
    id: int
    places: list[Place]


class ConfirmEnlisted(msgspec.Struct, frozen=True):
    """Partitions have enlisted the group."""

    group: str
    places: list[Place]


class TickDone(msgspec.Struct, frozen=True):
    """The message of a tick is published."""

    name: str
    tick_us: int
