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

from tailrace.broker.staged import staged_apply
from tailrace.broker.staged.staged_apply import StagedApply


def fall_between(armed: Path) -> None:
    """From now on."""
    confirmed = StagedApply._confirmed

    def falling(self: StagedApply, roll: Any, place: Any) -> None:
        confirmed(self, roll, place)
        if roll.todo and armed.exists():
            pid = int(armed.read_text())
            armed.unlink()
            os.kill(pid or os.getpid(), signal.SIGKILL)

    StagedApply._confirmed = falling  # type: ignore[method-assign]
    staged_apply.READ_BYTES_MAX = 0


if __name__ == "__main__":
    fall_between(Path(sys.argv[1]))
    sys.argv = sys.argv[4:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
