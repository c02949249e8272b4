"""The pages on Spark say what the code does: options, settings, and the tutorial, which is walked through."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tailrace.spark import sessions
from tailrace.spark.options import OPTIONS
from tailrace.spark.pipelines import NAMES, options_of, pipeline
from tailrace.spark.sink.message_columns import KINDS
from tests.cli.conftest import invoke
from tests.e2e.broker_process import BrokerProcess

pytestmark = pytest.mark.timeout(300)
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "spark.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "spark-tutorial.md").read_text(encoding="utf-8")
ADDRESS = "tailrace://127.0.0.1:7400"


def table(heading: str) -> list[list[str]]:
    """The cells of the table that has this heading, without ticks."""
    found = re.search(rf"^{re.escape(heading)}\n\|[-:|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found is not None, heading
    rows = [line.strip()[1:-1].split("|") for line in found[1].splitlines()]
    return [[re.sub(r"^`(.*)`$", r"\1", cell.strip()) for cell in row] for row in rows]


def test_every_option_of_the_data_source() -> None:
    listed = table("| option | for | default | meaning |")
    assert listed == [[one.name, ", ".join(one.uses), one.default, one.meaning] for one in OPTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_pipelines(name: str) -> None:
    listed = table(f"| option of {name} | default | meaning |")
    lines = options_of(pipeline(name))
    expected = [
        [line.name, "(needed)" if line.default is None else line.default, line.meaning] for line in lines
    ]
    missing = [f"| `{option}` | `{default}` | {meaning} |" for option, default, meaning in expected]
    assert listed == expected, "\n".join(["edit docs/spark.md; the rows are:", *missing])


def test_every_setting_of_sessions() -> None:
    listed = [name.strip("` ") for row in table("| setting | value | why |") for name in row[0].split(",")]
    assert sorted(listed) == sorted(sessions.settings("local[2]"))


def test_every_column_that_is_written() -> None:
    listed = [name.strip("` ") for row in table("| column | type | meaning |") for name in row[0].split(",")]
    assert sorted(listed) == sorted(KINDS)


def test_every_pipeline() -> None:
    assert [row[0] for row in table("| pipeline | what it does |")] == list(NAMES)


def test_the_tutorial(
    spark: Any, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ADDRESS in TUTORIAL
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = ""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", TUTORIAL, re.M | re.S):
        if language == "python":
            assert printed == "", f"not on the page: {printed}"
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                # Checkpoints are found by the JVM, whose folder is that of the whole run.
                text = block.replace(ADDRESS, broker.url).replace('"checkpoints/', f'"{tmp_path}/')
                exec(text, names)
            printed = said.getvalue()
        elif language == "text":
            assert printed == block
            printed = ""
        elif language == "sql":
            (tmp_path / "balances.sql").write_text(block)
        else:
            for command in block.splitlines():
                done = invoke(*shlex.split(command)[1:], TAILRACE_URL=broker.url)
                assert done.status == 0, (command, done.err)
    assert printed == ""
    assert names["spark"] is spark
