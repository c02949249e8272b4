"""What becomes of a message after its handler: a table for each policy, and the handler's own choice."""

from __future__ import annotations

import asyncio
from enum import Enum

from tailrace.client.queue.handler_verdicts import Reject, Retry


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
