"""What clients of a queue saw, written down, and the accounts that are made of it at the end.

A `Given` is one message in one lease as a member received it; its `decided_us` follows from the deadline that
the broker told. All times are true ones; the wall clock of the broker's machine may be wrong, and what users
said in absolute times happens by that clock. Everything that a client asked for has the time when it was
asked and, if there was one, the time and kind of the answer: `ok`, `lost`, `none` (it did not happen) or
`unknown`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from tailrace.sim.virtual_time import Violation

STORED_US = 1_000_000
"""A fact is stored within this time, unless storage fails."""
READ_US = 400_000
"""A lease ends within this time after its deadline: what it held may have to be read first."""
ATTEMPTS = 5
"""So often a message is not leased in vain for answers that nobody hears."""
FOREVER = 1 << 62
Position = tuple[int, int]
"""Partition and offset."""


@dataclass(slots=True)
class SentMessage:
    """A message as its sender remembers it."""

    value: bytes
    partition: int
    id: bytes
    sent_us: int
    key: bytes | None = None
    priority: int = 2
    expires_us: int = 0
    deliver_at_us: int = 0
    dedup_id: bytes | None = None
    outcome: str = "pending"
    cancelled_us: int = 0
    """When a cancellation was confirmed."""
    kept_us: int = 0
    """When a cancellation was refused: it was too late for it."""
    cancel_asked: bool = False


@dataclass(slots=True)
class HistoryAct:
    """Something that a member did with what it was given."""

    kind: str
    sent_us: int
    wait_ms: int | None = None
    replied_us: int = FOREVER
    result: str = "pending"


@dataclass(slots=True)
class Given:
    """One message in one lease, as received."""

    group: str
    member: str
    place: Position
    value: bytes
    lease: int
    decided_us: int
    deadline_us: int
    deliveries: int
    failures: int
    generation: int
    number: int
    """Counts everything that was ever given, in the order of receipt: rows of a lease follow each other."""
    acts: list[HistoryAct] = field(default_factory=list)

    def settled(self, kind: str, result: str = "ok") -> HistoryAct | None:
        """The first act of a kind with this result."""
        return next((act for act in self.acts if act.kind == kind and act.result == result), None)


@dataclass(slots=True)
class HistoryReset:
    """A group was moved, or may have been."""

    group: str
    sent_us: int
    targets: dict[int, int]
    replied_us: int = FOREVER
    result: str = "pending"


@dataclass(slots=True)
class Quarantine:
    """A partition takes no writes and leases nothing, because damage was found."""

    partition: int
    from_us: int
    """Not later than it began."""
    found_us: int
    last_us: int
    """Known to be quarantined from `found_us` to here."""
    to_us: int = FOREVER
    """Not earlier than it ended."""


@dataclass(slots=True)
class LostMessage:
    """The loss of a message was accepted, between two times."""

    place: Position
    accepted_us: int
    over_us: int


@dataclass(slots=True)
class Rules:
    """The options of a group that the accounts need."""

    assignment: str
    ordering: str
    max_attempts: int
    max_deliveries: int
    backoff_ms: int
    backoff_max_ms: int
    session_ms: int
    expired_to_dlq: bool


class History:
    """All of it, for one topic."""

    def __init__(self) -> None:
        self.messages: dict[bytes, SentMessage] = {}
        self.given: list[Given] = []
        self.resets: list[HistoryReset] = []
        self.together: list[list[SentMessage]] = []
        """Messages of several partitions that are all there or not at all."""
        self.trimmed: dict[bytes, int] = {}
        """What may have been dropped from the log, and since when."""
        self.lost: dict[bytes, LostMessage] = {}
        """Messages that damage took, and somebody has accepted that."""
        self.quarantines: list[Quarantine] = []
        self.rules: dict[str, Rules] = {}
        self.crashes: list[tuple[int, int]] = []
        """From when until when facts that gate nothing may have been lost."""
        self.skews: list[tuple[int, int]] = [(0, 0)]
        """Since when the broker's wall clock was ahead by how much."""
        self.leaps: list[tuple[int, int]] = []
        """When a broker started with a clock further ahead, and by how much: durations had passed by it."""
        self.hang_ups: list[int] = []
        """When the broker saw that a connection was closed."""
        self.doubts: dict[tuple[str, str], list[int]] = defaultdict(list)
        """When a member (group, name) left, vanished, or had trouble to be heard."""

    # ------------------------------------------------------------------------------------------- questions

    def never_given(self, group: str, partition: int, values: dict[int, bytes]) -> list[int]:
        """Offsets that a group surely has not settled, of messages that are there: nobody has received them,
        and they can have been settled in no other way."""
        if self.rules[group].max_attempts < ATTEMPTS or any(
            reset.group == group and reset.result != "none" for reset in self.resets
        ):
            return []
        given = {item.place[1] for item in self.given if (item.group, item.place[0]) == (group, partition)}
        return [
            at
            for at, value in values.items()
            if at not in given and value not in self.trimmed and not self.messages[value].expires_us
        ]

    def crashed(self, from_us: int, to_us: int, partition: int) -> bool:
        """Whether soft facts of a partition may have been lost between two times."""
        return any(begin <= to_us and end >= from_us for begin, end in self.crashes) or any(
            one.partition == partition and one.from_us <= to_us and one.to_us >= from_us
            for one in self.quarantines
        )

    def surely_acked(self, group: str, partition: int) -> set[int]:
        """Offsets that a group has settled for good, as it was told, and no reset brings back."""
        return {
            given.place[1]
            for given in self.given
            if (given.group, given.place[0]) == (group, partition)
            for act in given.acts
            if (act.kind, act.result) == ("ack", "ok") and not self.reset_between(group, act.sent_us, FOREVER)
        }

    def wall_us(self, at_us: int) -> int:
        """What the broker's wall clock showed."""
        return at_us + next(skew_us for since_us, skew_us in reversed(self.skews) if since_us <= at_us)

    def shown_us(self, from_us: int, to_us: int) -> int:
        """The latest time that the broker's wall clock showed between two times."""
        ends = [since_us for since_us, _ in self.skews[1:]] + [FOREVER]
        return max(
            min(end_us, to_us) + skew_us
            for (since_us, skew_us), end_us in zip(self.skews, ends, strict=True)
            if since_us <= to_us and end_us >= from_us
        )

    def leapt(self, from_us: int, to_us: int) -> bool:
        """Whether durations may have been cut short between two times."""
        return any(from_us <= at_us <= to_us for at_us, _ in self.leaps)

    def reset_between(self, group: str, from_us: int, to_us: int) -> bool:
        """Whether a reset of a group may have happened between two times."""
        return any(
            reset.group == group
            and reset.result != "none"
            and reset.sent_us <= to_us
            and reset.replied_us >= from_us
            for reset in self.resets
        )

    def order_key(self, given: Given) -> bytes | None:
        """Messages with the same one are delivered in order; None: in any order."""
        ordering = self.rules[given.group].ordering
        if ordering == "partition":
            return b"the partition"
        return self.messages[given.value].key if ordering == "key" else None

    def may_have_ended(self, given: Given, by_us: int, family: list[Given]) -> bool:
        """Whether there is any good reason why a lease did not hold a message any more at a time. `family` is
        everything of the same key in that group."""
        if by_us >= given.deadline_us or any(act.sent_us <= by_us for act in given.acts):
            return True
        if self.trimmed.get(given.value, FOREVER) <= by_us:
            return True
        lost = self.lost.get(given.value)
        if lost is not None and lost.accepted_us <= by_us:
            return True
        since_us = given.decided_us
        if self.crashed(since_us, by_us, given.place[0]) or self.reset_between(given.group, since_us, by_us):
            return True
        if self._hung_up(since_us, by_us):
            return True
        rules = self.rules[given.group]
        session_us = rules.session_ms * 1000
        doubts = self.doubts[given.group, given.member]
        if any(since_us - 2 * session_us <= at <= by_us for at in doubts):
            return True
        return any(
            other.place < given.place and self._may_have_failed(other, since_us - READ_US, by_us)
            for other in family
        )

    def _may_have_failed(self, given: Given, from_us: int, to_us: int) -> bool:
        end_us = given.deadline_us
        leaps = [ahead_us for at_us, ahead_us in self.leaps if given.decided_us <= at_us <= end_us]
        if any(from_us <= end_us - early_us <= to_us for early_us in (0, sum(leaps))):
            return True
        return any(
            act.kind in ("nack", "give back") and act.sent_us <= to_us and act.replied_us >= from_us
            for act in given.acts
        )

    # -------------------------------------------------------------------------------------------- accounts

    def check(self) -> None:
        """Everything that members saw is what was promised; raises `Violation`."""
        by_place: dict[tuple[str, Position], list[Given]] = defaultdict(list)
        by_key: dict[tuple[str, int, bytes | None], list[Given]] = defaultdict(list)
        for given in sorted(self.given, key=lambda item: (item.decided_us, item.number)):
            by_place[given.group, given.place].append(given)
            by_key[given.group, given.place[0], self.order_key(given)].append(given)
            self._check_one(given)
        for same in by_place.values():
            family = by_key[same[0].group, same[0].place[0], self.order_key(same[0])]
            keyed = family if self.order_key(same[0]) is not None else []
            for before, after in pairwise(same):
                self._check_again(before, after, keyed)
            self._check_counters(same)
        for (_, _, key), family in by_key.items():
            if key is not None:
                self._check_order(family)
        self._check_owners()
        self._check_quarantines()

    def _check_quarantines(self) -> None:
        """Nothing is leased of a partition that is quarantined, and nothing of what is lost."""
        for given in self.given:
            name = f"{given.group}: {given.value!r} at {given.place}"
            lost = self.lost.get(given.value)
            require(lost is None or given.place == lost.place, f"{name} was lost elsewhere")
            require(lost is None or given.decided_us <= lost.over_us, f"{name} was lost, and was delivered")
            for one in self.quarantines:
                ill = one.partition == given.place[0] and one.found_us < given.decided_us < one.last_us
                require(not ill, f"{name} was leased while its partition was quarantined")

    def _check_owners(self) -> None:
        """A partition has one owner at a time, under a generation that only grows."""
        newest: dict[tuple[str, int], Given] = {}
        for given in sorted(self.given, key=lambda item: (item.decided_us, item.number)):
            place = given.group, given.place[0]
            before = newest.setdefault(place, given)
            name = f"{given.group}, partition {place[1]}: {given.member} leased in {given.generation}"
            assignment = self.rules[given.group].assignment
            if assignment == "shared":
                continue
            grows = given.generation >= before.generation
            require(grows, f"{name}, {before.member} in {before.generation} before")
            same = given.generation > before.generation or given.member == before.member
            same = same or assignment == "auto"
            require(same, f"{name}, and so did {before.member}")
            newest[place] = given

    def _check_one(self, given: Given) -> None:
        message, name = self.messages[given.value], f"{given.group}: {given.value!r} at {given.place}"
        require(message.outcome != "none", f"{name} failed for certain, and was delivered")
        shown_us = self.shown_us(message.sent_us, given.decided_us)
        require(message.deliver_at_us <= shown_us, f"{name} was delivered before its time")
        require(not message.cancelled_us, f"{name} was cancelled, and was delivered")
        expires = message.expires_us
        wall_us = self.wall_us(given.decided_us)
        require(not expires or wall_us < expires, f"{name} was delivered after its end")
        rules = self.rules[given.group]
        require(given.failures < rules.max_attempts, f"{name} was delivered after {given.failures} failures")
        # What goes back with an older one of its key is counted and does not die of it.
        if rules.ordering == "none" and rules.max_deliveries:
            often = given.deliveries > rules.max_deliveries
            require(not often, f"{name} was delivered {given.deliveries} times")

    def _check_again(self, before: Given, after: Given, family: list[Given]) -> None:
        """The same message of the same group in two leases."""
        name = f"{after.group}: {after.value!r} at {after.place}"
        require(before.value == after.value, f"{name} was {before.value!r} before")
        at_us = after.decided_us
        # An older message of the key that was leased for an answer which nobody took goes back uncounted, and
        # the later ones in flight go with it.
        behind = bool(family) and after.deliveries == before.deliveries
        if not behind and not self._taken(before, after):
            require(
                self.may_have_ended(before, at_us, family), f"{name} is in two leases ({before}, {after})"
            )
        for act in before.acts:
            since_us = act.sent_us
            if act.result != "ok" or self.reset_between(after.group, since_us, at_us):
                continue
            final = act.kind in ("ack", "reject")
            require(not (final and act.replied_us < at_us), f"{name} came again after {act.kind}")
            # Leases are answered before they are stored: where a failure took the later one, the earlier one
            # holds again.
            stale = since_us > at_us and not self.crashed(at_us, act.replied_us, after.place[0])
            if stale and (final or act.kind == "nack"):
                again = [one for item in self._later(before) for one in item.acts if one.kind == act.kind]
                require(
                    final and any(one.sent_us <= act.replied_us for one in again),
                    f"{name}: {act.kind} with a stale receipt was taken",
                )
            if act.kind == "nack":
                self._check_back_off(before, act)

    def _check_back_off(self, given: Given, act: HistoryAct) -> None:
        """After a nack the message waits; a lease from before the nack is no matter of it."""
        since_us, name = act.sent_us, f"{given.group}: {given.value!r} at {given.place}"
        after = [item.decided_us for item in self._later(given) if item.decided_us >= since_us]
        at_us, least_us = min(after, default=FOREVER), since_us + self._wait_us(given, act)
        early = at_us < least_us and not self.leapt(since_us, at_us)
        early = early and not self.reset_between(given.group, since_us, at_us)
        require(not early, f"{name} came again {least_us - at_us} us early")

    def _hung_up(self, from_us: int, to_us: int) -> bool:
        """Whether a connection was closed between two times, or shortly before: what was leased for an answer
        on it went back unseen, and so uncounted, when it was stored."""
        return any(from_us - STORED_US <= at_us <= to_us for at_us in self.hang_ups)

    def _overslept(self, given: Given, to_us: int) -> bool:
        """Whether a lease of the member ran out then or shortly before: its requests are answered with
        nothing, and what is being leased for them goes back when it is stored."""
        since_us = given.decided_us - STORED_US
        return any(
            since_us <= one.deadline_us <= to_us
            for one in self.given
            if (one.group, one.member) == (given.group, given.member)
        )

    def _taken(self, before: Given, after: Given) -> bool:
        """Whether a partition may have been taken from a member and given to another one, with all that it
        had. Where partitions become shared and divided again, that takes another generation: within one,
        leases are kept."""
        assignment = self.rules[after.group].assignment
        if assignment == "auto":
            return before.generation != after.generation
        return assignment == "partitions" and before.member != after.member

    def _later(self, before: Given) -> list[Given]:
        return [
            item
            for item in self.given
            if item.group == before.group
            and item.place == before.place
            and item.decided_us > before.decided_us
        ]

    def _wait_us(self, given: Given, act: HistoryAct) -> int:
        """The least time between a nack and the next delivery."""
        if act.wait_ms is not None:
            return act.wait_ms * 1000
        rules = self.rules[given.group]
        longest = min(rules.backoff_ms << given.failures, rules.backoff_max_ms)
        return longest * 1000 // 2

    def _check_counters(self, same: list[Given]) -> None:
        """Only a nack and an expiry are failures, and every confirmed nack is one."""
        for number, given in enumerate(same):
            earlier, at_us = same[:number], given.decided_us
            name = f"{given.group}: {given.value!r} at {given.place}, delivery {given.deliveries}"
            require(given.failures < given.deliveries, f"{name} has {given.failures} failures")
            if self.reset_between(given.group, 0, at_us):
                continue
            nacks = [before.settled("nack") for before in earlier]
            sure = sum(act is not None and act.replied_us < at_us for act in nacks)
            require(given.failures >= sure, f"{name} has {given.failures} failures, {sure} were confirmed")
            if len(earlier) == given.deliveries - 1 and not self.crashed(0, at_us, given.place[0]):
                possible = sum(self._may_have_failed(before, 0, at_us) for before in earlier)
                require(given.failures <= possible, f"{name} has failures that were none")

    def _check_order(self, family: list[Given]) -> None:
        """Messages of one key: first deliveries in order, none past one that waits, one member at a time."""
        group = family[0].group
        last: dict[Position, Given] = {}
        for given in family:
            at_us, name = given.decided_us, f"{group}: {given.value!r} at {given.place}"
            if given.place not in last and given.deliveries == 1:
                for place, other in last.items():
                    excused = self.reset_between(group, 0, at_us)
                    excused = excused or self.crashed(other.decided_us, at_us, place[0])
                    excused = excused or self._hung_up(other.decided_us, at_us)
                    excused = excused or self._overslept(other, at_us)
                    require(place < given.place or excused, f"{name} comes after {place} of its key")
            for place, other in last.items():
                if place == given.place or other.member == given.member:
                    continue
                require(
                    self.may_have_ended(other, at_us, family) or self._taken(other, given),
                    f"{name} went to {given.member} while {other.member} had {place} of its key",
                )
            last[given.place] = given
        self._check_waits(family)

    def _check_waits(self, family: list[Given]) -> None:
        """Between a confirmed nack and the next delivery nothing that is later goes out."""
        following: dict[Position, Given] = {}
        for given in reversed(family):
            after = following.get(given.place)
            following[given.place] = given
            act = given.settled("nack")
            if after is None or act is None or after.deliveries != given.deliveries + 1:
                continue
            begin_us, end_us = act.replied_us, after.decided_us
            crashed = self.crashed(begin_us, end_us, given.place[0])
            if crashed or self.reset_between(given.group, begin_us, end_us):
                continue
            for other in family:
                early = other.place > given.place and begin_us < other.decided_us < end_us
                require(
                    not early,
                    f"{given.group}: {other.value!r} at {other.place} overtook {given.place}, which waits",
                )

    # ------------------------------------------------------------------------------------- the whole story

    def check_complete(
        self, log: dict[int, dict[int, bytes]], dead: dict[str, dict[Position, str]], now_us: int
    ) -> None:
        """After the drain: `log` is what each partition holds, `dead` the reason of each dead letter by group
        and place."""
        places = {value: (number, at) for number, values in log.items() for at, value in values.items()}
        require(len(places) == sum(map(len, log.values())), "a message is in the log twice")
        for message in self.messages.values():
            stored, name = message.value in places, f"{message.value!r}"
            lost = message.value in self.lost
            require(not (stored and lost), f"{name} is lost, and in the log")
            if lost or message.value in self.trimmed:
                continue
            wanted = message.outcome == "ok" and not message.cancelled_us and not message.cancel_asked
            require(stored or not wanted, f"{name} was acknowledged, and is not in the log")
            require(not stored or message.outcome != "none", f"{name} failed for certain, and is in the log")
            require(not (stored and message.cancelled_us), f"{name} was cancelled, and is in the log")
            kept = message.kept_us and message.outcome == "ok"
            require(stored or not kept, f"{name}: too late to cancel, and never there")
        for messages in self.together:
            gone = self.trimmed.keys() | self.lost.keys()
            there = {message.value in places for message in messages if message.value not in gone}
            require(len(there) < 2, f"{[message.value for message in messages]} are there in part")
        for group, rules in self.rules.items():
            for value, place in places.items():
                self._check_end(group, rules, value, place, dead.get(group, {}).get(place), now_us)

    def _check_end(
        self, group: str, rules: Rules, value: bytes, place: Position, reason: str | None, now_us: int
    ) -> None:
        """How a message ended for a group: acked, dead, or expired."""
        message, name = self.messages[value], f"{group}: {value!r} at {place}"
        given = [item for item in self.given if item.group == group and item.place == place]
        acts = [act for item in given for act in item.acts]
        rejects = [act for act in acts if act.kind == "reject"]
        expired = 0 < message.expires_us <= self.shown_us(message.sent_us, now_us)
        if reason is not None:
            fits = {
                "rejected": bool(rejects),
                "expired": rules.expired_to_dlq and expired,
                "max_attempts": not given or any(self._may_have_failed(item, 0, now_us) for item in given),
            }
            fits["max_deliveries"] = rules.max_deliveries > 0
            require(fits.get(reason, False), f"{name} is among the dead letters for no reason: {reason}")
        if value in self.trimmed:
            return
        sure = any(
            act.result == "ok" and not self.reset_between(group, act.sent_us, FOREVER) for act in rejects
        )
        require(not sure or reason is not None, f"{name} was rejected, and is not among the dead letters")
        since_us = self._valid_from(group, place)
        if since_us is None or reason is not None or expired:
            return
        settled = [act for act in acts if act.kind == "ack" and act.sent_us >= since_us]
        good = any(act.result in ("ok", "unknown", "pending") for act in settled)
        require(good, f"{name} was never settled: {given[-3:]}")

    def _valid_from(self, group: str, place: Position) -> int | None:
        """Since when acks count; None when a reset may have passed the message over."""
        since_us: int | None = 0
        in_doubt = False
        for reset in self.resets:
            if reset.group != group or reset.result == "none" or place[0] not in reset.targets:
                continue
            if place[1] < reset.targets[place[0]]:
                since_us, in_doubt = None, in_doubt or reset.result != "ok"
            elif reset.result == "ok":
                since_us = reset.sent_us
        return None if in_doubt else since_us


def require(holds: bool, what: str) -> None:
    """A promise."""
    if not holds:
        raise Violation(what)
