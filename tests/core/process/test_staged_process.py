"""Staged writes as a process: a play, and a seeded model with planted bugs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from tailrace.core.catalog.catalog import Catalog, change
from tailrace.core.model.commands import CreateTopic, DeleteTopic, Reply
from tailrace.core.model.facts import Appended, Staged, StageDropped
from tailrace.core.model.group_facts import StagedDecided, StagedDone, Target
from tailrace.core.model.identifiers import BatchView, Refusal, TopicPartition
from tailrace.core.model.internal_commands import ApplyStaged, StageBatch
from tailrace.core.model.queue_commands import AbortStaged, DecideStaged, StagedDecision
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.core.process.process import After, Answered, Asked, Begun, Due, Effect, Event, Now, Submit
from tailrace.core.process.staged_process import StagedExpired, StagedProcess
from tailrace.core.staged.staged_batches import attempt_number
from tailrace.core.staged.staged_versions import StagedVersions, grouped_of, targets_of
from tests.core.process.process_model import ModelLog, ProcessWorld, caught, require
from tests.core.process.process_plays import check_play, python
from tests.core.turns import at

HOME = TopicPartition("_groups", 3)
T0 = 1_700_000_000_000_000
SEEDS = range(150)
BUG_SEEDS = range(600)


def changed(catalog: Catalog, request: Any) -> Catalog:
    made = change(catalog, request, 0)
    assert not isinstance(made, Refusal), made
    return made[0]


def place_of(text: str) -> TopicPartition:
    topic, _, number = text.partition("/")
    return TopicPartition(topic, int(number))


# --------------------------------------------------------------------------------------------------- play


class StagedActs:
    """The words of the play beside events.

    acts        topic NAME · NAME is deleted · the home log is damaged · a new life
    facts       version N is decided: ATTEMPT on PLACES · version N is done         of writer "w"
    requests    ID: decides N: ATTEMPT on PLACES · ID: aborts ATTEMPT on PLACES
    reports     expired on PLACE: ATTEMPTS

    The reply to a choice is `won` or `lost`."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.damaged = False
        self.versions = StagedVersions()
        self.process = StagedProcess(HOME, self.versions)

    def now(self) -> Now:
        return Now(self.catalog, damaged=self.damaged)

    def act(self, line: str) -> bool:
        words = line.split()
        if words[0] == "topic":
            self.catalog = changed(self.catalog, CreateTopic(words[1], {"partitions": 2}))
        elif line == "the home log is damaged":
            self.damaged = True
        elif line == "a new life":
            self.process = StagedProcess(HOME, self.versions)
        elif found := re.fullmatch(r"version (\d+) is decided: (.*)", line):
            grouped = grouped_of(self._targets(found[2]))
            ids = {topic: self.catalog.topics[topic].id for _, topic, _ in grouped}
            self.versions.apply(StagedDecided("w", int(found[1]), 0, grouped, topic_ids=ids))
        elif found := re.fullmatch(r"version (\d+) is done", line):
            self.versions.apply(StagedDone("w", int(found[1]), 0))
        elif found := re.fullmatch(r"(\w+) is deleted", line):
            self.catalog = changed(self.catalog, DeleteTopic(found[1]))
        else:
            return False
        return True

    @staticmethod
    def _targets(text: str) -> list[Target]:
        attempt, _, places = text.partition(" on ")
        return [(*place_of(place), attempt) for place in places.split(", ") if place]

    def event(self, line: str) -> Event | None:
        if found := re.fullmatch(r"(\w+): decides (\d+): (.*)", line):
            return Asked(DecideStaged("w", int(found[2]), self._targets(found[3])), found[1])
        if found := re.fullmatch(r"(\w+): aborts (.*)", line):
            return Asked(AbortStaged("w", self._targets(found[2])), found[1])
        if found := re.fullmatch(r"expired on (\S+): (.*)", line):
            numbers = [attempt_number("w", attempt) for attempt in found[2].split(", ")]
            return Asked(StagedExpired(place_of(found[1]), numbers))
        return None

    def value(self, text: str) -> Any:
        last = self.versions.last("w")
        if text in ("won", "lost"):
            assert last is not None
            return last.answer(text == "won")
        return python(text)


def test_play() -> None:
    check_play("staged", StagedActs)


# -------------------------------------------------------------------------------------------------- model

TOPICS = {"a": 2, "b": 1}
PLACES = [TopicPartition(topic, number) for topic, count in TOPICS.items() for number in range(count)]
WRITERS = "uv"


class StagedWorld(ProcessWorld):
    """Two writers stage, decide and abort; topics are deleted, or unknown for a while; partitions fail alone,
    or have no room.

    The coordinator's part and the targets are the real state machines. Facts in the logs are those of one
    decision each, in a tuple. A batch is known by its timestamp. Commands of an ended life are still on their
    way to targets; their answers are heard by nobody."""

    def __init__(self, seed: int, kind: type[StagedProcess] = StagedProcess) -> None:
        super().__init__(seed)
        self._kind = kind
        self._life = 0
        self._time_us = T0
        self._made = 0
        for topic, count in TOPICS.items():
            self.catalog = changed(self.catalog, CreateTopic(topic, {"partitions": count}))
        self._known = self.catalog
        """The catalog as it should be."""
        self.versions = StagedVersions()
        self.targets = {place: Partition(TopicOptions()) for place in PLACES}
        for name in (HOME, *PLACES):
            self.log(name)
        self._staged: dict[tuple[str, int, str], list[TopicPartition]] = {}
        """By writer, version and attempt: where it was staged."""
        self._full: TopicPartition | None = None
        """A target whose disk has no room for a version."""
        self._asked: dict[Any, DecideStaged | AbortStaged] = {}
        self._frozen: set[tuple[str, int, str]] = set()
        """Attempts that somebody has asked to decide: nothing is added to them."""
        self._wanted: dict[tuple[str, int], dict[TopicPartition, list[int]]] = {}
        """By decided version: the batches of each target."""

    def run(self, steps: int = 240) -> None:
        super().run(steps)

    # -- logs and machines

    def make(self) -> StagedProcess:
        return self._kind(HOME, self.versions)

    def begin(self) -> None:
        on_their_way = [item for item in self._pending if item[0] in PLACES]
        self._life += 1
        self._asked.clear()
        waiting = list(self._waiting)
        super().begin()
        self._pending[:0] = on_their_way
        self._waiting += waiting

    def crashed(self) -> None:
        self._pending.clear()
        self._waiting.clear()
        self._reopen_home()
        for place in PLACES:
            self._reopen(place)

    def _reopen_home(self) -> None:
        self.versions = StagedVersions()
        for decided in self.log(HOME).facts:
            for fact in decided:  # type: ignore[attr-defined]
                self.versions.apply(fact)

    def _reopen(self, place: TopicPartition) -> None:
        self.targets[place] = self._machine(place, len(self.log(place).facts))

    def _machine(self, place: TopicPartition, end: int) -> Partition:
        machine = Partition(TopicOptions())
        for decided in self.log(place).facts[:end]:
            for fact in decided:  # type: ignore[attr-defined]
                machine.apply(fact)
        return machine

    def _synced(self, place: TopicPartition) -> Partition:
        """What power leaves of a target."""
        return self._machine(place, self.log(place).synced)

    def tell(self, event: Event) -> None:
        if isinstance(event, Answered | Due):
            life, tag = event.tag  # type: ignore[misc]
            if life != self._life:
                return
            event = event._replace(tag=tag)
        super().tell(event)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Submit | After):
            effect = effect._replace(tag=(self._life, effect.tag))
        super()._carry_out(effect)

    def _submit(self, effect: Submit) -> None:
        if effect.target != HOME:
            super()._submit(effect)
        elif self.fails():  # Storage of the home partition fails, and with it this life ends.
            if self.random.random() < 0.5:
                self._decided(effect)
            self.log(HOME).crash(self.random)
            self._reopen_home()
            self.begin()
        else:
            healed, self.healed = self.healed, True
            super()._submit(effect)
            self.healed = healed

    def sync(self, log: ModelLog) -> None:
        if self.healed:
            self.catalog = self._known
            self._full = None
        super().sync(log)

    def decide(self, target: TopicPartition, command: Any, body: Any = b"") -> Reply:
        self._time_us += 1_000
        log = self.log(target)
        if target != HOME and target.topic not in self.catalog.topics:
            return Refusal("not_found", f"there is no partition {target}")
        if target == self._full and isinstance(command, ApplyStaged):
            return Refusal("full", "no space is left")
        machine: Any = self.versions if target == HOME else self.targets[target]
        turn = at(self._time_us, next_entry=len(log.facts))
        decision = machine.decide(command, turn)
        if decision.missing is not None:
            require(not decision.missing.lost, f"{target} has not all of {command}")
            views = [self._view(log, entry) for entry in decision.missing.entries]
            none = [0] * len(views)
            command = msgspec.structs.replace(
                command, entries=decision.missing.entries, views=views, crcs=none, bodies=none
            )
            decision = machine.decide(command, turn)
        for fact in decision.facts:
            self._look_at(target, fact, command)
        if decision.facts:
            for fact in decision.facts:
                machine.apply(fact)
            log.facts.append(tuple(decision.facts))
        return decision.reply  # type: ignore[no-any-return]

    @staticmethod
    def _view(log: ModelLog, entry: int) -> BatchView:
        (fact,) = log.facts[entry]  # type: ignore[misc]
        assert isinstance(fact, Staged)
        return fact.view

    def _look_at(self, target: TopicPartition, fact: Any, command: Any) -> None:
        if isinstance(fact, StagedDecided):
            self._check_decision(fact)
        elif isinstance(fact, StagedDone):
            self._check_applied(fact.writer, fact.version, "is done")
        elif isinstance(fact, StageDropped):
            named = {
                attempt_number(writer, attempt)
                for writer, last in self.versions.pending()
                for *place, attempt in last.targets
                if TopicPartition(*place) == target
            }
            require(not named & set(fact.attempts), f"{target} drops what a decision names")
        elif isinstance(fact, Appended):
            assert isinstance(command, ApplyStaged)
            made = [each for each in self._decisions() if each[0] == command.writer]
            known = (command.writer, command.version) in made
            require(known, f"power may take version {command.version}, which {target} has")

    def _decisions(self) -> list[tuple[str, int]]:
        """What no crash takes back."""
        log = self.log(HOME)
        facts = [fact for decided in log.facts[: log.synced] for fact in decided]  # type: ignore[attr-defined]
        return [(fact.writer, fact.version) for fact in facts if isinstance(fact, StagedDecided)]

    def _check_decision(self, fact: StagedDecided) -> None:
        """Its targets have the batches, whatever power takes."""
        wanted: dict[TopicPartition, list[int]] = {}
        for topic, number, attempt in targets_of((), fact.grouped):
            place = TopicPartition(topic, number)
            if not self._is_there(place, fact.topic_ids):
                continue
            entries = self._synced(place).staging.entries([attempt_number(fact.writer, attempt)])
            require(bool(entries), f"{place} may not have {attempt}, which is decided")
            views = [self._view(self.log(place), entry) for entry in entries]
            wanted.setdefault(place, []).extend(view.timestamp_max_us for view in views)
        self._wanted[fact.writer, fact.version] = wanted

    def _is_there(self, place: TopicPartition, ids: dict[str, int]) -> bool:
        entry = self._known.topics.get(place.topic)
        return entry is not None and ids.get(place.topic) in (None, entry.id)

    def _check_applied(self, writer: str, version: int, what: str) -> None:
        for place in self._wanted.get((writer, version), ()):
            reached = self._synced(place).staging.applied_version(writer)
            require(reached >= version, f"{writer} {version} {what}, and {place} is at {reached}")

    # -- what happens

    def happen(self) -> None:
        random = self.random
        acts: list[Callable[[], None]] = [self._stage] * 8 + [self._decide] * 6
        acts += [self._expire] * 3 + [self._abort, self._fail_alone, self._fill, self._away, self._delete]
        random.choice(acts)()

    def _attempt(self) -> tuple[str, int, str]:
        writer = self.random.choice(WRITERS)
        last = self.versions.last(writer)
        version = (0 if last is None else last.version) + self.random.choice((0, 1, 1, 1))
        return writer, version, f"{version}{self.random.choice('xy')}"

    def _stage(self) -> None:
        attempt = self._attempt()
        if attempt in self._frozen:
            return
        writer, _, name = attempt
        for place in self.random.sample(PLACES, self.random.randint(1, len(PLACES))):
            if place.topic in self.catalog.topics:
                number = len(self.targets[place].staging.entries([attempt_number(writer, name)]))
                self._made += 1
                self.decide(place, StageBatch(writer, name, BatchView(1, 0, 0, T0 + self._made), 0, number))
                self._staged.setdefault(attempt, []).append(place)

    def _decide(self) -> None:
        attempt = self._attempt()
        writer, version, name = attempt
        self._frozen.add(attempt)
        places = dict.fromkeys(self._staged.get(attempt, ()))
        self._ask(DecideStaged(writer, version, [(*place, name) for place in places]))

    def _ask(self, request: Any) -> None:
        self._made += 1
        self._asked[self._made] = request
        self.tell(Asked(request, self._made))

    def _abort(self) -> None:
        writer, _, name = attempt = self._attempt()
        places = dict.fromkeys(self._staged.get(attempt, ()))
        self._ask(AbortStaged(writer, [(*place, name) for place in places]))

    def _expire(self) -> None:
        place = self.random.choice(PLACES)
        numbers = {attempt_number(writer, name) for writer, _, name in self._staged}
        found = self.targets[place].staging.known(numbers)
        self.tell(Asked(StagedExpired(place, found)))

    def _fail_alone(self) -> None:
        place = self.random.choice(PLACES)
        self.log(place).crash(self.random)
        self.drop_waiting(self.log(place))
        self._reopen(place)

    def _fill(self) -> None:
        self._full = None if self._full else self.random.choice(PLACES)

    def _away(self) -> None:
        """The catalog is an older one, or the right one again."""
        self.catalog = self._known
        if self.random.random() < 0.7:
            topics = {name: entry for name, entry in self._known.topics.items() if name != "b"}
            self.catalog = msgspec.structs.replace(self._known, topics=topics)

    def _delete(self) -> None:
        if self.random.random() > 0.3 or self.catalog is not self._known:
            return
        self._known = changed(self._known, DeleteTopic("b"))
        self._known = self.catalog = changed(self._known, CreateTopic("b", {"partitions": TOPICS["b"]}))
        place = TopicPartition("b", 0)
        log = self.log(place)
        log.facts.clear()
        log.synced = 0
        self.drop_waiting(log)
        self._reopen(place)
        for wanted in self._wanted.values():
            wanted.pop(place, None)

    def answered(self, tag: Any, reply: Reply) -> None:
        request = self._asked.pop(tag)
        if not isinstance(reply, StagedDecision):
            return
        assert isinstance(request, DecideStaged)
        if reply.won:
            require((request.writer, reply.version) in self._decisions(), "what was told is not decided")
            mine = targets_of(reply.attempts, reply.grouped)
            require(sorted(mine) == sorted(request.attempts), "another attempt has won")
        if reply.applied:
            self._check_applied(request.writer, reply.version, "was told to be applied")

    # -- what must hold

    def check(self) -> None:
        for place in PLACES:
            facts = [fact for decided in self.log(place).facts for fact in decided]  # type: ignore[attr-defined]
            rows = [fact.view.timestamp_max_us for fact in facts if isinstance(fact, Appended)]
            require(len(set(rows)) == len(rows), f"{place} has a batch twice")
            if self.healed and not self._pending:
                self._check_rows(place, rows)
        if self.healed and not self._pending:
            require(not list(self.versions.pending()), "a decision is not done")
            require(not self._asked, "nobody was answered")

    def _check_rows(self, place: TopicPartition, rows: list[int]) -> None:
        """Everything that was decided is there, in order, and nothing else."""
        decisions, expected = self._decisions(), []
        for writer, version in decisions:
            expected += self._wanted[writer, version].get(place, [])
        require(sorted(rows) == sorted(expected), f"{place} has {rows} instead of {expected}")
        for writer in WRITERS:
            own = [
                batch
                for each in decisions
                if each[0] == writer
                for batch in self._wanted[each].get(place, [])
            ]
            require(
                [row for row in rows if row in own] == own, f"{place} has versions of {writer} out of order"
            )


def test_every_seed_holds() -> None:
    assert caught(StagedWorld, SEEDS) is None


def test_the_model_does_decide_and_apply_something() -> None:
    applied = done = 0
    for seed in range(20):
        world = StagedWorld(seed)
        world.run()
        applied += sum(len(world.log(place).facts) for place in PLACES)
        done += len(world._decisions())
    assert done > 20
    assert applied > 60


# ------------------------------------------------------------------------------------------- planted bugs


class CheckedWhenWritten(StagedProcess):
    WHAT = "check"

    def step(self, event: Event, now: Now) -> list[Effect]:
        return [
            effect._replace(sure=False)
            if isinstance(effect, Submit) and effect.tag.what == self.WHAT  # type: ignore[attr-defined]
            else effect
            for effect in super().step(event, now)
        ]


class DecidedWhenWritten(CheckedWhenWritten):
    WHAT = "choose"


class AppliedWhenWritten(CheckedWhenWritten):
    WHAT = "apply"


class NotChecked(StagedProcess):
    def _check(self, work: Any, now: Now) -> Any:
        super()._check(work, now)
        return self._choose(work)


class NotGuarded(StagedProcess):
    def _check(self, work: Any, now: Now) -> Any:
        effects = super()._check(work, now)
        self._guarded.clear()
        return effects


class PendingDropped(StagedProcess):
    def _kept(self, writer: str) -> set[int]:
        return set(self._guarded)


class FinishedByTheFirst(StagedProcess):
    def _round_over(self, writer: str, roll: Any) -> Any:
        roll.todo.clear()
        return super()._round_over(writer, roll)


class FinishedAtOnce(StagedProcess):
    """So the next version begins while this one is under way."""

    def _round(self, writer: str, roll: Any) -> Any:
        return [*super()._round(writer, roll), self._finish(writer, roll)]


class UnknownTakenForDeleted(StagedProcess):
    def _is_gone(self, roll: Any, place: Any, refusal: Refusal, now: Now) -> bool:
        return refusal.code == "not_found"


class DeletedWaitedFor(StagedProcess):
    def _is_gone(self, roll: Any, place: Any, refusal: Refusal, now: Now) -> bool:
        return False


class GivenUp(StagedProcess):
    def step(self, event: Event, now: Now) -> Any:
        return [effect for effect in super().step(event, now) if not isinstance(effect, After)]


class ForgottenAtARestart(StagedProcess):
    def step(self, event: Event, now: Now) -> Any:
        return () if isinstance(event, Begun) else super().step(event, now)


class LosersToldThatTheyWon(StagedProcess):
    def _chosen(self, tag: Any, reply: Any, now: Now) -> Any:
        if isinstance(reply, StagedDecision):
            reply = msgspec.structs.replace(reply, won=True)
        return super()._chosen(tag, reply, now)


@pytest.mark.parametrize(
    "bug",
    [
        CheckedWhenWritten,
        DecidedWhenWritten,
        AppliedWhenWritten,
        NotChecked,
        NotGuarded,
        PendingDropped,
        FinishedByTheFirst,
        FinishedAtOnce,
        UnknownTakenForDeleted,
        DeletedWaitedFor,
        GivenUp,
        ForgottenAtARestart,
        LosersToldThatTheyWon,
    ],
)
def test_planted_bug_is_caught(bug: type[StagedProcess]) -> None:
    assert caught(partial(StagedWorld, kind=bug), BUG_SEEDS) is not None
