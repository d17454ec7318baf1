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
# A client that sends only a few entries of a long vector must also tell the receiver where they belong. This notebook shows the short code
# that the paper uses for these positions, and counts what it costs.
#
# After this notebook you will be able to
#
# - decode positions by hand (Algorithm 4),
# - compute how long a code is, and compare it with a plain index and with a bitmap.
#
# **Claim (Sec. II-E, Algorithm 4).** If a fraction φ of the $D$ entries of a vector is sent, one position costs $\log_2(1/\phi)+2$ bits
# instead of $\log_2 D$. At the paper's size this is about half, and the cost is the same whichever entries are sent.
#
# *Run time*: about 20 s on two cores of an AMD EPYC. *Read before*: [02_sparsification](02_sparsification.ipynb) and [03_tcs](03_tcs.ipynb),
# which explain the masks.
#
# *How to use it*: a grey bar hides a cell with helper code; click on it to open the cell. The second grey bar hides the parameters. Change
# them there and run all cells again. *Claim* and *What we saw* are computed anew. For example:
#
# - `positions = [1, 2, 3]` should give another code of the same length.
# - `phi = 0.125` should give blocks of eight entries, and three bits for the position inside a block.
# - `measured_dimension = 1_048_576` should make a plain index two bits longer, while a position in the code costs as much as before.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
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

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
dimension = 12  # D, entries of the example's vector
phi = 0.25  # share of kept entries for which the code is made
positions = [1, 3, 10]  # the kept entries, counted from one, as in the paper
measured_dimension = 262_144  # D of the random masks that are encoded, 2^18
seed = 0  # of the random positions

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "06_sparse_encoding")
kinds = {
    "phi": lab.Fraction,
    "dimension": lab.WholeNumber,
    "measured_dimension": Annotated[int, Ge(1000)],
}
lab.check_values(globals(), **kinds, seed=lab.Seed)
inside = Annotated[list[Annotated[int, Ge(1), Le(dimension)]], Len(1)]  # counted from one
lab.check_values(globals(), positions=inside)
positions = sorted(set(positions))
block = round(1 / phi)  # entries in a block
width = tcs.intra_block_bits(block)  # bits of an offset inside a block
positions_K = torch.tensor(positions) - 1  # the core counts from zero
blocks = math.ceil(dimension / block)
print(
    f"the example has {blocks} blocks of {block} entries; a position inside a block takes {width} bits"
)

# %% jupyter={"source_hidden": true} tags=["remove-input"]
paper_d = sum(p.numel() for p in tcs.resnet18().parameters())


def in_positions(name: str) -> float:
    """The share of positions in a scheme's budget."""
    scheme = tcs.Scheme.named(name)
    values = scheme.value_bits * ((scheme.phi_global or 0.0) + scheme.phi_local)
    return 1 - values / tcs.bit_budget(name)


def budget_of(name: str) -> dict[str, str]:
    """A scheme's budget in bits per parameter, the share of positions, the budget with plain indices."""
    budget, own = tcs.bit_budget(name), tcs.Scheme.named(name).phi_local
    plain = (1 - in_positions(name)) * budget + own * math.log2(paper_d)
    return {"scheme": name, "bits per parameter": f"{budget:.4f}", "share of positions": f"{share[name]:.0%}",
            "bits per parameter with plain indices": f"{plain:.4f}"}  # fmt: skip


share = {name: in_positions(name) for name in ("TCS", "top-K", "TCS-Q5", "top-K-Q5")}
at_once = {name: f"{100 * part:.0f}\u00a0%" for name, part in share.items()}
display(
    Markdown(f"""**In short.** In the paper's network, one position takes {math.log2(1 / tcs.Scheme.named("TCS").phi_local) + 2:.0f} bits with this code, and
{math.log2(paper_d):.0f} bits as a plain index. This matters most when values are short. By the paper's formulas and with 32-bit values,
positions are {at_once["TCS"]} of the bits that TCS sends, and {at_once["top-K"]} of those that top-K sends. With 5-bit values they are
{at_once["TCS-Q5"]} and {at_once["top-K-Q5"]}.""")
)

# %% [markdown]
# ## The code
#
# A client sends the values in its own mask together with their positions in the vector. The parameters `dimension`, `phi` and `positions`
# are the paper's example. If you change them, the picture, the decoding steps and the exercise use your values.
#
# The code works as follows. Cut the vector into blocks of $1/\phi$ entries, so that a block holds one kept entry on average. Go through the
# blocks in order. For each kept entry, write a flag `1` and then the entry's offset, which is its position inside the block. At the end of
# each block, empty or not, write `0`. A block number is never written, because the receiver can count the zeros.
#
# $$\underbrace{1}_{\text{flag}}\;+\;\underbrace{\lceil\log_2(1/\phi)\rceil}_{\text{offset in the block}}
# \;\text{ bits per entry}\qquad+\qquad\underbrace{1}_{\text{end}}\;\text{ bit per block}$$
#
# If $1/\phi$ is a power of two that divides $D$, there are as many blocks as kept entries, and the sum is exactly $\log_2(1/\phi)+2$ bits
# per entry. Otherwise it differs by at most about one bit, unless $D$ is small.

# %% tags=["nbval-check-output"]
bits = tcs.encode_positions(positions_K, dimension, block)
code = "".join(map(str, bits.tolist()))
print(f"positions {positions} of {dimension} -> {code}, {len(code)} bits")

# %% [markdown]
# With the parameters above, this is the string in the paper: three entries of three bits each, and three block ends.
#
# ## The code in colour
#
# To colour the bits, we first need to know which kind each bit is. The function `walk` follows Algorithm 4 as one would do it by hand. In
# each step it yields its pointer, the bits that it reads, the index of the block it is in, and the position that it found. (Its cell is
# folded, because the first exercise asks you to write the algorithm yourself.)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
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
# There are three kinds of bits, and each gets its own colour and hatch. The string `kinds` has one letter per bit: `f` for a **f**lag, `p`
# for a bit of the offset (the **p**osition inside the block), and `e` for a block **e**nd.

# %%
KINDS = {
    "f": ("flag: an entry follows", lab.COLOURS[3], ""),
    "p": ("offset inside the block", lab.COLOURS[5], "////"),
    "e": ("end of a block", lab.COLOURS[6], "...."),
}
steps = list(walk(code, block))
kinds = "".join("e" if step[3] is None else "f" + "p" * width for step in steps)
swatches = [{"label": n, "fc": c, "hatch": h, "ec": "white"} for n, c, h in KINDS.values()]
handles = [plt.Rectangle((0, 0), 1, 1, **swatch) for swatch in swatches]
print(code, kinds, sep="\n")


# %% jupyter={"source_hidden": true} tags=["remove-input"]
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
lab.show_figures()

# %% [markdown]
# The upper row is the vector, numbered from one. Its blocks are alternately grey and white, and the kept entries are dark. The lower row is
# the code, with a line from each kept entry to its flag and its offset.
#
# ## Read it by hand
#
# Take a pencil, start with block 0 and repeat these steps until all bits are used:
#
# 1. Read one bit. If it is `0`, the block ends: add one to the block index.
# 2. If it is `1`, read the next $\lceil\log_2(1/\phi)\rceil$ bits as a binary number. This is the offset inside the block.
# 3. The position is block index × block size + offset, counted from zero. Add one to count from one.
# 4. At the end you must have found exactly one block end per block. (A `0` inside an offset does not count.) Otherwise the bits were not a valid code.
#
# These are the steps for the example:

# %% tags=["nbval-check-output"]
rows = [
    {"pointer": at, "reads": read, "block": index, "finds": "end of block"}
    | ({} if found is None else {"finds": f"{block} × {index} + {found % block} + 1 = {found + 1}"})
    for at, read, index, found in steps
]
print(pd.DataFrame(rows).to_string(index=False))

# %% [markdown]
# Each row is one step, and the positions are those we started from. Now it is your turn: the next cell prints a code for a vector and
# blocks of the same size. Decode it on paper. The cell after the next one decodes it, so you can then compare. (To get a code whose answer
# you have not seen yet, change `seed` and run these cells again.)

# %%
draw = torch.randperm(dimension, generator=torch.Generator().manual_seed(seed))
hidden = draw[: len(positions)].sort().values
exercise = "".join(map(str, tcs.encode_positions(hidden, dimension, block).tolist()))
print(f"{exercise}   ({dimension} entries in blocks of {block})")

# %%
read_back = [found + 1 for *_, found in walk(exercise, block) if found is not None]
print(f"counted from one: {read_back}; right: {read_back == (hidden + 1).tolist()}")

# %% [markdown]
# ## What a position costs
#
# We now encode random masks of exactly $K=\lceil\phi D\rceil$ entries and divide the length of the code by $K$. We compare the result with
# three other costs per position:
#
# - a plain index, which takes $\log_2 D$ bits;
# - a **bitmap**, which has one bit for every entry of the vector and so takes $1/\phi$ bits per position;
# - the entropy bound. If each entry is kept with probability φ, no code can be shorter on average than
#
# $$\frac{H_2(\phi)}{\phi}=\log_2\frac1\phi+\frac{1-\phi}{\phi}\log_2\frac1{1-\phi}
# \;\approx\;\log_2\frac1\phi+1.44\quad\text{for small }\phi .$$
#
# (If exactly $K$ entries are kept, the bound is $\log_2\binom{D}{K}/K$. This is always smaller, but hardly so for large $K$.)
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
shares = [1e-4 * 3000 ** (i / 80) for i in range(81)]  # from 0.0001 to 0.3
table = pd.DataFrame([costs(share) for share in shares])
above = table["counted"] - table["formula"]
print(f"the code minus the formula: {above.min():+.2f} to {above.max():+.2f} bits per position")

# %% jupyter={"source_hidden": true} tags=["remove-input"]
LINES = {
    "log2_d": ("plain index, log₂ D", lab.COLOURS[7], ":"),
    "bitmap": ("bitmap, 1/φ", lab.COLOURS[1], "--"),
    "formula": ("formula, log₂(1/φ) + 2", lab.COLOURS[0], "-."),
    "entropy": ("entropy bound, H₂(φ)/φ", lab.COLOURS[3], (0, (6, 1, 1, 1, 1, 1))),
}


fig, ax = plt.subplots(figsize=(8.0, 4.4), layout="constrained")
for column, (label, colour, dash) in LINES.items():
    ax.plot(table["phi"], table[column], color=colour, linestyle=dash, label=label)
points = {"color": lab.COLOURS[2], "marker": "o", "markersize": 4, "markevery": 4, "linewidth": 1}
ax.plot(table["phi"], table["counted"], **points, label="counted, Alg. 4")
ax.set(title=f"What a position costs, D = {measured_dimension:,}", xscale="log", ylim=(0, 23))
ax.set(xlabel="share of kept entries, φ", ylabel="bits per position")
ax.grid(alpha=0.25)
fig.legend(loc="outside lower center", ncols=3, frameon=False)
lab.show_figures()

# %% [markdown]
# The counted bits follow the formula in steps. An offset takes a whole number of bits, so between two powers of two a position costs up to
# one bit more. (Real messages avoid these steps: `tcs.block_for` chooses the power of two that gives the shortest code.) By the formula,
# a bitmap is shorter only above φ = 1/4, and no scheme of the paper keeps that many entries.
#
# ## Where the entries are does not matter
#
# How many bits flags and offsets take depends only on the number of entries and the block size. The number of block ends is the number of
# blocks. So the length of a code depends only on $K$, $D$ and the block size, and not on where the entries are. The paper states the cost
# as an average, but it is always the same, and a receiver knows the size of a message beforehand.
#
# This has a price: entries that lie close together cost as much as scattered ones. Schemes whose names end in `+` use a different code,
# which is shorter if entries lie close together ([notebook 10b](10b_fewer_bytes.ipynb)).
#
# ## What it is worth in a scheme
#
# With top-K, every value needs a position. TCS sends positions only for the entries of its local mask, which are one in eleven of the
# entries that a client sends. The paper's *bit budget* is the number of bits that a client sends per parameter and local iteration. The
# table shows the share of positions in it, with values of 32 and of 5 bits. The last column shows the budget if each position were a plain
# index.

# %%
display(Markdown(lab.markdown(pd.DataFrame([budget_of(name) for name in share]))))

# %% [markdown]
# Once a value takes only 5 bits, positions are most of the budget of top-K, but still a small part of the budget of TCS. So, as the paper
# points out, TCS gains more from short values than top-K does. In proportion, plain indices would lengthen the messages of top-K-Q5 most,
# to about twice their size.
#
# ## Claim
#
# 1. The example gives the code that the paper prints, and it decodes.
# 2. Where $1/\phi$ is a power of two (and divides $D$), the formula holds exactly, without a tolerance.
# 3. Elsewhere the counted bits and the formula differ by at most one bit, because an offset takes a whole number of bits.
# 4. At the paper's size (ResNet-18 and φ = 0.001) they agree within 0.5 %, and a position costs
#    about half of $\log_2 D$.

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
claim(
    "elsewhere the formula is within one bit",
    above.abs().max() <= 1,
    f"{above.abs().max():.2f} bits",
)

# %%
k, expected = tcs.kept(1e-3, paper_d), math.log2(1000) + 2
where = torch.randperm(paper_d, generator=torch.Generator().manual_seed(seed))[:k].sort().values
cost = len(tcs.encode_positions(where, paper_d, 1000)) / k
print(
    f"ResNet-18, {k:,} of {paper_d:,} entries: {cost:.2f} bits per position (formula {expected:.2f}, plain index {math.log2(paper_d):.2f})"
)
claim(
    "at the paper's size a position costs what the formula says, within 0.5 %",
    abs(cost / expected - 1) < 0.005,
)
claim(
    "at the paper's size a position costs about half of a plain index",
    0.45 < cost / math.log2(paper_d) < 0.55,
)

# %% [markdown]
# ## Exercises
#
# Replace `return None` by your own lines. The cell compares your functions with the core.
#
# 1. Write Algorithm 4. `bits` is a string of `0` and `1`, and `block` is the number of entries in a block. Return the list of positions, counted
#    from zero.
# 2. Return the number of bits that the code takes for `count` positions in a vector of `dimension` entries. The block size need not be a power of
#    two, and the last block may be shorter than the others.
#
# <details><summary>Hints</summary>
#
# 1. Keep a pointer into `bits` and a block index, as in the section *Read it by hand*. In Python, `int("0101", 2)` reads a binary number.
#    If a block has a single entry, the offset has no bits at all.
# 2. Count the flags, the bits of the offsets and the block ends separately, and round up where needed.
#
# </details>


# %%
def decode(bits, block):
    return None  # yours


def code_bits(count, dimension, block):
    return None  # yours


lab.check_exercise("decode", decode)
lab.check_exercise("code_bits", code_bits)

# %% [markdown] tags=["solution"]
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


# %% jupyter={"source_hidden": true} tags=["solution", "remove-input"]
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
gap = (table["counted"] - table["entropy"])[table["phi"] < 0.1]
print(claim.summary())
print(
    f"Below φ = 0.1 a position costs {gap.min():.2f} to {gap.max():.2f} bits more than the entropy bound."
)

# %% [markdown]
# The idea of this code is older than federated learning. Elias and Fano stored sorted lists of numbers in the same way, with offsets in
# binary and block numbers in unary.
#
# Next, [07_fractional_quantization](07_fractional_quantization.ipynb) looks at the other half of a message: the values.

# %%
print(
    f"Made with {lab.describe_core()} and torch {torch.__version__}, for {len(shares)} fractions. No data set is needed."
)
