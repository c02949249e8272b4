"""Traces over real logs: found by place, id, key, time and status, with everything that happened since.

Also covers `broker/trace/trace_search.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.broker.trace import trace_search, trace_verbs
from tailrace.core.model.commands import Publish, Published, TrimTopic
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import Enlist, LeaseRun, RunLeased
from tailrace.core.model.queue_commands import (
    Ack,
    CancelScheduled,
    DecideStaged,
    Extend,
    Nack,
    RejectMessages,
    StageRows,
    Trace,
    TraceFound,
)
from tailrace.format import batch as arrow
from tailrace.format.codec import encode_reply
from tailrace.format.frame import crc32c
from tailrace.format.wire import HEADER_BYTES_MAX
from tailrace.storage.files.file_store import FileStore
from tests.broker.held_engine import HeldEngine

SHARED = GroupPolicy(assignment="shared", ordering="none")
PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traced:
    """A broker with the topic `t`, messages with ids of their own, and a group on partition 0."""

    def __init__(self, store: Any = None, **options: Any) -> None:
        self.broker = HeldEngine(store)
        self.broker.clock.set_us(1_700_000_000_000_000)
        self.broker.create(**options)
        self.ids: list[bytes] = []

    @property
    def now_us(self) -> int:
        return self.broker.clock.now_us()

    def publish(self, *values: bytes, partition: int = 0, ids: bytes | None = None, **columns: Any) -> Any:
        count = len(values)
        if ids is None:
            ids = arrow.make_ids(count, self.now_us // 1000, 1000 + 16 * len(self.ids), 7)
        self.ids += [ids[16 * row : 16 * row + 16] for row in range(count)]
        bits, body = arrow.encode(list(values), ids=ids, timestamps=self.now_us - 500, **columns)
        return self.broker.ask(Publish("t", partition, bits, crc32c(body)), body)

    def do(self, command: Any) -> Any:
        """Give a command to the partition itself."""
        replies: list[Any] = []
        self.broker.runtime().submit(command, b"", lambda reply, parts: replies.append(reply))
        self.broker.settle()
        (reply,) = replies
        assert not isinstance(reply, Refusal), reply
        return reply

    def lease(self, lease: int, count: int = 10, member: str = "m1", group: str = "g") -> RunLeased:
        end = self.broker.runtime().end_offset
        reply = self.do(LeaseRun(group, member, 0, lease, count, 1 << 20, end))
        assert isinstance(reply, RunLeased), reply
        return reply

    def ask(self, **fields: Any) -> TraceFound:
        reply = self.broker.ask(Trace("t", **fields))
        assert isinstance(reply, TraceFound), reply
        return reply

    def one(self, **fields: Any) -> dict[str, Any]:
        (found,) = self.ask(**fields).messages
        return found

    def refused(self, **fields: Any) -> str:
        reply = self.broker.ask(Trace("t", **fields))
        assert isinstance(reply, Refusal)
        return reply.code


def events(found: dict[str, Any]) -> list[str]:
    return [event["event"] for event in found["events"]]


@pytest.fixture(params=["memory", "file"])
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Traced:
    if request.param == "memory":
        return Traced()

    class Clock:
        def now_us(self) -> int:
            return 1_700_000_000_000_000

    return Traced(FileStore(tmp_path / "data", Clock(), segment_bytes=4096))


def test_a_whole_life_by_place(traced: Traced) -> None:
    traced.do(Enlist("g", SHARED))
    traced.publish(b"a", b"b", keys=[b"k1", b"k2"], headers=[[("traceparent", PARENT)], [("x", b"y")]])
    traced.broker.pass_s(1)
    traced.lease(5)
    traced.do(Extend("t", 0, "g", [5], 40_000))
    traced.do(Nack("t", 0, "g", 5, [0, 1], error="no luck"))
    traced.do(Ack("t", 0, "g", [(5, [1, 2])]))
    traced.broker.pass_s(5)
    traced.lease(6, member="m2")
    traced.do(Ack("t", 0, "g", [(6, [0, 1])]))
    found = traced.one(partition=0, offset=0)
    assert events(found) == ["published", "appended", "delivered", "extended", "nacked", "delivered", "acked"]
    times = [event["time_us"] for event in found["events"]]
    assert times == sorted(times)
    assert found["events"][4]["error"] == "no luck"
    assert [event.get("member") for event in found["events"][2:]] == ["m1", "m1", "m1", "m2", "m2"]
    assert [event.get("attempt") for event in found["events"] if event["event"] == "delivered"] == [1, 2]
    assert (found["topic"], found["partition"], found["offset"]) == ("t", 0, 0)
    assert (found["id"], found["key"], found["traceparent"]) == (traced.ids[0], b"k1", PARENT.decode())
    assert (found["status"], found["groups"]) == ("settled", {"g": "settled"})
    other = traced.one(partition=0, offset=1)
    assert events(other) == ["published", "appended", "delivered", "extended", "acked"]
    assert "traceparent" not in other
    assert other["priority"] == 2


def test_the_dead_are_linked(traced: Traced) -> None:
    traced.do(Enlist("g", SHARED))
    traced.publish(b"a")
    traced.lease(5)
    traced.do(RejectMessages("t", 0, "g", 5, [0, 1], error="bad"))
    traced.broker.pass_s(1)
    found = traced.one(partition=0, offset=0)
    assert events(found)[-2:] == ["dying", "dead_lettered"]
    assert (found["events"][-2]["reason"], found["events"][-2]["error"]) == ("rejected", "bad")
    assert found["status"] == "dead"
    link = found["events"][-1]
    letter = traced.broker.ask(Trace(link["topic"], link["partition"], link["offset"])).messages[0]
    assert letter["origin"]["topic"] == "t"
    assert letter["origin"]["offset"] == "0"


def test_an_expired_lease_is_seen_although_it_names_no_offsets(traced: Traced) -> None:
    traced.do(Enlist("g", SHARED))
    traced.publish(b"a")
    traced.lease(5)
    traced.broker.pass_s(40)
    traced.publish(b"b")
    assert events(traced.one(partition=0, offset=0)) == ["published", "appended", "delivered", "expired"]
    assert events(traced.one(partition=0, offset=1)) == ["published", "appended"]


def test_by_id_through_its_time(traced: Traced) -> None:
    traced.publish(b"early")
    traced.broker.pass_s(3600)
    traced.publish(b"a", b"b")
    traced.broker.pass_s(3600)
    traced.publish(b"late")
    for number, offset in ((0, 0), (1, 1), (2, 2), (3, 3)):
        found = traced.one(id=traced.ids[number])
        assert (found["offset"], found["id"]) == (offset, traced.ids[number])
    unknown = arrow.make_ids(1, traced.now_us // 1000, 1, 1)
    assert traced.ask(id=unknown) == TraceFound([], True)


def test_foreign_ids_need_a_full_search(traced: Traced) -> None:
    traced.publish(b"a", ids=bytes(range(16)))
    assert traced.refused(id=bytes(range(16))) == "invalid_request"
    assert traced.one(id=bytes(range(16)), full=True)["offset"] == 0
    assert traced.refused(id=b"short") == "invalid_request"


def test_by_key_time_and_partition() -> None:
    traced = Traced(partitions=2)
    for _ in range(3):
        traced.publish(b"a", b"b", b"c", keys=[b"k", b"other", None])
        traced.publish(b"d", partition=1, keys=[b"k"])
        traced.publish(b"plain")
        traced.broker.pass_s(3600)
    found = traced.ask(key=b"k").messages
    assert sorted((m["partition"], m["offset"]) for m in found) == [
        (0, 0),
        (0, 4),
        (0, 8),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert [m["offset"] for m in traced.ask(key=b"k", partition=0).messages] == [0, 4, 8]
    start = 1_700_000_000_000_000
    window = {"from_us": start + 3_000_000_000, "to_us": start + 4_000_000_000}
    assert [m["offset"] for m in traced.ask(key=b"k", partition=0, **window).messages] == [4]
    assert [m["offset"] for m in traced.ask(partition=0, **window).messages] == [4, 5, 6, 7]
    assert traced.ask(key=b"nobody") == TraceFound([], True)
    for window, told in (({"from_us": 10, "to_us": 5}, "later than since"), ({"to_us": 5}, "with full")):
        refusal = traced.broker.ask(Trace("t", **window))  # type: ignore[arg-type]
        assert refusal.code == "invalid_request"
        assert refusal.message.startswith("until: ")
        assert told in refusal.message


def test_by_status() -> None:
    traced = Traced()
    traced.do(Enlist("g", SHARED))
    traced.do(Enlist("h", SHARED))
    traced.publish(b"a", b"b", b"c")
    traced.lease(5)
    traced.do(Ack("t", 0, "g", [(5, [0, 1])]))
    assert [m["offset"] for m in traced.ask(status="leased").messages] == [1, 2]
    assert [m["offset"] for m in traced.ask(status="settled").messages] == [0]
    assert traced.one(status="settled")["groups"] == {"g": "settled", "h": "free"}
    assert traced.one(status="settled")["status"] == "mixed"
    assert traced.ask(status="dead").messages == []
    assert traced.refused(status="nonsense") == "invalid_request"


def test_what_is_stuck_is_found_behind_a_long_settled_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_search, "CANDIDATES_MAX", 10)
    traced = Traced()
    traced.do(Enlist("g", SHARED))
    for number in range(1, 9):
        traced.publish(*[b"x"] * 5)
        traced.lease(number)
        first = 5 * number - 5
        traced.do(Ack("t", 0, "g", [(number, [first, first + (4 if number == 8 else 5)])]))
    found = traced.ask(status="leased")
    assert ([m["offset"] for m in found.messages], found.complete) == ([39], True)
    assert not traced.ask(status="settled").complete


def test_more_than_asked_for_is_told() -> None:
    traced = Traced()
    traced.publish(*(b"%d" % number for number in range(5)))
    found = traced.ask(count_max=3)
    assert ([m["offset"] for m in found.messages], found.complete) == ([0, 1, 2], False)
    assert traced.ask(count_max=5).complete
    assert traced.refused(count_max=0) == "invalid_request"
    assert traced.refused(count_max=100_000) == "invalid_request"


def test_an_answer_fits_the_head_of_a_message() -> None:
    traced = Traced()
    for number in range(20):
        traced.publish(b"%d" % number, keys=[bytes(64 * 1024)])
    found = traced.ask()
    assert 5 < len(found.messages) < 20
    assert not found.complete
    assert len(encode_reply(found)) < HEADER_BYTES_MAX


def test_a_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced()
    for number in range(10):
        traced.publish(bytes(2000), keys=[b"%d" % number])
    monkeypatch.setattr(trace_search.Budget.__init__, "__defaults__", (10_000, 5.0))
    cut = traced.ask(key=b"9")
    assert (cut.messages, cut.complete) == ([], False)
    monkeypatch.setattr(trace_search.Budget.__init__, "__defaults__", (1 << 30, 5.0))
    assert traced.ask(key=b"9").complete


def test_a_search_that_takes_long_ends_early() -> None:
    budget = trace_search.Budget(seconds_max=-1.0)
    assert not all(budget.spend(1) for _ in range(300))
    assert not budget.complete


def test_only_within_the_time_that_traces_are_kept() -> None:
    traced = Traced()
    traced.publish(b"a", keys=[b"k"])
    traced.broker.clock.set_us(traced.now_us + 7 * 86_400_000_000 + 1)
    assert traced.ask(key=b"k").messages == []
    assert traced.one(key=b"k", full=True)["offset"] == 0
    assert traced.one(partition=0, offset=0)["offset"] == 0


def test_places_that_are_not_there() -> None:
    traced = Traced()
    traced.publish(b"a")
    assert traced.refused(partition=0, offset=1) == "not_found"
    assert traced.refused(partition=0, offset=-1) == "not_found"
    assert traced.refused(partition=7, offset=0) == "not_found"
    assert traced.refused(offset=0) == "invalid_request"
    reply = traced.broker.ask(Trace("nowhere"))
    assert isinstance(reply, Refusal)
    assert reply.code == "not_found"


def test_a_collected_message_is_shown_while_its_bytes_are_there() -> None:
    traced = Traced()
    traced.do(Enlist("g", SHARED))
    traced.publish(b"a", keys=[b"k"])
    traced.publish(b"b")
    traced.broker.clock.set_us(traced.now_us + 5_000_000)
    traced.broker.ask(TrimTopic("t", 0, 1))
    trimmed_us = traced.now_us
    found = traced.one(key=b"k")
    assert events(found) == ["published", "appended", "collected"]
    assert found["events"][-1]["time_us"] == trimmed_us
    assert found["status"] == "collected"
    for offset in (2, 2):
        traced.publish(b"c")
        traced.broker.ask(TrimTopic("t", 0, offset))
        traced.broker.runtime().upkeep.save_snapshot()
        traced.broker.settle()
    traced.publish(b"d")
    traced.broker.ask(TrimTopic("t", 0, 3))
    assert traced.ask(key=b"k").messages == []
    assert traced.refused(partition=0, offset=0) == "not_found"


STAGED_AND_DELAYED = [
    (30, 10, ["published", "staged", "scheduled", "released"]),
    (300, 200, ["published", "staged", "scheduled", "released"]),
    (5, 10, ["published", "staged", "applied"]),
]


def test_a_staged_message(traced: Traced) -> None:
    def stage(attempt: str, value: bytes) -> bytes:
        ids = arrow.make_ids(1, traced.now_us // 1000, hash(attempt) & 0xFFFF, 5)
        bits, body = arrow.encode([value], ids=ids, timestamps=traced.now_us)
        traced.broker.ask(StageRows("t", 0, "w", attempt, bits, crc32c(body)), body)
        return ids

    won, lost = stage("x", b"1"), stage("y", b"2")
    assert traced.one(id=won)["status"] == "staged"
    traced.broker.pass_s(10)
    traced.publish(b"between")
    traced.broker.ask(DecideStaged("w", 3, [("t", 0, "x")]))
    traced.broker.ask(DecideStaged("w", 3, [("t", 0, "y")]))
    found = traced.one(id=won)
    assert events(found) == ["published", "staged", "applied"]
    assert (found["events"][2]["writer"], found["events"][2]["version"], found["offset"]) == ("w", 3, 1)
    by_place = traced.one(partition=0, offset=1)
    assert by_place["events"] == found["events"]
    dropped = traced.one(id=lost)
    assert (events(dropped), dropped["status"]) == (["published", "staged", "dropped"], "dropped")
    assert dropped["offset"] is None


@pytest.mark.parametrize(("delay_s", "wait_s", "story"), STAGED_AND_DELAYED)
def test_a_staged_message_with_a_delay(traced: Traced, delay_s: int, wait_s: int, story: list[str]) -> None:
    ids = arrow.make_ids(1, traced.now_us // 1000, 99, 5)
    due_us = traced.now_us + delay_s * 1_000_000
    bits, body = arrow.encode([b"1"], ids=ids, timestamps=traced.now_us, deliver_at=[due_us])
    traced.broker.ask(StageRows("t", 0, "w", "x", bits, crc32c(body)), body)
    traced.broker.pass_s(wait_s)
    assert traced.one(id=ids)["status"] == "staged"
    traced.broker.ask(DecideStaged("w", 3, [("t", 0, "x")]))
    if delay_s > wait_s:
        waiting = traced.one(id=ids)
        assert (waiting["status"], events(waiting)) == ("scheduled", story[:-1])
        assert (waiting["events"][2]["writer"], waiting["events"][2]["deliver_at_us"]) == ("w", due_us)
        traced.broker.pass_s(delay_s - wait_s)
    found = traced.one(id=ids)
    assert (events(found), found["offset"], found["status"]) == (story, 0, "free")
    by_place = traced.one(partition=0, offset=0)
    assert events(by_place) == story
    assert [event["time_us"] for event in by_place["events"]] == [e["time_us"] for e in found["events"]]


def test_a_delayed_message(traced: Traced) -> None:
    due_us = traced.now_us + 30_000_000
    reply = traced.publish(b"a", b"b", deliver_at=[due_us, due_us])
    assert isinstance(reply, Published), reply
    scheduled = traced.one(id=traced.ids[0])
    assert (events(scheduled), scheduled["status"]) == (["published", "scheduled"], "scheduled")
    assert scheduled["events"][1]["deliver_at_us"] == due_us
    traced.broker.ask(CancelScheduled("t", 0, [traced.ids[1]]))
    traced.publish(b"c")
    traced.broker.pass_s(120)
    found = traced.one(id=traced.ids[0])
    assert (events(found), found["offset"]) == (["published", "scheduled", "released"], 1)
    assert found["events"][2]["time_us"] >= due_us
    assert traced.one(partition=0, offset=1)["events"] == found["events"]
    cancelled = traced.one(id=traced.ids[1])
    assert (events(cancelled), cancelled["status"]) == (["published", "scheduled", "cancelled"], "cancelled")


def test_traces_wait_for_each_other_and_not_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_verbs, "WAITING_MAX", 2)
    traced = Traced()
    traced.publish(b"a")
    traced.broker.threads.holding = True
    answers = [traced.broker.submit(Trace("t", 0, 0)) for _ in range(4)]
    assert [bool(answer) for answer in answers] == [False, False, False, True]
    ((refusal, _),) = answers[3]
    assert isinstance(refusal, Refusal)
    assert refusal.code == "overloaded"
    for _ in range(3):
        assert len(traced.broker.threads.held) == 1
        traced.broker.threads.run_held(1)
        traced.broker.settle()
    assert all(isinstance(answer[0][0], TraceFound) for answer in answers[:3])


def test_what_is_not_committed_is_not_shown() -> None:
    traced = Traced()
    traced.publish(b"a")
    found: list[Any] = []
    source = trace_verbs.source_of("t", 0, traced.broker.runtime())
    traced.publish(b"b")
    wanted = trace_verbs.wanted_of(Trace("t"), traced.now_us, 7 * 86_400_000_000)
    found += trace_search.search(wanted, source, trace_search.Budget())
    assert [message["offset"] for message in found] == [0]


def test_a_dead_letter_names_its_origin() -> None:
    traced = Traced()
    headers = [[("tailrace-origin-topic", b"o"), ("tailrace-origin-offset", b"4"), ("tailrace-group", b"g")]]
    traced.publish(b"a", headers=headers)
    assert traced.one(partition=0, offset=0)["origin"] == {"topic": "o", "offset": "4"}
