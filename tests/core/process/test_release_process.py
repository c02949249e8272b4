"""Release of delayed messages as a process: a play, and a seeded model with planted bugs."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tailrace.core.catalog.catalog import Catalog, change
from tailrace.core.collections.timing_wheel import HIGH, NEVER, ROW_BITS, TICK_US, ref_of
from tailrace.core.delay.delay_queue import DelayQueue
from tailrace.core.log_head import LogHead
from tailrace.core.model.commands import CreateTopic, Published, Reply
from tailrace.core.model.decision import Decision
from tailrace.core.model.facts import Delayed, Released, ScheduleCancelled
from tailrace.core.model.identifiers import HAS_DELIVER_AT, BatchView, Refusal, TopicPartition
from tailrace.core.model.internal_commands import ReleaseDue
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.process.process import After, Effect, Event, FactsStored, Forget, Now, Read, Submit
from tailrace.core.process.release_process import (
    ALL,
    DelayedLoaded,
    LoadDelayed,
    ReleaseProcess,
    ReleaseRows,
)
from tailrace.core.publish.capacity import ANY
from tests.core.process.process_model import ProcessWorld, caught, require
from tests.core.process.process_plays import check_play, python, row_text
from tests.core.turns import at

HOME = TopicPartition("t", 1)
SECOND = 1_000_000
SEEDS = range(150)
Key = tuple[int, int]
"""Due time and ref."""


def delayed(entry: int, wall_us: int, times: list[int]) -> Delayed:
    """A stored batch with these due times; the ids are its refs."""
    ids = np.array([(7, ref_of(entry, row)) for row in range(len(times))], np.uint64)
    deliver_at = np.array(times, np.int64)
    view = BatchView(len(times), HAS_DELIVER_AT, 0, 0, deliver_at_us=deliver_at, ids=ids)
    return Delayed(entry, view, wall_us)


def keys(rows: Any) -> list[Key]:
    return [(at_us, ref) for at_us, ref in rows[:, :HIGH].tolist()]


# --------------------------------------------------------------------------------------------------- play


class ReleaseActs:
    """`it is N s`; `ENTRY: TIMES` are delayed, and `ENTRY stored` a while later; `REFS cancelled` and `REFS
    released`, a ref being `ENTRY.ROW`; `room for N`, `shelf N`; `the disk is full` or `has room`, `the home
    log is damaged`; `a new life`. What a load found is `N bytes each`, or `too much, N bytes each`."""

    def __init__(self) -> None:
        self.queue = DelayQueue(LogHead(TopicOptions()))
        self.facts: dict[int, Delayed] = {}
        self.wall_us = 0
        self.full = self.damaged = False
        self._shelf = 1_000_000
        self._room = ANY
        self.process = self._make()

    def _make(self) -> ReleaseProcess:
        return ReleaseProcess(HOME, 1, self.queue, self, self)

    def room(self) -> tuple[int, int]:
        return self._room, 4_000_000

    def free_bytes(self, until: Key) -> int:
        return self._shelf

    def now(self) -> Now:
        return Now(Catalog(), self.wall_us, self.damaged, full=self.full)

    def act(self, line: str) -> bool:
        if match := re.fullmatch(r"it is (.+) s", line):
            self.wall_us = _us(match[1])
        elif match := re.fullmatch(r"(\d+): (.+)", line):
            entry, times = int(match[1]), [_us(word) for word in match[2].split(", ")]
            self.facts[entry] = delayed(entry, self.wall_us, times)
            self.queue.schedule(self.facts[entry])
        elif line.endswith(" cancelled"):
            self.queue.apply(ScheduleCancelled(_refs(line), self.wall_us))
        elif line.endswith(" released"):
            last = keys(self.queue.due_rows(self.wall_us, len(_refs(line))))[-1]
            assert last[1] == _refs(line)[-1], f"{row_text(*last)} is the last one"
            self.queue.apply(Released(*last, self.wall_us))
        elif match := re.fullmatch(r"room for (.+)", line):
            self._room = ANY if match[1] == "all" else int(match[1])
        elif match := re.fullmatch(r"shelf (\d+)", line):
            self._shelf = int(match[1])
        elif line in ("the disk is full", "the disk has room", "the home log is damaged"):
            self.full, self.damaged = line.endswith("full"), line.endswith("damaged")
        elif line == "a new life":
            self.damaged = False
            self.process = self._make()
        else:
            return False
        return True

    def event(self, line: str) -> Event | None:
        match = re.fullmatch(r"(\d+) stored", line)
        return FactsStored([self.facts[int(match[1])]]) if match else None

    def value(self, text: str) -> Any:
        match = re.fullmatch(r"(too much, )?(\d+) bytes each", text)
        return DelayedLoaded(int(match[2]), not match[1]) if match else python(text)


def _us(seconds: str) -> int:
    return round(float(seconds) * SECOND)


def _refs(line: str) -> list[int]:
    return [ref_of(int(entry), int(row)) for entry, row in re.findall(r"(\d+)\.(\d+)", line)]


def test_play() -> None:
    check_play("release", ReleaseActs)


# -------------------------------------------------------------------------------------------------- model


class Landed(NamedTuple):
    """A release in the log: messages got their offsets, and left the queue; both or neither."""

    refs: tuple[int, ...]
    released: Released


class ReleaseWorld(ProcessWorld):
    """Messages are delayed and cancelled, the wall clock goes on and back, there is little room everywhere.

    Facts of the home log are `Delayed`, `ScheduleCancelled` and `Landed`; their index is their entry."""

    SHELF_BYTES = 1_200
    ROW_BYTES = 100

    def __init__(
        self,
        seed: int,
        kind: type[ReleaseProcess] = ReleaseProcess,
        queue_kind: type[DelayQueue] = DelayQueue,
    ) -> None:
        super().__init__(seed)
        self._kind = kind
        self._queue_kind = queue_kind
        made = change(self.catalog, CreateTopic("t", {"partitions": 2}), 0)
        assert not isinstance(made, Refusal)
        self.catalog, _ = made
        self.wall_us = 1_000 * SECOND
        self._high_us = self.wall_us
        self._full = False
        self._tight = 0
        self.log(HOME)
        self.crashed()

    # -- the state, and what the shell keeps

    def crashed(self) -> None:
        self.queue = self._queue_kind(LogHead(TopicOptions()))
        for fact in self.log(HOME).facts:
            self._apply(fact)

    def _apply(self, fact: Any) -> None:
        if isinstance(fact, Delayed):
            self.queue.schedule(fact)
        else:
            self.queue.apply(fact.released if isinstance(fact, Landed) else fact)

    def make(self) -> ReleaseProcess:
        self._stored = len(self.log(HOME).facts)
        self._shelf: set[Key] = set()
        self._reading: set[Key] = set()
        self._undecided = False
        return self._kind(HOME, 1, self.queue, self, self)

    def free_bytes(self, until: Key) -> int:
        return self.SHELF_BYTES - self.ROW_BYTES * sum(row > until for row in self._shelf)

    def room(self) -> tuple[int, int]:
        return (ANY, ANY) if self.healed or self._tight > 4 else (self._tight, ANY)

    def now(self) -> Now:
        return super().now()._replace(full=self._full and not self.healed)

    def _in_queue(self) -> list[Key]:
        return keys(self.queue.wheel.first(NEVER, 1_000_000))

    # -- what happens by itself

    def happen(self) -> None:
        act = self.random.choice(
            (self._delay, self._delay, self._cancel, self._go_on, self._go_on, self._turn)
        )
        act()

    def _delay(self) -> None:
        wall_us = self.wall_us
        choices = (1, 4_000, 2 * SECOND, 2 * SECOND + 5_000, 6 * SECOND)
        times = [wall_us + self.random.choice(choices) for _ in range(self.random.choice((1, 2, 9)))]
        if self.random.random() < 0.4:
            times = [times[0]] * len(times)
        self._append(delayed(len(self.log(HOME).facts), wall_us, times))

    def _cancel(self) -> None:
        waiting = self._in_queue()
        if waiting:
            near = waiting[: self.random.choice((3, len(waiting)))]
            self._append(ScheduleCancelled([self.random.choice(near)[1]], self._high_us))

    def _go_on(self) -> None:
        self.pass_time(self.random.choice((3_000, TICK_US, 700_000, 2 * SECOND)))

    def _turn(self) -> None:
        """The clock is put back, or room comes and goes."""
        if self.random.random() < 0.3:
            self.wall_us -= self.random.choice((1, 7)) * SECOND
        self._full = self.random.random() < 0.2
        self._tight = self.random.randrange(10)

    def _append(self, fact: Any) -> None:
        self._high_us = max(self._high_us, self.wall_us)
        self.log(HOME).facts.append(fact)
        self._apply(fact)

    def sync(self, log: Any) -> None:
        super().sync(log)
        facts, self._stored = log.facts[self._stored :], len(log.facts)
        news = [fact for fact in facts if isinstance(fact, Delayed)]
        if news:
            self.tell(FactsStored(news))

    # -- what the process does

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Read):
            rows = keys(effect.request.rows)
            require(not {*rows} & (self._shelf | self._reading), "a message is loaded twice")
            require(
                all(ref >> ROW_BITS < self._stored for _, ref in rows),
                "a message is read before it is stored",
            )
            self._reading |= set(rows)
        elif isinstance(effect, Submit):
            require(not self._undecided, "a second release before the first is decided")
            self._undecided = True
            effect = effect._replace(command=self._fill(effect.command), body=b"")
        super()._carry_out(effect)

    def _fill(self, command: ReleaseRows) -> ReleaseDue:
        rows = keys(command.rows)
        require(all(at_us <= self.wall_us for at_us, _ in rows), "a message is released before it is due")
        require({*rows} <= self._shelf, "a message is released that was not loaded")
        rows = rows[: self.random.choice((1, len(rows), len(rows)))]
        refs = np.array([ref for _, ref in rows], np.int64)
        return ReleaseDue(BatchView(len(rows), 0, 0, 0), 0, *rows[-1], refs)

    def read(self, request: LoadDelayed) -> Any:
        rows = set(keys(request.rows))
        self._reading -= rows
        if self.fails():
            return Refusal("storage_fault", "a bad place")
        if len(rows) > 1 and len(rows) * self.ROW_BYTES > request.bytes_max:
            return DelayedLoaded(self.ROW_BYTES, kept=False)
        self._shelf |= rows
        return DelayedLoaded(self.ROW_BYTES)

    def forgotten(self, what: Key) -> None:
        self._shelf = {row for row in self._shelf if row > what}

    def _try(self, act: Any) -> Reply:
        reply = super()._try(act)
        self._undecided = False
        return reply

    def decide(self, target: TopicPartition, command: Any, body: Any) -> Reply:
        require(target == HOME and isinstance(command, ReleaseDue), f"{command} for {target}")
        self._high_us = max(self._high_us, self.wall_us)
        decision = self.queue.decide(command, at(self._high_us, wall_us=self.wall_us))
        if decision.facts:
            _, released = decision.facts
            self._append(Landed(tuple(command.refs.tolist()), released))
        return decision.reply

    def check(self) -> None:
        waits: dict[int, int] = {}
        for entry, fact in enumerate(self.log(HOME).facts):
            if isinstance(fact, Delayed):
                times = fact.view.deliver_at_us
                assert times is not None
                waits |= {ref_of(entry, row): at_us for row, at_us in enumerate(times.tolist())}
            elif isinstance(fact, ScheduleCancelled):
                for ref in fact.refs:
                    require(waits.pop(ref, None) is not None, "what is cancelled does not wait")
            elif isinstance(fact, Landed):
                for ref in fact.refs:
                    require(waits.pop(ref, None) is not None, "a message is appended that does not wait")
        if self.healed and not self._pending:
            tick_us = self.wall_us // TICK_US * TICK_US
            late = [row_text(at_us, ref) for ref, at_us in waits.items() if at_us <= tick_us]
            require(not late, f"left alone at {self.wall_us}: {late}")


def test_every_seed_holds() -> None:
    assert caught(ReleaseWorld, SEEDS) is None


# ------------------------------------------------------------------------------------------- planted bugs


class ReleasedEarly(ReleaseProcess):
    def _release(self, now: Now, *place: Any) -> Any:
        return super()._release(now._replace(wall_us=now.wall_us + TICK_US), *place)


class LoadedTwice(ReleaseProcess):
    """Those stored lately count as not read, however often they were."""

    def _choose(self, until_us: int, limit: int) -> Any:
        rows, marks = super()._choose(until_us, limit)
        return rows, marks._replace(since=self._loaded.since or marks.since)


class NeverLoaded(ReleaseProcess):
    """What was stored later than the marks is passed over."""

    def _choose(self, until_us: int, limit: int) -> Any:
        reach = self._loaded._replace(since=NEVER)
        rows, marks = super()._choose(until_us, limit)
        return rows[~reach.cover(rows)], marks


class LoadedBeforeItIsStored(ReleaseProcess):
    def _choose(self, until_us: int, limit: int) -> Any:
        self._stored_end = ref_of(1 << 30, 0)
        return super()._choose(until_us, limit)


class MarksPastAFailedRead(ReleaseProcess):
    def _found(self, result: Any) -> Any:
        marks = self._loading
        effects = super()._found(result)
        assert marks is not None
        self._loaded = marks
        return effects


class ReleasedWithoutBody(ReleaseProcess):
    """Released when it is asked for, and not when it is there."""

    def _release(self, now: Now, *place: Any) -> Any:
        loaded, self._loaded = self._loaded, self._loading or self._loaded
        effects = super()._release(now, *place)
        self._loaded = loaded
        return effects


class ReleasedFromMemory(ReleaseProcess):
    """What was chosen once is released, also after it was cancelled."""

    rows: Any = None

    def _release(self, now: Now, *place: Any) -> Any:
        effects = super()._release(now, *place)
        if effects and isinstance(effects[0], Submit):
            if self.rows is None:
                self.rows = effects[0].command.rows
            return (effects[0]._replace(command=ReleaseRows(self.rows, ANY)),)
        return effects

    def _answered(self, reply: Reply) -> Any:
        if isinstance(reply, Published):
            self.rows = None
        return super()._answered(reply)


class SecondBeforeTheFirstIsDecided(ReleaseProcess):
    def _release(self, now: Now, *place: Any) -> Any:
        self._undecided = False
        return super()._release(now, *place)


class NothingAfterTheClockWasPutBack(ReleaseProcess):
    high_us = 0

    def _review(self, now: Now) -> Any:
        self.high_us = max(self.high_us, now.wall_us)
        return () if now.wall_us < self.high_us else super()._review(now)


class GivenUp(ReleaseProcess):
    def step(self, event: Event, now: Now) -> Any:
        return [effect for effect in super().step(event, now) if not isinstance(effect, After)]


class NothingIsDropped(ReleaseProcess):
    def step(self, event: Event, now: Now) -> Any:
        return [effect for effect in super().step(event, now) if not isinstance(effect, Forget)]


class AFullShelfIsNeverCleared(ReleaseProcess):
    def _clear(self, *place: Any) -> Any:
        return ()


class TooMuchIsDropped(ReleaseProcess):
    def step(self, event: Event, now: Now) -> Any:
        effects = super().step(event, now)
        return [Forget(ALL) if isinstance(effect, Forget) else effect for effect in effects]


@pytest.mark.parametrize(
    "bug",
    [
        ReleasedEarly,
        LoadedTwice,
        NeverLoaded,
        LoadedBeforeItIsStored,
        MarksPastAFailedRead,
        ReleasedWithoutBody,
        ReleasedFromMemory,
        SecondBeforeTheFirstIsDecided,
        NothingAfterTheClockWasPutBack,
        GivenUp,
        NothingIsDropped,
        AFullShelfIsNeverCleared,
        TooMuchIsDropped,
    ],
)
def test_planted_bug_is_caught(bug: type[ReleaseProcess]) -> None:
    assert caught(partial(ReleaseWorld, kind=bug), SEEDS) is not None


class CancelledOnesAppended(DelayQueue):
    """A release is decided without a look at the refs: the core's half of the promise."""

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        rows = self.wheel.first(command.until_us, 1_000_000, command.until_ref)
        view = msgspec.structs.replace(command.view, count=len(rows))
        return super().decide(msgspec.structs.replace(command, view=view, refs=None), turn)


def test_a_release_that_is_not_compared_is_caught() -> None:
    assert caught(partial(ReleaseWorld, queue_kind=CancelledOnesAppended), SEEDS) is not None
