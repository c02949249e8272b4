"""The accounts of one message in several leases, made of a history that is written by hand."""

import pytest

from tailrace.sim.delivery_history import Given, History, HistoryAct, Rules, SentMessage
from tailrace.sim.virtual_time import Violation

S = 1_000_000
RULES = Rules(
    "shared", "none", max_attempts=5, max_deliveries=0, backoff_ms=1_000, backoff_max_ms=1_000,
    session_ms=6_000, expired_to_dlq=False,
)  # fmt: skip


def given(member: str, from_us: int, to_us: int, *acts: HistoryAct, number: int) -> Given:
    """The message in one lease."""
    return Given(
        "group", member, (0, 3), b"1", number, from_us, to_us, number, number // 3, 1, number, [*acts]
    )


def nack(sent_us: int) -> HistoryAct:
    """One that was confirmed."""
    return HistoryAct("nack", sent_us, 700, sent_us + 1_000, "ok")


def history(*all_given: Given) -> History:
    """What a group was given of one message."""
    made = History()
    made.rules["group"] = RULES
    made.messages[b"1"] = SentMessage(b"1", 0, bytes(16), 0, outcome="ok")
    made.given.extend(all_given)
    return made


def lost_in_between(again_us: int) -> History:
    """The second lease was told and lost; so the first one holds the message again, which is nacked through
    it and comes once more."""
    story = history(
        given("a", 0, 9 * S, nack(3 * S), number=1),
        given("b", S, 2 * S, number=2),
        given("a", again_us, again_us + S, number=3),
    )
    story.doubts["group", "a"].append(S)  # So the message went to another member.
    return story


def test_message_may_be_nacked_through_the_lease_that_holds_it_again_after_a_failure() -> None:
    story = lost_in_between(4 * S)
    story.crashes.append((S + 1, 2 * S))
    story.check()


def test_nack_with_a_stale_receipt_that_is_taken_is_caught() -> None:
    with pytest.raises(Violation, match="nack with a stale receipt was taken"):
        lost_in_between(4 * S).check()


def test_back_off_holds_for_what_is_leased_after_the_nack() -> None:
    story = lost_in_between(3 * S + 600_000)
    story.crashes.append((S + 1, 2 * S))
    with pytest.raises(Violation, match="came again 100000 us early"):
        story.check()
