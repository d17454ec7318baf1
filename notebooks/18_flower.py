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
# **In short.** Inside Flower, TCS gives the same model as in one process, bit for bit, even if a client is killed and starts again. A sparse
# message has 3,867 bytes instead of 337,972, and Flower adds 50.
#
# **Claim (beyond the paper).** Inside [Flower](https://flower.ai), TCS gives the same model as in one process, bit for bit. This holds in
# Flower's simulation, and also with a SuperLink and SuperNodes that run as separate processes, one of which is killed during the run. Flower
# carries the paper's messages and adds only a few bytes to each.
#
# Flower runs federations on real machines, but it has no compressor that keeps a state. TCS needs one: each client keeps its errors, and
# everybody keeps the shared mask. Three small files of the lab bring the two together. `nodes.py` contains what a client and the server
# keep, `flower.py` wraps it in Flower's apps, and `loopback.py` runs Flower's processes on this machine. Models with batch norm are refused,
# because its statistics are not sent.
#
# *Run time*: about three minutes on two free cores; seconds without Flower. *Read before*: [03_tcs](03_tcs.ipynb),
# [10_bits_on_the_wire](10_bits_on_the_wire.ipynb). Flower is an optional dependency: `uv run --extra flower jupyter lab`. Without it, the
# cells that need Flower say so and do nothing.

# %% jupyter={"source_hidden": true} tags=["remove-input"]
import importlib.util
import json
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

# %% [markdown]
# ## Parameters

# %% jupyter={"source_hidden": true} tags=["parameters", "remove-input"]
scheme = "TCS"  # any without momentum of the server's
clients = 2  # nodes
rounds = 4  # in all
warmup = 1  # dense rounds at the start
hidden = 256  # units of the net's two hidden layers
local_steps = 3  # of SGD, in a round
learning_rate = 0.1  # of SGD
seed = 0  # of the model and the batches
patience = 600  # seconds that a run may take

# %% jupyter={"source_hidden": true} tags=["remove-input"]
lab.check_notebook_params(globals())
claim = lab.Statements(globals(), "18_flower")
counts = dict.fromkeys(["clients", "rounds", "warmup", "hidden", "local_steps"], lab.WholeNumber)
positive = dict.fromkeys(["learning_rate", "patience"], lab.PositiveNumber)
lab.check_values(globals(), **counts, **positive, seed=lab.Seed)
FLOWER = (
    importlib.util.find_spec("flwr") is not None and importlib.util.find_spec("ray") is not None
)
if not FLOWER:
    print("Flower is not here: uv run --extra flower jupyter lab. The rest runs without it.")
else:
    print(
        f"two runs of {rounds} rounds follow, in processes of Flower: about three minutes on two free cores"
    )

# %% [markdown]
# ## What you write
#
# You write a *job*: the scheme, the model, and a function that trains one client's model in place. The model is an ordinary module, and
# nothing in the job knows about Flower or about compression. `job(config)` receives Flower's run configuration. `done` is called on
# the server at the end. The batches are computed from the numbers of the client and the round, so that every way of running the job sees the
# same data.

# %%
GIVEN = {name: globals()[name] for name in (
    "scheme", "clients", "rounds", "warmup", "hidden", "local_steps", "learning_rate", "seed")}  # fmt: skip
TASK = (
    f"GIVEN = {GIVEN!r}"
    + """
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tcs_lab.studies.nodes import FederatedJob

torch.set_num_threads(1)

def model():
    torch.manual_seed(GIVEN["seed"])
    width = GIVEN["hidden"]
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
    return nn.Sequential(*layers)

def train(net, n, t):
    generator = torch.Generator().manual_seed(10_000 * GIVEN["seed"] + 100 * n + t)
    optimizer = torch.optim.SGD(net.parameters(), GIVEN["learning_rate"])
    for _ in range(GIVEN["local_steps"]):
        inputs = torch.randn(32, 64, generator=generator) + 0.3 * n  # each client's own kind
        optimizer.zero_grad()
        cross_entropy(net(inputs), inputs[:, :8].argmax(1)).backward()
        optimizer.step()

def job(config):
    def done(net, rows):
        folder = Path(config["tcs-folder"])
        torch.save(nn.utils.parameters_to_vector(net.parameters()).detach(), folder / "theta.pt")
        (folder / "rows.json").write_text(json.dumps(rows))

    keys = ("scheme", "clients", "rounds", "warmup")
    return FederatedJob(model=model, train=train, done=done, **{key: GIVEN[key] for key in keys})
"""
)

# %% [markdown]
# Flower expects a `ClientApp` and a `ServerApp`. Each of them takes one line. `sized` is one of Flower's *mods*, which are functions around a
# client's call. It only records how much state Flower itself has to carry for a client from call to call.

# %%
APPS = (
    TASK
    + """
from tcs_lab.studies import flower

def sized(message, context, call_next):
    reply = call_next(message, context)
    with (Path(context.run_config["tcs-folder"]) / "state.txt").open("a") as file:
        file.write(f"{flower.size_of(context.state)}\\n")
    return reply

client = flower.client_app(job, mods=[sized])
server = flower.server_app(job)
"""
)

# %% [markdown]
# ## In one process: what all others are compared with
#
# `tcs_core.Compressor` holds all clients and the server in one process. Its result, `half.theta_D` after the last round, is the reference.
# `half.difference` trains one client, starting from theta, and returns the difference of the models.

# %%
task: dict = {}
exec(TASK, task)
plan = task["job"]({"tcs-folder": "."})

half = Participant(plan)
D, sizes, order = half.flat.dimension, half.flat.layer_sizes, half.flat.order
compressor = tcs.Compressor(scheme, sizes, clients, order=order)
for t in range(rounds):
    deltas_ND = torch.stack([half.difference(n, t) for n in range(clients)])
    half.theta_D.add_(compressor.step(deltas_ND, dense=t < warmup))
expected_D, errors_ND = half.theta_D, compressor.errors_ND
print(f"{D:,} parameters, {clients} clients, {rounds} rounds of {scheme}, the first {warmup} dense")

# %% [markdown]
# ## A client is a file between two messages
#
# Flower may start a new process for every message. It moves a client's `context.state` with each call, which is good for kilobytes but not for
# a model. Therefore each node has a file of its own, with theta, the errors, the round and the mask. In Flower's state there is only the
# file's name and checksum. The file is read memory-mapped and is replaced as a whole after each message. If a process is killed, the next
# one finds either the old file or the new one, but never half of one.
#
# A node moves on to the next round when it receives the server's message to all clients (line 16 of Alg. 2):

# %%
lab.show_code(tcs.Client.receive)

# %% [markdown]
# The shared mask is never sent, because everybody computes it from the update. Only a node that has missed rounds is sent
# theta and the mask, uncompressed. The next cell shows this without any framework. In one round the last client is away:


# %%
def show(table):
    """Whole numbers, by row; – where there is none."""
    text = table.map(lambda number: "–" if pd.isna(number) else f"{int(number):,}")
    display(Markdown(lab.markdown(text.reset_index(names=table.index.name or ""))))


def ask(server, folder, n, work):
    """One order and its answer; the node is opened from its file."""
    node, order = Node(plan, n, Path(folder) / f"partition-{n}.pt"), server.order(n)
    server.take(n, node.answer(work(node, order)))
    return sum(len(part) for part in order.values() if isinstance(part, bytes))


with tempfile.TemporaryDirectory() as folder:
    server, sent = ServerRounds(plan), {}
    for t in range(rounds):
        server.begin()
        here = range(clients - 1) if t == 1 and clients > 1 else range(clients)
        sent[t] = {n: ask(server, folder, n, Node.train) for n in here}
        server.finish()
show(pd.DataFrame(sent).T.rename_axis("round").add_prefix("bytes down to client "))

# %% [markdown]
# In round 0 the server sends nothing, since all clients build the same model from the job. In each later round a client receives the server's
# last message, which is dense after a warm-up round and small after a sparse one. The client that was away is sent everything, once.
#
# ## Flower's simulation
#
# The simulation uses one machine, with virtual nodes in workers of ray. `Loopback` starts a SuperLink on a free port, and stops it when the
# block ends, whatever happens. `run` does what `flwr run` does on the command line.


# %%
def outcome(folder):
    """Theta on the server and on the nodes, the errors, rows of bytes, the largest state."""
    files = [torch.load(folder / f"partition-{n}.pt", weights_only=True) for n in range(clients)]
    thetas = [torch.load(folder / "theta.pt"), *(file["theta_D"] for file in files)]
    errors = [file["client"]["errors_D"] for file in files]
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    state = max(int(line) for line in (folder / "state.txt").read_text(encoding="utf-8").split())
    return {"thetas": thetas, "errors": errors, "rows": pd.DataFrame(rows), "state": state}


def rounds_sent(file):
    """The round of the last message that a node has written down; -1 before the first."""
    return torch.load(file, weights_only=True)["known"]["round"] if file.exists() else -1


def waited(run, folder):
    run.wait(timeout=patience)  # its exit status is 0 for a run that failed, too
    assert (folder / "rows.json").exists(), (folder / "run.log").read_text(encoding="utf-8")[-3000:]
    return outcome(folder)


# %%
results, seconds = {}, {}
if FLOWER:
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.perf_counter()
        app = loopback.app_folder(folder / "app", APPS)
        with loopback.Loopback(folder, simulated=clients) as link:
            results["simulation"] = waited(link.run(app, tcs_folder=name), folder)
        seconds["simulation"] = time.perf_counter() - start
    show(results["simulation"]["rows"].set_index("round"))

# %% [markdown]
# There is one row per round, in bytes. `up` is the sum of all clients' messages. `down` is the server's one message, which goes to each client.
# The other two columns are what Flower counts for all clients together (`count_bytes` of a message's records). The server's message is
# sent together with the next round's order, so the last row contains only the message of the last round.
#
# ## Real processes, and one is killed
#
# Now a SuperLink and several SuperNodes run as separate processes. On other machines you would start them with `flower-superlink` and
# `flower-supernode --superlink HOST:PORT --node-config "partition-id=0"`. They communicate through a relay that counts the bytes.
#
# In the middle of the run, as soon as node 0 has written a message to its file, it is killed with `SIGKILL` and started again. For
# Flower it is then a new node. The server first asks it which round it has reached.

# %%
if FLOWER:
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.perf_counter()
        app = loopback.app_folder(folder / "app", APPS)
        with loopback.Loopback(folder) as link, loopback.Relay(link.port) as relay:
            for n in range(clients):
                link.node(n, relay.port)
            run = link.run(app, tcs_folder=name)
            while (
                rounds_sent(file := folder / "partition-0.pt") < rounds // 2 and run.poll() is None
            ):
                time.sleep(0.1)
            link.stop("node0", signal.SIGKILL)
            print(
                f"killed in round {rounds_sent(file)}; its file has {file.stat().st_size / D:.1f} bytes a parameter"
            )
            link.node(0, relay.port)
            results["loopback"] = waited(run, folder)
            carried = relay.up, relay.down
        seconds["loopback"] = time.perf_counter() - start
    show(results["loopback"]["rows"].set_index("round"))

# %% [markdown]
# ## Bytes: ours, Flower's, dense
#
# The table adds up all clients and rounds. After the kill, Flower also counts orders to the node that no longer exists, with the whole model
# in them; nobody fetches these. *On the wire* is what the relay counted. It also contains the code of the app, the heartbeats and the repeated
# requests for new messages. These grow with time and not with the size of the model.

# %%
lines = {}
for name, found in results.items():
    rows = found["rows"]
    ours = rows["up"].sum(), clients * int(rows["down"].sum())
    lines[f"{name}: our messages"] = ours
    lines[f"{name}: as Flower counts"] = rows["Flower up"].sum(), rows["Flower down"].sum()
if FLOWER:
    lines["loopback: on the wire"] = carried
lines["dense, every round"] = (4 * D * clients * rounds,) * 2
show(pd.DataFrame(lines, index=["bytes up", "bytes down"]).T)

# %% [markdown]
# ## The claim, checked


# %%
def same(found):
    """Whether theta is everywhere that of one process, and each client's errors are, too."""
    thetas = all(torch.equal(theta_D, expected_D) for theta_D in found["thetas"])
    pairs = zip(found["errors"], errors_ND, strict=False)
    return thetas and all(torch.equal(one_D, other_D) for one_D, other_D in pairs)


claim("a sparse message has at most a twentieth of the bytes of a dense one",
      20 * compressor.bytes_up <= 4 * D * clients, f"{compressor.bytes_up // clients:,} bytes")  # fmt: skip
for name, found in results.items():
    claim(f"{name}: theta and errors are those of one process, bit for bit", same(found))
    claim(
        f"{name}: context.state is a kilobyte at most",
        found["state"] <= 1000,
        f"{found['state']} bytes",
    )
if FLOWER:
    around = results["simulation"]["rows"].eval("`Flower up` - up") / clients
    claim(
        "Flower counts at most 100 bytes around a message",
        around.max() <= 100,
        f"{around.max():.0f}",
    )

# %% [markdown]
# ## What we saw

# %%
print(claim.summary())
if not FLOWER:
    print("not testable here: Flower's simulation and its processes")
for name, took in seconds.items():
    print(f"{name}: {took:.0f} s; Flower starts Python anew for each message")

# %% [markdown]
# The server keeps no client's errors, and no client keeps another's. The node that was killed continued with its own errors. A client that was
# away is sent theta and the mask. If it had sent a message that the server did not use, its content remains in its errors. The file of a node
# contains theta and the errors, which take eight bytes per parameter, and its last message, which takes four more in a dense round.
#
# This notebook does not show encryption and authentication (Flower provides them with certificates), several machines, or a server that is
# killed (Flower then ends the run).
#
# Other ways to leave one process: [12_real_training](12_real_training.ipynb) shows the hook for DDP. To try your own model first, see
# [15_your_own_model](15_your_own_model.ipynb).

# %% jupyter={"source_hidden": true} tags=["remove-input"]
print(
    f"Made with {lab.describe_core()}: {scheme}, {D:,} parameters, {clients} nodes. One run of each (n = 1)."
)
