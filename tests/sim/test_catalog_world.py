"""Catalog and folders: changes cut by a crash, missing folders and files, older catalogs put back.

Covers `core/catalog/inventory.py`, `format/cards.py` and `format/catalog_text.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.cluster.embedded import FILE
from tailrace.core.model.commands import CreateTopic, DeleteTopic, Fetch, Fetched, Published, TopicInfo
from tailrace.core.model.damage_commands import AcceptLoss, LossReport
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.files.topic_folders import FolderShelf
from tests.sim.catalog_world import CatalogWorld

Act = Callable[[CatalogWorld], None]


def made() -> CatalogWorld:
    world = CatalogWorld()
    world.create("orders")
    world.create("other", 1)
    world.publish("orders", 0, b"a", b"b")
    world.publish("orders", 1, b"c")
    return world


def delete_and_make_again(world: CatalogWorld) -> None:
    world.delete("orders")
    world.create("orders", 1)


ACTS: list[Act] = [
    lambda world: world.create("new", 3),
    lambda world: world.create_together("first", "new", "another"),
    lambda world: world.grow("orders", 4),
    lambda world: world.delete("orders"),
    delete_and_make_again,
]


@pytest.mark.parametrize("act", ACTS, ids=["create", "together", "grow", "delete", "again"])
def test_a_change_that_is_cut_anywhere_is_finished_or_undone(act: Act) -> None:
    cuts = cut_everywhere(act)
    assert cuts > 10


def cut_everywhere(act: Act) -> int:
    for step in range(1000):
        world = made()
        world.disk.random.seed(step)
        if not world.cut(step, lambda world=world: act(world)):
            world.check()
            world.restart()
            world.check()
            return step
        world.check()
        world.start()
        world.check()
        if "new" not in world.topics:
            world.doubtful.discard("new")
        if world.broker.engine.topics.find("new") is None:
            world.create("new", 1)
            world.publish("new", 0, b"x")
            world.doubtful.add("orders")
            world.restart()
            world.check()
    raise AssertionError("it never ended")


@pytest.mark.parametrize("clean", [True, False])
def test_a_missing_partition_folder_is_damage(clean: bool) -> None:
    world = made()
    folder = f"{world.folder('orders')}/0"
    if clean:
        world.stop()
    world.disk.remove(folder)
    for _ in range(2):
        world.start()
        assert "missing" in world.fault("orders", 0)
        assert world.fault("orders", 1) == ""
        assert folder in "".join(world.broker.engine.faults())
        assert world.disk.list(folder) == []
        assert world.broker.values("orders", 1) == [b"c"]
        ((reply, _),) = world.broker.publish(b"x", topic="orders", partition=0)
        assert isinstance(reply, Refusal)
        assert reply.code == "corrupt"


def test_a_missing_topic_folder_is_damage_and_the_topic_can_be_deleted() -> None:
    world = made()
    folder = world.folder("orders")
    world.stop()
    world.disk.remove(folder)
    world.start()
    assert world.fault("orders", 0)
    assert world.fault("orders", 1)
    assert folder not in world.disk.list("")
    assert isinstance(world.broker.ask(DeleteTopic("orders")), TopicInfo)
    world.restart()
    assert world.broker.engine.faults() == []


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_segment_is_damage(clean: bool, which: int) -> None:
    world = made()
    world.fill("other", 0)
    folder = f"{world.folder('other')}/0"
    if clean:
        world.stop()
    segments = [path for path in world.paths(folder) if path.endswith(".log")]
    world.disk.remove(segments[which])
    world.start()
    assert "missing" in world.fault("other", 0)
    ((reply, data),) = world.broker.submit(Fetch("other", [(0, 0)], 1 << 20, 0))
    if which == 0:  # Nobody is given later messages as if they were the first.
        assert isinstance(reply, Refusal) or not data
    else:
        assert isinstance(reply, Fetched)


def test_all_segments_missing_is_damage() -> None:
    world = made()
    world.stop()
    for path in world.paths(f"{world.folder('orders')}/0"):
        world.disk.remove(path)
    world.start()
    assert "missing" in world.fault("orders", 0)


@pytest.mark.parametrize("what", ["folder", "segment"])
def test_what_is_missing_can_be_given_up_and_no_offset_is_given_twice(what: str) -> None:
    world = made()
    world.fill("other", 0)
    folder, end = f"{world.folder('other')}/0", world.broker.runtime("other").end_offset
    world.stop()
    segments = [path for path in world.paths(folder) if path.endswith(".log")]
    world.disk.remove(folder if what == "folder" else segments[0])
    world.start()
    assert world.fault("other", 0)
    report = world.broker.ask(AcceptLoss("other", 0, dry_run=False))
    assert isinstance(report, LossReport)
    assert report.done
    ((reply, _),) = world.broker.publish(b"x", topic="other")
    assert isinstance(reply, Published)
    assert reply.base_offset >= end
    world.restart()
    assert world.broker.engine.faults() == []


def test_segments_that_were_trimmed_are_not_missed() -> None:
    world = made()
    world.create("short", 1, retention_count=5, trace_retention_ms=1)
    world.fill("short", 0, 6)
    for number in range(4):
        world.broker.pass_s(120)
        world.publish("short", 0, b"%d" % number)
        world.restart()
    world.broker.pass_s(120)
    assert world.broker.runtime("short").stats().start_offset > 0
    world.start()
    assert world.broker.engine.faults() == []


def test_a_missing_catalog_stops_the_start_and_an_empty_folder_does_not() -> None:
    world = CatalogWorld()
    world.restart()
    world.create("orders")
    world.stop()
    before = world.disk.list("")
    world.disk.remove(FILE)
    with pytest.raises(Corrupt, match="rebuild-catalog"):
        world.start()
    assert world.disk.list("") == [name for name in before if name != FILE]


def test_a_topic_that_an_older_catalog_does_not_know_is_kept_and_never_adopted() -> None:
    world = made()
    older = world.saved()
    world.create("late", 1)
    world.publish("late", 0, b"kept")
    folder = world.folder("late")
    files = world.paths(f"{folder}/0")
    world.stop()
    world.put_back(older)
    for _ in range(2):
        world.start()
        assert world.broker.engine.topics.find("late") is None
        (fault,) = world.broker.engine.faults()
        assert folder in fault
        assert "rebuild-catalog" in fault
        reply = world.broker.ask(CreateTopic("late", {"partitions": 1}))
        assert isinstance(reply, Refusal)
        assert folder in reply.message
        assert set(files) <= set(world.paths(f"{folder}/0"))
    world.create("later", 1)
    assert world.folder("later") not in (folder, world.folder("orders"))
    assert int(world.folder("later").rpartition("~")[2], 36) > int(folder.rpartition("~")[2], 36)


def test_options_that_are_newer_than_an_older_catalog_count() -> None:
    world = made()
    older = world.saved()
    world.grow("orders", 4)
    world.publish("orders", 3, b"d")
    world.stop()
    world.put_back(older)
    world.start()
    world.check()
    world.restart()
    world.check()


def test_a_deleted_topic_of_an_older_catalog_is_damage_and_its_id_stays_spent() -> None:
    world = made()
    older = world.saved()
    folder = world.folder("orders")
    world.delete("orders")
    world.stop()
    world.put_back(older)
    world.start()
    assert world.fault("orders", 0)
    assert folder not in world.disk.list("")


# ------------------------------------------------------------------------------------------- planted bugs


def _made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "known_log", FileStore.log)


def test_planted_made_anew_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _made_anew(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_missing_partition_folder_is_damage(True)
    with pytest.raises(AssertionError):
        test_a_missing_topic_folder_is_damage_and_the_topic_can_be_deleted()


def test_planted_no_intent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderShelf, "intend", lambda self, card: self._disk.make_folder(card.entry.folder))
    monkeypatch.setattr(FolderShelf, "confirm", lambda self, folder: None)
    with pytest.raises(AssertionError):
        cut_everywhere(ACTS[0])


def test_planted_confirmed_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    intend, confirm = FolderShelf.intend, FolderShelf.confirm

    def early(self: FolderShelf, card: object) -> None:
        intend(self, card)  # type: ignore[arg-type]
        confirm(self, card.entry.folder)  # type: ignore[attr-defined]

    monkeypatch.setattr(FolderShelf, "intend", early)
    monkeypatch.setattr(FolderShelf, "confirm", lambda self, folder: None)
    with pytest.raises(AssertionError):
        cut_everywhere(ACTS[0])
