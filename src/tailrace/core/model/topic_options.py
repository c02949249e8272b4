"""Topics: rules for their names, their options with defaults and bounds, and the folder of their data.

`parse_options` reports all problems at once, so that a user can fix a request in one go. `RULES` is the whole
rule book for single options; rules about two options are checked in `_together`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tailrace.core.model.identifiers import BATCH_ROWS_MAX, VALUE_BYTES_MAX, Refusal
from tailrace.core.option_rules import OptionRules
from tailrace.errors import InvalidRequest

NAME_MAX = 245
DEAD_LETTERS = ".dlq"
"""Suffix of the name of a topic's dead-letter topic; names leave room for it."""
FOLDER_MAX = 255
_NAME = re.compile(r"[A-Za-z0-9._/-]+")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

# Least demanding first: `acks` on publish may ask for less than the topic's durability, never for more.
DURABILITIES = ("memory", "interval", "fsync")


class TopicOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a topic, all of them checked. Messages are kept for ever, unless the topic has a
    `retention_*` limit or is `ephemeral`."""

    partitions: int = 3
    durability: str = "fsync"
    sync_interval_ms: int = 1000
    storage: str = "file"
    retention_ms: int | None = None
    retention_bytes: int | None = None
    retention_count: int | None = None
    message_bytes_max: int = 1024 * 1024
    key_index: bool = False
    key_index_max: int = 10_000_000
    dedup_window_ms: int = 120_000
    dedup_max: int = 1_000_000
    ring_buffer_bytes: int = 4 * 1024 * 1024
    batch_size: int = 500
    replicas: int = 1
    ephemeral: bool = False
    max_bytes: int | None = None
    max_messages: int | None = None
    on_full: str = "refuse"
    trace_retention_ms: int = 7 * 86_400_000


_MANY = (1 << 53) - 1  # The greatest number that every JSON reader holds exactly.

RANGES: dict[str, tuple[int, int]] = {
    "partitions": (1, 10_000),
    "sync_interval_ms": (1, 3_600_000),
    "trace_retention_ms": (1, _MANY),
    "retention_ms": (1, _MANY),
    "retention_bytes": (1, _MANY),
    "retention_count": (1, _MANY),
    "message_bytes_max": (1, VALUE_BYTES_MAX),
    "key_index_max": (1, 1_000_000_000),
    "dedup_window_ms": (1, 30 * 24 * 3_600_000),
    "dedup_max": (1, 100_000_000),
    "ring_buffer_bytes": (0, 1 << 30),
    "batch_size": (1, BATCH_ROWS_MAX),
    "replicas": (1, 1),
    "max_bytes": (1, _MANY),
    "max_messages": (1, _MANY),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "durability": ("fsync", "interval", "memory"),
    "storage": ("file", "memory"),
    "retention": ("forever", "ephemeral"),
    "on_full": ("refuse", "overwrite"),
}
SWITCHES: dict[str, bool] = {"on": True, "off": False}
NOT_YET: dict[str, tuple[Any, ...]] = {
    "retention": ("compact",),
    "storage": ("lmdb", "postgres", "redis"),
    "replicas": (2, 3, 5, 7),
}
BOUNDS = ("max_bytes", "max_messages")
"""Options that make an ephemeral topic a ring."""
LIMITS = ("retention_ms", "retention_bytes", "retention_count", *BOUNDS)
"""Options that may be None: no such limit."""
FIXED = ("storage", "key_index")
"""Options that cannot change after the topic was created."""


def _not_yet(option: str, given: Any) -> str | None:
    if any(type(given) is type(value) and given == value for value in NOT_YET.get(option, ())):
        return f"{option} = {given!r} is not supported yet"
    return None


RULES = OptionRules(
    (*TopicOptions.__struct_fields__, "retention"),
    RANGES,
    CHOICES,
    ("key_index", "ephemeral"),
    SWITCHES,
    LIMITS,
    _not_yet,
)


def check_name(name: str, *, internal: bool = False) -> list[str]:
    """All problems with a topic name; internal names (leading `_`) are for the broker itself."""
    problems = []
    room = len(DEAD_LETTERS) if internal and name.endswith(DEAD_LETTERS) else 0
    if not 1 <= len(name) <= NAME_MAX + room:
        problems.append(f"the name has {len(name)} characters: 1 to {NAME_MAX} are allowed")
    if name and not _NAME.fullmatch(name):
        problems.append("the name may have only letters, digits, '.', '_', '-' and '/'")
    if name and any(segment in ("", ".", "..") for segment in name.split("/")):
        problems.append("the name has an empty, '.' or '..' segment")
    if name.startswith("_") and not internal:
        problems.append("names with a leading '_' are internal")
    return problems


def parse_options(
    options: dict[str, Any], name: str, base: TopicOptions | None = None, *, internal: bool = False
) -> TopicOptions | Refusal:
    """Check the options of a new topic, and its name; or, with `base`, changes to a topic with these
    options."""
    problems = [] if base is not None else check_name(name, internal=internal)
    values, wrong = RULES.check(options)
    problems += wrong
    if "retention" in values:
        problems += _retention(values)
    # If single options are wrong, reporting that they do not fit the others would only confuse.
    if not problems:
        problems += _together(values, base)
    if problems:
        shown = name if len(name) <= 80 else name[:77] + "..."
        text = f"topic {shown!r}: " + "; ".join(problems)
        return Refusal(InvalidRequest.code, text, details={"problems": problems})
    return msgspec.structs.replace(base or TopicOptions(), **values)


def _retention(values: dict[str, Any]) -> list[str]:
    """Replace `retention` by other options: "ephemeral" sets `ephemeral`; "forever" unsets it and all limits,
    so that a limit beside it is a contradiction."""
    if values.pop("retention") == "ephemeral":
        off = values.get("ephemeral") is False
        values["ephemeral"] = True
        return ["retention = 'ephemeral' contradicts ephemeral = off"] if off else []
    forever = dict.fromkeys(LIMITS) | {"ephemeral": False, "on_full": "refuse"}
    others = [option for option, value in forever.items() if values.get(option, value) != value]
    values.update(forever)
    return [f"retention = 'forever' contradicts {', '.join(others)}"] if others else []


def _together(values: dict[str, Any], base: TopicOptions | None) -> list[str]:
    """Problems between options, and with changes of options that are fixed."""
    problems = []
    if base is None:
        if values.get("storage") == "memory":
            values.setdefault("durability", "memory")
        base = TopicOptions()
    else:
        problems = [
            f"{option} cannot change: it is {getattr(base, option)!r}"
            for option in FIXED
            if values.get(option, getattr(base, option)) != getattr(base, option)
        ]
        if values.get("partitions", base.partitions) < base.partitions:
            problems.append(f"partitions only grow: there are {base.partitions}")
    after = msgspec.structs.replace(base, **values)
    if (after.storage == "memory") != (after.durability == "memory"):
        text = f"durability = {after.durability!r} does not go with storage = {after.storage!r}"
        problems.append(text + ": the memory engine has memory durability, and only it has")
    bounds = [option for option in BOUNDS if getattr(after, option) is not None]
    if not after.ephemeral:
        problems += [f"{option} needs retention = 'ephemeral'" for option in bounds]
    if after.on_full != "refuse" and not bounds:
        problems.append(f"on_full = {after.on_full!r} needs max_bytes or max_messages")
    return problems


def encode_folder(name: str, topic_id: int) -> str:
    """The folder of a topic's data.

    The id gives a new folder to a topic that is created again, and different folders to names that differ
    only in case.
    """
    digits = ""
    while topic_id or not digits:
        topic_id, digit = divmod(topic_id, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    folder = f"{name.replace('/', ',')}~{digits}"
    assert len(folder) <= FOLDER_MAX, f"folder name {folder!r} is too long"
    return folder


def decode_folder(folder: str) -> tuple[str, int]:
    """The name and id of the topic of a folder."""
    name, _, digits = folder.rpartition("~")
    return name.replace(",", "/"), int(digits, len(_DIGITS))
