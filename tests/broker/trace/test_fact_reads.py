"""Facts out of the log: all of them once and in order, only committed ones, a piece at a time.

Also covers `client/read/fact_feed.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tailrace
from tailrace.broker.trace import fact_reads
from tailrace.client.read.fact_feed import FactPiece, piece_of
from tailrace.client.rpc.calls import ask_parts
from tailrace.core.model import facts as f
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_topic import TOPIC
from tailrace.core.model.queue_commands import DecideStaged, ReadFacts, StageRows
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tailrace.testing import LocalBroker, open_local
from tests.broker.queue_engine import QueueEngine


def broker_with_a_story() -> QueueEngine:
    broker = QueueEngine()
    broker.create()
    broker.enlist()
    broker.send(b"0", b"1", b"2")
    first, second, third = broker.lease()
    broker.ack(first, second)
    broker.nack(third, error="no")
    broker.send(b"3")
    return broker


def piece(broker: QueueEngine, **fields: Any) -> FactPiece:
    ((reply, body),) = broker.submit(ReadFacts("t", 0, **fields))
    assert not hasattr(reply, "code"), reply
    return piece_of(reply, [body])


def code(broker: QueueEngine, topic: str = "t", partition: int = 0, **fields: Any) -> str:
    ((reply, _),) = broker.submit(ReadFacts(topic, partition, **fields))
    return str(getattr(reply, "code", None))


def kinds(found: list[FactPiece]) -> list[type]:
    return [type(fact) for one in found for _, facts in one.frames for fact in facts]


def test_who_reads_a_damaged_log_comes_to_the_damage_behind_what_is_good() -> None:
    broker = broker_with_a_story()
    good = piece(broker)
    broker.runtime().fault = Refusal("corrupt", "it is damaged behind that")
    found = piece(broker)
    assert (found.frames, found.appended, found.last) == (good.frames, good.appended, False)
    assert code(broker, entry=found.next_entry) == "corrupt"


def test_all_that_happened() -> None:
    broker = broker_with_a_story()
    found = piece(broker)
    assert kinds([found]) == [f.Enlisted, f.Granted, f.Leased, f.Acked, f.Nacked]
    assert found.last
    assert found.next_entry == broker.runtime().entry
    assert set(found.groups.values()) == {"g"}
    assert [(base, span) for _, base, span, _ in found.appended] == [(0, 3), (3, 1)]
    broker.restart()
    assert kinds([piece(broker)])[:5] == kinds([found]), "the same after a restart"


def test_a_piece_at_a_time() -> None:
    broker = broker_with_a_story()
    whole, entry, pieces = piece(broker), 0, []
    while not pieces or not pieces[-1].last:
        pieces.append(piece(broker, entry=entry, bytes_max=1))
        assert pieces[-1].next_entry > entry
        entry = pieces[-1].next_entry
    assert len(pieces) > 2
    assert kinds(pieces) == kinds([whole])
    assert [place for one in pieces for place in one.appended] == whole.appended
    assert piece(broker, entry=entry) == FactPiece(entry, entry, whole.groups, [], [])


@pytest.mark.parametrize("bound", ["APPENDED_MAX", "FRAMES_MAX"])
def test_one_answer_is_bounded(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    broker = broker_with_a_story()
    monkeypatch.setattr(fact_reads, bound, 1)
    found = piece(broker)
    assert len(found.appended) <= 1
    assert not found.last


def test_only_what_is_committed() -> None:
    broker = broker_with_a_story()
    whole = piece(broker)
    broker.threads.holding = True
    broker.publish(b"4")
    append, stored = broker.threads.held.pop()
    append()  # It is in the log, but nobody knows yet that it is there to stay.
    broker.threads.holding = False
    found = piece(broker, entry=whole.next_entry)
    assert (found.appended, found.next_entry, found.last) == ([], whole.next_entry, True)
    broker.threads._finished.append((stored, None, None))
    broker.settle()
    assert [base for _, base, _, _ in piece(broker, entry=whole.next_entry).appended] == [4]


def test_from_a_time_on() -> None:
    broker = broker_with_a_story()
    broker.pass_s(100)
    since_us = broker.clock.now_us()
    (message, *_) = broker.lease()
    broker.ack(message)
    found = piece(broker, from_us=since_us)
    late = [header for header, _ in found.frames if header.append_time_us >= since_us]
    assert len(late) == 2
    assert f.Acked in kinds([found])
    assert piece(broker, from_us=since_us + 10**9).frames == []


def test_staged_and_delayed_frames_are_left_out() -> None:
    broker = QueueEngine()
    broker.create()
    now_us = broker.clock.now_us()
    columns, body = arrow.encode([b"1"], ids=bytes(16), timestamps=now_us, deliver_at=[now_us + 10**7])
    broker.ask(StageRows("t", 0, "w", "x", columns, crc32c(body)), body)
    broker.ask(DecideStaged("w", 1, [("t", 0, "x")]))
    found = piece(broker)
    assert kinds([found]) == [f.StageApplied]
    assert found.appended == []


def test_bad_requests_are_refused() -> None:
    broker = broker_with_a_story()
    assert code(broker, "nowhere") == "not_found"
    assert code(broker, partition=1) == "not_found"
    assert code(broker, bytes_max=0) == "invalid_request"
    assert code(broker, entry=-1) == "invalid_request"
    assert code(broker, TOPIC) in ("denied", "invalid_request")


def test_those_who_ask_at_once_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fact_reads, "WAITING_MAX", 2)
    broker = broker_with_a_story()
    broker.threads.holding = True
    asked = [broker.submit(ReadFacts("t", 0)) for _ in range(4)]
    assert len(broker.threads.held) == 1
    assert [getattr(answer[0][0], "code", None) for answer in asked if answer] == ["overloaded"]
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert all(len(answer) == 1 for answer in asked)


def test_a_client_asks(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> FactPiece:
        async with tailrace_broker.client() as client, client.consumer("t", "g") as consumer:
            async with client.producer("t") as producer:
                await producer.send(b"1")
            async for message in consumer:
                await message.ack()
                break
        verbs = await open_local(tailrace_broker.name)
        with pytest.raises(tailrace.errors.NotFound):
            await ask_parts(verbs, ReadFacts("nowhere", 0), 5)
        found = piece_of(*await ask_parts(verbs, ReadFacts("t", 0), 5))
        await verbs.close()
        return found

    found = asyncio.run(asyncio.wait_for(main(), 30))
    assert f.Acked in kinds([found])
    assert len(found.appended) == 1
