"""Membership and settling against a scripted broker on virtual time: silence, refusals, late answers.

Also covers `client/queue/ack_sender.py` and `client/queue/consumer_options.py`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tailrace.client.queue.consumer import Consumer
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.handler_verdicts import Reject as Hopeless
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.group_commands import Heartbeat, JoinGroup, LeaveGroup, Membership
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import (
    Ack,
    Extend,
    Extended,
    GiveBack,
    Grant,
    Lease,
    Leases,
    Nack,
    RejectMessages,
    Settled,
)
from tailrace.errors import Corrupt, Denied, Fenced, LeaseLost, Timeout
from tests.client.read.test_reader import frame_of
from tests.client.virtual_loop import LoopClock, rounds, run

LOST = Refusal("unavailable", "the connection broke", "unknown")
DOWN = Refusal("unavailable", "not connected", "none")
Answer = Reply | tuple[Reply, bytes] | None


class Script:
    """See `BrokerVerbs`: one member on `t`; scripted answers come first, None means silence."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.requests: list[Any] = []
        self.answers: dict[type[Any], list[Answer]] = {}
        self.waiting: dict[type[Any], list[tuple[Any, Callable[..., None]]]] = {}
        self.silent: dict[type[Any], list[Callable[..., None]]] = {}
        self.version = 1
        self.owned = [("t", 0, 1)]
        self.revoking: list[tuple[str, int]] = []
        self.options: dict[str, Any] = {}

    def membership(self) -> Membership:
        return Membership(self.version, list(self.owned), list(self.revoking), "active", self.options)

    def change(self) -> None:
        """The membership is another one: the heartbeat that waits is answered."""
        self.version += 1
        for _, respond in self.waiting.pop(Heartbeat, []):
            respond(self.membership(), ())

    def grant(self, *values: bytes, lease: int = 7, offset: int = 0) -> None:
        """Answer the poll that waits."""
        body = frame_of(offset, list(values))
        runs = [(offset, len(values), 1, 0)]
        _, respond = self.waiting[Lease].pop(0)
        respond(Leases([Grant(0, lease, 0, len(body), runs)]), (body,))

    def answer(self, kind: type[Any], reply: Reply) -> None:
        """Answer the oldest request of a kind that was met with silence."""
        self.silent[kind].pop(0)(reply, ())

    def of(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    def _timed(self, respond: Any) -> Callable[..., None]:
        """Its answer says how long it waited, as a broker's does."""
        came_ms = self.clock.elapsed_ms()

        def answer(reply: Any, parts: Any) -> None:
            if isinstance(reply, Leases) and not reply.waited_ms:
                reply = Leases(reply.grants, int(self.clock.elapsed_ms() - came_ms))
            respond(reply, parts)

        return answer

    def submit(self, request: Request, body: Any, respond: Any) -> None:
        self.requests.append(request)
        scripted = self.answers.get(type(request))
        if scripted:
            answer = scripted.pop(0)
            if answer is None:
                self.silent.setdefault(type(request), []).append(respond)
            else:
                respond(answer, ())
        elif isinstance(request, JoinGroup) or (
            isinstance(request, Heartbeat) and request.version != self.version
        ):
            respond(self.membership(), ())
        elif isinstance(request, Lease):
            for _, older in self.waiting.pop(Lease, []):
                older(Leases([]), ())
            if request.count_max:
                self.waiting[Lease] = [(request, self._timed(respond))]
            else:
                respond(Leases([]), ())
        elif isinstance(request, Heartbeat):
            self.waiting.setdefault(Heartbeat, []).append((request, respond))
        elif isinstance(request, Extend):
            respond(Extended(0), ())
        else:
            respond(Settled(), ())


class FastConsumer(Consumer):
    """A consumer that leases ahead from the beginning: its handler is known to be fast."""

    async def __aenter__(self) -> Consumer:
        await super().__aenter__()
        self._intake.pace.message_ms = self._intake.pace._latest_ms = 1e-3
        return self


def make(script: Script, **options: Any) -> Consumer:
    own = ConsumerOptions(member="m", **options)
    return FastConsumer(script, ["t"], "g", 10.0, own)


async def take(script: Script, consumer: Consumer, *values: bytes) -> list[Any]:
    """The broker delivers these, and they are taken."""
    taking = asyncio.ensure_future(anext(consumer))
    await rounds()
    script.grant(*values)
    return [await taking, *[await anext(consumer) for _ in values[1:]]]


def test_a_broker_that_falls_silent_is_joined_again() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script):
            await rounds()
            assert (len(script.of(JoinGroup)), len(script.of(Heartbeat))) == (1, 1)
            await asyncio.sleep(60)
            assert 3 <= len(script.of(JoinGroup)) <= 6
            assert {join.member for join in script.of(JoinGroup)} == {"m"}
        assert len(script.of(LeaveGroup)) == 1

    run(scenario())


def test_connections_that_break_again_and_again_do_not_make_it_wait_longer_each_time() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script):
            await rounds()
            for _ in range(20):
                joined = len(script.of(JoinGroup))
                for _, respond in script.waiting.pop(Heartbeat):
                    respond(LOST, ())
                await asyncio.sleep(0.1)
                assert len(script.of(JoinGroup)) == joined + 1

    run(scenario())


@pytest.mark.parametrize("request_", [Heartbeat, JoinGroup])
def test_when_another_consumer_took_its_name_it_says_so_and_does_not_come_back(request_: type[Any]) -> None:
    superseded = Refusal("fenced", "another consumer has joined", "none", {"superseded": True})
    gone: list[set[Any]] = []

    async def scenario() -> None:
        script = Script()
        async with make(script, on_revoked=gone.append) as consumer:
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            if request_ is JoinGroup:
                script.answers[JoinGroup] = [superseded]
            for _, respond in script.waiting.pop(Heartbeat):
                respond(LOST if request_ is JoinGroup else superseded, ())
            for _ in range(2):
                with pytest.raises(Fenced, match="another consumer"):
                    await taking
                taking = asyncio.ensure_future(anext(consumer))
            asked = len(script.requests)
            assert consumer.assignment() == set()
            await asyncio.sleep(600)
            assert len(script.requests) == asked, "not a word more"
            with pytest.raises(Fenced):
                await taking
        joins = script.of(JoinGroup)
        assert [join.again for join in joins] == [False, True][: len(joins)]
        assert len({request.incarnation for request in [*joins, *script.of(Heartbeat | LeaveGroup)]}) == 1  # type: ignore[arg-type]
        assert gone == [{("t", 0)}]

    run(scenario())


def test_a_fenced_poll_leads_to_joining_again_and_to_the_new_generation() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            script.answers[Lease] = [Refusal("fenced", "generation 2", "none", {"generation": 2})]
            script.owned = [("t", 0, 2)]
            taking = asyncio.ensure_future(anext(consumer))
            await asyncio.sleep(1)
            assert len(script.of(JoinGroup)) == 2
            assert script.of(Lease)[0].partitions == [(0, 1)]
            assert script.of(Lease)[-1].partitions == [(0, 2)]
            script.waiting[Lease] = script.waiting[Lease][-1:]
            script.grant(b"a")
            assert (await taking).value == b"a"

    run(scenario())


def test_what_cannot_be_mended_is_raised_again_and_again() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            script.answers[Heartbeat] = [Refusal("denied", "not you", "none")]
            script.answers[JoinGroup] = [Refusal("denied", "not you", "none")] * 8
            script.change()
            told = 0
            while True:
                taking = asyncio.ensure_future(anext(consumer))
                await asyncio.sleep(5)
                if not taking.done():
                    break
                assert isinstance(taking.exception(), Denied)
                told += 1
            assert told >= 2
            script.waiting[Lease] = script.waiting[Lease][-1:]
            script.grant(b"a")
            assert (await taking).value == b"a"

    run(scenario())


def test_an_acknowledgement_is_repeated_until_it_is_answered() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            one, two = await take(script, consumer, b"a", b"b")
            script.answers[Ack] = [LOST, DOWN]
            await one.ack()
            assert [ack.leases for ack in script.of(Ack)] == [[(7, [0, 1])]] * 3
            script.answers[Ack] = [None]  # No answer at all: it is not tried for ever.
            with pytest.raises(Timeout, match="no answer in time"):
                await two.ack()
            with pytest.raises(LeaseLost):
                await two.ack()

    run(scenario())


def test_a_nack_whose_answer_was_lost_counts_as_done() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            one, two = await take(script, consumer, b"a", b"b")
            script.answers[Nack] = [LOST, Settled([(7, [0, 1])])]
            await one.nack()
            assert len(script.of(Nack)) == 2
            script.answers[Nack] = [Settled([(7, [1, 2])])]
            with pytest.raises(LeaseLost):
                await two.nack()

    run(scenario())


def test_a_revoked_partition_is_confirmed_after_the_callback_and_the_settling() -> None:
    async def scenario() -> None:
        script = Script()
        script.owned = [("t", 0, 1), ("t", 1, 1)]
        gate = asyncio.Event()
        called: list[Any] = []

        async def revoked(places: set[Any]) -> None:
            called.append(places)
            await gate.wait()

        async with make(script, on_revoked=revoked) as consumer:
            one, _ = await take(script, consumer, b"a", b"b")
            script.revoking = [("t", 0)]
            script.change()
            await rounds()
            assert called == [{("t", 0)}]
            assert script.of(Lease)[-1].partitions == [(1, 1)]
            assert not script.of(Heartbeat)[-1].released
            gate.set()
            await rounds(10)
            assert not script.of(Heartbeat)[-1].released  # Two messages are in somebody's hands.
            await one.ack()
            await rounds(10)
            assert not script.of(Heartbeat)[-1].released
            await asyncio.sleep(31)  # Half of the time that the group gives.
            assert any(beat.released == [("t", 0)] for beat in script.of(Heartbeat))
            assert consumer.assignment() == {("t", 1)}

    run(scenario())


def test_messages_that_arrive_for_a_partition_that_is_gone_are_given_back() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            script.owned = []
            script.change()
            await rounds()
            assert consumer.assignment() == set()
            script.grant(b"a", b"b")
            await rounds()
            (back,) = script.of(GiveBack)
            assert back.leases == [(7, [0, 2])]
            assert not taking.done()
            taking.cancel()
            await asyncio.wait([taking])

    run(scenario())


def test_what_is_on_its_way_goes_back_before_its_partition_is_given_up() -> None:
    async def scenario() -> None:
        script = Script()
        script.owned = [("t", 0, 1), ("t", 1, 1)]
        script.answers[Lease] = [None] * 2  # The poll, and the one that withdraws it.
        async with make(script) as consumer:
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            script.revoking = [("t", 0)]
            script.change()
            await rounds(20)
            assert not any(beat.released for beat in script.of(Heartbeat))
            body = frame_of(0, [b"a", b"b"])
            granted = Leases([Grant(0, 7, 0, len(body), [(0, 2, 1, 0)])])
            script.silent[Lease].pop(0)(granted, (body,))
            script.answer(Lease, Leases([]))
            await rounds(20)
            kinds = [
                type(request)
                for request in script.requests
                if isinstance(request, GiveBack) or getattr(request, "released", None)
            ]
            assert kinds[:2] == [GiveBack, Heartbeat]
            taking.cancel()
            await asyncio.wait([taking])

    run(scenario())


def test_a_callback_that_fails_is_told_and_the_partition_goes_all_the_same() -> None:
    async def scenario() -> None:
        script = Script()

        def revoked(places: set[Any]) -> None:
            raise ValueError("my callback")

        async with make(script, on_revoked=revoked) as consumer:
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            script.revoking = [("t", 0)]
            script.change()
            with pytest.raises(ValueError, match="my callback"):
                await taking
            assert any(beat.released == [("t", 0)] for beat in script.of(Heartbeat))

    run(scenario())


def test_after_a_lost_answer_the_poll_says_what_is_held() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            (m,) = await take(script, consumer, b"a")
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            assert {poll.held for poll in script.of(Lease)} == {None}
            for _, respond in script.waiting.pop(Lease):
                respond(Refusal("unavailable", "the connection broke before the answer came", "unknown"), ())
            script.answers[Lease] = [Refusal("unavailable", "not connected to a broker", "none")] * 2
            await asyncio.sleep(1)
            assert script.of(Lease)[-1].held == [7], "others were granted in the answer that was lost"
            polls = len(script.of(Lease))
            consumer.resume()  # Whatever makes it ask again: only one poll goes out before that is answered.
            await rounds()
            assert len(script.of(Lease)) == polls
            await m.ack()
            script.grant(b"b", lease=8, offset=1)
            await taking
            await rounds()
            assert script.of(Lease)[-1].held is None
            for _, respond in script.waiting.pop(Lease):
                respond(Refusal("unavailable", "not connected to a broker", "none"), ())
            await asyncio.sleep(1)
            assert script.of(Lease)[-1].held is None, "nothing can have been granted"

    run(scenario())


def test_a_message_that_cannot_be_rejected_comes_again_before_those_behind_it() -> None:
    async def scenario() -> None:
        script = Script()
        script.options = {"ordering": "partition"}
        script.answers[RejectMessages] = [None]
        seen: list[bytes | None] = []

        async def handler(delivery: Any) -> None:
            seen.append(delivery.value)
            raise Hopeless("no")

        async with make(script) as consumer:
            running = asyncio.ensure_future(consumer.run(handler))
            await rounds()
            script.grant(b"a")
            await rounds()
            script.grant(b"b", lease=8, offset=1)
            await rounds()
            script.answer(RejectMessages, Refusal("denied", "not you", "none"))
            await rounds(20)
            assert [request.leases for request in script.of(GiveBack)] == [[(8, [1, 2])]]
            assert [nack.lease for nack in script.of(Nack)] == [7]
            assert seen == [b"a"]
            consumer.stop()
            await running

    run(scenario())


def test_a_partition_is_given_up_as_soon_as_nothing_of_it_is_held() -> None:
    """The lease of the message at work is over: nobody can settle it any more, and nobody waits for that."""

    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            await take(script, consumer, b"a")
            script.answers[Extend] = [Extended(0, [7])]
            script.revoking = [("t", 0)]
            script.change()
            await asyncio.sleep(14)
            assert not any(beat.released for beat in script.of(Heartbeat))
            await asyncio.sleep(2)
            assert script.of(Heartbeat)[-1].released == [("t", 0)]

    run(scenario())


@pytest.mark.parametrize("happens", ["pause", "reset", "taken"])
def test_what_waits_behind_a_handler_is_not_started_any_more(happens: str) -> None:
    async def scenario() -> None:
        script = Script()
        script.options = {"ordering": "partition"}
        seen: list[bytes | None] = []
        go_on = asyncio.Event()

        async def handler(delivery: Any) -> None:
            seen.append(delivery.value)
            await go_on.wait()

        async with make(script) as consumer:
            running = asyncio.ensure_future(consumer.run(handler, concurrency=2))
            await rounds()
            script.grant(b"a", b"b")
            await rounds()
            if happens == "pause":
                consumer.pause()
            else:
                script.owned = [("t", 0, 2)] if happens == "reset" else []
                script.change()
            await rounds()
            go_on.set()
            await rounds()
            assert seen == [b"a"]
            back = [request.leases for request in script.of(GiveBack)]
            assert back == ([[(7, [1, 2])]] if happens == "pause" else [])
            consumer.stop()
            await running

    run(scenario())


@pytest.mark.parametrize("ordering", ["partition", "none"])
@pytest.mark.parametrize("found_out", ["ack", "extension", "reject"])
def test_what_lies_behind_a_lost_message_goes_back(ordering: str, found_out: str) -> None:
    async def scenario() -> None:
        script = Script()
        script.options = {"ordering": ordering}
        async with make(script) as consumer:
            (m,) = await take(script, consumer, b"a")
            await rounds()
            script.grant(b"b", lease=8, offset=1)
            if found_out == "ack":
                script.answers[Ack] = [Settled([(7, [0, 1])])]
            elif found_out == "reject":
                script.answers[RejectMessages] = [Settled([(7, [0, 1])])]
            else:
                script.answers[Extend] = [Extended(0, [7])]
                await asyncio.sleep(16)
            with pytest.raises(LeaseLost):
                await (m.reject() if found_out == "reject" else m.ack())
            await rounds()
            back = [request.leases for request in script.of(GiveBack)]
            assert back == ([[(8, [1, 2])]] if ordering == "partition" else [])

    run(scenario())


def test_damaged_messages_are_told_and_not_held() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            body = bytearray(frame_of(0, [b"a"]))
            body[-1] ^= 1
            _, respond = script.waiting[Lease].pop(0)
            respond(Leases([Grant(0, 7, 0, len(body), [(0, 1, 1, 0)])]), (bytes(body),))
            with pytest.raises(Corrupt):
                await taking
            await asyncio.sleep(60)
            assert not script.of(Extend)
            (m,) = await take(script, consumer, b"b")
            assert m.value == b"b"

    run(scenario())


def test_trouble_does_not_cost_the_batch_that_is_being_made() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            (one,) = await take(script, consumer, b"a")
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            script.waiting[Lease] = script.waiting[Lease][-1:]
            script.grant(b"b", lease=8, offset=1)
            two = await taking
            await rounds()
            script.waiting[Lease] = script.waiting[Lease][-1:]
            script.grant(b"c", b"d", lease=9, offset=2)
            batches = consumer.batches(10)
            consumer._intake.failed(Denied("not you"))
            with pytest.raises(Denied):
                await anext(batches)
            (three,) = await anext(consumer.batches(1))
            consumer._intake.failed(Denied("not you"))
            (four,) = await anext(consumer.batches(10))  # It had one already; the error comes with the next.
            assert [m.value for m in (one, two, three, four)] == [b"a", b"b", b"c", b"d"]
            with pytest.raises(Denied):
                await anext(consumer)

    run(scenario())


def test_a_refused_join_is_raised() -> None:
    async def scenario() -> None:
        script = Script()
        script.answers[JoinGroup] = [Refusal("fenced", "somebody else is active", "none")]
        with pytest.raises(Fenced):
            await make(script, wait=False).__aenter__()
        await asyncio.sleep(60)
        assert len(script.requests) == 1

    run(scenario())
