# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Send only the largest entries: top-K against rand-K
#
# After this notebook you will be able to
#
# - choose the K entries of largest magnitude (the paper's $S_{top}$), and save what is left out for later rounds,
# - say what top-K costs: it must send positions, and the server's message becomes large.
#
# **Claim (Sec. I-B, I-C and II-B, Fig. 2).** *Top-K* sends the K entries of largest magnitude, *rand-K* sends K entries drawn at random.
# With the same number of entries, top-K keeps far more of an update, and *error accumulation*, which keeps the rest for later rounds, recovers what it leaves out. But top-K has two
# costs. If 1 % of the entries are sent, a position takes more bits than a quantized value does. And the clients' choices agree only in
# part, so the message that the server sends back contains many more entries than a client's.
#
# *Run time*: about half a minute on two cores of an AMD EPYC. *Read before*: [01_fedavg](01_fedavg.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The second grey bar hides the parameters. Change
# them there and run all cells again. For example:
#
# - `phi = 0.1` should bring rand-K closer to top-K, because both then send ten times as many entries.
# - `federation_sizes = [1, 50]` should make the server's message larger still. In our trial, it had about half as many entries as its
#   bound allows.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import math
from typing import Annotated

import matplotlib.pyplot as plt
import tcs_lab as lab
import torch
from annotated_types import Le, Len
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
profile = "ci"  # folder under results/ for the figure
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 1000  # training images of all clients together
test_samples = 1000  # test images
image_size = 16  # pixels per side, after averaging; None keeps the original size
model = "resnet8"  # resnet8 or resnet18
width = 8  # channels of its first stage
clients = 4  # N
batch_size = 8  # B, samples of one local step
epochs = 5  # passes over the data, the first one dense
learning_rate = 0.3  # eta after the warm-up
reference_batch = None  # total batch size that learning_rate is for; None: not scaled
drops = [0.75]  # when eta is divided by 10, as shares of the epochs
phi = 0.01  # share of the entries kept, by top-K and rand-K
local_steps = 1  # H
drawn_clients = 4  # clients in Fig. 2
drawn_entries = 16  # entries of each client's update in Fig. 2
drawn_k = 2  # K in Fig. 2
federation_sizes = [1, 2, 5, 10, 20]  # N in the section on the downlink
samples_each = 48  # training images of one client in that section
seed = 0  # of all random numbers

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fields = lab.notebook_params(globals(), lab.RUN_KEYS - {"device"})
answer = display(Markdown("*The answer comes here when all cells have run.*"), display_id=True)
claim = lab.Statements(globals(), "02_sparsification")
counts = dict.fromkeys(
    ("drawn_clients", "drawn_entries", "drawn_k", "samples_each"), lab.WholeNumber
)
sizes = {"federation_sizes": Annotated[list[lab.WholeNumber], Len(1)], "seed": lab.Seed}
lab.check_values(globals(), phi=lab.Fraction, **counts, **sizes)
lab.check_values(globals(), drawn_k=Annotated[int, Le(drawn_entries)])
fields |= {"seed": seed, "device": "cpu"}
everything = lab.load_dataset(dataset).resize(image_size)
data = everything.first(train_samples, test_samples)
base = lab.RunConfig(scheme="FedAvg", **fields)
print(f"N = {clients} clients, {data.label} images, sending {phi:.1%} of the entries")
print(lab.forecast_trainings([base] * 5))  # one in a moment, and four further down

# %% [markdown]
# ## A training that sends everything
#
# The first sections below look at updates from real training, so we begin with one. It is federated averaging, as in
# [01_fedavg](01_fedavg.ipynb): in every round, each client sends all D entries of its model difference Δθ. (We also record which entries of
# θ the server changes after the first epoch. A later section needs this.)


# %%
def train(scheme):
    federation = lab.Training(dataclasses.replace(base, scheme=scheme), data, keep_deltas=True)
    accuracy = []
    moved_D = torch.zeros(len(federation.theta_D), dtype=torch.bool)
    for epoch in lab.follow(range(epochs), "epochs"):
        for update_D in federation.rounds(epoch):
            if epoch >= federation.config.warmup:
                moved_D |= update_D != 0
        accuracy.append(100 * federation.evaluate()["accuracy"])
    moved = float(moved_D.float().mean())
    return {"federation": federation, "accuracy": accuracy, "moved": moved}


steps = {"local_steps": local_steps}
runs = {"everything sent": train(tcs.Scheme.named("FedAvg", **steps))}

# %%
federation = runs["everything sent"]["federation"]
deltas_ND = federation.deltas_ND  # every client's model difference in the last round, (N, D)
N, D = deltas_ND.shape
K = tcs.kept(phi, D)
print(f"D = {D:,} parameters; {phi:.1%} of them are K = {K} entries")

# %% [markdown]
# ## What a mask does
#
# A mask m is a vector of zeros and ones. It says which entries are sent, and φ is the fraction of ones. Note that φ is the fraction that is
# *kept*: φ = 0.01 keeps one percent.
#
# $$\tilde{\Delta} = m\otimes\Delta\theta,\qquad \phi=\frac{\lVert m\rVert_1}{D}\quad(\text{Eq. 4}),
# \qquad K=\lceil\phi D\rceil$$
#
# The sign ⊗ stands for multiplication entry by entry, and $\tilde{\Delta}$ is what is sent.
#
# With *top-K*, each client chooses its own K entries of largest magnitude. The mask of these entries is called $S_{top}(\Delta\theta, K)$.
# The client must tell the server their positions. With *rand-K*, all clients draw the same K positions, anew in every round, from a common
# seed, so no positions need to be sent. The next figure is made like the paper's Fig. 2, from our own training. It shows both methods on the first 16 entries of
# the output layer, with K = 2 so that something can be seen, in the last round of the training without compression.


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def draw_row(axes, row, values, kept):
    scale, place = float(values.abs().max()), (0, len(values), row + 0.9, row + 0.1)
    strength = 0.35 + 0.65 * kept[None].float()
    look = {"cmap": "PuOr", "vmin": -scale, "vmax": scale, "alpha": strength, "aspect": "auto"}
    axes.imshow(values[None], extent=place, **look)
    for i, value in enumerate(values.tolist()):
        line = {"linewidth": 2.2 if kept[i] else 0.3, "zorder": 3 if kept[i] else 2}
        axes.add_patch(plt.Rectangle((i, row + 0.1), 1, 0.8, fill=False, **line))
        text, colour = "+" if value > 0 else "–", "w" if abs(value) > 0.6 * scale else "k"
        centre = {"ha": "center", "va": "center", "weight": "bold"}
        axes.text(i + 0.5, row + 0.5, text if kept[i] else "", color=colour, **centre)


def draw_panel(axes, vectors, masks, title):
    average, count = (vectors * masks).mean(0), len(vectors)
    for row, (vector, mask) in enumerate(zip(vectors, masks, strict=True)):
        draw_row(axes, row, vector, mask)
    draw_row(axes, count + 0.4, average, average != 0)
    rows = [row + 0.5 for row in range(count)] + [count + 0.9]
    axes.set(xlim=(-0.1, len(average) + 0.1), ylim=(count + 1.5, -0.1), title=title, yticks=rows)
    axes.set_yticklabels([f"client {n + 1}" for n in range(count)] + ["server's average"])
    axes.set_xticks([i + 0.5 for i in range(len(average))], range(len(average)))
    axes.tick_params(length=0)


start = D - sum(federation.flat.layer_sizes[-2:])  # the output layer: weights, then biases
vectors = deltas_ND[:drawn_clients, start : start + drawn_entries]
own = torch.stack([tcs.top_k_mask(vector, drawn_k) for vector in vectors])
drawn = torch.randperm(drawn_entries, generator=lab.generator_for(seed, 100))[:drawn_k]
shared = tcs.positions_to_mask(drawn.sort().values, drawn_entries).expand_as(own)
drawing, panels = plt.subplots(2, 1, figsize=(8, 5), layout="constrained", sharex=True)
draw_panel(panels[0], vectors, own, f"(a) top-K, K = {drawn_k}: every client sends its own entries")
draw_panel(
    panels[1], vectors, shared, f"(b) rand-K, K = {drawn_k}: all clients send the same entries"
)
panels[1].set_xlabel("entry of the update (sent if framed; colour: size relative to the row)")
drawing.suptitle("Fig. 2: top-K and rand-K on a real update")
lab.save_figure(drawing, lab.results_folder(profile) / "figure2")
lab.show_figures()

# %% [markdown]
# In (a), the framed entries are the largest ones of each client's row. In (b), they are drawn without regard to their size. Every row has
# its own scale of colours, so colours of different rows cannot be compared. The last row shows the server's average. In (a) it has more
# framed entries than any client's row, and in (b) it has as many as each of them.
#
# ## How much each keeps
#
# We measure how much of an update a mask keeps by the squared norm:
#
# $$\frac{\lVert m\otimes\Delta\theta\rVert^2}{\lVert\Delta\theta\rVert^2}$$
#
# For rand-K this fraction is φ on average. For top-K it is larger, and the more the entries differ in magnitude, the larger it is.

# %%
shares = [10 ** (-e / 4) for e in range(0, 13)]
squares_ND = deltas_ND.square()
kept_share = {"top-K": [], "rand-K": []}
for share in shares:
    k = tcs.kept(share, D)
    top = sum(float(s_D[tcs.top_k_positions(s_D, k)].sum() / s_D.sum()) for s_D in squares_ND) / N
    rand_K = torch.randperm(D, generator=lab.generator_for(seed, 101))[:k]
    rand = float((squares_ND[:, rand_K].sum(1) / squares_ND.sum(1)).mean())
    kept_share["top-K"].append(100 * top)
    kept_share["rand-K"].append(100 * rand)

drawing, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
for name, values in kept_share.items():
    look = lab.curve_style(name)
    axes.plot([100 * share for share in shares], values, label=name, **look)
axes.axvline(100 * phi, color=lab.COLOURS[0], linestyle=":", label=f"φ = {phi:g}")
axes.set(xscale="log", xlabel="entries sent, φ (%)", ylabel="squared norm kept (%)")
axes.set_title("How much of a client's update survives")
axes.legend(frameon=False)
lab.show_figures()

# %%
squares_top = sum(float(s[tcs.top_k_positions(s, K)].sum() / s.sum()) for s in squares_ND) / N
print(f"top-K keeps {100 * squares_top:.0f} % of the squared norm in {100 * phi:g} % of the entries, "
      f"{squares_top / phi:.0f} times what rand-K keeps on average")  # fmt: skip

# %% [markdown]
# Top-K keeps more than rand-K at every φ below 1, and far more if φ is small. (The line of rand-K is straight, but looks like a curve
# because the horizontal axis is logarithmic. It may jump where a very large entry happens to be drawn.)
#
# ## Error accumulation
#
# A client need not lose what it leaves out. With *error accumulation* it keeps what it has not sent. These numbers are its *errors* e. In
# the next round it adds them to its new difference. The sum $\bar\Delta$ is what it *intends* to send. It sends a part $\tilde\Delta$ of
# that, and the rest becomes its new errors:
#
# $$\bar\Delta_{n,t}=\Delta\theta_{n,t}+e_{n,t-1},\qquad
# \tilde\Delta_{n,t}=m_{n,t}\otimes\bar\Delta_{n,t},\qquad e_{n,t}=\bar\Delta_{n,t}-\tilde\Delta_{n,t}$$
#
# It follows that nothing is lost: over several rounds, what has arrived at the server, plus the errors that still wait at the clients,
# equals the sum of the clients' updates. We check this over ten rounds. In each of them every client repeats its own update from above, so
# its largest entries are always the same. We do this with error accumulation and without it.
#
# In the code, `phi_local` is the fraction of entries that each client chooses for itself, as in top-K, and `phi_global` the fraction that
# all clients share, as in rand-K.

# %%
schemes = {
    "top-K": tcs.Scheme.named("top-K", phi_local=phi, **steps),
    "rand-K": tcs.Scheme.named("rand-K", phi_global=phi, **steps),
}
for name in ("top-K", "rand-K"):
    forgetful = dataclasses.replace(schemes[name], error_accumulation=False)
    schemes[f"{name}, no errors kept"] = forgetful

# %%
for name in ("top-K", "top-K, no errors kept"):
    compressor = tcs.Compressor(schemes[name], federation.flat.layer_sizes, N)
    arrived_D = torch.zeros(D)
    for _ in range(10):
        arrived_D += N * compressor.step(deltas_ND)
    waiting_D, meant_D = compressor.errors_ND.sum(0), 10 * deltas_ND.sum(0)
    if name == "top-K":
        lost = float((arrived_D + waiting_D - meant_D).norm() / meant_D.norm())
        print(f"{name}: what arrived plus what waits differs from the sum of the updates by "
              f"{lab.format_number(lost, 2)} of its length")  # fmt: skip
    print(f"{name}: {int((arrived_D != 0).sum())} entries arrived at least once")

# %% [markdown]
# Apart from rounding, nothing is lost. Without error accumulation, only the entries chosen in the first round ever arrive. (These are more
# than K, because the clients choose partly different entries.) Entries that are small in every round are never sent, although they would
# add up.
#
# ## What error accumulation rescues
#
# Now we train four more federations: with top-K and with rand-K, each with error accumulation and without it. As in the training from the
# beginning, all entries are sent in the first epoch. The bars show which fraction of the entries of θ the server has changed at least once
# after it.
#
# **What do you expect?** Does error accumulation help rand-K as it helps top-K, or does it help top-K only?

# %%
runs |= {name: train(scheme) for name, scheme in schemes.items()}

# %% jupyter={"source_hidden": true} tags=["remove-input"]
size = {"figsize": (9.4, 3.8), "width_ratios": (3, 2), "layout": "constrained"}
drawing, panels = plt.subplots(1, 2, **size)
for name, run in runs.items():
    look = lab.curve_style(name, runs)
    panels[0].plot(range(1, epochs + 1), run["accuracy"], label=name, **look)
    panels[1].barh(name, 100 * run["moved"], color=look["color"])
panels[0].set(xlabel="epoch", ylabel="test accuracy (%)", title=f"Training at φ = {phi:g}")
panels[1].set(xlabel="entries (%)", title="Entries of θ changed at least once")
panels[0].locator_params(axis="x", integer=True)
panels[1].invert_yaxis()
panels[0].legend(frameon=False, fontsize=9)
lab.show_figures()

# %%
for name, run in runs.items():
    print(
        f"{name:24s} accuracy {run['accuracy'][-1]:5.1f} %   entries changed {100 * run['moved']:5.1f} %"
    )
final = {name: run["accuracy"][-1] for name, run in runs.items()}
noise = (
    200 * (0.5 / test_samples) ** 0.5
)  # two standard errors, at most, in points: of the test images
print(
    f"with {test_samples} test images, differences below {noise:.1f} points may be due to the choice of images alone"
)

# %% [markdown]
# Another seed can change these accuracies by several more points. We made one run of each method. In these runs, top-K with error
# accumulation ends close to the training that sends everything. Without error accumulation it ends lower, although it was ahead in some
# earlier epochs. A likely reason is that small entries are then never sent, although over many rounds they would add up to a large change. Rand-K is poor in both cases, and with error
# accumulation it is even worse. A likely reason is that rand-K sends an entry only once in 1/φ rounds on average. By then the accumulated
# error is old, and it arrives all at once.
#
# ## The way down
#
# The server sends the average of the clients' messages back to all clients. With rand-K this average has K entries. With top-K it has every
# entry that *any* client has chosen. The fraction of entries in the server's message is therefore at most
#
# $$\text{top-K: } N\phi\qquad\text{rand-K: } \phi$$
#
# We measure it for top-K in federations of N clients, which all have the same amount of data per client. They train for one dense epoch and
# one sparse epoch. The table shows the fraction of entries of the last update that are not zero, the bound from the formula above, and the
# length of the server's message, divided by the number of parameters.


# %%
def way_down(n):
    sizes = {"scheme": schemes["top-K"], "clients": n, "epochs": 2, "warmup_epochs": 1}
    small = lab.Training(dataclasses.replace(base, **sizes), everything.first(n * samples_each, 1))
    small.epoch(0)  # dense
    *_, update_D = small.rounds(1)  # sparse
    sent = float((update_D != 0).float().mean())
    bound = min(1, n * small.compressor.rule.k_local / D)
    return {"N": n, "sent": sent, "bound": bound, "bits": small.compressor.bits_down / D}


# %%
down = [way_down(n) for n in federation_sizes]
print("  N     sent    bound   bits per parameter")
for row in down:
    shares = "".join(f"{100 * row[key]:7.2f} %" for key in ("sent", "bound"))
    print(f"{row['N']:3d}{shares}{row['bits']:10.2f}")

# %% jupyter={"source_hidden": true} tags=["remove-input"]
drawing, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
look = lab.curve_style("top-K")
axes.plot(federation_sizes, [100 * row["sent"] for row in down], label="top-K", **look)
dotted = {"color": look["color"], "linestyle": ":", "linewidth": 2}
bounds = [100 * row["bound"] for row in down]
axes.plot(federation_sizes, bounds, label=r"bound of top-K, $N\phi$", **dotted)
axes.axhline(100 * phi, color=lab.curve_style("rand-K")["color"], label="rand-K")
axes.set(
    xlabel="clients N",
    ylabel="entries (%)",
    title="With top-K, more clients make the server's message longer",
    xticks=federation_sizes,
)
axes.legend(frameon=False)
lab.show_figures()

# %% [markdown]
# Top-K's fraction grows almost in proportion to N up to about ten clients, and more slowly beyond.
#
# ## Where the bits go
#
# Each entry that is sent costs q bits for its value and, with top-K, some bits for its position. Sending the position as a plain index
# takes log2(D) bits. The paper's position code takes fewer, but their number grows as φ becomes smaller. Quantizing the values, which means
# rounding them to for example q = 5 bits, does not change the cost of the positions.
#
# $$\text{bits per sent entry}=\underbrace{q}_{\text{value}}+
# \underbrace{\log_2\frac{1}{\phi}+2}_{\text{position}}$$
#
# So a message of top-K with a hundredth of the entries is longer than a hundredth of a dense one. Notebook
# [06_sparse_encoding](06_sparse_encoding.ipynb) explains the code, and counts which part of a message the positions are.
#
# ## Claim
#
# | measured | expected | tolerance, and why |
# |:---|:---|:---|
# | squared norm kept by top-K | more than 5 times the fraction φ that rand-K keeps | none; we ask only for a factor of 5, because the factor depends on the data |
# | what arrived plus what waits | the sum of the clients' updates | 1e-5, for float32 sums over ten rounds |
# | accuracy gained by error accumulation, in one run | more than 0 | two standard errors, from the number of test images |
# | fraction of entries in the server's message | at most its bound | none, because it is a count |

# %%
rescued = final["top-K"] - final["top-K, no errors kept"]
over = max(row["sent"] - row["bound"] for row in down)
claim("top-K keeps at least five times as much of the squared norm as rand-K", squares_top > 5 * phi if phi < 0.18 else None,
      f"{squares_top / phi:.0f} times")  # fmt: skip
claim(
    "what arrived and what waits add up to the sum of the clients' updates",
    lost < 1e-5,
    f"up to {lab.format_number(lost, 2)}",
)
claim("in this run, keeping errors raises top-K's accuracy", lab.judge_mean(rescued, noise),
      f"by {rescued:.1f} points; two standard errors are {noise:.1f}")  # fmt: skip
claim("the server's message is within its bound", over <= 1e-6)

# %% [markdown]
# ## Exercises
#
# Replace each `return None` by your own lines. The cell then compares your function with the core. Positions count from 0.
#
# 1. Write $S_{top}$: return the positions of the k entries of largest magnitude in ascending order. If two magnitudes are equal,
#    the lower position is chosen.
# 2. Write error accumulation with top-K, following the three formulas of the section *Error accumulation*. Return what is sent,
#    with zeros elsewhere, and the new errors. (`tcs.top_k_mask` may help.)
#
# <details><summary>Hints</summary>
#
# 1. Sort the positions by magnitude, the largest first, and by position where magnitudes are equal. Take the first k of them and sort
#    these by position.
# 2. The new errors include old errors that were not sent. So subtract what is sent from the *sum* of the difference and the old
#    errors, not from the difference alone.
#
# </details>


# %%
def s_top(vector_D, k):
    return None  # yours


def accumulate(errors_D, delta_D, k):
    return None  # yours


lab.check_exercise("s_top", s_top)
lab.check_exercise("accumulate", accumulate)

# %% [markdown] tags=["solution"]
# <details><summary>Solutions</summary>
#
# ```python
# def s_top(vector_D, k):
#     magnitudes = vector_D.abs().tolist()
#     order = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))
#     return sorted(order[:k])
#
#
# def accumulate(errors_D, delta_D, k):
#     intended_D = delta_D + errors_D
#     sent_D = tcs.top_k_mask(intended_D, k) * intended_D
#     return sent_D, intended_D - sent_D
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
def s_top(vector_D, k):
    magnitudes = vector_D.abs().tolist()
    order = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))
    return sorted(order[:k])


def accumulate(errors_D, delta_D, k):
    intended_D = delta_D + errors_D
    sent_D = tcs.top_k_mask(intended_D, k) * intended_D
    return sent_D, intended_D - sent_D


assert lab.teaching.judge_solution("s_top", s_top) == "right"
assert lab.teaching.judge_solution("accumulate", accumulate) == "right"

# %% [markdown]
# ## What we saw

# %%
gap = final["top-K"] - final["everything sent"]
helps = final["rand-K"] - final["rand-K, no errors kept"]
behind = final["top-K"] - final["rand-K"]
claim.judge(
    "rand-K ends below top-K",
    lab.judge_mean(behind, noise),
    f"by {behind:.1f} points, in one run of each; two standard errors are {noise:.1f}",
)
top = down[-1]
print(f"""{claim.summary()}
The accuracy of top-K with error accumulation differs by {gap:+.1f} points from sending everything. This is one run of each,
    which decides nothing.
What it costs: with N = {top["N"]} clients the server's message has {100 * top["sent"]:.1f} % of the entries.
What surprised us: error accumulation changes rand-K's accuracy by {helps:+.1f} points; rand-K with it ends {behind:.1f} points below top-K.""")
where = math.log2(1 / phi) + 2
answer.update(
    Markdown(f"""**In short.** With {phi:.0%} of the entries, top-K keeps {squares_top:.0%} of an update's squared norm, while rand-K keeps {phi:.0%}.
The rest is not lost if the clients keep it and add it to their next updates. In our trainings, top-K then reached {final["top-K"]:.0f}% test
accuracy, and {final["top-K, no errors kept"]:.0f}% without this. Sending everything reached {final["everything sent"]:.0f}%. Top-K has two costs. Each position
takes {where:.1f} bits{", more than the 5 bits of a quantized value" if where > 5 else ""}. And with {top["N"]} clients the server's message contains {top["sent"]:.0%} of the entries.
(Each method was run once.)""")
)

# %% [markdown]
# Next, [03_tcs](03_tcs.ipynb) shows the paper's own method. In it, all clients send mostly the same entries.

# %%
print(f"Made with {lab.describe_core()} and torch {torch.__version__}, on {train_samples} images ({data.label}). "
      "One run of each scheme (n = 1).")  # fmt: skip
