"""Jobs: what plans name and queues make. One job ends in one record.

A kind of job is a class in a file of its own: what decides its outcome, where its record lies, and
how it is made. Beside it stands a class of stages, with which a plan can ask for such jobs (see
`plans.Stage`). `runs.Run`, the training of a RunConfig, is one kind; others are in the studies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tcs_lab.runs.records import Record, read_json_record, seal
from tcs_lab.support.files import alone, say_waiting, write_json

Tell = Callable[[dict[str, Any]], None] | None  # called with every row as it is made
POLL_SECONDS = 0.2  # how often a waiting process looks again


class Job(ABC):
    """What is made once and kept as one record. It can be pickled: workers get it so.

    A job may be made in several parts, such as epochs. Of each part that has ended it tells a row:
    a dictionary with "epoch", the part's number from one, and "seconds", what it took.
    """

    # of all records of this kind, in the results folder; a fact may stand in it: {profile}/runs/*.json
    pattern: ClassVar[str]
    minutes: float | None = None  # that it takes alone on the machine, if its plan says so
    length: int = 1  # parts

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the outcome: JSON types only. Two jobs with one identity are the same."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What a person calls it."""

    @abstractmethod
    def path(self, results: str | Path | None = None) -> Path:
        """The file of its record."""

    @abstractmethod
    def make(self, tell: Tell = None) -> Record:
        """Does the work; returns the record, without its checksum."""

    def check(self, record: Record, path: Path) -> None:
        """ValueError, naming the file, if the record is not one of this job. By default a record
        holds the identity of its job."""
        for key, own in self.identity.items():
            if record[key] != own:
                raise ValueError(f"{path}: {key}: got {record[key]}, allowed: {own}")

    @property
    def digest(self) -> str:
        """Names the job among all others."""
        named = json.dumps([type(self).__name__, self.identity], sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()[:10]

    @property
    def columns(self) -> dict[str, Any]:
        """What a table says of the job."""
        return {"job": self.name}

    def describe(self, row: dict[str, Any]) -> str:
        """A row in a few words, for the line of progress."""
        return f"{self.name}, part {row['epoch']}/{self.length}"

    def seconds_alone(self, results: str | Path | None = None) -> float | None:
        """About how long all of it takes; None if neither a plan nor records tell."""
        return None if self.minutes is None else 60 * self.minutes

    def lock(self, results: str | Path | None = None) -> Path:
        """Whoever makes the job holds the lock of this path."""
        return self.path(results)

    @property
    def can_travel(self) -> bool:
        """Whether another process can make it."""
        return True

    def with_threads(self, threads: int) -> Job:
        """The same job, on so many CPU threads where that is left open."""
        return self

    def parts_kept(self) -> int:
        """How many parts a checkpoint holds."""
        return 0

    def forget(self) -> None:
        """Removes what was kept of it, now that its record is written. By default nothing was."""
        return

    def read(self, results: str | Path | None = None) -> Record:
        """The record that is there; ValueError names the file and what is wrong with it."""
        path = self.path(results)
        return read_json_record(path, lambda record: self.check(record, path), _AGAIN)

    def is_made(self, results: str | Path | None = None) -> bool:
        return self.path(results).exists()

    @classmethod
    def read_all(
        cls, jobs: Sequence[Any], results: str | Path | None = None, closely: bool = False
    ) -> list[Record]:
        """The records of jobs of this kind, which are there. A kind may check them together, and
        `closely`, before hours of work, whether they are of the data that is given now."""
        return [job.read(results) for job in jobs]

    @classmethod
    def divergence(cls, record: Record) -> str | None:
        """Why a job ended without what it was to bring; None if it did not."""
        return None

    @classmethod
    def seconds_taken(cls, record: Record) -> float:
        """What a job took; 0 if its record does not say it."""
        return record.get("seconds", 0.0)

    @classmethod
    def facts(cls, record: Record, path: Path) -> Mapping[str, Any]:
        """What records of this kind are found by (see `index.find_records`)."""
        return record


_AGAIN = "; delete it to run again"


def make_job(
    job: Job, results: str | Path | None = None, tell: Tell = None, wait: bool = True
) -> Record | None:
    """The record of a job, which is made if it is not there.

    If another process makes the same job, this one waits for it (and says so on stderr) and takes
    its record; without `wait` it returns None at once. What a killed process has kept of the job is
    used. ValueError for a record that can't be used, and for a folder that can't be written.
    """
    told = False
    while (record := _make_alone(job, results, tell)) is None and wait:
        if not told:
            say_waiting(job.path(results).stem)
        told = True
        time.sleep(POLL_SECONDS)
    return record


def _make_alone(job: Job, results: str | Path | None, tell: Tell) -> Record | None:
    with contextlib.ExitStack() as until:
        if not job.is_made(results) and not until.enter_context(alone(job.lock(results))):
            return None
        if not job.is_made(results):  # perhaps made a moment ago
            return make_anew(job, results, tell)
    return read_jobs([job], results)[0]


def make_anew(job: Job, results: str | Path | None = None, tell: Tell = None) -> Record:
    """Makes a job in any case; its record takes the place of the one that is there."""
    check_folder(job.path(results).parent)
    record = seal(job.make(tell))
    write_json(job.path(results), record)
    job.forget()
    return record


def read_jobs(
    jobs: Iterable[Job], results: str | Path | None = None, closely: bool = True
) -> list[Record]:
    """The records of jobs of any kinds, in their order; see `Job.read_all`."""
    jobs = list(jobs)
    records: dict[int, Record] = {}
    for kind in dict.fromkeys(type(job) for job in jobs):
        places = [place for place, job in enumerate(jobs) if type(job) is kind]
        read = kind.read_all([jobs[place] for place in places], results, closely)
        records |= zip(places, read, strict=True)
    return [records[place] for place in range(len(jobs))]


Some = TypeVar("Some", bound=Job)


def missing_jobs(jobs: Iterable[Some], results: str | Path | None = None) -> list[Some]:
    """Those that are not made yet, each once."""
    once = {job.path(results): job for job in jobs}
    return [job for job in once.values() if not job.is_made(results)]


def check_folder(path: Path) -> None:
    """ValueError, before hours of work, if no record could be written there."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"results: got {there}, allowed: a folder that can be written")
