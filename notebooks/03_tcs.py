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
# After this notebook you will be able to
#
# - write a client of TCS (time-correlated sparsification),
# - say where the shared mask comes from.
#
# **What the paper claims (Sec. II-A, Alg. 2).** The [paper](https://arxiv.org/abs/2101.08837) assumes that the positions of the largest
# entries of an update change little from one round to the next. Therefore the last update, which the server and all clients know, can tell
# them which entries to send next, and the positions of these entries need not be sent. These positions are the *shared mask*. Each client
# also searches for new positions, with a small mask of its own. In the first round there is no shared mask yet, so everything is sent. The
# paper keeps sending everything for several epochs before it uses the mask, and we do so for one. After these *dense* rounds, the server's
# message never holds more than $K_{global} + N K_{local}$ entries, where $N$ is the number of clients, $K_{global}$ is the size of the
# shared mask, and $K_{local}$ is the size of a client's own mask. In the paper's training (Sec. III-B) this is 2 % of all entries.
#
# *Run time*: about a minute on two cores of a Xeon. *Read before*: [01_fedavg](01_fedavg.ipynb) and
# [02_sparsification](02_sparsification.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The second grey bar hides the parameters. Change
# them there and run all cells again. Three changes to try stand below the first picture.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import inspect
import re
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Ge
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
ticket_seeds = 3  # trainings with one mask for the whole training
ticket_epochs = 5  # passes over the data in these trainings
seed = 0  # of everything random

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fields = lab.notebook_params(globals(), lab.RUN_KEYS - {"device"})
claim = lab.Statements(globals(), "03_tcs")
shares = dict.fromkeys(("phi_global", "phi_local", "large_local_share"), lab.Fraction)
lab.check_values(globals(), **shares, ticket_seeds=Annotated[int, Ge(2)],
                 ticket_epochs=lab.WholeNumber, seed=lab.Seed)  # fmt: skip
fields |= {"seed": seed, "device": "cpu"}
sizes = {"local_steps": local_steps, "value_bits": value_bits}
scheme = tcs.Scheme.named("TCS", phi_global=phi_global, phi_local=phi_local, **sizes)
config = lab.RunConfig(scheme, **fields)
data = lab.load_dataset(dataset).first(train_samples, test_samples).resize(image_size)
probe = lab.Training(config, data)
dimension, layer_sizes = len(probe.theta_D), probe.flat.layer_sizes
k_global, k_local = probe.compressor.rule.k_global, probe.compressor.rule.k_local
print(f"The network has D = {dimension:,} parameters. K_global = {k_global}, K_local = {k_local}, and "
      f"there are N = {clients} clients.\nAn epoch has {probe.rounds_per_epoch} rounds. "
      f"Number of dense epochs at the start (warm-up): {warmup_epochs} of {epochs}.")  # fmt: skip
print(f"The data are images of {data.classes} classes ({data.label}).")
ticket = dataclasses.replace(config, epochs=ticket_epochs, warmup_epochs=0)
print(lab.forecast_trainings([config] * 7 + [ticket] * 4 * ticket_seeds))


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


def survivors(masks_TD, ages=2):
    """Of the entries that entered a mask, the fraction still in it 0, 1, ... `ages` rounds later."""
    count = max(1, len(masks_TD) - 1 - ages)  # masks that have so many after them
    still = (masks_TD[1:] & ~masks_TD[:-1])[:count]  # row t: what entered mask t + 1
    entered, share = still.sum(), [1.0]
    for age in range(1, ages + 1):
        still = still & masks_TD[1 + age :][:count]
        share.append(float(still.sum() / entered))
    return share


def raster(masks_TD, rows=60):
    """Entries drawn from those that are ever in these masks, in the order of their first round."""
    places = masks_TD.any(0).nonzero().squeeze(1)
    drawn = torch.randperm(len(places), generator=lab.generator_for(seed, 100))[:rows]
    seen_RT = masks_TD[:, places[drawn]].T.int()
    return seen_RT[seen_RT.argmax(1).argsort(stable=True)]


# %% jupyter={"source_hidden": true} tags=["remove-input"]
start = max(1, warmup_epochs * probe.rounds_per_epoch)  # the first sparse round of a TCS run
dense = follow(tcs.Scheme.named("FedAvg", local_steps=local_steps))
runs = {"TCS": follow(scheme)}
pair = {"TCS: the shared mask": runs["TCS"], "Dense training: the K largest": dense}
stay = {name: survivors(run["mask"][start - 1 :]) for name, run in pair.items()}
(one, two), (dense_one, dense_two) = (share[1:] for share in stay.values())
rest = (
    "TCS still learns: it" if runs["TCS"]["accuracy"] < dense["accuracy"] else "All the same, TCS"
)
answer = f"""**In short.** Entries that become large {"seldom" if max(two, dense_two) < 0.25 else "often"} stay large for long. When an entry has newly entered TCS's shared
mask, it is also in the mask of the next round in {one:.0%} of the cases. In only {two:.0%} of the cases it is in the masks of both of the next two
rounds. In dense training, we look at the entries that newly belong to the K_global largest of an update. Of these, {dense_one:.0%} also belong to
them in the next round, and {dense_two:.0%} in both of the next two. In dense training, an entry that has left returns more often than in TCS. {rest} reaches {runs["TCS"]["accuracy"]:.0%} test accuracy. Dense training, which sends every entry, reaches
{dense["accuracy"]:.0%}. These numbers come from one training of each, with {len(dense["mask"])} rounds."""
display(Markdown(answer))
window = dense["mask"][-40:].shape[0]
figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.9), sharey=True)
for axes, (name, run) in zip(panels, pair.items(), strict=True):
    rows = raster(run["mask"][-window:])
    extent = (len(dense["mask"]) - window + 0.5, len(dense["mask"]) + 0.5, len(rows), 0)
    axes.imshow(rows, cmap="Blues", vmax=1.2, aspect="auto", interpolation="none", extent=extent)
    axes.set(title=name, xlabel="round", yticks=[])
panels[0].set_ylabel(f"{len(rows)} of the positions in these masks")
lab.show_figures()

# %% [markdown]
# The left panel shows the last rounds of the training with TCS, and the right panel those of the dense training. Each row is one position,
# that is, one of the $D$ entries of the update, and each column is one round. The rows are a random sample of the positions that are in the
# mask in at least one of these rounds. A cell is dark if the entry is among the $K = K_{global}$ largest of that round's update. In TCS,
# these entries are the shared mask of the next round. The section *Why entries do not return to the mask of TCS* asks why entries that have
# left this mask seldom return soon.
#
# Three changes to try:
#
# - `phi_global = 0.05` (the fraction of all entries that are in the shared mask) makes this mask five times as large. In our trial, nearly all entries that entered it stayed for another round. The clients explore at most 200 entries per round, so at most 200 of the 1,000 can be replaced.
# - `epochs = 20` trains longer. In our trial, TCS stayed well below dense training. TCS with larger local masks ($K_{local} = 200$, in the section *Take the parts away*) reached the accuracy of dense training.
# - `phi_local = 1e-4` (the fraction of all entries that are in a client's own mask) lets each client send only two entries of its own per round, so the mask can only change slowly.
#
# ## One round in a picture
#
# TCS uses two masks, and each has its own purpose. The shared mask $m_{global}$ **exploits** what is known: it contains the positions that
# were important in the last update. Everybody has received that update, so the values at these positions are sent without the positions.
# The client's own mask $m_{local}$ **explores**: it contains the client's largest entries *outside* $m_{global}$. Their positions must be
# sent too, so this mask is small.
#
# The picture shows one round with two clients and 32 parameters. The updates are random numbers. The core, `tcs_core.py`, computes what is
# sent, what is kept and what the next shared mask is. Bars are absolute values. Look for a position that is not in the shared mask although
# both clients have a large entry there: both of them find it on their own, and it enters the next shared mask. And look for positions in
# the shared mask at which both clients have only small entries by now: these are sent all the same, and they leave the mask afterwards.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
draw_round()
lab.show_figures()

# %% [markdown]
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
# Below are the methods that contain most of these statements; what they call is in `tcs_core.py`. They also check their input, handle dense
# rounds, and avoid waiting for a GPU, so they are longer than the algorithm. You can ignore `fair`, `mask_factor`, `among_K`, `weights`,
# `quantizer`, `received` and `downlink`. They belong to options that this page does not use.
#
# When you read the code, it helps to know the following. A name that ends in `_D` is a vector with $D$ entries, and one that ends in `_K`
# has one entry for each chosen position. The core stores a mask as the *positions* that it contains: $m_{local}$ is the tensor `own_K`, and
# `positions_K` has the positions of both masks. Some masks are also stored as a vector of D booleans. For example, `shared_D` is the shared
# mask in this form. The object `known` holds what the server and all clients know, such as the shared mask. *Intended* is the sum of line
# 9. `in_flight` is the message that has been sent but has not yet arrived.
#
# We begin with the shared mask. `TCS.observe` is called at the end of a round, with the update. It computes line 5 of the next round.

# %%
lab.show_code(tcs.TCS.observe)

# %% [markdown]
# Now a client. `Client.message_of` does line 9, and `Client.message_from` does lines 10 to 12. For line 10 it calls `Client.own_positions`,
# which calls `MaskRule.own_mask`. (A `MaskRule` says how masks are chosen; `TCS` is one.) Line 9 adds the difference to the errors in place
# (`Client.intended`), so for a while the tensor `errors_D` contains all that the client intends to send. Therefore `Client.arrived` (line
# 13) needs to change `errors_D` only at the positions that were sent.

# %%
lab.show_code(tcs.Client.message_of, tcs.Client.intended, tcs.Client.message_from, tcs.Client.own_positions,
              tcs.MaskRule.own_mask, tcs.Client.arrived)  # fmt: skip

# %% [markdown]
# Finally the server. It has already added up the clients' messages when `Server.average` computes line 15 and `Server.reply` makes the
# message of line 16.

# %%
lab.show_code(tcs.Server.average, tcs.Server.reply)

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
    """Algorithm 2 without line 7: the messages, and the update."""
    known.begin()
    messages = [client.send(delta_D) for client, delta_D in zip(both, deltas_ND, strict=True)]
    for client, message in zip(both, messages, strict=True):
        server.add(client.number, message)
    update_D, _ = server.finish()  # lines 15 and 16
    for client in both:
        client.arrived()
    known.observe(update_D)
    return messages, update_D


# %% tags=["nbval-check-output"]
_ = one_round(before)  # the first round is dense: there is no update yet to take a mask from
print("                     0 1 2 3 4 5 6 7 8 9")
for number in range(2, 11):
    deltas_ND = before if number < 3 else after
    meant_D = torch.stack([client.errors_D for client in both]).add(deltas_ND).mean(0)
    messages, update_D = one_round(deltas_ND)
    for n, message in enumerate(messages):
        print(f"round {number:2d}, client {n}:  {letters(known.shared_K, message.positions)}")
    waiting_D = torch.stack([client.errors_D for client in both]).mean(0)
    assert torch.allclose(meant_D, update_D + waiting_D)

# %% [markdown]
# In round 3, client 0 finds position 7 with its own mask. From round 4 on, position 7 is in the shared mask, so only its value is sent.
# Position 4 has left the shared mask. In every round, each client's own mask chooses the entry outside the shared mask where the difference
# plus the accumulated error is largest. In rounds 4 to 6 this is position 4. In round 7 it is position 6, where small differences have
# added up. So nothing is sent at position 4 in round 7, and in round 8 each client sends the differences of two rounds there at once.
# Together they are larger than the single difference at position 1. Therefore position 4 replaces position 1 in the shared mask of round 9.
# In round 9, both clients send position 1 with their own masks. Its difference is larger than the single one at position 4, so position 1
# is in the shared mask again in round 10. The `assert` checks that nothing is lost: what the clients intended to send equals what was sent
# plus the accumulated errors.
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
# **What do you expect?** Take the $K_{global}$ largest entries of one dense update. Are more than half of them among the $K_{global}$
# largest of the next update, or fewer?
#
# We return to the dense training (FedAvg) of the first picture. The overlap of two masks is the fraction of positions that they have in
# common. For two random masks it would be $K/D$.
#
# $$\text{overlap}(t, t+1) = \frac{|m_t \cap m_{t+1}|}{K}$$
#
# However, it is easy to exceed $K/D$. If small layers contain many of the large entries, masks overlap even if the positions *inside* each
# layer are random. We therefore also compute a stricter chance level. Let $k_l(t)$ be the number of entries that the mask has in layer $l$,
# and $d_l$ the size of that layer. If the positions inside each layer are random, the overlap is on average:
#
# $$\text{chance within layers} = \frac{1}{K} \sum_l \frac{k_l(t)\, k_l(t+1)}{d_l}$$


# %%
def overlaps(masks_TD, lag):
    return (masks_TD[:-lag] & masks_TD[lag:]).sum(1) / k_global


# %%
counts_TL = torch.stack([part.sum(1) for part in dense["mask"].split(layer_sizes, 1)], 1)
expected_TL = counts_TL[:-1] * counts_TL[1:] / torch.tensor(layer_sizes)
by_layer_T = expected_TL.sum(1) / k_global
chance = k_global / dimension
measured = float(overlaps(dense["mask"], 1).mean())
word = "more" if measured > 0.5 else "fewer"
layers = float(by_layer_T.mean())
print(f"The measured overlap is {measured:.2f}, so {word} than half of the entries stay. Random masks would overlap by "
      f"{chance:.2f}.\nRandom masks with the same number of entries in each layer would overlap by {layers:.2f}.")  # fmt: skip


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def line(i, every=None, dash=0):
    look = lab.series_style(i) | {"linestyle": lab.tables.DASHES[dash], "linewidth": 1.5}
    return look | ({"markersize": 5, "markevery": every} if every else {"marker": ""})


figure, axes = plt.subplots(figsize=(7.6, 3.2))
later = range(2, len(dense["mask"]) + 1)
axes.plot(later, overlaps(dense["mask"], 1), label="measured", **line(2, 12))
axes.plot(later, by_layer_T, label="chance within layers", **line(1, 12, dash=1))
axes.axhline(chance, label="chance over all entries, K/D", **line(0, dash=3))
axes.set(title="Dense updates: overlap with the round before", ylim=(0, 1))
axes.set(xlabel="round", ylabel="share of the K largest in common")
axes.legend(frameon=False, ncols=3, loc="upper center")
lab.show_figures()

# %% [markdown]
# That the same entries are large in consecutive rounds is the *correlation in time* that gave TCS its name. We measure it as the distance
# between the measured line and the line *chance within layers*. Most of the overlap is there only because the large entries are in the same
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


# %% [markdown]
# So the mask of TCS does **not** change slowly.
#
# ## What the server sends back
#
# With top-K every client chooses its own positions (here $K = K_{global}$ of them), so the average can have up to $N K$ non-zero entries.
# With TCS, every round after the dense ones satisfies
#
# $$|\operatorname{supp}(\Delta\theta_t)| \le K_{global} + N K_{local}$$

# %%
runs["top-K"] = follow(tcs.Scheme.named("top-K", phi_local=phi_global, **sizes))
bound = k_global + clients * k_local
shares = {k: run["support"][start:].sum(1) / dimension for k, run in runs.items()}
largest = {k: int(run["support"][start:].sum(1).max()) for k, run in runs.items()}
for name, share in shares.items():
    print(f"The server's message of {name} has {share.mean():.1%} of all entries on average, and at most "
          f"{largest[name] / dimension:.1%}.")  # fmt: skip
print(f"For TCS the bound is {bound} entries, or {bound / dimension:.1%} of all.")  # fmt: skip

figure, axes = plt.subplots(figsize=(7.6, 3.2))
rounds = range(start + 1, len(dense["mask"]) + 1)
for name in ("top-K", "TCS"):
    look = lab.curve_style(name) | {"markersize": 5, "markevery": 12}
    axes.plot(rounds, 100 * shares[name], label=name, **look)
axes.axhline(100 * bound / dimension, label="bound of TCS", **line(0, dash=3))
axes.set(title="Entries in the server's message", xlabel="round", ylabel="% of all entries")
axes.set_ylim(0, 1.3 * 100 * float(shares["top-K"].max()))
axes.legend(frameon=False, ncols=3, loc="upper center")
lab.show_figures()

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
# Without the local mask, the mask stays as it is at the end of the warm-up. After that, only the parameters at the positions in this mask
# change. What the clients learn at other positions never reaches the server. Without error accumulation, the clients explore, but what they
# do not send is lost.
#
# TCS scores below dense training here. One reason may be that all clients together send few different entries per round (last column). With
# larger local masks, they send more, and the accuracy of TCS comes closer to that of dense training. Top-K, too, sends more different
# entries, and reaches the accuracy of dense training.
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
# To check this, we train with TCS once more, and measure in the first two epochs after the dense one. We compare the accumulated errors at
# an entry with the clients' differences of the current round:
#
# $$\text{ratio} = \frac{\text{mean of } |e_{n,t-1}|}{\text{mean of } |\Delta\theta_{n,t}|}$$
#
# We compute this ratio for three groups of entries: those that a client explores in this round, those that are new in the shared mask, and
# the rest of the shared mask. The means are over all clients and all entries of a group. We also ask how many of the explored entries the
# clients would have chosen without accumulated errors, that is, if $S_{top}$ had looked only at the differences of the round. We compute
# this fraction in every round, and a 95 % interval for its mean over the rounds. The statement that the cell prints is *supported* if the
# whole interval lies below one half.


# %%
def pile(errors_ND, deltas_ND, places):
    return float(errors_ND[:, places].abs().mean() / deltas_ND[:, places].abs().mean())


def chosen_anyway(deltas_ND, shared_D, explored_D):
    """Of the explored entries, the fraction that the differences alone would choose."""
    own = [tcs.top_k_positions(delta_D, k_local, shared_D) for delta_D in deltas_ND]
    return float(explored_D[torch.cat(own).unique()].sum() / explored_D.sum())


federation, piles, without = lab.Training(config, data, keep_deltas=True), [], []
errors_ND, older_D, old_D = federation.compressor.errors_ND.clone(), None, None
for epoch in range(warmup_epochs + 3):
    for update_D in federation.rounds(epoch):
        if epoch > warmup_epochs:
            kinds = (update_D != 0) & ~old_D, old_D & ~older_D, old_D & older_D
            piles.append([pile(errors_ND, federation.deltas_ND, kind) for kind in kinds])
            without.append(chosen_anyway(federation.deltas_ND, old_D, kinds[0]))
        older_D, old_D = old_D, tcs.top_k_mask(update_D, k_global)
        errors_ND.copy_(federation.compressor.errors_ND)
explored, newcomers, others = torch.tensor(piles).mean(0).tolist()
print(f"An accumulated error is {explored:.1f} times as large as the round's difference at explored entries,\n"
      f"{newcomers:.1f} times at entries that are new in the mask, and {others:.1f} times at the rest of the mask.")  # fmt: skip
fewer, half = lab.paired_gain([0.5] * len(without), without)
print(f"From the differences alone, the clients would have chosen {torch.tensor(without).mean():.0%} of the "
      "entries that they explored.")  # fmt: skip
claim.judge(
    "most entries are explored because of errors that have accumulated there",
    lab.judge_mean(fewer, half),
)

# %% [markdown]
# Entries that have been in the mask for longer have no accumulated error, because line 13 has set it to zero. Such an entry is soon
# exceeded by others with large accumulated errors, and leaves the mask.
#
# So $m_{local}$ finds entries that are important *for the moment*.

# %% [markdown]
# ## Would one fixed mask do as well?
#
# The paper refers to *lottery tickets*: small parts of a network that can be trained on their own. If there are such parts, there may also
# be one good mask for the whole training, and no search would be necessary. We look for such a mask in a finished run of TCS. Then we start
# again from the same initial weights and keep one mask for the whole training. We try three such masks:
#
# - the last shared mask of the run,
# - the $K_{global}$ positions at which the weights θ end farthest from their initial values,
# - positions drawn at random, for comparison.
#
# For each seed, we first train with TCS and take the first two masks from this run. The third is drawn at random. Then we train once with
# each of the three masks, without masks of the clients' own. The first round of all these runs is dense. From the second round on, the runs
# with a fixed mask send only the entries in it. These runs are shorter than those above and have no dense epoch, so their losses cannot be
# compared with the losses above.
#
# **What do you expect?** Which of the three masks comes closest to TCS?


# %%
def trained(number, mask_D=None):
    """Loss of the last epoch, where θ moved farthest, last shared mask; with one mask, if given."""
    only = scheme if mask_D is None else dataclasses.replace(scheme, phi_local=None)
    changes = {"scheme": only, "seed": number, "warmup_epochs": 0, "epochs": ticket_epochs}
    one = lab.Training(dataclasses.replace(config, **changes), data)
    first_D, rule = one.theta_D.clone(), one.compressor.rule
    for epoch in range(ticket_epochs):
        for _ in one.rounds(epoch):
            if mask_D is not None:
                rule.observe(mask_D.float())  # S_top of it gives the same positions again
    loss = float(one.loss_sum) / (one.rounds_per_epoch * clients * local_steps)
    moved_D = tcs.top_k_mask(one.theta_D - first_D, k_global)
    return loss, moved_D, tcs.positions_to_mask(rule.positions, dimension)


# %%
rows = []
for number in lab.follow(range(seed + 1, seed + 1 + ticket_seeds), "seeds"):
    loss, farthest_D, last_D = trained(number)
    drawn = torch.rand(dimension, generator=lab.generator_for(number, 100))
    masks_D = {"last shared mask of TCS": last_D, "where θ moved farthest": farthest_D,
               "random": tcs.top_k_mask(drawn, k_global)}  # fmt: skip
    losses = {name: trained(number, mask_D)[0] for name, mask_D in masks_D.items()}
    rows.append({"TCS": loss} | losses)
rows = pd.DataFrame(rows)
behind = {n: lab.paired_gain(rows[n], rows["TCS"]) for n in rows}
above = ["–", *(f"{mean:+.2f} ± {half:.2f}" for mean, half in list(behind.values())[1:])]
ends = [f"{mean:.2f}" for mean in rows.mean()]
names = ["changes in every round (TCS)", *(f"fixed: {name}" for name in list(rows)[1:])]
table = {"mask": names, "training loss": ends, "difference to TCS (95 % interval)": above}
best = "where θ moved farthest"
as_well = lab.judge_mean(-behind[best][0], behind[best][1])  # whether TCS's loss is the higher one
display(Markdown(lab.markdown(pd.DataFrame(table))))
print(f"These are means over n = {len(rows)} seeds.\n"
      f"Is the loss of the mask {best} really higher than that of TCS? This is {as_well}.")  # fmt: skip

# %% [markdown]
# (*Open* means that the interval of the difference contains 0, before rounding.) [Notebook 13](13_evidence.ipynb) uses a different random
# mask, which did about as well as TCS on CIFAR-10: it is drawn anew in every round, and each client adds entries of its own.
#
# ## Six more checks
#
# The next cell checks six more statements. (One was checked above.) The first three follow from the algorithm. The other three are measured
# in one training of each scheme. For the last two, TCS has to end with a training loss that is lower by more than 0.02, a limit that we
# chose. We do not test here whether positions change *little*. In this training, most positions change. [13_evidence](13_evidence.ipynb)
# judges it from longer trainings.

# %%
final = {name: run["loss"][-1] for name, run in runs.items()}
places = int(masks["no local mask"].any(0).sum())
claim("the server's message has no more entries than its bound allows", largest["TCS"] <= bound,
      f"at most {largest['TCS']} entries; the bound is {bound}")  # fmt: skip
claim("clients explore at most N · K_local entries", int(explored_T.max()) <= clients * k_local)
claim(
    "without a local mask the shared mask never changes",
    places == k_global,
    f"{places} entries were ever in it",
)
claim("masks of consecutive dense updates overlap more than by chance within the layers", measured > layers,
      f"{measured:.2f} against {layers:.2f}")  # fmt: skip
for name in ("no local mask", "no error accumulation"):
    claim(f"TCS ends with a lower loss than with {name}", final[name] - final["TCS"] > 0.02,
          f"{final['TCS']:.2f} against {final[name]:.2f}")  # fmt: skip

# %% [markdown]
# ## Exercises
#
# Replace each `return None` by your own lines. The cell then compares your function with the core.
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
# ## What we saw

# %%
at_two, quiet = (float(overlaps(masks[n], 2).mean()) for n in ("TCS", "no error accumulation"))
often = (len(masks["TCS"]) - 1) * k_global / dimension
display(Markdown("- " + claim.summary("**{}**").replace("\n", "\n- ") + f"""
- In dense training, {measured:.0%} of the positions in a mask were also in the mask of the round before. If the positions inside the layers were random, with
  the measured numbers of entries in each layer, {layers:.0%} would be in both masks. If all positions were random, it
  would be {chance:.0%}. So {100 * (measured - layers):.0f} percentage points of the overlap are beyond chance within the layers.
- In each round {turnover:.0%} of TCS's shared mask is new, and masks two rounds apart have {at_two:.0%} of their entries in common. Without error
  accumulation, masks two rounds apart have {quiet:.0%} in common. In each round, the clients together can explore {clients * k_local} entries, and the shared mask has {k_global} positions.
  In the paper, too, these two numbers are equal. So explored entries could replace the whole mask in one round. This turnover and these overlaps are
  results of TCS itself: its masks and its accumulated errors decide which entries of the update become large. The overlap in dense training above shows only roughly whether the same entries would be large again without TCS. Notebook [13_evidence](13_evidence.ipynb) tests this in larger trainings.
- We also asked whether one fixed mask (the positions {best}) does as well as the changing masks of TCS. The answer: **{as_well}** (n = {len(rows)} seeds;
  the losses are above).
- This training shows how the schemes start, not how they end. It has {len(masks["TCS"]) - 1} rounds after the warm-up, and in each of them {phi_global:.0%} of
  the entries are in the shared mask. So an entry is in the shared mask in {often:.1f} rounds on average. In the paper's 23,400 rounds, it is 234.
"""))  # fmt: skip

# %% [markdown]
# **Does the shared mask have to follow the last update?** This notebook does not test that. In our main comparison on CIFAR-10, a shared
# mask that is drawn at random in every round did about as well as that of TCS ([13_evidence](13_evidence.ipynb), *Is it time
# correlation?*). What both have in common is that all clients share a mask, that each client adds entries of its own, and that everything
# else is kept for later. Perhaps this is what matters, and not which positions are shared.
#
# Next, [04_layerwise_fairness](04_layerwise_fairness.ipynb) shows which layers contain the large entries, and
# [05_global_momentum](05_global_momentum.ipynb) adds momentum.

# %%
print(f"Made with {lab.describe_core()} and torch {torch.__version__}, on {data.label}. "
            f"The section on fixed masks uses {ticket_seeds} seeds. All other sections use one.")  # fmt: skip
