"""Random messages with every field, and the rows that a reader has to give for them."""

from __future__ import annotations

import random
import time
from typing import Any

import pyarrow as pa

from tailrace.core.model.identifiers import PRIORITY_DEFAULT
from tailrace.format.tabular import POSITIONED
from tailrace.sync import Client

BLOCK = 50
HOUR_US = 3_600_000_000


def publish_random(
    client: Client, topic: str, count: int, *, seed: int = 1, value_bytes_max: int = 200
) -> pa.Table:
    """Publish so many messages; returns their rows as `POSITIONED`, by partition and offset.

    They come in blocks that have some columns or have them not, as batches do. Delays are over already: what
    is still to come has no offset.
    """
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    with client.producer(topic) as producer:
        while len(rows) < count:
            has = {
                name
                for name in ("key", "headers", "priority", "deliver_at", "expires_at")
                if draw.random() < 0.5
            }
            block = [_message(draw, has, value_bytes_max) for _ in range(min(BLOCK, count - len(rows)))]
            receipts = [producer.send(**message) for message in block]
            producer.flush()
            for message, receipt in zip(block, receipts, strict=True):
                result = receipt.result(30)
                assert result.offset is not None, message
                rows.append(
                    {
                        "priority": PRIORITY_DEFAULT,
                        **message,
                        "headers": list(message["headers"].items()) if message.get("headers") else None,
                        "topic": topic,
                        "partition": result.partition,
                        "offset": result.offset,
                        "sequence": result.offset + 1,
                        "id": result.id_bytes,
                        "append_time": result.append_time_us,
                    }
                )
    rows.sort(key=lambda row: (row["partition"], row["offset"]))
    return pa.Table.from_pylist(rows, schema=POSITIONED)


def _message(draw: random.Random, has: set[str], value_bytes_max: int) -> dict[str, Any]:
    now_us = time.time_ns() // 1000
    message: dict[str, Any] = {
        "value": draw.randbytes(draw.choice((0, 1, draw.randrange(value_bytes_max + 1)))),
        "timestamp": now_us - draw.randrange(HOUR_US),
    }
    if "key" in has and draw.random() < 0.8:
        message["key"] = draw.choice((b"", b"\0\xff", b"key-%d" % draw.randrange(20)))
        if draw.random() < 0.1:
            message["value"] = None
    if "headers" in has and draw.random() < 0.8:
        message["headers"] = {
            f"h{number}": draw.randbytes(draw.randrange(5)) for number in range(draw.randrange(1, 4))
        }
    if "priority" in has:
        message["priority"] = draw.randrange(5)
    if "deliver_at" in has and draw.random() < 0.5:
        message["deliver_at"] = now_us - draw.randrange(1, HOUR_US)
    if "expires_at" in has and draw.random() < 0.5:
        message["expires_at"] = now_us + HOUR_US + draw.randrange(HOUR_US)
    return message
