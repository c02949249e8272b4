"""A topic and its partitions, all of one kind: data topics hold queues, the internal topic coordinators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from tailrace.broker.partition.coordinator_partition import CoordinatorPartition
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.core.catalog.catalog import TopicEntry
from tailrace.errors import NotFound

Kind = TypeVar("Kind", bound=PartitionRuntime[Any])


class TopicHost(msgspec.Struct, Generic[Kind]):
    """A topic and its partitions."""

    info: TopicEntry
    runtimes: list[Kind]

    def partition(self, number: int) -> Kind:
        """One of its partitions; raises `NotFound`."""
        if not 0 <= number < len(self.runtimes):
            name, last = self.info.name, len(self.runtimes) - 1
            raise NotFound(f"topic {name!r} has partitions 0 to {last}, not {number}")
        return self.runtimes[number]

    def numbered(self) -> Iterator[tuple[int, PartitionRuntime[Any]]]:
        """All partitions with their numbers."""
        yield from enumerate(self.runtimes)


AnyHost = TopicHost[QueuePartition] | TopicHost[CoordinatorPartition]


def grown(host: TopicHost[Kind] | None, entry: TopicEntry, new: list[Kind]) -> TopicHost[Kind]:
    """A topic with options that may have changed, and with new partitions."""
    if host is None:
        return TopicHost(entry, new)
    host.info = entry
    host.runtimes += new
    for runtime in host.runtimes:
        runtime.reconfigure(entry.options)
    return host
