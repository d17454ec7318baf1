"""Command line: python -m tcs_lab run | queue | again | sensitivity | bench | compare; also installed as `tcs`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tcs_lab.compare.command import add_arguments, compare_command
from tcs_lab.evidence.sensitivity import (
    read_sensitivity,
    readable_sensitivity,
    sensitivity_plan,
    sensitivity_table,
)
from tcs_lab.runs.checkpoints import checkpoint_path
from tcs_lab.runs.deadline import Deadline
from tcs_lab.runs.parameters import plan, read_params, read_yaml
from tcs_lab.runs.plans import minutes_of, planned_runs, read_plan
from tcs_lab.runs.records import config_of, differences, read_record, record_path
from tcs_lab.runs.runs import run_all, run_queue
from tcs_lab.studies.bench import BENCHES, USUAL, bench_table, run_benches
from tcs_lab.support.errors import cut, one_line, reject_unknown, shown
from tcs_lab.support.places import ROOT
from tcs_lab.tables.tables import plain_markdown, readable, summary
from tcs_lab.training.configuration import WHERE_KEYS, RunConfig

# Words ────────────────────────────────────────────────────────────────────────────────────────────


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tcs", description="Time-Correlated Sparsification: runs")
    commands = parser.add_subparsers(required=True)

    def command(main: Callable[[Any], int], does: str, example: str = "") -> Callable[..., Any]:
        name = main.__name__.strip("_")
        own = commands.add_parser(name, help=does, description=does, epilog=example)
        own.set_defaults(main=main)
        return own.add_argument

    run = command(_run, "make the runs of a table in a profile; print the table")
    queue = command(
        _queue, "make the runs of a plan in its order; several may share the work",
        "Example, for a GPU that is there for 12 minutes: tcs queue params/gpu_plan.yaml "
        "--minutes 12 --pack records.tar --set data_root=FOLDER",
    )  # fmt: skip
    vary = command(_sensitivity, "make the runs that vary one setting at a time; print the table")
    again = command(_again, "make a record's run again and compare the two")
    bench = command(_bench, "measure speed and memory; write results/bench/")
    does = "tune and score a method from a file; print its row beside those of known methods"
    compare = commands.add_parser("compare", help=does, description=does)
    add_arguments(compare)
    compare.set_defaults(main=compare_command)
    for add in (run, vary):
        add("--params", nargs="+", required=True, help="YAML files, later over earlier")
        add("--scheme", action="append", help="only this scheme (may be repeated)")
        add("--seed", action="append", type=int, help="only this seed (may be repeated)")
        add("--jobs", type=int, help="processes side by side")
    queue("plan", metavar="PLAN", nargs="+",
          help="files like params/evidence_plan.yaml, one after the other; FILE:STAGE is one stage")  # fmt: skip
    queue("--stage", action="append", help="only this stage (may be repeated)")
    queue("--minutes", type=float,
          help="begin only runs that end within so many minutes, and stop what has not ended by then; "
               "several run at once where the plan says that this is faster")  # fmt: skip
    queue("--jobs", type=int, help="with --minutes: no more than so many runs at once")
    queue("--pack", metavar="FILE",
          help="with --minutes: write a tar of the new records after each run")  # fmt: skip
    for add, sets in (
        (run, _ANY),
        (queue, _ANY),
        (vary, _ANY),
        (again, f"where: {', '.join(sorted(_WHERE))}"),
    ):
        add("--set", action="append", default=[], metavar="KEY=VALUE", help=sets)
    for add in (run, queue, vary, bench):
        add("--results", help="results folder (default: results/ beside notebooks/)")
    again("--results", help="keep the new record in this results folder")
    again("record", metavar="RECORD", help="a file in results/<profile>/runs/")
    vary("--setting", action="append", help="only this setting (may be repeated)")
    vary("--sweep", default=ROOT / "params" / "sensitivity.yaml", metavar="FILE",
         help="what is varied (default: params/sensitivity.yaml)")  # fmt: skip
    bench("--part", action="append", choices=list(BENCHES), help="only this part (may be repeated)")
    bench("--repeat", type=int, default=7, help="turns of each measurement; short ones take more")
    bench("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    bench("--precision", default="fp32", help="fp32 or bf16")
    bench("--threads", type=int, help="CPU threads")
    return parser


_ANY = "one more parameter, its value read as YAML (may be repeated)"
_WHERE = WHERE_KEYS - {"profile"}


def _set_params(pairs: list[str]) -> dict[str, Any]:
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set: got {shown(pair)}, allowed: KEY=VALUE")
        params[key] = read_yaml(value, f"--set {cut(key)}")
    return params


def _params(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"seeds": arguments.seed, "jobs": arguments.jobs}
    given = {key: value for key, value in given.items() if value is not None}
    return read_params(arguments.params) | _set_params(arguments.set) | given


# Commands: each returns the exit code ─────────────────────────────────────────────────────────────


Planned = tuple[list[RunConfig], int, Callable[[list[dict[str, Any]]], pd.DataFrame]]


def _makes(planned: Callable[[argparse.Namespace], Planned]) -> Callable[[Any], int]:
    """The command that makes the planned runs, so many side by side; prints the table of their
    records and what diverged."""

    @functools.wraps(planned)
    def make(arguments: argparse.Namespace) -> int:
        configs, jobs, table = planned(arguments)
        records = run_all(configs, arguments.results, jobs)
        print(plain_markdown(table(records)))
        return _ended(records)

    return make


def _ended(records: list[dict[str, Any]]) -> int:
    """The exit code of runs that are made; says which of them diverged."""
    diverged = [record for record in records if record["status"] == "diverged"]
    for record in diverged:
        name = record["config"]["scheme"]["name"]
        print(f"diverged: {name}: {record['reason']}", file=sys.stderr)
    return 1 if diverged else 0


@_makes
def _run(arguments: argparse.Namespace) -> Planned:
    params = _params(arguments)
    if arguments.scheme:
        params["schemes"] = arguments.scheme
    paper = params.get("paper")
    return plan(params), params.get("jobs", 1), lambda records: readable(summary(records, paper))


def _queue(arguments: argparse.Namespace) -> int:
    """The runs of plans, one after the other; those that another process is making come last."""
    changes = _set_params(arguments.set)

    def planned() -> list[RunConfig]:
        configs = []
        for given in arguments.plan:
            file, stage = _file_and_stage(given)
            stages = planned_runs(file, changes, arguments.results)
            wanted = [stage] if stage else arguments.stage or list(stages)
            reject_unknown(wanted, stages, f"stage in {file}")
            configs += [config for name in stages if name in wanted for config in stages[name]]
        return configs

    if arguments.minutes is not None:
        return _before_deadline(arguments, planned(), changes)
    for key in ("jobs", "pack"):
        if given := getattr(arguments, key):
            raise ValueError(f"--{key}: got {given}, allowed without --minutes: none")
    records = run_queue(planned, arguments.results)
    print(f"{len(records)} runs are made")
    return _ended(records)


def _file_and_stage(given: str) -> tuple[str, str]:
    """FILE or FILE:STAGE; a file whose name has a colon is a file."""
    if ":" not in given or Path(given).exists():
        return given, ""
    file, stage = given.rsplit(":", 1)
    return file, stage


def _before_deadline(
    arguments: argparse.Namespace, configs: list[RunConfig], changes: dict[str, Any]
) -> int:
    """Those of a plan's runs that fit into some minutes; says what has become of all of them."""
    if not 0 < arguments.minutes < math.inf:
        raise ValueError(f"--minutes: got {arguments.minutes:g}, allowed: a number above 0")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs: got {arguments.jobs}, allowed: a whole number >= 1")
    files = list(dict.fromkeys(_file_and_stage(given)[0] for given in arguments.plan))
    if len(files) > 1:
        raise ValueError(f"PLAN: got {', '.join(files)}, allowed with --minutes: one file")
    expected, sharing = minutes_of(files[0], changes), read_plan(files[0]).sharing
    where = arguments.results, arguments.jobs, arguments.pack
    deadline = Deadline(configs, expected, sharing, *where)
    records = deadline.make(arguments.minutes)
    print(plain_markdown(deadline.table()))
    return max(_ended(records), int(deadline.failed))


@_makes
def _sensitivity(arguments: argparse.Namespace) -> Planned:
    sweep, params = read_sensitivity(arguments.sweep), _params(arguments)
    names = arguments.setting or list(sweep.settings)
    planned = [config for name in names for runs in sensitivity_plan(sweep, params, name).values()
               for config in runs]  # fmt: skip
    known = dict.fromkeys(config.scheme.name for config in planned)
    reject_unknown(arguments.scheme or (), known, "scheme in these settings")
    wanted = arguments.scheme or known
    configs = {c.record_name: c for c in planned if c.scheme.name in wanted}
    return (
        list(configs.values()),
        params.get("jobs", 1),
        lambda _: readable_sensitivity(sensitivity_table(sweep, params, names, arguments.results)),
    )


def _again(arguments: argparse.Namespace) -> int:
    """A record's run once more, from the record alone; exit code 1 if its numbers are others."""
    record, where = read_record(arguments.record), _set_params(arguments.set)
    reject_unknown(where, _WHERE, "place to run")
    config = config_of(record, **where)
    left = checkpoint_path(config)
    left.unlink(missing_ok=True)  # of a run that other code had begun
    with contextlib.ExitStack() as stack:
        stack.callback(left.unlink, missing_ok=True)  # of this one, if it is stopped
        folder = arguments.results or stack.enter_context(tempfile.TemporaryDirectory())
        if (there := record_path(config, folder)).exists():
            raise ValueError(f"--results: {there} exists, allowed: a folder without this record")
        (made,) = run_all([config], folder)
    found = differences(record, made)
    data = {one["provenance"]["fingerprint"] for one in (record, made)}
    other = " (on other data)" if len(data) > 1 else ""
    same = f"the same in all {len(made['rows'])} epochs"
    print(f"{Path(arguments.record).name}: {found[0] + other if found else same}")
    return 1 if found else 0


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.repeat < 1:
        raise ValueError(f"--repeat: got {arguments.repeat}, allowed: a whole number >= 1")
    options = (arguments.repeat, arguments.device, arguments.precision, arguments.threads)
    record = run_benches(arguments.part or USUAL, *options, arguments.results)
    print(plain_markdown(bench_table(record)))
    return 0


# How it ends ──────────────────────────────────────────────────────────────────────────────────────


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if all went well, 1 if a run diverged, 2 for input that can't be used,
    130 after Ctrl-C, 141 if nobody reads what it prints, 143 after SIGTERM."""
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding without eta spoils no table
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        with _stopped_once():
            code = arguments.main(arguments)
            _flush_output()
            return code
    except BrokenPipeError:  # as after `| head`
        return 141
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except (MemoryError, RuntimeError) as error:
        full = any(words in str(error) for words in ("out of memory", "allocate memory"))
        if not full and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        print(f"error: not enough memory: {cut(one_line(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        how, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        afresh = arguments.main in (_bench, _again)
        kept = "nothing is kept" if afresh else f"{_GOES_ON} where it stopped"
        print(f"{how}; {kept}", file=sys.stderr)
        return code


_GOES_ON = "the same command goes on"


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the command like Ctrl-C."""


@contextlib.contextmanager
def _stopped_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt, the first of them; those after it are ignored to
    the end of the process, so that what has to be put away is."""
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
    """Raises here, not when the interpreter ends, if what was printed can't be written."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


if __name__ == "__main__":
    sys.exit(main())
