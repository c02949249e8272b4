"""New passwords: asked for twice on a terminal without echo, read from standard input, or made here.

They are never taken from arguments, which everybody on the machine can read in the list of processes, and
never stand in an error.
"""

from __future__ import annotations

import secrets
import sys
import warnings
from typing import Annotated

import typer

from tailrace.cli.output import printable
from tailrace.errors import InvalidRequest

PASSWORD_BYTES_MAX = 1024
LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Those that are not mistaken for each other."""
GROUPS, GROUP_LETTERS = 5, 5
"""Enough letters for 123 bits."""

PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from standard input, one line.")
]
Generate = Annotated[bool, typer.Option("--generate", help="Make a password, and print it once.")]


def new_password(name: str | None, *, from_stdin: bool, generate: bool) -> str:
    """The new password of a user, or one's own (None); whoever generates it prints it. Call it while no
    connection is open and no event loop runs: people take their time, and Ctrl-C must end it."""
    if from_stdin and generate:
        raise InvalidRequest("--password-stdin or --generate, not both")
    if generate:
        return generated()
    if from_stdin:
        return _read()
    if not sys.stdin.isatty():
        hint = "--password-stdin reads it from standard input, --generate makes one and prints it"
        raise InvalidRequest("nobody can be asked for a password here", hint=hint)
    return _asked(name)


def generated() -> str:
    """A password that can be read aloud, such as k7mq2-…: 123 bits from the system's generator."""
    return "-".join("".join(secrets.choice(LETTERS) for _ in range(GROUP_LETTERS)) for _ in range(GROUPS))


def _asked(name: str | None) -> str:
    """The password as somebody types it, twice."""
    from getpass import GetPassWarning, getpass

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", GetPassWarning)
            first = getpass("New password: " if name is None else f"New password of {printable(name)}: ")
            again = getpass("The same once more: ")
    except GetPassWarning:
        raise InvalidRequest("the terminal would show the password: use --password-stdin") from None
    except EOFError:
        raise typer.Abort from None
    if first != again:
        raise InvalidRequest("the two passwords differ: nothing was changed")
    return _checked(first)


def _read() -> str:
    """The one line that standard input has."""
    with open(0, "rb", closefd=False) as stdin:
        data = stdin.read(PASSWORD_BYTES_MAX + 3)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("--password-stdin: the password is not UTF-8") from None
    return _checked(text.removesuffix("\n").removesuffix("\r"))


def _checked(password: str) -> str:
    if not password:
        raise InvalidRequest("the password is empty")
    if len(password.encode("utf-8", "surrogateescape")) > PASSWORD_BYTES_MAX:
        raise InvalidRequest(f"the password is longer than {PASSWORD_BYTES_MAX} bytes")
    if not password.isprintable():
        raise InvalidRequest("the password has to be one line without control characters")
    return password
