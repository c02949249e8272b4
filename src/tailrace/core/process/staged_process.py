"""Staged writes: a version of a writer is decided once, and then applied on every target.

A writer has staged batches on many partitions under an *attempt*, outside of the readable log. It wants all
of them to become visible, or none. Its coordinator is the partition of `_groups` that its name hashes to, and
the home of this process. A request to decide takes four steps, each synced before the next begins, whatever
the topics promise:

    1  check     every target has the named attempts, with all their batches
    2  choose    one fact at home, `StagedDecided`: these attempts are the version      ◀── no return
    3  apply     every target appends its attempts, once; each remembers the version
    4  finish    one fact at home, `StagedDone`: nobody has to be asked again

An example. Writer "loader" decides version 7 with attempt "a1" on orders/0 and orders/1:

    CheckStaged to orders/0 and orders/1      Done, Done: the batches are synced
    ChooseStaged to _groups/3                 won: the decision is synced
    ApplyStaged to orders/0                   Done: the rows and the note "loader is at 7" are synced
    ApplyStaged to orders/1                   refused: the disk is full
      the writer is answered: decided, and not applied everywhere yet
      a pause of 100 ms, doubled after each round up to 30 s
    ApplyStaged to orders/1                   Done
    FinishStaged to _groups/3                 the decision is done; version 8 may be decided

    power fails before 1 or 2       nobody decided anything: the writer decides again
    power fails between 1 and 2     likewise; the batches stay, because what was checked was synced
    power fails between 2 and 3     the next life finds version 7 decided and not done, and applies it
    power fails within 3            every target is asked again; orders/0 knows that it is at 7
    power fails between 3 and 4     likewise: all of them know

If step 1 did not wait for the sync, power could take batches of a version that is decided: a part of it would
never appear. If step 2 did not, a target could have rows of a version that nobody decided. If step 3 did not,
power could take the rows from a target that is never asked again.

What is decided is never undone, so rounds go on for as long as it takes. Only targets that have not confirmed
are asked again. A target whose topic was deleted counts as done, and only the catalog can say so, by the
topic's id; a topic that is merely unknown is waited for. The next version of a writer is refused until its
last one is done, so each target applies them in order.

Two runs of one writer may decide the same version with different attempts. The fact at home names one winner;
the other run is answered with that decision, and its attempts are dropped.

*Dropping.* An attempt is dropped when it is aborted, has lost, or has expired: its partition reports it when
no batch came for an hour (`StagedExpired`). No attempt is dropped that a decision names, made or under way:

    guarded     attempts that a request under way names, from before they are checked until it is answered
    pending     attempts that a made decision names, until that decision is done
    not well    while the home log is damaged nobody knows all decisions: nothing of its writers is dropped

All of this is asked of one coordinator alone, which decides about the writer and sends the drops. Commands to
one partition keep their order, so a drop that was sent before a check is decided before it: the check then
finds nothing, and nothing is decided.

*Nothing is remembered.* Requests under way end with the life, and are repeated by their writers; pending
decisions are in the state of the home partition. Bodies never come here: each target reads its staged batches
back from its own log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.group_facts import Target
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import ApplyStaged, CheckStaged, DropStaged
from tailrace.core.model.queue_commands import AbortStaged, DecideStaged, StagedDecision
from tailrace.core.process.process import (
    After,
    Answered,
    Asked,
    Due,
    Effect,
    Event,
    Log,
    Now,
    Respond,
    Submit,
)
from tailrace.core.staged.staged_batches import attempt_number
from tailrace.core.staged.staged_versions import (
    ChooseStaged,
    DecidedVersion,
    FinishStaged,
    StagedVersions,
    targets_of,
)
from tailrace.errors import NotFound, Unavailable

PAUSE_US_MIN = 100_000
PAUSE_US_MAX = 30_000_000


class StagedExpired(NamedTuple):
    """A partition reports attempts that nobody has decided in time; their writers belong to this home."""

    place: TopicPartition
    attempts: list[int]


class _StagedTag(NamedTuple):
    what: Literal["check", "choose", "apply", "pause", "finish", "drop"]
    name: str
    """The writer."""
    number: int
    """Of the request; or the version that is applied."""
    place: TopicPartition | None = None


class _Work:
    """A request under way, and the targets that have not answered it yet."""

    def __init__(self, tag: Hashable, request: DecideStaged | AbortStaged) -> None:
        self.tag = tag
        self.request = request
        self.guarded: list[int] = []
        self.topic_ids: dict[str, int] = {}
        self.unheard = 0
        self.problem: Refusal | None = None


class _Roll:
    """A decided version on its way to its targets."""

    def __init__(self, decided: DecidedVersion) -> None:
        self.version = decided.version
        self.topic_ids = decided.topic_ids
        self.todo: dict[TopicPartition, list[str]] = {}
        for topic, number, attempt in decided.targets:
            self.todo.setdefault(TopicPartition(topic, number), []).append(attempt)
        self.asked: set[TopicPartition] = set()
        """The targets that have not answered in this round."""
        self.waiting: list[tuple[_Work, StagedDecision]] = []
        """Requests that are answered at the end of the round."""
        self.pause_us = PAUSE_US_MIN


class StagedProcess:
    """The staged writes of the writers of one coordinator."""

    WATCHES: frozenset[type] = frozenset()

    def __init__(self, home: TopicPartition, versions: StagedVersions) -> None:
        self._home = home
        self._versions = versions
        self._work: dict[int, _Work] = {}
        self._number = 0
        self._guarded: Counter[int] = Counter()
        self._rolls: dict[str, _Roll] = {}
        self._answered: dict[str, Callable[[_StagedTag, Reply, Now], Sequence[Effect]]] = {
            "check": self._checked,
            "choose": self._chosen,
            "apply": self._applied,
            "finish": self._finished,
            "drop": self._dropped,
        }

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """See `Process.step`."""
        if isinstance(event, Answered):
            assert isinstance(event.tag, _StagedTag)
            return self._answered[event.tag.what](event.tag, event.reply, now)
        if isinstance(event, Due):
            assert isinstance(event.tag, _StagedTag)
            return self._go_on(event.tag)
        if isinstance(event, Asked):
            return self._asked(event, now)
        if now.damaged:
            return ()
        return [
            effect  # Begun: what an earlier life has decided.
            for writer, decided in self._versions.pending()
            for effect in self._roll(writer, decided)
        ]

    def _asked(self, asked: Asked, now: Now) -> Sequence[Effect]:
        request = asked.request
        if isinstance(request, StagedExpired):
            return () if now.damaged else self._expired(request)
        work = _Work(asked.tag, request)
        if now.damaged:
            text = f"the coordinator of writer {request.writer!r} is damaged, and takes no writes"
            return self._answer(work, Refusal(Unavailable.code, text))
        return self._check(work, now) if isinstance(request, DecideStaged) else self._abort(work)

    @staticmethod
    def _answer(work: _Work, reply: Reply) -> Sequence[Respond]:
        """Answer a request, if somebody waits."""
        return () if work.tag is None else (Respond(work.tag, reply),)

    # -- check

    def _check(self, work: _Work, now: Now) -> Sequence[Effect]:
        """Ask every target whether it has the named attempts, durably."""
        request = work.request
        assert isinstance(request, DecideStaged)
        targets = targets_of(request.attempts, request.grouped)
        work.guarded = _numbers(request.writer, targets)
        self._guarded.update(work.guarded)
        for topic in sorted({topic for topic, _, _ in targets}):
            entry = now.catalog.topics.get(topic)
            if entry is not None:
                work.topic_ids[topic] = entry.id
            elif work.problem is None:
                work.problem = Refusal(
                    NotFound.code, f"there is no topic {topic[:80]!r}", details={"topic": topic[:80]}
                )
        if work.problem is not None or self._is_old(request):
            return self._choose(work)
        checks: dict[TopicPartition, CheckStaged] = {}
        batches = request.batches or [-1] * len(targets)
        for (topic, number, _), attempt, count in zip(targets, work.guarded, batches, strict=True):
            check = checks.setdefault(TopicPartition(topic, number), CheckStaged([], []))
            check.attempts.append(attempt)
            check.batches.append(count)
        if not checks:
            return self._choose(work)
        tag = self._begin("check", work, len(checks))
        return [
            Submit(tag._replace(place=place), place, check, topic_id=work.topic_ids[place.topic])
            for place, check in checks.items()
        ]

    def _begin(self, what: Literal["check", "choose", "drop"], work: _Work, answers: int) -> _StagedTag:
        """Wait for answers of this many targets."""
        self._number += 1
        self._work[self._number] = work
        work.unheard = answers
        return _StagedTag(what, work.request.writer, self._number)

    def _heard(self, tag: _StagedTag, problem: Refusal | None) -> _Work | None:
        """A target has answered; returns the request when it was the last one."""
        work = self._work[tag.number]
        work.problem = work.problem or problem
        work.unheard -= 1
        return None if work.unheard else self._work.pop(tag.number)

    def _is_old(self, request: DecideStaged) -> bool:
        """Whether a decision that was made already answers the request."""
        last = self._versions.last(request.writer)
        return last is not None and request.version <= last.version

    def _checked(self, tag: _StagedTag, reply: Reply, now: Now) -> Sequence[Effect]:
        work = self._heard(tag, reply if isinstance(reply, Refusal) else None)
        return () if work is None else self._choose(work)

    # -- choose

    def _choose(self, work: _Work) -> Sequence[Effect]:
        """Let the coordinator decide. If a target lacks something, it may be because the same request came
        twice, and was decided and applied meanwhile."""
        request = work.request
        assert isinstance(request, DecideStaged)
        if work.problem is not None and not self._is_old(request):
            return self._over(work, work.problem)
        return (Submit(self._begin("choose", work, 1), self._home, ChooseStaged(request, work.topic_ids)),)

    def _chosen(self, tag: _StagedTag, reply: Reply, now: Now) -> Sequence[Effect]:
        """The decision is synced: apply it, and answer a winner after the first round."""
        work = self._work.pop(tag.number)
        if not isinstance(reply, StagedDecision):
            return self._over(work, reply)
        last = self._versions.last(tag.name)
        if last is not None and last.version == reply.version and not last.done:
            if reply.won:
                return self._roll(tag.name, last, (work, reply))
        else:
            reply = msgspec.structs.replace(reply, applied=True)
        effects: list[Effect] = [*self._over(work, reply)]
        if not reply.won:
            asked = targets_of(work.request.attempts, work.request.grouped)
            winners = set(targets_of(reply.attempts, reply.grouped))
            lost = _Work(None, AbortStaged(tag.name, [target for target in asked if target not in winners]))
            effects += self._abort(lost)
        return effects

    def _over(self, work: _Work, reply: Reply) -> Sequence[Respond]:
        """A request to decide is answered: its attempts are guarded no more."""
        self._guarded.subtract(work.guarded)
        self._guarded = +self._guarded
        return self._answer(work, reply)

    # -- apply

    def _roll(
        self, writer: str, decided: DecidedVersion, waiting: tuple[_Work, StagedDecision] | None = None
    ) -> Sequence[Effect]:
        """Apply a decided version. If that is under way, only wait for the end of the round."""
        roll = self._rolls.get(writer)
        if (
            roll is None or roll.version != decided.version
        ):  # The last one is done, and its answer on the way.
            roll = self._rolls[writer] = _Roll(decided)
            roll.waiting = [] if waiting is None else [waiting]
            return self._round(writer, roll)
        if waiting is None:
            return ()
        if roll.asked:
            roll.waiting.append(waiting)
            return ()
        # A round has ended a moment ago: all have it, or the next one waits for its pause.
        work, reply = waiting
        return self._over(work, msgspec.structs.replace(reply, applied=not roll.todo))

    def _round(self, writer: str, roll: _Roll) -> Sequence[Effect]:
        """Ask every target that has not confirmed yet."""
        if not roll.todo:
            return self._round_over(writer, roll)
        roll.asked = set(roll.todo)
        return [
            Submit(
                _StagedTag("apply", writer, roll.version, place),
                place,
                ApplyStaged(writer, roll.version, attempts),
                topic_id=roll.topic_ids.get(place.topic, 0),
            )
            for place, attempts in roll.todo.items()
        ]

    def _applied(self, tag: _StagedTag, reply: Reply, now: Now) -> Sequence[Effect]:
        roll, place = self._rolls[tag.name], tag.place
        assert place is not None
        roll.asked.discard(place)
        effects: list[Effect] = []
        if not isinstance(reply, Refusal) or self._is_gone(roll, place, reply, now):
            del roll.todo[place]
        elif reply.code == NotFound.code:
            text = f"{place} is not known: version {roll.version} of writer {tag.name!r} waits for it"
            effects.append(Log("error", text))
        else:
            effects.append(Log("warning", f"{place}: a decided version is not applied yet: {reply.message}"))
        return effects if roll.asked else [*effects, *self._round_over(tag.name, roll)]

    def _is_gone(self, roll: _Roll, place: TopicPartition, refusal: Refusal, now: Now) -> bool:
        """Whether a target needs nothing any more: its topic was deleted, and is not merely unknown."""
        topic_id = roll.topic_ids.get(place.topic, 0)
        return refusal.code == NotFound.code and now.catalog.was_deleted(topic_id)

    def _round_over(self, writer: str, roll: _Roll) -> Sequence[Effect]:
        """All have answered: the coordinator hears that all have it, or there will be another round."""
        done = not roll.todo
        effects: list[Effect] = [self._finish(writer, roll) if done else self._pause(writer, roll)]
        waiting, roll.waiting = roll.waiting, []
        for work, reply in waiting:
            effects += self._over(work, msgspec.structs.replace(reply, applied=done))
        return effects

    def _go_on(self, tag: _StagedTag) -> Sequence[Effect]:
        """A pause is over."""
        roll = self._rolls.get(tag.name)
        return () if roll is None or roll.version != tag.number else self._round(tag.name, roll)

    def _pause(self, writer: str, roll: _Roll) -> After:
        pause_us, roll.pause_us = roll.pause_us, min(2 * roll.pause_us, PAUSE_US_MAX)
        return After(_StagedTag("pause", writer, roll.version), pause_us)

    # -- finish

    def _finish(self, writer: str, roll: _Roll) -> Submit:
        # If it is lost, all targets are asked again, and each says that it has the version.
        tag = _StagedTag("finish", writer, roll.version)
        return Submit(tag, self._home, FinishStaged(writer, roll.version), sure=False)

    def _finished(self, tag: _StagedTag, reply: Reply, now: Now) -> Sequence[Effect]:
        roll = self._rolls.get(tag.name)
        if roll is None or roll.version != tag.number:
            return ()
        if isinstance(reply, Refusal):
            return (self._pause(tag.name, roll),)
        del self._rolls[tag.name]
        return ()

    # -- drop

    def _abort(self, work: _Work) -> Sequence[Effect]:
        """Drop attempts of a writer, except for those that a decision names."""
        writer, request = work.request.writer, work.request
        kept = self._kept(writer)
        drops: dict[TopicPartition, DropStaged] = {}
        targets = targets_of(request.attempts, request.grouped)
        for (topic, number, _), attempt in zip(targets, _numbers(writer, targets), strict=True):
            if attempt not in kept:
                drops.setdefault(TopicPartition(topic, number), DropStaged([])).attempts.append(attempt)
        if not drops:
            return self._answer(work, Done())
        tag = self._begin("drop", work, len(drops))
        return [Submit(tag._replace(place=place), place, drop) for place, drop in drops.items()]

    def _kept(self, writer: str) -> set[int]:
        """The attempts of a writer that a decision names, made or under way."""
        kept, last = set(self._guarded), self._versions.last(writer)
        if last is not None and not last.done:
            kept.update(_numbers(writer, last.targets))
        return kept

    def _dropped(self, tag: _StagedTag, reply: Reply, now: Now) -> Sequence[Effect]:
        # Without a partition there is nothing to drop: the staged batches went with the topic.
        problem = reply if isinstance(reply, Refusal) and reply.code != NotFound.code else None
        work = self._heard(tag, problem)
        return () if work is None else self._answer(work, work.problem or Done())

    def _expired(self, expired: StagedExpired) -> Sequence[Effect]:
        kept = set(self._guarded)
        for writer, _ in self._versions.pending():
            kept |= self._kept(writer)
        gone = [attempt for attempt in expired.attempts if attempt not in kept]
        if not gone:
            return ()
        tag = self._begin("drop", _Work(None, AbortStaged("", [])), 1)
        return (Submit(tag._replace(place=expired.place), expired.place, DropStaged(gone), sure=False),)


def _numbers(writer: str, attempts: Iterable[Target]) -> list[int]:
    names = [attempt for _, _, attempt in attempts]
    numbers = {name: attempt_number(writer, name) for name in set(names)}
    return [numbers[name] for name in names]
