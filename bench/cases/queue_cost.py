"""Does a delivery cost the broker more with a long backlog, with stuck messages, with many groups?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.costs import AHEAD, CostJob, Costs

LARGE = 10_000_000
SMALL = 10_000
CONSUMED = 1_000_000
STUCK_EVERY = 1_000
GROUPS = 10
NOMINAL_S = 60.0
PATIENCE_S = 300.0


def measure(run: Run) -> list[Sample]:
    """CPU a message from a backlog of 10⁷ over that from 10⁴; with stuck messages; with ten groups."""
    with run.broker() as broker:
        job = CostJob(
            url=broker.url,
            pid=broker.pid,
            small=SMALL,
            large=run.scaled(LARGE),
            consumed=run.scaled(CONSUMED),
            stuck_every=STUCK_EVERY,
            groups=GROUPS,
        )
        with run.role("costs", job) as child:
            costs = child.answer(Costs, PATIENCE_S)
    said: dict[str, object] = {
        "payload_bytes": 100,
        "batch": 500,
        "lease": AHEAD["batch_size"],
        "durability": "interval",
        "partitions": 1,
        "backlog": job.large,
        "over_backlog": SMALL,
        "messages": job.consumed,
        "cpu_us_small": round(costs.small * 1e6, 3),
    }
    return [
        Sample(
            name=name,
            value=cost / costs.small,
            unit="ratio",
            conditions={**said, "cpu_us": round(cost * 1e6, 3), **more},
        )
        for name, cost, more in (
            ("queue_cost_flatness", costs.large, {}),
            ("queue_cost_flatness_stuck", costs.stuck, {"stuck": costs.stuck_messages}),
            ("queue_cost_flatness_groups", costs.groups, {"groups": GROUPS}),
        )
    ]


CASE = Case(
    ("queue_cost_flatness", "queue_cost_flatness_stuck", "queue_cost_flatness_groups"), NOMINAL_S, measure
)
