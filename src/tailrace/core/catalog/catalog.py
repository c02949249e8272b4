"""The catalog: all topics, as one frozen value that is stored whole.

Every change is a function from a catalog to a new one and the topic concerned, or to a refusal. The data of a
deleted topic stays listed in `removing` until it is gone, so that a crash in between does not leave it
behind. The ids of deleted topics are remembered for good: a topic that is only unknown, because an older
catalog was put back or the catalog was rebuilt, is never taken for a deleted one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from tailrace.core.model.commands import AlterTopic, CreateTopic, DeleteTopic
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import DEAD_LETTERS, TopicOptions, encode_folder, parse_options
from tailrace.errors import AlreadyExists, Denied, NotFound


class TopicEntry(msgspec.Struct, frozen=True):
    """One topic. No id is used twice, so a topic that is created again is another one."""

    name: str
    id: int
    options: TopicOptions
    created_us: int
    owner: str = ""
    """The user whose quotas it counts for: who made it. Empty for internal topics, and those that were made
    while the broker had no users, or by its owner."""

    @property
    def folder(self) -> str:
        """The folder of its data."""
        return encode_folder(self.name, self.id)


class Removal(NamedTuple):
    """Data of a deleted topic: the folder, the engine that has it, and the number of partitions."""

    folder: str
    storage: str
    partitions: int


Span = tuple[int, int]
"""Ids [first, end)."""


class Catalog(msgspec.Struct, frozen=True):
    """All topics by name, the next id, and the data of deleted topics that is still to be removed."""

    topics: dict[str, TopicEntry] = {}
    next_id: int = 1
    removing: tuple[Removal, ...] = ()
    deleted: tuple[Span, ...] = ()
    """Ids of deleted topics, as spans in order; there are at most as many spans as topics, and one more."""
    sequence: int = 0
    """Counts the changes. The cards of topics carry it, too, so that an older catalog is noticed."""

    def was_deleted(self, topic_id: int) -> bool:
        """Whether the topic with this id is known to have been deleted."""
        return any(first <= topic_id < end for first, end in self.deleted)


TopicChange = CreateTopic | AlterTopic | DeleteTopic
Changed = tuple[Catalog, TopicEntry]


def change(
    catalog: Catalog, command: TopicChange, now_us: int, *, internal: bool = False, owner: str = ""
) -> Changed | Refusal:
    """Create, alter or delete a topic. Topics with a leading `_` change only with `internal`; a new topic
    belongs to `owner`, one for dead letters that the broker makes to the owner of their origin.

    If there is nothing to store, the very same catalog is returned.
    """
    if isinstance(command, CreateTopic):
        return _create(catalog, command, now_us, internal, owner)
    return _CHANGES[type(command)](catalog, command, now_us, internal)


def _create(
    catalog: Catalog, command: CreateTopic, now_us: int, internal: bool, owner: str
) -> Changed | Refusal:
    existing = catalog.topics.get(command.name)
    if existing is not None:
        # With `if_missing` an existing topic is the answer, whatever its options are.
        if command.if_missing:
            return catalog, existing
        return Refusal(AlreadyExists.code, f"topic {command.name!r} exists already")
    options = parse_options(command.options, command.name, internal=internal)
    if isinstance(options, Refusal):
        return options
    origin = catalog.topics.get(command.name.removesuffix(DEAD_LETTERS))
    if internal and origin is not None:
        owner = origin.owner
    entry = TopicEntry(command.name, catalog.next_id, options, now_us, owner)
    topics = {**catalog.topics, entry.name: entry}
    return _changed(catalog, topics=topics, next_id=catalog.next_id + 1), entry


def _alter(catalog: Catalog, command: AlterTopic, now_us: int, internal: bool) -> Changed | Refusal:
    entry = _find(catalog, command.name, internal)
    if isinstance(entry, Refusal):
        return entry
    options = parse_options(command.options, entry.name, entry.options)
    if isinstance(options, Refusal):
        return options
    if options == entry.options:
        return catalog, entry
    entry = msgspec.structs.replace(entry, options=options)
    return _changed(catalog, topics={**catalog.topics, entry.name: entry}), entry


def _delete(catalog: Catalog, command: DeleteTopic, now_us: int, internal: bool) -> Changed | Refusal:
    entry = _find(catalog, command.name, internal)
    if isinstance(entry, Refusal):
        return entry
    topics = {name: other for name, other in catalog.topics.items() if name != entry.name}
    removal = Removal(entry.folder, entry.options.storage, entry.options.partitions)
    deleted = _with(catalog.deleted, entry.id)
    return _changed(catalog, topics=topics, removing=(*catalog.removing, removal), deleted=deleted), entry


_CHANGES: dict[type, Callable[[Catalog, Any, int, bool], Changed | Refusal]] = {
    AlterTopic: _alter,
    DeleteTopic: _delete,
}


def removed(catalog: Catalog, folder: str | None = None) -> Catalog:
    """The catalog after the data of a folder, or of all listed folders, was removed."""
    left = tuple(removal for removal in catalog.removing if folder is not None and removal.folder != folder)
    return _changed(catalog, removing=left)


def _changed(catalog: Catalog, **fields: Any) -> Catalog:
    return msgspec.structs.replace(catalog, sequence=catalog.sequence + 1, **fields)


def _with(spans: tuple[Span, ...], topic_id: int) -> tuple[Span, ...]:
    """Add an id to spans."""
    merged: list[Span] = []
    for first, end in sorted((*spans, (topic_id, topic_id + 1))):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def _find(catalog: Catalog, name: str, internal: bool) -> TopicEntry | Refusal:
    entry = catalog.topics.get(name)
    if entry is None:
        return Refusal(NotFound.code, f"there is no topic {name[:80]!r}", details={"topic": name[:80]})
    if name.startswith("_") and not internal:
        return Refusal(Denied.code, f"topic {name!r} is internal")
    return entry
