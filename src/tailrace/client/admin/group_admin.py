"""Administration of groups: enlisting, looking at them, altering, pausing, moving and deleting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from tailrace.client.messages import point
from tailrace.client.rpc.calls import ask
from tailrace.core.model.group_commands import (
    AlterGroup,
    CreateGroup,
    DeleteGroup,
    DescribeGroup,
    GroupInfo,
    GroupList,
    ListGroups,
    PauseGroup,
    ResetGroup,
    ResetPlan,
)
from tailrace.errors import InvalidRequest
from tailrace.ports import BrokerVerbs


class Group(msgspec.Struct, frozen=True):
    """A group; `members` and `partitions`, one dict each, on describe only."""

    name: str
    topics: list[str]
    options: dict[str, Any]
    paused: bool = False
    member_count: int = 0
    lag: int = 0
    created: bool = False
    members: list[dict[str, Any]] = []
    partitions: list[dict[str, Any]] = []
    warnings: list[str] = []
    """What its options mean that may surprise, and what is not as it should be."""
    known: bool = True
    """False: partitions know it, and the broker's list of groups does not. It is kept, and nobody consumes
    as it until it is enlisted or joined again."""

    @classmethod
    def of(cls, info: GroupInfo) -> Group:
        """From the reply of the broker."""
        return cls(*(getattr(info, "group" if name == "name" else name) for name in cls.__struct_fields__))


class Reset(msgspec.Struct, frozen=True):
    """What a reset did, or would do: for each partition the committed offset before and after."""

    changes: dict[int, tuple[int, int]]
    done: bool


class Groups:
    """Look at groups and change them. Every call takes a `timeout` in seconds; None means the client's."""

    def __init__(self, verbs: BrokerVerbs, timeout: float) -> None:
        self._verbs = verbs
        self._timeout = timeout

    def _time(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    async def list(
        self, prefix: str = "", *, topic: str | None = None, timeout: float | None = None
    ) -> list[Group]:
        """Groups by name, or only those of one topic."""
        reply = await ask(self._verbs, ListGroups(prefix, topic), self._time(timeout))
        assert isinstance(reply, GroupList)
        return [Group.of(info) for info in reply.groups]

    async def describe(self, group: str, *, timeout: float | None = None) -> Group:
        """A group with its members and, per partition, who has it, lag, what is in flight, and counters."""
        reply = await ask(self._verbs, DescribeGroup(group), self._time(timeout))
        assert isinstance(reply, GroupInfo)
        return Group.of(reply)

    async def create(
        self,
        /,
        group: str,
        topics: str | Sequence[str],
        *,
        if_missing: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> Group:
        """Enlist a group before anybody connects: messages from now on wait for it. With `if_missing` a
        group that is there is enlisted on further topics where it was not yet."""
        names = [topics] if isinstance(topics, str) else list(topics)
        request = CreateGroup(group, names, options, if_missing)
        reply = await ask(self._verbs, request, self._time(timeout), repeatable=if_missing)
        assert isinstance(reply, GroupInfo)
        return Group.of(reply)

    async def delete(self, group: str, *, force: bool = False, timeout: float | None = None) -> None:
        """Forget a group and its state on every topic; refused while it has members, unless forced."""
        await ask(self._verbs, DeleteGroup(group, force), self._time(timeout), repeatable=False)

    async def alter(self, /, group: str, *, timeout: float | None = None, **options: Any) -> Group:
        """Change options of a group, all but mode and ordering; those that are not named stay. When this
        returns, every partition has them, durably, and members that run hear of them at once."""
        reply = await ask(self._verbs, AlterGroup(group, options), self._time(timeout))
        assert isinstance(reply, GroupInfo)
        return Group.of(reply)

    async def pause(self, group: str, *, timeout: float | None = None) -> None:
        """Stop deliveries to the whole group; its members stay. When this returns, no partition leases to it
        any more; after `Timeout` some may still do so, and hear of it by themselves."""
        await ask(self._verbs, PauseGroup(group, True), self._time(timeout))

    async def resume(self, group: str, *, timeout: float | None = None) -> None:
        """Go on with deliveries."""
        await ask(self._verbs, PauseGroup(group, False), self._time(timeout))

    async def reset(
        self,
        group: str,
        topic: str,
        to: str | int | datetime | Mapping[int, int],
        *,
        dry_run: bool = False,
        force: bool = False,
        timeout: float | None = None,
    ) -> Reset:
        """Move a group on one topic: to "earliest", "latest", a time (datetime, or microseconds), or to
        offsets by partition. Leases, attempts and back-offs are dropped. Refused while members are connected,
        unless forced; with `dry_run` nothing is changed."""
        if isinstance(to, Mapping):
            if not to:
                raise InvalidRequest("to: offsets by partition, and there is none")
            offsets = sorted(to.items())
            request = ResetGroup(group, topic, offsets=offsets, dry_run=dry_run, force=force)
        else:
            request = ResetGroup(group, topic, point(to), dry_run=dry_run, force=force)
        # Asked twice it moves twice to the same point; what happened between would be undone once more.
        reply = await ask(self._verbs, request, self._time(timeout), repeatable=dry_run)
        assert isinstance(reply, ResetPlan)
        return Reset({p: (before, after) for p, before, after in reply.changes}, reply.done)
