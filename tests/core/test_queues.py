"""Groups on a partition: every rule of leasing, settling and order, by name."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core import delivery_commands as wire
from tailrace.core import inner_commands as inner
from tailrace.core.commands import Done, Publish, TrimTopic
from tailrace.core.decisions import Decision
from tailrace.core.model import BatchView, Refusal
from tailrace.core.partition import Partition
from tailrace.core.policy import GroupPolicy
from tailrace.core.topics import TopicOptions
from tests.core.delivery_model import Letter
from tests.core.modelled_partition import Shelf

SECOND = 1_000_000
T0 = 1_000 * SECOND


class Desk:
    """A partition with one group `g`, that belongs to `ada`, and a clock."""

    def __init__(self, *letters: Letter, **policy: Any) -> None:
        self.partition = Partition(TopicOptions())
        self.shelf = Shelf()
        self.partition.at_hand = self.shelf
        self.now_us = T0
        self.facts: list[Any] = []
        self.leases = 0
        if letters:
            self.publish(*letters)
        self.policy = GroupPolicy(**policy)
        self.do(inner.Enlist("g", self.policy))
        if self.policy.assignment != "shared":
            self.do(inner.GrantTo("g", "ada", 1))

    def publish(self, *letters: Letter) -> None:
        columns = self.shelf.add(list(letters), self.partition.end_offset, self.now_us)
        lanes = self.shelf.frames[-1].priorities
        view = BatchView(len(letters), columns, 100 * len(letters), self.now_us, priorities=lanes)
        self.do(inner.PublishBatch(Publish("t", 0, columns, 0), view))

    def do(self, command: Any) -> Decision:
        """Decide and apply; frames that are missing come."""
        while (decision := self.partition.decide(command, self.now_us)).missing is not None:
            self.shelf.load(decision.missing)
        for fact in decision.facts:
            self.partition.apply(fact)
        self.facts += decision.facts
        self.partition.check()
        return decision

    def ask(self, member: str = "ada", count: int = 100, **fields: Any) -> Any:
        """The reply to a request for messages."""
        self.leases += 1
        _, generation = self.partition.queues.grant("g") or ("", 0)
        command = inner.LeaseRun("g", member, generation, self.leases, count, 1 << 20, 1 << 40)
        for name, value in {"end_offset": self.partition.end_offset, **fields}.items():
            command = _replaced(command, name, value)
        return self.do(command).reply

    def lease(self, member: str = "ada", count: int = 100, **fields: Any) -> list[int]:
        """The offsets that a member gets, in the order of delivery."""
        reply = self.ask(member, count, **fields)
        if isinstance(reply, Done):
            return []
        return [first + i for first, many, _, _ in reply.runs for i in range(many)]

    def ack(self, *spans: int, lease: int | None = None) -> list[int]:
        """Settle through the newest lease; what was lost."""
        number = lease or self.leases
        reply: Any = self.do(wire.Ack("t", 0, "g", [(number, list(spans))])).reply
        return [part for _, parts in reply.lost for part in parts]

    def nack(self, *spans: int, lease: int | None = None, **fields: Any) -> list[int]:
        reply: Any = self.do(wire.Nack("t", 0, "g", lease or self.leases, list(spans), **fields)).reply
        return [part for _, parts in reply.lost for part in parts]

    def wait(self, seconds: float) -> Decision:
        self.now_us += round(seconds * SECOND)
        return self.do(inner.ExpireLeases())

    def figures(self) -> dict[str, Any]:
        return self.partition.queues.figures("g")


def _replaced(command: Any, name: str, value: Any) -> Any:
    fields = {field: getattr(command, field) for field in command.__struct_fields__}
    return type(command)(**{**fields, name: value})


def plain(count: int) -> list[Letter]:
    return [Letter()] * count


def keyed(keys: str) -> list[Letter]:
    return [Letter(None if key == "-" else key) for key in keys]


# ------------------------------------------------------------------------------------------------- leases


def test_a_run_is_leased_once_and_settled_once() -> None:
    desk = Desk(*plain(10))
    reply = desk.ask(count=4)
    assert reply == inner.RunLeased(1, T0 + 30 * SECOND, [(0, 4, 1, 0)])
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
    assert desk.partition.decide(command, T0).missing == 0
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
    assert desk.do(run).reply == inner.RunLeased(77, T0 + 30 * SECOND, [(0, 3, 1, 0)])
    reply: Any = desk.do(wire.Ack("t", 0, "other", [(1, [0, 3])])).reply
    assert reply.lost == [(1, [0, 3])], "a foreign receipt"
    assert desk.ack(0, 3, lease=1) == []
    assert desk.partition.queues.committed("other") == 0


# ------------------------------------------------------------------------------------------------- receipts


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
    assert desk.do(wire.Extend("t", 0, "g", [1], 1000)).reply == wire.Extended(T0 + SECOND, [1])
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
        (wire.Reject("t", 0, "g", 1, [0, 1], "boring"), "reason"),
        (wire.Extend("t", 0, "g", [], 1), "leases"),
        (wire.Extend("t", 0, "g", [1], 0), "lease_ms"),
        (wire.Extend("t", 0, "g", [1], 12 * 3_600_000 + 1), "lease_ms"),
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
    desk.do(wire.Reject("t", 0, "g", 1, [0, 1], "poison", "x" * 5000))
    assert desk.partition.queues.dying("g", 1)[0].error == "x" * 1000


# ------------------------------------------------------------------------------------- failures and retries


def test_a_nack_waits_for_its_back_off() -> None:
    desk = Desk(*plain(1))
    bounds = []
    for failures, longest in ((1, 1), (2, 2), (3, 4), (4, 8)):
        assert desk.lease() == [0]
        assert desk.nack(0, 1) == []
        due_us = desk.partition.queues.next_due_us()
        assert due_us is not None
        bounds.append((due_us - desk.now_us) / (longest * SECOND))
        desk.wait((due_us - desk.now_us) / SECOND - 0.000001)
        assert desk.lease() == [], "not a moment earlier"
        desk.wait(0.000001)
        assert desk.figures()["failures"] == failures
    assert all(0.5 <= bound <= 1 for bound in bounds)
    assert len(set(bounds)) == 4, "jittered"


def test_a_delay_takes_the_place_of_the_back_off() -> None:
    desk = Desk(*plain(1))
    desk.lease()
    desk.nack(0, 1, delay_ms=10_000)
    desk.wait(9.999)
    assert desk.lease() == []
    desk.wait(0.001)
    assert desk.ask().runs == [(0, 1, 2, 1)]


def test_nothing_that_waits_blocks_what_does_not_have_to() -> None:
    desk = Desk(*plain(6))
    desk.lease(count=3)
    desk.nack(1, 2, delay_ms=60_000)
    assert desk.lease() == [3, 4, 5]


def test_retries_go_first() -> None:
    desk = Desk(*plain(6))
    desk.lease(count=3)
    desk.nack(0, 3, delay_ms=0)
    assert desk.ask(count=4).runs == [(0, 3, 2, 1), (3, 1, 1, 0)]


def test_given_back_is_no_failure() -> None:
    desk = Desk(*plain(2))
    desk.lease()
    desk.nack(0, 2, failure=False)
    assert desk.figures()["failures"] == 0
    assert desk.ask().runs == [(0, 2, 2, 0)]


def test_an_expired_lease_is_available_at_once_to_the_same_member() -> None:
    desk = Desk(*plain(2))
    desk.lease()
    assert desk.partition.queues.next_due_us() == T0 + 30 * SECOND
    decision = desk.wait(30)
    assert decision.soft
    assert desk.ask().runs == [(0, 2, 2, 1)]
    assert desk.figures()["failures"] == 2


def test_too_many_failures_lead_to_the_dead_letters() -> None:
    desk = Desk(*plain(2), max_attempts=2)
    desk.lease("ada")
    desk.nack(0, 1, error="first", delay_ms=0)
    desk.now_us += SECOND
    assert desk.lease("ada") == [0]
    desk.nack(0, 1, error="second")
    assert desk.lease("ada") == []
    dead = desk.partition.queues.dying("g", 10)
    assert [(d.offset, d.reason, d.error, d.deliveries, d.failures) for d in dead] == [
        (0, "max_attempts", "second", 2, 2)
    ]
    assert (dead[0].first_us, dead[0].last_us, dead[0].member) == (T0, T0 + SECOND, "ada")
    assert desk.wait(30).facts, "the other one expires"
    desk.wait(0)
    desk.lease()
    decision = desk.wait(30)
    assert not decision.soft, "it dies, which is hard"
    assert [d.offset for d in desk.partition.queues.dying("g", 10)] == [0, 1]


def test_reject_goes_straight_to_the_dead_letters() -> None:
    desk = Desk(*plain(3))
    desk.lease()
    desk.do(wire.Reject("t", 0, "g", 1, [0, 2], "poison", "broken"))
    assert desk.lease() == []
    assert desk.figures()["dying"] == 2
    assert desk.partition.queues.committed("g") == 0
    desk.do(inner.BuryDone("g", [0, 2], "t.dlq", [5, 50, 5, 51]))
    assert desk.facts[-1].places == [5, 50, 5, 51]
    assert desk.partition.queues.committed("g") == 2
    assert desk.figures()["dead_lettered"] == 2
    assert desk.do(inner.BuryDone("g", [0, 2], "t.dlq", [5, 50, 5, 51])).facts == ()


def test_burials_in_part_keep_their_places() -> None:
    desk = Desk(*plain(5))
    desk.lease()
    desk.do(wire.Reject("t", 0, "g", 1, [1, 2, 3, 4]))
    desk.do(inner.BuryDone("g", [0, 5], "t.dlq", [0, 10, 0, 11, 0, 12, 0, 13, 0, 14]))
    assert desk.facts[-1].spans == [1, 2, 3, 4]
    assert desk.facts[-1].places == [0, 11, 0, 13]


# ---------------------------------------------------------------------------------------------- order by key


def test_a_failure_gives_back_the_later_messages_of_its_key() -> None:
    desk = Desk(*keyed("aba-ab"))
    assert desk.lease(count=3) == [0, 1, 2]
    assert desk.lease() == [3, 4, 5]
    desk.nack(0, 1, lease=1, delay_ms=2000)
    assert desk.figures()["failures"] == 1
    assert desk.ack(2, 3, lease=1) == [2, 3], "given back"
    assert desk.ack(4, 5, lease=2) == [4, 5], "in another lease, too"
    assert desk.ack(1, 2, lease=1) == []
    assert desk.ack(3, 4, 5, 6, lease=2) == []
    desk.publish(*keyed("ba-"))
    assert desk.lease() == [6, 8], "the key is held, the others go on"
    assert desk.figures()["held"] == 1
    desk.wait(2)
    assert desk.lease() == [0, 2, 4, 7], "and comes back in order"


def test_a_later_failure_leaves_the_earlier_messages_alone() -> None:
    desk = Desk(*keyed("aaa"))
    desk.lease()
    desk.nack(1, 2, delay_ms=1000)
    assert desk.ack(0, 1) == []
    desk.wait(1)
    assert desk.lease() == [1, 2]


def test_expiry_holds_the_key_in_order() -> None:
    desk = Desk(*keyed("abab"))
    desk.lease(count=2, lease_ms=1000)
    desk.lease()
    desk.wait(1)
    assert desk.ack(2, 4, lease=2) == [2, 4], "both keys failed"
    assert desk.ask().runs == [(0, 2, 2, 1), (2, 2, 2, 0)]


def test_a_dying_message_holds_its_key_and_a_dead_one_does_not() -> None:
    desk = Desk(*keyed("ab"))
    desk.lease()
    desk.do(wire.Reject("t", 0, "g", 1, [0, 1]))
    desk.publish(*keyed("ab"))
    assert desk.lease() == [3]
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert desk.lease() == [2]


def test_frames_that_left_memory_are_loaded_to_find_the_keys() -> None:
    desk = Desk(*keyed("ab"))
    desk.publish(*keyed("ab"))
    desk.lease()
    desk.shelf.away = {0, 2}
    decision = desk.partition.decide(wire.Nack("t", 0, "g", 1, [0, 1]), T0)
    assert decision.missing == 0
    desk.nack(0, 1, delay_ms=1000)
    assert desk.ack(2, 3) == [2, 3]


def test_a_long_stretch_of_a_held_key_is_passed_over_once() -> None:
    desk = Desk(*keyed("a"))
    desk.lease()
    desk.nack(0, 1, delay_ms=60_000)
    for _ in range(5):
        desk.publish(*keyed("aaaa"))
    desk.publish(*keyed("b"))
    command = inner.LeaseRun("g", "ada", 1, 9, 100, 1 << 20, 22)
    for base in range(1, 21, 4):
        desk.shelf.away = {1, 5, 9, 13, 17, 21} - {base}
        assert desk.partition.decide(command, T0).missing == (base + 4 if base < 21 else None)
    desk.shelf.away = {1, 5, 9, 13, 17}
    assert desk.partition.decide(command, T0).facts[0].spans == [21, 22]
    assert desk.do(command).facts[0].spans == [21, 22]
    assert desk.figures()["held"] == 20
    assert desk.ack(21, 22, lease=9) == []
    desk.shelf.away = set()
    desk.wait(60)
    assert desk.lease() == [0, *range(1, 21)]


def test_what_was_opened_again_keeps_the_order_of_its_key() -> None:
    desk = Desk(*keyed("aaa"))
    desk.lease()
    desk.ack(0, 1)
    desk.nack(1, 2, delay_ms=0)
    desk.do(wire.Reopen("t", 0, "g", [0, 1]))
    assert desk.lease() == [0]
    assert desk.lease() == [1, 2]


def test_without_order_no_keys_are_looked_at() -> None:
    desk = Desk(*keyed("aa"), ordering="none")
    desk.lease()
    desk.shelf.away = {0}
    desk.nack(0, 1, delay_ms=1000)
    assert desk.shelf.away == {0}
    assert desk.ack(1, 2) == []


# -------------------------------------------------------------------------------------- order of partitions


def test_a_partition_in_order_waits_for_the_oldest() -> None:
    desk = Desk(*plain(6), ordering="partition")
    assert desk.lease(count=2) == [0, 1]
    assert desk.lease(count=2) == [2, 3]
    desk.nack(1, 2, lease=1, delay_ms=1000)
    assert desk.ack(2, 4, lease=2) == [2, 4]
    assert desk.lease() == []
    assert desk.ack(0, 1, lease=1) == []
    desk.wait(1)
    assert desk.ask().runs == [(1, 1, 2, 1), (2, 2, 2, 0), (4, 2, 1, 0)]


def test_a_partition_in_order_waits_for_the_burial() -> None:
    desk = Desk(*plain(3), ordering="partition")
    desk.lease(count=1)
    desk.do(wire.Reject("t", 0, "g", 1, [0, 1]))
    assert desk.lease() == []
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert desk.lease() == [1, 2]


def test_a_shared_partition_in_order_has_one_member_at_a_time() -> None:
    desk = Desk(*plain(4), ordering="partition", assignment="shared")
    assert desk.lease("ada", 2) == [0, 1]
    assert desk.lease("bob") == []
    assert desk.lease("ada", 1) == [2]
    desk.do(inner.EvictMember("g", "ada"))
    assert desk.lease("bob") == [0, 1, 2, 3]


# ----------------------------------------------------------------------------------------------------- TTL


def test_expired_messages_lapse_when_their_turn_comes() -> None:
    desk = Desk(Letter(), Letter(expires_us=T0 + SECOND), Letter(expires_us=T0 + 2 * SECOND))
    desk.now_us += SECOND
    decision = desk.do(inner.LeaseRun("g", "ada", 1, 9, 100, 1 << 20, 3))
    assert not decision.soft
    assert [type(fact).__name__ for fact in decision.facts] == ["Leased", "Lapsed"]
    assert decision.facts[0].spans == [0, 1, 2, 3]
    desk.now_us += 10 * SECOND
    assert desk.ack(2, 3, lease=9) == [], "a message in flight does not expire"
    assert desk.figures()["lapsed"] == 1


def test_expired_messages_go_to_the_dead_letters_on_request() -> None:
    desk = Desk(Letter("a", expires_us=T0 + SECOND), Letter("a"), Letter("b"), expired_to_dlq=True)
    desk.now_us += SECOND
    assert desk.lease() == [2], "it holds its key while it dies"
    assert [d.reason for d in desk.partition.queues.dying("g", 9)] == ["expired"]
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert desk.lease() == [1]


def test_a_retry_that_expired_lapses() -> None:
    desk = Desk(Letter(expires_us=T0 + SECOND), Letter())
    desk.lease(count=1)
    desk.nack(0, 1, delay_ms=1000)
    desk.wait(1)
    assert desk.lease() == [1]
    assert desk.figures()["lapsed"] == 1
    assert desk.partition.queues.committed("g") == 1


# ------------------------------------------------------------------------------------------- administration


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


def test_a_reset_starts_again() -> None:
    desk = Desk(*plain(4))
    desk.lease()
    desk.ack(0, 2)
    desk.nack(2, 3)
    desk.do(wire.Reject("t", 0, "g", 1, [3, 4]))
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


def test_an_operator_settles_whatever_is_not_dying() -> None:
    desk = Desk(*plain(8))
    desk.lease(count=4)
    desk.nack(0, 1)
    desk.do(wire.Reject("t", 0, "g", 1, [1, 2]))
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
    desk.do(wire.Reject("t", 0, "g", 1, [2, 3]))
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


def test_other_options_keep_the_state() -> None:
    desk = Desk(*plain(4))
    desk.lease(count=2)
    desk.do(inner.Enlist("g", GroupPolicy(max_attempts=1)))
    desk.nack(0, 1)
    assert desk.figures()["dying"] == 1
    assert desk.lease() == [2, 3]


# ------------------------------------------------------------------------------------ lanes and shared keys


def test_lanes_are_left_to_the_pool() -> None:
    letters = [Letter(priority=4), Letter(priority=4), Letter(priority=0)]
    desk = Desk(*letters, priority_mode="strict", ordering="none")
    assert desk.lease(count=1) == [2]
    assert desk.figures()["held"] == 2
    desk.nack(2, 3, delay_ms=0)
    assert desk.ask(count=2).runs == [(2, 1, 2, 1), (0, 1, 1, 0)]


def test_a_shared_key_is_in_flight_to_one_member() -> None:
    desk = Desk(*keyed("aab"), assignment="shared")
    assert desk.lease("ada", 1) == [0]
    assert desk.lease("bob") == [2]
    assert desk.lease("ada") == [1]
    desk.nack(0, 1, lease=1, delay_ms=0)
    assert desk.ack(1, 2, lease=3) == [1, 2]
    assert desk.lease("bob") == [0, 1]


# ------------------------------------------------------------------------------------------------- restarts


def busy_desk() -> Desk:
    """A bit of everything."""
    desk = Desk(*keyed("abc-abc-abc-"), max_attempts=3)
    desk.do(inner.Enlist("other", GroupPolicy(assignment="shared", ordering="none")))
    desk.lease(count=4, lease_ms=1000)
    desk.lease(count=4)
    desk.ack(4, 5)
    desk.nack(5, 6, delay_ms=5000, error="no")
    desk.do(wire.Reject("t", 0, "g", 2, [6, 7], "poison", "broken"))
    desk.wait(1)
    desk.publish(*keyed("abcabc"))
    desk.lease(count=3)
    desk.do(inner.LeaseRun("other", "eve", 0, 1 << 63, 7, 1 << 20, 18))
    desk.do(wire.Ack("t", 0, "other", [(1 << 63, [0, 2, 4, 7])]))
    desk.do(TrimTopic("t", 0, 1))
    return desk


def test_a_snapshot_and_a_replay_give_the_same_bytes() -> None:
    desk = busy_desk()
    image = b"".join(desk.partition.snapshot())
    replayed = Partition(TopicOptions())
    for fact in desk.facts:
        replayed.apply(fact)
    assert b"".join(replayed.snapshot()) == image
    restored = Partition.restore(TopicOptions(), [image])
    restored.check()
    assert b"".join(restored.snapshot()) == image


def test_a_restored_partition_goes_on_as_if_nothing_had_happened() -> None:
    desk = busy_desk()
    restored = Partition.restore(TopicOptions(), desk.partition.snapshot())
    restored.at_hand = desk.shelf
    twins = (desk.partition, restored)
    number = 100
    for step in range(60):
        desk.now_us += 700_000
        number += 1
        for command in (
            inner.ExpireLeases(),
            inner.LeaseRun("g", "ada", 1, number, 3, 1 << 20, 18, 2000),
            wire.Nack("t", 0, "g", number, [0, 6], 500)
            if step % 3
            else wire.Ack("t", 0, "g", [(number, [0, 9])]),
            wire.Ack("t", 0, "g", [(number, [9, 18])]),
            inner.BuryDone("g", [0, 18], "t.dlq", []),
        ):
            decisions = [twin.decide(command, desk.now_us) for twin in twins]
            assert decisions[0].reply == decisions[1].reply
            assert decisions[0].facts == decisions[1].facts
            for twin, decision in zip(twins, decisions, strict=True):
                for fact in decision.facts:
                    twin.apply(fact)
        assert b"".join(twins[0].snapshot()) == b"".join(twins[1].snapshot())
    assert desk.partition.queues.committed("g") == 18, "everything is settled in the end"


def test_settled_messages_take_no_room() -> None:
    desk = Desk(*plain(5000))
    size = sum(len(buffer) for buffer in desk.partition.queues.buffers())
    for _ in range(50):
        spans = desk.lease(count=100)
        desk.ack(spans[0], spans[-1] + 1)
    desk.wait(31)
    desk.publish(*plain(1))
    desk.ack(*desk.lease(), 5001)
    assert sum(len(buffer) for buffer in desk.partition.queues.buffers()) < size + 100


def test_decide_only_reads() -> None:
    desk = busy_desk()
    before = desk.partition.snapshot()
    for later in (0, 90, 3600, 10):
        now_us = desk.now_us + later * SECOND
        for command in (
            inner.LeaseRun("g", "ada", 1, 999, 100, 1 << 20, 18),
            inner.ExpireLeases(),
            inner.GrantTo("g", "bob", 5),
            wire.Reopen("t", 0, "g", [4, 5]),
        ):
            first, second = (desk.partition.decide(command, now_us) for _ in range(2))
            assert (first.facts, first.reply) == (second.facts, second.reply)
    assert b"".join(desk.partition.snapshot()) == b"".join(before)
