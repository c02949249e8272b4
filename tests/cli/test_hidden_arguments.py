"""The list of processes shows no secret of a command line, and the command works all the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SRC = str(Path(__file__).resolve().parents[2] / "src")
SECRET = "hunter2-in-a-command-line"
LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"tailrace://anna:{SECRET}@", ""),
        ("tailrace://", f"?token={SECRET}"),
        (f"tailrace://anna:a@b:{SECRET}@", ""),
    ],
)
def test_the_list_of_processes_shows_no_secret(before: str, after: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        port = server.getsockname()[1]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tailrace.cli", "topic", "list"),
                *("--url", f"{before}127.0.0.1:{port}{after}"),
                *("--timeout", "0.5"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": SRC},
        )
        try:
            if "a@b" not in before:  # That one is refused: @ has to be encoded.
                peer, _ = server.accept()
                with peer:
                    sent = peer.recv(4096)
                    shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                assert SECRET.encode() in sent, "the command itself knows it"
                assert SECRET.encode() not in shown
                assert b"topic\0list\0--url\0tailrace://" in shown
            told = process.communicate(timeout=LIMIT_S)[0].decode()
        finally:
            process.kill()
            process.wait()
    assert SECRET not in told
    assert process.returncode in (2, 18)
