"""Frames of a slice from a real broker: whole, in order, and never silently fewer.

Covers `spark/link.py` and `spark/source/slice_frames.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tailrace import sync
from tailrace.core.model.commands import LATEST
from tailrace.errors import NotFound, TailraceError, Timeout, Unavailable
from tailrace.spark.link import BrokerLink
from tailrace.spark.source import slice_frames as fetching
from tailrace.spark.source.row_batches import row_batches
from tailrace.spark.source.slice_frames import frames_of
from tailrace.spark.source.slices import Slice
from tests.e2e.broker_process import BrokerProcess

VALUE = b"x" * 300


@pytest.fixture
def link(broker: BrokerProcess) -> Iterator[BrokerLink]:
    made = BrokerLink(broker.url, 10.0)
    yield made
    made.close()


def fill(client: sync.Client, topic: str, rounds: int = 20, rows: int = 500) -> int:
    """Frames of some hundred rows each; returns the end."""
    with client.producer(topic) as producer:
        for _ in range(rounds):
            producer.send_many([VALUE] * rows, partition=0).result(30)
    return rounds * rows


def offsets(link: BrokerLink, part: Slice, *, strict: bool = True) -> list[int]:
    found: list[int] = []
    for batch in row_batches(frames_of(link, part, fail_on_data_loss=strict), part, ["offset", "value"]):
        assert set(batch.column(1).to_pylist()) == {VALUE}
        found += batch.column(0).to_pylist()
    return found


def test_a_slice_is_read_whole_in_many_answers(link, client, topic, monkeypatch):
    name = topic(partitions=1)
    end = fill(client, name)
    assert offsets(link, Slice(name, 0, 0, end)) == list(range(end))
    monkeypatch.setattr(fetching, "FETCH_BYTES_MAX", 64 * 1024)
    for first, stop in ((0, end), (17, 18), (499, 501), (700, 9_123), (end - 1, end)):
        assert offsets(link, Slice(name, 0, first, stop)) == list(range(first, stop))


def test_what_is_appended_later_is_not_read(link, client, topic):
    name = topic(partitions=1)
    end = fill(client, name, 2)
    fill(client, name, 2)
    assert offsets(link, Slice(name, 0, 0, end)) == list(range(end))


def test_deleted_offsets_are_named_or_left_out(link, client, topic, caplog):
    name = topic(partitions=1)
    end = fill(client, name, 4)
    client.admin().trim_topic(name, 0, 700)
    with pytest.raises(NotFound, match=rf"{name}/0: offsets 100 to 699 were deleted.*fail_on_data_loss"):
        offsets(link, Slice(name, 0, 100, end))
    with pytest.raises(NotFound, match="offsets 100 to 149 were deleted"):
        offsets(link, Slice(name, 0, 100, 150))
    with caplog.at_level(logging.WARNING, "tailrace.spark"):
        assert offsets(link, Slice(name, 0, 100, end), strict=False) == list(range(700, end))
        assert offsets(link, Slice(name, 0, 100, 150), strict=False) == []
    assert f"{name}/0: offsets 100 to 699 were deleted" in caplog.text


def test_a_log_that_ends_too_early_is_an_error(link, client, topic, monkeypatch):
    """A topic that was deleted and made again, or a broker that lost what it never promised to keep."""
    monkeypatch.setattr(fetching, "WAIT_MS_MAX", 50)
    name = topic(partitions=1)
    end = fill(client, name, 2)
    for first in (0, end, end + 5):
        with pytest.raises(
            NotFound, match=rf"{name}/0: offsets {max(first, end)} to {end + 9} are not there"
        ):
            offsets(link, Slice(name, 0, first, end + 10))
        found = offsets(link, Slice(name, 0, first, end + 10), strict=False)
        assert found == list(range(first, end))


def test_a_topic_that_is_gone_is_named(link, client, topic):
    name = topic(partitions=1)
    fill(client, name, 1)
    client.admin().delete_topic(name)
    with pytest.raises(TailraceError, match=f"{name}/0 from 0 to 10, at offset 0"):
        offsets(link, Slice(name, 0, 0, 10))


def test_an_unreachable_broker_is_named_in_time():
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        BrokerLink("tailrace://127.0.0.1:9", 1.0)
    assert time.monotonic() - started < 5


def test_a_broker_that_dies_is_waited_for_and_then_named(own_broker, monkeypatch):
    monkeypatch.setattr(fetching, "FETCH_BYTES_MAX", 64 * 1024)
    with sync.connect(own_broker.url) as client:
        client.admin().create_topic("t", partitions=1, durability="interval")
        end = fill(client, "t")
    own_broker.stop()
    own_broker.start()
    link = BrokerLink(own_broker.url, 30.0)
    part = Slice("t", 0, 0, end)
    batches = row_batches(frames_of(link, part), part, ["offset"])
    rows = next(batches).num_rows
    own_broker.kill()
    own_broker.start()
    assert rows + sum(batch.num_rows for batch in batches) == end

    link.timeout_s = 2.0
    batches = row_batches(frames_of(link, part), part, ["offset"])
    next(batches)
    own_broker.kill()
    started = time.monotonic()
    with pytest.raises(TailraceError, match=rf"t/0 from 0 to {end}, at offset \d+: .*127\.0\.0\.1"):
        list(batches)
    assert time.monotonic() - started < 10

    own_broker.start()
    link.timeout_s = 30.0
    assert link.offsets("t", LATEST) == [end]
    os.kill(own_broker.pid, signal.SIGSTOP)
    try:
        link.timeout_s = 1.0
        with pytest.raises(Timeout, match=rf"t/0 from 0 to {end}, at offset 0: .* did not answer within 1 s"):
            next(frames_of(link, part))
    finally:
        os.kill(own_broker.pid, signal.SIGCONT)
    link.close()
