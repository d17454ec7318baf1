"""One setting at a time: sweeps and what to choose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_core import Scheme, _check_value, _reject_unknown, _shown
from tcs_lab.claims import recorded
from tcs_lab.settings import (
    RUN_KEYS,
    SCHEME_KEYS,
    WHERE_KEYS,
    RunConfig,
    _named_with,
    plan,
    read_params,
)
from tcs_lab.tables import _digits, _ours, _summary_row

# Sensitivity: one setting at a time ──────────────────────────────────────────────────────────────

_SETTING_KEYS = {"label", "values", "named", "schemes", "paper", "given"}


def read_sensitivity(path: str | Path) -> dict[str, Any]:
    """A file like params/sensitivity.yaml, checked: `margin`, `base` and `settings`.

    Raises ValueError naming the file, the setting, the key, its value and what is allowed.
    """
    sweep = read_params([path])
    try:
        _check_sweep(sweep)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return sweep


def _check_sweep(sweep: dict[str, Any]) -> None:
    _reject_unknown(sweep, {"margin", "base", "settings"}, "key")
    points = {"kind": float, "allowed": "points from 0 to 100", "ok": lambda v: 0 <= v <= 100}
    _check_value("margin", sweep.get("margin"), points)
    base, settings = sweep.get("base"), sweep.get("settings")
    if not isinstance(base, dict):
        raise ValueError(f"base: got {_shown(base)}, allowed: a mapping of parameters")
    plan(base)
    if not isinstance(settings, dict) or not settings:
        raise ValueError(f"settings: got {_shown(settings)}, allowed: a mapping from names")
    for name, setting in settings.items():
        try:
            _check_setting(name, setting)
        except ValueError as error:
            raise ValueError(f"{_shown(name)}: {error}") from error


def _check_setting(name: Any, setting: Any) -> None:
    if not isinstance(setting, dict) or "label" not in setting:
        raise ValueError(f"got {_shown(setting)}, allowed: a mapping with label and values")
    _reject_unknown(setting, _SETTING_KEYS, "key")
    if ("values" in setting) == ("named" in setting):
        raise ValueError("allowed: either values or named")
    for key, kind, allowed in (("label", str, "text"), ("given", bool, "true or false")):
        if not isinstance(setting.get(key, kind()), kind):
            raise ValueError(f"{key}: got {_shown(setting[key])}, allowed: {allowed}")
    check = _check_values if "values" in setting else _check_named
    check(name, setting)
    shown = _as_shown(setting)
    if "paper" in setting and _word(setting["paper"]) not in shown:
        got = _shown(setting["paper"])
        raise ValueError(f"paper: got {got}, allowed: one of {', '.join(shown)}, or no such key")


def _check_values(name: Any, setting: dict[str, Any]) -> None:
    varied = {f.name: f for cls in (Scheme, RunConfig) for f in dataclasses.fields(cls)}
    allowed = SCHEME_KEYS | RUN_KEYS - WHERE_KEYS
    if name not in allowed:
        raise ValueError(f"is no parameter that values can be given for: {', '.join(allowed)}")
    values, schemes = setting["values"], setting.get("schemes", ["TCS"])
    if not isinstance(values, list | dict) or len(values) < 2:
        got = _shown(values)
        raise ValueError(f"values: got {got}, allowed: a list, or word: value, of two or more")
    for value in values.values() if isinstance(values, dict) else values:
        _check_value(name, value, dict(varied[name].metadata))
    if not isinstance(schemes, list) or not schemes:
        raise ValueError(f"schemes: got {_shown(schemes)}, allowed: a list of scheme names")
    for scheme in schemes:
        _named_with(scheme, {})


def _check_named(name: Any, setting: dict[str, Any]) -> None:
    named = setting["named"]
    allowed = {f.name for f in dataclasses.fields(Scheme)} - {"name"}
    if name not in allowed:
        raise ValueError(f"is nothing that a scheme's name says: {', '.join(sorted(allowed))}")
    if "schemes" in setting:
        raise ValueError("schemes: allowed only beside values")
    if not isinstance(named, dict) or len(named) < 2:
        raise ValueError(f"named: got {_shown(named)}, allowed: value: scheme, two or more")
    for value, scheme in named.items():
        if (real := getattr(_named_with(scheme, {}), name)) != value:
            raise ValueError(f"named: {scheme} has {_shown(real)}, not {_shown(value)}")


def _word(value: Any) -> str:
    if type(value) not in (str, int, float):
        raise ValueError(f"got {_shown(value)}, allowed: numbers, or word: value")
    return value if isinstance(value, str) else f"{value:g}"


def _trials(curve: pd.DataFrame) -> str:
    """How many trials its points have: "3", or "1 to 3"."""
    return " to ".join(map(str, sorted({curve["n"].min(), curve["n"].max()})))


def _as_shown(setting: dict[str, Any]) -> list[str]:
    """The values as tables and figures write them, in order."""
    words = [_word(value) for value in setting.get("values", setting.get("named"))]
    if len(set(words)) < len(words):
        raise ValueError(f"values: got {', '.join(words)}, allowed: each once")
    return words


def sensitivity_plan(
    sweep: dict[str, Any], params: dict[str, Any], name: str
) -> dict[tuple[str, str], list[RunConfig]]:
    """The runs of one setting: value as shown and scheme's name -> its runs, seed by seed.

    `params` is a profile. A run that several settings ask for has one record name.
    """
    if name not in sweep["settings"]:
        known = ", ".join(sweep["settings"])
        raise ValueError(f"setting: got {_shown(name)}, allowed: {known}")
    setting = sweep["settings"][name]
    if "named" in setting:
        changes = [{"schemes": [scheme]} for scheme in setting["named"].values()]
    else:
        values, own = setting["values"], {k: v for k, v in setting.items() if k == "schemes"}
        values = values.values() if isinstance(values, dict) else values
        changes = [{name: value} | own for value in values]
    points: dict[tuple[str, str], list[RunConfig]] = {}
    for shown, change in zip(_as_shown(setting), changes, strict=True):
        try:
            configs = plan(sweep["base"] | params | change)
        except ValueError as error:
            raise ValueError(f"{name} {shown}: {error}") from error
        for config in configs:
            points.setdefault((shown, config.scheme.name), []).append(config)
    return points


def sensitivity_table(
    sweep: dict[str, Any], params: dict[str, Any], names: Iterable[str] | None = None,
    results: str | Path | None = None,
) -> pd.DataFrame:  # fmt: skip
    """One row a value (and scheme) of every setting, from the records that are there: those whose
    seed all values of the setting have, so that none is compared with luckier seeds.

    Accuracy over seeds is 0..1; a value with a diverged seed has no mean. Megabytes are one
    client's in the whole run, mean over seeds, "warmup" the dense part of both ways.
    """
    rows = []
    for name in sweep["settings"] if names is None else names:
        plans = sensitivity_plan(sweep, params, name)
        found = {point: recorded(plan, results, diverged=True) for point, plan in plans.items()}
        alike = _of_common_seeds(found)
        rows += [_sensitivity_row(name, *point, records) for point, records in alike.items()]
    return pd.DataFrame(rows)


def _of_common_seeds(found: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Of each point's records those with a seed that all points with records have, if any is."""
    seeds = [{r["config"]["seed"] for r in group.values()} for group in found.values() if group]
    common = set.intersection(*seeds) if seeds else set()
    return {
        point: {f: r for f, r in group.items() if not common or r["config"]["seed"] in common}
        for point, group in found.items()
    }


def _sensitivity_row(
    name: str, shown: str, scheme: str, records: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    row = _summary_row(scheme, list(records.values()), None) if records else {}
    numbers = ("accuracy", "accuracy_std", "megabytes_up", "megabytes_down", "megabytes_warmup")
    return {
        "setting": name,
        "value": shown,
        "scheme": scheme,
        "n": row.get("n", 0),
        "diverged": row.get("diverged", 0),
        **{key: row.get(key, math.nan) for key in numbers},
        "records": " ".join(sorted(records)),
    }


def readable_sensitivity(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a sensitivity table as a person reads them; the files stay in the csv."""
    rows = [
        {
            "Setting": r.setting,
            "Value": r.value,
            "Scheme": r.scheme,
            "Accuracy %": _ours(r),
            "n": str(r.n),
            "MB up": _digits(r.megabytes_up),
            "MB down": _digits(r.megabytes_down),
            "of both: warm-up": _digits(r.megabytes_warmup),
        }
        for r in table.itertuples()
    ]
    return pd.DataFrame(rows)


def sensitivity_curves(rows: pd.DataFrame, setting: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """The rows of one setting that have a record, a curve for each scheme; schemes that are
    themselves the values share one. Empty if fewer than two values have a record."""
    rows = rows[rows["n"] + rows["diverged"] > 0]
    if rows["value"].nunique() < 2:
        return {}
    if "named" in setting:
        return {" … ".join(rows["scheme"].iloc[[0, -1]]): rows}
    return {name: curve for name, curve in rows.groupby("scheme", sort=False)}


def cheapest_near_best(curve: pd.DataFrame, margin: float) -> tuple[Any, Any] | None:
    """The row to choose and the most accurate one. None without a mean and bytes to go by.

    Chosen are the fewest bytes both ways among all accuracies within `margin` percentage points of
    the best, or within the best one's standard deviation if that is more.
    """
    cost = (curve["megabytes_up"] + curve["megabytes_down"]).dropna()
    curve = curve.loc[cost.index].dropna(subset="accuracy")
    if curve.empty:
        return None
    best = curve.loc[curve["accuracy"].idxmax()]
    deviation = 0.0 if math.isnan(best["accuracy_std"]) else best["accuracy_std"]
    floor = best["accuracy"] - max(margin / 100, deviation) - 1e-12
    near = curve[curve["accuracy"] >= floor].sort_values("accuracy", ascending=False)
    return near.loc[cost[near.index].idxmin()], best


def sensitivity_choices(table: pd.DataFrame, sweep: dict[str, Any]) -> pd.DataFrame:
    """What `cheapest_near_best` chooses, a row a curve; of what is given, what the worst costs."""
    rows = []
    for name, setting in sweep["settings"].items():
        curves = sensitivity_curves(table[table["setting"] == name], setting)
        for scheme, curve in curves.items():
            if found := cheapest_near_best(curve, sweep["margin"]):
                rows.append(_choice(name, scheme, curve, setting, *found))
    return pd.DataFrame(rows)


def _choice(
    name: str, scheme: str, curve: pd.DataFrame, setting: dict[str, Any], chosen: Any, best: Any
) -> dict[str, str]:
    """One line of text: the most accurate value, the chosen one, and the differences."""
    if setting.get("given"):
        chosen = curve.loc[curve["accuracy"].idxmin()]
    cost = [_digits(row["megabytes_up"] + row["megabytes_down"]) for row in (chosen, best)]
    points = 100 * (chosen["accuracy"] - best["accuracy"])
    return {
        "Setting": name,
        "Scheme": scheme,
        "Most accurate": f"{best['value']} ({_ours(best)} %)",
        "Choose": f"given; worst: {chosen['value']}" if setting.get("given") else chosen["value"],
        "Points": f"{points:+.2f}".replace("-", "−") if points else "0",
        "MB both ways": " instead of ".join(dict.fromkeys(cost)),
        "Paper": _word(setting["paper"]) if "paper" in setting else "–",
        "n": _trials(curve),
    }
