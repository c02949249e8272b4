"""One partition: limits at their bounds, races, lost answers, acks, trimming and snapshots.

Also covers `core/model/decision.py`, `core/model/identifiers.py` and `core/publish/publish_rules.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tailrace.core.model.commands import Claimed, ClaimProducer, Done, Publish, Published, TrimTopic
from tailrace.core.model.decision import Decision
from tailrace.core.model.facts import Appended, ProducerAdvanced
from tailrace.core.model.identifiers import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    HAS_EXPIRES_AT,
    HAS_OFFSET_DELTA,
    HAS_PRIORITY,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    TIMESTAMP_AHEAD_US_MAX,
    BatchView,
    Refusal,
)
from tailrace.core.model.internal_commands import PublishBatch, Sweep
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.errors import Corrupt
from tests.core.oracle import Row, view_of
from tests.core.turns import at

T0 = 1_700_000_000_000_000
KEYED = TopicOptions(key_index=True)


def send(partition: Partition, view: BatchView | list[Row], *, now_us: int = T0, **fields: Any) -> Decision:
    """Publish and, as the shell does, apply what was decided."""
    if isinstance(view, list):
        view = view_of(view, key_index=partition.options.key_index)
    decision = partition.decide(PublishBatch(Publish("t", 0, view.columns, 0, **fields), view), at(now_us))
    for fact in decision.facts:
        partition.apply(fact)
    partition.check()
    return decision


def code(decision: Decision) -> str:
    assert isinstance(decision.reply, Refusal), decision.reply
    assert decision.facts == ()
    assert decision.reply.outcome == "none"
    return decision.reply.code


def base(decision: Decision) -> int:
    assert isinstance(decision.reply, Published), decision.reply
    return decision.reply.base_offset


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("count", BATCH_ROWS_MAX),
        ("nbytes", BATCH_BYTES_MAX),
        ("key_bytes_max", KEY_BYTES_MAX),
        ("header_bytes_max", HEADER_BYTES_MAX),
        ("value_bytes_max", 1024 * 1024),
    ],
)
def test_sizes_at_their_limits(field: str, most: int) -> None:
    partition = Partition(TopicOptions())
    view = BatchView(1, 0, 10, 0)
    assert base(send(partition, msgspec.structs.replace(view, **{field: most}))) == 0
    decision = send(partition, msgspec.structs.replace(view, **{field: most + 1}))
    assert code(decision) == "too_large"
    assert isinstance(decision.reply, Refusal)
    assert decision.reply.details == {"size": most + 1, "limit": most}


def test_a_topic_can_raise_the_size_of_messages() -> None:
    partition = Partition(TopicOptions(message_bytes_max=10))
    assert base(send(partition, BatchView(1, 0, 10, 0, value_bytes_max=10))) == 0
    assert code(send(partition, BatchView(1, 0, 10, 0, value_bytes_max=11))) == "too_large"
    partition.reconfigure(TopicOptions(message_bytes_max=11))
    assert base(send(partition, BatchView(1, 0, 10, 0, value_bytes_max=11))) == 1


def test_timestamps_may_lie_one_hour_ahead_of_now() -> None:
    partition = Partition(TopicOptions())
    most = T0 + TIMESTAMP_AHEAD_US_MAX
    assert base(send(partition, BatchView(1, 0, 10, most))) == 0
    assert code(send(partition, BatchView(1, 0, 10, most + 1))) == "invalid_request"
    assert partition.timestamp_max_us == most
    assert base(send(partition, BatchView(1, 0, 10, 5), now_us=T0)) == 1
    assert partition.timestamp_max_us == most


def test_columns_that_are_refused() -> None:
    assert code(send(Partition(TopicOptions()), BatchView(1, HAS_OFFSET_DELTA, 10, 0))) == "invalid_request"


def test_priority_and_expiry_pass_through() -> None:
    decision = send(Partition(TopicOptions()), BatchView(1, HAS_PRIORITY | HAS_EXPIRES_AT, 10, 0))
    (fact,) = decision.facts
    assert isinstance(fact, Appended)
    assert fact.view.columns == HAS_PRIORITY | HAS_EXPIRES_AT


def test_an_empty_batch_is_refused() -> None:
    assert code(send(Partition(TopicOptions()), BatchView(0, 0, 10, 0))) == "invalid_request"


@pytest.mark.parametrize(
    ("durability", "storage", "allowed"),
    [
        ("fsync", "file", ["memory", "interval", "fsync", None]),
        ("interval", "file", ["memory", "interval", None]),
        ("memory", "memory", ["memory", None]),
    ],
)
def test_acks_ask_for_as_much_as_the_topic_or_less(
    durability: str, storage: str, allowed: list[str | None]
) -> None:
    partition = Partition(TopicOptions(durability=durability, storage=storage))
    for acks in ("memory", "interval", "fsync", None, "all", ""):
        decision = send(partition, [Row()], acks=acks)
        assert isinstance(decision.reply, Published) == (acks in allowed), acks


def test_of_racing_writers_one_wins() -> None:
    partition = Partition(TopicOptions())
    send(partition, [Row(), Row()])
    outcomes = [send(partition, [Row(), Row()], expected_sequence=3) for _ in range(5)]
    assert base(outcomes[0]) == 2
    for loser in outcomes[1:]:
        assert code(loser) == "sequence_conflict"
        assert isinstance(loser.reply, Refusal)
        assert loser.reply.details == {"current_sequence": 4, "expected_sequence": 3}
    for wrong in (1, 2, 4, 6, 1 << 70):
        assert code(send(partition, [Row()], expected_sequence=wrong)) == "sequence_conflict"
    assert code(send(partition, [Row()], expected_sequence=-1)) == "invalid_request"
    assert base(send(partition, [Row()], expected_sequence=5)) == 4


def test_a_lost_answer_is_given_again_and_never_a_conflict() -> None:
    partition = Partition(TopicOptions())
    fields = {"producer_id": 7, "producer_sequence": 0, "expected_sequence": 1}
    first = send(partition, [Row(), Row()], **fields)
    send(partition, [Row()], now_us=T0 + 9)
    again = send(partition, [Row(), Row()], now_us=T0 + 10, **fields)
    assert again.reply == first.reply
    assert again.facts == ()


def test_a_retry_is_answered_even_when_it_would_now_be_refused() -> None:
    partition = Partition(TopicOptions())
    view = BatchView(1, 0, 10, 0, value_bytes_max=100)
    first = send(partition, view, producer_id=7, acks="fsync")
    partition.reconfigure(TopicOptions(message_bytes_max=10, durability="interval"))
    assert send(partition, view, producer_id=7, acks="fsync").reply == first.reply


def test_a_refused_batch_uses_nothing_up() -> None:
    partition = Partition(TopicOptions())
    large = BatchView(1, 0, 10, 0, value_bytes_max=1 << 30)
    assert code(send(partition, large, producer_id=7)) == "too_large"
    assert code(send(partition, [Row()], producer_id=7, producer_sequence=1)) == "unavailable"
    assert base(send(partition, [Row()], producer_id=7, producer_sequence=0)) == 0


def test_expected_sequence_and_duplicates() -> None:
    partition = Partition(TopicOptions())
    first = send(partition, [Row(None, "a"), Row(None, "b")], expected_sequence=1)
    again = send(partition, [Row(None, "a"), Row(None, "b")], expected_sequence=1)
    assert (base(first), base(again)) == (0, 0)
    assert isinstance(again.reply, Published)
    assert again.reply.duplicates == [(0, 0), (1, 1)]
    assert code(send(partition, [Row(None, "a"), Row(None, "c")], expected_sequence=3)) == "invalid_request"
    assert partition.end_offset == 2


def test_partly_duplicate_batches_are_cut_down() -> None:
    partition = Partition(KEYED)
    send(partition, [Row("k", "a")])
    rows = [Row("k", "b"), Row("k", "a"), Row("q", "c"), Row("k", "b"), Row("q")]
    decision = send(partition, rows, producer_id=7, expected_key_sequences=[1, 99, 0, 99, 1])
    assert decision.keep is not None
    assert decision.keep.tolist() == [0, 2, 4]
    assert decision.reply == Published(1, T0, [(1, 0), (3, 1)])
    (fact,) = decision.facts
    assert isinstance(fact, Appended)
    assert fact.view.count == 3
    assert send(partition, rows, producer_id=7, now_us=T0 + 5).reply == decision.reply
    conflict = send(partition, [Row("k", "a"), Row("q", "z")], expected_key_sequences=[0, 0])
    assert code(conflict) == "sequence_conflict"
    assert isinstance(conflict.reply, Refusal)
    assert conflict.reply.details["row"] == 1
    assert "row 1 " in conflict.reply.message


def test_a_batch_of_duplicates_uses_up_the_sequence_only() -> None:
    partition = Partition(TopicOptions())
    send(partition, [Row(None, "a"), Row(None, "b")])
    rows = [Row(None, "b"), Row(None, "a")]
    decision = send(partition, rows, producer_id=7, now_us=T0 + 3)
    assert decision.facts == (ProducerAdvanced(7, 0, 0, 2, 0, T0 + 3, T0 + 3),)
    assert decision.reply == Published(1, T0 + 3, [(0, 1), (1, 0)])
    assert decision.keep is not None
    assert len(decision.keep) == 0
    assert send(partition, rows, producer_id=7, now_us=T0 + 9).reply == decision.reply
    assert base(send(partition, [Row()], producer_id=7, producer_sequence=1)) == 2
    assert send(partition, rows).facts == ()


def test_retry_long_after_the_window_says_what_it_knows() -> None:
    partition = Partition(TopicOptions(dedup_window_ms=1))
    send(partition, [Row(None, "a")])
    rows = [Row(None, "a"), Row(None, "b")]
    send(partition, rows, producer_id=7)
    send(partition, [Row(None, "a")], now_us=T0 + 1000)
    assert send(partition, rows, producer_id=7, now_us=T0 + 1000).reply == Published(1, T0, [(0, -1), (1, 1)])


@pytest.mark.parametrize(
    ("options", "rows", "numbers"),
    [
        (TopicOptions(), [Row("k")], [0]),
        (KEYED, [Row()], [0]),
        (KEYED, [Row("k"), Row()], [0, 0]),
        (KEYED, [Row("k")], [0, 0]),
        (KEYED, [Row("k")], []),
        (KEYED, [Row("k")], [-2]),
        (KEYED, [Row("k")], [1 << 63]),
    ],
)
def test_expected_key_sequences_that_make_no_sense(
    options: TopicOptions, rows: list[Row], numbers: list[int]
) -> None:
    assert code(send(Partition(options), rows, expected_key_sequences=numbers)) == "invalid_request"


def test_any_key_sequence_needs_no_index() -> None:
    assert base(send(Partition(TopicOptions()), [Row("k")], expected_key_sequences=[-1])) == 0


def test_key_sequences_survive_trimming() -> None:
    partition = Partition(KEYED)
    send(partition, [Row("k"), Row("k")])
    partition.apply(partition.decide(TrimTopic("t", 0, 2), at(T0)).facts[0])
    assert code(send(partition, [Row("k")], expected_key_sequences=[0])) == "sequence_conflict"
    assert base(send(partition, [Row("k")], expected_key_sequences=[2])) == 2


def test_append_time_never_goes_back() -> None:
    partition = Partition(TopicOptions())
    send(partition, [Row()], now_us=T0)
    decision = send(partition, [Row()], now_us=T0 - 5_000_000)
    assert decision.reply == Published(1, T0)


def test_trim_and_sweep() -> None:
    partition = Partition(TopicOptions())
    send(partition, [Row()] * 5)
    for command, start in (
        (TrimTopic("t", 0, 2), 2),
        (TrimTopic("t", 0, 1), 2),
        (Sweep(3), 3),
        (Sweep(1), 3),
        (Sweep(99), 5),
        (TrimTopic("t", 0, 5), 5),
    ):
        decision = partition.decide(command, at(T0))
        assert decision.reply == Done()
        for fact in decision.facts:
            partition.apply(fact)
        assert partition.start_offset == start
    for offset in (-1, 6):
        assert code(partition.decide(TrimTopic("t", 0, offset), at(T0))) == "invalid_request"


def test_producer_0_cannot_be_claimed() -> None:
    assert code(Partition(TopicOptions()).decide(ClaimProducer("t", 0, 0), at(T0))) == "invalid_request"
    assert code(Partition(TopicOptions()).decide(ClaimProducer("t", 0, -1), at(T0))) == "invalid_request"


def test_a_claim_that_goes_on_from_an_epoch_is_refused_when_somebody_has_claimed_since() -> None:
    partition = Partition(TopicOptions())
    for command, expected in (
        (ClaimProducer("t", 0, 7), Claimed(1)),
        (ClaimProducer("t", 0, 7, 1), Claimed(2)),
        (ClaimProducer("t", 0, 7), Claimed(3)),
        (ClaimProducer("t", 0, 7, 9), Claimed(4)),  # the broker lost what came after: nobody newer is known
    ):
        decision = partition.decide(command, at(T0))
        assert decision.reply == expected
        for fact in decision.facts:
            partition.apply(fact)
    decision = partition.decide(ClaimProducer("t", 0, 7, 2), at(T0))
    assert code(decision) == "fenced"
    assert not decision.facts


def test_a_snapshot_may_come_back_in_one_piece() -> None:
    partition = Partition(KEYED)
    send(partition, [Row("k", "a"), Row(None, "b")], producer_id=7)
    whole = b"".join(partition.snapshot())
    for chunks in ([whole], [memoryview(whole)], [whole[:3], whole[3:]], [bytearray(whole)]):
        assert b"".join(Partition.restore(KEYED, chunks).snapshot()) == whole


def test_damaged_snapshots_are_refused_as_corrupt() -> None:
    partition = Partition(KEYED)
    send(partition, [Row("k", "a")], producer_id=7)
    whole = b"".join(partition.snapshot())
    for data in (b"", whole[:5], whole[:-1], whole + b"x", b"\xff" * 64, whole[:8] + b"\xc1" + whole[9:]):
        with pytest.raises(Corrupt):
            Partition.restore(KEYED, [data])
    with pytest.raises(Corrupt):
        Partition.restore(TopicOptions(), [whole])


def test_a_gap_in_the_log_is_noticed() -> None:
    partition = Partition(TopicOptions())
    with pytest.raises(AssertionError):
        partition.apply(Appended(5, BatchView(1, 0, 10, 0), T0))
