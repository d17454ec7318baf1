"""What sparsification through the hook costs each optimizer: params/optimizers.yaml, run and read.

`uv run tcs optimizers` makes the runs that are missing, one after the other.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn

from tcs_core import Client, Known, NotFiniteError, Scheme, Server, kept, layer_sizes
from tcs_lab.runs.estimates import Expected
from tcs_lab.runs.parameters import read_params
from tcs_lab.runs.records import core_sha256, cpu_name, git_state, results_folder
from tcs_lab.support.files import write_json
from tcs_lab.support.places import ROOT
from tcs_lab.tables.analysis import Comparison, Estimate
from tcs_lab.tasks.images import generator_for
from tcs_lab.tasks.text import GPT, load_text

PLAN = ROOT / "params" / "optimizers.yaml"
_FIRST_WEIGHTS, _WINDOWS = 0, 1  # purposes of random numbers


@dataclass(frozen=True)
class Cell:
    """What is compared: an optimizer, a scheme of the plan, and where the momentum is."""

    optimizer: str
    scheme: str
    corrected: bool = False

    def __str__(self) -> str:
        return f"{self.optimizer}{' corrected' if self.corrected else ''}, {self.scheme}"


def read_plan(path: Path = PLAN) -> dict[str, Any]:
    return read_params([path])


def cells(plan: dict[str, Any]) -> list[Cell]:
    """All cells, in the order in which a seed's runs are made."""
    plain = [
        Cell(optimizer, scheme) for scheme in plan["schemes"] for optimizer in plan["optimizers"]
    ]
    corrected = [
        Cell(o, scheme, True) for o, names in plan["corrected"].items() for scheme in names
    ]
    return plain + corrected


# One training ─────────────────────────────────────────────────────────────────────────────────────


class Corrected(Client):
    """Its momentum is added up before compression, and forgotten where it was sent (DGC)."""

    keeps = ("momentum_D",)

    def __init__(self, known: Known, number: int, momentum: float, share: float):
        super().__init__(known, number)
        self.momentum, self.share = momentum, share
        self.momentum_D = torch.zeros(known.dimension)

    def intended(self, delta_D: Tensor) -> Tensor:
        self.momentum_D.mul_(self.momentum).add_(delta_D, alpha=self.share)
        return super().intended(self.momentum_D)

    def arrived(self, received: Any = None) -> None:
        flight = self.in_flight
        super().arrived(received)
        if flight is not None and not flight.dense:
            self.momentum_D[flight.positions_K] = 0.0


class Averaged:
    """Gradients of all ranks (D,) to what every rank gets, as the hook does it."""

    def __init__(self, plan: dict[str, Any], cell: Cell, sizes: list[int], dense_steps: int):
        shares = plan["schemes"][cell.scheme]
        scheme = Scheme("through the hook", "TCS", **(shares or {}))
        self.known, self.step = Known(scheme, sizes), 0
        self.dense_steps = dense_steps if shares else None  # None: always
        self.server = Server(self.known)
        ranks = range(plan["ranks"])
        self.clients = [self.client(plan, cell, n) for n in ranks]

    def client(self, plan: dict[str, Any], cell: Cell, n: int) -> Client:
        if not cell.corrected:
            return Client(self.known, n)
        # as the optimizer adds them up: g + 0.9 u of SGD, 0.1 g + 0.9 u of AdamW
        share = 1.0 - plan["momentum"] if cell.optimizer == "AdamW" else 1.0
        return Corrected(self.known, n, plan["momentum"], share)

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        self.known.begin(dense=self.dense_steps is None or self.step < self.dense_steps)
        for client, gradient_D in zip(self.clients, gradients, strict=True):
            self.server.add(client.number, client.send(gradient_D))
        average_D, _ = self.server.finish()
        for client in self.clients:
            client.arrived()
        self.known.observe(average_D)
        self.step += 1
        return average_D


def first_model(plan: dict[str, Any], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(
            int(torch.randint(2**31, (), generator=generator_for(seed, _FIRST_WEIGHTS)))
        )
        return GPT(load_text().classes, plan["width"], plan["context"])


def optimizer_of(plan: dict[str, Any], cell: Cell, model: nn.Module, rate: float) -> Any:
    momentum = 0.0 if cell.corrected else plan["momentum"]
    if cell.optimizer == "AdamW":
        betas, decay = (momentum, plan["beta_2"]), plan["weight_decay"]
        return torch.optim.AdamW(model.parameters(), rate, betas, weight_decay=decay, fused=True)
    if cell.optimizer == "SGD":
        momentum = 0.0
    return torch.optim.SGD(model.parameters(), rate, momentum, fused=True)


def rate_factor(step: int, dense_steps: int, steps: int) -> float:
    """Of the rate: it rises over the dense steps, and falls to nothing."""
    if step < dense_steps:
        return (step + 1) / dense_steps
    return (steps - step) / (steps - dense_steps)


class Windows:
    """What ranks read, and the test: characters (B, T) int64 and those that follow them."""

    def __init__(self, plan: dict[str, Any], seed: int):
        text = load_text()
        self.train, self.seed, self.size = torch.cat(text.train), seed, plan["batch_size"]
        self.window = torch.arange(plan["context"] + 1)
        self.tests = torch.cat(text.test).unfold(0, len(self.window), plan["context"])

    def of(self, step: int, rank: int) -> Tensor:
        generator = generator_for(self.seed, _WINDOWS, step, rank)
        most = len(self.train) - len(self.window) + 1
        return self.train[torch.randint(most, (self.size, 1), generator=generator) + self.window]

    def test_loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            losses = [float(loss_of(model, part)) * len(part) for part in self.tests.split(256)]
        return sum(losses) / len(self.tests)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Nats a character."""
    scores = model(windows[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def train(
    plan: dict[str, Any], cell: Cell, seed: int, rate: float, steps: int,
    watch: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> nn.Module:  # fmt: skip
    """All ranks in one process; `watch` is called after every step. NotFiniteError if it diverges."""
    model, windows = first_model(plan, seed), Windows(plan, seed)
    parameters = list(model.parameters())
    sizes = layer_sizes(model)
    averaged = Averaged(plan, cell, sizes, plan["dense_steps"])
    optimizer = optimizer_of(plan, cell, model, rate)
    for step in range(steps):
        gradients = []
        for rank in range(plan["ranks"]):
            optimizer.zero_grad()
            loss_of(model, windows.of(step, rank)).backward()
            gradients.append(torch.cat([cast(Tensor, p.grad).flatten() for p in parameters]))
        average_D = averaged(gradients)
        for p, part in zip(parameters, average_D.split(sizes), strict=True):
            cast(Tensor, p.grad).copy_(part.view_as(p))
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, plan["dense_steps"], steps)
        optimizer.step()
        watch(step + 1, model)
    return model


# Records ──────────────────────────────────────────────────────────────────────────────────────────


def settings_of(plan: dict[str, Any]) -> dict[str, Any]:
    """What a run depends on, beside its cell, seed, rate and length."""
    names = ("ranks", "width", "context", "batch_size", "dense_steps", "weight_decay", "momentum",
             "beta_2")  # fmt: skip
    return {name: plan[name] for name in names}


def folder_of(results: Path | None = None) -> Path:
    return results_folder("hook", results) / "optimizers"


def read_run(path: Path, plan: dict[str, Any], **run: Any) -> dict[str, Any] | None:
    """A run's record; None if it is not made yet. ValueError if it is another plan's, or has
    another value of what is known of the run."""
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    for key, own in ({"settings": settings_of(plan)} | run).items():
        if record[key] != own:
            raise ValueError(f"{path}: {key}: got {record[key]}, allowed: {own}")
    return record


def made(
    path: Path, plan: dict[str, Any], cell: Cell, seed: int, rate: float, steps: int
) -> dict[str, Any]:
    """A run's record, made if it is not there: test losses on the way, None once it diverged."""
    shares = plan["schemes"][cell.scheme]
    record = read_run(path, plan, shares=shares, rate=rate, steps=steps)
    if record is not None:
        return record
    windows, losses, begun = Windows(plan, seed), list[list[Any]](), time.perf_counter()

    def watch(step: int, model: nn.Module) -> None:
        if step == steps or step % plan["test_every"] == 0:
            loss = windows.test_loss(model)
            losses.append([step, round(loss, 6) if math.isfinite(loss) else None])

    diverged = None
    try:
        train(plan, cell, seed, rate, steps, watch)
    except NotFiniteError as error:
        diverged = str(error)
    record = {
        "optimizer": cell.optimizer, "scheme": cell.scheme, "corrected": cell.corrected,
        "shares": shares, "seed": seed, "rate": rate, "steps": steps,
        "settings": settings_of(plan), "losses": losses, "diverged": diverged,
        "seconds": round(time.perf_counter() - begun, 1), "core": core_sha256(), **git_state(),
        "cpu": cpu_name(), "torch": torch.__version__, "text": load_text().fingerprint,
    }  # fmt: skip
    write_json(path, record)
    return record


def final_loss(record: dict[str, Any]) -> float:
    """Infinite for a run that diverged."""
    if record["diverged"] or record["losses"][-1][1] is None:
        return math.inf
    return record["losses"][-1][1]


def best_rate(plan: dict[str, Any], optimizer: str, folder: Path) -> float:
    """The sweep of one optimizer, made where it is not there: its best rate, inside the list."""
    sweep = plan["sweep"]
    losses = dict[float, float]()

    def tried(rate: float) -> None:
        path = folder / f"sweep-{optimizer}-{rate:g}.json"
        record = made(path, plan, Cell(optimizer, "dense"), sweep["seed"], rate, sweep["steps"])
        losses[rate] = final_loss(record)

    for rate in sweep["rates"][optimizer]:
        tried(rate)
    while True:
        best = min(losses, key=lambda rate: losses[rate])
        if best == min(losses):
            tried(next_rate(best, 1 / 3))
        elif best == max(losses):
            tried(next_rate(best, 3))
        else:
            return best


def next_rate(rate: float, factor: float) -> float:
    """About so many times a rate, with one digit: 1, 3, 10."""
    return float(f"{rate * factor:.0e}")


def run_name(cell: Cell, seed: int) -> str:
    words = (
        f"{cell.optimizer}{'-corrected' if cell.corrected else ''}-{cell.scheme.replace(' %', '')}"
    )
    return f"{words.replace(' ', '-')}-{seed}.json"


def runs(plan: dict[str, Any], results: Path | None = None) -> Iterator[tuple[Cell, int, Path]]:
    """All runs of the plan, in their order, seed by seed."""
    for seed in plan["seeds"]:
        for cell in cells(plan):
            yield cell, seed, folder_of(results) / run_name(cell, seed)


# Judged, as the head of the plan says ─────────────────────────────────────────────────────────────


def bytes_a_step(record: dict[str, Any], sizes: list[int]) -> int:
    """What a rank hands to collectives in a step after the dense ones, as the hook counts them."""
    shares, dimension = record["shares"], sum(sizes)
    if not shares:
        return 4 * dimension
    shared = kept(shares["phi_global"], dimension) if shares["phi_global"] else 0
    flags = len(sizes) + 1
    return 4 * (shared + flags) + 8 * min(kept(shares["phi_local"], dimension), dimension - shared)


class Judged:
    """All runs of the plan that are there, and what they come to."""

    def __init__(self, plan: dict[str, Any], results: Path | None = None):
        self.plan, self.records = plan, dict[tuple[Cell, int], dict[str, Any]]()
        self.planned = 0
        for cell, seed, path in runs(plan, results):
            self.planned += 1
            shares, steps = plan["schemes"][cell.scheme], plan["dense_steps"] + plan["sparse_steps"]
            if (record := read_run(path, plan, shares=shares, steps=steps)) is not None:
                self.records[cell, seed] = record
        losses = {run: final_loss(record) for run, record in self.records.items()}
        self.diverged = {str(cell) for (cell, _), loss in losses.items() if loss == math.inf}
        self.losses = {
            run: loss for run, loss in losses.items() if str(run[0]) not in self.diverged
        }
        self.compared = Comparison(self.losses, {})
        self.sizes = layer_sizes(first_model(plan, 0))

    def mean(self, cell: Cell) -> float:
        found = [loss for (of, _), loss in self.losses.items() if of == cell]
        return sum(found) / len(found) if found else math.inf

    def gap(self, signs: dict[Cell, float]) -> Estimate:
        return self.compared.estimate(signs, 0.95)

    def cost(self, cell: Cell) -> Estimate:
        """Against the same optimizer, dense."""
        return self.gap({cell: 1.0, Cell(cell.optimizer, "dense"): -1.0})

    def word(self, cost: Estimate) -> str:
        if cost.high < self.plan["nothing"]:
            return "nothing"
        return "costs" if cost.low > self.plan["nothing"] else "open"

    def table(self) -> pd.DataFrame:
        rows = []
        for cell in cells(self.plan):
            found = [record for (of, _), record in self.records.items() if of == cell]
            if not found:
                continue
            row = {"Optimizer": cell.optimizer + (", corrected" if cell.corrected else ""),
                   "Scheme": cell.scheme, "n": len(found),
                   "Bytes a step": f"{bytes_a_step(found[0], self.sizes):,}",
                   "Test loss": f"{self.mean(cell):.3f}", "Cost": "", "Verdict": ""}  # fmt: skip
            if cell.scheme != "dense" and str(cell) not in self.diverged:
                cost = self.cost(cell)
                row |= {"Cost": f"{cost.value:+.3f} ± {cost.half:.3f}", "Verdict": self.word(cost)}
            rows.append(row)
        return pd.DataFrame(rows)

    def loses_more(self, optimizer: str) -> Estimate:
        """What TCS at 1 % costs it beyond what it costs plain SGD."""
        of = {Cell(optimizer, "TCS 1 %"): 1.0, Cell(optimizer, "dense"): -1.0}
        return self.gap(of | {Cell("SGD", "TCS 1 %"): -1.0, Cell("SGD", "dense"): 1.0})

    def helped(self, cell: Cell) -> Estimate:
        """What correction changes."""
        return self.gap({cell: 1.0, Cell(cell.optimizer, cell.scheme): -1.0})

    def recommended(self, scheme: str, corrected: bool = True) -> tuple[Cell, Cell, Estimate]:
        """The best cell of TCS at this share, the best dense one, and how far apart they are. The
        hook has those that are not `corrected`."""
        there = [cell for cell in cells(self.plan) if math.isfinite(self.mean(cell))]
        asked = [c for c in there if c.scheme == scheme and (corrected or not c.corrected)]
        best = min(asked, key=self.mean)
        dense = min((cell for cell in there if cell.scheme == "dense"), key=self.mean)
        return best, dense, self.gap({best: 1.0, dense: -1.0})

    def advice(self, scheme: str, corrected: bool = True) -> str:
        best, dense, gap = self.recommended(scheme, corrected)
        worth_it = gap.high <= self.plan["worth_it"]
        what = f"{best}" if worth_it else "don't, in a training of this length"
        lead = "" if worth_it else f"; best is {best}"
        return f"{scheme}: {what}{lead} ({gap.value:+.3f} ± {gap.half:.3f} against {dense})"


# All runs ─────────────────────────────────────────────────────────────────────────────────────────


def make_all() -> None:
    """Makes the runs of the plan that are missing, on one thread: first the sweeps of the rates."""
    torch.set_num_threads(1)
    plan, folder = read_plan(), folder_of()
    rates = {optimizer: best_rate(plan, optimizer, folder) for optimizer in plan["optimizers"]}
    print(f"rates: {rates}", flush=True)
    steps = plan["dense_steps"] + plan["sparse_steps"]
    for cell, seed, path in runs(plan):
        record = made(path, plan, cell, seed, rates[cell.optimizer], steps)
        print(f"{cell}, seed {seed}: {final_loss(record):.4f}, {record['seconds']} s", flush=True)


def left_to_make() -> tuple[int, Expected]:
    """How many runs are planned, without what a sweep may add beyond its rates, and what is left."""
    plan, folder = read_plan(), folder_of()
    sweep, steps = plan["sweep"], plan["dense_steps"] + plan["sparse_steps"]
    planned = {
        folder / f"sweep-{optimizer}-{rate:g}.json": sweep["steps"]
        for optimizer, rates in sweep["rates"].items()
        for rate in rates
    } | {path: steps for _, _, path in runs(plan)}
    left = [steps for path, steps in planned.items() if not path.exists()]
    there = [json.loads(path.read_text(encoding="utf-8")) for path in planned if path.exists()]
    if not there:
        return len(planned), Expected(len(left), 0.0, len(left))
    pace = sum(record["seconds"] for record in there) / sum(record["steps"] for record in there)
    return len(planned), Expected(len(left), sum(left) * pace / 3600, 0)
