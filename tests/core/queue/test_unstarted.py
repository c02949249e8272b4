"""Messages that go back before any handler got them: as if they had never been delivered."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done
from tailrace.core.model.identifiers import Refusal
from tests.core.desk import Desk, keyed, plain


def runs(desk: Desk, member: str = "ada") -> list[tuple[int, int, int, int]]:
    return list(desk.ask(member).runs)


def through(desk: Desk) -> list[tuple[int, int, int]]:
    """Lease and settle all there is: (offset, deliveries, failures)."""
    found = []
    while not isinstance(reply := desk.ask(), Done):
        found += [(first + i, *counts) for first, many, *counts in reply.runs for i in range(many)]
        desk.ack(*reply.spans)
    return found


def lost(reply: Any) -> list[tuple[int, list[int]]]:
    assert isinstance(reply, wire.Settled)
    return reply.lost


def test_giving_back_what_no_handler_got_undoes_the_delivery() -> None:
    desk = Desk(*plain(6))
    desk.lease()
    decision = desk.do(wire.GiveBack("t", 0, "g", [(1, [2, 6])]))
    assert decision.soft
    assert lost(decision.reply) == []
    assert desk.figures()["deliveries"] == 2
    assert runs(desk) == [(2, 4, 1, 0)]
    assert desk.figures()["deliveries"] == 6
    desk.do(wire.Nack("t", 0, "g", 2, [2, 6], failure=False))
    assert runs(desk) == [(2, 4, 2, 0)], "what a handler had and returned counts"
    desk.do(wire.GiveBack("t", 0, "g", [(3, [2, 6])]))
    assert runs(desk) == [(2, 4, 2, 0)]


def test_several_leases_go_back_in_one_request_and_stale_ones_are_told() -> None:
    desk = Desk(*plain(6))
    desk.lease(count=2)
    desk.lease(count=2)
    desk.lease(count=2)
    desk.ack(0, 2, lease=1)
    assert lost(desk.do(wire.GiveBack("t", 0, "g", [(1, [0, 2]), (2, [2, 4]), (9, [4, 6])])).reply) == [
        (9, [4, 6])
    ]
    assert desk.figures()["deliveries"] == 4
    assert runs(desk) == [(2, 2, 1, 0)]


def test_later_messages_of_a_key_that_are_on_their_way_go_back_uncounted() -> None:
    desk = Desk(*keyed("abab"))
    desk.lease(count=2)
    desk.lease(count=2)
    desk.do(wire.GiveBack("t", 0, "g", [(1, [0, 1])]))
    assert desk.ack(3, 4, lease=2) == []
    assert desk.ack(2, 3, lease=2) == [2, 3]
    assert through(desk) == [(0, 1, 0), (2, 1, 0)]


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_what_lies_unstarted_behind_a_failure_goes_back_uncounted(assignment: str) -> None:
    desk = Desk(*keyed("aabaa"), assignment=assignment)
    desk.lease()
    decision = desk.do(wire.Nack("t", 0, "g", 1, [0, 1], 1000, started=[(1, [0, 2])]))
    assert not decision.soft
    assert lost(decision.reply) == []
    assert desk.figures()["deliveries"] == 3
    assert desk.lease() == []
    desk.wait(1)
    counts = [(0, 2, 1), (1, 2, 0), (3, 1, 0), (4, 1, 0)]
    assert through(desk) == counts, "a handler had message 1, and neither 3 nor 4"


def test_a_member_that_lost_an_answer_was_never_delivered_it() -> None:
    desk = Desk(*plain(4))
    desk.lease(count=2)
    desk.lease(count=2)
    desk.do(inner.EvictMember("g", "ada", [1]))
    assert desk.figures()["deliveries"] == 2
    assert runs(desk) == [(2, 2, 1, 0)]
    desk.do(inner.EvictMember("g", "ada"))
    assert desk.figures()["deliveries"] == 4, "a member that is gone may have started them"


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (wire.GiveBack("t", 0, "g", []), "leases"),
        (wire.GiveBack("t", 0, "g", [(1, [3, 1])]), "leases"),
        (wire.Nack("t", 0, "g", 1, [0, 1], started=[(1, [2])]), "started"),
    ],
)
def test_malformed_spans_are_refused(command: Any, field: str) -> None:
    desk = Desk(*plain(1))
    reply = desk.do(command).reply
    assert isinstance(reply, Refusal)
    assert reply.message.startswith(field)


def test_receipts_of_a_group_that_is_gone_are_lost() -> None:
    desk = Desk(*plain(1))
    desk.do(inner.Delist("g"))
    assert lost(desk.do(wire.GiveBack("t", 0, "g", [(1, [0, 1])])).reply) == [(1, [0, 1])]
