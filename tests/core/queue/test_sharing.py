"""A partition that becomes shared, and one member's again: leases go on, and keys in flight are held.

Covers `core/queue/row_lookup.py`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model import internal_commands as inner
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.core.queue.ledger import Ledger
from tests.core.delivery_model import Letter
from tests.core.desk import Desk, keyed, plain
from tests.core.turns import at


def share(desk: Desk) -> None:
    _, generation = desk.partition.queues.grant("g") or ("", 0)
    desk.do(inner.GrantTo("g", "", generation, shared=True))


def give(desk: Desk, member: str, more: int = 0) -> None:
    _, generation = desk.partition.queues.grant("g") or ("", 0)
    desk.do(inner.GrantTo("g", member, generation + more))


def restarted(desk: Desk) -> None:
    """The partition is built from a snapshot."""
    chunks = [bytes(chunk) for chunk in desk.partition.snapshot()]
    desk.partition = Partition.restore(TopicOptions(), chunks)


@pytest.mark.parametrize("restart", [False, True])
def test_keys_in_flight_are_held_when_a_partition_becomes_shared(restart: bool) -> None:
    desk = Desk(*keyed("aabb-cc"))
    assert desk.lease("ada", 3) == [0, 1, 2]
    share(desk)
    if restart:
        restarted(desk)
    assert desk.lease("bob") == [4, 5, 6], "a and b are with ada, though her lease names no keys"
    assert desk.lease("ada") == [3]
    assert desk.ack(0, 3, lease=1) == [], "she goes on with what she had"


@pytest.mark.parametrize("restart", [False, True])
def test_keys_in_flight_are_held_when_a_partition_is_one_members_again(restart: bool) -> None:
    desk = Desk(*keyed("abab"))
    share(desk)
    assert desk.lease("ada", 1) == [0]
    assert desk.lease("bob", 1) == [1]
    give(desk, "ada")
    if restart:
        restarted(desk)
    assert isinstance(desk.ask("bob"), Refusal)
    assert desk.lease("ada") == [2]
    assert desk.ack(1, 2, lease=2) == [], "what bob has is still his"
    assert desk.lease("ada") == [3]


def test_nothing_is_given_back_within_a_generation() -> None:
    desk = Desk(*plain(4))
    desk.lease("ada", 2)
    before = len(desk.facts)
    share(desk)
    desk.lease("bob", 2)
    give(desk, "ada")
    kinds = [type(fact).__name__ for fact in desk.facts[before:]]
    assert kinds == ["Granted", "Leased", "Granted"]
    assert desk.figures()["in_flight"] == 4


def test_a_higher_generation_takes_what_the_owner_had_and_nothing_else() -> None:
    desk = Desk(*keyed("ab"))
    share(desk)
    desk.lease("ada", 1)
    desk.lease("bob", 1)
    give(desk, "ada")
    give(desk, "cleo", 1)
    assert desk.lease("cleo") == [0]
    assert desk.ack(1, 2, lease=2) == []
    desk.do(inner.EvictMember("g", "cleo"))
    assert desk.ask("cleo").runs == [(0, 1, 3, 0)]


def test_a_failure_of_somebody_elses_lease_keeps_the_order() -> None:
    desk = Desk(*keyed("aaa"))
    share(desk)
    assert desk.lease("bob", 2) == [0, 1]
    give(desk, "ada")
    assert desk.lease("ada") == []
    desk.nack(0, 1, lease=1, delay_ms=0)
    assert desk.lease("ada")[:2] == [0, 1]


def test_one_member_alone_needs_no_account_of_keys() -> None:
    desk = Desk(*keyed("abcabc"))
    share(desk)
    desk.lease("bob", 1)
    give(desk, "ada")
    desk.lease("ada", 1)
    ledger: Ledger = desk.partition.queues._ledgers["g"]
    assert ledger.pool is not None
    desk.ack(0, 1, lease=1)
    desk.lease("ada", 1)
    assert ledger.pool is None


def test_lanes_go_on_across_the_switch() -> None:
    desk = Desk(*[Letter("k", priority=lane) for lane in (4, 0)], *[Letter("h", priority=0)])
    assert desk.lease("ada", 1) == [2], "the lane of a key is that of its oldest message"
    share(desk)
    assert desk.lease("bob", 1) == [0]
    assert desk.lease("ada") == []
    assert desk.lease("bob") == [1]


def test_asking_as_of_a_later_time_leaves_no_trace() -> None:
    desk = Desk(*keyed("-a"), backoff_ms=1_000)
    share(desk)
    desk.lease("bob", 1)
    desk.nack(0, 1)
    _, generation = desk.partition.queues.grant("g") or ("", 0)
    command = inner.LeaseRun("g", "ada", generation, 99, 100, 1 << 20, 2)
    later = desk.partition.decide(command, at(desk.now_us + 61_000_000, desk.shelf)).reply
    assert isinstance(later, inner.RunLeased)
    assert desk.lease("ada") == [1], "the other waits for its back-off"


# ------------------------------------------------------------------------------------------------ any history

acts = st.sampled_from(
    ["ada", "bob", "cleo", "ack", "ack", "nack", "evict", "share", "one", "next", "restart"]
)


@given(st.text("ab-", min_size=1, max_size=12), st.lists(st.tuples(acts, st.integers(1, 4)), max_size=40))
def test_any_switches(keys: str, history: list[tuple[str, int]]) -> None:
    desk = Desk(*keyed(keys), backoff_ms=0, backoff_max_ms=0, max_attempts=1_000)
    flying: dict[int, tuple[str, list[int]]] = {}
    first: list[int] = []
    for act, number in history:
        names = ("ada", "bob", "cleo")
        if act in names:
            reply = desk.ask(act, number)
            if isinstance(reply, inner.RunLeased):
                offsets = [start + i for start, many, _, _ in reply.runs for i in range(many)]
                for offset in offsets:
                    key = keys[offset]
                    holders = {who for who, held in flying.values() if key in [keys[o] for o in held]}
                    assert key == "-" or holders <= {act}, f"{key} is with {holders}, and went to {act}"
                    if offset not in first:
                        assert key == "-" or all(keys[o] != key or o in first for o in range(offset))
                        first.append(offset)
                flying[desk.leases] = act, offsets
        elif act in ("ack", "nack") and flying:
            lease = sorted(flying)[number % len(flying)]
            offset = flying[lease][1][0]
            (desk.ack if act == "ack" else desk.nack)(offset, offset + 1, lease=lease)
        elif act == "evict":
            desk.do(inner.EvictMember("g", names[number % 3]))
        elif act == "share":
            share(desk)
        elif act in ("one", "next"):
            if act == "next" or desk.partition.queues.is_shared("g"):
                give(desk, names[number % 3], int(act == "next"))
        elif act == "restart":
            restarted(desk)
        live = desk.partition.queues._ledgers["g"]
        flying = {
            lease: (held[0], left)
            for lease, held in flying.items()
            if lease in live.receipts.live
            and (left := [o for s, e, _, _ in live.left_of(live.receipts.live[lease]) for o in range(s, e)])
        }
    give(desk, "ada", 1)
    for who in ("ada", "bob", "cleo"):
        desk.do(inner.EvictMember("g", who))
    # What may have ended its members is set apart, and goes to who asks for it alone.
    while offsets := desk.lease("ada") or desk.lease("ada", alone=True):
        for offset in offsets:
            assert desk.ack(offset, offset + 1) == []
    assert desk.figures()["lag"] == 0, "everything was delivered and settled"
