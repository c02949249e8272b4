"""Ephemeral topics and rings on the real broker with virtual time, from the SDK and close to the disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.broker.partition import queue_partition
from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.commands import Fetch, Published
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import ReleaseDue
from tailrace.core.model.turn_input import TurnInput
from tailrace.errors import Overloaded, TooLarge
from tailrace.storage.files.file_store import FileStore
from tailrace.testing import LocalBroker
from tests.broker.queue_engine import QueueEngine, values
from tests.client.queue.test_consumer import on_broker, partition, publish, take, wait

SWEEP_S = 61
PATIENT: dict[str, Any] = {"lease_ms": 3_600_000, "session_ms": 3_600_000}
"""Members that live through leaps of the broker's time."""


def left(broker: LocalBroker) -> list[bytes]:
    """The messages that are still there."""
    return [message.value or b"" for message in broker.published("t")]


async def ack(consumer: tailrace.Consumer, count: int) -> None:
    for delivery in await take(consumer, count):
        await delivery.ack()


# -- collecting ----------------------------------------------------------------------------------------------


def test_a_message_stays_until_all_groups_have_settled_it() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("quiet", "t", **PATIENT)  # Nobody has ever connected to it.
        await publish(client, b"a", b"b", b"c")
        async with client.consumer("t", "g", **PATIENT) as consumer:
            await ack(consumer, 3)
            await wait(broker, SWEEP_S, 20)
            assert left(broker) == [b"a", b"b", b"c"]
            async with client.consumer("t", "quiet", **PATIENT) as other:
                await ack(other, 2)
                await wait(broker, SWEEP_S, 20)
                assert left(broker) == [b"c"]
                await ack(other, 1)
            await wait(broker, SWEEP_S, 20)
            assert left(broker) == []
        assert [(await partition(client, group))["collected"] for group in ("g", "quiet")] == [0, 0]
        assert (await partition(client))["committed"] == 3

    on_broker(scenario, retention="ephemeral")


def test_without_a_group_nothing_is_collected_and_a_deleted_one_holds_nothing() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b")
        await wait(broker, 24 * 3600, 3600)
        assert len(left(broker)) == 2
        for group in ("g", "quiet"):
            await client.groups().create(group, "t", **PATIENT)
        async with client.consumer("t", "g", **PATIENT) as consumer:
            await ack(consumer, 2)
            await wait(broker, SWEEP_S, 20)
            assert len(left(broker)) == 2
            await client.groups().delete("quiet")
            await wait(broker, SWEEP_S, 20)
            assert left(broker) == []

    on_broker(scenario, retention="ephemeral")


def test_a_stream_group_counts_by_its_committed_place() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c")
        async with client.consumer("t", "s", mode="stream", auto_commit_ms=3_600_000) as consumer:
            for _ in range(3):
                await anext(consumer)
            await wait(broker, SWEEP_S, 20)
            assert len(left(broker)) == 3
            await consumer.commit()
            await wait(broker, SWEEP_S, 20)
            assert left(broker) == []

    on_broker(scenario, retention="ephemeral")


def test_an_unsettled_message_in_the_middle_holds_what_is_behind_it() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c")
        async with client.consumer("t", "g", **PATIENT) as consumer:
            first, second, third = await take(consumer, 3)
            await first.ack()
            await third.ack()
            await wait(broker, SWEEP_S, 5)
            assert left(broker) == [b"b", b"c"]
            broker.restart()
            await wait(broker, SWEEP_S, 5)
            assert left(broker) == [b"b", b"c"]
            await second.ack()
            await wait(broker, SWEEP_S, 5)
            assert left(broker) == []

    on_broker(scenario, retention="ephemeral")


def test_a_limit_beside_it_drops_what_is_not_settled_and_counts_it() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", **PATIENT)
        await publish(client, b"a", b"b")
        await wait(broker, 200, 50)
        assert left(broker) == []
        assert (await partition(client))["collected"] == 2

    on_broker(scenario, retention="ephemeral", retention_ms=60_000)


def test_redriven_dead_letters_of_an_ephemeral_dead_letter_topic_are_collected() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"bad")
        async with client.consumer("t", "g", **PATIENT) as consumer:
            (delivery,) = await take(consumer)
            await delivery.reject("no use")
            await client.admin().alter_topic("t.dlq", retention="ephemeral")
            await wait(broker, SWEEP_S, 20)
            letters = client.dead_letters("t")
            assert len(await letters.list()) == len(broker.published("t.dlq")) == 1
            await letters.redrive()
            await wait(broker, SWEEP_S, 20)
            assert broker.published("t.dlq") == []

    on_broker(scenario)


def test_options_are_shown_and_taken_back() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        admin = client.admin()
        ring = {"ephemeral": True, "max_bytes": None, "max_messages": 5, "on_full": "overwrite"}
        options = (await admin.describe_topic("t")).options
        assert {name: options[name] for name in ring} == ring
        await admin.alter_topic("t", retention="forever")
        await client.groups().create("g", "t", **PATIENT)
        await publish(client, *(b"%d" % number for number in range(9)))
        assert len(left(broker)) == 9

    on_broker(scenario, retention="ephemeral", max_messages=5, on_full="overwrite")


# -- rings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["queue", "exclusive", "stream"])
def test_a_full_ring_refuses_and_accepts_right_after_acks(mode: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", mode=mode)
        await publish(client, b"a", b"b", b"c")
        with pytest.raises(Overloaded) as refused:
            await publish(client, b"d")
        assert (refused.value.outcome, refused.value.retry_after_ms) == ("none", 100)
        assert left(broker) == [b"a", b"b", b"c"]
        async with client.consumer("t", "g", mode=mode) as consumer:
            if isinstance(consumer, tailrace.Consumer):
                await ack(consumer, 3)
            else:
                for _ in range(3):
                    await anext(consumer)
                await consumer.commit()
            await publish(client, b"d", b"e")
        assert left(broker) == [b"d", b"e"]
        assert (await partition(client))["collected"] == 0

    on_broker(scenario, retention="ephemeral", max_messages=3)


def test_a_producer_waits_for_room_and_keeps_its_order() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", **PATIENT)
        found: list[bytes] = []
        sent = [b"%d" % number for number in range(40)]
        offsets: list[int | None] = []

        async def produce() -> None:
            async with client.producer("t") as producer:
                for value in sent:
                    offsets.append((await producer.publish(value)).offset)

        producing = asyncio.create_task(produce())
        await broker.settle()
        assert len(offsets) == 5
        async with client.consumer("t", "g", **PATIENT) as consumer:
            while len(found) < len(sent):
                (delivery,) = await take(consumer)
                found.append(delivery.value or b"")
                await delivery.ack()
        await producing
        assert offsets == list(range(40))
        assert found == sent
        assert (await partition(client))["collected"] == 0

    on_broker(scenario, retention="ephemeral", max_messages=5)


def test_overwriting_drops_the_oldest_and_counts_for_each_group() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("slow", "t")
        await publish(client, b"a", b"b", b"c")
        async with client.consumer("t", "g", **PATIENT) as consumer:
            await ack(consumer, 3)
            await publish(client, b"d", b"e")
            assert left(broker) == [b"c", b"d", b"e"]
            broker.restart()
            assert left(broker) == [b"c", b"d", b"e"]
            assert [delivery.value for delivery in await take(consumer, 2)] == [b"d", b"e"]
        async with client.consumer("t", "slow") as slow:
            assert [delivery.value for delivery in await take(slow, 3)] == [b"c", b"d", b"e"]
        assert [(await partition(client, group))["collected"] for group in ("g", "slow")] == [0, 2]
        with pytest.raises(TooLarge):
            async with client.producer("t") as producer:
                await (await producer.send_many([b"x"] * 4))

    on_broker(scenario, retention="ephemeral", max_messages=3, on_full="overwrite")


def test_delayed_messages_wait_for_room() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", **PATIENT)
        await publish(client, b"a", b"b")
        await publish(client, *(b"late %d" % number for number in range(5)), delay=1)
        await wait(broker, 3, 0.5)
        assert left(broker) == [b"a", b"b"]
        assert len(await client.scheduled("t")) == 5
        async with client.consumer("t", "g", **PATIENT) as consumer:
            await ack(consumer, 1)
            await wait(broker, 1, 0.25)
            assert left(broker) == [b"b", b"late 0"]
            broker.restart()
            await ack(consumer, 2)
            await wait(broker, 1, 0.25)
            assert left(broker) == [b"late 1", b"late 2"]
            await ack(consumer, 2)
            await wait(broker, 1, 0.25)
            assert left(broker) == [b"late 3", b"late 4"]
        assert await client.scheduled("t") == []

    on_broker(scenario, retention="ephemeral", max_messages=2)


def test_delayed_messages_overwrite_the_oldest() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", **PATIENT)
        await publish(client, b"a", b"b", b"c")
        await publish(client, *(b"late %d" % number for number in range(5)), delay=1)
        await wait(broker, 3, 0.5)
        assert left(broker) == [b"late 2", b"late 3", b"late 4"]
        assert (await partition(client))["collected"] == 5

    on_broker(scenario, retention="ephemeral", max_messages=3, on_full="overwrite")


def test_an_atomic_write_waits_for_room() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", **PATIENT)
        await publish(client, b"a", b"b")

        async def write() -> None:
            async with client.atomic("writer", 1) as tx:
                await tx.send("t", b"x")
                await tx.send("t", b"y")

        writing = asyncio.create_task(write())
        await wait(broker, 2, 0.5)
        assert left(broker) == [b"a", b"b"]
        async with client.consumer("t", "g", **PATIENT) as consumer:
            await ack(consumer, 2)
            await wait(broker, 5, 0.5)
            assert left(broker) == [b"x", b"y"]
        await asyncio.wait([writing], timeout=60)
        assert writing.done()

    on_broker(scenario, retention="ephemeral", max_messages=3)


# -- close to the disk ---------------------------------------------------------------------------------------


def test_bytes_are_those_of_what_is_stored_also_of_a_batch_with_duplicates() -> None:
    broker = QueueEngine()
    broker.create(retention="ephemeral")
    broker.enlist()
    for number in range(30):
        broker.send(bytes(100), bytes(100), dedup_ids=[b"same", b"id %d" % number])
    live = broker.runtime().state
    size = live.ring.nbytes(0)
    parts = broker.log().read(0, live.end_offset, 1 << 30)
    assert abs(size - sum(len(part) for part in parts)) < 200 * 31  # But for the frames' headers.
    assert size < sum(len(part) for part in parts)
    before = live.ring.buffers()
    broker.restart()
    assert broker.runtime().state.ring.buffers() == before


def test_a_batch_needs_room_for_what_is_stored_of_it_only() -> None:
    broker = QueueEngine()
    broker.create(retention="ephemeral", max_bytes=30_000, on_full="overwrite")
    broker.send(bytes(20_000), dedup_ids=[b"same"])
    broker.send(bytes(20_000), bytes(15_000), dedup_ids=[b"same", b"new"])
    state = broker.runtime().state
    assert (state.start_offset, state.end_offset) == (1, 2)


def test_what_is_overwritten_before_it_is_durable_was_never_there_for_readers() -> None:
    broker = QueueEngine()
    broker.create(retention="ephemeral", max_messages=2, on_full="overwrite")
    broker.enlist()
    broker.send(b"0")
    broker.threads.holding = True
    reading = broker.submit(Fetch("t", [(0, 1)], 1000, 60_000))
    answers = [broker.publish(b"%d" % number) for number in range(1, 8)]
    runtime = broker.runtime()
    assert (runtime.state.start_offset, runtime.start_offset, runtime.end_offset) == (6, 1, 1)
    assert reading == []
    assert not any(answers)
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert [type(reply) for ((reply, _),) in answers] == [Published] * 7
    ((reply, _),) = reading
    assert isinstance(reply, Refusal)
    assert (reply.code, reply.details["start_offset"]) == ("not_found", 2)
    assert broker.values(offset=6) == [b"6", b"7"]
    assert values(broker.lease()) == [b"6", b"7"]
    assert runtime.state.queues.figures("g")["collected"] == 6


@pytest.mark.parametrize("on_full", ["refuse", "overwrite"])
def test_disk_space_comes_back_without_waiting_for_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_full: str
) -> None:
    monkeypatch.setattr(queue_partition, "COLLECT_BYTES", 40_000)
    store = FileStore(tmp_path / "data", ManualClock(), segment_bytes=16_384)
    broker = QueueEngine(store)
    broker.create(retention="ephemeral", max_bytes=30_000, on_full=on_full)
    broker.enlist()
    sizes = []
    for _ in range(100):
        broker.send(bytes(4_000))
        if on_full == "refuse":
            broker.ack(*broker.lease())
        broker.settle()
        sizes.append(sum(file.stat().st_size for file in (tmp_path / "data").rglob("t~*/0/*.log")))
    assert max(sizes[50:]) < 160_000 < 100 * 4_000
    assert broker.runtime().state.queues.figures("g")["collected"] == (0 if on_full == "refuse" else 94)


def test_releases_are_cut_to_the_room_that_there_is() -> None:
    """What is due is more than the ring ever holds: it comes in pieces, and each is decided once."""
    broker = QueueEngine()
    broker.create(retention="ephemeral", max_bytes=8_000)
    broker.enlist()
    due_us = broker.clock.now_us() + 1_000_000
    broker.send(*(b"%03d" % number + bytes(500) for number in range(60)), deliver_at=[due_us] * 60)
    runtime = broker.runtime()
    decided: list[Any] = []
    decide = runtime.state._decide[ReleaseDue]

    def noting(command: Any, turn: TurnInput) -> Any:
        decided.append(command)
        return decide(command, turn)

    runtime.state._decide[ReleaseDue] = noting
    found: list[bytes] = []
    for _ in range(100):
        broker.pass_s(0.2)
        assert runtime.state.ring.nbytes(runtime.state.start_offset) <= 8_000
        messages = broker.lease()
        found += [value[:3] for value in values(messages)]
        if messages:
            broker.ack(*messages)
    assert found == [b"%03d" % number for number in range(60)]
    assert runtime.state.queues.figures("g")["collected"] == 0
    assert len(decided) < 40
