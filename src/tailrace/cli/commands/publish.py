"""`tailrace publish`: messages from arguments or from standard input, streamed with bounded memory.

Lines are sent as they arrive while the results of earlier ones are still on their way. Sent messages and
mistakes of the input go through one queue, so results are printed in the order of the input, and what came
before a mistake is finished and shown first.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tailrace.cli.moments import iso
from tailrace.cli.output import Output, ReaderGone
from tailrace.cli.records import result_record
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress

    from tailrace import Client, Result

PENDING_MAX = 10_000
PROGRESS_EVERY = 500

Fields = dict[str, Any]
"""Arguments of `send` for one message."""

Items = AsyncIterator[tuple[str, Fields]]
"""Messages with the words that name them in an error: "line 7"."""


class Results:
    """Shows the result of every message, in the form that fits: JSON, rows, one table, or a running count."""

    def __init__(self, output: Output, *, streamed: bool) -> None:
        self._output = output
        self._as_table = output.terminal and not streamed
        # Many messages come from a file or pipe while a person watches: a running count says more than rows.
        self._counted = output.terminal and streamed and not sys.stdin.isatty()
        self.acknowledged = 0
        self.duplicates = 0
        self._rows: list[list[Any]] = []
        self._progress: Progress | None = None

    def __enter__(self) -> Results:
        if self._counted:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (
                SpinnerColumn(),
                TextColumn("{task.completed:,.0f} messages acknowledged"),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
            self._progress.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            note = f", {self.duplicates} of them were there already" if self.duplicates else ""
            self._output.line(f"{self.acknowledged} messages acknowledged{note}")
        if self._rows:
            columns = ["partition", "offset", "sequence", "id", "append_time", "duplicate"]
            rows = self._rows
            if any(row[-1] is not None for row in rows):
                columns.append("deliver_at")
            self._output.table(columns, [row[: len(columns)] for row in rows])
        told = error is not None and not isinstance(error, ReaderGone)
        if told and not self._output.as_json and self.acknowledged:
            self._output.note(f"{self.acknowledged} messages were acknowledged before this:")

    def show(self, result: Result) -> None:
        """One more message is acknowledged."""
        self.acknowledged += 1
        self.duplicates += result.duplicate
        if self._progress is not None:
            if self.acknowledged % PROGRESS_EVERY == 0:
                self._progress.update(self._progress.task_ids[0], completed=self.acknowledged)
        elif self._output.as_json:
            self._output.record(result_record(result))
        else:
            row = [
                result.partition,
                "-" if result.offset is None else result.offset,
                "-" if result.sequence is None else result.sequence,
                str(result.id),
                iso(result.append_time),
                "yes" if result.duplicate else "no",
            ]
            if self._as_table:
                due = None if result.deliver_at is None else iso(result.deliver_at)
                self._rows.append([*row, due])
            else:
                self._output.fields(map(str, row))


async def publish_all(client: Client, topic: str, items: Items, results: Results) -> None:
    """Publish a stream of messages; ends at the first that fails."""
    pending: asyncio.Queue[tuple[str, Awaitable[Result]] | TailraceError | None] = asyncio.Queue(PENDING_MAX)

    async def feed() -> None:
        try:
            async for where, fields in items:
                try:
                    receipt = await producer.send(**fields)
                except TailraceError as error:
                    raise _located(where, error) from None
                await pending.put((where, receipt))
        except TailraceError as error:
            await pending.put(error)
        else:
            await pending.put(None)

    async def show() -> None:
        while (item := await pending.get()) is not None:
            if isinstance(item, TailraceError):
                raise item
            where, receipt = item
            try:
                result = await receipt
            except TailraceError as error:
                raise _located(where, error) from None
            results.show(result)

    async with client.producer(topic) as producer:
        feeder = asyncio.ensure_future(feed())
        try:
            await _first_failure(feeder, show)
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)


async def _first_failure(feeder: asyncio.Future[None], show: Callable[[], Awaitable[None]]) -> None:
    """Wait for both sides, but not for a feeder that waits for more input when showing has failed."""
    shower = asyncio.ensure_future(show())
    try:
        done, _ = await asyncio.wait([feeder, shower], return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        shower.cancel()
        await asyncio.gather(shower, return_exceptions=True)


def _located(where: str, error: TailraceError) -> TailraceError:
    """The same error with the place in the input in front, where it has one."""
    if not where:
        return error
    return type(error)(f"{where}: {error.message}", outcome=error.outcome, **error.details)
