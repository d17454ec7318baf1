"""Estimates: how long jobs will take on this machine.

A plan may say it, records of such runs that this kind of machine has made may tell it, or a few
rounds are made now and timed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from tcs_core import kept
from tcs_lab.runs.jobs import Job
from tcs_lab.runs.records import device_name, record_path, results_folder
from tcs_lab.tasks.images import Dataset, synthetic_dataset
from tcs_lab.tasks.text import load_text
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.training import Data, Training


class Expected(NamedTuple):
    """What some jobs take: how many they are, the hours that they take one after the other, and how
    many of them have an unknown time (their hours are not counted)."""

    jobs: int
    hours: float
    unknown: int


def expect(jobs: Iterable[Job], results: str | Path | None = None) -> Expected:
    """Estimate what it takes to make these jobs; if a job was stopped, to make its rest."""
    number, hours, unknown = 0, 0.0, 0
    for job in jobs:
        number += 1
        seconds = job.seconds_alone(results)
        if seconds is None:
            unknown += 1
        else:
            hours += seconds * (1 - job.parts_kept() / job.length) / 3600
    return Expected(number, hours, unknown)


def forecast(configs: Iterable[RunConfig], jobs: int = 1, results: str | Path | None = None) -> str:
    """Say in a sentence how many of these runs have no record yet, how many epochs they have, and
    about how long they will take on this machine, with so many `jobs` at a time."""
    wanted = {record_path(config, results): config for config in configs}
    missing = [config for path, config in wanted.items() if not path.exists()]
    if not missing:
        return f"{len(wanted)} runs, which all have a record: nothing is trained"
    threads = max(1, torch.get_num_threads() // jobs)  # as `run_queue` shares them out
    as_made = [replace(config, threads=config.threads or threads) for config in missing]
    seconds = sum(estimate_run(config, results) for config in as_made) / min(jobs, len(missing))
    epochs = " or ".join(f"{number:,}" for number in sorted({config.epochs for config in missing}))
    return (
        f"{len(missing)} of {len(wanted)} runs have no record and are made now, of {epochs} epochs: "
        f"about {_in_words(seconds)} on this machine"
    )


def forecast_trainings(configs: Iterable[RunConfig]) -> str:
    """Say in a sentence how many trainings a notebook makes in its own cells, how many epochs they
    have, and about how long they will take on this machine. They leave no records."""
    wanted = list(configs)
    epochs = " or ".join(f"{number:,}" for number in sorted({config.epochs for config in wanted}))
    seconds = sum(estimate_run(config, None) for config in wanted)
    trainings = "training" if len(wanted) == 1 else "trainings"
    return _forecast_of(len(wanted), f"{trainings} of {epochs} epochs", seconds)


def forecast_steps(count: int, steps: str, step: Callable[[], Any]) -> str:
    """Say in a sentence that a notebook makes so many `steps`, and about how long they will take on
    this machine. `step` makes one, and is called twice; only the second call is timed."""
    step()
    start = time.perf_counter()
    step()
    return _forecast_of(count, steps, count * (time.perf_counter() - start))


def _forecast_of(count: int, what: str, seconds: float) -> str:
    return f"this page makes {count:,} {what}: about {_in_words(seconds)} on this machine"


def _in_words(seconds: float) -> str:
    """Return one number that a person can plan with: 40 seconds, 3 minutes, 5 hours, 12 days."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}s"
    return "a second or two"


def estimate_run(config: RunConfig, results: str | Path | None) -> float:
    """Return the seconds that a run takes: its samples, times the seconds that one sample takes by
    records of its profile, or in a few rounds that are timed now."""
    pace = _recorded_pace(config, results) or _timed_pace(config)
    return pace * config.epochs * _samples(config.identity())


# How many samples an epoch has ────────────────────────────────────────────────────────────────────

_KNOWN_SAMPLES = {  # training, test
    "synthetic": (8_000, 2_000), "synthetic-compare": (48_000, 1_000), "cifar10": (50_000, 10_000),
}  # fmt: skip
_UNKNOWN_SAMPLES = (50_000, 10_000)  # of a folder that nobody has counted yet
_TEST_SHARE = 1 / 3  # of the time of training on a sample: a test has no backward pass


def _samples(identity: Mapping[str, Any]) -> float:
    """Return the samples that an epoch of a run trains on, and those that it tests at what these
    cost."""
    if identity["dataset"] == "text":
        text = load_text()
        train, test = (
            sum(map(len, part)) / identity["context"] for part in (text.train, text.test)
        )
        return train + test * _TEST_SHARE
    most_train, most_test = _KNOWN_SAMPLES.get(identity["dataset"], _UNKNOWN_SAMPLES)
    train = identity["train_samples"] or most_train
    test = identity["test_samples"] or most_test
    share = kept(identity["participation"], identity["clients"]) / identity["clients"]
    return train * share + test * _TEST_SHARE


# The time of a sample, by records ─────────────────────────────────────────────────────────────────

# Two runs of one scheme that agree in these take equally long for a sample.
_SIZE = ("dataset", "image_size", "context", "model", "width", "precision")


def _recorded_pace(config: RunConfig, results: str | Path | None) -> float | None:
    """Return the median seconds that a sample took in runs of the same scheme on such a machine, or
    else in those of schemes with as many local steps. None if there are no such records."""
    alike, device = _kinds(config.identity()), device_name(config.torch_device)
    folders = dict.fromkeys(results_folder(config.profile, where) for where in (results, None))
    recorded = [one for folder in folders for one in _paces(folder, _changed(folder))]
    for kind in range(len(alike)):  # the closest first
        paces = [
            pace for kinds, where, pace in recorded if (kinds[kind], where) == (alike[kind], device)
        ]
        if paces:
            return median(paces)
    return None


def _kinds(identity: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what runs have in common that take about as long: their scheme, or only its local
    steps."""
    scheme = identity["scheme"]
    # a record that is older than a field was made with the field's default
    size = tuple(identity.get(key, getattr(RunConfig, key)) for key in _SIZE)
    return (size, scheme["name"]), (size, scheme["centralized"], scheme["local_steps"])


def _changed(folder: Path) -> int:
    """When a record came last, in nanoseconds; 0 without any."""
    runs = folder / "runs"
    return runs.stat().st_mtime_ns if runs.exists() else 0


@cache
def _paces(folder: Path, changed: int) -> list[tuple[tuple[Any, Any], str, float]]:
    """For each record in a profile's folder: what it is like, its device, the seconds of a sample."""
    paces = []
    for path in sorted((folder / "runs").glob("*.json")):
        # whoever uses a record checks it, and says what is wrong with it
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            record = json.loads(path.read_text(encoding="utf-8"))
            config, epochs = record["config"], len(record["rows"])
            seconds = record["provenance"]["wall_seconds"] / epochs / _samples(config)
            paces.append((_kinds(config), record["provenance"]["device"], float(seconds)))
    return paces


# The time of a sample, by rounds that are made now ────────────────────────────────────────────────

_ROUND_SAMPLES = 256  # of all clients together, about
_ROUNDS, _ENOUGH_SECONDS = 3, 2.0  # that are timed, unless one of them takes longer than is enough
_TIMED: dict[Any, float] = {}


def _timed_pace(config: RunConfig) -> float:
    """Return the seconds of a sample in rounds of such a run with a few clients, without its dense
    start."""
    clients = _ROUND_SAMPLES // (config.batch * config.scheme.local_steps)
    few = replace(
        config, clients=max(1, min(config.client_count, clients)),
        participation=1.0, dirichlet_alpha=None, warmup_epochs=0, test_unused=False,
        learning_rate=1e-3, centralized_learning_rate=1e-3,
        graph=False,
    )  # fmt: skip
    key = _kinds(few.identity())[1], few.client_count, few.batch, few.threads, few.torch_device
    if key not in _TIMED:
        samples = few.client_count * few.batch * few.scheme.local_steps
        _TIMED[key] = _seconds_a_round(few, samples) / samples
    return _TIMED[key]


def _images_of_size(count: int, size: int | None) -> Dataset:
    """Make images of any size; only their shape matters here."""
    data = synthetic_dataset(count, 1)
    if size is not None and (times := -(-size // 32)) > 1:
        larger = data.train_images.repeat_interleave(times, 1).repeat_interleave(times, 2)
        data = replace(data, train_images=larger, test_images=larger[:1])
    return data.resize(size)


def _seconds_a_round(config: RunConfig, samples: int) -> float:
    """Return the time of the fastest of a few rounds. The number of torch's threads stays as it is."""
    data: Data
    if config.dataset == "text":
        data = load_text()
    else:
        data = _images_of_size((1 + _ROUNDS) * samples, config.image_size)
        config = replace(config, dataset="synthetic", data_root=None, data_label=None)
    training, before = Training(config, data), torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    try:
        rounds = chain.from_iterable(map(training.rounds, count()))  # of as many epochs as needed
        seconds = list[float]()
        next(rounds)  # the first one is dense, and what it loads does not count
        while len(seconds) < _ROUNDS and sum(seconds) < _ENOUGH_SECONDS:
            start = time.perf_counter()
            float(next(rounds).sum())  # on a GPU, once it is there
            seconds.append(time.perf_counter() - start)
        return min(seconds)  # the least disturbed one
    finally:
        torch.set_num_threads(before)
