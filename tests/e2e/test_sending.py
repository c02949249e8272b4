"""Sending in different ways at once: per partition, everything stands in the order in which it was sent."""

import asyncio
from pathlib import Path

import pyarrow as pa

import tailrace


def test_send_many_and_tables_do_not_overtake_what_was_sent_before(tmp_path: Path) -> None:
    async def run() -> None:
        async with tailrace.connect(f"embedded:{tmp_path}") as client:
            await client.admin().create_topic("t", partitions=3)
            async with client.producer("t") as producer:
                # The message without a key opens a batch elsewhere; those of partition 2 are not the latest.
                for turn in range(5):
                    await producer.send(b"elsewhere")
                    await producer.send(b"%d-0" % turn, partition=2)
                    await producer.send_many([b"%d-1" % turn, b"%d-2" % turn], partition=2)
                    await producer.send(b"%d-3" % turn, partition=2)
                    await producer.send_table(pa.table({"value": [b"%d-4" % turn]}), partition=2)
                    await producer.send(b"%d-5" % turn, partition=2)
            async with client.reader("t", start="earliest", partitions=[2], stop_at_end=True) as reader:
                found = [m.value async for m in reader if m.value != b"elsewhere"]
        assert found == [b"%d-%d" % (turn, at) for turn in range(5) for at in range(6)]

    asyncio.run(run())
