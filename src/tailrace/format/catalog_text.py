"""The catalog as a file: readable JSON with a checksum over the bytes of the catalog as they are.

Most options of most topics have their defaults. So the file has the defaults of the release that wrote it
once, and of each topic only the options that differ. With a thousand topics this makes it five times shorter,
and it is written whole at every change. The defaults of the release that reads it do not matter.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.catalog.catalog import Catalog, TopicEntry
from tailrace.core.model.topic_options import TopicOptions
from tailrace.errors import Corrupt
from tailrace.format.frame import crc32c

VERSION = 2


class _StoredCatalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: a version, the checksum of the catalog's text, and that text."""

    version: int
    crc: int
    catalog: msgspec.Raw


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A topic, with the options that differ from the defaults."""

    name: str
    id: int
    options: dict[str, Any]
    created_us: int
    owner: str = ""


class _PlainCatalog(msgspec.Struct, frozen=True):
    """The catalog with its topics as text."""

    topics: dict[str, msgspec.Raw]
    defaults: dict[str, Any] = {}


class CatalogText:
    """Encodes catalogs; an entry that was encoded before is not encoded again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[TopicEntry, msgspec.Raw]] = {}
        self._defaults = msgspec.structs.asdict(TopicOptions())

    def encode(self, catalog: Catalog) -> bytes:
        """The content of the file."""
        known = self._known
        self._known = {}
        for name, entry in catalog.topics.items():
            pair = known.get(name)
            self._known[name] = pair if pair is not None and pair[0] is entry else (entry, self._entry(entry))
        topics = {name: text for name, (_, text) in self._known.items()}
        rest = {field: getattr(catalog, field) for field in Catalog.__struct_fields__ if field != "topics"}
        text = msgspec.json.encode({"defaults": self._defaults, "topics": topics, **rest})
        return msgspec.json.encode(_StoredCatalog(VERSION, crc32c(text), msgspec.Raw(text)))

    def _entry(self, entry: TopicEntry) -> msgspec.Raw:
        options = msgspec.structs.asdict(entry.options)
        changed = {name: value for name, value in options.items() if value != self._defaults[name]}
        text = _Entry(entry.name, entry.id, changed, entry.created_us, entry.owner)
        return msgspec.Raw(msgspec.json.encode(text))


def decode_catalog(data: bytes) -> Catalog:
    """The catalog in a file; raises `Corrupt` if its checksum is wrong, and
    `msgspec.DecodeError` if it is no catalog."""
    stored = msgspec.json.decode(data, type=_StoredCatalog)
    if crc32c(bytes(stored.catalog)) != stored.crc:
        raise Corrupt("the checksum is wrong")
    if stored.version != VERSION:
        raise Corrupt(f"it is of version {stored.version}, this release reads {VERSION}")
    plain = msgspec.json.decode(stored.catalog, type=_PlainCatalog)
    topics = {}
    for name, text in plain.topics.items():
        entry = msgspec.json.decode(text, type=_Entry)
        options = msgspec.convert({**plain.defaults, **entry.options}, TopicOptions)
        topics[name] = TopicEntry(entry.name, entry.id, options, entry.created_us, entry.owner)
    fields = msgspec.json.decode(stored.catalog)
    del fields["defaults"], fields["topics"]
    return msgspec.structs.replace(msgspec.convert(fields, Catalog), topics=topics)
