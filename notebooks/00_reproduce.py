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
# The paper *Time-Correlated Sparsification* (TCS) trains one network at many clients, which send only a small part of their updates. This
# notebook compares the paper's accuracies with ours, and then draws its Tables 1 to 3 and Figures 3 to 5. As it stands, it trains nothing
# and needs no data. It draws the stored results (*records*) of profile `evidence`. (A *profile* is a file in `params/` that names the data,
# the network and the number of epochs.) The grey bars are folded code cells: click one to open it. The second one holds the settings. The
# section *Make it yourself* says how to change them.
#
# *Run time*: seconds as it stands. *Read before*: the README.

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
]  # methods in the first table and in the picture below it
evidence = "evidence"  # the profile whose records are drawn if `profile` is None; no run is made
profile = None  # the profile whose runs are made, then drawn; a folder under results/
results = None  # the folder with <profile>/runs/*.json; None: results/
dataset = None  # synthetic, cifar10 (downloads), folder or text
data_root = None  # folder: a folder or tar of train/<class>/*, test/<class>/*; cifar10: its folder
data_label = None  # the data set's name in records
train_samples = None  # the first so many training images
test_samples = None  # the first so many test images
test_unused = None  # whether the last epoch tests on unused training images, too
image_size = None  # height and width in pixels, to make images smaller
crop_padding = None  # pixels around images that are then cropped at random
context = None  # characters per sample of a text
model = None  # resnet18, resnet8 or conv3; for a text: gpt
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
side_by_side = (
    None  # True: all clients in one pass; False: in turns; None: by the size of the network
)
client_threads = None  # True: one thread per client; the same numbers for any number of threads
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
    print(lab.forecast(configs.values(), given.get("jobs", 1), results))

# %% jupyter={"source_hidden": true} tags=["remove-input"]
if profile:
    records = lab.run_all(configs.values(), results, given.get("jobs", 1))
else:
    records = list(lab.load_records(configs.values(), results).values())
shown = profile or evidence

# %% [markdown]
# ## At a glance

# %% jupyter={"source_hidden": true} tags=["remove-input"]
first = lab.read_params([lab.params_file("tables", 1)])["paper"]  # what the paper prints in Table 1
params = next(iter(plans.values())) | {"schemes": points, "learning_rate": 0.5}
found = list(lab.load_records(lab.plan(params), results).values())
traffic = lab.summary(found, first, lab.plan(params), lab.estimate_gaps(shown, found, results))


def compared(row) -> dict[str, str]:
    """Return the row of one method: what the paper prints beside what we measured."""
    theirs, ours = row.paper_accuracy, row.accuracy
    base = row.scheme == "Baseline"
    gap = row.difference, row.difference_low, row.difference_high
    return {
        "method": row.scheme, "our runs": f"{row.n}",
        "paper: accuracy, %": "–" if math.isnan(theirs) else f"{100 * theirs:.5g}",
        "ours: accuracy, %": "diverged" if math.isnan(ours) else f"{100 * ours:.2f}",
        "paper − Baseline, points": "–" if base else lab.format_interval(100 * row.paper_difference, math.nan, math.nan),
        "ours − Baseline, points (95 % interval)": "–" if base else lab.format_interval(*(100 * v for v in gap)),
        "MB sent and received": lab.format_number(row.megabytes_up + row.megabytes_down),
    }  # fmt: skip


def ended(name: str) -> str:
    """Say in words where a method ended in our runs and in the paper."""
    for row in traffic[(traffic["scheme"] == name) & traffic["difference"].notna()].itertuples():
        theirs = row.paper_difference
        return f"ended {beside(row.difference)} the Baseline" + (
            "" if math.isnan(theirs) else f" (in the paper: {beside(theirs)})"
        )
    return "has no result here yet"


def beside(difference: float) -> str:
    """Say a difference of accuracies in words, such as "0.17 points below"."""
    return f"{abs(100 * difference):.2f} points {'below' if difference < 0 else 'above'}"


# %% jupyter={"source_hidden": true} tags=["remove-input"]
drawn_runs = {record["digest"]: record for record in [*records, *found]}.values()
measured = traffic[(traffic["n"] > 0) | (traffic["diverged"] > 0)]
if len(measured):
    setting = records[0]["provenance"]["dataset"], records[0]["config"]["epochs"]
    display(Markdown(
        "**In short.** We compare final test accuracies, in percentage points, with that of centralized training, which is "
        f"called the *Baseline*. TCS {ended('TCS')}. TCS-L4-Q5, which is TCS with four local steps per round and 5-bit "
        f"values, {ended('TCS-L4-Q5')}. FedAvg, which here sends everything after one local step, {ended('FedAvg')}. The "
        "paper has no result of FedAvg. Here, all methods but the Baseline use the learning rate of the paper's Table 1, scaled to our batches."))  # fmt: skip
    display(Markdown(lab.markdown(pd.DataFrame([compared(row) for row in measured.itertuples()]))))
    heading = "Accuracy against traffic: {}, {} epochs".format(*setting)
    picture = io.BytesIO()
    lab.draw_megabytes_figure(traffic, heading).savefig(picture, format="png", dpi=130)
    words = f"{heading}. The numbers are those of the table above."
    display(Image(picture.getvalue(), width=560, alt=words))
print(f"This page is drawn from {len(drawn_runs)} records in {results or 'results'}/{shown}/runs/.")

# %% [markdown]
# In the picture, methods further to the left send and receive less. The megabytes are those of one client in the whole training. The grey
# band is centralized training. Each point is a mean over seeds. Its bar, and the grey band, reach from one standard deviation below the mean
# to one above it. [09_your_own_scheme](09_your_own_scheme.ipynb) explains the suffixes in the names. The paper trains a larger network for
# longer, on larger images and twice as many of them, so its accuracies are higher than ours. Compare the differences from the Baseline
# instead.
#
# ## All tables and figures
#
# Tables and figures are shown here and saved in `results/<profile>/`. They are only shown, and not saved, if you change a setting that
# stands in the profile's file (such as `seeds`), if a method has no record yet, or if the folder cannot be written.

# %%
changed = not profile and given.keys() - {"tables", "points", "evidence"}
there = {record["config"]["scheme"]["name"] for record in records}
lacking = {name for params in plans.values() for name in params["schemes"]} - there
folder = lab.results_folder(shown, results)
if changed or (lacking and not (folder / "table1.md").exists()):
    folder = None  # what is drawn is shown, and not saved
drawn = {}
for t, params in plans.items():
    runs = lab.plan(params)
    found = list(lab.load_records(runs, results).values())
    drawn[t] = lab.draw_table(params, found, runs, folder, results)


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def alternative(t: int) -> str:
    """Describe the picture of a table for readers who cannot see it."""
    return f"Training curves of the schemes in Table {t}, and their last points enlarged. The table has the numbers."


for t, table in drawn.items():
    display(Markdown(lab.prevent_line_breaks(table.text)))
    if table.picture:
        display(Image(table.picture, width=700, alt=alternative(t)))

# %% [markdown]
# Two notes:
#
# - In profile `evidence` the curves rise by a small step at the last epoch. All earlier epochs are tested on the test images of CIFAR-10
#   alone. The last one is also tested on the half of the training images that no run has trained on. The step comes from this change and
#   not from learning.
# - The Baseline is trained without momentum, and its row is the same in all three tables. In Table 3, compare *TCS-Global Momentum* (the
#   server and all clients apply the same momentum to the averaged update) with *Baseline-Momentum* instead, which is centralized training
#   with momentum.
#
# ## Make it yourself
#
# The profile decides how large the trainings are. If you give this notebook the file of a profile, it first makes all runs of that profile
# that have no record yet. For profile `quick`, this takes three to eleven minutes on two cores. Start it from the root of the repository:
#
#     uv run papermill notebooks/00_reproduce.ipynb results/quick/00_reproduce.ipynb -f params/quick.yaml
#
# You can also change the settings in the second grey bar and run all cells again. A setting that is `None` takes its value from the
# profile's file, or else from the paper. For example:
#
# - `tables = [3]` draws only the table with momentum and its figure.
# - The setting `points` lists the methods of the first table and of the picture. With `"TCS-L2"` in it, the table gets a further row and the picture a further
#   point, which lies between those of TCS and TCS-L4.
# - `seeds = [1, 2, 3]` uses only three runs of each method, so the accuracies change a little. In profile `evidence` the differences from
#   the Baseline stay the same, because they come from a statistical model that always uses all runs.
# - `results = "FOLDER"` draws what `tcs queue --results FOLDER` has made, and saves it there.

# %% [markdown]
# ## What we saw

# %%
assert all(table.picture for table in drawn.values()) or not records, "a figure is missing"
diverged = [r for r in drawn_runs if r["status"] == "diverged"]
print(
    f"All tables and figures have been drawn. Of {len(drawn_runs)} runs (those of the picture included), {len(diverged)} diverged."
)
for record in diverged:
    print(f"{record['config']['scheme']['name']}: {record['reason']}")
lacks = {t: lab.list_missing(lab.keep_planned(lab.plan(asked[t]), shown), records) for t in plans}
if all(without == "none" for without in lacks.values()):
    print("Every planned run of these tables has a record.")
else:
    for t, without in lacks.items():
        print(f"Planned runs of Table {t} without a record: {without}.")

# %% [markdown]
# This notebook shows numbers but does not judge them. [13_evidence](13_evidence.ipynb) judges the paper's claims, and notebooks 01 to 07
# explain what each scheme does. Next: [01_fedavg](01_fedavg.ipynb).

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Shown with {lab.describe_core()}. {lab.describe_provenance(drawn_runs)}")
