"""Archives without Spark: what manifests say, how they grow and are put in place, and the plan of a read.

Also covers `spark/manifests.py` and `spark/source/archive_reader.py`.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import Corrupt, Fenced, InvalidRequest, NotFound
from tailrace.format.schema import TIME
from tailrace.format.tabular import POSITIONED
from tailrace.spark.archives import (
    ArchiveFile,
    Cover,
    Manifest,
    check,
    chosen,
    compaction_groups,
    extended,
    folder_of,
    holes,
    kept_paths,
    manifest_version,
    missing,
    pieces,
    replaced,
    require_same_topic,
    state_folder,
    topic_folder,
)
from tailrace.spark.manifests import (
    archived_topics,
    measured,
    merge,
    newest,
    newest_version,
    publish,
    put_version,
    remove_garbage,
    rows_of,
    settled,
    staging_folder,
)
from tailrace.spark.options import read_options
from tailrace.spark.source.archive_reader import Known, archived_time, planned

DAY_US = 86_400_000_000
NOON_US = 20_000 * DAY_US + DAY_US // 2


def file(first: int, end: int, *, folder: str = "topic=t/date=2024-10-04", nbytes: int = 10) -> ArchiveFile:
    return ArchiveFile(
        f"{folder}/{first}-{end}.parquet",
        first,
        end,
        end - first,
        nbytes,
        4 * nbytes,
        NOON_US,
        NOON_US,
        NOON_US,
    )


def archive(*bounds: int, partition: int = 0) -> Manifest:
    """One partition, with files between these offsets."""
    files = tuple(file(first, end) for first, end in pairwise(bounds))
    return Manifest("t", 7, 1, 1, {partition: Cover(bounds[0], bounds[-1], files)})


# -- growing


def test_what_is_missing():
    empty = Manifest("t", 7)
    assert missing(empty, {0: (5, 9), 1: (0, 0)}) == {0: (5, 9)}
    have = archive(0, 10, 20)
    assert missing(have, {0: (15, 30), 1: (2, 4)}) == {0: (20, 30), 1: (2, 4)}
    assert missing(have, {0: (20, 20)}) == {}
    with pytest.raises(NotFound, match=r"offsets 20 to 24 of t/0 were trimmed .*accept_loss"):
        missing(have, {0: (25, 30)})
    assert missing(have, {0: (25, 30)}, accept_loss=True) == {0: (25, 30)}
    with pytest.raises(Corrupt, match="ends at offset 20, the log at 19"):
        missing(have, {0: (0, 19)})


def test_growing_takes_whole_ranges_only():
    have = archive(0, 10)
    grown = extended(have, {0: ((10, 30), [file(20, 30), file(10, 20)]), 1: ((3, 5), [file(3, 5)])}, 99)
    assert (grown.version, grown.created_us) == (2, 99)
    assert [one.first for one in grown.partitions[0].files] == [0, 10, 20]
    assert grown.partitions[1] == Cover(3, 5, (file(3, 5),))
    check(grown)
    for files in ([file(10, 20)], [file(20, 30)], [file(10, 20), file(19, 30)], []):
        with pytest.raises(Corrupt):
            extended(have, {0: ((10, 30), files)}, 99)
    short = msgspec.structs.replace(file(10, 30), rows=19)
    with pytest.raises(Corrupt, match="19 rows"):
        extended(have, {0: ((10, 30), [short])}, 99)
    with pytest.raises(Fenced):
        extended(have, {0: ((5, 15), [file(5, 15)])}, 99)


def test_merged_files_take_the_place_of_theirs():
    have = archive(0, 10, 20, 30, 40)
    old = have.partitions[0].files[1:3]
    after = replaced(have, [(0, old, file(10, 30))], 99)
    assert [(one.first, one.end) for one in after.partitions[0].files] == [(0, 10), (10, 30), (30, 40)]
    assert after.version == 2
    with pytest.raises(Fenced):
        replaced(after, [(0, old, file(10, 30))], 99)
    with pytest.raises(Corrupt):
        replaced(have, [(0, old, file(10, 29))], 99)


def test_small_neighbours_are_grouped():
    sizes = [5, 5, 90, 5, 5, 5, 5, 5]
    files = tuple(file(at * 10, at * 10 + 10, nbytes=size) for at, size in enumerate(sizes))
    groups = compaction_groups(Cover(0, 80, files), small_bytes=50, target_bytes=15, files_min=2)
    assert [[one.first for one in group] for group in groups] == [[0, 10], [30, 40, 50], [60, 70]]
    assert compaction_groups(Cover(0, 80, files), small_bytes=50, target_bytes=100, files_min=6) == []
    other = tuple(msgspec.structs.replace(one, path=f"topic=t/date={at}/x") for at, one in enumerate(files))
    assert compaction_groups(Cover(0, 80, other), small_bytes=50, target_bytes=100, files_min=2) == []
    gap = (files[0], files[3])
    assert compaction_groups(Cover(0, 80, gap), small_bytes=50, target_bytes=100, files_min=2) == []


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 12),
)
def test_a_range_is_read_whole_and_once(lengths, one, other, rows_max):
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    cover = archive(*bounds).partitions[0]
    wanted = min(one, other), max(one, other)
    found = [piece for part in chosen(cover, wanted) for piece in pieces(part, wanted, rows_max)]
    offsets = [offset for first, end in found for offset in range(first, end)]
    assert offsets == list(range(wanted[0], min(wanted[1], bounds[-1])))
    assert all(first < end for first, end in found)
    assert not rows_max or all(end - first <= rows_max for first, end in found)
    lost = [offset for first, end in holes(cover, wanted) for offset in range(first, end)]
    assert offsets + lost == list(range(*wanted))


def test_names():
    assert topic_folder("a/b.c") == "topic=a%2Fb.c"
    assert folder_of("t", NOON_US, hourly=True) == "topic=t/date=2024-10-04/hour=12"
    assert folder_of("t", 19_999 * DAY_US - 1, hourly=False) == "topic=t/date=2024-10-02"
    assert manifest_version("00000000000000000012.json") == 12
    assert manifest_version("00000000000000000012.json.ab") is None


def test_contradictions_are_refused():
    check(archive(0, 10, 20))
    with pytest.raises(Corrupt, match="contradicts"):
        check(Manifest("t", 7, partitions={0: Cover(0, 20, (file(0, 10), file(9, 20)))}))
    with pytest.raises(Corrupt, match="format 2"):
        check(Manifest("t", 7, format=2))
    with pytest.raises(InvalidRequest, match="deleted and created again"):
        require_same_topic(Manifest("t", 7), 8)


def test_what_a_reader_may_need_is_kept():
    first, second, third = archive(0, 10), archive(0, 20), archive(0, 30)
    manifests = [
        msgspec.structs.replace(one, version=number + 1, created_us=created)
        for number, (one, created) in enumerate([(first, 0), (second, 100), (third, 200)])
    ]
    paths, old = kept_paths(manifests, now_us=290, keep_us=100)
    assert paths == second.paths() | third.paths()
    assert old == [1]
    assert kept_paths(manifests, now_us=10**9, keep_us=0) == (third.paths(), [1, 2])
    assert kept_paths([], 0, 0) == (set(), [])


# -- on a disk


def test_versions_are_put_once(tmp_path: Path):
    assert newest(tmp_path, "a/b") is None
    manifest = msgspec.structs.replace(archive(0, 10), topic="a/b")
    publish(tmp_path, manifest)
    assert newest(tmp_path, "a/b") == manifest
    assert archived_topics(tmp_path) == ["a/b"]
    with pytest.raises(Fenced):
        publish(tmp_path, msgspec.structs.replace(manifest, created_us=5))
    publish(tmp_path, msgspec.structs.replace(manifest, version=3))
    with pytest.raises(Fenced):
        publish(tmp_path, msgspec.structs.replace(manifest, version=2))
    found = newest(tmp_path, "a/b")
    assert found is not None
    assert found.version == 3
    (tmp_path / state_folder("a/b") / "00000000000000000009.json").write_text("{")
    with pytest.raises(Corrupt, match="damaged"):
        newest(tmp_path, "a/b")


def test_one_of_many_wins(tmp_path: Path):
    won: list[int] = []
    start = threading.Barrier(8)

    def put(number: int) -> None:
        start.wait()
        try:
            put_version(tmp_path, 1, b"%d" % number)
        except Fenced:
            return
        won.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert newest_version(tmp_path) == b"%d" % won[0]
    assert [path.name for path in tmp_path.iterdir()] == ["00000000000000000001.json"]


def parquet(path: Path, first: int, end: int, *, append_us: int = NOON_US, partition: int = 3) -> Path:
    """A file as Spark writes one: everything but the topic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = end - first
    rows = pa.table(
        {
            "partition": pa.array([partition] * count, pa.int32()),
            "offset": pa.array(range(first, end), pa.int64()),
            "value": [b"%d" % number for number in range(first, end)],
            "headers": pa.array(
                [[("h", b"1")], None] * (count // 2) + [[]] * (count % 2), POSITIONED.field("headers").type
            ),
            "timestamp": pa.array([NOON_US + number for number in range(first, end)], TIME),
            "append_time": pa.array([append_us] * count, TIME),
        }
    )
    pq.write_table(rows, path, compression="zstd", row_group_size=7)
    return path


def test_written_files_are_measured_and_moved(tmp_path: Path):
    staging = staging_folder(tmp_path, "t", "run")
    staged = [
        parquet(staging / "a.parquet", 10, 30),
        parquet(staging / "b.parquet", 30, 35, append_us=NOON_US + DAY_US),
        parquet(staging / "empty.parquet", 4, 4),
    ]
    found = measured(staged[0])
    assert found is not None
    assert found[0] == 3
    assert (found[1].first, found[1].end, found[1].rows) == (10, 30, 20)
    assert (found[1].append_min_us, found[1].append_max_us, found[1].time_max_us) == (
        NOON_US,
        NOON_US,
        NOON_US + 29,
    )
    files = settled(tmp_path, "t", staged, "run", hourly=False)[3]
    assert [one.folder for one in files] == ["topic=t/date=2024-10-04", "topic=t/date=2024-10-05"]
    assert all((tmp_path / one.path).stat().st_size == one.bytes for one in files)
    manifest = extended(Manifest("t", 7), {3: ((10, 35), files)}, 1)
    assert archived_time(str(tmp_path), manifest.partitions[3].files, NOON_US + 31) == 31
    assert archived_time(str(tmp_path), manifest.partitions[3].files, NOON_US + 35) is None


def test_rows_of_a_range_and_of_merged_files(tmp_path: Path):
    parts = [parquet(tmp_path / f"{first}.parquet", first, first + 20) for first in (0, 20, 40)]
    found = rows_of(parts[1], ["value"], 25, 33)
    assert [v for batch in found for v in batch.column("offset").to_pylist()] == list(range(25, 33))
    assert list(rows_of(parts[1], ["value"], 0, 20)) == []
    sources = []
    for path in parts:
        one = measured(path)
        assert one is not None
        sources.append(msgspec.structs.replace(one[1], path=path.name))
    merge(str(tmp_path), sources, str(tmp_path / "x" / "merged.parquet"))
    merged = pq.read_table(tmp_path / "x" / "merged.parquet")
    assert merged.equals(pa.concat_tables([pq.read_table(path) for path in parts]))
    assert measured(tmp_path / "x" / "merged.parquet")[1].rows == 60  # type: ignore[index]


def test_a_priority_is_never_null_also_in_files_of_older_archives(tmp_path: Path):
    priorities = [0, None, 4, None]
    for place in range(2):
        path = parquet(tmp_path / f"{place}.parquet", 4 * place, 4 * place + 4)
        rows = pq.read_table(path).append_column("priority", pa.array(priorities, pa.int32()))
        pq.write_table(rows, path)
    [found] = rows_of(tmp_path / "0.parquet", ["priority"], 0, 4)
    assert found.column("priority").to_pylist() == [0, 2, 4, 2]
    sources = [ArchiveFile(f"{n}.parquet", 4 * n, 4 * n + 4, 4, 0, 0, 0, 0, 0) for n in range(2)]
    merge(str(tmp_path), sources, str(tmp_path / "x" / "merged.parquet"))
    merged = pq.read_table(tmp_path / "x" / "merged.parquet")
    assert merged["priority"].to_pylist() == [0, 2, 4, 2] * 2


def test_merged_files_go_when_their_readers_have_had_their_time(tmp_path: Path):
    old = [parquet(tmp_path / f"topic=t/date=1/{first}.parquet", first, first + 10) for first in (0, 10)]
    new = parquet(tmp_path / "topic=t/date=1/new.parquet", 0, 20)
    files = [
        msgspec.structs.replace(file(first, first + 10), path=f"topic=t/date=1/{first}.parquet")
        for first in (0, 10)
    ]
    before = Manifest("t", 7, 1, 1, {0: Cover(0, 20, tuple(files))})
    merged = msgspec.structs.replace(file(0, 20), path="topic=t/date=1/new.parquet")
    publish(tmp_path, before)
    publish(tmp_path, replaced(before, [(0, files, merged)], 1000))
    assert remove_garbage(tmp_path, "t", 1500, 500) == 0
    assert remove_garbage(tmp_path, "t", 1501, 500) == 2
    assert [path.exists() for path in (*old, new)] == [False, False, True]
    assert len(list((tmp_path / state_folder("t")).iterdir())) == 1


def test_garbage_goes_when_it_is_old(tmp_path: Path):
    named = parquet(tmp_path / "topic=t/date=1/named.parquet", 0, 10)
    orphan = parquet(tmp_path / "topic=t/date=1/orphan.parquet", 0, 10)
    other = parquet(tmp_path / "topic=u/date=1/orphan.parquet", 0, 10)
    staging = staging_folder(tmp_path, "t", "killed")
    staging.mkdir(parents=True)
    one = msgspec.structs.replace(file(0, 10), path="topic=t/date=1/named.parquet")
    publish(tmp_path, Manifest("t", 7, 1, 1, {0: Cover(0, 10, (one,))}))
    now_us = orphan.stat().st_mtime_ns // 1000
    assert remove_garbage(tmp_path, "t", now_us + DAY_US // 2, 0) == 0, "a run may be about to name it"
    assert remove_garbage(tmp_path, "t", now_us + 2 * DAY_US, DAY_US) == 1
    assert (named.exists(), orphan.exists(), other.exists(), staging.exists()) == (True, False, True, False)


# -- plans of reads


def plan(have: Known, **options: str) -> list[tuple[int, int, str]]:
    given = {"topic": "t", "mode": "archive", "archive": "unused", "url": "tailrace://unused:1", **options}
    return [
        (part.start, part.end, part.source.rpartition("/")[2]) for part in planned(read_options(given), have)
    ]


def test_reads_cross_the_boundary():
    have = Known({"t": archive(5, 10, 20)}, {("t", 0): (12, 30)}, None)
    assert plan(have) == [(5, 10, "5-10.parquet"), (10, 20, "10-20.parquet"), (20, 30, "")]
    assert plan(have, start="8", end="25", rows_per_partition="3") == [
        (8, 10, "5-10.parquet"),
        (10, 12, "10-20.parquet"),
        (12, 15, "10-20.parquet"),
        (15, 17, "10-20.parquet"),
        (17, 20, "10-20.parquet"),
        (20, 22, ""),
        (22, 25, ""),
    ]
    assert plan(have, start="22") == [(22, 30, "")]
    assert plan(have, end="5") == []
    with pytest.raises(NotFound, match="offsets 0 to 4 of t/0 are gone"):
        plan(have, start="0")
    with pytest.raises(InvalidRequest, match="end: t/0 has no offset 31"):
        plan(have, end="31")


def test_log_alone_and_archive_alone():
    assert plan(Known({}, {("t", 0): (3, 9)}, None)) == [(3, 9, "")]
    assert plan(Known({"t": archive(0, 4)}, {}, None)) == [(0, 4, "0-4.parquet")]
    before = Known({"t": archive(10, 20)}, {("t", 0): (5, 30)}, None)
    assert plan(before) == [(5, 10, ""), (10, 20, "10-20.parquet"), (20, 30, "")]
    assert plan(before, end="8") == [(5, 8, "")]
    new_partition = Known({"t": archive(0, 4)}, {("t", 0): (0, 4), ("t", 1): (0, 2)}, None)
    assert plan(new_partition) == [(0, 4, "0-4.parquet"), (0, 2, "")]


def test_gaps_are_loss(caplog):
    gap = Known({"t": archive(0, 10)}, {("t", 0): (15, 30)}, None)
    with pytest.raises(NotFound, match=r"t/0: .*offsets 10 to 14 lies between the archive and the log"):
        plan(gap)
    assert plan(gap, fail_on_data_loss="false") == [(0, 10, "0-10.parquet"), (15, 30, "")]
    assert "offsets 10 to 14" in caplog.text
    assert plan(gap, start="20") == [(20, 30, "")]
    assert plan(gap, end="10") == [(0, 10, "0-10.parquet")]
    hole = Known({"t": Manifest("t", 7, 1, 1, {0: Cover(0, 20, (file(0, 5), file(8, 20)))})}, {}, None)
    with pytest.raises(NotFound, match=r"offsets 5 to 7 is not in the archive"):
        plan(hole)
    with pytest.raises(Corrupt, match="another broker"):
        plan(Known({"t": archive(0, 10)}, {("t", 0): (0, 9)}, None))
