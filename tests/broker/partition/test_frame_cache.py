"""Frames at hand: what decisions see of the tail and of what was read from the log, and its bounds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.broker.partition.frame_cache import FrameCache
from tailrace.core.collections.span_map import flat
from tailrace.core.model.commands import Publish
from tailrace.core.model.identifiers import key_hash
from tailrace.errors import Corrupt, StorageFault
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tailrace.format.gathering import gather
from tests.broker.held_engine import HeldEngine, values_of


def make(batches: int = 30, rows: int = 3, **options: Any) -> HeldEngine:
    """A broker with batches of so many messages each; the value of a message is its offset."""
    broker = HeldEngine()
    broker.create(**options)
    for number in range(batches):
        broker.publish(*(b"%d" % (number * rows + row) for row in range(rows)))
    return broker


def load(broker: HeldEngine, offset: int) -> list[Exception | None]:
    done: list[Exception | None] = []
    broker.runtime().cache.load(offset, done.append)
    broker.settle()
    return done


def delivered(cache: FrameCache, runs: list[tuple[int, int]]) -> list[bytes]:
    full = [(first, count, 1, 0) for first, count in runs]
    frames = cache.frames(flat(sorted((first, first + count) for first, count in runs)))
    assert not isinstance(frames, int)
    values = values_of(b"".join(part for item in gather(frames, full) for part in item.parts()))
    wanted = {b"%d" % offset for first, count in runs for offset in range(first, first + count)}
    return [value for value in values if value in wanted]


def test_the_tail_is_at_hand() -> None:
    cache = make().runtime().cache
    found = cache.columns(4)
    assert found is not None
    assert (found.base_offset, found.end_offset) == (3, 6)
    assert cache.reach(4, 1 << 20) == 90
    assert cache.reach(4, 1) == 6  # at least the frame that holds it
    assert cache.reach(90, 1 << 20) == 90
    assert cache.columns(90) is None
    assert delivered(cache, [(5, 4)]) == [b"5", b"6", b"7", b"8"]


@given(st.integers(0, 89), st.integers(1, 10_000))
def test_reach_is_as_far_as_whole_frames_fit(offset: int, bytes_max: int) -> None:
    broker = make()
    tail = broker.runtime().tail
    end = tail.reach(offset, bytes_max)
    size = sum(item.size for item in tail.frames(offset, end))
    longer = sum(item.size for item in tail.frames(offset, end + 1))
    assert end % 3 == 0
    assert end > offset
    assert size <= bytes_max or end == offset // 3 * 3 + 3
    assert end == 90 or longer > bytes_max


def test_columns_are_those_of_the_frame() -> None:
    broker = HeldEngine()
    broker.create()
    columns, body = arrow.encode([b"v", b"w"], ids=bytes(32), timestamps=1, keys=[b"a", None])

    broker.submit(Publish("t", 0, columns, crc32c(body)), body)
    cache = broker.runtime().cache
    found = cache.columns(1)
    assert found is not None
    assert found.key_hashes is not None
    assert found.key_hashes.tolist() == [key_hash(b"a"), 0]
    assert cache.columns(0) is found  # looked at once


def test_what_the_tail_has_lost_is_read_from_the_log() -> None:
    broker = make(ring_buffer_bytes=0)
    cache = broker.runtime().cache
    assert cache.columns(40) is None
    assert cache.reach(40, 1000) == 40
    assert cache.frames([40, 42]) == 40
    assert load(broker, 40) == [None]
    found = cache.columns(40)
    assert found is not None
    assert found.base_offset == 39
    assert cache.reach(40, 1 << 20) == 90
    assert cache.columns(38) is None
    assert delivered(cache, [(88, 1), (41, 3)]) == [b"88", b"41", b"42", b"43"]


def test_a_run_may_begin_in_the_log_and_end_in_the_tail() -> None:
    broker = make(ring_buffer_bytes=1500)
    runtime = broker.runtime()
    start = runtime.tail.start_offset
    assert 0 < start < 90
    load(broker, start - 5)
    assert delivered(runtime.cache, [(start - 5, 10)]) == [b"%d" % n for n in range(start - 5, start + 5)]


def test_one_read_serves_all_who_wait_for_it() -> None:
    broker = make(ring_buffer_bytes=0)
    broker.threads.holding = True
    done: list[Exception | None] = []
    for _ in range(3):
        broker.runtime().cache.load(7, done.append)
    assert len(broker.threads.held) == 1
    broker.threads.run_held()
    broker.settle()
    assert done == [None] * 3


def test_what_was_read_is_bounded_and_the_last_read_always_stays() -> None:
    broker = make(ring_buffer_bytes=0)
    cache = broker.runtime().cache
    broker.runtime().limit_cold(1)
    for offset in (0, 30, 60):
        assert load(broker, offset) == [None]
        assert cache.columns(offset) is not None
    assert cache.columns(0) is None
    assert cache.columns(30) is None


def test_a_read_that_fails_is_told() -> None:
    broker = make(ring_buffer_bytes=0)
    log = broker.log()

    def read(offset: int, end: int, bytes_max: int) -> Any:
        raise StorageFault("the disk is gone")

    log.read = read  # type: ignore[method-assign]
    (error,) = load(broker, 3)
    assert isinstance(error, StorageFault)


def test_an_offset_that_the_log_does_not_have_is_no_endless_search() -> None:
    broker = make(ring_buffer_bytes=0)
    log = broker.log()
    read = log.read
    log.read = lambda offset, end, room: read(offset + 10, end, room)  # type: ignore[method-assign]
    (error,) = load(broker, 3)
    assert isinstance(error, Corrupt)


@pytest.mark.parametrize("share", [1 << 20, 64 << 20])
def test_a_partition_never_takes_more_than_its_own_bound(share: int) -> None:
    runtime = make(batches=1).runtime()
    runtime.limit_cold(share)
    assert runtime.cache.bytes_max == min(share, 8 << 20)


def test_what_nobody_uses_for_some_seconds_is_let_go() -> None:
    broker = make(batches=200, ring_buffer_bytes=0)
    cache = broker.runtime().cache
    for offset in (0, 300):
        load(broker, offset)
    assert cache.columns(0) is not None
    assert cache.cold_bytes > 0
    for _ in range(4):
        broker.pass_s(4)
        assert cache.columns(0) is not None  # What is used stays.
    broker.pass_s(11)
    assert cache.cold_bytes == 0
    assert cache.columns(0) is None
    assert load(broker, 0) == [None]
    assert cache.columns(0) is not None


def test_what_is_known_of_frames_goes_with_them() -> None:
    broker = make(batches=100, ring_buffer_bytes=20_000)
    cache = broker.runtime().cache
    first = broker.runtime().tail.start_offset
    assert first > 0
    for offset in range(first, 300, 3):
        assert cache.columns(offset) is not None
        found = cache.frames([offset, offset + 1])
        assert not isinstance(found, int)
        cache.opened(found[0])
    for number in range(300):
        broker.publish(b"%d" % number)
    broker.pass_s(11)
    lowest = broker.runtime().tail.start_offset
    assert lowest > 300
    assert all(base >= lowest for base in (*cache._columns, *cache._opened))
