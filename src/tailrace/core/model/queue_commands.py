"""Commands on the queue side of one topic: leases and their settlement, delays, traces, staged writes.

Spans of offsets travel flat: ``[first, end, first, end, …]``, ascending, half-open.
"""

from __future__ import annotations

from typing import Any

from tailrace.core.model.identifiers import Command

# ------------------------------------------------------------------------------------------------- leases


class Lease(Command, frozen=True, tag="lease"):
    """Lease messages for a member of a group from (partition, generation) pairs; waits up to `wait_ms` while
    there is nothing. Without `lease_ms` the group's own is taken.

    `held` comes after an answer that was lost: the leases of these partitions that the member knows of. What
    else it was granted is given back first, so that nothing waits for a member that never heard of it.

    With `above` only messages of more urgent lanes are wanted, those with a priority below this number: the
    member has enough of the others in hand. A newer request of the same member replaces one that waits; with
    `count_max` 0 it asks for nothing itself.
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
    """Settle messages: (lease, spans) pairs of one partition."""

    topic: str
    partition: int
    group: str
    leases: list[tuple[int, list[int]]]


class Nack(Command, frozen=True, tag="nack"):
    """Give messages back. As a failure it counts an attempt and waits `delay_ms`, or the group's back-off;
    else they are available at once and no attempt is counted.

    Later messages of their keys go back with them. `started` are (lease, spans) pairs of messages that
    handlers were given: for the others, which lie unstarted or are on their way, no delivery is counted."""

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
    """Give messages back that no handler was given: (lease, spans) pairs of one partition. They are available
    at once; neither an attempt nor a delivery is counted. Later messages of the same keys go back with them,
    uncounted, too: a handler gets a key's messages in order."""

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
    """Move the deadline of whole leases to now + `lease_ms`; refused after expiry."""

    topic: str
    partition: int
    group: str
    leases: list[int]
    lease_ms: int


class Commit(Command, frozen=True, tag="commit"):
    """Store the place of a stream group: (partition, generation, next offset)."""

    topic: str
    group: str
    member: str
    positions: list[tuple[int, int, int]]


class Committed(Command, frozen=True, tag="committed"):
    """Ask for the place of a group in every partition; the answer is `Offsets` (-1 where it has none)."""

    topic: str
    group: str


class Reopen(Command, frozen=True, tag="reopen"):
    """Make settled messages deliverable again for one group, with fresh counters (redrive)."""

    topic: str
    partition: int
    group: str
    spans: list[int]


class SettleOffsets(Command, frozen=True, tag="settle_offsets"):
    """Settle offsets for a group without a lease (an operator's act: redriven or purged dead letters)."""

    topic: str
    partition: int
    group: str
    spans: list[int]


class FindUnsettled(Command, frozen=True, tag="find_unsettled"):
    """The lowest messages from an offset on that a group has not settled, up to `count_max`; all count where
    it was never enlisted. Nothing changes by asking."""

    topic: str
    partition: int
    group: str
    offset: int = 0
    count_max: int = 500


class HoldOffsets(Command, frozen=True, tag="hold_offsets"):
    """Keep unsettled messages from all others for a while, for a group without an order (an operator's act
    before they are settled by `SettleOffsets`). Without spans, what the member holds is given back, and the
    answer is `Done`."""

    topic: str
    partition: int
    group: str
    member: str
    spans: list[int]
    lease_ms: int = 60_000


class Republish(Command, frozen=True, tag="republish"):
    """Append the batch in the body: copies of messages. Their headers may be above the limit by the one that
    says for which group they are."""

    topic: str
    partition: int
    columns: int
    crc: int


# -------------------------------------------------------------------------------------- delays and traces


class CancelScheduled(Command, frozen=True, tag="cancel_scheduled"):
    """Cancel delayed messages by id; `deliver_at_us` (one per id, 0 = unknown) makes it quick."""

    topic: str
    partition: int
    ids: list[bytes]
    deliver_at_us: list[int] = []


class ListScheduled(Command, frozen=True, tag="list_scheduled"):
    """Delayed messages of a topic, the next due first."""

    topic: str
    count_max: int = 100
    after_us: int = 0


class Trace(Command, frozen=True, tag="trace"):
    """The life of messages: by place (partition and offset), or by a search over ids, keys and times.

    Times are `append_time`; `status` keeps only lives that ended so (see `TraceFound`). `full` scans all that
    is stored for an id whose time cannot be read from it.
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
    an attempt on one partition are numbered from 0; one that is there already is not stored twice."""

    topic: str
    partition: int
    writer: str
    attempt: str
    columns: int
    crc: int
    number: int = 0


class DecideStaged(Command, frozen=True, tag="decide_staged"):
    """Decide a version of a writer: the attempts (topic, partition, attempt) that win. What an earlier
    decision of that or a later version said is the answer when there is one. `batches` has how many were
    staged for each attempt; it is refused unless just these are there (left empty: unless any are).

    `grouped` is a shorter form for many targets: (attempt, topic, partitions) stands for that attempt on each
    of these partitions. They come behind `attempts`, in this order.

    `attempt` names one that staged nothing at all: without it, all of those would be the same."""

    writer: str
    version: int
    attempts: list[tuple[str, int, str]]
    batches: list[int] = []
    grouped: list[tuple[str, str, list[int]]] = []
    attempt: str = ""


class AbortStaged(Command, frozen=True, tag="abort_staged"):
    """Drop attempts that were never decided; those of a decided version stay untouched. `grouped` as in
    `DecideStaged`."""

    writer: str
    attempts: list[tuple[str, int, str]]
    grouped: list[tuple[str, str, list[int]]] = []


# -------------------------------------------------------------------------------------------- the log itself


class ReadFacts(Command, frozen=True, tag="read_facts"):
    """What the log of a partition says has happened, from an entry on, and not before a time: facts of
    delivery, and when messages were appended; about `bytes_max` bytes of it. Only what is committed."""

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
    """One lease as told to its holder. `nbytes` of the body are its frames, in order; of a frame only the
    rows whose offset is in `runs` are leased, in row order. `runs` has (first, count, deliveries, failures)
    with this delivery counted."""

    partition: int
    lease: int
    deadline_us: int
    nbytes: int
    runs: list[tuple[int, int, int, int]]


class Leases(Command, frozen=True, tag="leases"):
    """What was leased; empty when there was nothing in time. The request had waited for `waited_ms` when the
    first of it was leased: a lease counts from then, on whatever clock its holder has."""

    grants: list[Grant]
    waited_ms: int = 0


class Settled(Command, frozen=True, tag="settled"):
    """The settlement is durable, but for `lost`: spans whose receipts were stale, as (lease, spans)."""

    lost: list[tuple[int, list[int]]] = []


class Extended(Command, frozen=True, tag="extended"):
    """The new deadline, and the leases that were lost already."""

    deadline_us: int
    lost: list[int] = []


class UnsettledFound(Command, frozen=True, tag="unsettled"):
    """Flat spans of unsettled messages; none when there are no more."""

    spans: list[int]


class OffsetsHeld(Command, frozen=True, tag="held"):
    """What the member holds now of the messages that it asked for, and what is with `others`; the rest is
    settled, or dying."""

    spans: list[int]
    others: list[int] = []


class Cancelled(Command, frozen=True, tag="cancelled"):
    """One answer per id: whether it will never be delivered because it was cancelled (now or before)."""

    done: list[bool]


class ScheduledList(Command, frozen=True, tag="scheduled"):
    """Dicts with partition, id, deliver_at_us, key, value, headers."""

    messages: list[dict[str, Any]]


class TraceFound(Command, frozen=True, tag="traced"):
    """Dicts, one per message: topic, partition, offset (None before release), id, key, status (scheduled,
    cancelled, free, leased, waiting, settled, dying, dead, collected; by group where groups differ) and
    `events`: dicts with time_us, event, and what belongs to it (group, member, attempt, reason, …)."""

    messages: list[dict[str, Any]]
    complete: bool = True


class StagedDecision(Command, frozen=True, tag="staged_decision"):
    """The version last decided for the writer, and its attempts; `won`: whether it is the one asked for.
    Where a target failed, `applied` is false: the broker goes on trying until all of them have it. Very many
    attempts are `grouped`, see `DecideStaged`, and not listed one by one."""

    version: int
    attempts: list[tuple[str, int, str]]
    won: bool
    applied: bool = True
    grouped: list[tuple[str, str, list[int]]] = []


class FactsRead(Command, frozen=True, tag="facts_read"):
    """Facts frames from the log, as they lie there, are the body. `next_entry` is where to go on, `end_entry`
    the end of what was committed: both are the same when there is no more. `groups` are the names of the
    groups of today by number; `appended` are the data frames passed: (entry, base offset, span, append
    time)."""

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
