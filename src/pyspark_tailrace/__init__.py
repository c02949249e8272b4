"""Found by Spark because of its name: the format `tailrace` needs no registration."""

from tailrace.spark.source.data_source import DefaultSource

__all__ = ["DefaultSource"]
