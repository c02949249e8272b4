"""A broker that kills a process when the first of several partitions has applied a decided version.

    python falling_broker.py FILE python -m tailrace.cli serve …

Partitions apply one after the other here. When one has and others have not, and FILE is there, the process
whose number it holds is killed (0: the broker itself), and the file is gone.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from tailrace.broker.partition import staged_reads
from tailrace.core.process.staged_process import StagedProcess


def fall_between(armed: Path) -> None:
    """From now on."""
    applied = StagedProcess._applied

    def falling(self: StagedProcess, tag: Any, reply: Any, now: Any) -> Any:
        effects = applied(self, tag, reply, now)
        roll = self._rolls[tag.name]
        if roll.todo and tag.place not in roll.todo and armed.exists():
            pid = int(armed.read_text())
            armed.unlink()
            os.kill(pid or os.getpid(), signal.SIGKILL)
        return effects

    StagedProcess._applied = falling  # type: ignore[method-assign]
    staged_reads.READ_BYTES_MAX = 0


if __name__ == "__main__":
    fall_between(Path(sys.argv[1]))
    sys.argv = sys.argv[4:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
