"""Messages as handlers see them: typed data, where it came from, and how to settle it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterator
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from tailrace.bus.outcomes import Act
from tailrace.client.queue.delivery import Delivery
from tailrace.client.queue.handler_verdicts import as_text
from tailrace.errors import LeaseLost

T = TypeVar("T")


class _Envelope(Generic[T]):
    """What both forms of a message have in common."""

    __slots__ = ("act", "data", "delivery", "name", "version")

    def __init__(self, delivery: Delivery, name: str, version: int, data: T) -> None:
        self.delivery = delivery
        """What the SDK has delivered."""
        self.act: Act | None = None
        """How it was settled, if it was."""
        self.data = data
        self.name = name
        self.version = version

    @property
    def id(self) -> UUID:
        """The id that the publisher gave it."""
        return self.delivery.id

    @property
    def key(self) -> bytes | None:
        """The key, if it has one: messages of one key are handled in order, one at a time."""
        return self.delivery.key

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """All headers, the bus's own too."""
        return self.delivery.headers

    def header(self, name: str) -> str | None:
        """The last header of a name as text."""
        for other, value in reversed(self.delivery.headers):
            if other == name:
                return value.decode(errors="replace")
        return None

    @property
    def attempt(self) -> int:
        """1 at first, one more after every failure."""
        return self.delivery.attempt

    @property
    def deliveries(self) -> int:
        """How often it was delivered, this time counted; also after a crash, which is no failure of it."""
        return self.delivery.deliveries

    @property
    def timestamp(self) -> datetime:
        """When it was published."""
        return self.delivery.timestamp

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, partition and offset."""
        return self.delivery.topic, self.delivery.partition, self.delivery.offset

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, rejected or given back."""
        return self.act is not None

    def __repr__(self) -> str:
        topic, partition, offset = self.place
        return f"{type(self).__name__}({self.name}, {topic}/{partition}@{offset}, {self.data!r})"


class Message(_Envelope[T]):
    """A message in an async handler."""

    __slots__ = ()

    async def _settle(self, act: Act, work: Awaitable[None]) -> None:
        """What was refused is not settled, and left to the policy; what is lost is not ours any more."""
        self.act = act
        try:
            await work
        except LeaseLost:
            raise
        except Exception:
            self.act = None
            raise

    async def acknowledge(self) -> None:
        """Done: returns when that is durable."""
        await self._settle(Act.ACK, self.delivery.ack())

    async def retry(self, delay: float | None = None, error: str = "") -> None:
        """Try again after `delay` seconds, or the group's back-off; counts as a failure."""
        await self._settle(Act.NACK, self.delivery.nack(delay=delay, error=as_text(error)))

    async def reject(self, reason: str = "", *, poison: bool = False) -> None:
        """To the dead letters."""
        await self._settle(Act.REJECT, self.delivery.reject(as_text(reason), poison=poison))

    async def give_back(self) -> None:
        """Not handled here after all: available to others at once, without a failure."""
        await self._settle(Act.GIVE_BACK, self.delivery.nack(failure=False))


class BlockingMessage(_Envelope[T]):
    """A message in a blocking handler, which runs in a thread; the same names, and they wait."""

    __slots__ = ("_loop", "_message")

    def __init__(self, message: Message[T], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(message.delivery, message.name, message.version, message.data)
        self._message = message
        self._loop = loop

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, rejected or given back."""
        return self._message.settled

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def acknowledge(self) -> None:
        """Done: returns when that is durable."""
        self._wait(self._message.acknowledge())

    def retry(self, delay: float | None = None, error: str = "") -> None:
        """Try again after `delay` seconds, or the group's back-off; counts as a failure."""
        self._wait(self._message.retry(delay, error))

    def reject(self, reason: str = "", *, poison: bool = False) -> None:
        """To the dead letters."""
        self._wait(self._message.reject(reason, poison=poison))

    def give_back(self) -> None:
        """Not handled here after all: available to others at once, without a failure."""
        self._wait(self._message.give_back())


M = TypeVar("M", Message[Any], BlockingMessage[Any])


class Batch(Generic[M]):
    """Messages checked out together: a set from which each leaves when it is settled on its own."""

    __slots__ = ("_messages",)

    def __init__(self, messages: list[M]) -> None:
        self._messages: list[M] = messages

    def __iter__(self) -> Iterator[M]:
        """Those that are not settled yet."""
        return iter([message for message in self._messages if not message.settled])

    def __len__(self) -> int:
        return sum(not message.settled for message in self._messages)
