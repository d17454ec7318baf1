"""Progress: a line that shows how far jobs are, in this process and in workers."""

from __future__ import annotations

import contextlib
import contextvars
import io
import json
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from tcs_lab.runs.jobs import Job


class Progress:
    """A line that shows how far jobs are, on a terminal, in a notebook and under papermill.

    In a notebook the line replaces itself and is gone at the end, so saved notebooks stay clean. Where
    there is neither, as in a log file, each job that was made gets a line on stderr.
    """

    def __init__(self, jobs: Sequence[Job], enabled: bool = True):
        self.jobs: dict[str, Job] = {}
        self.left: dict[str, int] = {}  # parts, by job
        self._add(jobs)
        self.line = _NotebookLine() if _in_notebook() else None
        self.lock = threading.Lock()  # `show_rows` calls from another thread
        quiet = not enabled or not jobs
        self.is_log = not quiet and not (self.line or sys.stderr.isatty())
        self.bar = tqdm(
            total=sum(self.left.values()), disable=quiet or self.is_log, leave=False,
            file=self.line or sys.stderr, mininterval=1.0 if self.line else 0.1,
            ncols=130 if self.line else None, ascii=False, dynamic_ncols=not self.line,
            bar_format="{desc} |{bar:16}| {n_fmt}/{total_fmt}, {remaining} left",
        )  # fmt: skip

    def _add(self, jobs: Iterable[Job]) -> None:
        new = {job.digest: job for job in jobs if job.digest not in self.jobs}
        self.jobs |= new
        self.left |= {digest: job.length for digest, job in new.items()}

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs that were not known before; those that are known stay as they are."""
        with self.lock:
            self._add(jobs)
            self.bar.total = self.bar.n + sum(self.left.values())
            self.bar.refresh()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        shown = not self.bar.disable
        self.bar.close()
        if self.line and shown:
            self.line.clear()

    def show_row(self, digest: str, row: dict[str, Any]) -> None:
        """Show a row. A worker's row may arrive after its job has been counted as ended; it is then
        ignored."""
        with self.lock:
            if digest in self.left:
                self.left[digest] -= 1
                place = len(self.jobs) - len(self.left) + 1
                what = self.jobs[digest].describe(row)
                self.bar.set_description_str(f"run {place}/{len(self.jobs)}: {what}", refresh=False)
                self.bar.update(1)

    def end(self, digest: str, is_made: bool = True) -> None:
        """Count a job that has ended, and was made if nothing stopped it. Parts that were reused, or never
        came, are taken off the total."""
        with self.lock:
            self.bar.total -= self.left.pop(digest, 0)
            self.bar.refresh()
            if self.is_log and is_made:
                ended, all_of_them = len(self.jobs) - len(self.left), len(self.jobs)
                what = ", ".join(
                    f"{key} {value}" for key, value in self.jobs[digest].columns.items()
                )
                print(f"run {ended}/{all_of_them} is made: {what}", file=sys.stderr, flush=True)


Item = TypeVar("Item")


def follow(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Give the items, one by one, and show in a line how many of them are done: "rounds |##  | 3/9".

    For loops of more than five seconds in a notebook or on a terminal. The line is gone at the end,
    and with it all that the cell has put out until then: print and draw after the loop, or in
    another cell.
    """
    line = _NotebookLine() if _in_notebook() else None
    bar = tqdm(
        items, what, leave=False, disable=not (line or sys.stderr.isatty()),
        file=line or sys.stderr, mininterval=1.0, delay=2.0, ascii=False, ncols=80,
        bar_format="{desc} |{bar:24}| {n_fmt}/{total_fmt}, {remaining} left",
    )  # fmt: skip
    try:
        yield from bar
    finally:
        bar.close()
        if line and line.written:
            line.clear()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    shell = shell.get_ipython() if shell else None
    return shell is not None and hasattr(shell, "kernel")


class _NotebookLine(io.TextIOBase):
    """A text file for tqdm whose last line is the only output of the cell."""

    written = False  # whether there is a line

    def write(self, text: str) -> int:
        from IPython.display import clear_output

        line = text.strip("\r\n ")
        if line and "\x1b" not in line:
            clear_output(wait=True)
            print(line, flush=True)
            self.written = True
        return len(text)

    def clear(self) -> None:
        from IPython.display import clear_output

        clear_output()


@contextlib.contextmanager
def show_rows(bar: Progress) -> Iterator[Path]:
    """Make a file whose rows, which workers append to it, are shown by a thread."""
    done = threading.Event()

    def read_rows() -> None:
        with told.open(encoding="utf-8") as file:
            ended, half = False, ""
            while not ended:
                ended = done.wait(0.2)
                *lines, half = (half + file.read()).split("\n")  # a row may be there in part
                for line in lines:
                    with contextlib.suppress(json.JSONDecodeError):  # its worker was killed
                        bar.show_row(*json.loads(line))

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "rows"
        told.touch()
        context = contextvars.copy_context()  # where a notebook's output belongs
        thread = threading.Thread(target=context.run, args=(read_rows,), daemon=True)
        thread.start()
        try:
            yield told
        finally:
            done.set()
            thread.join()
