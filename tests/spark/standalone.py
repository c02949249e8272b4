"""Spark's own cluster from the wheel: a master, and workers that pass for machines of their own.

Each worker has another address of the loopback network, because Spark starts a second attempt at a slow task
only on another machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from tests.spark import process_tree

CLASS = "org.apache.spark.deploy."
START_S = 60.0


class Standalone:
    """A master and so many workers of one core each; they end with the block."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._workers = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._page = f"http://127.0.0.1:{_free_port()}/json/"
        self.url = f"spark://127.0.0.1:{_free_port()}"

    def __enter__(self) -> Self:
        try:
            host, port = self.url.removeprefix("spark://").split(":")
            page = self._page.split(":")[2].partition("/")[0]
            self._start("master.Master", host, "--port", port, "--webui-port", page)
            for number in range(self._workers):
                address = f"127.0.0.{number + 2}"
                work = str(self._folder / f"work-{number}")
                limits = ("--cores", "1", "--memory", "1g", "--work-dir", work, "--webui-port", "0")
                self._start("worker.Worker", address, *limits, self.url)
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self, role: str, host: str, *arguments: str) -> None:
        program = Path(pyspark.__file__).parent / "bin" / "spark-class"
        environment = {**os.environ, "SPARK_LOCAL_IP": host, "SPARK_DAEMON_MEMORY": "256m"}
        with (self._folder / f"spark-{host}-{role}.log").open("wb") as log:
            command = [str(program), CLASS + role, "--host", host, *arguments]
            self._processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        alive = 0
        while alive < self._workers:
            assert time.monotonic() < deadline_s, f"{alive} of {self._workers} workers within {START_S:g} s"
            assert all(process.poll() is None for process in self._processes), f"see {self._folder}"
            try:
                with urllib.request.urlopen(self._page, timeout=5) as answer:
                    alive = json.load(answer)["aliveworkers"]
            except OSError:
                pass  # It has not begun to listen.
            time.sleep(0.2)

    def _end(self) -> None:
        for process in reversed(self._processes):
            process_tree.kill(process_tree.tree(process.pid))
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
