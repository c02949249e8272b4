"""The suite of one broker on one machine: its bars, and the cases that are held against them."""

from __future__ import annotations

from bench.cases import (
    broker_memory,
    broker_start,
    latency_steady,
    publish_sequential,
    send_batched,
    send_kilobyte,
    send_synced,
    send_synced_spread,
    send_unbatched,
)
from bench.harness import Suite
from bench.results import Bar

BARS = (
    Bar(name="e2e_100b_send", sense=">=", value=500_000),
    Bar(name="e2e_100b_batched", sense=">=", value=1_000_000),
    Bar(name="e2e_1kb_batched", sense=">=", value=400, limit_share=0.5),
    Bar(name="e2e_100b_fsync", sense=">=", value=200_000),
    Bar(name="e2e_100b_fsync_of_interval", sense=">=", value=0.6),
    Bar(name="e2e_100b_fsync_30p", sense=">=", value=100_000),
    Bar(name="publish_one_at_a_time", sense=">=", value=8_000),
    Bar(name="publish_p99_ms_20k", sense="<=", value=5),
    Bar(name="e2e_p99_ms_20k", sense="<=", value=5),
    Bar(name="publish_p99_ms_20k_fsync", sense="<=", value=5, syncs=3),
    Bar(name="e2e_p99_ms_20k_fsync", sense="<=", value=5, syncs=3),
    Bar(name="broker_anon_mb_10m", sense="<=", value=150),
    Bar(name="broker_anon_peak_mb_10m", sense="<=", value=150),
    Bar(name="broker_anon_mb_10kb", sense="<=", value=150),
    Bar(name="broker_anon_peak_mb_10kb", sense="<=", value=150),
    Bar(name="startup_s", sense="<=", value=1),
    Bar(name="recovery_s_per_gb", sense="<=", value=1),
)

SUITE = Suite(
    "foundation",
    BARS,
    (
        broker_start.EMPTY,
        send_unbatched.CASE,
        send_batched.CASE,
        send_kilobyte.CASE,
        send_synced.CASE,
        send_synced_spread.CASE,
        publish_sequential.CASE,
        latency_steady.CASE,
        broker_memory.SMALL,
        broker_memory.LARGE,
        broker_start.CRASHED,
    ),
)
