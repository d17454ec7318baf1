"""Forecast: how many runs are to be made, and about how long they will take on this machine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

from tcs_core import build_model
from tcs_lab.runs.records import record_path
from tcs_lab.tasks.text import GPT, load_text
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.side_by_side import uses_side_by_side

_TIMED_SAMPLES = 256  # at most, in the pass that is timed
_UNKNOWN_SAMPLES = 50_000  # training images of a folder that nobody has counted yet
_TEST_SHARE = 1 / 3  # of the time of training on a sample: a test has no backward pass


def forecast(configs: Iterable[RunConfig], jobs: int = 1, results: str | Path | None = None) -> str:
    """A sentence: how many of these runs have no record yet, their epochs, and about how long they
    will take on this machine with so many `jobs` at a time. For that, three forward and backward
    passes of each kind of net are timed here."""
    wanted = {record_path(config, results): config for config in configs}
    missing = [config for path, config in wanted.items() if not path.exists()]
    if not missing:
        return f"{len(wanted)} runs, which all have a record: nothing is trained"
    side_by_side = min(jobs, len(missing))
    threads = max(1, torch.get_num_threads() // side_by_side)
    timed: dict[tuple, float] = {}
    for config in missing:
        key = (config.dataset, config.model, config.width, config.image_size, config.context,
               config.precision, _samples_a_pass(config), config.device)  # fmt: skip
        if key not in timed:
            timed[key] = _seconds_a_sample(config, config.threads or threads)
        timed[config.record_name, "in all"] = timed[key] * _samples(config)
    seconds = sum(timed[config.record_name, "in all"] for config in missing) / side_by_side
    epochs = sorted({config.epochs for config in missing})
    each = " or ".join(f"{number:,}" for number in epochs)
    return (
        f"{len(missing)} of {len(wanted)} runs have no record and are made now, of {each} epochs: "
        f"about {_duration(seconds)} on this machine"
    )


def _samples(config: RunConfig) -> float:
    """How many samples a whole run trains on. Those of its tests are added by what they cost."""
    if config.dataset == "text":
        text = load_text()
        train = sum(map(len, text.train)) / config.context
        return config.epochs * train * (1 + _TEST_SHARE / 10)
    known = {"synthetic": (8_000, 2_000), "cifar10": (50_000, 10_000)}
    most_train, most_test = known.get(config.dataset, (_UNKNOWN_SAMPLES, _UNKNOWN_SAMPLES // 5))
    train = min(config.train_samples or most_train, most_train)
    test = min(config.test_samples or most_test, most_test)
    return config.epochs * (train * config.participants / config.client_count + test * _TEST_SHARE)


def _samples_a_pass(config: RunConfig) -> int:
    together = config.participants if uses_side_by_side(config) else 1
    return min(_TIMED_SAMPLES, config.batch * together)


def _seconds_a_sample(config: RunConfig, threads: int) -> float:
    """The time that a sample takes in the fastest of three forward and backward passes. The state of
    torch's random numbers and its number of threads stay as they are."""
    device, count = config.torch_device, _samples_a_pass(config)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            if config.dataset == "text":
                model: torch.nn.Module = GPT(100, config.width, config.context)
                inputs = torch.zeros(count, config.context, dtype=torch.int64)
            else:
                side = config.image_size or 32
                model = build_model(config.model, config.width)
                inputs = torch.zeros(count, 3, side, side)
            model, inputs = model.to(device), inputs.to(device)
            took = math.inf
            for _ in range(3):
                start = time.perf_counter()
                with _autocast(config):
                    scores = model(inputs).flatten(0, -2)
                labels = torch.zeros(len(scores), dtype=torch.int64, device=device)
                F.cross_entropy(scores.float(), labels).backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took = min(took, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return took / count


def _autocast(config: RunConfig) -> contextlib.AbstractContextManager:
    kind, enabled = config.torch_device.type, config.precision == "bf16"
    return torch.autocast(kind, torch.bfloat16, enabled=enabled)


def _duration(seconds: float) -> str:
    """One number a person can plan with: 40 seconds, 3 minutes, 5 hours, 12 days."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}s"
    return "a second or two"
