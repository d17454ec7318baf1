# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Keep the momentum on every side
#
# **Claim (Sec. II-D, Alg. 3, Table 3).** When clients send sparsified *gradients*, everybody can keep the
# same momentum without sending it, and with it TCS reaches the accuracy of centralized training with
# momentum.
#
# You will read Algorithm 3, with its misprints put right, beside the code; see on one number what each
# misprint would do; check that the core does what `torch.optim.SGD` does; look at what momentum means for
# a sparse update; and train with and without it.
#
# *Run time*: about 45 s. *Read before*: 03.

# %%
import dataclasses
import inspect
import math
import statistics

import matplotlib.pyplot as plt
import pandas as pd
import torch
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True, "font.size": 10})

# %% [markdown]
# ## Parameters

# %% tags=["parameters"]
momentum = 0.9  # beta
learning_rate = 0.5  # eta of the federated schemes; centralized training has the paper's 0.1
seeds = 3  # how many trials, or a list of seeds
phi_global = 1e-2  # share of the entries kept by the mask that all sides know
phi_local = 1e-3  # share kept by each client's own mask
value_bits = 32  # q, bits of a value: 32, or 1 to 16 to quantize
local_steps = 1  # H; the paper combines global momentum only with H = 1
profile = "ci"  # how large this is; nothing is written
dataset = "synthetic"  # synthetic, or cifar10 (downloads)
train_samples = 480  # the first so many training images
test_samples = 500  # the first so many test images
model = "resnet8"  # resnet8 or resnet18
width = 8  # channels of its first stage
clients = 5  # N
batch_size = 8  # B, samples of one local step; centralized training takes twice as many
epochs = 8  # passes over the data
warmup_epochs = 1  # dense epochs at the start
warmup_learning_rate = 0.1  # eta of the first round
drops = [0.75]  # when eta falls by 10, as shares of the epochs
reference_batch = None  # cumulative batch at which learning rates hold; None: not scaled
dirichlet_alpha = None  # class skew among clients; None: IID

# %%
params = tcs.notebook_params(globals(), also={"momentum", "value_bits", "local_steps"})
fields = {k: v for k, v in params.items() if k in tcs.RUN_KEYS}
trials = range(seeds) if isinstance(seeds, int) else seeds
sparse = {"phi_global": phi_global, "phi_local": phi_local}
sparse |= {"value_bits": value_bits, "local_steps": local_steps}
plain = tcs.RunConfig(tcs.Scheme.named("TCS", **sparse), seed=trials[0], **fields)
named = tcs.Scheme.named("TCS-Global Momentum", **sparse, momentum=momentum)
config = dataclasses.replace(plain, scheme=named)
data = tcs.load_dataset(dataset).first(train_samples, test_samples)
probe = tcs.Federation(config, data)
print(f"D = {len(probe.theta_D):,} parameters, N = {clients}, beta = {momentum:g}")

# %% [markdown]
# ## Algorithm 3, put right
#
# Momentum replaces the gradient by a decaying sum of all gradients so far. Here each client sends its
# sparsified gradient, the server averages, and *everybody*, server and clients, applies
#
# $$w_t = \beta\, w_{t-1} + \tilde g_{t-1}, \qquad \theta_t = \theta_{t-1} - \eta_t\, w_t$$
#
# to the same average $\tilde g$. So all have the same $w$, and it never travels: that is what is *global*
# about it. The paper prints this rule correctly only when text and algorithm box are read together:
#
# | line of the box | printed | meant, and run here |
# |---:|:---|:---|
# | 5 | $S_{top}(g_{t-1}, K_{global})$ | $S_{top}(\tilde g_{t-1}, K_{global})$, of what all have received |
# | 7 | $w_t = w_{t-1} + \beta\, \bar g_{t-1}$ | $w_t = \beta\, w_{t-1} + \tilde g_{t-1}$, as in the text: β on the other term, and not $\bar g$, which one client alone knows |
# | 8 | $\theta_t = \theta_{t-1} - \eta_t w_t$; a plus in the text | minus |
# | 17 | the mean of what arrives; the *sum* in the text | mean |
#
# Lines 10 to 14 are those of Algorithm 2, with gradients in the place of model differences: masks,
# error accumulation, all as before. The whole round in the core:

# %%
print(inspect.getsource(tcs.Federation.round))

# %% [markdown]
# You should see one `if`: without momentum the gradients are turned into a model difference before the
# compression, with momentum they are sent as they are, and the server's step has two lines, not one.
#
# ## What the misprints would do
#
# One parameter, $f(\theta) = \theta^2 / 2$, so the gradient is $\theta$ itself. Four rules, from the same
# start: PyTorch's, the text's, the box's (β on the wrong term), and the text's with its plus sign.

# %%
steps, eta = 60, 0.1
rules = {
    "text": lambda w, g, theta: (w := momentum * w + g, theta - eta * w),
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
    paths["torch.optim.SGD"].append(float(theta))

# %% tags=["nbval-check-output"]
for name, path in paths.items():
    print(f"{name:25s}" + "".join(f"  step {t}: {path[t]:10.4f}" for t in (1, 2, 10, 30, 60)))

# %%
figure, axes = plt.subplots(figsize=(7.6, 3.4))
for i, name in enumerate(["torch.optim.SGD", *rules]):
    look = {"color": tcs.COLOURS[i], "linestyle": tcs.DASHES[i], "marker": tcs.MARKERS[i]}
    if name == "torch.optim.SGD":
        look |= {"linestyle": "", "markerfacecolor": "none", "markersize": 8}
    axes.plot(paths[name], label=name, markevery=3, **({"markersize": 4} | look))
axes.set(title="Minimizing θ²/2 from θ = 1", xlabel="step", ylabel="θ", ylim=(-1.5, 2.4))
axes.legend(frameon=False, ncols=2, loc="upper right")
plt.show()

# %% [markdown]
# You should see the text's rule inside PyTorch's circles at every step. With β on the wrong term nothing is ever
# forgotten: $w$ is the sum of all gradients, and θ swings for ever like a pendulum without friction.
# With the plus sign it climbs out of the picture.
#
# ## The same as torch.optim.SGD, on a real network
#
# Nothing compressed, one client: this must be plain SGD with momentum. We let the federation train a
# small ResNet, hand its gradient of every round to `torch.optim.SGD`, which moves a second copy of the
# first weights, and compare all weights after every round. If they agree after round $t$, the gradient of
# round $t + 1$ is the right one for both; so agreement in all rounds is equivalence.


# %%
def gap_to_torch(config):
    federation = tcs.Federation(config, data)
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
print(f"nothing compressed, 1 client:  largest difference {dense_gap:.0e} in {rounds} rounds")
sparse_gap, rounds = gap_to_torch(config)
print(f"TCS, {clients} clients:              largest difference {sparse_gap:.0e} in {rounds} rounds")

# %% [markdown]
# You should see the same weights, with and without compression. The second line says how to use it:
# global momentum *is* `torch.optim.SGD(momentum=β)` on every side, fed with the received $\tilde g$ in the
# place of a gradient. (Weight decay is in the clients' gradients here, so the optimizer has none.)
#
# ## What momentum means for a sparse update
#
# $\tilde g$ has at most $K_{global} + N K_{local}$ entries, but $w$ remembers: an entry of $\tilde g$ that
# came once lives on as $\beta, \beta^2, \dots$ of itself. So the model moves in many more places than
# were received. And there are two ways to choose a mask: from $\tilde g$, as in line 5, or from $w$.

# %%
federation, seen = tcs.Federation(config, data), []
masks = {"g": [], "w": []}
k_global = federation.compressor.rule.k_global
for epoch in range(epochs):
    for update_D in federation.rounds(epoch):
        if not federation.compressor.last_dense:
            w = federation.momentum_D
            seen.append([float((v != 0).float().mean()) for v in (update_D, w)])
            masks["g"].append(tcs.top_k_mask(update_D, k_global))
            masks["w"].append(tcs.top_k_mask(w, k_global))
print(f"{len(seen)} sparse rounds; one client's message: {federation.compressor.bits_up:,} bits")

# %%
overlap = {k: float((torch.stack(m)[1:] & torch.stack(m)[:-1]).sum()) for k, m in masks.items()}
overlap = {k: total / k_global / (len(seen) - 1) for k, total in overlap.items()}
without = tcs.Federation(plain, data)
for update_D in without.rounds(0):
    pass
for _ in without.rounds(warmup_epochs):
    break
same_bits = federation.compressor.bits_up == without.compressor.bits_up
print(f"not zero: {seen[-1][0]:.1%} of the last update, {seen[-1][1]:.0%} of the momentum")
print(f"successive masks in common: {overlap['g']:.0%} of S_top(g), {overlap['w']:.0%} of S_top(w)")
print(f"a client's message has as many bits as without momentum: {same_bits}")

# %% [markdown]
# PLACEHOLDER
