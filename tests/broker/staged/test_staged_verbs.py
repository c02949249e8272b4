"""Staged writes at work: all or nothing, once, whatever crashes between any two steps.

Also covers `broker/partition/staged_reads.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.broker.partition import staged_reads
from tailrace.core.model.commands import AlterTopic, DeleteTopic, Done, Reply, TrimTopic
from tailrace.core.model.identifiers import Refusal, hash128
from tailrace.core.model.internal_topic import TOPIC, home_of
from tailrace.core.model.queue_commands import (
    AbortStaged,
    CancelScheduled,
    DecideStaged,
    ListScheduled,
    StagedDecision,
    StageRows,
)
from tailrace.core.staged.staged_batches import attempt_number
from tailrace.errors import Full, StorageFault
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tests.broker.held_engine import HeldEngine

HOUR_S = 3600


class Writer:
    """A writer of staged batches, and what it sees of the broker."""

    def __init__(self, broker: HeldEngine, name: str = "w") -> None:
        self.broker = broker
        self.name = name

    def stage(self, topic: str, attempt: str, *values: bytes, number: int = 0, **fields: Any) -> Any:
        names = ("keys", "dedup_ids", "deliver_at", "priorities")
        body_fields = {name: fields.pop(name) for name in names if name in fields}
        now_us = self.broker.clock.now_us()
        ids = fields.pop("ids", bytes(16 * len(values)))
        columns, body = arrow.encode(list(values), ids=ids, timestamps=now_us, **body_fields)
        crc = fields.pop("crc", crc32c(body))
        partition = fields.pop("partition", 0)
        request = StageRows(topic, partition, self.name, attempt, columns, crc, number)
        return self.broker.ask(request, body)

    def request(self, version: int, *attempts: tuple[str, str]) -> DecideStaged:
        return DecideStaged(self.name, version, [(topic, 0, attempt) for topic, attempt in attempts])

    def decide(self, version: int, *attempts: tuple[str, str]) -> Any:
        return self.broker.ask(self.request(version, *attempts))

    def abort(self, *attempts: tuple[str, str]) -> Any:
        return self.broker.ask(AbortStaged(self.name, [(topic, 0, attempt) for topic, attempt in attempts]))


def broker_with(*topics: str) -> HeldEngine:
    broker = HeldEngine()
    for topic in topics:
        broker.create(topic)
    return broker


def staged_bytes(broker: HeldEngine, topic: str) -> int:
    return broker.runtime(topic).state.staging.nbytes


def pending(broker: HeldEngine) -> int:
    return sum(len(list(home.state.staged.pending())) for home in broker.engine.coordinators.runtimes())


def code(reply: Any) -> str | None:
    return reply.code if isinstance(reply, Refusal) else None


def test_nothing_is_readable_before_the_decision_and_all_of_it_after() -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    assert writer.stage("a", "x", b"1", b"2") == Done()
    assert writer.stage("a", "x", b"3", number=1) == Done()
    assert writer.stage("b", "x", b"4") == Done()
    assert broker.values("a") == broker.values("b") == []
    reply = writer.decide(1, ("a", "x"), ("b", "x"))
    assert reply == StagedDecision(1, [("a", 0, "x"), ("b", 0, "x")], True, True)
    assert broker.values("a") == [b"1", b"2", b"3"]
    assert broker.values("b") == [b"4"]
    assert staged_bytes(broker, "a") == pending(broker) == 0


def test_staged_and_published_messages_share_the_log() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    broker.publish(b"before", topic="a")
    writer.stage("a", "x", b"staged")
    broker.publish(b"between", topic="a")
    writer.decide(1, ("a", "x"))
    broker.publish(b"after", topic="a")
    assert broker.values("a") == [b"before", b"between", b"staged", b"after"]
    broker.restart()
    assert broker.values("a") == [b"before", b"between", b"staged", b"after"]


def test_of_two_attempts_of_a_version_one_wins_and_the_other_is_dropped() -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    writer.stage("a", "x", b"x")
    writer.stage("a", "y", b"y")
    writer.stage("b", "y", b"y")
    assert writer.decide(7, ("a", "x")).won
    lost = writer.decide(7, ("a", "y"), ("b", "y"))
    assert lost == StagedDecision(7, [("a", 0, "x")], False, True)
    assert broker.values("a") == [b"x"]
    assert broker.values("b") == []
    assert staged_bytes(broker, "a") == staged_bytes(broker, "b") == 0


def test_racing_decisions_have_one_winner() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    for attempt in "xyz":
        writer.stage("a", attempt, attempt.encode())
    broker.threads.holding = True
    answers = [broker.submit(writer.request(1, ("a", attempt))) for attempt in "xyz"]
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    replies = [reply for ((reply, _),) in answers]
    assert sorted(reply.won for reply in replies) == [False, False, True]
    assert len(broker.values("a")) == 1
    assert staged_bytes(broker, "a") == 0


def test_an_answer_that_got_lost_is_given_again() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    first = writer.decide(1, ("a", "x"))
    assert writer.decide(1, ("a", "x")) == first
    broker.restart()
    assert writer.decide(1, ("a", "x")) == first
    assert broker.values("a") == [b"1"]


def test_the_same_decision_twice_at_once_applies_once() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    broker.threads.holding = True
    answers = [broker.submit(writer.request(1, ("a", "x"))) for _ in range(3)]
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert [reply.won for ((reply, _),) in answers] == [True] * 3
    assert broker.values("a") == [b"1"]


def test_what_is_not_staged_as_said_cannot_be_decided() -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    assert code(writer.decide(1, ("a", "x"), ("b", "x"))) == "not_found"
    assert code(broker.ask(DecideStaged("w", 1, [("a", 0, "x")], [2]))) == "not_found"
    assert code(writer.decide(1, ("a", "x"), ("nowhere", "x"))) == "not_found"
    assert code(broker.ask(DecideStaged("w", 1, [("a", 5, "x")]))) == "not_found"
    assert broker.values("a") == []
    assert broker.ask(DecideStaged("w", 1, [("a", 0, "x")], [1])).won


def test_a_version_without_messages_is_decided() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    assert writer.decide(3) == StagedDecision(3, [], True, True)
    writer.stage("a", "x", b"1")
    assert not writer.decide(3, ("a", "x")).won
    assert writer.decide(4) == StagedDecision(4, [], True, True)


def test_an_abort_drops_what_is_undecided_and_nothing_else() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    assert writer.abort(("a", "x")) == Done()
    writer.stage("a", "x", b"1")
    writer.stage("a", "y", b"2")
    assert writer.abort(("a", "x"), ("nowhere", "x")) == Done()
    assert code(writer.decide(1, ("a", "x"))) == "not_found"
    broker.threads.holding = True
    answers = broker.submit(writer.request(1, ("a", "y")))
    aborted = broker.submit(AbortStaged("w", [("a", 0, "y")]))
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert answers[0][0].won  # type: ignore[union-attr]
    assert aborted == [(Done(), b"")]
    assert broker.values("a") == [b"2"]
    assert writer.abort(("a", "y")) == Done()
    assert broker.values("a") == [b"2"]


def test_undecided_attempts_expire_and_decided_ones_never() -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    writer.stage("b", "x", b"1")
    writer.stage("b", "old", b"0")
    broker.log("a").fail_next(StorageFault("the disk failed because the test asked for it"))
    broker.publish(b"p", topic="a")
    reply = broker.ask(writer.request(1, ("b", "x")))
    assert reply.applied
    writer.stage("b", "y", b"2")
    broker.pass_s(HOUR_S + 120)
    assert staged_bytes(broker, "b") == 0
    assert code(writer.decide(2, ("b", "y"))) == "not_found"
    assert code(writer.stage("b", "y", b"3", number=1)) == "not_found"
    assert broker.values("b") == [b"1"]


def test_what_is_staged_expires_though_nobody_ever_decided() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    assert not broker.engine.coordinators.runtimes()
    broker.pass_s(HOUR_S - 61)
    assert staged_bytes(broker, "a") > 0
    broker.pass_s(300)
    assert staged_bytes(broker, "a") == 0


def test_who_waits_for_a_coordinator_that_fails_is_refused() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    writer.decide(0)
    writer.stage("a", "x", b"1")
    broker.threads.holding = True
    answers = broker.submit(writer.request(1, ("a", "x")))
    home = broker.engine.coordinators.runtimes()[home_of("w")]
    home.fail(Full("no space is left because the test asked for it"))
    ((reply, _),) = answers
    assert isinstance(reply, Refusal)
    assert (reply.code, reply.outcome) == ("unavailable", "unknown")
    assert code(writer.decide(1, ("a", "x"))) == "full"
    broker.threads.holding = False
    broker.threads.run_held()
    broker.pass_s(2)
    assert writer.decide(1, ("a", "x")).applied
    assert broker.values("a") == [b"1"]


def test_a_decided_attempt_outlives_a_long_outage_of_its_target() -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    writer.stage("b", "x", b"2")
    broker.threads.holding = True
    answers = broker.submit(writer.request(1, ("a", "x"), ("b", "x")))
    steps = 0
    while not pending(broker):
        broker.threads.run_held(1)
        broker.settle()
        steps += 1
        assert steps < 20
    broker.log("a").fail_next(Full("no space is left because the test asked for it"))
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    ((reply, _),) = answers
    assert reply == StagedDecision(1, [("a", 0, "x"), ("b", 0, "x")], True, False)
    assert broker.values("a") == []
    assert broker.values("b") == [b"2"]
    assert code(writer.decide(2)) == "unavailable", "versions are applied in order"
    assert writer.decide(1, ("a", "x"), ("b", "x")).applied is False
    writer.abort(("a", "x"))
    broker.clock.set_us(broker.clock.now_us() + 2 * HOUR_S * 1_000_000)
    broker.runtime("b").report_expired()
    broker.runtime("a").report_expired()
    broker.pass_s(5)
    assert broker.values("a") == [b"1"]
    assert pending(broker) == 0
    assert writer.decide(2).won


def test_a_deleted_target_does_not_hold_up_the_writer() -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    writer.stage("b", "x", b"2")
    broker.threads.holding = True
    broker.submit(writer.request(1, ("a", "x"), ("b", "x")))
    while not pending(broker):
        broker.threads.run_held(1)
        broker.settle()
    broker.submit(DeleteTopic("a"))
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    broker.pass_s(1)
    assert broker.values("b") == [b"2"]
    assert pending(broker) == 0


def test_a_target_that_is_only_unknown_is_waited_for() -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    writer.stage("b", "x", b"2")
    broker.threads.holding = True
    broker.submit(writer.request(1, ("a", "x"), ("b", "x")))
    while not pending(broker):
        broker.threads.run_held(1)
        broker.settle()
    known = broker.engine.topics._hosts.pop("a")  # As with an older catalog.
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    broker.pass_s(1)
    assert pending(broker) == 1
    broker.engine.topics._hosts["a"] = known
    broker.pass_s(60)
    assert pending(broker) == 0
    assert broker.values("a") == [b"1"]


def test_nothing_is_dropped_while_a_coordinator_cannot_say_what_it_decided() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    writer.decide(0)
    writer.stage("a", "x", b"1")
    broker.engine.coordinators.runtimes()[home_of("w")].fault = Refusal("corrupt", "the test says so")
    assert code(writer.abort(("a", "x"))) == "unavailable"
    assert code(writer.decide(1, ("a", "x"))) == "unavailable"
    broker.pass_s(2 * HOUR_S)
    assert staged_bytes(broker, "a") > 0


def test_bodies_are_proved_as_those_of_a_publish() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    assert code(writer.stage("a", "x", b"1", crc=0)) == "invalid_request"
    bad = b"no batch at all"
    assert code(broker.ask(StageRows("a", 0, "w", "x", 0, crc32c(bad)), bad)) == "invalid_request"
    assert code(writer.stage("a", "x", b"1", dedup_ids=[b"d"])) == "invalid_request"
    assert code(writer.stage("a", "x", bytes(2 << 20))) == "too_large"
    assert code(writer.stage(TOPIC, "x", b"1")) == "not_found"
    writer.decide(0)
    assert code(writer.stage(TOPIC, "x", b"1")) == "denied"
    assert staged_bytes(broker, "a") == 0


def test_keys_are_in_the_index_once_they_are_applied() -> None:
    broker = HeldEngine()
    broker.create("a", key_index=True)
    writer = Writer(broker)
    writer.stage("a", "x", b"1", b"2", keys=[b"k", b"k"])
    keys = broker.runtime("a").state.keys
    assert keys is not None
    assert keys.count(*hash128(b"k")) == 0
    writer.decide(1, ("a", "x"))
    assert keys.count(*hash128(b"k")) == 2
    broker.restart()
    again = broker.runtime("a").state.keys
    assert again is not None
    assert again.count(*hash128(b"k")) == 2
    broker.runtime("a").state.check()


def test_large_versions_are_read_back_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "READ_BYTES_MAX", 3000)
    broker = HeldEngine()
    topics = [f"t{number}" for number in range(5)]
    for topic in topics:
        broker.create(topic)
    writer = Writer(broker)
    for topic in topics:
        writer.stage(topic, "x", bytes(2000))
    assert writer.decide(1, *((topic, "x") for topic in topics)).applied
    assert all(broker.values(topic) == [bytes(2000)] for topic in topics)


def test_many_targets_in_groups() -> None:
    broker = HeldEngine()
    broker.create("a", partitions=30)
    writer = Writer(broker)
    attempts = [f"task-{task}" for task in range(4)]
    for attempt in attempts:
        for partition in range(30):
            writer.stage("a", attempt, attempt.encode(), partition=partition)
    grouped = [(attempt, "a", list(range(30))) for attempt in attempts]
    lost = [("other", "a", [3, 4])]
    writer.stage("a", "other", b"lost", partition=3)
    assert code(broker.ask(DecideStaged("w", 1, [], [2] * 120, grouped))) == "not_found"
    assert broker.ask(DecideStaged("w", 1, [], [1] * 120, grouped)).applied
    assert [broker.values("a", partition) for partition in range(30)] == [
        [attempt.encode() for attempt in attempts]
    ] * 30
    assert broker.ask(AbortStaged("w", [], lost)) == Done()
    assert all(runtime.state.staging.nbytes == 0 for runtime in broker.engine.topics.get("a").runtimes)
    broker.restart()
    assert broker.ask(DecideStaged("w", 1, [], [1] * 120, grouped)).won


# ------------------------------------------------------------------------------------------------ delays

SECOND_US = 1_000_000


def test_delayed_messages_of_a_version_come_when_they_are_due() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    now_us = broker.clock.now_us()
    later = [now_us + seconds * SECOND_US for seconds in (20, 0, 5, 20)]
    writer.stage("a", "x", b"20", b"0", b"5", b"20 too", deliver_at=later)
    writer.stage("a", "x", b"plain", number=1)
    broker.pass_s(1)
    assert writer.decide(1, ("a", "x")).applied
    assert broker.values("a") == [b"0", b"plain"]
    broker.pass_s(3.5)
    assert broker.values("a") == [b"0", b"plain"]
    broker.restart()
    broker.pass_s(1)
    assert broker.values("a") == [b"0", b"plain", b"5"]
    assert staged_bytes(broker, "a") == 0
    broker.runtime("a").upkeep.save_snapshot()
    broker.settle()
    broker.restart()
    broker.pass_s(20)
    assert broker.values("a") == [b"0", b"plain", b"5", b"20", b"20 too"]
    broker.runtime("a").state.check()


def test_a_delayed_message_that_was_staged_can_be_cancelled_and_listed() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    at_us = broker.clock.now_us() + 10 * SECOND_US
    ids = arrow.make_ids(2, broker.clock.now_us() // 1000, 3, 3)
    writer.stage("a", "x", b"1", b"2", deliver_at=[at_us, at_us], ids=ids)
    assert broker.ask(CancelScheduled("a", 0, [ids[:16]])).done == [False], "not before the decision"
    writer.decide(1, ("a", "x"))
    assert [message["value"] for message in broker.ask(ListScheduled("a")).messages] == [b"1", b"2"]
    assert broker.ask(CancelScheduled("a", 0, [ids[:16]])).done == [True]
    broker.pass_s(11)
    assert broker.values("a") == [b"2"]


def test_batches_of_which_only_some_rows_are_due_are_parted_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    now_us = broker.clock.now_us()
    times = [now_us + 5 * SECOND_US, now_us]
    for number in range(3):
        value = b"%d" % number
        writer.stage("a", "x", value + b" late", value, number=number, deliver_at=times, priorities=[1, 2])
    runtime = broker.runtime("a")
    frames = runtime.log.read_entries(runtime.state.staging.entries([attempt_number("w", "x")]))
    room = sum(header.length for header, _ in frames[:2])
    monkeypatch.setattr(staged_reads, "PARTED_BYTES_MAX", room)
    parts = staged_reads.parted(frames, False, now_us)
    assert [part.count for part, _, _ in parts] == [1, 1, 1, 1, 2]
    assert all(part.nbytes == len(body) and crc == crc32c(body) for part, crc, body in parts)
    writer.decide(1, ("a", "x"))
    broker.pass_s(0.02)
    assert broker.values("a") == [b"0", b"1", b"2"], "the third was released at the next tick"
    broker.pass_s(6)
    assert broker.values("a") == [b"0", b"1", b"2", b"0 late", b"1 late", b"2 late"]


@pytest.mark.parametrize("crash_after", range(10))
def test_a_crash_between_any_two_steps_with_delays(crash_after: int) -> None:
    broker = broker_with("a", "b")
    writer = Writer(broker)
    writer.decide(0)
    now_us = broker.clock.now_us()
    for topic in "ab":
        writer.stage(topic, "x", b"now", b"late", deliver_at=[now_us, now_us + 5 * SECOND_US])
    broker.threads.holding = True
    broker.submit(writer.request(1, ("a", "x"), ("b", "x")))
    for _ in range(crash_after):
        broker.threads.run_held(1)
        broker.settle()
    broker.threads.holding = False
    broker.restart()
    broker.settle()
    assert broker.values("a") == broker.values("b")
    assert broker.values("a") in ([], [b"now"])
    assert writer.decide(1, ("a", "x"), ("b", "x")).won
    assert broker.values("a") == broker.values("b") == [b"now"]
    broker.restart()
    broker.pass_s(5)
    for _ in range(2):
        assert broker.values("a") == broker.values("b") == [b"now", b"late"]
        broker.restart()
        broker.pass_s(1)


def decide_and_crash(crash_after: int, *, snapshot: bool) -> tuple[HeldEngine, Writer, list[Any]]:
    """Stage on two topics, begin to decide, and end the process after so many pieces of storage work."""
    broker = broker_with("a", "b")
    writer = Writer(broker)
    broker.publish(b"p", topic="a")
    writer.decide(0)  # so that the coordinators are there
    writer.stage("a", "x", b"1", b"2")
    writer.stage("b", "x", b"3")
    writer.stage("b", "x", b"4", number=1)
    if snapshot:
        for topic in "ab":
            broker.runtime(topic).upkeep.save_snapshot()
        broker.settle()
    broker.threads.holding = True
    answers: list[Any] = broker.submit(writer.request(1, ("a", "x"), ("b", "x")))
    for _ in range(crash_after):
        broker.threads.run_held(1)
        broker.settle()
    broker.threads.holding = False
    broker.restart()
    broker.settle()
    return broker, writer, answers


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("crash_after", range(10))
def test_a_crash_between_any_two_steps_leaves_all_or_nothing(crash_after: int, snapshot: bool) -> None:
    broker, writer, answers = decide_and_crash(crash_after, snapshot=snapshot)
    before = broker.values("a"), broker.values("b")
    assert before in (([b"p"], []), ([b"p", b"1", b"2"], [b"3", b"4"])), (
        "rolled forward by itself, or not at all"
    )
    if answers:
        assert before[1], "what was told is so"
    assert pending(broker) == 0
    retry: Reply = writer.decide(1, ("a", "x"), ("b", "x"))
    assert isinstance(retry, StagedDecision)
    assert retry.won
    other = writer.decide(1, ("a", "y"))
    assert not other.won
    for _ in range(2):
        assert broker.values("a") == [b"p", b"1", b"2"]
        assert broker.values("b") == [b"3", b"4"]
        assert staged_bytes(broker, "a") == staged_bytes(broker, "b") == 0
        broker.restart()
        broker.settle()


def test_the_crashes_above_reach_every_step() -> None:
    told = [bool(decide_and_crash(steps, snapshot=False)[2]) for steps in range(10)]
    assert told[0] is False
    assert told[-1] is True


@pytest.mark.parametrize("crash_after", range(1, 10, 2))
def test_a_crash_while_rolling_forward_again(crash_after: int) -> None:
    broker, writer, _ = decide_and_crash(5, snapshot=False)
    broker.threads.holding = True
    broker.restart()
    for _ in range(crash_after):
        broker.threads.run_held(1)
        broker.settle()
    broker.threads.holding = False
    broker.restart()
    broker.settle()
    assert writer.decide(1, ("a", "x"), ("b", "x")).won
    assert broker.values("a") == [b"p", b"1", b"2"]
    assert broker.values("b") == [b"3", b"4"]


def test_the_next_versions_follow_after_a_crash() -> None:
    broker, writer, _ = decide_and_crash(4, snapshot=False)
    writer.decide(1, ("a", "x"), ("b", "x"))
    for version in (2, 3):
        writer.stage("a", f"v{version}", b"%d" % version)
        assert writer.decide(version, ("a", f"v{version}")).won
    assert broker.values("a") == [b"p", b"1", b"2", b"2", b"3"]


def test_a_trim_leaves_what_is_staged() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    writer.stage("a", "x", b"kept")
    for number in range(3):
        broker.publish(b"%d" % number, topic="a")
    runtime = broker.runtime("a")
    for offset in (1, 2, 3):
        broker.ask(TrimTopic("a", 0, offset))
    assert runtime.state.start_offset == 3
    assert writer.decide(1, ("a", "x")).applied
    assert broker.values("a", offset=3) == [b"kept"]


def test_a_topic_that_grows_meanwhile_is_no_matter() -> None:
    broker = broker_with("a")
    writer = Writer(broker)
    writer.stage("a", "x", b"1")
    broker.ask(AlterTopic("a", {"partitions": 2}))
    writer.stage("a", "x", b"2", partition=1)
    reply = broker.ask(DecideStaged("w", 1, [("a", 0, "x"), ("a", 1, "x")]))
    assert reply.applied
    assert broker.values("a", partition=1) == [b"2"]
