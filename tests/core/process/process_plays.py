"""Plays of processes: text files of events with the effects of each below it, in `tests/scenarios/processes`.

    begins | stored FACT, … | TAG: REPLY | TAG found RESULT | TAG due      an event
    anything else                                                         what the test of the process adds

Replies and results are Python, or what the test makes of them.

With `REWRITE_SCENARIOS=1` in the environment the effects are written anew; read the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from tailrace.core.collections.timing_wheel import HIGH, NEVER, ROW_BITS, in_order, ref_of
from tailrace.core.model import commands, facts, identifiers, queue_commands
from tailrace.core.model.group_commands import Membership
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

    def event(self, line: str) -> core.Event | None:
        """What happens in other words than those above."""
        ...

    def value(self, text: str) -> Any:
        """The value behind a reply or a result."""
        ...


def told(value: Any) -> str:
    """A value in one line, without the fields that have their default."""
    if isinstance(value, PublishBatch):
        keys = "" if value.view.keys is None else ", with keys"
        return f"a batch of {value.view.count}{keys}"
    if isinstance(value, Membership):
        owned = " ".join(f"{topic}/{number}" for topic, number, _ in value.owned) or "nothing"
        hungry = "".join(f", others wait for {topic}/{number}" for topic, number in value.hungry)
        return f"{value.state} with {owned}, version {value.version}{hungry}"
    if isinstance(value, Dead):
        return f"message {value.offset}"
    if isinstance(value, np.ndarray):
        return ", ".join(row_text(*row) for row in in_order(value)[:, :HIGH].tolist())
    if isinstance(value, msgspec.Struct):
        given = [
            f"{field.name}={told(found)}"
            for field in msgspec.structs.fields(value)
            if isinstance(found := getattr(value, field.name), np.ndarray) or found != _default(field)
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, list):
        return f"[{', '.join(told(item) for item in value)}]"
    return repr(value)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def row_text(at_us: int, ref: int) -> str:
    """A delayed message: entry and row, and when it is due."""
    if at_us == NEVER:
        return "the end"
    return f"{ref >> ROW_BITS}.{ref % ref_of(1, 0)} at {at_us / 1e6:g} s"


def named(tag: Any) -> str:
    """A tag as plays write it."""
    if isinstance(tag, str):
        return tag
    if hasattr(tag, "member"):
        return f"{tag.what} {tag.member}" + ("" if tag.place is None else f" on {tag.place}")
    return " ".join(
        str(part) for part in (tag.what, getattr(tag, "name", ""), getattr(tag, "place", "")) if part
    )


def shown(effect: core.Effect) -> str:
    """An effect in one line."""
    match effect:
        case core.Submit():
            sure = ", surely" if effect.sure else ""
            to = f"{effect.target} (topic {effect.topic_id}){sure}"
            return f"{named(effect.tag)}: to {to}: {told(effect.command)}"
        case core.Forget():
            return f"forget: up to {row_text(*effect.what)}"
        case core.Change() | core.Read():
            return f"{named(effect.tag)}: {told(effect.request)}"
        case core.After():
            return f"{named(effect.tag)}: after {effect.delay_us / 1e6:g} s"
        case core.AtWall():
            return f"{named(effect.tag)}: when the wall clock shows {effect.wall_us / 1e6:g} s"
        case core.Cancel():
            return f"{named(effect.tag)}: cancelled"
        case core.Respond():
            return f"{named(effect.tag)} is answered: {told(effect.reply)}"
        case core.Log():
            return f"{effect.level}: {effect.text}"
        case core.Count():
            return "a failure is counted"
        case core.Tell():
            what = effect.what
            return f"those who wait for {what} are told" if isinstance(what, str) else f"told: {what}"


def run(text: str, acts: Acts) -> str:
    """The play with the effects as they are."""
    lines = []
    tags: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if not line or line.startswith("#") or acts.act(line):
            continue
        effects = acts.process.step(acts.event(line) or _event(line, acts, tags), acts.now())
        tags |= {named(tag): tag for effect in effects if (tag := getattr(effect, "tag", None)) is not None}
        lines += [f"    {shown(effect)}" for effect in effects] or ["    nothing"]
    return "\n".join(lines) + "\n"


def _event(line: str, acts: Acts, tags: dict[str, Any]) -> core.Event:
    if line == "begins":
        return core.Begun()
    if line.startswith("stored "):
        return core.FactsStored(eval(f"[{line.removeprefix('stored ')}]", NAMES))
    if match := re.fullmatch(r"(.+) due", line):
        return core.Due(tags[match[1]])
    if match := re.fullmatch(r"(\w+) found (.*)", line):
        return core.Found(tags[match[1]], acts.value(match[2]))
    match = re.fullmatch(r"(.+?): (.*)", line)
    assert match is not None, f"what is {line!r}?"
    return core.Answered(tags[match[1]], acts.value(match[2]))


def python(text: str) -> Any:
    """A value that is written as Python."""
    return eval(text, NAMES)


def check_play(name: str, acts: Callable[[], Acts]) -> None:
    """Run a play, and compare it with what is written."""
    path = FOLDER / f"{name}.txt"
    text = path.read_text(encoding="utf-8")
    played = run(text, acts())
    if os.environ.get("REWRITE_SCENARIOS") == "1":
        path.write_text(played, encoding="utf-8")
    else:
        assert played == text
