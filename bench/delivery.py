"""The suite of the queue on the log: its bars, and the cases that are held against them."""

from __future__ import annotations

from bench.cases import (
    busy_connections,
    fair_shares,
    member_joins,
    queue_cost,
    queue_plain,
    queue_steady,
    redeliveries,
    repeated_kills,
    settled_log,
    snapshot_pause,
    steady_memory,
    timer_load,
    urgent_waits,
)
from bench.harness import Suite
from bench.results import Bar

BARS = (
    Bar(name="queue_e2e_100b", sense=">=", value=300_000),
    Bar(name="queue_e2e_p99_ms_20k", sense="<=", value=10),
    Bar(name="queue_cost_flatness", sense="<=", value=1.2),
    Bar(name="queue_cost_flatness_stuck", sense="<=", value=1.2),
    Bar(name="queue_cost_flatness_groups", sense="<=", value=1.2),
    Bar(name="mixed_priority_100b", sense=">=", value=150_000),
    Bar(name="key_order_100k_keys", sense=">=", value=150_000),
    Bar(name="scheduled_bytes_each", sense="<=", value=100),
    Bar(name="timer_lateness_ms_p99", sense="<=", value=20),
    Bar(name="fact_bytes_per_msg", sense="<=", value=8),
    Bar(name="snapshot_pause_ms_p99", sense="<=", value=5),
    Bar(name="restart_s", sense="<=", value=2),
    Bar(name="restart_after_kills_s", sense="<=", value=1),
    Bar(name="soak_mb_per_hour", sense="<=", value=10),
    Bar(name="rebalance_s", sense="<=", value=1),
    Bar(name="kept_partition_gap_ms", sense="<=", value=200),
    Bar(name="fair_share_shared", sense="<=", value=1.3),
    Bar(name="fair_share_default", sense="<=", value=1.3),
    Bar(name="fair_share_partitions", sense="<=", value=1.3),
    Bar(name="urgent_wait_ms", sense="<=", value=60),
    Bar(name="redelivery_overhead", sense="<=", value=1.15),
    Bar(name="many_workers_ack_share", sense=">=", value=0.5),
    Bar(name="ack_cost_growth", sense="<=", value=1.3),
    Bar(name="single_publish_cpu_us", sense="<=", value=36),
)

SUITE = Suite(
    "delivery",
    BARS,
    (
        queue_plain.PLAIN,
        queue_plain.PRIORITIES,
        queue_plain.KEYS,
        queue_plain.SHARED_KEYS,
        queue_steady.CASE,
        queue_cost.CASE,
        timer_load.CASE,
        settled_log.CASE,
        repeated_kills.CASE,
        snapshot_pause.CASE,
        member_joins.CASE,
        fair_shares.SHARED,
        fair_shares.DEFAULT,
        fair_shares.PARTITIONED,
        urgent_waits.CASE,
        redeliveries.CASE,
        busy_connections.SHARE,
        busy_connections.GROWTH,
        busy_connections.PUBLISH,
        steady_memory.CASE,
    ),
)
