"""How long runs will take: as their plan says, or as records of such runs took."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tcs_lab.runs.checkpoints import epochs_kept
from tcs_lab.runs.records import record_path, results_folder
from tcs_lab.training.configuration import RunConfig

# Two runs that agree in these take equally long for an epoch of a scheme.
_SIZE = ("dataset", "train_samples", "test_samples", "test_unused", "image_size", "context", "model",
         "width", "precision")  # fmt: skip


class Expected(NamedTuple):
    """Of some runs: how many they are, the hours that they take one after the other, and of how many
    nothing tells how long they take (their hours are not counted)."""

    runs: int
    hours: float
    unknown: int

    def plus(self, other: Expected) -> Expected:
        runs, hours, unknown = other
        return Expected(self.runs + runs, self.hours + hours, self.unknown + unknown)


def missing_runs(
    configs: Iterable[RunConfig], results: str | Path | None = None
) -> list[RunConfig]:
    """Those that are not made yet, each once."""
    return [c for c in dict.fromkeys(configs) if not record_path(c, results).exists()]


def expected(
    configs: Iterable[RunConfig], results: str | Path | None = None,
    minutes: Mapping[str, float] | None = None,
) -> Expected:  # fmt: skip
    """What it takes to make these runs; of one that was stopped, to make the rest.

    `minutes` holds what a plan expects of runs, by digest. Of other runs the records of their
    profile tell it: the median time of an epoch of the same scheme, or else of a scheme with as many
    local steps.
    """
    runs, hours, unknown = 0, 0.0, 0
    for config in configs:
        runs += 1
        seconds = None
        if minutes and config.digest in minutes:
            seconds = 60 * minutes[config.digest]
        elif (pace := _seconds_an_epoch(config, results)) is not None:
            seconds = pace * config.epochs
        if seconds is None:
            unknown += 1
        else:
            hours += seconds * (1 - epochs_kept(config) / config.epochs) / 3600
    return Expected(runs, hours, unknown)


def _seconds_an_epoch(config: RunConfig, results: str | Path | None) -> float | None:
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
            return median(paces)
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
