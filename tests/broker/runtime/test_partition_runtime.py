"""One partition at work: replies wait for durability, failures drop what was speculative.

Also covers `broker/runtime/framing.py`, `broker/runtime/recovery.py`, `broker/runtime/state_machines.py`,
`broker/runtime/partition_kind.py`, `broker/runtime/log_writer.py` and `broker/runtime/turn.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.commands import (
    Claimed,
    ClaimProducer,
    DescribeTopic,
    Fetch,
    Fetched,
    Published,
    Reply,
    TopicInfo,
    TrimTopic,
)
from tailrace.core.model.facts import Acked
from tailrace.core.model.group_commands import (
    CreateGroup,
    DescribeGroup,
    GroupInfo,
    GroupList,
    JoinGroup,
    ListGroups,
)
from tailrace.core.model.group_facts import MemberLeft
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_topic import home_of
from tailrace.errors import Full, StorageFault
from tailrace.format import codec, frame
from tailrace.ports import Snapshot
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryLog
from tests.broker.held_engine import HeldEngine, values_of

Answers = list[tuple[Reply, bytes]]


def held(**options: Any) -> HeldEngine:
    """A broker with the topic `t`, whose storage waits from now on."""
    broker = HeldEngine()
    broker.create(**options)
    broker.threads.holding = True
    return broker


def reply_of(answers: Answers) -> Reply:
    ((reply, _),) = answers
    return reply


def refusal_of(answers: Answers) -> Refusal:
    reply = reply_of(answers)
    assert isinstance(reply, Refusal)
    return reply


def test_an_answer_waits_until_its_batch_is_durable() -> None:
    broker = held()
    broker.publish(b"earlier")
    broker.threads.run_held()
    first, second = broker.publish(b"a"), broker.publish(b"b")
    assert first == second == []
    broker.threads.run_held(1)
    broker.settle()
    assert reply_of(first) == Published(1, broker.clock.now_us())
    assert second == []
    broker.threads.run_held()
    broker.settle()
    assert reply_of(second) == Published(2, broker.clock.now_us())


def test_a_refusal_waits_for_what_it_speaks_of() -> None:
    broker = held()
    first = broker.publish(b"a")
    conflict = broker.publish(b"b", expected_sequence=1)
    assert first == conflict == []
    broker.threads.run_held()
    broker.settle()
    assert refusal_of(conflict).details["current_sequence"] == 1


def test_a_retry_is_answered_only_when_the_first_attempt_is_durable() -> None:
    broker = held()
    broker.publish(b"a", producer_id=5)
    retry = broker.publish(b"a", producer_id=5)
    assert retry == []
    broker.threads.run_held()
    broker.settle()
    assert reply_of(retry) == Published(0, broker.clock.now_us())
    assert broker.engine.topics.get("t").runtimes[0].end_offset == 1


def test_nothing_uncommitted_is_delivered() -> None:
    broker = held()
    waiting = broker.submit(Fetch("t", [(0, 0)], 1 << 20, 5000))
    broker.publish(b"a")
    assert waiting == []
    broker.threads.run_held()
    broker.settle()
    broker.pass_s(0.1)
    ((reply, data),) = waiting
    assert isinstance(reply, Fetched)
    assert values_of(data) == [b"a"]


def test_the_second_append_of_an_empty_log_never_becomes_its_first() -> None:
    broker = held()
    broker.log().fail_next(Full("no space is left"))
    first, second = broker.publish(b"a"), broker.publish(b"b")
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert [refusal_of(answers).code for answers in (first, second)] == ["full", "full"]
    broker.restart()
    assert broker.runtime().end_offset == 0


def test_what_waits_for_the_first_append_goes_on_behind_it() -> None:
    broker = held()
    first, second, third = broker.publish(b"a"), broker.publish(b"b"), broker.publish(b"c")
    broker.threads.run_held()
    broker.settle()
    assert reply_of(first) == Published(0, broker.clock.now_us())
    broker.threads.run_held()
    broker.settle()
    assert [reply_of(second), reply_of(third)] == [Published(n, broker.clock.now_us()) for n in (1, 2)]


def test_a_full_disk_drops_what_was_speculative_and_heals_by_itself() -> None:
    broker = held()
    broker.publish(b"earlier")
    broker.threads.run_held()
    broker.settle()
    broker.log().fail_next(Full("no space is left"))
    first, second = broker.publish(b"a", producer_id=5), broker.publish(b"b", expected_sequence=3)
    broker.threads.run_held(1)
    broker.settle()
    assert [refusal_of(answers).outcome for answers in (first, second)] == ["none", "none"]
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert refusal_of(broker.publish(b"c")).code == "full"
    broker.pass_s(1.1)
    retry = broker.publish(b"a", producer_id=5)
    assert reply_of(retry) == Published(1, broker.clock.now_us())
    assert broker.values() == [b"earlier", b"a"]


def test_a_failed_sync_stops_writes_and_reads_go_on() -> None:
    broker = held()
    broker.threads.holding = False
    broker.publish(b"a")
    broker.log().fail_next(StorageFault("fdatasync failed"))
    assert refusal_of(broker.publish(b"b")).outcome == "unknown"
    later = refusal_of(broker.publish(b"c"))
    assert (later.code, later.outcome) == ("storage_fault", "unknown"), "it may be a retry of the first"
    assert "until the broker is restarted" in later.message
    assert broker.values() == [b"a"]
    assert broker.engine.faults() == [f"t/0: {later.message}"]
    broker.restart()
    assert broker.engine.faults() == []
    assert isinstance(reply_of(broker.publish(b"d")), Published)


def test_a_failed_interval_sync_leaves_in_doubt_what_waits() -> None:
    broker = held(durability="interval", sync_interval_ms=100)
    broker.threads.holding = False
    broker.publish(b"a")
    broker.threads.holding = True
    broker.pass_s(0.3)
    assert broker.threads.held, "the sync waits"
    large = broker.publish(b"x" * 100_000)  # too large to be written on the loop
    broker.log().fail_next(StorageFault("fdatasync failed"))
    broker.threads.run_held()
    broker.settle()
    assert refusal_of(large).outcome == "unknown"


def test_a_broken_invariant_answers_everybody_and_stops_the_partition(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = held()
    broker.threads.holding = False
    broker.publish(b"first")
    monkeypatch.setattr(broker.runtime().state, "apply", lambda fact: 1 / 0)
    refusal = refusal_of(broker.publish(b"a"))
    assert (refusal.code, refusal.outcome) == ("error", "unknown")
    assert refusal_of(broker.publish(b"b")).code == "storage_fault"
    assert "stepping down" in caplog.text
    assert broker.values() == [b"first"]


def test_snapshot_of_a_state_that_was_partly_dropped_is_not_kept() -> None:
    broker = held()
    broker.threads.holding = False
    broker.publish(b"a", producer_id=5)
    broker.threads.holding = True
    broker.log().fail_next(Full("no space is left"))
    lost = broker.publish(b"b", producer_id=5, producer_sequence=1)
    done: list[bool] = []
    broker.runtime().upkeep.save_snapshot(lambda: done.append(True))
    while broker.threads.held:
        broker.threads.run_held(1)
        broker.settle()
    assert done == [True]
    assert refusal_of(lost).code == "full"
    broker.restart()
    broker.threads.holding = False
    assert broker.values() == [b"a"]
    again = broker.publish(b"b", producer_id=5, producer_sequence=1)
    assert reply_of(again) == Published(1, broker.clock.now_us())


def test_snapshot_with_turns_under_way_restores_to_the_same_state() -> None:
    broker = held()
    first = broker.publish(b"a", producer_id=5)
    broker.runtime().upkeep.save_snapshot()
    second = broker.publish(b"b", producer_id=5, producer_sequence=1)
    while broker.threads.held:
        broker.threads.run_held(1)
        broker.settle()
    assert isinstance(reply_of(first), Published)
    assert isinstance(reply_of(second), Published)
    before = [bytes(chunk) for chunk in broker.runtime().state.snapshot()]
    broker.restart()
    assert [bytes(chunk) for chunk in broker.runtime().state.snapshot()] == before


def test_claims_and_trims_survive_a_restart() -> None:
    broker = HeldEngine()
    broker.create()
    assert broker.ask(ClaimProducer("t", 0, 9)) == Claimed(1)
    broker.publish(b"a")
    broker.publish(b"b")
    broker.ask(TrimTopic("t", 0, 1))
    broker.restart()
    assert broker.ask(ClaimProducer("t", 0, 9)) == Claimed(2)
    refusal = refusal_of(broker.submit(Fetch("t", [(0, 0)], 100, 0)))
    assert (refusal.code, refusal.details["start_offset"]) == ("not_found", 1)
    assert broker.values(offset=1) == [b"b"]


def test_retention_trims_old_messages() -> None:
    broker = HeldEngine()
    broker.create(retention_ms=60_000)
    broker.publish(b"old")
    broker.pass_s(100)
    broker.publish(b"new")
    broker.pass_s(61)
    assert broker.runtime().state.start_offset == 1
    assert broker.values(offset=1) == [b"new"]


@pytest.mark.parametrize("segments", [1, 6])
def test_damage_stops_one_partition_and_not_the_broker(tmp_path: Path, segments: int) -> None:
    """In the only segment it is found when the log is opened, in a sealed one when it is replayed."""
    store = FileStore(tmp_path / "data", ManualClock(), segment_bytes=4096)
    broker = HeldEngine(store)
    broker.create(partitions=2)
    for number in range(4 * segments):
        broker.publish(b"%d" % number * 200)
    broker.publish(b"fine", partition=1)
    store.close()
    folder = next((tmp_path / "data").glob("t~*/0"))
    first = min(folder.glob("*.log"))
    damaged = bytearray(first.read_bytes())
    damaged[len(damaged) // 2 if segments > 1 else 1500] ^= 0xFF
    first.write_bytes(damaged)
    broker.store = FileStore(tmp_path / "data", ManualClock(), segment_bytes=4096)
    broker.engine = broker._start()
    assert broker.runtime(partition=0).fault is not None
    assert isinstance(reply_of(broker.publish(b"more", partition=1)), Published)
    assert broker.values(partition=1) == [b"fine", b"more"]
    refusal = refusal_of(broker.publish(b"no"))
    assert (refusal.code, refusal.outcome) == ("corrupt", "none")
    info = broker.ask(DescribeTopic("t"))
    assert info.partitions[0]["fault"] == refusal.message
    assert info.partitions[1]["fault"] is None
    assert info.partitions[0]["end_offset"] < 4 * segments
    assert broker.values()[:1] in ([], [b"0" * 200])
    reached = broker.runtime().end_offset
    assert refusal_of(broker.submit(Fetch("t", [(0, reached)], 1 << 20, 60_000))) == refusal
    broker.store.close()


def test_a_fact_that_cannot_be_read_stops_one_partition_and_says_so_to_readers() -> None:
    broker = HeldEngine()
    broker.create(partitions=2)
    for partition in range(2):
        broker.publish(b"a", b"b", partition=partition)
    poison: Any = 1.0
    broker.ask(TrimTopic("t", 0, poison))  # As no client can send it.
    broker.publish(b"c")
    broker.restart()
    fault = broker.runtime().fault
    assert fault is not None
    assert fault.code == "corrupt"
    assert fault.message.startswith("t~1/0: entry 1 cannot be applied: facts: Expected `int`, got `float`")
    assert refusal_of(broker.submit(Fetch("t", [(0, 2)], 1 << 20, 60_000))) == fault
    assert broker.values(partition=1) == [b"a", b"b"]
    assert isinstance(reply_of(broker.publish(b"more", partition=1)), Published)


def test_a_fact_that_breaks_the_state_stops_one_partition_and_not_the_broker() -> None:
    broker = HeldEngine()
    broker.create(partitions=2)
    for partition in range(2):
        broker.publish(b"a", b"b", partition=partition)
    log = broker.log()
    alien = codec.encode_facts([Acked(77, [(1, [0, 1])], 1)])  # Of a group that nobody has enlisted.
    header = frame.Header(frame.FACTS, 0, len(alien), frame.crc32c(alien), broker.runtime().entry)
    log.append([frame.Frame(header, frame.pack(header), alien)], sync=True)
    broker.restart()
    fault = broker.runtime().fault
    assert fault is not None
    assert (fault.code, fault.outcome) == ("corrupt", "none")
    assert fault.message.startswith("t~1/0: entry 1 cannot be applied: KeyError")
    assert broker.engine.faults() == [f"t/0: {fault.message}"]
    assert broker.values() == [b"a", b"b"]
    assert refusal_of(broker.publish(b"more")) == fault
    assert isinstance(reply_of(broker.publish(b"more", partition=1)), Published)
    assert b'tailrace_partition_quarantined{partition="0",topic="t"} 1.0' in broker.engine.metrics.render()


@pytest.mark.parametrize("chunks", [[b"nonsense"], [b""], [bytes(8)]])
def test_a_snapshot_that_cannot_be_restored_is_never_taken_for_an_empty_partition(
    chunks: list[bytes],
) -> None:
    broker = HeldEngine()
    broker.create(partitions=2)
    for partition in range(2):
        broker.publish(b"a", b"b", partition=partition)
    broker.log().save_snapshot(Snapshot(0, 2, chunks))
    broker.restart()
    fault = broker.runtime().fault
    assert fault is not None
    assert fault.message.startswith("t~1/0: the snapshot as of entry 0 cannot be restored")
    assert broker.values() == [b"a", b"b"]
    assert refusal_of(broker.submit(Fetch("t", [(0, 2)], 1 << 20, 60_000))) == fault
    assert refusal_of(broker.publish(b"more")) == fault
    assert isinstance(reply_of(broker.publish(b"more", partition=1)), Published)


def test_a_damaged_coordinator_refuses_its_groups_and_no_others() -> None:
    broker = HeldEngine()
    broker.create()
    names = [f"g{number}" for number in range(40)]
    bad = home_of(names[0])
    other = next(name for name in names if home_of(name) != bad)
    for name in (names[0], other):
        assert isinstance(broker.ask(CreateGroup(name, ["t"])), GroupInfo)
    runtime = broker.engine.coordinators.runtimes()[bad]
    alien = codec.encode_facts([MemberLeft("nobody", "m", "left", 1)])
    header = frame.Header(frame.FACTS, 0, len(alien), frame.crc32c(alien), runtime.entry)
    runtime.log.append([frame.Frame(header, frame.pack(header), alien)], sync=True)  # type: ignore[attr-defined]
    broker.restart()
    refused = broker.ask(DescribeGroup(names[0]))
    assert isinstance(refused, Refusal)
    assert refused.code == "corrupt"
    assert f"{names[0]!r} is coordinated by _groups/{bad}, which is damaged" in refused.message
    joined = broker.ask(JoinGroup(names[0], "m", ["t"]))
    assert isinstance(joined, Refusal)
    assert joined.code == "corrupt"
    assert isinstance(broker.ask(DescribeGroup(other)), GroupInfo)
    assert isinstance(broker.ask(ListGroups()), GroupList)
    # Its ledger on the data partition is as it was.
    assert set(broker.runtime().state.queues.names()) == {names[0], other}


def test_damage_found_by_a_reader_stops_the_partition_and_shows(caplog: pytest.LogCaptureFixture) -> None:
    broker = HeldEngine()
    broker.create(partitions=2, ring_buffer_bytes=0)
    broker.ask(CreateGroup("g", ["t"]))
    for value in (b"a", b"b", b"c"):
        broker.publish(value)
    broker.publish(b"well", partition=1)
    bad = broker.runtime().entry - 2
    assert isinstance(broker.runtime().log, MemoryLog)
    broker.runtime().log.damage(bad)
    assert broker.engine.faults() == []
    refused = refusal_of(broker.submit(Fetch("t", [(0, 1)], 1 << 20, 0)))
    assert refused.code == "corrupt"
    fault = broker.runtime().fault
    assert fault is not None
    assert fault.code == "corrupt"
    assert broker.engine.faults() == [f"t/0: {fault.message}"]
    assert "t/0 is quarantined" in caplog.text
    text = broker.engine.metrics.render()
    assert b'tailrace_partition_quarantined{partition="0",topic="t"} 1.0' in text
    assert b"tailrace_damage_found_total 1.0" in text
    described = broker.ask(DescribeTopic("t"))
    assert isinstance(described, TopicInfo)
    assert [row["fault"] for row in described.partitions] == [fault.message, None]
    assert refusal_of(broker.publish(b"more")).code == "corrupt"
    group = broker.ask(DescribeGroup("g"))
    assert isinstance(group, GroupInfo)
    assert [(row["fault"], row["lag"]) for row in group.partitions] == [(fault.message, 3), (None, 1)]
    assert values_of(broker.submit(Fetch("t", [(0, 0)], 1, 0))[0][1]) == [b"a"]


def test_while_the_disk_lets_a_sync_wait_nothing_is_written_on_the_loop() -> None:
    broker = HeldEngine()
    broker.create("slow", durability="fsync")
    broker.create("quick", durability="interval")
    for topic in ("slow", "quick"):
        broker.publish(b"first", topic=topic)
    broker.threads.holding = True
    synced = broker.publish(b"x", topic="slow")
    assert broker.publish(b"at once", topic="quick"), "a sync takes a moment: that is no reason"
    broker.clock.set_us(broker.clock.now_us() + 20_000)
    waits = broker.publish(b"later", topic="quick")
    assert (synced, waits, len(broker.threads.held)) == ([], [], 2)
    broker.threads.run_held()
    broker.settle()
    assert synced
    assert waits
    assert broker.publish(b"at once again", topic="quick")
    assert not broker.engine.pump.writing
