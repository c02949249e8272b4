"""`tailrace group`: list, describe, enlist, alter, pause, resume, reset and delete groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import with_client
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import (
    GroupName,
    GroupSettings,
    IfMissing,
    Json,
    Prefix,
    Resume,
    Timeout,
    TopicName,
    Url,
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


@groups.command("list")
def list_(
    prefix: Prefix = "",
    topic: Annotated[str | None, typer.Option("--topic", help="Only groups of this topic.")] = None,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """List groups."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        found = await client.groups().list(prefix, topic=topic)
        if not found and topic is not None:
            await client.admin().describe_topic(topic)  # A name that was mistyped is told.
        if output.as_json:
            for group in found:
                output.record(_record(group))
            return
        rows = [
            [
                group.name,
                ", ".join(group.topics),
                group.options.get("mode"),
                group.member_count,
                group.lag,
                _state(group),
            ]
            for group in found
        ]
        output.table(["group", "topics", "mode", "members", "lag", "state"], rows)
        if not found:
            output.note("no groups yet: `tailrace consume TOPIC --group NAME` makes one")

    with_client(url, timeout, work)


@groups.command()
def describe(group: GroupName, json: Json = False, url: Url = None, timeout: Timeout = 30.0) -> None:
    """Show a group: its options, its members, and its place in every partition."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        found = await client.groups().describe(group)
        if output.as_json:
            output.record(_record(found))
        else:
            _show(output, found)

    with_client(url, timeout, work)


@groups.command()
def enlist(
    group: GroupName,
    topic: Annotated[list[str], typer.Argument(help="Topics that it consumes.", show_default=False)],
    option: GroupSettings = None,
    if_missing: IfMissing = False,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Make a group before anybody connects: what is published from now on waits for it."""
    from tailrace.cli.records import GROUP_RESERVED, parse_settings

    output = Output(as_json=json)
    settings = parse_settings(option, GROUP_RESERVED, "groups")

    async def work(client: Client) -> None:
        made = await client.groups().create(group, topic, if_missing=if_missing, **settings)
        if output.as_json:
            output.record(_record(made))
        else:
            output.line(f"group {printable(made.name)} is enlisted on {printable(', '.join(made.topics))}")
            for warning in made.warnings:
                output.note(f"note: {printable(warning)}")

    with_client(url, timeout, work)


@groups.command()
def alter(
    group: GroupName,
    option: GroupSettings = None,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Change options of a group, all but mode and ordering; its members hear of them at once."""
    from tailrace.cli.records import GROUP_RESERVED, parse_settings

    output = Output(as_json=json)
    settings = parse_settings(option, GROUP_RESERVED, "groups")
    if not settings:
        raise InvalidRequest("name at least one option that is to be changed: -o lease_ms=60000")

    async def work(client: Client) -> None:
        found = await client.groups().alter(group, **settings)
        if output.as_json:
            output.record(_record(found))
            return
        changed = ", ".join(f"{name} = {found.options[name]}" for name in settings)
        output.line(f"group {printable(found.name)} has {printable(changed)}")
        for warning in found.warnings:
            output.note(f"note: {printable(warning)}")

    with_client(url, timeout, work)


@groups.command()
def pause(
    group: GroupName,
    resume: Resume = False,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Stop deliveries to a whole group, or go on with them; its members stay."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        admin = client.groups()
        await (admin.resume(group) if resume else admin.pause(group))
        state = "resumed" if resume else "paused"
        if output.as_json:
            output.record({"group": group, "state": state})
        else:
            output.line(f"group {printable(group)} is {state}")

    with_client(url, timeout, work)


@groups.command()
def reset(
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
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Move a group on one topic. Its leases, attempts and back-offs there are dropped."""
    from datetime import UTC, datetime

    from tailrace.cli.moments import parse_point

    output = Output(as_json=json)
    point = parse_point(to, datetime.now(UTC), "--to")
    if partition and not isinstance(point, int):
        raise InvalidRequest("--partition goes with an offset; other points are found for every partition")

    async def work(client: Client) -> None:
        target: Any = point
        if isinstance(point, int):
            count = len((await client.admin().describe_topic(topic)).partitions)
            target = dict.fromkeys(partition or range(count), point)
        plan = await client.groups().reset(group, topic, target, dry_run=dry_run, force=force)
        if output.as_json:
            output.record(
                {
                    "group": group,
                    "topic": topic,
                    "done": plan.done,
                    "changes": [
                        {"partition": number, "before": before, "after": after}
                        for number, (before, after) in sorted(plan.changes.items())
                    ],
                }
            )
            return
        rows = [
            [number, before, after, after - before]
            for number, (before, after) in sorted(plan.changes.items())
        ]
        output.table(["partition", "committed", "to", "change"], rows)
        if plan.done:
            output.note(f"group {printable(group)} is reset on {printable(topic)}")
        else:
            output.note("nothing was changed: leave --dry-run out to do it")

    with_client(url, timeout, work, {"offsets": "--to"})


@groups.command()
def delete(
    group: GroupName, force: Force = False, json: Json = False, url: Url = None, timeout: Timeout = 30.0
) -> None:
    """Forget a group and its state on every topic."""
    output = Output(as_json=json)

    async def work(client: Client) -> None:
        await client.groups().delete(group, force=force)
        if output.as_json:
            output.record({"group": group, "state": "deleted"})
        else:
            output.line(f"group {printable(group)} is deleted")

    with_client(url, timeout, work)


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
    for warning in group.warnings:
        output.note(f"note: {printable(warning)}")
