"""Atomic writes in the SDK: all or nothing over topics, once per version, also when answers get lost.

Also covers `sync/blocking_atomic.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.sync
from tailrace.client.publish import atomic_write
from tailrace.core.model.identifiers import Refusal, partition_of
from tailrace.core.model.queue_commands import DecideStaged, StageRows
from tailrace.errors import Full, InvalidRequest, NotFound, TooLarge
from tailrace.ports import BrokerVerbs, Respond
from tailrace.testing import LocalBroker, open_local

Scenario = Callable[[tailrace.Client], Coroutine[Any, Any, None]]


def run(broker: LocalBroker, scenario: Scenario, **topic: Any) -> None:
    """Run a scenario with the topics `t` and `u`."""
    for name in "tu":
        broker.create_topic(name, **{"partitions": 1, **topic})

    async def main() -> None:
        async with broker.client() as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(main(), 30))


def values(broker: LocalBroker, topic: str) -> list[bytes | None]:
    return [message.value for message in broker.published(topic)]


def staged(broker: LocalBroker) -> int:
    return sum(
        runtime.state.staging.nbytes for name in "tu" for runtime in broker._engine.topics.get(name).runtimes
    )


def test_all_is_written_at_the_end_of_the_block(tailrace_broker: LocalBroker) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.atomic("w", 1) as tx:
            await tx.send("t", b"1", key=b"k", headers={"h": b"v"}, priority=0, ttl=60)
            await tx.send("t", b"2")
            await tx.send("u", b"3", timestamp=1_000_000)
            assert tx.won is None
            assert values(tailrace_broker, "t") == []
        assert tx.won
        assert tx.applied

    run(tailrace_broker, scenario)
    first, second = tailrace_broker.published("t")
    assert (first.value, first.key, first.headers, first.priority) == (b"1", b"k", [("h", b"v")], 0)
    assert first.expires_at is not None
    assert (second.value, second.key, second.headers, second.priority) == (b"2", None, [], 2)
    assert first.id != second.id
    (third,) = tailrace_broker.published("u")
    assert third.timestamp.timestamp() == 1


def test_delayed_messages_wait_after_the_end_of_the_block(tailrace_broker: LocalBroker) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.atomic("w", 1) as tx:
            await tx.send("t", b"late", delay=60, key=b"k")
            await tx.send("t", b"now")
            await tx.send("t", b"past", deliver_at=1_000_000)
            await tx.send("t", b"sooner", delay=timedelta(seconds=30))
            with pytest.raises(InvalidRequest, match="delay"):
                await tx.send("t", b"x", delay=-1)
            with pytest.raises(InvalidRequest, match="delay"):
                await tx.send("t", b"x", delay=1, deliver_at=1)
        assert tx.applied
        assert values(tailrace_broker, "t") == [b"now", b"past"]
        await tailrace_broker.advance(31)
        assert values(tailrace_broker, "t") == [b"now", b"past", b"sooner"]
        await tailrace_broker.advance(30)

    run(tailrace_broker, scenario)
    assert values(tailrace_broker, "t") == [b"now", b"past", b"sooner", b"late"]


def test_an_error_in_the_block_writes_nothing(
    tailrace_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "STAGE_ROWS", 2)

    async def scenario(client: tailrace.Client) -> None:
        async def fail(tx: atomic_write.Atomic) -> None:
            async with tx:
                for number in range(5):
                    await tx.send("t", b"%d" % number)
                assert staged(tailrace_broker) > 0
                raise ZeroDivisionError

        tx = client.atomic("w", 1)
        with pytest.raises(ZeroDivisionError):
            await fail(tx)
        assert tx.won is None
        assert staged(tailrace_broker) == 0

    run(tailrace_broker, scenario)
    assert values(tailrace_broker, "t") == []


def test_a_version_is_written_once(tailrace_broker: LocalBroker) -> None:
    async def scenario(client: tailrace.Client) -> None:
        for attempt in range(3):
            async with client.atomic("w", 1) as tx:
                await tx.send("t", b"%d" % attempt)
            assert tx.won is (attempt == 0)
        async with client.atomic("w", 0) as tx:
            await tx.send("t", b"old")
        assert tx.won is False
        async with client.atomic("other", 0) as tx:
            await tx.send("t", b"other")
        assert tx.won
        assert staged(tailrace_broker) == 0

    run(tailrace_broker, scenario)
    assert values(tailrace_broker, "t") == [b"0", b"other"]


def test_a_version_without_messages_is_decided_once_too(tailrace_broker: LocalBroker) -> None:
    async def scenario(client: tailrace.Client) -> None:
        link = await open_local(tailrace_broker.name)
        verbs = LossyVerbs(link, DecideStaged, 2)
        async with atomic_write.Atomic(verbs, "w", 7, 30) as tx:
            pass
        await link.close()
        assert tx.won, "its own answer was lost, and it asked again"
        for _ in range(2):
            async with client.atomic("w", 7) as tx:
                pass
            assert tx.won is False
        async with client.atomic("w", 7) as tx:
            await tx.send("t", b"1")
        assert tx.won is False
        async with client.atomic("w", 8) as tx:
            pass
        assert tx.won

    run(tailrace_broker, scenario)
    assert values(tailrace_broker, "t") == []


def test_many_messages_go_in_batches_and_stay_in_order(
    tailrace_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "STAGE_BYTES", 1000)

    async def scenario(client: tailrace.Client) -> None:
        async with client.atomic("w", 1) as tx:
            for number in range(200):
                await tx.send("t", b"%03d" % number, key=b"same")

    run(tailrace_broker, scenario, partitions=3)
    messages = tailrace_broker.published("t")
    assert [message.value for message in messages] == [b"%03d" % number for number in range(200)]
    assert {message.partition for message in messages} == {partition_of(b"same", 3)}


def test_an_explicit_partition_is_taken(tailrace_broker: LocalBroker) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.atomic("w", 1) as tx:
            for partition in (2, 0):
                await tx.send("t", b"%d" % partition, partition=partition)
            with pytest.raises(NotFound):
                await tx.send("t", b"x", partition=3)

    run(tailrace_broker, scenario, partitions=3)
    found = [(message.partition, message.value) for message in tailrace_broker.published("t")]
    assert found == [(0, b"0"), (2, b"2")]


def test_bad_messages_are_refused_alone(tailrace_broker: LocalBroker) -> None:
    async def scenario(client: tailrace.Client) -> None:
        async with client.atomic("w", 1) as tx:
            with pytest.raises(TooLarge):
                await tx.send("t", bytes(2 << 20))
            with pytest.raises(InvalidRequest):
                await tx.send("t", "text")  # type: ignore[arg-type]
            with pytest.raises(NotFound):
                await tx.send("nowhere", b"1")
            await tx.send("t", b"good")
        assert tx.won

    run(tailrace_broker, scenario)
    assert values(tailrace_broker, "t") == [b"good"]


def test_wrong_use_is_told(tailrace_broker: LocalBroker) -> None:
    async def scenario(client: tailrace.Client) -> None:
        for writer, version in (("", 1), ("w", -1), ("w", "1"), (5, 1)):
            with pytest.raises(InvalidRequest):
                client.atomic(writer, version)  # type: ignore[arg-type]
        tx = client.atomic("w", 1)
        with pytest.raises(InvalidRequest):
            await tx.send("t", b"1")
        async with tx:
            pass
        with pytest.raises(InvalidRequest):
            await tx.send("t", b"1")
        with pytest.raises(InvalidRequest):
            async with tx:
                pass
        with pytest.raises(InvalidRequest, match="writer"):
            async with client.atomic("new\nline", 1):
                pass

    run(tailrace_broker, scenario)


def test_nothing_is_decided_without_a_message_that_could_not_be_staged(
    tailrace_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "STAGE_ROWS", 1)

    async def scenario(client: tailrace.Client) -> None:
        async def overlook(tx: atomic_write.Atomic) -> None:
            async with tx:
                await tx.send("t", b"1")
                tailrace_broker.fail_next(Full("no space is left because the test asked for it"))
                with pytest.raises(Full):
                    await tx.send("u", b"2")

        with pytest.raises(InvalidRequest, match="could not be staged"):
            await overlook(client.atomic("w", 1, timeout=0.5))
        async with client.atomic("w", 1) as tx:
            await tx.send("t", b"again")
        assert tx.won

    run(tailrace_broker, scenario)
    assert values(tailrace_broker, "t") == [b"again"]


class LossyVerbs:
    """A connection on which the first answers to one kind of request get lost, after the broker has acted."""

    def __init__(self, inner: BrokerVerbs, kind: type, losses: int) -> None:
        self.clock = inner.clock
        self._inner = inner
        self._kind = kind
        self.left = losses

    def submit(self, request: Any, body: Any, respond: Respond) -> None:
        def lost(reply: Any, parts: Any) -> None:
            respond(Refusal("unavailable", "the connection broke", "unknown"), ())

        lose = isinstance(request, self._kind) and self.left > 0
        self.left -= lose
        self._inner.submit(request, body, lost if lose else respond)


@pytest.mark.parametrize("kind", [StageRows, DecideStaged])
def test_answers_that_get_lost_are_asked_for_again(
    tailrace_broker: LocalBroker, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "STAGE_ROWS", 2)

    async def scenario(client: tailrace.Client) -> None:
        link = await open_local(tailrace_broker.name)
        verbs = LossyVerbs(link, kind, 3)
        async with atomic_write.Atomic(verbs, "w", 1, 30) as tx:
            for number in range(4):
                await tx.send("t", b"%d" % number)
            await tx.send("u", b"u")
        await link.close()
        assert verbs.left == 0
        assert tx.won

    run(tailrace_broker, scenario)
    assert values(tailrace_broker, "t") == [b"0", b"1", b"2", b"3"]
    assert values(tailrace_broker, "u") == [b"u"]


def test_the_blocking_form_has_the_same_names(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    with tailrace.sync.connect() as client:
        with client.atomic("w", 4) as tx:
            tx.send("t", b"1", key=b"k")
            tx.send("t", b"late", delay=3600)
            assert tx.won is None
        assert (tx.won, tx.applied, tx.writer, tx.version) == (True, True, "w", 4)
        failing = client.atomic("w", 5)
        with pytest.raises(NotFound), failing:
            failing.send("nowhere", b"2")
        with client.atomic("w", 4) as tx:
            tx.send("t", b"3")
        assert tx.won is False
    assert values(tailrace_broker, "t") == [b"1"]


def test_it_lasts_over_files(tmp_path: Path) -> None:
    async def write(version: int) -> bool | None:
        async with tailrace.connect(f"embedded:{tmp_path}") as client:
            await client.admin().create_topic("t", if_missing=True, partitions=2)
            async with client.atomic("w", version) as tx:
                for partition in range(2):
                    await tx.send("t", b"%d" % version, partition=partition)
            return tx.won

    async def read() -> list[bytes | None]:
        async with (
            tailrace.connect(f"embedded:{tmp_path}") as client,
            client.reader("t", start="earliest", stop_at_end=True) as reader,
        ):
            return sorted([message.value async for message in reader])  # type: ignore[type-var]

    won = [asyncio.run(asyncio.wait_for(write(version), 30)) for version in (1, 1, 2)]
    assert won == [True, False, True]
    assert asyncio.run(asyncio.wait_for(read(), 30)) == [b"1", b"1", b"2", b"2"]
