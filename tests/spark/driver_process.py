"""A Spark driver in a process of its own, to be killed with its JVM and workers, and always ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.spark import process_tree

ROOT = Path(__file__).parents[2]
ANSWER_S = 90.0


class DriverProcess:
    """Runs `python -m MODULE ARGUMENT…`, or the text of a program, from the top folder of the project.

    It speaks by lines of JSON on standard output, which `answer` reads; Spark's own words go to a log.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The Python process of the driver; its JVM is a child of it."""
        return self._process.pid

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The next line, decoded."""
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            assert left > 0, f"no answer within {timeout_s:g} s: {self.words()}"
            if select.select([self._process.stdout], [], [], left)[0]:
                # One byte at a time: what comes behind the line is left for the next call.
                piece = os.read(self._process.stdout.fileno(), 1)
                assert piece, f"ended without an answer: {self.words()}"
                line += piece
        return json.loads(line)

    def tell(self, line: str) -> None:
        """One line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, timeout_s: float = ANSWER_S) -> int:
        """Wait for its end; the exit status."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the driver, its JVM and all workers at once, as if the machine were gone."""
        process_tree.kill(process_tree.tree(self._process.pid))
        self._process.wait()

    def words(self) -> str:
        """The end of what was written to standard error."""
        return self._log.read_text(errors="replace")[-6000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        if error is not None:
            error.add_note(f"the driver's last words:\n{self.words()}")
