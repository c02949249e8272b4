"""Decisions on staged writes: which attempts of a writer's version win, once and for all.

A part of the coordinator: all decisions of one writer are made on one internal partition, so one fact there
decides a version for any number of targets. The versions of a writer grow. A request for a version at or
below the last decided one is answered with that decision: so a loser learns that it lost, and a winner whose
answer was lost that it won. A decision is *pending* until every target has confirmed that it is applied. The
next version has to wait until then, so that targets apply a writer's versions in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tailrace.core.core_tuning import MEMORY_BYTES_MAX, TARGET_BYTES_MAX, TARGETS_MAX, WRITER_IDLE_US
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.group_facts import StagedDecided, StagedDone, Target, TargetGroup
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import DecideStaged, StagedDecision
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.staged.staged_batches import bad_name
from tailrace.errors import InvalidRequest, Overloaded, TooLarge, Unavailable

VERSION_MAX = (1 << 63) - 1


class ChooseStaged(msgspec.Struct, frozen=True):
    """A writer's request, with the ids of the topics that it names. Clients cannot send it."""

    request: DecideStaged
    topic_ids: dict[str, int]


class FinishStaged(msgspec.Struct, frozen=True):
    """Every target has confirmed a version. Clients cannot send it."""

    writer: str
    version: int


class DecidedVersion(msgspec.Struct, frozen=True, array_like=True):
    """The last decision of a writer."""

    version: int
    time_us: int
    done: bool
    grouped: list[TargetGroup] = []
    attempt: str = ""
    topic_ids: dict[str, int] = {}

    @property
    def targets(self) -> list[Target]:
        """The attempts that won, in their order."""
        return targets_of((), self.grouped)

    @property
    def topics(self) -> list[str]:
        """The topics of its targets, each once."""
        return list(dict.fromkeys(topic for _, topic, _ in self.grouped))

    def answer(self, won: bool) -> StagedDecision:
        """The reply to a writer."""
        targets = self.targets
        if _names(targets, ()) > TARGET_BYTES_MAX:
            return StagedDecision(self.version, [], won, self.done, grouped_of(targets))
        return StagedDecision(self.version, targets, won, self.done)


class StagedVersions:
    """The last decision of each writer."""

    COMMANDS: tuple[type, ...] = (ChooseStaged, FinishStaged)
    FACTS: tuple[type, ...] = (StagedDecided, StagedDone)

    def __init__(self) -> None:
        self._last: dict[str, DecidedVersion] = {}
        """By writer; the latest decision is at the end."""
        self._pending: dict[str, None] = {}
        self._bytes = 0
        self.bytes_max = MEMORY_BYTES_MAX

    def last(self, writer: str) -> DecidedVersion | None:
        """The last decision of a writer."""
        return self._last.get(writer)

    def pending(self) -> Iterator[tuple[str, DecidedVersion]]:
        """Decisions that some target may not have applied yet."""
        return ((writer, self._last[writer]) for writer in list(self._pending))

    # ---------------------------------------------------------------------------------------------- decide

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command; the time never goes back."""
        now_us = turn.now_us
        if isinstance(command, FinishStaged):
            last = self._last.get(command.writer)
            if last is None or last.version != command.version or last.done:
                return Decision(NOTHING, Done())
            return Decision((StagedDone(command.writer, command.version, now_us),), Done(), soft=True)
        assert isinstance(command, ChooseStaged)
        command, topic_ids = command.request, command.topic_ids
        problem = malformed(command)
        if problem is not None:
            return Decision(NOTHING, problem)
        last = self._last.get(command.writer)
        if last is not None and command.version <= last.version:
            asked = targets_of(command.attempts, command.grouped)
            won = command.version == last.version and sorted(asked) == sorted(last.targets)
            if won and not asked and command.attempt != last.attempt:
                won = not command.attempt  # Requests without an attempt cannot be told apart.
            return Decision(NOTHING, last.answer(won))
        if last is not None and not last.done:
            text = f"version {last.version} of writer {command.writer!r} is still being applied"
            return Decision(NOTHING, Refusal(Unavailable.code, text, details={"version": last.version}))
        if self._bytes_after(command, now_us) > self.bytes_max:
            text = "too many writers with staged writes were active in the last days"
            return Decision(NOTHING, Refusal(Overloaded.code, text, details={"retry_after_ms": 60_000}))
        grouped = grouped_of(targets_of(command.attempts, command.grouped))
        attempt = "" if grouped else command.attempt
        fact = StagedDecided(command.writer, command.version, now_us, grouped, attempt, topic_ids)
        return Decision((fact,), DecidedVersion(command.version, now_us, False, grouped).answer(True))

    def _bytes_after(self, command: DecideStaged, now_us: int) -> int:
        """Bytes to remember after a decision, with idle writers forgotten as far as needed."""
        grouped = grouped_of(targets_of(command.attempts, command.grouped))
        nbytes = self._bytes + 64 + len(command.writer) + _names((), grouped)
        nbytes += 0 if grouped else len(command.attempt)
        known = self._last.get(command.writer)
        if known is not None:
            nbytes -= _size(command.writer, known)
        for writer, last in self._last.items():
            if nbytes <= self.bytes_max or last.time_us > now_us - WRITER_IDLE_US:
                break
            if last.done and writer != command.writer:
                nbytes -= _size(writer, last)
        return nbytes

    # ----------------------------------------------------------------------------------------------- apply

    def apply(self, fact: Any) -> None:
        """Apply a fact."""
        last = self._last.get(fact.writer)
        if isinstance(fact, StagedDone):
            assert last is not None, f"writer {fact.writer!r} has decided nothing"
            assert last.version == fact.version
            self._last[fact.writer] = msgspec.structs.replace(last, done=True)
            del self._pending[fact.writer]
            return
        assert isinstance(fact, StagedDecided)
        assert last is None or (last.done and last.version < fact.version), "versions grow, one at a time"
        if last is not None:
            del self._last[fact.writer]
            self._bytes -= _size(fact.writer, last)
        names = (fact.grouped, fact.attempt, fact.topic_ids)
        settled = DecidedVersion(fact.version, fact.time_us, False, *names)
        self._bytes += _size(fact.writer, settled)
        self._forget(fact.time_us)
        self._last[fact.writer] = settled
        self._pending[fact.writer] = None

    def _forget(self, time_us: int) -> None:
        if self._bytes <= self.bytes_max:
            return
        for writer, last in list(self._last.items()):
            if self._bytes <= self.bytes_max or last.time_us > time_us - WRITER_IDLE_US:
                return
            if last.done:
                del self._last[writer]
                self._bytes -= _size(writer, last)

    # -------------------------------------------------------------------------------------------- snapshot

    def packed(self) -> bytes:
        """The state for a snapshot."""
        return msgspec.msgpack.encode(list(self._last.items()))

    def load(self, data: bytes) -> None:
        """Restore the state from a snapshot."""
        self._last = dict(msgspec.msgpack.decode(data, type=list[tuple[str, DecidedVersion]]))
        self._pending = {writer: None for writer, last in self._last.items() if not last.done}
        self._bytes = sum(_size(writer, last) for writer, last in self._last.items())

    def verify(self) -> None:
        """Assert the invariants."""
        assert set(self._pending) == {writer for writer, last in self._last.items() if not last.done}
        assert self._bytes == sum(_size(writer, last) for writer, last in self._last.items())


def targets_of(attempts: Iterable[Target], grouped: Iterable[TargetGroup]) -> list[Target]:
    """All targets one by one: the listed ones, then those of the groups."""
    return [*attempts, *((topic, place, attempt) for attempt, topic, places in grouped for place in places)]


def grouped_of(targets: Iterable[Target]) -> list[TargetGroup]:
    """The same targets in the same order, in as few groups as that allows."""
    groups: list[TargetGroup] = []
    for topic, partition, attempt in targets:
        if groups and groups[-1][:2] == (attempt, topic):
            groups[-1][2].append(partition)
        else:
            groups.append((attempt, topic, [partition]))
    return groups


def malformed(command: DecideStaged) -> Refusal | None:
    """Why a request to decide is malformed; None if it is not."""
    problem = bad_name("writer", command.writer)
    for attempt in dict.fromkeys(
        [item[2] for item in command.attempts] + [item[0] for item in command.grouped]
    ):
        problem = problem or bad_name("attempts", attempt)
    if command.attempt:
        problem = problem or bad_name("attempt", command.attempt)
    if problem is not None:
        return problem
    if not 0 <= command.version <= VERSION_MAX:
        return Refusal(InvalidRequest.code, f"version: 0 to {VERSION_MAX}, not {command.version}")
    targets = targets_of(command.attempts, command.grouped)
    if len(targets) > TARGETS_MAX or _names((), grouped_of(targets)) > TARGET_BYTES_MAX:
        text = f"attempts: at most {TARGETS_MAX}, and {TARGET_BYTES_MAX} bytes of names"
        return Refusal(TooLarge.code, text, details={"limit": TARGETS_MAX})
    if len(set(targets)) < len(targets):
        return Refusal(InvalidRequest.code, "attempts: one is listed twice")
    if command.batches and len(command.batches) != len(targets):
        return Refusal(InvalidRequest.code, "batches: one number for each attempt")
    return None


def _size(writer: str, last: DecidedVersion) -> int:
    """Bytes that a decision counts: its names, and a little for each."""
    return 64 + len(writer) + len(last.attempt) + _names((), last.grouped)


def _names(attempts: Iterable[Target], grouped: Iterable[TargetGroup]) -> int:
    listed = sum(len(topic) + len(attempt) + 16 for topic, _, attempt in attempts)
    return listed + sum(
        len(topic) + len(attempt) + 16 + 5 * len(places) for attempt, topic, places in grouped
    )
