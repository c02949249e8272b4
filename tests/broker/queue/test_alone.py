"""Requests for one message that is set apart: what comes meanwhile is not overlooked, and credit not lost."""

from typing import Any

from tailrace.core.model.internal_commands import EvictMember
from tests.broker.queue.test_lease_verbs import make
from tests.broker.queue_engine import Answers, QueueEngine, got, values

LONG_MS = 60_000


def suspected(broker: QueueEngine, *messages: bytes, **columns: Any) -> None:
    """Messages that were with a member each time it ended."""
    broker.send(*messages, **columns)
    for _ in range(3):
        assert len(broker.lease(member="dies")) == len(messages)
        broker.tell(broker.runtime(), EvictMember("g", "dies"))


def turn_until_alone(broker: QueueEngine) -> None:
    """Turn by turn, until a request for a single message waits for its turn."""
    pump, leasing = broker.engine.pump, broker.engine.leasing
    while not any(part.alone for job in leasing.book.jobs for part in job._parts):
        assert pump.busy or pump.drain()
        pump.turn()


def begin(broker: QueueEngine, member: str) -> Answers:
    """Ask, and go on only until it asks for a single message."""
    settle, broker.settle = broker.settle, lambda: None  # type: ignore[method-assign]
    answers = broker.begin_lease(member=member, wait_ms=LONG_MS)
    del broker.settle
    assert broker.settle == settle
    turn_until_alone(broker)
    return answers


def test_what_is_committed_between_the_question_and_its_turn_is_not_overlooked() -> None:
    broker = make(partitions=1, assignment="shared", ordering="key")
    suspected(broker, b"a", b"b", keys=[b"k", b"k"])
    assert values(broker.lease(member="first")) == [b"a"]
    runtime = broker.runtime()
    broker.threads.holding = True
    runtime.pump.threads_only_until_us = 1 << 62
    broker.publish(b"new")  # It is applied, and not committed yet.
    second = begin(broker, "second")
    broker.threads.run_held()
    broker.engine.pump.drain()
    broker.threads.holding = False
    broker.settle()
    assert values(got(second)) == [b"new"]


def test_who_had_no_credit_to_ask_for_one_alone_asks_for_everything_later() -> None:
    broker = make(partitions=1, assignment="shared", ordering="none", in_flight_max=1, group_in_flight_max=1)
    suspected(broker, b"a")
    waiting = begin(broker, "waits")
    flights = broker.engine.leasing.book.credit.find("g")
    assert flights is not None
    flights.add("other", 1)  # On another topic, say.
    broker.settle()
    assert waiting == []
    broker.send(b"b")
    flights.add("other", -1)
    broker.settle()
    assert values(got(waiting)) == [b"b"]


class Short:
    """A request that had no credit; it is told by and by."""

    def __init__(self) -> None:
        self.told = 0

    def credit_freed(self) -> None:
        self.told += 1


def test_credit_that_a_member_may_not_use_is_for_others() -> None:
    broker = make(partitions=1, assignment="shared", ordering="none", in_flight_max=1, group_in_flight_max=2)
    broker.send(b"a", b"b")
    credit = broker.engine.leasing.book.credit
    (mine,) = broker.lease(member="one")
    (other,) = broker.lease(member="two")
    shorts = [Short(), Short()]
    credit.wait("g", "three", shorts[0], 1, 2)
    credit.wait("g", "four", shorts[1], 1, 2)
    broker.ack(other)
    assert [short.told for short in shorts] == [1, 0]
    credit.wait("g", "one", shorts[0], 1, 2)  # Its member has enough by now.
    broker.settle()
    assert [short.told for short in shorts] == [1, 1]
    broker.ack(mine)
    assert [short.told for short in shorts] == [2, 1]
