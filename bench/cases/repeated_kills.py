"""How long does a start take after a dozen kills, with a queue at work each time?"""

from __future__ import annotations

import asyncio

import tailrace
from bench.harness import Case, Run
from bench.load import MB
from bench.results import Sample
from bench.roles.churn import TOPIC, ChurnJob

PARTITIONS, PARTITION_BYTES, KILLS = 8, 7 * MB, 12
RATE = 10_000
LIFE_S_MAX = 120.0
POLL_S = 0.05
NOMINAL_S = 60.0


def measure(run: Run) -> list[Sample]:
    """Kill the broker whenever its logs have grown by a twelfth; then start it once more."""
    whole = run.scaled(PARTITIONS * PARTITION_BYTES)
    startups: list[float] = []
    held = 0
    for kill in range(1, KILLS + 1):
        with run.broker(keep=True) as broker:
            startups.append(broker.startup_s)
            job = ChurnJob(
                url=broker.url, rate=RATE, seconds=LIFE_S_MAX, partitions=PARTITIONS, delay_s_max=10.0
            )
            with run.role("churn", job) as load:
                load.answer(dict, LIFE_S_MAX)
                held = asyncio.run(_until_grown(broker.url, whole * kill // KILLS))
                broker.kill()
                load.kill()
    with run.broker() as broker:
        startups.append(broker.startup_s)
    said: dict[str, object] = {
        "partitions": PARTITIONS,
        "kills": KILLS,
        "log_mb": round(held / MB, 1),
        "rate_msg_s": RATE,
        "ended": "SIGKILL under load",
        "durability": "interval",
        "page_cache": "warm",
        "starts_s": [round(value, 2) for value in startups],
    }
    return [Sample(name="restart_after_kills_s", value=startups[-1], unit="s", conditions=said)]


async def _until_grown(url: str, wanted: int) -> int:
    """Wait until the logs of the topic hold so many bytes."""
    async with tailrace.connect(url) as client, asyncio.timeout(LIFE_S_MAX):
        while True:
            topic = await client.admin().describe_topic(TOPIC)
            held = sum(int(row["bytes"]) for row in topic.partitions)
            if held >= wanted:
                return held
            await asyncio.sleep(POLL_S)


CASE = Case(("restart_after_kills_s",), NOMINAL_S, measure)
