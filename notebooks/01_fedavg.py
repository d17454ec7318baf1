# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Train one model at many clients: federated averaging
#
# **In short.** Clients may send differences or models: the averages agree. Several local steps send fewer messages, and are no longer
# the step that SGD takes. Only a difference can be cut: its largest tenth does as much as the whole, the largest tenth of a model is useless.
#
# After this notebook you will be able to
#
# - work out a round of federated averaging by hand,
# - say what more local steps save, and what they change.
#
# **Claim (Sec. I-A and I-B, Alg. 1, Eq. 3, Fig. 1).** A server that adds the average of its clients'
# *model differences* takes the same step as one that averages their *models*; with one local step
# (H = 1) it is the step that SGD takes with the average gradient.
#
# *Run time*: about 20 s on two cores of a Xeon. *Read before*: the README.
#
# Each notebook has a twin in plain text (`.py`) to edit anywhere: saving either in JupyterLab writes both.

# %% jupyter={"source_hidden": true}
import copy
import dataclasses
from typing import Annotated

import matplotlib.pyplot as plt
import tcs_lab as lab
import torch
import torch.nn.functional as F
from annotated_types import Len
from matplotlib.patches import FancyBboxPatch

import tcs_core as tcs

torch.set_num_threads(1)

# %% [markdown]
# ## Parameters
#
# Change any of them and run all again. Text between the cells describes what these values give;
# *Claim* and *What we saw* are worked out anew.

# %% jupyter={"source_hidden": true} tags=["parameters"]
profile = "ci"  # folder under results/ for the figure
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 1000  # training images of all clients together
test_samples = 1000  # test images
image_size = 16  # pixels a side, averaged from more; None: as they are
model = "resnet8"  # resnet8 or resnet18
width = 8  # channels of its first stage
clients = 4  # N
local_steps = [1, 2, 4]  # H of the runs compared; the round taken apart has the last one
batch_size = 8  # B, samples of one local step
epochs = 5  # passes over the data
learning_rate = 0.2  # eta after the warm-up
reference_batch = None  # cumulative batch at which learning_rate holds; None: not scaled
drops = [0.6]  # when eta is divided by 10, as shares of the epochs
weight_decay = 1e-4  # L2, part of every local gradient
seed = 0  # of everything random

# %% jupyter={"source_hidden": true}
params = lab.notebook_params(globals(), complete=False)
claim = lab.Statements(globals(), "01_fedavg")
lab.check_values(globals(), local_steps=Annotated[list[lab.Count], Len(1)], seed=lab.Seed)
fields = {k: v for k, v in params.items() if k in lab.RUN_KEYS} | {"seed": seed, "device": "cpu"}
config = lab.RunConfig(scheme="FedAvg", **fields)
data = lab.load_dataset(dataset).first(train_samples, test_samples).resized(image_size)
training = lab.Training(config, data)
dimension = len(training.theta_D)
print(f"D = {dimension:,} parameters, N = {clients} clients, {data.label} images")

# %% [markdown]
# ## The federation
#
# N clients hold data that never leave them. A server holds the model, one long vector θ of D numbers.
# In round t it sends θ to all; each client takes H steps of SGD on batches of its own data and sends
# back what that changed. The training images are dealt out at random, equally many to each client.
#
# $$\min_{\theta\in\mathbb{R}^D}\; \frac{1}{N}\sum_{n=1}^{N} f_n(\theta),\qquad
# f_n(\theta)=\text{mean loss over the data of client } n \quad (\text{Eq. 1})$$


# %% jupyter={"source_hidden": true}
def box(axes, x, y, width, height, text, size=10):
    style = {"boxstyle": "round,pad=0.12", "facecolor": "white", "linewidth": 1.8, "zorder": -1}
    axes.add_patch(FancyBboxPatch((x, y), width, height, **style))
    where = {"ha": "center", "va": "top", "linespacing": 1.7, "fontsize": size}
    axes.text(x + width / 2, y + height, text, **where)


def arrow(axes, x, start, end, text, colour, dash, align):
    style = {"arrowstyle": "-|>", "color": colour, "linestyle": dash, "linewidth": 2.2}
    axes.annotate("", (x, end), (x, start), arrowprops=style)
    shift = -0.12 if align == "right" else 0.12
    dark = lab.text_colour(colour)
    axes.text(x + shift, 3.2, text, color=dark, ha=align, va="center", fontsize=13)


def draw_client(axes, x, name, n):
    box(axes, x, 0.2, 2.6, 1.9, f"client {name}\nH steps of SGD on own data")
    for i, sample in enumerate(training.samples_NM[n, :4]):
        extent = (x + 0.1 + 0.62 * i, x + 0.64 + 0.62 * i, 0.4, 1.06)
        axes.imshow(data.train_images[sample], extent=extent, aspect="auto")
    arrow(axes, x + 1.0, 4.25, 2.25, r"$\theta_t$", lab.COLOURS[1], "-", "right")
    sent = rf"$\Delta\theta_{{{name},t}}$"
    arrow(axes, x + 1.6, 2.25, 4.25, sent, lab.COLOURS[2], "--", "left")


def draw_server(axes):
    rule = r"$\theta_{t+1} = \theta_t + \frac{1}{N}\,\sum_n\,\Delta\theta_{n,t}$"
    box(axes, 0.2, 4.4, 10.4, 0.6, f"server:   {rule}", 14)


drawing, axes = plt.subplots(figsize=(8.4, 4.6), layout="constrained")
for x, name, n in ((0.2, "1", 0), (3.6, "2", min(1, clients - 1)), (8.0, "N", clients - 1)):
    draw_client(axes, x, name, n)
draw_server(axes)
axes.text(7.1, 1.15, "…", fontsize=24, ha="center", va="center")
axes.plot([], [], color=lab.COLOURS[1], lw=2.2, label="down: the model, the same to all")
axes.plot([], [], color=lab.COLOURS[2], lw=2.2, ls="--", label="up: what local training changed")
axes.set(xlim=(0, 10.8), ylim=(0, 5.2), title="Fig. 1: one round of federated averaging")
axes.set_axis_off()
drawing.legend(loc="outside lower center", ncols=2, frameon=False)
lab.save_figure(drawing, lab.results_folder(profile) / "figure1")
plt.show()

# %% [markdown]
# A box shows four of its client's images. Only the arrows are traffic; the images stay.
#
# ## Algorithm 1
#
# The core's `LocalTrainer` runs it for all clients in turn, in one process. `local_training` is lines 3 to 6, with the backward passes
# in `_steps`; line 8 adds what the server makes of the clients' messages. A client's gradients add up in `gradient_D`;
# multiplied by −η they are the model difference. $g^{\tau}_{n,t}$ is the gradient on client n's τ-th batch of round t, with weight decay.
#
# $$\theta^{\tau}_{n,t}=\theta^{\tau-1}_{n,t}-\eta_t\,g^{\tau}_{n,t},\quad \tau=1,\dots,H;\qquad
# \theta_{t+1}=\frac{1}{N}\sum_{n=1}^{N}\theta^{H}_{n,t}$$

# %%
lab.show_code(tcs.LocalTrainer.local_training, tcs.LocalTrainer._steps)

# %% [markdown]
# `_steps` makes one backward pass after another (line 5); between two of them comes the local step (line 6). `put` copies
# into the module's own parameters; `add_gradients_` adds up the gradients that a backward pass left at them. With H = 1 no local step is taken.
#
# ## What H buys
#
# More local steps mean fewer messages for the same passes over the data. Here the message is the
# whole model, 32 bits a parameter; one local iteration then costs
#
# $$\frac{32}{H}\ \text{bits per parameter, each way.}$$
#
# **What do you expect?** After the same passes over the data, does H = 4 end above H = 1, or below?


# %% jupyter={"source_hidden": true}
def train(steps):
    scheme = tcs.Scheme.named("FedAvg", local_steps=steps)
    trained = lab.Training(dataclasses.replace(config, scheme=scheme), data, keep_deltas=True)
    curve = [trained.epoch(epoch) | trained.evaluate() for epoch in range(epochs)]
    return trained, curve


runs = {steps: train(steps) for steps in lab.followed(local_steps, "runs")}
for steps, (_, curve) in runs.items():
    rounds, accuracy = curve[-1]["rounds"], 100 * curve[-1]["accuracy"]
    print(f"H = {steps}: {rounds:2d} rounds an epoch, {32 / steps:4.1f} bits, {accuracy:.1f} %")

drawing, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for i, (steps, (_, curve)) in enumerate(runs.items()):
    accuracy = [100 * row["accuracy"] for row in curve]
    look = lab.series_style(i)
    panels[0].plot([row["epoch"] for row in curve], accuracy, label=f"H = {steps}", **look)
    panels[1].plot([row["epoch"] * row["rounds"] for row in curve], accuracy, **look)
panels[0].locator_params(axis="x", integer=True)
panels[0].set(xlabel="epochs", ylabel="test accuracy (%)", title="The same passes over the data …")
panels[1].set(xlabel="rounds (messages of each client)", title="… in fewer messages")
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# On the right, larger H gets further with the same number of messages. On the left it ended lower after the same passes, in one run
# of each; a likely reason is too few rounds. In the paper, at 300 epochs, TCS loses nothing at H = 2 and 4; [13_evidence](13_evidence.ipynb) judges that.
#
# ## One round by hand
#
# Now one round of the last run, in plain PyTorch: every client copies the model, runs
# `torch.optim.SGD` over its batches, and hands its *model* back. The core does the same round.


# %%
def theta_of(net):  # all its parameters in one vector (D,), in the core's order
    flat = tcs.FlatView(net)
    theta_D = torch.empty(flat.dimension)
    flat.read_(flat.views(theta_D))
    return theta_D


def small_steps(batches, eta):  # Alg. 1, lines 3 to 7: one step a batch, one after the other
    net = copy.deepcopy(training.flat.model).train()  # line 3: pull theta_t
    sgd = torch.optim.SGD(net.parameters(), lr=eta, weight_decay=weight_decay)
    for images, labels in batches:
        sgd.zero_grad()
        F.cross_entropy(net(images), labels).backward()  # line 5
        sgd.step()  # line 6
    return theta_of(net)  # line 7: push the model, (D,)


# %%
H, training = local_steps[-1], runs[local_steps[-1]][0]
eta, most = learning_rate / 2, training.rounds_per_epoch * H  # local steps an epoch has batches for


def batch(n, tau):  # of the first epoch, from its first round on
    return training.feed.batch(n, 0, tau)


start_D = training.theta_D.clone()
models_ND = torch.stack([small_steps([batch(n, t) for t in range(H)], eta) for n in range(clients)])

# %%
average_D = models_ND.mean(0)  # line 8: federated averaging, of models
with training.federation.trainer.lent():  # the core's round, at this rate
    update_D = training.federation.exchange(list(range(clients)), 0, eta)
    training.federation.move(update_D, eta)  # of theta_D
gap_core = float((average_D - training.theta_D).norm() / update_D.norm())
training.flat.put(training.flat.views(average_D))  # below, from the round by hand
print(f"by hand against the core: {lab.number(gap_core, 1)} of the update's length")

# %% [markdown]
# They agree to a fraction of a percent at most, usually to float32 rounding: the two add up the local
# steps in a different order, and that may push a unit over the kink of its ReLU.
#
# ## Send differences, not models
#
# The average of the models is the old model plus the average of the differences, so a client may send
# either:
#
# $$\theta_{t+1}=\theta_t+\frac{1}{N}\sum_{n=1}^{N}\Delta\theta_{n,t},\qquad
# \Delta\theta_{n,t}=\theta^{H}_{n,t}-\theta_t=-\eta_t\sum_{\tau=1}^{H}g^{\tau}_{n,t}\quad(\text{Eq. 3})$$

# %%
differences_ND = models_ND - start_D
moved_D = start_D + differences_ND.mean(0)
gap_models = float((moved_D - average_D).abs().max() / average_D.abs().max())
gap_deltas = float((differences_ND - training.deltas_ND).norm() / differences_ND.norm())
gap = lab.number(gap_models, 1)
print(f"theta + mean difference against mean model: {gap} of the largest parameter")
print(f"differences of models against the core's sums of gradients: {lab.number(gap_deltas, 1)}")

# %% [markdown]
# Two small numbers: both forms of Eq. 3 are the same.
#
# Without compression the choice is free. With it, it is not: an entry left out of a *difference*
# leaves that parameter as it was; an entry left out of a *model* sets it to zero. Below, only
# the largest tenth of one or the other is kept. A single round changes the loss too little to show it, so the difference is
# that of all rounds of an epoch.

# %%
trained = lab.Training(runs[local_steps[0]][0].config, data)
for epoch in range(min(3, epochs)):
    before_D = trained.theta_D.clone()
    trained.epoch(epoch)
after_D, k = trained.theta_D.clone(), tcs.kept(0.1, dimension)
epoch_D = after_D - before_D
cut = {
    "nothing": before_D,
    "everything": after_D,
    "largest tenth of the difference": before_D + epoch_D * tcs.top_k_mask(epoch_D, k),
    "largest tenth of the model": after_D * tcs.top_k_mask(after_D, k),
}
loss = {}
for name, theta_D in cut.items():
    trained.flat.put(trained.flat.views(theta_D))  # into the module
    loss[name] = trained.evaluate()["loss"]
    print(f"{name:32s} test loss {loss[name]:.2f}")
gain = {name: loss["nothing"] - found for name, found in loss.items()}

# %% [markdown]
# The epoch lowers the loss, and the largest tenth of its difference does that alone; the cut model is worse than no
# epoch at all. This is why every scheme in this package compresses Δθ.
#
# ## FedSGD is FedAvg at H = 1
#
# If clients take one step, the server may as well collect gradients, average them and take the step
# itself. With H > 1 that shortcut is an approximation: later gradients are taken at a model that has
# moved. `large_step` is the server's view: all gradients at θ, one step.
#
# $$H=1:\quad \theta_{t+1}=\theta_t-\eta_t\,\frac{1}{N}\sum_{n=1}^{N} g_{n,t}$$


# %%
def large_step(batches, eta):  # one step with the batches' average gradient, all taken at theta_t
    net = copy.deepcopy(training.flat.model).train()
    for images, labels in batches:
        (F.cross_entropy(net(images), labels) / len(batches)).backward()
    torch.optim.SGD(net.parameters(), lr=eta, weight_decay=weight_decay).step()
    return theta_of(net)


def gap_between(first_D, second_D):  # in units of the second one's step
    return float((first_D - second_D).norm() / (second_D - average_D).norm())


# %%
gap_fedsgd = {}
for steps in [h for h in (1, 2, 4, 8) if h <= most]:
    work = [[batch(n, tau) for tau in range(steps)] for n in range(clients)]
    fedavg_D = torch.stack([small_steps(own, eta) for own in work]).mean(0)
    gap_fedsgd[steps] = gap_between(
        fedavg_D, large_step([b for own in work for b in own], steps * eta)
    )
for steps, gap in gap_fedsgd.items():
    print(f"H = {steps}: they differ by {lab.number(gap, 2)} of the step")

# %% [markdown]
# At H = 1 the two differ by rounding, beyond it by much. That is not a defect:
# local steps follow the curve of the loss, where one long step cannot.
#
# ## The learning rate: linear scaling
#
# The rule: a batch k times larger takes a step k
# times longer, because k small steps in a row would have gone about as far. The paper starts from
# η = 0.1 at batch 128, so for N clients
#
# $$\eta = 0.1\cdot\frac{N\,B}{128}.$$
#
# How good is "about"? Below, k steps of η in a row against one step of k·η on the same k batches:
# their distance, in units of the long step.

# %%
rates = (0.003, 0.03, 0.3)
table = ["k batches   " + "".join(f"{f'eta {rate:g}':>12s}" for rate in rates)]
for k in sorted({min(k, clients) for k in (2, 4, 8)}):
    work = [batch(n, 0) for n in range(k)]
    gaps = [gap_between(small_steps(work, rate), large_step(work, k * rate)) for rate in rates]
    table.append(f"{k:9d}   " + "".join(f"{100 * gap:10.0f} %" for gap in gaps))
print("\n".join(table))

# %% [markdown]
# The rule is good while steps are short and poor when k·η is large. The usual
# remedy, which the paper takes too, is to reach the scaled rate slowly.
#
# ## Warm-up and drops
#
# The rate rises linearly, for ten clients from 0.1, during the first 5 of 300 epochs; after epochs 150
# and 225 it is divided by 10. (In the warm-up everything is sent dense as well.) `RunConfig` with its defaults is this
# schedule; only the number of clients changes here.

# %% tags=["nbval-check-output"]
paper = {n: lab.RunConfig(scheme="TCS", clients=n) for n in (5, 10, 20)}
baseline = lab.RunConfig(scheme="Baseline")  # centralized, batch 128
moments = (0, 2.5, 5, 149, 150, 225)
print("eta at epoch  " + "".join(f"{epoch:>9g}" for epoch in moments))
for n, run in paper.items():
    print(f"N = {n:2d}        " + "".join(f"{run.learning_rate_at(e):9.4g}" for e in moments))

# %% jupyter={"source_hidden": true}
drawing, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
schedules = {f"N = {n}": run for n, run in paper.items()} | {"Baseline": baseline}
for panel, last in zip(panels, (300, 10), strict=True):
    moments = [last * i / 600 for i in range(600)]
    for i, (name, run) in enumerate(schedules.items()):
        look = lab.curve_style(name) if name == "Baseline" else lab.series_style(i + 1)
        curve = [run.learning_rate_at(epoch) for epoch in moments]
        panel.plot(moments, curve, label=name, markevery=(30 * i, 120), markersize=5, **look)
panels[0].set(xlabel="epoch", ylabel="learning rate η", yscale="log", title="All 300 epochs")
panels[1].set(xlabel="epoch", ylabel="learning rate η", title="The warm-up")
lab.plain_log(panels[0].yaxis)
panels[0].legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# That is η = 0.5 for the paper's ten clients, half or twice that for half or twice as many, and
# a constant 0.1 for centralized training until the common drops. That the start scales, too, is our choice: the paper has ten clients.
#
# ## Batch norm: what a client's batch decides
#
# ResNets have batch norm. In training it normalizes with the mean and variance of *the batch at
# hand*, so N clients with B images each are not quite one batch of N·B images, even at H = 1.

# %%
work = [batch(n, 0) for n in range(clients)]
together = [(torch.cat([images for images, _ in work]), torch.cat([labels for _, labels in work]))]
many_D, one_D = (large_step(batches, eta) - average_D for batches in (work, together))
alike = float(F.cosine_similarity(many_D, one_D, dim=0))
print(
    f"{clients} batches of {batch_size} against 1 batch of {clients * batch_size}: cosine {alike:.2f}"
)

# %% [markdown]
# The cosine is clearly below 1: small batches are noisy to normalize with. (Without batch
# norm the two steps would be equal.)
#
# ## Batch norm: running statistics cost nothing in training
#
# Beside θ, batch norm keeps running means and variances r. Training only *writes* them; they are read
# when the model is evaluated. To see it, two copies of a trained federation train for one more epoch,
# and one of them starts it with wildly wrong statistics.
#
# $$r \leftarrow (1-m)\,r + m\,b,\qquad b = \text{statistics of the batch},\; m = 0.1$$

# %%
calm, wild, often = (lab.Training(config, data) for _ in range(3))
for one in (calm, wild, often):
    one.load_state_dict(runs[local_steps[0]][0].state_dict())
wild.statistics_NS.uniform_(1e5, 1e6, generator=lab.generator_for(seed, 101))
for name, one in (("calm", calm), ("wild", wild)):
    one.epoch(epochs - 1)
    print(f"{name} statistics: test accuracy {100 * one.evaluate()['accuracy']:.1f} %")
same_theta = torch.equal(calm.theta_D, wild.theta_D)
print(f"theta after these {calm.rounds_per_epoch} rounds the same, bit for bit: {same_theta}")

# %% [markdown]
# θ is the same, bit for bit, and the wild copy's test accuracy is near chance: it is only
# the evaluation that reads the statistics.
#
# So clients need not send them every round. And it makes no difference when they are averaged: the
# rule above is linear in r and b, so the average over clients obeys the same rule. Here the third copy
# averages after every round, the calm one only now, at the end.

# %%
for _ in often.rounds(epochs - 1):
    often.statistics_NS[:] = often.statistics_NS.mean(0)
once_S, often_S = calm.statistics_NS.mean(0), often.statistics_NS.mean(0)
gap_statistics = float((once_S - often_S).norm() / once_S.norm())
print(f"averaged once against every round: {lab.number(gap_statistics, 1)}; same theta: "
      f"{torch.equal(calm.theta_D, often.theta_D)}")  # fmt: skip

# %% [markdown]
# The two differ by rounding only. What remains is the cost of one evaluation, 32 bits for each statistic from every
# client; records keep it apart (`batch_norm_bits`). For the paper's network, beside one round of messages:

# %% tags=["nbval-check-output"]
net = tcs.FlatView(tcs.resnet18())
size, statistics = net.dimension, len(net.statistics())
print(f"ResNet-18: {size:,} parameters, {statistics:,} running statistics")
for scheme in ("FedAvg", "TCS", "TCS-Q5"):
    ratio = 32 * statistics / (tcs.bit_budget(scheme) * size)
    print(f"statistics once, in rounds of {scheme}: {ratio:.4f}")

# %% [markdown]
# Even beside the paper's smallest messages one evaluation is less than half a round.
#
# ## Claim
#
# | measured | expected | tolerance, and why |
# |---|---|---|
# | average of models = θ + average of differences | 0 | 1e-6: one float32 rounding |
# | round by hand = the core's | 0 | 5 %: rounding, and units that it pushes over a ReLU's kink |
# | test loss with the largest tenth of an epoch's difference | the whole's | half of what the epoch gains: one training |
# | FedAvg at H = 1 = FedSGD | 0 | 1e-3: rounding of θ against a small step |
# | θ with wild running statistics | the same | none: bit for bit |
# | statistics averaged once = every round | 0 | 1e-4: rounding over an epoch |
# | η of Sec. III-B at N = 10 | 0.1, 0.5, 0.05, 0.005 | none beyond rounding: arithmetic |

# %%
claim("models and differences average alike", gap_models < 1e-6, lab.number(gap_models, 1))
claim("a round by hand is the core's", max(gap_core, gap_deltas) < 0.05,
      f"{lab.number(gap_core, 1)}, its differences {lab.number(gap_deltas, 1)}")  # fmt: skip
half = 0.5 * gain["everything"]
claim("the largest tenth of a difference does most of what the whole does",
      gain["largest tenth of the difference"] > half > 0)  # fmt: skip
claim("the largest tenth of a model undoes it", gain["largest tenth of the model"] < 0)
claim("FedAvg at H = 1 is FedSGD", gap_fedsgd[1] < 1e-3, lab.number(gap_fedsgd[1], 1))
claim("at H = 2 it is not", gap_fedsgd[2] > 1e-3 if 2 in gap_fedsgd else None)
claim("running statistics leave theta alone", same_theta, "bit for bit")
claim("averaging them can wait", gap_statistics < 1e-4, lab.number(gap_statistics, 1))
schedule = torch.tensor([paper[10].learning_rate_at(epoch) for epoch in (0, 5, 150, 225)])
claim(
    "the schedule is Sec. III-B's", torch.allclose(schedule, torch.tensor([0.1, 0.5, 0.05, 0.005]))
)

# %% [markdown]
# ## Exercises
#
# Put your lines in place of `return None`; the cell compares with the core.
#
# 1. The server's new θ, from the clients' differences (N, D) and their weights in the average, which need
#    not add up to 1.
# 2. A client's *difference* after so many local steps; `gradient(theta_D)` is the gradient at a model.


# %%
def fedavg_round(theta_D, differences_ND, weights_N):
    return None  # yours


def local_difference(theta_D, gradient, eta, steps):
    return None  # yours


lab.check_exercise("fedavg_round", fedavg_round)
lab.check_exercise("local_difference", local_difference)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def fedavg_round(theta_D, differences_ND, weights_N):
#     shares_N = torch.tensor(weights_N) / sum(weights_N)
#     return theta_D + shares_N @ differences_ND
#
#
# def local_difference(theta_D, gradient, eta, steps):
#     local_D = theta_D
#     for _ in range(steps):
#         local_D = local_D - eta * gradient(local_D)
#     return local_D - theta_D
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution"]
def fedavg_round(theta_D, differences_ND, weights_N):
    shares_N = torch.tensor(weights_N) / sum(weights_N)
    return theta_D + shares_N @ differences_ND


def local_difference(theta_D, gradient, eta, steps):
    local_D = theta_D
    for _ in range(steps):
        local_D = local_D - eta * gradient(local_D)
    return local_D - theta_D


assert lab.teaching.judge_solution("fedavg_round", fedavg_round) == "right"
assert lab.teaching.judge_solution("local_difference", local_difference) == "right"

# %% [markdown]
# ## What we saw

# %%
first, last = local_steps[0], local_steps[-1]
few, many = (runs[steps][1][-1]["accuracy"] for steps in (last, first))
rounds, more = (runs[steps][1][-1]["rounds"] for steps in (last, first))
print(f"""{claim.summary()}
after {epochs} passes over the data H = {last} ended at {100 * few:.1f} %, H = {first} at {100 * many:.1f} %, with {rounds} rounds an epoch
    instead of {more}; one run of each, which decides nothing
what surprised us: {clients} batches of {batch_size} against one of {clients * batch_size}: cosine {alike:.2f}, from batch norm alone
what surprised us: linear scaling is {100 * gaps[-1]:.0f} % off for {k} steps of {rates[-1]:g}, {100 * gaps[0]:.0f} % for steps of {rates[0]:g}""")

# %% [markdown]
# Next: [02_sparsification](02_sparsification.ipynb) leaves most entries of Δθ out.

# %% jupyter={"source_hidden": true}
print(f"core {lab.core_sha256()[:12]} · torch {torch.__version__} · {data.label}, "
      f"{train_samples} images · n = 1 run for each H")  # fmt: skip
