# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Vary one setting at a time
#
# **In short.** With 15 epochs and one training per value, accuracy rose with the size of both masks and with the learning rate, over the whole
# range that was tried. Starting with one dense round instead of a dense epoch cut the megabytes to a sixth. Unequal classes among the
# clients cost the most accuracy. Seeds alone make differences of half a point (`results/short/table1.md`), so some results are undecided: 5-bit
# values against 32-bit values, and one dense round against a dense epoch.
#
# **Claim.** What a client sends after the warm-up can be computed from the settings before any training. The accuracy that it buys has to
# be measured.
#
# The paper uses one value for each of its settings. This notebook varies each setting alone, around TCS-Q5 with one local step. It
# shows how accuracy and bytes depend on it, and what one would choose in practice. `params/sensitivity.yaml` lists the values.
# The notebook draws existing records and trains nothing, unless you set `make`. The command line makes the runs, too, for one
# setting and seed at a time:
#
#     uv run tcs sensitivity --params params/short.yaml --setting phi_local --seed 0 --set data_root=cifar10.tar
#
# Short trainings mainly compare how fast methods learn. [13_evidence](13_evidence.ipynb) shows how differences shrink in longer ones.
#
# *Run time*: seconds. *Read before*: [03_tcs](03_tcs.ipynb), [10_bits_on_the_wire](10_bits_on_the_wire.ipynb).

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import math

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
from IPython.display import Markdown, display

import tcs_core as tcs

plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 10})

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
evidence = "short"  # the profile whose records are drawn: params/<profile>.yaml, results/<profile>/
make = False  # True: first make the runs that have no record; hours in profile short
settings = None  # make: a list of settings; None: all
seeds = None  # make: how many trials, or a list of seeds; None: the profile's
data_root = None  # make: the folder or tar of the data; None: the profile's
jobs = 2  # make: runs side by side

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
given = {"seeds": seeds, "data_root": data_root}
profile = lab.read_params([lab.params_file("evidence", evidence)])
profile |= {key: value for key, value in given.items() if value is not None}
sweep = lab.read_sensitivity(lab.ROOT / "params" / "sensitivity.yaml")
folder = lab.results_folder(evidence)

# %% [markdown]
# ## The runs
#
# For each setting there is one run per value, with everything else as in the profile. The usual value belongs to every setting, so this run
# is made once and used for all of them. If a table of the paper contains the same run, its record is used. The notebook looks for seeds up to
# 99. The table uses only those seeds that all values of a setting have.

# %%
wanted = {}
if make:
    plans = [lab.sensitivity_plan(sweep, profile, name) for name in settings or sweep.settings]
    wanted = {c.record_name: c for plan in plans for runs in plan.values() for c in runs}
    print(lab.forecast(wanted.values(), jobs))

# %%
_ = lab.run_all(wanted.values(), jobs=jobs)
records = {}
for name in sweep.settings:
    for configs in lab.sensitivity_plan(sweep, profile | {"seeds": 100}, name).values():
        records |= lab.load_records(configs)
print(f"{len(records)} records found in results/{evidence}/runs/")

# %%
scale = f"profile {evidence}, no record yet"
for first in list(records.values())[:1]:
    net = f"{first['config']['model']} of {first['dimension']:,} parameters"
    number = f"{profile['train_samples']:,}" if profile.get("train_samples") else "all"
    images = f"{number} images of {first['provenance']['dataset']}"
    scale = f"{images}, {net}, {profile['epochs']} epochs unless varied"
title = f"Sensitivity: {scale}"
table = lab.sensitivity_table(sweep, profile | {"seeds": 100})
text = lab.save_table(table, folder / "sensitivity", title, lab.readable_sensitivity)
display(Markdown(lab.prevent_line_breaks(text)))

# %% [markdown]
# Each row is one value of a setting. It shows the accuracy in percent, ± one standard deviation over n seeds (none with one seed), and the
# megabytes that **one client** sends and receives in the whole run. *Diverged* means that at least one seed did not reach the end. In that case
# no mean is shown.
#
# ## The settings, one by one
#
# Each figure has two panels over the same values. The values are drawn at equal distances, whatever their size. The upper panel shows the mean
# accuracy and one standard deviation over the seeds. Its axis does not start at zero, so look at the numbers. The lower panel shows megabytes
# in both directions, on a log scale. Filled marks are the whole run. White marks leave out the dense warm-up, which is most of the traffic of
# a short training and would hide what a setting changes in the rest. The band marks the paper's choice.


# %%
def curves_of(name: str) -> dict[str, pd.DataFrame]:
    """A setting's rows that have a record, a curve a scheme; schemes that are themselves the values
    share one. Empty if fewer than two values have a record."""
    rows = table[(table["setting"] == name) & (table["n"] + table["diverged"] > 0)]
    if rows["value"].nunique() < 2:
        return {}
    if sweep.settings[name].named:
        return {" … ".join(rows["scheme"].iloc[[0, -1]]): rows}
    return dict(list(rows.groupby("scheme", sort=False)))


def trials(curve: pd.DataFrame) -> str:
    return " to ".join(map(str, sorted({curve["n"].min(), curve["n"].max()})))


# %%
def draw_curve(upper, lower, curve: pd.DataFrame, words: list[str], style: dict) -> None:
    """Accuracy above; below, megabytes of the whole run and (white) without the dense warm-up."""
    at = [words.index(value) for value in curve["value"]]
    deviation = 100 * curve["accuracy_std"]
    upper.errorbar(at, 100 * curve["accuracy"], yerr=deviation, capsize=4, **style)
    both = curve["megabytes_up"] + curve["megabytes_down"]
    lower.plot(at, both, **style)
    thin = style | {"markerfacecolor": "white", "linewidth": 0.8}
    lower.plot(at, both - curve["megabytes_warmup"], **thin)


def mark_paper(panels, marked: str | None, words: list[str]) -> None:
    """The band at the paper's choice, if it is one of the values."""
    for axes in panels if marked else ():
        at = words.index(marked)
        axes.axvspan(at - 0.12, at + 0.12, color=lab.COLOURS[5], alpha=0.3, lw=0)


# %%
def draw(name: str) -> None:
    """The figure of one setting; or how much is missing for it."""
    curves, setting = curves_of(name), sweep.settings[name]
    if not curves:
        rows = table[table["setting"] == name]
        print(
            f"{name}: {rows[rows['n'] > 0]['value'].nunique()} values have a record, too few for a figure"
        )
        return
    figure, panels = plt.subplots(2, 1, figsize=(7.2, 5.4), sharex=True, height_ratios=(3, 2))
    for scheme, curve in curves.items():
        style = lab.curve_style(scheme, list(curves)) | {"markersize": 6, "linewidth": 1.5}
        draw_curve(*panels, curve, list(setting.choices), style)
    finish(figure, panels, name, curves)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def finish(figure, panels, name: str, curves: dict[str, pd.DataFrame]) -> None:
    """Ticks, axes, the paper's choice, and the schemes' names at the ends of their curves."""
    (upper, lower), setting = panels, sweep.settings[name]
    words, rows = list(setting.choices), pd.concat(curves.values())
    lost = rows.groupby("value")["diverged"].sum()
    ticks = [f"{word}\n{lost[word]} diverged" if lost.get(word) else word for word in words]
    lower.set_xticks(range(len(words)), ticks)
    lower.set(xlabel=setting.label, xlim=(-0.4, len(words) - 0.6))
    mark_paper(panels, setting.marked, words)
    write_names(upper, lower, curves, words)
    marks = "bars: ± one standard deviation where n > 1; white marks: without the warm-up"
    upper.set_title(f"{name} ({scale})\n{marks}", fontsize=10)
    lab.show_figures()


# %%
def write_names(upper, lower, curves: dict[str, pd.DataFrame], words: list[str]) -> None:
    """Axes and grids; each scheme's name and n beside the end of its curve."""
    upper.set(ylabel="test accuracy (%)")
    lower.set(ylabel="MB per client (log)", yscale="log")
    lab.plain_log(lower.yaxis)
    upper.grid(alpha=0.25)
    lower.grid(alpha=0.25)
    drawn = {s: curve for s, curve in curves.items() if curve["accuracy"].notna().any()}
    ends = [end_of(scheme, curve, words, list(curves)) for scheme, curve in drawn.items()]
    lab.label_ends(upper, ends)


def end_of(scheme: str, curve: pd.DataFrame, words: list[str], schemes: list[str]) -> tuple:
    """What is written at a curve's last point: words, where, colour."""
    last, colour = (
        curve.dropna(subset="accuracy").iloc[-1],
        lab.curve_style(scheme, schemes)["color"],
    )
    text = f"{scheme}, n = {trials(curve)}"
    return text, words.index(last["value"]), 100 * last["accuracy"], colour


# %% [markdown]
# ### A client's own mask
#
# $\phi_{local}$ is the fraction of entries that each client chooses itself, outside the shared mask. With them it *explores* which entries
# have become important. Their positions have to be sent, too. The paper recommends $\phi_{local}\ll\phi_{global}$.
#
# Look at the left end of the upper panel, where the shared mask gets the fewest new entries: how much accuracy is lost? Then look at the
# white marks: each step multiplies the number of these entries by about three, but the bytes by less.

# %%
draw("phi_local")

# %% [markdown]
# ### The shared mask
#
# $\phi_{global}$ is the fraction of entries in the shared mask. They need no positions, since everybody knows them. If the mask is large,
# bytes grow nearly in proportion to it. If it is small, most of the bytes belong to the entries that clients choose themselves.

# %%
draw("phi_global")

# %% [markdown]
# ### Bits of a value
#
# With $q$ bits there are $P=2^{q-1}$ intervals, and each interval's mean is sent as a 32-bit number. In a network as small as this one, these
# means are a visible part of a message if $q$ is large. In the paper's network they hardly count.
#
# What quantization loses is added to the client's errors and sent later. Look for the number of bits, if any, at which this is no longer
# enough. Only clients quantize: the server sends 32-bit values for every $q$. With two and three bits the shared mask changes much less
# from round to round (`mask_overlap` in their records).

# %%
draw("value_bits")

# %% [markdown]
# ### Clients
#
# All samples are divided among $N$ clients, each with its own batch. More clients therefore mean **fewer rounds** per epoch, larger
# cumulative batches and, by the linear scaling rule, higher learning rates. The curve shows all of this together, as in any federation that
# grows. What one client sends falls with the number of rounds.

# %%
draw("clients")

# %% [markdown]
# ### Class skew
#
# A small $\alpha$ gives each client only a few of the classes. *IID* is the paper's setting, in which all clients have similar data. Does one
# shared mask still serve clients whose data differ? What a client sends has the same size in all cases. What the server sends may
# grow, because it contains every entry that at least one client chose.
#
# A loss of accuracy need not be due to TCS. Every client normalizes with the statistics of its own batches, and a client with few classes has
# other statistics than the averaged model is tested with. Dense federated averaging was not run with these settings, so this figure cannot
# tell how much of the loss comes from sparsification.

# %%
draw("dirichlet_alpha")

# %% [markdown]
# ### The dense warm-up
#
# "One round" is the shortest possible warm-up: it gives the first shared mask. The learning rate then starts at its full value, since its
# rise is tied to the warm-up. The paper uses 5 of 300 epochs. In proportion this would be less than one epoch here, so one is marked. In a
# short training most of the megabytes belong to the dense epochs. What do these buy?

# %%
draw("warmup_epochs")

# %% [markdown]
# ### Learning rate
#
# Our trainings use the paper's learning rates, scaled with the batch, and tune none of them. Is 0.5 a good choice for such a short
# training and such a small network? If a higher rate does better, then part of every difference between TCS and centralized
# training comes from the rates. (Centralized training uses the paper's rate of 0.1, also scaled.)

# %%
draw("learning_rate")

# %% [markdown]
# Accuracy rises with the rate over the whole range (one trial). The paper's 0.5 is thus too low for this training. The best value is
# the largest that was tried, so an even higher rate may be better.
#
# ### Epochs
#
# Does TCS-L4-Q5 lose accuracy because it has too few rounds? It has a quarter of TCS's rounds in the same number of epochs. If this is the
# reason, its distance to TCS and to centralized training (the Baseline) shrinks towards the right. The two schemes also differ in the bits of
# a value; the figure for $q$ shows what that costs alone. The Baseline sends nothing and has no mark in the lower panel.

# %%
draw("epochs")

# %%
rows = []
for value, group in table[table["setting"] == "epochs"].groupby("value", sort=False):
    found = [records[file] for file in " ".join(group["records"]).split()]
    gaps = lab.summary(found).set_index("scheme") if found else pd.DataFrame()
    cells = {"epochs": value}
    for name in ("TCS", "TCS-L4-Q5"):
        gap = gaps.loc[name] if name in gaps.index else lab.tables.NO_GAP
        numbers = (100 * gap[end] for end in ("difference", "difference_low", "difference_high"))
        cells[f"{name} − Baseline, points"] = lab.format_interval(*numbers)
        cells[f"n, {name}"] = str(gap["difference_n"])
    rows.append(cells)
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# The table has one seed. Each difference is smaller than in the shorter training above it, which is what too few rounds would lead to. It is
# no proof: the learning rates are the same for all lengths, and they may not suit each length equally well.
#
# ## What a practitioner would choose
#
# We fixed the following rule before the runs. Consider all values whose accuracy is within a margin of the best one's (or within the best
# one's standard deviation over seeds, if that is larger). Of these, choose the value with the **fewest megabytes in both directions**. Some
# settings are given and cannot be chosen: who takes part, and with which data. For these the table names the worst value and what it costs.


# %%
def cheapest_near_best(curve: pd.DataFrame, margin: float):
    """The row to choose, and the most accurate one; None without a mean and bytes to go by."""
    curve = curve.assign(cost=curve["megabytes_up"] + curve["megabytes_down"])
    curve = curve.dropna(subset=["cost", "accuracy"]).sort_values("accuracy", ascending=False)
    if curve.empty:
        return None
    best = curve.iloc[0]
    deviation = 0.0 if math.isnan(best["accuracy_std"]) else best["accuracy_std"]
    near = curve[curve["accuracy"] >= best["accuracy"] - max(margin / 100, deviation) - 1e-12]
    return near.loc[near["cost"].idxmin()], best


tried = pd.DataFrame({"accuracy": [0.70, 0.704, 0.71], "accuracy_std": [math.nan, math.nan, 0.008]})
tried[["megabytes_up", "megabytes_down"]] = [[1, 1], [1, 3], [5, 5]]
assert [row["accuracy"] for row in cheapest_near_best(tried, 0.5)] == [0.704, 0.71]
assert cheapest_near_best(tried.assign(accuracy_std=0.02), 0.5)[0]["accuracy"] == 0.70


# %%
def choice(name: str, scheme: str, curve: pd.DataFrame, chosen, best) -> dict[str, str]:
    """One line: the most accurate value, the chosen one (or the worst), and the differences."""
    setting = sweep.settings[name]
    chosen = curve.loc[curve["accuracy"].idxmin()] if setting.given else chosen
    cost = [
        lab.format_number(row["megabytes_up"] + row["megabytes_down"]) for row in (chosen, best)
    ]
    points = f"{100 * (chosen['accuracy'] - best['accuracy']):+.2f}".replace("-", "−")
    word = f"given; worst: {chosen['value']}" if setting.given else chosen["value"]
    return {"Setting": name, "Scheme": scheme,
            "Most accurate": f"{best['value']} ({100 * best['accuracy']:.2f} %)", "Choose": word,
            "Points": points, "MB both ways": " instead of ".join(dict.fromkeys(cost)),
            "Paper": setting.marked or "–", "n": trials(curve)}  # fmt: skip


# %%
lines = []
for name in sweep.settings:
    for scheme, curve in curves_of(name).items():
        if found := cheapest_near_best(curve, sweep.margin):
            lines.append(choice(name, scheme, curve, *found))
print(f"The margin is {sweep.margin:g} percentage points.")
display(
    Markdown(
        lab.markdown(pd.DataFrame(lines)) if lines else "There is nothing to choose between yet."
    )
)

# %% [markdown]
# *Points* and *MB* compare the chosen value (or the worst one) with the most accurate one. Some limits of the rule:
#
# - It counts only bytes, but more epochs also cost computing time.
# - Values are compared over the seeds that all values of the setting have. With one seed a value can be the best by luck, so look at n.
# - For $\phi_{local}$, $\phi_{global}$, η and few clients, the most accurate value is the last one that was tried. A better one may lie
#   outside the range.
# - Each setting was varied alone. Combinations of two choices were not tried.
#
# ## Claim
#
# The next cell checks two statements. For every setting, the bits that one client sends after the warm-up are those of the formula for these
# settings and this number of parameters, within 1 %. (They are not equal, because the blocks of the position code are powers of two, and those
# of the formula are not. Schemes with a shorter code, marked `+`, are left out.) And every row of the table is the mean of its records.

# %%
off = {}
for file, record in records.items():
    scheme, measured = tcs.Scheme(**record["config"]["scheme"]), lab.bits_per_parameter(record)
    if record["rows"] and measured["uplink"] > 0 and scheme.code == "block":
        off[file] = measured["uplink"] / tcs.bit_budget(scheme, record["dimension"]) - 1
assert all(abs(value) < 0.01 for value in off.values()), off
for row in table.itertuples():
    final = [records[f]["rows"][-1]["accuracy"] for f in row.records.split() if not row.diverged]
    assert not final or abs(row.accuracy - sum(final) / len(final)) < 1e-12
assert len({record["provenance"]["fingerprint"] for record in records.values()}) <= 1
worst = max(map(abs, off.values()), default=0.0)
print(f"{len(off)} federated records: what a client sent is as computed, within {worst:.2%}")

# %% [markdown]
# ## What we saw

# %%
for name in sweep.settings:
    for scheme, curve in curves_of(name).items():
        low, high = (100 * getattr(curve["accuracy"], end)() for end in ("min", "max"))
        sent = curve["megabytes_up"] + curve["megabytes_down"]
        ratio = (
            f", bytes ×{lab.format_number(sent.max() / sent.min())}" if sent.notna().all() else ""
        )
        print(f"{name}, {scheme}: {len(curve)} values, {low:.2f} to {high:.2f} %{ratio}")
missing = table[table["n"] + table["diverged"] == 0].groupby("setting", sort=False)["value"]
for name, values in missing:
    print(f"not measured: {name} {', '.join(values.unique())}")

# %% [markdown]
# If a setting has a wide range of accuracies, it is worth tuning. If its range of accuracies is narrow and its range of bytes is wide, it is
# where to save. All of this is from short trainings of a small network. In longer trainings, entries that are sent late, which cost
# accuracy here, have more time to arrive.
#
# Next: [15_your_own_model](15_your_own_model.ipynb) tries such settings on your model and data.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Shown with {lab.describe_core()}, from {len(records)} records ({scale}).")
