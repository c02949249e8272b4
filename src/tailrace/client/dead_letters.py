"""Dead letters of a topic: looking at them, sending them back to where they came from, dropping them.

Which ones are still there is kept by the group `_redrive` on the dead-letter topic: what was redriven or
purged is settled for it. To look means to lease, and to give back afterwards.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from tailrace.client.calls import ask, error_of
from tailrace.client.leases import offsets_of, spans_of
from tailrace.client.results import Message, Rows, moment
from tailrace.client.sending_back import SendingBack
from tailrace.core import provenance
from tailrace.core.commands import DescribeTopic, Fetch, Fetched, Reply, TopicInfo
from tailrace.core.delivery_commands import Ack, Grant, Lease, Leases, Nack
from tailrace.core.group_commands import CreateGroup
from tailrace.core.model import Refusal
from tailrace.errors import Fenced, InvalidRequest, NotFound, Timeout
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.ports import BrokerVerbs

GROUP = "_redrive"
SUFFIX = ".dlq"
CHUNK = 500
LEASE_MS = 300_000
_OPTIONS = {
    "assignment": "shared",
    "ordering": "none",
    "max_attempts": 1_000_000,
    "in_flight_max": 1_000_000,
    "group_in_flight_max": 1_000_000,
}

Filter = Callable[["DeadLetter"], bool]


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that a group could not handle, where it came from, and why it is here."""

    message: Message
    topic: str
    partition: int
    offset: int
    time: datetime | None
    group: str
    attempts: int
    deliveries: int
    first_delivery: datetime | None
    last_delivery: datetime | None
    last_member: str
    reason: str
    error: str
    topic_id: int = 0
    """Tells the origin from another topic of that name, created later; 0 where it is not known."""

    @classmethod
    def of(cls, message: Message) -> DeadLetter:
        """From the message on the dead-letter topic. `topic`, `partition` and `offset` are the origin's."""
        told = {name: value.decode("utf-8", "replace") for name, value in message.headers}

        def text(name: str) -> str:
            return told.get(provenance.PREFIX + name, "")

        def number(name: str, default: int = 0) -> int:
            given = text(name)
            return int(given) if given.lstrip("-").isdigit() else default

        def at(name: str) -> datetime | None:
            return moment(number(name)) if number(name) > 0 else None

        return cls(
            message,
            text("origin-topic"),
            number("origin-partition", -1),
            number("origin-offset", -1),
            at("origin-time"),
            text("group"),
            number("attempts"),
            number("deliveries"),
            at("first-delivery"),
            at("last-delivery"),
            text("last-member"),
            text("reason"),
            text("error"),
            number("origin-topic-id"),
        )


class Redriven(msgspec.Struct, frozen=True):
    """What a redrive did, or would do: `reopened` at their old place, `republished` because that is gone."""

    count: int
    reopened: int
    republished: int
    dry_run: bool


class _Held:
    """One lease on the dead letters."""

    def __init__(self, grant: Grant, letters: list[DeadLetter]) -> None:
        self.partition = grant.partition
        self.lease = grant.lease
        self.letters = letters
        self.settled: set[int] = set()
        runs = [n for first, count, _, _ in sorted(grant.runs) for n in (first, first + count)]
        self.offsets = set(offsets_of(runs))


class DeadLetters:
    """The dead letters of one topic."""

    def __init__(self, verbs: BrokerVerbs, topic: str, timeout: float) -> None:
        self.topic = topic
        self.name = topic if topic.endswith(SUFFIX) else topic + SUFFIX
        self._verbs = verbs
        self._timeout = timeout
        self._member = f"redrive-{secrets.token_hex(6)}"

    async def list(
        self,
        *,
        group: str | None = None,
        reason: str | None = None,
        filter: Filter | None = None,
        limit: int = 100,
    ) -> list[DeadLetter]:
        """Those that are still there, oldest first within a partition; `filter` says which."""
        fits = _choice(group, reason, filter)
        found: list[DeadLetter] = []
        scan = _Scan(self)
        try:
            while len(found) < limit and (held := await scan.next(CHUNK)):
                for lease in held:
                    found += [letter for letter in lease.letters if fits(letter)]
        finally:
            await scan.give_back()
        found.sort(key=lambda letter: (letter.message.partition, letter.message.offset))
        return found[:limit]

    async def show(self, partition: int, offset: int) -> DeadLetter:
        """One of them, by its place on the dead-letter topic, also after it was redriven or purged."""
        request = Fetch(self.name, [(partition, offset)], 1)
        reply, data = await _exchange(self._verbs, request, self._timeout)
        assert isinstance(reply, Fetched)
        for header, body in frame.walk(data):
            if header.kind == frame.DATA and header.base_offset <= offset < header.end_offset:
                rows = Rows(self.name, partition, header, arrow.decode(body, header.columns))
                for message in rows.messages(rows.first_row(offset)):
                    if message.offset == offset:
                        return DeadLetter.of(message)
        raise NotFound(f"{self.name}/{partition} has no message {offset}")

    async def redrive(
        self,
        *,
        group: str | None = None,
        reason: str | None = None,
        filter: Filter | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Send them back to where they came from, for the group that gave them up; other groups do not see
        them again. `rate` is in messages a second; `filter` says which; with `dry_run` they are counted."""
        if rate is not None and not rate > 0:
            raise InvalidRequest(f"rate: messages a second, more than 0, not {rate!r}")
        fits = _choice(group, reason, filter)
        chunk = CHUNK if rate is None else max(1, min(CHUNK, int(rate)))
        count = reopened = republished = 0
        back = SendingBack(self._verbs, self.name, self._timeout)
        scan = _Scan(self)
        try:
            while held := await scan.next(chunk):
                moved = 0
                for lease in held:
                    chosen = [letter for letter in lease.letters if fits(letter)]
                    moved += len(chosen)
                    if not chosen or dry_run:
                        continue
                    opened, anew = await back.send(chosen)
                    reopened, republished = reopened + opened, republished + anew
                    await self._settle(lease, chosen)
                count += moved
                if rate is not None and moved and not dry_run:
                    await asyncio.sleep(moved / rate)
        finally:
            await scan.give_back()
        return Redriven(count, reopened, republished, dry_run)

    async def purge(
        self, *, group: str | None = None, reason: str | None = None, filter: Filter | None = None
    ) -> int:
        """Forget them for good; returns how many. The messages stay readable until retention takes them."""
        fits = _choice(group, reason, filter)
        count = 0
        scan = _Scan(self)
        try:
            while held := await scan.next(CHUNK):
                for lease in held:
                    chosen = [letter for letter in lease.letters if fits(letter)]
                    count += len(chosen)
                    if chosen:
                        await self._settle(lease, chosen)
        finally:
            await scan.give_back()
        return count

    async def _settle(self, lease: _Held, letters: Sequence[DeadLetter]) -> None:
        offsets = sorted(letter.message.offset for letter in letters)
        request = Ack(self.name, lease.partition, GROUP, [(lease.lease, spans_of(offsets))])
        await ask(self._verbs, request, self._timeout)
        lease.settled.update(offsets)


class _Scan:
    """All that is still there, in chunks; every lease is kept until the end, so that none comes twice."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters
        self._places: dict[int, int] | None = None
        self._held: list[_Held] = []
        self._seen: set[tuple[int, int]] = set()

    async def next(self, count: int) -> list[_Held]:
        """The next leases; none when everything was seen."""
        letters = self._letters
        if self._places is None and not await self._open():
            return []
        assert self._places is not None
        request = Lease(
            letters.name,
            GROUP,
            letters._member,
            sorted(self._places.items()),
            count,
            8 << 20,
            0,
            LEASE_MS,
        )
        while True:
            try:
                reply, data = await _exchange(letters._verbs, request, letters._timeout)
                break
            except Fenced as error:
                # Somebody reset the group; the refusal tells the generation, of one partition at a time.
                generation = error.details.get("generation")
                if not isinstance(generation, int) or generation in self._places.values():
                    raise
                self._places = dict.fromkeys(self._places, generation)
                request = msgspec.structs.replace(request, partitions=sorted(self._places.items()))
        assert isinstance(reply, Leases)
        held = [_Held(grant, found) for grant, found in _letters_of(letters.name, reply, data)]
        self._held += held
        places = {(lease.partition, offset) for lease in held for offset in lease.offsets}
        fresh = places - self._seen
        self._seen |= places
        return held if fresh else []

    async def _open(self) -> bool:
        """False when the topic has no dead letters at all."""
        letters = self._letters
        try:
            info = await ask(letters._verbs, DescribeTopic(letters.name), letters._timeout)
        except NotFound:
            return False
        assert isinstance(info, TopicInfo)
        request = CreateGroup(GROUP, [letters.name], dict(_OPTIONS), if_missing=True)
        await ask(letters._verbs, request, letters._timeout)
        self._places = dict.fromkeys(range(len(info.partitions)), 0)
        return True

    async def give_back(self) -> None:
        """Give back what was not settled."""
        letters = self._letters
        works = []
        for lease in self._held:
            left = spans_of(sorted(lease.offsets - lease.settled))
            if left:
                request = Nack(letters.name, lease.partition, GROUP, lease.lease, left, failure=False)
                works.append(ask(letters._verbs, request, letters._timeout))
        self._held = []
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def _choice(group: str | None, reason: str | None, filter: Filter | None) -> Filter:
    """Which letters are meant. A reason that nothing dies of is a mistake, not a choice of none."""
    if reason is not None and reason not in provenance.REASONS:
        raise InvalidRequest(f"reason: one of {', '.join(provenance.REASONS)}, not {reason!r}")

    def fits(letter: DeadLetter) -> bool:
        if group is not None and letter.group != group:
            return False
        return (reason is None or letter.reason == reason) and (filter is None or filter(letter))

    return fits


def _letters_of(topic: str, reply: Leases, data: memoryview) -> list[tuple[Grant, list[DeadLetter]]]:
    found = []
    at = 0
    for grant in reply.grants:
        runs = [n for first, count, _, _ in sorted(grant.runs) for n in (first, first + count)]
        leased = set(offsets_of(runs))
        letters = []
        for header, body in frame.walk(data[at : at + grant.nbytes]):
            rows = Rows(topic, grant.partition, header, arrow.decode(body, header.columns))
            letters += [DeadLetter.of(m) for m in rows.messages(0) if m.offset in leased]
        at += grant.nbytes
        found.append((grant, letters))
    return found


async def _exchange(verbs: BrokerVerbs, request: Fetch | Lease, timeout: float) -> tuple[Reply, memoryview]:
    """One request whose answer has a body."""
    answer: asyncio.Future[tuple[Reply, memoryview]] = asyncio.get_running_loop().create_future()

    def respond(reply: Reply, parts: Any) -> None:
        if not answer.done():
            answer.set_result((reply, memoryview(b"".join(parts))))

    verbs.submit(request, b"", respond)
    try:
        async with asyncio.timeout(timeout):
            reply, data = await answer
    except TimeoutError:
        raise Timeout(f"{type(request).__name__}: no answer within {timeout:g} s") from None
    if isinstance(reply, Refusal):
        raise error_of(reply)
    return reply, data
