"""The audit: who logged in, what was refused and what was administered, as lines of JSON.

    login           a caller, or who it said it was, and why it was not let in
    refused         a request that its caller may not make
    administration  requests about users, rights, quotas, topics, groups; see `core.access.audited_requests`
    start           what the broker did by itself when it started: made a token, listens without protection

Each line says when, who, how that was proved, from where, what was asked and about what, how it ended, and
which rule said so. Text that callers choose is cut at `TEXT_MAX` characters and written as ASCII, so that it
can neither begin a line nor move a cursor. Secrets and messages are not in it.

*Nobody can make it grow quickly.* What is the same as before within `FOLD_US` is counted (of what monitoring
does, within `LOGIN_FOLD_US`); a further line says how often it came. Of each class of lines
`LINES_PER_SECOND` are written, so that an attacker hides neither administration nor the logins of others.
Changes by the owner and by administrators of the broker are all written; those of each other user are a class
of their own, because many of them are refused, or change nothing, and so cost nothing. What was left out is
counted, and the next line says so (`missed`).

    {"time":"2026-11-20T08:00:00.000000Z","what":"refused","user":"anna","proof":"token","credential":"k7",
     "address":"10.0.0.7","request":"publish","about":["publish topic orders"],"outcome":"denied",
     "rule":3,"why":"rule 3 denies team:shop: publish on topics that match 'orders'","count":41,
     "since":"2026-11-20T07:59:50.100000Z"}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from tailrace.broker.runtime.pump import Pump
from tailrace.core.access.audited_requests import AUDITED, asked_of
from tailrace.core.access.identity_names import tenant_of
from tailrace.core.access.resources import Needs
from tailrace.core.access.rules import Verdict
from tailrace.core.access.token_bucket import TokenBucket
from tailrace.core.model.access import Caller, Origin
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format.frame import Buffer
from tailrace.ports import Respond

TEXT_MAX = 256
ABOUT_MAX = 16
"""Resources named in a line."""
LINES_PER_SECOND = 20
FOLD_US = 10_000_000
LOGIN_FOLD_US = 600_000_000
"""Of logins that succeed, and of what monitoring does without credentials or rights: again and again."""
FOLDS_MAX = 1_000
"""Lines whose repetitions are counted at a time."""

Put = Callable[[bytes], bool]
"""Takes a line; false if there is no room for it."""


Explain = Callable[[Caller, Request], tuple[Needs, Verdict | None]]
"""Tells what a request needs, and which verdict decides; None if no rule was asked."""


class _Fold:
    """A line that was written, and how often the same has come since."""

    __slots__ = ("count", "facts", "since_us", "until_us")

    def __init__(self, facts: dict[str, Any], since_us: int, until_us: int) -> None:
        self.facts = facts
        self.count = 0
        self.since_us = since_us
        self.until_us = until_us


class Audit:
    """Makes lines of what happens. All methods run on the loop."""

    def __init__(self, pump: Pump, put: Put, explain: Explain) -> None:
        self.missed = 0
        """Lines that were left out since the start."""
        self._untold = 0
        self._pump = pump
        self._put = put
        self._explain = explain
        self._folds: dict[tuple[Any, ...], _Fold] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._timed = False

    # -- what happens

    def refused(self, caller: Caller, request: Request, refusal: Refusal) -> None:
        """A request was refused because its caller may not make it."""
        needs, verdict = self._explain(caller, request)
        facts = {**_who(caller), **_what(request, needs), "outcome": refusal.code}
        denied = verdict is not None and not verdict.allowed and caller.user
        self._folded("refused", facts | (_why(caller, verdict) if denied else {"why": refusal.message}))

    def watched(self, caller: Caller, request: Request, respond: Respond) -> Respond:
        """The way of the answer to a request that is written down with its end."""
        needs, verdict = self._explain(caller, request)
        facts = {**_who(caller), **_what(request, needs), "asked": _asked(request)}
        kind = _class_of(caller, request, verdict)
        return partial(self._administered, kind, facts, _why(caller, verdict), respond)

    def _administered(
        self,
        kind: str | None,
        facts: dict[str, Any],
        why: dict[str, Any],
        respond: Respond,
        reply: Reply,
        parts: Sequence[Buffer],
    ) -> None:
        if type(reply) is Refusal:
            facts = {**facts, "outcome": reply.code, "why": reply.message}
        else:
            facts = {**facts, "outcome": "ok", **why}
        if kind is None:
            self._write("administration", facts, self._pump.clock.wall_us())
        else:
            self._bounded(kind, "administration", facts)
        respond(reply, parts)

    def logged_in(self, origin: Origin, claimed: str, end: Caller | Refusal) -> None:
        """Somebody logged in, or tried to."""
        if isinstance(end, Caller):
            if end.proof != "open":  # Nobody logs in to a broker without users.
                self._folded("login", {**_who(end), "tls": origin.tls, "outcome": "ok"}, LOGIN_FOLD_US)
            return
        facts = {"user": claimed, "address": origin.address, "tls": origin.tls, "outcome": end.code}
        # Probes of health come without credentials, every few seconds.
        self._folded("login", {**facts, "why": end.message}, FOLD_US if claimed else LOGIN_FOLD_US)

    def kept_out(self, caller: Caller, page: str, verdict: Verdict) -> None:
        """A page was not shown, because its visitor lacks a right."""
        facts = {**_who(caller), "request": page, "about": ["operate broker"], "outcome": "denied"}
        self._folded("refused", facts | _why(caller, verdict), LOGIN_FOLD_US)

    def started(self, what: str, **facts: str) -> None:
        """The broker did something by itself that concerns its safety."""
        self._write("start", {"outcome": "ok", "why": what, **facts}, self._pump.clock.wall_us())

    def close(self) -> None:
        """Write what was counted so far."""
        for key in list(self._folds):
            self._unfold(key)

    # -- lines

    def _folded(self, what: str, facts: dict[str, Any], fold_us: int = FOLD_US) -> None:
        """Write a line, unless the same was written shortly before: then count."""
        now_us = self._pump.clock.now_us()
        facts = {name: _told(value) for name, value in facts.items()}
        key = (what, *(tuple(value) if isinstance(value, list) else value for value in facts.values()))
        fold = self._folds.get(key)
        if fold is not None and now_us < fold.until_us:
            fold.count += 1
            return
        if fold is not None:
            self._unfold(key)
        elif len(self._folds) >= FOLDS_MAX:
            self._unfold(next(iter(self._folds)))
        if self._bounded(f"{what}:{facts['outcome'] == 'ok'}", what, facts):
            self._folds[key] = _Fold(facts, self._pump.clock.wall_us(), now_us + fold_us)
            if not self._timed:
                self._timed = True
                self._pump.at(now_us + FOLD_US, self._tell)

    def _tell(self, now_us: int) -> None:
        """Write how often lines came again whose time is up."""
        for key, fold in list(self._folds.items()):
            if fold.until_us <= now_us:
                self._unfold(key)
        self._timed = bool(self._folds)
        if self._timed:
            self._pump.at(now_us + FOLD_US, self._tell)

    def _unfold(self, key: tuple[Any, ...]) -> None:
        fold = self._folds.pop(key)
        if fold.count:
            facts = {**fold.facts, "count": fold.count, "since": _time(fold.since_us)}
            self._write(key[0], facts, self._pump.clock.wall_us())

    def _bounded(self, kind: str, what: str, facts: dict[str, Any]) -> bool:
        """Write a line unless too many of its class have come just now."""
        now_us = self._pump.clock.now_us()
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = TokenBucket(LINES_PER_SECOND, now_us)
        if bucket.take(1, now_us):
            self._miss()
            return False
        self._write(what, facts, self._pump.clock.wall_us())
        return True

    def _write(self, what: str, facts: dict[str, Any], wall_us: int) -> None:
        line: dict[str, Any] = {"time": _time(wall_us), "what": what}
        line |= {name: told for name, value in facts.items() if (told := _told(value)) not in (None, "", [])}
        if self._untold:
            line["missed"] = self._untold
        if self._put(_encoded(line)):
            self._untold = 0
        else:
            self._miss()

    def _miss(self) -> None:
        self.missed += 1
        self._untold += 1


def _who(caller: Caller) -> dict[str, Any]:
    return {
        "user": caller.user,
        "proof": caller.proof,
        "credential": caller.credential,
        "address": caller.address,
    }


def _what(request: Request, needs: Needs) -> dict[str, Any]:
    about = [f"{need.right} {need.resource} {need.name or ''}".rstrip() for need in needs[:ABOUT_MAX]]
    if len(needs) > ABOUT_MAX:
        about.append(f"and {len(needs) - ABOUT_MAX} more")
    return {"request": str(type(request).__struct_config__.tag), "about": about}


def _why(caller: Caller, verdict: Verdict | None) -> dict[str, Any]:
    if verdict is not None:
        return {"rule": verdict.rule, "why": verdict.why}
    if caller.proof == "owner":
        return {"why": "it is the owner of the broker"}
    return {"why": "the broker has no users" if caller.proof == "open" else "everybody may do that"}


def _class_of(caller: Caller, request: Request, verdict: Verdict | None) -> str | None:
    """The class of lines that a request of administration counts in; None: it is written in any case."""
    if AUDITED[type(request)] == "look":
        return "look"
    user = caller.user
    administers = verdict is not None and verdict.cause == "administrator" and not tenant_of(user)
    return f"change:{user}" if user and not administers else None


def _asked(request: Request) -> str:
    return json.dumps(asked_of(request), default=str, separators=(",", ":"))


def _told(value: Any) -> Any:
    """A value as it may be written: texts are cut."""
    if isinstance(value, str):
        return value if len(value) <= TEXT_MAX else value[: TEXT_MAX - 3] + "..."
    return [_told(each) for each in value] if isinstance(value, list) else value


def _encoded(line: dict[str, Any]) -> bytes:
    """One line of printable ASCII, whatever is in it."""
    text = json.dumps(line, ensure_ascii=True, separators=(",", ":"))
    return text.replace("\x7f", "\\u007f").encode("ascii") + b"\n"


def _time(wall_us: int) -> str:
    moment = datetime.fromtimestamp(wall_us // 1_000_000, UTC).replace(microsecond=wall_us % 1_000_000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
