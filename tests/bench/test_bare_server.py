"""The bare server takes every byte, in a stream, frame by frame, and through TLS."""

from pathlib import Path

import pytest

from bench import certificates
from bench.bare_server import Transfer, frame_bytes, measure


@pytest.mark.parametrize("one_by_one", [False, True])
def test_every_frame_is_in_the_file(tmp_path: Path, one_by_one: bool) -> None:
    frame = frame_bytes(500, 100)
    frames = 40  # more than one buffer of the server, and not a multiple of it
    job = Transfer(str(tmp_path / "file"), frame, seconds=60, bytes_max=frame * frames, one_by_one=one_by_one)
    assert measure(job, tmp_path / "log") > 0
    assert (tmp_path / "file").stat().st_size == frame * frames
    assert (tmp_path / "log").read_text() == ""


def test_every_frame_goes_through_tls(tmp_path: Path) -> None:
    made = certificates.make(tmp_path)
    frame = frame_bytes(500, 100)
    frames = 700  # more than all buffers of the server together, so that it has to wait for the file
    job = Transfer(
        str(tmp_path / "file"),
        frame,
        seconds=60,
        bytes_max=frame * frames,
        authority=made.authority,
        certificate=made.certificate,
        key=made.key,
    )
    assert measure(job, tmp_path / "log") > 0
    assert (tmp_path / "file").stat().st_size == frame * frames
    assert (tmp_path / "log").read_text() == ""


def test_time_ends_a_transfer(tmp_path: Path) -> None:
    job = Transfer(str(tmp_path / "file"), 1000, seconds=0.1, bytes_max=10**9, one_by_one=True)
    rate = measure(job, tmp_path / "log")
    size = (tmp_path / "file").stat().st_size
    assert 0 < size < 10**9
    assert size % 1000 == 0
    assert rate >= size / 1000 / 10
