"""Every example on Spark, run against a real broker, some of them twice: they go on where they ended."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tailrace import sync
from tests.e2e.broker_process import SRC, BrokerProcess

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "examples" / "spark"
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def example(name: str, client: sync.Client, *topics: str) -> ModuleType:
    """An example as a module, with its topics."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for topic in topics:
        client.admin().create_topic(getattr(module, topic), partitions=2, durability="interval")
    return module


def values(client: sync.Client, topic: str) -> list[Any]:
    """The messages of a topic, decoded."""
    offsets = client.admin().describe_topic(topic).partitions
    count = sum(row["end_offset"] - row["start_offset"] for row in offsets)
    with client.reader(topic, start="earliest") as reader:
        return [json.loads(message.value or b"") for _, message in zip(range(count), reader, strict=False)]


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'example("{path.stem}"' in text, path.name


def test_totals_of_minutes(spark: Any, broker: BrokerProcess, client: sync.Client, tmp_path: Path) -> None:
    totals = example("windowed_totals", client, "SALES", "TOTALS")
    totals.publish(client, NOON, minutes=10)
    totals.run(spark, broker.url, str(tmp_path))
    found = sorted(
        (row["minute"], row["shop"], row["sales"], row["cents"]) for row in values(client, totals.TOTALS)
    )
    expected = [
        (f"2026-01-31T12:{minute:02}:00.000Z", shop, 6, 6 * cents)
        for minute in range(8)
        for shop, cents in (("north", 100), ("south", 250))
    ]
    # The last sale is at 12:09:50; the watermark is a minute behind it, in the minute that begins at 12:08.
    assert found == expected


def test_orders_joined_with_payments(
    spark: Any, broker: BrokerProcess, client: sync.Client, tmp_path: Path
) -> None:
    join = example("stream_join", client, "ORDERS", "PAYMENTS", "PAID")
    join.publish(client, NOON, first=1, count=20)
    join.run(spark, broker.url, str(tmp_path))
    found = sorted((row["order"], row["cents"], row["by"]) for row in values(client, join.PAID))
    assert found == [(number, 100 * number, "card") for number in range(1, 21) if number % 3]


def test_rows_that_break_a_rule(
    spark: Any, broker: BrokerProcess, client: sync.Client, tmp_path: Path
) -> None:
    check = example("quality_check", client, "READINGS", "CLEAN", "REJECTED")
    for runs in (1, 2):
        check.publish(client)
        check.run(spark, broker.url, str(tmp_path))
        assert check.report(spark, broker.url) == {
            "passed": 3 * runs,
            "rejected": {"decodable": runs, "has a sensor": runs, "is possible": runs},
        }
    assert {row["sensor"] for row in values(client, check.CLEAN)} == {"s0", "s1", "s2"}
    with client.reader(check.REJECTED, start="earliest") as reader:
        letter = next(iter(reader))
    assert dict(letter.headers)["origin"].startswith(b"example-readings/")


def test_clicks_once(spark: Any, broker: BrokerProcess, client: sync.Client, tmp_path: Path) -> None:
    dedupe = example("dedupe", client, "CLICKS", "ONCE")
    dedupe.publish(client, NOON, first=0, count=10)
    dedupe.run(spark, broker.url, str(tmp_path))
    # Half of them again, which came in an earlier run, and some that are new.
    dedupe.publish(client, NOON + timedelta(minutes=1), first=5, count=10)
    dedupe.run(spark, broker.url, str(tmp_path))
    assert sorted(row["click"] for row in values(client, dedupe.ONCE)) == list(range(15))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_as_a_program(name: str, own_broker: BrokerProcess, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), own_broker.url],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
