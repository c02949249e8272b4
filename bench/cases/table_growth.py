"""How long does one put stand still while the tables of dedup ids and keys grow to two million entries?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.tables import BATCH, Stall, TableJob

ENTRIES = 2_000_000
PATIENCE_S = 120.0
NOMINAL_S = 20.0


def measure(run: Run) -> list[Sample]:
    """The worst put of a batch to either table, in CPU time: what another process takes is not a stall."""
    job = TableJob(run.scaled(ENTRIES))
    with run.role("tables", job) as child:
        stall = child.answer(Stall, PATIENCE_S)
    said: dict[str, object] = {
        "entries": job.entries,
        "batch": BATCH,
        "measured": "worst put, CPU time of the thread",
        "dedup_ms": round(stall.dedup_ms, 2),
        "keys_ms": round(stall.keys_ms, 2),
        "worst_wall_ms": round(max(stall.dedup_wall_ms, stall.keys_wall_ms), 2),
    }
    worst = max(stall.dedup_ms, stall.keys_ms)
    return [Sample(name="table_growth_stall_ms", value=worst, unit="ms", conditions=said)]


CASE = Case(("table_growth_stall_ms",), NOMINAL_S, measure)
