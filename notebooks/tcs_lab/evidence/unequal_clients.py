"""Unequal clients beside equal ones, as tables that a person reads: what sparsification costs, and
whether masks still coincide. The questions stand in params/claims.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from tcs_lab.evidence.claims import Claims, difference_said, unequal
from tcs_lab.evidence.coincidence import coinciding
from tcs_lab.tables.tables import Record, mean_interval, participants, with_interval


def unequal_costs(
    read: Claims, records: Mapping[str, Record], there: Mapping[str, Mapping[str, Record]]
) -> pd.DataFrame:
    """One row for each setting and pair of schemes that has runs: their difference in points there,
    with equal clients, and the one minus the other. Arguments and intervals as in `unequal`."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for row in unequal(read, records, there).to_dict("records"):
        key = row["setting"], f"{row['first']} − {row['second']}"
        if not pd.isna(row["measured"]):
            rows.setdefault(key, {})[row["where"]] = difference_said(row)
    named = ("clients", "difference, points")
    made = [dict(zip(named, key, strict=True)) | cells for key, cells in rows.items()]
    return pd.DataFrame([row for row in made if "there" in row]).fillna("–")


def unequal_by_seed(read: Claims, found: Mapping[str, Record], last: int = 10) -> pd.DataFrame:
    """A row a pair of schemes that has runs in one setting: their difference in points, seed by
    seed, in the last epoch and in the mean of the `last` ones. No interval: nothing is judged."""
    curves: dict[tuple[str, float], dict[int, list[float]]] = {}
    for record in found.values():
        config = record["config"]
        if record["status"] == "finished":
            side = config["scheme"]["name"], config["learning_rate"]
            points = [100 * row["accuracy"] for row in record["rows"]]
            curves.setdefault(side, {})[config["seed"]] = points
    rows = []
    for pair in read.unequal.pairs if read.unequal else ():
        first, second = (curves.get(side, {}) for side in pair)
        seeds = sorted(first.keys() & second.keys())
        row = {"difference, points, by seed": " − ".join(name for name, _ in pair)}
        for title, count in (("last epoch", 1), (f"mean of the last {last}", last)):
            gaps = [fmean(first[seed][-count:]) - fmean(second[seed][-count:]) for seed in seeds]
            row[title] = ", ".join(f"{gap:+.2f}".replace("-", "−") for gap in gaps)
        rows += [row] if seeds else []
    return pd.DataFrame(rows)


def unequal_masks(
    records: Mapping[str, Record], there: Mapping[str, Mapping[str, Record]], eta: float = 0.5
) -> pd.DataFrame:
    """A row a setting that has runs of TCS: how much of its shared mask stays for a round, and how
    many clients send at a place, of those that take part; there, and with equal clients of the same
    seeds."""
    rows = []
    for setting, found in there.items():
        own = _of_tcs(found, eta)
        equal = {seed: one for seed, one in _of_tcs(records, eta).items() if seed in own}
        row = {"clients": setting, "n": f"{len(own)}"}
        for key, title, form in (("stay", "the mask stays", "{:.3f}"),
                                 ("clients", "clients per entry", "{:.2f}")):  # fmt: skip
            for where, runs in (("there", own), ("equal", equal)):
                row[f"{title}, {where}"] = _mean(key, runs.values(), form)
                if key == "clients" and runs:
                    row[f"{title}, {where}"] += f" of {participants(next(iter(runs.values())))}"
        rows += [row] if own else []
    return pd.DataFrame(rows)


def _of_tcs(records: Mapping[str, Record], eta: float) -> dict[int, Record]:
    """Finished runs of TCS, by seed."""
    return {
        record["config"]["seed"]: record
        for record in records.values()
        if record["config"]["scheme"]["name"] == "TCS"
        and record["config"]["learning_rate"] == eta
        and record["status"] == "finished"
    }


def _mean(key: str, runs: Any, form: str) -> str:
    return with_interval(*mean_interval(coinciding(run)[key] for run in runs), form)
