"""The embedded registry: one node's catalog in one file, replaced whole and durably at every change."""

from __future__ import annotations

import errno

import msgspec

from tailrace.core.catalog.catalog import Catalog
from tailrace.errors import Corrupt, Full, Outcome, StorageFault
from tailrace.format.catalog_text import CatalogText, decode_catalog
from tailrace.ports import Disk

FILE = "catalog.json"
ADVICE = "rebuild it from the folders of the topics with `tailrace log rebuild-catalog DATA`"


class FileCoordinator:
    """`Registry` on a disk. The file is readable JSON, with a checksum over the bytes of the catalog in
    it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._text = CatalogText()

    def load(self) -> Catalog | None:
        """The catalog; None without a file. A damaged file is an error, never an empty catalog."""
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
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"{FILE} is damaged: {error}; {ADVICE}", path=FILE, position=0) from error

    def save(self, catalog: Catalog) -> None:
        """Write a new file, sync it, rename it, sync the folder. A failure before the rename changes
        nothing."""
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
    """`Registry` that lives as long as the object; for tests and memory-only brokers."""

    def __init__(self) -> None:
        self._catalog: Catalog | None = None

    def load(self) -> Catalog | None:
        """The catalog as last saved."""
        return self._catalog

    def save(self, catalog: Catalog) -> None:
        """Keep the catalog."""
        self._catalog = catalog
