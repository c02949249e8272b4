"""Plays of processes: text files of events with the effects of each below it, in `tests/scenarios/processes`.

    begins | stored FACT, … | TAG: REPLY | TAG found RESULT | TAG due      an event; values are Python
    anything else                                                         what the test of the process adds

With `REWRITE_SCENARIOS=1` in the environment the effects are written anew; read the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tailrace.core.model import commands, facts, identifiers, queue_commands
from tailrace.core.model.internal_commands import PublishBatch
from tailrace.core.process import process as core
from tailrace.core.queue.ledger_stats import Dead

FOLDER = Path(__file__).resolve().parents[2] / "scenarios" / "processes"
NAMES = {
    name: value
    for module in (commands, facts, identifiers, queue_commands)
    for name, value in vars(module).items()
    if isinstance(value, type)
}


class Acts(Protocol):
    """What the play of one process needs beside events."""

    process: core.Process

    def now(self) -> core.Now:
        """The world at this step."""
        ...

    def act(self, line: str) -> bool:
        """Change the world; false if the line is none of these acts, but an event."""
        ...

    def value(self, text: str) -> Any:
        """The value of a result in a play that is not plain Python."""
        ...


def told(value: Any) -> str:
    """A value in one line, without the fields that have their default."""
    if isinstance(value, PublishBatch):
        keys = "" if value.view.keys is None else ", with keys"
        return f"a batch of {value.view.count}{keys}"
    if isinstance(value, Dead):
        return f"message {value.offset}"
    if isinstance(value, msgspec.Struct):
        given = [
            f"{field.name}={told(found)}"
            for field in msgspec.structs.fields(value)
            if (found := getattr(value, field.name)) != field.default
            and not (field.default_factory is not msgspec.NODEFAULT and found == field.default_factory())
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, list):
        return f"[{', '.join(told(item) for item in value)}]"
    return repr(value)


def shown(effect: core.Effect) -> str:
    """An effect in one line."""
    match effect:
        case core.Submit():
            sure = ", surely" if effect.sure else ""
            to = f"{effect.target} (topic {effect.topic_id}){sure}"
            return f"{effect.tag}: to {to}: {told(effect.command)}"
        case core.Change() | core.Read():
            return f"{effect.tag}: {told(effect.request)}"
        case core.After():
            return f"{effect.tag}: after {effect.delay_us / 1e6:g} s"
        case core.Log():
            return f"{effect.level}: {effect.text}"
        case core.Count():
            return "a failure is counted"


def run(text: str, acts: Acts) -> str:
    """The play with the effects as they are."""
    lines = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if not line or line.startswith("#") or acts.act(line):
            continue
        effects = acts.process.step(_event(line, acts), acts.now())
        lines += [f"    {shown(effect)}" for effect in effects] or ["    nothing"]
    return "\n".join(lines) + "\n"


def _event(line: str, acts: Acts) -> core.Event:
    if line == "begins":
        return core.Begun()
    if line.startswith("stored "):
        return core.FactsStored(eval(f"[{line.removeprefix('stored ')}]", NAMES))
    if match := re.fullmatch(r"(\w+) due", line):
        return core.Due(match[1])
    if match := re.fullmatch(r"(\w+) found (.*)", line):
        return core.Found(match[1], acts.value(match[2]))
    match = re.fullmatch(r"(\w+): (.*)", line)
    assert match is not None, f"what is {line!r}?"
    return core.Answered(match[1], eval(match[2], NAMES))


def check_play(name: str, acts: Callable[[], Acts]) -> None:
    """Run a play, and compare it with what is written."""
    path = FOLDER / f"{name}.txt"
    text = path.read_text(encoding="utf-8")
    played = run(text, acts())
    if os.environ.get("REWRITE_SCENARIOS") == "1":
        path.write_text(played, encoding="utf-8")
    else:
        assert played == text
