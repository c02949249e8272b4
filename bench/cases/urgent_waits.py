"""How long does an urgent message wait for a busy worker that has a long queue of ordinary ones?"""

from __future__ import annotations

import msgspec

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.urgency import UrgencyJob, Waited

ORDINARY, URGENT, EVERY_S, HANDLER_S = 500, 20, 0.25, 0.02
PATIENCE_S = 120.0


def measure(run: Run) -> list[Sample]:
    """From the ack of an urgent message to the start of its handler: the longest, in the worse mode."""
    with run.broker() as broker:
        job = UrgencyJob(
            url=broker.url, ordinary=ORDINARY, urgent=URGENT, every_s=EVERY_S, handler_s=HANDLER_S
        )
        with run.role("urgency", job) as child:
            waited = child.answer(Waited, PATIENCE_S)
    said: dict[str, object] = {
        "ordinary": ORDINARY,
        "urgent": URGENT,
        "handler_ms": HANDLER_S * 1000,
        "workers": 1,
        "partitions": 1,
        "durability": "fsync",
        **{name: round(value, 2) for name, value in sorted(msgspec.structs.asdict(waited).items())},
    }
    worst = max(waited.strict_max_ms, waited.weighted_max_ms)
    return [Sample(name="urgent_wait_ms", value=worst, unit="ms", conditions=said)]


CASE = Case(("urgent_wait_ms",), 12.0, measure)
