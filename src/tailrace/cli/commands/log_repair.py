"""`tailrace log accept-loss` and `scrub`: damage is looked for, and what is lost by it given up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.commands.log import logs
from tailrace.cli.execution import with_client
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import Json, Timeout, Url, Yes
from tailrace.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from tailrace.client.client import Client
    from tailrace.core.model.damage_commands import LossReport, ScrubState

__all__ = ["logs"]

POLL_S = 0.2

Data = Annotated[
    Path | None,
    typer.Option("--data", help="A data folder whose broker does not run, instead of --url.", exists=True),
]


def place_of(text: str) -> tuple[str, int]:
    """Topic and partition."""
    topic, slash, number = text.rpartition("/")
    if not slash or not topic or not number.isdigit():
        raise InvalidRequest(f"a partition is named TOPIC/PARTITION, such as orders/0, not {text!r}")
    return topic, int(number)


def url_of(url: str | None, data: Path | None) -> str | None:
    """Where the broker is: the running one, or one on a folder for as long as this takes."""
    return url if data is None else f"embedded:{data}"


@logs.command("accept-loss")
def accept_loss(
    place: Annotated[str, typer.Argument(metavar="TOPIC/PARTITION", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is lost.")] = False,
    yes: Yes = False,
    data: Data = None,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 300.0,
) -> None:
    """Give up what of a damaged partition is lost, and open it again.

    Damaged bytes are kept aside. Groups count the lost messages as collected, readers are told of them, and
    their offsets are never used again.
    """
    output = Output(as_json=json)
    topic, partition = place_of(place)
    where = url_of(url, data)
    if not yes and not dry_run:
        if json or not sys.stdin.isatty():
            raise InvalidRequest("accepting loss needs --yes when nobody can be asked; --dry-run shows it")
        report = _ask(where, timeout, topic, partition, dry_run=True)
        _show(output, report)
        if report.ranges and not typer.confirm("Give that up, for good?", err=True):
            output.note("nothing was changed")
            raise typer.Exit(1)
    report = _ask(where, timeout, topic, partition, dry_run=dry_run)
    if json:
        output.record(_record(topic, partition, report))
    else:
        _show(output, report)
    if report.done and not json:
        output.line(f"{printable(place)} is open again" if report.ranges else f"{printable(place)} is well")
    if report.fault is not None:
        raise Corrupt(f"{place} is still damaged: {report.fault}", outcome="none")


@logs.command()
def scrub(
    place: Annotated[
        str | None, typer.Argument(metavar="[TOPIC[/PARTITION]]", show_default="everything")
    ] = None,
    data: Data = None,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Let the broker read what is closed from the disk and check it; fails when something is damaged.

    Closed segments and snapshots are read at 64 MiB a second at most, beside everything else.
    """
    import asyncio

    output = Output(as_json=json)
    topic, partition = (place, None) if place is None or "/" not in place else place_of(place)

    async def work(client: Client) -> ScrubState:
        admin = client.admin()
        state = await admin.scrub(topic, partition)
        while state.running:
            begun_us = state.begun_us
            await asyncio.sleep(POLL_S)
            state = await admin.scrub(topic, partition, begin=False)
            if state.begun_us < begun_us:
                output.note("the broker does not know of this scrub any more, it begins anew")
                state = await admin.scrub(topic, partition)
            if not json and sys.stderr.isatty():
                output.note(f"{state.done} of {state.total} partitions, {state.bytes} bytes")
        return state

    state = with_client(url_of(url, data), timeout, work)
    if json:
        row = {"partitions": state.done, "bytes": state.bytes, "damage": state.damage}
        output.record(row)
    else:
        for text in state.damage:
            output.line(f"damage: {printable(text)}")
        output.line(f"{state.done} partitions, {state.bytes} bytes read and checked")
    if state.damage:
        raise Corrupt(
            f"damage was found in {len(state.damage)} places",
            outcome="none",
            hint="docs/operations.md says what to do",
        )


def _ask(url: str | None, timeout: float, topic: str, partition: int, *, dry_run: bool) -> LossReport:
    async def work(client: Client) -> LossReport:
        return await client.admin().accept_loss(topic, partition, dry_run=dry_run)

    return with_client(url, timeout, work)


def _record(topic: str, partition: int, report: LossReport) -> dict[str, Any]:
    return {
        "topic": topic,
        "partition": partition,
        "ranges": report.ranges,
        "groups": report.groups,
        "kept": report.kept,
        "done": report.done,
        "fault": report.fault,
    }


def _show(output: Output, report: LossReport) -> None:
    if not report.ranges:
        output.line("nothing is lost")
        return
    rows = []
    for lost in report.ranges:
        count = lost["end_offset"] - lost["first_offset"]
        offsets = f"{lost['first_offset']}-{lost['end_offset']}" if count else "none"
        messages = f"{count}" if lost["exact"] else f"{count} at most"
        rows.append([offsets, messages, lost["end_entry"] - lost["first_entry"], lost["file"], lost["why"]])
    output.table(["offsets", "messages", "entries", "file", "why"], rows, title="lost")
    if not all(lost["exact"] for lost in report.ranges):
        output.line("at most: nothing says how many messages there were; new offsets are above all of them")
    if report.groups:
        missed = [[row["group"], row["messages"]] for row in report.groups]
        output.table(["group", "messages"], missed, title="groups that will not get them")
    for name in report.kept:
        output.line(f"kept: {printable(name)}")
