"""A job for Flower: the scheme, the model, and how one client trains. flower_app.py makes the app of it."""

import json
from pathlib import Path

import torch
from tcs_lab.studies.nodes import FederatedJob
from torch import nn
from torch.nn.functional import cross_entropy

# "scheme" may be any scheme without momentum, -GE or a sparse warm-up.
SETTINGS = {"scheme": "TCS", "clients": 2, "rounds": 4, "warmup": 1}
WIDTH, LOCAL_STEPS, RATE, SEED = 256, 3, 0.1, 0

torch.set_num_threads(1)


def model() -> nn.Module:
    torch.manual_seed(SEED)
    layers = (
        nn.Linear(64, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 8),
    )
    return nn.Sequential(*layers)


def train(net: nn.Module, n: int, t: int) -> None:
    """Train the model of client n in round t, in place."""
    generator = torch.Generator().manual_seed(10_000 * SEED + 100 * n + t)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for _ in range(LOCAL_STEPS):
        inputs = torch.randn(32, 64, generator=generator) + 0.3 * n  # other data for each client
        optimizer.zero_grad()
        cross_entropy(net(inputs), inputs[:, :8].argmax(1)).backward()
        optimizer.step()


def job(config) -> FederatedJob:
    """Return the job, from Flower's run configuration."""

    def done(net, rows):  # on the server, after the last round
        folder = Path(config["tcs-folder"])
        torch.save(nn.utils.parameters_to_vector(net.parameters()).detach(), folder / "theta.pt")
        (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")

    return FederatedJob(model=model, train=train, done=done, **SETTINGS)
