"""A sync that fails below a real broker, anywhere in the life of messages: nothing is acknowledged and gone,
nothing dies that lives, and what was told does not go back."""

import asyncio
import shutil
from pathlib import Path

import pytest

import tailrace
from tailrace.core.model.commands import Offsets
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Committed
from tailrace.errors import StorageFault
from tests.e2e.broker_process import BrokerProcess, inject
from tests.e2e.group_workload import until
from tests.e2e.raw_client import RawClient

SEGMENT = "topics/a~1/0/00000000000000000000.log"
GROUP = "g"
COUNT = 6

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


class Account:
    """What a client was told, until a fault ended it."""

    def __init__(self) -> None:
        self.published: list[bytes] = []
        self.acked: set[bytes] = set()
        self.dead: set[bytes] = set()
        self.doubtful: set[bytes] = set()
        """Sent or settled with an outcome that nobody knows."""
        self.committed = -1
        self.fault: StorageFault | None = None


async def committed(broker: BrokerProcess) -> int | Refusal:
    """The place of the group, as the broker tells it."""
    async with RawClient(broker.address) as raw:
        reply = await raw.request(Committed("a", GROUP))
        return reply.offsets[0] if isinstance(reply, Offsets) else reply


async def live(broker: BrokerProcess, account: Account) -> None:
    """Publish, ack the even ones and reject the odd ones, until something fails."""
    value = b""
    async with tailrace.connect(broker.url) as client:
        await client.admin().create_topic("a", partitions=1)
        try:
            async with client.producer("a") as producer:
                for number in range(COUNT):
                    value = b"%d" % number
                    await producer.publish(value)
                    account.published.append(value)
            async with client.consumer("a", group=GROUP, lease_ms=60_000) as consumer:
                for number in range(COUNT):
                    message = await anext(consumer)
                    value = message.value or b""
                    if number % 2:
                        await message.reject("odd")
                        account.dead.add(value)
                    else:
                        await message.ack()
                        account.acked.add(value)
                    place = await committed(broker)
                    if isinstance(place, Refusal):
                        raise StorageFault(place.message, outcome="unknown")
                    assert place >= account.committed
                    account.committed = place
        except StorageFault as fault:
            account.doubtful.add(value)
            account.fault = fault


async def stands_still(broker: BrokerProcess, account: Account) -> None:
    """Only what was synced is read, and only what died durably reaches the dead letters."""
    async with tailrace.connect(broker.url) as client:
        async with client.reader("a", start="earliest", stop_at_end=True) as reader:
            assert [message.value async for message in reader] == account.published
        for _ in range(2):
            place = await committed(broker)
            assert isinstance(place, Refusal)
            assert (place.code, place.outcome) == ("storage_fault", "unknown")
            with pytest.raises(StorageFault) as refused:
                async with client.producer("a") as producer:
                    await producer.publish(b"refused")
            assert refused.value.outcome == "unknown"
        letters = await dead_letters(client)
        assert set(letters) <= account.dead
        (row,) = (await client.admin().describe_topic("a")).partitions
        assert "sync failed" in row["fault"]


async def dead_letters(client: tailrace.Client) -> list[bytes]:
    """What is in the dead letters, in their order."""
    if "a.dlq" not in [topic.name for topic in await client.admin().list_topics()]:
        return []
    async with client.reader("a.dlq", start="earliest", stop_at_end=True) as reader:
        return [message.value or b"" async for message in reader]


async def goes_on(broker: BrokerProcess, account: Account) -> None:
    """After the restart every message is acked, or in the dead letters once, and nothing is doubled."""
    place = await committed(broker)
    assert isinstance(place, Refusal) or place >= account.committed, "what was told went back"
    async with tailrace.connect(broker.url) as client:
        async with client.producer("a") as producer:
            await producer.publish(b"last")
        got: list[bytes] = []
        async with client.consumer("a", group=GROUP, lease_ms=60_000) as consumer:
            while b"last" not in got:
                message = await anext(consumer)
                got.append(message.value or b"")
                await message.ack()
        assert not account.acked & set(got), "what was acked came again"
        assert not account.dead & set(got), "what was rejected came again"
        assert len(got) == len(set(got))
        letters: list[bytes] = []

        async def all_dead() -> bool:
            letters[:] = await dead_letters(client)
            return account.dead <= set(letters)

        await until(all_dead, "the dead letters are there")
        assert len(letters) == len(set(letters))
        assert set(letters) <= account.dead | account.doubtful
        assert not set(letters) & set(got), "dead, and delivered again"
        stored = set(account.published) | {b"last"}
        settled = set(got) | set(letters) | account.acked | account.doubtful
        assert stored <= settled


@pytest.mark.parametrize(
    "nth", [2, 9, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 5, 8, 11, 12, 14))]
)
def test_a_sync_that_fails_anywhere_leaves_a_log_that_agrees_with_what_was_told(
    tmp_path: Path, nth: int
) -> None:
    account = Account()
    with BrokerProcess(tmp_path / "data", storage_storage_threads=1) as broker:
        broker.start(inject(f"fdatasync:error=EIO:when={nth}", paths=[str(broker.data / SEGMENT)]))
        asyncio.run(live(broker, account))
        assert account.fault is not None, "no sync failed"
        assert account.fault.outcome == "unknown", "the write may be there"
        asyncio.run(stands_still(broker, account))
        broker.kill()
        broker.start()
        asyncio.run(goes_on(broker, account))
        assert broker.stop() == 0


async def publish_on(producer: tailrace.Producer) -> None:
    """One message after the other, more slowly than the topic is synced."""
    for number in range(1000):
        await producer.publish(b"%d" % number)
        await asyncio.sleep(0.02)


async def read_on(client: tailrace.Client, read: list[int]) -> None:
    """All that there is."""
    async with client.reader("a", start="earliest", stop_at_end=True) as reader:
        async for message in reader:
            read.append(int(message.value or b""))


def test_an_interval_topic_shows_only_what_was_synced(tmp_path: Path) -> None:
    async def during(broker: BrokerProcess) -> None:
        async with tailrace.connect(broker.url) as client:
            options = {"durability": "interval", "sync_interval_ms": 50}
            await client.admin().create_topic("a", partitions=1, **options)
            async with client.producer("a") as producer:
                with pytest.raises(StorageFault):
                    await publish_on(producer)
            read: list[int] = []
            with pytest.raises(StorageFault) as told:
                await read_on(client, read)
            assert told.value.outcome == "unknown"
            assert read == list(range(len(read)))
            (row,) = (await client.admin().describe_topic("a")).partitions
            assert row["end_offset"] == len(read)

    with BrokerProcess(tmp_path / "data", storage_storage_threads=1) as broker:
        broker.start(inject("fdatasync:error=EIO:when=4", paths=[str(broker.data / SEGMENT)]))
        asyncio.run(during(broker))
        broker.restart()
