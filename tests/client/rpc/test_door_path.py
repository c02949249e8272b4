"""Where a door is: in the data folder, or where a file says; a place that others could have made is none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tailrace.client.rpc.door_path import data_folder, find_door, fits
from tailrace.errors import InvalidRequest


def listen(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def room_of(folder: Path, mode: int = 0o700) -> Path:
    room = folder / "room"
    room.mkdir(mode=0o700)
    room.chmod(mode)
    return room


def named(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "embedded.address"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_socket_in_the_folder_is_the_door(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        find_door(str(tmp_path))
    with listen(tmp_path / "embedded.sock"):
        path, owners = find_door(str(tmp_path))
    assert path == f"{tmp_path}/embedded.sock"
    assert owners == {os.geteuid(), 0}


def test_a_file_names_a_door_elsewhere(tmp_path: Path) -> None:
    room = room_of(tmp_path)
    named(tmp_path, f"{room}/embedded.sock\n")
    assert find_door(str(tmp_path))[0] == f"{room}/embedded.sock"


@pytest.mark.parametrize("text", ["", "relative/embedded.sock", "/" + "x" * 200, "\n"])
def test_a_file_that_names_nothing_is_refused(tmp_path: Path, text: str) -> None:
    named(tmp_path, text)
    with pytest.raises(InvalidRequest, match="does not hold the path of a socket"):
        find_door(str(tmp_path))


def test_a_file_that_others_may_write_is_not_followed(tmp_path: Path) -> None:
    room = room_of(tmp_path)
    path = named(tmp_path, f"{room}/embedded.sock", 0o666)
    with pytest.raises(InvalidRequest, match="may be somebody else's"):
        find_door(str(tmp_path))
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        find_door(str(tmp_path))


def test_a_room_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    room = room_of(tmp_path, 0o755)
    named(tmp_path, f"{room}/embedded.sock")
    with pytest.raises(InvalidRequest, match="is not a folder of this user alone"):
        find_door(str(tmp_path))
    room.chmod(0o700)
    (tmp_path / "link").symlink_to(room)
    named(tmp_path, f"{tmp_path}/link/embedded.sock")
    with pytest.raises(InvalidRequest, match="is not a folder of this user alone"):
        find_door(str(tmp_path))


def test_the_longest_path() -> None:
    assert fits("/" + "x" * 106)
    assert not fits("/" + "x" * 107)
    assert not fits("/" + "\u00e4" * 54)


def test_data_folders_are_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert data_folder("~/data") == f"{tmp_path}/data"
    assert data_folder("./a/../data") == f"{tmp_path}/data"
    assert data_folder("data/") == f"{tmp_path}/data"
    with pytest.raises(InvalidRequest, match="home folder"):
        data_folder("~nobody-of-that-name/data")
