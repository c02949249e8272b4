"""The pages say what the code does: errors, options, metrics, commands, the first program, links.

Covers `errors.py`.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tailrace.broker.metrics import Metrics
from tailrace.bus.outcomes import TABLE, AckPolicy, Act, Outcome
from tailrace.cli.app import app
from tailrace.core.model.group_options import AT_MOST, CHOICES, RANGES, GroupPolicy
from tailrace.core.model.topic_options import TopicOptions
from tailrace.errors import BY_CODE, EDGES
from tailrace.testing import LocalBroker

DOCS = Path(__file__).parents[1] / "docs"


def rows(page: str, first: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this heading, by their first cell without ticks."""
    text = (DOCS / page).read_text(encoding="utf-8")
    table = re.search(rf"^\| {first} \|.*\n\|[-:|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, first
    cells = [line.strip("| \n").split(" | ") for line in table.group(1).splitlines()]
    return {row[0].strip("`"): [cell.strip("` ") for cell in row[1:]] for row in cells}


def test_every_error_and_its_edges() -> None:
    table = rows("semantics.md", "code")
    assert list(table) == list(EDGES)
    for code, edge in EDGES.items():
        kind = BY_CODE[code]
        expected = ["yes" if kind.retriable else "no", kind.default_outcome, str(edge.http), edge.grpc]
        assert table[code][:6] == [*expected, f"0x{edge.mqtt:02X}", str(edge.exit)], code


def test_every_option_of_topics() -> None:
    assert list(rows("semantics.md", "option")) == list(TopicOptions.__struct_fields__)


def test_every_option_of_groups() -> None:
    table = rows("semantics.md", "option of a group")
    policy = GroupPolicy()
    assert list(table) == list(GroupPolicy.__struct_fields__)
    for option, (default, allowed, _) in table.items():
        value = getattr(policy, option)
        if option in RANGES:
            low, high = RANGES[option]
            assert (default, allowed) == (f"{value:,}", f"{low:,} to {high:,}"), option
        elif option in CHOICES:
            assert (default, allowed.replace("`", "")) == (value, ", ".join(CHOICES[option])), option
        else:
            assert (default, allowed, value) == ("off", "on, off", False), option


def test_pairs_of_options_of_groups() -> None:
    text = re.sub(r"\s+", " ", (DOCS / "semantics.md").read_text(encoding="utf-8"))
    (sentence,) = re.findall(r"`backoff_ms` may not be above [^;]*;", text)
    for low, high in AT_MOST:
        assert re.search(rf"`{low}`[^,]* above `{high}`", sentence), (low, high)
    assert "`max_deliveries` may not be below `max_attempts`" in text


def test_every_metric() -> None:
    metrics = Metrics()
    rendered = {
        line.split()[2]
        for line in metrics.render().decode("utf-8").splitlines()
        if line.startswith("# TYPE tailrace_")
    }
    listed = {name for name in rows("operations.md", "metric") if name.startswith("tailrace_")}
    assert listed == rendered


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[str]:
    """The commands below a command, by what has to be typed."""
    below = getattr(command, "commands", None)
    if below is None:
        return [" ".join(path)]
    return [leaf for name, child in below.items() for leaf in leaves(child, (*path, name))]


def test_every_command() -> None:
    listed = []
    for cell in rows("operations.md", "command"):
        first, *others = [name.strip("` ") for name in cell.split(",")]
        listed += [first, *(f"{first.split()[0]} {other}" if " " in first else other for other in others)]
    assert sorted(listed) == sorted(leaves(typer.main.get_command(app)))


def test_the_first_program(tailrace_broker: LocalBroker, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    address = "tailrace://127.0.0.1:7400"
    assert address in program
    exec(program.replace(address, tailrace_broker.url), {})
    assert capsys.readouterr().out == "0 b'hello' attempt 1\n"
    assert tailrace_broker.group("billing").lag == 0


def anchors(path: Path) -> set[str]:
    """What can be linked to on a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    root = DOCS.parent
    for page in [*root.glob("*.md"), *DOCS.rglob("*.md"), root / "tests" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]*(?:#[^)]*)?)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if "://" in name:
                continue
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


def test_every_policy_of_the_bus() -> None:
    words = {
        Act.ACK: "ack",
        Act.NACK: "nack",
        Act.REJECT: "reject",
        Act.GIVE_BACK: "given back",
        Act.NOTHING: "the handler settles",
    }
    listed = {name.split("`")[0]: cells for name, cells in rows("semantics.md", "policy").items()}
    assert list(listed) == [policy.name for policy in AckPolicy]
    assert listed.pop("ACK_FIRST") == ["acked before the call", *"––––"]
    for name, cells in listed.items():
        assert cells == [words[TABLE[AckPolicy[name]][outcome]] for outcome in Outcome], name
