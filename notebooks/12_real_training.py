# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Train for real, with less on the wire
#
# This notebook uses TCS outside a simulation, as a communication hook of PyTorch's DistributedDataParallel (DDP). It says what the hook
# saves in seconds, what it costs in loss, and how you put it into a training of your own. You need to know what DDP does: every process
# computes gradients on its own part of a batch, and all processes average these gradients before the optimizer's step.
#
# *Run time*: about 30 s on two free cores of a Xeon. *Read before*: [03_tcs](03_tcs.ipynb). The grey bars are folded code cells: click one
# to open it. The second one holds the settings.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Ge, Len
from IPython.display import Markdown, display
from tcs_lab.studies import frontier, hook_choice, links, optimizers
from tcs_lab.support.processes import run_within, torchrun_command

import tcs_core as tcs

plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True, "font.size": 10})

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
processes = 2  # started by torchrun; each is a rank with a model of its own
phi_global = 5e-2  # fraction of the gradient in the mask that all ranks share
phi_local = 1e-2  # fraction that each rank adds of its own
start_iter = 10  # steps of plain all-reduce at the start
steps = 120  # in all
batch_size = 16  # samples per step of a rank
learning_rate = 0.2  # of SGD; it falls linearly to zero
train_samples = 1600  # synthetic images
test_samples = 500  # synthetic images to test on
image_size = 16  # height and width in pixels, averaged from 32
width = 8  # channels of the ResNet-8's first stage
link_rates = [1, 10, 100]  # Mbit/s that a rank can send
compared_network = (
    "10 million"  # in the picture of loss and seconds: "GPT", "10 million" or "100 million"
)
compared_ranks = 2  # processes of that training
compared_link = 200  # Mbit/s of each process's own link in that training, in each direction
seed = 0  # of the model and the batches

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "12_real_training")
counts = ("processes", "steps", "batch_size", "train_samples", "test_samples", "image_size",
          "width")  # fmt: skip
kinds = dict.fromkeys(counts, lab.WholeNumber) | dict.fromkeys(
    ("phi_global", "phi_local"), lab.Fraction
)
kinds |= {
    "compared_network": Literal["GPT", "10 million", "100 million"],
    "compared_ranks": Annotated[int, Ge(2)],
    "compared_link": lab.PositiveNumber,
    "learning_rate": lab.PositiveNumber,
    "link_rates": Annotated[list[lab.PositiveNumber], Len(1)],
}
lab.check_values(globals(), **kinds, seed=lab.Seed, start_iter=lab.WholeNumber)
if start_iter > steps - 2:
    raise ValueError(
        f"start_iter: got {start_iter}, allowed: at most steps - 2, which is {steps - 2}"
    )

# %% jupyter={"source_hidden": true} tags=["remove-input"]
measured = links.read_stages("GPT", "10 million, settings", "100 million, settings")
four_ranks = links.read_stages("10 million, settings, four ranks")
small, costs = frontier.Frontier("small"), optimizers.Costs()
million, eight = frontier.Frontier("million"), frontier.Frontier("eight")
networks = {
    "GPT": links.Net(2, 208, "GPT"),
    "10 million": links.Net(10, 1000),
    "100 million": links.Net(4, 5000),
}
NATS = "{:+.3f}"


def with_adamw(scheme: str) -> optimizers.Setup:
    return optimizers.Setup("AdamW", scheme)


def rise_of(scheme: str) -> str:
    """What an exchange adds to the loss with AdamW, in nats per character."""
    if scheme == "bf16":
        return "not measured"
    cost = million.cost(with_adamw(scheme))
    return lab.format_interval(cost.value, cost.low, cost.high, NATS)


front = {"plain": "plain DDP", "bf16": "bf16", "PowerSGD rank 4": "PowerSGD rank 4", "top-K 1 %": "top-K 1 %",
         "TCS 1 and 0.5 %": "TCS 1 and 0.5 % (default)"}  # fmt: skip
net, lines = links.Net(10, 1000), []
for exchange, name in front.items():
    rise = "0" if exchange == "plain" else rise_of(exchange)
    line = {"Exchange": name, "Loss minus plain DDP's, nats per character": rise}
    for own in (10, 200, 1000, 10_000):
        line[f"s at {own:,} Mbit/s"] = (
            f"{measured.row(exchange, net, mbit=2.0 * own)['seconds']:.2g}"
        )
    lines.append(line)
start = (
    "**In short.** The hook exchanges only selected entries of a gradient. *Top-K* means that every process sends its own largest "
    "entries. *TCS* adds a mask that all processes share; its name says how many percent are shared, and how many each process chooses. "
    "With two processes, the hook makes steps on a link of up to 1,000 Mbit/s much shorter. So does PowerSGD, and all of them cost "
    "about the same loss. PowerSGD is the fastest on a very slow link, and the hook on a faster one. On a link of 10,000 Mbit/s, "
    "bf16 is faster than both, and the hook gains too little to be worth its loss. With eight or more processes, PowerSGD is the better choice on links "
    "of up to 200 Mbit/s, and the hook needs a larger shared mask (2 %). A *mask* is a set of positions. All times were measured on CPUs; on GPUs, the order may be another one."
)
display(Markdown("\n".join([start, "", lab.markdown(pd.DataFrame(lines))])))

# %% [markdown]
# The table joins two recorded experiments. The loss is that of a GPT of 1.1 million parameters with AdamW, trained by two simulated
# processes, in nats per character, with 95 % intervals; a positive number is worse. The seconds per step were measured with a network of
# linear layers, with 10 million parameters, on two real processes. Each has a link of its own, of this speed in each direction. The bf16
# hook sends gradients as 16-bit numbers. PowerSGD, another hook of PyTorch, sends low-rank approximations of them.
#
# The cells below train a third network, a ResNet-8 of about 20,000 parameters, with the hook and without it. You can change the settings of
# this training and run all cells again. The text between the cells describes the results for the values given here. For example:
#
# - `phi_global = 1e-2` and `phi_local = 1e-3` let a sparse step hand over about a fifth of the bytes that it hands over here. In our trial, the loss fell more
#   slowly, and two of the statements at the end were contradicted.
# - `start_iter = 60` makes half of the steps dense. In our trial, the final losses came closer together, but the whole training saved less
#   than half of the bytes.
# - `compared_ranks = 8` changes the picture of loss and seconds further below. TCS with 2 and 0.5 % then has the smallest loss of the exchanges that save
#   bytes, and PowerSGD takes the least time on links of up to 200 Mbit/s.
#
# **Claim (beyond the paper).** With the hook, the ResNet-8 ends at most 0.25 above the loss of plain DDP and at most 10 points below its
# accuracy (one seed, synthetic images), and the processes hand over at most a fifth of the bytes. These margins are wide: they only show
# that the training works. What the hook costs in loss is measured further below. On a slow link, it saves most of the time that a training
# step spends waiting for the network.
#
# All processes know where the last averaged gradient was largest, so they can share a mask without sending it. The values on it form one
# ordinary, dense vector, which `all_reduce` can average; from two processes to many, its traffic at most doubles. What each process chooses
# itself needs an `all_gather` of values and positions, and this traffic grows with the number of processes. The training below is short, so
# it has larger masks than the default of the hook: 5 % shared and 1 % own entries, after 10 dense steps. The default is 1 % and 0.5 %. What
# a process does not send it keeps as its *errors*, and adds to its next gradient.

# %% [markdown]
# ## A training script, and two lines for the hook
#
# The script below is an ordinary DDP training. It trains the same network from the same start twice, first without the hook and then with
# it. The hook needs two lines: one creates `state`, the other registers `tcs_hook`. The argument `model=model` tells the state which
# process group the model uses and what its parameters are called. A saved state then also fits a model whose parameters come in another
# order.
#
# The hook treats each backward pass as one training step: what it does not send now, it sends in a later step. If no optimizer step follows
# directly, as in gradient accumulation, put the forward and the backward pass under `model.no_sync()`. The docstring of `TCSState` explains
# this in more detail.

# %%
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
import tcs_core, tcs_lab as lab

given, target = json.loads(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
data = lab.load_dataset("synthetic").first(given["train_samples"], given["test_samples"])
data = data.resize(given["image_size"])
batches = lab.Batches(data, torch.device("cpu"))

def train(hooked):
    torch.manual_seed(given["seed"])
    model = DistributedDataParallel(tcs_core.build_model("resnet8", given["width"]))
    shares = {key: given[key] for key in ("phi_global", "phi_local", "start_iter")}
    state = tcs_core.TCSState(**shares, model=model)
    if hooked:
        model.register_comm_hook(state, tcs_core.tcs_hook)
    optimizer = torch.optim.SGD(model.parameters(), given["learning_rate"])
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, given["steps"])
    generator, losses, sent = torch.Generator().manual_seed(given["seed"]), [], []
    everything, start = torch.arange(len(data.train_labels)), time.perf_counter()
    for _ in range(given["steps"]):
        draws = lab.Draws.of(everything, ranks * given["batch_size"], generator)
        images, labels = batches.augment(draws[rank::ranks])
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falling.step()
        losses.append(loss.detach())
        sent.append(dict(state.bytes_sent))
    seconds, losses = time.perf_counter() - start, torch.stack(losses)
    dist.all_reduce(losses)
    images, labels = batches.test(slice(None))
    with torch.no_grad():
        right = (model.eval()(images).argmax(1) == labels).float().mean()
    return {"losses": (losses / ranks).tolist(), "sent": sent, "accuracy": float(right),
            "seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}

results = {"plain": train(False), "TCS": train(True)}
if rank == 0:
    json.dump(results, open(target, "w"))
dist.destroy_process_group()
os._exit(0)  # a thread of gloo may outlive Python and abort
"""

# %% [markdown]
# `torchrun` starts the processes, tells each process its number (its *rank*), and stops all of them if one fails. The processes themselves
# are often called ranks, too. On several machines, start `torchrun` once on each machine with `--nnodes` and the address of one of them.

# %%
names = ["phi_global", "phi_local", "start_iter", "steps", "batch_size", "learning_rate"]
names += ["train_samples", "test_samples", "image_size", "width", "seed"]
net, images = tcs.build_model("resnet8", width), torch.randn(batch_size, 3, image_size, image_size)
what = f"steps, {steps} in each of two DDP trainings"
print(lab.forecast_steps(2 * steps, what, lambda: net(images).sum().backward()))
with tempfile.TemporaryDirectory() as folder:
    script, target = Path(folder) / "train.py", Path(folder) / "results.json"
    script.write_text(SCRIPT, encoding="utf-8")
    own = [str(script), json.dumps({name: globals()[name] for name in names}), str(target)]
    path = f"{lab.ROOT}:{lab.ROOT / 'notebooks'}"
    run_within(
        60 + 10 * steps, torchrun_command(processes, *own), OMP_NUM_THREADS="1", PYTHONPATH=path
    )
    results = json.loads(target.read_text(encoding="utf-8"))
D = results["plain"]["parameters"]
print(
    f"{processes} processes trained {D:,} parameters for {steps} steps, without the hook and with it."
)

# %% [markdown]
# ## What a rank handed to the collectives
#
# The hook counts the bytes of every tensor that it hands to a collective operation, in three groups:
#
# - `dense` are the full gradients of the first steps.
# - `shared` are the values on the shared mask, which go to `all_reduce` without positions.
# - `explored` are the entries that a rank selected itself. They go to `all_gather`, and each of them takes
#   four bytes for its value and four for its position.
#
# Plain DDP hands over all gradients in every step. These are $4D$ bytes, where $D$ is the number of parameters.

# %%
sent = pd.DataFrame(results["TCS"]["sent"], index=range(1, steps + 1))
plain = 4 * D * np.arange(1, steps + 1)
table = (sent.iloc[[-1]] / 1e3).add_prefix("TCS ").add_suffix(", kB")
table.insert(0, "plain DDP, kB", plain[-1] / 1e3)
display(table.set_axis([f"all {steps} steps"]).round(1))
ratio = plain[-1] / sent.iloc[-1].sum()
a_step = sent.diff().iloc[-1]
print(f"In all {steps} steps, TCS handed over 1/{ratio:.1f} of the bytes of plain DDP.")
print(
    f"In one sparse step, it handed over {a_step.sum():,.0f} bytes instead of {4 * D:,}, which is 1/{4 * D / a_step.sum():.1f}."
)

# %% [markdown]
# A step of the hook differs from a message in the paper in two ways. A position takes four bytes here. With the paper's Algorithm 4 it
# takes only about one byte, but the hook does not encode its tensors. The ranks also exchange a few numbers that say which parameters
# received a gradient. To compare, we ask a `Compressor` with the same fractions how long the message of one client would be. We expect that
# a step of the hook hands over at most 1.15 times as many bytes.

# %%
compressor = tcs.Compressor(
    tcs.Scheme.named("TCS", phi_global=phi_global, phi_local=phi_local), [D], clients=1
)
for _ in range(2):  # the first step is dense
    compressor.step(torch.ones(1, D))
print(
    f"The message of a client has {compressor.bytes_up:,} bytes; a step of the hook hands over {a_step.sum():,.0f} bytes."
)

# %% [markdown]
# ## Loss against steps, and against bytes

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
traffic = {"plain": plain / 1e6, "TCS": sent.sum(axis=1).to_numpy() / 1e6}
smooth, labels = {}, {"plain": "plain DDP", "TCS": "TCS hook"}
for name, colour, dash in (("plain", lab.COLOURS[0], "-"), ("TCS", lab.COLOURS[1], "--")):
    smooth[name] = pd.Series(results[name]["losses"]).ewm(span=15).mean().to_numpy()
    style = {"color": colour, "linestyle": dash, "label": labels[name]}
    left.plot(range(1, steps + 1), smooth[name], **style)
    right.plot(traffic[name], smooth[name], **style)
lab.name_pair(left, right, "step", "training loss (moving average)", "MB that a rank handed over")
left.axvline(start_iter, color="0.6", linewidth=0.8)
left.annotate("dense until here", (start_iter, 0.04), xycoords=("data", "axes fraction"),
              xytext=(4, 0), textcoords="offset points", color="0.35")  # fmt: skip
left.legend(frameon=False)
lab.show_figures()

# %% [markdown]
# On the left, the two curves lie close together. With the hook, the loss falls a little more slowly. A probable reason is that most of a
# gradient is first kept back in the errors, and applied some steps later. On the right, the curve of the hook lies far to the left: after
# the dense start, it reached every loss with fewer bytes.
#
# ## What a link would have cost
#
# We can calculate how long the ranks would have waited for a link. In a ring of $R$ ranks, each rank sends $2\frac{R-1}{R}$ times the bytes
# that it hands to `all_reduce`, and $R-1$ times those that it hands to `all_gather`. We divide this by the speed of the link. The result is
# the shortest possible waiting time if no transfer overlaps with the backward pass. The table adds up all steps.

# %%
ring, gather = 2 * (processes - 1) / processes, processes - 1
total = sent.iloc[-1]
through = {
    "plain": ring * plain[-1],
    "TCS": ring * (total.dense + total.shared) + gather * total.explored,
}
seconds = pd.DataFrame(
    {
        labels[name]: [8 * size / (1e6 * link) for link in link_rates]
        for name, size in through.items()
    },
    index=pd.Index([f"{link} Mbit/s" for link in link_rates], name="link"),
)
display(seconds.round(2).rename(columns=lambda name: f"{name}, s"))
computed = results["plain"]["seconds"]

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, axes = plt.subplots(figsize=(6.6, 3.2))
seconds.plot.bar(ax=axes, color=lab.COLOURS[:2], rot=0, width=0.7, logy=True)
for bars, hatch in zip(axes.containers, ("", "//"), strict=True):
    _ = [bar.set_hatch(hatch) for bar in bars]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line below
    axes.bar_label(bars, fmt="%.3g s", fontsize=9, padding=2, bbox=box)
label = "the whole run with plain DDP, on one machine"
axes.axhline(computed, color="0.35", linewidth=1, linestyle=":", label=label)
axes.set(xlabel="", ylabel="seconds on the wire", title=f"{steps} steps of {D:,} parameters")
axes.set_ylim(seconds.to_numpy().min() / 3, max(seconds.to_numpy().max(), computed) * 3)
axes.legend(frameon=False, loc="upper right")
lab.show_figures()

# %% [markdown]
# This network is tiny. With the 11,173,962 parameters of ResNet-18, plain DDP hands over 44.7 MB per step. Two ranks need about six minutes
# to exchange them at 1 Mbit/s, and still 3.6 s at 100 Mbit/s. With more ranks, it takes up to twice as long.
#
# ## The link, measured
#
# We also measured whole training steps on links of limited speed. Two ranks, each with one thread, ran on the two cores of one machine.
# They exchanged their gradients over the loopback device, and the kernel limited the speed of what both ranks sent together. With a limit
# of 20 Mbit/s, for example, each rank has 10 Mbit/s in each direction, as on a link of its own. In the next table, speeds are those of a
# rank's own link. The networks are a GPT of 1.1 million parameters, which a later section trains, and two linear networks of 10 and 100
# million parameters with a batch of 16. The command `uv run tcs queue params/links.yaml` repeats the measurement and needs root.
#
# We also calculated each time, in two ways:
#
# - For the hook and PowerSGD, it is the time of a step without a limit, plus the transfer time.
# - For plain DDP and bf16, memory copies overlap with the transfer. So it is the time of the passes, plus the transfer time, but at least the
#   time of a step without a limit.
#
# The transfer time is the number of bytes that both ranks send, with packet headers, divided by the limit.
#
# The table shows the measured seconds per step. Each is the median of five to nine steps, or of fewer steps where the table gives n. The
# number in brackets is the measured time divided by the calculated one. The calculation can be too long where the transfer takes about as
# long as the rest of the step, because it does not know which copies go on during the transfer.

# %%
display(Markdown(lab.markdown(measured.tabulate_limited())))
print(f"Measurements that agree with the calculation: {measured.agreement(within=0.25)}.")

# %% [markdown]
# What does the exchange itself cost when the speed is not limited? In the next table, "Spent on it" is the fraction of a step that is spent
# neither on the passes nor in the optimizer. "Peak" is the largest amount of memory that a rank used beyond what it had used before the
# model existed. (In networks this small, memory that was freed before hides a part of it.)

# %%
display(Markdown(lab.markdown(measured.tabulate_unlimited())))

# %% [markdown]
# So with a batch of 16 on these cores, the hook saves time on slow links. Where the speed is not limited, a hook with few entries takes
# about as long as plain DDP.
#
# ## What each setting costs
#
# Which entries should the hook send, and how many? We trained a GPT of 33,191 parameters on the text of [16_text](16_text.ipynb), with 100
# dense steps followed by 5,000 sparse ones. Two ranks are simulated in one process; the result is the same as with the hook, bit for bit.
# The plan, `params/hook_plan.yaml`, was fixed before the first of these trainings. In it, every setting has a learning rate of its own,
# which is the best one on validation text. Three other seeds then give the loss on test text.
#
# The names of settings of TCS say the size of the shared mask first, and then the size of each rank's own mask. Top-K has no shared mask.
# PowerSGD was simulated, too; in a network this small it cannot send less than 7 % of the bytes.
#
# In the tables, "Rise" is the test loss minus that of dense training by the same optimizer, in nats per character, with a 95 % interval.
# For all intervals, the spread between seeds is estimated from all these trainings together. "Corrected" means that momentum is computed by
# each rank before the compression, as in the method DGC ([17](17_rivals.ipynb)). The hook does this with `TCSState(momentum=0.9)`; the
# optimizer then has no momentum of its own.

# %%
for optimizer, name in (("AdamW", "AdamW"), ("momentum", "SGD with momentum")):
    table = small.tabulate(optimizer)
    if len(table):
        display(Markdown(f"**{name}**\n\n{lab.markdown(table)}"))
print(f"{small.made} of {small.planned} planned trainings that score have been made.")
if small.diverged:
    print("A training diverged with", ", ".join(map(str, sorted(small.diverged, key=str))))

# %% [markdown]
# Three things can be read from the table of AdamW.
#
# - **What each rank chooses matters more than what all ranks share.** Compare settings with the same shared mask: the loss falls clearly when the
#   ranks' own masks grow. Compare settings with the same own mask: a larger shared mask changes less. The paper's split, ten to one, is a poor
#   choice here.
# - **With two ranks, no setting of TCS was clearly better than top-K with as many bytes.** Two settings of TCS send as many bytes as one of top-K. The next cell has the differences of the loss, whose intervals contain 0. This may change with the number of ranks, because the traffic of what each rank
#   chooses grows with it.
# - **PowerSGD needs more bytes for the same loss** in this small network, in which it cannot send as little as in larger ones.
#
# With AdamW, all settings without momentum correction had the same best learning rate in this small GPT, which is also the best one for
# dense training. (In the larger one, with two processes, the best rate of TCS was 0.001, and that of the others 0.0005.) Does momentum
# correction help? The next cell says how much it changes the loss, on average over the twelve settings, for the optimizers of which
# trainings have been made.

# %%
for optimizer in small.stage.optimizers:
    change, pairs = small.effect_of_correction(optimizer)
    if pairs:
        word = "helps" if change.high < 0 else "harms" if change.low > 0 else "may help or harm"
        print(
            f"{optimizer}: momentum correction {word}. It changes the loss by "
            f"{lab.format_interval(change.value, change.low, change.high, NATS)} (mean of {pairs} settings)."
        )
best = optimizers.Setup("momentum", "top-K 1 %", corrected=True)
gap = small.compare({best: 1.0, optimizers.Setup("momentum", "dense"): -1.0})
print(
    f"SGD with momentum, the loss of top-K 1 % with correction minus that of dense training: {lab.format_interval(gap.value, gap.low, gap.high, NATS)}"
)
for ours, theirs in (("TCS 0.5 and 0.25 %", "top-K 0.5 %"), ("TCS 1 and 0.5 %", "top-K 1 %")):
    gap = small.compare({with_adamw(ours): 1.0, with_adamw(theirs): -1.0})
    print(
        f"AdamW, the loss of {ours} minus that of {theirs}: {lab.format_interval(gap.value, gap.low, gap.high, NATS)}"
    )

# %% [markdown]
# ### A larger network, and eight processes
#
# The plan has two further stages, with AdamW and a GPT of 1.1 million parameters. Its rules choose six settings from the table above: dense
# training, the best PowerSGD, the best top-K and the three best settings of TCS that send no more than this PowerSGD. The first stage has
# two processes. The second has eight, with a quarter of the text for each of them, so that a step reads as much text. All rates were tuned
# again. By the plan, a setting is as good as PowerSGD if it hands over no more bytes, and the whole interval of its difference is at most
# 0.02 nats above PowerSGD. With two ranks, what a rank hands over to the collective operations is also what it sends. With eight, it sends
# 1.75 times its bytes of `all_reduce` and 7 times those of `all_gather`, so the settings of the hook send more than PowerSGD there, and the
# last column of the table judges the loss alone.

# %%
for stage, words in ((million, "Two processes"), (eight, "Eight processes")):
    if stage.known:
        display(Markdown(f"**{words}**\n\n{lab.markdown(hook_choice.tabulate_losses(stage))}"))
    print(f"{words}: {stage.made} of {stage.planned} planned trainings that score have been made.")

# %% [markdown]
# In the larger network with two processes, the settings differ much less than in the small one, and the bytes of PowerSGD come closer to
# those of the hook. Every exchange costs some loss. With two processes, all of them cost about the same. With eight, the shared mask should
# be larger: with 0.5 or 1 % shared entries, the hook loses somewhat more than PowerSGD, with 2 % it does not, and neither does top-K.
#
# ## Loss against seconds
#
# The next picture joins both results: the loss of the GPT of 1.1 million parameters, and the seconds of a step of the network that you
# choose in the second grey cell (`compared_network`), for your number of processes (`compared_ranks`) and your link (`compared_link`).
# Filled points are measured seconds, empty points are calculated ones. Seconds were measured for two processes and five speeds. From five
# processes on, the losses are those of the stage with eight processes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
stage = million if compared_ranks < 5 else eight
choices = hook_choice.list_choices(
    stage, measured, networks[compared_network], compared_ranks, compared_link
)
fig, axes = plt.subplots(figsize=(7.6, 3.4))
hook_choice.draw_choices(axes, choices)
of = "" if compared_network == "GPT" else " parameters"
axes.set_title(f"{compared_network}{of}, {compared_ranks} processes, {compared_link:g} Mbit/s each")
lab.show_figures()

# %% [markdown]
# The first table has the seconds for this network and these processes on all links; calculated ones are marked with ≈. The second table
# says for all networks which of the four settings of the hook are at least as good as PowerSGD in both: no more seconds per step, and a
# loss of which the whole interval is at most 0.02 nats above PowerSGD's.

# %%
own_links = [10, 50, 200, 1000, 10_000]
seconds_of = hook_choice.tabulate_seconds(
    stage, measured, networks[compared_network], compared_ranks, own_links
)
display(Markdown(lab.markdown(seconds_of)))
by_ranks = {2: million, 8: eight, 16: eight}
as_good = hook_choice.tabulate_as_good(by_ranks, measured, networks, own_links)
display(Markdown(lab.markdown(as_good)))

# %% [markdown]
# Is the calculation right for more than two processes? On the two cores of the same machine, we measured four processes with the linear
# network of 10 million parameters, and compare them with the calculation from two processes.

# %%
linear = networks["10 million"]
for own in (10, 50, 200):
    ratios = [
        four_ranks.row(way, linear, 4, 4.0 * own)["seconds"]
        / measured.seconds(way, linear, 4, own)[0]
        for way in ("plain", "bf16", *(c.setup.scheme for c in choices[1:]))
    ]
    print(
        f"Four processes at {own} Mbit/s each: the measured seconds are {min(ratios):.2f} to {max(ratios):.2f} times the calculated ones."
    )

# %% [markdown]
# At 10 Mbit/s, the calculation is right within 7 %. At 50 and 200 Mbit/s, some steps took longer than calculated. Probably this is because
# four processes share two cores here, so that each of them computes at about half the speed. The calculation does not contain this.
#
# **What we would use.** For networks of 10 million parameters or more and two processes, use PowerSGD on links of 10 and 50 Mbit/s. On
# links of 200 and 1,000 Mbit/s, use the hook with its default, TCS with 1 and 0.5 %, which was at least as good as PowerSGD in loss and in
# time. (For the GPT of 1.1 million parameters and two processes, it was the faster one on all links.) With four processes, this holds from
# 1,000 Mbit/s. With eight or more processes, use PowerSGD on links of up to 200 Mbit/s. With eight processes on links of 1,000 Mbit/s, the
# hook with 2 and 0.5 % was at least as good in loss and, by calculated seconds, in time. With its default, its loss was slightly higher
# than that of PowerSGD. On a link of 10,000 Mbit/s, no exchange is worth its loss, except perhaps bf16, of which we have not measured the
# loss. With SGD with momentum, give the momentum to the hook. We have compared losses for only one kind of model and one length of
# training, and measured no GPUs, so test your choice on your own training.

# %% [markdown]
# ## Larger masks, and plain SGD
#
# An older study, `params/optimizers.yaml`, has two cases that the new plan lacks: masks of 10 %, and SGD without momentum. Its settings
# share the learning rate that is best for dense training, so its differences contain what a better rate would have gained. The table shows
# the test loss minus that of the same optimizer without compression, with a 95 % interval. The verdict is *nothing* (it costs less than
# 0.05) if the whole interval lies below 0.05, *costs* if it lies above 0.05, and *open* otherwise. In this study, TCS has the paper's
# split: *TCS 1 %* shares 1 % of the entries, and each rank adds 0.1 % of its own; *TCS 10 %* has ten times as many of both.

# %%
display(Markdown(lab.markdown(costs.table())))
print(f"{len(costs.records)} of {costs.planned} planned runs have been made.")

# %% [markdown]
# We have not varied the length of these trainings, and we did not clip gradients.
#
# ## To be copied
#
# The following script is a complete training with AdamW, autocast, gradient accumulation, clipping, and checkpoints from which it can
# resume. Every rank saves a file of its own, because every rank has its own errors.
#
#     uv run torchrun --nproc-per-node 2 notebooks/examples/ddp_training.py 300 checkpoints

# %%
example = lab.ROOT / "notebooks/examples/ddp_training.py"
display(Markdown(f"```python\n{example.read_text(encoding='utf-8')}```"))

# %% [markdown]
# With *Accelerate*, call `model.register_comm_hook(state, tcs.tcs_hook)` after `model = accelerator.prepare(model)`. We tried this with
# version 1.15 on two CPU ranks.
#
# With *Lightning* 2.6, use `Trainer(strategy=DDPStrategy(ddp_comm_state=state, ddp_comm_hook=tcs.tcs_hook))`. We have not tested this,
# because Lightning registers hooks on GPUs only. On a CPU, it trains without the hook and gives no warning.
#
# ## How the hook works
#
# DDP hands over the gradients in groups, called buckets, and the hook keeps one `Client` of Algorithm 2 for each bucket. There is no
# server, because the collective operations do its work. The first steps are dense (step 1 in the code). In a sparse step, each rank
#
# 2. adds the gradient of the bucket to its errors, and selects its own largest entries outside the shared mask,
# 3. hands its values on the shared mask to `all_reduce`,
# 4. hands the values and positions of its own entries to `all_gather`,
# 5. averages both; the largest entries of this average become the next shared mask.
#
# The rest of the code makes sure that all ranks do the same. If one rank has a value that is not finite, all ranks receive NaN, and their
# errors stay unchanged. If the ranks start with different masks, they raise ValueError.

# %%
lab.show_code(tcs.tcs_hook)

# %% [markdown]
# ## The claim, checked

# %%
final = {name: values[-1] for name, values in smooth.items()}
accuracy = {name: results[name]["accuracy"] for name in results}
each_sparse_step = sent.diff().iloc[start_iter:]
same = bool((each_sparse_step == a_step).all(axis=None)) and total.dense == 4 * D * start_iter
claim("every sparse step hands over the same bytes", same, f"{a_step.sum():,.0f}")
claim(
    "a step hands over at most 1.15 times the bytes of a message",
    a_step.sum() <= 1.15 * compressor.bytes_up,
)
claim(
    "TCS hands over at most a fifth of the bytes, dense start included", ratio > 5, f"1/{ratio:.1f}"
)
claim(
    "the loss of TCS is at most 0.25 higher",
    final["TCS"] < final["plain"] + 0.25,
    f"{final['TCS']:.2f}, {final['plain']:.2f}",
)
claim("the accuracy of TCS is at most 10 points lower", accuracy["TCS"] > accuracy["plain"] - 0.1,
      f"{accuracy['TCS']:.1%}, {accuracy['plain']:.1%}")  # fmt: skip

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())
print(
    f"The training loss ended at {final['plain']:.2f} with plain DDP and at {final['TCS']:.2f} with TCS."
)
print(
    f"The test accuracy was {accuracy['plain']:.1%} with plain DDP and {accuracy['TCS']:.1%} with TCS."
)
print(
    f"TCS handed over 1/{ratio:.1f} of the bytes in the whole training, and 1/{4 * D / a_step.sum():.1f} in a sparse step."
)
slowest = seconds.iloc[0]
print(
    f"At {link_rates[0]} Mbit/s, the ranks would wait {slowest.iloc[1]:.0f} s for the link instead of {slowest.iloc[0]:.0f} s."
)
took = [f"{results[name]['seconds']:.1f} s ({labels[name]})" for name in results]
print(f"On this one machine, the runs took {' and '.join(took)}.")

# %% [markdown]
# The hook has three costs: a somewhat higher loss after the same number of steps, the time to select entries, and memory. The errors alone
# need as much memory as the gradients. Where sending is cheap, as within one machine, the hook brings no benefit.
#
# A federation can also run on real processes. In `notebooks/examples/federation.py`, every process is a client and also runs a copy of the
# server. The processes exchange only encoded messages:
#
#     uv run torchrun --nproc-per-node 4 notebooks/examples/federation.py 50
#
# Next: [13_evidence](13_evidence.ipynb) shows which results of the paper we could confirm.

# %%
print(
    f"Made with {lab.describe_core()} in {processes} processes, on synthetic images of {image_size} x {image_size} pixels. "
    "One run of each (n = 1)."
)
