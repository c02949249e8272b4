"""The audit log on a real disk: lines, rotation, a disk that fails, files that somebody else has touched."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.storage import audit_log as module
from tailrace.storage.audit_log import AuditLog


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., AuditLog]]:
    made: list[AuditLog] = []

    def new(bytes_max: int = 1000, files_max: int = 3) -> AuditLog:
        made.append(AuditLog(tmp_path / "audit.log", bytes_max=bytes_max, files_max=files_max))
        return made[-1]

    yield new
    for log in made:
        log.close()


def wait_until(true: Callable[[], bool]) -> None:
    """The thread of the log goes its own way; it gets ten seconds for it."""
    event = threading.Event()
    for _ in range(1000):
        if true():
            return
        event.wait(0.01)
    raise AssertionError("that did not happen")


def text(path: Path) -> str:
    return path.read_text(encoding="ascii")


def test_lines_are_there_after_close_in_order_and_only_for_the_owner(
    tmp_path: Path, make: Callable[..., AuditLog]
) -> None:
    old = os.umask(0)
    try:
        log = make()
        assert not log.path.exists(), "nothing is made before there is a line"
        assert all(log.put(b"line %d\n" % number) for number in range(50))
        log.close()
    finally:
        os.umask(old)
    assert text(log.path) == "".join(f"line {number}\n" for number in range(50))
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert log.lines == 50
    assert not log.put(b"too late\n")


def test_files_are_rotated_by_size_and_the_oldest_goes(tmp_path: Path, make: Callable[..., AuditLog]) -> None:
    log = make(bytes_max=100, files_max=3)
    for number in range(40):
        assert log.put(b"%09d\n" % number)
    log.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.log", "audit.log.1", "audit.log.2"]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    kept = [int(row) for name in reversed(names) for row in text(tmp_path / name).split()]
    assert kept == list(range(40 - len(kept), 40))
    assert 20 < len(kept) <= 30


def test_one_file_only_begins_anew(tmp_path: Path, make: Callable[..., AuditLog]) -> None:
    log = make(bytes_max=100, files_max=1)
    for number in range(25):
        log.put(b"%09d\n" % number)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["audit.log"]
    assert text(log.path).split()[-1] == "000000024"


def test_a_line_above_the_size_of_a_file_is_written_whole(
    tmp_path: Path, make: Callable[..., AuditLog]
) -> None:
    log = make(bytes_max=100)
    for line in (b"a\n", b"b" * 300 + b"\n", b"c\n"):
        assert log.put(line)
    log.close()
    assert text(tmp_path / "audit.log.2") == "a\n"
    assert text(tmp_path / "audit.log.1") == "b" * 300 + "\n"
    assert text(tmp_path / "audit.log") == "c\n"


def test_another_start_goes_on_and_ends_a_torn_line(tmp_path: Path, make: Callable[..., AuditLog]) -> None:
    (tmp_path / "audit.log").write_text("whole\ntor")
    (tmp_path / "audit.log").chmod(0o644)
    log = make()
    log.put(b"next\n")
    log.close()
    assert text(log.path) == "whole\ntor\nnext\n"
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    again = make()
    again.put(b"last\n")
    again.close()
    assert text(log.path) == "whole\ntor\nnext\nlast\n"


def test_a_disk_that_fails_is_told_and_tried_again_and_no_line_is_lost(
    tmp_path: Path, make: Callable[..., AuditLog]
) -> None:
    (tmp_path / "audit.log").mkdir()
    log = make(bytes_max=10_000)
    for number in range(20):
        assert log.put(b"%d\n" % number)
    wait_until(lambda: log.trouble is not None)
    assert log.trouble is not None
    assert "audit.log cannot be written" in log.trouble
    assert log.lines == 0
    (tmp_path / "audit.log").rmdir()
    wait_until(lambda: log.lines == 20 and log.trouble is None)
    log.close()
    assert text(log.path) == "".join(f"{number}\n" for number in range(20))


def test_what_does_not_fit_while_the_disk_fails_is_refused(
    tmp_path: Path, make: Callable[..., AuditLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINES_MAX", 5)
    (tmp_path / "audit.log").mkdir()
    log = make()
    assert log.put(b"first\n")
    wait_until(lambda: log.trouble is not None)
    assert [log.put(b"x\n") for _ in range(7)] == [True] * 5 + [False] * 2
    log.close()  # It does not wait for the disk for ever.


def test_bytes_that_wait_are_bounded_too(
    tmp_path: Path, make: Callable[..., AuditLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES_MAX", 1_000)
    (tmp_path / "audit.log").mkdir()
    log = make()
    assert not log.put(bytes(1_001))
    log.put(b"first\n")
    wait_until(lambda: log.trouble is not None)
    assert log.put(b"x" * 999 + b"\n")
    assert not log.put(b"x\n")


@pytest.mark.parametrize("what", ["link", "fifo"])
def test_it_writes_into_no_link_and_no_pipe(tmp_path: Path, make: Callable[..., AuditLog], what: str) -> None:
    target = tmp_path / "elsewhere"
    if what == "link":
        target.write_text("precious")
        (tmp_path / "audit.log").symlink_to(target)
    else:
        os.mkfifo(tmp_path / "audit.log")
    log = make()
    log.put(b"line\n")
    wait_until(lambda: log.trouble is not None)
    log.close()
    assert what == "fifo" or target.read_text() == "precious"


def test_a_file_that_was_removed_or_renamed_is_made_again(
    tmp_path: Path, make: Callable[..., AuditLog]
) -> None:
    log = make()
    log.put(b"one\n")
    wait_until(lambda: log.lines == 1)
    log.path.unlink()
    log.put(b"two\n")
    wait_until(lambda: log.lines == 2)
    assert text(log.path) == "two\n"
    log.path.rename(tmp_path / "moved")
    log.put(b"three\n")
    wait_until(lambda: log.lines == 3)
    assert text(log.path) == "three\n"
    log.close()


def test_a_log_that_was_never_written_ends_at_once(make: Callable[..., AuditLog]) -> None:
    log = make()
    log.close()
    log.close()
    assert not log.path.exists()
