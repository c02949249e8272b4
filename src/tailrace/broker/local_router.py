"""The router of one node: every partition is here, found by its name in the dictionary of topics."""

from __future__ import annotations

from typing import Any

from tailrace.broker.runtime.turn import NOTHING
from tailrace.broker.topics import Topics
from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.commands import AlterTopic, CreateTopic
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.errors import NotFound
from tailrace.format.frame import Buffer
from tailrace.ports import Respond


class LocalRouter:
    """See `broker.runtime.process_driver.Router`."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    @property
    def catalog(self) -> Catalog:
        """The topics that there are."""
        return self._topics.catalog

    def submit(
        self,
        target: TopicPartition,
        topic_id: int,
        command: Any,
        body: Buffer,
        respond: Respond,
        *,
        sure: bool,
    ) -> None:
        """Submit a command to a partition of this node."""
        host = self._topics.host(target.topic)
        known = host is not None and topic_id in (0, host.info.id)
        if host is None or not known or not 0 <= target.partition < len(host.runtimes):
            respond(Refusal(NotFound.code, f"there is no partition {target}"), NOTHING)
            return
        runtime = host.runtimes[target.partition]
        runtime.submit(command, body, runtime.surely(respond) if sure else respond)

    def change(self, request: CreateTopic | AlterTopic, respond: Respond) -> None:
        """Change a topic, internal ones included."""
        self._topics.change(request, respond, by=None)
