# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Follow the important positions through time
#
# How do clients share a mask, and when should that help? After this notebook you will be able to
#
# - write a client of TCS (time-correlated sparsification),
# - say where the shared mask comes from.
#
# **What the paper claims (Sec. II-A, Alg. 2).** The [paper](https://arxiv.org/abs/2101.08837) assumes that the positions of the largest
# entries of an update change little from one round to the next. Therefore the last update, which the server and all clients know, can tell
# them which entries to send next. The positions of these entries are the *shared mask*. They need not be sent. Each client also searches
# for new positions, with a small mask of its own.
#
# *Run time*: about 40 s on two cores of an AMD EPYC. *Read before*: [01_fedavg](01_fedavg.ipynb) and
# [02_sparsification](02_sparsification.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The second grey bar hides the parameters. Change
# them there and run all cells again. Three changes to try stand below the first picture.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import inspect
import re

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display
from tcs_lab.teaching.pictures import draw_round

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True, "font.size": 10})

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
phi_global = 1e-2  # share of the entries kept by the mask that the server and all clients know
phi_local = 1e-3  # share kept by each client's own mask
local_steps = 1  # H, local steps per round
value_bits = 32  # q, bits of a value: 32, or 1 to 16 to quantize
profile = "ci"  # name of these settings; nothing is written
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 1040  # the first so many training images
test_samples = 1000  # the first so many test images
image_size = 16  # height and width in pixels, averaged from more; None: as they are
model = "resnet8"  # resnet8 or resnet18
width = 8  # channels of its first stage
clients = 10  # N
batch_size = 8  # B, samples of one local step
epochs = 8  # passes over the data
warmup_epochs = 1  # dense epochs at the start
learning_rate = 0.5  # eta
drops = [0.75]  # when eta is divided by 10, as shares of the epochs
reference_batch = None  # cumulative batch at which learning_rate holds; None: not scaled
dirichlet_alpha = None  # class skew among clients; None: IID
large_local_share = 1e-2  # a second phi_local, for comparison
seed = 0  # of everything random

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fields = lab.notebook_params(globals(), lab.RUN_KEYS - {"device"})
answer = display(Markdown("*The answer comes here when all cells have run.*"), display_id=True)
claim = lab.Statements(globals(), "03_tcs")
shares = dict.fromkeys(("phi_global", "phi_local", "large_local_share"), lab.Fraction)
lab.check_values(globals(), **shares, seed=lab.Seed)
fields |= {"seed": seed, "device": "cpu"}
sizes = {"local_steps": local_steps, "value_bits": value_bits}
scheme = tcs.Scheme.named("TCS", phi_global=phi_global, phi_local=phi_local, **sizes)
config = lab.RunConfig(scheme, **fields)
data = lab.load_dataset(dataset).first(train_samples, test_samples).resize(image_size)
probe = lab.Training(config, data)
dimension, layer_sizes = len(probe.theta_D), probe.flat.layer_sizes
k_global, k_local = probe.compressor.rule.k_global, probe.compressor.rule.k_local
print(f"The network has D = {dimension:,} parameters. The shared mask has K_global = {k_global} entries, and each of the N = {clients} "
      f"clients adds K_local = {k_local}.\nAn epoch has {probe.rounds_per_epoch} rounds. "
      f"Number of dense epochs at the start (warm-up): {warmup_epochs} of {epochs}.")  # fmt: skip
print(f"The data are images of {data.classes} classes ({data.label}).")
print(lab.forecast_trainings([config] * 7))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
draw_round()
lab.show_figures()

# %% [markdown]
# The picture shows one round of TCS with two clients and 32 parameters. The updates are random numbers. The core, `tcs_core.py`, computes
# what is sent, what is kept and what the next shared mask is. Bars are absolute values.
#
# TCS uses two masks, and each has its own purpose. The shared mask $m_{global}$ **exploits** what is known: it contains the positions that
# were important in the last update. Everybody has received that update, so the values at these positions are sent without the positions.
# The client's own mask $m_{local}$ **explores**: it contains the client's largest entries *outside* $m_{global}$. Their positions must be
# sent too, so this mask is small.
#
# Look for a position that is not in the shared mask although both clients have a large entry there: both of them find it on their own, and
# it enters the next shared mask. And look for positions in the shared mask at which both clients have only small entries by now: these are
# sent all the same, and they leave the mask afterwards.
#
# In the first round there is no shared mask yet, so everything is sent. The paper keeps sending everything for several epochs before it
# uses the mask, and we do so for one. These rounds are called *dense*.
#
# Three changes to try:
#
# - `phi_global = 0.05` (the fraction of all entries that are in the shared mask) makes this mask five times as large. The clients explore at
#   most 200 entries per round, so at most 200 of the 1,000 can be replaced in a round.
# - `epochs = 20` trains longer. In our trial, TCS stayed well below dense training. TCS with larger local masks ($K_{local} = 200$, in the
#   section *Take the parts away, one by one*) reached the accuracy of dense training.
# - `phi_local = 1e-4` (the fraction of all entries that are in a client's own mask) lets each client send only two entries of its own per
#   round, so the mask can only change slowly.
#
# ## Algorithm 2 beside the code
#
# The table shows the lines of the paper's Algorithm 2, in our words. Beside each line is the statement of `tcs_core.py` that carries it
# out; in that file, a comment names the line of the algorithm. The symbol $\otimes$ multiplies entry by entry, and $S_{top}(v, K)$ is the
# mask of the K entries of $v$ with the largest magnitude. $\Delta\theta_n$ is the *difference* of client $n$, that is, how far its local
# steps have moved the weights, and $e_n$ is its *accumulated error*, the sum of everything that it has not sent so far. The index $n$
# stands for a client and $t$ for a round. $\Delta\theta_t$ is the update of round $t$. The table leaves out loops, headings, and line 4, in
# which the client receives the update.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
BOX = {
    5: r"$m_{global} = S_{top}(\Delta\theta_{t-1},\, K_{global})$",
    6: r"$\theta \leftarrow \theta + \Delta\theta_{t-1}$",
    7: r"$H$ local steps give the difference $\Delta\theta_n$",
    9: r"what it would send if nothing were left out: $\bar\Delta\theta_n = \Delta\theta_n + e_n$",
    10: r"$m_{local} = S_{top}(\bar\Delta\theta_n \otimes (1 - m_{global}),\, K_{local})$",
    11: r"$\tilde\Delta\theta_n = (m_{local} + m_{global}) \otimes \bar\Delta\theta_n$",
    12: r"send it (rounded if a value has fewer than 32 bits, which is not so on this page)",
    13: r"what remains: $e_n = \bar\Delta\theta_n - \tilde\Delta\theta_n$",
    15: r"$\Delta\theta_t = \frac{1}{N}\sum_n \tilde\Delta\theta_n$",
    16: r"send $\Delta\theta_t$ to all clients",
}
MARK = re.compile(  # code with a line's number behind it, or below a comment with the number
    r"^ *(?:(\S.*?)  # (?:Alg\. 2, )?line (\d+)|# line (\d+)[^\n]*\n *(.+))", re.MULTILINE
)
methods = [tcs.TCS.observe, tcs.Federation.exchange, tcs.Federation.move, tcs.Client.message_of,
           tcs.Client.message_from, tcs.Client.arrived, tcs.Server.average, tcs.Server.reply]  # fmt: skip
marked = {int(line or above): [f"`{code or below}`", f"`{method.__qualname__}`"]
          for method in methods
          for code, line, above, below in MARK.findall(inspect.getsource(method))}  # fmt: skip
assert marked.keys() == BOX.keys(), "a line of the box is not where it was"
lines = [[line, words, *marked[line]] for line, words in BOX.items()]
lines = pd.DataFrame(lines, columns=["line", "Algorithm 2", "statement in tcs_core.py", "method"])
display(Markdown(lab.markdown(lines)))

# %% [markdown]
# ### Exercises
#
# Replace each `return None` by your own lines. The cell then compares your function with the core. In the names, `_D` stands for a vector
# with $D$ entries, and `_K` for one number per chosen position. A mask is given by the positions that it contains: `shared_K` is the shared
# mask.
#
# 1. Write lines 9 to 13. Return three tensors: the client's own positions (ascending, int64, counted
#    from 0), a vector (D,) with the values that are sent, and 0 at all other positions, and the new errors (D,).
# 2. Write line 5, which gives the next round's `shared_K`. Your function gets the weights `theta_D`, a client's difference `delta_D` and the
#    update `update_D`. Which of them does it need?
#
# The function `tcs.top_k_positions(vector, k, excluded)` is $S_{top}$. Entries in `excluded`, a tensor of positions (int64) or of booleans
# (D,), are never chosen. It returns positions in ascending order, which is the order that is wanted here.
#
# <details><summary>Hints</summary>
#
# 1. The new errors include old errors that were not sent. So begin with the sum of the difference and the old errors, and use it in
#    all lines that follow. Do not change the given tensors in place.
# 2. The server and all clients must find the same mask, so it may depend only on what all of them know. That excludes one of the three vectors. Of the other two, line 5 names the right one.
#
# </details>


# %%
def client_lines(errors_D, delta_D, shared_K, k_local):
    return None  # yours


def shared_mask(theta_D, delta_D, update_D, k_global):
    return None  # yours


lab.check_exercise("client_lines", client_lines)
lab.check_exercise("shared_mask", shared_mask)

# %% [markdown] tags=["solution"]
# <details><summary>Solutions</summary>
#
# ```python
# def client_lines(errors_D, delta_D, shared_K, k_local):
#     intended_D = delta_D + errors_D  # line 9
#     own_K = tcs.top_k_positions(intended_D, k_local, shared_K)  # line 10
#     places_K = torch.cat([shared_K, own_K])
#     sent_D = torch.zeros_like(intended_D)
#     sent_D[places_K] = intended_D[places_K]  # lines 11 and 12
#     return own_K, sent_D, intended_D - sent_D  # line 13
#
#
# def shared_mask(theta_D, delta_D, update_D, k_global):
#     return tcs.top_k_positions(update_D, k_global)  # line 5: everybody knows update_D
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
def client_lines(errors_D, delta_D, shared_K, k_local):
    intended_D = delta_D + errors_D  # line 9
    own_K = tcs.top_k_positions(intended_D, k_local, shared_K)  # line 10
    places_K = torch.cat([shared_K, own_K])
    sent_D = torch.zeros_like(intended_D)
    sent_D[places_K] = intended_D[places_K]  # lines 11 and 12
    return own_K, sent_D, intended_D - sent_D  # line 13


def shared_mask(theta_D, delta_D, update_D, k_global):
    return tcs.top_k_positions(update_D, k_global)  # line 5: everybody knows update_D


assert lab.teaching.judge_solution("client_lines", client_lines) == "right"
assert lab.teaching.judge_solution("shared_mask", shared_mask) == "right"

# %% [markdown]
# ## Ten numbers, two clients
#
# We now run the same code on ten parameters, with $K_{global} = 2$ and $K_{local} = 1$. In the output, `G` marks a position in the shared
# (global) mask, `L` the position in the client's own (local) mask, and a dot an entry that is not sent. The first round is dense and is not
# shown. In it, positions 1 and 4 have the largest entries, so they are the first shared mask. From round 3 on, client 0 has an even larger
# difference, at position 7.

# %%
before = torch.zeros(2, 10)
before[:, [1, 4, 6]] = torch.tensor([5.0, 4.0, 0.9])  # both clients agree on these
before[0, 3], before[1, 8] = 0.6, 0.7  # one client each
after = before.clone()
after[0, 7] = 12.0  # from round 3 on, seen by client 0 only


def letters(global_K, local_K):
    marks = dict.fromkeys(range(10), "·") | dict.fromkeys(global_K.tolist(), "G")
    return " ".join((marks | dict.fromkeys(local_K.tolist(), "L")).values())


toy = tcs.Scheme.named("TCS", phi_global=0.2, phi_local=0.1)
known = tcs.Known(toy, [10])
both, server = [tcs.Client(known, n) for n in range(2)], tcs.Server(known)


def one_round(deltas_ND):
    """Algorithm 2 without line 7. Returns the clients' messages."""
    known.begin()
    messages = [client.send(delta_D) for client, delta_D in zip(both, deltas_ND, strict=True)]
    for client, message in zip(both, messages, strict=True):
        server.add(client.number, message)
    update_D, _ = server.finish()  # lines 15 and 16
    for client in both:
        client.arrived()
    known.observe(update_D)
    return messages


# %% tags=["nbval-check-output"]
_ = one_round(before)  # the first round is dense: there is no update yet to take a mask from
print("                    0 1 2 3 4 5 6 7 8 9")
for number in range(2, 8):
    for n, message in enumerate(one_round(before if number < 3 else after)):
        print(f"round {number}, client {n}:  {letters(known.shared_K, message.positions)}")

# %% [markdown]
# In round 3, client 0 finds position 7 with its own mask. (Client 1 sends position 8, because two differences of 0.7 have added up there,
# while it sent position 6 in round 2.) From round 4 on this position is in the shared mask, so only its value is
# sent. Position 4 has left the shared mask, and in rounds 4 to 6 both clients send it with their own masks, because it is their largest
# entry outside the shared mask. In round 7 they send position 6 instead, where small differences have added up, since what a client does
# not send is not lost ([02_sparsification](02_sparsification.ipynb)).
#
# ## Without a local mask nothing ever moves
#
# Without $m_{local}$ the update is zero outside $m_{global}$, so the next mask must be the same one ($\operatorname{supp}$ is the set of
# the entries that are not zero):
#
# $$\operatorname{supp}(\Delta\theta_t) \subseteq m_{global}
# \;\Rightarrow\; S_{top}(\Delta\theta_t, K_{global}) = m_{global}$$
#
# (This holds unless an entry in the mask is exactly 0.) A new position can enter the mask only if some client sends its value although it
# was not in the mask. To see this, we repeat the example with ten numbers without local masks.

# %% tags=["nbval-check-output"]
frozen = tcs.Compressor(dataclasses.replace(toy, phi_local=None), [10], clients=2)
_ = frozen.step(before)
for number in range(2, 7):
    _ = frozen.step(before if number < 3 else after)
    mask, waiting = frozen.rule.positions.tolist(), float(frozen.errors_ND[0, 7])
    print(
        f"round {number}: shared mask {mask}, accumulated error of client 0 at position 7: {waiting:.0f}"
    )

# %% [markdown]
# The mask never changes. The error at position 7 keeps growing, but it is never sent.
#
# ## Do important positions change slowly?
#
# **What do you expect?** Take the $K_{global}$ largest entries of one update of dense training, in which everything is sent in every round.
# Are more than half of them among the $K_{global}$ largest of the next update, or fewer?
#
# We train once densely (FedAvg) and once with TCS, and record the $K_{global}$ largest entries of every update. The overlap of
# two such masks is the fraction of positions that they have in common. For two random masks it would be $K/D$.
#
# $$\text{overlap}(t, t+1) = \frac{|m_t \cap m_{t+1}|}{K}$$
#
# However, it is easy to exceed $K/D$. If small layers contain many of the large entries, masks overlap even if the positions *inside* each
# layer are random. We therefore also compute a stricter chance level. Let $k_l(t)$ be the number of entries that the mask has in layer $l$,
# and $d_l$ the size of that layer. If the positions inside each layer are random, the overlap is on average:
#
# $$\text{chance within layers} = \frac{1}{K} \sum_l \frac{k_l(t)\, k_l(t+1)}{d_l}$$


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def follow(scheme):
    """Train, and record for every round where the update is not zero and where its K largest are."""
    federation = lab.Training(dataclasses.replace(config, scheme=scheme), data)
    seen = {"support": [], "mask": [], "loss": []}
    for epoch in lab.follow(range(epochs), "epochs"):
        for update_D in federation.rounds(epoch):
            seen["support"].append(update_D != 0)
            seen["mask"].append(tcs.top_k_mask(update_D, k_global))
        passes = federation.rounds_per_epoch * clients * scheme.local_steps
        seen["loss"].append(float(federation.loss_sum) / passes)
    seen = {k: torch.stack(v) if k != "loss" else v for k, v in seen.items()}
    return seen | {"accuracy": federation.evaluate()["accuracy"]}


start = max(1, warmup_epochs * probe.rounds_per_epoch)  # the first sparse round of a TCS run
dense = follow(tcs.Scheme.named("FedAvg", local_steps=local_steps))
runs = {"TCS": follow(scheme)}


# %%
def overlaps(masks_TD, lag):
    return (masks_TD[:-lag] & masks_TD[lag:]).sum(1) / k_global


# %%
counts_TL = torch.stack([part.sum(1) for part in dense["mask"].split(layer_sizes, 1)], 1)
expected_TL = counts_TL[:-1] * counts_TL[1:] / torch.tensor(layer_sizes)
chance = k_global / dimension
measured = float(overlaps(dense["mask"], 1).mean())
word = "more" if measured > 0.5 else "fewer"
layers = float(expected_TL.sum(1).mean() / k_global)
print(f"The measured overlap is {measured:.2f}, so {word} than half of the entries stay. Random masks would overlap by "
      f"{chance:.2f}.\nRandom masks with the same number of entries in each layer would overlap by {layers:.2f}.")  # fmt: skip
claim("masks of consecutive dense updates overlap more than by chance within the layers", measured > layers,
      f"{measured:.2f} against {layers:.2f}")  # fmt: skip


# %% [markdown]
# The line that begins with *supported* is a statement that the notebook checks on its own numbers.
#
# The next figure shows when positions are in the mask. Each row is one position, that is, one of the $D$ entries of the update, and each
# column is one of the last rounds. The rows are a random sample of the positions that are in the mask in at least one of these rounds. They
# are sorted by the first of these rounds, which makes the diagonal. A cell is dark if the entry is among the $K_{global}$ largest of that round's update. In TCS, these entries are the shared mask of the next
# round.


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def raster(masks_TD, rows=60):
    """Entries drawn from those that are ever in these masks, in the order of their first round."""
    places = masks_TD.any(0).nonzero().squeeze(1)
    drawn = torch.randperm(len(places), generator=lab.generator_for(seed, 100))[:rows]
    seen_RT = masks_TD[:, places[drawn]].T.int()
    return seen_RT[seen_RT.argmax(1).argsort(stable=True)]


panel_of = {"Dense training: the K largest": dense, "TCS: the shared mask": runs["TCS"]}
window = dense["mask"][-40:].shape[0]
figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.9), sharey=True)
for axes, (name, run) in zip(panels, panel_of.items(), strict=True):
    rows = raster(run["mask"][-window:])
    extent = (len(dense["mask"]) - window + 0.5, len(dense["mask"]) + 0.5, len(rows), 0)
    axes.imshow(rows, cmap="Blues", vmax=1.2, aspect="auto", interpolation="none", extent=extent)
    axes.set(title=name, xlabel="round", yticks=[])
panels[0].set_ylabel(f"{len(rows)} of the positions in these masks")
lab.show_figures()

# %% [markdown]
# Few positions stay for many rounds without a gap. In dense training, some positions come back again and again. In TCS, a position that has
# left the mask seldom comes back soon, and the section *Why entries do not return to the mask of TCS* asks why.
#
# That the same entries are large in consecutive rounds is the *correlation in time* that gave TCS its name. We measure it as the distance
# between the measured overlap and the chance within layers. Most of the overlap is there only because the large entries are in the same
# *layers* in every round ([notebook 04](04_layerwise_fairness.ipynb)). A smaller part of it is there because the same *entries* of these
# layers are large.
#
# ## What the local mask finds, round by round
#
# Now we turn to TCS. If an entry of the update is not zero although it was not in that round's shared mask, some client has explored it.
# Explored entries that are among the $K_{global}$ largest enter the next shared mask, and equally many entries leave it. The fraction of
# the mask that is new in a round is called its *turnover*.


# %%
old, new = runs["TCS"]["mask"][start - 1 : -1], runs["TCS"]["mask"][start:]
explored_T = (runs["TCS"]["support"][start:] & ~old).sum(1)
entered_T = (new & ~old).sum(1)
entering = float((entered_T / explored_T).mean())
turnover = float(entered_T.float().mean() / k_global)
print(f"Together, the {clients} clients explore {explored_T.float().mean():.0f} entries per round. "
      f"Of these, {entering:.0%} enter the next shared mask.\n"
      f"In each round, {turnover:.0%} of the shared mask is new (turnover).")  # fmt: skip
claim("clients explore at most N · K_local entries", int(explored_T.max()) <= clients * k_local)


# %% [markdown]
# So the mask of TCS does **not** change slowly.
#
# ## What the server sends back
#
# With top-K every client chooses its own positions (here $K = K_{global}$ of them), so the average can have up to $N K$ non-zero entries.
# With TCS, every round after the dense ones satisfies
#
# $$|\operatorname{supp}(\Delta\theta_t)| \le K_{global} + N K_{local}$$
#
# In the paper's training (Sec. III-B), this bound is 2 % of all entries.

# %%
runs["top-K"] = follow(tcs.Scheme.named("top-K", phi_local=phi_global, **sizes))
bound = k_global + clients * k_local
shares = {k: run["support"][start:].sum(1) / dimension for k, run in runs.items()}
largest = {k: int(run["support"][start:].sum(1).max()) for k, run in runs.items()}
for name, share in shares.items():
    print(f"The server's message of {name} has {share.mean():.1%} of all entries on average, and at most "
          f"{largest[name] / dimension:.1%}.")  # fmt: skip
claim("the server's message has no more entries than its bound allows", largest["TCS"] <= bound,
      f"at most {largest['TCS']} entries; the bound is {bound}, or {bound / dimension:.1%} of all")  # fmt: skip
claim("the server's message has at least as many entries with top-K as with TCS", largest["top-K"] >= largest["TCS"],
      f"at most {largest['top-K']} against {largest['TCS']}, with N = {clients} clients")  # fmt: skip

# %% [markdown]
# ## Take the parts away, one by one
#
# We repeat the same training without the local mask, then without error accumulation (what is not sent is dropped, so $e_n = 0$), and then
# with larger local masks. In the table, *mask* always means the $K_{global}$ largest entries of the update, also for top-K and dense
# training. The columns about the mask count only the rounds after the dense first epoch.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
larger = f"TCS, K_local = {tcs.kept(large_local_share, dimension)}"
runs["no local mask"] = follow(dataclasses.replace(scheme, phi_local=None))
runs["no error accumulation"] = follow(dataclasses.replace(scheme, error_accumulation=False))
runs[larger] = follow(dataclasses.replace(scheme, phi_local=large_local_share))
runs["dense (FedAvg)"] = dense
order = ["no local mask", "no error accumulation", "TCS", "top-K", larger, "dense (FedAvg)"]
figure, axes = plt.subplots(figsize=(7.6, 3.8))
for name in order:
    look = lab.curve_style(name, order) | {"markersize": 5}
    axes.plot(range(1, epochs + 1), runs[name]["loss"], label=name, **look)
axes.set(
    title="Training loss of TCS without some of its parts", xlabel="epoch", ylabel="cross-entropy"
)
axes.grid(alpha=0.25)
figure.legend(loc="outside right upper", frameon=False)
lab.show_figures()
masks = {name: runs[name]["mask"][start - 1 :] for name in order}
table = pd.DataFrame({
    "scheme": order,
    "training loss": [f"{runs[n]['loss'][-1]:.2f}" for n in order],
    "test accuracy, %": [f"{100 * runs[n]['accuracy']:.1f}" for n in order],
    "new in the mask, % per round": [f"{100 - 100 * overlaps(masks[n], 1).mean():.0f}" for n in order],
    "entries that were ever in the mask": [f"{masks[n].any(0).sum():,}" for n in order],
    "entries in the server's message, %": [f"{100 * runs[n]['support'][start:].float().mean():.1f}" for n in order],
})  # fmt: skip
display(Markdown(lab.markdown(table)))

# %% [markdown]
# Without the local mask, the mask stays as it is at the end of the warm-up, so this is a training with one fixed mask. Only the parameters
# at the positions in this mask change. What the clients learn at other positions never reaches the server. Without error accumulation, the
# clients explore, but what they do not send is lost. The next cell checks that TCS ends with a training loss that is lower by more than
# 0.02, a limit that we chose. There is one training of each scheme.

# %%
final = {name: run["loss"][-1] for name, run in runs.items()}
ever = int(masks["no local mask"].any(0).sum())
claim("without a local mask the shared mask never changes", ever == k_global, f"{ever} entries were ever in it")  # fmt: skip
for name in ("no local mask", "no error accumulation"):
    claim(f"TCS ends with a lower loss than with {name}", final[name] - final["TCS"] > 0.02,
          f"{final['TCS']:.2f} against {final[name]:.2f}")  # fmt: skip

# %% [markdown]
# TCS scores below dense training here. One reason may be that all clients together send few different entries per round (last column). With
# larger local masks, they send more, and the training loss of TCS reaches that of dense training. Top-K, too, sends more different entries,
# and reaches this loss.
#
# ## Why entries do not return to the mask of TCS
#
# From one round to the next, the masks of TCS change no faster than those of dense training, as the table shows. But an entry that has left
# the mask of TCS seldom comes back soon. This shows in masks that are two rounds apart:

# %%
for name in ("dense (FedAvg)", "no error accumulation", "TCS"):
    print(
        f"{name + ':':23s} masks two rounds apart overlap by {overlaps(masks[name], 2).mean():.0%}"
    )

# %% [markdown]
# Without error accumulation, masks two rounds apart have more in common. So the accumulated errors may be the reason why entries that leave
# the mask of TCS do not come back soon. The paper says that positions can become important for a time because errors accumulate there. Our
# explanation goes on from this: an entry enters the mask when one client sends the error that it has accumulated there. In the next round,
# *all* clients send their accumulated errors for this entry, which can keep it large for one more round. Then it has no accumulated errors
# left, and drops out.
#
# To check the first part of this explanation, why entries enter, we train with TCS once more, and ask in the second and the third epoch after the dense one how many of the explored entries
# the clients would have chosen without accumulated errors, that is, if $S_{top}$ had looked only at the differences of the round. We compute
# this fraction in every round, and a 95 % interval for its mean over the rounds. The statement that the cell prints is *supported* if the
# whole interval lies below one half.


# %%
def chosen_anyway(deltas_ND, shared_D, explored_D):
    """Of the explored entries, the fraction that the differences alone would choose."""
    own = [tcs.top_k_positions(delta_D, k_local, shared_D) for delta_D in deltas_ND]
    return float(explored_D[torch.cat(own).unique()].sum() / explored_D.sum())


federation, without, shared_D = lab.Training(config, data, keep_deltas=True), [], None
for epoch in range(warmup_epochs + 3):
    for update_D in federation.rounds(epoch):
        if epoch > warmup_epochs:
            explored_D = (update_D != 0) & ~shared_D
            without.append(chosen_anyway(federation.deltas_ND, shared_D, explored_D))
        shared_D = tcs.top_k_mask(update_D, k_global)
fewer, half = lab.paired_gain([0.5] * len(without), without)
print(f"From the differences alone, the clients would have chosen {torch.tensor(without).mean():.0%} of the "
      "entries that they explored.")  # fmt: skip
claim.judge(
    "most entries are explored because of errors that have accumulated there",
    lab.judge_mean(fewer, half),
)

# %% [markdown]
# We did not measure the rest: entries that have been in the mask for longer have no accumulated error, because line 13 has set it to
# zero, so they are probably soon exceeded by others with large accumulated errors, and leave the mask. So $m_{local}$ finds entries that are important *for the moment*.

# %% [markdown]
# ## What we saw

# %%
often = (len(masks["TCS"]) - 1) * k_global / dimension
display(Markdown("- " + claim.summary("**{}**").replace("\n", "\n- ") + f"""
- This training shows how the schemes start, not how they end. It has {len(masks["TCS"]) - 1} rounds after the warm-up, and in each of them {phi_global:.0%} of
  the entries are in the shared mask. So an entry is in the shared mask in {often:.1f} rounds on average. In the paper's 23,010 rounds after the warm-up, it is 230.
"""))  # fmt: skip
controls = lab.control_answers(lab.ROOT / "params/controls_plan.yaml").set_index("question")
mechanism = controls.loc["mechanism"]  # TCS against the same scheme with a random shared mask
answer.update(Markdown(f"""**In short.** Everybody has received the last update, so everybody can take the same mask from it: the positions of its largest entries.
Clients send the values at these positions, and the positions themselves need not be sent. Each client also sends a few entries of its own
choice, {k_local / k_global:.0%} as many. Only these need positions. The shared mask has {k_global / dimension:.0%} of all entries, and the {clients} clients together add at most
{clients * k_local / dimension:.0%}. So the server's message contains at most {bound / dimension:.0%} of all entries. If each client chose all of its entries alone, as in
top-K, it would contain up to {largest["top-K"] / dimension:.0%}.

A mask from the last update should help if the same entries are large again in the next round. In dense training, which sends everything,
{measured:.0%} of the largest entries are among the largest again in the next round. By chance it would be {layers:.0%}, because the same layers have most of the large entries in every round. On
CIFAR-10, a shared mask that is drawn at random in every round did about as well as the mask from the last update. There, TCS ended
{lab.format_estimate(mechanism)} percentage points above the same scheme with the random mask (95 % interval, n = {mechanism["n"]}; [13_evidence](13_evidence.ipynb), *Is it
time correlation?*). What both have in common is that all clients share a mask, that each client adds entries of its own, and that
everything else is kept for later. Perhaps this is what matters, and not which positions are shared."""))  # fmt: skip

# %% [markdown]
# Next, [04_layerwise_fairness](04_layerwise_fairness.ipynb) shows which layers contain the large entries, and
# [05_global_momentum](05_global_momentum.ipynb) adds momentum.

# %%
print(f"Made with {lab.describe_core()} and torch {torch.__version__}, on {data.label}. "
      "One run of each scheme (n = 1).")  # fmt: skip
