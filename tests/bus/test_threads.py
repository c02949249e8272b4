"""Blocking handlers whose threads hang: what is left behind takes nothing away from others.

Covers `bus/handler_threads.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import tailrace
from tailrace.bus import AckPolicy, BlockingMessage
from tailrace.testing import LocalBroker
from tests.bus.test_bus import Paid, Pay, _quiet, make, play


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets the threads go that hang."""
    event = threading.Event()
    yield event
    event.set()


def test_a_thread_that_hangs_keeps_nobody_waiting(
    tailrace_broker: LocalBroker, release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    bus, ran, paid = make(), [], []

    @bus.handler(Pay, timeout=0.05, ack=AckPolicy.REJECT_ON_ERROR)
    def pay(message: BlockingMessage[Pay]) -> None:
        ran.append(message.data.order)
        if message.data.order < 3:
            release.wait(30)

    @bus.handler(Paid, timeout=5)
    def note(message: BlockingMessage[Paid]) -> None:
        paid.append(message.data.order)

    async def script(client: tailrace.Client) -> None:
        for order in range(5):
            await bus.send(Pay(order))
        await _quiet(tailrace_broker, lambda: len(ran) == 5)
        await bus.publish(Paid(1))
        await _quiet(tailrace_broker, lambda: len(paid) == 1)

    play(tailrace_broker, bus, script)
    assert sorted(ran) == [0, 1, 2, 3, 4]
    assert paid == [1]
    errors = [letter.error for letter in tailrace_broker.dead_letters("shop.commands")]
    assert errors == ["TimeoutError: ran past its timeout of 0.05 s"] * 3
    assert "runs on in its thread: 3 such calls, 64 at most" in caplog.text


def test_a_timeout_begins_when_there_is_a_thread(
    tailrace_broker: LocalBroker, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.bus.handler_threads.SPARE", 0)
    tailrace_broker.create_topic("shop.commands", partitions=1)
    bus, ran = make(), []

    @bus.handler(Pay, timeout=0.05, ack=AckPolicy.REJECT_ON_ERROR)
    def pay(message: BlockingMessage[Pay]) -> None:
        ran.append(message.data.order)
        if message.data.order == 0:
            release.wait(30)

    async def script(client: tailrace.Client) -> None:
        for order in range(2):
            await bus.send(Pay(order))
        await _quiet(tailrace_broker, lambda: bool(tailrace_broker.dead_letters("shop.commands")))
        await _quiet(tailrace_broker, lambda: False)  # Much longer than the timeout.
        assert ran == [0]
        release.set()
        await _quiet(tailrace_broker, lambda: len(ran) == 2)

    play(tailrace_broker, bus, script)
    assert ran == [0, 1]
    assert len(tailrace_broker.dead_letters("shop.commands")) == 1
    assert tailrace_broker.group("shop").lag == 0
