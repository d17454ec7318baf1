# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · Your own model, your own data
#
# **Claim (beyond the paper).** With a model, a loss function and a list of batches for each client, about twenty lines of code show what
# TCS would save for *you*. They train the model with four methods, and compare the loss that each method reaches with the bytes that it
# sends. The methods are dense federated averaging (FedAvg), top-K, TCS, and TCS-Q5, which is TCS with values of 5 bits.
#
# *Run time*: about 50 s on two cores of a Xeon. *Read before*: [03_tcs](03_tcs.ipynb).
#
# *How to use it*: the grey bars are folded code cells; click one to open it. The second one holds the parameters. Change them there and run
# all cells again. For example, `rounds = 200` should make the saving much smaller, because the 40 dense rounds of the warm-up are then a
# fifth of the training. `schemes = ["FedAvg", "TCS", "TCS-NW"]` compares TCS with and without a warm-up. Without it, TCS should send
# several times fewer bytes and reach about the same loss. With `seed = 1`, the data are different. All losses should change, and the
# numbers of bytes should stay almost the same.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import copy
import io
import math
import time
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Len
from IPython.display import Markdown, display
from tcs_lab.teaching.cells import describe_figure
from torch import nn

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True} | lab.LOOK)

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
clients = 4  # each has its own data: the first 1000 samples, the second 2000, and so on
rounds = 1000  # of one local step each
batch_size = 16  # samples per local step
learning_rate = 0.1  # of plain SGD
warmup = 40  # dense rounds at the start
schemes = ["FedAvg", "top-K", "TCS", "TCS-Q5"]  # the others are compared with the first
adaptive = ["FedAvg-L4", "TCS-L4"]  # schemes that are trained with AdamW at the clients
adaptive_rate = 3e-3  # learning rate of AdamW
tolerance = 0.05  # a loss that is at most this fraction higher counts as the same
many_clients = [10, 100, 1000]  # numbers of clients; ten of them take part in each round
many_width = 512  # units per layer of the perceptron for many clients
seed = 0  # of the data, the first weights and the batches

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
answer = display(Markdown("*The answer will appear here after the comparison.*"), display_id=True)
picture = display(Markdown("*Its figure will appear here.*"), display_id=True)
claim = lab.Statements(globals(), "15_your_own_model")
whole = dict.fromkeys(("clients", "rounds", "batch_size", "warmup", "many_width"), lab.WholeNumber)
positive = dict.fromkeys(("learning_rate", "adaptive_rate", "tolerance"), lab.PositiveNumber)
names = Annotated[list[str], Len(2)]  # two or more
lab.check_values(globals(), **whole, **positive, schemes=names, adaptive=names)
lab.check_values(globals(), many_clients=list[lab.WholeNumber], seed=lab.Seed)
if warmup >= rounds:
    raise ValueError(f"warmup: got {warmup}, allowed: less than rounds, which is {rounds}")

# %% [markdown]
# ## Your data and your model
#
# The class `Federation` of `tcs_core` trains one model with many clients and a server. It accepts any `torch.nn.Module` with float32
# parameters. The example here is a made-up regression. Its model has batch norm, dropout and a frozen layer, and the clients have different
# data and different amounts of it.
#
# To use your own data and model, replace the next two cells and keep the names that they define: `own`, `counts`, `test`, `model_of()` and
# `loss`. The end of the notebook checks some statements about the results. With unchanged parameters, a statement that does not hold stops
# the notebook, and with your data, some may not hold. So please change one of the parameters as well, for example `seed`. Such a statement
# is then only reported.
#
# `own[n]` is the list of batches that client n learns from. Here the batches hold noisy values of one unknown function, and each client
# sees a different region of its inputs. `counts` holds the number of samples of each client. `test` is one batch. `model_of()` returns a
# new model, each time with the same starting values, and `loss(model, batch)` a scalar tensor. A batch can be anything that your `loss`
# understands. A federation does not move your tensors, so put them on the device of the model.

# %%
torch.manual_seed(seed)
teacher = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 1)).requires_grad_(False)
teacher[0].weight.mul_(3)
regions = 0.3 * torch.randn(clients, 20)


def samples(n: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 20) + regions[n]
    return x, teacher(x) + 0.05 * torch.randn(count, 1)


counts = [1000 * (n + 1) for n in range(clients)]
own = [[t.split(batch_size) for t in samples(n, count)] for n, count in enumerate(counts)]
own = [list(zip(*parts, strict=True)) for parts in own]  # batches: inputs and targets
test = [torch.cat(t) for t in zip(*(samples(n, c // 2) for n, c in enumerate(counts)), strict=True)]


# %%
def model_of() -> nn.Module:
    features = nn.Linear(20, 64).requires_grad_(False)  # as if it had been trained elsewhere
    hidden = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1)]
    last = [nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)]
    return nn.Sequential(features, nn.ReLU(), *hidden, *last)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


# %% [markdown]
# ## The comparison
#
# A `Federation` takes the model, an iterable of batches for each client, the name of a scheme, and a learning rate or a schedule. When an
# iterable that can be started again, such as a list or a `DataLoader`, has ended, it is started again. (A generator cannot be, so it must
# be long enough.) `weights` says how much each client counts in the average. Here, its weight is its number of samples. Clients take plain
# SGD steps, or the steps of a `local_optimizer`.
#
# A schedule says what the learning rate of a round is, and whether the round is dense. The one below begins with 40 dense rounds (the
# warm-up), unless the name of the scheme says otherwise. For example, a scheme with the suffix -NW has no warm-up
# ([10b_fewer_bytes](10b_fewer_bytes.ipynb) shows more such suffixes). A scheme with -L4 takes four local steps per round, and therefore
# needs a quarter of the rounds.
#
# The `compressor` is the part of a federation that makes and reads the messages. After each round, it knows the length of all messages,
# headers included. `bytes_up` is what all clients sent together, and `bytes_down` is what the server sent to each of them. So all traffic
# of a round is `bytes_up + N * bytes_down`.


# %%
def schedule_of(scheme: tcs.Scheme, rate: float):
    """Return a schedule: first the warm-up of the scheme, and in the last quarter a tenth of the rate."""

    def schedule(t: int) -> tcs.Phase:
        done = t * scheme.local_steps
        eta = rate * (0.1 if done >= 0.75 * rounds else 1.0)
        return (
            tcs.Phase(eta, scheme.dense_warmup, scheme.warmup_masks)
            if done < warmup
            else tcs.Phase(eta)
        )

    return schedule


@torch.no_grad()
def tested(federation: tcs.Federation) -> float:
    """Return the test loss, without dropout. Batch norms use the mean of the clients' statistics."""
    with federation.evaluated() as model:
        return loss(model, test).item()


# %%
def federation_of(
    name: str, rate: float = learning_rate, optimizer=None, **changes
) -> tcs.Federation:
    """Make a federation. `changes` sets fields of the scheme to other values than its name does."""
    torch.manual_seed(seed)
    scheme = tcs.Scheme.named(name, **changes)
    return tcs.Federation(model_of(), own, scheme, schedule_of(scheme, rate), loss=loss,
                          weights=counts, local_optimizer=optimizer)  # fmt: skip


def trained(federation: tcs.Federation) -> pd.DataFrame:
    """Train a federation and return its curve: rounds, megabytes sent so far, and test loss."""
    count, rows, megabytes = rounds // federation.scheme.local_steps, [], 0.0
    for t in lab.follow(range(1, count + 1), "rounds"):
        federation.round()
        sent = federation.compressor.traffic
        megabytes += (sent.bytes_up + len(own) * sent.bytes_down) / 1e6
        if t % (count // 20 or 1) == 0 or t in (warmup, count):
            rows.append({"round": t, "MB": megabytes, "loss": tested(federation)})
    return pd.DataFrame(rows)


# %%
what = f"local steps of {clients} clients, {rounds} in each of {len(schemes + adaptive)} trainings"
count, sample = rounds * len(schemes + adaptive), federation_of("FedAvg")
print(lab.forecast_steps(count, what, sample.round))
curves = {scheme: trained(federation_of(scheme)) for scheme in schemes}

# %%
last = pd.DataFrame({scheme: curve.iloc[-1] for scheme, curve in curves.items()}).T
last["times fewer bytes"] = last["MB"].iloc[0] / last["MB"]
last["loss ÷ loss of the first row"] = last["loss"] / last["loss"].iloc[0]
shapes = {
    "MB": "{:,.1f}",
    "loss": "{:.4f}",
    "times fewer bytes": "{:.1f}",
    "loss ÷ loss of the first row": "{:.2f}",
}
readable = pd.DataFrame({name: last[name].map(shape.format) for name, shape in shapes.items()})
display(Markdown(lab.markdown(readable.reset_index(names="scheme"))))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.8), sharey=True)
for scheme, curve in curves.items():
    style = lab.curve_style(scheme, curves) | {"markersize": 4}
    left.plot(curve["round"], curve["loss"], **style, label=scheme)
    dense = curve.loc[curve["round"] == warmup, "MB"].iloc[0]  # the same for all
    sparse = curve[curve["round"] > warmup]
    right.plot(sparse["MB"] - dense, sparse["loss"], **style)
lab.name_pair(left, right, "round", "test loss", "MB of all clients after the warm-up")
left.legend(frameon=False)
picture.update(fig, metadata={"image/png": {"alt": describe_figure(fig)}})  # at the top
plt.close(fig)

# %% [markdown]
# ## What to choose
#
# The table counts the megabytes that all clients and the server sent in the whole training, and gives the test loss at its end.
#
# The target is a loss that is at most 5 % (the parameter `tolerance`) above the loss with which the first scheme ends. Choose the scheme
# that reaches this loss, stays there, and has sent the fewest bytes until then. (These are fewer than the bytes of the whole training,
# which the table has.) If no sparse scheme reaches it, train longer or send more entries per round. For another row in the table, add a
# cell with `curves["TCS, 5 %"] = trained(federation_of("TCS", phi_global=0.05))` after the cell that trains.
#
# Two simple calculations help to judge the result. First, 40 of the 1,000 rounds here are dense. A scheme with this warm-up therefore sends
# at least a twenty-fifth of the bytes of dense training. In the table, more than half of what each sparse scheme sent belongs to the
# warm-up. Second, multiply the number of rounds by $\phi_{global}$, the fraction of entries in the shared mask (1 %). This is how often an
# entry would be in the shared mask on average if no round were dense. It is 10 times here and 234 times in the paper. If this number is
# only about ten, the loss may be higher than with FedAvg, although it is not in this small task.


# %%
def reached(curves: dict[str, pd.DataFrame]) -> dict[str, float]:
    """Return how many MB each scheme sent before it reached the final loss of the first and stayed there.

    The number is infinite for a scheme that never did.
    """
    target = (1 + tolerance) * next(iter(curves.values()))["loss"].iloc[-1]
    stays = {name: (curve["loss"] <= target)[::-1].cummin()[::-1] for name, curve in curves.items()}
    return {name: min(curves[name]["MB"][at], default=math.inf) for name, at in stays.items()}


def verdict(curves: dict[str, pd.DataFrame]) -> tuple[bool, str]:
    """Return whether a scheme reached the final loss of the first one, and a sentence with its bytes."""
    megabytes, (first, *others) = reached(curves), curves
    best = min(others, key=megabytes.__getitem__)
    if megabytes[best] < math.inf:
        line = f"{best} reached the loss of {first} with {megabytes[first] / megabytes[best]:.1f} times fewer bytes"
        return True, f"{line}: {megabytes[best]:.1f} MB instead of {megabytes[first]:.1f} MB"
    ends = {name: curve.iloc[-1] for name, curve in curves.items()}
    near = min(others, key=lambda name: ends[name]["loss"])
    more, fewer = ends[near]["loss"] / ends[first]["loss"], ends[first]["MB"] / ends[near]["MB"]
    subject = f"{near} did not reach" if len(others) == 1 else "no sparse scheme reached"
    line = f"{subject} the loss of {first}: {'it' if len(others) == 1 else near} ended with a loss {more - 1:.0%} higher"
    return False, f"{line} and sent {fewer:.1f} times fewer bytes"


# %%
same_loss, saved = verdict(curves)
size = sum(p.numel() for p in model_of().parameters() if p.requires_grad)
answer.update(
    Markdown(f"""**In short.** **On the example of this page, {saved}.** A scheme has reached this loss when its test loss is at most {tolerance:.0%} above the loss with which
{schemes[0]} ends, and stays there. The bytes are those that all clients and the server have sent until then, warm-up included. The training had {clients}\u00a0clients, {size:,} trained
parameters and {rounds:,} local steps, and each scheme was trained once.""")
)
print(f"{saved[0].upper()}{saved[1:]}.")

# %% [markdown]
# ## Your optimizer at the clients
#
# `local_optimizer` is a function that receives parameters and returns an optimizer. Every client gets an optimizer of its own. Its state
# stays with the client and is saved together with the federation. The learning rate comes from the schedule, so do not set one in the
# optimizer. As with plain SGD, each client sends by how much its parameters have changed in its local steps.


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, weight_decay=1e-2)


own_optimizer = {name: federation_of(name, adaptive_rate, adamw) for name in adaptive}
adaptive_curves = {name: trained(federation) for name, federation in own_optimizer.items()}
for name, curve in adaptive_curves.items():
    print(
        f"With AdamW, {name} sent {curve['MB'].iloc[-1]:.1f} MB; its test loss is {curve['loss'].iloc[-1]:.4f}."
    )
_, with_adamw = verdict(adaptive_curves)
print(f"With AdamW, {with_adamw}.")

# %% [markdown]
# With -L4 there are only 250 rounds, so an entry would be in the shared mask only 2.5 times on average. If TCS-L4 ends with a higher loss
# than FedAvg-L4, the cause can therefore be AdamW or the small number of rounds. To find out, set `adaptive = ["FedAvg", "TCS"]`. Without
# -L4, a round has one local step, so there are four times as many rounds. If the losses still differ, AdamW is the more likely cause. A
# possible reason is that its steps have about the same size in all entries. The few entries that are sent then make up a smaller part of
# the update than with SGD.
#
# ## Variants of federated averaging
#
# Several well-known variants of federated averaging need only a few lines. Each of the next cells shows one variant, with a small network
# and four local steps per round. A plain PyTorch loop then does the same, and we print by how much the parameters of the two networks
# differ at most after five rounds. If you replace `FedAvg-L4` by the name of a sparse scheme, the same variant sends fewer bytes.


# %%
def small() -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))


def trained_of(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def played_by_hand(net: nn.Module, local, server=None) -> nn.Module:
    """Train for five rounds in plain PyTorch.

    `local(net, n, t)` trains a client's copy in place. Without `server`, the mean of the copies is the new net. With it, an
    optimizer of the server takes a step, for which the gradient is minus the mean of the clients' changes.
    """
    optimizer = server(trained_of(net)) if server else None
    for t in range(5):
        copies = [copy.deepcopy(net) for _ in range(clients)]
        for n, copied in enumerate(copies):
            local(copied, n, t)
        for p, *others in zip(trained_of(net), *map(trained_of, copies), strict=True):
            mean = torch.stack([q.detach() for q in others]).mean(0)
            p.grad = p.detach() - mean
            p.data = p.data if optimizer else mean
        if optimizer:
            optimizer.step()
    return net


def sgd_by_hand(net: nn.Module, n: int, t: int, steps: int = 4, objective=loss) -> None:
    optimizer = torch.optim.SGD(trained_of(net), learning_rate)
    for tau in range(steps):
        optimizer.zero_grad()
        objective(net, own[n][(steps * t + tau) % len(own[n])]).backward()
        optimizer.step()


differences = {}


def compare(variant: str, net: nn.Module, by_hand: nn.Module) -> None:
    pairs = zip(trained_of(net), trained_of(by_hand), strict=True)
    differences[variant] = max(float((p - q).abs().max().detach()) for p, q in pairs)
    print(f"{variant}: the largest difference from plain PyTorch is {differences[variant]:.0e}")


# %% [markdown]
# **FedProx** keeps a client close to the model that it started from. Its loss has an additional term $\frac{\mu}{2} \lVert \theta -
# \theta_t \rVert^2$. Between two rounds, the module holds the common parameters $\theta_t$. We copy them before each round.

# %%
mu, start = 0.5, []


def proximal(model, batch):
    away = sum((p - q).square().sum() for p, q in zip(trained_of(model), start, strict=True))
    return loss(model, batch) + mu / 2 * away


federation = tcs.Federation(small(), own, "FedAvg-L4", learning_rate, loss=proximal)
for _ in range(5):
    start[:] = [p.detach().clone() for p in trained_of(federation.model)]
    federation.round()


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def proximal_by_hand(net: nn.Module, n: int, t: int) -> None:
    before = copy.deepcopy(net)

    def objective(model, batch):
        pairs = zip(trained_of(model), trained_of(before), strict=True)
        return loss(model, batch) + mu / 2 * sum((p - q.detach()).pow(2).sum() for p, q in pairs)

    sgd_by_hand(net, n, t, objective=objective)


compare("FedProx", federation.model, played_by_hand(small(), proximal_by_hand))

# %% [markdown]
# **LoRA** trains adapters only. The layers stay as they are, and the product of two thin matrices is trained beside each of them. A
# federation trains, compresses and sends only those parameters that require a gradient.


# %%
class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


adapted = nn.Sequential(*(Adapted(m) if isinstance(m, nn.Linear) else m for m in small()))
begun = copy.deepcopy(adapted)
federation = tcs.Federation(adapted, own, "FedAvg-L4", learning_rate, loss=loss)
for _ in range(5):
    federation.round()
print(
    f"{sum(tcs.layer_sizes(adapted))} of {sum(p.numel() for p in adapted.parameters())} parameters are trained and sent."
)
compare("LoRA", adapted, played_by_hand(begun, sgd_by_hand))

# %% [markdown]
# **Unequal numbers of local steps** occur, for example, if every client makes one pass over its data in a round and the clients have
# different amounts of data. Set `local_steps` to the largest number. The feed (`tcs.Feed`) gives each client its next batch. For a client
# that has finished, it returns None here, and the loss is then zero, so that the client's model does not change. This works with plain SGD
# without `weight_decay`. An optimizer with momentum would still move the client.

# %%
steps = [1 + n % 4 for n in range(clients)]  # of each client, at most 4


class Unequal(tcs.Feed):
    def batch(self, n, round, tau):
        return super().batch(n, round, tau) if tau < steps[n] else None


def loss_or_zero(model, batch):
    return 0.0 * sum(p.sum() for p in trained_of(model)) if batch is None else loss(model, batch)


federation = tcs.Federation(small(), Unequal(own), "FedAvg-L4", learning_rate, loss=loss_or_zero)
for _ in range(5):
    federation.round()
by_hand = played_by_hand(small(), lambda net, n, t: sgd_by_hand(net, n, t, steps[n]))
compare("unequal steps", federation.model, by_hand)

# %% [markdown]
# **FedAdam** lets the clients take plain SGD steps. The server then takes one Adam step. As the gradient of this step, it uses the mean of
# what the clients changed, with the opposite sign.


# %%
def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.99), eps=1e-3)


federation = tcs.Federation(
    small(), own, "FedAvg-L4", learning_rate, loss=loss, server_optimizer=adam
)
for _ in range(5):
    federation.round()
compare("FedAdam", federation.model, played_by_hand(small(), sgd_by_hand, adam))

# %% [markdown]
# **Personal heads.** A federation averages *all* trained parameters of its module. If a head is part of the module, it is averaged too,
# without a warning. To give each client a head of its own, keep the heads outside of the module. Each batch then says which client it
# belongs to, so that the loss can use the head of this client. Each head takes its step in a hook, during the backward pass, as soon as its
# gradient is ready.
#
# Save these heads yourself, beside the state of the federation. If a round fails, a federation restores its own state, but it does not undo
# the steps of these heads.

# %%
heads = [copy.deepcopy(small()[2]) for _ in range(clients)]
body = small()[:2]
feed = [[(n, *batch) for batch in own[n]] for n in range(clients)]


def step_of_head(p):
    p.data.sub_(p.grad, alpha=learning_rate)
    p.grad = None


for head in heads:
    for p in head.parameters():
        p.register_post_accumulate_grad_hook(step_of_head)


def with_head(body, batch):
    n, inputs, targets = batch
    return nn.functional.mse_loss(heads[n](body(inputs)), targets)


federation = tcs.Federation(body, feed, "FedAvg-L4", learning_rate, loss=with_head)
for _ in range(5):
    federation.round()

# %% jupyter={"source_hidden": true} tags=["remove-input"]
heads_by_hand = [copy.deepcopy(small()[2]) for _ in range(clients)]


def train_with_head(net: nn.Module, n: int, t: int) -> None:
    both = nn.Sequential(net, heads_by_hand[n])
    sgd_by_hand(both, n, t)


body_by_hand = played_by_hand(small()[:2], train_with_head)
compare("own heads", nn.Sequential(body, *heads), nn.Sequential(body_by_hand, *heads_by_hand))

# %% [markdown]
# ## The module is still yours
#
# The parameters of your module are ordinary tensors that hold the trained values after every round. Training mode and frozen parameters
# stay as you set them. Save the model with `averaged_state_dict`. In this dictionary, the running statistics of each batch norm are the
# mean over the clients.

# %%
federation = own_optimizer[adaptive[-1]]
file, again = io.BytesIO(), model_of()  # other random values than those trained
torch.save(federation.averaged_state_dict(), file)
again.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
with torch.no_grad():
    reloaded = loss(again.eval(), test).item()
torch.manual_seed(seed)
untouched = torch.equal(federation.model[0].weight, model_of()[0].weight)
modes = all(part.training for part in federation.model.modules())
print(
    f"The test loss of {adaptive[-1]} with AdamW is {tested(federation):.4f}; after saving and loading it is {reloaded:.4f}."
)
print(f"The frozen parameters are unchanged: {untouched}")
print(f"Every part is still in training mode: {modes}")

# %% [markdown]
# ## A thousand clients
#
# Each client keeps what it has not sent yet. These numbers are called its errors, and there is one for each of the D parameters. The errors
# of all N clients are the tensor `errors_ND`, which grows with the number of clients. In the example below, ten of the N clients take part
# in each of 12 rounds. (The first round is dense and leaves no errors.) A round works on the errors of these participants only. On a CPU,
# memory for a client's errors is used only once they are written, that is, after the client has taken part in a sparse round. It is then 4
# · D bytes.
#
# If this is too much memory, keep the errors in a new file. Call `compressor.keep_errors_in(torch.from_file("errors.bin", True, N *
# D).view(N, D))` before the first round. Delete an old file first, since its content would be read as errors.
#
# The next cells measure time and memory with a made-up network and made-up data.


# %%
def resident() -> float:
    """Return the memory that this process really uses, in MB. It is known on Linux only."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next(
        (int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS")), torch.nan
    )


def squared(net: nn.Module, batch: tuple) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


played = 12  # rounds of each federation; the first one is dense and leaves no errors


def timed_rounds(count: int) -> tuple[float, tcs.Federation]:
    """Return the median time of a round with ten of so many clients, in ms, and the federation."""
    middle = nn.Linear(many_width, many_width)
    net = nn.Sequential(
        nn.Linear(20, many_width), nn.ReLU(), middle, nn.ReLU(), nn.Linear(many_width, 1)
    )
    feed, times = [[(torch.randn(batch_size, 20), torch.randn(batch_size, 1))]] * count, []
    federation = tcs.Federation(net, feed, "TCS", learning_rate, loss=squared)
    for t in range(played):
        start = time.perf_counter()
        federation.round(sorted({(10 * t + i) % count for i in range(10)}))
        times.append(1e3 * (time.perf_counter() - start))
    return float(pd.Series(times[2:]).median()), federation


def crowd(count: int) -> dict[str, str]:
    """Return one row of the table below."""
    before = resident()
    took, federation = timed_rounds(count)
    errors_ND, memory = federation.compressor.errors_ND, resident() - before
    written[count] = sum(bool(errors_D.any()) for errors_D in errors_ND)
    return {"clients": f"{count:,}", "parameters (D)": f"{errors_ND.shape[1]:,}",
            "ms per round (median)": f"{took:.0f}",
            "size of errors_ND, MB": f"{errors_ND.nbytes / 1e6:,.0f}",
            f"clients with errors after {played} rounds": f"{written[count]}",
            "memory really used, MB": f"{memory:,.0f}"}  # fmt: skip


# %%
written: dict[int, int] = {}
crowds = pd.DataFrame([crowd(count) for count in many_clients])
display(Markdown(lab.markdown(crowds)))

# %% [markdown]
# ## What is refused
#
# Some mistakes are detected, and the error message says in one line what is wrong. Four examples are a model with nothing to train, a loss
# that is not a number, a client without data, and a generator that ends too early.

# %%
batch = (torch.zeros(2, 20), torch.zeros(2, 1))
frozen = nn.Linear(20, 1).requires_grad_(False)
mistakes = {
    "nothing to train": (frozen, [[batch]], squared),
    "not a number": (nn.Linear(20, 1), [[batch]] * 2, lambda m, b: squared(m, b) * torch.nan),
    "no data": (nn.Linear(20, 1), [[batch], []], squared),
    "ends early": (nn.Linear(20, 1), [iter([batch])], squared),
}


def complaint(model: nn.Module, feed: list, loss) -> str:
    try:
        federation = tcs.Federation(model, feed, "TCS", learning_rate, loss=loss)
        for _ in range(3):
            federation.round()
    except ValueError as error:
        return str(error)
    return ""


said = {what: complaint(*settings) for what, settings in mistakes.items()}
print("\n".join(f"{what:16s} {line}" for what, line in said.items()))

# %% [markdown]
# ## Claim
#
# 1. Every sparse scheme sends fewer bytes than dense training.
# 2. In the comparison with SGD, at least one sparse scheme reaches the test loss of the dense one, within the tolerance.
# 3. The saved model is the one that was tested, and the frozen parameters are unchanged.
# 4. A round works on the errors of its participants only, however many clients there are.
# 5. Each mistake produces an error message of one line.
# 6. Each variant of federated averaging gives the same parameters as a plain PyTorch loop, except for rounding.

# %%
sparse = last.iloc[1:]
fewer = bool((sparse["MB"] < last["MB"].iloc[0]).all())
most = f"the best one {last['times fewer bytes'].max():.1f} times fewer"
claim("sparse schemes send fewer bytes", fewer, most)
claim(f"a sparse scheme is within {tolerance:.0%} of {schemes[0]}'s loss", same_loss)
same = reloaded == tested(federation)
claim(
    "the saved model is the tested one, and nothing else of the user's model changes",
    same and untouched and modes,
)
alone = all(n == min(count, 10 * (played - 1)) for count, n in written.items())  # one is dense
claim("a round changes only the errors of its participants", alone)
claim(
    "each mistake gets an error of one line",
    all(line and "\n" not in line for line in said.values()),
)
farthest = max(differences.values())
claim("the variants are plain PyTorch's, to rounding", farthest < 1e-5, f"{farthest:.0e} at most")

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())
print(f"With SGD, {saved}. With AdamW, {with_adamw}.")

# %% [markdown]
# Each scheme was trained once, on a small problem, so a difference of a few percent may be chance. Repeat the comparison with another
# `seed` before you choose a scheme. Next: [16_text](16_text.ipynb) trains a transformer on text, and shows the stored results of longer
# trainings.

# %%
print(f"Made with {lab.describe_core()}, with {clients} clients and a made-up regression.")
