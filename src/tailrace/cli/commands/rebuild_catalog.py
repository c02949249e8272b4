"""`tailrace log rebuild-catalog`: register the topics whose folders are there, without a broker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import Json
from tailrace.errors import Corrupt, NotFound

if TYPE_CHECKING:
    from tailrace.core.catalog.rebuilt_catalog import RebuiltCatalog

Data = Annotated[Path, typer.Argument(metavar="DATA", help="The data folder.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be registered.")]
Defaults = Annotated[
    bool,
    typer.Option(
        "--defaults", help="Give default options to topics whose own are lost; their partitions are counted."
    ),
]


def rebuild_catalog(
    data: Data, dry_run: DryRun = False, defaults: Defaults = False, json: Json = False
) -> None:
    """Rebuild a catalog that is lost, damaged or too old, from the folders of the topics.

    Stop the broker first. What the catalog still says is kept; the file that was there is kept beside it as
    catalog.json.old.
    """
    from tailrace.cluster.embedded import FILE
    from tailrace.storage.lock import FolderLock

    topics = data / "topics"
    if not topics.is_dir():
        raise NotFound(f"there are no topics in {data}", hint="name the data folder of a broker")
    lock = None if dry_run else FolderLock(str(topics.resolve()))
    try:
        rebuilt = _rebuilt(data)
        if rebuilt.guessed and not defaults and not dry_run:
            _show(Output(as_json=json), rebuilt)
            names = ", ".join(printable(item.topic) for item in rebuilt.guessed[:10])
            raise Corrupt(
                f"the options of {len(rebuilt.guessed)} topics are lost: {names}; nothing was changed",
                outcome="none",
                hint="restore catalog.json from a backup, or repeat the command with --defaults",
            )
        if not dry_run:
            _store(data, rebuilt)
    finally:
        if lock is not None:
            lock.release()
    output = Output(as_json=json)
    _show(output, rebuilt)
    if not json:
        count = len(rebuilt.catalog.topics)
        output.note(f"{FILE} {'would have' if dry_run else 'has'} {count} topics")


def _rebuilt(data: Path) -> RebuiltCatalog:
    from tailrace.cluster.embedded import FileCoordinator
    from tailrace.core.catalog.rebuilt_catalog import rebuild
    from tailrace.storage.files.inspect import ViewedDisk
    from tailrace.storage.files.topic_folders import FolderShelf

    try:
        catalog = FileCoordinator(ViewedDisk(data)).load()
    except Corrupt:
        catalog = None  # Nothing of it can be believed.
    folders = FolderShelf(ViewedDisk(data / "topics")).survey()
    return rebuild(catalog, folders, time.time_ns() // 1000)


def _store(data: Path, rebuilt: RebuiltCatalog) -> None:
    import os
    import shutil

    from tailrace.cluster.embedded import FILE, FileCoordinator
    from tailrace.storage.disk import RealDisk

    if (data / FILE).exists():
        shutil.copy2(data / FILE, data / f"{FILE}.old")
        with open(data / f"{FILE}.old", "rb") as copy:
            os.fsync(copy.fileno())
    FileCoordinator(RealDisk(data)).save(rebuilt.catalog)


def _show(output: Output, rebuilt: RebuiltCatalog) -> None:
    if output.as_json:
        for item in rebuilt.found:
            output.record(item._asdict())
        return
    columns = ["folder", "topic", "partitions", "options", "state", "note"]
    rows = [
        [item.folder, item.topic, item.partitions, item.options or None, item.state, item.note or None]
        for item in rebuilt.found
    ]
    output.table(columns, rows)
