"""The track: one training for all methods, and how each of them is tuned and scored.

params/compare.yaml is the training. params/compare_plan.yaml says how a learning rate is chosen, with
which seeds a method is scored, and of which methods rows are stored. It is a plan like any other, so
that `tcs queue` makes the stored rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tcs_lab.compare.methods import Method
from tcs_lab.evidence.fair import TunedScheme
from tcs_lab.runs.parameters import read_params
from tcs_lab.runs.plans import Plan, Search, read_plan
from tcs_lab.runs.records import results_folder
from tcs_lab.support.errors import reject_unknown, validate
from tcs_lab.support.paths import ROOT
from tcs_lab.training.configuration import PositiveNumber, RunConfig

PLAN = ROOT / "params" / "compare_plan.yaml"


class CompareAnalysis(BaseModel, extra="forbid"):
    """The part `analysis` of params/compare_plan.yaml."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    minutes: PositiveNumber  # of a run on one core
    # methods with at most so many times the errors of centralized training scatter alike, and so do all
    # others; without this, all methods do
    accurate: PositiveNumber | None = None
    # the stored methods, each with its schemes at all densities, the usual density first
    methods: Annotated[dict[str, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]


@dataclass(frozen=True)
class Track:
    """A plan whose tuned stages all have the same seeds, and its profile."""

    plan: Plan
    analysis: CompareAnalysis
    profile: dict[str, Any]
    results: str | Path | None = None
    path: Path = PLAN  # the plan's file

    @property
    def name(self) -> str:
        """The name of the profile."""
        return self.profile["profile"]

    @property
    def folder(self) -> Path:
        """The folder of the rows."""
        return results_folder(self.name, self.results)

    @property
    def seeds(self) -> list[int]:
        """The seeds that score."""
        return self.plan.stages[0].seeds

    def find_scheme(self, scheme: str, method: Method | None = None) -> TunedScheme:
        """Return one scheme on this track, with the records that there are of it. Those of a method from
        a file are in the folder of that method."""
        if method is None or method.file is None:
            profile, results = self.profile, self.results
        else:
            profile, results = self.profile | {"profile": method.folder}, self.folder
        assert self.plan.tuning is not None  # as `read_track` has checked
        search = Search(scheme, self.plan.tuning, profile, results)
        return TunedScheme("compare", search, self.seeds)

    def group_alike(self, tuned: Iterable[TunedScheme]) -> dict[str, bool]:
        """Say by name which schemes are accurate. Accurate schemes share one deviation between seeds, and all
        others share another.

        A scheme is accurate if its tuning run made at most `analysis.accurate` times the errors of the
        Baseline's. Without that setting, or without the Baseline, all schemes count as accurate. Tuning runs
        have a seed and images of their own, so that no scored run decides on the group of a scheme.
        """
        limit = math.nan
        if self.analysis.accurate is not None:
            limit = self.analysis.accurate * self.find_scheme("Baseline").chosen_error
        return {one.name: not one.chosen_error > limit for one in tuned}

    def find_stored(self) -> dict[str, list[TunedScheme]]:
        """Return the stored methods, with the records that there are of them."""
        return {
            name: [self.find_scheme(scheme) for scheme in schemes]
            for name, schemes in self.analysis.methods.items()
        }


def read_track(path: str | Path | None = None, results: str | Path | None = None) -> Track:
    """Read the track of a plan. Raises ValueError, which names the file and what is wrong with it, and
    FileNotFoundError outside of a clone, where there is no default plan."""
    if path is None and not PLAN.is_file():
        raise FileNotFoundError(
            f"{PLAN} does not exist, because this is not a clone of the repository; run the command in a "
            "clone, or give the track with --plan FILE"
        )
    path = Path(path or PLAN)
    plan = read_plan(path)
    if plan.profile is None:
        raise ValueError(
            f"{path}: profile: got none, allowed: the file with the settings of the training"
        )
    analysis = validate(CompareAnalysis, plan.analysis, f"{path}: analysis")
    if len({tuple(stage.seeds) for stage in plan.stages}) > 1 or plan.tuning is None:
        got = "no tuning" if plan.tuning is None else "stages with different seeds"
        raise ValueError(f"{path}: stages: got {got}, allowed: tuned ones with the same seeds")
    planned = {name for stage in plan.stages for name in stage.tune or ()}
    listed = [scheme for schemes in analysis.methods.values() for scheme in schemes]
    reject_unknown(listed, planned, f"scheme of a stored method, in {path}")
    profile = read_params([path.parent / plan.profile])
    if "profile" not in profile:
        raise ValueError(
            f"{path.parent / plan.profile}: profile: got none, allowed: the name of the folder of its results"
        )
    return Track(plan, analysis, profile, results, path)


def list_next_runs(tuned: Iterable[TunedScheme]) -> list[RunConfig]:
    """List the missing runs of which it is known by now that they are needed: first those that tune, then
    those that score."""
    configs = []
    for one in tuned:
        search = one.search
        missing = [factor for factor, accuracy in one.tried.items() if accuracy is None]
        configs += [search.config(factor, search.tuning.seed) for factor in missing]
        if not missing and one.chosen is not None:
            configs += [search.config(one.chosen, s) for s in one.seeds if s not in one.scored]
    return configs


def count_runs_left(tuned: Iterable[TunedScheme]) -> int:
    """Count the missing runs, if no rates beyond those that are tried first will be needed."""
    left = 0
    for one in tuned:
        left += sum(accuracy is None for accuracy in one.tried.values())
        is_lost = one.is_tuned and one.chosen is None
        left += 0 if is_lost else len(one.seeds) - len(one.scored)
    return left


def count_further_rates(tuned: Iterable[TunedScheme]) -> int:
    """Count the runs that a search can need at most beyond those of `count_runs_left`: those of all rates on
    the longer side of the list, as long as a search is not over."""
    count = 0
    for one in tuned:
        if not one.is_tuned:
            grid, tried = one.search.tuning.grid, one.tried
            count += max(sum(f < min(tried) for f in grid), sum(f > max(tried) for f in grid))
    return count
