"""Facts as frames: what a decision says of a batch is what a replay finds, also where rows are left out."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.broker.runtime.framing import TurnFrames, facts_of, publish_batch
from tailrace.core.model.commands import Publish
from tailrace.core.model.facts import Appended, Delayed, Fact
from tailrace.core.model.internal_commands import PublishBatch
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.format import batch as arrow
from tailrace.format import codec, frame
from tests.core.turns import at

T0 = 1_700_000_000_000_000
decode = codec.facts_decoder(Fact)


def published(partition: Partition, values: list[bytes], **columns: Any) -> tuple[list[Any], list[Any]]:
    """The facts of a publish as they were decided, and as they are read back from their frames."""
    ids = arrow.make_ids(len(values), T0 // 1000, 7, 7)
    bits, body = arrow.encode(values, ids=ids, timestamps=T0, **columns)
    publish = Publish("t", 0, bits, frame.crc32c(body))
    view, _ = arrow.open_body(body, bits)
    command = publish_batch(publish, view, body)
    made = TurnFrames(0, 0, T0, T0)
    decision = partition.decide(command, at(T0))
    made.add(decision, command, body)
    made.flush()
    for fact in decision.facts:
        partition.apply(fact)
    again = [
        fact
        for item in made.frames
        for fact in facts_of(item.header, item.body, want_keys=False, decode=decode)
    ]
    return list(decision.facts), again


def sizes(facts: list[Any]) -> list[tuple[type, int, int]]:
    return [(type(fact), fact.view.count, fact.view.nbytes) for fact in facts]


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        ({}, [(Appended, 3)]),
        ({"dedup_ids": [b"old", b"new", b"other"]}, [(Appended, 2)]),
        ({"deliver_at": [0, T0 + 5_000_000, 0]}, [(Delayed, 1), (Appended, 2)]),
        ({"deliver_at": [T0 + 5_000_000] * 3}, [(Delayed, 3)]),
        ({"deliver_at": [T0 + 5_000_000] * 3, "dedup_ids": [b"old", b"a", b"b"]}, [(Delayed, 2)]),
        (
            {"deliver_at": [0, T0 + 5_000_000, 0], "dedup_ids": [b"old", b"a", b"b"]},
            [(Delayed, 1), (Appended, 1)],
        ),
    ],
)
def test_a_replay_finds_the_facts_as_they_were_decided(columns: Any, kinds: list[Any]) -> None:
    partition = Partition(TopicOptions())
    published(partition, [b"before"], dedup_ids=[b"old"])
    decided, again = published(partition, [b"one" * 100, b"two" * 200, b"three" * 300], **columns)
    assert [(kind, count) for kind, count, _ in sizes(decided)] == kinds
    assert sizes(decided) == sizes(again)


def test_a_fact_that_does_not_say_what_is_stored_is_refused() -> None:
    """Without its body a decision knows an upper bound of the size only: that must not be written."""
    partition = Partition(TopicOptions())
    published(partition, [b"before"], dedup_ids=[b"old"])
    bits, body = arrow.encode(
        [b"1", b"2"], ids=arrow.make_ids(2, 1, 7, 7), timestamps=T0, dedup_ids=[b"old", b"new"]
    )
    command = PublishBatch(Publish("t", 0, bits, frame.crc32c(body)), arrow.open_body(body, bits)[0])
    decision = partition.decide(command, at(T0))
    with pytest.raises(AssertionError):
        TurnFrames(0, 0, T0, T0).add(decision, command, body)
