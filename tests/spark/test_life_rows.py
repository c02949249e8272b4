"""Facts as rows: what the view `lifecycle` says of a message is what its trace says.

Covers `spark/source/group_rows.py`, `spark/source/life_rows.py` and `spark/source/lifecycle.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.client.read.fact_feed import FactPiece, piece_of
from tailrace.core.model.commands import TrimTopic
from tailrace.core.model.group_commands import ResetGroup
from tailrace.core.model.queue_commands import Extend, ReadFacts, Reopen, SettleOffsets, Trace
from tailrace.spark.source.group_rows import GROUPS
from tailrace.spark.source.life_rows import EVENTS, LIFECYCLE, LifeRows, expand
from tailrace.spark.source.lifecycle import add_piece
from tests.broker.queue_engine import QueueEngine

END = 1 << 62


def pieces(broker: QueueEngine, bytes_max: int = 1 << 20, **fields: Any) -> list[FactPiece]:
    found: list[FactPiece] = []
    entry = 0
    while not found or not found[-1].last:
        ((reply, body),) = broker.submit(ReadFacts("t", 0, entry, bytes_max, **fields))
        found.append(piece_of(reply, [body]))
        entry = found[-1].next_entry
    return found


def rows_of(broker: QueueEngine, bytes_max: int = 1 << 20, **fields: Any) -> list[dict[str, Any]]:
    """The whole view, as Spark would get it."""
    rows = LifeRows("t", 0)
    found = []
    for piece in pieces(broker, bytes_max, **fields):
        add_piece(rows, piece, END)
        batch = rows.take()
        assert batch.schema == LIFECYCLE
        batch.validate(full=True)
        found += batch.to_pylist()
    return found


def broker_with(**options: Any) -> QueueEngine:
    broker = QueueEngine()
    broker.create()
    broker.enlist(**options)
    return broker


def events(rows: list[dict[str, Any]], offset: int) -> list[str]:
    return [row["event"] for row in rows if row["offset"] == offset]


def test_spans_are_expanded() -> None:
    assert expand([3, 6]).tolist() == [3, 4, 5]
    assert expand([3, 5, 7, 8, 10, 12]).tolist() == [3, 4, 7, 10, 11]
    assert expand([]).tolist() == []


def test_the_rows_of_a_failing_message() -> None:
    broker = broker_with(max_attempts=2, lease_ms=5000)
    broker.send(b"0", b"1")
    first, second = broker.lease()
    broker.ack(first)
    broker.nack(second, delay_ms=1000, error="boom")
    broker.pass_s(2)
    (again,) = broker.lease()
    broker.pass_s(6)
    rows = rows_of(broker)
    assert events(rows, 0) == ["appended", "delivered", "acked"]
    failing = [row for row in rows if row["offset"] == 1]
    assert [row["event"] for row in failing] == [
        "appended",
        "delivered",
        "nacked",
        "delivered",
        "dying",
        "dead_lettered",
    ]
    assert [row["deliveries"] for row in failing] == [None, 1, 1, 2, 2, 2]
    assert [row["failures"] for row in failing] == [None, 0, 1, 1, 2, 2]
    assert [row["member"] for row in failing] == [None, "m", "m", "m", "m", None]
    assert [row["reason"] for row in failing[4:]] == ["max_attempts", "max_attempts"]
    nacked = failing[2]
    assert (nacked["error"], (nacked["due"] - nacked["time"]).total_seconds()) == ("boom", 1)
    assert failing[3]["lease"] == np.uint64(again.lease).astype(np.int64)
    assert {(row["topic"], row["partition"]) for row in rows} == {("t", 0)}
    assert {row["group"] for row in rows} == {None, "g"}
    assert {row["event"] for row in rows} <= set(EVENTS)


def test_acts_of_operators() -> None:
    broker = broker_with()
    broker.send(b"0", b"1", b"2", b"3")
    broker.ask(SettleOffsets("t", 0, "g", [0, 2]))
    broker.ask(Reopen("t", 0, "g", [1, 2]))
    (lease, *_) = broker.lease(count_max=1)
    broker.ask(Extend("t", 0, "g", [lease.lease], 60_000))
    broker.ask(ResetGroup("g", "t", offsets=[(0, 2)], force=True))
    broker.ask(TrimTopic("t", 0, 1))
    broker.ask(TrimTopic("t", 0, 3))
    rows = rows_of(broker)
    assert events(rows, 0) == ["appended", "settled", "collected"]
    assert events(rows, 1) == ["appended", "settled", "redriven", "delivered", "collected"]
    assert events(rows, 2) == ["appended", "reset", "collected"]
    (extended,) = [row for row in rows if row["event"] == "extended"]
    assert (extended["offset"], extended["member"], extended["group"]) == (None, "m", "g")


def test_a_stream_group_commits() -> None:
    from tailrace.core.model.queue_commands import Commit

    broker = broker_with(mode="stream")
    broker.send(b"0", b"1", b"2")
    granted = broker.runtime().state.queues.grant("g")
    assert granted is not None
    for offset in (2, 3):
        broker.ask(Commit("t", "g", "m", [(0, granted[1], offset)]))
    rows = rows_of(broker)
    assert [row["offset"] for row in rows if row["event"] == "committed"] == [0, 1, 2]


def test_what_is_not_seen_from_its_beginning_has_no_counters() -> None:
    broker = broker_with()
    broker.send(b"0", b"1")
    broker.nack(broker.lease(count_max=1)[0], delay_ms=0)
    broker.pass_s(1000)
    since_us = broker.clock.now_us()
    broker.send(b"2")
    broker.ack(*broker.lease())
    rows = [row for row in rows_of(broker, from_us=since_us) if row["time"].timestamp() * 1e6 >= since_us]
    acked = {row["offset"]: row["deliveries"] for row in rows if row["event"] == "acked"}
    assert acked == {0: None, 1: None, 2: 1}


# ------------------------------------------------------------------------------------------ any story

ACTS = ("send", "lease", "lease", "ack", "ack", "nack", "reject", "give back", "pass", "restart", "extend")


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 5)), min_size=10, max_size=40),
    st.sampled_from([1, 300, 1 << 20]),
    st.sampled_from(["partitions", "shared"]),
)
def test_rows_are_what_traces_say(steps: list[tuple[str, int]], bytes_max: int, assignment: str) -> None:
    broker = broker_with(assignment=assignment, lease_ms=5000, max_attempts=3, backoff_ms=100)
    held: list[Any] = []
    for what, number in steps:
        if what == "send":
            broker.send(
                *(b"%d" % row for row in range(number + 1)),
                keys=[b"k%d" % (row % 2) for row in range(number + 1)],
            )
        elif what == "lease":
            held += broker.lease(count_max=number + 1)
        elif what == "pass":
            broker.pass_s(number * 2)
        elif what == "restart":
            broker.restart()
        elif held:
            message = held.pop(min(number, len(held) - 1))
            try:
                act(broker, what, message)
            except AssertionError:
                continue  # The lease is over; that is an answer, too.
    rows = rows_of(broker, bytes_max)
    for offset in range(broker.runtime().end_offset):
        found = broker.ask(Trace("t", 0, offset)).messages[0]["events"]
        told = [
            (one["event"], one["time_us"], one.get("member"))
            for one in found
            if one["event"] not in ("extended", "published")
        ]
        ours = [
            (row["event"], round(row["time"].timestamp() * 1e6), row["member"])
            for row in rows
            if row["offset"] == offset
        ]
        assert ours == told
        deliveries = [one["delivery"] for one in found if one["event"] == "delivered"]
        counted = [
            row["deliveries"] for row in rows if row["offset"] == offset and row["event"] == "delivered"
        ]
        assert counted == deliveries


def act(broker: QueueEngine, what: str, message: Any) -> None:
    if what == "ack":
        broker.ack(message)
    elif what == "nack":
        broker.nack(message, error="no")
    elif what == "give back":
        broker.nack(message, failure=False)
    elif what == "extend":
        broker.ask(Extend("t", 0, "g", [message.lease], 9000))
    else:
        broker.reject(message)


def test_the_page_names_the_columns_and_events_of_both_views() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    for view, schema in (("lifecycle", LIFECYCLE), ("groups", GROUPS)):
        assert f"| `{view}` | {', '.join(f'`{name}`' for name in schema.names)} |" in page
    missing = [event for event in EVENTS if f"`{event}`" not in page]
    assert not missing
