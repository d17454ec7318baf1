"""What sparsification through the hook costs each optimizer, by the trainings of params/optimizers.yaml.

`uv run tcs queue params/optimizers.yaml` makes the trainings that are missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, cast

import pandas as pd
import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from tcs_core import Client, Known, NotFiniteError, Scheme, Server, kept, layer_sizes
from tcs_lab.runs.index import find_records
from tcs_lab.runs.jobs import Job, Tell
from tcs_lab.runs.plans import Planning, Stage, read_plan, widen_search
from tcs_lab.runs.records import Record, git_state, provenance, results_folder
from tcs_lab.studies.power_sgd import PowerSGD
from tcs_lab.support.errors import reject_unknown
from tcs_lab.support.paths import ROOT
from tcs_lab.tables.analysis import Comparison, Estimate
from tcs_lab.tasks.images import generator_for
from tcs_lab.tasks.text import GPT, load_text
from tcs_lab.training.configuration import Fraction, PositiveNumber, Seed, WholeNumber

PLAN = ROOT / "params" / "optimizers.yaml"
_FIRST_WEIGHTS, _WINDOWS = 0, 1  # purposes of random numbers
_SETTINGS = ("ranks", "width", "context", "batch_size", "dense_steps", "weight_decay", "momentum",
             "beta_2")  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What is compared: an optimizer and a scheme of the plan, with or without momentum correction."""

    optimizer: str
    scheme: str
    corrected: bool = False

    def __str__(self) -> str:
        return f"{self.optimizer}{' corrected' if self.corrected else ''}, {self.scheme}"

    @property
    def file_name(self) -> str:
        """The setup as it stands in the names of files."""
        corrected = "-corrected" if self.corrected else ""
        scheme = self.scheme.replace(" %", "").replace(" ", "-")
        return f"{self.optimizer}{corrected}-{scheme}"


# The plan, and its trainings as jobs ──────────────────────────────────────────────────────────────


class HookScheme(BaseModel, extra="forbid", frozen=True):
    """A scheme of the hook: the fractions of the entries that its two masks keep."""

    phi_global: Fraction | None
    phi_local: Fraction


class PowerSGDScheme(BaseModel, extra="forbid", frozen=True):
    """PowerSGD in place of a scheme of the hook, with the rank of its approximation."""

    rank: WholeNumber


class RateSweep(BaseModel, extra="forbid", frozen=True):
    """How each optimizer's rate is found, by the final test loss: these rates first, then others beyond
    them while the best one is the smallest or the largest."""

    seed: Seed
    steps: WholeNumber
    rates: dict[str, Annotated[list[PositiveNumber], Field(min_length=1)]]


class GPTSettings(BaseModel):
    """Settings that the trainings of a GPT with several optimizers and schemes have in common."""

    seeds: Annotated[list[Seed], Field(min_length=1)]
    ranks: WholeNumber
    width: WholeNumber
    context: WholeNumber
    batch_size: WholeNumber  # windows in one step of a rank
    dense_steps: WholeNumber
    sparse_steps: WholeNumber
    test_every: WholeNumber
    weight_decay: Annotated[float, Field(ge=0)]  # of AdamW alone
    momentum: Annotated[float, Field(ge=0, lt=1)]
    beta_2: Annotated[float, Field(ge=0, lt=1)]
    schemes: Mapping[str, HookScheme | PowerSGDScheme | None]
    optimizers: Annotated[list[Literal["AdamW", "SGD", "momentum"]], Field(min_length=1)]
    corrected: dict[str, list[str]]

    @model_validator(mode="after")
    def _fit_together(self) -> GPTSettings:
        if self.schemes and self.schemes.get("dense", "") is not None:
            raise ValueError("schemes: got no `dense` that is null, allowed: one, to compare with")
        reject_unknown(self.corrected, self.optimizers, "optimizer in corrected")
        for name in (scheme for schemes in self.corrected.values() for scheme in schemes):
            if not isinstance(self.schemes.get(name), HookScheme):
                raise ValueError(
                    f"corrected: got {name}, allowed: a scheme with phi_global and phi_local"
                )
        return self

    @property
    def steps(self) -> int:
        """The number of steps of a training."""
        return self.dense_steps + self.sparse_steps

    @property
    def settings(self) -> dict[str, Any]:
        """What a training depends on besides its setup, seed, rate and length."""
        return {name: getattr(self, name) for name in _SETTINGS}

    @property
    def setups(self) -> list[Setup]:
        """All setups, in the order in which the trainings of a seed are made."""
        plain = [Setup(o, scheme) for scheme in self.schemes for o in self.optimizers]
        return plain + [Setup(o, s, True) for o, schemes in self.corrected.items() for s in schemes]


class HookStage(GPTSettings, Stage):
    """Trainings of a small GPT: first a sweep for the rate of each optimizer, then all trainings, seed by
    seed."""

    kind: str = "studies.optimizers"
    sweep: RateSweep
    schemes: dict[str, HookScheme | None]

    @model_validator(mode="after")
    def _is_whole(self) -> HookStage:
        if missing := set(self.optimizers) - set(self.sweep.rates):
            raise ValueError(
                f"sweep: rates: got none for {min(missing)}, allowed: a list for each optimizer"
            )
        return self

    def plan_jobs(self, planning: Planning) -> list[HookTraining]:
        tried = self._try_all(planning)
        sweeps = [self.sweep_job(name, rate) for name, rates in tried.items() for rate in rates]
        if not _are_known(tried):
            return sweeps
        return sweeps + self._trainings({name: _best_rate(rates) for name, rates in tried.items()})

    def jobs_to_follow(self, planning: Planning) -> list[HookTraining]:
        if _are_known(self._try_all(planning)):
            return []
        return self._trainings({name: rates[0] for name, rates in self.sweep.rates.items()})

    def _try_all(self, planning: Planning) -> dict[str, dict[float, float | None]]:
        return {name: self.try_rates(name, planning.results) for name in self.optimizers}

    def _trainings(self, rates: dict[str, float]) -> list[HookTraining]:
        return [
            HookTraining(self, setup, seed, rates[setup.optimizer], self.steps)
            for seed in self.seeds
            for setup in self.setups
        ]

    def sweep_job(self, optimizer: str, rate: float) -> HookTraining:
        dense = Setup(optimizer, "dense")
        return HookTraining(self, dense, self.sweep.seed, rate, self.sweep.steps, is_sweep=True)

    def try_rates(
        self, optimizer: str, results: str | Path | None = None
    ) -> dict[float, float | None]:
        """Return the rates that the sweep of one optimizer tries, each with its training's score. The list
        is widened until the best rate is neither the smallest nor the largest."""
        return widen_search(
            self.sweep.rates[optimizer],
            lambda rate: self.sweep_job(optimizer, rate).score(results),
            lambda rate, side: next_rate(rate, 3.0**side),
        )


def _are_known(tried: dict[str, dict[float, float | None]]) -> bool:
    return not any(None in rates.values() for rates in tried.values())


def _best_rate(tried: dict[float, Any]) -> float:
    return max(tried, key=lambda rate: tried[rate])


@dataclass(frozen=True)
class HookTraining(Job):
    """One training, with a row for each time that it is tested."""

    pattern = "hook/{stage}/*.json"
    stage: Any  # a HookStage, or another stage with GPTSettings
    setup: Setup
    seed: int
    rate: float
    steps: int
    is_sweep: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        shares, setup = self.stage.schemes[self.setup.scheme], self.setup
        return {
            "optimizer": setup.optimizer, "scheme": setup.scheme, "corrected": setup.corrected,
            "shares": shares and shares.model_dump(), "seed": self.seed, "rate": self.rate,
            "steps": self.steps, "settings": self.stage.settings,
        }  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.setup}, rate {self.rate:g}, seed {self.seed}"

    @property
    def length(self) -> int:  # type: ignore[override]
        return -(-self.steps // self.stage.test_every)

    def describe(self, row: dict[str, Any]) -> str:
        return f"{self.name}, step {row['step']}/{self.steps}, test loss {row['loss']}"

    def path(self, results: str | Path | None = None) -> Path:
        name = f"{self.setup.file_name}-{self.seed}.json"
        if self.is_sweep:
            name = f"sweep-{self.setup.optimizer}-{self.rate:g}.json"
        return results_folder("hook", results) / self.stage.stage / name

    def make(self, tell: Tell = None) -> Record:
        """Train on one thread. The record has the test losses; one that is not finite is None. After a
        gradient that is not finite, the training ends."""
        git_state()  # read now, since the code may be edited during the training
        windows, losses = self.make_windows(), list[list[Any]]()
        ends = [time.perf_counter()]

        def watch(step: int, model: nn.Module) -> None:
            if step == self.steps or step % self.stage.test_every == 0:
                loss = windows.test_loss(model)
                losses.append([step, round(loss, 6) if math.isfinite(loss) else None])
                ends.append(time.perf_counter())
                if tell:
                    row = {"epoch": len(losses), "step": step, "loss": losses[-1][1]}
                    tell(row | {"seconds": ends[-1] - ends[-2]})

        diverged, threads = None, torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            train(self.stage, self.setup, self.seed, self.rate, self.steps, watch, windows)
        except NotFiniteError as error:
            diverged = str(error)
        finally:
            seconds, made = round(time.perf_counter() - ends[0], 1), provenance()
            torch.set_num_threads(threads)
        text = {"dataset": "text", "fingerprint": load_text().fingerprint}
        return self.identity | {
            "losses": losses, "diverged": diverged, "seconds": seconds, "provenance": made | text,
        }  # fmt: skip

    def make_windows(self) -> Windows:
        """Make the windows of the text that it trains on, and of the text that it is tested on."""
        return Windows(self.stage, self.seed)

    def score(self, results: str | Path | None = None) -> float | None:
        """Return minus the final test loss, or None if the training is not made yet."""
        return -final_loss(self.read(results)) if self.is_made(results) else None

    def seconds_alone(self, results: str | Path | None = None) -> float | None:
        """Estimate the seconds of this training by those that are made."""
        there = find_records(HookTraining, results, stage=self.stage.stage).values()
        paces = [record["seconds"] / record["steps"] for record in there]
        return median(paces) * self.steps if paces else None

    @classmethod
    def divergence(cls, record: Record) -> str | None:
        return record["diverged"]

    @classmethod
    def facts(cls, record: Record, path: Path) -> dict[str, Any]:
        """Return what a record is searched by: its own fields, and its stage, the name of the folder."""
        return record | {"stage": path.parent.name}


def final_loss(record: Record) -> float:
    """Return the final test loss, which is infinite for a training that diverged."""
    if record["diverged"] or record["losses"][-1][1] is None:
        return math.inf
    return record["losses"][-1][1]


def next_rate(rate: float, factor: float) -> float:
    """Multiply a rate by about a factor, so that it has one digit, as in 1, 3, 10."""
    return float(f"{rate * factor:.0e}")


# One training ─────────────────────────────────────────────────────────────────────────────────────


class MomentumCorrection(Client):
    """A client that accumulates momentum before compression, and forgets it where it was sent (DGC)."""

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


class Averager:
    """Turns the gradients of all ranks, each (D,), into what every rank gets, as the hook does it."""

    def __init__(
        self, stage: GPTSettings, setup: Setup, shares: HookScheme | None, sizes: list[int]
    ):
        scheme = Scheme("through the hook", "TCS", **(shares.model_dump() if shares else {}))
        self.known, self.step = Known(scheme, sizes), 0
        self.dense_steps = stage.dense_steps if shares else None  # None: all steps are dense
        self.server = Server(self.known)
        ranks = range(stage.ranks)
        self.clients = [self._make_client(stage, setup, n) for n in ranks]

    def _make_client(self, stage: GPTSettings, setup: Setup, n: int) -> Client:
        if not setup.corrected:
            return Client(self.known, n)
        # as the optimizers accumulate momentum: g + 0.9 u in SGD, 0.1 g + 0.9 u in AdamW
        share = 1.0 - stage.momentum if setup.optimizer == "AdamW" else 1.0
        return MomentumCorrection(self.known, n, stage.momentum, share)

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


def make_averager(
    stage: GPTSettings, setup: Setup, model: nn.Module
) -> Callable[[list[Tensor]], Tensor]:
    """Make the function that takes the gradients of all ranks, each (D,), and returns what every rank
    gets."""
    setting = stage.schemes[setup.scheme]
    if isinstance(setting, PowerSGDScheme):
        shapes = [p.shape for p in model.parameters()]
        return PowerSGD(setting.rank, shapes, stage.dense_steps)
    return Averager(stage, setup, setting, layer_sizes(model))


def make_model(stage: GPTSettings, seed: int) -> nn.Module:
    """Make the GPT with its first weights."""
    with torch.random.fork_rng(devices=[]):
        first = torch.randint(2**31, (), generator=generator_for(seed, _FIRST_WEIGHTS))
        torch.default_generator.manual_seed(int(first))
        return GPT(load_text().classes, stage.width, stage.context)


def make_optimizer(stage: GPTSettings, setup: Setup, model: nn.Module, rate: float) -> Any:
    """Make the optimizer of a setup. With momentum correction it has no momentum."""
    momentum = 0.0 if setup.corrected else stage.momentum
    if setup.optimizer == "AdamW":
        betas, decay = (momentum, stage.beta_2), stage.weight_decay
        return torch.optim.AdamW(model.parameters(), rate, betas, weight_decay=decay, fused=True)
    if setup.optimizer == "SGD":
        momentum = 0.0
    return torch.optim.SGD(model.parameters(), rate, momentum, fused=True)


def rate_factor(step: int, dense_steps: int, steps: int) -> float:
    """Return the factor of the rate: it rises over the dense steps, and then falls to zero."""
    if step < dense_steps:
        return (step + 1) / dense_steps
    return (steps - step) / (steps - dense_steps)


class Windows:
    """Windows of text (B, T + 1) int64 for training and for the test: T characters and the next one.

    `train` and `test` are lists of texts, each (characters,) int64; without them, those of
    `load_text` are used.
    """

    def __init__(
        self, stage: GPTSettings, seed: int,
        train: list[Tensor] | None = None, test: list[Tensor] | None = None,
    ):  # fmt: skip
        self.train = torch.cat(load_text().train if train is None else train)
        self.seed, self.size = seed, stage.batch_size
        self.window = torch.arange(stage.context + 1)
        tests = torch.cat(load_text().test if test is None else test)
        self.tests = tests.unfold(0, len(self.window), stage.context)

    def draw(self, step: int, rank: int) -> Tensor:
        generator = generator_for(self.seed, _WINDOWS, step, rank)
        most = len(self.train) - len(self.window) + 1
        return self.train[torch.randint(most, (self.size, 1), generator=generator) + self.window]

    def test_loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            losses = [
                float(measure_loss(model, part)) * len(part) for part in self.tests.split(256)
            ]
        return sum(losses) / len(self.tests)


def measure_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the loss in nats per character."""
    scores = model(windows[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def train(
    stage: GPTSettings, setup: Setup, seed: int, rate: float, steps: int,
    watch: Callable[[int, nn.Module], None] = lambda step, model: None,
    windows: Windows | None = None,
) -> nn.Module:  # fmt: skip
    """Train all ranks in one process. Return the model.

    `watch` is called after every step. Raises NotFiniteError if the training diverges.
    """
    model, windows = make_model(stage, seed), windows or Windows(stage, seed)
    parameters = list(model.parameters())
    sizes = layer_sizes(model)
    average = make_averager(stage, setup, model)
    optimizer = make_optimizer(stage, setup, model, rate)
    for step in range(steps):
        gradients = []
        for rank in range(stage.ranks):
            optimizer.zero_grad()
            measure_loss(model, windows.draw(step, rank)).backward()
            gradients.append(torch.cat([cast(Tensor, p.grad).flatten() for p in parameters]))
        average_D = average(gradients)
        for p, part in zip(parameters, average_D.split(sizes), strict=True):
            cast(Tensor, p.grad).copy_(part.view_as(p))
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, stage.dense_steps, steps)
        optimizer.step()
        watch(step + 1, model)
    return model


# Judgement, by the rules at the top of the plan ───────────────────────────────────────────────────────────


def bytes_per_step(shares: HookScheme | None, sizes: list[int]) -> int:
    """Count the bytes that a rank hands to collectives in a step after the dense ones, as the hook does."""
    dimension = sum(sizes)
    if shares is None:
        return 4 * dimension
    shared = kept(shares.phi_global, dimension) if shares.phi_global else 0
    flags = len(sizes) + 1
    return 4 * (shared + flags) + 8 * min(kept(shares.phi_local, dimension), dimension - shared)


class Costs:
    """The trainings of the plan that are made, and what sparsification costs in them."""

    def __init__(self, plan: str | Path = PLAN, results: str | Path | None = None):
        read = read_plan(plan)
        (stage,) = (stage for stage in read.stages if isinstance(stage, HookStage))
        self.stage, bounds = stage, read.analysis
        self.no_cost, self.worth_it = bounds["nothing"], bounds["worth_it"]
        self.records = self._find_records(results)
        self.planned = len(stage.setups) * len(stage.seeds)
        losses = {run: final_loss(record) for run, record in self.records.items()}
        self.diverged = {setup for (setup, _), loss in losses.items() if loss == math.inf}
        self.losses = {run: loss for run, loss in losses.items() if run[0] not in self.diverged}
        self.comparison = Comparison(self.losses, {})
        self.sizes = layer_sizes(make_model(stage, 0))

    def _find_records(self, results: str | Path | None) -> dict[tuple[Setup, int], Record]:
        """Find the records in the order of the plan, whatever their rates. Raises ValueError for one with
        other settings."""
        stage, there = self.stage, dict[tuple[Setup, int], Record]()
        found = find_records(HookTraining, results, stage=stage.stage, steps=stage.steps)
        for path, record in found.items():
            setup = Setup(record["optimizer"], record["scheme"], record["corrected"])
            if setup in stage.setups and record["seed"] in stage.seeds:
                job = HookTraining(stage, setup, record["seed"], record["rate"], stage.steps)
                job.check(record, path)
                there[setup, job.seed] = record
        wanted = [(setup, seed) for seed in stage.seeds for setup in stage.setups]
        return {run: there[run] for run in wanted if run in there}

    def mean_loss(self, setup: Setup) -> float:
        found = [loss for (of, _), loss in self.losses.items() if of == setup]
        return sum(found) / len(found) if found else math.inf

    def compare(self, signs: dict[Setup, float]) -> Estimate:
        return self.comparison.estimate(signs, 0.95)

    def cost(self, setup: Setup) -> Estimate:
        """Estimate the cost of a setup: its loss minus that of the same optimizer, dense."""
        return self.compare({setup: 1.0, Setup(setup.optimizer, "dense"): -1.0})

    def judge(self, cost: Estimate) -> str:
        if cost.high < self.no_cost:
            return "nothing"
        return "costs" if cost.low > self.no_cost else "open"

    def table(self) -> pd.DataFrame:
        rows = []
        for setup in self.stage.setups:
            found = [record for (of, _), record in self.records.items() if of == setup]
            if not found:
                continue
            row = {"Optimizer": setup.optimizer + (", corrected" if setup.corrected else ""),
                   "Scheme": setup.scheme, "n": len(found),
                   "Bytes per step": f"{bytes_per_step(self.stage.schemes[setup.scheme], self.sizes):,}",
                   "Test loss": f"{self.mean_loss(setup):.3f}", "Cost": "", "Verdict": ""}  # fmt: skip
            if setup.scheme != "dense" and setup not in self.diverged:
                cost = self.cost(setup)
                row |= {"Cost": f"{cost.value:+.3f} ± {cost.half:.3f}", "Verdict": self.judge(cost)}
            rows.append(row)
        return pd.DataFrame(rows)

    def recommend(self, scheme: str) -> tuple[Setup, Setup, Estimate]:
        """Return the best setup with this scheme, the best dense one, and the difference of their losses."""
        there = [setup for setup in self.stage.setups if math.isfinite(self.mean_loss(setup))]
        best = min((setup for setup in there if setup.scheme == scheme), key=self.mean_loss)
        dense = min((setup for setup in there if setup.scheme == "dense"), key=self.mean_loss)
        return best, dense, self.compare({best: 1.0, dense: -1.0})

    def advise(self, scheme: str) -> str:
        best, dense, gap = self.recommend(scheme)
        worth_it = gap.high <= self.worth_it
        what = f"{best}" if worth_it else "don't, in a training of this length"
        lead = "" if worth_it else f"; best is {best}"
        return f"{scheme}: {what}{lead} ({gap.value:+.3f} ± {gap.half:.3f} against {dense})"
