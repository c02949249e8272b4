"""Groups on a partition: leases, receipts and administration, every rule by name.

Also covers `core/model/internal_commands.py`, `core/queue/command_rules.py`,
`core/queue/lease_decision.py`, `core/queue/ledger_stats.py` and `core/queue/settle_decision.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import TrimTopic
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tests.core.delivery_model import Letter
from tests.core.desk import SECOND, T0, Desk, plain

# ----------------------------------------------------------------------------------------------------- leases


def test_a_run_is_leased_once_and_settled_once() -> None:
    desk = Desk(*plain(10))
    reply = desk.ask(count=4)
    assert reply == inner.RunLeased(1, T0 + 30 * SECOND, [(0, 4, 1, 0)], [0, 4])
    assert desk.lease() == [4, 5, 6, 7, 8, 9]
    assert desk.lease() == []
    assert desk.ack(0, 4, lease=1) == []
    assert desk.ack(4, 10, lease=2) == []
    assert desk.partition.queues.committed("g") == 10
    assert desk.figures()["acked"] == 10
    assert desk.figures()["lag"] == 0


def test_leases_are_soft_and_settlements_are_hard() -> None:
    desk = Desk(*plain(3))
    run = inner.LeaseRun("g", "ada", 1, 9, 1, 100, 3)
    assert desk.do(run).soft
    assert desk.do(wire.Extend("t", 0, "g", [9], 1000)).soft
    assert not desk.do(wire.Ack("t", 0, "g", [(9, [0, 1])])).soft
    desk.lease()
    assert desk.do(wire.Nack("t", 0, "g", 1, [1, 2], failure=False)).soft
    assert not desk.do(wire.Nack("t", 0, "g", 1, [2, 3])).soft


def test_only_committed_messages_are_leased() -> None:
    desk = Desk(*plain(10))
    assert desk.lease(end_offset=3) == [0, 1, 2]
    assert desk.lease(end_offset=3) == []


def test_a_frame_that_is_not_at_hand_is_asked_for() -> None:
    desk = Desk(*plain(3))
    desk.publish(*plain(3))
    desk.shelf.away = {0, 3}
    command = inner.LeaseRun("g", "ada", 1, 9, 100, 1 << 20, 6)
    assert desk.partition.decide(command, desk.turn()).missing == 0
    desk.shelf.load(0)
    decision = desk.do(command)
    assert decision.missing is None
    assert decision.facts[0].spans == [0, 3], "what is at hand is leased without the rest"


@pytest.mark.parametrize(("member", "generation"), [("ada", 0), ("ada", 2), ("bob", 1)])
def test_a_stale_generation_is_fenced(member: str, generation: int) -> None:
    desk = Desk(*plain(1))
    reply = desk.ask(member, generation=generation)
    assert reply.code == "fenced"
    assert reply.details == {"generation": 1}


def test_a_shared_group_has_the_generation_of_its_resets() -> None:
    desk = Desk(*plain(4), assignment="shared", ordering="none")
    assert desk.lease("ada", 1, generation=0) == [0]
    assert desk.lease("bob", 1, generation=0) == [1]
    desk.do(inner.ResetTo("g", 0))
    assert desk.ask("bob", generation=0).code == "fenced"
    assert desk.lease("bob", 1, generation=1) == [0]


def test_an_unknown_group_is_not_found() -> None:
    desk = Desk(*plain(1))
    for command in (
        inner.LeaseRun("x", "ada", 1, 9, 1, 1, 1),
        inner.GrantTo("x", "ada", 1),
        inner.PauseLeases("x", True),
        inner.ResetTo("x", 0),
        inner.MoveCursor("x", "ada", 1, 0),
        wire.Reopen("t", 0, "x", [0, 1]),
        wire.SettleOffsets("t", 0, "x", [0, 1]),
    ):
        reply: Any = desk.do(command).reply
        assert reply.code == "not_found", command


def test_a_paused_group_gets_nothing() -> None:
    desk = Desk(*plain(2))
    desk.do(inner.PauseLeases("g", True))
    assert desk.lease() == []
    assert not desk.do(inner.PauseLeases("g", True)).facts
    desk.do(inner.PauseLeases("g", False))
    assert desk.lease() == [0, 1]


def test_a_member_has_no_more_in_flight_than_allowed() -> None:
    desk = Desk(*plain(10), assignment="shared", in_flight_max=3, group_in_flight_max=5)
    assert desk.lease("ada") == [0, 1, 2]
    assert desk.lease("ada") == []
    assert desk.lease("bob") == [3, 4], "the group's limit"
    assert desk.ack(0, 2, lease=1) == []
    assert desk.lease("ada") == [5, 6]


def test_groups_do_not_touch_each_other() -> None:
    desk = Desk(*plain(3))
    desk.do(inner.Enlist("other", GroupPolicy(assignment="shared")))
    assert desk.lease() == [0, 1, 2]
    run = inner.LeaseRun("other", "bob", 0, 77, 10, 1 << 20, 3)
    assert desk.do(run).reply == inner.RunLeased(77, T0 + 30 * SECOND, [(0, 3, 1, 0)], [0, 3])
    reply: Any = desk.do(wire.Ack("t", 0, "other", [(1, [0, 3])])).reply
    assert reply.lost == [(1, [0, 3])], "a foreign receipt"
    assert desk.ack(0, 3, lease=1) == []
    assert desk.partition.queues.committed("other") == 0


# --------------------------------------------------------------------------------------------------- receipts


def test_settling_twice_is_harmless_while_the_lease_lives_and_after() -> None:
    desk = Desk(*plain(4))
    desk.lease()
    assert desk.ack(0, 2) == []
    assert desk.ack(0, 2) == []
    assert desk.ack(0, 4) == []
    assert desk.ack(1, 3) == []
    assert desk.figures()["acked"] == 4
    desk.wait(30)
    assert desk.ack(1, 3) == [1, 3], "remembered until the deadline"


def test_an_ack_that_names_a_lease_twice_settles_once() -> None:
    desk = Desk(*plain(2))
    desk.lease()
    desk.do(wire.Ack("t", 0, "g", [(1, [0, 2]), (1, [0, 2]), (1, [0, 1])]))
    assert desk.figures()["acked"] == 2


def test_stale_and_foreign_receipts_are_lost() -> None:
    desk = Desk(*plain(6))
    desk.lease(count=3)
    assert desk.ack(0, 3, lease=77) == [0, 3], "no such lease"
    assert desk.ack(2, 5, lease=1) == [3, 5], "not of this lease"
    assert desk.nack(0, 1, lease=1, delay_ms=0) == []
    assert desk.ack(0, 2, lease=1) == [0, 1], "given up before"
    assert desk.lease() == [0, 3, 4, 5]
    assert desk.ack(0, 1, lease=1) == [0, 1], "somebody has it again"
    assert desk.ack(0, 1) == []
    assert desk.ack(0, 1, lease=1) == [0, 1], "and settled it"


def test_a_lease_past_its_deadline_is_lost_before_anybody_looks() -> None:
    desk = Desk(*plain(2))
    desk.lease()
    desk.now_us += 30 * SECOND
    assert desk.ack(0, 2) == [0, 2]
    assert desk.nack(0, 2) == [0, 2]
    assert desk.do(wire.Extend("t", 0, "g", [1], 1000)).reply == wire.Extended(desk.now_us + SECOND, [1])


def test_extending_moves_the_deadline() -> None:
    desk = Desk(*plain(2))
    desk.lease()
    desk.now_us += 29 * SECOND
    reply = desk.do(wire.Extend("t", 0, "g", [1, 5], 60_000)).reply
    assert reply == wire.Extended(desk.now_us + 60 * SECOND, [5])
    desk.wait(59)
    assert desk.ack(0, 2) == []
    reply = desk.do(wire.Extend("t", 0, "g", [1], 60_000)).reply
    assert reply == wire.Extended(desk.now_us + 60 * SECOND), "a lease that ended well needs no more time"


def test_receipts_of_a_group_that_is_gone_or_reset_are_lost() -> None:
    desk = Desk(*plain(2))
    desk.lease()
    desk.do(inner.ResetTo("g", 0))
    assert desk.ack(0, 2, lease=1) == [0, 2]
    desk.do(inner.Delist("g"))
    assert desk.ack(0, 2, lease=1) == [0, 2]
    # Both made time go on by the least there is: what happens then is told from what was before.
    assert desk.do(wire.Extend("t", 0, "g", [1], 1000)).reply == wire.Extended(T0 + SECOND + 2, [1])
    assert desk.nack(0, 2, lease=1) == [0, 2]


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (wire.Ack("t", 0, "g", []), "leases"),
        (wire.Ack("t", 0, "g", [(1, [])]), "leases"),
        (wire.Ack("t", 0, "g", [(1, [3])]), "leases"),
        (wire.Ack("t", 0, "g", [(1, [3, 3])]), "leases"),
        (wire.Ack("t", 0, "g", [(1, [3, 5, 4, 6])]), "leases"),
        (wire.Nack("t", 0, "g", 1, [-1, 2]), "spans"),
        (wire.Nack("t", 0, "g", 1, [0, 1 << 63]), "spans"),
        (wire.Nack("t", 0, "g", 1, [0, 1] * 100_001), "spans"),
        (wire.Nack("t", 0, "g", 1, [0, 1], -1), "delay_ms"),
        (wire.Nack("t", 0, "g", 1, [0, 1], 365 * 24 * 3_600_000 + 1), "delay_ms"),
        (wire.RejectMessages("t", 0, "g", 1, [0, 1], "boring"), "reason"),
        (wire.Extend("t", 0, "g", [], 1), "leases"),
        (wire.Extend("t", 0, "g", [1], 0), "lease_ms"),
        (wire.Extend("t", 0, "g", [1], 7 * 86_400_000 + 1), "lease_ms"),
        (wire.Reopen("t", 0, "g", [2, 1]), "spans"),
        (wire.SettleOffsets("t", 0, "g", []), "spans"),
        (inner.LeaseRun("g", "ada", 1, 1, 0, 1, 1), "count_max"),
        (inner.LeaseRun("g", "ada", 1, 1, 1, 0, 1), "bytes_max"),
        (inner.LeaseRun("g", "ada", 1, 1, 1, 1, 1, 0), "lease_ms"),
        (inner.ResetTo("g", 4), "offset"),
        (inner.Enlist("new", GroupPolicy(), 4), "start"),
    ],
)
def test_bad_requests_name_the_field(command: Any, field: str) -> None:
    desk = Desk(*plain(3))
    reply = desk.do(command).reply
    assert isinstance(reply, Refusal)
    assert reply.code == "invalid_request"
    assert field in reply.message


def test_error_texts_are_cut() -> None:
    desk = Desk(*plain(1))
    desk.lease()
    desk.do(wire.RejectMessages("t", 0, "g", 1, [0, 1], "poison", "x" * 5000))
    assert desk.partition.queues.dying("g", 1)[0].error == "x" * 1000


# --------------------------------------------------------------------------------------------- administration


def test_enlisting_starts_where_it_says() -> None:
    desk = Desk(*plain(5))
    desk.do(TrimTopic("t", 0, 2))
    for name, start, expected in (("a", None, 2), ("b", 4, 4), ("c", 0, 2)):
        desk.do(inner.Enlist(name, GroupPolicy(), start))
        assert desk.partition.queues.committed(name) == expected
    desk.do(inner.Enlist("d", GroupPolicy(start="latest")))
    assert desk.partition.queues.committed("d") == 5
    assert not desk.do(inner.Enlist("d", GroupPolicy(start="latest"))).facts
    assert desk.partition.queues.names() == ["g", "a", "b", "c", "d"]
    desk.do(inner.Delist("d"))
    assert not desk.do(inner.Delist("d")).facts
    desk.do(inner.Enlist("d", GroupPolicy()))
    assert desk.facts[-1].group == 6, "numbers are never given twice"


def test_a_grant_fences_and_gives_back() -> None:
    desk = Desk(*plain(3))
    desk.lease()
    assert not desk.do(inner.GrantTo("g", "ada", 1)).facts
    desk.do(inner.GrantTo("g", "bob", 2))
    assert desk.ack(0, 3) == [0, 3]
    assert desk.ask("ada", generation=1).code == "fenced"
    assert desk.ask("bob", generation=2).runs == [(0, 3, 2, 0)]
    stale: Any = desk.do(inner.GrantTo("g", "ada", 1)).reply
    assert stale.code == "fenced"
    taken: Any = desk.do(inner.GrantTo("g", "eve", 2)).reply
    assert taken.code == "fenced"


def test_an_evicted_member_leaves_without_failures() -> None:
    desk = Desk(*plain(4), assignment="shared", ordering="none")
    desk.lease("ada", 2)
    desk.lease("bob", 2)
    assert desk.do(inner.EvictMember("g", "ada")).soft
    assert desk.ack(2, 4, lease=2) == []
    assert desk.ack(0, 2, lease=1) == [0, 2]
    assert desk.ask("eve").runs == [(0, 2, 2, 0)]
    assert not desk.do(inner.EvictMember("g", "ada")).facts


def test_leases_that_a_member_never_heard_of_come_back_in_order() -> None:
    desk = Desk(*plain(6))
    desk.lease("ada", 2)
    desk.lease("ada", 2)
    assert desk.do(inner.EvictMember("g", "ada", [1])).soft
    assert desk.ack(0, 2, lease=1) == []
    assert desk.ask("ada").runs == [(2, 4, 1, 0)], "as if they had never been leased"
    assert not desk.do(inner.EvictMember("g", "ada", [1, 3])).facts


def test_a_reset_starts_again() -> None:
    desk = Desk(*plain(4))
    desk.lease()
    desk.ack(0, 2)
    desk.nack(2, 3)
    desk.do(wire.RejectMessages("t", 0, "g", 1, [3, 4]))
    desk.do(inner.ResetTo("g", 1))
    assert desk.partition.queues.grant("g") == ("ada", 2)
    assert desk.ask().runs == [(1, 3, 1, 0)]
    assert desk.figures()["dying"] == 0


def test_reopened_messages_have_fresh_counters() -> None:
    desk = Desk(*plain(4))
    desk.lease(count=3)
    desk.ack(0, 2)
    assert desk.do(wire.Reopen("t", 0, "g", [0, 4])).facts[0].spans == [0, 2]
    assert desk.ask().runs == [(0, 2, 1, 0), (3, 1, 1, 0)]
    assert desk.ack(0, 1, lease=1) == [0, 1], "its receipt is stale now"
    desk.do(TrimTopic("t", 0, 1))
    reply: Any = desk.do(wire.Reopen("t", 0, "g", [0, 2])).reply
    assert reply.code == "not_found"
    assert reply.details == {"spans": [0, 1]}


def test_what_has_expired_is_not_opened_again_unless_somebody_has_it() -> None:
    ends_us = T0 + 10 * SECOND
    desk = Desk(*(Letter(expires_us=ends_us) for _ in range(3)), Letter(), ordering="none")
    desk.lease()
    desk.ack(0, 2, 3, 4)
    desk.now_us = ends_us - 1
    assert desk.do(wire.Reopen("t", 0, "g", [1, 2])).facts[0].spans == [1, 2]
    desk.now_us = ends_us
    reply: Any = desk.do(wire.Reopen("t", 0, "g", [0, 4])).reply
    assert reply.code == "not_found"
    assert reply.details == {"spans": [0, 2]}
    assert desk.do(wire.Reopen("t", 0, "g", [2, 4])).facts[0].spans == [3, 4]


def test_messages_are_opened_again_though_their_frames_are_never_at_hand_together() -> None:
    desk = Desk(Letter("a"))
    for name in "bcd":
        desk.publish(Letter(name))
    desk.lease()
    desk.ack(0, 4)
    command = wire.Reopen("t", 0, "g", [0, 4])
    for offset in range(4):
        desk.shelf.away = {0, 1, 2, 3} - {offset - 1}
        assert desk.partition.decide(command, desk.turn()).missing == offset
    desk.shelf.away = {0, 1, 2}
    decision = desk.partition.decide(command, desk.turn())
    assert decision.facts[0].spans == [0, 4]
    assert len(set(decision.facts[0].keys)) == 4


def test_an_operator_settles_whatever_is_not_dying() -> None:
    desk = Desk(*plain(8))
    desk.lease(count=4)
    desk.nack(0, 1)
    desk.do(wire.RejectMessages("t", 0, "g", 1, [1, 2]))
    decision = desk.do(wire.SettleOffsets("t", 0, "g", [0, 3, 6, 20]))
    assert decision.facts[0].spans == [0, 1, 2, 3, 6, 8]
    assert desk.ack(2, 4) == [2, 3]
    assert desk.lease() == [4, 5]
    assert not desk.do(wire.SettleOffsets("t", 0, "g", [6, 8])).facts


def test_what_is_trimmed_is_collected() -> None:
    desk = Desk(*plain(8))
    desk.lease(count=4)
    desk.ack(0, 1)
    desk.nack(1, 2)
    desk.do(wire.RejectMessages("t", 0, "g", 1, [2, 3]))
    desk.do(TrimTopic("t", 0, 6))
    assert desk.figures()["collected"] == 5
    assert desk.figures()["in_flight"] == desk.figures()["dying"] == desk.figures()["waiting"] == 0
    assert desk.ack(3, 4) == [3, 4]
    assert desk.lease() == [6, 7]


def test_streams_have_a_cursor_only() -> None:
    desk = Desk(*plain(4), mode="stream")
    assert desk.ask().code == "invalid_request"
    desk.do(inner.MoveCursor("g", "ada", 1, 3))
    assert desk.partition.queues.committed("g") == 3
    assert not desk.do(inner.MoveCursor("g", "ada", 1, 3)).facts
    assert desk.figures()["lag"] == 1
    for command in (
        inner.MoveCursor("g", "ada", 0, 2),
        inner.MoveCursor("g", "bob", 1, 2),
        inner.MoveCursor("g", "ada", 1, 5),
        wire.SettleOffsets("t", 0, "g", [0, 1]),
        wire.Reopen("t", 0, "g", [0, 1]),
    ):
        assert isinstance(desk.do(command).reply, Refusal), command
    desk.do(inner.MoveCursor("g", "ada", 1, 1))
    desk.do(TrimTopic("t", 0, 2))
    assert desk.partition.queues.committed("g") == 2


def test_a_queue_has_no_cursor_to_move() -> None:
    desk = Desk(*plain(4))
    reply: Any = desk.do(inner.MoveCursor("g", "ada", 1, 3)).reply
    assert reply.code == "invalid_request"


def test_an_operator_holds_what_nobody_has() -> None:
    desk = Desk(*plain(8), assignment="shared", ordering="none")
    desk.lease(count=4)
    desk.ack(0, 1)
    desk.do(wire.RejectMessages("t", 0, "g", 1, [1, 2]))
    desk.nack(2, 3, failure=False)
    assert desk.partition.queues.unsettled("g", 0, 8, 100) == [1, 8]

    def hold(member: str, lease: int, *spans: int) -> Any:
        return desk.do(inner.HoldRun("g", member, lease, list(spans), 7, 1000)).reply

    assert hold("eve", 101, 0, 3, 5, 9) == wire.OffsetsHeld([2, 3, 5, 7])
    assert hold("eve", 102, 2, 5) == wire.OffsetsHeld([2, 3, 4, 5], [3, 4]), "once more is no harm"
    assert hold("bob", 103, 0, 8) == wire.OffsetsHeld([], [2, 7])
    desk.do(inner.EvictMember("g", "eve"))
    assert hold("bob", 104, 2, 3) == wire.OffsetsHeld([2, 3])
    desk.wait(2)
    assert desk.lease("bob") == [4, 5, 6, 7]
    assert desk.lease("bob", alone=True) == [2], "for the fourth time"


def test_messages_that_keep_an_order_are_not_held() -> None:
    desk = Desk(*plain(8))
    reply: Any = desk.do(inner.HoldRun("g", "eve", 9, [0, 1], 8, 1000)).reply
    assert (reply.code, "order" in reply.message) == ("invalid_request", True)


def test_what_is_unsettled_is_found_from_anywhere() -> None:
    desk = Desk(*plain(20), ordering="none")
    desk.lease(count=12)
    desk.ack(0, 2, 5, 7)
    desk.nack(8, 9, failure=False)
    find = desk.partition.queues.unsettled
    assert find("g", 0, 20, 100) == [2, 5, 7, 20]
    assert find("g", 3, 16, 6) == [3, 5, 7, 11]
    assert find("g", 5, 20, 1) == [7, 8]
    assert find("g", 15, 20, 2) == [15, 17]
    assert find("g", 20, 20, 5) == []
    assert find("unknown", 4, 20, 5) == [4, 9]


def test_other_options_keep_the_state() -> None:
    desk = Desk(*plain(4))
    desk.lease(count=2)
    desk.do(inner.Enlist("g", GroupPolicy(max_attempts=1)))
    desk.nack(0, 1)
    assert desk.figures()["dying"] == 1
    assert desk.lease() == [2, 3]
