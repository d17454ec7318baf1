"""Jobs: what plans name and queues make. One job ends in one record (see `records.write_record`).

A kind of job is a class in a file of its own: what decides its outcome, where its record lies, and
how it is made. Beside it stands a class of stages, with which a plan can ask for such jobs (see
`plans.Stage`). `runs.Run`, the training of a RunConfig, is one kind; others are in the studies.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tcs_lab.runs.records import Record, read_json_record, write_record
from tcs_lab.support.files import hold_lock, say_waiting

Tell = Callable[[dict[str, Any]], None] | None  # called with every row as it is made
POLL_SECONDS = 0.2  # how often a waiting process looks again


class Job(ABC):
    """A piece of work that is done once and kept as one record. It can be pickled, since workers get it
    that way.

    A job may be made in several parts, such as epochs. When a part has ended, the job tells a row: a
    dictionary with "epoch", the part's number from one, and "seconds", the time that it took.
    """

    # Where the records of this kind lie in the results folder. It may name facts of a record, as
    # {profile}/runs/*.json does.
    pattern: ClassVar[str]
    minutes: float | None = None  # that the job takes alone on the machine, if its plan says so
    length: int = 1  # how many parts the job has

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides the outcome, in JSON types. Two jobs with one identity are the same job."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What a person calls the job."""

    @abstractmethod
    def path(self, results: str | Path | None = None) -> Path:
        """Return the file of the job's record."""

    @abstractmethod
    def make(self, tell: Tell = None) -> Record:
        """Do the work, and return the record without its checksum."""

    def check(self, record: Record, path: Path) -> None:
        """Raise ValueError, naming the file, if the record is not one of this job. By default a record
        holds the identity of its job."""
        for key, own in self.identity.items():
            if record[key] != own:
                raise ValueError(
                    f"{path}: {key}: got {record[key]}, allowed: {own}, as this job has"
                )

    @property
    def digest(self) -> str:
        """A short name of the identity. Jobs whose records lie in different folders may share it."""
        named = json.dumps([type(self).__name__, self.identity], sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()[:10]

    @property
    def columns(self) -> dict[str, Any]:
        """What a table says about the job."""
        return {"job": self.name}

    def describe(self, row: dict[str, Any]) -> str:
        """Describe a row in a few words, for the line of progress."""
        return f"{self.name}, part {row['epoch']}/{self.length}"

    def seconds_alone(self, results: str | Path | None = None) -> float | None:
        """Return about how many seconds the whole job takes; None if that is not known."""
        return None if self.minutes is None else 60 * self.minutes

    def lock(self, results: str | Path | None = None) -> Path:
        """Return the path that is locked while a process makes the job."""
        return self.path(results)

    @property
    def can_travel(self) -> bool:
        """Whether another process can make it."""
        return True

    def with_threads(self, threads: int) -> Job:
        """Return the same job on so many CPU threads, if it does not say itself how many."""
        return self

    def parts_kept(self) -> int:
        """Return how many parts a checkpoint holds."""
        return 0

    def forget(self) -> None:  # noqa: B027
        """Remove what was kept of the job before its record was written. By default that is nothing."""

    def read(self, results: str | Path | None = None) -> Record:
        """Read the job's record; ValueError names the file and what is wrong with it."""
        path = self.path(results)
        advice = "; delete it to run again"
        return read_json_record(path, lambda record: self.check(record, path), advice)

    def is_made(self, results: str | Path | None = None) -> bool:
        return self.path(results).exists()

    @classmethod
    def read_all(
        cls, jobs: Sequence[Any], results: str | Path | None = None, closely: bool = False
    ) -> list[Record]:
        """Read the records of jobs of this kind, all of which are made. A kind may check
        the records together. If `closely`, it may also check that they were made of the data that is
        given now; that takes time, and is for a moment before hours of work."""
        return [job.read(results) for job in jobs]

    @classmethod
    def divergence(cls, record: Record) -> str | None:
        """Why the job of this record ended without its result; None if it has one."""
        return None

    @classmethod
    def seconds_taken(cls, record: Record) -> float:
        """Return the seconds that the job of this record took; 0 if the record does not say it."""
        return record.get("seconds", 0.0)

    @classmethod
    def facts(cls, record: Record, path: Path) -> Mapping[str, Any]:
        """Return the facts by which `index.find_records` finds records of this kind."""
        return record


def make_job(
    job: Job, results: str | Path | None = None, tell: Tell = None, wait: bool = True
) -> Record | None:
    """Return the record of a job, and make the job first if it has none.

    If another process makes the same job, this one waits for it (and says so on stderr) and takes
    its record; without `wait` it returns None at once. What a killed process has kept of the job is
    used. ValueError for a record that can't be used, and for a folder that can't be written.
    """
    is_waiting = False
    while (record := _make_alone(job, results, tell)) is None and wait:
        if not is_waiting:
            say_waiting(job.path(results).stem)
        is_waiting = True
        time.sleep(POLL_SECONDS)
    return record


def _make_alone(job: Job, results: str | Path | None, tell: Tell) -> Record | None:
    if not job.is_made(results):
        with hold_lock(job.lock(results)) as is_mine:
            if not is_mine:
                return None
            if not job.is_made(results):  # perhaps made a moment ago
                return make_anew(job, results, tell)
    return read_jobs([job], results)[0]


def make_anew(job: Job, results: str | Path | None = None, tell: Tell = None) -> Record:
    """Make a job in any case; its record takes the place of the one that is there."""
    check_folder(job.path(results).parent)
    record = write_record(job.path(results), job.make(tell))
    job.forget()
    return record


def read_jobs(
    jobs: Iterable[Job], results: str | Path | None = None, closely: bool = True
) -> list[Record]:
    """Read the records of jobs of any kinds, in their order; see `Job.read_all`."""
    jobs = list(jobs)
    records: dict[int, Record] = {}
    for kind in dict.fromkeys(type(job) for job in jobs):
        places = [place for place, job in enumerate(jobs) if type(job) is kind]
        read = kind.read_all([jobs[place] for place in places], results, closely)
        records |= zip(places, read, strict=True)
    return [records[place] for place in range(len(jobs))]


Some = TypeVar("Some", bound=Job)


def missing_jobs(jobs: Iterable[Some], results: str | Path | None = None) -> list[Some]:
    """Those of the jobs that are not made yet, each once."""
    once = {job.path(results): job for job in jobs}
    return [job for job in once.values() if not job.is_made(results)]


def check_folder(path: Path, what: str = "results") -> None:
    """Raise ValueError, before hours of work, if no file could be written there. `what` names the
    folder in the error."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        other = " (--results names another one)" if what == "results" else ""
        raise ValueError(
            f"{what}: got {there}, allowed: a folder in which files can be written{other}"
        )
