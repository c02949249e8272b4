"""`tailrace log`: look at the files of logs, or check them, without a broker and without any change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.commands.rebuild_catalog import rebuild_catalog
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import Json
from tailrace.errors import Corrupt, NotFound

if TYPE_CHECKING:
    from tailrace.storage.files.inspect import Row

logs = typer.Typer(no_args_is_help=True, help="Look at log files and check them, without a broker.")

logs.command("rebuild-catalog")(rebuild_catalog)

Folder = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A data folder, or the folder of one partition.", show_default=False),
]


@logs.command()
def inspect(path: Folder, json: Json = False) -> None:
    """List segments, snapshots and marks with what they hold."""
    from tailrace.storage.files.inspect import inspect_log

    output = Output(as_json=json)
    for name, folder in _logs(path):
        if json:
            for row in inspect_log(folder):
                output.record({"log": name, **_record(row)})
            continue
        columns = [
            "file",
            "kind",
            "entries",
            "offsets",
            "frames",
            "bytes",
            "file_bytes",
            "last_append",
            "problem",
        ]
        output.line(printable(name))
        output.table(columns, [_cells(row) for row in inspect_log(folder)])
        output.line("")


@logs.command()
def verify(path: Folder, json: Json = False) -> None:
    """Read and check every byte; fails when messages are damaged.

    Stop the broker first: what it is just writing looks torn.
    """
    from tailrace.storage.files.inspect import verify_log

    output = Output(as_json=json)
    checked = 0
    damaged = []
    for name, folder in _logs(path):
        problems = verify_log(folder)
        checked += 1
        if any(problem.fatal for problem in problems):
            damaged.append(name)
        if json:
            rows = [
                {"file": found.file, "position": found.position, "what": found.what, "fatal": found.fatal}
                for found in problems
            ]
            output.record({"log": name, "problems": rows})
            continue
        for found in problems:
            kind = "damage" if found.fatal else "note"
            output.line(f"{kind}: {printable(f'{name}/{found.file} at {found.position}: {found.what}')}")
    if damaged:
        listing = ", ".join(damaged[:10]) + (", ..." if len(damaged) > 10 else "")
        raise Corrupt(
            f"{len(damaged)} of {checked} logs are damaged: {listing}",
            outcome="none",
            hint="docs/operations.md says what to do; keep a copy of the folder before you change anything",
        )
    if not json:
        output.line(f"{checked} logs checked, all messages are well")


def _logs(path: Path) -> Iterator[tuple[str, Path]]:
    """Every log at or below a folder, with the name that it has from there."""
    from tailrace.storage.files.mark import MARK_NAME
    from tailrace.storage.files.segment import first_entry

    if not path.is_dir():
        raise NotFound(
            f"there is no folder {path}", hint="name a data folder, or the folder of one partition in it"
        )

    def is_log(folder: Path) -> bool:
        return any(
            item.is_file() and (item.name == MARK_NAME or first_entry(item.name) is not None)
            for item in folder.iterdir()
        )

    if is_log(path):
        resolved = path.resolve()
        yield f"{resolved.parent.name}/{resolved.name}", path
        return
    folders = sorted(folder for folder in path.rglob("*") if folder.is_dir() and is_log(folder))
    if not folders:
        raise NotFound(
            f"there are no logs in {path}", hint="name a data folder, or the folder of one partition in it"
        )
    for folder in folders:
        yield str(folder.relative_to(path)), folder


def _record(row: Row) -> dict[str, Any]:
    import msgspec

    record = msgspec.structs.asdict(row)
    for name in ("first_append", "last_append"):
        record[name] = _time(record.pop(f"{name}_us"))
    return record


def _cells(row: Row) -> list[Any]:
    return [
        row.file,
        row.kind + (" (sealed)" if row.sealed else ""),
        f"{row.first_entry}-{row.end_entry}",
        f"{row.base_offset}-{row.end_offset}",
        row.frames,
        row.bytes,
        row.file_bytes,
        _time(row.last_append_us),
        row.problem or None,
    ]


def _time(time_us: int) -> str | None:
    from datetime import UTC, datetime, timedelta

    from tailrace.cli.moments import iso

    return iso(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)) if time_us > 0 else None
