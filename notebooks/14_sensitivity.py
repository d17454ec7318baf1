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
# **In short.** In 15 epochs, with one training a value: larger masks and higher rates gained accuracy over the whole range tried. One
# dense round in place of a dense epoch sent a sixth of the bytes. Class skew cost most. Seeds alone make
# differences of half a point (`results/short/table1.md`): five bits and 32 lie closer, as do one round and an epoch.
#
# **Claim.** What a client sends after the warm-up follows from the settings by arithmetic, before any
# training; what accuracy that buys has to be measured.
#
# The paper has one value for each of its settings. Here each is varied alone, around TCS-Q5 with one
# local step: how much accuracy depends on it, how many bytes, and what a practitioner would choose.
# `params/sensitivity.yaml` says what is varied. This notebook draws the records that are there and
# trains nothing, unless it is told to (`make`); so does the command line, one setting and seed at a
# time:
#
#     uv run tcs sensitivity --params params/short.yaml --setting phi_local --seed 0 --set data_root=cifar10.tar
#
# Short trainings compare speeds of optimization: [13_evidence](13_evidence.ipynb) shows how gaps close in longer ones.
#
# *Run time*: seconds. *Read before*: [03_tcs](03_tcs.ipynb), [10_bits_on_the_wire](10_bits_on_the_wire.ipynb).

# %% jupyter={"source_hidden": true}
import math

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
from IPython.display import Markdown, display

import tcs_core as tcs

plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 10})

# %% jupyter={"source_hidden": true} tags=["parameters"]
evidence = "short"  # the profile whose records are drawn: params/<profile>.yaml, results/<profile>/
make = False  # True: first make the runs that have no record; hours in profile short
settings = None  # make: a list of settings; None: all
seeds = None  # make: how many trials, or a list of seeds; None: the profile's
data_root = None  # make: the folder or tar of the data; None: the profile's
jobs = 2  # make: runs side by side

# %% jupyter={"source_hidden": true}
lab.check_notebook_params(globals())
given = {"seeds": seeds, "data_root": data_root}
profile = lab.read_params([lab.params_file("evidence", evidence)])
profile |= {key: value for key, value in given.items() if value is not None}
sweep = lab.read_sensitivity(lab.ROOT / "params" / "sensitivity.yaml")
folder = lab.results_folder(evidence)

# %% [markdown]
# ## The runs
#
# For each setting, every value with everything else as in the profile. The value that is the base's
# own is the same run in all settings, and is made once; where a table of the paper has the same run,
# its record is used. Seeds up to 99 are looked for; a row counts those that every value of its setting has.

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
print(f"{len(records)} records in results/{evidence}/runs/")

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
display(Markdown(lab.unbroken(text)))

# %% [markdown]
# Each row is a value: accuracy in percent, ± one standard deviation over n seeds (none
# with one seed), and the megabytes of **one client's** messages in the whole run, all overhead in.
# *diverged* means that a seed did not get to the end: no mean is taken over those that did.
#
# ## The settings, one by one
#
# Each figure has two panels over the same values, which stand in even steps whatever their distance.
# Above, accuracy: the mean, and one standard deviation over the seeds; its axis does not start at
# zero, so look at the numbers. Below, megabytes both ways on a log scale: the whole run, and (white)
# what is left without the dense warm-up. In a short training the warm-up is most of the traffic and
# hides what a setting changes in the rest. The band marks the paper's choice.


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
        print(f"{name}: {rows[rows['n'] > 0]['value'].nunique()} values recorded, too few to draw")
        return
    figure, panels = plt.subplots(2, 1, figsize=(7.2, 5.4), sharex=True, height_ratios=(3, 2))
    for scheme, curve in curves.items():
        style = lab.curve_style(scheme, list(curves)) | {"markersize": 6, "linewidth": 1.5}
        draw_curve(*panels, curve, list(setting.choices), style)
    finish(figure, panels, name, curves)


# %% jupyter={"source_hidden": true}
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
    marks = "bars: ± one std where n > 1; white: without the warm-up"
    upper.set_title(f"{name} ({scale})\n{marks}", fontsize=10)
    plt.show()


# %%
def write_names(upper, lower, curves: dict[str, pd.DataFrame], words: list[str]) -> None:
    """Axes and grids; each scheme's name and n beside the end of its curve."""
    upper.set(ylabel="test accuracy (%)")
    lower.set(ylabel="MB of one client (log)", yscale="log")
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
# $\phi_{local}$ is how much each client *explores*: entries outside the shared mask, which cost
# positions too. The paper wants $\phi_{local}\ll\phi_{global}$. At the left end of the upper panel, see what
# accuracy is lost where the shared mask gets fewest new entries; look at the white marks below, too: each step is about
# a factor of three in these entries, but not in bytes.

# %%
draw("phi_local")

# %% [markdown]
# ### The shared mask
#
# $\phi_{global}$ is how much all *exploit*: entries that need no positions. The larger the mask, the nearer
# bytes grow in proportion to it; a small one leaves most of them to what clients found themselves.

# %%
draw("phi_global")

# %% [markdown]
# ### Bits of a value
#
# $q$ bits have $P=2^{q-1}$ intervals, and their means travel in 32 bits each. In a model as small as
# this the means are a visible part of a message with many bits; in the paper's they vanish. Error
# accumulation keeps what quantization loses: look for the number of bits, if any, where that is no
# longer enough. The quantizer works on the way up only: the way down has 32-bit values at every $q$. With two
# and three bits the shared mask changes much less (`mask_overlap` in their records).

# %%
draw("value_bits")

# %% [markdown]
# ### Clients
#
# All samples are divided among $N$ clients with a batch of their own, so more clients mean **fewer
# rounds** an epoch, larger cumulative batches and, by the linear scaling rule, larger learning rates:
# the curve shows all of that together, as in any federation that grows. What one client sends falls
# with the number of rounds.

# %%
draw("clients")

# %% [markdown]
# ### Class skew
#
# A small $\alpha$ gives each client few of the classes; IID is the paper's setting. Does one shared mask
# still serve clients whose data differ? The size of what a client sends cannot depend on it; what the
# server sends can, being the union of all that the clients found.
#
# What is lost need not be TCS's alone: every client normalizes with its own batches' statistics, and one with
# few classes has others than the averaged model is tested with. Dense federated averaging was not run
# beside it, so how much of a loss is sparsification's cannot be told from this figure.

# %%
draw("dirichlet_alpha")

# %% [markdown]
# ### The dense warm-up
#
# "One round" is the least that gives a first shared mask; the learning rate then starts at its full
# value, since its rise is tied to the warm-up. The paper has 5 epochs of 300; in proportion that is less than one here, and one
# is marked. In a short training most of the megabytes are those of
# the dense epochs: what do they buy?

# %%
draw("warmup_epochs")

# %% [markdown]
# ### Learning rate
#
# The evidence takes the paper's rates, scaled with the batch, and tunes none of them. Is 0.5 a good choice
# for so short a training with so small a network? If a higher rate does better, a part of every gap between
# TCS and centralized training (whose rate is the paper's 0.1, scaled too) is a matter of rates.

# %%
draw("learning_rate")

# %% [markdown]
# Accuracy rises with the rate over the whole range (one trial): the paper's 0.5 is low for
# this training, and the best value is the largest that was tried, so the best rate is not in the picture.
#
# ### Epochs
#
# Are few rounds what hurts local steps? TCS-L4-Q5 has a quarter of TCS's rounds in the same epochs. If
# the lack of rounds is the reason, its distance to TCS and to the centralized Baseline shrinks towards
# the right. (They differ in the bits of a value, too: the figure of $q$ shows what that costs alone.)
# The Baseline sends nothing and has no mark below.

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
        cells[f"{name} − Baseline, points"] = lab.with_interval(*numbers)
        cells[f"n, {name}"] = str(gap["difference_n"])
    rows.append(cells)
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# With one seed, each gap is smaller than in the shorter training before it. That is what a lack of rounds would do. The rates, which
# are the same at all lengths, do not suit each length equally well.
#
# ## What a practitioner would choose
#
# The rule was fixed before the runs: of all values whose accuracy is within a margin of the best
# one's, or within the best one's standard deviation over seeds if that is more, the one with the
# **fewest megabytes both ways**. What is given (who takes part, and with which data) is not chosen;
# there the worst value is named, and what it costs.


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
    cost = [lab.number(row["megabytes_up"] + row["megabytes_down"]) for row in (chosen, best)]
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
print(f"margin: {sweep.margin:g} percentage points")
display(Markdown(lab.markdown(pd.DataFrame(lines)) if lines else "nothing to choose between yet"))

# %% [markdown]
# *Points* and *MB* compare the value that is chosen (or the worst) with the most accurate one. The
# rule counts bytes alone: more epochs cost computing, too. Values of a setting are compared over the seeds
# that all of them have. Where the most accurate value is the last one tried ($\phi_{local}$, $\phi_{global}$, η,
# few clients), the best may lie beyond. Mind n: with one trial a value can be best
# by luck. Each setting was varied alone:
# two choices together were not tried.
#
# ## Claim
#
# Whatever was varied, one client's uplink after the warm-up has the bits that the formula gives for
# these settings and this number of parameters, within 1 % (but for `+` codes, which are shorter): the
# position code's blocks are powers of two, the formula's are not. And every row is what its records say.

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
print(f"{len(off)} federated records: uplink as computed, within {worst:.2%}")

# %% [markdown]
# ## What we saw

# %%
for name in sweep.settings:
    for scheme, curve in curves_of(name).items():
        low, high = (100 * getattr(curve["accuracy"], end)() for end in ("min", "max"))
        sent = curve["megabytes_up"] + curve["megabytes_down"]
        ratio = f", bytes ×{lab.number(sent.max() / sent.min())}" if sent.notna().all() else ""
        print(f"{name}, {scheme}: {len(curve)} values, {low:.2f} to {high:.2f} %{ratio}")
missing = table[table["n"] + table["diverged"] == 0].groupby("setting", sort=False)["value"]
for name, values in missing:
    print(f"not measured: {name} {', '.join(values.unique())}")

# %% [markdown]
# A setting with a wide range of accuracies is worth tuning; one with a narrow range and a wide range
# of bytes is where to save. All of it in short trainings of a small network: in longer ones, delays
# that cost accuracy here have time to be caught up.
#
# Next: [15_your_own_model](15_your_own_model.ipynb) tries such settings on your model and data.

# %% jupyter={"source_hidden": true}
print(f"core {lab.core_sha256()[:12]} · {scale} · n = {len(records)} records")
