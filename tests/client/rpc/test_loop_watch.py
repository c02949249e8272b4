"""An event loop that stood still: its consumers say so, once, with the time and what to do."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import uvloop

import tailrace
from tailrace.client.rpc import loop_watch
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import on_broker, publish
from tests.client.virtual_loop import VirtualLoop


def block(seconds: float) -> None:
    """What `time.sleep` does to a loop, without the time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._jump.now_s += seconds


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "stood still" in record.getMessage()
    ]


def test_a_handler_that_blocks_the_loop_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"short", b"long")

        async def handler(delivery: tailrace.Delivery) -> None:
            block(2 if delivery.value == b"short" else 14)
            consumer.stop() if delivery.value == b"long" else None

        async with client.consumer("t", "g") as consumer, client.consumer("t", "other"):
            await consumer.run(handler)
            await asyncio.sleep(2)
            assert loop_watch._watches
        assert not loop_watch._watches

    on_broker(scenario)
    (text,) = warnings(caplog)  # Two consumers, one stall.
    assert "stood still for 1" in text
    assert "end after 30.0 s" in text
    assert "asyncio.to_thread" in text


def test_warnings_are_rare_and_count_those_between(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.consumer("t", "g", lease_ms=600, session_ms=600_000):
            for _ in range(5):
                block(0.5)
                await asyncio.sleep(0.1)
            assert len(warnings(caplog)) == 1
            await asyncio.sleep(loop_watch.STALL_QUIET_S)
            assert len(warnings(caplog)) == 1
            block(0.5)
            await asyncio.sleep(0.1)

    on_broker(scenario)
    first, second = warnings(caplog)
    assert "more since" not in first
    assert "(4 times more since the last warning)" in second
    assert "end after 0.6 s" in second


def test_a_busy_loop_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.consumer("t", "g", lease_ms=600):
            for _ in range(50):
                block(0.1)
                await asyncio.sleep(0)

    on_broker(scenario)
    assert not warnings(caplog)


def test_any_loop_can_be_watched() -> None:
    loop = uvloop.new_event_loop()
    loop_watch.watch(loop, "me", 1000)
    loop_watch.unwatch(loop, "me")
    assert not loop_watch._watches
    loop.close()


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_was_closed_before_its_consumers_is_not_kept(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    class Member:
        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            self.loop = loop

    loop = make()
    member = Member(loop)
    loop_watch.watch(loop, member, 1000)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    gone = weakref.ref(member)
    del loop, member
    gc.collect()
    assert gone() is None
    assert not loop_watch._watches
