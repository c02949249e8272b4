"""Rights over real connections: they hold from the first user on, change at once, and survive a kill."""

import asyncio
from pathlib import Path

import pytest

import tailrace
from tailrace.errors import Denied, InvalidRequest, TailraceError, Unauthenticated
from tests.e2e.broker_process import BrokerProcess

ROOT, ANNA = "correct-horse-1", "battery-staple-2"
AT_ONCE_S = 5


def of(broker: BrokerProcess, user: str, password: str) -> tailrace.Client:
    """A client of a user, over loopback."""
    host, port = broker.address
    return tailrace.connect(f"tailrace://{user}:{password}@{host}:{port}", timeout=20)


async def refused(awaitable: object) -> type[TailraceError]:
    """The kind of refusal with which something ends now, and not when its wait is over."""
    with pytest.raises(TailraceError) as caught:
        await asyncio.wait_for(awaitable, AT_ONCE_S)  # type: ignore[call-overload]
    return caught.type


async def send(client: tailrace.Client, topic: str, value: bytes) -> None:
    async with client.producer(topic) as producer:
        await producer.publish(value)


async def furnish(broker: BrokerProcess) -> None:
    """The first user is made by somebody without credentials, who is nobody from then on."""
    async with tailrace.connect(broker.url) as client:
        await client.admin().create_topic("t", partitions=1)
        await client.admin().create_topic("secret", partitions=1)
        async with client.reader("t", start="latest") as reader:
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(0)
            await client.access().add_user("root", password=ROOT)
            assert await refused(waiting) is Unauthenticated
        assert await refused(client.admin().list_topics()) is Unauthenticated
    async with of(broker, "root", ROOT) as root:
        await root.access().add_user("anna", password=ANNA)


def test_rights_change_at_once_for_open_connections(tmp_path: Path) -> None:
    async def run(broker: BrokerProcess) -> None:
        await furnish(broker)
        async with of(broker, "root", ROOT) as root, of(broker, "anna", ANNA) as anna:
            rules = root.access()
            assert await anna.admin().list_topics() == []
            assert await refused(send(anna, "t", b"early")) is Denied
            reads = await rules.add_rule("allow", "user:anna", ["read"], "topic", "t")
            writes = await rules.add_rule("allow", "user:anna", ["publish"], "topic", "t")
            assert [topic.name for topic in await anna.admin().list_topics()] == ["t"]
            await send(anna, "t", b"one")
            async with anna.reader("t", start="earliest") as reader:
                assert (await asyncio.wait_for(anext(reader), 20)).value == b"one"
                waiting = asyncio.ensure_future(anext(reader))
                await asyncio.sleep(0)
                await rules.remove_rule(reads.id)
                assert await refused(waiting) is Denied
            async with anna.producer("t") as producer:
                await rules.add_rule("deny", "everyone", ["publish"], "topic", "*")
                assert await refused(producer.publish(b"late")) is Denied
            found = await rules.check("publish", "topic", "t", user="anna")
            assert not found.allowed
            assert found.rule is not None
            assert found.rule > writes.id

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(run(broker))
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


def test_a_consumer_that_may_consume_no_more_ends_at_once(tmp_path: Path) -> None:
    async def run(broker: BrokerProcess) -> None:
        await furnish(broker)
        async with of(broker, "root", ROOT) as root, of(broker, "anna", ANNA) as anna:
            rules = root.access()
            await rules.add_rule("allow", "user:anna", ["consume", "settle"], "topic", "t")
            group = await rules.add_rule("allow", "user:anna", ["consume", "settle"], "group", "g")
            await send(root, "t", b"one")
            async with anna.consumer("t", "g") as consumer:
                message = await asyncio.wait_for(anext(consumer), 20)
                await message.ack()
                waiting = asyncio.ensure_future(anext(consumer))
                await asyncio.sleep(0)
                await rules.remove_rule(group.id)
                assert await refused(waiting) is Denied

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(run(broker))
        assert "Traceback" not in broker.words()


def test_rules_survive_a_kill(tmp_path: Path) -> None:
    async def before(broker: BrokerProcess) -> None:
        await furnish(broker)
        async with of(broker, "root", ROOT) as root:
            await root.access().add_rule("allow", "user:anna", ["publish"], "topic", "t")

    async def after(broker: BrokerProcess) -> None:
        async with of(broker, "anna", ANNA) as anna:
            await send(anna, "t", b"one")
            assert await refused(send(anna, "secret", b"two")) is Denied
        with pytest.raises(Unauthenticated):
            async with tailrace.connect(broker.url) as nobody:
                await nobody.admin().list_topics()

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(before(broker))
        broker.kill()
        broker.start()
        asyncio.run(after(broker))
        assert "Traceback" not in broker.words()


def test_dead_letters_are_a_matter_of_their_origin(tmp_path: Path) -> None:
    async def run(broker: BrokerProcess) -> None:
        await furnish(broker)
        async with of(broker, "root", ROOT) as root, of(broker, "anna", ANNA) as anna:
            rules = root.access()
            await root.admin().create_topic("t.dlq", partitions=1)
            for value in (b"one", b"two"):
                async with root.producer("t") as producer:
                    await producer.publish(value)
            async with root.consumer("t", "g") as consumer:
                for _ in range(2):
                    await (await asyncio.wait_for(anext(consumer), 20)).reject("no use")
            async with root.reader("t.dlq", start="earliest") as reader:
                for _ in range(2):
                    await asyncio.wait_for(anext(reader), 20)
            wrong = rules.add_rule("deny", "user:anna", ["read", "settle"], "topic", "t.dlq")
            assert await refused(wrong) is InvalidRequest, "it would have no effect"
            assert await refused(anna.dead_letters("t").list()) is Denied
            await rules.add_rule("allow", "user:anna", ["read"], "topic", "t")
            letters = anna.dead_letters("t")
            assert [letter.message.value for letter in await letters.list()] == [b"one", b"two"]
            assert await refused(letters.purge()) is Denied
            await rules.add_rule("allow", "user:anna", ["settle"], "topic", "t")
            done = await letters.redrive()
            assert (done.count, done.failed) == (0, 2)
            assert "may not settle messages of group 'g'" in done.problems[0]
            await rules.add_rule("allow", "user:anna", ["settle"], "group", "g")
            await root.admin().trim_topic("t", 0, 1)  # The first has to be published again.
            done = await letters.redrive()
            assert (done.reopened, done.republished, done.failed) == (1, 0, 1)
            assert "may not publish to topic 't'" in done.problems[0]
            assert await refused(send(anna, "t.dlq", b"forged")) is Denied
            await rules.add_rule("allow", "user:anna", ["publish"], "topic", "t")
            done = await letters.redrive()
            assert (done.reopened, done.republished, done.failed) == (0, 1, 0)
            async with root.consumer("t", "g") as consumer:
                again = [await asyncio.wait_for(anext(consumer), 20) for _ in range(2)]
                assert sorted(message.value for message in again) == [b"one", b"two"]

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(run(broker))
        assert "Traceback" not in broker.words()
