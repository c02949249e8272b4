"""The `tailrace` command: its sub-commands, and one way to end for all of them.

Nothing heavy is imported before a command runs: `--help` and shell completion load neither Arrow nor the SDK.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from tailrace.cli.access.acl import rules
from tailrace.cli.access.cert import certificates
from tailrace.cli.access.quota import quotas
from tailrace.cli.access.tenant import tenants
from tailrace.cli.access.token import tokens
from tailrace.cli.access.user import identity, users
from tailrace.cli.broker_wait import add_wait
from tailrace.cli.commands.about import about
from tailrace.cli.commands.consume import consuming
from tailrace.cli.commands.dead_letter import letters
from tailrace.cli.commands.group import groups
from tailrace.cli.commands.log_repair import logs
from tailrace.cli.commands.message_options import messages
from tailrace.cli.commands.pipeline import pipelines
from tailrace.cli.commands.schedule import delayed, recurring
from tailrace.cli.commands.serve import serving
from tailrace.cli.commands.topic import topics
from tailrace.cli.commands.trace import tracing
from tailrace.cli.commands.worker import working
from tailrace.cli.execution import EXIT_INTERRUPTED, EXIT_READER_GONE, report, tell_of_outages
from tailrace.cli.output import OutputLost, ReaderGone, decorated, put_aside, tell, writing
from tailrace.errors import EDGES, InvalidRequest, Outcome, TailraceError

# What typer raises for a wrong command line; it exports only this child of it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

SECRET_IN_URL = re.compile(r"tailraces?://([^?]*?:.+@|.*[?&]token=)")
SEEN = (
    "note: everybody on this machine could read the secret in --url for a moment; "
    "TAILRACE_URL, TAILRACE_TOKEN and the credentials file keep it to yourself"
)
NO_ARGUMENT = (
    "a password is never an argument: it is asked for, or read with --password-stdin; "
    "change one that stood in a command line"
)


class Root(TyperGroup):
    """The root command: every way that a command can end becomes an exit status and at most a few words."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> NoReturn:
        """Run a command line and exit."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        extra.setdefault("prog_name", "tailrace")
        sys.exit(self._status(arguments, _flagged(arguments, "--json"), extra))

    def _status(self, arguments: list[str], as_json: bool, extra: dict[str, Any]) -> int:
        tell_of_outages(as_json=as_json)
        if not as_json and _secret_in_url(arguments):
            tell(SEEN)
        try:
            # A help page is written by typer; everything else by our own hand (`Output`).
            with writing() if _flagged(arguments, "-h", "--help") else nullcontext():
                result = super().main(arguments, **extra)
            with writing():
                sys.stdout.flush()
        except ReaderGone:
            put_aside(sys.stdout)
            return EXIT_READER_GONE
        except OutputLost as error:
            put_aside(sys.stdout)
            # What was asked for may be done; the exit status alone would tell a program that it is not.
            outcome: Outcome = "unknown" if as_json else "none"
            return report(TailraceError(str(error), outcome=outcome), as_json=as_json)
        except TailraceError as error:
            return report(error, as_json=as_json)
        except UsageError as error:
            return _misused(error, as_json=as_json)
        except (typer.Abort, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        return result if isinstance(result, int) else 0


app = typer.Typer(
    cls=Root,
    name="tailrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if decorated() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A persistent message queue on one machine: a topic is a log and a queue at the same time. "
    "Messages are delivered at least once; clients connect by loopback, a Unix "
    "socket or TLS.",
)
app.add_typer(serving)
app.add_typer(topics, name="topic")
app.add_typer(messages)
app.add_typer(consuming)
app.add_typer(groups, name="group")
app.add_typer(letters, name="dlq")
app.add_typer(recurring, name="schedule")
app.add_typer(delayed, name="delayed")
app.add_typer(tracing)
app.add_typer(working)
app.add_typer(pipelines, name="pipeline")
app.add_typer(logs, name="log")
app.add_typer(users, name="user")
app.add_typer(tokens, name="token")
app.add_typer(rules, name="acl")
app.add_typer(tenants, name="tenant")
app.add_typer(quotas, name="quota")
app.add_typer(certificates, name="cert")
app.add_typer(identity)
app.add_typer(about)
add_wait(app)


def main() -> None:
    """The console script."""
    if "_TAILRACE_COMPLETE" in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    if not _occupy_standard_files():
        sys.exit(report(TailraceError("standard output is closed"), as_json=_flagged(sys.argv, "--json")))
    app()


def _misused(error: Exception, *, as_json: bool) -> int:
    """A wrong command line, told as the error that it is; one without a command gets the help."""
    message = str(getattr(error, "format_message", lambda: str(error))())
    context = getattr(error, "ctx", None)
    if message.startswith("Usage:") and not as_json:
        tell(message)
        return EDGES[InvalidRequest.code].exit
    hint = f"`{context.command_path} --help` lists what can be given" if context is not None else None
    if context is not None and context.command_path.startswith("tailrace user ") and "extra arg" in message:
        # What was typed may be the password itself, and is not repeated.
        message, hint = "unexpected extra arguments", NO_ARGUMENT
    return report(InvalidRequest(message, hint=hint), as_json=as_json)


def _flagged(arguments: list[str], *flags: str) -> bool:
    """Whether one of the flags is given; what stands behind `--` is something else."""
    given = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(flag in given for flag in flags)


def _secret_in_url(arguments: list[str]) -> bool:
    """Whether --url is given with a password or token, for everybody to read in the list of processes."""
    given = [value for option, value in pairwise(arguments) if option == "--url"]
    given += [argument for argument in arguments if argument.startswith("--url=")]
    return any(SECRET_IN_URL.search(url) for url in given)


def _occupy_standard_files() -> bool:
    """Open what the caller has closed of standard input, output and error: a file or socket that is opened
    later would get its number, and what is written there would go into it. Whether there is an output."""
    has_output = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    return has_output
