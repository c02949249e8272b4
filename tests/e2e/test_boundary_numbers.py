"""Every number of every request at the edges of what numbers can be: each is answered or refused, none fails.

The requests are those of the access matrix. One number after the other, also those in lists, is exchanged for
each of `EDGES`, and sent to a broker as its owner would; options of topics and groups get them, too.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.core.model import group_options, topic_options
from tailrace.core.model.access_commands import AddUser
from tailrace.core.model.commands import CreateTopic, DescribeTopic
from tailrace.core.model.group_commands import CreateGroup
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.wire import Credentials, prefix
from tests.e2e.access_rows import GROUP, OTHER_USER, PASSWORD, ROWS, TOPIC
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.doors import Door, Session

pytestmark = pytest.mark.xdist_group("numbers")  # one broker for all of its tests

EDGES = (
    -(2**63),
    -(2**31) - 1,
    -2,
    -1,
    0,
    1,
    2**31 - 1,
    2**31,
    2**53,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    0.5,
    float("nan"),
    float("inf"),
    True,
)
LONG_POLLS = {"wait_ms"}
"""Numbers that, when they are large, rightly mean: answer much later."""
GROWTH_MB = 100.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder: Path = tmp_path_factory.mktemp("numbers")
    with BrokerProcess(folder / "data").start() as broker:
        yield broker
        assert broker.running
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


@pytest.fixture(scope="module")
def session(broker: BrokerProcess) -> Iterator[Session]:
    door = Door(name="native", address=broker.address)
    with door.enter() as somebody:
        somebody.do(AddUser("root", PASSWORD))
    with door.enter(Credentials("root", PASSWORD)) as session:
        session.do(AddUser(OTHER_USER))
        session.do(CreateTopic(TOPIC, {"partitions": 1, "key_index": True}))
        session.do(CreateGroup(GROUP, [TOPIC]))
        yield session


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers of a request are."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from places(inner, (*path, number))


def exchanged(value: Any, path: tuple[Any, ...], number: Any) -> Any:
    """The same with another number in one place."""
    found = copy.deepcopy(value)
    at = found
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = number
    return found


def lists(value: Any) -> Any:
    """Tuples as lists, so that they can be changed."""
    if isinstance(value, dict):
        return {key: lists(inner) for key, inner in value.items()}
    return [lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def sane(session: Session, header: bytes, body: bytes, what: Any) -> None:
    """The answer is one that somebody thought of."""
    session.write(prefix(header, len(body), 1) + body)
    _, reply = session.reply()
    if isinstance(reply, Refusal):
        assert reply.code != "error", (what, reply)
        assert "Traceback" not in reply.message, (what, reply)


def test_numbers_of_requests(session: Session, broker: BrokerProcess) -> None:
    before_mb, sent = broker.anonymous_mb(), 0
    for number, row in enumerate(ROWS, 1000):
        request, body = row.request(session, number)
        fields = request.__struct_fields__
        raw = lists(msgspec.to_builtins(request, builtin_types=(bytes,)))
        for path in places(raw):
            for edge in EDGES:
                if fields[path[0] - 1] in LONG_POLLS and isinstance(edge, int) and edge > 0:
                    continue
                changed = exchanged(raw, path, edge)
                sane(session, msgspec.msgpack.encode(changed), bytes(body), changed)
                sent += 1
    assert sent > 1000
    assert broker.anonymous_mb() - before_mb < GROWTH_MB
    assert not isinstance(session.ask(DescribeTopic(TOPIC)), Refusal)


@pytest.mark.parametrize("option", sorted(topic_options.RANGES))
def test_options_of_topics(session: Session, option: str) -> None:
    low, high = topic_options.RANGES[option]
    for number, edge in enumerate((*EDGES, low - 1, high + 1)):
        if isinstance(edge, int) and not isinstance(edge, bool) and low <= edge <= high:
            continue  # It would be made, with thousands of partitions perhaps.
        reply = session.ask(CreateTopic(f"{option}-{number}", {option: edge}))
        assert isinstance(reply, Refusal), (option, edge, reply)
        assert reply.code == "invalid_request", (option, edge, reply)
        assert option in reply.message


@pytest.mark.parametrize("option", sorted(group_options.RANGES))
def test_options_of_groups(session: Session, option: str) -> None:
    low, high = group_options.RANGES[option]
    for number, edge in enumerate((*EDGES, low - 1, high + 1)):
        if isinstance(edge, int) and not isinstance(edge, bool) and low <= edge <= high:
            continue
        header = codec.encode_request(CreateGroup(f"{option}-{number}", [TOPIC], {option: edge}))
        session.write(prefix(header, 0, 1))
        _, reply = session.reply()
        assert isinstance(reply, Refusal), (option, edge, reply)
        assert reply.code == "invalid_request", (option, edge, reply)


TEXTS = ("", "\x00", "\n", "..", "_groups", "_", "x" * 70_000, "ä" * 300, "\ud7ff", "{}", "%s", "orders.dlq")
BYTES = (b"", b"\x00", b"\xff" * 16, b"x" * 70_000)
COUNTS = (0, 2, 3_000)
"""How many times a list holds its first element."""


def variants(value: Any) -> Iterator[Any]:
    """The same with one text, one run of bytes or one list of it exchanged."""
    if isinstance(value, str):
        yield from TEXTS
    elif isinstance(value, bytes):
        yield from BYTES
    elif isinstance(value, dict):
        yield from ({**value, key: other} for key, inner in value.items() for other in variants(inner))
        yield {f"key-{number}": number for number in range(300)}
    elif isinstance(value, list):
        yield from (value[:1] * count for count in COUNTS)
        for number, inner in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in variants(inner))


def test_texts_and_lists_of_requests(session: Session, broker: BrokerProcess) -> None:
    before_mb, sent = broker.anonymous_mb(), 0
    for number, row in enumerate(ROWS, 5000):
        request, body = row.request(session, number)
        raw = lists(msgspec.to_builtins(request, builtin_types=(bytes,)))
        for place in range(1, len(raw)):
            for other in variants(raw[place]):
                changed = [*raw[:place], other, *raw[place + 1 :]]
                sane(session, msgspec.msgpack.encode(changed), bytes(body), repr(changed)[:300])
                sent += 1
    assert sent > 1500
    assert broker.anonymous_mb() - before_mb < GROWTH_MB
    assert not isinstance(session.ask(DescribeTopic(TOPIC)), Refusal)
