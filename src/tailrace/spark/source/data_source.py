"""The data source `tailrace`: which reader or writer does the work, by view and mode.

Spark imports this in several processes, some of which only look its name up: everything else is imported when
it is needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from tailrace.spark.options import ReadOptions

_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"
"""The process in which Spark pushes filters down runs this module; where that is not allowed, none is."""


class DefaultSource(DataSource):
    """Found by its name and by that of the package `pyspark_tailrace`."""

    @classmethod
    def name(cls) -> str:
        """`spark.read.format("tailrace")`."""
        return "tailrace"

    def schema(self) -> str:
        """The columns of the view, or those that are chosen."""
        from tailrace.spark.options import OPTIONS, STREAM, read_options

        streams = {option.name for option in OPTIONS if option.uses == (STREAM,)}
        options = read_options(self.options, streaming=any(name in streams for name in self.options))
        if options.view == "lifecycle":
            from tailrace.spark.source import lifecycle

            return lifecycle.DDL
        if options.view == "groups":
            from tailrace.spark.source import group_rows

            return group_rows.DDL
        from tailrace.spark.source.row_batches import ddl

        return ddl(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For batch reads."""
        from tailrace.spark.options import read_options

        options = read_options(self.options)
        if options.view == "lifecycle":
            from tailrace.spark.source.lifecycle import LifecycleReader

            return LifecycleReader(options, schema)
        if options.view == "groups":
            from tailrace.spark.source.group_rows import GroupsReader

            return GroupsReader(options, schema)
        return _message_reader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For streaming reads."""
        from tailrace.spark.options import read_options
        from tailrace.spark.source.stream_reader import StreamReader

        return StreamReader(read_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For batch writes."""
        from tailrace.spark.options import write_options
        from tailrace.spark.sink.writers import BatchWriter

        return BatchWriter(write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """For streaming writes."""
        from tailrace.spark.options import write_options
        from tailrace.spark.sink.writers import StreamWriter

        return StreamWriter(write_options(self.options, streaming=True), schema, overwrite)


def _message_reader(options: ReadOptions, schema: StructType) -> DataSourceReader:
    if options.mode == "segments":
        from tailrace.spark.source.segment_rows import SegmentReader

        return SegmentReader(options, schema)
    if options.mode == "archive":
        from tailrace.spark.source.archive_reader import ArchiveReader

        return ArchiveReader(options, schema)
    from tailrace.spark.source.batch_reader import BatchReader, FilteringReader

    # Only when asked for: Spark 4.3 keeps the plan of the last query that pushed filters, and runs it again
    # for the next query on the same DataFrame, which then lacks rows.
    pushes = options.filters and _filters_are_pushed()
    return (FilteringReader if pushes else BatchReader)(options, schema)


def _filters_are_pushed() -> bool:
    """Whether this process was started to push filters down: only then is `pushFilters` welcome. No session
    can be asked here, and a reader that has the method fails where the session does not allow it."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHING in sys.modules or getattr(main, "name", "") == _PUSHING
