"""Metrics of a running broker: plain integers on the hot path, Prometheus text at a scrape.

Values are updated per batch or per request by the broker's one thread, so an update is a few additions
without a lock. `render` reads the values, and asks the `partitions` callback for the stats of the logs
(offsets, bytes, syncs). Each `Metrics` has a registry of its own: two brokers in one process share nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tailrace.broker.group_metrics import GroupFigures, group_families

if TYPE_CHECKING:
    from tailrace.ports import LogStats

LATENCY_BOUNDS = (
    0.000_25,
    0.000_5,
    0.001,
    0.002_5,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""Upper bounds in seconds; a long poll may take a minute."""

PartitionFigures = Callable[[], Iterable[tuple[str, int, "LogStats"]]]
"""Gives (topic, partition, stats of its log) for every partition of the broker."""


class Strays(NamedTuple):
    """Groups and folders that are kept although nothing explains them."""

    groups: int
    folders: int


class Histogram:
    """Counts per bucket, and a sum. `observe` costs one bisection and two additions."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_BOUNDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self._total += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """The histogram with cumulative buckets, in the form that Prometheus expects."""
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, LATENCY_BOUNDS), "+Inf"), self._counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family = HistogramMetricFamily(name, documentation)
        family.add_metric([], buckets, self._total)
        return family


class _TopicFigures:
    """Counters of one topic since the broker started."""

    __slots__ = ("burials_failed", "bytes_in", "bytes_out", "messages_in", "messages_out", "publishes")

    def __init__(self) -> None:
        self.messages_in = 0
        self.bytes_in = 0
        self.publishes = 0
        self.messages_out = 0
        self.bytes_out = 0
        self.burials_failed = 0


class Metrics(Collector):
    """All metrics of one broker. `connections`, `guests...`, `in_flight_bytes` and `audit_...` are set by
    their owner."""

    __slots__ = (
        "_fetch",
        "_groups",
        "_lag",
        "_lag_max",
        "_lease",
        "_partitions",
        "_publish",
        "_refusals",
        "_registry",
        "_requests",
        "_snapshot",
        "_strays",
        "_topics",
        "audit_failing",
        "audit_lines",
        "audit_missed",
        "connections",
        "damages",
        "guests",
        "guests_turned_out",
        "in_flight_bytes",
        "scrub_damages",
        "scrub_ended_us",
        "scrubbed_bytes",
        "storage_free_bytes",
        "storage_full",
        "storage_low",
        "storage_total_bytes",
    )

    def __init__(
        self,
        partitions: PartitionFigures = tuple,
        groups: GroupFigures = tuple,
        strays: Callable[[], Strays] = lambda: Strays(0, 0),
    ) -> None:
        self._topics: dict[str, _TopicFigures] = {}
        self._requests: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        self._publish = Histogram()
        self._fetch = Histogram()
        self._lease = Histogram()
        self._lag = Histogram()
        self._snapshot = Histogram()
        self._lag_max = 0.0
        self._partitions = partitions
        self._groups = groups
        self._strays = strays
        self.storage_full = self.storage_low = self.storage_free_bytes = self.storage_total_bytes = 0
        self.connections = self.guests = self.guests_turned_out = 0
        self.in_flight_bytes = 0
        self.audit_lines = self.audit_missed = self.audit_failing = 0
        self.damages = 0
        self.scrubbed_bytes = self.scrub_damages = self.scrub_ended_us = 0
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    # ---- updates, per batch or request

    def published(self, topic: str, messages: int, nbytes: int, seconds: float) -> None:
        """A batch was stored and acknowledged `seconds` after it arrived."""
        figures = self._topics.get(topic) or self._new_topic(topic)
        figures.messages_in += messages
        figures.bytes_in += nbytes
        figures.publishes += 1
        self._publish.observe(seconds)

    def delivered(self, topic: str, nbytes: int, messages: int) -> None:
        """Stored messages were sent to a reader."""
        figures = self._topics.get(topic) or self._new_topic(topic)
        figures.messages_out += messages
        figures.bytes_out += nbytes

    def fetched(self, seconds: float) -> None:
        """A fetch was answered `seconds` after it arrived, with its wait for data."""
        self._fetch.observe(seconds)

    def leased(self, seconds: float) -> None:
        """A lease request was answered `seconds` after it arrived, with its wait for messages."""
        self._lease.observe(seconds)

    def burial_failed(self, topic: str) -> None:
        """A dead letter of a topic could not be written; the write is tried again."""
        figures = self._topics.get(topic) or self._new_topic(topic)
        figures.burials_failed += 1

    def requested(self, verb: str) -> None:
        """A request of this verb arrived."""
        self._requests[verb] = self._requests.get(verb, 0) + 1

    def refused(self, code: str) -> None:
        """A request was answered with this error."""
        self._refusals[code] = self._refusals.get(code, 0) + 1

    def loop_lag(self, seconds: float) -> None:
        """A timer of the event loop fired `seconds` too late."""
        self._lag.observe(seconds)
        if seconds > self._lag_max:
            self._lag_max = seconds

    def snapshot_taken(self, seconds: float) -> None:
        """The loop stood still for `seconds` to copy the state of a partition."""
        self._snapshot.observe(seconds)

    def damage_found(self) -> None:
        """A partition was quarantined while the broker ran."""
        self.damages += 1

    def scrubbed(self, nbytes: int) -> None:
        """The scrub has read and checked bytes."""
        self.scrubbed_bytes += nbytes

    def scrub_found_damage(self) -> None:
        """The scrub found a damaged place."""
        self.scrub_damages += 1

    def scrub_ended(self, ended_us: int) -> None:
        """The last periodic scrub was through at this time; 0: never."""
        self.scrub_ended_us = ended_us

    def storage(self, *, full: bool, low: bool, free_bytes: int, total_bytes: int) -> None:
        """The space of the data folder is known anew."""
        self.storage_full, self.storage_low = int(full), int(low)
        self.storage_free_bytes, self.storage_total_bytes = free_bytes, total_bytes

    def forget(self, topic: str) -> None:
        """A topic was deleted: end its series."""
        self._topics.pop(topic, None)

    def _new_topic(self, topic: str) -> _TopicFigures:
        figures = self._topics[topic] = _TopicFigures()
        return figures

    # ---- export

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at a scrape."""
        yield from self._topic_families()
        yield from self._request_families()
        yield from self._partition_families()
        yield from group_families(self._groups())
        yield from self._storage_families()
        yield GaugeMetricFamily(
            "tailrace_connections", "Open connections of the native protocol", self.connections
        )
        yield GaugeMetricFamily("tailrace_guests", "Connections that have not greeted yet", self.guests)
        yield CounterMetricFamily(
            "tailrace_guests_turned_out", "Connections that never greeted", self.guests_turned_out
        )
        yield GaugeMetricFamily(
            "tailrace_in_flight_bytes", "Bytes of requests and replies held now", self.in_flight_bytes
        )
        yield from self._audit_families()
        yield self._lag.family("tailrace_loop_lag_seconds", "How late timers of the event loop fired")
        # The worst since the last scrape: a histogram alone hides one long stall among many short ones.
        yield GaugeMetricFamily(
            "tailrace_loop_lag_max_seconds", "Longest lag since the last scrape", self._lag_max
        )
        self._lag_max = 0.0
        yield CounterMetricFamily(
            "tailrace_scrubbed_bytes", "Bytes that the scrub read and checked", self.scrubbed_bytes
        )
        yield CounterMetricFamily(
            "tailrace_scrub_damage", "Damaged places that the scrub found", self.scrub_damages
        )
        yield GaugeMetricFamily(
            "tailrace_scrub_last_timestamp_seconds",
            "When the last periodic scrub was through; 0: never",
            self.scrub_ended_us / 1e6,
        )
        yield self._snapshot.family(
            "tailrace_snapshot_pause_seconds", "How long the loop stood still to copy state for a snapshot"
        )
        anonymous = _anonymous_memory()
        if anonymous is not None:
            yield GaugeMetricFamily(
                "tailrace_anonymous_memory_bytes",
                "Resident memory without mapped files (RssAnon)",
                anonymous,
            )

    def _audit_families(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "tailrace_audit_lines", "Lines written into the audit log since the start", self.audit_lines
        )
        yield CounterMetricFamily(
            "tailrace_audit_lines_missed",
            "Lines left out of it: too many at a time, or no room while the disk failed",
            self.audit_missed,
        )
        yield GaugeMetricFamily(
            "tailrace_audit_failing", "1 while the audit log cannot be written", self.audit_failing
        )

    def _storage_families(self) -> Iterator[Metric]:
        strays = self._strays()
        figures = (
            ("tailrace_unknown_groups", "Groups that partitions know and no coordinator does", strays.groups),
            ("tailrace_kept_folders", "Folders of data that the catalog does not explain", strays.folders),
            ("tailrace_storage_full", "1 while publishing is refused for want of space", self.storage_full),
            ("tailrace_storage_low", "1 while less space is free than the warning asks", self.storage_low),
            ("tailrace_storage_free_bytes", "Free bytes at the data folder", self.storage_free_bytes),
            ("tailrace_storage_total_bytes", "Bytes of its file system", self.storage_total_bytes),
        )
        for name, documentation, value in figures:
            yield GaugeMetricFamily(name, documentation, value)

    def _topic_families(self) -> Iterator[Metric]:
        series = (
            ("tailrace_published_messages", "Messages stored and acknowledged", "messages_in"),
            ("tailrace_published_batches", "Batches stored and acknowledged", "publishes"),
            ("tailrace_published_bytes", "Bytes of batches stored and acknowledged", "bytes_in"),
            ("tailrace_delivered_messages", "Messages handed to readers", "messages_out"),
            ("tailrace_delivered_bytes", "Stored bytes handed to readers", "bytes_out"),
            (
                "tailrace_burial_failures",
                "Appends to the dead letters that have to be repeated",
                "burials_failed",
            ),
        )
        for name, documentation, attribute in series:
            family = CounterMetricFamily(name, documentation, labels=["topic"])
            for topic, figures in self._topics.items():
                family.add_metric([topic], getattr(figures, attribute))
            yield family

    def _request_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("tailrace_requests", "Requests by verb", labels=["verb"])
        for verb, count in self._requests.items():
            requests.add_metric([verb], count)
        yield requests
        refusals = CounterMetricFamily("tailrace_refusals", "Refused requests by error code", labels=["code"])
        for code, count in self._refusals.items():
            refusals.add_metric([code], count)
        yield refusals
        yield CounterMetricFamily(
            "tailrace_damage_found", "Partitions quarantined since the start", value=self.damages
        )
        yield self._publish.family("tailrace_publish_seconds", "From the arrival of a batch to its answer")
        yield self._fetch.family("tailrace_fetch_seconds", "From a fetch to its answer, waiting included")
        yield self._lease.family("tailrace_lease_seconds", "From a lease to its answer, waiting included")

    def _partition_families(self) -> Iterator[Metric]:
        labels = ["topic", "partition"]
        start = GaugeMetricFamily("tailrace_partition_start_offset", "First offset kept", labels=labels)
        end = GaugeMetricFamily(
            "tailrace_partition_end_offset", "Offset after the last message", labels=labels
        )
        size = GaugeMetricFamily("tailrace_partition_log_bytes", "Bytes of the log", labels=labels)
        faulty = GaugeMetricFamily(
            "tailrace_partition_quarantined",
            "1 while writes are refused because of damage or a failed sync",
            labels=labels,
        )
        syncs = CounterMetricFamily("tailrace_fsyncs", "fdatasync calls", labels=labels)
        seconds = CounterMetricFamily("tailrace_fsync_seconds", "Time spent in fdatasync", labels=labels)
        for topic, partition, stats in self._partitions():
            values = [topic, str(partition)]
            start.add_metric(values, stats.start_offset)
            end.add_metric(values, stats.end_offset)
            size.add_metric(values, stats.bytes)
            faulty.add_metric(values, float(stats.fault is not None))
            syncs.add_metric(values, stats.syncs)
            seconds.add_metric(values, stats.sync_seconds)
        yield from (start, end, size, faulty, syncs, seconds)


def _anonymous_memory() -> int | None:
    """RssAnon of this process in bytes; None if the kernel does not tell."""
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
