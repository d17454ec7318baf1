"""Jobs before a deadline: those jobs of a plan that fit into a few minutes, several at once.

For a machine that is there by chance and for a short time. The plan says how long each job takes,
and by how much it slows if others share the machine.
"""

from __future__ import annotations

import statistics
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_lab.runs.jobs import Job, check_folder, read_jobs
from tcs_lab.runs.progress import Progress, show_rows
from tcs_lab.runs.records import Record, results_folder
from tcs_lab.runs.workers import start_job, stop_processes
from tcs_lab.support.files import write_whole

_POLL_SECONDS = 0.1  # how often it looks whether a run has ended
_LATEST = 5  # epochs whose pace counts: the first, dense ones take another time
_CHECKPOINTS = 1.05  # a run spends up to a twentieth of its time on them, beside its epochs


# Which job is begun ───────────────────────────────────────────────────────────────────────────────
#    All times are in seconds. "Work" is the time that a run, or the rest of it, takes alone.


def next_to_start(
    running: Sequence[float], waiting: Sequence[float], seconds: float, sharing: Sequence[float]
) -> int | None:
    """Choose which of the `waiting` runs to begin now: its index in the list, or None.

    `running` and `waiting` are the work of the runs that have begun and of those that have not, in
    the order in which they are wanted; `seconds` are left. Chosen is the first waiting run with which all
    runs, including those that have begun, end within `seconds`. None if no run fits, or if one more at
    once would get less done. A run that does not fit is passed over: after the others have ended it would
    fit even less.
    """
    if len(running) < most_at_once(sharing):
        for place, work in enumerate(waiting):
            if seconds_together([*running, work], sharing) <= seconds:
                return place
    return None


def most_at_once(sharing: Sequence[float]) -> int:
    """Return the number of runs at once with which a machine gets the most done: n runs that each
    take `sharing[n-1]` times as long do as much as n / sharing[n-1] runs alone."""
    most = 1
    while most < len(sharing) and (most + 1) / sharing[most] > most / sharing[most - 1]:
        most += 1
    return most


def seconds_together(works: Sequence[float], sharing: Sequence[float]) -> float:
    """Return the seconds until all of these runs have ended, if they begin together. The fewer are
    still running, the faster each of them goes."""
    passed, done = 0.0, 0.0
    for ended, work in enumerate(sorted(works)):
        passed += (work - done) * sharing[len(works) - ended - 1]
        done = work
    return passed


# A job, and what becomes of it ────────────────────────────────────────────────────────────────────


@dataclass
class Attempt:
    """A job whose time is known, from the plan at first and from its own parts as soon as it has made
    some. `outcome` says in words what has become of it."""

    job: Job
    outcome: str = ""
    done: int = 0  # parts
    paces: list[float] = field(default_factory=list)  # seconds of its parts, each as if alone
    process: Any = None
    begun: float = 0.0  # when, by the clock of `time.monotonic`

    @property
    def work(self) -> float:
        """The seconds that the rest of it takes, alone on the machine."""
        each = 60 * (self.job.minutes or 0.0) / self.job.length
        if self.paces:
            each = _CHECKPOINTS * statistics.median(self.paces[-_LATEST:])
        return each * (self.job.length - self.done)

    def end_part(self, row: dict[str, Any], slowdown: float) -> None:
        """Take note of a row that was made while the machine was so many times as slow."""
        self.done = row["epoch"]
        self.paces.append(row["seconds"] / slowdown)


class _Follower(Progress):
    """The line of progress, which also notes for each job how long its parts took."""

    def __init__(self, attempts: dict[str, Attempt]):
        super().__init__([attempt.job for attempt in attempts.values()])
        self.attempts, self.slowdown = attempts, 1.0

    def show_row(self, digest: str, row: dict[str, Any]) -> None:
        self.attempts[digest].end_part(row, self.slowdown)
        super().show_row(digest, row)


# All of them ──────────────────────────────────────────────────────────────────────────────────────


class Deadline:
    """Makes planned jobs, in their order, as long as they will end within so many minutes.

    `sharing` says how many times as long a job takes if 1, 2, ... of them share the machine, and
    `most` how many may do so at most. Every job is made in a process of its own, as `make_job` makes
    it. With `pack`, a tar of the new records is written after each job. ValueError for jobs of which
    the plan does not say how long they take, and for folders that can't be written.
    """

    def __init__(
        self, jobs: Sequence[Job], sharing: Sequence[float],
        results: str | Path | None = None, most: int | None = None, pack: str | Path | None = None,
    ):  # fmt: skip
        self.sharing = list(sharing)[: most or None]
        self.results, self.pack = results, Path(pack) if pack else None
        self.attempts: dict[str, Attempt] = {}
        for job in jobs:
            if job.minutes is None:
                raise ValueError(
                    f"minutes: got none for {job.name}, allowed before a deadline: a number in the plan "
                    "that says how many minutes the run takes (or leave out --minutes)"
                )
            attempt = Attempt(job, done=job.parts_kept())
            if job.is_made(results):
                attempt.outcome = "was there"
            self.attempts.setdefault(job.digest, attempt)
        # raises for records of other data than that which is given
        read_jobs([one.job for one in self.attempts.values() if one.outcome], results)
        check_folder(results_folder("", results))
        if self.pack:
            if self.pack.is_dir():
                raise ValueError(f"--pack: got {self.pack}, which is a folder, allowed: a file")
            check_folder(self.pack.parent, "--pack")
        self.waiting = [one for one in self.attempts.values() if not one.outcome]
        self.running: list[Attempt] = []
        self.made: list[Attempt] = []

    def make(self, minutes: float) -> list[Record]:
        """Make what fits into so many minutes from now, and return the new records. A job that has not
        ended by then is told to end, and goes on from its last checkpoint the next time."""
        self._write_pack()  # an empty one, so that nobody takes an older file for this one's
        ends = time.monotonic() + 60 * minutes
        bar = _Follower({one.job.digest: one for one in self.waiting})
        with bar, show_rows(bar) as told:
            try:
                while (left := ends - time.monotonic()) > 0:
                    self._collect(bar)
                    bar.slowdown = self.sharing[max(len(self.running), 1) - 1]
                    running = [one.work for one in self.running]
                    waiting = [one.work for one in self.waiting]
                    place = next_to_start(running, waiting, left, self.sharing)
                    if place is not None:
                        self._begin(self.waiting.pop(place), told)
                    elif not self.running:
                        break
                    else:
                        time.sleep(min(_POLL_SECONDS, left))
            finally:
                stopped = stop_processes([one.process for one in self.running])
                self._collect(bar, stopped)
        for one in self.waiting:
            rest = f", epochs {one.done + 1} to {one.job.length}" if one.done else ""
            one.outcome = f"not begun: {one.work / 60:.1f} minutes alone{rest}"
        return [one.job.read(self.results) for one in self.made]

    def _begin(self, attempt: Attempt, told: Path) -> None:
        attempt.process = start_job(attempt.job, self.results, told)
        attempt.begun = time.monotonic()
        self.running.append(attempt)

    def _collect(self, bar: _Follower, stopped: Sequence[Any] = ()) -> None:
        """Take note of the jobs whose process has ended; `stopped` are processes that were told to."""
        for one in [one for one in self.running if not one.process.is_alive()]:
            self.running.remove(one)
            bar.end(one.job.digest, one.job.is_made(self.results))
            if one.job.is_made(self.results):
                one.outcome = f"made in {(time.monotonic() - one.begun) / 60:.1f} minutes"
                self.made.append(one)
                self._write_pack()
            elif one.process in stopped:
                kept = one.job.parts_kept()
                one.outcome = f"stopped after epoch {one.done}; goes on after epoch {kept}"
            elif one.process.exitcode:
                one.outcome = f"failed (exit code {one.process.exitcode})"
            else:
                one.outcome = "left to another process, which is making it"

    def _write_pack(self) -> None:
        """Write a tar of all new records, under the paths that they have in the results folder."""
        if self.pack is None:
            return
        top = results_folder("", self.results)

        def write(file: Any) -> None:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for one in self.made:
                    path = one.job.path(self.results)
                    archive.add(path, arcname=path.relative_to(top).as_posix())

        write_whole(self.pack, write)

    def table(self) -> pd.DataFrame:
        """Return a table that says of each job what has become of it."""
        attempts = self.attempts.values()
        return pd.DataFrame([one.job.columns | {"outcome": one.outcome} for one in attempts])

    @property
    def failed(self) -> bool:
        return any(one.outcome.startswith("failed") for one in self.attempts.values())
