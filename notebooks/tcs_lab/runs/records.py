"""Records: `write_record` writes one, `read_record` and `read_json_record` read and check one.

A record is one JSON file, which is written whole or not at all. First comes what all kinds of records
have in common, then where they come from (`provenance`), then the records of runs: what is in them,
how they are loaded, and how two are compared.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, Field

import tcs_core
from tcs_core import Link, Scheme
from tcs_lab.support.errors import reject_unknown, shorten, validate
from tcs_lab.support.files import write_json
from tcs_lab.support.paths import IS_CLONE, LAB, ROOT
from tcs_lab.training.bf16_convolutions import uses_bf16_convolutions
from tcs_lab.training.client_threads import uses_client_threads
from tcs_lab.training.configuration import RUN_KEYS, RunConfig, digest_of
from tcs_lab.training.cuda_graph import uses_static_rounds
from tcs_lab.training.side_by_side import uses_side_by_side
from tcs_lab.training.training import Data, Row, Training

RECORD_VERSION = 1
Record = dict[str, Any]


def results_folder(profile: str, results: str | Path | None = None) -> Path:
    """Return the folder of a profile's results, in the project's results folder or in another one."""
    return (Path(results) if results else ROOT / "results") / profile


def write_record(path: Path, record: Record) -> Record:
    """Write a record of any kind with its checksum, and return it as it was written.

    By the checksum an accident or a slip of the hand is noticed when the record is read. (Whoever
    wants to deceive can compute it anew.)
    """
    sealed = record | {"sha256": _content_sha256(record)}
    write_json(path, sealed)
    return sealed


def _content_sha256(record: Record) -> str:
    """Return the checksum of a record's content, which is all of it but "sha256" itself."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_json_record(
    path: str | Path, check: Callable[[Record], None] | None = None, advice: str = ""
) -> Record:
    """Read a record of any kind from its file, and check it.

    `check` raises ValueError for a record that is not as it should be. The checksum is checked, too,
    if there is one (old records have none). ValueError names the file and what is wrong with it, and
    ends with the `advice`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable record ({error}){advice}") from error
    try:
        if check:
            check(record)
        if record.get("sha256", own_sum := _content_sha256(record)) != own_sum:
            raise ValueError(
                f"{path}: its content is not what was written: the stored sha256 does not match"
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: a value is missing or of a wrong kind ({shorten(repr(error))}){advice}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{error}{advice}") from error
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, allowed: finite numbers")


# Where records come from ──────────────────────────────────────────────────────────────────────────


def provenance(config: RunConfig | None = None) -> dict[str, Any]:
    """Which code made a record, on which machine and when. For a run also what decides how its sums
    are rounded."""
    if config is None:
        how = {"torch": torch.__version__, "numpy": np.__version__, "device": cpu_name()}
    else:
        how = rounding(config) | {"repeats": _REPEATS[config.torch_device.type]}
    return {
        "core_sha256": _CORE_SHA256,
        "lab_sha256": _LAB_SHA256,
        **git_state(),
        "python": platform.python_version(),
        **_threads(config),
        **how,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


_REPEATS = {
    "cpu": "bit for bit, on this kind of processor with these threads and versions",
    "cuda": "within rounding: sums on a GPU have no fixed order",
    "mixed": "not exactly: it went on from a checkpoint that was made in another of these ways",
}


def rounding(config: RunConfig) -> dict[str, Any]:
    """Return what decides how a run's sums are rounded, beside the code."""
    device, one_core = config.torch_device, uses_client_threads(config)
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": device_name(device),
        **({} if one_core else _threads(config)),
        "graph": not config.wire and uses_static_rounds(config, Link()),
        "side_by_side": uses_side_by_side(config),
        "client_threads": one_core,
        "bf16_convolutions": uses_bf16_convolutions(config),
    }


def way_of(config: RunConfig) -> dict[str, Any]:
    """Return what decides the numbers of a run's rows beside its settings: how sums are rounded,
    and the code."""
    return rounding(config) | {"core_sha256": _CORE_SHA256, "lab_sha256": _LAB_SHA256}


def _threads(config: RunConfig | None) -> dict[str, int]:
    return {"threads": (config and config.threads) or torch.get_num_threads()}


# These are hashes of the code that was imported, whatever is edited later.
_CORE_SOURCE = Path(tcs_core.__file__).read_bytes()
_CORE_SHA256 = hashlib.sha256(_CORE_SOURCE).hexdigest()
_LAB_SOURCE = b"".join(file.read_bytes() for file in sorted(LAB.rglob("*.py")))
_LAB_SHA256 = hashlib.sha256(_LAB_SOURCE).hexdigest()


@cache
def core_sha256() -> str:
    """Return the hash of the core's code as it was imported, without comments, docstrings and line
    breaks.

    It stands under every notebook, because what a notebook shows stays true when a comment is
    mended. (Records hold the hash of the file as it is, as "core_sha256".)
    """
    return code_sha256(_CORE_SOURCE)


def describe_core() -> str:
    """Name the core that a notebook runs with, for the notebook's foot."""
    return f"tcs_core.py (checksum {core_sha256()[:12]})"


def describe_provenance(records: Iterable[dict[str, Any]]) -> str:
    """Say what records were made with, for the foot of a notebook that reads them."""
    made = [record["provenance"] for record in records]
    torches, data = (", ".join(sorted({one[key] for one in made})) for key in ("torch", "dataset"))
    commits = sorted({(one.get("commit") or "unknown")[:7] for one in made})
    named = f"commit {', '.join(commits)}" if 0 < len(commits) < 4 else f"{len(commits)} commits"
    return (
        f"The {len(made)} records were made with {named}, torch {torches or '–'} and {data or '–'}."
    )


def code_sha256(source: bytes) -> str:
    """Return the sha256 of what a Python file does: of its syntax tree without docstrings, as text."""
    tree = ast.parse(source)
    with_docstrings = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, with_docstrings) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def device_name(device: torch.device) -> str:
    """Return what the processor or the GPU is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@cache
def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def git_state() -> dict[str, Any]:
    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]  # it may be killed
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
        return done.stdout.strip()

    if not IS_CLONE:  # nobody else's commit
        return {"commit": None, "dirty": None}
    try:
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


# Records of runs ──────────────────────────────────────────────────────────────────────────────────


def record_path(config: RunConfig, results: str | Path | None = None) -> Path:
    return results_folder(config.profile, results) / "runs" / config.record_name


def make_record(
    config: RunConfig, training: Training, data: Data, rows: list[Row],
    ways: list[dict[str, Any]], status: str, reason: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Put together the record of a run that ended. `ways` are the different values of `way_of` under
    which its rows were made."""
    made = provenance(config)
    made |= {"dataset": data.label, "fingerprint": data.fingerprint}
    if len(ways) > 1:
        made |= {"repeats": _REPEATS["mixed"], "ways": ways}
    made["wall_seconds"] = round(sum(row["seconds"] for row in rows), 1)
    return {
        "version": RECORD_VERSION,
        "digest": config.digest,
        "status": status,
        "reason": reason,
        "config": config.identity(),
        "dimension": len(training.theta_D),
        "batch_norm_bits": 32 * training.statistics_NS.shape[1],
        "rows": rows,
        "provenance": made,
    }


def read_record(path: str | Path, config: RunConfig | None = None) -> Record:
    """Read a run's record from its file, and check it. With a `config` it must be the record of that
    run. ValueError names the file and what is wrong with it."""
    advice = "; delete it to run again" if config else ""
    return read_json_record(path, lambda record: check_record(record, path, config), advice)


def load_records(
    configs: Iterable[RunConfig], results: str | Path | None = None, diverged: bool = True
) -> dict[str, Record]:
    """Load the records of those runs that have one, by file name; no run is made.

    With `diverged=False`, only the records of runs that got to their end. Raises ValueError for
    records of different data.
    """
    paths = {record_path(config, results): config for config in configs}
    records = {path.name: read_record(path, c) for path, c in paths.items() if path.is_file()}
    check_same_data(records.values(), paths)
    return {n: one for n, one in records.items() if diverged or one["status"] == "finished"}


def list_missing(configs: Iterable[RunConfig], records: Iterable[Record]) -> str:
    """Say which of these runs have no record: "TCS (seeds 1, 2), FedAvg (all 3 seeds)"; "none" if all
    have one."""
    there = {record["digest"] for record in records}
    asked: dict[str, list[RunConfig]] = {}
    for config in configs:
        asked.setdefault(config.scheme.name, []).append(config)
    missing = []
    for name, runs in asked.items():
        seeds = [str(config.seed) for config in runs if config.digest not in there]
        if len(seeds) == len(runs):
            missing.append(name if len(runs) == 1 else f"{name} (all {len(runs)} seeds)")
        elif seeds:
            missing.append(f"{name} (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})")
    return ", ".join(missing) or "none"


def check_same_data(records: Iterable[Record], where: str | Iterable[Path]) -> None:
    """ValueError if records name the same data set, or the same cut of it, but were made of other
    images or texts. `where` says for the error what they are, or gives their paths."""
    seen = {(data_source(r["config"]), r["provenance"]["fingerprint"]) for r in records}
    if len(seen) > len({source for source, _ in seen}):
        if not isinstance(where, str):
            where = ", ".join(sorted({str(path.parent) for path in where}))
        raise ValueError(
            f"{where}: got records of different data under one name, allowed: records of the same "
            "data; choose another results folder or profile for the others"
        )


def data_source(config: dict[str, Any]) -> tuple:
    """Return what a fingerprint belongs to: a data set, or the part of it that was cut to be
    resized."""
    cut = ("train_samples", "test_samples", "test_unused", "image_size")
    return (config["dataset"], *(config.get(key) for key in cut if config.get("image_size")))


def config_of(record: dict[str, Any], **where: Any) -> RunConfig:
    """Return the configuration that makes a record's run again, in the same way. `where` sets what
    a record does not hold (data_root, device) or changes how the run is made (threads, graph, ...).

    Raises ValueError if this core has no such run, because its rule is from outside or because the
    record has a field that this core does not know.
    """
    given, made = dict(record["config"]), record["provenance"]
    how = {"threads": made.get("threads")}
    ways = ("graph", "side_by_side", "client_threads")
    how |= {way: made.get(way, False) for way in ways}
    known = (field.name for field in dataclasses.fields(Scheme))
    reject_unknown(given["scheme"], known, "field of a record's scheme")
    scheme = Scheme(**given.pop("scheme"))
    if scheme.centralized:  # a record holds what centralized training makes of its settings
        given |= {"batch_size": given["batch_size"] // 2, "warmup_learning_rate": 0.1}
        given["centralized_learning_rate"] = given.pop("learning_rate")
        if given["reference_batch"] is not None:
            given["reference_batch"] = round(5 * given["reference_batch"])
    given = {key: value for key, value in given.items() if key != "rule_sha256"}
    reject_unknown(given, RUN_KEYS | {"seed"}, "field of a record")
    config = RunConfig(scheme, **({"profile": "again"} | how | given | where))
    if config.digest != record["digest"]:
        raise ValueError(
            f"record {record['digest']}: here its settings give the run {config.digest}, because its "
            "rule or its settings are those of other code; check out the commit that it names"
        )
    return config


def compare_records(record: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """List where two records of one run differ, epoch by epoch, except in times; the first is the
    older one. Numbers that only one of them has do not count."""
    differences = []
    for was, row in zip(record["rows"], other["rows"], strict=False):
        keys = [k for k in was if k in row and k != "seconds" and was[k] != row[k]]
        differences += [f"epoch {row['epoch']}: {k} {row[k]!r}, was {was[k]!r}" for k in keys]
    if len(record["rows"]) != len(other["rows"]):
        differences.append(f"{len(other['rows'])} epochs, were {len(record['rows'])}")
    return differences


# What a record must be ────────────────────────────────────────────────────────────────────────────

_Natural = Annotated[int, Field(strict=True, ge=0)]
_Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class _Row(BaseModel):
    epoch: _Natural
    rounds: _Natural
    dense_rounds: _Natural
    bits_up: _Natural
    bits_down: _Natural
    bytes_up: _Natural
    bytes_down: _Natural
    accuracy: _Fraction
    mask_overlap: _Fraction | None = None


def _in_order(rows: list[_Row]) -> list[_Row]:
    if [row.epoch for row in rows] != list(range(1, len(rows) + 1)):
        raise ValueError(
            f"got epochs {[row.epoch for row in rows[:10]]}, allowed: all epochs from 1 on, in order"
        )
    return rows


Rows = Annotated[list[_Row], AfterValidator(_in_order)]  # of epochs 1, 2, 3, ...


class _Made(BaseModel):
    fingerprint: str  # of the data
    wall_seconds: float


class _Record(BaseModel):
    rows: Rows
    version: Literal[1]
    digest: str
    status: Literal["finished", "diverged"]
    config: dict[str, Any]
    dimension: Annotated[int, Field(strict=True, ge=1)]
    provenance: _Made


def check_record(record: Any, path: str | Path, config: RunConfig | None = None) -> None:
    """ValueError unless this is the record of a run, and of the given run if there is one."""
    validate(_Record, record, f"{path}: not a record")
    digest = digest_of(record["config"])
    if digest != record["digest"]:
        got = f"got {record['digest']}, but its config is that of the run {digest}"
        raise ValueError(f"{path}: digest: {got}")
    if config is not None and digest != config.digest:
        raise ValueError(
            f"{path}: digest: got {digest}, allowed: that of this run, {config.digest}"
        )
    made, epochs = len(record["rows"]), record["config"]["epochs"]
    if record["status"] == "finished" and made != epochs:
        raise ValueError(f"{path}: rows: got {made} epochs of a finished run, allowed: {epochs}")
