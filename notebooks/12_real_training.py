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
# **Claim (beyond the paper).** TCS leaves the simulator: as a communication hook of PyTorch's
# DistributedDataParallel it trains a network on several real processes to about the loss and accuracy of
# plain DDP, with a small part of its bytes; on a slow link most of the time that a step waits for the
# network is saved.
#
# TCS suits collectives better than top-K does. Where the last averaged gradient was largest, all
# processes know the positions, so those values are one ordinary, dense `all_reduce`. Only what each
# process finds for itself (a tenth of that in the paper, a fifth here) has to be gathered with its positions.
#
# *Run time*: about 30 s on two free cores of a Xeon. *Read before*: [03_tcs](03_tcs.ipynb). You need to know what DDP is: every process computes
# gradients on its own part of a batch, and all processes average them before the step.

# %% jupyter={"source_hidden": true}
import json
import tempfile
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Len
from IPython.display import Markdown, display
from tcs_lab.studies import links, optimizers
from tcs_lab.support.processes import run_within, torchrun_command

import tcs_core as tcs

plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True, "font.size": 10})

# %% [markdown]
# ## Parameters
#
# Change any of them and run all. Text between the cells describes what these values give;
# *Claim* and *What we saw* are worked out anew.

# %% jupyter={"source_hidden": true} tags=["parameters"]
processes = 2  # started by torchrun; each is a rank with a model of its own
phi_global = 5e-2  # share of the gradient that is reduced: the mask all ranks know
phi_local = 1e-2  # share that each rank adds of its own
start_iter = 10  # steps of plain all-reduce at the start
steps = 120  # in all
batch_size = 16  # samples of a rank's step
learning_rate = 0.2  # of SGD; falls linearly to nothing
train_samples = 1600  # synthetic images
test_samples = 500  # synthetic images to test on
image_size = 16  # pixels a side, averaged from 32
width = 8  # channels of the ResNet-8's first stage
link_rates = [1, 10, 100]  # Mbit/s a rank can send
seed = 0  # of the model and the batches

# %% jupyter={"source_hidden": true}
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "12_real_training")
counts = ("processes", "steps", "batch_size", "train_samples", "test_samples", "image_size",
          "width")  # fmt: skip
kinds = dict.fromkeys(counts, lab.Count) | dict.fromkeys(("phi_global", "phi_local"), lab.Share)
kinds |= {"learning_rate": lab.Positive, "link_rates": Annotated[list[lab.Positive], Len(1)]}
lab.check_values(globals(), **kinds, seed=lab.Seed, start_iter=lab.Count)
if start_iter > steps - 2:
    raise ValueError(
        f"start_iter: got {start_iter}, allowed: at most steps - 2, which is {steps - 2}"
    )

# %% [markdown]
# ## In short
#
# *Does the hook train?* A ResNet-8 of 20,000 parameters runs on this page. *How long is a step?* Linear nets of 10 and 100 million parameters were timed,
# two ranks. *What does it cost?* A GPT of 33,191 parameters was trained. The last two answers, from records:

# %% jupyter={"source_hidden": true}
measured, costs = links.Links(links.read_rows()), optimizers.Costs()
nets = {links.count_parameters(*net): net for net in ((10, 1000), (4, 5000))}
answer, most = [], list(links.SHARES)[-1]
for way in links.SHARES:
    rate = min(measured.pays_to(way, o, *net) for net in nets.values() for o in ("plain", "bf16"))
    cost = costs.cost(optimizers.Setup("AdamW", way))
    nats = lab.with_interval(cost.value, cost.low, cost.high)
    answer.append(f"""- **{way}** has shorter steps than plain DDP and its bf16 hook on links to {rate:,.0f} Mbit/s. It changes AdamW's test loss by {nats} nats:
  **{costs.judge(cost)}**.""")
found = {D_net: {way: measured.row(way, *net, mbit=1000.0) for way in links.WAYS[1:]}
         for D_net, net in nets.items()}  # fmt: skip
lines = [{"Seconds a step at 1,000 Mbit/s": f"{D_net:,} parameters"}
         | {way: f"{row['seconds']:.3g}" for way, row in ways.items() if row}
         for D_net, ways in found.items()]  # fmt: skip
shorter = [
    measured.row("PowerSGD", row["layers"], row["width"], row["ranks"], row["mbit"])["seconds"] < row["seconds"]
    for row in measured.rows if row["way"] == most and row["mbit"]
]  # fmt: skip
answer.append(
    f"""- **PowerSGD** has shorter steps than {most} on {sum(shorter)} of the {len(shorter)} links. What it costs in test loss is not measured here."""
)
display(Markdown("\n".join([*answer, "", lab.markdown(pd.DataFrame(lines))])))

# %% [markdown]
# ## A training script, and two lines for the hook
#
# An ordinary DDP script trains the same network from the same start twice, without the hook and with it. The
# hook needs two of its lines: the one that makes `state`, and the one that registers `tcs_hook`. `model=model`
# gives the state the model's process group and the names of its parameters, so that a saved state
# also fits a model whose parameters come in another order.
#
# Each backward pass is a step for the hook: what it does not send comes back in later steps. A pass whose gradients
# no optimizer uses therefore belongs under `model.no_sync()`; `TCSState` says more.

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
data = data.resized(given["image_size"])
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
        images, labels = batches.augmented(draws[rank::ranks])
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
# `torchrun` starts the processes, tells each which rank it is, and ends all of them if one fails. On
# several machines it is started once on each, with `--nnodes` and the address of one of them.
# On this machine the ranks meet at the local address, 127.0.0.1, so that it works where the machine's
# own name does not resolve.

# %%
names = ["phi_global", "phi_local", "start_iter", "steps", "batch_size", "learning_rate"]
names += ["train_samples", "test_samples", "image_size", "width", "seed"]
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
print(f"{processes} processes, {D:,} parameters, {steps} steps, twice")

# %% [markdown]
# ## What a rank handed to the collectives
#
# The hook counts the bytes of every tensor that it hands to a collective: `dense` in the first steps,
# then `shared` (values only, to `all_reduce`) and `explored` (values and positions, four bytes each,
# to `all_gather`). Plain DDP hands over all gradients, $4D$ bytes, every step.

# %%
sent = pd.DataFrame(results["TCS"]["sent"], index=range(1, steps + 1))
plain = 4 * D * np.arange(1, steps + 1)
table = (sent.iloc[[-1]] / 1e3).add_prefix("TCS ").add_suffix(", kB")
table.insert(0, "plain DDP, kB", plain[-1] / 1e3)
display(table.set_axis([f"all {steps} steps"]).round(1))
ratio = plain[-1] / sent.iloc[-1].sum()
a_step = sent.diff().iloc[-1]
print(f"all {steps} steps: 1/{ratio:.1f} of plain DDP's bytes")
print(f"one sparse step: {a_step.sum():,.0f} bytes of {4 * D:,}, 1/{4 * D / a_step.sum():.1f}")

# %% [markdown]
# A step's bytes follow from the paper's messages, but for two things: a position takes four bytes, not Alg. 4's one
# or so, since tensors stay on their device; and ranks say in a few numbers which parameters they used. One `Compressor` with the
# same shares says how long a client's message is; a rank's step is to be at most 1.15 times as long:

# %%
compressor = tcs.Compressor(
    tcs.Scheme.named("TCS", phi_global=phi_global, phi_local=phi_local), [D], clients=1
)
for _ in range(2):  # the first step is dense
    compressor.step(torch.ones(1, D))
print(f"a message: {compressor.bytes_up:,} bytes, a step: {a_step.sum():,.0f} bytes")

# %% [markdown]
# ## Loss against steps, and against bytes

# %% jupyter={"source_hidden": true}
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
plt.show()

# %% [markdown]
# The two curves are close to each other on the left: the hook learns somewhat more slowly,
# probably because most of a gradient arrives some steps late, out of the errors. On the right the hook's curve
# stands far to the left: every loss that it reached after the dense start it reached with fewer bytes.
#
# ## What a link would have cost
#
# In a ring of $R$ ranks each sends $2\frac{R-1}{R}$ of what it hands to `all_reduce`, and $R-1$ times what
# it hands to `all_gather`. Divided by the link's speed that is the least time the steps have to wait, if
# nothing is hidden behind the backward pass. Calculated, for all steps together:

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

# %% jupyter={"source_hidden": true}
fig, axes = plt.subplots(figsize=(6.6, 3.2))
seconds.plot.bar(ax=axes, color=lab.COLOURS[:2], rot=0, width=0.7, logy=True)
for bars, hatch in zip(axes.containers, ("", "//"), strict=True):
    _ = [bar.set_hatch(hatch) for bar in bars]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line below
    axes.bar_label(bars, fmt="%.3g s", fontsize=9, padding=2, bbox=box)
axes.axhline(computed, color="0.35", linewidth=1, linestyle=":")
axes.annotate("the plain run took this long here", (0.99, computed), xycoords=("axes fraction", "data"),
              xytext=(0, 3), textcoords="offset points", ha="right", color="0.35")  # fmt: skip
axes.set(xlabel="", ylabel="seconds on the wire", title=f"{steps} steps of {D:,} parameters")
axes.set_ylim(seconds.to_numpy().min() / 3, max(seconds.to_numpy().max(), computed) * 3)
axes.legend(frameon=False, loc="upper right", ncols=2)
plt.show()

# %% [markdown]
# This network is tiny; at ResNet-18's 11,173,962 parameters plain DDP hands over 44.7 MB a
# step, which two ranks need about six minutes for on 1 Mbit/s and still 3.6 s on 100 Mbit/s, more ranks up to twice that.
#
# ## The link, measured
#
# Two ranks, a thread each, on the two cores of one machine, exchange over a loopback whose rate is limited (a network namespace
# of its own, with root; `uv run tcs links` measures again). All traffic, both ways, shares the rate. Nets are
# ten layers of 1,000 × 1,000 and four of 5,000 × 5,000, batches 16, PowerSGD at the rank that sends about as many bytes as TCS at 1 %, in one
# bucket. Seconds a step, medians of five steps or nine, of fewer where n says so (of two or four, the upper); in brackets, measured over
# calculated. `results/hook/links.json` has the machine and its load:

# %%
display(Markdown(lab.markdown(measured.limited())))
print(measured.agreement(within=0.15))

# %% [markdown]
# Calculated is what a step takes without a limit, and the bytes of both rings with their packets' heads, divided by the rate. For
# plain and bf16 it is passes plus wire, or the step without a limit if that is longer: copying is hidden behind the wire.
#
# Without a limit, what does the exchange itself cost? "Exchange" is the share of a step that is neither passes nor optimizer; four ranks share two
# cores. Memory is a rank's peak beyond what it had before the model.

# %%
display(Markdown(lab.markdown(measured.unlimited())))

# %% [markdown]
# So TCS pays on slow links, for a batch of 16 on these cores.
#
# ## What it costs an optimizer
#
# A GPT of 33,191 parameters on the text of [16_text](16_text.ipynb), 5,000 sparse steps after 100 dense ones. Each optimizer has the rate that is
# best for it dense. Plan, bounds and words stood in `params/optimizers.yaml` before the first run. Both ranks are clients of one process,
# which trains bit for bit as the hook does. "Corrected" moves momentum before the compression, as DGC ([17](17_rivals.ipynb)) does; the hook does not have that.
# Cost is the test loss beyond the same optimizer's, dense, in nats a character, with its 95 % interval. *Nothing*: the whole interval is
# below 0.05. *Costs*: it is above. Else the verdict is *open*.

# %%
display(Markdown(lab.markdown(costs.table())))
print(f"{len(costs.records)} of {costs.planned} planned runs")

# %%
for optimizer in ("AdamW", "momentum"):
    gap = costs.excess_over_sgd(optimizer)
    print(f"{optimizer} loses {gap.value:+.3f} ± {gap.half:.3f} more than SGD, TCS at 1 %")
for setup in (setup for setup in costs.stage.setups if setup.corrected):
    gap = costs.effect_of_correction(setup)
    print(f"{setup}: {gap.value:+.3f} ± {gap.half:.3f} against the same uncorrected")
for scheme in ("TCS 1 %", "TCS 10 %"):
    print("best of all,", costs.advise(scheme))
    print("best of what the hook has,", costs.advise(scheme, corrected=False))

# %% [markdown]
# A scheme is worth it where its interval, against the best dense cell, ends below 0.1.
# Momentum and AdamW average over many steps; of an entry in the errors the gradients of many steps arrive in one. SGD was worse than the others dense, so it
# has less to lose. Rounds × φ says how often an entry is sent: 50 times at 1 %, 500 at 10 %; near ten, expect large losses. Rates were not looked for anew under compression; nothing
# was clipped.
#
# ## To be copied
#
# AdamW, autocast, accumulation, clipping, checkpoint and resume. Every rank saves a file of its own, since its errors are its own:
#
#     uv run torchrun --nproc-per-node 2 notebooks/examples/ddp_training.py 300 checkpoints

# %%
example = lab.ROOT / "notebooks/examples/ddp_training.py"
display(Markdown(f"```python\n{example.read_text(encoding='utf-8')}```"))

# %% [markdown]
# *Accelerate* (1.15, tried on two CPU ranks): after `model = accelerator.prepare(model)`, `model.register_comm_hook(state, tcs.tcs_hook)`.
# *Lightning* (2.6): `Trainer(strategy=DDPStrategy(ddp_comm_state=state, ddp_comm_hook=tcs.tcs_hook))`; it registers hooks on GPUs only, so that it
# has not been tried here: on a CPU it trains without the hook, and says nothing.
#
# ## How the hook works
#
# It keeps a `Client` of Alg. 2 for every bucket of gradients, and uses it as it is. Only the
# server is missing: the collectives take its place. In a sparse step a rank
#
# 2. adds the bucket's gradient to its errors and finds its own largest entries outside the shared mask,
# 3. hands its values on the shared mask to `all_reduce`,
# 4. hands its own values, with their positions, to `all_gather`,
# 5. averages both; the largest entries of that are the next shared mask.
#
# (Step 1 is the dense start.) The rest makes sure that all ranks agree: if one has a value that is not finite, all get NaN and
# their errors stay as they were; ranks that begin with different masks raise ValueError.

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
claim("a step is at most 1.15 messages long", a_step.sum() <= 1.15 * compressor.bytes_up)
claim("a fifth of the bytes at most, dense start included", ratio > 5, f"1/{ratio:.1f}")
claim(
    "a loss at most 0.25 higher",
    final["TCS"] < final["plain"] + 0.25,
    f"{final['TCS']:.2f}, {final['plain']:.2f}",
)
claim("an accuracy at most 10 points lower", accuracy["TCS"] > accuracy["plain"] - 0.1,
      f"{accuracy['TCS']:.1%}, {accuracy['plain']:.1%}")  # fmt: skip

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())
print(f"loss at the end: plain {final['plain']:.2f}, TCS {final['TCS']:.2f}")
print(f"test accuracy: plain {accuracy['plain']:.1%}, TCS {accuracy['TCS']:.1%}")
print(f"bytes: 1/{ratio:.1f} in all, 1/{4 * D / a_step.sum():.1f} in a sparse step")
slowest = seconds.iloc[0]
print(
    f"at {link_rates[0]} Mbit/s: {slowest.iloc[0]:.0f} s on the wire would become {slowest.iloc[1]:.0f} s"
)
took = {labels[name]: f"{results[name]['seconds']:.1f} s" for name in results}
print(f"the runs themselves, on one machine: {took}")

# %% [markdown]
# What it costs is plain: some
# loss at equal steps, the selection, and memory. The errors are one copy of the gradients; the peaks above are
# higher by up to 13 copies in the small net, by 3.5 in the large one. Where bytes cost nothing, as on one machine, there is nothing to gain.
#
# A federation runs on real processes too. In `notebooks/examples/federation.py` every process is a client and the server, and
# nothing but encoded messages passes between them:
#
#     uv run torchrun --nproc-per-node 4 notebooks/examples/federation.py 50
#
# Next: [13_evidence](13_evidence.ipynb), what of the
# paper holds.

# %%
print(
    f"core {lab.core_sha256()[:12]} · {processes} processes · synthetic, {image_size} x {image_size} · n = 1 run of each"
)
