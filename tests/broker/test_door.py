"""The door of a folder: where it is made, who may come in, what a dead broker left, what stays afterwards."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from tailrace.broker.door import Door, OwnersOnly
from tailrace.client.rpc.door_path import find_door
from tailrace.core.model.access import OWNER, Caller, Origin
from tailrace.core.model.identifiers import Refusal
from tailrace.format.wire import Credentials


class Ear:
    """Listens, as a listener does."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    async def start_unix(self, path: str) -> None:
        made = socket.socket(socket.AF_UNIX)
        made.bind(path)
        made.listen()
        self._sockets.append(made)

    def stop(self) -> None:
        for made in self._sockets:
            os.unlink(made.getsockname())
            made.close()


def long_folder(base: Path) -> Path:
    folder = base / ("long-" * 25)
    folder.mkdir()
    return folder


def opened(folder: Path) -> tuple[Door, Ear]:
    door, ear = Door(str(folder)), Ear()
    asyncio.run(door.open(ear))
    return door, ear


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)  # type: ignore[misc]


@pytest.fixture
def short() -> Path:
    with tempfile.TemporaryDirectory(prefix="data") as folder:
        yield Path(folder)  # type: ignore[misc]


def test_a_door_in_the_folder(short: Path) -> None:
    door, ear = opened(short)
    assert door.path == f"{short}/embedded.sock" == find_door(str(short))[0]
    ear.stop()
    door.close()
    assert list(short.iterdir()) == []


def test_a_door_elsewhere_where_the_path_is_too_long(tmp_path: Path, runtime: Path) -> None:
    folder = long_folder(tmp_path)
    door, ear = opened(folder)
    room = Path(door.path).parent
    assert room.parent == runtime
    assert stat.S_IMODE(room.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "embedded.address").stat().st_mode) == 0o600
    assert find_door(str(folder))[0] == door.path
    ear.stop()
    door.close()
    assert list(folder.iterdir()) == list(runtime.iterdir()) == []


def test_what_a_dead_broker_left_is_removed(tmp_path: Path, runtime: Path, short: Path) -> None:
    folder = long_folder(tmp_path)
    first, _ = opened(folder)
    second, ear = opened(folder)
    assert second.path != first.path
    assert [item.name for item in runtime.iterdir()] == [Path(second.path).parent.name]
    ear.stop()
    second.close()
    dead, _ = opened(short)
    alive, ear = opened(short)
    assert alive.path == dead.path
    ear.stop()


def test_only_what_a_broker_left_is_removed(tmp_path: Path, runtime: Path) -> None:
    folder = long_folder(tmp_path)
    for name, mode in (("tailrace-mine", 0o755), ("documents", 0o700)):
        room = tmp_path / name
        room.mkdir()
        room.chmod(mode)
        (room / "embedded.sock").write_text("precious")
        (folder / "embedded.address").write_text(f"{room}/embedded.sock\n")
        door, ear = opened(folder)
        ear.stop()
        door.close()
        assert (room / "embedded.sock").read_text() == "precious"


@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_a_runtime_folder_that_others_may_change_is_not_used(
    tmp_path: Path, runtime: Path, mode: int
) -> None:
    runtime.chmod(mode)
    door, ear = opened(long_folder(tmp_path))
    assert Path(door.path).parent.parent == Path(tempfile.gettempdir())
    ear.stop()
    door.close()


def test_no_door_is_told_and_no_error(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tailrace.door")

    class Deaf:
        async def start_unix(self, path: str) -> None:
            raise PermissionError("this file system has no sockets")

    folder = long_folder(tmp_path)
    door = Door(str(folder))
    asyncio.run(door.open(Deaf()))
    assert door.path == ""
    assert f"nobody can join the broker that works in {folder}: this file system" in caplog.text
    assert list(runtime.iterdir()) == list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("uid", "good"), [(os.geteuid(), True), (0, True), (os.geteuid() + 4711, False), (None, False)]
)
def test_only_the_owner_comes_in(uid: int | None, good: bool) -> None:
    outcomes: list[Caller | Refusal] = []
    keeper = OwnersOnly()
    keeper.authenticate(Credentials(token="of-somebody"), Origin("", uid=uid), outcomes.append)
    (outcome,) = outcomes
    if good:
        assert outcome == OWNER
        assert keeper.still(OWNER, 1) is None
    else:
        assert isinstance(outcome, Refusal)
        assert outcome.code == "unauthenticated"
