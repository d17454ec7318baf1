"""Loss and bytes of different settings of the DDP hook, by the trainings of params/hook_plan.yaml.

Each setting is trained at a rate of its own, which is tuned on validation text. The trainings are
those of `tcs_lab.studies.optimizers`, on a part of its text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import pandas as pd
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from tcs_core import layer_sizes
from tcs_lab.runs.plans import Plan, Planning, Stage, read_plan, widen_search
from tcs_lab.runs.records import results_folder
from tcs_lab.studies.optimizers import (
    GPTSettings,
    HookScheme,
    HookTraining,
    PowerSGDScheme,
    Setup,
    Windows,
    bytes_per_step,
    final_loss,
    make_model,
)
from tcs_lab.studies.power_sgd import count_entries
from tcs_lab.support.paths import ROOT
from tcs_lab.tables.analysis import Comparison, Estimate
from tcs_lab.tables.tables import format_interval
from tcs_lab.tasks.text import load_text
from tcs_lab.training.configuration import PositiveNumber, Seed

PLAN = ROOT / "params" / "hook_plan.yaml"
_PARTS = 9  # the last part of the training text of `load_text` is the validation text
_CHOSEN_TCS = 3
_CHOSEN = 3 + _CHOSEN_TCS  # with dense, PowerSGD and top-K

Setting = HookScheme | PowerSGDScheme | None


class RateTuning(BaseModel, extra="forbid", frozen=True):
    """How the rate of each setup is found. All `rates` of its optimizer are tried with one seed. While
    the best one is the smallest or the largest, another one is tried, a `factor` beyond it."""

    seed: Seed
    factor: Annotated[float, Field(gt=1)]
    rates: dict[str, Annotated[list[PositiveNumber], Field(min_length=1)]]


class FrontierStage(GPTSettings, Stage):
    """Trainings of a GPT. The rate of every setup is tuned on validation text. With the best rate, all
    `seeds` are trained and tested on test text.

    A stage either lists its `schemes`, or it trains the setups that `choose_setups` chooses by the
    records of an earlier stage, `chosen_from`, among those with this stage's one optimizer. `minutes` is
    the time that one training is expected to take if nothing else runs.
    """

    kind: str = "studies.frontier"
    minutes: PositiveNumber
    tuning: RateTuning
    chosen_from: str | None = None
    schemes: dict[str, HookScheme | PowerSGDScheme | None] = Field(default_factory=dict)
    corrected: dict[str, list[str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_whole(self) -> FrontierStage:
        if bool(self.schemes) == bool(self.chosen_from):
            got = "both" if self.schemes else "neither"
            raise ValueError(f"schemes, chosen_from: got {got}, allowed: exactly one of them")
        if self.tuning.seed in self.seeds:
            got = f"got {self.tuning.seed}, the seed of the tuning"
            raise ValueError(f"seeds: {got}, allowed: other seeds")
        if missing := set(self.optimizers) - set(self.tuning.rates):
            raise ValueError(
                f"tuning: rates: got none for {min(missing)}, allowed: a list for each optimizer"
            )
        return self

    def check(self, plan: Plan) -> None:
        if self.chosen_from is None:
            return
        first = self._find_first(plan)
        kinds = {kind_of(setting) for setting in first.schemes.values()} if first else set()
        if first is None or not {"dense", "PowerSGD", "top-K", "TCS"} <= kinds:
            got = f"stage {self.stage}: chosen_from: got {self.chosen_from}"
            raise ValueError(f"{got}, allowed: a stage that trains dense, PowerSGD, top-K and TCS")
        if len(self.optimizers) != 1 or self.optimizers[0] not in first.optimizers:
            got = f"stage {self.stage}: optimizers: got {', '.join(self.optimizers)}"
            raise ValueError(
                f"{got}, allowed with chosen_from: one of {', '.join(first.optimizers)}"
            )

    def _find_first(self, plan: Plan) -> FrontierStage | None:
        stages = (s for s in plan.stages if isinstance(s, FrontierStage))
        return next((s for s in stages if s.stage == self.chosen_from), None)

    def plan_jobs(self, planning: Planning) -> list[FrontierTraining]:
        """Return the trainings, optimizer by optimizer: first those that tune, then those that score, seed by
        seed."""
        stage, setups = self._resolve(planning)
        jobs = []
        for optimizer in self.optimizers:
            group = [setup for setup in setups if setup.optimizer == optimizer]
            tried = {setup: stage.try_rates(setup, planning.results) for setup in group}
            jobs += [stage.make_tuning_job(setup, rate) for setup in group for rate in tried[setup]]
            chosen = {setup: _best_rate(tried[setup]) for setup in group}
            jobs += [
                stage.make_scoring_job(setup, seed, rate)
                for seed in self.seeds
                for setup, rate in chosen.items()
                if rate is not None
            ]
        return jobs

    def jobs_to_follow(self, planning: Planning) -> list[FrontierTraining]:
        stage, setups = self._resolve(planning)
        tuned = list[FrontierTraining]()
        if setups:
            unknown = [s for s in setups if stage.choose_rate(s, planning.results) is None]
        else:  # six of the first stage's settings stand in for those that are not chosen yet
            unknown = [
                Setup(self.optimizers[0], scheme) for scheme in list(stage.schemes)[:_CHOSEN]
            ]
            tuned = [stage.make_tuning_job(s, r) for s in unknown for r in self._first_rates(s)]
        scored = [
            stage.make_scoring_job(setup, seed, self._first_rates(setup)[0])
            for seed in self.seeds
            for setup in unknown
        ]
        return tuned + scored

    def _resolve(self, planning: Planning) -> tuple[FrontierStage, list[Setup]]:
        """Return this stage with its schemes, and its setups: none while they are not chosen yet."""
        first = self._find_first(planning.plan)
        if first is None:
            return self, self.setups
        stage = self.model_copy(update={"schemes": first.schemes})
        of_this = [setup for setup in first.setups if setup.optimizer in self.optimizers]
        losses = {setup: first.mean_loss(setup, planning.results) for setup in of_this}
        known = {setup: loss for setup, loss in losses.items() if loss is not None}
        if len(known) < len(losses):
            return stage, []
        return stage, choose_setups(known, first.schemes, make_model(self, seed=0))

    def _first_rates(self, setup: Setup) -> list[float]:
        return self.tuning.rates[setup.optimizer]

    def make_tuning_job(self, setup: Setup, rate: float) -> FrontierTraining:
        return FrontierTraining(self, setup, self.tuning.seed, rate, self.steps, is_sweep=True)

    def make_scoring_job(self, setup: Setup, seed: int, rate: float) -> FrontierTraining:
        return FrontierTraining(self, setup, seed, rate, self.steps)

    def try_rates(
        self, setup: Setup, results: str | Path | None = None
    ) -> dict[float, float | None]:
        """Return the rates that are tried for a setup, each with its training's score on validation text."""
        return widen_search(
            self._first_rates(setup),
            lambda rate: self.make_tuning_job(setup, rate).score(results),
            lambda rate, side: float(f"{rate * self.tuning.factor**side:.4g}"),
        )

    def choose_rate(self, setup: Setup, results: str | Path | None = None) -> float | None:
        """Return the best rate, or None while a training that tunes it is missing."""
        return _best_rate(self.try_rates(setup, results))

    def mean_loss(self, setup: Setup, results: str | Path | None = None) -> float | None:
        """Return the mean loss of all seeds on test text: infinite if one diverged, None while one is missing."""
        rate = self.choose_rate(setup, results)
        if rate is None:
            return None
        jobs = [self.make_scoring_job(setup, seed, rate) for seed in self.seeds]
        if not all(job.is_made(results) for job in jobs):
            return None
        return sum(final_loss(job.read(results)) for job in jobs) / len(jobs)


def _best_rate(tried: Mapping[float, float | None]) -> float | None:
    known = {rate: score for rate, score in tried.items() if score is not None}
    return max(known, key=lambda rate: known[rate]) if len(known) == len(tried) else None


# The settings of the second stage ─────────────────────────────────────────────────────────────────


def choose_setups(
    losses: Mapping[Setup, float], schemes: Mapping[str, Setting], model: nn.Module
) -> list[Setup]:
    """Choose the setups that are trained with a larger `model`, by the mean losses of all setups of one
    optimizer in the first stage.

    1. Of a scheme that was trained with and without momentum correction, the better one is taken.
    2. Dense, the best PowerSGD and the best top-K are taken.
    3. The three best of TCS are taken of those that hand at most as many bytes a step to collectives
       as the chosen PowerSGD does, counted for the larger model.
    """
    better = dict[str, Setup]()
    for setup in sorted(losses, key=lambda setup: losses[setup]):
        better.setdefault(setup.scheme, setup)
    ranked = {kind: list[Setup]() for kind in ("dense", "PowerSGD", "top-K", "TCS")}
    for scheme, setup in better.items():
        ranked[kind_of(schemes[scheme])].append(setup)
    power = ranked["PowerSGD"][0]
    limit = count_bytes(schemes[power.scheme], model)
    light = [s for s in ranked["TCS"] if count_bytes(schemes[s.scheme], model) <= limit]
    return [ranked["dense"][0], power, ranked["top-K"][0], *light[:_CHOSEN_TCS]]


def kind_of(setting: Setting) -> str:
    """Return the kind of a setting: dense, PowerSGD, top-K or TCS."""
    if setting is None:
        return "dense"
    if isinstance(setting, PowerSGDScheme):
        return "PowerSGD"
    return "top-K" if setting.phi_global is None else "TCS"


def count_bytes(setting: Setting, model: nn.Module) -> int:
    """Count the bytes that a rank hands to collectives in a step after the dense ones."""
    if isinstance(setting, PowerSGDScheme):
        return 4 * sum(count_entries(p.shape, setting.rank) for p in model.parameters())
    return bytes_per_step(setting, layer_sizes(model))


# One training ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FrontierTraining(HookTraining):
    """One training. It is tested on validation text if it tunes a rate (`is_sweep`), else on test text."""

    pattern = "hook/frontier/{stage}/*.json"

    @property
    def identity(self) -> dict[str, Any]:
        return super().identity | {"tested_on": "validation" if self.is_sweep else "test"}

    def path(self, results: str | Path | None = None) -> Path:
        name = self.setup.file_name
        name = f"rate-{name}-{self.rate:g}" if self.is_sweep else f"{name}-{self.seed}"
        return results_folder("hook", results) / "frontier" / self.stage.stage / f"{name}.json"

    def make_windows(self) -> Windows:
        train, validation = split_text()
        return Windows(self.stage, self.seed, train, validation if self.is_sweep else None)

    @property
    def minutes(self) -> float:  # type: ignore[override]
        return self.stage.minutes

    def seconds_alone(self, results: str | Path | None = None) -> float | None:
        return 60 * self.minutes


def split_text() -> tuple[list[Tensor], list[Tensor]]:
    """Split the training text of `load_text` into text for training and text for validation, which is the
    last ninth of every topic. The test text is in neither."""
    texts: Sequence[Tensor] = load_text().train
    cuts = [len(text) - len(text) // _PARTS for text in texts]
    train = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    validation = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    return train, validation


# Judgement, by the rules at the top of the plan ───────────────────────────────────────────────────


class Frontier:
    """The trainings of a stage that score and are made, and what they say about its settings.

    All of them are fitted by one model, loss = setup + seed. Setups of which a training diverged are
    left out, and are named in `diverged`. Raises ValueError for a stage that the plan does not have.
    """

    def __init__(self, stage: str, plan: str | Path = PLAN, results: str | Path | None = None):
        read = read_plan(plan)
        stages = {s.stage: s for s in read.stages if isinstance(s, FrontierStage)}
        if stage not in stages:
            raise ValueError(f"stage: got {stage}, allowed: {', '.join(stages)}")
        self.confidence, self.as_good = read.analysis["confidence"], read.analysis["as_good"]
        self.stage, self.setups = stages[stage]._resolve(Planning(read, {}, {}, results))
        rates = {setup: self.stage.choose_rate(setup, results) for setup in self.setups}
        self.rates = {setup: rate for setup, rate in rates.items() if rate is not None}
        jobs = [
            self.stage.make_scoring_job(setup, seed, rate)
            for setup, rate in self.rates.items()
            for seed in self.stage.seeds
        ]
        self.planned = len(self.stage.seeds) * (len(self.setups) or _CHOSEN)
        records = {(job.setup, job.seed): job.read(results) for job in jobs if job.is_made(results)}
        all_losses = {run: final_loss(record) for run, record in records.items()}
        self.curves = {run: record["losses"] for run, record in records.items()}
        self.made = len(all_losses)
        self.diverged = {setup for (setup, _), loss in all_losses.items() if loss == math.inf}
        self.losses = {run: loss for run, loss in all_losses.items() if run[0] not in self.diverged}
        self.comparison = Comparison(self.losses, {})
        self.model = make_model(self.stage, seed=0)

    @property
    def known(self) -> list[Setup]:
        """All setups with a training that scores, in the order of the plan. Those with a diverged
        training are left out."""
        there = {setup for setup, _ in self.losses}
        return [setup for setup in self.setups if setup in there]

    def mean_loss(self, setup: Setup) -> float:
        """Return the mean test loss of a setup, which is infinite if one of its trainings diverged.

        Raises KeyError if none is made.
        """
        if setup in self.diverged:
            return math.inf
        if not (found := [loss for (of, _), loss in self.losses.items() if of == setup]):
            raise KeyError(str(setup))
        return sum(found) / len(found)

    def bytes_per_step(self, setup: Setup) -> int:
        """Count the bytes that a rank hands to collectives in a step after the dense ones."""
        return count_bytes(self.stage.schemes[setup.scheme], self.model)

    def compare(self, signs: Mapping[Setup, float]) -> Estimate:
        """Estimate a sum of losses with signs, such as {one: 1.0, other: -1.0}; nan if one is missing."""
        if not signs or not set(signs) <= set(self.known):
            return Estimate(confidence=self.confidence)
        return self.comparison.estimate(signs, self.confidence)

    def cost(self, setup: Setup) -> Estimate:
        """Estimate the loss of a setup minus that of dense training by the same optimizer (question 1); nan
        for dense training itself."""
        return self._difference(setup, Setup(setup.optimizer, "dense"))

    def _difference(self, one: Setup, other: Setup | None) -> Estimate:
        """Estimate the loss of one setup minus that of another; nan if they are the same, or if one is missing."""
        return self.compare({} if other is None or one == other else {one: 1.0, other: -1.0})

    def dense_fraction(self, setup: Setup) -> float:
        """Return after which fraction of its steps dense training by the same optimizer had the loss with
        which a setup ends: from means over the seeds, with lines between the tested steps.

        It is an upper bound: a dense training that is planned for fewer steps lets its learning rate fall
        earlier, and ends below this curve. 1 if dense training never has a loss as low; nan if a training
        of either is missing.
        """
        dense = Setup(setup.optimizer, "dense")
        if not {setup, dense} <= set(self.known):
            return math.nan
        curves = [curve for (of, _), curve in self.curves.items() if of == dense]
        steps = [step for step, _ in curves[0]]
        means = [fmean(curve[i][1] for curve in curves) for i in range(len(steps))]
        goal = self.mean_loss(setup)
        if goal >= means[0]:
            return steps[0] / steps[-1]
        for (before, high), (after, low) in pairwise(zip(steps, means, strict=True)):
            if goal >= low:
                return (before + (after - before) * (high - goal) / (high - low)) / steps[-1]
        return 1.0

    def effect_of_correction(self, optimizer: str) -> tuple[Estimate, int]:
        """Estimate the mean change of the loss by momentum correction (question 2), and count the settings of
        which both trainings are there. It helps where the change is below zero."""
        pairs = [
            (Setup(optimizer, scheme), Setup(optimizer, scheme, True))
            for scheme in self.stage.corrected.get(optimizer, [])
        ]
        there = [pair for pair in pairs if set(pair) <= set(self.known)]
        signs = dict[Setup, float]()
        for plain, corrected in there:
            signs |= {plain: -1.0 / len(there), corrected: 1.0 / len(there)}
        return self.compare(signs), len(there)

    @property
    def power_sgd(self) -> Setup | None:
        """The setup with PowerSGD that has the lowest mean loss."""
        found = [s for s in self.known if kind_of(self.stage.schemes[s.scheme]) == "PowerSGD"]
        return min(found, key=self.mean_loss, default=None)

    def against_power_sgd(self, setup: Setup) -> Estimate:
        """Estimate the loss of a setup minus that of PowerSGD; nan for PowerSGD itself."""
        return self._difference(setup, self.power_sgd)

    def is_as_good(self, setup: Setup) -> bool:
        """Return whether a setting of top-K or TCS is at least as good as PowerSGD, at no more bytes
        (question 3)."""
        power = self.power_sgd
        if power is None or self.bytes_per_step(setup) > self.bytes_per_step(power):
            return False
        return self.against_power_sgd(setup).high <= self.as_good

    def tabulate(self, optimizer: str) -> pd.DataFrame:
        """Make the table of an optimizer: a line for each setting, with its loss and what it costs, without and
        with momentum correction."""
        dense = self.bytes_per_step(Setup(optimizer, "dense"))
        table = dict[str, dict[str, str]]()
        for setup in self.known:
            if setup.optimizer != optimizer:
                continue
            size, cost = self.bytes_per_step(setup), self.cost(setup)
            loss, rise = ("corrected: loss", "rise") if setup.corrected else ("Loss", "Rise")
            line = table.setdefault(setup.scheme, {"Setting": setup.scheme})
            line |= {"Bytes per step": f"{size / dense:.1%}", loss: f"{self.mean_loss(setup):.3f}"}
            if setup.scheme != "dense":
                line[rise] = format_interval(cost.value, cost.low, cost.high, "{:+.3f}")
        return pd.DataFrame(list(table.values())).fillna("")
