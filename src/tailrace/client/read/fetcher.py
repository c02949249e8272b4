"""Partitions read in offset order by long polls that run ahead: one poll for each topic, while there is room.

Frames come as the broker stored them, and are checked and decoded here. Cancelling a wait loses nothing: what
arrives meanwhile stays in the buffer. `reader` and `stream_feed` say what of it the application has.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tailrace.client.messages import Rows
from tailrace.client.rpc.calls import error_of, told_wait_s
from tailrace.client.rpc.retries import Retries
from tailrace.client.rpc.waiters import AwaitedSupply
from tailrace.client.sdk_tuning import AHEAD_BYTES, PAUSE_S_MIN, WAIT_MS
from tailrace.core.model.commands import Fetch, Fetched, Reply
from tailrace.core.model.group_commands import Place
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt, NotFound, TailraceError
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

log = logging.getLogger("tailrace.consumer")


class Cursor:
    """Where the application stands in one partition: `next` is behind everything that is finished, `fetched`
    behind what is in hand or was read ahead, too."""

    __slots__ = ("committed", "fetched", "generation", "next")

    def __init__(self, generation: int, committed: int, offset: int) -> None:
        self.generation = generation
        self.committed = committed
        self.next = self.fetched = offset


class Fetcher(AwaitedSupply):
    """Reads partitions ahead. With `tells` every offset that cannot be read is an error, told once; otherwise
    it is logged and passed over. `looked` is called when there is room for more."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        fetch_bytes_max: int,
        *,
        tells: bool,
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._verbs = verbs
        self._fetch_bytes_max = fetch_bytes_max
        self._tells = tells
        self._looked = looked
        self._loop = asyncio.get_running_loop()
        self.cursors: dict[Place, Cursor] = {}
        self._ends: Mapping[Place, int] | None = None
        self._skipped: set[Place] = set()
        self._epoch = 0
        self._fetching: set[str] = set()
        self._retries = Retries(self._fetch)
        self._buffer: deque[tuple[Rows, int]] = deque()
        self._ahead = 0
        self._unread: TailraceError | None = None
        """Why there is no more to read: raised when all that was read before it is handed out."""

    # -- what was read

    async def rows(self) -> tuple[Rows, int]:
        """The next rows, and from which one on they are wanted, as soon as there are any."""
        while not self._ready():
            waiter = self._waiters.join()
            self._fetch()  # A broker in this process may answer at once.
            await waiter
        rows, first = self._buffer.popleft()
        self._ahead -= rows.header.size
        self._fetch()
        return rows, first

    def _ready(self) -> bool:
        self._check()
        if self._buffer:
            return True
        if self._unread is not None:
            unread, self._unread = self._unread, None
            self._pass(unread)
            raise unread
        if self._ends is not None and not any(map(self._is_wanted, self.cursors)):
            raise StopAsyncIteration
        return False

    def _pass(self, error: TailraceError) -> None:
        """What is lost is told once: whoever asks again goes on behind it."""
        if self._tells and isinstance(error, NotFound) and "lost" in error.details:
            for place, cursor in self.cursors.items():
                if place[1] == error.details["partition"]:
                    end = error.details["lost"][1]
                    cursor.next, cursor.fetched = max(cursor.next, end), max(cursor.fetched, end)

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopping = True
        self._wake()

    def end(self, error: TailraceError) -> None:
        """It is over."""
        self.closed = error
        self._epoch += 1
        self._retries.at_once()
        self._buffer.clear()
        self._wake()

    # -- what is asked for

    def begin(self, cursors: Mapping[Place, Cursor]) -> None:
        """Read these partitions, and nothing that was read before counts."""
        self._buffer.clear()
        self._ahead = 0
        self.cursors.clear()
        self.cursors.update(cursors)
        self.renew({place: cursor.fetched for place, cursor in cursors.items()})

    def end_at(self, ends: Mapping[Place, int]) -> None:
        """Read nothing from these offsets on, and nothing of other partitions."""
        self._ends = ends

    def skip(self, places: set[Place]) -> None:
        """Ask for nothing of these partitions."""
        self._skipped = places

    def forget(self, places: set[Place]) -> None:
        """Drop what was read ahead of these partitions."""
        self._buffer = deque(
            (rows, first) for rows, first in self._buffer if (rows.topic, rows.partition) not in places
        )
        self._ahead = sum(rows.header.size for rows, _ in self._buffer)

    def renew(self, places: dict[Place, int]) -> None:
        """What is asked for has changed: answers to earlier fetches are dropped. Below the given offsets all
        was handed out or is in hand."""
        self._epoch += 1
        self._unread = None
        self._fetching.clear()
        self._retries.at_once()
        for rows, _ in self._buffer:
            places[rows.topic, rows.partition] = rows.header.end_offset
        for place, cursor in self.cursors.items():
            cursor.fetched = places[place]
        self._fetch()

    # -- fetching

    def _is_wanted(self, place: Place) -> bool:
        return self._ends is None or self.cursors[place].fetched < self._ends.get(place, 0)

    def _fetch(self) -> None:
        """Ask for more, one long poll for each topic, while the buffer has room."""
        if self.closed is not None or self._ahead >= AHEAD_BYTES or self._unread is not None:
            return
        self._looked()
        by_topic: dict[str, list[tuple[int, int]]] = {}
        for place, cursor in self.cursors.items():
            topic, partition = place
            if topic in self._fetching or self._retries.waits(topic):
                continue
            if place not in self._skipped and self._is_wanted(place):
                by_topic.setdefault(topic, []).append((partition, cursor.fetched))
        for topic, positions in by_topic.items():
            self._fetching.add(topic)
            self._submit(topic, positions)

    def _submit(self, topic: str, positions: list[tuple[int, int]]) -> None:
        epoch = self._epoch

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if epoch != self._epoch:
                return
            self._fetching.discard(topic)
            if isinstance(reply, Refusal):
                self._refused(topic, reply)
                return
            assert isinstance(reply, Fetched)
            self._retries.served(topic)
            try:
                self._unpack(topic, reply, parts)
            except TailraceError as error:
                self._unread = error
            self._wake()
            # Later, not now: a broker in this process may answer from within `submit`.
            self._loop.call_soon(self._fetch)

        request = Fetch(topic, positions, self._fetch_bytes_max, WAIT_MS)
        self._verbs.submit(request, b"", respond)

    def _refused(self, topic: str, reply: Refusal) -> None:
        error = error_of(reply)
        if error.retriable:
            self._retries.refused(topic, max(PAUSE_S_MIN, told_wait_s(error)))
            return
        place = (topic, error.details.get("partition", -1))
        cursor, start = self.cursors.get(place), error.details.get("start_offset", 0)
        passed = not self._tells and isinstance(error, NotFound)
        if passed and cursor is not None and cursor.fetched < start:
            what = "are lost" if "lost" in error.details else "were trimmed unread"
            log.warning("%s/%d: offsets %d to %d %s", *place, cursor.fetched, start - 1, what)
            if cursor.next >= cursor.fetched:  # Else what is before is still to be handed out.
                cursor.next = start
            cursor.fetched = start
            self._loop.call_soon(self._fetch)
            return
        self._unread = error  # It is asked again when the application does, having heard of it.
        self._wake()

    def _unpack(self, topic: str, reply: Fetched, parts: Sequence[Buffer]) -> None:
        data = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        at = 0
        for partition, size, _, _ in reply.slices:
            place = (topic, partition)
            # Moved to the end of the dict: the partition that was served waits behind the others.
            cursor = self.cursors[place] = self.cursors.pop(place)
            for header, body in frame.walk(data[at : at + size]):
                if header.kind == frame.DATA and header.end_offset > cursor.fetched:
                    self._add(place, cursor, header, body)
            at += size

    def _add(self, place: Place, cursor: Cursor, header: frame.Header, body: Buffer) -> None:
        """Buffer a batch that was read, unless it lies behind the end to stop at."""
        wanted = cursor.fetched
        if self._tells and header.base_offset > wanted and not header.count < header.span:
            gap = f"offsets {wanted} to {header.base_offset - 1} are missing"
            raise Corrupt(f"{place[0]}/{place[1]}: {gap}")
        end = header.end_offset if self._ends is None else self._ends.get(place, 0)
        if header.base_offset < end:
            rows = Rows(*place, header, arrow.decode(body, header.columns)).before(end)
            self._buffer.append((rows, rows.first_row(wanted)))
            self._ahead += rows.header.size
        cursor.fetched = header.end_offset
