"""The one function that decides on requests, asked through the gateway of a real broker."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.broker.access.authority import VERDICTS_MAX
from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model.access import OWNER, Caller, Identities, Right, User
from tailrace.core.model.commands import (
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    Fetch,
    Fetched,
    ListTopics,
    TopicInfo,
)
from tailrace.core.model.group_commands import (
    CreateGroup,
    DeleteSchedule,
    DescribeGroup,
    Heartbeat,
    JoinGroup,
    ListGroups,
    ListSchedules,
    Membership,
    PutSchedule,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import (
    AbortStaged,
    DecideStaged,
    Lease,
    Leases,
    StagedDecision,
    StageRows,
)
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tests.broker.access.guarded_broker import ROOT, GuardedBroker
from tests.core.access.plain_rules import oracle


@pytest.fixture
def broker() -> GuardedBroker:
    made = GuardedBroker()
    made.create("t")
    made.create("u")
    return made


# ------------------------------------------------------------------------------------------- who may at all


def test_without_users_everybody_may_everything(broker: GuardedBroker) -> None:
    gate = OpenGate(Caller("", "open"))
    ((reply, _),) = broker.submit(CreateTopic("new"), gate=gate)
    assert isinstance(reply, TopicInfo)
    assert broker.engine.authority.may(gate.caller, "operate", "broker", "")


def test_with_the_first_user_everybody_else_is_asked_for_credentials(broker: GuardedBroker) -> None:
    gate = OpenGate(Caller("", "open"))
    (waiting,) = [broker.submit(Fetch("t", [(0, 0)], 1000, 10_000), gate=gate)]
    assert not waiting
    broker.users(ROOT)
    assert waiting[0][0].code == "unauthenticated"  # type: ignore[union-attr]
    ((reply, _),) = broker.submit(ListTopics(), gate=gate)
    assert isinstance(reply, Refusal)
    assert reply.code == "unauthenticated"
    assert broker.code("root", CreateTopic("new")) == "ok"
    assert broker.code("anna", CreateTopic("newer")) == "unauthenticated"
    assert not broker.engine.authority.may(gate.caller, "read", "topic", "t")


def test_the_owner_is_not_asked(broker: GuardedBroker) -> None:
    broker.users(ROOT)
    ((reply, _),) = broker.submit(CreateTopic("new"), gate=OpenGate(OWNER))
    assert isinstance(reply, TopicInfo)
    assert isinstance(broker.ask(DescribeTopic("new")), TopicInfo)


def test_nothing_is_allowed_to_a_user_without_rules(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    assert broker.send("anna") == "denied"
    assert broker.code("anna", Fetch("t", [(0, 0)])) == "denied"
    number = broker.allow("user:anna", "publish", "topic", "t")
    assert broker.send("anna") == "ok"
    assert broker.send("anna", "u") == "denied"
    broker.take_back(number)
    assert broker.send("anna") == "denied"
    assert broker.values() == [b"x"]


def test_a_refusal_says_the_same_of_topics_that_are_not_there(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    for name in ("t", "x"):
        reply = broker.tell("anna", DescribeTopic(name))
        assert reply.code == "denied"
        assert reply.message.replace(f"'{name}'", "N").replace(f"topic {name}`", "topic N`") == (
            "anna may not do anything with topic N: ask an administrator for "
            "`tailrace acl add allow user:anna RIGHT topic N`, with the right that you need"
        )


def test_verdicts_are_bounded(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    for number in range(3000):
        broker.code("anna", DescribeTopic("x" * (number % 40) + str(number)))
        broker.code("anna", DescribeTopic("x" * 10_000 + str(number)))
    remembered = broker.engine.authority.remembered
    assert remembered <= 2 * VERDICTS_MAX
    assert 2000 < remembered <= 2 * 3000  # Long names are not kept.


# -------------------------------------------------------------------------------------- open connections


def test_a_fetch_that_waits_is_refused_when_the_right_goes(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"), User(name="ben"))
    number = broker.allow("user:anna", "read", "topic", "t")
    broker.allow("user:ben", "read", "topic", "*")
    anna, ben = (broker.begin(name, Fetch("t", [(0, 0)], 1000, 10_000)) for name in ("anna", "ben"))
    broker.allow("everyone", "publish", "topic", "u")  # Nothing that concerns them.
    assert not anna
    assert not ben
    broker.take_back(number)
    ((reply, _),) = anna
    assert isinstance(reply, Refusal)
    assert reply.code == "denied"
    assert not ben
    broker.publish(b"hello")
    ((reply, _),) = ben
    assert isinstance(reply, Fetched)


def test_a_lease_that_waits_is_refused_and_takes_nothing(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"), User(name="ben"))
    for user in ("anna", "ben"):
        broker.allow(f"user:{user}", "consume", "group", "g")
    number = broker.allow("user:anna", "consume", "topic", "t")
    broker.allow("user:ben", "consume", "topic", "t")
    generations = {}
    for user in ("anna", "ben"):
        request = JoinGroup("g", user, ["t"], {"assignment": "shared", "session_ms": 3_600_000})
        reply = broker.tell(user, request)
        assert isinstance(reply, Membership), reply
        generations[user] = 0
    broker.settle()
    generation = broker.runtime().state.queues.grant("g")
    assert generation is not None
    ask = {user: Lease("t", "g", user, [(0, generation[1])], wait_ms=60_000) for user in ("anna", "ben")}
    anna = broker.begin("anna", ask["anna"])
    ben = broker.begin("ben", ask["ben"])
    assert not anna
    assert not ben
    broker.take_back(number)
    ((reply, _),) = anna
    assert isinstance(reply, Refusal)
    assert reply.code == "denied"
    broker.publish(b"hello")
    broker.pass_s(0.1)
    ((reply, _),) = ben
    assert isinstance(reply, Leases)
    assert len(reply.grants) == 1


def test_a_heartbeat_that_waits_is_refused(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    broker.allow("user:anna", "consume", "topic", "t")
    number = broker.allow("user:anna", "consume", "group", "g")
    reply = broker.tell("anna", JoinGroup("g", "anna", ["t"]))
    assert isinstance(reply, Membership)
    waiting = broker.begin("anna", Heartbeat("g", "anna", reply.version, wait_ms=20_000))
    assert not waiting
    broker.take_back(number)
    ((refused, _),) = waiting
    assert isinstance(refused, Refusal)
    assert refused.code == "denied"
    broker.pass_s(30)
    assert len(waiting) == 1


USERS = st.sampled_from(["anna", "acme/eva"])
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), USERS, st.sampled_from(["t", "u", "acme/t"])),
        st.tuples(
            st.sampled_from(["allow", "allow", "deny"]),
            st.sampled_from(["everyone", "user:anna", "user:acme/eva", "team:shop"]),
            st.sampled_from(["t", "*", "acme/*", "u*"]),
        ),
        st.tuples(st.just("take back"), st.integers(0, 5), st.none()),
        st.tuples(st.just("promote"), USERS, st.booleans()),
        st.tuples(st.just("remove"), USERS, st.none()),
    ),
    max_size=25,
)


@given(CHANGES)
def test_whatever_changes_only_those_wait_who_may(changes: list[Any]) -> None:
    """After each change, a request waits if and only if its caller may still make it."""
    broker = GuardedBroker()
    for topic in ("t", "u", "acme/t"):
        broker.create(topic)
    broker.users(ROOT, User(name="anna", teams=("shop",)), User(name="acme/eva"))
    waiting: list[tuple[str, str, list[Any]]] = []
    for what, one, other in changes:
        identities = broker.engine.authority.identities
        if what == "wait":
            waiting.append((one, other, broker.begin(one, Fetch(other, [(0, 0)], 1000, 60_000))))
        elif what == "take back":
            broker.take_back(one)
        elif what == "remove":
            if one in identities.users:
                broker.remove_user(one)
        elif what == "promote":
            broker.users(User(name=one, administrator=other, teams=("shop",)))
        else:
            broker.allow(one, "read", "topic", other, what)
        identities = broker.engine.authority.identities
        for user, topic, answers in waiting:
            if oracle(identities, user, "read", "topic", topic):
                assert not answers
            else:
                ((reply, _),) = answers
                assert isinstance(reply, Refusal)
                assert reply.code == ("denied" if user in identities.users else "unauthenticated")
        waiting = [each for each in waiting if not each[2]]


# ------------------------------------------------------------------------------------------------ listings


def test_listings_show_what_one_may_see(broker: GuardedBroker) -> None:
    broker.create("acme/t")
    for group, names in (("g", ["t", "u"]), ("h", ["u"]), ("acme/g", ["acme/t"])):
        broker.ask(CreateGroup(group, names))
    broker.users(ROOT, User(name="anna"), User(name="acme/eva"), User(name="acme/root", administrator=True))
    broker.allow("user:anna", "publish", "topic", "t")
    broker.allow("user:anna", "settle", "group", "g")
    broker.allow("everyone", "read", "topic", "acme/*")

    def topics(user: str) -> list[str]:
        return [info.name for info in broker.tell(user, ListTopics(internal=True)).topics]

    def groups(user: str) -> list[str]:
        return [info.group for info in broker.tell(user, ListGroups()).groups]

    assert topics("anna") == ["acme/t", "t"]
    assert topics("acme/eva") == ["acme/t"]
    assert topics("acme/root") == ["acme/t"]
    assert topics("root") == ["_groups", "acme/t", "t", "u"]
    assert groups("anna") == ["g"]
    assert groups("acme/eva") == []
    assert groups("acme/root") == ["acme/g"]
    assert groups("root") == ["acme/g", "g", "h"]
    info = broker.tell("anna", DescribeGroup("g"))
    assert info.topics == ["t"]
    assert {row["topic"] for row in info.partitions} == {"t"}
    assert broker.code("anna", DescribeGroup("h")) == "denied"


# ----------------------------------------------------------------------------------------------- schedules


def every_minute(name: str = "s", topic: str = "t", **fields: Any) -> PutSchedule:
    return PutSchedule(name, topic, "* * * * *", value=b"tick", **fields)


def test_a_schedule_publishes_with_the_rights_of_who_made_it(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    number = broker.allow("user:anna", "publish", "topic", "t")
    assert broker.code("anna", every_minute(owner="root")) == "ok"
    (row,) = broker.tell("root", ListSchedules()).schedules
    assert row["owner"] == "anna"  # Whatever the request said.
    broker.pass_s(61)
    assert broker.values() == [b"tick"]
    broker.take_back(number)
    broker.pass_s(180)
    assert broker.values() == [b"tick"]
    broker.allow("user:anna", "publish", "topic", "t")
    broker.pass_s(61)
    assert broker.values() == [b"tick", b"tick"]


def test_the_owner_of_a_schedule_survives_a_restart(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    broker.allow("user:anna", "publish", "topic", "t")
    assert broker.code("anna", every_minute()) == "ok"
    identities = broker.engine.authority.identities
    broker.restart()
    broker.engine.authority.put(msgspec.structs.replace(identities, users={"root": ROOT}))
    before = broker.values()
    broker.pass_s(200)
    assert broker.values() == before
    broker.engine.authority.put(identities)
    broker.pass_s(61)
    assert broker.values() == [*before, b"tick"]


def test_a_schedule_from_before_there_were_users_is_the_brokers_own(broker: GuardedBroker) -> None:
    broker.submit(every_minute(), gate=OpenGate(Caller("", "open")))
    broker.users(ROOT, User(name="anna"))
    broker.pass_s(61)
    assert broker.values() == [b"tick"]
    broker.allow("user:anna", "publish", "topic", "u")
    assert broker.code("anna", every_minute(topic="u")) == "denied"


def test_pausing_leaves_a_schedule_its_owner(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    broker.allow("user:anna", "publish", "topic", "t")
    assert broker.code("anna", every_minute()) == "ok"
    for put, owner in (
        (every_minute(paused=True), "anna"),
        (every_minute(), "anna"),
        (every_minute(priority=1, paused=True), "root"),
        (every_minute(priority=1, paused=True), "root"),
    ):
        assert broker.code("root", put) == "ok"
        (row,) = broker.tell("root", ListSchedules()).schedules
        assert (row["owner"], row["paused"]) == (owner, put.paused)


def test_schedules_of_others_are_hidden(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"), User(name="ben"))
    broker.allow("user:anna", "publish", "topic", "t")
    broker.allow("user:ben", "publish", "topic", "u")
    assert broker.code("anna", every_minute()) == "ok"
    assert broker.tell("ben", ListSchedules()).schedules == []
    told = [broker.tell("ben", DeleteSchedule(name)) for name in ("s", "x")]
    assert [reply.code for reply in told] == ["denied", "denied"]
    assert told[0].message.replace("'s'", "'x'") == told[1].message
    replaced = broker.tell("ben", every_minute(topic="u"))
    assert replaced.code == "denied"
    assert "'t'" not in replaced.message
    broker.allow("user:ben", "publish", "topic", "t")
    assert broker.code("ben", every_minute(topic="u")) == "ok"
    (row,) = broker.tell("root", ListSchedules()).schedules
    assert row["owner"] == "ben"
    assert broker.code("anna", DeleteSchedule("s")) == "denied"
    assert broker.code("ben", DeleteSchedule("s")) == "ok"


# ------------------------------------------------------------------------------------------- staged writes


def test_a_writer_belongs_to_those_who_may_write_where_it_wrote(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"), User(name="ben"), User(name="acme/eva"))
    broker.allow("user:anna", "publish", "topic", "t")
    broker.allow("user:ben", "publish", "topic", "u")
    columns, body = arrow.encode([b"x"], ids=bytes(16), timestamps=broker.clock.now_us(), dedup_ids=None)
    staged = StageRows("t", 0, "w", "a", columns, crc32c(body))
    assert broker.code("ben", staged, body) == "denied"
    assert broker.code("anna", staged, body) == "ok"
    assert broker.code("ben", DecideStaged("w", 1, [("t", 0, "a")])) == "denied"
    assert broker.code("ben", AbortStaged("w", [("t", 0, "a")])) == "denied"
    assert isinstance(broker.tell("anna", DecideStaged("w", 1, [("t", 0, "a")])), StagedDecision)
    assert broker.values() == [b"x"]
    assert broker.code("ben", DecideStaged("w", 1, [], attempt="b")) == "denied"  # Or it would see it.
    assert broker.code("ben", DecideStaged("w", 2, [], attempt="b")) == "denied"
    assert broker.code("anna", DecideStaged("w", 3, [], attempt="b")) == "ok"
    assert broker.code("acme/eva", DecideStaged("w", 2, [], attempt="b")) == "denied"
    broker.allow("everyone", "publish", "topic", "acme/*")
    assert broker.code("acme/eva", DecideStaged("w2", 2, [], attempt="b")) == "denied"
    assert broker.code("acme/eva", DecideStaged("acme/w", 2, [], attempt="b")) == "ok"


def test_explain_names_the_rule(broker: GuardedBroker) -> None:
    broker.users(ROOT, User(name="anna"))
    number = broker.allow("user:anna", "publish", "topic", "t")
    right: Right = "publish"
    verdict = broker.engine.authority.explain("anna", right, "topic", "t")
    assert verdict.allowed
    assert verdict.rule == number
    assert broker.engine.authority.identities != Identities()


def test_who_may_only_make_sure_of_a_topic_does_not_make_it_behind_its_deletion() -> None:
    broker = GuardedBroker()
    broker.users(ROOT, User(name="anna"))
    broker.allow("user:anna", "read", "topic", "t")
    broker.create("t")
    broker.threads.holding = True
    deleted = broker.begin("root", DeleteTopic("t"))
    (answer,) = broker.begin("anna", CreateTopic("t", {"partitions": 3}, if_missing=True))
    assert isinstance(answer[0], TopicInfo), "it is still there"
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert len(deleted) == 1
    assert "t" not in broker.engine.topics.catalog.topics
    assert broker.code("anna", CreateTopic("t", if_missing=True)) == "denied"


def test_a_heartbeat_for_another_member_tells_no_topics_that_one_may_not_see() -> None:
    broker = GuardedBroker()
    broker.users(ROOT, User(name="anna"), User(name="eve"))
    broker.allow("user:anna", "consume", "topic", "secret")
    broker.allow("everyone", "consume", "group", "g")
    broker.create("secret")
    joined = broker.tell("anna", JoinGroup("g", "a", ["secret"]))
    assert isinstance(joined, Membership)
    assert broker.tell("anna", Heartbeat("g", "a")) == joined
    seen = broker.tell("eve", Heartbeat("g", "a"))
    assert seen == msgspec.structs.replace(joined, owned=[])
