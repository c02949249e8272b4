"""One message, whatever it does to its handler, to its settling or to its answer, never ends the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import tailrace
from tailrace.bus import AckPolicy, Batch, Bus, Message, Reject, RequestFailed, Retry
from tailrace.testing import LocalBroker, ServerProcess
from tests.bus.test_bus import Pay, make, play


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Delayed(Exception):
    delay = "soon"


def changed() -> Exception:
    error = Retry()
    error.delay = float("nan")
    return error


def once_and_the_rest(broker: LocalBroker, fail: Callable[[Message[Pay]], Any]) -> str:
    """The first of three commands fails twice, and the others are handled; the error of its dead letter."""
    broker.create_topic("shop.commands", partitions=1)
    broker.create_group("shop", "shop.commands", mode="exclusive", max_attempts=2, backoff_ms=1000)
    bus = make()
    seen: list[int] = []

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> Any:
        seen.append(message.data.order)
        if message.data.order == 1:
            return await fail(message)

    async def script(client: tailrace.Client) -> None:
        for order in (1, 2, 3):
            await bus.send(Pay(order))
        await broker.advance(60)

    play(broker, bus, script)
    assert seen == [1, 2, 3, 1]
    assert broker.group("shop").lag == 0
    (letter,) = broker.dead_letters("shop.commands")
    assert letter.reason == "max_attempts"
    return letter.error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (lambda: ValueError("caf\udce9.csv"), "ValueError: caf\\udce9.csv"),
        (lambda: Unshowable(), "Unshowable: (its text cannot be shown: RuntimeError)"),
        (lambda: Delayed("x"), "Delayed: x"),
        (lambda: Retry(-1), "ValueError: Retry: delay is seconds from 0 to"),
        (changed, "Retry: the handler asked for a retry"),
        (lambda: asyncio.CancelledError(), "a cancellation escaped from the handler"),
        (lambda: SystemExit(3), "SystemExit: 3"),
    ],
)
def test_whatever_a_handler_raises_is_its_failure(
    tailrace_broker: LocalBroker, error: Callable[[], BaseException], told: str
) -> None:
    async def fail(message: Message[Pay]) -> None:
        raise error()

    assert told in once_and_the_rest(tailrace_broker, fail)


@pytest.mark.parametrize("wrong", [{"delay": float("inf")}, {"delay": -1}, {"delay": "5"}])
def test_a_settlement_that_is_refused_is_left_to_the_policy(
    tailrace_broker: LocalBroker, wrong: dict[str, Any]
) -> None:
    async def fail(message: Message[Pay]) -> None:
        await message.retry(**wrong)

    once_and_the_rest(tailrace_broker, fail)


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), "5", 1e12, 10**400, True])
def test_a_retry_knows_what_a_delay_is(delay: Any) -> None:
    with pytest.raises(ValueError, match="delay is seconds from 0 to 31536000"):
        Retry(delay)
    assert Retry(2).delay == 2


def test_a_reason_that_is_no_text_arrives_all_the_same(tailrace_broker: LocalBroker) -> None:
    bus = make()

    @bus.handler(Pay, ack=AckPolicy.MANUAL)
    async def pay(message: Message[Pay]) -> None:
        reasons: list[Any] = ["\ud800", ValueError("an error"), "x" * 1_000_000]
        await message.reject(reasons[message.data.order])

    async def script(client: tailrace.Client) -> None:
        for order in range(3):
            await bus.send(Pay(order))

    play(tailrace_broker, bus, script)
    errors = sorted(letter.error[:10] for letter in tailrace_broker.dead_letters("shop.commands"))
    assert errors == ["\\ud800", "an error", "x" * 10]


@pytest.mark.parametrize("answer", [object(), "\ud800", "x" * 2_000_000])
def test_an_answer_that_cannot_travel_is_a_failure_and_the_asker_is_told(
    tailrace_broker: LocalBroker, answer: Any
) -> None:
    bus = make()

    @bus.handler(Pay, ack=AckPolicy.REJECT_ON_ERROR)
    async def pay(message: Message[Pay]) -> Any:
        return answer if message.data.order == 1 else message.data.order

    async def script(client: tailrace.Client) -> None:
        with pytest.raises(RequestFailed):
            await bus.request(Pay(1))
        assert await bus.request(Pay(2)) == 2

    play(tailrace_broker, bus, script)
    (letter,) = tailrace_broker.dead_letters("shop.commands")
    assert letter.reason == "rejected"


def test_versions_and_codecs_that_misbehave_are_poison(tailrace_broker: LocalBroker) -> None:
    bus = Bus("shop")
    bus.command(Pay, version=2)
    seen = []

    @bus.upcast(Pay, 1)
    def fail(data: Any) -> Any:
        raise Unshowable

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        seen.append(message.data.order)

    async def script(client: tailrace.Client) -> None:
        async with client.producer("shop.commands") as producer:
            for version in (b"9" * 5000, b"1"):
                headers = [("tailrace-type", b"Pay"), ("tailrace-version", version)]
                await producer.publish(b'{"order": 1}', headers=headers)
        await bus.send(Pay(2))

    play(tailrace_broker, bus, script)
    assert seen == [2]
    assert [letter.reason for letter in tailrace_broker.dead_letters("shop.commands")] == ["poison"] * 2


def test_a_batch_that_lets_a_cancellation_escape_has_failed(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("shop.commands", partitions=1)
    tailrace_broker.create_group("shop", "shop.commands", mode="exclusive", max_attempts=1)
    bus, sizes = make(), []

    @bus.handler(Pay, batch=10)
    async def pay(batch: Batch[Message[Pay]]) -> None:
        sizes.append(len(batch))
        if len(sizes) == 1:
            raise asyncio.CancelledError

    async def script(client: tailrace.Client) -> None:
        await bus.send(Pay(1))
        await tailrace_broker.settle()
        await bus.send(Pay(2))

    play(tailrace_broker, bus, script)
    assert sizes == [1, 1]
    assert len(tailrace_broker.dead_letters("shop.commands")) == 1


def test_cancelling_the_run_gives_back_what_is_under_way(tailrace_broker: LocalBroker) -> None:
    bus = make()

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with tailrace.connect() as client, bus.attach(client):
            worker = asyncio.create_task(bus.run())
            await bus.send(Pay(1))
            await tailrace_broker.settle()
            worker.cancel()
            with pytest.raises(asyncio.CancelledError):
                await worker

    asyncio.run(asyncio.wait_for(scenario(), 30))
    group = tailrace_broker.group("shop")
    assert group.lag == 1
    assert sum(row["in_flight"] + row["failures"] for row in group.partitions) == 0


@pytest.mark.parametrize("batch", [None, 1])
def test_what_was_lost_before_it_was_acked_first_is_not_handled(
    tailrace_broker: LocalBroker, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    tailrace_broker.create_topic("shop.commands", partitions=1)
    tailrace_broker.create_group("shop", "shop.commands", mode="exclusive", session_ms=600_000)
    bus, gate = make(), asyncio.Event()
    seen: list[int] = []

    async def pay(subject: Any) -> None:
        message = subject if batch is None else next(iter(subject))
        seen.append(message.data.order)
        if len(seen) == 1:
            await gate.wait()
            tailrace_broker.clock.advance(31)  # At once: nobody can extend what the worker has at hand.

    bus.handler(Pay, ack=AckPolicy.ACK_FIRST, batch=batch)(pay)

    async def script(client: tailrace.Client) -> None:
        for order in (1, 2, 3):
            await bus.send(Pay(order))
        await tailrace_broker.settle()
        gate.set()
        await tailrace_broker.advance(5)

    play(tailrace_broker, bus, script)
    assert seen == [1, 2, 3]
    assert tailrace_broker.group("shop").lag == 0
    assert "handled too late" not in caplog.text  # What was lost is not even handed out.


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_outlives_an_outage_longer_than_its_timeout(
    tailrace_server: ServerProcess, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    bus, begun, gate = make(), asyncio.Event(), asyncio.Event()
    seen: list[tuple[int, int]] = []

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        seen.append((message.data.amount, message.deliveries))
        begun.set()
        await gate.wait()
        if fails and message.deliveries == 1 and message.data.amount == 0:
            raise ValueError("while the broker is away")

    async def until(worker: asyncio.Task[None], done: Callable[[], bool]) -> None:
        while not done():
            assert not worker.done(), worker
            await asyncio.sleep(0.01)

    def again() -> bool:
        """Whether the first came once more; what the kill took back of its lease was no delivery."""
        amounts = [amount for amount, _ in seen]
        return (0, 2) in seen if fails else amounts.count(0) > 1

    async def scenario() -> None:
        async with tailrace.connect(tailrace_server.url, timeout=1) as client, bus.attach(client):
            options = {"mode": "exclusive", "backoff_ms": 0, "lease_ms": 5_000}
            await client.groups().create("shop", bus.commands, **options)
            for amount in (0, 1):
                await bus.send(Pay(7, amount))
            worker = asyncio.create_task(bus.run())
            await begun.wait()
            await asyncio.to_thread(tailrace_server.kill)
            gate.set()
            await until(worker, lambda: "could not be settled" in caplog.text)
            await asyncio.to_thread(tailrace_server.restart)
            await until(worker, lambda: again() and any(amount == 1 for amount, _ in seen))
            bus.stop()
            await worker

    asyncio.run(asyncio.wait_for(scenario(), 60))
    if fails:
        assert seen.index((0, 2)) < [amount for amount, _ in seen].index(1)  # Nothing overtook it.


@pytest.mark.parametrize("own", [False, True])
def test_whoever_asked_is_told_when_the_last_attempt_has_failed(
    tailrace_broker: LocalBroker, own: bool
) -> None:
    tailrace_broker.create_topic("shop.commands", partitions=1)
    tailrace_broker.create_group("shop", "shop.commands", mode="exclusive", max_attempts=3)
    bus, seen = make(), []

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        seen.append(message.attempt)
        if own:
            await message.retry(0)
        raise ValueError(f"broken {message.attempt}")

    async def script(client: tailrace.Client) -> None:
        asked = asyncio.create_task(bus.request(Pay(1), timeout=5))
        await tailrace_broker.advance(60)
        with pytest.raises(RequestFailed, match="broken 3"):
            await asked

    play(tailrace_broker, bus, script)
    assert seen == [1, 2, 3]
    assert len(tailrace_broker.dead_letters("shop.commands")) == 1


def test_whoever_asked_is_told_what_failed_after_the_acknowledgement(tailrace_broker: LocalBroker) -> None:
    bus = make()

    @bus.handler(Pay, ack=AckPolicy.MANUAL)
    async def pay(message: Message[Pay]) -> None:
        await message.acknowledge()
        raise ValueError

    async def script(client: tailrace.Client) -> None:
        with pytest.raises(RequestFailed, match=r"^ValueError$"):
            await bus.request(Pay(1), timeout=5)

    play(tailrace_broker, bus, script)


def test_a_long_reason_is_cut_so_that_the_asker_gets_it(tailrace_broker: LocalBroker) -> None:
    bus = make()

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        raise Reject("é" * 70_000)

    async def script(client: tailrace.Client) -> None:
        with pytest.raises(RequestFailed, match=r"^é{8192}$"):
            await bus.request(Pay(1))

    play(tailrace_broker, bus, script)


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL])
def test_a_message_that_was_handled_too_late_is_said_so_and_comes_again(
    tailrace_broker: LocalBroker, caplog: pytest.LogCaptureFixture, policy: AckPolicy
) -> None:
    """The process stood still while its handler was at work: the lease is over when it settles."""
    tailrace_broker.create_topic("shop.commands", partitions=1)
    tailrace_broker.create_group("shop", "shop.commands", mode="exclusive", session_ms=600_000)
    bus = make()
    seen: list[tuple[int, int]] = []

    @bus.handler(Pay, ack=policy)
    async def pay(message: Message[Pay]) -> None:
        seen.append((message.data.order, message.attempt))
        if seen == [(1, 1)]:
            tailrace_broker.clock.advance(31)
            if policy is AckPolicy.MANUAL:
                raise Retry
        if policy is AckPolicy.MANUAL:
            await message.acknowledge()

    async def script(client: tailrace.Client) -> None:
        for order in (1, 2):
            await bus.send(Pay(order))
        await tailrace_broker.advance(60)

    play(tailrace_broker, bus, script)
    late = [record.getMessage() for record in caplog.records if "handled too late" in record.getMessage()]
    assert len(late) == 1
    assert "shop.commands/0" in late[0]
    assert sorted(order for order, _ in seen) == [1, 1, 2]
    assert (1, 2) in seen
    assert tailrace_broker.group("shop").lag == 0
