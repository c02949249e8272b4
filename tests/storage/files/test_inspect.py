"""Looking at the files of a log offline: what is said of good, torn and damaged ones; nothing changes."""

import os
from pathlib import Path

import pytest

from tailrace.errors import NotFound
from tailrace.ports import Snapshot
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.files.inspect import inspect_log, verify_log
from tests.storage.frame_maker import FrameMaker, TestClock, unheard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store, maker = FileStore(tmp_path, TestClock(), segment_bytes=4096), FrameMaker()
    log = store.log("topic/0", unheard)
    log.recover()
    for _ in range(10):
        log.append([maker.data(800)], sync=True)
    log.save_snapshot(Snapshot(4, 50, [b"state"]))
    store.close()
    return tmp_path / "topic" / "0"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_rows(folder: Path) -> None:
    before = contents(folder)
    rows = list(inspect_log(folder))
    assert [(row.kind, row.file) for row in rows] == [
        ("segment", f"{0:020d}.log"),
        ("segment", f"{3:020d}.log"),
        ("segment", f"{6:020d}.log"),
        ("segment", f"{9:020d}.log"),
        ("snapshot", f"snapshot-{4:020d}.snap"),
        ("mark", "durable"),
    ]
    assert [(row.first_entry, row.end_entry, row.base_offset, row.end_offset) for row in rows[:4]] == [
        (0, 3, 0, 30),
        (3, 6, 30, 60),
        (6, 9, 60, 90),
        (9, 10, 90, 100),
    ]
    assert [row.sealed for row in rows[:4]] == [True, True, True, False]
    assert [row.frames for row in rows[:4]] == [3, 3, 3, 1]
    assert (rows[1].first_append_us, rows[1].last_append_us) == (3, 5)
    assert (rows[4].end_entry, rows[4].end_offset) == (5, 50)
    assert (rows[5].first_entry, rows[5].position, rows[5].end_offset) == (9, rows[3].bytes, 100)
    assert not any(row.problem for row in rows)
    assert verify_log(folder) == []
    assert contents(folder) == before


def test_problems_are_named(folder: Path) -> None:
    flip(folder / f"{3:020d}.log", 300)
    flip(folder / f"{0:020d}.idx", 20)
    flip(folder / f"snapshot-{4:020d}.snap", 20)
    (folder / f"{6:020d}.idx").unlink()
    before = contents(folder)
    problems = {problem.file: problem for problem in verify_log(folder)}
    assert problems[f"{3:020d}.log"].fatal
    assert "checksum" in problems[f"{3:020d}.log"].what
    assert not problems[f"{0:020d}.idx"].fatal
    assert "missing" in problems[f"{6:020d}.idx"].what
    assert "checksum" in problems[f"snapshot-{4:020d}.snap"].what
    assert len(problems) == 4
    assert contents(folder) == before


def test_torn_tail_is_no_damage(folder: Path) -> None:
    with (folder / f"{9:020d}.log").open("ab") as file:
        file.write(b"half a frame")
    (problem,) = verify_log(folder)
    assert (problem.file, problem.fatal) == (f"{9:020d}.log", False)


def test_durable_frame_missing_is_damage(folder: Path) -> None:
    os.truncate(folder / f"{9:020d}.log", 200)
    (problem,) = verify_log(folder)
    assert (problem.file, problem.fatal) == (f"{9:020d}.log", True)


def test_no_log(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        verify_log(tmp_path / "none")
    with pytest.raises(NotFound):
        list(inspect_log(tmp_path / "none" / "nested"))
