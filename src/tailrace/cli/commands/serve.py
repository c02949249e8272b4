"""`tailrace serve`: read the configuration, start the broker, say where it listens and what to type next."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import Json
from tailrace.errors import TailraceError, Unavailable

if TYPE_CHECKING:
    from tailrace.broker.node import Node
    from tailrace.config import ServerOptions

DEFAULT_PORT = 7400
_M_ARENA_MAX = -8
"""Of `malloc.h`."""

serving = typer.Typer()

Certificate = Annotated[
    str | None,
    typer.Option("--tls-certificate", help="Certificate of the broker (PEM); TCP ports speak TLS with it."),
]
Key = Annotated[str | None, typer.Option("--tls-key", help="Private key of the certificate (PEM).")]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure/--no-insecure",
        show_default="no",
        help="Allow addresses beyond loopback without TLS.",
    ),
]


@serving.command()
def serve(
    *,
    config: Annotated[
        str | None, typer.Option("--config", envvar="TAILRACE_CONFIG", help="Configuration file (TOML).")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", show_default="./data", help="Folder that holds everything.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            show_default="127.0.0.1:7400",
            help="HOST:PORT or unix:PATH for clients, several with commas; port 0 is any free one.",
        ),
    ] = None,
    http_listen: Annotated[
        str | None,
        typer.Option("--http-listen", show_default="127.0.0.1:7480", help="Address for health and metrics."),
    ] = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    insecure: Insecure = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", show_default="info", help="debug, info, warning or error.")
    ] = None,
    check_config: Annotated[
        bool,
        typer.Option(
            "--check-config", help="Print the configuration in force, or all its problems, and exit."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Start a broker. Every option can also stand in the configuration file or in TAILRACE_*."""
    _tame_allocators()
    from tailrace.config import load, to_toml

    output = Output(as_json=json)
    flags = {
        "data": data,
        "listen": listen,
        "http_listen": http_listen,
        "log_level": log_level,
        "insecure": insecure,
        "tls.certificate": tls_certificate,
        "tls.key": tls_key,
    }
    options = load(config, os.environ, flags)
    if check_config:
        if json:
            import msgspec

            output.record(msgspec.to_builtins(options))
        else:
            output.line(to_toml(options).rstrip("\n"))
        return
    _run(options, output)


def _run(options: ServerOptions, output: Output) -> None:
    sys.meta_path.insert(0, _NoPandas())

    import uvloop

    from tailrace.broker.node import serve as serve_node
    from tailrace.broker.upkeep.spare_memory import keep_warm

    keep_warm()
    _set_up_logging(options.log_level)
    # What is loaded by now stays: looking through it for garbage would stop the broker for 30 ms each time.
    gc.freeze()
    try:
        uvloop.run(serve_node(options, ready=lambda node: _announce(node, options, output)))
    except OSError as error:
        raise _explained(error, options) from error


def _tame_allocators() -> None:
    """Before numpy and pyarrow are imported, and before there are threads.

    All threads allocate their small objects from one heap. Otherwise glibc gives each thread its own, in
    which others do not reuse what was freed: those of the storage threads grew by some MB an hour. And Arrow
    takes its memory from jemalloc (see `docs/adr/010-two-heaps.md`), where it has that. And numpy does not
    ask for huge pages: the first byte that is written to one has the kernel clear 2 MB, which took 6 to 25 ms
    of the loop while tables of a million dedup ids and keys grew, and takes 4 ms at most without them.
    """
    import ctypes

    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # Other C libraries have one heap anyway.
        set_option(ctypes.c_int(_M_ARENA_MAX), ctypes.c_int(1))


class _NoPandas(MetaPathFinder):
    """Where pandas is installed, pyarrow imports it at the first array that is made: 0.2 s on the loop and
    some 50 MB, in the middle of the work, for nothing. In the broker's process it is not to be found."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the broker does without pandas", name=name)


def _announce(node: Node, options: ServerOptions, output: Output) -> None:
    tls = "s" if options.tls.certificate else ""
    urls = [
        f"unix:{place}" if isinstance(place, str) else f"tailrace{tls}://{_text(place)}"
        for place in node.native_places
    ]
    http = _text(node.http_address)
    if output.as_json:
        output.record(
            {
                "event": "ready",
                "listen": urls[0].removeprefix(f"tailrace{tls}://"),
                "urls": urls,
                "http_listen": http,
                "data": options.data,
                "pid": os.getpid(),
                "admin_token": None if node.admin_token is None else str(node.admin_token),
                "open": not node.has_users,
                "insecure": options.insecure,
            }
        )
        return
    where = "" if urls[0] == f"tailrace://127.0.0.1:{DEFAULT_PORT}" else f" --url {printable(urls[0])}"
    if node.has_users:
        # The door of the folder asks its owner for nothing, wherever the broker listens.
        where = f" --url {shlex.quote(printable(f'embedded:{options.data}'))}"
    data, listing = printable(options.data), printable(" and ".join(urls))
    output.line(f"tailrace is ready on {listing} with its data in {data} (process {os.getpid()})")
    output.line(f"health and metrics: http{tls}://{http}/readyz and http{tls}://{http}/metrics")
    command = _command()
    for line in _warnings(node, options, command):
        output.line(line)
    who = ", as the user who runs the broker and needs no credentials" if node.has_users else ""
    output.line(f"next, in another terminal{who}:")
    output.line(f"  {command} topic create hello{where}")
    output.line(f"  {command} publish hello 'first message'{where}")
    output.line(f"  {command} read hello{where}")
    output.flush()


def _warnings(node: Node, options: ServerOptions, command: str) -> list[str]:
    """What everybody should know who starts this broker."""
    from tailrace.config import exposed

    hosts, lines = exposed(options), []
    if options.insecure and hosts:
        lines.append(f"WARNING: insecure = true, and other machines reach {', '.join(hosts)}")
    if node.admin_token is not None:
        lines.append(f"the token of the administrator `admin` is in {printable(str(node.admin_token))}")
    if not node.has_users:
        whom = "everybody who reaches it" if hosts else "every user of this machine"
        adds = f"`{command} user add NAME` adds the first, an administrator"
        lines.append(f"open to {whom}: no users yet, {adds}")
    return lines


def _command() -> str:
    """What to type for this command here: its name where the shell finds it, else its path."""
    import shutil
    import sys

    if shutil.which("tailrace") is not None or os.path.basename(sys.argv[0]) != "tailrace":
        return "tailrace"
    return os.path.relpath(sys.argv[0])


def _text(address: tuple[str, int] | str) -> str:
    if isinstance(address, str):
        return address
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _explained(error: OSError, options: ServerOptions) -> TailraceError:
    """A failed start in words that name the option to change."""
    import errno

    from tailrace.broker.node import unusable
    from tailrace.config import UNIX, listen_places, split_address

    if error.filename is not None and error.filename in listen_places(options.listen):
        return Unavailable(
            f"{UNIX}{error.filename} cannot be used: {error.strerror}",
            address=f"{UNIX}{error.filename}",
            option="--listen",
            hint=f"choose another path with --listen {UNIX}PATH, or stop what listens there",
        )
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES) and error.filename is None:
        # asyncio and uvloop name the address in the message only.
        http = (
            str(split_address(options.http_listen)[1])
            in str(error).replace(",", " ").replace(")", " ").split()
        )
        flag, address = ("--http-listen", options.http_listen) if http else ("--listen", options.listen)
        reason = (
            "is taken by another process"
            if error.errno == errno.EADDRINUSE
            else f"cannot be used ({error.strerror})"
        )
        return Unavailable(
            f"{address} {reason}",
            address=address,
            option=flag,
            hint=f"choose another address with {flag} HOST:PORT, or stop what listens there",
        )
    return unusable(options.data, error)


def _set_up_logging(level: str) -> None:
    import logging

    class Escaped(logging.Formatter):
        """Topic names and the like are other people's text: no control byte of theirs gets through."""

        def format(self, record: logging.LogRecord) -> str:
            return "\n".join(printable(line) for line in super().format(record).split("\n"))

    handler = logging.StreamHandler()
    handler.setFormatter(Escaped("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
