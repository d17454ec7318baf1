"""What the commands of the command line do. Their options and help are in `__main__`."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_lab.compare.command import compare_command
from tcs_lab.evidence.sensitivity import (
    read_sensitivity,
    readable_sensitivity,
    sensitivity_plan,
    sensitivity_table,
)
from tcs_lab.runs.checkpoints import checkpoint_path
from tcs_lab.runs.deadline import Deadline
from tcs_lab.runs.estimates import Expected, expect
from tcs_lab.runs.jobs import Job, missing_jobs
from tcs_lab.runs.parameters import plan, read_params, read_yaml
from tcs_lab.runs.plans import count_made, jobs_to_follow, plan_jobs, read_plan
from tcs_lab.runs.queue import run_queue
from tcs_lab.runs.records import compare_records, config_of, read_record, record_path
from tcs_lab.runs.runs import Run, run_all
from tcs_lab.studies.bench import USUAL_PARTS, bench_table, run_benches
from tcs_lab.support.errors import format_value, one_line, reject_unknown, shorten
from tcs_lab.support.paths import ROOT
from tcs_lab.tables.tables import plain_markdown, readable, summary
from tcs_lab.training.configuration import WHERE_KEYS, RunConfig


def carry_out(arguments: argparse.Namespace) -> int:
    """Carry out a command, return its exit code, and say in one line what ended it early."""
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # A table is printed even if the terminal's encoding has no η.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _stopped_once():
            code = COMMANDS[arguments.command](arguments)
            _flush_output()
            return code
    except BrokenPipeError:  # as after `| head`
        return 141
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except (MemoryError, RuntimeError) as error:
        full = any(words in str(error) for words in ("out of memory", "allocate memory"))
        if not full and not isinstance(error, MemoryError):
            raise
        print(f"error: not enough memory: {shorten(one_line(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        how, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        afresh = arguments.command in ("again", "bench")
        kept = "nothing is kept" if afresh else "the same command goes on where it stopped"
        print(f"{how}; {kept}", file=sys.stderr)
        return code


# Tables and sweeps ────────────────────────────────────────────────────────────────────────────────


def make_table(arguments: argparse.Namespace) -> int:
    """Make the runs of a table in a profile, then print the table."""
    params = _params(arguments)
    if arguments.scheme:
        params["schemes"] = arguments.scheme
    return _make(
        arguments,
        params,
        plan(params),
        lambda records: readable(summary(records, params.get("paper"))),
    )


def make_sweep(arguments: argparse.Namespace) -> int:
    """Make the runs that vary one setting at a time, then print what each setting changes."""
    params = _params(arguments)
    sweep = read_sensitivity(arguments.sweep or ROOT / "params" / "sensitivity.yaml")
    names = arguments.setting or list(sweep.settings)
    planned = [config for name in names for runs in sensitivity_plan(sweep, params, name).values()
               for config in runs]  # fmt: skip
    known = dict.fromkeys(config.scheme.name for config in planned)
    reject_unknown(arguments.scheme or (), known, "scheme in these settings")
    wanted = arguments.scheme or known
    configs = {c.record_name: c for c in planned if c.scheme.name in wanted}

    def table(_: list[dict[str, Any]]) -> pd.DataFrame:
        return readable_sensitivity(sensitivity_table(sweep, params, names, arguments.results))

    return _make(arguments, params, list(configs.values()), table)


def _make(
    arguments: argparse.Namespace, params: dict[str, Any], configs: list[RunConfig],
    table: Callable[[list[dict[str, Any]]], pd.DataFrame],
) -> int:  # fmt: skip
    """Make runs, and print the table of their records and which of them diverged."""
    jobs = params.get("jobs", 1)
    if arguments.dry_run:
        count = len({config.digest for config in configs})
        left = expect(missing_jobs(map(Run, configs), arguments.results), arguments.results)
        print(_describe_left(count, left, jobs))
        return 0
    records = run_all(configs, arguments.results, jobs)
    print(plain_markdown(table(records)))
    return _report_diverged(map(Run, configs), records)


def _report_diverged(jobs: Iterable[Job], records: list[dict[str, Any]]) -> int:
    """Say which jobs diverged, and return the exit code of a command that has made them."""
    code = 0
    for job, record in zip(jobs, records, strict=True):
        if reason := job.divergence(record):
            print(f"diverged: {job.name}: {reason}", file=sys.stderr)
            code = 1
    return code


def _params(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"seeds": arguments.seed, "jobs": arguments.jobs}
    given = {key: value for key, value in given.items() if value is not None}
    params = read_params(arguments.params) | _set_params(arguments.set) | given
    both = "a table and a profile, such as params/table1.yaml params/quick.yaml"
    if "paper" in params and "profile" not in params:  # a table alone would have the paper's size
        raise ValueError(
            f"--params: got {', '.join(arguments.params)} without a `profile`, allowed: {both}"
        )
    return params


def _set_params(pairs: list[str]) -> dict[str, Any]:
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(
                f"--set: got {format_value(pair)}, allowed: KEY=VALUE, such as epochs=3"
            )
        params[key] = read_yaml(value, f"--set {shorten(key)}")
    return params


# Plans ────────────────────────────────────────────────────────────────────────────────────────────


def make_plans(arguments: argparse.Namespace) -> int:
    """Make the runs of plans, one plan after the other; those that another process makes come last."""
    changes, jobs = _set_params(arguments.set), _check_count("--jobs", arguments.jobs)
    _check_minutes(arguments)
    if arguments.dry_run:
        print(_describe_left(*_sum(_list_stages(arguments, changes), arguments.results), jobs or 1))
        return 0

    wanted: list[Job] = []  # as of the last time that the queue asked

    def plan_all() -> list[Job]:
        named = _each_stage(arguments, lambda file: plan_jobs(file, changes, arguments.results))
        wanted[:] = [job for _, _, stage in named for job in stage]
        return wanted

    if arguments.minutes is not None:
        return _make_in_time(arguments, plan_all())
    records = run_queue(plan_all, arguments.results, jobs=jobs or 1)
    print(f"{len(records)} runs are made")
    return _report_diverged({job.path(arguments.results): job for job in wanted}.values(), records)


def _check_minutes(arguments: argparse.Namespace) -> None:
    """Raise ValueError for --minutes or --pack where they cannot be carried out."""
    if arguments.minutes is None:
        if arguments.pack:
            raise ValueError(f"--pack: got {arguments.pack}, allowed: only together with --minutes")
        return
    if not 0 < arguments.minutes < math.inf:
        raise ValueError(f"--minutes: got {arguments.minutes:g}, allowed: a finite number above 0")
    files = dict.fromkeys(_file_and_stage(given)[0] for given in arguments.plan)
    if len(files) > 1:
        raise ValueError(f"PLAN: got {', '.join(files)}, allowed with --minutes: a single file")


def _make_in_time(arguments: argparse.Namespace, jobs: list[Job]) -> int:
    """Make those jobs of a plan that fit into some minutes, and say what has become of all of them."""
    file, _ = _file_and_stage(arguments.plan[0])
    sharing = read_plan(file).sharing
    deadline = Deadline(jobs, sharing, arguments.results, arguments.jobs, arguments.pack)
    records = deadline.make(arguments.minutes)
    print(plain_markdown(deadline.table()))
    made = [attempt.job for attempt in deadline.made]
    return max(_report_diverged(made, records), int(deadline.failed))


def tell_status(arguments: argparse.Namespace) -> int:
    """Say how much of plans is made, stage by stage, what is left, and how long that will take."""
    jobs = _check_count("--jobs", arguments.jobs)
    stages = _list_stages(arguments, _set_params(arguments.set))
    print(plain_markdown(pd.DataFrame([stage.row(arguments.results) for stage in stages])))
    print(_describe_left(*_sum(stages, arguments.results), jobs))
    if any(stage.follow for stage in stages):
        print(
            "Runs that score a learning rate are counted although the rate is not chosen yet. A search may "
            "also go on beyond its first rates."
        )
    return 0


@dataclass(frozen=True)
class _PlannedStage:
    """A stage and its jobs. `follow` are stand-ins for jobs that cannot be named yet (see
    `jobs_to_follow`)."""

    file: str
    name: str
    jobs: list[Job]
    follow: list[Job]

    def row(self, results: str | Path | None) -> dict[str, Any]:
        """Return how much of the stage is made, and what is left."""
        made = count_made({self.name: self.jobs}, results).to_dict("records")[0]
        left = expect([*missing_jobs(self.jobs, results), *self.follow], results)
        return {
            "plan": self.file, "stage": self.name, "planned": made["planned"] + len(self.follow),
            "made": made["made"], "diverged": made["diverged"], "left": left.jobs,
            "hours taken": f"{made['hours']:.1f}", "hours left": _hours(left),
        }  # fmt: skip


def _list_stages(arguments: argparse.Namespace, changes: dict[str, Any]) -> list[_PlannedStage]:
    results = arguments.results
    named = _each_stage(arguments, lambda file: plan_jobs(file, changes, results))
    follow = cache(lambda file: jobs_to_follow(file, changes, results))
    return [_PlannedStage(file, name, jobs, follow(file)[name]) for file, name, jobs in named]


def _sum(stages: list[_PlannedStage], results: str | Path | None) -> tuple[int, Expected]:
    """Count the jobs of all stages, and estimate what those take that are left. A job that several
    stages have counts once."""
    jobs = {job.path(results): job for stage in stages for job in stage.jobs}
    follow = {job.path(results): job for stage in stages for job in stage.follow}
    left = [*missing_jobs(jobs.values(), results), *follow.values()]
    return len(jobs) + len(follow), expect(left, results)


def _each_stage(
    arguments: argparse.Namespace, jobs_of: Callable[[str], dict[str, list[Job]]]
) -> Iterator[tuple[str, str, list[Job]]]:
    """Return the stages that are asked for, each with its file, its name, and its jobs by
    `jobs_of(file)`."""
    for file, stage in dict.fromkeys(map(_file_and_stage, arguments.plan)):
        stages = jobs_of(file)
        wanted = [stage] if stage else list(stages)
        reject_unknown(wanted, stages, f"stage in {file}")
        yield from ((file, name, stages[name]) for name in stages if name in wanted)


def _file_and_stage(given: str) -> tuple[str, str]:
    """Split FILE:STAGE; a file that exists and has a colon in its name is a file without a stage."""
    if ":" not in given or Path(given).exists():
        return given, ""
    file, stage = given.rsplit(":", 1)
    return file, stage


def _describe_left(planned: int, left: Expected, jobs: int) -> str:
    """Say how many runs are planned, made and left, and how many hours the rest will take."""
    text = f"{planned} runs, {planned - left.jobs} of them made, {left.jobs} left"
    if left.jobs > left.unknown:
        text += f": about {_number(left.hours)} hours one after the other"
        if jobs > 1:
            text += f", at best {_number(left.hours / jobs)} with {jobs} at once"
    return text + (f"; the time of {left.unknown} of them is not known" if left.unknown else "")


def _hours(left: Expected) -> str:
    """Return the hours as a cell of a table; a question mark stands for those that are not known."""
    known = [_number(left.hours)] if left.jobs > left.unknown or not left.jobs else []
    return " + ".join(known + (["?"] if left.unknown else []))


def _number(hours: float) -> str:
    return f"{hours:.1f}" if hours >= 1 or not hours else f"{hours:.2g}"


def _check_count(option: str, value: int | None) -> Any:
    """Return the value of an option that counts something, or None if it is not given."""
    if value is not None and value < 1:
        raise ValueError(f"{option}: got {value}, allowed: a whole number >= 1")
    return value


# A record's run again ─────────────────────────────────────────────────────────────────────────────


def repeat_record(arguments: argparse.Namespace) -> int:
    """Make a record's run again, from the record alone; exit code 1 if its numbers are different."""
    record, where = read_record(arguments.record), _set_params(arguments.set)
    reject_unknown(
        where, WHERE_KEYS - {"profile"}, "key of --set, which says where and how the run is made"
    )
    config = config_of(record, **where)
    if arguments.dry_run:
        hours = record["provenance"]["wall_seconds"] / 3600
        print(f"1 run: about {hours:.2g} hours, the time that its record took")
        return 0
    left = checkpoint_path(config)
    with contextlib.ExitStack() as stack:
        folder = arguments.results or stack.enter_context(tempfile.TemporaryDirectory())
        if (there := record_path(config, folder)).exists():
            raise ValueError(
                f"--results: {there} exists, allowed: a folder that does not have this record"
            )
        left.unlink(missing_ok=True)  # other code may have begun the run
        stack.callback(left.unlink, missing_ok=True)  # if this run is stopped
        (made,) = run_all([config], folder)
    differences = compare_records(record, made)
    data = {one["provenance"]["fingerprint"] for one in (record, made)}
    other = " (made on other data)" if len(data) > 1 else ""
    same = f"the same in all {len(made['rows'])} epochs"
    print(f"{Path(arguments.record).name}: {differences[0] + other if differences else same}")
    return 1 if differences else 0


# Measurements ─────────────────────────────────────────────────────────────────────────────────────


def measure_speed(arguments: argparse.Namespace) -> int:
    """Measure parts of the bench, and print them as a table."""
    _check_count("--repeat", arguments.repeat)
    options = (arguments.repeat, arguments.device, arguments.precision, arguments.threads)
    record = run_benches(arguments.part or USUAL_PARTS, *options, arguments.results)
    print(plain_markdown(bench_table(record)))
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": make_table,
    "sensitivity": make_sweep,
    "queue": make_plans,
    "status": tell_status,
    "again": repeat_record,
    "bench": measure_speed,
    "compare": compare_command,
}


# How it ends ──────────────────────────────────────────────────────────────────────────────────────


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, which ends a command like Ctrl-C."""


@contextlib.contextmanager
def _stopped_once() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM raise KeyboardInterrupt. Later ones are ignored to the end of the
    process, so that everything can be cleaned up."""
    before: dict[int, Any] = {}
    stopped = False

    def stop(number: int, _: Any) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_IGN if stopped else handler)


def _flush_output() -> None:
    """Raise OSError here, and not when the interpreter ends, if what was printed can't be written."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
