"""The folders of topics: their cards and intents, and which partitions lie in them.

Every step is durable when its call returns; `core.inventory` says in which order they come. An intent is
written under its own name and renamed to the card, so that a crash leaves the one or the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.core.inventory import TopicCard, TopicFolder, is_topic_folder
from tailrace.errors import Corrupt, StorageFault
from tailrace.format.cards import decode_card, encode_card
from tailrace.ports import Disk
from tailrace.storage.log_folder import NO_SPACE, TEMPORARY, refused
from tailrace.storage.mark import MARK_NAME

CARD = "topic.json"
INTENT = "topic.intent"


class FolderShelf:
    """See `TopicFolders`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def survey(self) -> list[TopicFolder]:
        """See `TopicFolders.survey`."""
        return [self._look(name) for name in self._disk.list("") if is_topic_folder(name)]

    def _look(self, folder: str) -> TopicFolder:
        names = self._disk.list(folder)
        card: TopicCard | None
        card, trouble = self._card(folder, CARD) if CARD in names else (None, "")
        # An intent is whole before anything is made for it: one that is not explains nothing.
        intent = self._card(folder, INTENT)[0] if INTENT in names else None
        partitions = {int(name): self._written(f"{folder}/{name}") for name in names if name.isdigit()}
        return TopicFolder(folder, card, intent, partitions, trouble)

    def _card(self, folder: str, name: str) -> tuple[TopicCard | None, str]:
        handle = self._disk.open(f"{folder}/{name}")
        try:
            return decode_card(self._disk.read(handle, 0, self._disk.size(handle))), ""
        except Corrupt as error:
            return None, f"{folder}/{name}: {error.message}"
        finally:
            self._disk.close(handle)

    def _written(self, folder: str) -> bool:
        """Whether a log holds more than what its making leaves; a first append makes a segment."""
        return any(name != MARK_NAME and not name.endswith(TEMPORARY) for name in self._disk.list(folder))

    def exists(self, folder: str) -> bool:
        """See `TopicFolders.exists`."""
        parent, _, name = folder.rpartition("/")
        return name in self._disk.list(parent)

    def intend(self, card: TopicCard) -> None:
        """See `TopicFolders.intend`."""
        folder = card.entry.folder
        with _guarded("noting what is to be done in", folder, untouched=True):
            self._disk.make_folder(folder)
            self._write(f"{folder}/{INTENT}", encode_card(card))
            self._disk.sync_folder(folder)

    def confirm(self, folder: str) -> None:
        """See `TopicFolders.confirm`."""
        with _guarded("confirming what was done in", folder):
            self._disk.rename(f"{folder}/{INTENT}", f"{folder}/{CARD}")
            self._disk.sync_folder(folder)

    def withdraw(self, folder: str) -> None:
        """See `TopicFolders.withdraw`."""
        with _guarded("taking back what was to be done in", folder):
            if INTENT in self._disk.list(folder):
                self._disk.remove(f"{folder}/{INTENT}")
                self._disk.sync_folder(folder)

    def discard(self, folder: str) -> None:
        """See `TopicFolders.discard`."""
        with _guarded("removing", folder):
            inner = [name for name in self._disk.list(folder) if name.isdigit()]
            for name in inner:
                self._disk.remove(f"{folder}/{name}")
            if inner:
                self._disk.sync_folder(folder)  # what explains the partitions goes after them
            self._disk.remove(folder)
            self._disk.sync_folder(folder.rpartition("/")[0])

    def _write(self, path: str, data: bytes) -> None:
        handle = self._disk.open(path, create=True)
        try:
            self._disk.truncate(handle, 0)
            self._disk.write(handle, [data], 0)
            self._disk.sync(handle)
        finally:
            self._disk.close(handle)


@contextmanager
def _guarded(act: str, folder: str, *, untouched: bool = False) -> Iterator[None]:
    """With `untouched` nothing counts of a step that failed: no space for it is told as such."""
    try:
        yield
    except OSError as error:
        if untouched and error.errno in NO_SPACE:
            raise refused(f"{act} {folder}", error) from error
        raise StorageFault(f"{act} {folder} failed: {error}") from error
