"""`tailrace pipeline`: run the data pipelines on Spark, see how far they are, and stop them cleanly."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.execution import EXIT_INTERRUPTED, require_broker
from tailrace.cli.output import Output, decorated, printable
from tailrace.cli.parameters import Json, Url
from tailrace.errors import BY_CODE, Full, InvalidRequest, TailraceError

if TYPE_CHECKING:
    import msgspec
    from pyspark.sql import SparkSession

    from tailrace.spark.pipelines import Pipeline
    from tailrace.spark.pipelines.progress import PipelineStanding, Progress

EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_FORCED = 1
JVM_ENDS_S = 0.5
"""Its sockets are closed a moment before it is gone."""
# Spark puts the whole traceback of a Python process into its message; ours is the last line of it.
_OURS = re.compile(rf"tailrace\.errors\.({'|'.join(kind.__name__ for kind in BY_CODE.values())}): (.*)")

# The first line of what Py4J says of a Java exception only names the call; its causes stand in the trace.
_CAUSE = re.compile(r"^(?:Caused by|): ([\w.$]+): (.+)$", re.M)
_NO_SPACE = ("No space left on device", "Disk quota exceeded")
_SPACE_HINT = (
    "free space where its table, archive or state is, or where Spark keeps its own files "
    "(--conf spark.local.dir=FOLDER); then run it again: it goes on"
)

pipelines = typer.Typer(no_args_is_help=True, help="Data pipelines on Spark (extra `spark`).")

PipelineName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline.")]


@pipelines.command(name="list")
def list_(json: Json = False) -> None:
    """List the pipelines."""
    from tailrace.spark.pipelines import NAMES, pipeline

    output = Output(as_json=json)
    found = [pipeline(name) for name in NAMES]
    if output.as_json:
        for one in found:
            output.record({"pipeline": one.NAME, "help": one.HELP})
    else:
        output.table(("pipeline", "what it does"), [(one.NAME, one.HELP) for one in found])


@pipelines.command()
def describe(name: PipelineName, json: Json = False) -> None:
    """Show the options of a pipeline."""
    from tailrace.spark.pipelines import options_of, pipeline

    output = Output(as_json=json)
    found = pipeline(name)
    lines = options_of(found)
    if output.as_json:
        options = [{"option": line.name, "default": line.default, "meaning": line.meaning} for line in lines]
        output.record({"pipeline": found.NAME, "help": found.HELP, "options": options})
        return
    output.line(f"{found.NAME}: {found.HELP}")
    rows = [(line.name, "(needed)" if line.default is None else line.default, line.meaning) for line in lines]
    output.table(("option", "default", "meaning"), rows)


@pipelines.command()
def run(
    name: PipelineName,
    *,
    topic: Annotated[str, typer.Option("--topic", help="The topic that it is about.", show_default=False)],
    master: Annotated[
        str, typer.Option("--master", help="Where Spark runs: local[*], spark://..., yarn, k8s://...")
    ] = "local[*]",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes, until SIGTERM or Ctrl-C.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="Option of the pipeline; see `describe`."),
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="Configuration of Spark, as in spark.x=y."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Run a pipeline. It goes on where it was stopped or killed; running it again is harmless."""
    from tailrace.spark.pipelines import parse_options, pipeline

    found = pipeline(name)
    options = parse_options(found, _settings("--option", option), topic=topic, url=url or None, follow=follow)
    require_broker(url)  # Spark takes some seconds to start; that nobody is there is told before.
    status = _run(found, options, master, _settings("--conf", conf), Output(as_json=json))
    if status:
        raise typer.Exit(status)


def _settings(flag: str, texts: Sequence[str] | None) -> dict[str, str]:
    settings = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidRequest(f"{flag} {text!r}: write it as KEY=VALUE")
        if key in settings:
            raise InvalidRequest(f"{flag} {key}: given twice")
        settings[key] = value
    return settings


def _run(found: Pipeline, options: Any, master: str, conf: Mapping[str, str], output: Output) -> int:
    """Run a pipeline in a session of its own; the exit status."""
    from tailrace.spark.pipelines.progress import Progress, Stopped, Supervisor

    with _display(output) as show:
        progress = Progress(show)
        progress.step(f"starting Spark on {master}")
        spark, ours = _session(f"tailrace {found.NAME}", master, conf)
        try:
            with _signals(progress) as received, Supervisor(spark, progress):
                summary = found.run(spark, options, progress)
        except Stopped:
            summary = None
        except Exception as error:
            if not progress.stopping:
                raise (_gone() or told(error)) from error
            # What a cancelled job raises says nothing but that it was cancelled.
            summary = None
        finally:
            if ours:
                _end(spark)
    if summary is not None:
        _print(output, summary)
    if received:
        output.note("stopped; the next run goes on from here")
    if signal.SIGINT in received:
        return EXIT_INTERRUPTED
    return EXIT_TERMINATED if received and not options.follow else 0


def _session(app: str, master: str, conf: Mapping[str, str]) -> tuple[SparkSession, bool]:
    """A session, and whether it is ours to stop: a process that has one already keeps it."""
    from tailrace.spark.sessions import session

    # Not imported here: where it is missing, `session` says what to do.
    spark_sql: Any = sys.modules.get("pyspark.sql")
    before = spark_sql.SparkSession.getActiveSession() if spark_sql else None
    return session(app, master=master, conf={"spark.log.level": "ERROR", **conf}), before is None


def _end(spark: SparkSession) -> None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        spark.stop()
    except (Py4JError, OSError):
        return  # The JVM is gone; whatever went wrong with it is told.


def _gone() -> TailraceError | None:
    """The error to tell when the JVM has ended; what Spark raises then says nothing of it."""
    from subprocess import TimeoutExpired

    from tailrace.spark.sessions import jvm_process

    jvm = jvm_process()
    if jvm is None:  # It was there before us, as under spark-submit.
        return None
    try:
        status = jvm.wait(JVM_ENDS_S)
    except TimeoutExpired:
        return None
    hint = "run it again: it goes on; if it was short of memory, --conf spark.driver.memory=4g gives it more"
    return TailraceError(f"the JVM of Spark has ended with {status}", hint=hint)


def told(error: Exception) -> TailraceError:
    """What to say of an error that came out of Spark: our own words where they are in it."""
    if isinstance(error, TailraceError):
        return error
    ours = _OURS.findall(str(error))
    if ours:
        name, message = ours[-1]
        kind = next(kind for kind in BY_CODE.values() if kind.__name__ == name)
        return kind(message)
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    cause = _last_words(str(error)) or _java_cause(str(error)) or said
    if any(words in str(error) for words in _NO_SPACE):
        return Full(f"no space is left where the pipeline writes: {cause}", hint=_SPACE_HINT)
    return TailraceError(cause)


def _java_cause(text: str) -> str | None:
    """The innermost of the causes that a Java stack trace lists, without the package; None without one."""
    causes = _CAUSE.findall(text)
    if not causes:
        return None
    kind, words = causes[-1]
    return f"{kind.rpartition('.')[2]}: {words}"


def _last_words(text: str) -> str | None:
    """What a traceback in a text comes to, and where that was; None without one."""
    _, found, traceback = text.rpartition("Traceback (most recent call last):")
    lines = traceback.splitlines() if found else []
    frames = [line.strip() for line in lines if line.startswith("  File ")]
    words = [line for line in lines if line and not line.startswith(" ")]
    return f"{words[0]} ({frames[-1]})" if words and frames else None


@contextmanager
def _signals(progress: Progress) -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C ask the pipeline to stop, a second one ends the process; gives those received."""
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            import os

            os._exit(EXIT_FORCED)
        progress.stop()

    # After the session was made, because Spark sets a handler of its own for Ctrl-C.
    former = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _display(output: Output) -> Iterator[Callable[[PipelineStanding], None]]:
    """How progress is shown on standard error: a bar on a terminal, otherwise a line for each new step."""
    if output.as_json or not (sys.stderr.isatty() and decorated()):
        last = ""

        def remark(standing: PipelineStanding) -> None:
            nonlocal last
            if standing.step != last:
                last = standing.step
                output.note(printable(last))

        yield remark
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("starting", total=None)

        def draw(standing: PipelineStanding) -> None:
            bar.update(line, description=words(standing), total=_total(standing), completed=_done(standing))

        yield draw


def words(standing: PipelineStanding) -> str:
    """A step and its numbers in one line."""
    text = printable(standing.step)
    if standing.rows_expected is not None:
        text += f", {standing.rows:,} of {standing.rows_expected:,} rows"
    elif standing.rows:
        text += f", {standing.rows:,} rows"
    if standing.tasks:
        text += f", {standing.tasks_done} of {standing.tasks} tasks"
    # rich reads [markup] in a description
    return text.replace("[", "\\[")


def _total(standing: PipelineStanding) -> int | None:
    return standing.rows_expected or standing.tasks or None


def _done(standing: PipelineStanding) -> int:
    return standing.rows if standing.rows_expected else standing.tasks_done


def _print(output: Output, summary: msgspec.Struct) -> None:
    """Plain fields as names and values, lists of structs as tables."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(summary)
    if output.as_json:
        output.record(fields)
        return
    tables = {name: rows for name, rows in fields.items() if rows and _is_table(rows)}
    output.pairs({name: value for name, value in fields.items() if name not in tables and value != []})
    for name, rows in tables.items():
        output.line("")
        output.table(list(rows[0]), [list(row.values()) for row in rows], title=name)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)
