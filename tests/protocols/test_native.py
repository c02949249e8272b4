"""The native listener without sockets: greetings, windows in both directions, time limits, and the end.

Covers `protocols/crowd.py` too, which counts what all connections hold together.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.commands import Fetch, Fetched, Ping, Pong, Publish, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.format.wire import PREAMBLE, PREFIX, PREFIX_BYTES, Hello, Welcome, prefix
from tailrace.ports import Authenticator, Doorkeeper, Respond
from tailrace.protocols import crowd
from tailrace.protocols.edge_tuning import (
    CONNECTION_READ_BYTES_MAX,
    FRAME_BYTES_PER_SECOND_MIN,
    FRAME_US,
    GREETING_US,
    HEADER_WEIGHT,
    REQUESTS_MAX,
    STUCK_GRACE_US,
    STUCK_US,
    UNSENT_BYTES_MAX,
)
from tailrace.protocols.native import Limits, Listener
from tailrace.protocols.native_link import Link

SECOND_US = 1_000_000
MB = 1 << 20


class FakeTransport(asyncio.Transport):
    """Takes what is written; whether the peer takes it too is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.reading = True
        self.closing = self.aborted = False
        self.buffered = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, data: Buffer) -> None:
        self.written += data

    def writelines(self, list_of_data: Sequence[Buffer]) -> None:  # type: ignore[override]
        for data in list_of_data:
            self.write(data)

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


class Asked(NamedTuple):
    """A request that reached the broker."""

    request: Request
    body: Buffer
    respond: Respond
    gate: Any


class FakeVerbs:
    """Keeps requests until the test answers them."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.later: list[bool] = []

    def submit(self, request: Request, body: Buffer, respond: Respond, gate: Any) -> None:
        self.asked.append(Asked(request, body, respond, gate))

    def gather(self, gathering: bool, later: bool = False) -> None:
        if not gathering:
            self.later.append(later)

    def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self.asked.pop(0).respond(Pong(), ())


class Bench:
    """A listener with virtual time."""

    def __init__(
        self,
        authenticator: Authenticator | None = None,
        doorkeeper: Doorkeeper | None = None,
        **limits: int,
    ) -> None:
        self.verbs = FakeVerbs()
        self.clock = ManualClock()
        self.listener = Listener(
            self.verbs,
            self.clock,
            Limits(**limits),
            "node-1",
            authenticator=authenticator,
            doorkeeper=doorkeeper,
        )

    def peer(self, *, greeted: bool = True) -> "Peer":
        return Peer(self, greeted)

    def sleep(self, duration_us: int) -> None:
        """Let time pass; the listener looks after its links once a second."""
        end_us = self.clock.now_us() + duration_us
        while self.clock.now_us() < end_us:
            self.clock.set_us(min(end_us, self.clock.now_us() + SECOND_US))
            for link in list(self.listener.links):
                link.check(self.clock.now_us())


class Peer:
    """One connection, seen from the client."""

    def __init__(self, bench: Bench, greeted: bool) -> None:
        self.bench = bench
        self.transport = FakeTransport()
        self.link = Link(bench.listener)
        self.link.connection_made(self.transport)
        self._read = 0
        if greeted:
            self.send(PREAMBLE + prefix(msgspec.msgpack.encode(Hello([1])), 0, 0))
            assert self.transport.written
            self._read = len(self.transport.written)

    def send(self, data: bytes) -> None:
        """Bytes arrive."""
        while data:
            window = self.link.get_buffer(-1)
            size = min(len(window), len(data))
            window[:size] = data[:size]
            self.link.buffer_updated(size)
            data = data[size:]

    def ask(self, number: int = 1, request: Request | None = None, body: bytes = b"") -> None:
        self.send(prefix(codec.encode_request(request or Ping()), len(body), number) + body)

    def replies(self) -> Iterator[tuple[int, Any]]:
        """What the broker has written since the last look."""
        while self._read < len(self.transport.written):
            header, body, number = PREFIX.unpack_from(self.transport.written, self._read)
            at = self._read + PREFIX_BYTES
            self._read = at + header + body
            yield number, codec.decode_reply(bytes(self.transport.written[at : at + header]))

    def skip(self) -> None:
        """Do not look at what was written until now."""
        self._read = len(self.transport.written)

    def refusal(self) -> Refusal:
        """The one reply, which is a refusal of the connection as a whole."""
        ((number, reply),) = self.replies()
        assert number == 0
        assert isinstance(reply, Refusal)
        return reply

    def stop_taking(self, left: int) -> None:
        """The peer does not read: so much stays in the buffer."""
        self.transport.buffered = left
        self.link.pause_writing()

    def take_all(self) -> None:
        """The peer has read everything."""
        self.transport.buffered = 0
        self.link.resume_writing()

    def lose(self) -> None:
        """The connection is gone."""
        self.transport.closing = True
        self.link.connection_lost(None)


class Waiting:
    """Stands for a fetch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


# -- greetings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versions", [[1], [1, 2], [7, 1]])
def test_welcome_tells_the_limits(versions: list[int]) -> None:
    peer = Bench(frame_bytes_max=5 * MB, idle_ms=1234).peer(greeted=False)
    peer.send(PREAMBLE + prefix(msgspec.msgpack.encode(Hello(versions, "me")), 0, 9))
    _, body, number = PREFIX.unpack_from(peer.transport.written)
    welcome = msgspec.msgpack.decode(bytes(peer.transport.written[PREFIX_BYTES:]), type=Welcome)
    assert (body, number) == (0, 9)
    assert welcome == Welcome(1, "node-1", 5 * MB, REQUESTS_MAX, 1234)
    assert not peer.transport.closing


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (prefix(msgspec.msgpack.encode(Hello([2, 3])), 0, 0), "speaks protocol version 1, the client 2, 3"),
        (prefix(msgspec.msgpack.encode(Hello([])), 0, 0), "the client none"),
        (prefix(codec.encode_request(Ping()), 0, 0), "the first message must be a hello"),
        (prefix(b"\x93\xa5hello\x91\x01\xa2\xff\xfe", 0, 0), "the first message must be a hello"),
        (prefix(b"\x92\xa5hello" + b"\x91" * 3000, 0, 0), "the first message must be a hello"),
        (
            prefix(b"\x92\xa5hello\x91\xcf" + b"\xff" * 8, 0, 0),
            "speaks protocol version 1, the client 1844674",
        ),
        (prefix(b"", 0, 0), "the first message must be a hello"),
        (PREFIX.pack(4097, 0, 0), "a header of 4097 bytes is above the limit"),
        (PREFIX.pack(10, 1, 0), "a body of 1 bytes is above the limit of 0"),
    ],
)
def test_bad_greetings_are_told_and_closed(greeting: bytes, message: str) -> None:
    peer = Bench().peer(greeted=False)
    peer.send(PREAMBLE + greeting)
    assert message in peer.refusal().message
    assert peer.transport.closing
    assert not peer.bench.verbs.asked


def test_one_connection_too_many_is_refused() -> None:
    bench = Bench(connections_max=2)
    first, _ = bench.peer(), bench.peer()
    third = bench.peer(greeted=False)
    refusal = third.refusal()
    assert (refusal.code, refusal.details) == ("overloaded", {"retry_after_ms": 1000})
    assert third.transport.closing
    third.lose()
    first.lose()
    assert len(bench.listener.links) == 1
    assert not bench.peer().transport.closing


# -- requests ---------------------------------------------------------------------------------------------


def test_bad_request_is_refused_and_the_next_is_taken() -> None:
    peer = Bench().peer()
    peer.send(prefix(b"\xc1", 0, 5) + prefix(msgspec.msgpack.encode(["hello", [1]]), 0, 6))
    peer.ask(7)
    peer.bench.verbs.answer()
    replies = dict(peer.replies())
    assert replies[5].code == replies[6].code == "invalid_request"
    assert replies[7] == Pong()
    assert not peer.transport.closing


def test_broken_framing_ends_the_connection() -> None:
    peer = Bench(frame_bytes_max=1000).peer()
    peer.send(PREFIX.pack(5, 1001, 3) + b"whatever")
    assert peer.refusal().code == "too_large"
    assert peer.transport.closing


def test_answers_may_come_in_any_order() -> None:
    peer = Bench().peer()
    for number in range(3):
        peer.ask(number)
    for asked in reversed(peer.bench.verbs.asked):
        asked.respond(Pong(), ())
    assert [number for number, _ in peer.replies()] == [2, 1, 0]


# -- windows of requests ----------------------------------------------------------------------------------


def test_too_many_unanswered_requests_stop_the_reading() -> None:
    peer = Bench().peer()
    for number in range(REQUESTS_MAX - 1):
        peer.ask(number)
    assert peer.transport.reading
    peer.ask(REQUESTS_MAX)
    assert not peer.transport.reading
    peer.bench.verbs.answer()
    assert peer.transport.reading


def test_too_many_request_bytes_stop_the_reading() -> None:
    peer = Bench(connection_in_flight_bytes_max=64 * 1024).peer()
    publish = Publish("t", 0, 0, 0)
    peer.ask(1, publish, b"x" * 40_000)
    assert peer.transport.reading
    peer.ask(2, publish, b"x" * 40_000)
    assert not peer.transport.reading
    peer.bench.verbs.answer()
    assert peer.transport.reading
    peer.bench.verbs.answer()
    assert peer.link._held_bytes == peer.bench.listener.held_bytes == 0


def test_large_headers_of_waiting_requests_count_more_than_their_bytes() -> None:
    peer = Bench(connection_in_flight_bytes_max=MB).peer()
    fetch = Fetch("t", [(partition, 0) for partition in range(1000)], 1, 60_000)
    size = len(codec.encode_request(fetch)) * HEADER_WEIGHT
    taken = 0
    while peer.transport.reading:
        peer.ask(taken, fetch)
        taken += 1
    assert taken == MB // size + 1


def test_the_node_as_a_whole_has_a_window_too() -> None:
    bench = Bench(in_flight_bytes_max=MB)
    peers = [bench.peer() for _ in range(3)]
    for peer in peers[:2]:
        peer.ask(1, Publish("t", 0, 0, 0), b"x" * (MB // 2 + 1))
    # Whoever speaks next is not listened to; the silent one is not touched yet.
    assert bench.listener.full
    assert [peer.transport.reading for peer in peers] == [True, False, True]
    peers[2].ask()
    assert not peers[2].transport.reading
    bench.verbs.answer()
    assert all(peer.transport.reading for peer in peers)


# -- windows of answers -----------------------------------------------------------------------------------


def test_peer_that_does_not_take_its_answers_is_not_listened_to() -> None:
    peer = Bench().peer()
    peer.stop_taking(2 * MB)
    assert not peer.transport.reading
    fetches = [Waiting() for _ in range(3)]
    assert all(peer.link.blocked(fetch) for fetch in fetches)
    peer.take_all()
    assert peer.transport.reading
    assert [fetch.calls for fetch in fetches] == [1, 1, 1]
    assert not peer.link.blocked(Waiting())


def test_fetches_go_on_one_by_one_until_the_peer_is_full_again() -> None:
    peer = Bench().peer()
    peer.stop_taking(2 * MB)
    order: list[str] = []

    def first() -> None:
        order.append("first")
        peer.stop_taking(2 * MB)

    assert peer.link.blocked(first)
    assert peer.link.blocked(lambda: order.append("second"))
    peer.take_all()
    assert order == ["first"]
    peer.take_all()
    assert order == ["first", "second"]


def test_stuck_peer_is_cut_off() -> None:
    bench = Bench()
    stuck, slow, fine = bench.peer(), bench.peer(), bench.peer()
    stuck.stop_taking(3 * MB)
    slow.stop_taking(3 * MB)
    fine.stop_taking(3 * MB)
    bench.sleep(STUCK_US - 2 * SECOND_US)
    slow.transport.buffered -= 1000
    fine.take_all()
    bench.sleep(4 * SECOND_US)
    assert [peer.transport.aborted for peer in (stuck, slow, fine)] == [True, False, False]
    bench.sleep(STUCK_US)
    assert slow.transport.aborted
    assert not fine.transport.aborted


def test_stuck_peers_are_cut_off_soon_when_they_hold_too_much_together() -> None:
    bench = Bench()
    peers = [bench.peer() for _ in range(10)]
    for peer in peers:
        peer.ask(1)
        bench.verbs.asked.pop().respond(Fetched([]), [b"x" * (8 * MB)])
        peer.stop_taking(5 * MB)
    # An answer counts whole: the part that the kernel took is freed only with the rest.
    assert bench.listener.unsent_bytes > 80 * MB > UNSENT_BYTES_MAX
    bench.sleep(STUCK_GRACE_US // 2)
    assert not any(peer.transport.aborted for peer in peers)
    bench.sleep(2 * STUCK_GRACE_US)
    assert all(peer.transport.aborted for peer in peers)
    for peer in peers:
        peer.lose()
    assert bench.listener.unsent_bytes == 0


def test_one_large_read_at_a_time_per_connection() -> None:
    bench = Bench()
    peer, other = bench.peer(), bench.peer()
    second, third = Waiting(), Waiting()
    assert peer.link.reserve(CONNECTION_READ_BYTES_MAX, Waiting())
    assert not peer.link.reserve(1, second)
    assert other.link.reserve(MB, third)
    assert other.link.reserve(MB, third)
    peer.link.release(CONNECTION_READ_BYTES_MAX)
    assert (second.calls, third.calls) == (1, 0)
    assert peer.link.reserve(2 * CONNECTION_READ_BYTES_MAX, second), "a large one is not refused for ever"


def test_reads_wait_for_room_on_the_node_and_go_on_in_order() -> None:
    bench = Bench()
    size = CONNECTION_READ_BYTES_MAX
    peers = [bench.peer() for _ in range(UNSENT_BYTES_MAX // size)]
    assert all(peer.link.reserve(size, Waiting()) for peer in peers)
    order: list[int] = []
    late = [bench.peer() for _ in range(2000)]

    def wait(number: int) -> Callable[[], None]:
        def resume() -> None:
            assert late[number].link.reserve(1, resume)
            order.append(number)

        return resume

    for number, peer in enumerate(late):
        assert not peer.link.reserve(1, wait(number))
    peers[0].link.release(size)
    assert order == list(range(2000))


# -- time -------------------------------------------------------------------------------------------------


def test_no_greeting_in_time() -> None:
    bench = Bench()
    silent, half = bench.peer(greeted=False), bench.peer(greeted=False)
    bench.sleep(GREETING_US - SECOND_US)
    half.send(PREAMBLE)
    bench.sleep(2 * SECOND_US)
    assert silent.transport.aborted
    # The bytes of a greeting give it one more period, not one more for each byte.
    for byte in prefix(msgspec.msgpack.encode(Hello([1], "x" * 100)), 0, 0)[:-1]:
        half.send(bytes([byte]))
        bench.sleep(SECOND_US)
    assert half.transport.aborted


def test_message_that_is_begun_and_not_finished() -> None:
    bench = Bench()
    dribbling, large = bench.peer(), bench.peer()
    dribbling.send(PREFIX.pack(100, 0, 1))
    large.send(prefix(codec.encode_request(Publish("t", 0, 0, 0)), 60 * MB, 1))
    for _ in range(FRAME_US // SECOND_US + 1):
        bench.sleep(SECOND_US)
        if not dribbling.transport.closing:
            dribbling.send(b"x")
        large.send(b"x")
    assert dribbling.transport.aborted
    # A large body gets the time that a slow line needs for it.
    assert not large.transport.aborted
    bench.sleep(60 * MB // FRAME_BYTES_PER_SECOND_MIN * SECOND_US)
    assert large.transport.aborted


def test_idle_connections_are_closed_and_waiting_ones_are_not() -> None:
    bench = Bench(idle_ms=5000)
    idle, pinging, waiting = bench.peer(), bench.peer(), bench.peer()
    waiting.ask(1, Fetch("t", [(0, 0)], 1, 60_000))
    (fetch,) = bench.verbs.asked
    bench.verbs.asked.clear()
    for _ in range(8):
        pinging.ask()
        bench.verbs.answer()
        bench.sleep(SECOND_US)
    assert (idle.transport.closing, idle.transport.aborted) == (True, False)
    assert not pinging.transport.closing
    assert not waiting.transport.closing
    fetch.respond(Fetched([]), ())
    bench.sleep(6 * SECOND_US)
    assert waiting.transport.closing


def test_time_does_not_count_while_the_broker_does_not_listen() -> None:
    bench = Bench(in_flight_bytes_max=MB, idle_ms=5000)
    busy, other = bench.peer(), bench.peer()
    busy.ask(1, Publish("t", 0, 0, 0), b"x" * (MB + 1))
    other.send(PREFIX.pack(100, 0, 1))
    assert not other.transport.reading
    bench.sleep(2 * FRAME_US)
    assert not other.transport.closing
    bench.verbs.answer()
    bench.sleep(FRAME_US + 2 * SECOND_US)
    assert other.transport.aborted


# -- bodies that are not complete -------------------------------------------------------------------------


BODY = 32 * MB


def announce(peer: Peer, nbytes: int) -> None:
    peer.send(prefix(codec.encode_request(Publish("t", 0, 0, 0)), BODY, 1) + b"x" * nbytes)


def test_hoarders_of_unfinished_bodies_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "PARTIAL_BYTES_MAX", 10 * MB)
    bench = Bench()
    old, young = bench.peer(), bench.peer()
    announce(old, 9 * MB)
    bench.sleep(2 * SECOND_US)
    announce(young, 5 * MB)
    assert (old.transport.aborted, young.transport.aborted) == (True, False)
    old.lose()
    assert bench.listener.partial_bytes == 5 * MB
    young.send(b"x" * (BODY - 5 * MB))
    assert bench.listener.partial_bytes == 0
    assert len(bench.verbs.asked) == 1


def test_those_on_their_way_are_not_cut_off_until_it_is_far_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "PARTIAL_BYTES_MAX", 10 * MB)
    monkeypatch.setattr(crowd, "PARTIAL_BYTES_HARD_MAX", 30 * MB)
    bench = Bench()
    peers = [bench.peer() for _ in range(4)]
    for size, peer in enumerate(peers[:3], 7):
        announce(peer, size * MB)
    assert not any(peer.transport.aborted for peer in peers)
    announce(peers[3], 20 * MB)
    assert [peer.transport.aborted for peer in peers] == [False, False, False, True]


def test_announced_bodies_count_before_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "PARTIAL_BYTES_MAX", 10 * MB)
    bench = Bench()
    peers = [bench.peer() for _ in range(8)]
    for peer in peers:
        bench.sleep(2 * SECOND_US)
        announce(peer, 1)
    assert sum(peer.transport.aborted for peer in peers) > 0


# -- the end ----------------------------------------------------------------------------------------------


def test_finishing_answers_what_is_under_way_and_takes_nothing_new() -> None:
    peer = Bench().peer()
    peer.ask(1)
    peer.ask(2)
    peer.link.finish()
    assert not peer.transport.reading
    peer.ask(3)  # It was in the buffer already.
    ((number, refusal),) = peer.replies()
    assert (number, refusal.code) == (3, "unavailable")
    peer.bench.verbs.answer()
    assert not peer.transport.closing
    peer.bench.verbs.answer()
    assert [number for number, _ in peer.replies()] == [1, 2]
    assert (peer.transport.closing, peer.transport.aborted) == (True, False)


def test_whoever_connects_during_the_stop_is_sent_away_and_not_waited_for() -> None:
    """The system had accepted the connection, the listener hears of it only now."""

    async def scenario() -> None:
        bench = Bench()
        peer = bench.peer()
        peer.ask()
        stop = asyncio.create_task(bench.listener.stop(600))
        await asyncio.sleep(0)
        late = bench.peer(greeted=False)
        assert late.refusal().code == "unavailable"
        assert late.transport.closing
        late.lose()
        bench.verbs.answer()
        peer.lose()
        for _ in range(10):
            await asyncio.sleep(0)
        assert stop.done()
        await stop

    asyncio.run(scenario())


def test_peer_that_stops_sending_still_gets_its_answers() -> None:
    peer = Bench().peer()
    peer.ask(1)
    assert peer.link.eof_received()
    assert not peer.transport.closing
    peer.bench.verbs.answer()
    assert list(peer.replies()) == [(1, Pong())]
    assert peer.transport.closing


def test_lost_connection_gives_everything_back() -> None:
    class DroppedFetch:
        def __init__(self, respond: Respond) -> None:
            self._respond = respond

        def drop(self) -> None:
            self._respond(Refusal("unavailable", "gone"), ())

    bench = Bench()
    peer = bench.peer()
    peer.ask(1, Publish("t", 0, 0, 0), b"x" * 1000)
    peer.ask(2, Fetch("t", [(0, 0)], 1, 60_000))
    announce(peer, 50_000)
    peer.stop_taking(2 * MB)
    parked = Waiting()
    peer.link.blocked(parked)
    publish, fetch = bench.verbs.asked
    peer.link.fetches[DroppedFetch(fetch.respond)] = None
    peer.lose()
    assert not bench.listener.links
    assert bench.listener.partial_bytes == bench.listener.unsent_bytes == 0
    assert parked.calls == 0
    publish.respond(Pong(), ())  # Into the void.
    assert bench.listener.held_bytes == 0
    assert not list(peer.replies())


def test_requests_of_many_connections_at_once_are_gathered_those_of_one_are_not() -> None:
    """One turn of a partition for fifty single publishes costs a fraction of fifty turns."""
    bench = Bench()
    first, second = bench.peer(), bench.peer()
    bench.verbs.later.clear()
    for peer in (second, second, first, second):
        bench.clock.set_us(bench.clock.now_us() + 100)
        peer.ask()
    assert bench.verbs.later == [False, False, True, True]
    bench.clock.set_us(bench.clock.now_us() + 10_000)
    first.ask()
    assert bench.verbs.later[-1] is False
