"""The messages of one key of a topic with `key_index`, a page at a time; other keys are not read."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.client.messages import Message, Rows
from tailrace.client.rpc.calls import ask_parts
from tailrace.core.model.commands import KeyRead, ReadKey
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.ports import BrokerVerbs


class KeyPage(NamedTuple):
    """Messages by ascending offset. The versions of them follow on from `version`."""

    messages: list[Message]
    version: int
    total: int
    """The version of the newest message that the key has: how many it has had."""
    more: bool
    """Whether there are others among those that were asked for."""


class KeyPages:
    """Reads of one topic; made by `Client.key_pages`."""

    def __init__(self, verbs: BrokerVerbs, topic: str, timeout_s: float) -> None:
        self._verbs = verbs
        self._topic = topic
        self._timeout_s = timeout_s

    async def read(
        self,
        partition: int,
        key: bytes,
        *,
        since: int = 0,
        until: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> KeyPage:
        """The messages of the versions above `since` and up to `until` (0: the newest): the first `limit` of
        them, or the last ones."""
        request = ReadKey(self._topic, partition, key, since, until, limit, newest_first)
        reply, parts = await ask_parts(self._verbs, request, self._timeout_s)
        assert isinstance(reply, KeyRead)
        messages: list[Message] = []
        for header, body in frame.walk(b"".join(parts)):
            rows = Rows(self._topic, partition, header, arrow.decode(body, header.columns))
            messages += rows.messages(0)
        return KeyPage(messages, reply.version, reply.total, reply.more)
