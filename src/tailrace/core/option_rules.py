"""The rule book for single options, of topics and of groups: which there are, and what each may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple


def _nothing(option: str, given: Any) -> str | None:
    return None


class OptionRules(NamedTuple):
    """One rule book. What is neither a switch nor a choice is a whole number in a range."""

    known: tuple[str, ...]
    ranges: Mapping[str, tuple[int, int]]
    choices: Mapping[str, tuple[str, ...]]
    switches: tuple[str, ...]
    """Options that are true or false."""
    words: Mapping[str, bool]
    """What a switch may be called; the first two are named in refusals."""
    unlimited: tuple[str, ...] = ()
    """Options that may be None: no such limit."""
    objection: Callable[[str, Any], str | None] = _nothing
    """What else is wrong with a value, told before anything else."""

    def check(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The values as stored, and all problems with the others."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for option, given in options.items():
            value, problem = self._value(option, given)
            if problem:
                problems.append(problem)
            else:
                values[option] = value
        return values, problems

    def _value(self, option: str, given: Any) -> tuple[Any, str | None]:
        """The value as stored, or the problem with it."""
        if option not in self.known:
            close = get_close_matches(option, self.known, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            return None, f"unknown option {option[:80]!r}{hint}"
        if objection := self.objection(option, given):
            return None, objection
        if option in self.switches:
            if isinstance(given, str) and given in self.words:
                given = self.words[given]
            names = " or ".join([*self.words][:2])
            return given, None if isinstance(given, bool) else f"{option} is {names}, not {_shown(given)}"
        if option in self.choices:
            allowed = self.choices[option]
            if isinstance(given, str) and given in allowed:
                return given, None
            return None, f"{option} is {' or '.join(map(repr, allowed))}, not {_shown(given)}"
        if given is None and option in self.unlimited:
            return None, None
        low, high = self.ranges[option]
        if type(given) is not int:
            return None, f"{option} is a whole number, not {_shown(given)}"
        if not low <= given <= high:
            bounds = f"{low}" if low == high else f"from {low} to {high}"
            return None, f"{option} is {bounds}, not {_shown(given)}"
        return given, None


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."
