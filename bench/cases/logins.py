"""How many clients a second can log in, and do those that are there notice when others try passwords?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.identified import PASSWORD, WORKER, Known, address, introduce
from bench.load import Latency
from bench.processes import Broker
from bench.results import Sample, significant
from bench.roles.connections import ConnectionJob
from bench.roles.logins import LoggedIn, LoginJob
from bench.roles.probes import ProbeJob

AT_ONCE = 16
HAMMERS = 12
PROBES = 10
PROBE_RATE = 1_000
RULES = 100
PATIENCE_S = 120.0


def tokens(run: Run) -> list[Sample]:
    """A new connection and a token each, answered who it is, then closed."""
    with run.broker() as broker:
        known = introduce(broker, rules=RULES)
        job = LoginJob(
            address=address(broker.url),
            pid=broker.pid,
            seconds=run.seconds,
            at_once=AT_ONCE,
            user=WORKER,
            token=known.worker,
        )
        with run.role("logins", job) as child:
            child.answer(dict, PATIENCE_S)
            done = child.answer(LoggedIn, PATIENCE_S)
    said: dict[str, object] = {
        "at_once": AT_ONCE,
        "proof": "token",
        "answered": done.answered,
        "refused": done.refused,
        "broker_cpu_us": round(done.broker_cpu_s / done.answered * 1e6, 1),
        "client_cpu_us": round(done.own_cpu_s / done.answered * 1e6, 1),
    }
    value = done.answered / done.seconds
    return [Sample(name="logins_s", value=value, unit="1/s", conditions=said)]


def passwords(run: Run) -> list[Sample]:
    """p99 of steady single publishes while others log in with passwords as fast as they are let, over the
    same without them."""
    with run.broker() as broker:
        known = introduce(broker, rules=RULES)
        before = _probe(run, broker, known)
        hammer = LoginJob(
            address=address(broker.url),
            pid=broker.pid,
            seconds=run.seconds + 3.0,
            at_once=HAMMERS,
            user=WORKER,
            password=PASSWORD,
        )
        with run.role("logins", hammer) as child:
            child.answer(dict, PATIENCE_S)
            during = _probe(run, broker, known)
            done = child.answer(LoggedIn, PATIENCE_S)
        after = _probe(run, broker, known)
    quiet_ms = (before.p99_ms + after.p99_ms) / 2
    said: dict[str, object] = {
        "connections": PROBES,
        "rate_msg_s": PROBE_RATE,
        "payload_bytes": 100,
        "durability": "interval",
        "hammers": HAMMERS,
        "quiet_p99_ms": [significant(before.p99_ms), significant(after.p99_ms)],
        "hammered_p99_ms": significant(during.p99_ms),
        "quiet_p50_ms": significant(before.p50_ms),
        "hammered_p50_ms": significant(during.p50_ms),
        "hammered_max_ms": significant(during.max_ms),
        "password_logins_s": significant(done.answered / done.seconds),
        "password_refusals_s": significant(done.refused / done.seconds),
    }
    value = during.p99_ms / quiet_ms
    return [Sample(name="login_p99_growth", value=value, unit="ratio", conditions=said)]


def _probe(run: Run, broker: Broker, known: Known) -> Latency:
    connection = ConnectionJob(
        task="publish",
        address=address(broker.url),
        pid=broker.pid,
        seconds=run.seconds,
        connections=PROBES,
        token=known.worker,
    )
    with run.role("probes", ProbeJob(connection=connection, rate=PROBE_RATE)) as child:
        child.answer(dict, PATIENCE_S)
        return child.answer(Latency, PATIENCE_S)


TOKENS = Case(("logins_s",), 4.0, tokens)
PASSWORDS = Case(("login_p99_growth",), 6.0, passwords)
