"""Messages that come again: those behind them come after them, whatever arrives in the meantime."""

import asyncio
import logging
from typing import Any

import pytest

import tailrace
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Ack, Extend, GiveBack, Nack, RejectMessages, Settled
from tailrace.errors import InvalidRequest, LeaseLost
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import on_broker, partition, publish
from tests.client.queue.test_membership import Script, make, take
from tests.client.virtual_loop import rounds, run


def ordered() -> Script:
    script = Script()
    script.options = {"ordering": "partition"}
    return script


@pytest.mark.parametrize("failure", [True, False])
@pytest.mark.parametrize("overtaken", [True, False])
def test_what_is_leased_after_a_message_went_back_is_kept(failure: bool, overtaken: bool) -> None:
    """The answer to a nack and the next lease arrive in either order, before the caller goes on."""

    async def scenario() -> None:
        script = ordered()
        async with make(script) as consumer:
            first = await take_one(script, consumer, b"a", b"b", b"c")
            script.answers[Nack] = [None]
            nack = asyncio.ensure_future(first.nack(delay=0, failure=failure))
            await rounds()
            if overtaken:
                script.grant(b"a", b"b", b"c", lease=8)
            script.answer(Nack, Settled())
            if not overtaken:
                script.grant(b"a", b"b", b"c", lease=8)
            await nack
            again = [await anext(consumer) for _ in range(3)]
            assert [(d.value, d.lease) for d in again] == [(b"a", 8), (b"b", 8), (b"c", 8)]

    run(scenario())


async def take_one(script: Script, consumer: Any, *values: bytes) -> Any:
    """The broker delivers these, and one is taken; another poll is out then."""
    taking = asyncio.ensure_future(anext(consumer))
    await rounds()
    script.grant(*values)
    delivery = await taking
    await rounds()
    return delivery


def test_a_lease_of_which_nobody_can_tell_is_given_back_and_not_forgotten() -> None:
    """It came before the answer to the nack: the broker may have granted it before or after."""

    async def scenario() -> None:
        script = ordered()
        async with make(script) as consumer:
            first = await take_one(script, consumer, b"a", b"b")
            script.answers[Nack] = [None]
            nack = asyncio.ensure_future(first.nack(delay=5))
            await rounds()
            script.grant(b"c", b"d", lease=8, offset=2)
            script.answer(Nack, Settled())
            await nack
            back = [request.leases for request in script.of(GiveBack)]
            assert back == [[(8, [2, 4])], [(7, [1, 2])]]

    run(scenario())


def test_an_acknowledgement_after_a_nack_is_no_silent_success() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            (first,) = await take(script, consumer, b"a")
            await first.nack()
            await first.nack()  # Twice the same is harmless.
            with pytest.raises(LeaseLost):
                await first.ack()

    run(scenario())


def test_texts_that_cannot_be_encoded_are_spelt_out() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            one, two = await take(script, consumer, b"a", b"b")
            await one.nack(error="caf\udce9.txt")
            await two.reject("caf\udce9.txt")
            assert script.of(Nack)[0].error == "caf\\udce9.txt"
            assert script.of(RejectMessages)[0].error == "caf\\udce9.txt"

    run(scenario())


def test_a_settlement_that_cannot_be_sent_leaves_the_message_to_be_settled() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            (first,) = await take(script, consumer, b"a")
            wrong: Any = None
            with pytest.raises(InvalidRequest, match="reason: a text, not None"):
                await first.reject(wrong)
            with pytest.raises(InvalidRequest, match="error: a text, not None"):
                await first.nack(error=wrong)
            for delay in (-1, float("nan"), float("inf"), True, "1"):
                with pytest.raises(InvalidRequest, match="delay: seconds"):
                    await first.nack(delay=delay)  # type: ignore[arg-type]
            script.answers[RejectMessages] = [Refusal("invalid_request", "no", "none")]
            with pytest.raises(InvalidRequest):
                await first.reject("x")
            await first.ack()
            assert len(script.of(Ack)) == 1

    run(scenario())


@pytest.mark.parametrize("ordering", ["key", "partition"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_key_that_fails_at_once_and_dies_takes_no_other_message_along(
    ordering: str, concurrency: int
) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", ordering=ordering, max_attempts=2, backoff_ms=1, lease_ms=3000)
        for number in range(10):
            await publish(client, b"bad", b"two", b"three", key=b"k%d" % number)
        seen: list[tuple[bytes | None, bytes | None]] = []

        async def handler(delivery: tailrace.Delivery) -> None:
            seen.append((delivery.key, delivery.value))
            if delivery.value == b"bad":
                raise ValueError("\udcff")

        async with client.consumer("t", "g") as consumer:
            task = asyncio.create_task(consumer.run(handler, concurrency=concurrency))
            for _ in range(200):
                await broker.advance(0.1)
                if (await partition(client))["lag"] == 0:
                    break
            consumer.stop()
            await task
        figures = await partition(client)
        assert (figures["failures"], figures["dead_lettered"], figures["lag"]) == (20, 10, 0)
        for number in range(10):
            values = [value for key, value in seen if key == b"k%d" % number]
            assert values == [b"bad", b"bad", b"two", b"three"]

    on_broker(scenario)


def test_a_run_that_ends_gives_back_what_waits_behind_its_key_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, *(b"%d" % number for number in range(6)), key=b"k")
        begun = asyncio.Event()

        async def handler(delivery: tailrace.Delivery) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with client.consumer("t", "g") as consumer:
            task = asyncio.create_task(consumer.run(handler, concurrency=2))
            await begun.wait()
            await rounds(20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await broker.settle()
        figures = await partition(client)
        assert (figures["failures"], figures["in_flight"], figures["lag"]) == (0, 0, 6)

    with caplog.at_level(logging.WARNING):
        on_broker(scenario)
    assert [record.message for record in caplog.records] == []


def test_a_handler_whose_error_cannot_be_printed_has_failed_like_any_other() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        async with client.consumer("t", "g", max_attempts=1) as consumer:

            async def handler(delivery: tailrace.Delivery) -> None:
                consumer.stop()
                raise Mute

            await consumer.run(handler)
        await broker.settle()
        (letter,) = await client.dead_letters("t").list()
        assert letter.error == "Mute: (its text cannot be shown: RuntimeError)"

    on_broker(scenario)


def test_a_failure_that_cannot_be_told_is_not_held_for_ever() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:

            async def handler(delivery: tailrace.Delivery) -> None:
                raise ValueError("no")

            task = asyncio.ensure_future(consumer.run(handler))
            await rounds()
            script.answers[Nack] = [Refusal("storage_fault", "the disk", "none")]
            script.grant(b"a")
            await rounds(10)
            assert [request.failure for request in script.of(Nack)] == [True, False]
            await asyncio.sleep(100)
            assert script.of(Extend) == []
            consumer.stop()
            await task

    run(scenario())


def test_a_handler_that_becomes_slow_amid_some_rows_gives_the_rest_of_them_back() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            await take_one(script, consumer, *[b"%d" % row for row in range(60)])
            for _ in range(2):
                await asyncio.sleep(0.1)
                await asyncio.wait_for(anext(consumer), 1)
            await rounds()
            (back,) = script.of(GiveBack)
            (spans,) = [spans for _, spans in back.leases]
            assert spans[0] == 3, "three were taken"
            assert spans[-1] == 60

    run(scenario())
