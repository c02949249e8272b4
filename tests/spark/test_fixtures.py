"""The fixtures: random messages come back from a plain reader as the rows they are said to be."""

import pyarrow as pa

from tailrace.format.tabular import POSITIONED
from tailrace.sync import Client
from tests.spark.conftest import MakeTopic
from tests.spark.random_messages import publish_random


def test_random_messages_are_the_rows_of_a_reader(client: Client, topic: MakeTopic) -> None:
    name = topic(partitions=3)
    expected = publish_random(client, name, 1000, value_bytes_max=3000)
    with client.reader(name, start="earliest", stop_at_end=True) as reader:
        found = pa.Table.from_batches(reader.batches(), schema=POSITIONED)
    assert found.sort_by([("partition", "ascending"), ("offset", "ascending")]).equals(expected)
    for column in ("key", "value", "headers", "deliver_at", "expires_at"):
        assert 0 < expected.column(column).null_count < 1000, column
    assert expected.column("priority").null_count == 0
    assert len(expected.column("priority").unique()) == 5
