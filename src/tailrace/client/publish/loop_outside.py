"""What the flows of a producer are in when they run on an event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from tailrace.client.publish.partition_flow import PendingBatch
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs, Respond


class LoopOutside:
    """See `partition_flow.Outside`."""

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

    def submit(self, request: Any, body: Buffer, respond: Respond) -> None:
        """See `Outside.submit`."""
        self._verbs.submit(request, body, respond)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """See `Outside.later`."""
        self._loop.call_later(delay_s, action)

    def new_producer_id(self) -> int:
        """See `Outside.new_producer_id`; never 0."""
        return secrets.randbits(64) or 1
