"""Runs: one run makes one record; checkpoints; many runs side by side; progress."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import io
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

import joblib
import torch
from joblib.externals.loky import get_reusable_executor
from joblib.parallel import get_active_backend
from tqdm import tqdm

import tcs_core
from tcs_core import RULES, NotFiniteError
from tcs_lab.data import Dataset, load_dataset
from tcs_lab.errors import cut, one_line
from tcs_lab.files import alone, cache_folder, say_waiting, write_whole
from tcs_lab.ranks import RankError, Ranks
from tcs_lab.records import (
    check_rows,
    git_state,
    made_record,
    read_record,
    record_path,
    rounding,
)
from tcs_lab.settings import RunConfig, checked
from tcs_lab.training import Row, Training

OnEpoch = Callable[[Row], None] | None
_POLL_SECONDS = 0.2  # how often a waiting process looks again


def run(
    config: RunConfig, results: str | Path | None = None, on_epoch: OnEpoch = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train one configuration and return its record; a record or checkpoint that exists is used.

    `results` is the results folder (default: the project's). `on_epoch` is called with every row
    as it is made. An update that is not finite ends the run: its record has status "diverged", says
    at which client and round, and holds the epochs before. If another process makes the same run,
    this one waits for it (and says so on stderr) and takes its record. With several `ranks`
    (`joined_ranks`) all of them call this; rank 0 writes, all return the record.
    Raises ValueError or FileNotFoundError for data or files that can't be used.
    """
    ranks, said = ranks or Ranks(), False
    while (record := _run(config, results, on_epoch, ranks)) is None:
        if not said and ranks.rank == 0:
            say_waiting(config.record_name.removesuffix(".json"))
        said = True
        time.sleep(_POLL_SECONDS)  # of several ranks none may wait alone
    return record


def _run(
    config: RunConfig, results: str | Path | None, on_epoch: OnEpoch, ranks: Ranks
) -> dict[str, Any] | None:
    """`run`, but None at once if another process makes it."""
    path = record_path(config, results)
    with contextlib.ExitStack() as until:
        lock = alone(_checkpoint_path(config))
        if not ranks.first(lambda: path.exists() or until.enter_context(lock)):
            return None
        if ranks.first(path.exists):  # perhaps made a moment ago
            return ranks.first(lambda: read_record(path, config))
        source = (config.dataset, config.data_root, config.data_label)
        data = ranks.in_turn(lambda: load_dataset(*source))
        data = data.first(config.train_samples, config.test_samples).resized(config.image_size)
        with _arithmetic(config.threads), _memory_kept():
            record = _train(config, data, on_epoch, ranks)
        ranks.first(lambda: _keep_record(path, record, config))
        return record


def _keep_record(path: Path, record: dict[str, Any], config: RunConfig) -> None:
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))
    _checkpoint_path(config).unlink(missing_ok=True)


def _train(config: RunConfig, data: Dataset, on_epoch: OnEpoch, ranks: Ranks) -> dict[str, Any]:
    git_state()  # now: the code may be edited while this runs
    training = ranks.together(lambda: Training(config, data, ranks))
    rows, ways = _load_checkpoint(config, training)
    ways += [way for way in [rounding(config)] if way not in ways]
    reason, pace = None, _Pace()
    for epoch in range(len(rows), config.epochs):
        start = time.perf_counter()
        try:
            row = training.epoch(epoch) | training.evaluate()
        except NotFiniteError as error:
            reason = str(error)
        else:
            reason = _loss_problem(row, epoch)
        if reason:
            break
        rows.append(row | {"seconds": round(time.perf_counter() - start, 3)})
        if on_epoch:
            on_epoch(rows[-1])
        if epoch + 1 < config.epochs and ranks.first(pace.due):
            with pace:
                _save_checkpoint(config, training, rows, ways)
    status = "diverged" if reason else "finished"
    return made_record(config, training, data, rows, ways, status, reason)


class _Pace:
    """Spends at most a twentieth of the time on checkpoints."""

    next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self.next

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.next = time.monotonic() + 20 * (time.monotonic() - self.start)


def _loss_problem(row: Row, epoch: int) -> str | None:
    for which, loss in ("training", row["train_loss"]), ("test", row["loss"]):
        if not math.isfinite(loss):
            return f"the {which} loss is not finite; epoch {epoch + 1}"
    return None


@contextlib.contextmanager
def _arithmetic(threads: int | None) -> Iterator[None]:
    """So many CPU threads; and fp32 is fp32 on a GPU too, whose convolutions would be in TF32."""
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads or before[0])
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def _memory_kept() -> Iterator[None]:
    """What a step frees, the next one asks for again: meanwhile glibc keeps it.

    By default the kernel gets it back and clears every page anew, which is about a tenth of a round
    of ResNet-18. Without glibc nothing changes.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
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


# Checkpoints ──────────────────────────────────────────────────────────────────────────────────────
#    In the cache folder; they disappear with the end of their run. One file, the same whatever the
#    number of ranks.

# To be raised by hand whenever a training that goes on from an older checkpoint would not end in
# the record of one that was never stopped: other keys, shapes, units or order of random numbers.
STATE_VERSION = 1


def _checkpoint_path(config: RunConfig) -> Path:
    return cache_folder() / "checkpoints" / f"{config.profile}-{config.record_name[:-5]}.pt"


def _made_for(config: RunConfig, training: Training) -> dict[str, Any]:
    """What a run must have in common with the checkpoint that it goes on from."""
    data = training.fingerprint
    return {"state version": STATE_VERSION, "settings": config.digest, "data": data}


def _save_checkpoint(
    config: RunConfig, training: Training, rows: list[Row], ways: list[dict[str, Any]]
) -> None:
    """`ways` are those in which the rows were made."""
    state = _made_for(config, training) | {"rows": rows, "ways": ways}
    state["training"] = training.ranks.merged(training.state_dict())
    path = _checkpoint_path(config)
    training.ranks.first(lambda: write_whole(path, lambda file: _torch_save(state, file)))


def _torch_save(state: dict[str, Any], file: Any) -> None:
    """torch.save; it says RuntimeError where the disk is full."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(str(error)) from error


def _load_checkpoint(
    config: RunConfig, training: Training
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Puts the training where the run stopped; its rows so far, and the ways they were made in.

    A checkpoint that is there but not for this run is not used, and stderr says why.
    Raises ValueError for one that is damaged.
    """
    path, ranks, state = _checkpoint_path(config), training.ranks, {}
    try:
        rows, ways = ranks.first(lambda: _read_checkpoint(config, training, state))
        if rows:
            whole, clients = state.get("training"), config.client_count
            training.load_state_dict(ranks.split(whole, clients, training.device))
        if sum(row["rounds"] for row in rows) != training.compressor.round:
            raise ValueError("rows and state are of different rounds")
        return rows, ways
    except RankError:
        raise
    except Exception as error:  # unpickling hostile or cut-off files raises many kinds
        raise ValueError(
            f"{path}: not a usable checkpoint ({cut(one_line(error))}); delete it"
        ) from error


def _read_checkpoint(
    config: RunConfig, training: Training, state: dict[str, Any]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows and ways of a checkpoint that this run can go on from, if any; fills `state`."""
    path = _checkpoint_path(config)
    if not path.exists():
        return [], []
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():  # torch.load does not look at the checksums
            raise ValueError(f"{damaged} is not what was written")
    state.update(torch.load(path, map_location=training.device, weights_only=True))
    for what, wanted in _made_for(config, training).items():
        if (found := state.get(what)) != wanted:
            why = f"its {what} is {found!r}, this run's {wanted!r}"
            print(f"{path}: checkpoint not used, {why}", file=sys.stderr, flush=True)
            return [], []
    check_rows(state["rows"])
    if not state["rows"]:
        raise ValueError("it has no rows")
    return state["rows"], state["ways"]


# Many runs ────────────────────────────────────────────────────────────────────────────────────────


def run_all(
    configs: Iterable[RunConfig], results: str | Path | None = None, jobs: int = 1,
    progress: bool = True, ranks: Ranks | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every configuration's record, in order; made once where it is asked for twice.

    `jobs` processes work side by side, or the workers of the backend that surrounds the call, as in
    `with joblib.parallel_config(backend="dask"):`; those need this package and the same results
    folder. (Rules that were registered outside the core run in this process.) A run that a process
    started elsewhere is making comes last, and its record is taken. The first run that fails ends
    all; the same call goes on. A bar shows which run of how many, epoch, accuracy, bits and time
    left. With several `ranks` all walk the list together, whatever `jobs` says.
    """
    checked("jobs", jobs)
    configs, ranks = list(configs), ranks or Ranks()
    if jobs == 1 and ranks.size == 1:
        backend, asked = get_active_backend()  # under parallel_config
        jobs = asked or backend.default_n_jobs  # without it: 1
    wanted = {record_path(c, results): c for c in configs}
    missing = ranks.first(lambda: [not path.exists() for path in wanted])
    todo = [c for c, new in zip(wanted.values(), missing, strict=True) if new]
    with Progress(todo, enabled=progress and not ranks.rank) as bar:
        for wait in (False, True):
            apart = [c for c in todo if jobs != 1 and ranks.size == 1 and _in_core(c)]
            here = [c for c in todo if c not in apart]
            for config in [
                *_run_apart(apart, results, jobs, wait, bar),
                *_run_here(here, results, wait, bar, ranks),
            ]:
                todo.remove(config)
    records = ranks.first(lambda: [read_record(path, c) for path, c in wanted.items()])
    done = dict(zip(wanted, records, strict=True))
    return [done[record_path(c, results)] for c in configs]


def _in_core(config: RunConfig) -> bool:
    """Whether a worker knows the rule: one that was registered in a notebook, it does not."""
    return RULES[config.scheme.rule].__module__ == tcs_core.__name__


def _run_here(
    configs: list[RunConfig], results: str | Path | None, wait: bool, bar: Progress, ranks: Ranks
) -> list[RunConfig]:
    """The runs in this process, one by one, but for those that another process is making, unless
    told to `wait`; those that were made."""
    made = []
    for config in configs:
        make = run if wait else _run
        if make(config, results, lambda row, c=config: bar.epoch(c.digest, row), ranks):
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
    load_dataset(own[0].dataset, own[0].data_root, own[0].data_label)  # decode once
    made, pool = set(), joblib.Parallel(min(jobs, len(own)), return_as="generator_unordered")
    with _rows_shown(bar) as told:
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

    if os.getppid() == parent:
        _end_with_parent(parent)
    with _ONE_RUN:
        record = (run if wait else _run)(config, results, tell, Ranks())
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
def _rows_shown(bar: Progress) -> Iterator[Path]:
    """A file: the rows that workers append to it, a thread shows."""
    done = threading.Event()

    def follow() -> None:
        with told.open() as file:
            while not done.wait(_POLL_SECONDS):
                for line in file:
                    bar.epoch(*json.loads(line))

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "rows"
        told.touch()
        context = contextvars.copy_context()  # where a notebook's output belongs
        thread = threading.Thread(target=context.run, args=(follow,), daemon=True)
        thread.start()
        try:
            yield told
        finally:
            done.set()
            thread.join()


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


class Progress:
    """One line that follows runs: on a terminal, in a notebook, under papermill.

    In a notebook the line replaces itself and is gone at the end, so saved notebooks stay clean.
    """

    def __init__(self, configs: list[RunConfig], enabled: bool = True):
        self.configs = {config.digest: config for config in configs}
        self.left = {config.digest: config.epochs for config in configs}
        self.line = _NotebookLine() if _in_notebook() else None
        quiet = not enabled or not configs or not (self.line or sys.stderr.isatty())
        self.bar = tqdm(
            total=sum(self.left.values()), unit=" epochs", disable=quiet, leave=False,
            file=self.line or sys.stderr, mininterval=1.0 if self.line else 0.1,
            ncols=130 if self.line else None, ascii=False, dynamic_ncols=not self.line,
            bar_format="{desc} |{bar:16}| {n_fmt}/{total_fmt} epochs, {remaining} left",
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        shown = not self.bar.disable
        self.bar.close()
        if self.line and shown:
            self.line.clear()

    def epoch(self, digest: str, row: Row) -> None:
        """Shows a row; one that another process sent before its run was counted may come late."""
        if digest not in self.left:
            return
        config, runs = self.configs[digest], len(self.configs)
        bits = row["bits_up"] / (row["rounds"] * config.scheme.local_steps)
        traffic = "" if config.scheme.centralized else f", {bits / 8e3:,.1f} kB up a step"
        self.left[digest] -= 1
        self.bar.set_description_str(
            f"run {runs - len(self.left) + 1}/{runs}: {config.scheme.name} eta {config.eta:g} "
            f"seed {config.seed}, epoch {row['epoch']}/{config.epochs}, "
            f"{100 * row['accuracy']:.1f} %{traffic}",
            refresh=False,
        )
        self.bar.update(1)

    def ended(self, digest: str) -> None:
        """Counts the run; epochs that were reused, or never came, are taken off the total."""
        self.bar.total -= self.left.pop(digest, 0)
        self.bar.refresh()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    shell = shell.get_ipython() if shell else None
    return shell is not None and hasattr(shell, "kernel")


class _NotebookLine(io.TextIOBase):
    """A text file for tqdm whose last line is the cell's only output."""

    def write(self, text: str) -> int:
        from IPython.display import clear_output

        line = text.strip("\r\n ")
        if line and "\x1b" not in line:
            clear_output(wait=True)
            print(line, flush=True)
        return len(text)

    def clear(self) -> None:
        from IPython.display import clear_output

        clear_output()
