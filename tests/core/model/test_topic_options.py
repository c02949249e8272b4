"""Topic names, options at their bounds, what may be altered, and folders.

Also covers `core/option_rules.py`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import (
    BOUNDS,
    FOLDER_MAX,
    LIMITS,
    NAME_MAX,
    RANGES,
    TopicOptions,
    check_name,
    decode_folder,
    encode_folder,
    parse_options,
)

NAMES = st.from_regex(r"[A-Za-z0-9._/-]{1,245}", fullmatch=True).filter(lambda name: not check_name(name))


def accepted(options: dict[str, Any], base: TopicOptions | None = None) -> TopicOptions:
    outcome = parse_options(options, "t", base)
    assert isinstance(outcome, TopicOptions), outcome
    return outcome


def problems(options: dict[str, Any], name: str = "t", base: TopicOptions | None = None) -> list[str]:
    outcome = parse_options(options, name, base)
    assert isinstance(outcome, Refusal), outcome
    assert outcome.code == "invalid_request"
    found: list[str] = outcome.details["problems"]
    assert all(problem in outcome.message for problem in found)
    return found


def test_defaults() -> None:
    assert accepted({}) == TopicOptions()
    assert msgspec.structs.asdict(TopicOptions()) == {
        "partitions": 3,
        "durability": "fsync",
        "sync_interval_ms": 1000,
        "storage": "file",
        "retention_ms": None,
        "retention_bytes": None,
        "retention_count": None,
        "message_bytes_max": 1048576,
        "key_index": False,
        "key_index_max": 10_000_000,
        "dedup_window_ms": 120_000,
        "dedup_max": 1_000_000,
        "ring_buffer_bytes": 4194304,
        "batch_size": 500,
        "replicas": 1,
        "ephemeral": False,
        "max_bytes": None,
        "max_messages": None,
        "on_full": "refuse",
        "trace_retention_ms": 7 * 24 * 3_600_000,
    }


@pytest.mark.parametrize("option", sorted(RANGES))
def test_numbers_are_accepted_within_their_bounds_only(option: str) -> None:
    low, high = RANGES[option]
    base = TopicOptions(ephemeral=True) if option in BOUNDS else None
    assert getattr(accepted({option: low}, base), option) == low
    assert getattr(accepted({option: high}, base), option) == high
    for wrong in (low - 1, high + 1, 1 << 80):
        (problem,) = problems({option: wrong})
        assert problem.startswith(option)
    others: list[Any] = ["5", 5.0, True, [5], {}]
    for other in others:
        (problem,) = problems({option: other})
        assert problem.startswith(option)
    if option not in LIMITS:
        assert problems({option: None})


@pytest.mark.parametrize("option", LIMITS)
def test_limits_can_be_none(option: str) -> None:
    assert getattr(accepted({option: None}), option) is None


@pytest.mark.parametrize("option", ["key_index", "ephemeral"])
@pytest.mark.parametrize(("given", "stored"), [("on", True), ("off", False), (True, True), (False, False)])
def test_switches_are_on_or_off(option: str, given: Any, stored: bool) -> None:
    assert getattr(accepted({option: given}), option) is stored


@pytest.mark.parametrize("option", ["key_index", "ephemeral"])
@pytest.mark.parametrize("wrong", ["yes", 1, None, [], "ON"])
def test_switches_are_nothing_else(option: str, wrong: Any) -> None:
    assert problems({option: wrong}) == [f"{option} is on or off, not {wrong!r}"]


def test_memory_storage_has_memory_durability() -> None:
    assert accepted({"storage": "memory"}).durability == "memory"
    assert accepted({"storage": "memory", "durability": "memory"}).storage == "memory"
    assert accepted({"durability": "interval"}).storage == "file"
    for pair in ({"durability": "memory"}, {"storage": "memory", "durability": "fsync"}):
        (problem,) = problems(pair)
        assert "does not go with" in problem


@pytest.mark.parametrize(
    ("option", "value"),
    [("retention", "compact"), ("storage", "lmdb"), ("replicas", 3)],
)
def test_what_comes_later_says_so(option: str, value: Any) -> None:
    assert problems({option: value}) == [f"{option} = {value!r} is not supported yet"]


def test_retention() -> None:
    assert accepted({"retention": "forever"}) == TopicOptions()
    both = accepted({"retention_ms": 1, "retention_bytes": 2, "retention_count": 3})
    assert (both.retention_ms, both.retention_bytes, both.retention_count) == (1, 2, 3)
    assert accepted({"retention": "forever"}, both) == TopicOptions()
    assert problems({"retention": "forever", "retention_ms": 5}) == [
        "retention = 'forever' contradicts retention_ms"
    ]
    assert problems({"retention": "never"}) == ["retention is 'forever' or 'ephemeral', not 'never'"]


def test_ephemeral_retention_goes_with_limits_and_bounds() -> None:
    plain = accepted({"retention": "ephemeral"})
    assert plain == TopicOptions(ephemeral=True)
    ring = accepted({"max_bytes": 9, "max_messages": 5, "on_full": "overwrite", "retention_ms": 7}, plain)
    assert (ring.ephemeral, ring.max_bytes, ring.max_messages, ring.on_full) == (True, 9, 5, "overwrite")
    assert ring.retention_ms == 7
    assert accepted({"retention": "forever"}, ring) == TopicOptions()
    assert accepted({"max_bytes": None}, ring).max_messages == 5
    assert accepted({"retention": "ephemeral"}, ring) == ring


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_bytes": 5}, "max_bytes needs retention = 'ephemeral'"),
        ({"max_messages": 5, "ephemeral": False}, "max_messages needs retention = 'ephemeral'"),
        (
            {"retention": "ephemeral", "on_full": "overwrite"},
            "on_full = 'overwrite' needs max_bytes or max_messages",
        ),
        (
            {"retention": "ephemeral", "ephemeral": "off"},
            "retention = 'ephemeral' contradicts ephemeral = off",
        ),
        (
            {"retention": "forever", "ephemeral": "on", "max_messages": 5, "on_full": "overwrite"},
            "retention = 'forever' contradicts max_messages, ephemeral, on_full",
        ),
        ({"on_full": "wait"}, "on_full is 'refuse' or 'overwrite', not 'wait'"),
    ],
)
def test_what_does_not_go_with_retention(options: dict[str, Any], problem: str) -> None:
    assert problems(options) == [problem]


def test_every_problem_is_reported_at_once() -> None:
    found = problems({"partitons": 3, "durability": 7, "batch_size": 0, "x": 1, "storage": "tape"}, "a//b c")
    assert found == [
        "the name may have only letters, digits, '.', '_', '-' and '/'",
        "the name has an empty, '.' or '..' segment",
        "unknown option 'partitons': did you mean 'partitions'?",
        "durability is 'fsync' or 'interval' or 'memory', not 7",
        "batch_size is from 1 to 100000, not 0",
        "unknown option 'x'",
        "storage is 'file' or 'memory', not 'tape'",
    ]


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    (problem,) = problems({"durability": "x" * 10_000})
    assert len(problem) < 200
    outcome = parse_options({}, "x" * 10_000)
    assert isinstance(outcome, Refusal)
    assert len(outcome.message) < 200


@pytest.mark.parametrize(
    "name", ["a", "A.b_c-d/e", "...", "a" * NAME_MAX, "a/.b", "0", "-", "a_", "orders/eu/.dlq"]
)
def test_good_names(name: str) -> None:
    assert check_name(name) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * (NAME_MAX + 1),
        ".",
        "..",
        "a/",
        "/a",
        "a//b",
        "a/../b",
        "a/.",
        "a b",
        "é",
        "a\n",
        "a,b",
        "a~1",
    ],
)
def test_bad_names(name: str) -> None:
    assert check_name(name)
    assert problems({}, name)


def test_internal_names() -> None:
    assert problems({}, "_groups") == ["names with a leading '_' are internal"]
    assert parse_options({}, "_groups", internal=True) == TopicOptions()


def test_alter() -> None:
    base = accepted({"partitions": 5, "key_index": "on"})
    assert accepted({"partitions": 6}, base).partitions == 6
    assert accepted({"partitions": 5, "key_index": True, "storage": "file"}, base) == base
    assert accepted({"durability": "interval"}, base).durability == "interval"
    assert problems({"partitions": 4, "key_index": "off", "storage": "memory"}, base=base) == [
        "storage cannot change: it is 'file'",
        "key_index cannot change: it is True",
        "partitions only grow: there are 5",
        "durability = 'fsync' does not go with storage = 'memory': "
        "the memory engine has memory durability, and only it has",
    ]
    memory = accepted({"storage": "memory"})
    assert "does not go with" in problems({"durability": "fsync"}, base=memory)[0]


def test_what_a_topic_shows_creates_its_like() -> None:
    options = accepted({"retention_ms": 5, "key_index": "on", "partitions": 7})
    assert accepted(msgspec.structs.asdict(options)) == options


@given(NAMES, st.integers(0, 36**9 - 1))
def test_folders_can_be_read_back(name: str, number: int) -> None:
    folder = encode_folder(name, number)
    assert decode_folder(folder) == (name, number)
    assert len(folder.encode()) <= FOLDER_MAX
    assert re.fullmatch(r"[A-Za-z0-9._,~-]+", folder)


def test_folders_differ_where_case_does_not_count() -> None:
    assert encode_folder("Orders", 1).casefold() != encode_folder("orders", 2).casefold()
    assert encode_folder("orders", 1) != encode_folder("orders", 2)
    assert encode_folder("a/b.c", 0) == "a,b.c~0"
