"""What the flows of a producer are in when they run on an event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from tailrace.client.publish.partition_flow import PendingBatch
from tailrace.client.sdk_tuning import REMARK_S
from tailrace.errors import TailraceError, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs, Respond

log = logging.getLogger("tailrace.client")


class LoopOutside:
    """See `partition_flow.Outside`. Refusals that are tried again, such as those of a full disk, are told to
    the log: the first, then one in `REMARK_S`."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        loop: asyncio.AbstractEventLoop,
        settled: Callable[[PendingBatch], None],
    ) -> None:
        self._verbs = verbs
        self.now_s = loop.time
        self.future = loop.create_future
        self.settled = settled
        self._loop = loop
        self._remark_s = loop.time()

    def submit(self, request: Any, body: Buffer, respond: Respond) -> None:
        """See `Outside.submit`."""
        self._verbs.submit(request, body, respond)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """See `Outside.later`."""
        self._loop.call_later(delay_s, action)

    def retried(self, error: TailraceError) -> None:
        """See `Outside.retried`. Lost connections are told by who makes them again."""
        if type(error) is not Unavailable and self.now_s() >= self._remark_s:
            self._remark_s = self.now_s() + REMARK_S
            log.warning("a message was refused and is sent again: %s", error.message)

    def new_producer_id(self) -> int:
        """See `Outside.new_producer_id`; never 0."""
        return secrets.randbits(64) or 1
