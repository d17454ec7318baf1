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
# **In short.** In every round, each client copies the server's model, trains the copy for a few steps on its own data, and sends it back.
# The server takes the average as its new model. It gets the same model if the clients send only the *difference*, which is what local
# training has changed. A client that takes four local steps before it sends needs only a quarter of the messages, but the result is no
# longer the step that SGD would take with the average gradient. Sending differences has an advantage: their small entries can be left out,
# and those of a model cannot.
#
# After this notebook you will be able to
#
# - work out a round of federated averaging by hand,
# - say what more local steps save, and what they change.
#
# **Claim (Sec. I-A and I-B, Alg. 1, Eq. 3, Fig. 1).** A server that adds the average of its clients' *model differences* takes the same
# step as one that averages their *models*. With one local step (H = 1) this is the step that SGD takes with the average gradient.
#
# *Run time*: about 40 s on two cores of an AMD EPYC. *Read before*: the README.
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
# - `epochs = 10` should raise the accuracy of every run. In our trial it did.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
profile = "ci"  # folder under results/ for the figure
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 1000  # training images of all clients together
test_samples = 1000  # test images
image_size = 16  # pixels per side, after averaging; None keeps the original size
model = "resnet8"  # resnet8 or resnet18
width = 8  # channels of its first stage
clients = 4  # N
local_steps = [1, 2, 4]  # H of each run; the round by hand uses the last
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
short = dataclasses.replace(config, epochs=min(3, epochs))  # one more, for one epoch's difference
print(lab.forecast_trainings([short] + [config] * len(local_steps)))

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
# ## One round by hand
#
# We work out the first round in plain PyTorch. Each client starts from the server's model, so $\theta^{0}_{n,t}=\theta_t$. In the formulas
# below, $\eta_t$ is the learning rate, and $g^{\tau}_{n,t}$ is the gradient on client n's τ-th batch of round t, including weight decay:
#
# $$\theta^{\tau}_{n,t}=\theta^{\tau-1}_{n,t}-\eta_t\,g^{\tau}_{n,t},\quad \tau=1,\dots,H;\qquad
# \theta_{t+1}=\frac{1}{N}\sum_{n=1}^{N}\theta^{H}_{n,t}$$
#
# This is the paper's Algorithm 1. The comments in the code below give its line numbers. A client copies the server's model (line 3).
# Then it does the following H times (line 4): it computes a gradient (line 5) and takes a step (line 6). At the end it sends its model
# (line 7), and the server averages the models (line 8). (The end of a name tells the shape of a tensor: `_D` stands for a vector of D
# numbers, and `_ND` for N such vectors.) The function `tcs.parameters_to_vector` returns all parameters of a network as one vector.

# %%
H = local_steps[-1]
eta = learning_rate / 10  # a small rate, because the network is untrained
config_H = dataclasses.replace(
    config, scheme=tcs.Scheme.named("FedAvg", local_steps=H), reference_batch=None
)  # so that the rate is not scaled
training = lab.Training(config_H, data)
start_D = tcs.parameters_to_vector(training.flat.model)  # the server's model theta_t, (D,)


def batch(n, tau):  # client n's batch number tau, counted from the start of the first epoch
    return training.feed.batch(n, 0, tau)


def small_steps(batches, eta):  # Alg. 1, lines 3 to 7: one step per batch
    net = copy.deepcopy(training.flat.model).train()  # line 3: pull theta_t
    sgd = torch.optim.SGD(net.parameters(), lr=eta, weight_decay=weight_decay)
    for images, labels in batches:  # line 4
        sgd.zero_grad()
        F.cross_entropy(net(images), labels).backward()  # line 5
        sgd.step()  # line 6
    return tcs.parameters_to_vector(net)  # line 7: push the model, (D,)


# %%
models_ND = torch.stack(
    [small_steps([batch(n, tau) for tau in range(H)], eta) for n in range(clients)]
)
average_D = models_ND.mean(0)  # line 8: federated averaging, of models
moved = float((average_D - start_D).norm() / start_D.norm())
print(f"N = {clients}, H = {H}: the round has changed the model by {moved:.1%} of its length")

# %% [markdown]
# The running statistics of the network's batch norm are not part of θ: training never reads them, and those of the clients are averaged
# only for testing (number 9 in the list of differences from the paper at the top of `tcs_core.py`).
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
print(f"theta plus the mean difference is within {lab.format_number(gap_models, 1)} of the mean model "
      "(relative to its largest entry)")  # fmt: skip

# %% [markdown]
# This is a rounding error, so it makes no difference whether the server averages models or differences. The module `tcs_core.py`, which we
# call the *core*, contains the methods of the paper that this project reproduces (see the README), and does all other trainings on this
# page. It works with differences, which it computes from the sum of a client's gradients. The folded cell below lets the core carry out the
# same round.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
core = lab.Training(dataclasses.replace(config_H, warmup_learning_rate=eta), data, keep_deltas=True)
update_D = next(core.rounds(0))
gap_core = float((average_D - core.theta_D).norm() / update_D.norm())
gap_deltas = float((differences_ND - core.deltas_ND).norm() / differences_ND.norm())
print(f"by hand and in the core: the new models differ by {lab.format_number(gap_core, 1)} of the update's length, "
      f"and the clients' differences by {lab.format_number(gap_deltas, 1)} of theirs")  # fmt: skip

# %% [markdown]
# The two rounds agree up to rounding.
#
# With compression, it does matter which of the two is sent. If an entry of a *difference* is left out, that parameter keeps its old value.
# If an entry of a *model* is left out, that parameter becomes zero.
#
# Below we keep only a tenth of the entries, those of largest magnitude, once of the difference and once of the model. A single round
# changes the loss too little to show the effect. So we train a new model for three epochs, and use the difference that the third one makes
# to the server's model.

# %%
trained = lab.Training(config, data)
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
# the epoch. This is why the methods in this project leave entries out of Δθ, or of gradients, and never of the model.
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
    return tcs.parameters_to_vector(net)


def gap_between(first_D, second_D):  # relative to the length of the second step
    return float((first_D - second_D).norm() / (second_D - start_D).norm())


# %%
gap_fedsgd = {}
for steps in (1, 2, 4):
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
    trained = lab.Training(dataclasses.replace(config, scheme=scheme), data)
    return [trained.epoch(epoch) | trained.evaluate() for epoch in range(epochs)]


runs = {steps: train(steps) for steps in lab.follow(local_steps, "runs")}
for steps, curve in runs.items():
    rounds, accuracy = curve[-1]["rounds"], 100 * curve[-1]["accuracy"]
    print(f"H = {steps}: {rounds:2d} rounds per epoch, {32 / steps:4.1f} bits per parameter and local step, "
          f"test accuracy {accuracy:.1f} %")  # fmt: skip

drawing, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for i, (steps, curve) in enumerate(runs.items()):
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
# but ten epochs did not help in our trial. The paper trains for 300 epochs, and says that its own method, *time-correlated sparsification*
# (TCS), loses no accuracy with H = 2 or H = 4. Notebook [13_evidence](13_evidence.ipynb) judges that claim. It also shows that four local
# steps cost accuracy if everything is sent: see *FedAvg-L4 − Baseline* (FedAvg with four local steps, minus centralized training) in its
# section *What the difference to centralized training is made of*.
#
# On this page the images are dealt out at random, so all clients have similar data. If each client had mainly images of some classes, its
# local steps would lead its copy of the model towards these classes, which is called *client drift*, and the more local steps it takes, the
# farther. Notebook [10b_fewer_bytes](10b_fewer_bytes.ipynb) shows what such clients changed in our trainings (section *Unequal clients*).
#
# ## Claim
#
# | measured | expected | tolerance, and why |
# |:---|:---|:---|
# | the gap between the average of the models and θ plus the average of the differences | 0 | 1e-6, for the rounding of float32 |
# | the gap between the round by hand and the core's round | 0 | 5 % of the update, because rounding can carry the input of a ReLU across zero |
# | the test loss with the largest tenth of an epoch's difference | the test loss with the whole difference | half of what the epoch gains, because there is only one training |
# | the gap between FedAvg at H = 1 and FedSGD, relative to the step | 0 | 1e-3, because θ is rounded and the step is small |

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
claim("FedAvg at H = 2 is not FedSGD", gap_fedsgd[2] > 1e-3, lab.format_number(gap_fedsgd[2], 1))

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
few, many = (runs[steps][-1]["accuracy"] for steps in (last, first))
rounds, more = (runs[steps][-1]["rounds"] for steps in (last, first))
print(f"""{claim.summary()}
After {epochs} epochs, H = {last} reached {100 * few:.1f} % accuracy with {rounds} rounds per epoch, and H = {first}
    reached {100 * many:.1f} % with {more} rounds per epoch. This is one run of each, which decides nothing.
What surprised us: one long step with the average of all gradients differs from four local steps by {100 * gap_fedsgd[4]:.0f} % of its
    length.""")

# %% [markdown]
# Next, [02_sparsification](02_sparsification.ipynb) leaves most entries of Δθ out of the message.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Made with {lab.describe_core()} and torch {torch.__version__}, on {train_samples} images ({data.label}). "
      "One run for each H (n = 1).")  # fmt: skip
