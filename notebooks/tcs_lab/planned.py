"""A plan of many runs, in the order in which they are made: params/evidence_plan.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tcs_lab.errors import validated
from tcs_lab.settings import RunConfig, Seed, plan, read_params


class Stage(BaseModel, extra="forbid"):
    """A part of a plan: its runs are made seed by seed, in a seed one after the other."""

    stage: str
    seeds: Annotated[list[Seed], Field(min_length=1)]
    runs: Annotated[list[dict[str, Any]], Field(min_length=1)]  # what each changes of the profile


class Plan(BaseModel, extra="forbid"):
    """A file like params/evidence_plan.yaml; `profile` is a file beside it."""

    profile: str
    stages: Annotated[list[Stage], Field(min_length=1)]


def planned_runs(path: str | Path, **changes: Any) -> dict[str, list[RunConfig]]:
    """The runs of each stage of a plan, in order; `changes` are parameters that all of them get.

    Raises ValueError naming the file, the key and what is allowed.
    """
    read = validated(Plan, read_params([path]), path)
    profile = {"learning_rate": 0.5} | read_params([Path(path).parent / read.profile]) | changes
    return {
        stage.stage: [
            config
            for seed in stage.seeds
            for change in stage.runs
            for config in plan(profile | change | {"seeds": [seed]})
        ]
        for stage in read.stages
    }
