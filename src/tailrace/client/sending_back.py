"""Dead letters on their way back: opened again where they came from, or copied there when that is gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tailrace.client.calls import ask
from tailrace.client.deliveries import REDRIVE_HEADER
from tailrace.client.leases import offsets_of, spans_of
from tailrace.client.producer import Producer
from tailrace.core import provenance
from tailrace.core.commands import DescribeTopic, TopicInfo
from tailrace.core.delivery_commands import Reopen
from tailrace.errors import InvalidRequest, NotFound
from tailrace.ports import BrokerVerbs

if TYPE_CHECKING:
    from tailrace.client.dead_letters import DeadLetter

_ADDED = provenance.NAMES | {REDRIVE_HEADER}
"""What a dead letter has beyond the headers of its message."""


class SendingBack:
    """Sends letters of one dead-letter topic back, each to the group that gave it up."""

    def __init__(self, verbs: BrokerVerbs, name: str, timeout: float) -> None:
        self._verbs = verbs
        self._name = name
        self._timeout = timeout
        self._topics: dict[str, TopicInfo] = {}
        """The origins, as they were when the first letter went there."""

    async def send(self, letters: Sequence[DeadLetter]) -> tuple[int, int]:
        """Reopen at the origin what is still there, publish the rest again; how many of each."""
        places: dict[tuple[str, int, str, int], list[DeadLetter]] = {}
        for letter in letters:
            if not letter.topic or letter.partition < 0 or letter.offset < 0 or not letter.group:
                place = f"{self._name}/{letter.message.partition}@{letter.message.offset}"
                raise InvalidRequest(f"{place} does not say where it came from: purge it, or filter it out")
            place_of = (letter.topic, letter.partition, letter.group, letter.topic_id)
            places.setdefault(place_of, []).append(letter)
        lost: list[DeadLetter] = []
        for (topic, partition, group, topic_id), here in places.items():
            if topic_id and topic_id != (await self._topic(topic)).id:
                lost += here  # Created again: what lies at these offsets now is something else.
                continue
            offsets = {letter.offset for letter in here}
            gone = await self._reopen(topic, partition, group, offsets)
            lost += [letter for letter in here if letter.offset in gone]
        for letter in lost:
            await self._publish(letter)
        return len(letters) - len(lost), len(lost)

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
        message = letter.message
        headers = [pair for pair in message.headers if pair[0] not in _ADDED]
        producer = Producer(
            self._verbs,
            letter.topic,
            self._timeout,
            name=None,
            linger_ms=0,
            buffer_bytes_max=1 << 26,
            compression=None,
        )
        fields: dict[str, Any] = {"priority": message.priority}
        if message.key is not None:
            fields["key"] = message.key
        async with producer:
            await producer.publish(
                message.value,
                headers=[*headers, (REDRIVE_HEADER, letter.group.encode())],
                partition=letter.partition,
                dedup_id=f"redrive/{self._name}/{message.partition}/{message.offset}".encode(),
                **fields,
            )
