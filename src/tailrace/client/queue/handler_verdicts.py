"""What a handler says about a message by raising `Retry` or `Reject`, and errors as text that can travel.

They mean the same wherever handlers run: in `Consumer.run`, in its blocking wrapper, and on the bus.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from tailrace.client.sdk_tuning import DELAY_S_MAX, TEXT_BYTES_MAX


class Retry(Exception):
    """Raised by a handler: try again, after `delay` seconds or the group's back-off. Counts as a failure."""

    def __init__(self, delay: float | None = None, reason: str = "") -> None:
        # Here, and not when the message is settled: the mistake is the handler's, and its failure.
        if delay is not None and not _is_delay(delay):
            raise ValueError(f"Retry: delay is seconds from 0 to {DELAY_S_MAX} (a year), not {delay!r}")
        super().__init__(reason or "the handler asked for a retry")
        self.delay = delay


class Reject(Exception):
    """Raised by a handler: this message is hopeless, it goes straight to the dead letters."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler rejected it")


def _is_delay(value: Any) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= DELAY_S_MAX  # NaN is not.


def delay_of(error: BaseException | None) -> float | None:
    """After how many seconds the handler wants the message again; None when it did not say, or not usably."""
    delay = getattr(error, "delay", None) if isinstance(error, Retry) else None
    return delay if _is_delay(delay) else None


def as_text(given: object) -> str:
    """A reason or an error as text that can travel: one that cannot be encoded, cannot be shown or is too
    long must not keep its message from being settled."""
    try:
        text = str(given)
    except Exception as error:
        text = f"(its text cannot be shown: {type(error).__name__})"
    encoded = text[:TEXT_BYTES_MAX].encode(errors="backslashreplace")
    return encoded[:TEXT_BYTES_MAX].decode(errors="ignore")


def described(error: BaseException) -> str:
    """An error with its kind, as text that can travel."""
    return f"{type(error).__name__}: {as_text(error)}"
