"""`tailrace cert`: certificates for those who have none, from a private authority in a folder."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from tailrace.cli.access.private_ca import LOCAL_HOSTS, CertificateFile, PrivateAuthority
from tailrace.cli.moments import iso
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import Json

certificates = typer.Typer(no_args_is_help=True, help="Certificates for encrypted connections.")

DEFAULT_FOLDER = Path("certs")
PORT = 7400
FIRST_LOGIN = "data/admin.token"


@certificates.callback()
def _group() -> None:
    """Certificates for encrypted connections."""


@certificates.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where they are kept; made when it is missing.")] = (
        DEFAULT_FOLDER
    ),
    *,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the server, besides localhost (repeat for more)."),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", help="A client with a certificate of its own (repeat for more)."),
    ] = None,
    json: Json = False,
) -> None:
    """Make a private authority, and certificates for a server and for clients.

    What is there already is kept: run it again with another --client to add one. Needs tailrace[security].
    """
    from datetime import UTC, datetime

    output = Output(as_json=json)
    authority = PrivateAuthority(folder, datetime.now(UTC))
    server = authority.server(host or [])
    for name in client or []:
        authority.client(name)

    found = authority.files
    clients = found[2:]
    serve = _serve(found[0], server)
    know = [_know(found[0], server, *file.names) for file in clients]
    connect = [_connect(found[0], server, file) for file in clients] or [_connect(found[0], server, None)]
    if output.as_json:
        files = [_record(file) for file in found]
        record = {"folder": str(folder), "files": files}
        output.record({**record, "serve": serve, "know": know, "connect": connect})
        return
    output.table(["file", "what", "names", "ends", "state"], [_row(file) for file in found])
    output.note(f"Keep {printable(str(found[0].key))} to yourself: whoever has it can be anybody.")
    output.note(f"Start the broker (without users yet, it writes a token for you to {FIRST_LOGIN}):")
    for title, commands in (("", [serve]), ("Let it know the clients:", know), ("Clients:", connect)):
        if title and commands:
            output.note(title)
        for command in commands:
            output.note(f"  {printable(command)}")


def _serve(authority: CertificateFile, server: CertificateFile) -> str:
    """The command that starts a broker with these files."""
    variables = {
        "TAILRACE_TLS_CERTIFICATE": server.path,
        "TAILRACE_TLS_KEY": server.key,
        "TAILRACE_TLS_CLIENT_CA": authority.path,
        "TAILRACE_TLS_CLIENT_CERTIFICATES": "optional",
    }
    return f"{_assigned(variables)} tailrace serve --listen 0.0.0.0:{PORT}"


def _know(authority: CertificateFile, server: CertificateFile, name: str) -> str:
    """The command that adds the user of a certificate, for an administrator."""
    login = f'TAILRACE_TOKEN="$(cat {FIRST_LOGIN})"'
    known = f"tailrace user add {quote(name)} --certificate {quote(f'DNS:{name}')}"
    return f"{_assigned(_broker(authority, server))} {login} {known}"


def _connect(authority: CertificateFile, server: CertificateFile, client: CertificateFile | None) -> str:
    """The command that shows whether a client gets in."""
    variables = _broker(authority, server)
    if client is not None:
        variables |= {"TAILRACE_CERT": client.path, "TAILRACE_KEY": client.key}
    return f"{_assigned(variables)} tailrace whoami"


def _broker(authority: CertificateFile, server: CertificateFile) -> dict[str, Any]:
    """Where the broker is, by its first name that others know, and whom to trust."""
    host = next((name for name in server.names if name not in LOCAL_HOSTS), LOCAL_HOSTS[0])
    place = f"[{host}]" if ":" in host else host
    return {"TAILRACE_URL": f"tailraces://{place}:{PORT}", "TAILRACE_CA": authority.path}


def _assigned(variables: dict[str, Any]) -> str:
    texts = {n: v.absolute() if isinstance(v, Path) else v for n, v in variables.items()}
    return " ".join(f"{name}={quote(str(value))}" for name, value in texts.items())


def _record(file: CertificateFile) -> dict[str, Any]:
    return {
        "certificate": str(file.path),
        "key": str(file.key),
        "what": file.what,
        "names": list(file.names),
        "ends": iso(file.ends),
        "made": file.made,
    }


def _row(file: CertificateFile) -> list[Any]:
    names = ", ".join(file.names) or None
    return [file.path, file.what, names, f"{file.ends:%Y-%m-%d}", "made" if file.made else "kept"]
