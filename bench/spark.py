"""The suite of the data pipeline on Spark: its bars, and the cases that are held against them."""

from __future__ import annotations

from bench.cases import (
    spark_archive,
    spark_read,
    spark_segments,
    spark_small_batch,
    spark_stream,
    spark_write,
)
from bench.harness import Suite
from bench.results import Bar

BARS = (
    Bar(name="spark_read_rows_s", sense=">=", value=600_000),
    Bar(name="spark_read_vs_control", sense=">=", value=0.5),
    Bar(name="spark_read_vs_parquet", sense=">=", value=0.5),
    Bar(name="spark_segments_rows_s", sense=">=", value=1_000_000),
    Bar(name="spark_segments_vs_broker", sense=">=", value=1),
    Bar(name="spark_stream_vs_control", sense=">=", value=0.65),
    Bar(name="spark_write_rows_s", sense=">=", value=200_000),
    Bar(name="spark_write_vs_control", sense=">=", value=0.4),
    Bar(name="spark_archive_vs_parquet", sense=">=", value=0.6),
    Bar(name="spark_small_batch_ms", sense="<=", value=300),
    Bar(name="spark_small_batch_vs_control", sense="<=", value=1.4),
)

SUITE = Suite(
    "spark",
    BARS,
    (
        spark_read.CASE,
        spark_segments.CASE,
        spark_stream.CASE,
        spark_write.CASE,
        spark_archive.CASE,
        spark_small_batch.CASE,
    ),
)
