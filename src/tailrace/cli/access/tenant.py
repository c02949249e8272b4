"""`tailrace tenant`: add, list and remove tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command
from tailrace.cli.moments import iso
from tailrace.cli.output import Output, printable

if TYPE_CHECKING:
    from tailrace import AccessTenant, Client

tenants = typer.Typer(no_args_is_help=True, help="Tenants: a prefix of names, and those who live in it.")

TenantName = Annotated[str, typer.Argument(help="Name of the tenant, without /.", show_default=False)]


@client_command(tenants)
async def add(client: Client, output: Output, name: TenantName) -> None:
    """Add a tenant: topics, groups and users called NAME/... are its own."""
    async with client:
        made = await client.access().add_tenant(name)
        output.result(_record(made), f"tenant {printable(name)} is added")
        output.note(
            f"`tailrace user add {printable(name)}/root --administrator` adds somebody who administers it"
        )


@client_command(tenants, "list")
async def list_(client: Client, output: Output) -> None:
    """List tenants."""
    async with client:
        found = await client.access().list_tenants()
        headings = ["tenant", "users", "created"]
        output.listing(found, _record, headings, _row, "no tenants: `tailrace tenant add NAME` makes one")


@client_command(tenants)
async def remove(client: Client, output: Output, name: TenantName) -> None:
    """Remove a tenant that has no users left; its topics and groups stay."""
    async with client:
        await client.access().remove_tenant(name)
        output.result({"tenant": name, "state": "removed"}, f"tenant {printable(name)} is removed")


def _record(tenant: AccessTenant) -> dict[str, Any]:
    return {
        "tenant": tenant.name,
        "users": tenant.users,
        "created": None if tenant.created is None else iso(tenant.created),
    }


def _row(tenant: AccessTenant) -> list[Any]:
    return list(_record(tenant).values())
