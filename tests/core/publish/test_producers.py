"""Idempotent producers: new, retried, missing, fenced, forgotten, and too many."""

from __future__ import annotations

import pytest

from tailrace.core.core_tuning import PRODUCER_IDLE_US_MAX, RESULTS_KEPT
from tailrace.core.model.identifiers import Refusal
from tailrace.core.publish.producers import EPOCH_MAX, ID_MAX, SEQUENCE_MAX, BatchResult, Producers

T0 = 1_700_000_000_000_000


def write(producers: Producers, name: int, epoch: int, sequences: range, time_us: int = T0) -> None:
    for sequence in sequences:
        assert producers.check(name, epoch, sequence, time_us) is None
        producers.advance(name, epoch, sequence, BatchResult(sequence * 10, 10, time_us, time_us))
        producers.verify()


def refusal(producers: Producers, *batch: int) -> tuple[str, object]:
    outcome = producers.check(*batch)
    assert isinstance(outcome, Refusal), outcome
    return outcome.code, next(iter(outcome.details.values()), None)


def test_the_last_results_are_kept_and_no_more() -> None:
    producers = Producers()
    write(producers, 7, 0, range(100))
    for sequence in range(100 - RESULTS_KEPT, 100):
        assert producers.check(7, 0, sequence, T0) == BatchResult(sequence * 10, 10, T0, T0)
    assert refusal(producers, 7, 0, 99 - RESULTS_KEPT, T0) == ("invalid_request", 99)
    assert producers.check(7, 0, 100, T0) is None
    assert refusal(producers, 7, 0, 101, T0) == ("unavailable", 100)


def test_a_producer_starts_with_0_at_any_epoch() -> None:
    producers = Producers()
    assert producers.check(7, 0, 0, T0) is None
    assert producers.check(7, 9, 0, T0) is None
    assert refusal(producers, 7, 0, 1, T0) == ("unavailable", 0)


def test_epochs_fence() -> None:
    producers = Producers()
    assert producers.next_epoch(7, T0) == 1
    producers.claim(7, 1, T0)
    assert refusal(producers, 7, 0, 0, T0) == ("fenced", 1)
    write(producers, 7, 1, range(3))
    assert refusal(producers, 7, 2, 3, T0) == ("unavailable", 0)
    write(producers, 7, 2, range(2))
    assert refusal(producers, 7, 1, 2, T0) == ("fenced", 2)
    assert refusal(producers, 7, 2, 3, T0) == ("unavailable", 2)
    assert producers.next_epoch(7, T0) == 3


def test_after_a_claim_old_results_are_not_given_to_the_new_epoch() -> None:
    producers = Producers()
    write(producers, 7, 0, range(5))
    producers.claim(7, 1, T0)
    assert refusal(producers, 7, 1, 3, T0) == ("unavailable", 0)
    assert producers.check(7, 1, 0, T0) is None


def test_seven_idle_days_and_a_producer_is_forgotten() -> None:
    producers = Producers()
    write(producers, 7, 3, range(5))
    assert producers.check(7, 3, 4, T0 + PRODUCER_IDLE_US_MAX) == BatchResult(40, 10, T0, T0)
    later = T0 + PRODUCER_IDLE_US_MAX + 1
    assert refusal(producers, 7, 3, 4, later) == ("unavailable", 0)
    assert refusal(producers, 7, 3, 5, later) == ("unavailable", 0)
    assert producers.next_epoch(7, later) == 4
    write(producers, 7, 0, range(2), later)
    assert refusal(producers, 7, 0, 4, later) == ("unavailable", 2)


def test_when_all_are_active_newcomers_wait() -> None:
    producers = Producers(capacity=2)
    write(producers, 1, 0, range(1), T0 + 5)
    write(producers, 2, 0, range(1), T0)
    code, wait_ms = refusal(producers, 3, 0, 0, T0 + 5)
    assert (code, wait_ms) == ("overloaded", (PRODUCER_IDLE_US_MAX - 5) // 1000 + 1)
    claim = producers.next_epoch(3, T0 + PRODUCER_IDLE_US_MAX)
    assert isinstance(claim, Refusal)
    assert claim.details["retry_after_ms"] == 1
    write(producers, 3, 0, range(1), T0 + PRODUCER_IDLE_US_MAX + 1)
    assert len(producers) == 2
    assert isinstance(producers.check(1, 0, 0, T0 + PRODUCER_IDLE_US_MAX), BatchResult)
    assert refusal(producers, 2, 0, 1, T0 + PRODUCER_IDLE_US_MAX) == ("unavailable", 0)


@pytest.mark.parametrize(
    "batch",
    [(-1, 0, 0), (ID_MAX + 1, 0, 0), (1, -1, 0), (1, EPOCH_MAX + 1, 0), (1, 0, -1), (1, 0, SEQUENCE_MAX + 1)],
)
def test_numbers_that_do_not_fit_a_header_are_refused(batch: tuple[int, int, int]) -> None:
    assert refusal(Producers(), *batch, T0)[0] == "invalid_request"


def test_the_greatest_numbers_fit() -> None:
    producers = Producers()
    write(producers, ID_MAX, EPOCH_MAX, range(2))
    outcome = producers.next_epoch(ID_MAX, T0)
    assert isinstance(outcome, Refusal)
    assert outcome.code == "invalid_request"
    assert isinstance(producers.check(ID_MAX, EPOCH_MAX, 1, T0), BatchResult)


def test_snapshot() -> None:
    producers = Producers()
    write(producers, 7, 0, range(20))
    write(producers, 8, 2, range(3))
    copy = Producers()
    copy.load(producers.buffers())
    copy.verify()
    assert copy.buffers() == producers.buffers()
    assert copy.check(7, 0, 19, T0) == BatchResult(190, 10, T0, T0)
    write(copy, 8, 2, range(3, 5))
