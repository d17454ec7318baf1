"""Figures that are drawn from records, and how a scheme looks in all of them.

`draw_accuracy_figure` draws figures 3, 4 and 5 of the paper (accuracy over epochs), each with the
schemes of its table. `draw_megabytes_figure` draws accuracy against traffic.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tcs_lab.support.files import write_if_possible

# Colours ──────────────────────────────────────────────────────────────────────────────────────────

# Okabe and Ito's colours, which colour-blind readers tell apart; markers and dashes do it in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS, DASHES = "os^Dv*PX", ("-", "--", "-.", ":")
BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = COLOURS
INDIGO, WINE, BROWN = "#332288", "#882255", "#7A4B00"  # darker than any of those
_FREE = (BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY, INDIGO, WINE, BROWN)  # black is the Baseline's

# The colour, marker and dashes of a scheme, which are the same wherever it is drawn.
_DRAWN = {
    "Baseline": (BLACK, "o", "-"),
    "Baseline-Momentum": (GREY, "X", "--"),
    "FedAvg": (GREY, "D", "--"),
    "FedAvg-L4": (BROWN, "d", "-."),
    "FedAvg-Global Momentum": (SKY, "H", "-."),
    "top-K": (RED, "^", "-."),
    "rand-K": (ORANGE, "x", ":"),
    "TCS": (BLUE, "s", "-"),
    "TCS-L2": (INDIGO, "<", ":"),
    "TCS-L4": (GREEN, "v", "--"),
    "TCS-Q5": (INDIGO, "p", "--"),
    "TCS-L4-Q5": (PINK, "*", ":"),
    "TCS-LF": (ORANGE, "P", "--"),
    "TCS-PLF": (SKY, "X", "-."),
    "TCS-LF-Q5": (WINE, ">", ":"),
    "TCS-WLF": (BROWN, "P", "-."),
    "TCS-WPLF": (WINE, "X", "--"),
    "TCS-Global Momentum": (WINE, "h", "--"),
    "TCS-Q5-NW": (PINK, "p", "--"),
    "STC": (GREEN, "<", "-."),
    "QSGD": (SKY, "d", ":"),
    "DGC": (WINE, "p", "-."),
    "EF-signSGD-D1": (ORANGE, ">", ":"),
    "CocktailSGD": (BROWN, "h", "-"),
}

# Names that notebooks give to some of them.
_ALSO = {"everything sent": "FedAvg", "dense (FedAvg)": "FedAvg"}
_DRAWN |= {name: _DRAWN[scheme] for name, scheme in _ALSO.items()}

CONTRAST = 4.5  # the least contrast of text on white that WCAG 2 asks for
# Sizes that can be read when a figure is shown at half its width.
LOOK: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "figure.titlesize": 11,
    "legend.fontsize": 10,
}


def series_style(i: int) -> dict[str, Any]:
    """Return the colour, dashes and marker of a figure's i-th curve, where curves are not schemes."""
    return {"color": COLOURS[i % 8], "linestyle": DASHES[i % 4], "marker": MARKERS[i % 8]}


def curve_style(name: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Return the colour, dashes and marker of a scheme's curve, which are the same in all figures.

    A name that is not in the list gets a colour that depends on the name alone, unless one of the
    `others` in the figure has it already. Black is only for the Baseline.
    """
    used = {_DRAWN[other][0] for other in others if other in _DRAWN}
    unknown = dict.fromkeys(other for other in [*others, name] if other not in _DRAWN)
    looks = dict(_DRAWN)
    for other in unknown:
        number = int(hashlib.sha256(other.encode()).hexdigest(), 16)
        colours = [_FREE[(number + i) % len(_FREE)] for i in range(len(_FREE))]
        free = [colour for colour in colours if colour not in used]
        looks[other] = ((free or colours)[0], MARKERS[number % 8], DASHES[number % 4])
        used.add(looks[other][0])
    return dict(zip(("color", "marker", "linestyle"), looks[name], strict=True))


def contrast(colour: str) -> float:
    """Return the contrast of a colour, "#rrggbb", on white, as WCAG 2 defines it: 1 (white) to 21
    (black)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


def text_colour(colour: str) -> str:
    """Return the colour, or a darker one of its kind in which text on white can be read."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    while contrast(colour) < CONTRAST:
        parts = [int(0.97 * part) for part in parts]
        colour = "#{:02X}{:02X}{:02X}".format(*parts)
    return colour


# Curves ───────────────────────────────────────────────────────────────────────────────────────────


def draw_accuracy_figure(records: Iterable[dict[str, Any]], title: str) -> Any:
    """Draw test accuracy over epochs, with a curve for each scheme, and beside it the last points,
    enlarged. Curves and points are means over seeds; bands and bars are one standard deviation.

    Figures 3, 4 and 5 of the paper are this figure for the schemes of tables 1, 2 and 3.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["config"]["scheme"]["name"], []).append(record)
    with rc_context(LOOK):
        figure = Figure(figsize=(8.4, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        figure.suptitle(title)
        ends = []
        for name, group in groups.items():
            style = curve_style(name, list(groups))
            end = _draw_curve(left, group, style)
            if end is not None and all(record["status"] == "finished" for record in group):
                ends.append((name, *end, len(group), style))
        left.set(xlabel="epoch", ylabel="test accuracy (%)")
        left.locator_params(axis="x", integer=True)
        _draw_last(right, ends)
        for axes in (left, right):
            axes.grid(alpha=0.25)
    return figure


def _draw_curve(
    axes: Any, group: Sequence[dict[str, Any]], style: dict[str, Any]
) -> tuple[float, float] | None:
    """Draw a scheme's mean over seeds and a band around it, in percent. Returns mean and deviation of the
    last epoch, or None without any epoch."""
    curves = [pd.Series({r["epoch"]: 100 * r["accuracy"] for r in g["rows"]}) for g in group]
    table = pd.DataFrame(curves).dropna(axis="columns")  # epochs that all seeds have
    mean, deviation = table.mean(), table.std().fillna(0.0)
    few = max(1, len(mean) // 8)
    axes.plot(mean.index, mean, markevery=few, markersize=4.5, linewidth=1.5, **style)
    band = mean - deviation, mean + deviation
    axes.fill_between(mean.index, *band, color=style["color"], alpha=0.12, linewidth=0)
    return (mean.iloc[-1], deviation.iloc[-1]) if len(mean) else None


def _draw_last(axes: Any, ends: Sequence[tuple[str, float, float, int, dict[str, Any]]]) -> None:
    """Draw a point with a bar for each scheme (name, mean, deviation, n, style), the best at the top."""
    ends = sorted(ends, key=lambda end: end[1])
    for place, (_, mean, deviation, _, style) in enumerate(ends):
        look = {"color": style["color"], "fmt": style["marker"], "markersize": 6, "capsize": 3}
        axes.errorbar(mean, place, xerr=deviation, **look)
    axes.yaxis.tick_right()
    axes.set_yticks(range(len(ends)), [f"{end[0]} ({end[3]})" for end in ends])
    for label, end in zip(axes.get_yticklabels(), ends, strict=True):
        label.set_color(text_colour(end[4]["color"]))
    axes.set(xlabel="test accuracy after the last epoch (%)", ylim=(-0.6, max(len(ends), 1) - 0.4))


def label_ends(axes: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write the names of curves beside the right frame, each with a thin line to the curve's end, which
    is given as (name, x, y, colour). Names that would overlap are moved apart."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[2])
    places, step = [end[2] for end in ends], 0.055 * (high - low)
    for _ in range(200):
        for i in range(1, len(places)):
            push = max(0.0, step - (places[i] - places[i - 1])) / 2
            places[i - 1 : i + 1] = places[i - 1] - push, places[i] + push
        places[-1:] = [min(place, high) for place in places[-1:]]
    for place, (name, x, y, colour) in zip(places, ends, strict=True):
        at = (place - low) / (high - low)
        axes.annotate(
            name, (x, y), (1.06, at), textcoords="axes fraction", color=text_colour(colour),
            fontsize=10, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 3,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def draw_megabytes_figure(
    table: pd.DataFrame, title: str, names: Mapping[str, str] | None = None
) -> Any:
    """Draw final accuracy against what one client sent and received in the whole training.

    `table` is a `summary`; `names` are the words to write for a scheme instead of its name. Bars
    are one standard deviation over the seeds. The Baseline, which sends nothing, is a line with a
    band. Traffic is in gigabytes where a scheme needs one or more, else in megabytes.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    table = table[table["accuracy"].notna()]
    megabytes = table["megabytes_up"] + table["megabytes_down"]
    large = megabytes.max() >= 1000
    unit, short, size = ("gigabytes", "GB", 1000) if large else ("megabytes", "MB", 1)
    with rc_context(LOOK):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        points = []
        for row, sent in zip(table.itertuples(), megabytes / size, strict=True):
            style, mean = curve_style(row.scheme, list(table["scheme"])), 100 * row.accuracy
            spread = 0.0 if row.n < 2 else 100 * row.accuracy_std
            words = (names or {}).get(row.scheme, row.scheme)
            if pd.isna(sent):
                _draw_level(axes, words, mean, spread, style["color"])
                continue
            look = {"color": style["color"], "fmt": style["marker"], "markersize": 7}
            axes.errorbar(sent, mean, yerr=spread, capsize=3, **look)
            number = f"{sent:,.0f}" if sent >= 100 else f"{sent:.2g}"
            points.append((f"{words}\n{number} {short}", sent, mean, style["color"]))
        axes.set(xscale="log", ylabel="final test accuracy (%)")
        axes.set(xlabel=f"{unit} that one client sends and receives in all (logarithmic scale)")
        figure.suptitle(f"{title}\n{_about_bars(table['n'])}")
        axes.margins(0.3, 0.2)
        plain_log(axes.xaxis)
        axes.grid(alpha=0.25)
        _draw_better(axes)
        label_points(axes, points)
    return figure


def _about_bars(counts: pd.Series) -> str:
    """Say what the bars of a figure are, and over how many seeds."""
    few, many = (counts.min(), counts.max()) if len(counts) else (0, 0)
    if many <= 1:
        return "one seed each"
    seeds = f"{many}" if few == many else f"{few} to {many}"
    return f"bars and band: one standard deviation over {seeds} seeds"


def _draw_better(axes: Any) -> None:
    """Draw an arrow in the lower right corner, since less traffic and a higher accuracy are better."""
    axes.annotate(
        "better", (0.86, 0.16), (0.97, 0.04), xycoords="axes fraction", textcoords="axes fraction",
        ha="right", va="bottom", fontsize=10, color="#555555",
        arrowprops={"arrowstyle": "->", "color": "#555555", "lw": 1.2},
    )  # fmt: skip


def _draw_level(axes: Any, words: str, mean: float, spread: float, colour: str) -> None:
    """Draw a line across the axes with a band around it and words on it."""
    axes.axhline(mean, color=colour, linestyle="--", linewidth=1)
    axes.axhspan(mean - spread, mean + spread, color=colour, alpha=0.08, linewidth=0)
    at = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 10}
    axes.text(0.01, mean, words, color=text_colour(colour), **at)


def label_points(axes: Any, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Write words beside each point, given as (words, x, y, colour), at the nearest side where they fit
    and hide no curve. If this is not next to the point, a thin line joins the two."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # settles the layout
    occupied = [text.get_window_extent() for text in axes.texts]
    level = [line for line in axes.lines if list(line.get_xdata()) == [0, 1]]  # across the axes
    occupied += [line.get_window_extent().padded(2) for line in level]
    bars = [bar for drawn in axes.collections for bar in drawn.get_segments() if len(bar)]
    for line in [*bars, *([(x, y)] for _, x, y, _ in points)]:
        at = axes.transData.transform(line)
        occupied.append(Bbox([at.min(axis=0), at.max(axis=0)]).padded(4))
    for line in axes.lines:
        if len(line.get_xdata()) > 2:
            occupied += _boxes_along(axes.transData.transform(line.get_xydata()))
    for words, x, y, colour in points:
        for far, up, side in itertools.product((1, 4, 7, 10), (-1, 1), (1, -1, 0)):
            place = (7 * side, 5 * far * up)
            text = axes.annotate(
                words, (x, y), place, textcoords="offset points", fontsize=10,
                color=text_colour(colour), ha=("center", "left", "right")[side],
                va="bottom" if up > 0 else "top",
            )  # fmt: skip
            box = text.get_window_extent()
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
            inside = inside and axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1
            if (far, up, side) == (10, 1, 0) or (inside and not any(map(box.overlaps, occupied))):
                break
            text.remove()
        occupied.append(box)
        if far > 1:
            line = {"arrowstyle": "-", "color": text_colour(colour), "linewidth": 0.6, "shrinkA": 0}
            axes.annotate("", (x, y), place, textcoords="offset points", arrowprops=line)


def _boxes_along(pixels: np.ndarray) -> list[Any]:
    """Small boxes that cover a curve, which is given as (x, y) pixels."""
    from matplotlib.transforms import Bbox

    boxes = []
    for start, end in itertools.pairwise(pixels[np.isfinite(pixels).all(axis=1)]):
        pieces = max(2, int(np.hypot(*(end - start)) / 6))
        for one, other in itertools.pairwise(np.linspace(start, end, pieces)):
            boxes.append(Bbox([np.minimum(one, other) - 1, np.maximum(one, other) + 1]))
    return boxes


def name_pair(left: Any, right: Any, step: str, loss: str, sent: str) -> None:
    """Label two axes that show the same curves, once against steps and once against megabytes `sent`."""
    left.set(xlabel=step, ylabel=loss, title=f"The same {step}s …")
    right.set(xlabel=f"{sent} (log)", xscale="log", title="… for fewer bytes")
    plain_log(right.xaxis)
    for axes in (left, right):
        axes.grid(alpha=0.25)


def plain_log(axis: Any) -> None:
    """Make a log axis with ticks at 1, 2, 5, 10, ..., or at 1, 3, 10, ... if it is long."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1, 3)))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_locator(NullLocator())


def save_figure(figure: Any, path: str | Path | None) -> bytes:
    """Save a figure as .png and .svg beside each other, with the same bytes every time. Returns the bytes
    of the .png, also where nothing can be written. Without a path nothing is written."""
    import matplotlib

    pictures = []
    with matplotlib.rc_context({"svg.hashsalt": "tcs", "svg.fonttype": "none"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            look = {"format": suffix[1:], "dpi": 150, "metadata": metadata}
            picture = io.BytesIO()
            figure.savefig(picture, **look)
            pictures.append(picture.getvalue())
            if path is not None:
                write_if_possible(Path(f"{path}{suffix}"), lambda file: file.write(pictures[-1]))
    return pictures[0]
