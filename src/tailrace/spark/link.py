"""A blocking connection for drivers and workers: verbs of the broker, one after another or many under way.

Workers are reused from task to task, so links are kept, one per address, and opened again when they turn out
to be closed, or when the process is another one (a fork does not take threads along).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any

from tailrace.client.rpc.broker_url import BrokerUrl, parse_url
from tailrace.client.rpc.calls import ask_parts
from tailrace.client.rpc.credentials import AccessSource, GivenAccess
from tailrace.client.rpc.endpoints import endpoints_of
from tailrace.client.rpc.transport import NetworkVerbs
from tailrace.core.model.commands import (
    FindOffsets,
    ListTopics,
    Offsets,
    Reply,
    Request,
    TopicInfo,
    TopicList,
)
from tailrace.errors import TailraceError, Timeout, from_code
from tailrace.format.frame import Buffer
from tailrace.sync.portal import Portal, shared_portal

Answer = tuple[Reply, Sequence[Buffer]]


class BrokerLink:
    """One connection to a broker. Calls may come from any thread."""

    def __init__(self, address: BrokerUrl | str, timeout_s: float) -> None:
        url = parse_url(address) if isinstance(address, str) else address
        self.url = str(url)
        """Where it leads; there is no secret in it."""
        self.timeout_s = timeout_s
        self.pid = os.getpid()
        self._portal: Portal = shared_portal()
        self._verbs = NetworkVerbs(endpoints_of(url, AccessSource(url, GivenAccess(), os.environ)))
        self._portal.call(lambda: self._verbs.open(timeout_s))

    @property
    def over(self) -> bool:
        """Whether nothing will go through it any more."""
        return self._verbs.over

    def close(self) -> None:
        """Let go."""
        self._portal.call(self._verbs.close)

    def ask(self, request: Request, body: Buffer = b"") -> Any:
        """The reply, or the refusal raised; see `begin`."""
        return self.begin(request, body).result()[0]

    def begin(self, request: Request, body: Buffer = b"") -> concurrent.futures.Future[Answer]:
        """Send a request and do not wait: the future gives the reply and the parts of its body, or raises.
        Retriable refusals are tried again until the time is up, so the request has to be repeatable. Requests
        begun one after the other leave in that order; one that has to be tried again falls behind."""
        return asyncio.run_coroutine_threadsafe(self._answer(request, body), self._portal.loop)

    async def _answer(self, request: Request, body: Buffer) -> Answer:
        name = type(request).__name__
        try:
            return await ask_parts(self._verbs, request, self.timeout_s, body=body)
        except Timeout:
            raise Timeout(f"{name}: {self.url} did not answer within {self.timeout_s:g} s") from None
        except TailraceError as error:
            if not error.retriable:
                raise
            text = f"{name}: {self.url}: {error.message}, for {self.timeout_s:g} s"
            raise from_code(error.code, text, error.outcome, error.details) from None

    # -- what everybody asks

    def topics(self) -> list[TopicInfo]:
        """All topics of users."""
        reply = self.ask(ListTopics(""))
        assert isinstance(reply, TopicList)
        return list(reply.topics)

    def offsets(self, topic: str, point: int) -> list[int]:
        """The offset of EARLIEST, LATEST or a time in microseconds, for each partition."""
        reply = self.ask(FindOffsets(topic, point))
        assert isinstance(reply, Offsets)
        return reply.offsets


_links: dict[BrokerUrl, BrokerLink] = {}


def link_to(address: BrokerUrl | str, timeout_s: float) -> BrokerLink:
    """The link of this process to an address, for a client that proves itself in the same way. It stays open;
    what fails on it for good is opened anew."""
    url = parse_url(address) if isinstance(address, str) else address
    known = _links.get(url)
    if known is not None and known.pid == os.getpid() and not known.over:
        known.timeout_s = timeout_s
        return known
    _links[url] = link = BrokerLink(url, timeout_s)
    return link
