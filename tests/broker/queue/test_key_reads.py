"""Messages of one key through the broker: versions, limits, trims, restarts, keys that share a hash."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from tailrace.cluster.embedded import FileCoordinator
from tailrace.core.model.commands import KeyRead, Publish, ReadKey, TrimTopic
from tailrace.core.model.identifiers import Refusal, hash128
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryStore
from tests.broker.held_engine import HeldEngine
from tests.broker.key_twins import twin
from tests.storage.frame_maker import TestClock

SEGMENT_BYTES = 16 * 1024


class Streams(HeldEngine):
    """A topic of one partition with a key index, and what was published to it, as a list for each key."""

    def __init__(self, disk: SimDisk | None) -> None:
        self.disk = disk
        self.model: dict[bytes, list[tuple[int, bytes]]] = {}
        self.begin = 0
        if disk is None:
            super().__init__(MemoryStore())
        else:
            super().__init__(self._files(disk), FileCoordinator(disk))
        self.create(key_index=True)

    @staticmethod
    def _files(disk: SimDisk) -> FileStore:
        return FileStore(disk, TestClock(), segment_bytes=SEGMENT_BYTES)

    def send(self, *rows: tuple[bytes | None, bytes]) -> None:
        keys, values = [key for key, _ in rows], [value for _, value in rows]
        ids = arrow.make_ids(len(rows), 1, 7, 7)
        columns, body = arrow.encode(values, ids=ids, timestamps=5, keys=keys)
        reply = self.ask(Publish("t", 0, columns, frame.crc32c(body)), body)
        for row, (key, value) in enumerate(rows):
            if key is not None:
                self.model.setdefault(key, []).append((reply.base_offset + row, value))

    def read(self, key: bytes, **fields: Any) -> tuple[KeyRead, list[tuple[int, bytes]]]:
        ((reply, body),) = self.submit(ReadKey("t", 0, key, **fields))
        assert isinstance(reply, KeyRead), reply
        found = []
        for header, part in frame.walk(body):
            rows = arrow.decode(part, header.columns)
            deltas = range(len(rows)) if "offset_delta" not in rows.schema.names else None
            for row, value in enumerate(rows.column("value").to_pylist()):
                delta = row if deltas is not None else rows.column("offset_delta")[row].as_py()
                assert rows.column("key")[row].as_py() == key
                found.append((header.base_offset + delta, value))
        assert len(found) == reply.count
        return reply, found

    def expected(self, key: bytes) -> list[tuple[int, int, bytes]]:
        """What can be read: version, offset, value."""
        mine = enumerate(self.model.get(key, ()), 1)
        return [(version, *row) for version, row in mine if row[0] >= self.begin]

    def check(self, key: bytes, since: int = 0, limit: int = 1000, newest_first: bool = False) -> None:
        """All pages of a read, against the model."""
        wanted = [row for row in self.expected(key) if row[0] > since]
        wanted = wanted[-limit:] if newest_first else wanted[:limit]
        found: list[tuple[int, int, bytes]] = []
        until, more, left = 0, True, limit
        while more and left:
            bytes_max = self.random.choice((1, 700, 1 << 20))
            fields = {"since": since, "until": until, "limit": left, "newest_first": newest_first}
            reply, rows = self.read(key, bytes_max=bytes_max, **fields)
            assert reply.total == len(self.model.get(key, ()))
            page = [(version, *row) for version, row in enumerate(rows, reply.version)]
            found = [*page, *found] if newest_first else [*found, *page]
            more, left = reply.more, limit - len(found)
            if not page:
                break
            if newest_first:
                until = page[0][0] - 1
            else:
                since = page[-1][0]
        assert found == wanted

    random = Random(0)


@pytest.fixture(params=["memory", "file"])
def streams(request: pytest.FixtureRequest) -> Streams:
    return Streams(SimDisk(1) if request.param == "file" else None)


KEYS = [b"a", b"b", b"", b"customer-77", b"nobody"]


@pytest.mark.parametrize("seed", range(12))
def test_streams_are_read_as_they_were_written(streams: Streams, seed: int) -> None:
    random = streams.random = Random(seed)
    if streams.disk is not None:
        streams.disk.random.seed(seed)
    number = 0
    for _ in range(40):
        act = random.choice(("send",) * 8 + ("restart", "trim", "lose"))
        if act == "send":
            rows: list[tuple[bytes | None, bytes]] = []
            for _ in range(random.randint(1, 30)):
                number += 1
                rows.append((random.choice([*KEYS[:4], None, b"%d" % number]), b"value %d" % number))
            streams.send(*rows)
        elif act == "restart":
            streams.restart()
        elif act == "trim":
            end = streams.runtime().end_offset
            streams.begin = random.randint(streams.begin, end)
            streams.ask(TrimTopic("t", 0, streams.begin))
            for _ in range(2):
                streams.runtime().upkeep.free()
                streams.settle()
        elif streams.disk is not None:
            folder = streams.runtime().name
            for name in streams.disk.list(folder):
                if name.endswith(".keys") and random.random() < 0.5:
                    streams.disk.remove(f"{folder}/{name}")
        key = random.choice(KEYS)
        since, limit = random.choice((0, 0, 3, 50)), random.choice((1, 5, 1000))
        streams.check(key, since, limit, newest_first=random.random() < 0.5)


def test_a_limited_read_of_a_trimmed_stream_begins_with_the_oldest_that_is_left(streams: Streams) -> None:
    for number in range(10):
        streams.send((b"a", b"%d" % number))
    streams.begin = 5
    streams.ask(TrimTopic("t", 0, 5))
    reply, rows = streams.read(b"a", limit=2)
    assert (reply.version, reply.total, reply.more) == (6, 10, True)
    assert [value for _, value in rows] == [b"5", b"6"]
    reply, rows = streams.read(b"a", since=7, limit=2)
    assert (reply.version, [value for _, value in rows]) == (8, [b"7", b"8"])
    reply, rows = streams.read(b"a", since=9, until=9)
    assert (reply.count, rows) == (0, [])


def test_what_is_not_durable_is_not_read_and_versions_are_right_meanwhile(streams: Streams) -> None:
    streams.send((b"a", b"1"), (b"b", b"x"))
    streams.threads.holding = True
    ids = arrow.make_ids(1, 1, 7, 7)
    columns, body = arrow.encode([b"2"], ids=ids, timestamps=5, keys=[b"a"])
    published = streams.submit(Publish("t", 0, columns, frame.crc32c(body)), body)
    answers = streams.submit(ReadKey("t", 0, b"a"))
    assert not published
    assert not answers
    streams.threads.holding = False
    streams.threads.run_held()
    streams.settle()
    ((reply, _),) = answers
    assert isinstance(reply, KeyRead)
    assert (reply.version, reply.count, reply.total) == (1, 2, 2)


@pytest.mark.parametrize("whole", [False, True])
def test_keys_that_share_a_hash_are_told_apart(streams: Streams, whole: bool) -> None:
    key = b"victim"
    other = twin(key, whole=whole)
    assert (hash128(key) == hash128(other)) is whole
    streams.random.seed(1)
    for number in range(30):
        streams.send((key, b"mine %d" % number), (b"%d" % number, b""), (other, b"other %d" % number))
    if not whole:
        for name in (key, other):
            streams.check(name)
            streams.check(name, since=3, limit=4)
            streams.check(name, limit=5, newest_first=True)
    for name, word in ((key, b"mine"), (other, b"other")):
        found, since, more = [], 0, True
        while more:
            reply, rows = streams.read(name, since=since, bytes_max=3000)
            found += [value for _, value in rows]
            since, more = reply.version + reply.count - 1, reply.more
        assert found == [b"%s %d" % (word, number) for number in range(30)]


def test_requests_that_cannot_be_answered_are_refused(streams: Streams) -> None:
    streams.create("plain")
    for request, word in (
        (ReadKey("plain", 0, b"a"), "key_index"),
        (ReadKey("t", 1, b"a"), "partitions 0 to 0"),
        (ReadKey("t", 0, b"a", since=-1), "since"),
        (ReadKey("t", 0, b"a", limit=0), "limit"),
        (ReadKey("t", 0, bytes(100_000)), "key"),
        (ReadKey("none", 0, b"a"), "no topic"),
    ):
        refusal = streams.ask(request)
        assert isinstance(refusal, Refusal)
        assert word in refusal.message


def test_a_damaged_partition_refuses_instead_of_giving_half_a_stream() -> None:
    streams = Streams(SimDisk(1))
    for number in range(200):
        streams.send((b"a", b"%d" % number))
    folder = streams.runtime().name
    first = min(name for name in streams.disk.list(folder) if name.endswith(".log"))  # type: ignore[union-attr]
    assert streams.disk is not None
    streams.disk.flip(f"{folder}/{first}", 1000, 1)
    answers = streams.submit(ReadKey("t", 0, b"a"))
    assert isinstance(answers[0][0], Refusal)
    assert answers[0][0].code == "corrupt"
    assert isinstance(streams.ask(ReadKey("t", 0, b"a")), Refusal)


def test_one_event_costs_the_same_among_many() -> None:
    def cost(others: int) -> float:
        streams = Streams(SimDisk(1))
        streams.send((b"once", b"1"))
        for number in range(others // 10):
            streams.send(*((b"%d" % (10 * number + row), b"v" * 50) for row in range(10)))
        best = 1.0
        for _ in range(5):
            began = time.process_time()
            streams.read(b"once")
            best = min(best, time.process_time() - began)
        return best

    few, many = cost(20), cost(4000)
    assert many < 0.02, f"{many * 1e3:.1f} ms for one event, {few * 1e3:.1f} ms among few"
