"""The verdicts of notebooks as data: each notebook writes results/verdicts/<notebook>.json.

A notebook that is run with its own parameters updates its file, if there is one for these parameters.
(tests/execute_notebooks.py makes the first one.) Sentences about the paper and README read these files;
nobody reads what a notebook has printed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, StringConstraints

from tcs_lab.support.errors import validate
from tcs_lab.support.files import write_json
from tcs_lab.support.paths import ROOT

# The one vocabulary of verdicts; `evidence.judging` adds one word for what is counted.
SUPPORTED, CONTRADICTED, OPEN, NOT_MEASURED = WORDS = (
    "supported",
    "contradicted",
    "open",
    "not measured",
)
VERDICTS_FOLDER = ROOT / "results" / "verdicts"

Text = Annotated[str, StringConstraints(min_length=1)]


class NotebookVerdicts(BaseModel, extra="forbid"):
    """A file of results/verdicts: the notebook's parameters, and the verdict on each statement."""

    parameters: dict[str, Any]
    verdicts: dict[Text, Literal["supported", "contradicted", "open", "not measured"]]


def read_verdicts(notebook: str) -> NotebookVerdicts | None:
    """Read what a notebook has written; None if it has not run yet. ValueError for a broken file."""
    path = VERDICTS_FOLDER / f"{notebook}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
    except ValueError as error:
        advice = f"restore the file, or run tests/execute_notebooks.py {notebook}"
        raise ValueError(f"{path}: this is not JSON ({error}); {advice}") from None
    return validate(NotebookVerdicts, content, path)


def write_verdicts(
    notebook: str, parameters: Mapping[str, Any], verdicts: Mapping[str, str]
) -> None:
    """Keep the verdicts of a notebook that ran with its own parameters.

    Statements that the file has and that are missing here stay, since a reader may have run a part
    of the notebook. An unchanged file is not touched. Where the folder can't be written to, one
    line is printed and the notebook goes on.
    """
    kept = read_verdicts(notebook)
    merged = verdicts if kept is None else kept.verdicts | dict(verdicts)
    content = {"parameters": dict(parameters), "verdicts": dict(sorted(merged.items()))}
    if kept is not None and kept.model_dump() == content:
        return
    try:
        write_json(VERDICTS_FOLDER / f"{notebook}.json", content)
    except OSError as error:
        print(f"The verdicts of this notebook were not saved: {error}.")


def verdict_on(notebook: str, statement: str) -> str:
    """Return the verdict of a notebook on one of its statements; "not measured" before it has run.

    ValueError if the notebook has run and makes no such statement.
    """
    found = read_verdicts(notebook)
    if found is None:
        return NOT_MEASURED
    if statement not in found.verdicts:
        allowed = "; ".join(found.verdicts) or "nothing, since it has no statement"
        raise ValueError(f"{notebook}: got the statement {statement!r}, allowed: {allowed}")
    return found.verdicts[statement]
