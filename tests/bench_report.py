"""Figures of the benchmark: statistics, bars, the table, JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LINEAR = 0.0
"""As a limit of growth: no faster than what it grows with."""
STATISTICS = ("minimum", "median", "p99")


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for one statistic of a figure, which is met by what is at most as much."""

    statistic: str
    limit: float


@dataclass(slots=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        name: What bars and other programs know it by, as "allocate".
        what: The same for people.
        unit: Of samples and bars: "ms", "s", "MB", "%" …
        size: How much there was of what it may grow with; None where that is nothing.
        size_of: What that is, as "devices".
        samples: What was measured.
        bars: What it is to keep to.
    """

    name: str
    what: str
    unit: str
    samples: list[float]
    size: int | None = None
    size_of: str = ""
    bars: Sequence[Bar] = field(default_factory=tuple)

    def statistics(self) -> dict[str, float]:
        """Minimum, median and p99 of the samples."""
        return {
            "minimum": min(self.samples),
            "median": statistics.median(self.samples),
            "p99": percentile(self.samples, 99),
        }

    def missed(self) -> list[Bar]:
        """The bars that it does not keep to."""
        found = self.statistics()
        return [bar for bar in self.bars if found[bar.statistic] > bar.limit]

    def as_json(self) -> dict[str, Any]:
        """What a program gets to know of it."""
        found = self.statistics()
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "size": self.size,
            "size_of": self.size_of or None,
            **{key: float(f"{value:.4g}") for key, value in found.items()},
            "count": len(self.samples),
            "bars": [
                {"statistic": bar.statistic, "limit": bar.limit, "met": found[bar.statistic] <= bar.limit}
                for bar in self.bars
            ],
        }


def percentile(samples: Sequence[float], percent: float) -> float:
    """The least sample that so many percent of all are not above (nearest rank): of few samples p99 is the largest."""
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def ratios(figures: Iterable[Figure], limits: dict[str, float]) -> list[Figure]:
    """How much the median of each figure grows from its least size to its largest, where it has several sizes.

    Args:
        figures: All figures.
        limits: Figure's name → bar for that, or LINEAR.
    """
    by_name: dict[str, dict[int, Figure]] = {}
    for figure in figures:
        if figure.size is not None:
            by_name.setdefault(figure.name, {})[figure.size] = figure
    grown = []
    for name, by_size in by_name.items():
        first, last = by_size[min(by_size)], by_size[max(by_size)]
        before, after = first.statistics()["median"], last.statistics()["median"]
        if first is last or not before > 0:
            continue
        bars = (Bar("median", limits[name] or max(by_size) / min(by_size)),) if name in limits else ()
        what = f"{first.what}: {last.size} {last.size_of} against {first.size}"
        grown.append(Figure(name=f"{name}-growth", what=what, unit="times", samples=[after / before], bars=bars))
    return grown


def number(value: float) -> str:
    """Three digits, or all that are before the point."""
    if value != 0 and abs(value) < 0.001:
        return f"{value:.1g}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def verdict(figure: Figure) -> str:
    """What the bars are, and whether they are met."""
    if not figure.bars:
        return ""
    short = {"minimum": "min", "median": "p50", "p99": "p99"}
    texts = []
    missed = figure.missed()
    for bar in figure.bars:
        said = "MISSED" if bar in missed else "met"
        texts.append(f"{short[bar.statistic]} ≤ {bar.limit:g} {said}")
    return ", ".join(texts)


def table(figures: Sequence[Figure]) -> str:
    """The figures as a table in Markdown, in columns that line up."""
    rows: list[tuple[str, ...]] = [("figure", "size", "unit", "min", "p50", "p99", "count", "bar")]
    for figure in figures:
        size = "" if figure.size is None else f"{figure.size:,} {figure.size_of}"
        found = figure.statistics()
        values = [number(found[key]) for key in STATISTICS]
        rows.append((figure.what, size, figure.unit, *values, f"{len(figure.samples):,}", verdict(figure)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (3, 4, 5, 6)
    lines = []
    for index, row in enumerate(rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if index == 0:
            rule = ["-" * (width + 1) + (":" if column in right else "-") for column, width in enumerate(widths)]
            lines.append(f"|{'|'.join(rule)}|")
    return "\n".join(lines)
