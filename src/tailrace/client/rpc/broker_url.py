"""The address of a broker: every form of URL, read into one value that shows no secret.

    tailrace://[user[:password]@]host[:port][,host[:port]...][?token=...]      TCP
    tailraces://... [?ca=FILE&cert=FILE&key=FILE&token=...]                    TLS
    unix:PATH                                                                  a Unix socket
    embedded:FOLDER                                                            a broker on this folder
    local:NAME                                                                 a broker of a test

User, password and values behind `?` are percent-decoded. A password or token is in no `repr`, no text and no
error: whoever shows an address shows `str(url)`, and what cannot be read is shown without anything that might
be a secret. Pure: no file, environment or socket is looked at.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import msgspec

from tailrace.client.sdk_tuning import HOSTS_MAX, SECRET_BYTES_MAX
from tailrace.errors import InvalidRequest

DEFAULT_PORT = 7400
HIDDEN = "***"
_SCHEMES = ("tailrace", "tailraces", "unix", "embedded", "local")
_MEANT = {
    "tailrace+tls": "tailraces",
    "tailrace+ssl": "tailraces",
    "tls": "tailraces",
    "ssl": "tailraces",
    "https": "tailraces",
    "tcp": "tailrace",
    "http": "tailrace",
    "file": "embedded",
}
"""Schemes of other programs, and which of ours does the same."""
_KEYS = ("token", "ca", "cert", "key")
_FORMS = "tailrace://host:port, tailraces://host:port (TLS), unix:path or embedded:folder is needed"

Kind = Literal["tcp", "tls", "unix", "embedded", "local"]


class HostPort(NamedTuple):
    """One host of an address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def near(self) -> bool:
        """Whether the name itself says that it is this machine."""
        if self.host.lower() == "localhost":
            return True
        return is_loopback(self.host)


class BrokerUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An address that was read. `path` is that of the socket or folder, or the name of a test's broker."""

    kind: Kind
    hosts: tuple[HostPort, ...] = ()
    path: str = ""
    user: str = ""
    password: str = ""
    token: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __str__(self) -> str:
        """The address without secrets, and without what stands behind `?`."""
        if self.kind in ("tcp", "tls"):
            return f"{self.scheme}://" + ",".join(map(str, self.hosts))
        return f"{self.scheme}:{self.path}"

    def __repr__(self) -> str:
        return f"BrokerUrl({str(self)!r})"

    def spelled(self) -> str:
        """The whole address, with its secrets: what `parse_url` gives this for. Never for people."""
        if self.kind not in ("tcp", "tls"):
            return f"{self.scheme}:{self.path}"
        login = quote(self.user, safe="") + (f":{quote(self.password, safe='')}" if self.password else "")
        hosts = ",".join(map(str, self.hosts))
        options = [f"{name}={quote(getattr(self, name), safe='/')}" for name in _KEYS if getattr(self, name)]
        query = f"?{'&'.join(options)}" if options else ""
        return f"{self.scheme}://{login}{'@' if login else ''}{hosts}{query}"

    @property
    def scheme(self) -> str:
        """What stands before the colon."""
        return {"tcp": "tailrace", "tls": "tailraces"}.get(self.kind, self.kind)

    @property
    def network(self) -> bool:
        """Whether the broker is another process, so that several processes can reach it by this address."""
        return self.kind in ("tcp", "tls", "unix")


def is_loopback(address: str) -> bool:
    """Whether an IP address never leaves this machine; False for what is no address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def parse_url(text: str) -> BrokerUrl:
    """Read an address; raises `InvalidRequest` that says what is meant, and repeats no secret."""
    if "\0" in text:
        raise InvalidRequest("url: it contains a NUL byte")
    scheme, colon, rest = text.strip().partition(":")
    if not colon or scheme not in _SCHEMES:
        raise _unknown(text.strip())
    if scheme in ("tailrace", "tailraces"):
        if not rest.startswith("//"):
            meant = f"{scheme}://{shown(rest.lstrip('/'))}"
            raise InvalidRequest(f"url: {_FORMS}, not {shown(text.strip())!r}; {meant} may be meant")
        return _network("tcp" if scheme == "tailrace" else "tls", rest[2:])
    if scheme == "local":
        return BrokerUrl(kind="local", path=rest)
    return _by_path("unix" if scheme == "unix" else "embedded", rest)


def shown(text: str) -> str:
    """A text that may be an address, without what may be a secret in it: nothing before an @ or behind a `?`,
    because it is not known yet which part is what."""
    start = re.match(r"([A-Za-z][A-Za-z0-9+.-]*:)?/{0,3}", text)
    head = start[0] if start else ""
    before, mark, query = text[len(head) :].partition("?")
    if "@" in query:  # Either a password with `?` in it, or a token with `@`.
        return f"{head}{HIDDEN}"
    login, at, place = before.rpartition("@")
    return f"{head}{HIDDEN if login else ''}{at}{place}{mark}{HIDDEN if query else ''}"


def _unknown(text: str) -> InvalidRequest:
    scheme, colon, rest = text.partition(":")
    close = difflib.get_close_matches(scheme.lower(), _SCHEMES, 1, 0.75) if colon else []
    meant = _MEANT.get(scheme.lower()) or (close[0] if close else "")
    hosts = shown(text).rpartition("://")[2]
    if colon and meant in ("unix", "embedded"):
        hint = f"; {meant}:{shown(rest).removeprefix('//')} may be meant"
    elif hosts and "/" not in hosts and (meant or not colon or "://" in text or ":" in hosts):
        hint = f"; {meant or 'tailrace'}://{hosts} may be meant"
    else:
        hint = ""
    return InvalidRequest(f"url: {_FORMS}, not {shown(text)!r}{hint}")


def _by_path(kind: Literal["unix", "embedded"], path: str) -> BrokerUrl:
    if path.startswith("//"):  # As in unix:///run/tailrace.sock.
        path = "/" + path.lstrip("/")
    if not path:
        what = "the path of a socket, as in unix:/run/tailrace.sock"
        raise InvalidRequest(
            f"url: unix: needs {what}"
            if kind == "unix"
            else "url: embedded: needs a folder, as in embedded:./data"
        )
    if re.match("/*[^/@]*:[^@]*@", path):
        raise InvalidRequest(f"url: {kind}: takes no user and no password, in {shown(f'{kind}://{path}')!r}")
    found = re.search(rf"\?({'|'.join(_KEYS)}|user|password)=", path)
    if found is not None:
        place = f"{kind}:{path[: found.start()]}"
        cure = (
            "pass token=..., or set TAILRACE_TOKEN"
            if kind == "unix" and found[1] in ("token", "user", "password")
            else f"{found[1]} is for tailraces://"
        )
        raise InvalidRequest(f"url: {place} takes nothing behind `?`: {cure}")
    return BrokerUrl(kind=kind, path=path)


def _network(kind: Literal["tcp", "tls"], rest: str) -> BrokerUrl:
    before, _, query = rest.partition("?")
    login, at, hosts = before.rpartition("@")
    if "@" in login or ("@" in query and not re.match(rf"({'|'.join(_KEYS)})=", query)):
        raise InvalidRequest("url: a user or password that contains @ or ? has to encode it, as %40 or %3F")
    options = _options(kind, query)
    user, password = _login(login) if at else ("", "")
    if "token" in options and user:
        raise InvalidRequest("url: a user and a token are both given; leave one of them out")
    return BrokerUrl(kind=kind, hosts=parse_hosts(hosts), user=user, password=password, **options)


def _login(text: str) -> tuple[str, str]:
    user_text, colon, password_text = text.partition(":")
    user, password = _decoded(user_text, "the user"), _decoded(password_text, "the password")
    if not user:
        raise InvalidRequest("url: the user is missing before the @; a token is given as ?token=...")
    if colon and not password:
        raise InvalidRequest(f"url: the password of {user!r} is empty")
    return user, password


def _options(kind: Kind, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in filter(None, query.split("&")):
        name, equals, value_text = item.partition("=")
        if name not in _KEYS:
            close = difflib.get_close_matches(name.lower(), _KEYS, 1, 0.6)
            hint = f", did you mean {close[0]}?" if close else f"; there are {', '.join(_KEYS)}"
            # Anything but a plain word before `=` may be a secret.
            told = name if equals and re.fullmatch("[A-Za-z_-]{1,20}", name) else HIDDEN
            raise InvalidRequest(f"url: {told!r} is no option of an address{hint}")
        if name in options:
            raise InvalidRequest(f"url: {name} is given twice")
        value = _decoded(value_text, name)
        if not equals or not value:
            raise InvalidRequest(f"url: {name} is empty")
        if name != "token" and kind != "tls":
            raise InvalidRequest(f"url: {name} is for encrypted connections: tailraces:// may be meant")
        options[name] = value
    if "key" in options and "cert" not in options:
        raise InvalidRequest("url: key is given without cert, the certificate that it belongs to")
    return options


def _decoded(text: str, what: str) -> str:
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise InvalidRequest(f"url: in {what}, % has to be followed by two hexadecimal digits (%25 is a %)")
    try:
        decoded = unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"url: {what} is not UTF-8 when it is decoded") from None
    if len(decoded.encode()) > SECRET_BYTES_MAX:
        raise InvalidRequest(f"url: {what} is longer than {SECRET_BYTES_MAX} bytes")
    if any(ord(character) < 32 or ord(character) == 127 for character in decoded):
        raise InvalidRequest(f"url: {what} contains a control character")
    return decoded


def parse_hosts(text: str) -> tuple[HostPort, ...]:
    """`host:port,host:port` with the default port 7400; IPv6 in brackets."""
    hosts = []
    for item in text.rstrip("/").split(","):
        name = item.strip()
        host, colon, port = name.rpartition(":")
        if not colon or name.endswith("]"):
            host, port = name, str(DEFAULT_PORT)
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1].replace("%25", "%") if bracketed else host  # As in [fe80::1%25eth0].
        good = host and (bracketed or not set(host) & set(":[]")) and not set(host) & set("/?#@ \\%")
        good = good or (bracketed and "%" in host and not set(host) & set("/?#@ \\"))
        if not good or not (port.isascii() and port.isdigit() and len(port) < 6) or not 0 < int(port) < 65536:
            # Who forgets the host gives a user and a secret.
            plain = re.fullmatch(r"[0-9A-Fa-f:.\[\]]*|[^:@]*(:\d*)?", name)
            told = name if plain else f"{name.partition(':')[0]}:{HIDDEN}"
            if plain and good and port.isascii() and port.isdigit():
                raise InvalidRequest(f"url: {told!r}: the port must be a number from 1 to 65535")
            raise InvalidRequest(f"url: {told!r} is not host:port (IPv6 addresses in brackets)")
        hosts.append(HostPort(host, int(port)))
    if len(hosts) > HOSTS_MAX:
        raise InvalidRequest(f"url: at most {HOSTS_MAX} hosts, not {len(hosts)}")
    return tuple(hosts)
