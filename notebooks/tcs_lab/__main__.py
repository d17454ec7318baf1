"""Command line: python -m tcs_lab run | again | sensitivity | bench."""

from __future__ import annotations

import argparse
import contextlib
import io
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

from tcs_core import RankError
from tcs_lab.bench import BENCHES, bench_table, run_benches
from tcs_lab.errors import cut, reject_unknown, shown
from tcs_lab.ranks import _world, joined_ranks
from tcs_lab.records import config_of, differences, read_record, record_path
from tcs_lab.runs import run_all
from tcs_lab.sensitivity import (
    read_sensitivity,
    readable_sensitivity,
    sensitivity_plan,
    sensitivity_table,
)
from tcs_lab.settings import ROOT, WHERE_KEYS, RunConfig, plan, read_params, read_yaml
from tcs_lab.tables import markdown, readable, summary

# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 15. Command line: python tcs_core.py run --params params/table1.yaml params/quick.yaml
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tcs_core.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run_ = commands.add_parser("run", help="make the runs of a table in a profile; print the table")
    vary = commands.add_parser("sensitivity", help="make the runs that vary one setting at a time")
    for command in (run_, vary):
        add = command.add_argument
        add("--params", nargs="+", required=True, help="YAML files, later over earlier")
        add("--scheme", action="append", help="only this scheme (may be repeated)")
        add("--seed", action="append", type=int, help="only this seed (may be repeated)")
        add("--set", action="append", default=[], metavar="KEY=VALUE",
            help="one more parameter, its value read as YAML")  # fmt: skip
        add("--results", help="results folder (default: beside this module)")
        add("--jobs", type=int, help="processes side by side")
        add("--timeout", type=float, metavar="SECONDS",
            help="wait for a rank (default: $TCS_TIMEOUT, or 600)")  # fmt: skip
    run_.set_defaults(main=_main_run)
    vary.add_argument("--setting", action="append", help="only this setting (may be repeated)")
    vary.add_argument("--sweep", default=ROOT / "params" / "sensitivity.yaml", metavar="FILE",
                      help="what is varied (default: params/sensitivity.yaml)")  # fmt: skip
    vary.set_defaults(main=_main_sensitivity)
    again = commands.add_parser("again", help="make a record's run again and compare the two")
    again.add_argument("record", metavar="RECORD", help="a file in results/<profile>/runs/")
    again.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                       help=f"where: {', '.join(sorted(WHERE_KEYS - {'profile'}))}")  # fmt: skip
    again.add_argument("--results", help="keep the new record in this results folder")
    again.set_defaults(main=_main_again)
    bench = commands.add_parser("bench", help="measure speed and memory; write results/bench/")
    bench.add_argument("--part", action="append", choices=list(BENCHES), help="only this part")
    bench.add_argument(
        "--repeat", type=int, default=7, help="turns of each measurement; short ones take more"
    )
    bench.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    bench.add_argument("--precision", default="fp32", help="fp32 or bf16")
    bench.add_argument("--threads", type=int, help="CPU threads")
    bench.add_argument("--results", help="results folder (default: beside this module)")
    bench.set_defaults(main=_main_bench)
    return parser


def _set_params(pairs: list[str]) -> dict[str, Any]:
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set: got {shown(pair)}, allowed: KEY=VALUE")
        params[key] = read_yaml(value, f"--set {cut(key)}")
    return params


def _command_params(arguments: argparse.Namespace) -> dict[str, Any]:
    params = read_params(arguments.params) | _set_params(arguments.set)
    if arguments.seed is not None:
        params["seeds"] = arguments.seed
    if arguments.jobs is not None:
        params["jobs"] = arguments.jobs
    return params


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the command like Ctrl-C."""


@contextlib.contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Terminated

    waits = _world()[1] > 1  # in a collective, where Python sees no signal: then it just ends
    if waits or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if all went well, 1 if a run diverged, 2 for input that can't be used,
    3 if another rank is late, gone or wrong, 130 after Ctrl-C, 141 if nobody reads what it prints,
    143 after SIGTERM.

    Under torchrun all ranks call it; what all of them know, rank 0 says.
    """
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding without eta spoils no table
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        with _sigterm_like_ctrl_c():
            code = arguments.main(arguments)
            _flush_output()
            return code
    except BrokenPipeError:  # as after `| head`
        return 141
    except (ValueError, OSError, RankError) as error:
        lost = isinstance(error, RankError)
        if _world()[0] == 0 or not hasattr(error, "told_to_all"):
            hint = "; the same command goes on from the last checkpoint" if lost else ""
            print(f"error: {error}{hint}", file=sys.stderr, flush=True)
        return 3 if lost else 2
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not full and ("memory" not in str(error) or "illegal" in str(error)):
            raise
        print(f"error: not enough memory: {cut(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        how, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        kept = "nothing is kept" if arguments.main is _main_bench else _GOES_ON
        print(f"{how}; {kept}", file=sys.stderr)
        return code


_GOES_ON = "the same command goes on where it stopped"


def _flush_output() -> None:
    """Raises here, not when the interpreter ends, if what was printed can't be written."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _main_run(arguments: argparse.Namespace) -> int:
    params = _command_params(arguments)
    if arguments.scheme:
        params["schemes"] = arguments.scheme
    return _make(
        plan(params), params, arguments,
        lambda records: readable(summary(records, params.get("paper"))),
    )  # fmt: skip


def _main_sensitivity(arguments: argparse.Namespace) -> int:
    sweep, params = read_sensitivity(arguments.sweep), _command_params(arguments)
    names = arguments.setting or list(sweep["settings"])
    planned = [config for name in names for runs in sensitivity_plan(sweep, params, name).values()
               for config in runs]  # fmt: skip
    known = dict.fromkeys(config.scheme.name for config in planned)
    reject_unknown(arguments.scheme or (), known, "scheme in these settings")
    wanted = arguments.scheme or known
    configs = {c.record_name: c for c in planned if c.scheme.name in wanted}
    return _make(
        list(configs.values()), params, arguments,
        lambda _: readable_sensitivity(sensitivity_table(sweep, params, names, arguments.results)),
    )  # fmt: skip


def _make(
    configs: list[RunConfig], params: dict[str, Any], arguments: argparse.Namespace,
    table: Callable[[list[dict[str, Any]]], pd.DataFrame],
) -> int:  # fmt: skip
    """Make the runs; rank 0 prints the table of their records and what diverged."""
    with joined_ranks(configs[0].torch_device, arguments.timeout) as ranks:
        records = run_all(configs, arguments.results, params.get("jobs", 1), ranks=ranks)
    diverged = [r for r in records if r["status"] == "diverged"]
    if ranks.rank == 0:
        print(markdown(table(records)))
        for record in diverged:
            name = record["config"]["scheme"]["name"]
            print(f"diverged: {name}: {record['reason']}", file=sys.stderr)
    return 1 if diverged else 0


def _main_again(arguments: argparse.Namespace) -> int:
    """A record's run once more, from the record alone; exit code 1 if its numbers are others."""
    record, where = read_record(arguments.record), _set_params(arguments.set)
    reject_unknown(where, WHERE_KEYS - {"profile"}, "place to run")
    config = config_of(record, **where)
    with contextlib.ExitStack() as stack:
        folder = arguments.results or stack.enter_context(tempfile.TemporaryDirectory())
        if (there := record_path(config, folder)).exists():
            raise ValueError(f"--results: {there} exists, allowed: a folder without this record")
        (made,) = run_all([config], folder)
    found = differences(record, made)
    name = Path(arguments.record).name
    print(f"{name}: {found[0]}" if found else f"{name}: the same in all {len(made['rows'])} epochs")
    return 1 if found else 0


def _main_bench(arguments: argparse.Namespace) -> int:
    if arguments.repeat < 1:
        raise ValueError(f"--repeat: got {arguments.repeat}, allowed: a whole number >= 1")
    options = (arguments.repeat, arguments.device, arguments.precision, arguments.threads)
    record = run_benches(arguments.part or list(BENCHES), *options, arguments.results)
    print(markdown(bench_table(record)))
    return 0


if __name__ == "__main__":
    code = main()
    if code and _world()[1] > 1:  # gloo's threads may abort an interpreter that ends
        os._exit(code)
    sys.exit(code)
