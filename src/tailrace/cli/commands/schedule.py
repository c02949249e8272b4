"""`tailrace schedule` and `tailrace delayed`: recurring schedules, and delayed messages that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from tailrace.cli.commands.message_options import Header, Ttl
from tailrace.cli.execution import with_client
from tailrace.cli.moments import iso
from tailrace.cli.output import Output, printable, printable_bytes
from tailrace.cli.parameters import Json, Prefix, Resume, Timeout, TopicName, Url
from tailrace.cli.records import bytes_field, parse_headers
from tailrace.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from tailrace import Client
    from tailrace.client.admin.schedules import Schedule, Scheduled

recurring = typer.Typer(no_args_is_help=True, help="Messages that the broker publishes by itself.")
delayed = typer.Typer(no_args_is_help=True, help="Delayed messages that wait for their time.")

ScheduleName = Annotated[str, typer.Argument(help="Name of the schedule.", show_default=False)]


@recurring.command()
def put(
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
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Create or replace a schedule."""
    from tailrace.cli.moments import parse_lifetime

    output = Output(as_json=json)
    seconds = None if ttl is None else parse_lifetime(ttl, "--ttl").total_seconds()

    async def work(client: Client) -> None:
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
        if output.as_json:
            output.record(_record(made))
        else:
            next_time = "-" if made.next_time is None else iso(made.next_time)
            output.line(f"schedule {printable(name)} publishes next at {next_time}")

    with_client(url, timeout, work, {"schedule: zone": "--zone", "schedule: ttl_ms": "--ttl, in ms"})


@recurring.command("list")
def list_(
    prefix: Prefix = "",
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """List schedules and their next ticks."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        found = await client.schedules().list(prefix)
        if output.as_json:
            for schedule in found:
                output.record(_record(schedule))
            return
        rows = [
            [
                schedule.name,
                schedule.topic,
                schedule.cron,
                schedule.zone,
                None if schedule.next_time is None else iso(schedule.next_time),
                "paused" if schedule.paused else None,
            ]
            for schedule in found
        ]
        output.table(["schedule", "topic", "cron", "zone", "next", "state"], rows)
        if not found:
            output.note("no schedules: `tailrace schedule put` makes one")

    with_client(url, timeout, work)


@recurring.command()
def pause(
    name: ScheduleName,
    resume: Resume = False,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Let a schedule rest, or go on; ticks that passed meanwhile are not made up for."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        schedules = client.schedules()
        await (schedules.resume(name) if resume else schedules.pause(name))
        _told(output, name, "resumed" if resume else "paused")

    with_client(url, timeout, work)


@recurring.command()
def delete(name: ScheduleName, json: Json = False, url: Url = None, timeout: Timeout = 30.0) -> None:
    """Remove a schedule."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        await client.schedules().delete(name)
        _told(output, name, "deleted")

    with_client(url, timeout, work)


def _told(output: Output, name: str, state: str) -> None:
    if output.as_json:
        output.record({"schedule": name, "state": state})
    else:
        output.line(f"schedule {printable(name)} is {state}")


@delayed.command("list")
def list_delayed(
    topic: TopicName,
    *,
    max_: Annotated[int, typer.Option("--max", "-n", min=1, max=1000, help="Show so many at most.")] = 100,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """List delayed messages, the next due first."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        found = await client.scheduled(topic, limit=max_)
        if output.as_json:
            for message in found:
                output.record(_delayed_record(message))
            return
        rows = [
            [
                iso(message.deliver_at),
                message.partition,
                str(UUID(bytes=message.id_bytes)),
                "" if message.key is None else printable_bytes(message.key),
                "" if message.value is None else printable_bytes(message.value)[:60],
            ]
            for message in found
        ]
        output.table(["due", "partition", "id", "key", "value"], rows)
        if not found:
            output.note("nothing waits")

    with_client(url, timeout, work)


@delayed.command()
def cancel(
    topic: TopicName,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids, as `delayed list` shows them.")],
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Cancel delayed messages: they are never appended."""
    output = Output(as_json=json)
    wanted = [_id(text) for text in ids]

    async def work(client: Client) -> None:
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

    with_client(url, timeout, work)


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
        "priority": schedule.priority,
        "ttl": schedule.ttl,
        **bytes_field("key", schedule.key),
        **bytes_field("value", schedule.value),
        "headers": [{"name": name, **bytes_field("value", value)} for name, value in schedule.headers],
    }


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
