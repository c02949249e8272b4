"""Every example runs against a real broker, says what it should, and can be run twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.broker_process import SRC, BrokerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "job_queue.py": ["done: [0, 1, 2, 3, 4, 5, 6, 7,", "attempt 2", "because it was rejected: not a job"],
    "event_store.py": [
        "3 of 5 withdrawals of 30 succeeded, 10 are left at version 5",
        "Withdrawn(amount=30)",
    ],
    "outbox.py": [
        "the next relay wrote something new: False",
        "published: ['order 1', 'order 2', 'order 3', 'order 4']",
    ],
    "saga.py": [
        "order 1 is closed: on its way to Portugal",
        "there is no way to Atlantis; paid back",
        "order 2 is closed: cancelled",
    ],
}


def test_every_example_is_listed() -> None:
    assert sorted(SAYS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> BrokerProcess:
    with BrokerProcess(tmp_path_factory.mktemp("examples") / "data").start() as process:
        yield process


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str, broker: BrokerProcess) -> None:
    said = run_example(name, broker)
    for words in SAYS[name]:
        assert words in said, said
    run_example(name, broker)


def test_the_jobs_are_shared_by_all_workers(broker: BrokerProcess) -> None:
    (line,) = [line for line in run_example("job_queue.py", broker).splitlines() if line.startswith("shared")]
    shares = [int(part.split()[-1]) for part in line.removeprefix("shared: ").split(", ")]
    assert len(shares) == 5
    assert sum(shares) == 40
    assert min(shares) >= 1
    assert max(shares) <= 24, line


def run_example(name: str, broker: BrokerProcess) -> str:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "PYTHONPATH": SRC, "TAILRACE_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
