"""Membership in a group: joining, heartbeats that are also the channel for changes, partitions that move.

The answer to a heartbeat says all that the member has. What it did not have before is granted to it (after
`on_assigned`), what it has to give up is finished first (after `on_revoked`) and then confirmed with the next
heartbeat, what is gone without a word is dropped. Whatever goes wrong ends in joining again under the same
id: nothing here gives up while the consumer is open, unless another consumer has joined under that id.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from tailrace.client.rpc.calls import ask, error_of
from tailrace.client.rpc.loop_watch import unwatch, watch
from tailrace.client.rpc.waiters import BackgroundTasks
from tailrace.client.sdk_tuning import BEAT_MS_MIN, LEAVE_S, PAUSE_S_MAX, PAUSE_S_MIN
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import Heartbeat, JoinGroup, LeaveGroup, Membership, Place
from tailrace.core.model.group_options import GroupPolicy, warnings_of
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Fenced, NotFound, TailraceError, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

log = logging.getLogger("tailrace.consumer")
Moved = Callable[[set[Place]], Awaitable[None] | None]
"""A callback of the application for partitions that come or go."""


class Holder(Protocol):
    """The consumer behind a membership."""

    def granted(self, places: dict[Place, int]) -> None:
        """These partitions, with their generations, may be used from now on."""
        ...

    def reconfigured(self) -> None:
        """The group has other options from now on."""
        ...

    def withdrawn(self, places: set[Place]) -> None:
        """These partitions have to be given up: nothing more of them is handed out."""
        ...

    async def release(self, places: set[Place], seconds: float) -> None:
        """Finish with these partitions, within the time: nothing of them may be used after."""
        ...

    def dropped(self, places: set[Place]) -> None:
        """These partitions are gone, or begin anew: forget what was buffered of them."""
        ...

    def hungry(self, places: set[Place]) -> None:
        """Other members wait for messages, and there are none but those that are held of these partitions."""
        ...

    def tick(self) -> None:
        """A heartbeat was answered: an occasion to look at the clock (a test's moves without the loop's)."""
        ...

    def failed(self, error: BaseException) -> None:
        """Something went wrong that the application has to know."""
        ...

    def pause(self, places: set[Place]) -> None:
        """Nothing more of these is handed out, and what was leased ahead goes back."""
        ...

    def refuse(self, error: TailraceError) -> None:
        """Nothing more is handed out, for this reason."""
        ...

    def woken(self) -> None:
        """The connection or the membership is new: ask again for messages."""
        ...


class GroupSession:
    """One member of a group."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        request: JoinGroup,
        timeout: float,
        *,
        on_assigned: Moved | None,
        on_revoked: Moved | None,
    ) -> None:
        self._verbs = verbs
        self._holder: Holder
        # By it the broker tells this consumer from another that was given the same name.
        self._request = msgspec.structs.replace(request, incarnation=secrets.token_hex(8))
        self._timeout = timeout
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._loop = asyncio.get_running_loop()
        self._callbacks = asyncio.Lock()
        self._tasks = BackgroundTasks(lambda error: self._holder.failed(error))
        self._version = 0
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = PAUSE_S_MIN
        self._rejoining = False
        self._left = False
        self._owned: dict[Place, int] = {}
        self._assigning: set[Place] = set()
        self._finishing: set[Place] = set()
        self._released: set[Place] = set()
        self.policy = GroupPolicy()
        self.state = ""

    @property
    def member(self) -> str:
        """The id of the member."""
        return self._request.member

    def assignment(self) -> set[Place]:
        """The partitions that it has, those that it is about to give up included."""
        return set(self._owned)

    def usable(self) -> set[Place]:
        """The partitions of which messages may be asked for: not those that it is about to give up."""
        return self._owned.keys() - self._finishing

    # -- joining and leaving

    async def join(self, holder: Holder) -> None:
        """Become a member, for a consumer; raises why not."""
        self._holder = holder
        membership = await ask(self._verbs, self._request, self._timeout)
        assert isinstance(membership, Membership)
        self._joined(membership)
        for warning in warnings_of(self.policy):
            log.warning("group %r: %s", self._request.group, warning)

    def _joined(self, membership: Membership) -> None:
        self._apply(membership)
        self._watch()
        self._beat()

    def _watch(self) -> None:
        policy = self.policy
        leased_ms = policy.session_ms if policy.mode == "stream" else policy.lease_ms
        watch(self._loop, self, min(leased_ms, policy.session_ms))

    def rejoin(self) -> None:
        """Join again under the same id: after a lost connection, or when the broker says `Fenced`."""
        if self._rejoining or self._left:
            return
        self._rejoining = True
        self._number += 1  # The answer to an older heartbeat does not count any more.
        self._tasks.start(self._rejoin())

    async def _rejoin(self) -> None:
        request = msgspec.structs.replace(self._request, again=True)
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, PAUSE_S_MAX)
            try:
                reply = await ask(self._verbs, request, self._timeout)
            except TailraceError as error:
                if _superseded(error):
                    self._give_up(error)
                    return
                if not error.retriable:
                    self._holder.failed(error)
                continue
            assert isinstance(reply, Membership)
            self._rejoining = False
            self._joined(reply)
            self._holder.woken()
            return

    def _give_up(self, error: TailraceError) -> None:
        """Another consumer of this name has taken over: this one is over, without a word to the broker."""
        self._end()
        self._number += 1
        log.error("%s", error)
        places = set(self._owned)
        self._holder.pause(places)  # The other one shall not have to wait for what was leased ahead.
        self._drop(places)
        if self._on_revoked is not None:
            self._tasks.start(self._call(self._on_revoked, places - self._finishing))
        self._holder.refuse(error)

    async def leave(self) -> None:
        """Stop being a member. When the broker cannot be reached, the session runs out by itself."""
        self._end()
        self._number += 1
        self._tasks.cancel()
        request = LeaveGroup(self._request.group, self.member, self._request.incarnation)
        try:
            await ask(self._verbs, request, min(LEAVE_S, self._timeout))
        except (Fenced, NotFound):
            pass  # It was no member any more.
        except TailraceError as error:
            log.warning("%s could not leave %s: %s", self.member, self._request.group, error)

    def stop(self) -> None:
        """End without a word: there is no connection to say it on."""
        self._end()
        self._tasks.cancel()

    def _end(self) -> None:
        self._left = True
        self._cancel_timer()
        unwatch(self._loop, self)

    # -- heartbeats

    def _beat(self) -> None:
        """Send a heartbeat now; the one before it is answered at once and does not count any more."""
        if self._left or self._rejoining:
            return
        self._cancel_timer()
        self._number += 1
        number = self._number
        wait_ms = max(BEAT_MS_MIN, min(self.policy.heartbeat_ms, self.policy.lease_ms // 3))

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if number == self._number and not self._left:
                self._answered(reply)

        request = Heartbeat(
            self._request.group,
            self.member,
            self._version,
            sorted(self._released),
            wait_ms,
            self._request.incarnation,
        )
        # A broker that does not answer at all is as good as gone.
        self._timer = self._loop.call_later(wait_ms / 1000 + self._timeout, self.rejoin)
        self._verbs.submit(request, b"", respond)

    def _answered(self, reply: Reply) -> None:
        self._cancel_timer()
        if isinstance(reply, Refusal):
            error = error_of(reply)
            if _superseded(error):
                self._give_up(error)
                return
            if isinstance(error, Unavailable):
                self._pause_s = PAUSE_S_MIN  # A lost connection is not its fault; `ask` waits for the next.
            elif not (error.retriable or isinstance(error, Fenced | NotFound)):
                self._holder.failed(error)
            self.rejoin()
            return
        assert isinstance(reply, Membership)
        if reply.version == self._version:
            self._pause_s = PAUSE_S_MIN  # A quiet time: all is well.
        self._holder.tick()
        self._apply(reply)
        if reply.hungry:
            self._holder.hungry(set(reply.hungry))
        self._loop.call_soon(self._beat)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- partitions that come and go

    def _apply(self, membership: Membership) -> None:
        self._version, self.state = membership.version, membership.state
        policy = msgspec.convert(membership.options, GroupPolicy)
        if policy != self.policy:
            self.policy = policy
            self._watch()
            self._holder.reconfigured()
        told = {(topic, partition): generation for topic, partition, generation in membership.owned}
        revoking = set(membership.revoking)
        self._released &= revoking
        gone = {place for place in self._owned if place not in told}
        if gone:
            self._drop(gone)
            if self._on_revoked is not None:
                self._tasks.start(self._call(self._on_revoked, gone - self._finishing))
        renewed = {
            place: told[place] for place, generation in self._owned.items() if told[place] != generation
        }
        if renewed:
            # A reset: the same partitions from another place.
            self._holder.dropped(set(renewed))
            self._owned.update(renewed)
            self._holder.granted({p: g for p, g in renewed.items() if p not in self._finishing})
        fresh = {p: g for p, g in told.items() if p not in self._owned and p not in revoking}
        self._assign({p: g for p, g in fresh.items() if p not in self._assigning | self._finishing})
        self._revoke({place for place in revoking if place in told})

    def _drop(self, places: set[Place]) -> None:
        for place in places:
            del self._owned[place]
        self._holder.dropped(places)

    def _assign(self, places: dict[Place, int]) -> None:
        if not places:
            return
        if self._on_assigned is None:
            self._owned.update(places)
            self._holder.granted(places)
            return
        self._assigning |= places.keys()
        self._tasks.start(self._assign_after(self._on_assigned, places))

    async def _assign_after(self, callback: Moved, places: dict[Place, int]) -> None:
        self._owned.update(places)
        try:
            await self._call(callback, set(places))
        finally:
            self._assigning -= places.keys()
            ready = {p: g for p, g in places.items() if self._owned.get(p) == g and p not in self._finishing}
            self._holder.granted(ready)

    def _revoke(self, places: set[Place]) -> None:
        unknown = places - self._owned.keys() - self._finishing - self._released
        if unknown:
            # An earlier life under this id had them; there is nothing to finish.
            self._released |= unknown
            self._loop.call_soon(self._beat)
        new = (places & self._owned.keys()) - self._finishing
        if new:
            self._finishing |= new
            self._holder.withdrawn(new)
            self._tasks.start(self._finish(new))

    async def _finish(self, places: set[Place]) -> None:
        seconds = self.policy.revoke_timeout_ms / 2000
        until_s = self._loop.time() + seconds
        try:
            if self._on_revoked is not None:
                try:
                    async with asyncio.timeout(seconds):
                        await self._call(self._on_revoked, places)
                except TimeoutError:
                    log.warning("on_revoked of %s took longer than %g s", self.member, seconds)
            await self._holder.release(places, max(0.0, until_s - self._loop.time()))
        finally:
            still = places & self._owned.keys()
            self._drop(still)
            self._finishing -= places
            self._released |= still
            if not self._left:
                self._beat()

    async def _call(self, callback: Moved, places: set[Place]) -> None:
        if not places:
            return
        async with self._callbacks:
            result = callback(set(places))
            if inspect.isawaitable(result):
                await result


def _superseded(error: TailraceError) -> bool:
    return isinstance(error, Fenced) and bool(error.details.get("superseded"))


def client_name() -> str:
    """Who asks, for people who look at the members of a group."""
    return f"{socket.gethostname()}/{os.getpid()}"
