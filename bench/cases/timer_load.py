"""What does a pending delayed message cost in memory, and how late is one when 50,000 a second are due?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.processes import BenchmarkFailed
from bench.results import Sample
from bench.roles.timers import Scheduled, TimerJob

PENDING = 1_000_000
RATE = 50_000
SPREAD_S = 10.0
PATIENCE_S = 300.0
NOMINAL_S = 30.0


def measure(run: Run) -> list[Sample]:
    """RssAnon for each of a million that wait an hour; then lateness of those due within ten seconds."""
    return [_memory(run), _lateness(run)]


def _memory(run: Run) -> Sample:
    count = run.scaled(PENDING)
    with run.broker("pending") as broker:
        before = broker.anon_mb()
        job = TimerJob(url=broker.url, count=count, after_s=3600, spread_s=3600, watch=False)
        with run.role("timers", job) as child:
            done = child.answer(Scheduled, PATIENCE_S)
        after = broker.anon_mb()
    said: dict[str, object] = {
        "pending": done.scheduled,
        "payload_bytes": job.value_bytes,
        "batch": 500,
        "durability": "interval",
        "partitions": 1,
        "before_mb": round(before, 1),
        "after_mb": round(after, 1),
        "scheduled_per_s": round(done.scheduled / done.seconds),
    }
    value = (after - before) * 1e6 / done.scheduled
    return Sample(name="scheduled_bytes_each", value=value, unit="bytes", conditions=said)


def _lateness(run: Run) -> Sample:
    count = run.scaled(int(RATE * SPREAD_S))
    # Stored well before the first is due, so that publishing does not disturb the release.
    after_s = max(2.0, count / 60_000)
    with run.broker("due") as broker:
        job = TimerJob(url=broker.url, count=count, after_s=after_s, spread_s=count / RATE)
        with run.role("timers", job) as child:
            done = child.answer(Scheduled, PATIENCE_S)
    if done.lateness is None:
        raise BenchmarkFailed("the timers were not watched")
    if done.seconds > after_s:
        raise BenchmarkFailed(f"scheduling took {done.seconds:.1f} s, the first was due after {after_s:.1f}")
    said: dict[str, object] = {
        "timers": done.scheduled,
        "rate_per_s": RATE,
        "payload_bytes": job.value_bytes,
        "batch": 500,
        "due": "in random order over all batches",
        "until": "a reader in another process has it",
        "durability": "interval",
        "partitions": 1,
        "p50_ms": round(done.lateness.p50_ms, 3),
        "max_ms": round(done.lateness.max_ms, 3),
    }
    return Sample(name="timer_lateness_ms_p99", value=done.lateness.p99_ms, unit="ms", conditions=said)


CASE = Case(("scheduled_bytes_each", "timer_lateness_ms_p99"), NOMINAL_S, measure)
