"""The answers to the later plans: methods at tuned rates, two controls, and a prediction.

params/fair_plan.yaml, params/controls_plan.yaml and params/prediction.yaml say what was asked and how
it is judged. All functions here work with the records that exist. None of them gives an estimate for
a stage of a plan before all of its runs are made, so that nobody judges by what came first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, FiniteFloat

from tcs_lab.evidence.claims import Claim, Claims, load_planned_records
from tcs_lab.evidence.judging import (
    format_bound,
    format_difference,
    format_verdict,
    judge_claims,
    judge_interval,
)
from tcs_lab.runs.index import find_records
from tcs_lab.runs.parameters import plan, read_params
from tcs_lab.runs.plans import Plan, Search, best_of, find_searches, plan_runs, read_plan
from tcs_lab.runs.records import check_same_data, load_records, read_record, record_path
from tcs_lab.runs.runs import Run
from tcs_lab.support.errors import reject_unknown, validate
from tcs_lab.support.paths import ROOT
from tcs_lab.tables.analysis import Comparison, Estimate, holm
from tcs_lab.tables.tables import Record, format_interval, format_number, traffic
from tcs_lab.tables.verdicts import NOT_MEASURED
from tcs_lab.training.configuration import record_file_name
from tcs_lab.training.training import measure_accuracy, read_outcomes

# Methods at tuned rates ───────────────────────────────────────────────────────────────────────────


class Family(BaseModel, extra="forbid"):
    """Methods that are compared with each of some references. Holm's correction is over all of these
    comparisons."""

    schemes: Annotated[list[str], Field(min_length=1)]
    references: Annotated[list[str], Field(min_length=1)]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(one, other) for other in self.references for one in self.schemes if one != other]


class FairAnalysis(BaseModel, extra="forbid"):
    """What params/fair_plan.yaml says under `analysis`."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    no_loss: FiniteFloat
    families: Annotated[dict[str, Family], Field(min_length=1)]


@dataclass(frozen=True)
class TunedScheme:
    """A scheme of a tuned plan, with those of its runs that are made."""

    stage: str
    search: Search
    seeds: list[int]

    @property
    def name(self) -> str:
        return self.search.scheme

    @property
    def results(self) -> str | Path | None:
        """The results folder with its records; None means the project's."""
        return self.search.results

    @cached_property
    def tried(self) -> dict[float, float | None]:
        """Validation accuracy by factor, 0..1; minus infinity if the run diverged, None if it is not made."""
        return self.search.tried()

    @property
    def is_tuned(self) -> bool:
        return None not in self.tried.values()

    @cached_property
    def chosen(self) -> float | None:
        """The best factor; None while a run is missing, or if all of them diverged."""
        return best_of(self.tried)

    @property
    def rate(self) -> float:
        """The learning rate at the chosen factor; nan while none is chosen."""
        if self.chosen is None:
            return math.nan
        return self.search.config(self.chosen, self.seeds[0]).eta

    @property
    def chosen_error(self) -> float:
        """The part of the images that choose which the tuning run at the chosen rate got wrong; nan while
        no rate is chosen."""
        found = None if self.chosen is None else self.tried[self.chosen]
        return math.nan if found is None else 1 - found

    @cached_property
    def scored(self) -> dict[int, Record]:
        """The records at the chosen rate, by seed."""
        return {} if self.chosen is None else self._scored_at(self.chosen)

    def _scored_at(self, factor: float) -> dict[int, Record]:
        configs = {seed: self.search.config(factor, seed) for seed in self.seeds}
        paths = {seed: record_path(config, self.results) for seed, config in configs.items()}
        return {s: read_record(p, configs[s]) for s, p in paths.items() if p.is_file()}

    @property
    def is_complete(self) -> bool:
        """Whether all of its runs are made. If every rate diverged, there is nothing to score."""
        return self.is_tuned and (self.chosen is None or len(self.scored) == len(self.seeds))

    @property
    def diverged(self) -> list[str]:
        """The files of scored runs that diverged, or the remark that all rates did."""
        if self.is_tuned and self.chosen is None:
            return ["every rate that was tried"]
        return [record_file_name(r) for r in self.scored.values() if r["status"] != "finished"]

    @property
    def accuracies(self) -> dict[int, float]:
        """Accuracies by seed, in percent of the images that score; {} if a run diverged."""
        return {} if self.diverged else self._accuracies_of(self.scored)

    @property
    def other_accuracies(self) -> dict[float, dict[int, float]]:
        """Such accuracies at other rates that were tried, of which runs with all seeds exist and
        finished: for instance of an earlier plan, or of this one before its list went on."""
        made = {f: self._scored_at(f) for f in self.tried if f != self.chosen}
        return {
            factor: self._accuracies_of(records)
            for factor, records in made.items()
            if len(records) == len(self.seeds)
            and all(record["status"] == "finished" for record in records.values())
        }

    def _accuracies_of(self, records: Mapping[int, Record]) -> dict[int, float]:
        spans = self.search.tuning.score_on
        return {seed: 100 * measure_accuracy(record, spans) for seed, record in records.items()}


def load_methods(path: str | Path, results: str | Path | None = None) -> list[TunedScheme]:
    """Load the methods of all tuned stages of a plan, in its order."""
    seeds = {stage.stage: stage.seeds for stage in read_plan(path).stages}
    return [
        TunedScheme(stage, search, seeds[stage])
        for stage, searches in find_searches(path, results=results).items()
        for search in searches
    ]


def fair_counts(path: str | Path, results: str | Path | None = None) -> dict[str, int]:
    """Count how many runs of a tuned plan are planned and made, of those that tune and those that score.

    The plan grows: a rate beyond the first ones is planned when the best one is at the list's end."""
    methods = load_methods(path, results)
    tried = [accuracy for method in methods for accuracy in method.tried.values()]
    return {
        "tuning planned": len(tried),
        "tuning made": sum(accuracy is not None for accuracy in tried),
        "scoring planned": sum(len(method.seeds) for method in methods),
        "scoring made": sum(len(method.scored) for method in methods),
    }


def fair_progress(path: str | Path, results: str | Path | None = None) -> str:
    """Say in a sentence how many runs of a tuned plan are planned and made."""
    n = fair_counts(path, results)
    return (
        f"{n['tuning made']} of {n['tuning planned']} tuning runs and {n['scoring made']} of "
        f"{n['scoring planned']} scored runs are made"
    )


def fair_table(path: str | Path, results: str | Path | None = None) -> pd.DataFrame:
    """Make a table with a row for each method of a tuned plan.

    `tried` maps factors to validation accuracies in percent (nan: not made, minus infinity:
    diverged), `chosen` and `rate` are the best factor and its learning rate, `at_end` says whether the
    plan's list of rates ends with it, so that a better one may lie beyond, `n` of `planned` scored
    runs are made, `accuracy` and `deviation` are over them in percent on the images that score,
    `others` maps other factors, of which runs with the same seeds exist, to such accuracies,
    `megabytes_up` and `megabytes_down` are one client's whole run with its dense start, and
    `diverged` names runs. A method of which a run diverged has no accuracy. Before all runs of its
    stage are made it has none either, so that nobody judges by what came first.
    """
    methods = load_methods(path, results)
    whole = complete_stages(methods)
    return pd.DataFrame([_fair_row(method, whole[method.stage]) for method in methods])


def _fair_row(method: TunedScheme, is_whole: bool) -> dict[str, Any]:
    values = list(method.accuracies.values()) if is_whole else []
    flows = [traffic(r) for r in method.scored.values() if r["status"] == "finished"]
    sent = {way: fmean(flow[way] for flow in flows) / 1e6 if flows else math.nan
            for way in ("up", "down")}  # fmt: skip
    grid = method.search.tuning.grid
    others = method.other_accuracies if is_whole else {}
    tried = {f: math.nan if a is None else 100 * a for f, a in method.tried.items()}
    return {
        "stage": method.stage, "scheme": method.name, "tried": tried,
        "chosen": math.nan if method.chosen is None else method.chosen, "rate": method.rate,
        "at_end": method.chosen in (min(grid), max(grid)),
        "n": len(method.scored), "planned": len(method.seeds),
        "accuracy": fmean(values) if values else math.nan,
        "deviation": stdev(values) if len(values) > 1 else math.nan,
        "others": {f: fmean(a.values()) for f, a in others.items()},
        "megabytes_up": sent["up"], "megabytes_down": sent["down"],
        "diverged": ", ".join(method.diverged),
    }  # fmt: skip


def gains_of_tuning(table: pd.DataFrame) -> dict[str, float]:
    """Return how many points higher each scheme of `fair_table` ends at its chosen rate than at factor 1,
    the rate of the main comparison. Schemes without scores at both rates are left out."""
    return {
        row["scheme"]: row["accuracy"] - row["others"][1.0]
        for row in table.to_dict("records")
        if 1.0 in row["others"]
    }


def fair_model(
    methods: Iterable[TunedScheme], groups: Mapping[str, bool] | None = None
) -> Comparison:
    """Return the pooled model of scored runs, by method and seed, with the images that each got
    right. Only the images that score count. `groups` says which methods scatter alike, by name;
    without it, all do."""
    methods, accuracies, right = list(methods), {}, {}
    scored = [record for method in methods for record in method.scored.values()]
    check_same_data(scored, f"scored runs of {', '.join(method.name for method in methods)}")
    for method in methods:
        for seed, accuracy in method.accuracies.items():
            accuracies[method.name, seed] = accuracy
            found = read_outcomes(method.scored[seed])
            assert found is not None  # else there is no accuracy on a part of the images
            spans = method.search.tuning.score_on
            right[method.name, seed] = np.concatenate([found[start:end] for start, end in spans])
    return Comparison(accuracies, right, groups)


def fair_differences(path: str | Path, results: str | Path | None = None) -> pd.DataFrame:
    """Estimate the differences that a tuned plan asks for under `analysis`, one row each.

    `measured`, `low`, `high` in percentage points, `p` of its difference from zero, `holm` corrected
    over all differences of its family, also those that are not measured yet, and `verdict` on "no loss",
    with the fields that `judge_claims` gives a claim on accuracy. The model has the methods of all stages
    of which all runs are made. Where there is no estimate, `reason` says why.
    """
    read = read_plan(path)
    analysis = validate(FairAnalysis, read.analysis, f"{path}: analysis")
    methods = {method.name: method for method in load_methods(path, results)}
    whole = complete_stages(methods.values())
    model = fair_model(m for m in methods.values() if whole[m.stage])
    tables = []
    for name, family in analysis.families.items():
        rows = [_fair_difference(pair, methods, whole, model, analysis) for pair in family.pairs]
        corrected = holm({str(place): row["p"] for place, row in enumerate(rows)})
        tables += [
            {"family": name, **row, "holm": corrected[str(place)]} for place, row in enumerate(rows)
        ]
    return pd.DataFrame(tables)


def complete_stages(methods: Iterable[TunedScheme]) -> dict[str, bool]:
    """Say of each stage whether all of its runs are made."""
    whole: dict[str, bool] = {}
    for method in methods:
        whole[method.stage] = whole.get(method.stage, True) and method.is_complete
    return whole


def _fair_difference(
    pair: tuple[str, str], methods: Mapping[str, TunedScheme], whole: Mapping[str, bool],
    model: Comparison, analysis: FairAnalysis,
) -> dict[str, Any]:  # fmt: skip
    reject_unknown(pair, methods, "method of the plan")
    sides = [methods[name] for name in pair]
    estimate, reason = Estimate(), ""
    if parts := [m.stage for m in sides if not whole[m.stage]]:
        reason = f"not all runs of stage {parts[0]} have been made"
    elif lost := [f"{m.name}: {', '.join(m.diverged)}" for m in sides if m.diverged]:
        reason = f"diverged: {'; '.join(lost)}"
    else:
        estimate = model.estimate({pair[0]: 1, pair[1]: -1}, analysis.confidence)
    bound = "more_than", analysis.no_loss
    word = NOT_MEASURED
    if not math.isnan(estimate.half):
        word = judge_interval(estimate.low, estimate.high, *bound)
    return {
        "first": pair[0], "second": pair[1], "measured": estimate.value, "low": estimate.low,
        "high": estimate.high, "half": estimate.half, "freedom": estimate.freedom,
        "bootstrap": estimate.bootstrap, "n": estimate.n, "p": estimate.p(0.0), "reason": reason,
        "measure": "accuracy", "bound": bound[0], "bound_value": bound[1], "verdict": word,
    }  # fmt: skip


# Two controls ─────────────────────────────────────────────────────────────────────────────────────


class Question(Claim, extra="forbid"):
    """A question of params/controls_plan.yaml: a claim on accuracy, with the stage that answers it."""

    measure: Literal["accuracy"] = "accuracy"
    stage: str


class ControlAnalysis(BaseModel, extra="forbid"):
    """What params/controls_plan.yaml says under `analysis`."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    questions: Annotated[dict[str, Question], Field(min_length=1)]


def control_answers(path: str | Path, results: str | Path | None = None) -> pd.DataFrame:
    """Answer the questions of a plan with controls. Each has a row as `judge_claims` gives it: `measured`
    with its interval, `bound`, `verdict`, the record files, and further `question`, `stage`, `made`
    and `stage_planned`.

    The model has the runs of the question's stage. If a scheme of the question has no runs there, as
    TCS has none beside its random mask, the judged records of the profile are in the model, too.
    """
    read = read_plan(path)
    analysis = validate(ControlAnalysis, read.analysis, f"{path}: analysis")
    runs = plan_runs(path, results=results)
    seeds = {stage.stage: len(stage.seeds) for stage in read.stages}
    rows = []
    for name, question in analysis.questions.items():
        reject_unknown([question.stage], runs, f"stage ({path}: {name})")
        configs = runs[question.stage]
        found, planned = load_records(configs, results), len({config.digest for config in configs})
        whole = len(found) == planned
        claim = Claim(**question.model_dump(exclude={"stage", "n"}), n=seeds[question.stage])
        alone = Claims(confidence=analysis.confidence, claims={name: claim})
        records = _add_judged_records(path, read, question, found, results) if whole else {}
        (row,) = judge_claims(alone, records).to_dict("records")
        if not whole:
            row["reason"] = f"{len(found)} of {planned} runs have been made"
        rows.append({"question": name, "stage": question.stage, "made": len(found),
                     "stage_planned": planned, **row})  # fmt: skip
    return pd.DataFrame(rows)


def _add_judged_records(
    path: str | Path, read: Plan, question: Question, found: Mapping[str, Record],
    results: str | Path | None,
) -> dict[str, Record]:  # fmt: skip
    """Return the records of a stage, with the judged ones if a scheme of the question is not among
    them."""
    there = {r["config"]["scheme"]["name"] for r in found.values()}
    if {name for name, _ in question.schemes} <= there:
        return dict(found)
    profile = read_params([Path(path).parent / str(read.profile)])["profile"]
    joined = load_planned_records(profile, results)[1] | dict(found)
    check_same_data(joined.values(), f"runs of stage {question.stage} and judged ones")
    return joined


# A prediction ─────────────────────────────────────────────────────────────────────────────────────

PAPER_RUNS = ("paper", "gpu")  # profiles that may hold runs of the paper's size
PAPER_RATE = 0.5  # Table 1's


def compare_prediction(path: str | Path, results: str | Path | None = None) -> pd.DataFrame:
    """Compare a prediction with what was measured, in a row for each version and scheme.

    `points` is the prediction, with `low` and `high` of its interval; `paper` is what the paper prints,
    and `measured` the difference to the Baseline in runs with the paper's settings, over `n` seeds (nan
    and 0 as long as there are none). Two runs are compared if they have the same seed and data.
    """
    read, rows = read_params([path]), []
    base = _full_length_accuracies("Baseline", results)
    for version in read["versions"]:
        for name, loss in version["loses"].items():
            ends = _full_length_accuracies(name, results)
            gaps = [end - base[run] for run, end in ends.items() if run in base]
            rows.append({
                "date": str(version["date"]), "made_by": version["made_by"], "scheme": name,
                "points": math.nan if loss["points"] is None else loss["points"],
                "low": loss["interval"][0], "high": loss["interval"][1],
                "paper": read.get("paper", {}).get(name, math.nan),
                "measured": fmean(gaps) if gaps else math.nan, "n": len(gaps),
            })  # fmt: skip
    return pd.DataFrame(rows)


def _full_length_accuracies(name: str, results: str | Path | None) -> dict[tuple[str, int], float]:
    """Final accuracies of a scheme in percent, by data and seed, in runs with the paper's settings. Which
    kind of CIFAR-10 they have is left open."""
    paper = read_params([ROOT / "params/paper.yaml"]) | {"learning_rate": PAPER_RATE}
    ends = {}
    for profile in PAPER_RUNS:
        found = find_records(Run, results, profile=profile, status="finished", scheme=name)
        for record in found.values():
            config, data = record["config"], record["provenance"]["fingerprint"]
            kind = {key: config[key] for key in ("dataset", "data_label")}
            (same,) = plan(paper | kind | {"schemes": [name], "seeds": [config["seed"]]})
            if record["digest"] == same.digest:
                ends[data, config["seed"]] = 100 * record["rows"][-1]["accuracy"]
    return ends


# For a person ─────────────────────────────────────────────────────────────────────────────────────


def readable_fair(table: pd.DataFrame) -> pd.DataFrame:
    """`fair_table` as a person reads it, with a column for each factor that some method tries."""
    rows = []
    factors = sorted({factor for tried in table["tried"] for factor in tried})
    for row in table.to_dict("records"):
        others = [f"× {factor:g}: {accuracy:.2f}" for factor, accuracy in row["others"].items()]
        tried = {f"rate × {f:g}, %": _tried(row["tried"][f]) if f in row["tried"] else "–"
                 for f in factors}  # fmt: skip
        both = row["megabytes_up"] + row["megabytes_down"]
        level = f"{row['accuracy']:.2f}"
        level += f" ± {row['deviation']:.2f}" if not math.isnan(row["deviation"]) else ""
        level = "–" if math.isnan(row["accuracy"]) else level
        rows.append({
            "method": row["scheme"], "stage": row["stage"], **tried,
            "chosen rate": _chosen(row),
            "scored runs": f"{row['n']} of {row['planned']}",
            "score, %": f"diverged: {row['diverged']}" if row["diverged"] else level,
            "scores at other rates, %": ", ".join(others) or "–",
            "MB both ways": format_number(both, 4) if both > 0 else "–",
        })  # fmt: skip
    return pd.DataFrame(rows)


def _chosen(row: Mapping[str, Any]) -> str:
    if math.isnan(row["rate"]):
        return "–"
    ends = ", where the list ends" if row["at_end"] else ""
    return f"{row['rate']:g} (× {row['chosen']:g}{ends})"


def _tried(accuracy: float) -> str:
    if math.isnan(accuracy):
        return "not made"
    return "diverged" if math.isinf(accuracy) else f"{accuracy:.2f}"


def readable_fair_differences(table: pd.DataFrame) -> pd.DataFrame:
    """`fair_differences` as a person reads it: those that are measured."""
    rows = [
        {"family": row["family"], "difference, points": f"{row['first']} − {row['second']}",
         "ours": f"{format_interval(row['measured'], row['low'], row['high'])}, n = {row['n']}",
         "p": _p(row["p"]), "p by Holm": _p(row["holm"]), "no loss": f"**{format_verdict(row)}**"}
        for row in table[table["measured"].notna()].to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _p(p: float) -> str:
    if math.isnan(p):
        return "–"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def readable_answers(table: pd.DataFrame) -> pd.DataFrame:
    """`control_answers` as a person reads them."""
    rows = [
        {"question": row["says"], "supported if": format_bound(row),
         "runs made (all of this part of the plan)": f"{row['made']} of {row['stage_planned']}",
         "difference, points": f"{row['first']} − {row['second']}: {format_difference(row)}",
         "answer": f"**{format_verdict(row)}**"}
        for row in table.to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def readable_prediction(table: pd.DataFrame) -> pd.DataFrame:
    """`compare_prediction` as a person reads it."""
    rows = []
    for row in table.to_dict("records"):
        points = _points(row["points"])
        rows.append({
            "made on": row["date"], "by": row["made_by"], "method": row["scheme"],
            "predicted difference to the Baseline, points": f"{points} ({_points(row['low'])} to {_points(row['high'])})",
            "the paper": _points(row["paper"]), "measured": _format_measured(row),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _points(value: float) -> str:
    return format_interval(value, math.nan, math.nan)


def _format_measured(row: Mapping[str, Any]) -> str:
    if not row["n"]:
        return "not tested at the paper's length"
    inside = row["low"] <= row["measured"] <= row["high"]
    where = "inside" if inside else "outside"
    return f"{_points(row['measured'])}, n = {row['n']}, {where} of the interval"
