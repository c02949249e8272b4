"""Verbs of staged writes: stage, decide, abort; decided versions are rolled forward, whatever crashes.

A writer writes to many partitions so that all of it becomes visible, or nothing. It stages batches under an
*attempt*, outside of the readable log, and then decides a *version* that names the attempts that count:

    StageRows      orders/0: attempt "a1", 3 batches      orders/1: attempt "a1", 2 batches
    DecideStaged   version 7 = ["a1" on orders/0, "a1" on orders/1]
      check        each target has the attempts with all their batches, synced
      choose       one fact on the writer's coordinator: version 7 is decided     ◀── the point of no return
      apply        each target appends its attempts (`StagedApply`)
      finish       the coordinator hears that all targets have them

Each step is synced before the next begins, whatever the targets' topics promise (`broker.runtime.assurance`).
A crash before the point of no return leaves staged batches that nobody decided, and the writer decides again.
A crash after it loses nothing: the next start finds version 7 decided and not done, and rolls it forward.

Two runs of one writer may stage the same version, the other one under attempt "a2". Only one of them wins
version 7; the loser's request is answered with the winner's decision, and its attempts are dropped.

*Dropping.* An attempt may be dropped (aborted, lost the race, too old) only when no decision names it. The
decision is made on another partition than the one that stores the attempt, so three rules hold:

* attempts that a decision under way names are *guarded*, from before they are checked;
* attempts that a made decision names are known to the coordinator until the version is applied;
* while a coordinator is not well, no attempt of its writers is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, error_of
from tailrace.broker.staged.staged_apply import StagedApply
from tailrace.broker.topics import Topics
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.group_facts import Target
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import CheckStaged, DropStaged, StageBatch
from tailrace.core.model.internal_topic import TOPIC, home_of
from tailrace.core.model.queue_commands import AbortStaged, DecideStaged, StagedDecision, StageRows
from tailrace.core.staged.staged_batches import attempt_number
from tailrace.core.staged.staged_versions import ChooseStaged, DecidedVersion, malformed, targets_of
from tailrace.errors import InvalidRequest, NotFound, TailraceError, Unavailable
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.format.small import measure
from tailrace.ports import Gate, Respond, Verb

log = logging.getLogger("tailrace.staged")

UPKEEP_US = 60_000_000

Place = tuple[str, int]


class StagedVerbs:
    """Answers `StageRows`, `DecideStaged` and `AbortStaged`."""

    def __init__(self, topics: Topics, pump: Pump, coordinators: GroupDirectory) -> None:
        self.verbs: dict[type[Any], Verb] = {
            StageRows: self._stage,
            DecideStaged: self._decide,
            AbortStaged: self._abort,
        }
        self._topics = topics
        self._pump = pump
        self._coordinators = coordinators
        self._guarded: Counter[int] = Counter()
        self._rolls = StagedApply(topics, pump, coordinators)

    def start(self) -> None:
        """Roll forward what was decided before the start, and do the upkeep from now on."""
        self.resume()
        self._pump.every(UPKEEP_US, self._upkeep)

    def _upkeep(self, now_us: int) -> None:
        self.resume()
        self.expire()

    # -- lookups

    def _require_well(self, writer: str) -> None:
        """Raise the storage error of a writer's coordinator, or `Unavailable` while it takes no writes."""
        runtimes = self._coordinators.runtimes()
        lost = self._coordinators.lost(writer)
        if lost is not None:
            raise error_of(lost)
        if runtimes and not _well(runtimes[home_of(writer)]):
            raise Unavailable(f"the coordinator of writer {writer!r} takes no writes now")

    def _last(self, writer: str) -> DecidedVersion | None:
        coordinator = self._coordinators.of(writer)
        return None if coordinator is None else coordinator.staged.last(writer)

    # -- verbs

    def _stage(self, request: StageRows, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if frame.crc32c(body) != request.crc:
            raise InvalidRequest("crc: the body does not match its checksum; it was damaged on the way")
        view = measure(body, request.columns, want_keys=runtime.options.key_index)
        work = StageBatch(request.writer, request.attempt, view, request.crc, request.number)
        runtime.submit(work, body, respond)

    def _decide(self, request: DecideStaged, body: Buffer, respond: Respond, gate: Gate) -> None:
        problem = malformed(request)
        if problem is not None:
            respond(problem, NOTHING)
            return
        self._require_well(request.writer)
        numbers = _numbers(request.writer, targets_of(request.attempts, request.grouped))
        self._guarded.update(numbers)

        def over(reply: Reply) -> None:
            self._unguard(numbers)
            respond(reply, NOTHING)

        try:
            if self._is_old(request):
                self._choose(request, over)
            else:
                self._check(request, over)
        except TailraceError:
            self._unguard(numbers)
            raise

    def _unguard(self, numbers: list[int]) -> None:
        self._guarded.subtract(numbers)
        for number in numbers:
            if self._guarded[number] <= 0:
                del self._guarded[number]

    def _is_old(self, request: DecideStaged) -> bool:
        """Whether a decision that was made already answers the request."""
        last = self._last(request.writer)
        return last is not None and request.version <= last.version

    def _check(self, request: DecideStaged, over: Callable[[Reply], None]) -> None:
        """Ask every target whether it has the named attempts, durably; then decide."""
        targets = targets_of(request.attempts, request.grouped)
        batches = request.batches or [-1] * len(targets)
        numbers = _numbers(request.writer, targets)
        work: dict[Place, CheckStaged] = {}
        for (topic, partition, _), number, count in zip(targets, numbers, batches, strict=True):
            check = work.setdefault((topic, partition), CheckStaged([], []))
            check.attempts.append(number)
            check.batches.append(count)

        def checked(problem: Refusal | None) -> None:
            lost = self._coordinators.lost(request.writer)
            # Meanwhile the same request may have come a second time, and been served.
            if lost is not None:
                over(lost)
            elif problem is None or self._is_old(request):
                self._choose(request, over)
            else:
                over(problem)

        _on_each([(self._topics.partition(*place), check) for place, check in work.items()], checked)

    def _choose(self, request: DecideStaged, over: Callable[[Reply], None]) -> None:
        """Let the coordinator decide; a winner is answered after a round of applying."""
        writer = request.writer

        def decided(reply: Reply, parts: Any) -> None:
            if not isinstance(reply, StagedDecision):
                over(reply)
                return
            answer, winners = reply, targets_of(reply.attempts, reply.grouped)
            last = self._last(writer)
            applied = last is None or last.version != reply.version or last.done
            if reply.won and not applied:
                self._rolls.begin(
                    writer,
                    reply.version,
                    winners,
                    lambda done: over(msgspec.structs.replace(answer, applied=done)),
                )
                return
            over(msgspec.structs.replace(answer, applied=applied))
            if not reply.won:
                self._drop(writer, set(targets_of(request.attempts, request.grouped)) - set(winners))

        topics = {topic for topic, _, _ in targets_of(request.attempts, request.grouped)}
        hosts = [host for topic in sorted(topics) if (host := self._topics.find(topic)) is not None]
        ids = {host.info.name: host.info.id for host in hosts}
        self._coordinators.submit(writer, ChooseStaged(request, ids), decided)

    def _abort(self, request: AbortStaged, body: Buffer, respond: Respond, gate: Gate) -> None:
        problem = malformed(DecideStaged(request.writer, 0, request.attempts, grouped=request.grouped))
        if problem is not None:
            respond(problem, NOTHING)
            return
        self._require_well(request.writer)
        dropped = targets_of(request.attempts, request.grouped)
        self._drop(request.writer, dropped, lambda refusal: respond(refusal or Done(), NOTHING))

    # -- dropping

    def _drop(
        self,
        writer: str,
        attempts: Iterable[Target],
        over: Callable[[Refusal | None], None] = lambda refusal: None,
    ) -> None:
        """Drop attempts of a writer, except for those that a decision names, made or under way."""
        last = self._last(writer)
        kept = set(self._guarded)
        if last is not None and not last.done:
            kept.update(_numbers(writer, last.targets))
        work: dict[Place, DropStaged] = {}
        for topic, partition, attempt in attempts:
            number = attempt_number(writer, attempt)
            if number not in kept:
                work.setdefault((topic, partition), DropStaged([])).attempts.append(number)
        targets = []
        for place, drop in work.items():
            try:
                targets.append((self._topics.partition(*place), drop))
            except NotFound:
                continue  # The staged batches went with the topic.
        _on_each(targets, over)

    def expire(self) -> None:
        """Drop attempts that were not decided within the time to live of staged batches. Nothing is dropped
        while some coordinator cannot be asked what it decided."""
        if not all(_well(runtime) for runtime in self._coordinators.runtimes()) or self._topics.kept_of(
            TOPIC
        ):
            return
        kept: set[int] | None = None
        for runtime in self._topics.queues():
            if not _well(runtime):
                continue
            old = runtime.state.staging.expired(runtime.time_us())
            if not old:
                continue
            if kept is None:
                kept = self._decided()
            gone = [number for number in old if number not in kept]
            if gone:
                log.info("%s: %d staged attempts that nobody decided are dropped", runtime.name, len(gone))
                runtime.submit(DropStaged(gone), b"", lambda reply, parts: None)

    def _decided(self) -> set[int]:
        """Attempts that a decision names, made or under way."""
        decided = set(self._guarded)
        for _, coordinator in self._coordinators.machines():
            for writer, last in coordinator.staged.pending():
                decided.update(_numbers(writer, last.targets))
        return decided

    # -- rolling forward

    def resume(self) -> None:
        """Roll forward every decision that is not applied everywhere and not under way."""
        for runtime, coordinator in self._coordinators.machines():
            if not _well(runtime):
                continue
            for writer, last in coordinator.staged.pending():
                if not self._rolls.under_way(writer):
                    # Decide again, only to learn when the decision is durable.
                    again = DecideStaged(writer, last.version, last.attempts, grouped=last.grouped)
                    self._coordinators.submit(writer, again, self._resumed(writer))

    def _resumed(self, writer: str) -> Respond:
        def decided(reply: Reply, parts: Any) -> None:
            last = self._last(writer)
            if isinstance(reply, StagedDecision) and last is not None and not last.done:
                winners = targets_of(reply.attempts, reply.grouped)
                self._rolls.begin(writer, reply.version, winners, lambda done: None)

        return decided


def _on_each(work: list[tuple[QueuePartition, Any]], over: Callable[[Refusal | None], None]) -> None:
    """Submit a command to each partition; `over` gets the first refusal, or None, when all have synced."""
    waiting = len(work)
    problem: Refusal | None = None

    def answered(reply: Reply, parts: Any) -> None:
        nonlocal waiting, problem
        if isinstance(reply, Refusal):
            problem = problem or reply
        waiting -= 1
        if not waiting:
            over(problem)

    for runtime, command in work:
        runtime.submit(command, b"", runtime.surely(answered))
    if not work:
        over(None)


def _well(runtime: PartitionRuntime[Any]) -> bool:
    return runtime.fault is None and not runtime.reopening


def _numbers(writer: str, attempts: Iterable[Target]) -> list[int]:
    names = [attempt for _, _, attempt in attempts]
    numbers = {name: attempt_number(writer, name) for name in set(names)}
    return [numbers[name] for name in names]
