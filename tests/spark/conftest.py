"""One broker and one Spark session for all tests here, which run last and in one process.

No Java process outlives the run: a test that hangs is ended by its time-out, and at the end whatever is left
of a session is killed.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace import sync
from tailrace.spark import sessions
from tests.e2e.broker_process import BrokerProcess
from tests.spark import process_tree

FOLDER = Path(__file__).parent
STOP_S = 20.0
SEGMENT_BYTES = 1024 * 1024

MakeTopic = Callable[..., str]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spark comes last: first everything else, then what is here and needs no session."""
    items.sort(key=lambda item: (FOLDER in item.path.parents) + ("spark" in _fixtures(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that was ended while Spark owed it an answer leaves a session that no other test can use."""
    report = yield
    if call.excinfo is not None and "Timeout (>" in str(call.excinfo.value) and "spark" in _fixtures(item):
        item.session.shouldfail = f"{item.nodeid} hung, and with it the Spark session of the tests behind it"
    return report


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Whatever happened, no Java is left behind."""
    process_tree.kill([seen for seen in process_tree.tree(os.getpid()) if process_tree.name(seen) == "java"])


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A real broker that all tests share; its segments are small, so that they rotate. Do not stop it."""
    data = tmp_path_factory.mktemp("broker") / "data"
    with BrokerProcess(data, storage_segment_bytes=SEGMENT_BYTES).start() as process:
        yield process


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker of the test's own, to be killed and started again."""
    with BrokerProcess(tmp_path / "data", storage_segment_bytes=SEGMENT_BYTES).start() as process:
        yield process


@pytest.fixture(scope="session")
def client(broker: BrokerProcess) -> Iterator[sync.Client]:
    """A blocking client of the shared broker."""
    with sync.connect(broker.url) as connected:
        yield connected


_numbers = itertools.count(1)


@pytest.fixture
def topic(client: sync.Client, request: pytest.FixtureRequest) -> MakeTopic:
    """Makes topics with names of their own on the shared broker: `topic(partitions=3)` gives the name."""

    def make(**options: Any) -> str:
        name = f"{request.node.originalname.removeprefix('test_')[:60]}-{next(_numbers)}"
        client.admin().create_topic(name, **{"partitions": 2, "durability": "interval", **options})
        return name

    return make


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one Spark session, `local[2]`. Configuration that a test changes it has to change back."""
    folder = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.log.level": "ERROR",
    }
    made = sessions.session("tests", master="local[2]", conf=conf)
    try:
        yield made
    finally:
        _end(made)


def _end(session: Any) -> None:
    """Stop a session if it lets itself be stopped, and end its JVM and the workers in any case."""
    jvm = session.sparkContext._gateway.proc
    seen = process_tree.tree(jvm.pid)
    stopping = threading.Thread(target=session.stop, daemon=True)
    stopping.start()
    stopping.join(STOP_S)
    jvm.stdin.close()  # The JVM leaves when it cannot read any more.
    seen += process_tree.tree(jvm.pid)
    if not process_tree.gone(seen, STOP_S):
        process_tree.kill(seen)
    jvm.wait()
