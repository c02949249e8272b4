"""Groups are forgotten because they were deleted, never because somebody does not know them.

Covers `broker/groups/unknown_groups.py` and `core/groups/group_deletions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest

from tailrace.broker.groups.unknown_groups import UnknownGroups
from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.commands import Done
from tailrace.core.model.group_commands import CreateGroup, DeleteGroup, DescribeGroup, GroupInfo
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import Delist
from tailrace.core.model.internal_topic import home_of
from tailrace.core.process.deletion_process import DeletionProcess
from tailrace.core.process.process import After, Begun, Effect, Event, Now, Submit
from tailrace.format.catalog_text import CatalogText, decode_catalog
from tests.sim.catalog_world import CatalogWorld


def made() -> CatalogWorld:
    world = CatalogWorld()
    world.create("a", 2)
    world.create("b", 1)
    for topic, partition in (("a", 0), ("a", 1), ("b", 0)):
        world.publish(topic, partition, b"1", b"2", b"3")
    return world


def test_an_older_catalog_without_the_topic_of_groups_deletes_no_group() -> None:
    world = made()
    older = world.saved()
    world.enlist("g", "a", "b")
    world.move("g", "a", 2, 1)
    world.stop()
    newer = world.saved()
    world.put_back(older)
    world.start()
    assert world.places("g", "a") == [2, 1]
    assert any("_groups~" in fault for fault in world.broker.engine.faults())
    refused = world.broker.ask(CreateGroup("g", ["a"]))
    assert isinstance(refused, Refusal)
    assert "rebuild-catalog" in refused.message
    world.stop()
    world.put_back(newer)
    world.start()
    assert world.broker.engine.faults() == []
    assert world.places("g", "a") == [2, 1]
    assert world.groups()["g"].known


def test_a_group_that_no_coordinator_knows_is_kept_shown_and_taken_up_again() -> None:
    world = made()
    older = world.saved()
    world.enlist("g", "a", "b")
    world.move("g", "a", 2, 1)
    folder = world.folder("_groups")
    world.stop()
    world.put_back(older)
    world.disk.remove(folder)
    world.start()
    shown = world.groups()["g"]
    assert not shown.known
    assert b"tailrace_unknown_groups 1.0" in world.broker.engine.metrics.render()
    assert sorted(shown.topics) == ["a", "b"]
    assert "no coordinator" in shown.warnings[0]
    described = world.broker.ask(DescribeGroup("g"))
    assert [row["committed"] for row in described.partitions] == [2, 1, 0]
    world.enlist("g", "a", "b")
    assert world.places("g", "a") == [2, 1]
    assert world.groups()["g"].known
    assert b"tailrace_unknown_groups 0.0" in world.broker.engine.metrics.render()
    world.restart()
    assert world.places("g", "a") == [2, 1]


def test_a_group_that_no_coordinator_knows_can_be_deleted() -> None:
    world = made()
    older = world.saved()
    world.enlist("g", "a")
    folder = world.folder("_groups")
    world.stop()
    world.put_back(older)
    world.disk.remove(folder)
    world.start()
    assert isinstance(world.broker.ask(DeleteGroup("g")), Done)
    assert world.groups() == {}
    assert world.places("g", "a") == [None, None]
    world.restart()
    assert world.groups() == {}


def test_a_topic_that_is_only_unknown_stays_with_its_groups() -> None:
    world = made()
    older = world.saved()
    world.create("late", 1)
    world.publish("late", 0, b"1", b"2", b"3")
    world.enlist("g", "a", "late")
    world.move("g", "late", 2)
    world.stop()
    newer = world.saved()
    groups_known = world.disk.list("")
    assert any(name.startswith("_groups~") for name in groups_known)
    world.put_back(with_groups(older, newer))
    world.start()
    shown = world.groups()["g"]
    assert sorted(shown.topics) == ["a", "late"]
    assert any("late" in warning for warning in shown.warnings)
    assert b"tailrace_kept_folders 1.0" in world.broker.engine.metrics.render()
    world.stop()
    world.put_back(newer)
    world.start()
    assert world.places("g", "late") == [2]
    assert sorted(world.groups()["g"].topics) == ["a", "late"]


def with_groups(older: bytes, newer: bytes) -> bytes:
    """The older catalog as if it had known the topic of groups already."""
    catalogs = [decode_catalog(data) for data in (older, newer)]
    topics = {**catalogs[0].topics, "_groups": catalogs[1].topics["_groups"]}
    return CatalogText().encode(msgspec.structs.replace(catalogs[0], topics=topics))


def test_a_deleted_topic_leaves_its_groups_and_one_of_its_name_is_another() -> None:
    world = made()
    world.enlist("g", "a", "b")
    world.move("g", "a", 2, 1)
    world.delete("a")
    world.create("a", 1)
    world.publish("a", 0, b"new")
    assert world.groups()["g"].topics == ["b"]
    world.restart()
    assert world.groups()["g"].topics == ["b"]
    assert world.places("g", "a") == [None]


def test_the_end_of_a_group_is_finished_or_undone_wherever_it_is_cut() -> None:
    assert cut_a_deletion_everywhere() > 5


def cut_a_deletion_everywhere() -> int:
    for step in range(300):
        world = made()
        world.enlist("g", "a", "b")
        world.move("g", "a", 2, 1)
        world.disk.random.seed(step)

        def act(world: CatalogWorld = world) -> None:
            reply = world.broker.ask(DeleteGroup("g"))
            assert isinstance(reply, Done), reply

        done = not world.cut(step, act)
        world.broker.settle()
        world.check()
        if "g" in world.groups():
            assert not done
            assert world.groups()["g"].known, "half deleted"
            assert world.places("g", "a") == [2, 1]
            world.broker.ask(DeleteGroup("g"))
        assert world.places("g", "a") == [None, None]
        assert world.places("g", "b") == [None]
        world.broker.pass_s(2)
        assert world.deletions() == 0
        world.enlist("g", "a")
        world.move("g", "a", 1, 1)
        world.restart()
        assert world.places("g", "a") == [1, 1]
        if done:
            return step
    raise AssertionError("it never ended")


def test_a_partition_that_was_away_forgets_the_deleted_group_and_not_the_next_of_its_name() -> None:
    away_and_back()


def away_and_back(when_back: Callable[[], None] = lambda: None) -> None:
    world = made()
    world.enlist("g", "a")
    world.move("g", "a", 2, 1)
    world.stop()
    folder = f"{world.folder('a')}/1"
    kept = {path: world.disk.content(path) for path in world.paths(folder)}
    world.disk.remove(folder)
    world.start()
    assert world.fault("a", 1)
    assert isinstance(world.broker.ask(DeleteGroup("g")), Done)
    assert world.deletions() == 1
    world.restart()
    assert world.deletions() == 1
    world.enlist("g", "a")
    world.move("g", "a", 3)
    world.stop()
    world.disk.make_folder(folder)
    for path, content in kept.items():
        handle = world.disk.open(path, create=True)
        world.disk.write(handle, [content], 0)
        world.disk.sync(handle)
        world.disk.close(handle)
    world.disk.sync_folder(folder)
    when_back()
    world.start()
    world.broker.settle()
    assert world.fault("a", 1) == ""
    assert world.places("g", "a") == [3, 0]
    world.broker.pass_s(2)
    assert world.deletions() == 0
    world.restart()
    assert world.places("g", "a") == [3, 0]


def test_a_group_of_a_release_without_ids_is_deleted_like_any_other() -> None:
    world = made()
    world.enlist("g", "a")
    group = world.broker.engine.coordinators.group("g")
    assert group is not None
    group.id = 0
    for number in range(2):
        world.broker.runtime("a", number).state.queues._ledgers["g"].id = 0
    assert isinstance(world.broker.ask(DeleteGroup("g")), Done)
    assert world.places("g", "a") == [None, None]
    assert world.groups() == {}
    world.broker.pass_s(2)
    assert world.deletions() == 0


def test_a_partition_that_lost_a_group_begins_with_what_it_has() -> None:
    world = made()
    reply = world.broker.ask(CreateGroup("g", ["a"], {"start": "latest"}))
    assert isinstance(reply, GroupInfo)
    assert world.places("g", "a") == [3, 3]
    runtime = world.broker.runtime("a", 1)
    runtime.submit(Delist("g"), b"", lambda reply, parts: None)  # As if its log were of an older day.
    world.broker.settle()
    world.restart()
    assert world.places("g", "a") == [3, 0]


def test_a_group_whose_coordinator_is_missing_is_neither_unknown_nor_deleted() -> None:
    world = made()
    world.enlist("g", "a")
    world.move("g", "a", 2, 1)
    world.stop()
    world.disk.remove(f"{world.folder('_groups')}/{home_of('g')}")
    world.start()
    assert world.places("g", "a") == [2, 1]
    assert world.groups() == {}
    for request in (DescribeGroup("g"), DeleteGroup("g"), CreateGroup("g", ["a"])):
        reply = world.broker.ask(request)
        assert isinstance(reply, Refusal)
        assert "missing" in reply.message
    assert world.places("g", "a") == [2, 1]


# ------------------------------------------------------------------------------------------- planted bugs


def test_planted_absence_is_deletion_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def delist(self: UnknownGroups) -> None:
        for name, runtimes in self.find().items():
            self.expel(name, runtimes, lambda reply, parts: None)

    monkeypatch.setattr(UnknownGroups, "report", delist)
    with pytest.raises(AssertionError):
        test_an_older_catalog_without_the_topic_of_groups_deletes_no_group()
    with pytest.raises((AssertionError, KeyError)):
        test_a_group_that_no_coordinator_knows_is_kept_shown_and_taken_up_again()


def test_planted_unknown_topics_are_deleted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "was_deleted", lambda self, topic_id: True)
    with pytest.raises(AssertionError):
        test_a_topic_that_is_only_unknown_stays_with_its_groups()


def test_planted_deletions_that_nobody_keeps_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DeletionProcess.step

    def forgetful(self: DeletionProcess, event: Event, now: Now) -> Sequence[Effect]:
        return () if isinstance(event, Begun) else step(self, event, now)

    monkeypatch.setattr(DeletionProcess, "step", forgetful)
    with pytest.raises(AssertionError):
        cut_a_deletion_everywhere()


def _deletions_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the disks of the partitions were full at first."""
    step = DeletionProcess.step

    def late(self: DeletionProcess, event: Event, now: Now) -> Sequence[Effect]:
        effects = step(self, event, now)
        if not isinstance(event, Begun):
            return effects
        return [
            After(effect.tag, 1_000_000)
            if isinstance(effect, Submit) and isinstance(effect.command, Delist)
            else effect
            for effect in effects
        ]

    monkeypatch.setattr(DeletionProcess, "step", late)


def test_a_group_begins_anew_also_where_the_deletion_of_the_first_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away_and_back(partial(_deletions_come_late, monkeypatch))


def test_planted_names_without_ids_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailrace.core.groups.group_deletions import GroupDeletions

    monkeypatch.setattr(GroupDeletions, "ids", lambda self, group, place: [])
    with pytest.raises(AssertionError):
        away_and_back(partial(_deletions_come_late, monkeypatch))
