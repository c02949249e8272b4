"""Figures, the bars they are held against, the table that is printed and the file that is kept."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parent / "results"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one run.

    `limit` is what the bare server did in the same run, in the same unit; `sync_ms` is fdatasync as measured
    just before, where the bar depends on it.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    sync_ms: float = 0.0
    conditions: dict[str, object] = {}


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure must reach. With `syncs`, so many measured fdatasyncs in ms are added to the bar."""

    name: str
    sense: Literal[">=", "<="]
    value: float
    limit_share: float | None = None
    syncs: int = 0

    def height(self, sync_ms: float) -> float:
        """The bar on a disk whose fdatasync takes so long."""
        return round(self.value + self.syncs * sync_ms, 3)

    def met(self, value: float, limit_share: float | None, sync_ms: float) -> bool:
        """Whether a figure reaches the bar."""
        height = self.height(sync_ms)
        reached = value >= height if self.sense == ">=" else value <= height
        return reached and (self.limit_share is None or (limit_share or 0.0) >= self.limit_share)

    def text(self, sync_ms: float) -> str:
        """The bar in words."""
        share = f" and {self.limit_share:g} of the limit" if self.limit_share is not None else ""
        return f"{self.sense} {readable(self.height(sync_ms))}{share}"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """The median of a figure over all runs, as it is kept; `met` is null where there is no bar."""

    name: str
    value: float
    unit: str
    limit_share: float | None
    conditions: dict[str, object]
    bar: str | None = None
    met: bool | None = None


def figures(samples: Iterable[Sample], bars: Sequence[Bar], common: dict[str, object]) -> list[Figure]:
    """Medians per name in the order of first appearance, each held against its bar."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    return [_figure(runs, {bar.name: bar for bar in bars}, common) for runs in by_name.values()]


def _figure(runs: list[Sample], bars: dict[str, Bar], common: dict[str, object]) -> Figure:
    first = runs[0]
    value = statistics.median(sample.value for sample in runs)
    shares = [sample.value / sample.limit for sample in runs if sample.limit]
    share = statistics.median(shares) if shares else None
    sync_ms = statistics.median(sample.sync_ms for sample in runs)
    bar = bars.get(first.name)
    own: dict[str, object] = {"runs": [significant(sample.value) for sample in runs]}
    if first.limit:
        own["limit"] = significant(statistics.median(sample.limit for sample in runs if sample.limit))
    return Figure(
        name=first.name,
        value=significant(value),
        unit=first.unit,
        limit_share=significant(share) if share is not None else None,
        conditions={**common, **runs[-1].conditions, **own},
        bar=bar.text(sync_ms) if bar else None,
        met=bar.met(value, share, sync_ms) if bar else None,
    )


def significant(value: float) -> float:
    """Four significant digits, more would be noise; whole numbers stay whole."""
    return float(f"{value:.4g}") if abs(value) < 1000 else float(round(value))


def readable(value: float) -> str:
    """A number for people."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def missed(found: Iterable[Figure]) -> list[str]:
    """Which bars were not reached, in words."""
    return [
        f"{figure.name}: {readable(figure.value)} {figure.unit}"
        + (f", {figure.limit_share:.2f} of the limit" if figure.limit_share is not None else "")
        + f"; wanted {figure.bar}"
        for figure in found
        if figure.met is False
    ]


def show(console: Console, title: str, found: Iterable[Figure]) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "median", "unit", "share of limit", "bar", "met"):
        table.add_column(heading, justify="right" if heading in ("median", "share of limit") else "left")
    for figure in found:
        share = "" if figure.limit_share is None else f"{figure.limit_share:.1%}"
        met = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}[figure.met]
        table.add_row(figure.name, readable(figure.value), figure.unit, share, figure.bar or "", met)
    console.print(table)


def load(path: Path) -> list[Figure]:
    """The figures that a file holds."""
    return msgspec.json.decode(path.read_bytes(), type=list[Figure])


def save(path: Path, found: Sequence[Figure], *, merge: bool) -> None:
    """Write figures; with `merge`, figures of other names that are there already stay."""
    kept = load(path) if merge and path.exists() else []
    names = {figure.name for figure in found}
    rows = [figure for figure in kept if figure.name not in names] + list(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
