"""A data folder that several clients share: one of them works in it, the others join it through its door.

Whoever comes first holds the lock of the folder and runs the broker in its own process; it uses it directly,
without a socket. Whoever comes later connects to the door. A server (`tailrace serve`) has the same door, so
a folder is reached in the same way beside it.

When the process that ran the broker is gone, the others have lost it, as clients lose a server. Each of them
tries to open the folder itself: one gets it, runs the broker from then on, and the others find its door.
Where a server was, nobody does that, because it will be started again and would find its folder taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from tailrace.broker.node import EMBEDDED_NODE, EmbeddedVerbs, unusable
from tailrace.client.rpc.credentials import HostAccess
from tailrace.client.rpc.endpoints import DoorEndpoint
from tailrace.client.rpc.machine_clock import MachineClock
from tailrace.client.rpc.transport import NetworkVerbs
from tailrace.client.sdk_tuning import RECONNECT_PAUSE_S_MAX, RECONNECT_PAUSE_S_MIN
from tailrace.core.model.commands import Request
from tailrace.errors import TailraceError, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Respond

DOORLESS_S = 3.0
"""How long whoever works in the folder has to open its door: a process that only looks at files has none."""


class InheritedDoor(DoorEndpoint):
    """The door of a folder, which is opened in this process when nobody works there any more."""

    def __init__(self, folder: str, may_inherit: Callable[[], bool]) -> None:
        super().__init__(folder)
        self._may_inherit = may_inherit
        self._opening: asyncio.Task[EmbeddedVerbs] | None = None
        self._own: EmbeddedVerbs | None = None

    async def dial(self, make: Callable[[], asyncio.BaseProtocol], access: HostAccess) -> None:
        """Connect to whoever works in the folder, which may become this process."""
        try:
            await super().dial(make, access)
        except (FileNotFoundError, ConnectionRefusedError):
            if self._own is not None or not self._may_inherit() or not _is_folder(self.folder):
                raise
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(_opened(self.folder))
            try:
                # It may take longer than a connection may: then the next attempt finds it done.
                self._own = await asyncio.shield(self._opening)
            finally:
                if self._opening.done():
                    self._opening = None
            await super().dial(make, access)

    async def close(self) -> None:
        """End the broker, if it is here."""
        if self._opening is not None:
            with contextlib.suppress(TailraceError):
                self._own = await self._opening
        if self._own is not None:
            await self._own.close()


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)


async def _opened(folder: str) -> EmbeddedVerbs:
    verbs = EmbeddedVerbs(folder, MachineClock())
    await verbs.open()
    return verbs


class FolderVerbs:
    """`BrokerVerbs` on a data folder: the broker itself, or a connection to it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.clock = MachineClock()
        self._own: EmbeddedVerbs | None = None
        self._joined: NetworkVerbs | None = None
        self._door: InheritedDoor | None = None

    async def open(self, timeout_s: float) -> None:
        """Work in the folder, or join whoever does. While that one starts, it is waited for."""
        check_folder(self._folder)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        pause = RECONNECT_PAUSE_S_MIN
        while True:
            try:
                self._own = await _opened(self._folder)
                return
            except Unavailable as error:
                if "path" not in error.details:
                    raise
                held = error
            try:
                await self._join(timeout_s)
                return
            except Unavailable as error:
                patience_s = min(timeout_s, DOORLESS_S) if error.details.get("absent") else timeout_s
                if loop.time() + pause > begun_s + patience_s:
                    raise _closed(held, error) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, RECONNECT_PAUSE_S_MAX)

    async def _join(self, timeout_s: float) -> None:
        door = InheritedDoor(self._folder, self._may_inherit)
        joined = NetworkVerbs([door])
        await joined.open(timeout_s=timeout_s)
        self._joined, self._door = joined, door

    def _may_inherit(self) -> bool:
        return self._joined is not None and self._joined.node.startswith(EMBEDDED_NODE)

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """See `BrokerVerbs.submit`."""
        verbs = self._own or self._joined
        assert verbs is not None, "it was opened"
        verbs.submit(request, body, respond)

    async def close(self) -> None:
        """Leave; a broker that runs here ends, and those that have joined it lose it."""
        if self._joined is not None:
            await self._joined.close()
        if self._door is not None:
            await self._door.close()
        if self._own is not None:
            await self._own.close()


def check_folder(folder: str) -> None:
    """Raise `StorageFault` for what cannot be a data folder. A new one is only made where its parent is:
    otherwise the path is more likely mistyped."""
    parent = os.path.dirname(folder)
    if os.path.isdir(folder):
        return
    if os.path.lexists(folder):
        raise unusable(folder, "that is a file, and not a folder")
    if not os.path.isdir(parent):
        why = f"{parent} is not a folder" if os.path.lexists(parent) else f"there is no folder {parent}"
        raise unusable(folder, f"{why}, so it cannot be made in there")


def _closed(held: Unavailable, error: Unavailable) -> Unavailable:
    """The error for a folder that somebody else holds, and keeps its door shut."""
    absent = error.details.get("absent")
    why = "which lets nobody join" if absent else f"which cannot be joined: {error.message}"
    return Unavailable(f"{held.message}, {why}", path=held.details["path"])
