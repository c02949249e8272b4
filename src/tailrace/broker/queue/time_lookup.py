"""Look up an offset by time: the first message whose timestamp is at or after a time."""

from __future__ import annotations

import numpy as np

from tailrace.format import batch, frame
from tailrace.ports import PartitionLog


def locate(log: PartitionLog, start: int, end: int, timestamp_us: int) -> int:
    """The first committed offset whose timestamp, as a running maximum, is at or after a time; else `end`."""
    base = log.find_time(timestamp_us)
    if base is None or base >= end:
        return end
    for part in log.read(base, end, 1):
        for header, body in frame.walk(part, check=False):
            if header.kind == frame.DATA and header.timestamp_max_us >= timestamp_us:
                times = batch.decode(body, header.columns).column("timestamp").cast("int64")
                row = int(np.argmax(np.asarray(times) >= timestamp_us))
                return max(start, header.base_offset + row)
    return end
