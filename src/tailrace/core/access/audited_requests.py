"""Which requests are written into the audit log, and what of them: complete by construction.

    ORDINARY    what applications do all day            only if it is refused
    LOOKS       administrators look at something        always, but at most so many a second
    all others  something is changed                    always; of users at most so many a second each

A request type that is new is written down unless somebody adds it to one of the lists. Of what was asked,
every field is written that is neither a secret nor content of messages; so a new field that is either has to
be named here, or be bytes, which never are written.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tailrace.core.access.resources import NEEDS
from tailrace.core.model import access_commands as access
from tailrace.core.model import commands as topics
from tailrace.core.model import damage_commands as damage
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as queues

Kind = Literal["look", "change"]

ORDINARY: frozenset[type] = frozenset(
    (
        topics.Ping,
        topics.ListTopics,
        topics.DescribeTopic,
        topics.Publish,
        topics.ClaimProducer,
        topics.Fetch,
        topics.FindOffsets,
        topics.ReadKey,
        queues.Lease,
        queues.Ack,
        queues.Nack,
        queues.GiveBack,
        queues.RejectMessages,
        queues.Extend,
        queues.Commit,
        queues.Committed,
        queues.FindUnsettled,
        queues.Republish,
        queues.CancelScheduled,
        queues.ListScheduled,
        queues.Trace,
        queues.StageRows,
        queues.DecideStaged,
        queues.AbortStaged,
        queues.ReadFacts,
        groups.ListGroups,
        groups.DescribeGroup,
        groups.JoinGroup,
        groups.Heartbeat,
        groups.LeaveGroup,
        groups.ListSchedules,
        access.WhoAmI,
    )
)

LOOKS: frozenset[type] = frozenset(
    (
        access.ListUsers,
        access.ListTokens,
        access.ListRules,
        access.ListQuotas,
        access.ListTenants,
        access.CheckAccess,
        damage.Scrub,
        queues.HoldOffsets,
        queues.SettleOffsets,
        queues.Reopen,
    )
)
"""The last four are steps of upkeep and of redrives, of which there can be many."""

AUDITED: dict[type, Kind] = {
    kind: "look" if kind in LOOKS else "change" for kind in NEEDS if kind not in ORDINARY
}

UNTOLD = frozenset(("password", "secret", "value", "key", "headers", "spans"))
"""Fields that are secrets, contents of messages, or long lists of numbers."""


def asked_of(request: Any) -> dict[str, Any]:
    """The fields of a request that may be written down, but for those that have their default."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(request):
        value = getattr(request, field.name)
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value == default and type(value) is type(default):
            continue
        if field.name not in UNTOLD and not isinstance(value, bytes):
            found[field.name] = value
        elif field.name == "password":
            found[field.name] = "(given)"
    return found
