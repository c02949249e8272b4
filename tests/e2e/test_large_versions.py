"""Versions of atomic writes larger than memory should hold: mapped, not copied, and whole after a kill."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tailrace.core.model.commands import CreateTopic
from tailrace.core.model.queue_commands import DecideStaged, StagedDecision, StageRows
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tailrace.spark.link import BrokerLink
from tests.e2e.broker_process import BrokerProcess, eventually

ROWS = 5_000
BATCHES = 90
GROWTH_MB = 32
"""What the broker's own memory may grow by while it applies a hundred megabytes."""


def stage(link: BrokerLink, attempt: str) -> DecideStaged:
    """A hundred megabytes; the request that decides them."""
    now_us = time.time_ns() // 1000
    ids = arrow.make_ids(ROWS, now_us // 1000, 1, 1)
    columns, body = arrow.encode([random.randbytes(200)] * ROWS, ids=ids, timestamps=now_us)
    crc, window = crc32c(body), []
    for number in range(BATCHES):
        window.append(link.begin(StageRows("t", 0, "w", attempt, columns, crc, number), body))
        if len(window) == 8:
            window.pop(0).result()
    for answer in window:
        answer.result()
    return DecideStaged("w", 1, [("t", 0, attempt)], [BATCHES])


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_large_version_takes_little_memory(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        link = BrokerLink(broker.url, 120)
        link.ask(CreateTopic("t", {"partitions": 1}))
        request = stage(link, "x")
        before = broker.anonymous_mb()
        decided = link.begin(request)
        most = before
        while not decided.done():
            most = max(most, broker.anonymous_mb())
            time.sleep(0.01)  # So often is looked at it.
        reply, _ = decided.result()
        assert isinstance(reply, StagedDecision)
        assert reply.applied
        assert most - before < GROWTH_MB
        assert link.offsets("t", -1) == [ROWS * BATCHES]
        link.close()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3, 1.0])
def test_a_large_version_is_whole_after_a_kill(tmp_path: Path, delay_s: float) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        link = BrokerLink(broker.url, 120)
        link.ask(CreateTopic("t", {"partitions": 1}))
        request = stage(link, "x")
        decided = link.begin(request)
        time.sleep(delay_s)  # Somewhere on its way.
        broker.restart()
        ends = link.offsets("t", -1)
        assert ends[0] in (0, ROWS * BATCHES)
        assert decided.result()[0].won  # type: ignore[union-attr]
        eventually(lambda: bool(link.ask(request).applied), "the version is applied", 60)
        assert link.offsets("t", -1) == [ROWS * BATCHES]
        link.close()
