"""What Spark itself can do: a source that re-yields batches from memory, and a sink that only counts.

Both have the shape of the real ones, the same schema and the same number of partitions, and do nothing else.
Workers import this module, so the folder above it is on their path.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from bench.roles.rows import table
from tailrace.format.builder import make_ids
from tailrace.format.tabular import POSITIONED
from tailrace.spark.source.row_batches import ddl

NAME = "bench_control"
BATCH_ROWS = 8_000
POOL = 16
"""Different batches that are yielded in turn: with fewer of them Parquet would make dictionaries."""


@dataclass
class Part(InputPartition):
    """How many rows one task yields."""

    rows: int


@functools.cache
def pool(value_bytes: int, keys: int) -> list[pa.RecordBatch]:
    """The batches, made once in a worker."""
    draw = np.random.default_rng(20260101)
    return [_batch(value_bytes, keys, draw) for _ in range(POOL)]


def _batch(value_bytes: int, keys: int, draw: np.random.Generator) -> pa.RecordBatch:
    rows = table(BATCH_ROWS, value_bytes, keys, draw)
    offsets = np.arange(BATCH_ROWS)
    now = pa.array(np.full(BATCH_ROWS, time.time_ns() // 1000), pa.int64()).cast(
        POSITIONED.field("timestamp").type
    )
    ends = np.arange(BATCH_ROWS + 1, dtype=np.int32) * np.int32(16)
    ids = make_ids(
        BATCH_ROWS, time.time_ns() // 1_000_000, int(draw.integers(1 << 62)), int(draw.integers(1 << 12))
    )
    given: dict[str, Any] = {
        "topic": pa.repeat(pa.scalar("bench"), BATCH_ROWS),
        "partition": pa.array(np.zeros(BATCH_ROWS, np.int32)),
        "offset": pa.array(offsets),
        "sequence": pa.array(offsets + 1),
        "id": pa.Array.from_buffers(pa.binary(), BATCH_ROWS, [None, pa.py_buffer(ends), pa.py_buffer(ids)]),
        "key": rows.column("key"),
        "value": rows.column("value"),
        "timestamp": now,
        "append_time": now,
    }
    columns = [given.get(field.name) for field in POSITIONED]
    filled = [
        pa.nulls(BATCH_ROWS, field.type) if column is None else column
        for field, column in zip(POSITIONED, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(filled, schema=POSITIONED)


def _yielded(part: Part, value_bytes: int, keys: int) -> Iterator[pa.RecordBatch]:
    batches, offset_at = pool(value_bytes, keys), POSITIONED.get_field_index("offset")
    for number, first in enumerate(range(0, part.rows, BATCH_ROWS)):
        rows = min(BATCH_ROWS, part.rows - first)
        batch = batches[number % POOL].slice(0, rows)
        # Positions grow as those of a topic do, because Parquet would make a dictionary of few numbers.
        offsets = np.arange(first, first + rows)
        for column, numbers in ((offset_at, offsets), (offset_at + 1, offsets + 1)):
            batch = batch.set_column(column, POSITIONED.field(column), pa.array(numbers))
        yield batch


def _parts(rows: int, partitions: int) -> list[Part]:
    each, more = divmod(rows, partitions)
    return [Part(each + (number < more)) for number in range(partitions)]


class _Shape:
    """The options that source, stream and sink have in common."""

    def __init__(self, options: Any) -> None:
        self.rows = int(options.get("rows", 0))
        self.partitions_count = int(options.get("partitions", 1))
        self.value_bytes = int(options.get("value_bytes", 0))
        self.keys = int(options.get("keys", 1))
        self.rows_max = int(options.get("max_rows_per_trigger", 0))


class ControlReader(DataSourceReader):
    """A batch read."""

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape

    def partitions(self) -> list[InputPartition]:
        """As many as the topic has."""
        return list(_parts(self._shape.rows, self._shape.partitions_count))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """From memory."""
        assert isinstance(partition, Part)
        return _yielded(partition, self._shape.value_bytes, self._shape.keys)


class ControlStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of so many rows; its offsets are one number."""

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape

    def initialOffset(self) -> dict[str, int]:
        """The beginning."""
        return {"rows": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """The option."""
        return ReadMaxRows(self._shape.rows_max) if self._shape.rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """What there is never grows."""

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """As far as the limit allows."""
        more = limit.max_rows if isinstance(limit, ReadMaxRows) else self._shape.rows
        return {"rows": min(self._shape.rows, start["rows"] + more)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """As many as the topic has."""
        return list(_parts(end["rows"] - start["rows"], self._shape.partitions_count))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """From memory."""
        assert isinstance(partition, Part)
        return _yielded(partition, self._shape.value_bytes, self._shape.keys)


@dataclass
class Counted(WriterCommitMessage):
    """How many rows a task was given."""

    rows: int


class CountingWriter(DataSourceArrowWriter):
    """Takes rows and keeps none; says when they are not as many as there should be."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Counted:
        """In a task."""
        return Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver."""
        found = sum(message.rows for message in messages if isinstance(message, Counted))
        assert found == self._rows, f"{found} rows came of {self._rows}"


class ControlSource(DataSource):
    """Registered as `bench_control`."""

    @classmethod
    def name(cls) -> str:
        """The format."""
        return NAME

    def schema(self) -> str:
        """That of the real source."""
        return ddl([])

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        return ControlReader(_Shape(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A stream."""
        return ControlStreamReader(_Shape(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """A write."""
        return CountingWriter(int(self.options["rows"]))
