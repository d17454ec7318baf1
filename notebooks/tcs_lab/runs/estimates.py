"""How long jobs will take: as their plan says, as records of such jobs took, or as a round takes now."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from tcs_core import ClientError
from tcs_lab.runs.jobs import Job
from tcs_lab.runs.records import results_folder
from tcs_lab.tasks.images import synthetic_dataset
from tcs_lab.tasks.text import load_text
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.training import Data, Training, make_run_model

# Two runs that agree in these take equally long for a sample, by the same scheme.
_SIZE = ("dataset", "image_size", "context", "model", "width", "precision")


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
    """The seconds that a run takes, by records of its profile: the median time of a sample by the
    same scheme, or else by a scheme with as many local steps. Where there is none, a round is made
    and timed, unless that would take long; then None."""
    pace = _recorded_pace(config, results) or _tried_pace(config)
    return None if pace is None else pace * config.epochs


def _recorded_pace(config: RunConfig, results: str | Path | None) -> float | None:
    """Seconds of an epoch, by records."""
    like = _kinds(config.identity())
    folders = dict.fromkeys(results_folder(config.profile, where) for where in (results, None))
    for kind in range(len(like)):  # the closest first
        paces = [
            pace
            for folder in folders
            for kinds, pace in _paces(folder, _changed(folder))
            if kinds[kind] == like[kind]
        ]
        if paces:
            return median(paces) * _samples(config.identity())
    return None


def _kinds(identity: Mapping[str, Any]) -> tuple[Any, Any]:
    """What runs have in common that take about as long: their scheme, or only its local steps."""
    scheme = identity["scheme"]
    # a record that is older than a field was made with the field's default
    size = tuple(identity.get(key, getattr(RunConfig, key)) for key in _SIZE)
    size += (_samples(identity) > 1,)
    return (size, scheme["name"]), (size, scheme["centralized"], scheme["local_steps"])


def _samples(identity: Mapping[str, Any]) -> int:
    """Of an epoch; 1 for all that a data set has."""
    return identity.get("train_samples") or 1


def _changed(folder: Path) -> int:
    """When a record came last, in nanoseconds; 0 without any."""
    runs = folder / "runs"
    return runs.stat().st_mtime_ns if runs.exists() else 0


@cache
def _paces(folder: Path, changed: int) -> list[tuple[tuple[Any, Any], float]]:
    """Of each record in a profile's folder: what it is like, and the seconds of a sample."""
    paces = []
    for path in sorted((folder / "runs").glob("*.json")):
        # whoever uses a record checks it, and says what is wrong with it
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            record = json.loads(path.read_text(encoding="utf-8"))
            config, epochs = record["config"], len(record["rows"])
            seconds = record["provenance"]["wall_seconds"] / epochs / _samples(config)
            paces.append((_kinds(config), float(seconds)))
    return paces


# A round, made and timed ──────────────────────────────────────────────────────────────────────────

_MOST_WORK = 1e9  # samples of a round, times parameters: on a CPU some seconds
_TRIES = 3  # rounds
_TRIED: dict[Any, float | None] = {}


def _tried_pace(config: RunConfig) -> float | None:
    """Seconds of an epoch, by a round of such a run on this machine (evaluation comes on top); None
    if a round is too much work, or if it is not known how many samples there are."""
    kind = _kinds(config.identity())[1], config.train_samples, config.client_count, config.batch
    if kind not in _TRIED:
        _TRIED[kind] = None
        with torch.device("meta"):
            parameters = sum(p.numel() for p in make_run_model(config, classes=10).parameters())
        if parameters * _samples_a_round(config) <= _MOST_WORK:
            with contextlib.suppress(ClientError):
                _TRIED[kind] = _timed_pace(config)
    return _TRIED[kind]


def _samples_a_round(config: RunConfig) -> int:
    return config.client_count * config.batch * config.scheme.local_steps


def _timed_pace(config: RunConfig) -> float | None:
    data: Data
    if config.dataset == "text":
        data, config = load_text(), replace(config, compiled=False)
        rounds = None
    else:
        there = config.train_samples or {"synthetic": 8000, "cifar10": 50_000}.get(config.dataset)
        if there is None:
            return None
        rounds = there // _samples_a_round(config)
        data = synthetic_dataset((1 + _TRIES) * _samples_a_round(config), 1).resize(
            config.image_size
        )
        config = replace(
            config, dataset="synthetic", data_root=None, data_label=None, dirichlet_alpha=None,
            compiled=False,
        )  # fmt: skip
    training = Training(config, data)
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    try:
        made = training.rounds(0)
        next(made)  # what a first round loads does not count
        seconds = []
        for _ in range(_TRIES):
            start = time.perf_counter()
            float(next(made).sum())  # on a GPU, once it is there
            seconds.append(time.perf_counter() - start)
        return (rounds or training.rounds_per_epoch) * min(seconds)  # the least disturbed one
    finally:
        torch.set_num_threads(before)
