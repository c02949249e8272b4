"""Histories of groups: what each consumer process got and settled, and the checker of what must never happen.

Every process notes its rows in a file of its own, at once, so that a kill loses nothing that it saw. All of
them, and the publisher, read the one monotonic clock of the machine.

G1  every acknowledged publish was processed, and settled by the end
G2  what was delivered is what was sent there
G3  no message is settled with success through two receipts
G4  what was confirmed as settled is never delivered again
G5  a key is processed in order, the next message after the one before was settled (re-deliveries aside)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from tests.history.checker import Violation
from tests.history.record import Sent, Value

Outcome = Literal["ok", "lost", "unknown"]
Spot = tuple[int, int]
"""Partition and offset."""


class Got(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A handler began with a message."""

    member: str
    partition: int
    offset: int
    lease: int
    key: str
    value: Value | None
    attempt: int
    deliveries: int
    at_ns: int

    @property
    def spot(self) -> Spot:
        """Where the message stands."""
        return self.partition, self.offset


class Finished(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A handler settled a message, and what it was told."""

    member: str
    partition: int
    offset: int
    lease: int
    verb: Literal["ack", "nack"]
    outcome: Outcome
    call_ns: int
    return_ns: int

    @property
    def spot(self) -> Spot:
        """Where the message stands."""
        return self.partition, self.offset


class Moved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Partitions came to a member or left it."""

    member: str
    change: Literal["assigned", "revoked"]
    partitions: list[int]
    at_ns: int


class Late(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process wanted to go on and was not let: its loop stood still, or the machine had no time for it."""

    member: str
    due_ns: int
    at_ns: int


Row = Got | Finished | Moved | Late
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Row)


def encode_row(row: Row) -> bytes:
    """A row as a line."""
    return _encoder.encode(row) + b"\n"


class HistoryFile:
    """The rows that another process writes, as far as it has come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rows: list[Row] = []

    def rows(self) -> list[Row]:
        """All rows so far; a line that is half written is not there yet."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            self._rows += [_decoder.decode(line) for line in whole.splitlines()]
        return self._rows


class GroupHistory:
    """The rows of all members of a group, by time, what was published, and when the broker was killed."""

    def __init__(self, rows: Iterable[Row], sends: Iterable[Sent], kills: Sequence[int] = ()) -> None:
        self.rows = list(rows)
        self.sends = list(sends)
        self.kills = kills
        self.got = sorted((row for row in self.rows if isinstance(row, Got)), key=lambda row: row.at_ns)
        self.finished = [row for row in self.rows if isinstance(row, Finished)]
        self.moved = [row for row in self.rows if isinstance(row, Moved)]
        self.late = [row for row in self.rows if isinstance(row, Late)]
        self.outcome = {(row.spot, row.lease): row for row in self.finished}
        self.acks: dict[Spot, list[Finished]] = defaultdict(list)
        for row in self.finished:
            if row.verb == "ack" and row.outcome == "ok":
                self.acks[row.spot].append(row)

    # -- questions

    def first_got(self) -> dict[Spot, Got]:
        """The first delivery of every message."""
        found: dict[Spot, Got] = {}
        for row in self.got:
            found.setdefault(row.spot, row)
        return found

    def repeated(self) -> dict[Spot, list[Got]]:
        """Messages that were delivered more than once."""
        found: dict[Spot, list[Got]] = defaultdict(list)
        for row in self.got:
            found[row.spot].append(row)
        return {spot: rows for spot, rows in found.items() if len(rows) > 1}

    def in_hand(self, at_ns: int, member: str | None = None) -> set[Spot]:
        """Messages whose handler had begun at a time and had not been told of success."""
        begun = {r.spot for r in self.got if r.at_ns <= at_ns and member in (None, r.member)}
        told = {spot for spot, acks in self.acks.items() if any(ack.return_ns <= at_ns for ack in acks)}
        return begun - told

    def lateness_ns(self, from_ns: int, to_ns: int) -> list[int]:
        """How late processes were, each time that they were late within a time."""
        late = ((max(row.due_ns, from_ns), min(row.at_ns, to_ns)) for row in self.late)
        return [end - first for first, end in late if first < end]

    def longest_gap_ns(self, partition: int, from_ns: int, to_ns: int) -> int:
        """The longest time without a delivery of a partition, within a time."""
        times = [row.at_ns for row in self.got if row.partition == partition]
        inside = [from_ns, *(at for at in times if from_ns < at < to_ns), to_ns]
        return max(later - earlier for earlier, later in pairwise(inside))

    # -- the checker

    def expect_clean(self, *, ordered: bool = True, may_die: frozenset[str] = frozenset()) -> None:
        """Raise when anything is wrong. Messages of the keys in `may_die` need not be settled by a member."""
        found = [
            *self._lost(may_die),
            *self._strange(),
            *self._settled_twice(),
            *self._delivered_after(),
            *(self._disorder(may_die) if ordered else ()),
        ]
        text = "\n".join(f"  {violation.invariant}: {violation.text}" for violation in found[:20])
        assert not found, f"{len(found)} violations\n{text}"

    def _lost(self, may_die: frozenset[str]) -> Iterator[Violation]:
        first = self.first_got()
        in_doubt = self._in_doubt()
        for send in self.sends:
            if send.outcome != "ok" or send.partition is None or send.offset is None:
                continue
            spot = (send.partition, send.offset)
            if spot not in first:
                yield Violation("G1", f"{send.value} at {spot} was never delivered")
            elif first[spot].key not in may_die and spot not in self.acks and spot not in in_doubt:
                yield Violation("G1", f"{send.value} at {spot} was never settled")

    def _in_doubt(self) -> set[Spot]:
        """Messages with a delivery of which nobody knows whether it was settled: the process was killed, or
        the broker, so that the one who asked again may have been told too late."""
        found = {row.spot for row in self.got if (row.spot, row.lease) not in self.outcome}
        return found | {row.spot for row in self.finished if self._doubtful(row)}

    def _doubtful(self, row: Finished) -> bool:
        across = any(row.call_ns < kill < row.return_ns for kill in self.kills)
        return row.outcome == "unknown" or (row.outcome == "lost" and across)

    def _strange(self) -> Iterator[Violation]:
        sent = {(row.partition, row.offset): row.value for row in self.sends if row.outcome == "ok"}
        values = {row.value for row in self.sends}
        for row in self.got:
            if row.value not in values or sent.get(row.spot, row.value) != row.value:
                yield Violation("G2", f"{row.spot}: {row.value}, not {sent.get(row.spot)}")

    def _settled_twice(self) -> Iterator[Violation]:
        for spot, acks in self.acks.items():
            if len({ack.lease for ack in acks}) > 1:
                yield Violation("G3", f"{spot}: {acks}")

    def _delivered_after(self) -> Iterator[Violation]:
        for row in self.got:
            for ack in self.acks.get(row.spot, ()):
                if ack.lease == row.lease or row.at_ns < ack.return_ns:
                    continue
                # A process that slept hands out what it had in memory; it is told when it settles that.
                told = self.outcome.get((row.spot, row.lease))
                if told is None or told.outcome != "lost":
                    yield Violation("G4", f"{row} after {ack}")

    def _in_vain(self, row: Got) -> bool:
        """Whether the lease of a delivery was over already. When the broker is away for longer than a lease,
        members work on what they have until they hear of it."""
        told = self.outcome.get((row.spot, row.lease))
        return bool(self.kills) and told is not None and told.outcome == "lost"

    def _disorder(self, may_die: frozenset[str]) -> Iterator[Violation]:
        in_doubt = self._in_doubt()
        by_key: dict[str, list[Got]] = defaultdict(list)
        first: dict[Spot, Got] = {}
        for row in self.got:
            if row.key and row.key not in may_die and not self._in_vain(row):
                first.setdefault(row.spot, row)
        for row in first.values():
            by_key[row.key].append(row)
        for key, rows in by_key.items():
            rows.sort(key=lambda row: row.offset)
            for before, after in pairwise(rows):
                if after.at_ns < before.at_ns:
                    yield Violation("G5", f"{key}: {after.offset} was processed before {before.offset}")
                    continue
                acks = self.acks.get(before.spot, ())
                if before.spot not in in_doubt and not any(ack.call_ns <= after.at_ns for ack in acks):
                    yield Violation("G5", f"{key}: {before.offset} was not settled before {after.offset}")
