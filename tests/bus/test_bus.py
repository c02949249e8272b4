"""The bus on a real broker core in virtual time: handlers, policies, batches, requests, poison.

Covers `bus/application.py`, `bus/envelope.py`, `bus/handlers.py`, `bus/outcomes.py`, `bus/requests.py`,
`bus/subscriptions.py` and `sync/blocking_bus.py`.
"""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

import tailrace
import tailrace.sync
from tailrace.bus import AckPolicy, Batch, BlockingMessage, Bus, Message, Reject, RequestFailed, Retry
from tailrace.client.queue.pace import Pace
from tailrace.core.model.commands import Publish
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest, Timeout, Unavailable
from tailrace.testing import LocalBroker

Step = Callable[[], Awaitable[Any]]


class Pay(msgspec.Struct):
    order: int
    amount: int = 1


class Paid(msgspec.Struct):
    order: int


class Shipped(msgspec.Struct):
    order: int


def make(name: str = "shop", *, exclusive: bool = True) -> Bus:
    bus = Bus(name, exclusive=exclusive)
    bus.command(Pay, key="order")
    bus.event(Paid)
    bus.event(Shipped, name="order.shipped")
    return bus


def play(
    broker: LocalBroker, bus: Bus, script: Callable[[tailrace.Client], Awaitable[None]], **run: Any
) -> None:
    """Attach the bus, run its handlers beside a script, and stop when the script is over."""

    async def scenario() -> None:
        async with tailrace.connect() as client, bus.attach(client):
            worker = asyncio.create_task(bus.run(**run))
            await broker.settle()
            await script(client)
            await broker.settle()
            bus.stop()
            await asyncio.wait_for(worker, 10)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_commands_go_to_one_handler_and_events_to_every_subscriber(tailrace_broker: LocalBroker) -> None:
    bus, seen = make(), []

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        seen.append(("pay", message.data.order, message.key))
        await bus.publish(Paid(message.data.order))

    @bus.handler(Paid | Shipped)
    async def ledger(message: Message[Paid | Shipped]) -> None:
        seen.append(("ledger", type(message.data), message.attempt))

    @bus.handler("Paid")
    async def mail(message: Message[Any]) -> None:
        seen.append(("mail", message.name, message.version))

    async def script(client: tailrace.Client) -> None:
        await bus.send(Pay(7))
        await tailrace_broker.settle()
        await bus.publish(Shipped(7))

    play(tailrace_broker, bus, script)
    assert seen[0] == ("pay", 7, b"7")
    assert sorted(map(str, seen[1:])) == sorted(
        map(str, [("ledger", Paid, 1), ("mail", "Paid", 1), ("ledger", Shipped, 1)])
    )
    assert {group.name: group.lag for group in tailrace_broker.groups()} == {
        "shop": 0,
        f"shop.{ledger.__name__}": 0,
        f"shop.{mail.__name__}": 0,
    }


OUTCOMES = {
    "returns": lambda: None,
    "retries": lambda: _raise(Retry(5.0)),
    "rejects": lambda: _raise(Reject("hopeless")),
    "fails": lambda: _raise(ValueError("bug")),
}


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("policy", "acked", "retried", "rejected"),
    [
        (AckPolicy.ACK_FIRST, {"returns", "retries", "rejects", "fails"}, set(), set()),
        (AckPolicy.ACK, {"returns", "fails"}, {"retries"}, {"rejects"}),
        (AckPolicy.REJECT_ON_ERROR, {"returns"}, {"retries"}, {"rejects", "fails"}),
        (AckPolicy.NACK_ON_ERROR, {"returns"}, {"retries", "fails"}, {"rejects"}),
        (AckPolicy.MANUAL, set(), {"retries", "fails"}, {"rejects"}),
    ],
)
def test_every_policy_does_what_its_table_says(
    tailrace_broker: LocalBroker,
    policy: AckPolicy,
    acked: set[str],
    retried: set[str],
    rejected: set[str],
    blocking: bool,
) -> None:
    bus = Bus("t")
    bus.event(Paid)
    names = list(OUTCOMES)

    if blocking:

        @bus.handler(Paid, ack=policy, group="g")
        def handle(message: BlockingMessage[Paid]) -> None:
            OUTCOMES[names[message.data.order]]()
    else:

        @bus.handler(Paid, ack=policy, group="g")
        async def handle(message: Message[Paid]) -> None:
            OUTCOMES[names[message.data.order]]()

    async def script(client: tailrace.Client) -> None:
        for order in range(len(names)):
            await bus.publish(Paid(order))
        await _quiet(tailrace_broker, lambda: _figure("failures") == len(retried))

    def _figure(name: str) -> int:
        return sum(row[name] for row in tailrace_broker.group("g").partitions)

    play(tailrace_broker, bus, script)
    letters = tailrace_broker.dead_letters("t.events")
    assert {names[int(letter.message.value[9:-1])] for letter in letters} == rejected
    assert all(letter.reason == "rejected" for letter in letters)
    assert _figure("failures") == len(retried)
    assert _figure("lag") == 4 - len(acked) - len(rejected)


async def _quiet(broker: LocalBroker, done: Callable[[], bool]) -> None:
    """Let handlers in threads finish; virtual time cannot know of them."""
    for _ in range(200):
        await broker.settle()
        if done():
            await asyncio.sleep(0.005)
            await broker.settle()
            if done():
                return
        await asyncio.sleep(0.005)


def test_a_failure_is_tried_again_with_its_delay(tailrace_broker: LocalBroker) -> None:
    bus, seen = make(), []

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        seen.append(message.attempt)
        if message.attempt < 3:
            raise Retry(60.0)

    async def script(client: tailrace.Client) -> None:
        await bus.send(Pay(1))
        await tailrace_broker.advance(59)
        assert seen == [1]
        await tailrace_broker.advance(2)
        assert seen == [1, 2]
        await tailrace_broker.advance(61)

    play(tailrace_broker, bus, script)
    assert seen == [1, 2, 3]


def test_a_handler_past_its_timeout_has_failed(tailrace_broker: LocalBroker) -> None:
    bus = make()

    @bus.handler(Pay, timeout=0.02, ack=AckPolicy.REJECT_ON_ERROR)
    async def pay(message: Message[Pay]) -> None:
        await asyncio.sleep(60)

    async def script(client: tailrace.Client) -> None:
        await bus.send(Pay(1))
        for _ in range(100):
            await tailrace_broker.settle()
            if tailrace_broker.dead_letters("shop.commands"):
                return
            await asyncio.sleep(0.01)

    play(tailrace_broker, bus, script)
    (letter,) = tailrace_broker.dead_letters("shop.commands")
    assert "timeout of 0.02 s" in letter.error


def test_unknown_types_and_broken_bodies_are_poison(tailrace_broker: LocalBroker) -> None:
    bus, seen = make(), []

    @bus.handler(Paid, group="g")
    async def paid(message: Message[Paid]) -> None:
        seen.append(message.data.order)

    async def script(client: tailrace.Client) -> None:
        async with client.producer("shop.events") as producer:
            await producer.publish(b"{}", headers=[("tailrace-type", b"never.heard.of")])
            await producer.publish(b'{"order": "x"}', headers=[("tailrace-type", b"Paid")])
            await producer.publish(b"no type at all")
        await bus.publish(Shipped(1))  # known, and not asked for by this group
        await bus.publish(Paid(2))

    play(tailrace_broker, bus, script)
    assert seen == [2]
    letters = tailrace_broker.dead_letters("shop.events")
    assert [letter.reason for letter in letters] == ["poison"] * 3
    assert tailrace_broker.group("g").lag == 0


@pytest.fixture
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is as large as it may be, as for a handler that was seen to be fast."""
    monkeypatch.setattr(Pace, "wanted", lambda pace: 500)


@pytest.mark.usefixtures("all_at_once")
def test_a_batch_is_a_set_that_empties(tailrace_broker: LocalBroker) -> None:
    bus, calls = make(), []

    @bus.handler(Paid, group="g", batch=10, ack=AckPolicy.MANUAL)
    async def paid(batch: Batch[Message[Paid]]) -> None:
        calls.append(len(batch))
        for message in list(batch)[:3]:
            await message.acknowledge()

    async def script(client: tailrace.Client) -> None:
        async with client.producer("shop.events") as producer:
            rows = [bus._registry.encode(Paid(order)) for order in range(7)]
            await (
                await producer.send_many(
                    [body for _, body, _ in rows], headers=[h for _, _, h in rows], partition=0
                )
            )

    play(tailrace_broker, bus, script)
    assert calls == [7, 4, 1]
    assert tailrace_broker.group("g").lag == 0


@pytest.mark.usefixtures("all_at_once")
def test_what_a_batch_left_is_settled_by_the_policy(tailrace_broker: LocalBroker) -> None:
    bus = make()

    @bus.handler(Paid, group="g", batch=10)
    async def paid(batch: Batch[Message[Paid]]) -> None:
        first, *_ = batch
        await first.acknowledge()
        raise ValueError("the rest failed")

    async def script(client: tailrace.Client) -> None:
        async with client.producer("shop.events") as producer:
            rows = [bus._registry.encode(Paid(order)) for order in range(5)]
            await (
                await producer.send_many(
                    [body for _, body, _ in rows], headers=[h for _, _, h in rows], partition=0
                )
            )

    play(tailrace_broker, bus, script)
    group = tailrace_broker.group("g")
    assert group.lag == 4
    assert sum(row["failures"] for row in group.partitions) == 4


@pytest.mark.usefixtures("all_at_once")
def test_what_ended_while_others_of_its_batch_were_handled_is_not_handled(
    tailrace_broker: LocalBroker,
) -> None:
    bus, calls, handled = make(), [], asyncio.Event()

    async def note(batch: Batch[Message[Any]]) -> None:
        calls.extend((message.name, message.delivery.deliveries) for message in batch)
        if len(calls) == 1:
            tailrace_broker.clock.advance(31)  # As if the process had stood still.
        if len(calls) == 3:
            handled.set()

    bus.handler(Paid, group="g", batch=10)(note)
    bus.handler(Shipped, group="g", batch=10)(note)

    async def script(client: tailrace.Client) -> None:
        async with client.producer("shop.events") as producer:
            rows = [bus._registry.encode(event) for event in (Paid(1), Shipped(1))]
            headers = [h for _, _, h in rows]
            await (await producer.send_many([body for _, body, _ in rows], headers=headers, partition=0))
        await asyncio.wait_for(handled.wait(), 10)

    play(tailrace_broker, bus, script)
    assert calls[0] == ("Paid", 1)
    assert set(calls[1:]) == {("Paid", 2), ("order.shipped", 2)}
    assert tailrace_broker.group("g").lag == 0


def test_a_question_that_could_not_be_sent_leaves_nothing_behind(tailrace_broker: LocalBroker) -> None:
    bus, noise = make(), []
    bus.handler(Pay)(lambda message: None)

    async def script(client: tailrace.Client) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        assert await bus.request(Pay(1)) is None
        verbs: Any = client._verbs
        submit = verbs.submit

        def refuse(request: Any, body: Any, respond: Any) -> None:
            if isinstance(request, Publish):
                respond(Refusal("invalid_request", "no", "none"), ())
            else:
                submit(request, body, respond)

        verbs.submit = refuse
        for _ in range(3):
            with pytest.raises(InvalidRequest):
                await bus.request(Pay(2))
        verbs.submit = submit
        assert bus._asked is not None
        assert bus._asked._waiting == {}

    play(tailrace_broker, bus, script)
    gc.collect()
    assert noise == []


def test_requests_are_answered(tailrace_broker: LocalBroker) -> None:
    bus = make()

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> Any:
        if message.data.amount < 0:
            raise Reject("a negative amount")
        return Paid(message.data.order) if message.data.amount else {"free": True}

    async def script(client: tailrace.Client) -> None:
        assert await bus.request(Pay(1, 5)) == Paid(1)
        assert await bus.request(Pay(2, 0)) == {"free": True}
        with pytest.raises(RequestFailed, match="negative"):
            await bus.request(Pay(3, -1))
        answers = await asyncio.gather(*(bus.request(Pay(order, 1)) for order in range(20)))
        assert [answer.order for answer in answers] == list(range(20))

    play(tailrace_broker, bus, script, concurrency=8)


def test_a_request_that_nobody_answers_times_out(tailrace_broker: LocalBroker) -> None:
    bus = make()

    async def scenario() -> None:
        async with tailrace.connect() as client, bus.attach(client):
            with pytest.raises(Timeout) as caught:
                await bus.request(Pay(1), timeout=0.05)
            assert caught.value.outcome == "unknown"

    asyncio.run(scenario())


def test_middleware_stands_around_every_handler(tailrace_broker: LocalBroker) -> None:
    bus, seen = make(), []

    @bus.middleware
    async def outer(message: Any, call_next: Any) -> Any:
        seen.append("outer")
        try:
            return await call_next(message)
        finally:
            seen.append("over")

    @bus.middleware
    async def inner(message: Any, call_next: Any) -> Any:
        seen.append("inner")
        return await call_next(message)

    @bus.handler(Pay)
    def pay(message: BlockingMessage[Pay]) -> int:
        seen.append(threading.current_thread() is threading.main_thread())
        return message.data.order

    async def script(client: tailrace.Client) -> None:
        assert await bus.request(Pay(4)) == 4

    play(tailrace_broker, bus, script)
    assert seen == ["outer", "inner", False, "over"]


def test_concurrency_is_bounded_and_keys_are_serial(tailrace_broker: LocalBroker) -> None:
    bus, active, most, order = make(), 0, 0, []
    gate = asyncio.Event()

    @bus.handler(Pay, concurrency=3)
    async def pay(message: Message[Pay]) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await gate.wait()
        order.append((message.data.order, message.data.amount))
        active -= 1

    async def script(client: tailrace.Client) -> None:
        for number in range(12):
            await bus.send(Pay(number % 6, number))
        await tailrace_broker.settle()
        assert active == 3
        gate.set()

    play(tailrace_broker, bus, script, concurrency=8)
    assert most == 3
    for key in range(6):
        assert [amount for other, amount in order if other == key] == [key, key + 6]


def test_stopping_gives_back_what_was_not_begun(tailrace_broker: LocalBroker) -> None:
    bus, seen = make(), []

    @bus.handler(Pay)
    async def pay(message: Message[Pay]) -> None:
        seen.append(message.data.order)
        bus.stop()

    async def script(client: tailrace.Client) -> None:
        for number in range(5):
            await bus.send(Pay(0, number))

    play(tailrace_broker, bus, script)
    assert seen == [0]
    group = tailrace_broker.group("shop")
    assert group.lag == 4
    assert sum(row["in_flight"] + row["failures"] for row in group.partitions) == 0


def test_declarations_are_checked() -> None:
    bus = make()

    @bus.handler(Paid, group="g")
    async def one(message: Message[Paid]) -> None: ...

    with pytest.raises(InvalidRequest, match="has a handler already"):

        @bus.handler(Paid, group="g")
        async def two(message: Message[Paid]) -> None: ...

    with pytest.raises(InvalidRequest, match="single messages or batches"):

        @bus.handler(Shipped, group="g", batch=5)
        async def three(batch: Batch[Message[Shipped]]) -> None: ...

    with pytest.raises(InvalidRequest, match="one argument"):

        @bus.handler(Shipped)
        async def four() -> None: ...

    with pytest.raises(InvalidRequest, match="two functions"):
        bus.handler(Pay, Paid)(one)
    with pytest.raises(InvalidRequest, match="at least one type"):
        bus.handler()
    with pytest.raises(InvalidRequest, match="not on this bus"):
        bus.handler(int)(one)
    with pytest.raises(Unavailable, match="not attached"):
        asyncio.run(bus.send(Paid(1)))


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        ({"ack": "ack"}, "ack: an AckPolicy, such as AckPolicy.ACK, not 'ack'"),
        ({"timeout": "x"}, "timeout: seconds, more than 0, not 'x'"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"concurrency": True}, "concurrency: a whole number, at least 1, not True"),
        ({"concurrency": 1.5}, "concurrency"),
        ({"batch": 2.5}, "batch: a whole number, at least 1, not 2.5"),
        ({"batch": 0}, "batch"),
        ({"group": "bad name"}, "group: 'bad name': the name may have only"),
        ({"group": ""}, "group"),
        ({"group": 5}, "group: 5: a name is text"),
    ],
)
def test_terms_of_a_handler_that_make_no_sense_are_refused(terms: dict[str, Any], told: str) -> None:
    async def paid(message: Message[Paid]) -> None: ...

    with pytest.raises(InvalidRequest, match=re.escape(told)):
        make().handler(Paid, **terms)(paid)


def test_a_handler_without_a_name_needs_a_group() -> None:
    with pytest.raises(InvalidRequest, match="name another one with `group=`"):
        make().handler(Paid)(lambda message: None)
    make().handler(Paid, group="g")(lambda message: None)


def test_the_blocking_bus_has_the_same_names(tailrace_broker: LocalBroker) -> None:
    bus = tailrace.sync.Bus("shop")
    bus.command(Pay)
    done = threading.Event()

    @bus.handler(Pay, ack=AckPolicy.MANUAL)
    def pay(message: BlockingMessage[Pay]) -> str:
        message.acknowledge()
        assert message.settled
        done.set()
        return f"paid {message.data.order}"

    with tailrace.sync.connect() as client, bus.attach(client):
        worker = threading.Thread(target=bus.run)
        worker.start()
        assert bus.request(Pay(3)) == "paid 3"
        assert done.is_set()
        bus.stop()
        worker.join(10)
        assert not worker.is_alive()
    assert tailrace_broker.group("shop").lag == 0


def test_a_bus_works_again_in_another_loop() -> None:
    bus, done, most = make(), [], 0
    active = 0

    @bus.handler(Pay, concurrency=1)
    async def pay(message: Message[Pay]) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        done.append(message.data.order)

    async def scenario(broker: LocalBroker) -> None:
        async with broker.client() as client, bus.attach(client):
            await asyncio.gather(*(bus.send(Pay(order)) for order in range(6)))
            worker = asyncio.create_task(bus.run(concurrency=4))
            await broker.settle()
            bus.stop()
            await worker

    for _ in range(2):
        with LocalBroker() as broker:
            asyncio.run(asyncio.wait_for(scenario(broker), 30))
        assert sorted(done) == list(range(6))
        done.clear()
    assert most == 1
