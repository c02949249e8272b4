"""Accepting loss: the partition opens again, groups count what they miss, readers are told, offsets stay.

Also covers `broker/runtime/repair.py`, `core/lost_offsets.py`, `core/salvage.py` and
`core/model/damage_commands.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from tailrace.core.model.commands import LATEST, DescribeTopic, Fetch, Fetched, Published, TopicInfo
from tailrace.core.model.damage_commands import AcceptLoss, LossReport
from tailrace.core.model.facts import Acked
from tailrace.core.model.group_commands import CreateGroup, DescribeGroup, GroupInfo, ResetGroup, ResetPlan
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec, frame
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryLog
from tests.broker.held_engine import HeldEngine, values_of
from tests.broker.queue_engine import QueueEngine
from tests.storage.frame_maker import TestClock


def figures(broker: HeldEngine, group: str = "g") -> dict[str, Any]:
    reply = broker.ask(DescribeGroup(group))
    assert isinstance(reply, GroupInfo)
    (row,) = reply.partitions
    return row


def damage(broker: HeldEngine, offset: int) -> None:
    """Let the frame of an offset be unreadable, and somebody find out."""
    log = broker.runtime().log
    assert isinstance(log, MemoryLog)
    entry = next(
        header.entry
        for header, _ in log.scan(0, 1 << 60)
        if header.kind == frame.DATA and header.base_offset <= offset < header.end_offset
    )
    log.damage(entry)
    reply = broker.ask(Fetch("t", [(0, offset)], 1 << 20, 0))
    assert isinstance(reply, Refusal)
    assert reply.code == "corrupt"


def accept(broker: HeldEngine, *, dry_run: bool = False) -> LossReport:
    reply = broker.ask(AcceptLoss("t", 0, dry_run))
    assert isinstance(reply, LossReport), reply
    return reply


def read_all(broker: HeldEngine, offset: int = 0) -> tuple[list[bytes], list[list[int]]]:
    """What a reader gets, and what it is told to be lost."""
    values: list[bytes] = []
    lost: list[list[int]] = []
    for _ in range(100):
        ((reply, data),) = broker.submit(Fetch("t", [(0, offset)], 1 << 20, 0))
        if isinstance(reply, Refusal):
            assert reply.code == "not_found", reply
            lost.append(reply.details["lost"])
            offset = reply.details["start_offset"]
            continue
        assert isinstance(reply, Fetched)
        if not data:
            return values, lost
        values += values_of(data)
        offset = [header.end_offset for header, _ in frame.walk(data) if header.kind == frame.DATA][-1]
    raise AssertionError("no end")


@pytest.fixture
def broker() -> HeldEngine:
    """Ten messages, of which nothing is in memory, and a group."""
    broker = HeldEngine()
    broker.create(ring_buffer_bytes=0)
    broker.ask(CreateGroup("g", ["t"], {"start": "earliest"}))
    for number in range(5):
        broker.publish(b"a%d" % number, b"b%d" % number)
    return broker


def test_a_dry_run_says_what_is_lost_and_changes_nothing(broker: HeldEngine) -> None:
    damage(broker, 4)
    report = accept(broker, dry_run=True)
    assert [(row["first_offset"], row["end_offset"]) for row in report.ranges] == [(4, 6)]
    assert report.groups == [{"group": "g", "messages": 2}]
    assert not report.done
    assert broker.runtime().fault is not None


def test_the_partition_opens_again_and_its_counts_add_up(
    broker: HeldEngine, caplog: pytest.LogCaptureFixture
) -> None:
    damage(broker, 4)
    accept(broker, dry_run=True)
    assert "loss accepted" not in caplog.text
    report = accept(broker)
    assert "t/0: loss accepted of offsets from 4 to below 6, 2 messages (" in caplog.text
    assert report.done
    assert report.fault is None
    assert broker.engine.faults() == []
    answers = broker.publish(b"more")
    assert [reply for reply, _ in answers] == [Published(10, broker.clock.now_us())]
    row = figures(broker)
    assert (row["collected"], row["lag"], row["end_offset"], row["fault"]) == (2, 9, 11, None)
    values, lost = read_all(broker)
    assert values == [b"a0", b"b0", b"a1", b"b1", b"a3", b"b3", b"a4", b"b4", b"more"]
    assert lost == [[4, 6]]
    assert accept(broker) == LossReport([], [], done=True)


@pytest.mark.parametrize("snapshot", [False, True])
def test_what_was_accepted_holds_after_restarts(broker: HeldEngine, snapshot: bool) -> None:
    damage(broker, 4)
    accept(broker)
    if snapshot:
        broker.runtime().upkeep.save_snapshot()
        broker.settle()
    for _ in range(2):
        broker.restart()
        assert broker.engine.faults() == []
        assert read_all(broker)[1] == [[4, 6]]
        assert figures(broker)["collected"] == 2
        broker.runtime().state.check()


def test_a_crash_before_the_fact_is_made_up_for_at_the_next_start(broker: HeldEngine) -> None:
    damage(broker, 4)
    broker.store.close()
    broker.store.accept_losses(broker.runtime().name, (), ())
    broker.restart()
    assert broker.engine.faults() == []
    assert figures(broker)["collected"] == 2
    assert read_all(broker)[1] == [[4, 6]]
    broker.restart()
    assert figures(broker)["collected"] == 2


def test_the_log_says_what_is_lost_until_the_fact_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    loss_recorded = MemoryLog.loss_recorded

    def recorded(self: MemoryLog) -> None:
        runtime = broker.runtime()
        synced.append(runtime.assurance.synced.entry == runtime.entry)
        loss_recorded(self)

    monkeypatch.setattr(MemoryLog, "loss_recorded", recorded)
    broker = HeldEngine()
    broker.create(durability="interval", sync_interval_ms=3_600_000, ring_buffer_bytes=0)
    for number in range(5):
        broker.publish(b"%d" % number)
    damage(broker, 2)
    accept(broker)
    assert synced == [True]


def test_a_group_that_begins_before_the_loss_has_it_collected(broker: HeldEngine) -> None:
    damage(broker, 4)
    accept(broker)
    broker.ask(CreateGroup("late", ["t"], {"start": "earliest"}))
    row = figures(broker, "late")
    assert (row["collected"], row["lag"]) == (2, 8)


def test_who_goes_through_the_log_in_order_comes_over_the_loss(broker: HeldEngine) -> None:
    damage(broker, 4)
    accept(broker)
    runtime = broker.runtime()
    runtime.cache.load(0, lambda error: None)
    broker.settle()
    assert runtime.cache.columns(3) is not None  # It is read ahead from here.
    broker.settle()
    assert broker.engine.faults() == []
    assert runtime.cache.columns(6) is not None


def test_a_bad_fact_is_given_up_and_what_was_settled_stays_settled(broker: HeldEngine) -> None:
    alien = codec.encode_facts([Acked(77, [(1, [0, 1])], 1)])
    header = frame.Header(frame.FACTS, 0, len(alien), frame.crc32c(alien), broker.runtime().entry)
    broker.runtime().log.append([frame.Frame(header, frame.pack(header), alien)], sync=True)
    broker.restart()
    assert broker.runtime().fault is not None
    report = accept(broker)
    assert report.done
    assert [row["end_entry"] - row["first_entry"] for row in report.ranges] == [1]
    assert broker.engine.faults() == []
    assert len(read_all(broker)[0]) == 10
    assert read_all(broker)[1] == []
    assert figures(broker)["lag"] == 10
    broker.publish(b"more")
    broker.restart()
    assert broker.engine.faults() == []
    assert len(read_all(broker)[0]) == 11


def test_a_coordinator_is_opened_again_without_the_fact_that_it_cannot_apply() -> None:
    from tailrace.core.model.group_facts import MemberLeft
    from tailrace.core.model.internal_topic import home_of

    broker = HeldEngine()
    broker.create()
    broker.ask(CreateGroup("g", ["t"]))
    home = home_of("g")
    runtime = broker.engine.coordinators.runtimes()[home]
    alien = codec.encode_facts([MemberLeft("nobody", "m", "left", 1)])
    header = frame.Header(frame.FACTS, 0, len(alien), frame.crc32c(alien), runtime.entry)
    runtime.log.append([frame.Frame(header, frame.pack(header), alien)], sync=True)
    broker.restart()
    assert isinstance(broker.ask(DescribeGroup("g")), Refusal)
    reply = broker.ask(AcceptLoss("_groups", home, False))
    assert isinstance(reply, LossReport)
    assert reply.done
    assert isinstance(broker.ask(DescribeGroup("g")), GroupInfo)
    broker.restart()
    assert isinstance(broker.ask(DescribeGroup("g")), GroupInfo)


@pytest.mark.parametrize(
    "gone", ["segment", "folder", "last", "last, behind a snapshot", "all, behind a snapshot"]
)
def test_missing_files_are_given_up_and_offsets_never_used_again(tmp_path: Path, gone: str) -> None:
    clock = TestClock()
    store = FileStore(tmp_path, clock, segment_bytes=4096)
    broker = HeldEngine(store)
    broker.create(ring_buffer_bytes=0)
    broker.ask(CreateGroup("g", ["t"], {"start": "earliest"}))
    for number in range(20):
        broker.publish(b"%d" % number * 200)
    if "snapshot" in gone:
        broker.runtime().upkeep.save_snapshot()
        broker.settle()
    folder = tmp_path / broker.runtime().name
    broker.store.close()
    if gone == "folder":
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    elif gone.startswith("last"):
        sorted(folder.glob("*.log"))[-1].unlink()
    elif gone.startswith("all"):
        for path in folder.glob("*.log"):
            path.unlink()
    else:
        sorted(folder.glob("*.log"))[1].unlink()
    broker.store = FileStore(tmp_path, clock, segment_bytes=4096)
    broker.engine = broker._start()
    assert broker.runtime().fault is not None
    report = accept(broker)
    assert report.done, report.fault
    assert report.ranges
    answers = broker.publish(b"more")
    ((published, _),) = answers
    assert isinstance(published, Published)
    assert published.base_offset >= 20
    values, lost = read_all(broker, 0)
    assert values[-1] == b"more"
    assert sum(end - first for first, end in lost) + len(values) == published.base_offset + 1
    assert figures(broker)["collected"] == published.base_offset + 1 - len(values)
    broker.restart()
    assert broker.engine.faults() == []
    assert read_all(broker) == (values, lost)
    described = broker.ask(DescribeTopic("t"))
    assert isinstance(described, TopicInfo)
    broker.store.close()


@pytest.mark.parametrize("lost", range(12))
def test_whatever_fact_is_lost_nothing_that_is_left_goes_missing(lost: int) -> None:
    """Each frame of facts in turn cannot be read any more, and no snapshot knows what was in it."""
    broker = QueueEngine()
    broker.create(ring_buffer_bytes=0)
    broker.enlist()
    settled = set()
    for number in range(6):
        broker.send(b"%d" % number, b"x%d" % number)
        first, *others = broker.lease(count_max=2)
        broker.ack(first)
        settled.add(first.offset)
        for other in others if number % 2 else ():
            broker.nack(other, delay_ms=0)
    log = broker.runtime().log
    assert isinstance(log, MemoryLog)
    entries = [header.entry for header, _ in log.scan(0, 1 << 60) if header.kind == frame.FACTS]
    log.damage(entries[lost % len(entries)])
    broker.restart()
    assert broker.runtime().fault is not None
    assert accept(broker).done
    broker.runtime().state.check()
    broker.enlist()
    broker.pass_s(40)
    seen: set[int] = set()
    while found := broker.lease(count_max=100):
        seen |= {message.offset for message in found}
        broker.ack(*found)
    assert seen | settled == set(range(12)), "a message that is there was never delivered"
    broker.restart()
    assert broker.engine.faults() == []
    assert broker.lease(count_max=100) == []


def test_a_reset_moves_nothing_where_a_partition_is_damaged() -> None:
    broker = HeldEngine()
    broker.create(partitions=3, ring_buffer_bytes=0)
    broker.ask(CreateGroup("g", ["t"], {"start": "earliest"}))
    for partition in range(3):
        broker.publish(b"x", partition=partition)
    damage(broker, 0)
    refused = broker.ask(ResetGroup("g", "t", LATEST))
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.outcome, refused.details["partitions"]) == ("corrupt", "none", [0])
    described = broker.ask(DescribeGroup("g"))
    assert isinstance(described, GroupInfo)
    assert [row["committed"] for row in described.partitions] == [0, 0, 0]
    well = broker.ask(ResetGroup("g", "t", offsets=[(1, 1), (2, 1)]))
    assert isinstance(well, ResetPlan), "those that are well can be named"
    assert well.done
