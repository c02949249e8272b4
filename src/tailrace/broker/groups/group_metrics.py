"""Figures of groups at a scrape: what each has still to do on each partition, and what became of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from tailrace.broker.topics import Topics

PLACES_MAX = 2_000
"""So many pairs of group and partition are told of; monitoring would drown in more."""

Place = tuple[str, str, int, dict[str, Any], float | None]
"""Group, topic, partition, its figures, and the age of the oldest unsettled message in seconds."""
GroupFigures = Callable[[], Iterable[Place]]

_GAUGES = {
    "lag": "Messages that are not settled",
    "in_flight": "Messages that members hold",
    "waiting": "Messages that wait for another delivery",
    "dying": "Messages on their way to the dead letters",
}
_COUNTERS = {
    "deliveries": "Messages handed to members, repeated ones included",
    "failures": "Messages that failed: nacked, or their lease expired",
    "dead_lettered": "Messages that went to the dead letters",
    "lapsed": "Messages that outlived their TTL before they were delivered",
    "collected": "Messages that retention took before they were settled",
}
_LABELS = ("group", "topic", "partition")


def figures_of(topics: Topics) -> Iterator[Place]:
    """The figures of every group on every partition."""
    for host in topics.hosts():
        for partition, shard in enumerate(host.shards):
            if not shard.machine.delivers:
                continue
            queues = shard.state.queues
            for group in queues.names():
                figures = queues.figures(group)
                age_s = None
                if figures["lag"]:
                    time_us = shard.at_hand.append_time_us(figures["committed"])
                    age_s = None if time_us is None else max(0, shard.time_us() - time_us) / 1e6
                else:
                    age_s = 0.0
                yield group, host.info.name, partition, figures, age_s


def group_families(places: Iterable[Place]) -> Iterator[Metric]:
    """What a scrape sees of groups; beyond the bound they are only counted."""
    families: dict[str, Any] = {
        name: GaugeMetricFamily(f"tailrace_group_{name}", text, labels=_LABELS)
        for name, text in _GAUGES.items()
    }
    for name, text in _COUNTERS.items():
        families[name] = CounterMetricFamily(f"tailrace_group_{name}", text, labels=_LABELS)
    oldest = GaugeMetricFamily(
        "tailrace_group_oldest_age_seconds", "Age of the oldest message that is not settled", labels=_LABELS
    )
    untold = 0
    for number, (group, topic, partition, figures, age_s) in enumerate(places):
        if number >= PLACES_MAX:
            untold += 1
            continue
        labels = [group, topic, str(partition)]
        for name, family in families.items():
            family.add_metric(labels, figures[name])
        if age_s is not None:
            oldest.add_metric(labels, age_s)
    yield from families.values()
    yield oldest
    yield GaugeMetricFamily(
        "tailrace_group_places_untold", "Pairs of group and partition beyond the bound of series", untold
    )
