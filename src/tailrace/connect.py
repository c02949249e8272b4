"""`connect`: a client for a broker on the network, or with a broker of its own inside the process.

This module stays light: what it needs is imported when it is needed, so that importing `tailrace` costs
little.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.client.client import Client, Opener
    from tailrace.client.rpc.broker_url import BrokerUrl
    from tailrace.client.rpc.credentials import GivenAccess

DEFAULT_URL = "tailrace://127.0.0.1:7400"


def connect(
    url: str | None = None,
    *,
    timeout: float = 30.0,
    wait: float = 0.0,
    token: str | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
) -> Client:
    """A client to use with `async with`.

    `tailrace://host:port[,host:port…]` names brokers on the network, of which one that answers is taken;
    `tailraces://` is the same with TLS. `unix:PATH` is the socket of a broker on this machine.
    `embedded:./data` runs the same broker inside this process on that folder, or joins the one that works
    there already. Without a url, TAILRACE_URL counts, then the default address. `timeout` (seconds) bounds
    every call.

    Who the client is: `token`, or a user and password in the url (`tailraces://user:password@host`), or
    TAILRACE_TOKEN, or the credentials file. Whom it trusts: `ca`, a file with certificates of authorities,
    instead of those of the machine. `cert` and `key` are its own certificate.

    When no broker answers, `async with` raises `Unavailable` at once; with `wait` it asks again for so many
    seconds. A connection that is lost later is always made again, for as long as the client is open and the
    broker takes its credentials.
    """
    from tailrace.client.client import Client
    from tailrace.client.rpc.broker_url import parse_url
    from tailrace.client.rpc.credentials import GivenAccess, check_given
    from tailrace.errors import InvalidRequest

    if not timeout > 0:
        raise InvalidRequest(f"timeout: a positive number of seconds, not {timeout!r}")
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < float("inf"):
        raise InvalidRequest(f"wait: seconds to wait for a broker that is not there yet, not {wait!r}")
    address = parse_url(url or os.environ.get("TAILRACE_URL") or DEFAULT_URL)
    given = GivenAccess(token=token, ca=ca, cert=cert, key=key)
    check_given(given, address)
    return Client(_opener(address, given, wait), timeout)


def _opener(url: BrokerUrl, given: GivenAccess, wait_s: float) -> Opener:
    if url.kind == "embedded":
        return _embedded(url.path)
    if url.kind == "local":
        return _local(url.path)
    return _network(url, given, wait_s)


def _network(url: BrokerUrl, given: GivenAccess, wait_s: float) -> Opener:
    from tailrace.client.rpc.credentials import AccessSource
    from tailrace.client.rpc.endpoints import endpoints_of
    from tailrace.client.rpc.transport import NetworkVerbs

    endpoints = endpoints_of(url, AccessSource(url, given, os.environ))

    async def open_network(timeout_s: float) -> NetworkVerbs:
        verbs = NetworkVerbs(endpoints)
        await verbs.open(wait_s, timeout_s=timeout_s)
        return verbs

    return open_network


def _embedded(folder: str) -> Opener:
    from tailrace.broker.shared_folder import FolderVerbs
    from tailrace.client.rpc.door_path import data_folder

    path = data_folder(folder)

    async def open_embedded(timeout_s: float) -> FolderVerbs:
        verbs = FolderVerbs(path)
        await verbs.open(timeout_s)
        return verbs

    return open_embedded


def _local(name: str) -> Opener:
    from tailrace.testing import open_local

    return lambda timeout_s: open_local(name)
