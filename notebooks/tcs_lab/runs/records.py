"""Records: one JSON file each, written whole or not at all, checked when it is read. First what all kinds
of records have in common, then the records of runs."""

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
from tcs_lab.support.errors import cut, reject_unknown, validated
from tcs_lab.support.places import IS_CLONE, LAB, ROOT
from tcs_lab.training.client_threads import goes_a_client_a_thread
from tcs_lab.training.compiled import goes_compiled
from tcs_lab.training.configuration import RUN_KEYS, RunConfig, digest_of
from tcs_lab.training.cuda_graph import goes_static
from tcs_lab.training.side_by_side import goes_side_by_side
from tcs_lab.training.training import Data, Row, Training

RECORD_VERSION = 1
Record = dict[str, Any]


def results_folder(profile: str, results: str | Path | None = None) -> Path:
    return (Path(results) if results else ROOT / "results") / profile


def seal(record: Record) -> Record:
    """The record with its checksum: an accident or a slip of the hand is noticed when it is read.
    (Whoever wants to deceive can compute it anew.)"""
    return record | {"sha256": _content_sha256(record)}


def _content_sha256(record: Record) -> str:
    """Of a record without its own "sha256"."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_json_record(
    path: str | Path, check: Callable[[Record], None] | None = None, advice: str = ""
) -> Record:
    """A record of any kind from its file. `check` raises ValueError for one that is not as it should
    be; then the checksum is looked at, if there is one (old records have none). ValueError names
    the file and what is wrong with it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable record ({error}){advice}") from error
    try:
        if check:
            check(record)
        if record.get("sha256", own_sum := _content_sha256(record)) != own_sum:
            raise ValueError(f"{path}: its content is not what was written (sha256)")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a value is wrong ({cut(repr(error))}){advice}") from error
    except ValueError as error:
        raise ValueError(f"{error}{advice}") from error
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


# Where records come from ──────────────────────────────────────────────────────────────────────────


def provenance(config: RunConfig | None = None) -> dict[str, Any]:
    """Which code, on which machine, when; of a run also what decides how its sums are rounded."""
    usual = {"torch": torch.__version__, "numpy": np.__version__, "device": cpu_name()}
    return {
        "core_sha256": _CORE_SHA256,
        "lab_sha256": _LAB_SHA256,
        **git_state(),
        "python": platform.python_version(),
        **_threads(config),
        **(usual if config is None else rounding(config)),
        **({} if config is None else {"repeats": _repeats(config)}),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _repeats(config: RunConfig) -> str:
    return _REPEATS["compiled" if goes_compiled(config) else config.torch_device.type]


_REPEATS = {
    "cpu": "bit for bit, on this kind of processor with these threads and versions",
    "cuda": "within rounding: sums on a GPU have no fixed order",
    "compiled": "within rounding: the C++ compiler decides, too",
    "mixed": "within rounding: it went on from a checkpoint that was made in another of these ways",
}


def rounding(config: RunConfig) -> dict[str, Any]:
    """What decides how sums are rounded, beside the code."""
    device, one_core = config.torch_device, goes_a_client_a_thread(config)
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": device_name(device),
        **({} if one_core else _threads(config)),
        "graph": not config.wire and goes_static(config, Link()),
        "side_by_side": goes_side_by_side(config),
        "client_threads": one_core,
        "compiled": goes_compiled(config),
    }


def _threads(config: RunConfig | None) -> dict[str, int]:
    return {"threads": (config and config.threads) or torch.get_num_threads()}


def _sha256_of(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# Of what was imported, whatever is edited later.
_CORE_SOURCE = Path(tcs_core.__file__).read_bytes()
_CORE_SHA256 = hashlib.sha256(_CORE_SOURCE).hexdigest()
_LAB_SHA256 = _sha256_of(*sorted(LAB.rglob("*.py")))


@cache
def core_sha256() -> str:
    """Of the core's code as it was imported, without its comments, docstrings and line breaks.

    It stands under every notebook: what a notebook shows stays true when a comment is mended.
    (Records hold the hash of the file as it is, "core_sha256".)
    """
    return code_sha256(_CORE_SOURCE)


def made_with(records: Iterable[dict[str, Any]]) -> str:
    """What records were made with, for the foot of a notebook that reads them."""
    made = [record["provenance"] for record in records]
    torches, data = (", ".join(sorted({one[key] for one in made})) for key in ("torch", "dataset"))
    commits = sorted({str(one.get("commit"))[:7] for one in made})
    said = ", ".join(commits) if 0 < len(commits) < 4 else f"{len(commits)} commits"
    return f"n = {len(made)} records, made with {said}, torch {torches or '–'} · {data or '–'}"


def code_sha256(source: bytes) -> str:
    """Sha256 of what a Python file does: of its syntax tree without docstrings, as text."""
    tree = ast.parse(source)
    with_docstrings = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, with_docstrings) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def device_name(device: torch.device) -> str:
    """What the processor or the GPU is called."""
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
    """The record of a run that ended, without its checksum; its rows were made in these `ways` (see
    `rounding`)."""
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
    """A run's record from its file, checked; ValueError names the file and what is wrong with it.
    With the `config` of a run that wants it, it must be that run's."""
    advice = "; delete it to run again" if config else ""
    return read_json_record(path, lambda record: check_record(record, path, config), advice)


def load_records(
    configs: Iterable[RunConfig], results: str | Path | None = None, diverged: bool = True
) -> dict[str, Record]:
    """The records of these runs that are there, by file name; no run is made.

    Without `diverged`, only of those that got to their end. Raises ValueError for records of
    different data.
    """
    paths = {record_path(config, results): config for config in configs}
    found = {p.name: read_record(p, config) for p, config in paths.items() if p.is_file()}
    one_data(found.values(), paths)
    return {n: record for n, record in found.items() if diverged or record["status"] == "finished"}


def lacking(configs: Iterable[RunConfig], records: Iterable[Record]) -> str:
    """Which of these runs have no record, as a person reads it: "TCS (seeds 1, 2), FedAvg (all 3
    seeds)"; "none" if all have one."""
    there = {record["digest"] for record in records}
    asked: dict[str, list[RunConfig]] = {}
    for config in configs:
        asked.setdefault(config.scheme.name, []).append(config)
    said = []
    for name, runs in asked.items():
        seeds = [str(config.seed) for config in runs if config.digest not in there]
        if len(seeds) == len(runs):
            said.append(name if len(runs) == 1 else f"{name} (all {len(runs)} seeds)")
        elif seeds:
            said.append(f"{name} (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})")
    return ", ".join(said) or "none"


def one_data(records: Iterable[Record], paths: Iterable[Path]) -> None:
    """ValueError for records of one data set, or one cut of it, that was another each time."""
    seen = {(data_source(r["config"]), r["provenance"]["fingerprint"]) for r in records}
    if len(seen) > len({source for source, _ in seen}):
        folders = ", ".join(sorted({str(path.parent) for path in paths}))
        raise ValueError(f"{folders}: records of different data, allowed: a folder for each")


def data_source(config: dict[str, Any]) -> tuple:
    """What a fingerprint is of: a data set, or what was cut from it to be resized."""
    cut = ("train_samples", "test_samples", "test_unused", "image_size")
    return (config["dataset"], *(config.get(key) for key in cut if config.get("image_size")))


def config_of(record: dict[str, Any], **where: Any) -> RunConfig:
    """The configuration that makes a record's run again, in the same way; `where` sets what
    a record does not hold (data_root, device) or changes how it is made (threads, graph, ...).

    Raises ValueError if this core has no such run: a rule from outside the module, a field that it
    does not know.
    """
    given, made = dict(record["config"]), record["provenance"]
    how = {"threads": made.get("threads")}
    ways = ("graph", "side_by_side", "client_threads", "compiled")
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


# What a record must be ────────────────────────────────────────────────────────────────────────────

Count = Annotated[int, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class _Row(BaseModel):
    epoch: Count
    rounds: Count
    dense_rounds: Count
    bits_up: Count
    bits_down: Count
    bytes_up: Count
    bytes_down: Count
    accuracy: Fraction
    mask_overlap: Fraction | None = None


def _in_order(rows: list[_Row]) -> list[_Row]:
    if [row.epoch for row in rows] != list(range(1, len(rows) + 1)):
        raise ValueError("epochs are missing")
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
    """ValueError unless it is a run's record, and of this run if one is given."""
    validated(_Record, record, f"{path}: not a record")
    own = digest_of(record["config"])
    if own != record["digest"] or (config is not None and own != config.digest):
        raise ValueError(f"{path}: config: is that of another run")
    made, epochs = len(record["rows"]), record["config"]["epochs"]
    if record["status"] == "finished" and made != epochs:
        raise ValueError(f"{path}: rows: got {made} epochs, allowed: {epochs}")
