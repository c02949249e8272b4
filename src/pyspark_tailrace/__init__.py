"""Found by Spark because of its name: the format `tailrace` needs no registration."""

from tailrace.spark.source import DefaultSource

__all__ = ["DefaultSource"]
