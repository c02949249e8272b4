"""Stored facts: their bytes are a promise to every later release."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.core.facts import Fact, ProducerAdvanced, ProducerClaimed, Trimmed

GOLDEN = [
    (ProducerClaimed(7, 1, 2), "9401070102"),
    (ProducerAdvanced((1 << 64) - 1, 1, 2, 3, 4, 5), "9702cfffffffffffffffff0102030405"),
    (Trimmed(300), "9203cd012c"),
]


@pytest.mark.parametrize(("fact", "data"), GOLDEN)
def test_bytes_of_facts(fact: Fact, data: str) -> None:
    assert msgspec.msgpack.encode(fact).hex() == data
    assert msgspec.msgpack.decode(bytes.fromhex(data), type=Fact) == fact


def test_every_fact_has_a_tag_and_golden_bytes() -> None:
    kinds = {type(fact) for fact, _ in GOLDEN}
    assert kinds == set(Fact.__args__)
    assert {kind.__struct_config__.tag for kind in kinds} == {1, 2, 3}


def test_a_newer_fact_with_more_fields_can_be_read() -> None:
    assert msgspec.msgpack.decode(bytes.fromhex("9303cd012c09"), type=Fact) == Trimmed(300)
