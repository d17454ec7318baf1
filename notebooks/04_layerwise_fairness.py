# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Give every layer its share
#
# After this notebook you will be able to
#
# - give every layer its minimum share of a mask,
# - say which layers top-K favours, and what a minimum changes.
#
# **Claim (Sec. II-C, Tables 1 and 2).** If the mask has the K largest entries of the whole update, some layers get many entries and others
# get almost none. *Layer-wise fairness* gives every layer a minimum share. TCS-LF does so in the shared mask and in the clients' own masks,
# TCS-PLF in the shared mask only. In the paper this costs a little accuracy at η = 0.5 and gains some at η = 0.8.
#
# *Run time*: one to two minutes on two cores. *Read before*: [03_tcs](03_tcs.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The values to change stand in the cell under
# *Parameters*.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import math
import statistics
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Len
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True, "font.size": 10})

# %% [markdown]
# ## Parameters
#
# You can change any of these values and run all cells again. *Claim* and *What we saw* are computed anew. The text between the cells
# describes the results of the original values, so it may no longer fit. For example:
#
# - `seeds = 10` should make the intervals narrower.
# - `phi_min_global = 5e-3` should bring the curves of TCS-PLF and TCS-LF closer to the dotted line of an even share.
# - `learning_rates = [0.5]` should about halve the run time. Tables and pictures then show a single learning rate.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
schemes = ["TCS", "TCS-PLF", "TCS-LF"]  # also with -L<H> or -Q<q>, such as TCS-L2-LF or TCS-Q5-LF
learning_rates = [0.5, 0.8]  # eta, the paper's two
seeds = 4  # how many trials, or a list of seeds
phi_global = 1e-2  # share of the entries in the mask that all clients share
phi_local = 1e-3  # share kept by each client's own mask
phi_min_global = 1e-3  # minimum share of every layer in the global mask
phi_min_local = 4e-4  # minimum share of every layer in a local mask
profile = "ci"  # name of this size of training
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 256  # training images of all clients together
test_samples = 500  # test images
image_size = 16  # pixels per side, after averaging; None keeps the original size
model = "resnet8"  # resnet8 or resnet18
width = 16  # channels of its first stage
clients = 4  # N
batch_size = 8  # B, samples of one local step
epochs = 8  # passes over the data
warmup_epochs = 1  # dense epochs at the start
drops = [0.75]  # when eta is divided by 10, as shares of the epochs
reference_batch = None  # total batch size that the learning rates are for; None: not scaled
dirichlet_alpha = None  # class skew among clients; None: IID

# %% jupyter={"source_hidden": true} tags=["remove-input"]
params = lab.notebook_params(globals(), lab.PARAMETERS - {"device", "learning_rate"})
answer = display(Markdown("*The answer comes here when all cells have run.*"), display_id=True)
claim = lab.Statements(globals(), "04_layerwise_fairness")
some = {"learning_rates": lab.PositiveNumber, "schemes": str}
lab.check_values(globals(), **{name: Annotated[list[kind], Len(1)] for name, kind in some.items()})
params |= {"device": "cpu", "learning_rate": learning_rates[0]}
(config,) = lab.plan(params | {"schemes": ["FedAvg"], "seeds": 1})
data = lab.load_dataset(dataset).first(train_samples, test_samples).resize(image_size)
federation = lab.Training(config, data)
names = federation.flat.names
layer_sizes, dimension = federation.flat.layer_sizes, len(federation.theta_D)
sizes_L = torch.tensor(layer_sizes)
k_global, k_local = tcs.kept(phi_global, dimension), tcs.kept(phi_local, dimension)
print(f"D = {dimension:,} parameters in {len(layer_sizes)} layers (parameter tensors)")
print(f"K_global = {k_global}, K_local = {k_local}")
trials = range(seeds) if isinstance(seeds, int) else seeds
planned = 2 + len(learning_rates) * len(trials) * (1 + len(schemes))
print(lab.forecast_trainings([config] * planned))

# %% [markdown]
# ## Where the budget goes
#
# The budget of a mask is the number K of its entries. We train densely and look at the $K$ largest entries of every update. If the
# positions were spread evenly, every layer would have the same fraction $\phi_{global} = K/D$ of its entries in the mask. The actual
# fraction for layer $l$, which has $d_l$ entries, is
#
# $$\phi_l = \frac{|m \cap \text{layer } l|}{d_l}, \qquad \sum_l \phi_l\, d_l = K$$
#
# The input layers and the head, which is the last linear layer, have a very small part of the parameters.
#
# **What do you expect?** Which part of the network gets the smallest share of the budget, compared with its size?


# %%
def per_layer(mask_D):
    return torch.stack([part.sum(-1) for part in mask_D.split(layer_sizes, -1)], -1)


counts_TL = []
for epoch in range(epochs):
    for update_D in federation.rounds(epoch):
        counts_TL.append(per_layer(tcs.top_k_mask(update_D, k_global)))
top_k_L = torch.stack(counts_TL).float().mean(0)
print(
    f"on average over {len(counts_TL)} masks, {(top_k_L < 0.5).sum()} layers have less than half an entry in the mask"
)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def share_axes(title, uniform):
    axes = plt.figure(figsize=(7.6, 3.6)).subplots()
    axes.axhline(100 * uniform, color="#666666", linestyle=":", label="even share")
    axes.set(
        title=title, xlabel="layer, from the input to the output", ylabel="share of the layer (%)"
    )
    axes.set_yscale("symlog", linthresh=1e-2)
    axes.set(ylim=(-0.002, 2000), yticks=[0, 0.01, 0.1, 1, 10, 100])
    axes.set_yticklabels(["0", "0.01", "0.1", "1", "10", "100"])
    return axes


# %%
kinds = ["weights" if p.dim() > 1 else "norms, biases" for p in federation.flat.parameters]
axes = share_axes("Dense updates: share of each layer that is among the K largest", phi_global)
for i, kind in enumerate(["norms, biases", "weights"]):
    chosen = [n for n, k in enumerate(kinds) if k == kind]
    points = 100 * (top_k_L / sizes_L)[chosen]
    look = {"color": lab.COLOURS[(6, 1)[i]], "marker": "os"[i], "linestyle": ("", "-")[i]}
    axes.plot([n + 1 for n in chosen], points, label=kind, **look)
axes.legend(frameon=False, ncols=3, loc="upper center")
lab.show_figures()

# %% [markdown]
# The paper says that top-K favours the first layers. In our layers of weights, the fraction falls by orders of magnitude from the first
# convolution to the last ones, which agrees with the paper. In the last linear layer it rises again, which contradicts the paper. The peaks
# in between belong to the 1×1 convolutions of the shortcuts. The table adds up the same masks by part of the network:

# %%
blocks = [int(name.split(".")[0]) for name in names]
places = ["input" if b < 2 else "head" if b == blocks[-1] else f"block {b - 2}" for b in blocks]
table = pd.DataFrame({"part": places, "parameters": sizes_L, "kept": top_k_L})
table = table.groupby("part", sort=False).sum() / [dimension, k_global]
table.loc["head + input"] = table.loc["head"] + table.loc["input"]
shown = table.map(lambda share: f"{100 * share:.1f} %").reset_index()
display(
    Markdown(
        lab.markdown(shown.set_axis(["part", "share of parameters", "share of budget"], axis=1))
    )
)

# %% [markdown]
# The last block has about three quarters of the parameters and gets about an eighth of the budget.
#
# ## A minimum share
#
# Layer-wise fairness requires that the mask contains at least a certain fraction of the entries of every layer. This holds for the *global*
# mask, which all clients share, and with TCS-LF also for the *local* masks, which are the clients' own:
#
# $$|m_{global} \cap \text{layer } l| \ge \lceil \phi^{min}_{global}\, d_l \rceil, \qquad
# |m_{local}^n \cap \text{layer } l| \ge \lceil \phi^{min}_{local}\, d_l \rceil$$
#
# The paper prints $\phi^{max}$ in these two formulas and calls it a maximum, but two lines later and in the experiments it writes
# $\phi^{min}$. It cannot mean a maximum. The paper gives $10^{-3}$ for it. A mask with at most $10^{-3}$ of every layer cannot have
# $10^{-2}$ of all entries, as the paper's masks do. The paper does not say how to fill the rest of the mask. We keep the total at $K$:
# every layer gets its minimum first, and the rest of $K$ goes to the largest of the remaining entries.
#
# The authors' published code differs from the paper here. It chooses the fair global mask by the magnitude of the weights instead of the
# update, and the paper's results for TCS-LF and TCS-PLF may come from that code. None of our verdicts depends on this variant (`TCS-WLF`
# and `TCS-WPLF` in our code).
#
# This is the function that finds the positions of a fair mask:

# %%
lab.show_code(tcs.layerwise_top_k_positions)

# %% [markdown]
# Here is a small example with three layers and $K = 5$, in which every layer gets at least a fifth of its entries. The sign `#` marks an
# entry in the mask, and `·` an entry outside it.

# %% tags=["nbval-check-output"]
toy_sizes = [4, 6, 10]
toy = torch.tensor([9.0, 8, 7, 6, 5, 1, 1, 2, 1, 1, 0.1, 0.4, 0.2, 0.1, 0.3, 0, 0, 0, 0, 0])
for name, positions in {
    "S_top    ": tcs.top_k_positions(toy, 5),
    "with min.": tcs.layerwise_top_k_positions(toy, 5, toy_sizes, phi_min=0.2),
}.items():
    mask = tcs.positions_to_mask(positions, len(toy))
    parts = ["".join("#" if one else "·" for one in part) for part in mask.split(toy_sizes)]
    print(name, " ".join(parts), " kept:", int(mask.sum()))

# %% [markdown]
# Both masks have five entries. Plain top-K, written $S_{top}$, has none in the third layer. With the minimum, the first layer loses three
# entries, of which the second layer gets one and the third layer two.
#
# How many of the K entries do the minimum shares use up? This depends on the size of the network, because the share of a small layer is
# rounded up to a whole entry.

# %% tags=["nbval-check-output"]
with torch.device("meta"):
    models = {
        "resnet8, width 16": tcs.build_model("resnet8", 16),
        "the paper's ResNet": tcs.resnet18(),
    }
for name, network in models.items():
    sizes = [p.numel() for p in network.parameters()]
    for mask, phi, phi_min in (("global", 1e-2, 1e-3), ("local", 1e-3, 4e-4)):
        k, bound = tcs.kept(phi, sum(sizes)), sum(tcs.kept(phi_min, size) for size in sizes)
        print(
            f"{name:18s} {mask:6s} mask: the minimum shares use {bound:6,d} of K = {k:7,d} entries, {bound / k:.0%}"
        )

# %% [markdown]
# Most of the global mask remains free, both in our network and in the paper's. The local masks are different. With TCS-LF, the minimum
# shares use a large part of a client's own entries, and in a small network they use most of them.
#
# ## What it changes in the masks
#
# The function `watch` trains one scheme. In its first epoch everything is sent; the later rounds are *sparse*. For every sparse round it
# counts how many entries of each layer are in the global mask, and how many the clients have *explored*, which means that they were sent
# although they are outside the global mask.


# %%
def federation_of(name, eta, seed, **changes):
    (config,) = lab.plan(params | {"schemes": [name], "seeds": [seed], "learning_rate": eta})
    scheme = dataclasses.replace(config.scheme, **changes)
    return lab.Training(dataclasses.replace(config, scheme=scheme), data)


def moves(start_D, end_D):
    """How far each layer is from where it started."""
    return torch.stack([part.norm() for part in (end_D - start_D).split(layer_sizes)])


MASK, EXPLORED = 0, 1  # second axis of what `watch` counts in every sparse round


def watch(federation):
    counts, mask_D = [], torch.zeros(dimension, dtype=torch.bool)
    start_D = federation.theta_D.clone()
    for epoch in lab.follow(range(epochs), "epochs"):
        for update_D in federation.rounds(epoch):
            counts.append(per_layer(torch.stack([mask_D, (update_D != 0) & ~mask_D])))
            mask_D = tcs.positions_to_mask(federation.compressor.rule.positions, dimension)
    sparse = torch.stack(counts)[max(1, warmup_epochs * federation.rounds_per_epoch) :]
    return sparse, moves(start_D, federation.theta_D), 100 * federation.evaluate()["accuracy"]


# %%
first = learning_rates[0], trials[0]
runs = {(name, first[0]): [watch(federation_of(name, *first))] for name in schemes}
seen = {name: runs[name, first[0]][0][0] for name in schemes}


# %%
def look(i):
    return lab.curve_style(schemes[i], schemes) | {"markersize": 4, "label": schemes[i]}


def draw(which, uniform, title):
    axes = share_axes(title, uniform)
    for i, name in enumerate(schemes):
        shares = 100 * seen[name][:, which].float().mean(0) / sizes_L
        axes.plot(range(1, len(names) + 1), shares, **look(i))
    axes.legend(frameon=False, ncols=4, loc="upper center")
    lab.show_figures()


# %%
draw(MASK, phi_global, "Global mask: share of each layer, mean over rounds")

# %%
title = "Explored by all clients together: share of each layer, mean over rounds"
draw(EXPLORED, clients * phi_local, title)

# %%
for n in schemes:
    empty, unexplored = [float((seen[n][:, i] == 0).float().mean()) for i in (MASK, EXPLORED)]
    print(
        f"{n:8s} in an average round, {empty:4.0%} of the layers have no entry in the mask, and in {unexplored:4.0%} no entry is explored"
    )

# %%
no_errors = watch(federation_of(schemes[0], *first, error_accumulation=False))
drawn = {"dense updates": top_k_L[None]} | {n: seen[n][:, MASK] for n in schemes}
drawn |= {f"{schemes[0]}, no error accumulation": no_errors[0][:, MASK]}
ends = torch.tensor([place in ("input", "head") for place in places])
at_ends = {n: float(counts[:, ends].sum() / counts.sum()) for n, counts in drawn.items()}
for n, share in at_ends.items():
    print(f"{n:26s} input and head have {share:.0%} of the K entries in the mask")

# %% [markdown]
# We notice two things. First, the minimum works: no layer is left out of the global mask. (The local masks of TCS-LF still miss a layer now
# and then, namely a small layer whose entries are all in the global mask already.) But the layers that gain most are the smallest ones. The
# high points in the zigzag are norms and biases. In these layers, a single entry is already more than an even share. With TCS-LF, each
# client adds one entry of its own to each of them. The largest convolutions gain, too, because their minimum is more than they had. The
# mask as a whole does not become larger, so what these layers gain, other convolutions lose.
#
# Second, TCS without any minimum distributes the entries more evenly than top-K of dense updates does: input and head have fewer of them
# (one seed). Without error accumulation, TCS does not do so. In the layers that are left out, errors accumulate until they are large enough
# to be sent. So error accumulation is a kind of fairness too.
#
# ## Does it help the layer that is starved?
#
# We fixed which layer we look at, and what counts as help, before these trainings. The layer is the one whose weights have the smallest
# fraction of entries in the masks of dense training; we call it *starved*. The measure is how far training moves this layer, relative to
# dense training with the same seed:
#
# $$\lVert\theta_T-\theta_0\rVert_{\text{layer}}\;/\;
# \lVert\theta_T-\theta_0\rVert_{\text{layer, dense}}$$
#
# Runs with the same seed start from the same weights and see the samples in the same order, so we compare them in pairs. The table below
# shows the mean difference from TCS over the seeds, in percentage points and with a 95 % confidence interval (Student's t). It shows the
# accuracy as well. (We chose this measure because in earlier trials, with other seeds, accuracy after so few rounds was mostly noise.)
#
# **What do you expect?** Does a minimum for every layer change the accuracy, too?

# %%
steps = tcs.Scheme.named(schemes[0]).local_steps
dense = f"FedAvg-L{steps}" if steps > 1 else "FedAvg"


def dense_moves(eta, seed):
    federation = federation_of(dense, eta, seed)
    start_D = federation.theta_D.clone()
    for epoch in lab.follow(range(epochs), "epochs"):
        for _ in federation.rounds(epoch):
            pass
    return moves(start_D, federation.theta_D)


relative = {}  # per scheme and rate: a row per seed, how far each layer moved, dense training = 1
for eta in learning_rates:
    dense_SL = torch.stack([dense_moves(eta, seed) for seed in trials])
    for name in schemes:
        there = runs.setdefault((name, eta), [])
        there += [watch(federation_of(name, eta, seed)) for seed in trials[len(there) :]]
        relative[name, eta] = torch.stack([run[1] for run in there]) / dense_SL

# %% jupyter={"source_hidden": true} tags=["remove-input"]
weights = [n for n, kind in enumerate(kinds) if kind == "weights"]
starved = min(weights, key=lambda n: float(top_k_L[n] / sizes_L[n]))
paper = {("TCS", 0.5): 92.44, ("TCS-PLF", 0.5): 92.142, ("TCS-LF", 0.5): 92.115}
paper |= {("TCS", 0.8): 92.094, ("TCS-PLF", 0.8): 92.442, ("TCS-LF", 0.8): 92.481}


def gain(name, eta):
    """The difference in accuracy from the first scheme, in points."""
    return lab.paired_gain(*([run[2] for run in runs[n, eta]] for n in (name, schemes[0])))


def change(name, eta):
    """The difference from the first scheme in how far the starved layer moves, in % of dense."""
    sides = [100 * relative[n, eta][:, starved] for n in (name, schemes[0])]
    return lab.paired_gain(*(side.tolist() for side in sides))


def with_half(number, half, digits=0):
    shown = f"{number:+.{digits}f}" + (f" ± {half:.{digits}f}" if half < math.inf else "")
    return shown.replace("-", "−")


# %%
rows = []
for name, eta in runs:
    moved = f"{100 * relative[name, eta][:, starved].mean():.0f}"
    accuracy = f"{statistics.mean(run[2] for run in runs[name, eta]):.1f}"
    row = [name, f"{eta:g}", moved, "–", accuracy, "–", "–"]
    if name != schemes[0]:
        theirs = paper.get((name, eta), math.nan) - paper.get((schemes[0], eta), math.nan)
        row[3], row[5] = with_half(*change(name, eta)), with_half(*gain(name, eta), 1)
        row[6] = f"{theirs:+.2f}".replace("-", "−")
    rows.append(row)
head = ["scheme", "η", "starved layer moves, % of dense training", f"difference from {schemes[0]}, points",
        "accuracy, %", f"difference in accuracy from {schemes[0]}, points", "the same difference in the paper, points"]  # fmt: skip
print(
    f"the starved layer is number {starved + 1} ({names[starved]}), with {sizes_L[starved]:,} weights; n = {len(trials)} seeds"
)
display(Markdown(lab.markdown(pd.DataFrame(rows, columns=head))))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
figure = plt.figure(figsize=(7.6, 3.4))
panels = figure.subplots(1, len(learning_rates), sharey=True, squeeze=False)[0]
for axes, eta in zip(panels, learning_rates, strict=True):
    for i, name in enumerate(schemes):
        ends = [lab.mean_interval((100 * one).tolist()) for one in relative[name, eta].T[weights]]
        mean, _, high = torch.tensor(ends).T
        place = [n + 1 + 0.25 * (i - 1) for n in range(len(weights))]
        style = look(i) | {"linestyle": "", "capsize": 2}
        axes.errorbar(place, mean, yerr=(high - mean).nan_to_num(), **style)
    axes.axvspan(*(weights.index(starved) + 1 + 0.45 * side for side in (-1, 1)), color="#dddddd")
    axes.axhline(100, color="#666666", linestyle=":")
    axes.set(title=f"η = {eta:g}", xlabel="layer of weights, input to output")
panels[0].set_ylabel("moved, % of dense")
panels[0].legend(frameon=False)
lab.show_figures()

# %% [markdown]
# The grey band marks the starved layer, which is the seventh layer of weights. The bars are 95 % confidence intervals over the seeds. By
# this measure TCS does not starve this layer. A likely reason is that accumulated errors move it. We do not know why it moves less with
# TCS-LF. According to the figures above, this layer does not have fewer entries in the mask with TCS-LF than with TCS, and not fewer of its
# entries are explored.
#
# ## Claim
#
# We check these statements about the global mask. In every round, the mask has K entries, and with TCS-PLF and TCS-LF every layer has its
# minimum (checked in the first run of each). With TCS some layers have no entry. We call top-K uneven if the fraction of the most favoured
# layer of weights is more than 10 times that of the least favoured one. We report accuracy, but check no statement about it.

# %%
minimum_L = torch.tensor([tcs.kept(phi_min_global, size) for size in layer_sizes])
fits = int(minimum_L.sum()) <= k_global  # else the K largest of the minimum shares win
for name in schemes:
    masks_TL = seen[name][:, MASK]
    whole = bool((masks_TL.sum(1) == k_global).all())
    claim(f"{name}: the global mask has K entries", whole, f"{k_global}")
    if name.endswith("LF"):
        ok = bool((masks_TL >= minimum_L).all()) if fits else None
        claim(f"{name}: every layer has its minimum", ok, f"{len(masks_TL)} rounds")
empty = float((seen[schemes[0]][:, MASK] == 0).float().mean())
claim(
    "TCS leaves some layers without an entry",
    empty > 0 if schemes[0] == "TCS" else None,
    f"{empty:.0%} of the layers in an average round",
)
least, most = (top_k_L / sizes_L)[weights].min(), (top_k_L / sizes_L)[weights].max()
claim("top-K of dense updates prefers some layers more than tenfold over others", bool(most > 10 * least),
      f"{least:.3%} to {most:.0%} of a layer's weights")  # fmt: skip

# %% [markdown]
# ## Exercises
#
# Replace each `return None` by your own lines. Each cell then compares your function with the one in `tcs_core.py`.
#
# **1. Free entries.** Every layer gets its minimum share, which is the fraction `phi_min` of its own size, rounded up to whole entries. How
# many of the K entries remain, to be chosen by magnitude? (If the minimum shares alone exceed K, none remain.)
#
# <details><summary>Hint</summary>
#
# The minimum is a fraction of the layer's size, not of K. Round up in each layer before you add.
#
# </details>


# %%
def free_places(layer_sizes, k, phi_min):
    return None  # yours


lab.check_exercise("free_places", free_places)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def free_places(layer_sizes, k, phi_min):
#     bound = sum(math.ceil(phi_min * size) for size in layer_sizes)
#     return max(0, k - bound)
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
def free_places(layer_sizes, k, phi_min):
    bound = sum(math.ceil(phi_min * size) for size in layer_sizes)
    return max(0, k - bound)


assert lab.teaching.judge_solution("free_places", free_places) == "right"

# %% [markdown]
# **2. Fair top-K.** Return the positions in ascending order, counted from 0. The minimum of a layer is `tcs.kept(phi_min, size)`, the
# number of its entries times `phi_min`, rounded up. First take this many of the largest entries of every layer. Then take the largest of
# all other entries, until there are k in all. In this exercise the minimum shares always fit into k. The function
# `tcs.top_k_positions(vector, k, excluded)` is $S_{top}$. Entries in `excluded`, a tensor of positions (int64) or of booleans (D,), are
# never chosen.
#
# <details><summary>Hint</summary>
#
# $S_{top}$ of one layer counts positions from the start of that layer. Add the number of entries in all layers before it.
#
# </details>


# %%
def fair_top_k(vector_D, k, layer_sizes, phi_min):
    return None  # yours


lab.check_exercise("fair_top_k", fair_top_k)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def fair_top_k(vector_D, k, layer_sizes, phi_min):
#     shares, start = [], 0
#     for size in layer_sizes:
#         layer_D = vector_D[start : start + size]
#         shares.append(start + tcs.top_k_positions(layer_D, tcs.kept(phi_min, size)))
#         start += size
#     fair_K = torch.cat(shares)
#     rest_K = tcs.top_k_positions(vector_D, k - len(fair_K), fair_K)
#     return torch.cat([fair_K, rest_K]).sort().values
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
def fair_top_k(vector_D, k, layer_sizes, phi_min):
    shares, start = [], 0
    for size in layer_sizes:
        layer_D = vector_D[start : start + size]
        shares.append(start + tcs.top_k_positions(layer_D, tcs.kept(phi_min, size)))
        start += size
    fair_K = torch.cat(shares)
    rest_K = tcs.top_k_positions(vector_D, k - len(fair_K), fair_K)
    return torch.cat([fair_K, rest_K]).sort().values


assert lab.teaching.judge_solution("fair_top_k", fair_top_k) == "right"

# %% [markdown]
# ## What we saw


# %%
def said(name, eta):
    points, half = gain(name, eta)
    layer, layer_half = change(name, eta)
    word = lab.judge_mean(layer, layer_half)
    theirs = f"{paper[name, eta] - paper[schemes[0], eta]:+.2f}".replace("-", "−")
    return f"""{name} at η = {eta:g}: compared with {schemes[0]}, the distance changes by {with_half(layer, layer_half)} percentage points ({word}).
      Accuracy changes by {with_half(points, half, 1)} points
      (in the paper {theirs})."""


# %%
compared = [key for key in runs if key in paper and key[0] != schemes[0] and schemes[0] == "TCS"]


def share_kept(layers):
    """Of the entries of these layers, the share among the K largest."""
    return float(top_k_L[layers].sum() / sizes_L[layers].sum())


body = [n for n in weights if places[n].startswith("block")]
halves = [share_kept(half) for half in (body[: len(body) // 2], body[len(body) // 2 :])]
last, first_of_body = share_kept(weights[-1:]), share_kept(body[:1])
print(f"The body is all layers between input and head. The K largest entries in dense training contain {halves[0]:.2%} of the weights of its earlier half,\n"
      f"{halves[1]:.2%} of its later half, {first_of_body:.1%} of its first convolution, and {last:.1%} of the last layer.")  # fmt: skip
explored_L = seen[schemes[0]][:, EXPLORED].float().mean(0) / sizes_L
kept_errors, forgot = at_ends[schemes[0]], at_ends[f"{schemes[0]}, no error accumulation"]
fewest, largest = [float(x) for x in (explored_L[weights].min(), explored_L[weights].max())]
for says, ok in {
    "a smaller fraction of the body's later half than of its earlier half is in the mask": halves[1]
    < halves[0],
    "a smaller fraction of the last layer than of the body's first convolution is in the mask": last
    < first_of_body,
    "TCS explores some layers more than ten times as much as others": largest > 10 * fewest,
}.items():
    claim.judge(says, "supported" if ok else "contradicted")
for name, eta in compared:
    claim.judge(
        f"{name} moves the starved layer farther than {schemes[0]} at η = {eta:g}",
        lab.judge_mean(*change(name, eta)),
    )
evener = kept_errors < min(forgot, at_ends["dense updates"])
often = len(seen[schemes[0]]) * k_global / dimension
helped = "\n".join(f"    - {said(*key)}" for key in compared)
display(Markdown("- " + claim.summary("**{}**").replace("\n", "\n- ") + f"""
- Head and input get {table.loc["head + input", "kept"]:.0%} of top-K's budget but have only
  {table.loc["head + input", "parameters"]:.1%} of the parameters.
- The paper says that later layers get a smaller share. This is **{"supported" if halves[1] < halves[0] else "contradicted"}** for the two halves of the body,
  **{"supported" if last < first_of_body else "contradicted"}** for the last layer against the body's first convolution.
- Our trainings are short: in all rounds together, an average entry is in the shared mask {often:.1f} times, and in the paper's training more than 200 times.
- The starved layer is number {starved + 1}, with {sizes_L[starved] / dimension:.0%} of the parameters. We measure how far training moves it,
  in % of dense training (n = {len(trials)} seeds, 95 % intervals). The word in brackets judges the statement that a minimum moves it farther: *open* means that
  the interval contains 0.
{helped}
- What surprised us: error accumulation {"makes the shares of the layers more even" if evener else "does not make the shares of the layers more even here"}. Input and head have
  {at_ends["dense updates"]:.0%} of the K largest entries in dense training, {kept_errors:.0%} with {schemes[0]}, and {forgot:.0%} with {schemes[0]} without error
  accumulation (one seed).
"""))  # fmt: skip
moved = {n: 100 * float(relative[n, learning_rates[0]][:, starved].mean()) for n in schemes}
empty_weights = float((seen[schemes[0]][:, MASK][:, weights] == 0).float().mean())
left_out = float((seen[schemes[-1]][:, MASK] == 0).float().mean())
words = {n: lab.judge_mean(*change(n, learning_rates[0])) for n in schemes[1:]}
answer.update(Markdown(f"""**In short.** The input layers and the last layer have {table.loc["head + input", "parameters"]:.1%} of the parameters, but get
{table.loc["head + input", "kept"]:.0%} of the entries that top-K chooses. (By a layer we mean a parameter tensor.) In an average round of {schemes[0]}, {empty:.0%} of the layers have no entry in the
shared mask. Most of these are norms and biases. (Of the weights of convolutions and of the last layer, {empty_weights:.0%} have none.) With {schemes[-1]}, {"every layer has an entry" if left_out == 0 else f"{left_out:.0%} have none"}. We then looked at the
layer of weights with the smallest share, and measured how far training moves it, in percent of the distance in dense training: {", ".join(f"{share:.0f} % with {name}" for name, share in moved.items())}
(η = {learning_rates[0]:g}, n = {len(trials)} seeds). The statement that a minimum share moves this layer farther is {" and ".join(f"**{word}** for {name}" for name, word in words.items())}.{" (*Open* means that the 95 % interval contains 0.)" if "open" in words.values() else ""}
"""))  # fmt: skip

# %% [markdown]
# Longer runs with more seeds give more evidence. Set `seeds = 10` and `train_samples = 2000` here, or look at the larger trainings in
# Tables 1 and 2 ([08_tables_and_curves](08_tables_and_curves.ipynb)). Next, [05_global_momentum](05_global_momentum.ipynb) adds momentum.

# %%
print(
    f"Made with {lab.describe_core()} and torch {torch.__version__}, on images ({data.label}). Each scheme has n = {len(trials)} seeds."
)
