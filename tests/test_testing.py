"""The fixtures for tests of applications: virtual time, restarts, faults, other threads, a real process.

Covers `testing/local_broker.py`, `testing/plugin.py` and `testing/server_process.py`.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.sync
from tailrace.core.model.commands import Fetch, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import (
    AlreadyExists,
    Full,
    InvalidRequest,
    NotFound,
    StorageFault,
    Unavailable,
)
from tailrace.testing import LocalBroker, ServerProcess, open_local

ROOT = Path(__file__).resolve().parents[1]
SECOND_US = 1_000_000


async def publish(*values: bytes, topic: str = "t", **fields: Any) -> list[int]:
    async with tailrace.connect() as client, client.producer(topic) as producer:
        return [(await producer.publish(value, **fields)).offset for value in values]


def values(broker: LocalBroker, topic: str = "t") -> list[bytes | None]:
    return [message.value for message in broker.published(topic)]


# -- the plug-in ---------------------------------------------------------------------------------------------


def test_the_plug_in_imports_nothing_heavy() -> None:
    heavy = ["asyncio", "msgspec", "numpy", "pyarrow", "uvloop", "tailrace.broker", "tailrace.client"]
    program = (
        f"import sys, tailrace.testing.plugin; print(*[name for name in {heavy} if name in sys.modules])"
    )
    stub = "import sys; sys.modules['pytest'] = stub = type(sys)('pytest'); stub.fixture = id; "
    done = subprocess.run(
        [sys.executable, "-c", stub + program], capture_output=True, text=True, timeout=60, env=env()
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def env(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **more}


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest as a user has it: the plug-in is known by nothing but the entry point of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "site" / "tailrace-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tailrace\nVersion: 0\n")
    points = project["entry-points"]["pytest11"]
    lines = ["[pytest11]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    paths = os.pathsep.join([str(folder / "site"), str(ROOT / "src")])
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=110, env=env(PYTHONPATH=paths)
    )


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_page.py").write_text("\n\n".join(blocks), encoding="utf-8")
    done = run_pytest(tmp_path, "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{page.count('def test_')} passed" in done.stdout


def test_workers_of_xdist_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(
        """
import asyncio, pytest, tailrace

@pytest.mark.parametrize("number", range(20))
def test_one(tailrace_broker, number):
    tailrace_broker.create_topic("same", partitions=1)

    async def main():
        async with tailrace.connect() as client, client.producer("same") as producer:
            assert (await producer.publish(b"x")).offset == 0

    asyncio.run(main())
""",
        encoding="utf-8",
    )
    done = run_pytest(tmp_path, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 passed" in done.stdout


@pytest.mark.alone
def test_the_fixture_is_quick() -> None:
    """20 ms are the promise for set-up, a round trip and tear-down; the best of some leaves load out."""

    def once() -> float:
        start_s = time.perf_counter()
        with LocalBroker() as broker:
            broker.create_topic("t")

            async def main() -> bytes | None:
                async with broker.client() as client:
                    async with client.producer("t") as producer:
                        await producer.publish(b"x")
                    async with client.reader("t", start="earliest") as reader:
                        async for message in reader:
                            return message.value
                return None

            assert asyncio.run(main()) == b"x"
        return time.perf_counter() - start_s

    assert min(once() for _ in range(10)) < 0.02


# -- a broker in the test ------------------------------------------------------------------------------------


def test_published_has_everything_in_order(tailrace_broker: LocalBroker) -> None:
    topic = tailrace_broker.create_topic("t", partitions=2)
    assert (topic.name, topic.options["partitions"], topic.created) == ("t", 2, True)
    asyncio.run(publish(b"a", b"b", partition=1, key=b"k", headers={"h": b"1"}, priority=0))
    asyncio.run(publish(b"c", partition=0))
    messages = tailrace_broker.published("t")
    assert [(m.partition, m.offset, m.value) for m in messages] == [(0, 0, b"c"), (1, 0, b"a"), (1, 1, b"b")]
    assert (messages[1].key, messages[1].headers, messages[1].priority) == (b"k", [("h", b"1")], 0)
    assert messages[0].append_time == tailrace_broker.clock.now


def test_published_leaves_out_what_is_trimmed(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> None:
        async with tailrace.connect() as client:
            async with client.producer("t") as producer:
                await (await producer.send_many([b"0", b"1", b"2"]))
            await client.admin().trim_topic("t", 0, 1)

    asyncio.run(main())
    assert values(tailrace_broker) == [b"1", b"2"]
    with pytest.raises(NotFound, match="no topic 'u'"):
        tailrace_broker.published("u")


def test_problems_of_create_topic_are_raised(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t")
    with pytest.raises(AlreadyExists):
        tailrace_broker.create_topic("t")
    with pytest.raises(InvalidRequest, match="partitions"):
        tailrace_broker.create_topic("u", partitions=0)


def test_two_brokers_do_not_meet(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    with LocalBroker() as other:
        other.create_topic("t", partitions=1)
        asyncio.run(publish(b"x"))
        assert (values(tailrace_broker), values(other)) == ([b"x"], [])


def test_a_closed_broker_says_so() -> None:
    async def main() -> None:
        broker = LocalBroker()
        async with broker.client(timeout=0.01) as client:
            broker.close()
            with pytest.raises(Unavailable, match="closed"):
                await client.admin().list_topics()
        with pytest.raises(NotFound, match="no test broker"):
            await broker.client().__aenter__()
        with pytest.raises(Unavailable, match="closed"):
            broker.create_topic("t")

    asyncio.run(main())


def test_a_client_that_was_never_closed_does_no_harm(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def careless() -> None:
        client = await tailrace.connect().__aenter__()
        await client.reader("t").__aenter__()

    asyncio.run(careless())
    tailrace_broker.clock.advance(timedelta(minutes=2))
    asyncio.run(publish(b"x"))
    assert values(tailrace_broker) == [b"x"]


def test_threads_share_it(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> None:
        await asyncio.gather(*[asyncio.to_thread(asyncio.run, publish(b"%d" % n)) for n in range(8)])

    asyncio.run(main())
    assert sorted(values(tailrace_broker)) == [b"%d" % n for n in range(8)]  # type: ignore[type-var]


# -- virtual time --------------------------------------------------------------------------------------------


def test_time_stands_still_until_it_is_moved(tailrace_broker: LocalBroker) -> None:
    clock = tailrace_broker.clock
    start = clock.now
    assert abs(start.timestamp() - time.time()) < 60
    clock.advance(0.25)
    clock.advance(timedelta(days=3))
    assert clock.now - start == timedelta(days=3, milliseconds=250)
    with pytest.raises(InvalidRequest, match="never goes back"):
        clock.advance(-1)


def test_a_long_poll_ends_at_its_own_time(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    clock = tailrace_broker.clock
    seen: list[tuple[float, str]] = []

    async def main() -> None:
        link = await open_local(tailrace_broker.name)
        start_us = clock.now_us()

        def respond(reply: Reply, parts: object) -> None:
            seen.append(((clock.now_us() - start_us) / SECOND_US, type(reply).__name__))

        for wait_ms in (20_000, 5_000):
            link.submit(Fetch("t", [(0, 0)], wait_ms=wait_ms), b"", respond)
        clock.advance(4.9)
        await tailrace_broker.settle()
        assert seen == []
        clock.advance(0.1)
        await tailrace_broker.settle()
        assert seen == [(5.0, "Fetched")]
        clock.advance(60)
        await tailrace_broker.settle()
        assert seen == [(5.0, "Fetched"), (65.0, "Fetched")]
        await link.close()

    asyncio.run(main())


def test_fetches_do_not_wait_for_each_other_while_time_stands_still(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    asyncio.run(publish(b"a"))
    replies: list[Reply] = []

    async def main() -> None:
        link = await open_local(tailrace_broker.name)
        for _ in range(3):
            link.submit(Fetch("t", [(0, 0)], wait_ms=1000), b"", lambda reply, parts: replies.append(reply))
        await tailrace_broker.settle()
        assert [type(reply).__name__ for reply in replies] == ["Fetched"] * 3
        await link.close()

    asyncio.run(main())


def test_dedup_windows_pass(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1, dedup_window_ms=10_000)
    assert asyncio.run(publish(b"a", dedup_id=b"1")) == [0]
    assert asyncio.run(publish(b"a", dedup_id=b"1")) == [0]
    tailrace_broker.clock.advance(11)
    assert asyncio.run(publish(b"a", dedup_id=b"1")) == [1]


def test_advance_returns_when_clients_on_other_threads_have_reacted(tailrace_broker: LocalBroker) -> None:
    """A blocking reader polls again each time its poll has ended, so a poll is under way after every step."""
    tailrace_broker.create_topic("t", partitions=1)
    with tailrace.sync.connect() as client, client.reader("t"):
        (link,) = tailrace_broker._links
        before = tailrace_broker._requests
        tailrace_broker.clock.advance(timedelta(minutes=10))
        assert tailrace_broker._requests - before >= 20  # polls of 30 s
        assert len(link.waiting) == 1


def test_settle_lets_chains_of_tasks_run(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> None:
        task = asyncio.create_task(publish(*[b"%d" % n for n in range(50)]))
        await tailrace_broker.settle()
        assert task.done()

    asyncio.run(main())
    assert len(values(tailrace_broker)) == 50


# -- restarts and faults -------------------------------------------------------------------------------------


def test_restart_breaks_what_waits_and_keeps_what_is_stored(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    tailrace_broker.create_topic("m", partitions=1, storage="memory")
    replies: list[Reply] = []

    async def main() -> None:
        link = await open_local(tailrace_broker.name)
        link.submit(Fetch("t", [(0, 0)], wait_ms=1000), b"", lambda reply, parts: replies.append(reply))
        tailrace_broker.restart()
        await tailrace_broker.settle()
        (reply,) = replies
        assert isinstance(reply, Refusal)
        assert (reply.code, reply.outcome) == ("unavailable", "unknown")
        await publish(b"x", topic="t")
        assert len(replies) == 1  # the fetch of the broker that is gone says nothing more
        await link.close()

    asyncio.run(main())
    asyncio.run(publish(b"x", topic="m"))
    tailrace_broker.restart()
    assert (values(tailrace_broker, "t"), values(tailrace_broker, "m")) == ([b"x"], [])


def test_readers_go_on_after_a_restart(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> None:
        async with tailrace.connect() as client, client.reader("t", start="earliest") as reader:
            await publish(b"before")
            assert (await anext(reader)).value == b"before"
            tailrace_broker.restart()
            await publish(b"after")
            assert (await anext(reader)).value == b"after"

    asyncio.run(main())


def test_producers_keep_their_memory_over_a_restart(tailrace_broker: LocalBroker) -> None:
    """Retries of a batch that was stored before are recognised after recovery."""
    tailrace_broker.create_topic("t", partitions=1)
    asyncio.run(publish(b"a", dedup_id=b"1"))
    tailrace_broker.restart()
    assert asyncio.run(publish(b"a", dedup_id=b"1")) == [0]


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_a_failed_write_ends_writing_until_restart(tailrace_broker: LocalBroker, storage: str) -> None:
    tailrace_broker.create_topic("t", partitions=1, storage=storage)
    tailrace_broker.fail_next(StorageFault("the cable fell out"))
    with pytest.raises(StorageFault, match="cable") as caught:
        asyncio.run(publish(b"x"))
    assert caught.value.outcome == "unknown"
    with pytest.raises(StorageFault, match="until the broker is restarted") as caught:
        asyncio.run(publish(b"y"))
    assert caught.value.outcome == "unknown", "the first may be there"
    tailrace_broker.restart()
    assert asyncio.run(publish(b"z")) == [0]
    assert values(tailrace_broker) == [b"z"]


def test_a_full_disk_is_over_when_time_has_passed(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> None:
        async with tailrace.connect() as client, client.producer("t") as producer:
            tailrace_broker.fail_next(Full("no space"))
            receipt = await producer.send(b"x")
            await tailrace_broker.settle()
            assert values(tailrace_broker) == []
            tailrace_broker.clock.advance(2)
            assert (await receipt).offset == 0

    asyncio.run(main())
    assert values(tailrace_broker) == [b"x"]


def test_only_storage_faults_can_be_asked_for(tailrace_broker: LocalBroker) -> None:
    with pytest.raises(InvalidRequest, match="StorageFault"):
        tailrace_broker.fail_next(ValueError())  # type: ignore[arg-type]


# -- a real process ------------------------------------------------------------------------------------------


def test_a_server_lives_dies_and_comes_back(tailrace_server: ServerProcess) -> None:
    url, first = tailrace_server.url, tailrace_server.pid
    with urllib.request.urlopen(tailrace_server.http_url + "/readyz", timeout=10) as response:
        assert response.status == 200
    with tailrace.sync.connect(url) as client:
        client.admin().create_topic("t", partitions=1)
        with client.producer("t") as producer:
            assert producer.publish(b"a").offset == 0
            tailrace_server.kill()
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)
            tailrace_server.restart()
            assert (tailrace_server.url, tailrace_server.pid != first) == (url, True)
            assert producer.publish(b"b").offset == 1
    assert tailrace_server.stop() == 0
    assert "stopping" in tailrace_server.log
    assert (tailrace_server.data / "catalog.json").exists()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, "--log-level", "nonsense") as server,
        pytest.raises(Unavailable, match=r"did not start \(status 2\)[\s\S]*--log-level: must be one of"),
    ):
        server.start()


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, ready_s=0.0) as server, pytest.raises(Unavailable, match="not ready within"):
        server.start()


def test_leaving_ends_the_process(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    server.kill()  # harmless
