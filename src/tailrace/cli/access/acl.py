"""`tailrace acl`: rules that allow and deny, and `check`, which says which of them decides and why."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tailrace.cli.execution import client_command
from tailrace.cli.output import Output, printable
from tailrace.errors import EDGES, Denied, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace import Client, Rule
    from tailrace.core.model.access import Resource, Right

rules = typer.Typer(no_args_is_help=True, help="Rules: who may do what. One that denies wins.")

# The words of `core.model.access`, which help pages need not load.
EFFECTS = ("allow", "deny")
RESOURCES = ("topic", "group", "broker")
RIGHTS = (
    "publish",
    "read",
    "consume",
    "settle",
    "administer-topic",
    "administer-group",
    "operate",
    "peer",
)
EVERYONE = "everyone"
ADMINISTER = "administer"
"""Short for the right to administer what the rule is about."""

ResourceName = Annotated[
    str, typer.Argument(metavar="topic|group|broker", help="What it is about.", show_default=False)
]


@client_command(rules)
async def add(
    client: Client,
    output: Output,
    effect: Annotated[str, typer.Argument(metavar="allow|deny", help="What it does.", show_default=False)],
    subject: Annotated[str, typer.Argument(help="user:NAME, team:NAME or everyone.", show_default=False)],
    rights: Annotated[
        str,
        typer.Argument(help=f"One or more, by commas: {', '.join(RIGHTS)}.", show_default=False),
    ],
    resource: ResourceName,
    pattern: Annotated[
        str, typer.Argument(help="Names, in which * stands for any text: 'orders/*'.", show_default=False)
    ] = "",
) -> None:
    """Add a rule, such as: allow user:anna publish,read topic 'orders/*'"""
    what = _word("effect", effect, EFFECTS)
    about = cast("Resource", _word("resource", resource, RESOURCES))
    wanted = [_right(word, about) for word in rights.split(",")]
    _subject(subject)
    if about != "broker" and not pattern:
        raise InvalidRequest(f"pattern: which {about}s? A name, 'orders/*', or '*' for all of them")

    async with client:
        rule = await client.access().add_rule(cast("Any", what), subject, wanted, about, pattern or "*")
        output.result(_record(rule), f"rule {rule.id}: {_sentence(rule)}")


@client_command(rules, "list")
async def list_(
    client: Client,
    output: Output,
    subject: Annotated[
        str | None, typer.Argument(help="Only rules about user:NAME, team:NAME or everyone.")
    ] = None,
) -> None:
    """List rules."""
    if subject is not None:
        _subject(subject)

    async with client:
        found = await client.access().list_rules(subject)
        headings = ["rule", "effect", "subject", "rights", "resource", "pattern"]
        output.listing(found, _record, headings, _row, "no rules: `tailrace acl add --help` shows how")


@client_command(rules)
async def remove(
    client: Client,
    output: Output,
    number: Annotated[
        int, typer.Argument(min=1, help="Its number, as `acl list` shows it.", show_default=False)
    ],
) -> None:
    """Remove a rule."""
    async with client:
        await client.access().remove_rule(number)
        output.result({"rule": number, "state": "removed"}, f"rule {number} is removed")


@client_command(rules)
async def check(
    client: Client,
    output: Output,
    right: Annotated[str, typer.Argument(help=f"One of {', '.join(RIGHTS)}.", show_default=False)],
    resource: ResourceName,
    name: Annotated[str, typer.Argument(help="Name of the topic or group.", show_default=False)] = "",
    *,
    user: Annotated[str | None, typer.Option("--user", help="Who.", show_default="you")] = None,
) -> None:
    """Say whether a user may do something, which rule decides and why. Exits with 5 if it may not."""
    about = cast("Resource", _word("resource", resource, RESOURCES))
    wanted = _right(right, about)
    if about != "broker" and not name:
        raise InvalidRequest(f"name: which {about}?")

    async with client:
        found = await client.access().check(wanted, about, name, user=user)
        verdict = "allowed" if found.allowed else "denied"
        record = {"allowed": found.allowed, "why": found.why, "rule": found.rule}
        output.result(record, f"{verdict}: {printable(found.why)}")
    if not found.allowed:
        raise typer.Exit(EDGES[Denied.code].exit)


def _word(what: str, given: str, known: Sequence[str]) -> str:
    """One of the words that are known; for another, the one that may be meant."""
    word = given.strip().lower().replace("_", "-")
    if word in known:
        return word
    close = get_close_matches(word, known, 1)
    meant = f"; {close[0]} may be meant" if close else ""
    raise InvalidRequest(f"{what}: {given!r} is none of {', '.join(known)}{meant}")


def _right(given: str, resource: Resource) -> Right:
    """A right; `administer` is that of what it is about."""
    if given.strip().lower() == ADMINISTER and resource != "broker":
        given = f"{ADMINISTER}-{resource}"
    return cast("Right", _word("right", given, RIGHTS))


def _subject(given: str) -> str:
    """The subject of a rule, if it is written as one."""
    kind, colon, name = given.partition(":")
    if given == EVERYONE or (kind in ("user", "team") and name):
        return given
    if not colon:
        meant = EVERYONE if get_close_matches(given.lower(), [EVERYONE], 1) else f"user:{given}"
        raise InvalidRequest(f"subject: user:NAME, team:NAME or everyone; {meant} may be meant")
    raise InvalidRequest(f"subject: user:NAME, team:NAME or everyone, not {given!r}")


def _sentence(rule: Rule) -> str:
    """A rule in the words in which it is added."""
    words = [rule.effect, rule.subject, ",".join(rule.rights), rule.resource]
    return printable(" ".join(words if rule.resource == "broker" else [*words, rule.pattern]))


def _record(rule: Rule) -> dict[str, Any]:
    return {
        "rule": rule.id,
        "effect": rule.effect,
        "subject": rule.subject,
        "rights": list(rule.rights),
        "resource": rule.resource,
        "pattern": rule.pattern,
    }


def _row(rule: Rule) -> list[Any]:
    return [rule.id, rule.effect, rule.subject, ", ".join(rule.rights), rule.resource, rule.pattern]
