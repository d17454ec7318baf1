"""Runs: one run makes one record; many runs side by side."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import joblib
import torch
from joblib.externals.loky import get_reusable_executor
from joblib.parallel import get_active_backend

from tcs_core import NotFiniteError
from tcs_lab.runs.checkpoints import Pace, checkpoint_path, load_checkpoint, save_checkpoint
from tcs_lab.runs.parameters import checked
from tcs_lab.runs.progress import Progress, rows_shown
from tcs_lab.runs.records import (
    data_source,
    git_state,
    made_record,
    one_data,
    read_record,
    record_path,
    rounding,
)
from tcs_lab.support.errors import cut, one_line
from tcs_lab.support.files import alone, say_waiting, write_json
from tcs_lab.tasks.images import _user_path
from tcs_lab.training.configuration import RunConfig, from_outside
from tcs_lab.training.training import Data, Row, Training, load_data

OnEpoch = Callable[[Row], None] | None
_POLL_SECONDS = 0.2  # how often a waiting process looks again
_LOOK_SECONDS = 2.0  # and at a whole plan, whose runs others are making
_GRACE_SECONDS = 10.0  # a process that was told to end is killed after so long


def run(
    config: RunConfig, results: str | Path | None = None, on_epoch: OnEpoch = None
) -> dict[str, Any]:
    """Train one configuration and return its record; a record or checkpoint that exists is used.

    `results` is the results folder (default: the project's). `on_epoch` is called with every row
    as it is made. An update that is not finite ends the run: its record has status "diverged", says
    at which client and round, and holds the epochs before. If another process makes the same run,
    this one waits for it (and says so on stderr) and takes its record.
    Raises ValueError or FileNotFoundError for data or files that can't be used.
    """
    said = False
    while (record := _run(config, results, on_epoch)) is None:
        if not said:
            say_waiting(config.record_name.removesuffix(".json"))
        said = True
        time.sleep(_POLL_SECONDS)
    return record


def _run(config: RunConfig, results: str | Path | None, on_epoch: OnEpoch) -> dict[str, Any] | None:
    """`run`, but None at once if another process makes it."""
    path = record_path(config, results)
    with contextlib.ExitStack() as until:
        if not path.exists() and not until.enter_context(alone(checkpoint_path(config))):
            return None
        if path.exists():  # perhaps made a moment ago
            return _reused(path, config)
        check_folder(path.parent)
        data = load_data(config)
        with _arithmetic(config.threads), _memory_kept():
            record = _train(config, data, on_epoch)
        write_json(path, record)
        checkpoint_path(config).unlink(missing_ok=True)
        return record


def _reused(path: Path, config: RunConfig) -> dict[str, Any]:
    """The record that is there; ValueError if the images that are given, or the text that this
    Python brings, are not those it saw."""
    record, root = read_record(path, config), config.data_root
    given = config.dataset == "folder" and root and _user_path(root).exists()
    if not given and config.dataset != "text":
        return record
    if load_data(config).fingerprint != record["provenance"]["fingerprint"]:
        got = f"data_root: got {root}" if given else f"dataset: got text of Python {sys.version}"
        other = "allowed: its own, or another results folder or profile"
        raise ValueError(f"{got}, other data than those of {path}; {other}")
    return record


def check_folder(path: Path) -> None:
    """ValueError, before hours of work, if no record could be written there."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"results: got {there}, allowed: a folder that can be written")


def _train(config: RunConfig, data: Data, on_epoch: OnEpoch) -> dict[str, Any]:
    git_state()  # now: the code may be edited while this runs
    training = Training(config, data)
    rows, ways = load_checkpoint(config, training)
    ways += [way for way in [rounding(config)] if way not in ways]
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
    return made_record(config, training, data, rows, ways, status, reason)


def _loss_problem(row: Row, epoch: int) -> str | None:
    for which, loss in ("training", row["train_loss"]), ("test", row["loss"]):
        if not math.isfinite(loss):
            return f"the {which} loss is not finite; epoch {epoch + 1}"
    return None


@contextlib.contextmanager
def _arithmetic(threads: int | None) -> Iterator[None]:
    """So many CPU threads. On a GPU fp32 is fp32, too (convolutions would be in TF32), and cuDNN
    tries which of its convolutions is the fastest for each shape: a run has few shapes, and each of
    them comes thousands of times."""
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
def _memory_kept() -> Iterator[None]:
    """What a step frees, the next one asks for again: meanwhile glibc keeps it.

    By default the kernel gets it back and clears every page anew, which is about a tenth of a round
    of ResNet-18. Without glibc nothing changes.
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
    configs: Iterable[RunConfig], results: str | Path | None = None, jobs: int = 1,
    progress: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every configuration's record, in order; made once where it is asked for twice.

    `jobs` processes work side by side, or the workers of the backend that surrounds the call, as in
    `with joblib.parallel_config(backend="dask"):`; those need this package and the same results
    folder. (Rules that were registered elsewhere than in core and lab run in this process.) A run that a process
    started elsewhere is making comes last, and its record is taken. The first run that fails ends
    all; the same call goes on. A bar shows which run of how many, epoch, accuracy, bits and time
    left.
    """
    jobs = checked("jobs", jobs)
    configs = list(configs)
    if jobs == 1:
        backend, asked = get_active_backend()  # under parallel_config
        jobs = asked or backend.default_n_jobs  # without it: 1
    wanted = {record_path(c, results): c for c in configs}
    todo = [c for path, c in wanted.items() if not path.exists()]
    if todo:  # before hours of work: are those that are there of other data?
        _records_of({path: c for path, c in wanted.items() if c not in todo})
    with Progress(todo, enabled=progress) as bar:
        for wait in (False, True):
            # what was registered in a notebook, a worker does not know
            apart = [c for c in todo if jobs != 1 and not from_outside(c.scheme)]
            here = [c for c in todo if c not in apart]
            for config in [
                *_run_apart(apart, results, jobs, wait, bar),
                *_run_here(here, results, wait, bar),
            ]:
                todo.remove(config)
    done = dict(zip(wanted, _records_of(wanted), strict=True))
    return [done[record_path(c, results)] for c in configs]


def run_queue(
    planned: Callable[[], Iterable[RunConfig]], results: str | Path | None = None,
    progress: bool = True, jobs: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """Make the runs that `planned()` names, in their order, and return all their records.

    `planned` is called again after every run, because records decide what a tuned stage needs next.
    With several `jobs`, so many runs are made at a time, each in a process of its own and with its
    share of the threads. Processes that were started apart may share one queue, too: a run that
    another process is making is left to it, and this one takes the next. The first run that fails
    ends the queue; the same call goes on.
    """
    jobs = checked("jobs", jobs)
    wanted = {record_path(c, results): c for c in planned()}
    # before hours of work: are the records that exist of the same data?
    _records_of({path: c for path, c in wanted.items() if path.exists()})
    with Progress([c for path, c in wanted.items() if not path.exists()], progress) as bar:
        take_next = _queue_apart(results, jobs, bar) if jobs > 1 else _queue_here(results, bar)
        with take_next as work:
            while missing := [c for path, c in wanted.items() if not path.exists()]:
                bar.more(missing)
                work(missing)
                wanted = {record_path(c, results): c for c in planned()}
    return _records_of(wanted)


Work = Callable[[list[RunConfig]], None]  # on some of these runs, until one of them has ended


@contextlib.contextmanager
def _queue_here(results: str | Path | None, bar: Progress) -> Iterator[Work]:
    """In this process: makes the first run that nobody else is making."""

    def work(missing: list[RunConfig]) -> None:
        for config in missing:
            if _run(config, results, partial(bar.epoch, config.digest)) is not None:
                bar.ended(config.digest)
                return
        time.sleep(_LOOK_SECONDS)

    yield work


@contextlib.contextmanager
def _queue_apart(results: str | Path | None, jobs: int, bar: Progress) -> Iterator[Work]:
    """In so many processes, which end with the block."""
    running: dict[str, Any] = {}  # processes, by the digest of their run
    share = max(1, torch.get_num_threads() // jobs)

    def work(missing: list[RunConfig]) -> None:
        for config in missing:
            if len(running) < jobs and config.digest not in running and _is_free(config):
                own = dataclasses.replace(config, threads=config.threads or share)
                running[config.digest] = start_run(own, results, told)
        sentinels = [process.sentinel for process in running.values()]
        multiprocessing.connection.wait(sentinels, None if len(running) == jobs else _LOOK_SECONDS)
        for digest, process in list(running.items()):
            if not process.is_alive():
                bar.ended(digest)
                if running.pop(digest).exitcode:
                    raise ChildProcessError("a run of the queue failed; the same command goes on")

    with rows_shown(bar) as told:
        try:
            yield work
        except BaseException:
            stop_processes(list(running.values()))
            raise
        for process in running.values():  # their records are there
            process.join()


def _is_free(config: RunConfig) -> bool:
    """Whether no process is making this run."""
    with alone(checkpoint_path(config)) as free:
        return free


def start_run(config: RunConfig, results: str | Path | None, told: Path) -> Any:
    """A new process that makes a run, and appends its rows to the file `told`."""
    settings = (config, results, told, os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=_run_as_process, args=settings)
    with _interrupts_held():  # Ctrl-C is for this process, which tells the others
        process.start()
    return process


def _run_as_process(config: RunConfig, results: str | Path | None, told: Path, parent: int) -> None:
    """In a process of its own: makes a run. It ends when it is told to, or when the process that
    started it has ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _end_with_parent(parent)

    def tell(row: Row) -> None:
        with told.open("a", encoding="utf-8") as file:
            file.write(json.dumps([config.digest, row]) + "\n")

    try:
        _run(config, results, tell)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        name = f"{config.scheme.name}, seed {config.seed}"
        sys.exit(f"error: {name}: {cut(one_line(error))}")


def stop_processes(processes: Sequence[Any]) -> list[Any]:
    """Tells them to end, as SIGTERM does, and kills what does not; those that were still alive."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    patience = time.monotonic() + _GRACE_SECONDS
    for process in alive:
        process.join(max(0.0, patience - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return alive


def _records_of(wanted: dict[Path, RunConfig]) -> list[dict[str, Any]]:
    """Their records, all of one data set; images are looked at once for each way of cutting."""
    seen, records = set[tuple](), []
    for path, config in wanted.items():
        source = (config.data_root, *data_source(config.identity()))
        records.append((read_record if source in seen else _reused)(path, config))
        seen.add(source)
    one_data(records, wanted)
    return records


def _run_here(
    configs: list[RunConfig], results: str | Path | None, wait: bool, bar: Progress
) -> list[RunConfig]:
    """The runs in this process, one by one, but for those that another process is making, unless
    told to `wait`; those that were made."""
    made = []
    for config in configs:
        make = run if wait else _run
        if make(config, results, partial(bar.epoch, config.digest)):
            bar.ended(config.digest)
            made.append(config)
    return made


def _run_apart(
    configs: list[RunConfig], results: str | Path | None, jobs: int, wait: bool, bar: Progress
) -> list[RunConfig]:
    """`_run_here` in workers, on this machine each with its share of the threads: the same however
    many runs are left, so that a run that goes on has as many as before."""
    if not configs:
        return []
    share = max(1, torch.get_num_threads() // joblib.effective_n_jobs(jobs))
    own = [dataclasses.replace(c, threads=c.threads or share) for c in configs]
    # the longest first, as most rounds are: else a core waits at the end
    own.sort(key=lambda c: (not c.scheme.centralized, c.scheme.local_steps))
    load_data(own[0])  # decode once
    made, pool = set(), joblib.Parallel(min(jobs, len(own)), return_as="generator_unordered")
    with rows_shown(bar) as told:
        with _interrupts_held():  # workers do not see Ctrl-C: it is for this process
            ended = pool(joblib.delayed(_work)(c, results, wait, told, os.getpid()) for c in own)
        try:
            with contextlib.closing(ended):  # whatever is raised, kills the workers
                for digest in filter(None, ended):
                    bar.ended(digest)
                    made.add(digest)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker process was killed (out of memory?); the same command goes on"
            ) from error
    get_reusable_executor().shutdown()  # joblib would keep them for five minutes
    return [c for c in configs if c.digest in made]


_ONE_RUN = threading.Lock()  # a process: threads of a backend would share torch's random numbers


def _work(
    config: RunConfig, results: str | Path | None, wait: bool, told: Path, parent: int
) -> str | None:
    """In a worker: makes a run; its digest, or None if another process is making it."""

    def tell(row: Row) -> None:
        with contextlib.suppress(OSError), told.open("a") as file:  # not on another machine
            file.write(json.dumps([config.digest, row]) + "\n")

    if current_process().name.startswith("LokyProcess"):
        _end_with_parent(parent)
    with _ONE_RUN:
        record = (run if wait else _run)(config, results, tell)
    return config.digest if record else None


@cache
def _end_with_parent(parent: int) -> None:
    """From now on this process ends when the one that started it has ended, however it did."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C comes after the block; processes that are started inside do not see it at all."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
