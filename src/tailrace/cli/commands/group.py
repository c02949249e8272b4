"""`tailrace group`: list, describe, enlist, alter, pause, resume, reset and delete groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import (
    GroupName,
    GroupSettings,
    IfMissing,
    Prefix,
    Resume,
    TopicName,
)
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import Client
    from tailrace.client.admin.group_admin import Group

groups = typer.Typer(no_args_is_help=True, help="Look at groups, alter and move them, pause and delete them.")

Force = Annotated[bool, typer.Option("--force", help="Also while members are connected.")]

SHOWN = (
    ("topic", "topic"),
    ("partition", "partition"),
    ("member", "member"),
    ("committed", "committed"),
    ("end", "end_offset"),
    ("lag", "lag"),
    ("oldest ms", "oldest_age_ms"),
    ("in flight", "in_flight"),
    ("waiting", "waiting"),
    ("dying", "dying"),
    ("failures", "failures"),
    ("dead", "dead_lettered"),
    ("collected", "collected"),
    ("fault", "fault"),
)


@client_command(groups, "list")
async def list_(
    client: Client,
    output: Output,
    prefix: Prefix = "",
    topic: Annotated[str | None, typer.Option("--topic", help="Only groups of this topic.")] = None,
) -> None:
    """List groups."""
    async with client:
        found = await client.groups().list(prefix, topic=topic)
        if not found and topic is not None:
            await client.admin().describe_topic(topic)  # A name that was mistyped is told.
        headings = ["group", "topics", "mode", "members", "lag", "state"]
        nothing = "no groups yet: `tailrace consume TOPIC --group NAME` makes one"
        output.listing(found, _record, headings, _row, nothing)


@client_command(groups)
async def describe(client: Client, output: Output, group: GroupName) -> None:
    """Show a group: its options, its members, and its place in every partition."""
    async with client:
        found = await client.groups().describe(group)
        if output.as_json:
            output.record(_record(found))
        else:
            _show(output, found)


@client_command(groups)
async def enlist(
    client: Client,
    output: Output,
    group: GroupName,
    topic: Annotated[list[str], typer.Argument(help="Topics that it consumes.", show_default=False)],
    option: GroupSettings = None,
    if_missing: IfMissing = False,
) -> None:
    """Make a group before anybody connects: what is published from now on waits for it."""
    from tailrace.cli.records import GROUP_RESERVED, parse_settings

    settings = parse_settings(option, GROUP_RESERVED, "groups")

    async with client:
        made = await client.groups().create(group, topic, if_missing=if_missing, **settings)
        topics = printable(", ".join(made.topics))
        output.result(_record(made), f"group {printable(made.name)} is enlisted on {topics}")
        _warn(output, made)


@client_command(groups)
async def alter(client: Client, output: Output, group: GroupName, option: GroupSettings = None) -> None:
    """Change options of a group, all but mode and ordering; its members hear of them at once."""
    from tailrace.cli.records import GROUP_RESERVED, parse_settings

    settings = parse_settings(option, GROUP_RESERVED, "groups")
    if not settings:
        raise InvalidRequest("name at least one option that is to be changed: -o lease_ms=60000")

    async with client:
        found = await client.groups().alter(group, **settings)
        changed = ", ".join(f"{name} = {found.options[name]}" for name in settings)
        output.result(_record(found), f"group {printable(found.name)} has {printable(changed)}")
        _warn(output, found)


@client_command(groups)
async def pause(client: Client, output: Output, group: GroupName, resume: Resume = False) -> None:
    """Stop deliveries to a whole group, or go on with them; its members stay."""
    async with client:
        admin = client.groups()
        await (admin.resume(group) if resume else admin.pause(group))
        state = "resumed" if resume else "paused"
        output.result({"group": group, "state": state}, f"group {printable(group)} is {state}")


@client_command(groups, fields={"offsets": "--to"})
async def reset(
    client: Client,
    output: Output,
    group: GroupName,
    topic: TopicName,
    *,
    to: Annotated[str, typer.Option("--to", help="earliest, latest, an offset, an ISO 8601 time, or -1h.")],
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", min=0, help="With an offset: only this partition (repeat for more)."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    force: Force = False,
) -> None:
    """Move a group on one topic. Its leases, attempts and back-offs there are dropped."""
    from datetime import UTC, datetime

    from tailrace.cli.moments import parse_point

    point = parse_point(to, datetime.now(UTC), "--to")
    if partition and not isinstance(point, int):
        raise InvalidRequest("--partition goes with an offset; other points are found for every partition")

    async with client:
        target: Any = point
        if isinstance(point, int):
            count = len((await client.admin().describe_topic(topic)).partitions)
            target = dict.fromkeys(partition or range(count), point)
        plan = await client.groups().reset(group, topic, target, dry_run=dry_run, force=force)
        moves = [(number, before, after) for number, (before, after) in sorted(plan.changes.items())]
        if output.as_json:
            changes = [dict(zip(("partition", "before", "after"), move, strict=True)) for move in moves]
            output.record({"group": group, "topic": topic, "done": plan.done, "changes": changes})
            return
        rows = [[number, before, after, after - before] for number, before, after in moves]
        output.table(["partition", "committed", "to", "change"], rows)
        if plan.done:
            output.note(f"group {printable(group)} is reset on {printable(topic)}")
        else:
            output.note("nothing was changed: leave --dry-run out to do it")


@client_command(groups)
async def delete(client: Client, output: Output, group: GroupName, force: Force = False) -> None:
    """Forget a group and its state on every topic."""
    async with client:
        await client.groups().delete(group, force=force)
        output.result({"group": group, "state": "deleted"}, f"group {printable(group)} is deleted")


def _record(group: Group) -> dict[str, Any]:
    return {
        "group": group.name,
        "topics": group.topics,
        "options": group.options,
        "paused": group.paused,
        "member_count": group.member_count,
        "lag": group.lag,
        "members": [
            {
                "member": member["member"],
                "client": member["client"],
                "since": _time(member["since_us"]),
                "last_seen": _time(member["last_seen_us"]),
                "owned": [{"topic": topic, "partition": number} for topic, number in member["owned"]],
            }
            for member in group.members
        ],
        "partitions": [{**row, "member": row["member"] or None} for row in group.partitions],
        "warnings": group.warnings,
        "known": group.known,
    }


def _time(time_us: int) -> str | None:
    from tailrace.cli.moments import iso
    from tailrace.client.messages import moment

    return iso(moment(time_us)) if time_us else None


def _row(group: Group) -> list[Any]:
    topics, mode = ", ".join(group.topics), group.options.get("mode")
    return [group.name, topics, mode, group.member_count, group.lag, _state(group)]


def _state(group: Group) -> str | None:
    if not group.known:
        return "unknown"
    return "paused" if group.paused else None


def _show(output: Output, group: Group) -> None:
    output.pairs(
        {
            "group": group.name,
            "topics": ", ".join(group.topics),
            "state": _state(group) or "active",
            "lag": group.lag,
            "members": group.member_count,
            **group.options,
        }
    )
    if group.members:
        output.line("")
        members = [
            [member["member"], member["client"], len(member["owned"]), _time(member["since_us"])]
            for member in group.members
        ]
        output.table(["member", "client", "partitions", "since"], members, title="members")
    output.line("")
    # A partition that nobody has shows no member; of one that is shared all have it.
    shown = [{**row, "member": "(shared)" if row["shared"] else row["member"]} for row in group.partitions]
    rows = [[None if row[field] == "" else row[field] for _, field in SHOWN] for row in shown]
    output.table([heading for heading, _ in SHOWN], rows, title="partitions")
    _warn(output, group)


def _warn(output: Output, group: Group) -> None:
    for warning in group.warnings:
        output.note(f"note: {printable(warning)}")
