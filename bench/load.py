"""What a producer and a reader are asked to do and what they report: the language of harness and roles."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MB = 1_000_000
GB = 1_000_000_000


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load on one topic: for `seconds`, or `count` messages if given, and at most `bytes_max` of values."""

    mode: Literal["send", "send_many", "send_varied", "publish", "paced"]
    value_bytes: int
    reading: Literal["messages", "batches"]
    seconds: float
    count: int | None = None
    bytes_max: int
    batch: int = 500
    window: int = 64
    linger_ms: float | None = None
    rate: int = 0
    warmup_s: float = 1.0
    partitions: int = 1
    durability: Literal["interval", "fsync"] = "interval"
    group: str = ""
    """With a group, a consumer of it stands in for the reader."""
    group_options: dict[str, Any] = {}
    priorities: bool = False
    """Messages have random priorities."""
    keys: int = 0
    """Messages have one of so many keys."""


class Job(msgspec.Struct, frozen=True):
    """The one argument of a role, as JSON."""

    url: str
    topic: str
    load: Load


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds between the moment a message was due and the moment something happened to it."""

    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Produced(msgspec.Struct, frozen=True):
    """What a producer reports when everything it sent is acknowledged."""

    sent: int
    seconds: float
    latency: Latency | None = None


class Received(msgspec.Struct, frozen=True):
    """What a reader reports; `rate` is messages a second between the first and the last receipt."""

    received: int
    value_bytes: int
    seconds: float
    rate: float
    latency: Latency | None = None
