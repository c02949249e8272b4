"""Dead letters on their way back: opened again where they came from, or copied there when that is gone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from tailrace.client.admin.dead_letter_reader import DeadLetter
from tailrace.client.queue.delivery import REDRIVE_HEADER
from tailrace.client.queue.held_leases import offsets_of, spans_of
from tailrace.client.rpc.calls import ask
from tailrace.core.model import dead_letter_headers
from tailrace.core.model.commands import DescribeTopic, Offsets, TopicInfo
from tailrace.core.model.identifiers import partition_of
from tailrace.core.model.queue_commands import Committed, Reopen, Republish
from tailrace.core.model.topic_options import DEAD_LETTERS
from tailrace.errors import NotFound, TailraceError
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tailrace.ports import BrokerVerbs

_ADDED = dead_letter_headers.NAMES | {REDRIVE_HEADER}
"""What a dead letter has beyond the headers of its message."""


class SentBack(msgspec.Struct):
    """What became of letters of one partition."""

    reopened: list[DeadLetter] = []
    republished: list[DeadLetter] = []
    failed: dict[int, str] = {}
    """Those that stay behind, by their offset, and why."""

    @contextmanager
    def unless_refused(self, *letters: DeadLetter) -> Iterator[None]:
        """Letters that the broker refuses for good do not hold up the others."""
        try:
            yield
        except TailraceError as error:
            if error.retriable:
                raise
            self.failed.update({letter.message.offset: str(error) for letter in letters})


class Redrive:
    """Sends letters of one dead-letter topic back, each to the group that gave it up."""

    def __init__(self, verbs: BrokerVerbs, name: str, timeout: float) -> None:
        self._verbs = verbs
        self._name = name
        self._timeout = timeout
        self._topics: dict[str, TopicInfo] = {}
        """The origins as they are while some letters are sent."""

    async def send(self, letters: Sequence[DeadLetter]) -> SentBack:
        """Reopen at the origin what is still there, publish the rest again. What is refused stays behind; an
        error that may pass is raised."""
        sent = SentBack()
        self._topics.clear()
        places: dict[tuple[str, int, str, int], list[DeadLetter]] = {}
        for letter in letters:
            if not letter.topic or letter.partition < 0 or letter.offset < 0 or not letter.group:
                text = "it does not say where it came from: purge it, or filter it out"
                sent.failed[letter.message.offset] = text
                continue
            if letter.topic + DEAD_LETTERS != self._name:
                # Somebody has written it who may publish here: it must not reach what only we may publish to.
                text = (
                    f"it says that it came from topic {letter.topic[:80]!r}, whose dead letters are elsewhere"
                )
                sent.failed[letter.message.offset] = text
                continue
            place = (letter.topic, letter.partition, letter.group, letter.topic_id)
            places.setdefault(place, []).append(letter)
        for (topic, partition, group, topic_id), here in places.items():
            with sent.unless_refused(*here):
                if topic_id and topic_id != (await self._topic(topic)).id:
                    # Created again: what lies at these offsets now is something else.
                    await self._must_know(topic, group)
                    gone = {letter.offset for letter in here}
                else:
                    gone = await self._reopen(topic, partition, group, {letter.offset for letter in here})
                sent.reopened += [letter for letter in here if letter.offset not in gone]
                for letter in here:
                    if letter.offset in gone:
                        with sent.unless_refused(letter):
                            await self._publish(letter)
                            sent.republished.append(letter)
        return sent

    async def _must_know(self, topic: str, group: str) -> None:
        reply = await ask(self._verbs, Committed(topic, group), self._timeout)
        assert isinstance(reply, Offsets)
        if max(reply.offsets) < 0:
            raise NotFound(f"there is no group {group!r} on topic {topic!r}")

    async def _topic(self, name: str) -> TopicInfo:
        info = self._topics.get(name)
        if info is None:
            reply = await ask(self._verbs, DescribeTopic(name), self._timeout)
            assert isinstance(reply, TopicInfo)
            info = self._topics[name] = reply
        return info

    async def _reopen(self, topic: str, partition: int, group: str, offsets: set[int]) -> set[int]:
        """Make messages deliverable again where they are; returns those that are not there any more."""
        gone: set[int] = set()
        while left := sorted(offsets - gone):
            try:
                await ask(self._verbs, Reopen(topic, partition, group, spans_of(left)), self._timeout)
                break
            except NotFound as error:
                more = set(offsets_of(error.details.get("spans", ()))) & set(left)
                if not more:
                    raise  # No such topic or group: there is nobody to redrive to.
                gone |= more
        return gone

    async def _publish(self, letter: DeadLetter) -> None:
        """Append a copy that never expires, marked for its group."""
        message, info = letter.message, await self._topic(letter.topic)
        headers = [pair for pair in message.headers if pair[0] not in _ADDED]
        # Ids tell messages apart and keep nothing secret: they need not be hard to guess.
        bits = random.getrandbits(74)  # nosec B311
        now_us = self._verbs.clock.wall_ns() // 1000
        columns, body = arrow.encode(
            [message.value],
            ids=arrow.make_ids(1, now_us // 1000, bits & ((1 << 62) - 1), bits >> 62),
            timestamps=now_us,
            keys=[message.key],
            headers=[[*headers, (REDRIVE_HEADER, letter.group.encode())]],
            priorities=[message.priority],
            dedup_ids=[f"redrive/{self._name}/{message.partition}/{message.offset}/{message.id}".encode()],
        )
        partition, count = letter.partition, len(info.partitions)
        if partition >= count:  # It was created again, and is smaller now.
            partition = partition % count if message.key is None else partition_of(message.key, count)
        request = Republish(letter.topic, partition, columns, crc32c(body))
        await ask(self._verbs, request, self._timeout, body=body)
