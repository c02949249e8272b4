"""The internal topic of groups: its name and size, and the partition that coordinates a name."""

from __future__ import annotations

from tailrace.core.model.identifiers import partition_of

TOPIC = "_groups"
PARTITIONS = 16


def home_of(name: str) -> int:
    """The partition of the internal topic that coordinates a group, a schedule or a writer."""
    return partition_of(name.encode(), PARTITIONS)
