"""Random lives of a partition: answers are the oracle's, and every way to rebuild the state agrees."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model.commands import Claimed, ClaimProducer, Publish, TrimTopic
from tailrace.core.model.facts import Appended, Fact
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import PublishBatch, Sweep
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tests.core.oracle import IDLE_US, Oracle, Row, offsets_of, view_of
from tests.core.turns import at

T0 = 1_700_000_000_000_000
WINDOW_MS = 100
OPTIONS = TopicOptions(key_index=True, key_index_max=6, dedup_window_ms=WINDOW_MS, dedup_max=8)
PRODUCERS_MAX = 3

ROWS = st.builds(Row, st.none() | st.sampled_from("abcdefgh"), st.none() | st.sampled_from("123456789xyz"))
PLAIN = st.just(Row())
STEPS = st.sampled_from(
    [0, 0, 1, 1000, WINDOW_MS * 1000 - 1, WINDOW_MS * 1000, -5_000_000, IDLE_US, IDLE_US + 1]
)


class Try(msgspec.Struct, frozen=True):
    """A publish in relative terms, so that most of them come close to the rules they test."""

    rows: list[Row]
    name: int
    epoch: int
    step: int
    expect: int | None
    expect_keys: list[int | None] | None


TRIES = st.builds(
    Try,
    st.lists(ROWS, min_size=1, max_size=5) | st.lists(PLAIN, min_size=1, max_size=3),
    st.integers(0, 4),
    st.sampled_from([0, 0, 0, -1, 1]),
    st.sampled_from([0, 0, 0, 0, -1, -2, -17, 1, 2]),
    st.none() | st.none() | st.sampled_from([0, 0, -1, 1]),
    st.none() | st.lists(st.none() | st.sampled_from([0, 0, 1, -1]), min_size=5, max_size=5),
)
CLAIMS = st.builds(ClaimProducer, st.just("t"), st.just(0), st.integers(1, 4))
TRIMS = st.builds(TrimTopic, st.just("t"), st.just(0), st.integers(0, 20)) | st.builds(
    Sweep, st.integers(0, 20)
)
# A least size, because lists are short otherwise and short lives meet few rules.
LIVES = st.lists(st.tuples(STEPS, TRIES | TRIES | TRIES | CLAIMS | TRIMS), min_size=20, max_size=60)


def fresh() -> Partition:
    partition = Partition(OPTIONS)
    partition.producers.capacity = PRODUCERS_MAX
    return partition


def restored(chunks: list[Any]) -> Partition:
    partition = Partition.restore(OPTIONS, chunks)
    partition.producers.capacity = PRODUCERS_MAX
    return partition


def expand(attempt: Try, oracle: Oracle) -> tuple[Try, Publish]:
    """The publish that an attempt means at this moment; a retry has the rows that it had the first time."""
    writer = oracle.writers.get(attempt.name)
    epoch = max((writer.epoch if writer else 0) + attempt.epoch, 0)
    done = len(writer.results) if writer and epoch == writer.epoch else 0
    producer = (attempt.name, epoch, max(done + attempt.step, 0)) if attempt.name else (0, 0, 0)
    if writer and attempt.name and producer[2] < done:
        attempt = msgspec.structs.replace(attempt, rows=writer.batches[producer[2]], expect_keys=None)
    expected = 0 if attempt.expect is None else max(oracle.end + 1 + attempt.expect, 1)
    keys: list[int] | None = None
    if attempt.expect_keys is not None:
        keys, counts = [], dict(oracle.keys)
        for row, shift in zip(attempt.rows, attempt.expect_keys, strict=False):
            at = counts.get(row.key or "", 0)
            keys.append(-1 if shift is None or row.key is None else max(at + shift, -1))
            counts[row.key or ""] = at + 1
    return attempt, Publish("t", 0, 0, 0, *producer, expected, keys)


def play(partition: Partition, oracle: Oracle, command: Any, now_us: int) -> list[Appended | Fact]:
    """One command on both; returns the facts."""
    before = partition.snapshot()
    if isinstance(command, Try):
        command, publish = expand(command, oracle)
        producer = publish.producer_id, publish.producer_epoch, publish.producer_sequence
        decision = partition.decide(PublishBatch(publish, view_of(command.rows)), at(now_us))
        wanted = oracle.publish(
            command.rows, now_us, producer, publish.expected_sequence, publish.expected_key_sequences
        )
        compare(offsets_of(decision.reply, len(command.rows)), wanted)
        appended = [fact for fact in decision.facts if isinstance(fact, Appended)]
        kept = len(command.rows) if decision.keep is None else len(decision.keep)
        assert [fact.view.count for fact in appended] == ([kept] if appended else [])
    elif isinstance(command, ClaimProducer):
        decision = partition.decide(command, at(now_us))
        reply = decision.reply
        answer = (
            reply.code if isinstance(reply, Refusal) else reply.epoch if isinstance(reply, Claimed) else None
        )
        assert answer == oracle.claim(command.producer_id, now_us)
    else:
        decision = partition.decide(command, at(now_us))
        offset = (
            command.offset if isinstance(command, TrimTopic) else min(command.retention_offset, oracle.end)
        )
        assert isinstance(decision.reply, Refusal) == (offset > oracle.end)
        if offset <= oracle.end:
            oracle.start = max(oracle.start, offset)
    assert partition.snapshot() == before, "decide only reads"
    if isinstance(decision.reply, Refusal):
        assert decision.facts == ()
        assert decision.reply.outcome == "none"
    for fact in decision.facts:
        partition.apply(fact)
    return list(decision.facts)


def compare(found: list[int] | str, wanted: list[int] | str) -> None:
    """Equal; but a retry of a batch whose duplicates are forgotten may say "stored, place not known"."""
    if found != wanted:
        assert isinstance(found, list)
        assert isinstance(wanted, list)
        assert all(a in (b, -1) for a, b in zip(found, wanted, strict=True)), (found, wanted)
        assert -1 in found


def stored(fact: Appended | Fact) -> Appended | Fact:
    """A fact as it comes back from the log; sizes of single messages are not kept there."""
    if not isinstance(fact, Appended):
        decoded: Fact = msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=Fact)
        return decoded
    view = msgspec.structs.replace(fact.view, key_bytes_max=0, header_bytes_max=0, value_bytes_max=0)
    return msgspec.structs.replace(fact, view=view)


@given(LIVES, st.integers(0, 40))
def test_a_partition_lives_as_the_oracle_says_and_can_be_rebuilt(life: list[Any], cut: int) -> None:
    partition, now_us = fresh(), T0
    oracle = Oracle(WINDOW_MS * 1000, OPTIONS.dedup_max, OPTIONS.key_index_max, PRODUCERS_MAX)
    facts: list[Appended | Fact] = []
    middle, rest = partition.snapshot(), 0
    for number, (step, command) in enumerate(life):
        if number == cut:
            middle, rest = partition.snapshot(), len(facts)
        now_us += step
        facts += play(partition, oracle, command, now_us)
        partition.check()
        assert (partition.start_offset, partition.end_offset) == (oracle.start, oracle.end)
        assert partition.append_time_us == oracle.time_us

    replayed, resumed = fresh(), restored(middle)
    for fact in facts:
        replayed.apply(stored(fact))
    for fact in facts[rest:]:
        resumed.apply(stored(fact))
    assert replayed.snapshot() == partition.snapshot()
    assert resumed.snapshot() == partition.snapshot()
    for other in (replayed, resumed):
        other.check()
