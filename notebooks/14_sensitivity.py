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
# **In short.** We varied eight settings of the training of a small network, one at a time, with one training of 15 epochs for each value.
# (One of the settings is the number of epochs.) Unequal classes among the clients cost the most accuracy by far. Then come fewer epochs,
# and then more clients and lower learning rates. Starting with one dense round instead of a dense epoch cut the megabytes to a sixth.
# Accuracy was also higher with larger masks, and lower with two bits per value than with five. But trainings that differ only in their
# random seed can end more than a point apart, as is printed below the figure. So one training per value cannot decide between values that are
# close, and what we see of masks, bits and the warm-up may be chance.
#
# **Claim.** What a client sends after the warm-up can be computed from the settings before any training. The accuracy has to be measured.
#
# The paper uses one value for most of its settings. This notebook varies one setting at a time, starting from TCS-Q5 (TCS with five bits
# per value and one local step). Only the number of epochs is varied for other schemes. It shows how accuracy and bytes depend on each
# setting.
#
# Short trainings mainly compare how fast methods learn. [13_evidence](13_evidence.ipynb) compares trainings of several lengths. In longer
# ones, TCS-L4-Q5 ends closer to centralized training.
#
# *Run time*: seconds. *Read before*: [03_tcs](03_tcs.ipynb), [10_bits_on_the_wire](10_bits_on_the_wire.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The notebook draws trainings that exist already.
# This command makes further ones, for one setting and seed at a time. It needs the images and takes hours. When all values of a setting have
# a second seed, its figure shows standard deviations. For other values, write them into `params/sensitivity.yaml` first.
#
#     uv run tcs sensitivity --params params/short.yaml --setting phi_local --seed 1 --set data_root=cifar10.tar

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import json
import math

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
from IPython.display import Markdown, display

import tcs_core as tcs

plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 10})

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
evidence = "short"  # the profile whose records are drawn: params/<profile>.yaml, results/<profile>/

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
profile = lab.read_params([lab.params_file("evidence", evidence)])
sweep = lab.read_sensitivity(lab.ROOT / "params" / "sensitivity.yaml")

# %% jupyter={"source_hidden": true} tags=["remove-input"]
every_seed = profile | {"seeds": 100}
records = {}
for name in sweep.settings:
    for configs in lab.sensitivity_plan(sweep, every_seed, name).values():
        records |= lab.load_records(configs)
table = lab.sensitivity_table(sweep, every_seed)
scale = f"profile {evidence}, no record yet"
for first in list(records.values())[:1]:
    net = f"{first['config']['model']} of {first['dimension']:,} parameters"
    number = f"{profile['train_samples']:,}" if profile.get("train_samples") else "all"
    images = f"{number} images of {first['provenance']['dataset']}"
    scale = f"{images}, {net}, {profile['epochs']} epochs unless varied"

by_setting = {}
for record in lab.find_records(profile=evidence, status="finished").values():
    setting = {key: value for key, value in record["config"].items() if key != "seed"}
    ends = by_setting.setdefault(json.dumps(setting, sort_keys=True), [])
    ends.append(100 * record["rows"][-1]["accuracy"])
spreads = [max(ends) - min(ends) for ends in by_setting.values() if len(ends) > 2]


def curves_of(name: str) -> dict[str, pd.DataFrame]:
    """Return the rows of a setting that have a record, as one curve per scheme. If the schemes are the
    values themselves, they share one curve. If fewer than two values have a record, there is none."""
    rows = table[(table["setting"] == name) & (table["n"] + table["diverged"] > 0)]
    if rows["value"].nunique() < 2:
        return {}
    if sweep.settings[name].named:
        return {" … ".join(rows["scheme"].iloc[[0, -1]]): rows}
    return dict(list(rows.groupby("scheme", sort=False)))


# %% jupyter={"source_hidden": true} tags=["remove-input"]
WORDS = {"phi_local": "a client's own mask", "phi_global": "shared mask", "value_bits": "bits per value",
         "clients": "clients", "dirichlet_alpha": "class skew (Dirichlet's α)", "warmup_epochs": "dense epochs at the start",
         "learning_rate": "learning rate", "epochs": "epochs"}  # fmt: skip


def draw_accuracies(names: list[str]) -> None:
    """Draw the accuracy of all settings into one grid, with the same axis of accuracy."""
    figure, grid = plt.subplots(math.ceil(len(names) / 4), 4, figsize=(9.6, 5), sharey=True, squeeze=False)  # fmt: skip
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for name, axes in zip(names, grid.flat, strict=False):
        curves, setting = curves_of(name), sweep.settings[name]
        words = list(setting.choices)
        for scheme, curve in curves.items():
            alone = len(curves) == 1
            style = {"color": lab.COLOURS[1], "marker": "o"} if alone else lab.curve_style(scheme, list(curves))  # fmt: skip
            at = [words.index(value) for value in curve["value"]]
            axes.plot(at, 100 * curve["accuracy"], **style, label=None if alone else scheme)
        if setting.marked and spreads:
            paper = 100 * curve.loc[curve["value"] == setting.marked, "accuracy"]
            for accuracy in paper:
                axes.axhspan(accuracy - max(spreads), accuracy + max(spreads), color="0.88", lw=0)
        axes.set_xticks(range(len(words)), words)
        axes.set(xlabel=WORDS.get(name, name), xlim=(-0.4, len(words) - 0.6))
        axes.grid(alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    figure.legend(
        loc="outside lower center",
        ncols=4,
        frameon=False,
        title="schemes with other numbers of epochs",
    )
    figure.suptitle(f"Unequal classes cost the most accuracy ({scale})", fontsize=10)
    lab.show_figures()


drawn = [name for name in sweep.settings if curves_of(name)]
if drawn:
    draw_accuracies(drawn)
else:
    print("There are no records yet.")
if spreads:
    print(f"{len(spreads)} trainings of this profile were repeated with three seeds or more. Between the seeds of a training, the accuracy "
          f"differs by {min(spreads):.1f} to {max(spreads):.1f} points. Accuracies in the grey band differ from the paper's choice by no more "
          "than that.")  # fmt: skip

# %% [markdown]
# ## The settings, one by one
#
# `params/sensitivity.yaml` lists the settings and their values. The result of each training is kept in a file, its *record*. Everything
# else is as in `params/short.yaml`. (Such a file is called a *profile*, and says how large the trainings are.)
#
# Each figure below has two panels over the same values. The values are drawn at equal distances, whatever their size. The upper panel shows
# the accuracy. Its axis does not start at zero, so look at the numbers. The lower panel shows megabytes in both directions, on a log scale.
# Filled marks count the whole training. White marks leave out the warm-up, which in a short training is most of the traffic. The band marks
# the paper's choice.


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def draw(name: str) -> None:
    """Draw the figure of one setting, or say that there are too few records for it."""
    curves, setting = curves_of(name), sweep.settings[name]
    if not curves:
        print(f"{name}: fewer than two values have a record, which is too few for a figure.")
        return
    _, (upper, lower) = plt.subplots(2, 1, figsize=(7.2, 5.4), sharex=True, height_ratios=(3, 2))
    words, ends = list(setting.choices), []
    for scheme, curve in curves.items():
        style = lab.curve_style(scheme, list(curves)) | {"markersize": 6, "linewidth": 1.5}
        at = [words.index(value) for value in curve["value"]]
        deviation = 100 * curve["accuracy_std"]
        upper.errorbar(at, 100 * curve["accuracy"], yerr=deviation, capsize=4, **style)
        both = curve["megabytes_up"] + curve["megabytes_down"]
        lower.plot(at, both, **style)
        thin = style | {"markerfacecolor": "white", "linewidth": 0.8}
        lower.plot(at, both - curve["megabytes_warmup"], **thin)
        if len(known := curve.dropna(subset="accuracy")):
            last, n = known.iloc[-1], " to ".join(map(str, sorted({curve["n"].min(), curve["n"].max()})))  # fmt: skip
            place = words.index(last["value"]), 100 * last["accuracy"]
            ends.append((f"{scheme}, n = {n}", *place, style["color"]))
    lost = pd.concat(curves.values()).groupby("value")["diverged"].sum()
    ticks = [f"{word}\n{lost[word]} diverged" if lost.get(word) else word for word in words]
    lower.set_xticks(range(len(words)), ticks)
    lower.set(xlabel=setting.label, xlim=(-0.4, len(words) - 0.6))
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        if setting.marked:
            at = words.index(setting.marked)
            axes.axvspan(at - 0.12, at + 0.12, color=lab.COLOURS[5], alpha=0.3, lw=0)
    upper.set(ylabel="test accuracy (%)")
    lower.set(ylabel="MB per client (log)", yscale="log")
    lab.plain_log(lower.yaxis)
    lab.label_ends(upper, ends)
    marks = "bars: ± one standard deviation where n > 1; white marks: without the warm-up"
    upper.set_title(f"{name} ({scale})\n{marks}", fontsize=10)
    lab.show_figures()


# %% [markdown]
# ### A client's own mask
#
# $\phi_{local}$ is the fraction of entries that each client chooses itself, outside the shared mask. With these entries it *explores* what
# has become important. Their positions have to be sent, too. The paper recommends $\phi_{local}\ll\phi_{global}$.
#
# Look at the left end of the upper panel, where the clients choose the fewest entries: the accuracy is lowest there. Then look at the white
# marks. From one value to the next, the clients choose about three times as many entries, but the bytes grow less than that.

# %%
draw("phi_local")

# %% [markdown]
# ### The shared mask
#
# $\phi_{global}$ is the fraction of entries in the shared mask. Their positions need not be sent, since the server and all clients know
# them. If the mask is large, the bytes grow nearly in proportion to it. If it is small, most of the bytes belong to the entries that
# clients choose themselves.

# %%
draw("phi_global")

# %% [markdown]
# ### Bits of a value
#
# Of the $q$ bits of a value, one is its sign. The others say in which of $P=2^{q-1}$ intervals its magnitude lies. The mean of each
# interval is sent as a 32-bit number. In a network as small as this one, these means are a visible part of a message with eight bits per
# value. In the paper's network they hardly matter.
#
# What quantization loses is added to the client's errors and sent later. With two and three bits the accuracy is lower, so sending the lost
# part later may not be enough there. Only clients quantize: the server sends 32-bit values for every $q$.

# %%
draw("value_bits")

# %% [markdown]
# ### Clients
#
# All samples are divided among $N$ clients, and the batch of one client always has the same size. With more clients there are therefore
# **fewer rounds** per epoch, and all batches of a round together are larger. The learning rate is scaled with this larger batch. The curve
# shows all of these changes together. What one client sends falls with the number of rounds.

# %%
draw("clients")

# %% [markdown]
# Clients also differ in their data. In the trainings with *class skew*, each client has mostly a few of the classes, and the figure at the
# top shows that this costs the most accuracy. Dense federated averaging was not trained with these settings, so they do not say how much of
# the loss comes from sparsification. [10b_fewer_bytes](10b_fewer_bytes.ipynb) compares TCS with dense federated averaging for unequal
# clients, in longer trainings.
#
# ### The dense warm-up
#
# In the warm-up, the clients send all entries. The shortest possible warm-up is one round, which gives the first shared mask. As the
# learning rate rises only during the warm-up, it then has its full value almost from the start. The paper uses 5 of 300 epochs. In
# proportion, this would be less than one epoch here, so one epoch is marked. The accuracies differ by 0.6 points. Trainings with other
# seeds can differ by more, so we cannot say whether the length of the warm-up matters.

# %%
draw("warmup_epochs")

# %% [markdown]
# ### Learning rate
#
# The other trainings on this page use the paper's learning rate of 0.5, scaled with the batch. Is it a good choice for such a short
# training and such a small network? If a higher rate does better, then part of the difference between TCS and centralized training may come
# from the rates. (Centralized training uses the paper's rate of 0.1, which is also scaled and not tuned here.)

# %%
draw("learning_rate")

# %% [markdown]
# Accuracy rises with the rate over the whole range, so the paper's 0.5 is too low for this training. The best value is the largest that was
# tried, so an even higher rate may be better.
#
# ### Epochs
#
# TCS-L4-Q5 takes four local steps per round, so it has only a quarter of the rounds of TCS in the same number of epochs. Does it lose
# accuracy for this reason? If so, its distance to TCS and to centralized training (the Baseline) shrinks towards the right, where trainings
# are longer. TCS-L4-Q5 also sends fewer bits per value; the figure for $q$ shows what that costs alone. TCS-L4-M2-E3-W10++ is a variant of
# our own that sends less, also in its warm-up. ([10b_fewer_bytes](10b_fewer_bytes.ipynb) explains its name.) The Baseline sends nothing and
# has no mark in the lower panel.

# %%
draw("epochs")

# %% [markdown]
# The distance shrinks towards the right, as we would expect if there were too few rounds. [13_evidence](13_evidence.ipynb) asks the same with
# longer trainings and more seeds.
#
# ## All numbers
#
# Each row is one value of a setting. It shows the accuracy and the megabytes that **one client** sends (up) and receives (down) in the
# whole training. The last column says how many of these megabytes belong to the warm-up. If a setting was trained with several seeds, the
# table and the figures use only those seeds that all of its values have. The accuracy is then a mean ± one standard deviation.

# %%
text = lab.save_table(table, lab.results_folder(evidence) / "sensitivity", f"Sensitivity: {scale}", lab.readable_sensitivity)  # fmt: skip
display(Markdown(lab.prevent_line_breaks(text)))

# %% [markdown]
# ## Claim
#
# The next cell checks this statement:
#
# In every training, except those with the shorter code of [10b_fewer_bytes](10b_fewer_bytes.ipynb), the bits that one client sends after
# the warm-up agree within 1 % with a formula. It is the paper's bit budget ([08_tables_and_curves](08_tables_and_curves.ipynb)), plus 32
# bits for the mean of each interval. (They are not equal, because the blocks of our position code have a power of two as their length, and
# those of the formula any length.)

# %%
off = {}
for file, record in records.items():
    scheme, measured = tcs.Scheme(**record["config"]["scheme"]), lab.bits_per_parameter(record)
    if record["rows"] and measured["uplink"] > 0 and scheme.code == "block":
        off[file] = measured["uplink"] / tcs.bit_budget(scheme, record["dimension"]) - 1
assert all(abs(value) < 0.01 for value in off.values()), off
assert len({record["provenance"]["fingerprint"] for record in records.values()}) <= 1
worst = max(map(abs, off.values()), default=0.0)
print(
    f"In {len(off)} trainings, the bits that a client sent differ from the formula by at most {worst:.2%}."
)

# %% [markdown]
# ## What we saw
#
# If the accuracy depends strongly on a setting, this setting is worth tuning. If a setting changes the bytes but hardly the accuracy, one
# can save bytes there. All of this is from short trainings of a small network. In longer trainings, what a client keeps back in its errors
# has more time to be sent.
#
# Next: [15_your_own_model](15_your_own_model.ipynb) tries such settings on your model and data.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Shown with {lab.describe_core()}, from {len(records)} records ({scale}).")
