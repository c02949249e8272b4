"""The blocking consumer and its neighbours: the same promises from plain threads.

Covers `sync/blocking_consumer.py` and `sync/blocking_groups.py`.
"""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace.sync
from tailrace.errors import InvalidRequest, LeaseLost, Unavailable
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import known_as_fast


@pytest.fixture
def client(tailrace_broker: LocalBroker) -> Iterator[tailrace.sync.Client]:
    """A blocking client on a broker with the topic `t` of two partitions."""
    tailrace_broker.create_topic("t", partitions=2)
    with tailrace.sync.connect(timeout=10) as opened:
        yield opened


def fill(client: tailrace.sync.Client, count: int, **fields: Any) -> None:
    with client.producer("t") as producer:
        for number in range(count):
            producer.publish(b"%d" % number, partition=number % 2, **fields)


def lag(client: tailrace.sync.Client, group: str = "g") -> int:
    return client.groups().describe(group).lag


def take(consumer: tailrace.sync.Consumer, count: int) -> list[tailrace.sync.Delivery]:
    return [next(consumer) for _ in range(count)]


def test_messages_are_taken_and_settled(client: tailrace.sync.Client) -> None:
    fill(client, 100)
    with client.consumer("t", "g") as consumer:
        assert consumer.assignment() == {("t", 0), ("t", 1)}
        found = []
        for delivery in consumer:
            assert (delivery.group, delivery.attempt, delivery.settled) == ("g", 1, False)
            found.append(int(delivery.value or b""))
            if delivery.offset % 2:
                delivery.ack()
            else:
                delivery.ack_nowait()
            if len(found) == 100:
                break
        consumer.commit()
        assert sorted(found) == list(range(100))
        assert lag(client) == 0
        assert consumer.failures == []
    with pytest.raises(Unavailable):
        next(consumer)


def test_nack_reject_and_dead_letters(client: tailrace.sync.Client, tailrace_broker: LocalBroker) -> None:
    fill(client, 2)
    with client.consumer("t", "g") as consumer:
        one, two = take(consumer, 2)
        one.nack(delay=5, error="later")
        two.reject("never")
        tailrace_broker.clock.advance(6)
        (again,) = take(consumer, 1)
        assert (again.value, again.attempt) == (one.value, 2)
        again.extend(60_000)
        again.ack()
    letters = client.dead_letters("t")
    (letter,) = letters.list()
    assert (letter.error, letter.message.value) == ("never", two.value)
    assert letters.show(letter.message.partition, letter.message.offset).error == "never"
    assert letters.redrive(dry_run=True).count == 1
    assert letters.redrive().reopened == 1
    with client.consumer("t", "g") as consumer:
        take(consumer, 1)[0].ack()
    assert letters.purge() == 0


def test_batches_and_threads_that_share_a_consumer(client: tailrace.sync.Client) -> None:
    fill(client, 200)
    found: list[bytes | None] = []
    with client.consumer("t", "g") as consumer:
        enough = threading.Event()

        def work() -> None:
            for batch in consumer.batches(7):
                assert 1 <= len(batch) <= 7
                found.extend(delivery.value for delivery in batch)
                batch.ack()
                if len(found) >= 200:
                    enough.set()
                    consumer.stop()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert enough.wait(10)
        for thread in threads:
            thread.join(10)
    assert sorted(int(value or b"") for value in found) == list(range(200))
    assert lag(client) == 0


def test_run_uses_threads_and_keeps_keys_serial(client: tailrace.sync.Client) -> None:
    fill(client, 40, key=b"k")
    with client.consumer("t", "g") as consumer:
        busy: dict[int, int] = {0: 0, 1: 0}
        seen: list[int] = []
        names = set()

        def handler(delivery: tailrace.sync.Delivery) -> None:
            busy[delivery.partition] += 1
            assert busy[delivery.partition] == 1
            names.add(threading.current_thread().name)
            if delivery.offset == 3:
                delivery.ack()
            seen.append(delivery.offset)
            busy[delivery.partition] -= 1
            if len(seen) == 40:
                consumer.stop()

        consumer.run(handler, concurrency=4)
        assert all(name.startswith("tailrace-handler") for name in names)
    assert lag(client) == 0


def test_batches_take_what_is_in_hand_whatever_frames_it_came_in(client: tailrace.sync.Client) -> None:
    fill(client, 60)
    with client.consumer("t", "g") as consumer:
        known_as_fast(consumer._inner)
        sizes = []
        for batch in consumer.batches(30):
            sizes.append(len(batch))
            batch.ack()
            if sum(sizes) == 60:
                break
        assert max(sizes) >= 10, sizes
    assert lag(client) == 0


def test_loops_and_runs_take_turns(client: tailrace.sync.Client) -> None:
    """What was leased for one of them is handed out by the other, and can be settled there."""
    with client.producer("t") as producer:
        for number in range(6):
            producer.send(b"%d" % number, partition=0, key=b"k")
    with client.consumer("t", "g") as consumer:
        known_as_fast(consumer._inner)
        take(consumer, 1)[0].ack()

        seen = []

        def once(delivery: tailrace.sync.Delivery) -> None:
            seen.append((delivery.value, delivery.attempt))
            if seen[-1] == (b"1", 1):
                raise tailrace.Retry(0)
            if delivery.value == b"3":
                raise KeyError
            delivery.ack()

        with pytest.raises(KeyError):
            consumer.run(once, settle=False)
        assert seen == [(b"1", 1), (b"1", 2), (b"2", 1), (b"3", 1)]
        assert [delivery.value for delivery in take(consumer, 2)] == [b"4", b"5"]
    assert lag(client) == 3, "the last ones were not settled"


def test_long_work_between_messages_keeps_the_lease(
    client: tailrace.sync.Client, tailrace_broker: LocalBroker
) -> None:
    fill(client, 2)
    with client.consumer("t", "g") as consumer:
        one, two = take(consumer, 2)
        tailrace_broker.clock.advance(120)  # The loop of the client lives on its own thread.
        one.ack()
        two.ack()
    assert lag(client) == 0


def test_failures_are_raised_on_exit(client: tailrace.sync.Client, tailrace_broker: LocalBroker) -> None:
    fill(client, 1)
    consumer = client.consumer("t", "g")
    consumer.__enter__()
    (m,) = take(consumer, 1)
    client.groups().reset("g", "t", "earliest", force=True)
    m.ack_nowait()
    with pytest.raises(LeaseLost):
        consumer.__exit__(None, None, None)


def test_rebalance_callbacks_run_in_threads_and_may_block(client: tailrace.sync.Client) -> None:
    moved: list[tuple[str, int]] = []
    revoked = threading.Event()

    def assigned(places: set[Any]) -> None:
        client.groups().list()  # A blocking call: on the event loop it would be refused.
        moved.append(("+", len(places)))

    def gone(places: set[Any]) -> None:
        client.groups().list()
        moved.append(("-", len(places)))
        revoked.set()

    fill(client, 4)
    with client.consumer("t", "g", on_assigned=assigned, on_revoked=gone) as first:
        for delivery in take(first, 4):
            delivery.ack()
        assert moved == [("+", 2)]
        with client.consumer("t", "g") as second:
            assert revoked.wait(10)
            assert moved == [("+", 2), ("-", 1)]
            with client.producer("t") as producer:
                for partition in range(2):
                    producer.publish(b"x", partition=partition)
            for consumer in (first, second):
                next(consumer).ack()
    assert lag(client) == 0


def test_streams_and_broadcasts(client: tailrace.sync.Client) -> None:
    fill(client, 10)
    with client.consumer("t", "s", mode="stream") as stream:
        assert sorted(int(next(stream).value or b"") for _ in range(10)) == list(range(10))
        assert stream.position() == {("t", 0): 5, ("t", 1): 5}
        stream.commit()
        stream.seek({("t", 0): 4})
        assert next(stream).value == b"8"
        stream.pause()
        stream.resume()
        assert stream.assignment() == {("t", 0), ("t", 1)}
    with client.consumer("t", "s", mode="stream") as stream:
        assert [len(batch) for batch in _first(stream.batches(3), 1)] == [1]
    with client.consumer("t", mode="broadcast", start="earliest") as everything:
        seen = []

        def handler(message: tailrace.Message) -> None:
            seen.append(message.value)
            if len(seen) == 10:
                everything.stop()

        everything.run(handler)
        assert len(seen) == 10
        with pytest.raises(InvalidRequest):
            everything.run(print, concurrency=2)


def _first(items: Iterator[Any], count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


def test_groups_and_schedules(client: tailrace.sync.Client) -> None:
    groups = client.groups()
    assert groups.create("g", "t", max_attempts=2).options["max_attempts"] == 2
    groups.pause("g")
    assert [group.paused for group in groups.list()] == [True]
    groups.resume("g")
    assert groups.reset("g", "t", "latest", dry_run=True).done is False
    groups.delete("g")
    schedules = client.schedules()
    schedules.put("s", "t", "* * * * *", value=b"x")
    schedules.pause("s")
    assert [schedule.paused for schedule in schedules.list()] == [True]
    schedules.resume("s")
    schedules.delete("s")
    assert client.scheduled("t") == []


@pytest.mark.parametrize("concurrency", [0, -1, "a", 1.5, True])
def test_so_many_threads_are_refused_by_name(client: tailrace.sync.Client, concurrency: Any) -> None:
    with client.consumer("t", "g") as consumer, pytest.raises(InvalidRequest, match="concurrency: a whole"):
        consumer.run(print, concurrency=concurrency)
