"""`tailrace quota`: bounds of users, teams, tenants and addresses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command
from tailrace.cli.output import Output, printable
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import Client, Quota

quotas = typer.Typer(no_args_is_help=True, help="Quotas: how much users, tenants and addresses may take.")

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,18})\s*([KMGT]iB)?", re.I)

Subject = Annotated[
    str,
    typer.Argument(
        help="user:NAME, team:NAME (each of its users), tenant:NAME (all of its users together), address:IP, "
        "address:* (each address), or everyone (each user).",
        show_default=False,
    ),
]


@client_command(quotas)
async def put(
    client: Client,
    output: Output,
    subject: Subject,
    *,
    connections_max: Annotated[
        int | None, typer.Option(min=1, help="Connections at the same time.", show_default="no bound")
    ] = None,
    requests_per_second: Annotated[
        int | None, typer.Option(min=1, help="Requests a second.", show_default="no bound")
    ] = None,
    bytes_per_second: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes a second, such as 10MiB.", show_default="no bound"),
    ] = None,
    in_flight_max: Annotated[
        int | None, typer.Option(min=1, help="Messages in flight.", show_default="no bound")
    ] = None,
    topics_max: Annotated[
        int | None, typer.Option(min=1, help="Topics of a tenant.", show_default="no bound")
    ] = None,
    storage_bytes_max: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes on the disk, such as 5GiB.", show_default="no bound"),
    ] = None,
) -> None:
    """Set the bounds of a subject, all of them: those that are not named have none from now on."""
    bounds = {
        "connections_max": connections_max,
        "requests_per_second": requests_per_second,
        "bytes_per_second": _bytes(bytes_per_second, "--bytes-per-second"),
        "in_flight_max": in_flight_max,
        "topics_max": topics_max,
        "storage_bytes_max": _bytes(storage_bytes_max, "--storage-bytes-max"),
    }
    named = {name: bound for name, bound in bounds.items() if bound is not None}
    if not named:
        raise InvalidRequest("name at least one bound; `tailrace quota remove` removes all of them")

    async with client:
        made = await client.access().put_quota(subject, **named)
        shown = ", ".join(f"{name} = {bound}" for name, bound in named.items())
        output.result(_record(made), f"quota of {printable(subject)}: {shown}")


@client_command(quotas, "list")
async def list_(client: Client, output: Output) -> None:
    """List quotas."""
    async with client:
        found = await client.access().list_quotas()
        headings = ["subject", "connections", "requests/s", "bytes/s", "in flight", "topics", "storage"]
        output.listing(found, _record, headings, _row, "no quotas: `tailrace quota put` makes one")


@client_command(quotas)
async def remove(client: Client, output: Output, subject: Subject) -> None:
    """Remove the bounds of a subject."""
    async with client:
        await client.access().remove_quota(subject)
        output.result({"subject": subject, "state": "removed"}, f"quota of {printable(subject)} is removed")


def _bytes(text: str | None, option: str) -> int | None:
    """A number of bytes, or of KiB, MiB, GiB or TiB."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{option}: {text!r} is not a size such as 65536, 64KiB, 10MiB or 5GiB")
    return int(match.group(1)) * UNITS[(match.group(2) or "").upper()]


def _record(quota: Quota) -> dict[str, Any]:
    return {
        "subject": quota.subject,
        "connections_max": quota.connections_max,
        "requests_per_second": quota.requests_per_second,
        "bytes_per_second": quota.bytes_per_second,
        "in_flight_max": quota.in_flight_max,
        "topics_max": quota.topics_max,
        "storage_bytes_max": quota.storage_bytes_max,
    }


def _row(quota: Quota) -> list[Any]:
    return list(_record(quota).values())
