"""The catalog: creating, altering and deleting topics, and what a coordinator stores."""

from __future__ import annotations

import msgspec

from tailrace.core.catalog.catalog import Catalog, Removal, TopicChange, TopicEntry, change, removed
from tailrace.core.model.commands import AlterTopic, CreateTopic, DeleteTopic
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import TopicOptions

NOW_US = 1_700_000_000_000_000


def done(catalog: Catalog, command: TopicChange, *, internal: bool = False) -> tuple[Catalog, TopicEntry]:
    outcome = change(catalog, command, NOW_US, internal=internal)
    assert not isinstance(outcome, Refusal), outcome
    return outcome


def refused(catalog: Catalog, command: TopicChange) -> str:
    outcome = change(catalog, command, NOW_US)
    assert isinstance(outcome, Refusal), outcome
    return outcome.code


def test_create() -> None:
    empty = Catalog()
    catalog, entry = done(empty, CreateTopic("orders", {"partitions": 2}))
    assert entry == TopicEntry("orders", 1, TopicOptions(partitions=2), NOW_US)
    assert catalog == Catalog({"orders": entry}, 2, sequence=1)
    assert empty == Catalog()


def test_a_topic_belongs_to_who_made_it_and_its_dead_letters_too() -> None:
    outcome = change(Catalog(), CreateTopic("orders"), NOW_US, owner="anna")
    assert not isinstance(outcome, Refusal)
    catalog, entry = outcome
    assert entry.owner == "anna"
    catalog, entry = done(catalog, AlterTopic("orders", {"partitions": 5}))
    assert entry.owner == "anna"
    assert done(catalog, CreateTopic("orders.dlq"), internal=True)[1].owner == "anna"
    assert done(catalog, CreateTopic("lost.dlq"), internal=True)[1].owner == ""
    outcome = change(catalog, CreateTopic("orders.dlq"), NOW_US, owner="bob")
    assert not isinstance(outcome, Refusal)
    assert outcome[1].owner == "bob"


def test_create_again() -> None:
    catalog, entry = done(Catalog(), CreateTopic("orders"))
    assert refused(catalog, CreateTopic("orders")) == "already_exists"
    same, found = done(catalog, CreateTopic("orders", {"partitions": 9}, if_missing=True))
    assert same is catalog
    assert found is entry


def test_names_that_differ_in_case_are_two_topics() -> None:
    catalog, lower = done(Catalog(), CreateTopic("orders"))
    catalog, upper = done(catalog, CreateTopic("Orders"))
    assert lower.folder.casefold() != upper.folder.casefold()


def test_bad_options_change_nothing() -> None:
    assert refused(Catalog(), CreateTopic("orders", {"partitions": 0})) == "invalid_request"
    assert refused(Catalog(), CreateTopic("_orders")) == "invalid_request"


def test_alter() -> None:
    catalog, _ = done(Catalog(), CreateTopic("orders"))
    altered, entry = done(catalog, AlterTopic("orders", {"partitions": 4}))
    assert (entry.id, entry.options.partitions) == (1, 4)
    assert altered.topics["orders"] is entry
    assert done(altered, AlterTopic("orders", {"partitions": 4}))[0] is altered
    assert refused(altered, AlterTopic("orders", {"partitions": 3})) == "invalid_request"
    assert refused(altered, AlterTopic("order", {})) == "not_found"


def test_delete_and_create_again_is_another_topic() -> None:
    catalog, first = done(Catalog(), CreateTopic("orders", {"partitions": 2}))
    catalog, gone = done(catalog, DeleteTopic("orders"))
    assert gone == first
    removal = Removal(first.folder, "file", 2)
    assert catalog == Catalog({}, 2, (removal,), deleted=((1, 2),), sequence=2)
    assert catalog.was_deleted(1)
    assert not catalog.was_deleted(2)
    assert refused(catalog, DeleteTopic("orders")) == "not_found"
    catalog, second = done(catalog, CreateTopic("orders"))
    assert second.id == 2
    assert second.folder != first.folder
    assert removed(catalog, second.folder).removing == catalog.removing
    assert removed(catalog, first.folder).removing == ()
    assert removed(catalog).removing == ()


def test_internal_topics_are_for_the_broker() -> None:
    catalog, entry = done(Catalog(), CreateTopic("_groups"), internal=True)
    assert refused(catalog, AlterTopic("_groups", {"partitions": 20})) == "denied"
    assert refused(catalog, DeleteTopic("_groups")) == "denied"
    assert done(catalog, AlterTopic("_groups", {"partitions": 20}), internal=True)[1].options.partitions == 20
    assert done(catalog, DeleteTopic("_groups"), internal=True)[1] == entry


def test_it_is_stored_as_json() -> None:
    catalog, _ = done(Catalog(), CreateTopic("orders", {"retention_ms": 5}))
    catalog, _ = done(catalog, CreateTopic("payments", {"storage": "memory"}))
    catalog, _ = done(catalog, DeleteTopic("orders"))
    assert msgspec.json.decode(msgspec.json.encode(catalog), type=Catalog) == catalog
    assert msgspec.json.decode(b"{}", type=Catalog) == Catalog()
