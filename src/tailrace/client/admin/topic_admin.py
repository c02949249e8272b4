"""Administration of topics."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tailrace.client.messages import Topic, point
from tailrace.client.rpc.calls import ask
from tailrace.core.model.commands import (
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    FindOffsets,
    ListTopics,
    Offsets,
    TopicInfo,
    TopicList,
    TrimTopic,
)
from tailrace.core.model.damage_commands import AcceptLoss, LossReport, Scrub, ScrubState
from tailrace.ports import BrokerVerbs


class Admin:
    """Create, look at and change topics. Every call takes a `timeout` in seconds; None means the client's."""

    def __init__(self, verbs: BrokerVerbs, timeout: float) -> None:
        self._verbs = verbs
        self._timeout = timeout

    def _time(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    async def create_topic(
        self, /, name: str, *, if_missing: bool = False, timeout: float | None = None, **options: Any
    ) -> Topic:
        """Create a topic; returns when it is durable. With `if_missing`, a topic that exists is returned as
        it is.
        """
        request = CreateTopic(name, options, if_missing)
        reply = await ask(self._verbs, request, self._time(timeout), repeatable=if_missing)
        assert isinstance(reply, TopicInfo)
        return Topic.of(reply)

    async def alter_topic(self, /, name: str, *, timeout: float | None = None, **options: Any) -> Topic:
        """Change options; the others stay as they are. Partitions can only grow."""
        reply = await ask(self._verbs, AlterTopic(name, options), self._time(timeout))
        assert isinstance(reply, TopicInfo)
        return Topic.of(reply)

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic and everything in it."""
        await ask(self._verbs, DeleteTopic(name), self._time(timeout), repeatable=False)

    async def list_topics(
        self, prefix: str = "", *, internal: bool = False, timeout: float | None = None
    ) -> list[Topic]:
        """Topics by name; internal ones (leading underscore) on request."""
        reply = await ask(self._verbs, ListTopics(prefix, internal), self._time(timeout))
        assert isinstance(reply, TopicList)
        return [Topic.of(info) for info in reply.topics]

    async def describe_topic(self, name: str, *, timeout: float | None = None) -> Topic:
        """A topic with the state of each partition."""
        reply = await ask(self._verbs, DescribeTopic(name), self._time(timeout))
        assert isinstance(reply, TopicInfo)
        return Topic.of(reply)

    async def trim_topic(
        self, name: str, partition: int, offset: int, *, timeout: float | None = None
    ) -> None:
        """Drop everything below an offset of a partition."""
        await ask(self._verbs, TrimTopic(name, partition, offset), self._time(timeout))

    async def accept_loss(
        self, name: str, partition: int, *, dry_run: bool = True, timeout: float | None = None
    ) -> LossReport:
        """What of a damaged partition is lost; without `dry_run` it is given up, and the partition opened
        again: its groups count those messages as collected, and readers are told of them."""
        request = AcceptLoss(name, partition, dry_run)
        reply = await ask(self._verbs, request, self._time(timeout), repeatable=dry_run)
        assert isinstance(reply, LossReport)
        return reply

    async def scrub(
        self,
        name: str | None = None,
        partition: int | None = None,
        *,
        begin: bool = True,
        timeout: float | None = None,
    ) -> ScrubState:
        """Let everything that is closed be read from the disk and checked, of all topics, of one, or of one
        partition; without `begin`, only ask how far that is."""
        reply = await ask(self._verbs, Scrub(name, partition, begin), self._time(timeout))
        assert isinstance(reply, ScrubState)
        return reply

    async def find_offsets(
        self, name: str, at: str | int | datetime, *, timeout: float | None = None
    ) -> list[int]:
        """The offset of a point in every partition: "earliest", "latest" or a time (datetime, or
        microseconds).
        """
        reply = await ask(self._verbs, FindOffsets(name, point(at)), self._time(timeout))
        assert isinstance(reply, Offsets)
        return reply.offsets
