"""Facts: the events in the log of a partition. Applying facts is the only way that its state changes.

`Appended`, `Delayed` and `Staged` are never encoded: they are frames of their own, and replay makes them
again from the header and body of the frame. All other facts are small and share facts frames. An encoded fact
begins with its tag, a number. Stored bytes depend on tags, so no tag is ever used again. Fields are only
added at the end, with a default.
"""

from __future__ import annotations

import msgspec

from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import BatchView


class Appended(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A batch took the offsets [base_offset, base_offset + view.count)."""

    base_offset: int
    view: BatchView
    append_time_us: int
    producer_id: int = 0
    producer_epoch: int = 0
    producer_sequence: int = 0
    released: bool = False
    """The rows were delayed or staged before: their dedup ids were counted when they were first stored."""
    wall_us: int = 0
    """The wall time; 0 (in all frames of earlier releases): the append time."""


class Delayed(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A batch of delayed messages was stored as the frame `entry`; it has no offsets yet."""

    entry: int
    view: BatchView
    append_time_us: int
    producer_id: int = 0
    producer_epoch: int = 0
    producer_sequence: int = 0
    released: bool = False
    """The rows were staged before."""
    wall_us: int = 0
    """As in `Appended`."""


class Staged(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A batch was stored under an attempt of a writer, as the frame `entry`."""

    entry: int
    view: BatchView
    append_time_us: int
    attempt: int
    """The low half of hash128 of (writer, attempt): a frame has room only for a number (its
    `producer_id`)."""
    number: int = 0
    """The number of the batch within its attempt, from 0."""


class ProducerClaimed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A named producer was taken over: lower epochs are fenced, the next batch has sequence 0."""

    producer_id: int
    epoch: int
    time_us: int


class ProducerAdvanced(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A batch consisted of duplicates only: its sequence is used up, nothing was appended.

    `base_offset` is the end of the partition at that moment, and `count` is 0; `wall_us` as in `Appended`.
    """

    producer_id: int
    epoch: int
    sequence: int
    base_offset: int
    count: int
    time_us: int
    wall_us: int = 0


class Trimmed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The partition begins at `offset` now; all messages below it are gone."""

    offset: int


# ----------------------------------------------------------------------------------------------- delivery
# `group` is a small number given by `Enlisted`. Spans are flat: [first, end, first, end, …].


class Enlisted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A group exists on this partition from now on; everything below `start` is settled for it."""

    group: int
    name: str
    policy: GroupPolicy
    start: int
    time_us: int
    id: int = 0
    """The id that its coordinator gave to the group; 0 if it is of a release without ids."""


class Delisted(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A group is gone, with everything known about it."""

    group: int
    time_us: int


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The partition belongs to a member ("": to none), or is `shared` by all members of the group; lower
    generations are fenced. All leases are given back without a failure, unless leases are `kept`: then a
    `GivenBack` of the same decision names the messages that go back."""

    group: int
    member: str
    generation: int
    time_us: int
    shared: bool = False
    kept: bool = False


class Leased(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Soft. A member holds these messages until the deadline. `keys` has the key hash of each message, in
    offset order, if the group needs the keys; else it is empty."""

    group: int
    lease: int
    member: str
    spans: list[int]
    deadline_us: int
    time_us: int
    keys: list[int] = []


class LeaseExtended(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Soft. Leases get a new deadline."""

    group: int
    leases: list[int]
    deadline_us: int
    time_us: int


class LeaseExpired(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Soft. A lease timed out: the messages left in it have failed once more, and are available again,
    at once except for those in `apart`. `keys` as in `Leased`, `apart` as in `GivenBack`."""

    group: int
    lease: int
    time_us: int
    keys: list[int] = []
    apart: list[int] = []


class Acked(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Hard. Messages are settled by their members: (lease, spans)."""

    group: int
    leases: list[tuple[int, list[int]]]
    time_us: int


class Nacked(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Hard. Messages failed and wait for `delay_us`, or (-1) for the group's back-off. `keys` as in
    `Leased`."""

    group: int
    lease: int
    spans: list[int]
    delay_us: int
    time_us: int
    keys: list[int] = []
    error: str = ""


class GivenBack(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Soft. Messages left their leases without a failure and are available again. `keys` as in `Leased`.
    `unstarted`: no handler got them, so the delivery does not count. Messages in `apart` (flat spans) may
    have ended their members: for the group's `starvation_ms` they are leased only one at a time."""

    group: int
    spans: list[int]
    time_us: int
    keys: list[int] = []
    unstarted: bool = False
    apart: list[int] = []


class Dying(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Hard. Messages are on their way to the dead letters, from any state; they hold their order until
    `Buried`."""

    group: int
    spans: list[int]
    reason: str
    time_us: int
    error: str = ""
    keys: list[int] = []
    """As in `Leased`."""


class Buried(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Hard. The dead letters of these messages are durable: the messages are settled. `places` are flat
    (partition, offset) of the dead letters."""

    group: int
    spans: list[int]
    time_us: int
    topic: str = ""
    places: list[int] = []


class Lapsed(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Hard. Messages expired before they were delivered: they are settled and counted."""

    group: int
    spans: list[int]
    time_us: int


class CursorMoved(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Hard. A stream group has committed an offset."""

    group: int
    member: str
    offset: int
    time_us: int


class GroupReset(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Hard. A group starts again from an offset: leases, attempts and back-offs are gone."""

    group: int
    offset: int
    generation: int
    time_us: int


class Reopened(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Hard. Settled messages are redriven: available again, with counters at zero. `keys` as in `Leased`."""

    group: int
    spans: list[int]
    time_us: int
    keys: list[int] = []


class GroupPaused(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Hard. Leasing for this group pauses or resumes."""

    group: int
    paused: bool
    time_us: int


class OffsetsSettled(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Hard. An operator settled messages that were not leased."""

    group: int
    spans: list[int]
    time_us: int


# ------------------------------------------------------------------------------------- delays and staging


class Released(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Delayed messages up to (`until_us`, `until_ref`) got their offsets in the data frame before this
    fact."""

    until_us: int
    until_ref: int
    time_us: int


class ScheduleCancelled(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Delayed messages (refs: entry << 20 | row) will never be appended."""

    refs: list[int]
    time_us: int


class StageApplied(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The staged batches of a decided version got their offsets in the data frames before this fact, or wait
    for their time in the scheduled frames before it."""

    writer: str
    version: int
    attempts: list[int]
    time_us: int


class StageDropped(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Undecided attempts were aborted, or dropped after a while."""

    attempts: list[int]
    time_us: int


class MessagesLost(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """Hard. The loss of these offsets was accepted: unsettled messages among them count as collected, and
    readers are informed."""

    spans: list[int]
    time_us: int


DeliveryFact = (
    Enlisted
    | Delisted
    | Granted
    | Leased
    | LeaseExtended
    | LeaseExpired
    | Acked
    | Nacked
    | GivenBack
    | Dying
    | Buried
    | Lapsed
    | CursorMoved
    | GroupReset
    | Reopened
    | GroupPaused
    | OffsetsSettled
)
Fact = (
    ProducerClaimed
    | ProducerAdvanced
    | Trimmed
    | DeliveryFact
    | Released
    | ScheduleCancelled
    | StageApplied
    | StageDropped
    | MessagesLost
)
"""All facts that a facts frame may hold, for the codec."""

Stored = Appended | Delayed | Staged
"""Facts that are frames of their own."""
