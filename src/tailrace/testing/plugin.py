"""The pytest plug-in: fixtures with a broker in the test process, and with a real server process.

Every pytest run on a machine with Tailrace imports this module, so it imports nothing; what the fixtures
need is loaded when they name it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace import testing


@pytest.fixture
def tailrace_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[testing.LocalBroker]:
    """A broker in the test process with a clock that the test moves; `tailrace.connect()` finds it."""
    with testing.LocalBroker() as broker:
        monkeypatch.setenv("TAILRACE_URL", broker.url)
        yield broker


@pytest.fixture
def tailrace_server(tmp_path: Path) -> Iterator[testing.ServerProcess]:
    """`tailrace serve` as a process, started when first used. Its log is shown when the test fails."""
    with testing.ServerProcess(tmp_path / "tailrace") as server:
        yield server
        if server.log:
            print(server.log, file=sys.stderr)
