"""The embedded coordinator: one node's catalog in one file, replaced whole and durably at every change."""

from __future__ import annotations

import errno

import msgspec

from tailrace.core.model.catalog import Catalog
from tailrace.errors import Corrupt, Full, Outcome, StorageFault
from tailrace.format.catalog_text import CatalogText, decode_catalog
from tailrace.ports import Disk

FILE = "catalog.json"
ADVICE = "rebuild it from the folders of the topics with `tailrace log rebuild-catalog DATA`"


class FileCoordinator:
    """`Coordinator` on a disk. The file is readable JSON; the checksum is over the catalog's bytes as they
    stand.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._text = CatalogText()

    def load(self) -> Catalog | None:
        """The catalog; None where there is no file. A damaged file is an error, never an empty catalog."""
        try:
            handle = self._disk.open(FILE)
        except FileNotFoundError:
            return None
        try:
            data = self._disk.read(handle, 0, self._disk.size(handle))
        finally:
            self._disk.close(handle)
        try:
            return decode_catalog(data)
        except Corrupt as error:
            raise Corrupt(f"{FILE}: {error.message}; {ADVICE}", path=FILE, position=0) from error
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{FILE} is damaged: {error}; {ADVICE}", path=FILE, position=0) from error

    def save(self, catalog: Catalog) -> None:
        """Write beside, sync, rename, sync the folder. Before the rename a failure has changed nothing."""
        data = self._text.encode(catalog)
        outcome: Outcome = "none"
        try:
            handle = self._disk.open(FILE + ".new", create=True)
            try:
                self._disk.truncate(handle, 0)
                self._disk.write(handle, [data], 0)
                self._disk.sync(handle)
            finally:
                self._disk.close(handle)
            outcome = "unknown"
            self._disk.rename(FILE + ".new", FILE)
            self._disk.sync_folder("")
        except OSError as error:
            if outcome == "none" and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Full(f"storing {FILE}: no space is left") from error
            raise StorageFault(f"{FILE} could not be stored: {error}", outcome=outcome) from error


class MemoryCoordinator:
    """`Coordinator` that lives as long as the object; for tests and memory-only brokers."""

    def __init__(self) -> None:
        self._catalog: Catalog | None = None

    def load(self) -> Catalog | None:
        """The catalog as last saved."""
        return self._catalog

    def save(self, catalog: Catalog) -> None:
        """Keep it."""
        self._catalog = catalog
