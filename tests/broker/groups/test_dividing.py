"""Topics that were shared and are divided again: each partition hears whose it is, and follows."""

from tailrace.core.model.commands import AlterTopic
from tailrace.core.model.group_commands import AlterGroup, LeaveGroup, PauseGroup
from tailrace.core.model.identifiers import Refusal
from tests.broker.members import Members


def grants(group: Members) -> dict[int, tuple[str, bool]]:
    """Whom each partition knows as its owner, and whether it is shared."""
    queues = [runtime.state.queues for runtime in group.broker.engine.topics.get("t").runtimes]
    return {n: ((each.grant("g") or ("", 0))[0], each.is_shared("g")) for n, each in enumerate(queues)}


def owners(group: Members) -> dict[int, tuple[str, bool]]:
    """The same as members were told."""
    return {number: (member, False) for member in group.known for _, number in group.owned(member)}


def paused(group: Members) -> bool:
    group.broker.submit(PauseGroup("g", True))
    group.broker.pass_s(6)
    return all(
        runtime.state.queues.is_paused("g") for runtime in group.broker.engine.topics.get("t").runtimes
    )


def test_a_group_that_always_shared_is_divided_in_its_partitions_too() -> None:
    group = Members(3, assignment="shared")
    group.join("a", "b")
    group.broker.ask(AlterGroup("g", {"assignment": "partitions"}))
    group.follow()
    assert grants(group) == owners(group)
    assert sorted(member for member, _ in grants(group).values()) in (["a", "a", "b"], ["a", "b", "b"])
    group.broker.restart()
    group.follow()
    assert grants(group) == owners(group)
    assert paused(group)


def test_partitions_that_came_while_a_topic_was_shared_have_one_owner_each_afterwards() -> None:
    group = Members(2)
    group.join("a", "b", "c")
    group.broker.ask(AlterTopic("t", {"partitions": 4}))
    group.follow()
    assert set(grants(group).values()) == {("", True)}
    for _ in range(4):
        group.broker.pass_s(3)
        group.follow()
    assert grants(group) == owners(group)
    assert len(owners(group)) == 4
    group.broker.ask(LeaveGroup("g", "b"))
    del group.known["b"]
    group.follow()
    assert grants(group) == owners(group)
    assert len(owners(group)) == 4
    for number, (member, _) in owners(group).items():
        assert not isinstance(group.lease(member, number), Refusal)
    assert paused(group)
