"""Plays: text files of commands with the expected trace below each, run against one partition.

A line at the left margin is a command or a comment (`#`); the indented lines below it are its trace. With
`REWRITE_SCENARIOS=1` in the environment the traces are written anew; read the difference before a commit.

    topic NAME=VALUE ...                    options; the first command of a play
    after 2 s                               the clock moves (us, ms, s, min, h, days; may be negative)
    WHO publishes MESSAGE ... [CLAUSE ...]  MESSAGE is value, key:value or value#dedup-id
    WHO claims | trim to N | retention to N | restart

`somebody` is a producer without a number, everybody else is idempotent.

Clauses: `as batch N`, `of epoch N`, `at sequence N`, `at key sequences N ...`, `with acks WHAT`,
`with a value|a key|headers of N bytes`, `dated N UNIT ahead`, `N times` (messages repeated),
`with priority N`, `delayed 2 s`, `that lives 2 s`.

What groups and their members do is in `delivery_acts` and `membership_acts`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.core.model.commands import Claimed, ClaimProducer, Publish, Published, Reply, TrimTopic
from tailrace.core.model.decision import Decision
from tailrace.core.model.facts import Appended, Delayed, ProducerAdvanced, ProducerClaimed, Staged, Trimmed
from tailrace.core.model.identifiers import HAS_DELIVER_AT, HAS_EXPIRES_AT, HAS_PRIORITY, Refusal
from tailrace.core.model.internal_commands import PublishBatch, Sweep
from tailrace.core.model.topic_options import TopicOptions, parse_options
from tailrace.core.partition import Partition
from tests.core.delivery_acts import DeliveryActs, Waiting, duration, ids_of
from tests.core.delivery_model import Letter
from tests.core.membership_acts import MembershipActs
from tests.core.oracle import Row, offsets_of, view_of

FOLDER = Path(__file__).resolve().parents[1] / "scenarios"
T0 = 1_700_000_000_000_000
CLAUSES = {
    "batch": r" as batch (\d+)",
    "epoch": r" of epoch (\d+)",
    "expected": r" at sequence (-?\d+)",
    "keys": r" at key sequences((?: -?\d+)+)",
    "acks": r" with acks (\w+)",
    "value_bytes_max": r" with a value of (\d+) bytes",
    "key_bytes_max": r" with a key of (\d+) bytes",
    "header_bytes_max": r" with headers of (\d+) bytes",
    "ahead": r" dated ([\d.]+ \w+) ahead",
    "priority": r" with priority (\d)",
    "delay": r" delayed ([\d.]+ \w+)",
    "ttl": r" that lives? ([\d.]+ \w+)",
    "times": r" (\d+) times",
}


class Stage:
    """A partition, a clock, and names for producers."""

    def __init__(self) -> None:
        self.partition = Partition(TopicOptions())
        self.now_us = T0
        self.facts: list[Any] = []
        self.names = {"somebody": 0}
        self.acts = DeliveryActs(self.decide)
        self.membership = MembershipActs()
        self.decision: Decision | None = None
        self.entry = 0

    def number(self, who: str) -> int:
        return self.names.setdefault(who, len(self.names))

    def who(self, number: int) -> str:
        return next(name for name, other in self.names.items() if other == number)

    def perform(self, line: str) -> list[str]:
        """The trace of one command."""
        words = line.split()
        self.acts.partition, self.acts.now_us = self.partition, self.now_us
        self.membership.now_us = self.now_us
        for acts in (self.acts, self.membership):
            if (trace := acts.perform(line)) is not None:
                return trace
        if words[0] == "topic":
            return self.topic(dict(word.split("=") for word in words[1:]))
        if words[0] == "after":
            self.now_us += duration(line.removeprefix("after "))
            self.acts.now_us = self.now_us
            return self.acts.look_after()
        if line == "restart":
            return self.restart()
        if words[:2] == ["trim", "to"]:
            return self.decide(TrimTopic("t", 0, int(words[2])), [])
        if words[:2] == ["retention", "to"]:
            return self.decide(Sweep(int(words[2])), [])
        if words[1:] == ["claims"]:
            return self.decide(ClaimProducer("t", 0, self.number(words[0])), [])
        assert words[1] == "publishes", f"what is {line!r}?"
        return self.publish(words[0], line.removeprefix(f"{words[0]} publishes"))

    def topic(self, options: dict[str, str]) -> list[str]:
        values: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in options.items()}
        parsed = parse_options(values, "t")
        assert isinstance(parsed, TopicOptions), parsed
        self.partition = Partition(parsed)
        return []

    def publish(self, who: str, text: str) -> list[str]:
        found: dict[str, str] = {}
        for clause, pattern in CLAUSES.items():
            if match := re.search(pattern, text):
                found[clause] = match[1]
                text = text[: match.start()] + text[match.end() :]
        messages = text.split() * int(found.get("times", 1))
        rows = []
        for message in messages:
            key, _, value = message.rpartition(":")
            rows.append(Row(key or None, value.partition("#")[2] or None))
        sizes: dict[str, Any] = {
            name: int(size) for name, size in found.items() if name.endswith("_bytes_max")
        }
        ahead_us = duration(found["ahead"]) if "ahead" in found else 0
        ids, halves = ids_of(len(rows), 1 + len(self.acts.texts) + len(self.acts.delayed))
        deliver_at_us = self.now_us + duration(found.get("delay", "0 s"))
        letter = Letter(
            None,
            int(found.get("priority", 2)),
            self.now_us + duration(found["ttl"]) if "ttl" in found else 0,
            self.now_us,
        )
        columns = HAS_DELIVER_AT * ("delay" in found) | HAS_PRIORITY * ("priority" in found)
        view = view_of(
            rows,
            key_index=self.partition.options.key_index,
            timestamp_max_us=self.now_us + ahead_us,
            columns=columns | HAS_EXPIRES_AT * ("ttl" in found),
            deliver_at_us=np.full(len(rows), deliver_at_us) if "delay" in found else None,
            ids=halves if "delay" in found else None,
            priorities=np.full(len(rows), letter.priority, np.uint8) if "priority" in found else None,
            **sizes,
        )
        publish = Publish(
            "t",
            0,
            view.columns,
            0,
            self.number(who),
            int(found.get("epoch", 0)),
            int(found.get("batch", 0)),
            int(found.get("expected", 0)),
            [int(number) for number in found["keys"].split()] if "keys" in found else None,
            found.get("acks"),
        )
        trace = self.decide(PublishBatch(publish, view), messages)
        self.published(messages, rows, letter, deliver_at_us, ids)
        return trace

    def published(
        self, messages: list[str], rows: list[Row], letter: Letter, deliver_at_us: int, ids: list[bytes]
    ) -> None:
        """What was appended and what was scheduled can be leased, released and cancelled."""
        assert self.decision is not None
        letters = [Letter(row.key, letter.priority, letter.expires_us, letter.append_us) for row in rows]
        for fact in self.decision.facts:
            if isinstance(fact, Appended):
                kept = range(len(rows)) if self.decision.keep is None else self.decision.keep.tolist()
                self.acts.appended([letters[row] for row in kept], [messages[row] for row in kept])
            elif isinstance(fact, Delayed):
                late = range(len(rows)) if self.decision.late is None else self.decision.late.tolist()
                waiting = [Waiting(messages[row], letters[row], deliver_at_us, ids[row]) for row in late]
                self.acts.scheduled(fact.entry, waiting)

    def decide(self, command: Any, messages: list[str]) -> list[str]:
        decision = self.decision = self.acts.decided(command, self.entry)
        for fact in decision.facts:
            self.partition.apply(fact)
            self.entry += isinstance(fact, Appended | Delayed | Staged)
        self.facts += decision.facts
        self.partition.check()
        return [f"log:   {self.told(fact)}" for fact in decision.facts] + [
            f"reply: {self.acts.answer(decision.reply) or answer(decision.reply, messages)}"
        ]

    def told(self, fact: Any) -> str:
        """A fact in words."""
        match fact:
            case Appended():
                end = fact.base_offset + fact.view.count
                by = (
                    f" by {self.who(fact.producer_id)}, batch {fact.producer_sequence}"
                    if fact.producer_id
                    else ""
                )
                return f"appended [{fact.base_offset}, {end}){by}"
            case ProducerClaimed():
                return f"{self.who(fact.producer_id)} claimed epoch {fact.epoch}"
            case ProducerAdvanced():
                return f"{self.who(fact.producer_id)} advanced to batch {fact.sequence}, nothing appended"
            case Trimmed():
                return f"trimmed to {fact.offset}"
            case _:
                return self.acts.told(fact) or str(fact)

    def restart(self) -> list[str]:
        """From a snapshot and, the other way, from all facts: both are what there was."""
        options, before = self.partition.options, content(self.partition)
        replayed = Partition(options)
        for fact in self.facts:
            replayed.apply(fact)
        assert content(replayed) == before
        self.partition = Partition.restore(options, [before])
        assert content(self.partition) == before
        return [f"state: messages [{self.partition.start_offset}, {self.partition.end_offset})"]


def content(partition: Partition) -> bytes:
    """A snapshot as one piece."""
    return b"".join(bytes(chunk) for chunk in partition.snapshot())


def answer(reply: Reply, messages: list[str]) -> str:
    """A reply in words."""
    match reply:
        case Refusal():
            details = "".join(f"\n         {name} = {value}" for name, value in reply.details.items())
            return f"{reply.code}: {reply.message}{details}"
        case Published():
            waiting = set(reply.scheduled or ())
            offsets = offsets_of(reply, len(messages))
            assert isinstance(offsets, list)
            known = dict(reply.duplicates or ())
            places = [
                f"{message} waits"
                if row in waiting
                else f"{message} {'was ' if row in known else ''}at {offset}"
                for row, (message, offset) in enumerate(zip(messages, offsets, strict=True))
            ]
            return ", ".join(places if len(places) <= 8 else [*places[:2], "...", places[-1]])
        case Claimed():
            return f"epoch {reply.epoch}"
        case _:
            return str(msgspec.structs.asdict(reply) or type(reply).__name__.lower())


def run(text: str) -> str:
    """The play with the traces as they are."""
    stage, lines = Stage(), []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            trace = "\n".join(stage.perform(line))
            lines += [f"    {part}" for part in trace.splitlines()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_play(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    played = run(text)
    if os.environ.get("REWRITE_SCENARIOS") == "1":
        path.write_text(played, encoding="utf-8")
    else:
        assert played == text


def test_the_plays_are_there() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 8
