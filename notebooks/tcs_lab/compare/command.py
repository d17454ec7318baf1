"""`tcs compare`: tunes a method, scores it, and prints its row beside the stored rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the arguments of the command by its parser's `add_argument`. This imports nothing heavy."""
    add(
        "method", nargs="?", metavar="METHOD",
        help="one Python file, FILE:NAME, or the name of a scheme, such as TCS-L8. A file is executed: compare only "
        "files that you trust. After any change of the file, also of a comment, all its runs are made again. It "
        "can import installed modules only, and a change of these makes no new runs",
    )  # fmt: skip
    add(
        "--densities",
        action="store_true",
        help="also tune and score the method at two further densities (fractions of entries that are sent)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="only run a few rounds of a method from a file, to find mistakes in it, and say how many bytes it "
        "sends, how many runs are missing and how long they would take",
    )
    add("--list", action="store_true", help="show the stored rows, and the names of others")
    add("--jobs", type=int, help="number of processes (default: 2)")
    add("--plan", metavar="FILE", help="the track (default: params/compare_plan.yaml)")
    add("--results", help="results folder (default: results/ beside notebooks/)")


def compare_command(arguments: argparse.Namespace) -> int:
    """Compare a method. Return 0 if all went well, and 1 if the method has no points because runs diverged.

    Raises ValueError or FileNotFoundError, in one line, for what cannot be compared.
    """
    from tcs_lab.compare.methods import find_method
    from tcs_lab.compare.rows import make_rows, print_row, print_stored, say_if_alone, try_method
    from tcs_lab.compare.track import read_track
    from tcs_lab.runs.parameters import check_parameter

    if arguments.list and (arguments.method or arguments.densities or arguments.dry_run):
        got = arguments.method or ("--densities" if arguments.densities else "--dry-run")
        raise ValueError(
            f"--list: got {got} beside it, allowed: --list alone, which shows all rows"
        )
    if arguments.jobs is not None:
        check_parameter("jobs", arguments.jobs)
    track = read_track(arguments.plan, arguments.results)
    if arguments.list:
        print_stored(track)
        return 0
    if arguments.method is None:
        raise ValueError(
            "METHOD: got none, allowed: a Python file, or the name of a scheme (see --list)"
        )
    method = find_method(arguments.method)
    listed = track.analysis.methods if method.file is None else {}
    names = tuple(listed.get(method.name, method.names))
    names = names if arguments.densities else names[:1]
    if arguments.densities and len(names) == 1:
        raise ValueError(
            f"--densities: got {method.label}, which has one density only; leave --densities out"
        )
    jobs, slower = arguments.jobs or 2, None
    if arguments.dry_run or len(names) > 1:
        slower, words = try_method(track, method, names)
        if words:
            print(words)
    say_if_alone(track, method)
    if arguments.dry_run:
        print(describe_hours(track, method, names, jobs, slower))
        return 0
    make_rows(track, method, names, jobs, slower)
    return print_row(track, method, names)


def describe_hours(
    track: Any, method: Any, names: tuple[str, ...], jobs: int, slower: float | None
) -> str:
    """Say how many runs are missing, how long they should take, and how many they can become. `slower` is
    how many times as long as one of TCS a run takes, if that was measured."""
    from tcs_lab.compare.rows import estimate_minutes
    from tcs_lab.compare.track import count_further_rates, count_runs_left

    tuned = [track.find_scheme(name, method) for name in names]
    left, more = count_runs_left(tuned), count_further_rates(tuned)
    each, remark = estimate_minutes(track, names, slower)
    said = (
        f"{method.label}: {left} runs of about {each:.3g} minutes on a core{remark} are missing, about "
        f"{left * each / jobs:.0f} minutes with {jobs} of them side by side."
    )
    if not more:
        return said
    return said + (
        " While the best of the learning rates that are tried is the smallest or largest one, another one "
        f"is tried: that makes at most {left + more} runs, about {(left + more) * each / jobs:.0f} minutes."
    )
