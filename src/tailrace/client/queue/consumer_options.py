"""How a consumer takes part in its group: the options that are its own."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.client.queue.membership import Moved
from tailrace.client.rpc.calls import whole_of


class ConsumerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a consumer takes part in its group; `group` are the options of the group itself."""

    mode: str = "queue"
    member: str
    wait: bool = True
    batch_size: int = 500
    fetch_bytes_max: int = 1_048_576
    prefetch: int = 2000
    auto_commit_ms: int = 5000
    skip_expired: bool = False
    on_assigned: Moved | None = None
    on_revoked: Moved | None = None
    group: dict[str, Any] = {}

    def __post_init__(self) -> None:
        whole_of("batch_size", self.batch_size)
        whole_of("fetch_bytes_max", self.fetch_bytes_max)
        whole_of("prefetch", self.prefetch, 0)
        whole_of("auto_commit_ms", self.auto_commit_ms, 0)
