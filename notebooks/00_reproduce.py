# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Reproduce every table and figure
#
# This notebook shows the paper's accuracies beside ours, then makes Tables 1 to 3 and Figures 3 to 5 of the paper. As it is, it trains nothing
# and needs no data: it draws the stored results of profile `evidence`. (A *profile* is a file in `params/` that names the data, the network
# and the number of epochs.) The grey bars are folded code cells; the second one holds the settings.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import io
import math

import pandas as pd
import tcs_lab as lab
from IPython.display import Image, Markdown, display

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
tables = [1, 2, 3]  # which tables of the paper: params/table<n>.yaml
points = [
    "Baseline",
    "FedAvg",
    "FedAvg-L4",
    "top-K",
    "TCS",
    "TCS-L4",
    "TCS-L4-Q5",
]  # of the last figure
evidence = "evidence"  # the profile whose records are drawn, if no profile is given: no run is made
profile = None  # the profile whose runs are made, then drawn; a folder under results/
dataset = None  # synthetic, cifar10 (downloads), folder or text
data_root = None  # folder: a folder or tar of train/<class>/*, test/<class>/*; cifar10: its folder
data_label = None  # the data set's name in records
train_samples = None  # the first so many training images
test_samples = None  # the first so many test images
test_unused = None  # whether the last epoch tests on unused training images, too
image_size = None  # pixels a side, smaller than the images are
crop_padding = None  # pixels around images that are then cropped at random
context = None  # characters a sample of a text
model = None  # resnet18, resnet8 or conv3; of a text: gpt
width = None  # channels of its first stage
clients = None  # N
participation = None  # share of the clients drawn in a round
batch_size = None  # B, samples of one local step
epochs = None  # passes over the data
warmup_epochs = None  # dense epochs at the start; else 1/60 of the epochs, at least one
warmup_learning_rate = None  # eta of the first round
drops = None  # when eta is divided by 10, as shares of the epochs
reference_batch = None  # cumulative batch at which learning_rate holds; else it is not scaled
weight_decay = None  # L2
centralized_learning_rate = None  # eta of centralized training
dirichlet_alpha = None  # class skew among clients; else IID
precision = None  # fp32 or bf16 passes
phi_global = None  # share kept by the global mask
phi_local = None  # share kept by each local mask
phi_down = None  # share kept by the server's mask (-D, ++)
phi_min_global = None  # least share of a layer, global mask
phi_min_local = None  # least share of a layer, local mask
seeds = None  # how many trials, or a list of seeds; of records: all that are there
threads = None  # CPU threads of a run
jobs = None  # runs side by side
wire = None  # True: every message becomes bytes and is decoded; the same numbers, slower
bad_message = None  # "skip": with wire, a message that can't be accepted is left out
side_by_side = None  # True, False: all clients in one pass, or in turns; else by their size
client_threads = None  # True: a client a thread; the same numbers for any number of threads
compiled = None  # True: passes by torch.compile; numbers to rounding
errors_limit = None  # MB of memory for the errors of all clients; more are kept in a file
graph = None  # True: rounds of static shapes, on a GPU as one CUDA graph
device = None  # auto, cpu or cuda

# %% jupyter={"source_hidden": true} tags=["remove-input"]
given = lab.given_notebook_params(globals())
of_profile = ("profile", profile) if profile else ("evidence", evidence)
base = lab.profile_params(*of_profile, given)
asked = {t: lab.read_params([lab.params_file("tables", t)]) | base | given for t in tables}
plans = asked if profile or seeds else {t: lab.with_every_seed(asked[t]) for t in tables}
configs = {config.record_name: config for params in plans.values() for config in lab.plan(params)}
if profile:
    print(lab.forecast(configs.values(), given.get("jobs", 1)))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
if profile:
    records = lab.run_all(configs.values(), jobs=given.get("jobs", 1))
else:
    records = list(lab.load_records(configs.values()).values())
shown = profile or evidence

# %% [markdown]
# ## At a glance

# %% jupyter={"source_hidden": true} tags=["remove-input"]
first = lab.read_params([lab.params_file("tables", 1)])["paper"]  # what the paper prints in Table 1
params = next(iter(plans.values())) | {"schemes": points, "learning_rate": 0.5}
found = list(lab.load_records(lab.plan(params)).values())
traffic = lab.summary(found, first, lab.plan(params), lab.estimate_gaps(shown, found))


def compared(row) -> dict[str, str]:
    """One method: what the paper prints, what we measured."""
    theirs, ours = row.paper_accuracy, row.accuracy
    base = row.scheme == "Baseline"
    gap = row.difference, row.difference_low, row.difference_high
    return {
        "method": row.scheme, "seeds": f"{row.n}",
        "paper, %": "–" if math.isnan(theirs) else f"{100 * theirs:.5g}",
        "ours, %": "diverged" if math.isnan(ours) else f"{100 * ours:.2f}",
        "paper − Baseline": "–" if base else lab.format_interval(100 * row.paper_difference, math.nan, math.nan),
        "ours − Baseline (95 % interval)": "–" if base else lab.format_interval(*(100 * v for v in gap)),
        "MB both ways": lab.format_number(row.megabytes_up + row.megabytes_down),
    }  # fmt: skip


def ended(name: str) -> str:
    """Where a method ended, ours and the paper's, in words."""
    for row in traffic[(traffic["scheme"] == name) & traffic["difference"].notna()].itertuples():
        theirs = row.paper_difference
        return f"ended {beside(row.difference)} it" + (
            "" if math.isnan(theirs) else f" (in the paper: {beside(theirs)} it)"
        )
    return "has no result here yet"


def beside(difference: float) -> str:
    """A difference of accuracies in words, such as "0.17 points below"."""
    return f"{abs(100 * difference):.2f} points {'below' if difference < 0 else 'above'}"


# %% jupyter={"source_hidden": true} tags=["remove-input"]
measured = traffic[(traffic["n"] > 0) | (traffic["diverged"] > 0)]
if len(measured):
    setting = records[0]["provenance"]["dataset"], records[0]["config"]["epochs"]
    display(Markdown(
        f"**In short.** Centralized training is called *Baseline*. TCS {ended('TCS')}. TCS-L4-Q5, with four local steps "
        f"per round and 5-bit values, {ended('TCS-L4-Q5')}. Dense federated training (FedAvg), which the paper does not "
        f"print, {ended('FedAvg')}."))  # fmt: skip
    display(Markdown(lab.markdown(pd.DataFrame([compared(row) for row in measured.itertuples()]))))
    heading = "Accuracy against traffic: {}, {} epochs".format(*setting)
    picture = io.BytesIO()
    lab.draw_megabytes_figure(traffic, heading).savefig(picture, format="png", dpi=130)
    words = f"{heading}. The numbers are those of the table above."
    display(Image(picture.getvalue(), width=560, alt=words))
print(f"{len(tables)} tables from {len(records)} records in results/{shown}/runs/")

# %% [markdown]
# Methods further left in the picture need fewer megabytes, and the band is centralized training. The suffix -L4 in a name means four local
# steps per round, and -Q5 values of 5 bits; [09_your_own_scheme](09_your_own_scheme.ipynb) explains all suffixes. The paper trains a larger
# network for longer, so levels differ. What can be compared is the difference to the Baseline.
#
# ## Make it yourself
#
# How large the trainings are is decided by a profile. If you give this notebook a profile's file, it first makes all runs of that profile
# that have no record yet. From the root of the repository:
#
#     uv run papermill notebooks/00_reproduce.ipynb results/quick/00_reproduce.ipynb -f params/quick.yaml
#
# *Run time*: seconds as it is, and three to seven minutes for profile `quick` on two cores. *Read before*: the README.
#
# A parameter that is `None` takes its value from the profile's file. If the file does not set it, the paper's value is used. The tables share
# runs: Baseline is a row of all three, and TCS at η = 0.5 of two. Each run is made only once.
#
# ## All tables and figures
#
# Tables and figures are shown here and saved in `results/<profile>/`. They are only shown, and the saved ones stay as they are, in three
# cases: if you change a setting of the profile, if some schemes of the profile have no record yet, or if the folder cannot be written.

# %%
changed = not profile and given.keys() - {"tables", "points", "evidence"}
there = {record["config"]["scheme"]["name"] for record in records}
lacking = {name for params in plans.values() for name in params["schemes"]} - there
begun = not lacking or (lab.results_folder(shown) / "table1.md").exists()
folder = lab.results_folder(shown) if begun and not changed else None
drawn = {}
for t, params in plans.items():
    runs = lab.plan(params)
    drawn[t] = lab.draw_table(params, list(lab.load_records(runs).values()), runs, folder)
print(f"{len(drawn)} tables have been drawn.")


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def alternative(t: int) -> str:
    """What the picture beside a table shows, for readers who cannot see it."""
    return f"Training curves of the schemes in Table {t}, and their last points enlarged. The table has the numbers."


for t, table in drawn.items():
    display(Markdown(lab.prevent_line_breaks(table.text)))
    if table.picture:
        display(Image(table.picture, width=700, alt=alternative(t)))

# %% [markdown]
# **How to read them.** Each table is followed by its figure. A figure shows the training curves on the left, and their last points,
# enlarged, on the right. In profile `evidence` the last epoch is tested on 35,000 images: the test images, and those training images that
# were used for no training. All earlier epochs are tested on the 10,000 test images alone. The step at epoch 80 comes from this change, not
# from learning.
#
# Differences to the Baseline are in percentage points, with 95 % intervals. In profile `evidence` our intervals come from one model of all
# runs, which was planned in advance. [13](13_evidence.ipynb) judges the paper's claims by the same model. Other profiles have no such model.
# Their intervals are Student's t intervals over the seeds that a scheme and the Baseline have in common.
#
# Bits are counted per parameter and local iteration. The first number is the paper's formula, and the second is counted in the messages after
# the dense warm-up. The last column says how many megabytes one client sends and receives in the whole run, warm-up included.
#
# The csv files have more columns. One of them is the training loss, which tells you whether a scheme that ends below the Baseline has
# finished learning. (For TCS at η = 0.5, the paper prints 92.44 ± 0.143 in Table 1 and 92.44 ± 0.128 in Table 3. Each of our tables repeats the
# number of its own.)

# %% [markdown]
# ## Claim
#
# Every table has its figure. The cell also counts the runs that diverged.

# %%
assert all(table.picture for table in drawn.values()) or not records, "a figure is missing"
diverged = [r for r in records if r["status"] == "diverged"]
print(
    f"{len(records)} runs, {len(diverged)} of which diverged. Every table and figure has been drawn."
)

# %% [markdown]
# ## What we saw
#
# For each table, the lines below say how many runs it shows, and which runs of the profile have no record.

# %%
for record in diverged:
    print(f"{record['config']['scheme']['name']}: {record['reason']}")
for t, params in plans.items():
    rows = lab.summary(lab.load_records(lab.plan(params)).values(), planned=lab.plan(params))
    measured = f"{(rows['n'] > 0).sum()} of {len(rows)} schemes"
    without = lab.list_missing(lab.plan(asked[t]), records)
    print(f"table {t}: {rows['n'].sum()} runs of {measured}; runs without a record: {without}")

# %% [markdown]
# This notebook shows numbers but does not judge them. [13_evidence](13_evidence.ipynb) judges the paper's claims, and notebooks 01 to 07
# explain what each scheme does. Next: [01_fedavg](01_fedavg.ipynb).

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Shown with {lab.describe_core()}. {lab.describe_provenance(records)}")
