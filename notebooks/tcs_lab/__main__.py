"""The command line, `tcs` or python -m tcs_lab: what it takes. What it does is in `commands`, which is
imported once a command is known to be wanted, so that help and mistakes are answered at once."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

EXIT_CODES = """\
exit codes:
  0    all went well
  1    a run diverged or failed, or a repeated run gave other numbers
  2    no command, or input that cannot be used: one line on stderr says what and why
  130  interrupted by Ctrl-C
  141  nobody reads what is printed
  143  terminated by SIGTERM; whatever is on disk is whole"""

BENCH_PARTS = ("round", "paper", "compiled", "step", "codecs", "growth")
PLACES = ("client_threads", "compiled", "data_root", "device", "errors_limit", "graph",
          "side_by_side", "threads")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Carries out a command line; returns its exit code. SystemExit for help and for words that are
    no command line."""
    words = sys.argv[1:] if argv is None else argv
    parser = command_line()
    if not words:
        parser.print_help()
        return 2
    arguments = parser.parse_args(words)
    with _quiet_interrupt():
        from tcs_lab.commands import carry_out
    return carry_out(arguments)


@contextlib.contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process without a traceback, as long as there is nothing to put away."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tcs {version('tcs-core')}")
        except PackageNotFoundError:  # the files alone, on a path of Python's
            print("tcs, not installed: no version is known")
        parser.exit(0)


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands. What it reads has the command's name as `command`."""
    parser = _Parser(
        prog="tcs", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXIT_CODES,
        description="Time-Correlated Sparsification: make runs, look at plans, measure.",
    )  # fmt: skip
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(name: str, does: str, *examples: str) -> Callable[..., Any]:
        shown = "\n".join(["examples:", *(f"  {line}" for line in examples), "", EXIT_CODES])
        own = commands.add_parser(
            name, help=does, description=does[0].upper() + does[1:] + ".", epilog=shown,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        return own.add_argument

    _add_runs(command)
    _add_plans(command)
    _add_repeat(command)
    _add_measurements(command)
    return parser


Command = Callable[..., Callable[..., Any]]


def _add_runs(command: Command) -> None:
    run = command(
        "run", "make the runs of a table in a profile, and print the table",
        "tcs run --params params/table1.yaml params/quick.yaml",
        "tcs run --params params/table1.yaml params/cpu.yaml --scheme TCS --seed 1 --dry-run",
    )  # fmt: skip
    vary = command(
        "sensitivity", "make the runs that vary one setting at a time, and print the table",
        "tcs sensitivity --params params/short.yaml --setting phi_local --seed 0 \\",
        "    --set data_root=cifar10.tar",
    )  # fmt: skip
    for add in (run, vary):
        add("--params", nargs="+", required=True, help="YAML files, later over earlier")
        add("--scheme", action="append", help="only this scheme (may be repeated)")
        add("--seed", action="append", type=int, help="only this seed (may be repeated)")
        add("--jobs", type=int, help="how many runs at once (default: as the files say, or 1)")
        _add_usual(add)
    vary("--setting", action="append", help="only this setting (may be repeated)")
    vary("--sweep", metavar="FILE", help="what is varied (default: params/sensitivity.yaml)")


def _add_plans(command: Command) -> None:
    queue = command(
        "queue", "make the runs of plans, in their order",
        "tcs queue params/evidence_plan.yaml --jobs 2 --set data_root=FOLDER",
        "tcs queue params/fair_plan.yaml:main --dry-run",
        "on a GPU that is there for 12 minutes:",
        "tcs queue params/gpu_plan.yaml --minutes 12 --pack records.tar --set data_root=FOLDER",
    )  # fmt: skip
    status = command(
        "status", "say of plans what is made, what is left, and how long that will take",
        "tcs status params/evidence_plan.yaml params/fair_plan.yaml",
        "tcs status params/fair_plan.yaml:main --jobs 2",
    )  # fmt: skip
    for add in (queue, status):
        add("plan", metavar="PLAN", nargs="+",
            help="files like params/evidence_plan.yaml, one after the other; FILE:STAGE is one stage")  # fmt: skip
        add("--stage", action="append", help="only this stage (may be repeated)")
    queue("--jobs", type=int,
          help="how many runs at once, each in a process of its own (default: 1; with --minutes, as the plan says)")  # fmt: skip
    status("--jobs", type=int, default=1, help="for the time that is left: how many runs at once")
    queue("--minutes", type=float,
          help="begin only runs that end within so many minutes, and stop what has not ended by then; "
               "several run at once where the plan says that this is faster")  # fmt: skip
    queue("--pack", metavar="FILE",
          help="with --minutes: write a tar of the new records after each run")  # fmt: skip
    _add_usual(queue)
    _add_usual(status, trains=False)


def _add_repeat(command: Command) -> None:
    again = command(
        "again", "make a record's run again, and compare the two",
        "tcs again results/quick/runs/RECORD.json",
        "tcs again results/evidence/runs/RECORD.json --set data_root=FOLDER",
    )  # fmt: skip
    again("record", metavar="RECORD", help="a file in results/<profile>/runs/")
    again("--set", action="append", default=[], metavar="KEY=VALUE",
          help=f"where and how it is made (may be repeated): {', '.join(PLACES)}")  # fmt: skip
    again("--results", help="keep the new record in this results folder")
    _add_dry_run(again)


def _add_measurements(command: Command) -> None:
    optimizers = command(
        "optimizers", "make the trainings of params/optimizers.yaml: what the DDP hook costs optimizers",
        "tcs optimizers --dry-run", "tcs optimizers --jobs 2",
    )  # fmt: skip
    optimizers("--jobs", type=int, help="how many trainings at once (default: 1)")
    optimizers("--results", help="results folder (default: results/ beside notebooks/)")
    _add_dry_run(optimizers)
    links = command(
        "links", "measure steps of DDP over links of given rates (Linux, as root); writes results/hook/links/",
        "two ranks, 10 layers of 1000 x 1000, no limit and 1000 Mbit/s:",
        "tcs links 2 10 1000 none 1000",
        'tcs links 2 10 1000 100 plain "TCS 1 %"',
        "what notebook 12 shows: tcs queue params/links.yaml",
    )  # fmt: skip
    links("--results", help="results folder (default: results/ beside notebooks/)")
    for name in ("ranks", "layers", "width"):
        links(name, metavar=name.upper(), type=int)
    links("rates", metavar="RATE", nargs="+",
          help="Mbit/s, or none for no limit; then, if not all, the ways to exchange that are measured")  # fmt: skip
    bench = command(
        "bench", "measure speed and memory, and write results/bench/",
        "tcs bench --part round --threads 2",
        "tcs bench --part paper --device cuda --precision bf16",
    )  # fmt: skip
    bench("--part", action="append", choices=BENCH_PARTS, help="only this part (may be repeated)")
    bench("--repeat", type=int, default=7, help="turns of each measurement; short ones take more")
    bench("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    bench("--precision", default="fp32", help="fp32 or bf16")
    bench("--threads", type=int, help="CPU threads")
    bench("--results", help="results folder (default: results/ beside notebooks/)")


def _add_usual(add: Callable[..., Any], trains: bool = True) -> None:
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="one more parameter, its value read as YAML (may be repeated)")  # fmt: skip
    add("--results", help="results folder (default: results/ beside notebooks/)")
    if trains:
        _add_dry_run(add)


def _add_dry_run(add: Callable[..., Any]) -> None:
    add("--dry-run", action="store_true",
        help="make nothing: say how many runs are left, and about how many hours they take")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
