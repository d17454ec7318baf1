"""A method's row: its runs are made, the row is written to a file, and it is printed."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcs_lab.compare.methods import Around, Method, method_of_file
from tcs_lab.compare.probe import probed
from tcs_lab.compare.scoring import Point, Scores
from tcs_lab.compare.table import NOTE, beside_table, comparison_figure, rows_table
from tcs_lab.compare.track import Track, next_runs, runs_left
from tcs_lab.runs.jobs import Tell
from tcs_lab.runs.records import Record
from tcs_lab.runs.runs import Run, run_all
from tcs_lab.support.errors import cut
from tcs_lab.support.files import write_json, write_whole
from tcs_lab.tables.figures import save_figure
from tcs_lab.tables.tables import plain_markdown
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.training import load_data

ROW = "row.json"


@dataclass(frozen=True)
class MethodRun(Run):
    """A run of a method: one from a file brings its file with it, also into a worker."""

    around: Around | None = None

    @property
    def can_travel(self) -> bool:
        return self.around is not None or super().can_travel

    def __reduce__(self) -> tuple[Any, ...]:
        return _bring, (self.config, self.minutes, self.around)

    def make(self, tell: Tell = None) -> Record:
        with self.around(self.config) if self.around else contextlib.nullcontext():
            return super().make(tell)


def _bring(config: RunConfig, minutes: float | None, around: Around | None) -> MethodRun:
    """The run in a worker, to which the method's file is known from now on."""
    if around is not None:
        method_of_file(around.path, around.name, around.source)
    return MethodRun(config, minutes, around)


def make_rows(track: Track, method: Method, names: Sequence[str], jobs: int) -> None:
    """Makes what is missing of a method's runs, and keeps its row. Runs that are made stay, whatever
    happens; the same call goes on."""
    tuned = [track.tuned(name, method) for name in names]
    around = None
    if method.file is not None:
        around = Around(method.file, method.name, method.source)
    while configs := next_runs(tuned):
        left = max(len(configs), runs_left(tuned))
        minutes = math.ceil(left / jobs) * track.analysis.minutes
        said = f"{method.said}: {len(configs)} runs now, {left} in all, about {minutes:.0f} minutes"
        print(said, file=sys.stderr, flush=True)
        run_all([MethodRun(c, around=around) for c in configs], tuned[0].results, jobs)
        tuned = [track.tuned(name, method) for name in names]
    _keep_row(track, method, names, around)


def _keep_row(track: Track, method: Method, names: Sequence[str], around: Around | None) -> None:
    """results/compare/<method>/: its row, and its file. What is kept of the same file stays; points
    that are there already, of the same runs, leave the row as it is."""
    folder, kept = track.folder / method.folder, read_row(track.folder / method.folder)
    if kept.get("sha256") != method.sha256:
        kept = {}
    tuned = {name: track.tuned(name, method) for name in names}
    points = {p.scheme: _kept_point(p) for p in Scores(track, list(tuned.values())).points}
    diverged = {name: one.diverged for name, one in tuned.items() if one.diverged}
    before = kept.get("points", {})
    if kept and all(before.get(name) == point for name, point in points.items()) and not diverged:
        return
    row: dict[str, Any] = {
        "method": method.name, "file": method.file and method.file.name, "sha256": method.sha256,
        "tried": kept.get("tried", {}) | {name: _tried(one) for name, one in tuned.items()},
        "diverged": diverged, "points": before | points,
    }  # fmt: skip
    usual = tuned[names[0]].search
    chosen = usual.config(usual.chosen or 1.0, track.seeds[0])
    if points and not chosen.scheme.centralized:
        beside = track.tuned("TCS").search.config(1.0, track.seeds[0])
        with around(chosen) if around else contextlib.nullcontext():
            row |= asdict(probed(chosen, beside, load_data(chosen)))
    if method.file is not None:
        write_whole(folder / "method.py", lambda file: file.write(method.source))
    write_json(folder / ROW, row)


def _kept_point(point: Point) -> dict[str, Any]:
    """A point without its interval, which is that of all rows together."""
    return {
        key: value for key, value in json.loads(json.dumps(asdict(point))).items() if key != "half"
    }


def _tried(tuned: Any) -> dict[str, float | None]:
    """Validation accuracy in percent by factor; None where the run diverged."""
    tried = tuned.search.tried().items()
    return {f"{factor:g}": 100 * a if a is not None and a >= 0 else None for factor, a in tried}


def read_row(folder: Path) -> dict[str, Any]:
    """What is kept of a method; {} if nothing is, or nothing that can be read."""
    try:
        read = json.loads((folder / ROW).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


# Words ────────────────────────────────────────────────────────────────────────────────────────────


def print_row(track: Track, method: Method, names: Sequence[str]) -> int:
    """The method's points first, then the stored rows, then both at equal bytes; the picture's file.
    1 if none of its points could be made, since it diverged."""
    tuned = [track.tuned(name, method) for name in names]
    scores = Scores(track, tuned)
    for one in tuned:
        if one.diverged:
            reasons = "; ".join(dict.fromkeys(_reasons(one)))
            print(f"diverged: {method.said}: {one.name}: {reasons}", file=sys.stderr)
    own = [(method.name, point) for point in scores.points]
    print(plain_markdown(rows_table(own + _stored(scores, names), _rows(track, method))))
    print("\n" + NOTE.format(scores.confidence))
    for point in scores.points:
        beside = scores.beside(point, _stored_name(scores, point)) if point.both > 0 else []
        if beside:
            print("\n" + plain_markdown(beside_table(beside, point)))
    if not own:
        return 1
    path = track.folder / method.folder / "comparison"
    save_figure(comparison_figure(scores, method.name), path)
    print(f"\nThe row: {path.parent / ROW}. The picture: {path}.png")
    return 0


def print_stored(track: Track) -> None:
    """The stored rows, and how many runs are behind them."""
    scores = Scores(track)
    stored = track.stored()
    whole = sum(one.is_complete for group in stored.values() for one in group)
    planned = sum(len(group) for group in stored.values())
    if found := _stored(scores, ()):
        print(plain_markdown(rows_table(found, _rows(track, None))) + "\n")
        print(NOTE.format(scores.confidence) + "\n")
    print(f"{whole} of {planned} stored rows are made: {', '.join(stored)}")


def _stored(scores: Scores, without: Sequence[str]) -> list[tuple[str, Point]]:
    pairs = [(name, p) for name, points in scores.stored.items() for p in points]
    return [(name, point) for name, point in pairs if point.scheme not in without]


def _stored_name(scores: Scores, point: Point) -> str:
    """The stored method that a point belongs to; "" for a point of a method of one's own."""
    found = (
        name for name, points in scores.stored.items() if point.scheme in [p.scheme for p in points]
    )
    return next(found, "")


def _rows(track: Track, method: Method | None) -> dict[str, dict[str, Any]]:
    """What is kept of each method, by name."""
    names = [*track.analysis.methods, *([method.name] if method else [])]
    folders = {name: Method(name, (name,)).folder for name in names}
    return {name: read_row(track.folder / folder) for name, folder in folders.items()}


def _reasons(tuned: Any) -> list[str]:
    """Why runs of a scheme diverged."""
    from tcs_lab.runs.records import read_record, record_path

    seeds = [(f, tuned.search.tuning.seed) for f in tuned.tried]
    configs = [tuned.search.config(*one) for one in seeds]
    if tuned.chosen is not None:
        configs = [tuned.search.config(tuned.chosen, seed) for seed in tuned.seeds]
    records = [read_record(record_path(config, tuned.results)) for config in configs]
    lost = [record for record in records if record["status"] != "finished"]
    return [f"eta {r['config']['learning_rate']:g}, seed {r['config']['seed']}: {cut(r['reason'])}"
            for r in lost]  # fmt: skip
