"""Commands that the broker gives the coordinators of groups; they never travel.

Clients' requests (`core.group_commands`) become these once the shell has looked up what only it knows: how
many partitions the topics have.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.group_commands import Place
from tailrace.core.policy import GroupPolicy

Sizes = list[tuple[str, int]]
"""Topics with the number of their partitions."""


class Look(msgspec.Struct, frozen=True):
    """Nothing changes; the reply comes when all that was decided before is durable."""


class MakeGroup(msgspec.Struct, frozen=True):
    """Create a group; with `if_missing`, one that is there is enlisted on further topics."""

    group: str
    policy: GroupPolicy
    topics: Sizes
    if_missing: bool = False
    topic_ids: dict[str, int] = {}


class Join(msgspec.Struct, frozen=True):
    """Become a member; the group is made when it is new. `options` are those that the member insists on."""

    group: str
    member: str
    topics: Sizes
    policy: GroupPolicy
    options: dict[str, Any] = {}
    wait: bool = True
    client: str = ""
    topic_ids: dict[str, int] = {}


class Leave(msgspec.Struct, frozen=True):
    """A member leaves, or is taken out for a reason: see `facts.MemberLeft`."""

    group: str
    member: str
    reason: str = "left"


class ConfirmReleased(msgspec.Struct, frozen=True):
    """A member has given up places that were to be revoked."""

    group: str
    member: str
    places: list[Place]


class PassTime(msgspec.Struct, frozen=True):
    """Time has passed: places whose owners did not confirm in time move all the same, and shared topics that
    have had enough partitions for long enough are divided."""

    group: str


class ChangeOptions(msgspec.Struct, frozen=True):
    """Give a group other options; those that are not named stay."""

    group: str
    options: dict[str, Any]


class ResizeTopics(msgspec.Struct, frozen=True):
    """Topics have so many partitions now; 0: they were deleted, those with these ids. A topic with another id
    than the group knows was deleted and made again."""

    group: str
    topics: Sizes
    topic_ids: dict[str, int] = {}


class RaiseGenerations(msgspec.Struct, frozen=True):
    """Partitions were found at a higher generation than the group has: (topic, partition, generation)."""

    group: str
    places: list[tuple[str, int, int]]


class SetPaused(msgspec.Struct, frozen=True):
    """Stop or resume a group."""

    group: str
    paused: bool


class DropGroup(msgspec.Struct, frozen=True):
    """Delete a group; refused while it has members, unless forced."""

    group: str
    force: bool = False


class ConfirmForgotten(msgspec.Struct, frozen=True):
    """Partitions have nothing of a deleted group any more."""

    group: str
    id: int
    places: list[Place]


class ConfirmEnlisted(msgspec.Struct, frozen=True):
    """Partitions have the group."""

    group: str
    places: list[Place]


class TickDone(msgspec.Struct, frozen=True):
    """The message of a tick is in the topic."""

    name: str
    tick_us: int
