"""Dead letters of a topic: looking at them, sending them back to where they came from, dropping them.

Which ones are still there is kept by the group `_redrive` on the dead-letter topic: what was redriven or
purged is settled for it. Looking only reads. A redrive holds what it is about, so that two of them at once do
not send the same letter back twice.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

import msgspec

from tailrace.client.admin.dead_letter_reader import DeadLetter, DeadLetterReader
from tailrace.client.admin.redrive import Redrive
from tailrace.client.queue.held_leases import offsets_of, spans_of
from tailrace.client.rpc.calls import ask
from tailrace.client.sdk_tuning import HOLD_MS, LETTERS_AT_ONCE, PROBLEMS_MAX
from tailrace.core.collections.span_map import count as count_of
from tailrace.core.model import dead_letter_headers
from tailrace.core.model.group_commands import CreateGroup
from tailrace.core.model.group_options import REDRIVE_GROUP, REDRIVE_OPTIONS
from tailrace.core.model.queue_commands import HoldOffsets, OffsetsHeld, SettleOffsets
from tailrace.core.model.topic_options import DEAD_LETTERS
from tailrace.errors import InvalidRequest, NotFound, TailraceError
from tailrace.ports import BrokerVerbs

GROUP = REDRIVE_GROUP
SUFFIX = DEAD_LETTERS

Filter = Callable[[DeadLetter], bool]


class Redriven(msgspec.Struct, frozen=True):
    """What a redrive did, or would do: `reopened` at their old place, `republished` because that is gone.
    Those that somebody else is redriving in this moment are `held`, those that cannot be sent back `failed`,
    with the `problems` of the first of them: both stay where they are, and are not in `count`."""

    count: int
    reopened: int
    republished: int
    dry_run: bool
    held: int = 0
    failed: int = 0
    problems: list[str] = []


class DeadLetters:
    """The dead letters of one topic."""

    def __init__(self, verbs: BrokerVerbs, topic: str, timeout: float) -> None:
        self.topic = topic
        self.name = topic if topic.endswith(SUFFIX) else topic + SUFFIX
        self._verbs = verbs
        self._timeout = timeout
        self._open = DeadLetterReader(verbs, self.name, GROUP, timeout)

    async def list(
        self,
        *,
        group: str | None = None,
        reason: str | None = None,
        filter: Filter | None = None,
        limit: int = 100,
    ) -> list[DeadLetter]:
        """Those that are still there, oldest first within a partition; `filter` says which."""
        if type(limit) is not int or limit < 0:
            raise InvalidRequest(f"limit: a whole number, 0 or more, not {limit!r}")
        fits = _choice(group, reason, filter)
        found: list[DeadLetter] = []
        async with aclosing(self._open.pieces()) as pieces:
            while len(found) < limit and (piece := await anext(pieces, None)):
                found += [letter for letter in map(DeadLetter.of, piece[1]) if fits(letter)]
        return found[:limit]

    async def show(self, partition: int, offset: int) -> DeadLetter:
        """One of them, by its place on the dead-letter topic, also after it was redriven or purged."""
        for name, given in (("partition", partition), ("offset", offset)):
            if type(given) is not int or given < 0:
                raise InvalidRequest(f"{name}: a whole number, 0 or more, not {given!r}")
        return DeadLetter.of(await self._open.at(partition, offset))

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
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
            raise InvalidRequest(f"rate: messages a second, more than 0, not {rate!r}")
        fits = _choice(group, reason, filter)
        at_once = LETTERS_AT_ONCE if rate is None else max(1, min(LETTERS_AT_ONCE, int(rate)))
        count = reopened = republished = held = failed = 0
        problems: list[str] = []
        back = Redrive(self._verbs, self.name, self._timeout)
        member = f"redrive-{secrets.token_hex(6)}"
        if not dry_run:
            await self._enlist()
        async for partition, messages in self._open.pieces():
            chosen = [letter for letter in map(DeadLetter.of, messages) if fits(letter)]
            if dry_run:
                count += len(chosen)
                continue
            for at in range(0, len(chosen), at_once):
                async with self._holding(member, partition, chosen[at : at + at_once]) as (mine, others):
                    sent = await back.send(mine)
                    await self._settle(partition, sent.reopened + sent.republished)
                reopened, republished = reopened + len(sent.reopened), republished + len(sent.republished)
                held, failed = held + others, failed + len(sent.failed)
                for place, why in sorted(sent.failed.items()):
                    problems.append(f"{self.name}/{partition}@{place}: {why}")
                if rate is not None and mine:
                    await asyncio.sleep(len(mine) / rate)
        count = count if dry_run else reopened + republished
        return Redriven(count, reopened, republished, dry_run, held, failed, problems[:PROBLEMS_MAX])

    async def purge(
        self, *, group: str | None = None, reason: str | None = None, filter: Filter | None = None
    ) -> int:
        """Forget them for good; returns how many. The messages stay readable until retention takes them."""
        fits = _choice(group, reason, filter)
        count = 0
        await self._enlist()
        async for partition, messages in self._open.pieces():
            chosen = [letter for letter in map(DeadLetter.of, messages) if fits(letter)]
            await self._settle(partition, chosen)
            count += len(chosen)
        return count

    @asynccontextmanager
    async def _holding(
        self, member: str, partition: int, letters: Sequence[DeadLetter]
    ) -> AsyncIterator[tuple[Sequence[DeadLetter], int]]:
        """Keep others from redriving letters meanwhile: those that are ours, and how many others hold. What
        was redriven or purged since it was read is neither."""
        spans = spans_of([letter.message.offset for letter in letters])
        request = HoldOffsets(self.name, partition, GROUP, member, spans, HOLD_MS)
        reply = await ask(self._verbs, request, self._timeout)
        assert isinstance(reply, OffsetsHeld)
        mine = set(offsets_of(reply.spans))
        try:
            yield [letter for letter in letters if letter.message.offset in mine], count_of(reply.others)
        finally:
            with suppress(TailraceError):  # It ends by itself, too.
                await ask(self._verbs, msgspec.structs.replace(request, spans=[]), self._timeout)

    async def _enlist(self) -> None:
        """The group that remembers what was done is made when there may be something to remember."""
        with suppress(NotFound):  # Nothing has died yet.
            request = CreateGroup(GROUP, [self.name], dict(REDRIVE_OPTIONS), if_missing=True)
            await ask(self._verbs, request, self._timeout)

    async def _settle(self, partition: int, letters: Sequence[DeadLetter]) -> None:
        """They are off the list, whoever holds them."""
        if letters:
            spans = spans_of(sorted(letter.message.offset for letter in letters))
            await ask(self._verbs, SettleOffsets(self.name, partition, GROUP, spans), self._timeout)


def _choice(group: str | None, reason: str | None, filter: Filter | None) -> Filter:
    """Which letters are meant. A reason that nothing dies of is a mistake, not a choice of none."""
    if reason is not None and reason not in dead_letter_headers.REASONS:
        raise InvalidRequest(f"reason: one of {', '.join(dead_letter_headers.REASONS)}, not {reason!r}")

    def fits(letter: DeadLetter) -> bool:
        if group is not None and letter.group != group:
            return False
        return (reason is None or letter.reason == reason) and (filter is None or filter(letter))

    return fits
