"""`tailrace schedule` and `tailrace delayed`: recurring schedules, and delayed messages that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from tailrace.cli.commands.message_options import Header, Ttl
from tailrace.cli.execution import client_command
from tailrace.cli.moments import iso
from tailrace.cli.output import Output, printable, printable_bytes
from tailrace.cli.parameters import Prefix, Resume, TopicName
from tailrace.cli.records import bytes_field, parse_headers
from tailrace.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from tailrace import Client
    from tailrace.client.admin.schedules import Schedule, Scheduled

recurring = typer.Typer(no_args_is_help=True, help="Messages that the broker publishes by itself.")
delayed = typer.Typer(no_args_is_help=True, help="Delayed messages that wait for their time.")

ScheduleName = Annotated[str, typer.Argument(help="Name of the schedule.", show_default=False)]


@client_command(recurring, fields={"schedule: zone": "--zone", "schedule: ttl_ms": "--ttl, in ms"})
async def put(
    client: Client,
    output: Output,
    name: ScheduleName,
    topic: TopicName,
    cron: Annotated[str, typer.Argument(help="Cron expression, such as '0 3 * * *'.", show_default=False)],
    value: Annotated[str, typer.Argument(help="The message.", show_default=False)],
    *,
    zone: Annotated[str, typer.Option("--zone", help="Time zone, such as Europe/Lisbon.")] = "UTC",
    key: Annotated[str | None, typer.Option("--key", help="Key of the message.")] = None,
    header: Header = None,
    priority: Annotated[
        int, typer.Option("--priority", min=0, max=4, help="0 critical ... 4 background.")
    ] = 2,
    ttl: Ttl = None,
) -> None:
    """Create or replace a schedule."""
    from tailrace.cli.moments import parse_lifetime

    seconds = None if ttl is None else parse_lifetime(ttl, "--ttl").total_seconds()

    async with client:
        schedules = client.schedules()
        await schedules.put(
            name,
            topic,
            cron,
            zone=zone,
            value=value.encode("utf-8", "surrogateescape"),
            key=None if key is None else key.encode("utf-8", "surrogateescape"),
            headers=parse_headers(header or []),
            priority=priority,
            ttl=seconds,
        )
        made = next(found for found in await schedules.list(name) if found.name == name)
        next_time = "-" if made.next_time is None else iso(made.next_time)
        output.result(_record(made), f"schedule {printable(name)} publishes next at {next_time}")


@client_command(recurring, "list")
async def list_(client: Client, output: Output, prefix: Prefix = "") -> None:
    """List schedules and their next ticks."""
    async with client:
        found = await client.schedules().list(prefix)
        headings = ["schedule", "topic", "cron", "zone", "owner", "next", "state"]
        output.listing(found, _record, headings, _row, "no schedules: `tailrace schedule put` makes one")


@client_command(recurring)
async def pause(client: Client, output: Output, name: ScheduleName, resume: Resume = False) -> None:
    """Let a schedule rest, or go on; ticks that passed meanwhile are not made up for."""
    async with client:
        schedules = client.schedules()
        await (schedules.resume(name) if resume else schedules.pause(name))
        _told(output, name, "resumed" if resume else "paused")


@client_command(recurring)
async def delete(client: Client, output: Output, name: ScheduleName) -> None:
    """Remove a schedule."""
    async with client:
        await client.schedules().delete(name)
        _told(output, name, "deleted")


def _told(output: Output, name: str, state: str) -> None:
    output.result({"schedule": name, "state": state}, f"schedule {printable(name)} is {state}")


@client_command(delayed, "list")
async def list_delayed(
    client: Client,
    output: Output,
    topic: TopicName,
    *,
    max_: Annotated[int, typer.Option("--max", "-n", min=1, max=1000, help="Show so many at most.")] = 100,
) -> None:
    """List delayed messages, the next due first."""
    async with client:
        found = await client.scheduled(topic, limit=max_)
        headings = ["due", "partition", "id", "key", "value"]
        output.listing(found, _delayed_record, headings, _delayed_row, "nothing waits")


@client_command(delayed)
async def cancel(
    client: Client,
    output: Output,
    topic: TopicName,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids, as `delayed list` shows them.")],
) -> None:
    """Cancel delayed messages: they are never appended."""
    wanted = [_id(text) for text in ids]

    async with client:
        missing = []
        for number in wanted:
            done = await client.cancel_id(topic, number)
            if output.as_json:
                output.record({"id": str(number), "cancelled": done})
            elif done:
                output.line(f"{number} is cancelled")
            if not done:
                missing.append(str(number))
        if missing:
            hint = f"`tailrace trace {topic} ID` shows what became of it"
            raise NotFound(f"not waiting on {topic}: {', '.join(missing)}", hint=hint)


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidRequest(f"{text!r} is not the id of a message") from None


def _record(schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "topic": schedule.topic,
        "cron": schedule.cron,
        "zone": schedule.zone,
        "next": None if schedule.next_time is None else iso(schedule.next_time),
        "last": None if schedule.last_time is None else iso(schedule.last_time),
        "paused": schedule.paused,
        "owner": schedule.owner or None,
        "priority": schedule.priority,
        "ttl": schedule.ttl,
        **bytes_field("key", schedule.key),
        **bytes_field("value", schedule.value),
        "headers": [{"name": name, **bytes_field("value", value)} for name, value in schedule.headers],
    }


def _row(schedule: Schedule) -> list[Any]:
    next_time = None if schedule.next_time is None else iso(schedule.next_time)
    state = "paused" if schedule.paused else None
    fields = [schedule.name, schedule.topic, schedule.cron, schedule.zone, schedule.owner or None]
    return [*fields, next_time, state]


def _delayed_row(message: Scheduled) -> list[Any]:
    key = "" if message.key is None else printable_bytes(message.key)
    value = "" if message.value is None else printable_bytes(message.value)[:60]
    return [iso(message.deliver_at), message.partition, str(UUID(bytes=message.id_bytes)), key, value]


def _delayed_record(message: Scheduled) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "partition": message.partition,
        "id": str(UUID(bytes=message.id_bytes)),
        "deliver_at": iso(message.deliver_at),
        **bytes_field("key", message.key),
        **bytes_field("value", message.value),
        "headers": [{"name": name, **bytes_field("value", value)} for name, value in message.headers],
    }
