"""A seeded world for one process: logs that are written and synced, answers in any order, refusals, crashes.

Logs are lists of plain facts. A command appends some; a sync may come at any time; a crash takes from each
log some of what was not synced, and ends the life of the process with all that was under way. An answer to a
`Submit` with `sure` waits for the sync of its log, another one leaves at once. The test of a process says
what its commands and reads do, and what must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from random import Random
from typing import Any

from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.process import process as core

Doing = Callable[[], None]
PATIENCE_US = 1_500_000
"""In the end, retries by the wall clock come within this time."""


class Broken(AssertionError):
    """Something that must hold does not."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


class ModelLog:
    """A log: everything below `synced` survives a crash."""

    def __init__(self) -> None:
        self.facts: list[Hashable] = []
        self.synced = 0

    def crash(self, random: Random) -> None:
        """Lose some of what was not synced; what is left is synced when the log is opened."""
        self.synced = random.randint(self.synced, len(self.facts))
        del self.facts[self.synced :]


class ProcessWorld:
    """One process, its home log, and the logs of others."""

    REFUSED = 0.15

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.logs: dict[TopicPartition, ModelLog] = {}
        self.catalog = Catalog()
        self.wall_us = 0
        self.process: core.Process | None = None
        self.healed = False
        """Whether nothing fails any more."""
        self._pending: list[tuple[TopicPartition | None, Doing]] = []
        """What is under way; each piece may come next, but commands to one partition keep their order."""
        self._at_wall: dict[Hashable, int] = {}
        self._waiting: list[tuple[ModelLog, int, Hashable, Reply]] = []
        """Replies that wait for a sync."""

    # -- what the test of a process says

    def make(self) -> core.Process:
        """A process, from the home log as it is."""
        raise NotImplementedError

    def decide(self, target: TopicPartition, command: Any, body: Any) -> Reply:
        """Append what a command leads to."""
        raise NotImplementedError

    def change(self, request: Any) -> Reply:
        """Change the catalog."""
        raise NotImplementedError

    def read(self, request: Any) -> Any:
        """The result of a read."""
        raise NotImplementedError

    def crashed(self) -> None:
        """The logs were cut."""

    def told(self, what: Any) -> None:
        """The process has told those who wait."""

    def forgotten(self, what: Any) -> None:
        """The process does not need something any more that it has read."""

    def answered(self, tag: Hashable, reply: Reply) -> None:
        """The process has answered a request."""

    def happen(self) -> None:
        """Something happens by itself."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `Broken` if something does not hold."""
        raise NotImplementedError

    # -- what happens

    def log(self, name: TopicPartition) -> ModelLog:
        return self.logs.setdefault(name, ModelLog())

    def run(self, steps: int = 120) -> None:
        """Steps with trouble, then steps without, until nothing is left to do."""
        self.begin()
        for _ in range(steps):
            self._step()
            self.check()
        self.healed = True
        for _ in range(20 * steps):
            for log in self.logs.values():
                self.sync(log)
            if not self._pending:
                self.pass_time(PATIENCE_US)
            if not self._pending:
                break
            self._do_one()
        require(not self._pending, "there is no end to it")
        self.check()

    def begin(self) -> None:
        """A life begins."""
        self._pending.clear()
        self._waiting.clear()
        self._at_wall.clear()
        self.process = self.make()
        self.tell(core.Begun())

    def now(self) -> core.Now:
        return core.Now(self.catalog, self.wall_us, now_us=self.wall_us)

    def tell(self, event: core.Event) -> None:
        assert self.process is not None
        for effect in self.process.step(event, self.now()):
            self._carry_out(effect)

    def _step(self) -> None:
        chance = self.random.random()
        if chance < 0.04:
            for log in self.logs.values():
                log.crash(self.random)
            self.crashed()
            self.begin()
        elif chance < 0.2:
            self.happen()
        elif chance < 0.4 and self.logs:
            log = self.random.choice(list(self.logs.values()))
            self.sync(log)
        elif self._pending:
            self._do_one()

    def sync(self, log: ModelLog) -> None:
        """Everything that was written to a log is synced."""
        log.synced = len(log.facts)
        self._release()

    def _do_one(self) -> None:
        target, _ = self.random.choice(self._pending)
        places = [at for at, item in enumerate(self._pending) if item[0] == target]
        _, doing = self._pending.pop(places[0] if target is not None else self.random.choice(places))
        doing()

    def _release(self) -> None:
        ready = [item for item in self._waiting if item[1] <= item[0].synced]
        self._waiting = [item for item in self._waiting if item[1] > item[0].synced]
        for _, _, tag, reply in ready:
            self.later(core.Answered(tag, reply))

    def pass_time(self, us: int) -> None:
        """The wall clock goes on."""
        self.wall_us += us
        for tag in [tag for tag, wall_us in self._at_wall.items() if wall_us <= self.wall_us]:
            del self._at_wall[tag]
            self.later(core.Due(tag))

    def drop_waiting(self, log: ModelLog) -> None:
        """A log was opened again alone: nobody knows what became of the replies that waited for it."""
        lost = [item for item in self._waiting if item[0] is log]
        self._waiting = [item for item in self._waiting if item[0] is not log]
        for _, _, tag, _ in lost:
            self.later(core.Answered(tag, Refusal("full", "it failed", "unknown")))

    def later(self, event: core.Event) -> None:
        """The process hears of it, some time."""
        self._pending.append((None, lambda: self.tell(event)))

    def fails(self) -> bool:
        return not self.healed and self.random.random() < self.REFUSED

    def _carry_out(self, effect: core.Effect) -> None:
        match effect:
            case core.Submit():
                self._pending.append((effect.target, lambda: self._submit(effect)))
            case core.Change():
                self._pending.append((None, lambda: self._change(effect)))
            case core.Read():
                self._pending.append((None, lambda: self._read(effect)))
            case core.After():
                self.later(core.Due(effect.tag))
            case core.AtWall():
                self._at_wall[effect.tag] = effect.wall_us
                self.pass_time(0)
            case core.Cancel():
                self._at_wall.pop(effect.tag, None)
            case core.Forget():
                self.forgotten(effect.what)
            case core.Respond():
                self.answered(effect.tag, effect.reply)
            case core.Tell():
                self.told(effect.what)

    def _try(self, act: Callable[[], Reply]) -> Reply:
        """What an act replies, unless it fails; nobody knows then whether it was done."""
        if not self.fails():
            return act()
        if self.random.random() < 0.5:
            act()
        return Refusal("full", "it failed", "unknown")

    def _read(self, effect: core.Read) -> None:
        self.tell(core.Found(effect.tag, self.read(effect.request)))

    def _change(self, effect: core.Change) -> None:
        self.later(core.Answered(effect.tag, self._try(lambda: self.change(effect.request))))

    def _submit(self, effect: core.Submit) -> None:
        log = self.log(effect.target)
        reply = self._try(lambda: self._decided(effect))
        if effect.sure and not isinstance(reply, Refusal):
            self._waiting.append((log, len(log.facts), effect.tag, reply))
            self._release()
        else:
            self.later(core.Answered(effect.tag, reply))

    def _decided(self, effect: core.Submit) -> Reply:
        if effect.topic_id:
            entry = self.catalog.topics.get(effect.target.topic)
            if entry is None or entry.id != effect.topic_id:
                return Refusal("not_found", f"there is no partition {effect.target}")
        return self.decide(effect.target, effect.command, effect.body)


def caught(worlds: Callable[[int], ProcessWorld], seeds: Sequence[int]) -> int | None:
    """The first seed in which something does not hold."""
    for seed in seeds:
        try:
            worlds(seed).run()
        except Broken:
            return seed
    return None


DONE = Done()
