"""The data source `tailrace`, as Spark finds it.

Spark imports this in several processes, some of which only look its name up: everything else is imported when
it is needed.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Found by its name and by that of the package `pyspark_tailrace`."""

    @classmethod
    def name(cls) -> str:
        """`spark.read.format("tailrace")`."""
        return "tailrace"

    def schema(self) -> str:
        """The columns of the view, or those that are chosen."""
        from tailrace.spark.source.views import columns_of

        return columns_of(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For batch reads."""
        from tailrace.spark.source.views import reader_of

        return reader_of(self.options, schema)

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
