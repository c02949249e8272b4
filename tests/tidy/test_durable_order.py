"""The page on what is durable before what names facts, worlds and tests that exist."""

import re
from pathlib import Path

from tailrace.core.model import facts, group_facts
from tailrace.core.staged import staged_versions
from tailrace.sim.__main__ import WORLDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## What is durable before what\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in row.strip("|").split(" | ")] for row in SECTION.splitlines() if row[:2] == "| "
]


def test_every_promise_names_who_cuts_it() -> None:
    promises = ROWS[1:]
    assert len(promises) >= 15
    for promise, _, cut in promises:
        files = re.findall(r"`(tests/[\w/]+\.py)`", cut)
        worlds = [
            name
            for listed in re.findall(r"worlds? ((?:`\w+`(?:, )?)+)", cut)
            for name in re.findall(r"\w+", listed)
        ]
        assert files or worlds, promise
        assert all((ROOT / name).exists() for name in files), promise
        assert set(worlds) <= set(WORLDS), promise


def test_the_facts_that_it_names_exist() -> None:
    named = {name for row in ROWS[1:] for name in re.findall(r"`([A-Z]\w+)`", row[1])}
    assert len(named) > 12
    modules = (facts, group_facts, staged_versions)
    assert {name for name in named if not any(hasattr(module, name) for module in modules)} == set()
