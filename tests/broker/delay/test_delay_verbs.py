"""Delayed messages at work: released at their tick, cancelled for good, over restarts and on full disks.

Also covers `broker/partition/delay_prefetch.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.broker.partition import delay_prefetch
from tailrace.core.collections.timing_wheel import TICK_US
from tailrace.core.model.commands import DeleteTopic, Published, Reply, TrimTopic
from tailrace.core.model.commands import Publish as PublishRequest
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Cancelled, CancelScheduled, ListScheduled, ScheduledList
from tailrace.core.process import release_process
from tailrace.errors import Full
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import crc32c
from tailrace.ports import LogStore
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryStore
from tests.broker.held_engine import HeldEngine
from tests.broker.queue_engine import QueueEngine, values
from tests.storage.frame_maker import TestClock

S = 1_000_000


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LogStore:
    """Both kinds of logs; the segments of the file log are small."""
    if request.param == "memory":
        return MemoryStore()
    return FileStore(tmp_path / "data", TestClock(), segment_bytes=4096)


class Broker(HeldEngine):
    """A broker whose delayed messages the test can follow."""

    def __init__(self, store: LogStore | None = None, **options: Any) -> None:
        super().__init__(store)
        self.ids = 0
        self.create(**options)

    def later(self, delays: dict[str, float], *, partition: int = 0, fields: Any = None, **more: Any) -> Any:
        """Publish a batch of delayed messages: value to seconds."""
        topic = more.pop("topic", "t")
        now_us = self.clock.now_us()
        first, self.ids = self.ids + 1, self.ids + len(delays)
        ids = b"".join(number.to_bytes(16, "big") for number in range(first, self.ids + 1))
        columns, body = arrow.encode(
            [value.encode() for value in delays],
            ids=ids,
            timestamps=now_us,
            deliver_at=[now_us + round(delay * S) for delay in delays.values()],
            **(fields or {}),
        )
        return self.submit(PublishRequest(topic, partition, columns, crc32c(body), **more), body)

    def texts(self, partition: int = 0, offset: int = 0) -> list[str]:
        return [value.decode() for value in self.values("t", partition, offset)]

    def cancel(self, *ids: int, partition: int = 0) -> list[bool]:
        reply = self.ask(CancelScheduled("t", partition, [number.to_bytes(16, "big") for number in ids]))
        assert isinstance(reply, Cancelled), reply
        return reply.done

    def frames(self) -> list[tuple[frame.Header, Any]]:
        """Everything that the log holds."""
        log = self.runtime().log
        return [
            (header, body)
            for header, body in log.read_entries(list(range(self.runtime().entry)))
            if header.kind != frame.BARRIER
        ]


def reply_of(answers: list[tuple[Reply, bytes]]) -> Reply:
    ((reply, _),) = answers
    return reply


def test_a_delayed_message_is_an_ordinary_late_append(store: LogStore) -> None:
    broker = Broker(store)
    assert reply_of(broker.later({"b": 2.0, "a": 1.0})) == Published(-1, broker.clock.now_us(), None, [0, 1])
    broker.publish(b"first")
    assert broker.texts() == ["first"]
    broker.pass_s(0.99)
    assert broker.texts() == ["first"]
    broker.pass_s(0.02)
    assert broker.texts() == ["first", "a"]
    broker.publish(b"second")
    broker.pass_s(1)
    assert broker.texts() == ["first", "a", "second", "b"]
    assert broker.texts(offset=1) == ["a", "second", "b"], "nothing is missed by a cursor that moved on"
    assert len(broker.runtime().state.timetable) == 0


def test_a_release_is_one_group_of_frames() -> None:
    broker = Broker()
    broker.later({"a": 0.991, "b": 1.0})
    broker.pass_s(1.02)
    kinds = [(header.kind, bool(header.flags & frame.MORE)) for header, _ in broker.frames()]
    assert kinds == [(frame.SCHEDULED, False), (frame.DATA, True), (frame.FACTS, False)]
    data = broker.frames()[1][0]
    assert data.flags & frame.RELEASED
    assert (data.base_offset, data.count) == (0, 2)


def test_a_message_of_tomorrow_keeps_nothing_else_waiting() -> None:
    broker = QueueEngine()
    broker.create(durability="interval", sync_interval_ms=1_000)
    broker.enlist(lease_ms=10_000)
    tomorrow_us = broker.clock.now_us() + 86_400 * S
    broker.send(b"later", deliver_at=[tomorrow_us])
    broker.send(b"now")
    syncs = broker.log().stats().syncs
    broker.pass_s(1.2)
    assert broker.log().stats().syncs == syncs + 1, "the interval of its syncs is kept"
    assert values(broker.lease()) == [b"now"]
    broker.pass_s(10.1)
    assert broker.runtime().state.queues.figures("g")["failures"] == 1, "its lease has ended"


def test_a_delay_within_a_tick_fires_at_the_next_and_never_early() -> None:
    broker = Broker()
    broker.later({"a": 0.003, "past": -5.0, "now": 0.0})
    assert broker.texts() == ["past", "now"]
    broker.pass_s(0.002)
    assert broker.texts() == ["past", "now"]
    broker.pass_s(TICK_US / S)
    assert broker.texts() == ["past", "now", "a"]


def test_a_restart_keeps_the_far_and_fires_what_became_due(store: LogStore) -> None:
    broker = Broker(store)
    broker.later({"soon": 5.0, "far": 1000.0, "never": 6.0})
    assert broker.cancel(3) == [True]
    broker.runtime().upkeep.save_snapshot()
    broker.settle()
    broker.later({"sooner": 4.0, "gone": 5.0})
    assert broker.cancel(5) == [True]
    broker.restart()
    broker.settle()
    assert broker.texts() == [], "nothing is delivered because of a restart"
    broker.clock.set_us(broker.clock.now_us() + 60 * S)
    broker.restart()
    broker.settle()
    assert broker.texts() == ["sooner", "soon"]
    broker.pass_s(939)
    assert broker.texts() == ["sooner", "soon"]
    broker.pass_s(2)
    assert broker.texts() == ["sooner", "soon", "far"]
    broker.restart()
    broker.pass_s(5000)
    assert broker.texts() == ["sooner", "soon", "far"]


def test_cancelled_messages_never_appear(store: LogStore) -> None:
    broker = Broker(store)
    broker.later({f"m{number}": 1.0 for number in range(20)})
    assert broker.cancel(3, 77) == [True, False]
    assert broker.cancel(3) == [True]
    broker.pass_s(0.999)
    assert broker.cancel(5, 6) == [True, True], "they are loaded already"
    broker.pass_s(0.1)
    assert broker.texts() == [f"m{number}" for number in range(20) if number not in (2, 4, 5)]
    assert broker.cancel(1) == [False], "it is out"


def test_a_cancel_while_a_bucket_drains_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_process, "RELEASE_ROWS", 4)
    broker = Broker()
    broker.later({f"m{number}": 1.0 for number in range(12)})
    broker.pass_s(1)
    assert broker.texts() == ["m0", "m1", "m2", "m3"], "the others follow, tick by tick"
    # In the turn in which the next ones would be released: the cancel comes first.
    ids = [(7).to_bytes(16, "big")]
    answers: list[Reply] = []
    request = CancelScheduled("t", 0, ids)
    broker.engine.gateway.submit(request, b"", lambda reply, parts: answers.append(reply))
    broker.clock.set_us(broker.clock.now_us() + TICK_US)
    broker.engine.pump.tick()
    broker.settle()
    assert answers == [Cancelled([True])]
    broker.pass_s(1)
    assert broker.texts() == [f"m{number}" for number in range(12) if number != 6]


def test_messages_wait_for_their_own_frame_to_be_durable() -> None:
    broker = Broker()
    broker.later({"early": 0.05})
    broker.threads.holding = True
    answers = broker.later({"late": 0.01})
    assert answers == []
    broker.pass_s(0.03)
    assert answers == []
    assert broker.runtime().end_offset == 0
    broker.threads.holding = False
    broker.threads.run_held()
    broker.pass_s(0.1)
    assert broker.texts() == ["late", "early"]


def test_partitions_do_not_mix() -> None:
    broker = Broker(partitions=2)
    broker.later({"zero": 1.0})
    broker.later({"one": 1.0}, partition=1)
    assert broker.cancel(1, partition=1) == [False]
    assert broker.cancel(1) == [True]
    broker.pass_s(2)
    assert (broker.texts(0), broker.texts(1)) == ([], ["one"])
    assert isinstance(broker.ask(CancelScheduled("t", 9, [bytes(16)])), Refusal)


def test_columns_of_all_rows_survive() -> None:
    broker = Broker()
    broker.later({"keyed": 1.0}, fields={"keys": [b"k"], "priorities": [0]})
    broker.later({"plain": 1.0})
    broker.later({"rich": 1.0}, fields={"headers": [{"h": b"1"}], "dedup_ids": [b"d"], "expires_at": 5})
    broker.pass_s(1.1)
    ((header, body),) = [item for item in broker.frames() if item[0].kind == frame.DATA]
    rows = arrow.decode(body, header.columns).to_pylist()
    assert [row["value"] for row in rows] == [b"keyed", b"plain", b"rich"]
    assert [row["key"] for row in rows] == [b"k", None, None]
    assert [row["priority"] for row in rows] == [0, 2, 2]
    assert [row["dedup_id"] for row in rows] == [None, None, b"d"]
    assert rows[2]["headers"] == [("h", b"1")]
    assert rows[1]["headers"] is None
    assert [row["expires_at"] is not None for row in rows] == [False, False, True], "expired, and appended"


def test_dedup_and_retries_over_a_release(store: LogStore) -> None:
    broker = Broker(store)
    first = reply_of(broker.later({"a": 1.0}, fields={"dedup_ids": [b"x"]}, producer_id=9))
    assert isinstance(first, Published)
    broker.pass_s(2)
    assert broker.texts() == ["a"]
    again = reply_of(broker.later({"b": 1.0}, fields={"dedup_ids": [b"x"]}))
    assert isinstance(again, Published)
    assert again.duplicates == [(0, 0)]
    broker.restart()
    again = reply_of(broker.later({"b": 1.0}, fields={"dedup_ids": [b"x"]}))
    assert isinstance(again, Published)
    assert again.duplicates == [(0, 0)]
    broker.pass_s(5)
    assert broker.texts() == ["a"]


def test_the_key_index_counts_when_messages_get_their_place() -> None:
    broker = Broker(key_index=True)
    broker.later({"a": 1.0}, fields={"keys": [b"k"]})
    assert broker.runtime().state.keys is not None
    assert len(broker.runtime().state.keys) == 0
    broker.pass_s(1.1)
    assert len(broker.runtime().state.keys) == 1


def test_a_full_disk_delays_and_loses_nothing() -> None:
    broker = Broker()
    broker.later({"a": 1.0, "b": 1.5})
    broker.pass_s(0.9)
    broker.log().fail_next(Full("no space", outcome="none"))
    broker.pass_s(0.2)
    assert broker.texts() == []
    broker.pass_s(5)
    assert broker.texts() == ["a", "b"]


def test_a_trim_leaves_what_still_waits(store: LogStore) -> None:
    broker = Broker(store)
    broker.later({"far": 100.0})
    for number in range(60):
        broker.publish(b"%d" % number * 40)
    for _ in range(3):
        broker.ask(TrimTopic("t", 0, broker.runtime().end_offset))
        broker.settle()
        broker.publish(b"more")
    broker.restart()
    broker.pass_s(101)
    assert broker.texts(offset=broker.runtime().state.start_offset)[-1] == "far"
    for _ in range(3):
        broker.ask(TrimTopic("t", 0, broker.runtime().end_offset))
        broker.settle()
        broker.publish(b"more")
    assert broker.runtime().log.stats().start_offset > 0, "and then it goes"


def test_many_frames_and_little_room(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_process, "LOAD_ROWS", 7)
    monkeypatch.setattr(delay_prefetch, "_ENTRIES_AT_ONCE", 3)
    broker = Broker(store)
    expected = []
    for number in range(30):
        delays = {f"{number}-{row}": 1 + (number * 7 + row * 3) % 11 / 10 for row in range(5)}
        expected += [(delay, number, row, name) for row, (name, delay) in enumerate(delays.items())]
        broker.later(delays)
    broker.runtime().prefetch.limit(1000)
    broker.pass_s(4)
    assert broker.texts() == [name for *_, name in sorted(expected)]


def test_a_full_prefetch_does_not_hold_a_message_that_came_later() -> None:
    broker = Broker()
    broker.runtime().prefetch.limit(1000)
    for number in range(29):
        broker.later({f"late {number}-{row}": 3.0 - number / 10 for row in range(10)})
        broker.pass_s(0.1)
    assert broker.runtime().prefetch.free_bytes((-1, 0)) <= 0
    broker.later({"early": 0.05})
    broker.pass_s(0.09)
    assert broker.texts() == ["early"]
    broker.pass_s(2)
    assert len(broker.texts()) == 291


def test_large_messages_are_released_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_prefetch, "RELEASE_BYTES", 3000)
    broker = Broker()
    broker.runtime().prefetch.limit(20_000)
    broker.later({f"{number:04}" * 500: 1.0 for number in range(30)})
    broker.pass_s(3)
    assert [value[:4] for value in broker.texts()] == [f"{number:04}" for number in range(30)]
    counts = [header.count for header, _ in broker.frames() if header.kind == frame.DATA]
    assert max(counts) <= 2


def test_those_that_wait_can_be_listed() -> None:
    broker = Broker(partitions=2)
    now_us = broker.clock.now_us()
    broker.later({"b": 2.0, "d": 4.0}, fields={"keys": [b"k", None]})
    broker.later({"a": 1.0, "c": 3.0}, partition=1, fields={"headers": [None, {"h": b"1"}]})
    broker.cancel(2)
    reply = broker.ask(ListScheduled("t"))
    assert isinstance(reply, ScheduledList)
    assert [(row["value"], row["partition"]) for row in reply.messages] == [(b"a", 1), (b"b", 0), (b"c", 1)]
    assert reply.messages[1] == {
        "partition": 0,
        "id": (1).to_bytes(16, "big"),
        "deliver_at_us": now_us + 2 * S,
        "key": b"k",
        "value": b"b",
        "headers": [],
    }
    assert reply.messages[2]["headers"] == [("h", b"1")]
    page = broker.ask(ListScheduled("t", 1, now_us + 1 * S))
    assert [row["value"] for row in page.messages] == [b"b"]
    assert broker.ask(ListScheduled("t", 10, now_us + 9 * S)).messages == []
    assert broker.ask(ListScheduled("t", 0)).code == "invalid_request"
    broker.pass_s(2.5)
    assert [row["value"] for row in broker.ask(ListScheduled("t")).messages] == [b"c"]


def test_a_deleted_topic_and_a_closed_broker_release_nothing() -> None:
    broker = Broker()
    broker.create("gone")
    broker.later({"b": 1.0}, topic="gone")
    broker.ask(DeleteTopic("gone"))
    broker.later({"a": 1.0})
    closed: list[bool] = []
    broker.engine.close(lambda: closed.append(True))
    broker.pass_s(3)
    assert closed == [True]
    broker.restart()
    broker.settle()
    assert broker.texts() == ["a"]
