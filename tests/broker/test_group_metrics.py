"""Figures of groups at a scrape: each tells what it says, and their number is bounded."""

from typing import Any

import pytest

from tailrace.broker import group_metrics
from tests.broker.queue_engine import QueueEngine


def scrape(broker: QueueEngine) -> dict[str, float]:
    """The series of groups by name and labels."""
    lines = broker.engine.metrics.render().decode().splitlines()
    series = (line.rpartition(" ") for line in lines if line.startswith("tailrace_group_"))
    return {name.removeprefix("tailrace_group_"): float(value) for name, _, value in series}


def place(name: str, group: str = "g", topic: str = "t") -> str:
    return f'{name}{{group="{group}",partition="0",topic="{topic}"}}'


def make(**options: Any) -> QueueEngine:
    broker = QueueEngine()
    broker.create()
    broker.enlist(**options)
    return broker


def test_what_has_become_of_messages() -> None:
    broker = make(max_attempts=2)
    broker.send(*(b"%d" % number for number in range(10)))
    broker.pass_s(3)
    held = broker.lease(count_max=4)
    broker.ack(held[0])
    broker.nack(held[1], delay_ms=60_000)
    broker.reject(held[2])
    found = scrape(broker)
    expected = {
        "lag": 8,
        "in_flight": 1,
        "waiting": 1,
        "dying": 0,
        "oldest_age_seconds": 3,
        "deliveries_total": 4,
        "failures_total": 1,
        "dead_lettered_total": 1,
        "lapsed_total": 0,
        "collected_total": 0,
    }
    assert {name: found[place(name)] for name in expected} == expected


def test_a_group_that_has_nothing_to_do_has_no_age() -> None:
    broker = make()
    broker.send(b"a")
    broker.ack(*broker.lease())
    broker.pass_s(100)
    found = scrape(broker)
    assert (found[place("lag")], found[place("oldest_age_seconds")]) == (0, 0)


def test_beyond_the_bound_they_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = make()
    for number in range(4):
        broker.enlist(group=f"g{number}")
    monkeypatch.setattr(group_metrics, "PLACES_MAX", 2)
    found = scrape(broker)
    assert sum(name.startswith("lag{") for name in found) == 2
    assert found["places_untold"] == 3
