"""Archives on a disk: manifests read and put in place, files that were written measured and moved, garbage.

A new manifest appears under a name that nobody else can take, so of two runs that archive the same messages
one wins. The other finds out when it publishes, drops what it wrote and begins again at the newest manifest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.core.model.identifiers import PRIORITY_DEFAULT
from tailrace.errors import Corrupt, Fenced, StorageFault
from tailrace.spark.archives import (
    ArchiveFile,
    Manifest,
    check,
    file_name,
    folder_of,
    kept_paths,
    manifest_name,
    manifest_version,
    state_folder,
    topic_folder,
)

STAGING = "staging-"
UNNAMED_KEPT_US = 24 * 3600 * 1_000_000
BATCH_ROWS = 16_384
BATCH_BYTES = 8 * 1024 * 1024
_TRIES = 5
"""How often the newest manifest is looked for, while others put newer ones in place and clean up."""


def newest(root: str | Path, topic: str) -> Manifest | None:
    """The newest manifest of a topic; None when nothing was archived yet."""
    folder = Path(root) / state_folder(topic)
    for _ in range(_TRIES):
        versions = _versions(folder)
        if not versions:
            return None
        found = _load(folder, versions[-1])
        if found is not None:
            check(found)
            return found
    raise StorageFault(f"{folder}: manifests vanish while they are looked for")


def archived_topics(root: str | Path) -> list[str]:
    """The topics that an archive has manifests of."""
    folders = [path for path in (Path(root) / state_folder("")).glob("*/") if _versions(path)]
    return sorted(found.topic for path in folders if (found := _load(path, _versions(path)[-1])))


def publish(root: str | Path, manifest: Manifest) -> None:
    """Make it the newest manifest, durably; raises `Fenced` when somebody else was first."""
    data = msgspec.json.format(msgspec.json.encode(manifest))
    put_version(Path(root) / state_folder(manifest.topic), manifest.version, data)


def put_version(folder: Path, version: int, data: bytes) -> None:
    """A file for a version, whole and durably, unless there is one of that version or a later one: then
    `Fenced`, and certainly nothing was put. After any other error it may be there."""
    folder.mkdir(parents=True, exist_ok=True)
    known = _versions(folder)
    if known and known[-1] >= version:
        raise Fenced(f"{folder}: another run has put version {known[-1]} in place")
    name = manifest_name(version)
    temporary = folder / f"{name}.{os.urandom(8).hex()}"
    try:
        temporary.write_bytes(data)
        _sync(temporary)
        try:
            os.link(temporary, folder / name)
        except FileExistsError:
            # Over a network, a link that was made may be answered as if it had been there: the count tells.
            if temporary.stat().st_nlink < 2:
                raise Fenced(f"{folder}: another run has put version {version} in place") from None
    finally:
        temporary.unlink(missing_ok=True)
    _sync(folder)


def newest_version(folder: Path) -> bytes | None:
    """What the newest version says; None when there is none."""
    versions = _versions(folder)
    return (folder / manifest_name(versions[-1])).read_bytes() if versions else None


def _versions(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(version for name in names if (version := manifest_version(name)) is not None)


def _load(folder: Path, version: int) -> Manifest | None:
    path = folder / manifest_name(version)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is damaged: {error}; restore it from a backup") from error


# ------------------------------------------------------------------------------------------ written files


def staging_folder(root: str | Path, topic: str, run: str) -> Path:
    """Where one run writes before its files become part of the archive."""
    return Path(root) / state_folder(topic) / f"{STAGING}{run}"


def measured(path: Path) -> tuple[int, ArchiveFile] | None:
    """The partition of a written file, and what a manifest says of it; None for a file without rows."""
    metadata = pq.read_metadata(path)
    if not metadata.num_rows:
        return None
    places = {metadata.schema.column(at).path: at for at in range(metadata.num_columns)}
    bounds = {}
    for name in ("partition", "offset", "append_time", "timestamp"):
        found = [
            metadata.row_group(group).column(places[name]).statistics
            for group in range(metadata.num_row_groups)
        ]
        if any(one is None or not one.has_min_max for one in found):
            raise Corrupt(f"{path}: column {name} has no statistics")
        bounds[name] = min(one.min_raw for one in found), max(one.max_raw for one in found)
    if bounds["partition"][0] != bounds["partition"][1]:
        raise Corrupt(f"{path} holds rows of several partitions")
    first, last = bounds["offset"]
    return bounds["partition"][0], ArchiveFile(
        str(path),
        first,
        last + 1,
        metadata.num_rows,
        path.stat().st_size,
        sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)),
        *bounds["append_time"],
        bounds["timestamp"][1],
    )


def settled(
    root: str | Path, topic: str, staged: Iterable[Path], run: str, *, hourly: bool
) -> dict[int, list[ArchiveFile]]:
    """Move staged files to where they belong, durably; by partition, as a manifest names them."""
    root = Path(root)
    files: dict[int, list[ArchiveFile]] = {}
    touched: set[Path] = set()
    for path in staged:
        found = measured(path)
        if found is None:
            continue
        partition, file = found
        folder = folder_of(topic, file.append_min_us, hourly=hourly)
        if folder != folder_of(topic, file.append_max_us, hourly=hourly):
            raise Corrupt(f"{path} holds append times of several folders")
        target = root / folder / file_name(partition, file.first, file.end, run)
        target.parent.mkdir(parents=True, exist_ok=True)
        _sync(path)
        os.rename(path, target)
        touched |= {target.parent, *target.parent.parents} - set(root.parents)
        named = msgspec.structs.replace(file, path=str(target.relative_to(root)))
        files.setdefault(partition, []).append(named)
    for place in touched:
        _sync(place)
    return files


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files that a job left below a folder."""
    return sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith(("_", ".")))


def merge(root: str, sources: Sequence[ArchiveFile], target: str) -> None:
    """Several files, rows in order, as one; runs in a task."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with pq.ParquetFile(Path(root) / sources[0].path) as first:
        schema = first.schema_arrow
    with pq.ParquetWriter(target, schema, compression="zstd", write_page_checksum=True) as writer:
        for source in sources:
            for batch in rows_of(Path(root) / source.path, schema.names, source.first, source.end):
                writer.write_batch(batch.select(schema.names).cast(schema))


def drop(root: str | Path, files: Iterable[ArchiveFile]) -> None:
    """Remove files that did not become part of the archive."""
    for file in files:
        (Path(root) / file.path).unlink(missing_ok=True)


def remove_garbage(root: str | Path, topic: str, now_us: int, keep_us: int) -> int:
    """Remove what no reader can need any more: files that no manifest has named for `keep_us`, and their
    manifests. What no manifest ever named may belong to a run that is under way, so it stays for a day.
    Returns how many files went."""
    root = Path(root)
    folder = root / state_folder(topic)
    manifests = [found for version in _versions(folder) if (found := _load(folder, version)) is not None]
    kept, old = kept_paths(manifests, now_us, keep_us)
    known = {path for manifest in manifests for path in manifest.paths()}
    abandoned_us = now_us - max(keep_us, UNNAMED_KEPT_US)
    removed = 0
    for path in (root / topic_folder(topic)).rglob("*.parquet"):
        name = str(path.relative_to(root))
        if name not in kept and (name in known or _older(path, abandoned_us)):
            path.unlink(missing_ok=True)
            removed += 1
    for version in old:
        (folder / manifest_name(version)).unlink(missing_ok=True)
    for path in folder.glob(f"{STAGING}*"):
        if _older(path, abandoned_us):
            shutil.rmtree(path, ignore_errors=True)
    return removed


def _older(path: Path, time_us: int) -> bool:
    try:
        return path.stat().st_mtime_ns // 1000 < time_us
    except FileNotFoundError:
        return False


def replace_file(path: Path, data: bytes) -> None:
    """A small file that is there whole or not at all, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    try:
        temporary.write_bytes(data)
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------- reading


def rows_of(path: Path, columns: list[str], first: int, end: int) -> Iterator[pa.RecordBatch]:
    """The rows of offsets [first, end) of a file: `offset` and these columns, in batches of some
    megabytes. A priority is never null: files of older archives have nulls where a batch stored none."""
    names = list(dict.fromkeys(["offset", *columns]))
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        metadata = file.metadata
        place = next(at for at in range(metadata.num_columns) if metadata.schema.column(at).path == "offset")
        groups, size, rows = [], 0, 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            bounds = group.column(place).statistics
            if bounds.min_raw < end and bounds.max_raw >= first:
                groups.append(number)
                size, rows = size + group.total_byte_size, rows + group.num_rows
        if not groups:
            return
        rows_max = min(max(BATCH_BYTES * rows // max(size, 1), 1), BATCH_ROWS)
        for batch in file.iter_batches(rows_max, row_groups=groups, columns=names, use_threads=False):
            offsets = batch.column("offset").to_numpy()
            low, high = offsets.searchsorted((first, end))
            if low < high:
                yield _with_priorities(batch.slice(low, high - low))


def _with_priorities(batch: pa.RecordBatch) -> pa.RecordBatch:
    place = batch.schema.get_field_index("priority")
    if place < 0 or not batch.column(place).null_count:
        return batch
    return batch.set_column(place, batch.schema.field(place), batch.column(place).fill_null(PRIORITY_DEFAULT))
