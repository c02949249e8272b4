"""Consumers of queues on the real core with virtual time: every promise, and mistakes that others made.

Also covers `client/queue/delivery.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

import tailrace
from tailrace.core.model.commands import Request
from tailrace.core.model.queue_commands import Ack, Lease
from tailrace.errors import Fenced, InvalidRequest, LeaseLost, NotFound, TailraceError, Unavailable
from tailrace.testing import LocalBroker
from tests.client.virtual_loop import run

Scenario = Callable[[LocalBroker, tailrace.Client], Coroutine[Any, Any, None]]


def on_broker(scenario: Scenario, partitions: int = 1, **topic: Any) -> None:
    """Run a scenario; the topic `t` is there."""

    async def main() -> None:
        with LocalBroker() as broker:
            broker.create_topic("t", partitions=partitions, **topic)
            async with broker.client(timeout=5) as client:
                await scenario(broker, client)

    run(asyncio.wait_for(main(), 600))


async def publish(client: tailrace.Client, *values: bytes, topic: str = "t", **fields: Any) -> None:
    async with client.producer(topic) as producer:
        for value in values:
            await producer.publish(value, **fields)


async def take(consumer: tailrace.Consumer, count: int = 1) -> list[tailrace.Delivery]:
    async with asyncio.timeout(5):
        return [await anext(consumer) for _ in range(count)]


async def nothing(broker: LocalBroker, consumer: tailrace.Consumer) -> None:
    """There is nothing to be had now."""
    waiting = asyncio.ensure_future(anext(consumer))
    await broker.settle()
    assert not waiting.done(), waiting.result()
    waiting.cancel()
    await asyncio.wait([waiting])


async def wait(broker: LocalBroker, seconds: float, step: float = 1.0) -> None:
    """Time passes, and the clients of this loop live with it."""
    while seconds > 0:
        broker.clock.advance(min(step, seconds))
        seconds -= step
        await broker.settle()


async def partition(client: tailrace.Client, group: str = "g", number: int = 0) -> dict[str, Any]:
    return (await client.groups().describe(group)).partitions[number]


def known_as_fast(consumer: Any) -> None:
    """Much is leased ahead from now on, as for a handler that was seen to be fast."""
    consumer._intake.pace.message_ms = consumer._intake.pace._latest_ms = 1e-3


def spy(client: tailrace.Client) -> list[Request]:
    """The requests that the client sends from now on."""
    verbs: Any = client._verbs
    submit, seen = verbs.submit, []

    def listen(request: Request, body: Any, respond: Any) -> None:
        seen.append(request)
        submit(request, body, respond)

    verbs.submit = listen
    return seen


@asynccontextmanager
async def iterating(consumer: tailrace.Consumer) -> AsyncIterator[list[tailrace.Delivery]]:
    """Somebody takes messages in the background."""
    found: list[tailrace.Delivery] = []

    async def loop() -> None:
        async for delivery in consumer:
            found.append(delivery)

    task = asyncio.create_task(loop())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


# -- delivery and acknowledgement ----------------------------------------------------------------------------


def test_messages_are_delivered_with_their_fields_and_settled() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            result = await producer.publish(b"v", key=b"k", headers={"h": b"x"}, priority=1, ttl=60)
        async with client.consumer("t", "g") as consumer:
            assert consumer.assignment() == {("t", 0)}
            (m,) = await take(consumer)
            assert (m.topic, m.partition, m.offset, m.sequence, m.id) == ("t", 0, 0, 1, result.id)
            assert (m.key, m.value, m.headers, m.priority) == (b"k", b"v", [("h", b"x")], 1)
            assert (m.attempt, m.deliveries, m.group, m.settled) == (1, 1, "g", False)
            assert m.lease > 0
            assert m.expires_at is not None
            assert m.append_time == result.append_time
            await m.ack()
            assert m.settled
            assert (await partition(client))["committed"] == 1
            await m.ack()  # Settling twice is harmless.
            m.ack_nowait()
            await m.nack()
            await consumer.commit()
        assert (await partition(client))["failures"] == 0

    on_broker(scenario)


def test_acknowledgements_gather_into_few_requests() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, *[b"%d" % n for n in range(50)])
        seen = spy(client)
        async with client.consumer("t", "g") as consumer:
            known_as_fast(consumer)
            for delivery in await take(consumer, 50):
                if delivery.offset != 7:
                    delivery.ack_nowait()
            await consumer.commit()
            acks = [request for request in seen if isinstance(request, Ack)]
            assert len(acks) <= 2
            assert acks[0].leases[0][1] == [0, 7, 8, 50]
            state = await partition(client)
            assert (state["committed"], state["in_flight"]) == (7, 1)

    on_broker(scenario)


def test_every_message_is_delivered_once_over_many_leases() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await producer.send_many([b"%d" % n for n in range(3000)])
        seen = spy(client)
        async with client.consumer("t", "g", batch_size=100, prefetch=300) as consumer:
            found = []
            for delivery in await take(consumer, 3000):
                found.append(int(delivery.value or b""))
                delivery.ack_nowait()
            assert sorted(found) == list(range(3000))
        leases = [request for request in seen if isinstance(request, Lease)]
        assert max(lease.count_max for lease in leases) == 100
        assert all(lease.wait_ms == 30_000 for lease in leases if lease.count_max)
        assert (await partition(client))["lag"] == 0

    on_broker(scenario, partitions=3)


def test_leases_ahead_only_so_far_and_only_when_somebody_takes() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await producer.send_many([b"x"] * 1000)
        async with client.consumer("t", "g", batch_size=10, prefetch=30) as consumer:
            await broker.settle()
            assert (await partition(client))["in_flight"] == 0
            known_as_fast(consumer)
            await take(consumer, 1)
            await broker.settle()
            assert 10 <= (await partition(client))["in_flight"] <= 10 + 30 + 10

    on_broker(scenario)


def test_batches_are_settled_as_a_whole_or_one_by_one() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, *[b"%d" % n for n in range(25)])
        async with client.consumer("t", "g", ordering="none") as consumer:
            known_as_fast(consumer)
            sizes = []
            async with asyncio.timeout(5):
                async for batch in consumer.batches(10):
                    sizes.append(len(batch))
                    if len(sizes) == 1:
                        await batch.ack()
                        assert (await partition(client))["committed"] == 10
                    elif len(sizes) == 2:
                        await batch[0].ack()
                        await batch.nack(delay=100)
                    else:
                        await batch.reject("no use")
                        break
            assert sizes == [10, 10, 5]
            state = await partition(client)
            assert (state["committed"], state["failures"], state["dead_lettered"]) == (11, 9, 5)
            with pytest.raises(InvalidRequest):
                await anext(consumer.batches(0))

    on_broker(scenario)


def test_a_group_and_its_options_are_checked() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        for wrong in ({"group": None}, {"group": "g", "mode": "quue"}, {"group": "g", "prefetch": -1}):
            with pytest.raises(InvalidRequest):
                client.consumer("t", **wrong)
        with pytest.raises(InvalidRequest, match="lease_mss"):
            await client.consumer("t", "g", lease_mss=3).__aenter__()
        with pytest.raises(NotFound):
            await client.consumer("nowhere", "g").__aenter__()
        async with client.consumer("t", "g", max_attempts=3):
            with pytest.raises(InvalidRequest, match="max_attempts"):
                await client.consumer("t", "g", max_attempts=4).__aenter__()
        closed = client.consumer("t", "g")
        with pytest.raises(Unavailable, match="not open"):
            await anext(closed)

    on_broker(scenario)


# -- failures and retries ------------------------------------------------------------------------------------


def test_arguments_of_a_wrong_type_are_refused_by_name() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        wrong: Any
        for name, wrong in [
            ("timeout", "a"),
            ("timeout", 0),
            ("timeout", float("nan")),
            ("auto_commit_ms", "a"),
            ("auto_commit_ms", -1),
            ("batch_size", 0),
            ("prefetch", 1.5),
            ("topics", None),
        ]:
            with pytest.raises(InvalidRequest, match=f"^{name}: "):
                client.consumer(**{"topics": "t", "group": "g", name: wrong})

    on_broker(scenario)


@pytest.mark.parametrize("mode", ["queue", "exclusive", "stream"])
def test_a_consumer_whose_name_is_given_away_is_told_and_the_other_goes_on(mode: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        options: dict[str, Any] = {"mode": mode, "member": "m"}
        async with client.consumer("t", "g", **options) as first:
            waiting = asyncio.ensure_future(anext(first))
            await broker.settle()
            async with client.consumer("t", "g", **options) as second:
                with pytest.raises(tailrace.errors.Fenced, match="a name of its own"):
                    await waiting
                assert (first.assignment(), len(second.assignment())) == (set(), 3)
                async with client.producer("t") as producer:
                    await producer.publish(b"1")
                assert (await anext(second)).value == b"1"
                await first.__aexit__(None, None, None)
                await wait(broker, 60)
                assert broker.group("g").members[0]["member"] == "m", "nobody else leaves in its name"

    on_broker(scenario, partitions=3)


def test_what_a_consumer_leased_ahead_goes_to_the_one_that_took_its_name_at_once() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"1", b"2", b"3")
        async with client.consumer("t", "g", member="m") as first:
            (held,) = await take(first)
            async with client.consumer("t", "g", member="m") as second:
                assert [message.value for message in await take(second, 2)] == [b"2", b"3"]
                await held.ack()
        assert (await partition(client))["failures"] == 0

    on_broker(scenario)


def test_a_bare_nack_waits_for_its_back_off_and_comes_back_to_the_lone_consumer() -> None:
    """Mistakes 3, 4, 12: a retry is handed out, to the same consumer, and not within milliseconds."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        async with client.consumer("t", "g") as consumer:
            for attempt in range(1, 5):
                (m,) = await take(consumer)
                assert (m.attempt, m.deliveries) == (attempt, attempt)
                await m.nack(error="no luck")
                assert m.settled
                broker.clock.advance(0.4 * 2 ** (attempt - 1))
                await nothing(broker, consumer)
                await wait(broker, 0.7 * 2 ** (attempt - 1))
            (m,) = await take(consumer)
            await m.nack(error="the last straw")
            await broker.settle()
            await wait(broker, 120, 10)
            await nothing(broker, consumer)
        (letter,) = await client.dead_letters("t").list()
        assert (letter.reason, letter.attempts, letter.error) == ("max_attempts", 5, "the last straw")

    on_broker(scenario)


def test_a_nack_with_a_delay_and_one_without_failure() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            await m.nack(delay=10)
            await wait(broker, 9.9)
            await nothing(broker, consumer)
            await wait(broker, 0.2)
            (m,) = await take(consumer)
            assert m.attempt == 2
            await m.nack(failure=False)
            (m,) = await take(consumer)
            assert (m.attempt, m.deliveries) == (2, 3)
            with pytest.raises(InvalidRequest):
                await m.nack(delay=-1)
            await m.ack()

    on_broker(scenario)


def test_a_failed_key_waits_in_order_and_other_keys_go_on() -> None:
    """Mistakes 5, 16: the retry comes before later messages of its key, which nothing else waits for."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for n in range(9):
                await producer.publish(b"%d" % n, key=b"k%d" % (n % 3))
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            assert m.value == b"0"
            await m.nack()
            others = await take(consumer, 6)
            assert [m.value for m in others] == [b"1", b"2", b"4", b"5", b"7", b"8"]
            for other in others:
                await other.ack()
            await nothing(broker, consumer)
            await wait(broker, 2)
            retried = await take(consumer, 3)
            assert [(m.value, m.attempt) for m in retried] == [(b"0", 2), (b"3", 1), (b"6", 1)]
            for m in retried:
                await m.ack()
        assert (await partition(client))["lag"] == 0

    on_broker(scenario)


def test_rejected_messages_go_to_the_dead_letters_and_hold_nothing() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c", key=b"k")
        async with client.consumer("t", "g") as consumer:
            one, two, three = await take(consumer, 3)
            await one.reject("bad order")
            await two.reject("cannot be read", poison=True)
            await three.ack()
        letters = await client.dead_letters("t").list()
        assert [(x.message.value, x.reason, x.error) for x in letters] == [
            (b"a", "rejected", "bad order"),
            (b"b", "poison", "cannot be read"),
        ]
        assert (await partition(client))["lag"] == 0

    on_broker(scenario)


# -- leases --------------------------------------------------------------------------------------------------


def test_a_process_that_slept_past_its_lease_is_told_and_gets_the_message_again() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b")
        async with client.consumer("t", "g", prefetch=1, batch_size=1, session_ms=120_000) as consumer:
            known_as_fast(consumer)
            (m,) = await take(consumer)
            await broker.settle()
            broker.clock.advance(31)  # As if stopped: nobody lives in between.
            for settle in (m.ack(), m.nack(), m.reject(), m.extend(1000)):
                with pytest.raises(LeaseLost):
                    await settle
            with pytest.raises(LeaseLost):
                m.ack_nowait()
            again = await take(
                consumer, 2
            )  # The buffered one was lost as well, and was not handed out stale.
            assert sorted((m.value, m.attempt) for m in again) == [(b"a", 2), (b"b", 2)]
            for m in again:
                await m.ack()

    on_broker(scenario)


def test_the_longest_lease_is_extended_like_any_other() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"1")
        week = 7 * 86_400
        options: dict[str, Any] = {"lease_ms": week * 1000, "session_ms": 3_600_000, "heartbeat_ms": 600_000}
        async with client.consumer("t", "g", **options) as consumer:
            (message,) = await take(consumer)
            await wait(broker, 1.5 * week, 900)
            await message.ack()
        assert (await partition(client))["deliveries"] == 1

    on_broker(scenario)


def test_long_handlers_keep_their_lease_and_their_partition() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b")
        moved: list[Any] = []
        async with client.consumer("t", "g", on_revoked=moved.append) as consumer:
            (m,) = await take(consumer)
            await wait(broker, 300, 2)
            assert m.attempt == 1
            await m.ack()
            (m,) = await take(consumer)
            assert (m.value, m.deliveries) == (b"b", 1)  # Buffered ones were held, too.
            await m.ack()
            assert not moved
        assert (await partition(client))["failures"] == 0

    on_broker(scenario)


def test_extend_moves_the_deadline() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        async with client.consumer("t", "g", session_ms=600_000) as consumer:
            (m,) = await take(consumer)
            await m.extend(120_000)
            broker.clock.advance(100)
            await m.ack()
            for wrong in (0, 1.5, True):
                with pytest.raises(InvalidRequest):
                    await m.extend(wrong)  # type: ignore[arg-type]
            with pytest.raises(LeaseLost):
                await m.extend(1000)

    on_broker(scenario)


# -- leaving -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "exception", "cancel"])
@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_whatever_ends_it_gives_back_without_a_failure(how: str, assignment: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c")
        kept: list[tailrace.Delivery] = []

        async def consume() -> None:
            async with client.consumer("t", "g", assignment=assignment) as consumer:
                known_as_fast(consumer)
                async for delivery in consumer:
                    kept.append(delivery)
                    if how == "exception":
                        raise ValueError("the handler")
                    if how == "break":
                        break
                    await asyncio.sleep(3600)

        task = asyncio.create_task(consume())
        await broker.settle()
        task.cancel() if how == "cancel" else None
        await asyncio.wait([task], timeout=5)
        if how == "exception":
            assert isinstance(task.exception(), ValueError)
        for settle in (kept[0].ack(), kept[0].nack(), kept[0].reject(), kept[0].extend(1)):
            with pytest.raises(Unavailable, match="closed"):
                await settle
        with pytest.raises(Unavailable, match="closed"):
            kept[0].ack_nowait()
        async with client.consumer("t", "g") as consumer:
            again = await take(consumer, 3)
            assert sorted((m.value, m.attempt) for m in again) == [(b"a", 1), (b"b", 1), (b"c", 1)]
            counts = {m.value: m.deliveries for m in again}
            assert counts == {b"a": 2, b"b": 1, b"c": 1}, "only what was handed out was delivered before"
        assert (await partition(client))["failures"] == 0

    on_broker(scenario)


def test_acknowledgements_on_the_way_out_are_not_lost() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b")
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            m.ack_nowait()
        assert (await partition(client))["committed"] == 1
        m.ack_nowait()  # Settled before: harmless.

    on_broker(scenario)


def test_failed_background_acknowledgements_are_reported_on_exit() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c")

        async def too_late(error: Exception | None) -> None:
            async with client.consumer("t", "g", session_ms=120_000) as consumer:
                known_as_fast(consumer)
                first, second, third = await take(consumer, 3)
                await third.nack(failure=False)
                broker.clock.advance(31)
                first.ack_nowait()
                second.ack_nowait()
                await broker.settle()
                assert [(f.first, f.end) for f in consumer.failures] == [(0, 2)]
                if error is not None:
                    raise error

        with pytest.raises(LeaseLost, match="t/0@0-1"):
            await too_late(None)
        with pytest.raises(ValueError, match="mine"):  # It does not hide the error of the block.
            await too_late(ValueError("mine"))

    on_broker(scenario)


def test_a_poll_that_was_under_way_takes_nothing_after_the_end() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.consumer("t", "g", assignment="shared") as consumer:
            await nothing(broker, consumer)
        await publish(client, b"a")
        await broker.settle()
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            assert m.attempt == 1

    on_broker(scenario)


# -- trouble -------------------------------------------------------------------------------------------------


def test_a_loop_goes_on_after_a_restart_of_the_broker() -> None:
    """Mistake 17: never silently stop."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b")
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            await m.ack()
            for number in range(3):
                broker.restart()
                await publish(client, b"%d" % number)
                found: set[bytes | None] = set()
                while found != {b"%d" % number} and not (number == 0 and len(found) == 2):
                    (m,) = await take(consumer)
                    try:
                        await m.ack()
                        found.add(m.value)
                    except LeaseLost:
                        continue
        assert (await partition(client))["lag"] == 0

    on_broker(scenario)


def test_nothing_hangs_when_the_broker_is_gone() -> None:
    async def main() -> None:
        broker = LocalBroker()
        broker.create_topic("t", partitions=1)
        async with broker.client(timeout=0.3) as client:
            await publish(client, b"a", b"b")
            consumer = await client.consumer("t", "g").__aenter__()
            one, two = await take(consumer, 2)
            broker.close()
            with pytest.raises(TailraceError):
                await one.ack()
            two.ack_nowait()
            with pytest.raises(TailraceError) as caught:
                await consumer.__aexit__(None, None, None)
            assert caught.value.code in ("unavailable", "timeout")

    run(asyncio.wait_for(main(), 60))


def test_a_session_that_ran_out_is_joined_again() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.consumer("t", "g") as consumer, iterating(consumer) as found:
            await broker.settle()
            broker.clock.advance(100)
            await publish(client, b"a")
            await asyncio.sleep(0.1)  # It pauses a moment before it joins again.
            await broker.settle()
            await found[0].ack()
            assert (await client.groups().describe("g")).member_count == 1

    on_broker(scenario)


# -- partitions that move ------------------------------------------------------------------------------------


def test_partitions_move_when_members_come_and_go() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        events: list[tuple[str, str, int]] = []

        def telling(who: str) -> dict[str, Any]:
            async def assigned(places: set[Any]) -> None:
                await asyncio.sleep(0)
                events.append((who, "+", len(places)))

            return {
                "on_assigned": assigned,
                "on_revoked": lambda places: events.append((who, "-", len(places))),
            }

        async with client.consumer("t", "g", **telling("a")) as first:
            await broker.settle()
            async with client.consumer("t", "g", **telling("b")) as second:
                await broker.settle()
                assert (len(first.assignment()), len(second.assignment())) == (2, 2)
                assert not first.assignment() & second.assignment()
                assert events == [("a", "+", 4), ("a", "-", 2), ("b", "+", 2)]
                async with client.producer("t") as producer:
                    for number in range(40):
                        await producer.publish(b"%d" % number, partition=number % 4)
                async with iterating(first) as mine, iterating(second) as others:
                    await broker.settle()
                    assert len(mine) == len(others) == 20
                    for delivery in (*mine, *others):
                        delivery.ack_nowait()
                    await first.commit()
                    await second.commit()
            await broker.settle()
            assert len(first.assignment()) == 4
        assert (await client.groups().describe("g")).lag == 0

    on_broker(scenario, partitions=4)


def test_a_partition_moves_only_after_what_is_handed_out_is_settled() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(20):
                await producer.publish(b"%d" % number, partition=number % 2)
        async with client.consumer("t", "g") as first:
            held = await take(first, 2)
            async with client.consumer("t", "g") as second:
                moving = {("t", p) for p in range(2)} - {(held[0].topic, held[0].partition)}
                await broker.settle()
                state = {
                    (x["topic"], x["partition"]): x for x in (await client.groups().describe("g")).partitions
                }
                for delivery in held:
                    assert state[delivery.topic, delivery.partition]["in_flight"] >= 1
                    await delivery.ack()
                await broker.settle()
                assert len(first.assignment()) == len(second.assignment()) == 1
                del moving
                rest: list[Any] = []
                async with iterating(first) as mine, iterating(second) as others:
                    await broker.settle()
                    rest = [*mine, *others]
                    assert all(m.attempt == 1 for m in rest)
                    assert sorted(int(m.value or b"") for m in (*held, *rest)) == list(range(20))

    on_broker(scenario, partitions=2)


def test_what_is_not_settled_in_time_goes_to_the_next_owner() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(2):
                await producer.publish(b"%d" % number, partition=number)
        async with client.consumer("t", "g", revoke_timeout_ms=200) as first:
            held = await take(first, 2)
            async with client.consumer("t", "g", revoke_timeout_ms=200) as second:
                await asyncio.sleep(0.15)
                await broker.settle()
                (again,) = await take(second)
                assert (again.attempt, again.deliveries) == (1, 2)
                lost = next(m for m in held if m.partition == again.partition)
                kept = next(m for m in held if m.partition != again.partition)
                with pytest.raises(LeaseLost):
                    await lost.ack()
                await kept.ack()
                await again.ack()

    on_broker(scenario, partitions=2)


def test_more_members_than_partitions_share_them() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        options: dict[str, Any] = {"assignment": "shared", "prefetch": 0, "batch_size": 1}
        async with (
            client.consumer("t", "g", **options) as one,
            client.consumer("t", "g", **options) as two,
            client.consumer("t", "g", **options) as three,
        ):
            await publish(client, *[b"%d" % n for n in range(3)])
            got = [(await take(consumer))[0] for consumer in (one, two, three)]
            assert sorted(m.value or b"" for m in got) == [b"0", b"1", b"2"]
            for m in got:
                await m.ack()

    on_broker(scenario)


def test_an_exclusive_group_has_one_active_consumer() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b")
        async with client.consumer("t", "g", mode="exclusive") as first:
            (m,) = await take(first)
            await m.ack()
            with pytest.raises(Fenced):
                await client.consumer("t", "g", mode="exclusive", wait=False).__aenter__()
            async with client.consumer("t", "g", mode="exclusive") as standby:
                assert standby.assignment() == set()
                async with iterating(standby) as found:
                    await broker.settle()
                    assert not found
                    await first.__aexit__(None, None, None)
                    await broker.settle()
                    assert [m.value for m in found] == [b"b"]
                    await found[0].ack()

    on_broker(scenario)


def test_paused_partitions_are_given_back_and_resumed() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(20):
                await producer.publish(b"%d" % number, partition=number % 2)
        async with client.consumer("t", "g") as consumer:
            held = await take(consumer, 1)
            consumer.pause(("t", 0), ("t", 1))
            await nothing(broker, consumer)
            states = (await client.groups().describe("g")).partitions
            assert sum(state["in_flight"] for state in states) == 1
            consumer.resume(("t", 1))
            await broker.settle()
            found = await take(consumer, 10 if held[0].partition == 0 else 9)
            assert {m.partition for m in found} == {1}
            await nothing(broker, consumer)
            consumer.resume()
            found += await take(consumer, 19 - len(found))
            assert sorted(int(m.value or b"") for m in (*held, *found)) == list(range(20))
            assert all(m.attempt == 1 for m in found)

    on_broker(scenario, partitions=2)


def test_a_reset_drops_what_was_buffered() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c")
        async with client.consumer("t", "g") as consumer:
            one, two = await take(consumer, 2)
            await one.ack()
            with pytest.raises(InvalidRequest):
                await client.groups().reset("g", "t", "earliest")
            plan = await client.groups().reset("g", "t", "earliest", dry_run=True)
            assert (plan.changes, plan.done) == ({0: (1, 0)}, False)
            plan = await client.groups().reset("g", "t", {0: 0}, force=True)
            assert plan.done
            await broker.settle()
            with pytest.raises(LeaseLost):
                await two.ack()
            again = await take(consumer, 3)
            assert [(m.value, m.attempt, m.deliveries) for m in again] == [
                (b"a", 1, 1),
                (b"b", 1, 1),
                (b"c", 1, 1),
            ]
            await again[0].ack()

    on_broker(scenario)


def test_groups_are_administered() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        groups = client.groups()
        created = await groups.create("g", "t", start="latest", max_attempts=2)
        assert created.created
        assert created.options["max_attempts"] == 2
        await publish(client, b"a")
        assert [(g.name, g.lag) for g in await groups.list(topic="t")] == [("g", 1)]
        await groups.pause("g")
        async with client.consumer("t", "g") as consumer:
            await nothing(broker, consumer)
            assert (await groups.describe("g")).paused
            await groups.resume("g")
            (m,) = await take(consumer)
            await m.ack()
            (member,) = (await groups.describe("g")).members
            assert member["member"] == consumer.member
            with pytest.raises(TailraceError):
                await groups.delete("g")
        await groups.delete("g")
        with pytest.raises(NotFound):
            await groups.describe("g")

    on_broker(scenario)


# -- handlers ------------------------------------------------------------------------------------------------


def test_run_acknowledges_what_is_done_and_gives_back_what_failed() -> None:
    """Mistake 17: a failed handler is not acknowledged."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c")
        async with client.consumer("t", "g") as consumer:
            seen: list[tuple[bytes | None, int]] = []

            async def handler(delivery: tailrace.Delivery) -> None:
                seen.append((delivery.value, delivery.attempt))
                if delivery.value == b"b" and delivery.attempt == 1:
                    raise ValueError("not today")
                if delivery.attempt == 2:
                    consumer.stop()

            task = asyncio.create_task(consumer.run(handler))
            await broker.settle()
            assert seen == [(b"a", 1), (b"b", 1), (b"c", 1)]
            await wait(broker, 2)
            await asyncio.wait_for(task, 5)
            assert seen[-1] == (b"b", 2)
        state = await partition(client)
        assert (state["lag"], state["failures"]) == (0, 1)

    on_broker(scenario)


@pytest.mark.parametrize("ordering", ["key", "partition", "none"])
def test_several_handlers_at_once_but_one_for_each_key(ordering: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(60):
                await producer.publish(b"%d" % number, key=b"k%d" % (number % 6))
        async with client.consumer("t", "g", ordering=ordering) as consumer:
            active: list[bytes | None] = []
            most = 0
            done: dict[bytes | None, list[int]] = {}

            async def handler(delivery: tailrace.Delivery) -> None:
                nonlocal most
                if ordering == "key":
                    assert delivery.key not in active
                active.append(delivery.key)
                most = max(most, len(active))
                for _ in range(3):
                    await asyncio.sleep(0)
                active.remove(delivery.key)
                done.setdefault(delivery.key, []).append(int(delivery.value or b""))
                if sum(map(len, done.values())) == 60:
                    consumer.stop()

            await asyncio.wait_for(consumer.run(handler, concurrency=4), 10)
            assert most == {"key": 4, "partition": 1, "none": 4}[ordering]
            if ordering != "none":
                assert all(values == sorted(values) for values in done.values())
        assert (await partition(client))["lag"] == 0

    on_broker(scenario)


def test_a_stuck_key_does_not_stop_the_others() -> None:
    """Mistake 16, on the side of the client; and a failure drops what was parked behind it."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(10):
                await producer.publish(b"%d" % number, key=b"stuck" if number < 5 else b"k%d" % number)
        async with client.consumer("t", "g") as consumer:
            release = asyncio.Event()
            seen: list[tuple[bytes | None, int]] = []

            async def handler(delivery: tailrace.Delivery) -> None:
                seen.append((delivery.value, delivery.attempt))
                if delivery.value == b"0" and delivery.attempt == 1:
                    await release.wait()
                    raise ValueError("stuck")

            task = asyncio.create_task(consumer.run(handler, concurrency=2))
            await broker.settle()
            assert seen == [(b"0", 1), *[(b"%d" % n, 1) for n in range(5, 10)]]
            release.set()
            await broker.settle()
            assert len(seen) == 6
            await wait(broker, 2)
            assert seen[6:] == [(b"0", 2), *[(b"%d" % n, 1) for n in range(1, 5)]]
            consumer.stop()
            await asyncio.wait_for(task, 5)
        assert (await partition(client))["lag"] == 0

    on_broker(scenario)


def test_a_handler_that_settles_by_itself_ends_the_run_with_its_error() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b")
        for concurrency in (1, 3):
            async with client.consumer("t", "g") as consumer:

                async def handler(delivery: tailrace.Delivery) -> None:
                    raise ValueError("mine")

                with pytest.raises(ValueError, match="mine"):
                    await asyncio.wait_for(consumer.run(handler, concurrency=concurrency, settle=False), 5)
        assert (await partition(client))["failures"] == 0

    on_broker(scenario)


def test_two_tasks_do_not_share_a_consumer() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.consumer("t", "g") as consumer, iterating(consumer):
            await broker.settle()
            with pytest.raises(InvalidRequest, match="one task"):
                await anext(consumer)

    on_broker(scenario)


def test_a_client_that_closes_ends_its_consumers() -> None:
    async def main() -> None:
        with LocalBroker() as broker:
            broker.create_topic("t", partitions=1)
            async with broker.client() as client:
                consumer = await client.consumer("t", "g").__aenter__()
                waiting = asyncio.ensure_future(anext(consumer))
                await broker.settle()
            with pytest.raises(Unavailable):
                await waiting
            await consumer.__aexit__(None, None, None)

    run(asyncio.wait_for(main(), 60))
