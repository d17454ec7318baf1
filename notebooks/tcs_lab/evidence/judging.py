"""Verdicts: what records say about each claim, and how a person reads it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import pandas as pd

from tcs_lab.evidence.claims import BOUNDS, Claim, Claims
from tcs_lab.evidence.measures import COUNTED, MEASURES, compare_measures
from tcs_lab.evidence.planned_model import RunsByScheme, estimate_row, fit_model, ten_digits
from tcs_lab.tables.analysis import Comparison, Estimate, holm
from tcs_lab.tables.tables import Record, format_interval, mean_interval
from tcs_lab.tables.verdicts import CONTRADICTED, NOT_MEASURED, OPEN, SUPPORTED

KEEPS = dict(zip(BOUNDS, (operator.ge, operator.le, operator.gt, operator.lt), strict=True))
SIGNS = dict(zip(BOUNDS, "≥≤><", strict=True))
BY_CONSTRUCTION = "by construction"
VERDICTS = (SUPPORTED, CONTRADICTED, OPEN, BY_CONSTRUCTION, NOT_MEASURED)


def judge_interval(low: float, high: float, bound: str, value: float) -> str:
    """Say what an interval means for a bound: "supported", "contradicted" or "open"."""
    keeps = [KEEPS[bound](end, value) for end in (low, high)]
    return SUPPORTED if all(keeps) else OPEN if any(keeps) else CONTRADICTED


def judge_claims(read: Claims, records: Mapping[str, Record]) -> pd.DataFrame:
    """Judge every claim: one row has the paper's number and verdict, ours with interval and verdict.

    `records` maps file names to records, all of one profile. `half` is half the interval's width,
    half_seeds and half_images its two parts (they add up by their squares), `bootstrap` that of the
    bootstrap beside it; p is two-sided, of the difference from the bound, `holm` the same corrected
    for the main claims. `kept` says of a claim by construction whether it keeps its bound. Where
    there is no verdict, `reason` says why. first_records and second_records name the files. Numbers
    have ten significant digits: further ones depend on the processor.
    """
    runs = RunsByScheme(records)
    model = fit_model(runs)
    rows = []
    for name, claim in read.claims.items():
        row = {"claim": name} | _claim_row(claim)
        if why := runs.find_obstacle(claim.schemes):
            ours = estimate_row(Estimate()) | {"verdict": NOT_MEASURED, "reason": why}
        elif claim.measure == "accuracy":
            ours = _judge_by_model(claim, model, read.confidence)
        else:
            ours = _judge_by_seeds(claim, runs, read.confidence)
        rows.append(row | ours | _name_files(claim, runs, ours["n"]))
    table = pd.DataFrame(rows)
    main = table[table["main"]].set_index("claim")["p"].to_dict()
    table["holm"] = table["claim"].map(holm(main)).astype(float)
    numbers = table.select_dtypes("float")
    return table.assign(**numbers.map(ten_digits))


def _claim_row(claim: Claim) -> dict[str, Any]:
    """Return what the file says of a claim, as columns."""
    second, (bound, value) = claim.second or ("", math.nan), claim.bounds[0]
    low, high = claim.paper_interval or (math.nan, math.nan)
    theirs = ""
    if claim.paper_interval:
        theirs = judge_interval(low, high, bound, value)
    elif claim.paper is not None and claim.measure in COUNTED:
        theirs = BY_CONSTRUCTION
    return {
        "says": claim.says, "where": claim.where, "measure": claim.measure, "main": claim.main,
        "first": claim.first[0], "second": second[0], "eta": claim.first[1],
        "second_eta": second[1], "bound": bound, "bound_value": value,
        "paper": math.nan if claim.paper is None else claim.paper,
        "paper_low": low, "paper_high": high, "paper_verdict": theirs, "planned": claim.n,
    }  # fmt: skip


def _judge_by_model(claim: Claim, model: Comparison, confidence: float) -> dict[str, Any]:
    """Return what the model over all runs says of a claim on accuracy."""
    signs = {claim.first: 1, claim.second: -1}
    bound, value = claim.bounds[0]
    row = estimate_row(model.estimate(signs, confidence), value)
    if math.isnan(row["half"]):
        return row | {"reason": f"too few runs for an interval (n = {row['n']})"}
    return row | {"verdict": judge_interval(row["low"], row["high"], bound, value)}


def _judge_by_seeds(claim: Claim, runs: RunsByScheme, confidence: float) -> dict[str, Any]:
    """Return what the records say, seed by seed, of a claim on anything else."""
    by_seed = [
        compare_measures(claim.measure, [runs.record(scheme, seed) for scheme in claim.schemes])
        for seed in runs.seeds(claim.schemes)
    ]
    values = [value for value in by_seed if not math.isnan(value)]
    mean, low, high = mean_interval(values, confidence)
    row = estimate_row(Estimate()) | {"measured": mean, "n": len(values)}
    bound, value = claim.bounds[0]
    if not values:
        return row | {"reason": "its records do not say"}
    if claim.measure in COUNTED:
        return row | {"verdict": BY_CONSTRUCTION, "kept": KEEPS[bound](mean, value)}
    if len(values) < 2:
        return row | {"reason": "too few runs for an interval (n = 1)"}
    half = (high - low) / 2
    row |= {"low": low, "high": high, "half": half, "half_seeds": half, "freedom": len(values) - 1}
    return row | {"verdict": judge_interval(low, high, bound, value)}


def _name_files(claim: Claim, runs: RunsByScheme, n: int) -> dict[str, str]:
    """Return the record files behind a claim, in the order of their seeds."""
    seeds = runs.seeds(claim.schemes) if n else []
    files = [" ".join(runs.files[scheme][seed] for seed in seeds) for scheme in claim.schemes]
    return dict(zip(("first_records", "second_records"), [*files, ""], strict=False))


# As a person reads it ─────────────────────────────────────────────────────────────────────────────

CLAIM_UNITS = (
    "Numbers for accuracies are differences in percentage points, with 95 % intervals. A factor such as "
    "×88 says how many times fewer bits are sent. Numbers for important entries are on a scale on which "
    "0 is chance and 1 is a mask that never changes."
)


def readable_claims(table: pd.DataFrame) -> pd.DataFrame:
    """Return the claims that we have measured, as a person reads them, verdicts in bold;
    `list_unmeasured` has the rest."""
    rows = [
        {"Claim": row["says"], "Where": row["where"], "Supported if": format_bound(row),
         "Paper (interval)": format_estimate(row, "paper", "paper_low", "paper_high"),
         "Paper's verdict": f"**{row['paper_verdict']}**" if row["paper_verdict"] else "–",
         "Ours (interval)": format_estimate(row),
         "n": str(row["n"]) if row["measure"] in COUNTED else f"{row['n']} of {row['planned']}",
         "Verdict": f"**{format_verdict(row)}**"}
        for row in table[table["measured"].notna()].to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def list_unmeasured(table: pd.DataFrame) -> str:
    """Return one line that lists the claims that we have not measured, and why where it is not for
    lack of records alone; "" if there are none."""
    rows = table[table["measured"].isna()]
    if len(rows) == len(table) and rows["reason"].str.startswith("no records").all():
        return f"Not measured: none of {len(table)} claims has its records yet."
    each = [
        row.says if row.reason.startswith("no records") else f"{row.says} ({row.reason})"
        for row in rows.itertuples()
    ]
    return f"Not measured: {'; '.join(each)}." if each else ""


def format_bound(row: Mapping[str, Any]) -> str:
    """Return the bound as text, like "≥ −0.5"."""
    return f"{SIGNS[row['bound']]} {row['bound_value']:g}".replace("-", "−")


def format_estimate(row: Mapping[str, Any], *keys: str) -> str:
    """Return the mean with the ends of its interval, as a person reads them."""
    mean, low, high = (row[key] for key in keys or ("measured", "low", "high"))
    ends = (mean,) if math.isnan(low) else (low, high)
    return format_interval(mean, low, high, _number_format(row, *ends))


def _number_format(row: Mapping[str, Any], *ends: float) -> str:
    """Return how a row's numbers are written: with more digits where rounding would move an end
    over the bound, or both ends to one number."""
    form, keeps, bound = MEASURES[row["measure"]][1], KEEPS[row["bound"]], row["bound_value"]
    for digits in range(int(form[-3]), 10):
        form = f"{form[:-3]}{digits}{form[-2:]}"
        shown = [float(form.format(end).strip("×").replace(",", "")) for end in ends]
        told_apart = len(set(shown)) == len(set(ends))
        if told_apart and [keeps(end, bound) for end in shown] == [keeps(e, bound) for e in ends]:
            break
    return form


def format_difference(row: Mapping[str, Any]) -> str:
    """Return a difference without a bound: interval and n, or – where there is nothing."""
    text = format_interval(row["measured"], row["low"], row["high"])
    return text if math.isnan(row["measured"]) else f"{text}, n = {row['n']}"


def format_verdict(row: Mapping[str, Any]) -> str:
    """Return the verdict with what belongs beside it, and the bootstrap's verdict if it is another
    one."""
    word, other = row["verdict"], differing_bootstrap_verdict(row)
    beside = f" (the bootstrap's interval says {other})" if other else ""
    if word == BY_CONSTRUCTION:
        return f"{word}: the bound is {'met' if row['kept'] else 'not met'}"
    if word == OPEN and row["measure"] == "accuracy" and (row["low"] > 0 or row["high"] < 0):
        direction = "higher" if row["low"] > 0 else "lower"
        return f"{word}: {direction}, but perhaps not by more than the bound{beside}"
    return f"{word}: {row['reason']}" if row["reason"] else word + beside


def differing_bootstrap_verdict(row: Mapping[str, Any]) -> str:
    """Return the verdict that the bootstrap's half-width would give, if it is another one; else ""."""
    half = row["bootstrap"]
    if math.isnan(half) or row["verdict"] not in (SUPPORTED, CONTRADICTED, OPEN):
        return ""
    low, high = row["measured"] - half, row["measured"] + half
    other = judge_interval(low, high, row["bound"], row["bound_value"])
    return "" if other == row["verdict"] else other
