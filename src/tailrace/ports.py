"""Ports: every seam of the broker in one file, such as clock, disk, log of a partition, registry and verbs.

Each port is small, and has one conformance suite that every implementation passes (`tests/conformance`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.catalog.catalog import Catalog
from tailrace.core.catalog.inventory import TopicCard, TopicFolder
from tailrace.core.model.access import Caller, Identities, Origin
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt
from tailrace.format.frame import Buffer, Frame, Header
from tailrace.format.wire import Credentials


class Clock(Protocol):
    """Time for decisions: durations run on steady time, users' absolute times on the wall clock."""

    def now_us(self) -> int:
        """Steady time, never backwards: microseconds since 1970 at the start, plus monotonic time."""
        ...

    def wall_us(self) -> int:
        """Time of the machine's clock, in microseconds since 1970 UTC; it may jump in both directions."""
        ...


class ClientClock(Protocol):
    """Time as a client sees it: that of the machine, or the virtual time of a test's broker. A client never
    infers from a broker's behaviour how much time has passed."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 UTC, for delays, lifetimes and expiry. Cheap to call."""
        ...

    def elapsed_ms(self) -> float:
        """Milliseconds since some moment, for leases; never less than before, also after a suspension."""
        ...


class Disk(Protocol):
    """The file system calls of storage, so that a simulated disk can stand in.

    Paths are relative to the disk's root. Files are open until `close`. Errors are OSError, as the kernel
    raises them."""

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
        """As `read`, for large pieces that are passed on as they are."""
        ...

    def map(self, handle: int, position: int, length: int) -> memoryview:
        """As `view`, without a copy: the memory is the pages of the file. For very large pieces of files that
        are never cut while a view exists. Errors of the disk are raised now, not later."""
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
        """Advice to drop the page cache of a file from a position on, except for pages that are not written
        yet, so that the next read comes from the disk."""
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
        """Create a folder in a parent whose name is durable; a sync of the parent makes this one durable."""
        ...

    def sync_folder(self, folder: str) -> None:
        """fsync of a directory: makes creations, renames and removals in it durable."""
        ...

    def sync_all(self, handles: Sequence[int], folders: Sequence[str]) -> None:
        """`sync` all handles and `sync_folder` all folders; raises the first error when all have ended."""
        ...


class Room(msgspec.Struct, frozen=True):
    """Bytes of a data folder's file system: free, in total, and those that the reserve takes."""

    free_bytes: int
    total_bytes: int
    reserve_bytes: int


class SpaceGauge(Protocol):
    """The room of a data folder, and a reserve in it. All verbs block; errors are OSError."""

    def measure(self) -> Room:
        """Measure the room now."""
        ...

    def hold(self) -> bool:
        """Take the reserve, or keep it; false, with nothing held, if there is no room for it."""
        ...

    def release(self) -> None:
        """Release a part of the reserve, in the end all of it; harmless if nothing is held."""
        ...


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """Opaque state as of an entry: a replay begins with the entry after it."""

    entry: int
    offset: int
    chunks: Sequence[Buffer]


class Recovery(msgspec.Struct, frozen=True, eq=False):
    """The result of opening a log.

    `frames` yields (header, body) of every whole, checked frame after the snapshot, in order. `cut_bytes`
    counts the torn tail that was cut. `fault` names damage that must not be cut: then the log is quarantined,
    frames below the damage can be read, and writes are refused."""

    snapshot: Snapshot | None
    frames: Iterator[tuple[Header, Buffer]]
    end_entry: int
    end_offset: int
    cut_bytes: int = 0
    fault: str | None = None
    lost: Sequence[int] = ()
    """Offsets, as flat spans, whose loss was accepted and is not a fact in the log yet: the owner must append
    one, and then call `loss_recorded`."""


class LostRange(msgspec.Struct, frozen=True):
    """Entries of a log that are lost, with the offsets that they had."""

    first_entry: int
    end_entry: int
    first_offset: int
    end_offset: int
    file: str
    position: int
    bytes: int
    why: str
    exact: bool = True
    """False if nothing tells how many offsets there were; then the range is an upper bound."""


class Losses(msgspec.Struct, frozen=True):
    """The lost ranges of a log, and the files that keep the damaged bytes."""

    ranges: list[LostRange]
    kept: list[str] = []


class LogStats(msgspec.Struct, frozen=True):
    """Stats of one log, for people and metrics."""

    start_offset: int
    end_offset: int
    bytes: int
    segments: int
    syncs: int
    sync_seconds: float
    fault: str | None


class Scrubbed(msgspec.Struct, frozen=True):
    """A piece of a log that was read from the disk and checked."""

    next_entry: int | None
    """Entry of the next piece; None at the end."""
    bytes: int
    problems: Sequence[str] = ()
    """Damage that stops nothing, because another file serves instead."""


class KeyPlaces(NamedTuple):
    """Messages of one key, by ascending offset, as `find_key` gives them."""

    offsets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """Positions of their frames in the engine, for `read_places`."""
    passed: int
    """Number of newer messages that were passed over."""
    generation: int
    """Generation of the log; it changes when frames are removed."""


class PartitionLog(Protocol):
    """The log of one partition. All verbs block. `append`, `sync`, `trim` and `truncate` are never called
    side by side; `read` and the look-ups may run beside them in other threads. A fault of the disk raises
    `StorageFault` (`Corrupt`, `Full`) and nothing else.

    When a verb finds damage, the log is quarantined from then on; see `Damaged`.

    After a failed sync, or a failed write that could not be undone, every further append raises until the
    owner opens the log again. The outcome of an append that raises is `none` only if no byte of it can appear
    any more. After a `sync` or `flush` that raises, nobody knows what became of the writes since the last
    good one."""

    def recover(self) -> Recovery:
        """Open the log: find the end, cut a torn tail, give the frames to replay. Called once, at first."""
        ...

    def append(self, frames: Sequence[Frame], *, sync: bool) -> None:
        """Append frames in one vectored write, all or none; with `sync`, return when they are on the disk."""
        ...

    def room(self) -> int:
        """Bytes that an append without `sync` can take now without a new file or a sync."""
        ...

    def sync(self) -> None:
        """Make everything appended so far durable."""
        ...

    def flush(self) -> None:
        """Make everything durable that was appended before the call. Unlike `sync`, it may run beside
        `append`, in another thread, and does not delay it."""
        ...

    def read(self, offset: int, end: int, bytes_max: int) -> Sequence[Buffer]:
        """Whole frames as raw bytes, from the one that holds `offset` (or the next) up to `end`: at least one
        data frame if there is any, then as many as fit `bytes_max`. Every frame passes its checks; a damaged
        one raises `Corrupt` unless good ones precede it."""
        ...

    def read_entries(self, entries: Sequence[int]) -> list[tuple[Header, Buffer]]:
        """The checked frames with these entries, of any kind, in this order, or `StorageFault`."""
        ...

    def find_key(self, key_hash: int, begin: int, end: int, skip: int, count: int) -> KeyPlaces | None:
        """Places of the messages in [begin, end) whose key has this hash: the newest `skip` are passed over,
        the next `count` are found. None if keys have to be read from frames first: `index_keys` does that.
        Other keys may share the hash."""
        ...

    def read_places(self, places: KeyPlaces, bytes_max: int) -> list[Frame]:
        """The checked frames of these places, each once and in their order: at least one, then as many as fit
        `bytes_max`. Empty if the log has shrunk since the search: then search again."""
        ...

    def index_keys(self, bytes_max: int) -> bool:
        """Read keys from about `bytes_max` bytes of frames whose keys are not known: frames of the active
        segment that were there at the start, and those that a search missed. True when none are left."""
        ...

    def scan(self, entry: int, end: int) -> Iterator[tuple[Header, Callable[[], Buffer]]]:
        """Frames of every kind with an entry in [entry, end) that are there now, in order: the header, and a
        function that reads and checks the body, valid until the next step. Frames that are trimmed on the way
        may be left out."""
        ...

    def entry_at(self, append_time_us: int) -> int:
        """An entry at or shortly before the first frame appended at this time or later; else the end."""
        ...

    def find_time(self, timestamp_us: int) -> int | None:
        """Base offset of the first data frame with a timestamp at or after a time; None without one."""
        ...

    def retention_offset(
        self, *, bytes_max: int | None, append_time_us: int | None, count_max: int | None
    ) -> int:
        """The lowest frame boundary that retention would keep: by bytes, by age (frames appended before
        `append_time_us` go) and by count."""
        ...

    def trim(self, offset: int, floor: int | None = None) -> None:
        """Remove whole segments below `offset` and below the previous snapshot; a segment with the entry
        `floor` or a later one stays."""
        ...

    def seal(self) -> None:
        """End the segment that is being written, if anything is in it: `trim` never removes that one."""
        ...

    def truncate(self, entry: int) -> None:
        """Cut every frame from this entry on."""
        ...

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot atomically and durably, after the frames that it covers are on the disk; the two
        newest are kept. May run beside `append` and `trim`, in another thread, and does not delay them; not
        beside `truncate` and `close`."""
        ...

    def scrub(self, entry: int, bytes_max: int) -> Scrubbed:
        """Read and check about `bytes_max` bytes of sealed segments from an entry on, from the disk and not
        from memory; at their end, snapshots too. May run beside everything, as reads do."""
        ...

    def loss_recorded(self) -> None:
        """The loss in `Recovery.lost` is a durable fact now."""
        ...

    def stats(self) -> LogStats:
        """Stats, without touching the disk."""
        ...

    def close(self) -> None:
        """Sync, write the durable mark and close the files."""
        ...


Damaged = Callable[[Corrupt, PartitionLog], None]
"""Told of damage that a read of a log finds: once, in the thread of that read. By then the log is
quarantined: every further write raises `Corrupt`, and whole frames can still be read."""


class TopicFolders(Protocol):
    """The folders of topics, for engines that have them. Every step is durable when it returns;
    `core.catalog.inventory` tells what each is for. A fault of the disk raises `StorageFault`."""

    def survey(self) -> list[TopicFolder]:
        """Every topic folder with its contents; reads only."""
        ...

    def exists(self, folder: str) -> bool:
        """Whether there is such a folder, of a topic or of a partition in one."""
        ...

    def intend(self, *cards: TopicCard) -> None:
        """Write each topic's card as an intent, in a folder that is made if it is new."""
        ...

    def lay_out(self, *partitions: str) -> None:
        """Make the folders of new partitions (`topic-folder/partition`): empty logs."""
        ...

    def confirm(self, *folders: str) -> None:
        """The intents are carried out: each becomes the topic's card. This alone is not synced, because the
        intent says the same as long as it is there instead."""
        ...

    def withdraw(self, folder: str) -> None:
        """Remove an intent."""
        ...

    def discard(self, folder: str) -> None:
        """Remove the folder of a topic that was never acknowledged."""
        ...


class LogStore(Protocol):
    """A storage engine: opens and removes the logs of partitions by name (`topic-folder/partition`)."""

    @property
    def folders(self) -> TopicFolders | None:
        """The folders with the topics' cards; None for an engine that forgets everything."""
        ...

    def log(self, name: str, damaged: Damaged) -> PartitionLog:
        """The log of this name, created if it is new; `recover` comes next. `damaged` hears of its damage."""
        ...

    def known_log(self, name: str, damaged: Damaged) -> PartitionLog:
        """A log that was made before. A missing one is a fault that `recover` reports; nothing is made."""
        ...

    def find_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """Find the lost ranges of a log; changes nothing. `entries` name frames that are whole but that the
        owner cannot apply, `snapshots` such snapshots: they count as lost, too."""
        ...

    def accept_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """Give up what `find_losses` finds, so that the closed log opens well again: LOST frames take the
        place of lost ones, all others stay as they are, offsets are never used again, and the damaged bytes
        are kept aside. After a crash on the way the log opens as damaged or with `Recovery.lost`."""
        ...

    def remove(self, name: str) -> None:
        """Delete a log with all its contents."""
        ...

    def save_note(self, name: str, data: bytes) -> None:
        """Store a small note of the owner, durably and whole."""
        ...

    def load_note(self, name: str) -> bytes | None:
        """The note of this name; None if there is none."""
        ...

    def names(self) -> Iterable[str]:
        """The names of all stored logs."""
        ...

    def close(self) -> None:
        """Release the engine's own resources, such as its lock."""
        ...


class Registry(Protocol):
    """Keeps the catalog; on one node a file, in a cluster etcd."""

    def load(self) -> Catalog | None:
        """The catalog as last saved; None if there is none."""
        ...

    def save(self, catalog: Catalog) -> None:
        """Store durably and atomically before returning."""
        ...


class IdentityStore(Protocol):
    """Keeps users, tokens, rules, quotas and tenants; on one node a file."""

    def load(self) -> Identities | None:
        """The identities as last saved; None if there never were any. Damage raises `Corrupt`."""
        ...

    def save(self, identities: Identities) -> None:
        """Store durably and atomically before returning."""
        ...


class Authenticator(Protocol):
    """Finds out who a connection belongs to. Both methods run on the loop."""

    def authenticate(
        self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
    ) -> None:
        """Call `done` once, with the caller or a refusal: at once, or later if a password is checked."""
        ...

    def still(self, caller: Caller, now_us: int) -> Refusal | None:
        """None while what the caller proved itself with is good; it ends by expiry, revocation or change."""
        ...


class Doorkeeper(Protocol):
    """Counts the connections of users and addresses. Both methods run on the loop."""

    def admitted(self, caller: Caller) -> Refusal | None:
        """Count a connection that has just authenticated, or refuse it: too many are open."""
        ...

    def left(self, caller: Caller) -> None:
        """A connection that was admitted is gone."""
        ...


Respond = Callable[[Reply, Sequence[Buffer]], None]
"""Called once per request with the reply and the parts of its body."""


class BrokerVerbs(Protocol):
    """The broker as its clients see it: over a socket, or inside the same process."""

    @property
    def clock(self) -> ClientClock:
        """The clock for clients of this broker."""
        ...

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """Take a request; `respond` is called exactly once, now or later, in the caller's thread."""
        ...


Finished = Callable[[Any, Exception | None], None]
"""Called with the result of a finished piece of storage work, or with the exception that ended it."""


class Threads(Protocol):
    """Storage work off the loop (`storage.threads`): writes in order per log, reads in any order."""

    def append(self, log: PartitionLog, frames: Sequence[Frame], sync: bool, done: Finished) -> None:
        """Append behind everything queued for this log."""
        ...

    def run(self, log: Any, work: Callable[[], object], done: Finished) -> None:
        """Do other work, in order with the appends of this log."""
        ...

    def read(self, work: Callable[[], object], done: Finished) -> None:
        """Do work on the reader threads."""
        ...

    def tell(self, done: Finished, result: object) -> None:
        """From any thread: make the owner call `done(result, None)`, before completions that come later."""
        ...

    def forget(self, log: Any) -> None:
        """Drop the queue of a closed log."""
        ...

    def completed(self) -> Sequence[tuple[Finished, Any, Exception | None]]:
        """Take the completions since the last call."""
        ...

    def close(self) -> None:
        """Finish the queued work and stop."""
        ...


class Waiting(Protocol):
    """A waiting request of a receiver."""

    def hang_up(self) -> None:
        """The receiver sends nothing more."""
        ...

    def drop(self) -> None:
        """The receiver is gone: nobody takes the answer."""
        ...


class Gate(Protocol):
    """Tells who a receiver is, and whether it has room for more data: fetches of a slow one wait."""

    @property
    def caller(self) -> Caller:
        """Who sends the requests of this connection."""
        ...

    def blocked(self, resume: Callable[[], None]) -> bool:
        """False: continue. True: there is no room, and `resume` will be called."""
        ...

    def reserve(self, nbytes: int, resume: Callable[[], None]) -> bool:
        """Reserve room for bytes until `release`. False: there is no room, and `resume` will be called."""
        ...

    def release(self, nbytes: int) -> None:
        """Reserved bytes were sent, or are not needed."""
        ...

    fetches: dict[Waiting, None]
    """Fetches and leases under way; they are dropped when the receiver goes away."""
    answered_us: dict[str, int]
    """By topic: when data was last sent. Kept by the fetches themselves."""


Verb = Callable[[Any, Buffer, Respond, Gate], None]
"""Answers one kind of request."""


class Verbs(Protocol):
    """The broker as a listener sees it: requests in, answers when they are due."""

    def submit(self, request: Request, body: Buffer, respond: Respond, gate: Gate) -> None:
        """Take a request; `respond` is called once, unless the receiver is gone by then."""
        ...

    def gather(self, gathering: bool, later: bool = False) -> None:
        """Collect requests between `gather(True)` and `gather(False)`; then they share a turn, at once or
        (`later`) in the next round of the event loop."""
        ...
