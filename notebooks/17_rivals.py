# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 · Compare with the rivals
#
# **Claim.** Messages of TCS, and of schemes that came before and after it, decode, and have the bits that
# formulas give. Which one to use follows from accuracy against megabytes both
# ways, and from the link.
#
# *Run time*: seconds. *Read before*: [02_sparsification](02_sparsification.ipynb), [10b_fewer_bytes](10b_fewer_bytes.ipynb).

# %% jupyter={"source_hidden": true}
import dataclasses
import math
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Len
from IPython.display import Markdown, display
from tcs_lab.studies import links as links_of

import tcs_core as tcs

plt.rcParams.update({"figure.constrained_layout.use": True} | lab.LOOK)

# %% jupyter={"source_hidden": true} tags=["parameters"]
profile = "small"  # whose records are drawn: params/rivals_<profile>.yaml says which
seeds = 5  # records of seeds 0 to seeds - 1 are looked for
below = 3.0  # points below the most accurate scheme: the target whose time is asked for
links = [1, 10, 100]  # Mbit/s, each way
latencies = [10, 100]  # ms a round
make = False  # True: first make the runs that have no record
data_root = None  # make: the folder or tar of the data; None: the profile's

# %% jupyter={"source_hidden": true}
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "17_rivals")
numbers = Annotated[list[lab.Positive], Len(1)]
lab.check_values(globals(), seeds=lab.Count, below=lab.Positive, links=numbers, latencies=numbers)
sizes = lab.read_params([lab.params_file("profile", profile)]) | {"seeds": seeds}
sizes |= {"data_root": data_root} if data_root else {}
asked = lab.read_sensitivity(lab.ROOT / f"params/rivals_{profile}.yaml")
points = lab.sensitivity_plan(asked, sizes, "learning_rate")
schemes = list(dict.fromkeys(name for _, name in points))
rates = list(dict.fromkeys(float(word) for word, _ in points))
print(f"{len(schemes)} schemes, rates {rates}, profile {profile}")
wanted = [config for group in points.values() for config in group] if make else []
if make:
    print(lab.forecast(wanted))

# %% jupyter={"source_hidden": true}
_ = lab.run_all(wanted, jobs=1)
found = {point: lab.load_records(group) for point, group in points.items()}
records = {file: record for group in found.values() for file, record in group.items()}


def final(record: dict) -> float:
    """Percent; 0 for a run that diverged."""
    return 100 * record["rows"][-1]["accuracy"] if record["status"] == "finished" else 0.0


# %% jupyter={"source_hidden": true}
best = {name: float(word) for name, word in lab.best_values(found).items()}
first = {}  # (scheme, rate): accuracy with seed 0
for (word, name), group in found.items():
    for record in group.values():
        if record["config"]["seed"] == 0:
            first[name, float(word)] = final(record)
chosen = {name: list(found[word, name].values()) for name, word in lab.best_values(found).items()}


def gap_of(name: str) -> tuple[float, float]:
    """Points above FedAvg over the seeds of both, and half of the interval."""
    ours, theirs = (
        {record["config"]["seed"]: final(record) for record in chosen.get(one, [])}
        for one in (name, "FedAvg")
    )
    common = ours.keys() & theirs.keys()
    return lab.paired_gain([ours[s] for s in common], [theirs[s] for s in common])


def row_of(name: str) -> list:
    """One scheme's line of the table, as numbers."""
    flows = pd.DataFrame([lab.traffic(record) for record in chosen[name]]).mean() / 1e6
    known = [name, best[name], len(chosen[name]), *lab.mean_interval(map(final, chosen[name]))]
    return [*known, *gap_of(name), flows["up"], flows["down"], flows["up"] + flows["down"]]


COLUMNS = ["scheme", "rate", "n", "mean", "low", "high", "gap", "half", "up", "down", "both"]
table = pd.DataFrame([row_of(name) for name in chosen], columns=COLUMNS)
table = table.sort_values("both", ascending=False)
order, front, highest = table.sort_values("both"), [], -math.inf
for row in order.itertuples():
    if row.mean > highest:
        front, highest = [*front, row.scheme], row.mean
dense = table.set_index("scheme")["both"].get("FedAvg", math.nan)
scale, often = f"profile {profile}, no record yet", math.nan
for record in list(records.values())[:1]:
    net = f"{record['config']['model']} with {record['dimension']:,} parameters"
    scale = f"{record['provenance']['dataset']}, {net}, {record['config']['epochs']} epochs"
    often = 0.01 * sum(
        row["rounds"] for row in record["rows"]
    )  # how often an entry is in a 1 % mask


# %% jupyter={"source_hidden": true}
def time_to(record: dict, goal: float, rate: float, latency: float) -> float:
    """Seconds of communication until an epoch's accuracy, in percent, is at the goal; inf if never."""
    for count, row in enumerate(record["rows"], 1):
        if 100 * row["accuracy"] >= goal:
            sent = lab.traffic(record | {"rows": record["rows"][:count]})
            rounds = sum(r["rounds"] for r in record["rows"][:count])
            return 8 * (sent["up"] + sent["down"]) / (1e6 * rate) + rounds * latency / 1000
    return math.inf


goal = table["mean"].max() - below if len(table) else math.nan
taken = [
    [name, latency, rate, pd.Series([time_to(r, goal, rate, latency) for r in group]).mean()]
    for name, group in chosen.items() for latency in latencies for rate in links
]  # fmt: skip
times = pd.DataFrame(taken, columns=["scheme", "latency", "link", "seconds"])
arrive = [
    name
    for name in chosen
    if times.loc[times["scheme"] == name, "seconds"].map(math.isfinite).all()
]


# %% [markdown]
# ## What to choose


# %% jupyter={"source_hidden": true}
def fastest(latency: float, rate: float) -> str:
    """The scheme that is first at the target there, and what the second takes longer."""
    part = times[(times["latency"] == latency) & (times["link"] == rate)]
    part = part[part["seconds"] < math.inf].sort_values("seconds")
    if len(part) < 2:
        return "open: fewer than two schemes reach the target"
    one, two = part.iloc[0], part.iloc[1]
    longer = two["seconds"] / one["seconds"]
    return (
        f"**{one['scheme']}**, {one['seconds']:,.0f} s; {two['scheme']} takes ×{longer:.2f} of it"
    )


def cheapest(rows: pd.DataFrame) -> str:
    row = rows.sort_values("both").iloc[0] if len(rows) else None
    return (
        "none" if row is None else f"**{row.scheme}**, {row['mean']:.2f} % with {row.both:,.1f} MB"
    )


def link(rate: float, latency: float) -> str:
    return f"{rate:g}\u00a0Mbit/s, {latency:g}\u00a0ms a round"


# %% jupyter={"source_hidden": true}
near = table[table["mean"] >= goal]
stateless = table[table["scheme"].isin(["FedAvg", "QSGD"])]
beaten = [name for name in table["scheme"] if name not in front]
untried = sum((name, rate) not in first for name in schemes for rate in rates)
slow, fast, soon, late = min(links), max(links), min(latencies), max(latencies)
advice = {
    f"Fewest megabytes within {below:g} points of the best": cheapest(near),
    f"Slow link ({link(slow, soon)})": fastest(soon, slow),
    f"Fast link ({link(fast, soon)})": fastest(soon, fast),
    f"Far away ({link(fast, late)})": fastest(late, fast),
    "Clients that keep nothing between rounds": cheapest(stateless),
    "Beaten in both, by the means": ", ".join(beaten) or "none",
}
if untried or table["n"].min() < 2:
    advice["Open yet"] = (f"{untried} of {len(schemes) * len(rates)} rates have no run, "
                          f"and the smallest n is {table['n'].min()}")  # fmt: skip
display(
    Markdown("\n".join(f"{i}. {what}: {who}." for i, (what, who) in enumerate(advice.items(), 1)))
)
seeds_each = " to ".join(f"{n}" for n in dict.fromkeys([table["n"].min(), table["n"].max()]))
print(f"{scale}; n\u00a0=\u00a0{seeds_each} seeds a scheme")
print(f"target of lines 2 to 4: {goal:.2f} %, in seconds of communication; it is not reached by: "
      f"{', '.join(n for n in chosen if n not in arrive) or 'none'}")  # fmt: skip

# %% [markdown]
# These lines go by the *means*, for this data, net and length. Bytes are certain. Most differences of accuracy are smaller than what seeds
# differ by, so *beaten* is a matter of bytes. Line 4 is where rounds, not bytes, decide: there local steps (-L4) could pay, which
# all of these schemes allow and none used here. Line 5 asks for schemes without errors: clients that come once and never again have
# nothing to add them to.
#
# The paper compares TCS with top-K and centralized training. Whoever has to choose compares it with the rest
# of the field, each at a rate of its own: `params/rivals_<profile>.yaml` says which schemes and which rates, and was
# written before the runs. This notebook draws the records that are there and trains nothing, unless it is told to (`make`).
# The command line makes the runs:
#
#     uv run tcs sensitivity --sweep params/rivals_small.yaml --params params/small.yaml --set data_root=... --seed 0
#
# With `profile = "small"` it shows a ResNet-8 on images, with `profile = "text"` [a small GPT](../results/text/17_rivals.ipynb).
# How often an entry of a mask gets to be sent there stands at the end. Suffixes: -Q5 is 5-bit values, -NW no dense warm-up, -D1 one bit a value on the
# way down, too.

# %% [markdown]
# ## One picture
#
# On the Pareto front is, by the means, a scheme that no other beats in both: more accurate, and fewer megabytes. The bars are 95 %
# intervals. Where they overlap, the order of two schemes is not known, and who is on the front may be chance: there is no line.


# %% jupyter={"source_hidden": true}
def draw_point(axes, row) -> None:
    """A scheme's mean and interval (none with one seed)."""
    look, half = lab.curve_style(row.scheme, table["scheme"]), row.high - row.mean
    look = {"color": look["color"], "fmt": look["marker"], "markersize": 7, "capsize": 3}
    axes.errorbar(row.both, row.mean, yerr=half if math.isfinite(half) else 0.0, **look)


# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(11, 4.8))
for row in table.itertuples():
    draw_point(axes, row)
axes.set(xscale="log", xlabel="megabytes of one client, both ways, whole run (log)")
axes.set(
    ylabel="final test accuracy (%)",
    title=f"Rivals at the best rates tried; bars: 95 % intervals\n{scale}",
)
axes.margins(0.15, 0.15)
lab.plain_log(axes.xaxis)
axes.grid(alpha=0.25)
names = [
    (r.scheme, r.both, r.mean, lab.curve_style(r.scheme, table["scheme"])["color"])
    for r in table.itertuples()
]
lab.tables.label_points(axes, names)
plt.show()

# %% [markdown]
# ## Who they are
#
# All are made of the core's parts: a mask rule, a quantizer, errors on both sides, a position code. What is
# new is in one file of the lab, with its sources, where it departs from them, and who was left out:

# %%
print(lab.schemes.rivals.__doc__)

# %% [markdown]
# ## The bits of one message
#
# One round of each on a hundred thousand random numbers a client. The formula is the paper's with whole numbers
# K and the quantizer's means (`bit_budget`); what is *sent* is the length of messages that were really
# decoded. Shorter codes (those of STC, QSGD and CocktailSGD) need fewer bits than the formula. In the same round:
# *left* is how far what a client meant is from what it sent and what waits, relative to what it
# meant. (FedAvg and QSGD keep no errors, and DGC keeps something else; their tests are in `tests/lab/test_rivals.py`.)

# %%
DIMENSION, CLIENTS = 100_000, 4
deltas_ND = torch.randn(CLIENTS, DIMENSION, generator=torch.Generator().manual_seed(0)) ** 3


def compressor_of(name: str, link: tcs.Link) -> tcs.Compressor:
    """Of the scheme, for so many parameters. (One rate, so errors in any unit are the same.)"""
    scheme = dataclasses.replace(tcs.Scheme.named(name), error_unit="difference")
    return tcs.Compressor(scheme, [DIMENSION], CLIENTS, link=link)


# %%
def left_over(compressor: tcs.Compressor, before_ND: torch.Tensor) -> float:
    """|meant - sent - waits| over |meant|, of all clients, in the round just made."""
    left = torch.zeros(CLIENTS)
    for n, message in enumerate(compressor.link.messages):
        meant_D = before_ND[n] + deltas_ND[n]
        rest_D = meant_D - compressor.errors_ND[n]
        message.add_to_(rest_D, compressor.known.shared_K, -1.0)
        left[n] = rest_D.norm() / meant_D.norm()
    return float(left.max())


# %%
def one_round(name: str) -> dict:
    """Bits of a sparse round's messages, by formula and as sent, and what is left over."""
    compressor = compressor_of(name, lab.Listening(tcs.unchanged))
    compressor.step(deltas_ND)  # a first, dense one gives TCS its mask
    before_ND = compressor.errors_ND.clone()
    compressor.step(deltas_ND)
    scheme = compressor.scheme
    keeps = scheme.keeps_errors and tcs.rule_of(scheme).client_type is None
    formula = DIMENSION * scheme.local_steps * tcs.bit_budget(scheme, DIMENSION)
    bits = {"formula": formula, "sent": compressor.bits_up, "down": compressor.bits_down}
    left = left_over(compressor, before_ND) if keeps else math.nan
    return {"scheme": name, "code": scheme.code} | bits | {"left": left}


# %%
messages = pd.DataFrame([one_round(name) for name in schemes])
bits = messages[["formula", "sent", "down"]].map("{:,.0f}".format)
shown = messages.assign(
    **bits, left=(1e9 * messages["left"]).map("{:.0f}".format).replace("nan", "–")
)
heads = {"sent": "sent up, bits", "down": "sent down", "left": "left, billionths"}
display(Markdown(lab.markdown(shown.rename(columns=heads))))

# %% [markdown]
# ## The rates
#
# Final accuracy in percent with seed 0, at each rate of the grid. The best rate of each scheme is the one it is
# compared at. A best rate at the grid's edge means that a better one may lie beyond it; 0.00 means that the training diverged.


# %%
def cell(name: str, rate: float) -> str:
    """Accuracy with seed 0, the best rate's in bold."""
    if (name, rate) not in first:
        return "–"
    text = f"{first[name, rate]:.2f}"
    return f"**{text}**" if best.get(name) == rate else text


grid = [{"Scheme": n} | {f"η {rate:g}": cell(n, rate) for rate in rates} for n in schemes]
display(Markdown(lab.markdown(pd.DataFrame(grid))))

# %% [markdown]
# ## One table
#
# Each scheme at its best rate: final accuracy with a 95 % interval over the seeds (none with one seed),
# the difference to FedAvg, which sends everything, paired by seed, and megabytes of **one client's** messages in the whole run,
# all overhead and warm-up in.


# %%
def rate_of(name: str) -> str:
    """Its best rate; how many were tried, if not all; else whether a better one may lie beyond."""
    tried = sum((name, rate) in first for rate in rates)
    edge = " (edge)" * (best[name] in (min(rates), max(rates)))
    return f"{best[name]:g}" + (
        edge if tried == len(rates) else f" ({tried} of {len(rates)} tried)"
    )


# %%
lines = [
    {"Scheme": f"**{r.scheme}**" if r.scheme in front else r.scheme, "η": rate_of(r.scheme),
     "n": r.n, "Accuracy %": lab.with_interval(r.mean, r.low, r.high, "{:.2f}"),
     "− FedAvg, points": lab.with_interval(r.gap, r.gap - r.half, r.gap + r.half),
     "MB up": f"{r.up:,.1f}", "MB both": f"{r.both:,.1f}",
     "× less than FedAvg": f"{dense / r.both:.1f}"}
    for r in table.itertuples()
]  # fmt: skip
display(Markdown(lab.markdown(pd.DataFrame(lines)) if lines else "no record yet"))
print("on the Pareto front:", ", ".join(front))

# %% [markdown]
# ## The time on a link
#
# Megabytes are not time. A round costs its latency too, however short its message: on a fast link with a
# long way, all schemes take as long as they have rounds. The target is the accuracy of the most accurate scheme minus `below`
# points; the time is that of all messages up and down until the first epoch that reaches it, with a latency a
# round, and **no computing**. A scheme gets there if it does with every seed.


# %% jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, len(latencies), figsize=(8.6, 4.6), sharey=True, squeeze=False)
for axes, latency in zip(panels[0], latencies, strict=True):
    for name in arrive:
        part = times[(times["scheme"] == name) & (times["latency"] == latency)]
        style = lab.curve_style(name, arrive)
        _ = axes.plot(part["link"], part["seconds"], **style, ms=6, label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="link, Mbit/s", title=f"latency {latency:g} ms a round"
    )
    lab.plain_log(axes.xaxis)
    lab.plain_log(axes.yaxis)
    axes.grid(alpha=0.25)
panels[0][0].set(ylabel=f"seconds of communication to {goal:.1f} %")
handles, labels = panels[0][0].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
figure.suptitle(f"Time to the target on a link: {scale}", fontsize=10)
plt.show()

# %% [markdown]
# The time is calculated: bytes divided by the rate. [12_real_training](12_real_training.ipynb) limited a link and measured. What
# did the limit add to a step there, where by this calculation the bytes take longer than all the rest?

# %%
measured = links_of.Links(links_of.read_rows())
print("on a limited link a step took longer by", measured.bytes_over_rate())

# %% [markdown]
# ## Claim
#
# 1. What a client sends has the bits of the formula: within 2 % with the paper's code, at most that with a shorter one.
# 2. What was meant is what was sent and what waits, to the rounding of float32.
# 3. Every rate on record is on the grid, or in one of the paper's tables.

# %%
ratio = (messages["sent"] / messages["formula"])[messages["scheme"] != "FedAvg"]
plain = messages["code"] == "block"
claim("bits sent are the formula's within 2 %", bool((ratio[plain] - 1).abs().max() < 0.02),
      f"{ratio[plain].min():.4f} to {ratio[plain].max():.4f}")  # fmt: skip
claim(
    "shorter codes have at most the formula's bits",
    bool(ratio[~plain].max() <= 1),
    f"{ratio[~plain].max():.3f}",
)
worst = messages["left"].max()
claim(
    "what was meant is what was sent and what waits",
    bool(worst < 1e-6),
    f"but for {1e9 * worst:.0f} billionths",
)
papers = {lab.read_params([lab.ROOT / f"params/table{t}.yaml"])["learning_rate"] for t in (1, 2, 3)}
configs = [record["config"] for record in lab.find_records(profile=profile).values()]
used = {c["learning_rate"] for c in configs if c["scheme"]["name"] in schemes}
claim("every rate is on the grid, or a table's", used <= papers.union(rates), f"{sorted(used)}")

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())
for r in table.itertuples():
    print(f"{r.scheme}: {r.mean:.2f} % with {r.both:,.1f} MB, η {rate_of(r.scheme)}, n = {r.n}")
print(f"rounds × 1 %, how often an entry is sent, on average: {often:.0f} (the paper: 234)")
missing = [f"{name} {word}" for (word, name), group in found.items() if not group]
print("not measured:", ", ".join(missing) or "nothing")

# %% [markdown]
# Few seeds decide little between schemes a point apart. Rates are chosen by the test accuracy of seed 0, which then counts
# in the mean: all schemes gain a little from that. What the warm-up costs is part of the bytes: the two dense epochs
# of TCS on images are more than half of its uplink. The paper's claims in the same trainings stand in [13_evidence](13_evidence.ipynb). Next:
# [18_flower](18_flower.ipynb).

# %%
print(f"core {lab.core_sha256()[:12]} · {scale} · n = {len(records)} records")
