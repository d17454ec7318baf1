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
# **In short.** The server gets the same new model whether every client sends its whole model or only the *difference*, which is what local
# training has changed. A client that takes four local steps before it sends needs only a quarter of the messages, but the result is no
# longer the step that SGD would take with the average gradient. Only the difference can be compressed by leaving entries out. In our
# training, the largest tenth of its entries lowers the loss at least as much as all of them. If only the largest tenth of a model is kept,
# the loss rises.
#
# After this notebook you will be able to
#
# - work out a round of federated averaging by hand,
# - say what more local steps save, and what they change.
#
# **Claim (Sec. I-A and I-B, Alg. 1, Eq. 3, Fig. 1).** A server that adds the average of its clients' *model differences* takes the same
# step as one that averages their *models*. With one local step (H = 1) this is the step that SGD takes with the average gradient.
#
# *Run time*: about 20 s on two cores of a Xeon. *Read before*: the README.
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. Each notebook has a twin in plain text (`.py`),
# which you can edit in any editor. When you save one of the two in JupyterLab, the other is written as well.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
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
# You can change any of these values and run all cells again. *Claim* and *What we saw* are computed anew. The text between the cells
# describes the results of the original values, so it may no longer fit. For example:
#
# - `local_steps = [1, 8]` should widen the gap between few and many local steps, because H = 8 leaves very few rounds.
# - `batch_size = 32` should make the clients' batch norm matter less, because larger batches give less noisy statistics. The
#   cosine in the section *Batch norm: what a client's batch decides* should come closer to 1.
# - `epochs = 10` should raise the accuracy of every run. In our trial it did, but H = 4 did not come closer to H = 1.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
profile = "ci"  # folder under results/ for the figure
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 1000  # training images of all clients together
test_samples = 1000  # test images
image_size = 16  # pixels per side, after averaging; None keeps the original size
model = "resnet8"  # resnet8 or resnet18
width = 8  # channels of its first stage
clients = 4  # N
local_steps = [1, 2, 4]  # H of each run; the round worked out by hand uses the last
batch_size = 8  # B, samples of one local step
epochs = 5  # passes over the data
learning_rate = 0.2  # eta after the warm-up
reference_batch = None  # total batch size that learning_rate is for; None: not scaled
drops = [0.6]  # when eta is divided by 10, as shares of the epochs
weight_decay = 1e-4  # L2, part of every local gradient
seed = 0  # of all random numbers

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fields = lab.notebook_params(globals(), lab.RUN_KEYS - {"device"})
claim = lab.Statements(globals(), "01_fedavg")
lab.check_values(globals(), local_steps=Annotated[list[lab.WholeNumber], Len(1)], seed=lab.Seed)
fields |= {"seed": seed, "device": "cpu"}
config = lab.RunConfig(scheme="FedAvg", **fields)
data = lab.load_dataset(dataset).first(train_samples, test_samples).resize(image_size)
training = lab.Training(config, data)
dimension = len(training.theta_D)
print(f"D = {dimension:,} parameters, N = {clients} clients, {data.label} images")
print(lab.forecast_trainings([config] * len(local_steps)))

# %% [markdown]
# ## The federation
#
# N clients hold data that never leave them. A server holds the model, which we write as one long vector θ of D numbers. In round t the
# server sends θ to all clients. Each client takes H steps of SGD on batches of its own data and sends back how these steps changed θ. Here
# the training images are dealt out at random, and every client gets equally many. Together, the clients minimize the average loss:
#
# $$\min_{\theta\in\mathbb{R}^D}\; \frac{1}{N}\sum_{n=1}^{N} f_n(\theta),\qquad
# f_n(\theta)=\text{mean loss over the data of client } n \quad (\text{Eq. 1})$$


# %% jupyter={"source_hidden": true} tags=["remove-input"]
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
axes.plot([], [], color=lab.COLOURS[1], lw=2.2, label="down: the model, the same for all")
axes.plot([], [], color=lab.COLOURS[2], lw=2.2, ls="--", label="up: what local training changed")
axes.set(xlim=(0, 10.8), ylim=(0, 5.2), title="Fig. 1: one round of federated averaging")
axes.set_axis_off()
drawing.legend(loc="outside lower center", ncols=2, frameon=False)
lab.save_figure(drawing, lab.results_folder(profile) / "figure1")
lab.show_figures()

# %% [markdown]
# Each box at the bottom shows four of that client's images. Only what the arrows show is transmitted; the images stay where they are.
#
# ## Algorithm 1
#
# The module `tcs_core.py`, which we call the *core*, contains the methods of the paper that this project reproduces (see the README). Its
# class `LocalTrainer` carries out local training for one client after the other, in one process. Each client starts from the server's
# model, so $\theta^{0}_{n,t}=\theta_t$. In the formulas below, $\eta_t$ is the learning rate, and $g^{\tau}_{n,t}$ is the gradient on
# client n's τ-th batch of round t, including weight decay:
#
# $$\theta^{\tau}_{n,t}=\theta^{\tau-1}_{n,t}-\eta_t\,g^{\tau}_{n,t},\quad \tau=1,\dots,H;\qquad
# \theta_{t+1}=\frac{1}{N}\sum_{n=1}^{N}\theta^{H}_{n,t}$$
#
# Lines 3 to 6 of the paper's Algorithm 1 are the local training. A client takes the server's model (line 3). Then it does the following H
# times (line 4): it computes a gradient (line 5) and takes a step (line 6). The method `local_training` does this. It adds up a client's
# gradients in `gradient_D`. This sum times −η is the model difference. (The end of a name tells the shape of a tensor: `_D` stands for a
# vector of D numbers, and `_ND` for N such vectors.)

# %%
lab.show_code(tcs.LocalTrainer.local_training)

# %% [markdown]
# For each local step, `_steps` does the forward and the backward pass of one batch (line 5). Between two backward passes, it also takes the
# step of line 6. After the last one it does not, because the sum of the gradients is already complete. The method `put` copies values into
# the parameters of the PyTorch model, and `add_gradients_` adds the gradients of the last backward pass to the sum.
#
# ## What H buys
#
# With more local steps, a client sends fewer messages for the same number of passes over its data. A message here has one number for each
# parameter, with 32 bits. One local step therefore costs
#
# $$\frac{32}{H}\ \text{bits per parameter, in each direction.}$$
#
# **What do you expect?** After the same number of epochs, is the accuracy with H = 4 higher than with H = 1, or lower? (With H = 4 an epoch
# has 28 local steps instead of 31, because what is left over does not fill a round.)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def train(steps):
    scheme = tcs.Scheme.named("FedAvg", local_steps=steps)
    trained = lab.Training(dataclasses.replace(config, scheme=scheme), data, keep_deltas=True)
    curve = [trained.epoch(epoch) | trained.evaluate() for epoch in range(epochs)]
    return trained, curve


runs = {steps: train(steps) for steps in lab.follow(local_steps, "runs")}
for steps, (_, curve) in runs.items():
    rounds, accuracy = curve[-1]["rounds"], 100 * curve[-1]["accuracy"]
    print(f"H = {steps}: {rounds:2d} rounds per epoch, {32 / steps:4.1f} bits per parameter and local step, "
          f"test accuracy {accuracy:.1f} %")  # fmt: skip

drawing, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for i, (steps, (_, curve)) in enumerate(runs.items()):
    accuracy = [100 * row["accuracy"] for row in curve]
    look = lab.series_style(i)
    panels[0].plot([row["epoch"] for row in curve], accuracy, label=f"H = {steps}", **look)
    panels[1].plot([row["epoch"] * row["rounds"] for row in curve], accuracy, **look)
panels[0].locator_params(axis="x", integer=True)
panels[0].set(xlabel="epochs", ylabel="test accuracy (%)", title="Accuracy by epochs")
panels[1].set(xlabel="rounds (messages of each client)", title="The same runs, by messages sent")
panels[0].legend(frameon=False)
lab.show_figures()

# %% [markdown]
# The right panel shows that a larger H gets further with the same number of messages. The left panel shows that it ends lower after the
# same number of epochs. (This is one run for each H.) A possible reason is that a larger H leaves too few rounds in so short a training,
# but ten epochs did not help in our trial. The paper trains for 300 epochs. In its method, *time-correlated sparsification* (TCS), clients
# send only a few entries. The paper says that it loses no accuracy with H = 2 or H = 4. Notebook [13_evidence](13_evidence.ipynb) judges
# that claim.
#
# ## One round by hand
#
# Let us now work out one more round in plain PyTorch, with the H of the last run (4) and the model that it has trained. Every client copies
# the model, runs `torch.optim.SGD` over its batches, and returns its *model*. Afterwards the core carries out the same round.


# %%
def theta_of(net):  # all its parameters in one vector (D,), in the core's order
    flat = tcs.FlatView(net)
    theta_D = torch.empty(flat.dimension)
    flat.read_(flat.views(theta_D))
    return theta_D


def small_steps(batches, eta):  # Alg. 1, lines 3 to 7: one step per batch
    net = copy.deepcopy(training.flat.model).train()  # line 3: pull theta_t
    sgd = torch.optim.SGD(net.parameters(), lr=eta, weight_decay=weight_decay)
    for images, labels in batches:
        sgd.zero_grad()
        F.cross_entropy(net(images), labels).backward()  # line 5
        sgd.step()  # line 6
    return theta_of(net)  # line 7: push the model, (D,)


# %%
H, training = local_steps[-1], runs[local_steps[-1]][0]
eta, most = learning_rate / 2, training.rounds_per_epoch * H  # an epoch's local steps per client


def batch(n, tau):  # client n's batch number tau, counted from the start of the first epoch
    return training.feed.batch(n, 0, tau)


start_D = training.theta_D.clone()
models_ND = torch.stack([small_steps([batch(n, t) for t in range(H)], eta) for n in range(clients)])

# %%
average_D = models_ND.mean(0)  # line 8: federated averaging, of models
with training.federation.trainer.lend_module():  # the core's round, at this rate
    update_D = training.federation.exchange(list(range(clients)), 0, eta)
    training.federation.move(update_D, eta)  # of theta_D
gap_core = float((average_D - training.theta_D).norm() / update_D.norm())
training.flat.put(training.flat.views(average_D))  # the sections below start from here
print(
    f"by hand and in the core: the results differ by {lab.format_number(gap_core, 1)} of the update's length"
)

# %% [markdown]
# The two results agree up to float32 rounding. They are not identical, because the core adds up the local steps in a different order.
# (Sometimes a rounding error carries the input of a ReLU across zero. Then the difference can be much larger, so the check at the end
# allows 5 % of the update.)
#
# ## Send differences, not models
#
# The average of the models equals the old model plus the average of the differences. A client may therefore send either of them:
#
# $$\theta_{t+1}=\theta_t+\frac{1}{N}\sum_{n=1}^{N}\Delta\theta_{n,t},\qquad
# \Delta\theta_{n,t}=\theta^{H}_{n,t}-\theta_t=-\eta_t\sum_{\tau=1}^{H}g^{\tau}_{n,t}\quad(\text{Eq. 3})$$

# %%
differences_ND = models_ND - start_D
moved_D = start_D + differences_ND.mean(0)
gap_models = float((moved_D - average_D).abs().max() / average_D.abs().max())
gap_deltas = float((differences_ND - training.deltas_ND).norm() / differences_ND.norm())
gap = lab.format_number(gap_models, 1)
print(
    f"theta plus the mean difference is within {gap} of the mean model (relative to its largest entry)"
)
print(
    f"differences computed from the models and from the gradients differ by {lab.format_number(gap_deltas, 1)} of their length"
)

# %% [markdown]
# Both numbers are rounding errors. So it makes no difference whether the server averages models or differences, nor whether a client
# computes its difference from its models or from its gradients.
#
# With compression, it does matter which of the two is sent. If an entry of a *difference* is left out, that parameter keeps its old value.
# If an entry of a *model* is left out, that parameter becomes zero.
#
# Below we keep only a tenth of the entries, those of largest magnitude, once of the difference and once of the model. A single round
# changes the loss too little to show the effect. So we train a new model for three epochs, and use the difference that the third one makes
# to the server's model.

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
    print(f"sent: {name:32s} test loss {loss[name]:.2f}")
gain = {name: loss["nothing"] - found for name, found in loss.items()}

# %% [markdown]
# The epoch lowers the test loss, and the largest tenth of its difference is enough to do so. (It even lowers the loss more than the whole
# difference. This is one training, so it may be chance.) The model of which only the largest tenth is left is worse than the model before
# the epoch. This is why every method in this project that leaves entries out does so in Δθ.
#
# ## FedSGD is FedAvg at H = 1
#
# If every client takes a single step, the server may as well collect the gradients, average them and take that step itself. This is called
# FedSGD:
#
# $$H=1:\quad \theta_{t+1}=\theta_t-\eta_t\,\frac{1}{N}\sum_{n=1}^{N} g_{n,t}$$
#
# With H > 1, a single step with all gradients only approximates FedAvg, in which a client computes its later gradients at a model that has
# already moved. The function `large_step` below does what such a server would do: it computes all gradients at the same θ and takes one
# step.


# %%
def large_step(batches, eta):  # one step with the average of all gradients at theta_t
    net = copy.deepcopy(training.flat.model).train()
    for images, labels in batches:
        (F.cross_entropy(net(images), labels) / len(batches)).backward()
    torch.optim.SGD(net.parameters(), lr=eta, weight_decay=weight_decay).step()
    return theta_of(net)


def gap_between(first_D, second_D):  # relative to the length of the second step
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
    print(f"H = {steps}: they differ by {lab.format_number(gap, 2)} of the step")

# %% [markdown]
# At H = 1 the two differ by rounding errors only. With more local steps they differ by a large part of the step. Neither of the two is
# wrong: a local step uses the gradient at the place that the client has reached, and the long step uses only gradients at the start. Which
# of them lowers the loss more is not measured here.
#
# ## The learning rate: linear scaling
#
# The linear scaling rule says that a batch that is k times larger should take a step that is k times longer, because k small steps in a row
# would have gone about as far. The paper starts from η = 0.1 at batch size 128. For N clients with batches of size B the rule gives
#
# $$\eta = 0.1\cdot\frac{N\,B}{128}.$$
#
# With the paper's ten clients and batches of 64 samples, this is 0.5.
#
# How good is this approximation? Below we compare k steps of length η in a row with one step of length k·η on the same k batches. The table
# shows the distance between the two results, relative to the length of the long step.

# %%
rates = (0.003, 0.03, 0.3)
table = ["k batches   " + "".join(f"{f'eta {rate:g}':>12s}" for rate in rates)]
for k in sorted({min(k, clients) for k in (2, 4, 8)}):
    work = [batch(n, 0) for n in range(k)]
    gaps = [gap_between(small_steps(work, rate), large_step(work, k * rate)) for rate in rates]
    table.append(f"{k:9d}   " + "".join(f"{100 * gap:10.0f} %" for gap in gaps))
print("\n".join(table))

# %% [markdown]
# The rule is a good approximation while the steps are short, and a poor one when k·η is large. The usual remedy, which the paper uses as
# well, is to start with a small rate and to increase it slowly.
#
# ## Warm-up and drops
#
# During the first 5 of 300 epochs, the warm-up, the rate rises linearly; with ten clients it starts at 0.1. After epochs 150 and 225 it is
# divided by 10. The class `RunConfig`, which holds the settings of a run, has this schedule as its default. (The short trainings of this
# page have other ones.) Below we only change the number of clients.

# %% tags=["nbval-check-output"]
paper = {n: lab.RunConfig(scheme="TCS", clients=n) for n in (5, 10, 20)}
baseline = lab.RunConfig(scheme="Baseline")  # centralized, batch 128
moments = (0, 2.5, 5, 149, 150, 225)
print("eta at epoch  " + "".join(f"{epoch:>9g}" for epoch in moments))
for n, run in paper.items():
    print(f"N = {n:2d}        " + "".join(f"{run.learning_rate_at(e):9.4g}" for e in moments))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
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
lab.show_figures()

# %% [markdown]
# With the paper's ten clients the warm-up ends at η = 0.5. With half or twice as many clients it ends at half or twice that rate.
# Centralized training, which the paper calls the Baseline, stays at 0.1 until the first drop. The paper has only ten clients, so it does
# not say how the rate at the start depends on their number. We scale it in the same way.
#
# ## Batch norm: what a client's batch decides
#
# The network of this page, a small ResNet, contains batch norm, and so does the paper's. During training it normalizes with the mean and
# the variance of *the current batch*. Therefore N clients with B images each do not take quite the same step as one batch of N·B images,
# even at H = 1. We compare the directions of the two steps.

# %%
work = [batch(n, 0) for n in range(clients)]
together = [(torch.cat([images for images, _ in work]), torch.cat([labels for _, labels in work]))]
many_D, one_D = (large_step(batches, eta) - average_D for batches in (work, together))
alike = float(F.cosine_similarity(many_D, one_D, dim=0))
print(
    f"{clients} batches of {batch_size} and 1 batch of {clients * batch_size}: cosine of the two steps {alike:.2f}"
)

# %% [markdown]
# The cosine is clearly below 1, because the mean and variance of a small batch are noisy. Without batch norm the two steps would be equal.
#
# ## Batch norm: running statistics cost nothing in training
#
# Besides the parameters θ, batch norm keeps running means and variances, which we call r. For each batch, with statistics b, training
# updates them by
#
# $$r \leftarrow (1-m)\,r + m\,b,\qquad m = 0.1.$$
#
# Training only *writes* these statistics. They are read when the model is evaluated. To see this, we train two copies of a trained
# federation for one more epoch, and let one of them start with completely wrong statistics.

# %%
calm, wild, often = (lab.Training(config, data) for _ in range(3))
for one in (calm, wild, often):
    one.load_state_dict(runs[local_steps[0]][0].state_dict())
wild.statistics_NS.uniform_(1e5, 1e6, generator=lab.generator_for(seed, 101))
for name, one in (("correct", calm), ("wrong", wild)):
    one.epoch(epochs - 1)
    print(f"started with {name} statistics: test accuracy {100 * one.evaluate()['accuracy']:.1f} %")
same_theta = torch.equal(calm.theta_D, wild.theta_D)
print(
    f"after these {calm.rounds_per_epoch} rounds both have the same theta, bit for bit: {same_theta}"
)

# %% [markdown]
# Both copies end with exactly the same θ, while the test accuracy of the copy with the wrong statistics is close to chance. So only the
# evaluation reads the statistics.
#
# It follows that clients need not send them in every round. It also makes no difference when the server averages them. The update rule
# above is linear in r and b. So the clients' average of r follows the same rule, with their average of b. To check this, a third copy
# averages the statistics after every round, while the first copy averages them only once, at the end.

# %%
for _ in often.rounds(epochs - 1):
    often.statistics_NS[:] = often.statistics_NS.mean(0)
once_S, often_S = calm.statistics_NS.mean(0), often.statistics_NS.mean(0)
gap_statistics = float((once_S - often_S).norm() / once_S.norm())
print(f"averaged once or after every round: they differ by {lab.format_number(gap_statistics, 1)}; same theta: "
      f"{torch.equal(calm.theta_D, often.theta_D)}")  # fmt: skip

# %% [markdown]
# The two averages differ by rounding errors only. The remaining cost arises at each evaluation, when every client sends 32 bits per
# statistic. For the paper's network, we compare this cost with the message that a client sends in one round: with federated averaging
# (FedAvg), with TCS, and with TCS in which each value is rounded to 5 bits (TCS-Q5).

# %% tags=["nbval-check-output"]
net = tcs.FlatView(tcs.resnet18())
size, statistics = net.dimension, len(net.statistics())
print(f"ResNet-18: {size:,} parameters, {statistics:,} running statistics")
for scheme in ("FedAvg", "TCS", "TCS-Q5"):
    ratio = 32 * statistics / (tcs.bit_budget(scheme) * size)
    print(f"the statistics, sent once, cost as much as {ratio:.4f} rounds of {scheme}")

# %% [markdown]
# Even compared with the paper's smallest messages, the statistics for one evaluation cost less than half a round.
#
# ## Claim
#
# | measured | expected | tolerance, and why |
# |:---|:---|:---|
# | the gap between the average of the models and θ plus the average of the differences | 0 | 1e-6, for the rounding of float32 |
# | the gap between the round by hand and the core's round | 0 | 5 % of the update, because rounding can carry the input of a ReLU across zero |
# | the test loss with the largest tenth of an epoch's difference | the test loss with the whole difference | half of what the epoch gains, because there is only one training |
# | the gap between FedAvg at H = 1 and FedSGD, relative to the step | 0 | 1e-3, because θ is rounded and the step is small |
# | θ after training with wrong running statistics | the same θ as with correct ones | none; every bit must agree |
# | the gap between statistics averaged once and in every round | 0 | 1e-4, for the rounding in all rounds of an epoch |
# | η of Sec. III-B at N = 10 | 0.1, 0.5, 0.05, 0.005 | only rounding, because η is computed and not measured |

# %%
claim(
    "averaging models and averaging differences give the same model",
    gap_models < 1e-6,
    lab.format_number(gap_models, 1),
)
claim("a round computed by hand gives the core's result", max(gap_core, gap_deltas) < 0.05,
      f"{lab.format_number(gap_core, 1)}, models against gradients {lab.format_number(gap_deltas, 1)}")  # fmt: skip
half = 0.5 * gain["everything"]
claim("the largest tenth of a difference brings more than half of what the whole brings",
      gain["largest tenth of the difference"] > half > 0)  # fmt: skip
claim(
    "sending only the largest tenth of a model makes it worse",
    gain["largest tenth of the model"] < 0,
)
claim("FedAvg at H = 1 is FedSGD", gap_fedsgd[1] < 1e-3, lab.format_number(gap_fedsgd[1], 1))
claim("FedAvg at H = 2 is not FedSGD", gap_fedsgd[2] > 1e-3 if 2 in gap_fedsgd else None)
claim("batch-norm statistics do not influence theta", same_theta, "bit for bit")
claim(
    "batch-norm statistics can be averaged once, at the end",
    gap_statistics < 1e-4,
    lab.format_number(gap_statistics, 1),
)
schedule = torch.tensor([paper[10].learning_rate_at(epoch) for epoch in (0, 5, 150, 225)])
claim(
    "the learning rates follow the schedule of Sec. III-B",
    torch.allclose(schedule, torch.tensor([0.1, 0.5, 0.05, 0.005])),
)

# %% [markdown]
# ## Exercises
#
# Replace each `return None` by your own lines. The cell then compares your function with the core.
#
# 1. Compute the server's new θ from the clients' differences, a tensor of shape (N, D), and from a list of N numbers, which say how much each client counts in the average. (So far, all clients counted equally.) These weights need not add up to 1.
# 2. Compute a client's *difference* after the given number of local steps. The function `gradient(theta_D)` returns the gradient
#    at a given model.
#
# <details><summary>Hints</summary>
#
# 1. Divide the weights by their sum first.
# 2. Let a second variable start at `theta_D` and move step by step. Do not change `theta_D` in place: you need it at the end,
#    and so does the caller.
#
# </details>


# %%
def fedavg_round(theta_D, differences_ND, weights_N):
    return None  # yours


def local_difference(theta_D, gradient, eta, steps):
    return None  # yours


lab.check_exercise("fedavg_round", fedavg_round)
lab.check_exercise("local_difference", local_difference)

# %% [markdown] tags=["solution"]
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


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
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
After {epochs} epochs, H = {last} reached {100 * few:.1f} % accuracy with {rounds} rounds per epoch, and H = {first}
    reached {100 * many:.1f} % with {more} rounds per epoch. This is one run of each, which decides nothing.
What surprised us: batch norm alone makes the step of {clients} batches of {batch_size} differ from that of one batch of
    {clients * batch_size}; the cosine between them is {alike:.2f}.
What surprised us: for {k} steps with η = {rates[-1]:g}, linear scaling is off by {100 * gaps[-1]:.0f} % of the long step;
    with η = {rates[0]:g} it is off by {100 * gaps[0]:.0f} %.""")

# %% [markdown]
# Next, [02_sparsification](02_sparsification.ipynb) leaves most entries of Δθ out of the message.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Made with {lab.describe_core()} and torch {torch.__version__}, on {train_samples} images ({data.label}). "
      "One run for each H (n = 1).")  # fmt: skip
