"""The processes of coordinators: grants and deletions of groups are carried to the data partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from tailrace.broker.runtime.process_driver import ProcessKind
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model.identifiers import TopicPartition
from tailrace.core.process.deletion_process import DeletionProcess
from tailrace.core.process.grant_process import GrantProcess

log = logging.getLogger("tailrace.groups")

Hear = Callable[[str], None]
"""Called with the name of a group."""


def grants(home: TopicPartition, confirmed: Hear) -> ProcessKind:
    """Carries grants; `confirmed` hears of groups of which a partition has confirmed something."""
    return ProcessKind(partial(_grants, home), GrantProcess.WATCHES, log, tell=confirmed)


def deletions(home: TopicPartition, left: Hear) -> ProcessKind:
    """Carries deletions; `left` hears of groups that every working partition has forgotten."""
    return ProcessKind(partial(_deletions, home), DeletionProcess.WATCHES, log, tell=left)


def _grants(home: TopicPartition, state: Coordinator) -> GrantProcess:
    return GrantProcess(home, state.groups.by_name, state.deletions)


def _deletions(home: TopicPartition, state: Coordinator) -> DeletionProcess:
    return DeletionProcess(home, state.deletions)
