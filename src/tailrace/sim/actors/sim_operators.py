"""Simulated operators: they send dead letters back, step by step as the SDK does it, and begin again.

    find ──▶ read ──▶ hold ──▶ reopen at the origin, or publish a copy there ──▶ settle the dead letter

Power may fail after each of these. Then the operator begins again with what is on the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done, Fetch, Published, Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer, crc32c
from tailrace.sim.actors.surroundings import ChancyWorld
from tailrace.sim.delivery_history import Position, require
from tailrace.sim.network import SimulatedLink

GROUP = "_redrive"
TICK = b"tick"
OPTIONS = {"assignment": "shared", "ordering": "none", "max_attempts": 1_000_000}


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter: where it is, what it says, and when it was appended."""

    place: Position
    value: bytes
    group: str
    origin: Position
    time_us: int


def letters_in(parts: Sequence[Buffer], partition: int) -> Iterator[Letter]:
    """The dead letters in frames of one partition."""
    for header, body in frame.walk(memoryview(b"".join(parts))):
        if header.kind != frame.DATA:
            continue
        rows = arrow.decode(body, header.columns).to_pylist()
        for offset, row in enumerate(rows, header.base_offset):
            told = {name: bytes(text).decode() for name, text in row["headers"]}
            origin = int(told["tailrace-origin-partition"]), int(told["tailrace-origin-offset"])
            group = told["tailrace-group"]
            yield Letter((partition, offset), row["value"], group, origin, header.append_time_us)


@dataclass(slots=True)
class RedrivenLetter:
    """A dead letter was sent back, or may have been."""

    letter: Letter
    sent_us: int
    copied: bool


class RedriveWorld(ChancyWorld, Protocol):
    """A world with dead letters."""

    topic: str
    partitions: int
    dead_letters: str
    """Their topic."""


class SimOperator:
    """Redrives one letter after the other; whatever goes wrong, it begins again."""

    def __init__(self, world: RedriveWorld) -> None:
        self.world = world
        self.line = SimulatedLink(world)
        self.sent: list[RedrivenLetter] = []
        self.over: set[Position] = set()
        """Letters that were taken off the list, as the broker has confirmed."""
        self.idle = 0
        """How many rounds in a row have found nothing."""
        self._partition = 0
        self._later()

    def _later(self) -> None:
        self._partition = (self._partition + 1) % self.world.partitions
        self.world.later(self.world.random.choice((1_000, 100_000, 500_000)), self._enlist)

    def _ask(self, request: Request, then: Callable[[Any], None], body: Buffer = b"") -> None:
        """Go on when it is done; otherwise begin again."""

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, Refusal):
                self.idle += reply.code == "not_found"  # Nothing has died yet.
                self._later()
            else:
                then((reply, parts))

        self.line.submit(request, body, answered)

    def _enlist(self) -> None:
        request = groups.CreateGroup(GROUP, [self.world.dead_letters], OPTIONS, if_missing=True)
        self._ask(request, self._find)

    def _find(self, answer: Any) -> None:
        self._ask(wire.FindUnsettled(self.world.dead_letters, self._partition, GROUP), self._read)

    def _read(self, answer: Any) -> None:
        (found, _), number = answer, self._partition
        spans = found.spans
        self.idle = 0 if spans else self.idle + 1
        if not spans:
            self._later()
            return
        listed = {(number, at) for first, end in zip(spans[::2], spans[1::2], strict=True)
                  for at in range(first, end)}  # fmt: skip
        require(not listed & self.over, f"dead letters {listed & self.over} were redriven, and are back")

        def read(answer: Any) -> None:
            chosen = [letter for letter in letters_in(answer[1], number) if letter.place in listed]
            if chosen:
                self._hold(self.world.random.choice(chosen))
            else:
                self._later()

        self._ask(Fetch(self.world.dead_letters, [(number, spans[0])], 1 << 20), read)

    def _hold(self, letter: Letter) -> None:
        number, at = letter.place
        hold = wire.HoldOffsets(self.world.dead_letters, number, GROUP, "operator", [at, at + 1], 5_000)
        self._ask(hold, lambda answer: self.send(letter) if answer[0].spans else self._later())

    def send(self, letter: Letter) -> None:
        """Send it back, and then take it off the list."""
        self._send_back(letter, lambda: self._settle(letter, self._later))

    def _send_back(self, letter: Letter, then: Callable[[], None]) -> None:
        world, (partition, offset) = self.world, letter.origin
        copied = world.chance(0.2) and letter.value != TICK  # The ticks in the log are counted.
        self.sent.append(RedrivenLetter(letter, world.clock.now_us(), copied))
        if not copied:
            request = wire.Reopen(world.topic, partition, letter.group, [offset, offset + 1])
            self._ask(request, lambda answer: then())
            return
        name = b"redrive/%d/%d" % letter.place
        columns, body = arrow.encode(
            [letter.value], ids=world.random.randbytes(16), timestamps=world.clock.now_us(), dedup_ids=[name]
        )
        copy = wire.Republish(world.topic, partition, columns, crc32c(body))

        def published(answer: Any) -> None:
            assert isinstance(answer[0], Published)
            world.seen["copied"] += 1
            then()

        self._ask(copy, published, body)

    def _settle(self, letter: Letter, then: Callable[[], None]) -> None:
        number, at = letter.place

        def settled(answer: Any) -> None:
            assert isinstance(answer[0], Done)
            self.world.seen["redriven"] += 1
            self.over.add(letter.place)
            then()

        self._ask(wire.SettleOffsets(self.world.dead_letters, number, GROUP, [at, at + 1]), settled)
