"""Plans: many jobs, in the order in which they are made.

A plan is a file like params/evidence_plan.yaml (runs that are fixed from the start),
params/fair_plan.yaml (runs whose learning rate is tuned first), params/gpu_plan.yaml (runs of
which the plan says how long they take) or params/optimizers.yaml (jobs of another kind).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import AfterValidator, BaseModel, Field, model_validator

from tcs_lab.runs.jobs import Job, read_jobs
from tcs_lab.runs.parameters import plan, read_params
from tcs_lab.runs.runs import Run
from tcs_lab.support.errors import format_value, shorten, validate
from tcs_lab.support.paths import ROOT
from tcs_lab.training.configuration import PositiveNumber, RunConfig, Seed
from tcs_lab.training.training import measure_accuracy

# The file ─────────────────────────────────────────────────────────────────────────────────────────


def _check_rising(factors: list[float]) -> list[float]:
    if sorted(set(factors)) != factors:
        raise ValueError(f"got {factors}, allowed: numbers in rising order, each once")
    return factors


def _check_span(span: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= span[0] < span[1]:
        raise ValueError(
            f"got {list(span)}, allowed: [first, end], where 0 <= first < end and end itself is left out"
        )
    return span


Factors = Annotated[list[PositiveNumber], Field(min_length=1), AfterValidator(_check_rising)]
ImageSpans = Annotated[
    list[Annotated[tuple[int, int], AfterValidator(_check_span)]], Field(min_length=1)
]


RATES = ("learning_rate", "centralized_learning_rate")  # what is tuned


class Tuning(BaseModel, extra="forbid"):
    """How the schemes of a tuned stage get their learning rates, all of them in the same way.

    A rate is a factor times `learning_rate`, or times `centralized_learning_rate` for centralized
    training. All `factors` are tried with one seed. While the best of those tried is the smallest
    or the largest, the next one of `further` beyond it is tried, too.
    """

    seed: Seed
    learning_rate: PositiveNumber
    centralized_learning_rate: PositiveNumber
    factors: Factors
    further: list[PositiveNumber] = []
    choose_on: ImageSpans  # the tested images by whose accuracy a rate is chosen
    score_on: ImageSpans  # those by which the chosen rate is scored; none of them is in choose_on

    @model_validator(mode="after")
    def _is_fair(self) -> Tuning:
        both = [
            max(chosen[0], scored[0])
            for chosen, scored in itertools.product(self.choose_on, self.score_on)
            if max(chosen[0], scored[0]) < min(chosen[1], scored[1])
        ]
        if both:
            raise ValueError(
                f"score_on: got image {min(both)}, which is in choose_on, too; allowed: other images"
            )
        return self

    @property
    def grid(self) -> list[float]:
        return sorted({*self.factors, *self.further})


class Entry(BaseModel, extra="allow"):
    """What some runs of a stage change in the profile, and how many `minutes` one of them is expected to
    take if it is alone on the machine for which the plan is made."""

    minutes: PositiveNumber | None = None

    @model_validator(mode="after")
    def _has_no_seeds(self) -> Entry:
        if "seeds" in self.changes:
            got = format_value(self.changes["seeds"])
            raise ValueError(f"seeds: got {got}, allowed: none here, but in the stage")
        return self

    @property
    def changes(self) -> dict[str, Any]:
        return self.model_extra or {}


@dataclass(frozen=True)
class Planning:
    """What a stage needs in order to name its jobs: its plan, the plan's profile, the parameters that
    all of its runs get whatever the plan says, and the folder of the records that decide which
    jobs come next."""

    plan: Plan
    profile: Mapping[str, Any]
    changes: Mapping[str, Any]
    results: str | Path | None = None


class Stage(BaseModel, extra="forbid"):
    """A part of a plan. Its jobs are trainings of RunConfigs, unless its `kind` names the module of the
    lab that makes something else (`kind: studies.optimizers`).

    Such a module has a class of jobs and a subclass of this class whose default `kind` is the module's
    name. The subclass says what may stand in the stage and which jobs follow from it. No other file
    has to know about it.
    """

    stage: str
    kind: str = "runs"

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        _STAGES[cls.model_fields["kind"].default] = cls

    def plan_jobs(self, planning: Planning) -> Sequence[Job]:
        """Name the jobs that are known so far, in the order in which they are made."""
        raise NotImplementedError

    def jobs_to_follow(self, planning: Planning) -> Sequence[Job]:
        """Name stand-ins for jobs that cannot be named yet, because they follow from records that are
        still missing. The stand-ins are as many, and about as long."""
        return ()

    def check(self, plan: Plan) -> None:
        """Raise ValueError if the plan lacks something that this stage needs."""


_STAGES: dict[str, type[Stage]] = {}


def _read_stage(given: Any) -> Stage:
    """Read a stage as the class of its kind, whose module is imported if need be."""
    kind = str(given.get("kind", "runs")) if isinstance(given, dict) else "runs"
    if kind not in _STAGES and re.fullmatch(r"[a-z]\w*\.[a-z]\w*", kind):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"tcs_lab.{kind}")
    if kind not in _STAGES:
        allowed = (
            "allowed: runs, or a module of the lab that has stages, such as studies.optimizers"
        )
        raise ValueError(f"kind: got {format_value(kind)}, {allowed}")
    return validate(_STAGES[kind], given, "stage")


class TrainingStage(Stage):
    """Trainings of RunConfigs. Either `runs` says what each run changes of the profile; they are made
    seed by seed, and for each seed one after the other. Or `tune` names schemes whose learning rate
    is tuned first; then they are run with it, seed by seed."""

    seeds: Annotated[list[Seed], Field(min_length=1)]
    runs: Annotated[list[Entry], Field(min_length=1)] | None = None
    tune: Annotated[list[str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> TrainingStage:
        if (self.runs is None) == (self.tune is None):
            given = "both" if self.runs else "neither"
            raise ValueError(f"got {given} of runs and tune, allowed: one of them")
        return self

    def check(self, plan: Plan) -> None:
        if plan.profile is None:
            raise ValueError(f"profile: missing; the runs of stage {self.stage} need it")
        if self.tune and plan.tuning is None:
            raise ValueError(f"tuning: missing; stage {self.stage} needs it, because it says tune")
        if self.tune and plan.tuning and plan.tuning.seed in self.seeds:
            got = f"got {plan.tuning.seed}, with which learning rates are tuned"
            raise ValueError(f"stage {self.stage}: seeds: {got}, allowed: other seeds")

    def plan_jobs(self, planning: Planning) -> Sequence[Run]:
        if self.tune:
            return _tuned_runs(self.searches(planning), self.seeds)
        changes = planning.changes
        return [
            Run(config, entry.minutes)
            for seed in self.seeds
            for entry in self.runs or []
            for config in plan({**planning.profile, **entry.changes, **changes, "seeds": [seed]})
        ]

    def jobs_to_follow(self, planning: Planning) -> Sequence[Run]:
        """Name runs that score a rate that is not chosen yet, with the first rate that is tried."""
        return [
            Run(search.config(search.tuning.factors[0], seed))
            for search in self.searches(planning)
            if None in search.tried().values()
            for seed in self.seeds
        ]

    def searches(self, planning: Planning) -> list[Search]:
        """Return the searches for the learning rates of the stage's schemes."""
        tuning, profile = planning.plan.tuning, {**planning.profile, **planning.changes}
        if tuning is None:
            return []
        return [Search(name, tuning, profile, planning.results) for name in self.tune or []]


def _check_names(stages: list[Stage]) -> list[Stage]:
    names = [stage.stage for stage in stages]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"got two stages of the name {twice[0]}, allowed: each name once")
    return stages


def _check_slowdowns(factors: list[float]) -> list[float]:
    if factors[0] != 1 or sorted(factors) != factors:
        raise ValueError(f"got {factors}, allowed: numbers that start with 1.0 and never decrease")
    return factors


class Plan(BaseModel, extra="forbid"):
    """A file like params/evidence_plan.yaml; `profile` is a file beside it. `analysis` is read by
    the notebook that judges the records. The n-th number of `sharing` says how many times as long a
    job takes if n jobs share the machine."""

    profile: str | None = None
    sharing: Annotated[list[float], Field(min_length=1), AfterValidator(_check_slowdowns)] = [1.0]
    tuning: Tuning | None = None
    stages: Annotated[
        list[Annotated[Any, AfterValidator(_read_stage)]],
        Field(min_length=1),
        AfterValidator(_check_names),
    ]
    analysis: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_what_stages_need(self) -> Plan:
        for stage in self.stages:
            stage.check(self)
        return self


def read_plan(path: str | Path) -> Plan:
    """Read a plan's file; ValueError names the file, the key, its value and what is allowed."""
    return validate(Plan, read_params([path]), path)


# Its jobs ─────────────────────────────────────────────────────────────────────────────────────────


def plan_jobs(
    path: str | Path, changes: Mapping[str, Any] | None = None, results: str | Path | None = None
) -> dict[str, list[Job]]:
    """Name the jobs of each stage of a plan, in order. `changes` are parameters that all runs get,
    whatever the plan says about them.

    If a stage looks for a learning rate, these are the jobs that are known so far, because the
    records in `results` decide which rate is tried next and with which rate a scheme is scored.
    Raises ValueError naming the file, the key and what is allowed.
    """
    return _of_each_stage(path, changes, results, lambda stage, planning: stage.plan_jobs(planning))


def jobs_to_follow(
    path: str | Path, changes: Mapping[str, Any] | None = None, results: str | Path | None = None
) -> dict[str, list[Job]]:
    """Name stand-ins for the jobs of each stage that `plan_jobs` cannot name yet; see `Stage`."""
    return _of_each_stage(
        path, changes, results, lambda stage, planning: stage.jobs_to_follow(planning)
    )


def _of_each_stage(
    path: str | Path, changes: Mapping[str, Any] | None, results: str | Path | None,
    name: Callable[[Stage, Planning], Sequence[Job]],
) -> dict[str, list[Job]]:  # fmt: skip
    planning = _read_planning(path, changes, results)
    jobs = {}
    for stage in planning.plan.stages:
        try:
            jobs[stage.stage] = list(name(stage, planning))
        except ValueError as error:
            raise ValueError(f"{path}: stage {stage.stage}: {error}") from error
    return jobs


def plan_runs(
    path: str | Path, changes: Mapping[str, Any] | None = None, results: str | Path | None = None
) -> dict[str, list[RunConfig]]:
    """Return the configurations of the jobs that `plan_jobs` names, for the stages that train
    RunConfigs."""
    stages = plan_jobs(path, changes, results).items()
    runs = {name: [job for job in jobs if isinstance(job, Run)] for name, jobs in stages}
    return {name: [job.config for job in jobs] for name, jobs in runs.items() if jobs}


JUDGED = "evidence"  # the profile whose tables and claims params/evidence_plan.yaml has planned


def keep_planned(configs: Iterable[RunConfig], profile: str) -> list[RunConfig]:
    """Return those of a table's runs that are planned: in the profile `JUDGED`, those of its plan, and in
    other profiles all of them."""
    if profile != JUDGED:
        return list(configs)
    stages = plan_runs(ROOT / f"params/{JUDGED}_plan.yaml").values()
    planned = {config.digest for stage in stages for config in stage}
    return [config for config in configs if config.digest in planned]


def _read_planning(
    path: str | Path, changes: Mapping[str, Any] | None, results: str | Path | None
) -> Planning:
    read, profile, changes = read_plan(path), dict[str, Any](), dict(changes or {})
    refused = dict.fromkeys(("schemes", "seeds"), "none, because the plan says it")
    refused["jobs"] = "none; the option --jobs says how many runs are made at once"
    if any(isinstance(stage, TrainingStage) and stage.tune for stage in read.stages):
        refused |= dict.fromkeys(RATES, f"none with {path}, which tunes the rates")
    for key, allowed in refused.items():
        if key in changes:
            raise ValueError(f"{key}: got {format_value(changes[key])}, allowed: {allowed}")
    if read.profile is not None:
        profile = read_params([Path(path).parent / read.profile])
    elif changes:
        given = ", ".join(map(shorten, sorted(changes)))
        raise ValueError(
            f"{given}: got parameters of runs, allowed: none with {path}, whose jobs are not runs"
        )
    return Planning(read, profile, changes, results)


# Tuned stages ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Search:
    """The search for one scheme's learning rate, as far as the records go."""

    scheme: str
    tuning: Tuning
    profile: Mapping[str, Any]
    results: str | Path | None = None

    def config(self, factor: float, seed: int) -> RunConfig:
        rates = {key: round(factor * getattr(self.tuning, key), 10) for key in RATES}
        (config,) = plan({**self.profile, **rates, "schemes": [self.scheme], "seeds": [seed]})
        return config

    def accuracy(self, factor: float) -> float | None:
        """Return the accuracy of a factor on the images that choose, 0..1; minus infinity if the
        run diverged, None if it is not made yet."""
        run = Run(self.config(factor, self.tuning.seed))
        if not run.is_made(self.results):
            return None
        record = run.read(self.results)
        diverged = record["status"] != "finished"
        return float("-inf") if diverged else measure_accuracy(record, self.tuning.choose_on)

    def tried(self) -> dict[float, float | None]:
        """Return the factors to try, each with its accuracy, or None if its run is not made yet. If
        two are equally good, the smaller one counts as the best."""
        grid = self.tuning.grid

        def neighbour(factor: float, side: int) -> float | None:
            place = grid.index(factor) + side
            return grid[place] if 0 <= place < len(grid) else None

        return widen_search(self.tuning.factors, self.accuracy, neighbour)

    @property
    def chosen(self) -> float | None:
        """The best factor; None while a run is missing, or if all of them diverged."""
        return best_of(self.tried())


def best_of(tried: Mapping[float, float | None]) -> float | None:
    """Return the value with the highest score; of equal ones, the smallest. None while a score is missing,
    or if all of them are minus infinity."""
    scores = [score for score in tried.values() if score is not None]
    if len(scores) < len(tried) or max(scores) == float("-inf"):
        return None
    return _best(tried)


def widen_search(
    first: Sequence[float], score: Callable[[float], float | None],
    neighbour: Callable[[float, int], float | None],
) -> dict[float, float | None]:  # fmt: skip
    """Widen a search until its best value lies between others. Returns the values that it tries, in
    rising order, each with its score, or None if that is not known yet.

    The `first` values are tried in any case. While the best of all is the smallest or the largest of
    them, its `neighbour` on that side (-1 or 1) is tried, too. The search ends where there is no
    neighbour (None).
    """
    tried = {value: score(value) for value in first}
    while None not in tried.values():
        best = _best(tried)
        sides = [side for side, end in ((1, max(tried)), (-1, min(tried))) if best == end]
        beyond = [value for side in sides if (value := neighbour(best, side)) is not None]
        if not beyond:
            break
        tried[beyond[0]] = score(beyond[0])
    return dict(sorted(tried.items()))


def _best(tried: Mapping[float, Any]) -> float:
    return max(sorted(tried), key=lambda value: tried[value])


def _tuned_runs(searches: list[Search], seeds: list[int]) -> list[Run]:
    """Return the runs that try the first factors, factor by factor; then those that try factors
    beyond; then those that are scored, seed by seed."""
    tried = {search.scheme: list(search.tried()) for search in searches}
    runs = []
    tuning = searches[0].tuning  # all of them have the same
    for factor in dict.fromkeys([*tuning.factors, *tuning.grid]):
        runs += [s.config(factor, s.tuning.seed) for s in searches if factor in tried[s.scheme]]
    chosen = [(search, search.chosen) for search in searches]
    runs += [s.config(best, seed) for seed in seeds for s, best in chosen if best is not None]
    return [Run(config) for config in runs]


def find_searches(path: str | Path, results: str | Path | None = None) -> dict[str, list[Search]]:
    """Find the searches of each tuned stage of a plan, scheme by scheme, by the records in
    `results`."""
    planning = _read_planning(path, None, results)
    stages = [stage for stage in planning.plan.stages if isinstance(stage, TrainingStage)]
    return {stage.stage: stage.searches(planning) for stage in stages if stage.tune}


# What was made ────────────────────────────────────────────────────────────────────────────────────


def count_made(
    stages: Mapping[str, Iterable[Job | RunConfig]], results: str | Path | None = None
) -> pd.DataFrame:
    """Count, in a row for each stage of a plan, the jobs that are planned, those that are made, those
    that diverged, and the hours of computation that the made ones took."""
    rows = []
    for stage, given in stages.items():
        jobs = [Run(one) if isinstance(one, RunConfig) else one for one in given]
        once = {job.path(results): job for job in jobs}.values()
        there = [job for job in once if job.is_made(results)]
        records = list(zip(there, read_jobs(there, results, closely=False), strict=True))
        rows.append({
            "stage": stage, "planned": len(once), "made": len(there),
            "diverged": sum(job.divergence(record) is not None for job, record in records),
            "hours": sum(job.seconds_taken(record) for job, record in records) / 3600,
        })  # fmt: skip
    return pd.DataFrame(rows)
