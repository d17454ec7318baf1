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
# random seed can end more than a point apart, as is printed below the table. So what we see of masks, bits and the warm-up may be chance.
#
# **Claim.** What a client sends after the warm-up can be computed from the settings before any training. The accuracy has to be measured.
#
# The paper uses one value for most of its settings. This notebook varies one setting at a time, starting from TCS-Q5 (TCS with five bits
# per value and one local step). Only the number of epochs is varied for other schemes. It shows how accuracy and bytes depend on each
# setting, and what one would choose in practice.
#
# Short trainings mainly compare how fast methods learn. [13_evidence](13_evidence.ipynb) compares trainings of several lengths. In longer
# ones, TCS-L4-Q5 ends closer to centralized training.
#
# *Run time*: seconds. *Read before*: [03_tcs](03_tcs.ipynb), [10_bits_on_the_wire](10_bits_on_the_wire.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The second one holds the parameters. The notebook
# draws trainings that exist already. It trains only if you set `make = True`, which needs the images (`data_root`) and takes hours. Three
# changes to try:
#
# - `margin: 0.1` in `params/sensitivity.yaml` asks for an accuracy closer to the best one. The table under *What a practitioner would
#   choose* then names values that need more bytes.
# - `make = True` with `seeds = 1` and `settings = ["epochs"]` adds the trainings of 60 epochs. The last figure gets one more value.
# - `make = True` with `seeds = 3` makes three trainings per value. The figures then show standard deviations.
#
# The command line can make the trainings, too, for one setting and seed at a time:
#
#     uv run tcs sensitivity --params params/short.yaml --setting phi_local --seed 0 --set data_root=cifar10.tar

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
# `params/sensitivity.yaml` lists the settings and their values. The result of each training is kept in a file, its *record*. Everything
# else is as in `params/short.yaml`. (Such a file is called a *profile*, and says how large the trainings are.) If a setting was trained
# with several seeds, the table uses only those seeds that all of its values have.

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
print(
    f"There are {len(records)} records of these trainings in results/{evidence}/runs/. (Some values have further seeds, which the table does not use.)"
)

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
by_setting = {}
for record in lab.find_records(profile=evidence, status="finished").values():
    setting = {key: value for key, value in record["config"].items() if key != "seed"}
    ends = by_setting.setdefault(json.dumps(setting, sort_keys=True), [])
    ends.append(100 * record["rows"][-1]["accuracy"])
spreads = [max(ends) - min(ends) for ends in by_setting.values() if len(ends) > 2]
if spreads:
    print(f"{len(spreads)} trainings of this profile were repeated with three seeds or more. Between the seeds of a training, the accuracy "
          f"differs by {min(spreads):.1f} to {max(spreads):.1f} points.")  # fmt: skip

# %% [markdown]
# Each row is one value of a setting. It shows the accuracy and the megabytes that **one client** sends (up) and receives (down) in the
# whole training. The last column says how many of these megabytes belong to the warm-up. With more than one seed, the accuracy is a mean ±
# one standard deviation.
#
# ## The settings, one by one
#
# Each figure has two panels over the same values. The values are drawn at equal distances, whatever their size. The upper panel shows the
# accuracy. Its axis does not start at zero, so look at the numbers. The lower panel shows megabytes in both directions, on a log scale.
# Filled marks count the whole training. White marks leave out the warm-up, which in a short training is most of the traffic. The band marks
# the paper's choice.


# %%
def curves_of(name: str) -> dict[str, pd.DataFrame]:
    """Return the rows of a setting that have a record, as one curve per scheme. If the schemes are the
    values themselves, they share one curve. If fewer than two values have a record, there is none."""
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
    """Draw the accuracy into the upper panel. Draw megabytes into the lower one, for the whole training
    and, in white, without the warm-up."""
    at = [words.index(value) for value in curve["value"]]
    deviation = 100 * curve["accuracy_std"]
    upper.errorbar(at, 100 * curve["accuracy"], yerr=deviation, capsize=4, **style)
    both = curve["megabytes_up"] + curve["megabytes_down"]
    lower.plot(at, both, **style)
    thin = style | {"markerfacecolor": "white", "linewidth": 0.8}
    lower.plot(at, both - curve["megabytes_warmup"], **thin)


def mark_paper(panels, marked: str | None, words: list[str]) -> None:
    """Draw the band at the paper's choice, if this is one of the values."""
    for axes in panels if marked else ():
        at = words.index(marked)
        axes.axvspan(at - 0.12, at + 0.12, color=lab.COLOURS[5], alpha=0.3, lw=0)


# %%
def draw(name: str) -> None:
    """Draw the figure of one setting, or say that there are too few records for it."""
    curves, setting = curves_of(name), sweep.settings[name]
    if not curves:
        rows = table[table["setting"] == name]
        print(
            f"{name}: {rows[rows['n'] > 0]['value'].nunique()} values have a record, which is too few for a figure."
        )
        return
    figure, panels = plt.subplots(2, 1, figsize=(7.2, 5.4), sharex=True, height_ratios=(3, 2))
    for scheme, curve in curves.items():
        style = lab.curve_style(scheme, list(curves)) | {"markersize": 6, "linewidth": 1.5}
        draw_curve(*panels, curve, list(setting.choices), style)
    finish(figure, panels, name, curves)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def finish(figure, panels, name: str, curves: dict[str, pd.DataFrame]) -> None:
    """Add ticks, axes, the paper's choice, and the name of each scheme at the end of its curve."""
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
    """Label the axes, and write the name of each scheme and n beside the end of its curve."""
    upper.set(ylabel="test accuracy (%)")
    lower.set(ylabel="MB per client (log)", yscale="log")
    lab.plain_log(lower.yaxis)
    upper.grid(alpha=0.25)
    lower.grid(alpha=0.25)
    drawn = {s: curve for s, curve in curves.items() if curve["accuracy"].notna().any()}
    ends = [end_of(scheme, curve, words, list(curves)) for scheme, curve in drawn.items()]
    lab.label_ends(upper, ends)


def end_of(scheme: str, curve: pd.DataFrame, words: list[str], schemes: list[str]) -> tuple:
    """Return what is written at the last point of a curve: the text, its position and its colour."""
    last, colour = (
        curve.dropna(subset="accuracy").iloc[-1],
        lab.curve_style(scheme, schemes)["color"],
    )
    text = f"{scheme}, n = {trials(curve)}"
    return text, words.index(last["value"]), 100 * last["accuracy"], colour


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
# ### Class skew
#
# Here the classes are divided among the clients by a Dirichlet distribution with the parameter $\alpha$. A small $\alpha$ gives each client
# only a few of the classes. *IID* is the paper's setting, in which all clients have similar data. Does one shared mask still serve clients
# whose data differ? What a client sends has the same size in all cases. What the server sends could grow, because it contains every entry
# that at least one client chose, but here it does not.
#
# A loss of accuracy need not be due to TCS. In batch normalization, every client uses the statistics of its own batches. If a client has
# few classes, these differ from the statistics with which the averaged model is tested. Dense federated averaging was not trained with
# these settings, so this figure cannot tell how much of the loss comes from sparsification. [10b_fewer_bytes](10b_fewer_bytes.ipynb)
# compares TCS with dense federated averaging for unequal clients, in longer trainings.

# %%
draw("dirichlet_alpha")

# %% [markdown]
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
# Each difference is smaller than in the shorter training above it, as we would expect if there were too few rounds. This does not prove it.
# There is only one seed. And the learning rates are the same for all lengths, but a rate may suit one length better than another.
#
# ## What a practitioner would choose
#
# We fixed the following rule before most of these trainings. Consider all values whose accuracy is at most a margin below the best one. (If
# the standard deviation of the best one over seeds is larger than the margin, it takes the margin's place.) Of these values, choose the one
# with the **fewest megabytes in both directions**. Some settings cannot be chosen, because they say who takes part and with which data. For
# these, the table names the worst value.


# %%
def cheapest_near_best(curve: pd.DataFrame, margin: float):
    """Return the row to choose and the most accurate one, or None if no row has accuracy and bytes."""
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
    """Return one line: the most accurate value, the chosen one (or the worst), and the differences."""
    setting = sweep.settings[name]
    chosen = curve.loc[curve["accuracy"].idxmin()] if setting.given else chosen
    cost = [
        lab.format_number(row["megabytes_up"] + row["megabytes_down"]) for row in (chosen, best)
    ]
    points = f"{100 * (chosen['accuracy'] - best['accuracy']):+.2f}".replace("-", "−")
    word = f"no choice; worst: {chosen['value']}" if setting.given else chosen["value"]
    return {"Setting": name, "Scheme": scheme,
            "Most accurate": f"{best['value']} ({100 * best['accuracy']:.2f} %)", "Choose": word,
            "Difference, points": points, "MB in both directions": " instead of ".join(dict.fromkeys(cost)),
            "The paper's choice": setting.marked or "–", "n": trials(curve)}  # fmt: skip


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
# The columns *Difference, points* and *MB in both directions* compare the chosen value (or the worst one) with the most accurate one. The
# rule has some limits:
#
# - It counts only bytes, but more epochs also cost computing time.
# - With one seed (n = 1), a value can be the best by chance.
# - For both masks, the learning rate, the clients and the epochs, the most accurate value is at the end of the range that was tried. A better
#   one may lie outside.
# - Combinations of two choices were not tried.
#
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
for row in table.itertuples():
    final = [records[f]["rows"][-1]["accuracy"] for f in row.records.split() if not row.diverged]
    assert not final or abs(row.accuracy - sum(final) / len(final)) < 1e-12
assert len({record["provenance"]["fingerprint"] for record in records.values()}) <= 1
worst = max(map(abs, off.values()), default=0.0)
print(
    f"In {len(off)} trainings, the bits that a client sent differ from the formula by at most {worst:.2%}."
)

# %% [markdown]
# ## What we saw

# %%
for name in sweep.settings:
    for scheme, curve in curves_of(name).items():
        low, high = (100 * getattr(curve["accuracy"], end)() for end in ("min", "max"))
        sent = curve["megabytes_up"] + curve["megabytes_down"]
        ratio = (
            f", and bytes by a factor of {lab.format_number(sent.max() / sent.min())}"
            if sent.notna().all()
            else ""
        )
        print(
            f"{name}, {scheme}: over {len(curve)} values, accuracy varies from {low:.2f} to {high:.2f} %{ratio}."
        )
missing = table[table["n"] + table["diverged"] == 0].groupby("setting", sort=False)["value"]
for name, values in missing:
    print(f"{name}: no training was made with {', '.join(values.unique())}.")

# %% [markdown]
# If the accuracy depends strongly on a setting, this setting is worth tuning. If a setting changes the bytes but hardly the accuracy, one
# can save bytes there. All of this is from short trainings of a small network. In longer trainings, what a client keeps back in its errors
# has more time to be sent.
#
# Next: [15_your_own_model](15_your_own_model.ipynb) tries such settings on your model and data.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Shown with {lab.describe_core()}, from {len(records)} records ({scale}).")
