"""The line of those who wait: what it keeps is bounded, and nobody comes into it too late to be woken."""

from typing import Any

import pytest

from tailrace.broker.partition.waiting_line import SPARE, WaitingLine
from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model import internal_commands as inner
from tailrace.core.model.queue_commands import Ack, GiveBack, Lease, Nack
from tailrace.core.selection.lanes import LANES
from tests.broker.queue.test_lease_verbs import make
from tests.broker.queue_engine import QueueEngine, values

LONG_MS = 60_000


class Standing:
    """A request that waits, and can always ask."""

    above = LANES

    def __init__(self, member: str, number: int) -> None:
        self.member, self.number = member, number

    def wake(self, passing: bool) -> bool:
        return True


def stored(line: WaitingLine) -> int:
    return sum(map(len, line._heaps)) + len(line._queued)


def test_who_is_woken_again_and_again_stands_in_the_line_once() -> None:
    line, waiter = WaitingLine(), Standing("m", 1)
    for _ in range(5_000):
        line.join(waiter)
        assert line.of_member("m") == [waiter]
        line.join(waiter)
        assert line.all_idle() == [waiter]
    assert stored(line) <= 2 * SPARE


def test_those_who_left_are_forgotten() -> None:
    line, stays = WaitingLine(), Standing("stays", 0)
    line.join(stays)
    for number in range(1, 5_000):
        waiter = Standing(f"m{number}", number)
        line.join(waiter)
        line.leave(waiter)
    assert stored(line) <= 4 * SPARE
    assert line.next(LANES) is stays


def test_who_left_and_came_again_has_its_place() -> None:
    line, one, two = WaitingLine(), Standing("one", 1), Standing("two", 2)
    for waiter in (two, one):
        line.join(waiter)
        line.leave(waiter)
        line.join(waiter)
    assert [line.next(LANES) for _ in range(3)] == [one, two, None]


# --------------------------------------------------------------------------------------- within one turn


def together(broker: QueueEngine, *requests: Any) -> list[Any]:
    """The answers to the first of some requests that come together: all are decided in one turn."""
    answers: list[Any] = []
    submit = broker.engine.gateway.submit
    submit(requests[0], b"", lambda reply, parts: answers.append(reply), gate=OpenGate())
    for request in requests[1:]:
        submit(request, b"", lambda reply, parts: None, gate=OpenGate())
    broker.settle()
    return answers


def request_of(broker: QueueEngine, member: str) -> Lease:
    _, generation = broker.runtime().state.queues.grant("g") or ("", 0)
    return Lease("t", "g", member, [(0, generation)], wait_ms=LONG_MS)


@pytest.mark.parametrize("verb", ["give_back", "nack", "ack", "evict", "expire"])
def test_what_is_freed_behind_a_request_in_the_same_turn_wakes_it(verb: str) -> None:
    broker = make(partitions=1, assignment="shared", ordering="key", lease_ms=1_000)
    broker.send(b"a", b"b", keys=[b"k", b"k"])
    (held,) = broker.lease(member="busy", count_max=1)
    spans = [(held.lease, [0, 1])]
    asks = request_of(broker, "idle")
    if verb in ("evict", "expire"):
        if verb == "expire":
            broker.clock.set_us(broker.clock.now_us() + 2_000_000)
        answers: list[Any] = []
        broker.engine.gateway.submit(asks, b"", lambda reply, parts: answers.append(reply), gate=OpenGate())
        command = inner.EvictMember("g", "busy") if verb == "evict" else inner.ExpireLeases()
        broker.runtime().submit(command, b"", lambda reply, parts: None)
        broker.settle()
    else:
        frees = {
            "give_back": GiveBack("t", 0, "g", spans),
            "nack": Nack("t", 0, "g", held.lease, [0, 1], delay_ms=0),
            "ack": Ack("t", 0, "g", spans),
        }
        answers = together(broker, asks, frees[verb])
    (reply,) = answers
    first = 1 if verb == "ack" else 0
    assert [grant.runs[0][0] for grant in reply.grants] == [first]
    assert values(broker.lease(member="other")) == [], "its key is with the one that waited"


# ------------------------------------------------------------------------------------------ many holders


def named_by_an_ack(holders: int) -> list[int]:
    """How many members are named as those who alone may have something, each time that it is asked, while one
    of so many members acks that have more of their keys to come."""
    broker = make(partitions=1, assignment="shared", ordering="key")
    held = []
    for number in range(holders):
        broker.send(*[b"x"] * 9, keys=[b"%d" % number] * 9)
        held.append(broker.lease(member=f"h{number}", count_max=4))
    waiting = [broker.begin_lease(member=f"w{number}", wait_ms=LONG_MS) for number in range(3)]
    queues, named = broker.runtime().state.queues, list[int]()
    takers = queues.takers

    def counted(group: str) -> Any:
        found = takers(group)
        named.append(len(found))
        return found

    queues.takers = counted
    broker.ack(held[0][0])
    named.clear()  # Now all that was offered before is known.
    for messages in held[:5]:
        broker.ack(messages[1])
    assert waiting == [[]] * 3
    return named


def test_an_ack_of_a_key_looks_at_its_holder_only_however_many_members_hold_others() -> None:
    few, many = named_by_an_ack(6), named_by_an_ack(60)
    assert few == many
    assert sum(many) <= 5
