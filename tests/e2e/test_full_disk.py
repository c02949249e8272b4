"""A real disk that is full below a real broker: a small file system of its own, filled by messages and by
others. It takes the right to mount; where that is missing, the tests are listed as skipped with the reason.

See also `broker.upkeep.space_watch` (virtual time) and `storage.spare_space`."""

import asyncio
import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.errors import Full, LeaseLost
from tests.e2e.broker_process import BrokerProcess, eventually

MIB = 1 << 20
DISK_MIB = 24
VALUE = b"v" * 250_000
FULL = "no space is left on the disk of the data folder"
SPACE = "there is space again"


class SmallDisk:
    """A mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "somebody-else"

    def fill(self, leave: int = 0) -> None:
        """Take all space but so many bytes, as another program would."""
        with self._filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 65536)
            except OSError:
                pass
            if leave:
                file.truncate(max(0, file.tell() - leave))

    def free(self) -> None:
        """Give back what was taken."""
        self._filler.unlink(missing_ok=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder))
    else:
        with image.open("wb") as file:
            file.truncate(DISK_MIB * MIB)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(folder))
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def broker(small_disk: SmallDisk, tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(small_disk.folder / "data", storage_segment_bytes=MIB) as process:
        process.log = tmp_path / "broker.log"
        yield process.start()


def ready(broker: BrokerProcess) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://{broker.http_listen}/readyz") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def figures(broker: BrokerProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{broker.http_listen}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def until_full(client: tailrace.Client, topic: str) -> int:
    """Publish until it is refused; how many were taken."""
    count = 0
    async with client.producer(topic, timeout=2) as producer:
        problem: Full | None = None
        while problem is None:
            try:
                assert (await producer.publish(VALUE)).offset == count
                count += 1
            except Full as full:
                problem = full
    assert problem.outcome == "none"
    assert "no space is left" in problem.message
    return count


async def offsets(client: tailrace.Client, topic: str) -> list[int]:
    async with client.reader(topic, start="earliest", stop_at_end=True) as reader:
        return [message.offset async for message in reader]


async def published_again(client: tailrace.Client, topic: str) -> int:
    async with client.producer(topic, timeout=30) as producer:
        return (await producer.publish(b"after")).offset


def told(broker: BrokerProcess, words: str) -> int:
    return sum(words in line for line in broker.log.read_text().splitlines())


def test_full_is_visible_consuming_goes_on_and_it_is_over_without_a_restart(
    broker: BrokerProcess, small_disk: SmallDisk
) -> None:
    async def run() -> None:
        async with tailrace.connect(broker.url, timeout=30) as client:
            await client.admin().create_topic("t", partitions=1)
            await client.admin().create_topic("other", partitions=1, durability="interval")
            await client.groups().create("g", "t")
            assert ready(broker) == (200, {"ready": True, "reasons": [], "warnings": []})
            small_disk.fill(leave=12 * MIB)
            count = await until_full(client, "t")
            small_disk.fill()

            status, page = ready(broker)
            assert (status, page["ready"]) == (503, False)
            (reason,) = page["reasons"]
            assert FULL in reason
            shown = figures(broker)
            assert shown["tailrace_storage_full"] == 1
            assert shown["tailrace_storage_free_bytes"] < MIB
            for topic in ("t", "other"):
                (row,) = (await client.admin().describe_topic(topic)).partitions
                assert FULL in row["fault"]
            with pytest.raises(Full):
                await client.admin().create_topic("more", timeout=1)

            # Everything that was acknowledged is there and can be worked off.
            async with client.consumer("t", "g", batch_size=10) as consumer:
                seen = set()
                async for message in consumer:
                    # While a part of the reserve is let go, a lease may be lost: it comes again.
                    with contextlib.suppress(LeaseLost):
                        await message.ack()
                        seen.add(message.offset)
                    if len(seen) == count:
                        break
            assert await offsets(client, "t") == list(range(count))
            assert ready(broker)[0] == 503

            small_disk.free()
            assert await published_again(client, "t") == count
            await asyncio.to_thread(eventually, lambda: ready(broker)[0] == 200, "it is ready again")
            assert figures(broker)["tailrace_storage_full"] == 0
            (row,) = (await client.admin().describe_topic("t")).partitions
            assert row["fault"] is None
            assert (told(broker, FULL), told(broker, SPACE)) == (1, 1)
            assert "Traceback" not in broker.log.read_text()

            await asyncio.to_thread(broker.restart)
            assert await offsets(client, "t") == list(range(count + 1))
            (place,) = (await client.groups().describe("g")).partitions
            assert place["lag"] == 1

    asyncio.run(run())


async def _by_retention(client: tailrace.Client) -> None:
    await client.admin().alter_topic("t", retention_bytes=2 * MIB)


async def _by_trimming(client: tailrace.Client) -> None:
    (row,) = (await client.admin().describe_topic("t")).partitions
    await client.admin().trim_topic("t", 0, row["end_offset"] - 10)


async def _by_deleting(client: tailrace.Client) -> None:
    await client.admin().delete_topic("t")


@pytest.mark.parametrize("act", [_by_retention, _by_trimming, _by_deleting])
def test_a_full_disk_is_freed_by_the_broker_itself(
    broker: BrokerProcess, small_disk: SmallDisk, act: Callable[[tailrace.Client], Any]
) -> None:
    async def run() -> None:
        async with tailrace.connect(broker.url, timeout=30) as client:
            await client.admin().create_topic("t", partitions=1)
            await client.admin().create_topic("other", partitions=1)
            await until_full(client, "t")
            small_disk.fill()
            await act(client)
            assert await published_again(client, "other") == 0
            assert ready(broker)[0] == 200

    asyncio.run(run())


def test_a_trim_frees_the_only_segment_of_a_log(small_disk: SmallDisk, tmp_path: Path) -> None:
    """With segments of the usual size all of a small topic lies in the one that is being written."""

    async def run(broker: BrokerProcess) -> None:
        async with tailrace.connect(broker.url, timeout=30) as client:
            await client.admin().create_topic("t", partitions=1)
            count = await until_full(client, "t")
            small_disk.fill()
            await client.admin().trim_topic("t", 0, count)
            assert await published_again(client, "t") == count
            await asyncio.to_thread(broker.restart)
            assert await offsets(client, "t") == [count]

    with BrokerProcess(small_disk.folder / "data") as process:
        process.log = tmp_path / "broker.log"
        asyncio.run(run(process.start()))


def test_a_broker_starts_on_a_full_disk(broker: BrokerProcess, small_disk: SmallDisk) -> None:
    async def run() -> None:
        async with tailrace.connect(broker.url, timeout=30) as client:
            await client.admin().create_topic("t", partitions=1)
            small_disk.fill(leave=12 * MIB)
            count = await until_full(client, "t")
            await asyncio.to_thread(broker.kill)
            (broker.data / "reserve").unlink(missing_ok=True)
            small_disk.fill()
            await asyncio.to_thread(broker.start)
            assert ready(broker)[0] == 503
            assert await offsets(client, "t") == list(range(count))
            with pytest.raises(Full):
                async with client.producer("t", timeout=1) as producer:
                    await producer.publish(b"still full")
            small_disk.free()
            assert await published_again(client, "t") == count

    asyncio.run(run())


def test_space_that_runs_low_is_told_before(broker: BrokerProcess, small_disk: SmallDisk) -> None:
    def warned() -> bool:
        status, page = ready(broker)
        return status == 200 and page["ready"] and any("running low" in text for text in page["warnings"])

    assert ready(broker)[1]["warnings"] == []
    small_disk.fill(leave=MIB)
    eventually(warned, "the warning is in /readyz")
    shown = figures(broker)
    assert (shown["tailrace_storage_low"], shown["tailrace_storage_full"]) == (1, 0)
    assert told(broker, "space is running low") == 1
    small_disk.free()
    eventually(lambda: not ready(broker)[1]["warnings"], "the warning is gone")
    assert told(broker, "space is not low any more") == 1
