"""The head of a partition's log: where it begins and ends, its time and its options.

The parts of a partition share one head instead of knowing the partition that they are a part of. Everybody
reads it; only `apply` writes it.
"""

from __future__ import annotations

from tailrace.core.model.topic_options import TopicOptions


class LogHead:
    """What the parts of one partition have in common."""

    __slots__ = ("append_time_us", "end_offset", "options", "start_offset")

    def __init__(self, options: TopicOptions) -> None:
        self.options = options
        self.start_offset = 0
        self.end_offset = 0
        self.append_time_us = 0

    def load(self, start_offset: int, end_offset: int, append_time_us: int = 0) -> None:
        """Stand where a log stands that is known otherwise: from a snapshot, say."""
        self.start_offset, self.end_offset = start_offset, end_offset
        self.append_time_us = append_time_us

    def reconfigure(self, options: TopicOptions) -> None:
        """The topic has other options from now on."""
        self.options = options

    def begin(self, offset: int) -> None:
        """What is before an offset is gone."""
        self.start_offset = offset

    def extend(self, end_offset: int) -> None:
        """The log ends here now."""
        self.end_offset = end_offset

    def pass_time(self, time_us: int) -> None:
        """A fact has this time; time never goes back."""
        if time_us > self.append_time_us:
            self.append_time_us = time_us
