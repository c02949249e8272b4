"""Commands in and replies out: everything that a client can ask of a broker, as frozen values.

The same structs are the headers of the native protocol, so a request is decoded once, into the value that the
core decides on. Bodies (Arrow batches on publish, raw frames on fetch) travel beside the values.
"""

from __future__ import annotations

from typing import Any

from tailrace.core.model import access_commands as access
from tailrace.core.model import damage_commands as damage
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as delivery
from tailrace.core.model.identifiers import Command, Refusal


class Ping(Command, frozen=True, tag="ping"):
    """Keep a connection alive, and measure the round trip."""


class CreateTopic(Command, frozen=True, tag="create_topic"):
    """Create a topic; all problems with its options are reported at once."""

    name: str
    options: dict[str, Any] = {}
    if_missing: bool = False


class AlterTopic(Command, frozen=True, tag="alter_topic"):
    """Change options of a topic; partitions only grow."""

    name: str
    options: dict[str, Any]


class DeleteTopic(Command, frozen=True, tag="delete_topic"):
    """Delete a topic and its data."""

    name: str


class ListTopics(Command, frozen=True, tag="list_topics"):
    """List all topics with their options; internal ones on request."""

    prefix: str = ""
    internal: bool = False


class DescribeTopic(Command, frozen=True, tag="describe_topic"):
    """Describe one topic, with the state of its partitions."""

    name: str


class TrimTopic(Command, frozen=True, tag="trim_topic"):
    """Drop all messages of a partition below an offset."""

    topic: str
    partition: int
    offset: int


class Publish(Command, frozen=True, tag="publish"):
    """Append the batch in the body to one partition, whole or not at all.

    `columns` are the optional columns of the body, `crc` is its CRC32C. With producer id 0, publishing is not
    idempotent. `expected_sequence` N >= 1: the first message takes exactly N. `expected_key_sequences` has
    one number per message.
    """

    topic: str
    partition: int
    columns: int
    crc: int
    producer_id: int = 0
    producer_epoch: int = 0
    producer_sequence: int = 0
    expected_sequence: int = 0
    expected_key_sequences: list[int] | None = None
    acks: str | None = None


class ClaimProducer(Command, frozen=True, tag="claim_producer"):
    """Take over a named producer on one partition: the epoch grows, and older epochs are fenced.

    With `epoch`, continue from that epoch: refused as `Fenced` if the producer was claimed again since.
    """

    topic: str
    partition: int
    producer_id: int
    epoch: int | None = None


class Fetch(Command, frozen=True, tag="fetch"):
    """Read committed frames from each (partition, offset); wait up to `wait_ms` while there are none."""

    topic: str
    positions: list[tuple[int, int]]
    bytes_max: int = 1_048_576
    wait_ms: int = 0


class FindOffsets(Command, frozen=True, tag="find_offsets"):
    """Find the offset of a point in each partition: a time (`timestamp_us` >= 0), EARLIEST or LATEST."""

    topic: str
    timestamp_us: int


class ReadKey(Command, frozen=True, tag="read_key"):
    """Read messages of one key, of a topic with `key_index`: at most `limit` of the versions above `since`
    and up to `until` (0: the newest), from the oldest on or, with `newest_first`, from the newest. The
    version of a message is its number among the messages of its key, from 1."""

    topic: str
    partition: int
    key: bytes
    since: int = 0
    until: int = 0
    limit: int = 1000
    newest_first: bool = False
    bytes_max: int = 1_048_576


EARLIEST = -2
LATEST = -1

Request = (
    Ping
    | CreateTopic
    | AlterTopic
    | DeleteTopic
    | ListTopics
    | DescribeTopic
    | TrimTopic
    | Publish
    | ClaimProducer
    | Fetch
    | FindOffsets
    | ReadKey
    | access.AccessRequest
    | damage.DamageRequest
    | delivery.DeliveryRequest
    | groups.GroupRequest
)


class Pong(Command, frozen=True, tag="pong"):
    """The answer to `Ping`."""


class Done(Command, frozen=True, tag="done"):
    """The command is carried out and durable."""


class TopicInfo(Command, frozen=True, tag="topic"):
    """A topic as the catalog has it. `partitions` has a dict for each partition, with offsets, bytes and
    faults, on describe only."""

    name: str
    id: int
    options: dict[str, Any]
    partitions: list[dict[str, Any]] = []
    created: bool = False


class TopicList(Command, frozen=True, tag="topics"):
    """Topics, sorted by name."""

    topics: list[TopicInfo]


class Published(Command, frozen=True, tag="published"):
    """The batch is stored as durably as the topic promises. `duplicates` has (row, first offset) of messages
    that were stored before. `scheduled` has the rows that are delayed and have no offset yet. All other rows
    have consecutive offsets from `base_offset`, which is -1 if all rows are delayed."""

    base_offset: int
    append_time_us: int
    duplicates: list[tuple[int, int]] | None = None
    scheduled: list[int] | None = None


class Claimed(Command, frozen=True, tag="claimed"):
    """The epoch to use from now on; its first batch has sequence 0."""

    epoch: int


class Fetched(Command, frozen=True, tag="fetched"):
    """The slices of the body, in order: (partition, bytes, start offset, committed end)."""

    slices: list[tuple[int, int, int, int]]


class Offsets(Command, frozen=True, tag="offsets"):
    """One offset per partition."""

    offsets: list[int]


class KeyRead(Command, frozen=True, tag="key_read"):
    """Messages of one key in a frame, by ascending offset: `count` consecutive versions from `version`.
    `total` is the newest version of the key; `more`: the request has further messages."""

    version: int
    count: int
    total: int
    more: bool


Reply = (
    Pong
    | Done
    | TopicInfo
    | TopicList
    | Published
    | Claimed
    | Fetched
    | Offsets
    | KeyRead
    | access.AccessReply
    | damage.DamageReply
    | delivery.DeliveryReply
    | groups.GroupReply
    | Refusal
)
