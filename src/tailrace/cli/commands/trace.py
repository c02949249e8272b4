"""`tailrace trace`: draw the life of a message, or find messages by what happened to them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command
from tailrace.cli.moments import check_order, iso, parse_moment
from tailrace.cli.output import Output
from tailrace.cli.parameters import TopicName
from tailrace.cli.records import bytes_field
from tailrace.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from tailrace import Client
    from tailrace.client.admin.trace_client import Life

STATUSES = (
    "scheduled, cancelled, staged, dropped, free, leased, waiting, settled, dying, dead, collected or mixed"
)
_PLACE = re.compile(r"([0-9]{1,5}):([0-9]{1,18})")

tracing = typer.Typer()


@client_command(tracing, timeout=60.0, fields={"status": "--status", "until": "--until"})
async def trace(
    client: Client,
    output: Output,
    topic: TopicName,
    message: Annotated[
        str | None,
        typer.Argument(
            help="The message: its id, or PARTITION:OFFSET. Without it, all that fit the options."
        ),
    ] = None,
    *,
    key: Annotated[str | None, typer.Option("--key", help="Only messages with this key.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Only those appended since this time (ISO 8601, or -1h).")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", help="Only those appended before this time.")
    ] = None,
    status: Annotated[str | None, typer.Option("--status", help=f"Only {STATUSES}.")] = None,
    max_: Annotated[int, typer.Option("--max", "-n", min=1, max=1000, help="Show so many at most.")] = 20,
    full: Annotated[
        bool, typer.Option("--full", help="Search everything: for ids that were not made by Tailrace.")
    ] = False,
) -> None:
    """Show the life of a message as a timeline: what happened to it, when, and at whose hands."""
    from datetime import UTC, datetime

    now = datetime.now(UTC)
    wanted: dict[str, Any] = {
        "key": None if key is None else key.encode("utf-8", "surrogateescape"),
        "since": None if since is None else parse_moment(since, now, "--since"),
        "until": None if until is None else parse_moment(until, now, "--until"),
        "status": status,
        "limit": max_,
        "full": full,
        **({} if message is None else _message(message, full=full)),
    }
    check_order(wanted["since"], wanted["until"], ("--since", "--until"))
    if message is not None and any(option is not None for option in (key, since, until)):
        raise InvalidRequest("--key, --since and --until search for messages: leave them out, or MESSAGE")

    async with client:
        found = await client.trace(topic, **wanted)
        if not len(found) and message is not None:
            raise NotFound(f"{topic} has no message {message}", hint=None)
        for number, life in enumerate(found):
            if output.as_json:
                output.record(_record(life))
                continue
            if number:
                output.line("")
            _draw(output, life)
        if not found.complete:
            output.note("there is more: narrow the search, or raise --max")
        elif not len(found):
            output.note("nothing found")


def _detail(name: str, value: Any) -> tuple[str, Any]:
    """What belongs to an event; points in time as they are written everywhere else."""
    from tailrace.client.messages import moment

    if name in ("deadline_us", "deliver_at_us"):
        return name.removesuffix("_us"), iso(moment(value))
    return name, value


def _message(text: str, *, full: bool) -> dict[str, Any]:
    from uuid import UUID

    place = _PLACE.fullmatch(text)
    if place is not None:
        return {"partition": int(place[1]), "offset": int(place[2])}
    try:
        found = UUID(text)
    except ValueError:
        raise InvalidRequest(f"{text!r} is neither the id of a message nor PARTITION:OFFSET") from None
    if found.version != 7 and not full:
        hint = "--full searches everything that is stored"
        raise InvalidRequest(f"{text} was not made by Tailrace and does not say when to look", hint=hint)
    return {"id": found}


def _draw(output: Output, life: Life) -> None:
    from tailrace.cli.timeline import draw, draw_rich

    if output.terminal:
        output.drawn(draw_rich(life))
    else:
        output.line(draw(life))


def _record(life: Life) -> dict[str, Any]:
    return {
        "topic": life.topic,
        "partition": life.partition,
        "offset": life.offset,
        "id": str(life.id),
        **bytes_field("key", life.key),
        "status": life.status,
        "groups": life.groups,
        "timestamp": iso(life.timestamp),
        "traceparent": life.traceparent,
        "origin": life.origin,
        "events": [
            {
                "time": iso(event.time),
                "event": event.event,
                "group": event.group,
                "member": event.member,
                "attempt": event.attempt,
                **dict(map(_detail, event.details, event.details.values())),
            }
            for event in life.events
        ],
    }
