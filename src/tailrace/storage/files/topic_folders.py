"""The folders of topics: their cards and intents, and the partitions in them.

Every step is durable when its call returns; `core.catalog.inventory` gives the order of steps. An intent is
written under its own name and renamed to the card, so that a crash leaves the one or the other. Each step
syncs everything at its end, at once for all topics that are made together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.core.catalog.inventory import TopicCard, TopicFolder, is_topic_folder
from tailrace.errors import Corrupt, StorageFault
from tailrace.format.cards import decode_card, encode_card
from tailrace.ports import Disk
from tailrace.storage.files.log_folder import NO_SPACE, TEMPORARY, refused
from tailrace.storage.files.mark import MARK_NAME, SLOT_BYTES, first_slots

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
        # An intent is durable before anything is made for it, so a damaged one explains nothing.
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
        """Whether a log holds anything: its first append makes a segment, its creation only the mark."""
        return any(name != MARK_NAME and not name.endswith(TEMPORARY) for name in self._disk.list(folder))

    def exists(self, folder: str) -> bool:
        """See `TopicFolders.exists`."""
        return self._disk.exists(folder)

    def intend(self, *cards: TopicCard) -> None:
        """See `TopicFolders.intend`. The folders lie in the root, so no parent has to be made first."""
        first = cards[0].entry.folder
        with _guarded("noting what is to be done in", first, untouched=True), self._files() as handles:
            for card in cards:
                if self._disk.exists(f"{card.entry.folder}/{CARD}"):
                    self._disk.sync_folder(card.entry.folder)  # It may have been an intent until now.
                self._disk.add_folder(card.entry.folder)
                handle = self._open(f"{card.entry.folder}/{INTENT}", handles)
                self._disk.truncate(handle, 0)
                self._disk.write(handle, [encode_card(card)], 0)
            self._disk.sync_all(handles, ["", *(card.entry.folder for card in cards)])

    def lay_out(self, *partitions: str) -> None:
        """See `TopicFolders.lay_out`. An empty log is a folder with a mark that says so."""
        with _guarded("making", partitions[0], untouched=True), self._files() as handles:
            for folder in partitions:
                self._disk.add_folder(folder)
                handle = self._open(f"{folder}/{MARK_NAME}", handles)
                self._disk.allocate(handle, 2 * SLOT_BYTES)
                for raw, position in first_slots():
                    self._disk.write(handle, [raw], position)
            parents = {folder.rpartition("/")[0] for folder in partitions}
            self._disk.sync_all(handles, [*sorted(parents), *partitions])

    def confirm(self, *folders: str) -> None:
        """See `TopicFolders.confirm`."""
        for folder in folders:
            with _guarded("confirming what was done in", folder):
                self._disk.rename(f"{folder}/{INTENT}", f"{folder}/{CARD}")

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
                self._disk.sync_folder(folder)  # the card that explains the partitions goes after them
            self._disk.remove(folder)
            self._disk.sync_folder(folder.rpartition("/")[0])

    def _open(self, path: str, handles: list[int]) -> int:
        handles.append(self._disk.open(path, create=True))
        return handles[-1]

    @contextmanager
    def _files(self) -> Iterator[list[int]]:
        """Collect handles, and close them at the end."""
        handles: list[int] = []
        try:
            yield handles
        finally:
            for handle in handles:
                self._disk.close(handle)


@contextmanager
def _guarded(act: str, folder: str, *, untouched: bool = False) -> Iterator[None]:
    """Turn an OSError into a `StorageFault`; with `untouched` a full disk becomes `Full`, because nothing of
    the failed step counts."""
    try:
        yield
    except OSError as error:
        if untouched and error.errno in NO_SPACE:
            raise refused(f"{act} {folder}", error) from error
        raise StorageFault(f"{act} {folder} failed: {error}") from error
