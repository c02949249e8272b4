"""The commands about pipelines, without Spark: lists, options, the words for errors.

Covers `cli/commands/pipeline.py`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from tailrace.cli.commands.pipeline import _print, told, words
from tailrace.cli.output import Output
from tailrace.errors import EDGES, Full, NotFound, TailraceError
from tailrace.spark.pipelines import NAMES, CommonOptions, options_of, parse_options, pipeline
from tailrace.spark.pipelines.progress import PipelineStanding
from tests.cli.conftest import Broker, environment, invoke


class Options(CommonOptions, frozen=True):
    """Of a pipeline that does not exist."""

    root: Annotated[str, Meta(description="where")]
    keys: Annotated[tuple[str, ...], Meta(description="several")] = ()
    count: Annotated[int, Meta(ge=1, description="how many")] = 3
    dry: Annotated[bool, Meta(description="whether")] = False


class Example:
    """What a module of a pipeline has."""

    NAME = "example"
    HELP = "does nothing"
    OPTIONS = Options


def test_all_pipelines_are_listed_and_described() -> None:
    rows = invoke("pipeline", "list", "--json").rows
    assert [row["pipeline"] for row in rows] == list(NAMES)
    table = invoke("pipeline", "list").out
    for row in rows:
        assert row["help"] in table
        (described,) = invoke("pipeline", "describe", row["pipeline"], "--json").rows
        assert described["help"] == row["help"]
        assert all(option["meaning"] for option in described["options"]), row["pipeline"]
        page = invoke("pipeline", "describe", row["pipeline"]).out
        assert all(option["option"] in page for option in described["options"])


def test_importing_pipelines_needs_no_spark() -> None:
    program = f"""
import sys
from tailrace.spark.pipelines import pipeline
for name in {NAMES!r}:
    pipeline(name)
print([name for name in sys.modules if name.split(".")[0] in ("pyspark", "py4j", "pandas")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_without_pyspark_one_line_says_what_to_install(broker: Broker) -> None:
    program = """
import sys
sys.modules["pyspark"] = None
sys.argv = ["tailrace", "pipeline", "run", "project", "--topic", "t", "-o", "sql=x", "-o", "table=x"]
from tailrace.cli.app import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(TAILRACE_URL=broker.url),
        timeout=60,
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "install tailrace[spark]" in said[0]
    assert "Traceback" not in done.stderr


def test_without_java_one_line_says_what_is_needed(tmp_path: object, broker: Broker) -> None:
    arguments = ("pipeline", "run", "project", "--topic", "t", "-o", "sql=x", "-o", "table=x")
    done = invoke(*arguments, JAVA_HOME=str(tmp_path), TAILRACE_URL=broker.url)
    assert done.status == EDGES["invalid_request"].exit
    said = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "Java 17" in said[0]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "nothing", "--topic", "t"], "not_found", "there is no pipeline 'nothing': archive, "),
        (["describe", "nothing"], "not_found", "`tailrace pipeline list`"),
        (["run", "project"], "invalid_request", "--topic"),
        (
            ["run", "project", "--topic", "t", "-o", "tabel=x"],
            "invalid_request",
            "--option tabel: project has",
        ),
        (["run", "project", "--topic", "t", "-o", "table"], "invalid_request", "write it as KEY=VALUE"),
        (["run", "project", "--topic", "t", "-o", "topic=x"], "invalid_request", "--option topic"),
        (
            ["run", "project", "--topic", "t", "-o", "sql=a", "-o", "sql=b"],
            "invalid_request",
            "sql: given twice",
        ),
        (["run", "project", "--topic", "t", "-o", "rebuild=maybe"], "invalid_request", "rebuild"),
    ],
)
def test_mistakes_are_told_before_spark_starts(arguments: list[str], code: str, says: str) -> None:
    done = invoke("pipeline", *arguments)
    assert done.status == EDGES[code].exit
    assert says in done.err


def test_options_from_texts() -> None:
    texts = {"root": "x", "keys": "a,b", "count": "7", "dry": "true"}
    parsed = parse_options(Example, texts, topic="t", url=None, follow=True)  # type: ignore[arg-type]
    assert parsed == Options(topic="t", follow=True, root="x", keys=("a", "b"), count=7, dry=True)
    with pytest.raises(TailraceError, match="example needs --option root="):
        parse_options(Example, {}, topic="t")  # type: ignore[arg-type]
    with pytest.raises(TailraceError, match="count"):
        parse_options(Example, {"root": "x", "count": "0"}, topic="t")  # type: ignore[arg-type]
    lines = {line.name: (line.default, line.meaning) for line in options_of(Example)}  # type: ignore[arg-type]
    assert lines == {
        "root": (None, "where"),
        "keys": ("", "several"),
        "count": ("3", "how many"),
        "dry": ("false", "whether"),
    }


def test_names_are_those_of_the_modules() -> None:
    for name in NAMES:
        found = pipeline(name)
        assert name == found.NAME
        assert issubclass(found.OPTIONS, CommonOptions)


def test_our_own_words_are_found_in_the_errors_of_spark() -> None:
    text = """[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):
  File "x.py", line 3, in partitions
tailrace.errors.NotFound: topic: there is no topic 'x'

SQLSTATE: 38000
"""
    found = told(RuntimeError(text))
    assert isinstance(found, NotFound)
    assert found.message == "topic: there is no topic 'x'"
    assert told(RuntimeError("\nfirst\nsecond")).message == "RuntimeError: first"
    theirs = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "worker.py", line 2000, in main
    process()
  File "views.py", line 7, in slow
    return 1 / number
ZeroDivisionError: division by zero
"""
    found = told(RuntimeError(theirs))
    assert found.message == 'ZeroDivisionError: division by zero (File "views.py", line 7, in slow)'
    ours = NotFound("x")
    assert told(ours) is ours


JAVA = """An error occurred while calling o301.parquet.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows. SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedWhileWritingRowsError(X.scala:797)
Caused by: org.apache.parquet.util.AutoCloseables$ParquetCloseResourceException: Unable to close resource
\t... 29 more
Caused by: java.io.IOException: {words}
\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)
\t... 41 more
"""


class Py4JJavaError(Exception):
    """As Py4J has it, by name."""


def test_what_java_says_is_told_by_its_cause() -> None:
    told_of = told(Py4JJavaError(JAVA.format(words="Input/output error")))
    assert (told_of.code, told_of.message) == ("error", "IOException: Input/output error")
    plain = told(
        Py4JJavaError("An error occurred while calling o1.load.\n: java.lang.OutOfMemoryError: heap")
    )
    assert plain.message == "OutOfMemoryError: heap"


@pytest.mark.parametrize(
    "error",
    [
        Py4JJavaError(JAVA.format(words="No space left on device")),
        Py4JJavaError(JAVA.format(words="Disk quota exceeded")),
        OSError(28, "No space left on device", "/somewhere/manifest"),
    ],
)
def test_a_full_disk_below_a_pipeline_is_told_as_such(error: Exception) -> None:
    full = told(error)
    assert isinstance(full, Full)
    assert full.message.startswith("no space is left where the pipeline writes: ")
    assert "Py4JJavaError" not in full.message
    assert "spark.local.dir" in full.details["hint"]


def test_words_of_progress() -> None:
    assert words(PipelineStanding("reading [a]")) == "reading \\[a]"
    assert words(PipelineStanding("reading", rows=1000)) == "reading, 1,000 rows"
    standing = PipelineStanding("reading", rows=5, rows_expected=10, tasks=4, tasks_done=1)
    assert words(standing) == "reading, 5 of 10 rows, 1 of 4 tasks"


def test_summaries_are_names_and_values_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    class Row(msgspec.Struct):
        partition: int
        end: int

    class Summary(msgspec.Struct):
        rounds: int
        table: str
        positions: list[Row]

    summary = Summary(2, "x", [Row(0, 17), Row(1, 4)])
    _print(Output(as_json=False), summary)
    assert capsys.readouterr().out.splitlines() == [
        "rounds  2",
        "table   x",
        "",
        "PARTITION  END",
        "        0   17",
        "        1    4",
    ]
    _print(Output(as_json=True), summary)
    assert msgspec.json.decode(capsys.readouterr().out)["positions"][1] == {"partition": 1, "end": 4}
