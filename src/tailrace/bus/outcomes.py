"""What becomes of a message after its handler: a table for each policy, and the handler's own choice."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any, TypeGuard

from tailrace.core.request_checks import DELAY_MS_MAX

DELAY_S_MAX = DELAY_MS_MAX // 1000
TEXT_BYTES_MAX = 16_384
"""Of the text of an error: it has to fit into the headers of an answer, which hold 64 KiB."""


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


class RequestFailed(Exception):
    """Raised by `Bus.request`: the handler of the request rejected it; the text is the handler's reason."""


class Outcome(Enum):
    """How the call of a handler ended."""

    RETURNED = "returned"
    RETRY = "raised Retry"
    REJECT = "raised Reject"
    ERROR = "raised another error, or ran past its timeout"
    STOPPED = "was cancelled because the worker stops"


class Act(Enum):
    """What is done with the message then, unless the handler has settled it already."""

    NOTHING = "nothing"
    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"
    GIVE_BACK = "give back"


class AckPolicy(Enum):
    """When a handled message is acknowledged; `TABLE` says what each of them does."""

    ACK_FIRST = "ack_first"
    ACK = "ack"
    REJECT_ON_ERROR = "reject_on_error"
    NACK_ON_ERROR = "nack_on_error"
    MANUAL = "manual"


TABLE: dict[AckPolicy, dict[Outcome, Act]] = {
    # Acknowledged before the handler runs: at most once, whatever happens then.
    AckPolicy.ACK_FIRST: dict.fromkeys(Outcome, Act.NOTHING),
    # An error is logged and the message is done all the same; only the handler's own wish counts.
    AckPolicy.ACK: {
        Outcome.RETURNED: Act.ACK,
        Outcome.RETRY: Act.NACK,
        Outcome.REJECT: Act.REJECT,
        Outcome.ERROR: Act.ACK,
        Outcome.STOPPED: Act.GIVE_BACK,
    },
    AckPolicy.REJECT_ON_ERROR: {
        Outcome.RETURNED: Act.ACK,
        Outcome.RETRY: Act.NACK,
        Outcome.REJECT: Act.REJECT,
        Outcome.ERROR: Act.REJECT,
        Outcome.STOPPED: Act.GIVE_BACK,
    },
    AckPolicy.NACK_ON_ERROR: {
        Outcome.RETURNED: Act.ACK,
        Outcome.RETRY: Act.NACK,
        Outcome.REJECT: Act.REJECT,
        Outcome.ERROR: Act.NACK,
        Outcome.STOPPED: Act.GIVE_BACK,
    },
    # The handler acknowledges, now or later; until then the message stays leased. Errors still count.
    AckPolicy.MANUAL: {
        Outcome.RETURNED: Act.NOTHING,
        Outcome.RETRY: Act.NACK,
        Outcome.REJECT: Act.REJECT,
        Outcome.ERROR: Act.NACK,
        Outcome.STOPPED: Act.GIVE_BACK,
    },
}


def outcome_of(error: BaseException | None) -> Outcome:
    """How a call that ended with this error (or none) ended."""
    if error is None:
        return Outcome.RETURNED
    if isinstance(error, Retry):
        return Outcome.RETRY
    if isinstance(error, Reject):
        return Outcome.REJECT
    if isinstance(error, asyncio.CancelledError):
        return Outcome.STOPPED
    return Outcome.ERROR


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
