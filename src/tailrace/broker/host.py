"""The topics that a node hosts: the catalog, its changes one by one, and the shards behind each."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tailrace.broker.at_hand import COLD_BYTES_TOTAL
from tailrace.broker.machines import COORDINATOR, DATA_PARTITION
from tailrace.broker.metrics import Metrics
from tailrace.broker.pump import Pump
from tailrace.broker.releases import NEAR_BYTES, NEAR_BYTES_TOTAL
from tailrace.broker.shard import NOTHING, Shard, refuse
from tailrace.core import catalog as core
from tailrace.core import coordinator as groups
from tailrace.core.commands import AlterTopic, CreateTopic, DeleteTopic, Reply, TopicInfo, TopicList
from tailrace.core.inventory import Kept, Step, TopicCard, take_stock
from tailrace.core.model import Refusal
from tailrace.errors import Corrupt, Denied, Full, NotFound, StorageFault
from tailrace.ports import Coordinator, LogStore, Respond, TopicFolders

log = logging.getLogger("tailrace.topics")
Change = CreateTopic | AlterTopic | DeleteTopic | core.Removal

TAIL_BYTES_TOTAL = 48 * 1024 * 1024
"""Memory for the hot tails of all partitions together; each gets its share of it, up to its own
`ring_buffer_bytes`.
"""


class TopicHost(msgspec.Struct):
    """A topic at work."""

    info: core.TopicEntry
    shards: list[Shard]


class Topics:
    """All topics of this node. Changes run one at a time, off the loop, and are visible once they are
    durable.
    """

    def __init__(
        self,
        stores: dict[str, LogStore],
        coordinator: Coordinator,
        pump: Pump,
        metrics: Metrics,
        *,
        defaults: dict[str, Any],
    ) -> None:
        self._stores = stores
        self._defaults = defaults
        self._coordinator = coordinator
        self._pump = pump
        self._metrics = metrics
        self._hosts: dict[str, TopicHost] = {}
        self._changes: deque[tuple[Change, Respond, bool]] = deque()
        self._changing = False
        self._retired: list[Shard] = []
        self.catalog = core.Catalog()
        self.kept: list[Kept] = []
        """Folders that neither the catalog nor an intent explains: nobody touches them."""
        self.opened: Callable[[Shard], None] = lambda shard: None
        """Called for every partition that is added while the broker runs."""
        self.trouble: Callable[[], str | None] = lambda: None
        """What is wrong with the node as a whole, and so with every partition."""
        self.changed: Callable[[str], None] = lambda name: None
        """Called when a topic was created, altered or deleted."""

    def open(self, progress: Callable[[str, int, int], None] = lambda name, done, total: None) -> None:
        """Recover every partition of the catalog; blocking, before the node takes requests. Raises `Corrupt`
        when there are topics and no catalog."""
        self._load()
        for removal in self.catalog.removing:
            try:
                self.catalog = self._remove(self.catalog, removal)
            except StorageFault as error:
                log.error("a deleted topic cannot be removed, it is tried again at the next start: %s", error)
        self._take_stock()
        total = sum(entry.options.partitions for entry in self.catalog.topics.values())
        count = 0
        for entry in self.catalog.topics.values():
            shards = []
            for partition in range(entry.options.partitions):
                shards.append(self._shard(entry, partition, known=True))
                count += 1
                progress(f"{entry.name}/{partition}", count, total)
            self._hosts[entry.name] = TopicHost(entry, shards)
        self._share_tails()

    def _load(self) -> None:
        catalog = self._coordinator.load()
        if catalog is None:
            found = [state.folder for folders in self._folders() for state in folders.survey()]
            if found:
                raise Corrupt(
                    f"the catalog is missing, and there are {len(found)} topic folders, such as {found[0]}: "
                    "restore it from a backup, or rebuild it with `tailrace log rebuild-catalog DATA`"
                )
            # From now on a missing catalog is a lost one.
            catalog = core.Catalog()
            self._coordinator.save(catalog)
        self.catalog = catalog

    def _folders(self) -> list[TopicFolders]:
        return [store.folders for store in self._stores.values() if store.folders is not None]

    def _take_stock(self) -> None:
        """Finish or undo what intents explain, and name what nothing explains."""
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

    def _shard(self, entry: core.TopicEntry, partition: int, *, known: bool) -> Shard:
        store = self._stores[entry.options.storage]
        name = f"{entry.folder}/{partition}"
        machine = COORDINATOR if entry.name == groups.TOPIC else DATA_PARTITION
        shard = Shard(name, entry.name, entry.options, self._pump, store, self._metrics, machine, known=known)
        if shard.fault is not None:
            log.error("%s/%d is quarantined: %s", entry.name, partition, shard.fault.message)
        elif shard.cut_bytes:
            log.warning("%s/%d: cut a torn tail of %d bytes", entry.name, partition, shard.cut_bytes)
        return shard

    def _share_tails(self) -> None:
        shards = [shard for shard in self.shards() if shard.machine.delivers]
        for shard in shards:
            shard.limit_tail(TAIL_BYTES_TOTAL // len(shards))
            shard.limit_cold(COLD_BYTES_TOTAL // len(shards))
            shard.releases.bytes_max = min(NEAR_BYTES, NEAR_BYTES_TOTAL // len(shards))

    def shards(self) -> Iterator[Shard]:
        """Every partition of this node."""
        for host in self._hosts.values():
            yield from host.shards

    def hosts(self) -> Iterator[TopicHost]:
        """Every topic of this node."""
        yield from self._hosts.values()

    def get(self, name: str) -> TopicHost:
        """A topic of the users by name; raises `NotFound`, or `Denied` for an internal one."""
        host = self.find(name)
        if host is None:
            raise NotFound(f"there is no topic {name!r}", topic=name)
        if not host.shards[0].machine.delivers:
            raise Denied(f"topic {name!r} is internal", topic=name)
        return host

    def find(self, name: str) -> TopicHost | None:
        """Any topic by name, internal ones too."""
        return self._hosts.get(name)

    def kept_of(self, name: str) -> Kept | None:
        """The data of a topic of that name which the catalog does not know."""
        return next((kept for kept in self.kept if kept.topic == name and name not in self._hosts), None)

    def storage(self) -> str:
        """Where the broker keeps what is its own: in files, where it has any."""
        return "file" if "file" in self._stores else "memory"

    def listing(self, prefix: str, internal: bool) -> TopicList:
        """Topics by name, without the state of their partitions."""
        names = sorted(n for n in self._hosts if n.startswith(prefix) and (internal or not n.startswith("_")))
        return TopicList([self._info(self._hosts[name].info) for name in names])

    def describe(self, name: str) -> TopicInfo:
        """A topic with the state of its partitions."""
        host = self.find(name)
        if host is None:
            raise NotFound(f"there is no topic {name!r}", topic=name)
        rows: list[dict[str, Any]] = []
        for partition, shard in enumerate(host.shards):
            stats = shard.stats()
            rows.append(
                {
                    "partition": partition,
                    "start_offset": shard.start_offset,
                    "end_offset": shard.end_offset,
                    "bytes": stats.bytes,
                    "segments": stats.segments,
                    "fault": self.trouble() if shard.fault is None else shard.fault.message,
                }
            )
        return self._info(host.info, rows)

    @staticmethod
    def _info(
        entry: core.TopicEntry, rows: list[dict[str, Any]] | None = None, created: bool = False
    ) -> TopicInfo:
        return TopicInfo(entry.name, entry.id, msgspec.structs.asdict(entry.options), rows or [], created)

    # -- changes

    def change(self, request: Change, respond: Respond, *, internal: bool = False) -> None:
        """Queue a change of the catalog; the broker's own topics change only with `internal`."""
        self._changes.append((request, respond, internal))
        self._next()

    def _next(self) -> None:
        while self._changes and not self._changing:
            self._begin(*self._changes.popleft())

    def _begin(self, request: Change, respond: Respond, internal: bool) -> None:
        """Do a change on a storage thread, unless it is refused or changes nothing."""
        if isinstance(request, core.Removal):
            removal = request
            self._changing = True
            self._pump.threads.run(self, lambda: self._remove(self.catalog, removal), self._removed)
            return
        if isinstance(request, CreateTopic) and not internal:
            request = CreateTopic(request.name, self._with_defaults(request.options), request.if_missing)
        outcome = core.change(self.catalog, request, self._pump.clock.wall_us(), internal=internal)
        if isinstance(outcome, Refusal):
            respond(outcome, NOTHING)
            return
        catalog, entry = outcome
        if catalog is self.catalog:
            respond(self._info(entry), NOTHING)
            return
        kept = self.kept_of(entry.name) if isinstance(request, CreateTopic) else None
        if kept is not None:
            respond(Refusal(Corrupt.code, kept_text(kept), "none", {"folder": kept.folder}), NOTHING)
            return
        self._changing = True
        self._pump.threads.run(
            self, lambda: self._prepare(catalog, entry, request), self._finisher(entry, request, respond)
        )

    def _with_defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        """What the request does not say is taken from the node's configuration, then from Tailrace's own."""
        defaults = dict(self._defaults)
        if "storage" in options and "durability" not in options:
            defaults.pop("durability", None)  # It was chosen for another kind of storage.
        return {**defaults, **options}

    def _prepare(self, catalog: core.Catalog, entry: core.TopicEntry, request: Change) -> object:
        """On a storage thread: note the intent, make the new logs, store the catalog, confirm; all of it or
        nothing."""
        if isinstance(request, DeleteTopic):
            self._coordinator.save(catalog)
            return catalog, []
        store = self._stores[entry.options.storage]
        host = self._hosts.get(entry.name)
        have = 0 if host is None else len(host.shards)
        self._refuse_leftovers(store, entry, have)
        shards: list[Shard] = []
        try:
            if store.folders is not None:
                store.folders.intend(TopicCard(entry, catalog.sequence))
            for partition in range(have, entry.options.partitions):
                shards.append(self._shard(entry, partition, known=False))
            self._coordinator.save(catalog)
            if store.folders is not None:
                store.folders.confirm(entry.folder)
        except Exception as error:
            self._undo(store, entry, shards, error)
            raise
        return catalog, shards

    @staticmethod
    def _refuse_leftovers(store: LogStore, entry: core.TopicEntry, have: int) -> None:
        """Folders that are there already belong to somebody else: they are never taken for new ones."""
        if store.folders is None:
            return
        new = [f"{entry.folder}/{number}" for number in range(have, entry.options.partitions)]
        for folder in new if have else [entry.folder]:
            if store.folders.exists(folder):
                raise Corrupt(f"{folder} is there already, and the catalog does not know it", outcome="none")

    def _undo(self, store: LogStore, entry: core.TopicEntry, shards: list[Shard], cause: Exception) -> None:
        """Take back a change that failed, in the order that a crash may cut: the catalog, then the folders.
        Whatever of that fails is done at the next start, as the intent says."""
        try:
            if not isinstance(cause, StorageFault) or cause.outcome != "none":
                self._coordinator.save(self.catalog)  # Nobody knows whether the other one was stored.
            for shard in shards:
                store.remove(shard.name)
            if store.folders is not None and entry.name not in self._hosts:
                if store.folders.exists(entry.folder):
                    store.folders.discard(entry.folder)
            elif store.folders is not None:
                store.folders.withdraw(entry.folder)
        except StorageFault as error:
            log.error("topic %r: a failed change could not be taken back yet: %s", entry.name, error)

    def _finisher(
        self, entry: core.TopicEntry, request: Change, respond: Respond
    ) -> Callable[[Any, Exception | None], None]:
        def finish(result: Any, error: Exception | None) -> None:
            self._changing = False
            if error is not None:
                log.error("change of topic %r failed: %s", entry.name, error)
                if isinstance(error, Full):
                    self._pump.filled()
                if isinstance(request, CreateTopic):  # Its folder may still be there: the id is spent.
                    next_id = max(self.catalog.next_id, entry.id + 1)
                    self.catalog = msgspec.structs.replace(self.catalog, next_id=next_id)
                respond(refuse(error), NOTHING)
            else:
                self.catalog, shards = result
                reply = self._install(entry, request, shards)
                respond(reply, NOTHING)
                self.changed(entry.name)
            self._next()

        return finish

    def _install(self, entry: core.TopicEntry, request: Change, shards: list[Shard]) -> Reply:
        host = self._hosts.get(entry.name)
        if isinstance(request, DeleteTopic):
            assert host is not None
            del self._hosts[entry.name]
            self._metrics.forget(entry.name)
            self._drop(host)
        elif host is None:
            self._hosts[entry.name] = TopicHost(entry, shards)
        else:
            host.info = entry
            host.shards += shards
            for shard in host.shards:
                shard.reconfigure(entry.options)
        self._share_tails()
        for shard in shards:
            self.opened(shard)
        return self._info(entry, created=isinstance(request, CreateTopic))

    def _drop(self, host: TopicHost) -> None:
        """Close the logs of a deleted topic in their own order, then remove them."""
        waiting = len(host.shards)
        folder = host.info.folder
        removal = next(removal for removal in self.catalog.removing if removal.folder == folder)

        def closed(result: object, error: Exception | None) -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self._retired += host.shards
                self.change(removal, lambda reply, parts: None)

        for shard in host.shards:
            shard.retire(closed)

    def _remove(self, catalog: core.Catalog, removal: core.Removal) -> core.Catalog:
        """Blocking: delete the data of a deleted topic; returns the catalog, stored, without it."""
        store = self._stores[removal.storage]
        for partition in range(removal.partitions):
            store.remove(f"{removal.folder}/{partition}")
        store.remove(removal.folder)
        catalog = core.removed(catalog, removal.folder)
        self._coordinator.save(catalog)
        return catalog

    def _removed(self, result: Any, error: Exception | None) -> None:
        self._changing = False
        for shard in self._retired:
            shard.forget()
        self._retired.clear()
        if error is None:
            self.catalog = result
        else:
            log.error("removing a deleted topic failed, it is tried again at the next start: %s", error)
        self._next()


def kept_text(kept: Kept) -> str:
    """What is said about a folder that nothing explains."""
    return (
        f"{kept.folder} holds data, and {kept.why}: it is kept and not used; register it with "
        "`tailrace log rebuild-catalog DATA`, or move it away"
    )
