"""The paper's claims as params/claims.yaml has them, and the records that they are judged by.

`planned_model` estimates differences from these records, and `judging` gives the verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, PositiveInt, model_validator

from tcs_core import Scheme
from tcs_lab.evidence.measures import MEASURES
from tcs_lab.runs.parameters import check_parameter, plan, read_params
from tcs_lab.runs.records import load_records
from tcs_lab.support.errors import reject_unknown, validate
from tcs_lab.support.paths import ROOT
from tcs_lab.tables.tables import Record
from tcs_lab.training.configuration import RUN_KEYS

BOUNDS = ("at_least", "at_most", "more_than", "less_than")


# The file ─────────────────────────────────────────────────────────────────────────────────────────


def _check_name(scheme: tuple[str, float]) -> tuple[str, float]:
    if (known := Scheme.named(scheme[0]).name) != scheme[0]:
        raise ValueError(f"got {scheme[0]!r}, allowed: {known!r}, the name that records have")
    return scheme


def _check_changes(changes: dict[str, Any]) -> dict[str, Any]:
    reject_unknown(changes, RUN_KEYS, "setting")
    return {key: check_parameter(key, value) for key, value in changes.items()}


SchemeAtRate = Annotated[tuple[str, FiniteFloat], AfterValidator(_check_name)]  # name, η
Changes = Annotated[dict[str, Any], AfterValidator(_check_changes), Field(min_length=1)]


class Claim(BaseModel, extra="forbid"):
    """One claim: see the head of params/claims.yaml."""

    says: str
    where: str = ""
    measure: Literal[tuple(MEASURES)]  # type: ignore[valid-type]
    first: SchemeAtRate
    second: SchemeAtRate | None = None
    at_least: FiniteFloat | None = None
    at_most: FiniteFloat | None = None
    more_than: FiniteFloat | None = None
    less_than: FiniteFloat | None = None
    n: PositiveInt = 3
    main: bool = False
    paper: FiniteFloat | None = None
    paper_interval: tuple[FiniteFloat, FiniteFloat] | None = None

    @property
    def schemes(self) -> list[SchemeAtRate]:
        return [scheme for scheme in (self.first, self.second) if scheme]

    @property
    def bounds(self) -> list[tuple[str, float]]:
        return [(b, getattr(self, b)) for b in BOUNDS if getattr(self, b) is not None]

    @model_validator(mode="after")
    def _can_be_judged(self) -> Claim:
        if len(self.bounds) != 1:
            given = ", ".join(name for name, _ in self.bounds) or "no bound"
            raise ValueError(f"got {given}, allowed: exactly one of {', '.join(BOUNDS)}")
        if self.measure == "accuracy" and not self.second:
            raise ValueError("second: missing; an accuracy is compared with another scheme's")
        if self.main and self.measure != "accuracy":
            raise ValueError(
                f"main: got true for a claim on {self.measure}, allowed: a claim on accuracy"
            )
        if self.first == self.second:
            raise ValueError(f"second: got {self.second}, allowed: another scheme than the first")
        self._check_paper()
        return self

    def _check_paper(self) -> None:
        if self.paper_interval is None:
            return
        low, high = self.paper_interval
        if self.paper is None or not low <= self.paper <= high:
            got = f"got {[low, high]} with paper {self.paper}"
            raise ValueError(
                f"paper_interval: {got}, allowed: two rising numbers with the number `paper` between"
            )


class Unequal(BaseModel, extra="forbid"):
    """Pairs of schemes, and settings in which their difference is set beside that of equal clients."""

    pairs: Annotated[list[tuple[SchemeAtRate, SchemeAtRate]], Field(min_length=1)]
    settings: Annotated[dict[str, Changes], Field(min_length=1)]

    @property
    def schemes(self) -> list[SchemeAtRate]:
        return list(dict.fromkeys(scheme for pair in self.pairs for scheme in pair))


class Claims(BaseModel, extra="forbid"):
    """A file like params/claims.yaml."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    claims: Annotated[dict[str, Claim], Field(min_length=1)]
    decomposition: list[Annotated[list[SchemeAtRate], Field(min_length=3)]] = []
    unequal: Unequal | None = None

    @property
    def schemes(self) -> list[SchemeAtRate]:
        """All schemes at their rates that the file names, without those of unequal clients."""
        of_claims = [scheme for claim in self.claims.values() for scheme in claim.schemes]
        return list(dict.fromkeys(of_claims + [s for chain in self.decomposition for s in chain]))


def read_claims(path: str | Path) -> Claims:
    """Read a file of claims; ValueError names the claim, the value and what is allowed."""
    return validate(Claims, read_params([path]), path)


# The records ──────────────────────────────────────────────────────────────────────────────────────


def load_claim_records(
    read: Claims, profile: dict[str, Any], tables: Iterable[dict[str, Any]] = (),
    results: str | Path | None = None,
) -> dict[str, Record]:  # fmt: skip
    """Load the records of a profile that are judged, by file name: those of every scheme that a claim
    or one of the `tables` (contents of params/table1.yaml, ...) names, with the profile's seeds."""
    asked = [_params_of(scheme) for scheme in read.schemes] + [
        {key: table[key] for key in ("schemes", "learning_rate")} for table in tables
    ]
    return load_records((run for one in asked for run in plan(profile | one)), results)


def load_planned_records(
    profile: str, results: str | Path | None = None
) -> tuple[Claims, dict[str, Record]]:
    """Read the claims of params/claims.yaml, and load all records of a profile that the planned model
    is made of, by file name: equal clients, the schemes of the claims and of the paper's tables."""
    params = ROOT / "params"
    tables = [read_params([params / f"table{n}.yaml"]) for n in (1, 2, 3)]
    read = read_claims(params / "claims.yaml")
    asked = read_params([params / f"{profile}.yaml"])
    return read, load_claim_records(read, asked, tables, results)


def load_unequal_records(read: Claims, profile: dict[str, Any]) -> dict[str, dict[str, Record]]:
    """Load the records of unequal clients, by setting and file name; none if the file asks for none."""
    if read.unequal is None:
        return {}
    asked = [_params_of(scheme) for scheme in read.unequal.schemes]
    return {
        title: load_records(run for one in asked for run in plan(profile | changes | one))
        for title, changes in read.unequal.settings.items()
    }


def _params_of(scheme: SchemeAtRate) -> dict[str, Any]:
    return {"schemes": [scheme[0]], "learning_rate": scheme[1]}
