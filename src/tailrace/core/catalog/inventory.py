"""The inventory: the catalog compared with the folders on the disk, and the steps that follow from it.

Creating a topic, or more partitions of one, takes four steps, each durable before the next:

    intent in the topic's folder ──▶ folders of partitions ──▶ catalog ──▶ the intent becomes the card

Topics that wait at the same time take each step together. The last step is not synced: the intent has the
same content as the card, and by then the catalog has it, too.

Removing a topic changes the catalog first (`Removal`), then removes the folders, then changes the catalog
again. So at a start:

- an intent with which the catalog agrees was interrupted before its last step: it becomes the card;
- an intent that the catalog does not know was never acknowledged: it is undone, and the folders made for it
  are removed, none of which holds a frame;
- a card that is newer than the catalog (both carry the catalog's number) shows that an older catalog was put
  back: the card counts;
- a folder that neither the catalog nor an intent explains is kept as it is and reported. It is never used for
  a new topic, and its id is never given again.

A topic that the catalog has and the disk lacks is found when its log is opened (`LogStore.known_log`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tailrace.core.catalog.catalog import Catalog, TopicEntry
from tailrace.core.model.topic_options import decode_folder, encode_folder


class TopicCard(msgspec.Struct, frozen=True):
    """A topic as its own folder has it, and the number of the catalog that has the same."""

    entry: TopicEntry
    sequence: int


class TopicFolder(msgspec.Struct, frozen=True):
    """The folder of a topic as found on the disk."""

    folder: str
    card: TopicCard | None = None
    intent: TopicCard | None = None
    partitions: dict[int, bool] = {}
    """By number of the partition: whether anything was ever written to it."""
    trouble: str = ""
    """Why its card cannot be read; "" if it can, or if there is none."""

    @property
    def unwritten(self) -> bool:
        """Whether no change in the folder was ever acknowledged."""
        return self.card is None and not self.trouble and not any(self.partitions.values())


class Step(NamedTuple):
    """One action on a folder: `confirm` or `withdraw` its intent, write its `card`, or `discard` the
    folder."""

    act: str
    folder: str


class Kept(NamedTuple):
    """A folder that nothing explains, the topic that it belongs to, and why it is kept."""

    folder: str
    topic: str
    why: str


class Inventory(NamedTuple):
    """The catalog that counts, the steps to take on the disk, and the folders that stay unexplained."""

    catalog: Catalog
    steps: list[Step]
    kept: list[Kept]
    notes: list[str]
    """Descriptions of what was put right, for the log of the broker."""


def is_topic_folder(name: str) -> bool:
    """Whether a name is the name of a topic's folder."""
    try:
        return encode_folder(*decode_folder(name)) == name and bool(name.rpartition("~")[0])
    except ValueError:
        return False


def take_stock(catalog: Catalog, found: Iterable[TopicFolder]) -> Inventory:
    """Compare the catalog with the folders."""
    topics = {entry.folder: entry for entry in catalog.topics.values()}
    removing = {removal.folder for removal in catalog.removing}
    next_id, sequence = catalog.next_id, catalog.sequence
    stock = Inventory(catalog, [], [], [])
    changed: dict[str, TopicEntry] = {}
    for state in found:
        next_id = max(next_id, decode_folder(state.folder)[1] + 1)
        if state.card is not None:
            sequence = max(sequence, state.card.sequence)
        entry = topics.get(state.folder)
        if state.folder in removing:
            continue
        if entry is None:
            _unknown(state, stock)
        else:
            newest = _newest(catalog, entry, state, stock)
            if newest is not entry:
                changed[newest.name] = newest
            _known(newest, state, stock)
    if changed or (next_id, sequence) != (catalog.next_id, catalog.sequence):
        after = {**catalog.topics, **changed}
        catalog = msgspec.structs.replace(catalog, topics=after, next_id=next_id, sequence=sequence)
    return stock._replace(catalog=catalog)


def _unknown(state: TopicFolder, stock: Inventory) -> None:
    """A folder whose topic the catalog does not know."""
    if state.unwritten and (state.intent is not None or not state.partitions):
        stock.steps.append(Step("discard", state.folder))
        stock.notes.append(f"{state.folder}: a topic whose making was interrupted is removed")
        return
    name = decode_folder(state.folder)[0]
    stock.kept.append(Kept(state.folder, name, f"the catalog does not know topic {name!r}"))


def _newest(catalog: Catalog, entry: TopicEntry, state: TopicFolder, stock: Inventory) -> TopicEntry:
    """The topic as the newer one of catalog and card has it."""
    card = state.card
    if card is None or card.sequence <= catalog.sequence or card.entry == entry:
        return entry
    if (card.entry.name, card.entry.id) != (entry.name, entry.id):
        return entry
    stock.notes.append(
        f"{state.folder}: its options (number {card.sequence}) are newer than the catalog (number "
        f"{catalog.sequence}), which an older copy must have replaced; the newer ones count"
    )
    return card.entry


def _known(entry: TopicEntry, state: TopicFolder, stock: Inventory) -> None:
    """The folder of a topic of the catalog."""
    interrupted = False
    if state.intent is not None:
        confirmed = state.intent.entry == entry
        stock.steps.append(Step("confirm" if confirmed else "withdraw", state.folder))
        interrupted = not confirmed
    if (state.card is None or state.card.entry != entry) and (state.intent is None or interrupted):
        stock.steps.append(Step("card", state.folder))
    for number, written in sorted(state.partitions.items()):
        if number < entry.options.partitions:
            continue
        folder = f"{state.folder}/{number}"
        if interrupted and not written:
            stock.steps.append(Step("discard", folder))
            stock.notes.append(f"{folder}: a partition whose making was interrupted is removed")
        else:
            why = f"the catalog knows {entry.options.partitions} partitions of topic {entry.name!r}"
            stock.kept.append(Kept(folder, entry.name, why))
