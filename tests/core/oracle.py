"""What a partition should answer, written as plainly as possible: lists, dicts and loops over messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrace.core.model.commands import Published, Reply
from tailrace.core.model.identifiers import HAS_DEDUP_ID, HAS_KEY, BatchView, Hashes, Refusal, hash128

IDLE_US = 7 * 24 * 3600 * 1_000_000


@dataclass(frozen=True)
class Row:
    """One message: only what decisions depend on."""

    key: str | None = None
    dedup_id: str | None = None


def hashes(items: list[str | None]) -> Hashes:
    rows = [(0, 0) if item is None else hash128(item.encode()) for item in items]
    return np.array(rows, np.uint64).reshape(-1, 2)


def view_of(rows: list[Row], *, key_index: bool = True, **sizes: Any) -> BatchView:
    """The view that the shell would make of a body with these rows."""
    keys, ids = [row.key for row in rows], [row.dedup_id for row in rows]
    has_keys, has_ids = any(key is not None for key in keys), any(item is not None for item in ids)
    columns = (HAS_KEY if has_keys else 0) | (HAS_DEDUP_ID if has_ids else 0)
    return BatchView(
        len(rows),
        columns | sizes.pop("columns", 0),
        sizes.pop("nbytes", 100 * len(rows)),
        sizes.pop("timestamp_max_us", 0),
        keys=hashes(keys) if has_keys and key_index else None,
        dedup_ids=hashes(ids) if has_ids else None,
        **sizes,
    )


def offsets_of(reply: Reply, count: int) -> list[int] | str:
    """The offset of every row, as a client reads a reply; the code of a refusal."""
    if isinstance(reply, Refusal):
        return reply.code
    assert isinstance(reply, Published)
    known = dict(reply.duplicates or ())
    offsets, following = [], reply.base_offset
    for row in range(count):
        if row in known:
            offsets.append(known[row])
        else:
            offsets.append(following)
            following += 1
    return offsets


@dataclass
class Writer:
    """A producer as the oracle remembers it."""

    epoch: int
    active_us: int
    results: list[list[int]] = field(default_factory=list)
    batches: list[list[Row]] = field(default_factory=list)


@dataclass
class Oracle:
    """The same rules as the partition's, message by message."""

    window_us: int
    dedup_max: int
    key_index_max: int
    producers_max: int
    end: int = 0
    start: int = 0
    time_us: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    taken: dict[str, tuple[int, int]] = field(default_factory=dict)
    writers: dict[int, Writer] = field(default_factory=dict)

    def writer(self, name: int, time_us: int) -> Writer | None:
        found = self.writers.get(name)
        return None if found is None or time_us - found.active_us > IDLE_US else found

    def crowded(self, name: int, time_us: int) -> bool:
        if name in self.writers or len(self.writers) < self.producers_max:
            return False
        return all(time_us - writer.active_us <= IDLE_US for writer in self.writers.values())

    def admit(self, name: int) -> None:
        """Make room for a newcomer: it takes the place of whoever was idle longest."""
        if name not in self.writers and len(self.writers) == self.producers_max:
            oldest = min(self.writers, key=lambda other: self.writers[other].active_us)
            self.writers = {name if other == oldest else other: w for other, w in self.writers.items()}

    def publish(
        self,
        rows: list[Row],
        now_us: int,
        producer: tuple[int, int, int] = (0, 0, 0),
        expected: int = 0,
        expected_keys: list[int] | None = None,
    ) -> list[int] | str:
        time_us = max(now_us, self.time_us)
        name, epoch, sequence = producer
        if name:
            writer = self.writer(name, time_us)
            if writer is not None and epoch < writer.epoch:
                return "fenced"
            done = writer.results if writer is not None and epoch == writer.epoch else []
            if sequence > len(done):
                return "unavailable"
            if sequence < len(done):
                return done[sequence] if len(done) - sequence <= 16 else "invalid_request"
            if writer is None and self.crowded(name, time_us):
                return "overloaded"
        offsets = self.place(rows, time_us)
        fresh = [row for row, offset in zip(rows, offsets, strict=True) if offset >= self.end]
        new_ids = {row.dedup_id for row, offset in zip(rows, offsets, strict=True) if offset >= self.end} - {
            None
        }
        alive = sum(1 for _, at in self.taken.values() if time_us - at < self.window_us)
        if new_ids and alive + len(new_ids) > self.dedup_max:
            return "too_large" if len(new_ids) > self.dedup_max else "overloaded"
        firsts = [
            row for row, offset in enumerate(offsets) if offset >= self.end and offset not in offsets[:row]
        ]
        if not fresh:
            self.remember(producer, rows, offsets, time_us)
            return offsets
        if expected and len(firsts) < len(rows):
            return "invalid_request"
        if expected and expected != self.end + 1:
            return "sequence_conflict"
        problem = self.check_keys(
            [rows[row] for row in firsts], expected_keys and [expected_keys[row] for row in firsts]
        )
        if problem:
            return problem
        for row in firsts:
            key, dedup_id = rows[row].key, rows[row].dedup_id
            if key is not None:
                self.keys[key] = self.keys.get(key, 0) + 1
            if dedup_id is not None:
                self.taken[dedup_id] = offsets[row], time_us
        self.end += len(firsts)
        self.remember(producer, rows, offsets, time_us)
        self.time_us = time_us
        return offsets

    def place(self, rows: list[Row], time_us: int) -> list[int]:
        """Where each row would be: at its first offset, or at the next free one."""
        offsets, following, here = [], self.end, dict[str, int]()
        for row in rows:
            first, at = self.taken.get(row.dedup_id or "", (0, -self.window_us))
            if row.dedup_id is not None and time_us - at < self.window_us:
                offsets.append(first)
            elif row.dedup_id is not None and row.dedup_id in here:
                offsets.append(here[row.dedup_id])
            else:
                if row.dedup_id is not None:
                    here[row.dedup_id] = following
                offsets.append(following)
                following += 1
        return offsets

    def check_keys(self, rows: list[Row], expected: list[int] | None) -> str | None:
        for row, number in zip(rows, expected or (), strict=False):
            if row.key is None and number != -1:
                return "invalid_request"
        if len(set(self.keys) | {row.key for row in rows} - {None}) > self.key_index_max:
            return "overloaded"
        counts = dict(self.keys)
        for row, number in zip(rows, expected or (), strict=False):
            if row.key is not None:
                if number not in (-1, counts.get(row.key, 0)):
                    return "sequence_conflict"
                counts[row.key] = counts.get(row.key, 0) + 1
        return None

    def remember(
        self, producer: tuple[int, int, int], rows: list[Row], offsets: list[int], time_us: int
    ) -> None:
        name, epoch, sequence = producer
        if not name:
            return
        self.time_us = time_us
        self.admit(name)
        if sequence == 0:
            self.writers[name] = Writer(epoch, time_us)
        self.writers[name].active_us = time_us
        self.writers[name].results.append(offsets)
        self.writers[name].batches.append(rows)

    def claim(self, name: int, now_us: int) -> int | str:
        time_us = max(now_us, self.time_us)
        if self.crowded(name, time_us):
            return "overloaded"
        epoch = self.writers[name].epoch + 1 if name in self.writers else 1
        self.admit(name)
        self.writers[name] = Writer(epoch, time_us)
        self.time_us = time_us
        return epoch
