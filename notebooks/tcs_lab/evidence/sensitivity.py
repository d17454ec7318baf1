"""One setting at a time: the file of a sweep, the runs that it plans, and the table of their records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BaseModel, Field, model_validator

from tcs_core import Scheme
from tcs_lab.runs.parameters import SCHEME_KEYS, plan, read_params
from tcs_lab.runs.records import load_records
from tcs_lab.support.errors import format_value, validate
from tcs_lab.tables.tables import format_accuracy, format_four_digits, keep_measured, summary
from tcs_lab.training.configuration import RUN_KEYS, WHERE_KEYS, RunConfig


class Setting(BaseModel, extra="forbid"):
    """What is varied, and how: see the head of params/sensitivity.yaml."""

    label: str
    values: list | dict | None = None
    named: dict[Any, str] | None = None
    schemes: Annotated[list[str], Field(min_length=1)] | None = None
    paper: str | float | None = None

    @model_validator(mode="after")
    def _can_be_varied(self) -> Setting:
        if (self.values is None) == (self.named is None):
            given = "both" if self.values else "neither"
            raise ValueError(f"got {given} of values and named, allowed: one of them")
        if self.named and self.schemes:
            raise ValueError(
                f"schemes: got {format_value(self.schemes)} together with named, allowed: only with values"
            )
        if len(self.choices) < max(2, len(self._given)):
            raise ValueError(
                f"got the values {format_value(list(self.choices))}, allowed: two or more different ones"
            )
        if self.marked not in (None, *self.choices):
            allowed = ", ".join(self.choices)
            raise ValueError(f"paper: got {format_value(self.paper)}, allowed: one of {allowed}")
        return self

    @property
    def _given(self) -> list | dict:
        return self.values or self.named or []

    @property
    def marked(self) -> str | None:
        """The paper's choice, as it is written; None if it is not among the values."""
        return None if self.paper is None else _word(self.paper)

    @property
    def choices(self) -> dict[str, Any]:
        """The values, or schemes, by the words that tables and figures write for them."""
        given = self._given
        pairs = given.items() if isinstance(given, dict) else zip(given, given, strict=True)
        return {_word(word): value for word, value in pairs}


def _word(value: Any) -> str:
    if type(value) not in (str, int, float):
        raise ValueError(
            f"got {format_value(value)}, allowed: a number, a text, or a mapping from words to values"
        )
    return value if isinstance(value, str) else f"{value:g}"


class SensitivitySweep(BaseModel, extra="forbid"):
    """A file like params/sensitivity.yaml."""

    base: dict[str, Any]
    settings: Annotated[dict[str, Setting], Field(min_length=1)]

    @model_validator(mode="after")
    def _can_be_planned(self) -> SensitivitySweep:
        for name, setting in self.settings.items():
            schemes = {field.name for field in dataclasses.fields(Scheme)} - {"name"}
            allowed = schemes if setting.named else SCHEME_KEYS | RUN_KEYS - WHERE_KEYS
            if name not in allowed:
                raise ValueError(
                    f"settings: got {format_value(name)}, allowed: {', '.join(sorted(allowed))}"
                )
            for value, scheme in (setting.named or {}).items():
                if (real := getattr(Scheme.named(scheme), name)) != value:
                    raise ValueError(
                        f"{name}: got {format_value(value)} for {scheme}, allowed: {format_value(real)}, as it has"
                    )
            sensitivity_plan(self, {}, name)
        return self


def read_sensitivity(path: str | Path) -> SensitivitySweep:
    """Read the file of a sweep; ValueError names the file, the setting, its value and what is allowed."""
    return validate(SensitivitySweep, read_params([path]), path)


def sensitivity_plan(
    sweep: SensitivitySweep, params: dict[str, Any], name: str
) -> dict[tuple[str, str], list[RunConfig]]:
    """Plan the runs of one setting: the value as shown and the scheme's name map to the runs, seed by
    seed. `params` is a profile. A run that several settings ask for has one record."""
    if name not in sweep.settings:
        raise ValueError(f"setting: got {format_value(name)}, allowed: {', '.join(sweep.settings)}")
    setting = sweep.settings[name]
    own = {"schemes": setting.schemes} if setting.schemes else {}
    points: dict[tuple[str, str], list[RunConfig]] = {}
    for word, value in setting.choices.items():
        change = {"schemes": [value]} if setting.named else {name: value} | own
        try:
            configs = plan(sweep.base | params | change)
        except ValueError as error:
            raise ValueError(f"{name} {word}: {error}") from error
        for config in configs:
            points.setdefault((word, config.scheme.name), []).append(config)
    return points


def sensitivity_table(
    sweep: SensitivitySweep, params: dict[str, Any], names: Iterable[str] | None = None,
    results: str | Path | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Make a table with a row for every value (and scheme) of each setting, from the records that exist.

    If there are seeds that all values of a setting with records have, only these count, so that no
    value is compared with luckier seeds. Accuracies, over the seeds, are 0..1; a value with a diverged seed has no mean. Megabytes
    are those of one client in the whole run, means over seeds; "warmup" is the part of both
    directions that the warm-up took.
    """
    rows = []
    for name in sweep.settings if names is None else names:
        plans = sensitivity_plan(sweep, params, name)
        found = {point: load_records(runs, results) for point, runs in plans.items()}
        alike = _of_common_seeds(found)
        rows += [_row(name, word, scheme, group) for (word, scheme), group in alike.items()]
    return pd.DataFrame(rows)


def best_values(found: Mapping[tuple[str, str], dict[str, dict[str, Any]]]) -> dict[str, str]:
    """For each scheme, the value (as written) with the highest final accuracy of seed 0. The points are
    those of `sensitivity_plan`, each with its records by file. A diverged run has no accuracy."""
    tried: dict[str, dict[str, float]] = {}
    for (word, scheme), group in found.items():
        for record in group.values():
            if record["config"]["seed"] == 0 and record["status"] == "finished":
                tried.setdefault(scheme, {})[word] = record["rows"][-1]["accuracy"]
    return {scheme: max(words, key=words.__getitem__) for scheme, words in tried.items()}


def _of_common_seeds(found: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Keep of each point's records those with a seed that all points with records have, if there is
    such a seed."""
    seeds = [{r["config"]["seed"] for r in group.values()} for group in found.values() if group]
    common = set.intersection(*seeds) if seeds else set()
    return {
        point: {f: r for f, r in group.items() if not common or r["config"]["seed"] in common}
        for point, group in found.items()
    }


NUMBERS = ("accuracy", "accuracy_std", "megabytes_up", "megabytes_down", "megabytes_warmup")


def _row(name: str, word: str, scheme: str, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    row = summary(records.values()).iloc[0] if records else {}
    return {
        "setting": name, "value": word, "scheme": scheme,
        "n": row.get("n", 0), "diverged": row.get("diverged", 0),
        **{key: row.get(key, math.nan) for key in NUMBERS},
        "records": " ".join(sorted(records)),
    }  # fmt: skip


def readable_sensitivity(table: pd.DataFrame) -> pd.DataFrame:
    """Return the measured rows of a sensitivity table, as a person reads them; the csv also names
    the files."""
    rows = [
        {"Setting": r.setting, "Value": r.value, "Scheme": r.scheme, "Accuracy %": format_accuracy(r),
         "n": str(r.n), "MB up": format_four_digits(r.megabytes_up), "MB down": format_four_digits(r.megabytes_down),
         "MB of the warm-up": format_four_digits(r.megabytes_warmup)}
        for r in keep_measured(table).itertuples()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=_COLUMNS)


_COLUMNS = ("Setting", "Value", "Scheme", "Accuracy %", "n", "MB up", "MB down",
            "MB of the warm-up")  # fmt: skip
