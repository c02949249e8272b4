"""One request, one answer: a call with a timeout, and retries where they are harmless."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tailrace.client.sdk_tuning import PAUSE_S_MAX, PAUSE_S_MIN
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest, TailraceError, Timeout, from_code
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs


def seconds_of(timeout: float) -> float:
    """How long calls may take, as it was given."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (number and 0 < timeout < float("inf")):
        raise InvalidRequest(f"timeout: seconds, more than 0, not {timeout!r}")
    return timeout


def whole_of(name: str, value: int, least: int = 1) -> int:
    """A number of something, as it was given."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequest(f"{name}: a whole number, at least {least}, not {value!r}")
    return value


def error_of(refusal: Refusal) -> TailraceError:
    """The exception that a refusal becomes."""
    outcome: Any = refusal.outcome
    return from_code(refusal.code, refusal.message, outcome, refusal.details)


def told_wait_s(error: TailraceError) -> float:
    """How long the broker wants to be left alone with what it has refused; 0 if it does not say."""
    told_ms = error.details.get("retry_after_ms")
    return told_ms / 1000 if isinstance(told_ms, int) and told_ms > 0 else 0.0


async def ask(
    verbs: BrokerVerbs, request: Request, timeout_s: float, *, repeatable: bool = True, body: Buffer = b""
) -> Reply:
    """The reply, or the refusal raised. Retriable refusals are tried again until the time is up, not before
    the time that the broker names: those with an unknown outcome only when repeating the request does no
    harm.
    """
    reply, _ = await ask_parts(verbs, request, timeout_s, repeatable=repeatable, body=body)
    return reply


async def ask_parts(
    verbs: BrokerVerbs, request: Request, timeout_s: float, *, repeatable: bool = True, body: Buffer = b""
) -> tuple[Reply, Sequence[Buffer]]:
    """The same, with the body of the answer."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    pause = PAUSE_S_MIN
    while True:
        answer: asyncio.Future[tuple[Reply, Sequence[Buffer]]] = loop.create_future()

        def respond(
            reply: Reply,
            parts: Sequence[Buffer],
            answer: asyncio.Future[tuple[Reply, Sequence[Buffer]]] = answer,
        ) -> None:
            if not answer.done():
                answer.set_result((reply, parts))

        verbs.submit(request, body, respond)
        try:
            async with asyncio.timeout_at(deadline):
                reply, parts = await answer
        except TimeoutError:
            raise Timeout(f"{type(request).__name__}: no answer within {timeout_s:g} s") from None
        if not isinstance(reply, Refusal):
            return reply, parts
        error = error_of(reply)
        again = error.retriable and (repeatable or error.outcome == "none")
        wait_s = max(pause, told_wait_s(error))
        if not again or loop.time() + wait_s > deadline:
            raise error
        await asyncio.sleep(wait_s)
        pause = min(pause * 2, PAUSE_S_MAX)
