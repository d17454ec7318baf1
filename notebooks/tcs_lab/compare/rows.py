"""The row of a method: make its runs, write the row to a file, and print it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_core import NotFiniteError, Scheme
from tcs_lab.compare.methods import Method, read_method_file
from tcs_lab.compare.probe import Played, play_rounds, probe_method
from tcs_lab.compare.scoring import Point, Scores
from tcs_lab.compare.table import (
    comparison_figure,
    comparison_table,
    describe_comparison,
    describe_rows,
    rows_table,
)
from tcs_lab.compare.track import PLAN, Track, count_runs_left, list_next_runs
from tcs_lab.evidence.fair import TunedScheme
from tcs_lab.runs.jobs import Tell
from tcs_lab.runs.records import Record, read_record, record_path
from tcs_lab.runs.runs import Run, run_all
from tcs_lab.support.errors import shorten
from tcs_lab.support.files import write_json, write_whole
from tcs_lab.tables.figures import save_figure
from tcs_lab.tables.tables import format_number, plain_markdown
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.training import load_data

ROW = "row.json"


@dataclass(frozen=True)
class MethodRun(Run):
    """A run of a method. That of a method from a file takes the file with it, also into a worker."""

    method: Method = field(kw_only=True)

    @property
    def can_travel(self) -> bool:
        return self.method.file is not None or super().can_travel

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_run, (self.config, self.minutes, self.method)

    def make(self, tell: Tell = None) -> Record:
        with self.method.guard(self.config):
            return super().make(tell)


def _rebuild_run(config: RunConfig, minutes: float | None, method: Method) -> MethodRun:
    """Rebuild a run in a worker, which knows the method's file from now on."""
    if method.file is not None:
        read_method_file(method.file, method.name, method.source)
    return MethodRun(config, minutes, method=method)


def try_method(track: Track, method: Method, names: Sequence[str]) -> tuple[float | None, str]:
    """Play a few rounds of each scheme of a method from a file, and measure how long one takes.

    Return how many times as long as a run of TCS one of the method takes, None if that was not measured,
    and words about a round's messages. For a known method, the time is that in its stored row, and
    nothing is played. Raises what `play_method` raises.
    """
    steps = Scheme.named(names[0]).local_steps  # an epoch has so many times fewer rounds
    if method.file is None:
        stored = read_row(track.folder / method.folder).get("beside_tcs")
        return (stored / steps if isinstance(stored, float) else None), ""
    played = play_method(track, method, names)
    if played is None:
        return None, f"{names[0]} diverged in its first rounds; smaller rates will be tried."
    first = track.find_scheme(names[0], method).search.config(1.0, track.seeds[0])
    if first.scheme.centralized:
        return None, ""
    beside = track.find_scheme("TCS").search.config(1.0, track.seeds[0])
    words = _describe_round(played[0], play_rounds(beside, load_data(beside)))
    with method.guard(first):
        probe = probe_method(first, beside, load_data(first), turns=5)
    return probe.beside_tcs / steps, words


def play_method(track: Track, method: Method, names: Sequence[str]) -> list[Played] | None:
    """Play a few rounds of each scheme of a method from a file, so that mistakes are found before its first
    run. Return None if one diverged, which is a result and not a mistake.

    Raises ValueError, in one line that names the file, for a mistake in it, and for two densities that
    send as many bytes.
    """
    sizes, played = dict[int, str](), list[Played]()
    for name in names:
        config = track.find_scheme(name, method).search.config(1.0, track.seeds[0])
        try:
            with method.guard(config, "trial"):
                played.append(play_rounds(config, load_data(config)))
        except ValueError as error:
            if isinstance(error.__cause__, NotFiniteError):
                return None
            raise
        size = played[-1].bytes_up
        if played[-1].dense:  # a dense start of its own, with as many bytes at each density
            continue
        if size in sizes:
            raise ValueError(
                f"--densities: {method.label}: {sizes[size]} and {name} both send {size:,} bytes in a round, "
                "allowed: a rule that keeps fewer entries where self.k_global and self.k_local are smaller; "
                "or leave --densities out"
            )
        sizes[size] = name
    return played


def _describe_round(played: Played, tcs: Played) -> str:
    """Say how many bytes a client sent in a round, beside one of TCS."""
    mean, of_tcs = (one.bytes_up / one.clients for one in (played, tcs))
    dense = ", because this round was dense: the method had no mask yet" if played.dense else ""
    return f"Four rounds were played without a mistake. In the fourth, a client sent {mean:,.0f} bytes{dense} (TCS sends {of_tcs:,.0f}). {played.remark}".rstrip()


def estimate_minutes(track: Track, names: Sequence[str], slower: float | None) -> tuple[float, str]:
    """Return the minutes that a run of a method should take, and a remark about them.

    `slower` is what `try_method` measured, if it did. A run takes the minutes of the plan, or more if it
    is slower than one of TCS.
    """
    minutes = track.analysis.minutes
    if slower is None:
        is_class = Scheme.named(names[0]).code == "tensors"
        remark = " (or several times as long with compress and decompress)"
        return minutes, remark if is_class else ""
    if slower <= 1:
        return minutes, ""
    return minutes * slower, f" (a run takes about {slower:.1f} times as long as one of TCS)"


def make_rows(
    track: Track, method: Method, names: Sequence[str], jobs: int, slower: float | None
) -> None:
    """Make the missing runs of a method, and save its row. If this is interrupted, the runs that are made
    remain, and the same call goes on. `slower` is what `try_method` measured, if it did."""
    tuned = [track.find_scheme(name, method) for name in names]
    each, remark = estimate_minutes(track, names, slower)
    if method.file is not None and slower is None and list_next_runs(tuned):
        play_method(track, method, names)
    while configs := list_next_runs(tuned):
        left = max(len(configs), count_runs_left(tuned))
        minutes = math.ceil(left / jobs) * each
        words = (
            f"{method.label}: {len(configs)} of {left} missing runs begin now; "
            f"all of them take about {minutes:.0f} minutes{remark}"
        )
        print(words, file=sys.stderr, flush=True)
        run_all([MethodRun(c, method=method) for c in configs], tuned[0].results, jobs)
        tuned = [track.find_scheme(name, method) for name in names]
    _save_row(track, method, names)


def _save_row(track: Track, method: Method, names: Sequence[str]) -> None:
    """Save a method's row and its file in results/compare/<method>/.

    An older row of the same file keeps its further schemes if all of their runs on this track are made;
    with another track they are left out. The row's file stays as it is if nothing in it has changed.
    """
    folder, kept = track.folder / method.folder, read_row(track.folder / method.folder)
    if kept.get("sha256") != method.sha256:
        kept = {}
    further = [name for name in kept.get("tried", {}) if name not in names]
    older = {name: track.find_scheme(name, method) for name in further}
    tuned = {name: track.find_scheme(name, method) for name in names}
    tuned |= {name: one for name, one in older.items() if one.is_complete}
    points = {p.scheme: _point_fields(p) for p in Scores(track, list(tuned.values())).points}
    row: dict[str, Any] = {
        "method": method.name, "file": method.file and method.file.name, "sha256": method.sha256,
        "tried": {name: _list_tried(one) for name, one in tuned.items()},
        "diverged": {name: one.diverged for name, one in tuned.items() if one.diverged},
        "points": points,
    }  # fmt: skip
    if all(kept.get(key) == row[key] for key in ("tried", "diverged", "points")):
        return
    usual = tuned[names[0]].search
    chosen = usual.config(usual.chosen or 1.0, track.seeds[0])
    if names[0] in points and not chosen.scheme.centralized:
        beside = track.find_scheme("TCS").search.config(1.0, track.seeds[0])
        with method.guard(chosen):
            row |= asdict(probe_method(chosen, beside, load_data(chosen)))
    if method.file is not None:
        write_whole(folder / "method.py", lambda file: file.write(method.source))
    write_json(folder / ROW, row)


def _point_fields(point: Point) -> dict[str, Any]:
    """Return the fields of a point without its interval, which depends on all rows."""
    return {
        key: value for key, value in json.loads(json.dumps(asdict(point))).items() if key != "half"
    }


def _list_tried(tuned: TunedScheme) -> dict[str, float | None]:
    """Return the validation accuracy in percent by learning rate; it is None where the run diverged."""
    search = tuned.search
    return {
        f"{search.config(factor, search.tuning.seed).eta:g}": 100 * accuracy
        if accuracy >= 0
        else None
        for factor, accuracy in tuned.tried.items()
        if accuracy is not None
    }


def read_row(folder: Path) -> dict[str, Any]:
    """Read the row of a method; {} if there is none, or none that can be read."""
    try:
        read = json.loads((folder / ROW).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


# Words ────────────────────────────────────────────────────────────────────────────────────────────


def print_row(track: Track, method: Method, names: Sequence[str]) -> int:
    """Print the method's points and the stored rows, then both at equal bytes, and save the picture.

    Returns 0, or 1 if the method diverged so that it has no points.
    """
    tuned = [track.find_scheme(name, method) for name in names]
    scores = Scores(track, tuned)
    for one in tuned:
        if one.diverged:
            reasons = "; ".join(dict.fromkeys(_find_reasons(one)))
            print(f"diverged: {method.label}: {one.name}: {reasons}", file=sys.stderr)
    points = [(method.name, point) for point in scores.points]
    table = rows_table(points + _list_stored(scores, names), _read_rows(track, method))
    print(f"{plain_markdown(table)}\n\n{describe_rows(table, scores.confidence)}")
    for point in scores.points:
        if point.both and (others := scores.compare(point)):
            print("\n" + plain_markdown(comparison_table(others, point)))
            print("\n" + describe_comparison(others))
    if not points:
        return 1
    path = track.folder / method.folder / "comparison"
    save_figure(comparison_figure(scores, method.name), path)
    print(f"\nThe row is in {path.parent / ROW}, and the picture in {path}.png.")
    return 0


def print_stored(track: Track) -> None:
    """Print the stored rows, how many of them are made, and which other rows there are."""
    scores = Scores(track)
    table = stored_table(track, scores)
    if len(table):
        print(f"{plain_markdown(table)}\n\n{describe_rows(table, scores.confidence)}\n")
    made, planned = count_stored(track)
    print(f"{made} of {planned} planned rows are made.")
    if made < planned:
        groups = track.find_stored().values()
        missing = [one.name for group in groups for one in group if not one.is_complete]
        print(f"Missing: {', '.join(missing)}.")
        is_usual = track.path == PLAN
        plan = "params/compare_plan.yaml" if is_usual else track.path
        options = "" if is_usual else f" --plan {plan}"
        folder = f" --results {track.results}" if track.results else ""
        print(
            f"`tcs compare NAME{options}{folder}` makes the row of a method, with --densities also those at two further "
            f"densities, and `tcs queue {plan}{folder}` all."
        )
    if others := _describe_others(track):
        print(f"Beside them, there are rows of {'; '.join(others)}.")


def _describe_others(track: Track) -> list[str]:
    """Describe the rows that are not planned ones, such as those of methods from files."""
    rows = [read_row(path.parent) for path in sorted(track.folder.glob(f"*/{ROW}"))]
    described = []
    for row in rows:
        if row.get("method") in (None, *track.analysis.methods):
            continue
        points = row.get("points", {}).values()
        said = [
            f"{p['scheme']} {p['accuracy']:.2f} % with {format_number(p['up'])} MB up"
            for p in points
        ]
        file = f" ({row['file']})" if row.get("file") else ""
        described.append(f"{row['method']}{file}: {', '.join(said) or 'diverged'}")
    return described


def say_if_alone(track: Track, method: Method) -> None:
    """Say it if a method's row will be compared with nothing, as in another results folder."""
    others = [group for name, group in track.find_stored().items() if name != method.name]
    if not any(one.is_complete for group in others for one in group):
        print(
            f"{track.folder}: no other known method has been made there, so that {method.label} is compared with "
            "none; `tcs compare NAME`, with the same options, makes one",
            file=sys.stderr,
            flush=True,
        )


def stored_table(track: Track, scores: Scores) -> pd.DataFrame:
    """Return the stored rows that are made, as a person reads them; empty if there are none."""
    return rows_table(_list_stored(scores, ()), _read_rows(track, None))


def count_stored(track: Track) -> tuple[int, int]:
    """Return how many stored rows are made, and how many are planned."""
    schemes = [one for group in track.find_stored().values() for one in group]
    return sum(one.is_complete for one in schemes), len(schemes)


def _list_stored(scores: Scores, without: Sequence[str]) -> list[tuple[str, Point]]:
    pairs = [(name, p) for name, points in scores.stored.items() for p in points]
    return [(name, point) for name, point in pairs if point.scheme not in without]


def _read_rows(track: Track, method: Method | None) -> dict[str, dict[str, Any]]:
    """Read the rows of all methods, by name."""
    names = [*track.analysis.methods, *([method.name] if method else [])]
    folders = {name: Method(name, (name,)).folder for name in names}
    return {name: read_row(track.folder / folder) for name, folder in folders.items()}


def _find_reasons(tuned: TunedScheme) -> list[str]:
    """Say why runs of a scheme diverged."""
    records = list(tuned.scored.values())
    if tuned.chosen is None:  # every rate diverged
        search = tuned.search
        configs = [search.config(factor, search.tuning.seed) for factor in tuned.tried]
        records = [read_record(record_path(config, tuned.results)) for config in configs]
    lost = [record for record in records if record["status"] != "finished"]
    return [f"eta {r['config']['learning_rate']:g}, seed {r['config']['seed']}: {shorten(r['reason'])}"
            for r in lost]  # fmt: skip
