"""The answers of the later plans: known differences are found again from made-up records, images that
choose a rate never score, and nothing is estimated before a stage is whole."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tcs_lab as lab
import torch
from tcs_lab.compare.scoring import Scores
from tcs_lab.compare.track import count_runs_left, list_next_runs
from tcs_lab.evidence import fair
from tcs_lab.training.training import pack_flags

PROFILE = "profile: tiny\ndataset: synthetic\nepochs: 1\ntrain_samples: 100\ntest_samples: 60\n"
SPANS = {"choose_on": [[10, 20]], "score_on": [[0, 10], [20, 60]]}
TUNED = """
profile: tiny.yaml
tuning:
  seed: 11
  learning_rate: 0.5
  centralized_learning_rate: 0.1
  factors: [0.5, 1.0, 2.0]
  choose_on: [[10, 20]]
  score_on: [[0, 10], [20, 60]]
stages:
  - {stage: main, tune: [Baseline, FedAvg, TCS], seeds: [1, 2, 3]}
  - {stage: rest, tune: [top-K, TCS-K4], seeds: [1, 2, 3]}
analysis:
  confidence: 0.95
  no_loss: -0.5
  families:
    one: {schemes: [FedAvg, TCS, top-K], references: [Baseline, FedAvg]}
    other: {schemes: [TCS-K4], references: [top-K]}
"""
CONTROLS = """
profile: tiny.yaml
stages:
  - {stage: mechanism, seeds: [1, 2, 3], runs: [{schemes: [TCS-Random]}]}
  - {stage: regime, seeds: [1, 2, 3], runs: [{schemes: [Baseline, TCS], train_samples: 50}]}
analysis:
  confidence: 0.95
  questions:
    mechanism: {says: it helps, stage: mechanism, first: [TCS, 0.5], second: [TCS-Random, 0.5], more_than: 0.3}
    regime: {says: it loses, stage: regime, first: [TCS, 0.5], second: [Baseline, 0.1], less_than: -0.5}
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in (("tiny", PROFILE), ("fair", TUNED), ("controls", CONTROLS)):
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def write(folder, config, right, status="finished", data="made up"):
    """A record of this run, right on these of the 60 images, where the program looks for it."""
    right_I = np.asarray(right, dtype=bool)
    row = {"epoch": 1, "rounds": 10, "dense_rounds": 1, "accuracy": float(right_I.mean()),
           "bits_up": 1000, "bits_down": 1000, "bytes_up": 2_000_000, "bytes_down": 500_000,
           "right": pack_flags(torch.from_numpy(right_I))}  # fmt: skip
    record = {"version": 1, "digest": config.digest, "status": status, "config": config.identity(),
              "dimension": 1000, "rows": [row] if status == "finished" else [],
              "provenance": {"fingerprint": data, "wall_seconds": 1.0}}  # fmt: skip
    path = lab.record_path(config, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")
    return record


def images(choosing, scoring):
    """Which images are right: so many of the ten that choose, so many of the fifty that score."""
    right = np.zeros(60, dtype=bool)
    right[10 : 10 + choosing] = True
    places = [*range(10), *range(20, 60)]
    right[places[:scoring]] = True
    return right


def searches(folder):
    return {
        s.scheme: s
        for of in lab.find_searches(folder / "fair.yaml", results=folder).values()
        for s in of
    }


def tune(folder, *names, best=1.0):
    for name in names:
        search = searches(folder)[name]
        for factor in (0.5, 1.0, 2.0):
            write(folder, search.config(factor, 11), images(8 if factor == best else 5, 0))


def score(folder, name, *counts, best=1.0):
    for seed, count in enumerate(counts, 1):
        write(folder, searches(folder)[name].config(best, seed), images(0, count))


def whole_main(folder):
    """Residuals are 0: seeds shift all methods alike. TCS is 4 points above FedAvg and 2 below
    the Baseline, on the fifty images that score."""
    tune(folder, "Baseline", "FedAvg", "TCS")
    for name, counts in (
        ("Baseline", (40, 42, 45)),
        ("FedAvg", (37, 39, 42)),
        ("TCS", (39, 41, 44)),
    ):
        score(folder, name, *counts)


def row_of(table, **keys):
    for key, value in keys.items():
        table = table[table[key] == value]
    (row,) = table.to_dict("records")
    return row


# Methods at tuned rates ───────────────────────────────────────────────────────────────────────────


def test_a_known_difference_comes_out(folder):
    whole_main(folder)
    table = lab.fair_differences(folder / "fair.yaml", folder)
    row = row_of(table, first="TCS", second="FedAvg")
    assert row["measured"] == pytest.approx(4) and row["n"] == 3
    assert row_of(table, first="TCS", second="Baseline")["measured"] == pytest.approx(-2)


def test_intervals_are_those_of_the_pooled_model_on_the_images_that_score(folder):
    """The same arithmetic by hand: percent of fifty, and the bits of these fifty."""
    tune(folder, "Baseline", "FedAvg", "TCS")
    counts = {"Baseline": (40, 42, 46), "FedAvg": (37, 40, 42), "TCS": (39, 41, 44)}
    for name, of in counts.items():
        score(folder, name, *of)
    accuracies = {(n, s): 2.0 * c for n, of in counts.items() for s, c in enumerate(of, 1)}
    right = {(n, s): np.arange(50) < c for n, of in counts.items() for s, c in enumerate(of, 1)}
    expected = lab.Comparison(accuracies, right).estimate({"TCS": 1, "Baseline": -1}, 0.95)
    row = row_of(lab.fair_differences(folder / "fair.yaml", folder), first="TCS", second="Baseline")
    assert (row["measured"], row["low"], row["high"], row["p"]) == pytest.approx(
        (expected.value, expected.low, expected.high, expected.p(0))
    )
    assert row["verdict"] == lab.judge_interval(expected.low, expected.high, "more_than", -0.5)


def test_images_that_choose_never_score_and_the_others_never_choose(folder):
    """Changing one kind of images changes nothing of the other."""
    whole_main(folder)
    before = lab.fair_differences(folder / "fair.yaml", folder)
    for name, counts in (
        ("Baseline", (40, 42, 45)),
        ("FedAvg", (37, 39, 42)),
        ("TCS", (39, 41, 44)),
    ):
        for seed, count in enumerate(counts, 1):  # now right on some that choose
            write(folder, searches(folder)[name].config(1.0, seed), images(seed * 3, count))
        for factor, choosing in ((0.5, 5), (1.0, 8), (2.0, 5)):  # and on some that score
            write(
                folder,
                searches(folder)[name].config(factor, 11),
                images(choosing, int(30 / factor) % 50),
            )
    after = lab.fair_differences(folder / "fair.yaml", folder)
    assert before.equals(after)
    assert set(lab.fair_table(folder / "fair.yaml", folder)["chosen"].dropna()) == {1.0}


def test_holms_correction_is_over_all_differences_of_a_family(folder):
    """Family one has five differences, of which two wait for stage rest; they count all the same."""
    tune(folder, "Baseline", "FedAvg", "TCS")
    for name, counts in (
        ("Baseline", (40, 42, 46)),
        ("FedAvg", (30, 33, 35)),
        ("TCS", (39, 41, 44)),
    ):
        score(folder, name, *counts)
    table = lab.fair_differences(folder / "fair.yaml", folder)
    one = table[table["family"] == "one"].reset_index(drop=True)
    assert len(one) == 5 and one["p"].notna().sum() == 3
    corrected = lab.holm({str(i): p for i, p in enumerate(one["p"])})
    measured = {place: p for place, p in one["holm"].items() if not math.isnan(p)}
    assert measured == {place: corrected[str(place)] for place in measured} and len(measured) == 3
    assert one["holm"].min() == pytest.approx(5 * one["p"].min())
    assert table[table["family"] == "other"]["holm"].isna().all()


def test_nothing_is_estimated_before_a_stage_is_whole(folder):
    whole_main(folder)
    tune(folder, "top-K", "TCS-K4")
    score(folder, "top-K", 40, 42)
    score(folder, "TCS-K4", 40, 42, 45)
    table = lab.fair_differences(folder / "fair.yaml", folder)
    row = row_of(table, first="top-K", second="Baseline")
    assert math.isnan(row["measured"]) and row["verdict"] == "not measured"
    assert "stage rest" in row["reason"]
    assert math.isnan(row_of(table, first="TCS-K4", second="top-K")["p"])
    score(folder, "top-K", 40, 42, 45)
    table = lab.fair_differences(folder / "fair.yaml", folder)
    assert row_of(table, first="top-K", second="Baseline")["measured"] == pytest.approx(0)
    assert row_of(table, first="TCS-K4", second="top-K")["reason"] == ""


def test_a_method_of_which_a_scored_run_diverged_is_named_and_has_no_estimate(folder):
    whole_main(folder)
    config = searches(folder)["FedAvg"].config(1.0, 2)
    write(folder, config, images(0, 0), status="diverged")
    table = lab.fair_differences(folder / "fair.yaml", folder)
    row = row_of(table, first="TCS", second="FedAvg")
    assert (
        math.isnan(row["measured"]) and row["reason"] == f"diverged: FedAvg: {config.record_name}"
    )
    assert row_of(table, first="TCS", second="Baseline")["measured"] == pytest.approx(-2)
    row = row_of(lab.fair_table(folder / "fair.yaml", folder), scheme="FedAvg")
    assert math.isnan(row["accuracy"]) and row["diverged"] == config.record_name


def test_a_method_that_diverged_at_every_rate_holds_nobody_up(folder):
    whole_main(folder)
    for factor in (0.5, 1.0, 2.0):
        config = searches(folder)["FedAvg"].config(factor, 11)
        write(folder, config, images(0, 0), status="diverged")
    table = lab.fair_differences(folder / "fair.yaml", folder)
    reason = row_of(table, first="TCS", second="FedAvg")["reason"]
    assert reason == "diverged: FedAvg: every rate that was tried"
    assert row_of(table, first="TCS", second="Baseline")["measured"] == pytest.approx(-2)


def test_an_incomplete_plan_says_how_far_it_is(folder):
    plan = folder / "fair.yaml"
    assert lab.fair_progress(plan, folder) == (
        "0 of 15 tuning runs and 0 of 15 scored runs are made"
    )
    assert lab.fair_differences(plan, folder)["measured"].isna().all()
    write(folder, searches(folder)["TCS"].config(2.0, 11), images(7, 0))
    row = row_of(lab.fair_table(plan, folder), scheme="TCS")
    assert row["tried"][2.0] == pytest.approx(70) and math.isnan(row["tried"][0.5])
    assert math.isnan(row["rate"]) and (row["n"], row["planned"]) == (0, 3)
    tune(folder, "TCS", "Baseline")
    score(folder, "TCS", 40)
    counts = lab.fair_counts(plan, folder)
    assert (counts["tuning made"], counts["scoring made"]) == (6, 1)
    assert math.isnan(row_of(lab.fair_table(plan, folder), scheme="TCS")["accuracy"])


def test_the_table_has_rates_scores_and_bytes(folder):
    whole_main(folder)
    table = lab.fair_table(folder / "fair.yaml", folder)
    tcs, base = (row_of(table, scheme=name) for name in ("TCS", "Baseline"))
    assert (tcs["rate"], base["rate"]) == (0.5, 0.1)
    values = [78, 82, 88]
    assert tcs["accuracy"] == pytest.approx(np.mean(values))
    assert tcs["deviation"] == pytest.approx(np.std(values, ddof=1))
    clients = searches(folder)["TCS"].config(1.0, 1).clients
    assert (tcs["megabytes_up"], tcs["megabytes_down"]) == pytest.approx((2 / clients, 0.5))
    readable = lab.readable_fair(table)
    assert len(readable) == 5
    assert {f"rate × {factor}, %" for factor in ("0.5", "1", "2")} <= set(readable)
    shown = readable.set_index("method")["chosen rate"]
    assert (shown["TCS"], shown["Baseline"]) == ("0.5 (× 1)", "0.1 (× 1)")
    assert "0.5" not in shown["top-K"]  # no rate is chosen yet
    assert not table["at_end"].any()
    shown = lab.readable_fair_differences(lab.fair_differences(folder / "fair.yaml", folder))
    assert "TCS − Baseline" in set(shown["difference, points"])


def test_a_person_reads_each_number_in_its_place(folder):
    """One client's bytes of both ways together, and what was not made, diverged or never tried."""
    whole_main(folder)
    write(folder, searches(folder)["top-K"].config(0.5, 11), images(7, 0))
    write(folder, searches(folder)["top-K"].config(1.0, 11), images(0, 0), status="diverged")
    table = lab.fair_table(folder / "fair.yaml", folder)
    shown = lab.readable_fair(table).set_index("method")
    tried = [f"rate × {factor}, %" for factor in ("0.5", "1", "2")]
    assert list(shown.loc["top-K", tried]) == ["70.00", "diverged", "not made"]
    assert shown.loc["top-K", "MB both ways"] == shown.loc["top-K", "score, %"] == "–"
    clients = searches(folder)["TCS"].config(1.0, 1).clients
    assert shown.loc["TCS", "MB both ways"] == lab.format_number(2 / clients + 0.5, 4)
    assert shown.loc["TCS", "score, %"] == "82.67 ± 5.03"
    fewer = table.assign(tried=[{0.5: 60.0}] + [{1.0: 61.0}] * (len(table) - 1))
    assert list(lab.readable_fair(fewer).iloc[0][tried[:2]]) == ["60.00", "–"]
    rows = [{"family": "one", "first": "TCS", "second": "FedAvg", "measured": 1.0, "low": 0.0, "high": 2.0,
             "n": 3, "p": p, "holm": holm, "measure": "accuracy", "bound": "more_than", "bound_value": -0.5,
             "bootstrap": 0.4, "verdict": "supported", "reason": ""}
            for p, holm in ((0.001, 0.0009), (0.5, math.nan))]  # fmt: skip
    read = lab.readable_fair_differences(pd.DataFrame(rows))
    assert list(read["p"]) == ["0.001", "0.500"] and list(read["p by Holm"]) == ["< 0.001", "–"]
    assert set(read["ours"]) == {"+1.00 (0.00 to +2.00), n = 3"}


def test_scores_at_other_rates_are_shown_beside_those_at_the_chosen_one(folder):
    """For instance those of a shorter list of rates; a run that is missing or diverged leaves them out."""
    whole_main(folder)
    scheme = searches(folder)["TCS"]
    for seed, count in enumerate((40, 41, 42), 1):
        write(folder, scheme.config(2.0, seed), images(0, count))
        if seed < 3:
            write(folder, scheme.config(0.5, seed), images(0, 45))
    table = lab.fair_table(folder / "fair.yaml", folder)
    row = row_of(table, scheme="TCS")
    assert row["chosen"] == 1.0 and row["others"] == {2.0: pytest.approx(82)}
    assert lab.gains_of_tuning(table) == {}
    usual = table.assign(others=[{1.0: 80.0} if name == "TCS" else {} for name in table["scheme"]])
    assert lab.gains_of_tuning(usual) == {"TCS": pytest.approx(np.mean([78, 82, 88]) - 80)}
    shown = lab.readable_fair(table).set_index("method")["scores at other rates, %"]
    assert (shown["TCS"], shown["Baseline"]) == ("× 2: 82.00", "–")
    write(folder, scheme.config(2.0, 3), images(0, 0), status="diverged")
    assert row_of(lab.fair_table(folder / "fair.yaml", folder), scheme="TCS")["others"] == {}


@pytest.mark.parametrize("best", [0.5, 2.0])
def test_it_is_said_that_the_list_of_rates_ends_with_the_best_one(folder, best):
    tune(folder, "TCS", best=best)
    table = lab.fair_table(folder / "fair.yaml", folder)
    assert list(table[table["at_end"]]["scheme"]) == ["TCS"]
    shown = lab.readable_fair(table).set_index("method")["chosen rate"]
    assert shown["TCS"] == f"{0.5 * best:g} (× {best:g}, where the list ends)"


def test_runs_of_different_data_are_not_compared(folder):
    whole_main(folder)
    write(folder, searches(folder)["TCS"].config(1.0, 2), images(0, 41), data="others")
    with pytest.raises(
        ValueError, match="scored runs of Baseline, FedAvg, TCS: got records of diff"
    ):
        lab.fair_differences(folder / "fair.yaml", folder)


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_two_runs_have_a_deviation_and_one_has_none(folder, seeds):
    plan = folder / "fair.yaml"
    plan.write_text(TUNED.replace("[1, 2, 3]", str(seeds)), encoding="utf-8")
    tune(folder, "Baseline", "FedAvg", "TCS")
    score(folder, "Baseline", 40, 40)
    score(folder, "TCS", *(40, 43)[: len(seeds)])
    row = row_of(lab.fair_table(plan, folder), scheme="TCS")
    assert math.isnan(row["accuracy"])  # before the stage is whole
    score(folder, "FedAvg", 40, 40)
    row = row_of(lab.fair_table(plan, folder), scheme="TCS")
    assert row["accuracy"] == pytest.approx(80 if len(seeds) == 1 else 83)
    if len(seeds) == 1:
        assert math.isnan(row["deviation"])
    else:
        assert row["deviation"] == pytest.approx(6 / math.sqrt(2))


def test_the_runs_that_are_left_are_counted_until_none_is(folder):
    """Three rates and three seeds for each of two methods. Of one whose rates all diverged none is left."""

    def left():
        methods = fair.load_methods(folder / "fair.yaml", folder)
        two = [method for method in methods if method.name in ("TCS", "FedAvg")]
        return count_runs_left(two), len(list_next_runs(two))

    assert left() == (12, 6)  # what scores is known only when a rate is chosen
    tune(folder, "TCS")
    assert left() == (9, 6)
    score(folder, "TCS", 40)
    assert left() == (8, 5)
    for factor in (0.5, 1.0, 2.0):
        config = searches(folder)["FedAvg"].config(factor, 11)
        write(folder, config, images(0, 0), status="diverged")
    assert left() == (2, 2)
    score(folder, "TCS", 40, 42, 45)
    assert left() == (0, 0)


def test_a_method_that_is_not_stored_is_scored_in_one_model_with_the_stored_ones(folder):
    """TCS is compared with FedAvg, which sends as much and is 4 points below it in every seed."""
    whole_main(folder)
    methods = {method.name: method for method in fair.load_methods(folder / "fair.yaml", folder)}
    stored = {"Baseline": [methods["Baseline"]], "FedAvg": [methods["FedAvg"]]}
    track = SimpleNamespace(
        find_stored=lambda: stored,
        analysis=SimpleNamespace(confidence=0.95),
        group_alike=lambda tuned: dict.fromkeys([one.name for one in tuned], True),
    )
    scores = Scores(track, [methods["TCS"]])
    (point,) = scores.points
    clients = searches(folder)["TCS"].config(1.0, 1).clients
    assert (point.rate, point.n, point.accuracy) == (0.5, 3, pytest.approx(np.mean([78, 82, 88])))
    assert (point.up, point.down) == pytest.approx((2 / clients, 0.5))
    found = {one.method: one for one in scores.compare(point)}
    assert found["FedAvg"].equal_bytes.value == pytest.approx(4)
    assert found["FedAvg"].equal_bytes.n == 3
    freedom = found["FedAvg"].equal_bytes.residual_freedom
    assert freedom == pytest.approx(9 - 5)  # of all three methods' runs


def test_a_tuned_rate_has_ten_digits_after_the_point(folder):
    """Names of records depend on it: a digit more would make another run of it."""
    assert searches(folder)["TCS"].config(1 / 3, 1).learning_rate == 0.1666666667


def test_a_plan_that_compares_a_method_which_it_does_not_tune_is_refused(folder):
    path = folder / "fair.yaml"
    path.write_text(TUNED.replace("schemes: [TCS-K4]", "schemes: [STC]"), encoding="utf-8")
    with pytest.raises(ValueError, match="unknown method of the plan: STC"):
        lab.fair_differences(path, folder)


@pytest.mark.parametrize(
    ("low", "high", "bootstrap", "said"),
    [(-0.4, 0.4, 0.49, "supported"), (-0.4, 0.4, 0.6, "supported (the bootstrap's interval says open)"),
     (-0.9, -0.1, 0.4, "open: lower, but perhaps not by more than the bound")],
)  # fmt: skip
def test_a_verdict_that_the_bootstrap_does_not_share_is_named(folder, low, high, bootstrap, said):
    """Its interval of ± 0.6 around 0 contains the bound of −0.5."""
    whole_main(folder)
    table = lab.fair_differences(folder / "fair.yaml", folder).dropna(subset="measured")
    word = lab.judge_interval(low, high, "more_than", -0.5)
    mean = (low + high) / 2
    shown = lab.readable_fair_differences(
        table.assign(measured=mean, low=low, high=high, bootstrap=bootstrap, verdict=word)
    )
    assert set(shown["no loss"]) == {f"**{said}**"}


# Two controls ─────────────────────────────────────────────────────────────────────────────────────


def control_runs(folder, stage):
    return lab.plan_runs(folder / "controls.yaml", results=folder)[stage]


def control(folder, stage, **counts):
    """The runs of a stage, seed by seed with so many of the fifty images right."""
    for config in control_runs(folder, stage):
        name = config.scheme.name.replace("-", "_")
        if config.seed <= len(counts.get(name, ())):
            write(folder, config, images(0, counts[name][config.seed - 1]))


@pytest.fixture
def of_evidence(folder, monkeypatch):
    """Judged records of the profile: TCS and, for the pool, FedAvg."""
    profile = lab.read_params([folder / "tiny.yaml"]) | {"learning_rate": 0.5, "seeds": [1, 2, 3]}
    configs = lab.plan(profile | {"schemes": ["TCS", "FedAvg"]})
    counts = {"TCS": (40, 43, 45), "FedAvg": (38, 40, 43)}
    made = {c.record_name: write(folder / "elsewhere", c, images(0, counts[c.scheme.name][c.seed - 1]))
            for c in configs}  # fmt: skip
    monkeypatch.setattr(fair, "load_planned_records", lambda profile, results: (None, made))
    return made


def test_the_mechanism_is_asked_beside_the_judged_records(folder, of_evidence):
    """TCS minus the random mask, 3 / 60 of the images in every seed: 5 points, and FedAvg in the pool."""
    control(folder, "mechanism", TCS_Random=(37, 40, 42))
    row = row_of(lab.control_answers(folder / "controls.yaml", folder), question="mechanism")
    assert row["measured"] == pytest.approx(5) and row["n"] == 3
    assert row["verdict"] == lab.judge_interval(row["low"], row["high"], "more_than", 0.3)
    records = dict(of_evidence)
    records |= {c.record_name: lab.read_record(lab.record_path(c, folder))
                for c in control_runs(folder, "mechanism")}  # fmt: skip
    read = lab.evidence.claims.Claims(confidence=0.95, claims={"it": {
        "says": "it", "measure": "accuracy", "first": ["TCS", 0.5], "second": ["TCS-Random", 0.5], "more_than": 0.3}})  # fmt: skip
    (same,) = lab.judge_claims(read, records).to_dict("records")
    assert (row["low"], row["high"]) == (same["low"], same["high"])


def test_judged_records_of_other_data_do_not_answer_a_control(folder, of_evidence):
    for config in control_runs(folder, "mechanism"):
        write(folder, config, images(0, 40), data="others")
    with pytest.raises(ValueError, match="runs of stage mechanism and judged ones: got records of"):
        lab.control_answers(folder / "controls.yaml", folder)


def test_the_regime_is_asked_of_its_own_runs_only(folder, of_evidence):
    """TCS loses 6 points in every seed; with the runs of other trainings there would be two of a seed."""
    control(folder, "regime", TCS=(30, 33, 36), Baseline=(36, 39, 42))
    row = row_of(lab.control_answers(folder / "controls.yaml", folder), question="regime")
    assert row["measured"] == pytest.approx(-10) and row["verdict"] in ("supported", "open")
    assert len(row["first_records"].split()) == 3


def test_a_control_has_no_answer_before_its_stage_is_whole(folder, of_evidence):
    control(folder, "mechanism", TCS_Random=(37, 40))
    table = lab.control_answers(folder / "controls.yaml", folder)
    row = row_of(table, question="mechanism")
    assert math.isnan(row["measured"]) and row["verdict"] == "not measured"
    assert row["reason"].startswith("2 of 3 runs")
    assert (row["made"], row["stage_planned"]) == (2, 3)
    assert "2 of 3" in lab.readable_answers(table)["runs made (all of this part of the plan)"][0]


def test_a_question_about_a_stage_that_is_not_planned_is_refused(folder):
    path = folder / "controls.yaml"
    path.write_text(
        CONTROLS.replace("stage: regime, first", "stage: other, first"), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"unknown stage .*regime.*: other"):
        lab.control_answers(path, folder)


# A prediction ─────────────────────────────────────────────────────────────────────────────────────


PREDICTION = """
versions:
  - {date: 2026-01-01, made_by: us, loses: {TCS: {points: -1.0, interval: [-2, 0]}, top-K: {points: null, interval: [0, 1]}}}
paper: {TCS: 0.2}
"""


def test_a_prediction_stands_beside_runs_of_its_length_alone(tmp_path):
    path = tmp_path / "prediction.yaml"
    path.write_text(PREDICTION, encoding="utf-8")
    long = lab.read_params([lab.ROOT / "params/paper.yaml"]) | {"learning_rate": 0.5, "seeds": [0]}

    def made(scheme, accuracy, **changes):
        (config,) = lab.plan(long | {"schemes": [scheme]} | changes)
        rows = [{"epoch": n, "rounds": 1, "dense_rounds": 0, "bits_up": 0, "bits_down": 0,
                 "bytes_up": 0, "bytes_down": 0, "accuracy": accuracy} for n in range(1, config.epochs + 1)]  # fmt: skip
        rows[-2]["accuracy"] = 0.1  # the last epoch counts
        record = {"version": 1, "digest": config.digest, "status": "finished", "dimension": 10,
                  "config": config.identity(), "rows": rows,
                  "provenance": {"fingerprint": "x", "wall_seconds": 1.0}}  # fmt: skip
        file = lab.record_path(config, tmp_path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record), encoding="utf-8")

    made("Baseline", 0.9, epochs=60)
    made("TCS", 0.5, epochs=60)
    made("TCS", 0.885)
    for other in (
        {"clients": 100},
        {"batch_size": 8},
        {"phi_global": 1e-3},
        {"train_samples": 5000},
    ):
        for profile in ("paper", "gpu"):  # whatever comes first by its name
            made("TCS", 0.2, profile=profile, **other)
    made("Baseline", 0.2, profile="gpu", centralized_learning_rate=1.0)
    table = lab.compare_prediction(path, tmp_path)
    assert table["n"].tolist() == [0, 0] and table["measured"].isna().all()
    assert set(lab.readable_prediction(table)["measured"]) == {"not tested at the paper's length"}
    made("Baseline", 0.9)
    row, other = lab.compare_prediction(path, tmp_path).to_dict("records")
    assert row["measured"] == pytest.approx(-1.5) and (row["n"], other["n"]) == (1, 0)
    assert (row["points"], row["low"], row["paper"]) == (-1, -2, 0.2) and math.isnan(
        other["points"]
    )
    shown = lab.readable_prediction(lab.compare_prediction(path, tmp_path))["measured"]
    assert shown[0] == "−1.50, n = 1, inside of the interval"
    ends = lab.compare_prediction(path, tmp_path).iloc[[0, 0, 0, 0]]
    ends = ends.assign(measured=[-2.0, 0.0, -2.01, 0.01])  # an end belongs to the interval
    places = lab.readable_prediction(ends)["measured"]
    assert ["inside" in place for place in places] == [True, True, False, False]


def test_the_plans_that_are_there_can_be_read():
    params = lab.ROOT / "params"
    counts = lab.fair_counts(params / "fair_plan.yaml")
    assert counts["tuning planned"] >= 33 and counts["scoring planned"] == 33
    families = lab.fair_differences(params / "fair_plan.yaml").groupby("family").size()
    assert dict(families) == {"with momentum": 3, "without momentum": 13}
    assert list(lab.control_answers(params / "controls_plan.yaml")["stage_planned"]) == [6, 6, 12]
    assert len(lab.compare_prediction(params / "prediction.yaml")) >= 6
