"""The view `groups`: where each group stands on each partition, with its lag, as rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.core.model.group_commands import DescribeGroup, GroupInfo, GroupList, ListGroups
from tailrace.errors import NotFound
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.options import ReadOptions
from tailrace.spark.source.lifecycle import check_view, chosen, topics_seen, words_for

GROUPS = pa.schema(
    {
        "group": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "mode": pa.string(),
        "members": pa.int32(),
        "position": pa.int64(),
        "end_offset": pa.int64(),
        "lag": pa.int64(),
        "in_flight": pa.int64(),
        "waiting": pa.int64(),
        "failures": pa.int64(),
        "oldest_age_ms": pa.int64(),
    }
)
DDL = words_for(GROUPS)
ASKED_AT_ONCE = 16


class GroupsReader(DataSourceReader):
    """One row for each group, topic and partition, as of now; of some topics only when they are named."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_view(options)
        self.options = options
        self.columns = chosen(schema, GROUPS)

    def partitions(self) -> list[InputPartition]:
        """One: it is a small table."""
        link = link_to(self.options.url, self.options.timeout_s)
        return [InputPartition(topics_seen(link, self.options))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """All rows, in a worker."""
        topics = set(partition.value or ())
        link = link_to(self.options.url, self.options.timeout_s)
        rows = [row for info in described(link) for row in rows_of(info) if row["topic"] in topics]
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=GROUPS).select(self.columns)


def described(link: BrokerLink) -> Iterator[GroupInfo]:
    """Every group in detail; one that is deleted meanwhile is left out."""
    listed = link.ask(ListGroups())
    assert isinstance(listed, GroupList)
    names = [info.group for info in listed.groups]
    for start in range(0, len(names), ASKED_AT_ONCE):
        asked = [link.begin(DescribeGroup(name)) for name in names[start : start + ASKED_AT_ONCE]]
        for answer in asked:
            try:
                info, _ = answer.result()
            except NotFound:
                continue
            assert isinstance(info, GroupInfo)
            yield info


def rows_of(info: GroupInfo) -> Iterable[dict[str, Any]]:
    """The rows of a group, by topic and partition."""
    for part in sorted(info.partitions, key=lambda part: (part["topic"], part["partition"])):
        yield {
            "group": info.group,
            "mode": info.options.get("mode"),
            "members": info.member_count,
            "position": part["committed"],
            **{name: part[name] for name in GROUPS.names if name in part},
        }
