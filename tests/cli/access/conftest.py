"""Commands against a broker inside the test process, which takes every caller for its owner."""

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.testing import LocalBroker
from tests.cli.conftest import Done, invoke


class Local:
    """A broker in the test process, and the command line run against it."""

    def __init__(self, broker: LocalBroker) -> None:
        self.broker = broker

    def run(self, *arguments: str, stdin: bytes = b"") -> Done:
        """Run a command line."""
        return invoke(*arguments, stdin=stdin, TAILRACE_URL=self.broker.url)

    def rows(self, *arguments: str, stdin: bytes = b"") -> list[dict[str, Any]]:
        """The JSON lines of a command that must succeed."""
        done = self.run(*arguments, "--json", stdin=stdin)
        assert done.status == 0, done.err
        return done.rows


@pytest.fixture
def local() -> Iterator[Local]:
    """A broker that knows nobody yet."""
    with LocalBroker() as broker:
        yield Local(broker)
