"""Types on the bus: their names on the wire, their versions, and how old versions become new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin, is_typeddict

import msgspec

from tailrace.bus.payloads import BYTES, JSON, Codec, codec_of, plain
from tailrace.client.queue.handler_verdicts import described
from tailrace.client.rpc.calls import whole_of
from tailrace.errors import InvalidRequest

TYPE_HEADER = "tailrace-type"
VERSION_HEADER = "tailrace-version"
CONTENT_HEADER = "tailrace-content"
VERSION_DIGITS_MAX = 9

Upcaster = Callable[[Any], Any]


class Undecodable(Exception):
    """A message of an unknown type, or whose body is not what its type says: poison."""


class Entry(msgspec.Struct, frozen=True, eq=False):
    """One type on the bus."""

    kind: Any
    name: str
    version: int
    topic: str
    key: Callable[[Any], bytes | None]
    codec: Codec


class TypeRegistry:
    """All types that a bus knows."""

    def __init__(self) -> None:
        self._by_name: dict[str, Entry] = {}
        self._by_kind: dict[Any, Entry] = {}
        self._upcasters: dict[tuple[str, int], Upcaster] = {}

    def add(self, kind: Any, name: str | None, version: int, topic: str, key: Any) -> None:
        """Register a type under its wire name; without one, under its own."""
        name = name or str(getattr(kind, "__name__", kind))
        if name in self._by_name:
            raise InvalidRequest(f"{name!r} is registered already: give one of the two types another `name`")
        if not isinstance(kind, type) or is_typeddict(kind):
            # It could be received, and never sent.
            text = "its values do not tell that they are of it; use a class such as a dataclass"
            raise InvalidRequest(f"{name!r} cannot travel: {text}")
        if key is not None and not isinstance(key, str) and not callable(key):
            raise InvalidRequest(f"{name!r}: key: the name of a field, or a function, not {key!r}")
        whole_of("version", version)
        try:
            codec = codec_of(kind)
        except TypeError as error:
            raise InvalidRequest(f"{name!r} cannot travel: {error}") from None
        entry = Entry(kind, name, version, topic, _key_of(key), codec)
        self._by_name[name] = self._by_kind[kind] = entry

    def upcast(self, name: str, version: int, upcaster: Upcaster) -> None:
        """From `version` of a type to the next."""
        if (name, version) in self._upcasters:
            raise InvalidRequest(f"there is an upcaster from version {version} of {name!r} already")
        self._upcasters[name, version] = upcaster

    def knows(self, name: str) -> bool:
        """Whether a wire name is registered."""
        return name in self._by_name

    def of_value(self, value: Any) -> Entry:
        """The entry of a value that is to be sent."""
        entry = self._by_kind.get(type(value))
        if entry is None:
            raise InvalidRequest(
                f"{type(value).__name__} is not on this bus: register it with @bus.command or @bus.event"
            )
        return entry

    def of_kind(self, kind: Any) -> Entry:
        """The entry of a type."""
        entry = self._by_kind.get(kind)
        if entry is None:
            shown = getattr(kind, "__name__", kind)
            raise InvalidRequest(f"{shown} is not on this bus: register it with @bus.command or @bus.event")
        return entry

    def names_of(self, what: Iterable[Any]) -> list[tuple[str, str | None]]:
        """Wire name and topic (None: not known from the name) of types, unions of types and names."""
        found: list[tuple[str, str | None]] = []
        for item in what:
            if isinstance(item, str):
                known = self._by_name.get(item)
                found.append((item, None if known is None else known.topic))
            elif isinstance(item, UnionType) or get_origin(item) is Union:
                found += self.names_of(get_args(item))
            else:
                entry = self.of_kind(item)
                found.append((entry.name, entry.topic))
        return found

    def encode(self, value: Any) -> tuple[Entry, bytes, list[tuple[str, bytes]]]:
        """The entry of a value, its body, and the headers that say what it is."""
        entry = self.of_value(value)
        headers = [
            (TYPE_HEADER, entry.name.encode()),
            (VERSION_HEADER, str(entry.version).encode()),
            (CONTENT_HEADER, entry.codec.content.encode()),
        ]
        return entry, entry.codec.encode(value), headers

    def decode(self, body: bytes | None, headers: Sequence[tuple[str, bytes]]) -> tuple[str, int, Any]:
        """Name, version (after upcasting) and value of a message; raises `Undecodable`."""
        fields = {name: value.decode(errors="replace") for name, value in headers}
        name = fields.get(TYPE_HEADER)
        if name is None:
            raise Undecodable(f"it has no {TYPE_HEADER} header")
        content = fields.get(CONTENT_HEADER, JSON)
        version_text = fields.get(VERSION_HEADER, "1")
        readable = version_text.isdecimal() and len(version_text) <= VERSION_DIGITS_MAX
        if not readable or content not in (JSON, BYTES):
            raise Undecodable(f"{name}: version {version_text[:40]!r}, content {content[:40]!r}")
        version = int(version_text)
        entry = self._by_name.get(name)
        try:
            if entry is None:
                return name, version, plain(body or b"", content)
            if version == entry.version:
                return name, version, entry.codec.decode(body or b"")
            return name, entry.version, self._raise(entry, version, plain(body or b"", content))
        except Undecodable:
            raise
        except Exception as error:  # any codec, any upcaster: the message is what is wrong
            raise Undecodable(f"{name} version {version}: {described(error)}") from error

    def _raise(self, entry: Entry, version: int, data: Any) -> Any:
        while version < entry.version:
            upcaster = self._upcasters.get((entry.name, version))
            if upcaster is None:
                raise Undecodable(f"{entry.name}: no upcaster from version {version} to {version + 1}")
            data = upcaster(data)
            version += 1
        if version > entry.version:
            raise Undecodable(f"{entry.name}: version {version} is newer than {entry.version}, known here")
        return entry.codec.convert(data)


def _key_of(key: Any) -> Callable[[Any], bytes | None]:
    """A function from a value to its key, from what the application gave: nothing, a field, a function."""
    if key is None:
        return lambda value: None
    if isinstance(key, str):
        return lambda value: as_key(getattr(value, key))
    return lambda value: as_key(key(value))


def as_key(key: Any) -> bytes | None:
    """A key as bytes: text, numbers and ids are written out."""
    if key is None or isinstance(key, bytes):
        return key
    return str(key).encode()
