"""The process: a protocol between partitions, written as a pure machine.

Some work needs more than one partition: a message leaves its topic when it is in the dead letters, a member
may lease when a partition knows of its grant. No turn can do that, because each log is written and synced at
times of its own. Such work is done in steps, and its safety is the order of these steps. A process holds that
order, and nothing else: it does no I/O, keeps no time, and knows other partitions by name only.

    event ──▶ step ──▶ effects

    events    the life begins · facts of the home partition were stored · somebody asks · a command was
              answered · a read has ended · a delay is over
    effects   submit a command to a partition · change a topic · read the home log · forget what was read ·
              wait for a delay or for the wall clock · answer a request · log · count · tell those who wait

A process belongs to the leader of one partition, its *home*. It is made when the home partition takes
commands, from the state that was recovered from the log, and it dies when that state is dropped: because
storage failed, the topic was deleted or the broker ends. What a process remembers is only how far it is; all
of it can be derived from the state of its home again. Two rules follow, and every process keeps them:

*Every step may be repeated.* A crash between two steps leaves the work where the last durable step put it.
The next life derives that step from the state and takes the following one, which may have been taken before.
So each command of a process is one that may come twice: it carries a dedup id, an id or a version.

*What another log relies on is synced first.* `Submit` with `sure` is answered when everything that the target
had decided by then is synced, whatever its topic promises. A step that relies on what one log holds waits for
such an answer before it writes another log. Dead letters (`core.process.dead_letter_process`) are an example:

    Begun or FactsStored          a message of orders/0 is dying
      Submit Look to orders/0     sure: the death is synced
    Answered
      Read                        the message, from the home log
    Found
      Submit PublishBatch to orders.dlq/0      sure: the dead letter is synced
    Answered
      Submit BuryDone to orders/0              the message is settled

    power fails after any line: the message is dying, and the next life begins at the first line again;
    the dedup id of the dead letter makes a second append of it a duplicate

The driver (`broker.runtime.process_driver`) carries effects out and brings their answers as events. Steps
never nest: an event that arrives during a step waits for its end. Events that belong to an earlier life never
arrive. An effect has a `tag`, which comes back with its answer.

Messages that are read may be too large to go through a process. Then the driver leaves them on a *shelf*, and
the process hears only how much was read. The shelf makes the body of a `Submit` that has none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.commands import AlterTopic, CreateTopic, Reply
from tailrace.core.model.identifiers import Refusal, TopicPartition


class Now(NamedTuple):
    """The world at the time of a step, as far as processes may see it."""

    catalog: Catalog
    wall_us: int = 0
    damaged: bool = False
    """Whether the home log is damaged: the state may be incomplete, and cannot be changed."""
    now_us: int = 0
    """Steady time, on which the delays of `After` run."""
    full: bool = False
    """Whether the disk is full: nothing is appended that can wait."""


# ------------------------------------------------------------------------------------------------- events


class Begun(NamedTuple):
    """The life of the process begins: the home partition takes commands. Comes once, before all others."""


class FactsStored(NamedTuple):
    """Facts of the home partition are as durable as its topic asks; they are of kinds that it watches."""

    facts: Sequence[Any]


class Answered(NamedTuple):
    """The reply to a `Submit` or a `Change`."""

    tag: Hashable
    reply: Reply


class Found(NamedTuple):
    """The result of a `Read`, or why there is none."""

    tag: Hashable
    result: Any | Refusal


class Asked(NamedTuple):
    """Somebody on this node asks for something that is not a decision of the home partition. A request that
    wants an answer has a `tag`, and gets it by `Respond`, now or later; if the life ends before, the driver
    refuses it."""

    request: Any
    tag: Hashable = None


class Due(NamedTuple):
    """The delay of an `After` is over, or the time of an `AtWall` has come."""

    tag: Hashable


Event = Begun | FactsStored | Asked | Answered | Found | Due


# ------------------------------------------------------------------------------------------------ effects


class Submit(NamedTuple):
    """Submit a command to a partition, also to the home partition. With `sure`, the reply comes when all that
    the target had decided by then is synced; otherwise, when it is as durable as the target's topic asks. The
    target is refused with `not_found` if its topic has another id than `topic_id` (0: any). Without a body,
    the shelf makes command and body from what it keeps."""

    tag: Hashable
    target: TopicPartition
    command: Any
    body: bytes | bytearray | memoryview | None = b""
    topic_id: int = 0
    sure: bool = True


class Change(NamedTuple):
    """Create or alter a topic, internal ones included."""

    tag: Hashable
    request: CreateTopic | AlterTopic


class Read(NamedTuple):
    """Read the committed part of the home log, as the reader for requests of this type does it."""

    tag: Hashable
    request: Any


class Forget(NamedTuple):
    """Drop from the shelf what is not needed any more."""

    what: Any


class After(NamedTuple):
    """Come back after a delay. It takes the place of what was set under this tag."""

    tag: Hashable
    delay_us: int


class AtWall(NamedTuple):
    """Come back when the wall clock shows a time. It takes the place of what was set under this tag."""

    tag: Hashable
    wall_us: int


class Cancel(NamedTuple):
    """Forget what was set under this tag, if anything is."""

    tag: Hashable


class Respond(NamedTuple):
    """Answer the request that came under this tag, if nobody has answered it yet."""

    tag: Hashable
    reply: Reply


class Log(NamedTuple):
    """Write a line to the log that people read."""

    level: Literal["warning", "error"]
    text: str


class Count(NamedTuple):
    """Count a failure of this kind of process, for the home topic."""


class Tell(NamedTuple):
    """Something has changed for requests that wait on this node. What it is depends on the process."""

    what: Any


Effect = Submit | Change | Read | Forget | After | AtWall | Cancel | Respond | Log | Count | Tell


class Process(Protocol):
    """One protocol, for one home partition and one life."""

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """Take an event in; return what is to be done, in order."""
        ...
