"""Stored facts: their bytes are a promise to every later release.

Also covers `core/model/group_facts.py`.
"""

from __future__ import annotations

import msgspec
import pytest

from tailrace.core.model import facts
from tailrace.core.model.facts import Fact, ProducerAdvanced, ProducerClaimed, Trimmed
from tailrace.core.model.group_options import GroupPolicy

POLICY = (
    "de0012a46d6f6465a57175657565aa61737369676e6d656e74a46175746fa86f72646572696e67a36b6579a573746172"
    "74a86561726c69657374a86c656173655f6d73cd7530ac6d61785f617474656d70747303ae6d61785f64656c69766572"
    "69657314aa6261636b6f66665f6d73cd03e8ae6261636b6f66665f6d61785f6d73cdea60ad696e5f666c696768745f6d"
    "6178cd2710b367726f75705f696e5f666c696768745f6d6178ce000186a0ad7072696f726974795f6d6f6465a8776569"
    "6768746564ad73746172766174696f6e5f6d73cd7530ae657870697265645f746f5f646c71c2aa73657373696f6e5f6d"
    "73cd7530b27265636f6e6e6563745f67726163655f6d73cd0bb8ac6865617274626561745f6d73cd0bb8b17265766f6b"
    "655f74696d656f75745f6d73cdea60"
)

EARLIER_POLICY = (
    "de0011a46d6f6465a57175657565aa61737369676e6d656e74aa706172746974696f6e73a86f72646572696e67a36b65"
    "79a57374617274a86561726c69657374a86c656173655f6d73cd7530ac6d61785f617474656d70747303ae6d61785f64"
    "656c6976657269657314aa6261636b6f66665f6d73cd03e8ae6261636b6f66665f6d61785f6d73cdea60ad696e5f666c"
    "696768745f6d6178cd2710b367726f75705f696e5f666c696768745f6d6178ce000186a0ad7072696f726974795f6d6f"
    "6465a87765696768746564ad73746172766174696f6e5f6d73cd7530ae657870697265645f746f5f646c71c2aa736573"
    "73696f6e5f6d73cd7530ac6865617274626561745f6d73cd0bb8b17265766f6b655f74696d656f75745f6d73cdea60"
)
"""Of a release in which partitions were never shared by default, and closed connections meant nothing."""

GOLDEN = [
    (ProducerClaimed(7, 1, 2), "9401070102"),
    (ProducerAdvanced((1 << 64) - 1, 1, 2, 3, 4, 5, 6), "9802cfffffffffffffffff010203040506"),
    (Trimmed(300), "9203cd012c"),
    (facts.Enlisted(1, "g", GroupPolicy(max_attempts=3), 5, 6, 7), "970401a167" + POLICY + "050607"),
    (facts.Delisted(1, 2), "93050102"),
    (facts.Granted(1, "m", 2, 3, True, True), "970601a16d0203c3c3"),
    (
        facts.Leased(1, (1 << 64) - 1, "m", [0, 2], 3, 4, [5, 6]),
        "980701cfffffffffffffffffa16d9200020304920506",
    ),
    (facts.LeaseExtended(1, [2, 3], 4, 5), "9508019202030405"),
    (facts.LeaseExpired(1, 2, 3, [4]), "9609010203910490"),
    (facts.Acked(1, [(2, [3, 4])], 5), "940a0191920292030405"),
    (facts.Nacked(1, 2, [3, 4], -1, 5, [6], "no"), "980b0102920304ff059106a26e6f"),
    (facts.GivenBack(1, [2, 3], 4, [5], True, [2, 3]), "970c01920203049105c3920203"),
    (facts.Dying(1, [2, 3], "rejected", 4, "no", [5]), "970d01920203a872656a656374656404a26e6f9105"),
    (facts.Buried(1, [2, 3], 4, "t.dlq", [5, 6]), "960e0192020304a5742e646c71920506"),
    (facts.Lapsed(1, [2, 3], 4), "940f0192020304"),
    (facts.CursorMoved(1, "m", 2, 3), "951001a16d0203"),
    (facts.GroupReset(1, 2, 3, 4), "951101020304"),
    (facts.Reopened(1, [2, 3], 4, [5]), "951201920203049105"),
    (facts.GroupPaused(1, True, 2), "941301c302"),
    (facts.OffsetsSettled(1, [2, 3], 4), "94140192020304"),
    (facts.Released(1, 2 << 20 | 3, 4), "941501ce0020000304"),
    (facts.ScheduleCancelled([1, 2], 3), "931692010203"),
    (facts.StageApplied("w", 2, [3], 4), "9517a17702910304"),
    (facts.StageDropped([1], 2), "9318910102"),
    (facts.MessagesLost([1, 2], 3), "931992010203"),
]


@pytest.mark.parametrize(("fact", "data"), GOLDEN)
def test_bytes_of_facts(fact: Fact, data: str) -> None:
    assert msgspec.msgpack.encode(fact).hex() == data
    assert msgspec.msgpack.decode(bytes.fromhex(data), type=Fact) == fact


def test_every_fact_has_a_tag_and_golden_bytes() -> None:
    kinds = {type(fact) for fact, _ in GOLDEN}
    assert kinds == set(Fact.__args__)
    assert {kind.__struct_config__.tag for kind in kinds} == set(range(1, 26))


def test_a_newer_fact_with_more_fields_can_be_read() -> None:
    assert msgspec.msgpack.decode(bytes.fromhex("9303cd012c09"), type=Fact) == Trimmed(300)


def test_facts_of_earlier_releases_can_be_read() -> None:
    earlier = bytes.fromhex("950c01920203049105")
    assert msgspec.msgpack.decode(earlier, type=Fact) == facts.GivenBack(1, [2, 3], 4, [5])
    earlier = bytes.fromhex("950601a16d0203")
    assert msgspec.msgpack.decode(earlier, type=Fact) == facts.Granted(1, "m", 2, 3)
    earlier = bytes.fromhex("970401a167" + EARLIER_POLICY + "050607")
    policy = GroupPolicy(max_attempts=3, assignment="partitions")
    assert msgspec.msgpack.decode(earlier, type=Fact) == facts.Enlisted(1, "g", policy, 5, 6, 7)
