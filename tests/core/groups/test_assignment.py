"""Assignment of partitions: balanced within one, sticky, and with the fewest moves."""

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.groups.assignment import assign, one_for_all
from tailrace.core.model.group_commands import Place

NAMES = [f"m{number}" for number in range(8)]
TOPICS = ["a", "b", "c"]

Members = dict[str, list[str]]


def places_of(sizes: dict[str, int]) -> dict[Place, str]:
    return {(topic, number): "" for topic, count in sizes.items() for number in range(count)}


def loads(members: Members, assignment: dict[Place, str]) -> Counter[str]:
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(member for member in assignment.values() if member)
    return counts


def fewest_moves(members: Members, holders: dict[Place, str]) -> int:
    """When all want the same topics: what exceeds the best choice of shares, worked out apart."""
    have = sorted((sum(holder == m for holder in holders.values()) for m in members), reverse=True)
    share, more = divmod(len(holders), len(members))
    kept = sum(min(count, share + (rank < more)) for rank, count in enumerate(have))
    return sum(have) - kept


sizes = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9), min_size=1)
alike = st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=6)


@given(sizes, st.lists(alike, min_size=1, max_size=5))
def test_members_alike_are_balanced_within_one_with_the_fewest_moves(
    topics: dict[str, int], rounds: list[list[str]]
) -> None:
    holders = places_of(topics)
    for present in rounds:
        members = {name: list(topics) for name in present}
        kept = {place: holder for place, holder in holders.items() if holder in members}
        after = assign(members, {**dict.fromkeys(holders, ""), **kept})
        counts = loads(members, after)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all(after.values())
        moved = sum(after[place] != holder for place, holder in kept.items())
        assert moved == fewest_moves(members, {**dict.fromkeys(holders, ""), **kept})
        assert assign(members, after) == after
        holders = after


@given(
    sizes, st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(TOPICS), unique=True)), st.data()
)
def test_members_with_different_topics(topics: dict[str, int], members: Members, data: st.DataObject) -> None:
    holders = {
        place: data.draw(st.sampled_from(["", *(m for m in members if place[0] in members[m])]))
        for place in places_of(topics)
    }
    after = assign(members, holders)
    counts = loads(members, after)
    for (topic, _), member in after.items():
        wanting = [name for name, wanted in members.items() if topic in wanted]
        assert (member in wanting) if wanting else member == ""
        for other in wanting:
            assert counts[member] - counts[other] <= 1, "somebody who could take it has two less"
    assert assign(members, after) == after


def test_a_joiner_gets_its_share_at_once() -> None:
    before = assign({"a": ["t"], "b": ["t"]}, places_of({"t": 5}))
    after = assign({"a": ["t"], "b": ["t"], "c": ["t"]}, before)
    assert loads({"a": [], "b": [], "c": []}, after)["c"] == 1
    assert sum(before[place] != after[place] for place in before) == 1


def test_a_partition_moves_through_a_third_member() -> None:
    """c can take only from t2, which only b has: a gives to b what b gives to c."""
    members = {"a": ["t1"], "b": ["t1", "t2"], "c": ["t2"]}
    holders = {("t1", 0): "a", ("t1", 1): "a", ("t1", 2): "a", ("t2", 0): "b", ("t2", 1): "b"}
    counts = loads(members, assign(members, holders))
    assert sorted(counts.values()) == [1, 2, 2]


def test_several_topics_are_spread_each_by_itself_too() -> None:
    members = {name: ["a", "b"] for name in NAMES[:3]}
    after = assign(members, places_of({"a": 3, "b": 3}))
    for topic in ("a", "b"):
        assert {member for (name, _), member in after.items() if name == topic} == set(members)


def test_exclusive_gives_all_to_one_and_lets_it_keep_it() -> None:
    first = one_for_all({"a": ["t"], "b": ["t"]}, places_of({"t": 3}))
    assert set(first.values()) == {"a"}
    assert one_for_all({"b": ["t"], "a": ["t"]}, first) == first
    assert set(one_for_all({"b": ["t"], "c": ["t"]}, dict.fromkeys(first, "")).values()) == {"b"}
    assert set(one_for_all({}, first).values()) == {""}


def test_a_thousand_partitions_cost_little() -> None:
    members = {f"m{number}": ["t"] for number in range(50)}
    before = assign(members, places_of({"t": 1000}))
    started = time.process_time()
    after = assign({**members, "new": ["t"]}, before)
    assert time.process_time() - started < 1
    assert sum(before[place] != after[place] for place in before) == 19
