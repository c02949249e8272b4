"""The reader on virtual time, against a broker in hand: position, seek, prefetch, errors, the end.

Also covers `client/read/fetcher.py` and `client/rpc/waiters.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import tailrace
from tailrace.client.read.reader import Reader
from tailrace.client.sdk_tuning import AHEAD_BYTES
from tailrace.core.model.commands import DescribeTopic, Fetch, Fetched, FindOffsets, Offsets, Reply, TopicInfo
from tailrace.core.model.identifiers import HAS_OFFSET_DELTA, Refusal
from tailrace.errors import Corrupt, InvalidRequest, NotFound, Unavailable
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Header, crc32c
from tailrace.testing import LocalBroker
from tests.client.virtual_loop import LoopClock, rounds, run

LOST = Refusal("unavailable", "the connection broke", "unknown")
GONE = Refusal("not_found", "offset 0 is trimmed", "none", {"start_offset": 5})


def frame_of(offset: int, values: list[bytes]) -> bytes:
    """A stored batch."""
    columns, body = arrow.encode(values, ids=bytes(16 * len(values)), timestamps=1)
    count = len(values)
    header = Header(frame.DATA, columns, len(body), crc32c(body), 0, offset, count, count, 1, 7)
    return b"".join(frame.make(header, body).parts())


def frame_with_gaps(deltas: list[int], span: int) -> bytes:
    """A stored batch at offset 0 that lacks some rows."""
    count = len(deltas)
    columns, body = arrow.encode([b"x"] * count, ids=bytes(16 * count), timestamps=1)
    plain, columns = arrow.decode(bytes(body), columns), columns | HAS_OFFSET_DELTA
    schema = arrow.schema_of(columns)
    made = pa.RecordBatch.from_arrays([*plain.columns, pa.array(deltas, pa.uint32())], schema=schema)
    body = arrow.body_of(made, columns)
    header = Header(frame.DATA, columns, len(body), crc32c(body), 0, 0, span, count, 1, 7)
    return b"".join(frame.make(header, body).parts())


class Verbs:
    """See `BrokerVerbs`: partitions are lists of batches; fetches wait while there is nothing."""

    def __init__(self, partitions: int = 1) -> None:
        self.clock = LoopClock()
        self.logs: list[list[tuple[int, bytes]]] = [[] for _ in range(partitions)]
        self.ends = [0] * partitions
        self.parked: list[tuple[Fetch, Callable[[Reply, tuple[bytes, ...]], None]]] = []
        self.fetches: list[Fetch] = []
        self.replies: list[Reply] = []
        self.hold = False
        self.frames_a_fetch = 1

    def put(self, *values: bytes, partition: int = 0) -> None:
        self.logs[partition].append((self.ends[partition], frame_of(self.ends[partition], list(values))))
        self.ends[partition] += len(values)

    def submit(self, request: Any, body: Any, respond: Any) -> None:
        if isinstance(request, FindOffsets):
            latest = request.timestamp_us == -1
            respond(Offsets([end if latest else 0 for end in self.ends]), ())
        elif isinstance(request, DescribeTopic):
            respond(TopicInfo("t", 1, {}, [{} for _ in self.ends]), ())
        else:
            assert isinstance(request, Fetch)
            self.fetches.append(request)
            self.parked.append((request, respond))
            if not self.hold:
                self.serve()

    def serve(self) -> None:
        """Answer every fetch that there is something for."""
        parked, self.parked = self.parked, []
        for request, respond in parked:
            if self.replies:
                respond(self.replies.pop(0), ())
                continue
            slices, data = [], b""
            for partition, offset in request.positions:
                found = [
                    raw
                    for base, raw in self.logs[partition]
                    if base >= offset or self._holds(base, offset, raw)
                ]
                if found:
                    piece = b"".join(found[: self.frames_a_fetch])
                    slices.append((partition, len(piece), 0, self.ends[partition]))
                    data += piece
            if slices:
                respond(Fetched(slices), (data,))
            else:
                self.parked.append((request, respond))

    @staticmethod
    def _holds(base: int, offset: int, raw: bytes) -> bool:
        return base <= offset < frame.parse(raw).end_offset


def make(verbs: Verbs, **options: Any) -> Reader:
    defaults: dict[str, Any] = {"start": "earliest", "partitions": None, "stop_at_end": False}
    return Reader(verbs, "t", 10.0, **{**defaults, **options})


async def take(reader: Reader, count: int) -> list[bytes | None]:
    return [(await anext(reader)).value for _ in range(count)]


def test_position_is_exactly_behind_the_last_message_given() -> None:
    async def scenario() -> None:
        verbs = Verbs(partitions=2)
        verbs.put(b"a", b"b", b"c")
        verbs.put(b"d", b"e", partition=1)
        async with make(verbs) as reader:
            assert reader.position() == {0: 0, 1: 0}
            seen: list[bytes | None] = []
            for count in range(1, 6):
                seen += await take(reader, 1)
                assert sum(reader.position().values()) == count
            assert sorted(seen, key=str) == [b"a", b"b", b"c", b"d", b"e"]
            place = reader.position()
        async with make(verbs, start=place) as other:
            waiting = asyncio.create_task(anext(other))
            await rounds()
            assert not waiting.done()
            verbs.put(b"f")
            verbs.serve()
            message = await waiting
            assert (message.value, message.offset, message.partition) == (b"f", 3, 0)

    run(scenario())


def test_seek_into_the_middle_of_a_batch_and_back() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        verbs.put(b"a", b"b", b"c")
        async with make(verbs) as reader:
            await take(reader, 2)
            await reader.seek(1)
            assert reader.position() == {0: 1}
            assert await take(reader, 2) == [b"b", b"c"]
            await reader.seek("earliest")
            assert await take(reader, 1) == [b"a"]
            await reader.seek({0: 2})
            assert await take(reader, 1) == [b"c"]
            await reader.seek(datetime(2020, 1, 1, tzinfo=UTC))
            assert await take(reader, 1) == [b"a"]
            for wrong in (True, 1.5, None):
                with pytest.raises(InvalidRequest):
                    await reader.seek(wrong)  # type: ignore[arg-type]

    run(scenario())


def test_an_answer_to_a_fetch_from_before_a_seek_is_dropped() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        for value in (b"a", b"b", b"c"):
            verbs.put(value)
        verbs.hold = True
        async with make(verbs) as reader:
            await reader.seek(2)
            assert len(verbs.parked) == 2
            verbs.serve()
            assert await take(reader, 1) == [b"c"]

    run(scenario())


def test_reads_ahead_only_so_far() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        size = 900_000
        for _ in range(20):
            verbs.put(bytes(size))
        async with make(verbs) as reader:
            await rounds(20)
            ahead = len(verbs.fetches)
            assert ahead == -(-AHEAD_BYTES // size)
            await take(reader, 1)
            assert len(verbs.fetches) <= ahead + 1
            await take(reader, 19)

    run(scenario())


def test_stops_where_the_topic_ended_when_it_was_opened() -> None:
    async def scenario() -> None:
        verbs = Verbs(partitions=2)
        verbs.frames_a_fetch = 100
        for number in range(3):
            verbs.put(b"%d" % number)
        verbs.hold = True
        async with make(verbs, stop_at_end=True) as reader:
            verbs.put(b"too late")
            verbs.put(b"too late", partition=1)
            verbs.hold = False
            verbs.serve()
            assert [message.value async for message in reader] == [b"0", b"1", b"2"]
            with pytest.raises(StopAsyncIteration):
                await anext(reader)
            await reader.seek("earliest")
            assert [batch.num_rows async for batch in reader.batches()] == [1, 1, 1]
        async with make(Verbs(), stop_at_end=True) as empty:
            assert [message async for message in empty] == []

    run(scenario())


def test_trouble_of_the_connection_is_waited_out() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        verbs.replies = [LOST] * 8
        async with make(verbs) as reader:
            verbs.put(b"a")
            began = asyncio.get_running_loop().time()
            assert await take(reader, 1) == [b"a"]
            assert 0.5 < asyncio.get_running_loop().time() - began < 10
            assert len(verbs.fetches) <= 11

    run(scenario())


def test_trimmed_is_told_and_a_seek_goes_on() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        verbs.put(b"a")
        verbs.replies = [GONE, GONE]
        async with make(verbs) as reader:
            for _ in range(2):  # not once and then silence
                with pytest.raises(NotFound) as caught:
                    await anext(reader)
                assert caught.value.start_offset == 5
            await reader.seek(0)
            assert await take(reader, 1) == [b"a"]

    run(scenario())


def test_damage_is_told_and_its_partition_is_not_forgotten() -> None:
    async def scenario() -> None:
        verbs = Verbs(partitions=2)
        verbs.frames_a_fetch = 2
        verbs.put(b"good")
        verbs.put(b"bad")
        verbs.put(b"other", partition=1)
        whole = verbs.logs[0][1]
        verbs.logs[0][1] = (1, whole[1][:-1] + bytes([whole[1][-1] ^ 1]))
        async with make(verbs) as reader:
            assert await take(reader, 1) == [b"good"]
            with pytest.raises(Corrupt):
                await take(reader, 2)
            verbs.logs[0][1] = whole
            assert sorted(await take(reader, 2), key=str) == [b"bad", b"other"]
            assert reader.position() == {0: 2, 1: 1}

    run(scenario())


def test_missing_offsets_are_an_error_not_a_skip() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        verbs.put(b"a")
        verbs.put(b"b")
        del verbs.logs[0][0]
        async with make(verbs) as reader:
            with pytest.raises(Corrupt, match="offsets 0 to 0 are missing"):
                await anext(reader)

    run(scenario())


def test_cancelling_a_wait_loses_nothing() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs) as reader:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1):
                        await anext(reader)
            waiting = asyncio.create_task(anext(reader))
            await rounds()
            verbs.put(b"a", b"b")
            verbs.serve()
            waiting.cancel()  # at the very moment that something arrives
            await asyncio.wait([waiting])
            assert await take(reader, 2) == [b"a", b"b"]
            assert reader.position() == {0: 2}

    run(scenario())


def test_a_batch_of_which_nothing_was_handed_out_stays_in_hand() -> None:
    """Threads give up a wait without knowing what has come meanwhile."""

    async def scenario() -> None:
        verbs = Verbs()
        verbs.put(b"a", b"b")
        verbs.put(b"c")
        async with make(verbs) as reader:
            await reader.take()
            await reader.take()
            assert await take(reader, 3) == [b"a", b"b", b"c"]
            reader.kill(Unavailable("closed"))
            with pytest.raises(Unavailable):
                await anext(reader)
        async with make(verbs) as reader:
            await reader.take()
            reader.kill(Unavailable("closed"))
            with pytest.raises(Unavailable):
                await anext(reader)

    run(scenario())


def test_a_start_behind_the_last_row_of_a_batch_with_gaps() -> None:
    """Its frame covers the offset, none of its rows does: the next batch follows."""

    async def scenario() -> None:
        verbs = Verbs()
        verbs.put(b"a", b"b")
        verbs.logs[0][0] = (0, frame_with_gaps([0, 1], span=5))
        verbs.ends[0] = 5
        verbs.put(b"c")
        for start in (2, 4):
            async with make(verbs, start=start, stop_at_end=True) as reader:
                assert [(message.offset, message.value) async for message in reader] == [(5, b"c")]
                assert reader.position() == {0: 6}
            async with make(verbs, start=start, stop_at_end=True) as reader:
                assert [batch.column("offset").to_pylist() async for batch in reader.batches()] == [[5]]

    run(scenario())


def test_only_the_partitions_asked_for() -> None:
    async def scenario() -> None:
        verbs = Verbs(partitions=3)
        for partition in range(3):
            verbs.put(b"%d" % partition, partition=partition)
        async with make(verbs, partitions=[2, 0, 2]) as reader:
            assert sorted(await take(reader, 2), key=str) == [b"0", b"2"]
            assert set(reader.position()) == {0, 2}
        with pytest.raises(InvalidRequest, match="no partition 7"):
            await make(verbs, partitions=[7]).__aenter__()

    run(scenario())


def test_partitions_that_are_added_are_read_from_their_beginning() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        async with make(verbs, start="latest") as reader:
            waiting = asyncio.create_task(anext(reader))
            await rounds()
            verbs.logs.append([])
            verbs.ends.append(0)
            verbs.put(b"new", partition=1)
            for number in range(3):
                await asyncio.sleep(31)
                verbs.put(b"%d" % number)
                verbs.serve()
            first = await waiting
            rest = await take(reader, 3)
            assert b"new" in [first.value, *rest]

    run(scenario())


def test_closed_readers_say_so() -> None:
    async def scenario() -> None:
        verbs = Verbs()
        reader = make(verbs)
        with pytest.raises(Unavailable, match="not open"):
            await anext(reader)
        async with reader:
            waiting = asyncio.create_task(anext(reader))
            await rounds()
        with pytest.raises(Unavailable, match="closed"):
            await waiting
        verbs.put(b"a")
        verbs.serve()  # an answer that comes after the end harms nobody
        with pytest.raises(Unavailable):
            await anext(reader)

    run(scenario())


def test_a_range_ends_before_its_end() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        broker.create_topic("range", partitions=1)
        async with client.producer("range") as producer:
            await (await producer.send_many([b"%d" % number for number in range(10)]))
        for start, end, expected in ((2, 5, range(2, 5)), (0, 10, range(10)), (7, {0: 8}, range(7, 8))):
            async with client.reader("range", start=start, end=end) as reader:
                assert [message.offset async for message in reader] == list(expected)
                assert reader.position() == {0: expected[-1] + 1}
            async with client.reader("range", start=start, end=end) as reader:
                batches = [batch async for batch in reader.batches()]
            assert [offset for batch in batches for offset in batch["offset"].to_pylist()] == list(expected)
        async with client.reader("range", start=5, end=5) as reader:
            assert [message async for message in reader] == []

    with_broker(scenario)


def test_a_start_outside_the_log_is_refused_with_and_without_an_end() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        broker.create_topic("t", partitions=2)
        async with client.producer("t") as producer:
            for partition in (0, 1):
                await (await producer.send_many([b"v"] * 10 * (partition + 1), partition=partition))
        await client.admin().trim_topic("t", 0, 4)
        ends: list[dict[str, Any]] = [{}, {"stop_at_end": True}, {"end": 10}, {"end": {0: 3, 1: 3}}]
        starts: list[tuple[Any, tuple[int, ...] | None]] = [
            (99, (0, 4, 10)),
            (11, (0, 4, 10)),
            (3, (0, 4, 10)),
            ({0: 10, 1: 21}, (1, 0, 20)),
            ({0: 10, 2: 0}, None),
        ]
        for start, bounds in starts:
            for end in ends:
                async with client.reader("t", start=start, **end) as reader:
                    for _ in range(2):  # not once and then silence
                        with pytest.raises(NotFound) as caught:
                            await anext(reader)
                    if bounds is not None:
                        error = caught.value
                        assert (error.partition, error.start_offset, error.end_offset) == bounds
                    await reader.seek("latest" if end else "earliest")
                    assert not end or [message async for message in reader] == []

    with_broker(scenario)


def test_the_end_itself_is_a_start_from_which_there_is_nothing_to_read() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        broker.create_topic("t", partitions=1)
        async with client.producer("t") as producer:
            await (await producer.send_many([b"v"] * 3))
            async with client.reader("t", start="latest", stop_at_end=True) as reader:
                await producer.publish(b"behind the end of the reader")
                for start in ({0: 3}, 4, "earliest"):
                    await reader.seek(start)
                    read = [message.offset async for message in reader]
                    assert read == ([0, 1, 2] if start == "earliest" else [])
        await client.admin().trim_topic("t", 0, 4)
        for start in ("earliest", "latest", 4):
            async with client.reader("t", start=start, stop_at_end=True) as reader:
                assert [message async for message in reader] == []

    with_broker(scenario)


def with_broker(scenario: Callable[[LocalBroker, tailrace.Client], Awaitable[None]]) -> None:
    """Play with a whole broker in this process."""
    with LocalBroker() as broker:

        async def main() -> None:
            async with broker.client() as client:
                await asyncio.wait_for(scenario(broker, client), 10)

        asyncio.run(main())
