"""The planned model: accuracy by scheme and seed, over all judged runs at once.

The differences of schemes that it estimates are the same on every page, with the same intervals.
`tables.analysis` has the statistics, and params/claims.yaml says why they are these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_lab.evidence.claims import Claims, SchemeAtRate, load_planned_records
from tcs_lab.evidence.measures import MEASURES
from tcs_lab.runs.plans import JUDGED
from tcs_lab.runs.records import check_same_data
from tcs_lab.tables.analysis import Comparison, Estimate, images_variance, minus
from tcs_lab.tables.tables import Record
from tcs_lab.tables.verdicts import NOT_MEASURED
from tcs_lab.training.configuration import record_file_name
from tcs_lab.training.training import read_outcomes

BASELINE = ("Baseline", 0.1)  # centralized training, at its rate


def estimate_difference(
    read: Claims, records: Mapping[str, Record], first: SchemeAtRate, second: SchemeAtRate
) -> dict[str, Any]:
    """Estimate the difference of two schemes by the planned model: `measured`, `low`, `high`, `n` and
    so on as in `judging.judge_claims`, and `reason` where there is no estimate."""
    runs = RunsByScheme(records)
    return _difference_row(runs, fit_model(runs), first, second, read.confidence)


def leave_out_gpu_seeds(
    records: Mapping[str, Record], schemes: Iterable[SchemeAtRate]
) -> dict[str, Record]:
    """Return the records without those seeds with which one of these schemes was trained on a GPU, so
    that no difference is between runs on different devices."""
    asked = set(schemes)
    on_gpu = {
        record["config"]["seed"]
        for record in records.values()
        if scheme_of(record) in asked and record["provenance"]["device"].startswith("NVIDIA")
    }
    return {f: record for f, record in records.items() if record["config"]["seed"] not in on_gpu}


def decompose(read: Claims, records: Mapping[str, Record]) -> pd.DataFrame:
    """Decompose the difference between a sparse scheme and centralized training into steps.

    For every chain of schemes in the file there is a row for the difference of its two ends (`part`
    0), and one for each pair of neighbours, the last pair first. By the same model the parts add up
    to the whole.
    """
    runs = RunsByScheme(records)
    model = fit_model(runs)
    rows = []
    for number, chain in enumerate(read.decomposition):
        steps = [*itertools.pairwise(chain)][::-1]
        for part, (one, other) in enumerate([(chain[0], chain[-1]), *steps]):
            row = {"chain": number, "part": part, "first": one[0], "second": other[0]}
            rows.append(row | _difference_row(runs, model, one, other, read.confidence))
    return pd.DataFrame(rows)


def estimate_gaps(
    profile: str, records: Iterable[Record], results: str | Path | None = None
) -> dict[str, dict[str, float]] | None:
    """Estimate the differences of a table's schemes to the Baseline by the planned model, as
    `tables.summary` takes them: accuracies 0..1. The model has all planned records in the folder `results`.

    None if the profile is not the judged one (`plans.JUDGED`), or if a record is none of the model's
    (of other settings): then there is only Student's interval over the table's own seeds.
    """
    records = list(records)
    if not records or profile != JUDGED:
        return None
    read, judged_records = load_planned_records(profile, results)
    if not {record_file_name(record) for record in records} <= judged_records.keys():
        return None
    if BASELINE not in (schemes := sorted({scheme_of(record) for record in records})):
        return {}  # a table without it has no differences to it
    runs = RunsByScheme(judged_records)
    model = fit_model(runs)
    gaps = {}
    for scheme in schemes:
        if scheme != BASELINE:
            row = _difference_row(runs, model, scheme, BASELINE, read.confidence)
            gaps[scheme[0]] = {
                "difference": ten_digits(row["measured"] / 100),
                "difference_low": ten_digits(row["low"] / 100),
                "difference_high": ten_digits(row["high"] / 100),
                "difference_n": row["n"],
            }
    return gaps


def ten_digits(number: float) -> float:
    """Return a number with ten significant digits. Further ones of what the model gives depend on the
    processor, and stored tables should not."""
    return float(f"{number:.10g}")


# The model ────────────────────────────────────────────────────────────────────────────────────────


class RunsByScheme:
    """Records by scheme with rate, and seed. If a run of a scheme diverged, none of it is judged."""

    def __init__(self, records: Mapping[str, Record]):
        self.records = records
        self.files: dict[SchemeAtRate, dict[int, str]] = {}
        for file, record in records.items():
            seed, of_scheme = record["config"]["seed"], self.files.setdefault(scheme_of(record), {})
            if seed in of_scheme:
                both = f"{of_scheme[seed]} and {file}"
                raise ValueError(
                    f"{both}: got two runs of one scheme with seed {seed}, allowed: one"
                )
            of_scheme[seed] = file
        self.diverged = {
            scheme: [file for file in files.values() if records[file]["status"] != "finished"]
            for scheme, files in self.files.items()
        }

    def seeds(self, schemes: Iterable[SchemeAtRate]) -> list[int]:
        """Return the seeds that all of the schemes have."""
        return sorted(set.intersection(*(set(self.files.get(one, {})) for one in schemes)))

    def record(self, scheme: SchemeAtRate, seed: int) -> Record:
        return self.records[self.files[scheme][seed]]

    def judged(self) -> Iterable[tuple[SchemeAtRate, int, Record]]:
        """Return all runs that are judged: scheme, seed, record."""
        for scheme, files in self.files.items():
            for seed in () if self.diverged[scheme] else files:
                yield scheme, seed, self.record(scheme, seed)

    def find_obstacle(self, schemes: Iterable[SchemeAtRate]) -> str:
        """Say why there is no number for these schemes; "" if there may be one."""
        schemes = list(schemes)
        if diverged := [file for one in schemes for file in self.diverged.get(one, [])]:
            return f"diverged: {', '.join(diverged)}"
        missing = [f"{name} at {eta:g}" for name, eta in schemes if (name, eta) not in self.files]
        if missing:
            return f"no records of {', '.join(missing)}"
        return "" if self.seeds(schemes) else "no seed in common"


def scheme_of(record: Record) -> SchemeAtRate:
    """Return a record's scheme with its learning rate."""
    return record["config"]["scheme"]["name"], record["config"]["learning_rate"]


def fit_model(runs: RunsByScheme) -> Comparison:
    """Return the model over the runs of one setting that are judged. A cell is a scheme with its
    rate."""
    accuracies, right = {}, {}
    for scheme, seed, record in runs.judged():
        accuracies[scheme, seed] = MEASURES["accuracy"][0](record)
        if (by_image := read_outcomes(record)) is not None:
            right[scheme, seed] = by_image
    return Comparison(accuracies, right)


def estimate_row(estimate: Estimate, bound: float = math.nan) -> dict[str, Any]:
    """Return an estimate as columns of a table."""
    return {
        "measured": estimate.value, "low": estimate.low, "high": estimate.high, "n": estimate.n,
        "half": estimate.half, "half_seeds": estimate.half_of(estimate.seeds),
        "half_images": estimate.half_of(estimate.images), "freedom": estimate.freedom,
        "bootstrap": estimate.bootstrap, "p": estimate.p(bound),
        "kept": None, "verdict": NOT_MEASURED, "reason": "",
    }  # fmt: skip


def _difference_row(
    runs: RunsByScheme, model: Comparison, first: SchemeAtRate, second: SchemeAtRate,
    confidence: float,
) -> dict[str, Any]:  # fmt: skip
    estimate, reason = _estimate(runs, model, first, second, confidence)
    return estimate_row(estimate) | {"reason": reason}


def _estimate(
    runs: RunsByScheme, model: Comparison, first: SchemeAtRate, second: SchemeAtRate,
    confidence: float,
) -> tuple[Estimate, str]:  # fmt: skip
    """Return the estimate of the first scheme minus the second one, and the reason why there is
    none ("" if there is one)."""
    for schemes in ([first], [second], [first, second]):
        if reason := runs.find_obstacle(schemes):
            return Estimate(), reason
    return model.estimate({first: 1.0, second: -1.0}, confidence), ""


# Unequal clients ──────────────────────────────────────────────────────────────────────────────────


def compare_unequal_clients(
    read: Claims, records: Mapping[str, Record], there: Mapping[str, Mapping[str, Record]]
) -> pd.DataFrame:
    """Set differences of unequal clients (`there`: by setting, as `load_unequal_records` gives them)
    beside those of equal clients, in three rows for each pair of schemes and setting: `where` is
    "there", "equal" or "there − equal".

    There, each pair of schemes has an interval of its own: Student's, over the differences seed by
    seed, with the images drawn as well. A deviation that is pooled with other runs would be wrong.
    With both kinds of inequality, a round's clients pull the model towards their own classes, so
    that accuracies scatter by some three points instead of some 0.2. Schemes with the same number
    of rounds draw the same clients and move together: TCS minus FedAvg varies by a few tenths of a
    point from seed to seed. Schemes with different numbers of rounds do not: TCS-L4-Q5 minus FedAvg
    varies by more than five points. Only the pair itself tells how much its difference varies. The
    price is that three seeds leave two degrees of freedom.

    With equal clients the difference is the planned model's over all `records`, so that it is the
    same on every page. The two have no run in common, and their variances add up (`minus`).
    """
    together = [
        *records.values(),
        *itertools.chain.from_iterable(found.values() for found in there.values()),
    ]
    check_same_data(together, "records of equal and of unequal clients")
    equal = RunsByScheme(records)
    planned, rows = fit_model(equal), []
    for setting, found in there.items():
        for first, second in read.unequal.pairs if read.unequal else ():
            of_pair = {f: r for f, r in found.items() if scheme_of(r) in (first, second)}
            unequal = RunsByScheme(of_pair)
            gaps = _unequal_gaps((first, second), unequal, equal, planned, read.confidence)
            for where, (estimate, reason) in gaps.items():
                row = {"setting": setting, "first": first[0], "second": second[0], "where": where}
                rows.append(row | estimate_row(estimate) | {"reason": reason})
    return pd.DataFrame(rows)


def _unequal_gaps(
    pair: tuple[SchemeAtRate, SchemeAtRate], unequal: RunsByScheme, equal: RunsByScheme,
    planned: Comparison, confidence: float,
) -> dict[str, tuple[Estimate, str]]:  # fmt: skip
    """Return the three rows of one pair and setting: each an estimate, or the reason why there is
    none."""
    own = fit_model(unequal)
    one, why = _estimate(unequal, own, *pair, confidence)
    other, why_other = _estimate(equal, planned, *pair, confidence)
    gap, why_gap = Estimate(), why or why_other
    seeds = [seed for seed in unequal.seeds(pair) if seed in equal.seeds(pair)]
    if not why_gap and not seeds:
        why_gap = "no seed in common with equal clients"
    if not why_gap:
        signs = {pair[0]: 1.0, pair[1]: -1.0}
        ours_SI, theirs_SI = own.gaps(signs, seeds), planned.gaps(signs, seeds)
        images = math.nan
        if ours_SI is not None and theirs_SI is not None:
            images = images_variance(ours_SI - theirs_SI)
        gap = minus(one, other, images)
    return {"there": (one, why), "equal": (other, why_other), "there − equal": (gap, why_gap)}
