"""What members of groups do in a play, and how it reads: leases, settlements, delays.

    group billing ordering=key max_attempts=3     a group with these options
    billing is given to ada                       the coordinator grants the partition, one generation on
    billing is paused | resumed | gone | reset to N
    billing reopens 3 | billing settles 3 | the dead letters take 3 of billing
    billing stands where?                         what the group's figures are
    ada leases [N] [for billing]                  with the generation that she was given
    ada acks 0 1 | rejects 0 | gives back 0 | nacks 0 [and waits 2 s]      [for billing]
    ada extends to 10 s | ada is gone             [for billing]
    somebody cancels VALUE
    frames leave memory

Where there is one group only it needs no mention. A member settles with the newest receipt that it has.
When time passes the partition is looked after: leases expire, delayed messages are released.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from tailrace.core.model import facts as logged
from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import BatchView
from tailrace.core.partition import Partition
from tests.core.delivery_model import Letter, numbers
from tests.core.modelled_partition import Shelf
from tests.core.turns import at

Decide = Callable[[Any, list[str]], list[str]]
UNITS = {"us": 1, "ms": 1000, "s": 10**6, "min": 60 * 10**6, "h": 3600 * 10**6, "days": 24 * 3600 * 10**6}


def duration(text: str) -> int:
    number, unit = text.split()
    return round(float(number) * UNITS[unit])


def spell(us: int) -> str:
    """A duration in words."""
    for unit in ("h", "min", "s", "ms"):
        if us and us % UNITS[unit] == 0:
            return f"{us // UNITS[unit]} {unit}"
    return f"{us} us"


def ranges(spans: list[int]) -> str:
    """Flat spans in words: `0-2, 5`."""
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in pairs)


def flat(words: list[str]) -> list[int]:
    """Offsets as spans."""
    return [part for word in words for part in (int(word), int(word) + 1)]


class Waiting(msgspec.Struct):
    """A delayed message as it was published."""

    name: str
    letter: Letter
    deliver_at_us: int
    id: bytes


class DeliveryActs:
    """The queue side of a play."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self.partition: Partition
        self.shelf = Shelf()
        self.now_us = 0
        self.texts: list[str] = []
        """The value of each message, by offset."""
        self.names: dict[int, str] = {}
        self.generations: dict[str, int] = {}
        self.receipts: dict[tuple[str, str, int], int] = {}
        self.delayed: dict[int, Waiting] = {}
        """By reference: entry << 20 | row."""
        self._leases = 0
        self._member = ""

    def perform(self, line: str) -> list[str] | None:
        """The trace of a command, or None when it is not one of these."""
        groups = list(self.generations)
        match = re.fullmatch(r"(.*?)(?: for (\w+))?", line)
        assert match is not None
        act, group = match[1], match[2] or (groups[0] if groups else "")
        for pattern, method in (
            (r"group (\w+)((?: \w+=\w+)*)", self.group),
            (r"(\w+) is given to (\w+)", self.give),
            (r"(\w+) is (paused|resumed)", self.pause),
            (r"(\w+) is reset to (\d+)", self.reset),
            (r"(\w+) reopens((?: \d+)+)", self.reopen),
            (r"(\w+) settles((?: \d+)+)", self.settle),
            (r"(\w+) stands where\?", self.figures),
            (r"(\w+) cancels (\w+)", self.cancel),
            (r"the dead letters take((?: \d+)+) of (\w+)", self.bury),
        ):
            if found := re.fullmatch(pattern, act):
                return method(*found.groups())
        for pattern, method in (
            (r"(\w+) leases(?: (\d+))?", self.lease),
            (r"(\w+) acks((?: \d+)+)", self.ack),
            (r"(\w+) nacks((?: \d+)+)(?: and waits (.*))?", self.nack),
            (r"(\w+) gives back((?: \d+)+)", self.give_back),
            (r"(\w+) rejects((?: \d+)+)", self.reject),
            (r"(\w+) extends to (.*)", self.extend),
            (r"(\w+) is gone", self.gone),
        ):
            if found := re.fullmatch(pattern, act):
                return method(group, *found.groups())
        if act == "frames leave memory":
            self.shelf.away = {frame.base_offset for frame in self.shelf.frames}
            return []
        return None

    # ----------------------------------------------------------------------------------------- the broker

    def decided(self, command: Any, next_entry: int = 0) -> Any:
        """What a partition decides, once what it misses is at hand."""
        turn = at(self.now_us, self.shelf, next_entry=next_entry)
        while (decision := self.partition.decide(command, turn)).missing is not None:
            self.shelf.load(decision.missing)
        return decision

    def look_after(self) -> list[str]:
        """What a shell does when time has passed."""
        trace = []
        for decide in (self.expire, self.release):
            while lines := decide():
                trace += lines
        return trace

    def expire(self) -> list[str]:
        command = inner.ExpireLeases()
        return self._decide(command, [])[:-1] if self.decided(command).facts else []

    def release(self) -> list[str]:
        """All rows that are due, as one batch."""
        refs, until_us, until_ref = self.partition.timetable.due(self.now_us, 1000)
        rows = [self.delayed[int(ref)] for ref in refs]
        if not rows:
            return []
        base = len(self.texts)
        self.texts += [row.name for row in rows]
        columns = self.shelf.add([row.letter for row in rows], base, self.now_us)
        lanes = self.shelf.frames[-1].priorities
        view = BatchView(len(rows), columns, 100 * len(rows), self.now_us, priorities=lanes)
        return self._decide(inner.ReleaseDue(view, 0, until_us, until_ref), [])[:-1]

    def appended(self, letters: list[Letter], names: list[str]) -> None:
        """Messages were published and have offsets."""
        self.shelf.add(letters, len(self.texts), self.now_us)
        self.texts += names

    def scheduled(self, entry: int, rows: list[Waiting]) -> None:
        """Messages were published and wait."""
        self.delayed |= {entry << 20 | number: row for number, row in enumerate(rows)}

    # ---------------------------------------------------------------------------------------- the commands

    def group(self, name: str, options: str) -> list[str]:
        pairs = [word.split("=") for word in options.split()]
        values: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in pairs}
        values = {k: v == "true" if v in ("true", "false") else v for k, v in values.items()}
        self.generations[name] = 0
        return self._decide(inner.Enlist(name, GroupPolicy(**values)), [])[:-1]

    def give(self, group: str, member: str) -> list[str]:
        self.generations[group] += 1
        return self._decide(inner.GrantTo(group, member, self.generations[group]), [])[:-1]

    def pause(self, group: str, how: str) -> list[str]:
        return self._decide(inner.PauseLeases(group, how == "paused"), [])[:-1]

    def reset(self, group: str, offset: str) -> list[str]:
        return self._decide(inner.ResetTo(group, int(offset)), [])[:-1]

    def reopen(self, group: str, offsets: str) -> list[str]:
        return self._decide(wire.Reopen("t", 0, group, flat(offsets.split())), [])

    def settle(self, group: str, offsets: str) -> list[str]:
        return self._decide(wire.SettleOffsets("t", 0, group, flat(offsets.split())), [])

    def bury(self, offsets: str, group: str) -> list[str]:
        spans = flat(offsets.split())
        return self._decide(inner.BuryDone(group, spans, "t.dlq", [0, 0] * len(numbers(spans))), [])[:-1]

    def figures(self, group: str) -> list[str]:
        figures = self.partition.queues.figures(group)
        names = ("in_flight", "waiting", "held", "dying", "dead_lettered", "lapsed", "collected")
        parts = [f"{figures[name]} {name.replace('_', ' ')}" for name in names if figures.get(name)]
        return [f"state: {', '.join(['all settled below ' + str(figures['committed']), *parts])}"]

    def cancel(self, who: str, name: str) -> list[str]:
        ids = [row.id for row in self.delayed.values() if row.name == name]
        return self._decide(wire.CancelScheduled("t", 0, ids, [0] * len(ids)), [])

    def lease(self, group: str, member: str, count: str | None) -> list[str]:
        self._leases += 1
        number = self._leases * 1_000_003
        command = inner.LeaseRun(
            group, member, self.generations[group], number, int(count or 100), 1 << 20, len(self.texts)
        )
        self._member, decided = member, self.decided(command)
        if not decided.facts:  # As the broker does: what is set apart only when there is nothing else.
            command = msgspec.structs.replace(command, alone=True)
            decided = self.decided(command)
        if isinstance(decided.reply, inner.RunLeased):
            for first, many, _, _ in decided.reply.runs:
                self.receipts |= {(group, member, offset): number for offset in range(first, first + many)}
        trace = self._decide(command, [])
        return [*trace[:-1], "reply: nothing"] if trace[-1] == "reply: done" else trace

    def receipt(self, group: str, member: str, offsets: list[str]) -> int:
        known = {self.receipts[group, member, int(offset)] for offset in offsets}
        assert len(known) == 1, "one lease at a time"
        return known.pop()

    def ack(self, group: str, member: str, offsets: str) -> list[str]:
        words = offsets.split()
        leases = {word: self.receipt(group, member, [word]) for word in words}
        pairs = [(lease, flat([word for word in words if leases[word] == lease])) for lease in
                 dict.fromkeys(leases.values())]  # fmt: skip
        return self._decide(wire.Ack("t", 0, group, pairs), [])

    def nack(self, group: str, member: str, offsets: str, delay: str | None) -> list[str]:
        words = offsets.split()
        delay_ms = None if delay is None else duration(delay) // 1000
        lease = self.receipt(group, member, words)
        return self._decide(wire.Nack("t", 0, group, lease, flat(words), delay_ms), [])

    def give_back(self, group: str, member: str, offsets: str) -> list[str]:
        words = offsets.split()
        lease = self.receipt(group, member, words)
        return self._decide(wire.Nack("t", 0, group, lease, flat(words), failure=False), [])

    def reject(self, group: str, member: str, offsets: str) -> list[str]:
        words = offsets.split()
        return self._decide(
            wire.RejectMessages("t", 0, group, self.receipt(group, member, words), flat(words)), []
        )

    def extend(self, group: str, member: str, until: str) -> list[str]:
        lease = [number for (_, who, _), number in self.receipts.items() if who == member][-1]
        return self._decide(wire.Extend("t", 0, group, [lease], duration(until) // 1000), [])

    def gone(self, group: str, member: str) -> list[str]:
        return self._decide(inner.EvictMember(group, member), [])[:-1]

    # --------------------------------------------------------------------------------------------- in words

    def told(self, fact: Any) -> str | None:
        """A fact in words."""
        if isinstance(fact, logged.Enlisted):
            self.names[fact.group] = fact.name
            return f"{fact.name} is enlisted, from {fact.start} on"
        who = self.names.get(getattr(fact, "group", -1), "?")
        match fact:
            case logged.Granted():
                return f"{who} belongs to {fact.member or 'nobody'}, generation {fact.generation}"
            case logged.Leased():
                until = spell(fact.deadline_us - fact.time_us)
                return f"{who} leased {ranges(fact.spans)} to {fact.member} for {until}"
            case logged.LeaseExtended():
                return f"{who} extended a lease to {spell(fact.deadline_us - fact.time_us)} from now"
            case logged.LeaseExpired():
                return f"a lease of {who} expired"
            case logged.Acked():
                spans = [part for _, parts in fact.leases for part in parts]
                return f"{who} settled {ranges(spans)}"
            case logged.Nacked():
                wait = "its back-off" if fact.delay_us < 0 else spell(fact.delay_us)
                return f"{who} waits for {ranges(fact.spans)}: {wait}"
            case logged.GivenBack():
                return f"{who} was given back {ranges(fact.spans)}"
            case logged.Dying():
                return f"{who} lets {ranges(fact.spans)} die: {fact.reason}"
            case logged.Buried():
                return f"{who} has {ranges(fact.spans)} among the dead letters"
            case logged.Lapsed():
                return f"{who} let {ranges(fact.spans)} lapse"
            case logged.GroupReset():
                return f"{who} starts again from {fact.offset}, generation {fact.generation}"
            case logged.Reopened():
                return f"{who} opened {ranges(fact.spans)} again"
            case logged.GroupPaused():
                return f"{who} {'pauses' if fact.paused else 'goes on'}"
            case logged.OffsetsSettled():
                return f"{who} settled {ranges(fact.spans)} without a lease"
            case logged.Delayed():
                return f"scheduled {fact.view.count}"
            case logged.Released():
                return "released them"
            case logged.ScheduleCancelled():
                return f"cancelled {len(fact.refs)}"
        return None

    def answer(self, reply: Reply | inner.RunLeased) -> str | None:
        """A reply in words."""
        match reply:
            case inner.RunLeased():
                parts = []
                for first, count, deliveries, failures in reply.runs:
                    for offset in range(first, first + count):
                        history = "" if deliveries == 1 else f" (delivery {deliveries}, failures {failures})"
                        parts.append(f"{self.texts[offset]} at {offset}{history}")
                return f"{self._member} has {', '.join(parts)}"
            case wire.Settled():
                lost = [part for _, spans in reply.lost for part in spans]
                return f"lost: {ranges(lost)}" if lost else "done"
            case wire.Extended():
                return "lost" if reply.lost else "extended"
            case wire.Cancelled():
                return ", ".join("cancelled" if done else "not there" for done in reply.done)
        return None


def ids_of(count: int, first: int) -> tuple[list[bytes], Any]:
    """Ids for messages, as bytes and as the core sees them."""
    ids = [(first + number).to_bytes(16, "big") for number in range(count)]
    halves = [(int.from_bytes(one[:8], "big"), int.from_bytes(one[8:], "big")) for one in ids]
    return ids, np.array(halves, np.uint64).reshape(-1, 2)
