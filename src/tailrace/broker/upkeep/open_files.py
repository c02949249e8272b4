"""The limit of open files: raised to what the system permits, with a warning before files run out.

A partition that was written to holds two files open, another partition one, and a connection one. Shells
mostly start programs with a limit of 1,024, for old programs that cannot handle more, and permit far more on
request: a broker requests it. When no more files can be opened, writes fail and nobody can connect.
"""

from __future__ import annotations

import logging
import os
import resource

log = logging.getLogger("tailrace.node")

FILES_MAX = 1 << 20
"""Limit to request if the system sets none; some kernels refuse more."""
WARN_SHARE = 0.8


def raise_limit() -> None:
    """Raise the limit to what the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)


class OpenFiles:
    """Compares the open files with their limit."""

    def __init__(self) -> None:
        self._told = False

    def warnings(self) -> list[str]:
        """A warning if most of the permitted files are open."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = len(os.listdir("/proc/self/fd"))
        if limit == resource.RLIM_INFINITY or count < limit * WARN_SHARE:
            return []
        return [
            f"{count:,} files are open of the {limit:,} that the system permits: without more, partitions "
            "cannot be written and clients cannot connect; raise the limit (`ulimit -n`, LimitNOFILE), or "
            "delete topics"
        ]

    def check(self) -> None:
        """Log the warning, once until it is over."""
        warnings = self.warnings()
        if warnings and not self._told:
            log.warning("%s", warnings[0])
        self._told = bool(warnings)
