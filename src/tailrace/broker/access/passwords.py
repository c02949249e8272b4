"""Passwords are hashed and compared with argon2id, at most two at once, in turns between those who ask.

One hash takes about 50 ms of a core and 46 MiB, so it is work for threads of its own, and what waits for them
is bounded. Each source (the address of a peer) has its own line, and the lines are served in turn: who floods
the broker with logins mostly waits for itself. When too many wait, the source with the longest line gives up
its newest. Those who are *known*, because they have logged in from there before or ask as somebody who has,
wait by themselves, and every other hash is one of theirs: strangers from many addresses do not keep them out.

An unknown user costs the same as a wrong password: then `verify` compares with a hash that no password fits.
"""

from __future__ import annotations

import contextlib
import os
import threading
import unicodedata
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from argon2 import PasswordHasher
from argon2.exceptions import VerifyMismatchError

from tailrace.broker.runtime.turn import refuse
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Overloaded, Unavailable
from tailrace.ports import Finished

AT_ONCE = max(1, min(2, len(os.sched_getaffinity(0)) - 1))
"""Two, but never so many that no core is left for the loop: on two cores, two made others wait four times as
long (99th percentile), and one does not make them wait."""
WAITING_MAX = 256
NICE = 10
"""Priority of the threads. At 0, others waited four times as long (99th percentile) as without logins. At 19,
on a busy machine, a thread that has just been given the interpreter's lock keeps the loop waiting for it."""
HASH_MS = 50
"""About how long one takes; for `retry_after_ms`."""

Run = Callable[[Callable[[], object], Finished], None]
"""Does work elsewhere and then calls back on the loop."""


class Profile(NamedTuple):
    """What a hash costs: passes over so many KiB, in so many lanes."""

    passes: int = 1
    memory_kib: int = 46 * 1024
    lanes: int = 1


STRONG = Profile()
CHEAP = Profile(1, 8, 1)
"""For tests, whose passwords protect nothing."""


class _Plain:
    """A password on its way to a thread. Its `repr` shows nothing, and so does that of what holds it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _HashJob(NamedTuple):
    work: Callable[[], object]
    done: Callable[[Any], None]


class _Lines:
    """What waits, in a line for each source."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[_HashJob]] = OrderedDict()
        self.waiting = 0

    def put(self, source: str, job: _HashJob) -> None:
        self._lines.setdefault(source, deque()).append(job)
        self.waiting += 1

    def take(self) -> _HashJob:
        """The first of the line whose turn it is."""
        source, line = self._lines.popitem(last=False)
        job = line.popleft()
        if line:
            self._lines[source] = line  # Behind all others.
        self.waiting -= 1
        return job

    def give_up(self) -> _HashJob:
        """The newest of the longest line."""
        source = max(self._lines, key=self._length)
        job = self._lines[source].pop()
        if not self._lines[source]:
            del self._lines[source]
        self.waiting -= 1
        return job

    def _length(self, source: str) -> int:
        return len(self._lines[source])


class Passwords:
    """The one place where passwords are hashed. All methods run on the loop."""

    def __init__(self, run: Run, profile: Profile = STRONG) -> None:
        self._run = run
        self._hasher = PasswordHasher(*profile)
        self._dummy = ""
        self._known = _Lines()
        self._strangers = _Lines()
        self._served: _Lines = self._strangers
        """Whose turn it was last."""
        self._running = 0

    def hash(self, source: str, password: str, done: Callable[[str | Refusal], None]) -> None:
        """Hash a new password; `done` gets the hash, or a refusal."""
        job = _HashJob(partial(_hashed, self._hasher, _Plain(password)), done)
        self._take(self._known, source, job)

    def verify(
        self,
        source: str,
        stored: str,
        password: str,
        done: Callable[[bool | Refusal], None],
        *,
        known: bool = False,
    ) -> None:
        """Compare a password with a stored hash; an empty one stands for a user that is unknown, or has no
        password, and takes the same time. `known`: this user has logged in from there before."""
        job = _HashJob(partial(self._verified, stored, _Plain(password)), done)
        self._take(self._known if known else self._strangers, source, job)

    def _verified(self, stored: str, password: _Plain) -> bool:
        """In a thread. The dummy is made before the first comparison, whatever that is of."""
        if not self._dummy:
            self._dummy = _hashed(self._hasher, _Plain("nobody's password"))
        try:
            self._hasher.verify(stored or self._dummy, _text(password))
        except VerifyMismatchError:
            return False
        return bool(stored)

    def _take(self, lines: _Lines, source: str, job: _HashJob) -> None:
        lines.put(source, job)
        self._next()
        if lines.waiting > WAITING_MAX:
            lines.give_up().done(self._overloaded(lines))

    def _overloaded(self, lines: _Lines) -> Refusal:
        after_ms = (lines.waiting // AT_ONCE + 1) * HASH_MS
        text = f"too many logins with passwords at once: try again in {after_ms} ms, or use a token"
        return refuse(Overloaded(text, retry_after_ms=after_ms))

    def _next(self) -> None:
        while self._running < AT_ONCE and (self._known.waiting or self._strangers.waiting):
            other = self._strangers if self._served is self._known else self._known
            if other.waiting:
                self._served = other
            job = self._served.take()
            self._running += 1
            self._run(job.work, partial(self._done, job))

    def _done(self, job: _HashJob, result: Any, error: Exception | None) -> None:
        self._running -= 1
        try:
            job.done(result if error is None else refuse(error))
        finally:
            self._next()


def _text(password: _Plain) -> bytes:
    """The same bytes for the same password, however a keyboard composes its letters."""
    return unicodedata.normalize("NFC", password.text).encode("utf-8", "surrogatepass")


def _hashed(hasher: PasswordHasher, password: _Plain) -> str:
    return hasher.hash(_text(password))


def _step_back() -> None:
    """Let this thread work when others do not: two hashes at once take two cores from the loop, and everybody
    waits for that. On a machine that is always busy, logins with passwords are slow instead."""
    with contextlib.suppress(PermissionError):  # A sandbox that forbids this: then it works as others do.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class HashThreads:
    """Two threads beside those of the storage, so that no read of a log waits for a login. They begin with
    the first password."""

    def __init__(self, tell: Callable[[Finished, object], None]) -> None:
        self._tell = tell
        self._pool = ThreadPoolExecutor(AT_ONCE, "passwords", _step_back)
        self._closed = False

    def run(self, work: Callable[[], object], done: Finished) -> None:
        """Do work in one of the threads, then call `done` on the loop."""
        if self._closed:
            gone = Unavailable("the broker is shutting down; log in again in a moment")
            self._tell(partial(_unpacked, done), (None, gone))
        else:
            self._pool.submit(self._act, work, done)

    def _act(self, work: Callable[[], object], done: Finished) -> None:
        try:
            outcome: tuple[object, Exception | None] = (work(), None)
        except Exception as error:  # It is told to the owner.
            outcome = (None, error)
        self._tell(partial(_unpacked, done), outcome)

    def close(self) -> None:
        """End the threads; blocking. What comes later is refused."""
        self._closed = True
        self._pool.shutdown()


def _unpacked(done: Finished, outcome: Any, error: Exception | None) -> None:
    done(*outcome)
