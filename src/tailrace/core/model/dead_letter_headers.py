"""The headers that a dead letter gains: where it came from, who could not handle it, and why."""

from __future__ import annotations

PREFIX = "tailrace-"
STORY = (
    "origin-topic",
    "origin-partition",
    "origin-offset",
    "origin-time",
    "origin-topic-id",
    "group",
    "attempts",
    "deliveries",
    "first-delivery",
    "last-delivery",
    "last-member",
    "reason",
    "error",
)
REASONS = ("max_attempts", "max_deliveries", "rejected", "expired", "poison")
NAMES = frozenset(PREFIX + name for name in STORY)
"""Only these: other headers with the prefix, such as those of the bus, belong to the message."""
