"""Commands on the queues of one topic: leases and their settlement, delays, traces, staged writes.

Spans of offsets travel flat: ``[first, end, first, end, …]``, ascending, half-open.
"""

from __future__ import annotations

from typing import Any

from tailrace.core.model.identifiers import Command

# ------------------------------------------------------------------------------------------------- leases


class Lease(Command, frozen=True, tag="lease"):
    """Lease messages for a member of a group from (partition, generation) pairs; wait up to `wait_ms` while
    there are none. Without `lease_ms` the group's own is taken.

    `held` is sent after an answer was lost: the leases of these partitions that the member knows. Its other
    leases are given back first, so that no message waits for a member that does not know of it.

    With `above`, only messages of more urgent lanes are wanted, those with a priority below this number: the
    member has enough others in hand. A newer request of the same member replaces one that waits; with
    `count_max` 0 it only does that.
    """

    topic: str
    group: str
    member: str
    partitions: list[tuple[int, int]]
    count_max: int = 500
    bytes_max: int = 1_048_576
    wait_ms: int = 0
    lease_ms: int | None = None
    held: list[int] | None = None
    above: int | None = None


class Ack(Command, frozen=True, tag="ack"):
    """Settle messages by (lease, spans) pairs of one partition."""

    topic: str
    partition: int
    group: str
    leases: list[tuple[int, list[int]]]


class Nack(Command, frozen=True, tag="nack"):
    """Give messages back. As a `failure`, an attempt is counted and the messages wait for `delay_ms`, or for
    the group's back-off; otherwise they are available at once and no attempt is counted.

    Later messages of the same keys go back, too. `started` are (lease, spans) pairs of those among them that
    handlers have got; for the others, which lie unstarted or are on their way, no delivery is counted."""

    topic: str
    partition: int
    group: str
    lease: int
    spans: list[int]
    delay_ms: int | None = None
    error: str = ""
    failure: bool = True
    started: list[tuple[int, list[int]]] = []


class GiveBack(Command, frozen=True, tag="give_back"):
    """Give back messages that no handler has got, by (lease, spans) pairs of one partition. They are
    available at once; neither an attempt nor a delivery is counted. Later messages of the same keys go back
    with them, also uncounted, because a handler gets the messages of a key in order."""

    topic: str
    partition: int
    group: str
    leases: list[tuple[int, list[int]]]


class RejectMessages(Command, frozen=True, tag="reject"):
    """Send messages to the dead letters: `reason` is "rejected" or "poison"."""

    topic: str
    partition: int
    group: str
    lease: int
    spans: list[int]
    reason: str = "rejected"
    error: str = ""


class Extend(Command, frozen=True, tag="extend"):
    """Move the deadline of whole leases to now + `lease_ms`; a lease that has timed out is lost."""

    topic: str
    partition: int
    group: str
    leases: list[int]
    lease_ms: int


class Commit(Command, frozen=True, tag="commit"):
    """Commit offsets of a stream group: (partition, generation, next offset)."""

    topic: str
    group: str
    member: str
    positions: list[tuple[int, int, int]]


class Committed(Command, frozen=True, tag="committed"):
    """Ask for the committed offset of a group in every partition; the answer is `Offsets` (-1: none)."""

    topic: str
    group: str


class Reopen(Command, frozen=True, tag="reopen"):
    """Redrive settled messages for one group: they are delivered again, with counters at zero."""

    topic: str
    partition: int
    group: str
    spans: list[int]


class SettleOffsets(Command, frozen=True, tag="settle_offsets"):
    """Settle offsets for a group without a lease (for an operator: dead letters that are redriven or
    purged)."""

    topic: str
    partition: int
    group: str
    spans: list[int]


class FindUnsettled(Command, frozen=True, tag="find_unsettled"):
    """Find the first `count_max` messages from an offset on that a group has not settled; if the group was
    never enlisted, none is settled. Nothing changes."""

    topic: str
    partition: int
    group: str
    offset: int = 0
    count_max: int = 500


class HoldOffsets(Command, frozen=True, tag="hold_offsets"):
    """Reserve unsettled messages of a group without an order for one member, for a while (for an operator,
    before `SettleOffsets`). Without spans, the member gives back what it holds, and the answer is `Done`."""

    topic: str
    partition: int
    group: str
    member: str
    spans: list[int]
    lease_ms: int = 60_000


class Republish(Command, frozen=True, tag="republish"):
    """Append the batch in the body: copies of messages. Their headers may exceed the limit by the one that
    names the group for which they are."""

    topic: str
    partition: int
    columns: int
    crc: int


# -------------------------------------------------------------------------------------- delays and traces


class CancelScheduled(Command, frozen=True, tag="cancel_scheduled"):
    """Cancel delayed messages by id. `deliver_at_us` (one per id, 0: unknown) are hints that make it
    quick."""

    topic: str
    partition: int
    ids: list[bytes]
    deliver_at_us: list[int] = []


class ListScheduled(Command, frozen=True, tag="list_scheduled"):
    """List delayed messages of a topic, the next due first."""

    topic: str
    count_max: int = 100
    after_us: int = 0


class Trace(Command, frozen=True, tag="trace"):
    """Trace messages: by partition and offset, or by a search over ids, keys and times.

    Times are those of append. `status` keeps only messages with that status now (see `TraceFound`). `full`
    scans the whole log for an id from which no time can be read.
    """

    topic: str
    partition: int | None = None
    offset: int | None = None
    id: bytes | None = None
    key: bytes | None = None
    from_us: int = 0
    to_us: int = 0
    status: str | None = None
    count_max: int = 100
    full: bool = False


# ------------------------------------------------------------------------------------------ staged writes


class StageRows(Command, frozen=True, tag="stage"):
    """Store the batch in the body for one partition under an attempt, outside of the readable log. Batches of
    an attempt on one partition are numbered from 0; a batch that is there already is not stored twice."""

    topic: str
    partition: int
    writer: str
    attempt: str
    columns: int
    crc: int
    number: int = 0


class DecideStaged(Command, frozen=True, tag="decide_staged"):
    """Decide a version of a writer: the attempts (topic, partition, attempt) that win. If this version or a
    later one was decided before, that decision is the answer. `batches` has the number of batches staged for
    each attempt; the command is refused unless exactly these are stored (if left empty: unless some are).

    `grouped` is a shorter form for many targets: (attempt, topic, partitions) stands for the attempt on each
    of these partitions. They follow after `attempts`, in this order.

    `attempt` names an attempt that staged nothing at all: otherwise all of those would look the same."""

    writer: str
    version: int
    attempts: list[tuple[str, int, str]]
    batches: list[int] = []
    grouped: list[tuple[str, str, list[int]]] = []
    attempt: str = ""


class AbortStaged(Command, frozen=True, tag="abort_staged"):
    """Drop undecided attempts; those of a decided version stay. `grouped` as in `DecideStaged`."""

    writer: str
    attempts: list[tuple[str, int, str]]
    grouped: list[tuple[str, str, list[int]]] = []


# -------------------------------------------------------------------------------------------- the log itself


class ReadFacts(Command, frozen=True, tag="read_facts"):
    """Read committed facts of delivery from the log of a partition, and when messages were appended: from an
    entry on, not before a time, about `bytes_max` bytes."""

    topic: str
    partition: int
    entry: int = 0
    bytes_max: int = 1_048_576
    from_us: int = 0


DeliveryRequest = (
    Lease
    | Ack
    | Nack
    | GiveBack
    | RejectMessages
    | Extend
    | Commit
    | Committed
    | Reopen
    | SettleOffsets
    | FindUnsettled
    | HoldOffsets
    | Republish
    | CancelScheduled
    | ListScheduled
    | Trace
    | StageRows
    | DecideStaged
    | AbortStaged
    | ReadFacts
)

# ------------------------------------------------------------------------------------------------ replies


class Grant(Command, frozen=True):
    """One lease as its holder gets it. `nbytes` of the body are its frames, in order; of a frame only the
    rows whose offsets are in `runs` are leased, in row order. `runs` are (first, count, deliveries, failures)
    with this delivery counted."""

    partition: int
    lease: int
    deadline_us: int
    nbytes: int
    runs: list[tuple[int, int, int, int]]


class Leases(Command, frozen=True, tag="leases"):
    """The leases; none if there was no message in time. The request had waited for `waited_ms` when the first
    lease was made: the holder counts its time from then, on its own clock."""

    grants: list[Grant]
    waited_ms: int = 0


class Settled(Command, frozen=True, tag="settled"):
    """The settlement is durable, except for `lost`: (lease, spans) whose receipts were stale."""

    lost: list[tuple[int, list[int]]] = []


class Extended(Command, frozen=True, tag="extended"):
    """The new deadline, and the leases that were already lost."""

    deadline_us: int
    lost: list[int] = []


class UnsettledFound(Command, frozen=True, tag="unsettled"):
    """Flat spans of unsettled messages; empty if there are no more."""

    spans: list[int]


class OffsetsHeld(Command, frozen=True, tag="held"):
    """The messages that the member asked for and holds now, and those that `others` hold; the rest is settled
    or dying."""

    spans: list[int]
    others: list[int] = []


class Cancelled(Command, frozen=True, tag="cancelled"):
    """One answer per id: whether the message was cancelled, now or before, and will never be delivered."""

    done: list[bool]


class ScheduledList(Command, frozen=True, tag="scheduled"):
    """Delayed messages: dicts with partition, id, deliver_at_us, key, value, headers."""

    messages: list[dict[str, Any]]


class TraceFound(Command, frozen=True, tag="traced"):
    """Traced messages, a dict each: topic, partition, offset (None before release), id, key, status
    (scheduled, cancelled, free, leased, waiting, settled, dying, dead, collected; by group where groups
    differ) and `events`: dicts with time_us, event, and its details (group, member, attempt, reason, …)."""

    messages: list[dict[str, Any]]
    complete: bool = True


class StagedDecision(Command, frozen=True, tag="staged_decision"):
    """The version last decided for the writer, and its attempts; `won`: whether these are the ones of the
    request. `applied` is false if a target failed: the broker tries again until all targets have appended.
    Very many attempts are `grouped` (see `DecideStaged`) instead of listed one by one."""

    version: int
    attempts: list[tuple[str, int, str]]
    won: bool
    applied: bool = True
    grouped: list[tuple[str, str, list[int]]] = []


class FactsRead(Command, frozen=True, tag="facts_read"):
    """Facts frames as they lie in the log; they are the body. `next_entry` is where to continue, `end_entry`
    the committed end: both are equal if there is no more. `groups` are the names of the present groups by
    number; `appended` are the data frames that were passed: (entry, base offset, span, append time)."""

    next_entry: int
    end_entry: int
    groups: dict[int, str]
    appended: list[tuple[int, int, int, int]]


DeliveryReply = (
    Leases
    | Settled
    | Extended
    | UnsettledFound
    | OffsetsHeld
    | Cancelled
    | ScheduledList
    | TraceFound
    | StagedDecision
    | FactsRead
)
