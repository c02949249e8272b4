"""Catalogs rebuilt from folders: what is registered, with which options, and what is left."""

from __future__ import annotations

from tailrace.core.catalog.catalog import Catalog, TopicEntry
from tailrace.core.catalog.inventory import TopicCard, TopicFolder, is_topic_folder
from tailrace.core.catalog.rebuilt_catalog import rebuild
from tailrace.core.model.topic_options import TopicOptions

NOW_US = 1_700_000_000_000_000


def entry(name: str, number: int, **options: int) -> TopicEntry:
    return TopicEntry(name, number, TopicOptions(**options), 5)  # type: ignore[arg-type]


def folder(item: TopicEntry, sequence: int = 1) -> TopicFolder:
    partitions = dict.fromkeys(range(item.options.partitions), True)
    return TopicFolder(item.folder, TopicCard(item, sequence), None, partitions)


def test_cards_say_all() -> None:
    a, b = entry("a", 3, partitions=2, retention_ms=7), entry("b/c", 40)
    rebuilt = rebuild(None, [folder(a), folder(b, 9)], NOW_US)
    assert rebuilt.catalog == Catalog({"a": a, "b/c": b}, 41, sequence=10)
    assert [(item.state, item.options) for item in rebuilt.found] == [("registered", "card")] * 2
    assert rebuilt.guessed == []


def test_what_the_catalog_knows_counts_unless_a_card_is_newer() -> None:
    a, b, new_b = entry("a", 1), entry("b", 2, partitions=1), entry("b", 2, partitions=3)
    old = Catalog({"a": a, "b": b}, 3, deleted=((4, 5),), sequence=6)
    stale, newer = folder(entry("a", 1, retention_ms=1), 5), folder(new_b, 7)
    rebuilt = rebuild(old, [stale, newer, folder(entry("gone", 4))], NOW_US)
    assert rebuilt.catalog.topics == {"a": a, "b": new_b}
    assert rebuilt.catalog.deleted == old.deleted
    assert [item.state for item in rebuilt.found] == ["known", "registered", "left"]


def test_options_are_guessed_and_said_to_be() -> None:
    bare = TopicFolder("a~1", None, None, {0: True, 2: False})
    groups = TopicFolder("_groups~2", None, None, dict.fromkeys(range(16), True))
    rebuilt = rebuild(None, [bare, groups], NOW_US)
    assert rebuilt.catalog.topics["a"].options == TopicOptions(partitions=3)
    assert rebuilt.catalog.topics["_groups"].options.partitions == 16
    assert [item.topic for item in rebuilt.guessed] == ["a"]


def test_what_was_never_finished_and_twins_are_left() -> None:
    begun = TopicFolder("new~5", None, TopicCard(entry("new", 5), 2), {0: False})
    old, young = entry("a", 1), entry("a", 2)
    rebuilt = rebuild(None, [folder(old), folder(young), begun], NOW_US)
    assert rebuilt.catalog.topics == {"a": young}
    assert rebuilt.catalog.next_id == 6
    assert {item.folder: item.state for item in rebuilt.found} == {
        "a~1": "left",
        "a~2": "registered",
        "new~5": "left",
    }


def test_other_folders_are_no_topics() -> None:
    assert is_topic_folder("orders,eu~1z")
    assert not any(map(is_topic_folder, ["LOCK", "orders", "orders~", "~1", "orders~1.bak", "orders~01"]))
