"""Runs: the training of a RunConfig as a job. `run` makes one run, and `run_all` makes many."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from tcs_core import NotFiniteError
from tcs_lab.runs.checkpoints import (
    Pace,
    checkpoint_path,
    epochs_kept,
    load_checkpoint,
    save_checkpoint,
)
from tcs_lab.runs.estimates import estimate_run
from tcs_lab.runs.jobs import Job, Tell, make_job, missing_jobs
from tcs_lab.runs.parameters import check_parameter
from tcs_lab.runs.queue import run_queue
from tcs_lab.runs.records import (
    Record,
    check_record,
    check_same_data,
    data_source,
    git_state,
    make_record,
    record_path,
    way_of,
)
from tcs_lab.tasks.images import user_path
from tcs_lab.training.configuration import (
    RUN_KEYS,
    WHERE_KEYS,
    RunConfig,
    list_outside_parts,
)
from tcs_lab.training.training import Data, Row, Training, load_data


@dataclasses.dataclass(frozen=True)
class Run(Job):
    """The training of one configuration, with a row for each epoch. A checkpoint that exists is used.

    An update that is not finite ends the run: its record has status "diverged", says at which
    client and round, and holds the epochs before.

    `run_all` and `run_queue` take runs of a subclass, too, which may do something around `make`, such
    as registering a rule that a worker does not know.
    """

    pattern = "{profile}/runs/*.json"
    config: RunConfig
    minutes: float | None = None

    @property
    def identity(self) -> dict[str, Any]:
        return self.config.identity()

    @property
    def digest(self) -> str:
        return self.config.digest

    @property
    def name(self) -> str:
        return f"{self.config.scheme.name}, seed {self.config.seed}"

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.config.epochs

    @property
    def columns(self) -> dict[str, Any]:
        config = self.config
        return {"scheme": config.scheme.name, "eta": f"{config.eta:g}", "seed": config.seed,
                "epochs": config.epochs}  # fmt: skip

    def path(self, results: str | Path | None = None) -> Path:
        return record_path(self.config, results)

    def lock(self, results: str | Path | None = None) -> Path:
        return checkpoint_path(self.config)

    def make(self, tell: Tell = None) -> Record:
        data = load_data(self.config)
        with set_arithmetic(self.config.threads), keep_freed_memory():
            return _train(self.config, data, tell)

    @property
    def can_travel(self) -> bool:
        """Whether a worker can make it: a worker does not know what was registered in a notebook."""
        return not list_outside_parts(self.config.scheme)

    def with_threads(self, threads: int) -> Run:
        config = dataclasses.replace(self.config, threads=self.config.threads or threads)
        return dataclasses.replace(self, config=config)

    def parts_kept(self) -> int:
        return epochs_kept(self.config)

    def forget(self) -> None:
        checkpoint_path(self.config).unlink(missing_ok=True)

    def check(self, record: Record, path: Path) -> None:
        check_record(record, path, self.config)

    def describe(self, row: dict[str, Any]) -> str:
        config = self.config
        bits = row["bits_up"] / (row["rounds"] * config.scheme.local_steps)
        traffic = "" if config.scheme.centralized else f", {bits / 8e3:,.1f} kB up a step"
        return (
            f"{config.scheme.name} eta {config.eta:g} seed {config.seed}, epoch "
            f"{row['epoch']}/{config.epochs}, {100 * row['accuracy']:.1f} %{traffic}"
        )

    def seconds_alone(self, results: str | Path | None = None) -> float | None:
        planned = super().seconds_alone(results)
        return estimate_run(self.config, results) if planned is None else planned

    @classmethod
    def read_all(
        cls, jobs: Sequence[Run], results: str | Path | None = None, closely: bool = False
    ) -> list[Record]:
        """Read the records of runs, which must all be of the same data. If `closely`, compare them with
        the data that is given now, too; it is loaded once for each way of cutting its images."""
        seen, records = set[tuple](), []
        for job in jobs:
            record = job.read(results)
            source = (job.config.data_root, *data_source(job.identity))
            if closely and source not in seen:
                _check_data(record, job.config, job.path(results))
            seen.add(source)
            records.append(record)
        check_same_data(records, [job.path(results) for job in jobs])
        return records

    @classmethod
    def divergence(cls, record: Record) -> str | None:
        return str(record["reason"]) if record["status"] == "diverged" else None

    @classmethod
    def seconds_taken(cls, record: Record) -> float:
        return record["provenance"]["wall_seconds"]

    @classmethod
    def facts(cls, record: Record, path: Path) -> Mapping[str, Any]:
        check_record(record, path)
        # Records before a setting existed have its default. (A record's `learning_rate` is that of
        # centralized training, too.)
        settings = RUN_KEYS - WHERE_KEYS - {"centralized_learning_rate"}
        usual = {key: getattr(RunConfig, key) for key in settings}
        return usual | record["config"] | {
            "profile": path.parents[1].name, "status": record["status"],
            "digest": record["digest"], "scheme": record["config"]["scheme"]["name"],
        }  # fmt: skip


def _check_data(record: Record, config: RunConfig, path: Path) -> None:
    """Raise ValueError if the images that are given, or the text that this Python brings, are not
    those that the record's run saw."""
    root = config.data_root
    given = config.dataset == "folder" and root and user_path(root).exists()
    if not given and config.dataset != "text":
        return
    if load_data(config).fingerprint != record["provenance"]["fingerprint"]:
        got = f"data_root: got {root}" if given else f"dataset: got text of Python {sys.version}"
        raise ValueError(
            f"{got}, which is other data than that of the record {path}; allowed: the data of that "
            "record, or another results folder or profile for this data"
        )


def run(config: RunConfig, results: str | Path | None = None, on_epoch: Tell = None) -> Record:
    """Train one configuration and return its record; a record or checkpoint that exists is used.

    `results` is the results folder (default: the project's). `on_epoch` is called with every row
    as it is made. If another process makes the same run, this one waits for it (and says so on
    stderr) and takes its record.
    Raises ValueError or FileNotFoundError for data or files that can't be used.
    """
    return cast(Record, make_job(Run(config), results, on_epoch))


# One run ──────────────────────────────────────────────────────────────────────────────────────────


def _train(config: RunConfig, data: Data, on_epoch: Tell) -> Record:
    git_state()  # now: the code may be edited while this runs
    training = Training(config, data)
    rows, ways = load_checkpoint(config, training)
    if (way := way_of(config)) not in ways:
        ways.append(way)
    reason, pace = None, Pace()
    for epoch in range(len(rows), config.epochs):
        start = time.perf_counter()
        try:
            row = training.epoch(epoch) | training.evaluate(epoch + 1 == config.epochs)
        except NotFiniteError as error:
            reason = str(error)
        else:
            reason = _loss_problem(row, epoch)
        if reason:
            break
        rows.append(row | {"seconds": round(time.perf_counter() - start, 3)})
        if on_epoch:
            on_epoch(rows[-1])
        if epoch + 1 < config.epochs and pace.due():
            with pace:
                save_checkpoint(config, training, rows, ways)
    status = "diverged" if reason else "finished"
    return make_record(config, training, data, rows, ways, status, reason)


def _loss_problem(row: Row, epoch: int) -> str | None:
    for which, loss in ("training", row["train_loss"]), ("test", row["loss"]):
        if not math.isfinite(loss):
            return f"the {which} loss is not finite; epoch {epoch + 1}"
    return None


@contextlib.contextmanager
def set_arithmetic(threads: int | None) -> Iterator[None]:
    """Within the block, torch uses so many CPU threads and computes fp32 in fp32 on a GPU, too
    (convolutions would be in TF32). cuDNN tries which of its convolutions is the fastest for each
    shape, because a run has few shapes and each of them comes thousands of times."""
    cudnn = torch.backends.cudnn
    before = torch.get_num_threads(), cudnn.allow_tf32, cudnn.benchmark
    torch.set_num_threads(threads or before[0])
    cudnn.allow_tf32, cudnn.benchmark = False, True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1:]


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Within the block, glibc keeps memory that was freed, because the next step asks for it again.

    By default the kernel gets the memory back and clears every page anew, which takes about a tenth
    of a round of ResNet-18. Without glibc nothing changes.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        yield
        return
    _TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_MMAP_THRESHOLD, 2**30)
    try:
        yield
    finally:  # the most that glibc sets by itself for programs that free large blocks
        libc.mallopt(_TRIM_THRESHOLD, 2**26)
        libc.mallopt(_MMAP_THRESHOLD, 2**25)
        libc.malloc_trim(0)


# Many runs ────────────────────────────────────────────────────────────────────────────────────────


def run_all(
    configs: Iterable[RunConfig | Run], results: str | Path | None = None, jobs: int = 1,
    progress: bool = True,
) -> list[Record]:  # fmt: skip
    """Return every configuration's record, in order; a run that is asked for twice is made once. A
    `Run` of a subclass may stand for a configuration.

    The runs go through the queue (see `run_queue`): with several `jobs`, so many processes work side
    by side, each with its share of the threads. Runs of rules that were registered elsewhere than
    in core and lab are made in this process. A run that a process started elsewhere is making comes
    last, and its record is taken. The first run that fails ends all; the same call goes on. A bar
    shows which run of how many it is, its epoch, accuracy, bits and the time left.
    """
    jobs = check_parameter("jobs", jobs)
    wanted = [one if isinstance(one, Run) else Run(one) for one in configs]
    once = list({run.path(results): run for run in wanted}.values())
    if jobs > 1:
        # those with the most rounds take longest and come first; otherwise a core waits at the end
        once.sort(
            key=lambda run: (not run.config.scheme.centralized, run.config.scheme.local_steps)
        )
        if missing := [run for run in missing_jobs(once, results) if run.can_travel]:
            load_data(missing[0].config)  # decode the images once, not in every worker
    made = run_queue(lambda: once, results, progress, jobs)
    records = {run.path(results): record for run, record in zip(once, made, strict=True)}
    return [records[run.path(results)] for run in wanted]
