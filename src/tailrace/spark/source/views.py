"""Which reader does the work, by the view and the mode that the options of the data source ask for."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from tailrace.spark.options import OPTIONS, STREAM, ReadOptions, read_options

_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"
"""The process in which Spark pushes filters down runs this module; where that is not allowed, none is."""


def columns_of(given: Mapping[str, str]) -> str:
    """The columns of the view, or those that are chosen, as DDL."""
    streams = {option.name for option in OPTIONS if option.uses == (STREAM,)}
    options = read_options(given, streaming=any(name in streams for name in given))
    if options.view == "lifecycle":
        from tailrace.spark.source import lifecycle

        return lifecycle.DDL
    if options.view == "groups":
        from tailrace.spark.source import group_rows

        return group_rows.DDL
    from tailrace.spark.source.row_batches import ddl

    return ddl(options.columns)


def reader_of(given: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """The reader of a batch read."""
    options = read_options(given)
    if options.view == "lifecycle":
        from tailrace.spark.source.lifecycle import LifecycleReader

        return LifecycleReader(options, schema)
    if options.view == "groups":
        from tailrace.spark.source.group_rows import GroupsReader

        return GroupsReader(options, schema)
    return _message_reader(options, schema)


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
