"""`tailrace completion` and `tailrace version`: about the command itself."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli.output import Output
from tailrace.cli.parameters import Json
from tailrace.errors import InvalidRequest

about = typer.Typer()
completion = typer.Typer(no_args_is_help=True, help="Completion of commands and options in the shell.")
about.add_typer(completion, name="completion")

Shell = Annotated[
    str | None, typer.Option("--shell", help="bash, zsh, fish or powershell.", show_default="the one in use")
]


@completion.command()
def install(shell: Shell = None, json: Json = False) -> None:
    """Install completion for a shell."""
    from typer._completion_shared import install as install_script

    name = _known_shell(shell)
    # `shell` says which one is meant; none is started.
    used, path = install_script(shell=name, prog_name="tailrace")  # nosec B604
    text = f"completion for {used} is installed in {path}; open a new shell to use it"
    Output(as_json=json).result({"shell": used, "path": str(path)}, text)


@completion.command()
def show(shell: Shell = None, json: Json = False) -> None:
    """Print the completion script of a shell."""
    from typer._completion_shared import get_completion_script

    name = _known_shell(shell)
    variable = "_TAILRACE_COMPLETE"
    script = get_completion_script(prog_name="tailrace", complete_var=variable, shell=name)  # nosec B604
    Output(as_json=json).result({"shell": name, "script": script}, script)


@about.command()
def version(json: Json = False) -> None:
    """Print the version."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("tailrace")
    except PackageNotFoundError:
        number = "unknown (not installed as a package)"
    python = platform.python_version()
    Output(as_json=json).result(
        {"tailrace": number, "python": python}, f"tailrace {number} on Python {python}"
    )


def _known_shell(name: str | None) -> str:
    import shellingham  # type: ignore[import-untyped]

    known = ("bash", "fish", "powershell", "pwsh", "zsh")
    if name is None:
        try:
            name = shellingham.detect_shell()[0]
        except shellingham.ShellDetectionFailure:
            raise InvalidRequest("--shell: which shell? it could not be detected") from None
    if name not in known:
        raise InvalidRequest(f"--shell: {name!r} is none of {', '.join(known)}")
    return name
