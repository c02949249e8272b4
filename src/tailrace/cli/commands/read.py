"""`tailrace read`: from a point to a point, to the end as it was at the start, or on and on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import typer

from tailrace.cli.moments import Point, iso
from tailrace.cli.output import Output, printable, printable_bytes
from tailrace.cli.records import message_record
from tailrace.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tailrace import Client, Message, Reader


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to read."""

    topic: str
    start: Point
    end: Point
    partitions: list[int] | None
    follow: bool
    count: int | None


async def print_messages(client: Client, wanted: ReadRequest, output: Output) -> None:
    """Print until the end that was asked for; each partition stops at its own."""
    starts, ends = await _ranges(client, wanted)
    if not wanted.follow:
        starts = {number: offset for number, offset in starts.items() if offset < ends[number]}
    if not starts:
        return
    left = set(starts)
    shown = 0
    # The ends are known, and yet `stop_at_end` is asked for: messages before an end may be trimmed away
    # meanwhile.
    reader = client.reader(
        wanted.topic, start=starts, partitions=sorted(starts), stop_at_end=not wanted.follow
    )
    async with reader as messages:
        async for message in _through(messages, output):
            number = message.partition
            if wanted.follow or message.offset < ends[number]:
                print_message(output, message)
                shown += 1
            if not wanted.follow and message.offset + 1 >= ends[number]:
                left.discard(number)
            if not left or shown == wanted.count:
                return


async def _through(messages: Reader, output: Output) -> AsyncIterator[Message]:
    """All messages; what is lost is said, and passed over."""
    while True:
        try:
            async for message in messages:
                yield message
            return
        except NotFound as error:
            if "lost" not in error.details:
                raise
            output.note(f"note: {printable(error.message)}")


async def _ranges(client: Client, wanted: ReadRequest) -> tuple[dict[int, int], dict[int, int]]:
    """First offset and end of each partition, in offsets that exist now. A given offset has to be there; a
    time, and an end, may lie outside."""
    admin = client.admin()
    earliest = await admin.find_offsets(wanted.topic, "earliest")
    latest = await admin.find_offsets(wanted.topic, "latest")
    numbers = sorted(set(wanted.partitions)) if wanted.partitions else range(len(latest))
    for number in numbers:
        if number >= len(latest):
            raise InvalidRequest(f"--partition {number}: there are partitions 0 to {len(latest) - 1}")

    async def resolve(point: Point) -> list[int]:
        if isinstance(point, int):
            return [point] * len(latest)
        return await admin.find_offsets(wanted.topic, point)

    begin, end = await resolve(wanted.start), await resolve(wanted.end)
    if isinstance(wanted.start, int):
        for number in numbers:
            _check_start(wanted.topic, number, wanted.start, earliest[number], latest[number])
    starts = {number: min(max(begin[number], earliest[number]), latest[number]) for number in numbers}
    ends = {number: min(end[number], latest[number]) for number in numbers}
    return starts, ends


def _check_start(topic: str, partition: int, offset: int, first: int, end: int) -> None:
    """Nothing printed would look like nothing stored."""
    if first <= offset <= end:
        return
    raise NotFound(
        f"--from: {topic}/{partition} has no offset {offset}, it goes from {first} to its end, {end}",
        hint="--from earliest begins with the first that is there; --partition chooses whose offset it is",
        partition=partition,
        start_offset=first,
        end_offset=end,
    )


def print_message(output: Output, message: Message, more: dict[str, Any] | None = None) -> None:
    """One message as a line for people, as fields, or as JSON with what else there is to say about it."""
    if output.as_json:
        output.record({**message_record(message), **(more or {})})
        return
    key = "" if message.key is None else printable_bytes(message.key)
    value = "" if message.value is None else printable_bytes(message.value)
    place = f"{message.partition}:{message.offset}"
    time = iso(message.timestamp)
    if output.terminal:
        place = typer.style(f"{place:<12}", fg="cyan")
        time = typer.style(time, dim=True)
        key = typer.style(key, fg="yellow") + " " if key else ""
        headers = " ".join(f"{printable(name)}={printable_bytes(data)}" for name, data in message.headers)
        output.line(
            f"{place} {time} {key}{value}" + (typer.style(f"  {headers}", dim=True) if headers else "")
        )
    else:
        output.fields([str(message.partition), str(message.offset), time, key, value])
