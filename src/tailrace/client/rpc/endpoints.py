"""Where a broker is reached: a TCP port, plain or with TLS, a Unix socket, or the door of a folder.

Each endpoint dials, says what the client proves itself with there, and tells in words what went wrong.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tailrace.client.rpc.broker_url import DEFAULT_PORT, BrokerUrl, HostPort, is_loopback
from tailrace.client.rpc.credentials import AccessSource, HostAccess
from tailrace.client.rpc.door_path import find_door
from tailrace.client.rpc.server_trust import (
    TlsContexts,
    distrust,
    handshake_error,
    is_about_us,
    presented,
    unknown_certificate,
)
from tailrace.client.sdk_tuning import SOCKET_PATH_BYTES_MAX
from tailrace.errors import InvalidRequest, TailraceError, Unavailable

ABSENT = "nobody listens there"
_PEER = struct.Struct("3i")


class Endpoint(Protocol):
    """One place where a broker may be."""

    def __str__(self) -> str:
        """What it is called in messages."""
        ...

    def access(self) -> HostAccess:
        """What counts there; raises `InvalidRequest`."""
        ...

    async def dial(self, make: Callable[[], asyncio.BaseProtocol], access: HostAccess) -> None:
        """Connect; raises OSError, or an error of the tree that is more than that."""
        ...

    async def explain(self, error: BaseException, *, connected: bool, timeout_s: float) -> TailraceError:
        """Why there is no connection, in words for whoever named the place."""
        ...


def no_access() -> HostAccess:
    """Nothing is proved, and nobody in particular trusted."""
    return HostAccess()


class TcpEndpoint:
    """A host and port."""

    def __init__(self, host: str, port: int, access: Callable[[], HostAccess] = no_access) -> None:
        self.address = HostPort(host, port)
        self.access = access

    def __str__(self) -> str:
        return str(self.address)

    async def dial(self, make: Callable[[], asyncio.BaseProtocol], access: HostAccess) -> None:
        """Connect. A secret is not even taken there if the address says that it would leave the machine."""
        host, port = self.address
        if access.credentials is not None and not self.address.near and _is_address(host):
            raise unprotected(str(self), access)
        try:
            await asyncio.get_running_loop().create_connection(make, host, port)
        except UnicodeError as error:
            raise _no_name(host, error) from None

    async def explain(self, error: BaseException, *, connected: bool, timeout_s: float) -> TailraceError:
        """The words for it."""
        if isinstance(error, TailraceError) and error.details.get("silent"):
            text = f"{self}: {error.message}; if that is a port for TLS, tailraces://{self} is meant"
            return Unavailable(text)
        return tcp_problem(error, self.address, connected=connected, timeout_s=timeout_s)


class TlsEndpoint:
    """A host and port behind TLS."""

    def __init__(self, host: str, port: int, access: Callable[[], HostAccess], contexts: TlsContexts) -> None:
        self.address = HostPort(host, port)
        self.access = access
        self._contexts = contexts
        self._used = HostAccess()

    def __str__(self) -> str:
        return str(self.address)

    async def dial(self, make: Callable[[], asyncio.BaseProtocol], access: HostAccess) -> None:
        """Connect, and check whom with."""
        self._used = access
        host, port = self.address
        context = self._contexts.context(access)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(make, host, port, ssl=context, server_hostname=host)
        except ssl.SSLError:
            raise
        except ValueError as error:  # Also UnicodeError.
            raise _no_name(host, error) from None

    async def explain(self, error: BaseException, *, connected: bool, timeout_s: float) -> TailraceError:
        """The words for it, with what is in a certificate that was refused."""
        host, port = self.address
        if isinstance(error, ssl.SSLCertVerificationError):
            shown: Mapping[str, Any] = {}
            try:
                async with asyncio.timeout(timeout_s):
                    shown = await presented(host, port)
            except TimeoutError:
                shown = {}
            return distrust(error, shown, host, str(self), self._used.ca)
        if isinstance(error, ssl.SSLError):
            return handshake_error(error, str(self), f"tailrace://{self}")
        if is_about_us(error.__cause__):
            return unknown_certificate(str(getattr(error.__cause__, "reason", "")), str(self))
        if isinstance(error, TailraceError) and error.details.get("silent"):
            cure = "if the broker asks for a client certificate, pass cert= and key="
            if self._used.cert:
                cure = f"it may refuse the client certificate {self._used.cert}: its log tells"
            return Unavailable(f"{self}: {error.message}; {cure}")
        refused = isinstance(error, ConnectionRefusedError)
        if isinstance(error, ConnectionError) and not connected and not refused:
            text = f"{self}: the connection ended within the TLS handshake: is that a port for TLS?"
            return Unavailable(text)
        return tcp_problem(error, self.address, connected=connected, timeout_s=timeout_s)


class UnixEndpoint:
    """A Unix socket."""

    def __init__(self, path: str, access: Callable[[], HostAccess] = no_access) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.access = access
        if len(os.fsencode(self.path)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidRequest(
                f"url: the path of a Unix socket has at most {SOCKET_PATH_BYTES_MAX} bytes: {self.path}"
            )

    def __str__(self) -> str:
        return self.path

    async def dial(self, make: Callable[[], asyncio.BaseProtocol], access: HostAccess) -> None:
        """Connect. A secret is only for those who cannot have put their socket in the place of another's."""
        sock = await _reached(self.path)
        try:
            if access.credentials is not None:
                _check_place(self.path, peer_uid(sock), access)
            await asyncio.get_running_loop().create_unix_connection(make, sock=sock)
        except BaseException:
            sock.close()
            raise

    async def explain(self, error: BaseException, *, connected: bool, timeout_s: float) -> TailraceError:
        """The words for it."""
        return unix_problem(error, self.path, connected=connected, timeout_s=timeout_s)


class DoorEndpoint:
    """The door of a data folder: whoever works there now has it, so it is looked for each time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.access = no_access

    def __str__(self) -> str:
        return f"embedded:{self.folder}"

    async def dial(self, make: Callable[[], asyncio.BaseProtocol], access: HostAccess) -> None:
        """Connect, if the door is that of the user who may have it."""
        path, owners = find_door(self.folder)
        sock = await _reached(path)
        try:
            uid = peer_uid(sock)
            if uid not in owners:
                text = f"the door {path} of {self.folder} is another user's (uid {uid})"
                raise InvalidRequest(text, path=path)
            await asyncio.get_running_loop().create_unix_connection(make, sock=sock)
        except BaseException:
            sock.close()
            raise

    async def explain(self, error: BaseException, *, connected: bool, timeout_s: float) -> TailraceError:
        """The words for it."""
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return Unavailable(
                f"nobody works in {self.folder} any more: the broker that this client had joined is gone",
                path=self.folder,
                absent=True,
                hint="connect again: the first that does becomes the broker of the folder",
            )
        return unix_problem(error, self.folder, connected=connected, timeout_s=timeout_s)


async def _reached(path: str) -> socket.socket:
    """A connection to a Unix socket over which nothing was sent."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, path)
    except BaseException:
        sock.close()
        raise
    return sock


def _check_place(path: str, uid: int, access: HostAccess) -> None:
    """Raise `InvalidRequest` if a user who listens at a path may be there only because everybody can make
    files in that folder."""
    folder = os.stat(os.path.dirname(path))
    if folder.st_mode & 0o022 and uid not in (0, os.geteuid(), folder.st_uid):
        raise InvalidRequest(
            f"url: uid {uid} listens at {path}, in a folder where others can make files, too, so the "
            f"credentials ({access.source}) are not sent: a broker's socket belongs into a folder of its own"
        )


def endpoints_of(url: BrokerUrl, source: AccessSource) -> list[Endpoint]:
    """The endpoints of an address on the network, or of a socket."""
    if url.kind == "unix":
        return [UnixEndpoint(url.path, source.at)]
    contexts = TlsContexts()
    if url.kind == "tls":
        return [TlsEndpoint(*host, _Bound(source, host), contexts) for host in url.hosts]
    return [TcpEndpoint(*host, _Bound(source, host)) for host in url.hosts]


class _Bound:
    """What counts at one host of a source."""

    def __init__(self, source: AccessSource, host: HostPort) -> None:
        self._source = source
        self._host = host

    def __call__(self) -> HostAccess:
        return self._source.at(self._host)


def _no_name(host: str, error: ValueError) -> InvalidRequest:
    return InvalidRequest(f"url: {host!r} cannot be the name of a host: {error}")


def unprotected(where: str, access: HostAccess) -> InvalidRequest:
    """The error for secrets that would travel where others can read them."""
    return InvalidRequest(
        f"url: the credentials ({access.source}) would travel to {where} for everybody to read, so they are "
        f"not sent: use tailraces://{where}"
    )


def is_protected(transport: asyncio.BaseTransport) -> bool:
    """Whether nobody can read along: TLS, a Unix socket, or a connection that does not leave the machine."""
    if transport.get_extra_info("ssl_object") is not None:
        return True
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return True
    peer = transport.get_extra_info("peername")
    return isinstance(peer, tuple) and is_loopback(str(peer[0]))


def peer_uid(sock: socket.socket) -> int:
    """Which user of the operating system is at the other end of a Unix socket."""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def tcp_problem(
    error: BaseException, address: HostPort, *, connected: bool, timeout_s: float
) -> TailraceError:
    """Why there is no connection to a host, in words."""
    host, where = address.host, str(address)
    if isinstance(error, TailraceError):
        return Unavailable(f"the broker at {where} takes no connection now: {error.message}")
    if type(error) is TimeoutError:  # Of ours; one of the system has its own words.
        if connected:
            return Unavailable(_no_greeting(where, timeout_s))
        return Unavailable(f"no broker at {where}: no answer within {timeout_s:g} s")
    if isinstance(error, socket.gaierror):
        text = f"no broker at {where}: the host name {host!r} is not known ({error.strerror})"
        return Unavailable(text)
    text = str(error)
    # asyncio puts the errors of all addresses of a host into one text.
    if getattr(error, "errno", None) == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in text:
        text = ABSENT
    return Unavailable(f"no broker at {where}: {text}")


def unix_problem(error: BaseException, path: str, *, connected: bool, timeout_s: float) -> TailraceError:
    """Why there is no connection to a Unix socket, in words."""
    if isinstance(error, TailraceError):
        return Unavailable(f"the broker at {path} takes no connection now: {error.message}")
    if type(error) is TimeoutError:
        if connected:
            return Unavailable(_no_greeting(path, timeout_s))
        return Unavailable(f"no broker at {path}: no answer within {timeout_s:g} s")
    if isinstance(error, FileNotFoundError):
        return Unavailable(f"no broker at {path}: there is no such socket")
    if isinstance(error, ConnectionRefusedError):
        return Unavailable(f"no broker at {path}: {ABSENT}")
    if isinstance(error, PermissionError):
        return InvalidRequest(f"url: this user may not open {path}: {error.strerror}")
    text = getattr(error, "strerror", None) or str(error)
    return Unavailable(f"no broker at {path}: {text}")


def _no_greeting(where: str, timeout_s: float) -> str:
    return f"what listens at {where} does not greet within {timeout_s:g} s: is it a Tailrace broker?"


def unreached(problems: list[str], endpoints: list[Endpoint]) -> Unavailable:
    """The error for endpoints of which none took the connection."""
    text = "; ".join(problems)
    first = endpoints[0]
    if ABSENT in text and isinstance(first, TcpEndpoint | TlsEndpoint):
        other = first.address != ("127.0.0.1", DEFAULT_PORT)
        listen = f" --listen {first}" if len(endpoints) == 1 and other else ""
        text += f"; start one with `tailrace serve{listen}`"
    elif len(endpoints) == 1 and isinstance(first, UnixEndpoint) and "no broker at" in text:
        text += f"; start one with `tailrace serve --listen unix:{first}`"
    hint = "name another broker with --url or TAILRACE_URL, or wait for this one with --wait SECONDS"
    return Unavailable(text, hint=hint)
