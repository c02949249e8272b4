"""How often is a message with a key handed out, when one in 22 handlers fails?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.failing import TOPIC, FailingJob, Worked

MESSAGES, KEYS, FAILURES, WORKERS, BACKOFF_MS = 3_000, 100, 0.045, 3, 100
PATIENCE_S = 180.0


def measure(run: Run) -> list[Sample]:
    """Messages handed out, for each message."""
    with run.broker() as broker:
        job = FailingJob(
            url=broker.url,
            messages=run.scaled(MESSAGES),
            keys=KEYS,
            failures=FAILURES,
            workers=WORKERS,
            backoff_ms=BACKOFF_MS,
        )
        with run.role("failing", job) as child:
            worked = child.answer(Worked, PATIENCE_S)
        handed = broker.handed_out(TOPIC)
    said: dict[str, object] = {
        "messages": job.messages,
        "keys": KEYS,
        "workers": WORKERS,
        "partitions": 3,
        "backoff_ms": BACKOFF_MS,
        "failed": worked.failed,
        "handler_calls": worked.calls,
        "counted_deliveries": worked.deliveries,
        "durability": "fsync",
    }
    value = handed / job.messages
    return [Sample(name="redelivery_overhead", value=value, unit="ratio", conditions=said)]


CASE = Case(("redelivery_overhead",), 5.0, measure)
