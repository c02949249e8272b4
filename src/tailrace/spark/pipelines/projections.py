"""Positions of projections: what a table or topic was made of so far, in files that only ever appear whole.

Beside the result lies `_tailrace/<version>.json`, one file for each version. A new version is put in with
`link`, which fails where another run has put it first; the newest is the one that counts. The rows of a table
lie in folders below `_versions`; a folder that no recent version names is garbage.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tailrace.errors import Corrupt, Fenced, InvalidRequest
from tailrace.spark.manifests import put_version, replace_file

Offsets = dict[str, dict[int, int]]
"""By topic and partition."""
Spans = dict[tuple[str, int], tuple[int, int]]

VERSIONS_KEPT = 3
"""A reader that opened the table up to two versions ago still finds its files."""
LEFTOVERS_KEPT_S = 24 * 3600.0
"""Folders of runs that were killed go after this; a run that is under way may own a younger one."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a projection: which events are in it, and where its rows are."""

    version: int
    program: str
    topics: dict[str, int]
    """The topics of the events with their ids: one that was deleted and created again has another."""
    begins: Offsets
    """The first events that it was made of."""
    ends: Offsets
    """The first events that are not in it yet."""
    folders: list[str] = []
    """Of a table: where its rows are, below `_versions`."""
    rows: int = 0
    """Of a table: how many."""
    columns: str = ""
    """Of a table: Spark's schema as JSON."""
    writer: str = ""
    """Of a topic: whose staged writes these are."""
    starts: Offsets = {}
    """Of a topic: where the last round began, so that it can be done again just as it was."""
    written: bool = True
    """Of a topic: whether the last round is known to be in it."""
    trims: dict[int, int] = {}
    """Of a topic that is made anew: up to where the old rows go, before the new ones come."""


class Positions:
    """The versions of one projection, below its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._notes = root / "_tailrace"
        self._data = root / "_versions"

    def newest(self) -> Position | None:
        """The version that counts; None before the first."""
        numbers = self._numbers()
        return self._read(max(numbers)) if numbers else None

    def put(self, position: Position) -> None:
        """Add a version; raises `Fenced` when another run has put one of this number."""
        try:
            put_version(self._notes, position.version, msgspec.json.encode(position))
        except Fenced as error:
            raise Fenced(error.message, hint="one run at a time; the next one goes on from there") from None

    def replace(self, position: Position) -> None:
        """Say more about a version that is there."""
        replace_file(self._path(position.version), msgspec.json.encode(position))

    def new_folder(self, version: int) -> Path:
        """A name for the rows of a version that nobody else has."""
        self._data.mkdir(parents=True, exist_ok=True)
        return self._data / f"{version:020}-{uuid.uuid4().hex[:8]}"

    def folders(self, position: Position) -> list[str]:
        """Where the rows of a version are."""
        return [str(self._data / name) for name in position.folders]

    def tidy(self, now_s: float | None = None) -> None:
        """Remove old versions, the folders that only they name, and what killed runs left."""
        now_s = time.time() if now_s is None else now_s
        numbers = sorted(self._numbers())
        old, kept = numbers[:-VERSIONS_KEPT], numbers[-VERSIONS_KEPT:]
        named = {folder for number in kept for folder in self._read(number).folders}
        gone = {folder for number in old for folder in self._read(number).folders} - named
        for path in self._data.iterdir() if self._data.exists() else ():
            leftover = path.name not in named and now_s - path.stat().st_mtime > LEFTOVERS_KEPT_S
            if path.name in gone or leftover:
                shutil.rmtree(path)
        for number in old:
            self._path(number).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        if not self._notes.exists():
            return []
        return [int(path.stem) for path in self._notes.glob("*.json") if path.stem.isdecimal()]

    def _path(self, version: int) -> Path:
        return self._notes / f"{version:020}.json"

    def _read(self, version: int) -> Position:
        path = self._path(version)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Position)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{path}: {error}", path=str(path)) from None


def sync_folder(folder: Path) -> None:
    """Make files that others wrote into a folder survive power loss, before anything refers to them."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    _sync(folder.parent)


def known(offsets: Offsets, others: Offsets) -> Offsets:
    """Offsets, with those of others for partitions that have none. A projection notes all partitions from the
    first round on: one whose turn has not come yet must not begin later, because retention was faster."""
    return {
        topic: {**partitions, **offsets.get(topic, {})} for topic, partitions in {**offsets, **others}.items()
    }


def pending(ends: Offsets, latest: Offsets) -> Spans:
    """What is to be read next of every partition; nothing for those which have nothing new."""
    return {
        (topic, partition): (ends[topic][partition], end)
        for topic, partitions in latest.items()
        for partition, end in partitions.items()
        if end > ends[topic][partition]
    }


def check_topics(before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise unless the topics are those that a projection was made of; one more may be there."""
    for topic, number in before.items():
        if now.get(topic, number) != number:
            raise InvalidRequest(
                f"{topic} was deleted and created again since the projection was made",
                hint="--option rebuild=true makes the projection anew",
            )


def advanced(ends: Offsets, spans: Spans) -> Offsets:
    """Where a projection stands when it has read these spans, too."""
    result = {topic: dict(partitions) for topic, partitions in ends.items()}
    for (topic, partition), (_, end) in spans.items():
        result.setdefault(topic, {})[partition] = end
    return result


def distance(starts: Offsets, ends: Offsets) -> int:
    """How many offsets lie between."""
    return sum(
        end - starts[topic][partition]
        for topic, partitions in ends.items()
        for partition, end in partitions.items()
    )


def as_option(offsets: Offsets) -> str:
    """Offsets as the options `start` and `end` of the data source want them."""
    return msgspec.json.encode(offsets).decode("ascii")


def lost(begins: Offsets, earliest: Mapping[str, Mapping[int, int]]) -> Iterable[str]:
    """The partitions, in words, that have lost events which a projection was made of."""
    for topic, partitions in begins.items():
        for partition, begin in partitions.items():
            now = earliest.get(topic, {}).get(partition, begin)
            if now > begin:
                yield f"{topic}/{partition} begins at {now}, the projection at {begin}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
