"""The verbs behind dead letters: what is still there, and holding some of it while something is done.

Also covers `core/queue/hold_decision.py`.
"""

from typing import Any

import pytest

from tailrace.core.model.commands import Done, Publish, Published
from tailrace.core.model.queue_commands import (
    FindUnsettled,
    HoldOffsets,
    OffsetsHeld,
    Republish,
    SettleOffsets,
    UnsettledFound,
)
from tailrace.format import batch as arrow
from tailrace.format import frame
from tests.broker.queue_engine import QueueEngine, values


def make() -> QueueEngine:
    broker = QueueEngine()
    broker.create(partitions=1)
    broker.enlist(assignment="shared", ordering="none")
    broker.send(*(b"%d" % number for number in range(6)))
    return broker


def test_looking_changes_nothing() -> None:
    broker = make()
    broker.ask(SettleOffsets("t", 0, "g", [1, 3]))
    before = broker.runtime().entry
    assert broker.ask(FindUnsettled("t", 0, "g")) == UnsettledFound([0, 1, 3, 6])
    assert broker.ask(FindUnsettled("t", 0, "g", 2, 2)) == UnsettledFound([3, 5])
    assert broker.ask(FindUnsettled("t", 0, "nobody", 4)) == UnsettledFound([4, 6])
    assert broker.runtime().entry == before


def test_what_is_held_is_kept_from_others_until_it_is_given_back_or_time_is_over() -> None:
    broker = make()
    hold = HoldOffsets("t", 0, "g", "operator", [0, 4], 5_000)
    assert broker.ask(hold) == OffsetsHeld([0, 4])
    assert broker.ask(HoldOffsets("t", 0, "g", "another", [3, 5])) == OffsetsHeld([4, 5], [3, 4])
    assert values(broker.lease(lease_ms=60_000)) == [b"5"]
    broker.ask(SettleOffsets("t", 0, "g", [0, 2]))
    assert broker.ask(HoldOffsets("t", 0, "g", "another", [])) == Done()
    assert values(broker.lease(lease_ms=60_000)) == [b"4"]
    waiting = broker.begin_lease(wait_ms=60_000)
    broker.pass_s(5.1)
    assert len(waiting) == 1  # Who waits is told.
    assert broker.ask(FindUnsettled("t", 0, "g")) == UnsettledFound([2, 6])


@pytest.mark.parametrize(("size", "code"), [(64 * 1024 + 512, None), (64 * 1024 + 513, "too_large")])
def test_a_copy_has_room_for_its_mark(size: int, code: str | None) -> None:
    broker = make()
    columns, body = arrow.encode([b"x"], ids=bytes(16), timestamps=1, headers=[[("h", bytes(size - 1))]])
    reply = broker.submit(Republish("t", 0, columns, frame.crc32c(body)), body)[0][0]
    assert (None if isinstance(reply, Published) else reply.code) == code
    reply = broker.submit(Publish("t", 0, columns, frame.crc32c(body)), body)[0][0]
    assert reply.code == "too_large"
    reply = broker.submit(Republish("t", 0, columns, 1), body)[0][0]
    assert (reply.code, "crc" in reply.message) == ("invalid_request", True)


@pytest.mark.parametrize(
    ("request_", "code", "told"),
    [
        (FindUnsettled("t", 7, "g"), "not_found", "partitions 0 to 0"),
        (FindUnsettled("nowhere", 0, "g"), "not_found", "nowhere"),
        (FindUnsettled("t", 0, "g", 0, 0), "invalid_request", "count_max"),
        (HoldOffsets("t", 0, "nobody", "m", [0, 1]), "not_found", "nobody"),
        (HoldOffsets("t", 0, "g", "", [0, 1]), "invalid_request", "member"),
        (HoldOffsets("t", 0, "g", "m", [0, 1], 0), "invalid_request", "lease_ms"),
        (HoldOffsets("t", 0, "g", "m", [1, 0]), "invalid_request", "spans"),
    ],
)
def test_wrong_requests_name_what_is_wrong(request_: Any, code: str, told: str) -> None:
    refusal = make().ask(request_)
    assert refusal.code == code
    assert told in refusal.message
