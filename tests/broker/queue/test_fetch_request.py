"""Fetches: several partitions, hot and cold, waiting, a receiver without room, and what lies out of range."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model.commands import EARLIEST, LATEST, Fetch, Fetched, FindOffsets, Offsets, TrimTopic
from tailrace.core.model.identifiers import Refusal
from tests.broker.held_engine import HeldEngine, values_of


def make(**options: Any) -> HeldEngine:
    broker = HeldEngine()
    broker.create(**{"partitions": 3, **options})
    return broker


def fetched(answers: Sequence[tuple[object, bytes]]) -> tuple[list[tuple[int, int, int, int]], list[bytes]]:
    ((reply, data),) = answers
    assert isinstance(reply, Fetched), reply
    return reply.slices, values_of(data)


class Valve(OpenGate):
    """A receiver that has room when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.shut = False
        self._parked: list[Callable[[], None]] = []

    def blocked(self, resume: Callable[[], None]) -> bool:
        if self.shut:
            self._parked.append(resume)
        return self.shut

    def open(self) -> None:
        self.shut = False
        parked, self._parked = self._parked, []
        for resume in parked:
            resume()


def test_one_fetch_covers_all_partitions_that_have_something() -> None:
    broker = make()
    broker.publish(b"a", b"b", partition=0)
    broker.publish(b"c", partition=2)
    slices, values = fetched(broker.submit(Fetch("t", [(0, 0), (1, 0), (2, 0)], 1 << 20, 0)))
    assert [(partition, start, end) for partition, _, start, end in slices] == [(0, 0, 2), (2, 0, 1)]
    assert values == [b"a", b"b", b"c"]


def test_a_small_answer_still_has_a_whole_frame_and_the_rest_comes_to_who_rotates() -> None:
    broker = make()
    for partition in range(3):
        for number in range(4):
            broker.publish(b"%d-%d" % (partition, number), partition=partition)
    places = {0: 0, 1: 0, 2: 0}
    seen: list[bytes] = []
    for _ in range(12):
        request = Fetch("t", list(places.items()), 1, 0)
        slices, values = fetched(broker.submit(request))
        seen += values
        for partition, *_ in slices:
            places[partition] = places.pop(partition) + 1
    assert len(set(seen)) == 12
    assert seen[:3] == [b"0-0", b"1-0", b"2-0"]  # nobody waits behind another's backlog


@pytest.mark.parametrize("ring", [0, 600, 1 << 20])
def test_cold_and_hot_give_the_same_messages(ring: int) -> None:
    broker = make(partitions=1, ring_buffer_bytes=ring)
    expected = [b"%d" % number for number in range(30)]
    for value in expected:
        broker.publish(value)
    seen: list[bytes] = []
    while len(seen) < 30:
        _, values = fetched(broker.submit(Fetch("t", [(0, len(seen))], 700, 0)))
        assert values
        seen += values
    assert seen == expected


def test_a_cold_partition_does_not_hold_up_a_hot_one() -> None:
    broker = make()
    broker.publish(b"cold", partition=0)
    broker.publish(b"hot", partition=1)
    broker.runtime(partition=0).tail.clear(1)
    assert fetched(broker.submit(Fetch("t", [(1, 0), (0, 0)], 1 << 20, 0)))[1] == [b"hot"]
    slices, values = fetched(broker.submit(Fetch("t", [(0, 0), (1, 1)], 1 << 20, 0)))
    assert (values, slices[0][0]) == ([b"cold"], 0)


def test_waits_until_something_comes_or_the_time_is_up() -> None:
    broker = make()
    waiting = broker.submit(Fetch("t", [(0, 0), (1, 0)], 100, 1000))
    broker.pass_s(0.9)
    assert waiting == []
    broker.publish(b"a", partition=1)
    assert fetched(waiting)[1] == [b"a"]
    waiting = broker.submit(Fetch("t", [(0, 0), (1, 1)], 100, 1000))
    broker.publish(b"elsewhere", partition=2)
    broker.pass_s(1.1)
    assert fetched(waiting) == ([], [])
    assert not any(broker.runtime(partition=partition).wakeups._watchers for partition in range(3))
    assert not broker.engine.gateway._jobs


def test_a_receiver_without_room_is_answered_once_when_it_has_some() -> None:
    broker = make()
    gate = Valve()
    gate.shut = True
    broker.publish(b"a")
    waiting = broker.submit(Fetch("t", [(0, 0)], 100, 500), gate=gate)
    broker.publish(b"b")
    broker.pass_s(2)
    assert waiting == []  # even its time being up is no reason to fill memory
    gate.open()
    broker.pass_s(1)
    assert fetched(waiting)[1][:1] == [b"a"]


def test_out_of_range_names_the_range() -> None:
    broker = make()
    for value in (b"a", b"b", b"c"):
        broker.publish(value)
    broker.ask(TrimTopic("t", 0, 2))
    for offset, word in ((1, "trimmed"), (4, "beyond")):
        refusal = broker.ask(Fetch("t", [(0, offset)], 100, 60_000))
        assert isinstance(refusal, Refusal)
        assert refusal.code == "not_found"
        assert word in refusal.message
        assert (refusal.details["start_offset"], refusal.details["end_offset"]) == (2, 3)


@pytest.mark.parametrize("wait_ms", [0, 60_000])
def test_a_reader_at_the_end_of_a_damaged_log_is_told_and_not_kept_waiting(wait_ms: int) -> None:
    broker = make(partitions=1)
    broker.publish(b"good")
    broker.runtime().fault = Refusal("corrupt", "it is damaged behind that")
    assert broker.values() == [b"good"]
    for beyond in (1, 2):
        ((reply, _),) = broker.submit(Fetch("t", [(0, beyond)], 1 << 20, wait_ms))
        assert reply == Refusal("corrupt", "it is damaged behind that")


def test_whoever_reads_up_to_the_latest_message_comes_to_the_damage() -> None:
    broker = make(partitions=2)
    broker.publish(b"good")
    broker.runtime().fault = Refusal("corrupt", "it is damaged behind that")
    assert broker.ask(FindOffsets("t", LATEST)) == Offsets([2, 0])
    assert broker.ask(FindOffsets("t", broker.clock.now_us() + 1)) == Offsets([2, 0])
    assert broker.ask(FindOffsets("t", EARLIEST)) == Offsets([0, 0])


def test_a_committed_message_that_the_log_does_not_hold_is_damage() -> None:
    broker = make(partitions=2, ring_buffer_bytes=0)
    broker.publish(b"lost")
    broker.publish(b"fine", partition=1)
    broker.log()._content.frames = []
    ((reply, data),) = broker.submit(Fetch("t", [(0, 0), (1, 0)], 1 << 20, 60_000))
    assert isinstance(reply, Fetched), "the other partition goes first"
    assert values_of(data) == [b"fine"]
    ((reply, _),) = broker.submit(Fetch("t", [(0, 0), (1, 1)], 1 << 20, 60_000))
    assert isinstance(reply, Refusal)
    assert (reply.code, "offset 0 is missing" in reply.message) == ("corrupt", True)


def test_trimmed_while_it_waits() -> None:
    broker = make()
    broker.publish(b"a")
    waiting = broker.submit(Fetch("t", [(0, 1), (1, 0)], 100, 60_000))
    broker.publish(b"b")
    assert fetched(waiting)[1] == [b"b"]
    broker.ask(TrimTopic("t", 0, 2))
    assert broker.ask(Fetch("t", [(0, 1)], 100, 0)).code == "not_found"
    assert fetched(broker.submit(Fetch("t", [(0, 2)], 100, 0))) == ([], [])
