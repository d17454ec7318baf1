"""The paper's empirical sentences, each with a verdict that is computed, and where it is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, Field, model_validator

from tcs_lab.evidence.claims import Claim, Claims
from tcs_lab.evidence.judging import (
    BY_CONSTRUCTION,
    SUPPORTED,
    differing_bootstrap_verdict,
    format_estimate,
    judge_claims,
)
from tcs_lab.runs.parameters import read_params
from tcs_lab.support.errors import reject_unknown, validate
from tcs_lab.tables.tables import Record
from tcs_lab.tables.verdicts import verdict_on

OUT_OF_SCOPE = "out of scope"


# The file ─────────────────────────────────────────────────────────────────────────────────────────


class ExtraDifference(Claim, extra="forbid"):
    """A difference of accuracies that params/claims.yaml does not have."""

    says: str = ""
    measure: Literal["accuracy"] = "accuracy"


class Sentence(BaseModel, extra="forbid"):
    """One sentence: see the head of params/sentences.yaml."""

    where: str
    says: str
    claims: list[str] = []
    judged: list[ExtraDifference] = []
    statements: dict[str, list[str]] = {}
    word: Literal["by construction", "contradicted", "out of scope", "open"] | None = None
    untested: str = ""
    because: str = ""
    shown: list[str]

    @model_validator(mode="after")
    def _has_a_verdict(self) -> Sentence:
        is_judged = bool(self.claims or self.judged or self.statements)
        if is_judged == bool(self.word):
            given = "both a word and" if is_judged else "neither a word nor"
            raise ValueError(
                f"got {given} claims, judged or statements, allowed: one of the two, to give a verdict"
            )
        if self.word not in (None, BY_CONSTRUCTION) and not self.because:
            raise ValueError(f"because: missing, allowed: the reason why it is {self.word}")
        if self.word and self.untested:
            raise ValueError(
                f"untested: got {self.untested!r}, allowed: only beside measured parts"
            )
        if self.word != OUT_OF_SCOPE and not self.shown:
            raise ValueError("shown: got none, allowed: one or more notebooks that show it")
        return self

    @property
    def names_judged(self) -> list[str]:
        """The names of the claims that are made of `judged`."""
        return [f"{self.where}, {self.says}, {number}" for number in range(len(self.judged))]


class Sentences(BaseModel, extra="forbid"):
    """A file like params/sentences.yaml."""

    sentences: Annotated[list[Sentence], Field(min_length=1)]


def read_sentences(path: str | Path) -> list[Sentence]:
    """Read the sentences of a file; ValueError names the place, the value and what is allowed."""
    return validate(Sentences, read_params([path]), path).sentences


# Their verdicts ───────────────────────────────────────────────────────────────────────────────────


def extra_claims(sentences: Iterable[Sentence], read: Claims) -> Claims | None:
    """Make claims of the differences that the file of claims does not have, named by sentence and
    number; None if there are none."""
    extra: dict[str, Claim] = {
        name: one for s in sentences for name, one in zip(s.names_judged, s.judged, strict=True)
    }
    return Claims(confidence=read.confidence, claims=extra) if extra else None


def combine_verdicts(words: Iterable[str]) -> str:
    """Combine several verdicts: the word that all have, or how often each word occurs."""
    words = list(words)
    # what holds by construction decides nothing, unless there is nothing else
    drawn = [word for word in words if word != BY_CONSTRUCTION] or words
    if len(set(drawn)) == 1:
        return drawn[0]
    return ", ".join(f"{drawn.count(word)} {word}" for word in dict.fromkeys(drawn))


def sentences_table(
    sentences: Iterable[Sentence], claims: pd.DataFrame, read: Claims, records: Mapping[str, Record]
) -> pd.DataFrame:
    """Make a table with a row for each sentence: `where`, `says`, `verdict`, `because`, `shown` (a list).

    `claims` is what `judge_claims` gives for the claims `read` and the `records`. Verdicts on statements
    of notebooks are those that the notebooks have written (tcs_lab/tables/verdicts.py). "supported"
    becomes "supported in part" if a part of the sentence was not tested. `because` also has what was
    measured, claim by claim, what was not tested, and the differences for which the bootstrap's interval
    gives another verdict.
    """
    sentences = list(sentences)
    found = claims.to_dict("records")
    if (extra := extra_claims(sentences, read)) is not None:
        found += judge_claims(extra, records).to_dict("records")
    row_of = {row["claim"]: row for row in found}
    rows = []
    for s in sentences:
        names = [*s.claims, *s.names_judged]
        reject_unknown(names, row_of, f"claim ({s.where}: {s.says})")
        asked = [row_of[name] for name in names]
        parts = [(_describe(row), _word(row)) for row in asked]
        for notebook, texts in s.statements.items():
            parts += [(text, verdict_on(notebook, text)) for text in texts]
        words = [word for _, word in parts]
        differ = len({word for word in words if word != BY_CONSTRUCTION}) > 1
        shown = parts if differ else parts[: len(names)]  # statements have no numbers
        said = [f"{what} ({word})" if differ else what for what, word in shown if what]
        measured = f"{'. '.join(one[0].upper() + one[1:] for one in said)}." if said else ""
        untested = f"Not tested: {s.untested}." if s.untested else ""
        because = " ".join(filter(None, [measured, untested, s.because, *map(_flag, asked)]))
        verdict = s.word or combine_verdicts(words)
        if untested and verdict == SUPPORTED:
            verdict = f"{SUPPORTED} in part"
        rows.append({"where": s.where, "says": s.says, "verdict": verdict, "because": because,
                     "shown": s.shown})  # fmt: skip
    return pd.DataFrame(rows)


def _word(row: Mapping[str, Any]) -> str:
    """Return a claim's verdict. A claim by construction that does not keep its bound is
    contradicted."""
    if row["verdict"] == BY_CONSTRUCTION and not row["kept"]:
        return "contradicted"
    return str(row["verdict"])


def _describe(row: Mapping[str, Any]) -> str:
    """Return what was measured or counted for a claim, or ""."""
    if math.isnan(row["measured"]):
        return ""
    first, second = row["first"], row["second"]
    if row["measure"] == "accuracy":
        at = [
            f" at η {eta:g}" if eta == HIGH_RATE else "" for eta in (row["eta"], row["second_eta"])
        ]
        return f"{first}{at[0]} − {second}{at[1]}: {format_estimate(row)} points"
    if row["measure"] == "dense_overlap":
        pair = f"{first} − {second}" if second else first
        return f"normalized overlap, {pair}: {format_estimate(row)}"
    what = MEASURED_IN_WORDS[row["measure"]].format(first=first, second=second or "dense training")
    return f"{what}: {format_estimate(row)}"


HIGH_RATE = 0.8  # of the paper's Table 2; its other tables have 0.5, which is not said
MEASURED_IN_WORDS = {
    "uplink": "fewer bits from a client after the warm-up, {first} against {second}",
    "uplink_whole": "fewer bits from a client in the whole training, {first} against {second}",
    "downlink": "fewer bits from the server, {first} against {second}",
    "own_share": "fraction of a client's entries outside of the shared mask, {first}",
}


def _flag(row: Mapping[str, Any]) -> str:
    """Return a note that the bootstrap's interval gives another verdict on a difference, or ""."""
    if not (other := differing_bootstrap_verdict(row)):
        return ""
    difference = f"{row['first']} − {row['second']}"
    return f'For {difference}, the interval of the bootstrap gives "{other}".'


def link(place: str) -> str:
    """Make a Markdown link of `notebook#section`, which is the form that `shown` has."""
    notebook, _, section = place.partition("#")
    number = notebook.split("_")[0]
    return f"[{number}]({notebook}.ipynb)" + (f" {section}" if section else "")
