"""Cron as a process: a play, and a seeded model with planted bugs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tailrace.core.catalog.catalog import Catalog, change
from tailrace.core.groups.cron_schedules import CronSchedules
from tailrace.core.model.commands import CreateTopic, Publish, Published, Reply
from tailrace.core.model.group_commands import DeleteSchedule, PutSchedule
from tailrace.core.model.identifiers import BatchView, Refusal, TopicPartition
from tailrace.core.model.internal_commands import PublishBatch
from tailrace.core.process.cron_process import CronProcess
from tailrace.core.process.process import Begun, Effect, Event, FactsStored, Now, Submit
from tests.core.process.process_model import ProcessWorld, caught, require
from tests.core.process.process_plays import check_play, python
from tests.core.turns import at

HOME = TopicPartition("_groups", 3)
TARGET = TopicPartition("t", 0)
SECOND = 1_000_000
SEEDS = range(150)


class EverySoOften:
    """Ticks at all multiples of so many seconds: `cron` is a number here."""

    def next_us(self, put: PutSchedule, after_us: int) -> int | None:
        step = int(put.cron) * SECOND
        return (after_us // step + 1) * step

    def latest_us(self, put: PutSchedule, after_us: int, now_us: int) -> int | None:
        step = int(put.cron) * SECOND
        tick_us = now_us // step * step
        return tick_us if tick_us > after_us else None

    def message(
        self, put: PutSchedule, since_us: int, tick_us: int, partitions: int, want_keys: bool
    ) -> tuple[PublishBatch, bytes]:
        publish = Publish(put.topic, 0, 0, 0, since_us + 1, tick_us // SECOND)
        return PublishBatch(publish, BatchView(1, 0, 0, 0)), b""


def made() -> Catalog:
    changed = change(Catalog(), CreateTopic("t", {"partitions": 1}), 0)
    assert not isinstance(changed, Refusal)
    return changed[0]


# --------------------------------------------------------------------------------------------------- play


class CronActs:
    """`NAME every N s [on TOPIC | of OWNER]` and `NAME is deleted` are decided and stored; `it is N s`
    on the wall clock; `OWNER may not publish`, `OWNER may publish again`; `the home log is damaged`; `a new
    life`."""

    def __init__(self) -> None:
        self.schedules = CronSchedules()
        self.catalog = made()
        self.wall_us = 0
        self.damaged = False
        self.barred = ""
        self.process = CronProcess(HOME, self.schedules.by_name, EverySoOften(), self.may)

    def may(self, owner: str, topic: str) -> bool:
        return owner != self.barred or not owner

    def now(self) -> Now:
        return Now(self.catalog, self.wall_us, self.damaged)

    def act(self, line: str) -> bool:
        if line.startswith("it is "):
            self.wall_us = int(line.split()[2]) * SECOND
        elif line.endswith(" may not publish"):
            self.barred = line.split()[0]
        elif line.endswith(" may publish again"):
            self.barred = ""
        elif line == "the home log is damaged":
            self.damaged = True
        elif line == "a new life":
            self.damaged = False
            self.process = CronProcess(HOME, self.schedules.by_name, EverySoOften(), self.may)
        else:
            return False
        return True

    def event(self, line: str) -> Event | None:
        words = line.split()
        if words[1:2] == ["every"]:
            topic = words[5] if words[4:5] == ["on"] else "t"
            owner = words[5] if words[4:5] == ["of"] else ""
            return self._decide(PutSchedule(words[0], topic, words[2], owner=owner))
        if words[1:3] == ["is", "deleted"]:
            return self._decide(DeleteSchedule(words[0]))
        return None

    def _decide(self, command: Any) -> Event:
        decision = self.schedules.decide(command, at(self.wall_us))
        for fact in decision.facts:
            self.schedules.apply(fact)
        return FactsStored(decision.facts)

    def value(self, text: str) -> Any:
        return python(text)


def test_play() -> None:
    check_play("cron", CronActs)


# -------------------------------------------------------------------------------------------------- model


class CronWorld(ProcessWorld):
    """Two schedules; the wall clock goes on by itself. The target's log has one fact for each message."""

    def __init__(self, seed: int, kind: type[CronProcess] = CronProcess) -> None:
        super().__init__(seed)
        self._kind = kind
        self.catalog = made()
        self.schedules = CronSchedules()
        self._stored = 0
        self.log(HOME)
        self.log(TARGET)
        for name in "ab":
            self.decide(HOME, PutSchedule(name, "t", "3"))
        self.log(HOME).synced = 2

    def make(self) -> CronProcess:
        self._stored = len(self.log(HOME).facts)
        return self._kind(HOME, self.schedules.by_name, EverySoOften(), lambda owner, topic: True)

    def crashed(self) -> None:
        self.schedules = CronSchedules()
        for fact in self.log(HOME).facts:
            self.schedules.apply(fact)

    def happen(self) -> None:
        self.pass_time(self.random.choice((1, 2, 7)) * SECOND)

    def decide(self, target: TopicPartition, command: Any, body: Any = b"") -> Reply:
        if target == HOME:
            decision = self.schedules.decide(command, at(self.wall_us))
            for fact in decision.facts:
                self.schedules.apply(fact)
                self.log(HOME).facts.append(fact)
            return decision.reply
        publish, facts = command.publish, self.log(TARGET).facts
        message = publish.producer_id, publish.producer_epoch
        newest = max((epoch for who, epoch in facts if who == message[0]), default=-1)  # type: ignore[misc]
        if message[1] < newest:
            return Refusal("fenced", "a later tick is there")
        if message[1] > newest:
            facts.append(message)
        return Published(0, 0)

    def sync(self, log: Any) -> None:
        super().sync(log)
        if log is self.log(HOME):
            facts, self._stored = log.facts[self._stored :], len(log.facts)
            if facts:
                self.tell(FactsStored(facts))

    def check(self) -> None:
        there = self.log(TARGET)
        require(len(set(there.facts)) == len(there.facts), "a tick is there twice")
        synced = {epoch for _, epoch in there.facts[: there.synced]}  # type: ignore[misc]
        for schedule in self.schedules.by_name.values():
            tick = schedule.last_us // SECOND
            require(not tick or tick in synced, f"{tick} is recorded, and power may take its message")
            if self.healed and not self._pending:
                due = self.wall_us // (3 * SECOND) * 3
                require(tick == due, f"{schedule.put.name} is at {tick}, and {due} is over")


def test_every_seed_holds() -> None:
    assert caught(CronWorld, SEEDS) is None


class RecordedWhenWritten(CronProcess):
    def step(self, event: Event, now: Now) -> list[Effect]:
        return [
            effect._replace(sure=False) if isinstance(effect, Submit) else effect
            for effect in super().step(event, now)
        ]


class RecordedFirst(CronProcess):
    def _due(self, name: str, now: Now) -> Any:
        return [
            effect
            for found in super()._due(name, now)
            for effect in (
                self._answered(found.tag, Published(0, 0), now)  # type: ignore[arg-type]
                if isinstance(found, Submit)
                else [found]
            )
        ]


class GivenUp(CronProcess):
    def _again(self, name: str, why: str, now: Now) -> Any:
        return ()


class MissedAtARestart(CronProcess):
    def step(self, event: Event, now: Now) -> Any:
        return () if isinstance(event, Begun) else super().step(event, now)


class OneTickOnly(CronProcess):
    def step(self, event: Event, now: Now) -> Any:
        effects = super().step(event, now)
        return () if isinstance(event, FactsStored) else effects


@pytest.mark.parametrize("bug", [RecordedWhenWritten, RecordedFirst, GivenUp, MissedAtARestart, OneTickOnly])
def test_planted_bug_is_caught(bug: type[CronProcess]) -> None:
    assert caught(partial(CronWorld, kind=bug), SEEDS) is not None
