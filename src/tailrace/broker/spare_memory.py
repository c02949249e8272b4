"""When Arrow's pool gives back what it does not need: it keeps what was freed for ever, by itself.

The pool reuses pages, which is why bodies live in it. But it holds on to as many as it ever needed at once:
the memory of a broker would be that of its worst moment. So every ten seconds the greatest need since the
last look is compared with the need of now. Giving back costs some milliseconds and faults later, so a little
is kept, and a busy broker does it at most once in ten seconds.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK_S = 10.0
SPARE_BYTES = 8 * 1024 * 1024


class SparePages:
    """Watches the need of a pool; `release` gives back what is free."""

    def __init__(self, release: Callable[[], None], now_s: float) -> None:
        self._release = release
        self._looked_s = now_s
        self._peak_bytes = 0

    def note(self, used_bytes: int, now_s: float) -> None:
        """The pool has so much in use now; called several times a second."""
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        if now_s - self._looked_s < LOOK_S:
            return
        if self._peak_bytes - used_bytes > SPARE_BYTES:
            self._release()
        self._peak_bytes, self._looked_s = used_bytes, now_s
