"""The set-up of docs/security.md works as it stands there: its ten commands, and what comes out of them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.config import known_keys
from tests.e2e.broker_process import SRC

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
COMMANDS_MAX = 10
TIMEOUT_S = 120


def commands() -> list[str]:
    """The lines of the set-up."""
    section = PAGE.partition("\n## Set up in ten commands\n")[2]
    (block, *_) = re.findall(r"```sh\n(.*?)```", section, re.S)
    joined = re.sub(r"\\\n\s*", "", block)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_there_are_ten() -> None:
    assert len(commands()) == COMMANDS_MAX


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_the_set_up_works(tmp_path: Path) -> None:
    """But for the installation, and with a name and ports of this machine."""
    first, *rest = commands()
    assert first.startswith("pip install")
    port, pages = free_port(), free_port()
    script = "\n".join(["set -eu", "umask 022", *rest])
    for written, here in (
        ("broker.example.com", "localhost"),
        ("0.0.0.0:7400", f"0.0.0.0:{port}"),
        (":7400", f":{port}"),
        (":7480", f":{pages}"),
    ):
        script = script.replace(written, here)
    program = tmp_path / "bin" / "tailrace"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tailrace.cli "$@"\n')
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    environment = {
        **kept,
        "PATH": f"{program.parent}:{kept['PATH']}",
        "PYTHONPATH": SRC,
        "HOME": str(tmp_path),
    }
    said = tmp_path / "said"
    with said.open("wb") as output:
        run = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = run.wait(TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # Of a script that failed, nothing may be left.
                os.killpg(run.pid, signal.SIGTERM)  # The broker is left running, as it should be.
    words = said.read_text(errors="replace")
    assert status == 0, words
    assert "shop" in words.splitlines()[-1] or "shop" in words[-300:], words
    assert (tmp_path / "shop.token").read_text().startswith("trt_")
    for name in ("data/admin.token", "data/access.json"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_every_option_of_security_is_on_the_page() -> None:
    wanted = [key for key in known_keys() if key.startswith(("tls.", "audit.")) or key.endswith("insecure")]
    wanted += ["listen", "http_listen"]
    assert [key for key in wanted if f"| `{key}` |" not in PAGE] == []
    assert [
        name
        for name in ("URL", "TOKEN", "CA", "CERT", "KEY", "CREDENTIALS")
        if f"`TAILRACE_{name}`" not in PAGE
    ] == []
