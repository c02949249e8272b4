"""When the allocators give back what they do not need: by themselves they keep it for ever.

Arrow's pool reuses pages, which is why bodies live in it, and the C heap holds small ones. Both hold on to as
much as they ever needed at once, and to the holes between what is needed for long: the memory of a broker
would be that of its worst moment, and creep. So every ten seconds the greatest need since the last look is
compared with the need of now, and what is free goes back where that is much. The holes go back every minute:
that takes about a millisecond, and faults later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

LOOK_S = 10.0
HOLES_S = 60.0
SPARE_BYTES = 8 * 1024 * 1024


class SparePages:
    """Watches the need of a pool; `release` gives back what is free."""

    def __init__(self, release: Callable[[], None], now_s: float) -> None:
        self._release = release
        self._looked_s = self._released_s = now_s
        self._peak_bytes = 0

    def note(self, used_bytes: int, now_s: float) -> None:
        """The pool has so much in use now; called several times a second."""
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        if now_s - self._looked_s < LOOK_S:
            return
        if self._peak_bytes - used_bytes > SPARE_BYTES or now_s - self._released_s >= HOLES_S:
            self._released_s = now_s
            self._release()
        self._peak_bytes, self._looked_s = used_bytes, now_s


def heap_trimmer() -> Callable[[], None]:
    """Gives back the free pages of the C heap, where the C library can be asked to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return lambda: None
    return lambda: trim(ctypes.c_size_t(0)) and None
