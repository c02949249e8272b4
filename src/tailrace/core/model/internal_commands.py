"""Commands that the broker gives its own partitions; they never travel."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.model.commands import Publish
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import PRIORITY_MAX, BatchView, Times


class PublishBatch(msgspec.Struct, frozen=True, eq=False):
    """A publish with the view of its body, which the shell has derived from the body itself."""

    publish: Publish
    view: BatchView


class Sweep(msgspec.Struct, frozen=True):
    """Retention would keep everything from this offset on. Of an ephemeral topic that which all groups have
    settled goes, too, below the `committed` end. With `again` where the partition begins is recorded also
    when nothing goes, so that the next snapshot is of a later entry."""

    retention_offset: int
    committed: int = 0
    again: bool = False


class RecordLoss(msgspec.Struct, frozen=True):
    """The loss of these offsets was accepted; `spans` is flat."""

    spans: list[int]


# ----------------------------------------------------------------------------------------------- delivery


class LeaseRun(msgspec.Struct, frozen=True):
    """Lease up to `count_max` messages (and about `bytes_max` bytes) below `end_offset`, the committed end,
    to a member. `lease` is a random 64-bit number, `generation` the one that the member was granted. Only
    messages of lanes that are more urgent than `above` are wanted (`LANES`: all). `sharers` members wait for
    what is free, this one included: it gets its share. `alone`: the member holds nothing, and there is
    nothing else for it: it takes one message that is set apart.

    The reply is `RunLeased`, or `Done` when there is nothing to lease now.
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
    """Reply to `LeaseRun`: `runs` are (first, count, deliveries, failures) with this delivery counted, in the
    order of delivery, and `spans` the same offsets ascending. Never travels: the shell makes a `Grant` of it.
    """

    lease: int
    deadline_us: int
    runs: list[tuple[int, int, int, int]]
    spans: list[int]


class HoldRun(msgspec.Struct, frozen=True):
    """`HoldOffsets` with a number for the lease, for messages below `end_offset`, the committed end."""

    group: str
    member: str
    lease: int
    spans: list[int]
    end_offset: int
    lease_ms: int


class Enlist(msgspec.Struct, frozen=True):
    """Add a group; does nothing when it is there with the same policy and id. `start` None: as the policy
    says. What is there under another id is kept, and goes on under this one."""

    group: str
    policy: GroupPolicy
    start: int | None = None
    id: int = 0


class Delist(msgspec.Struct, frozen=True):
    """Forget a group, but not another of the same name; `id` None: whichever is there."""

    group: str
    id: int | None = None


class GrantTo(msgspec.Struct, frozen=True):
    """The coordinator gives the partition to a member ("" = nobody), or to all members of the group together
    (`shared`), under a generation. With a higher generation, what the owner before had comes back. Within a
    generation a partition becomes shared, or one member's again, and everybody keeps the leases in flight."""

    group: str
    member: str
    generation: int
    shared: bool = False


class EvictMember(msgspec.Struct, frozen=True):
    """A member is gone: its leases are given back without a failure. Or it is there and lost an answer: then
    those that it has `held` stay, and the others were never delivered. One that `left` was not ended by what
    it had."""

    group: str
    member: str
    held: list[int] | None = None
    left: bool = False


class PauseLeases(msgspec.Struct, frozen=True):
    """Stop or resume leasing for a group."""

    group: str
    paused: bool


class ResetTo(msgspec.Struct, frozen=True):
    """Start a group again from an offset; the generation grows by one."""

    group: str
    offset: int


class MoveCursor(msgspec.Struct, frozen=True):
    """Store the place of a stream group."""

    group: str
    member: str
    generation: int
    offset: int


class ExpireLeases(msgspec.Struct, frozen=True):
    """Time has passed: leases whose deadline is over expire."""


class BuryDone(msgspec.Struct, frozen=True):
    """The dead letters hold these messages of a group: `places` are flat (partition, offset) there."""

    group: str
    spans: list[int]
    topic: str
    places: list[int]


# ------------------------------------------------------------------------------------- delays and staging


class ReleaseDue(msgspec.Struct, frozen=True, eq=False):
    """The rows that `Timetable.due` named, gathered into one body: give them offsets.

    `refs` are all rows that wait up to (`until_us`, `until_ref`), in that order; without them only their
    number is checked. The reply is `Published`, or `Done` when the rows are others by now: nothing happens.
    """

    view: BatchView
    crc: int
    until_us: int
    until_ref: int
    refs: Times | None = None


class StageBatch(msgspec.Struct, frozen=True, eq=False):
    """A batch to store under an attempt, as its `number`-th on this partition; the body goes with it."""

    writer: str
    attempt: str
    view: BatchView
    crc: int
    number: int = 0


class CheckStaged(msgspec.Struct, frozen=True):
    """Whether attempts (see `facts.Staged`) are stored with so many batches each (-1: any): `Done`, or
    `NotFound` with the numbers of those that are not as `missing`."""

    attempts: list[int]
    batches: list[int]


class ApplyStaged(msgspec.Struct, frozen=True, eq=False):
    """A decision was made: append the staged batches of these attempts, in this order. The shell has read
    them back, those of `entries`: one view, checksum and body for each batch. A batch of which some rows are
    due and others not comes as two, so that each is appended, or waits, as a whole."""

    writer: str
    version: int
    attempts: list[str]
    entries: list[int]
    views: list[BatchView]
    crcs: list[int]
    bodies: list[bytes | bytearray | memoryview]


class DropStaged(msgspec.Struct, frozen=True):
    """Undecided attempts (see `facts.Staged`) that were aborted, lost or are too old."""

    attempts: list[int]


Sizes = list[tuple[str, int]]
"""Topics with the number of their partitions."""


class Look(msgspec.Struct, frozen=True):
    """Nothing changes; the reply comes when all that was decided before is durable."""


class MakeGroup(msgspec.Struct, frozen=True):
    """Create a group; with `if_missing`, one that is there is enlisted on further topics."""

    group: str
    policy: GroupPolicy
    topics: Sizes
    if_missing: bool = False
    topic_ids: dict[str, int] = {}


class Join(msgspec.Struct, frozen=True):
    """Become a member; the group is made when it is new. `options` are those that the member insists on."""

    group: str
    member: str
    topics: Sizes
    policy: GroupPolicy
    options: dict[str, Any] = {}
    wait: bool = True
    client: str = ""
    topic_ids: dict[str, int] = {}


class Leave(msgspec.Struct, frozen=True):
    """A member leaves, or is taken out for a reason: see `facts.MemberLeft`."""

    group: str
    member: str
    reason: str = "left"


class ConfirmReleased(msgspec.Struct, frozen=True):
    """A member has given up places that were to be revoked."""

    group: str
    member: str
    places: list[Place]


class PassTime(msgspec.Struct, frozen=True):
    """Time has passed: places whose owners did not confirm in time move all the same, and shared topics that
    have had enough partitions for long enough are divided."""

    group: str


class ChangeOptions(msgspec.Struct, frozen=True):
    """Give a group other options; those that are not named stay."""

    group: str
    options: dict[str, Any]


class ResizeTopics(msgspec.Struct, frozen=True):
    """Topics have so many partitions now; 0: they were deleted, those with these ids. A topic with another id
    than the group knows was deleted and made again."""

    group: str
    topics: Sizes
    topic_ids: dict[str, int] = {}


class RaiseGenerations(msgspec.Struct, frozen=True):
    """Partitions were found at a higher generation than the group has: (topic, partition, generation)."""

    group: str
    places: list[tuple[str, int, int]]


class SetPaused(msgspec.Struct, frozen=True):
    """Stop or resume a group."""

    group: str
    paused: bool


class DropGroup(msgspec.Struct, frozen=True):
    """Delete a group; refused while it has members, unless forced."""

    group: str
    force: bool = False


class ConfirmForgotten(msgspec.Struct, frozen=True):
    """Partitions have nothing of a deleted group any more."""

    group: str
    id: int
    places: list[Place]


class ConfirmEnlisted(msgspec.Struct, frozen=True):
    """Partitions have the group."""

    group: str
    places: list[Place]


class TickDone(msgspec.Struct, frozen=True):
    """The message of a tick is in the topic."""

    name: str
    tick_us: int
