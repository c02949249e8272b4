"""One suite for every `Registry`: what was saved last is loaded, whole, or the failure is told.

Covers `cluster/embedded.py`.
"""

from pathlib import Path

import msgspec
import pytest

from tailrace.cluster.embedded import FILE, FileCoordinator, MemoryCoordinator
from tailrace.core.catalog.catalog import Catalog, TopicEntry
from tailrace.core.catalog.inventory import TopicCard
from tailrace.core.model.topic_options import TopicOptions
from tailrace.errors import Corrupt
from tailrace.format.cards import decode_card, encode_card
from tailrace.format.frame import crc32c
from tailrace.ports import Registry
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.disk import RealDisk


@pytest.fixture(params=["file on a real disk", "file on a simulated disk", "memory"])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    if request.param == "memory":
        return MemoryCoordinator()
    return FileCoordinator(RealDisk(tmp_path) if "real" in request.param else SimDisk(1))


def catalog(count: int) -> Catalog:
    entries = [TopicEntry(f"t/{number}", number, TopicOptions(), 5) for number in range(1, count + 1)]
    return Catalog({entry.name: entry for entry in entries}, count + 1, deleted=((9, 12),), sequence=count)


def test_there_is_none_at_first(coordinator: Registry) -> None:
    assert coordinator.load() is None


def test_the_catalog_as_last_saved_is_loaded(coordinator: Registry) -> None:
    for count in (1, 40, 0, 3):
        coordinator.save(catalog(count))
        assert coordinator.load() == catalog(count)
        assert coordinator.load() == catalog(count)


def test_what_was_saved_is_durable_and_a_save_is_whole_or_not_there() -> None:
    """Power fails at every step of a save, on disks that keep what they like of what was not synced."""
    found = set()
    for seed in range(30):
        for step in range(8):
            disk = SimDisk(seed)
            FileCoordinator(disk).save(catalog(1))
            disk.crash_in = step
            try:
                FileCoordinator(disk).save(catalog(2))
                expected = {2}
            except Crash:
                expected = {1, 2}
            disk.crash()
            loaded = FileCoordinator(disk).load()
            assert loaded is not None
            found.add(len(loaded.topics))
            assert len(loaded.topics) in expected
    assert found == {1, 2}


def test_options_that_differ_and_owners_are_kept_and_another_version_is_refused(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    options = TopicOptions(partitions=7, retention_ms=5, key_index=True)
    owned = TopicEntry("a", 1, options, 5, "acme/anna")
    mixed = Catalog({"a": owned, "b": TopicEntry("b", 2, TopicOptions(), 6)}, 3)
    FileCoordinator(disk).save(mixed)
    assert FileCoordinator(disk).load() == mixed
    stored = msgspec.json.decode((tmp_path / FILE).read_bytes())
    assert ["owner" in topic for topic in stored["catalog"]["topics"].values()] == [True, False]
    (tmp_path / FILE).write_bytes(msgspec.json.encode(stored | {"version": 1}))
    with pytest.raises(Corrupt, match="version 1, this release reads 2"):
        FileCoordinator(disk).load()


def test_what_the_defaults_were_when_it_was_written_counts(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    FileCoordinator(disk).save(catalog(1))
    stored = msgspec.json.decode((tmp_path / FILE).read_bytes())
    stored["catalog"]["defaults"]["batch_size"] = 77
    text = msgspec.json.encode(stored["catalog"])
    (tmp_path / FILE).write_bytes(msgspec.json.encode(stored | {"crc": crc32c(text)}))
    loaded = FileCoordinator(disk).load()
    assert loaded is not None
    assert loaded.topics["t/1"].options.batch_size == 77


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_file_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    disk = RealDisk(tmp_path)
    FileCoordinator(disk).save(catalog(1))
    stored = msgspec.json.decode((tmp_path / FILE).read_bytes())
    (tmp_path / FILE).write_bytes(msgspec.json.encode(stored | {"version": version}))
    with pytest.raises(Corrupt, match=f"version {version}"):
        FileCoordinator(disk).load()


def test_no_flipped_or_missing_byte_is_taken_for_a_catalog(tmp_path: Path) -> None:
    """Whatever it makes of the text: broken JSON, broken UTF-8, another field."""
    coordinator = FileCoordinator(RealDisk(tmp_path))
    coordinator.save(catalog(2))
    good = (tmp_path / FILE).read_bytes()
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        for bad in (bytes(flipped), good[:position]):
            (tmp_path / FILE).write_bytes(bad)
            with pytest.raises(Corrupt):
                coordinator.load()


def test_no_flipped_or_missing_byte_is_taken_for_another_card() -> None:
    card = TopicCard(TopicEntry("t", 1, TopicOptions(), 5), 7)
    good = encode_card(card)
    assert decode_card(good) == card
    refused = 0
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        for bad in (bytes(flipped), good[:position]):
            try:
                assert decode_card(bad) == card, "the checksum does not cover the version"
            except Corrupt:
                refused += 1
    assert refused >= 2 * len(good) - 1
