"""Which exchange of gradients to choose for a DDP training: loss and seconds of the same settings.

The losses come from a later stage of params/hook_plan.yaml (`tcs_lab.studies.frontier`), the seconds
from params/links.yaml (`tcs_lab.studies.links`). A setting has the same name in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tcs_lab.studies.frontier import Frontier, kind_of
from tcs_lab.studies.links import Links, Net
from tcs_lab.studies.optimizers import Setup
from tcs_lab.tables.analysis import Estimate
from tcs_lab.tables.figures import BLACK, BLUE, GREY, ORANGE, RED
from tcs_lab.tables.tables import format_interval

# Colours, and markers of the first settings of a kind.
_DRAWN = {
    "dense": (BLACK, "o"),
    "PowerSGD": (ORANGE, "h"),
    "top-K": (RED, "^"),
    "TCS": (BLUE, "sDv"),
}


@dataclass(frozen=True)
class Choice:
    """A setting with its loss, and with the seconds of a step on one kind of link.

    `cost` is the loss minus that of dense training, and `against` is the loss minus that of PowerSGD.
    `measured` says whether the seconds were measured, and not calculated.
    """

    setup: Setup
    kind: str
    loss: float
    cost: Estimate
    against: Estimate
    seconds: float
    measured: bool


def list_choices(
    frontier: Frontier, links: Links, net: Net, ranks: int, own_mbit: float
) -> list[Choice]:
    """List the settings of which both the loss and the seconds are known.

    Each rank has a link of its own, with `own_mbit` in each direction. The losses are those of the
    frontier, for whatever net and ranks the seconds are asked.
    """
    choices = []
    for setup in frontier.known:
        exchange = "plain" if setup.scheme == "dense" else setup.scheme
        found = links.seconds(exchange, net, ranks, own_mbit)
        if found is not None:
            kind = kind_of(frontier.stage.schemes[setup.scheme])
            gaps = frontier.cost(setup), frontier.against_power_sgd(setup)
            choices.append(Choice(setup, kind, frontier.mean_loss(setup), *gaps, *found))
    return choices


def find_as_good(choices: Sequence[Choice], as_good: float) -> list[Choice]:
    """Find the settings of top-K and TCS that are at least as good as PowerSGD in both: no more seconds
    per step, and an interval of the difference in loss that ends at `as_good` or below."""
    power = next((c for c in choices if c.kind == "PowerSGD"), None)
    if power is None:
        return []
    ours = [c for c in choices if c.kind in ("top-K", "TCS")]
    return [c for c in ours if c.seconds <= power.seconds and c.against.high <= as_good]


def tabulate_seconds(
    frontier: Frontier, links: Links, net: Net, ranks: int, rates: Sequence[float]
) -> pd.DataFrame:
    """Make a table with a line for each rate of a rank's own link: the seconds per step with each setting,
    calculated ones with ≈."""
    lines = []
    for rate in rates:
        choices = list_choices(frontier, links, net, ranks, rate)
        line = {"Mbit/s": f"{rate:,.0f}"}
        for c in choices:
            line[c.setup.scheme] = f"{'' if c.measured else '≈ '}{c.seconds:.3g}"
        lines.append(line)
    return pd.DataFrame(lines).fillna("")


def tabulate_as_good(
    frontiers: Mapping[int, Frontier],
    links: Links,
    nets: Mapping[str, Net],
    rates: Sequence[float],
) -> pd.DataFrame:
    """Make a table of the settings of top-K and TCS that are at least as good as PowerSGD in both, with a
    line for each net and each number of ranks. `frontiers` has the losses by the number of ranks."""
    lines = []
    for name, net in nets.items():
        for ranks, frontier in frontiers.items():
            line = {"Network": name, "Processes": str(ranks)}
            for rate in rates:
                choices = list_choices(frontier, links, net, ranks, rate)
                good = [c.setup.scheme for c in find_as_good(choices, frontier.as_good)]
                ours = [c for c in choices if c.kind in ("top-K", "TCS")]
                is_all = len(good) == len(ours) > 1
                line[f"{rate:,.0f} Mbit/s"] = "all" if is_all else ", ".join(good) or "none"
            lines.append(line)
    return pd.DataFrame(lines)


def tabulate_losses(frontier: Frontier) -> pd.DataFrame:
    """Make a table of the settings of a frontier: bytes, loss, differences from dense and PowerSGD, and
    whether a setting is as good as PowerSGD at no more bytes."""
    dense = frontier.bytes_per_step(Setup(frontier.stage.optimizers[0], "dense"))
    lines = []
    for setup in frontier.known:
        size, line = frontier.bytes_per_step(setup), {"Setting": setup.scheme}
        if any(one.corrected for one in frontier.known):
            line["Corrected"] = "yes" if setup.corrected else ""
        line |= {
            "Bytes per step": f"{size / dense:.1%}",
            "Loss": f"{frontier.mean_loss(setup):.3f}",
        }
        for name, gap in (
            ("minus dense", frontier.cost(setup)),
            ("minus PowerSGD", frontier.against_power_sgd(setup)),
        ):
            line[name] = format_interval(gap.value, gap.low, gap.high, "{:+.3f}")
        if kind_of(frontier.stage.schemes[setup.scheme]) in ("top-K", "TCS"):
            line["As good as PowerSGD"] = "yes" if frontier.is_as_good(setup) else "no"
        lines.append(line)
    return pd.DataFrame(lines).fillna("–")


def draw_choices(axes: Any, choices: Sequence[Choice]) -> None:
    """Draw the loss over the seconds per step, with 95 % intervals of the difference from dense training.
    Empty markers stand for calculated seconds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    markers = {kind: iter(marks) for kind, (_, marks) in _DRAWN.items()}
    for c in choices:
        colour = _DRAWN[c.kind][0]
        half = c.cost.half if c.kind != "dense" else 0.0
        axes.errorbar(
            c.seconds, c.loss, yerr=half or None, color=colour, marker=next(markers[c.kind], "o"), markersize=8,
            markerfacecolor=colour if c.measured else "white", capsize=3, linestyle="none", label=c.setup.scheme,
        )  # fmt: skip
    dense = next((c for c in choices if c.kind == "dense"), None)
    if dense is not None:
        axes.axhline(dense.loss, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="seconds per step", ylabel="test loss, nats per character")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if choices:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
