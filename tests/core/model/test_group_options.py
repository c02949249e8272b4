"""Options of groups: every problem at once, and what is allowed but surprising."""

from typing import Any

import pytest

from tailrace.core.model.group_options import (
    CHOICES,
    RANGES,
    GroupPolicy,
    contradictions,
    parse_policy,
    warnings_of,
)
from tailrace.core.model.identifiers import Refusal


def problems(**options: Any) -> list[str]:
    refusal = parse_policy(options, "g")
    assert isinstance(refusal, Refusal)
    assert refusal.code == "invalid_request"
    found: list[str] = refusal.details["problems"]
    return found


def test_every_option_has_a_rule() -> None:
    ruled = {*RANGES, *CHOICES, "expired_to_dlq"}
    assert ruled == set(GroupPolicy.__struct_fields__)


def test_the_defaults_are_allowed_and_nothing_to_warn_of() -> None:
    defaults = {field: getattr(GroupPolicy(), field) for field in GroupPolicy.__struct_fields__}
    assert parse_policy(defaults) == parse_policy({}) == GroupPolicy()
    assert warnings_of(GroupPolicy()) == []


def test_every_problem_is_reported_at_once() -> None:
    found = problems(lease_ms=0, orderin="key", mode="broadcast", max_attempts="5", expired_to_dlq=1)
    assert len(found) == 5
    assert any("did you mean 'ordering'" in problem for problem in found)
    assert any("has no group" in problem for problem in found)
    assert any("lease_ms is from 10 to" in problem for problem in found)
    assert any("whole number, not '5'" in problem for problem in found)
    assert any("true or false, not 1" in problem for problem in found)


@pytest.mark.parametrize("option", RANGES)
def test_ranges_hold_at_both_ends(option: str) -> None:
    low, high = RANGES[option]
    for value in (low, high):
        policy = parse_policy({option: value})
        assert isinstance(policy, GroupPolicy)
        assert getattr(policy, option) == value
    for value in (low - 1, high + 1):
        assert problems(**{option: value})
    assert "whole number" in problems(**{option: True})[0]


@pytest.mark.parametrize("option", CHOICES)
def test_choices(option: str) -> None:
    for value in CHOICES[option]:
        assert isinstance(parse_policy({option: value}), GroupPolicy)
    assert repr(CHOICES[option][0]) in problems(**{option: "other"})[0]


def test_options_that_do_not_go_together() -> None:
    assert "shared" in problems(mode="stream", assignment="shared")[0]
    assert "shared" in problems(mode="exclusive", assignment="shared")[0]
    assert problems(backoff_ms=10, backoff_max_ms=5) == ["backoff_ms = 10 is more than backoff_max_ms = 5"]
    assert problems(heartbeat_ms=500, session_ms=400)


def test_the_other_of_a_pair_follows_when_it_is_not_given() -> None:
    policy = parse_policy({"session_ms": 1000, "backoff_ms": 90_000})
    assert isinstance(policy, GroupPolicy)
    assert (policy.heartbeat_ms, policy.backoff_max_ms) == (1000, 90_000)


def test_deliveries_are_never_limited_below_attempts() -> None:
    for given in ({"max_deliveries": 4}, {"max_deliveries": 9, "max_attempts": 10}):
        (problem,) = problems(**given)
        assert "is less than max_attempts" in problem
        assert "0 means no limit" in problem
    for given, wanted in (({}, 20), ({"max_attempts": 20}, 20), ({"max_attempts": 30}, 30)):
        policy = parse_policy(given)
        assert isinstance(policy, GroupPolicy)
        assert policy.max_deliveries == wanted
    policy = parse_policy({"max_deliveries": 0, "max_attempts": 7})
    assert isinstance(policy, GroupPolicy)
    assert policy.max_deliveries == 0
    assert "max_deliveries" in warnings_of(GroupPolicy(mode="stream", max_deliveries=30))[0]


def test_warnings() -> None:
    assert "priorities are ignored" in warnings_of(GroupPolicy(ordering="partition"))[0]
    assert len(warnings_of(GroupPolicy(ordering="partition", assignment="shared"))) == 2
    assert "lease_ms" in warnings_of(GroupPolicy(mode="stream", lease_ms=1000))[0]
    assert warnings_of(GroupPolicy(mode="stream")) == []


def test_only_options_that_are_given_can_contradict() -> None:
    policy = GroupPolicy(lease_ms=5000, mode="exclusive")
    assert contradictions(policy, {}, "g") is None
    assert contradictions(policy, {"lease_ms": 5000}, "g") is None
    refusal = contradictions(policy, {"lease_ms": 6000, "mode": "queue", "max_attempts": 5}, "g")
    assert refusal is not None
    assert refusal.details["problems"] == ["lease_ms is 5000, not 6000", "mode is 'exclusive', not 'queue'"]
