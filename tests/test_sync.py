"""The blocking wrappers: the same names as the asynchronous SDK, from any thread, without losing anything.

Covers `sync/blocking_client.py`, `sync/blocking_producer.py`, `sync/blocking_reader.py`,
`sync/blocking_wrapper.py` and `sync/portal.py`.
"""

import ast
import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tailrace
import tailrace.sync
from tailrace.errors import (
    InvalidRequest,
    NotFound,
    SequenceConflict,
    StorageFault,
    Timeout,
    TooLarge,
    Unavailable,
)
from tailrace.testing import LocalBroker

ROOT = Path(__file__).resolve().parents[1]
SRC = str(ROOT / "src")


@pytest.fixture
def client(tailrace_broker: LocalBroker) -> Iterator[tailrace.sync.Client]:
    """A blocking client on a broker with the topic `t` of one partition."""
    tailrace_broker.create_topic("t", partitions=1)
    with tailrace.sync.connect() as opened:
        yield opened


def read(client: tailrace.sync.Client, topic: str = "t") -> list[bytes | None]:
    with client.reader(topic, start="earliest", stop_at_end=True) as reader:
        return [message.value for message in reader]


# -- the same names ------------------------------------------------------------------------------------------

RENAMED = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "__await__": "result",
}
INSIDE = "the parts of the SDK offer it to each other, and no application uses it"
ITSELF = "the wrapper hands out the method of the inner bus: it only declares, and crosses no thread"
WITHOUT_WRAPPER = {
    "EventStore": "it is for coroutine functions; threads use `Producer` with `expected_key_sequence`",
    "Client.after_fork": INSIDE,
    "Client.key_pages": INSIDE,
    "Consumer.kill": INSIDE,
    "Consumer.opened": INSIDE,
    "Producer.buffer": INSIDE,
    "Producer.check": INSIDE,
    "Producer.kill": INSIDE,
    "Producer.room": INSIDE,
    "Reader.kill": INSIDE,
    "Receipt.known": INSIDE,
    "Reader.rest": INSIDE,
    "Reader.take": INSIDE,
    "StreamConsumer.kill": INSIDE,
    "StreamConsumer.opened": INSIDE,
    "Bus.command": ITSELF,
    "Bus.event": ITSELF,
    "Bus.handler": ITSELF,
    "Bus.middleware": ITSELF,
    "Bus.upcast": ITSELF,
}
"""What of the asynchronous SDK has no blocking form, and why."""


def methods(of: type) -> dict[str, Any]:
    return {
        RENAMED.get(name, name): member
        for name, member in inspect.getmembers(of, inspect.isfunction)
        if (not name.startswith("_") or name in RENAMED or name in RENAMED.values() or name == "__len__")
        and f"{of.__name__}.{name}" not in WITHOUT_WRAPPER
    }


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def is_asynchronous(kind: object) -> bool:
    return inspect.isclass(kind) and any(
        inspect.iscoroutinefunction(member) or name == "__await__"
        for name, member in inspect.getmembers(kind, inspect.isfunction)
    )


ASYNCHRONOUS = sorted(name for name in tailrace.__all__ if is_asynchronous(getattr(tailrace, name)))


def test_every_asynchronous_class_has_a_wrapper() -> None:
    assert len(ASYNCHRONOUS) >= 16
    assert [name for name in ASYNCHRONOUS if name not in WITHOUT_WRAPPER] == sorted(
        name
        for name in tailrace.sync.__all__
        if getattr(tailrace.sync, name) is not getattr(tailrace, name) and name != "connect"
    )


@pytest.mark.parametrize("name", [name for name in ASYNCHRONOUS if name not in WITHOUT_WRAPPER])
def test_wrappers_have_the_same_methods_and_parameters(name: str) -> None:
    ours, theirs = methods(getattr(tailrace.sync, name)), methods(getattr(tailrace, name))
    assert sorted(ours) == sorted(theirs)
    for method in set(ours) - {"result"}:
        assert parameters(ours[method]) == parameters(theirs[method]), method
        assert not inspect.iscoroutinefunction(ours[method])
        assert not inspect.isasyncgenfunction(ours[method])
    assert all(inspect.getdoc(member) for key, member in ours.items() if not key.startswith("__"))


def test_what_has_no_wrapper_exists_and_has_none() -> None:
    for entry in WITHOUT_WRAPPER:
        name, _, method = entry.partition(".")
        wrapper = getattr(tailrace.sync, name, None)
        assert hasattr(getattr(tailrace, name), method) if method else hasattr(tailrace, name), entry
        assert not hasattr(wrapper, method) if method else wrapper is None, entry


def test_a_method_that_only_forwards_tells_its_result_and_its_documentation() -> None:
    create = tailrace.sync.Admin.create_topic
    assert inspect.signature(create).return_annotation == "Topic"
    assert inspect.getdoc(create) == inspect.getdoc(tailrace.Admin.create_topic)
    reader = tailrace.sync.Client.reader
    assert inspect.signature(reader).return_annotation is tailrace.sync.Reader
    assert inspect.getdoc(reader) == inspect.getdoc(tailrace.Client.reader)


def test_type_checkers_see_parameters_and_results(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
from typing import assert_type
import tailrace
import tailrace.sync

def use(client: tailrace.sync.Client, consumer: tailrace.sync.Consumer) -> None:
    assert_type(client.admin().list_topics("a", internal=True), list[tailrace.Topic])
    assert_type(client.reader("t"), tailrace.sync.Reader)
    assert_type(consumer.assignment(), set[tuple[str, int]])
    with client.atomic("writer", 1) as tx:
        assert_type(tx, tailrace.sync.Atomic)
    client.admin().trim_topic("a", 0)
    client.producer("t", nam="x")
"""
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            str(program),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    found = [line.partition(": error: ")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert found == [
        "Too few arguments  [call-arg]",
        'Unexpected keyword argument "nam"; did you mean "name"?  [call-arg]',
    ], done.stdout + done.stderr


def test_sync_reads_no_private_member_of_another_object() -> None:
    found = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path in sorted((ROOT / "src" / "tailrace" / "sync").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and ast.unparse(node.value) not in ("self", "super()")
    ]
    assert found == []


def test_connect_has_the_same_parameters() -> None:
    assert parameters(tailrace.sync.connect) == parameters(tailrace.connect)


def test_sync_is_loaded_when_it_is_named() -> None:
    program = """
import sys, tailrace
assert "tailrace.sync" not in sys.modules
assert tailrace.sync.connect is not tailrace.connect
import threading
assert threading.active_count() == 1, "the loop starts with the first client"
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": SRC},
    )
    assert done.returncode == 0, done.stderr


# -- producing and reading -----------------------------------------------------------------------------------


def test_every_way_to_send(client: tailrace.sync.Client) -> None:
    with client.producer("t") as producer:
        assert producer.topic == "t"
        assert producer.publish(b"0", key=b"k", headers={"h": b"1"}).offset == 0
        receipt = producer.send(b"1", priority=1)
        many = producer.send_many([b"2", b"3"])
        table = producer.send_table(pa.table({"value": [b"4", b"5"]}))
        assert receipt.result().offset == 1
        assert receipt.result(timeout=5).offset == 1
        assert (len(many), [result.offset for result in many.result()]) == (2, [2, 3])
        assert [result.offset for result in table.result(timeout=5)] == [4, 5]
        producer.flush()
    assert read(client) == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_order_holds_between_the_ways_to_send(client: tailrace.sync.Client) -> None:
    expected = []
    with client.producer("t") as producer:
        for turn in range(50):
            for number in range(7):
                producer.send(b"s%d.%d" % (turn, number), key=b"k" if number % 2 else None)
                expected.append(b"s%d.%d" % (turn, number))
            producer.send_many([b"m%d" % turn])
            producer.publish(b"p%d" % turn)
            expected += [b"m%d" % turn, b"p%d" % turn]
    assert read(client) == expected


def test_admin_calls(client: tailrace.sync.Client) -> None:
    admin = client.admin(timeout=5)
    assert admin.create_topic("u", partitions=2).created
    assert not admin.create_topic("u", if_missing=True).created
    assert admin.alter_topic("u", retention_ms=5000).options["retention_ms"] == 5000
    assert [topic.name for topic in admin.list_topics()] == ["t", "u"]
    assert [row["partition"] for row in admin.describe_topic("u").partitions] == [0, 1]
    with client.producer("u") as producer:
        producer.send_many([b"a", b"b"], partition=0).result()
    assert admin.find_offsets("u", "latest") == [2, 0]
    admin.trim_topic("u", 0, 1)
    assert admin.find_offsets("u", "earliest") == [1, 0]
    admin.delete_topic("u")
    with pytest.raises(NotFound):
        admin.describe_topic("u")


def test_batches_seek_and_position(client: tailrace.sync.Client) -> None:
    with client.producer("t") as producer:
        for start in (0, 3):
            producer.send_many([b"%d" % number for number in range(start, start + 3)]).result()
    with client.reader("t", start="earliest", stop_at_end=True) as reader:
        assert reader.position() == {0: 0}
        assert next(reader).value == b"0"
        assert reader.position() == {0: 1}
        offsets = [batch.column("offset").to_pylist() for batch in reader.batches()]
        assert offsets == [[1, 2], [3, 4, 5]]  # the rest of the batch that was begun, then whole ones
        assert reader.position() == {0: 6}
        reader.seek(4)
        assert [message.value for message in reader] == [b"4", b"5"]
        assert next(reader, None) is None
        reader.seek({0: 5})
        assert next(reader).value == b"5"


def test_one_crossing_a_batch(client: tailrace.sync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with client.producer("t") as producer:
        producer.send_many([b"x"] * 1000).result()
    with client.reader("t", start="earliest", stop_at_end=True) as reader:
        crossings = []
        call = reader._portal.call

        def counted(start: Any) -> Any:
            crossings.append(start)
            return call(start)

        monkeypatch.setattr(reader._portal, "call", counted)
        assert len(list(reader)) == 1000
        assert len(crossings) == 2  # the batch, and that there are no more
        monkeypatch.undo()


def test_mistakes_are_raised_by_send_itself(client: tailrace.sync.Client) -> None:
    with client.producer("t") as producer:
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({"value": "text"}, "value: bytes"),
            ({"value": b"x", "key": "k"}, "key: bytes"),
            ({"value": b"x", "partition": 1}, "partition: 't' has 0 to 0"),
            ({"value": b"x", "priority": 9}, "priority: 0 to 4"),
            ({"value": b"x", "expected_sequence": -1}, "expected_sequence"),
        ]
        for fields, problem in mistakes:
            with pytest.raises(InvalidRequest, match=problem):
                producer.send(**fields)
        with pytest.raises(TooLarge, match="value"):
            producer.send(bytes(2 * 1024 * 1024))
        with pytest.raises(SequenceConflict):
            producer.publish(b"x", expected_sequence=7)
        assert producer.send(b"x", expected_sequence=1).result().sequence == 1
    assert read(client) == [b"x"]


def test_what_is_not_open_says_so(client: tailrace.sync.Client) -> None:
    with pytest.raises(Unavailable, match=r"use `with tailrace.sync.connect"):
        tailrace.sync.connect().admin()
    producer = client.producer("t")
    with pytest.raises(Unavailable, match="not open"):
        producer.send(b"x")
    with producer:
        pass
    with pytest.raises(Unavailable, match="closed"):
        producer.send(b"x")
    reader = client.reader("t")
    with reader:
        pass
    with pytest.raises(Unavailable, match="closed"):
        next(reader)
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.admin()


def test_flush_raises_what_nobody_asked_for(
    client: tailrace.sync.Client, tailrace_broker: LocalBroker
) -> None:
    with client.producer("t") as producer:
        tailrace_broker.fail_next()
        producer.send(b"lost")
        with pytest.raises(StorageFault):
            producer.flush()
        producer.flush()  # told once
        failed = producer.send(b"lost too")
        with pytest.raises(StorageFault):
            failed.result()
        producer.flush()  # somebody asked
    with pytest.raises(StorageFault), client.producer("t") as producer:
        producer.send(b"lost as well")
    with pytest.raises(KeyError), client.producer("t") as producer:  # noqa: PT012
        producer.send(b"never mind")
        raise KeyError


def test_a_wait_for_a_result_can_be_bounded(
    client: tailrace.sync.Client, tailrace_broker: LocalBroker
) -> None:
    with client.producer("t") as producer:
        tailrace_broker.fail_next(tailrace.errors.Full("no space"))
        receipt = producer.send(b"x")
        many = producer.send_many([b"y"])
        for promise in (receipt, many):
            with pytest.raises(Timeout, match="may still be") as caught:
                promise.result(timeout=0.01)
            assert caught.value.outcome == "unknown"
        tailrace_broker.clock.advance(2)
        assert receipt.result().offset == 0
    assert read(client) == [b"x", b"y"]


# -- threads -------------------------------------------------------------------------------------------------


def in_threads(work: Any, count: int) -> None:
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []


def test_threads_share_a_producer(client: tailrace.sync.Client) -> None:
    """With a tiny buffer, so that they wait for room many times; the messages of each keep their order."""
    with client.producer("t", buffer_bytes_max=2000) as producer:

        def work(number: int) -> None:
            for index in range(300):
                producer.send(b"%d %d" % (number, index))
                if index % 100 == 0:
                    producer.flush()

        in_threads(work, 4)
    found = [tuple(map(int, (value or b"").split())) for value in read(client)]
    assert sorted(found) == [(number, index) for number in range(4) for index in range(300)]
    for number in range(4):
        assert [index for other, index in found if other == number] == list(range(300))


def test_the_hand_over_is_bounded(client: tailrace.sync.Client, tailrace_broker: LocalBroker) -> None:
    """While the broker takes nothing, a sender stands still at the bound and goes on afterwards."""
    with client.producer("t", buffer_bytes_max=1000) as producer:
        tailrace_broker.fail_next(tailrace.errors.Full("no space"))
        producer.send(b"first")
        sent = []

        def work(_: int) -> None:
            for index in range(300):
                producer.send(b"x" * 100)
                sent.append(index)

        thread = threading.Thread(target=work, args=(0,))
        thread.start()
        give_up_s = time.monotonic() + 30
        while producer._hand_over.bytes < 1000 and time.monotonic() < give_up_s:
            thread.join(0.005)
        assert len(sent) < 300
        # The first message may meet the full disk only now: time goes on until all are through.
        while thread.is_alive() and time.monotonic() < give_up_s:
            tailrace_broker.clock.advance(2)
            thread.join(0.005)
        assert len(sent) == 300
    assert len(read(client)) == 301


def test_it_blocks_beside_a_running_loop(client: tailrace.sync.Client) -> None:
    async def main() -> int:
        with client.producer("t") as producer:
            return producer.publish(b"x").offset

    assert asyncio.run(main()) == 0


def test_it_refuses_to_block_its_own_loop(client: tailrace.sync.Client) -> None:
    async def inside() -> None:
        client.admin()

    with pytest.raises(InvalidRequest, match="would wait for itself"):
        client._portal.call(inside)


def test_closing_from_another_thread_ends_a_wait(client: tailrace.sync.Client) -> None:
    errors: list[str] = []
    with client.reader("t") as reader:

        def wait() -> None:
            try:
                next(reader)
            except Unavailable as error:
                errors.append(error.message)

        thread = threading.Thread(target=wait)
        thread.start()
    thread.join(30)
    assert errors == ["the reader is closed"]


# -- processes -----------------------------------------------------------------------------------------------


def run(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC},
    )


def test_after_a_fork(tmp_path: Path) -> None:
    program = """
import os, sys, tailrace.sync, tailrace.errors
from tailrace.testing import LocalBroker
broker = LocalBroker()
broker.create_topic("t", partitions=1)
with tailrace.sync.connect(broker.url) as client, client.producer("t") as producer:
    producer.publish(b"parent")
    reader = client.reader("t").__enter__()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            calls = [client.admin, lambda: producer.publish(b"x"), lambda: producer.send(b"x")]
            for call in (*calls, lambda: next(reader)):
                try:
                    call()
                except tailrace.errors.Unavailable as error:
                    assert "before a fork; connect again" in error.message, error
                else:
                    raise AssertionError("worked after a fork")
            with tailrace.sync.connect("embedded:" + sys.argv[1]) as new:
                new.admin().create_topic("u", partitions=1)
                with new.producer("u") as mine:
                    assert mine.publish(b"child").offset == 0
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    producer.publish(b"parent again")
    reader.__exit__(None, None, None)
assert [m.value for m in broker.published("t")] == [b"parent", b"parent again"]
"""
    done = run(program, str(tmp_path))
    _, err = done.communicate(timeout=60)
    assert done.returncode == 0, err


def test_ctrl_c_ends_a_wait_and_loses_nothing() -> None:
    program = """
import sys, tailrace.sync
from tailrace.testing import LocalBroker
broker = LocalBroker()
broker.create_topic("t", partitions=1)
with tailrace.sync.connect(broker.url) as client, client.reader("t") as reader:
    try:
        print("waiting", flush=True)
        next(reader)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    with client.producer("t") as producer:
        producer.publish(b"x")
    assert next(reader).value == b"x"
print("done", flush=True)
"""
    running = run(program)
    assert running.stdout is not None
    assert running.stdout.readline() == "waiting\n"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out.split()) == (0, ["interrupted", "done"]), err


def test_an_interpreter_ends_with_clients_open() -> None:
    program = """
import tailrace.sync
from tailrace.testing import LocalBroker
broker = LocalBroker()
broker.create_topic("t", partitions=1)
client = tailrace.sync.connect(broker.url).__enter__()
reader = client.reader("t").__enter__()
"""
    done = run(program)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out, err) == (0, "", "")
