"""What all connections of the native listener hold together, and the bounds on it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from tailrace.core.model.access import Caller, Origin
from tailrace.core.model.identifiers import Refusal
from tailrace.format.wire import Credentials
from tailrace.ports import Authenticator, Clock, Doorkeeper, Verbs
from tailrace.protocols.doorway import Doorway
from tailrace.protocols.edge_tuning import (
    PARTIAL_BYTES_HARD_MAX,
    PARTIAL_BYTES_MAX,
    SPIN_US,
    UNSENT_BYTES_MAX,
)

log = logging.getLogger("tailrace.native")


class Limits(msgspec.Struct, frozen=True):
    """Bounds that protect the broker from its clients."""

    connections_max: int = 10_000
    frame_bytes_max: int = 64 * 1024 * 1024
    in_flight_bytes_max: int = 32 * 1024 * 1024
    connection_in_flight_bytes_max: int = 2 * 1024 * 1024
    idle_ms: int = 90_000
    drain_ms: int = 10_000


class OpenDoor:
    """`Authenticator` and `Doorkeeper` of a broker that asks nobody who it is."""

    def authenticate(
        self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
    ) -> None:
        """Everybody may come in."""
        done(Caller("", "open", address=origin.address))

    def still(self, caller: Caller, now_us: int) -> Refusal | None:
        """And stay."""
        return None

    def admitted(self, caller: Caller) -> Refusal | None:
        """Nobody is one too many."""
        return None

    def left(self, caller: Caller) -> None:
        """Nobody was counted."""


class Occupant(Protocol):
    """A connection, as those see it that look at all of them."""

    partial_bytes: int

    def adjust(self) -> None:
        """Resume or pause reading."""
        ...

    def stalled(self, now_us: int) -> bool:
        """Whether its incomplete message has had its time."""
        ...

    def check(self, now_us: int) -> None:
        """Close if the peer is silent or stuck, or its credentials have ended."""
        ...

    def finish(self) -> None:
        """Take no more requests; close when all are answered."""
        ...

    def abort(self) -> None:
        """Close without waiting for anything."""
        ...

    def file_number(self) -> int | None:
        """The descriptor of its socket; None if it is closed."""
        ...


class Crowd:
    """All connections of a listener, and what they share."""

    def __init__(
        self,
        verbs: Verbs,
        clock: Clock,
        limits: Limits,
        node: str,
        *,
        authenticator: Authenticator | None = None,
        doorkeeper: Doorkeeper | None = None,
        doorway: Doorway | None = None,
    ) -> None:
        self.verbs = verbs
        self.clock = clock
        self.limits = limits
        self.node = node
        self.authenticator = authenticator or OpenDoor()
        self.doorkeeper = doorkeeper or OpenDoor()
        self.doorway = doorway or Doorway(clock)
        self.links: set[Occupant] = set()
        self.greeted = 0
        """How many of the links have greeted."""
        self.starting = False
        """The broker recovers: greetings are refused as `Unavailable`, and clients come again."""
        self.stopping = False
        """New connections are refused, also those that the system had accepted before."""
        self.held_bytes = 0
        self.partial_bytes = 0
        self.unsent_bytes = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._spinning = False
        self.latest: Occupant | None = None
        """The connection that was read last, at `latest_us`."""
        self.latest_us = 0
        self._spin_until_us = 0
        self._empty: asyncio.Event | None = None

    def turned_away(self) -> Refusal | None:
        """The refusal for a new connection that cannot stay; None if it can."""
        if self.stopping:
            return Refusal("unavailable", "the broker is shutting down", "none")
        if self.greeted >= self.limits.connections_max:
            return Refusal("overloaded", "too many connections", "none", {"retry_after_ms": 1000})
        return None

    def left(self, link: Occupant) -> None:
        """A connection is gone."""
        self.links.discard(link)
        if self._empty is not None and not self.links:
            self._empty.set()

    def spin(self, now_us: int) -> None:
        """Poll for a moment instead of going to sleep: a peer sends each request as soon as the last one is
        answered, and on many machines waking up takes longer than answering.
        """
        self._spin_until_us = now_us + SPIN_US
        if not self._spinning:
            self._look_again()

    def _look_again(self) -> None:
        self._spinning = self._loop is not None and self.clock.now_us() < self._spin_until_us
        if self._loop is not None and self._spinning:
            self._loop.call_soon(self._look_again)

    def hold(self, nbytes: int) -> None:
        """Count the bytes of a request under way."""
        self.held_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Uncount the bytes of a request; if the node has room again, read its connections again."""
        full = self.full
        self.held_bytes -= nbytes
        if full and not self.full:
            for link in list(self.links):
                link.adjust()

    @property
    def full(self) -> bool:
        """Whether all connections together hold more than the node allows."""
        return self.held_bytes > self.limits.in_flight_bytes_max

    def wait_for_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` when all connections together have less unsent than the bound."""
        self._waiting.append(resume)

    def count_unsent(self, nbytes: int) -> None:
        """Count bytes that peers have not taken, or uncount them; then reads that waited for room
        continue."""
        self.unsent_bytes += nbytes
        if nbytes < 0:  # A resumed read counts again: this loop must not run inside itself.
            while self._waiting and self.unsent_bytes < UNSENT_BYTES_MAX:
                self._waiting.popleft()()

    def count_partial(self, nbytes: int) -> bool:
        """Count bytes of incomplete messages, or uncount them; return whether they are too many."""
        self.partial_bytes += nbytes
        return self.partial_bytes > PARTIAL_BYTES_MAX

    def shed(self, now_us: int) -> None:
        """Incomplete messages hold too much memory: close the connection with the most, unless its message
        has only just begun.
        """
        hoarder = max(self.links, key=lambda link: link.partial_bytes, default=None)
        if hoarder is None:
            return
        if hoarder.stalled(now_us) or self.partial_bytes > PARTIAL_BYTES_HARD_MAX:
            log.warning(
                "closing a connection that holds %d bytes of an unfinished message", hoarder.partial_bytes
            )
            hoarder.abort()
