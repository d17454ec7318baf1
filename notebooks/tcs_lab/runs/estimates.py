"""How long jobs will take: as their plan says, or as records of such jobs took."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tcs_lab.runs.jobs import Job
from tcs_lab.runs.records import results_folder
from tcs_lab.training.configuration import RunConfig

# Two runs that agree in these take equally long for an epoch of a scheme.
_SIZE = ("dataset", "train_samples", "test_samples", "test_unused", "image_size", "context", "model",
         "width", "precision")  # fmt: skip


class Expected(NamedTuple):
    """Of some jobs: how many they are, the hours that they take one after the other, and of how many
    nothing tells how long they take (their hours are not counted)."""

    jobs: int
    hours: float
    unknown: int

    def plus(self, other: Expected) -> Expected:
        jobs, hours, unknown = other
        return Expected(self.jobs + jobs, self.hours + hours, self.unknown + unknown)


def expect(jobs: Iterable[Job], results: str | Path | None = None) -> Expected:
    """What it takes to make these jobs; of one that was stopped, to make the rest."""
    count, hours, unknown = 0, 0.0, 0
    for job in jobs:
        count += 1
        seconds = job.seconds_alone(results)
        if seconds is None:
            unknown += 1
        else:
            hours += seconds * (1 - job.parts_kept() / job.length) / 3600
    return Expected(count, hours, unknown)


def estimate_run(config: RunConfig, results: str | Path | None) -> float | None:
    """The seconds that a run takes, by records of its profile: the median time of an epoch of the
    same scheme, or else of a scheme with as many local steps. None without such a record."""
    like = _kinds(config.identity())
    folders = dict.fromkeys(results_folder(config.profile, where) for where in (results, None))
    for kind in range(len(like)):  # the closest first
        paces = [
            pace
            for folder in folders
            for kinds, pace in _paces(folder)
            if kinds[kind] == like[kind]
        ]
        if paces:
            return median(paces) * config.epochs
    return None


def _kinds(identity: Mapping[str, Any]) -> tuple[Any, Any]:
    """What runs have in common that take about as long: their scheme, or only its local steps."""
    scheme = identity["scheme"]
    size = tuple(identity.get(key) for key in _SIZE)
    return (size, scheme["name"]), (size, scheme["centralized"], scheme["local_steps"])


@cache
def _paces(folder: Path) -> list[tuple[tuple[Any, Any], float]]:
    """Of each record in a profile's folder: what it is like, and how long an epoch took."""
    paces = []
    for path in sorted((folder / "runs").glob("*.json")):
        # whoever uses a record checks it, and says what is wrong with it
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            record = json.loads(path.read_text(encoding="utf-8"))
            seconds = record["provenance"]["wall_seconds"] / len(record["rows"])
            paces.append((_kinds(record["config"]), float(seconds)))
    return paces
