"""`tailrace token`: make, list and revoke tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import client_command
from tailrace.cli.moments import iso, parse_lifetime, parse_moment
from tailrace.cli.output import Output, printable
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from tailrace import AccessToken, Client

tokens = typer.Typer(no_args_is_help=True, help="Tokens: what programs log in with instead of passwords.")


@client_command(tokens)
async def create(
    client: Client,
    output: Output,
    name: Annotated[str, typer.Argument(help="What it is for, such as ci or laptop.", show_default=False)],
    *,
    user: Annotated[str | None, typer.Option("--user", help="Whose it is.", show_default="you")] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", help="When it ends: 90d, 12h, or an ISO 8601 time.", show_default="never"),
    ] = None,
) -> None:
    """Make a token. Its secret is printed once, alone on standard output: nobody can read it again."""
    until = None if expires is None else _expiry(expires)

    async with client:
        made = await client.access().create_token(name, user=user, expires=until)
        end = None if made.expires is None else iso(made.expires)
        record = {"id": made.id, "user": made.user, "name": made.name, "secret": made.secret, "expires": end}
        output.result(record, made.secret)
        of = printable(made.user) or "the broker's owner"
        output.note(
            f"token {made.id} of {of} {'never ends' if end is None else f'ends at {end}'}. Keep its secret:"
            " it is not shown again. TAILRACE_TOKEN takes it."
        )


def _expiry(text: str) -> datetime | timedelta:
    """A span from now, or a time."""
    from datetime import UTC, datetime

    if text[:1].isdigit() and not text.count("-"):
        return parse_lifetime(text, "--expires")
    now = datetime.now(UTC)
    moment = parse_moment(text, now, "--expires")
    if moment <= now:
        raise InvalidRequest(f"--expires: a time that is still to come, not {text!r}")
    return moment


@client_command(tokens, "list")
async def list_(
    client: Client,
    output: Output,
    user: Annotated[str | None, typer.Option("--user", help="Only tokens of this user.")] = None,
) -> None:
    """List tokens: yours, and all others that you may see. Secrets are not kept."""
    async with client:
        found = await client.access().list_tokens(user)
        headings = ["id", "user", "name", "created", "expires"]
        output.listing(found, _record, headings, _row, "no tokens: `tailrace token create NAME` makes one")


@client_command(tokens)
async def revoke(
    client: Client,
    output: Output,
    id: Annotated[str, typer.Argument(help="Its id, as `token list` shows it.", show_default=False)],
) -> None:
    """End a token at once; connections that logged in with it end, too."""
    async with client:
        await client.access().revoke_token(id)
        output.result({"id": id, "state": "revoked"}, f"token {printable(id)} is revoked")


def _record(token: AccessToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "user": token.user,
        "name": token.name,
        "created": None if token.created is None else iso(token.created),
        "expires": None if token.expires is None else iso(token.expires),
    }


def _row(token: AccessToken) -> list[Any]:
    return list(_record(token).values())
