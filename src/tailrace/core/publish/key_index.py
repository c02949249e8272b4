"""The key index: how many messages each key of a partition has had, for `expected_key_sequence`.

The messages of a key are the history of an aggregate, as in event stores. The *key sequence* is the number of
messages that the key has so far. `expected_key_sequence` is what that number must be before the append:

    -1  any
     0  the key has no message yet: this one becomes the first
     N  the key has exactly N messages: this one becomes number N + 1

Rows of one batch are taken in order, so two rows of a new key that expect 0 and 1 both pass. Numbers never
fall: trimming the log does not change them. A key is known by its 128-bit hash and takes 24 bytes, and the
table has between 1.5 and 3 times the room that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.core.collections.hash_table import MISSING, Buffer, HashTable, Numbers, group_rows, present_rows
from tailrace.core.model.identifiers import ANY_KEY_SEQUENCE, HASH_OF_EMPTY, Hashes, Refusal
from tailrace.errors import InvalidRequest, Overloaded, SequenceConflict

_SEQUENCE_MAX = (1 << 62) - 1


class KeyIndex:
    """A map from key hash to number of messages; at most `entries_max` keys."""

    __slots__ = ("_table", "entries_max")

    def __init__(self, entries_max: int) -> None:
        self.entries_max = entries_max
        self._table = HashTable()

    def reconfigure(self, entries_max: int) -> None:
        """The topic has this option from now on."""
        self.entries_max = entries_max

    def __len__(self) -> int:
        return len(self._table)

    def count(self, low: int, high: int) -> int:
        """The number of messages that a key has had."""
        return max(self._table.get(low, high), 0)

    def alone(self, low: int, high: int) -> bool:
        """Whether no other key shares the low half of the hash, by which messages are found. Zero is stored
        as the hash of the empty key, so these two share one."""
        return bool(low) and low != HASH_OF_EMPTY[0] and not self._table.shares_low(low, high)

    def check(self, keys: Hashes, expected: list[int] | None, rows: Numbers | None = None) -> Refusal | None:
        """None if a batch with these keys may be appended. `rows` are the client's numbers of the rows."""
        if expected is not None:
            problem = _malformed(keys, expected, rows)
            if problem is not None:
                return problem
        present = present_rows(keys)
        if not len(present):
            return None
        groups = group_rows(keys[present])
        now = self._table.get_many(keys[present[groups.first]])
        new = int(np.count_nonzero(now == MISSING))
        if len(self._table) + new > self.entries_max:
            text = f"the key index is full: {len(self)} keys and {new} new ones"
            limit = self.entries_max
            return Refusal(Overloaded.code, f"{text}, key_index_max is {limit}", details={"limit": limit})
        if expected is None:
            return None
        wanted = np.array(expected, np.int64)[present]
        current = np.maximum(now, 0)[groups.group] + groups.rank
        wrong = np.flatnonzero((wanted != ANY_KEY_SEQUENCE) & (wanted != current))
        if not len(wrong):
            return None
        at, sequence = int(wanted[wrong[0]]), int(current[wrong[0]])
        row = int(present[wrong[0]] if rows is None else rows[present[wrong[0]]])
        return Refusal(
            SequenceConflict.code,
            f"row {row} expects its key at sequence {at}, it is at {sequence}",
            details={"row": row, "expected_key_sequence": at, "current_key_sequence": sequence},
        )

    def add(self, keys: Hashes) -> None:
        """Count the rows of an appended batch."""
        present = present_rows(keys)
        if not len(present):
            return
        groups = group_rows(keys[present])
        unique = keys[present[groups.first]]
        now = np.maximum(self._table.get_many(unique), 0)
        self._table.put_many(unique, now + np.bincount(groups.group))

    def buffers(self) -> list[bytes]:
        """Copies for a snapshot."""
        return self._table.buffers()

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        self._table = HashTable.from_buffers(buffers)

    def verify(self) -> None:
        """Assert the invariants."""
        self._table.check()


def _malformed(keys: Hashes, expected: list[int], rows: Numbers | None) -> Refusal | None:
    if len(expected) != len(keys):
        text = f"expected_key_sequences has {len(expected)} numbers for {len(keys)} messages"
        return Refusal(InvalidRequest.code, text)
    if min(expected) < ANY_KEY_SEQUENCE or max(expected) > _SEQUENCE_MAX:
        return Refusal(InvalidRequest.code, f"expected_key_sequences are {ANY_KEY_SEQUENCE} or more")
    keyless = np.flatnonzero((keys[:, 0] | keys[:, 1]) == 0)
    for row in keyless.tolist():
        if expected[row] != ANY_KEY_SEQUENCE:
            row = row if rows is None else int(rows[row])
            return Refusal(
                InvalidRequest.code,
                f"row {row} has an expected key sequence and no key",
                details={"row": row},
            )
    return None
