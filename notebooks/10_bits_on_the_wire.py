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
# **In short.** The paper's formula gives the number of bits of a client's message correctly, within 0.20 % at the paper's size. But the
# formula covers only what clients send to the server (the uplink), and only after the *dense warm-up*, the first epochs, in which all
# entries are sent. Take TCS-L4-Q5, which is TCS with four local steps per round and five bits per value: what the formula covers is 4 % of
# its whole traffic. By the formula, this scheme sends 1,910 times fewer bits than dense training. If we include the dense warm-up, the
# factor for the uplink is 214. If we also include what the server sends to the clients (the downlink), it is 139. (This is for the paper's
# network and its 300 epochs, of which 5 are dense.)
#
# **Claim (last column of Tables 1 and 2, Sec. II-E).** TCS-L4-Q5 sends 0.01675 bits per parameter and local iteration, which is 1/1,910 of
# dense training. We encode and decode real messages and measure their size. For **one client's uplink after the warm-up**, it agrees with
# this number within 0.5 %. The whole training, in both directions, needs more.
#
# A count of bits depends on what it includes: positions, headers, the dense warm-up, the downlink. We count all of them, in four steps:
#
# 1. We take one message apart, byte by byte.
# 2. We train all schemes of the paper on messages that are encoded, sent and decoded.
# 3. We measure messages of six schemes at the paper's size, with random values.
# 4. We add up the traffic of a whole run.
#
# *Run time*: about 25 s on two cores of a Xeon. *Read before*: [03_tcs](03_tcs.ipynb), [06_sparse_encoding](06_sparse_encoding.ipynb),
# [07_fractional_quantization](07_fractional_quantization.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
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
# You can change any of these values and run all cells again. The sections *Claim* and *What we saw* are computed anew in every run. The
# text between the cells describes the results of the original values, so it may no longer fit. Three changes to try:
#
# - `message_width = 4` makes the network smaller. The message becomes shorter, and its header and means, whose sizes stay the same,
#   become a larger part of it.
# - `warmup_epochs = 2` makes half of the short training dense. The bits with the warm-up grow, and those of the uplink
#   without it stay the same.
# - `paper_warmup = 1` shortens the warm-up of the paper's schedule. The factors of the whole training grow, most of all that
#   of TCS-L4-Q5.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
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

# %% jupyter={"source_hidden": true} tags=["remove-input"]
params = lab.notebook_params(globals())
claim = lab.Statements(globals(), "10_bits_on_the_wire")
own = ("message_width", "message_samples", "paper_epochs", "paper_clients", "paper_warmup",
       "paper_steps")  # fmt: skip
lab.check_values(globals(), **dict.fromkeys(own, lab.WholeNumber))
configs = [c for c in lab.plan(params) if not c.scheme.centralized]
configs = [dataclasses.replace(c, wire=True) for c in configs]
data = lab.load_dataset(dataset, params.get("data_root"), params.get("data_label"))
data = data.first(message_samples, test_samples)
print(
    f"{len(configs)} trainings are run twice: once with messages of real bytes, and once with counted bits"
)
print(lab.forecast_trainings(2 * configs))

# %% [markdown]
# ## One message, taken apart
#
# We run a small TCS-Q5 training up to its last round. The compressor is given a *link*, an object that decides how messages are
# transported. Ours also stores the messages of each round.

# %%
scheme = tcs.Scheme.named("TCS-Q5")
config = dataclasses.replace(
    configs[0], scheme=scheme, width=message_width, participation=1.0, wire=False
)
federation = lab.Training(config, data, link=lab.ListeningLink())
compressor = federation.compressor
for epoch in range(config.epochs):
    *_, server_D = federation.rounds(epoch)  # the last round's update
messages, shared_K = compressor.link.messages, compressor.known.shared_K  # of the last round
message = messages[0]  # client 0's
D, shared, own = len(server_D), len(shared_K), len(message.positions)
print(f"A message has {shared} values in the shared mask and {own} in the client's own mask.")
print(
    f"The model has D = {D:,} parameters, so a dense message would have {4 * D:,} bytes of values."
)

# %% [markdown]
# We encode the message as the paper describes it. It contains the mean magnitude of each interval of the quantizer
# ([07](07_fractional_quantization.ipynb)), a code of five bits for each value (its sign and its interval), and the positions by Algorithm
# 4. But a receiver must also learn who sent the message and in which round, and whether it arrived undamaged. The paper does not say how.
# We put a header before the code and a checksum after it:

# %%
lab.show_code(tcs.encode_message)

# %%
wire = compressor.known.wire_up  # how both sides write and read what goes up
block = tcs.encode_message(message, wire)
names = [
    "version",
    "kind (1: dense)",
    "sender",
    "round",
    "tag of the format",
    "own positions",
]
ends = [0, 1, 2, 4, 8, 12, 16]
fields = zip(names, struct.unpack("<BBHIII", block[:16]), ends, ends[1:], strict=False)
parts = [(a, b, name, str(value)) for name, value, a, b in fields]
side = 16 + 4 * scheme.intervals
parts += [(16, side, "means", f"{scheme.intervals} floats"),
          (side, len(block) - 4, "codes, positions", f"{shared + own} codes, {own} positions"),
          (len(block) - 4, len(block), "checksum", "CRC-32 of all bytes before it")]  # fmt: skip
rows = [[f"{a}–{b - 1}", block[a : min(b, a + 4)].hex(" ") + " …" * (b > a + 4), name, value]
        for a, b, name, value in parts]  # fmt: skip
display(Markdown(lab.markdown(pd.DataFrame(rows, columns=["bytes", "hex", "field", "value"]))))

# %% [markdown]
# A message consists of a header of sixteen bytes, the means, one stream of bits, and a checksum. The *tag* in the header is a number that
# both participants compute from the scheme's format and the sizes of the layers. If their tags differ, the message is refused.
#
# The receiver already knows the shared mask, because it has the last update. With the mask it can turn the bytes into the message again. We
# check that this is the message that was sent, and that the average of all decoded messages of the round is the update that the server sent
# out.

# %%
received = tcs.decode_message(block, wire, shared_K, sender=0, round=message.round)
parts = ("values", "positions", "codes", "means")
intact = all(torch.equal(getattr(received, part), getattr(message, part)) for part in parts)
average_D = torch.zeros(D)
for one in messages:
    got = tcs.decode_message(tcs.encode_message(one, wire), wire, shared_K)
    average_D.index_add_(0, torch.cat([shared_K, got.positions]), got.values)
averaged = torch.equal(average_D / clients, server_D)
print(
    f"The message has {len(block)} bytes. All values, positions, codes and means come back bit for bit: {intact}"
)
print(f"The average of the {clients} decoded messages is the update, bit for bit: {averaged}")

# %% [markdown]
# ## Anything else is refused
#
# In [06_sparse_encoding](06_sparse_encoding.ipynb) we saw that a flipped bit can move an entry without being noticed. Now the message has a
# checksum. We damage the message in many ways and give each result to the decoder. The next output shows in how many cases the decoder
# refuses it:


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
    f"one bit flipped, {every}": [refused(flipped(block, bit), wire) for bit in places],
    f"cut off at a byte, {every}": [refused(block[: b // 8], wire) for b in places[::8]],
    "one byte added": [refused(block + bytes([b]), wire) for b in range(256)],
    "from another round": [refused(block, wire, round=message.round + 1)],
    "for another scheme": [refused(block, other)],
}
forged = [refused(resealed(flipped(block, bit)), wire) for bit in signed]
for name, results in (damage | {"one bit flipped, checksum corrected": forged}).items():
    print(f"{name:36s} {sum(results):5d} of {len(results):5d} refused")

# %% [markdown]
# Everything is refused, except in the last line. There, the checksum was corrected after the flip, as an attacker would do. The decoder
# notices this only if the result is not a valid message, for example because positions are out of order or a mean is not a number. If the
# flip is in the code of a value, the result is another valid message. A checksum protects against accidents, not against attackers. In no
# case of this output did the decoder crash: it raised `ValueError` or returned a valid message.
#
# ## All schemes, on real messages
#
# Now we run whole trainings with the setting `wire`. Every message of every client and of the server is turned into bytes and decoded, and
# training goes on with the *decoded* message. The same trainings without `wire` only count the bits of each message, round them up to bytes
# and add the header and checksum. We compare the accuracy, loss and traffic of every epoch, which are kept in the record of a training. If
# both ways always agree, the counted bits are those of real messages.

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
print(f"There were {len(wired)} trainings with {rounds:,} rounds. "
      f"Each round had {clients} uplink messages and one downlink message.")  # fmt: skip
print(
    f"In {sum(alike)} of {len(alike)} trainings, the records with and without wire are identical."
)


# %% [markdown]
# The next table compares these measurements with the paper's formula (the bit budget of [06_sparse_encoding](06_sparse_encoding.ipynb)), in
# bits per parameter and local iteration. The columns *uplink* and *downlink* leave out the dense warm-up, as the formula does; *with
# warm-up* includes it. *Formula with means, K rounded up* also counts the means of the intervals, and rounds the number of sent entries K
# up to a whole number.


# %%
def measured(record: dict) -> dict[str, str]:
    """Return the bits per parameter and local iteration, and the bytes of one client's whole run."""
    scheme, d = tcs.Scheme(**record["config"]["scheme"]), record["dimension"]
    bits, sent = lab.bits_per_parameter(record), lab.traffic(record)
    formulas = [tcs.bit_budget(scheme), tcs.bit_budget(scheme, d)]
    names = ["formula", "formula with means, K rounded up", *bits]
    columns = {k: f"{v:.4g}" for k, v in zip(names, [*formulas, *bits.values()], strict=True)}
    total, warm = sent["up"] + sent["down"], sent["warm-up"]
    columns["MB in both directions (share of the warm-up)"] = (
        f"{total / 1e6:.4f} ({warm / total:.0%})"
    )
    return {"scheme": scheme.name} | columns


# %%
table = pd.DataFrame([measured(record) for record in wired])
small_d = wired[0]["dimension"]
title = f"D = {small_d:,} parameters, {epochs} epochs, {warmup_epochs} of them dense"
display(Markdown(f"**Bits per parameter and local iteration; {title}**\n\n{lab.markdown(table)}"))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(8.8, 4.6), layout="constrained")
kinds = {"formula": ("the paper's formula", 0, 11), "downlink with warm-up": ("downlink, whole run", 3, 9),
         "uplink with warm-up": ("uplink, whole run", 5, 10),
         "uplink": ("uplink, after the warm-up", 1, 6)}  # fmt: skip
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
lab.show_figures()

# %% [markdown]
# The squares lie inside the circles, so the messages have the size that the formula gives. Quantized schemes are an exception. In such a
# small model, the means of the intervals make up most of a `-Q5` message, and the formula leaves them out. The formula that includes them
# agrees with the measurement, as the table shows.
#
# The two measurements *with warm-up*, of the uplink and of the downlink, are far to the right for every sparse scheme. In these short
# trainings, the warm-up weighs much more than in a long one.
#
# If the clients choose entries of their own, the server sends more than a client does, as the table shows. It sends the *union* of all
# entries that the clients chose, and it does not quantize them.
#
# ## At the paper's size
#
# The size of a message depends on how many values it has and on the bits per value, so no training is needed to measure it. Here are
# messages for a ResNet-18 with all its layers. Their values are **random** and do not come from a training. The table shows bits per
# parameter and local iteration.

# %%
large, rows, off = PaperSize(paper_clients), [], {}
for name in ("TCS", "TCS-L4", "TCS-L4-Q5", "TCS-LF-Q5", "top-K", "rand-K"):
    sent, budget = large.bits(name) / tcs.Scheme.named(name).local_steps, tcs.bit_budget(name)
    off[name] = sent / budget - 1
    row = {"scheme": name, "formula": f"{budget:.5f}", "sent": f"{sent:.5f}"}
    rows.append(row | {"difference": f"{off[name]:+.2%}"})
print(f"The model has D = {large.dimension:,} parameters in {len(large.layer_sizes)} layers.")
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# All differences in the last column are below half a percent. Header, means and checksum make messages longer, but at this size they hardly
# matter. The positions can take slightly fewer bits than in the formula, because the block size is the one that gives the shortest code.
#
# ## What the warm-up costs
#
# The paper trains for 300 epochs, of which the first five are dense. Its bit budget counts only the others. Let $w$ of $T$ epochs be dense,
# let the sparse ones take $b$ bits per parameter and local iteration, and let $H$ be the number of local steps per round. Then the average
# over the whole training is
#
# $$\bar b=\frac{1}{T}\left(w\,\frac{32}{H}+(T-w)\,b\right).$$
#
# Dense training with $H=1$ takes 32 bits, so the scheme sends $32/\bar b$ times fewer bits. We call this number its *factor*.


# %%
def average(b: float, steps: int, warmup: float) -> float:
    """Return the average bits per parameter and local iteration over the paper's schedule, uplink only."""
    return (warmup * 32 / steps + (paper_epochs - warmup) * b) / paper_epochs


# %% tags=["nbval-check-output"]
claimed = lab.paper_factor("TCS-L4-Q5")
with_warmup = 32 / average(tcs.bit_budget("TCS-L4-Q5"), 4, paper_warmup)
few = lab.format_times(with_warmup)
print(f"TCS-L4-Q5, uplink: ×{lab.format_times(claimed)} by the formula, ×{few} with the warm-up")

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
dense_epochs = [paper_epochs * w / 3000 for w in range(0, 151)]
for name in ("TCS-L4-Q5", "TCS-L4", "TCS", "top-K"):
    b, steps = tcs.bit_budget(name), tcs.Scheme.named(name).local_steps
    style = lab.curve_style(name) | {"marker": ""}
    factor = [32 / average(b, steps, w) for w in dense_epochs]
    _ = ax.plot(dense_epochs, factor, **style, label=name)
ax.axvline(paper_warmup, color=lab.COLOURS[7], ls=":", label="the paper's warm-up")
ax.set(yscale="log", xlabel=f"dense epochs at the start, of {paper_epochs}")
ax.set(ylabel="times fewer uplink bits (log scale)", yticks=[10, 30, 100, 300, 1000, 2000])
ax.set(yticklabels=["10", "30", "100", "300", "1000", "2000"], xlim=(0, dense_epochs[-1]))
ax.set(title="The longer the dense warm-up, the smaller the factor")
ax.minorticks_off()
ax.grid(alpha=0.25)
fig.legend(loc="outside right upper", frameon=False)
lab.show_figures()

# %% [markdown]
# The warm-up alone takes $32\,w/(H\,T)$ bits on average. So no scheme with $H$ local steps can have a factor above $H\,T/w$, which is 240
# for $H=4$ here. The fewer bits a scheme sends per round after the warm-up, the larger the part of its factor that it loses.
#
# ## The whole run, both ways
#
# Besides the warm-up there is the downlink. The server sends all entries that arrived from any client. We count them as if no two clients
# ever chose the same entry, so the real downlink is at most as large. The table shows how many times fewer bits each scheme sends in the
# paper's schedule than dense training with one local step. Headers are included, except in the column *uplink by the formula*. In the last
# column, dense training has as many local steps as the scheme.

# %%
whole, rows = {}, []
for name in ("top-K", "TCS", "TCS-L4", "TCS-L4-Q5"):
    whole[name] = large.whole_run(name, paper_epochs, paper_warmup, paper_steps)
    both, steps = sum(whole[name].values()), tcs.Scheme.named(name).local_steps
    row = {"scheme": name, "uplink by the formula": f"×{lab.format_times(lab.paper_factor(name))}"}
    row |= {
        f"whole run, {way}link": f"×{lab.format_times(32 / sums)}"
        for way, sums in whole[name].items()
    }
    row["whole run, both directions"] = f"×{lab.format_times(64 / both)}"
    rows.append(
        row
        | {
            "both directions, against dense training with the same H": f"×{lab.format_times(64 / steps / both)}"
        }
    )
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# The last column makes the most modest comparison. Four local steps save a factor of four in dense training, too, so they should not be
# credited to the compression. Quantization shortens only the uplink. Most of the remaining traffic is the downlink and the warm-up, and
# [10b_fewer_bytes](10b_fewer_bytes.ipynb) shows how to shorten both.
#
# ## Claim
#
# The next cells check these statements.
#
# 1. A message decodes to what was encoded. Every damaged message above is refused, unless its checksum was corrected.
# 2. In every epoch of every training, the average uplink message is as long in bytes as its counted bits divided by 8, plus header and checksum, except
#    that it may be up to one byte longer by rounding. Trainings that send real messages give the same records as those that only count bits.
# 3. At the paper's size, TCS, TCS-L4-Q5 and top-K are within 0.5 % of the formula. This tolerance leaves room for means, header
#    and checksum.
# 4. With the paper's warm-up, the factor of TCS-L4-Q5 falls from 1,910 to 214 (more exactly, to a number between 213 and 214).


# %%
def padding(record: dict) -> list[float]:
    """Return for every epoch how many bytes per message are neither counted bits nor header or checksum."""
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
claim("damaged messages are refused", all(refusals), f"{sum(refusals):,} of {len(refusals):,}")
claim(
    "trainings that send real messages give the same rows as those that count bits",
    all(alike),
    f"{sum(alike)} of {len(alike)} runs",
)
least = -1 / 8 if coded else 0  # "+" counts in whole bytes already
claim("a message has its bits, rounded up to bytes, plus the frame", least <= min(padded) <= max(padded) <= 1,
      f"padding {min(padded):.2f} to {max(padded):.2f} bytes a message")  # fmt: skip
claim(
    "at the paper's size, messages have as many bits as the budget says",
    worst < 0.005,
    f"within {worst:.2%}",
)
paper = (paper_epochs, paper_warmup) == (300, 5)
claim("with the warm-up, ×1,910 becomes ×213 to ×214", 213 <= with_warmup < 214 if paper else None)

# %% [markdown]
# ## What we saw

# %%
both = sum(whole["TCS-L4-Q5"].values())
print(claim.summary())
print(f"At the paper's size, the paper's bit budget covers {tcs.bit_budget('TCS-L4-Q5') / both:.0%} of the whole traffic "
      "of TCS-L4-Q5.")  # fmt: skip
print(f"With the warm-up, the factor ×{lab.format_times(claimed)} becomes ×{few}. "
      f"With the downlink as well, it becomes ×{lab.format_times(64 / both)}.")  # fmt: skip
print(
    f"If the checksum is corrected, too, {1 - sum(forged) / len(forged):.0%} of all single flipped bits go unnoticed."
)

# %% [markdown]
# The paper's formula is right, but it describes only a part of what a training sends. In the scheme with the smallest budget, most of the
# traffic is the warm-up and the downlink.
#
# Next, [10b_fewer_bytes](10b_fewer_bytes.ipynb) shows how a training can send fewer bytes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(
    f"Made with {lab.describe_core()} and torch {torch.__version__}, on images ({data.label}), in {len(wired)} trainings."
)
