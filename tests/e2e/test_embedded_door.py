"""Processes that share a data folder: joining, racing to be first, outliving the one that ran the broker.

Covers `broker/shared_folder.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace
from tailrace import sync
from tailrace.client.rpc import endpoints
from tailrace.errors import InvalidRequest, LeaseLost, StorageFault, Unavailable
from tailrace.storage.lock import FolderLock
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.folder_client import ROOT, FolderClient, holder_of

LIMIT_S = 90.0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path: the door is inside. Beside it is the folder for run-time files."""
    with tempfile.TemporaryDirectory(prefix="tr") as made:
        (Path(made) / "run").mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{made}/run")
        yield Path(made) / "data"


@pytest.fixture(params=["inside", "elsewhere"])
def any_folder(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    """Also one whose path is too long for a socket."""
    if request.param == "inside":
        return folder
    return tmp_path / ("long-" * 25)


def url_of(folder: Path) -> str:
    return f"embedded:{folder}"


def cli(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "tailrace.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_and_commands_join(any_folder: Path) -> None:
    url = url_of(any_folder)
    with FolderClient(url) as first, FolderClient(url) as second:
        first.ready()
        second.ready()
        assert holder_of(any_folder) in (first.pid, second.pid)
        assert [first.ask("publish a"), second.ask("publish b"), first.ask("publish c")] == ["0", "1", "2"]
        assert first.values() == second.values() == ["a", "b", "c"]
        assert "t" in cli("topic", "list", "--url", url)
        cli("publish", "t", "d", "--url", url)
        assert first.values() == ["a", "b", "c", "d"]
        for client in (first, second):
            if client.pid != holder_of(any_folder):
                client.close()
        (holder,) = [client for client in (first, second) if client.pid == holder_of(any_folder)]
        holder.close()
    assert not list(any_folder.glob("embedded.*"))


def test_of_many_that_start_at_once_one_works_and_the_others_join(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(FolderClient(url_of(folder))) for _ in range(5)]
        for number, client in enumerate(clients):
            client.ready()
            client.ask(f"publish {number}")
        assert sorted(clients[0].values()) == ["0", "1", "2", "3", "4"]
        assert holder_of(folder) in [client.pid for client in clients]


@pytest.mark.parametrize("end", ["kill", "close"])
def test_who_has_joined_inherits_the_folder(any_folder: Path, end: str) -> None:
    """The one that ran the broker is killed, or ends; what was acknowledged is there, and others go on."""
    url = url_of(any_folder)
    with FolderClient(url) as first, contextlib.ExitStack() as stack:
        first.ready()
        others = [stack.enter_context(FolderClient(url)).ready() for _ in range(2)]
        assert holder_of(any_folder) == first.pid
        assert others[0].ask("publish before") == "0"
        first.kill() if end == "kill" else first.close()
        assert [other.ask("publish after") for other in others] == ["1", "2"]
        assert holder_of(any_folder) in [other.pid for other in others]
        with FolderClient(url) as late:
            assert late.ready().values() == ["before", "after", "after"]
        for other in sorted(others, key=lambda client: client.pid == holder_of(any_folder)):
            other.close()


def test_a_server_has_the_same_door_and_keeps_its_folder(folder: Path) -> None:
    with BrokerProcess(folder) as broker, FolderClient(url_of(broker.start().data)) as client:
        client.ready()
        assert client.ask("publish a") == "0"
        with (
            sync.connect(broker.url) as other,
            other.reader("t", start="earliest", stop_at_end=True) as reader,
        ):
            assert [message.value for message in reader] == [b"a"]
        assert "t" in cli("topic", "list", "--url", url_of(folder))
        broker.kill()
        client.tell("publish b")  # It waits for the server; nobody takes its folder.
        broker.start()
        assert client.answer() == "1"
        assert holder_of(folder) == broker.pid
        assert client.values() == ["a", "b"]
        broker.stop()
    assert not (folder / "embedded.sock").exists()


def test_a_killed_holder_leaves_nothing_in_the_way(any_folder: Path) -> None:
    with FolderClient(url_of(any_folder)) as first:
        first.ready().ask("publish a")
        first.kill()
    assert list(any_folder.glob("embedded.*"))
    with FolderClient(url_of(any_folder)) as second, FolderClient(url_of(any_folder)) as third:
        assert second.ready().values() == ["a"]
        assert third.ready().ask("publish b") == "1"


def test_a_forked_child_holds_neither_the_folder_nor_its_door_nor_its_guests(folder: Path) -> None:
    """Those who had joined before the fork see that the parent is gone, and nobody is kept waiting."""
    with FolderClient(url_of(folder)) as first, contextlib.ExitStack() as stack:
        first.ready()
        joined = stack.enter_context(FolderClient(url_of(folder))).ready()
        child = int(first.ask("fork"))
        try:
            first.ask("publish a")
            assert joined.ask("publish b") == "1"
            first.kill()
            assert joined.values() == ["a", "b"]
            assert holder_of(folder) == joined.pid
            with FolderClient(url_of(folder)) as second:
                assert second.ready().ask("publish c") == "2"
        finally:
            os.kill(child, signal.SIGKILL)


def test_work_goes_on_in_another_process(folder: Path) -> None:
    """Messages are consumed while the process that runs the broker is killed: what was acknowledged does not
    come again, and nothing is lost."""
    first_half, count = 100, 300

    async def main(holder: FolderClient) -> None:
        async with tailrace.connect(url_of(folder), timeout=60) as client:
            await client.groups().create("g", "t", start="earliest")
            async with client.producer("t") as producer, client.consumer("t", "g", batch_size=10) as consumer:
                await (await producer.send_many([b"%d" % number for number in range(count)]))
                seen = []
                for _ in range(first_half):
                    delivery = await anext(consumer)
                    await delivery.ack()
                    seen.append(delivery.offset)
                holder.kill()
                await producer.publish(b"last")
                assert holder_of(folder) == os.getpid()
                while len(set(seen)) < count + 1:
                    delivery = await anext(consumer)
                    with contextlib.suppress(LeaseLost):
                        await delivery.ack()
                    seen.append(delivery.offset)
            assert set(seen) == set(range(count + 1))
            assert not set(seen[:first_half]) & set(seen[first_half:])

    with FolderClient(url_of(folder)) as holder:
        holder.ready()
        asyncio.run(asyncio.wait_for(main(holder), LIMIT_S))


# -- in one process ------------------------------------------------------------------------------------------


def test_a_second_client_of_the_same_loop_joins(folder: Path) -> None:
    async def main() -> None:
        async with tailrace.connect(url_of(folder)) as first, tailrace.connect(url_of(folder)) as second:
            await first.admin().create_topic("t", partitions=1)
            async with second.producer("t") as producer:
                await producer.publish(b"a")
            async with first.reader("t", start="earliest", stop_at_end=True) as reader:
                assert [message.value async for message in reader] == [b"a"]
        async with tailrace.connect(url_of(folder)) as again:
            assert [topic.name for topic in await again.admin().list_topics()] == ["t"]

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_blocking_clients_of_one_thread_join(folder: Path) -> None:
    with sync.connect(url_of(folder)) as first:
        first.admin().create_topic("t", partitions=1)
        with sync.connect(url_of(folder)) as second:
            assert [topic.name for topic in second.admin().list_topics()] == ["t"]


def test_a_blocking_client_joins_a_loop_in_another_thread(folder: Path) -> None:
    async def main() -> None:
        async with tailrace.connect(url_of(folder)) as client:
            await client.admin().create_topic("t", partitions=1)

            def blocking() -> list[str]:
                with sync.connect(url_of(folder)) as other:
                    return [topic.name for topic in other.admin().list_topics()]

            assert await asyncio.to_thread(blocking) == ["t"]

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_blocking_client_in_the_thread_of_the_broker_ends_with_an_error(folder: Path) -> None:
    async def main() -> None:
        async with tailrace.connect(url_of(folder)) as client:
            with (
                pytest.raises(Unavailable, match="does not greet"),
                sync.connect(url_of(folder), timeout=0.5),
            ):
                pass
            assert await client.admin().list_topics() == []

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_the_first_of_two_clients_may_be_closed_first(folder: Path) -> None:
    async def main() -> None:
        first, second = tailrace.connect(url_of(folder)), tailrace.connect(url_of(folder))
        await first.__aenter__()
        await second.__aenter__()
        await first.admin().create_topic("t", partitions=1)
        await first.close()
        assert [topic.name for topic in await second.admin().list_topics()] == ["t"]
        await second.close()
        assert not (folder / "embedded.sock").exists()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


# -- what cannot be joined -----------------------------------------------------------------------------------


def connected(url: str) -> None:
    async def main() -> None:
        async with tailrace.connect(url):
            pass

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_folder_that_is_held_without_a_door_is_told(folder: Path) -> None:
    (folder / "topics").mkdir(parents=True)
    lock = FolderLock(str(folder / "topics"))
    try:
        with pytest.raises(Unavailable, match=f"in use by pid {os.getpid()}.*, which lets nobody join"):
            connected(url_of(folder))
    finally:
        lock.release()
    connected(url_of(folder))


def test_the_door_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FolderClient(url_of(folder)) as holder:
        holder.ready()
        monkeypatch.setattr(endpoints, "peer_uid", lambda sock: os.geteuid() + 4711)
        with pytest.raises(InvalidRequest, match="is another user's"):
            connected(url_of(folder))


def test_folders_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, told in (
        ("file", "that is a file, and not a folder"),
        ("file/data", "file is not a folder"),
        ("missing/data", f"there is no folder {tmp_path}/missing"),
    ):
        with pytest.raises(StorageFault, match=told) as caught:
            connected(f"embedded:{tmp_path}/{name}")
        assert caught.value.outcome == "none"
        assert "embedded:FOLDER" in caught.value.details["hint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_folder_that_may_not_be_written_is_told(folder: Path) -> None:
    """As another user than root, who may write everywhere."""
    program = """
import asyncio, os, sys, tailrace, tailrace.broker.shared_folder, tailrace.client.client
if not os.geteuid():
    os.seteuid(65534)

async def main():
    async with tailrace.connect("embedded:" + sys.argv[1]):
        pass

asyncio.run(main())
"""
    folder.mkdir(mode=0o755)
    folder.parent.chmod(0o755)
    if os.geteuid():
        folder.chmod(0o500)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert f"the broker cannot work in {folder}: [Errno 13] Permission denied" in done.stderr
    assert done.returncode == 1


def test_a_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    connected("embedded:~/data")
    assert (folder / "data" / "catalog.json").exists() or (folder / "data" / "topics").exists()
