# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Keep the same momentum at the server and at every client
#
# **In short.** The server and all clients can keep the same momentum without sending it, so messages do not become longer. The
# paper's rule for this contains misprints. Once they are corrected, it is exactly the rule of `torch.optim.SGD`, with compression and
# without. With compression, more than half of an average step moves entries for which nothing arrived in the current round. This part
# comes from earlier rounds only. In our main comparison, momentum raised the accuracy of TCS, but it raised that of centralized
# training more.
#
# After this notebook you will be able to
#
# - write the update step with momentum, and recognize the paper's misprints,
# - say how much of a sparse step comes from earlier rounds.
#
# **Claim (Sec. II-D, Alg. 3, Table 3).** If clients send sparsified *gradients*, the server and all clients can compute the
# same momentum, so that it need not be sent. With it, TCS reaches the accuracy of centralized training with momentum.
#
# *Run time*: about half a minute on two cores of an AMD EPYC. *Read before*: [03_tcs](03_tcs.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The values to change stand in the cell
# under *Parameters*.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import statistics
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Gt, Lt
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True, "font.size": 10})

# %% [markdown]
# ## Parameters
#
# You can change any of these values and run all cells again. The sections *Claim* and *What we saw* are computed anew. The text
# between the cells describes the results of the original values, so it may no longer fit. For example:
#
# - `momentum = 0.5` should make the part of a step that comes from earlier rounds smaller.
# - `value_bits = 5` sends each value with 5 bits instead of 32 ([07](07_fractional_quantization.ipynb)), so the clients' messages should become shorter.
# - `clients = 10` should give the update more entries that are not zero.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
momentum = 0.9  # beta
learning_rate = 0.5  # eta
phi_global = 1e-2  # share of the entries in the mask that all clients share
phi_local = 1e-3  # share kept by each client's own mask
value_bits = 32  # q, bits of a value: 32, or 1 to 16 to quantize
local_steps = 1  # H; the paper combines global momentum only with an H of 1
profile = "ci"  # name of this size of training
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 480  # training images of all clients together
image_size = 16  # pixels per side, after averaging; None keeps the original size
model = "resnet8"  # resnet8 or resnet18
width = 8  # channels of its first stage
clients = 4  # N
batch_size = 10  # B, samples of one local step
epochs = 8  # passes over the data
warmup_epochs = 1  # dense epochs at the start
warmup_learning_rate = 0.1  # eta of the first round
drops = [0.75]  # when eta is divided by 10, as shares of the epochs
reference_batch = None  # total batch size that the learning rates are for; None: not scaled
dirichlet_alpha = None  # class skew among clients; None: IID

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fields = lab.notebook_params(globals(), lab.RUN_KEYS - {"device", "test_samples"})
claim = lab.Statements(globals(), "05_global_momentum")
lab.check_values(globals(), momentum=Annotated[float, Gt(0), Lt(1)])
fields |= {"device": "cpu", "test_samples": 1}  # we look at steps, so nothing is tested
sparse = {"phi_global": phi_global, "phi_local": phi_local}
sparse |= {"value_bits": value_bits, "local_steps": local_steps}
plain = lab.RunConfig(tcs.Scheme.named("TCS", **sparse), **fields)
named = tcs.Scheme.named("TCS-Global Momentum", **sparse, momentum=momentum)
config = dataclasses.replace(plain, scheme=named)
data = lab.load_dataset(dataset).first(train_samples, 1).resize(image_size)
probe = lab.Training(config, data)
print(f"D = {len(probe.theta_D):,} parameters, N = {clients}, beta = {momentum:g}")
print(lab.forecast_trainings([config]))

# %% [markdown]
# ## Algorithm 3, put right
#
# Momentum replaces the gradient by a decaying sum $w$ of all gradients so far. In Algorithm 3 each client sends its
# sparsified gradient, and the server averages what arrives. The server and every client then apply
#
# $$w_t = \beta\, w_{t-1} + \tilde g_{t-1}, \qquad \theta_t = \theta_{t-1} - \eta_t\, w_t$$
#
# to the same average $\tilde g$. All of them therefore hold the same $w$ without ever sending it, which is why the paper calls this
# momentum *global*. Neither the text nor the algorithm box of the paper is correct alone. This table lists the
# misprints and what we run instead:
#
# | line of the box | what is printed | what is meant, and what we run |
# |---:|:---|:---|
# | 5 | $S_{top}(g_{t-1}, K_{global})$ | $S_{top}(\tilde g_{t-1}, K_{global})$: the mask comes from the average that everybody has received |
# | 7 | $w_t = w_{t-1} + \beta\, \bar g_{t-1}$ | $w_t = \beta\, w_{t-1} + \tilde g_{t-1}$, as in the text: β multiplies the old $w$, and the gradient is the received average ($\bar g$ is known to one client only) |
# | 8 | $\theta_t = \theta_{t-1} - \eta_t w_t$, but the text has a plus | the minus, as in the box |
# | 16 | the mean of what arrives, but the text says the *sum* | the mean, as in the box |
#
# We depart from the box in one more point. In the box, the update of $w$ and θ is the first thing that happens in the next round, with the learning rate of that round. Here it is the last thing that happens in the round in which the gradients were computed, with the learning rate of this one. The two differ only where η changes.
#
# The client's part (lines 10 to 14 of this box, 9 to 13 of Algorithm 2) is that of Algorithm 2, with gradients instead of model differences. Masks and error accumulation work as before. The code below shows what a client passes to the compression, how the clients and the server exchange
# it, and the step that ends a round:

# %%
lab.show_code(tcs.LocalTrainer.difference, tcs.Federation.exchange, tcs.Federation.move)

# %% [markdown]
# Without momentum, a client multiplies its gradients by −η before the compression, which makes them a model difference. With
# momentum, it sends the gradients themselves, and η enters later, in `move`.
#
# ## What the misprints would do
#
# We take a single parameter and $f(\theta) = \theta^2 / 2$, so that the gradient is $\theta$ itself. Four rules start
# from the same point: PyTorch's rule, the rule put right (as in the right column above), the rule of the box (β on the wrong term), and
# the rule of the text with its plus sign.

# %%
steps, eta = 60, 0.1
rules = {
    "put right": lambda w, g, theta: (w := momentum * w + g, theta - eta * w),
    "box: β on the wrong term": lambda w, g, theta: (w := w + momentum * g, theta - eta * w),
    "text with its plus": lambda w, g, theta: (w := momentum * w + g, theta + eta * w),
}
paths = {name: [1.0] for name in rules}
for name, rule in rules.items():
    w = 0.0
    for _ in range(steps):
        w, theta = rule(w, paths[name][-1], paths[name][-1])
        paths[name].append(theta)

# %%
theta = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
optimizer = torch.optim.SGD([theta], lr=eta, momentum=momentum)
paths["torch.optim.SGD"] = [1.0]
for _ in range(steps):
    theta.grad = theta.detach().clone()
    optimizer.step()
    paths["torch.optim.SGD"].append(theta.item())

# %% jupyter={"source_hidden": true} tags=["remove-input"]
figure, axes = plt.subplots(figsize=(7.6, 3.4))
for i, name in enumerate(["torch.optim.SGD", *rules]):
    look = lab.series_style(i)
    if name == "torch.optim.SGD":
        look |= {"linestyle": "", "markerfacecolor": "none", "markersize": 8}
    axes.plot(paths[name], label=name, markevery=3, **({"markersize": 4} | look))
axes.set(title="Minimizing θ²/2 from θ = 1", xlabel="step", ylabel="θ", ylim=(-1.5, 2.4))
axes.legend(frameon=False, ncols=2, loc="upper right")
lab.show_figures()

# %% [markdown]
# The corrected rule meets PyTorch's circles at every step. If β stands on the wrong term, nothing
# is ever forgotten: $w$ is β times the sum of all gradients, and θ swings for ever like a pendulum without
# friction. With the plus sign, θ grows without bound and leaves the picture.
#
# ## The same as torch.optim.SGD, on a real network
#
# With one client and no compression, the federation must do plain SGD with momentum. To check this, we let the federation train a
# small ResNet. In every round we give its gradient to `torch.optim.SGD`, which updates a second copy of the
# initial weights, and we compare all weights after the round. The gradient of the next round is computed at the
# federation's weights. As long as the two copies agree, it is the right gradient for both, so agreement in all rounds means that the two methods are equivalent.


# %%
def gap_to_torch(config):
    federation = lab.Training(config, data)
    copy_D = torch.nn.Parameter(federation.theta_D.clone())
    optimizer = torch.optim.SGD([copy_D], lr=1.0, momentum=config.scheme.momentum)
    gap, count = 0.0, federation.rounds_per_epoch
    for epoch in range(3):
        for index, update_D in enumerate(federation.rounds(epoch)):
            optimizer.param_groups[0]["lr"] = config.learning_rate_at(epoch + index / count)
            copy_D.grad = update_D.clone()
            optimizer.step()
            gap = max(gap, float((copy_D.detach() - federation.theta_D).abs().max()))
    return gap, 3 * count


# %%
one = tcs.Scheme.named("FedSGD", momentum=momentum)
dense_gap, rounds = gap_to_torch(dataclasses.replace(config, scheme=one, clients=1))
largest = lab.format_number(dense_gap, 1)
print(f"nothing compressed, 1 client:  largest difference {largest} in {rounds} rounds")
sparse_gap, rounds = gap_to_torch(config)
largest = lab.format_number(sparse_gap, 1)
print(f"TCS, {clients} clients:              largest difference {largest} in {rounds} rounds")

# %% [markdown]
# The weights are the same, with and without compression. The second line also tells you how to use global momentum in your
# own code: run `torch.optim.SGD(momentum=β)` on the server and on every client, and give it the received $\tilde g$ as the
# gradient. (The clients' gradients already contain the weight decay, so this optimizer has none.)
#
# ## What momentum means for a sparse update
#
# The average $\tilde g$ has at most $K_{global} + N K_{local}$ entries that are not zero. But a value that
# arrived once stays in $w$, where it is multiplied by $\beta$ in every later round. So a step also moves entries for which nothing
# was received in this round. We call this part of the step its *memory* and measure how large it is. Here $\text{supp}(\tilde g)$ is
# the set of entries of $\tilde g$ that are not zero:
#
# $$\text{memory} = \frac{\sum_{i \notin \text{supp}(\tilde g)} |w_i|}{\sum_i |w_i|}$$

# %%
federation, memory = lab.Training(config, data), []
for epoch in range(epochs):
    for update_D in federation.rounds(epoch):
        if not federation.compressor.known.dense:
            w = federation.momentum_D
            memory.append(float(w[update_D == 0].abs().sum() / w.abs().sum()))
received = float((update_D != 0).float().mean())
print(
    f"{received:.1%} of the entries of the last update are not zero; on average, memory is {statistics.mean(memory):.0%} of a step"
)

# %% jupyter={"source_hidden": true} tags=["remove-input"]
figure, axes = plt.subplots(figsize=(7.6, 3.2))
last = federation.rounds_per_epoch * epochs
axes.plot(range(last - len(memory) + 1, last + 1), memory, color=lab.COLOURS[0])
axes.set(
    title="Most of a step moves entries that were not in the update",
    xlabel="round",
    ylabel="memory, share of the step",
    ylim=(0, 1.02),
)
lab.show_figures()

# %% [markdown]
# In nearly every round, most of the step is memory: it moves entries that were not in the update. The advantage may be that an
# entry that was sent once keeps moving for about $1/(1-\beta)$ rounds. The price is that its direction is that of the round in which it
# was sent. We did not measure either.
#
# ## Does it help?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
stored = lab.results_folder("evidence") / "claims.csv"
if stored.exists():
    main = pd.read_csv(stored, index_col="claim")
    names = ["momentum", "momentum-baseline", "momentum-parity"]
    of_tcs, of_baseline, beside = (lab.format_estimate(main.loc[name]) for name in names)
    parity, without = main.loc["momentum-parity"], lab.format_estimate(main.loc["parity"])
    theirs = lab.format_estimate(parity, "paper", "paper_low", "paper_high")
    display(Markdown(f"""In our main comparison ([13_evidence](13_evidence.ipynb)), global momentum changed the test accuracy of TCS by {of_tcs} percentage points.
(The brackets have 95 % intervals, and each kind of training was run {parity["n"]} times.) Momentum changed the accuracy of centralized training, which the paper calls the *Baseline*,
by {of_baseline}. Without momentum, TCS differed from the Baseline by {without}; with momentum in both, it differed by {beside} points. In the paper, the difference with momentum is {theirs}."""))  # fmt: skip
else:
    display(Markdown("The accuracies would be read from `results/evidence/claims.csv`, which is not here."))  # fmt: skip

# %% [markdown]
# Why not apply momentum at the clients, before the compression? That is another method, deep gradient compression (DGC), which
# [17_rivals](17_rivals.ipynb) compares with TCS, and the hook for PyTorch DDP can do it, too ([12_real_training](12_real_training.ipynb)).
#
# ## Claim
#
# We check the following statements:
#
# 1. The corrected rule is PyTorch's, up to rounding (1e-12 in float64), and the misprinted rules are not.
# 2. The federation has the same weights as `torch.optim.SGD`, with compression and without. The tolerance of 1e-6 covers the rounding of float32.
# 3. A client's message is as long as without momentum. (We compare the first sparse round of each.)
#
# Whether TCS reaches the accuracy of centralized training with momentum is not among these statements;
# [13_evidence](13_evidence.ipynb) judges it.


# %%
def message_bits(config):
    federation = lab.Training(config, data)
    for epoch in range(epochs):
        for _ in federation.rounds(epoch):
            if not federation.compressor.known.dense:
                return federation.compressor.bits_up


torch_path = paths["torch.optim.SGD"]
off = {}
for name in rules:
    off[name] = max(abs(a - b) for a, b in zip(paths[name], torch_path, strict=True))
misprints = [name for name in rules if name != "put right"]
claim(
    "the corrected rule is PyTorch's",
    off["put right"] < 1e-12,
    lab.format_number(off["put right"], 1),
)
for name in misprints:
    far = off[name] > 0.1 if momentum >= 0.1 else None
    claim(f"{name}: not PyTorch's rule", far, f"{lab.format_number(off[name], 2)} away")
claim("the federation's weights are torch.optim.SGD's", max(dense_gap, sparse_gap) < 1e-6,
      f"to {lab.format_number(dense_gap, 1)} dense, {lab.format_number(sparse_gap, 1)} compressed")  # fmt: skip
bits, bits_plain = message_bits(config), message_bits(plain)
claim("a message is as long as without momentum", bits == bits_plain, f"{bits:,} bits")

# %% [markdown]
# ## Exercises
#
# Replace `return None` by your own lines. Each cell compares your function with the one in `tcs_core.py`.
#
# **1. The step.** Everybody has received the average `g_D`. Return the new `theta_D` and the new `w_D`.
#
# <details><summary>Hint</summary>
#
# Use the two equations under *Algorithm 3, put right*. The second one needs the new $w$, not the old one.
#
# </details>


# %%
def momentum_step(theta_D, w_D, g_D, eta, beta):
    return None  # yours


lab.check_exercise("momentum_step", momentum_step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def momentum_step(theta_D, w_D, g_D, eta, beta):
#     w_D = beta * w_D + g_D
#     return theta_D - eta * w_D, w_D
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
def momentum_step(theta_D, w_D, g_D, eta, beta):
    w_D = beta * w_D + g_D
    return theta_D - eta * w_D, w_D


assert lab.teaching.judge_solution("momentum_step", momentum_step) == "right"

# %% [markdown]
# **2. The wrong sign.** The paper's text prints $\theta_t = \theta_{t-1} + \eta_t w_t$. In the first step
# $w = g$. For a small step, the loss changes by the inner product of the gradient and the change of θ. Return this change of the loss
# for the rule as printed, and then for the rule as meant. Which of the two descends?
#
# <details><summary>Hint</summary>
#
# `a @ b` is the inner product of two vectors. The two changes differ only in their sign.
#
# </details>


# %%
def loss_changes(gradient_D, eta):
    return None  # yours


lab.check_exercise("loss_changes", loss_changes)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def loss_changes(gradient_D, eta):
#     step_D = eta * gradient_D
#     return gradient_D @ step_D, gradient_D @ -step_D  # up by the plus, down by the minus
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
def loss_changes(gradient_D, eta):
    step_D = eta * gradient_D
    return gradient_D @ step_D, gradient_D @ -step_D  # up by the plus, down by the minus


assert lab.teaching.judge_solution("loss_changes", loss_changes) == "right"

# %% [markdown]
# ## What we saw

# %% jupyter={"source_hidden": true} tags=["remove-input"]
often = len(memory) * tcs.kept(phi_global, len(federation.theta_D)) / len(federation.theta_D)
print(claim.summary())
display(Markdown(f"""What surprised us is the memory: on average, {statistics.mean(memory):.0%} of a step moves entries that the round's update did not contain. We measured
this in one short training, in which an average entry is in the shared mask {often:.1f} times. In the paper, it is there more than 200 times."""))  # fmt: skip

# %% [markdown]
# Notebook [08_tables_and_curves](08_tables_and_curves.ipynb) shows Table 3 for larger trainings. Next,
# [06_sparse_encoding](06_sparse_encoding.ipynb) turns positions into bits.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Made with {lab.describe_core()} and torch {torch.__version__}, on images ({data.label}).")
