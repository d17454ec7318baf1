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
# **In short.** The paper's formula gives the size of a client's message correctly: at the paper's size, real messages differ from it by at
# most 0.20 %. But the formula covers only a part of what a training sends. It leaves out the *dense warm-up*, the first epochs, in which
# all entries are sent, and everything that the server sends to the clients (the *downlink*).
#
# Take TCS-L4-Q5, which is TCS with four local steps per round and five bits per value. By the formula, a client sends 1,910 times fewer
# bits to the server (on the *uplink*) than in dense training. If we include the warm-up, it sends 214 times fewer. If we also include the
# downlink, the factor is 139. What the formula covers is 4 % of the traffic of this scheme. (All of this is for the paper's network and its
# 300 epochs, of which 5 are dense.) The first table below has these factors for the other schemes, too.
#
# **Claim (last column of Tables 1 and 2, Sec. II-E).** TCS-L4-Q5 sends 0.01675 bits per parameter and local iteration, which is 1/1,910 of
# dense training. We encode and decode real messages and measure their size. For **one client's uplink after the warm-up**, it agrees with
# this number within 0.5 %. The whole training, in both directions, needs more.
#
# The notebook has four steps:
#
# 1. We add up the traffic of a whole training, for each scheme.
# 2. We compare the size of real messages with the formula.
# 3. We take one message apart, byte by byte.
# 4. We train all schemes of the paper on messages that are encoded, sent and decoded, and check that we count bits correctly.
#
# *Run time*: about 30 s on two cores of an AMD EPYC. *Read before*: [03_tcs](03_tcs.ipynb), [06_sparse_encoding](06_sparse_encoding.ipynb),
# [07_fractional_quantization](07_fractional_quantization.ipynb).
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import dataclasses
import struct
import tempfile

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display
from tcs_lab.studies.paper_size import PAPER_EPOCHS, PaperSize

import tcs_core as tcs

torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## Parameters
#
# You can change any of these values and run all cells again. The sections *Claim* and *What we saw* are computed anew in every run. The
# text between the cells describes the results of the original values, so it may no longer fit. Three changes to try:
#
# - `paper_warmup = 1` shortens the warm-up of the paper's schedule. The factors of the whole training grow, most of all that
#   of TCS-L4-Q5.
# - `message_width = 4` makes the network smaller. The message becomes shorter, and its header and means, whose sizes stay the same,
#   become a larger part of it.
# - `schemes = ["TCS-L4-Q5++"]` trains a scheme of [10b_fewer_bytes](10b_fewer_bytes.ipynb), whose messages are written in another code.
#   The training on real messages should still give the same record as the one that counts bits.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
paper_warmup = 5  # dense epochs at the start of the paper's schedule, Sec. III-B
message_width = 16  # first stage of the model whose message is taken apart
message_samples = 100  # training images for it
schemes = ["FedAvg", "FedAvg-L4", "rand-K", "top-K", "TCS", "TCS-L2", "TCS-L4", "TCS-L4-Q5",
           "TCS-PLF", "TCS-LF", "TCS-LF-Q5", "TCS-Global Momentum"]  # fmt: skip
train_samples = 24  # the first so many training images
test_samples = 100  # the first so many test images
model = "resnet8"  # resnet8 or resnet18
width = 4  # channels of its first stage
clients = 3  # N
batch_size = 2  # B, samples of one local step
epochs = 4  # passes over the data
warmup_epochs = 1  # dense epochs at the start
learning_rate = 0.5  # eta
seeds = 1  # how many trials, or a list of seeds

# %% jupyter={"source_hidden": true} tags=["remove-input"]
# The learning rate is not scaled with the batch, unless the reader gives a reference_batch.
params = {"reference_batch": None} | lab.notebook_params(globals(), lab.PARAMETERS - {"jobs"})
claim = lab.Statements(globals(), "10_bits_on_the_wire")
own = ("message_width", "message_samples", "paper_warmup")
lab.check_values(globals(), **dict.fromkeys(own, lab.WholeNumber))
configs = [c for c in lab.plan(params) if not c.scheme.centralized]
configs = [dataclasses.replace(c, wire=True) for c in configs]
print(
    f"{len(configs)} trainings are run twice: once with messages of real bytes, and once with counted bits"
)
print(lab.forecast_trainings(2 * configs))

# %% [markdown]
# ## The whole run, in both directions
#
# How many times fewer bits does each scheme send than dense training with one local step? We call this number its *factor*. The paper's
# formula (its *bit budget*, see [06_sparse_encoding](06_sparse_encoding.ipynb)) counts the uplink after the warm-up. The other columns
# count the whole training in the paper's schedule, warm-up and headers included. In the last column, dense training has as many local steps
# as the scheme.
#
# If the clients choose entries of their own, the server sends more than a client does. It sends the *union* of all entries that the clients
# chose, and it does not quantize them. We count as if no two clients ever chose the same entry, so the real downlink is at most as large.

# %%
large, whole, rows = PaperSize(), {}, []
for name in ("FedAvg-L4", "rand-K", "top-K", "TCS", "TCS-L2", "TCS-L4", "TCS-L4-Q5", "TCS-LF-Q5"):
    whole[name] = large.whole_run(name, paper_warmup)
    both, steps = sum(whole[name].values()), tcs.Scheme.named(name).local_steps
    factors = {"uplink by the formula": lab.paper_factor(name)}
    factors |= {f"whole run, {way}link": 32 / bits for way, bits in whole[name].items()}
    factors["whole run, both directions"] = 64 / both
    factors["both directions, against dense training with the same H"] = 64 / steps / both
    times = {column: f"×{lab.format_times(factor)}" for column, factor in factors.items()}
    rows.append({"scheme": name} | times)
print(f"The network has D = {large.dimension:,} parameters, and the training {PAPER_EPOCHS} epochs, "
      f"of which {paper_warmup} are dense.")  # fmt: skip
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# TCS-LF, TCS-PLF and TCS-Global Momentum choose as many entries as TCS, so they would have the same row.
#
# The last column makes the most modest comparison. Four local steps save a factor of four in dense training, too, so they should not be
# credited to the compression. Quantization shortens only the uplink. Most of the remaining traffic is the downlink and the warm-up, and
# [10b_fewer_bytes](10b_fewer_bytes.ipynb) shows how to shorten both.
#
# ## What the warm-up costs
#
# The warm-up takes only the first five of 300 epochs. Why does it cost so much? Let $w$ of $T$ epochs be dense, let the sparse ones take
# $b$ bits per parameter and local iteration, and let $H$ be the number of local steps per round. Then the average over the whole training
# is
#
# $$\bar b=\frac{1}{T}\left(w\,\frac{32}{H}+(T-w)\,b\right).$$
#
# Dense training with $H=1$ takes 32 bits, so the factor of the uplink is $32/\bar b$.


# %%
def average(b: float, steps: int, warmup: float) -> float:
    """Return the average bits per parameter and local iteration over the paper's schedule, uplink only."""
    return (warmup * 32 / steps + (PAPER_EPOCHS - warmup) * b) / PAPER_EPOCHS


# %% tags=["nbval-check-output"]
claimed = lab.paper_factor("TCS-L4-Q5")
with_warmup = 32 / average(tcs.bit_budget("TCS-L4-Q5"), 4, paper_warmup)
few = lab.format_times(with_warmup)
print(f"TCS-L4-Q5, uplink: ×{lab.format_times(claimed)} by the formula, ×{few} with the warm-up")

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
dense_epochs = [PAPER_EPOCHS * w / 3000 for w in range(0, 151)]
for name in ("TCS-L4-Q5", "TCS-L4", "TCS", "top-K"):
    b, steps = tcs.bit_budget(name), tcs.Scheme.named(name).local_steps
    style = lab.curve_style(name) | {"marker": ""}
    factor = [32 / average(b, steps, w) for w in dense_epochs]
    _ = ax.plot(dense_epochs, factor, **style, label=name)
ax.axvline(paper_warmup, color=lab.COLOURS[7], ls=":", label="the paper's warm-up")
ax.set(yscale="log", xlabel=f"dense epochs at the start, of {PAPER_EPOCHS}")
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
# ## At the paper's size
#
# Is the formula right about the messages that it covers? The size of a message depends on how many values it has and on the bits per value,
# so no training is needed to measure it. Here are messages for a ResNet-18 with all its layers. Their values are **random** and do not come
# from a training. The table shows bits per parameter and local iteration.

# %%
rows, off = [], {}
for name in ("TCS", "TCS-L4", "TCS-L4-Q5", "TCS-LF-Q5", "top-K", "rand-K"):
    sent, budget = large.bits(name) / tcs.Scheme.named(name).local_steps, tcs.bit_budget(name)
    off[name] = sent / budget - 1
    row = {"scheme": name, "formula": f"{budget:.5f}", "sent": f"{sent:.5f}"}
    rows.append(row | {"difference": f"{off[name]:+.2%}"})
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# All differences in the last column are below half a percent. Header, means and checksum, which the next section explains, make messages
# longer, but at this size they hardly matter. The positions can take slightly fewer bits than in the formula, because the block size is the
# one that gives the shortest code.
#
# ## One message, taken apart
#
# We run a small TCS-Q5 training up to its last round. The compressor is given a *link*, an object that decides how messages are
# transported. Ours also stores the messages of each round.

# %%
scheme = tcs.Scheme.named("TCS-Q5")
sizes = {"width": message_width, "train_samples": message_samples}
config = dataclasses.replace(configs[0], scheme=scheme, participation=1.0, wire=False, **sizes)
data = lab.load_data(config)
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
# both participants compute from the scheme's format and the sizes of the layers. If their tags differ, the message is refused. The
# checksum protects against accidents, not against attackers.
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
# ## All schemes, on real messages
#
# Now we run whole trainings with the setting `wire`. Every message of every client and of the server is turned into bytes and decoded, and
# training goes on with the *decoded* message. The same trainings without `wire` only count the bits of each message, round them up to bytes
# and add the header and checksum. We compare the accuracy, loss and traffic of every epoch, which are kept in the record of a training. If
# both ways always agree, the counted bits are those of real messages.

# %%
with tempfile.TemporaryDirectory() as fresh:  # no record is reused: it is this code that is checked
    wired = lab.run_all(configs, fresh, progress=False)
    counted = [dataclasses.replace(config, wire=False) for config in configs]
    counted = lab.run_all(counted, fresh, progress=False)


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
# ## Claim
#
# The next cells check these statements.
#
# 1. A message decodes to what was encoded.
# 2. Trainings that send real messages give the same records as those that only count bits.
# 3. At the paper's size, TCS, TCS-L4-Q5 and top-K are within 0.5 % of the formula. This tolerance leaves room for means, header
#    and checksum.
# 4. With the paper's warm-up, the factor of TCS-L4-Q5 falls from 1,910 to 214 (more exactly, to a number between 213 and 214).

# %%
worst = max(abs(off[name]) for name in ("TCS", "TCS-L4-Q5", "top-K"))
claim("a message comes back as it was sent", intact and averaged)
claim(
    "trainings that send real messages give the same rows as those that count bits",
    all(alike),
    f"{sum(alike)} of {len(alike)} runs",
)
claim(
    "at the paper's size, messages have as many bits as the budget says",
    worst < 0.005,
    f"within {worst:.2%}",
)
measured = 213 <= with_warmup < 214 if paper_warmup == 5 else None
claim("with the warm-up, ×1,910 becomes ×213 to ×214", measured)

# %% [markdown]
# ## What we saw

# %%
both = sum(whole["TCS-L4-Q5"].values())
print(claim.summary())
print(f"At the paper's size, the paper's bit budget covers {tcs.bit_budget('TCS-L4-Q5') / both:.0%} of the whole traffic "
      "of TCS-L4-Q5.")  # fmt: skip
print(f"With the warm-up, the factor ×{lab.format_times(claimed)} becomes ×{few}. "
      f"With the downlink as well, it becomes ×{lab.format_times(64 / both)}.")  # fmt: skip

# %% [markdown]
# The paper's formula is right, but it describes only a part of what a training sends. In the scheme with the smallest budget, most of the
# traffic is the warm-up and the downlink.
#
# Next, [10b_fewer_bytes](10b_fewer_bytes.ipynb) shows how a training can send fewer bytes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(
    f"Made with {lab.describe_core()} and torch {torch.__version__}, on images ({data.label}), in {len(wired)} trainings."
)
