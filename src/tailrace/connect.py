"""`connect`: a client for a broker on the network, or with a broker of its own inside the process.

This module stays light: what it needs is imported when it is needed, so that importing `tailrace` costs
little.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.client.client import Client, Opener

DEFAULT_URL = "tailrace://127.0.0.1:7400"


def connect(url: str | None = None, *, timeout: float = 30.0, wait: float = 0.0) -> Client:
    """A client to use with `async with`.

    `tailrace://host:port[,host:port…]` names brokers on the network, of which one that answers is taken.
    `embedded:./data` runs the same broker inside this process on that folder. Without a url, TAILRACE_URL
    counts, then the default address. `timeout` (seconds) bounds every call.

    When no broker answers, `async with` raises `Unavailable` at once; with `wait` it asks again for so many
    seconds. A connection that is lost later is always made again, for as long as the client is open.
    """
    from tailrace.client.client import Client
    from tailrace.errors import InvalidRequest

    if not timeout > 0:
        raise InvalidRequest(f"timeout: a positive number of seconds, not {timeout!r}")
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < float("inf"):
        raise InvalidRequest(f"wait: seconds to wait for a broker that is not there yet, not {wait!r}")
    return Client(_opener(url or os.environ.get("TAILRACE_URL") or DEFAULT_URL, wait), timeout)


def _opener(url: str, wait_s: float) -> Opener:
    from tailrace.errors import InvalidRequest

    if url.startswith("tailrace://"):
        return _network(url.removeprefix("tailrace://").rstrip("/"), wait_s)
    if url.startswith("embedded:"):
        return _embedded(url.removeprefix("embedded:"))
    if url.startswith("local:"):
        return _local(url.removeprefix("local:"))
    hosts = url.rpartition("://")[2]
    meant = f"; tailrace://{hosts} may be meant" if hosts and "/" not in hosts else ""
    raise InvalidRequest(f"url: tailrace://host:port or embedded:folder is needed, not {url!r}{meant}")


def _network(hosts: str, wait_s: float) -> Opener:
    from tailrace.client.rpc.transport import NetworkVerbs, parse_hosts

    parsed = parse_hosts(hosts)

    async def open_network(timeout_s: float) -> NetworkVerbs:
        verbs = NetworkVerbs(parsed)
        await verbs.open(wait_s, timeout_s=timeout_s)
        return verbs

    return open_network


def _embedded(folder: str) -> Opener:
    from tailrace.broker.node import EmbeddedVerbs
    from tailrace.client.rpc.machine_clock import MachineClock
    from tailrace.errors import InvalidRequest

    if not folder:
        raise InvalidRequest("url: embedded: needs a folder, as in embedded:./data")

    async def open_embedded(timeout_s: float) -> EmbeddedVerbs:
        verbs = EmbeddedVerbs(folder, MachineClock())
        await verbs.open()
        return verbs

    return open_embedded


def _local(name: str) -> Opener:
    from tailrace.testing import open_local

    return lambda timeout_s: open_local(name)
