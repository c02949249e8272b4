"""Open files of a broker: as many as the system permits, and a warning before they run out.

A partition that was written to holds two files open, one that was not holds one, and a connection holds one.
Shells mostly start programs with a limit of 1,024, for the sake of programs that cannot take more, and permit
far more to those that ask: a broker asks. Without a file to open, writes fail and nobody can connect.
"""

from __future__ import annotations

import logging
import os
import resource

log = logging.getLogger("tailrace.node")

FILES_MAX = 1 << 20
"""Asked for where nothing limits it; some kernels refuse more."""
WARN_SHARE = 0.8


def raise_limit() -> None:
    """Take what the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)


class OpenFiles:
    """How many files are open, and of how many."""

    def __init__(self) -> None:
        self._told = False

    def warnings(self) -> list[str]:
        """What may become trouble soon."""
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
        """Say it in the log, once each time."""
        warnings = self.warnings()
        if warnings and not self._told:
            log.warning("%s", warnings[0])
        self._told = bool(warnings)
