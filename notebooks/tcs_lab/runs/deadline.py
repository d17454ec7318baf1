"""Runs before a deadline: those of a plan that fit into a few minutes, several of them at once.

For a machine that is there by chance and for a short time. The plan says how long each run takes,
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

from tcs_lab.runs.checkpoints import epochs_kept
from tcs_lab.runs.progress import Progress, rows_shown
from tcs_lab.runs.records import read_record, record_path, results_folder
from tcs_lab.runs.runs import check_folder, start_run, stop_processes
from tcs_lab.support.files import write_whole
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.training import Row

_POLL_SECONDS = 0.1  # how often it looks whether a run has ended
_LATEST = 5  # epochs whose pace counts: the first ones, dense, go at another one
_CHECKPOINTS = 1.05  # a run spends up to a twentieth of its time on them, beside its epochs


# Which run is begun ───────────────────────────────────────────────────────────────────────────────
#    All times are in seconds. "Work" is the time that a run, or the rest of it, takes alone.


def next_to_start(
    running: Sequence[float], waiting: Sequence[float], seconds: float, sharing: Sequence[float]
) -> int | None:
    """Which of the `waiting` runs to begin now, as a place in the list; None for none of them.

    `running` and `waiting` are the work of the runs that have begun and of those that have not, in
    the order in which they are wanted; `seconds` are left. The first run is begun that ends in time
    together with all that run already, as long as one more at once gets more done. One that does
    not fit is passed over: after the others have ended it would fit even less.
    """
    if len(running) < most_at_once(sharing):
        for place, work in enumerate(waiting):
            if seconds_together([*running, work], sharing) <= seconds:
                return place
    return None


def most_at_once(sharing: Sequence[float]) -> int:
    """With how many runs at once a machine gets the most done: n runs that each take `sharing[n-1]`
    times as long do as much as n / sharing[n-1] runs alone."""
    most = 1
    while most < len(sharing) and (most + 1) / sharing[most] > most / sharing[most - 1]:
        most += 1
    return most


def seconds_together(works: Sequence[float], sharing: Sequence[float]) -> float:
    """When the last of some runs ends that begin together: those that are left go faster."""
    passed, done = 0.0, 0.0
    for ended, work in enumerate(sorted(works)):
        passed += (work - done) * sharing[len(works) - ended - 1]
        done = work
    return passed


# A run, and what becomes of it ────────────────────────────────────────────────────────────────────


@dataclass
class Timed:
    """A run whose time is known: from the plan at first, from its own epochs as soon as it has
    made some. `became` says what has become of it, in words."""

    config: RunConfig
    minutes: float  # all of it, alone on the machine
    became: str = ""
    done: int = 0  # epochs
    paces: list[float] = field(default_factory=list)  # seconds of its epochs, each as if alone
    process: Any = None
    begun: float = 0.0  # when, by the clock of `time.monotonic`

    @property
    def work(self) -> float:
        """The seconds that the rest of it takes, alone on the machine."""
        each = 60 * self.minutes / self.config.epochs
        if self.paces:
            each = _CHECKPOINTS * statistics.median(self.paces[-_LATEST:])
        return each * (self.config.epochs - self.done)

    def ended_epoch(self, row: Row, slowdown: float) -> None:
        """Takes note of a row that was made while the machine was so many times as slow."""
        self.done = row["epoch"]
        self.paces.append(row["seconds"] / slowdown)


class _Followed(Progress):
    """The line that follows runs, which also tells each of them how long its epochs took."""

    def __init__(self, runs: dict[str, Timed], enabled: bool):
        super().__init__([run.config for run in runs.values()], enabled)
        self.runs, self.slowdown = runs, 1.0

    def epoch(self, digest: str, row: Row) -> None:
        self.runs[digest].ended_epoch(row, self.slowdown)
        super().epoch(digest, row)


# All of them ──────────────────────────────────────────────────────────────────────────────────────


class Deadline:
    """Makes planned runs, in their order, as long as they end within so many minutes.

    `minutes_of` holds the plan's expectation of each run by its digest, `sharing` how many times as
    long a run takes if 1, 2, ... runs share the machine, and `jobs` how many may do so at most.
    Every run is made in a process of its own, as `run` makes it. With `pack`, a tar of the new
    records is written after each run. ValueError for runs of which the plan does not say how long
    they take, and for folders that can't be written.
    """

    def __init__(
        self, configs: Sequence[RunConfig], minutes_of: dict[str, float], sharing: Sequence[float],
        results: str | Path | None = None, jobs: int | None = None, pack: str | Path | None = None,
    ):  # fmt: skip
        self.sharing = list(sharing)[: jobs or None]
        self.results, self.pack = results, Path(pack) if pack else None
        self.runs: dict[str, Timed] = {}
        for config in configs:
            if config.digest not in minutes_of:
                name = f"{config.scheme.name}, seed {config.seed}"
                allowed = "allowed before a deadline: runs whose plan says how many they take"
                raise ValueError(f"minutes: got none for {name}, {allowed}")
            run = Timed(config, minutes_of[config.digest], done=epochs_kept(config))
            if self._path(run).exists():
                read_record(self._path(run), config)
                run.became = "was there"
            self.runs.setdefault(config.digest, run)
        for folder in [results_folder("", results), *([self.pack.parent] if self.pack else [])]:
            check_folder(folder)
        self.waiting = [run for run in self.runs.values() if not run.became]
        self.running: list[Timed] = []
        self.made: list[Timed] = []

    def _path(self, run: Timed) -> Path:
        return record_path(run.config, self.results)

    def make(self, minutes: float, progress: bool = True) -> list[dict[str, Any]]:
        """Makes what fits into so many minutes from now; the new records. What has not ended by
        then is told to end, and goes on from its last checkpoint the next time."""
        ends = time.monotonic() + 60 * minutes
        todo = {run.config.digest: run for run in self.waiting}
        bar = _Followed(todo, progress)
        with bar, rows_shown(bar) as told:
            try:
                while (left := ends - time.monotonic()) > 0:
                    self._collect(bar)
                    bar.slowdown = self.sharing[max(len(self.running), 1) - 1]
                    running = [run.work for run in self.running]
                    waiting = [run.work for run in self.waiting]
                    place = next_to_start(running, waiting, left, self.sharing)
                    if place is not None:
                        self._begin(self.waiting.pop(place), told)
                    elif not self.running:
                        break
                    else:
                        time.sleep(min(_POLL_SECONDS, left))
            finally:
                stopped = stop_processes([run.process for run in self.running])
                self._collect(bar, stopped)
        for run in self.waiting:
            rest = f", epochs {run.done + 1} to {run.config.epochs}" if run.done else ""
            run.became = f"not begun: {run.work / 60:.1f} minutes alone{rest}"
        return [read_record(self._path(run), run.config) for run in self.made]

    def _begin(self, run: Timed, told: Path) -> None:
        run.process = start_run(run.config, self.results, told)
        run.begun = time.monotonic()
        self.running.append(run)

    def _collect(self, bar: _Followed, stopped: Sequence[Any] = ()) -> None:
        """Takes note of the runs whose process has ended; `stopped` are those that were told to."""
        for run in [run for run in self.running if not run.process.is_alive()]:
            self.running.remove(run)
            bar.ended(run.config.digest)
            if self._path(run).exists():
                run.became = f"made in {(time.monotonic() - run.begun) / 60:.1f} minutes"
                self.made.append(run)
                self._write_pack()
            elif run.process in stopped:
                kept = epochs_kept(run.config)
                run.became = f"stopped after epoch {run.done}; goes on after epoch {kept}"
            elif run.process.exitcode:
                run.became = f"failed (exit code {run.process.exitcode})"
            else:
                run.became = "left to another process, which is making it"

    def _write_pack(self) -> None:
        """A tar of all new records, under the paths that they have in the results folder."""
        if self.pack is None:
            return
        top = results_folder("", self.results)

        def write(file: Any) -> None:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for run in self.made:
                    path = self._path(run)
                    archive.add(path, arcname=path.relative_to(top).as_posix())

        write_whole(self.pack, write)

    def table(self) -> pd.DataFrame:
        """A row for each run: what has become of it."""
        rows = [
            {"scheme": run.config.scheme.name, "eta": f"{run.config.eta:g}",
             "seed": run.config.seed, "epochs": run.config.epochs, "outcome": run.became}
            for run in self.runs.values()
        ]  # fmt: skip
        return pd.DataFrame(rows)

    @property
    def failed(self) -> bool:
        return any(run.became.startswith("failed") for run in self.runs.values())
