"""Checkpoints: they hold where a run stopped, in the cache folder, until the run has ended."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

from tcs_lab.runs.records import Rows
from tcs_lab.support.errors import one_line, shorten, validate
from tcs_lab.support.files import cache_folder, write_whole
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.training import Row, Training

# Raise this by hand whenever a training that goes on from an older checkpoint would not end in the
# record of a training that was never stopped, because keys, shapes, units or the order of random
# numbers have changed.
STATE_VERSION = 3


def checkpoint_path(config: RunConfig) -> Path:
    """Return the file of a run's checkpoint."""
    return cache_folder() / "checkpoints" / f"{config.profile}-{config.record_name[:-5]}.pt"


def _conditions(config: RunConfig, training: Training) -> dict[str, Any]:
    """Return what a checkpoint and the run that goes on from it must have in common."""
    data = training.fingerprint
    return {"state version": STATE_VERSION, "settings": config.digest, "data": data}


def save_checkpoint(
    config: RunConfig, training: Training, rows: list[Row], ways: list[dict[str, Any]]
) -> None:
    """Save where a training is. `ways` are the values of `records.way_of` under which its rows were
    made."""
    state = _conditions(config, training) | {"rows": json.dumps(rows), "ways": json.dumps(ways)}
    state["training"] = training.state_dict()
    write_whole(checkpoint_path(config), lambda file: _torch_save(state, file))


def _torch_save(state: dict[str, Any], file: Any) -> None:
    """torch.save, with an OSError where the disk is full (torch raises a RuntimeError)."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(str(error)) from error


def load_checkpoint(
    config: RunConfig, training: Training
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Put the training where the run stopped. Returns its rows so far, and the `ways` in which they were
    made (see `save_checkpoint`).

    A checkpoint that belongs to another run is not used, and stderr says why. Raises ValueError for
    one that is damaged.
    """
    path = checkpoint_path(config)
    try:
        rows, ways, state = _read_checkpoint(config, training)
        if rows:
            training.load_state_dict(state)
        if sum(row["rounds"] for row in rows) != training.compressor.known.round:
            raise ValueError("its rows and its state are of different rounds")
        return rows, ways
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # unpickling hostile or cut-off files raises many kinds
        raise ValueError(
            f"{path}: not a usable checkpoint ({shorten(one_line(error))}); delete it, and the run begins anew"
        ) from error


def _read_checkpoint(
    config: RunConfig, training: Training
) -> tuple[list[Row], list[dict[str, Any]], dict[str, Any]]:
    """Rows, ways and state of a checkpoint from which this run can go on; all empty without one."""
    path = checkpoint_path(config)
    if not path.exists():
        return [], [], {}
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():  # torch.load does not look at the checksums
            raise ValueError(f"its part {damaged} is not what was written")
    state = torch.load(path, map_location=training.device, weights_only=True)
    for what, wanted in _conditions(config, training).items():
        if (found := state.get(what)) != wanted:
            why = f"because its {what} is {found!r}, and that of this run is {wanted!r}"
            print(f"{path}: this checkpoint is not used, {why}", file=sys.stderr, flush=True)
            return [], [], {}
    rows = json.loads(state["rows"])
    validate(Rows, rows, "its rows")
    if not rows:
        raise ValueError("it has no rows")
    return rows, json.loads(state["ways"]), state["training"]


def epochs_kept(config: RunConfig) -> int:
    """Return how many epochs of a run its checkpoint holds; 0 without a checkpoint, or with one
    that cannot be used (the run itself says why). Its data are not compared."""
    path = checkpoint_path(config)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        fits = (state["state version"], state["settings"]) == (STATE_VERSION, config.digest)
        return len(json.loads(state["rows"])) if fits else 0
    except Exception:  # as in `load_checkpoint`: damaged files raise many kinds
        return 0


class Pace:
    """Says when to save a checkpoint, so that at most a twentieth of the time is spent on that."""

    next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self.next

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.next = time.monotonic() + 20 * (time.monotonic() - self.start)
