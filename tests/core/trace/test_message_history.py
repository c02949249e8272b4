"""The fold behind traces, on handmade facts: events, statuses, and whom a fact concerns.

Covers `core/trace/message_history.py` and `core/trace/trace_fold.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tailrace.core.model import facts as f
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.trace import message_history
from tailrace.core.trace.message_history import MessageHistories, MessageHistory

G = 1


def followed(*offsets: int | None, **fields: Any) -> tuple[MessageHistories, list[MessageHistory]]:
    folded = MessageHistories({G: "g", 2: "h"})
    found = [MessageHistory({}, offset=offset, **fields) for offset in offsets]
    for life in found:
        folded.add(life)
    return folded, found


def told(life: MessageHistory, *fields: str) -> list[Any]:
    """Events by name, with some of their fields."""
    return [(event["event"], *(event.get(name) for name in fields)) for event in life.events]


def play(folded: MessageHistories, *facts: Any) -> None:
    for fact in facts:
        folded.apply(fact, 0)


def leased(lease: int, *spans: int, time: int = 10, member: str = "m", group: int = G) -> f.Leased:
    return f.Leased(group, lease, member, list(spans), time + 100, time)


def test_a_plain_life() -> None:
    folded, (life, other) = followed(5, 7)
    play(folded, leased(9, 0, 7), f.LeaseExtended(G, [9], 300, 50), f.Acked(G, [(9, [4, 6])], 60))
    assert told(life, "time_us", "member") == [
        ("delivered", 10, "m"),
        ("extended", 50, "m"),
        ("acked", 60, "m"),
    ]
    assert life.events[0] == {
        "time_us": 10,
        "event": "delivered",
        "group": "g",
        "member": "m",
        "attempt": 1,
        "delivery": 1,
        "deadline_us": 110,
    }
    assert life.status() == "settled"
    assert other.events == []
    assert other.status() == "free"


def test_failures_count_attempts_and_given_back_ones_do_not() -> None:
    folded, (life,) = followed(5)
    play(
        folded,
        leased(1, 5, 6, time=1),
        f.Nacked(G, 1, [5, 6], 2_000_000, 2, [], "why"),
        leased(2, 5, 6, time=3),
        f.GivenBack(G, [5, 6], 4),
        leased(3, 5, 6, time=5, member="n"),
        f.LeaseExpired(G, 3, 6),
        leased(4, 5, 6, time=7),
        f.Dying(G, [5, 6], "max_attempts", 8, "last"),
    )
    assert told(life, "attempt", "delivery", "member") == [
        ("delivered", 1, 1, "m"),
        ("nacked", 1, None, "m"),
        ("delivered", 2, 2, "m"),
        ("given_back", None, None, "m"),
        ("delivered", 2, 3, "n"),
        ("expired", 2, None, "n"),
        ("delivered", 3, 4, "m"),
        ("dying", 3, None, "m"),
    ]
    assert (life.events[1]["error"], life.events[1]["delay_us"]) == ("why", 2_000_000)
    assert life.status() == "dying"
    play(folded, f.Buried(G, [3, 4, 5, 7], 9, "t.dlq", [0, 30, 1, 50, 2, 60]))
    assert told(life, "topic", "partition", "offset")[-1] == ("dead_lettered", "t.dlq", 1, 50)
    assert life.status() == "dead"
    play(folded, f.Reopened(G, [5, 6], 10), leased(5, 5, 6, time=11))
    assert told(life, "attempt")[-2:] == [("redriven", None), ("delivered", 1)]


def test_groups_are_independent() -> None:
    folded, (life,) = followed(5)
    play(folded, leased(1, 5, 6), leased(1, 5, 6, group=2, member="x"), f.Acked(2, [(1, [5, 6])], 20))
    assert life.statuses == {
        1: "leased",
        2: "settled",
    }
    assert life.status() == "mixed"
    play(folded, f.LeaseExpired(2, 1, 30))
    assert told(life, "group")[-1] == ("acked", "h"), "the lease of the other group is another one"


def test_an_expired_lease_concerns_only_what_was_left_in_it() -> None:
    folded, (first, second) = followed(5, 6)
    play(folded, leased(1, 5, 7), f.Acked(G, [(1, [5, 6])], 20), f.LeaseExpired(G, 1, 30))
    assert told(first) == [("delivered",), ("acked",)]
    assert told(second) == [("delivered",), ("expired",)]


def test_a_grant_gives_back_what_the_member_before_had() -> None:
    folded, (life,) = followed(5)
    play(
        folded, leased(1, 5, 6), f.Granted(G, "n", 2, 20), f.Granted(2, "n", 3, 25), f.LeaseExpired(G, 1, 30)
    )
    assert told(life, "member", "reason") == [("delivered", "m", None), ("given_back", "m", "reassigned")]
    assert life.status() == "free"


def test_a_reset_starts_anew() -> None:
    folded, (low, high) = followed(5, 8)
    play(folded, leased(1, 5, 9), f.Nacked(G, 1, [8, 9], -1, 20), f.GroupReset(G, 6, 1, 30), leased(2, 8, 9))
    assert told(low, "to_offset")[-1] == ("reset", 6)
    assert low.status() == "settled"
    assert told(high, "attempt", "delivery")[-1] == ("delivered", 1, 1)
    assert "delay_us" not in high.events[1], "by the group's own back-off"


def test_a_stream_group_passes_and_comes_back() -> None:
    folded, (life,) = followed(5)
    play(folded, *(f.CursorMoved(G, "m", offset, offset) for offset in (3, 5, 6, 9, 2, 7)))
    assert told(life, "time_us") == [("committed", 6), ("rewound", 2), ("committed", 7)]
    assert life.status() == "settled"


def test_enlisting_says_where_a_group_begins() -> None:
    folded, (low, high) = followed(5, 8)
    play(folded, f.Enlisted(3, "late", GroupPolicy(), 7, 10))
    assert (low.statuses[3], high.statuses[3]) == ("settled", "free")
    assert folded.name(3) == "late"
    assert folded.name(4) == "#4"
    play(folded, leased(1, 8, 9, group=3), f.Enlisted(3, "late", GroupPolicy(lease_ms=1), 7, 20))
    assert high.statuses[3] == "leased", "only other options"
    play(folded, f.Delisted(3, 30))
    assert told(high, "group")[-1] == ("group_deleted", "late")
    assert 3 not in high.statuses


def test_settled_without_a_delivery() -> None:
    folded, (life, other) = followed(5, 6)
    play(folded, f.Lapsed(G, [5, 6], 10), f.OffsetsSettled(G, [6, 7], 11))
    assert told(life) == [("lapsed",)]
    assert told(other) == [("settled",)]
    assert life.status() == other.status() == "settled"


def test_the_trim_names_those_who_had_not_settled() -> None:
    folded, (life, kept) = followed(5, 6)
    play(folded, leased(1, 5, 6), f.Acked(2, [(1, [5, 6])], 20))
    folded.apply(f.Trimmed(6), 77)
    folded.apply(f.Trimmed(6), 78)
    assert life.events[-1] == {"time_us": 77, "event": "collected", "unsettled": ["g"]}
    assert len([event for event in life.events if event["event"] == "collected"]) == 1
    assert life.status() == "collected"
    assert kept.status() == "free"


def test_delayed_messages_are_cancelled_or_get_an_offset() -> None:
    folded, (life, other) = followed(None, None, ref=70)
    other.ref = 71
    life.state = other.state = message_history.SCHEDULED
    play(folded, f.ScheduleCancelled([70, 72], 10), f.ScheduleCancelled([70], 11))
    assert told(life) == [("cancelled",)]
    assert (life.status(), other.status()) == ("cancelled", "scheduled")
    folded.appended(other, 9)
    play(folded, leased(1, 9, 10))
    assert told(other) == [("delivered",)]
    assert other.status() == "leased"


def test_staged_messages_are_dropped_or_applied() -> None:
    folded, (life, other) = followed(None, None, attempt=3)
    other.attempt = 4
    life.state = other.state = message_history.STAGED
    play(folded, f.StageDropped([3], 10))
    assert (told(life), life.status()) == ([("dropped",)], "dropped")
    other.event(11, "applied")
    folded.appended(other, 9)
    play(folded, f.StageApplied("w", 6, [4], 11))
    assert told(other, "writer", "version") == [("applied", "w", 6)]


def test_groups_that_never_touched_it() -> None:
    folded, (life, other) = followed(5, 6)
    play(folded, leased(1, 5, 6))
    folded.finish({G: 6, 2: 6, 3: 2})
    assert life.statuses == {
        1: "leased",
        2: "settled",
        3: "free",
    }
    assert other.statuses[2] == "free"


@pytest.mark.parametrize(
    ("base", "end", "concerned"), [(0, 0, True), (0, 5, False), (5, 6, True), (6, 9, False), (8, 12, True)]
)
def test_whom_a_frame_may_concern(base: int, end: int, concerned: bool) -> None:
    folded, _ = followed(9, 5)
    assert folded.concerns(base, end) is concerned
    assert not MessageHistories({}).concerns(base, end)


def test_the_largest_life_fits_an_answer() -> None:
    folded, (life,) = followed(5)
    for number in range(1, message_history.EVENTS_MAX):
        play(folded, f.Nacked(G, number, [5, 6], 1, 2, [], "\U0001f600" * 5000))
    assert len(msgspec.msgpack.encode(life.events)) < 700_000


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_history, "EVENTS_MAX", 3)
    folded, (life,) = followed(5)
    for number in range(1, 5):
        play(folded, leased(number, 5, 6))
    assert len(life.events) == 3
    assert life.cut


def test_every_fact_of_delivery_is_known() -> None:
    silent = {f.GroupPaused}
    folded = MessageHistories({})
    assert set(f.DeliveryFact.__args__) - set(folded._do) == silent


def test_a_delivery_that_no_handler_got_is_taken_back() -> None:
    folded, (life,) = followed(5)
    play(
        folded,
        leased(1, 5, 6, time=1),
        f.GivenBack(G, [5, 6], 2, [], True),
        leased(2, 5, 6, time=3, member="n"),
    )
    assert told(life, "delivery", "reason", "member") == [
        ("delivered", 1, None, "m"),
        ("given_back", None, "unstarted", "m"),
        ("delivered", 1, None, "n"),
    ]
