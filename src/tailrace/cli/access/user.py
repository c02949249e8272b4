"""`tailrace user` and `tailrace whoami`: users are added, altered, listed and removed; who the caller is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.access.password_entry import Generate, PasswordStdin, new_password
from tailrace.cli.execution import client_command, with_client
from tailrace.cli.moments import iso
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import Json, Prefix, Timeout, Url
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import AccessCaller, AccessUser, Client

users = typer.Typer(no_args_is_help=True, help="Who may log in: people and programs.")
identity = typer.Typer()

UserName = Annotated[str, typer.Argument(help="Name of the user.", show_default=False)]
Team = Annotated[list[str] | None, typer.Option("--team", help="A team that it is in (repeat for more).")]
Certificate = Annotated[
    list[str] | None,
    typer.Option("--certificate", help="Name of its client certificate: DNS:worker, URI:..., email:..."),
]
SystemUser = Annotated[
    list[str] | None,
    typer.Option("--system-user", help="User of the operating system, on the broker's Unix socket."),
]
CLEARABLE = ("teams", "certificates", "system_users")

FIRST = """\
{name} is the first user, and an administrator. From now on everybody has to log in, with one of these:
  TAILRACE_URL={scheme}://{name}:PASSWORD@{place}
  TAILRACE_TOKEN=...                 a token; `tailrace token create NAME` makes one, once you are in
  ~/.config/tailrace/credentials     a file that only you may read (chmod 600):
    ["{entry}"]
    user = "{name}"
    password = "..."
Nobody else may do anything until a rule allows it: `tailrace acl add --help`. Whoever runs the broker still
may do everything, over its Unix socket or in its own process."""
"""What the first user changes."""


@users.command()
def add(
    name: UserName,
    *,
    password_stdin: PasswordStdin = False,
    generate: Generate = False,
    no_password: Annotated[
        bool, typer.Option("--no-password", help="It logs in with tokens only, or with what else is named.")
    ] = False,
    team: Team = None,
    certificate: Certificate = None,
    system_user: SystemUser = None,
    administrator: Annotated[
        bool, typer.Option("--administrator", help="It may do everything. The first user always is one.")
    ] = False,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Add a user. Its password is asked for, unless it logs in by its certificate or system user."""
    output = Output(as_json=json)
    password: str | None = None
    if no_password and (password_stdin or generate):
        raise InvalidRequest("--no-password goes without --password-stdin and --generate")
    if password_stdin or generate or not (no_password or certificate or system_user):
        password = new_password(name, from_stdin=password_stdin, generate=generate)

    async def work(client: Client) -> None:
        access = client.access()
        caller = await access.whoami()
        first = caller.proof in ("open", "owner") and not await access.list_users()
        if first and caller.proof == "open" and not (password or certificate or system_user):
            raise InvalidRequest("the first user needs a way to log in: leave --no-password out")
        added = await access.add_user(
            name,
            password=password,
            teams=team or [],
            certificates=certificate or [],
            system_users=system_user or [],
            administrator=administrator or first,
        )
        record = {**_record(added), "first": first}
        _told(output, record, f"user {printable(name)} is added", password if generate else None)
        if first:
            output.note(_first(name, url))

    with_client(url, timeout, work)


@users.command()
def passwd(
    name: Annotated[str | None, typer.Argument(help="Name of the user.", show_default="you")] = None,
    *,
    password_stdin: PasswordStdin = False,
    generate: Generate = False,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Change a password, one's own or another user's. Connections that logged in with the old one end."""
    output = Output(as_json=json)
    password = new_password(name, from_stdin=password_stdin, generate=generate)

    async def work(client: Client) -> None:
        access = client.access()
        user = name or (await access.whoami()).user
        if not user:
            raise InvalidRequest("name the user: this connection belongs to none")
        record = _record(await access.alter_user(user, password=password))
        _told(output, record, f"user {printable(user)} has a new password", password if generate else None)

    with_client(url, timeout, work)


def _first(name: str, url: str | None) -> str:
    """How everybody logs in from now on, at the address that the command went to."""
    import os

    from tailrace.client.rpc.broker_url import parse_url
    from tailrace.connect import DEFAULT_URL

    address = parse_url(url or os.environ.get("TAILRACE_URL") or DEFAULT_URL)
    scheme, place = "tailrace", "HOST:7400"
    if address.hosts:
        scheme, place = address.scheme, str(address.hosts[0])
    entry = str(address) if address.kind == "unix" else place
    return FIRST.format(name=printable(name), scheme=scheme, place=printable(place), entry=printable(entry))


def _told(output: Output, record: dict[str, Any], text: str, password: str | None) -> None:
    """What was done; a generated password stands alone on standard output, for programs to take it."""
    if password is None:
        output.result(record, text)
    else:
        output.result({**record, "password": password}, password)
        output.note(text)


@client_command(users)
async def alter(
    client: Client,
    output: Output,
    name: UserName,
    *,
    team: Team = None,
    certificate: Certificate = None,
    system_user: SystemUser = None,
    administrator: Annotated[
        bool | None, typer.Option("--administrator/--no-administrator", help="Whether it may do everything.")
    ] = None,
    clear: Annotated[
        list[str] | None, typer.Option("--clear", help="teams, certificates or system_users: none from now.")
    ] = None,
) -> None:
    """Change a user: what is named replaces all that it had of it, the rest stays."""
    changes: dict[str, Any] = {"teams": team, "certificates": certificate, "system_users": system_user}
    for what in clear or []:
        field = what.replace("-", "_")
        if field not in CLEARABLE:
            raise InvalidRequest(f"--clear: {what!r} is none of {', '.join(CLEARABLE)}")
        if changes[field] is not None:
            raise InvalidRequest(f"--clear {what}: and new ones are named")
        changes[field] = []
    changes = {field: value for field, value in changes.items() if value is not None}
    if administrator is not None:
        changes["administrator"] = administrator
    if not changes:
        raise InvalidRequest("name what is to be changed: --team, --certificate, --system-user, --clear ...")

    async with client:
        altered = await client.access().alter_user(name, **changes)
        output.result(_record(altered), f"user {printable(name)} is altered: {', '.join(changes)}")


@client_command(users, "list")
async def list_(client: Client, output: Output, prefix: Prefix = "") -> None:
    """List users."""
    async with client:
        found = await client.access().list_users(prefix)
        headings = ["user", "teams", "administrator", "password", "certificates", "system users"]
        nothing = "no such users" if prefix else "no users yet: whoever can connect may do everything"
        output.listing(found, _record, headings, _row, nothing)


@client_command(users)
async def remove(client: Client, output: Output, name: UserName) -> None:
    """Remove a user with its tokens and the rules about it; its connections end."""
    async with client:
        await client.access().remove_user(name)
        output.result({"user": name, "state": "removed"}, f"user {printable(name)} is removed")


@client_command(identity)
async def whoami(client: Client, output: Output) -> None:
    """Show who the broker takes you for, and how it knows."""
    async with client:
        caller = await client.access().whoami()
        if output.as_json:
            output.record(_caller(caller))
            return
        shown = {name: value for name, value in _caller(caller).items() if value not in ("", None, [], False)}
        output.pairs({name: ", ".join(v) if isinstance(v, list) else v for name, v in shown.items()})
        if caller.proof == "open":
            output.note("the broker has no users yet: whoever can connect may do everything")
        elif caller.proof == "owner":
            output.note("whoever runs the broker may do everything")


def _caller(caller: AccessCaller) -> dict[str, Any]:
    return {
        "user": caller.user,
        "proof": caller.proof,
        "credential": caller.credential,
        "tenant": caller.tenant,
        "teams": caller.teams,
        "administrator": caller.administrator,
        "expires": None if caller.expires is None else iso(caller.expires),
    }


def _record(user: AccessUser) -> dict[str, Any]:
    return {
        "user": user.name,
        "teams": user.teams,
        "certificates": user.certificates,
        "system_users": user.system_users,
        "administrator": user.administrator,
        "has_password": user.has_password,
        "created": None if user.created is None else iso(user.created),
    }


def _row(user: AccessUser) -> list[Any]:
    several = (user.certificates, user.system_users)
    names = [", ".join(found) or None for found in several]
    administrator = "yes" if user.administrator else None
    return [
        user.name,
        ", ".join(user.teams) or None,
        administrator,
        "yes" if user.has_password else None,
        *names,
    ]
