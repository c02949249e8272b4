"""How long does a group of ten take to be balanced when one more joins, and do others notice?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.members import MemberJob, Rebalanced

PARTITIONS, MEMBERS, RATE = 100, 10, 5_000
PATIENCE_S = 120.0


def measure(run: Run) -> list[Sample]:
    """From the join to a balanced assignment; and the longest silence of a partition that did not move."""
    with run.broker() as broker:
        job = MemberJob(url=broker.url, partitions=PARTITIONS, members=MEMBERS, rate=RATE)
        with run.role("members", job) as child:
            done = child.answer(Rebalanced, PATIENCE_S)
    said: dict[str, object] = {
        "partitions": PARTITIONS,
        "members": f"{MEMBERS} and one that joins, in one process with a connection each",
        "rate_msg_s": RATE,
        "messages_a_partition_every_ms": 1000 * PARTITIONS / RATE,
        "kept": done.kept,
        "moved": done.moved,
        "durability": "interval",
    }
    return [
        Sample(name="rebalance_s", value=done.seconds, unit="s", conditions=said),
        Sample(name="kept_partition_gap_ms", value=done.kept_gap_ms, unit="ms", conditions=said),
    ]


CASE = Case(("rebalance_s", "kept_partition_gap_ms"), 5.0, measure)
