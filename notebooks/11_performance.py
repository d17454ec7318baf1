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
# **In short.** Almost all of the time of a round goes into the *passes*, which are the forward and backward computations of the network. We
# measured this with the paper's ResNet-18 on two CPU cores. Choosing and compressing what is sent added 1.3 % to the passes. A whole round
# of TCS took 1.07 times as long as its passes alone. A round of a plain loop with top-K, written without this package, took 1.16 times as
# long.
#
# On this CPU, our code (`tcs_core.py`, below called the *core*) compressed the update of one client in 21.6 ms. Code written as in a
# textbook took 12.9 times as long. On a GPU it is the other way round: the textbook code compressed ten clients in 6.906 ms, and the core
# needed 8.811 ms.
#
# The first figure shows how much longer a round takes than its passes, for the paper's network and for smaller ones.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import re
import tempfile

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
clients = 10  # N in the small measurement of compression
batch_size = 8  # B in the small measurement of a round, samples of one local step
step_dimension = 300_000  # D of the small measurement of compression
round_width = 8  # channels of the net in the small measurement of a round
repeat = 3  # turns of the small measurements
records = None  # folder that holds bench/*.json; None: results/

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
counts = ("clients", "batch_size", "step_dimension", "round_width", "repeat")
lab.check_values(globals(), **dict.fromkeys(counts, lab.WholeNumber))
found = list(lab.find_records(lab.studies.bench.BenchRun, records).values())
found.sort(key=lambda record: record["provenance"]["finished"], reverse=True)


def stated(record):
    """Say where, with what and when a record was made."""
    made = record["provenance"]
    commit = (made["commit"] or "no commit")[:10] + ("+" if made["dirty"] else "")
    words = (
        f"Measured on {made['device']} with {made['cores']} core(s) and {made['threads']} thread(s)"
    )
    return f"{words}, in {made['precision']}, with torch {made['torch']}, at commit {commit} on {made['finished'][:10]}."


def report(part, *tell, gpu=False):
    """Call the functions `tell` with the rows of one part, from the newest record of a CPU or a GPU."""
    for record in found:
        rows = [row for row in record["rows"] if row["part"] == part]
        device = re.search("NVIDIA|Tesla|GeForce|Instinct|Radeon", record["provenance"]["device"])
        if rows and bool(device) == gpu:
            print(stated(record))
            table = pd.DataFrame(rows).drop_duplicates(["case", "work"])
            return [one(table) for one in tell]
    print(f"There is no record yet. To make one, run: uv run tcs bench --part {part}")


def works(rows, value="median"):
    """Return a table with one row per case and one column per work."""
    return rows.pivot(index="case", columns="work", values=value).reindex(rows["case"].unique())


# %% [markdown]
# ## Where the time of a round goes


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def costs(rows):
    """Return what a round adds to its passes, in % of them, and its quartiles: one row per case."""
    table, low, high = (works(rows, value) for value in ("median", "low", "high"))
    parts = table[["augmentation", "compression"]].copy()
    parts["rest"] = table["round"] - table["passes"] - parts.sum(axis=1)
    parts = 100 * parts.div(table["passes"], axis=0)
    for name, whole in (("round", table), ("low", low), ("high", high)):
        parts[name] = 100 * (whole["round"] / table["passes"] - 1)
    return parts.assign(seconds=table["round"])


def draw_round(rows):
    parts, edge = costs(rows), 0
    figure, axes = plt.subplots(figsize=(8.6, 1.4 + 0.55 * len(parts)))
    for name, i in (("augmentation", 5), ("compression", 2), ("rest", 6)):
        size = parts[name].clip(lower=0).to_numpy()  # a negative rest is left out
        axes.barh(parts.index, size, left=edge, color=lab.COLOURS[i], label=name, height=0.5)
        edge = edge + size
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


def tell_round(rows):
    parts, times = costs(rows), works(rows)
    table = parts[["compression"]].map("{:+.1f} %".format).reset_index()
    table["seconds per round"] = parts["seconds"].map(lab.format_number).to_numpy()
    for way in [w for w in ("round", "client threads", "plain top-K") if w in times]:
        ratios = times[way] / times["passes"]
        table[f"{way} / passes"] = [f"{r:.2f}".replace("nan", "") for r in ratios]
    display(Markdown(lab.markdown(table)))


_ = report("round", draw_round, tell_round)

# %% [markdown]
# A round consists of passes, *augmentation* (random crops and flips of the images), *compression* and a *rest*. We measure the first three
# by themselves. The rest is what remains of the round:
#
# $$\text{rest} = \text{round} - \text{passes} - \text{augmentation} - \text{compression}$$
#
# In the name of a case, *width* is the number of channels of the first stage, N is the number of clients, and B the number of samples in a
# batch. Sizes such as *8 x 8* are those of the images.
#
# The column *compression* says how much compression adds to the passes. Each column whose name ends in */ passes* belongs to one way of
# computing a round. It has the time of such a round, divided by the time of the bare passes:
#
# - *Round* trains one client after the other.
# - *Client threads* is the setting `client_threads`, which trains as many clients at the same time as there are cores. It was not measured
#   for the small networks.
# - *Plain top-K* is what one would write without this package: a loop over the clients that calls `torch.topk` on all entries and keeps
#   the errors.
#
# These are stored measurements from `results/bench/`. The machine had no other work that we know of, and the quartiles tell how much its
# times varied. The notebook shows the newest record from a CPU (or a GPU, where the text says so) that contains the measurement. Since
# these records were made, we have changed how the core chooses masks, and have not repeated them. You can make a record of your own with
# `uv run tcs bench`, which takes minutes to tens of minutes.
#
# **Claim (ours).** TCS keeps the K largest entries of an update. We call the magnitude of the K-th largest entry the *threshold*. A sample
# of a few thousand entries is enough to estimate it, and the result of the selection is exact all the same. On a CPU, a federated round of
# a large network then costs little more than its passes. If the number of clients or of parameters doubles, the compression takes at most
# about twice as long.
#
# *Run time*: less than a minute. *Read before*: [03_tcs](03_tcs.ipynb) for masks, errors and Algorithm 2.
#
# The grey bars are folded code cells: click one to open it. The second one holds the settings of the section *A small measurement*, which
# runs here. You can change them and run all cells again; the text describes the results for the values given here. For example:
#
# - `step_dimension = 3_000_000` should make the compression in the small measurement take about ten times as long.
# - With `clients = 2`, it should take about a quarter of the time.
# - With `round_width = 16`, the passes take longer, and compression should be a smaller part of a round.
#
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
    """Return the milliseconds per client of every way."""
    table, N = 1e3 * works(rows).iloc[0], int(rows["clients"].iloc[0])
    ways = {"textbook": table["textbook"] / N, "Compressor.step": table["step"] / N}
    ways |= {f"{b} bytes per entry": b / 8 * table["copy of one row"] for b in (20, 12)}
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
    axes.set_xlim(0, 1.65 * max(ways.values()))
    lab.show_figures()
    core = ways["Compressor.step"]
    print(f"The core compresses the update of one client in {core:.1f} ms. "
          f"The textbook code takes {ways['textbook'] / core:.1f} times as long.")  # fmt: skip


_ = report("step", draw_step)

# %% [markdown]
# *Textbook* is the algorithm as one would first write it down: clone the vector, call `topk`, and multiply by masks. It is much slower on a
# CPU, because it looks at all entries several times.
#
# Does the time of compression grow in proportion to the number of clients and of parameters? We fit a power to times that were measured for
# several numbers. In proportion, the power would be 1. The last line is about messages: how long it takes to encode and decode one.


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def tell_growth(rows):
    rows = rows[rows["work"] == "step"]
    for axis, other in (("clients", "dimension"), ("dimension", "clients")):
        part = rows[rows[other] == rows[other].mode()[0]]
        slope = np.polyfit(np.log(part[axis]), np.log(part["median"]), 1)[0]
        words = {"clients": "clients", "dimension": "parameters"}[axis]
        print(f"If the number of {words} doubles, compression takes {2**slope:.2f} times as long (power {slope:.2f}).")  # fmt: skip


def tell_codecs(rows):
    ms = 1e3 * works(rows).loc["TCS-Q5"]
    print(f"A message of TCS-Q5 at the paper's size is encoded as bytes in {ms['encode']:.1f} ms, "
          f"and decoded in {ms['decode']:.1f} ms.")  # fmt: skip


_ = report("growth", tell_growth), report("codecs", tell_codecs)

# %% [markdown]
# ## A small measurement
#
# How long does compression take, and how long does a whole round take? We measure several implementations in one process. They take turns,
# and the first turn does not count. These are the functions behind `uv run tcs bench`, at small sizes:

# %%
lab.studies.BENCHES["small"] = [
    lambda b: lab.bench_step(b, step_dimension, clients),
    lambda b: lab.bench_round(b, "TCS", "resnet8", round_width, batch_size),
]
with tempfile.TemporaryDirectory() as folder:
    made_here = lab.run_benches(["small"], repeat, "cpu", threads=1, results=folder)
display(Markdown(lab.markdown(lab.bench_table(made_here))))
print(stated(made_here))

# %% [markdown]
# The rows with *step* in their name belong to the compression of N clients with D parameters each. *Step* is the compression by our core.
# *Change* only prepares new input, and *copy of one row* copies the numbers of one client.
#
# The rows *round* belong to a whole round, and have the names of the first table. There are two more ways: *Side by side* computes all
# clients in one pass, and is made for small networks. *Torch's layout* is PyTorch's default memory layout. Our networks and images, and all
# other rows, use the layout channels-last. Nothing is asserted here, because speed depends on the machine.
#
# These networks are small. At the paper's size, the compression is a smaller part of a round, and the textbook code loses more time.
#
# ## On a GPU
#
# These records were made on a GPU that did nothing else, with `uv run tcs bench --part paper --device cuda --precision bf16`. In the rows
# *graph*, a round is one CUDA graph (operations that were recorded once and are replayed together), in which five clients train at the same
# time.


# %%
def tell(rows):
    display(Markdown(lab.markdown(lab.bench_table({"rows": rows.to_dict("records")}))))


_ = report("round", tell, gpu=True), report("step", tell, gpu=True)

# %% [markdown]
# Here, our compression of ten clients (*step*) takes longer than the textbook code. It starts more operations, because it also checks that
# all values are finite, resolves ties in the same way on every machine, and counts the bytes. It uses no floor on a GPU, because the host
# would have to wait for the number of candidates.
#
# ## What we saw
#
# - The time of a round goes into the passes. On a CPU and with a large network, everything that the federation adds is a few percent of
#   them. In the smallest networks it is more.
# - On a CPU, compression takes several times as long as the memory alone would allow, but the textbook code takes much longer. The time
#   grows about in proportion to the numbers of clients and of parameters.
# - On a GPU, the textbook code is faster.
#
# All of this was measured on one machine of each kind. Next: [12_real_training](12_real_training.ipynb) uses TCS in a training on several
# processes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Made with {lab.describe_core()} and torch {torch.__version__}: "
      f"{repeat} turns of each small measurement, and {len(found)} records of results/bench.")  # fmt: skip
