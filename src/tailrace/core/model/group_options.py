"""Options of a group: their rules, their defaults, and the check that reports all problems at once.

`RULES` is the whole rule book for single options; rules about two options are checked in `_together`. Options
that are allowed but have surprising effects give warnings, shown when the group is created.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.model.identifiers import Refusal
from tailrace.core.option_rules import OptionRules
from tailrace.errors import InvalidRequest

REDRIVE_GROUP = "_redrive"
"""The internal group that remembers which dead letters were sent back or purged."""
REDRIVE_OPTIONS: dict[str, Any] = {
    "assignment": "shared",
    "ordering": "none",
    "max_attempts": 1_000_000,
    "in_flight_max": 1_000_000,
    "group_in_flight_max": 1_000_000,
}


class GroupPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a group, all of them checked."""

    mode: str = "queue"
    assignment: str = "auto"
    ordering: str = "key"
    start: str = "earliest"
    lease_ms: int = 30_000
    max_attempts: int = 5
    max_deliveries: int = 20
    """Deliveries of one message, not counting those given back unstarted; 0: no limit. Never below
    `max_attempts`."""
    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000
    in_flight_max: int = 10_000
    group_in_flight_max: int = 100_000
    priority_mode: str = "weighted"
    starvation_ms: int = 30_000
    expired_to_dlq: bool = False
    session_ms: int = 30_000
    reconnect_grace_ms: int = 3_000
    heartbeat_ms: int = 3_000
    revoke_timeout_ms: int = 60_000


_DAY_MS = 24 * 3_600_000

RANGES: dict[str, tuple[int, int]] = {
    "lease_ms": (10, 7 * _DAY_MS),
    "max_attempts": (1, 1_000_000),
    "max_deliveries": (0, 1_000_000),
    "backoff_ms": (0, 7 * _DAY_MS),
    "backoff_max_ms": (0, 7 * _DAY_MS),
    "in_flight_max": (1, 1_000_000),
    "group_in_flight_max": (1, 10_000_000),
    "starvation_ms": (1, 7 * _DAY_MS),
    "session_ms": (100, 3_600_000),
    "reconnect_grace_ms": (0, 3_600_000),
    "heartbeat_ms": (10, 600_000),
    "revoke_timeout_ms": (0, 3_600_000),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("queue", "exclusive", "stream"),
    "assignment": ("auto", "partitions", "shared"),
    "ordering": ("none", "key", "partition"),
    "start": ("earliest", "latest"),
    "priority_mode": ("weighted", "strict"),
}
SWITCHES: dict[str, bool] = {"true": True, "false": False, "on": True, "off": False}

AT_MOST: tuple[tuple[str, str], ...] = (
    ("backoff_ms", "backoff_max_ms"),
    ("in_flight_max", "group_in_flight_max"),
    ("heartbeat_ms", "session_ms"),
    ("reconnect_grace_ms", "session_ms"),
)
"""Pairs of options whose first may not be greater than the second. If only one of a pair is given, and it
passes the default of the other, the other moves with it."""

FIXED = ("mode", "ordering")
"""Options that a group keeps for good: promises about messages in flight depend on them."""

_KNOWN = GroupPolicy.__struct_fields__


def _no_group(option: str, given: Any) -> str | None:
    if option == "mode" and given == "broadcast":
        return "mode = 'broadcast' has no group: a reader keeps its own place"
    return None


RULES = OptionRules(_KNOWN, RANGES, CHOICES, ("expired_to_dlq",), SWITCHES, objection=_no_group)
_LEASING = (
    "ordering",
    "lease_ms",
    "max_attempts",
    "max_deliveries",
    "backoff_ms",
    "backoff_max_ms",
    "in_flight_max",
    "group_in_flight_max",
    "priority_mode",
    "starvation_ms",
    "expired_to_dlq",
)


def parse_policy(options: dict[str, Any], name: str = "") -> GroupPolicy | Refusal:
    """Check the options of a group; a refusal lists all problems with them."""
    values, problems = RULES.check(options)
    # If single options are wrong, reporting that they do not fit the others would only confuse.
    if not problems:
        problems = _together(values)
    if problems:
        shown = f"group {name[:80]!r}: " if name else ""
        return Refusal(InvalidRequest.code, shown + "; ".join(problems), details={"problems": problems})
    return GroupPolicy(**values)


def warnings_of(policy: GroupPolicy) -> list[str]:
    """Surprising effects of allowed options, to be shown when the group is created."""
    default = GroupPolicy()
    given = [option for option in _LEASING if getattr(policy, option) != getattr(default, option)]
    if policy.mode == "stream":
        ignored = f"a stream group reads the log as it is: {', '.join(given)} has no effect"
        return [ignored] if given else []
    warnings = []
    if policy.ordering == "partition":
        warnings.append("ordering = 'partition' is strict: priorities are ignored")
        if policy.assignment == "shared":
            warnings.append(
                "ordering = 'partition' with assignment = 'shared': of each partition only one member has "
                "messages at a time"
            )
    return warnings


def altered(policy: GroupPolicy, options: dict[str, Any], name: str) -> GroupPolicy | Refusal:
    """The options of a group after some of them were changed; a refusal lists all problems.

    An option that still has its default moves along if a pair of `AT_MOST` demands it."""
    fixed = [option for option in FIXED if option in options]
    if fixed:
        problems = [
            f"{option} is {getattr(policy, option)!r} and cannot be changed: "
            "delete the group, or make another one"
            for option in fixed
        ]
        text = f"group {name[:80]!r}: " + "; ".join(problems)
        return Refusal(InvalidRequest.code, text, details={"problems": problems})
    default = GroupPolicy()
    chosen = {option: getattr(policy, option) for option in _KNOWN}
    chosen = {option: value for option, value in chosen.items() if value != getattr(default, option)}
    return parse_policy({**chosen, **options}, name)


def contradictions(policy: GroupPolicy, options: dict[str, Any], name: str) -> Refusal | None:
    """Why a group with this policy contradicts these options, which were checked before; None if it does
    not."""
    wanted = parse_policy(options, name)
    if isinstance(wanted, Refusal):
        return wanted
    others = [option for option in options if getattr(policy, option) != getattr(wanted, option)]
    if not others:
        return None
    problems = [
        f"{option} is {getattr(policy, option)!r}, not {getattr(wanted, option)!r}" for option in others
    ]
    text = f"group {name!r} exists with other options: " + "; ".join(problems) + ". Leave them out"
    changed = " ".join(f"-o {option}={getattr(wanted, option)}" for option in others if option not in FIXED)
    if changed:
        text += f", or change the group: tailrace group alter {name} {changed}"
    if fixed := [option for option in others if option in FIXED]:
        text += f" ({' and '.join(fixed)} cannot be changed: for that, use another group)"
    return Refusal(InvalidRequest.code, text, details={"problems": problems})


def _together(values: dict[str, Any]) -> list[str]:
    """Problems between options."""
    problems = []
    mode = values.get("mode", "queue")
    if mode != "queue" and values.get("assignment") == "shared":
        problems.append(
            f"assignment = 'shared' does not go with mode = {mode!r}: it has one owner a partition"
        )
    default = GroupPolicy()
    for low, high in AT_MOST:
        least, most = (values.get(option, getattr(default, option)) for option in (low, high))
        if least <= most:
            continue
        if low in values and high in values:
            problems.append(f"{low} = {least} is more than {high} = {most}")
        elif low in values:
            values[high] = min(least, RANGES[high][1])
        else:
            values[low] = most
    attempts = values.get("max_attempts", default.max_attempts)
    deliveries = values.get("max_deliveries", max(attempts, default.max_deliveries))
    if 0 < deliveries < attempts:
        problems.append(
            f"max_deliveries = {deliveries} is less than max_attempts = {attempts}: every attempt is a "
            "delivery (0 means no limit)"
        )
    else:
        values["max_deliveries"] = deliveries
    return problems
