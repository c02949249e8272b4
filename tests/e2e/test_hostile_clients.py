"""Hostile clients against a real broker, while a good one publishes and reads: it must not notice them."""

import asyncio
import contextlib
import random
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tailrace
from tailrace.core.model.commands import Fetch, ListTopics, Ping, Pong, Publish, Published
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest
from tailrace.format import codec
from tailrace.format.frame import crc32c
from tailrace.format.wire import PREAMBLE, PREFIX, Hello, prefix
from tailrace.protocols.edge_tuning import PARTIAL_BYTES_HARD_MAX
from tests.e2e.broker_process import BrokerProcess, eventually
from tests.e2e.good_client import GoodClient
from tests.e2e.raw_client import GREETING, HELLO, RawClient, publish
from tests.format.hostile import mutate, sample

pytestmark = pytest.mark.alone
WORST_MS = 1500.0
"""What a publish and a look at the topic may take together, while all clients share two cores."""
GROWTH_MB = 150.0
LEFT_MB = 100.0
"""Memory that the allocator keeps; it does not grow with further attacks."""


class Siege(msgspec.Struct):
    """A broker and its one good client."""

    broker: BrokerProcess
    good: GoodClient
    base_mb: float = 0.0


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    folder = tmp_path_factory.mktemp("siege")
    with BrokerProcess(folder / "data", "--log-level", "error").start() as broker:
        asyncio.run(fill(broker))
        with GoodClient(broker.url) as good:
            yield Siege(broker, good)
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


async def fill(broker: BrokerProcess) -> None:
    """A topic that lies mostly on the disk, one that lies in memory, and one for everybody."""
    async with tailrace.connect(broker.url) as client:
        await client.admin().create_topic("cold", partitions=1, durability="interval", ring_buffer_bytes=0)
        await client.admin().create_topic(
            "hot", partitions=1, durability="interval", ring_buffer_bytes=16 << 20
        )
        await client.admin().create_topic("any", partitions=1, durability="interval")
        for topic in ("cold", "hot"):
            async with client.producer(topic) as producer:
                for _ in range(24):
                    await producer.send_many([b"x" * 100_000] * 5)


class Watched:
    """The greatest RssAnon while a block runs."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._over = threading.Event()
        self.first_mb = self.peak_mb = broker.anonymous_mb()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.peak_mb = max(self.peak_mb, self._broker.anonymous_mb())

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def attack(
    siege: Siege, run: Callable[[tuple[str, int]], Awaitable[Any]], growth_max_mb: float = GROWTH_MB
) -> None:
    """Run an attack; the good client must not notice, memory stays bounded and comes back."""
    broker = siege.broker
    siege.base_mb = siege.base_mb or broker.anonymous_mb()
    siege.good.lap()
    files = broker.open_files()
    watched = Watched(broker)

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await run(broker.address)

    try:
        asyncio.run(bounded())
    finally:
        watched.stop()
    lap = siege.good.lap()
    growth_mb = watched.peak_mb - siege.base_mb
    print(f"good client: {lap}; memory: {siege.base_mb:.0f} MB, at most {growth_mb:.0f} MB more")
    assert broker.running
    assert lap.failures == []
    assert lap.published > 0
    assert lap.worst_ms < WORST_MS
    assert growth_mb < growth_max_mb
    eventually(lambda: broker.open_files() <= files + 2, "connections are closed")
    eventually(lambda: broker.anonymous_mb() - siege.base_mb < LEFT_MB, "memory comes back")
    print(f"left: {broker.anonymous_mb() - siege.base_mb:.0f} MB")


async def usable(raw: RawClient) -> None:
    """The connection still works."""
    assert await raw.request(Ping()) == Pong()


async def crowd(count: int, one: Callable[[int], Awaitable[Any]], *, at_once: int = 100) -> list[Any]:
    """Run many clients, some at a time."""
    results: list[Any] = []
    for first in range(0, count, at_once):
        results += await asyncio.gather(
            *(one(number) for number in range(first, min(first + at_once, count)))
        )
    return results


# -- the framing ------------------------------------------------------------------------------------------


def opening(rng: random.Random) -> bytes:
    """Something that is no greeting."""
    hello = bytearray(HELLO)
    hello[rng.randrange(len(hello))] ^= 1 << rng.randrange(8)
    return rng.choice(
        [
            lambda: rng.randbytes(rng.randrange(1, 200)),
            lambda: b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
            lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            lambda: b"\x10\x1f\x00\x04MQTT\x04\x02\x00\x3c" + rng.randbytes(20),
            lambda: PREAMBLE[: rng.randrange(1, 4)] + rng.randbytes(40),
            lambda: PREAMBLE + rng.randbytes(rng.randrange(16, 300)),
            lambda: PREAMBLE + PREFIX.pack(rng.choice((4097, 1 << 20, (1 << 32) - 1)), 0, 1) + b"x" * 100,
            lambda: PREAMBLE + PREFIX.pack(len(HELLO), rng.choice((1, 1 << 20, (1 << 32) - 1)), 1) + HELLO,
            lambda: PREAMBLE + prefix(bytes(hello), 0, 3),
            lambda: PREAMBLE + prefix(b"\x91" * 4000, 0, 0),
            lambda: PREAMBLE + prefix(b"", 0, 0),
            lambda: PREAMBLE + prefix(msgspec.msgpack.encode(Hello([2, 99])), 0, 0),
            lambda: PREAMBLE + prefix(codec.encode_request(Ping()), 0, 0),
        ]
    )()


def test_whatever_comes_instead_of_a_greeting(siege: Siege) -> None:
    said: list[Refusal | None] = []

    async def one(address: tuple[str, int], number: int) -> None:
        raw = RawClient(address)
        await raw.connect()
        try:
            raw.writer.write(opening(random.Random(number)))
            with contextlib.suppress(OSError):
                raw.writer.write_eof()
            said.append(await raw.ending())
        except InvalidRequest:
            pass  # A hello that was changed where it does no harm is welcome.
        finally:
            raw.abort()

    attack(siege, lambda address: crowd(1500, lambda number: one(address, number)))
    told = [refusal for refusal in said if refusal is not None]
    assert len(told) > 600, "those who can understand it are told what was wrong"
    assert {refusal.code for refusal in told} == {"invalid_request", "too_large"}
    assert all(refusal.message for refusal in told)


def test_lengths_that_lie_after_the_greeting(siege: Siege) -> None:
    async def one(address: tuple[str, int], number: int) -> None:
        rng = random.Random(number)
        async with RawClient(address) as raw:
            await usable(raw)
            header = codec.encode_request(Ping())
            lengths = rng.choice(
                [((1 << 20) + 1, 0), ((1 << 32) - 1, 5), (len(header), (64 << 20) + 1), (5, (1 << 32) - 1)]
            )
            raw.writer.write(PREFIX.pack(*lengths, 9) + header + b"x" * 1000)
            said = await raw.ending()
            assert said is not None
            assert said.code == "too_large"
            assert "above the limit" in said.message

    attack(siege, lambda address: crowd(300, lambda number: one(address, number)))


def test_hundred_megabytes_as_the_first_packet(siege: Siege) -> None:
    async def one(address: tuple[str, int], number: int) -> None:
        raw = RawClient(address)
        await raw.connect()
        openings = (
            PREAMBLE + PREFIX.pack(100 << 20, 0, 0),
            PREAMBLE + PREFIX.pack(20, 100 << 20, 0) + HELLO,
            b"",
        )
        raw.writer.write(openings[number % 3])
        piece = b"A" * (1 << 20)
        try:
            for _ in range(100):
                raw.writer.write(piece)
                await raw.writer.drain()
        except OSError:
            return  # Refused long before the end.
        finally:
            raw.abort()
        raise AssertionError("the broker took 100 MB before the greeting")

    attack(siege, lambda address: crowd(12, lambda number: one(address, number)))


# -- requests ---------------------------------------------------------------------------------------------


BAD_REQUESTS: list[Any] = [
    [],
    {},
    None,
    7,
    "ping",
    b"ping",
    [[]],
    ["no such thing"],
    ["ping", 1],
    [1, "ping"],
    ["publish"],
    ["publish", "any", 0, 0],
    ["publish", "any", 0, 0, "crc"],
    ["publish", "any", -1, 0, 0],
    ["publish", "any", 1 << 40, 0, 0],
    ["publish", 5, 0, 0, 0],
    ["publish", "any", 0, 0, 0, 0, 0, 0, 0, None, None, "one more"],
    ["publish", "any", 0, 1 << 31, 0],
    ["publish", "any", 0, 0, 0, -1],
    ["publish", "any", 0, 0, 0, (1 << 64) - 1, 1 << 40],
    ["publish", "missing", 0, 0, 0],
    ["fetch", "any", []],
    ["fetch", "any", [[0, -1]]],
    ["fetch", "any", [[0, 1 << 62]]],
    ["fetch", "any", [[7, 0]]],
    ["fetch", "any", [[-1, 0]]],
    ["fetch", "any", [[0, 0]], 0],
    ["fetch", "any", [[0, 0]], -5],
    ["fetch", "any", [[0]]],
    ["fetch", "any", [[0, 0], [0, 0]]],
    ["fetch", "any", "everything"],
    ["fetch", "any", [[0, 0]] * 10_001],
    ["find_offsets", "any", -3],
    ["find_offsets", "any", "noon"],
    ["create_topic", "../../etc", {}],
    ["create_topic", "a\x00b", {}],
    ["create_topic", "x" * 100_000, {}],
    ["create_topic", "_internal", {}],
    ["create_topic", "ok", {"partitions": 0}],
    ["create_topic", "ok", {"partitions": "many"}],
    ["create_topic", "ok", {"partitionen": 3}],
    ["create_topic", "ok", {"x" * 1000: {"deep": [[[[[]]]]]}}],
    ["create_topic", "ok", {"retention_ms": 1 << 63}],
    ["create_topic", "ok", {"durability": float("nan")}],
    ["alter_topic", "any", {"partitions": 0}],
    ["alter_topic", "missing", {}],
    ["delete_topic", "missing"],
    ["describe_topic", ""],
    ["trim_topic", "any", 0, -1],
    ["trim_topic", "any", 0, 1 << 60],
    ["claim_producer", "any", 0, 0],
    ["claim_producer", "any", 9, 1],
    ["welcome", 1, "x", 1, 1, 1],
    ["hello", [1], "again"],
    ["pong"],
    ["refused", "error", "no"],
]


def bad_headers(rng: random.Random, count: int) -> Iterator[bytes]:
    """Headers that cannot be accepted: made to be wrong, random bytes, cut short, nested deeply."""
    encoded = [msgspec.msgpack.encode(item) for item in BAD_REQUESTS]
    yield from encoded
    for _ in range(count):
        yield rng.choice(
            [
                lambda: rng.choice(encoded)[: rng.randrange(1, 12)],
                lambda: b"\xc1" + rng.randbytes(rng.randrange(60)),
                lambda: rng.choice(encoded) + b"\x00",
                lambda: b"\x92\xa7publish" + rng.randbytes(rng.randrange(50)),
                lambda: b"\x91" * rng.randrange(2, 5000) + b"\x90",
                lambda: b"\xdd\xff\xff\xff\xff" + rng.randbytes(10),
                lambda: b"\xdb\xff\xff\xff\xff" + rng.randbytes(10),
                lambda: b"\x93\xa5fetch\xa3any\xdd\x7f\xff\xff\xff",
                lambda: b"\x92\xaedescribe_topic\xa2\xff\xfe",
            ]
        )()


def test_bad_requests_are_refused_one_by_one(siege: Siege) -> None:
    async def one(address: tuple[str, int], number: int) -> None:
        headers = list(bad_headers(random.Random(number), 400))
        async with RawClient(address) as raw:
            for first in range(0, len(headers), 50):
                part = headers[first : first + 50]
                ids = {raw.post(header): header for header in part}
                for _ in part:
                    request_id, reply = await raw.reply()
                    header = ids.pop(request_id)
                    assert isinstance(reply, Refusal), (header[:80], reply)
                    assert reply.code in ("invalid_request", "not_found", "too_large"), (header[:80], reply)
                    assert reply.outcome == "none"
                    assert 0 < len(reply.message) < 2000, (header[:80], reply.message)
                await usable(raw)

    attack(siege, lambda address: crowd(10, lambda number: one(address, number), at_once=5))


def test_damaged_and_hostile_bodies(siege: Siege) -> None:
    taken = refused = 0

    async def one(address: tuple[str, int], number: int) -> None:
        nonlocal taken, refused
        rng = random.Random(number)
        async with RawClient(address) as raw:
            request, body = publish("any", [b"fine"])
            damaged = bytearray(body)
            damaged[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
            reply = await raw.request(request, bytes(damaged))
            assert isinstance(reply, Refusal)
            assert reply.message.startswith("crc: ")
            for _ in range(250):
                columns, body = sample(rng)
                if rng.random() < 0.05:
                    columns ^= rng.choice((1, 2, 4, 32, 64, 1 << 7, 1 << 20))
                body = mutate(rng, body)
                reply = await raw.request(Publish("any", 0, columns, crc32c(body)), body)
                if isinstance(reply, Published):
                    taken += 1
                else:
                    assert isinstance(reply, Refusal)
                    assert reply.code in ("invalid_request", "too_large"), reply
                    assert reply.outcome == "none"
                    refused += 1
            await usable(raw)

    attack(siege, lambda address: crowd(8, lambda number: one(address, number)))
    assert taken > 20
    assert refused > 500

    async def readable() -> None:
        """What the broker took, every reader can read."""
        count = 0
        async with (
            tailrace.connect(siege.broker.url) as client,
            client.reader("any", start="earliest", stop_at_end=True) as reader,
        ):
            async for message in reader:
                repr((message.id, message.key, message.headers, message.timestamp, message.expires_at))
                count += 1
        assert count >= taken

    asyncio.run(readable())


# -- connections ------------------------------------------------------------------------------------------


def test_connections_that_say_nothing(siege: Siege) -> None:
    async def run(address: tuple[str, int]) -> None:
        silent = [RawClient(address) for _ in range(400)]
        await asyncio.gather(*(raw.connect() for raw in silent))
        for number, raw in enumerate(silent):
            raw.writer.write((b"", PREAMBLE[:2], GREETING[:10], GREETING)[number % 4])
        await asyncio.sleep(0.5)
        async with RawClient(address) as raw:
            await usable(raw)
        for raw in silent:
            raw.abort()

    attack(siege, run)


def test_churn(siege: Siege) -> None:
    async def one(address: tuple[str, int], number: int) -> None:
        raw = RawClient(address)
        await raw.connect()
        if number % 3:
            await raw.greet()
        if number % 3 == 2:
            raw.post(codec.encode_request(Fetch("any", [(0, 0)], 1 << 20, 30_000)))
        if number % 2:
            raw.abort()
        else:
            raw.writer.close()

    attack(siege, lambda address: crowd(1500, lambda number: one(address, number)))


def test_bodies_that_are_announced_and_dribble_in(siege: Siege) -> None:
    async def run(address: tuple[str, int]) -> None:
        clients = [RawClient(address) for _ in range(60)]
        await asyncio.gather(*(raw.connect() for raw in clients))
        await asyncio.gather(*(raw.greet() for raw in clients))
        header = codec.encode_request(publish("any", [b"x"])[0])
        for raw in clients:
            raw.writer.write(prefix(header, 60 << 20, 1))
        for _ in range(40):
            for raw in clients:
                raw.writer.write(b"x")
            await asyncio.sleep(0.02)
        for raw in clients:
            raw.abort()

    attack(siege, run)


def test_large_bodies_from_everywhere_at_once(siege: Siege) -> None:
    """More than fits: some are refused or cut off, the broker and the others stay well."""

    async def one(address: tuple[str, int], number: int) -> None:
        async with RawClient(address) as raw:
            header = codec.encode_request(Publish("any", 0, 0, 0))
            raw.writer.write(prefix(header, 40 << 20, 1))
            piece = b"A" * (1 << 18)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                for _ in range(160):
                    raw.writer.write(piece)
                    await raw.writer.drain()
                _, reply = await raw.reply()
                assert isinstance(reply, Refusal)

    most_mb = PARTIAL_BYTES_HARD_MAX / 1e6 + GROWTH_MB
    attack(siege, lambda address: crowd(12, lambda number: one(address, number)), most_mb)


@pytest.mark.parametrize("topic", ["hot", "cold"])
def test_fetches_of_those_who_never_read(siege: Siege, topic: str) -> None:
    async def run(address: tuple[str, int]) -> None:
        clients = [RawClient(address) for _ in range(20)]
        await asyncio.gather(*(raw.connect() for raw in clients))
        await asyncio.gather(*(raw.greet() for raw in clients))
        for raw in clients:
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for number in range(2000):
                raw.post(codec.encode_request(Fetch(topic, [(0, number % 100)], 8 << 20, 0)))
        await asyncio.sleep(1.0)
        for raw in clients:
            raw.abort()

    attack(siege, run)


def test_floods_of_those_who_never_read(siege: Siege) -> None:
    async def run(address: tuple[str, int]) -> None:
        clients = [RawClient(address) for _ in range(10)]
        await asyncio.gather(*(raw.connect() for raw in clients))
        await asyncio.gather(*(raw.greet() for raw in clients))

        async def flood(raw: RawClient) -> None:
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            asked = codec.encode_request(ListTopics())
            piece = b"".join(prefix(asked, 0, number) for number in range(1000))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.5):
                    while True:
                        raw.writer.write(piece)
                        await raw.writer.drain()

        await asyncio.gather(*(flood(raw) for raw in clients))
        for raw in clients:
            raw.abort()

    attack(siege, run)


def test_long_polls_over_many_partitions(siege: Siege) -> None:
    """A request that waits costs much more than its header, and counts so."""
    partitions = 2000

    async def create() -> None:
        async with tailrace.connect(siege.broker.url) as client:
            await client.admin().create_topic("wide", partitions=partitions, storage="memory")

    async def wait(address: tuple[str, int]) -> None:
        clients = [RawClient(address) for _ in range(4)]
        await asyncio.gather(*(raw.connect() for raw in clients))
        await asyncio.gather(*(raw.greet() for raw in clients))
        positions = [(partition, 0) for partition in range(partitions)]
        # A full window is not read, so a peer that is gone is noticed when its fetches have had their time.
        header = codec.encode_request(Fetch("wide", positions, 1 << 20, 1500))
        for raw in clients:
            for _ in range(1000):
                raw.post(header)
        await asyncio.sleep(1.0)
        for raw in clients:
            raw.abort()

    asyncio.run(create())
    siege.base_mb = siege.broker.anonymous_mb()
    attack(siege, wait)


def test_publish_that_asks_for_the_impossible_is_refused_alone(siege: Siege) -> None:
    """Good and bad requests mixed on one connection: each has its own answer."""

    async def run(address: tuple[str, int]) -> None:
        async with RawClient(address) as raw:
            rng = random.Random(4)
            expected: dict[int, bool] = {}
            for number in range(600):
                request, body = publish("any", [b"%d" % number])
                bad = rng.random() < 0.5
                if bad:
                    body = struct.pack("<I", 7) + bytes(body)[4:]
                expected[raw.post(codec.encode_request(request), body)] = bad
            for _ in range(600):
                request_id, reply = await raw.reply()
                assert isinstance(reply, Refusal if expected.pop(request_id) else Published)
            await usable(raw)

    attack(siege, run)


def test_pandas_stays_out_of_the_broker(siege: Siege) -> None:
    """pyarrow would load it, if it is installed, while the loop waits."""
    assert find_spec("pandas") is not None
    assert "pandas" not in Path(f"/proc/{siege.broker.pid}/maps").read_text()
