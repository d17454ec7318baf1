# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · Send a value in five bits
#
# TCS-L4-Q5, the scheme of the paper that sends the fewest bits, sends each value in five bits instead of 32. This notebook takes the values
# that the clients of a small TCS training really send, quantizes them, and measures their errors. Then it compares the paper's quantizer
# with three others that use as many bits.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import math
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Ge, Le, Len
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def accuracy_of_five_bits() -> str:
    """Say what 5-bit values cost in accuracy, from the table that notebook 13 has saved."""
    path = lab.results_folder("evidence") / "claims.csv"
    row = pd.read_csv(path).set_index("claim").loc["q5"] if path.exists() else {"verdict": None}
    costs = {"supported": "cost no accuracy", "contradicted": "cost accuracy", "open": "may cost accuracy"}  # fmt: skip
    if row["verdict"] not in costs:
        return "There is no result here yet that says what this costs in accuracy."
    return (f"In the trainings of notebook 13, five bits {costs[row['verdict']]}: the final test accuracy of TCS-L4-Q5 minus that of "
            f"TCS-L4, which sends 32-bit values, is {lab.format_estimate(row)} percentage points, with a 95 % interval from "
            f"{row['n']} trainings of each.")  # fmt: skip


display(Markdown(f"""**In short.** The paper's quantizer sends one bit for the sign of a value and four bits that say in which of 16 intervals its magnitude
lies, and the receiver replaces the magnitude by the mean of its interval. In every interval the upper end is the same multiple of the lower
end, so the *relative* error of a small value has the same bound as that of a large one. With five bits, a plain uniform quantizer leaves a
smaller error of the message as a whole, but much larger relative errors of the small values. {accuracy_of_five_bits()}"""))  # fmt: skip

# %% [markdown]
# After this notebook you will be able to
#
# - find the interval of a value, and turn codes back into values,
# - say which errors are bounded, and where another quantizer does better.
#
# **Claim (Sec. II-F, Eq. 20–23).** Fractional quantization uses q bits for a value: one for its sign, and the others for the number of one
# of $P=2^{q-1}$ intervals. In every interval, the lower end divided by the upper end is the same ratio σ. Every value except zero, large or
# small, arrives with an error of at most $(1-\sigma)/\sigma$ times its magnitude.
#
# *Run time*: about 25 s on two cores of an AMD EPYC. *Read before*: [03_tcs](03_tcs.ipynb), which explains masks and errors. Positions are the
# subject of [06_sparse_encoding](06_sparse_encoding.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The one under *Parameters* holds the values that
# you can change.
#
# ## Parameters
#
# You can change any of these values and run all cells again. The sections *Claim* and *What we saw* are computed anew in every run. The
# text between the cells describes the results of the original values, so it may no longer fit. Two changes to try:
#
# - `value_bits = 8` cuts the same range into 128 intervals, so the bound becomes much smaller. But 128 means must be sent, too, and
#   they take about a third of the message.
# - `width = 32` makes the network larger and the messages longer. The means then cost fewer bits per value.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
profile = "ci"  # stands in the run's configuration; nothing is written
value_bits = 5  # q, bits of a value, one of them the sign
phi_global = 1e-2  # share kept by the global mask
phi_local = 1e-3  # share kept by each local mask
train_samples = 800  # synthetic images to learn from
test_samples = 200  # not used here; a data set has to have some
model = "resnet8"  # resnet8 or resnet18
width = 16  # channels of its first stage
clients = 10  # N
batch_size = 8  # B
learning_rate = 0.5  # eta
epochs = 3  # passes over the data, the first one dense
seed = 0  # of the run
compared_bits = [1, 2, 3, 4, 5, 6, 7, 8]  # q of the comparison

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "07_fractional_quantization")
bits_of = Annotated[int, Ge(1), Le(16)]
kinds = {"value_bits": bits_of, "compared_bits": Annotated[list[bits_of], Len(1)]}
lab.check_values(globals(), **kinds, epochs=Annotated[int, Ge(2)])
scheme = tcs.Scheme.named(f"TCS-Q{value_bits}", phi_global=phi_global, phi_local=phi_local)
sizes = {"model": model, "width": width, "clients": clients, "batch_size": batch_size}
schedule = {"epochs": epochs, "warmup_epochs": 1, "reference_batch": None}
config = lab.RunConfig(scheme, learning_rate, seed, profile, **sizes, **schedule)
data = lab.load_dataset("synthetic").first(train_samples, test_samples)
P = scheme.intervals
print(f"{scheme.name}: {P} intervals, {int(math.log2(P))} bits for the interval, 1 for the sign")
small = dataclasses.replace(config, train_samples=train_samples, test_samples=test_samples)
print(lab.forecast_trainings([small]))

# %% [markdown]
# ## The values that clients send
#
# A client **intends** to send its model difference plus the errors that it kept from earlier rounds. It really sends only the entries in
# the global mask (which comes from the last update) and in its own local mask. The function `look` collects the values that each client
# intends to send there:


# %%
def look(federation, before_ND) -> list[torch.Tensor]:
    """Per client: the intended values (K,) at the positions sent, global mask first (Alg. 2)."""
    seen, known = [], federation.compressor.known
    clients = federation.compressor.clients.values()
    for client, intended_D in zip(clients, before_ND + federation.deltas_ND, strict=True):  # line 9
        local_K = client.own_positions(intended_D)  # line 10
        seen.append(intended_D[torch.cat([known.shared_K, local_K])])  # line 11
    return seen


federation, all_sent = lab.Training(config, data, keep_deltas=True), []
compressor, before_ND = federation.compressor, None
for epoch in range(epochs):
    for _ in federation.rounds(epoch):
        if not compressor.known.dense:
            all_sent += look(federation, before_ND)
        before_ND = compressor.errors_ND.clone()

# %%
u = all_sent[-clients]  # client 0, last round: the example from here on
K, D = len(u), compressor.errors_ND.shape[1]
print(f"{len(all_sent)} messages of {K} values; the model has {D:,} parameters")
least, most = (lab.format_number(float(end), 2) for end in u.abs().aminmax())
print(f"magnitudes from {least} to {most} in the example")

# %% [markdown]
# The magnitudes span several powers of ten. An entry of the global mask had a large value in the last update, which is the average of *all
# clients*. The value that a single client has there now may be tiny.
#
# ## The intervals
#
# Let $u$ be the values of one message, and $u_{max}$ and $u_{min}$ their largest and their smallest non-zero magnitude. The range between
# the two is cut into $P$ intervals. In all of them, the lower end divided by the upper end is the same **ratio** $\sigma$:
#
# $$I_p=\left(\sigma^{p}\,u_{max},\;\sigma^{p-1}\,u_{max}\right],\qquad
# \sigma=\left(\frac{u_{min}}{u_{max}}\right)^{1/P},\qquad p=1,\dots,P .$$
#
# A value is sent as its sign and its interval number $p$. For each interval, the message also contains the **mean** $\mu_p$ of the
# magnitudes in it, as a 32-bit number. The receiver replaces the value by $Q(u) = \pm\mu_p$.

# %%
lab.show_code(tcs.interval_edges, tcs._fractional)  # in tcs.fractional_quantize

# %% [markdown]
# We depart from the paper's text in two points. Our intervals are half open, and the last one also contains $u_{min}$, so that each value
# belongs to exactly one interval. And our $u_{min}$ is the smallest magnitude that is not zero, because a zero would make $\sigma=0$. A zero
# has no code of its own. It arrives as the mean of the interval with the smallest values.

# %%
codes, means = tcs.fractional_quantize(u, P)
edges, sigma = (part.tolist() for part in tcs.interval_edges(u, P))
received = tcs.fractional_dequantize(codes, means)
gamma, filled = (1 - sigma) / sigma, means[means > 0].tolist()
print(f"sigma = {sigma:.3f}: an interval's upper end is {1 / sigma:.2f} times its lower end")
print(f"{len(filled)} of {P} intervals contain at least one value")

# %%
size = u.abs()
low, high = float(size[size > 0].min()), float(size.max())
bins = torch.logspace(math.log10(low), math.log10(high) + 0.001, 64).tolist()
shared = len(compressor.known.shared_K)
parts = [size[:shared].tolist(), size[shared:].tolist()]
ends = [low, *edges, high]
masks = {"color": [lab.COLOURS[6], lab.COLOURS[0]], "label": ["global mask", "local mask"]}

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
ax.hist(parts, bins, stacked=True, **masks)
lines = {"color": lab.COLOURS[7], "lw": 1, "ls": "--", "transform": ax.get_xaxis_transform()}
ax.vlines(ends, 0, 1, **lines, label="interval edges", zorder=0)
marks = {"marker": "^", "ls": "", "ms": 9, "mec": "black", "clip_on": False, "zorder": 5}
ax.plot(filled, [0] * len(filled), **marks, color=lab.COLOURS[5], label="means")
ax.set(xscale="log", xlabel="magnitude |u| (log scale)", ylabel="values in the message")
ax.set(title=f"What client 0 sends in the last round: {K} values, {P} intervals")
fig.legend(loc="outside lower center", ncols=4, frameon=False)
lab.show_figures()

# %% [markdown]
# On the logarithmic axis all intervals have the same width. The values of the local mask are all at the right end, since they are the
# largest ones outside the global mask. Most other values lie in the right half of the axis, and the intervals on the left are nearly empty.
# This shows a weakness: the single smallest value decides how wide all intervals are, so one very small value makes all others less
# accurate.
#
# ## One message
#
# The code of a value is $p-1$, plus $P$ if the value is negative. The first bit of the code is therefore the sign.

# %%
pick = torch.linspace(0, K - 1, 6).long()
lines = zip(u[pick].tolist(), codes[pick].tolist(), received[pick].tolist(), strict=True)
table = [
    {"value": lab.format_number(value), "interval": str(code % P + 1), "bits": f"{code:0{value_bits}b}",
     "received": lab.format_number(got), "relative error": f"{got / value - 1:+.0%}".replace("-", "−")}
    for value, code, got in lines
]  # fmt: skip
display(Markdown(lab.markdown(pd.DataFrame(table))))
side = 32 * P
print(
    f"the values take {value_bits * K + side:,} bits instead of {32 * K:,}; the means are {side:,} of these bits"
)

# %% [markdown]
# The signs arrive exactly, the magnitudes approximately. What a message loses stays in the client's errors, and is sent in a later round.
# In such a short message, the means are a visible part of the bits.
#
# ## The bound
#
# A value and the mean that replaces it lie in the same interval, so neither of them is more than $1/\sigma$ times as large as the other.
# The error $|Q(u)-u|$ therefore has a bound in proportion to the value:
#
# $$|Q(u)-u|\;\le\;\gamma\,|u|,\qquad \gamma=\frac{1-\sigma}{\sigma}.$$
#
# A value at the lower end of its interval can arrive too large by up to $\gamma$. A value at the upper end can arrive too small by at most
# $1-\sigma$, which is less. No smaller bound holds for all messages: if many values lie at the upper end of an interval and one at its
# lower end, the mean is close to the upper end, and the error of that one value is close to the bound.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(8.4, 3.8), layout="constrained")
off = 100 * (received / u - 1)[u != 0]
ax.plot(u[u != 0].abs(), off, ls="", marker="o", ms=3, color=lab.COLOURS[2], label="a value")
ax.axhline(100 * gamma, color=lab.COLOURS[0], ls="--", label="+γ = (1 − σ)/σ, the bound")
ax.axhline(-100 * (1 - sigma), color=lab.COLOURS[3], ls="-.", label="−(1 − σ)")
for edge in edges:
    ax.axvline(edge, color="#BBBBBB", lw=0.6, zorder=0)
ax.set(xscale="log", xlabel="magnitude |u| (log scale)", ylabel="(Q(u) − u) / u  (%)")
ax.set(title=f"Relative error of every value of one message, q = {value_bits}")
fig.legend(loc="outside lower center", ncols=3, frameon=False)
lab.show_figures()

# %% [markdown]
# The points of each interval form one falling branch, and all points lie between the two lines. Relative to their size, small values are
# treated no worse than large ones. The next cell measures the errors in the messages of all clients and rounds. For each message it
# computes `sigma`, the bound `gamma`, the largest relative error of one value, and the relative error of the whole message as a vector,
# $\|Q(u)-u\|/\|u\|$. It then prints the smallest, the median and the largest of each.


# %%
def quantized(u, intervals: int):
    """Return the values as they arrive at the receiver."""
    return tcs.fractional_dequantize(*tcs.fractional_quantize(u, intervals))


def worst(u) -> dict[str, float]:
    """Return sigma, gamma, the largest relative error of a value, and that of the whole vector."""
    sigma = float(tcs.interval_edges(u, P)[1])
    error = (quantized(u, P) - u).abs()
    rest = u != 0
    one, whole = (error[rest] / u[rest].abs()).max(), error.norm() / u.norm()
    gamma = (1 - sigma) / sigma
    return {"sigma": sigma, "gamma": gamma, "one value": float(one), "vector": float(whole)}


checked = pd.DataFrame([worst(values) for values in all_sent])
used = (checked["one value"] / checked["gamma"]).max()
print(checked.describe().loc[["min", "50%", "max"]].round(2).to_string())
print(f"In no message did the error of a value exceed {used:.0%} of the bound.")

# %% [markdown]
# In every message, the largest error of one value is below the bound. But look at `gamma` itself. If σ is below 1/2, then γ is above 1, and
# the bound allows an error that is larger than the value itself.
#
# ## One quantizer for all values, or two?
#
# The paper says that the error becomes smaller if values are quantized in blocks. Our implementation (`tcs_core.py`) quantizes all values
# of a message together, those in the shared mask (the global one) and those in the client's own (local) mask. Here we compare this with
# quantizing each of the two groups by itself. A second group costs another P means of 32 bits.


# %%
def relative_error(*blocks) -> float:
    values = torch.cat(blocks)
    return float(
        (torch.cat([quantized(block, P) for block in blocks]) - values).norm() / values.norm()
    )


blocks_of = [values.tensor_split([compressor.rule.k_global]) for values in all_sent]
together = pd.Series([relative_error(values) for values in all_sent])
apart = pd.Series([relative_error(*blocks) for blocks in blocks_of])
print(f"The mean relative error of a message is {together.mean():.1%} together and {apart.mean():.1%} in two groups. "
      f"Two groups have the smaller error in {(apart < together).mean():.0%} of the {len(apart)} messages.")  # fmt: skip
smaller = lab.judge_mean(*lab.paired_gain(together, apart))
claim.judge("shared and own values have a smaller error if they are quantized separately", smaller)

# %% [markdown]
# ## Other quantizers
#
# Is the paper's quantizer better than others that use as many bits? We compare it with three. Each function below returns the values that
# the receiver gets, and the number of bits sent, including everything that the receiver needs besides the codes.
#
# - **Fractional** is the quantizer of the paper.
# - **Uniform** uses intervals of equal width instead of equal ratio. The receiver replaces a value by the middle of its interval, so
#   only the width must be sent.
# - **Natural** replaces a value by the nearest power of two, where "nearest" is meant on a logarithmic scale. The largest of these powers
#   is sent, too.
# - **Scaled sign** sends only the sign of each value, and one mean magnitude for each block of values. The blocks are so short that it uses about q bits per value, as the uniform and the natural quantizer do. (The fractional one needs more, for its means.)
#
# **What do you expect?** With which of these quantizers does a small value arrive with a small relative error?


# %%
def fractional(u, q: int) -> tuple:
    return quantized(u, 2 ** (q - 1)), q * len(u) + 32 * 2 ** (q - 1)


def uniform(u, q: int) -> tuple:
    step = u.abs().max() / 2 ** (q - 1)
    cell = (u.abs() / step).floor().clamp(max=2 ** (q - 1) - 1)
    return (cell + 0.5) * step * u.sign(), q * len(u) + 32


def natural(u, q: int) -> tuple:
    top = u.abs().max().log2().round()
    power = u.abs().log2().round().clamp(min=top - 2 ** (q - 1) + 1)
    return 2**power * u.sign(), q * len(u) + 32


def scaled_sign(u, q: int) -> tuple:
    blocks = max(1, round((q - 1) * len(u) / 32))
    parts = [tcs.scaled_sign(part) for part in u.tensor_split(blocks)]
    return torch.cat(parts), len(u) + 32 * blocks


# %%
def measured(method, q: int) -> dict:
    """Average over the messages of the last round: the bits per value, the relative error of the
    whole message, and the relative error that 95 % of the values stay below."""
    rows = []
    for u in all_sent[-clients:]:
        got, bits = method(u, q)
        each = ((got - u).abs() / u.abs())[u != 0]
        rows.append((bits / len(u), (got - u).norm() / u.norm(), each.quantile(0.95)))
    bits, whole, tail = (float(sum(column) / clients) for column in zip(*rows, strict=True))
    return {"method": method.__name__, "q": q, "bits": bits, "vector": whole, "tail": tail}


methods = [fractional, uniform, natural, scaled_sign]
result = pd.DataFrame([measured(method, q) for method in methods for q in compared_bits])

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, axes = plt.subplots(1, 2, figsize=(9.2, 4.2), layout="constrained")
for i, (name, part) in enumerate(result.groupby("method", sort=False)):
    style = lab.series_style(i)
    for ax, column in zip(axes, ("vector", "tail"), strict=True):
        _ = ax.plot(part["bits"], 100 * part[column], **style, ms=5, label=name.replace("_", " "))
axes[0].set(title="Error of the whole message", ylabel="‖Q(u) − u‖ / ‖u‖  (%)")
axes[1].set(title="95 % of the values have a smaller error", ylabel="|Q(u) − u| / |u|  (%)")
for ax in axes:
    ax.set(yscale="log", xlabel="bits per value, everything included")
    lab.plain_log(ax.yaxis)
    ax.grid(alpha=0.25)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
lab.show_figures()

# %% [markdown]
# The two pictures have different winners.
#
# For the message as a whole (left), *uniform* is best from two bits on. Nearly all of the norm comes from the large values, and the uniform
# intervals are narrow compared with these.
#
# The right picture shows the relative error that 95 % of the values stay below. Here fractional quantization is best with two or three bits
# per value, and again from about six bits on. Uniform intervals give all values in the lowest interval the same magnitude, however small
# they are. If between four and five bits are really sent per value, natural quantization is as good or better. One reason is that it sends
# no means, which are a noticeable part of these short messages.
#
# Natural quantization is the worst method with one or two bits. It stops improving once its powers of two cover all values. At q = 1 there
# is a single interval, and fractional quantization *is* the scaled sign.
#
# ## Claim
#
# The next cell checks three statements.
#
# 1. The bound holds for every value of every message, and for each message as a vector. (A tolerance of one millionth covers the rounding of
#    the means to float32.)
# 2. For TCS-LF-Q5 (TCS with a minimum for every layer and five bits per value), the formula for the bits gives the number in the paper's Table 2: 0.067 bits per parameter and local step.
# 3. With one interval, values that are not zero arrive as with the scaled sign.

# %%
limit = checked["gamma"] * (1 + 1e-6)
bounded = (checked["one value"] <= limit).all() and (checked["vector"] <= limit).all()
claim(
    "the error of every value of every message is within the bound",
    bool(bounded),
    f"{len(all_sent)} messages",
)
claim("the budget of TCS-LF-Q5 is the paper's", round(tcs.bit_budget("TCS-LF-Q5"), 3) == 0.067)
alike = torch.allclose(fractional(u[u != 0], 1)[0], tcs.scaled_sign(u[u != 0]))
claim("with one interval the quantizer is the scaled sign", alike)

# %% [markdown]
# ## Exercises
#
# Replace `return None` by your own lines. The cell compares your functions with those of `tcs_core.py`.
#
# 1. Return the interval number p, from 1 to P, of a value. Magnitudes go from `u_min` to `u_max`, and a zero belongs to the
#    last interval.
# 2. Return the values that the receiver gets from a list of codes and the list of P means. (The section *One message*
#    defines the codes.)
#
# <details><summary>Hints</summary>
#
# 1. Compute σ first. Then try p = 1, 2, … up to P − 1, until the magnitude is above the lower end of interval p. If it is above none of
#    these, p is P.
# 2. Codes from 0 to P − 1 stand for positive values, codes from P to 2P − 1 for negative ones.
#
# </details>


# %%
def interval_of(value, u_max, u_min, intervals):
    return None  # yours


def dequantize(codes, means):
    return None  # yours


lab.check_exercise("interval_of", interval_of)
lab.check_exercise("dequantize", dequantize)

# %% [markdown] tags=["solution"]
# <details><summary>Solutions</summary>
#
# ```python
# def interval_of(value, u_max, u_min, intervals):
#     sigma = (u_min / u_max) ** (1 / intervals)
#     for p in range(1, intervals):
#         if abs(value) > sigma**p * u_max:
#             return p
#     return intervals
#
#
# def dequantize(codes, means):
#     signed = [*means, *(-mean for mean in means)]
#     return [signed[code] for code in codes]
# ```
#
# </details>


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
def interval_of(value, u_max, u_min, intervals):
    sigma = (u_min / u_max) ** (1 / intervals)
    for p in range(1, intervals):
        if abs(value) > sigma**p * u_max:
            return p
    return intervals


def dequantize(codes, means):
    signed = [*means, *(-mean for mean in means)]
    return [signed[code] for code in codes]


assert lab.teaching.judge_solution("interval_of", interval_of) == "right"
assert lab.teaching.judge_solution("dequantize", dequantize) == "right"

# %% [markdown]
# ## What we saw

# %%
at = result.set_index(["method", "q"])
weak = (checked["gamma"] > 1).mean()
print(claim.summary())
print(
    f"No value had an error above {used:.0%} of the bound. The median of the bound, gamma, is {checked['gamma'].median():.2f}."
)
print(f"In {weak:.0%} of the messages gamma is above 1, so that the bound says little. "
      f"The median error of a whole message is {checked['vector'].median():.1%}.")  # fmt: skip
for q in sorted({3, value_bits} & set(compared_bits)):
    pairs = [f"{m} {at.loc[(m, q), 'vector']:.1%}" for m in ("fractional", "uniform", "natural")]
    print(f"The error of the whole message with q = {q}: {', '.join(pairs)}")
print(accuracy_of_five_bits())

# %% [markdown]
# The bound holds, but that does not make this quantizer the best one. With the same number of bits, a plain uniform quantizer leaves a
# smaller error of the whole message on these values. Fractional quantization limits the relative error of *small* values, too, and from
# five bits on, natural quantization does so as well. The paper wants this because it is fair to layers whose values are small. Whether such
# layers profit from it is not measured here. The trainings of [13_evidence](13_evidence.ipynb) use only the paper's quantizer, so they do
# not say whether a uniform one would reach the same accuracy.
#
# Next, [08_tables_and_curves](08_tables_and_curves.ipynb) shows TCS-L4-Q5 beside the other schemes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(
    f"Made with {lab.describe_core()} and torch {torch.__version__}, on {data.label} data. "
    f"The {len(all_sent)} messages come from one run."
)
