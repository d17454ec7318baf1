# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · Add a scheme of your own
#
# **In short.** Write a class of a few lines that selects entries, and register it under a name. It is then a complete scheme: it gets a row
# in the table and a curve in the figure, and its bits are counted in the same way as those of the paper's schemes. In our first example,
# the shared mask follows an average of past updates, and it changes less than the mask of TCS. We also show how to detect a scheme that
# uses information which the server does not have.
#
# **Claim (Table 1, Fig. 3).** The paper compares its schemes in Table 1 (accuracy and bits) and in Fig. 3 (accuracy by epoch). An idea for
# a mask becomes a row and a curve of our versions of these with at most ten lines of code. The new scheme trains, every bit that it sends
# is counted, and it accepts suffixes like the schemes of the paper, for example -L4 for four local steps and -Q5 for values of 5 bits.
#
# We try three ideas: a shared mask that follows a running average of the updates, clients that send every entry that stands out, and a rule
# that cheats. A *profile* is a file that says how large the trainings are. The runs here have the profile `ci` and take seconds each. Their
# rows and bits are correct, but their accuracies mean nothing yet. For meaningful accuracies, run a larger profile from the root of the
# repository. The profile `quick` needs five minutes or more:
#
#     uv run papermill notebooks/09_your_own_scheme.ipynb results/quick/own_schemes.ipynb -p profile quick -p seeds 2 -p jobs 2
#
# *Run time*: about 30 s on two cores of a Xeon, and about 10 s when the records exist already. *Read before*: [03_tcs](03_tcs.ipynb).
#
# *How to use it*: the grey bars are folded code cells; click one to open it. The second one holds the parameters. Change them there, or
# change a scheme, and run all cells again. For example, replace 0.9 by 0.5 in the class `RunningAverage` (our first example). Less of its
# shared mask should then stay from one round to the next. Replace 4 by 3 in the class `Threshold`, and it should send more bits. With
# `seeds = 2`, the table of accuracies has standard deviations. Most of them are about two points, which shows how little these short
# trainings say about accuracy.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import copy
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Len
from IPython.display import Image, Markdown, display
from tcs_lab import compare

import tcs_core as tcs

torch.set_num_threads(1)

# %% [markdown]
# ## Parameters
#
# The network, the data and the number of epochs come from `params/<profile>.yaml`. The learning rate and the paper's numbers come from
# `params/table1.yaml`. The result of every run is kept in a file, its *record*. A run of `TCS` or of `Baseline` (centralized training) here
# is the same run as in [notebook 08](08_tables_and_curves.ipynb), so both notebooks use the same record.
#
# The text between the cells describes the results for the values given here. The outputs of the cells under *Claim* and *What we saw* are
# computed anew.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
profile = "ci"  # sizes: params/<profile>.yaml; folder under results/
own = ["TCS-Average", "TCS-Average-L4-Q5", "Threshold"]  # schemes made below
beside = ["TCS", "TCS-L4-Q5", "top-K", "Baseline"]  # schemes of the paper to stand beside them
seeds = 1  # how many trials of each
data_root = None  # where the images are, for profiles that need a folder or a tar
jobs = 1  # runs side by side

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "09_your_own_scheme")
names = Annotated[list[str], Len(1)]
lab.check_values(globals(), own=names, beside=names, seeds=lab.WholeNumber, jobs=lab.WholeNumber)
files = [lab.ROOT / "params/table1.yaml", lab.params_file("profile", profile)]
params = lab.read_params(files) | {"seeds": seeds, "jobs": jobs, "data_root": data_root}
print(
    f"{params['dataset']}, {params['model']} of width {params['width']}, {params['epochs']} epochs"
)

# %% [markdown]
# ## What a scheme decides
#
# Without suffixes, schemes differ only in how they choose the masks. This choice is a **rule** with four methods:
#
# - `shared_mask` returns the entries that the server and all clients know without being told. This is the paper's global mask.
# - `own_count` says how many more entries a client adds.
# - `own_mask` returns these entries, which are sent with their positions. This is the paper's local mask.
# - `observe` receives every update that the server sent.
#
# In TCS, three of these methods look like this:

# %%
lab.show_code(tcs.TCS.shared_mask, tcs.TCS.observe, tcs.MaskRule.own_mask)

# %% [markdown]
# `select` is the paper's $S_{top}$, which selects the largest entries. `k_global` is $K=\lceil\phi_{global}\,D\rceil$, the number of
# entries in the shared mask. $D$ is the number of all entries, and $\phi_{global}$ a fraction that the scheme declares. Most of the other
# lines handle two special cases: an update that is zero everywhere, and a mask that is larger in the first rounds and then shrinks (the
# suffix `-W<n>` below).
#
# ## First idea: a mask with a memory
#
# The last update is only a noisy hint of which entries matter. Let the mask follow a running average of the magnitudes of the updates
# instead. (The factor 0.1 of an average is left out, because it does not change which entries are the largest.)
#
# $$a_t = 0.9\,a_{t-1}+|\Delta\theta_t|,\qquad m_{global}=S_{top}(a_t,\,K).$$
#
# The server and all clients know the past updates. They can compute this average themselves, so the positions still need no bits.


# %%
@tcs.register_scheme("TCS-Average", phi_global=1e-2, phi_local=1e-3)
class RunningAverage(tcs.TCS):
    """The shared mask follows a running average of the updates instead of the last one."""

    keeps = ("average_D",)  # those of TCS are added
    average_D = 0.0

    def observe(self, update_D):
        self.average_D = 0.9 * self.average_D + update_D.abs()
        super().observe(self.average_D)


# %% [markdown]
# `keeps` lists the attributes that must be saved so that an interrupted run can continue. `register_scheme` gives the rule the name
# `TCS-Average`, to which the suffixes of TCS can be added. The scheme sends as many bits as TCS, because it declares the same fractions
# $\phi$:

# %% tags=["nbval-check-output"]
for suffix in ("", "-L4", "-Q5", "-L4-Q5", "-LF"):
    mine, theirs = tcs.bit_budget("TCS-Average" + suffix), tcs.bit_budget("TCS" + suffix)
    print(
        f"{'TCS-Average' + suffix:18s} {mine:.5f} bits per parameter and local step; TCS{suffix} sends {theirs:.5f}"
    )

# %% [markdown]
# The next table lists all suffixes that exist. Those up to `-Q<q>` come from the paper.

# %%
suffixes = [{"suffix": f"`{one.form}`", "means": one.says} for one in tcs.SUFFIXES]
display(Markdown(lab.markdown(pd.DataFrame(suffixes))))

# %% [markdown]
# ## Second idea: send what stands out
#
# This rule has no shared mask. Each client sends every entry that is more than four standard deviations away from zero, however many these
# are. `own_count` returns None to say that the number is not fixed. The method `own_mask` may return a mask of booleans, which is easier to
# write than a list of positions. The declared `phi_local` is only a *guess* here. It is used by the formula for the number of bits, and by
# nothing else.


# %%
@tcs.register_scheme("Threshold", phi_global=None, phi_local=2e-3)
class Threshold(tcs.MaskRule):
    """A client sends what stands out: entries beyond four standard deviations."""

    def own_count(self, shared):
        return None  # how many they are is open: the message says

    def own_mask(self, intended_D, shared_D, k):
        return intended_D.abs() > 4 * intended_D.std()


# %% [markdown]
# ## A third idea that is not allowed
#
# The simulator keeps all clients in one process, so a rule *could* use information that the server does not have. The following rule
# computes the shared mask from what the last client intended to send:


# %%
@tcs.register_scheme("TCS-Peek", phi_global=1e-2, phi_local=1e-3)
class Peek(tcs.TCS):
    """A cheat: the shared mask needs what was never sent."""

    secret_D = None

    def own_mask(self, intended_D, shared_D, k):
        self.secret_D = intended_D.clone()
        return super().own_mask(intended_D, shared_D, k)

    def observe(self, update_D):
        super().observe(update_D if self.secret_D is None else self.secret_D)


# %% [markdown]
# The scheme trains, and its number of bits looks like that of TCS. But this number is wrong, because the secret information was never sent.
#
# A **replay** detects this. We copy the rule before the first round and show the copy only the updates and the model, which the server and
# all clients know. If the copy finds the right mask in every round, the shared mask needs no hidden information. The replay tests the
# shared mask only. It cannot detect that `own_mask` of one client learns something from another client.


# %%
def federation_of(name: str) -> lab.Training:
    """One federation of the profile's size, before its first round."""
    config = lab.plan(params | {"schemes": [name], "seeds": 1})[0]
    data = lab.load_dataset(config.dataset, config.data_root, config.data_label)
    return lab.Training(config, data.first(config.train_samples, config.test_samples))


# %%
def known_mask(rule: tcs.MaskRule, theta_D: torch.Tensor) -> torch.Tensor:
    """Positions of the shared mask that a rule has now; it may look at the weights."""
    rule.begin(theta_D)
    mask = rule.shared_mask()
    if mask is None:  # there is none yet
        return torch.empty(0, dtype=torch.int64)
    return (tcs.mask_to_positions(mask) if mask.dtype == torch.bool else mask).cpu()


def follow(name: str) -> pd.DataFrame:
    """Per round: does a copy that sees updates and model know the mask; how much of it stays."""
    federation, rows, last = federation_of(name), [], torch.empty(0)
    compressor, outsider = federation.compressor, copy.deepcopy(federation.compressor.rule)
    for epoch in range(federation.config.warmup + 1):
        for update_D in federation.rounds(epoch):
            outsider.observe(update_D)
            outsider.round = compressor.rule.round  # everybody knows the number of the round
            mask, guess = (known_mask(r, federation.theta_D) for r in (compressor.rule, outsider))
            row = {"dense": compressor.known.dense, "known": torch.equal(mask, guess)}
            rows.append(row | {"stay": 100 * torch.isin(mask, last).float().mean().item()})
            last = mask
    return pd.DataFrame(rows)


# %%
followed = {name: follow(name) for name in ("TCS", "TCS-Average", "Threshold", "TCS-Peek")}
for name, rounds in followed.items():
    verdict = "honest" if rounds["known"].all() else "needs hidden information"
    print(
        f"{name:12s} the copy knows the mask in {rounds['known'].sum()} of {len(rounds)} rounds: {verdict}"
    )

# %% [markdown]
# Three rules are honest. The training begins with dense rounds, in which there is no mask. The fourth rule is detected in the first rounds
# after them. (Threshold has no shared mask, so there is nothing that it could hide.) The same rounds show what the memory does:

# %% jupyter={"source_hidden": true} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(7.6, 3.8), layout="constrained")
for name in ("TCS", "TCS-Average"):
    rounds = followed[name].iloc[1:]
    style = lab.curve_style(name) | {"markersize": 4}
    _ = ax.plot(rounds.index + 1, rounds["stay"], **style, label=name)
ax.axvline(rounds["dense"].sum() + 1.5, color=lab.COLOURS[7], ls=":", label="sparse rounds begin")
ax.set(title="How much of the shared mask stays from one round to the next")
ax.set(xlabel="round", ylabel="positions that stay (%)", ylim=(0, 105))
ax.grid(alpha=0.25)
fig.legend(loc="outside lower center", ncols=3, frameon=False)
lab.show_figures()

# %% [markdown]
# In sparse rounds, the running average keeps most of its mask, while TCS replaces a large part of its mask in every round. This is one
# short training of a tiny network, so its numbers say little about other trainings. We see two likely reasons why TCS replaces so much.
#
# The first is that errors accumulate. The update is zero outside the masks, so a new entry of the shared mask can only come from a client's
# own mask. What the client sends there has accumulated over many rounds. The entry is therefore large once, enters the shared mask, and is
# small again one round later. The second cause is noise. In the dense rounds nothing accumulates, and still the mask that TCS would choose
# keeps even fewer of its positions. The running average reduces both effects.
#
# ## Names and values of your own
#
# You can also add suffixes and quantizers. The settings of a scheme, such as its fractions and its number of local steps, are the fields of
# an object `Scheme`. A **suffix** says which of these fields it sets, and which schemes it can be used with. The one below, `-G<n>`, makes
# the shared mask n thousandths of all entries, in schemes that have one. A **quantizer** returns a code for each value and the magnitude
# that each code stands for. Its letter becomes a suffix, too. The quantizer below divides the magnitudes into intervals of equal width; the
# paper uses intervals of equal ratio.


# %%
@tcs.register_suffix("-G<n>", r"g([1-9])", "a shared mask of n/1000", needs=("shared",))
def smaller_mask(fields, number):
    return {"phi_global": number / 1000}


@tcs.register_quantizer("U", "uniform")
def uniform_quantize(values_K, intervals):
    width = (values_K.abs().max() / intervals).clamp(min=1e-30)  # they may all be 0
    interval_K = (values_K.abs() / width).ceil().clamp(1, intervals).long() - 1
    means_P = width * (torch.arange(intervals, device=width.device) + 0.5)
    return (interval_K + intervals * (values_K < 0)).int(), means_P


# %%
normal_D = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
for name in ("TCS-G5", "TCS-Average-G5-Q5", "TCS-Average-G5-U5"):
    compressor = tcs.Compressor(name, [100_000], 1)
    _ = compressor.step(normal_D)  # dense: it gives the mask
    sent_D = compressor.step(normal_D)
    off = float((sent_D - normal_D[0])[sent_D != 0].norm() / normal_D[0, sent_D != 0].norm())
    print(f"{name:18s} {compressor.bits_up:,} bits; relative error of the values: {off:.1%}")

# %% [markdown]
# Here the paper's quantizer (`-Q5`) is more accurate. The values are the largest ones of many normal random numbers, so they lie within a
# factor of two of each other. Its intervals cover only the range of these values, while intervals of equal width that begin at zero are
# half unused. In [07](07_fractional_quantization.ipynb), very small values made it less accurate.
#
# ## The row and the curve
#
# The remaining steps are those of notebook 08: plan, run, summary and figure. A record is reused if its configuration is the same. For your
# own scheme, the code of its class belongs to the configuration, so its runs are made again when you edit the class. Functions outside of
# the class do *not* belong to the configuration, even if a method calls them. Put such code into the class, or rename the scheme when it
# changes.

# %%
configs = lab.plan(params | {"schemes": own + beside})
print(f"{len(configs)} runs: {len(own) + len(beside)} schemes, {seeds} trial(s) each")
print(lab.forecast(configs, jobs))

# %%
records = lab.run_all(configs, jobs=jobs)

# %%
summary = lab.summary(records, params["paper"])
title = f"Own schemes beside those of Table 1, profile {profile}"
folder = lab.results_folder(profile)
lab.save_table(summary, folder / "own_schemes", title)
display(Markdown(f"**{title}**\n\n{lab.markdown(lab.readable(summary))}"))

# %% [markdown]
# Your own schemes come first. Their columns for the paper are empty, because the paper has no such schemes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
label = records[0]["provenance"]["dataset"]
drawn = lab.draw_accuracy_figure(records, f"Own schemes in Fig. 3: {label}, profile {profile}")
words = f"{title}: test accuracy by epoch, and the last points enlarged."
display(Image(lab.save_figure(drawn, folder / "own_schemes"), width=700, alt=words))

# %% [markdown]
# ## Are the bits honest?
#
# We compare three ways to count the bits:
#
# 1. `bit_budget(name)` is the paper's formula. It uses the declared fractions $\phi$.
# 2. `bit_budget(name, D)` is the formula for a model of D parameters. The numbers of entries are rounded up to whole numbers, and the
#    magnitudes that a quantizer sends are counted as well.
# 3. `bits_per_parameter(record)` adds up the sizes of the codes that were sent after the warm-up, by a client (*sent up*) and by the server
#    (*sent down*), and divides by the numbers of parameters and of local steps.

# %%
rows = []
for record in records[: seeds * len(own) : seeds]:
    name, d = record["config"]["scheme"]["name"], record["dimension"]
    sent = lab.bits_per_parameter(record)
    counts = [tcs.bit_budget(name), tcs.bit_budget(name, d), sent["uplink"], sent["downlink"]]
    columns = ["formula", f"at D = {d:,}", "sent up", "sent down"]
    rows.append({"scheme": name} | dict(zip(columns, (f"{c:.4f}" for c in counts), strict=True)))
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# For `TCS-Average`, with and without suffixes, the second count is close to the bits that a client sent. The first is smaller, because it
# does not round up the numbers of entries. With `-Q5`, most of the difference comes from the 16 magnitudes, which need many bits compared
# with the rest of a message of such a small model. For `Threshold`, the formula is only as good as the guess, so trust the bits that were
# sent.
#
# ## What to keep in mind
#
# - **Use no hidden information.** The shared mask may depend on the updates, the model, a seed and the number of the round, but not on
#   anything that a client keeps to itself. The function `follow` of this notebook tests the shared mask, and so does `tcs compare` before its first run (see below).
# - **One object serves all clients.** If `own_mask` stores something, the next client sees it. This would be a leak of information, which
#   `tcs compare` refuses, too.
# - **A client's own mask must not overlap the shared mask.** The core refuses entries that would be sent twice.
#   `select(…, excluded_D=shared_D)` avoids them; with a mask of booleans, write `& ~shared_D`.
# - **Draw random masks from `self.seed` and a counter**, as `tcs.RandK` does, and never from `torch.rand`. The server and all clients
#   must draw the same mask.
# - **Save the state.** In `keeps`, list the names of all attributes that change during a training. They must be tensors or numbers. Then an interrupted run continues exactly, and
#   `tcs compare` checks this. If you need several past updates, keep them as one tensor (made by `torch.stack`). If you draw random numbers, keep
#   how often you have drawn.
# - **Change no tensor in place.** `update_D` is added to the model afterwards, and the tensors in `keeps` are restored after a round that fails.
#   So write `self.count_D = 0.8 * self.count_D + new_D`, and not `self.count_D.mul_(0.8).add_(new_D)`.
# - **`self.select(vector_D, k, phi_min, excluded_D=None)`** returns the positions of the k largest entries. `phi_min` is the fraction of its entries that every layer keeps in any case
#   (suffixes -LF and -PLF): give `self.scheme.phi_min_global` for a shared mask, and `self.scheme.phi_min_local` for a client's own. (TCS also gives
#   `among_K`, which only makes the selection faster. You do not need it.)
# - **Declare the fractions that you really send.** The formula relies on them. Counted bits are measured in the messages.
#
# ## Claim
#
# 1. The new schemes have a row and a curve, and every trial finished.
# 2. `TCS-Average` sends exactly as many bits as `TCS`, with and without -L4-Q5, because both use the same fractions and the same code.
# 3. The counted bits of `TCS-Average` differ by less than 3 % from the formula at this model's size. They need not be equal, because the code
#    for the positions rounds up to whole blocks and whole bits. This matters less in larger models.
# 4. The replay accepts the honest rules and rejects the rule that cheats.
#
# The accuracy depends on the profile, so it is reported and not asserted.

# %%
by_name = summary.set_index("scheme")
claim("own schemes have their rows", bool((by_name.loc[own, "n"] == seeds).all()), f"n = {seeds}")
for suffix in ("", "-L4-Q5"):
    pair, there = ["TCS-Average" + suffix, "TCS" + suffix], set(by_name.index)
    up = by_name["uplink_bits"].reindex(pair)
    at_size = tcs.bit_budget(pair[0], records[0]["dimension"])
    claim(
        f"{pair[0]} sends the bits of {pair[1]}", up.nunique() == 1 if there >= set(pair) else None
    )
    near = abs(up.iloc[0] / at_size - 1) < 0.03 if pair[0] in there else None
    sizes = f"{up.iloc[0]:.4f} sent, {at_size:.4f}"
    claim(f"{pair[0]}: the formula at this size within 3 %", near, sizes)
honest = {name: bool(rounds["known"].all()) for name, rounds in followed.items()}
right = {"TCS": True, "TCS-Average": True, "Threshold": True, "TCS-Peek": False}
claim("the replay accepts the honest rules and rejects the cheat", honest == right)

# %% [markdown]
# ## Is it better than what exists?
#
# The runs above show that a scheme works. They cannot show that it is *better* than another one: for that, every scheme needs its own best
# learning rate, and it must be scored with other seeds and on other images than those that chose the rate. One command does all of this for
# a file that contains your scheme:
#
#     uv run tcs compare notebooks/examples/mask_rule.py
#
# The [file](examples/mask_rule.py) has the rule of `TCS-Average` under another name, `Average-Mask`. The command first plays a few
# rounds to find mistakes. With `--dry-run`, it does only this, and says how long the comparison takes: about a quarter of an hour on two cores. The command trains a small
# ResNet with ten clients on synthetic images, which it makes itself. It tries four learning rates, and chooses the one with the best
# accuracy on 15,000 images. While this is the smallest or the largest one, it tries a further rate. Then it trains with the chosen rate and
# three other seeds, and measures the accuracy of these runs on 26,000 other images. If you stop it, the next call continues.
#
# It then prints the row of your scheme beside the rows of known methods. A second table says how much higher or lower your scheme's
# accuracy is than that of each known method, with a 95 % interval, and how many bytes that method sends. If a known method has runs with
# fewer and with more bytes than yours, the table also has the difference at equal bytes, interpolated between these runs. The bytes are
# those of both directions. The row, your file and a picture are kept in `results/compare/<name of the scheme>/`. If you change the file,
# the runs are made again.
#
# A rule whose mask does not depend on updates needs a single method. This one sends every second entry, the even ones in even rounds:
#
#     @tcs.register_scheme("Every-Second", phi_global=0.5, phi_local=None)
#     class EverySecond(tcs.MaskRule):
#         def shared_mask(self):
#             return torch.arange(self.round % 2, self.dimension, 2, device=self.device)
#
# `round` counts from 0, and dense rounds count, too. The comparison begins with one dense epoch, unless a scheme is registered with
# `dense_warmup=False`. Error feedback is on unless it is registered with `error_accumulation=False`.
#
# A mask rule has these attributes: `dimension` (the number of entries D), `k_global` and `k_local` (the sizes of the masks in this round),
# `round`, `seed`, `device`, `layer_sizes` and `scheme`. `shared_mask()` returns positions (int64, ascending) or a bool tensor (D,). As long
# as there is no mask yet, it returns None, which makes the round dense. A rule without a shared mask, such as `Threshold`, does not define
# this method. Give `phi_local=None` for a scheme in which clients add no entries of their own. With `--densities`, the comparison also
# tries masks that are four and sixteen times smaller, and sets `k_global` and `k_local` accordingly. A method can also be written in two
# other ways, as a pair of classes (one for the client, one for the server), or as a class that compresses one tensor at a time. (With
# such a class, the server's reply has all entries, and their bytes are counted, unless the class has `downlink = True`.) The folder
# [examples](examples) has an example of each.
#
# The next cell shows the rows of known methods that have been made so far, and the row of `Average-Mask`, the scheme in `mask_rule.py`, if
# you have made it.

# %%
track = compare.track.read_track()
method = compare.methods.find_method(str(lab.ROOT / "notebooks/examples/mask_rule.py"))
scores = compare.scoring.Scores(track, [track.find_scheme(name, method) for name in method.names])
rows = compare.rows.stored_table(track, scores)
mine = compare.table.rows_table([(method.name, point) for point in scores.points], {})
made, planned = compare.rows.count_stored(track)
if len(rows):
    rows = pd.concat([mine, rows]).drop(columns="MB up, re-coded")
    display(Markdown(lab.markdown(rows)))
    print(compare.table.describe_rows(rows, scores.confidence))
print(
    f"{made} of the {planned} planned rows have been made. The row of {method.name} has {'' if len(mine) else 'not '}been made."
)

# %% [markdown]
# ## What we saw

# %%
pairs = {"TCS-Average": "TCS", "TCS-Average-L4-Q5": "TCS-L4-Q5", "Threshold": "top-K"}
print(claim.summary())
for mine, theirs in ((m, t) for m, t in pairs.items() if {m, t} <= set(by_name.index)):
    a, b = by_name.loc[mine], by_name.loc[theirs]
    gap, less = 100 * (a["accuracy"] - b["accuracy"]), a["uplink_bits"] / b["uplink_bits"]
    spread = f", std {100 * max(a['accuracy_std'], b['accuracy_std']):.1f}" if seeds > 1 else ""
    where = "above" if gap > 0 else "below"
    print(
        f"{mine} ended {abs(gap):.1f} points {where} {theirs} (n = {seeds}{spread}) and sent {less:.2f} times its bits."
    )

# %%
for name in ("TCS", "TCS-Average"):
    sparse = followed[name][~followed[name]["dense"]]
    print(
        f"{name} keeps {sparse['stay'].mean():.0f} % of its shared mask from one sparse round to the next."
    )

# %% [markdown]
# The profile `ci` trains for three epochs only. Every scheme then ends far below the Baseline, and the differences between the schemes are
# noise. Accuracies that mean something need a larger profile and more trials (the command at the top). To find out whether an idea is
# *better* than known methods, use `tcs compare`.
#
# To use the scheme in [notebook 08](08_tables_and_curves.ipynb), copy its class into a cell of that notebook, because a name is known only
# where it was registered. Next: [10_bits_on_the_wire](10_bits_on_the_wire.ipynb) counts every byte.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
made = records[0]["provenance"]
print(
    f"Made with {lab.describe_core()} and torch {made['torch']}, on images ({label}). Each scheme has n = {seeds} seeds."
)
