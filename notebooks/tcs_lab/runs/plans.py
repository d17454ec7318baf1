"""Plans: many runs, in the order in which they are made.

A plan is a file like params/evidence_plan.yaml (runs that are fixed from the start),
params/fair_plan.yaml (runs whose learning rate is tuned first) or params/gpu_plan.yaml (runs of
which the plan says how long they take).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import AfterValidator, BaseModel, Field, model_validator

from tcs_lab.runs.parameters import plan, read_params
from tcs_lab.runs.records import read_record, record_path, recorded
from tcs_lab.support.errors import shown, validated
from tcs_lab.training.configuration import Positive, RunConfig, Seed
from tcs_lab.training.training import accuracy_on

# The file ─────────────────────────────────────────────────────────────────────────────────────────


def _rising(numbers: list[float]) -> list[float]:
    if sorted(set(numbers)) != numbers:
        raise ValueError("not rising")
    return numbers


def _span(span: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= span[0] < span[1]:
        raise ValueError(f"got {list(span)}, allowed: [first, behind the last]")
    return span


Factors = Annotated[list[Positive], Field(min_length=1), AfterValidator(_rising)]
ImageSpans = Annotated[list[Annotated[tuple[int, int], AfterValidator(_span)]], Field(min_length=1)]


class Tuning(BaseModel, extra="forbid"):
    """How every scheme of a tuned stage gets its learning rate: all of them in the same way.

    A rate is a factor times `learning_rate`, or times `centralized_learning_rate` for centralized
    training. All `factors` are tried with one seed. While the best of those tried is the smallest
    or the largest, the next one of `further` beyond it is tried, too.
    """

    seed: Seed
    learning_rate: Positive
    centralized_learning_rate: Positive
    factors: Factors
    further: list[Positive] = []
    choose_on: ImageSpans  # of the tested images, those whose accuracy chooses
    score_on: ImageSpans  # and those that score; the two have no image in common

    @model_validator(mode="after")
    def _is_fair(self) -> Tuning:
        chosen = {i for start, end in self.choose_on for i in range(start, end)}
        scored = {i for start, end in self.score_on for i in range(start, end)}
        if both := chosen & scored:
            raise ValueError(f"score_on: image {min(both)} also chooses, allowed: other images")
        return self

    @property
    def grid(self) -> list[float]:
        return sorted({*self.factors, *self.further})


class Entry(BaseModel, extra="allow"):
    """What runs of a stage change of the profile, and for how many `minutes` one of them is expected
    to take if it has the machine that the plan is made for to itself."""

    minutes: Positive | None = None

    @property
    def changes(self) -> dict[str, Any]:
        return self.model_extra or {}


class Stage(BaseModel, extra="forbid"):
    """A part of a plan. Either `runs` says what each run changes of the profile; they are made seed
    by seed, and for each seed one after the other. Or `tune` names schemes whose learning rate is
    tuned first; then they are run with it, seed by seed."""

    stage: str
    seeds: Annotated[list[Seed], Field(min_length=1)]
    runs: Annotated[list[Entry], Field(min_length=1)] | None = None
    tune: Annotated[list[str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> Stage:
        if (self.runs is None) == (self.tune is None):
            raise ValueError("allowed: either runs or tune")
        return self


def _each_once(stages: list[Stage]) -> list[Stage]:
    names = [stage.stage for stage in stages]
    if len(set(names)) < len(names):
        raise ValueError("two stages have one name")
    return stages


def _slowdowns(factors: list[float]) -> list[float]:
    if factors[0] != 1 or sorted(factors) != factors:
        raise ValueError(f"got {factors}, allowed: numbers that begin with 1.0 and do not fall")
    return factors


class Plan(BaseModel, extra="forbid"):
    """A file like params/evidence_plan.yaml; `profile` is a file beside it. `analysis` is read by
    the notebook that judges the records. The n-th number of `sharing` says how many times as long a
    run takes if n runs share the machine."""

    profile: str
    sharing: Annotated[list[float], Field(min_length=1), AfterValidator(_slowdowns)] = [1.0]
    tuning: Tuning | None = None
    stages: Annotated[list[Stage], Field(min_length=1), AfterValidator(_each_once)]
    analysis: dict[str, Any] = {}

    @model_validator(mode="after")
    def _can_tune(self) -> Plan:
        tuned = [stage for stage in self.stages if stage.tune]
        if tuned and self.tuning is None:
            raise ValueError(f"tuning: stage {tuned[0].stage} needs it")
        for stage in tuned:
            if self.tuning and self.tuning.seed in stage.seeds:
                got = f"got seed {self.tuning.seed}, which tunes"
                raise ValueError(f"stage {stage.stage}: seeds: {got}, allowed: other seeds")
        return self


def read_plan(path: str | Path) -> Plan:
    """A plan's file; ValueError names the file, the key, its value and what is allowed."""
    return validated(Plan, read_params([path]), path)


# Its runs ─────────────────────────────────────────────────────────────────────────────────────────


def planned_runs(
    path: str | Path, changes: Mapping[str, Any] | None = None, results: str | Path | None = None
) -> dict[str, list[RunConfig]]:
    """The runs of each stage of a plan, in order; `changes` are parameters that all of them get,
    whatever the plan says of these.

    Of a tuned stage these are the runs that are known so far: what is tried next, and with which
    rate a scheme is scored, follows from the records in `results`.
    Raises ValueError naming the file, the key and what is allowed.
    """
    read, profile, changes = read_plan(path), _profile(path), _checked_changes(changes)
    runs: dict[str, list[RunConfig]] = {}
    for stage in read.stages:
        if stage.runs is not None:
            runs[stage.stage] = [config for config, _ in _fixed_runs(stage, profile, changes)]
        else:
            searches = _searches(read, stage, profile | changes, results)
            runs[stage.stage] = _tuned_runs(searches, stage.seeds)
    return runs


def _fixed_runs(
    stage: Stage, profile: dict[str, Any], changes: dict[str, Any]
) -> Iterator[tuple[RunConfig, float | None]]:
    """The runs of a stage that tunes nothing, in order, each with the minutes that it should take."""
    for seed in stage.seeds:
        for entry in stage.runs or []:
            for config in plan(profile | entry.changes | changes | {"seeds": [seed]}):
                yield config, entry.minutes


def minutes_of(path: str | Path, changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """How long a plan expects its runs to take, by their digests; arguments as `planned_runs`'. Runs
    of which the plan does not say it are left out."""
    read, profile, changes = read_plan(path), _profile(path), _checked_changes(changes)
    stages = [_fixed_runs(stage, profile, changes) for stage in read.stages]
    return {c.digest: minutes for runs in stages for c, minutes in runs if minutes is not None}


def _profile(path: str | Path) -> dict[str, Any]:
    return {"learning_rate": 0.5} | read_params([Path(path).parent / read_plan(path).profile])


def _checked_changes(changes: Mapping[str, Any] | None) -> dict[str, Any]:
    changes = dict(changes or {})
    for key in ("schemes", "seeds", "jobs"):
        if key in changes:
            got = shown(changes[key])
            raise ValueError(f"{key}: got {got}, allowed: none beside a plan, which says it")
    return changes


# Tuned stages ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Search:
    """The search for one scheme's learning rate, as far as the records go."""

    scheme: str
    tuning: Tuning
    profile: Mapping[str, Any]
    results: str | Path | None = None

    def config(self, factor: float, seed: int) -> RunConfig:
        keys = ("learning_rate", "centralized_learning_rate")
        rates = {key: round(factor * getattr(self.tuning, key), 10) for key in keys}
        (config,) = plan({**self.profile, **rates, "schemes": [self.scheme], "seeds": [seed]})
        return config

    def accuracy(self, factor: float) -> float | None:
        """On the images that choose, 0..1; minus infinity if the run diverged, None if it is not
        made yet."""
        config = self.config(factor, self.tuning.seed)
        path = record_path(config, self.results)
        if not path.is_file():
            return None
        record = read_record(path, config)
        diverged = record["status"] != "finished"
        return float("-inf") if diverged else accuracy_on(record, self.tuning.choose_on)

    def tried(self) -> dict[float, float | None]:
        """The factors to try, each with its accuracy: None if its run is not made yet. Of two that
        are equally good the smaller one counts as the best."""
        tried = {factor: self.accuracy(factor) for factor in self.tuning.factors}
        while None not in tried.values():
            beyond = self._beyond(tried)
            if beyond is None:
                break
            tried[beyond] = self.accuracy(beyond)
        return dict(sorted(tried.items()))

    def _beyond(self, tried: Mapping[float, Any]) -> float | None:
        """The factor to try next, because the best one is at an end; None if it is not, or if the
        plan goes no further."""
        grid, best = self.tuning.grid, _best(tried)
        place = grid.index(best)
        if best == max(tried) and place + 1 < len(grid):
            return grid[place + 1]
        return grid[place - 1] if best == min(tried) and place else None

    @property
    def chosen(self) -> float | None:
        """The best factor; None while a run is missing, or if all of them diverged."""
        tried = self.tried()
        if None in tried.values() or max(tried.values()) == float("-inf"):  # type: ignore[type-var]
            return None
        return _best(tried)


def _best(tried: Mapping[float, Any]) -> float:
    return max(sorted(tried), key=lambda factor: tried[factor])


def _searches(
    read: Plan, stage: Stage, profile: Mapping[str, Any], results: str | Path | None
) -> list[Search]:
    assert read.tuning is not None and stage.tune is not None  # as `Plan` has checked
    return [Search(name, read.tuning, profile, results) for name in stage.tune]


def _tuned_runs(searches: list[Search], seeds: list[int]) -> list[RunConfig]:
    """First what is tried from the start, factor by factor; then what lies beyond; then what is
    scored, seed by seed."""
    tried = {search.scheme: list(search.tried()) for search in searches}
    runs = []
    for factor in dict.fromkeys(f for s in searches for f in [*s.tuning.factors, *s.tuning.grid]):
        runs += [s.config(factor, s.tuning.seed) for s in searches if factor in tried[s.scheme]]
    chosen = [(search, search.chosen) for search in searches]
    runs += [s.config(best, seed) for seed in seeds for s, best in chosen if best is not None]
    return runs


def searches_of(
    path: str | Path, changes: Mapping[str, Any] | None = None, results: str | Path | None = None
) -> dict[str, list[Search]]:
    """The searches of each tuned stage of a plan, scheme by scheme; arguments as `planned_runs`'."""
    read, profile = read_plan(path), _profile(path) | _checked_changes(changes)
    tuned = [stage for stage in read.stages if stage.tune]
    return {stage.stage: _searches(read, stage, profile, results) for stage in tuned}


def runs_to_follow(
    path: str | Path, changes: Mapping[str, Any] | None = None, results: str | Path | None = None
) -> dict[str, list[RunConfig]]:
    """The runs of each stage that `planned_runs` cannot name yet, because the rate that they are
    scored with is not chosen: they stand here with the first rate that is tried. Arguments as
    `planned_runs`'."""
    seeds = {stage.stage: stage.seeds for stage in read_plan(path).stages}
    return {
        stage: [
            search.config(search.tuning.factors[0], seed)
            for search in searches
            if None in search.tried().values()
            for seed in seeds[stage]
        ]
        for stage, searches in searches_of(path, changes, results).items()
    }


# What was made ────────────────────────────────────────────────────────────────────────────────────


def made_of(plans: dict[str, list[RunConfig]], results: str | Path | None = None) -> pd.DataFrame:
    """One row for each stage of a plan: how many of its runs are planned, made, and of these
    diverged; the hours of computation that the made ones took."""
    rows = []
    for stage, configs in plans.items():
        found = recorded(configs, results).values()
        seconds = sum(record["provenance"]["wall_seconds"] for record in found)
        diverged = sum(record["status"] == "diverged" for record in found)
        rows.append(
            {"stage": stage, "planned": len({config.digest for config in configs}),
             "made": len(found), "diverged": diverged, "hours": seconds / 3600}
        )  # fmt: skip
    return pd.DataFrame(rows)
