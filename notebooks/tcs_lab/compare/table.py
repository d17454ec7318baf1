"""The table and the picture of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tcs_lab.compare.scoring import EQUAL, Point, PointComparison, Scores, find_front
from tcs_lab.tables.figures import (
    COLOURS,
    LOOK,
    curve_style,
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
        row = rows.get(method, {})
        kept = row if point.scheme == method else {}
        start = format_number(point.start) if point.start else "–"
        start_up = point.start / 2  # a dense round sends as many bytes up as down
        share = kept.get("recoded", 1.0)  # 1 where no other code was tried
        recoded = start_up + (point.up - start_up) * share if share < 1 else math.nan
        mark = "" if row.get("decodes", True) else " (counted)"
        lines.append({
            "Method": point.scheme + mark, "n": str(point.n), "Rate": format_number(point.rate),
            "Accuracy %": f"{point.accuracy:.2f} ± {point.half:.2f}",
            "MB up": format_number(point.up), "MB down": format_number(point.down),
            "MB of the start, up and down": start,
            "MB up, re-coded": format_number(recoded),
            "Time of a round (TCS: 1)": format_number(kept.get("beside_tcs", math.nan), 2),
        })  # fmt: skip
    return pd.DataFrame(lines)


def describe_rows(table: pd.DataFrame, confidence: float) -> str:
    """Return the caption of a table of points."""
    said = [
        f"Rate is the learning rate. Accuracy is the mean over n seeds ± half of its {confidence:.0%} interval, which allows for chance in the seeds and in the choice "
        "of test images. MB are those of one client's messages in the whole training, with the start included: a dense one or, for DGC, one with larger masks. "
        "The time of a round is computing time, divided by that of TCS. (The two took turns on the same machine. TCS was measured beside itself, which shows how far such a number can be off.) A dash means that a method has no such start, or that its time was not measured."
    ]
    if not len(table):
        return said[0]
    if table["Method"].str.contains("(counted)", regex=False).any():
        said.append(
            "(counted) means that the method's messages are not decoded, so its bytes are only calculated."
        )
    if "MB up, re-coded" in table and (table["MB up, re-coded"] != "–").any():
        said.append(
            "Re-coded bytes are those with a shorter code for the same tensors; the dense start is not re-coded."
        )
    return " ".join(said)


COMPARISON_NOTE = (
    "The first difference is that of the mean accuracies, whatever the two methods send. Its interval pools "
    "the deviations between seeds of several methods: of all accurate ones and of all others, as the track's "
    "plan defines them. If it contains 0, this comparison cannot tell which of the two methods is more "
    "accurate. Relative bytes are those of the stored method divided by those of the new one. "
)
EQUAL_NOTE = (
    "The next differences are taken at equal bytes, which are interpolated between whole runs of the "
    "stored method. The bytes of two runs count as equal if they differ by at most {:.0%}. Nothing is "
    "extrapolated: a dash stands where the stored method has no run with as few or as many bytes."
)
NOT_EQUAL_NOTE = (
    "No stored method has runs with about as many bytes, so that accuracies cannot be compared at equal "
    "bytes. With --densities there are runs with fewer bytes."
)


def comparison_table(compared: Sequence[PointComparison], point: Point) -> pd.DataFrame:
    """Make the table of one point compared with the stored methods; `describe_comparison` is its caption.

    Columns that need runs with about as many bytes are left out if no stored method has them.
    """
    lines = []
    for one in compared:
        e, without, gap = one.equal_bytes, one.without_start, one.difference
        line = {
            "Stored method": one.usual,
            f"{point.scheme} minus stored method, points": format_interval(
                gap.value, gap.low, gap.high
            ),
            "Bytes, stored / new": f"×{format_number(one.relative_bytes, 2)}",
        }
        if has_equal_bytes(compared):
            line |= {
                f"At {format_number(point.both)} MB, points": format_interval(
                    e.value, e.low, e.high),
                "The same without the dense starts, points": format_interval(
                    without.value, without.low, without.high),
                f"MB that the stored method needs for {point.accuracy:.1f} %": format_number(one.megabytes),
                "Why a value is missing": one.reason or "–",
            }  # fmt: skip
        lines.append(line)
    return pd.DataFrame(lines)


def has_equal_bytes(compared: Sequence[PointComparison]) -> bool:
    """Return whether a stored method can be compared at equal bytes or at equal accuracy."""
    return any(
        not math.isnan(one.equal_bytes.value) or not math.isnan(one.megabytes) for one in compared
    )


def describe_comparison(compared: Sequence[PointComparison]) -> str:
    """Return the caption of a comparison."""
    return COMPARISON_NOTE + (
        EQUAL_NOTE.format(EQUAL) if has_equal_bytes(compared) else NOT_EQUAL_NOTE
    )


# A picture ────────────────────────────────────────────────────────────────────────────────────────


def comparison_figure(scores: Scores, method: str = "") -> Any:
    """Plot final accuracy with its interval against the megabytes of one client. Each stored method has a
    line through its densities, the best of them are a grey step line, and the compared method, if there
    is one, has stars.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    stars = [
        point for point in scores.points if point.both > 0
    ]  # centralized training sends nothing
    others = {name: points for name, points in scores.stored.items() if name != method or not stars}
    with rc_context(LOOK):
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        axes = figure.subplots()
        names = _draw_stored(axes, others)
        best = find_front(p for points in others.values() for p in points if p.both > 0)
        axes.step([p.both for p in best], [p.accuracy for p in best], where="post", color="#666666",
                  linewidth=4, alpha=0.25, zorder=0)  # fmt: skip
        for point in stars:
            axes.errorbar(point.both, point.accuracy, yerr=point.half, color="#000000", fmt="*",
                          markersize=13, capsize=4, zorder=5)  # fmt: skip
        axes.set(
            xscale="log",
            xlabel="megabytes that one client sends and receives in the whole run (log scale)",
        )
        axes.set(ylabel="final accuracy (%), stretched towards 100 %")
        _stretch(axes)
        axes.margins(0.08, 0.12)
        plain_log(axes.xaxis)
        axes.grid(alpha=0.25)
        dark = text_colour(COLOURS[0])
        # the compared method comes first, so that its name has the best place
        label_points(axes, [*((p.scheme, p.both, p.accuracy, dark) for p in stars), *names])
        what = f"{method} (stars) beside the known methods" if stars else "Known methods"
        confidence = f"bars: {scores.confidence:.0%} intervals"
        figure.suptitle(f"{what}\ngrey line: the fewest bytes for an accuracy; {confidence}")
    return figure


def _stretch(axes: Any) -> None:
    """Give the high accuracies of the y-axis more room, because most methods lie there.

    Equal distances are equal ratios of 101 % minus the accuracy, so that 100 % has a place, too.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    def place(accuracy: Any) -> Any:
        return -np.log(np.maximum(101 - np.asarray(accuracy, float), 1e-3))

    axes.set_yscale("function", functions=(place, lambda at: 101 - np.exp(-np.asarray(at))))
    axes.yaxis.set_major_locator(FixedLocator([0, 20, 40, 60, 70, 80, 85, 90, 92, 94, 96, 98, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_stored(axes: Any, stored: Mapping[str, list[Point]]) -> list[Any]:
    """Draw the stored methods. Returns their names, each with its place, which is the point with the fewest
    bytes, and its colour."""
    names: list[Any] = []
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
        names.append((name, xy[0][0], xy[1][0], style["color"]))
    return names
