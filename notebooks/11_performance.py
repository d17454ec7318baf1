# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Measure where the time of a round goes
#
# **In short.** With the paper's ResNet-18 on two CPU cores, almost all of the time goes into the forward and backward passes. We compare
# with these passes alone, computed for one client after the other with the same layout of tensors in memory. A round of TCS took 1.07 times
# as long, and 0.98 times as long when clients trained in parallel threads. A round of a plain loop with top-K took 1.16 times as long. On
# this CPU, our code (`tcs_core.py`, below called the *core*) compressed the update of one client in 21.6 ms, and code written as in a
# textbook took 12.9 times as long. On one H200 GPU, a whole round took 108.5 ms, and 19.98 ms as a CUDA graph. There, the textbook code is
# faster: it compressed ten clients in 6.906 ms, and the core needed 8.811 ms. (Since these measurements, we have changed how the core
# chooses masks, and have not repeated them.) We had set 12 targets for speed, and 8 of them are met.
#
# **Claim (ours).** TCS keeps the K largest entries of an update. We call the magnitude of the K-th largest entry the *threshold*. A sample
# of a few thousand entries is enough to estimate it, so the K largest can be chosen exactly among few candidates. On a CPU, a federated
# round of a large network then costs little more than its passes. If the number of clients or of parameters doubles, the compression takes
# at most about twice as long.
#
# The first half of this notebook runs here. It shows how the selection works and why its result is always exact, and it ends with a small
# measurement. The second half shows stored measurements from `results/bench/`, which `uv run tcs bench` made.
#
# *Run time*: less than a minute. *Read before*: [03_tcs](03_tcs.ipynb) for masks, errors and Algorithm 2.
#
# The grey bars are folded code cells: click one to open it. The second one holds the settings. You can change them and run all cells again;
# the text describes the results for the values given here. For example:
#
# - With `clients = 2`, a round uses fewer samples, so an epoch has more rounds, and the updates are noisier. The results stay exact.
# - `phi_local = 1e-2` makes the local masks ten times as large. The number of candidates should grow too, but by less than that.
# - `step_dimension = 3_000_000` should make the compression in the small measurement take about ten times as long.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import re
import tempfile
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 10})

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
phi_global = 1e-2  # share kept by the global mask
phi_local = 1e-3  # share kept by each local mask
train_samples = 640  # synthetic images to learn from
width = 16  # channels of the net's first stage
clients = 10  # N
batch_size = 4  # B, samples of one local step
epochs = 3  # passes over the data, the first one dense
drop = 0.67  # when eta is divided by 10, as a share of the epochs
seed = 0  # of everything random
step_dimension = 300_000  # D of the small measurement of compression
round_width = 8  # channels of the net in the small measurement of a round
repeat = 3  # turns of the small measurements
records = None  # folder that holds bench/*.json; None: results/
round_targets = {"resnet18 width 64": 0.97, "resnet18 width 16": 0.72,  # over plain top-K, a CPU
                 "resnet8 width 8": 0.65, "resnet8 width 4": 0.45}  # over the passes  # fmt: skip
step_targets_ms = [30.0, 0.3]  # Compressor.step per client at the paper's D: two cores; a GPU
textbook_target = 8.0  # times faster than the textbook version
positions_target_ms = 5.0  # encode and decode the positions of a message
paper_samples = 50_000  # training images of the paper's data set
paper_epochs = 300  # of the paper's runs
run_target_minutes = 5.0  # one run of TCS on a GPU

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
counts = ("train_samples", "width", "clients", "batch_size", "epochs", "step_dimension",
          "round_width", "repeat", "paper_samples", "paper_epochs")  # fmt: skip
lab.check_values(globals(), **dict.fromkeys(counts, lab.WholeNumber), seed=lab.Seed)
scheme = tcs.Scheme.named("TCS", phi_global=phi_global, phi_local=phi_local)
sizes = {"model": "resnet8", "width": width, "clients": clients, "batch_size": batch_size}
schedule = {"epochs": epochs, "warmup_epochs": 1, "drops": (drop,), "reference_batch": None}
config = lab.RunConfig(scheme, seed=seed, **sizes, **schedule, device="cpu")
data = lab.load_dataset("synthetic").first(train_samples, 100)
training = lab.Training(config, data, keep_deltas=True)
compressor, rule, D = training.compressor, training.compressor.rule, len(training.theta_D)
print(f"D = {D:,} parameters, K_global = {rule.k_global}, K_local = {rule.k_local}, N = {clients}")
print(
    f"Each epoch has {training.rounds_per_epoch} rounds. In the first epoch, nothing is compressed."
)
small = dataclasses.replace(config, train_samples=train_samples, test_samples=100)
print(lab.forecast_trainings([small]))

# %% [markdown]
# ## A guess that cannot be wrong
#
# Algorithm 2 selects the k largest of D magnitudes ($S_{top}$) once for every client and once at the server. This is the most expensive
# part of the compression. Suppose that we have a guess $f$ of the k-th largest magnitude. We call it the *floor*, and find the entries that
# reach it:
#
# $$C_f = \{i : |v_i| \ge f\}, \qquad |C_f| \ge k \;\Rightarrow\; S_{top}(v, k) = S_{top}(v|_{C_f}, k)$$
#
# If at least k entries reach the floor, then all entries of $S_{top}$ are among them. So are all entries as large as the smallest one of
# $S_{top}$, so ties are decided in the same way. A bad guess only costs time. If it is too low, there are more candidates. If it is too
# high, there are fewer than k candidates, and we search again with a lower floor. The result is the same in all cases.

# %%
lab.show_code(tcs.top_k_positions)

# %% [markdown]
# The guess comes from a sample of every n-th entry, some 4,000 in all. About k/n of the k largest entries are in the sample. So we look at
# somewhat more than k/n of the sample's largest entries. In nearly all cases, the smallest of them lies below the threshold, and becomes
# the floor:

# %%
lab.show_code(tcs.estimate_floor)

# %% [markdown]
# Most entries of a global update are 0, because clients sent only a few. Then the estimate may be 0, too. In this case, all entries that
# are not 0 are candidates.
#
# ## Follow the threshold through a training
#
# We now run a training and record for every selection the floor, the threshold, and the number of entries among which the exact choice was
# made. The function `plain` sorts all entries; among equal magnitudes, it prefers the lower index. The estimate can be multiplied by a
# `factor`, with which we later make it wrong on purpose.


# %%
def plain(vector_D, k, taken_D):
    size_D = torch.where(taken_D, -1.0, vector_D.abs())
    return size_D.sort(descending=True, stable=True).indices[:k].sort().values


def selection(vector_D, k, taken_D, factor=1.0):
    """Describe a selection by the core: at which try it succeeded (0: at the floor, 1: at half of
    it, 2: among all), among how many entries, and whether it is the same as the plain one."""
    floor = factor * tcs.estimate_floor(vector_D.numpy(), k, taken_D.numpy())
    with mock.patch.object(tcs, "estimate_floor", lambda *_: floor):
        chosen_K = tcs.top_k_positions(vector_D, k, taken_D)
    counts = [int((~taken_D & (vector_D.abs() >= level)).sum()) for level in (floor, floor / 2)]
    tried = next((i for i, count in enumerate(counts) if count >= k), 2)
    found = {"floor": floor, "tried": tried, "among": [*counts, len(vector_D)][tried]}
    found["kth"] = float(vector_D[chosen_K].abs().min())
    return found | {"same": torch.equal(chosen_K, plain(vector_D, k, taken_D))}


# %%
seen, nothing_D = [], torch.zeros(D, dtype=torch.bool)
before_ND, taken_D = None, None


def look(update_D):
    """Yield every selection of one round, computed from the state before it."""
    for n, delta_D in enumerate([] if compressor.known.dense else training.deltas_ND):
        row = selection(before_ND[n] + delta_D, rule.k_local, taken_D)
        yield {"round": compressor.known.round, "who": "client", **row}
    row = selection(update_D, rule.k_global, nothing_D)
    yield {"round": compressor.known.round, "who": "server", **row}


# %%
for epoch in range(epochs):
    for update_D in training.rounds(epoch):
        seen += look(update_D)
        before_ND = compressor.errors_ND.clone()
        taken_D = tcs.positions_to_mask(rule.positions, D)
seen = pd.DataFrame(seen)
server, client = (seen[seen["who"] == who] for who in ("server", "client"))
for name, rows in (("server", server), ("clients", client)):
    tries = [int((rows["tried"] == i).sum()) for i in range(3)]
    print(f"{name:8s}{len(rows):4d} selections: {tries[0]} succeeded at the floor, {tries[1]} at half of it, and "
          f"{tries[2]} among all entries; {int(rows['same'].sum())} are identical to plain")  # fmt: skip


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def line(i, dash=0):
    return {"color": lab.COLOURS[i], "linestyle": lab.tables.DASHES[dash], "linewidth": 1.5}


figure, axes = plt.subplots(figsize=(7.6, 3.6))
axes.plot(server["round"], server["kth"], label="threshold (K-th magnitude)", **line(2))
axes.plot(server["round"], server["floor"], label="floor, estimated from a sample", **line(1, 1))
first_sparse, dropped = client["round"].min(), epochs * training.rounds_per_epoch * drop
for at, text in ((first_sparse, "first sparse round"), (dropped, "η is divided by 10")):
    axes.axvline(at, **line(7, 3))
    axes.text(
        at, 0.97, f" {text}", va="top", color=lab.COLOURS[7], transform=axes.get_xaxis_transform()
    )
axes.set(title="The global mask's threshold", xlabel="round", ylabel="magnitude")
axes.set_ylim(bottom=0)
axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.25))
lab.show_figures()

# %% [markdown]
# In the dense rounds, the floor follows the threshold. In the sparse rounds, most entries of the update are 0. So the sample, too, has few
# entries that are not 0, and the estimate needs almost all of them. The floor is then near 0, and nearly all entries that are not 0 are
# candidates.

# %%
typical = {
    "global": server["among"].median() / rule.k_global,
    "local": client["among"].median() / rule.k_local,
}
print(
    f"For the global mask, the choice is made among {typical['global']:.1f} × K_global entries (median)."
)
print(
    f"For a local mask, it is made among {typical['local']:.1f} × K_local entries. All entries are {D / rule.k_local:.0f} × K_local."
)

# %% [markdown]
# In proportion, the local masks have more candidates. They are smaller, so fewer of their entries are in the sample, and the margin has to
# be larger.
#
# ## Inputs made to break it
#
# We now try to make the selection fail. The vectors contain constants, zeros, ties at the threshold, one huge value, infinities, or sampled
# entries that are all larger than the others, or all smaller. And we make the estimate wrong by factors from 1/1000 to 1000.

# %%
generator = torch.Generator().manual_seed(seed)
small_D = torch.randn(20_001, generator=generator)
taken = torch.rand(20_001, generator=generator) < 0.01
every = torch.arange(0, 20_001, 20_001 >> 12 | 1)  # the sample
hard = [small_D, small_D.round(), torch.ones(20_001), torch.zeros(20_001), small_D * 1000,
        torch.zeros(20_001).index_fill(0, torch.tensor([77]), 1e38),
        small_D.masked_fill(small_D > 3, float("inf")),
        small_D.index_fill(0, every, 9.0), small_D.index_fill(0, every, 1e-9)]  # fmt: skip
factors = (1e-3, 0.1, 0.5, 0.9, 1, 1.1, 2, 10, 1e3)
cases = [selection(vector_D, k, taken, factor)
         for vector_D in hard for k in (1, 50, 4000) for factor in factors]  # fmt: skip
print(f"{sum(case['same'] for case in cases)} of {len(cases)} selections are identical to plain.")
at_floor, at_half, among_all = np.bincount([case["tried"] for case in cases], minlength=3)
print(
    f"{at_floor} succeeded at the floor, {at_half} at half of it, and {among_all} among all entries."
)

# %% [markdown]
# If the floor is too high, the selection succeeds at half of it, or searches all entries. If it is too low, there are many candidates. In
# these cases the selection is slower but never wrong.
#
# ## A small measurement
#
# How long does compression take, and how long does a whole round take? We measure several implementations in one process. They take turns,
# and the first turn does not count. These are the functions behind `uv run tcs bench`, at small sizes:

# %%
lab.studies.BENCHES["small"] = [
    lambda b: lab.bench_step(b, step_dimension, clients),
    lambda b: lab.bench_round(b, "TCS", "resnet8", round_width, 2 * batch_size),
]
with tempfile.TemporaryDirectory() as folder:
    made_here = lab.run_benches(["small"], repeat, "cpu", threads=1, results=folder)


# %%
def stated(record):
    """Say where, with what and when a record was made."""
    made = record["provenance"]
    commit = (made["commit"] or "no commit")[:10] + ("+" if made["dirty"] else "")
    words = (
        f"Measured on {made['device']} with {made['cores']} core(s) and {made['threads']} thread(s)"
    )
    return f"{words}, in {made['precision']}, with torch {made['torch']}, at commit {commit} on {made['finished'][:10]}."


display(Markdown(lab.markdown(lab.bench_table(made_here))))
print(stated(made_here))

# %% [markdown]
# The rows with *step* in their name belong to the compression of N clients with D parameters each. *Textbook* is the algorithm as one would
# first write it down: clone the vector, call `topk`, and multiply by masks. *Step* is the same compression by our core. *Change* only
# prepares new input, and *copy of one row* copies the numbers of one client.
#
# The rows *round* belong to a whole round. *Passes* are its forward and backward passes with nothing around them, so the ratio of *round*
# to *passes* is the price of the federation. The section *Where the time of a round goes* explains the other rows. In *N 10, B 8*, N is the
# number of clients and B the number of samples in a batch. Nothing is asserted here, because speed depends on the machine.
#
# These networks are small. At the paper's size on a CPU, which follows below, the compression is a smaller part of a round, and the
# textbook code loses more time, because it looks at all entries several times.
#
# ## The records
#
# The rest of this notebook shows stored measurements of several networks, up to the paper's. The machine had no other work that we know of,
# and the quartiles tell how much its times varied. Every figure shows the newest record from a CPU (or a GPU, where the text says so) that
# contains the measurement. You can make a record of your own with `uv run tcs bench`, which takes minutes to tens of minutes.

# %%
found = list(lab.find_records(lab.studies.bench.BenchRun, records).values())
found.sort(key=lambda record: record["provenance"]["finished"], reverse=True)
missing = "There is no record yet. To make one, run: uv run tcs bench"
targets = []  # what was measured, and its target


# %%
def report(part, *tell, gpu=False):
    """Call the functions `tell` with the rows of one part, from the newest record of a CPU or a GPU."""
    for record in found:
        rows = [row for row in record["rows"] if row["part"] == part]
        device = re.search("NVIDIA|Tesla|GeForce|Instinct|Radeon", record["provenance"]["device"])
        if rows and bool(device) == gpu:
            print(stated(record))
            table = pd.DataFrame(rows).drop_duplicates(["case", "work"])
            return [one(table) for one in tell]
    print(f"{missing} --part {part}")


def works(rows, value="median"):
    """Return a table with one row per case and one column per work."""
    return rows.pivot(index="case", columns="work", values=value).reindex(rows["case"].unique())


def aim(what, value, target, at_most=True, form=".3g"):
    """Keep a measured value beside its target."""
    met = value <= target if at_most else value >= target
    goal = f"{'≤' if at_most else '≥'} {target:g}"
    targets.append([what, format(value, form), goal, "**met**" if met else "**missed**"])


# %% [markdown]
# ## Where the time of a round goes
#
# A round consists of passes, *augmentation* (random crops and flips of the images), *compression* and a *rest*. We measure the first three
# by themselves. The rest is what remains of the round:
#
# $$\text{rest} = \text{round} - \text{passes} - \text{augmentation} - \text{compression}$$


# %%
def costs(rows):
    """Return what a round adds to its passes, in % of them, and its quartiles: one row per case."""
    table, low, high = (works(rows, value) for value in ("median", "low", "high"))
    parts = table[["augmentation", "compression"]].copy()
    parts["rest"] = table["round"] - table["passes"] - parts.sum(axis=1)
    parts = 100 * parts.div(table["passes"], axis=0)
    for name, whole in (("round", table), ("low", low), ("high", high)):
        parts[name] = 100 * (whole["round"] / table["passes"] - 1)
    return parts.assign(seconds=table["round"])


# %%
def draw_round(rows):
    parts, edge = costs(rows), 0
    figure, axes = plt.subplots(figsize=(8.6, 1.4 + 0.55 * len(parts)))
    for name, i in (("augmentation", 5), ("compression", 2), ("rest", 6)):
        size = parts[name].clip(lower=0).to_numpy()  # a negative rest is left out
        axes.barh(parts.index, size, left=edge, color=lab.COLOURS[i], label=name, height=0.5)
        edge = edge + size
    finish_round(figure, axes, parts)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def finish_round(figure, axes, parts):
    """Add the measured rounds with their quartiles, and label the figure."""
    middle, y = parts["round"], np.arange(len(parts))
    black = {"fmt": "|", "color": "black", "ms": 14, "mew": 2, "capsize": 3}
    spread = middle - parts["low"], parts["high"] - middle
    axes.errorbar(middle, y, xerr=spread, label="measured round (quartiles)", **black)
    axes.set_yticks(y, parts.index.str.replace(", N ", "\nN ").str.replace(", TCS", "\nTCS"))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(title="What a round adds to its passes", xlabel="% of the passes")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    axes.invert_yaxis()
    lab.show_figures()


# %%
OURS = ("round", "client threads", "side by side", "graph")  # ways of making one


def tell_round(rows):
    parts, times = costs(rows), works(rows)
    table = parts[["compression"]].map("{:+.1f} %".format).reset_index()
    table["seconds per round"] = parts["seconds"].map(lab.format_number).to_numpy()
    plain = [way for way in times if way.startswith("plain")]
    for way in [*times.columns.intersection(OURS), *plain]:
        ratios = times[way] / times["passes"]
        table[f"{way} / passes"] = [f"{r:.2f}".replace("nan", "") for r in ratios]
    display(Markdown(lab.markdown(table)))


def judge_round(rows):
    times = works(rows)
    for case, time in times.filter(OURS).min(axis=1).items():
        target = round_targets.get(case.split(",")[0])
        for base in [w for w in times if w.startswith("plain" if "resnet18" in case else "passes")]:
            if target:
                over = time / times.loc[case, base]
                aim(f"the fastest round / {base}, {case}", over, target, form=".2f")


_ = report("round", draw_round, tell_round, judge_round)

# %% [markdown]
# The column *compression* says how much compression adds to the passes. Each column whose name ends in */ passes* belongs to one way of
# computing a round. It has the time of such a round, divided by the time of the bare passes:
#
# - *Round* trains one client after the other.
# - *Client threads* is the setting `client_threads`, which trains as many clients at the same time as there are cores.
# - *Side by side* computes all clients in one pass, and is made for small networks.
# - *Plain top-K* is what one would write without this package: a loop over the clients that calls `torch.topk` on all entries and keeps
#   the errors.
# - *Plain top-K, torch's layout* is the same in PyTorch's default memory layout. Our networks and images, and all other columns, use the
#   layout channels-last. So the difference between the last two columns comes from this layout, and not from our code.
#
# ## Compression against the memory
#
# Every algorithm must read the model difference of a client, read its errors and write them. This is 12 bytes per entry. On a CPU, the core
# reads each entry twice more: once to check that everything is finite, and once to compare it with the floor. This makes 20 bytes. How long
# does it take at least to move the 12 bytes that every algorithm needs? A plain copy of one row moves 8 bytes per entry, and we measure its
# time:
#
# $$t_{min} = \frac{12\,D}{\text{bandwidth}},\qquad \text{bandwidth} = \frac{8\,D}{t_{copy}}$$


# %%
def step_ways(rows):
    """Return the milliseconds per client of every way, and note the two targets."""
    table, N = 1e3 * works(rows).iloc[0], int(rows["clients"].iloc[0])
    ways = {"textbook": table["textbook"] / N, "Compressor.step": table["step"] / N}
    ways |= {f"{b} bytes per entry": b / 8 * table["copy of one row"] for b in (20, 12)}
    aim("Compressor.step, ms per client", ways["Compressor.step"], step_targets_ms[0])
    times = ways["textbook"] / ways["Compressor.step"]
    aim("time of the textbook code / Compressor.step", times, textbook_target, at_most=False)
    return ways


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def draw_step(rows):
    ways, (_, axes) = step_ways(rows), plt.subplots(figsize=(7.6, 2.6))
    axes.barh(list(ways), ways.values(), color=[lab.COLOURS[i] for i in (7, 2, 6, 6)], height=0.55)
    for y, value in enumerate(ways.values()):
        text = f"  {value:.3g} ms, {value / ways['12 bytes per entry']:.1f} × the minimum"
        axes.text(value, y, text, va="center")
    axes.invert_yaxis()
    axes.set(title=f"Compression of one client, {rows['case'].iloc[0]}", xlabel="milliseconds")
    axes.set_xlim(0, 1.5 * max(ways.values()))
    lab.show_figures()


_ = report("step", draw_step)

# %% [markdown]
# ## Codes
#
# How long does it take to encode and decode the message of one client at the paper's size? The table shows the time to quantize it, to
# encode it as bytes, and to decode it. It also shows the time for the positions of the local mask alone. The suffix `-Q5` means values of 5
# bits, and `+` means shorter codes for the same values and positions.


# %%
def tell(rows):
    display(Markdown(lab.markdown(lab.bench_table({"rows": rows.to_dict("records")}))))


def judge_codecs(rows):
    alone = 1e3 * works(rows)[["encode positions", "decode positions"]].sum(axis=1)
    aim("encode and decode positions, ms", alone["TCS"], positions_target_ms)


_ = report("codecs", tell, judge_codecs)

# %% [markdown]
# ## Growth
#
# Does the time of a step grow in proportion to the number of clients N and to the number of parameters D? On two logarithmic axes,
# proportional growth is a line of slope 1. The grey line has this slope and goes through the last point.


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def growth_panel(axes, rows, axis, other):
    part = rows[rows[other] == rows[other].mode()[0]].sort_values(axis)
    x, y = part[axis].to_numpy(float), 1e3 * part["median"].to_numpy()
    axes.plot(x, y[-1] * x / x[-1], label="in proportion", **line(7, 1))
    axes.plot(x, y, marker="o", label="measured", **line(2))
    axes.set(xscale="log", yscale="log", xlabel=f"{axis} (log)", ylabel="ms per step (log)")
    axes.set_title(f"{other}: {part[other].iloc[0]:,}")
    slope = np.polyfit(np.log(x), np.log(y), 1)[0]
    print(
        f"The time grows like {axis} to the power {slope:.2f}. In proportion, the power would be 1."
    )


def draw_growth(rows):
    rows, (_, panels) = rows[rows["work"] == "step"], plt.subplots(1, 2, figsize=(8.6, 3.2))
    growth_panel(panels[0], rows, "clients", "dimension")
    growth_panel(panels[1], rows, "dimension", "clients")
    for axis in (panels[0].xaxis, panels[0].yaxis):
        lab.plain_log(axis)
    panels[0].set_xticks(sorted(rows["clients"].unique()))
    panels[0].legend(frameon=False)
    lab.show_figures()


_ = report("growth", draw_growth)

# %% [markdown]
# The measured curves are not quite straight. Probable reasons are fixed costs, which weigh more in small models, and the processor's cache,
# into which large models do not fit.
#
# ## On a GPU
#
# These records were made on a GPU that did nothing else, with `uv run tcs bench --part paper --device cuda --precision bf16`. In the rows
# *graph*, a round is one CUDA graph (operations that were recorded once and are replayed together), in which five clients train at the same
# time. For the table of targets below, we multiply the time of such a round by the number of rounds in the paper's training. This leaves
# out evaluation, and counts the rounds of the warm-up like all others.


# %%
def judge_step(rows):
    ms = 1e3 * works(rows)["step"].item() / rows["clients"].iloc[0]
    aim("Compressor.step on a GPU, ms per client", ms, step_targets_ms[1])


def judge_gpu(rows):
    files = [lab.ROOT / f"params/{name}.yaml" for name in ("table1", "paper")]
    plans = {config.scheme.name: config for config in lab.plan(lab.read_params(files))}
    for case, ms in (1e3 * works(rows)["graph"]).items():
        run = plans[case.rpartition(", ")[2]]
        samples = run.client_count * run.batch_size * run.scheme.local_steps  # a round's
        rounds = paper_epochs * (paper_samples // samples)
        aim(f"a training on a GPU, minutes: {case}", ms * rounds / 60_000, run_target_minutes)


_ = report("round", tell, judge_gpu, gpu=True), report("step", tell, judge_step, gpu=True)

# %% [markdown]
# The targets for the GPU are missed. There, our compression of ten clients (*step*) takes longer than the textbook code. It starts more
# operations, because it also checks that all values are finite, resolves ties in the same way on every machine, and counts the bytes. It
# uses no floor on a GPU, because the host would have to wait for the number of candidates.
#
# Since these records were made, the core chooses the masks of all clients together on a GPU. A sparse round of TCS with ten clients now
# starts 286 operations instead of 392. The 392 operations included ten searches for the largest entries, which are the most expensive
# operations. Now there is only one such search. How much time this saves has not been measured yet.
#
# ## Claim
#
# We assert only what must hold on any machine. Every selection is the same as the plain one, entry for entry. The global mask of the
# training is the plain $S_{top}$ of the last update. On average, there were fewer candidates than entries in the vector.

# %%
exact = [*seen["same"], *(case["same"] for case in cases)]
assert all(exact), f"{len(exact) - sum(exact)} of {len(exact)} selections differ"
assert {case["tried"] for case in cases} == {0, 1, 2}
assert torch.equal(rule.positions, plain(update_D, rule.k_global, nothing_D))
assert seen["among"].mean() < D
print(f"All {len(exact)} selections are identical to the plain ones.")

# %% [markdown]
# ## What we saw

# %%
if targets:
    table = pd.DataFrame(targets, columns=["what was measured", "result", "target", "verdict"])
    display(Markdown(lab.markdown(table)))
met = sum(row[-1] == "**met**" for row in targets)
few = "supported" if max(typical.values()) < 5 else "contradicted"
summary = f"""
- **Supported**: the selection with a floor is exact. All {len(exact)} comparisons with the plain selection agree.
- **{few.capitalize()}**: few entries are candidates, which means that their median number is less than five times the size of the mask. For the
  global mask it is {typical["global"]:.1f} times K_global, and for a local mask {typical["local"]:.1f} times K_local.
- {f"According to the records named above, {met} of {len(targets)} targets are met" if targets else missing}.
"""
display(Markdown(summary))

# %% [markdown]
# Next: [12_real_training](12_real_training.ipynb) uses TCS in a training on several processes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Made with {lab.describe_core()} and torch {torch.__version__}, on images ({data.label}): one training, "
      f"{repeat} turns of each measurement, and {len(found)} records of results/bench.")  # fmt: skip
