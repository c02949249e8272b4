"""Which rule decides: plays for people, and a comparison with the rules written as plainly as possible.

Also covers `core/model/access.py`.

A line of a play at the left margin adds a user or a rule, or asks; below a question stands the answer. With
`REWRITE_SCENARIOS=1` in the environment the answers are written anew; read the difference before a commit.

    user NAME [in TEAM, ...] [is an administrator]
    allow|deny SUBJECT RIGHT,... topic|group PATTERN    or  ... broker
    may USER RIGHT topic|group NAME                     or  may USER RIGHT broker
"""

import fnmatch
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.access.identity_names import tenant_of
from tailrace.core.access.resources import Need, scope_of
from tailrace.core.access.rules import NamePattern, RuleBook, origin_of, refusal_of, rule_scope
from tailrace.core.model.access import RIGHTS, Identities, Rule, Tenant, User
from tests.core.access.plain_rules import oracle

FOLDER = Path(__file__).resolve().parents[2] / "scenarios" / "access"


# --------------------------------------------------------------------------------------------------- plays


class RulePlay:
    """Users and rules, as the lines of a play add them."""

    def __init__(self) -> None:
        self.identities = Identities()

    def act(self, line: str) -> str | None:
        word, rest = line.split(" ", 1)
        if word == "user":
            name, _, what = rest.partition(" ")
            teams = what.removeprefix("in ").split(", ") if what.startswith("in ") else ()
            self.add_user(User(name=name, teams=tuple(teams), administrator="administrator" in what))
            return None
        if word == "may":
            return self.ask(rest.split())
        subject, rights, resource, *pattern = rest.split()
        self.add_rule(word, subject, rights.split(","), resource, *pattern)
        return None

    def add_user(self, user: User) -> None:
        users = {**self.identities.users, user.name: user}
        self.identities = msgspec.structs.replace(self.identities, users=users)

    def add_rule(
        self, effect: Any, subject: str, rights: list[Any], resource: Any, pattern: str = "*"
    ) -> None:
        rule = Rule(
            id=len(self.identities.rules) + 1,
            effect=effect,
            subject=subject,
            rights=tuple(rights),
            resource=resource,
            pattern=pattern,
        )
        self.identities = msgspec.structs.replace(self.identities, rules=(*self.identities.rules, rule))

    def ask(self, words: list[Any]) -> str:
        user, right, resource, name = [*words, ""][:4]
        need = Need(right, resource, name)
        verdict = RuleBook(self.identities).meets(user, need)
        if verdict.allowed:
            return f"yes: {verdict.why}"
        refusal = refusal_of(user, need, verdict)
        assert refusal.code == "denied"
        return f"no: {verdict.why}\n    told: {refusal.message}"


def test_plays() -> None:
    for path in sorted(FOLDER.glob("*.txt")):
        play, written = RulePlay(), []
        text = path.read_text()
        for line in text.splitlines():
            if line.startswith("    "):
                continue
            written.append(line)
            if line and not line.startswith("#"):
                answer = play.act(line)
                if answer is not None:
                    written.append(f"    {answer}")
        new = "\n".join(written) + "\n"
        if os.environ.get("REWRITE_SCENARIOS"):
            path.write_text(new)
        assert new == text, f"{path.name} says something else"


# ------------------------------------------------------------------------------------------------ patterns

few = st.text(alphabet="ab/*.", max_size=8)


@given(few, st.text(alphabet="ab/.", max_size=10))
def test_a_pattern_means_what_a_shell_means(pattern: str, name: str) -> None:
    plain = re.compile(fnmatch.translate(pattern))
    assert NamePattern(pattern).matches(name) == bool(plain.fullmatch(name))


def test_no_pattern_is_slow() -> None:
    """A regular expression with as many stars would not end in a lifetime."""
    began = time.process_time()
    assert not NamePattern("*a" * 250 + "*b").matches("a" * 500)
    assert time.process_time() - began < 0.1


# -------------------------------------------------------------------------------------------------- oracle

NAMES = ["a", "ab", "b", "a.dlq", "t/a", "t/b.dlq", "u/a", "_x", "t/_x", "t", "tt/a"]
USERS = ["ann", "t/bob", "root", "t/root", "gone"]
SUBJECTS = ["everyone", "team:x", "team:t/y", *(f"user:{name}" for name in USERS)]
PATTERNS = ["*", "a", "a*", "*a", "t/*", "t*", "*.dlq", "", "_*", "b"]

rules = st.builds(
    lambda effect, subject, rights, resource, pattern: (effect, subject, rights, resource, pattern),
    st.sampled_from(["allow", "allow", "deny"]),
    st.sampled_from(SUBJECTS),
    st.lists(st.sampled_from(RIGHTS), min_size=1, max_size=4, unique=True),
    st.sampled_from(["topic", "group", "broker"]),
    st.sampled_from(PATTERNS),
)


@given(
    st.lists(rules, max_size=12),
    st.sets(st.sampled_from(["x", "t/y"])),
    st.sampled_from(USERS),
    st.sampled_from(RIGHTS),
    st.sampled_from(["topic", "group", "broker"]),
    st.sampled_from(NAMES),
)
def test_rules_decide_as_somebody_would_tell_them(
    given_rules: list[Any], teams: set[str], user: str, right: Any, resource: Any, name: str
) -> None:
    play = RulePlay()
    for known in USERS[:-1]:
        play.add_user(User(name=known, teams=tuple(teams), administrator=known.endswith("root")))
    for rule in given_rules:
        play.add_rule(*rule)
    name = "" if resource == "broker" else name
    book = RuleBook(play.identities)
    verdict = book.decide(user, right, resource, name)
    assert verdict.allowed == oracle(play.identities, user, right, resource, name), verdict
    if verdict.rule is not None:
        decided = play.identities.rules[verdict.rule - 1]
        assert (decided.effect == "allow") == verdict.allowed
        assert f"rule {verdict.rule} " in verdict.why
    seen = book.meets(user, Need("any", "topic", "a")).allowed
    on_topics = RIGHTS[:5]
    assert seen == any(oracle(play.identities, user, each, "topic", "a") for each in on_topics)


# --------------------------------------------------------------------------------------- beside the rules


def made(*users: User, tenants: tuple[str, ...] = ()) -> RuleBook:
    return RuleBook(
        Identities(
            users={user.name: user for user in users}, tenants={name: Tenant(name=name) for name in tenants}
        )
    )


def test_administrators_of_a_tenant_manage_only_that() -> None:
    book = made(
        User(name="root", administrator=True), User(name="t/root", administrator=True), User(name="ann")
    )
    for user, name, may in (
        ("root", "ann", True),
        ("root", "t/bob", True),
        ("root", "", True),
        ("t/root", "t/bob", True),
        ("t/root", "t/root", True),
        ("t/root", "ann", False),
        ("t/root", "tt/bob", False),
        ("t/root", "", False),
        ("t/root", None, True),
        ("ann", None, False),
        ("ann", "ann", False),
        ("gone", None, False),
    ):
        assert book.meets(user, Need("manage", "user", name)).allowed == may, (user, name)


def test_names_of_a_tenant_are_for_its_users() -> None:
    book = made(
        User(name="root", administrator=True),
        User(name="ann"),
        User(name="t/bob"),
        User(name="t/root", administrator=True),
        tenants=("t",),
    )
    for user, name, may in (
        ("ann", "nightly", True),
        ("ann", "t/nightly", False),
        ("ann", "elsewhere/nightly", True),
        ("t/bob", "t/nightly", True),
        ("t/bob", "nightly", False),
        ("t/root", "nightly", False),
        ("root", "t/nightly", True),
    ):
        assert book.meets(user, Need("bear", "schedule", name)).allowed == may, (user, name)


def test_the_scope_of_a_rule_is_a_tenant_only_if_all_of_it_is() -> None:
    assert scope_of("user:t/ann", "topic", "t/*") == "t/ann"
    assert scope_of("team:t/shop", "group", "t/a") == "t/shop"
    for outside in (
        ("user:ann", "topic", "t/*"),
        ("user:t/ann", "topic", "*"),
        ("user:t/ann", "topic", "t*"),
        ("user:t/ann", "broker", "t/*"),
        ("everyone", "topic", "t/*"),
        ("team:u/x", "topic", "t/*"),
    ):
        assert scope_of(*outside) == "", outside  # type: ignore[arg-type]
    rule = Rule(id=3, effect="allow", subject="user:t/a", rights=("read",), resource="topic", pattern="t/b")
    assert rule_scope((rule,), 3) == "t/a"
    assert rule_scope((rule,), 4) is None


def test_origins_and_tenants_of_names() -> None:
    assert [origin_of(name) for name in ("a", "a.dlq", "a.dlq.dlq", ".dlq", "a.dlqx")] == [
        *("a", "a", "a", ".dlq", "a.dlqx")
    ]
    assert [tenant_of(name) for name in ("a", "t/a", "t/a/b", "/a")] == ["", "t", "t", ""]


def test_a_refusal_shows_no_rule_and_no_long_name() -> None:
    play = RulePlay()
    play.act("user ann in secret-team")
    play.act("allow user:ann publish topic *")
    play.act("deny team:secret-team publish topic hidden-pattern*")
    need = Need("publish", "topic", "hidden-pattern" + "x" * 5000)
    refusal = refusal_of("ann", need, RuleBook(play.identities).meets("ann", need))
    told = refusal.message + str(refusal.details)
    assert "secret-team" not in told
    assert "rule" not in told
    assert len(told) < 500
