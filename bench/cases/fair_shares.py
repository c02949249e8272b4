"""Ten workers share a hundred jobs of 0.2 s: how much longer does it take than it has to?"""

from __future__ import annotations

from collections.abc import Callable

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.workers import Shared, WorkJob

WORKERS, MESSAGES, PARTITIONS, HANDLER_S = 10, 100, 3, 0.2
SHARED_S = MESSAGES * HANDLER_S / WORKERS
ALONE_S = -(-MESSAGES // PARTITIONS) * HANDLER_S
"""A partition with one worker: the largest has 34 jobs."""
PATIENCE_S = 120.0


def _measured(name: str, options: dict[str, str], ideal_s: float) -> Callable[[Run], list[Sample]]:
    def measure(run: Run) -> list[Sample]:
        """The worse of two rounds: jobs that wait for workers that join, workers that wait for jobs."""
        with run.broker() as broker:
            job = WorkJob(
                url=broker.url,
                options=options,
                workers=WORKERS,
                messages=MESSAGES,
                partitions=PARTITIONS,
                handler_s=HANDLER_S,
            )
            with run.role("workers", job) as child:
                shared = child.answer(Shared, PATIENCE_S)
        said: dict[str, object] = {
            "messages": MESSAGES,
            "handler_ms": HANDLER_S * 1000,
            "workers": f"{WORKERS} in one process with a connection each",
            "partitions": PARTITIONS,
            "options": options,
            "ideal_s": round(ideal_s, 3),
            "backlog_s": round(shared.backlog_s, 3),
            "arriving_s": round(shared.arriving_s, 3),
            "most_of_one_worker": shared.most,
            "durability": "fsync",
        }
        value = max(shared.backlog_s, shared.arriving_s) / ideal_s
        return [Sample(name=name, value=value, unit="ratio", conditions=said)]

    return measure


def _case(name: str, options: dict[str, str], ideal_s: float) -> Case:
    return Case((name,), 2 * ideal_s, _measured(name, options, ideal_s))


SHARED = _case("fair_share_shared", {"assignment": "shared"}, SHARED_S)
DEFAULT = _case("fair_share_default", {}, SHARED_S)
PARTITIONED = _case("fair_share_partitions", {"assignment": "partitions"}, ALONE_S)
