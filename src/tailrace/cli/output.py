"""What commands print: JSON lines, tables on a terminal, plain text elsewhere, and no raw control bytes.

Three forms, chosen once per command. `--json`: one JSON object per line, flushed at once. On a terminal
(and without NO_COLOR): tables by rich and a little colour. Otherwise: aligned columns under a heading for
tables, tab-separated fields for streams.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")
SHORT_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


class ReaderGone(Exception):
    """Whoever read our output has closed it (`| head`): stop quietly."""


class OutputLost(Exception):
    """Standard output takes nothing more, such as a file on a full disk: stop, and say why."""


@contextmanager
def writing() -> Iterator[None]:
    """Around everything that writes to standard output."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise OutputLost(f"standard output cannot be written: {error.strerror or error}") from None


def tell(text: str) -> None:
    """A line on standard error. Where that cannot be written, the exit status has to say it."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        put_aside(sys.stderr)


def put_aside(stream: TextIO) -> None:
    """Let a broken stream take everything, so that the interpreter does not fail when it flushes it at
    exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """The text with everything escaped that could steer a terminal or break a line: control and format
    characters, lone surrogates, odd spaces, and the backslash itself, so that the result is unambiguous.
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        c if c.isprintable() and c != "\\" else SHORT_ESCAPES.get(c) or _escaped(ord(c)) for c in text
    )


def printable_bytes(data: bytes) -> str:
    """Bytes as readable text: UTF-8 where they are, `\\xNN` where they are not."""
    try:
        return printable(data.decode("utf-8"))
    except UnicodeDecodeError:
        parts = data.decode("utf-8", "surrogateescape")
        # surrogateescape marks the byte 0xNN as U+DCNN
        return "".join(
            f"\\x{ord(c) - 0xDC00:02x}" if 0xDC80 <= ord(c) <= 0xDCFF else printable(c) for c in parts
        )


def _escaped(code: int) -> str:
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def decorated() -> bool:
    """Whether standard output is a terminal that wants tables and colour."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout is not None and sys.stdout.isatty() and not plain


def _shown(value: Any) -> str:
    """A value for a person."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return printable(str(value))


def _numbers(cells: Sequence[Any]) -> bool:
    """Whether a column holds numbers, some of which may be missing."""
    present = [cell for cell in cells if cell is not None]
    return bool(present) and all(isinstance(cell, int) and not isinstance(cell, bool) for cell in present)


class Output:
    """Standard output of one command in the form that was asked for."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.terminal = not as_json and decorated()

    def record(self, record: Mapping[str, Any]) -> None:
        """One JSON line."""
        import msgspec

        self._write(msgspec.json.encode(record).decode("utf-8") + "\n", flush=True)

    def line(self, text: str) -> None:
        """One line of text, already safe to print."""
        self._write(text + "\n", flush=self.terminal)

    def result(self, record: Mapping[str, Any], text: str) -> None:
        """What a command did: a JSON line, or a line of text that is already safe to print."""
        if self.as_json:
            self.record(record)
        else:
            self.line(text)

    def listing(
        self,
        found: Sequence[Item],
        record: Callable[[Item], Mapping[str, Any]],
        headings: Sequence[str],
        row: Callable[[Item], Sequence[Any]],
        nothing: str,
    ) -> None:
        """What a command found: a JSON line for each, or a table, and a remark if there is nothing."""
        if self.as_json:
            for item in found:
                self.record(record(item))
            return
        self.table(headings, map(row, found))
        if not found:
            self.note(nothing)

    def fields(self, fields: Iterable[str]) -> None:
        """One row of a stream: fields, already safe to print, separated by tabs."""
        self._write("\t".join(fields) + "\n", flush=True)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None
    ) -> None:
        """A whole table; numbers stand to the right."""
        rows = list(rows)
        cells = [[_shown(cell) for cell in row] for row in rows]
        right = [_numbers([row[i] for row in rows]) for i in range(len(columns))]
        if self.terminal:
            self._rich_table(columns, cells, right, title)
        else:
            self._plain_table(columns, cells, right)

    def flush(self) -> None:
        """Let everything printed so far be seen."""
        self._write("", flush=True)

    def pairs(self, values: Mapping[str, Any]) -> None:
        """Names and values, one to a line."""
        width = max(map(len, values), default=0)
        for name, value in values.items():
            self.line(f"{name:<{width}}  {_shown(value)}")

    def drawn(self, what: Any) -> None:
        """Something that rich renders, on a terminal."""
        from rich.console import Console

        with writing():
            Console().print(what)

    def note(self, text: str) -> None:
        """A remark for a person, on standard error; not with --json."""
        if not self.as_json:
            tell(text)

    def _plain_table(self, columns: Sequence[str], cells: list[list[str]], right: list[bool]) -> None:
        heading = [column.upper() for column in columns]
        widths = [max(len(row[i]) for row in [heading, *cells]) for i in range(len(columns))]
        for row in [heading, *cells]:
            fields = [
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            ]
            self.line("  ".join(fields).rstrip())

    def _rich_table(
        self, columns: Sequence[str], cells: list[list[str]], right: list[bool], title: str | None
    ) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, title=None if title is None else Text(title), title_justify="left")
        for column, to_right in zip(columns, right, strict=True):
            table.add_column(column, justify="right" if to_right else "left", overflow="fold")
        for row in cells:
            # Text, not str: rich reads [markup] in a str.
            table.add_row(*map(Text, row))
        self.drawn(table)

    def _write(self, text: str, *, flush: bool) -> None:
        with writing():
            sys.stdout.write(text)
            if flush:
                sys.stdout.flush()
