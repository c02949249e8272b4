"""What the logs of a simulated broker hold in the end, read from the logs themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tailrace.broker.engine import Engine
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.sim.delivery_history import Position, require

Rows = dict[int, tuple[bytes, Any]]
"""Value and headers, by offset."""


def rows_in(engine: Engine, topic: str, partition: int) -> Rows:
    """Everything that one partition holds and has not trimmed."""
    runtime = engine.topics.get(topic).runtimes[partition]
    runtime.state.check()
    rows: Rows = {}
    for part in runtime.log.read(runtime.state.start_offset, runtime.end_offset, 1 << 40):
        for header, body in frame.walk(part):
            table = arrow.decode(body, header.columns)
            values = table.column("value").to_pylist()
            headers = [None] * len(values)
            if "headers" in table.schema.names:
                headers = table.column("headers").to_pylist()
            for at, row in enumerate(zip(values, headers, strict=True), header.base_offset):
                if at >= runtime.state.start_offset:
                    rows[at] = row
    return rows


def reasons_of(
    rows: Rows, log: dict[int, dict[int, bytes]], dead: dict[str, dict[Position, str]], lives: dict[str, int]
) -> None:
    """Note the dead letters of one partition by group and place: each is what it was, and is there once for
    each of its lives."""
    deaths: Counter[tuple[str, Position]] = Counter()
    for value, headers in rows.values():
        told = {name: bytes(text).decode() for name, text in headers}
        group = told["tailrace-group"]
        place = int(told["tailrace-origin-partition"]), int(told["tailrace-origin-offset"])
        known = log[place[0]].get(place[1], value)
        require(known.startswith(value), f"the dead letter of {place} is another message than {known!r}")
        deaths[group, place] += 1
        often = deaths[group, place] > lives[group]
        require(not often, f"{group}: the dead letter of {place} is there too often")
        dead[group][place] = told["tailrace-reason"]
