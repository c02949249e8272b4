"""Groups on a partition: failures, order, expiry and lanes, every rule by name."""

from __future__ import annotations

from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tests.core.delivery_model import Letter
from tests.core.desk import SECOND, T0, Desk, keyed, plain

# --------------------------------------------------------------------------------------- failures and retries


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
    assert desk.lease(alone=True) == [1]
    decision = desk.wait(30)
    assert not decision.soft, "it dies, which is hard"
    assert [d.offset for d in desk.partition.queues.dying("g", 10)] == [0, 1]


def test_reject_goes_straight_to_the_dead_letters() -> None:
    desk = Desk(*plain(3))
    desk.lease()
    desk.do(wire.RejectMessages("t", 0, "g", 1, [0, 2], "poison", "broken"))
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
    desk.do(wire.RejectMessages("t", 0, "g", 1, [1, 2, 3, 4]))
    desk.do(inner.BuryDone("g", [0, 5], "t.dlq", [0, 10, 0, 11, 0, 12, 0, 13, 0, 14]))
    assert desk.facts[-1].spans == [1, 2, 3, 4]
    assert desk.facts[-1].places == [0, 11, 0, 13]


# ----------------------------------------------------------------------------------------------- order by key


def test_a_rejection_leaves_in_flight_what_is_and_holds_the_rest_until_its_dead_letter_is_stored() -> None:
    desk = Desk(*keyed("aab-aa"))
    assert desk.lease(count=2) == [0, 1]
    desk.do(wire.RejectMessages("t", 0, "g", 1, [0, 1]))
    assert desk.ack(1, 2, lease=1) == [], "in flight to the one who rejected: it goes on with it"
    assert desk.lease() == [2, 3], "the others of its key wait"
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert desk.lease() == [4, 5]


def test_one_that_dies_of_a_failure_gives_back_the_later_ones_like_any_failure() -> None:
    desk = Desk(*keyed("aa"), max_attempts=1)
    assert desk.lease() == [0, 1]
    desk.nack(0, 1, lease=1)
    assert desk.ack(1, 2, lease=1) == [1, 2], "given back"
    assert desk.lease() == [], "it holds its order until its dead letter is stored"
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert desk.lease() == [1]


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
    assert desk.lease() == [0, 2], "what nobody began to handle has its turn with what was never delivered"
    assert desk.lease() + desk.lease() == [4, 7], "and all of it comes in order"


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
    desk.do(wire.RejectMessages("t", 0, "g", 1, [0, 1]))
    desk.publish(*keyed("ab"))
    assert desk.lease() == [3]
    desk.do(inner.BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert desk.lease() == [2]


def test_frames_that_left_memory_are_loaded_to_find_the_keys() -> None:
    desk = Desk(*keyed("ab"))
    desk.publish(*keyed("ab"))
    desk.lease()
    desk.shelf.away = {0, 2}
    decision = desk.partition.decide(wire.Nack("t", 0, "g", 1, [0, 1]), desk.turn())
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
        assert desk.partition.decide(command, desk.turn()).missing == (base + 4 if base < 21 else None)
    desk.shelf.away = {1, 5, 9, 13, 17}
    assert desk.partition.decide(command, desk.turn()).facts[0].spans == [21, 22]
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


# ---------------------------------------------------------------------------------------- order of partitions


def test_a_partition_in_order_waits_for_the_oldest() -> None:
    desk = Desk(*plain(6), ordering="partition")
    assert desk.lease(count=2) == [0, 1]
    assert desk.lease(count=2) == [2, 3]
    desk.nack(1, 2, lease=1, delay_ms=1000)
    assert desk.ack(2, 4, lease=2) == [2, 4]
    assert desk.lease() == []
    assert desk.ack(0, 1, lease=1) == []
    desk.wait(1)
    assert desk.ask().runs == [(1, 1, 2, 1), (2, 4, 1, 0)], "what nobody began to handle was not delivered"


def test_a_partition_in_order_waits_for_the_burial() -> None:
    desk = Desk(*plain(3), ordering="partition")
    desk.lease(count=1)
    desk.do(wire.RejectMessages("t", 0, "g", 1, [0, 1]))
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


# -------------------------------------------------------------------------------------------------------- TTL


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


# -------------------------------------------------------------------------------------- lanes and shared keys


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
