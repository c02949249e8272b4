"""The flow to one partition: what is sent when, under which number, and what its callers are told."""

from collections.abc import Callable
from typing import Any

import pytest

from tailrace.client.publish.partition_flow import PartitionFlow, PendingBatch
from tailrace.client.sdk_tuning import IN_FLIGHT_MAX, PAUSE_S_MAX, PAUSE_S_MIN
from tailrace.core.model.commands import Claimed, ClaimProducer, Publish, Published, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import TailraceError, Unavailable

BUSY = Refusal("overloaded", "slow down", "none")
LOST = Refusal("unavailable", "the connection broke", "unknown")
CONFLICT = Refusal("sequence_conflict", "taken", "none", {"current_sequence": 3})
FENCED = Refusal("fenced", "a newer one", "none")
GONE = Refusal("not_found", "no such topic", "none")


def gap(expected: int) -> Refusal:
    return Refusal("unavailable", "too early", "none", {"expected": expected})


class World:
    """See `Outside`: keeps the requests until the test answers them."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.requests: list[tuple[Any, Callable[[Reply, tuple[()]], None]]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.ids = iter(range(1, 100))
        self.at_once: Callable[[Any], Reply | None] = lambda request: None
        self.settled_batches: list[PendingBatch] = []
        self.retries: list[str] = []

    def submit(self, request: Any, body: Any, respond: Any) -> None:
        reply = self.at_once(request)
        if reply is not None:
            respond(reply, ())
        else:
            self.requests.append((request, respond))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.timers.append((delay_s, action))

    def now_s(self) -> float:
        return self.time_s

    def new_producer_id(self) -> int:
        return next(self.ids)

    def retried(self, error: TailraceError) -> None:
        self.retries.append(error.code)

    def settled(self, batch: PendingBatch) -> None:
        self.settled_batches.append(batch)

    def future(self) -> Any:
        raise NotImplementedError

    def sent(self) -> list[tuple[int, int]]:
        """(producer, number) of the publishes that wait for an answer."""
        return [(r.producer_id, r.producer_sequence) for r, _ in self.requests if isinstance(r, Publish)]

    def answer(self, *replies: Reply) -> None:
        """Answer the oldest requests."""
        for reply in replies:
            self.requests.pop(0)[1](reply, ())

    def resume(self) -> None:
        """Let the pauses end."""
        timers, self.timers = self.timers, []
        for _, action in timers:
            action()


def make(named: int | None = None) -> tuple[World, PartitionFlow]:
    world = World()
    return world, PartitionFlow(world, "t", 0, named)


def put(world: World, flow: PartitionFlow, count: int = 1, give_up_s: float = 10.0) -> list[PendingBatch]:
    batches = [PendingBatch(world, 0, give_up_s) for _ in range(count)]
    for batch in batches:
        flow.enqueue(batch)
    return batches


def stored(offset: int) -> Published:
    return Published(offset, 1)


def outcome(batch: PendingBatch) -> str:
    assert batch.error is not None
    return batch.error.outcome


def test_the_window_is_16_and_moves_on_with_each_answer() -> None:
    world, flow = make()
    put(world, flow, 20)
    assert world.sent() == [(1, n) for n in range(IN_FLIGHT_MAX)]
    world.answer(stored(0))
    assert world.sent() == [(1, n) for n in range(1, 17)]
    assert flow.busy
    world.answer(*(stored(n) for n in range(1, 20)))
    assert flow.idle
    assert not flow.busy


def test_after_a_failure_everything_comes_back_first_and_goes_again_in_order() -> None:
    world, flow = make()
    first, second, third = put(world, flow, 3)
    world.answer(BUSY)
    put(world, flow)
    assert world.sent() == [(1, 1), (1, 2)]  # nothing new leaves
    world.answer(LOST, LOST)
    assert world.sent() == []
    assert flow.busy  # a pause: messages gather meanwhile
    world.resume()
    assert world.sent() == [(1, 0), (1, 1), (1, 2), (1, 3)]
    world.answer(stored(0), stored(1), stored(2))
    assert [batch.stored is not None for batch in (first, second, third)] == [True, True, True]


def test_pauses_grow_up_to_a_bound_and_start_again_after_a_success() -> None:
    world, flow = make()
    put(world, flow, give_up_s=1e9)
    pauses = []
    for _ in range(10):
        world.answer(BUSY)
        pauses.append(world.timers[0][0])
        world.resume()
    assert pauses[0] == PAUSE_S_MIN
    assert pauses[-1] == PAUSE_S_MAX
    assert pauses == sorted(pauses)
    world.answer(stored(0))
    put(world, flow)
    world.answer(BUSY)
    assert world.timers[0][0] == PAUSE_S_MIN


def test_a_batch_refused_for_good_leaves_no_hole() -> None:
    world, flow = make()
    _, second, third = put(world, flow, 3)
    world.answer(stored(0), CONFLICT, gap(1))
    assert outcome(second) == "none"
    world.resume()
    assert world.sent() == [(1, 1)]
    world.answer(stored(1))
    assert third.stored is not None
    put(world, flow)
    assert world.sent() == [(1, 2)]


def test_numbers_before_a_hole_stay_because_those_between_are_stored() -> None:
    """Retries: the first is refused for now, the second known as stored, the third refused for good."""
    world, flow = make()
    put(world, flow, 4)
    world.answer(BUSY, stored(5), CONFLICT, gap(2))
    world.resume()
    assert world.sent() == [(1, 0), (1, 2)]


def test_the_last_of_a_pipeline_refused_for_good_gives_its_number_back() -> None:
    world, flow = make()
    put(world, flow, 2)
    world.answer(stored(0), CONFLICT)
    put(world, flow)
    assert world.sent() == [(1, 1)]


def test_given_up_in_doubt_takes_a_new_identity_and_what_was_in_doubt_with_it() -> None:
    world, flow = make()
    first, second, third = put(world, flow, 3)
    first.give_up_s = 1.0
    world.time_s = 2.0
    world.answer(LOST, LOST, BUSY)
    assert outcome(first) == outcome(second) == "unknown"
    assert third.error is None
    world.resume()
    assert world.sent() == [(2, 0)]


def test_a_copy_under_way_never_finds_its_number_in_use() -> None:
    """The third was sent, its connection broke, and a hole opens before it: its number may not be reused."""
    world, flow = make()
    _, second, third = put(world, flow, 3)
    world.answer(stored(0), CONFLICT, LOST)
    assert outcome(second) == "none"
    assert third.error is None  # behind a hole it cannot have been stored
    world.resume()
    assert world.sent() == [(2, 0)]


def test_in_doubt_before_a_hole_with_doubt_behind_it_is_given_up() -> None:
    world, flow = make()
    first, _, third = put(world, flow, 3)
    world.answer(LOST, CONFLICT, LOST)
    assert outcome(first) == "unknown"
    assert third.error is None
    world.resume()
    assert world.sent() == [(2, 0)]


@pytest.mark.parametrize("last", [BUSY, CONFLICT, GONE, FENCED, gap(0)])
def test_no_refusal_makes_certain_what_was_in_doubt(last: Refusal) -> None:
    world, flow = make()
    (batch,) = put(world, flow, give_up_s=5.0)
    world.answer(LOST)
    world.resume()
    world.time_s = 6.0
    world.answer(last)
    assert batch.error is not None
    assert batch.error.code == last.code
    assert batch.error.outcome == "unknown"


def test_a_producer_that_the_broker_forgot_starts_anew() -> None:
    world, flow = make()
    put(world, flow)
    world.answer(stored(0))
    (batch,) = put(world, flow)
    world.answer(gap(0))
    world.resume()
    assert world.sent() == [(2, 0)]
    world.answer(stored(1))
    assert batch.stored is not None


def test_give_up_tells_what_was_never_sent_from_what_was() -> None:
    world, flow = make()
    batches = put(world, flow, 17, give_up_s=1.0)
    late = put(world, flow)
    flow.give_up(1.0)
    assert [outcome(batch) for batch in batches] == ["unknown"] * 16 + ["none"]
    assert late[0].error is None
    assert world.sent()[16:] == [(2, 0)]
    world.answer(*[stored(n) for n in range(16)])  # too late: they were told otherwise
    assert all(batch.stored is None for batch in batches)
    world.answer(stored(17))
    assert late[0].stored is not None


def test_give_up_waits_for_those_that_are_still_in_time() -> None:
    world, flow = make()
    (early,) = put(world, flow, give_up_s=1.0)
    (other,) = put(world, flow)
    (queued,) = put(world, flow)
    flow.give_up(2.0)
    assert outcome(early) == "unknown"
    world.answer(stored(0), stored(1), LOST)
    assert other.stored is not None
    assert outcome(queued) == "unknown"  # in doubt under an identity that is given up
    put(world, flow)
    world.resume()
    assert world.sent() == [(2, 0)]


def test_give_up_during_a_pause_goes_on_when_the_pause_ends() -> None:
    world, flow = make()
    (batch,) = put(world, flow, give_up_s=1.0)
    world.answer(LOST)
    flow.give_up(2.0)
    assert outcome(batch) == "unknown"
    put(world, flow)
    world.resume()
    assert world.sent() == [(2, 0)]


def test_refused_at_once_again_and_again_needs_no_depth() -> None:
    world, flow = make()
    batches = put(world, flow, 3000)
    world.at_once = lambda request: GONE
    world.answer(*[GONE] * 16)
    assert all(batch.error is not None for batch in batches)
    assert flow.idle


def test_not_connected_is_tried_again_after_a_pause() -> None:
    world, flow = make()
    world.at_once = lambda request: Refusal("unavailable", "not connected", "none")
    (batch,) = put(world, flow)
    assert len(world.timers) == 1
    world.at_once = lambda request: None
    world.resume()
    world.answer(stored(0))
    assert batch.stored is not None


def test_a_named_producer_claims_its_epoch_first() -> None:
    world, flow = make(named=77)
    (batch,) = put(world, flow)
    assert type(world.requests[0][0]) is ClaimProducer
    assert flow.busy
    world.answer(LOST)
    world.resume()
    world.answer(Claimed(4))
    request: Any = world.requests[0][0]
    assert (request.producer_id, request.producer_epoch, request.producer_sequence) == (77, 4, 0)
    world.answer(stored(9))
    assert batch.stored is not None


def test_a_named_producer_in_doubt_claims_again() -> None:
    world, flow = make(named=77)
    put(world, flow, give_up_s=1.0)
    world.answer(Claimed(1))
    flow.give_up(2.0)
    put(world, flow)
    world.requests.pop(0)  # the one that was given up
    assert world.requests[0][0] == ClaimProducer("t", 0, 77, 1)  # unless a newer one has taken over


def test_a_claim_that_is_refused_for_good_fails_everything() -> None:
    world, flow = make(named=77)
    batches = put(world, flow, 2)
    world.answer(GONE)
    assert [batch.error.code for batch in batches if batch.error] == ["not_found"] * 2
    (late,) = put(world, flow)
    assert outcome(late) == "none"
    assert not world.requests


def test_fenced_ends_the_flow() -> None:
    world, flow = make(named=77)
    first, second, third = put(world, flow, 3)
    world.answer(Claimed(1), LOST, FENCED, FENCED)
    assert [batch.error.code for batch in (first, second, third) if batch.error] == ["fenced"] * 3
    assert [outcome(batch) for batch in (first, second, third)] == ["unknown", "none", "none"]
    (late,) = put(world, flow)
    assert outcome(late) == "none"


def test_end_fails_what_is_on_its_way() -> None:
    world, flow = make()
    batches = put(world, flow, 18)
    flow.end(Unavailable("closed"))
    assert [outcome(batch) for batch in batches] == ["unknown"] * 16 + ["none"] * 2
    world.answer(*[stored(n) for n in range(16)])
    assert all(batch.stored is None for batch in batches)
    assert len(world.settled_batches) == 18


def throttled(ms: int, quota: str = "bytes_per_second") -> Refusal:
    return Refusal("overloaded", "at its quota", "none", {"retry_after_ms": ms, "quota": quota})


def test_a_quota_makes_it_pause_as_long_as_told_and_go_on_with_one_batch() -> None:
    world, flow = make()
    put(world, flow, 5)
    world.answer(stored(0), throttled(300), throttled(700), throttled(100), gap(1))
    assert [pause for pause, _ in world.timers] == [0.7]
    world.resume()
    assert world.sent() == [(1, 1)]
    world.answer(stored(1))
    assert world.sent() == [(1, 2), (1, 3)]
    world.answer(stored(2), stored(3))
    assert world.sent() == [(1, 4)]
    world.answer(stored(4))
    assert flow.idle


def test_waiting_for_a_quota_is_not_waiting_for_the_broker() -> None:
    world, flow = make()
    first, second = put(world, flow, 2, give_up_s=10.0)
    for step in range(20):
        world.answer(*[throttled(1_000)] * len(world.requests))
        world.time_s += 1.0
        flow.give_up(world.time_s)
        assert not first.done, step
        assert not second.done, step
        world.resume()
    world.answer(stored(0))
    world.time_s += 9.5
    flow.give_up(world.time_s)
    assert first.stored is not None
    assert not second.done
    world.time_s += 1.0
    flow.give_up(world.time_s)
    assert second.error is not None


def test_a_quota_that_does_not_pass_with_time_is_given_up_as_ever() -> None:
    world, flow = make()
    (batch,) = put(world, flow, give_up_s=10.0)
    world.answer(throttled(5_000, "storage_bytes_max"))
    assert [pause for pause, _ in world.timers] == [5.0]
    flow.give_up(10.0)
    assert batch.error is not None
    assert batch.error.code == "overloaded"
