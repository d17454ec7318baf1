"""The queue: many jobs are made, one after another or several at once.

`run_queue` makes the jobs of plans, and `runs.run_all` makes the runs of tables with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from tcs_lab.runs.jobs import POLL_SECONDS, Job, make_job, missing_jobs, read_jobs
from tcs_lab.runs.parameters import check_parameter
from tcs_lab.runs.progress import Progress, show_rows
from tcs_lab.runs.records import Record
from tcs_lab.runs.workers import Worker, stop_processes, wait_for_any
from tcs_lab.support.files import hold_lock, say_waiting

_LOOK_SECONDS = 2.0  # how often it looks at all jobs anew while others make them


def run_queue(
    planned: Callable[[], Iterable[Job]], results: str | Path | None = None,
    progress: bool = True, jobs: int = 1,
) -> list[Record]:  # fmt: skip
    """Make the jobs that `planned()` names, in their order, and return all their records.

    `planned` is called again after every new record, because records decide what a tuned stage needs next.
    With several `jobs`, so many are made at a time by worker processes, each with its share of the
    threads; a job that cannot travel to another process is made here after the others. Processes
    that were started apart may share one queue, too: a job that another process is making is left
    to it, and this one takes the next. The first job that fails ends the queue; the same call goes
    on where it stopped.
    """
    jobs = check_parameter("jobs", jobs)
    wanted, missing = _plan_anew(planned, results)
    if missing:  # before hours of work: are the records that exist of the same data?
        read_jobs([job for job in wanted if job.is_made(results)], results)
    with Progress(missing, progress) as bar:
        make_some = _by_workers(results, jobs, bar) if jobs > 1 else _in_this_process(results, bar)
        with make_some as work:
            while missing:
                bar.add(missing)
                work(missing)
                if len(missing_jobs(missing, results)) < len(missing):
                    wanted, missing = _plan_anew(planned, results)
    return read_jobs({job.path(results): job for job in wanted}.values(), results)


def _plan_anew(
    planned: Callable[[], Iterable[Job]], results: str | Path | None
) -> tuple[list[Job], list[Job]]:
    """Return all jobs that are planned now, since a record may decide which jobs come next, and those of
    them that are missing.

    Another process may write a record while `planned` is reading. So if nothing is missing, this plans
    again until the jobs stay the same.
    """
    wanted = list(planned())
    while not (missing := missing_jobs(wanted, results)):
        before, wanted = wanted, list(planned())
        if {job.path(results) for job in before} == {job.path(results) for job in wanted}:
            break
    return wanted, missing


Work = Callable[[list[Job]], None]  # works on the missing jobs until one of them has ended


@contextlib.contextmanager
def _in_this_process(results: str | Path | None, bar: Progress) -> Iterator[Work]:
    """Work that makes the first job that nobody else is making."""
    has_told = False

    def work(missing: list[Job]) -> None:
        nonlocal has_told
        for job in missing:
            if make_job(job, results, partial(bar.show_row, job.digest), wait=False) is not None:
                bar.end(job.digest)
                return
        if not has_told:
            say_waiting(missing[0].path(results).stem)
        has_told = True
        look_again = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < look_again and not any(job.is_made(results) for job in missing):
            time.sleep(POLL_SECONDS)

    yield work


@contextlib.contextmanager
def _by_workers(results: str | Path | None, jobs: int, bar: Progress) -> Iterator[Work]:
    """Work that is done by so many worker processes, which end with the block."""
    workers: list[Worker] = []
    share = max(1, torch.get_num_threads() // jobs)

    def next_worker() -> Worker | None:
        """One that has no job; a new one as long as there are not too many."""
        idle = [worker for worker in workers if worker.job is None]
        if not idle and len(workers) < jobs:
            workers.append(Worker(results, told))
            idle = workers[-1:]
        return idle[0] if idle else None

    def work(missing: list[Job]) -> None:
        begun = {worker.job.digest for worker in workers if worker.job}
        for job in missing:
            if job.digest in begun or not job.can_travel or not _is_free(job, results):
                continue
            if (worker := next_worker()) is None:
                break
            worker.begin(job.with_threads(share))
        busy = [worker for worker in workers if worker.job]
        if not busy:  # what is left cannot travel, or is made by others
            while workers:
                workers.pop().close()
            work_here([job.with_threads(share) if job.can_travel else job for job in missing])
            return
        for worker in wait_for_any(busy, None if len(busy) == jobs else _LOOK_SECONDS):
            ended = worker.job
            worker.finish()
            if ended:
                bar.end(ended.digest, ended.is_made(results))

    with show_rows(bar) as told, _in_this_process(results, bar) as work_here:
        try:
            yield work
        except BaseException:
            stop_processes([worker.process for worker in workers])
            raise
        for worker in workers:
            worker.close()


def _is_free(job: Job, results: str | Path | None) -> bool:
    """Return whether no process is making this job."""
    with hold_lock(job.lock(results)) as free:
        return free
