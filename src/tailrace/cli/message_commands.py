"""`tailrace publish` and `tailrace read`: the options, and what they come to."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import with_client
from tailrace.cli.output import Output
from tailrace.cli.parameters import Json, Timeout, TopicName, Url
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import Client

messages = typer.Typer()


@messages.command()
def publish(
    topic: TopicName,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="VALUE", help="The messages; none or - reads lines from standard input."),
    ] = None,
    *,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Lines of input are JSON records, as `read --json` prints them.")
    ] = False,
    key: Annotated[str | None, typer.Option("--key", help="Key of every message.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="Header (repeat for more).")
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, max=4, help="0 critical ... 4 background.")
    ] = None,
    ttl: Annotated[str | None, typer.Option("--ttl", help="Time to live, such as 30s or 1h.")] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="Partition to append to.")
    ] = None,
    dedup_id: Annotated[
        str | None, typer.Option("--dedup-id", help="Id by which a repetition is recognised (one message).")
    ] = None,
    expect_sequence: Annotated[
        int | None,
        typer.Option("--expect-sequence", min=1, help="Succeed only as this sequence (one message)."),
    ] = None,
    expect_key_sequence: Annotated[
        int | None,
        typer.Option(
            "--expect-key-sequence", min=-1, help="Succeed only as the key's next one (one message)."
        ),
    ] = None,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Publish messages."""
    from tailrace.cli import publishing
    from tailrace.cli.moments import parse_span
    from tailrace.cli.records import parse_headers

    output = Output(as_json=json)
    given = {
        "key": None if key is None else _raw(key),
        "headers": parse_headers(header) if header else None,
        "priority": priority,
        "ttl": None if ttl is None else parse_span(ttl, "--ttl").total_seconds(),
        "partition": partition,
        "dedup_id": None if dedup_id is None else _raw(dedup_id),
        "expected_sequence": expect_sequence,
        "expected_key_sequence": expect_key_sequence,
    }
    shared = {name: value for name, value in given.items() if value is not None}
    from_stdin = values is None or not values or values == ["-"]
    if jsonl and not from_stdin:
        raise InvalidRequest("--jsonl reads standard input: leave the values out")
    single = shared.keys() & {"dedup_id", "expected_sequence", "expected_key_sequence"}
    if single and (from_stdin or len(values or ()) != 1):
        flags = ", ".join(
            sorted("--" + name.replace("expected", "expect").replace("_", "-") for name in single)
        )
        raise InvalidRequest(f"{flags}: goes with exactly one VALUE")
    as_table = output.terminal and not from_stdin

    async def work(client: Client) -> None:
        with publishing.Results(output, counted=from_stdin and publishing.counts_only(output)) as results:
            if values is not None and len(values) == 1 and not from_stdin:
                fields = {**shared, "value": _raw(values[0])}
                await publishing.publish_one(client, topic, fields, results, as_table=as_table)
            else:
                items = (
                    _input_items(shared, jsonl=jsonl) if from_stdin else _argument_items(values or [], shared)
                )
                await publishing.publish_all(client, topic, items, results, as_table=as_table)

    with_client(url, timeout, work)


@messages.command()
def read(
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
    max_: Annotated[
        int | None, typer.Option("--max", "-n", min=1, help="Stop after so many messages.")
    ] = None,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Print messages of a topic, without taking them from anybody."""
    from datetime import UTC, datetime

    from tailrace.cli import reading
    from tailrace.cli.moments import parse_point

    output = Output(as_json=json)
    if follow and to is not None:
        raise InvalidRequest("--follow has no end, so --to cannot go with it")
    now = datetime.now(UTC)
    wanted = reading.Wanted(
        topic=topic,
        start=parse_point(start, now, "--from"),
        end="latest" if to is None else parse_point(to, now, "--to"),
        partitions=partition,
        follow=follow,
        count=max_,
    )

    async def work(client: Client) -> None:
        await reading.print_messages(client, wanted, output)

    with_client(url, timeout, work)


def _raw(text: str) -> bytes:
    """An argument as the bytes that the shell passed."""
    return text.encode("utf-8", "surrogateescape")


async def _argument_items(
    values: list[str], shared: dict[str, Any]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    for number, value in enumerate(values, 1):
        yield f"value {number}", {**shared, "value": _raw(value)}


async def _input_items(shared: dict[str, Any], *, jsonl: bool) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    from tailrace.cli.lines import read_lines
    from tailrace.cli.records import parse_line

    async for number, line in read_lines(sys.stdin.fileno()):
        where = f"line {number}"
        if not jsonl:
            yield where, {**shared, "value": line}
        elif line.strip():
            try:
                fields = parse_line(line)
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: {error.message}") from None
            yield where, {**shared, **fields}
