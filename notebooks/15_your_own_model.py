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
# **Claim (beyond the paper).** With a model, a loss function and a list of batches for each client, you can find out what TCS would save for
# *you*. This page trains a model with four methods, and compares the loss that each method reaches with the bytes that it sends. The methods
# are dense federated averaging (FedAvg), top-K, TCS, and TCS-Q5, which is TCS with values of 5 bits.
#
# *Run time*: about a minute on two cores of an AMD EPYC. *Read before*: [03_tcs](03_tcs.ipynb).
#
# The megabytes in the picture are those of all clients and the server. Its right half leaves out the dense rounds at the start, which are
# the same for every scheme. All schemes have the same learning rate here. Before you choose one, try several rates for each of them,
# because the best one differs.
#
# *How to use it*: the grey bars are folded code cells; click one to open it. The second one holds the parameters. Change them there and run
# all cells again. For example, `rounds = 200` should make the saving much smaller, because the 40 dense rounds of the warm-up are then a
# fifth of the training. `schemes = ["FedAvg", "TCS", "TCS-NW"]` compares TCS with and without a warm-up. Without it, TCS should send
# several times fewer bytes and reach about the same loss. `schemes` also takes the names in
# [17_rivals](17_rivals.ipynb), such as `"STC"` and `"top-K-K4"`. With `seed = 1`, the data are different. All losses should change, and the
# numbers of bytes should stay almost the same.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import io
import math
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
adaptive = ["FedAvg", "TCS"]  # schemes that are trained with AdamW at the clients
adaptive_rate = 3e-3  # learning rate of AdamW
tolerance = 0.05  # a loss that is at most this fraction higher counts as the same
seed = 0  # of the data, the first weights and the batches

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
answer = display(Markdown("*The answer will appear here after the comparison.*"), display_id=True)
picture = display(Markdown("*Its figure will appear here.*"), display_id=True)
claim = lab.Statements(globals(), "15_your_own_model")
whole = dict.fromkeys(("clients", "rounds", "batch_size", "warmup"), lab.WholeNumber)
positive = dict.fromkeys(("learning_rate", "adaptive_rate", "tolerance"), lab.PositiveNumber)
names = Annotated[list[str], Len(2)]  # two or more
lab.check_values(globals(), **whole, **positive, schemes=names, adaptive=names, seed=lab.Seed)
if warmup >= rounds:
    raise ValueError(f"warmup: got {warmup}, allowed: less than rounds, which is {rounds}")

# %% [markdown]
# ## Your data and your model
#
# The class `Federation` of `tcs_core` trains one model with many clients and a server. It accepts any `torch.nn.Module` with float32
# parameters. The example here is a made-up regression. Its model has batch norm, dropout and a frozen layer, and the clients have different
# data and different amounts of it.
#
# To use your own data and model, set `clients` to your number of clients, replace the next two cells, and keep the names that they define: `own`, `counts`, `test`, `model_of()` and
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
# ## A training with TCS
#
# A `Federation` takes the model, an iterable of batches for each client, the name of a scheme, and a learning rate or a schedule. When an
# iterable that can be started again, such as a list or a `DataLoader`, has ended, it is started again. (A generator cannot be, so it must
# be long enough.) `weights` says how much each client counts in the average. Here, its weight is its number of samples. Clients take plain
# SGD steps. (Another optimizer is shown below.)

# %%
federation = tcs.Federation(model_of(), own, "TCS", learning_rate, loss=loss, weights=counts)
for _ in range(10):
    federation.round()
sent = federation.compressor.bytes_up
print(f"In the last round, all clients together sent {sent:,} bytes.")
with federation.evaluated() as averaged:  # the model in evaluation mode
    print(f"The test loss is {loss(averaged, test).item():.3f}.")

# %% [markdown]
# ## The comparison
#
# To compare methods, the next cells make such a federation for each scheme, give it a schedule, and note the bytes and the test loss from
# time to time.
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


# %% jupyter={"source_hidden": true} tags=["remove-input"]
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
# So the saving depends on the optimizer, too. A possible reason is that the steps of AdamW have about the same size in all entries. The few
# entries that are sent then make up a smaller part of the update than with SGD. But the difference may also come from the learning rate,
# which was not tuned for either.
#
# ## The module is still yours
#
# The parameters of your module are ordinary tensors that hold the trained values after every round. Training mode and frozen parameters
# stay as you set them. Save the model with `averaged_state_dict`. In this dictionary, the running statistics of each batch norm are the
# mean over the clients. It is all that you need to use the model, but not to go on with its training: this also needs the errors, the mask
# and the number of the round. For this, save `federation.state_dict()`, and load it with `load_state_dict` into a new `Federation` with the
# same arguments.

# %%
federation = own_optimizer[adaptive[-1]]
file, again = io.BytesIO(), model_of()  # other random values than those trained
torch.save(federation.averaged_state_dict(), file)
again.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
with torch.no_grad():
    reloaded = loss(again.eval(), test).item()
torch.manual_seed(seed)
pairs = zip(federation.model.parameters(), model_of().parameters(), strict=True)
untouched = all(torch.equal(p, first) for p, first in pairs if not p.requires_grad)
modes = all(part.training for part in federation.model.modules())
print(
    f"The test loss of {adaptive[-1]} with AdamW is {tested(federation):.4f}; after saving and loading it is {reloaded:.4f}."
)
print(f"The frozen parameters are unchanged: {untouched}")
print(f"Every part is still in training mode: {modes}")

# %% [markdown]
# ## Variants of federated averaging, and many clients
#
# Several well-known variants of federated averaging need only a few lines. The file
# [federated_variants.py](examples/federated_variants.py) has FedProx, LoRA, unequal numbers of local steps, FedAdam, and a head of its own
# for each client. Each is a function that you can copy. For example, a federation averages *all* trained parameters of its module, also
# those of a head, without a warning. The function `personal_heads` shows how to keep the heads outside of the module, so that each client
# keeps its own. This command trains a small network with each variant, here with TCS and four local steps per round:
#
#     uv run python notebooks/examples/federated_variants.py TCS-L4
#
# With many clients, a federation may need much memory, because each client keeps what it has not sent yet (its errors): one number of four
# bytes for each trained parameter. With N clients and D trained parameters, this keeps the errors in a file instead, if it comes before the
# first round and the file is new (the content of an old one would be read as errors):
#
#     federation.compressor.keep_errors_in(torch.from_file("errors.bin", True, N * D).view(N, D))

# %% [markdown]
# ## Claim
#
# 1. Every sparse scheme sends fewer bytes than dense training.
# 2. In the comparison with SGD, at least one sparse scheme reaches the test loss of the dense one, within the tolerance.
# 3. The saved model is the one that was tested, and the frozen parameters are unchanged.

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
