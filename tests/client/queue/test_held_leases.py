"""Leases that a consumer holds, without a broker: acknowledgements gather, are answered, lost, extended."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.queue.held_leases import HeldLease, HeldLeases, failures, offsets_of, spans_of
from tailrace.core.model.group_commands import Place
from tailrace.core.model.queue_commands import Grant, Settled
from tailrace.errors import LeaseLost, TailraceError, Timeout, Unavailable

PLACE: Place = ("t", 0)


class Table:
    """Leases, and who was woken and told."""

    def __init__(self) -> None:
        self.woken: list[Place] = []
        self.leases = HeldLeases(self.woken.append)
        self.told: list[TailraceError | None] = []

    def lease(self, *offsets: int, number: int = 1) -> HeldLease:
        runs = [(offset, 1, 2, 1) for offset in offsets]
        lease = self.leases.add(PLACE, 0, Grant(0, number, 0, 0, runs))
        lease.open.update(offsets)
        return lease

    def nowait(self, lease: HeldLease, *offsets: int) -> None:
        for offset in offsets:
            lease.acks.append(offset)
            if lease.idle:
                lease.wake()


def test_acknowledgements_gather_while_a_request_is_under_way() -> None:
    table = Table()
    lease = table.lease(*range(10))
    table.nowait(lease, 2, 0, 1, 0)
    assert table.woken == [PLACE]  # Once, not per message.
    run, failed = table.leases.take(PLACE, 0)
    assert run is not None
    assert (run.leases(), failed) == ([(1, [0, 3])], [])
    table.nowait(lease, 7, 5)
    assert table.leases.take(PLACE, 0) == (None, [])
    assert table.woken == [PLACE]
    assert table.leases.answered(run, Settled()) == []
    run, _ = table.leases.take(PLACE, 0)
    assert run is not None
    assert run.leases() == [(1, [5, 6, 7, 8])]
    table.leases.answered(run, Settled())
    assert lease.open == {3, 4, 6, 8, 9}
    assert not table.leases.pending()


def test_a_lease_is_forgotten_when_everything_is_settled() -> None:
    table = Table()
    lease = table.lease(0, 1)
    table.nowait(lease, 0, 1)
    run, _ = table.leases.take(PLACE, 0)
    assert run is not None
    assert len(table.leases) == 1
    table.leases.answered(run, Settled())
    assert len(table.leases) == 0
    table.nowait(lease, 0)  # Settling twice is harmless.
    assert table.leases.take(PLACE, 0) == (None, [])


def test_what_is_leased_again_supersedes_whatever_the_count_says() -> None:
    table = Table()
    lease = table.lease(4, 5, 6)
    place = lease.place
    assert table.leases.superseded(place, [(5, 1, 1, 0)]) == {lease: {5}}
    assert table.leases.superseded(place, [(0, 4, 1, 0), (6, 3, 2, 0)]) == {lease: {6}}
    assert table.leases.superseded(place, [(7, 3, 1, 0)]) == {}
    assert table.leases.superseded(place, []) == {}


def test_waiters_are_told_and_failures_without_a_waiter_are_returned() -> None:
    table = Table()
    one, two = table.lease(0, 1, 2, number=1), table.lease(5, 6, number=2)
    table.leases.ack(one, 0, table.told.append)
    table.leases.ack(two, 5, table.told.append)
    table.nowait(one, 1, 2)
    run, _ = table.leases.take(PLACE, 0)
    assert run is not None
    table.leases.ack(one, 1, table.told.append)  # It is under way already.
    failed = table.leases.answered(run, Settled([(1, [1, 3]), (2, [5, 6])]))
    assert [(failure.first, failure.end) for failure in failed] == [(2, 3)]
    assert [type(error) for error in table.told] == [type(None), LeaseLost, LeaseLost]
    table.leases.ack(one, 0, table.told.append)
    table.leases.ack(one, 2, table.told.append)
    assert [type(error) for error in table.told[3:]] == [type(None), LeaseLost]
    assert (one.is_settled(0), one.is_settled(2), one.is_lost(2)) == (True, False, True)


def test_a_refused_request_fails_everybody() -> None:
    table = Table()
    lease = table.lease(0, 1)
    table.leases.ack(lease, 0, table.told.append)
    table.nowait(lease, 1)
    run, _ = table.leases.take(PLACE, 0)
    assert run is not None
    error = Timeout("too slow")
    (failure,) = table.leases.answered(run, error)
    assert (failure.first, failure.error, str(failure)) == (1, error, "t/0@1: too slow")
    assert table.told == [error]


def test_a_failure_names_its_message_once() -> None:
    table = Table()
    lease = table.lease(0, 2)
    (failure,) = failures(PLACE, [1], lease.lost(1))
    assert str(failure) == failure.error.message
    (failure,) = failures(PLACE, [0, 1], lease.lost(1))
    assert str(failure) == f"t/0@0-1: {failure.error.message}"


def test_a_lost_lease_takes_nothing_more() -> None:
    table = Table()
    lease = table.lease(0, 1, 2)
    table.nowait(lease, 0)
    gone = LeaseLost("gone")
    table.leases.lose(lease, gone)
    run, failed = table.leases.take(PLACE, 0)
    assert run is None
    assert [(failure.first, failure.error) for failure in failed] == [(0, gone)]
    with pytest.raises(LeaseLost):
        table.nowait(lease, 1)
    with pytest.raises(LeaseLost):
        lease.take(2)
    assert len(table.leases) == 0


def test_other_settlements_claim_their_offset() -> None:
    table = Table()
    lease = table.lease(0, 1, 2)
    assert lease.take(0)
    assert not lease.take(0)
    table.nowait(lease, 1)
    assert not lease.take(1)  # About to be acknowledged.
    table.leases.refused(lease, [0])
    assert lease.take(0)
    table.leases.settled(lease, [0], [0])
    with pytest.raises(LeaseLost):
        lease.take(0)
    assert lease.counts(2) == (2, 1)


def test_abandoning_fails_what_is_gathered_and_under_way() -> None:
    table = Table()
    one, two = table.lease(0, 1, number=1), table.lease(5, number=2)
    table.nowait(one, 0)
    table.leases.take(PLACE, 0)
    table.nowait(one, 1)
    table.nowait(two, 5)
    failed = table.leases.abandon(Unavailable("closed"))
    assert sorted(failure.first for failure in failed) == [0, 1, 5]
    assert not table.leases.pending()


def test_extension_at_half_of_the_time() -> None:
    table = Table()
    one, two = table.lease(0, number=1), table.lease(1, number=2)
    table.leases.started(one, 1000, 30_000)
    table.leases.started(two, 5000, 30_000)
    assert table.leases.next_due_ms() == 16_000
    assert table.leases.due(15_999) == {}
    assert table.leases.due(16_000) == {PLACE: [one]}
    table.leases.started(one, 16_000, 30_000)
    assert table.leases.due(20_000) == {PLACE: [two]}
    table.leases.lose(two, LeaseLost("gone"))
    assert table.leases.due(20_000) == {}


@given(st.sets(st.integers(0, 60)))
def test_spans_name_exactly_their_offsets(offsets: set[int]) -> None:
    spans = spans_of(sorted(offsets))
    assert set(offsets_of(spans)) == offsets
    assert all(before < after for before, after in pairwise(spans))
