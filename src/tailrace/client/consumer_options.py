"""How a consumer takes part in its group: the options that are its own."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.client.membership import Moved
from tailrace.errors import InvalidRequest


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
        for name in ("batch_size", "fetch_bytes_max", "prefetch"):
            value = getattr(self, name)
            least = 0 if name == "prefetch" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidRequest(f"{name}: a whole number, at least {least}, not {value!r}")
        if self.auto_commit_ms < 0:
            raise InvalidRequest(f"auto_commit_ms: at least 0 (0 = never), not {self.auto_commit_ms!r}")
