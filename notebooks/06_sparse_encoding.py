# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Write positions in a few bits
#
# After this notebook you will be able to
#
# - decode positions by hand (Algorithm 4),
# - work out how long a code is, and say when a bitmap is shorter.
#
# **Claim (Sec. II-E, Algorithm 4).** With a share φ of the entries kept, a position costs
# $\log_2(1/\phi)+2$ bits instead of $\log_2 d$: about half at the paper's size, and the same whatever
# the positions are.
#
# *Run time*: about 10 s on two cores of a Xeon. *Read before*: [02_sparsification](02_sparsification.ipynb)
# and [03_tcs](03_tcs.ipynb), for what the masks are.

# %% jupyter={"source_hidden": true}
import math
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Ge, Le, Len, Lt
from IPython.display import Markdown, display

import tcs_core as tcs

torch.set_num_threads(1)

# %% jupyter={"source_hidden": true} tags=["parameters"]
profile = "ci"  # the profile whose model is set beside the paper's ResNet-18
dimension = 12  # d, entries of the example's vector
phi = 0.25  # share of them that the code is made for
positions = [1, 3, 10]  # the kept entries, counted from one, as in the paper
measured_dimension = 262_144  # d of the random masks whose codes are counted, 2^18
phi_smallest = 1e-4  # counted from this share ...
phi_largest = 0.3  # ... to this one
phi_steps = 81  # how many shares in between
seed = 0  # of the random positions

# %% jupyter={"source_hidden": true}
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "06_sparse_encoding")
counted = dict.fromkeys(("phi_smallest", "phi_largest"), Annotated[lab.Share, Lt(1)])
kinds = {"phi": lab.Share, "dimension": lab.Count} | counted
kinds |= {"measured_dimension": Annotated[int, Ge(1000)], "phi_steps": Annotated[int, Ge(2)]}
lab.check_values(globals(), **kinds, seed=lab.Seed)
inside = Annotated[list[Annotated[int, Ge(1), Le(dimension)]], Len(1)]  # counted from one
lab.check_values(globals(), positions=inside)
positions = sorted(set(positions))
block = round(1 / phi)  # entries in a block
width = tcs.intra_block_bits(block)  # bits of a place inside a block
positions_K = torch.tensor(positions) - 1  # the core counts from zero
blocks = math.ceil(dimension / block)
print(f"{blocks} blocks of {block} entries; a place inside a block takes {width} bits")

# %% jupyter={"source_hidden": true}
paper_d = sum(p.numel() for p in tcs.resnet18().parameters())


def in_positions(name: str) -> float:
    """The part of a scheme's budget that positions are."""
    scheme = tcs.Scheme.named(name)
    values = scheme.value_bits * ((scheme.phi_global or 0.0) + scheme.phi_local)
    return 1 - values / tcs.bit_budget(name)


def budget_of(name: str) -> dict[str, str]:
    """A scheme's budget (bits per parameter), the positions' part, and with plain indices."""
    budget, own = tcs.bit_budget(name), tcs.Scheme.named(name).phi_local
    plain = (1 - in_positions(name)) * budget + own * math.log2(paper_d)
    return {"scheme": name, "budget": f"{budget:.4f}", "positions": f"{share[name]:.0%}",
            "with log2 d each": f"{plain:.4f}"}  # fmt: skip


share = {name: in_positions(name) for name in ("TCS", "top-K", "TCS-Q5", "top-K-Q5")}
at_once = {name: f"{100 * part:.0f}\u00a0%" for name, part in share.items()}
display(
    Markdown(f"""**Positions are {at_once["TCS"]} of what TCS sends**, by the paper's budget with its 32-bit values, and
{at_once["top-K"]} of what top-K sends. With 5-bit values they are {at_once["TCS-Q5"]} and {at_once["top-K-Q5"]}: then
it matters how they are written.""")
)

# %% [markdown]
# ## The code
#
# A client sends the values under its own mask together with *where* they belong. `dimension`, `phi` and `positions`
# are the paper's example. Change any parameter and run all again: the picture, the walk and the exercise follow, *Claim* and
# *What we saw* are worked out anew.
#
# Cut the vector into blocks of $1/\phi$ entries, so that a block holds one kept entry on average. Go
# through the blocks in order. For a kept entry write a flag `1` and its place inside the block; at the
# end of a block, empty or not, write `0`. No block number is ever written: the reader counts the zeros.
#
# $$\underbrace{1}_{\text{flag}}\;+\;\underbrace{\lceil\log_2(1/\phi)\rceil}_{\text{place in the block}}
# \;\text{ bits an entry}\qquad+\qquad\underbrace{1}_{\text{end}}\;\text{ bit a block}$$
#
# There are as many blocks as kept entries, so that makes $\log_2(1/\phi)+2$ bits an entry.

# %% tags=["nbval-check-output"]
bits = tcs.encode_positions(positions_K, dimension, block)
code = "".join(map(str, bits.tolist()))
print(f"positions {positions} of {dimension} -> {code}, {len(code)} bits")

# %% [markdown]
# The paper's string, without its colours: three entries of three bits, and three block ends.
#
# ## The code in colour
#
# First, each bit gets its kind. This little reader is Algorithm 4 as one would do it by hand: it yields
# one step at a time, with where it stands, what it reads, the block it is in and the position found.


# %%
def walk(code: str, block: int):
    """Alg. 4, step by step: (pointer, bits read, block index, position from zero or None)."""
    pointer, block_index, width = 0, 0, tcs.intra_block_bits(block)
    while pointer < len(code):
        if code[pointer] == "0":
            yield pointer, "0", block_index, None
            pointer, block_index = pointer + 1, block_index + 1
        else:
            read = code[pointer : pointer + 1 + width]
            yield pointer, read, block_index, block * block_index + int("0" + read[1:], 2)
            pointer += 1 + width


# %% [markdown]
# Three kinds of bits, with the paper's colours in a palette that colour-blind readers can tell apart,
# and a hatch for paper. `kinds` has one letter a bit: **f**lag, **p**lace in the block, block **e**nd.

# %%
KINDS = {
    "f": ("flag: an entry follows", lab.COLOURS[3], ""),
    "p": ("place inside the block", lab.COLOURS[5], "////"),
    "e": ("end of a block", lab.COLOURS[6], "...."),
}
steps = list(walk(code, block))
kinds = "".join("e" if step[3] is None else "f" + "p" * width for step in steps)
swatches = [{"label": n, "fc": c, "hatch": h, "ec": "white"} for n, c, h in KINDS.values()]
handles = [plt.Rectangle((0, 0), 1, 1, **swatch) for swatch in swatches]
print(code, kinds, sep="\n")


# %% jupyter={"source_hidden": true}
def boxes(ax, y: float, texts, colours, hatches) -> None:
    """A row of labelled boxes, one unit wide, centred at 0."""
    for i, (text, colour, hatch) in enumerate(zip(texts, colours, hatches, strict=True)):
        x = i - len(texts) / 2
        style = {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}
        ax.add_patch(plt.Rectangle((x, y), 1, 1, **style))
        ax.add_patch(plt.Rectangle((x, y), 1, 1, fill=False, edgecolor="black"))
        plate = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        fit = {"ha": "center", "va": "center", "fontsize": min(11, 260 / len(texts))}
        ax.text(x + 0.5, y + 0.5, text, **fit, bbox=plate)


def links(ax, steps, dimension: int, length: int) -> None:
    """A line from every kept entry of the vector to its bits in the code."""
    for pointer, read, _, found in steps:
        if found is not None:
            left, right = pointer - length / 2 + 0.08, pointer + len(read) - length / 2 - 0.08
            middle, above = (left + right) / 2, found - dimension / 2 + 0.5
            ax.plot([left, right], [1.42, 1.42], color="black", linewidth=2)
            ax.plot([above, middle], [2.56, 1.42], color="black", linewidth=1.2)


fig, ax = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
grounds = ["#FFFFFF" if i // block % 2 else "#D0D0D0" for i in range(dimension)]
grounds = ["#333333" if i + 1 in positions else ground for i, ground in enumerate(grounds)]
boxes(ax, 2.6, range(1, dimension + 1), grounds, [""] * dimension)
boxes(ax, 0.3, code, [KINDS[k][1] for k in kinds], [KINDS[k][2] for k in kinds])
links(ax, steps, dimension, len(code))
fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
half = max(dimension, len(code)) / 2 + 0.2
ax.set(title=f"{len(positions)} of {dimension} entries (dark, above) and their code (below)")
ax.set(xlim=(-half, half), ylim=(0.1, 3.8), xticks=[], yticks=[], frame_on=False)
plt.show()

# %% [markdown]
# The vector above is numbered from one, its blocks alternately grey and white, kept entries
# dark; below, the stream, with a line from each kept entry to its flag and its place.
#
# ## Read it by hand
#
# Take a pencil, start with block 0 and repeat until the bits are used up:
#
# 1. Read one bit. If it is `0`, the block ends: add one to the block index.
# 2. If it is `1`, read the next $\lceil\log_2(1/\phi)\rceil$ bits as a binary number: the place in the block.
# 3. The entry stands at block index × block size + place, counted from zero; add one to count from one.
# 4. At the end you must have read one `0` for every block, no more and no fewer: otherwise it is no code.
#
# The steps of the example:

# %% tags=["nbval-check-output"]
rows = [
    {"pointer": at, "reads": read, "block": index, "finds": "end of block"}
    | ({} if found is None else {"finds": f"{block} × {index} + {found % block} + 1 = {found + 1}"})
    for at, read, index, found in steps
]
print(pd.DataFrame(rows).to_string(index=False))

# %% [markdown]
# One row a step, and the positions we started from. Now one for you: the same size of
# vector and of block. Decode it on paper before you look at the next cell.

# %%
draw = torch.randperm(dimension, generator=torch.Generator().manual_seed(seed))
hidden = draw[: len(positions)].sort().values
exercise = "".join(map(str, tcs.encode_positions(hidden, dimension, block).tolist()))
print(f"{exercise}   ({dimension} entries in blocks of {block})")

# %%
read_back = [found + 1 for *_, found in walk(exercise, block) if found is not None]
print(f"counted from one: {read_back}; right: {read_back == (hidden + 1).tolist()}")

# %% [markdown]
# ## The same without a loop
#
# A walk takes one Python step an entry, too slow for thousands of entries a message. The encoder needs
# no walk: entry $i$ (from zero), in block $b$, comes after $i$ entries and $b$ block ends, so its flag
# stands at bit
#
# $$i\,(1+\lceil\log_2(1/\phi)\rceil)+b .$$

# %%
lab.show_code(tcs.encode_positions)

# %% [markdown]
# The decoder has to find the flags: not every `1` is one. What comes `1 + width` bits after a flag, up
# to the next `1`, are block ends. So it hops from flag to flag, over all block ends between two at once,
# and then reads all the places inside blocks side by side.

# %%
lab.show_code(tcs.decode_positions, tcs._flag_starts)

# %% [markdown]
# The paper's pseudo-code leaves two things open: the block index starts at 0, positions count from
# zero. Any block size $b$ will do for the code; a place inside a block then takes $\lceil\log_2 b\rceil$ bits. Walk and
# core must agree on any mask:

# %% tags=["nbval-check-output"]
generator, agreed = torch.Generator().manual_seed(seed), 0
for size in range(1, 201):  # block sizes, powers of two and others
    mask_D = torch.rand(1000, generator=generator) < 1 / size
    where = mask_D.nonzero().squeeze(1)
    stream = tcs.encode_positions(where, 1000, size)
    walked = [step[3] for step in walk("".join(map(str, stream.tolist())), size)]
    decoded = tcs.decode_positions(stream, 1000, size)
    agreed += [p for p in walked if p is not None] == where.tolist() == decoded.tolist()
print(f"{agreed} of 200 random masks: walk, core and mask agree")

# %% [markdown]
# Full agreement, with blocks of 1 to 200 entries.
#
# ## What a position costs
#
# Now count: random masks of exactly $K=\lceil\phi d\rceil$ entries, encoded, and the length of the
# code divided by $K$. Three yardsticks: a plain index, $\log_2 d$; a **bitmap**, one bit for every entry
# of the vector, so $1/\phi$ a position; and the entropy bound, below which no code can go on average for masks that keep
# each entry with probability φ (for exactly $K$ entries it is $\log_2\binom{d}{K}/K$, less by a little where $K$ is large):
#
# $$\frac{H_2(\phi)}{\phi}=\log_2\frac1\phi+\frac{1-\phi}{\phi}\log_2\frac1{1-\phi}
# \;\approx\;\log_2\frac1\phi+1.44\quad\text{for small }\phi .$$
#
# **What do you expect?** Does a bitmap win only where more than half of the entries are kept, or earlier?


# %%
def costs(phi: float) -> dict[str, float]:
    """Bits per position: counted on a random mask, and the yardsticks."""
    k = tcs.kept(phi, measured_dimension)
    order = torch.randperm(measured_dimension, generator=torch.Generator().manual_seed(seed))
    stream = tcs.encode_positions(order[:k].sort().values, measured_dimension, round(1 / phi))
    entropy = -(phi * math.log2(phi) + (1 - phi) * math.log2(1 - phi)) / phi
    counted = {"phi": phi, "counted": len(stream) / k, "formula": math.log2(1 / phi) + 2}
    yardsticks = {"log2_d": math.log2(measured_dimension), "bitmap": 1 / phi, "entropy": entropy}
    return counted | yardsticks


# %%
ratio = phi_largest / phi_smallest
shares = [phi_smallest * ratio ** (i / (phi_steps - 1)) for i in range(phi_steps)]
table = pd.DataFrame([costs(share) for share in shares])
zoom = pd.DataFrame([costs(i / 1000) for i in range(150, 301)])
above = table["counted"] - table["formula"]
print(f"counted minus formula: {above.min():+.2f} to {above.max():+.2f} bits a position")

# %% jupyter={"source_hidden": true}
LINES = {
    "log2_d": ("plain index, log₂ d", lab.COLOURS[7], ":"),
    "bitmap": ("bitmap, 1/φ", lab.COLOURS[1], "--"),
    "formula": ("formula, log₂(1/φ) + 2", lab.COLOURS[0], "-."),
    "entropy": ("entropy bound, H₂(φ)/φ", lab.COLOURS[3], (0, (6, 1, 1, 1, 1, 1))),
}


def curves(ax, table: pd.DataFrame, every: int, title: str) -> None:
    """Counted bits as points on a line, yardsticks as lines, over phi."""
    for column, (label, colour, dash) in LINES.items():
        ax.plot(table["phi"], table[column], color=colour, linestyle=dash, label=label)
    style = {"color": lab.COLOURS[2], "marker": "o", "markersize": 4, "markevery": every}
    ax.plot(table["phi"], table["counted"], **style, linewidth=1, label="counted, Alg. 4")
    ax.set(xlabel="share of kept entries, φ", ylabel="bits per position", title=title)
    ax.grid(alpha=0.25)


# %% jupyter={"source_hidden": true}
fig, axes = plt.subplots(1, 2, figsize=(9.2, 4.2), layout="constrained")
curves(axes[0], table, 4, f"cost of a position, d = {measured_dimension:,}")
axes[0].set(xscale="log", ylim=(0, 23))
curves(axes[1], zoom, 8, "where a bitmap wins (shaded)")
lost = zoom["counted"] > zoom["bitmap"]
axes[1].fill_between(zoom["phi"], 0, 1, where=lost, transform=axes[1].get_xaxis_transform(),
                     color="#BBBBBB", alpha=0.5, lw=0)  # fmt: skip
axes[1].set(xlim=(0.15, 0.3), ylim=(2.5, 6.5))
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
# The counted bits follow the formula in steps: a place takes whole bits, so between two
# powers of two it costs up to one bit more. (Real messages avoid the steps: `tcs.block_for` takes the
# power of two with the shortest code.) Left, the bitmap leaves the picture at small φ; right, it comes
# back and wins.
#
# ## Where the entries are does not matter
#
# Flags and places are fixed by the number of entries, ends by the number of blocks: the length depends
# on $K$ and $d$ alone. The paper's "on average" is really "always", so that a receiver knows the size
# of a message beforehand.

# %% tags=["nbval-check-output"]
k = 1000
spread = torch.arange(k) * (measured_dimension // k)
heaps = {"at the front": torch.arange(k), "spread evenly": spread}
heaps["at the back"] = torch.arange(measured_dimension - k, measured_dimension)
for name, where in heaps.items():
    print(f"{name:14s} {len(tcs.encode_positions(where, measured_dimension, 1000)):,} bits")

# %% [markdown]
# The same number three times. The price: entries that cluster gain nothing. The code of schemes that end
# in + makes use of that ([notebook 10b](10b_fewer_bytes.ipynb)).
#
# ## What it is worth in a scheme
#
# TCS sends positions only for its local mask, an eleventh of its entries; top-K sends one with every value.
# What part of the paper's bit budget are positions, with values of 32 and of 5 bits?

# %%
display(Markdown(lab.markdown(pd.DataFrame([budget_of(name) for name in share]))))

# %% [markdown]
# That is why the paper's shared mask and its 5-bit values go together: once values take 5 bits, positions are most of
# top-K's budget but a small part of TCS's. A plain index hurts top-K-Q5 most.
#
# ## What the code does not do
#
# The code has no check of its own: a flipped bit is noticed only where the result is no code. Flip each bit of
# the example in turn and decode:

# %% tags=["nbval-check-output"]
noticed = 0
for i in range(len(bits)):
    flipped = bits.clone()
    flipped[i] ^= 1
    try:
        assert tcs.decode_positions(flipped, dimension, block).tolist() != positions_K.tolist()
    except ValueError:
        noticed += 1
print(f"{noticed} of {len(bits)} flips are noticed, {len(bits) - noticed} give other positions")

# %% [markdown]
# Some flips raise (a wrong number of block ends, entries out of order), the others silently move an
# entry. So a real message has a checksum around the code ([notebook 10](10_bits_on_the_wire.ipynb)).
#
# ## Claim
#
# 1. The example comes out as printed in the paper, and decodes.
# 2. Where $1/\phi$ is a power of two (and divides $d$) the formula holds exactly: no tolerance.
# 3. Elsewhere counted and formula differ by at most one bit, because a place takes whole bits.
# 4. At the paper's size, ResNet-18 and φ = 0.001, they agree within 0.5 %, and a position costs
#    about half of $\log_2 d$.

# %%
example = "".join(map(str, tcs.encode_positions(torch.tensor([0, 2, 9]), 12, 4).tolist()))
back = tcs.decode_positions(bits, dimension, block).tolist() == positions_K.tolist()
claim("the example is as printed in the paper, and decodes",
      example == "100110001010" and back, example)  # fmt: skip
powers = [power for power in range(2, 14) if measured_dimension % 2**power == 0]
exact = [costs(2.0**-power)["counted"] == power + 2 for power in powers]
claim(
    "the formula is exact at powers of two", all(exact) if powers else None, f"{len(powers)} shares"
)
claim("elsewhere it is within a bit", above.abs().max() <= 1, f"{above.abs().max():.2f} bits")

# %%
sizes = lab.read_params([lab.params_file("profile", profile)])
small = tcs.build_model(sizes["model"], sizes["width"])
small_d = sum(p.numel() for p in small.parameters())
for label, d in {"ResNet-18": paper_d, f"model of profile {profile}": small_d}.items():
    k, expected = tcs.kept(1e-3, d), math.log2(1000) + 2
    where = torch.randperm(d, generator=torch.Generator().manual_seed(seed))[:k].sort().values
    cost = len(tcs.encode_positions(where, d, 1000)) / k
    print(
        f"{label}, {k:,} of {d:,}: {cost:.2f}, expected {expected:.2f}, log2 d {math.log2(d):.2f}"
    )
    if d == paper_d:
        claim("at the paper's size within 0.5 %", abs(cost / expected - 1) < 0.005)
        claim("there it is half of a plain index", 0.45 < cost / math.log2(d) < 0.55)

# %% [markdown]
# ## Exercises
#
# Put your lines in place of `return None`; the cell compares with the core.
#
# 1. Algorithm 4: the positions, from 0, that a string of bits says, with blocks of so many entries.
# 2. The bits that so many positions in a vector of so many entries cost. Blocks need be no power of two,
#    and the last one may be shorter.


# %%
def decode(bits, block):
    return None  # yours


def code_bits(count, dimension, block):
    return None  # yours


lab.check_exercise("decode", decode)
lab.check_exercise("code_bits", code_bits)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def decode(bits, block):
#     width, pointer, index, found = math.ceil(math.log2(block)), 0, 0, []
#     while pointer < len(bits):
#         if bits[pointer] == "1":  # an entry: its place inside the block follows
#             place = bits[pointer + 1 : pointer + 1 + width]
#             found.append(block * index + int("0" + place, 2))
#             pointer += width
#         else:  # the block ends
#             index += 1
#         pointer += 1
#     return found
#
#
# def code_bits(count, dimension, block):
#     blocks = math.ceil(dimension / block)
#     return count * (1 + math.ceil(math.log2(block))) + blocks
# ```
#
# </details>


# %% tags=["solution"]
def decode(bits, block):
    width, pointer, index, found = math.ceil(math.log2(block)), 0, 0, []
    while pointer < len(bits):
        if bits[pointer] == "1":  # an entry: its place inside the block follows
            place = bits[pointer + 1 : pointer + 1 + width]
            found.append(block * index + int("0" + place, 2))
            pointer += width
        else:  # the block ends
            index += 1
        pointer += 1
    return found


def code_bits(count, dimension, block):
    blocks = math.ceil(dimension / block)
    return count * (1 + math.ceil(math.log2(block))) + blocks


assert lab.teaching.judge_solution("decode", decode) == "right"
assert lab.teaching.judge_solution("code_bits", code_bits) == "right"

# %% [markdown]
# ## What we saw

# %%
wins = zoom[~lost & (zoom["phi"] > 0.2)]["phi"]
gap = (table["counted"] - table["entropy"])[table["phi"] < 0.1]
print(claim.summary())
print(f"over the entropy bound: {gap.min():.2f} to {gap.max():.2f} bits a position below φ = 0.1")
first = zoom[lost]["phi"].min()
print(
    f"what surprised us: a bitmap wins from φ = {first:.3f} on, though the formula crosses 1/φ at 0.25;"
)
print(f"the code is as good or better again from {wins.min():.3f} to {wins.max():.3f}")

# %% [markdown]
# The formula says that a bitmap is cheaper above φ = 1/4, where $\log_2(1/\phi)+2=1/\phi$. Blocks of 5
# entries waste most of their third bit, which moves the crossing down to 1/5; blocks of 4 move it
# back for a while. No scheme of the paper comes near either: its largest φ is 0.01.
#
# The layout is older than federated learning: places in binary beside block numbers in unary is how
# Elias and Fano stored sorted lists of numbers, and search engines still do.
#
# Next: [07_fractional_quantization](07_fractional_quantization.ipynb), the other half of a message: the values.

# %%
print(
    f"core {lab.core_sha256()[:12]} · torch {torch.__version__} · no data set · n = {phi_steps} shares"
)
