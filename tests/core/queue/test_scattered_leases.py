"""Leases of messages from everywhere in a backlog: handled many at once, as if one after the other."""

from __future__ import annotations

import random

import pytest

from tailrace.core.collections import span_map
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.core.queue import ledger
from tests.core.delivery_model import Letter
from tests.core.desk import Desk


def scattered(seed: int, rows: int = 10_000) -> tuple[Desk, list[int]]:
    """A backlog with random priorities: leased, settled in parts, given back, failed, leased again."""
    chance = random.Random(seed)
    desk = Desk(ordering="none")
    for _ in range(rows // 500):
        desk.publish(*[Letter(priority=chance.randrange(5)) for _ in range(500)])
    delivered: list[int] = []
    held: dict[int, list[int]] = {}
    for _ in range(24):
        offsets = desk.lease(count=chance.choice([30, 300, 500]), lease_ms=20_000)
        delivered += offsets
        held[desk.leases] = offsets
        number = chance.choice(list(held))
        settled = [offset for offset in held[number] if chance.random() < chance.choice([0.2, 0.9, 1.0])]
        if settled:
            flat = [bound for offset in sorted(settled) for bound in (offset, offset + 1)]
            act = chance.choice([desk.ack, desk.ack, desk.ack, desk.nack])
            act(*flat, lease=number)
            held[number] = [offset for offset in held[number] if offset not in settled]
        desk.wait(chance.choice([0, 0.1, 3]))
    return desk, delivered


@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_are_as_one_after_the_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, delivered = scattered(seed)
    image = b"".join(desk.partition.snapshot())
    assert desk.partition.queues._ledgers["g"].backlog.fresh._chunks, "nothing was handled at once"
    restored = Partition.restore(TopicOptions(), [image])
    restored.check()
    assert b"".join(restored.snapshot()) == image
    monkeypatch.setattr(span_map, "MANY", 1 << 40)
    monkeypatch.setattr(ledger, "FEW_BOUNDS", 1 << 40)
    one_by_one, same = scattered(seed)
    assert same == delivered
    assert b"".join(one_by_one.partition.snapshot()) == image


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_of_scattered_leases_gives_the_same_bytes(seed: int) -> None:
    desk, _ = scattered(seed)
    replayed = Partition(TopicOptions())
    for fact in desk.facts:
        replayed.apply(fact)
    assert b"".join(replayed.snapshot()) == b"".join(desk.partition.snapshot())
