"""The producer on virtual time, against a broker in hand: batches, order, bounds, who hears of failures.

Also covers `client/publish/loop_outside.py` and `client/publish/message_fields.py`.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.messages import to_us
from tailrace.client.publish import producer as module
from tailrace.client.publish.producer import Producer
from tailrace.client.sdk_tuning import BATCH_ROWS
from tailrace.core.model.commands import DescribeTopic, Publish, Published, Reply, TopicInfo
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import (
    Full,
    InvalidRequest,
    NotFound,
    Overloaded,
    SequenceConflict,
    Timeout,
    TooLarge,
    Unavailable,
)
from tailrace.format import batch as arrow
from tests.client.virtual_loop import LoopClock, rounds, run

CONFLICT = Refusal("sequence_conflict", "taken", "none", {"current_sequence": 3})
GONE = Refusal("not_found", "no such topic", "none")
LOST = Refusal("unavailable", "the connection broke", "unknown")
Respond = Callable[[Reply, tuple[()]], None]


class Verbs:
    """See `BrokerVerbs`: publishes wait until the test answers them, or are answered by `auto`."""

    def __init__(self, partitions: int = 1, auto: Reply | None = None) -> None:
        self.clock = LoopClock()
        self.partitions = partitions
        self.auto = auto
        self.waiting: list[tuple[Publish, bytes, Respond]] = []
        self.sent: list[tuple[int, list[Any]]] = []
        self.ends: dict[int, int] = {}

    def submit(self, request: Any, body: Any, respond: Any) -> None:
        if isinstance(request, DescribeTopic):
            rows: list[dict[str, Any]] = [{} for _ in range(self.partitions)]
            respond(TopicInfo("t", 1, {"message_bytes_max": 1000}, rows), ())
            return
        assert isinstance(request, Publish)
        self.sent.append((request.partition, arrow.decode(body, request.columns)["value"].to_pylist()))
        self.waiting.append((request, bytes(body), respond))
        if self.auto is not None:
            self.answer(self.auto)

    def answer(self, *replies: Reply) -> None:
        """Answer the oldest."""
        for reply in replies:
            self.waiting.pop(0)[2](reply, ())

    def store(self) -> None:
        """Store everything that waits, as a broker would."""
        while self.waiting:
            request, body, respond = self.waiting.pop(0)
            end = self.ends.get(request.partition, 0)
            self.ends[request.partition] = end + len(arrow.decode(body, request.columns))
            respond(Published(end, 7), ())

    def values(self) -> list[list[Any]]:
        return [values for _, values in self.sent]


def make(verbs: Verbs, **options: Any) -> Producer:
    defaults: dict[str, Any] = {
        "name": None,
        "linger_ms": 5.0,
        "buffer_bytes_max": 1 << 20,
        "compression": None,
    }
    return Producer(verbs, "t", 10.0, **{**defaults, **options})


def test_an_idle_partition_sends_in_the_next_round_and_a_busy_one_gathers() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            began = asyncio.get_running_loop().time()
            await producer.send(b"1")
            await producer.send(b"2")
            await rounds()
            assert verbs.values() == [[b"1", b"2"]]
            await producer.send(b"3")
            await rounds()
            await producer.send(b"4")
            await rounds()
            assert len(verbs.sent) == 1  # they wait for the answer, or for the linger
            verbs.store()
            await rounds()
            assert verbs.values()[1:] == [[b"3", b"4"]]
            assert asyncio.get_running_loop().time() == began
            await producer.send(b"5")
            await asyncio.sleep(0.004)
            assert len(verbs.sent) == 2
            await asyncio.sleep(0.002)
            assert verbs.values()[2:] == [[b"5"]]  # the linger is over, the answer is not there yet
            verbs.store()

    run(scenario())


def test_results_name_the_place_of_each_message() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            receipts = [await producer.send(b"%d" % n) for n in range(3)]
            many = await producer.send_many([b"a", b"b"])
            await rounds()
            verbs.store()
            results = [await receipt for receipt in receipts] + await many
            assert [result.offset for result in results] == [0, 1, 2, 3, 4]
            assert len({result.id for result in results}) == 5
            assert await receipts[0] == results[0]  # as often as wanted

    run(scenario())


def test_order_within_a_partition_whatever_the_way_in() -> None:
    async def scenario() -> None:
        verbs = Verbs(partitions=2, auto=Published(0, 7))
        async with make(verbs) as producer:
            expected: dict[int, list[bytes]] = {0: [], 1: []}
            for number in range(60):
                partition = number // 3 % 2
                value = b"%d" % number
                expected[partition].append(value)
                if number % 4 == 0:
                    await producer.send(value, partition=partition)
                elif number % 4 == 1:
                    await producer.send_many([value], partition=partition)
                elif number % 4 == 2:
                    await producer.send(value, partition=partition, expected_sequence=number)
                else:
                    await producer.send_table(pa.table({"value": [value]}), partition=partition)
            await producer.flush()
            for partition in (0, 1):
                arrived = [value for target, values in verbs.sent if target == partition for value in values]
                assert arrived == expected[partition]

    run(scenario())


def test_conditional_messages_travel_alone() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            await producer.send(b"1")
            conditional = await producer.send(b"2", expected_sequence=9)
            after = await producer.send(b"3")
            await rounds()
            assert verbs.values()[:2] == [[b"1"], [b"2"]]
            assert verbs.waiting[1][0].expected_sequence == 9
            gap = Refusal("unavailable", "too early", "none", {"expected": 1})
            verbs.answer(Published(0, 7), CONFLICT, *[gap] * (len(verbs.waiting) - 2))
            with pytest.raises(SequenceConflict):
                await conditional
            await asyncio.sleep(0.1)
            verbs.store()
            assert (await after).offset == 0

    run(scenario())


def test_batches_end_at_their_bounds() -> None:
    async def scenario() -> None:
        verbs = Verbs(auto=Published(0, 7))
        async with make(verbs, buffer_bytes_max=1 << 30) as producer:
            for _ in range(BATCH_ROWS + 1):
                await producer.send(b"x")
            await producer.flush()
            assert [len(values) for values in verbs.values()] == [BATCH_ROWS, 1]
            verbs.sent.clear()
            await producer.send_many([b"x"] * (2 * BATCH_ROWS + 5))
            await producer.flush()
            assert [len(values) for values in verbs.values()] == [BATCH_ROWS, BATCH_ROWS, 5]
            assert len(await producer.send_many([])) == 0

    run(scenario())


def test_a_full_buffer_holds_senders_back_and_cancelling_one_loses_nothing() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs, buffer_bytes_max=2000) as producer:
            sent: list[bytes] = []

            async def send_all() -> None:
                for number in range(100):
                    await producer.send(b"%03d" % number + bytes(200))
                    sent.append(b"%03d" % number)

            task = asyncio.create_task(send_all())
            await rounds(50)
            held = len(sent)
            assert held < 30
            await rounds(50)
            assert len(sent) == held  # bounded, however long it takes
            task.cancel()
            await rounds()
            for _ in range(20):
                verbs.store()
                await rounds()
            await producer.flush()
            arrived = [value[:3] for values in verbs.values() for value in values]
            assert arrived == sent

    run(scenario())


def test_cancelling_a_wait_for_a_result_does_not_touch_the_message() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            receipt = await producer.send(b"1")

            async def wait() -> None:
                await receipt

            task = asyncio.create_task(wait())
            await rounds()
            task.cancel()
            await rounds()
            assert task.cancelled()
            with pytest.raises(Timeout, match="may still be"):
                await producer.publish(b"2", timeout=0.5)
            verbs.store()
            await asyncio.sleep(0.1)
            verbs.store()
            assert (await receipt).offset == 0

    run(scenario())


def test_failures_that_nobody_awaited_come_out_of_flush_once() -> None:
    async def scenario() -> None:
        verbs = Verbs(auto=GONE)
        async with make(verbs) as producer:
            await producer.send(b"1")
            await producer.send(b"2")
            with pytest.raises(NotFound) as caught:
                await producer.flush()
            assert "2 messages failed" in "".join(caught.value.__notes__)
            await producer.flush()
            with pytest.raises(NotFound):
                await producer.publish(b"3")
            await producer.flush()  # that one was noticed

    run(scenario())


def test_leaving_raises_what_nobody_awaited_unless_something_else_failed() -> None:
    async def leave(verbs: Verbs, error: Exception | None) -> None:
        async with make(verbs) as producer:
            await producer.send(b"1")
            if error is not None:
                raise error

    async def scenario() -> None:
        verbs = Verbs(auto=GONE)
        with pytest.raises(NotFound):
            await leave(verbs, None)
        with pytest.raises(ZeroDivisionError):
            await leave(verbs, ZeroDivisionError())
        assert len(verbs.sent) == 2  # what was buffered still went out

    run(scenario())


def test_the_failure_of_many_is_told_once() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            receipts = await producer.send_many([b"x"] * (BATCH_ROWS + 1))
            await rounds()
            verbs.answer(GONE, GONE)
            with pytest.raises(NotFound):
                await receipts

    run(scenario())


def test_noticed_failures_do_not_crowd_out_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAILED_BATCHES_KEPT", 5)

    async def scenario() -> None:
        verbs = Verbs(auto=CONFLICT)
        async with make(verbs) as producer:
            receipts = [await producer.send(b"x", expected_sequence=9) for _ in range(5)]
            await rounds()
            for receipt in receipts:
                with pytest.raises(SequenceConflict):
                    await receipt
            verbs.auto = GONE
            await producer.send(b"nobody waits for this", expected_sequence=9)
            with pytest.raises(NotFound):
                await producer.flush()

    run(scenario())


def test_given_up_after_its_time() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            receipt = await producer.send(b"1")
            with pytest.raises(Timeout) as caught:
                await receipt
            assert caught.value.outcome == "unknown"
            later = await producer.send(b"2")
            await rounds()
            first, second = (request for request, _, _ in verbs.waiting)
            assert first.producer_id != second.producer_id
            verbs.answer(Published(0, 7), Published(1, 7))
            assert (await later).offset == 1

    run(scenario())


def test_retries_until_the_broker_is_back() -> None:
    async def scenario() -> None:
        verbs = Verbs(auto=Refusal("unavailable", "not connected", "none"))
        async with make(verbs) as producer:
            receipt = await producer.send(b"1")
            await asyncio.sleep(3)
            for _ in range(20):
                await producer.send(b"2")
            assert len(verbs.sent) < 20  # with growing pauses, and nothing else leaves meanwhile
            verbs.auto = None
            await asyncio.sleep(1)
            verbs.store()
            assert (await receipt).offset == 0
            await asyncio.sleep(0.1)
            verbs.store()

    run(scenario())


def test_nobody_waits_for_a_producer_whose_client_is_closed() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        producer = make(verbs, buffer_bytes_max=100)
        await producer.__aenter__()
        sent = await producer.send(b"1" * 90)
        await rounds()
        waiting = asyncio.create_task(producer.send(b"2"))
        flushing = asyncio.create_task(producer.flush())
        await rounds()
        assert not waiting.done()
        assert not flushing.done()
        producer.kill(Unavailable("the client is closed"))
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable) as caught:
            await sent
        assert caught.value.outcome == "unknown"
        with pytest.raises(Unavailable):
            await producer.send(b"3")
        await asyncio.wait([flushing])
        assert flushing.exception() is None or isinstance(flushing.exception(), Unavailable)

    run(scenario())


def test_cancelled_while_leaving_fails_the_rest() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        receipts: list[Any] = []

        async def work() -> None:
            async with make(verbs) as producer:
                receipts.append(await producer.send(b"1"))

        task = asyncio.create_task(work())
        await rounds(10)
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(Unavailable):
            await receipts[0]

    run(scenario())


def test_bad_messages_are_refused_alone_and_by_name() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            good = await producer.send(b"good")
            bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
                (InvalidRequest, "value", {"value": "text"}),
                (TooLarge, "value", {"value": bytes(1001)}),
                (InvalidRequest, "tombstone", {"value": None}),
                (InvalidRequest, "key", {"value": b"", "key": "text"}),
                (InvalidRequest, "priority", {"value": b"", "priority": 9}),
                (InvalidRequest, "ttl", {"value": b"", "ttl": -1}),
                (InvalidRequest, "partition", {"value": b"", "partition": 1}),
                (InvalidRequest, "expected_sequence", {"value": b"", "expected_sequence": -1}),
                (InvalidRequest, "timestamp", {"value": b"", "timestamp": -1}),
            ]
            for kind, word, message in bad:
                with pytest.raises(kind, match=word):
                    await producer.send(**message)
            with pytest.raises(InvalidRequest, match="value"):
                await producer.send_many([b"a", "b"])  # type: ignore[list-item]
            with pytest.raises(InvalidRequest, match="column"):
                await producer.send_many([b"a"], keys=[b"a", b"b"])
            await rounds()
            verbs.store()
            assert (await good).offset == 0
            assert verbs.values() == [[b"good"]]

    run(scenario())


def time_of(moment: datetime | None) -> int | None:
    return None if moment is None else to_us(moment, "time", ValueError)


fields = st.fixed_dictionaries(
    {"value": st.binary(max_size=5)},
    optional={
        "key": st.binary(max_size=5),
        "headers": st.just({"a": b"b"}),
        "priority": st.integers(0, 4),
        "timestamp": st.integers(1, 1000),
        "dedup_id": st.binary(min_size=1, max_size=3),
        "expires_at": st.integers(1, 1000),
    },
)


@given(st.lists(fields, min_size=1, max_size=12))
def test_every_message_keeps_its_own_fields_in_a_mixed_batch(messages: list[dict[str, Any]]) -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as producer:
            for message in messages:
                await producer.send(**message)
            await rounds()
            ((request, body, _),) = verbs.waiting
            rows = arrow.decode(body, request.columns).to_pylist()
            verbs.store()
        for message, row in zip(messages, rows, strict=True):
            assert row["value"] == message["value"]
            assert row.get("key") == message.get("key")
            assert row.get("priority", 2) == message.get("priority", 2)
            assert row.get("dedup_id") == message.get("dedup_id")
            assert time_of(row.get("expires_at")) == message.get("expires_at")
            assert dict(row.get("headers") or ()) == message.get("headers", {})
            assert "timestamp" not in message or time_of(row["timestamp"]) == message["timestamp"]

    run(scenario())


def test_new_partitions_are_found_while_it_runs() -> None:
    async def scenario() -> None:
        verbs = Verbs(auto=Published(0, 7))
        async with make(verbs) as producer:
            verbs.partitions = 3
            with pytest.raises(InvalidRequest):
                await producer.send(b"1", partition=2)
            await asyncio.sleep(31)
            await (await producer.send(b"1", partition=2))
            assert verbs.sent == [(2, [b"1"])]

    run(scenario())


def test_overload_is_waited_out_and_told_when_the_time_is_up() -> None:
    async def scenario() -> None:
        verbs = Verbs(auto=Refusal("overloaded", "slow down", "none", {"retry_after_ms": 5}))
        async with make(verbs) as producer:
            with pytest.raises((Overloaded, Timeout)) as caught:
                await producer.publish(b"1")
            assert caught.value.outcome == "none"

    run(scenario())


@pytest.mark.parametrize(("code", "remarks"), [("full", 1), ("unavailable", 0)])
def test_the_log_tells_why_a_message_is_sent_again(
    code: str, remarks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk would otherwise look like a program that hangs. Lost connections are told elsewhere."""

    async def scenario() -> None:
        async with make(Verbs(auto=Refusal(code, "no space is left", "none"))) as producer:
            with pytest.raises((Full, Unavailable, Timeout)):
                await producer.publish(b"1")

    run(scenario())
    assert [record.message for record in caplog.records] == [
        "a message was refused and is sent again: no space is left"
    ] * remarks


@given(
    st.lists(
        st.tuples(
            st.one_of(st.binary(max_size=5), st.none(), st.just(b"x" * 1001), st.builds(bytearray)),
            st.one_of(st.binary(max_size=3), st.none(), st.just("text")),
            st.one_of(st.integers(0, 4), st.integers(-1, 6), st.booleans()),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.booleans(),
)
def test_many_are_refused_and_stored_as_each_would_be(
    rows: list[tuple[Any, Any, Any]], with_keys: bool, with_priorities: bool
) -> None:
    """One by one they are checked one by one; together mostly all at once."""

    async def one_by_one(verbs: Verbs) -> str:
        async with make(verbs) as producer:
            for value, key, priority in rows:
                fields = {"key": key} if with_keys else {}
                fields |= {"priority": priority} if with_priorities else {}
                try:
                    await producer.send(value, **fields)
                except (InvalidRequest, TooLarge) as error:
                    verbs.store()
                    return str(error)
            await rounds()
            verbs.store()
        return ""

    async def together(verbs: Verbs) -> str:
        async with make(verbs) as producer:
            columns: dict[str, Any] = {"keys": [row[1] for row in rows]} if with_keys else {}
            columns |= {"priorities": [row[2] for row in rows]} if with_priorities else {}
            try:
                await producer.send_many([row[0] for row in rows], **columns)
            except (InvalidRequest, TooLarge) as error:
                return str(error)
            await rounds()
            stored.extend(
                row
                for request, body, _ in verbs.waiting
                for row in arrow.decode(body, request.columns).to_pylist()
            )
            verbs.store()
        return ""

    stored: list[dict[str, Any]] = []
    alone, many = run(one_by_one(Verbs(auto=Published(0, 7)))), run(together(Verbs()))
    assert bool(alone) == bool(many)
    if not many:
        assert [row["value"] for row in stored] == [row[0] for row in rows]
        if with_keys and any(row[1] is not None for row in rows):
            assert [row["key"] for row in stored] == [row[1] for row in rows]
        if with_priorities:
            assert [row["priority"] for row in stored] == [row[2] for row in rows]
