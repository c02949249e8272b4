"""Quotas at work: what each account has used, and the refusals `Overloaded` with the time to wait.

`core.access.applied_quotas` says which accounts a caller has; here is what they have used:

    bound                        counted                          refused
    connections_max              while they are open              the connection, after it authenticated
    requests_per_second          each request                     the request
    bytes_per_second             requests as they come,           the request; an answer never, its bytes
                                 bodies of answers afterwards     are owed
    in_flight_max                messages that members hold       nothing: a lease waits, as for credit
    topics_max                   topics of the catalog            `CreateTopic`
    storage_bytes_max            logs of these topics,            what brings messages to these topics,
                                 every two seconds                whoever sends it

All accounts of a caller are asked first, and are charged only if none refuses. Settlements and signs of life
are refused only when five seconds' worth is owed: a consumer that uses up its quota would otherwise lose its
session, and everything would be delivered again.

Topics and storage count for the user who made the topic, and for the tenant whose name it begins with.
Topics of dead letters, which the broker makes itself, count like their origin, and are not refused. A refusal
does not say who made a topic.

*When there is no quota*, `active` is false, and nothing else is looked at. Connections are counted always, so
that a new quota finds them. *Memory:* an account that has not used anything lately is forgotten. At most
`ACCOUNTS_MAX` are remembered; then those of addresses make room first, because only they can be invented.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tailrace.core.access.applied_quotas import (
    Account,
    Bounds,
    accounts_of,
    subjects_of,
    topic_accounts,
)
from tailrace.core.access.token_bucket import SECOND_US, TokenBucket
from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.access import Caller, Identities
from tailrace.core.model.commands import CreateTopic, Ping, Publish, Reply, Request
from tailrace.core.model.group_commands import Heartbeat, LeaveGroup
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import (
    Ack,
    Commit,
    Extend,
    GiveBack,
    Nack,
    RejectMessages,
    Republish,
    StageRows,
)
from tailrace.errors import Overloaded
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.ports import Clock, Respond

ACCOUNTS_MAX = 10_000
CALLERS_MAX = 10_000
"""Callers whose accounts are known without asking again; all are forgotten at once."""
OWED_US_MAX = 5 * SECOND_US
STORAGE_US = 2 * SECOND_US
STORAGE_RETRY_MS = 5_000
"""Storage becomes free when somebody trims a topic, or retention does."""
TOPICS_RETRY_MS = 60_000
CONNECTIONS_RETRY_MS = 1_000

_PATIENT = frozenset(
    (Ack, Nack, GiveBack, RejectMessages, Extend, Commit, Heartbeat, LeaveGroup, Ping),
)


class TopicUse(NamedTuple):
    """What one topic stores, and the user who made it."""

    topic: str
    owner: str
    nbytes: int


class _Use:
    """What one account has used."""

    __slots__ = ("bounds", "bytes", "members", "requests", "subject")

    def __init__(self, account: Account, now_us: int) -> None:
        self.subject = account.subject
        self.bounds = account.bounds
        self.requests = _bucket(account.bounds.requests_per_second, None, now_us)
        self.bytes = _bucket(account.bounds.bytes_per_second, None, now_us)
        self.members: dict[tuple[str, str], None] = {}
        """Members (group, member) that have leased messages for this account, and may hold some."""

    def bind(self, bounds: Bounds, now_us: int) -> None:
        """The bounds have changed: what was used stays used."""
        self.bounds = bounds
        self.requests = _bucket(bounds.requests_per_second, self.requests, now_us)
        self.bytes = _bucket(bounds.bytes_per_second, self.bytes, now_us)

    def idle(self, now_us: int) -> bool:
        """Whether forgetting it changes nothing."""
        full = (bucket.full(now_us) for bucket in (self.requests, self.bytes) if bucket is not None)
        return not self.members and all(full)


class Quotas:
    """The bounds of all callers of a node, and what they have used."""

    def __init__(
        self,
        clock: Clock,
        stored: Callable[[], Iterable[TopicUse]],
        held: Callable[[str, str], int],
    ) -> None:
        self.active = False
        """Whether there is any quota."""
        self._clock = clock
        self._stored = stored
        """Tells what each topic stores."""
        self._held = held
        """Tells how many messages a member of a group holds."""
        self._identities = Identities()
        self._uses: dict[str, _Use] = {}
        self._callers: dict[Caller, tuple[_Use, ...]] = {}
        self._connections: Counter[str] = Counter()
        self._swept_us = 0
        self._storing = False
        """Whether any quota bounds storage."""
        self._full: dict[str, str] = {}
        """Topics that take no messages, because an account of theirs is over its quota, and the refusal."""
        self._stored_us: int | None = None

    def put(self, identities: Identities) -> None:
        """From now on these quotas hold."""
        self._identities = identities
        self.active = bool(identities.quotas)
        self._storing = any(quota.storage_bytes_max is not None for quota in identities.quotas.values())
        self._callers.clear()
        if not self.active:
            self._uses.clear()
        self._full, self._stored_us = {}, None

    # -- connections

    def admitted(self, caller: Caller) -> Refusal | None:
        """See `Doorkeeper.admitted`."""
        for subject, bounds in accounts_of(self._identities, caller) if self.active else ():
            most = bounds.connections_max
            if most is not None and self._connections[subject] >= most:
                return _refusal(subject, "connections_max", most, "open connections", CONNECTIONS_RETRY_MS)
        self._connections.update(subjects_of(caller))
        return None

    def left(self, caller: Caller) -> None:
        """See `Doorkeeper.left`."""
        for subject in subjects_of(caller):
            self._connections[subject] -= 1
            if self._connections[subject] <= 0:
                del self._connections[subject]

    # -- requests

    def charge(self, caller: Caller, request: Request, body: Buffer) -> None:
        """Charge a request to the accounts of its caller, or raise `Overloaded` and charge nothing. Requests
        that are refused for other reasons are charged, too."""
        now_us = self._clock.now_us()
        uses = self._uses_of(caller, now_us)
        if uses:
            owed_us = OWED_US_MAX if type(request) in _PATIENT else 0
            nbytes = 0
            if any(use.bytes is not None for use in uses):
                nbytes = len(body) + len(codec.encode_request(request))
            _raise(_over(uses, nbytes, owed_us, now_us))

    def check_room(self, request: Request) -> None:
        """Raise `Overloaded` if a request brings messages to a topic whose accounts store too much."""
        if self._storing and isinstance(request, Publish | StageRows | Republish):
            _raise(self._over_storage(request.topic, self._clock.now_us()))

    def metered(self, caller: Caller, respond: Respond) -> Respond:
        """The way of an answer to a caller, by which its body is charged."""
        if any(use.bytes is not None for use in self._uses_of(caller, self._clock.now_us())):
            return partial(self._answer, caller, respond)
        return respond

    def _answer(self, caller: Caller, respond: Respond, reply: Reply, parts: Sequence[Buffer]) -> None:
        nbytes = sum(len(part) for part in parts)
        if nbytes:
            now_us = self._clock.now_us()
            for use in self._uses_of(caller, now_us):
                if use.bytes is not None:
                    use.bytes.charge(nbytes, now_us)
        respond(reply, parts)

    # -- messages in flight

    def in_flight_left(self, caller: Caller, group: str, member: str) -> int | None:
        """How many more messages a member of a group may lease as far as its caller is concerned; None: as
        many as it wants. Members count from their first question on."""
        left: int | None = None
        for use in self._uses_of(caller, self._clock.now_us()):
            most = use.bounds.in_flight_max
            if most is None:
                continue
            use.members[group, member] = None
            held = 0
            for place in list(use.members):
                many = self._held(*place)
                held += many
                if not many and place != (group, member):
                    del use.members[place]
            left = most - held if left is None else min(left, most - held)
        return left

    # -- topics and storage

    def too_many_topics(self, catalog: Catalog, request: CreateTopic, owner: str) -> Refusal | None:
        """The refusal of a topic that would be one too many."""
        for subject, bounds in topic_accounts(self._identities, request.name, owner) if self.active else ():
            most = bounds.topics_max
            if most is not None and _count(catalog, subject) >= most:
                cure = "delete some first"
                return _refusal(subject, "topics_max", most, "topics", TOPICS_RETRY_MS, cure)
        return None

    def _over_storage(self, topic: str, now_us: int) -> Refusal | None:
        if self._stored_us is None or now_us - self._stored_us >= STORAGE_US:
            self._stored_us = now_us
            self._measure()
        text = self._full.get(topic)
        if text is None:
            return None
        return Refusal(
            Overloaded.code, text, "none", {"retry_after_ms": STORAGE_RETRY_MS, "quota": "storage_bytes_max"}
        )

    def _measure(self) -> None:
        """Add up what each account stores, and note the topics of those that store too much."""
        sums: Counter[str] = Counter()
        places: list[tuple[str, tuple[Account, ...]]] = []
        for topic, owner, nbytes in self._stored():
            accounts = topic_accounts(self._identities, topic, owner)
            places.append((topic, accounts))
            for account in accounts:
                sums[account.subject] += nbytes
        self._full = {}
        for topic, accounts in places:
            for subject, bounds in accounts:
                most = bounds.storage_bytes_max
                if most is not None and sums[subject] >= most:
                    whose = "its owner" if subject.startswith("user:") else _name(subject)
                    self._full[topic] = (
                        f"topic {topic!r} takes no messages: {whose} is at the quota of {most} bytes of "
                        "storage; trim topics, delete some, or shorten their retention"
                    )

    # -- accounts

    def _uses_of(self, caller: Caller, now_us: int) -> tuple[_Use, ...]:
        found = self._callers.get(caller)
        if found is None:
            accounts = accounts_of(self._identities, caller) if self.active else ()
            found = tuple(self._use(account, now_us) for account in accounts)
            if len(self._callers) >= CALLERS_MAX:
                self._callers.clear()
            self._callers[caller] = found
        return found

    def _use(self, account: Account, now_us: int) -> _Use:
        use = self._uses.get(account.subject)
        if use is None:
            if len(self._uses) >= ACCOUNTS_MAX:
                self._make_room(now_us)
            use = self._uses[account.subject] = _Use(account, now_us)
        elif use.bounds != account.bounds:
            use.bind(account.bounds, now_us)
        return use

    def _make_room(self, now_us: int) -> None:
        """Forget idle accounts, at most once a second; if that is not enough, the oldest of an address."""
        self._callers.clear()  # What is forgotten must not be used on.
        if now_us - self._swept_us >= SECOND_US:
            self._swept_us = now_us
            self._uses = {subject: use for subject, use in self._uses.items() if not use.idle(now_us)}
        if len(self._uses) >= ACCOUNTS_MAX:
            oldest = next((subject for subject in self._uses if subject.startswith("address:")), None)
            del self._uses[oldest or next(iter(self._uses))]


def _bucket(rate: int | None, before: TokenBucket | None, now_us: int) -> TokenBucket | None:
    if rate is None:
        return None
    if before is None:
        return TokenBucket(rate, now_us)
    if before.rate != rate:
        before.change(rate, now_us)
    return before


def _over(uses: Sequence[_Use], nbytes: int, owed_us: int, now_us: int) -> Refusal | None:
    """Take from all buckets, or from none and refuse."""
    worst_us, worst = 0, ("", "", 0)
    for use in uses:
        for bucket, n, bound in (
            (use.requests, 1, "requests_per_second"),
            (use.bytes, nbytes, "bytes_per_second"),
        ):
            if bucket is None:
                continue
            wait_us = bucket.owed_us(now_us) - owed_us if owed_us else bucket.wait_us(n, now_us)
            if wait_us > worst_us:
                worst_us, worst = wait_us, (use.subject, bound, bucket.rate)
    if worst_us:
        subject, bound, most = worst
        return _refusal(subject, bound, most, bound.replace("_", " "), -(-worst_us // 1000))
    for use in uses:
        if use.requests is not None:
            use.requests.spend(1, now_us)
        if use.bytes is not None:
            use.bytes.spend(nbytes, now_us)
    return None


def _raise(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise Overloaded(refusal.message, **refusal.details)


def _count(catalog: Catalog, subject: str) -> int:
    kind, _, name = subject.partition(":")
    if kind == "tenant":
        return sum(topic.startswith(f"{name}/") for topic in catalog.topics)
    return sum(entry.owner == name for entry in catalog.topics.values())


def _name(subject: str) -> str:
    kind, _, name = subject.partition(":")
    return f"user {name!r}" if kind == "user" else f"{kind} {name!r}"


def _refusal(subject: str, bound: str, most: int, what: str, retry_after_ms: int, cure: str = "") -> Refusal:
    cure = cure or f"come back in {_duration(retry_after_ms)}"
    text = f"{_name(subject)} is at its quota of {most} {what}: {cure}"
    details: dict[str, Any] = {"retry_after_ms": retry_after_ms, "quota": bound, "limit": most}
    return Refusal(Overloaded.code, text, "none", details)


def _duration(ms: int) -> str:
    return f"{ms} ms" if ms < 10_000 else f"{ms // 1000} s"
