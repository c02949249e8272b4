"""Blocking atomic writes; see `tailrace.client.publish.atomic_write`."""

from __future__ import annotations

from tailrace.client.publish import atomic_write
from tailrace.sync.blocking_wrapper import BlockingContext, blocking


class Atomic(BlockingContext[atomic_write.Atomic]):
    """One attempt at a version; use it as a context manager, once."""

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

    send = blocking(atomic_write.Atomic.send)
