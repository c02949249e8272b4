"""The topics of a node: the catalog, its changes one at a time, and the partitions of each topic.

A change of the catalog is done on a storage thread in steps that a crash may cut anywhere;
`core.catalog.inventory` tells what each step leaves:

    create   intent in the topic's folder ──▶ folders of the logs ──▶ catalog ──▶ intent becomes the card
    delete   catalog (the topic is listed as being removed) ──▶ data removed ──▶ catalog without it

A topic is visible once its change is durable. New topics that wait together are one change, because they can
share its syncs; so are deletions. If such a change fails, its topics are tried one by one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.coordinator_partition import CoordinatorListeners, CoordinatorPartition
from tailrace.broker.partition.delay_prefetch import NEAR_BYTES_TOTAL
from tailrace.broker.partition.frame_cache import COLD_BYTES_TOTAL
from tailrace.broker.partition.queue_partition import QueueListeners, QueuePartition
from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, Countdown, refuse
from tailrace.broker.topic_host import AnyHost, Kind, TopicHost, grown
from tailrace.core.catalog import catalog as core
from tailrace.core.catalog.inventory import Kept, Step, TopicCard, take_stock
from tailrace.core.model.commands import AlterTopic, CreateTopic, DeleteTopic, Reply, TopicInfo, TopicList
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_topic import TOPIC as GROUPS
from tailrace.errors import Corrupt, Denied, Full, NotFound, StorageFault, Unavailable
from tailrace.ports import LogStore, Registry, Respond, TopicFolders

log = logging.getLogger("tailrace.topics")
TopicChange = CreateTopic | AlterTopic | DeleteTopic
Change = TopicChange | core.Removal

TOPICS_AT_ONCE = 64
"""Most topics of one change, which share its syncs; deletions likewise."""

NOT_REMOVED = "the data of a deleted topic cannot be removed, it is tried again at the next start"

TAIL_BYTES_TOTAL = 48 * 1024 * 1024
"""Memory for the hot tails of all partitions together; each gets a share, up to its own
`ring_buffer_bytes`.
"""


class TopicCreation(msgspec.Struct):
    """A change of one topic under way: the catalog with it, the request, who sent it (None: the broker), and
    the new partitions."""

    catalog: core.Catalog
    entry: core.TopicEntry
    request: TopicChange
    respond: Respond
    by: str | None
    queues: list[QueuePartition] = []
    coordinators: list[CoordinatorPartition] = []


class Topics:
    """All topics of this node. Changes run one at a time, off the loop."""

    def __init__(
        self,
        stores: dict[str, LogStore],
        coordinator: Registry,
        pump: Pump,
        metrics: Metrics,
        listeners: QueueListeners,
        coordinator_listeners: CoordinatorListeners,
        *,
        defaults: dict[str, Any],
        changed: Callable[[str], None],
        trouble: Callable[[], str | None],
        too_many: Callable[[core.Catalog, CreateTopic, str], Refusal | None] = lambda catalog, new, by: None,
    ) -> None:
        self._stores = stores
        self._defaults = defaults
        self._coordinator = coordinator
        self._pump = pump
        self._metrics = metrics
        self._listeners = listeners
        self._coordinator_listeners = coordinator_listeners
        """Called when the state of a coordinator was rebuilt from its log."""
        self._changed = changed
        """Called when a topic was created, altered or deleted."""
        self._trouble = trouble
        """Gives a problem of the whole node, and so of every partition; None without one."""
        self._too_many = too_many
        """Refuses a user's topic that is one too many."""
        self._hosts: dict[str, TopicHost[QueuePartition]] = {}
        """The topics with messages."""
        self._groups: TopicHost[CoordinatorPartition] | None = None
        """The internal topic of groups, once it is made."""
        self._changes: deque[tuple[Change, Respond, str | None]] = deque()
        self._changing = False
        self._closed: Callable[[], None] | None = None
        """Called when the change under way is done; no other is begun after that."""
        self._shares = 0
        """Number of partitions, rounded up, among which memory is shared."""
        self._alone = 0
        """Number of the next changes that are made one by one."""
        self._retired: list[PartitionRuntime[Any]] = []
        self.catalog = core.Catalog()
        self.kept: list[Kept] = []
        """Folders that neither the catalog nor an intent explains; they are left untouched."""

    def open(self, progress: Callable[[str, int, int], None] = lambda name, done, total: None) -> None:
        """Recover every partition of the catalog; blocking, before the node takes requests. Raises `Corrupt`
        if there are topic folders but no catalog."""
        self._load()
        if self.catalog.removing:
            try:
                self.catalog = self._remove(self.catalog, self.catalog.removing)
            except StorageFault as error:
                log.error("%s: %s", NOT_REMOVED, error)
        self._take_stock()
        total = sum(entry.options.partitions for entry in self.catalog.topics.values())
        told = _Told(progress, total)
        for entry in self.catalog.topics.values():
            numbers = range(entry.options.partitions)
            if entry.name == GROUPS:
                coordinators = [
                    told.opened(self._coordinates(entry, number, known=True)) for number in numbers
                ]
                self._groups = TopicHost(entry, coordinators)
            else:
                queues = [told.opened(self._queue(entry, number, known=True)) for number in numbers]
                self._hosts[entry.name] = TopicHost(entry, queues)
        self._share_memory(self.queues())

    def _load(self) -> None:
        catalog = self._coordinator.load()
        if catalog is None:
            found = [state.folder for folders in self._folders() for state in folders.survey()]
            if found:
                raise Corrupt(
                    f"the catalog is missing, and there are {len(found)} topic folders, such as {found[0]}: "
                    "restore it from a backup, or rebuild it with `tailrace log rebuild-catalog DATA`",
                    outcome="none",
                )
            # From now on a missing catalog means that it was lost.
            catalog = core.Catalog()
            self._coordinator.save(catalog)
        self.catalog = catalog

    def _folders(self) -> list[TopicFolders]:
        return [store.folders for store in self._stores.values() if store.folders is not None]

    def _take_stock(self) -> None:
        """Finish or undo the changes that intents tell of, and report folders that nothing explains."""
        for folders in self._folders():
            stock = take_stock(self.catalog, folders.survey())
            for note in stock.notes:
                log.warning("%s", note)
            if stock.catalog is not self.catalog:
                self._coordinator.save(stock.catalog)
                self.catalog = stock.catalog
            self.kept += stock.kept
            for step in stock.steps:
                try:
                    self._do(folders, step)
                except StorageFault as error:
                    log.error("%s; it is tried again at the next start", error)
        for kept in self.kept:
            log.error("%s", kept_text(kept))

    def _do(self, folders: TopicFolders, step: Step) -> None:
        if step.act == "confirm":
            folders.confirm(step.folder)
        elif step.act == "withdraw":
            folders.withdraw(step.folder)
        elif step.act == "discard":
            folders.discard(step.folder)
        else:
            entry = next(entry for entry in self.catalog.topics.values() if entry.folder == step.folder)
            folders.intend(TopicCard(entry, self.catalog.sequence))
            folders.confirm(step.folder)

    def _queue(self, entry: core.TopicEntry, number: int, *, known: bool) -> QueuePartition:
        place = f"{entry.folder}/{number}", entry.name, entry.options, self._stores[entry.options.storage]
        return _reported(QueuePartition(*place, self._pump, self._metrics, self._listeners, known=known))

    def _coordinates(self, entry: core.TopicEntry, number: int, *, known: bool) -> CoordinatorPartition:
        place = f"{entry.folder}/{number}", entry.name, entry.options, self._stores[entry.options.storage]
        return _reported(
            CoordinatorPartition(*place, self._pump, self._metrics, self._coordinator_listeners, known=known)
        )

    def _share_memory(self, new: Iterable[QueuePartition]) -> None:
        """Give every partition its share of memory, or only the new ones if the share is the same. Shares
        change in steps of a sixteenth of the partitions, so that creating many topics does not visit all
        partitions each time."""
        count = sum(len(host.runtimes) for host in self._hosts.values())
        step = 1 << max(count.bit_length() - 4, 0)
        shares = -(-count // step) * step
        for queue in new if shares == self._shares else self.queues():
            queue.limit_tail(TAIL_BYTES_TOTAL // shares)
            queue.limit_cold(COLD_BYTES_TOTAL // shares)
            queue.limit_delays(NEAR_BYTES_TOTAL // shares)
        self._shares = shares

    def queues(self) -> Iterator[QueuePartition]:
        """Every partition with messages."""
        for host in self._hosts.values():
            yield from host.runtimes

    def coordinators(self) -> list[CoordinatorPartition]:
        """The partitions of the internal topic of groups; none before it is made."""
        return [] if self._groups is None else self._groups.runtimes

    def runtimes(self) -> Iterator[PartitionRuntime[Any]]:
        """Every partition of this node."""
        yield from self.queues()
        yield from self.coordinators()

    def queue_hosts(self) -> Iterator[TopicHost[QueuePartition]]:
        """Every topic with messages."""
        yield from self._hosts.values()

    def hosts(self) -> Iterator[AnyHost]:
        """Every topic of this node."""
        yield from self._hosts.values()
        if self._groups is not None:
            yield self._groups

    def get(self, name: str) -> TopicHost[QueuePartition]:
        """A user's topic by name; raises `NotFound`, or `Denied` for an internal one."""
        host = self._hosts.get(name)
        if host is None:
            self.known(name)
            raise Denied(f"topic {name!r} is internal", topic=name)
        return host

    def partition(self, topic: str, number: int) -> QueuePartition:
        """A partition of a user's topic; raises as `get` does, and `NotFound` for its number."""
        return self.get(topic).partition(number)

    def known(self, name: str) -> AnyHost:
        """Any topic by name, internal ones included; raises `NotFound`."""
        host = self.host(name)
        if host is None:
            raise NotFound(f"there is no topic {name[:80]!r}", topic=name[:80])
        return host

    def find(self, name: str) -> TopicHost[QueuePartition] | None:
        """A user's topic by name; None if there is none."""
        return self._hosts.get(name)

    def host(self, name: str) -> AnyHost | None:
        """Any topic by name, the internal one included; None if there is none."""
        return self._groups if name == GROUPS else self._hosts.get(name)

    def kept_of(self, name: str) -> Kept | None:
        """A kept folder of a topic of this name that the catalog does not know."""
        return next((kept for kept in self.kept if kept.topic == name and self.host(name) is None), None)

    def storage(self) -> str:
        """The storage of internal topics: `file` if the node has files."""
        return "file" if "file" in self._stores else "memory"

    def listing(self, prefix: str, internal: bool) -> TopicList:
        """Topics by name, without the state of their partitions."""
        infos = {host.info.name: host.info for host in self.hosts()}
        names = sorted(n for n in infos if n.startswith(prefix) and (internal or not n.startswith("_")))
        return TopicList([self._info(infos[name]) for name in names])

    def describe(self, name: str) -> TopicInfo:
        """A topic with the state of its partitions."""
        host = self.known(name)
        rows: list[dict[str, Any]] = []
        for partition, runtime in host.numbered():
            stats = runtime.stats()
            rows.append(
                {
                    "partition": partition,
                    "start_offset": runtime.start_offset,
                    "end_offset": runtime.end_offset,
                    "bytes": stats.bytes,
                    "segments": stats.segments,
                    "fault": self._trouble() if runtime.fault is None else runtime.fault.message,
                }
            )
        return self._info(host.info, rows)

    @staticmethod
    def _info(
        entry: core.TopicEntry, rows: list[dict[str, Any]] | None = None, created: bool = False
    ) -> TopicInfo:
        return TopicInfo(entry.name, entry.id, msgspec.structs.asdict(entry.options), rows or [], created)

    # -- changes

    def change(self, request: Change, respond: Respond, *, by: str | None) -> None:
        """Queue a change of the catalog by a user, whose name may be empty, or by the broker itself: then
        internal topics change, too."""
        self._changes.append((request, respond, by))
        self._next()

    def close(self, closed: Callable[[], None]) -> None:
        """Begin no more changes, and call `closed` when the one under way is done. Waiting changes are
        refused; the data of deleted topics is removed at the next start."""
        self._closed = closed
        self._next()

    def _next(self) -> None:
        while self._changes and not self._changing:
            change = self._changes.popleft()
            if self._closed is None:
                self._begin(*change)
            else:
                change[1](refuse(Unavailable("the broker is shutting down; nothing was changed")), NOTHING)
        if self._closed is not None and not self._changing:
            closed, self._closed = self._closed, _nothing
            closed()

    def _begin(self, request: Change, respond: Respond, by: str | None) -> None:
        """Begin a change on a storage thread, unless it is refused or changes nothing."""
        if isinstance(request, core.Removal):
            removals = [request, *self._other_removals()]
            self._changing = True
            self._pump.threads.run(self, lambda: self._remove(self.catalog, removals), self._removed)
            return
        making = self._decided(self.catalog, request, respond, by)
        if making is None:
            return
        self._changing = True
        made = [making]
        if not isinstance(request, AlterTopic):
            made += self._others(making)
        self._pump.threads.run(self, lambda: self._prepare(made), partial(self._finish, made))

    def _others(self, first: TopicCreation) -> list[TopicCreation]:
        """The changes of the same kind that wait behind one, creations or deletions: they are made with it
        and share its syncs. A second change of the same topic waits until the first is done."""
        names, made, kind = {first.entry.name}, [first], type(first.request)
        while self._changes and len(made) < TOPICS_AT_ONCE and not self._alone:
            request, respond, by = self._changes[0]
            if not isinstance(request, CreateTopic | DeleteTopic) or type(request) is not kind:
                break
            if request.name in names:
                break
            self._changes.popleft()
            making = self._decided(made[-1].catalog, request, respond, by)
            if making is not None:
                names.add(request.name)
                made.append(making)
        self._alone = max(self._alone - 1, 0)
        return made[1:]

    def _other_removals(self) -> Iterator[core.Removal]:
        """The removals that wait behind one; the catalog is stored once for all of them."""
        while self._changes and isinstance(removal := self._changes[0][0], core.Removal):
            self._changes.popleft()
            yield removal

    def _decided(
        self, catalog: core.Catalog, request: TopicChange, respond: Respond, by: str | None
    ) -> TopicCreation | None:
        """Decide a change of a catalog; None if nothing is left to do and the reply was sent."""
        asked = request
        if isinstance(request, CreateTopic) and by is not None:
            request = CreateTopic(request.name, self._with_defaults(request.options), request.if_missing)
        now_us = self._pump.clock.wall_us()
        outcome = core.change(catalog, request, now_us, internal=by is None, owner=by or "")
        if isinstance(outcome, Refusal):
            respond(outcome, NOTHING)
            return None
        after, entry = outcome
        if after is catalog:
            respond(self._info(entry), NOTHING)
            return None
        if isinstance(request, CreateTopic) and by is not None:
            refusal = self._too_many(catalog, request, by)
            if refusal is not None:
                respond(refusal, NOTHING)
                return None
        kept = self.kept_of(entry.name) if isinstance(request, CreateTopic) else None
        if kept is not None:
            respond(Refusal(Corrupt.code, kept_text(kept), "none", {"folder": kept.folder}), NOTHING)
            return None
        return TopicCreation(after, entry, asked, respond, by)

    def _with_defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        """Fill in options that the request does not give, from the node's configuration."""
        defaults = dict(self._defaults)
        if "storage" in options and "durability" not in options:
            defaults.pop("durability", None)  # It was chosen for another kind of storage.
        return {**defaults, **options}

    def _prepare(self, made: list[TopicCreation]) -> object:
        """On a storage thread: write the intents, make the new logs, store the catalog, confirm; all of it or
        nothing."""
        catalog = made[-1].catalog
        if isinstance(made[0].request, DeleteTopic):
            self._coordinator.save(catalog)
            return catalog
        for making in made:
            self._refuse_leftovers(making)
        try:
            for folders, kept in self._by_folders(made):
                folders.intend(*(TopicCard(making.entry, catalog.sequence) for making in kept))
                new = [name for making in kept for name in self._new_logs(making)]
                if new:
                    folders.lay_out(*new)
            for making in made:
                self._make_partitions(making)
            self._coordinator.save(catalog)
            for folders, kept in self._by_folders(made):
                folders.confirm(*(making.entry.folder for making in kept))
        except Exception as error:
            self._undo(made, error)
            raise
        return catalog

    def _have(self, entry: core.TopicEntry) -> int:
        host = self.host(entry.name)
        return 0 if host is None else len(host.runtimes)

    def _make_partitions(self, making: TopicCreation) -> None:
        entry = making.entry
        for number in range(self._have(entry), entry.options.partitions):
            if entry.name == GROUPS:
                making.coordinators.append(self._coordinates(entry, number, known=False))
            else:
                making.queues.append(self._queue(entry, number, known=False))

    def _new_logs(self, making: TopicCreation) -> list[str]:
        entry = making.entry
        return [f"{entry.folder}/{number}" for number in range(self._have(entry), entry.options.partitions)]

    def _by_folders(self, made: list[TopicCreation]) -> Iterator[tuple[TopicFolders, list[TopicCreation]]]:
        """The changes, grouped by the storage engine that has their folders."""
        for name, store in self._stores.items():
            kept = [making for making in made if making.entry.options.storage == name]
            if store.folders is not None and kept:
                yield store.folders, kept

    def _refuse_leftovers(self, making: TopicCreation) -> None:
        """Raise if a folder for a new log exists already: its data belongs to something else."""
        folders = self._stores[making.entry.options.storage].folders
        if folders is None:
            return
        for folder in self._new_logs(making) if self._have(making.entry) else [making.entry.folder]:
            if folders.exists(folder):
                raise Corrupt(f"{folder} is there already, and the catalog does not know it", outcome="none")

    def _undo(self, made: list[TopicCreation], cause: Exception) -> None:
        """Undo changes that failed, first the catalog and then the folders, so that a crash may cut it
        anywhere. If a step fails, the next start does it, guided by the intents."""
        try:
            if not isinstance(cause, StorageFault) or cause.outcome != "none":
                self._coordinator.save(self.catalog)  # Nobody knows whether the other one was stored.
            for making in made:
                entry = making.entry
                store = self._stores[entry.options.storage]
                for name in self._new_logs(making):
                    store.remove(name)
                if store.folders is not None and self.host(entry.name) is None:
                    if store.folders.exists(entry.folder):
                        store.folders.discard(entry.folder)
                elif store.folders is not None:
                    store.folders.withdraw(entry.folder)
        except StorageFault as error:
            names = ", ".join(repr(making.entry.name) for making in made)
            log.error("topic %s: a failed change could not be taken back yet: %s", names, error)

    def _finish(self, made: list[TopicCreation], result: Any, error: Exception | None) -> None:
        self._changing = False
        if error is not None:
            self._failed(made, error)
        else:
            self.catalog = result
            replies = [self._install(making) for making in made]
            self._share_memory(queue for making in made for queue in making.queues)
            for making, reply in zip(made, replies, strict=True):
                new: list[PartitionRuntime[Any]] = [*making.queues, *making.coordinators]
                for runtime in new:
                    runtime.start()
                making.respond(reply, NOTHING)
                self._changed(making.entry.name)
        self._next()

    def _failed(self, made: list[TopicCreation], error: Exception) -> None:
        """Nothing was changed. Try topics of one change again one by one: a problem with one of them does not
        concern the others."""
        newest = made[-1].entry
        log.error("change of topic %r failed: %s", newest.name, error)
        if isinstance(error, Full):
            self._pump.filled()
        if isinstance(made[0].request, CreateTopic):  # Its folder may still be there: the id is spent.
            next_id = max(self.catalog.next_id, newest.id + 1)
            self.catalog = msgspec.structs.replace(self.catalog, next_id=next_id)
        if len(made) == 1:
            made[0].respond(refuse(error), NOTHING)
            return
        self._changes.extendleft((each.request, each.respond, each.by) for each in reversed(made))
        self._alone = len(made)

    def _install(self, making: TopicCreation) -> Reply:
        entry = making.entry
        if isinstance(making.request, DeleteTopic):
            host = self._hosts.pop(entry.name)
            self._metrics.forget(entry.name)
            self._drop(host)
        elif entry.name == GROUPS:
            self._groups = grown(self._groups, entry, making.coordinators)
        else:
            self._hosts[entry.name] = grown(self._hosts.get(entry.name), entry, making.queues)
        return self._info(entry, created=isinstance(making.request, CreateTopic))

    def _drop(self, host: TopicHost[QueuePartition]) -> None:
        """Close the logs of a deleted topic in their own order, then remove them."""
        closed = Countdown(len(host.runtimes), partial(self._dropped, host))
        for runtime in host.runtimes:
            runtime.retire(closed.one)

    def _dropped(self, host: TopicHost[QueuePartition]) -> None:
        """The logs of a deleted topic are closed."""
        folder = host.info.folder
        removal = next(removal for removal in self.catalog.removing if removal.folder == folder)
        self._retired += host.runtimes
        self.change(removal, lambda reply, parts: None, by=None)

    def _remove(self, catalog: core.Catalog, removals: Iterable[core.Removal]) -> core.Catalog:
        """Delete the data of deleted topics; blocking. Stores and returns the catalog without those that are
        removed completely."""
        for removal in removals:
            store = self._stores[removal.storage]
            try:
                for partition in range(removal.partitions):
                    store.remove(f"{removal.folder}/{partition}")
                store.remove(removal.folder)
            except StorageFault as error:
                log.error("%s: %s", NOT_REMOVED, error)
            else:
                catalog = core.removed(catalog, removal.folder)
        self._coordinator.save(catalog)
        return catalog

    def _removed(self, result: Any, error: Exception | None) -> None:
        self._changing = False
        for runtime in self._retired:
            runtime.forget()
        self._retired.clear()
        if error is None:
            self.catalog = result
        else:
            log.error("%s: %s", NOT_REMOVED, error)
        self._next()


class _Told:
    """Tells of partitions as they are opened at the start."""

    def __init__(self, progress: Callable[[str, int, int], None], total: int) -> None:
        self._progress = progress
        self._total = total
        self._count = 0

    def opened(self, runtime: Kind) -> Kind:
        self._count += 1
        self._progress(f"{runtime.topic}/{runtime.partition}", self._count, self._total)
        return runtime


def _reported(runtime: Kind) -> Kind:
    place = f"{runtime.topic}/{runtime.partition}"
    if runtime.fault is not None:
        log.error("%s is quarantined: %s", place, runtime.fault.message)
    elif runtime.cut_bytes:
        log.warning("%s: cut a torn tail of %d bytes", place, runtime.cut_bytes)
    return runtime


def _nothing() -> None:
    """The end was reported already."""


def kept_text(kept: Kept) -> str:
    """The text about a folder that nothing explains."""
    return (
        f"{kept.folder} holds data, and {kept.why}: it is kept and not used; register it with "
        "`tailrace log rebuild-catalog DATA`, or move it away"
    )
