"""One suite for every `Gate`, the receivers of answers, and their `Waiting` requests: native, in-process."""

from collections.abc import Callable

import pytest

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.ports import Gate, Waiting
from tailrace.protocols.edge_tuning import CONNECTION_READ_BYTES_MAX
from tests.broker.queue.test_fetch_request import Valve
from tests.protocols.test_native import Bench


class Request:
    """A request that waits, and what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def hang_up(self) -> None:
        self.told.append("hang up")

    def drop(self) -> None:
        self.told.append("drop")


def nothing() -> None:
    """Of a receiver that cannot be shut."""


class Receiver:
    """A gate, and how to shut and open it from the other side."""

    def __init__(
        self, gate: Gate, shut: Callable[[], None] = nothing, open_: Callable[[], None] = nothing
    ) -> None:
        self.gate = gate
        self.shut = shut
        self.open = open_


@pytest.fixture(params=["in-process", "test", "native"])
def receiver(request: pytest.FixtureRequest) -> Receiver:
    if request.param == "in-process":
        return Receiver(OpenGate())
    if request.param == "test":
        valve = Valve()

        def shut() -> None:
            valve.shut = True

        return Receiver(valve, shut, valve.open)
    link = Bench().peer().link
    return Receiver(link, link.pause_writing, link.resume_writing)


def test_an_open_gate_keeps_nobody_waiting(receiver: Receiver) -> None:
    resumed: list[str] = []
    assert not receiver.gate.blocked(lambda: resumed.append("a"))
    receiver.open()
    assert resumed == []


def test_who_is_blocked_is_resumed_once(receiver: Receiver) -> None:
    resumed: list[str] = []
    receiver.shut()
    expected = ["a"] if receiver.gate.blocked(lambda: resumed.append("a")) else []
    assert bool(expected) == (receiver.shut is not nothing)
    assert resumed == []
    receiver.open()
    assert resumed == expected
    receiver.shut()
    receiver.open()
    assert resumed == expected
    assert not receiver.gate.blocked(lambda: resumed.append("b"))


def test_what_is_reserved_is_released(receiver: Receiver) -> None:
    resumed: list[str] = []
    gate = receiver.gate
    assert gate.reserve(CONNECTION_READ_BYTES_MAX, lambda: resumed.append("first"))
    room = gate.reserve(1, lambda: resumed.append("second"))
    gate.release(CONNECTION_READ_BYTES_MAX)
    assert resumed == ([] if room else ["second"])
    assert gate.reserve(1, lambda: resumed.append("third"))
    gate.release(1)


def test_requests_that_wait_are_kept_by_their_receiver(receiver: Receiver) -> None:
    first: Waiting = Request()
    second: Waiting = Request()
    receiver.gate.fetches[first] = None
    receiver.gate.fetches[second] = None
    del receiver.gate.fetches[first]
    assert list(receiver.gate.fetches) == [second]
    receiver.gate.answered_us["t"] = 5
    assert receiver.gate.answered_us == {"t": 5}


def test_a_receiver_that_goes_away_drops_what_waits() -> None:
    peer, waiting = Bench().peer(), Request()
    peer.link.fetches[waiting] = None
    peer.link.connection_lost(None)
    assert waiting.told == ["drop"]
