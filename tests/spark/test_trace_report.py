"""The page of traces: whole, readable without a network, and harmless whatever users have sent.

Covers `spark/pipelines/trace_report.py`.
"""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import InvalidRequest
from tailrace.spark.pipelines import options_of, parse_options, pipeline, traces
from tailrace.spark.pipelines.trace_report import (
    STAGES,
    Bar,
    Cause,
    ConsumerTimes,
    Moment,
    Report,
    StageTimes,
    StuckKey,
    bucket_low_ms,
    in_order,
    page,
    with_slow_ones,
)


def consumer(member: str, p95_ms: float, group: str = "g") -> ConsumerTimes:
    return ConsumerTimes(group, member, 10, 10, 0, 0, 0, p95_ms / 2, p95_ms, p95_ms)


def report(**fields: Any) -> Report:
    known: dict[str, Any] = {
        "topic": "orders",
        "as_of": "2026-01-31T12:00:00+00:00",
        "span": "a while",
        "events": 3,
        "messages": 1,
        "stages": [StageTimes("g", STAGES[1], 1, 1.5, 1.0, 2.0, 3.0, 4.0, 1234.5)],
        "bars": [Bar("g", STAGES[1], at, at + 2) for at in range(-1, 20, 4)],
        "moments": [Moment(1000.0 + at, at, 5, 1) for at in range(10)],
        "causes": [Cause("g", "nacked", "boom #", 3, 2, "orders/0/7")],
        "consumers": [consumer("m", 5.0)],
        "stuck": [StuckKey("g", "orders", 0, "k", 7, 100.0, 3, 3, 4, "boom")],
    }
    return Report(**{**known, **fields})


class Outline(HTMLParser):
    """Tags that are open, all that were there, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_shows_everything_and_needs_no_network() -> None:
    outline = Outline(page(report()))
    assert outline.tags.count("svg") == 2
    assert outline.tags.count("table") == 4
    assert outline.tags.count("rect") == 21, "empty buckets are shown, too"
    assert outline.links == []
    assert "script" not in outline.tags
    for word in ("orders", "boom #", "1,234.5", "Stuck keys", "appended to delivered, group g"):
        assert word in outline.words


def test_an_empty_report() -> None:
    empty = report(stages=[], bars=[], moments=[], causes=[], consumers=[], stuck=[])
    outline = Outline(page(empty))
    assert "table" not in outline.tags
    assert outline.words.count("None.") == 4


@given(st.text(max_size=30))
def test_what_users_sent_is_only_text(text: str) -> None:
    plain = Outline(page(report())).tags
    nasty = report(
        topic=text,
        causes=[Cause(text, "nacked", text, 1, 1, text)],
        stuck=[StuckKey(text, text, 0, text, 0, 1.0, 1, 1, 0, text)],
    )
    assert Outline(page(nasty)).tags == plain


def test_scripts_do_not_run() -> None:
    text = page(report(topic='<script>alert("x")</script>', bars=[Bar('"><script>', STAGES[1], 1, 1)]))
    assert "<script" not in text


def test_buckets_grow() -> None:
    lows = [bucket_low_ms(bucket) for bucket in range(-1, 6)]
    assert lows[:2] == [0.0, 1.0]
    assert lows == sorted(set(lows))
    assert math.isclose(lows[3], 2.0)


def test_who_is_slow() -> None:
    found = with_slow_ones(
        [consumer("a", 150), consumer("b", 160), consumer("c", 400), consumer("alone", 9e9, "h")]
    )
    assert [one.member for one in found if one.slow] == ["c"]
    assert [one.member for one in found] == ["c", "b", "a", "alone"]
    quick = with_slow_ones([consumer("a", 1), consumer("b", 50)])
    assert not any(one.slow for one in quick), "50 ms are not slow"


def test_stages_come_in_the_order_of_a_life() -> None:
    found = in_order(
        StageTimes(group, stage, 1, 1, 1, 1, 1, 1, 1) for stage in sorted(STAGES) for group in "ba"
    )
    assert [(one.group, one.stage) for one in found] == [(group, stage) for group in "ab" for stage in STAGES]


# ----------------------------------------------------------------------------------- results and options


def built(out: Path, name: str) -> Path:
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "report.html").write_text(name)
    return folder


def test_results_are_numbered_and_old_ones_go(tmp_path: Path) -> None:
    for number in range(1, 6):
        folder = traces.publish(built(tmp_path, f".building-{number}"), keep=2)
        assert folder.name == f"{number:06d}"
        assert (tmp_path / "report.html").read_text() == f".building-{number}"
    assert traces.versions(tmp_path) == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004", "000005", "report.html"]


def test_two_runs_that_end_together_have_two_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(tmp_path, "000001")
    seen = [[], [1], [1, 2]]
    monkeypatch.setattr(traces, "versions", lambda out: seen.pop(0))
    assert traces.publish(built(tmp_path, ".building-x"), keep=2).name == "000002"


@pytest.mark.parametrize("text", ["yesterday", "2026-01-31T12:00:00", "12"])
def test_bad_times_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="since"):
        traces.check_times(traces.TraceOptions(topic="t", out="o", since=text))
    traces.check_times(traces.TraceOptions(topic="t", out="o", since="2026-01-31T12:00:00Z"))


def test_options() -> None:
    found = pipeline("traces")
    options = parse_options(found, {"out": "x", "stuck-s": "5"}, topic="t", url=None, follow=False)
    assert isinstance(options, traces.TraceOptions)
    assert (options.out, options.stuck_s) == ("x", 5.0)
    assert all(line.meaning for line in options_of(found))
    with pytest.raises(InvalidRequest, match="out"):
        parse_options(found, {}, topic="t")


@pytest.mark.parametrize(
    ("key", "text"), [(b"order-1", "order-1"), (b"\xff\x00", "0xff00"), (b"a\nb", "0x610a62"), (b"", "")]
)
def test_keys_for_people(key: bytes, text: str) -> None:
    assert traces.shown(key) == text


def test_figures_are_stored_as_they_are(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found = report()
    traces._write(found, tmp_path)
    for name in ("stages", "causes", "consumers", "stuck"):
        rows = pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
        assert rows == [msgspec.structs.asdict(row) for row in getattr(found, name)]
    traces._write(report(stages=[], causes=[], consumers=[], stuck=[]), tmp_path)
    assert pq.read_table(tmp_path / "stages.parquet").num_rows == 0
