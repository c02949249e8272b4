"""Secrets in the command line of this process: they are blotted out where other users of the machine look.

`ps` shows the memory in which the system has put the arguments. Python works on a copy of them, so that
memory may be written over: from then on the list of processes shows stars. For the moment before, everybody
could read it, which is why the commands advise against it all the same.
"""

from __future__ import annotations

import re

_SECRETS = re.compile(rb"tailraces?://[^\0?]*?:([^\0]+)@|tailraces?://[^\0]*?[?&]token=([^\0&]+)")
_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/self/stat, counted behind the name of the program."""


def hide_secrets() -> int:
    """Blot out passwords and tokens of URLs in the arguments; returns how many there were."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
    except FileNotFoundError:
        return 0  # Without /proc, nobody else sees them there either.
    found = [match.span(match.lastindex or 0) for match in _SECRETS.finditer(shown)]
    if not found:
        return 0
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    for first, last in found:
        if start and start + last <= end:
            ctypes.memset(start + first, ord("*"), last - first)
    return len(found)
