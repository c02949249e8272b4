"""The SDK on a broker inside the process, over real files: every promise of producers, readers and admin.

Covers `broker/engine.py`, `client/client.py` and `client/admin/topic_admin.py`.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tailrace
from tailrace.broker.node import EmbeddedVerbs
from tailrace.client.rpc.machine_clock import MachineClock
from tailrace.errors import (
    AlreadyExists,
    Corrupt,
    Fenced,
    InvalidRequest,
    NotFound,
    SequenceConflict,
    StorageFault,
    Timeout,
    TooLarge,
    Unavailable,
)

SRC = str(Path(__file__).resolve().parents[2] / "src")
Scenario = Callable[[tailrace.Client], Coroutine[Any, Any, None]]


def embedded(folder: Path, scenario: Scenario, **topic: Any) -> None:
    """Run a scenario on a broker in a folder; the topic `t` is there, of one partition unless told."""

    async def main() -> None:
        async with tailrace.connect(f"embedded:{folder}") as client:
            options = {"partitions": 1, "durability": "interval", **topic}
            await client.admin().create_topic("t", if_missing=True, **options)
            await scenario(client)

    asyncio.run(asyncio.wait_for(main(), 60))


async def read(client: tailrace.Client, start: Any = "earliest") -> list[tailrace.Message]:
    async with client.reader("t", start=start, stop_at_end=True) as reader:
        return [message async for message in reader]


async def values(client: tailrace.Client, start: Any = "earliest") -> list[bytes | None]:
    return [message.value for message in await read(client, start)]


# -- opening and closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_messages_outlive_the_process(tmp_path: Path, durability: str) -> None:
    async def first(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            results = [await producer.publish(b"%d" % number) for number in range(3)]
        assert [result.offset for result in results] == [0, 1, 2]

    async def second(client: tailrace.Client) -> None:
        assert await values(client) == [b"0", b"1", b"2"]
        assert await values(client, 1) == [b"1", b"2"]
        assert await values(client, {0: 2}) == [b"2"]
        assert await values(client, "latest") == []
        async with client.producer("t") as producer:
            assert (await producer.publish(b"3")).offset == 3

    embedded(tmp_path, first, durability=durability)
    embedded(tmp_path, second, durability=durability)


def test_reading_from_a_time(tmp_path: Path) -> None:
    base = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)

    async def write(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for minute in range(5):
                await producer.publish(b"%d" % minute, timestamp=base + timedelta(minutes=minute))

    async def look(client: tailrace.Client) -> None:
        assert await values(client, base + timedelta(minutes=2)) == [b"2", b"3", b"4"]
        assert await values(client, base + timedelta(minutes=2, seconds=1)) == [b"3", b"4"]
        assert await values(client, base - timedelta(days=1)) == [b"0", b"1", b"2", b"3", b"4"]
        assert await values(client, base + timedelta(minutes=5)) == []
        assert await client.admin().find_offsets("t", base + timedelta(minutes=4)) == [4]
        with pytest.raises(InvalidRequest, match="time zone"):
            await values(client, datetime(2020, 1, 1))

    embedded(tmp_path, write)
    embedded(tmp_path, look)


def test_a_folder_has_one_owner_and_others_join(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        with pytest.raises(Unavailable) as caught:
            await EmbeddedVerbs(str(tmp_path), MachineClock()).open()
        assert str(tmp_path) in caught.value.message
        assert f"in use by pid {os.getpid()}" in caught.value.message
        async with tailrace.connect(f"embedded:{tmp_path}") as other, other.producer("t") as producer:
            await producer.publish(b"x")
        assert await values(client) == [b"x"]  # the owner is not disturbed

    embedded(tmp_path, scenario)
    embedded(tmp_path, lambda client: client.admin().delete_topic("t"))


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_used_is_an_error_of_the_tree(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("no folder")

    async def main() -> None:
        with pytest.raises(StorageFault, match="the broker cannot work in") as caught:
            await tailrace.connect(f"embedded:{tmp_path}/{folder}").__aenter__()
        assert caught.value.outcome == "none"

    asyncio.run(main())


def test_url_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_URL", f"embedded:{tmp_path}/data")

    async def main() -> None:
        async with tailrace.connect() as client:
            await client.admin().create_topic("t")

    asyncio.run(main())
    assert (tmp_path / "data" / "catalog.json").exists()


@pytest.mark.parametrize("url", ["http://x", "embedded:", "tailrace://", "tailrace://host:port"])
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        tailrace.connect(url)


def test_wrong_timeouts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        tailrace.connect("embedded:x", timeout=0)


def test_what_is_not_open_says_so(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        other = tailrace.connect(f"embedded:{tmp_path}/other")
        with pytest.raises(Unavailable, match="async with"):
            other.admin()
        producer, reader = client.producer("t"), client.reader("t")
        with pytest.raises(Unavailable, match="async with"):
            await producer.send(b"x")
        with pytest.raises(Unavailable, match="async with"):
            await anext(reader)
        async with producer, reader:
            await producer.publish(b"x")
        with pytest.raises(Unavailable, match="producer is closed"):
            await producer.send(b"x")
        with pytest.raises(Unavailable, match="reader is closed"):
            await anext(reader)
        with pytest.raises(InvalidRequest, match="open already"):
            await client.__aenter__()

    embedded(tmp_path, scenario)


def test_a_closed_client_ends_its_readers(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.reader("t") as reader:
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(Unavailable, match="client is closed"):
                await waiting

    embedded(tmp_path, scenario)


@pytest.mark.parametrize("crash", [False, True], ids=["after a close", "after a crash"])
def test_a_damaged_log_is_corrupt_to_all_who_read_it(tmp_path: Path, crash: bool) -> None:
    async def write(client: tailrace.Client) -> None:
        await client.groups().create("g", "t")
        async with client.producer("t") as producer:
            for number in range(3):
                await producer.publish(b"message %d" % number)

    async def check(client: tailrace.Client) -> None:
        for options in ({"stop_at_end": True}, {}):
            async with client.reader("t", start="earliest", **options) as reader:
                assert (await anext(reader)).value == b"message 0"
                with pytest.raises(Corrupt, match="damaged"):
                    await anext(reader)
        for start in ("latest", 1):
            async with client.reader("t", start=start) as reader:
                with pytest.raises(Corrupt, match="damaged"):
                    await anext(reader)
        async with client.consumer("t", "g") as consumer:
            with pytest.raises(Corrupt, match="damaged"):
                await anext(consumer)
        async with client.consumer("t", mode="broadcast", start="earliest") as stream:
            assert (await anext(stream)).value == b"message 0"
            with pytest.raises(Corrupt, match="damaged"):
                await anext(stream)

    embedded(tmp_path, write, durability="fsync")
    (log,) = tmp_path.glob("topics/t~1/0/*.log")
    data = log.read_bytes()
    log.write_bytes(data.replace(b"message 1", b"massage 1"))
    if crash:
        for snapshot in tmp_path.glob("topics/t~1/0/*.snap*"):
            snapshot.unlink()
    embedded(tmp_path, check)


def test_after_a_fork(tmp_path: Path) -> None:
    program = """
import asyncio, os, sys, tailrace, tailrace.errors

async def main():
    async with tailrace.connect("embedded:" + sys.argv[1]) as client:
        await client.admin().create_topic("t", partitions=1)
        async with client.producer("t") as producer, client.reader("t", start="earliest") as reader:
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    for call in (lambda: client.admin(), lambda: producer.send(b"x"), lambda: anext(reader)):
                        try:
                            made = call()
                            made.__await__().send(None)
                        except tailrace.errors.Unavailable as error:
                            assert "before a fork; connect again" in error.message
                        else:
                            raise AssertionError("worked after a fork")
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
            await producer.publish(b"parent")
            assert (await anext(reader)).value == b"parent"

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": SRC},
    )
    assert done.returncode == 0, done.stderr


# -- topics --------------------------------------------------------------------------------------------------


def test_topics_from_birth_to_death(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        admin = client.admin()
        topic = await admin.create_topic("u", partitions=2, durability="interval")
        assert (topic.name, topic.created, topic.options["partitions"]) == ("u", True, 2)
        with pytest.raises(AlreadyExists):
            await admin.create_topic("u")
        with pytest.raises(InvalidRequest, match=r"partitions.*durability"):
            await admin.create_topic("v", partitions=0, durability="often")
        assert (await admin.alter_topic("u", partitions=3)).options["partitions"] == 3
        with pytest.raises(InvalidRequest, match="only grow"):
            await admin.alter_topic("u", partitions=1)
        async with client.producer("u") as producer:
            await (await producer.send_many([b"a", b"b", b"c"], partition=2))
        assert [row["end_offset"] for row in (await admin.describe_topic("u")).partitions] == [0, 0, 3]
        assert [known.name for known in await admin.list_topics()] == ["t", "u"]
        await admin.trim_topic("u", 2, 2)
        assert await admin.find_offsets("u", "earliest") == [0, 0, 2]
        with pytest.raises(InvalidRequest, match="beyond the end"):
            await admin.trim_topic("u", 2, 9)
        await admin.delete_topic("u")
        for call in (admin.describe_topic("u"), admin.delete_topic("u"), admin.find_offsets("u", "latest")):
            with pytest.raises(NotFound, match="'u'"):
                await call
        with pytest.raises(NotFound, match="'u'"):
            await client.producer("u").__aenter__()

    async def later(client: tailrace.Client) -> None:
        assert [known.name for known in await client.admin().list_topics()] == ["t"]

    embedded(tmp_path, scenario)
    embedded(tmp_path, later)


def test_a_reader_of_trimmed_messages_is_told(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(3):
                await producer.publish(b"%d" % number)
        await client.admin().trim_topic("t", 0, 2)
        async with client.reader("t", start=1) as reader:
            with pytest.raises(NotFound, match="trimmed: the log starts at 2"):
                await anext(reader)
            await reader.seek("earliest")
            assert (await anext(reader)).value == b"2"

    embedded(tmp_path, scenario)


# -- messages ------------------------------------------------------------------------------------------------


def test_every_field_comes_back(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    headers = [("a", b"1"), ("b", b""), ("a", b"2")]

    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            result = await producer.publish(
                b"v", key=b"k", headers=headers, timestamp=now, priority=0, ttl=60, dedup_id=b"d"
            )
            await producer.publish(b"w", expires_at=now + timedelta(days=1))
            await producer.publish(bytearray(b"x"), headers={"h": b"1"})
            await producer.publish(memoryview(b"y"))
            await producer.publish(None, key=b"k")  # a tombstone
            with pytest.raises(InvalidRequest, match="needs a key"):
                await producer.publish(None)
        first, second, third, fourth, tombstone = await read(client)
        assert (first.topic, first.partition, first.offset, first.sequence) == ("t", 0, 0, 1)
        assert (first.value, first.key, first.headers, first.priority) == (b"v", b"k", headers, 0)
        assert (first.id, first.append_time, first.dedup_id) == (result.id, result.append_time, b"d")
        assert first.timestamp == now
        assert first.expires_at is not None
        assert abs(first.expires_at - now - timedelta(seconds=60)) < timedelta(seconds=30)
        assert (second.key, second.headers, second.priority) == (None, [], 2)
        assert second.expires_at == now + timedelta(days=1)
        assert (third.value, third.headers, third.expires_at) == (b"x", [("h", b"1")], None)
        assert (fourth.value, tombstone.value, tombstone.key) == (b"y", None, b"k")
        assert abs(fourth.timestamp - now) < timedelta(minutes=1)

    embedded(tmp_path, scenario)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_compression(tmp_path: Path, compression: str | None) -> None:
    sent = [b"the same again and again " * 40] * 200

    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t", compression=compression) as producer:
            await (await producer.send_many(sent))
            await (await producer.send_table(pa.table({"value": sent, "key": [b"k"] * 200})))
        assert await values(client) == sent * 2
        stored = (await client.admin().describe_topic("t")).partitions[0]["bytes"]
        assert (stored < 100_000) == (compression is not None)
        with pytest.raises(InvalidRequest, match="compression"):
            client.producer("t", compression="gzip")

    embedded(tmp_path, scenario)


def test_tables_go_to_the_partitions_of_their_keys(tmp_path: Path) -> None:
    keys = [b"%d" % (number % 7) for number in range(100)]
    table = pa.table({"value": [b"%d" % number for number in range(100)], "key": keys, "priority": [1] * 100})

    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            results = await (await producer.send_table(table))
            assert len(results) == 100
            same = await producer.publish(b"x", key=keys[3])
            assert same.partition == results[3].partition
            for wrong, problem in [
                ([b"x"], "Table or RecordBatch"),
                (pa.table({"key": [b"k"]}), "no column 'value'"),
                (pa.table({"value": [b"x"], "colour": [1]}), "colour"),
            ]:
                with pytest.raises(InvalidRequest, match=problem):
                    await producer.send_table(wrong)
        found = {(m.partition, m.offset): m for m in await read(client)}
        for number, result in enumerate(results):
            message = found[result.partition, result.offset]
            assert (message.value, message.key, message.id) == (b"%d" % number, keys[number], result.id)
            assert message.priority == 1

    embedded(tmp_path, scenario, partitions=3)


def test_dedup_ids(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            first = await producer.publish(b"a", dedup_id=b"1")
            again = await producer.publish(b"a", dedup_id=b"1")
            assert (first.duplicate, again.duplicate, again.offset) == (False, True, first.offset)
            many = await (await producer.send_many([b"b", b"a", b"c"], dedup_ids=[b"2", b"1", b"3"]))
            assert [(result.offset, result.duplicate) for result in many] == [
                (1, False),
                (0, True),
                (2, False),
            ]
        assert await values(client) == [b"a", b"b", b"c"]

    async def later(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            assert (await producer.publish(b"a", dedup_id=b"1")).duplicate

    embedded(tmp_path, scenario)
    embedded(tmp_path, later)


def test_expected_sequences(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            assert (await producer.publish(b"a", expected_sequence=1)).sequence == 1
            for wrong in (1, 3):
                with pytest.raises(SequenceConflict) as caught:
                    await producer.publish(b"x", expected_sequence=wrong)
                assert (caught.value.current_sequence, caught.value.outcome) == (1, "none")
            # one that is refused takes nothing with it
            receipts = [
                await producer.send(b"b"),
                await producer.send(b"x", expected_sequence=9),
                await producer.send(b"c"),
            ]
            with pytest.raises(SequenceConflict):
                await receipts[1]
            assert [(await receipts[0]).sequence, (await receipts[2]).sequence] == [2, 3]
            with pytest.raises(InvalidRequest, match="expected_sequence"):
                await producer.publish(b"x", expected_sequence=-1)
        assert await values(client) == [b"a", b"b", b"c"]

    embedded(tmp_path, scenario)


def test_expected_key_sequences(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await producer.publish(b"1", key=b"k", expected_key_sequence=0)
            await producer.publish(b"2", key=b"k", expected_key_sequence=1)
            await producer.publish(b"1", key=b"other", expected_key_sequence=0)
            with pytest.raises(SequenceConflict) as caught:
                await producer.publish(b"x", key=b"k", expected_key_sequence=1)
            assert caught.value.current_key_sequence == 2
        assert await values(client) == [b"1", b"2", b"1"]

    embedded(tmp_path, scenario, key_index=True)


def test_a_newer_producer_of_a_name_fences_the_older(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t", name="billing") as old:
            await old.publish(b"old")
            async with client.producer("t", name="billing") as new:
                await new.publish(b"new")
                with pytest.raises(Fenced):
                    await old.publish(b"too late")
                await new.publish(b"new again")
            async with client.producer("t", name="other") as other:
                await other.publish(b"other")
        assert await values(client) == [b"old", b"new", b"new again", b"other"]

    embedded(tmp_path, scenario)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"value": "text"}, "value: bytes are needed, not str"),
        ({"value": 7}, "value: bytes are needed, not int"),
        ({"key": "k"}, "key: bytes are needed, not str"),
        ({"dedup_id": "d"}, "dedup_id: bytes are needed, not str"),
        ({"headers": {"a": "b"}}, "headers: pairs of str and bytes"),
        ({"headers": [b"a"]}, "headers: pairs of str and bytes"),
        ({"headers": 5}, "headers: "),
        ({"priority": 5}, "priority: 0 to 4, not 5"),
        ({"priority": "high"}, "priority: 0 to 4"),
        ({"partition": 1}, "partition: 't' has 0 to 0, not 1"),
        ({"partition": "0"}, "partition"),
        ({"timestamp": "now"}, "timestamp: a datetime or microseconds"),
        ({"timestamp": datetime(2020, 1, 1)}, "timestamp: .* has no time zone"),
        ({"timestamp": datetime(2999, 1, 1, tzinfo=UTC)}, "timestamp: .*ahead"),
        ({"ttl": 0}, "ttl: a positive number"),
        ({"ttl": "1"}, "ttl: "),
        ({"ttl": float("inf")}, "ttl: "),
        ({"expires_at": 1 << 63}, "expires_at: "),
        ({"expires_at": 1.5}, "expires_at: a datetime or microseconds"),
        ({"expected_key_sequence": "1", "key": b"k"}, "expected_key_sequence"),
    ],
)
def test_wrong_types_name_the_field(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            given = {"value": b"x", **fields}
            with pytest.raises(InvalidRequest, match=problem):
                await producer.publish(given.pop("value"), **given)
            await producer.publish(b"fine")
        assert await values(client) == [b"fine"]

    embedded(tmp_path, scenario)


async def _leased(client: tailrace.Client, **options: Any) -> Any:
    async with client.consumer("t", "g", **options) as consumer:
        yield await anext(consumer)


async def _nack(client: tailrace.Client, error: Any) -> None:
    async for delivery in _leased(client):
        await delivery.nack(error=error)


async def _reject(client: tailrace.Client, reason: Any) -> None:
    async for delivery in _leased(client):
        await delivery.reject(reason)


async def _join(client: tailrace.Client, member: Any) -> None:
    async for delivery in _leased(client, member=member):
        await delivery.ack()


WRONG: list[tuple[Callable[[tailrace.Client], Coroutine[Any, Any, Any]], str]] = [
    (lambda client: client.groups().reset("g", "t", {0: 1.0}), "offset"),  # type: ignore[dict-item]
    (lambda client: client.groups().reset("g", "t", {0: True}), "offset"),
    (lambda client: client.admin().trim_topic("t", 0, True), "offset"),
    (lambda client: client.admin().trim_topic("t", 0, 1.0), "offset"),  # type: ignore[arg-type]
    (lambda client: _nack(client, b"boom"), "error: "),
    (lambda client: _reject(client, b"boom"), "error: |reason: "),
    (lambda client: _join(client, b"me"), "member"),
    (lambda client: _put(client, paused=1), "paused"),
    (lambda client: _put(client, priority=True), "priority"),
]


def _put(client: tailrace.Client, **fields: Any) -> Coroutine[Any, Any, Any]:
    return client.schedules().put("n", "t", "0 0 * * *", value=b"x", **fields)


def test_wrong_types_are_refused_and_nothing_of_them_is_stored(tmp_path: Path) -> None:
    async def first(client: tailrace.Client) -> None:
        await client.groups().create("g", "t")
        async with client.producer("t") as producer:
            await producer.send_many([b"0", b"1"])
        for call, field in WRONG:
            with pytest.raises(InvalidRequest, match=field):
                await call(client)
        async with client.producer("t") as producer:
            assert (await producer.publish(b"2")).offset == 2

    async def second(client: tailrace.Client) -> None:
        assert await values(client) == [b"0", b"1", b"2"]
        assert await client.schedules().list() == []
        async with client.producer("t") as producer:
            assert (await producer.publish(b"3")).offset == 3

    embedded(tmp_path, first)
    embedded(tmp_path, second)


def test_what_is_too_large_is_refused_alone(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            before = await producer.send(b"before")
            cases: list[tuple[dict[str, Any], str]] = [
                ({"value": bytes(1001)}, "value: 1001 bytes, the limit is 1000"),
                ({"key": bytes(65537)}, "key: 65537 bytes"),
                ({"dedup_id": bytes(1025)}, "dedup_id: 1025 bytes"),
                ({"headers": {"h": bytes(65536)}}, "headers: 65537 bytes"),
            ]
            for fields, what in cases:
                given: dict[str, Any] = {"value": b"x", **fields}
                with pytest.raises(TooLarge, match=what):
                    await producer.send(given.pop("value"), **given)
            with pytest.raises(TooLarge, match="value"):
                await producer.send_many([b"x", bytes(1001)])
            await before
            await producer.publish(bytes(1000))
        assert await values(client) == [b"before", bytes(1000)]

    embedded(tmp_path, scenario, message_bytes_max=1000)


# -- waiting, cancelling, failing ----------------------------------------------------------------------------


def test_cancelled_waits_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Sends that were cancelled are stored once or not at all, and not at all only if they said so."""

    async def scenario(client: tailrace.Client) -> None:
        accepted: list[bytes] = []

        async def send(producer: tailrace.Producer, value: bytes) -> None:
            await producer.send(value)
            accepted.append(value)

        async with client.producer("t", buffer_bytes_max=500) as producer:
            for number in range(300):
                task = asyncio.create_task(send(producer, b"%d" % number))
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
        assert 0 < len(accepted) < 300
        assert await values(client) == accepted

    embedded(tmp_path, scenario)


def test_a_cancelled_publish_may_be_stored_but_only_once(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        done: list[bytes] = []

        async def publish(producer: tailrace.Producer, value: bytes) -> None:
            await producer.publish(value)
            done.append(value)

        async with client.producer("t") as producer:
            for number in range(100):
                task = asyncio.create_task(publish(producer, b"%d" % number))
                for _ in range(number % 6):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
        stored = await values(client)
        assert len(stored) == len(set(stored))
        assert set(done) <= set(stored)

    embedded(tmp_path, scenario)


def test_cancelled_reads_lose_and_repeat_nothing(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        found: list[bytes | None] = []
        async with client.producer("t") as producer, client.reader("t", start="earliest") as reader:
            writing = asyncio.create_task(_write(producer, 200))
            turn = 0
            while len(found) < 200:
                turn += 1
                task = asyncio.ensure_future(anext(reader))
                for _ in range(turn % 5):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    found.append(task.result().value)
            await writing
        assert found == [b"%d" % number for number in range(200)]

    embedded(tmp_path, scenario)


async def _write(producer: tailrace.Producer, count: int) -> None:
    for number in range(count):
        await producer.publish(b"%d" % number)


def test_batches_after_messages_go_on_in_the_same_batch(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await (await producer.send_many([b"0", b"1", b"2"]))
            await (await producer.send_many([b"3"]))
        async with client.reader("t", start="earliest", stop_at_end=True) as reader:
            assert (await anext(reader)).value == b"0"
            batches = [batch async for batch in reader.batches()]
            assert [batch.column("offset").to_pylist() for batch in batches] == [[1, 2], [3]]
            assert reader.position() == {0: 4}
            names = "topic partition offset sequence id key value headers timestamp append_time priority"
            assert batches[0].schema.names == [*names.split(), "deliver_at", "expires_at"]

    embedded(tmp_path, scenario)


def test_a_priority_is_never_null_in_batches(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await (await producer.send_many([b"0", b"1"]))
            await (await producer.send_table(pa.table({"value": [b"2", b"3"], "priority": [None, 4]})))
            await (await producer.send_table(pa.table({"value": [b"4"], "priority": [2]})))
        async with client.reader("t", start="earliest", stop_at_end=True) as reader:
            rows = pa.Table.from_batches([batch async for batch in reader.batches()])
        async with client.reader("t", start="earliest", stop_at_end=True) as reader:
            messages = [message async for message in reader]
        assert rows["priority"].to_pylist() == [2, 2, 2, 4, 2]
        assert rows.filter(pc.greater_equal(rows["priority"], 1)).num_rows == 5
        assert [message.priority for message in messages] == [2, 2, 2, 4, 2]

    embedded(tmp_path, scenario)


def test_flush_raises_what_nobody_awaited(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await producer.publish(b"a")
            await producer.send(b"x", expected_sequence=7)
            with pytest.raises(SequenceConflict):
                await producer.flush()
            await producer.flush()  # told once
            receipt = await producer.send(b"x", expected_sequence=7)
            with pytest.raises(SequenceConflict):
                await receipt
            await producer.flush()  # somebody awaited it
        with pytest.raises(SequenceConflict):
            async with client.producer("t") as producer:
                await producer.send(b"x", expected_sequence=7)
        with pytest.raises(KeyError):  # noqa: PT012
            async with client.producer("t") as producer:
                await producer.send(b"x", expected_sequence=7)
                raise KeyError  # the first failure is the one that is seen
        assert await values(client) == [b"a"]

    embedded(tmp_path, scenario)


def test_a_full_buffer_makes_senders_wait(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        highest = 0
        async with client.producer("t", buffer_bytes_max=10_000) as producer:
            for _ in range(500):
                await producer.send(bytes(1000))
                highest = max(highest, producer._buffered)
        assert 0 < highest <= 2 * 10_000  # the bound and the batch that reached it
        assert len(await read(client)) == 500

    embedded(tmp_path, scenario)


def test_timeouts(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            with pytest.raises(Timeout, match="may still be") as caught:
                await producer.publish(b"x", timeout=0.0)
            assert caught.value.outcome == "unknown"
        assert await values(client) == [b"x"]
        with pytest.raises(Timeout, match="CreateTopic: no answer within 0 s"):
            await client.admin().create_topic("u", timeout=0.0)

    embedded(tmp_path, scenario, durability="fsync")


@pytest.mark.parametrize("keyed", [False, True])
def test_a_bad_message_among_many_leaves_nothing_behind(tmp_path: Path, keyed: bool) -> None:
    async def scenario(client: tailrace.Client) -> None:
        many: list[Any] = [b"good"] * 2500
        keys = [b"k"] * len(many) if keyed else None
        async with client.producer("t") as producer:
            for bad in ("text", None if not keyed else 7, b"x" * (2 << 20)):
                many[-1] = bad
                with pytest.raises((InvalidRequest, TooLarge), match="value"):
                    await producer.send_many(many, keys=keys)
        assert await values(client) == []

    embedded(tmp_path, scenario)


def test_one_reader_is_for_one_task(tmp_path: Path) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.reader("t", start="earliest") as reader:
            first = asyncio.create_task(anext(reader))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequest, match="one task at a time"):
                await anext(reader)
            async with client.producer("t") as producer:
                await producer.publish(b"for the first")
            assert (await first).value == b"for the first"

    embedded(tmp_path, scenario)
