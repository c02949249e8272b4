"""Node: the engine on an asyncio loop, behind the native and the HTTP listener, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from tailrace.broker.access.first_administrator import NAME as FIRST_NAME
from tailrace.broker.access.passwords import HashThreads, Passwords
from tailrace.broker.door import Door, OwnersOnly
from tailrace.broker.engine import Engine
from tailrace.broker.runtime.clock import SystemClock
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.broker.upkeep.open_files import OpenFiles, raise_limit
from tailrace.broker.upkeep.spare_memory import SparePages, heap_trimmer
from tailrace.cluster.embedded import FileCoordinator
from tailrace.cluster.identity_file import FILE as IDENTITY_FILE
from tailrace.cluster.identity_file import TOKEN_FILE, FileIdentities, FirstToken
from tailrace.config import Place, ServerOptions, exposed, listen_places, split_address
from tailrace.core.model.access import Caller
from tailrace.core.model.commands import Request
from tailrace.errors import InvalidRequest, StorageFault
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.ports import ClientClock, LogStore, Respond
from tailrace.protocols.doorway import Doorway
from tailrace.protocols.http import HttpListener
from tailrace.protocols.native import Limits, Listener
from tailrace.protocols.tls import TlsFiles, Unusable
from tailrace.storage.audit_log import AuditLog
from tailrace.storage.disk import RealDisk
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryStore
from tailrace.storage.spare_space import SpareSpace
from tailrace.storage.threads import StorageThreads

log = logging.getLogger("tailrace.node")

AUDIT_FILE = "audit.log"
LAG_S = 0.1
FILES_S = 5.0
CLOSE_S = 60.0
JOINED_DRAIN_S = 2.0
"""How long the end of an embedded broker waits until those who have joined it have their answers."""
EMBEDDED_NODE = "embedded-"
"""What the names of embedded brokers begin with: who has joined one may work in its folder after it."""
SWITCH_S = 1e-4
"""Switch interval of the interpreter. At the default of 5 ms, a storage thread that returns from a blocking
call would wait that long for a busy loop.
"""


class LoopHost:
    """Hosts an engine on the running loop: wakes its pump, sets its timer, drains its storage threads."""

    def __init__(
        self,
        options: ServerOptions,
        *,
        speaks_tls: bool = False,
        identities_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_us = 0
        self.clock = SystemClock()
        root = Path(options.data)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = FileStore(root / "topics", self.clock, segment_bytes=options.storage.segment_bytes)
        stores: dict[str, LogStore] = {"file": files, "memory": MemoryStore()}
        threads = StorageThreads(self._storage_ready, count=options.storage.storage_threads)
        disk = RealDisk(root)
        self._hashing = HashThreads(threads.tell)
        audit = options.audit
        self.audit_log = AuditLog(root / AUDIT_FILE, bytes_max=audit.bytes_max, files_max=audit.files_max)
        self._first_token = FirstToken(disk, partial(_private, root)) if speaks_tls else None
        self.admin_token: Path | None = None
        """The file with the token of the first administrator, if this start made one."""
        self.engine = Engine(
            self.clock,
            threads,
            stores,
            FileCoordinator(disk),
            wake=self._wake,
            arm=self._arm,
            topic_defaults=options.topic_defaults,
            scrub_period_us=options.storage.scrub_period_hours * 3_600_000_000,
            gauge=SpareSpace(root, disk),
            free_bytes_low=options.storage.free_bytes_low,
            identities=FileIdentities(disk),
            passwords=Passwords(self._hashing.run),
            owners={0, os.geteuid()},
            identities_changed=identities_changed,
            audit_line=self.audit_log.put,
        )
        self._root = root
        self._pump = self.engine.pump

    def load_identities(self) -> None:
        """Take the users and rules of the folder; blocking, before anybody can connect. A broker that speaks
        TLS and has none yet makes an administrator."""
        if self.engine.access.load(self._first_token):
            self.admin_token = self._root / TOKEN_FILE
            self.engine.audit.started("there were no users: an administrator was made", user=FIRST_NAME)
        if self._root.stat().st_mode & stat.S_IWOTH:
            text = "every user of this machine can change what is in %s: run `chmod o-w` on it"
            log.warning(text, self._root)
        if (self._root / IDENTITY_FILE).exists() and not _private(self._root, IDENTITY_FILE):
            log.warning(
                "%s can be read by others, or belongs to another user: make it readable for its owner only",
                IDENTITY_FILE,
            )

    def _wake(self) -> None:
        self._loop.call_soon(self._pump.turn)

    def _storage_ready(self) -> None:
        self._loop.call_soon_threadsafe(self._pump.drain)

    def _arm(self, due_us: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (due_us - self.clock.now_us()) / 1e6)
        self._timer = self._loop.call_later(delay_s, self._pump.tick)

    async def close(self) -> None:
        """Finish and sync everything that was accepted, then release the folder."""
        closed = asyncio.Event()
        try:
            self.engine.close(closed.set)
            with contextlib.suppress(TimeoutError):
                # A broken log must not keep the process alive; acknowledged messages are safe by then.
                async with asyncio.timeout(CLOSE_S):
                    await closed.wait()
        finally:  # Release the folder in any case.
            if self._timer is not None:
                self._timer.cancel()
            await asyncio.to_thread(self._release)

    def _release(self) -> None:
        try:
            self._hashing.close()
            self.engine.release()
        finally:
            self.audit_log.close()


class Node:
    """A broker that listens."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.native_places: list[Place] = []
        """Where clients connect: addresses in use, and paths of Unix sockets."""
        self.http_address = ("", 0)
        self._door = Door(options.data)
        self.ready = False
        self._files = OpenFiles()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Recover, then listen."""
        options = self._options
        sys.setswitchinterval(SWITCH_S)
        raise_limit()
        tls = _tls_of(options)
        self._host = LoopHost(
            options, speaks_tls=tls is not None, identities_changed=self._identities_changed
        )
        engine, clock = self._host.engine, self._host.clock
        self._tls, self._doorway = tls, (doorway := Doorway(clock))
        self._http = HttpListener(
            reasons=self._reasons,
            warnings=self._warnings,
            metrics=self._render,
            authenticator=engine.authenticator,
            may_operate=self._may_operate,
            secure=None if tls is None else (doorway, tls),
        )
        self._native = Listener(
            engine.gateway,
            clock,
            options.limits,
            secrets.token_hex(8),
            authenticator=engine.authenticator,
            doorkeeper=engine.quotas,
            doorway=doorway,
            tls=tls,
        )
        try:
            await asyncio.to_thread(self._host.load_identities)
            self._check_exposure()
            if options.insecure and (hosts := exposed(options)):
                text = "insecure = true, and other machines reach this broker"
                engine.audit.started(text, listen=", ".join(hosts))
            # During recovery, health can be asked, and clients hear that the broker is starting.
            self.http_address = await self._http.start(*split_address(options.http_listen))
            self._native.starting = True
            for place in listen_places(options.listen):
                self.native_places.append(await self._listen(place))
            await self._door.open(self._native)
            await asyncio.to_thread(engine.recover, _progress)
            engine.start()
            self._native.starting = False
        except BaseException:
            await self._native.stop(0)
            self._door.close()
            await self._http.close()
            await self._host.close()
            raise
        self._tasks += [asyncio.create_task(self._watch_lag()), asyncio.create_task(self._watch_files())]
        self.ready = True

    def _check_exposure(self) -> None:
        """Other machines may reach a broker only if it knows who may come in, or is insecure on purpose."""
        if not (self.has_users or self._options.insecure) and (hosts := exposed(self._options)):
            raise InvalidRequest(
                f"other machines reach {', '.join(hosts)}, and there are no users: start on 127.0.0.1, and "
                "add one with `tailrace user add NAME`"
            )

    async def _listen(self, place: Place) -> Place:
        if isinstance(place, tuple):
            return await self._native.start(*place)
        await self._native.start_unix(place)
        return place

    def _may_operate(self, caller: Caller) -> bool:
        engine = self._host.engine
        if engine.authority.may(caller, "operate", "broker", ""):
            return True
        verdict = engine.authority.explain(caller.user, "operate", "broker", "")
        engine.audit.kept_out(caller, "pages", verdict)
        return False

    def _identities_changed(self) -> None:
        self._native.recheck()
        self._native.open_unix_sockets(to_group=self.has_users)

    @property
    def has_users(self) -> bool:
        """Whether callers have to say who they are."""
        return bool(self._host.engine.authority.identities.users)

    @property
    def admin_token(self) -> Path | None:
        """The file with the token of the first administrator, if this start made one."""
        return self._host.admin_token

    def _reasons(self) -> list[str]:
        return self._host.engine.faults() if self.ready else ["starting"]

    def _warnings(self) -> list[str]:
        trouble = self._host.audit_log.trouble
        unwritten = [] if trouble is None else [trouble]
        stale = [self._tls.trouble] if self._tls is not None and self._tls.trouble else []
        return self._host.engine.space.warnings() + self._files.warnings() + unwritten + stale

    def _render(self) -> bytes:
        metrics = self._host.engine.metrics
        metrics.connections = len(self._native.links)
        metrics.guests, metrics.guests_turned_out = self._doorway.guests, self._doorway.turned_out
        metrics.in_flight_bytes = self._native.held_bytes
        metrics.audit_lines = self._host.audit_log.lines
        metrics.audit_missed = self._host.engine.audit.missed
        metrics.audit_failing = int(self._host.audit_log.trouble is not None)
        return metrics.render()

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        pool = pa.default_memory_pool()
        spare = SparePages(partial(_release, pool, heap_trimmer()), loop.time())
        while True:
            before = loop.time()
            await asyncio.sleep(LAG_S)
            self._host.engine.metrics.loop_lag(max(0.0, loop.time() - before - LAG_S))
            spare.note(pool.bytes_allocated(), loop.time())

    async def _watch_files(self) -> None:
        while True:
            self._files.check()
            await asyncio.sleep(FILES_S)

    async def stop(self) -> None:
        """Stop gracefully: refuse new requests, answer those under way, sync, close."""
        self.ready = False
        self._host.engine.drain()
        await self._native.stop(self._options.limits.drain_ms / 1000)
        self._door.close()
        await self._http.close()
        for task in self._tasks:
            task.cancel()
        await self._host.close()


def _private(root: Path, path: str) -> bool:
    """Whether a file is the broker's own, and nobody else can read it."""
    found = (root / path).lstat()
    own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return own and not stat.S_IMODE(found.st_mode) & 0o077


def _tls_of(options: ServerOptions) -> TlsFiles | None:
    """The certificate of the listeners, if there is one; says aloud what an insecure broker is."""
    if options.insecure and (hosts := exposed(options)):
        log.warning(
            "insecure = true: other machines reach %s; without TLS everybody on the way can read and change "
            "what is sent, and without users everybody may do everything",
            ", ".join(hosts),
        )
    if not options.tls.certificate:
        return None
    try:
        return TlsFiles(options.tls)
    except Unusable as error:
        raise InvalidRequest(f"tls.{error}") from error


def _release(pool: pa.MemoryPool, trim_heap: Callable[[], None]) -> None:
    pool.release_unused()
    trim_heap()


def _progress(name: str, done: int, total: int) -> None:
    if total >= 20 and done % (total // 10) == 0:
        log.info("recovered %d of %d partitions", done, total)


async def serve(options: ServerOptions, *, ready: Callable[[Node], None] | None = None) -> None:
    """Run a node until SIGTERM or SIGINT; a second signal ends it at once."""
    node = Node(options)
    await node.start()
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _signalled, stopping)
    if ready is not None:
        ready(node)
    await stopping.wait()
    log.info("stopping")
    await node.stop()


def _signalled(stopping: asyncio.Event) -> None:
    if stopping.is_set():
        raise SystemExit(1)
    stopping.set()


def unusable(data: str, error: OSError | str) -> StorageFault:
    """The error for a data folder in which a broker cannot start."""
    return StorageFault(
        f"the broker cannot work in {data}: {error}",
        outcome="none",
        hint="choose a folder that this user can write, with --data or as embedded:FOLDER",
    )


class EmbeddedVerbs:
    """`BrokerVerbs` of an engine in the same process, without sockets; others join it through its door."""

    def __init__(self, data: str, clock: ClientClock) -> None:
        self.clock = clock
        self._data = data
        self._door = Door(data)
        self._joined: Listener | None = None

    async def open(self) -> None:
        """Recover and start."""
        try:
            self._host = LoopHost(ServerOptions(data=self._data))
            engine, node = self._host.engine, EMBEDDED_NODE + secrets.token_hex(8)
            joined = Listener(engine.gateway, self._host.clock, Limits(), node, authenticator=OwnersOnly())
            self._joined = joined
            _embedded.add(self)
            try:
                # During recovery, those who join hear that the broker is starting.
                joined.starting = True
                await self._door.open(joined)
                await asyncio.to_thread(self._host.load_identities)
                await asyncio.to_thread(engine.recover)
                engine.start()
                joined.starting = False
            except BaseException:
                await self._let_go(0)
                raise
        except OSError as error:
            raise unusable(self._data, error) from error

    async def _let_go(self, drain_s: float) -> None:
        if self._joined is not None:
            await self._joined.stop(drain_s)
            self._joined = None
        _embedded.discard(self)
        self._door.close()
        await self._host.close()

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """See `BrokerVerbs.submit`; a request is checked as if it had come over a network."""
        try:
            request = codec.checked(request)
        except InvalidRequest as error:
            respond(refuse(error), NOTHING)
            return
        self._host.engine.gateway.submit(request, body, respond)

    async def close(self) -> None:
        """Finish, sync, release the folder; those who have joined lose the broker."""
        self._host.engine.drain()
        await self._let_go(JOINED_DRAIN_S)

    def after_fork(self) -> None:
        """In a forked child: the broker is the parent's."""
        if self._joined is not None:
            self._joined.abandon()


_embedded: set[EmbeddedVerbs] = set()
"""Those that are open. They are kept here, because in a forked child their clients forget them first."""


def _after_fork() -> None:
    for verbs in _embedded:
        verbs.after_fork()
    _embedded.clear()


os.register_at_fork(after_in_child=_after_fork)
