"""Dead letters as a process: a play, and a seeded model with planted bugs.

Covers `core/process/process.py`, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tailrace.core.catalog.catalog import Catalog, change
from tailrace.core.collections.span_map import pairs
from tailrace.core.model.commands import AlterTopic, CreateTopic, Publish, Published, Reply
from tailrace.core.model.identifiers import BatchView, Refusal, TopicPartition
from tailrace.core.model.internal_commands import BuryDone, Look, PublishBatch
from tailrace.core.process.dead_letter_process import DeadLetterProcess, DeadLettersRead, ReadDying
from tailrace.core.process.process import After, Effect, Event, FactsStored, Now, Submit
from tailrace.core.queue.ledger_stats import Dead
from tests.core.process.process_model import DONE, ProcessWorld, caught, require
from tests.core.process.process_plays import check_play, python

HOME = TopicPartition("orders", 1)
LETTERS = TopicPartition("orders.dlq", 1)
SEEDS = range(150)


class Deaths:
    """Messages that are dying, by group."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Dead]] = {}

    def names(self) -> list[str]:
        return list(self.rows)

    def dying(self, group: str, limit: int) -> list[Dead]:
        return self.rows[group][:limit]


def dead(offset: int, at_us: int = 0) -> Dead:
    return Dead(offset, "rejected", "", 1, 0, at_us, at_us, "m")


def letters(offsets: list[int], unreadable: list[int]) -> DeadLettersRead:
    """What the reader makes of messages; the ids of the batch are its body."""
    problem = "a bad place" if unreadable else ""
    if not offsets:
        return DeadLettersRead(offsets, unreadable, problem=problem)
    publish = PublishBatch(Publish(*LETTERS, 0, 0), BatchView(len(offsets), 0, 0, 0))
    return DeadLettersRead(offsets, unreadable, publish, problem=problem)


# -------------------------------------------------------------------------------------------------- plays


class DeadLetterActs:
    """`GROUP: OFFSETS die`; `topic NAME partitions=N`; `home TOPIC/N`; and what was found is `OFFSETS`, or
    `OFFSETS, but not OFFSETS`."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.deaths = Deaths()
        self.process = DeadLetterProcess(HOME, 1, self.deaths)

    def now(self) -> Now:
        return Now(self.catalog)

    def act(self, line: str) -> bool:
        words = line.split()
        if words[0] == "topic":
            options = {"partitions": int(words[2].partition("=")[2])}
            made: Any = CreateTopic(words[1], options)
            if words[1] in self.catalog.topics:
                made = AlterTopic(words[1], options)
            changed = change(self.catalog, made, 0, internal=True)
            assert not isinstance(changed, Refusal), changed
            self.catalog, _ = changed
            return True
        if words[0] == "home":
            self.process = DeadLetterProcess(
                TopicPartition(words[1].split("/")[0], int(words[1].split("/")[1])), 1, self.deaths
            )
            return True
        if words[-1] == "die":
            group, _, offsets = line.removesuffix(" die").partition(": ")
            self.deaths.rows[group] = [dead(int(word)) for word in offsets.split(", ") if word != "none"]
            return True
        return False

    def event(self, line: str) -> Event | None:
        return None

    def value(self, text: str) -> Any:
        if "(" in text:
            return python(text)
        found, _, lost = text.partition(", but not ")
        offsets = [int(word) for word in found.split(", ") if word != "nothing"]
        return letters(offsets, [int(word) for word in lost.split(", ") if word])


def test_play() -> None:
    check_play("dead_letters", DeadLetterActs)


# -------------------------------------------------------------------------------------------------- model


class DeadLetterWorld(ProcessWorld):
    """Messages of two groups die; some cannot be read for a while.

    Facts of the home log are ("dying" or "buried", group, offset, time); of the dead letters, the ids."""

    def __init__(self, seed: int, kind: type[DeadLetterProcess] = DeadLetterProcess) -> None:
        super().__init__(seed)
        self._kind = kind
        self._time_us = 0
        self._make_topic("orders", 2)
        if self.random.random() < 0.5:
            self._make_topic("orders.dlq", self.random.choice((1, 2)))
        self.log(HOME)
        self.log(LETTERS)

    def _make_topic(self, name: str, partitions: int) -> None:
        changed = change(self.catalog, CreateTopic(name, {"partitions": partitions}), 0, internal=True)
        assert not isinstance(changed, Refusal)
        self.catalog, _ = changed

    def names(self) -> list[str]:
        return ["billing", "mail"]

    def dying(self, group: str, limit: int) -> list[Dead]:
        """Asked by the process: its state, speculative as it is."""
        return [dead(offset, at_us) for (name, offset), at_us in self._dying().items() if name == group][
            :limit
        ]

    def _dying(self) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for what, group, offset, at_us in self.log(HOME).facts:  # type: ignore[misc]
            if what == "dying":
                found[group, offset] = at_us
            else:
                found.pop((group, offset), None)
        return dict(sorted(found.items()))

    def make(self) -> DeadLetterProcess:
        return self._kind(HOME, 1, self)

    def happen(self) -> None:
        key = self.random.choice(self.names()), self.random.randrange(12)
        if key not in self._dying():  # It lives, perhaps since a redrive.
            self._time_us += 1
            self.log(HOME).facts.append(("dying", *key, self._time_us))
            self.later(FactsStored(()))

    def read(self, request: ReadDying) -> Any:
        if self.fails():
            return Refusal("storage_fault", "the reader failed")
        good = [row for row in request.rows if not self.fails()]
        found = letters([row.offset for row in good], [row.offset for row in request.rows if row not in good])
        ids = repr([(request.origin.group, row.offset, row.first_us) for row in good])
        return found if not good else _with_body(found, ids)

    def change(self, request: Any) -> Reply:
        changed = change(self.catalog, request, 0, internal=True)
        if isinstance(changed, Refusal):
            return changed
        self.catalog, _ = changed
        return DONE

    def decide(self, target: TopicPartition, command: Any, body: Any) -> Reply:
        log = self.log(target)
        if isinstance(command, Look):
            return DONE
        if isinstance(command, BuryDone):
            self._bury(command)
            return DONE
        require(target == LETTERS and isinstance(command, PublishBatch), f"{command} for {target}")
        ids = eval(bytes(body))
        require(command.view.count == len(ids), "the view is not that of the body")
        base = len(log.facts)
        known = [(row, log.facts.index(each)) for row, each in enumerate(ids) if each in log.facts]
        log.facts += [each for each in ids if each not in log.facts]
        return Published(base if len(known) < len(ids) else known[0][1], 0, known or None)

    def _bury(self, command: BuryDone) -> None:
        offsets = [offset for first, end in pairs(command.spans) for offset in range(first, end)]
        dying, log = self._dying(), self.log(LETTERS)
        require(len(command.places) == 2 * len(offsets), "a dead letter without a place, or the other way")
        for offset, place in zip(offsets, command.places[1::2], strict=True):
            at_us = dying.get((command.group, offset))
            if at_us is None:
                continue
            letter = (command.group, offset, at_us)
            require(log.facts[place : place + 1] == [letter], f"the dead letter at {place} is not {letter}")
            self.log(HOME).facts.append(("buried", *letter))

    def check(self) -> None:
        """Whatever a crash may take now: a settled message has its dead letter, a dead letter its death."""
        home, there = self.log(HOME), self.log(LETTERS)
        require(len(set(there.facts)) == len(there.facts), "a dead letter is there twice")
        safe = set(there.facts[: there.synced])
        deaths: set[Any] = set()
        for number, (what, *letter) in enumerate(home.facts):  # type: ignore[misc]
            if what == "buried":
                require(tuple(letter) in safe, f"{letter} is settled, and power may take its dead letter")
            elif number < home.synced:
                deaths.add(tuple(letter))
        require(set(there.facts) <= deaths, "a message has a dead letter, and may live after a crash")
        if self.healed and not self._pending:
            require(not self._dying(), f"left alone: {self._dying()}")


def _with_body(found: DeadLettersRead, ids: str) -> DeadLettersRead:
    return DeadLettersRead(found.offsets, found.unreadable, found.publish, ids.encode(), found.problem)


def test_every_seed_holds() -> None:
    assert caught(DeadLetterWorld, SEEDS) is None


# ------------------------------------------------------------------------------------------- planted bugs


class DeathOnlyWritten(DeadLetterProcess):
    TAG = "sync"

    def step(self, event: Event, now: Now) -> list[Effect]:
        return [
            effect._replace(sure=False) if isinstance(effect, Submit) and effect.tag == self.TAG else effect
            for effect in super().step(event, now)
        ]


class LetterOnlyWritten(DeathOnlyWritten):
    TAG = "append"


class SettledBeforeTheAppend(DeadLetterProcess):
    def _append(self, now: Now) -> Any:
        return self._appended(Published(0, 0), now)


class UnreadableOnesSettled(DeadLetterProcess):
    def _appended(self, reply: Reply, now: Now) -> Any:
        self._batch.offsets.extend(self._batch.unreadable)
        return super()._appended(reply, now)


class GivenUp(DeadLetterProcess):
    def _retry(self, refusal: Refusal | None) -> Any:
        return [effect for effect in super()._retry(refusal) if not isinstance(effect, After)]


class DuplicatesMisplaced(DeadLetterProcess):
    def _appended(self, reply: Reply, now: Now) -> Any:
        assert isinstance(reply, Published)
        return super()._appended(Published(reply.base_offset, 0), now)


class OneGroupOnly(DeadLetterProcess):
    def _settled(self, reply: Reply, now: Now) -> Any:
        self._busy = False
        return ()


@pytest.mark.parametrize(
    "bug",
    [
        DeathOnlyWritten,
        LetterOnlyWritten,
        SettledBeforeTheAppend,
        UnreadableOnesSettled,
        GivenUp,
        DuplicatesMisplaced,
        OneGroupOnly,
    ],
)
def test_planted_bug_is_caught(bug: type[DeadLetterProcess]) -> None:
    assert caught(partial(DeadLetterWorld, kind=bug), SEEDS) is not None
