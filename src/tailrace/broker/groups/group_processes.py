"""The processes of coordinators: sessions of members; grants and deletions are carried to data partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace.broker.runtime.process_driver import ProcessKind
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model.identifiers import TopicPartition
from tailrace.core.process.deletion_process import DeletionProcess
from tailrace.core.process.grant_process import GrantProcess
from tailrace.core.process.session_process import SessionProcess

log = logging.getLogger("tailrace.groups")

Hear = Callable[[str], None]
"""Called with the name of a group."""


def grants(home: TopicPartition, confirmed: Hear) -> ProcessKind:
    """Carries grants; `confirmed` hears of groups of which a partition has confirmed something."""
    return ProcessKind(partial(_grants, home), GrantProcess.WATCHES, log, tell=confirmed)


def deletions(home: TopicPartition, left: Hear) -> ProcessKind:
    """Carries deletions; `left` hears of groups that every working partition has forgotten."""
    return ProcessKind(partial(_deletions, home), DeletionProcess.WATCHES, log, tell=left)


def sessions(home: TopicPartition, told: Callable[[Any], None]) -> ProcessKind:
    """Decides when sessions of members end; `told` hears of what has ended."""
    return ProcessKind(partial(_sessions, home), SessionProcess.WATCHES, log, tell=told)


def _grants(home: TopicPartition, state: Coordinator) -> GrantProcess:
    return GrantProcess(home, state.groups.by_name, state.deletions)


def _deletions(home: TopicPartition, state: Coordinator) -> DeletionProcess:
    return DeletionProcess(home, state.deletions)


def _sessions(home: TopicPartition, state: Coordinator) -> SessionProcess:
    return SessionProcess(home, state.groups.by_name)
