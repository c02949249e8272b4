"""`tailrace dlq`: list, show, redrive and purge the dead letters of a topic."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command, with_client
from tailrace.cli.moments import iso
from tailrace.cli.output import Output, printable, printable_bytes
from tailrace.cli.parameters import Json, Timeout, TopicName, Url, Yes
from tailrace.cli.records import bytes_field, message_record
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import Client
    from tailrace.client.admin.dead_letter_reader import DeadLetter

letters = typer.Typer(no_args_is_help=True, help="Look at dead letters, send them back, drop them.")

OfGroup = Annotated[str | None, typer.Option("--group", help="Only those that this group gave up.")]
OfReason = Annotated[
    str | None,
    typer.Option("--reason", help="Only max_attempts, max_deliveries, rejected, expired, poison."),
]
FIELDS = {"reason": "--reason"}
OfKey = Annotated[str | None, typer.Option("--key", help="Only those with this key.")]


@client_command(letters, "list", fields=FIELDS)
async def list_(
    client: Client,
    output: Output,
    topic: TopicName,
    *,
    group: OfGroup = None,
    reason: OfReason = None,
    key: OfKey = None,
    max_: Annotated[int, typer.Option("--max", "-n", min=1, help="Show so many at most.")] = 100,
) -> None:
    """List the dead letters that are still there."""
    async with client:
        found = await client.dead_letters(topic).list(
            group=group, reason=reason, filter=_keyed(key), limit=max_
        )
        if not found:
            await _must_exist(client, topic)
        headings = ["place", "origin", "group", "reason", "attempts", "error", "value"]
        output.listing(found, _record, headings, _row, "no dead letters")


@client_command(letters)
async def show(
    client: Client,
    output: Output,
    topic: TopicName,
    place: Annotated[str, typer.Argument(help="PARTITION:OFFSET, as `dlq list` shows it.")],
) -> None:
    """Show one dead letter in full."""
    partition, colon, offset = place.partition(":")
    if not colon or not partition.isdecimal() or not offset.isdecimal():
        raise InvalidRequest(f"{place!r} is not PARTITION:OFFSET")

    async with client:
        letter = await client.dead_letters(topic).show(int(partition), int(offset))
        record = _record(letter)
        if output.as_json:
            output.record(record)
            return
        headers = record.pop("headers")
        output.pairs(record)
        for header in headers:
            name, data = header["name"], header.get("value", header.get("value_base64"))
            if not name.startswith("tailrace-"):
                output.line(f"  {printable(name)}: {printable(str(data))}")


@client_command(letters, fields=FIELDS)
async def redrive(
    client: Client,
    output: Output,
    topic: TopicName,
    *,
    group: OfGroup = None,
    reason: OfReason = None,
    key: OfKey = None,
    rate: Annotated[float | None, typer.Option("--rate", min=0.001, help="At most so many a second.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
) -> None:
    """Send dead letters back to the group that gave them up; no other group sees them again."""
    async with client:
        done = await client.dead_letters(topic).redrive(
            group=group, reason=reason, filter=_keyed(key), rate=rate, dry_run=dry_run
        )
        if not done.count:
            await _must_exist(client, topic)
        if output.as_json:
            output.record(
                {
                    "topic": topic,
                    "count": done.count,
                    "reopened": done.reopened,
                    "republished": done.republished,
                    "dry_run": done.dry_run,
                    "held": done.held,
                    "failed": done.failed,
                    "problems": done.problems,
                }
            )
        elif dry_run:
            output.line(f"{done.count} would be sent back: leave --dry-run out to do it")
        else:
            copies = f", {done.republished} of them as copies of what is gone" * bool(done.republished)
            output.line(f"{done.count} sent back{copies}")
        if done.held:
            output.note(f"{done.held} are in the hands of another redrive and were left to it")
        for problem in done.problems:
            output.note(f"not sent back: {problem}")
        if done.failed:
            output.note(f"{done.failed} could not be sent back and stay where they are")
            raise typer.Exit(1)


@letters.command()
def purge(
    topic: TopicName,
    *,
    group: OfGroup = None,
    reason: OfReason = None,
    key: OfKey = None,
    yes: Yes = False,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Drop dead letters for good."""
    output = Output(as_json=json)
    if not yes and (json or not sys.stdin.isatty()):
        raise InvalidRequest("dropping dead letters needs --yes when nobody can be asked")
    if not yes and not typer.confirm(f"Drop dead letters of {printable(topic)}, for good?", err=True):
        output.note("nothing was dropped")
        raise typer.Exit(1)

    async def work(client: Client) -> None:
        count = await client.dead_letters(topic).purge(group=group, reason=reason, filter=_keyed(key))
        if not count:
            await _must_exist(client, topic)
        output.result({"topic": topic, "purged": count}, f"{count} dropped")

    with_client(url, timeout, work, FIELDS)


async def _must_exist(client: Client, topic: str) -> None:
    """A topic without dead letters is fine; a name that was mistyped is not."""
    await client.admin().describe_topic(topic)


def _keyed(key: str | None) -> Any:
    if key is None:
        return None
    wanted = key.encode("utf-8", "surrogateescape")
    return lambda letter: letter.message.key == wanted


def _row(letter: DeadLetter) -> list[Any]:
    message = letter.message
    place = f"{message.partition}:{message.offset}"
    origin = f"{letter.topic}/{letter.partition}@{letter.offset}"
    value = "" if message.value is None else printable_bytes(message.value)[:40]
    return [place, origin, letter.group, letter.reason, letter.attempts, letter.error[:60], value]


def _record(letter: DeadLetter) -> dict[str, Any]:
    message = message_record(letter.message)
    return {
        "partition": message["partition"],
        "offset": message["offset"],
        "origin_topic": letter.topic,
        "origin_partition": letter.partition,
        "origin_offset": letter.offset,
        "origin_time": None if letter.time is None else iso(letter.time),
        "group": letter.group,
        "reason": letter.reason,
        "error": letter.error,
        "attempts": letter.attempts,
        "deliveries": letter.deliveries,
        "first_delivery": None if letter.first_delivery is None else iso(letter.first_delivery),
        "last_delivery": None if letter.last_delivery is None else iso(letter.last_delivery),
        "last_member": letter.last_member,
        "id": message["id"],
        **bytes_field("key", letter.message.key),
        **bytes_field("value", letter.message.value),
        "headers": message["headers"],
    }
