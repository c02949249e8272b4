"""The headers that a dead letter gains: its origin, its deliveries, the last member, and the reason."""

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
"""All of them. Other headers with the prefix, such as those of the bus, belong to the message."""
