"""The paper's claims, judged from records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tcs_core import Scheme, _shown
from tcs_lab.records import read_record, record_path
from tcs_lab.settings import RunConfig, read_params
from tcs_lab.tables import bits_per_parameter

# The paper's claims, judged ──────────────────────────────────────────────────────────────────────


def recorded(
    configs: Iterable[RunConfig], results: str | Path | None = None, diverged: bool = False
) -> dict[str, dict[str, Any]]:
    """The records of these runs that are there and finished, by file name; no run is made.

    With `diverged`, also of those that did not get to their end.
    """
    paths = {record_path(config, results): config for config in configs}
    found = {p.name: read_record(p, config) for p, config in paths.items() if p.is_file()}
    return {n: record for n, record in found.items() if diverged or record["status"] == "finished"}


BOUNDS = {"at_least": "≥", "at_most": "≤", "more_than": ">", "less_than": "<"}
_CLAIM_KEYS = {"says", "where", "measure", "first", "second", "paper", "paper_interval"}


def _bits_of(key: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: bits_per_parameter(record)[key]


def _overlap(record: dict[str, Any]) -> float:
    """Mean over the sparse epochs of the share of the shared mask that was in it a round before."""
    rows = [row for row in record["rows"] if not row["dense_rounds"]]
    shares = [row["mask_overlap"] for row in rows if row.get("mask_overlap") is not None]
    return float(np.mean(shares)) if shares else math.nan


# What a claim can be about: a number of one record.
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "accuracy": lambda record: 100 * record["rows"][-1]["accuracy"],
    "overlap": _overlap,
    "uplink": _bits_of("uplink"),
    "uplink_whole": _bits_of("uplink with warm-up"),
    "downlink": _bits_of("downlink"),
}


_TWO_NUMBERS = [[one, other] for one in (int, float) for other in (int, float)]


def read_claims(path: str | Path) -> tuple[float, dict[str, dict[str, Any]]]:
    """The confidence and the claims, by name, of a file like params/claims.yaml.

    Raises ValueError naming the claim and what is allowed.
    """
    read = read_params([path])
    confidence, claims = read.get("confidence"), read.get("claims")
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise ValueError(f"{path}: confidence: got {_shown(confidence)}, allowed: between 0 and 1")
    if not isinstance(claims, dict) or not claims:
        raise ValueError(f"{path}: claims: allowed: a mapping from names to claims")
    for name, claim in claims.items():
        if problem := _claim_problem(claim):
            raise ValueError(f"{path}: {_shown(name)}: {problem}")
    return confidence, claims


def _claim_problem(claim: Any) -> str | None:
    if not isinstance(claim, dict) or not {"says", "measure", "first"} <= claim.keys():
        return "allowed: a mapping with says, measure and first"
    if unknown := claim.keys() - _CLAIM_KEYS - BOUNDS.keys():
        return f"{_shown(min(unknown, key=str))} is unknown"
    if claim["measure"] not in MEASURES:
        return f"measure: got {_shown(claim['measure'])}, allowed: {', '.join(MEASURES)}"
    bounds = [claim[b] for b in BOUNDS if b in claim]
    if len(bounds) != 1 or type(bounds[0]) not in (int, float) or not math.isfinite(bounds[0]):
        return f"allowed: one number as {', '.join(BOUNDS)}"
    interval = claim.get("paper_interval", [0, 0])
    numbers = isinstance(interval, list) and [type(v) for v in interval] in _TWO_NUMBERS
    if not numbers or not interval[0] <= interval[1]:
        return f"paper_interval: got {_shown(interval)}, allowed: two numbers, rising"
    if claim["measure"] == "accuracy" and "second" not in claim:
        return "second: an accuracy is claimed against another scheme's"
    for run in (claim[key] for key in ("first", "second") if key in claim):
        if not isinstance(run, list) or len(run) != 2 or type(run[1]) not in (int, float):
            return f"got {_shown(run)}, allowed: [scheme, learning rate]"
        Scheme.named(str(run[0]))
    return None


def student_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| < t) = confidence, T being Student's with `freedom` degrees of freedom.

    T = sqrt(freedom) tan(a) turns its density into cos(a)^(freedom - 1).
    """
    angles = np.linspace(0, math.pi / 2, 200_001)
    heights = np.cos(angles) ** (freedom - 1)
    inside = np.concatenate([[0], np.cumsum(heights[1:] + heights[:-1])])
    angle = np.interp(confidence, inside / inside[-1], angles)
    return math.sqrt(freedom) * math.tan(angle)


def mean_interval(values: Iterable[float], confidence: float) -> tuple[float, float, float]:
    """Mean of the values and Student's interval for it; of one value, no interval (infinite)."""
    values = np.asarray(list(values), dtype=float)
    if len(values) < 2:
        return float(values.mean()), -math.inf, math.inf
    error = values.std(ddof=1) / math.sqrt(len(values))
    half = student_quantile(confidence, len(values) - 1) * error
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def verdict(low: float, high: float, bound: str, value: float) -> str:
    """What an interval says of a bound: "holds", "does not hold" or "not decided"."""
    keeps = {
        "at_least": (low >= value, high < value),
        "at_most": (high <= value, low > value),
        "more_than": (low > value, high <= value),
        "less_than": (high < value, low >= value),
    }
    always, never = keeps[bound]
    return "holds" if always else "does not hold" if never else "not decided"


def judged(
    claims: dict[str, dict[str, Any]], records: dict[str, dict[str, Any]], confidence: float
) -> pd.DataFrame:
    """One row a claim: the paper's number, ours with its interval over n seeds, the verdict.

    `records` maps file names to records, all of one profile and all finished; those of a claim's
    two schemes are paired by seed. Columns first_records and second_records name the files.
    """
    runs: dict[tuple[str, float], dict[int, str]] = {}
    for file, record in records.items():
        config = record["config"]
        key = (config["scheme"]["name"], config["learning_rate"])
        runs.setdefault(key, {})[config["seed"]] = file
    return pd.DataFrame([_judgement(n, c, runs, records, confidence) for n, c in claims.items()])


def _judgement(
    name: str, claim: dict[str, Any], runs: dict[tuple[str, float], dict[int, str]],
    records: dict[str, dict[str, Any]], confidence: float,
) -> dict[str, Any]:  # fmt: skip
    sides = [runs.get(tuple(claim[key]), {}) for key in ("first", "second") if key in claim]
    measure = MEASURES[claim["measure"]]
    files, values = [], []
    for seed in sorted(set.intersection(*(set(side) for side in sides))):
        pair = [side[seed] for side in sides]
        value = _compared(claim["measure"], [measure(records[file]) for file in pair])
        if not math.isnan(value):
            files.append(pair)
            values.append(value)
    mean, low, high = mean_interval(values, confidence) if values else (math.nan,) * 3
    if len(values) == 1 and claim["measure"] not in ("accuracy", "overlap"):
        low = high = mean  # counted, not drawn by chance
    bound = next(b for b in BOUNDS if b in claim)
    named = [" ".join(pair[i] for pair in files) if i < len(sides) else "" for i in (0, 1)]
    return {
        "claim": name,
        "says": claim["says"],
        "where": claim.get("where", ""),
        "measure": claim["measure"],
        "first": claim["first"][0],
        "second": claim["second"][0] if "second" in claim else "",
        "eta": claim["first"][1],
        "bound": bound,
        "bound_value": claim[bound],
        "paper": claim.get("paper"),
        "paper_low": claim.get("paper_interval", [math.nan])[0],
        "paper_high": claim.get("paper_interval", [math.nan])[-1],
        "measured": mean,
        "low": low,
        "high": high,
        "n": len(values),
        "verdict": verdict(low, high, bound, claim[bound]) if values else "not measured",
        "first_records": named[0],
        "second_records": named[1],
    }


def _compared(measure: str, values: list[float]) -> float:
    """Points between two accuracies; how many times fewer bits than the second, or than dense."""
    if measure == "overlap":
        return values[0]
    if measure == "accuracy":
        return values[0] - values[1]
    return (values[1] if len(values) > 1 else 32) / values[0]


def readable_claims(table: pd.DataFrame) -> pd.DataFrame:
    """The judged claims as a person reads them."""

    forms = {"accuracy": "{:+.2f}", "overlap": "{:.2f}"}

    def number(row: Any, value: float | None) -> str:
        if value is None or math.isnan(value):
            return "–"
        return forms.get(row.measure, "×{:,.4g}").format(value).replace("-", "−")

    def with_interval(row: Any, *values: float | None) -> str:
        mean, low, high = (number(row, v) for v in values)
        return f"{mean} ({low} to {high})" if math.isfinite(values[1]) and low != high else mean

    rows = [
        {
            "The paper says": row.says,
            "Where": row.where,
            "Holds if": f"{BOUNDS[row.bound]} {row.bound_value:g}".replace("-", "−"),
            "Paper (interval)": with_interval(row, row.paper, row.paper_low, row.paper_high),
            "Ours (interval)": with_interval(row, row.measured, row.low, row.high),
            "n": str(row.n),
            "Verdict": row.verdict,
        }
        for row in table.itertuples()
    ]
    return pd.DataFrame(rows)
