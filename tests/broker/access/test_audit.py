"""The audit on a whole engine: what is written of logins, refusals and administration, and how much of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.broker.access import audit as module
from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model.access import OWNER, Caller, Identities, Origin, Rule, User
from tailrace.core.model.access_commands import AddRule, AddUser, AlterUser, ListUsers, PutQuota, WhoAmI
from tailrace.core.model.commands import CreateTopic, DeleteTopic, Fetch, ListTopics, Reply
from tailrace.core.model.group_commands import CreateGroup, PutSchedule
from tailrace.core.model.identifiers import Refusal
from tests.broker.held_engine import HeldEngine

ANNA = Caller("anna", "token", "k7", "10.0.0.7")
ROOT = Caller("root", "certificate", "DNS:root.example.com", "10.0.0.1")
OPEN = Caller("", "open", "", "10.0.0.9")
NOBODY = Refusal("unauthenticated", "the credentials are wrong")
IDENTITIES = Identities(
    users={user.name: user for user in (User(name="anna"), User(name="root", administrator=True))},
    rules=(
        Rule(id=3, effect="deny", subject="user:anna", rights=("publish",), resource="topic", pattern="o*"),
        Rule(id=4, effect="allow", subject="user:anna", rights=("administer-topic",), resource="topic"),
    ),
    next_rule=5,
)


class AuditedEngine(HeldEngine):
    """A broker that keeps the lines of its audit."""

    def __init__(self, identities: Identities = IDENTITIES) -> None:
        self.lines: list[bytes] = []
        self.room = True
        super().__init__()
        self.engine.authority.put(identities)

    def _start(self) -> Any:
        return self.open_engine({"file": self.store}, audit_line=self._line)

    def _line(self, line: bytes) -> bool:
        if self.room:
            self.lines.append(line)
        return self.room

    def asked(self, request: Any, caller: Caller) -> Reply:
        ((reply, _),) = self.submit(request, gate=OpenGate(caller))
        return reply

    def told(self) -> list[dict[str, Any]]:
        """The lines since the last time, without their time."""
        lines, self.lines = self.lines, []
        found = []
        for line in lines:
            assert line.endswith(b"\n")
            assert all(32 <= byte < 127 for byte in line[:-1]), line
            fields = json.loads(line)
            assert fields.pop("time").endswith("Z")
            found.append(fields)
        return found


WHO = {"user": "anna", "proof": "token", "credential": "k7", "address": "10.0.0.7"}
FROM_ROOT = {
    "user": "root",
    "proof": "certificate",
    "credential": "DNS:root.example.com",
    "address": "10.0.0.1",
}


def test_a_refusal_says_who_asked_for_what_from_where_and_which_rule_decided() -> None:
    broker = AuditedEngine()
    broker.asked(Fetch("t", [(0, 0)]), ANNA)
    assert broker.told() == [
        {
            "what": "refused",
            **WHO,
            "request": "fetch",
            "about": ["read topic t"],
            "outcome": "denied",
            "why": "no rule allows it",
        }
    ]
    ((reply, _),) = broker.publish(b"x", topic="orders")
    assert isinstance(reply, Refusal), "there is no such topic, but the owner may"
    assert broker.told() == [], "what goes wrong for other reasons is not written down"
    schedule = PutSchedule("s", "orders", "* * * * *", value=b"secret")
    broker.asked(schedule, ANNA)
    (line,) = broker.told()
    assert (line["rule"], line["outcome"], line["request"]) == (3, "denied", "put_schedule")
    assert line["why"] == "rule 3 denies user:anna: publish on topics that match 'o*'"
    assert line["about"] == ["bear schedule s", "publish topic orders"]


def test_a_request_of_a_connection_without_a_user_is_written_down() -> None:
    broker = AuditedEngine()
    broker.asked(ListTopics(), OPEN)
    (line,) = broker.told()
    assert (line["proof"], line["address"], line["outcome"]) == ("open", "10.0.0.9", "unauthenticated")
    assert "user" not in line
    assert line["why"].startswith("this broker needs credentials")


def test_administration_is_written_down_with_its_end_and_the_rule_that_allowed_it() -> None:
    broker = AuditedEngine()
    assert not isinstance(broker.asked(CreateTopic("mine", {"partitions": 1}), ANNA), Refusal)
    assert isinstance(broker.asked(CreateTopic("mine"), ANNA), Refusal)
    broker.asked(DeleteTopic("mine"), ROOT)
    first, second, third = broker.told()
    assert first == {
        "what": "administration",
        **WHO,
        "request": "create_topic",
        "about": ["administer-topic topic mine"],
        "asked": '{"name":"mine","options":{"partitions":1}}',
        "outcome": "ok",
        "rule": 4,
        "why": "rule 4 allows user:anna: administer-topic on topics that match '*'",
    }
    assert (second["outcome"], second["why"]) == ("already_exists", "topic 'mine' exists already")
    assert third["why"] == "user 'root' is an administrator"
    assert {name: third[name] for name in FROM_ROOT} == FROM_ROOT


def test_requests_about_access_are_written_down_without_their_secrets() -> None:
    broker = AuditedEngine()
    broker.asked(AddUser("carl", password="hunter2-hunter2"), ROOT)
    broker.settle()
    broker.asked(AddRule("allow", "user:carl", ["read"], "topic", "t*"), ROOT)
    broker.asked(PutQuota("user:carl", requests_per_second=5), ROOT)
    broker.asked(ListUsers(), ROOT)
    broker.asked(ListUsers(), ANNA)
    broker.asked(WhoAmI(), ANNA)
    assert b"hunter2" not in b"".join(broker.lines)
    assert [
        (line["what"], line["request"], line["outcome"], line.get("asked")) for line in broker.told()
    ] == [
        ("administration", "add_user", "ok", '{"name":"carl","password":"(given)"}'),
        (
            "administration",
            "add_rule",
            "ok",
            '{"effect":"allow","subject":"user:carl","rights":["read"],"resource":"topic","pattern":"t*"}',
        ),
        ("administration", "put_quota", "ok", '{"subject":"user:carl","requests_per_second":5}'),
        ("administration", "list_users", "ok", "{}"),
        ("refused", "list_users", "denied", None),
    ]


@pytest.mark.parametrize(
    ("identities", "caller", "why"),
    [
        (IDENTITIES, OWNER, "it is the owner of the broker"),
        (Identities(), OPEN, "the broker has no users"),
    ],
)
def test_who_is_asked_for_no_right_is_written_down_too(
    identities: Identities, caller: Caller, why: str
) -> None:
    broker = AuditedEngine(identities)
    broker.asked(CreateTopic("t"), caller)
    broker.asked(CreateGroup("g", ["t"]), caller)
    assert [(line["request"], line["outcome"], line["why"]) for line in broker.told()] == [
        ("create_topic", "ok", why),
        ("create_group", "ok", why),
    ]


def test_logins_are_written_down() -> None:
    broker = AuditedEngine()
    audit, origin = broker.engine.audit, Origin("10.0.0.7", tls=True)
    audit.logged_in(origin, "k7", ANNA)
    audit.logged_in(origin, "eve", NOBODY)
    audit.logged_in(origin, "", OPEN)
    assert broker.told() == [
        {"what": "login", **WHO, "tls": True, "outcome": "ok"},
        {
            "what": "login",
            "user": "eve",
            "address": "10.0.0.7",
            "tls": True,
            "outcome": "unauthenticated",
            "why": "the credentials are wrong",
        },
    ]


def test_probes_without_credentials_and_pages_without_rights_are_counted_for_longer() -> None:
    broker = AuditedEngine()
    verdict = broker.engine.authority.explain("anna", "operate", "broker", "")
    for _ in range(20):
        broker.engine.audit.logged_in(Origin("10.0.0.7"), "", NOBODY)
        broker.engine.audit.kept_out(ANNA, "pages", verdict)
        broker.pass_s(15)
    login, page = broker.told()
    assert (login["what"], login["outcome"]) == ("login", "unauthenticated")
    assert page == {
        "what": "refused",
        **WHO,
        "request": "pages",
        "about": ["operate broker"],
        "outcome": "denied",
        "why": "no rule allows it",
    }
    broker.pass_s(600)
    assert [line["count"] for line in broker.told()] == [19, 19]


def test_what_the_broker_does_at_its_start_is_written_down() -> None:
    broker = AuditedEngine()
    broker.engine.audit.started("listens without protection", address="0.0.0.0:7400")
    assert broker.told() == [
        {"what": "start", "outcome": "ok", "why": "listens without protection", "address": "0.0.0.0:7400"}
    ]


# -- how much


def test_the_same_refusal_again_is_counted() -> None:
    broker = AuditedEngine()
    for _ in range(500):
        broker.asked(Fetch("t", [(0, 0)]), ANNA)
    assert len(broker.told()) == 1
    broker.pass_s(10)
    (line,) = broker.told()
    assert (line["count"], line["outcome"], line["about"]) == (499, "denied", ["read topic t"])
    assert line["since"].endswith("Z")
    broker.pass_s(60)
    assert broker.told() == [], "nothing is written when nothing happens"
    broker.asked(Fetch("t", [(0, 0)]), ANNA)
    assert [line.get("count") for line in broker.told()] == [None]


def test_logins_of_who_comes_again_and_again_are_counted_for_longer() -> None:
    broker = AuditedEngine()
    for _ in range(30):
        broker.engine.audit.logged_in(Origin("10.0.0.7"), "k7", ANNA)
        broker.pass_s(15)
    assert len(broker.told()) == 1
    broker.pass_s(200)
    assert [line["count"] for line in broker.told()] == [29]


def test_what_was_counted_is_written_when_the_broker_stops() -> None:
    broker = AuditedEngine()
    for _ in range(3):
        broker.asked(Fetch("t", [(0, 0)]), ANNA)
    broker.told()
    broker.engine.close(lambda: None)
    broker.settle()
    assert [line["count"] for line in broker.told()] == [2]


def test_invented_refusals_are_bounded_and_hide_neither_administration_nor_logins() -> None:
    broker = AuditedEngine()
    for number in range(1_000):
        broker.asked(Fetch(f"t{number}", [(0, 0)]), ANNA)
    assert len(broker.told()) == module.LINES_PER_SECOND
    broker.engine.audit.logged_in(Origin("10.0.0.1"), "root", ROOT)
    broker.asked(CreateTopic("t"), ROOT)
    login, made = broker.told()
    assert (login["what"], login["missed"]) == ("login", 1_000 - module.LINES_PER_SECOND)
    assert made["what"] == "administration"
    assert "missed" not in made
    for number in range(1_000):
        broker.engine.audit.logged_in(Origin(f"10.0.1.{number}"), "root", NOBODY)
    assert len(broker.told()) == module.LINES_PER_SECOND
    assert broker.engine.audit.missed == 2 * (1_000 - module.LINES_PER_SECOND)


def test_administrators_changes_are_never_left_out_for_their_number_and_looks_are() -> None:
    broker = AuditedEngine()
    for _ in range(100):
        broker.asked(ListUsers(), ROOT)
    assert len(broker.told()) == module.LINES_PER_SECOND
    for number in range(100):
        broker.asked(AddRule("allow", "everyone", ["read"], "topic", f"t{number}"), ROOT)
    assert [line["outcome"] for line in broker.told()] == ["ok"] * 100


@pytest.mark.parametrize(
    ("what", "outcome"),
    [(AlterUser("anna", password="short"), "denied"), (CreateTopic("t", if_missing=True), "ok")],
)
def test_what_costs_nothing_does_not_drive_administration_out_of_the_log(what: Any, outcome: str) -> None:
    broker = AuditedEngine()
    broker.create("t")
    broker.told()
    for _ in range(1_000):
        broker.asked(what, ANNA)
    lines = broker.told()
    assert [line["outcome"] for line in lines] == [outcome] * module.LINES_PER_SECOND
    broker.asked(CreateTopic("u"), ROOT)
    (line,) = broker.told()
    assert line["missed"] == 1_000 - module.LINES_PER_SECOND


def test_lines_without_room_are_counted_and_told_by_the_next_one() -> None:
    broker = AuditedEngine()
    broker.room = False
    for number in range(3):
        broker.asked(CreateTopic(f"t{number}"), ROOT)
    broker.room = True
    broker.asked(CreateTopic("t3"), ROOT)
    broker.asked(CreateTopic("t4"), ROOT)
    assert [line.get("missed") for line in broker.told()] == [3, None]
    assert broker.engine.audit.missed == 3


def test_what_is_remembered_to_count_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLDS_MAX", 5)
    monkeypatch.setattr(module, "LINES_PER_SECOND", 1_000)
    broker = AuditedEngine()
    for number in range(20):
        for _ in range(2):
            broker.asked(Fetch(f"t{number}", [(0, 0)]), ANNA)
    counts = [line.get("count") for line in broker.told()]
    assert counts.count(None) == 20
    assert counts.count(1) == 15, "those that had to go were written with their count"


# -- what is in it


@settings(max_examples=60, deadline=None)
@given(name=st.text(max_size=2_000), user=st.text(max_size=600))
def test_no_text_of_a_caller_breaks_a_line(name: str, user: str) -> None:
    broker = AuditedEngine()
    broker.asked(DeleteTopic(name), Caller(user, "token", "k1", "10.0.0.1"))
    broker.engine.audit.logged_in(Origin(user), name, NOBODY)
    lines = list(broker.lines)
    assert all(len(line) < 6 * 5 * module.TEXT_MAX + 500 for line in lines)
    assert len(broker.told()) == 2


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[31mred", "\x9b31m", "\x7f", "\u202e", '"},{"what":"login"', "\ud800", "\0"]
)
def test_what_attackers_like_is_escaped(name: str) -> None:
    broker = AuditedEngine()
    broker.engine.audit.logged_in(Origin("10.0.0.1"), name, NOBODY)
    (line,) = broker.told()
    assert line["user"] == name


def test_long_texts_are_cut_and_long_lists_end() -> None:
    broker = AuditedEngine()
    broker.asked(CreateGroup("g" * 1_000, [f"t{number}" for number in range(100)]), ANNA)
    (line,) = broker.told()
    assert len(line["about"]) == module.ABOUT_MAX + 1
    assert line["about"][-1] == f"and {101 - module.ABOUT_MAX} more"
    assert len(line["about"][0]) == module.TEXT_MAX
    assert line["about"][0].endswith("...")
