# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 · Beyond images: a small GPT on text
#
# Does TCS work for a language model? The paper trains networks on images only. Its central assumption, however, is about training in
# general: entries of the update that are large now stay large for a while. This notebook checks the assumption with a small transformer
# that learns to predict the next character of a text.
#
# **Claim (beyond the paper).** On text, with clients whose data differ, consecutive updates share more of their largest entries than chance
# would give. After the warm-up, a client of TCS sends at least 85 times fewer bits than in dense training. The paper's other claims are
# judged further down, from recorded runs. The section *On text* of [17_rivals](17_rivals.ipynb) compares the same runs with those of other
# methods, such as STC and DGC.
#
# Nothing has to be downloaded. The text is `pydoc_data.topics`, the help topics that come with every Python.
#
# *Run time*: about half a minute on two cores of an AMD EPYC; the recorded runs took hours. *Read before*: [03_tcs](03_tcs.ipynb),
# [05_global_momentum](05_global_momentum.ipynb).
#
# *How to use it*: the grey bars are folded code cells; click one to open it. The second one holds the parameters. Change them there and run
# all cells again. For example, with `rounds = 400` less of the mask should stay on average, because masks stay longest at the start of a
# training. With `phi_global = 0.1`, the masks are larger, so that even two random masks would share more of their entries. The recorded
# runs do not change. With `drawn = ["FedAvg", "top-K", "TCS"]`, the figure has only these three curves.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import collections
import itertools
import math

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "figure.constrained_layout.use": True} | lab.LOOK)

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
evidence = "text"  # the profile whose records are judged: params/<profile>.yaml, results/<profile>/
drawn = ["FedAvg", "FedAvg-L4", "top-K", "TCS", "TCS-Q5", "TCS-L4-Q5",
         "FedAvg-Global Momentum", "TCS-Global Momentum"]  # schemes in the figure (seed 0)  # fmt: skip
rounds = 80  # dense rounds that are trained here to watch the mask
phi_global = 1e-2  # share of an update's entries that count as important
seed = 0  # of the first weights and the choice of text in the trainings of this page

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "16_text")
lab.check_values(globals(), rounds=lab.WholeNumber, phi_global=lab.Fraction, seed=lab.Seed)
files = [lab.ROOT / "params/table_text.yaml", lab.params_file("evidence", evidence)]
params = lab.read_params(files)

# %% jupyter={"source_hidden": true} tags=["remove-input"]
read = lab.read_claims(lab.ROOT / "params/claims_text.yaml")
records = lab.load_claim_records(read, lab.read_params([lab.ROOT / f"params/{evidence}.yaml"]))
judged = lab.judge_claims(read, records)


def own_megabytes(record: dict) -> pd.Series:
    """Return the megabytes that one client sent and received in each epoch."""
    epochs = pd.DataFrame(record["rows"])
    return (epochs["bytes_up"] / record["config"]["clients"] + epochs["bytes_down"]) / 1e6


def line(name: str, found: list[dict]) -> dict[str, str]:
    """Return a row of the table: the mean results of a scheme, and what one client sent and received."""
    ends = [record["rows"][-1] for record in found]
    losses = pd.Series([end["loss"] for end in ends]) / math.log(2)
    megabytes = [own_megabytes(f).sum() for f in found]
    sent = [lab.bits_per_parameter(record)["uplink"] for record in found]
    return {"scheme": name, "n": f"{len(found)}",
            "accuracy, %": f"{100 * pd.Series([e['accuracy'] for e in ends]).mean():.2f}",
            "bits per character": f"{losses.mean():.3f}",
            "training loss, bits per character": f"{pd.Series([e['train_loss'] for e in ends]).mean() / math.log(2):.3f}",
            "MB per client, sent and received": f"{sum(megabytes) / len(found):,.1f}",
            "times fewer bits sent": f"{32 * len(sent) / sum(sent):,.0f}"}  # fmt: skip


# %% jupyter={"source_hidden": true} tags=["remove-input"]
groups = collections.defaultdict(list)
controls = [record for record in lab.find_records(profile=evidence, status="finished").values()
            if record["config"]["scheme"]["name"] in ("FedAvg-L4", "FedAvg-L4-Global Momentum")]  # fmt: skip
for record in [*records.values(), *controls]:
    scheme, rate = record["config"]["scheme"]["name"], record["config"]["learning_rate"]
    groups[f"{scheme} at {rate:g}"].append(record)


def mean_accuracy(side: tuple[str, float]) -> str:
    """Return the mean final accuracy of a scheme at a learning rate, in percent."""
    ends = [record["rows"][-1]["accuracy"] for record in groups[f"{side[0]} at {side[1]:g}"]]
    return f"{100 * sum(ends) / len(ends):.2f} %"


def difference(name: str) -> str:
    """Return the difference of a claim, in points of accuracy, with its interval."""
    found = judged.set_index("claim").loc[name]
    interval = lab.format_interval(found["measured"], found["low"], found["high"])
    return f"{interval} points (n\u00a0=\u00a0{found['n']})"


shown_first = ["cost-plain", "top-k-plain", "cost"]
if judged.set_index("claim").loc[shown_first, "measured"].notna().all():
    ours, top_k = read.claims["top-k-plain"].schemes
    dense, with_momentum = read.claims["cost-plain"].second, read.claims["cost"]
    sent = [lab.bits_per_parameter(r)["uplink"] for r in groups[f"{ours[0]} at {ours[1]:g}"]]
    display(
        Markdown(f"""**In short.** Accuracy is the share of next characters that are predicted correctly. Without momentum, TCS reaches {mean_accuracy(ours)}, top-K {mean_accuracy(top_k)}
and dense training {mean_accuracy(dense)}. After the dense warm-up, a client of TCS sends {32 * len(sent) / sum(sent):.0f} times fewer bits than in dense training. With
momentum at the server, TCS reaches {mean_accuracy(with_momentum.first)} and dense training {mean_accuracy(with_momentum.second)}.

Here, *dense training* is FedAvg: federated training in which everything is sent. Without momentum, TCS differs from it by {difference("cost-plain")}, and from top-K
by {difference("top-k-plain")}. With momentum in both, TCS differs from dense training by {difference("cost")}. (These are mean differences of recorded runs, with 95 %
intervals. The section *Which claims carry over* judges them.) The learning rate with momentum was found for dense training and was not tuned for TCS. This may be why TCS
with momentum ends worse.""")
    )
else:
    print("no records yet")

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.4), sharey=True)
first = [record for record in records.values() if record["config"]["seed"] == 0]
first = {record["config"]["scheme"]["name"]: record for record in first}
for name in (name for name in drawn if name in first):
    epochs_, dense = pd.DataFrame(first[name]["rows"]), first[name]["config"]["warmup_epochs"]
    bits, style = epochs_["loss"] / math.log(2), lab.curve_style(name, drawn) | {"markersize": 4}
    left.plot(epochs_["epoch"], bits, **style, label=name)
    right.plot(own_megabytes(first[name])[dense:].cumsum(), bits[dense:], **style)
lab.name_pair(
    left, right, "epoch", "bits per character (test)", "MB of one client after the warm-up"
)
fig.legend(loc="outside lower center", ncols=3, frameon=False)
lab.show_figures()

# %%
lines = pd.DataFrame([line(name, groups[name]) for name in sorted(groups, key=str.lower)])
display(Markdown(lab.markdown(lines) if len(lines) else "no records yet"))

# %% [markdown]
# **How to read this.** The loss is measured in bits per character; fewer are better. The number after "at" is the learning rate, and n is
# the number of seeds. The rates were found in short dense trainings (`params/table_text.yaml` has the numbers), and no sparse scheme was
# tuned. FedAvg-L4 sends everything after four local steps. Its distance to FedAvg shows what these steps cost alone, and the rest of the
# distance between FedAvg and TCS-L4-Q5 comes from sparsification and from 5-bit values. *Times fewer bits sent* compares a client with
# dense training, after the warm-up. "Global Momentum" means that the server applies momentum (Alg. 3). We do not know why top-K, although
# it is sparse, ends better than dense training here.
#
# In the warm-up, which is one epoch of ten, every scheme sends whole updates. The left panel of the picture shows the test loss by epochs,
# and the right one by the megabytes that a client has sent and received. The right panel leaves out the warm-up, because most of what the
# sparse schemes sent was sent then. The megabytes in the table include it.


# %% [markdown]
# ## Text, and who has it
#
# Every client holds whole help topics, which are dealt out at random. For example, one client learns about classes and another about
# strings. The topics have very different lengths. A client therefore counts in the average in proportion to the amount of text that it has.
# The last tenth of every topic is the test text.

# %%
config = lab.plan(params | {"schemes": ["FedAvg-Global Momentum"], "seeds": [seed]})[0]
if config.dataset != "text":
    raise ValueError(f"evidence: got {evidence!r}, allowed: a profile with dataset text")
text = lab.load_text()
training = lab.Training(config, text)
weights = training.feed.weights
print(
    f"{text.label}: {sum(map(len, text.train)):,} characters to train on, of {text.classes} different kinds"
)
print(f"{len(weights)} clients, each with {min(weights):,} to {max(weights):,} of these characters")
print(f"A sample of the text: {text.read(training.feed.batch(0, 0, 0)[0][0])!r}")

# %% [markdown]
# The model reads a piece of text as long as the sample above, and predicts at each position which character comes next. It consists of
# embeddings for characters and positions, two blocks, and a last layer. Each block has causal self-attention and a perceptron. The
# perceptrons have more than half of all parameters.

# %%
names = [name for name, _ in training.federation.model.named_parameters()]
sizes = pd.Series(training.flat.layer_sizes, index=names)


def kind(name: str) -> str:
    """Return what a tensor is for, by its name."""
    if "norm" in name or name.endswith("bias"):
        return "norms and biases"
    known = {"characters": "characters (embedding)", "places": "positions (embedding)", "head": "last layer",
             "attend": "attention", "join": "attention", "think": "perceptrons"}  # fmt: skip
    return next(what for part, what in known.items() if part in name)


D = int(sizes.sum())
share = sizes.groupby(kind).sum() / D
print(f"The model has {D:,} parameters and reads up to {config.context} characters.")

# %% [markdown]
# ## Does the mask stay, and where is it?
#
# This section trains densely, so that no compression influences the updates. It looks at the mask of the largest entries of each update and
# asks two questions. How much of a mask stays in the next round? And in which tensors are its entries?
#
# Some entries stay by chance. To measure how many, we compare with random masks that have the same number of entries in every tensor. If
# the share $s$ of a mask stays and the share $c$ would stay by chance, the claims further down use the number $(s - c) / (1 - c)$. It is 0
# if as much stays as would by chance, and 1 if the mask never changes. This section sees only the first rounds of a training. Masks stay
# longest in these rounds, so the number for a whole training is lower.

# %%
sample = lab.Training(config, text).rounds(0)
print(lab.forecast_steps(rounds, "dense rounds", lambda: next(sample)))
watch, k = lab.UpdateWatch(training.flat.layer_sizes, phi_global), tcs.kept(phi_global, D)
where = torch.zeros(D)
epochs = range(1 + rounds // training.rounds_per_epoch)
stream = (update_D for epoch in epochs for update_D in training.rounds(epoch))
for update_D in itertools.islice(stream, rounds):
    watch.observe(update_D)
    where[tcs.top_k_positions(update_D, k)] += 1
now, chance = (watch.row()[key] for key in ("update_overlap", "update_overlap_chance"))
every = training.config.epochs * training.rounds_per_epoch
print(
    f"In the first {rounds} of {every:,} rounds, {now:.1%} of the mask stays in the next round. By chance, {chance:.1%} would stay.\n"
    f"On the scale from 0 (chance) to 1 (nothing changes), this is {(now - chance) / (1 - chance):.2f}."
)

# %%
parts = where.split(training.flat.layer_sizes)
held = pd.Series([float(part.sum()) for part in parts], index=names).groupby(kind).sum()
held /= held.sum()
table = pd.DataFrame({"of all parameters": share, "of the mask": held})
table["times its share"] = table["of the mask"] / table["of all parameters"]
table = table.sort_values("times its share", ascending=False)
shapes = {"of all parameters": "{:.1%}", "of the mask": "{:.1%}", "times its share": "{:.2f}"}
shown = pd.DataFrame({name: table[name].map(shape.format) for name, shape in shapes.items()})
shown.columns = ["share of all parameters", "share of the mask", "second share ÷ first share"]
display(Markdown(lab.markdown(shown.reset_index(names="tensors"))))

# %% [markdown]
# The mask prefers the tensors at the top of the table and avoids those at its end.

# %% [markdown]
# ## Which claims carry over
#
# The claims are judged as in [13_evidence](13_evidence.ipynb): a claim is **supported** if the whole 95 % interval is within its bound,
# **contradicted** if the whole interval is outside, and otherwise **open**. The claims and their bounds are in `params/claims_text.yaml`,
# whose first lines say which results were known when it was written.
#
# Numbers of bits follow from the scheme, so their verdict is *by construction*. The column *Ours* gives a difference in points of accuracy,
# a factor (×), or the number between 0 and 1 from the section above.
#
# The intervals have two limits. First, they use one standard deviation for all schemes together. We chose this rule when we knew the
# results of all these runs. The earlier rule used only the seeds of the two schemes that are compared. By that rule, it would be open
# whether TCS ends above top-K without momentum. Second, the intervals say how much a result may change with other seeds, but not with
# another test text, because the runs did not store which characters were predicted correctly. Intervals that allow for both would be wider.

# %%
shown = lab.readable_claims(judged)
if len(shown):
    shown = shown.drop(columns=["Where", "Paper (interval)", "Paper's verdict"])
    display(Markdown(lab.markdown(shown.rename(columns={"The paper says": "Claim"}))))
print(lab.list_unmeasured(judged))

# %% [markdown]
# ## Claim
#
# 1. In dense training, the share of the mask that stays is at least 1.2 times the share that would stay by chance.
# 2. The mask is not spread evenly over the network. For some kind of tensor, its share of the mask is at least 1.5 times its share of the parameters.
# 3. In the recorded runs, a client of TCS sends at least 85 times fewer bits than in dense training, after the dense warm-up.

# %%
claim(
    "more of the mask stays than by chance",
    now > 1.2 * chance,
    f"{now:.1%}, {chance:.1%} by chance",
)
most = table["times its share"].max()
claim(
    "the mask prefers some tensors",
    most > 1.5,
    f"{table['times its share'].idxmax()}: {most:.1f} times its share",
)
times_less = judged.set_index("claim")["kept"]["x100"]
claim("in the records, TCS sends at least 85 times less after the warm-up", times_less)

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())

# %% [markdown]
# The clients of the recorded runs have different texts, but all of them take part in every round. What happens when only some of them do is
# not shown here. [12_real_training](12_real_training.ipynb) trains a GPT on several processes with PyTorch's DistributedDataParallel, and
# compares TCS with PowerSGD, which sends low-rank approximations.
#
# Next: [17_rivals](17_rivals.ipynb) compares TCS with other methods, and [15_your_own_model](15_your_own_model.ipynb) takes your own model
# and data.

# %%
print(
    f"Made with {lab.describe_core()}, on {text.label}, and from {sum(map(len, groups.values()))} records."
)
