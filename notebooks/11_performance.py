# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Measure where the time of a round goes
#
# **Claim (ours, on Sec. II-A's observation).** Because the size of the K-th entry changes slowly from
# round to round, the last threshold leaves few candidates for the next exact top-K. A federated round can
# then cost little more than the forward and backward passes in it, and with clients and parameters
# time and memory grow at most about in proportion.
#
# The first half runs here, in seconds: how the selection works, why it is exact whatever happens, and a
# small measurement. The second half draws the records of `python tcs_core.py bench` in `results/bench/`,
# which were measured on a machine that was to do nothing else, partly at the paper's size. Quartiles tell how
# quiet it was.
#
# *Run time*: about 40 s. *Read before*: `03_tcs` for masks, errors and Algorithm 2.

# %%
import inspect
import json
import re
import tempfile
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 10})

# %% [markdown]
# ## Parameters

# %% tags=["parameters"]
profile = "ci"  # stands in the run's configuration; nothing is written
phi_global = 1e-2  # share kept by the global mask
phi_local = 1e-3  # share kept by each local mask
train_samples = 640  # synthetic images to learn from
test_samples = 100  # not used here; a data set has to have some
model = "resnet8"  # resnet8 or resnet18
width = 16  # channels of its first stage
clients = 10  # N
batch_size = 4  # B, samples of one local step
learning_rate = 0.5  # eta
epochs = 3  # passes over the data, the first one dense
drops = [0.67]  # when eta falls by 10, as shares of the epochs
seed = 0  # of everything random
lowered = 0.85  # the core's guess, this share of the last threshold; checked below
jump_dimension = 1_000_000  # D of the experiment with sudden changes of scale
step_dimension = 300_000  # D of the small measurement of compression
round_width = 8  # channels of the net in the small measurement of a round
repeat = 5  # turns of the small measurements
records = None  # folder that holds bench/*.json; None: results/
device_words = None  # draw records whose device's name has these words; None: the newest of any
round_target_wide = 1.07  # round / passes, on CPU, for the net named next
wide_net = "resnet18 width 64"  # as the records call it
round_target = 1.10  # round / passes, for all others and on GPU
step_target_ms = 30.0  # Compressor.step per client at the paper's D, two cores
step_target_times = 4.0  # faster than the textbook version
gpu_step_target_ms = 3.0  # Compressor.step of all 10 clients, data-centre GPU
positions_target_ms = 5.0  # encode and decode the positions of a message
run_target_minutes = 5.0  # 300 epochs of TCS at the paper's size, data-centre GPU
paper_samples = 50_000  # training images of the paper's data set
paper_epochs = 300  # of the paper's runs

# %%
lab.check_notebook_params(globals())
scheme = tcs.Scheme.named("TCS", phi_global=phi_global, phi_local=phi_local)
sizes = {"model": model, "width": width, "clients": clients, "batch_size": batch_size}
schedule = {"epochs": epochs, "warmup_epochs": 1, "drops": tuple(drops), "reference_batch": None}
config = lab.RunConfig(scheme, learning_rate, seed, profile, **sizes, **schedule, device="cpu")
data = lab.load_dataset("synthetic").first(train_samples, test_samples)
federation = lab.Training(config, data)
compressor, rule, D = federation.compressor, federation.compressor.rule, len(federation.theta_D)
print(f"D = {D:,} parameters, K_global = {rule.k_global}, K_local = {rule.k_local}, N = {clients}")
print(f"{federation.rounds_per_epoch} rounds an epoch, the first epoch dense")

# %% [markdown]
# ## A guess that cannot be wrong
#
# Algorithm 2 needs $S_{top}$ of D numbers once for every client and once at the server. Sorting them,
# or `topk`, is the most expensive thing in compression. Suppose somebody gives us a *floor* $f$, a guess
# of the k-th largest magnitude. Count the entries that reach it:
#
# $$C_f = \{i : |v_i| \ge f\}, \qquad |C_f| \ge k \;\Rightarrow\; S_{top}(v, k) = S_{top}(v|_{C_f}, k)$$
#
# If at least k entries reach the floor, the k-th magnitude does too, and with it everything that is
# larger **or equal**: no entry of $S_{top}$, and no tie with its last one, is outside $C_f$. So a guess
# can be too low (more candidates, slower) or too high (fewer than k candidates, which we notice and look
# again). It can't make the result wrong.

# %%
print(inspect.getsource(tcs._filtered))

# %% [markdown]
# What remains of D is one comparison for every entry, made in pieces that stay in a core's cache:

# %%
print(inspect.getsource(tcs._at_least))

# %% [markdown]
# The guess is the last threshold, a little lowered. *Last* means: for the global mask, that of the round
# before; for a local mask, that of the client before (all clients live in one process here), and for the
# first client, that of the last one a round ago.
#
# ## Follow the threshold through a training
#
# A real run, and for every selection in it: the floor, the threshold it turned out to be, and among how
# many entries the exact choice was made. `plain` is $S_{top}$ with none of this: sort everything; of
# equal magnitudes the lower index wins.


# %%
def plain(vector_D, k, taken_D):
    size_D = torch.where(taken_D, -1.0, vector_D.abs())
    return size_D.sort(descending=True, stable=True).indices[:k].sort().values


def candidates(vector_D, k, taken_D, floor):
    """Among how many entries the core chooses, and at which try: 0 floor, 1 half of it, 2 all."""
    for tried, level in enumerate((floor, floor / 2) if floor > 0 else ()):
        count = int((~taken_D)[tcs._at_least(vector_D.numpy(), level)].sum())
        if count >= k:
            return count, tried
    return len(vector_D), 2


# %%
def crowd(vector_D, k, taken_D):
    """How many entries are larger than a little less than the threshold, in multiples of k."""
    _, kth = tcs._filtered(vector_D, k, taken_D, 0.0)
    return candidates(vector_D, k, taken_D, lowered * kth)[0] / k


def selection(vector_D, k, taken_D, floor):
    chosen_K, kth = tcs._filtered(vector_D, k, taken_D, floor)
    among, tried = candidates(vector_D, k, taken_D, floor)
    same = torch.equal(chosen_K, plain(vector_D, k, taken_D))
    return {"floor": floor, "kth": kth, "among": among, "tried": tried, "same": same}


# %% [markdown]
# We look from outside, between the rounds: what client $n$ meant to send is its error before the round
# plus its difference. The last two lines check that we looked at what the core really did.

# %%
seen, own, nothing_D = [], {}, torch.zeros(D, dtype=torch.bool)
before_ND, taken_D, floors = None, None, {}
for epoch in range(epochs):
    for update_D in federation.rounds(epoch):
        floor = floors.get("client", 0.0)
        for n, delta_D in enumerate(federation.deltas_ND if taken_D is not None else []):
            if compressor.last_dense:
                break
            vector_D = before_ND[n] + delta_D
            row = selection(vector_D, rule.k_local, taken_D, floor)
            by_own = candidates(vector_D, rule.k_local, taken_D, own.get(n, 0.0))[0]
            more = {"by own": by_own, "crowd": crowd(vector_D, rule.k_local, taken_D)}
            more["crowd, no error"] = crowd(delta_D, rule.k_local, taken_D)
            seen.append({"round": compressor.round, "who": "client", **row, **more})
            floor = own[n] = lowered * row["kth"]
        row = selection(update_D, rule.k_global, nothing_D, floors.get("global", 0.0))
        seen.append({"round": compressor.round, "who": "server", **row})
        before_ND, floors = compressor.errors_ND.clone(), dict(rule._floors)
        taken_D = tcs.positions_to_mask(rule.positions, D)
        assert abs(floors["global"] / (lowered * row["kth"]) - 1) < 1e-9
        assert floors.get("client", 0.0) == floor

# %%
seen = pd.DataFrame(seen)
server, client = (seen[seen["who"] == who] for who in ("server", "client"))
first_sparse, dropped = client["round"].min(), epochs * federation.rounds_per_epoch * drops[0]
for name, rows in (("server", server), ("clients", client)):
    tries = [int((rows["tried"] == i).sum()) for i in range(3)]
    print(
        f"{name:8s}{len(rows):4d} selections: {tries[0]} at the floor, {tries[1]} at half of it, "
        f"{tries[2]} among all; identical to plain: {int(rows['same'].sum())}"
    )


# %%
def line(i, dash=0, **more):
    return {"color": lab.COLOURS[i], "linestyle": lab.figures.DASHES[dash], "linewidth": 1.5, **more}


def middle(axes, rows, column, label, i, scale=1.0):
    """The median of a round and the range over the clients."""
    groups = scale * rows.groupby("round")[column].agg(["min", "median", "max"])
    axes.plot(groups.index, groups["median"], label=label, **line(i, (i + 1) % 3))
    band = groups["min"], groups["max"]
    axes.fill_between(groups.index, *band, color=lab.COLOURS[i], alpha=0.15, linewidth=0)


# %%
figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.4))
for axes, rows, title in zip(panels, (server, client), ("global mask", "local masks"), strict=True):
    known = rows[rows["floor"] > 0]
    middle(axes, rows, "kth", "threshold (K-th magnitude)", 2)
    middle(axes, known, "floor", "floor, known before", 1)
    axes.axvline(dropped, label="η falls by 10", **line(7, 3))
    axes.axvline(first_sparse, label="first sparse round", **line(0, 1, alpha=0.5))
    axes.set(title=f"Threshold of the {title}", xlabel="round", ylabel="magnitude")
    axes.set_ylim(bottom=0)
handles, labels = panels[0].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
plt.show()

# %% [markdown]
# You should see the threshold of the global mask fall from round to round by less than it is lowered for the
# floor (it may rise by more), with one exception: where the dense warm-up ends, updates change their nature. Right,
# the line is the median over the clients and the band goes from the lowest to the highest.

# %%
figure, axes = plt.subplots(figsize=(7.6, 3.6))
share = 100 / D
middle(axes, server[server["floor"] > 0], "among", "global mask", 0, share)
middle(axes, client, "among", "local masks, last client's threshold", 2, share)
middle(axes, client[client["by own"] < D], "by own", "local masks, own last threshold", 1, share)
axes.axhline(100, label="no floor", **line(7, 3))
axes.axvline(dropped, **line(7, 3))
axes.set(title="Entries among which the exact choice is made", xlabel="round")
axes.set(ylabel="% of all D entries (log)", yscale="log")
axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
figure.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %%
where = client[client["round"] > first_sparse]
typical = {"global": server[server["floor"] > 0]["among"].median() / rule.k_global}
typical |= {"local": where["among"].median() / rule.k_local}
typical |= {"own": where["by own"].median() / rule.k_local}
typical |= {name: where[name].median() for name in ("crowd", "crowd, no error")}
print(f"global mask: the choice is made among {typical['global']:.1f} K entries (median)")
print(f"local masks: among {typical['local']:.1f} K; with no floor, {D / rule.k_local:.0f} K")
print(f"  by every client's own last threshold it would be {typical['own']:.1f} K")
print(f"  by {lowered:g} of the very threshold it seeks, {typical['crowd']:.1f} K")
print(f"  the same, if the error were not added: {typical['crowd, no error']:.1f} K")

# %% [markdown]
# You should see the global mask chosen among little more than K entries. That is the paper's time
# correlation once more, now of *sizes*. The local masks have more candidates for each place, and the
# last three lines tell why. The core hands one floor from client to client; if that were the reason, a
# threshold of each client's own would help. Or there is a crowd: all that was larger than a client's
# threshold has just been sent, so what waits in its error lies right below it. Then even a perfect guess
# would leave many candidates, and fewer if there were no errors.
#
# ## When the scale jumps
#
# A vector of random numbers, a floor from last time, and then everything is multiplied by one factor, as
# a learning rate that drops or a bad batch might do. Small factors leave fewer than K entries above the
# floor: the core tries half of it, then looks at all. Large factors lift more and more entries above it.

# %%
generator = torch.Generator().manual_seed(seed)
base_D = torch.randn(jump_dimension, generator=generator).pow(3)
k, free_D = tcs.kept(phi_local, jump_dimension), torch.zeros(jump_dimension, dtype=torch.bool)
floor = lowered * tcs._filtered(base_D, k, free_D, 0.0)[1]


def milliseconds(vector_D, floor, turns=5):
    spent = []
    for _ in range(turns):
        start = time.perf_counter()
        tcs._filtered(vector_D, k, free_D, floor)
        spent.append(1e3 * (time.perf_counter() - start))
    return float(np.median(spent))


# %%
jumps = []
for factor in np.geomspace(0.1, 10, 25).tolist():
    row = selection(base_D * factor, k, free_D, floor)
    pair = {"with": milliseconds(base_D * factor, floor), "without": milliseconds(base_D, 0.0)}
    jumps.append({"factor": factor, **row, **pair})
jumps = pd.DataFrame(jumps)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.5))
kinds = ("at the floor", "at half the floor", "among all: fallback")
for tried, (name, i) in enumerate(zip(kinds, (1, 5, 2), strict=True)):
    rows = jumps[jumps["tried"] == tried]
    look = {"color": lab.COLOURS[i], "marker": lab.figures.MARKERS[tried], "linestyle": ""}
    left.plot(rows["factor"], rows["among"] / k, label=f"found {name}", **look)
    right.plot(rows["factor"], rows["with"], **look)
right.axhline(jumps["without"].median(), label="no floor", **line(7, 3))
left.set(title="Entries chosen among", ylabel="multiples of K (log)", yscale="log")
right.set(title=f"Time of one selection, D = {jump_dimension:,}", ylabel="milliseconds")
right.set_ylim(bottom=0)
for axes in (left, right):
    axes.set(xlabel="scale against last time (log)", xscale="log", xticks=[0.1, 0.3, 1, 3, 10])
    axes.set_xticklabels(["0.1", "0.3", "1", "3", "10"])
    axes.minorticks_off()
figure.legend(loc="outside lower center", ncols=4, frameon=False)
plt.show()

# %%
steady = jumps.iloc[(jumps["factor"] - 1).abs().argmin()]
worst = jumps["with"].max() / jumps["without"].median()
print(f"same scale: {steady['without'] / steady['with']:.1f} times faster than without a floor")
print(f"worst jump: {worst:.2f} times the time without a floor; identical: {jumps['same'].all()}")

# %% [markdown]
# You should see a valley around 1, where training lives, and far from it about the time of a selection
# without a floor, on both sides: tries in vain on the left, many candidates to copy on the right. The
# new threshold is the next floor, so one jump costs one slow selection.
#
# ## Vectors made to break it
#
# Constants, zeros, ties at the threshold, one huge value, infinities; and floors that are absent, far too
# low, exactly the threshold, a hair above it, far too high.

# %%
small_D = torch.randn(5000, generator=generator)
hard = {
    "random": small_D,
    "signs flipped": -small_D,
    "ties": small_D.round(),
    "constant": torch.ones(5000),
    "zeros": torch.zeros(5000),
    "one huge value": torch.zeros(5000).index_fill(0, torch.tensor([77]), 1e38),
    "infinities": small_D.masked_fill(small_D > 3, float("inf")),
    "1000 times smaller": small_D / 1000,
    "1000 times larger": small_D * 1000,
}

# %%
taken = torch.rand(5000, generator=generator) < 0.01
cases = []
for vector_D in hard.values():
    for count in (1, 50, 4000):
        kth = tcs._filtered(vector_D, count, taken, 0.0)[1]
        for guess in (0.0, 1e-30, 0.5 * kth, kth, kth * 1.0001, kth + 1, 1e30):
            cases.append(selection(vector_D, count, taken, guess)["same"])
print(f"{sum(cases)} of {len(cases)} selections identical to the plain one")

# %% [markdown]
# You should see all of them identical.
#
# ## A small measurement
#
# `run_benches` measures the cases of `lab.bench.BENCHES`. What is compared runs in turns in one process, after
# one turn that does not count. The same functions at small sizes, as a part of our own, into a
# temporary folder:

# %%
lab.bench.BENCHES["small"] = [
    lambda b: lab.bench_step(b, step_dimension, clients),
    lambda b: lab.bench_round(b, "TCS", model, round_width, 2 * batch_size),
]
with tempfile.TemporaryDirectory() as folder:
    made_here = lab.run_benches(["small"], repeat, "cpu", threads=1, results=folder)


def over(record, part, base):
    """Every work of a part as a multiple of the median of `base`, with quartiles."""
    rows = [row for row in record["rows"] if row["part"] == part and "median" in row]
    bases = {row["case"]: row["median"] for row in rows if row["work"] == base}
    return [
        {"case": r["case"], "work": r["work"], "ms": f"{1e3 * r['median']:,.3g}",
         f"times {base}": f"{r['median'] / bases[r['case']]:.3f}",
         "quartiles": " – ".join(f"{r[q] / bases[r['case']]:.3f}" for q in ("low", "high")),
         "n": r["n"]}
        for r in rows
    ]  # fmt: skip


# %%
def stated(record):
    """Where, with what and when a record was made."""
    made = record["provenance"]
    commit = (made["commit"] or "no commit")[:10] + ("+" if made["dirty"] else "")
    cores = f"{made['cores']} core(s), {made['threads']} thread(s)"
    words = f"{made['device']} · {cores} · {made['precision']} · torch {made['torch']}"
    return f"{words} · commit {commit} · {made['finished'][:10]}"


for part, base in (("step", "textbook"), ("round", "passes")):
    display(Markdown(lab.markdown(pd.DataFrame(over(made_here, part, base)))))
print(stated(made_here))

# %% [markdown]
# You should see `step` below `textbook` in the first table. In the second, *round* beside *passes*
# is the price of the federation. Where the quartiles lie far apart, the machine was busy with something else, and
# the number is worth as little as that. Nothing here is asserted: speed belongs to a machine, and to
# records that say which.
#
# ## The records
#
# From here on: what was measured at the paper's size. A record holds its device, so there may be several;
# each figure draws the newest that has its part. Made by `python tcs_core.py bench` (minutes to tens of
# minutes; `--part`, `--device`, `--precision`, `--threads`).

# %%
bench_folder = lab.results_folder("bench", records)
found = [json.loads(path.read_text()) for path in sorted(bench_folder.glob("*.json"))]
found = [r for r in found if (device_words or "") in r["provenance"]["device"]]
found.sort(key=lambda record: record["provenance"]["finished"], reverse=True)
missing = "no record yet; to make one: python tcs_core.py bench"
for record in found:
    parts = ", ".join(dict.fromkeys(row["part"] for row in record["rows"]))
    print(f"{stated(record)}: {parts}")
print(f"records: {len(found)}" if found else missing)


# %%
def newest(part, records=None):
    """The newest record with this part and its rows, or (None, no rows)."""
    for record in found if records is None else records:
        rows = [row for row in record["rows"] if row["part"] == part]
        if rows:
            return record, pd.DataFrame(rows).drop_duplicates(["case", "work"])
    return None, pd.DataFrame()


def works(rows, value="median"):
    """One row a case, one column a work."""
    return rows.pivot(index="case", columns="work", values=value).reindex(rows["case"].unique())


def on_gpu(record):
    return bool(re.search("NVIDIA|Tesla|GeForce|Instinct|Radeon", record["provenance"]["device"]))


def report(part, *tell):
    """Say whose the newest record of a part is, and draw and tell it; or say that there is none."""
    record, rows = newest(part)
    missing_part = "growth" if part == "memory" else part
    print(stated(record) if record else f"{missing} --part {missing_part}")
    for work in tell if record else ():
        work(record, rows)


# %% [markdown]
# ## Where the time of a round goes
#
# *Passes* are the same forward and backward passes on the same model with nothing around them, with
# the threads that a case names (those of the profile that trains this net) or else the record's.
# *Augmentation* and *compression* are measured by themselves, the *rest* is what remains of the round:
# weight decay, the step of the model, counting, and whatever the caches lose when other work comes
# between.
#
# $$\text{rest} = \text{round} - \text{passes} - \text{augmentation} - \text{compression}$$


# %%
def costs(record, rows):
    """Per case, all in multiples of the passes: the parts of a round, its quartiles, its target."""
    table, low, high = (works(rows, value) for value in ("median", "low", "high"))
    parts = table[["augmentation", "compression"]].copy()
    parts["rest"] = table["round"] - table["passes"] - parts.sum(axis=1)
    parts = parts.div(table["passes"], axis=0)
    parts["round"] = table["round"] / table["passes"]
    parts["low"], parts["high"] = low["round"] / table["passes"], high["round"] / table["passes"]
    wide = parts.index.str.startswith(wide_net) & (not on_gpu(record))
    parts["target"] = np.where(wide, round_target_wide, round_target)
    return parts.assign(seconds=table["round"], passes=table["passes"])


# %%
def below(figure, *panels, columns=3):
    """One legend for all panels, under them; each name once."""
    pairs = [zip(*reversed(axes.get_legend_handles_labels()), strict=True) for axes in panels]
    names = dict(pair for of_one in pairs for pair in of_one)
    look = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(names.values(), names.keys(), **look)


SHADES = {"augmentation": lab.COLOURS[5], "compression": lab.COLOURS[2], "rest": lab.COLOURS[7]}


def stack(axes, parts, start, scale=1.0):
    """Bars side by side from `start` on; a negative rest is left out."""
    edge = np.full(len(parts), float(start))
    for name, colour in SHADES.items():
        size = scale * parts[name].clip(lower=0)
        axes.barh(range(len(parts)), size, left=edge, color=colour, label=name, height=0.55)
        edge = edge + size


# %%
def marks(axes, parts, centre, scale):
    """The measured round with its quartiles, and its target."""
    y = np.arange(len(parts))
    middle, low, high = (scale * (parts[name] - centre) for name in ("round", "low", "high"))
    look = {"color": lab.COLOURS[0], "fmt": "|", "ms": 16, "mew": 2, "capsize": 3}
    bars = axes.errorbar(middle, y, xerr=(middle - low, high - middle), **look)
    bars.set_label("round, measured (quartiles)")
    aim = scale * (parts["target"] - centre)
    axes.plot(aim, y - 0.4, "v", color=lab.COLOURS[1], label="target", clip_on=False)
    return max(min(high.max(), 2 * middle.max()), aim.max())  # a very wide quartile is cut


def draw_round(record, rows):
    parts = costs(record, rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 1.6 + 0.6 * len(parts)), sharey=True)
    left.barh(range(len(parts)), 1, color=lab.COLOURS[6], height=0.55, label="passes")
    stack(left, parts, 1)
    stack(right, parts, 0, 100)
    label_round(left, right, parts, marks(right, parts, 1, 100))
    below(figure, left, right)
    plt.show()


# %%
def label_round(left, right, parts, widest):
    for y, row in enumerate(parts.itertuples()):
        left.text(0.5, y, f"{row.passes:.3g} s", ha="center", va="center")
        left.text(1.02 * max(row.round, 1), y, f"  {row.round:.3f}", va="center", weight="bold")
    names = [" · ".join(case.rsplit(", ", 1)).replace(", N ", "\nN ") for case in parts.index]
    left.set_yticks(range(len(parts)), names)
    left.invert_yaxis()
    left.set(title="A round over its passes", xlabel="multiples of the passes")
    left.set_xlim(0, 1.3 * parts["round"].max())
    right.set(title="What is added to the passes", xlabel="% of the passes")
    right.set_xlim(min(0.0, 110 * float(parts["low"].min() - 1)), 1.1 * widest)
    right.axvline(0, color="black", linewidth=0.8)


# %%
report("round", draw_round)

# %% [markdown]
# You should see, left, how much of a round is passes (the seconds in the bar), and the ratio round ÷
# passes in bold. Right is the same without the passes, so that small shares can be read, with the target
# of each case as a triangle. What no part explains fills the bar up to the black mark. A mark left of its
# bar's end is a negative rest: that round took less time than its parts by themselves. A rest of either
# sign says little where it is no larger than what the same passes differ by from case to case: a tenth, in the
# record of two cores.


# %%
def tell_round(record, rows):
    parts = costs(record, rows)
    table = pd.DataFrame(
        {"case": parts.index, "seconds a round": parts["seconds"].map("{:.3g}".format)}
    )
    for name in SHADES:
        table[f"{name} %"] = [f"{100 * value:+.1f}" for value in parts[name]]
    table["round / passes"] = [f"{value:.3f}" for value in parts["round"]]
    table["quartiles"] = [f"{r.low:.3f} – {r.high:.3f}" for r in parts.itertuples()]
    table["target"] = [f"≤ {value:g}" for value in parts["target"]]
    table["verdict"] = np.where(parts["round"] <= parts["target"], "met", "missed")
    display(Markdown(lab.markdown(table)))


report("round", tell_round)

# %% [markdown]
# ## Compression against the memory
#
# Whatever the algorithm, a client's compression must read its difference, read its error and write it:
# 12 bytes an entry. The core on a CPU makes two more passes, reading each entry once for the check that
# everything is finite and once for the comparison with the floor: 20 bytes. How long that takes at least
# follows from a plain copy of one row, which moves 8 bytes an entry:
#
# $$t_{least} = \frac{12\,D}{\text{bandwidth}},\qquad \text{bandwidth} = \frac{8\,D}{t_{copy}}$$
#
# *Textbook* is the algorithm as one would write it down first: clone, `topk`, multiply by masks.


# %%
def per_client(rows):
    """Milliseconds a client of every way, and GB/s of the copy."""
    row, table = rows.iloc[0], works(rows).iloc[0]
    copy, N = table["copy of one row"], int(row["clients"])
    ways = {"textbook": table["textbook"] / N, "Compressor.step": table["step"] / N}
    ways |= {"20 bytes an entry": 20 / 8 * copy, "12 bytes an entry": 12 / 8 * copy}
    return {k: 1e3 * v for k, v in ways.items()}, 8e-9 * row["dimension"] / copy


# %%
def draw_step(record, rows):
    ways, least = per_client(rows)[0], per_client(rows)[0]["12 bytes an entry"]
    _, axes = plt.subplots(figsize=(7.6, 2.8))
    axes.barh(list(ways), ways.values(), color=[lab.COLOURS[i] for i in (7, 2, 6, 6)], height=0.55)
    for y, value in enumerate(ways.values()):
        axes.text(value, y, f"  {value:.3g} ms, {value / least:.1f} ×", va="center")
    axes.plot([step_target(record)], [0.6], "v", color=lab.COLOURS[0], label="target of the step")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(ways.values()))
    axes.set(title=f"Compression of one client, {rows['case'].iloc[0]}", xlabel="milliseconds")
    axes.legend(frameon=False, loc="lower right")
    plt.show()


def step_target(record):
    """Milliseconds a client."""
    return gpu_step_target_ms / 10 if on_gpu(record) else step_target_ms


# %%
def tell_step(record, rows):
    ways, bandwidth = per_client(rows)
    step, textbook, least = (ways[k] for k in ("Compressor.step", "textbook", "12 bytes an entry"))
    verdict = "met" if step <= step_target(record) else "missed"
    faster = "met" if textbook / step >= step_target_times else "missed"
    print(f"a copy moves {bandwidth:.1f} GB/s; the step takes {step / least:.1f} times the least")
    print(f"{step:.3g} ms a client, target {step_target(record):g}: {verdict}")
    print(
        f"{textbook / step:.1f} times faster than textbook, target {step_target_times:g}: {faster}"
    )


report("step", draw_step, tell_step)

# %% [markdown]
# You should see the step between the textbook version and what memory alone would take; behind each time
# stands its multiple of the least. No selection, however clever, can pass the last bar.
#
# ## Codes
#
# One client's message at the paper's size, there and back: quantized if the scheme does it, encoded to
# bytes, decoded. The first bar is the positions of the local mask alone.


# %%
def codec_times(rows):
    """Milliseconds: one row a message, one column a piece of work; bytes in the name."""
    table = 1e3 * works(rows)
    size = rows.groupby("case")["bytes"].first()
    whole = table.reindex(columns=["quantize", "encode", "decode"])
    whole.index = [f"{name}, {size[name] / 1e3:,.0f} kB" for name in whole.index]
    alone = table.dropna(subset=["encode positions"]).iloc[0]
    positions = {"encode": alone["encode positions"], "decode": alone["decode positions"]}
    first = pd.DataFrame([positions], index=["positions alone"])
    return pd.concat([first, whole]).reindex(columns=["quantize", "encode", "decode"]).fillna(0.0)


# %%
def draw_codecs(record, rows):
    times = codec_times(rows)
    figure, axes = plt.subplots(figsize=(7.6, 3.0))
    total = codec_bars(axes, times)
    aim = {"color": lab.COLOURS[0], "label": "target, positions"}
    axes.plot([positions_target_ms], [-0.4], "v", **aim)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(*total, positions_target_ms))
    axes.set(title=f"Coding one message, D = {rows['dimension'].iloc[0]:,}", xlabel="milliseconds")
    below(figure, axes, columns=4)
    plt.show()


def codec_bars(axes, times):
    edge = np.zeros(len(times))
    for name, i in zip(times, (5, 2, 1), strict=True):
        axes.barh(times.index, times[name], left=edge, color=lab.COLOURS[i], label=name, height=0.6)
        edge = edge + times[name].to_numpy()
    for y, total in enumerate(edge):
        axes.text(total, y, f"  {total:.2f} ms", va="center")
    return edge


report("codecs", draw_codecs)

# %% [markdown]
# You should see how the time of a code compares with its gain in bytes, which stand in the names. In a
# simulation a message need not become bytes at all (the core counts their bits instead), so this is time
# that *real* processes would spend once a round: the client on encoding, the server on decoding.
#
# ## Growth
#
# Does a step take time in proportion to the clients N, and to the parameters D? On two logarithmic axes
# proportional growth is a line of slope 1 (grey, through the last point).


# %%
def series(rows, axis):
    """The rows in which only `axis` changes: the other one has the value it has most often."""
    other = "dimension" if axis == "clients" else "clients"
    return rows[rows[other] == rows[other].mode()[0]].sort_values(axis)


def slope(x, y):
    return float(np.polyfit(np.log(x.astype(float)), np.log(y.astype(float)), 1)[0])


def draw_growth(record, rows):
    rows = rows[rows["work"] == "step"]
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for axes, axis in zip(panels, ("clients", "dimension"), strict=True):
        growth_panel(axes, series(rows, axis), axis)
    panels[0].set(title=f"D = {series(rows, 'clients')['dimension'].iloc[0]:,}")
    panels[1].set(title=f"N = {series(rows, 'dimension')['clients'].iloc[0]}")
    panels[0].set(xlabel="clients N (log)", ylabel="ms a step (log)")
    panels[1].set(xlabel="parameters D (log)", ylabel="ms a step (log)")
    below(figure, panels[0])
    plt.show()


# %%
def growth_panel(axes, part, axis):
    x, y = part[axis].to_numpy(float), 1e3 * part["median"].to_numpy()
    spread = y - 1e3 * part["low"], 1e3 * part["high"] - y
    axes.plot(x, y[-1] * x / x[-1], label="in proportion", **line(7, 1))
    axes.errorbar(x, y, yerr=spread, marker="o", capsize=3, label="measured (quartiles)", **line(2))
    axes.set(xscale="log", yscale="log")
    if axis == "clients":
        axes.minorticks_off()
        axes.set_xticks(x, [f"{value:.0f}" for value in x])


def tell_growth(record, rows):
    for axis in ("clients", "dimension"):
        part = series(rows[rows["work"] == "step"], axis)
        value = slope(part[axis], part["median"])
        words = "in proportion" if 0.9 <= value <= 1.1 else ("slower" if value < 0.9 else "faster")
        print(f"time grows with {axis} to the power {value:.2f}: {words} (in proportion: 1 ± 0.1)")


report("growth", draw_growth, tell_growth)

# %% [markdown]
# You should see the points along the grey line, and where they bend away from it: small models fit into
# a cache and pay fixed costs, large ones wait for memory.
#
# Memory: the differences and the errors of N clients, and a few vectors more. The bound is
#
# $$(2N + 8)\cdot 4\,D \text{ bytes}$$


# %%
def draw_memory(record, rows):
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for axes, axis in zip(panels, ("clients", "dimension"), strict=True):
        part = series(rows, axis)
        axes.plot(part[axis], part["allowed"] / 1e6, label="bound, (2N + 8) · 4 · D", **line(1, 1))
        axes.plot(part[axis], part["bytes"] / 1e6, marker="o", label="used at the most", **line(2))
    one_D, one_N = series(rows, "clients")["dimension"], series(rows, "dimension")["clients"]
    panels[0].set(title=f"D = {one_D.iloc[0]:,}", xlabel="clients N", ylabel="MB", ylim=(0, None))
    panels[1].set(title=f"N = {one_N.iloc[0]}", xlabel="parameters D (log)", ylabel="MB (log)")
    panels[1].set(xscale="log", yscale="log")
    below(figure, panels[0])
    plt.show()


def tell_memory(record, rows):
    share = rows["bytes"] / rows["allowed"]
    case, worst = rows["case"].loc[share.idxmax()], share.max()
    print(f"at the most {worst:.0%} of the bound ({case}): {'met' if worst <= 1 else 'missed'}")


report("memory", draw_memory, tell_memory)

# %% [markdown]
# You should see the measured line below the bound, and near it only where the model is large. Of a process on a
# CPU the system's count of its pages is taken; what a small model needs for a moment may fit into pages
# that the process has already, and does not show. The largest D is the fairest point.
#
# ## How long the paper's runs would take
#
# A round of the paper's size, times the rounds of an epoch, times the epochs of a run; evaluation not
# included. With M training images,
#
# $$\text{rounds an epoch} = \left\lfloor \frac{M}{N \cdot B \cdot H} \right\rfloor$$


# %%
def rounds_an_epoch(row):
    N, B = map(int, re.search(r"N (\d+), B (\d+)", row["case"]).groups())
    return paper_samples // N // B // int(row["local_steps"])


def run_hours(row):
    return row["median"] * rounds_an_epoch(row) * paper_epochs / 3600


def duration(row):
    seconds, rounds = row["median"], rounds_an_epoch(row)
    cells = {"scheme": row["case"].rsplit(", ", 1)[1], "H": int(row["local_steps"])}
    cells |= {"rounds an epoch": rounds, "seconds a round": f"{seconds:.3g}"}
    cells |= {"epochs a minute": f"{60 / rounds / seconds:.3g}"}
    return cells | {f"hours, {paper_epochs} epochs": f"{run_hours(row):.3g}"}


# %%
def durations(record, rows):
    """The cases of the paper's network."""
    rows = rows[(rows["work"] == "round") & rows["case"].str.startswith(wide_net)]
    table = pd.DataFrame([duration(row) for _, row in rows.iterrows()])
    display(Markdown(lab.markdown(table) if len(table) else f"no {wide_net} in this record"))


report("round", durations)

# %% [markdown]
# You should see what decides whether anyone can check the paper's evidence: every line of its tables is
# several such runs.
#
# ## All records
#
# One line a record, newest first; what a record did not measure is a dash. The ratios are the medians of
# the first case of each kind.


# %%
def speeds(record):
    rows = {part: newest(part, [record])[1] for part in ("round", "step", "codecs")}
    if len(rows["round"]):
        ratios = costs(record, rows["round"])["round"]
        yield "round / passes", f"{ratios.iloc[0]:.3f} (worst {ratios.max():.3f})"
    if len(rows["step"]):
        ways, _ = per_client(rows["step"])
        yield "step, ms a client", f"{ways['Compressor.step']:.3g}"
        yield "× textbook", f"{ways['textbook'] / ways['Compressor.step']:.1f}"
    if len(rows["codecs"]):
        yield "codes, ms", f"{codec_times(rows['codecs']).loc['positions alone'].sum():.2f}"


def line_of(record):
    made, names = record["provenance"], ("round / passes", "step, ms a client")
    cells = {"device": made["device"], "threads": made["threads"], "precision": made["precision"]}
    cells |= {"date": made["finished"][:10], "commit": (made["commit"] or "–")[:7]}
    return cells | dict.fromkeys((*names, "× textbook", "codes, ms"), "–") | dict(speeds(record))


display(Markdown(lab.markdown(pd.DataFrame(map(line_of, found))) if found else missing))

# %% [markdown]
# ## Claim
#
# Asserted is what must hold on any machine: every selection of the training, of the sudden jumps and of
# the vectors made to break it is the plain one, entry for entry; the global mask of the training was the
# plain $S_{top}$ of the last update; and the training chose among fewer entries than all.

# %%
assert seen["same"].all(), "a filtered selection differs from the plain one"
assert jumps["same"].all() and set(jumps["tried"]) == {0, 1, 2}
assert all(cases), f"{len(cases) - sum(cases)} of {len(cases)} selections differ"
assert torch.equal(rule.positions, plain(update_D, rule.k_global, nothing_D))
assert seen["among"].mean() < D
total = len(seen) + len(jumps) + len(cases)
print(f"{total} selections, all identical to the plain ones")


# %% [markdown]
# ## What we saw


# %%
targets = []


def check(what, value, target, at_most=True, form=".3g"):
    met = value <= target if at_most else value >= target
    aim = f"{'≤' if at_most else '≥'} {target:g}"
    targets.append([what, format(value, form), aim, "met" if met else "missed"])


def check_round(record, rows):
    for case, row in costs(record, rows).iterrows():
        check(f"round / passes, {case}", row["round"], row["target"], form=".3f")
    whole = rows[(rows["work"] == "round") & rows["case"].str.startswith(wide_net)]
    if on_gpu(record) and len(whole):
        minutes = 60 * run_hours(whole.iloc[0])
        check(f"minutes, {paper_epochs} epochs", minutes, run_target_minutes)


# %%
def check_step(record, rows):
    ways, _ = per_client(rows)
    check("Compressor.step, ms a client", ways["Compressor.step"], step_target(record))
    times = ways["textbook"] / ways["Compressor.step"]
    check("times faster than textbook", times, step_target_times, at_most=False)


def check_codecs(record, rows):
    spent = codec_times(rows).loc["positions alone"].sum()
    check("positions there and back, ms", spent, positions_target_ms)


def check_memory(record, rows):
    check("memory over its bound", (rows["bytes"] / rows["allowed"]).max(), 1.0)


checks = {"round": check_round, "step": check_step, "codecs": check_codecs, "memory": check_memory}
for part, verdict in checks.items():
    record, rows = newest(part)
    _ = verdict(record, rows) if record else None
if targets:
    table = pd.DataFrame(targets, columns=["what", "measured", "target", "verdict"])
    display(Markdown(lab.markdown(table)))

# %%
met = sum(row[-1] == "met" for row in targets)
crowded = typical["crowd"] > 1.5 * typical["crowd, no error"]
display(Markdown(f"""
- **Holds.** The selection with a floor is exact: {total} of {total} comparisons, every one identical.
- **{"Holds" if typical["global"] < 3 else "Does not hold here"}.** The threshold of the global mask
  changes slowly: the choice is made among {typical["global"]:.1f} K entries.
- **{"Surprised us" if typical["local"] > 2 * typical["global"] else "Holds"}.** The local masks need
  {typical["local"]:.1f} K candidates; with a threshold of each client's own, {typical["own"]:.1f} K.
  Even a perfect guess would leave {typical["crowd"]:.1f} K, but {typical["crowd, no error"]:.1f} K
  without errors: {"what waits crowds below the threshold" if crowded else "there is no crowd"}. In
  {(client["tried"] == 2).mean():.1%} of their selections all entries had to be looked at.
- **Targets.** {f"{met} of {len(targets)} met, by the records named above" if targets else missing}.
"""))  # fmt: skip

# %% [markdown]
# Next: `README` has the commands of the full runs. Try here: `clients = 2`, `drops = []` or a
# larger `phi_local`, and see what moves the candidates.

# %%
print(
    f"core {lab.core_sha256()[:12]} · torch {torch.__version__} · {data.label} · "
    f"n = 1 training, {repeat} turns, {len(found)} bench records"
)
