"""The catalog: which topics there are, as one frozen value that a coordinator stores whole.

Every change is a function from a catalog to a new one and the reply, or to a refusal. The data of a deleted topic stays listed in `removing`
until its folder is gone, so that a crash in between does not leave it behind.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.commands import (
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    Done,
    ListTopics,
    TopicInfo,
    TopicList,
)
from tailrace.core.model import Refusal
from tailrace.core.topics import TopicOptions, encode_folder, parse_options
from tailrace.errors import AlreadyExists, Denied, NotFound


class Topic(msgspec.Struct, frozen=True):
    """One topic. Ids are never used twice, so a topic that is created again is another one."""

    name: str
    id: int
    options: TopicOptions
    created_us: int

    @property
    def folder(self) -> str:
        """Where its data lies."""
        return encode_folder(self.name, self.id)

    def info(self, *, created: bool = False, partitions: list[dict[str, Any]] | None = None) -> TopicInfo:
        """The topic as clients see it."""
        return TopicInfo(self.name, self.id, msgspec.structs.asdict(self.options), partitions or [], created)


class Catalog(msgspec.Struct, frozen=True):
    """All topics by name, the next id, and the folders of deleted topics that are still to be removed."""

    topics: dict[str, Topic] = {}
    next_id: int = 1
    removing: tuple[str, ...] = ()


def create(
    catalog: Catalog, command: CreateTopic, now_us: int, *, internal: bool = False
) -> tuple[Catalog, TopicInfo] | Refusal:
    """Add a topic. With `if_missing` a topic that is there already is the answer, whatever its options are."""
    existing = catalog.topics.get(command.name)
    if existing is not None:
        if command.if_missing:
            return catalog, existing.info()
        return Refusal(AlreadyExists.code, f"topic {command.name!r} exists already")
    options = parse_options(command.options, command.name, internal=internal)
    if isinstance(options, Refusal):
        return options
    topic = Topic(command.name, catalog.next_id, options, now_us)
    topics = {**catalog.topics, topic.name: topic}
    return Catalog(topics, catalog.next_id + 1, catalog.removing), topic.info(created=True)


def alter(
    catalog: Catalog, command: AlterTopic, *, internal: bool = False
) -> tuple[Catalog, TopicInfo] | Refusal:
    """Change options of a topic."""
    topic = find(catalog, command.name, internal=internal)
    if isinstance(topic, Refusal):
        return topic
    options = parse_options(command.options, topic.name, topic.options)
    if isinstance(options, Refusal):
        return options
    topic = msgspec.structs.replace(topic, options=options)
    topics = {**catalog.topics, topic.name: topic}
    return msgspec.structs.replace(catalog, topics=topics), topic.info()


def delete(
    catalog: Catalog, command: DeleteTopic, *, internal: bool = False
) -> tuple[Catalog, Done] | Refusal:
    """Take a topic out; its folder waits in `removing`."""
    topic = find(catalog, command.name, internal=internal)
    if isinstance(topic, Refusal):
        return topic
    topics = {name: other for name, other in catalog.topics.items() if name != topic.name}
    return Catalog(topics, catalog.next_id, (*catalog.removing, topic.folder)), Done()


def removed(catalog: Catalog, folder: str) -> Catalog:
    """The folder of a deleted topic is gone."""
    return msgspec.structs.replace(catalog, removing=tuple(f for f in catalog.removing if f != folder))


def find(catalog: Catalog, name: str, *, internal: bool = False) -> Topic | Refusal:
    """The topic to change; internal ones only for the broker itself."""
    topic = catalog.topics.get(name)
    if topic is None:
        return Refusal(NotFound.code, f"there is no topic {name[:80]!r}")
    if name.startswith("_") and not internal:
        return Refusal(Denied.code, f"topic {name!r} is internal")
    return topic


def describe(catalog: Catalog, command: DescribeTopic) -> TopicInfo | Refusal:
    """One topic, without the state of its partitions."""
    topic = find(catalog, command.name, internal=True)
    return topic if isinstance(topic, Refusal) else topic.info()


def list_topics(catalog: Catalog, command: ListTopics) -> TopicList:
    """The topics whose name starts with a prefix, sorted by name."""
    names = sorted(name for name in catalog.topics if name.startswith(command.prefix))
    return TopicList([catalog.topics[n].info() for n in names if command.internal or not n.startswith("_")])
