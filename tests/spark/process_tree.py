"""Ends a process and all that came of it: a JVM, the Python daemons it started and their workers.

Daemons make process groups of their own, so killing the group of the JVM does not reach them.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

END_S = 10.0


class Seen(NamedTuple):
    """A process and when it started: together they are never used again."""

    pid: int
    started: str


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name, from the state on; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def alive(seen: Seen) -> bool:
    """Whether it still runs; one that has ended and was not waited for does not."""
    stat = _stat(seen.pid)
    return stat is not None and stat[19] == seen.started and stat[0] not in "ZX"


def name(seen: Seen) -> str:
    """The name of the program, "" when it is gone."""
    try:
        text = Path(f"/proc/{seen.pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text if alive(seen) else ""


def tree(pid: int) -> list[Seen]:
    """A process and all its descendants, parents first; empty when it is gone."""
    children: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        stat = _stat(int(entry)) if entry.isdigit() else None
        if stat is not None:
            children.setdefault(int(stat[1]), []).append(int(entry))
            started[int(entry)] = stat[19]
    found, ahead = [], [pid]
    while ahead:
        one = ahead.pop(0)
        if one in started:
            found.append(Seen(one, started[one]))
        ahead += children.get(one, [])
    return found


def kill(seen: list[Seen]) -> None:
    """SIGKILL to those that still run, and wait until they are gone."""
    for process in seen:
        if alive(process):
            os.kill(process.pid, signal.SIGKILL)
    assert gone(seen, END_S), f"processes outlived SIGKILL: {seen}"


def gone(seen: list[Seen], within_s: float) -> bool:
    """Whether all of them end in so many seconds."""
    deadline = time.monotonic() + within_s
    for process in seen:
        try:
            ended = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if alive(process) and not select.select([ended], [], [], max(0, deadline - time.monotonic()))[0]:
                return False
        finally:
            os.close(ended)
    return True
