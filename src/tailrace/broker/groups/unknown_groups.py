"""Unknown groups: those that a partition knows and no coordinator does.

Such a group is reported and kept, until it is joined, enlisted again or deleted: a coordinator that does not
know a group may have an older log than the partition.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.turn import NOTHING
from tailrace.broker.topics import Topics
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import Delist
from tailrace.ports import Respond

log = logging.getLogger("tailrace.groups")


class UnknownGroups:
    """Finds unknown groups, reports and deletes them."""

    def __init__(self, topics: Topics, coordinators: GroupDirectory) -> None:
        self._topics = topics
        self._coordinators = coordinators

    def find(self) -> dict[str, list[QueuePartition]]:
        """Groups that no coordinator knows, each with the partitions that do. Groups whose coordinator is
        faulty or is being opened again are left out, because nobody can tell what it knows."""
        found: dict[str, list[QueuePartition]] = {}
        for runtime in self._topics.queues():
            if runtime.lost is not None:
                continue
            place = (runtime.topic, runtime.partition)
            for name, number in runtime.group_ids().items():
                home = self._coordinators.home(name)
                if home is not None:
                    known = home.group(name) is not None or home.deletes(name, number, place)
                    if known or home.fault is not None or not home.well:
                        continue
                found.setdefault(name, []).append(runtime)
        return found

    def report(self) -> None:
        """Log the groups that no coordinator knows."""
        for name, runtimes in self.find().items():
            text = "group %r is on %d partitions, such as %s/%d, and no coordinator knows it: it is kept"
            log.error(text, name, len(runtimes), runtimes[0].topic, runtimes[0].partition)

    def expel(self, group: str, runtimes: Sequence[QueuePartition], respond: Respond) -> None:
        """Delete an unknown group: let its partitions forget it, and answer when all have."""
        replies: list[Reply] = []
        answered = partial(_answered, replies, len(runtimes), respond)
        for runtime in runtimes:
            runtime.submit(Delist(group), b"", runtime.surely(answered))


def _answered(replies: list[Reply], count: int, respond: Respond, reply: Reply, parts: Any) -> None:
    replies.append(reply)
    if len(replies) == count:
        respond(next((each for each in replies if isinstance(each, Refusal)), Done()), NOTHING)
