"""Nobody gets a message of a topic that it may not read, by whatever verb it asks.

A spy has every right on topics and groups of its own and none on `secret`. Whatever it sends, no byte that
the broker answers holds the value, the key or the header of a secret message. Nor does one who could read get
what comes after the right was taken away.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.core.model import access_commands as access
from tailrace.core.model import commands as topics
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as queues
from tailrace.core.model.access_commands import AddRule, AddUser, CreateToken, RemoveRule
from tailrace.core.model.commands import CreateTopic, Fetch, Publish
from tailrace.core.model.group_commands import CreateGroup, JoinGroup, PutSchedule
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Lease
from tailrace.format import batch, codec
from tailrace.format.frame import crc32c
from tailrace.format.wire import Credentials
from tests.e2e.access_rows import EVERY_RIGHT, PASSWORD
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.doors import Door, Session
from tests.e2e.raw_client import publish

pytestmark = pytest.mark.xdist_group("side-doors")  # one broker for all of its tests
MARK = b"the-secret-of-the-house"
NAME = "classified-name"
"""Occurs in names that the spy may not learn either."""
SECRET, LETTERS, GROUP = "secret", "secret.dlq", f"readers-{NAME}"
WAIT_MS = 15_000


class House(msgspec.Struct, frozen=True):
    """A broker with a secret, its owner and a spy."""

    door: Door
    root: str
    spy: str

    def enter(self, token: str) -> Session:
        """A session of one of them."""
        return self.door.enter(Credentials(token=token))


def message(topic: str) -> tuple[Publish, bytes]:
    """A secret in the value, in the key and in a header."""
    columns, body = batch.encode(
        [MARK],
        ids=batch.make_ids(1, 10**12, 7, 1),
        timestamps=10**15,
        keys=[b"key-" + MARK],
        headers=[[("header", MARK)]],
    )
    return Publish(topic, 0, columns, crc32c(body)), bytes(body)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder: Path = tmp_path_factory.mktemp("house")
    with BrokerProcess(folder / "data").start() as broker:
        door = Door(name="native", address=broker.address)
        with door.enter() as somebody:
            somebody.do(AddUser("root", PASSWORD))
        with door.enter(Credentials("root", PASSWORD)) as root:
            for name in (SECRET, "own"):
                root.do(CreateTopic(name, {"partitions": 1, "key_index": True}))
            root.do(*message(SECRET))
            root.do(CreateGroup(GROUP, [SECRET]))
            die(root)
            root.do(PutSchedule(f"tick-{NAME}", SECRET, "0 0 1 1 *", value=MARK))
            request, body = message(SECRET)
            staged = queues.StageRows(SECRET, 0, f"writer-{NAME}", "won", request.columns, request.crc)
            root.do(staged, body)
            root.do(queues.DecideStaged(f"writer-{NAME}", 1, [(SECRET, 0, "won")]))
            root.do(AddUser("spy", PASSWORD))
            for right, resource in EVERY_RIGHT[:8]:
                root.do(AddRule("allow", "user:spy", [right], resource, "own*"))
            tokens = [root.do(CreateToken("test", user)).secret for user in ("root", "spy")]
        yield House(door, *tokens)


def die(root: Session) -> None:
    """Let a secret message become a dead letter."""
    joined = root.do(JoinGroup(GROUP, "m", [SECRET]))
    places = [(partition, generation) for _, partition, generation in joined.owned]
    leases = root.do(Lease(SECRET, GROUP, "m", places, count_max=1, wait_ms=WAIT_MS))
    (grant,) = leases.grants
    offset = grant.runs[0][0]
    root.do(queues.RejectMessages(SECRET, 0, GROUP, grant.lease, [offset, offset + 1], error=MARK.decode()))
    root.do(groups.LeaveGroup(GROUP, "m"))
    deadline = time.monotonic() + WAIT_MS / 1000
    while isinstance(root.ask(topics.DescribeTopic(LETTERS)), Refusal):
        assert time.monotonic() < deadline, "there is no dead letter"
    root.do(Fetch(LETTERS, [(0, 0)], wait_ms=WAIT_MS))


def attempts() -> list[Any]:
    """Every way to ask for a secret that comes to mind; (request, body) where there is a body."""
    found: list[Any] = []
    for topic in (SECRET, LETTERS, f"{LETTERS}.dlq", "_groups", "_groups.dlq"):
        found += [
            topics.DescribeTopic(topic),
            Fetch(topic, [(0, 0)]),
            Fetch(topic, [(0, 0)], wait_ms=50),
            topics.FindOffsets(topic, topics.EARLIEST),
            topics.ReadKey(topic, 0, b"key-" + MARK),
            topics.TrimTopic(topic, 0, 0),
            topics.AlterTopic(topic, {"retention_ms": 1}),
            topics.CreateTopic(topic, {}, True),
            topics.DeleteTopic(topic),
            topics.ClaimProducer(topic, 0, 1),
            queues.Trace(topic, 0, 0),
            queues.Trace(topic, key=b"key-" + MARK),
            queues.ReadFacts(topic, 0),
            queues.ListScheduled(topic),
            queues.CancelScheduled(topic, 0, [b"0" * 16]),
            queues.Committed(topic, "own-group"),
            queues.Committed(topic, GROUP),
            publish(topic, [b"x"]),
        ]
        for group in ("own-group", GROUP, "_redrive"):
            found += [
                groups.CreateGroup(group, [topic]),
                groups.CreateGroup(group, ["own", topic], {}, True),
                groups.JoinGroup(group, "m", [topic]),
                groups.JoinGroup(group, "m", ["own", topic]),
                groups.ResetGroup(group, topic, dry_run=True),
                Lease(topic, group, "m", [(0, 1)]),
                Lease(topic, group, "m", [(0, 0)], held=[]),
                queues.FindUnsettled(topic, 0, group),
                queues.HoldOffsets(topic, 0, group, "m", [0, 1]),
                queues.SettleOffsets(topic, 0, group, [0, 1]),
                queues.Reopen(topic, 0, group, [0, 1]),
                queues.Ack(topic, 0, group, [(1, [0, 1])]),
                queues.Nack(topic, 0, group, 1, [0, 1]),
                queues.GiveBack(topic, 0, group, [(1, [0, 1])]),
                queues.RejectMessages(topic, 0, group, 1, [0, 1]),
                queues.Extend(topic, 0, group, [1], 1000),
                queues.Commit(topic, group, "m", [(0, 1, 1)]),
            ]
        found += [
            groups.PutSchedule("own-schedule", topic, "* * * * *", value=b"x"),
            queues.DecideStaged("own-writer", 1, [(topic, 0, "a")]),
            queues.AbortStaged("own-writer", [(topic, 0, "a")]),
            queues.AbortStaged("own-writer", [], [("a", topic, [0])]),
        ]
    return [
        *found,
        groups.DescribeGroup(GROUP),
        groups.PauseGroup(GROUP, True),
        groups.AlterGroup(GROUP, {"max_attempts": 1}),
        groups.DeleteGroup(GROUP),
        groups.Heartbeat(GROUP, "m"),
        groups.LeaveGroup(GROUP, "m"),
        groups.DeleteSchedule(f"tick-{NAME}"),
        groups.PutSchedule(f"tick-{NAME}", "own", "* * * * *", value=b"x"),
        queues.DecideStaged(f"writer-{NAME}", 1, [("own", 0, "a")]),
        queues.DecideStaged(f"writer-{NAME}", 2, []),
        queues.AbortStaged(f"writer-{NAME}", [("own", 0, "a")]),
        access.ListUsers(),
        access.ListRules(),
        access.ListTokens("root"),
        access.CreateToken("mine", "root"),
        access.CheckAccess("read", "topic", SECRET, "root"),
        access.AddRule("allow", "user:spy", ["read"], "topic", SECRET),
        access.AlterUser("spy", administrator=True),
        access.AlterUser("spy", teams=["owners"]),
        access.AlterUser("root", PASSWORD),
    ]


LISTINGS = [
    topics.ListTopics(),
    topics.ListTopics(internal=True),
    topics.ListTopics(prefix="secret"),
    groups.ListGroups(),
    groups.ListGroups(topic=SECRET),
    groups.ListSchedules(),
    access.ListTokens(),
]


def test_the_secret_is_there(house: House) -> None:
    """What the spy must not get can be had."""
    with house.enter(house.root) as root:
        for topic in (SECRET, LETTERS):
            reply, body = root.ask_for(Fetch(topic, [(0, 0)]))
            assert not isinstance(reply, Refusal)
            assert MARK in body
        assert NAME in repr(root.do(groups.ListGroups()))
        assert MARK in repr(root.do(groups.ListSchedules())).encode()


def test_no_verb_delivers_it(house: House) -> None:
    with house.enter(house.spy) as spy:
        for made in attempts():
            request, body = made if isinstance(made, tuple) else (made, b"")
            spy.post(request, body)
            _, header, rest = spy.message()
            reply = codec.decode_reply(header)
            assert isinstance(reply, Refusal), (request, reply)
            assert reply.code == "denied", (request, reply)
            assert rest == b"", request
            assert MARK not in header, request
            # A refusal repeats what was asked, and nothing else.
            assert NAME.encode() not in header or NAME in repr(request), (request, reply)


def test_listings_leave_it_out(house: House) -> None:
    with house.enter(house.spy) as spy:
        for request in LISTINGS:
            spy.post(request)
            _, header, rest = spy.message()
            assert MARK not in header + rest, request
            assert NAME.encode() not in header, request
            assert b"secret" not in header.replace(b"secret_", b""), request


def test_refusals_are_the_same_whether_there_is_something_or_not(house: House) -> None:
    """Nothing can be guessed from the words."""
    with house.enter(house.spy) as spy:
        for there, missing in (
            (topics.DescribeTopic(SECRET), topics.DescribeTopic("zecret")),
            (Fetch(SECRET, [(0, 0)]), Fetch("zecret", [(0, 0)])),
            (groups.DescribeGroup(GROUP), groups.DescribeGroup(GROUP.replace("readers", "zeaders"))),
            (
                groups.DeleteSchedule(f"tick-{NAME}"),
                groups.DeleteSchedule(f"tock-{NAME}"),
            ),
            (access.ListTokens("root"), access.ListTokens("toor")),
            (access.RevokeToken("0" * 16), access.RevokeToken("1" * 16)),
        ):
            words = []
            for request in (there, missing):
                reply = spy.ask(request)
                assert isinstance(reply, Refusal)
                text = repr(reply)
                for one, other in (
                    ("zecret", SECRET),
                    ("zeaders", "readers"),
                    ("tock", "tick"),
                    ("toor", "root"),
                ):
                    text = text.replace(one, other)
                words.append(text.replace("1" * 16, "0" * 16))
            assert words[0] == words[1]


def test_a_right_that_is_taken_ends_what_waits(house: House) -> None:
    """A long poll of a reader, and one of a consumer, get nothing that came after the rule was gone."""
    with house.enter(house.root) as root:
        root.do(CreateTopic("own-lent", {"partitions": 1}))
        root.do(AddUser("borrower", PASSWORD))
        rules = [
            root.do(AddRule("allow", "user:borrower", ["read", "consume", "settle"], "topic", "own-lent")),
            root.do(AddRule("allow", "user:borrower", ["consume", "settle"], "group", "own*")),
        ]
        token = root.do(CreateToken("test", "borrower")).secret
        with house.enter(token) as reader, house.enter(token) as consumer:
            joined = consumer.do(JoinGroup("own-borrowers", "m", ["own-lent"]))
            places = [(partition, generation) for _, partition, generation in joined.owned]
            reader.do(Fetch("own-lent", [(0, 0)]))
            reader.post(Fetch("own-lent", [(0, 0)], wait_ms=WAIT_MS))
            consumer.post(Lease("own-lent", "own-borrowers", "m", places, wait_ms=WAIT_MS))
            for rule in rules:
                root.do(RemoveRule(rule.rules[0]["id"]))
            root.do(*message("own-lent"))
            for session in (reader, consumer):
                _, header, body = session.message()
                reply = codec.decode_reply(header)
                assert isinstance(reply, Refusal), reply
                assert reply.code == "denied"
                assert MARK not in header + body
                # The connection stays, for what it still may.
                assert not isinstance(session.ask(access.WhoAmI()), Refusal)
            for request in (Fetch("own-lent", [(0, 0)]), Lease("own-lent", "own-borrowers", "m", places)):
                reply = consumer.ask(request)
                assert isinstance(reply, Refusal)
                assert reply.code == "denied"
