"""Metrics of groups: for each partition, the messages still to be settled, and what became of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PLACES_MAX = 2_000
"""Pairs of group and partition with series of their own; more would be too many for monitoring."""

Place = tuple[str, str, int, dict[str, Any], float | None]
"""Group, topic, partition, stats, and the age of the oldest unsettled message in seconds."""
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


def group_families(places: Iterable[Place]) -> Iterator[Metric]:
    """The metric families of groups; pairs beyond the bound are only counted."""
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
