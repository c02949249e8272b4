"""Spare memory: makes the allocators return free pages, which they would keep for ever by themselves.

Arrow's pool holds bodies, the C heap small objects. Both keep as much as they ever needed at once, and the
holes between long-lived objects: a broker would have the memory of its worst moment, and creep. So every ten
seconds the greatest need since the last look is compared with the need now; if the difference is large, free
pages are returned. In any case they are returned every minute, because of the holes: that costs about a
millisecond, and page faults later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa

LOOK_S = 10.0
HOLES_S = 60.0
SPARE_BYTES = 8 * 1024 * 1024
WARM_MS = 1_000
"""So long Arrow's pool keeps what was freed, where it can be told: by itself it returns pages at once."""


class SparePages:
    """Watches the need of a pool; `release` returns free pages to the system."""

    def __init__(self, release: Callable[[], None], now_s: float) -> None:
        self._release = release
        self._looked_s = self._released_s = now_s
        self._peak_bytes = 0

    def note(self, used_bytes: int, now_s: float) -> None:
        """Note the bytes that the pool has in use now; called several times a second."""
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        if now_s - self._looked_s < LOOK_S:
            return
        if self._peak_bytes - used_bytes > SPARE_BYTES or now_s - self._released_s >= HOLES_S:
            self._released_s = now_s
            self._release()
        self._peak_bytes, self._looked_s = used_bytes, now_s


def heap_trimmer() -> Callable[[], None]:
    """A function that returns the free pages of the C heap, if the C library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return lambda: None
    return lambda: trim(ctypes.c_size_t(0)) and None


def keep_warm() -> None:
    """Have Arrow's pool keep free pages for a moment: bodies that come one after the other use the same ones.
    Only one kind of pool can be told so; others do it anyway."""
    with suppress(NotImplementedError):
        pa.jemalloc_set_decay_ms(WARM_MS)
