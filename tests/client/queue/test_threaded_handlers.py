"""Handlers that are plain functions: in threads, while the loop goes on; and what they say by raising.

Also covers `client/queue/handler_verdicts.py`.
"""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import tailrace
import tailrace.sync
from tailrace.bus import Reject as BusReject
from tailrace.bus import Retry as BusRetry
from tailrace.bus.handlers import Handler
from tailrace.bus.outcomes import AckPolicy
from tailrace.client.queue.threaded_handlers import is_async
from tailrace.testing import LocalBroker

Scenario = Callable[[LocalBroker, tailrace.Client], Coroutine[Any, Any, None]]
CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("CONTEXT", default="none")


def on_real_loop(scenario: Scenario) -> None:
    """Threads take real time: so does the loop here; the broker's time stays virtual."""

    async def main() -> None:
        with LocalBroker() as broker:
            broker.create_topic("t", partitions=1)
            async with broker.client(timeout=5) as client:
                await scenario(broker, client)

    asyncio.run(asyncio.wait_for(main(), 60))


async def publish(client: tailrace.Client, *values: bytes, **fields: Any) -> None:
    async with client.producer("t") as producer:
        for value in values:
            await producer.publish(value, **fields)


async def figures(client: tailrace.Client) -> dict[str, Any]:
    return (await client.groups().describe("g")).partitions[0]


async def _coroutine(delivery: Any) -> None: ...


def _plain(delivery: Any) -> None: ...


class _Async:
    async def __call__(self, delivery: Any) -> None: ...

    async def method(self, delivery: Any, more: int = 0) -> None: ...


class _Plain:
    def __call__(self, delivery: Any) -> None: ...

    def method(self, delivery: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "on_loop"),
    [
        (_coroutine, True),
        (functools.partial(_coroutine), True),
        (_Async(), True),
        (functools.partial(_Async()), True),
        (_Async().method, True),
        (functools.partial(functools.partial(_Async().method, more=1)), True),
        (_plain, False),
        (functools.partial(_plain), False),
        (_Plain(), False),
        (_Plain().method, False),
        (_Async, False),
        (print, False),
        (lambda delivery: _coroutine(delivery), False),
    ],
)
def test_what_belongs_on_the_loop_is_recognised(handler: Any, on_loop: bool) -> None:
    assert is_async(handler) == on_loop
    declared = Handler(handler, ("a",), "t", "g", AckPolicy.ACK, None, None, None)
    assert declared.blocking != on_loop


def test_a_plain_function_runs_beside_the_loop_which_extends_its_lease() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        loop, busy, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        seen: list[tuple[str, int, str]] = []

        def handler(delivery: tailrace.BlockingDelivery) -> None:
            seen.append((threading.current_thread().name[:16], delivery.attempt, CONTEXT.get()))
            loop.call_soon_threadsafe(busy.set)
            assert go_on.wait(30)
            consumer.stop()

        CONTEXT.set("mine")
        async with client.consumer("t", "g", session_ms=600_000) as consumer:
            running = asyncio.create_task(consumer.run(handler))
            await busy.wait()
            for _ in range(40):  # Four times its lease.
                broker.clock.advance(3)
                await broker.settle()
            go_on.set()
            await running
        assert seen == [("tailrace-handler", 1, "mine")]
        state = await figures(client)
        assert (state["lag"], state["failures"], state["deliveries"]) == (0, 0, 1)

    on_real_loop(scenario)


def test_as_many_threads_as_may_be_at_work() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, *[b"%d" % number for number in range(9)])
        together = threading.Barrier(3, timeout=30)
        left = 9

        def handler(delivery: tailrace.BlockingDelivery) -> None:
            nonlocal left
            together.wait()
            left -= 1
            if not left:
                consumer.stop()

        async with client.consumer("t", "g") as consumer:
            await consumer.run(handler, concurrency=3)
        assert (await figures(client))["lag"] == 0

    on_real_loop(scenario)


def test_settling_waits_in_the_thread() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"ack", b"nowait", b"nack", b"reject", b"extend")

        def handler(delivery: tailrace.BlockingDelivery) -> None:
            match delivery.value:
                case b"ack":
                    delivery.ack()
                    assert delivery.settled
                case b"nowait":
                    delivery.ack_nowait()
                case b"nack":
                    delivery.nack(delay=3600, error="later")
                case b"reject":
                    delivery.reject("hopeless")
                case _:
                    delivery.extend(40_000)
                    delivery.ack()
                    consumer.stop()

        async with client.consumer("t", "g") as consumer:
            await consumer.run(handler, settle=False)
        state = await figures(client)
        assert (state["failures"], state["lag"]) == (1, 1)
        await broker.settle()
        (letter,) = await client.dead_letters("t").list()
        assert (letter.message.value, letter.error) == (b"reject", "hopeless")

    on_real_loop(scenario)


def test_a_lambda_around_a_coroutine_function_is_awaited_on_the_loop() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")

        async def handle(delivery: Any, text: str) -> None:
            assert asyncio.get_running_loop() is loop
            await delivery.ack()
            seen.append(text)
            consumer.stop()

        loop, seen = asyncio.get_running_loop(), list[str]()
        async with client.consumer("t", "g") as consumer:
            await consumer.run(lambda delivery: handle(delivery, "told"))
        assert seen == ["told"]
        assert (await figures(client))["lag"] == 0

    on_real_loop(scenario)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_run_that_is_cancelled_waits_for_the_thread_and_settles(concurrency: int) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        loop, busy, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def handler(delivery: tailrace.BlockingDelivery) -> None:
            loop.call_soon_threadsafe(busy.set)
            assert go_on.wait(30)

        async with client.consumer("t", "g") as consumer:
            running = asyncio.create_task(consumer.run(handler, concurrency=concurrency))
            await busy.wait()
            running.cancel()
            done, _ = await asyncio.wait([running], timeout=0.05)
            assert not done
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert (await figures(client))["lag"] == 0

    on_real_loop(scenario)


def test_a_second_cancellation_gives_the_thread_up() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        loop, busy, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def handler(delivery: tailrace.BlockingDelivery) -> None:
            loop.call_soon_threadsafe(busy.set)
            assert go_on.wait(30)

        async with client.consumer("t", "g") as consumer:
            running = asyncio.create_task(consumer.run(handler))
            await busy.wait()
            for _ in range(2):
                running.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await running
        go_on.set()
        assert (await figures(client))["lag"] == 1

    on_real_loop(scenario)


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no")])
def test_whatever_a_plain_function_raises_is_its_failure(error: Exception) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"bad", b"good")

        def handler(delivery: tailrace.BlockingDelivery) -> None:
            if delivery.value == b"bad":
                raise error
            consumer.stop()

        async with client.consumer("t", "g", max_attempts=1) as consumer:
            await consumer.run(handler)
        await broker.settle()
        (letter,) = await client.dead_letters("t").list()
        assert letter.error == f"{type(error).__name__}: no"

    on_real_loop(scenario)


def test_a_stream_is_read_by_a_plain_function_in_a_thread() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"0", b"1", b"bad")
        seen: list[str] = []

        def handler(message: tailrace.Message) -> None:
            seen.append(threading.current_thread().name[:16])
            if message.value == b"bad":
                raise ValueError("bad")

        async with client.consumer("t", "g", mode="stream") as consumer:
            with pytest.raises(ValueError, match="bad"):
                await consumer.run(handler)
        assert seen == ["tailrace-handler"] * 3

    on_real_loop(scenario)


# -- what a handler says by raising --------------------------------------------------------------------------


def test_there_is_one_retry_and_one_reject() -> None:
    assert tailrace.Retry is BusRetry is tailrace.sync.Retry
    assert tailrace.Reject is BusReject is tailrace.sync.Reject


@pytest.mark.parametrize("settle", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_retry_and_reject_mean_what_they_mean_on_the_bus(
    plain: bool, settle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"hopeless", b"later", b"end")

        def decide(delivery: Any) -> None:
            if delivery.value == b"hopeless":
                raise tailrace.Reject("not for me")
            if delivery.value == b"later" and delivery.attempt == 1:
                raise tailrace.Retry(7, "busy")
            if delivery.value == b"end":
                consumer.stop()

        async def on_loop(delivery: Any) -> None:
            decide(delivery)

        async with client.consumer("t", "g") as consumer:
            await consumer.run(decide if plain else on_loop, settle=settle)
        await broker.settle()
        (letter,) = await client.dead_letters("t").list()
        found = (letter.message.value, letter.reason, letter.error, letter.attempts)
        assert found == (b"hopeless", "rejected", "not for me", 0)
        trace = await client.trace("t", partition=0, offset=1)
        (nacked,) = [event for event in trace.lives[0].events if event.event == "nacked"]
        assert (nacked.details["delay_us"], nacked.details["error"]) == (7_000_000, "Retry: busy")

    on_real_loop(scenario)
    assert "failed on" not in caplog.text  # Nothing went wrong: the handler said what it wants.


def test_a_rejected_message_leaves_those_of_its_key_where_they_are() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"0", b"1", b"2", key=b"k")
        seen: list[tuple[bytes | None, int]] = []

        async def handler(delivery: tailrace.Delivery) -> None:
            seen.append((delivery.value, delivery.deliveries))
            if delivery.value == b"0":
                raise tailrace.Reject
            if delivery.value == b"2":
                consumer.stop()

        async with client.consumer("t", "g") as consumer:
            await consumer.run(handler, concurrency=2)
        assert seen == [(b"0", 1), (b"1", 1), (b"2", 1)]

    on_real_loop(scenario)


def test_the_blocking_consumer_understands_them(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    with tailrace.sync.connect(timeout=10) as client:
        with client.producer("t") as producer:
            producer.publish(b"hopeless")
            producer.publish(b"end")
        with client.consumer("t", "g") as consumer:

            def handler(delivery: tailrace.sync.Delivery) -> None:
                if delivery.value == b"hopeless":
                    raise tailrace.sync.Reject("no")
                consumer.stop()

            consumer.run(handler)
        (letter,) = client.dead_letters("t").list()
        assert (letter.reason, letter.error) == ("rejected", "no")
