"""Blocking atomic writes; see `tailrace.client.publish.atomic_write`."""

from __future__ import annotations

from datetime import datetime
from types import TracebackType

from tailrace.client.publish import atomic_write
from tailrace.client.publish.message_fields import Delay, Headers
from tailrace.format.frame import Buffer
from tailrace.sync.portal import Portal


class Atomic:
    """One attempt at a version; use it as a context manager, once."""

    def __init__(self, portal: Portal, inner: atomic_write.Atomic) -> None:
        self._portal = portal
        self._inner = inner

    @property
    def writer(self) -> str:
        """Whose version it is."""
        return self._inner.writer

    @property
    def version(self) -> int:
        """The version that is decided at the end of the block."""
        return self._inner.version

    @property
    def won(self) -> bool | None:
        """Whether the version was decided for this attempt; None before the end of the block."""
        return self._inner.won

    @property
    def applied(self) -> bool:
        """Whether all partitions have it already. If not, the broker goes on until they have."""
        return self._inner.applied

    def __enter__(self) -> Atomic:
        self._portal.call(self._inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(lambda: self._inner.__aexit__(kind, error, trace))

    def send(
        self,
        topic: str,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
        priority: int | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | int | None = None,
        ttl: float | None = None,
        expires_at: datetime | int | None = None,
    ) -> None:
        """Add a message. It is readable when the block has ended and the version was won; with a `delay`
        (seconds or a timedelta from now) or a time to `deliver_at` not before that."""
        self._portal.call(
            lambda: self._inner.send(
                topic,
                value,
                key=key,
                partition=partition,
                headers=headers,
                timestamp=timestamp,
                priority=priority,
                delay=delay,
                deliver_at=deliver_at,
                ttl=ttl,
                expires_at=expires_at,
            )
        )
