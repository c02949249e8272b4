"""Figures as Prometheus sees them, parsed back with its own parser."""

from prometheus_client.parser import text_string_to_metric_families

from tailrace.broker.metrics import LATENCY_BOUNDS, Metrics
from tailrace.ports import LogStats

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(metrics: Metrics) -> Series:
    """Every sample by its name and labels."""
    text = metrics.render().decode("utf-8")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_publishing_and_delivery_are_counted_per_topic() -> None:
    metrics = Metrics()
    metrics.published("a/b", 500, 64_000, 0.003)
    metrics.published("a/b", 1, 100, 0.4)
    metrics.published("c", 7, 700, 100.0)
    metrics.delivered("a/b", nbytes=64_000, messages=500)
    series = scraped(metrics)
    assert series["tailrace_published_messages_total", (("topic", "a/b"),)] == 501
    assert series["tailrace_published_bytes_total", (("topic", "a/b"),)] == 64_100
    assert series["tailrace_published_batches_total", (("topic", "a/b"),)] == 2
    assert series["tailrace_published_messages_total", (("topic", "c"),)] == 7
    assert series["tailrace_delivered_messages_total", (("topic", "a/b"),)] == 500
    assert series["tailrace_delivered_bytes_total", (("topic", "a/b"),)] == 64_000
    assert series["tailrace_delivered_bytes_total", (("topic", "c"),)] == 0


def test_histogram_buckets_are_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.001, 0.0011, 61.0):
        metrics.fetched(seconds)
    series = scraped(metrics)
    assert series["tailrace_fetch_seconds_bucket", (("le", "0.00025"),)] == 1
    assert series["tailrace_fetch_seconds_bucket", (("le", "0.001"),)] == 2
    assert series["tailrace_fetch_seconds_bucket", (("le", "0.0025"),)] == 3
    assert series["tailrace_fetch_seconds_bucket", (("le", str(LATENCY_BOUNDS[-1])),)] == 3
    assert series["tailrace_fetch_seconds_bucket", (("le", "+Inf"),)] == 4
    assert series["tailrace_fetch_seconds_count", ()] == 4
    assert abs(series["tailrace_fetch_seconds_sum", ()] - 61.0021) < 1e-9


def test_requests_refusals_and_gauges() -> None:
    metrics = Metrics()
    for verb in ("publish", "publish", "fetch"):
        metrics.requested(verb)
    metrics.refused("overloaded")
    metrics.connections = 3
    metrics.in_flight_bytes = 4096
    metrics.guests, metrics.guests_turned_out = 5, 7
    series = scraped(metrics)
    assert series["tailrace_requests_total", (("verb", "publish"),)] == 2
    assert series["tailrace_requests_total", (("verb", "fetch"),)] == 1
    assert series["tailrace_refusals_total", (("code", "overloaded"),)] == 1
    assert series["tailrace_connections", ()] == 3
    assert series["tailrace_in_flight_bytes", ()] == 4096
    assert series["tailrace_guests", ()] == 5
    assert series["tailrace_guests_turned_out_total", ()] == 7
    assert series["process_resident_memory_bytes", ()] > 1_000_000
    anonymous = series["tailrace_anonymous_memory_bytes", ()]
    assert 1_000_000 < anonymous <= series["process_resident_memory_bytes", ()] * 1.5


def test_longest_lag_is_of_the_time_since_the_last_scrape() -> None:
    metrics = Metrics()
    metrics.loop_lag(0.5)
    metrics.loop_lag(0.1)
    assert scraped(metrics)["tailrace_loop_lag_max_seconds", ()] == 0.5
    metrics.loop_lag(0.2)
    after = scraped(metrics)
    assert after["tailrace_loop_lag_max_seconds", ()] == 0.2
    assert after["tailrace_loop_lag_seconds_count", ()] == 3


def test_partitions_are_asked_at_the_scrape() -> None:
    held = [("t", 0, LogStats(10, 25, 4096, 2, syncs=5, sync_seconds=0.25, fault=None))]
    metrics = Metrics(lambda: held)
    labels = (("partition", "0"), ("topic", "t"))
    first = scraped(metrics)
    assert first["tailrace_partition_start_offset", labels] == 10
    assert first["tailrace_partition_end_offset", labels] == 25
    assert first["tailrace_partition_log_bytes", labels] == 4096
    assert first["tailrace_fsyncs_total", labels] == 5
    assert first["tailrace_fsync_seconds_total", labels] == 0.25
    assert first["tailrace_partition_quarantined", labels] == 0
    held[0] = ("t", 0, LogStats(10, 26, 4096, 2, syncs=6, sync_seconds=0.3, fault="damage at 64"))
    second = scraped(metrics)
    assert second["tailrace_partition_end_offset", labels] == 26
    assert second["tailrace_partition_quarantined", labels] == 1


def test_two_brokers_share_nothing_and_a_deleted_topic_leaves() -> None:
    one, other = Metrics(), Metrics()
    one.published("t", 1, 1, 0.001)
    assert ("tailrace_published_messages_total", (("topic", "t"),)) not in scraped(other)
    one.forget("t")
    assert ("tailrace_published_messages_total", (("topic", "t"),)) not in scraped(one)
