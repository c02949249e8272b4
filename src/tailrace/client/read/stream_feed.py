"""What a consumer of a log has in hand, and where it stands in each partition.

The `next` of a cursor is behind everything that is finished; the rows in hand, and those read ahead, lie
above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

from tailrace.client.messages import Message, Rows
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.delivery import foreign_rows
from tailrace.client.read.fetcher import Cursor, Fetcher
from tailrace.core.model.group_commands import Place
from tailrace.core.model.identifiers import HAS_EXPIRES_AT
from tailrace.errors import InvalidRequest, TailraceError
from tailrace.ports import BrokerVerbs


class StreamFeed:
    """Messages are taken from `current`; `last` is the one that was handed out."""

    def __init__(self, verbs: BrokerVerbs, options: ConsumerOptions, group: str | None) -> None:
        self._clock = verbs.clock
        self._group = group
        self._skip_expired = options.skip_expired
        self._fetcher = Fetcher(verbs, options.fetch_bytes_max, tells=False)
        self.cursors = self._fetcher.cursors
        self._paused: set[Place] = set()
        self._leaving: set[Place] = set()
        self._rows: Rows | None = None
        self.current: Iterator[Message] = iter(())
        self.last: Message | None = None
        self.first: Message | None = None
        """The first message of the batch in hand; a single one is its own first."""
        self.confirmed: Message | None = None
        """The message in hand that the application called finished by storing its place."""
        self._cut = False
        """Whether the rest of the current rows is not to be handed out."""
        self.guard: AbstractContextManager[object] = nullcontext()
        """Held by whoever takes from `current` in another thread (see `tailrace.sync`)."""
        self._taking = False

    @property
    def closed(self) -> TailraceError | None:
        """Why it is over."""
        return self._fetcher.closed

    # -- handing out

    async def take(self) -> None:
        """Make the next rows the current ones, as soon as there are any."""
        if self._taking:
            raise InvalidRequest("a consumer serves one task at a time: open one for each")
        self._taking = True
        try:
            self._finish_current()
            self._rows, first = await self._fetcher.rows()
            self.current = self._shown(self._rows, first)
        finally:
            self._taking = False

    def _shown(self, rows: Rows, first: int) -> Iterator[Message]:
        messages = rows.messages(first)
        if self._group and (foreign := set(foreign_rows(rows, self._group))):
            messages = (m for m in messages if m.row not in foreign)
        if not self._skip_expired or not rows.header.columns & HAS_EXPIRES_AT:
            return messages
        now_us = self._clock.wall_ns() // 1000
        expires = rows.values("expires_at") or []
        return (m for m in messages if expires[m.row] is None or expires[m.row] > now_us)

    def _finish_current(self) -> None:
        """The application has asked for more: what it had in hand is done."""
        rows, last, cut = self._rows, self.last, self._cut
        self._rows = self.last = self.first = None
        self._cut = False
        cursor = None if rows is None else self.cursors.get((rows.topic, rows.partition))
        if rows is None or cursor is None:
            return
        if not cut:
            cursor.next = rows.header.end_offset
        elif last is not None:
            cursor.next = last.offset + 1

    def _cut_short(self) -> None:
        with self.guard:
            self.current = iter(())
            self._cut = True

    def stop(self) -> None:
        """Hand out nothing more."""
        self._fetcher.stop()
        self._cut_short()

    def failed(self, error: BaseException) -> None:
        """Whoever takes next is told."""
        self._fetcher.failed(error)

    def end(self, error: TailraceError) -> None:
        """It is over."""
        self._fetcher.end(error)
        self._cut_short()

    # -- places

    def position(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not been given."""
        places = {place: cursor.next for place, cursor in self.cursors.items()}
        last = self.last
        if last is not None and (last.topic, last.partition) in places:
            places[last.topic, last.partition] = last.offset + 1
        return places

    def done(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not finished."""
        places = {place: cursor.next for place, cursor in self.cursors.items()}
        last = self.last
        if last is not None and (last.topic, last.partition) in places:
            unfinished = (self.first or last).offset
            places[last.topic, last.partition] = last.offset + 1 if last is self.confirmed else unfinished
        return places

    def confirm(self, message: Message | None) -> None:
        """The application calls what it has in hand finished."""
        self.confirmed = message

    def add(self, cursors: Mapping[Place, Cursor]) -> None:
        """Read these partitions, too."""
        self.cursors.update(cursors)
        self.renew()

    def hold(self, places: set[Place]) -> None:
        """Hand out nothing more of these partitions; their places stay known until `remove`."""
        self._leaving |= places
        self._forget(places)
        self.renew()

    def remove(self, places: set[Place]) -> None:
        """Forget these partitions."""
        self._forget(places)
        self._drop_current(places)
        for place in places:
            self.cursors.pop(place, None)
        self._leaving -= places
        self.renew()

    def seek(self, places: Mapping[Place, int]) -> None:
        """Go on from other offsets."""
        self._forget(places)
        self._drop_current(places)
        for place, offset in places.items():
            self.cursors[place].next = self.cursors[place].fetched = offset
        self.renew()

    def pause(self, places: set[Place]) -> None:
        """Read nothing more of these."""
        self._paused |= places
        self._forget(places)
        self.renew()

    def resume(self, places: set[Place]) -> None:
        """Go on with these, or with all."""
        self._paused -= places or set(self._paused)
        self.renew()

    def _drop_current(self, places: Iterable[Place]) -> None:
        if self._rows is not None and (self._rows.topic, self._rows.partition) in places:
            self._rows = self.last = self.first = None
            self._cut = False

    def _forget(self, places: Iterable[Place]) -> None:
        """Drop what was read ahead of these partitions."""
        chosen = set(places)
        self._fetcher.forget(chosen)
        if self._rows is not None and (self._rows.topic, self._rows.partition) in chosen:
            self._cut_short()

    def renew(self) -> None:
        """What is asked for has changed."""
        places = self.position()
        if self._rows is not None and not self._cut:
            places[self._rows.topic, self._rows.partition] = self._rows.header.end_offset
        self._fetcher.skip(self._paused | self._leaving)
        self._fetcher.renew(places)
