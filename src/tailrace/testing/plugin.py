"""The pytest plug-in: fixtures with a broker in the test process, and with a real server process.

Every pytest run on a machine with Tailrace imports this module, so it imports nothing itself; the fixtures
do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tailrace.testing.local_broker import LocalBroker
    from tailrace.testing.server_process import ServerProcess


@pytest.fixture
def tailrace_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBroker]:
    """A broker in the test process with a clock that the test moves; `tailrace.connect()` finds it."""
    from tailrace.testing.local_broker import LocalBroker

    with LocalBroker() as broker:
        monkeypatch.setenv("TAILRACE_URL", broker.url)
        yield broker


@pytest.fixture
def tailrace_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """`tailrace serve` as a process, started when first used. Its log is shown when the test fails."""
    from tailrace.testing.server_process import ServerProcess

    with ServerProcess(tmp_path / "tailrace") as server:
        yield server
        if server.log:
            print(server.log, file=sys.stderr)
