"""The paper's claims, judged from records: params/claims.yaml in, a row a claim out."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, model_validator

from tcs_core import Scheme, kept
from tcs_lab.cells import WORDS
from tcs_lab.errors import validated
from tcs_lab.settings import plan, read_params
from tcs_lab.tables import Record, bits_per_parameter, mean_interval, recorded, with_interval

BOUNDS = {"at_least": "≥", "at_most": "≤", "more_than": ">", "less_than": "<"}
KEEPS = dict(zip(BOUNDS, (operator.ge, operator.le, operator.gt, operator.lt), strict=True))
VERDICTS = (*WORDS, "not measured")
OPENS = {"holds": "gate: open, by its mean", "does not hold": "gate: shut, by its mean"}


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
BY_CHANCE = ("accuracy", "dense_overlap")  # one record of these decides nothing


class Claim(BaseModel, extra="forbid"):
    """One claim, or gate: see the head of params/claims.yaml."""

    says: str
    where: str = ""
    measure: Literal[tuple(MEASURES)]  # type: ignore[valid-type]
    first: tuple[str, FiniteFloat]
    second: tuple[str, FiniteFloat] | None = None
    at_least: FiniteFloat | None = None
    at_most: FiniteFloat | None = None
    more_than: FiniteFloat | None = None
    less_than: FiniteFloat | None = None
    n: PositiveInt = 3
    needs: list[str] = []
    paper: FiniteFloat | None = None
    paper_interval: tuple[FiniteFloat, FiniteFloat] | None = None

    @property
    def sides(self) -> list[tuple[str, float]]:
        return [side for side in (self.first, self.second) if side]

    @property
    def bounds(self) -> list[tuple[str, float]]:
        return [(b, getattr(self, b)) for b in BOUNDS if getattr(self, b) is not None]

    @model_validator(mode="after")
    def _can_be_judged(self) -> Claim:
        if len(self.bounds) != 1:
            raise ValueError(f"allowed: one number as {', '.join(BOUNDS)}")
        if self.paper_interval and self.paper_interval[0] > self.paper_interval[1]:
            raise ValueError("paper_interval: allowed: two numbers, rising")
        if self.measure == "accuracy" and not self.second:
            raise ValueError("second: an accuracy is claimed against another scheme's")
        for name, _ in self.sides:
            if (known := Scheme.named(name).name) != name:
                raise ValueError(f"got {name!r}, allowed: {known!r}, as records have it")
        return self


class Claims(BaseModel, extra="forbid"):
    """A file like params/claims.yaml. Gates are judged first, and have none of their own."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    gates: dict[str, Claim] = {}
    claims: Annotated[dict[str, Claim], Field(min_length=1)]

    @model_validator(mode="after")
    def _gates_are_there(self) -> Claims:
        if both := self.gates.keys() & self.claims.keys():
            raise ValueError(f"got a gate and a claim {min(both)!r}, allowed: a name for each")
        for name, claim in self.all.items():
            allowed = [] if name in self.gates else list(self.gates)
            if unknown := [gate for gate in claim.needs if gate not in allowed]:
                raise ValueError(f"{name}: needs: got {unknown[0]!r}, allowed: {allowed}")
        return self

    @property
    def all(self) -> dict[str, Claim]:
        return self.gates | self.claims


def read_claims(path: str | Path) -> Claims:
    """The claims of a file; ValueError names the claim and what is allowed."""
    return validated(Claims, read_params([path]), path)


def claim_records(read: Claims, profile: dict[str, Any]) -> dict[str, Record]:
    """The records of a profile that bear on these claims, with any seed below 100."""
    sides = sorted({side for claim in read.all.values() for side in claim.sides})
    asked = [{"schemes": [name], "learning_rate": eta, "seeds": 100} for name, eta in sides]
    return recorded(config for one in asked for config in plan(profile | one))


def judged(read: Claims, records: dict[str, Record]) -> pd.DataFrame:
    """One row a gate and claim: the paper's number, ours with its interval over n seeds, verdict.

    `records` maps file names to records, all of one profile; those of a claim's two schemes are
    paired by seed. Where one diverged, there is no verdict, and the reason names it. Columns
    first_records and second_records name the files.
    """
    runs: dict[tuple[str, float], dict[int, str]] = {}
    for file, record in records.items():
        config = record["config"]
        key = (config["scheme"]["name"], config["learning_rate"])
        runs.setdefault(key, {})[config["seed"]] = file
    rows: dict[str, dict[str, Any]] = {}
    for name, claim in read.all.items():
        ours = _measured(claim, [runs.get(side, {}) for side in claim.sides], records, read)
        row = {"claim": name, "gate": name in read.gates} | _stated(claim) | ours
        rows[name] = row | dict(zip(("verdict", "reason"), _verdict(claim, row, rows), strict=True))
    return pd.DataFrame(list(rows.values()))


def _stated(claim: Claim) -> dict[str, Any]:
    """What the file says of a claim, a column each."""
    second, nothing = claim.second or ("", math.nan), (math.nan, math.nan)
    low, high = claim.paper_interval or nothing
    return {
        "says": claim.says, "where": claim.where, "measure": claim.measure,
        "first": claim.first[0], "second": second[0], "eta": claim.first[1],
        "second_eta": second[1], "bound": claim.bounds[0][0], "bound_value": claim.bounds[0][1],
        "paper": math.nan if claim.paper is None else claim.paper,
        "paper_low": low, "paper_high": high, "planned": claim.n,
    }  # fmt: skip


def _measured(
    claim: Claim, sides: list[dict[int, str]], records: dict[str, Record], read: Claims
) -> dict[str, Any]:
    """What the records say, over the seeds that both sides have a number for."""
    values: dict[int, float] = {}
    lost = [f for side in sides for f in side.values() if records[f]["status"] != "finished"]
    common = set.intersection(*(set(side) for side in sides))
    for seed in [] if lost else sorted(common):
        value = _compared(claim.measure, [records[side[seed]] for side in sides])
        values |= {} if math.isnan(value) else {seed: value}
    mean, low, high = mean_interval(values.values(), read.confidence)
    if len(values) == 1 and claim.measure not in BY_CHANCE:
        low = high = mean
    files = [" ".join(side[seed] for seed in values) for side in sides] + [""]
    lacking = [name for (name, _), side in zip(claim.sides, sides, strict=True) if not side]
    why = f"no records of {', '.join(lacking)}" if lacking else "its records do not say"
    if lost:
        why = f"diverged: {', '.join(lost)}"
    return {
        "measured": mean, "low": low, "high": high, "n": len(values),
        "first_records": files[0], "second_records": files[1], "reason": "" if values else why,
    }  # fmt: skip


def _compared(measure: str, records: list[Record]) -> float:
    one, *other = map(MEASURES[measure][0], records)
    if measure in DIFFERENCES:
        return one - sum(other)
    return (other or [32])[0] / one


def _verdict(claim: Claim, row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """The verdict, and the reason where it is not the interval that decides: a gate's is its mean,
    and a claim whose gates fail can't be tested."""
    for gate in (rows[name] for name in claim.needs):
        if gate["verdict"] == "does not hold":
            mean = _form(gate, gate["measured"]).format(gate["measured"])
            got = f"{mean}, needs {holds_if(gate)}".replace("-", "−")
            return "not testable here", f"gate {gate['claim']}: {got}"
    if not row["n"]:
        return "not measured", row["reason"]
    if waiting := [name for name in claim.needs if rows[name]["verdict"] != "holds"]:
        return "not measured", f"gate {waiting[0]}: {rows[waiting[0]]['verdict']} yet"
    by_mean = row["gate"] and row["n"] > 1  # one seed decides no gate
    low, high = (row["measured"],) * 2 if by_mean else (row["low"], row["high"])
    return verdict(low, high, *claim.bounds[0]), ""


def verdict(low: float, high: float, bound: str, value: float) -> str:
    """What an interval says of a bound: "holds", "does not hold" or "not decided"."""
    keeps = [KEEPS[bound](end, value) for end in (low, high)]
    return "holds" if all(keeps) else "not decided" if any(keeps) else "does not hold"


def holds_if(row: dict[str, Any]) -> str:
    """The bound as text, like "≥ −0.5"."""
    return f"{BOUNDS[row['bound']]} {row['bound_value']:g}".replace("-", "−")


def _form(row: dict[str, Any], *ends: float) -> str:
    """How its numbers are written: with more digits where rounding would move an end over the
    bound."""
    form, keeps, bound = MEASURES[row["measure"]][1], KEEPS[row["bound"]], row["bound_value"]
    for digits in range(int(form[-3]), 10):
        form = f"{form[:-3]}{digits}{form[-2:]}"
        shown = [float(form.format(end).strip("×").replace(",", "")) for end in ends]
        if [keeps(end, bound) for end in ends] == [keeps(end, bound) for end in shown]:
            break
    return form


def _numbers(row: dict[str, Any], *keys: str) -> str:
    """Its mean with the ends of the interval, as a person reads them."""
    mean, low, high = (row[key] for key in keys)
    ends = (low, high, mean) if row["gate"] else (low, high)  # a gate's mean decides
    return with_interval(mean, low, high, _form(row, *ends))


def _stated_texts(row: dict[str, Any]) -> dict[str, str]:
    """What the paper says, and what decides."""
    return {"The paper says": row["says"], "Where": row["where"], "Holds if": holds_if(row),
            "Paper (interval)": _numbers(row, "paper", "paper_low", "paper_high")}  # fmt: skip


def readable_claims(table: pd.DataFrame) -> pd.DataFrame:
    """The judged claims, or gates, as a person reads them."""
    rows = [
        _stated_texts(row)
        | {"Ours (interval)": _numbers(row, "measured", "low", "high"), "n": str(row["n"]),
           "Planned n": str(row["planned"]),
           "Verdict": (OPENS if row["gate"] else {}).get(row["verdict"], row["verdict"])
           + (f" ({row['reason']})" if row["reason"] else "")}
        for row in table.to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def claims_beside(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The same claims judged in several trainings, a column each by its title: verdict (of a gate
    whether it is open) and our numbers; – where nothing is measured. n stands in the title, or in
    every cell where it differs."""
    rows = {title: table.to_dict("records") for title, table in tables.items()}
    stated = [_stated_texts(row) for row in next(iter(rows.values()))]
    for text, row in zip(stated, next(iter(rows.values())), strict=True):
        text["Claim"] = ("Gate: " if row["gate"] else "") + text.pop("The paper says")
    table = pd.DataFrame(stated)[["Claim", "Where", "Holds if", "Paper (interval)"]]
    for title, found in rows.items():
        ns = {row["n"] for row in found if row["n"]}
        cells = [
            _cell(row) + (f", n = {row['n']}" if row["n"] and len(ns) > 1 else "") for row in found
        ]
        table[f"{title}, n = {ns.pop()}" if len(ns) == 1 else title] = cells
    return table


def _cell(row: dict[str, Any]) -> str:
    words = {"holds": "open", "does not hold": "shut"} if row["gate"] else {}
    verdict = words.get(row["verdict"], row["verdict"])
    return f"{verdict}: {_numbers(row, 'measured', 'low', 'high')}" if row["n"] else "–"
