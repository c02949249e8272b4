"""`tailrace topic`: create, list, describe, alter, trim and delete topics."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command, with_client
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import (
    IfMissing,
    Json,
    Partitions,
    Prefix,
    Settings,
    Timeout,
    TopicName,
    Url,
    Yes,
)
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import Client, Topic

topics = typer.Typer(no_args_is_help=True, help="Create, look at, change and delete topics.")


@client_command(topics)
async def create(
    client: Client,
    output: Output,
    name: TopicName,
    partitions: Partitions = None,
    option: Settings = None,
    if_missing: IfMissing = False,
) -> None:
    """Create a topic."""
    settings = _settings(partitions, option)

    async with client:
        topic = await client.admin().create_topic(name, if_missing=if_missing, **settings)
        output.result(
            _record(topic), f"topic {printable(topic.name)} is there, with {_count(topic)} partitions"
        )


@client_command(topics, "list")
async def list_(
    client: Client,
    output: Output,
    prefix: Prefix = "",
    internal: Annotated[
        bool, typer.Option("--internal", help="Show the broker's own topics as well.")
    ] = False,
) -> None:
    """List topics."""
    async with client:
        found = await client.admin().list_topics(prefix=prefix, internal=internal)
        headings = ["topic", "partitions", "durability", "storage", "retention"]
        output.listing(
            found, _record, headings, _row, "no topics yet: `tailrace topic create NAME` makes one"
        )


@client_command(topics)
async def describe(client: Client, output: Output, name: TopicName) -> None:
    """Show a topic, its options and its partitions."""
    async with client:
        topic = await client.admin().describe_topic(name)
        _show(output, topic)


@client_command(topics)
async def alter(
    client: Client, output: Output, name: TopicName, partitions: Partitions = None, option: Settings = None
) -> None:
    """Change options of a topic; partitions can only be added."""
    settings = _settings(partitions, option)
    if not settings:
        raise InvalidRequest("nothing to change: pass --option KEY=VALUE or --partitions N")

    async with client:
        admin = client.admin()
        await admin.alter_topic(name, **settings)
        topic = await admin.describe_topic(name)
        _show(output, topic)


@client_command(topics, fields={"offset": "--to-offset"})
async def trim(
    client: Client,
    output: Output,
    name: TopicName,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="The partition; with --to-time all without it.")
    ] = None,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", min=0, help="Drop everything below this offset.")
    ] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", help="Drop what is older than this time (ISO 8601, or -7d).")
    ] = None,
) -> None:
    """Drop the oldest messages of a topic, for good."""
    from datetime import UTC, datetime

    from tailrace.cli.moments import parse_moment

    if (to_offset is None) == (to_time is None):
        raise InvalidRequest("pass one of --to-offset and --to-time")
    if to_offset is not None and partition is None:
        raise InvalidRequest("--to-offset needs --partition: offsets count per partition")
    moment = None if to_time is None else parse_moment(to_time, datetime.now(UTC), "--to-time")

    async with client:
        admin = client.admin()
        if moment is None:
            targets = {partition or 0: to_offset or 0}
        else:
            targets = dict(enumerate(await admin.find_offsets(name, moment)))
        if partition is not None:
            if partition not in targets:
                raise InvalidRequest(f"--partition: there are partitions 0 to {len(targets) - 1}")
            targets = {partition: targets[partition]}
        for number, offset in targets.items():
            await admin.trim_topic(name, number, offset)
        topic = await admin.describe_topic(name)
        _show(output, topic)


@topics.command()
def delete(
    name: TopicName,
    yes: Yes = False,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Delete a topic and all of its messages, for good."""
    output = Output(as_json=json)
    if not yes and (json or not sys.stdin.isatty()):
        raise InvalidRequest("deleting a topic needs --yes when nobody can be asked")

    if not yes and not _agreed(name, url, timeout):
        output.note("not deleted")
        raise typer.Exit(1)

    async def work(client: Client) -> None:
        await client.admin().delete_topic(name)
        output.result({"deleted": name}, f"topic {printable(name)} is deleted")

    with_client(url, timeout, work)


def _agreed(name: str, url: str | None, timeout: float) -> bool:
    """Ask, with the figures at hand and no connection open meanwhile."""

    async def count(client: Client) -> int:
        topic = await client.admin().describe_topic(name)
        return sum(row["end_offset"] - row["start_offset"] for row in topic.partitions)

    held = with_client(url, timeout, count)
    return typer.confirm(f"Delete topic {printable(name)} with {held} messages?", err=True)


def _settings(partitions: int | None, option: list[str] | None) -> dict[str, Any]:
    from tailrace.cli.records import parse_settings

    settings = parse_settings(option)
    if partitions is not None:
        settings["partitions"] = partitions
    return settings


def _record(topic: Topic) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "id": topic.id,
        "options": topic.options,
        "partitions": topic.partitions,
    }


def _row(topic: Topic) -> list[Any]:
    options = topic.options
    durability, storage = options.get("durability"), options.get("storage")
    return [topic.name, _count(topic), durability, storage, _retention(options)]


def _count(topic: Topic) -> int:
    return int(topic.options["partitions"])


def _retention(options: dict[str, Any]) -> str:
    limits = [
        f"{name.removeprefix('retention_')}={options[name]}"
        for name in ("retention_ms", "retention_bytes", "retention_count")
        if options.get(name) is not None
    ]
    if options.get("ephemeral"):
        bounds = [
            f"{name}={options[name]}" for name in ("max_bytes", "max_messages") if options[name] is not None
        ]
        limits = ["ephemeral", *bounds, *limits]
    return " ".join(limits) or "forever"


def _show(output: Output, topic: Topic) -> None:
    if output.as_json:
        output.record(_record(topic))
        return
    output.pairs({"topic": topic.name, "id": topic.id, **topic.options})
    output.line("")
    columns = ["partition", "start_offset", "end_offset", "bytes", "segments", "fault"]
    output.table(columns, [[row.get(column) for column in columns] for row in topic.partitions])
