"""Records: one JSON file a run, written whole or not at all, checked when it is read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tcs_core
from tcs_core import Scheme
from tcs_lab.data import Dataset
from tcs_lab.errors import cut as _cut
from tcs_lab.errors import reject_unknown as _reject_unknown
from tcs_lab.errors import shown as _shown
from tcs_lab.ranks import Ranks
from tcs_lab.settings import ROOT, RUN_KEYS, RunConfig, digest_of
from tcs_lab.training import Row, Training


def record_path(config: RunConfig, results: str | Path | None = None) -> Path:
    return results_folder(config.profile, results) / "runs" / config.record_name


def results_folder(profile: str, results: str | Path | None = None) -> Path:
    return (Path(results) if results else ROOT / "results") / profile


def _record(
    config: RunConfig, federation: Training, data: Dataset, rows: list[Row],
    ways: list[dict[str, Any]], status: str, reason: str | None,
) -> dict[str, Any]:  # fmt: skip
    made = provenance(config, federation.ranks) | {
        "dataset": data.label,
        "fingerprint": data.fingerprint,
    }
    if len(ways) > 1:
        made |= {"repeats": _REPEATS["mixed"], "ways": ways}
    made["wall_seconds"] = round(sum(row["seconds"] for row in rows), 1)
    record = {
        "version": RECORD_VERSION,
        "digest": config.digest,
        "status": status,
        "reason": reason,
        "config": config.identity(),
        "dimension": len(federation.theta_D),
        "batch_norm_bits": 32 * federation.statistics_NS.shape[1],
        "rows": rows,
        "provenance": made,
    }
    return record | {"sha256": _content_sha256(record)}


def _content_sha256(record: dict[str, Any]) -> str:
    """Of a record without its own "sha256": an accident or a slip of the hand is noticed. (Whoever
    wants to deceive can compute it anew.)"""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_REPEATS = {
    "cpu": "bit for bit, on this kind of processor with these threads and versions",
    "cuda": "within rounding: sums on a GPU have no fixed order",
    "mixed": "within rounding: it went on from a checkpoint that was made in another of these ways",
}


def _rounding(config: RunConfig) -> dict[str, Any]:
    """What decides how sums are rounded, beside the code."""
    device = config.torch_device
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": config.threads or torch.get_num_threads(),
        "graph": config.graph,
    }


def provenance(config: RunConfig, ranks: Ranks | None = None) -> dict[str, Any]:
    """Which code, on which machine, when."""
    return {
        "core_sha256": core_sha256(),
        **_git_state(),
        "python": platform.python_version(),
        **_rounding(config),
        "ranks": ranks.size if ranks else 1,
        "repeats": _REPEATS[config.torch_device.type],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


_CORE_SHA256 = hashlib.sha256(
    Path(tcs_core.__file__).read_bytes()
).hexdigest()  # of what was imported


def core_sha256() -> str:
    """Of this module's file, as it was when it was imported."""
    return _CORE_SHA256


@cache
def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def _git_state() -> dict[str, Any]:
    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def read_record(path: str | Path, config: RunConfig | None = None) -> dict[str, Any]:
    """A record from its file, checked; ValueError names the file and what is wrong with it. With
    the `config` of a run that wants it, it must be that run's."""
    advice = "; delete it to run again" if config else ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable record ({error}){advice}") from error
    try:
        problem = _record_problem(record, config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"a value has the wrong type ({_cut(repr(error))})"
    if problem:
        raise ValueError(f"{path}: {problem}{advice}")
    return record


def config_of(record: dict[str, Any], **where: Any) -> RunConfig:
    """The configuration that makes a record's run again, in the same way; `where` sets what
    a record does not hold (data_root, device) or changes how it is made (threads, graph).

    Raises ValueError if this core has no such run: a rule from outside the module, a field that it
    does not know.
    """
    given, made = dict(record["config"]), record["provenance"]
    how = {"threads": made.get("threads"), "graph": made.get("graph", False)}
    scheme = Scheme(**given.pop("scheme"))
    if scheme.centralized:  # a record holds what centralized training makes of its settings
        given |= {"batch_size": given["batch_size"] // 2, "warmup_learning_rate": 0.1}
        if given["reference_batch"] is not None:
            given["reference_batch"] *= 5
    given = {key: value for key, value in given.items() if key != "rule_sha256"}
    _reject_unknown(given, RUN_KEYS | {"seed"}, "field of a record")
    config = RunConfig(scheme, **({"profile": "again"} | how | given | where))
    if config.digest != record["digest"]:
        raise ValueError(f"record {record['digest']}: its run, {config.digest}, is another here")
    return config


def differences(record: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two records of one run do not have in common, epoch by epoch, but for times: the first
    is the older. Numbers that only one of them has do not count."""
    found = []
    for was, row in zip(record["rows"], other["rows"], strict=False):
        keys = [k for k in was if k in row and k != "seconds" and was[k] != row[k]]
        found += [f"epoch {row['epoch']}: {k} {row[k]!r}, was {was[k]!r}" for k in keys]
    if len(record["rows"]) != len(other["rows"]):
        found.append(f"{len(other['rows'])} epochs, were {len(record['rows'])}")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _record_problem(record: Any, config: RunConfig | None) -> str | None:
    keys = {"version", "digest", "status", "config", "dimension", "rows", "provenance"}
    if not isinstance(record, dict) or not keys <= set(record):
        return f"not a record: allowed: a mapping with {', '.join(sorted(keys))}"
    if record["version"] != RECORD_VERSION:
        return f"version: got {record['version']!r}, allowed: {RECORD_VERSION}"
    if record["status"] not in ("finished", "diverged"):
        return f"status: got {record['status']!r}, allowed: finished or diverged"
    own = digest_of(record["config"])
    if own != record["digest"] or (config is not None and own != config.digest):
        return "config: is that of another run"
    if problem := _rows_problem(record["rows"]):
        return f"rows: {problem}"
    if record["status"] == "finished" and len(record["rows"]) != record["config"]["epochs"]:
        return f"rows: got {len(record['rows'])} epochs, allowed: {record['config']['epochs']}"
    if not _is_count(record["dimension"]) or not record["dimension"]:
        return f"dimension: got {_shown(record['dimension'])}, allowed: a whole number >= 1"
    if record.get("sha256", own_sum := _content_sha256(record)) != own_sum:
        return "its content is not what was written (sha256)"
    return None


_COUNTS = ("epoch", "rounds", "dense_rounds", "bits_up", "bits_down")


def _rows_problem(rows: Any) -> str | None:
    needed = {"accuracy", *_COUNTS}
    if not isinstance(rows, list) or any(
        not isinstance(r, dict) or not needed <= set(r) for r in rows
    ):
        return f"allowed: a list of mappings with {', '.join(sorted(needed))}"
    if not all(type(r["accuracy"]) in (int, float) and 0 <= r["accuracy"] <= 1 for r in rows):
        return "accuracy outside 0..1"
    overlaps = [r["mask_overlap"] for r in rows if r.get("mask_overlap") is not None]
    if not all(type(v) in (int, float) and 0 <= v <= 1 for v in overlaps):
        return "mask_overlap outside 0..1"
    for key in (*_COUNTS, "bytes_up", "bytes_down"):
        if not all(_is_count(r.get(key, 0)) for r in rows):
            return f"{key}: allowed: whole numbers >= 0"
    if [r["epoch"] for r in rows] != list(range(1, len(rows) + 1)):
        return "epochs are missing"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


RECORD_VERSION = 1
