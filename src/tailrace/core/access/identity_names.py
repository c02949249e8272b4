"""Names of users, teams, certificates and subjects, patterns and passwords: what is wrong with them.

Every function gives all problems, each beginning with the name of its field; none means that it is right.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence

from tailrace.core.model.access import EVERYONE, Identities, Resource, Right, User
from tailrace.core.model.topic_options import DEAD_LETTERS

NAME_MAX = 200
SHOWN_MAX = 80
PATTERN_MAX = 245
STARS_MAX = 8
"""Most `*` in a pattern: matching is tried at every request."""
NAMES_OF_USER_MAX = 100
"""Most teams, certificates and users of the operating system of one user, each."""
CERTIFICATE_NAME_MAX = 300
PASSWORD_MIN = 8
PASSWORD_BYTES_MAX = 1024
_NAME = re.compile(r"[A-Za-z0-9._@/-]+")
_PATTERN = re.compile(r"[A-Za-z0-9._/*-]+")
_CERTIFICATE = re.compile(r"(DNS|URI|email):[!-~]+")
_SYSTEM_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\$?")
RIGHTS_ON: dict[Resource, tuple[Right, ...]] = {
    "topic": ("publish", "read", "consume", "settle", "administer-topic"),
    "group": ("consume", "settle", "administer-group"),
    "broker": ("operate", "peer"),
}


def tenant_of(name: str) -> str:
    """The tenant of a user, topic, group or another name; empty outside of tenants."""
    tenant, slash, _ = name.partition("/")
    return tenant if slash else ""


def shown(name: str) -> str:
    """A name for people, not too long."""
    return repr(name if len(name) <= SHOWN_MAX else name[: SHOWN_MAX - 3] + "...")


def check_user_name(name: str) -> list[str]:
    """All problems with the name of a user or of a team."""
    problems = []
    if not 1 <= len(name) <= NAME_MAX:
        problems.append(f"it has {len(name)} characters: 1 to {NAME_MAX} are allowed")
    if name and not _NAME.fullmatch(name):
        problems.append("it may have only letters, digits, '.', '_', '-', '@' and '/'")
    if name and any(segment in ("", ".", "..") for segment in name.split("/")):
        problems.append("it has an empty, '.' or '..' segment")
    if name.startswith("_"):
        problems.append("names with a leading '_' are internal")
    return problems


def password_problems(password: str | None, name: str) -> list[str]:
    """Problems with a new password of a user; None is no password."""
    if password is None:
        return []
    problems = []
    if len(password) < PASSWORD_MIN:
        problems.append(f"password: at least {PASSWORD_MIN} characters")
    if len(password.encode("utf-8", "surrogatepass")) > PASSWORD_BYTES_MAX:
        problems.append(f"password: at most {PASSWORD_BYTES_MAX} bytes")
    if name and password == name:
        problems.append("password: it is the name of the user")
    return problems


def names_problems(
    identities: Identities, user: User, only: Collection[str] = ("teams", "certificates", "system_users")
) -> list[str]:
    """Problems with the teams, certificates and users of the operating system of a user."""
    problems = []
    for field in ("teams", "certificates", "system_users"):
        count = len(getattr(user, field))
        if field in only and count > NAMES_OF_USER_MAX:
            problems.append(f"{field}: {count} are given, {NAMES_OF_USER_MAX} are allowed")
    if problems:
        return problems
    if "teams" in only:
        for team in user.teams:
            problems += [f"teams: {shown(team)}: {problem}" for problem in check_user_name(team)]
            if tenant_of(team) and tenant_of(user.name) not in ("", tenant_of(team)):
                problems.append(f"teams: {shown(team)} belongs to another tenant")
    if "certificates" in only:
        problems += [
            f"certificates: {shown(name)} is not DNS:NAME, URI:TEXT or email:ADDRESS"
            for name in user.certificates
            if not _CERTIFICATE.fullmatch(name) or len(name) > CERTIFICATE_NAME_MAX
        ]
    if "system_users" in only:
        problems += [
            f"system_users: {shown(name)} is no name or number of a user of the operating system"
            for name in user.system_users
            if not _SYSTEM_USER.fullmatch(name) or len(name) > NAME_MAX
        ]
    return problems + _taken(identities, user, only)


def _taken(identities: Identities, user: User, only: Collection[str]) -> list[str]:
    """Problems with what stands for another user already. It is not told for whom."""
    problems = []
    for field in ("certificates", "system_users"):
        mine = set(getattr(user, field)) if field in only else set()
        if mine:
            problems += [
                f"{field}: {shown(name)} stands for another user"
                for other in identities.users.values()
                if other.name != user.name
                for name in getattr(other, field)
                if name in mine
            ]
    return problems


def rights_problems(rights: Sequence[Right], resource: Resource) -> list[str]:
    """Problems with the rights of a rule on this kind of resource."""
    known = RIGHTS_ON[resource]
    if not rights:
        return [f"rights: at least one of {', '.join(known)}"]
    return [
        f"rights: {right!r} is no right on a {resource}: there are {', '.join(known)}"
        for right in rights
        if right not in known
    ]


def pattern_problems(resource: Resource, pattern: str) -> list[str]:
    """Problems with the pattern of a rule."""
    if resource == "broker":
        return [] if pattern == "*" else ["pattern: there is one broker: leave it out"]
    problems = []
    if not 1 <= len(pattern) <= PATTERN_MAX:
        problems.append(f"pattern: it has {len(pattern)} characters: 1 to {PATTERN_MAX} are allowed")
    if pattern and not _PATTERN.fullmatch(pattern):
        one = "; a rule has one pattern" if "," in pattern else ""
        problems.append(f"pattern: it may have only letters, digits, '.', '_', '-', '/' and '*'{one}")
    if resource == "topic" and pattern.endswith(DEAD_LETTERS):
        problems.append(f"pattern: dead letters have the rights of their topic: leave {DEAD_LETTERS!r} out")
    if pattern.count("*") > STARS_MAX:
        problems.append(f"pattern: at most {STARS_MAX} times '*'")
    return problems


def subject_problems(identities: Identities, subject: str, kinds: Sequence[str]) -> list[str]:
    """Problems with the subject of a rule or quota; `kinds` are those that may stand before the colon."""
    if subject == EVERYONE:
        return []
    kind, _, name = subject.partition(":")
    if kind not in kinds or not name:
        allowed = ", ".join(f"{kind}:NAME" for kind in kinds)
        return [f"subject: {shown(subject)} is not {EVERYONE} and none of {allowed}"]
    if kind == "user" and name not in identities.users:
        return [f"subject: there is no user {shown(name)}"]
    if kind == "tenant" and name not in identities.tenants:
        return [f"subject: there is no tenant {shown(name)}"]
    if kind == "team":
        return [f"subject: {problem}" for problem in check_user_name(name)]
    if kind == "address" and name != "*" and name != _address(name):
        return [f"subject: {shown(name)} is no address of a machine in its usual form, and not *"]
    return []


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
