"""Real faults below a real broker, injected into its system calls: failed syncs, a full disk, death.

One storage thread, so that the n-th call of a rule is the n-th call of the broker.
"""

import asyncio
import shutil
from pathlib import Path

import pytest

import tailrace
from tailrace.core.model.commands import Published
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Full, StorageFault
from tests.e2e.broker_process import BrokerProcess, inject
from tests.e2e.raw_client import RawClient, publish
from tests.e2e.workload import Load, drain
from tests.history.checker import check
from tests.history.record import History, Sent, Value, encode_value

SEGMENT = "topics/a~1/0/00000000000000000000.log"
MESSAGE_BYTES = 300_000

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def one_thread(folder: Path) -> BrokerProcess:
    return BrokerProcess(folder / "data", storage_storage_threads=1, storage_segment_bytes=1 << 20)


async def publish_until_fault(broker: BrokerProcess, history: History) -> StorageFault:
    """Publish to topic `a` one by one until it fails; every result is noted."""
    async with tailrace.connect(broker.url) as client:
        for topic in ("a", "b"):
            await client.admin().create_topic(topic, partitions=1)
        async with client.producer("a") as producer:
            for counter in range(20):
                value = Value("p", counter)
                try:
                    result = await producer.publish(encode_value(value))
                except StorageFault as fault:
                    outcome = "unknown" if fault.outcome == "unknown" else "fail"
                    history.note(Sent(value, "a", outcome))
                    return fault
                history.note(Sent(value, "a", "ok", 0, result.offset))
    raise AssertionError("no fault came")


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_failed_sync_is_never_acknowledged_and_fences_the_partition(tmp_path: Path, nth: int) -> None:
    async def during(broker: BrokerProcess, history: History) -> None:
        await publish_until_fault(broker, history)
        async with tailrace.connect(broker.url) as client:
            # The partition takes no more writes, and says so; what was acknowledged can be read.
            async with client.producer("a") as producer:
                with pytest.raises(StorageFault, match="takes no writes until the broker is restarted") as no:
                    await producer.publish(b"refused")
                assert no.value.outcome == "unknown"
            acknowledged = [send.value for send in history.sends if send.outcome == "ok"]
            async with client.reader("a", start="earliest", stop_at_end=True) as reader:
                assert [m.value async for m in reader] == [encode_value(value) for value in acknowledged]
            # Others are not touched by it.
            async with client.producer("b") as producer:
                assert (await producer.publish(b"fine")).offset == 0
            (row,) = (await client.admin().describe_topic("a")).partitions
            assert "sync failed" in row["fault"]

    async def after(broker: BrokerProcess, history: History) -> None:
        async with tailrace.connect(broker.url) as client:
            async with client.producer("a") as producer:
                result = await producer.publish(encode_value(Value("q", 0)))
                history.note(Sent(Value("q", 0), "a", "ok", 0, result.offset))
            await drain(client, "a", history)

    history = History()
    with one_thread(tmp_path) as broker:
        rule = f"fdatasync:error=EIO:when={nth}"
        broker.start(inject(rule, paths=[str(broker.data / SEGMENT)]))
        asyncio.run(during(broker, history))
        broker.restart()
        asyncio.run(after(broker, history))
        assert broker.stop() == 0
    check(history).expect_clean()
    # The first sync of the file comes before its first message, the others belong to one message each.
    assert sum(send.outcome == "ok" for send in history.sends) == max(0, nth - 2) + 1


@pytest.mark.parametrize(
    "rules",
    [
        ["fallocate:error=ENOSPC:when=4..5"],
        ["pwritev2:error=ENOSPC:when=3..4"],
    ],
    ids=["no room for a segment", "no room for a message"],
)
def test_full_disk_refuses_writes_and_resumes_by_itself(tmp_path: Path, rules: list[str]) -> None:
    async def run(broker: BrokerProcess) -> None:
        async with RawClient(broker.address) as raw, tailrace.connect(broker.url) as client:
            await client.admin().create_topic("a", partitions=1, message_bytes_max=1 << 20)
            stored: list[int] = []
            refusals: list[Refusal] = []
            counter = 0
            while len(stored) < 12:
                counter += 1
                body = [b"%d" % counter + b"." * MESSAGE_BYTES]
                reply = await raw.request(*publish("a", body))
                if isinstance(reply, Published):
                    assert reply.base_offset == len(stored)
                    stored.append(counter)
                    continue
                assert isinstance(reply, Refusal)
                assert (reply.code, reply.outcome) == ("full", "none"), reply
                refusals.append(reply)
                # Reads go on: what is stored is there, from the disk.
                async with client.reader("a", start="earliest", stop_at_end=True) as reader:
                    found = [int((m.value or b"").split(b".")[0]) async for m in reader]
                assert found == stored
                await asyncio.sleep(0.2)
                assert len(refusals) < 100, "writes do not resume"
            assert refusals, "the disk was never full"
            (row,) = (await client.admin().describe_topic("a")).partitions
            assert row["fault"] is None

    async def after(broker: BrokerProcess) -> None:
        async with (
            tailrace.connect(broker.url) as client,
            client.reader("a", start="earliest", stop_at_end=True) as reader,
        ):
            assert [m.offset async for m in reader] == list(range(12))

    with one_thread(tmp_path) as broker:
        # Space is reserved with fallocate; a write that fails for lack of it can only be one of the segment.
        paths = [str(broker.data / SEGMENT)] if rules[0].startswith("pwritev2") else []
        broker.start(inject(*rules, paths=paths))
        asyncio.run(run(broker))
        broker.restart()
        asyncio.run(after(broker))


def test_producer_waits_for_a_full_disk_or_says_that_it_is_full(tmp_path: Path) -> None:
    async def run(broker: BrokerProcess) -> None:
        async with tailrace.connect(broker.url) as client:
            await client.admin().create_topic("a", partitions=1)
            async with client.producer("a", timeout=1.0) as producer:
                with pytest.raises(Full, match="no space is left") as full:
                    await producer.publish(b"impatient")
                assert full.value.outcome == "none"
            async with client.producer("a", timeout=30.0) as producer:
                assert (await producer.publish(b"patient")).offset == 0

    with one_thread(tmp_path) as broker:
        broker.start(inject("fallocate:error=ENOSPC:when=2..3"))
        asyncio.run(run(broker))


async def killed_at_a_call(broker: BrokerProcess, seed: int) -> None:
    """Load until the broker dies of the injected signal, wherever that is; then it starts again without."""

    async def start_again() -> None:
        await asyncio.to_thread(broker.wait)
        await asyncio.to_thread(broker.start)

    started = asyncio.create_task(start_again())
    async with tailrace.connect(broker.url) as client:
        admin = client.admin()
        await admin.create_topic("a", partitions=2, if_missing=True)
        options = {"durability": "interval", "sync_interval_ms": 20}
        await admin.create_topic("w", partitions=1, if_missing=True, **options)
    load = Load(broker.url, ["a", "w"], seed)
    load.start(producers=2)
    await started
    await load.until_acknowledged(100)
    await load.finish()
    report = check(load.history).expect_clean()
    assert report.unknown == 0


def test_death_at_a_sync(tmp_path: Path) -> None:
    with one_thread(tmp_path) as broker:
        # The first dozen belongs to the topics' own files.
        broker.start(inject("fdatasync:signal=SIGKILL:when=20"))
        asyncio.run(killed_at_a_call(broker, seed=3))


@pytest.mark.long
@pytest.mark.parametrize("nth", range(9, 60, 5))
@pytest.mark.parametrize("call", ["fdatasync", "fsync", "pwritev2", "ftruncate"])
def test_death_at_any_call(tmp_path: Path, call: str, nth: int) -> None:
    if call in ("fsync", "ftruncate"):
        nth = 1 + nth // 8  # There are few of them.
    with one_thread(tmp_path) as broker:
        broker.start(inject(f"{call}:signal=SIGKILL:when={nth}"))
        asyncio.run(killed_at_a_call(broker, seed=nth))
