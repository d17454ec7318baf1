"""Runs: one run makes one record; checkpoints; many runs side by side; progress."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import io
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tcs_core import RULES, NotFiniteError
from tcs_lab.data import Dataset, _fingerprint, load_dataset
from tcs_lab.errors import cut as _cut
from tcs_lab.files import _POLL_SECONDS, _alone, _say_waiting, _sweep, _write_whole, cache_folder
from tcs_lab.ranks import RankError, Ranks
from tcs_lab.records import (
    _git_state,
    _record,
    _rounding,
    _rows_problem,
    core_sha256,
    read_record,
    record_path,
)
from tcs_lab.settings import RunConfig, checked
from tcs_lab.training import Row, Training

# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 10. Runs, records, checkpoints
#     One run, one JSON record: results/<profile>/runs/<scheme>-<eta>-<seed>-<hash>.json, written
#     whole or not at all. Checkpoints live in the cache folder and disappear with the end of their
#     run.
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def run(
    config: RunConfig,
    results: str | Path | None = None,
    on_epoch: Callable[[Row], None] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Train one configuration and return its record; a record or checkpoint that exists is used.

    `results` is the results folder (default: the one beside this module). `on_epoch` is called with
    every row as it is made. An update that is not finite ends the run: its record has status
    "diverged", says at which client and round, and holds the epochs before. If another process
    makes the same run, this one waits for it (and says so on stderr) and takes its record. With
    several `ranks` (`joined_ranks`) all of them call this; rank 0 writes, all return the record.
    Raises ValueError or FileNotFoundError for data or files that can't be used.
    """
    ranks = ranks or Ranks()
    while (record := _run(config, results, on_epoch, _say_waiting, ranks)) is None:
        time.sleep(_POLL_SECONDS)  # of several ranks none may wait alone
    return record


def _run(
    config: RunConfig, results: str | Path | None, on_epoch: Callable[[Row], None] | None,
    waiting: Callable[[str], None] | None, ranks: Ranks,
) -> dict[str, Any] | None:  # fmt: skip
    """`run`; without a `waiting` it gives None at once if another process makes the run."""
    path = record_path(config, results)
    if ranks.first(path.exists):
        return ranks.first(lambda: read_record(path, config))
    with contextlib.ExitStack() as until:
        alone = _alone(_checkpoint_path(config), waiting if ranks.size == 1 else None)
        if not ranks.first(lambda: until.enter_context(alone)):
            return None
        if ranks.first(path.exists):  # made while this process waited
            return ranks.first(lambda: read_record(path, config))
        source = (config.dataset, config.data_root, config.data_label)
        data = ranks.in_turn(lambda: load_dataset(*source))
        data = data.first(config.train_samples, config.test_samples).resized(config.image_size)
        with _arithmetic(config.threads), _memory_kept():
            record = _train(config, data, on_epoch, ranks)
        return ranks.first(lambda: _keep_record(path, record, config))


def _keep_record(path: Path, record: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    _write_whole(path, lambda f: f.write(text.encode()))
    _checkpoint_path(config).unlink(missing_ok=True)
    _sweep(_checkpoint_path(config))
    return record


def _train(
    config: RunConfig, data: Dataset, on_epoch: Callable[[Row], None] | None, ranks: Ranks
) -> dict[str, Any]:
    _git_state()  # now: the code may be edited while this runs
    federation = ranks.together(lambda: Training(config, data, ranks))
    rows, ways = _load_checkpoint(config, federation)
    ways += [way for way in [_rounding(config)] if way not in ways]
    status, reason, saved = "finished", None, _Pace()
    for epoch in range(len(rows), config.epochs):
        start = time.perf_counter()
        try:
            row = federation.epoch(epoch) | federation.evaluate()
        except NotFiniteError as error:
            status, reason = "diverged", str(error)
            break
        losses = {"training": row["train_loss"], "test": row["loss"]}
        if wrong := [which for which, loss in losses.items() if not math.isfinite(loss)]:
            status, reason = "diverged", f"the {wrong[0]} loss is not finite; epoch {epoch + 1}"
            break
        rows.append(row | {"seconds": round(time.perf_counter() - start, 3)})
        if on_epoch:
            on_epoch(rows[-1])
        if epoch + 1 < config.epochs and ranks.first(saved.due):
            saved.took(lambda: _save_checkpoint(config, federation, rows, ways))
    return _record(config, federation, data, rows, ways, status, reason)


class _Pace:
    """Spends at most a twentieth of the time on checkpoints."""

    def __init__(self) -> None:
        self.next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self.next

    def took(self, work: Callable[[], None]) -> None:
        start = time.monotonic()
        work()
        self.next = time.monotonic() + 20 * (time.monotonic() - start)


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


def _checkpoint_path(config: RunConfig) -> Path:
    return cache_folder() / "checkpoints" / f"{config.profile}-{config.record_name[:-5]}.pt"


def _save_checkpoint(
    config: RunConfig, federation: Training, rows: list[Row], ways: list[dict[str, Any]]
) -> None:
    """One file, the same whatever the number of ranks; `ways` in which its rows were made."""
    state = {"identity": _state_identity(config, federation), "rows": json.dumps(rows)}
    state["ways"] = json.dumps(ways)
    state["federation"] = federation.ranks.merged(federation.state_dict())

    def write() -> None:
        state["sha256"] = _state_sha256(state)
        _write_whole(_checkpoint_path(config), lambda f: _torch_save(state, f))

    federation.ranks.first(write)


def _torch_save(state: dict[str, Any], file: Any) -> None:
    """torch.save; it says RuntimeError where the disk is full."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__ or error
        raise cause if isinstance(cause, OSError) else OSError(_cut(str(error))) from error


def _state_identity(config: RunConfig, federation: Training) -> str:
    """A checkpoint continues the same run, on the same data, by the same code."""
    return f"{config.digest} {federation.fingerprint} {core_sha256()}"


def _state_sha256(state: dict[str, Any]) -> str:
    """torch.load does not notice a flipped bit."""
    sha = hashlib.sha256()

    def absorb(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                sha.update(f"{key}:".encode())
                absorb(value[key])
        elif isinstance(value, Tensor):
            sha.update(_fingerprint([value.cpu()]).encode())
        else:
            sha.update(f"{value!r};".encode())

    absorb({key: value for key, value in state.items() if key != "sha256"})
    return sha.hexdigest()


def _load_checkpoint(
    config: RunConfig, federation: Training
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Puts the federation where the run stopped; its rows so far, and the ways they were made in.

    The state of other code or data is not used: the run starts afresh.
    """
    path, ranks, state = _checkpoint_path(config), federation.ranks, {}
    try:
        rows, ways = ranks.first(lambda: _read_checkpoint(config, federation, state))
        if rows:
            whole, clients = state.get("federation"), config.client_count
            federation.load_state_dict(ranks.split(whole, clients, federation.device))
        if sum(row["rounds"] for row in rows) != federation.compressor.round:
            raise ValueError("rows and state are of different rounds")
        return rows, ways
    except RankError:
        raise
    except Exception as error:  # unpickling hostile or cut-off files raises many kinds
        raise ValueError(f"{path}: not a usable checkpoint ({error}); delete it") from error


def _read_checkpoint(
    config: RunConfig, federation: Training, state: dict[str, Any]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows and ways of a checkpoint that this run can go on from, if any; fills `state`."""
    path = _checkpoint_path(config)
    if not path.exists():
        return [], []
    state.update(torch.load(path, map_location=federation.device, weights_only=True))
    if state["identity"] != _state_identity(config, federation):
        return [], []
    if state["sha256"] != _state_sha256(state):
        raise ValueError("its content is not what was written")
    rows = json.loads(state["rows"])
    if problem := _rows_problem(rows) or ("" if rows else "there are none"):
        raise ValueError(f"rows: {problem}")
    if not rows:
        raise ValueError("it has no rows")
    return rows, json.loads(state["ways"])


# One at a time ────────────────────────────────────────────────────────────────────────────────────
#    A lock is a file in the cache folder that the operating system locks for a process: it ends
#    with the process, however that ends. Processes with different cache folders do not see each
#    other's: they may do the same work twice, but every file is still written whole.


# Many runs ────────────────────────────────────────────────────────────────────────────────────────


def run_all(
    configs: Iterable[RunConfig], results: str | Path | None = None, jobs: int = 1,
    progress: bool = True, ranks: Ranks | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every configuration's record, in order; made once where it is asked for twice.

    `jobs` processes work side by side (rules defined outside this module run in this one). A run
    that a process started elsewhere is making comes last, and its record is taken. A bar shows
    which run of how many, epoch, accuracy, bits and time left. With several `ranks` all walk the
    list together, whatever `jobs` says.
    """
    checked("jobs", jobs)
    configs, ranks = list(configs), ranks or Ranks()
    jobs = jobs if ranks.size == 1 else 1
    wanted = {record_path(c, results): c for c in configs}
    missing = ranks.first(lambda: [not path.exists() for path in wanted])
    todo = [c for c, new in zip(wanted.values(), missing, strict=True) if new]
    apart = [c for c in todo if jobs > 1 and RULES[c.scheme.rule].__module__ == __name__]
    here = [c for c in todo if c not in apart]
    with Progress(todo, enabled=progress and not ranks.rank) as bar:
        if apart:
            _run_apart(apart, results, jobs, bar)
        _run_here(here, results, bar, ranks)
    records = ranks.first(lambda: [read_record(path, c) for path, c in wanted.items()])
    done = dict(zip(wanted, records, strict=True))
    return [done[record_path(c, results)] for c in configs]


def _run_here(
    configs: list[RunConfig], results: str | Path | None, bar: Progress, ranks: Ranks
) -> None:
    """The runs in this process, one by one; those that another process is making come last."""
    left = deque(configs)
    busy = 0  # runs in a row that others were making
    while left:
        config = left.popleft()
        if _run(config, results, lambda row, c=config: bar.epoch(c, row), None, ranks):
            bar.ended(config)
            busy = 0
            continue
        left.append(config)
        busy += 1
        if busy >= len(left):  # nothing else to do
            bar.waiting(config)
            time.sleep(_POLL_SECONDS)


_rows_queue: Any = None  # set in worker processes


def _start_worker(rows: Any) -> None:
    """In a worker process: it reports to `rows` and ends when the process that started it ends."""
    global _rows_queue
    _rows_queue = rows
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(config: RunConfig, results: str | Path | None) -> bool:
    """In a worker process: makes a run; False if a process started elsewhere is making it."""
    if _run(config, results, lambda row: _rows_queue.put((config.digest, row)), None, Ranks()):
        return True
    time.sleep(_POLL_SECONDS)
    return False


def _run_apart(
    configs: list[RunConfig], results: str | Path | None, jobs: int, bar: Progress
) -> None:
    """The runs in `jobs` processes, each with its share of the machine's threads: the same however
    many runs are left, so that a run that goes on has as many as before."""
    share = max(1, torch.get_num_threads() // jobs)
    load_dataset(configs[0].dataset, configs[0].data_root, configs[0].data_label)  # decode once
    context = multiprocessing.get_context("spawn")
    rows = context.SimpleQueue()
    with ProcessPoolExecutor(min(jobs, len(configs)), context, _start_worker, (rows,)) as pool:

        def submit(config: RunConfig) -> Future:
            own = dataclasses.replace(config, threads=config.threads or share)
            with _interrupts_held():
                return pool.submit(_work, own, results)

        try:
            _follow({submit(config): config for config in configs}, submit, rows, bar)
        except BaseException as error:
            workers = list(pool._processes.values())  # which shutdown forgets
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    "a worker process was killed (out of memory?); the same command goes on"
                ) from error
            raise


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


def _follow(
    running: dict[Future, RunConfig], submit: Callable[[RunConfig], Future], rows: Any,
    bar: Progress,
) -> None:  # fmt: skip
    """Feeds the bar until all are done; then raises what the first failed run raised.

    A run that is made elsewhere goes to the end of the queue.
    """
    by_digest = {config.digest: config for config in running.values()}
    ended: list[Future] = []
    while running:
        done, _ = wait_for(running, _POLL_SECONDS, FIRST_COMPLETED)
        while not rows.empty():
            digest, row = rows.get()
            bar.epoch(by_digest[digest], row)
        for future in done:
            config = running.pop(future)
            if future.exception() is None and not future.result():
                bar.waiting(config)
                running[submit(config)] = config
            else:
                ended.append(future)
                bar.ended(config)
    for future in ended:
        future.result()


class Progress:
    """One line that follows runs: on a terminal, in a notebook, under papermill.

    In a notebook the line replaces itself and is gone at the end, so saved notebooks stay clean.
    """

    def __init__(self, configs: list[RunConfig], enabled: bool = True):
        self.left = {c.digest: c.epochs for c in configs}
        self.runs, self.finished = len(configs), 0
        self.enabled, self.told = enabled, set()
        notebook = _in_notebook()
        self.line = _NotebookLine() if notebook else None
        quiet = not enabled or not configs or not (notebook or sys.stderr.isatty())
        self.bar = tqdm(
            total=sum(self.left.values()), unit=" epochs", disable=quiet, leave=False,
            file=self.line or sys.stderr, mininterval=1.0 if notebook else 0.1,
            ncols=130 if notebook else None, ascii=False, dynamic_ncols=not notebook,
            bar_format="{desc} |{bar:16}| {n_fmt}/{total_fmt} epochs, {remaining} left",
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        shown = not self.bar.disable
        self.bar.close()
        if self.line and shown:
            self.line.clear()

    def epoch(self, config: RunConfig, row: Row) -> None:
        """Shows a row; one that another process sent before its run was counted may come late."""
        if config.digest not in self.left:
            return
        bits = row["bits_up"] / (row["rounds"] * config.scheme.local_steps)
        traffic = "" if config.scheme.centralized else f", {bits / 8e3:,.1f} kB up a step"
        self.left[config.digest] -= 1
        self.bar.set_description_str(
            f"run {min(self.finished + 1, self.runs)}/{self.runs}: {config.scheme.name} eta "
            f"{config.eta:g} seed {config.seed}, epoch {row['epoch']}/{config.epochs}, "
            f"{100 * row['accuracy']:.1f} %{traffic}",
            refresh=False,
        )
        self.bar.update(1)

    def waiting(self, config: RunConfig) -> None:
        """Says, once a run, that another process is making it."""
        if config.digest in self.told:
            return
        self.told.add(config.digest)
        what = f"{config.scheme.name} eta {config.eta:g} seed {config.seed}"
        if not self.bar.disable:
            self.bar.set_description_str(f"waiting for another process, which works on {what}")
        elif self.enabled:
            _say_waiting(what)

    def ended(self, config: RunConfig) -> None:
        """Counts the run; epochs that were reused, or never came, are taken off the total."""
        self.finished += 1
        self.bar.total -= self.left.pop(config.digest, 0)
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
