"""Figures from records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_lab.files import write_whole
from tcs_lab.settings import RunConfig
from tcs_lab.tables import save_table, summary

# Okabe and Ito's colours, which colour-blind readers tell apart; markers and dashes do it in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS, DASHES = "os^Dv*PX", ("-", "--", "-.", ":")
_DRAWN = ("Baseline", "TCS", "top-K", "TCS-L4", "TCS-L4-Q5", "TCS-LF", "TCS-PLF", "TCS-L2")


def series_style(i: int) -> dict[str, Any]:
    """Colour, dashes and marker of a figure's i-th curve."""
    return {"color": COLOURS[i % 8], "linestyle": DASHES[i % 4], "marker": MARKERS[i % 8]}


def curve_style(name: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Colour, dashes and marker of a scheme's curve, the same in all figures for the paper's.

    Another name takes what none of the `others` in the figure has; black is the Baseline's.
    """
    if name in _DRAWN:
        place = _DRAWN.index(name)
    else:
        others = [*others, name]
        free = [i for i in range(1, 8) if _DRAWN[i] not in others] or list(range(8))
        unknown = [other for other in others if other not in _DRAWN]
        place = free[unknown.index(name) % len(free)]
    return series_style(place)


def accuracy_figure(records: Iterable[dict[str, Any]], title: str) -> Any:
    """Test accuracy over epochs, one curve a scheme: the mean over seeds, a band of one std."""
    from matplotlib.figure import Figure

    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["config"]["scheme"]["name"], []).append(record)
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    ends = []
    for name, group in groups.items():
        curves = [pd.Series({r["epoch"]: 100 * r["accuracy"] for r in g["rows"]}) for g in group]
        table = pd.DataFrame(curves)
        table = table.dropna(axis="columns")  # epochs that all seeds have
        mean, deviation = table.mean(), table.std().fillna(0.0)
        style = curve_style(name, list(groups)) | {"markersize": 4.5, "linewidth": 1.5}
        axes.plot(mean.index, mean, markevery=max(1, len(mean) // 8), **style)
        band = mean - deviation, mean + deviation
        axes.fill_between(mean.index, *band, color=style["color"], alpha=0.12, linewidth=0)
        ends += [(name, mean.index[-1], mean.iloc[-1], style["color"])] if len(mean) else []
    figure.suptitle(title)  # of all the width: names stand beside the axes
    axes.set(xlabel="epoch", ylabel="test accuracy (%)")
    axes.grid(alpha=0.25)
    axes.locator_params(axis="x", integer=True)
    label_ends(axes, ends)
    return figure


def label_ends(axes: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Names beside the right frame, each with a thin line to its (name, x, y, colour); those that
    would lie on each other are moved apart."""
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
            name, (x, y), (1.06, at), textcoords="axes fraction", color=colour, fontsize=9,
            va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 3,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def megabytes_figure(table: pd.DataFrame, title: str) -> Any:
    """Final accuracy against one client's megabytes in the whole run, both ways, of a `summary`;
    bars are one standard deviation. Baseline, which sends nothing, is a line with a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.subplots()
    points = []
    for row in table[table["accuracy"].notna()].itertuples():
        colour, mean = curve_style(row.scheme, list(table["scheme"]))["color"], 100 * row.accuracy
        sent = row.megabytes_up + row.megabytes_down
        if pd.isna(sent):
            axes.axhline(mean, color=colour, linestyle="--", linewidth=1)
            spread = 0.0 if row.n < 2 else 100 * row.accuracy_std
            axes.axhspan(mean - spread, mean + spread, color=colour, alpha=0.08, linewidth=0)
            axes.text(0.01, mean, f"{row.scheme} (n = {row.n})", color=colour,
                      transform=axes.get_yaxis_transform(), fontsize=9, va="bottom")  # fmt: skip
        else:
            axes.errorbar(sent, mean, yerr=100 * row.accuracy_std, fmt="o", color=colour, capsize=3)
            size = f"{sent:,.0f}" if sent >= 100 else f"{sent:.3g}"
            points.append((f"{row.scheme}\n{size} MB, n = {row.n}", sent, mean, colour))
    axes.set(xscale="log", xlabel="megabytes of one client, both ways, whole run (log)")
    axes.set(ylabel="final test accuracy (%) ± one std", title=title)
    axes.margins(0.3, 0.2)
    plain_log(axes.xaxis)
    axes.grid(alpha=0.25)
    label_points(axes, points)
    return figure


def label_points(axes: Any, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Words beside each (words, x, y, colour): at the first side, and near, where they fit."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # settles the layout
    taken = [text.get_window_extent() for text in axes.texts]
    level = [line for line in axes.lines if list(line.get_xdata()) == [0, 1]]  # across the axes
    taken += [line.get_window_extent().padded(2) for line in level]
    bars = [bar for drawn in axes.collections for bar in drawn.get_segments() if len(bar)]
    for line in [*bars, *([(x, y)] for _, x, y, _ in points)]:
        at = axes.transData.transform(line)
        taken.append(Bbox([at.min(axis=0), at.max(axis=0)]).padded(4))
    for words, x, y, colour in points:
        for far, up, side in product((1, 4, 7), (-1, 1), (1, -1)):
            text = axes.annotate(
                words, (x, y), (7 * side, 5 * far * up), textcoords="offset points", fontsize=9,
                color=colour, ha="left" if side > 0 else "right", va="bottom" if up > 0 else "top",
            )  # fmt: skip
            box = text.get_window_extent()
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
            if (far, up, side) == (7, 1, -1) or (inside and not any(map(box.overlaps, taken))):
                break
            text.remove()
        taken.append(box)


def plain_log(axis: Any) -> None:
    """A log axis whose ticks read 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_locator(NullLocator())


def save_figure(figure: Any, path: str | Path) -> None:
    """As .png and .svg beside each other; the same bytes every time."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tcs", "svg.fonttype": "none"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            look = {"format": suffix[1:], "dpi": 150, "metadata": metadata}
            write_whole(Path(f"{path}{suffix}"), partial(figure.savefig, **look))


def draw_table(
    params: dict[str, Any], records: Sequence[dict[str, Any]], planned: Iterable[RunConfig],
    folder: Path,
) -> pd.DataFrame:  # fmt: skip
    """Saves a table of the paper in the folder, table<n>.csv and .md, and, if there are records,
    its curves, figure<m>.png and .svg; the table. `params` is what table and profile say.

    Raises ValueError if they lack the table's number, its figure's or its title."""
    needed = ("table", "figure", "title", "profile")
    if lacking := [key for key in needed if params.get(key) is None]:
        raise ValueError(f"{', '.join(lacking)}: missing, a table's or a profile's file says it")
    table = summary(records, params.get("paper"), planned)
    setting = f"profile {params['profile']}"
    if records:
        made, epochs = records[0]["provenance"], records[0]["config"]["epochs"]
        setting += f", {made['dataset']}, {epochs} epochs"
        title = f"Fig. {params['figure']}: {setting}, bands ± one std"
        save_figure(accuracy_figure(records, title), folder / f"figure{params['figure']}")
    save_table(table, folder / f"table{params['table']}", f"{params['title']}: {setting}")
    return table
