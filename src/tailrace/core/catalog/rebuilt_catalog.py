"""A catalog rebuilt from the folders of topics: for one that is lost, damaged, or older than its topics.

The name of a folder says which topic it is, and its card has the rest. Topics whose cards are lost have lost
their options with the catalog; their partitions are counted, and the other options are guessed only if
the operator allows it. A topic that the old catalog still has counts, unless its card is newer. Topics in
memory have no folders: they are not found again, and hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tailrace.core.catalog.catalog import Catalog, TopicEntry
from tailrace.core.catalog.inventory import TopicFolder
from tailrace.core.model.internal_topic import PARTITIONS, TOPIC
from tailrace.core.model.topic_options import TopicOptions, decode_folder

OWN_OPTIONS = TopicOptions(partitions=PARTITIONS, ring_buffer_bytes=0)
"""Options of the topic of groups: every broker creates it with these."""


class RebuiltTopic(NamedTuple):
    """The outcome for one folder."""

    folder: str
    topic: str
    id: int
    partitions: int
    options: str
    """The source of its options: `catalog`, `card` or `defaults`; "" if the folder is left."""
    state: str
    """`known` to the catalog before, `registered` now, or `left` as it is."""
    note: str = ""


class RebuiltCatalog(NamedTuple):
    """The catalog to store, and the outcome for each folder."""

    catalog: Catalog
    found: list[RebuiltTopic]

    @property
    def guessed(self) -> list[RebuiltTopic]:
        """The topics whose options are not known."""
        return [item for item in self.found if item.options == "defaults"]


def rebuild(catalog: Catalog | None, folders: Iterable[TopicFolder], now_us: int) -> RebuiltCatalog:
    """Register every folder that holds a topic; `catalog` is the old one, if it can still be read."""
    old = catalog or Catalog()
    topics = dict(old.topics)
    removing = {removal.folder for removal in old.removing}
    found: list[RebuiltTopic] = []
    next_id, sequence = old.next_id, old.sequence
    # Of two topics of one name the later one counts.
    for state in sorted(folders, key=lambda item: decode_folder(item.folder)[1], reverse=True):
        name, number = decode_folder(state.folder)
        next_id = max(next_id, number + 1)
        if state.card is not None:
            sequence = max(sequence, state.card.sequence)
        entry, options, note = _entry(old, state, now_us)
        partitions = 0 if entry is None else entry.options.partitions
        other = topics.get(name)
        if state.folder in removing or old.was_deleted(number):
            entry, note = None, "the topic was deleted"
        elif entry is None:
            note = note or "its making was interrupted"
        elif other is not None and other.id != number:
            entry, note = None, f"{other.folder} has the same name"
        if entry is None:
            found.append(RebuiltTopic(state.folder, name, number, partitions, "", "left", note))
            continue
        known = other is not None and other == entry
        topics[name] = entry
        state_now = "known" if known else "registered"
        found.append(RebuiltTopic(state.folder, name, number, partitions, options, state_now, note))
    after = msgspec.structs.replace(
        old, topics=dict(sorted(topics.items())), next_id=next_id, sequence=sequence + 1
    )
    return RebuiltCatalog(after, sorted(found, key=lambda item: item.folder))


def _entry(old: Catalog, state: TopicFolder, now_us: int) -> tuple[TopicEntry | None, str, str]:
    """The topic in a folder, the source of its options, and a note about what is unusual."""
    name, number = decode_folder(state.folder)
    known, card = old.topics.get(name), state.card
    if known is not None and known.id != number:
        known = None
    if card is not None and (card.entry.name, card.entry.id) != (name, number):
        return known, "catalog", "its card is that of another topic"
    if card is not None and (known is None or card.sequence > old.sequence):
        return card.entry, "card", ""
    if known is not None:
        return known, "catalog", state.trouble
    if not state.partitions or (state.unwritten and state.intent is not None):
        return None, "", ""
    if name == TOPIC:
        return TopicEntry(name, number, OWN_OPTIONS, now_us), "card", "made as every broker makes it"
    options = TopicOptions(partitions=max(state.partitions) + 1)
    note = state.trouble or "it has no card"
    return TopicEntry(name, number, options, now_us), "defaults", note
