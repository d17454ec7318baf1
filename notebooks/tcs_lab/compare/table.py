"""The table and the picture of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from tcs_lab.compare.scoring import Point, PointComparison, Scores, find_front
from tcs_lab.tables.figures import (
    COLOURS,
    LOOK,
    curve_style,
    label_ends,
    label_points,
    plain_log,
    text_colour,
)
from tcs_lab.tables.tables import format_interval, format_number

# Words ────────────────────────────────────────────────────────────────────────────────────────────


def rows_table(
    points: Iterable[tuple[str, Point]], rows: Mapping[str, Mapping[str, Any]]
) -> pd.DataFrame:
    """Make the table of points. `rows` are the saved rows of methods, with the time of a round and whether
    messages are decoded or only counted, for the usual density of each."""
    lines = []
    for method, point in points:
        kept = rows.get(method, {}) if point.scheme == method else {}
        start = f"{format_number(point.start)} of it" if point.start else "–"
        mark = "" if kept.get("decodes", True) else " (counted)"
        lines.append({
            "Method": point.scheme + mark, "n": str(point.n), "Rate": format_number(point.rate),
            "Accuracy %": f"{point.accuracy:.2f} ± {point.half:.2f}",
            "MB up": format_number(point.up), "MB down": format_number(point.down), "Dense start": start,
            "MB up, re-coded": format_number(point.up * kept.get("recoded", math.nan)),
            "Round, relative to TCS": format_number(kept.get("beside_tcs", math.nan), 2),
        })  # fmt: skip
    return pd.DataFrame(lines)


NOTE = (
    "Accuracy is the mean over n seeds with its {:.0%} interval, for other seeds and other images. MB are "
    "those of one client's messages in the whole run, the dense start included. The time of a round is "
    "relative to that of TCS in the same process."
)


COMPARISON_NOTE = (
    "The difference in accuracy is taken at equal bytes, which are interpolated between whole runs of the "
    "stored method. The bytes of two runs count as equal if they differ by at most {:.0%}. Nothing is "
    "extrapolated: a dash stands where the stored method has no run with as few or as many bytes."
)


def comparison_table(compared: Sequence[PointComparison], point: Point) -> pd.DataFrame:
    """Make the table of one point compared with the stored methods; COMPARISON_NOTE is its caption."""
    lines = []
    for one in compared:
        e, without = one.equal_bytes, one.without_start
        lines.append({
            "Stored method": one.method,
            f"At {point.both:.3g} MB: {point.scheme} minus it, points": format_interval(
                e.value, e.low, e.high),
            "Without both dense starts": format_interval(
                without.value, without.low, without.high),
            f"MB it needs for {point.accuracy:.1f} %": format_number(one.megabytes),
            "If not, why": one.reason or "–",
        })  # fmt: skip
    return pd.DataFrame(lines)


# A picture ────────────────────────────────────────────────────────────────────────────────────────


def comparison_figure(scores: Scores, method: str = "") -> Any:
    """Plot final accuracy with its interval against the megabytes of one client. Each stored method has a
    line through its densities, the best of them are a grey step line, and the compared method, if there
    is one, has stars.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    others = {name: points for name, points in scores.stored.items() if name != method}
    with rc_context(LOOK):
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        axes = figure.subplots()
        ends, singles = _draw_stored(axes, others)
        best = find_front(p for points in others.values() for p in points if p.both > 0)
        axes.step([p.both for p in best], [p.accuracy for p in best], where="post", color="#666666",
                  linewidth=4, alpha=0.25, zorder=0)  # fmt: skip
        stars = [point for point in scores.points if point.both > 0]
        for point in stars:
            axes.errorbar(point.both, point.accuracy, yerr=point.half, color="#000000", fmt="*",
                          markersize=13, capsize=4, zorder=5)  # fmt: skip
        axes.set(xscale="log", xlabel="megabytes of one client, up and down, whole run (log)")
        axes.set(ylabel="final accuracy (%)")
        axes.margins(0.08, 0.12)
        plain_log(axes.xaxis)
        axes.grid(alpha=0.25)
        if ends:
            label_ends(axes, ends)
        dark = text_colour(COLOURS[0])
        label_points(axes, [*singles, *((p.scheme, p.both, p.accuracy, dark) for p in stars)])
        known = "the known methods" if method else "Known methods"
        what = f"{method} (stars) beside {known}" if method else known
        confidence = f"bars: {scores.confidence:.0%} intervals"
        figure.suptitle(f"{what}; grey line: the fewest bytes for an accuracy; {confidence}")
    return figure


def _draw_stored(axes: Any, stored: Mapping[str, list[Point]]) -> tuple[list[Any], list[Any]]:
    """Draw the stored methods. Returns their names, where they stand and their colours: of methods with a
    line, at its end, and of methods with a single point."""
    ends: list[Any] = []
    singles: list[Any] = []
    for name, points in stored.items():
        sent = [point for point in points if point.both > 0]
        for level in (point for point in points if point.both == 0):
            axes.axhline(level.accuracy, color=COLOURS[0], linestyle="--", linewidth=1)
            where: Any = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 9}
            axes.text(0.01, level.accuracy, level.scheme, **where)
        if not sent:
            continue
        xy = [point.both for point in sent], [point.accuracy for point in sent]
        style, halves = curve_style(name, stored), [point.half for point in sent]
        axes.plot(*xy, **style, markersize=5, linewidth=1, alpha=0.8)
        axes.errorbar(*xy, yerr=halves, fmt="none", ecolor=style["color"], alpha=0.35)
        named = ends if len(sent) > 1 else singles
        named.append((name, xy[0][-1], xy[1][-1], style["color"]))
    return ends, singles
