"""The queue: the jobs of plans are made in their order, by one process or several."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tcs_lab.runs.jobs import Job, make_job, missing_jobs, read_jobs
from tcs_lab.runs.parameters import checked
from tcs_lab.runs.progress import Progress, rows_shown
from tcs_lab.runs.records import Record
from tcs_lab.support.errors import one_line, shorten
from tcs_lab.support.files import hold_lock

_LOOK_SECONDS = 2.0  # how often it looks at a whole plan, whose jobs others are making
_GRACE_SECONDS = 10.0  # a process that was told to end is killed after so long


def run_queue(
    planned: Callable[[], Iterable[Job]], results: str | Path | None = None,
    progress: bool = True, jobs: int = 1,
) -> list[Record]:  # fmt: skip
    """Make the jobs that `planned()` names, in their order, and return all their records.

    `planned` is called again after every job, because records decide what a tuned stage needs next.
    With several `jobs`, so many are made at a time, each in a process of its own and with its
    share of the threads. Processes that were started apart may share one queue, too: a job that
    another process is making is left to it, and this one takes the next. The first job that fails
    ends the queue; the same call goes on.
    """
    jobs = checked("jobs", jobs)
    wanted = list(planned())
    missing = missing_jobs(wanted, results)
    # before hours of work: are the records that exist of the same data?
    read_jobs([job for job in wanted if job.is_made(results)], results)
    with Progress(missing, progress) as bar:
        take_next = _queue_apart(results, jobs, bar) if jobs > 1 else _queue_here(results, bar)
        with take_next as work:
            while missing:
                bar.more(missing)
                work(missing)
                wanted = list(planned())
                missing = missing_jobs(wanted, results)
    return read_jobs({job.path(results): job for job in wanted}.values(), results)


Work = Callable[[list[Job]], None]  # on some of these jobs, until one of them has ended


@contextlib.contextmanager
def _queue_here(results: str | Path | None, bar: Progress) -> Iterator[Work]:
    """In this process: makes the first job that nobody else is making."""

    def work(missing: list[Job]) -> None:
        for job in missing:
            if make_job(job, results, partial(bar.epoch, job.digest), wait=False) is not None:
                bar.ended(job.digest)
                return
        time.sleep(_LOOK_SECONDS)

    yield work


@contextlib.contextmanager
def _queue_apart(results: str | Path | None, jobs: int, bar: Progress) -> Iterator[Work]:
    """In so many processes, which end with the block."""
    running: dict[str, Any] = {}  # processes, by the digest of their job
    share = max(1, torch.get_num_threads() // jobs)

    def work(missing: list[Job]) -> None:
        for job in missing:
            if len(running) < jobs and job.digest not in running and _is_free(job, results):
                running[job.digest] = start_job(job.with_threads(share), results, told)
        sentinels = [process.sentinel for process in running.values()]
        multiprocessing.connection.wait(sentinels, None if len(running) == jobs else _LOOK_SECONDS)
        for digest, process in list(running.items()):
            if not process.is_alive():
                bar.ended(digest)
                if running.pop(digest).exitcode:
                    raise ChildProcessError("a job of the queue failed; the same command goes on")

    with rows_shown(bar) as told:
        try:
            yield work
        except BaseException:
            stop_processes(list(running.values()))
            raise
        for process in running.values():  # their records are there
            process.join()


def _is_free(job: Job, results: str | Path | None) -> bool:
    """Whether no process is making this job."""
    with hold_lock(job.lock(results)) as free:
        return free


# Processes ────────────────────────────────────────────────────────────────────────────────────────


def start_job(job: Job, results: str | Path | None, told: Path) -> Any:
    """A new process that makes a job, and appends its rows to the file `told`."""
    settings = (job, results, told, os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=_make_as_process, args=settings)
    with interrupts_held():  # Ctrl-C is for this process, which tells the others
        process.start()
    return process


def _make_as_process(job: Job, results: str | Path | None, told: Path, parent: int) -> None:
    """In a process of its own: makes a job. It ends when it is told to, or when the process that
    started it has ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end_with_parent(parent)
    try:
        make_job(job, results, tell_file(told, job.digest), wait=False)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sys.exit(f"error: {job.name}: {shorten(one_line(error))}")


def tell_file(told: Path, digest: str) -> Callable[[dict[str, Any]], None]:
    """Appends each row of a job to a file that `rows_shown` reads."""

    def tell(row: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), told.open("a", encoding="utf-8") as file:
            file.write(json.dumps([digest, row]) + "\n")

    return tell


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


@cache
def end_with_parent(parent: int) -> None:
    """From now on this process ends when the one that started it has ended, however it did."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C comes after the block; processes that are started inside do not see it at all."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
