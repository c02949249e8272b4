"""Topic to topic through Spark, whatever dies in between: each message once, in order for each key."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace import sync
from tests.e2e.broker_process import BrokerProcess
from tests.spark.copying_driver import Copying
from tests.spark.driver_process import DriverProcess
from tests.spark.failing_source import ON_PURPOSE
from tests.spark.standalone import Standalone

KEYS = 12
Values = dict[bytes, list[int]]


class World:
    """A broker that may fall, a topic with messages, and one that they are copied to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.broker = BrokerProcess(folder / "data")
        self._falling = [sys.executable, str(Path(__file__).with_name("falling_broker.py"))]
        self._over = threading.Event()
        self.falls = 0

    def start(self) -> None:
        self.broker.start([*self._falling, str(self.marks / "armed")])
        pid = self.marks / "broker.new"
        pid.write_text(str(self.broker.pid))
        pid.rename(self.marks / "broker")

    def fill(self, rows: int) -> None:
        """Messages numbered for each key."""
        with sync.connect(self.broker.url) as client:
            client.admin().create_topic("in", partitions=3)
            client.admin().create_topic("out", partitions=4)
            with client.producer("in") as producer:
                for number in range(rows):
                    key = b"key-%d" % (number % KEYS)
                    producer.send(b"%d" % (number // KEYS), key=key)

    def copied(self) -> Values:
        """What is in the other topic, by key, in the order in which it lies there."""
        found: Values = {}
        with (
            sync.connect(self.broker.url) as client,
            client.reader("out", start="earliest", stop_at_end=True) as reader,
        ):
            for message in reader:
                found.setdefault(message.key, []).append(int(message.value))
        return found

    def check_all(self, rows: int) -> None:
        expected: Values = {}
        for number in range(rows):
            expected.setdefault(b"key-%d" % (number % KEYS), []).append(number // KEYS)
        assert self.copied() == expected

    def copying(self, **more: Any) -> Copying:
        return Copying(
            url=self.broker.url,
            source="in",
            target="out",
            checkpoint=str(self.folder / "checkpoint"),
            folder=str(self.marks),
            **more,
        )

    def happened(self) -> set[str]:
        """The faults that came to pass."""
        return {mark.name for mark in self.marks.iterdir()} - {"broker", "armed"}

    @contextmanager
    def raised_again(self) -> Iterator[None]:
        """Starts the broker again whenever it falls."""

        def watch() -> None:
            while True:
                self.broker.wait(600)
                if self._over.is_set():
                    return
                self.falls += 1
                self.start()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            os.kill(self.broker.pid, 9)
            watcher.join(30)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with made.broker:
        made.start()
        yield made


def run_driver(world: World, log: str, copying: Copying) -> bool:
    """Whether the driver lived to see the end."""
    text = msgspec.json.encode(copying).decode()
    with DriverProcess(world.folder / log, "-m", "tests.spark.copying_driver", text) as driver:
        return driver.wait(400) == 0


@pytest.mark.timeout(600)
def test_drivers_and_workers_are_killed(spark: Any, world: World) -> None:
    """The driver's JVM dies before a decision, after one, and when one of four partitions has applied one; a
    worker dies in each life. Each life has other tasks than the one whose batch it repeats."""
    rows, batch = 600, 120
    world.fill(rows)
    lives = [
        ({0: ["worker"], 1: ["before"]}, 20, batch),
        ({1: ["worker"], 2: ["after"]}, 0, 3 * batch),
        ({2: ["worker"], 3: ["between"]}, 25, 4 * batch),
    ]
    for life, (faults, rows_per_task, _) in enumerate(lives):
        copying = world.copying(
            faults=faults, rows_per_trigger=batch, rows_per_task=rows_per_task, master="local[2,3]"
        )
        assert not run_driver(world, f"life-{life}.log", copying)
        expected = {f"{number}-{point}" for number, points in faults.items() for point in points}
        assert world.happened() >= expected
        found = world.copied()
        assert sum(map(len, found.values())) == lives[life][2]
    world.copying(rows_per_trigger=batch).run(spark)
    world.check_all(rows)


@pytest.mark.timeout(400)
def test_brokers_are_killed(spark: Any, world: World) -> None:
    """The broker dies before a decision, after one, and when one of four partitions has applied one; a commit
    fails behind its decision, and is aborted."""
    rows, batch = 600, 120
    world.fill(rows)
    faults = {1: ["broker-before"], 2: ["broker-after"], 3: ["broker-between"], 4: ["error"]}
    copying = world.copying(faults=faults, rows_per_trigger=batch)
    with world.raised_again():
        with pytest.raises(Exception, match=ON_PURPOSE):
            copying.run(spark)
        assert world.happened() == {"1-broker-before", "2-broker-after", "3-broker-between", "4-error"}
        assert world.falls == 3
        assert sum(map(len, world.copied().values())) == 5 * batch
        copying.run(spark)
        world.check_all(rows)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_executor_is_killed(world: World) -> None:
    """With executors in processes of their own, of which one dies with a task that has staged its rows."""
    rows, batch = 480, 120
    world.fill(rows)
    copying = world.copying(
        faults={1: ["executor"], 2: ["executor", "worker"]},
        rows_per_trigger=batch,
        rows_per_task=30,
        master="local-cluster[2,1,1024]",
    )
    assert run_driver(world, "cluster.log", copying)
    assert world.happened() >= {"1-executor", "2-executor"}
    world.check_all(rows)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_slow_attempt_is_overtaken(world: World) -> None:
    """A task is slow, and Spark starts another attempt at it beside the first. Both stage their rows to the
    end, one of them fewer and in another order; what the other has staged is all that is seen."""
    rows, batch = 240, 120
    world.fill(rows)
    speculation = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.multiplier": "1.1",
    }
    with Standalone(world.folder) as cluster:
        copying = world.copying(
            faults={0: ["slow"], 1: ["slow"]},
            rows_per_trigger=batch,
            rows_per_task=30,
            master=cluster.url,
            conf=speculation,
        )
        assert run_driver(world, "speculation.log", copying)
    assert world.happened() >= {"0-slow", "0-overtaken", "1-slow", "1-overtaken"}
    world.check_all(rows)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(3))
def test_everything_is_killed_at_random(world: World, seed: int) -> None:
    """Drivers and brokers die at random points of random batches, until everything is copied."""
    draw = random.Random(seed)
    rows, batch, batches = 600, 100, 6
    world.fill(rows)
    points = (
        "worker",
        "before",
        "after",
        "between",
        "broker-before",
        "broker-after",
        "broker-between",
        "error",
    )
    faults = {number: draw.sample(points, draw.randrange(3)) for number in range(batches)}
    with world.raised_again():
        for life in range(3 * batches):
            rows_per_task = draw.choice((0, 13, 40))
            copying = world.copying(
                faults=faults, rows_per_trigger=batch, rows_per_task=rows_per_task, master="local[2,4]"
            )
            if run_driver(world, f"life-{life}.log", copying):
                break
        planned = {f"{number}-{point}" for number, some in faults.items() for point in some}
        assert world.happened() == planned
        world.check_all(rows)
