"""The paper's claims, judged from records: params/claims.yaml in, a row a claim out."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, PositiveInt, model_validator

from tcs_core import Scheme, kept
from tcs_lab.runs.parameters import checked, plan, read_params
from tcs_lab.runs.records import load_records
from tcs_lab.support.errors import reject_unknown, validated
from tcs_lab.support.places import ROOT
from tcs_lab.tables.analysis import Comparison, Estimate, holm, minus
from tcs_lab.tables.tables import Record, bits_per_parameter, mean_interval, with_interval
from tcs_lab.tables.verdicts import CONTRADICTED, NOT_MEASURED, OPEN, SUPPORTED
from tcs_lab.training.configuration import RUN_KEYS, _record_file
from tcs_lab.training.training import outcomes

BOUNDS = {"at_least": "≥", "at_most": "≤", "more_than": ">", "less_than": "<"}
KEEPS = dict(zip(BOUNDS, (operator.ge, operator.le, operator.gt, operator.lt), strict=True))
BY_CONSTRUCTION = "by construction"
OVERLAP_SHARE = 1e-2  # of a dense update's entries, the largest: what `UpdateWatch` compares
VERDICTS = (SUPPORTED, CONTRADICTED, OPEN, BY_CONSTRUCTION, NOT_MEASURED)


# What is measured ─────────────────────────────────────────────────────────────────────────────────


def _dense_overlap(record: Record) -> float:
    """Mean over the epochs: what consecutive dense updates share of their largest entries beyond
    chance, over what chance leaves; nan if no row says."""
    rows = pd.DataFrame(record["rows"], columns=["update_overlap", "update_overlap_chance"])
    chance = rows["update_overlap_chance"].astype(float)
    return float(((rows["update_overlap"].astype(float) - chance) / (1 - chance)).mean())


def _own_share(record: Record) -> float:
    """The share of a client's message that is outside the shared mask."""
    scheme = record["config"]["scheme"]
    phis = (scheme[key] for key in ("phi_global", "phi_local"))
    shared, own = (kept(phi, record["dimension"]) if phi else 0 for phi in phis)
    return own / (shared + own)


# A number of one record, and how a person reads it. Two schemes are compared by the difference,
# bits by how many times fewer the first needs (than 32, if it stands alone).
MEASURES = {
    "accuracy": (lambda record: 100 * record["rows"][-1]["accuracy"], "{:+.2f}"),
    "dense_overlap": (_dense_overlap, "{:+.3f}"),
    "own_share": (_own_share, "{:.4f}"),
    "uplink": (lambda record: bits_per_parameter(record)["uplink"], "×{:,.4g}"),
    "uplink_whole": (lambda r: bits_per_parameter(r)["uplink with warm-up"], "×{:,.4g}"),
    "downlink": (lambda record: bits_per_parameter(record)["downlink"], "×{:,.4g}"),
}
DIFFERENCES = ("accuracy", "dense_overlap", "own_share")
COUNTED = ("own_share", "uplink", "uplink_whole", "downlink")  # not drawn by chance


# The file ─────────────────────────────────────────────────────────────────────────────────────────


SchemeAtRate = tuple[str, float]


def _as_records_have_it(side: SchemeAtRate) -> SchemeAtRate:
    if (known := Scheme.named(side[0]).name) != side[0]:
        raise ValueError(f"got {side[0]!r}, allowed: {known!r}, as records have it")
    return side


def _of_a_run(changes: dict[str, Any]) -> dict[str, Any]:
    reject_unknown(changes, RUN_KEYS, "setting")
    return {key: checked(key, value) for key, value in changes.items()}


Side = Annotated[tuple[str, FiniteFloat], AfterValidator(_as_records_have_it)]  # scheme, η
Changes = Annotated[dict[str, Any], AfterValidator(_of_a_run), Field(min_length=1)]


class Claim(BaseModel, extra="forbid"):
    """One claim: see the head of params/claims.yaml."""

    says: str
    where: str = ""
    measure: Literal[tuple(MEASURES)]  # type: ignore[valid-type]
    first: Side
    second: Side | None = None
    at_least: FiniteFloat | None = None
    at_most: FiniteFloat | None = None
    more_than: FiniteFloat | None = None
    less_than: FiniteFloat | None = None
    n: PositiveInt = 3
    main: bool = False
    paper: FiniteFloat | None = None
    paper_interval: tuple[FiniteFloat, FiniteFloat] | None = None

    @property
    def sides(self) -> list[SchemeAtRate]:
        return [side for side in (self.first, self.second) if side]

    @property
    def bounds(self) -> list[tuple[str, float]]:
        return [(b, getattr(self, b)) for b in BOUNDS if getattr(self, b) is not None]

    @model_validator(mode="after")
    def _can_be_judged(self) -> Claim:
        if len(self.bounds) != 1:
            raise ValueError(f"allowed: one number as {', '.join(BOUNDS)}")
        if self.measure == "accuracy" and not self.second:
            raise ValueError("second: an accuracy is claimed against another scheme's")
        if self.main and self.measure != "accuracy":
            raise ValueError(f"main: got a claim on {self.measure}, allowed: on accuracy")
        if self.first == self.second:
            raise ValueError(f"second: got {self.second}, allowed: another than the first")
        self._check_paper()
        return self

    def _check_paper(self) -> None:
        if self.paper_interval is None:
            return
        low, high = self.paper_interval
        if self.paper is None or not low <= self.paper <= high:
            got = f"got {[low, high]} around {self.paper}"
            raise ValueError(f"paper_interval: {got}, allowed: two numbers, rising, around paper")


class Unequal(BaseModel, extra="forbid"):
    """Pairs of schemes, and settings in which their difference is set beside that of equal clients."""

    pairs: Annotated[list[tuple[Side, Side]], Field(min_length=1)]
    settings: Annotated[dict[str, Changes], Field(min_length=1)]

    @property
    def sides(self) -> list[SchemeAtRate]:
        return list(dict.fromkeys(side for pair in self.pairs for side in pair))


class Claims(BaseModel, extra="forbid"):
    """A file like params/claims.yaml."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    claims: Annotated[dict[str, Claim], Field(min_length=1)]
    decomposition: list[Annotated[list[Side], Field(min_length=3)]] = []
    unequal: Unequal | None = None

    @property
    def sides(self) -> list[SchemeAtRate]:
        """All schemes at their rates that the file names, but for unequal clients."""
        of_claims = [side for claim in self.claims.values() for side in claim.sides]
        return list(dict.fromkeys(of_claims + [s for chain in self.decomposition for s in chain]))


def read_claims(path: str | Path) -> Claims:
    """The claims of a file; ValueError names the claim, the value and what is allowed."""
    return validated(Claims, read_params([path]), path)


# The records ──────────────────────────────────────────────────────────────────────────────────────


def claim_records(
    read: Claims, profile: dict[str, Any], tables: Iterable[dict[str, Any]] = (),
    results: str | Path | None = None,
) -> dict[str, Record]:  # fmt: skip
    """The records of a profile that are judged, by file name: of every scheme that a claim or one
    of the `tables` (contents of params/table1.yaml, ...) names, with the profile's seeds."""
    asked = [_asked(side) for side in read.sides] + [
        {key: table[key] for key in ("schemes", "learning_rate")} for table in tables
    ]
    return load_records((run for one in asked for run in plan(profile | one)), results)


def has_plan(profile: str) -> bool:
    """Whether a profile's runs were planned with their analysis (params/<profile>_plan.yaml)."""
    return (ROOT / f"params/{profile}_plan.yaml").is_file()


def planned_records(
    profile: str, results: str | Path | None = None
) -> tuple[Claims, dict[str, Record]]:
    """The claims of params/claims.yaml, and all records of a profile that the planned model is made
    of, by file name: equal clients, the schemes of the claims and of the paper's tables."""
    params = ROOT / "params"
    tables = [read_params([params / f"table{n}.yaml"]) for n in (1, 2, 3)]
    read = read_claims(params / "claims.yaml")
    own = read_params([params / f"{profile}.yaml"])
    return read, claim_records(read, own, tables, results)


def planned_gaps(profile: str, records: Iterable[Record]) -> dict[str, dict[str, float]] | None:
    """The differences to the Baseline of a table's schemes by the planned model, as `summary` takes
    them: accuracies 0..1. None if the profile has no plan, or if a record is none of the model's (of
    other settings): then there is only Student's interval over the table's own seeds.
    """
    found = list(records)
    if not found or not has_plan(profile):
        return None
    read, judged_records = planned_records(profile)
    if not {_record_file(record) for record in found} <= judged_records.keys():
        return None
    if BASELINE not in (sides := sorted({_side(record) for record in found})):
        return {}  # a table without it has no differences to it
    runs = {"": Runs(judged_records)}
    model = comparison(runs)
    gaps = {}
    for side in sides:
        if side != BASELINE:
            row = _difference(runs, model, [(1, "", side), (-1, "", BASELINE)], read)
            numbers_of = (row[key] / 100 for key in ("measured", "low", "high"))
            ends = ("difference", "difference_low", "difference_high")
            gaps[side[0]] = dict(zip(ends, numbers_of, strict=True)) | {"difference_n": row["n"]}
    return gaps


BASELINE = ("Baseline", 0.1)  # centralized training, at its rate


def unequal_records(
    read: Claims, profile: dict[str, Any], results: str | Path | None = None
) -> dict[str, dict[str, Record]]:
    """The records of unequal clients, by setting and file name; none if the file asks for none."""
    if read.unequal is None:
        return {}
    asked = [_asked(side) for side in read.unequal.sides]
    return {
        title: load_records(
            (run for one in asked for run in plan(profile | changes | one)), results
        )
        for title, changes in read.unequal.settings.items()
    }


def _asked(side: SchemeAtRate) -> dict[str, Any]:
    return {"schemes": [side[0]], "learning_rate": side[1]}


class Runs:
    """Records by scheme with rate, and seed. Of a scheme of which a run diverged none is judged."""

    def __init__(self, records: Mapping[str, Record]):
        self.records = records
        self.files: dict[SchemeAtRate, dict[int, str]] = {}
        for file, record in records.items():
            config = record["config"]
            side, seed = (config["scheme"]["name"], config["learning_rate"]), config["seed"]
            if seed in (of_side := self.files.setdefault(side, {})):
                both = f"{of_side[seed]} and {file}"
                raise ValueError(f"{both}: got two runs of one seed, allowed: one")
            of_side[seed] = file
        self.lost = {
            side: [f for f in files.values() if records[f]["status"] != "finished"]
            for side, files in self.files.items()
        }

    def seeds(self, sides: Iterable[SchemeAtRate]) -> list[int]:
        """Those that all sides have."""
        return sorted(set.intersection(*(set(self.files.get(side, {})) for side in sides)))

    def record(self, side: SchemeAtRate, seed: int) -> Record:
        return self.records[self.files[side][seed]]

    def judged(self) -> Iterable[tuple[SchemeAtRate, int, Record]]:
        for side, files in self.files.items():
            for seed in () if self.lost[side] else files:
                yield side, seed, self.record(side, seed)

    def lacking(self, sides: Iterable[SchemeAtRate]) -> str:
        """Why there is no number for these sides; "" if there may be one."""
        sides = list(sides)
        if diverged := [file for side in sides for file in self.lost.get(side, [])]:
            return f"diverged: {', '.join(diverged)}"
        if missing := [
            f"{name} at {eta:g}" for name, eta in sides if (name, eta) not in self.files
        ]:
            return f"no records of {', '.join(missing)}"
        return "" if self.seeds(sides) else "no seed in common"


def comparison(runs: Mapping[str, Runs]) -> Comparison:
    """The model over the runs of one or more settings, each with seeds' effects of its own: a
    seed deals out other samples where clients are unequal. A cell is (setting, scheme with rate)."""
    accuracies, right = {}, {}
    for setting, of_setting in runs.items():
        for side, seed, record in of_setting.judged():
            run = (setting, side), seed
            accuracies[run] = MEASURES["accuracy"][0](record)
            if (found := outcomes(record)) is not None:
                right[run] = found
    return Comparison(accuracies, right, lambda cell, seed: (cell[0], seed))


# The verdicts ─────────────────────────────────────────────────────────────────────────────────────


def verdict(low: float, high: float, bound: str, value: float) -> str:
    """What an interval says of a bound: "supported", "contradicted" or "open"."""
    keeps = [KEEPS[bound](end, value) for end in (low, high)]
    return SUPPORTED if all(keeps) else OPEN if any(keeps) else CONTRADICTED


def judged(read: Claims, records: Mapping[str, Record]) -> pd.DataFrame:
    """One row a claim: the paper's number and verdict, ours with its interval and verdict.

    `records` maps file names to records, all of one profile. `half` is half the interval's width,
    half_seeds and half_images its two parts (they add up by their squares), `bootstrap` that of the
    bootstrap beside it; p is two-sided, of the difference from the bound, `holm` the same corrected
    for the main claims. `kept` says of a claim by construction whether it keeps its bound. Where
    there is no verdict, `reason` says why. first_records and second_records name the files.
    """
    runs = Runs(records)
    model = comparison({"": runs})
    rows = []
    for name, claim in read.claims.items():
        row = {"claim": name} | _stated(claim)
        if why := runs.lacking(claim.sides):
            ours = _row(Estimate()) | {"verdict": NOT_MEASURED, "reason": why}
        elif claim.measure == "accuracy":
            ours = _by_model(claim, model, read.confidence)
        else:
            ours = _by_seeds(claim, runs, read.confidence)
        rows.append(row | ours | _files(claim, runs, ours["n"]))
    table = pd.DataFrame(rows)
    main = table[table["main"]].set_index("claim")["p"].to_dict()
    return table.assign(holm=table["claim"].map(holm(main)).astype(float))


def _stated(claim: Claim) -> dict[str, Any]:
    """What the file says of a claim, a column each."""
    second, (bound, value) = claim.second or ("", math.nan), claim.bounds[0]
    low, high = claim.paper_interval or (math.nan, math.nan)
    theirs = ""
    if claim.paper_interval:
        theirs = verdict(low, high, bound, value)
    elif claim.paper is not None and claim.measure in COUNTED:
        theirs = BY_CONSTRUCTION
    return {
        "says": claim.says, "where": claim.where, "measure": claim.measure, "main": claim.main,
        "first": claim.first[0], "second": second[0], "eta": claim.first[1],
        "second_eta": second[1], "bound": bound, "bound_value": value,
        "paper": math.nan if claim.paper is None else claim.paper,
        "paper_low": low, "paper_high": high, "paper_verdict": theirs, "planned": claim.n,
    }  # fmt: skip


def _row(estimate: Estimate, bound: float = math.nan) -> dict[str, Any]:
    """An estimate, a column each."""
    return {
        "measured": estimate.value, "low": estimate.low, "high": estimate.high, "n": estimate.n,
        "half": estimate.half, "half_seeds": estimate.half_of(estimate.seeds),
        "half_images": estimate.half_of(estimate.images), "freedom": estimate.freedom,
        "bootstrap": estimate.bootstrap, "p": estimate.p(bound),
        "kept": None, "verdict": NOT_MEASURED, "reason": "",
    }  # fmt: skip


def _by_model(claim: Claim, model: Comparison, confidence: float) -> dict[str, Any]:
    """What the model over all runs says of a claim on accuracy."""
    signs = {("", claim.first): 1, ("", claim.second): -1}
    bound, value = claim.bounds[0]
    row = _row(model.estimate(signs, confidence), value)
    if math.isnan(row["half"]):
        return row | {"reason": f"too few runs for an interval (n = {row['n']})"}
    return row | {"verdict": verdict(row["low"], row["high"], bound, value)}


def _by_seeds(claim: Claim, runs: Runs, confidence: float) -> dict[str, Any]:
    """What the records say, seed by seed, of a claim on anything else."""
    found = [
        _compared(claim.measure, [runs.record(side, seed) for side in claim.sides])
        for seed in runs.seeds(claim.sides)
    ]
    values = [value for value in found if not math.isnan(value)]
    mean, low, high = mean_interval(values, confidence)
    row = _row(Estimate()) | {"measured": mean, "n": len(values)}
    bound, value = claim.bounds[0]
    if not values:
        return row | {"reason": "its records do not say"}
    if claim.measure in COUNTED:
        return row | {"verdict": BY_CONSTRUCTION, "kept": KEEPS[bound](mean, value)}
    if len(values) < 2:
        return row | {"reason": "too few runs for an interval (n = 1)"}
    half = (high - low) / 2
    row |= {"low": low, "high": high, "half": half, "half_seeds": half, "freedom": len(values) - 1}
    return row | {"verdict": verdict(low, high, bound, value)}


def _compared(measure: str, records: list[Record]) -> float:
    one, *other = map(MEASURES[measure][0], records)
    if measure in DIFFERENCES:
        return one - sum(other)
    return (other or [32])[0] / one


def _files(claim: Claim, runs: Runs, n: int) -> dict[str, str]:
    """The record files behind a claim, in the order of their seeds."""
    seeds = runs.seeds(claim.sides) if n else []
    files = [" ".join(runs.files[side][seed] for seed in seeds) for side in claim.sides]
    return dict(zip(("first_records", "second_records"), [*files, ""], strict=False))


# Without a verdict ────────────────────────────────────────────────────────────────────────────────


def decomposed(read: Claims, records: Mapping[str, Record]) -> pd.DataFrame:
    """What stands between a sparse scheme and centralized training, step by step: of every chain
    the difference of its ends (`part` 0), then those of its neighbours, last pair first. By the
    same model the parts add up to the whole."""
    runs = Runs(records)
    model = comparison({"": runs})
    rows = []
    for number, chain in enumerate(read.decomposition):
        steps = [*itertools.pairwise(chain)][::-1]
        for part, (one, other) in enumerate([(chain[0], chain[-1]), *steps]):
            row = {"chain": number, "part": part, "first": one[0], "second": other[0]}
            rows.append(row | _difference({"": runs}, model, [(1, "", one), (-1, "", other)], read))
    return pd.DataFrame(rows)


def difference(
    read: Claims, records: Mapping[str, Record], first: SchemeAtRate, second: SchemeAtRate
) -> dict[str, Any]:
    """The difference of two schemes by the planned model: `measured`, `low`, `high`, `n` and so on
    as in `judged`, and `reason` where there is none."""
    runs = {"": Runs(records)}
    return _difference(runs, comparison(runs), [(1, "", first), (-1, "", second)], read)


def unequal(
    read: Claims, records: Mapping[str, Record], there: Mapping[str, Mapping[str, Record]]
) -> pd.DataFrame:
    """Differences of unequal clients (`there`: by setting, as `unequal_records` gives them) beside
    those of equal clients, three rows for each pair of schemes and setting: `where` is "there",
    "equal" or "there − equal".

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
    equal = {"": Runs(records)}
    planned, rows = comparison(equal), []
    for setting, found in there.items() if read.unequal else ():
        for first, second in read.unequal.pairs if read.unequal else ():
            of_pair = {f: r for f, r in found.items() if _side(r) in (first, second)}
            own = {"there": Runs(of_pair)}
            gaps = _unequal_gaps((first, second), own, equal, planned, read.confidence)
            for where, (estimate, reason) in gaps.items():
                row = {"setting": setting, "first": first[0], "second": second[0], "where": where}
                rows.append(row | _row(estimate) | {"reason": reason})
    return pd.DataFrame(rows)


def _unequal_gaps(
    pair: tuple[SchemeAtRate, SchemeAtRate], own: Mapping[str, Runs], equal: Mapping[str, Runs],
    planned: Comparison, confidence: float,
) -> dict[str, tuple[Estimate, str]]:  # fmt: skip
    """The three rows of `unequal` for one pair and setting: each an estimate, or why there is none."""
    ours = {("there", pair[0]): 1.0, ("there", pair[1]): -1.0}
    theirs = {("", pair[0]): 1.0, ("", pair[1]): -1.0}
    one, why = _estimate(own, comparison(own), ours, confidence)
    other, why_other = _estimate(equal, planned, theirs, confidence)
    gap, why_gap = Estimate(), why or why_other
    if not why_gap:
        signs = ours | {cell: -sign for cell, sign in theirs.items()}
        gap = minus(one, other, comparison({**own, **equal}).images(signs))
    return {"there": (one, why), "equal": (other, why_other), "there − equal": (gap, why_gap)}


def _side(record: Record) -> SchemeAtRate:
    return record["config"]["scheme"]["name"], record["config"]["learning_rate"]


def _difference(
    runs: Mapping[str, Runs], model: Comparison, terms: list[tuple[int, str, SchemeAtRate]],
    read: Claims,
) -> dict[str, Any]:  # fmt: skip
    """Of terms (sign, setting, scheme with rate): the estimate as a row, or the reason why there is
    none."""
    signs = {(setting, side): float(sign) for sign, setting, side in terms}
    estimate, reason = _estimate(runs, model, signs, read.confidence)
    return _row(estimate) | {"reason": reason}


def _estimate(
    runs: Mapping[str, Runs], model: Comparison, signs: Mapping[Any, float], confidence: float
) -> tuple[Estimate, str]:
    """The estimate of sum(sign x cell), a cell being (setting, scheme with rate), and the reason why
    there is none ("" if there is one)."""
    why = [reason for setting, side in signs if (reason := runs[setting].lacking([side]))]
    if why or not model.seeds(*signs):
        return Estimate(), (why or ["no seed in common"])[0]
    return model.estimate(signs, confidence), ""


def behind_gates(
    read: Claims, records: Mapping[str, Record], table: pd.DataFrame, gates: Iterable[Gate]
) -> pd.DataFrame:
    """The claims of `table` (what `judged` gives) that hang on gates, with both readings.

    A gate is a comparison of dense trainings; if its mean does not keep its bound, the claims that
    hang on it are not testable. One row for each such claim: `claim`, `says`, `without` (the
    verdict as it is), `gated` (the verdict, or "not testable") and `because` (the gates that failed).
    """
    failed: dict[str, list[str]] = {}
    for gate in gates:
        gap = difference(read, records, gate.first, gate.second)
        said_so = f"{gate.first[0]} − {gate.second[0]} is {difference_said(gap)}"
        passed = KEEPS["at_least"](gap["measured"], gate.at_least)
        for claim in gate.claims:
            failed.setdefault(claim, []).extend([] if passed else [said_so])
    rows = table[table["claim"].isin(failed)].to_dict("records")
    return pd.DataFrame(
        {"claim": row["claim"], "says": row["says"], "without": row["verdict"],
         "gated": NOT_TESTABLE if failed[row["claim"]] else row["verdict"],
         "because": "; ".join(failed[row["claim"]])}
        for row in rows
    )  # fmt: skip


class Gate(BaseModel, extra="forbid"):
    """A comparison of two dense trainings on which claims hang: see `behind_gates`."""

    first: Side
    second: Side
    at_least: FiniteFloat
    claims: list[str]


NOT_TESTABLE = "not testable"


def recurring(records: Iterable[Record], share: float = OVERLAP_SHARE) -> dict[str, float]:
    """How many of the largest entries of a dense update are among those of the next round, as shares
    of them, means over runs: `seen`; `by_layers`, what two masks with as many entries in every layer
    share by chance; `by_chance`, what two masks share that are drawn from all entries alike.
    """
    found = list(records)
    rows = [pd.DataFrame(r["rows"], columns=["update_overlap", "update_overlap_chance"])
            for r in found]  # fmt: skip
    means = pd.DataFrame([frame.astype(float).mean() for frame in rows]).mean()
    uniform = [kept(share, record["dimension"]) / record["dimension"] for record in found]
    seen, by_layers = means
    return {"seen": float(seen), "by_layers": float(by_layers), "by_chance": fmean(uniform)}


# For a person ─────────────────────────────────────────────────────────────────────────────────────


def supported_if(row: Mapping[str, Any]) -> str:
    """The bound as text, like "≥ −0.5"."""
    return f"{BOUNDS[row['bound']]} {row['bound_value']:g}".replace("-", "−")


def _form(row: Mapping[str, Any], *ends: float) -> str:
    """How its numbers are written: with more digits where rounding would move an end over the
    bound, or both ends to one number."""
    form, keeps, bound = MEASURES[row["measure"]][1], KEEPS[row["bound"]], row["bound_value"]
    for digits in range(int(form[-3]), 10):
        form = f"{form[:-3]}{digits}{form[-2:]}"
        shown = [float(form.format(end).strip("×").replace(",", "")) for end in ends]
        told_apart = len(set(shown)) == len(set(ends))
        sides, shown_sides = ([keeps(end, bound) for end in of] for of in (ends, shown))
        if told_apart and sides == shown_sides:
            break
    return form


def numbers(row: Mapping[str, Any], *keys: str) -> str:
    """Its mean with the ends of the interval, as a person reads them."""
    mean, low, high = (row[key] for key in keys or ("measured", "low", "high"))
    ends = (mean,) if math.isnan(low) else (low, high)
    return with_interval(mean, low, high, _form(row, *ends))


def by_bootstrap(row: Mapping[str, Any]) -> str:
    """The verdict that the bootstrap's half-width would give; "" where there is none."""
    half = row["bootstrap"]
    if math.isnan(half):
        return ""
    return verdict(row["measured"] - half, row["measured"] + half, row["bound"], row["bound_value"])


def difference_said(row: Mapping[str, Any]) -> str:
    """A difference without a bound: interval and n, or – where there is nothing."""
    numbers = with_interval(row["measured"], row["low"], row["high"])
    return numbers if math.isnan(row["measured"]) else f"{numbers}, n = {row['n']}"


def said(row: Mapping[str, Any]) -> str:
    """The verdict, with what has to be said beside it, and the bootstrap's word if it is another."""
    word, other = row["verdict"], other_by_bootstrap(row)
    beside = f" (the bootstrap's interval says {other})" if other else ""
    if word == BY_CONSTRUCTION:
        return f"{word}: the bound is {'met' if row['kept'] else 'not met'}"
    if word == OPEN and row["measure"] == "accuracy" and (row["low"] > 0 or row["high"] < 0):
        way = "higher" if row["low"] > 0 else "lower"
        return f"{word}: {way}; whether by more than the bound is open{beside}"
    return f"{word}: {row['reason']}" if row["reason"] else word + beside


def other_by_bootstrap(row: Mapping[str, Any]) -> str:
    """The verdict that the bootstrap's interval would give, if it is another; else ""."""
    word = by_bootstrap(row)
    return (
        word if row["verdict"] in (SUPPORTED, CONTRADICTED, OPEN) and word != row["verdict"] else ""
    )


CLAIM_UNITS = (
    "Accuracies: differences in points, with 95 % intervals. ×: times fewer bits. Important entries: "
    "0 is chance, 1 a mask that never changes."
)


def readable_claims(table: pd.DataFrame) -> pd.DataFrame:
    """The claims that have a number of ours, as a person reads them, verdicts in bold;
    `not_measured` has the rest."""
    rows = [
        {"The paper says": row["says"], "Where": row["where"], "Supported if": supported_if(row),
         "Paper (interval)": numbers(row, "paper", "paper_low", "paper_high"),
         "Paper's verdict": f"**{row['paper_verdict']}**" if row["paper_verdict"] else "–",
         "Ours (interval)": numbers(row),
         "n": str(row["n"]) if row["measure"] in COUNTED else f"{row['n']} of {row['planned']}",
         "Verdict": f"**{said(row)}**"}
        for row in table[table["measured"].notna()].to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def not_measured(table: pd.DataFrame) -> str:
    """One line that lists the claims without a number of ours, and why it is not for lack of records
    alone; "" if there are none."""
    rows = table[table["measured"].isna()]
    if len(rows) == len(table):
        return f"Not measured: none of {len(table)} claims has its records yet."
    each = [
        row.says if row.reason.startswith("no records") else f"{row.says} ({row.reason})"
        for row in rows.itertuples()
    ]
    return f"Not measured: {'; '.join(each)}." if each else ""
