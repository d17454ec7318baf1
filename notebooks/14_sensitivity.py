# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Vary one setting at a time
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
#     python tcs_core.py sensitivity --params params/cpu.yaml --setting phi_local --seed 0 --set data_root=cifar10.tar
#
# *Run time*: seconds. *Read before*: `03_tcs`, `10_bits_on_the_wire`.

# %%
import tcs_lab as lab
from IPython.display import Image, Markdown, display

import tcs_core as tcs

# %% tags=["parameters"]
evidence = "cpu"  # the profile whose records are drawn: params/<profile>.yaml, results/<profile>/
make = False  # True: first make the runs that have no record; hours in profile cpu
settings = None  # make: a list of settings; None: all
seeds = None  # make: how many trials, or a list of seeds; None: the profile's
data_root = None  # make: the folder or tar of the data; None: the profile's
jobs = 2  # make: runs side by side

# %%
params = lab.notebook_params(globals(), complete=False)
given = {key: params[key] for key in ("seeds", "data_root") if params[key] is not None}
profile = lab.read_params([lab.ROOT / f"params/{evidence}.yaml"]) | given
sweep = lab.read_sensitivity(lab.ROOT / "params" / "sensitivity.yaml")
folder = lab.results_folder(evidence)

# %% [markdown]
# ## The runs
#
# For each setting, every value with everything else as in the profile. The value that is the base's
# own is the same run in all settings, and is made once; where a table of the paper has the same run,
# its record is used. A record counts whatever its seed, up to 99.

# %%
plans = {name: lab.sensitivity_plan(sweep, profile, name) for name in sweep["settings"]}
wanted = {
    c.record_name: c for name in settings or plans for runs in plans[name].values() for c in runs
}
if make:
    _ = lab.run_all(wanted.values(), jobs=jobs)
every_seed = profile | {"seeds": 100}
table = lab.sensitivity_table(sweep, every_seed)
trials = next(iter(plans["phi_local"].values()))
print(
    f"{len(wanted)} different runs in {len(settings or plans)} settings with {len(trials)} trials"
)
print(f"{len(set(' '.join(table['records']).split()))} records in results/{evidence}/runs/")

# %%
records = {}
for name in sweep["settings"]:
    for configs in lab.sensitivity_plan(sweep, every_seed, name).values():
        records |= lab.recorded(configs, diverged=True)
scale = f"profile {evidence}, no record yet"
if records:
    first = next(iter(records.values()))
    scale = f"{first['provenance']['dataset']}, {first['config']['model']} with {first['dimension']:,} parameters"
title = f"Sensitivity, {scale}"
lab.save_table(table, folder / "sensitivity", title, lab.readable_sensitivity)
display(Markdown((folder / "sensitivity.md").read_text()))

# %% [markdown]
# You should see one row a value: accuracy in percent, ± one standard deviation over n seeds (none
# with one seed), and the megabytes of **one client's** messages in the whole run, all overhead in. A
# dash is a run without a record. *diverged* means that a seed did not get to the end: no mean is
# taken over those that did.
#
# ## The settings, one by one
#
# Each figure has two panels over the same values, which stand in even steps whatever their distance.
# Above, accuracy: the mean, and one standard deviation over the seeds; its axis does not start at
# zero, so look at the numbers. Below, megabytes both ways on a log scale: the whole run, and (white)
# what is left without the dense warm-up. In a short training the warm-up is most of the traffic and
# hides what a setting changes in the rest. The band marks the paper's choice.


# %%
def draw(name: str) -> None:
    """The figure of one setting, saved and shown; or how much is missing for it."""
    rows = table[table["setting"] == name]
    curves = lab.sensitivity_curves(rows, sweep["settings"][name])
    if not curves:
        there = rows[rows["n"] > 0]["value"].nunique()
        print(f"{name}: {there} of {rows['value'].nunique()} values recorded, too few to draw")
        return
    figure = lab.sensitivity_figure(curves, sweep["settings"][name], f"{title}: {name}")
    lab.save_figure(figure, folder / f"sensitivity_{name}")
    display(Image(filename=str(folder / f"sensitivity_{name}.png"), width=720))


# %% [markdown]
# ### A client's own mask
#
# $\phi_{local}$ is how much each client *explores*: entries outside the shared mask, which cost
# positions too. The paper wants $\phi_{local}\ll\phi_{global}$. Look on the left for what accuracy is
# lost where the shared mask hardly gets new entries, and at the white marks below: each step is about
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
# and three bits the shared mask hardly changes any more (`mask_overlap` in their records).

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
# What is lost is not TCS's alone: every client normalizes with its own batches' statistics, and one with
# few classes has others than the averaged model is tested with. Dense federated averaging was not run
# beside it, so how much of a loss is sparsification's cannot be told from this figure.

# %%
draw("dirichlet_alpha")

# %% [markdown]
# ### The dense warm-up
#
# "One round" is the least that gives a first shared mask; the learning rate then starts at its full
# value, since its rise is tied to the warm-up. In a short training most of the megabytes are those of
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
# You should see accuracy rise with the rate over the whole range (one trial): the paper's 0.5 is low for
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
finals = {}
for row in table[table["setting"] == "epochs"].itertuples():
    ours = [records[f] for f in row.records.split() if records[f]["status"] == "finished"]
    finals[row.value, row.scheme] = {r["config"]["seed"]: r["rows"][-1]["accuracy"] for r in ours}
for value in table[table["setting"] == "epochs"]["value"].unique():
    for name, other in ("TCS-L4-Q5", "TCS"), ("TCS-L4-Q5", "Baseline"), ("TCS", "Baseline"):
        pair = finals[value, name], finals[value, other]
        gaps = [100 * (pair[0][seed] - pair[1][seed]) for seed in sorted(pair[0].keys() & pair[1])]
        mean, low, high = lab.mean_interval(gaps, 0.95) if gaps else (0, 0, 0)
        spread = f", 95 % interval {low:+.2f} to {high:+.2f}" if len(gaps) > 1 else ""
        shown = f"{mean:+.2f} points{spread}" if gaps else "–"
        print(f"{value} epochs, {name} against {other} (n = {len(gaps)} pairs): {shown}")

# %% [markdown]
# You should see mean differences, paired by seed, for the lengths that have run: each smaller than in the
# shorter training before it, with one seed. That is what a lack of rounds would do. How much of them the
# paper's 300 epochs would leave is not shown; nor do the rates, which are the same at all lengths, suit each
# length equally well.
#
# ## What a practitioner would choose
#
# The rule was fixed before the runs: of all values whose accuracy is within a margin of the best
# one's, or within the best one's standard deviation over seeds if that is more, the one with the
# **fewest megabytes both ways**. What is given (who takes part, and with which data) is not chosen;
# there the worst value is named, and what it costs.

# %%
choices = lab.sensitivity_choices(table, sweep)
print(f"margin: {sweep['margin']:g} percentage points")
if choices.empty:
    print("no setting has two values on record: nothing to choose between")
else:
    display(Markdown(lab.markdown(choices)))

# %% [markdown]
# *Points* and *MB* compare the value that is chosen (or the worst) with the most accurate one. The
# rule counts bytes alone: more epochs cost computing, too. Values of a setting are compared over the seeds
# that all of them have. Where the most accurate value is the last one tried ($\phi_{local}$, $\phi_{global}$, η,
# few clients), the best may lie beyond; and the largest masks here send more than plain top-K does for the
# same accuracy. Mind n: with one trial a value can be best
# by luck, and even with three the best of four is a little flattered. Each setting was varied alone:
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
    assert row.n + row.diverged == len(row.records.split())
    assert not final or abs(row.accuracy - sum(final) / len(final)) < 1e-12
assert len({record["provenance"]["fingerprint"] for record in records.values()}) <= 1
worst = max(map(abs, off.values()), default=0.0)
print(f"{len(off)} federated records: uplink as computed, within {worst:.2%}")

# %% [markdown]
# ## What we saw

# %%
for name, setting in sweep["settings"].items():
    rows = table[(table["setting"] == name) & table["accuracy"].notna()]
    for scheme, curve in lab.sensitivity_curves(rows, setting).items():
        low, high = (100 * getattr(curve["accuracy"], end)() for end in ("min", "max"))
        sent = curve["megabytes_up"] + curve["megabytes_down"]
        ratio = f", bytes ×{sent.max() / sent.min():.3g}" if sent.notna().all() else ""
        print(f"{name}, {scheme}: {len(curve)} values, {low:.2f} to {high:.2f} %{ratio}")
missing = table[table["n"] + table["diverged"] == 0].groupby("setting", sort=False)["value"]
for name, values in missing:
    print(f"not measured: {name} {', '.join(values.unique())}")

# %% [markdown]
# A setting with a wide range of accuracies is worth tuning; one with a narrow range and a wide range
# of bytes is where to save. All of it in short trainings of a small network: in longer ones, delays
# that cost accuracy here have time to be caught up.

# %%
print(f"core {lab.core_sha256()[:12]} · {scale} · n = {len(records)} records")
