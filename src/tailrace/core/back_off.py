"""How long a message waits after a failure: doubled each time, jittered, the same on every replica."""

from __future__ import annotations

import mmh3

from tailrace.core.policy import GroupPolicy


def back_off_us(policy: GroupPolicy, group: str, offset: int, failures: int) -> int:
    """Between half and the whole of the back-off of the policy, as the dice of this failure fall."""
    longest_us = 1000 * min(policy.backoff_ms << min(failures - 1, 40), policy.backoff_max_ms)
    dice: int = mmh3.hash(f"{group}/{offset}/{failures}", 0, signed=False)
    return longest_us - (longest_us // 2) * dice // 0xFFFFFFFF
