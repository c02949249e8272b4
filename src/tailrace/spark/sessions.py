"""Spark sessions with the settings that Tailrace wants, and clear words where Java or PySpark is missing.

A session that somebody else made works as well; `docs/spark.md` says what is different then. Checkpoints keep
Spark's default file manager: the other one saves some 50 ms of each micro-batch, but whether what it renames
survives a crash is not known.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_OLDEST = 17
PYSPARK_OLDEST = (4, 3)
JAVA_ANSWERS_S = 30.0

EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    # Spark's default, INT96, has no minima and maxima in Parquet files, so nothing is skipped by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.python.filterPushdown.enabled": "true",
    # What Spark spends on a column of maps (headers) grows with the square of the rows in a batch for Python:
    # with 10,000, the default, a row of a topic takes 12 µs on its way to a writer, with 2,000 it takes 5.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    "spark.ui.showConsoleProgress": "false",
}
"""Whatever the master is."""

ON_ONE_MACHINE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}
"""With a local master nobody else has to reach the driver."""


def session(app: str, *, master: str = "local[*]", conf: Mapping[str, str] | None = None) -> SparkSession:
    """The session of this process: a new one, or the one that runs, which keeps the master it has.

    `conf` is added to the settings of Tailrace and wins over them. Raises `InvalidRequest` where PySpark or
    Java is missing or too old.
    """
    builder: Any = _builder()
    check_java()
    if master.startswith("local"):
        # Workers have the packages of this interpreter; what `python3` is on PATH may have others.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = builder.appName(app).master(master)
    for name, value in {**settings(master), **(conf or {})}.items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    return made


def jvm_process() -> subprocess.Popen[bytes] | None:
    """The JVM that Spark has started for this process; None when it was there before."""
    from pyspark import SparkContext

    class OwnContext(SparkContext):
        """Never made: only classes below `SparkContext` may look at its gateway."""

        @classmethod
        def process(cls) -> Any:
            return getattr(cls._gateway, "proc", None)

    found: subprocess.Popen[bytes] | None = OwnContext.process()
    return found


def settings(master: str) -> dict[str, str]:
    """What a session with this master is configured with."""
    cores = _cores(master)
    if not cores:
        return dict(EVERYWHERE)
    # 200 shuffle partitions, the default, cost more than the work where there are but a few cores.
    return {**EVERYWHERE, **ON_ONE_MACHINE, "spark.sql.shuffle.partitions": str(cores)}


def _cores(master: str) -> int:
    """How many tasks a local master runs at once; 0 when it is not local."""
    if master == "local":
        return 1
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(cluster[1]) * int(cluster[2])
    threads = re.fullmatch(r"local\[\s*(\d+|\*)\s*(,\s*\d+\s*)?\]", master)
    if threads is None:
        return 0
    return len(os.sched_getaffinity(0)) if threads[1] == "*" else int(threads[1])


def _builder() -> Any:
    wanted = ".".join(map(str, PYSPARK_OLDEST))
    try:
        import pyspark
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise InvalidRequest(f"PySpark is missing: install tailrace[spark] ({error})") from None
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < PYSPARK_OLDEST:
        raise InvalidRequest(
            f"PySpark {pyspark.__version__} is too old, {wanted} is needed: install tailrace[spark]"
        )
    return SparkSession.builder


def check_java() -> None:
    """Raise `InvalidRequest` unless the Java that Spark starts is there and new enough."""
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else "java"
    where = f"JAVA_HOME={home}" if home else "PATH"
    cure = f"Spark needs Java {JAVA_OLDEST} or newer (Debian, Ubuntu: openjdk-{JAVA_OLDEST}-jre-headless)"
    try:
        said = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=JAVA_ANSWERS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidRequest(f"no Java by {where}: {error}. {cure}, and JAVA_HOME may name it") from None
    release = re.search(r'version "(\d+)', said.stderr + said.stdout)
    if release is None:
        raise InvalidRequest(f"{program} -version says {said.stderr.strip()[:200]!r}. {cure}")
    if int(release[1]) < JAVA_OLDEST:
        raise InvalidRequest(f"the Java by {where} is {release[1]}. {cure}, and JAVA_HOME may name it")
