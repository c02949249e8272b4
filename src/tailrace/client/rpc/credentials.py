"""What a client proves itself with, and whom it trusts: arguments, URL, environment, the credentials file.

The first of these that names something wins. The file is TOML, with a table for each host:

    ["broker.example.com:7400"]        # or without the port; "unix:/run/tailrace.sock" for a socket
    token = "..."                      # or user and password
    ca = "/etc/tailrace/ca.pem"        # also cert and key

It is `~/.config/tailrace/credentials`, or what TAILRACE_CREDENTIALS names, and nobody else may be able to
read it. It is read for each connection, so that a new token in it counts from the next one on.
"""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.client.rpc.broker_url import BrokerUrl, HostPort
from tailrace.client.sdk_tuning import CREDENTIALS_BYTES_MAX, SECRET_BYTES_MAX
from tailrace.errors import InvalidRequest
from tailrace.format.wire import Credentials

DEFAULT_FILE = "~/.config/tailrace/credentials"
_KEYS = ("token", "user", "password", "ca", "cert", "key")


class GivenAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of `connect` was given. Never shown in a `repr`, nor is what follows from it."""

    token: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __repr__(self) -> str:
        return "GivenAccess(...)"


class HostAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What counts at one host: the credentials that are sent, and the files that a TLS connection uses."""

    credentials: Credentials | None = None
    source: str = ""
    """Where the credentials are from, in words."""
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"HostAccess(source={self.source!r}, ca={self.ca!r}, cert={self.cert!r})"


def check_given(given: GivenAccess, url: BrokerUrl) -> None:
    """Refuse arguments that cannot be meant for this address."""
    for name in ("token", "ca", "cert", "key"):
        value = getattr(given, name)
        if value is None:
            continue
        if not isinstance(value, str | os.PathLike) or (name == "token" and not isinstance(value, str)):
            raise InvalidRequest(f"{name}: a text, not {type(value).__name__}")
        if not str(value):
            raise InvalidRequest(f"{name}: it is empty; leave it out, or pass None")
        if name != "token" and url.kind not in ("tls", "local"):
            raise InvalidRequest(f"{name}: it is for encrypted connections (tailraces://); this is {url}")
    if given.key is not None and given.cert is None:
        raise InvalidRequest("key: cert is missing, the certificate that it belongs to")
    if given.token is not None:
        _check_token(given.token, "token")


def _check_token(token: str, source: str) -> None:
    if len(token) > SECRET_BYTES_MAX or any(not 32 < ord(character) < 127 for character in token):
        raise InvalidRequest(
            f"{source}: a token has at most {SECRET_BYTES_MAX} characters, and no space or line break in it"
        )


class AccessSource:
    """What counts at the hosts of one address; looks at the environment and the file each time."""

    def __init__(self, url: BrokerUrl, given: GivenAccess, env: Mapping[str, str]) -> None:
        self._url = url
        self._given = given
        self._env = env

    def at(self, host: HostPort | None = None) -> HostAccess:
        """What counts at one of the hosts, or at the socket; raises `InvalidRequest`."""
        entry, file = self._entry(host)
        credentials, source = self._credentials(entry, file)
        if self._url.kind != "tls":
            return HostAccess(credentials=credentials, source=source)
        cert, key = self._certificate(entry, file)
        ca = self._given.ca or self._url.ca or self._env.get("TAILRACE_CA") or entry.get("ca", "")
        return HostAccess(
            credentials=credentials, source=source, ca=_path(ca), cert=_path(cert), key=_path(key)
        )

    def _credentials(self, entry: Mapping[str, str], file: str) -> tuple[Credentials | None, str]:
        url = self._url
        if self._given.token:
            return Credentials(token=self._given.token), "the argument token"
        if url.token:
            return Credentials(token=url.token), "the url"
        if url.user:
            password = url.password
            if not password and entry.get("user") == url.user:
                password = entry.get("password", "")
            if not password:
                form = f"{url.scheme}://{url.user}:PASSWORD@..."
                raise InvalidRequest(
                    f"url: the password of {url.user!r} is missing, as in {form}, or in {file}"
                )
            return Credentials(user=url.user, password=password), "the url"
        if token := self._env.get("TAILRACE_TOKEN", "").strip():
            _check_token(token, "TAILRACE_TOKEN")
            return Credentials(token=token), "TAILRACE_TOKEN"
        if "token" in entry:
            return Credentials(token=entry["token"]), file
        if "user" in entry and "password" in entry:
            return Credentials(user=entry["user"], password=entry["password"]), file
        return None, ""

    def _certificate(self, entry: Mapping[str, str], file: str) -> tuple[str, str]:
        """The certificate and its key, both from the first source that has one."""
        environment = {name: self._env.get(f"TAILRACE_{name.upper()}", "") for name in ("cert", "key")}
        for cert, key, source in (
            (self._given.cert, self._given.key, "key"),
            (self._url.cert, self._url.key, "url"),
            (environment["cert"], environment["key"], "TAILRACE_KEY"),
            (entry.get("cert"), entry.get("key"), file),
        ):
            if cert:
                return str(cert), str(key or "")
            if key:
                raise InvalidRequest(f"{source}: a key is given, and no certificate that it belongs to")
        return "", ""

    def _entry(self, host: HostPort | None) -> tuple[Mapping[str, str], str]:
        named = self._env.get("TAILRACE_CREDENTIALS", "")
        path = os.path.expanduser(named or DEFAULT_FILE)
        tables = read_file(path, must_exist=bool(named))
        names = [f"unix:{self._url.path}"] if host is None else [str(host), host.host]
        for name in names:
            if name.lower() in tables:
                return tables[name.lower()], path
        return {}, path


def _path(path: str | os.PathLike[str]) -> str:
    return os.path.expanduser(path) if path else ""


def read_file(path: str, *, must_exist: bool) -> dict[str, dict[str, str]]:
    """The tables of a credentials file by host; empty if there is none. Raises `InvalidRequest`, which names
    what is wrong, and no secret."""
    try:
        # Without blocking: somebody may have put a pipe there.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise InvalidRequest(f"TAILRACE_CREDENTIALS: there is no file {path}") from None
        return {}
    except OSError as error:
        raise InvalidRequest(f"credentials: {path}: {error.strerror}") from None
    try:
        _check_file(path, os.fstat(handle))
        with open(handle, "rb", closefd=False) as file:
            content = file.read(CREDENTIALS_BYTES_MAX + 1)
    finally:
        os.close(handle)
    try:
        if len(content) > CREDENTIALS_BYTES_MAX:
            raise InvalidRequest(f"credentials: {path} is larger than {CREDENTIALS_BYTES_MAX} bytes")
        document = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequest(f"credentials: {path} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        place = str(error).rpartition("(")[2].rstrip(")")  # What stands before it may quote the file.
        raise InvalidRequest(f"credentials: {path} is not TOML ({place})") from None
    tables: dict[str, dict[str, str]] = {}
    for name, value in document.items():
        if not isinstance(value, dict):
            raise InvalidRequest(
                f'credentials: {path}: {name} stands outside of a table, such as ["host:7400"]'
            )
        _collect(path, name, value, tables)
    return tables


def _check_file(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequest(f"credentials: {path} is not a file")
    if found.st_uid not in (os.geteuid(), 0):
        raise InvalidRequest(f"credentials: {path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise InvalidRequest(
            f"credentials: others may read {path} (mode {mode:04o}): run `chmod 600 {path}`", path=path
        )


def _collect(path: str, name: str, table: Mapping[str, Any], tables: dict[str, dict[str, str]]) -> None:
    """Add a table. One that is written without quotes, [broker.example.com], is a table in tables in TOML."""
    fields = {key: value for key, value in table.items() if not isinstance(value, dict)}
    for key, value in table.items():
        if isinstance(value, dict):
            _collect(path, f"{name}.{key}", value, tables)
    if not fields and len(fields) < len(table):
        return
    where = f"credentials: {path}: [{name}]"
    for key, value in fields.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(key.lower(), _KEYS, 1, 0.6)
            hint = f", did you mean {close[0]}?" if close else f"; there are {', '.join(_KEYS)}"
            raise InvalidRequest(f"{where}: unknown key {key}{hint}")
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{where}: {key} has to be a text that is not empty")
        if len(value.encode()) > SECRET_BYTES_MAX and key in ("user", "password"):
            raise InvalidRequest(f"{where}: {key} is longer than {SECRET_BYTES_MAX} bytes")
    if "token" in fields and ("user" in fields or "password" in fields):
        raise InvalidRequest(f"{where}: a user and a token are both given; leave one of them out")
    if ("password" in fields) != ("user" in fields):
        raise InvalidRequest(f"{where}: user and password go together")
    if "key" in fields and "cert" not in fields:
        raise InvalidRequest(f"{where}: key is given without cert, the certificate that it belongs to")
    if "token" in fields:
        _check_token(fields["token"], f"{where}: token")
    if name.lower() in tables:
        raise InvalidRequest(f"{where}: this host has two tables")
    tables[name.lower()] = fields
