"""A pyarrow table on its way to partitions: which rows go where, in pieces that make good batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.client.sdk_tuning import PIECE_BYTES, PIECE_ROWS
from tailrace.core.model.identifiers import partition_of
from tailrace.errors import InvalidRequest

Piece = tuple[int | None, Sequence[int], Any]
"""Partition (None: any), the places of the rows in the caller's table, the rows."""


def split_table(table: Any, partitions: int, partition: int | None) -> Iterator[Piece]:
    """Pieces in order; rows with a key (else a dedup id) go to the partition of it, the others to any one."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise InvalidRequest(
            f"send_table: a pyarrow Table or RecordBatch is needed, not {type(table).__name__}"
        )
    if "value" not in table.column_names:
        raise InvalidRequest(f"send_table: there is no column 'value' among {table.column_names}")
    if partition is not None or not {"key", "dedup_id"} & set(table.column_names):
        yield from _pieces(table, partition, np.arange(table.num_rows))
        return
    targets = _targets(table, partitions)
    for target in np.unique(targets):
        rows = np.flatnonzero(targets == target)
        yield from _pieces(table.take(rows), None if target < 0 else int(target), rows)


def _targets(table: Any, partitions: int) -> Any:
    """The partition of each row; -1 for rows with neither key nor dedup id."""
    targets = np.full(table.num_rows, -1)
    for name in ("dedup_id", "key"):
        if name in table.column_names:
            for row, item in enumerate(table.column(name).to_pylist()):
                if item is not None:
                    targets[row] = partition_of(item.encode() if isinstance(item, str) else item, partitions)
    return targets


def _pieces(table: Any, partition: int | None, places: Any) -> Iterator[Piece]:
    rows = table.num_rows
    step = PIECE_ROWS
    if rows:
        step = max(1, min(step, PIECE_BYTES * rows // max(table.nbytes, 1)))
    for at in range(0, rows, step):
        yield partition, places[at : at + step].tolist(), table.slice(at, step)
