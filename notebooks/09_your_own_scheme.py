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
# **In short.** A scheme of your own is a class of a few lines that selects the entries to be sent. Register it under a name. Then it trains
# like the schemes of the paper, all of its bits are counted in the same way, and suffixes such as -L4 (four local steps) and -Q5 (5-bit
# values) can be added to its name. To find out whether it is better than known methods, put the class into a file and run
# `uv run tcs compare FILE`. This command searches for a good learning rate, and prints the accuracy and the bytes of your scheme beside
# those of the known methods.
#
# We try three ideas: a shared mask that follows a running average of the updates, clients that send every entry that stands out, and a rule
# that cheats, because it uses information that the server does not have. The section *Reference* at the end says what a rule
# must and must not do, and lists all suffixes.
#
# *Run time*: about 30 s on two cores of a Xeon, and about 10 s when the records exist already. *Read before*: [03_tcs](03_tcs.ipynb).
#
# *How to use it*: the grey bars are folded code cells; click one to open it. The second one holds the parameters. Change them there, or
# change a scheme, and run all cells again. For example, replace 0.9 by 0.5 in the class `RunningAverage` (our first example). Less of its
# shared mask should then stay from one round to the next. Replace 4 by 3 in the class `Threshold`, and it should send more bits.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import copy
from typing import Annotated

import pandas as pd
import tcs_lab as lab
import torch
from annotated_types import Len
from IPython.display import Markdown, display
from tcs_lab import compare

import tcs_core as tcs

torch.set_num_threads(1)

# %% [markdown]
# ## Parameters
#
# The bits are counted in short trainings. Their sizes, such as the network and the number of epochs, come from a *profile*, which is a file
# `params/<profile>.yaml`. The learning rate comes from `params/table1.yaml`.
#
# The text between the cells describes the results for the values given here. The outputs of the cells under *Claim* and *What we saw* are
# computed anew.

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
profile = "ci"  # sizes: params/<profile>.yaml; folder under results/
own = ["TCS-Average", "TCS-Average-L4-Q5", "Threshold"]  # schemes made below
beside = ["TCS", "TCS-L4-Q5"]  # schemes of the paper to stand beside them
data_root = None  # where the images are, for profiles that need a folder or a tar
jobs = 1  # runs side by side

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "09_your_own_scheme")
names = Annotated[list[str], Len(1)]
lab.check_values(globals(), own=names, beside=names, jobs=lab.WholeNumber)
files = [lab.ROOT / "params/table1.yaml", lab.params_file("profile", profile)]
params = lab.read_params(files) | {"seeds": 1, "jobs": jobs, "data_root": data_root}
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
# A rule defines only those that it needs. In rand-K, the server and all clients draw the same random mask in every round, so its rule has
# a single method:

# %%
lab.show_code(tcs.RandK)

# %% [markdown]
# `k_global` is $K=\lceil\phi_{global}\,D\rceil$, the number of entries in the shared mask. $D$ is the number of all entries, and
# $\phi_{global}$ a fraction that the scheme declares. The mask follows from the seed and the number of the round, which everybody knows.
#
# The rule of TCS also defines `observe`. It finds the largest entries of the update (the paper's $S_{top}$), and `shared_mask` returns them
# in the next round.
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
# ## Is it better than what exists?
#
# TCS-Average sends as much as TCS, but is it more accurate? For a fair answer, every scheme needs its own best learning rate, and it must
# be scored with other seeds and on other images than those that chose the rate. One command does all of this for a file that contains your
# scheme:
#
#     uv run tcs compare notebooks/examples/mask_rule.py
#
# This [file](examples/mask_rule.py) has the rule of `TCS-Average` under another name, `Average-Mask`. The command executes the file, so
# compare only files that you trust. Then it works in three steps:
#
# 1. It plays a few rounds to find mistakes. With `--dry-run`, it stops after this step, and says how long the other steps would take (for
#    this file, about a quarter of an hour on two cores).
# 2. It trains a small ResNet with ten clients on synthetic images, which it makes itself. It tries several learning rates, and chooses the
#    one with the best accuracy on images that are not trained on. While this is the smallest or the largest rate, it tries a further one.
# 3. It trains with the chosen rate and three other seeds, and measures the accuracy of these runs on other images.
#
# With `--densities`, it also does this with masks that are four and sixteen times smaller. If you stop it, the next call continues. If you
# change the file, the runs are made again.
#
# The result is a row for your scheme, beside the rows of known methods. Here are some of these rows, and that of `Average-Mask` if it has
# been made. (-K4 and -K16 in a name mean a quarter and a sixteenth of the usual number of entries.) [17_rivals](17_rivals.ipynb) has all
# rows, and describes the methods.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
track = compare.track.read_track()
method = compare.methods.find_method(str(lab.ROOT / "notebooks/examples/mask_rule.py"))
scores = compare.scoring.Scores(track, [track.find_scheme(name, method) for name in method.names])
sent = [point for group in scores.stored.values() for point in group if point.both > 0]
best = {point.scheme for point in compare.scoring.find_front(sent)}
usual = {"Baseline", "FedAvg", "TCS", "TCS-Random", "top-K", "STC"}
stored = compare.rows.stored_table(track, scores)
mine = compare.table.rows_table([(method.name, point) for point in scores.points], {})
rows = pd.concat([mine, stored[stored["Method"].isin(usual | best)]])
rows = rows.drop(columns="MB up, re-coded")
display(Markdown(lab.markdown(rows)))
print(compare.table.describe_rows(rows, scores.confidence))
if not len(mine):
    print(
        f"The row of {method.name} has not been made yet. `uv run tcs compare notebooks/examples/mask_rule.py` makes it."
    )

# %% [markdown]
# A good scheme is accurate with few megabytes. Below its table, the command prints a second one. It says how much higher or lower your
# scheme's accuracy is than that of each known method, with a 95 % interval, and how many bytes that method sends. If an interval contains
# zero, the comparison cannot tell which of the two is more accurate. If a known method has runs with fewer and with more bytes than yours,
# the second table also has the difference at equal bytes, interpolated between these runs.
#
# The row, your file and a picture are kept in `results/compare/<name of the scheme>/`.
#
# ## Three forms of a method
#
# A rule chooses which entries are sent. For other ideas, there are two more forms, which `tcs compare` takes as well:
#
# | Form | When to use it | Example |
# | :--- | :--- | :--- |
# | a rule: a class derived from `tcs.MaskRule` or `tcs.TCS`, and registered under a name | you want to choose *which entries* are sent | [mask_rule.py](examples/mask_rule.py) |
# | a client and a server: a rule whose attributes `client_type` and `server_type` are classes derived from `tcs.Client` and `tcs.Server` | you want to change what a client keeps for later rounds, or how the server averages | [client_and_server.py](examples/client_and_server.py) |
# | a class with `compress` and `decompress` | you compress one tensor at a time, for example by a low rank, or have a method in the form of the benchmark [GRACE](https://github.com/sands-lab/grace) | [per_tensor.py](examples/per_tensor.py) |
#
# A class of the third form needs nothing from this package. `compress` returns the tensors to be sent, and a context with whatever else
# `decompress` needs. If the context is None, `decompress` gets the name, shape and type of the parameter, which both sides know. This
# example sends the largest entries of each parameter in half precision (its file also imports `math` and `torch`):

# %% jupyter={"source_hidden": true} tags=["remove-input"]
source = (lab.ROOT / "notebooks/examples/per_tensor.py").read_text(encoding="utf-8")
display(Markdown(f"```python\n{source[source.index('class HalfTopK') :].rstrip()}\n```"))

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
# after them. (Threshold has no shared mask, so there is nothing that it could hide.) `tcs compare` makes such a replay before its first
# run.
#
# ## Are the bits honest?
#
# We train with our schemes and with two of the paper, and compare three ways to count the bits:
#
# 1. `bit_budget(name)` is the paper's formula. It uses the declared fractions $\phi$.
# 2. `bit_budget(name, D)` is the formula for a model of D parameters. The numbers of entries are rounded up to whole numbers, and the
#    magnitudes that a quantizer sends are counted as well.
# 3. `bits_per_parameter(record)` adds up the sizes of the codes that were sent after the warm-up, by a client (*sent up*) and by the server
#    (*sent down*), and divides by the numbers of parameters and of local steps.
#
# The result of every run is kept in a file, its *record*, which is reused if the configuration is the same. For your own scheme, the code
# of its class belongs to the configuration, so its runs are made again when you edit the class. Functions outside of the class do *not*
# belong to the configuration, even if a method calls them. Put such code into the class, or rename the scheme when it changes.

# %%
configs = lab.plan(params | {"schemes": own + beside})
print(lab.forecast(configs, jobs))
records = lab.run_all(configs, jobs=jobs)

# %%
rows = []
for record in records:
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
# ## Claim
#
# 1. Every run of the new schemes finished.
# 2. `TCS-Average` sends exactly as many bits as `TCS`, with and without -L4-Q5, because both use the same fractions and the same code.
# 3. The counted bits of `TCS-Average` differ by less than 3 % from the formula at this model's size. They need not be equal, because the code
#    for the positions rounds up to whole blocks and whole bits. This matters less in larger models.
# 4. The replay accepts the honest rules and rejects the rule that cheats.
#

# %%
by_name = lab.summary(records, params["paper"]).set_index("scheme")
claim("every run of the own schemes finished", bool((by_name.loc[own, "n"] == 1).all()))
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
# ## What we saw

# %%
print(claim.summary())
for name in ("TCS", "TCS-Average"):
    sparse = followed[name][~followed[name]["dense"]]
    print(
        f"{name} keeps {sparse['stay'].mean():.0f} % of its shared mask from one sparse round to the next."
    )

# %% [markdown]
# So the average does what it should: more of the mask stays. [03_tcs](03_tcs.ipynb) examines why so little of the mask of TCS stays
# (section *Why entries do not return to the mask of TCS*). Whether a mask that changes more slowly is also a *better* one, only a comparison
# at tuned learning rates can show.
#
# To use the scheme in [notebook 08](08_tables_and_curves.ipynb), copy its class into a cell of that notebook, because a name is known only
# where it was registered. Next: [10_bits_on_the_wire](10_bits_on_the_wire.ipynb) counts every byte.
#
# ## Reference
#
# ### A rule
#
# `own_count(shared)` returns how many entries a client adds to the shared mask, or None if clients choose the number themselves.
# `own_mask(intended_D, shared_D, k)` chooses these entries. `intended_D` (D,) is the client's update plus what it has not sent yet,
# `shared_D` (D,) is the shared mask as booleans, and `k` is the number from `own_count`.
#
# - **Use no hidden information.** The shared mask may depend on the updates, the model, a seed and the number of the round, but not on
#   anything that a client keeps to itself. The function `follow` of this notebook tests the shared mask, and so does `tcs compare`.
# - **One object serves all clients.** If `own_mask` stores something, the next client sees it. This would be a leak of information, which
#   `tcs compare` refuses, too.
# - **A client's own mask must not overlap the shared mask.** The core refuses entries that would be sent twice.
#   `self.select(intended_D, k, self.scheme.phi_min_local, excluded_D=shared_D)` avoids them; with a mask of booleans, write `& ~shared_D`.
# - **Draw random masks from `self.seed` and `self.round`**, as `tcs.RandK` does, and never from `torch.rand`. The server and all clients
#   must draw the same mask.
# - **Save the state.** In `keeps`, list the names of all attributes that change during a training. They must be tensors or numbers. Then an
#   interrupted run continues exactly, and `tcs compare` checks this. If you need several past updates, keep them as one tensor (made by
#   `torch.stack`).
# - **Change no tensor in place.** `update_D` is added to the model afterwards, and the tensors in `keeps` are restored after a round that
#   fails. So write `self.count_D = 0.8 * self.count_D + new_D`, and not `self.count_D.mul_(0.8).add_(new_D)`. The core refuses a rule that
#   changes the tensors that it is given.
# - **Declare the fractions that you really send.** The formula relies on them. Counted bits are measured in the messages. Give
#   `phi_global=None` for a scheme without a shared mask, and `phi_local=None` for one in which clients add no entries of their own.
#
# A rule has these attributes: `dimension` (the number of entries D), `k_global` and `k_local` (the sizes of the masks in this round),
# `round` (from 0, and dense rounds count, too), `seed`, `device`, `layer_sizes` and `scheme`. With `--densities`, the comparison sets
# `k_global` and `k_local` to the smaller sizes.
#
# `shared_mask()` returns positions (int64, ascending) or a bool tensor (D,). As long as there is no mask yet, it returns None, which makes
# the round dense.
#
# `self.select(vector_D, k, phi_min, excluded_D=None)` returns the positions of the k largest entries. `phi_min` is the fraction of its
# entries that every layer keeps in any case (suffixes -LF and -PLF): give `self.scheme.phi_min_global` for a shared mask, and
# `self.scheme.phi_min_local` for a client's own.
#
# A training begins with a dense warm-up, a sixtieth of the epochs but at least one, unless the scheme is registered with
# `dense_warmup=False`. Error feedback is on unless it is registered with `error_accumulation=False`.
#
# ### A client and a server
#
# The client's method `intended` returns what it means to send, and the server's method `average` returns the update. A client changes
# `errors_D` *in place*, because the errors of all clients lie in one tensor. A client that stores further tensors lists their names in its
# own `keeps`.
#
# ### A class with compress and decompress
#
# Each client has an instance of its own. The server has a twin of each, which sees only what was sent, so both must not share attributes of
# the class that change. With `error_feedback = True`, what was not sent is added to the next difference. `densities` are the numbers with
# which the class is made, the usual one first. The server's reply has all entries, and their bytes are counted, unless the class has
# `downlink = True`.
#
# ### Suffixes
#
# These suffixes exist. Those up to `-Q<q>` come from the paper. You can add suffixes with `tcs.register_suffix`, and quantizers with
# `tcs.register_quantizer`.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
suffixes = [{"suffix": f"`{one.form}`", "means": one.says} for one in tcs.SUFFIXES]
display(Markdown(lab.markdown(pd.DataFrame(suffixes))))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
made = records[0]["provenance"]
print(f"Made with {lab.describe_core()} and torch {made['torch']}, on images ({made['dataset']}).")
