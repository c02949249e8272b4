"""Dead letters: everything that dies gets there once, whatever fails on the way, and is settled only then.

Also covers `broker/local_router.py`, `broker/runtime/process_driver.py` and
`core/model/dead_letter_headers.py`.
"""

import logging
from typing import Any

import pytest

from tailrace.core.model.commands import (
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    Publish,
    TopicInfo,
    TrimTopic,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import BuryDone
from tailrace.core.model.queue_commands import RejectMessages
from tailrace.core.model.turn_input import TurnInput
from tailrace.errors import Full, StorageFault
from tailrace.format import batch as arrow
from tailrace.format import frame
from tests.broker.queue_engine import QueueEngine, got, values

STORY = "tailrace-"


def make(**options: Any) -> QueueEngine:
    broker = QueueEngine()
    broker.create(partitions=options.pop("partitions", 1), **options.pop("topic", {}))
    broker.enlist(**options)
    return broker


def letters(broker: QueueEngine, topic: str = "t.dlq", partition: int = 0) -> list[dict[str, Any]]:
    """All dead letters with their columns; headers as a dict."""
    runtime = broker.engine.topics.find(topic)
    if runtime is None:
        return []
    found = []
    for part in broker.log(topic, partition).read(0, broker.runtime(topic, partition).end_offset, 1 << 30):
        for header, body in frame.walk(part):
            if header.kind == frame.DATA:
                found += arrow.decode(body, header.columns).to_pylist()
    for row in found:
        row["headers"] = dict(row["headers"])
    return found


def figures(broker: QueueEngine, topic: str = "t", group: str = "g") -> dict[str, Any]:
    return broker.runtime(topic).state.queues.figures(group)


def die(broker: QueueEngine, **fields: Any) -> None:
    (message,) = broker.lease(count_max=1)
    broker.reject(message, **fields)


def test_a_rejected_message_keeps_all_it_had_and_gains_its_story() -> None:
    broker = make()
    appended_us = broker.clock.now_us()
    broker.send(
        b"bad",
        keys=[b"k"],
        priorities=[1],
        headers=[[("traceparent", b"00-1"), ("mine", b"x")]],
        expires_at=appended_us + 3_600_000_000,
        dedup_ids=[b"own"],
    )
    broker.pass_s(1)
    (message,) = broker.lease()
    broker.pass_s(1)
    broker.reject(message, reason="poison", error="cannot be read")
    (letter,) = letters(broker)
    headers = letter.pop("headers")
    assert (letter["value"], letter["key"], letter["priority"]) == (b"bad", b"k", 1)
    assert letter["dedup_id"] == f"t~1/0/0/g/{appended_us + 1_000_000}".encode()
    assert "expires_at" not in letter  # dead letters do not die of age
    assert {name: value.decode() for name, value in headers.items()} == {
        "traceparent": "00-1",
        "mine": "x",
        STORY + "origin-topic": "t",
        STORY + "origin-partition": "0",
        STORY + "origin-offset": "0",
        STORY + "origin-time": str(appended_us),
        STORY + "origin-topic-id": "1",
        STORY + "group": "g",
        STORY + "attempts": "0",
        STORY + "deliveries": "1",
        STORY + "first-delivery": str(appended_us + 1_000_000),
        STORY + "last-delivery": str(appended_us + 1_000_000),
        STORY + "last-member": "m",
        STORY + "reason": "poison",
        STORY + "error": "cannot be read",
    }
    assert figures(broker)["dying"] == 0
    assert figures(broker)["dead_lettered"] == 1
    assert figures(broker)["committed"] == 1


def test_too_many_attempts_lead_there_by_nack_and_by_expiry() -> None:
    broker = make(max_attempts=2, lease_ms=1000)
    broker.send(b"a")
    broker.nack(*broker.lease(), delay_ms=0)
    broker.lease()
    broker.pass_s(1.1)
    (letter,) = letters(broker)
    assert letter["headers"][STORY + "reason"] == b"max_attempts"
    assert letter["headers"][STORY + "attempts"] == b"2"
    assert letter["headers"][STORY + "deliveries"] == b"2"


def test_the_topic_is_made_when_it_is_first_needed() -> None:
    broker = make(partitions=3, topic={"durability": "interval", "message_bytes_max": 5000})
    assert broker.ask(DescribeTopic("t.dlq")).code == "not_found"
    broker.send(b"a", partition=2)
    die(broker)
    topic = broker.ask(DescribeTopic("t.dlq"))
    assert isinstance(topic, TopicInfo)
    options = topic.options
    assert (options["partitions"], options["durability"], options["storage"]) == (3, "interval", "file")
    assert options["retention_ms"] == options["dedup_window_ms"] == 14 * 24 * 3_600_000
    assert len(letters(broker, partition=2)) == 1


def test_the_longest_name_has_room_for_its_dead_letters() -> None:
    name = "n" * 245
    broker = QueueEngine()
    broker.create(name)
    broker.enlist(topic=name)
    broker.send(b"a", topic=name)
    (message,) = broker.lease(topic=name)
    broker.reject(message, topic=name)
    assert len(letters(broker, name + ".dlq")) == 1
    assert broker.ask(CreateTopic("n" * 246)).code == "invalid_request"


def test_dead_letters_grow_with_their_topic() -> None:
    broker = make()
    broker.send(b"a")
    die(broker)
    broker.ask(AlterTopic("t", {"partitions": 2}))
    broker.send(b"b", partition=1)
    die(broker)
    assert [row["value"] for row in letters(broker, partition=1)] == [b"b"]


def test_headers_at_their_limit_still_gain_the_story() -> None:
    broker = make()
    broker.send(b"a", headers=[[("h", bytes(64 * 1024 - 1))]])
    die(broker, error="x" * 1000)
    (letter,) = letters(broker)
    assert len(letter["headers"]["h"]) == 64 * 1024 - 1
    assert broker.lease(topic="t") == []


def test_many_die_in_batches() -> None:
    broker = make()
    broker.send(*(b"%d" % number for number in range(1200)))
    held = broker.lease(count_max=1200)
    broker.ask(RejectMessages("t", 0, "g", held[0].lease, [0, 1200]))
    assert [row["value"] for row in letters(broker)] == [b"%d" % number for number in range(1200)]
    assert figures(broker)["dead_lettered"] == 1200


def test_nothing_is_buried_before_its_death_is_durable() -> None:
    broker = make()
    broker.send(b"a")
    (message,) = broker.lease()
    broker.threads.holding = True
    rejected = broker.submit(RejectMessages("t", 0, "g", message.lease, [0, 1]))
    assert rejected == []
    assert broker.engine.topics.find("t.dlq") is None
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert len(letters(broker)) == 1


def test_a_crash_between_append_and_settlement_repeats_nothing() -> None:
    broker = make()
    broker.send(b"a", b"b")
    runtime = broker.runtime()
    decide = runtime.state.decide

    def crash(command: Any, turn: TurnInput) -> Any:
        if isinstance(command, BuryDone):
            raise SystemExit  # not an Exception: nothing of the broker handles it
        return decide(command, turn)

    runtime.state.decide = crash  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        die(broker)
    assert len(letters(broker)) == 1
    broker.restart()
    broker.settle()
    assert [row["value"] for row in letters(broker)] == [b"a"]
    assert figures(broker)["dying"] == 0
    assert figures(broker)["dead_lettered"] == 1
    assert values(broker.lease()) == [b"b"]


def test_a_crash_before_the_append_loses_nothing() -> None:
    broker = make()
    broker.send(b"a")
    (message,) = broker.lease()
    broker.runtime().processes.end()  # the broker stops here
    broker.reject(message)
    assert letters(broker) == []
    assert figures(broker)["dying"] == 1
    broker.restart()
    broker.settle()
    assert [row["value"] for row in letters(broker)] == [b"a"]
    assert figures(broker)["dying"] == 0


def with_broken_letters(broker: QueueEngine) -> None:
    """There is a topic for the dead letters, and from now on it takes none."""
    broker.send(b"first")
    die(broker)
    broker.runtime("t.dlq").fault = Refusal("storage_fault", "the disk is gone")


def test_an_append_that_fails_is_tried_for_ever_and_the_message_stays_dying() -> None:
    broker = make()
    with_broken_letters(broker)
    broker.send(b"bad", b"good")
    (message, good) = broker.lease()
    broker.ack(good)
    broker.reject(message)
    for _ in range(5):
        broker.pass_s(600)
        assert figures(broker)["dying"] == 1
        assert broker.lease() == []
    assert len(letters(broker)) == 1
    lines = broker.engine.metrics.render().decode().splitlines()
    (line,) = [line for line in lines if line.startswith('tailrace_burial_failures_total{topic="t"}')]
    assert float(line.split()[-1]) > 30
    broker.runtime("t.dlq").fault = None
    broker.pass_s(61)
    assert [row["value"] for row in letters(broker)] == [b"first", b"bad"]
    assert figures(broker)["dying"] == 0


def test_a_dying_message_holds_its_key_until_it_is_buried() -> None:
    broker = make()
    with_broken_letters(broker)
    broker.send(b"bad", b"later", b"other", keys=[b"k", b"k", b"o"])
    (message,) = broker.lease(count_max=1)
    broker.reject(message)
    assert values(broker.lease()) == [b"other"]
    waiting = broker.begin_lease(wait_ms=60_000)
    assert waiting == []
    broker.runtime("t.dlq").fault = None
    broker.pass_s(5)
    assert values(got(waiting)) == [b"later"]


def test_a_full_disk_of_the_dead_letters_is_waited_for() -> None:
    broker = make()
    broker.send(b"first")
    die(broker)
    broker.send(b"bad")
    (message,) = broker.lease()
    broker.log("t.dlq").fail_next(Full("no space is left"))
    broker.reject(message)
    assert figures(broker)["dying"] == 1
    broker.pass_s(10)
    assert [row["value"] for row in letters(broker)] == [b"first", b"bad"]


def test_a_settlement_that_fails_is_repeated_without_a_double() -> None:
    broker = make()
    broker.send(b"first")
    die(broker)
    broker.send(b"bad")
    (message,) = broker.lease()
    log, append = broker.log(), broker.log().append
    appends = []

    def fail_second(frames: Any, *, sync: bool) -> None:
        appends.append(frames)
        if len(appends) == 2:
            raise Full("no space is left")
        append(frames, sync=sync)

    log.append = fail_second  # type: ignore[method-assign]
    broker.reject(message)
    broker.pass_s(10)
    assert [row["value"] for row in letters(broker)] == [b"first", b"bad"]
    assert figures(broker)["dying"] == 0


def test_a_message_that_cannot_be_read_does_not_hold_up_the_others() -> None:
    broker = make(topic={"ring_buffer_bytes": 0})
    broker.send(b"a")
    broker.send(b"b")
    held = broker.lease(count_max=2) + broker.lease(count_max=2)
    log, read = broker.log(), broker.log().read

    def broken(offset: int, end: int, room: int) -> Any:
        if offset == 0:
            raise StorageFault("a bad place")
        return read(offset, end, room)

    log.read = broken  # type: ignore[method-assign]
    for message in held:
        broker.reject(message)
    broker.pass_s(5)
    assert [row["value"] for row in letters(broker)] == [b"b"]
    assert figures(broker)["dying"] == 1
    log.read = read  # type: ignore[method-assign]
    broker.pass_s(61)
    assert [row["value"] for row in letters(broker)] == [b"b", b"a"]


def test_what_is_trimmed_while_its_dead_letter_is_made_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = make()
    broker.send(b"a")
    broker.send(b"b")
    held = broker.lease()
    reads: list[Any] = []
    with monkeypatch.context() as late:
        late.setattr(broker.threads, "read", lambda *work: reads.append(work))
        broker.ask(RejectMessages("t", 0, "g", held[0].lease, [0, 2]))
        for _ in range(3):  # Segments go when two snapshots know that they are trimmed.
            broker.send(b"more")
            broker.ask(TrimTopic("t", 0, 1))
            broker.runtime().upkeep.free()
            broker.settle()
        assert broker.log().stats().start_offset == 1
    (read,) = reads
    broker.threads.read(*read)
    broker.settle()
    assert broker.runtime().fault is None
    assert [row["value"] for row in letters(broker)] == [b"b"]
    assert figures(broker)["dying"] == 0


def test_dead_letters_have_no_dead_letters(caplog: pytest.LogCaptureFixture) -> None:
    broker = make()
    broker.send(b"a")
    die(broker)
    broker.enlist(topic="t.dlq")
    (message,) = broker.lease(topic="t.dlq")
    with caplog.at_level(logging.WARNING):
        broker.reject(message, topic="t.dlq")
    assert "t.dlq/0/0 is settled for group 'g'" in caplog.text
    assert broker.engine.topics.find("t.dlq.dlq") is None
    assert figures(broker, "t.dlq")["committed"] == 1
    assert figures(broker, "t.dlq")["dead_lettered"] == 1


def test_each_group_has_its_own_letter_of_a_message() -> None:
    broker = make()
    broker.enlist(group="h")
    broker.send(b"a")
    die(broker)
    (message,) = broker.lease(group="h")
    broker.reject(message, group="h")
    assert [row["headers"][STORY + "group"] for row in letters(broker)] == [b"g", b"h"]


def test_the_story_of_an_earlier_death_is_replaced() -> None:
    broker = make()
    broker.send(b"a", headers=[[(STORY + "reason", b"expired"), (STORY + "redrive-group", b"g")]])
    die(broker)
    (letter,) = letters(broker)
    assert letter["headers"][STORY + "reason"] == b"rejected"
    assert letter["headers"][STORY + "redrive-group"] == b"g"


def test_a_topic_that_is_deleted_with_dying_messages_ends_their_story() -> None:
    broker = make()
    with_broken_letters(broker)
    broker.send(b"bad")
    die(broker)
    driver, _ = broker.runtime().processes.drivers
    assert driver.process is not None
    broker.submit(DeleteTopic("t"))
    broker.pass_s(120)
    assert driver.process is None


def test_published_to_by_hand_is_still_possible() -> None:
    broker = make()
    broker.ask(CreateTopic("t.dlq", {"partitions": 1, "key_index": True}))
    broker.send(b"a", keys=[b"k"])
    die(broker)
    columns, body = arrow.encode([b"x"], ids=bytes(16), timestamps=1)
    broker.submit(Publish("t.dlq", 0, columns, frame.crc32c(body)), body)
    assert broker.runtime("t.dlq").end_offset == 2
