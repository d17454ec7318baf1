# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Count every byte on the wire
#
# **In short.** At the paper's size a message has the bits of the paper's formula, within 0.20 %. All uplinks after the warm-up are 4 % of TCS-L4-Q5's whole
# traffic. Against dense training its factor is ×1,910 by the formula, ×214 with the dense warm-up, and ×139 with the downlink, too.
#
# **Claim (last column of Tables 1 and 2, Sec. II-E).** TCS-L4-Q5 sends 0.01675 bits per parameter
# and iteration, 1/1,910 of dense training. Messages that really decode confirm this within 0.5 % for
# **one client's uplink after the warm-up**. The whole training, both ways, is another number.
#
# How much did it really send? Published counts of one and the same update differ several-fold,
# because positions, the way back, the dense warm-up or the headers are left out. Here a message is
# taken apart byte by byte; then all schemes of the paper train on messages that were encoded, sent
# and decoded; then messages of six of them are measured at the paper's size, with drawn values; then the whole run is added up.
#
# *Run time*: about 25 s on two cores of a Xeon. *Read before*: [03_tcs](03_tcs.ipynb),
# [06_sparse_encoding](06_sparse_encoding.ipynb),
# [07_fractional_quantization](07_fractional_quantization.ipynb).

# %% jupyter={"source_hidden": true}
import dataclasses
import struct
import tempfile
import zlib

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display
from tcs_lab.studies.paper_size import PaperSize

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## Parameters
#
# Change any of them and run all again. Text between the cells describes what these values give;
# *Claim* and *What we saw* are worked out anew.

# %% jupyter={"source_hidden": true} tags=["parameters"]
schemes = ["FedAvg", "FedAvg-L4", "rand-K", "top-K", "TCS", "TCS-L2", "TCS-L4", "TCS-L4-Q5",
           "TCS-PLF", "TCS-LF", "TCS-LF-Q5", "TCS-Global Momentum"]  # fmt: skip
profile = "ci"  # how large these runs are; nothing is written
dataset = "synthetic"  # synthetic, cifar10 (downloads) or folder
train_samples = 24  # the first so many training images
test_samples = 100  # the first so many test images
model = "resnet8"  # resnet8 or resnet18
width = 4  # channels of its first stage
clients = 3  # N
batch_size = 2  # B, samples of one local step
epochs = 4  # passes over the data
warmup_epochs = 1  # dense epochs at the start
learning_rate = 0.5  # eta
reference_batch = None  # cumulative batch at which learning_rate holds; None: not scaled
seeds = 1  # how many trials, or a list of seeds
threads = 1  # CPU threads of a run
jobs = 1  # runs side by side
message_width = 16  # first stage of the model whose message is taken apart
message_samples = 100  # training images for it
paper_epochs = 300  # Sec. III-B
paper_clients = 10  # N, Sec. III-A
paper_warmup = 5  # dense epochs at the start, Sec. III-B
paper_steps = 78  # local steps an epoch: 50,000 images, 10 clients, batches of 64

# %% jupyter={"source_hidden": true}
params = lab.notebook_params(globals(), complete=False)
claim = lab.Statements(globals(), "10_bits_on_the_wire")
own = ("message_width", "message_samples", "paper_epochs", "paper_clients", "paper_warmup",
       "paper_steps")  # fmt: skip
lab.check_values(globals(), **dict.fromkeys(own, lab.Count))
configs = [c for c in lab.plan(params) if not c.scheme.centralized]
configs = [dataclasses.replace(c, wire=True) for c in configs]
data = lab.load_dataset(dataset, params.get("data_root"), params.get("data_label"))
data = data.first(message_samples, test_samples)
print(f"{len(configs)} runs, each twice: on messages of real bytes, and on counts")

# %% [markdown]
# ## One message, taken apart
#
# A small TCS-Q5 training, up to its last round. How messages travel is a *link*, an object that is handed
# to the compressor; `lab.Listening` keeps
# the messages of a round.

# %%
scheme = tcs.Scheme.named("TCS-Q5")
config = dataclasses.replace(
    configs[0], scheme=scheme, width=message_width, participation=1.0, wire=False
)
federation = lab.Training(config, data, link=lab.Listening())
compressor = federation.compressor
for epoch in range(config.epochs):
    *_, server_D = federation.rounds(epoch)  # the last round's update
messages, shared_K = compressor.link.messages, compressor.known.shared_K  # of the last round
message = messages[0]  # client 0's
D, shared, own = len(server_D), len(shared_K), len(message.positions)
print(f"a message: {shared} values on the shared mask and {own} on the client's own one")
print(f"the model has D = {D:,} parameters, so a dense message would be {4 * D:,} bytes of values")

# %% [markdown]
# Encode it as the paper would: means of the intervals, codes of five bits, positions by Algorithm
# 4. What the paper leaves open is the frame around it: who sent this, in which round, and did it
# arrive whole?

# %%
lab.show_code(tcs.encode_message)

# %%
wire = compressor.known.up  # how both sides write and read what goes up
block = tcs.encode_message(message, wire)
names = [
    "version",
    "kind (1: dense)",
    "sender",
    "round",
    "tag: code, layers, order, mask",
    "own positions",
]
ends = [0, 1, 2, 4, 8, 12, 16]
fields = zip(names, struct.unpack("<BBHIII", block[:16]), ends, ends[1:], strict=False)
parts = [(a, b, name, str(value)) for name, value, a, b in fields]
side = 16 + 4 * scheme.intervals
parts += [(16, side, "means", f"{scheme.intervals} floats"),
          (side, len(block) - 4, "codes, positions", f"{shared + own} codes, {own} positions"),
          (len(block) - 4, len(block), "checksum", "CRC-32 of all before it")]  # fmt: skip
rows = [[f"{a}–{b - 1}", block[a : min(b, a + 4)].hex(" ") + " …" * (b > a + 4), name, value]
        for a, b, name, value in parts]  # fmt: skip
display(Markdown(lab.markdown(pd.DataFrame(rows, columns=["bytes", "hex", "field", "value"]))))

# %% [markdown]
# Sixteen bytes of header, the means, one stream of bits and a checksum. The receiver knows the
# shared mask already (it had the last update); with it the bytes become the message again. And it
# is the one that was sent: the average of all decoded messages of the round is the update that the
# server sent out.

# %%
received = tcs.decode_message(block, wire, shared_K, sender=0, round=message.round)
parts = ("values", "positions", "codes", "means")
intact = all(torch.equal(getattr(received, part), getattr(message, part)) for part in parts)
average_D = torch.zeros(D)
for one in messages:
    got = tcs.decode_message(tcs.encode_message(one, wire), wire, shared_K)
    average_D.index_add_(0, torch.cat([shared_K, got.positions]), got.values)
averaged = torch.equal(average_D / clients, server_D)
print(f"{len(block)} bytes; values, positions, codes and means come back bit for bit: {intact}")
print(f"{clients} decoded messages average to the update, bit for bit: {averaged}")

# %% [markdown]
# ## Anything else is refused
#
# [06_sparse_encoding](06_sparse_encoding.ipynb) found that a flipped bit can move an entry
# unnoticed. Around the code there is a checksum now. Damage the message in every way below and hand
# it to the decoder:


# %%
def refused(data: bytes, wire: tcs.Wire, **expected) -> bool:
    """True if decoding raises ValueError; any other exception would stop the notebook."""
    try:
        tcs.decode_message(data, wire, shared_K, **expected)
    except ValueError:
        return True
    return False


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def resealed(data: bytes) -> bytes:
    return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


# %%
other = tcs.Wire.up(tcs.Scheme.named("TCS-Q4"), wire.layer_sizes, wire.order)
stride = max(1, len(block) // 1000)  # of a long message, not every place
every = "every single" if stride == 1 else f"one in {stride}"
places = range(0, 8 * len(block), stride)
signed = [bit for bit in places if bit < 8 * len(block) - 32]  # what the checksum is made of
damage = {
    f"bits flipped, {every}": [refused(flipped(block, bit), wire) for bit in places],
    f"cut off after bytes, {every}": [refused(block[: b // 8], wire) for b in places[::8]],
    "a byte more": [refused(block + bytes([b]), wire) for b in range(256)],
    "from another round": [refused(block, wire, round=message.round + 1)],
    "for another scheme": [refused(block, other)],
}
forged = [refused(resealed(flipped(block, bit)), wire) for bit in signed]
for name, results in (damage | {"a flip, checksum made right again": forged}).items():
    print(f"{name:34s} {sum(results):5d} of {len(results):5d} refused")

# %% [markdown]
# Everything is refused, except in the last line. A forger who makes the checksum right again is
# told off only where the result is no valid message (positions out of order, a mean that is not a
# number, …); a flip in a value's code gives another valid message. A checksum guards against
# accidents, not against enemies; the decoder promises them only a `ValueError` or a valid message.
#
# ## All schemes, on real messages
#
# Now whole trainings, in `wire: true` mode: every message of every client and of the server becomes
# bytes, is decoded, and the *decoded* one is used. The same runs without `wire` only count the bits
# of each message, round them up to bytes and add the frame. If a single bit or byte were different
# anywhere, accuracy, loss or traffic of some epoch would be.

# %%
with tempfile.TemporaryDirectory() as fresh:  # no record is reused: it is this code that is checked
    wired = lab.run_all(configs, fresh, jobs=jobs, progress=False)
    counted = [dataclasses.replace(config, wire=False) for config in configs]
    counted = lab.run_all(counted, fresh, jobs=jobs, progress=False)


def untimed(record: dict) -> list:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]
    return [record["status"], *rows]


alike = [untimed(a) == untimed(b) for a, b in zip(wired, counted, strict=True)]
rounds = sum(row["rounds"] for record in wired for row in record["rows"])
print(f"{len(wired)} runs, {rounds:,} rounds of {clients} messages up and one down:")
print(f"rows with and without wire are identical in {sum(alike)} runs")


# %%
def measured(record: dict) -> dict[str, str]:
    """Bits per parameter and iteration, bytes of one client's whole run."""
    scheme, d = tcs.Scheme(**record["config"]["scheme"]), record["dimension"]
    bits, sent = lab.bits_per_parameter(record), lab.traffic(record)
    formulas = [tcs.bit_budget(scheme), tcs.bit_budget(scheme, d)]
    names = ["formula", "… whole K, means", *bits]
    columns = {k: f"{v:.4g}" for k, v in zip(names, [*formulas, *bits.values()], strict=True)}
    total, warm = sent["up"] + sent["down"], sent["warm-up"]
    columns["MB both ways (warm-up)"] = f"{total / 1e6:.4f} ({warm / total:.0%})"
    return {"scheme": scheme.name} | columns


# %%
table = pd.DataFrame([measured(record) for record in wired])
small_d = wired[0]["dimension"]
title = f"profile {profile}, D = {small_d:,}, {epochs} epochs, {warmup_epochs} of them dense"
display(Markdown(f"**Bits per parameter and local iteration; {title}**\n\n{lab.markdown(table)}"))

# %% jupyter={"source_hidden": true}
fig, ax = plt.subplots(figsize=(8.8, 4.6), layout="constrained")
kinds = {"formula": ("the paper's formula", 0, 11), "downlink with warm-up": ("sent down, whole run", 3, 9),
         "uplink with warm-up": ("sent up, whole run", 5, 10),
         "uplink": ("sent up, after the warm-up", 1, 6)}  # fmt: skip
columns = table.drop_duplicates("scheme").set_index("scheme")[list(kinds)].astype(float)[::-1]
for name, one in columns.iterrows():
    _ = ax.plot([one.min(), one.max()], [name, name], color="#CCCCCC", lw=1, zorder=0)
for column, (label, i, size) in kinds.items():
    face = {"mfc": "none"} if i == 0 else {"mec": "white", "mew": 0.6}
    style = {"ls": "", "marker": lab.tables.MARKERS[i], "color": lab.COLOURS[i], "ms": size} | face
    _ = ax.plot(columns[column], columns.index, **style, label=label)
ax.set(xscale="log", xlabel="bits per parameter and local iteration (log scale)")
ax.set(title=f"One formula, three measurements ({small_d:,} parameters)")
lab.plain_log(ax.xaxis)
ax.grid(alpha=0.25, axis="x")
fig.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# The squares lie inside the circles: the count holds. (Not for quantized schemes: in a model this
# tiny the means are most of a `-Q5` message. The table's third column has them in, and agrees.) The
# other two measurements stand far to the right for every sparse scheme: they have the dense warm-up
# in them. The way down is more than the way up where clients have masks of their own: it is the
# *union* of what they found, unquantized. Do not read more into it: these runs are short, so a
# warm-up weighs much.
#
# ## At the paper's size
#
# No training is needed to measure a message: its size depends on the *number* of values. So here
# are messages for ResNet-18, layer for layer, with values **drawn, not trained**.

# %%
large, rows, off = PaperSize(paper_clients), [], {}
for name in ("TCS", "TCS-L4", "TCS-L4-Q5", "TCS-LF-Q5", "top-K", "rand-K"):
    sent, budget = large.bits(name) / tcs.Scheme.named(name).local_steps, tcs.bit_budget(name)
    off[name] = sent / budget - 1
    row = {"scheme": name, "formula": f"{budget:.5f}", "sent": f"{sent:.5f}"}
    rows.append(row | {"off by": f"{off[name]:+.2%}"})
print(f"D = {large.dimension:,} in {len(large.layer_sizes)} layers")
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# Every `off by` is below half a percent, header, means, padding and checksum included: at this size
# they do not matter.
#
# ## What the warm-up costs
#
# The paper trains 300 epochs, the first five dense; its budget counts only the others. With $w$
# dense epochs of $T$, and $b$ bits per parameter and iteration in the sparse ones, the whole run
# averages
#
# $$\bar b=\frac{1}{T}\left(w\,\frac{32}{H}+(T-w)\,b\right),\qquad
# \text{factor}=\frac{32}{\bar b}\quad\text{against dense training with } H=1 .$$


# %%
def average(b: float, steps: int, warmup: float) -> float:
    """Bits per parameter and iteration over the paper's schedule, one way."""
    return (warmup * 32 / steps + (paper_epochs - warmup) * b) / paper_epochs


# %% tags=["nbval-check-output"]
claimed = lab.paper_factor("TCS-L4-Q5")
with_warmup = 32 / average(tcs.bit_budget("TCS-L4-Q5"), 4, paper_warmup)
few = lab.times(with_warmup)
print(f"TCS-L4-Q5, uplink: ×{lab.times(claimed)} by the formula, ×{few} with the warm-up")

# %% jupyter={"source_hidden": true}
fig, ax = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
dense_epochs = [paper_epochs * w / 3000 for w in range(0, 151)]
for name in ("TCS-L4-Q5", "TCS-L4", "TCS", "top-K"):
    b, steps = tcs.bit_budget(name), tcs.Scheme.named(name).local_steps
    style = lab.curve_style(name) | {"marker": ""}
    factor = [32 / average(b, steps, w) for w in dense_epochs]
    _ = ax.plot(dense_epochs, factor, **style, label=name)
ax.axvline(paper_warmup, color=lab.COLOURS[7], ls=":", label="the paper's warm-up")
ax.set(yscale="log", xlabel=f"dense epochs at the start, of {paper_epochs}")
ax.set(ylabel="times fewer bits up (log scale)", yticks=[10, 30, 100, 300, 1000, 2000])
ax.set(yticklabels=["10", "30", "100", "300", "1000", "2000"], xlim=(0, dense_epochs[-1]))
ax.set(title="What a dense warm-up leaves of a scheme's factor")
ax.minorticks_off()
ax.grid(alpha=0.25)
fig.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# Every line falls towards a bound that no scheme with its $H$ can escape, $H\,T/w$. The better the
# scheme, the more it loses.
#
# ## The whole run, both ways
#
# Beside the warm-up there is the way down: the server sends all that came up, which is counted here as
# if no two clients ever chose the same place (it is at most that much). The paper's schedule, in bytes
# of messages like those above, headers in:

# %%
whole, rows = {}, []
for name in ("top-K", "TCS", "TCS-L4", "TCS-L4-Q5"):
    whole[name] = large.whole_run(name, paper_epochs, paper_warmup, paper_steps)
    both, steps = sum(whole[name].values()), tcs.Scheme.named(name).local_steps
    row = {"scheme": name, "formula, up": f"×{lab.times(lab.paper_factor(name))}"}
    row |= {f"whole run, {way}": f"×{lab.times(32 / sums)}" for way, sums in whole[name].items()}
    row["whole run, both ways"] = f"×{lab.times(64 / both)}"
    rows.append(row | {"… against dense with the same H": f"×{lab.times(64 / steps / both)}"})
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# The last column is the modest one: four local steps save a factor of four in dense training, too.
# Short values shorten the way up only; what is left of the sum is the way down and the
# warm-up, and both can be had shorter: that is [10b_fewer_bytes](10b_fewer_bytes.ipynb).
#
# ## Claim
#
# 1. A message decodes to what was encoded; every flip, cut and stranger is refused. No tolerance.
# 2. On the way up, in every row of every run, bytes are bits / 8 and the frame, with a byte at most of rounding a message on
#    average; and rows on real messages equal rows on counts.
# 3. At the paper's size TCS, TCS-L4-Q5 and top-K are within 0.5 % of the formula, the tolerance that
#    means, frame and whole blocks may take.
# 4. The paper's warm-up leaves between ×213 and ×214 of TCS-L4-Q5's ×1,910 (to three digits): arithmetic.


# %%
def padding(record: dict) -> list[float]:
    """Bytes a round that are neither the counted bits nor the frame, for every epoch."""
    each = tcs.kept(record["config"]["participation"], clients)
    extra = [row["bytes_up"] / each - row["bits_up"] / 8 for row in record["rows"]]
    rounds = [row["rounds"] for row in record["rows"]]
    return [e / n - tcs.OVERHEAD_BYTES for e, n in zip(extra, rounds, strict=True)]


# %%
padded = [bytes_ for record in wired for bytes_ in padding(record)]
coded = any(record["config"]["scheme"]["code"] == "entropy" for record in wired)
worst = max(abs(off[name]) for name in ("TCS", "TCS-L4-Q5", "top-K"))
refusals = [one for results in damage.values() for one in results]
claim("a message comes back as it was sent", intact and averaged)
claim("damage is refused", all(refusals), f"{sum(refusals):,} of {len(refusals):,}")
claim("rows on bytes are those on counts", all(alike), f"{sum(alike)} of {len(alike)} runs")
least = -1 / 8 if coded else 0  # "+" counts in whole bytes already
claim("bytes are the bits, rounded up, and the frame", least <= min(padded) <= max(padded) <= 1,
      f"padding {min(padded):.2f} to {max(padded):.2f} bytes a message")  # fmt: skip
claim("the budget is what messages need at the paper's size", worst < 0.005, f"within {worst:.2%}")
paper = (paper_epochs, paper_warmup) == (300, 5)
claim("the warm-up leaves ×213 to ×214 of ×1,910", 213 <= with_warmup < 214 if paper else None)

# %% [markdown]
# ## What we saw

# %%
both = sum(whole["TCS-L4-Q5"].values())
print(claim.summary())
print(f"what the paper's budget counts is {tcs.bit_budget('TCS-L4-Q5') / both:.0%} of TCS-L4-Q5's whole "
      "traffic at the paper's size")  # fmt: skip
print(f"left out by it: the warm-up (×{lab.times(claimed)} becomes ×{few}) and the way down "
      f"(both together ×{lab.times(64 / both)})")  # fmt: skip
print(f"surprised us: a forged checksum hides {1 - sum(forged) / len(forged):.0%} of single flips")

# %% [markdown]
# A count is worth what it leaves in. The formula is right, and it describes the smaller part of what a
# run sends: most of the traffic of the paper's shortest scheme is its warm-up and the way back.
#
# Next: [10b_fewer_bytes](10b_fewer_bytes.ipynb), the same training in fewer bytes.

# %% jupyter={"source_hidden": true}
print(
    f"core {lab.core_sha256()[:12]} · torch {torch.__version__} · {data.label} · {len(wired)} runs"
)
