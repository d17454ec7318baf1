"""The paper's empirical sentences, each with a verdict that is found, not typed in, and its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, Field, FiniteFloat, model_validator

from tcs_lab.evidence.claims import BY_CONSTRUCTION, Claim, Claims, Side, judged, other_by_bootstrap
from tcs_lab.runs.parameters import read_params
from tcs_lab.support.errors import reject_unknown, validated
from tcs_lab.tables.tables import Record
from tcs_lab.tables.verdicts import verdict_on

OUT_OF_SCOPE = "out of scope"


# The file ─────────────────────────────────────────────────────────────────────────────────────────


class Beside(BaseModel, extra="forbid"):
    """A difference of accuracies that params/claims.yaml does not have."""

    first: Side
    second: Side
    at_least: FiniteFloat | None = None
    more_than: FiniteFloat | None = None

    def claim(self, says: str) -> Claim:
        return Claim(says=says, measure="accuracy", **self.model_dump())


class Sentence(BaseModel, extra="forbid"):
    """One sentence: see the head of params/sentences.yaml."""

    where: str
    says: str
    claims: list[str] = []
    judged: list[Beside] = []
    statements: dict[str, list[str]] = {}
    word: Literal["by construction", "contradicted", "out of scope", "open"] | None = None
    because: str = ""
    shown: list[str]

    @model_validator(mode="after")
    def _has_a_verdict(self) -> Sentence:
        found = bool(self.claims or self.judged or self.statements)
        if found == bool(self.word):
            raise ValueError("allowed: a word, or claims, judged and statements that decide it")
        if self.word not in (None, BY_CONSTRUCTION) and not self.because:
            raise ValueError(f"because: missing; allowed: why it is {self.word}")
        if self.word != OUT_OF_SCOPE and not self.shown:
            raise ValueError("shown: got none, allowed: one notebook or more")
        return self


class Sentences(BaseModel, extra="forbid"):
    """A file like params/sentences.yaml."""

    sentences: Annotated[list[Sentence], Field(min_length=1)]


def read_sentences(path: str | Path) -> list[Sentence]:
    """The sentences of a file; ValueError names the place, the value and what is allowed."""
    return validated(Sentences, read_params([path]), path).sentences


# Their verdicts ───────────────────────────────────────────────────────────────────────────────────


def beside(sentences: Iterable[Sentence], read: Claims) -> Claims | None:
    """The differences that the claims' file lacks, as claims named by sentence and number."""
    extra = {
        f"{s.where}, {s.says}, {number}": one.claim(s.says)
        for s in sentences for number, one in enumerate(s.judged)
    }  # fmt: skip
    return Claims(confidence=read.confidence, claims=extra) if extra else None


def together(words: Iterable[str]) -> str:
    """Several verdicts as one: the word of all, or how often each word came."""
    found = list(words)
    drawn = [word for word in found if word != BY_CONSTRUCTION] or found  # counting decides nothing
    if len(set(drawn)) == 1:
        return drawn[0]
    return ", ".join(f"{drawn.count(word)} {word}" for word in dict.fromkeys(drawn))


def sentences_table(
    sentences: Iterable[Sentence], claims: pd.DataFrame, read: Claims, records: Mapping[str, Record]
) -> pd.DataFrame:
    """One row a sentence: `where`, `says`, `verdict`, `because`, `shown` (a list).

    `claims` is what `judged` gives for the claims `read` and the `records`. Verdicts on statements
    of notebooks are those that the notebooks have written (tcs_lab/tables/verdicts.py). `because` also
    names the differences for which the bootstrap's interval says another word.
    """
    sentences = list(sentences)
    found = claims.to_dict("records")
    if (extra := beside(sentences, read)) is not None:
        found += judged(extra, records).to_dict("records")
    word_of = {row["claim"]: _word(row) for row in found}
    flag_of = {row["claim"]: _flag(row) for row in found}
    rows = []
    for s in sentences:
        names = [*s.claims, *(f"{s.where}, {s.says}, {n}" for n in range(len(s.judged)))]
        reject_unknown(names, word_of, f"claim ({s.where}: {s.says})")
        words = [word_of[name] for name in names]
        for notebook, texts in s.statements.items():
            words += [verdict_on(notebook, text) for text in texts]
        flags = [flag_of[name] for name in names if flag_of[name]]
        because = "; ".join([s.because.rstrip(".") if flags else s.because, *flags]).lstrip("; ")
        rows.append({"where": s.where, "says": s.says, "verdict": s.word or together(words),
                     "because": because, "shown": s.shown})  # fmt: skip
    return pd.DataFrame(rows)


def _word(row: Mapping[str, Any]) -> str:
    """A claim's verdict; of one by construction whether it keeps its bound counts."""
    if row["verdict"] == BY_CONSTRUCTION and not row["kept"]:
        return "contradicted"
    return str(row["verdict"])


def _flag(row: Mapping[str, Any]) -> str:
    """What the bootstrap's interval says of a difference, if it is another word; else ""."""
    other = other_by_bootstrap(row) if "bootstrap" in row else ""
    difference = f"{row.get('first')} − {row.get('second')}"
    return f"for {difference} the bootstrap's interval says {other}" if other else ""


def link(place: str) -> str:
    """`notebook#section`, as `shown` has it, as Markdown."""
    notebook, _, section = place.partition("#")
    number = notebook.split("_")[0]
    return f"[{number}]({notebook}.ipynb)" + (f" {section}" if section else "")
