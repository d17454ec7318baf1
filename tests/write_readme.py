"""Write README.md and results/evidence/README.md with the numbers of the stored runs, and draw their pictures.

    uv run python tests/write_readme.py

The texts are Jinja templates in tests/pages. They use the functions and values of `context` below.
`check_words` checks what they say without numbers. test_readme.py compares the stored pages.
"""

import base64
import math
import re
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import pandas as pd
import tcs_lab as lab
from tcs_lab import compare
from tcs_lab.evidence import fair
from tcs_lab.evidence.planned_model import leave_out_gpu_seeds
from tcs_lab.runs.plans import jobs_to_follow, plan_jobs
from tcs_lab.studies import frontier, links, optimizers
from tcs_lab.tables.verdicts import CONTRADICTED, OPEN, SUPPORTED
from tcs_lab.teaching.pictures import draw_round

import tcs_core as tcs

Record = dict[str, Any]
Row = dict[str, Any]  # of a difference: measured, low and high in percentage points, and mostly n
ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # a page: its template
    ROOT / "README.md": "README.md.jinja",
    ROOT / "results/evidence/README.md": "evidence.md.jinja",
}
EVIDENCE_PLAN = ROOT / "params/evidence_plan.yaml"
FAIR_PLAN = ROOT / "params/fair_plan.yaml"
CONTROLS_PLAN = ROOT / "params/controls_plan.yaml"
PROFILE = "evidence"  # of the main comparison


# Pages ────────────────────────────────────────────────────────────────────────────────────────────


def render(page: Path) -> str:
    """Return the text of a page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "tests/pages"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    words = {2: "two", 3: "three", 4: "four", 5: "five", 7: "seven", 20: "twenty"}
    environment.filters |= {"f": format, "words": lambda n: words.get(n, f"{n:,}")}
    return environment.get_template(PAGES[page]).render(context())


@cache
def context() -> dict[str, Any]:
    """Return what the templates may use, after a check of what they say in words."""
    check_words()
    functions = (
        gap, on_cpus, on_track, claim, full_size, gain_at_twice_the_rate,
        interval, ends, signed, points, ended, answer, seeds, mean_accuracy, paper_accuracy, in_the_paper,
        paper_factor, fewer_bits_after_start, fewer_bytes, bootstrap_widths, stored_point,
        glance_table, compared_table, local_steps_table, tuned_table, tuned_summary, describe_gains, settings_table, notebooks_table,
        plans_table,
        evidence_plans_table, costs_table,
    )  # fmt: skip
    scheme, (rows_made, rows_planned) = tcs.Scheme.named("TCS"), count_rows()
    tuned = tuned_gaps()
    return {function.__name__: function for function in functions} | {
        "config": drawn()["FedAvg"][0]["config"],
        "shared_percent": f"{100 * scheme.phi_global:g}",
        "own_percent": f"{100 * scheme.phi_local:g}",
        "both_percent": f"{100 * (scheme.phi_global + scheme.phi_local):g}",
        "megabytes_picture": f"{MEGABYTES_PATH.relative_to(ROOT).as_posix()}.png",
        "mask": control("mechanism"),
        "old_mask": control("freshness"),
        "regime": regime(),
        "tuned": tuned,
        "tuned_answer": TUNED_ANSWERS[tuned["TCS", "Baseline"]["verdict"]] if tuned else "",
        "tuned_keeps": bool(tuned) and tuned["TCS", "Baseline"]["verdict"] == SUPPORTED,
        "tuned_accuracy": tuned_methods_table().set_index("scheme")["accuracy"],
        "tuned_otherwise": tuned_otherwise(),
        "gained": gains_of_tuning(),
        "tuned_left": tuned_methods_left(),
        "tuning_images": tuning_images(),
        "rates_at_end": rates_at_end(),
        "recurrence": measure_dense_recurrence(),
        "momentum": claim("momentum-baseline"),
        "unequal": unequal_gaps(),
        "rounds": len(drawn()["TCS"][0]["rows"]) * rounds_of_an_epoch(drawn()["TCS"][0]),
        "known_methods": len([name for name, found in track_scores().stored.items() if found]),
        "rows_made": rows_made,
        "rows_planned": rows_planned,
        "finished": finished_stages(),
        "ddp": ddp_numbers(),
        "cost": cost_of_the_evidence(),
        "dirty_runs": count_dirty_runs(),
        "records": lab.find_records(profile=PROFILE),
        "notebooks": [name for group in NOTEBOOKS.values() for name in group],
    }


def check_words() -> None:
    """Check what the pages say in words. The traceback of an AssertionError shows what has become
    wrong."""
    check_words_on_the_main_comparison()
    check_words_on_local_steps()
    check_words_on_synthetic_images()
    check_words_on_text()
    check_words_on_other_trainings()


def check_words_on_the_main_comparison() -> None:
    config = drawn()["FedAvg"][0]["config"]
    tcs_row, short = (gap(name, "Baseline") for name in ("TCS", "TCS-L4-Q5"))
    # "a quarter of the usual channels, half of the training images"
    assert [config[k] for k in ("model", "width", "train_samples")] == ["resnet18", 16, 25_000]
    # "TCS stayed within half a percentage point"; "TCS-L4-Q5 did not"; "the interval of TCS lies below 0"
    assert tcs_row["low"] > -0.5 > short["high"] and tcs_row["high"] < 0
    # "with the bootstrap, the interval of TCS contains 0"
    assert tcs_row["measured"] + tcs_row["bootstrap"] > 0
    # "for two of the eight seeds", "and no answer of this table changes"
    assert (seeds("TCS"), on_cpus("TCS", "FedAvg")["n"]) == (8, 6)
    for _, name, other in COMPARED:
        answers = [
            lab.judge_mean(row["measured"], row["half"], -0.5)
            for row in (gap(name, other), on_cpus(name, other))
        ]
        assert answers[0] == answers[1]
    # "TCS did not end lower than FedAvg"
    assert gap("TCS", "FedAvg")["measured"] > 0
    # "most of this loss comes from the four local steps"
    assert gap("FedAvg-L4", "FedAvg")["measured"] < short["measured"] / 2
    # the plan asked whether TCS ends higher: "which it does not"
    assert claim("top-K")["verdict"] == OPEN
    # "no, by a small margin: the intervals end just below 0.3", and the bootstrap's do not
    for name in ("mechanism", "freshness"):
        row = control(name)
        assert row["verdict"] == CONTRADICTED and lab.differing_bootstrap_verdict(pd.Series(row))
        assert (row["bound"], row["bound_value"]) == ("more_than", 0.3) and 0.25 < row["high"] < 0.3
    # "Of all bytes of TCS-L4-Q5, half come from the dense first epoch, and most of the rest are the server's"
    flows = [lab.traffic(record) for record in drawn()["TCS-L4-Q5"]]
    up = fmean(
        flow["up"] - flow["warm-up"] / 2 for flow in flows
    )  # half of the warm-up is each way's
    rest = fmean(flow["up"] + flow["down"] - flow["warm-up"] for flow in flows)
    whole = fmean(flow["up"] + flow["down"] for flow in flows)
    assert 0.45 < 1 - rest / whole < 0.55 and up / rest < 0.25
    # with momentum: "open" in the table
    momentum = gap("TCS-Global Momentum", "Baseline-Momentum")
    assert momentum["low"] < -0.5 < momentum["high"] < 0
    # "and, narrowly, at tuned ones"
    central = tuned_gaps().get(("TCS", "Baseline"))
    assert not central or central["verdict"] != SUPPORTED or central["low"] < -0.4


def check_words_on_local_steps() -> None:
    # of compressing four local steps: "several points on top in the training with all images, on text and
    # on the synthetic images, and in the others about one point or less"
    costs = [-compressed["measured"] for _, compressed in local_steps_gaps().values()]
    assert min(costs[1], costs[-2], costs[-1]) > 2 and max(costs[0], *costs[2:-2]) < 1.3
    # "In most of our trainings, they cost accuracy even without compression": four local steps
    dense = [steps["high"] < 0 for steps, _ in local_steps_gaps().values()]
    assert sum(dense) > len(dense) / 2
    # "there, four local steps cost more than in most others": the training with tuned rates is the last
    *others, there = (steps["measured"] for steps, _ in local_steps_gaps().values())
    assert sum(there < one for one in others) > len(others) / 2


def check_words_on_synthetic_images() -> None:
    # TCS ended higher than the random mask, and with a quarter of the entries lower: "Both intervals end
    # very near 0". With a sixteenth, it ended lower
    assert abs(on_track("TCS", "TCS-Random")["low"]) < 0.1
    assert abs(on_track("TCS-K4", "TCS-Random-K4")["high"]) < 0.1
    assert on_track("TCS-K16", "TCS-Random-K16")["high"] < 0
    # "with a correction for the number of such questions they would contain it"
    masks = {end: on_track(f"TCS{end}", f"TCS-Random{end}")["p"] for end in ("", "-K4", "-K16")}
    corrected = lab.holm(masks)
    assert min(corrected[""], corrected["-K4"]) > 0.05 > max(masks[""], masks["-K4"])
    # "The variant was not tuned there", on CIFAR-10
    assert ("TCS-Random", "Baseline") not in tuned_gaps()
    # "is open whether by more than half a point"
    central = on_track("TCS", "Baseline")
    assert central["low"] < -0.5 < central["high"]
    # top-K with a quarter of the entries: "about as many bytes", "no advantage of TCS at equal bytes"
    few = stored_point("top-K", "top-K-K4")
    assert 0.95 < few.both / stored_point("TCS").both < 1.05
    assert on_track("TCS", "top-K-K4")["low"] < 0 < on_track("TCS", "top-K-K4")["high"]
    # "so a loss of up to ... is not excluded"
    assert on_track("STC", "TCS")["low"] < -0.8 < 0 < on_track("STC", "TCS")["high"]
    # "also because its server sends as little as its clients"
    point = stored_point("STC")
    assert 0.9 < point.up / point.down < 1.1
    # "without the dense start of TCS"
    assert not stored_point("STC").start and stored_point("TCS").start
    # the table: well below FedAvg with momentum; "lowered the accuracy of TCS"; "for FedAvg, we saw no difference"
    assert on_track("TCS-Global Momentum", "TCS")["high"] < 0
    gain = on_track("FedAvg-Global Momentum", "FedAvg")
    assert gain["low"] < 0 < gain["high"]
    assert on_track("TCS-Global Momentum", "FedAvg-Global Momentum")["high"] < -1
    # "with the intervals that were planned at first, TCS would not be told apart from any method"
    for other in ("Baseline", "FedAvg", "top-K", "TCS-Random"):
        first = first_plan_on_track("TCS", other)
        assert first["low"] < 0 < first["high"]
    # "every method has its usual number of entries"; "TCS, top-K, STC, DGC and QSGD"
    assert all(track_scores().stored.values())
    assert {"TCS", "top-K", "STC", "DGC", "QSGD"} < set(track_scores().stored)


def check_words_on_text() -> None:
    sweep = lab.read_sensitivity(ROOT / "params/rivals_text.yaml")
    points = lab.sensitivity_plan(sweep, params("text") | {"seeds": 5}, "learning_rate")
    found = {point: lab.load_records(group) for point, group in points.items()}
    best = {name: list(found[rate, name].values()) for name, rate in lab.best_values(found).items()}
    sent = {}
    for name, made in best.items():
        sent[name] = fmean(flow["up"] + flow["down"] for flow in map(lab.traffic, made))
    gains = {}
    for name in set(best) - {"FedAvg"}:
        ours, theirs = (
            {r["config"]["seed"]: r["rows"][-1]["accuracy"] for r in best[one]}
            for one in (name, "FedAvg")
        )
        seeds = ours.keys() & theirs.keys()
        gains[name] = lab.paired_gain(
            [100 * ours[seed] for seed in seeds], [100 * theirs[seed] for seed in seeds]
        )
    low = {name: gain - half for name, (gain, half) in gains.items()}
    # DGC is "the best of eight methods that we compared with FedAvg there"
    assert (
        len(gains) == 8 and max(gains, key=lambda name: gains[name][0]) == "DGC" and low["DGC"] > 0
    )
    # "about the same number of bytes"; "about two fifths more bytes"; "more than a point is not excluded"
    assert 0.9 < sent["DGC"] / sent["TCS-Q5"] < 1.1 and 1.35 < sent["top-K"] / sent["TCS-Q5"] < 1.45
    assert low["TCS-Q5"] < -1 < -0.2 < low["top-K"]
    # "STC sent far less, but three seeds do not tell"
    assert sent["STC"] < sent["TCS-Q5"] / 20 and low["STC"] < -2


def check_words_on_other_trainings() -> None:
    # "In three other trainings, TCS ended 0.6 to 0.7 points below, which is too uncertain"
    with_momentum = gap("TCS-Global Momentum", "Baseline-Momentum")["measured"]
    losses = [with_momentum, on_track("TCS", "Baseline")["measured"], full_size("TCS")]
    assert all(0.55 < -loss < 0.75 for loss in losses)
    # "one training per method, with a fifth of the paper's epochs", all below; none of the paper's length
    assert max(map(full_size, ("TCS", "FedAvg", "top-K", "TCS-L4-Q5"))) < 0
    assert params("paper")["epochs"] == 5 * params("gpu")["epochs"]
    assert not lab.compare_prediction(ROOT / "params/prediction.yaml")["n"].any()
    # at other rates: "stayed within this range"; "three seeds", also of the short trainings
    assert not gain_at_twice_the_rate("TCS-L4-Q5") and not gain_at_twice_the_rate("Baseline")
    assert str(claim("eta")["n"]).split()[0] == "3"
    assert len(records("FedAvg-L4", "short", seeds=3)) == 3
    # with unequal clients: "we saw no loss"; "STC and DGC were not tested there"
    rows = [
        unequal_gaps()["all"]["TCS"],
        unequal_gaps()["all"]["top-K"],
        unequal_gaps()["half"]["TCS"],
    ]
    assert all(row["low"] > -0.5 and row["measured"] > 0 for row in rows)
    assert not {"STC", "DGC"} & {name for rows in unequal_gaps().values() for name in rows}
    # "We have tuned those of centralized training, FedAvg, TCS and top-K"
    assert finished_stages()["fair"] == ["main"]
    # "STC was not tested there", of CIFAR-10
    assert ("STC", "Baseline") not in tuned_gaps()
    # the optional runs are all that is missing of the plan
    table = lab.count_made(lab.plan_runs(EVIDENCE_PLAN))
    assert set(table.loc[table["made"] < table["planned"], "stage"]) == {"3"}


# Records ──────────────────────────────────────────────────────────────────────────────────────────


def params(*names: str) -> dict[str, Any]:
    return lab.read_params([ROOT / f"params/{name}.yaml" for name in names])


@cache
def records(scheme: str, profile: str, **changes: Any) -> list[Record]:
    """Return the finished records of a scheme at Table 1's rate in a profile, by seed."""
    every_seed = {} if profile == PROFILE else {"seeds": 100}
    asked = params("table1", profile) | every_seed | {"schemes": [scheme]} | changes
    return list(lab.load_records(lab.plan(asked), diverged=False).values())


@cache
def drawn() -> dict[str, list[Record]]:
    """Return the records of the methods that the picture on the first page shows."""
    return {name: records(name, PROFILE) for name in NAMES}


def of_scheme(found: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by their scheme's name."""
    by: dict[str, list[Record]] = {}
    for record in found:
        by.setdefault(record["config"]["scheme"]["name"], []).append(record)
    return by


def final(found: Iterable[Record]) -> dict[int, float]:
    """Return final accuracies in percent, by seed."""
    return {r["config"]["seed"]: 100 * r["rows"][-1]["accuracy"] for r in found}


def seeds(scheme: str) -> int:
    return len(drawn()[scheme])


def mean_accuracy(scheme: str) -> float:
    """Return the mean final accuracy in the main comparison, in percent."""
    return fmean(final(drawn()[scheme]).values())


def rounds_of_an_epoch(record: Record) -> int:
    config = record["config"]
    return config["train_samples"] // config["clients"] // config["batch_size"]


def last_train_loss(found: Iterable[Record]) -> float:
    return fmean(record["rows"][-1]["train_loss"] for record in found)


# Differences of final accuracies, in percentage points ────────────────────────────────────────────


@cache
def judged_records() -> tuple[lab.evidence.claims.Claims, dict[str, Record]]:
    """Return the file with the paper's claims, and the records by which they are judged."""
    return lab.load_planned_records(PROFILE)


@cache
def judged_rows() -> dict[str, Row]:
    return {row["claim"]: row for row in lab.judge_claims(*judged_records()).to_dict("records")}


def claim(name: str) -> Row:
    """Return a claim of params/claims.yaml with what was measured and its verdict."""
    return judged_rows()[name]


@cache
def gap(one: str, other: str) -> Row:
    """Estimate the difference of two methods in the main comparison, by the planned model."""
    rated = [(name, 0.1 if name.startswith("Baseline") else 0.5) for name in (one, other)]
    return dict(lab.estimate_difference(*judged_records(), *rated))


def on_cpus(one: str, other: str) -> Row:
    """The same as `gap`, without the seeds with which one of the two was trained on a GPU."""
    read, found = judged_records()
    rated = [(name, 0.1 if name.startswith("Baseline") else 0.5) for name in (one, other)]
    return dict(lab.estimate_difference(read, leave_out_gpu_seeds(found, rated), *rated))


def profile_gap(one: str, other: str, profile: str, **changes: Any) -> Row:
    """Estimate the difference of two methods in a smaller profile, over the seeds that both have."""
    first, second = (final(records(name, profile, **changes)) for name in (one, other))
    gaps = [first[seed] - second[seed] for seed in sorted(first.keys() & second)]
    return dict(zip(ENDS, lab.mean_interval(gaps), strict=True)) | {"n": len(gaps)}


@cache
def track_scores() -> compare.scoring.Scores:
    """Return the stored methods of `tcs compare`, with their points and the model of their scores."""
    return compare.scoring.Scores(compare.track.read_track())


def on_track(one: str, other: str) -> Row:
    """Estimate the difference of two stored methods of `tcs compare`."""
    return difference_in(track_scores().model, one, other)


def first_plan_on_track(one: str, other: str) -> Row:
    """The same with one deviation for all methods, as planned at first."""
    model = track_scores().model
    return difference_in(lab.Comparison(model.accuracies, model.right), one, other)


def difference_in(model: lab.Comparison, one: str, other: str) -> Row:
    found = model.estimate({one: 1.0, other: -1.0}, track_scores().confidence)
    return {
        "measured": found.value, "low": found.low, "high": found.high, "half": found.half, "p": found.p(0),
    }  # fmt: skip


def stored_point(method: str, scheme: str | None = None) -> compare.scoring.Point:
    """Return the point of a stored method: that of a variant, or of the method as it is."""
    points = track_scores().stored[method]
    return next(point for point in points if point.scheme == (scheme or method))


@cache
def control(question: str) -> Row:
    """Return the answer to a question of the controls' plan."""
    rows = lab.control_answers(CONTROLS_PLAN).to_dict("records")
    return next(row for row in rows if row["question"] == question)


def regime() -> Row | None:
    """Return the answer to the question whether TCS-L4-Q5 loses less where the network fits its images, and
    the training losses of centralized training there and usually; None until all runs are made."""
    row = control("regime")
    if row["made"] < row["stage_planned"]:
        return None
    runs = lab.load_records(lab.plan_runs(CONTROLS_PLAN)["regime"])
    there = last_train_loss(of_scheme(runs.values())["Baseline"])
    return row | {"loss": there, "usual_loss": last_train_loss(drawn()["Baseline"])}


@cache
def tuned_methods() -> list[fair.TunedScheme]:
    """Return the methods of the comparison at tuned rates, with those of their runs that are made."""
    return fair.load_methods(FAIR_PLAN)


@cache
def tuned_methods_table() -> pd.DataFrame:
    """Return the table of these methods."""
    return lab.fair_table(FAIR_PLAN)


@cache
def tuned_gaps() -> dict[tuple[str, str], Row]:
    """Return the differences at tuned rates by the two methods, for stages of which all runs are made."""
    table = lab.fair_differences(FAIR_PLAN)
    rows = table[table["measured"].notna()].to_dict("records")
    return {(row["first"], row["second"]): row for row in rows}


@cache
def unequal_gaps() -> dict[str, dict[str, Row]]:
    """Estimate differences from FedAvg in trainings with unequal classes: with "all" clients in every
    round, and with "half" of them."""
    read, equal = judged_records()
    there = lab.load_unequal_records(read, params(PROFILE))
    table = lab.compare_unequal_clients(read, equal, there)
    table = table.query("where == 'there' and second == 'FedAvg'").dropna(subset=list(ENDS))
    by_share = dict[str, dict[str, Row]]()
    for title in (t for t, how in read.unequal.settings.items() if "dirichlet_alpha" in how):
        config = of_scheme(there[title].values())["TCS"][0]["config"]
        usual = drawn()["TCS"][0]["config"]
        same = ("model", "width", "train_samples", "image_size", "epochs")
        assert all(config[key] == usual[key] for key in same) and config["dirichlet_alpha"] == 0.3
        rows = table[table["setting"] == title].to_dict("records")
        share = {1.0: "all", 0.5: "half"}[config["participation"]]
        by_share[share] = {row["first"]: row for row in rows}
    return by_share


@cache
def full_size(scheme: str) -> float:
    """Return the difference from the Baseline in profile gpu, of one seed."""
    epochs = params("gpu")["epochs"]
    found = [r for r in lab.find_records(profile="gpu").values() if r["config"]["epochs"] == epochs]
    ends = {name: final(runs)[0] for name, runs in of_scheme(found).items() if 0 in final(runs)}
    return ends[scheme] - ends["Baseline"]


def gain_at_twice_the_rate(scheme: str) -> float:
    """Return by how much the one run at twice the planned rate ended above the mean at that rate: 0 if it
    is within the range of the runs there."""
    twice = params(PROFILE)["reference_batch"] // 2
    planned = lab.plan_runs(EVIDENCE_PLAN)["rates"]
    (config,) = (c for c in planned if c.reference_batch == twice and c.scheme.name == scheme)
    usual = final(records(scheme, PROFILE)).values()
    (now,) = final(lab.load_records([config]).values()).values()
    return 0.0 if min(usual) <= now <= max(usual) else now - fmean(usual)


@cache
def measure_dense_recurrence() -> dict[str, float]:
    """Measure how many of the largest entries of a dense update are among those of the next."""
    return lab.measure_recurrence(of_scheme(judged_records()[1].values())["FedAvg"])


# Differences in words ─────────────────────────────────────────────────────────────────────────────

ENDS = ("measured", "low", "high")
ANSWERS = {SUPPORTED: "yes", CONTRADICTED: "**no**", OPEN: "open"}
TUNED_ANSWERS = {
    SUPPORTED: "With tuned learning rates, TCS stayed within half a point, too.",
    CONTRADICTED: "With tuned learning rates, TCS did not stay within half a point.",
    OPEN: "With tuned learning rates, it is open whether TCS stays within half a point.",
}


def interval(row: Row) -> str:
    """Format a difference, like "−0.17 (−0.34 to −0.01)"."""
    return lab.format_interval(*(row[key] for key in ENDS))


def ends(row: Row) -> str:
    """Format the ends of a difference's interval, like "−0.34 to −0.01"."""
    return interval(row).partition(" ")[2].strip("()")


def signed(row: Row | float, form: str = "+.2f") -> str:
    """Format a difference without its interval, like "−0.17"."""
    value = row if isinstance(row, float) else row["measured"]
    return lab.format_interval(value, math.nan, math.nan, f"{{:{form}}}")


def points(row: Row) -> str:
    """Say a difference, like "−0.17 points (95 % interval −0.34 to −0.01)"."""
    return f"{signed(row)} points (95 % interval {ends(row)})"


def ended(row: Row, other: str) -> str:
    """Say a difference, like "0.17 points below centralized training (−0.34 to −0.01)"."""
    where = "above" if row["measured"] > 0 else "below"
    return f"{abs(row['measured']):.2f} points {where} {other} ({ends(row)})"


def answer(verdict: str) -> str:
    return ANSWERS[verdict]


def bootstrap_widths() -> list[float]:
    """Return how many times as wide the bootstrap's intervals of the main claims are."""
    return [row["bootstrap"] / row["half"] for row in judged_rows().values() if row["main"]]


# The paper, and bytes ─────────────────────────────────────────────────────────────────────────────


def paper_accuracy(scheme: str) -> list[float]:
    """Return a method's accuracy in the paper's tables: mean, standard deviation and trainings."""
    tables = [params(name)["paper"] for name in ("table1", "table3")]
    return next(table[scheme] for table in tables if scheme in table)


def in_the_paper(scheme: str) -> str:
    mean, deviation, _ = paper_accuracy(scheme)
    return f"{mean:g} ± {deviation:.2f} %"


def paper_factor(scheme: str) -> str:
    """Return how many times fewer bits than FedAvg a method sends, by the paper's formula."""
    return lab.format_times(lab.paper_factor(scheme))


def fewer_bits_after_start(scheme: str) -> str:
    """Return how many times fewer bits than FedAvg a method's clients send after the dense start."""
    return lab.format_times(32 / lab.bits_per_parameter(drawn()[scheme][0])["uplink"])


def fewer_bytes(scheme: str) -> float:
    """Return how many times fewer bytes than FedAvg a method's clients send and receive in all."""

    def both_ways(found: Iterable[Record]) -> float:
        return fmean(flow["up"] + flow["down"] for flow in map(lab.traffic, found))

    return both_ways(drawn()["FedAvg"]) / both_ways(drawn()[scheme])


# Tables ───────────────────────────────────────────────────────────────────────────────────────────


def as_table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def with_n(row: Row) -> str:
    return f"{interval(row)}, n = {row['n']}"


def glance_table() -> str:
    """Differences of TCS from other methods in all trainings of images, those with momentum apart."""
    others = ("Baseline", "FedAvg", "top-K")
    full = [full_size("TCS") - full_size(name) for name in others]
    with_momentum = on_track("TCS-Global Momentum", "FedAvg-Global Momentum")
    rows = [
        ["Main comparison (CIFAR-10), the paper's learning rates, scaled", *(with_n(gap("TCS", name)) for name in others), with_n(control("mechanism"))],
        ["The same, both with momentum", with_n(gap("TCS-Global Momentum", "Baseline-Momentum")), "–", "–", "–"],
        [f"Synthetic images, tuned learning rates, n = {stored_point('TCS').n}", *(interval(on_track("TCS", name)) for name in (*others, "TCS-Random"))],
        ["The same, both with momentum", "–", interval(with_momentum), "–", "–"],
        ["The paper's full network (CIFAR-10), short training, n = 1", *map(signed, full), "–"],
    ]  # fmt: skip
    if tuned_gaps():
        tuned = [tuned_gaps().get(("TCS", name)) for name in others]
        cells = [with_n(row) if row else "–" for row in tuned]
        rows.insert(2, ["Main comparison (CIFAR-10), tuned learning rates", *cells, "–"])
    return as_table(["Training", "Centralized training", "FedAvg", "Top-K", "Random mask"], rows)


SMALLER = {  # trainings with FedAvg, FedAvg-L4 and TCS-L4-Q5, at the paper's or the usual rate
    "CIFAR-10, all images, ResNet-8, 15 epochs": {"profile": "short"},
    "CIFAR-10, 12,800 images, ResNet-8, 150 epochs": {"profile": "cpu"},
    "CIFAR-10, 3,200 images, ResNet-8, 150 epochs": {"profile": "small"},
    "The same, 300 epochs": {"profile": "small", "epochs": 300},
    "Text, a small GPT, 10 epochs": {"profile": "text", "learning_rate": 1.0},
}
LOCAL_STEPS = ("FedAvg-L4", "FedAvg")  # what four local steps cost without compression
FOUR_COMPRESSED = ("TCS-L4-Q5", "FedAvg-L4")  # and what compressing their updates costs


@cache
def local_steps_gaps() -> dict[str, tuple[Row, Row]]:
    """Estimate what four local steps cost, and what it costs to compress them, in all trainings."""
    here = {
        "Main comparison, 80 epochs": tuple(gap(*pair) for pair in (LOCAL_STEPS, FOUR_COMPRESSED))
    }
    for words, asked in SMALLER.items():
        here[words] = tuple(profile_gap(*pair, **asked) for pair in (LOCAL_STEPS, FOUR_COMPRESSED))
    n = {"n": stored_point("TCS").n}
    tuned = tuple(on_track(*pair) | n for pair in (LOCAL_STEPS, FOUR_COMPRESSED))
    return here | {"Synthetic images, ResNet-8, 80 epochs, tuned rates": tuned}


def local_steps_table() -> str:
    """The costs of four local steps and of compressing them, training by training."""
    rows = [
        [words, *map(interval, pair), pair[0]["n"]] for words, pair in local_steps_gaps().items()
    ]
    head = ["Training", "FedAvg with four local steps instead of one",
            "TCS-L4-Q5 instead of FedAvg with four local steps", "Seeds"]  # fmt: skip
    return as_table(head, rows)


def compared_table() -> str:
    """The paper's differences from centralized training and ours, method by method."""
    rows = []
    for words, name, other in COMPARED:
        row, theirs = gap(name, other), "not reported"
        if not name.startswith("FedAvg"):
            (mean, deviation, _), (base, spread, _) = map(paper_accuracy, (name, other))
            _, *limits = lab.welch_interval((mean, deviation), (base, spread))
            theirs = lab.format_interval(round(mean - base, 2) + 0.0, *limits)  # no −0
        verdict = lab.judge_mean(row["measured"], row["half"], -0.5)
        rows.append([words, theirs, with_n(row), ANSWERS[verdict]])
    head = [
        "Method", "Paper: difference from centralized training, in percentage points",
        "Here, with 95 % interval (n = number of seeds)", "Within half a point?",
    ]  # fmt: skip
    return as_table(head, rows)


COMPARED = (
    ("TCS", "TCS", "Baseline"),
    ("TCS with 4 local steps and 5-bit values (TCS-L4-Q5)", "TCS-L4-Q5", "Baseline"),
    ("Top-K with error feedback *", "top-K", "Baseline"),
    ("FedAvg, everything sent *", "FedAvg", "Baseline"),
    ("FedAvg with 4 local steps, everything sent *", "FedAvg-L4", "Baseline"),
    ("TCS with momentum at the server and all clients (compared with centralized training with momentum)", "TCS-Global Momentum", "Baseline-Momentum"),
)  # fmt: skip


def tuned_table() -> str:
    """Accuracies and differences at tuned rates, of the methods without momentum whose stage is finished."""
    gaps, scored = tuned_gaps(), tuned_methods_table().set_index("scheme")
    dense = gaps[
        "FedAvg", "Baseline"
    ]  # the plan has centralized training's difference the other way
    turned = {"measured": -dense["measured"], "low": -dense["high"], "high": -dense["low"]}
    rows = []
    for name in ["Baseline", *(one for one, other in gaps if other == "Baseline")]:
        words = {
            "Baseline": "centralized training",
            "FedAvg-L4": "FedAvg with 4 local steps",
            "TCS-K4": "TCS with a quarter of the entries",
        }.get(name, name)
        central = gaps.get((name, "Baseline"))
        others = turned if name == "Baseline" else gaps.get((name, "FedAvg"))
        row = scored.loc[name]
        usual = f"{row['others'][1.0]:.2f} %" if 1.0 in row["others"] else "–"
        rows.append([
            words, f"{row['chosen']:g}" + (" \\*" if row["at_end"] else ""), f"{row['accuracy']:.2f} %", usual,
            interval(central) if central else "–", interval(others) if others else "–",
            answer(central["verdict"]) if central else "–",
        ])  # fmt: skip
    head = [
        "Method", "Best rate, relative to the main comparison", "Accuracy with it",
        "With the main comparison's rate", "Difference from centralized training, at the best rates", "From FedAvg", "Within half a point of centralized training?",
    ]  # fmt: skip
    return as_table(head, rows)


def tuned_summary() -> str:
    """Answer in words whether tuned rates change what the main comparison says of TCS."""
    central, dense = (tuned_gaps()["TCS", other] for other in ("Baseline", "FedAvg"))
    before = gap("TCS", "FedAvg")
    answers = {SUPPORTED: "yes, as far as we know", OPEN: "perhaps", CONTRADICTED: "no"}
    if dense["low"] > 0:
        words = "It ends higher than FedAvg, as it does in the main comparison"
    elif dense["high"] < 0:
        words = "It ends lower than FedAvg"
    else:
        words = "We see no difference from FedAvg"
    return (
        f"On CIFAR-10, {answers[central['verdict']]}. {TUNED_ANSWERS[central['verdict']]} The interval of the "
        f"difference from centralized training is {ends(central)}. {words} ({interval(dense)}; in the main comparison "
        f"{interval(before)}, or {interval(on_cpus('TCS', 'FedAvg'))} without the seeds on a GPU). "
        "On synthetic images, it is open (see the end of this section)."
    )


def tuned_otherwise() -> list[str]:
    """Return the methods of `tuned_table` whose answer is another one with the bootstrap's interval, and
    this answer."""
    return [
        f"{name}: {answer(lab.differing_bootstrap_verdict(row))}"
        for (name, other), row in tuned_gaps().items()
        if other == "Baseline" and lab.differing_bootstrap_verdict(row)
    ]


def gains_of_tuning() -> dict[str, float]:
    """Return by how many points each method gained by its best rate, {} if any did not."""
    gains = lab.gains_of_tuning(tuned_methods_table()) if tuned_gaps() else {}
    return gains if min(gains.values(), default=0) > 0 else {}


def describe_gains() -> str:
    """Say in words how much methods gained by their best rates."""
    if not (gains := gains_of_tuning()):
        return ""
    least, most = (
        f"{choose(gains.values()):.2f} for {choose(gains, key=gains.__getitem__)}"
        for choose in (min, max)
    )
    words = (
        f"At its best rate, each method ended higher than at that of the main comparison, by {least} to {most}. "
        "So the paper's rates, as we scaled them, are too low here."
    )
    return words.replace("Baseline", "centralized training")


def tuning_images() -> dict[str, int]:
    """Return on how many images the fair plan chooses rates, and scores methods."""
    spans = tuned_methods()[0].search.tuning
    both = {"choose": spans.choose_on, "score": spans.score_on}
    return {use: sum(end - start for start, end in found) for use, found in both.items()}


def rates_at_end() -> list[str]:
    """Return the methods whose best rate is the first or the last one of the fair plan's list."""
    table = tuned_methods_table()
    return list(table[table["at_end"]]["scheme"])


def tuned_methods_left() -> int:
    """Count the methods of the fair plan that belong to a stage of which not all runs are made."""
    methods = tuned_methods()
    whole = fair.complete_stages(methods)
    return sum(not whole[method.stage] for method in methods)


PAPERS_IMAGES = 50_000  # training images of CIFAR-10


def settings_table() -> str:
    """The paper's training beside that of the main comparison."""
    (paper, ours), central = (
        [lab.plan(params("table1", name) | {"schemes": [scheme]})[0] for name in ("paper", PROFILE)]
        for scheme in ("TCS", "Baseline")
    )
    both, record = (paper, ours), drawn()["TCS"][0]
    sizes = [sum(tcs.layer_sizes(tcs.resnet18(config.width))) for config in both]
    assert sizes[1] == record["dimension"] and paper.drops == ours.drops
    papers_rounds = paper.epochs * (PAPERS_IMAGES // paper.clients // paper.batch_size)
    tested, unused = (
        8 * len(base64.b64decode(record["rows"][-1]["right"])),
        PAPERS_IMAGES - ours.train_samples,
    )
    assert tested == 10_000 + unused
    rows = {
        "parameters of the ResNet-18": [f"{size:,}" for size in sizes],
        "training images": [f"{PAPERS_IMAGES:,}", f"{ours.train_samples:,}"],
        "images on which accuracy is measured": ["10,000 test images", f"{tested:,}: the 10,000 test images, and the {unused:,} training images that are not used for training"],
        "pixels of an image": ["32 × 32", f"{ours.image_size} × {ours.image_size}"],
        "samples in a batch of a client": [paper.batch_size, ours.batch_size],
        "learning rate of TCS and FedAvg": [f"{c.scale * c.eta:.2g}" for c in both],
        "samples in a batch of centralized training": [c.batch for c in central],
        "learning rate of centralized training": [f"{c.scale * c.eta:.2g}" for c in central],
        "weight decay": [f"{c.weight_decay:.2g}" for c in both],
        "epochs, of which dense at the start": [f"{c.epochs}, {c.warmup}" for c in both],
        "number of rounds × 1 %, which is how often an average entry can be in the shared mask": [round(papers_rounds * paper.scheme.phi_global), lab.count_sends(record)],
    }  # fmt: skip
    return as_table(
        ["Setting", "The paper", "Main comparison"], ([name, *two] for name, two in rows.items())
    )


NOTEBOOKS = {  # group: notebook: question
    "Learn": {
        "01_fedavg": "How do many clients train one model?",
        "02_sparsification": "What is lost if only the largest entries are sent?",
        "03_tcs": "How do clients share a mask, and when should that help?",
        "04_layerwise_fairness": "Should every layer get its share of the mask?",
        "05_global_momentum": "Can server and clients apply momentum to the shared update?",
        "06_sparse_encoding": "How many bits does a position need?",
        "07_fractional_quantization": "How can a value be sent in five bits?",
    },
    "Reproduce": {
        "00_reproduce": "What do all tables and figures of the paper look like here?",
        "08_tables_and_curves": "How do I make one table, for a training of my choice?",
        "10_bits_on_the_wire": "Which bytes does each scheme really send?",
        "13_evidence": "Which of the paper's claims hold, and with what certainty?",
        "14_sensitivity": "How do the sizes of the masks, the bits per value, the clients and the learning rate change the result?",
    },
    "Use": {
        "09_your_own_scheme": "How do I add a scheme of my own and compare it?",
        "11_performance": "Where does the time of a round go?",
        "12_real_training": "What does the DDP hook cost and save?",
        "15_your_own_model": "What would TCS save on my model?",
        "18_flower": "How does TCS run inside Flower?",
    },
    "Compare": {
        "10b_fewer_bytes": "Can one send fewer bytes than the paper's methods do?",
        "16_text": "Does it work for a language model?",
        "17_rivals": "Which method should I use, of TCS and those by other authors?",
    },
}  # fmt: skip


def notebooks_table() -> str:
    """The notebooks by group, with the times to read them and, by their own text, to run them."""
    rows = []
    for group, notebooks in NOTEBOOKS.items():
        for i, (name, question) in enumerate(notebooks.items()):
            link = f"[{name.replace('_', ' ', 1)}](notebooks/{name}.ipynb)"
            text = (ROOT / f"notebooks/{name}.py").read_text(encoding="utf-8")
            takes = re.findall(r"\*Run time\*: (.+?)(?: on two| as it|[;,.])", text)
            exercises = len(re.findall(r"^lab\.check_exercise\(", text, re.M)) or ""
            read = f"{minutes_to_read(text):.0f} min"
            rows.append(["" if i else f"**{group}**", link, question, read, takes[0], exercises])
    return as_table(["", "Notebook", "Question", "Reading", "Running", "Exercises"], rows)


def minutes_to_read(text: str) -> float:
    """Count the words of a notebook's text cells, at 200 words per minute."""
    cells = re.findall(r"^# %% \[markdown\].*\n((?:#.*\n)*)", text, re.M)
    words = sum(len(re.findall(r"\w\S*", cell)) for cell in cells)
    return max(1.0, words / 200)


# Plans ────────────────────────────────────────────────────────────────────────────────────────────


@cache
def evidence_runs() -> tuple[int, int]:
    """Count the runs of the main comparison's plan: made, and planned."""
    table = lab.count_made(lab.plan_runs(EVIDENCE_PLAN))
    return int(table["made"].sum()), int(table["planned"].sum())


@cache
def tuned_runs() -> tuple[int, int]:
    """Count the runs of the comparison at tuned rates: made, and planned."""
    counts = lab.fair_counts(FAIR_PLAN)
    made, planned = (counts[f"tuning {w}"] + counts[f"scoring {w}"] for w in ("made", "planned"))
    return made, planned


@cache
def control_runs() -> pd.DataFrame:
    """Count the runs of the controls, by their stage."""
    table = lab.count_made(lab.plan_runs(CONTROLS_PLAN))
    return table.set_index("stage")[["made", "planned"]]


@cache
def count_rows() -> tuple[int, int]:
    """Count the stored settings of `tcs compare`: made, and planned."""
    return compare.rows.count_stored(compare.track.read_track())


def finished_stages() -> dict[str, list[str]]:
    """Return the stages of the later plans of which all runs are made."""
    stages, controls = fair.complete_stages(tuned_methods()), control_runs()
    return {
        "fair": [name for name, whole in stages.items() if whole],
        "controls": list(controls.index[controls["made"] == controls["planned"]]),
    }


def plans_table() -> str:
    """Each plan: its file, the commit before its first run, its question, and how much of it is made."""
    controls, hook = control_runs(), ROOT / "params/hook_plan.yaml"
    jobs = list(chain(*plan_jobs(hook).values()))
    to_follow = sum(map(len, jobs_to_follow(hook).values()))
    made, planned = count_rows()
    rows = [
        ["evidence_plan.yaml", "277d2f2", "Do the paper's claims hold at its learning rates, scaled?", *evidence_runs()],
        ["fair_plan.yaml", "cb43a13", "How do the methods compare at their best rates?", *tuned_runs()],
        ["controls_plan.yaml", "cb43a13", "Does it matter which mask is shared?", *controls.loc["mechanism"]],
        ["controls_plan.yaml", "cb43a13", "Does TCS-L4-Q5 lose less if the network fits its training images almost perfectly? And what do four local steps cost in shorter trainings?", *controls.drop("mechanism").sum()],
        ["compare_plan.yaml", "d15b99c", "How do known methods compare on synthetic images, each at its best rate?", f"{made} settings, each with 7 trainings or more", f"{planned} settings"],
        ["hook_plan.yaml", "7a96224", "What does each setting of the DDP hook cost in loss, each at its best rate?", sum(job.is_made() for job in jobs), len(jobs) + to_follow],
    ]  # fmt: skip
    head = ["Plan in `params`", "Committed in", "Question", "Trainings made", "Planned"]
    return as_table(head, rows)


def evidence_plans_table() -> str:
    """The plans whose records lie in results/evidence."""
    rows = [
        ["`evidence_plan.yaml`", "the paper's methods and claims", *evidence_runs()],
        ["`fair_plan.yaml`", "every method at its own best learning rate", *tuned_runs()],
        ["`controls_plan.yaml`", "TCS against random and outdated masks, and trainings that are longer or shorter", *control_runs().sum()],
    ]  # fmt: skip
    head = ["plan in `params`", "about", "made", "planned"]
    return lab.plain_markdown(pd.DataFrame(rows, columns=head))


def hours_of(record: Record) -> float:
    return record["provenance"]["wall_seconds"] / 3600


def costs_table() -> str:
    """Numbers of records and their hours, by the device that made them."""
    found = lab.find_records(profile=PROFILE).values()
    assert len(found) == len(
        list(lab.results_folder(PROFILE).glob("runs/*.json"))
    )  # all that lie there
    rows = [{"device": r["provenance"]["device"], "hours": hours_of(r)} for r in found]
    groups = pd.DataFrame(rows).groupby("device")["hours"].agg(["size", "sum"]).reset_index()
    groups["sum"] = groups["sum"].map("{:.1f}".format)
    return lab.plain_markdown(groups.rename(columns={"size": "records", "sum": "hours"}))


def cost_of_the_evidence() -> dict[str, Any]:
    """Count the hours that the runs of the main comparison's plan took."""
    hours = {"AMD EPYC": 0.0, "NVIDIA H100 80GB HBM3": 0.0, "NVIDIA H200": 0.0}  # as the page says
    for record in lab.load_records(chain(*lab.plan_runs(EVIDENCE_PLAN).values())).values():
        hours[record["provenance"]["device"]] += hours_of(record)
    cpu, *gpus = hours.values()
    made, planned = evidence_runs()
    costs = {"cpu_hours": cpu, "gpu_hours": sum(gpus), "days": round((cpu + sum(gpus)) / 24)}
    return costs | {"made": made, "planned": planned}


def count_dirty_runs() -> dict[str, int]:
    """Count the runs whose code had changes that were not committed: of the main comparison's plan and
    with the paper's full network."""
    plan = lab.load_records(chain(*lab.plan_runs(EVIDENCE_PLAN).values())).values()
    full_size = lab.find_records(profile="gpu").values()
    dirty = [sum(r["provenance"]["dirty"] for r in found) for found in (plan, full_size)]
    return {"plan": dirty[0], "full_size": dirty[1], "all_full_size": len(full_size)}


# The hook. Losses are those with AdamW, each setting at its best rate ─────────────────────────────

HOOK = "TCS 1 and 0.5 %"  # the default of `TCSState`
HOOK_OF_EIGHT = "TCS 2 and 0.5 %"  # what the page advises with eight processes
POWER_SGD = "PowerSGD rank 4"
OWN_LINKS = (10, 50, 200, 1000, 10_000)  # Mbit/s of a process's own link, in each direction
RANKS = (2, 4, 8, 16)
NET, LARGE_NET = links.Net(10, 1000), links.Net(4, 5000)


@cache
def stage(name: str) -> frontier.Frontier:
    return frontier.Frontier(name)


@cache
def measured_links() -> links.Links:
    return links.read_stages("10 million, settings", "100 million, settings")


def ddp_numbers() -> dict[str, Any]:
    """Return what the page says about the hook."""
    check_words_on_ddp()
    measured, million, power = measured_links(), stage("million"), with_adamw(POWER_SGD)
    (helps, _), (harms, _) = map(stage("small").effect_of_correction, ("momentum", "AdamW"))
    early = [at.dense_fraction(setup) for at, setup in compared_with_dense()]
    parameters = sum(p.numel() for p in million.model.parameters())
    return {
        "dense": f"{million.mean_loss(with_adamw('dense')):.2f}",
        "early": 100 * min(early), "late": 100 * max(early),
        "parameters": f"{round(NET.parameters / 1e6)} million",
        "large_parameters": f"{round(LARGE_NET.parameters / 1e6)} million",
        "large_layers": LARGE_NET.layers, "large_width": LARGE_NET.width,
        "gpt": f"{parameters / 1e6:.1f} million",
        "fastest": as_table(
            ["Link of each process", *(f"{ranks} processes" for ranks in RANKS)], fastest_rows(LARGE_NET)
        ),
        "seconds": seconds_table(),
        "bf16": step_seconds(measured.seconds("bf16", LARGE_NET, 2, 10_000)[0]),
        "bf16_eight": step_seconds(measured.seconds("bf16", LARGE_NET, 8, 10_000)[0]),
        "four_more": f"{four_against_calculation():.1f}",
        "steps": f"{million.stage.steps:,}", "n": len(million.stage.seeds),
        "eight_default": nats(stage("eight").compare({with_adamw(HOOK): 1.0, power: -1.0})),
        "split": nats(cost_of_the_papers_split(), "{:.3f}"),
        "beside_top_k": nats(beside_top_k()),
        "best_rates": best_rates(million),
        "dense_start": million.stage.dense_steps,
        "start_minutes": million.stage.dense_steps * measured.seconds("plain", LARGE_NET, 2, 200)[0] / 60,
        "slow_start_hours": million.stage.dense_steps * measured.seconds("plain", LARGE_NET, 2, 10)[0] / 3600,
        "momentum": nats(helps), "adamw": nats(harms),
    }  # fmt: skip


def check_words_on_ddp() -> None:
    """Check what the page says about the hook in words."""
    small, million, eight = map(stage, ("small", "million", "eight"))
    power, hook, two = map(with_adamw, (POWER_SGD, HOOK, HOOK_OF_EIGHT))
    for at in (million, eight):
        assert at.made == at.planned and not at.diverged
    # "the fastest up to 50 Mbit/s per process" (the first two rows, whose links are the slowest)
    assert OWN_LINKS[:2] == (10, 50)
    assert {cell for row in fastest_rows(LARGE_NET)[:2] for cell in row[1:]} == {"PowerSGD"}
    # "a smaller GPT"
    assert small.stage.width < million.stage.width
    # "0.03 to 0.05 nats above"; "four fifths"
    costs = [at.cost(setup).value for at, setup in compared_with_dense()]
    assert min(costs) > 0.025 and max(costs) < 0.055
    assert 0.77 < min(at.dense_fraction(setup) for at, setup in compared_with_dense()) < 0.83
    every_cost = [at.cost(s) for at in (million, eight) for s in at.known if s.scheme != "dense"]
    assert min(cost.low for cost in every_cost) > 0
    # with two processes, the hook and PowerSGD lose the same
    equal = million.compare({hook: 1.0, power: -1.0})
    assert -million.as_good < equal.low < 0 < equal.high < million.as_good
    # with two processes, top-K: "about the same"
    assert beside_top_k().low < 0 < beside_top_k().high
    # "With eight processes, share 2 %"
    shared = eight.compare({two: 1.0, power: -1.0})
    assert shared.high <= eight.as_good < eight.compare({hook: 1.0, power: -1.0}).high
    # "With 10 million parameters, it changes little"
    cells = zip(chain(*fastest_rows(LARGE_NET)), chain(*fastest_rows(NET)), strict=True)
    assert sum(one != other for one, other in cells) <= 4
    # "a step took about three quarters of it"
    measured = measured_links()
    for own in (50, 200):
        row = measured.row(HOOK, LARGE_NET, 2, 2.0 * own)
        assert 0.7 < row["seconds"] / measured.calculate(row) < 0.8
    # "the method that was fastest by calculation was still the fastest, or at most a tenth slower"
    for own in (10, 50, 200):
        now = {way: seconds_of_four(way, own) for way in ways_for(4)}
        fastest = min(now, key=lambda way: measured.seconds(way, NET, 4, own)[0])
        assert now[fastest] <= 1.1 * min(now.values())
    # the paper's split costs more, "although top-K sends fewer bytes"; "with AdamW, we saw no gain"
    assert cost_of_the_papers_split().low > 0
    few, papers = with_adamw("top-K 0.5 %"), with_adamw("TCS 1 and 0.1 %")
    assert small.bytes_per_step(few) < small.bytes_per_step(papers)
    (helps, _), (harms, _) = map(small.effect_of_correction, ("momentum", "AdamW"))
    assert helps.high < 0 < harms.value


def with_adamw(scheme: str) -> optimizers.Setup:
    return optimizers.Setup("AdamW", scheme)


def compared_with_dense() -> list[tuple[frontier.Frontier, optimizers.Setup]]:
    """Return the settings whose losses the page shows, with two processes and with eight."""
    ways = {"million": (HOOK, POWER_SGD), "eight": (HOOK_OF_EIGHT, POWER_SGD)}
    return [(stage(name), with_adamw(way)) for name, two in ways.items() for way in two]


def cost_of_the_papers_split() -> Any:
    """Estimate the loss with 0.1 % own entries minus that of top-K with 0.5 %, in the smaller GPT."""
    few, papers = with_adamw("top-K 0.5 %"), with_adamw("TCS 1 and 0.1 %")
    return stage("small").compare({papers: 1.0, few: -1.0})


def beside_top_k() -> Any:
    """Estimate the loss of the hook's default minus that of top-K with as many bytes, of two processes."""
    return stage("million").compare({with_adamw(HOOK): 1.0, with_adamw("top-K 1 %"): -1.0})


def nats(found: Any, form: str = "{:+.3f}") -> str:
    return lab.format_interval(found.value, found.low, found.high, form)


def best_rates(at: frontier.Frontier) -> str:
    """Say the best learning rates of the settings."""
    by_rate = dict[float, list[str]]()
    for setup, rate in at.rates.items():
        name = {"dense": "plain DDP", POWER_SGD: "PowerSGD", "top-K 1 %": "top-K"}
        by_rate.setdefault(rate, []).append(name.get(setup.scheme, "TCS"))
    words = []
    for rate, names in sorted(by_rate.items()):
        *first, last = dict.fromkeys(names)
        words.append(f"{rate:g} for {', '.join(first)}{' and ' if first else ''}{last}")
    return ", and ".join(words)


@cache
def links_of_four() -> links.Links:
    """Return what was measured with four processes."""
    return links.read_stages("10 million, settings, four ranks")


def seconds_of_four(way: str, own: int) -> float:
    """Return the measured seconds per step with four processes."""
    return links_of_four().row(way, NET, 4, 4.0 * own)["seconds"]


def four_against_calculation() -> float:
    """Return by how much steps of four processes were longer than those calculated from two, at most."""
    ways = ("plain", "bf16", POWER_SGD, "top-K 1 %", "TCS 0.5 and 0.5 %", HOOK, HOOK_OF_EIGHT)
    return max(
        seconds_of_four(way, own) / measured_links().seconds(way, NET, 4, own)[0]
        for way in ways
        for own in (10, 50, 200)
    )


def ways_for(ranks: int) -> dict[str, str]:
    """Return the exchanges that the tables compare for a number of processes, and their names there."""
    hook = HOOK if ranks < 8 else HOOK_OF_EIGHT
    return {"plain": "plain DDP", "bf16": "bf16", POWER_SGD: "PowerSGD", hook: "the TCS hook"}


def seconds_table() -> str:
    """Seconds per step of plain DDP, PowerSGD and the hook on all links, and what they cost in loss."""
    stages = {2: stage("million"), 8: stage("eight")}
    columns = [(n, way, name) for n in stages for way, name in ways_for(n).items() if way != "bf16"]
    names = [f"{name}, {n} processes" for n, _, name in columns]
    rows = []
    for own in OWN_LINKS:
        cells = []
        for ranks, way, _ in columns:
            seconds, is_measured = measured_links().seconds(way, LARGE_NET, ranks, own)
            cells.append(f"{'' if is_measured else '≈ '}{step_seconds(seconds)} s")
        rows.append([f"{own:,} Mbit/s", *cells])
    costs = [
        "0" if way == "plain" else nats(stages[n].cost(with_adamw(way))) for n, way, _ in columns
    ]
    rows.append(["Loss minus that of plain DDP, nats", *costs])
    return as_table(["Link of each process", *(name[0].upper() + name[1:] for name in names)], rows)


def fastest_rows(net: links.Net) -> list[list[str]]:
    """Return the exchange with the shortest step on each link, by number of processes: two names if they
    differ by less than a tenth, and only those that lose nothing to rounding or choice where one is among
    them."""
    rows = []
    for own in OWN_LINKS:
        cells = []
        for ranks in RANKS:
            took = {w: measured_links().seconds(w, net, ranks, own)[0] for w in ways_for(ranks)}
            near = [way for way in took if took[way] < 1.1 * min(took.values())]
            near = [way for way in near if way in ("plain", "bf16")] or near
            cells.append(" or ".join(ways_for(ranks)[way] for way in near))
        rows.append([f"{own:,} Mbit/s", *cells])
    return rows


def step_seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


# Pictures ─────────────────────────────────────────────────────────────────────────────────────────

MEGABYTES_PATH = ROOT / f"results/{PROFILE}/megabytes"  # without a suffix, as the next one
ROUND_PATH = ROOT / "results/round"  # the picture that explains a round
NAMES = {  # what the picture of the main comparison calls the schemes
    "Baseline": "centralized training",
    "FedAvg": "FedAvg (everything is sent)",
    "top-K": "top-K",
    "TCS": "TCS",
    "FedAvg-L4": "FedAvg, 4 local steps",
    "TCS-L4": "TCS, 4 local steps",
    "TCS-L4-Q5": "TCS, 4 local steps,\n5-bit values",
}


def draw_megabytes() -> Any:
    """Draw final accuracy against traffic in the main comparison."""
    config = drawn()["FedAvg"][0]["config"]
    size = f"{config['image_size']} × {config['image_size']} pixels"
    net = "ResNet-18 of a quarter of its width"
    title = f"{config['data_label']} at {size}, {net}, {config['epochs']} epochs"
    table = lab.summary([record for found in drawn().values() for record in found])
    return lab.draw_megabytes_figure(table, title, NAMES)


PICTURES = {MEGABYTES_PATH: draw_megabytes, ROUND_PATH: draw_round}


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(render(path), encoding="utf-8")
    for path, draw in PICTURES.items():
        lab.save_figure(draw(), path)
