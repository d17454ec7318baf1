# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Reproduce every table and figure
#
# **Claim.** One call makes Tables 1–3 and Figs. 3–5 of the paper, at the scale of a profile, the
# tables beside the paper's own numbers.
#
# This notebook makes all the runs of a profile (those that have a record already are reused), then
# calls `08_tables_and_curves` through papermill once for each table, and shows the whole result on one
# page. From the repository's root:
#
#     uv run papermill notebooks/00_reproduce.ipynb results/quick/00_reproduce.ipynb -f params/quick.yaml
#
# *Run time*: under a minute as it stands (profile `ci`, where accuracies mean nothing), about three
# minutes in `quick`. *Read before*: README.

# %%
import papermill
import tcs_lab as lab
from IPython.display import Image, Markdown, display

# %% tags=["parameters"]
tables = [1, 2, 3]  # which tables of the paper
profile = "ci"  # folder under results/
dataset = "synthetic"  # synthetic, cifar10 (downloads) or folder
data_root = None  # folder: a folder or tar of train/<class>/*, test/<class>/*; cifar10: its folder
data_label = None  # the data set's name in records
train_samples = 200  # the first so many training images; None: all
test_samples = 200  # the first so many test images; None: all
model = "resnet8"  # resnet8 or resnet18
width = 4  # channels of its first stage
clients = 10  # N
participation = 1.0  # share of the clients drawn in a round
batch_size = 4  # B, samples of one local step
epochs = 3  # passes over the data
warmup_epochs = None  # dense epochs at the start; None: 1/60 of the epochs, at least one
warmup_learning_rate = 0.1  # eta of the first round
drops = [0.5, 0.75]  # when eta falls by 10, as shares of the epochs
reference_batch = None  # cumulative batch at which learning rates hold; None: not scaled
weight_decay = 1e-4  # L2
dirichlet_alpha = None  # class skew among clients; None: IID
precision = "fp32"  # fp32 or bf16 passes
phi_global = None  # share kept by the global mask; None: the scheme's own
phi_local = None  # share kept by each local mask; None: the scheme's own
phi_down = None  # share kept by the server's mask (-D, ++); None: the scheme's own
phi_min_global = None  # least share of a layer, global mask; None: the scheme's own
phi_min_local = None  # least share of a layer, local mask; None: the scheme's own
seeds = 1  # how many trials, or a list of seeds
threads = 1  # CPU threads of a run
jobs = 1  # runs side by side
wire = False  # True: every message becomes bytes and is decoded; the same numbers, slower
bad_message = "stop"  # a message that can't be accepted ends the run; "skip": is left out
graph = False  # sparse rounds of static shapes, on a GPU as one CUDA graph
device = "auto"  # auto, cpu or cuda

# %% [markdown]
# ## All runs
#
# The tables share runs: Baseline stands in all three, TCS at η = 0.5 in two.

# %%
shared = lab.notebook_params(globals())
plans = {t: lab.read_params([lab.ROOT / f"params/table{t}.yaml"]) | shared for t in tables}
configs = [config for params in plans.values() for config in lab.plan(params)]
different = len({config.record_name for config in configs})
print(f"{len(configs)} runs (rows × seeds) in {len(tables)} tables, {different} of them different")

# %%
records = lab.run_all(configs, jobs=jobs)

# %% [markdown]
# ## All tables and figures
#
# The executed notebooks stay beside what they made, in `results/<profile>/`.

# %%
folder = lab.results_folder(profile)
source = str(lab.ROOT / "notebooks" / "08_tables_and_curves.ipynb")
for t, params in plans.items():
    output = str(folder / f"table{t}.ipynb")
    _ = papermill.execute_notebook(source, output, params, progress_bar=False, cwd=str(lab.ROOT))
made = sorted(p.name for p in folder.glob("*.*") if p.name.startswith(("table", "figure")))
print("\n".join(made))

# %%
for t, params in plans.items():
    display(Markdown((folder / f"table{t}.md").read_text()))
    display(Image(filename=str(folder / f"figure{params['figure']}.png"), width=700))

# %% [markdown]
# You should see three tables, each over its figure. Bits are per parameter and local iteration:
# the paper's figure, its formula, and what was really counted: up, up with the dense warm-up, down. The last
# column is one client's whole run in megabytes, both ways.
#
# ## Claim

# %%
expected = {f"table{t}.{s}" for t in tables for s in ("csv", "md", "ipynb")}
expected |= {f"figure{params['figure']}.{s}" for params in plans.values() for s in ("png", "svg")}
assert expected <= set(made), f"missing: {sorted(expected - set(made))}"
diverged = [r for r in records if r["status"] == "diverged"]
print(f"{different} runs, {len(diverged)} of them diverged; every table and figure is there")

# %% [markdown]
# ## What we saw

# %%
for record in diverged:
    print(f"{record['config']['scheme']['name']}: {record['reason']}")
final = {}
for r in records:
    key = (r["config"]["scheme"]["name"], r["config"]["learning_rate"])
    final.setdefault(key, r["rows"][-1]["accuracy"] if r["rows"] else float("nan"))
best = max(final, key=lambda key: final[key])
print(f"best: {best[0]} (η = {best[1]:g}) with {100 * final[best]:.2f} % in its first trial")
print(f"Baseline: {100 * final[('Baseline', 0.1)]:.2f} %")

# %% [markdown]
# Where these numbers fit the paper's and where they do not is the subject of README; what each scheme
# does is told by the notebooks 01 to 07.

# %%
made_by = records[0]["provenance"]
print(f"core {made_by['core_sha256'][:12]} · torch {made_by['torch']} · {made_by['dataset']}")
