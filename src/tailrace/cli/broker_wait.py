"""`--wait`: one option of every command that talks to a broker, added to all of them in one place.

A command that has `--url` works with a broker. Without `--wait` it fails at once when none is there; with it,
the broker is asked again for so many seconds. `tailrace consume` has a `--wait` of its own, which counts for
the broker and then for each message.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

import typer

WAIT_S: ContextVar[float] = ContextVar("wait_s", default=0.0)
"""For how long the command that runs waits for a broker."""

Wait = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait so long for a broker to be there.")
]


def add_wait(app: typer.Typer) -> None:
    """Give `--wait` to every command of the application, and of its groups, that has `--url`."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = _waiting(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_wait(group.typer_instance)


def _waiting(callback: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(callback, eval_str=True)
    if "url" not in signature.parameters or "wait" in signature.parameters:
        return callback

    @functools.wraps(callback)
    def command(*arguments: Any, wait: float, **options: Any) -> Any:
        WAIT_S.set(wait)
        return callback(*arguments, **options)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters.append(parameter)
        if parameter.name == "url":
            parameters.append(inspect.Parameter("wait", parameter.kind, default=0.0, annotation=Wait))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
