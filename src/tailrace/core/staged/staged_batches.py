"""Staged writes on one partition: batches stored outside of the readable log until their version is decided.

A writer stages batches under an *attempt*, then decides a *version* that names the winning attempts (see
`core.staged.staged_versions`). Each partition then appends the batches that it holds of them:

    StageBatch ──▶ Staged ──ApplyStaged──▶ Appended or Delayed … + StageApplied   in one group of frames
                        └──DropStaged────▶ StageDropped                           aborted, lost, too old

Rows that are delayed and not yet due when their version is applied wait in the delay queue, like those of any
delayed publish. Batches of an attempt are numbered, so that a request that is sent again stores nothing
twice. The version last applied is kept for each writer, so that a version is applied at most once, however
often it is requested.

Whether an attempt may be dropped is not known here, but on the coordinator of its writer (see
`core.process.staged_process`). The number of the attempt tells which one that is, so that a partition can
report attempts that have expired without knowing their writers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.core_tuning import (
    BATCH_COST,
    NAME_BYTES_MAX,
    STAGED_BYTES_MAX,
    STAGING_TTL_US,
    WRITER_IDLE_US,
    WRITERS_MAX,
)
from tailrace.core.log_head import LogHead
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import Appended, Delayed, Fact, StageApplied, Staged, StageDropped, Stored
from tailrace.core.model.identifiers import (
    HAS_DEDUP_ID,
    HAS_OFFSET_DELTA,
    Refusal,
    hash128,
)
from tailrace.core.model.internal_commands import (
    ApplyStaged,
    CheckStaged,
    DropStaged,
    StageBatch,
    StagedFrames,
)
from tailrace.core.model.internal_topic import PARTITIONS, home_of
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.publish.capacity import too_large
from tailrace.core.publish.key_index import KeyIndex
from tailrace.core.publish.publish_rules import late_rows, over_limit
from tailrace.errors import Corrupt, InvalidRequest, NotFound, Overloaded, Unavailable

_FORBIDDEN = ((HAS_DEDUP_ID, "dedup_id"), (HAS_OFFSET_DELTA, "offset_delta"))


def attempt_number(writer: str, attempt: str) -> int:
    """The number of an attempt in facts and frames; `home_of_attempt` is part of it. The length keeps pairs
    apart that join to the same text."""
    name = writer.encode()
    number = hash128(len(name).to_bytes(4, "little") + name + attempt.encode())[0]
    return number - home_of_attempt(number) + home_of(writer)


def home_of_attempt(number: int) -> int:
    """The partition of the internal topic that decides on an attempt."""
    return number % PARTITIONS


def bad_name(what: str, name: str) -> Refusal | None:
    """Why a text cannot be the name of a writer or of an attempt; None if it can."""
    if name and name.isprintable() and len(name.encode()) <= NAME_BYTES_MAX:
        return None
    return Refusal(InvalidRequest.code, f"{what}: 1 to {NAME_BYTES_MAX} bytes of printable text")


class Attempt(msgspec.Struct, array_like=True):
    """One attempt: the entries of its frames in order, the bytes that they count, and the time of the
    last."""

    entries: list[int]
    nbytes: int
    time_us: int


class _State(msgspec.Struct, frozen=True, array_like=True):
    attempts: list[tuple[int, Attempt]]
    applied: list[tuple[str, int, int]]


class StagedBatches:
    """Staged writes on one partition."""

    COMMANDS: tuple[type, ...] = (StageBatch, CheckStaged, ApplyStaged, DropStaged)
    FACTS: tuple[type, ...] = (Staged, StageApplied, StageDropped)

    def __init__(self, head: LogHead, keys: KeyIndex | None) -> None:
        self._head = head
        self._keys = keys
        self._attempts: dict[int, Attempt] = {}
        self._applied: dict[str, tuple[int, int]] = {}
        """By writer: the version last applied, and its time; the latest at the end."""
        self.nbytes = 0
        """Bytes that all attempts count together."""
        self.writers_max = WRITERS_MAX

    # ----------------------------------------------------------------------------------------------- views

    def entries(self, attempts: Iterable[int]) -> list[int]:
        """Entries of the frames of these attempts that are stored here, attempt by attempt."""
        found = (self._attempts.get(number) for number in attempts)
        return [entry for attempt in found if attempt is not None for entry in attempt.entries]

    def applied_version(self, writer: str) -> int:
        """The version last applied for a writer; -1 if there is none."""
        return self._applied.get(writer, (-1, 0))[0]

    def expired(self, time_us: int) -> list[int]:
        """Attempts to which no batch was added for `STAGING_TTL_US`."""
        since = time_us - STAGING_TTL_US
        return [number for number, attempt in self._attempts.items() if attempt.time_us <= since]

    def lowest_entry(self) -> int | None:
        """The entry of the oldest frame that is still needed; None if there is none."""
        return min((attempt.entries[0] for attempt in self._attempts.values()), default=None)

    # ---------------------------------------------------------------------------------------------- decide

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command."""
        match command:
            case StageBatch():
                return self._stage(command, turn)
            case CheckStaged():
                return Decision(NOTHING, self._check(command))
            case ApplyStaged():
                return self._apply_version(command, turn)
            case DropStaged():
                known = [number for number in command.attempts if number in self._attempts]
                return Decision((StageDropped(known, turn.now_us),) if known else NOTHING, Done())
        raise AssertionError(f"not a command of staging: {command!r}")

    def _stage(self, command: StageBatch, turn: TurnInput) -> Decision:
        view, options = command.view, self._head.options
        problem = bad_name("writer", command.writer) or bad_name("attempt", command.attempt)
        if problem is not None:
            return Decision(NOTHING, problem)
        number = attempt_number(command.writer, command.attempt)
        known = self._attempts.get(number)
        have = 0 if known is None else len(known.entries)
        if 0 <= command.number < have:
            return Decision(NOTHING, Done())
        if command.number != have:
            text = f"batch {command.number} of an attempt that has {have} here: it expired, or was dropped"
            return Decision(NOTHING, Refusal(NotFound.code, text, details={"batches": have}))
        problem = _unfit(view.columns) or over_limit(view, options, turn.wall_us)
        if problem is None and view.keys is not None and self._keys is not None:
            problem = self._keys.check(view.keys, None)
        problem = problem or too_large(options, view.count, view.nbytes)
        problem = problem or self._no_room(command, turn.now_us)
        if problem is not None:
            return Decision(NOTHING, problem)
        return Decision((Staged(turn.next_entry, view, turn.now_us, number, have),), Done())

    def _no_room(self, command: StageBatch, time_us: int) -> Refusal | None:
        size = _cost(command.view.nbytes)
        if self.nbytes + size > STAGED_BYTES_MAX:
            text = (
                f"{self.nbytes} bytes are staged on the partition, {size} more are above {STAGED_BYTES_MAX}"
            )
            return Refusal(Overloaded.code, text, details={"retry_after_ms": 1000})
        if command.writer in self._applied or len(self._applied) < self.writers_max:
            return None
        if next(iter(self._applied.values()))[1] <= time_us - WRITER_IDLE_US:
            return None
        text = f"{len(self._applied)} writers have written to the partition in the last days, no more can"
        return Refusal(Overloaded.code, text, details={"retry_after_ms": 60_000})

    def _check(self, command: CheckStaged) -> Done | Refusal:
        missing = []
        for number, batches in zip(command.attempts, command.batches, strict=True):
            attempt = self._attempts.get(number)
            if attempt is None or batches not in (-1, len(attempt.entries)):
                missing.append(number)
        if not missing:
            return Done()
        text = f"{len(missing)} attempts are not staged, or not as many batches of them as were said"
        return Refusal(NotFound.code, text, details={"missing": missing})

    def _apply_version(self, command: ApplyStaged, turn: TurnInput) -> Decision:
        if self.applied_version(command.writer) >= command.version:
            return Decision(NOTHING, Done())
        numbers = [attempt_number(command.writer, attempt) for attempt in command.attempts]
        known = self.known(numbers)
        if command.entries is None:
            nbytes = sum(self._attempts[number].nbytes for number in known)
            missing = StagedFrames(self.entries(known), nbytes, len(numbers) - len(known))
            return Decision(NOTHING, Done(), missing=missing)
        if self.entries(known) != command.entries:
            # Batches were added or dropped since they were read: the next request reads them again.
            return Decision(NOTHING, Refusal(Unavailable.code, "what is staged has changed meanwhile"))
        facts: list[Stored | Fact] = []
        offset, time_us, wall_us = self._head.end_offset, turn.now_us, turn.wall_us
        for place, view in enumerate(command.views):
            if late_rows(view, wall_us) is None:
                facts.append(Appended(offset, view, time_us, released=True, wall_us=wall_us))
                offset += view.count
            else:  # Rows that became due since the shell divided the batch are released at the next tick.
                facts.append(Delayed(turn.next_entry + place, view, time_us, released=True, wall_us=wall_us))
        facts.append(StageApplied(command.writer, command.version, known, time_us))
        return Decision(tuple(facts), Done())

    # ----------------------------------------------------------------------------------------------- apply

    def apply(self, fact: Any) -> None:
        """Apply a fact."""
        match fact:
            case Staged():
                self._staged(fact)
                return
            case StageApplied():
                self._applied.pop(fact.writer, None)
                self._forget(fact.time_us)
                self._applied[fact.writer] = fact.version, fact.time_us
            case StageDropped():
                pass
            case _:
                raise AssertionError(f"not a fact of staging: {fact!r}")
        for number in fact.attempts:
            attempt = self._attempts.pop(number, None)
            assert attempt is not None, f"attempt {number} is not staged"
            self.nbytes -= attempt.nbytes
        self._head.pass_time(fact.time_us)

    def _staged(self, fact: Staged) -> None:
        size = _cost(fact.view.nbytes)
        attempt = self._attempts.setdefault(fact.attempt, Attempt([], 0, 0))
        assert fact.number == len(attempt.entries), "batches of an attempt follow each other"
        attempt.entries.append(fact.entry)
        attempt.nbytes += size
        attempt.time_us = fact.append_time_us
        self.nbytes += size
        self._head.pass_time(fact.append_time_us)

    def known(self, attempts: Iterable[int]) -> list[int]:
        """The attempts among these of which batches are staged."""
        return [number for number in attempts if number in self._attempts]

    def follows(self, fact: Staged) -> bool:
        """Whether a batch is the next of its attempt."""
        attempt = self._attempts.get(fact.attempt)
        return fact.number == (0 if attempt is None else len(attempt.entries))

    def _forget(self, time_us: int) -> None:
        while len(self._applied) >= self.writers_max:
            writer, (_, idle_since_us) = next(iter(self._applied.items()))
            if idle_since_us > time_us - WRITER_IDLE_US:
                return  # Versions that were staged before the limit was reached: a few more than the limit.
            del self._applied[writer]

    # -------------------------------------------------------------------------------------------- snapshot

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot; empty if there were no staged writes."""
        if not self._attempts and not self._applied:
            return []
        applied = [(writer, version, time_us) for writer, (version, time_us) in self._applied.items()]
        return [msgspec.msgpack.encode(_State(list(self._attempts.items()), applied))]

    def load(self, columns: Sequence[memoryview]) -> None:
        """Restore the state from a snapshot."""
        if not columns:
            return
        if len(columns) != 1:
            raise Corrupt(f"the snapshot has {len(columns)} pieces of staged writes")
        state = msgspec.msgpack.decode(columns[0], type=_State)
        self._attempts = dict(state.attempts)
        self._applied = {writer: (version, time_us) for writer, version, time_us in state.applied}
        self.nbytes = sum(attempt.nbytes for attempt in self._attempts.values())

    def verify(self) -> None:
        """Assert the invariants."""
        assert self.nbytes == sum(attempt.nbytes for attempt in self._attempts.values()) <= STAGED_BYTES_MAX
        for attempt in self._attempts.values():
            assert attempt.entries
            assert attempt.entries == sorted(set(attempt.entries)), "frames of an attempt in order"
        assert all(version >= 0 for version, _ in self._applied.values())


def _cost(nbytes: int) -> int:
    return max(nbytes, BATCH_COST)


def _unfit(columns: int) -> Refusal | None:
    for bit, name in _FORBIDDEN:
        if columns & bit:
            return Refusal(InvalidRequest.code, f"{name}: not with staged writes")
    return None
