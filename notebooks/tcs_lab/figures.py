"""Figures from records."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_lab.claims import BOUNDS
from tcs_lab.files import _write_whole
from tcs_lab.sensitivity import _as_shown, _trials, _word

# Okabe and Ito's colours, which colour-blind readers tell apart; markers and dashes do it in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS, DASHES = "os^Dv*PX", ("-", "--", "-.", ":")
_DRAWN = ("Baseline", "TCS", "top-K", "TCS-L4", "TCS-L4-Q5", "TCS-LF", "TCS-PLF", "TCS-L2")


def curve_style(name: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Colour, dashes and marker of a scheme's curve, the same in all figures for the paper's.

    Another name takes what none of the `others` in the figure has.
    """
    if name in _DRAWN:
        place = _DRAWN.index(name)
    else:
        free = [i for i, drawn in enumerate(_DRAWN) if drawn not in others] or list(range(8))
        unknown = [other for other in others if other not in _DRAWN] or [name]
        place = free[unknown.index(name) % len(free)]
    return {"color": COLOURS[place], "linestyle": DASHES[place % 4], "marker": MARKERS[place]}


def accuracy_figure(records: Iterable[dict[str, Any]], title: str) -> Any:
    """Test accuracy over epochs, one curve a scheme: the mean over seeds, a band of one std."""
    from matplotlib.figure import Figure

    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["config"]["scheme"]["name"], []).append(record)
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, group in groups.items():
        curves = [pd.Series({r["epoch"]: 100 * r["accuracy"] for r in g["rows"]}) for g in group]
        table = pd.DataFrame(curves)
        mean, deviation = table.mean(), table.std().fillna(0.0)
        style = curve_style(name, list(groups)) | {"markersize": 4.5, "linewidth": 1.5}
        every = max(1, len(mean) // 8)
        axes.plot(mean.index, mean, label=name, markevery=every, **style)
        band = mean - deviation, mean + deviation
        axes.fill_between(mean.index, *band, color=style["color"], alpha=0.12, linewidth=0)
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", title=title)
    axes.grid(alpha=0.25)
    axes.locator_params(axis="x", integer=True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


VERDICTS = {"holds": COLOURS[3], "does not hold": COLOURS[2], "not decided": COLOURS[7]}


def claims_figure(table: pd.DataFrame, title: str) -> Any:
    """The judged claims about accuracy: interval, mean, what the paper has, and the bound."""
    from matplotlib.figure import Figure

    rows = table[(table["measure"] == "accuracy") & (table["n"] > 1)].iloc[::-1]
    figure = Figure(figsize=(9.2, 1.5 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows.itertuples()):
        colour = VERDICTS[row.verdict]
        axes.plot([row.low, row.high], [at, at], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot(row.measured, at, "o", color=colour, markersize=7)
        theirs = [row.paper_low, row.paper_high], [at + 0.25] * 2
        axes.plot(*theirs, color="black", linewidth=0.9)
        axes.plot(row.paper, at + 0.25, "D", color="white", markeredgecolor="black", markersize=5)
        side = {"marker": 9 if BOUNDS[row.bound] in "≥>" else 8, "color": "black", "markersize": 7}
        axes.plot(row.bound_value, at - 0.25, **side)
    for name, colour in VERDICTS.items():
        axes.plot([], [], "o-", color=colour, linewidth=2.2, label=f"ours: {name}")
    look = {"color": "black", "linewidth": 0.9, "marker": "D", "markerfacecolor": "white"}
    axes.plot([], [], **look, markersize=5, label="the paper's difference")
    axes.plot([], [], marker=9, color="black", linestyle="", label="bound, and the side that holds")
    axes.axvline(0, color=COLOURS[7], linewidth=0.8)
    axes.set_yticks(range(len(rows)), [textwrap.fill(says, 48) for says in rows["says"]])
    axes.set(xlabel="difference of final test accuracies (points)", title=title)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def sensitivity_figure(curves: dict[str, pd.DataFrame], setting: dict[str, Any], title: str) -> Any:
    """Accuracy over the values of one setting (mean, one std over seeds), and below the megabytes
    of one client, both ways: all, and what is left without the dense warm-up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    words = _as_shown(setting)
    for name, curve in curves.items():
        style = curve_style(name, list(curves)) | {"markersize": 6, "linewidth": 1.5}
        at = [words.index(value) for value in curve["value"]]
        style |= {"label": f"{name} (n = {_trials(curve)})"}
        mean, deviation = 100 * curve["accuracy"], 100 * curve["accuracy_std"]
        upper.errorbar(at, mean, yerr=deviation, capsize=4, **style)
        both = curve["megabytes_up"] + curve["megabytes_down"]
        lower.plot(at, both, **(style | {"label": None}))
        thin = {"markerfacecolor": "white", "linewidth": 0.8, "label": None}
        lower.plot(at, both - curve["megabytes_warmup"], **(style | thin))
    grey = {"color": COLOURS[7], "marker": "o", "linewidth": 1.2}
    lower.plot([], [], **grey, label="whole run")
    lower.plot([], [], **(grey | thin | {"label": "without the dense warm-up"}))
    if "paper" in setting:
        at = words.index(_word(setting["paper"]))
        for axes, label in ((upper, "the paper's choice"), (lower, None)):
            axes.axvspan(
                at - 0.12, at + 0.12, color=COLOURS[5], alpha=0.3, linewidth=0, label=label
            )
    lost = pd.concat(curves.values()).groupby("value")["diverged"].sum()
    ticks = [f"{word}\n{lost[word]} diverged" if lost.get(word) else word for word in words]
    lower.set_xticks(range(len(words)), ticks)
    lower.set(xlabel=setting["label"], xlim=(-0.4, len(words) - 0.6))
    lower.set(yscale="log", ylabel="MB of one client")
    _plain_log(lower.yaxis)
    upper.set_title(title, fontsize=10)
    upper.set(ylabel="test accuracy (%)")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _plain_log(axis: Any) -> None:
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
            target = Path(path).with_suffix(suffix)
            _write_whole(
                target,
                lambda f, s=suffix, m=metadata: figure.savefig(
                    f, format=s[1:], dpi=150, metadata=m
                ),
            )
