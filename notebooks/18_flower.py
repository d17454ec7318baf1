# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 · Take TCS into Flower
#
# How does TCS run inside [Flower](https://flower.ai)? Flower runs federations on real machines, but it has no compressor that keeps a state
# from round to round. TCS needs a state: each client keeps its errors, which are what it has not sent yet, and the server and all clients
# keep the shared mask.
#
# **Claim (beyond the paper).** Inside Flower, TCS gives the same model as in one process, bit for bit. This holds in Flower's simulation,
# and also in separate processes, one of which is killed during the run. Flower carries the paper's messages and adds fewer than 100 bytes
# to each.
#
# *Run time*: three to six minutes on two cores; seconds without Flower. *Read before*: [03_tcs](03_tcs.ipynb),
# [10_bits_on_the_wire](10_bits_on_the_wire.ipynb). Flower is an optional dependency. Start JupyterLab with `uv run --extra flower jupyter
# lab` to have it. Without Flower, the cells that need it do nothing.
#
# *How to use it*: the grey bars are folded code cells; click one to open it. The second one holds the parameters. Change them there and run
# all cells again. For example, with `scheme = "TCS-Q5"` the sparse messages should become much shorter, because values have 5 bits instead
# of 32. With `hidden = 512`, the messages should become longer, but Flower should add as many bytes as before. With `warmup = 2`, two of
# the four rounds are dense. In our trial, the clients then sent about twice as many bytes.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import importlib.util
import json
import re
import signal
import tempfile
import time
from pathlib import Path

import pandas as pd
import tcs_lab as lab
import torch
from IPython.display import Markdown, display
from tcs_lab.studies import loopback
from tcs_lab.studies.nodes import Node, Participant, ServerRounds

import tcs_core as tcs

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
scheme = "TCS"  # any scheme without momentum, -GE or a sparse warm-up
clients = 2  # nodes of Flower
rounds = 4  # in total, with those of the warm-up
warmup = 1  # dense rounds at the start
hidden = 256  # units in each of the two hidden layers
local_steps = 3  # SGD steps of each client in a round
learning_rate = 0.1  # of SGD
seed = 0  # of the model and the batches
patience = 600  # seconds that a run may take

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
answer = display(Markdown("*The answer will appear here after the last run.*"), display_id=True)
claim = lab.Statements(globals(), "18_flower")
counts = dict.fromkeys(["clients", "rounds", "warmup", "hidden", "local_steps"], lab.WholeNumber)
positive = dict.fromkeys(["learning_rate", "patience"], lab.PositiveNumber)
lab.check_values(globals(), **counts, **positive, seed=lab.Seed)
FLOWER = (
    importlib.util.find_spec("flwr") is not None and importlib.util.find_spec("ray") is not None
)
if not FLOWER:
    print("Flower is not installed, so only the cells that do not need it will run.")
else:
    print(
        f"This page makes two runs of {rounds} rounds in processes of Flower, which take three to six minutes on two cores."
    )

# %% [markdown]
# ## What you write
#
# You write a *job*. It consists of the scheme, the model, and a function that trains one client's model in place. The model is an ordinary
# module, but it must not contain batch norms, because their statistics are not sent. Your model and your training function need no code for
# Flower or for compression. The function `job(config)` receives Flower's run configuration and returns the job. It can also contain a
# function `done`, which is called on the server after the last round, with the final model and a table of the rounds. The batches are
# computed from the numbers of the client and the round, so that every way of running the job sees the same data.

# %%
JOB = (lab.ROOT / "notebooks/examples/flower_job.py").read_text(encoding="utf-8")
APP = (lab.ROOT / "notebooks/examples/flower_app.py").read_text(encoding="utf-8")
given = {name: globals()[name] for name in ("scheme", "clients", "rounds", "warmup")}
JOB = re.sub(r"(?m)^SETTINGS = .*$", f"SETTINGS = {given!r}", JOB)  # the parameters of this page
settings = f"{hidden}, {local_steps}, {learning_rate}, {seed}"
JOB = re.sub(r"(?m)^WIDTH, .*$", f"WIDTH, LOCAL_STEPS, RATE, SEED = {settings}", JOB)
display(Markdown(f"```python\n{JOB}```"))

# %% [markdown]
# Flower expects a `ClientApp` and a `ServerApp`. Two lines make them from the job, with `tcs_lab.studies.flower`, a module of these
# notebooks. (The package of Flower itself is called `flwr`.) To copy the app, put [flower_job.py](examples/flower_job.py) and
# [flower_app.py](examples/flower_app.py) into the package of a Flower app, whose `pyproject.toml` names `client` and `server`.

# %%
display(Markdown(f"```python\n{APP}```"))

# %% [markdown]
# ## The reference: all clients in one process
#
# `tcs_core.Compressor` holds all clients and the server in one process. The object `participant` below trains the clients one after the
# other, with the model of the job. `participant.theta_D` holds its parameters. The method `participant.difference` trains one client and
# returns by how much the parameters changed. The parameters after the last round are the reference for the runs in Flower.

# %%
task: dict = {}
exec(JOB, task)
plan = task["job"]({"tcs-folder": "."})

participant = Participant(plan)
D, sizes, order = participant.flat.dimension, participant.flat.layer_sizes, participant.flat.order
compressor = tcs.Compressor(scheme, sizes, clients, order=order)
for t in range(rounds):
    deltas_ND = torch.stack([participant.difference(n, t) for n in range(clients)])
    participant.theta_D.add_(compressor.step(deltas_ND, dense=t < warmup))
expected_D, errors_ND = participant.theta_D, compressor.errors_ND
print(
    f"{D:,} parameters, {clients} clients, {rounds} rounds of {scheme} (number of dense ones: {warmup})"
)

# %% [markdown]
# ## Between two messages, a client is a file
#
# Flower may start a new process for every message. It moves a client's `context.state` with each call, and a model is too large for that.
# Therefore each client, which Flower calls a node, has a file of its own. The file holds the parameters theta, the errors, the round, the
# mask and the last message. Flower's state holds only the name and the checksum of the file. A node replaces the whole file after each
# message. If a process is killed, the next one finds either the old file or the new one, but never half of one.
#
# A node finishes a round when it receives the server's message to all clients (line 16 of the paper's Algorithm 2). The core's method for
# this is:

# %%
lab.show_code(tcs.Client.receive)

# %% [markdown]
# The shared mask is not sent, because the server and all clients compute it from the update. Only a node that has missed rounds receives
# theta and the mask, uncompressed. The next cells show this without Flower. The last client does not take part in round 1.


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def show(table):
    """Show a table of whole numbers, with a dash where there is none."""
    text = table.map(lambda number: "–" if pd.isna(number) else f"{int(number):,}")
    display(Markdown(lab.markdown(text.reset_index(names=table.index.name or ""))))


def ask(server, folder, n, work):
    """Send an order to a node, pass its answer to the server, and return the bytes of the order."""
    node, order = Node(plan, n, Path(folder) / f"partition-{n}.pt"), server.order(n)
    server.take(n, node.answer(work(node, order)))
    return sum(len(part) for part in order.values() if isinstance(part, bytes))


# %%
with tempfile.TemporaryDirectory() as folder:
    server, sent = ServerRounds(plan), {}
    for t in range(rounds):
        server.begin()
        here = range(clients - 1) if t == 1 and clients > 1 else range(clients)
        sent[t] = {n: ask(server, folder, n, Node.train) for n in here}
        server.finish()
show(pd.DataFrame(sent).T.rename_axis("round").add_prefix("bytes down to client "))

# %% [markdown]
# In round 0 the server sends nothing, since all clients build the same model from the job. In each later round a client receives the
# server's last message, which is dense after a warm-up round and small after a sparse one. The client that missed a round receives
# everything once, in round 2.
#
# ## Flower's simulation
#
# The simulation runs all nodes on one machine, in worker processes of the library ray. `Loopback` starts a SuperLink, which is Flower's
# server process, on a free port, and stops it when the `with` block ends. Both runs of this page use it. `run` does what `flwr run` does on
# the command line.


# %% jupyter={"source_hidden": true} tags=["remove-input"]
def outcome(folder):
    """Read what a run left: theta of the server and the nodes, errors, and bytes."""
    files = [torch.load(folder / f"partition-{n}.pt", weights_only=True) for n in range(clients)]
    thetas = [torch.load(folder / "theta.pt"), *(file["theta_D"] for file in files)]
    errors = [file["client"]["errors_D"] for file in files]
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    return {"thetas": thetas, "errors": errors, "rows": pd.DataFrame(rows)}


def write_app(folder):
    """Write the app into a folder, with the pyproject.toml that Flower needs."""
    app = loopback.app_folder(folder, APP)
    (app / "tcs_app" / "flower_job.py").write_text(JOB, encoding="utf-8")
    return app


def rounds_sent(file):
    """Return the round of the last message in a node's file, or -1 before the first one."""
    return torch.load(file, weights_only=True)["known"]["round"] if file.exists() else -1


COLUMNS = {
    "up": "messages of the clients",
    "down": "message of the server",
    "Flower up": "Flower's count up",
    "Flower down": "Flower's count down",
}


def show_rows(found):
    """Show the bytes of each round of a run."""
    show(found["rows"].set_index("round")[list(COLUMNS)].rename(columns=COLUMNS))


def waited(run, folder):
    """Wait for a run to end, and return its outcome."""
    run.wait(timeout=patience)  # The exit status is 0 even if the run failed.
    assert (folder / "rows.json").exists(), (folder / "run.log").read_text(encoding="utf-8")[-3000:]
    return outcome(folder)


# %%
results, seconds = {}, {}
if FLOWER:
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.perf_counter()
        app = write_app(folder / "app")
        with loopback.Loopback(folder, simulated=clients) as link:
            results["simulation"] = waited(link.run(app, tcs_folder=name), folder)
        seconds["simulation"] = time.perf_counter() - start
    show_rows(results["simulation"])
    rows = results["simulation"]["rows"]
    sent, dense = rows["up"].sum() + clients * rows["down"].sum(), 2 * 4 * D * clients * rounds
    print(
        f"All messages together have {sent:,.0f} bytes. With dense rounds only, it would be {dense:,}."
    )

# %% [markdown]
# All numbers are bytes. Except for the last row, each row is a round. The messages of the clients are added up. The message of the server
# goes to each client, and is counted once. Flower's counts are sums over all clients. The server's message travels together with the order
# for the next round, so Flower counts it one row later. The last row only brings the message of the last round to the clients.
#
# ## Separate processes, one of which is killed
#
# Now a SuperLink and several SuperNodes, one for each client, run as separate processes on this machine. On several machines you would
# start them with `flower-superlink` and `flower-supernode --superlink HOST:PORT --node-config "partition-id=0"`.
#
# In the middle of the run, as soon as node 0 has written a message to its file, it is killed with `SIGKILL` and started again. For Flower
# it is then a new node with an empty state, but it finds its file by its partition-id. The server first asks it which round it has reached.

# %%
if FLOWER:
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.perf_counter()
        app = write_app(folder / "app")
        with loopback.Loopback(folder) as link:
            for n in range(clients):
                link.node(n)
            run = link.run(app, tcs_folder=name)
            while (
                rounds_sent(file := folder / "partition-0.pt") < rounds // 2 and run.poll() is None
            ):
                time.sleep(0.1)
            link.stop("node0", signal.SIGKILL)
            print(
                f"Node 0 was killed in round {rounds_sent(file)}. Its file has {file.stat().st_size / D:.1f} bytes per parameter."
            )
            link.node(0)
            results["processes"] = waited(run, folder)
        seconds["processes"] = time.perf_counter() - start
    show_rows(results["processes"])

# %% [markdown]
# Here Flower also counts the question to the restarted node and its answer, and perhaps orders to the killed node, which contain the whole
# model and which no node fetches.
#
# ## The claim, checked


# %%
def same(found):
    """Return whether theta and the errors, on the server and all nodes, equal those of one process."""
    thetas = all(torch.equal(theta_D, expected_D) for theta_D in found["thetas"])
    pairs = zip(found["errors"], errors_ND, strict=False)
    return thetas and all(torch.equal(one_D, other_D) for one_D, other_D in pairs)


claim("a sparse message has at most a twentieth of the bytes of a dense one",
      20 * compressor.bytes_up <= 4 * D * clients, f"{compressor.bytes_up // clients:,} bytes")  # fmt: skip
for name, found in results.items():
    claim(f"{name}: theta and errors are those of one process, bit for bit", same(found))
if FLOWER:
    around = results["simulation"]["rows"].eval("`Flower up` - up") / clients
    claim(
        "Flower counts at most 100 bytes around a client's message",
        around.max() <= 100,
        f"{around.max():.0f}",
    )

short = compressor.bytes_up // clients
inside = f"In a sparse round, a client's message has {short:,} bytes, while the parameters have {4 * D:,}."
if FLOWER:
    alike = "exactly" if all(map(same, results.values())) else "not exactly"
    answer.update(
        Markdown(f"""**In short.** Inside Flower, TCS trains {alike} the model that it trains in one process: the parameters are {"equal bit for bit" if alike == "exactly" else "not equal"}, in Flower's
simulation and in separate processes, one of which was killed and started again. {inside} Flower adds {around.max():.0f} bytes to a client's message.""")
    )
else:
    answer.update(
        Markdown(f"**In short.** {inside} Flower is not installed here, so nothing ran inside it.")
    )

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())
if not FLOWER:
    print("Flower's simulation and its processes were not tested, because Flower is not installed.")
for name, took in seconds.items():
    print(f"The run '{name}' took {took:.0f} s.")

# %% [markdown]
# Flower may start a new Python process for each message, so these runs take much longer than the training itself. The node that was killed
# continued with its errors from its file. If the server did not use a message of a client, the content of the message remains in the errors
# of this client. In the file of a node, theta and the errors take eight bytes per parameter. The node's last message takes four more bytes
# per parameter in a dense round.
#
# This notebook does not show encryption and authentication (Flower provides them with certificates), several machines, or a server that is
# killed (Flower then ends the run).
#
# Without Flower, the clients can run as processes of `torch.distributed`. The file `notebooks/examples/federation.py` shows this. Each
# process is a client and also runs a copy of the server, and the processes exchange only encoded messages. With 4 clients and 50 rounds,
# you start it with `uv run torchrun --nproc-per-node 4 notebooks/examples/federation.py 50`. For DDP,
# [12_real_training](12_real_training.ipynb) shows a hook. To try TCS on your own model first, see
# [15_your_own_model](15_your_own_model.ipynb).

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(f"Made with {lab.describe_core()}: {scheme}, {D:,} parameters, {clients} nodes.")
