"""The command line, `tcs` or python -m tcs_lab: its commands, options and help.

What the commands do is in `commands`. It is imported only when a command is carried out, so that help
and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tcs_lab.compare.command import add_arguments

EXIT_CODES = """\
exit codes:
  0    all went well
  1    a run diverged, a run before a deadline failed, a repeated run gave other numbers, or an
       unexpected error, whose traceback is shown
  2    no command, input that cannot be used, too little memory or disk, or a worker process that was
       killed; stderr says what and why
  130  interrupted by Ctrl-C
  141  nobody reads what is printed, as after `| head`
  143  terminated by SIGTERM; all files on disk are whole"""

BENCH_PARTS = ("round", "paper", "step", "codecs", "growth")
WHERE_OPTIONS = ("client_threads", "data_root", "device", "graph", "side_by_side", "threads")


def main(argv: list[str] | None = None) -> int:
    """Carry out a command line, and return its exit code. SystemExit for help, and for words that are
    not a command line."""
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
    """Let Ctrl-C end the process without a traceback, as long as there is nothing to clean up."""
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
    """A parser that says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """An option that prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tcs {version('tcs-core')}")
        except PackageNotFoundError:  # only the files, on a path of Python's
            print("tcs is not installed here, so that its version is not known")
        parser.exit(0)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all commands. What it parses has the command's name as `command`."""
    parser = _Parser(
        prog="tcs", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXIT_CODES,
        description="Time-Correlated Sparsification: make runs, see how far plans are, measure speed.",
    )  # fmt: skip
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(name: str, does: str, *examples: str) -> Callable[..., Any]:
        shown = "\n".join(["examples:", *(f"  {line}" for line in examples), "", EXIT_CODES])
        subparser = commands.add_parser(
            name, help=does, description=does[0].upper() + does[1:] + ".", epilog=shown,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        return subparser.add_argument

    _add_runs(command)
    _add_plans(command)
    _add_repeat(command)
    add_arguments(command(
        "compare", "tune and score a method from a file, and print its row beside those of known methods",
        "tcs compare notebooks/examples/per_tensor.py --dry-run",
        "tcs compare notebooks/examples/per_tensor.py",
        "tcs compare mine.py:Mine --densities",
        "tcs compare --list",
    ))  # fmt: skip
    _add_bench(command)
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
    for add, usual in ((run, "table and a profile"), (vary, "profile alone")):
        add(
            "--params",
            nargs="+",
            action="extend",
            required=True,
            help=f"YAML files of parameters, usually a {usual}; a later file wins over an "
            "earlier one (may be repeated)",
        )
        instead = " instead of those of the files"
        only, schemes = ("", instead) if add is run else ("only ", "")
        add(
            "--scheme",
            action="append",
            help=f"make {only}the runs of this scheme{schemes} (may be repeated)",
        )
        add(
            "--seed",
            action="append",
            type=int,
            help=f"make the runs with this seed{instead} (may be repeated)",
        )
        add(
            "--jobs",
            type=int,
            help="how many runs are made at once (default: what the files say, or 1)",
        )
        _add_common(add)
        _add_dry_run(add)
    vary(
        "--setting",
        action="append",
        help="make only the runs that vary this setting (may be repeated)",
    )
    vary(
        "--sweep",
        metavar="FILE",
        help="the file that says what is varied (default: params/sensitivity.yaml)",
    )


def _add_plans(command: Command) -> None:
    queue = command(
        "queue", "make the runs of plans, in their order",
        "tcs queue params/evidence_plan.yaml --jobs 2 --set data_root=FOLDER",
        "tcs queue params/fair_plan.yaml:main --dry-run",
        "on a GPU that is available for 12 minutes:",
        "tcs queue params/gpu_plan.yaml --minutes 12 --pack records.tar --set data_root=FOLDER",
    )  # fmt: skip
    status = command(
        "status", "say how many runs of plans are made and left, and how long the rest will take",
        "tcs status params/evidence_plan.yaml params/fair_plan.yaml",
        "tcs status params/fair_plan.yaml:main --jobs 2",
    )  # fmt: skip
    for add in (queue, status):
        add("plan", metavar="PLAN", nargs="+",
            help="files like params/evidence_plan.yaml; FILE:STAGE names one stage of a file")  # fmt: skip
    queue("--jobs", type=int,
          help="how many runs are made at once, in so many processes (default: 1; with --minutes: what the plan says, "
               "and at most this number)")  # fmt: skip
    status(
        "--jobs",
        type=int,
        default=1,
        help="how many runs are made at once, for the estimate of the time (default: 1)",
    )
    queue("--minutes", type=float,
          help="begin only runs that should end within this many minutes, and stop any that have not ended by then; "
               "several runs are made at once if the plan says that this is faster")  # fmt: skip
    queue("--pack", metavar="FILE",
          help="with --minutes: write a tar file of the new records after each run")  # fmt: skip
    _add_common(queue)
    _add_dry_run(queue)
    _add_common(status)


def _add_repeat(command: Command) -> None:
    again = command(
        "again", "make the run of a record again, and compare the two records",
        "tcs again results/quick/runs/RECORD.json",
        "tcs again results/evidence/runs/RECORD.json --set data_root=FOLDER",
    )  # fmt: skip
    again("record", metavar="RECORD", help="a file in results/<profile>/runs/")
    again("--set", action="append", default=[], metavar="KEY=VALUE",
          help=f"where and how the run is made (may be repeated); the keys are {', '.join(WHERE_OPTIONS)}")  # fmt: skip
    again("--results", help="keep the new record in this results folder (default: it is not kept)")
    _add_dry_run(again)


def _add_bench(command: Command) -> None:
    bench = command(
        "bench", "measure speed and memory, and write results/bench/",
        "tcs bench --part round --threads 2",
        "tcs bench --part paper --device cuda --precision bf16",
    )  # fmt: skip
    bench(
        "--part",
        action="append",
        choices=BENCH_PARTS,
        help="measure only this part (may be repeated)",
    )
    bench(
        "--repeat",
        type=int,
        default=7,
        help="how often each measurement is repeated (default: 7; short ones are repeated more often)",
    )
    bench(
        "--device",
        default="auto",
        help="where to measure: auto, cpu, cuda or cuda:<n> (default: auto)",
    )
    bench(
        "--precision", default="fp32", help="precision of the passes, fp32 or bf16 (default: fp32)"
    )
    bench("--threads", type=int, help="how many CPU threads (default: what PyTorch chooses)")
    bench("--results", help="the results folder (default: results/ beside notebooks/)")


def _add_common(add: Callable[..., Any]) -> None:
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="a further parameter; the value is read as YAML (may be repeated)")  # fmt: skip
    add("--results", help="the results folder (default: results/ beside notebooks/). A run that was interrupted "
        "goes on from a checkpoint in the folder $TCS_CACHE (default: ~/.cache/tcs-core)")  # fmt: skip


def _add_dry_run(add: Callable[..., Any]) -> None:
    add("--dry-run", action="store_true",
        help="make nothing, but say how many runs are left and about how many hours they take")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
