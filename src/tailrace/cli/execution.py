"""How a command runs and how it ends: the client it works with, the words for an error, the exit status.

Exit status: 0 done · the `exit` column of `tailrace.errors.EDGES` for an error · 130 Ctrl-C · 141 the
reader of the output is gone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from tailrace.cli.broker_wait import WAIT_S
from tailrace.cli.output import Output, printable, tell
from tailrace.cli.parameters import Json, Timeout, Url
from tailrace.errors import EDGES, InvalidRequest, TailraceError

if TYPE_CHECKING:
    from tailrace import Client

Found = TypeVar("Found")
Command = TypeVar("Command", bound=Callable[..., Coroutine[Any, Any, None]])
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141
CHECK_S = 30.0

HINTS = {
    "already_exists": "see it with `tailrace {what} describe`, or pass --if-missing to accept it as it is",
    "denied": "see what you may do with `tailrace acl check`, or ask an administrator",
    "corrupt": "check the files with `tailrace log verify`; docs/operations.md says what to do about damage",
    "fenced": "somebody else is active: wait for it to end, or see who it is with `tailrace group describe`",
    "full": "free space on the disk of the data folder; reads go on meanwhile",
    "lease_lost": "it took longer than its lease, or the group was reset: it is delivered again",
    "not_found": "`tailrace {what} list` shows what is there",
    "overloaded": "wait a moment and try again",
    "sequence_conflict": "somebody else was faster: read on from there, then decide again",
    "timeout": "it may still have happened: look before you repeat it, or give more --timeout",
    "unauthenticated": "give a token in TAILRACE_TOKEN or the credentials file, or a user in "
    "TAILRACE_URL=tailrace://USER:PASSWORD@HOST (tailraces:// with TLS); `tailrace whoami` shows who the "
    "broker takes you for",
    "unavailable": "start a broker with `tailrace serve`, or name another one with --url or TAILRACE_URL",
}

ROOM_QUOTAS = ("topics_max", "storage_bytes_max")
"""Quotas that no waiting helps against."""

ACCESS_COMMANDS = ("user", "token", "acl", "quota", "tenant")
"""What they are about has names and numbers in lists, and is never described."""


def with_client(
    url: str | None,
    timeout: float,
    work: Callable[[Client], Awaitable[Found]],
    fields: Mapping[str, str] | None = None,
) -> Found:
    """Connect, do the work, disconnect. `fields` are those of requests that options stand for: an error about
    a field names its option."""
    import asyncio

    from tailrace import connect

    async def session() -> Found:
        async with connect(url, timeout=timeout, wait=WAIT_S.get()) as client:
            return await work(client)

    with _options_named(fields or {}):
        return asyncio.run(session())


def client_command(
    app: typer.Typer,
    command_name: str | None = None,
    *,
    timeout: float = 30.0,
    fields: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Register a command that works with a broker. The function is given a client that is not open yet and
    the output, before its own parameters: it checks what it was given, then opens the client. --json, --url
    and --timeout are added to its options here."""

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def command(**options: Any) -> None:
            import asyncio

            from tailrace import connect

            output = Output(as_json=options.pop("json"))
            client = connect(options.pop("url"), timeout=options.pop("timeout"), wait=WAIT_S.get())
            with _options_named(fields or {}):
                asyncio.run(function(client, output, **options))

        del function.__annotations__["client"]  # Only type checkers import its type.
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())[2:]
        for name, kind, default in (("json", Json, False), ("url", Url, None), ("timeout", Timeout, timeout)):
            option = inspect.Parameter(name, KEYWORD_ONLY, default=default, annotation=kind)
            parameters.append(option)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(command_name)(command)
        return function

    return register


@contextmanager
def _options_named(fields: Mapping[str, str]) -> Iterator[None]:
    """Let an error about a field of a request name the option that stands for it."""
    try:
        yield
    except InvalidRequest as error:
        for field, option in fields.items():
            if error.message.startswith(f"{field}: "):
                text = option + error.message.removeprefix(field)
                raise InvalidRequest(text, outcome=error.outcome, **error.details) from None
        raise


def require_broker(url: str | None) -> None:
    """Raise unless a broker answers at a network address; other addresses are for others to judge."""
    import os

    from tailrace.client.rpc.broker_url import parse_url
    from tailrace.connect import DEFAULT_URL

    async def nothing(client: Client) -> None:
        """That there is a client says it all."""

    if parse_url(url or os.environ.get("TAILRACE_URL") or DEFAULT_URL).network:
        with_client(url, CHECK_S, nothing)


def tell_of_outages(*, as_json: bool) -> None:
    """Say on standard error when the connection is lost, tried again and there again; not with --json."""
    import logging

    class Remark(logging.Handler):
        """A line for a person, in which others' text is harmless."""

        def emit(self, record: logging.LogRecord) -> None:
            tell(printable(record.getMessage()))

    log = logging.getLogger("tailrace.client")
    if not log.hasHandlers():
        log.addHandler(logging.NullHandler() if as_json else Remark())
        log.setLevel(logging.INFO)


def _hint(error: TailraceError) -> str | None:
    """What to do about an error, unless its message says so already."""
    if "hint" in error.details:
        hint: str | None = error.details["hint"]
        return hint
    if error.code == "unavailable" and "path" in error.details:
        return "work through the broker that holds the folder, stop it, or choose another folder"
    if error.details.get("quota") in ROOM_QUOTAS:
        return "an administrator can raise the quota: `tailrace quota put`"
    if "`tailrace " in error.message or error.code not in HINTS:
        return None
    what = _what(error)
    if error.code == "already_exists" and what in ACCESS_COMMANDS:
        return HINTS["not_found"].format(what=what)
    return HINTS[error.code].format(what=what)


def _what(error: TailraceError) -> str:
    """What kind of thing an error is about, as the commands call it."""
    words = ["acl" if word == "rule" else word for word in error.message.split()[:5]]
    return next((word for word in words if word in ("group", "schedule", *ACCESS_COMMANDS)), "topic")


def report(error: TailraceError, *, as_json: bool) -> int:
    """Tell standard error what went wrong and what to do; returns the exit status."""
    hint = _hint(error)
    if as_json:
        import msgspec

        fields: dict[str, Any] = {
            "error": error.code,
            "message": error.message,
            "retriable": error.retriable,
            "outcome": error.outcome,
            "details": {name: value for name, value in error.details.items() if name != "hint"},
            "hint": hint,
        }
        text = msgspec.json.encode(fields, enc_hook=str).decode("utf-8")
    else:
        # The lines are ours; what stands in them may be anybody's.
        text = "error: " + "\n".join(printable(line) for line in error.message.split("\n"))
        if error.outcome == "unknown":
            text += "\noutcome: unknown, it may still have happened"
        if hint:
            text += f"\nhint: {hint}"
    tell(text)
    return EDGES.get(error.code, EDGES["error"]).exit
