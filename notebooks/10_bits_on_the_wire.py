# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Count every byte on the wire
#
# **Claim (last column of Tables 1 and 2, Sec. II-E).** TCS-L4-Q5 sends 0.01675 bits per parameter
# and iteration, 1/1900 of dense training. Messages that really decode confirm this within 0.5 % for
# **one client's uplink after the warm-up**. The whole training, both ways, is another number.
#
# How much did it really send? Published counts of one and the same update differ several-fold,
# because positions, the way back, the dense warm-up or the headers are left out. Here a message is
# taken apart byte by byte; then all schemes train on messages that were encoded, sent and decoded;
# then the same at the paper's size; then the whole run is added up, and set against accuracy.
#
# *Run time*: about 40 s. *Read before*: `03_tcs`, `06_sparse_encoding`,
# `07_fractional_quantization`.

# %%
import collections
import dataclasses
import inspect
import math
import struct
import tempfile
import zlib

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display
from matplotlib.ticker import LogLocator, NullLocator

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## Parameters

# %% tags=["parameters"]
# all that run here: the paper's, and those beyond it
schemes = ["FedAvg", "FedAvg-L4", "rand-K", "top-K", "TCS", "TCS-L2", "TCS-L4", "TCS-L4-Q5",
           "TCS-PLF", "TCS-LF", "TCS-LF-Q5", "TCS-Global Momentum", "top-K+", "TCS+",
           "TCS-L4-Q5+", "TCS-L4-Q5-NW+", "TCS-L4-Q5-D2+", "TCS-L4-Q5++",
           "TCS-L4-M2-E3++", "TCS-M2-E3-K4++"]  # fmt: skip
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
evidence = "cpu"  # the records drawn at the end are those in results/<evidence>/runs
evidence_eta = 0.5  # learning rate of these records
baseline_scheme = "TCS-L4-Q5"  # what the shorter schemes are compared with, seed by seed
no_loss = 0.5  # points of accuracy: less than that, surely, is no loss (params/claims.yaml)
targets = [0.5, 0.6, 0.65]  # accuracies whose time is asked for
links = [1, 10, 100]  # Mbit/s

# %%
params = lab.notebook_params(globals(), complete=False)
configs = [c for c in lab.plan(params) if not c.scheme.centralized]
configs = [dataclasses.replace(c, wire=True) for c in configs]
data = lab.load_dataset(dataset, params.get("data_root"), params.get("data_label"))
data = data.first(message_samples, test_samples)
print(f"{len(configs)} runs, each twice: on messages of real bytes, and on counts")

# %% [markdown]
# ## One message, taken apart
#
# A small TCS-Q5 training, up to its last round. `messages_of` makes, for every client, the message
# of that round: its values under the shared mask, and its own positions with theirs.

# %%
scheme = tcs.Scheme.named("TCS-Q5")
config = dataclasses.replace(configs[0], scheme=scheme, width=message_width, participation=1.0)
federation = lab.Training(config, data)
compressor = federation.compressor


# %%
def messages_of(before_ND, global_K) -> list[tcs.Message]:
    """What every client sent in the round that has just ended (Alg. 2, lines 9 to 12)."""
    messages = []
    for n, intended_D in enumerate(before_ND + federation.deltas_ND):
        own_K = compressor.rule.local_mask(intended_D, global_K)
        values = intended_D[torch.cat([global_K, own_K])]
        unquantized.append(values)
        where = {"sender": n, "round": compressor.round - 1}
        messages.append(tcs.Message.of(values, own_K, scheme.value_bits, **where))
    return messages


# %%
sent, unquantized, before_ND, global_K = [], [], None, None
for epoch in range(config.epochs):
    for update_D in federation.rounds(epoch):
        if not compressor.last_dense:
            sent += [(message, global_K) for message in messages_of(before_ND, global_K)]
        before_ND, global_K = compressor.errors_ND.clone(), compressor.rule.global_mask()
        server_D = update_D
message, shared_K = sent[-clients]  # client 0, last round
D, shared, own = len(server_D), len(shared_K), len(message.positions)
print(f"{len(sent)} messages; in each {shared} values on the shared mask and {own} on the own one")
print(f"the model has D = {D:,} parameters, so a dense message would be {4 * D:,} bytes of values")

# %% [markdown]
# Encode it as the paper would: means of the intervals, codes of five bits, positions by Algorithm
# 4. What the paper leaves open is the frame around it: who sent this, in which round, and did it
# arrive whole?

# %%
print(inspect.getsource(tcs.encode_message))

# %%
wire = tcs.Wire.up(scheme, federation.flat.layer_sizes)
block = tcs.encode_message(message, wire)
names = ["version", "kind (1: dense)", "sender", "round", "tag: code and layers", "own positions"]
ends = [0, 1, 2, 4, 8, 12, 16]
fields = struct.unpack("<BBHIII", block[:16])
rows = [
    {"bytes": f"{a}–{b - 1}", "hex": block[a:b].hex(" "), "field": name, "value": str(value)}
    for a, b, name, value in zip(ends, ends[1:], names, fields, strict=False)
]
side = 16 + 4 * scheme.intervals
rest = [(16, side, "means", f"{scheme.intervals} floats"),
        (side, len(block) - 4, "codes, positions", f"{shared + own} codes, {own} positions"),
        (len(block) - 4, len(block), "checksum", "CRC-32 of all before it")]  # fmt: skip
rows += [{"bytes": f"{a}–{b - 1}", "hex": block[a : min(b, a + 4)].hex(" ") + " …" * (b > a + 4),
          "field": name, "value": value} for a, b, name, value in rest]  # fmt: skip
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# You should see sixteen bytes of header, the means, one stream of bits and a checksum. The receiver
# knows the shared mask already (it had the last update); with it the bytes become the message
# again. And it is the one that was sent: the average of all decoded messages of the round is the
# update that the server sent out.

# %%
received = tcs.decode_message(block, wire, shared_K, sender=0, round=message.round)
for part in ("values", "positions", "codes", "means"):
    assert torch.equal(getattr(received, part), getattr(message, part)), part
average_D = torch.zeros(D)
for one, known_K in sent[-clients:]:
    got = tcs.decode_message(tcs.encode_message(one, wire), wire, known_K)
    average_D.index_add_(0, torch.cat([known_K, got.positions]), got.values)
assert torch.equal(average_D / clients, server_D)
print(f"{len(block)} bytes; values, positions, codes and means come back bit for bit,")
print(f"and {clients} decoded messages average to the update, bit for bit")

# %% [markdown]
# ## Anything else is refused
#
# `06_sparse_encoding` found that a flipped bit can move an entry unnoticed. Around the code there
# is a checksum now. Damage the message in every way below and hand it to the decoder:


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
other = tcs.Wire.up(tcs.Scheme.named("TCS-Q4"), wire.layer_sizes)
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
    "a flip, checksum made right again": [
        refused(resealed(flipped(block, bit)), wire) for bit in signed
    ],
}
for name, results in damage.items():
    print(f"{name:34s} {sum(results):5d} of {len(results):5d} refused")

# %% [markdown]
# You should see everything refused, except in the last line. A forger who makes the checksum right
# again is told off only where the result is no valid message (positions out of order, a mean that
# is not a number, …); a flip in a value's code gives another valid message. A checksum guards
# against accidents, not against enemies; the decoder promises them only a `ValueError` or a valid
# message.
#
# ## The same message in fewer bytes
#
# Schemes whose name ends in `+` send the same message in another code, without loss: each sign a
# bit; the number of the interval Huffman-coded, shared and own values apart; positions as gaps,
# Golomb–Rice-coded, layer by layer where that is shorter.

# %%
print(inspect.getsource(tcs._entropy_code))

# %% [markdown]
# Every part of both, in bytes, beside the paper's formula and the entropy bound:

# %%
PARTS = ["header, checksum, padding", "means", "signs", "intervals, shared", "intervals, own",
         "positions"]  # fmt: skip
q, P, phi = scheme.value_bits, scheme.intervals, scheme.phi_local
plus_wire = tcs.Wire.up(tcs.Scheme.named("TCS-Q5+"), wire.layer_sizes)
plus = tcs.encode_message(message, plus_wire)
assert torch.equal(tcs.decode_message(plus, plus_wire, shared_K).values, message.values)


def parts(*sizes: float) -> dict[str, float]:
    return dict(zip(PARTS, sizes, strict=True))


def entropy(symbols) -> float:
    """Bits a symbol needs on average, as often as each occurs here."""
    share = torch.bincount(symbols).double() / len(symbols)
    return max(0.0, float(-(share[share > 0] * share[share > 0].log2()).sum()))


def log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


# %%
def formula_parts() -> dict[str, float]:
    """The paper's formula, in bytes of this model."""
    values = [size * D / 8 for size in (scheme.phi_global + phi, scheme.phi_global, phi)]
    signs, ours, own_values = values[0], (q - 1) * values[1], (q - 1) * values[2]
    return parts(0, 0, signs, ours, own_values, phi * D * (math.log2(1 / phi) + 2) / 8)


def block_parts(data: bytes) -> dict[str, float]:
    """The paper's code, as sent; codes and positions share one stream, so parts of bytes."""
    places = tcs.position_bits(own, D, tcs.block_for(own, D)) / 8
    rest = [(shared + own) / 8, (q - 1) * shared / 8, (q - 1) * own / 8, places]
    return parts(len(data) - 4 * P - sum(rest), 4 * P, *rest)


# %%
def plus_parts(data: bytes, message: tcs.Message) -> dict[str, float]:
    """The "+" code, as sent."""
    interval = (message.codes % P).numpy().astype("uint16")
    streams = [tcs._shortest(part, q - 1) for part in (interval[:shared], interval[shared:])]
    places = tcs._gap_code(message.positions.numpy(), wire.layer_sizes)
    rest = [math.ceil((shared + own) / 8), *map(len, streams), len(places)]
    return parts(len(data) - 4 * P - sum(rest), 4 * P, *rest)


def bound_parts(message: tcs.Message) -> dict[str, float]:
    """Entropy: intervals as often as they occur here, positions anywhere outside the shared mask."""
    interval = message.codes.long() % P
    ours, theirs = entropy(interval[:shared]) * shared, entropy(interval[shared:]) * own
    return parts(0, 0, (shared + own) / 8, ours / 8, theirs / 8, log2_choose(D - shared, own) / 8)


# %%
anatomy = pd.DataFrame(
    {
        "paper's formula": formula_parts(),
        "paper's code, sent": block_parts(block),
        '"+" code, sent': plus_parts(plus, message),
        "entropy bound": bound_parts(message),
    }
)
assert all(anatomy.iloc[0, 1:3] >= tcs.OVERHEAD_BYTES) and anatomy.iloc[0, 2] == tcs.OVERHEAD_BYTES
assert math.isclose(anatomy["paper's formula"].sum(), tcs.bit_budget(scheme) * D / 8)
text = pd.concat([anatomy, anatomy.sum().to_frame("all").T]).map("{:,.1f}".format)
display(Markdown(lab.markdown(text.reset_index(names="bytes"))))

# %%
fig, ax = plt.subplots(figsize=(8.8, 3.6), layout="constrained")
shades = [lab.COLOURS[i] for i in (7, 4, 0, 1, 6, 5)]
hatches, left = ["", "....", "", "", "\\\\\\\\", "////"], pd.Series(0.0, anatomy.columns)
for (name, sizes), colour, hatch in zip(anatomy.iterrows(), shades, hatches, strict=True):
    _ = ax.barh(
        anatomy.columns, sizes, left=left, color=colour, hatch=hatch, ec="white", label=name
    )
    left = left + sizes
for y, total in enumerate(left):
    _ = ax.text(total + 6, y, f"{total:,.0f}", va="center")
ax.set(xlabel="bytes", xlim=(0, left.max() * 1.1), title="Where the bytes of one message are")
ax.invert_yaxis()
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
# You should see the paper's code an eighth above the formula: the frame and the means are what the
# formula leaves out. They have the same size in any model, so they weigh at this one and vanish at
# the paper's. The `+` code saves at the numbers of intervals and at the positions. Signs are as
# good as random: nothing is saved there.
#
# Why there is something to save: a five-bit code would be the shortest one if all intervals were
# equally likely, and Algorithm 4 is made for positions that are equally likely everywhere.

# %%
interval = message.codes.long() % P
names = ["shared mask", "own mask"]
counts = [torch.bincount(part, minlength=P) for part in (interval[:shared], interval[shared:])]
bits = [entropy(part) for part in (interval[:shared], interval[shared:])]
ends_L = torch.tensor(wire.layer_sizes).cumsum(0)
every_own = torch.cat([one.positions for one, _ in sent[-clients:]])
layer_of = torch.bucketize(every_own, ends_L, right=True)
found_L = torch.bincount(layer_of, minlength=len(ends_L)) / len(every_own)
expected_L = torch.tensor(wire.layer_sizes) / D
for name, number in zip(names, bits, strict=True):
    print(f"{name}: {number:.2f} bits for the interval instead of {q - 1}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.2, 3.8), layout="constrained")
for i, (name, count) in enumerate(zip(names, counts, strict=True)):
    bars = {"width": 0.4, "color": lab.COLOURS[(6, 0)[i]], "label": name}
    _ = axes[0].bar(torch.arange(P) + 0.8 + 0.4 * i, 100 * count / count.sum(), **bars)
axes[0].axhline(100 / P, color=lab.COLOURS[2], ls="--", label="equally likely")
axes[0].set(xlabel="interval p (1: largest values)", ylabel="share of the values (%)")
axes[0].set(title="Intervals of one message", xticks=range(1, P + 1, 3))
x = torch.arange(len(ends_L))
style = {"color": lab.COLOURS[2], "marker": "_", "ls": "", "ms": 9, "mew": 2}
_ = axes[1].bar(x, 100 * found_L, color=lab.COLOURS[0], label="own positions")
_ = axes[1].plot(x, 100 * expected_L, **style, label="if all entries were equally likely")
axes[1].set(xlabel="layer (parameter tensor), in order", ylabel="share (%)")
axes[1].set(title=f"Own positions of {clients} clients by layer")
axes[1].set_ylim(top=140 * max(found_L.max(), expected_L.max()))
for ax in axes:
    ax.legend(frameon=False)
plt.show()

# %% [markdown]
# You should see, on the left, shared values that crowd into the first two thirds, and own values all
# in the first: each is among the largest outside the shared mask, so their numbers cost next to
# nothing. On the right, some layers get more than their share: there a code that counts by layer
# has shorter gaps. Over all messages of this training:


# %%
def sizes_of(message: tcs.Message) -> dict[str, int]:
    """The message in both codes, and whether its bits are the counted ones to the last."""
    lengths = {}
    for name, code in (("block", wire), ("plus", plus_wire)):
        lengths[name] = len(tcs.encode_message(message, code))
        counted = math.ceil(code.bits(message) / 8) + tcs.OVERHEAD_BYTES
        assert lengths[name] == counted, f"{lengths[name]} bytes, counted {counted}"
    return lengths


formula_bytes = tcs.bit_budget(scheme) * D / 8
lengths = pd.DataFrame([sizes_of(one) for one, _ in sent])
shorter = 1 - lengths["plus"] / lengths["block"]
over = lengths["plus"].mean() / formula_bytes - 1
bare = (lengths["plus"].mean() - 4 * P - tcs.OVERHEAD_BYTES) / formula_bytes - 1
print(
    f'"+" against the paper\'s code as sent: {shorter.mean():.1%} shorter '
    f"({shorter.min():.1%} to {shorter.max():.1%}, n = {len(sent)} messages)"
)
print(f"against the formula, which has no frame and no means: {over:+.1%} with both, ", end="")
print(f"{bare:+.1%} without")

# %% [markdown]
# You should see a saving that differs from message to message: it depends on the training's state. In a
# large model frame and means no longer weigh. To take such a message apart, run this notebook in
# papermill with `-p model resnet18 -p message_width 64 -p message_samples 1280 -p train_samples 192 -p batch_size 16`, better on
# real images (`-p dataset cifar10`).
#
# ## Fewer bits a value
#
# The paper's quantizer cuts the magnitudes from the smallest to the largest into intervals of equal
# *ratio*. One tiny value is enough to spread them over many orders of magnitude, and then most of
# what matters shares a few intervals. Lloyd and Max's quantizer (`-M<q>` for the clients' values; the
# server's in `-D<q>`) moves the intervals to where they make the squared error small. The messages
# look alike, $P=2^{q-1}$ means and a code of q bits a value. What each loses of the last round's
# values, before errors are accumulated:


# %%
def lost(quantize, bits: int) -> pd.Series:
    """Share of the values' squared length that is not sent, for every client."""
    errors = []
    for values in unquantized[-clients:]:
        received = tcs.fractional_dequantize(*quantize(values, 2 ** (bits - 1)))
        errors.append(float((received - values).square().sum() / values.square().sum()))
    return pd.Series(errors)


widths = range(1, 9)
losses = pd.DataFrame(
    {
        name: [lost(quantize, bits).mean() for bits in widths]
        for name, quantize in (("the paper's", tcs.fractional_quantize),
                               ("Lloyd and Max's", tcs.lloyd_max_quantize))
    },
    index=widths,
)  # fmt: skip
enough = next(
    bits for bits in widths if losses.loc[bits, "Lloyd and Max's"] <= losses.loc[5, "the paper's"]
)
print(
    f"the paper's 5 bits lose {losses.loc[5].iloc[0]:.1%}; Lloyd and Max's lose less from {enough} bits on"
)

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
for i, name in enumerate(losses):
    style = {"color": lab.COLOURS[i + 1], "marker": lab.figures.MARKERS[i], "ls": lab.figures.DASHES[i]}
    _ = ax.plot(widths, 100 * losses[name], **style, label=name)
ax.set(
    yscale="log", xlabel="bits a value, q (one is the sign)", ylabel="squared error (%, log scale)"
)
ax.set(title=f"What quantization loses, mean of {clients} messages", xticks=list(widths))
ax.grid(alpha=0.25)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# You should see the second curve below the first from two bits on (with one bit both send the mean
# magnitude). The bits that this saves buy positions: `-M2-E3` sends two bits a value and lets every
# client choose three times as many places of its own, in a message shorter than `-Q5`'s.
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


def untimed(record: dict) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]


for a, b in zip(wired, counted, strict=True):
    assert untimed(a) == untimed(b) and a["status"] == b["status"], a["config"]["scheme"]["name"]
rounds = sum(row["rounds"] for record in wired for row in record["rows"])
print(f"{len(wired)} runs, {rounds:,} rounds of {clients} messages up and one down:")
print("rows with and without wire are identical")


# %%
def measured(record: dict) -> dict[str, str]:
    """Bits per parameter and iteration, bytes of one client's whole run."""
    scheme, d = tcs.Scheme(**record["config"]["scheme"]), record["dimension"]
    bits, sent = lab.bits_per_parameter(record), lab.traffic(record)
    formulas = [tcs.bit_budget(scheme), tcs.bit_budget(scheme, d)]
    names = ["formula", "… whole K, means", *bits]
    columns = {k: f"{v:.4g}" for k, v in zip(names, [*formulas, *bits.values()], strict=True)}
    total, warm = sent["up"] + sent["down"], sent["warm-up"]
    columns["MB both ways"] = f"{total / 1e6:.4f}"
    return {"scheme": scheme.name} | columns | {"of it warm-up": f"{warm / total:.0%}"}


# %%
table = pd.DataFrame([measured(record) for record in wired])
small_d = wired[0]["dimension"]
title = f"profile {profile}, D = {small_d:,}, {epochs} epochs, {warmup_epochs} of them dense"
display(Markdown(f"**Bits per parameter and local iteration; {title}**\n\n{lab.markdown(table)}"))

# %%
fig, ax = plt.subplots(figsize=(8.8, 6.0), layout="constrained")
kinds = {"formula": ("the paper's formula", 0, 11), "downlink with warm-up": ("sent down, whole run", 3, 9),
         "uplink with warm-up": ("sent up, whole run", 5, 10),
         "uplink": ("sent up, after the warm-up", 1, 6)}  # fmt: skip
columns = table.drop_duplicates("scheme").set_index("scheme")[list(kinds)].astype(float)[::-1]
for name, one in columns.iterrows():
    _ = ax.plot([one.min(), one.max()], [name, name], color="#CCCCCC", lw=1, zorder=0)
for column, (label, i, size) in kinds.items():
    face = {"mfc": "none"} if i == 0 else {"mec": "white", "mew": 0.6}
    style = {"ls": "", "marker": lab.figures.MARKERS[i], "color": lab.COLOURS[i], "ms": size} | face
    _ = ax.plot(columns[column], columns.index, **style, label=label)
ax.set(xscale="log", xlabel="bits per parameter and local iteration (log scale)")
ax.set(title=f"One formula, three measurements ({small_d:,} parameters)")
ax.grid(alpha=0.25, axis="x")
fig.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# You should see the squares inside the circles: the count holds. (Not for quantized schemes: in a
# model this tiny the means are most of a `-Q5` message, and up to a third of an `-M2` one. The table's third column has them in, and
# agrees where the code is the paper's.) The other two measurements stand far to the right for every sparse scheme with a dense
# warm-up. The way down is more than the way up where clients have masks of their own and the server's message
# is not compressed: it is the *union* of what they found, unquantized. `-NW+` and `-D2+` take away one of the two costs,
# `++` both. Do not read more into it: these runs are short, so a warm-up weighs much, and at this
# size the `+` code's own overhead can outweigh what it saves.
#
# ## At the paper's size
#
# No training is needed to measure a message: its size depends on the *number* of values, and for
# `+` also on their distribution. So here are messages for ResNet-18, layer for layer. The values
# are **drawn, not trained**: normal, times a log-normal factor for every entry (heavy tails) and
# one for every layer; a new vector and a correlated old one, for the shared mask. So what `+` saves
# here is an indication, what the paper's code needs is exact.

# %%
large_sizes = [p.numel() for p in tcs.resnet18().parameters()]
large_D = sum(large_sizes)
generator = torch.Generator().manual_seed(0)
scale_D = torch.exp(0.5 * torch.randn(len(large_sizes), generator=generator))
scale_D = scale_D.repeat_interleave(torch.tensor(large_sizes))
scale_D *= torch.exp(torch.randn(large_D, generator=generator))
old_D = torch.randn(large_D, generator=generator) * scale_D
new_D = 0.5 * old_D + torch.randn(large_D, generator=generator) * scale_D
print(f"D = {large_D:,} in {len(large_sizes)} layers")


# %%
def own_rule(name: str, way: str, times: int = 1):
    """A scheme's masks for one way, so many times as large."""
    scheme = tcs.Scheme.named(name)
    rule = tcs.RULES[scheme.rule](scheme, large_sizes)
    rule.widen(times)
    if way == "down" and scheme.phi_down is None:  # all that came up: N own masks, no two alike
        rule.k_local *= paper_clients
    return scheme, rule


def large(name: str, way: str = "up", first=False, times=1) -> tuple[tcs.Message, torch.Tensor]:
    """A message at the paper's size, and its shared mask; `first`: no update has been seen."""
    scheme, rule = own_rule(name, way, times)
    if not first:
        rule.observe(old_D)
    elif way == "down" and scheme.phi_down is None:
        rule.k_global *= paper_clients  # in the first round all of it is the clients' own
    known_K, down = rule.global_mask(), way == "down"
    own_K = (rule.server_mask if down and scheme.phi_down else rule.local_mask)(new_D, known_K)
    bits = (scheme.value_bits, scheme.quantizer), (scheme.down_value_bits, scheme.down_quantizer)
    values, (width, how) = new_D[torch.cat([known_K, own_K])], bits[down]
    return tcs.Message.of(values, own_K, width, quantizer=how), known_K


# %%
def large_bits(name: str, made, way: str = "up") -> float:
    """Bits per parameter of a round's message, as sent and decoded again."""
    message, known_K = made
    wire = getattr(tcs.Wire, way)(tcs.Scheme.named(name), large_sizes)
    data = tcs.encode_message(message, wire)
    got = tcs.decode_message(data, wire, known_K)
    assert torch.equal(got.values, message.values) and torch.equal(got.positions, message.positions)
    return 8 * len(data) / large_D


# %%
rows, off = [], {}
for name in ("TCS", "TCS-L4", "TCS-L4-Q5", "TCS-LF-Q5", "top-K", "rand-K"):
    made, steps = large(name), tcs.Scheme.named(name).local_steps
    numbers = [large_bits(name + code, made) / steps for code in ("", "+")]
    budget = tcs.bit_budget(name)
    off[name] = numbers[0] / budget - 1
    row = {"scheme": name, "formula": f"{budget:.5f}", "sent": f"{numbers[0]:.5f}"}
    row |= {"off by": f"{off[name]:+.2%}", 'sent in "+" code': f"{numbers[1]:.5f}"}
    rows.append(row | {"shorter by": f"{1 - numbers[1] / numbers[0]:.1%}"})
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# You should see every `off by` below half a percent, header, means, padding and checksum included:
# at this size they do not matter. `+` changes little where values are 32 bits long: it leaves those
# as they are.
#
# Positions alone, against the entropy bound. For positions that are really random no code can do
# better than $\log_2\binom{D}{K}$ bits on average:

# %%
k = tcs.kept(1e-3, large_D)
uniform_K = tcs.top_k_positions(torch.rand(large_D, generator=generator), k)
code = tcs._gap_code(uniform_K.numpy(), large_sizes)
alg4 = tcs.position_bits(k, large_D, tcs.block_for(k, large_D))
bound = log2_choose(large_D, k)
above = 8 * len(code) / bound
print(f"{k:,} random positions of {large_D:,}, bits each:")
print(f"Alg. 4 {alg4 / k:.2f}, + code {8 * len(code) / k:.2f}, entropy bound {bound / k:.2f}")
print(f"the + code is {above - 1:.1%} above the bound, Alg. 4 {alg4 / bound - 1:.1%}")

# %% [markdown]
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
claimed = 32 / tcs.bit_budget("TCS-L4-Q5")
with_warmup = 32 / average(tcs.bit_budget("TCS-L4-Q5"), 4, paper_warmup)
print(f"TCS-L4-Q5, uplink: ×{claimed:,.0f} by the formula, ×{with_warmup:,.0f} with the warm-up")

# %%
fig, ax = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
dense_epochs = [w / 10 for w in range(0, 151)]
for name in ("TCS-L4-Q5", "TCS-L4", "TCS", "top-K"):
    b, steps = tcs.bit_budget(name), tcs.Scheme.named(name).local_steps
    style = lab.curve_style(name) | {"marker": ""}
    factor = [32 / average(b, steps, w) for w in dense_epochs]
    _ = ax.plot(dense_epochs, factor, **style, label=name)
ax.axvline(paper_warmup, color=lab.COLOURS[7], ls=":", label="the paper's warm-up")
ax.set(yscale="log", xlabel=f"dense epochs at the start, of {paper_epochs}")
ax.set(ylabel="times fewer bits up (log scale)", yticks=[10, 30, 100, 300, 1000, 2000])
ax.set(yticklabels=["10", "30", "100", "300", "1000", "2000"], xlim=(0, 15))
ax.set(title="What a dense warm-up leaves of a scheme's factor")
ax.minorticks_off()
ax.grid(alpha=0.25)
fig.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# You should see every line fall towards a bound that no scheme with its $H$ can escape, $H\,T/w$.
# The better the scheme, the more it loses.
#
# So the factor of a **whole** training, both ways, needs three things: a short code, a compressed way
# down, and no dense warm-up (in its first round every client sends its own $S_{top}$ at
# $\phi_{global}+\phi_{local}$, with positions; with `-W10` the warm-up's masks are ten times as large).
# The last two schemes save fewer rounds, or none: `-K4` makes all masks four times smaller, and a message a
# round instead of one in four costs about the same. Here it is for the paper's schedule, in bytes of
# messages like those above, headers in. Where the server sends all that came up, it is counted as if no two
# clients ever chose the same place: it is at most that much.


# %%
def early_bits(name: str, way: str) -> tuple[float, float]:
    """Bits per parameter of a warm-up's round, and how many more its first round takes."""
    scheme = tcs.Scheme.named(name)
    if scheme.dense_warmup:
        return 32 + 8 * tcs.OVERHEAD_BYTES / large_D, 0
    made = [large(name, way, first, scheme.warmup_masks) for first in (False, True)]
    early, first = (large_bits(name, one, way) for one in made)
    return early, first - early


def whole_run(name: str) -> dict[str, float]:
    """Bits per parameter and iteration of the paper's schedule, in messages that decode."""
    total, steps = {}, tcs.Scheme.named(name).local_steps
    rounds, warm = (paper_steps // steps * epochs for epochs in (paper_epochs, paper_warmup))
    for way in ("up", "down"):
        early, once = early_bits(name, way)
        run = warm * early + (rounds - warm) * large_bits(name, large(name, way), way) + once
        total[way] = run / (rounds * steps)
    return total


# %%
smaller_masks = ["TCS-L2-M2-E3-K2++", "TCS-M2-E3-K4++"]
ends = ("", "-Q5", "-Q5+", "-Q5-NW+", "-Q5-D2+", "-Q5++", "-M2-E3++", "-M2-E3-W3++", "-M2-E3-W10++")
chain = ["TCS", *(f"TCS-L4{end}" for end in ends), *smaller_masks]
whole = {name: whole_run(name) for name in chain}
rows = []
for name, sums in whole.items():
    both, steps = sum(sums.values()), tcs.Scheme.named(name).local_steps
    row = {"scheme": name, "formula, up": f"×{32 / tcs.bit_budget(name):,.0f}"}
    row |= {f"whole run, {way}": f"×{32 / sums[way]:,.0f}" for way in sums}
    row["whole run, both ways"] = f"×{64 / both:,.0f}"
    rows.append(row | {"… against dense with the same H": f"×{64 / steps / both:,.0f}"})
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# You should see what each step is worth, and that one alone is not worth much: the largest part
# that is left decides the sum. The last column is the modest one: four local steps save a factor of
# four in dense training, too. Smaller masks in more rounds cost a little more than local steps: a
# position among fewer is further from the next.
#
# ## Accuracy against megabytes
#
# Bits mean nothing without the accuracy they buy. The records of finished trainings in `results/`
# hold both, epoch by epoch. All that were made alike (data, model, epochs, learning rate), with the
# standard shares of their scheme, are drawn.


# %%
def standard(record: dict) -> bool:
    """At the evidence's learning rate, and a scheme of the core just as its name says."""
    config = record["config"]
    given = tcs.Scheme(**config["scheme"]) if config["scheme"]["rule"] in tcs.RULES else None
    try:
        alike = given == tcs.Scheme.named(config["scheme"]["name"])
    except ValueError:
        alike = False
    eta = config["learning_rate"] == evidence_eta or config["scheme"]["centralized"]
    return alike and eta


def setting(record: dict) -> tuple:
    """What must be the same for curves to share a figure; of a federation, its clients too."""
    config, scheme = record["config"], record["config"]["scheme"]
    keys = ["model", "width", "epochs", "train_samples", "dirichlet_alpha", "precision"]
    if not scheme["centralized"]:
        keys += ["clients", "batch_size", "participation", "reference_batch"]
    usual = max(1, round(config["epochs"] / 60))  # -NW has no warm-up, and is compared all the same
    warmup = config["warmup_epochs"] if scheme.get("dense_warmup", True) else usual
    found = [record["provenance"]["fingerprint"], *(config[key] for key in keys)]
    return tuple(found if scheme["centralized"] else [*found, warmup])


# %%
paths = sorted((lab.results_folder(evidence) / "runs").glob("*.json"))
records = [record for record in map(lab.read_record, paths) if standard(record)]
settings = [setting(record) for record in records if not record["config"]["scheme"]["centralized"]]
if not settings:
    print(f"NO EVIDENCE in results/{evidence}/runs; to show the figures, the small runs of above")
    records, settings = wired, [setting(record) for record in wired]
common = collections.Counter(settings).most_common(1)[0][0]
records = [one for one in records if setting(one) == common[: len(setting(one))]]
diverged = [r["config"]["scheme"]["name"] for r in records if r["status"] != "finished"]
records = [record for record in records if record["status"] == "finished"]
print(f"{len(records)} finished records; diverged, and not drawn: {', '.join(diverged) or 'none'}")

# %%
federated = {}  # scheme: seed: record
for record in records:
    seed, name = record["config"]["seed"], record["config"]["scheme"]["name"]
    federated.setdefault(name, {})[seed] = record
central = list(federated.pop("Baseline", {}).values())
federated.pop("Baseline-Momentum", None)
made, shape = records[0]["provenance"], records[0]["config"]
d = records[0]["dimension"]
label = f"{made['dataset']}, {shape['model']} ({d:,} parameters), {shape['epochs']} epochs"
print(f"{len(federated)} federated schemes: {label}")


# %%
def curve(name: str) -> pd.DataFrame:
    """Per epoch, mean over the seeds: accuracy, and bytes so far, both ways, of one client."""
    frames = []
    for record in federated[name].values():
        rows = record["rows"]
        flows = [lab.traffic(record | {"rows": rows[: i + 1]}) for i in range(len(rows))]
        total = [flow["up"] + flow["down"] for flow in flows]
        frames.append(pd.DataFrame({"bytes": total, "accuracy": [r["accuracy"] for r in rows]}))
    return pd.concat(frames).groupby(level=0).mean()


# %%
curves = {name: curve(name) for name in federated}
order = sorted(curves, key=lambda name: -curves[name]["bytes"].iloc[-1])
steps = max(r["config"]["scheme"]["local_steps"] * sum(row["rounds"] for row in r["rows"])
            for group in federated.values() for r in group.values())  # fmt: skip
dense_bytes = {f"FedAvg-L{h}": 2 * (4 * d + tcs.OVERHEAD_BYTES) * (steps // h) for h in (1, 4)}
for record in federated.get("FedAvg-L4", {}).values():  # the arithmetic is what a dense run sends
    flow = lab.traffic(record)
    assert flow["up"] + flow["down"] == dense_bytes["FedAvg-L4"]

# %%
rows = []
for name in order:
    group = [lab.traffic(r) for r in federated[name].values()]
    finals = pd.Series([r["rows"][-1]["accuracy"] for r in federated[name].values()])
    total, warm = curves[name]["bytes"].iloc[-1], sum(one["warm-up"] for one in group) / len(group)
    spread = f" ± {100 * finals.std():.2f}" if len(finals) > 1 else ""
    row = {"scheme": name, "n": str(len(group)), "accuracy %": f"{100 * finals.mean():.2f}{spread}"}
    row |= {"MB both ways": f"{total / 1e6:,.4g}", "of it warm-up": f"{warm / total:.0%}"}
    rows.append(row | {"less than FedAvg-L4": f"×{dense_bytes['FedAvg-L4'] / total:,.1f}"})
display(Markdown(f"**{label}**\n\n{lab.markdown(pd.DataFrame(rows))}"))

# %% [markdown]
# Bytes are one client's messages, both ways, from the first round to the last. The last column
# divides what dense FedAvg with H = 4 sends, $2\,(4D+20)$ bytes a round, by them. `±` is one
# standard deviation over n seeds.


# %%
def plain(axis) -> None:
    """A log axis whose ticks read 1, 3, 10, ..."""
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_locator(NullLocator())


# %%
fig, ax = plt.subplots(figsize=(9.2, 6.2), layout="constrained")
for i, name in enumerate(order):
    x, y = curves[name]["bytes"] / 1e6, 100 * curves[name]["accuracy"]
    style = {"color": lab.COLOURS[i % 8], "ls": lab.figures.DASHES[(i + i // 8) % 4]}
    _ = ax.plot(x, y, **style, lw=2.4 if name.endswith("+") else 1.3)
    face = {"mfc": "white", "mew": 1.8} if i >= 8 else {"mec": "black", "mew": 0.5}
    end = style | {"marker": lab.figures.MARKERS[(i + 3 * (i // 8)) % 8], "ms": 8} | face
    _ = ax.plot(x.iloc[-1:], y.iloc[-1:], **end, label=f"{name} (n = {len(federated[name])})")
grey = {"color": lab.COLOURS[7], "lw": 1.2}
ax.axvline(dense_bytes["FedAvg-L4"] / 1e6, **grey, ls="-.", label="all that FedAvg-L4 sends")
if central:
    best = 100 * sum(r["rows"][-1]["accuracy"] for r in central) / len(central)
    ax.axhline(best, **grey, ls=":", label=f"centralized (n = {len(central)})")
ax.set(xscale="log", xlabel="megabytes sent and received by one client so far (log scale)")
ax.set(ylabel="test accuracy (%)", title=f"What accuracy costs\n{label}")
top = ax.secondary_xaxis(
    "top", functions=(lambda mb: 8 * mb / links[0], lambda s: s * links[0] / 8)
)
plain(ax.xaxis)
plain(top.xaxis)
top.set_xlabel(f"seconds on a link of {links[0]} Mbit/s, communication only")
ax.grid(alpha=0.25)
fig.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# Read it from the left: how far does a scheme get with the megabytes you have? Each curve starts
# after its first epoch and ends, with a mark, after its last. You should see TCS with a dense warm-up
# start late and then rise steeply: it pays for the first epoch, the rest is cheap.
#
# ## Time to accuracy
#
# Seconds until a client has sent and received what it takes to reach an accuracy (mean over seeds,
# first epoch that reaches it). **Communication only**: eight bits a byte over the link's rate, the
# same both ways; no latency, no packet headers, no computing. A dash: not reached in this training.


# %%
def bytes_to(name: str, target: float) -> float:
    """Bytes both ways until the mean accuracy is `target`; nan if never."""
    there = curves[name][curves[name]["accuracy"] >= target]
    return there["bytes"].iloc[0] if len(there) else math.nan


def duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (0, "s")):
        if seconds >= 1.5 * size:
            return f"{seconds / (size or 1):,.3g} {unit}"
    return "–"


# %%
middle = sorted(targets)[len(targets) // 2]
rows = []
for name in sorted(order, key=lambda name: bytes_to(name, middle)):
    total = bytes_to(name, middle)
    row = {"scheme": name, "MB": "–" if math.isnan(total) else f"{total / 1e6:,.4g}"}
    times = {f"at {rate} Mbit/s": duration(8 * total / (rate * 1e6)) for rate in links}
    rows.append(row | times)
display(Markdown(f"**To {middle:.0%} accuracy; {label}**\n\n{lab.markdown(pd.DataFrame(rows))}"))

# %%
fig, ax = plt.subplots(figsize=(8.8, 4.6), layout="constrained")
names, rate = order[::-1], links[0]
for i, target in enumerate(targets):
    seconds = [8 * bytes_to(name, target) / (rate * 1e6) for name in names]
    style = {"ls": "", "marker": lab.figures.MARKERS[i], "ms": 8, "color": lab.COLOURS[(6, 1, 0)[i % 3]]}
    _ = ax.plot(seconds, names, **style, label=f"to {target:.0%}")
for name in names:
    if all(math.isnan(bytes_to(name, target)) for target in targets):
        at = {"transform": ax.get_yaxis_transform(), "va": "center", "ha": "center"}
        _ = ax.text(0.5, name, "none of them reached", **at, color=lab.COLOURS[7], fontsize=9)
ax.set(xscale="log", yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4))
ax.set(xlabel=f"seconds on a link of {rate} Mbit/s, communication only (log scale)")
plain(ax.xaxis)
ax.set(title=f"Time to accuracy; divide by 10 for {10 * rate} Mbit/s, by 100 for {100 * rate}")
ax.grid(alpha=0.25)
fig.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# You should see marks of one scheme close together where there is a dense warm-up: it takes most of
# the time to any target. A scheme whose last marks are missing did not get there in this training,
# however cheap it is. The next table weighs that.
#
# ## What the shorter schemes cost in accuracy
#
# Runs with the same seed share their start, partition and order of samples, so differences are
# taken seed by seed. The interval is Student's at 95 % for the *mean* difference; with few seeds it
# is wide.


# %%
def paired(name: str) -> pd.Series:
    """Final accuracy minus the baseline scheme's, in points, by seed."""
    ours, theirs = federated.get(name, {}), federated.get(baseline_scheme, {})
    final = {seed: (ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}
    last = [[100 * r["rows"][-1]["accuracy"] for r in pair] for pair in final.values()]
    return pd.Series([a - b for a, b in last], list(final), dtype=float)


def verdict(gap: pd.Series) -> tuple[str, str]:
    """Half the interval's width, and what it says."""
    if len(gap) < 2:
        return "–", "one seed, no interval" if len(gap) else "no common seed"
    half = lab.student_quantile(0.95, len(gap) - 1) * gap.sem()
    low, high = gap.mean() - half, gap.mean() + half
    if not low <= 0 <= high:
        return f"± {half:.2f}", "lower" if high < 0 else "higher"
    return f"± {half:.2f}", "no loss" if low >= -no_loss else "undecided"


# %%
rows, gaps = [], {}
beyond = [baseline_scheme + end for end in ("+", "-NW+", "-D2+", "++")]
beyond += [f"TCS-L4-M2-E3{end}" for end in ("-D2+", "++", "-W3++", "-W10++")]
beyond += [*smaller_masks, "TCS-M2-E3-K4-D2+", "TCS-M2-E3-K8++"]
for name in [one for one in ("FedAvg-L4", *beyond) if one in federated]:
    gap = gaps[name] = paired(name)
    half, says = verdict(gap)
    mean = f"{gap.mean():+.2f}" if len(gap) else "–"
    error = f"{gap.sem():.2f}" if len(gap) > 1 else "–"
    row = {"scheme": name, "n": str(len(gap)), "difference, points": mean, "standard error": error}
    row |= {"95 % interval": half, "verdict": says}
    total = curves[name]["bytes"].iloc[-1] if name in curves else math.nan
    against = {baseline_scheme: curves[baseline_scheme]["bytes"].iloc[-1]} if len(gap) else {}
    against["FedAvg-L4"] = dense_bytes["FedAvg-L4"]
    row["MB both ways"] = "–" if math.isnan(total) else f"{total / 1e6:,.4g}"
    ratios = {f"less than {k}": v / total for k, v in against.items()}
    rows.append(row | {k: "–" if math.isnan(v) else f"×{v:,.4g}" for k, v in ratios.items()})
table = pd.DataFrame(rows).fillna("–")
display(Markdown(f"**Against {baseline_scheme}; {label}**\n\n{lab.markdown(table)}"))

# %% [markdown]
# `+` alone is lossless, so it cannot change accuracy. `++` is that with `-NW` (no dense warm-up) and `-D2`
# (the way down in two bits): both change the training itself, and a short training has few rounds to make
# up for it. `-W3` and `-W10` have a warm-up again, in masks three and ten times as large instead of dense. *No loss*: the
# whole interval is above −0.5 points. *Undecided* means that the seeds at hand cannot tell the
# difference from none, not that there is none.
#
# ## Nearly the same bits in more rounds
#
# Local steps and small masks are two ways to send less. H = 4 sends a hundredth of the entries every
# fourth step; a four-hundredth of them at every step (`-K4`) takes about as many bits of values and positions, and all clients
# agree on the model four times as often. Both without any warm-up, both with everything else alike:

# %%
same_bits = [name for name in ("TCS-L4-M2-E3++", *smaller_masks) if name in federated]
fig, axes = plt.subplots(1, 2, figsize=(8.8, 3.6), layout="constrained")
for i, name in enumerate(same_bits):
    finals = [100 * one["rows"][-1]["accuracy"] for one in federated[name].values()]
    sent = [lab.traffic(one) for one in federated[name].values()]
    look = {"color": lab.COLOURS[i], "marker": lab.figures.MARKERS[i], "ls": "", "ms": 8}
    _ = axes[0].plot([i] * len(finals), finals, **look, label=f"{name} (n = {len(finals)})")
    _ = axes[1].bar([i], [(sent[0]["up"] + sent[0]["down"]) / 1e6], color=lab.COLOURS[i])
for at, title in zip(axes, ("test accuracy (%)", "MB both ways, whole run"), strict=True):
    steps_of = [tcs.Scheme.named(name).local_steps for name in same_bits]
    at.set(xticks=range(len(steps_of)), xticklabels=[f"H = {h}" for h in steps_of], title=title)
    at.grid(alpha=0.25, axis="y")
    at.set_axisbelow(True)
if reference := federated.get(baseline_scheme):
    mean = pd.Series([100 * one["rows"][-1]["accuracy"] for one in reference.values()]).mean()
    _ = axes[0].axhline(mean, color=lab.COLOURS[7], ls="--", label=f"{baseline_scheme}, mean")
if same_bits:
    fig.legend(loc="outside lower center", ncols=2, frameon=False)
    plt.show()
else:
    plt.close(fig)
    print(f"no record of {', '.join(smaller_masks)} in results/{evidence} yet")

# %% [markdown]
# Each mark is one trial. You should see what local steps cost in a training as short as this one. Bytes
# are a third more, in four times as many messages: a message's header, means and checksum have the same size however small its masks are,
# and H = 1 sends four times as many; and positions among fewer cost a little more each. At the paper's
# size frames weigh nothing, and an eighth more is left (the table of whole runs above). What more rounds
# also cost is latency, which is not counted here.
#
# The table before has two relatives more. `TCS-M2-E3-K4-D2+` is the same scheme *with* the dense warm-up:
# the difference between the two, seed by seed, is what the warm-up itself brings where it is a fifteenth of
# all epochs (the paper's is a sixtieth; with one trial it is not decided). `-K8` halves the masks again.
#
# ## Claim
#
# 1. A message decodes to what was encoded; every flip, cut and stranger is refused.
# 2. Sizes are the counted ones, ⌈bits / 8⌉ and the frame, for every message looked at, and in every
#    row of every run, since rows on real messages equal rows on counts. No tolerance.
# 3. At the paper's size TCS, TCS-L4-Q5 and top-K are within 0.5 % of the formula, the tolerance that
#    means, frame and whole blocks may take.
# 4. The `+` code's positions are within 2 % of the entropy bound (tolerance: a Golomb–Rice code only
#    comes near a gap's distribution).
# 5. The paper's warm-up leaves between ×213 and ×214 of TCS-L4-Q5's ×1911; `++`, with or without a
#    sparse warm-up or with smaller masks in more rounds, is above ×1911 over the whole training, both
#    ways, all overhead in.

# %%
assert all(all(results) for name, results in damage.items() if "right again" not in name)
for record in wired:
    setup = record["config"]
    entropy_coded, each = setup["scheme"]["code"] == "entropy", setup["participation"] * clients
    for row in record["rows"]:
        padding = row["bytes_up"] / each - row["bits_up"] / 8 - tcs.OVERHEAD_BYTES * row["rounds"]
        low, high = (-row["rounds"] / 8, 0) if entropy_coded else (0, row["rounds"])
        assert low <= padding <= high, (setup["scheme"]["name"], row["epoch"], padding)
assert all(abs(off[name]) < 0.005 for name in ("TCS", "TCS-L4-Q5", "top-K"))
assert above <= 1.02
assert round(claimed) == 1911 and 213 <= with_warmup < 214
for name in ("TCS-L4-Q5++", "TCS-L4-M2-E3-W10++", "TCS-M2-E3-K4++"):
    factor = 64 / sum(whole[name].values())
    assert factor > claimed
    print(f"{name} over the paper's whole schedule, both ways: ×{factor:,.0f}")
print("all hold")

# %% [markdown]
# ## What we saw

# %%
counted_share = tcs.bit_budget("TCS-L4-Q5") / sum(whole["TCS-L4-Q5"].values())
assert counted_share < 0.5
print("holds: the paper's budget is what its messages need, at the paper's size within "
      f"{max(map(abs, off.values())):.2%}")  # fmt: skip
print(f"what it counts is {counted_share:.0%} of TCS-L4-Q5's whole traffic at the paper's size")
print(f"left out by it: the warm-up (×{claimed:,.0f} becomes ×{with_warmup:,.0f}) and the way down "
      f"(both together ×{64 / sum(whole['TCS-L4-Q5'].values()):,.0f})")  # fmt: skip
print(f"lossless: + takes {shorter.mean():.0%} off a TCS-Q5 message of this small training")
for name, gap in gaps.items():
    if len(gap):
        half, says = verdict(gap)
        ratio = dense_bytes["FedAvg-L4"] / curves[name]["bytes"].iloc[-1]
        print(f"{name}: {gap.mean():+.2f} points of accuracy, 95 % interval {half} "
              f"(n = {len(gap)}: {says}), 1/{ratio:,.0f} of dense FedAvg-L4's bytes")  # fmt: skip
if not any(map(len, gaps.values())):
    print(f"open: what ++ costs in accuracy; no record of it in results/{evidence} yet")

# %% [markdown]
# A count is worth what it leaves in. The formula is right, and it describes the smaller part of what a
# run sends: most of the traffic of the paper's shortest scheme is its warm-up and the way back. In `++` the
# warm-up is gone, and the way back is about as short as the way up. What that costs in accuracy is printed above, for trainings as long as those
# on record; in longer ones it may be more or less.
#
# Next: `11_performance`, how fast all of this is.

# %%
print(
    f"core {lab.core_sha256()[:12]} · torch {torch.__version__} · {label} · "
    f"n = {len(records)} records, {len(wired)} runs"
)
