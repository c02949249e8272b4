"""Who a link belongs to, without sockets: greetings with credentials, waiting for the authenticator, and the
end of what a caller has proved itself with.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tailrace.core.model.access import Caller, Origin
from tailrace.core.model.commands import Ping, Pong, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.format.wire import GREETING_BYTES_MAX, PREAMBLE, Credentials, Hello, Welcome, prefix
from tailrace.ports import Respond
from tailrace.protocols.edge_tuning import GREETING_US
from tests.protocols.test_native import SECOND_US, Bench, FakeVerbs, Peer

ANNA = Caller("anna", "token", "t1")
WRONG = Refusal("unauthenticated", "the credentials are wrong", "none")


class Asking:
    """An `Authenticator` that answers when the test says so, and a `Doorkeeper`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Credentials | None, Origin, Callable[[Caller | Refusal], None]]] = []
        self.ended: Refusal | None = None
        self.too_many: Refusal | None = None
        self.inside: list[Caller] = []

    def authenticate(
        self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
    ) -> None:
        self.asked.append((credentials, origin, done))

    def still(self, caller: Caller, now_us: int) -> Refusal | None:
        return self.ended

    def admitted(self, caller: Caller) -> Refusal | None:
        if self.too_many is None:
            self.inside.append(caller)
        return self.too_many

    def left(self, caller: Caller) -> None:
        self.inside.remove(caller)

    def answer(self, outcome: Caller | Refusal = ANNA) -> None:
        self.asked.pop(0)[2](outcome)


@pytest.fixture
def asking() -> Asking:
    return Asking()


@pytest.fixture
def bench(asking: Asking) -> Bench:
    return Bench(asking, asking)


def hello(credentials: Credentials | None = None, number: int = 0) -> bytes:
    return PREAMBLE + prefix(msgspec.msgpack.encode(Hello([1], "me", credentials)), 0, number)


PING = prefix(codec.encode_request(Ping()), 0, 7)


def knock(bench: Bench, more: bytes = b"", credentials: Credentials | None = None) -> Peer:
    peer = bench.peer(greeted=False)
    peer.send(hello(credentials) + more)
    return peer


def welcomed(peer: Peer) -> bool:
    return b"welcome" in peer.transport.written


def test_nothing_is_read_or_asked_until_the_caller_is_known(asking: Asking, bench: Bench) -> None:
    given = Credentials("anna", "secret")
    peer = knock(bench, PING, given)
    assert asking.asked[0][0] == given
    assert not peer.transport.reading
    assert not welcomed(peer)
    assert not bench.verbs.asked
    asking.answer()
    assert welcomed(peer)
    assert peer.link.caller == ANNA
    assert peer.transport.reading
    assert [asked.gate.caller for asked in bench.verbs.asked] == [ANNA]
    assert asking.inside == [ANNA]
    peer.lose()
    assert asking.inside == []
    assert bench.listener.greeted == 0


def test_a_refused_greeting_is_told_as_request_0_and_ends_the_connection(
    asking: Asking, bench: Bench
) -> None:
    peer = knock(bench)
    asking.answer(WRONG)
    assert peer.refusal() == WRONG
    assert peer.transport.closing
    assert (asking.inside, bench.listener.greeted) == ([], 0)


class Hasty(Asking):
    """Refuses at once, as it does with tokens."""

    def authenticate(
        self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
    ) -> None:
        super().authenticate(credentials, origin, done)
        done(WRONG)


def test_who_was_refused_has_no_second_greeting_behind_the_first() -> None:
    asking = Hasty()
    peer = knock(Bench(asking, asking), hello(Credentials(token="another"))[len(PREAMBLE) :])
    assert peer.refusal() == WRONG
    assert len(asking.asked) == 1


def test_one_too_many_of_a_user_is_refused(asking: Asking, bench: Bench) -> None:
    asking.too_many = Refusal("overloaded", "too many connections of anna", "none", {"retry_after_ms": 5})
    peer = knock(bench)
    asking.answer()
    assert peer.refusal() == asking.too_many
    assert peer.transport.closing
    peer.lose()
    assert asking.inside == []


def test_who_leaves_before_the_answer_is_not_counted(asking: Asking, bench: Bench) -> None:
    peer = knock(bench)
    peer.lose()
    asking.answer()
    assert (asking.inside, bench.listener.greeted, bench.listener.doorway.guests) == ([], 0, 0)


def test_places_are_for_those_who_are_known(asking: Asking) -> None:
    """Connections that have not greeted do not take the places of those that have."""
    bench = Bench(asking, asking, connections_max=2)
    peers = [knock(bench) for _ in range(4)]
    for _ in peers:
        asking.answer()
    assert [welcomed(peer) for peer in peers] == [True, True, False, False]
    assert peers[2].refusal().code == "overloaded"
    assert bench.listener.greeted == 2


def test_an_authenticator_that_does_not_answer_has_its_time(asking: Asking, bench: Bench) -> None:
    peer = knock(bench)
    bench.sleep(GREETING_US - SECOND_US)
    assert not peer.transport.closing
    bench.sleep(3 * SECOND_US)
    assert peer.transport.aborted


def test_a_guest_holds_no_more_than_a_greeting(asking: Asking, bench: Bench) -> None:
    peer = bench.peer(greeted=False)
    long = hello(Credentials("a" * (GREETING_BYTES_MAX - 30), "b"))
    assert len(long) > GREETING_BYTES_MAX
    held = 0
    for at in range(len(long) - 1):
        peer.send(long[at : at + 1])
        held = max(held, len(peer.link.get_buffer(-1)) + at)
    assert held <= 2 * GREETING_BYTES_MAX
    peer.send(long[-1:])
    assert not peer.transport.reading
    asking.answer(WRONG)
    assert peer.refusal() == WRONG


def test_credentials_are_nowhere_to_be_read(asking: Asking, bench: Bench) -> None:
    given = Credentials("anna", "topsecret", "tokensecret")
    assert "secret" not in repr(Hello([1], "me", given))
    peer = knock(bench, credentials=given)
    assert "secret" not in repr(vars(peer.link))


# -- later ------------------------------------------------------------------------------------------------


ENDED = Refusal("unauthenticated", "token 't1' is not valid any more: log in again", "none")


class Poll:
    """Stands for a request that waits."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer
        self.dropped = False

    def hang_up(self) -> None:
        raise AssertionError("nobody hung up")

    def drop(self) -> None:
        self.dropped = True
        self._answer()


def test_who_is_not_known_any_more_hears_so_and_leaves(asking: Asking, bench: Bench) -> None:
    peer = knock(bench)
    asking.answer()
    peer.skip()
    asking.ended = ENDED
    bench.sleep(SECOND_US)
    assert peer.refusal() == ENDED
    assert peer.transport.closing


def test_requests_under_way_are_answered_first_and_waiting_ones_dropped(asking: Asking, bench: Bench) -> None:
    peer = knock(bench)
    asking.answer()
    peer.skip()
    peer.ask(1)
    peer.ask(2)
    poll = Poll(bench.verbs.answer)
    peer.link.fetches[poll] = None
    asking.ended = ENDED
    bench.sleep(SECOND_US)
    assert poll.dropped
    assert not peer.transport.reading
    assert not peer.transport.closing
    bench.verbs.answer()
    assert list(peer.replies()) == [(1, Pong()), (2, Pong()), (0, ENDED)]
    assert peer.transport.closing


def test_a_greeted_connection_leaves_its_place_to_guests(asking: Asking, bench: Bench) -> None:
    peer = knock(bench)
    assert bench.listener.doorway.guests == 1
    asking.answer()
    assert bench.listener.doorway.guests == 0
    assert welcomed(peer)


def test_the_welcome_has_the_number_of_its_hello(asking: Asking, bench: Bench) -> None:
    peer = bench.peer(greeted=False)
    peer.send(hello(number=9))
    asking.answer()
    assert msgspec.msgpack.decode(bytes(peer.transport.written[16:]), type=Welcome).version == 1


class SlowVerbs(FakeVerbs):
    """Takes 8 ms for each request."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._clock = bench.clock

    def submit(self, request: Request, body: Buffer, respond: Respond, gate: Any) -> None:
        super().submit(request, body, respond, gate)
        self._clock.set_us(self._clock.now_us() + 8_000)


def test_requests_of_one_connection_do_not_keep_others_waiting_for_long() -> None:
    async def scenario() -> list[int]:
        bench = Bench()
        peer, lost, other = bench.peer(), bench.peer(), bench.peer()
        verbs = bench.listener.verbs = SlowVerbs(bench)
        peer.send(PING * 8)
        lost.send(PING * 8)
        taken = [len(verbs.asked)]
        assert not peer.transport.reading
        lost.lose()
        other.ask()
        while not peer.transport.reading:
            await asyncio.sleep(0)
            taken.append(len(verbs.asked))
        return taken

    assert asyncio.run(scenario()) == [6, 10, 12], "three and three, one of another, and the rest of one"
