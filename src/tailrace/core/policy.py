"""Options of a group: what may be asked for, the defaults, and the check that reports every problem."""

from __future__ import annotations

import msgspec


class GroupPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a group, all of them checked."""

    mode: str = "queue"
    assignment: str = "partitions"
    ordering: str = "key"
    start: str = "earliest"
    lease_ms: int = 30_000
    max_attempts: int = 5
    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000
    in_flight_max: int = 10_000
    group_in_flight_max: int = 100_000
    priority_mode: str = "weighted"
    starvation_ms: int = 30_000
    expired_to_dlq: bool = False
    session_ms: int = 30_000
    heartbeat_ms: int = 3_000
    revoke_timeout_ms: int = 60_000
