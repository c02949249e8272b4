"""The kinds of state machine that a partition can host: how each is made, restored and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tailrace.core import partition
from tailrace.core.groups import coordinator
from tailrace.core.model.facts import Fact
from tailrace.core.model.group_facts import CoordinationFact
from tailrace.core.model.topic_options import TopicOptions
from tailrace.format import codec
from tailrace.format.frame import Buffer


class MachineKind(msgspec.Struct, frozen=True, eq=False):
    """One kind of state machine. `delivers`: it is a data partition, with messages, queues and timers."""

    make: Callable[[TopicOptions], Any]
    restore: Callable[[TopicOptions, Sequence[Buffer]], Any]
    decode_facts: Callable[[Buffer], list[Any]]
    """Decode the body of a facts frame."""
    delivers: bool = False


DATA_PARTITION = MachineKind(
    partition.Partition, partition.Partition.restore, codec.facts_decoder(Fact), delivers=True
)
"""Holds messages."""

COORDINATOR = MachineKind(
    coordinator.Coordinator, coordinator.Coordinator.restore, codec.facts_decoder(CoordinationFact)
)
"""Coordinates groups, cron schedules and staged writes, on the internal topic `_groups`."""
