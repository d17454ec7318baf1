"""A plan of many runs, in the order in which they are made: params/evidence_plan.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import AfterValidator, BaseModel, Field

from tcs_lab.errors import shown, validated
from tcs_lab.settings import RunConfig, Seed, plan, read_params
from tcs_lab.tables import recorded


class Stage(BaseModel, extra="forbid"):
    """A part of a plan: its runs are made seed by seed, in a seed one after the other."""

    stage: str
    seeds: Annotated[list[Seed], Field(min_length=1)]
    runs: Annotated[list[dict[str, Any]], Field(min_length=1)]  # what each changes of the profile


def _each_once(stages: list[Stage]) -> list[Stage]:
    names = [stage.stage for stage in stages]
    if len(set(names)) < len(names):
        raise ValueError("two stages have one name")
    return stages


class Plan(BaseModel, extra="forbid"):
    """A file like params/evidence_plan.yaml; `profile` is a file beside it."""

    profile: str
    stages: Annotated[list[Stage], Field(min_length=1), AfterValidator(_each_once)]


def planned_runs(
    path: str | Path, changes: Mapping[str, Any] | None = None
) -> dict[str, list[RunConfig]]:
    """The runs of each stage of a plan, in order; `changes` are parameters that all of them get,
    whatever the plan says of these.

    Raises ValueError naming the file, the key and what is allowed.
    """
    changes = dict(changes or {})
    for key in ("schemes", "seeds", "jobs"):
        if key in changes:
            got = shown(changes[key])
            raise ValueError(f"{key}: got {got}, allowed: none beside a plan, which says it")
    read = validated(Plan, read_params([path]), path)
    profile = {"learning_rate": 0.5} | read_params([Path(path).parent / read.profile])
    return {
        stage.stage: [
            config
            for seed in stage.seeds
            for change in stage.runs
            for config in plan(profile | change | changes | {"seeds": [seed]})
        ]
        for stage in read.stages
    }


def made_of(plans: dict[str, list[RunConfig]], results: str | Path | None = None) -> pd.DataFrame:
    """One row a stage of a plan: its runs that are planned, made, and of these diverged; the hours
    of computation that the made ones took."""
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
