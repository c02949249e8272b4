"""Which requests are audited: every type is in one list, and no secret and no message is in a line."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tailrace.core.access.audited_requests import AUDITED, LOOKS, ORDINARY, UNTOLD, asked_of
from tailrace.core.access.resources import NEEDS
from tailrace.core.model import access_commands as access
from tailrace.core.model.commands import CreateTopic, DeleteTopic, Request
from tailrace.core.model.group_commands import PutSchedule

KINDS = sorted(get_args(Request), key=lambda kind: str(kind.__name__))


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_is_ordinary_a_look_or_a_change(kind: type) -> None:
    assert (kind in ORDINARY) != (kind in AUDITED)
    assert (AUDITED.get(kind) == "look") == (kind in LOOKS)


def test_the_lists_name_requests_only() -> None:
    assert set(NEEDS) == set(KINDS)
    assert set(KINDS) >= ORDINARY | LOOKS
    assert set(AUDITED) >= LOOKS


def test_all_of_access_but_the_question_who_one_is_is_audited() -> None:
    assert {kind for kind in get_args(access.AccessRequest) if kind not in AUDITED} == {access.WhoAmI}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in AUDITED])
def test_no_field_that_may_hold_a_secret_or_a_message_is_written(kind: type) -> None:
    """Bytes are contents; a name like `password` speaks for itself."""
    for field in msgspec.structs.fields(kind):
        suspicious = "bytes" in str(field.type) or any(
            word in field.name for word in ("password", "secret", "digest", "value", "header", "key", "body")
        )
        assert not suspicious or field.name in UNTOLD, f"{kind.__name__}.{field.name}"


def test_what_is_written_of_requests() -> None:
    made = access.AddUser("anna", password="hunter2", teams=["red"])
    assert asked_of(made) == {"name": "anna", "password": "(given)", "teams": ["red"]}
    schedule = PutSchedule("daily", "t", "0 0 * * *", value=b"hidden", key=b"k", headers=[("h", b"v")])
    assert asked_of(schedule) == {"name": "daily", "topic": "t", "cron": "0 0 * * *"}
    rule = access.AddRule("allow", "user:anna", ["publish"], "topic")
    assert asked_of(rule) == {
        "effect": "allow",
        "subject": "user:anna",
        "rights": ["publish"],
        "resource": "topic",
    }
    assert asked_of(CreateTopic("t", {"partitions": 3})) == {"name": "t", "options": {"partitions": 3}}
    assert asked_of(DeleteTopic("t")) == {"name": "t"}
