"""Workers: other processes of this machine that make jobs, and how they are started and stopped.

A worker tells its rows through a file (see `progress.show_rows`), and ends when the process that
started it has ended, however that ended.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tcs_lab.runs.jobs import Job, make_job
from tcs_lab.support.errors import one_line, shorten

_CONTEXT = multiprocessing.get_context("spawn")
_GRACE_SECONDS = 10.0  # a process that was told to end is killed after so long


class Worker:
    """A process that makes one job after another. `job` is the one that it is making, if any."""

    def __init__(self, results: str | Path | None, told: Path):
        self.job: Job | None = None
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _start(_make_jobs, theirs, results, told, os.getpid())
        theirs.close()

    def begin(self, job: Job) -> None:
        """Give the worker its next job, which it makes unless another process is making it."""
        self.job = job
        with _unless_killed():
            self.connection.send(job)

    def finish(self) -> None:
        """Wait until the job has ended, and raise the error that ended it early, if there is one.

        ChildProcessError if the worker itself has been killed.
        """
        self.job = None
        with _unless_killed():
            error = self.connection.recv()
        if error is not None:
            raise error

    def close(self) -> None:
        """End the worker, after its job if it has one."""
        if self.job is not None:
            self.finish()
        self.connection.close()
        self.process.join()


@contextlib.contextmanager
def _unless_killed() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise ChildProcessError(
            "a worker process was killed (out of memory?); the same command goes on"
        ) from error


def wait_for_any(workers: Sequence[Worker], seconds: float | None) -> list[Worker]:
    """Those of the workers whose job has ended; waits for the first of them, at most so long."""
    by_connection = {worker.connection: worker for worker in workers}
    ended = multiprocessing.connection.wait(list(by_connection), seconds)
    return [by_connection[connection] for connection in ended]  # type: ignore[index]


def start_job(job: Job, results: str | Path | None, told: Path) -> Any:
    """Start a new process for one job. If the job fails, the process says why and exits with 1."""
    return _start(_make_one, job, results, told, os.getpid())


def stop_processes(processes: Sequence[Any]) -> list[Any]:
    """Tell processes to end, as SIGTERM does, and kill those that do not. Returns those that were
    alive when they were told."""
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


def _start(target: Callable[..., None], *arguments: Any) -> Any:
    process = _CONTEXT.Process(target=target, args=arguments)
    main = sys.modules["__main__"]
    with _interrupts_held():  # Ctrl-C is for this process, which tells the others
        # The new process would import the script that is running, and so run it once more.
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
    return process


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended. Processes that are started in the block inherit
    this, and never see Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the new process ───────────────────────────────────────────────────────────────────────────────


def _make_jobs(connection: Any, results: str | Path | None, told: Path, parent: int) -> None:
    """Make the jobs that come through the connection, and answer each with its error or None."""
    _end_when_told(parent)
    while True:
        try:
            content = connection.recv_bytes()
        except EOFError:  # the other side has closed it
            return
        try:
            job = pickle.loads(content)
            make_job(job, results, _teller(told, job.digest), wait=False)
            error = None
        except Exception as raised:
            error = _portable(raised)
        connection.send(error)


def _make_one(job: Job, results: str | Path | None, told: Path, parent: int) -> None:
    _end_when_told(parent)
    try:
        make_job(job, results, _teller(told, job.digest), wait=False)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sys.exit(f"error: {job.name}: {shorten(one_line(error))}")


def _portable(error: Exception) -> Exception:
    """Return the error as it can be sent to another process, with its traceback as a note."""
    note = f"in a worker process:\n{''.join(traceback.format_exception(error))}"
    try:
        sent: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # classes of errors may take other arguments than they keep
        sent = RuntimeError(f"{type(error).__name__}: {one_line(error)}")
    sent.add_note(note)
    return sent


def _teller(told: Path, digest: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that appends each row of a job to the file that `progress.show_rows` reads."""

    def tell(row: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), told.open("a", encoding="utf-8") as file:
            file.write(json.dumps([digest, row]) + "\n")

    return tell


def _end_when_told(parent: int) -> None:
    """From now on SIGTERM ends this process in good order, and it ends at once when its parent
    process is gone."""

    def end(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not disturb the clean-up
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
