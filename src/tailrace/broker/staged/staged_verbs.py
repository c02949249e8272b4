"""Verbs of staged writes: batches are staged here; their writer's coordinator is asked to decide or abort.

`core.process.staged_process` has the order of steps from a decision to the end, and says when attempts are
dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.runtime.process_driver import ProcessKind
from tailrace.broker.runtime.turn import NOTHING, error_of
from tailrace.broker.topics import Topics
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model.commands import Reply
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import Look, StageBatch
from tailrace.core.model.queue_commands import AbortStaged, DecideStaged, StageRows
from tailrace.core.process.staged_process import StagedExpired, StagedProcess
from tailrace.core.staged.staged_batches import home_of_attempt
from tailrace.core.staged.staged_versions import malformed
from tailrace.errors import Denied, InvalidRequest
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.format.small import measure
from tailrace.ports import Gate, Respond, Verb

log = logging.getLogger("tailrace.staged")


class StagedVerbs:
    """Answers `StageRows`, `DecideStaged` and `AbortStaged`."""

    def __init__(self, topics: Topics, coordinators: GroupDirectory) -> None:
        self.verbs: dict[type[Any], Verb] = {
            StageRows: self._stage,
            DecideStaged: self._decide,
            AbortStaged: self._abort,
        }
        self._topics = topics
        self._coordinators = coordinators

    def _stage(self, request: StageRows, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if frame.crc32c(body) != request.crc:
            raise InvalidRequest("crc: the body does not match its checksum; it was damaged on the way")
        view = measure(body, request.columns, want_keys=runtime.options.key_index)
        work = StageBatch(request.writer, request.attempt, view, request.crc, request.number)
        runtime.submit(work, body, respond)

    def _decide(self, request: DecideStaged, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._check(request)
        self._ask(request, respond)

    def _abort(self, request: AbortStaged, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._check(DecideStaged(request.writer, 0, request.attempts, grouped=request.grouped))
        self._ask(request, respond)

    @staticmethod
    def _check(request: DecideStaged) -> None:
        problem = malformed(request)
        if problem is not None:
            raise error_of(problem)
        named = [item[0] for item in request.attempts] + [item[1] for item in request.grouped]
        internal = next((topic for topic in named if topic.startswith("_")), None)
        if internal is not None:
            raise Denied(f"topic {internal!r} is internal", topic=internal)

    def _ask(self, request: DecideStaged | AbortStaged, respond: Respond) -> None:
        """Ask the process of the writer's coordinator."""
        home = self._coordinators.home(request.writer)
        if home is None:
            made = partial(self._made, request, respond)
            self._coordinators.submit(request.writer, Look(), made)
        elif home.lost is not None:
            respond(home.lost, NOTHING)
        else:
            home.processes.ask(StagedProcess, request, respond)

    def _made(
        self, request: DecideStaged | AbortStaged, respond: Respond, reply: Reply, parts: Sequence[Buffer]
    ) -> None:
        """There are coordinators now."""
        if isinstance(reply, Refusal):
            respond(reply, NOTHING)
        else:
            self._ask(request, respond)

    def expired(self, place: TopicPartition, attempts: Sequence[int]) -> None:
        """A partition reports attempts that have expired: tell the coordinators of their writers. If nobody
        has ever decided anything, there are none yet."""
        if not self._coordinators.runtimes():
            self._coordinators.submit("", Look(), _unheard)
        for home in self._coordinators.runtimes():
            own = [number for number in attempts if home_of_attempt(number) == home.partition]
            if own:
                log.info("%s: %d staged attempts have expired", place, len(own))
                home.processes.ask(StagedProcess, StagedExpired(place, own))


def _unheard(reply: Reply, parts: Sequence[Buffer]) -> None:
    """The partition will report again."""


def staged(home: TopicPartition) -> ProcessKind:
    """The process that decides and applies the staged writes of a coordinator's writers."""
    return ProcessKind(partial(_make, home), StagedProcess.WATCHES, log)


def _make(home: TopicPartition, state: Coordinator) -> StagedProcess:
    return StagedProcess(home, state.staged)
