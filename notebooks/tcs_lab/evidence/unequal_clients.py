"""Unequal clients beside equal ones, in tables that a person reads.

They say what sparsification costs, and whether masks still coincide. The questions stand in
params/claims.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from tcs_lab.evidence.claims import Claims
from tcs_lab.evidence.judging import format_difference
from tcs_lab.evidence.measures import measure_coincidence
from tcs_lab.evidence.planned_model import compare_unequal_clients, scheme_of
from tcs_lab.tables.tables import Record, format_interval, mean_interval, participants

TCS = ("TCS", 0.5)  # at the rate of its runs with equal and with unequal clients


def unequal_costs(
    read: Claims, records: Mapping[str, Record], there: Mapping[str, Mapping[str, Record]]
) -> pd.DataFrame:
    """Make a row for each setting and pair of schemes that has runs: their difference in points there,
    with equal clients, and the one minus the other. See `compare_unequal_clients` for the arguments
    and the intervals."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for row in compare_unequal_clients(read, records, there).to_dict("records"):
        key = row["setting"], f"{row['first']} − {row['second']}"
        if not pd.isna(row["measured"]):
            rows.setdefault(key, {})[row["where"]] = format_difference(row)
    named = ("clients", "difference, points")
    made = [dict(zip(named, key, strict=True)) | cells for key, cells in rows.items()]
    return pd.DataFrame([row for row in made if "there" in row]).fillna("–")


def unequal_by_seed(read: Claims, found: Mapping[str, Record], last: int = 10) -> pd.DataFrame:
    """Make a row for each pair of schemes that has runs in one setting: their difference in points, seed
    by seed, in the last epoch and in the mean of the `last` epochs. There are no intervals, since
    nothing is judged by it."""
    curves: dict[tuple[str, float], dict[int, list[float]]] = {}
    for record in found.values():
        config = record["config"]
        if record["status"] == "finished":
            points = [100 * row["accuracy"] for row in record["rows"]]
            curves.setdefault(scheme_of(record), {})[config["seed"]] = points
    rows = []
    for pair in read.unequal.pairs if read.unequal else ():
        first, second = (curves.get(scheme, {}) for scheme in pair)
        seeds = sorted(first.keys() & second.keys())
        row = {"difference, points, by seed": " − ".join(name for name, _ in pair)}
        for title, count in (("last epoch", 1), (f"mean of the last {last}", last)):
            gaps = [fmean(first[seed][-count:]) - fmean(second[seed][-count:]) for seed in seeds]
            row[title] = ", ".join(f"{gap:+.2f}".replace("-", "−") for gap in gaps)
        rows += [row] if seeds else []
    return pd.DataFrame(rows)


def unequal_masks(
    records: Mapping[str, Record], there: Mapping[str, Mapping[str, Record]]
) -> pd.DataFrame:
    """Make a row for each setting that has runs of TCS: how much of its shared mask stays from one round
    to the next, and how many of the participating clients send at a position, there and with equal
    clients of the same seeds."""
    rows = []
    for setting, of_setting in there.items():
        unequal = _of_tcs(of_setting)
        equal = {seed: one for seed, one in _of_tcs(records).items() if seed in unequal}
        row = {"clients": setting, "n": f"{len(unequal)}"}
        for key, title, form in (("stay", "the mask stays", "{:.3f}"),
                                 ("clients", "clients per entry", "{:.2f}")):  # fmt: skip
            for where, runs in (("there", unequal), ("equal", equal)):
                row[f"{title}, {where}"] = _mean(key, runs.values(), form)
                if key == "clients" and runs:
                    row[f"{title}, {where}"] += f" of {participants(next(iter(runs.values())))}"
        rows += [row] if unequal else []
    return pd.DataFrame(rows)


def _of_tcs(records: Mapping[str, Record]) -> dict[int, Record]:
    """Return the finished runs of TCS, by seed."""
    return {
        record["config"]["seed"]: record
        for record in records.values()
        if scheme_of(record) == TCS and record["status"] == "finished"
    }


def _mean(key: str, runs: Any, form: str) -> str:
    return format_interval(*mean_interval(measure_coincidence(run)[key] for run in runs), form)
