"""`tailrace log`: look at the files of a log, or check them, while no broker runs."""

from __future__ import annotations

import typer

logs = typer.Typer(no_args_is_help=True, help="Look at log files and check them, without a broker.")
