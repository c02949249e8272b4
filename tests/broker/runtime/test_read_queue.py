"""Long reads take turns: one at a time, in order of arrival, bounded; a failure does not stop the others."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.broker.runtime.clock import ManualClock
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.read_queue import ReadQueue
from tailrace.core.model.commands import Pong
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import NotFound, Overloaded
from tests.broker.held_engine import HeldThreads


class Queue:
    """A queue in which two reads may wait, on threads that do nothing by themselves."""

    def __init__(self) -> None:
        self.threads = HeldThreads()
        self.threads.holding = True
        self.pump = Pump(ManualClock(), self.threads, lambda: None, lambda due_us: None)
        self.reads = ReadQueue(self.pump, "traces", waiting_max=2, retry_after_ms=70)
        self.answers: list[tuple[str, Any]] = []

    def add(self, name: str, *, begin: Exception | None = None, read: Exception | None = None) -> None:
        def work() -> tuple[Any, tuple[()]]:
            if read is not None:
                raise read
            return Pong(), ()

        def begun() -> Any:
            if begin is not None:
                raise begin
            return work

        self.reads.add(begun, lambda reply, parts: self.answers.append((name, reply)))

    def finish_one(self) -> None:
        self.threads.run_held(1)
        self.pump.drain()


def test_one_at_a_time_in_order_of_arrival() -> None:
    queue = Queue()
    for name in ("a", "b", "c"):
        queue.add(name)
    for done in (["a"], ["a", "b"], ["a", "b", "c"]):
        assert len(queue.threads.held) == 1
        queue.finish_one()
        assert [name for name, _ in queue.answers] == done
    assert queue.threads.held == []


def test_no_more_wait_than_may() -> None:
    queue = Queue()
    for name in ("a", "b", "c"):  # One is under way, two wait.
        queue.add(name)
    with pytest.raises(Overloaded, match="2 traces wait already") as caught:
        queue.add("d")
    assert caught.value.details["retry_after_ms"] == 70
    queue.finish_one()
    queue.add("d")
    for _ in range(3):
        queue.finish_one()
    assert [name for name, _ in queue.answers] == ["a", "b", "c", "d"]


def test_a_read_that_fails_is_answered_and_the_next_one_begins() -> None:
    queue = Queue()
    queue.add("a", read=NotFound("trimmed"))
    queue.add("b", begin=NotFound("deleted"))
    queue.add("c")
    queue.finish_one()
    queue.finish_one()
    replies = dict(queue.answers)
    assert [name for name, _ in queue.answers] == ["a", "b", "c"]
    assert isinstance(replies["a"], Refusal)
    assert isinstance(replies["b"], Refusal)
    assert (replies["a"].code, replies["a"].message) == ("not_found", "trimmed")
    assert (replies["b"].code, replies["b"].message) == ("not_found", "deleted")
    assert replies["c"] == Pong()
