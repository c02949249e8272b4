"""One suite for every `BrokerVerbs`: in the process, over the native protocol (`Verbs`), in tests.

Covers `broker/gateway.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.broker.node import EmbeddedVerbs, Node
from tailrace.client.rpc.machine_clock import MachineClock
from tailrace.client.rpc.transport import NetworkVerbs
from tailrace.config import ServerOptions
from tailrace.core.model.commands import (
    LATEST,
    CreateTopic,
    Done,
    Fetch,
    Fetched,
    FindOffsets,
    Offsets,
    Ping,
    Pong,
    Publish,
    Published,
    Reply,
    TrimTopic,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch, frame
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs
from tailrace.testing.local_broker import LocalBroker

Scenario = Callable[[BrokerVerbs], Awaitable[None]]
Run = Callable[[Scenario], None]
LIMIT_S = 60.0


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[BrokerVerbs]:
    if kind == "embedded":
        embedded = EmbeddedVerbs(str(folder), MachineClock())
        await embedded.open()
        yield embedded
        await embedded.close()
    elif kind == "native":
        node = Node(ServerOptions(data=str(folder), listen="127.0.0.1:0", http_listen="127.0.0.1:0"))
        await node.start()
        network = NetworkVerbs([node.native_places[0]])
        await network.open(LIMIT_S)
        yield network
        await network.close()
        await node.stop()
    else:
        with LocalBroker() as broker:
            link = broker.link()
            yield link
            await link.close()


@pytest.fixture(params=["embedded", "native", "local"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    async def play(scenario: Scenario) -> None:
        async with asyncio.timeout(LIMIT_S), opened(request.param, tmp_path / "data") as verbs:
            await scenario(verbs)

    return lambda scenario: asyncio.run(play(scenario))


class Asked:
    """A request, and every answer that came to it."""

    def __init__(self, verbs: BrokerVerbs, request: Any, body: Buffer = b"") -> None:
        self.answers: list[tuple[Reply, bytes]] = []
        self._answered = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        verbs.submit(request, body, self._respond)

    def _respond(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        assert asyncio.get_running_loop() is self._loop, "in the caller's thread"
        self.answers.append((reply, b"".join(parts)))
        self._answered.set()

    async def reply(self) -> Any:
        await self._answered.wait()
        return self.answers[0][0]


def publish(values: Sequence[bytes], partition: int = 0) -> tuple[Publish, Buffer]:
    ids = batch.make_ids(len(values), 1, 2, 3)
    columns, body = batch.encode(list(values), ids=ids, timestamps=1)
    return Publish("t", partition, columns, frame.crc32c(body)), body


def test_every_request_is_answered_once_and_with_its_own(run: Run) -> None:
    async def scenario(verbs: BrokerVerbs) -> None:
        await Asked(verbs, CreateTopic("t", {"partitions": 2})).reply()
        asked = [Asked(verbs, *publish([b"%d" % number], number % 2)) for number in range(50)]
        asked += [Asked(verbs, Ping()), Asked(verbs, FindOffsets("t", LATEST))]
        replies = [await one.reply() for one in asked]
        assert [reply.base_offset for reply in replies[:50]] == [number // 2 for number in range(50)]
        assert isinstance(replies[50], Pong)
        assert isinstance(replies[51], Offsets)
        await Asked(verbs, Ping()).reply()
        assert all(len(one.answers) == 1 for one in asked)

    run(scenario)


def test_bodies_go_both_ways(run: Run) -> None:
    async def scenario(verbs: BrokerVerbs) -> None:
        await Asked(verbs, CreateTopic("t", {"partitions": 1})).reply()
        values = [b"a", b"bb" * 100_000, b""]
        assert isinstance(await Asked(verbs, *publish(values)).reply(), Published)
        fetch = Asked(verbs, Fetch("t", [(0, 0)]))
        reply = await fetch.reply()
        assert isinstance(reply, Fetched)
        (_, nbytes, start, end), body = reply.slices[0], fetch.answers[0][1]
        assert (nbytes, start, end) == (len(body), 0, 3)
        ((header, stored),) = frame.walk(body)
        assert batch.decode(stored, header.columns)["value"].to_pylist() == values

    run(scenario)


def test_a_refusal_is_an_answer(run: Run) -> None:
    async def scenario(verbs: BrokerVerbs) -> None:
        missing = await Asked(verbs, *publish([b"x"])).reply()
        assert isinstance(missing, Refusal)
        assert (missing.code, missing.outcome) == ("not_found", "none")
        await Asked(verbs, CreateTopic("t", {"partitions": 1})).reply()
        request, body = publish([b"x"])
        broken = await Asked(verbs, request, bytes(len(body))).reply()
        assert isinstance(broken, Refusal)
        wrong: Any = CreateTopic(7)  # type: ignore[arg-type]
        odd = await Asked(verbs, wrong).reply()
        assert isinstance(odd, Refusal)
        assert odd.code == "invalid_request"
        assert isinstance(await Asked(verbs, TrimTopic("t", 0, 0)).reply(), Done)
        assert (await Asked(verbs, *publish([b"x"])).reply()).base_offset == 0

    run(scenario)


def test_a_fetch_that_waits_is_answered_when_there_is_something(run: Run) -> None:
    async def scenario(verbs: BrokerVerbs) -> None:
        await Asked(verbs, CreateTopic("t", {"partitions": 1})).reply()
        waiting = Asked(verbs, Fetch("t", [(0, 0)], wait_ms=50_000))
        assert isinstance(await Asked(verbs, Ping()).reply(), Pong)
        assert waiting.answers == []
        await Asked(verbs, *publish([b"x"])).reply()
        assert (await waiting.reply()).slices[0][3] == 1

    run(scenario)


def test_clients_live_in_the_time_of_their_broker(run: Run) -> None:
    async def scenario(verbs: BrokerVerbs) -> None:
        await Asked(verbs, CreateTopic("t", {"partitions": 1})).reply()
        before_us = verbs.clock.wall_ns() // 1000
        published = await Asked(verbs, *publish([b"x"])).reply()
        assert abs(published.append_time_us - before_us) < 60_000_000

    run(scenario)
