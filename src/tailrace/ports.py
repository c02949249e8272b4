"""Every seam of the broker in one file: clock, disk, log of a partition, coordinator, verbs.

Each port is small, and each has one conformance suite that every implementation passes
(`tests/conformance`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.model.catalog import Catalog
from tailrace.core.model.commands import (
    Reply,
    Request,
)
from tailrace.core.model.inventory import TopicCard, TopicFolder
from tailrace.errors import Corrupt
from tailrace.format.frame import Buffer, Frame, Header


class Clock(Protocol):
    """Time for decisions, in two readings. Durations run on the first, users' absolute times on the
    second."""

    def now_us(self) -> int:
        """Steady time: wall time at the start plus monotonic time, never backwards. Microseconds since 1970
        UTC."""
        ...

    def wall_us(self) -> int:
        """What the machine's clock shows; it may jump, in both directions. Microseconds since 1970 UTC."""
        ...


class ClientClock(Protocol):
    """Time as a client sees it: the machine's own, or that of a test's broker, which is virtual. A client
    never concludes from what a broker does how much time has passed."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 UTC: what delays, lifetimes and expiry count by. Cheap to ask for."""
        ...

    def elapsed_ms(self) -> float:
        """Milliseconds since some moment, never less than before: what leases count by. The time that the
        machine was suspended counts, too."""
        ...


class Disk(Protocol):
    """The file system calls that storage makes, so that a simulated disk can stand in.

    Paths are relative to the disk's root. Files are open until `close`. Errors are OSError, as the kernel
    gives them.
    """

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; returns a handle."""
        ...

    def close(self, handle: int) -> None:
        """Close a handle."""
        ...

    def write(self, handle: int, parts: Sequence[Buffer], position: int) -> None:
        """Write all parts at a position (vectored, continued after short writes)."""
        ...

    def read(self, handle: int, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        ...

    def view(self, handle: int, position: int, length: int) -> memoryview:
        """As `read`, for large pieces that are handed on as they are."""
        ...

    def map(self, handle: int, position: int, length: int) -> memoryview:
        """As `view`, without a copy in memory: the pages are the file's own. For very large pieces of what is
        never cut off while somebody looks at it; errors of the disk are told now, not later."""
        ...

    def sync(self, handle: int) -> None:
        """fdatasync."""
        ...

    def allocate(self, handle: int, length: int) -> None:
        """Reserve space; the file grows to `length` and reads as zeros there."""
        ...

    def truncate(self, handle: int, length: int) -> None:
        """Cut or extend the file to `length`."""
        ...

    def size(self, handle: int) -> int:
        """Length of the file."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` atomically."""
        ...

    def uncache(self, path: str, position: int = 0) -> None:
        """Advice to forget what memory caches of a file from a position on, as far as it is not waiting to be
        written: the next read of it comes from the disk.
        """
        ...

    def remove(self, path: str) -> None:
        """Unlink a file, or a whole folder."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty when it does not exist."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        ...

    def make_folder(self, folder: str) -> None:
        """Create a folder and its parents, each synced into its parent."""
        ...

    def add_folder(self, folder: str) -> None:
        """Create a folder in one whose name is durable; its own becomes so when that one is synced."""
        ...

    def sync_folder(self, folder: str) -> None:
        """fsync of a directory: makes creations, renames and removals in it durable."""
        ...

    def sync_all(self, handles: Sequence[int], folders: Sequence[str]) -> None:
        """`sync` and `sync_folder` of all these, in no order, side by side where that is faster. Raises the
        first error when all have ended."""
        ...


class Room(msgspec.Struct, frozen=True):
    """What a data folder has: bytes that are free, bytes in all, and how many the reserve takes."""

    free_bytes: int
    total_bytes: int
    reserve_bytes: int


class SpaceGauge(Protocol):
    """The room of a data folder, and a reserve in it for hard times. All verbs block; errors are OSError."""

    def measure(self) -> Room:
        """How much there is now."""
        ...

    def hold(self) -> bool:
        """Take the reserve, or keep it; false, and nothing is held, when there is no room for it."""
        ...

    def release(self) -> None:
        """Let a part of the reserve go, in the end all of it; harmless when nothing is held."""
        ...


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """Opaque state as of an entry: replay starts behind `entry`."""

    entry: int
    offset: int
    chunks: Sequence[Buffer]


class Recovery(msgspec.Struct, frozen=True, eq=False):
    """What a log found when it was opened.

    `frames` yields (header, body) of every whole, checked frame after the snapshot, in order. `cut_bytes`
    counts the torn tail that was cut. `fault` names damage that must not be cut: the log is quarantined,
    reads below the damage go on, writes are refused.
    """

    snapshot: Snapshot | None
    frames: Iterator[tuple[Header, Buffer]]
    end_entry: int
    end_offset: int
    cut_bytes: int = 0
    fault: str | None = None
    lost: Sequence[int] = ()
    """Offsets, flat, whose loss was accepted and is not a fact in the log yet: the owner has to append one,
    and to say `loss_recorded`."""


class LostRange(msgspec.Struct, frozen=True):
    """Entries of a log that are not there any more, with the offsets that they had."""

    first_entry: int
    end_entry: int
    first_offset: int
    end_offset: int
    file: str
    position: int
    bytes: int
    why: str
    exact: bool = True
    """False: nothing says how many offsets there were, and these are more than there can have been."""


class Losses(msgspec.Struct, frozen=True):
    """What a log has lost, and in which files the damaged bytes are kept."""

    ranges: list[LostRange]
    kept: list[str] = []


class LogStats(msgspec.Struct, frozen=True):
    """Figures of one log for people and metrics."""

    start_offset: int
    end_offset: int
    bytes: int
    segments: int
    syncs: int
    sync_seconds: float
    fault: str | None


class Scrubbed(msgspec.Struct, frozen=True):
    """A piece of a log that was read from the disk and is well."""

    next_entry: int | None
    """Where to go on; None when the log is through."""
    bytes: int
    problems: Sequence[str] = ()
    """Damage that stops nothing: of snapshots that have another behind them."""


class KeyPlaces(NamedTuple):
    """Messages of one key, by ascending offset, as `find_key` gives them."""

    offsets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """Where the engine finds their frames, for `read_places`."""
    passed: int
    """How many newer ones were passed over."""
    generation: int
    """Of the log: it is another one when frames have gone since."""


class PartitionLog(Protocol):
    """The log of one partition. Blocking; `append`, `sync`, `trim`, `truncate` are never called side by side,
    `read` and the look-ups may run beside them in other threads. All raise `StorageFault` (`Corrupt`, `Full`)
    and nothing else on disk trouble.

    Whichever verb finds damage, the log is quarantined from then on; see `on_damage`.

    After any failed sync, or a failed write that could not be undone, every further append raises: the
    owner must reopen. The outcome of an append that raises is `none` only when no byte of it can appear any
    more; a `sync` or `flush` that raises leaves open what became of everything since the last good one.
    """

    def on_damage(self, tell: Callable[[Corrupt], None]) -> None:
        """Who is told, once and in whatever thread it happens, when a read finds damage. By then the log is
        quarantined: every further write raises `Corrupt`, and what is well can be read. Called first of all.
        """
        ...

    def recover(self) -> Recovery:
        """Open: find the end, cut a torn tail, give the frames to replay. Called once, first."""
        ...

    def append(self, frames: Sequence[Frame], *, sync: bool) -> None:
        """Append in one vectored write; with `sync`, return only when they are on the disk. All or none."""
        ...

    def room(self) -> int:
        """Bytes that an append without `sync` can take right now for the price of one write into memory: no
        new file, no sync.
        """
        ...

    def sync(self) -> None:
        """Make everything appended so far durable."""
        ...

    def flush(self) -> None:
        """Make durable what was appended before the call. Unlike `sync` it may run beside `append`, in
        another thread, and does not hold it up."""
        ...

    def read(self, offset: int, end: int, bytes_max: int) -> Sequence[Buffer]:
        """Whole frames as raw bytes from the one that holds `offset` (or the next) up to `end`: at least one
        data frame if there is any, then as many as fit `bytes_max`. Only frames that pass their checks; a
        damaged one raises `Corrupt` unless good ones precede it.
        """
        ...

    def read_entries(self, entries: Sequence[int]) -> list[tuple[Header, Buffer]]:
        """The checked frames with these indexes, of any kind, in the order asked. An index that the log does
        not hold is a `StorageFault`.
        """
        ...

    def find_key(self, key_hash: int, begin: int, end: int, skip: int, count: int) -> KeyPlaces | None:
        """Where the messages in [begin, end) lie whose key has this hash: the newest `skip` of them are
        passed over, the next `count` are found. None when keys have still to be read from frames:
        `index_keys` does that. A few other keys may share the hash.
        """
        ...

    def read_places(self, places: KeyPlaces, bytes_max: int) -> list[Frame]:
        """The checked frames that hold what `find_key` found, each once and in the order of the places: at
        least one, then as many as fit `bytes_max`. None at all when the log has shrunk since: search again.
        """
        ...

    def index_keys(self, bytes_max: int) -> bool:
        """Read the keys out of about so many bytes of frames whose keys are not known: those of the open
        segment that were there at the start, and those that a search missed. True when nothing is left."""
        ...

    def scan(self, entry: int, end: int) -> Iterator[tuple[Header, Callable[[], Buffer]]]:
        """Frames of every kind with an index in [entry, end) that are there now, in order: the header, and a
        function that reads the body and checks it, good until the next step. What is trimmed on the way may
        be left out.
        """
        ...

    def entry_at(self, append_time_us: int) -> int:
        """An index at or before that of the first frame with an append time at or above, not far from it; the
        end when there is none.
        """
        ...

    def find_time(self, timestamp_us: int) -> int | None:
        """Base offset of the first data frame whose greatest timestamp is at or above; None when there is
        none.
        """
        ...

    def retention_offset(
        self, *, bytes_max: int | None, append_time_us: int | None, count_max: int | None
    ) -> int:
        """The lowest frame boundary that retention would keep: bytes, age (frames appended before are
        dropped) and count of data.
        """
        ...

    def trim(self, offset: int, floor: int | None = None) -> None:
        """Free whole segments that lie below `offset` and below the previous snapshot; what holds the entry
        `floor` or a later one stays.
        """
        ...

    def truncate(self, entry: int) -> None:
        """Cut every frame with an index at or above `entry`."""
        ...

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Store atomically and durably, once the frames that it covers are on the disk; the two newest are
        kept. May run beside `append` and `trim`, in another thread, and does not hold them up; not beside
        `truncate` and `close`."""
        ...

    def scrub(self, entry: int, bytes_max: int) -> Scrubbed:
        """Read and check what is closed from an index on, about so many bytes of it, from the disk rather
        than from memory; at the end of it, snapshots too. May run beside everything, as reads do."""
        ...

    def loss_recorded(self) -> None:
        """The loss that `Recovery.lost` spoke of is a durable fact now."""
        ...

    def stats(self) -> LogStats:
        """Figures, without touching the disk."""
        ...

    def close(self) -> None:
        """Sync, write the durable mark and let go."""
        ...


class TopicFolders(Protocol):
    """The folders of topics, for engines that have them. Every step is durable when it returns;
    `core.inventory` says what each is for. All raise `StorageFault` on disk trouble."""

    def survey(self) -> list[TopicFolder]:
        """Every topic folder with what it holds; reads only."""
        ...

    def exists(self, folder: str) -> bool:
        """Whether there is such a folder, of a topic or of a partition in one."""
        ...

    def intend(self, *cards: TopicCard) -> None:
        """Make the topics' folders where they are new, and note there what each topic is to be."""
        ...

    def lay_out(self, *partitions: str) -> None:
        """Make the folders of new partitions (`topic-folder/partition`): logs that hold nothing."""
        ...

    def confirm(self, *folders: str) -> None:
        """What was noted is done: it is the topic's card from now on. This alone is not synced: as long as
        the note is there instead, it says the same."""
        ...

    def withdraw(self, folder: str) -> None:
        """Nothing is to be done any more."""
        ...

    def discard(self, folder: str) -> None:
        """Remove a folder of which nothing was ever acknowledged."""
        ...


class LogStore(Protocol):
    """A storage engine: opens and removes the logs of partitions by name (`topic-folder/partition`)."""

    @property
    def folders(self) -> TopicFolders | None:
        """Where the topics' cards lie; None for an engine that forgets everything."""
        ...

    def log(self, name: str) -> PartitionLog:
        """The log of that name, created when it is new; `recover` comes next."""
        ...

    def known_log(self, name: str) -> PartitionLog:
        """A log that was made before: where it is missing, `recover` names that as its fault, and nothing is
        made."""
        ...

    def find_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """What of a log cannot be read any more; changes nothing. `entries` are frames that are whole and of
        no use to their owner, `snapshots` those of such snapshots: they count as lost, too."""
        ...

    def accept_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """Give up what `find_losses` finds, so that the log opens well again: LOST frames stand for it, all
        else stays as it is, offsets are never used again, and what was damaged is kept aside. Nobody has the
        log open. Whatever crashes, the log opens as damaged or with `Recovery.lost`."""
        ...

    def remove(self, name: str) -> None:
        """Delete a log and what it holds, for good."""
        ...

    def save_note(self, name: str, data: bytes) -> None:
        """Store something small of the owner's, durably and whole."""
        ...

    def load_note(self, name: str) -> bytes | None:
        """What was stored so; None when nothing was."""
        ...

    def names(self) -> Iterable[str]:
        """Every log that is stored."""
        ...

    def close(self) -> None:
        """Release the engine's own resources (its lock)."""
        ...


class Registry(Protocol):
    """Keeps the catalog; on one node a file, in a cluster etcd."""

    def load(self) -> Catalog | None:
        """The catalog as last saved; None when there is none."""
        ...

    def save(self, catalog: Catalog) -> None:
        """Store durably and atomically before returning."""
        ...


Respond = Callable[[Reply, Sequence[Buffer]], None]
"""Called once per request with the reply and the parts of its body."""


class BrokerVerbs(Protocol):
    """The broker as its clients see it: over a socket, or inside the same process."""

    @property
    def clock(self) -> ClientClock:
        """The time that clients of this broker live in."""
        ...

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """Take a request; `respond` is called exactly once, later or at once, in the caller's thread."""
        ...


Finished = Callable[[Any, Exception | None], None]
"""What a finished piece of storage work calls: with its result, or with the exception that ended it."""


class Threads(Protocol):
    """Storage work off the loop (`storage.threads`): ordered per log for writes, free for reads."""

    def append(self, log: PartitionLog, frames: Sequence[Frame], sync: bool, done: Finished) -> None:
        """Append behind everything queued for this log."""
        ...

    def run(self, log: Any, work: Callable[[], object], done: Finished) -> None:
        """Any other work, in order with the appends of this log."""
        ...

    def read(self, work: Callable[[], object], done: Finished) -> None:
        """Work on the reader threads."""
        ...

    def tell(self, done: Finished, result: object) -> None:
        """From any thread: let the owner call `done(result, None)`, before what is finished after this."""
        ...

    def forget(self, log: Any) -> None:
        """Drop what is kept for a log that is gone."""
        ...

    def completed(self) -> Sequence[tuple[Finished, Any, Exception | None]]:
        """Take what has finished since the last call."""
        ...

    def close(self) -> None:
        """Finish what is queued and stop."""
        ...


class Waiting(Protocol):
    """A request of a receiver that waits for something to hand over."""

    def hang_up(self) -> None:
        """The receiver sends nothing more."""
        ...

    def drop(self) -> None:
        """Nobody waits for the answer any more."""
        ...


class Gate(Protocol):
    """Whether a receiver has room for more data; a slow one keeps its fetches waiting instead of filling
    memory.
    """

    def blocked(self, resume: Callable[[], None]) -> bool:
        """False: go on. True: there is no room, `resume` will be called."""
        ...

    def reserve(self, nbytes: int, resume: Callable[[], None]) -> bool:
        """Whether there is room for bytes from the disk; if so they count until `release`, else `resume` will
        be called.
        """
        ...

    def release(self, nbytes: int) -> None:
        """Bytes that were reserved have been handed over, or are not needed."""
        ...

    fetches: dict[Waiting, None]
    """Fetches and leases under way; a receiver that goes away drops them."""
    answered_us: dict[str, int]
    """When data was last handed over, by topic; kept by the fetches themselves."""


Verb = Callable[[Any, Buffer, Respond, Gate], None]
"""What does the work of one kind of request."""


class Verbs(Protocol):
    """The broker as a listener sees it: requests in, answers whenever they are due."""

    def submit(self, request: Request, body: Buffer, respond: Respond, gate: Gate) -> None:
        """Do what a request asks for; `respond` is called once, unless the receiver is gone by then."""
        ...

    def gather(self, gathering: bool, later: bool = False) -> None:
        """Between `gather(True)` and `gather(False)` requests only gather; then they share a turn, at once or
        (`later`) in the next round of the event loop."""
        ...
