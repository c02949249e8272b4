"""The report of the pipeline `traces`: its figures, and a page that shows them, in one file, without network.

Everything here is pure: figures in, text out. Plots are SVG within the page; what users sent (keys, errors,
names) is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import median
from typing import Any

import msgspec

STAGES = ("published_to_appended", "appended_to_delivered", "delivered_to_settled", "published_to_settled")
BUCKETS_PER_DOUBLING = 2
SLOW_FACTOR = 2.0
"""A consumer is slow when its 95th percentile is so many times that of the others of its group."""
SLOW_MS = 100.0
"""What takes less than this is not slow, whatever the others do."""

WIDTH, HEIGHT, LEFT, BOTTOM = 520, 180, 46, 26
COLOURS = ("#2f6fb2", "#c7612a", "#3b8f5a", "#8a4fa3", "#a38a1f", "#b23a5e")


class StageTimes(msgspec.Struct, frozen=True):
    """How long messages took from one step to the next, in milliseconds; without a group: all of them."""

    group: str
    stage: str
    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


class Cause(msgspec.Struct, frozen=True):
    """Why messages were tried again, or died; numbers in the text of an error stand as #."""

    group: str
    kind: str
    """nacked, expired, dead_lettered"""
    cause: str
    events: int
    messages: int
    example: str
    """Topic, partition and offset of one of them."""


class ConsumerTimes(msgspec.Struct, frozen=True):
    """A member of a group: what it did, and how long it held messages."""

    group: str
    member: str
    deliveries: int
    acked: int
    nacked: int
    expired: int
    given_back: int
    p50_ms: float
    p95_ms: float
    max_ms: float
    slow: bool = False


class StuckKey(msgspec.Struct, frozen=True):
    """A key whose oldest message is not settled for a long time."""

    group: str
    topic: str
    partition: int
    key: str
    offset: int
    age_s: float
    deliveries: int
    failures: int
    behind: int
    """Later messages of the key that are not settled either."""
    error: str = ""


class Bar(msgspec.Struct, frozen=True):
    """How many messages took so long for a stage: what is in a bucket of `bucket_low_ms`."""

    group: str
    stage: str
    bucket: int
    count: int


class Moment(msgspec.Struct, frozen=True):
    """What happened in a stretch of time that began then."""

    time_s: float
    delivered: int
    settled: int
    failed: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run."""

    topic: str
    as_of: str
    span: str
    events: int
    messages: int
    stages: list[StageTimes]
    bars: list[Bar]
    moments: list[Moment]
    causes: list[Cause]
    consumers: list[ConsumerTimes]
    stuck: list[StuckKey]


# ------------------------------------------------------------------------------------------------ figures


def bucket_low_ms(bucket: int) -> float:
    """Where a bucket begins: two of them double it; below 0 there is one for all under a millisecond."""
    return 0.0 if bucket < 0 else float(2 ** (bucket / BUCKETS_PER_DOUBLING))


def with_slow_ones(consumers: Iterable[ConsumerTimes]) -> list[ConsumerTimes]:
    """Which consumers are slow: compared with the others of their group, because work differs from group to
    group."""
    known = list(consumers)
    marked = []
    for one in known:
        others = [other.p95_ms for other in known if other.group == one.group and other is not one]
        slow = bool(others) and one.p95_ms >= max(SLOW_MS, SLOW_FACTOR * median(others))
        marked.append(msgspec.structs.replace(one, slow=slow))
    return sorted(marked, key=lambda one: (one.group, -one.p95_ms, one.member))


def in_order(stages: Iterable[StageTimes]) -> list[StageTimes]:
    """Stages by group, in the order in which messages pass them."""
    return sorted(stages, key=lambda stage: (stage.group, STAGES.index(stage.stage)))


# --------------------------------------------------------------------------------------------------- page


def page(report: Report) -> str:
    """The whole report as one HTML file."""
    title = f"Traces of {escape(report.topic)}"
    head = f"{report.messages:,} messages, {report.events:,} events, {escape(report.span)}; as of "
    parts = [
        f"<h1>{title}</h1><p>{head}{escape(report.as_of)}</p>",
        _section("Latency", _table(report.stages, StageTimes), *_histograms(report.bars)),
        _section("Over time", _timeline(report.moments)),
        _section("Retries and dead letters", _table(report.causes, Cause)),
        _section("Consumers", _table(report.consumers, ConsumerTimes)),
        _section("Stuck keys", _table(report.stuck, StuckKey)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;font-size:13px;margin:.5rem 0}th,td{padding:.25rem .6rem;"
    "border-bottom:1px solid #8884;text-align:left;vertical-align:top}td.n,th.n{text-align:right;"
    "font-variant-numeric:tabular-nums}tr.slow td{font-weight:600}figure{display:inline-block;"
    "margin:.5rem 1rem .5rem 0}figcaption{font-size:13px}svg text{font:11px system-ui,sans-serif;"
    "fill:currentColor}.none{opacity:.7}"
)


def _section(title: str, *content: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(content)}</section>"


def _table(rows: Sequence[Any], kind: type[msgspec.Struct]) -> str:
    if not rows:
        return '<p class="none">None.</p>'
    fields = [field for field in kind.__struct_fields__ if field != "slow"]
    numeric = {name for name in fields if isinstance(getattr(rows[0], name), int | float)}
    shown = "".join(_cell("th", name.replace("_", " "), name in numeric) for name in fields)
    lines = []
    for row in rows:
        cells = "".join(_cell("td", _text(getattr(row, name)), name in numeric) for name in fields)
        lines.append(f"<tr{' class=slow' if getattr(row, 'slow', False) else ''}>{cells}</tr>")
    return f"<table><thead><tr>{shown}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(tag: str, text: str, numeric: bool) -> str:
    return f"<{tag}{' class=n' if numeric else ''}>{escape(text)}</{tag}>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 10 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _histograms(bars: Sequence[Bar]) -> list[str]:
    kinds = sorted(
        {(bar.group, bar.stage) for bar in bars}, key=lambda kind: (kind[0], STAGES.index(kind[1]))
    )
    figures = []
    for group, stage in kinds:
        some = {bar.bucket: bar.count for bar in bars if (bar.group, bar.stage) == (group, stage)}
        caption = stage.replace("_", " ") + (f", group {group}" if group else "")
        figures.append(_histogram(caption, some))
    return figures


def _histogram(caption: str, counts: dict[int, int]) -> str:
    most = max(counts.values())
    buckets = range(min(counts), max(counts) + 1)
    step = (WIDTH - LEFT) / len(buckets)
    shapes = []
    for number, bucket in enumerate(buckets):
        count, low_ms = counts.get(bucket, 0), bucket_low_ms(bucket)
        tall = (HEIGHT - BOTTOM - 10) * count / most
        x, y = LEFT + number * step, HEIGHT - BOTTOM - tall
        label = f"from {_text(low_ms)} ms: {count:,}"
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(step - 1, 1):.1f}" height="{tall:.1f}" '
            f'fill="{COLOURS[0]}"><title>{label}</title></rect>'
        )
        if number % max(1, len(buckets) // 6) == 0:
            shapes.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}">{_short_ms(low_ms)}</text>')
    return _figure(caption, [*shapes, _scale(most)])


def _timeline(moments: Sequence[Moment]) -> str:
    if not moments:
        return '<p class="none">Nothing happened.</p>'
    first, last = moments[0].time_s, moments[-1].time_s
    series = [
        (name, [getattr(moment, name) for moment in moments]) for name in ("delivered", "settled", "failed")
    ]
    most = max(1, *(max(counts) for _, counts in series))
    shapes = []
    for (name, counts), colour in zip(series, COLOURS, strict=False):
        points = " ".join(
            f"{LEFT + (WIDTH - LEFT) * (moment.time_s - first) / max(last - first, 1e-9):.1f},"
            f"{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 10) * count / most:.1f}"
            for moment, count in zip(moments, counts, strict=True)
        )
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        at = LEFT + 80 + 90 * [one for one, _ in series].index(name)
        shapes.append(f'<text x="{at}" y="{HEIGHT - 10}" style="fill:{colour}">{name}</text>')
    shapes.append(f'<text x="{LEFT}" y="{HEIGHT - 10}">0 s</text>')
    shapes.append(f'<text x="{WIDTH}" y="{HEIGHT - 10}" text-anchor="end">{last - first:,.0f} s</text>')
    return _figure("events in each stretch of time", [*shapes, _scale(most)])


def _figure(caption: str, shapes: Sequence[str]) -> str:
    axis = f'<path d="M{LEFT} 6V{HEIGHT - BOTTOM}H{WIDTH}" fill="none" stroke="currentColor" opacity=".5"/>'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    picture = f'<svg {size} role="img" aria-label="{escape(caption)}">{axis}{"".join(shapes)}</svg>'
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _scale(most: int) -> str:
    return (
        f'<text x="{LEFT - 4}" y="14" text-anchor="end">{_short(most)}</text>'
        f'<text x="{LEFT - 4}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>'
    )


def _short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _short_ms(ms: float) -> str:
    for unit, size in (("h", 3.6e6), ("min", 6e4), ("s", 1e3)):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms:.3g} ms"
