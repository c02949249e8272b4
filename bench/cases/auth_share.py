"""How much of its throughput does a broker keep that knows users and 1,000 rules?

Two brokers run side by side and are driven in turn, so that both see the same machine; the figure is the
worse of two medians over the rounds: batches from a producer to a reader, and single publishes from 50
connections.
"""

from __future__ import annotations

import statistics

import msgspec

from bench.harness import Case, Run
from bench.identified import Known, address, introduce, showing
from bench.load import Load
from bench.processes import Broker
from bench.results import Sample, significant
from bench.roles.connections import ConnectionJob, Spent

ROUNDS = 5
RULES = 1_000
CONNECTIONS = 50
PATIENCE_S = 60.0


def measure(run: Run) -> list[Sample]:
    """Rounds of both kinds, the two brokers in turn."""
    batched: list[tuple[float, float]] = []
    single: list[tuple[Spent, Spent]] = []
    with run.broker("open") as open_broker, run.broker("known") as known_broker:
        known = introduce(known_broker, rules=RULES)
        for number in range(ROUNDS):
            # Who begins changes from round to round.
            order = (False, True) if number % 2 else (True, False)
            rates = {who: _batched(run, known_broker if who else open_broker, known, number) for who in order}
            batched.append((rates[False], rates[True]))
            spent = {who: _single(run, known_broker if who else open_broker, known, who) for who in order}
            single.append((spent[False], spent[True]))
    batched_share = statistics.median(with_ / without for without, with_ in batched)
    single_share = statistics.median(_rate(with_) / _rate(without) for without, with_ in single)
    said: dict[str, object] = {
        "rules": RULES,
        "rounds": ROUNDS,
        "payload_bytes": 100,
        "durability": "interval",
        "partitions": 1,
        "batched_share": significant(batched_share),
        "single_share": significant(single_share),
        "batched_msg_s": [[round(one) for one in pair] for pair in batched],
        "single_msg_s": [[round(_rate(one)) for one in pair] for pair in single],
        "single_cpu_us": [[round(one.cpu_us, 2) for one in pair] for pair in single],
        "single_connections": CONNECTIONS,
    }
    value = min(batched_share, single_share)
    return [Sample(name="auth_share", value=value, unit="ratio", conditions=said)]


def _rate(spent: Spent) -> float:
    return spent.requests / spent.seconds


def _batched(run: Run, broker: Broker, known: Known, number: int) -> float:
    load = Load(
        mode="send_many",
        reading="batches",
        value_bytes=100,
        seconds=run.seconds / ROUNDS,
        bytes_max=run.bytes_max // (4 * ROUNDS),
    )
    with showing(token=known.worker):
        return run.drive(broker, load, f"bench-{number}").received.rate


def _single(run: Run, broker: Broker, known: Known, shown: bool) -> Spent:
    job = ConnectionJob(
        task="publish",
        address=address(broker.url),
        pid=broker.pid,
        seconds=run.seconds / ROUNDS,
        connections=CONNECTIONS,
    )
    if shown:
        job = msgspec.structs.replace(job, token=known.worker)
    with run.role("connections", job) as child:
        return child.answer(Spent, PATIENCE_S)


CASE = Case(("auth_share",), 15.0, measure)
