# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 · The evidence: what holds, what does not, what is open
#
# **Claim.** Every claim of the paper can be put as a number with a bound, and judged: by an interval
# over trials, with the bound fixed beforehand (but for one, which was added later and says so).
#
# `params/claims.yaml` lists the claims, what is measured for each, and the bound that decides (its head says
# which few trials were there before it was). This
# notebook reads them, finds the records that bear on them, and writes the verdicts to
# `results/<profile>/claims.csv` and `claims.md`. It trains nothing.
#
# *Run time*: seconds. *Read before*: `08_tables_and_curves`.

# %%
import math

import pandas as pd
import tcs_lab as lab
from IPython.display import Image, Markdown, display

import tcs_core as tcs

# %% tags=["parameters"]
evidence = "cpu"  # the profile whose records are judged: params/<profile>.yaml, results/<profile>/
tables = [1, 2, 3]  # the tables whose schemes are looked up
large = "cpu18"  # the profile of the short runs with the paper's model

# %% [markdown]
# ## The records
#
# The tables and the profile name the runs; here all those count that have a finished record, with
# any seed up to 99. Runs of one scheme differ in nothing but the seed.

# %%
params = lab.notebook_params(globals(), complete=False)
profile = lab.read_params([lab.ROOT / f"params/{evidence}.yaml"]) | {"seeds": 100}
configs = [
    config
    for table in tables
    for config in lab.plan(lab.read_params([lab.ROOT / f"params/table{table}.yaml"]) | profile)
]
records = lab.recorded(configs)
print(f"{len(records)} records in results/{evidence}/runs/ belong to tables {tables}")

# %%
seeds = {}
for record in records.values():
    key = record["config"]["scheme"]["name"], record["config"]["learning_rate"]
    seeds.setdefault(key, []).append(record["config"]["seed"])
rows = [
    {"scheme": name, "η": f"{eta:g}", "seeds": ", ".join(map(str, sorted(found)))}
    for (name, eta), found in sorted(seeds.items(), key=lambda item: (item[0][1], item[0][0]))
]
display(Markdown(lab.markdown(pd.DataFrame(rows))))

# %% [markdown]
# You should see one row a scheme and learning rate. Two schemes are compared over the seeds that both
# have: runs with the same seed share their start, the partition and the order of samples. The four with five
# seeds had claims at η = 0.5 that three left undecided; five was fixed before the last two ran.
#
# ## The claims
#
# A claim is judged by the 95 % interval (Student's t over the seeds) of what is measured: it *holds*
# if the whole interval keeps the bound, does *not hold* if all of it breaks the bound, and else is
# *not decided* here. Accuracies are differences in percentage points; `×` is how many times fewer
# bits than dense training, or than the second scheme. With one trial an accuracy has no interval.

# %%
confidence, claims = lab.read_claims(lab.ROOT / "params" / "claims.yaml")
judged = lab.judged(claims, records, confidence)
folder = lab.results_folder(evidence)
setting = next(iter(records.values()))
config, made = setting["config"], setting["provenance"]
scale = f"{made['dataset']}, {config['model']} with {setting['dimension']:,} parameters, {config['epochs']} epochs"
title = f"The paper's claims in profile {evidence}: {scale}"
lab.save_table(judged, folder / "claims", title, lab.readable_claims)
display(Markdown((folder / "claims.md").read_text()))

# %%
drawn = lab.claims_figure(judged, f"Accuracy claims, profile {evidence}")
lab.save_figure(drawn, folder / "claims")
display(Image(filename=str(folder / "claims.png"), width=860))

# %% [markdown]
# You should see one line a claim about accuracy: our interval and mean, the paper's difference with the interval of its own
# five trials as a diamond above, and the bound as a triangle below that points to the side where the claim
# holds. Some of the paper's own intervals cross their bound, too (local steps, top-K): a few tenths of a point
# are within the spread of five trials.
#
# **Read it with the scale in mind.**
#
# - The paper trains 11 million parameters for 300 epochs, five times as many rounds as these runs have.
# - All learning rates follow the paper's by linear scaling with the batch; none is tuned for this network.
#   Where a higher rate does better, a comparison of two schemes is also one of two rates.
# - Each claim has its own interval. Of twenty intervals one can be expected to miss the true difference, and
#   claims that share runs err together.
# - Bits of the way up are counted, not drawn by chance: the same in every trial, and near the formula by
#   construction (in so small a model the 16 means of 5-bit values add a tenth).
#
# **About the overlap.** Two masks drawn at random would share a hundredth, so masks *are* correlated. But the next
# mask can only hold what was sent, and that is the shared entries and as many again that the clients found.
# Whoever draws from these at random keeps half:

# %%
plain = next(r for r in records.values() if r["config"]["scheme"]["name"] == "TCS")
scheme, entries = plain["config"]["scheme"], plain["dimension"]
k_global, k_local = (tcs.kept(scheme[phi], entries) for phi in ("phi_global", "phi_local"))
found = plain["config"]["clients"] * k_local
kept = float(judged.set_index("claim").measured["correlation"])
print(f"K_global {k_global}, found by the clients at most {found}; drawn at random, "
      f"{k_global / (k_global + found):.2f} of the mask stays; measured {kept:.2f}")  # fmt: skip

# %% [markdown]
# You should see less than that: an entry that was just sent starts again from an error of zero, and what has
# waited longest is largest. The mask follows the errors more than the gradients (`03_tcs` shows how).
#
# ## The paper's model, as far as two cores get
#
# The same code with ResNet-18 and all else as in the paper, but for the data (JPEG copies) and the number of
# epochs (`params/cpu18.yaml`): one run each, of five epochs instead of 300. The rate drops at the paper's shares of
# them, but the first of the five is dense (the paper: five of 300): accuracy is that of a very short training, not of a
# part of a long one. Bits, masks and the time of a round are what they are at this size; *mask overlap* is of the
# last epoch, *seconds a round* of the fastest (in bf16, on one thread, beside other work).

# %%
sources = [lab.ROOT / f"params/{name}.yaml" for name in ("table1", large)]
short_runs = list(lab.recorded(lab.plan(lab.read_params(sources))).values())


def digits(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def short_run(record: dict) -> dict[str, str]:
    """One row: how far a short run came, what it sent, and what a round took."""
    epochs, scheme = record["rows"], record["config"]["scheme"]
    bits = lab.bits_per_parameter(record)
    overlap = epochs[-1].get("mask_overlap")
    seconds = min(row["seconds"] / row["rounds"] for row in epochs)
    return {"scheme": scheme["name"], "epochs": f"{len(epochs)}",
            "accuracy %": f"{100 * epochs[-1]['accuracy']:.2f}",
            "formula": digits(tcs.bit_budget(tcs.Scheme(**scheme))),
            "sent up": digits(bits["uplink"]), "sent down": digits(bits["downlink"]),
            "mask overlap": "–" if overlap is None else f"{overlap:.0%}",
            "seconds a round": f"{seconds:.2f}"}  # fmt: skip


# %%
if short_runs:
    d, made = short_runs[0]["dimension"], short_runs[0]["provenance"]
    at = f"{made['dataset']}, {d:,} parameters, {made['device']}, {made['threads']} thread(s) a run, n = 1"
    text = lab.markdown(pd.DataFrame([short_run(record) for record in short_runs]))
    display(Markdown(f"**Profile {large}: {at}**\n\n{text}"))
else:
    print(f"no record in results/{large}/runs yet: python tcs_core.py run "
          f"--params params/table1.yaml params/{large}.yaml")  # fmt: skip

# %% [markdown]
# Bits are per parameter and local iteration, after the dense warm-up; centralized training sends none.
# Seconds are those of the fastest epoch, because the machine had other work too, with a round's share of the
# evaluation in.
#
# ## Which records stand behind it
#
# `claims.csv` names the record files of each claim, in the order of their seeds. A record names its
# configuration, commit, versions and machine; `python tcs_core.py again <record> --set data_root=<data>` makes its
# run once more and says whether it is the same. All of this profile that were used here:

# %%
rows = []
for (commit, device, torch), group in pd.DataFrame(
    [record["provenance"] for record in records.values()]
).groupby(["commit", "device", "torch"]):
    hours = group["wall_seconds"].sum() / 3600
    changed = int(group["dirty"].sum())
    rows.append({"commit": commit[:12], "uncommitted changes": changed, "machine": device,
                 "torch": torch, "records": len(group), "hours": f"{hours:.1f}"})  # fmt: skip
display(Markdown(lab.markdown(pd.DataFrame(rows).astype(str))))

# %% [markdown]
# ## Claim
#
# Each verdict is the one its interval implies; every record that is named exists, and the records of
# a claim's two sides have the same seeds.

# %%
for row in judged.itertuples():
    names = [text.split() for text in (row.first_records, row.second_records) if text]
    assert all(len(side) == row.n and set(side) <= records.keys() for side in names)
    assert len({tuple(records[f]["config"]["seed"] for f in side) for side in names}) <= 1
    inside = [row.low > row.bound_value, row.high < row.bound_value]
    if row.verdict in ("holds", "does not hold") and row.low < row.high:
        assert any(inside) or row.bound_value in (row.low, row.high)
    elif row.verdict == "not decided":
        assert not any(inside)
assert len({record["provenance"]["fingerprint"] for record in records.values()}) <= 1
print(f"{len(judged)} claims judged from {len(records)} records of one data set")

# %% [markdown]
# ## What we saw

# %%
for verdict in ("holds", "does not hold", "not decided", "not measured"):
    found = judged[judged["verdict"] == verdict]["says"]
    print(f"{verdict} ({len(found)}):")
    print("".join(f"  {says}\n" for says in found) or "  –\n")

# %% [markdown]
# README shows the same verdicts, written from the same csv. More trials, or another scale
# (`-p evidence gpu`), need no change here: records that are there are used.

# %%
print(f"core {lab.core_sha256()[:12]} · {scale} · n = {len(records)} records")
