"""What members do at the coordinator of their group in a play, and how it reads.

workers share 4 partitions [OPTION=VALUE ...]     a group on a topic, before anybody is there
ada joins workers | ada leaves workers | ada is silent in workers
ada lets go of 2 3 of workers                     partitions that were to be given up
workers are taken by force                        whatever was not let go of in time
"""

from __future__ import annotations

import re
from typing import Any

from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model import group_facts as logged
from tailrace.core.model import internal_commands as asked
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import TopicOptions
from tests.core.turns import at


class MembershipActs:
    """The coordinator's side of a play."""

    def __init__(self) -> None:
        self.machine = Coordinator(TopicOptions())
        self.now_us = 0
        self._facts: list[Any] = []
        self._sizes: dict[str, int] = {}

    def perform(self, line: str) -> list[str] | None:
        """The trace of a command, or None when it is not one of these."""
        for pattern, method in (
            (r"(\w+) share (\d+) partitions((?: \w+=\w+)*)", self.share),
            (r"(\w+) joins (\w+)", self.join),
            (r"(\w+) leaves (\w+)", self.leave),
            (r"(\w+) is silent in (\w+)", self.silent),
            (r"(\w+) lets go of((?: \d+)+) of (\w+)", self.let_go),
            (r"(\w+) are taken by force", self.force),
        ):
            if found := re.fullmatch(pattern, line):
                return method(*found.groups())
        return None

    def share(self, group: str, count: str, options: str) -> list[str]:
        self._sizes[group] = int(count)
        policy = GroupPolicy(**dict(word.split("=") for word in options.split()))
        return self._do(group, asked.MakeGroup(group, policy, [("t", int(count))]))

    def join(self, member: str, group: str) -> list[str]:
        policy = self.machine.groups.by_name[group].policy
        return self._do(group, asked.Join(group, member, [("t", self._sizes[group])], policy))

    def leave(self, member: str, group: str) -> list[str]:
        return self._do(group, asked.Leave(group, member))

    def silent(self, member: str, group: str) -> list[str]:
        return self._do(group, asked.Leave(group, member, reason="silent"))

    def let_go(self, member: str, numbers: str, group: str) -> list[str]:
        places = [("t", int(number)) for number in numbers.split()]
        return self._do(group, asked.ConfirmReleased(group, member, places))

    def force(self, group: str) -> list[str]:
        return self._do(group, asked.PassTime(group))

    def _do(self, group: str, command: Any) -> list[str]:
        decision = self.machine.decide(command, at(self.now_us))
        for fact in decision.facts:
            self.machine.apply(fact)
        self._facts += decision.facts
        self.machine.check()
        replayed = Coordinator(TopicOptions())
        for fact in self._facts:
            replayed.apply(fact)
        assert replayed.snapshot() == self.machine.snapshot()
        if isinstance(decision.reply, Refusal):
            return [f"reply: {decision.reply.code}: {decision.reply.message}"]
        return [f"log:   {_told(fact)}" for fact in decision.facts] + [self._state(group)]

    def _state(self, group: str) -> str:
        known = self.machine.groups.by_name[group]
        parts = []
        for member in known.members:
            owned = known.owned(member)
            kept = [str(number) for (_, number), held in owned if not held.revoking]
            leaving = [str(number) for (_, number), held in owned if held.revoking]
            text = f"{member} has {' '.join(kept) or 'nothing'}"
            parts.append(text + (f", gives up {' '.join(leaving)}" if leaving else ""))
        return f"state: {'; '.join(parts) or 'nobody is there'}"


def _told(fact: Any) -> str:
    """A fact in words."""
    match fact:
        case logged.GroupCreated():
            return f"{fact.group} is there"
        case logged.MemberJoined():
            return f"{fact.member} joined"
        case logged.MemberLeft():
            return f"{fact.member} {'was not heard of' if fact.reason == 'silent' else 'left'}"
        case logged.Revoking():
            moves = [f"{number} shall go to {taker}" for _, number, taker in fact.moves]
            return ", ".join(moves)
        case logged.Assigned():
            moves = [f"{place} goes to {who or 'nobody'} ({times})" for _, place, who, times in fact.moves]
            return ", ".join(moves)
    return str(fact)
