"""Rules: whether a user may do something, which rule says so, and why, in words.

The first of these that says something decides:

    1  nobody has this name                        denied
    2  it lies outside of the user's tenant        denied; only names with `tenant/` in front lie inside
    3  the user is an administrator                allowed
    4  it is internal (`_...`)                     denied; to read, `operate` on the broker is asked for
    5  a rule denies it                            denied, however many others allow it
    6  a rule allows it                            allowed
    7  no rule speaks of it                        denied

A rule speaks of a user by its name, by a team, or as one of everyone. Dead letters are a matter of their
origin: `orders.dlq` is asked about as `orders`. In a pattern `*` stands for any text, also across `/`; a name
is compared in one pass from left to right, so that no pattern is slow.

    allow team:shop publish topic orders*     deny everyone publish topic orders.secret
    anna of team shop publishes to orders.eu  allowed by the first
    anna publishes to orders.secret           denied by the second
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from tailrace.core.access.identity_names import RIGHTS_ON, shown, tenant_of
from tailrace.core.access.resources import Need, scope_of
from tailrace.core.model.access import EVERYONE, Identities, Resource, Right, Rule, User
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import DEAD_LETTERS, check_name
from tailrace.errors import Denied

NAME_MAX = 512
"""No topic or group has a longer name: rules are not asked about one."""

Cause = Literal["unknown", "tenant", "administrator", "internal", "rule", "nothing"]


class Verdict(NamedTuple):
    """Whether something is allowed, why, and the number of the rule that decided, if one did."""

    allowed: bool
    cause: Cause
    why: str
    rule: int | None = None


def origin_of(topic: str) -> str:
    """The topic whose rights hold for a topic: for dead letters that from which they came."""
    while len(topic) > len(DEAD_LETTERS) and topic.endswith(DEAD_LETTERS):
        topic = topic[: -len(DEAD_LETTERS)]
    return topic


class NamePattern:
    """A pattern in which `*` stands for any text."""

    def __init__(self, text: str) -> None:
        self._parts = text.split("*")

    def matches(self, name: str) -> bool:
        """Whether the whole name fits; linear in its length for each part of the pattern."""
        parts = self._parts
        if len(parts) == 1:
            return name == parts[0]
        first, last = parts[0], parts[-1]
        end = len(name) - len(last)
        if len(first) > end or not name.startswith(first) or not name.endswith(last):
            return False
        at = len(first)
        for part in parts[1:-1]:
            found = name.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True


class _Sheet(NamedTuple):
    """The rules about one user for one right on one kind of resource, by number."""

    deny: list[tuple[NamePattern, Rule]]
    allow: list[tuple[NamePattern, Rule]]


_NO_RULES = _Sheet([], [])


class RuleBook:
    """The rules of one state of the identities, sorted by whom they are about."""

    def __init__(self, identities: Identities) -> None:
        self.identities = identities
        self._by_subject: dict[str, list[tuple[NamePattern, Rule]]] = {}
        for rule in sorted(identities.rules, key=lambda each: each.id):
            self._by_subject.setdefault(rule.subject, []).append((NamePattern(rule.pattern), rule))
        self._sheets: dict[str, dict[tuple[Right, Resource], _Sheet]] = {}
        """By user, made when first asked for."""

    def meets(self, user: str, need: Need) -> Verdict:
        """Whether a user meets a need of a request."""
        right, resource, name, _ = need
        if right == "manage":
            return self._manages(user, name)
        if right == "bear":
            assert name is not None
            return self._bears(user, name)
        assert resource in RIGHTS_ON
        if name is None:
            assert right != "any"
            assert right != "ensure"
            return self._somewhere(user, right, resource)
        if right == "any" or right == "ensure":
            return self._any(user, resource, name)
        return self.decide(user, right, resource, name)

    def decide(self, user: str, right: Right, resource: Resource, name: str) -> Verdict:
        """Whether a user has a right on something."""
        known = self.identities.users.get(user)
        if known is None:
            return Verdict(False, "unknown", f"there is no user {shown(user)}")
        tenant = tenant_of(user)
        if tenant and (resource == "broker" or not name.startswith(tenant + "/")):
            return Verdict(False, "tenant", f"user {shown(user)} has rights only inside of tenant {tenant!r}")
        if known.administrator:
            return Verdict(True, "administrator", f"user {shown(user)} is an administrator")
        if resource == "topic":
            name = origin_of(name)
        if name.startswith("_") and resource != "broker":
            return self._internal(known, right, resource, name)
        return self._by_rules(known, right, resource, name)

    def _internal(self, user: User, right: Right, resource: Resource, name: str) -> Verdict:
        if right == "read" and resource == "topic":
            found = self._by_rules(user, "operate", "broker", "")
            if found.allowed:
                return found
        return Verdict(False, "internal", f"{resource} {shown(name)} is internal: it is for administrators")

    def _by_rules(self, user: User, right: Right, resource: Resource, name: str) -> Verdict:
        if len(name) > NAME_MAX:
            return Verdict(False, "nothing", "no name is that long")
        sheet = self._sheet(user).get((right, resource), _NO_RULES)
        for pattern, rule in sheet.deny:
            if pattern.matches(name):
                return Verdict(False, "rule", text_of(rule), rule.id)
        for pattern, rule in sheet.allow:
            if pattern.matches(name):
                return Verdict(True, "rule", text_of(rule), rule.id)
        return Verdict(False, "nothing", "no rule allows it")

    def _sheet(self, user: User) -> dict[tuple[Right, Resource], _Sheet]:
        sheet = self._sheets.get(user.name)
        if sheet is None:
            sheet = self._sheets[user.name] = self._made(user)
        return sheet

    def _made(self, user: User) -> dict[tuple[Right, Resource], _Sheet]:
        subjects = [EVERYONE, f"user:{user.name}", *(f"team:{team}" for team in dict.fromkeys(user.teams))]
        found = [entry for subject in subjects for entry in self._by_subject.get(subject, ())]
        found.sort(key=lambda entry: entry[1].id)
        sheet: dict[tuple[Right, Resource], _Sheet] = {}
        for entry in found:
            rule = entry[1]
            for right in rule.rights:
                page = sheet.setdefault((right, rule.resource), _Sheet([], []))
                (page.deny if rule.effect == "deny" else page.allow).append(entry)
        return sheet

    def _any(self, user: str, resource: Resource, name: str) -> Verdict:
        found = Verdict(False, "nothing", "no rule allows it")
        for right in RIGHTS_ON[resource]:
            found = self.decide(user, right, resource, name)
            if found.allowed:
                break
        return found

    def _somewhere(self, user: str, right: Right, resource: Resource) -> Verdict:
        """Whether any rule gives a right at all, on whatever."""
        known = self.identities.users.get(user)
        if known is None:
            return Verdict(False, "unknown", f"there is no user {shown(user)}")
        if known.administrator:
            return Verdict(True, "administrator", f"user {shown(user)} is an administrator")
        for _, rule in self._sheet(known).get((right, resource), _NO_RULES).allow:
            return Verdict(True, "rule", text_of(rule), rule.id)
        return Verdict(False, "nothing", "no rule allows it")

    # -- what is not a matter of rules

    def _manages(self, user: str, name: str | None) -> Verdict:
        """Administrators of a tenant manage what belongs to it, the others everything."""
        known = self.identities.users.get(user)
        if known is None or not known.administrator:
            return Verdict(False, "nothing", f"user {shown(user)} is no administrator")
        tenant = tenant_of(user)
        if tenant and name is not None and tenant_of(name) != tenant:
            return Verdict(False, "tenant", f"user {shown(user)} administers only tenant {tenant!r}")
        return Verdict(True, "administrator", f"user {shown(user)} is an administrator")

    def _bears(self, user: str, name: str) -> Verdict:
        """Names inside of a tenant are for its users, who have no others."""
        own, tenant = tenant_of(user), tenant_of(name)
        known = self.identities.users.get(user)
        if known is not None and known.administrator and not own:
            return Verdict(True, "administrator", f"user {shown(user)} is an administrator")
        if own != tenant and (own or tenant in self.identities.tenants):
            whose = f"names of tenant {own!r} begin with {own + '/'!r}" if own else "it is a tenant's"
            return Verdict(False, "tenant", f"user {shown(user)} may not use the name {shown(name)}: {whose}")
        return Verdict(True, "nothing", "the name belongs to nobody else")


def text_of(rule: Rule) -> str:
    """A rule in words."""
    rights = ", ".join(rule.rights)
    broker = rule.resource == "broker"
    what = "on the broker" if broker else f"on {rule.resource}s that match {shown(rule.pattern)}"
    verb = "allows" if rule.effect == "allow" else "denies"
    return f"rule {rule.id} {verb} {rule.subject}: {rights} {what}"


def rule_scope(rules: Iterable[Rule], number: int) -> str | None:
    """See `scope_of`, for the rule with a number; None if there is none."""
    for rule in rules:
        if rule.id == number:
            return scope_of(rule.subject, rule.resource, rule.pattern)
    return None


# ------------------------------------------------------------------------------------------------ refusals


def refusal_of(user: str, need: Need, verdict: Verdict) -> Refusal:
    """What the user is told: the right, the resource, and how to get it. It never shows a rule."""
    if need.right == "ensure":
        need = need._replace(right="administer-topic")
    right, resource, name, hidden = need
    who = _short(user)
    if hidden:
        return Refusal(Denied.code, f"{who} may not change {hidden}, or it does not exist")
    if verdict.cause == "tenant" or right == "bear":
        return Refusal(Denied.code, verdict.why, details=_details(need))
    if right == "manage":
        what = "tenants and quotas" if resource == "tenant" else f"{resource}s"
        return Refusal(Denied.code, f"{who} may not manage {what}: that is for administrators")
    if name is None:
        return Refusal(Denied.code, f"{who} may not {right} to any {resource}: ask an administrator")
    if resource == "topic":
        name = origin_of(name)
    text = f"{who} may not {_deed(right, resource, name)}"
    if verdict.cause == "rule":
        text += ": that is denied; an administrator can tell why with `tailrace acl check`"
    elif verdict.cause == "internal":
        text += ": that is for administrators"
    elif name == _short(name) and (resource == "broker" or not check_name(name, internal=True)):
        # A name that is none must not get into a command that somebody copies.
        given, on = ("RIGHT" if right == "any" else right), f"{resource} {name}".rstrip()
        text += f": ask an administrator for `tailrace acl add allow user:{_short(user)} {given} {on}`"
        text += ", with the right that you need" if right == "any" else ""
    return Refusal(Denied.code, text, details=_details(need))


def _details(need: Need) -> dict[str, str]:
    return {"right": need.right, "resource": need.resource, "name": _short(need.name or "")}


def _short(name: str) -> str:
    return shown(name)[1:-1]


def _deed(right: str, resource: str, name: str) -> str:
    """A right on something, as people say it."""
    if resource == "broker":
        return "operate the broker" if right == "operate" else "join as a peer"
    what = f"{resource} {shown(name)}"
    verbs = {
        "publish": f"publish to {what}",
        "read": f"read {what}",
        "consume": f"consume from {what}" if resource == "topic" else f"consume as {what}",
        "settle": f"settle messages of {what}",
        "any": f"do anything with {what}",
    }
    return verbs.get(right, f"administer {what}")
