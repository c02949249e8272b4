"""`tailrace publish` and `tailrace read`: the options, and what they come to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command
from tailrace.cli.output import Output
from tailrace.cli.parameters import MessagesMax, TopicName
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import Client

messages = typer.Typer()


Values = Annotated[
    list[str] | None,
    typer.Argument(metavar="VALUE", help="The messages; none or - reads lines from standard input."),
]
JsonLines = Annotated[
    bool, typer.Option("--jsonl", help="Lines of input are JSON records, as `read --json` prints them.")
]
Key = Annotated[str | None, typer.Option("--key", help="Key of every message.")]
Header = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="Header (repeat for more).")
]
Priority = Annotated[
    int | None, typer.Option("--priority", min=0, max=4, help="0 critical ... 4 background.")
]
Ttl = Annotated[str | None, typer.Option("--ttl", help="Time to live, such as 30s or 1h.")]
Delay = Annotated[str | None, typer.Option("--delay", help="Deliver after this time, such as 30s or 1h.")]
DeliverAt = Annotated[
    str | None, typer.Option("--deliver-at", help="Deliver at this time (ISO 8601); what has passed is now.")
]
Target = Annotated[int | None, typer.Option("--partition", min=0, help="Partition to append to.")]
DedupId = Annotated[
    str | None, typer.Option("--dedup-id", help="Id by which a repetition is recognised (one message).")
]
ExpectSequence = Annotated[
    int | None,
    typer.Option("--expect-sequence", min=1, help="Succeed only as this sequence (one message)."),
]
ExpectKeySequence = Annotated[
    int | None,
    typer.Option("--expect-key-sequence", min=-1, help="Succeed only if the key has so many (one message)."),
]


@client_command(messages)
async def publish(
    client: Client,
    output: Output,
    topic: TopicName,
    values: Values = None,
    *,
    jsonl: JsonLines = False,
    key: Key = None,
    header: Header = None,
    priority: Priority = None,
    ttl: Ttl = None,
    delay: Delay = None,
    deliver_at: DeliverAt = None,
    partition: Target = None,
    dedup_id: DedupId = None,
    expect_sequence: ExpectSequence = None,
    expect_key_sequence: ExpectKeySequence = None,
) -> None:
    """Publish messages."""
    from datetime import UTC, datetime

    from tailrace.cli.commands import publish
    from tailrace.cli.moments import parse_lifetime, parse_moment, parse_span
    from tailrace.cli.records import parse_headers

    if delay is not None and deliver_at is not None:
        raise InvalidRequest("pass one of --delay and --deliver-at")
    given = {
        "key": None if key is None else _raw(key),
        "headers": parse_headers(header) if header else None,
        "priority": priority,
        "ttl": None if ttl is None else parse_lifetime(ttl, "--ttl").total_seconds(),
        "delay": None if delay is None else parse_span(delay, "--delay"),
        "deliver_at": None
        if deliver_at is None
        else parse_moment(deliver_at, datetime.now(UTC), "--deliver-at"),
        "partition": partition,
    }
    expected = {
        "dedup_id": None if dedup_id is None else _raw(dedup_id),
        "expected_sequence": expect_sequence,
        "expected_key_sequence": expect_key_sequence,
    }
    shared = {name: value for name, value in (given | expected).items() if value is not None}
    arguments = [] if values == ["-"] else values or []
    if jsonl and arguments:
        raise InvalidRequest("--jsonl reads standard input: leave the values out")
    if shared.keys() & expected.keys() and len(arguments) != 1:
        flags = "--dedup-id, --expect-sequence and --expect-key-sequence"
        raise InvalidRequest(f"{flags} go with exactly one VALUE")
    items = _argument_items(arguments, shared) if arguments else _input_items(shared, jsonl=jsonl)

    async with client:
        with publish.Results(output, streamed=not arguments) as results:
            await publish.publish_all(client, topic, items, results)


@client_command(messages)
async def read(
    client: Client,
    output: Output,
    topic: TopicName,
    *,
    start: Annotated[
        str, typer.Option("--from", help="earliest, latest, an offset, an ISO 8601 time, or -1h.")
    ] = "earliest",
    to: Annotated[
        str | None, typer.Option("--to", help="Stop before this offset or time.", show_default="the end now")
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", min=0, help="Only this partition (repeat for more).")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new messages until Ctrl-C.")
    ] = False,
    max_: MessagesMax = None,
) -> None:
    """Print messages of a topic, without taking them from anybody."""
    from datetime import UTC, datetime

    from tailrace.cli.commands import read
    from tailrace.cli.moments import check_order, parse_point

    if follow and to is not None:
        raise InvalidRequest("--follow has no end, so --to cannot go with it")
    now = datetime.now(UTC)
    wanted = read.ReadRequest(
        topic=topic,
        start=parse_point(start, now, "--from"),
        end="latest" if to is None else parse_point(to, now, "--to"),
        partitions=partition,
        follow=follow,
        count=max_,
    )
    check_order(wanted.start, wanted.end, ("--from", "--to"))

    async with client:
        await read.print_messages(client, wanted, output)


def _raw(text: str) -> bytes:
    """An argument as the bytes that the shell passed."""
    return text.encode("utf-8", "surrogateescape")


async def _argument_items(
    values: list[str], shared: dict[str, Any]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    for number, value in enumerate(values, 1):
        yield f"value {number}" if len(values) > 1 else "", {**shared, "value": _raw(value)}


async def _input_items(shared: dict[str, Any], *, jsonl: bool) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    from tailrace.cli.lines import STANDARD_INPUT, read_lines
    from tailrace.cli.records import parse_line

    async for number, line in read_lines(STANDARD_INPUT):
        where = f"line {number}"
        if not jsonl:
            yield where, {**shared, "value": line}
        elif line.strip():
            try:
                fields = parse_line(line)
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: {error.message}") from None
            yield where, {**shared, **fields}
