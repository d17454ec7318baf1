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
# **Claim (beyond the paper).** A model, a loss and one list of batches a client are enough to see, in about twenty lines,
# what TCS would save *you*: dense federated averaging, top-K and TCS side by side, loss against bytes.
#
# *Run time*: about 50 s on two cores of a Xeon. *Read before*: [03_tcs](03_tcs.ipynb).

# %% jupyter={"source_hidden": true}
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
from torch import nn

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True} | lab.LOOK)

# %% jupyter={"source_hidden": true} tags=["parameters"]
clients = 4  # each has data of its own, from 1000 samples up
rounds = 1000  # with one local step each; an entry gets to be sent rounds x phi_global times
batch_size = 16  # samples of a local step
learning_rate = 0.1  # eta
warmup = 40  # dense rounds at the start
schemes = ["FedAvg", "top-K", "TCS", "TCS-Q5"]  # the first is what the others are compared with
adaptive = ["FedAvg-L4", "TCS-L4"]  # the same with AdamW at the clients
adaptive_rate = 3e-3  # AdamW's
tolerance = 0.05  # the same loss is at most so much higher than the first scheme's, as a share
many_clients = [10, 100, 1000]  # of which ten take part in a round
many_width = 512  # of the perceptron for many clients: 273,921 parameters
seed = 0  # of data, first weights and batches

# %% jupyter={"source_hidden": true}
lab.check_notebook_params(globals())
answer = display(Markdown("*The answer comes here when the comparison has run.*"), display_id=True)
picture = display(Markdown("*And its picture.*"), display_id=True)
claim = lab.Statements(globals(), "15_your_own_model")
whole = dict.fromkeys(("clients", "rounds", "batch_size", "warmup", "many_width"), lab.Count)
positive = dict.fromkeys(("learning_rate", "adaptive_rate", "tolerance"), lab.Positive)
names = Annotated[list[str], Len(2)]  # two or more
lab.check_values(globals(), **whole, **positive, schemes=names, adaptive=names)
lab.check_values(globals(), many_clients=list[lab.Count], seed=lab.Seed)
if warmup >= rounds:
    raise ValueError(f"warmup: got {warmup}, allowed: less than rounds, which is {rounds}")

# %% [markdown]
# ## Yours: data and model
#
# The federation of the other notebooks knows nothing of images: it takes any `torch.nn.Module` with float32 parameters. Here
# it is one on a made-up regression, with batch norm, dropout and a frozen part; the clients have different data, and more or less of it.
# Put your own in the place of the two cells here, and keep their names: `own`, `counts`, `test`, `model_of()` and `loss`. (With
# the parameters as they are a claim that is not supported stops the notebook: with data of your own, change one, such as `seed`.)
#
# `own[n]` is what client n can learn from, as batches: here, noisy values of one unknown function, each client's seen from
# another region. The last client has the most: `counts`. `test` is one batch. Tensors are used as they come, so put them where the
# model is.

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
# A `Federation` takes the model, an iterable of batches for each client (a `DataLoader` will do; it is begun anew when it
# ends), a scheme's name, and a rate or a schedule. `weights` are the clients' shares of the average: here, how much data each
# has. Clients take plain SGD steps, or those of a `local_optimizer`. The schedule is dense in the warm-up, or what the scheme has instead
# (`-NW`: no warm-up; `-W`: a sparse one with larger masks; `++`: no warm-up and shorter codes: [10b_fewer_bytes](10b_fewer_bytes.ipynb)). A scheme with -L4
# takes four local steps a round, in a quarter of the rounds. After a round the compressor knows how long the messages were, headers in:
# `bytes_up` of all clients, `bytes_down` from the server to each of them.


# %%
def schedule_of(scheme: tcs.Scheme, rate: float):
    """Warm-up at first, as the scheme says; a tenth of the rate from three quarters on."""

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
    """The test loss: no dropout, and batch norms with the mean of the clients' statistics."""
    with federation.evaluated() as model:
        return loss(model, test).item()


# %%
def federation_of(
    name: str, rate: float = learning_rate, optimizer=None, **changes
) -> tcs.Federation:
    """A federation before its first round; `changes` are those of the scheme's fields."""
    torch.manual_seed(seed)
    scheme = tcs.Scheme.named(name, **changes)
    return tcs.Federation(model_of(), own, scheme, schedule_of(scheme, rate), loss=loss,
                          weights=counts, local_optimizer=optimizer)  # fmt: skip


def trained(federation: tcs.Federation) -> pd.DataFrame:
    """Its curve."""
    count, rows, megabytes = rounds // federation.scheme.local_steps, [], 0.0
    for t in lab.followed(range(1, count + 1), "rounds"):
        federation.round()
        sent = federation.compressor.traffic
        megabytes += (sent.bytes_up + len(own) * sent.bytes_down) / 1e6
        if t % (count // 20 or 1) == 0 or t in (warmup, count):
            rows.append({"round": t, "MB": megabytes, "loss": tested(federation)})
    return pd.DataFrame(rows)


# %%
curves = {scheme: trained(federation_of(scheme)) for scheme in schemes}

# %%
last = pd.DataFrame({scheme: curve.iloc[-1] for scheme, curve in curves.items()}).T
last["times fewer bytes"] = last["MB"].iloc[0] / last["MB"]
last["loss, × the first"] = last["loss"] / last["loss"].iloc[0]
shapes = {
    "MB": "{:,.1f}",
    "loss": "{:.4f}",
    "times fewer bytes": "{:.1f}",
    "loss, × the first": "{:.2f}",
}
readable = pd.DataFrame({name: last[name].map(shape.format) for name, shape in shapes.items()})
display(Markdown(lab.markdown(readable.reset_index(names="scheme"))))

# %% jupyter={"source_hidden": true}
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.8), sharey=True)
for scheme, curve in curves.items():
    style = lab.curve_style(scheme, curves) | {"markersize": 4}
    left.plot(curve["round"], curve["loss"], **style, label=scheme)
    dense = curve.loc[curve["round"] == warmup, "MB"].iloc[0]  # the same for all
    sparse = curve[curve["round"] > warmup]
    right.plot(sparse["MB"] - dense, sparse["loss"], **style)
lab.name_pair(left, right, "round", "test loss", "MB of all clients after the warm-up")
left.legend(frameon=False)
picture.update(fig)  # at the top
plt.close(fig)

# %% [markdown]
# ## What to choose
#
# Choose the scheme that gets to the first one's last loss (within the tolerance), and stays there, with the fewest bytes. If none of the sparse ones does, train longer, or keep
# more entries: a cell with `curves["TCS, 5 %"] = trained(federation_of("TCS", phi_global=0.05))` after the one that trains gives another row. Most
# bytes here are the warm-up's: with 4 % dense rounds no scheme saves more than 25 times (those with -NW, -W or ++ have none). An entry gets to be sent 10 times on average,
# rounds × $\phi_{global}$ (in the paper 234 times); near ten, expect large losses.


# %%
def reached(curves: dict[str, pd.DataFrame]) -> dict[str, float]:
    """MB until each is, and stays, at the loss that the first one ends with; infinite: never."""
    target = (1 + tolerance) * next(iter(curves.values()))["loss"].iloc[-1]
    stays = {name: (curve["loss"] <= target)[::-1].cummin()[::-1] for name, curve in curves.items()}
    return {name: min(curves[name]["MB"][at], default=math.inf) for name, at in stays.items()}


def verdict(curves: dict[str, pd.DataFrame]) -> tuple[bool, str]:
    """Whether another than the first gets to that loss, and for how few bytes, in words."""
    megabytes, (first, *others) = reached(curves), curves
    best = min(others, key=megabytes.__getitem__)
    if megabytes[best] < math.inf:
        line = f"×{megabytes[first] / megabytes[best]:.0f} fewer bytes at the same loss: {best}"
        return True, f"{line}, {megabytes[best]:.1f} MB where {first} needs {megabytes[first]:.1f}"
    ends = {name: curve.iloc[-1] for name, curve in curves.items()}
    near = min(others, key=lambda name: ends[name]["loss"])
    more, fewer = ends[near]["loss"] / ends[first]["loss"], ends[first]["MB"] / ends[near]["MB"]
    line = f"the same loss is not reached: {near} ends {more - 1:.0%} higher"
    return False, f"{line}, for ×{fewer:.0f} fewer bytes"


# %%
same_loss, saved = verdict(curves)
size = sum(p.numel() for p in model_of().parameters() if p.requires_grad)
answer.update(
    Markdown(f"""**{saved[0].upper()}{saved[1:]}** (test loss within {tolerance:.0%}; both ways, all clients, warm-up
in). {clients}\u00a0clients, {size:,} trained parameters, {rounds:,} local steps; one run of each scheme.""")
)
print(saved)

# %% [markdown]
# ## Your optimizer at the clients
#
# `local_optimizer` is a function of the parameters. Every client has such an optimizer of its own, whose state stays with it
# and is saved with the federation. Its rate is the schedule's, so give it none of its own. What travels is where a client ends minus where it began.


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, weight_decay=1e-2)


own_optimizer = {name: federation_of(name, adaptive_rate, adamw) for name in adaptive}
adaptive_curves = {name: trained(federation) for name, federation in own_optimizer.items()}
for name, curve in adaptive_curves.items():
    print(
        f"AdamW, {name:10s} {curve['MB'].iloc[-1]:7.1f} MB, test loss {curve['loss'].iloc[-1]:.4f}"
    )
_, with_adamw = verdict(adaptive_curves)
print(f"AdamW: {with_adamw}")

# %% [markdown]
# With -L4 an entry is sent only 2.5 times here. So this cannot say whether AdamW or the few rounds cost some of the loss. AdamW's steps are
# about equally large in all entries, so the largest hundredth is a smaller part of a difference than with SGD, and more of it waits.
# `adaptive = ["FedAvg", "TCS"]` has four times as many rounds.
#
# ## Variants of federated averaging
#
# Several well-known variants need nothing but the arguments that you have seen. Each of the next cells is one of them, with a small net
# and four local steps in a round. A plain PyTorch loop does the same beside it, and the cell prints the largest difference of any
# parameter after five rounds. Write the name of a sparse scheme in the place of `FedAvg-L4`, and the same variant sends fewer bytes.


# %%
def small() -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))


def trained_of(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def played_by_hand(net: nn.Module, local, server=None) -> nn.Module:
    """Five rounds in plain PyTorch. `local(net, n, t)` trains a client's copy in place. Then the mean of the copies is the new net,
    or an optimizer of the server steps by minus the mean difference."""
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
    print(f"{variant}: largest difference from plain PyTorch {differences[variant]:.0e}")


# %% [markdown]
# **FedProx** holds a client near the model that it began with: the loss has a term $\frac{\mu}{2} \lVert \theta - \theta_t \rVert^2$. Between
# two rounds the module holds $\theta_t$, so that its parameters can be copied there.

# %%
mu, start = 0.5, []


def proximal(model, batch):
    away = sum((p - q).square().sum() for p, q in zip(trained_of(model), start, strict=True))
    return loss(model, batch) + mu / 2 * away


federation = tcs.Federation(small(), own, "FedAvg-L4", learning_rate, loss=proximal)
for _ in range(5):
    start[:] = [p.detach().clone() for p in trained_of(federation.model)]
    federation.round()


# %% jupyter={"source_hidden": true}
def proximal_by_hand(net: nn.Module, n: int, t: int) -> None:
    before = copy.deepcopy(net)

    def objective(model, batch):
        pairs = zip(trained_of(model), trained_of(before), strict=True)
        return loss(model, batch) + mu / 2 * sum((p - q.detach()).pow(2).sum() for p, q in pairs)

    sgd_by_hand(net, n, t, objective=objective)


compare("FedProx", federation.model, played_by_hand(small(), proximal_by_hand))

# %% [markdown]
# **LoRA adapters alone**: the layers stay as they are, and beside each of them the product of two thin matrices is trained. A federation trains,
# compresses and sends what requires a gradient, and nothing else.


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
    f"{sum(tcs.layer_sizes(adapted))} of {sum(p.numel() for p in adapted.parameters())} parameters"
)
compare("LoRA", adapted, played_by_hand(begun, sgd_by_hand))

# %% [markdown]
# **Unequal numbers of local steps**, as when clients with unequal data all make one pass in a round: `local_steps` is the largest
# number, and the feed has nothing more for a client that is done. A loss of zero then leaves it where it is. (With plain SGD and no
# `weight_decay`; the momentum of an optimizer would move it on.)

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
# **FedAdam**: clients take plain steps, and the server takes one of Adam by minus the mean difference.


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
# **Heads of the clients' own.** A federation averages *all* parameters of its module that are trained. A head inside the module is
# averaged like everything else, without a word. A head that is to stay a client's own must stand outside the module: the batches say whose they are,
# and each head takes its step as soon as it has its gradient. (Save the heads beside the federation's state. A failed round does not take back
# their steps.) A batch norm of a client's own is not possible in this way, because its weights lie inside the module. Only its
# running statistics are a client's own, until the model is evaluated.

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

# %% jupyter={"source_hidden": true}
heads_by_hand = [copy.deepcopy(small()[2]) for _ in range(clients)]


def train_with_head(net: nn.Module, n: int, t: int) -> None:
    both = nn.Sequential(net, heads_by_hand[n])
    sgd_by_hand(both, n, t)


body_by_hand = played_by_hand(small()[:2], train_with_head)
compare("own heads", nn.Sequential(body, *heads), nn.Sequential(body_by_hand, *heads_by_hand))

# %% [markdown]
# ## The module is still yours
#
# Parameters are ordinary tensors, which hold the trained values after every round; modes, the frozen part and its values are as their owner
# left them. `averaged_state_dict` is what one saves: norms have the mean of the clients' statistics.

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
print(f"test loss {tested(federation):.4f}, saved and loaded {reloaded:.4f}")
print(f"frozen values as they were: {untouched}; every part in training mode, as it was: {modes}")

# %% [markdown]
# ## A thousand clients
#
# What a client has not sent yet waits in its errors, D numbers each: `errors_ND` grows with the number of clients (as do
# the statistics of batch norm, which are few). A round works on the errors of its ten participants alone. On a CPU, memory is taken
# only where errors are written, 4 · D bytes for each client that has taken part, so that its first round can take longer. If that is too much, let a new file hold them, before
# the first round: `compressor.keep_errors_in(torch.from_file("errors.bin", True, N * D).view(N, D))`. (What an old file holds would count
# as errors: delete it.) In params files `errors_limit` is the number of MB above which errors live in a file. Here with a made-up net
# and data.


# %%
def resident() -> float:
    """Memory of this process that is really there, in MB (Linux)."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next(
        (int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS")), torch.nan
    )


def squared(net: nn.Module, batch: tuple) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


played = 12  # rounds of each federation


def timed_rounds(count: int) -> tuple[float, tcs.Federation]:
    """The median round of a federation of so many clients, ten at a time, in ms."""
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
    """One line of the table below."""
    before = resident()
    took, federation = timed_rounds(count)
    errors_ND, memory = federation.compressor.errors_ND, resident() - before
    written[count] = sum(bool(errors_D.any()) for errors_D in errors_ND)
    return {"clients": f"{count:,}", "D": f"{errors_ND.shape[1]:,}",
            "a round, ms (median)": f"{took:.0f}",
            "errors of all, MB": f"{errors_ND.nbytes / 1e6:,.0f}",
            f"clients with errors after {played} rounds": f"{written[count]}",
            "memory then, MB": f"{memory:,.0f}"}  # fmt: skip


# %%
written: dict[int, int] = {}
crowds = pd.DataFrame([crowd(count) for count in many_clients])
display(Markdown(lab.markdown(crowds)))

# %% [markdown]
# ## What is refused
#
# A mistake gets one line that says what is wrong: a model with nothing to train, a loss that is not a number, a client
# without data, data that ends early.

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
# 1. Every scheme sends fewer bytes than dense training.
# 2. Some sparse scheme gets to the dense one's test loss, within the tolerance.
# 3. What was saved is what was tested, and what was frozen is as it was.
# 4. A round works on the errors of its participants alone, however many clients there are.
# 5. Each mistake gets one line.
# 6. The variants of federated averaging are those of a plain PyTorch loop, to rounding.

# %%
sparse = last.iloc[1:]
fewer = bool((sparse["MB"] < last["MB"].iloc[0]).all())
most = f"{last['times fewer bytes'].max():.0f} times at most"
claim("sparse schemes send fewer bytes", fewer, most)
claim(f"a sparse scheme is within {tolerance:.0%} of {schemes[0]}'s loss", same_loss)
same = reloaded == tested(federation)
claim("what was saved is what was tested; the rest is its owner's", same and untouched and modes)
alone = all(n == min(count, 10 * (played - 1)) for count, n in written.items())  # one is dense
claim("a round works on its participants' errors alone", alone)
claim("each mistake gets one line", all(line and "\n" not in line for line in said.values()))
farthest = max(differences.values())
claim("the variants are plain PyTorch's, to rounding", farthest < 1e-5, f"{farthest:.0e} at most")

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())
for scheme, row in last.iterrows():
    print(f"{scheme}: test loss {row['loss']:.4f}, {row['MB']:,.1f} MB")
print(f"AdamW: {with_adamw}")
print(f"In {rounds:,} local steps of {clients} clients: {saved}")

# %% [markdown]
# One run of each, on a small problem: a difference of a few percent may be chance. Run it with another `seed` before you
# choose. Next: [16_text](16_text.ipynb), a transformer on text, with recorded evidence.

# %%
print(f"core {lab.core_sha256()[:12]} · {clients} clients, made-up regression · n = 1 run of each")
