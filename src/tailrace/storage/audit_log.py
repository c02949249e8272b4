"""The audit log: lines that a thread of its own appends to a file, which is rotated by its size.

    audit.log      the newest lines
    audit.log.1    those before
    audit.log.4    the oldest; the next rotation removes them

Whoever writes never waits: `put` queues a line, or refuses it when `LINES_MAX` lines or `QUEUE_BYTES_MAX`
bytes wait already. If the disk fails, the lines that wait are kept and tried again each second; `trouble`
says so meanwhile, and the broker goes on. Nothing is synced while the log is written, so the last lines
before a power failure may be lost; a process that dies loses only what is still queued. A line that was torn
by a crash is ended before the next one begins.

Only the owner of the files may read them. They are opened without following links, so that nobody who can
write into the folder makes the broker write somewhere else. They are made when there is a first line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from pathlib import Path

log = logging.getLogger("tailrace.audit")

LINES_MAX = 10_000
QUEUE_BYTES_MAX = 8 * 1024 * 1024
RETRY_S = 1.0
CLOSE_S = 5.0
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MODE = 0o600


class AuditLog:
    """The file and its thread. All methods may be called in any thread."""

    def __init__(self, path: Path, *, bytes_max: int, files_max: int) -> None:
        self.path = path
        self.lines = 0
        """Lines written since the start."""
        self.trouble: str | None = None
        """Why nothing is written at the moment; None if all is well."""
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._handle: int | None = None
        self._size = 0

    def put(self, line: bytes) -> bool:
        """Queue a line, which ends with a newline. False if there is no room for it."""
        with self._changed:
            crowded = self._waiting_bytes + len(line) > QUEUE_BYTES_MAX or len(self._waiting) >= LINES_MAX
            if crowded or self._closing:
                return False
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tailrace-audit", daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def close(self) -> None:
        """Write what waits, sync, and end; blocking, but not for long if the disk fails."""
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(CLOSE_S)
            if thread.is_alive():
                log.error("the audit log was not written to its end: the disk does not answer")

    # -- in the thread

    def _run(self) -> None:
        rest, count = b"", 0
        while True:
            with self._changed:
                if rest:
                    self._changed.wait_for(self._is_closing, RETRY_S)
                else:
                    self._changed.wait_for(self._has_work)
                    lines = self._taken()
                    rest, count = b"".join(lines), len(lines)
            if not rest:
                break
            rest = self._write(rest)
            if not rest:
                self.lines += count
            elif self._is_closing():
                break
        self._end()

    def _is_closing(self) -> bool:
        return self._closing

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._closing

    def _taken(self) -> list[bytes]:
        """Take the lines that wait, as many as fit into one file."""
        taken, size = 0, 0
        for line in self._waiting:
            if taken and size + len(line) > self._bytes_max:
                break
            taken, size = taken + 1, size + len(line)
        lines, self._waiting = self._waiting[:taken], self._waiting[taken:]
        self._waiting_bytes -= size
        return lines

    def _write(self, data: bytes) -> bytes:
        """Append; returns what could not be written."""
        try:
            if self._handle is not None and self._is_elsewhere(self._handle):
                self._let_go()
            if self._handle is None:
                self._open()
            if self._size and self._size + len(data) > self._bytes_max:
                self._rotate()
            assert self._handle is not None
            while data:
                written = os.write(self._handle, data)
                self._size += written
                data = data[written:]
        except OSError as error:
            self._fail(error)
            return data
        if self.trouble is not None:
            log.warning("the audit log is written again")
            self.trouble = None
        return b""

    def _fail(self, error: OSError) -> None:
        text = f"the audit log {self.path} cannot be written: {error.strerror or error}"
        if self.trouble != text:
            log.error("%s", text)
            self.trouble = text
        self._let_go()  # It may be another file by now, or another disk.

    def _open(self) -> None:
        handle = os.open(self.path, _FLAGS, _MODE)
        try:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode):
                raise OSError("it is no file")
            if stat.S_IMODE(state.st_mode) != _MODE:
                os.fchmod(handle, _MODE)
            size = state.st_size
            if size and not self._ends_a_line(size):
                size += os.write(handle, b"\n")
        except BaseException:
            os.close(handle)
            raise
        self._handle, self._size = handle, size

    def _is_elsewhere(self, handle: int) -> bool:
        """Whether somebody has removed the file, or renamed it to rotate it."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return not os.path.samestat(os.fstat(handle), there)

    def _ends_a_line(self, size: int) -> bool:
        with open(self.path, "rb") as file:
            file.seek(size - 1)
            return file.read(1) == b"\n"

    def _rotate(self) -> None:
        """Begin a new file. A crash in between leaves a gap in the numbers, and no line is lost but those of
        the oldest file."""
        assert self._handle is not None
        os.fsync(self._handle)
        self._let_go()
        for number in range(self._files_max - 1, 0, -1):
            newer = self.path if number == 1 else self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, self._numbered(number))
        if self._files_max == 1:
            os.unlink(self.path)
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _let_go(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):  # What matters was written, or was told.
                os.close(handle)

    def _end(self) -> None:
        if self._handle is not None:
            try:
                os.fsync(self._handle)
            except OSError as error:
                self._fail(error)
        self._let_go()
