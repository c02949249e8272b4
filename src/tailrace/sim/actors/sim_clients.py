"""Simulated clients: producers on the real flows, readers that check what they are given as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tailrace.client.publish.partition_flow import PartitionFlow, PendingBatch
from tailrace.core.model.commands import Claimed, ClaimProducer, Fetch, Fetched, Publish, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import TailraceError
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer, crc32c
from tailrace.ports import Respond
from tailrace.sim.actors.surroundings import ChancyWorld
from tailrace.sim.network import SimulatedLink, Surroundings
from tailrace.sim.virtual_time import SECOND_US, Violation

SAFE, QUICK = "safe", "quick"
PLACES = [(SAFE, 0), (SAFE, 1), (QUICK, 0)]
TOO_LARGE = 150

Claimant = Callable[[tuple[str, int], int], None]
"""Told that the name of a client is its own at a place, and of its epoch there."""


class SentBatch:
    """A batch as its sender remembers it."""

    def __init__(
        self, batch: PendingBatch, flow: PartitionFlow, place: tuple[str, int], values: list[bytes]
    ) -> None:
        self.batch, self.flow, self.place, self.values = batch, flow, place, values
        self.taken = self.probe = False


class PublishingWorld(ChancyWorld, Protocol):
    """A world with an account of what its clients have sent."""

    ledger: list[SentBatch]
    taken_over: list[tuple[tuple[str, int], SimProducer, int, int]]
    """Who was told that a name is its own now: place, producer, epoch, and how long the ledger was."""

    def end_of(self, place: tuple[str, int]) -> int:
        """The end of a partition now."""
        ...


class SimOutside:
    """See `client.publish.partition_flow.Outside`: what the flows of one client are in."""

    def __init__(self, world: PublishingWorld, line: SimulatedLink, claimed: Claimant) -> None:
        self._world = world
        self._line = line
        self._claimed = claimed
        self._numbers: dict[int, tuple[int, int]] = {}

    def submit(self, request: Any, body: Buffer, respond: Respond) -> None:
        """See `Outside.submit`."""
        if isinstance(request, Publish):
            now = request.producer_id, request.producer_sequence
            before = self._numbers.get(request.crc, now)
            self._world.seen["numbers closed up behind a refused batch"] += (
                before[0] == now[0] and before > now
            )
            self._world.seen["identity renewed"] += before[0] != now[0]
            self._numbers[request.crc] = now
        elif not isinstance(request, ClaimProducer):
            raise AssertionError(f"a flow does not send {request}")
        elif request.epoch is None:
            respond = self._first_claim((request.topic, request.partition), respond)
        self._line.submit(request, body, respond)

    def _first_claim(self, place: tuple[str, int], respond: Respond) -> Respond:
        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, Claimed):
                self._claimed(place, reply.epoch)
            respond(reply, parts)

        return answered

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """See `Outside.later`."""
        self._world.later(int(delay_s * SECOND_US), action)

    def now_s(self) -> float:
        """See `Outside.now_s`."""
        return self._world.clock.now_us() / SECOND_US

    def new_producer_id(self) -> int:
        """See `Outside.new_producer_id`."""
        return self._world.random.getrandbits(64) | 1

    def retried(self, error: TailraceError) -> None:
        """See `Outside.retried`."""
        self._world.seen[f"sent again after {error.code}"] += 1

    def settled(self, batch: PendingBatch) -> None:
        """See `Outside.settled`."""
        error, seen = batch.error, self._world.seen
        if error is None:
            seen["doubtful batch stored after all"] += batch.doubtful
            seen["conditional stored"] += batch.expected_sequence > 0
            return
        names = {
            "too_large": "too large", "fenced": "fenced", "timeout": "batch given up",
            "sequence_conflict": "sequence conflict", "storage_fault": "storage fault seen by a producer",
        }  # fmt: skip
        if error.code in names:
            seen[names[error.code]] += 1

    def future(self) -> Any:
        """See `Outside.future`; nobody waits here."""
        raise NotImplementedError


class SimProducer:
    """One producing client, with a flow to each place."""

    def __init__(self, world: PublishingWorld, named_id: int | None) -> None:
        self._world = world
        self.line = SimulatedLink(world)
        self._outside = SimOutside(world, self.line, self._took_over)
        places = PLACES if named_id is None else PLACES[:2]
        self.flows = {place: PartitionFlow(self._outside, *place, named_id) for place in places}
        self._tick()

    def _tick(self) -> None:
        for flow in self.flows.values():
            flow.give_up(self._outside.now_s())
        self._world.later(SECOND_US, self._tick)

    def _took_over(self, place: tuple[str, int], epoch: int) -> None:
        self._world.taken_over.append((place, self, epoch, len(self._world.ledger)))

    def send(self, place: tuple[str, int], give_up_s: float, *, odd: bool) -> SentBatch:
        """Make a batch and enqueue it; an odd one may be refused for good."""
        world = self._world
        values = [world.value() for _ in range(world.random.choice((1, 1, 2, 3)))]
        batch = PendingBatch(self._outside, place[1], self._outside.now_s() + give_up_s)
        if odd and world.chance(0.5):
            values[-1] += b"x" * TOO_LARGE
        elif odd:
            batch.expected_sequence = max(1, world.end_of(place) + world.random.choice((0, 1, 1, 1, 2, 5)))
        batch.ids = bytes(16 * len(values))
        now_us = world.clock.now_us()
        batch.columns, batch.body = arrow.encode(values, ids=batch.ids, timestamps=now_us)
        batch.crc = crc32c(batch.body)
        sent = SentBatch(batch, self.flows[place], place, values)
        world.ledger.append(sent)
        self.flows[place].enqueue(batch)
        return sent


class SimReader:
    """A reading client: every committed message of every place, in order."""

    def __init__(self, world: Surroundings, topic: str) -> None:
        self._world = world
        self.topic = topic
        self.line = SimulatedLink(world)
        self.seen: dict[int, list[bytes]] = {p: [] for name, p in PLACES if name == topic}
        self._fetch()

    def _fetch(self) -> None:
        random = self._world.random
        positions = [(partition, len(values)) for partition, values in self.seen.items()]
        random.shuffle(positions)
        wait_ms = random.choice((0, 20, 2000))
        request = Fetch(self.topic, positions, random.choice((1, 700, 100_000)), wait_ms)
        self.line.submit(request, b"", self._arrived)

    def _arrived(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        world = self._world
        if isinstance(reply, Refusal):
            if reply.code == "not_found" and self.topic == SAFE:
                raise Violation(f"a reader was given what is gone: {reply.message}")
            world.later(world.random.choice((1_000, 100_000)), self._fetch)
            return
        assert isinstance(reply, Fetched)
        data, at = memoryview(b"".join(parts)), 0
        for partition, size, _, end in reply.slices:
            self._take(partition, data[at : at + size], end)
            at += size
        world.later(world.random.choice((0, 1_000, 100_000)), self._fetch)

    def _take(self, partition: int, data: memoryview, end: int) -> None:
        values = self.seen[partition]
        for header, body in frame.walk(data):
            if header.end_offset > end:
                raise Violation(f"{self.topic}/{partition}: delivered beyond the committed end, {end}")
            if header.base_offset > len(values):
                raise Violation(f"{self.topic}/{partition}: {len(values)} was skipped")
            values += arrow.decode(body, header.columns)["value"].to_pylist()[
                len(values) - header.base_offset :
            ]

    def cut_back(self, partition: int, end: int) -> None:
        """On an `interval` topic what was read may be gone."""
        del self.seen[partition][end:]
