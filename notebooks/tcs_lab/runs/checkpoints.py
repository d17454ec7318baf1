"""Checkpoints: where a run stopped, in the cache folder until it ends."""

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

# To be raised by hand whenever a training that goes on from an older checkpoint would not end in
# the record of one that was never stopped: other keys, shapes, units or order of random numbers.
STATE_VERSION = 3


def checkpoint_path(config: RunConfig) -> Path:
    return cache_folder() / "checkpoints" / f"{config.profile}-{config.record_name[:-5]}.pt"


def _made_for(config: RunConfig, training: Training) -> dict[str, Any]:
    """What a run must have in common with the checkpoint that it goes on from."""
    data = training.fingerprint
    return {"state version": STATE_VERSION, "settings": config.digest, "data": data}


def save_checkpoint(
    config: RunConfig, training: Training, rows: list[Row], ways: list[dict[str, Any]]
) -> None:
    """`ways` are those in which the rows were made."""
    state = _made_for(config, training) | {"rows": json.dumps(rows), "ways": json.dumps(ways)}
    state["training"] = training.state_dict()
    write_whole(checkpoint_path(config), lambda file: _torch_save(state, file))


def _torch_save(state: dict[str, Any], file: Any) -> None:
    """torch.save; it says RuntimeError where the disk is full."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(str(error)) from error


def load_checkpoint(
    config: RunConfig, training: Training
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Puts the training where the run stopped; its rows so far, and the ways they were made in.

    A checkpoint that is there but not for this run is not used, and stderr says why.
    Raises ValueError for one that is damaged.
    """
    path = checkpoint_path(config)
    try:
        rows, ways, state = _read_checkpoint(config, training)
        if rows:
            training.load_state_dict(state)
        if sum(row["rounds"] for row in rows) != training.compressor.known.round:
            raise ValueError("rows and state are of different rounds")
        return rows, ways
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # unpickling hostile or cut-off files raises many kinds
        raise ValueError(
            f"{path}: not a usable checkpoint ({shorten(one_line(error))}); delete it"
        ) from error


def _read_checkpoint(
    config: RunConfig, training: Training
) -> tuple[list[Row], list[dict[str, Any]], dict[str, Any]]:
    """Rows, ways and state of a checkpoint that this run can go on from, or three times nothing."""
    path = checkpoint_path(config)
    if not path.exists():
        return [], [], {}
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():  # torch.load does not look at the checksums
            raise ValueError(f"{damaged} is not what was written")
    state = torch.load(path, map_location=training.device, weights_only=True)
    for what, wanted in _made_for(config, training).items():
        if (found := state.get(what)) != wanted:
            why = f"its {what} is {found!r}, this run's {wanted!r}"
            print(f"{path}: checkpoint not used, {why}", file=sys.stderr, flush=True)
            return [], [], {}
    rows = json.loads(state["rows"])
    validate(Rows, rows, "its rows")
    if not rows:
        raise ValueError("it has no rows")
    return rows, json.loads(state["ways"]), state["training"]


def epochs_kept(config: RunConfig) -> int:
    """How many epochs of a run its checkpoint holds; 0 without one, or for one that is of no use
    (the run itself says why)."""
    path = checkpoint_path(config)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return len(json.loads(state["rows"]))
    except Exception:  # as in `load_checkpoint`: damaged files raise many kinds
        return 0


class Pace:
    """Spends at most a twentieth of the time on checkpoints."""

    next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self.next

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.next = time.monotonic() + 20 * (time.monotonic() - self.start)
