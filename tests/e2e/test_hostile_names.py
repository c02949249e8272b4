"""Names that are paths, tricks or too long: every verb that takes one refuses it, and no file is made."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.core.model import access_commands as access
from tailrace.core.model import commands as topics
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as queues
from tailrace.core.model.identifiers import Refusal
from tests.e2e.broker_process import BrokerProcess, eventually
from tests.e2e.doors import Door, Session
from tests.e2e.raw_client import publish

pytestmark = pytest.mark.xdist_group("names")  # one broker for all of its tests
HOSTILE = [
    "",
    ".",
    "..",
    "../../escaped",
    "a/../../escaped",
    "a/./b",
    "/etc/passwd",
    "a//b",
    "a/",
    "a\x00b",
    "a\nb",
    "a\r\nSet-Cookie: b",
    "\x1b[31mred",
    "a b",
    "a,b",
    "a~1",
    "a\\b",
    "%2e%2e%2f",
    "$(touch escaped)",
    "`touch escaped`",
    "{0.__class__}",
    "naïve",
    "ａｂ",
    "\u202egnp.exe",
    "a\u200bb",
    "x" * 256,
    "x" * 100_000,
    "ä" * 255,
]
CODES = {"invalid_request", "not_found", "too_large"}

Make = Callable[[str], Any]
MAKERS: dict[str, Make] = {
    "CreateTopic": lambda name: topics.CreateTopic(name, {"partitions": 1}),
    "CreateGroup": lambda name: groups.CreateGroup(name, ["good"]),
    "JoinGroup": lambda name: groups.JoinGroup(name, "m", ["good"]),
    "PutSchedule": lambda name: groups.PutSchedule(name, "good", "0 0 1 1 *", value=b"x"),
    "AddUser": lambda name: access.AddUser(name, "a password of some words"),
    "AddTenant": lambda name: access.AddTenant(name),
    "AddRule": lambda name: access.AddRule("allow", f"user:{name}", ["read"], "topic", "good"),
    "PutQuota": lambda name: access.PutQuota(f"user:{name}", connections_max=1),
}
"""Verbs that make something of a new name."""
FINDERS: dict[str, Make] = {
    "DescribeTopic": topics.DescribeTopic,
    "DeleteTopic": topics.DeleteTopic,
    "Fetch": lambda name: topics.Fetch(name, [(0, 0)]),
    "Publish": lambda name: publish(name, [b"x"]),
    "Trace": lambda name: queues.Trace(name, 0, 0),
    "DescribeGroup": groups.DescribeGroup,
    "DeleteGroup": groups.DeleteGroup,
    "DeleteSchedule": groups.DeleteSchedule,
    "RemoveUser": access.RemoveUser,
    "RemoveTenant": access.RemoveTenant,
    "RevokeToken": access.RevokeToken,
}
"""Verbs that look for something by its name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("names")
    (made / "inner").mkdir()
    return made


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    with BrokerProcess(folder / "inner" / "data").start() as broker:
        with Door(name="native", address=broker.address).enter() as session:
            session.do(topics.CreateTopic("good", {"partitions": 1}))
            yield session
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


def files(folder: Path) -> set[str]:
    """Everything but what lies in the data folder."""
    data = folder / "inner" / "data"
    return {str(path) for path in folder.rglob("*") if data not in path.parents}


@pytest.mark.parametrize("verb", [*MAKERS, *FINDERS])
def test_hostile_names_are_refused(session: Session, folder: Path, verb: str) -> None:
    before = files(folder)
    for name in HOSTILE:
        made = {**MAKERS, **FINDERS}[verb](name)
        request, body = made if isinstance(made, tuple) else (made, b"")
        reply = session.ask(request, body)
        assert isinstance(reply, Refusal), (verb, name[:40], reply)
        assert reply.code in CODES, (verb, name[:40], reply)
        assert len(repr(reply)) < 3000, "a refusal repeats no more of a name than people can read"
    assert files(folder) == before


def test_the_longest_names_and_their_dead_letters_fit_into_the_file_system(session: Session) -> None:
    longest = next(length for length in itertools.count(300, -1) if made(session, "y" * length))
    assert 200 <= longest <= 255
    assert not made(session, "z" * (longest + 1))
    with_slashes = "/".join("ab" for _ in range(longest // 3))
    assert made(session, with_slashes)
    session.do(*publish("y" * longest, [b"x"]))
    die(session, "y" * longest)


def made(session: Session, name: str) -> bool:
    """Whether a topic of this name can be made."""
    return not isinstance(session.ask(topics.CreateTopic(name, {"partitions": 1})), Refusal)


def die(session: Session, topic: str) -> None:
    """A message of a topic becomes a dead letter, which needs a topic of its own."""
    joined = session.do(groups.JoinGroup("killers", "m", [topic]))
    places = [(partition, generation) for _, partition, generation in joined.owned]
    (grant,) = session.do(queues.Lease(topic, "killers", "m", places, wait_ms=10_000)).grants
    session.do(queues.RejectMessages(topic, 0, "killers", grant.lease, [0, 1]))
    buried = topics.DescribeTopic(f"{topic}.dlq")
    eventually(lambda: not isinstance(session.ask(buried), Refusal), "the dead letter has its topic")


def test_names_that_differ_by_case_only_are_different_topics(session: Session) -> None:
    for name, value in (("Case", b"upper"), ("case", b"lower")):
        session.do(topics.CreateTopic(name, {"partitions": 1}))
        session.do(*publish(name, [value]))
    bodies = [session.ask_for(topics.Fetch(name, [(0, 0)]))[1] for name in ("Case", "case")]
    assert b"upper" in bodies[0]
    assert b"lower" not in bodies[0]
    assert b"lower" in bodies[1]
    session.do(topics.DeleteTopic("Case"))
    assert b"lower" in session.ask_for(topics.Fetch("case", [(0, 0)]))[1]
