"""The paper's claims: how they are read and judged, and that what stands in results/ is rebuilt."""

import math

import numpy as np
import pytest
import tcs_lab as lab
import torch
from scipy.special import stdtrit
from tcs_lab.training.training import pack_flags

PLAN = lab.ROOT / "params" / "evidence_plan.yaml"


@pytest.mark.parametrize(
    ("low", "high", "bound", "value", "verdict"),
    [
        (-0.4, 0.9, "at_least", -0.5, "supported"),
        (-0.6, 0.9, "at_least", -0.5, "open"),
        (-0.9, -0.6, "at_least", -0.5, "contradicted"),
        (0.0, 0.9, "more_than", 0, "open"),
        (-0.9, 0.0, "more_than", 0, "contradicted"),
        (-0.9, 0.5, "at_most", 0.5, "supported"),
        (0.6, 0.7, "at_most", 0.5, "contradicted"),
        (-0.9, -0.1, "less_than", 0, "supported"),
        (0.0, 0.4, "less_than", 0, "contradicted"),
    ],
)
def test_verdicts(low, high, bound, value, verdict):
    assert lab.judge_interval(low, high, bound, value) == verdict


# Made-up records ──────────────────────────────────────────────────────────────────────────────────


def record(name, seed, accuracy, bits=0.0, eta=0.5, overlap=None, right=None):
    """A record as far as claims look at it: one dense epoch, two sparse ones."""
    scheme = {"name": name, "centralized": False, "local_steps": 1, "rule": "TCS", "value_bits": 32,
              "phi_global": 0.01, "phi_local": 0.001}  # fmt: skip
    rows = [
        {"rounds": 10, "dense_rounds": dense, "accuracy": accuracy,
         "bits_up": 32 * 1000 * dense + bits * 1000 * (10 - dense), "bits_down": 0}
        | ({"update_overlap": overlap, "update_overlap_chance": 0.2} if overlap else {})
        for dense in (10, 0, 0)
    ]  # fmt: skip
    rows[-1] |= {"right": pack_flags(torch.from_numpy(right))} if right is not None else {}
    config = {"scheme": scheme, "seed": seed, "learning_rate": eta, "dataset": "synthetic"}
    return {
        "config": config, "dimension": 1000, "rows": rows, "status": "finished",
        "provenance": {"fingerprint": "made up"},
    }  # fmt: skip


def group(name, *points, **more):
    """Records of a scheme that ended at so many percent, seeds from 0."""
    return [record(name, seed, point / 100, **more) for seed, point in enumerate(points)]


def scored(name, seed, right):
    """A record of a scheme that was right on these images."""
    return record(name, seed, float(np.mean(right)), right=np.array(right, dtype=bool))


def claims(confidence=0.95, rest=None, **named):
    """What a file with these claims says."""
    filled = {n: {"says": n, "first": ["TCS", 0.5]} | claim for n, claim in named.items()}
    return lab.evidence.claims.Claims(confidence=confidence, claims=filled, **(rest or {}))


def files(*records):
    return {f"{i}.json": one for i, one in enumerate(records)}


def judge(claim, *records):
    """The row of one claim, among these records."""
    return lab.judge_claims(claims(it=claim), files(*records)).iloc[0]


TOP_K = {"measure": "accuracy", "second": ["top-K", 0.5]}
# Seeds are points apart, residuals ±0.1: half an interval is 4.3027 x 0.2 / sqrt(3) = 0.497.
OURS, THEIRS = group("TCS", 60, 70, 80), group("top-K", 59.8, 70, 80.2)


# Accuracies ───────────────────────────────────────────────────────────────────────────────────────


def test_an_accuracy_is_an_estimate_then_a_verdict():
    row = judge(TOP_K | {"at_least": -0.5}, *OURS, *THEIRS)
    assert (row.n, row.planned, row.verdict, row.reason) == (3, 3, "supported", "")
    assert row.measured == pytest.approx(0, abs=1e-9) and row.half == pytest.approx(
        0.4969, abs=1e-4
    )
    assert (row.low, row.high) == pytest.approx((-0.4969, 0.4969), abs=1e-4)
    assert row.half_seeds == pytest.approx(row.half) and math.isnan(row.half_images)
    assert row.first_records.split() == ["0.json", "1.json", "2.json"]
    assert row.second_records.split() == ["3.json", "4.json", "5.json"]
    for bound, verdict in (({"at_least": -0.4}, "open"), ({"more_than": 0.6}, "contradicted")):
        assert judge(TOP_K | bound, *OURS, *THEIRS).verdict == verdict


def test_other_schemes_sharpen_it():
    """Two schemes of two seeds have one degree of freedom; four have three."""
    two = *group("TCS", 60, 70.2), *group("top-K", 60.2, 70)
    more = *group("FedAvg", 50, 60), *group("Baseline", 51, 61, eta=0.1)
    assert judge(TOP_K | {"at_least": -2}, *two).verdict == "open"
    row = judge(TOP_K | {"at_least": -2}, *two, *more)
    assert (row.freedom, row.verdict) == (3, "supported")


def test_images_are_drawn_too():
    """Both schemes miss one image of four in every seed, and not the same one: nothing varies from
    seed to seed. Gaps of 100, -100, 0, 0 have a variance of 20,000 / 3; a quarter of it is left."""
    runs = [scored("TCS", s, [1, 0, 1, 1]) for s in range(3)]
    runs += [scored("top-K", s, [0, 1, 1, 1]) for s in range(3)]
    row = judge(TOP_K | {"at_least": -0.5}, *runs)
    assert (row.measured, row.half_seeds) == pytest.approx(
        (0, 0), abs=1e-9
    ) and row.verdict == "open"
    assert row.half_images == row.half == pytest.approx(1.959964 * math.sqrt(20_000 / 12))
    assert row.bootstrap == pytest.approx(row.half, rel=0.15)
    del runs[-1]["rows"][-1]["right"]
    row = judge(TOP_K | {"at_least": -0.5}, *runs)  # what is not kept is not counted
    assert row.half == pytest.approx(0, abs=1e-9) and math.isnan(row.half_images)
    assert row.verdict == "supported"


def test_outcomes_that_are_not_what_the_accuracy_says_are_refused():
    one = scored("TCS", 0, [1, 0, 1])
    assert list(lab.read_outcomes(one)) == [True, False, True]
    one["rows"][-1]["accuracy"] = 0.3
    with pytest.raises(ValueError, match="right: got 2 of 8 "):
        lab.read_outcomes(one)
    assert lab.read_outcomes(OURS[0]) is None


def test_what_an_open_interval_leaves_out_is_said():
    for scheme, way in (
        (group("TCS", 59.1, 69.4, 79.4), "lower"),
        (group("TCS", 60.5, 70.6, 81), "higher"),
    ):
        bound = {"at_least": -0.5} if way == "lower" else {"at_most": 0.5}
        row = judge(TOP_K | bound, *scheme, *THEIRS)
        assert row.verdict == "open"
        text = lab.format_verdict(row)
        assert text.startswith("open: ") and way in text
    row = judge(TOP_K | {"at_least": -0.4}, *OURS, *THEIRS)
    for low, high in ((row.low, row.high), (0.0, 0.9), (-0.9, 0.0)):  # 0 is not left out
        ends = {"low": low, "high": high, "bootstrap": row.half}
        assert lab.format_verdict(row.to_dict() | ends) == "open"


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], "no records of TCS at 0.5, top-K at 0.5"),
        (OURS, "no records of top-K at 0.5"),
        ([OURS[0], THEIRS[1]], "no seed in common"),
        ([OURS[0], THEIRS[0]], "too few runs for an interval (n = 1)"),
        ([*OURS[:2], THEIRS[0], *group("FedAvg", 1, 2, 3)], "too few runs for an interval (n = 1)"),
    ],
)
def test_what_is_not_measured_says_why(runs, reason):
    row = judge(TOP_K | {"at_least": -0.5}, *runs)
    assert (row.verdict, row.reason) == ("not measured", reason)
    assert math.isnan(row.measured) == reason.startswith("no ") and math.isnan(row.half)
    assert lab.format_verdict(row) == f"not measured: {reason}"


def test_a_scheme_of_which_a_run_diverged_has_no_estimate():
    """The other seeds alone would support it; others are judged as if it were not there."""
    lost = record("TCS", 3, 0) | {"status": "diverged", "rows": []}
    runs = [*OURS, lost, *THEIRS, *group("FedAvg", 60, 70, 80)]
    named = {"a": TOP_K | {"at_least": -9}, "b": TOP_K | {"at_least": -9, "first": ["FedAvg", 0.5]}}
    one, other = lab.judge_claims(claims(**named), files(*runs)).itertuples()
    assert (one.n, one.verdict, one.reason) == (0, "not measured", "diverged: 3.json")
    assert math.isnan(one.measured) and other.verdict == "supported" and other.freedom == 2


def test_two_runs_of_one_seed_are_refused():
    with pytest.raises(ValueError, match=r"0\.json and 1\.json: got two .* seed 0"):
        judge(TOP_K | {"at_least": 0}, OURS[0], OURS[0])


def test_the_main_claims_have_holms_p_beside_them():
    """Two of one half-interval; p of the third is not corrected, that of an absent one counts."""
    named = {
        "a": TOP_K | {"at_least": -0.4969, "main": True},
        "b": TOP_K | {"at_least": -9, "main": True},
        "c": TOP_K | {"at_least": -9},
        "d": TOP_K | {"at_least": -9, "main": True, "second": ["FedAvg", 0.5]},
    }
    table = lab.judge_claims(claims(**named), files(*OURS, *THEIRS)).set_index("claim")
    assert table.p["a"] == pytest.approx(0.05, abs=1e-4)
    assert table.holm["a"] == pytest.approx(2 * table.p["a"])
    assert table.holm["b"] == pytest.approx(3 * table.p["b"])
    assert table.holm[["c", "d"]].isna().all()


# Everything else ──────────────────────────────────────────────────────────────────────────────────


def test_bits_are_by_construction():
    one = record("TCS", 0, 0.5, bits=0.4)
    row = judge({"measure": "uplink", "at_least": 80}, one)
    assert row.measured == pytest.approx(80) and math.isnan(row.half)
    assert (row.verdict, lab.format_verdict(row)) == (
        "by construction",
        "by construction: the bound is met",
    )
    whole = judge({"measure": "uplink_whole", "at_least": 80}, one)
    assert whole.measured == pytest.approx(32 / ((32 + 0.4 + 0.4) / 3))
    assert lab.format_verdict(whole) == "by construction: the bound is not met"
    against = {"measure": "uplink", "second": ["top-K", 0.5], "at_least": 1.1}
    assert judge(against, one, record("top-K", 0, 0.5, bits=0.5)).measured == pytest.approx(1.25)


def test_the_own_share_of_a_message_is_by_construction():
    """K_global = 10 and K_local = 1 of 1,000."""
    row = judge({"measure": "own_share", "at_most": 0.1, "n": 1}, record("TCS", 0, 0.5))
    assert row.measured == pytest.approx(1 / 11)
    assert lab.format_verdict(row) == "by construction: the bound is met"


def test_the_overlap_of_dense_updates_is_what_is_beyond_chance():
    """(0.6 - 0.2) / (1 - 0.2); one record decides nothing; records without it say nothing."""
    claim = {"measure": "dense_overlap", "at_least": 0.4}
    one = record("TCS", 0, 0.5, overlap=0.6)
    row = judge(claim, one)
    assert row.measured == pytest.approx(0.5) and row.verdict == "not measured"
    row = judge(claim, one, record("TCS", 1, 0.5, overlap=0.616), record("TCS", 2, 0.5))
    assert (row.n, row.verdict) == (2, "open")
    assert row.half == pytest.approx(12.7062 * 0.01, rel=1e-4)  # t of 1; values 0.50 and 0.52
    assert judge(claim, record("TCS", 2, 0.5)).reason == "its records do not say"
    more = claim | {"second": ["top-K", 0.5]}
    row = judge(more, one, record("top-K", 0, 0.5, overlap=0.4))
    assert row.measured == pytest.approx(0.25)


def test_the_paper_is_judged_by_the_same_rule():
    named = {
        "a": TOP_K | {"at_least": -0.5, "paper": 0.2, "paper_interval": [-0.1, 0.5]},
        "b": TOP_K | {"more_than": 0, "paper": 0.2, "paper_interval": [-0.1, 0.5]},
        "c": TOP_K | {"less_than": -1, "paper": 0.2, "paper_interval": [-0.1, 0.5]},
        "d": {"measure": "uplink", "at_least": 80, "paper": 88},
        "e": TOP_K | {"at_least": -0.5},
    }
    theirs = lab.judge_claims(claims(**named), {})["paper_verdict"]
    assert list(theirs) == ["supported", "open", "contradicted", "by construction", ""]


# Without a verdict ────────────────────────────────────────────────────────────────────────────────


def test_the_steps_of_a_decomposition_add_up():
    """Also where a scheme has fewer seeds than the others."""
    chain = [("TCS", 0.5), ("FedAvg", 0.5), ("Baseline", 0.1)]
    read = claims(rest={"decomposition": [chain]}, it=TOP_K | {"at_least": 0})
    runs = [*OURS, *group("FedAvg", 61, 71.5), *group("Baseline", 60, 71, 81.1, eta=0.1)]
    table = lab.decompose(read, files(*runs))
    assert [f"{row.first} {row.second}" for row in table.itertuples()] == [
        "TCS Baseline", "FedAvg Baseline", "TCS FedAvg"]  # fmt: skip
    assert table.measured[0] == pytest.approx(table.measured[1] + table.measured[2])
    assert list(table.n) == [3, 2, 2] and table.half.notna().all()
    assert lab.decompose(read, {})["reason"].str.startswith("no records of").all()


UNEQUAL = {"pairs": [[("TCS", 0.5), ("top-K", 0.5)], [("TCS", 0.5), ("FedAvg", 0.5)]],
           "settings": {"half": {"participation": 0.5}}}  # fmt: skip


def unequal(*there):
    """The rows of unequal clients, by pair and place; equal clients end 0.2 points apart."""
    read = claims(rest={"unequal": UNEQUAL}, it=TOP_K | {"at_least": 0})
    equal = files(*OURS, *THEIRS, *group("FedAvg", 59, 69, 79.3))
    found = {f"there-{file}": one for file, one in files(*there).items()}
    table = lab.compare_unequal_clients(read, equal, {"half": found})
    rows = {(row["second"], row["where"]): row for row in table.to_dict("records")}
    return rows, lab.estimate_difference(read, equal, ("TCS", 0.5), ("top-K", 0.5))


def test_equal_and_unequal_clients_have_the_same_data():
    read = claims(rest={"unequal": UNEQUAL}, it=TOP_K | {"at_least": 0})
    other = [one | {"provenance": {"fingerprint": "other images"}} for one in OURS]
    with pytest.raises(ValueError, match="equal and of unequal clients: got records of different"):
        lab.compare_unequal_clients(read, files(*OURS), {"half": files(*other)})


def test_a_pair_of_unequal_clients_has_the_interval_of_its_own_differences():
    """FedAvg scatters there by ten points, which is no matter of TCS and top-K: their differences
    are -2, -3 and -4, so that half an interval is t(2) / sqrt(3)."""
    there = *group("TCS", 30, 50, 41), *group("top-K", 32, 53, 45), *group("FedAvg", 20, 60, 30)
    rows, equal = unequal(*there)
    own = rows["top-K", "there"]
    assert (own["measured"], own["n"]) == (pytest.approx(-3), 3)
    assert own["half"] == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert rows["FedAvg", "there"]["half"] > 20
    for key in ("measured", "low", "high", "n"):
        assert rows["top-K", "equal"][key] == equal[key]
    gap = rows["top-K", "there − equal"]
    assert gap["measured"] == pytest.approx(own["measured"] - equal["measured"])
    parts = [
        ((row["half"] / stdtrit(row["freedom"], 0.975)) ** 2, row["freedom"])
        for row in (own, equal)
    ]
    variance = sum(v for v, _ in parts)
    freedom = variance**2 / sum(v**2 / f for v, f in parts)  # Welch's
    assert gap["half"] == pytest.approx(stdtrit(freedom, 0.975) * math.sqrt(variance), rel=1e-6)


def test_without_a_scheme_there_is_no_row_of_unequal_clients_but_of_equal_ones():
    rows, _ = unequal(*group("TCS", 30, 50), *group("top-K", 33, 53))
    reasons = [rows["FedAvg", where]["reason"] for where in ("there", "equal", "there − equal")]
    assert reasons == ["no records of FedAvg at 0.5", "", "no records of FedAvg at 0.5"]


# A verdict and the bootstrap ──────────────────────────────────────────────────────────────────────


def test_every_verdict_for_which_the_bootstrap_has_another_word_says_so():
    """Of a claim that is not among the main ones, too."""
    row = judge(TOP_K | {"at_least": -0.5}, *OURS, *THEIRS).to_dict()
    wider = row | {"measured": 0.0, "bootstrap": 0.6}
    assert not row["main"] and lab.differing_bootstrap_verdict(wider) == "open"
    assert lab.format_verdict(wider) == "supported (the bootstrap's interval says open)"
    assert lab.format_verdict(row | {"measured": 0.0, "bootstrap": 0.4}) == "supported"
    beyond = wider | {
        "verdict": "open",
        "low": -0.6,
        "high": -0.1,
        "measured": -0.6,
        "bootstrap": 0.05,
    }
    text = lab.format_verdict(beyond)
    assert text.startswith("open: ") and text.endswith(
        "(the bootstrap's interval says contradicted)"
    )
    assert (
        lab.differing_bootstrap_verdict(row | {"verdict": "not measured", "bootstrap": 0.6}) == ""
    )


# What recurs ──────────────────────────────────────────────────────────────────────────────────────


def test_what_recurs_is_set_beside_both_kinds_of_chance():
    """Of 1,000 entries the largest ten; chance given the layers is 0.2 in every record."""
    runs = [record("FedAvg", seed, 0.5, overlap=seen) for seed, seen in enumerate((0.5, 0.7))]
    found = lab.measure_recurrence(runs)
    assert found == {"seen": pytest.approx(0.6), "by_layers": pytest.approx(0.2), "by_chance": 0.01}


# One interval on all pages ────────────────────────────────────────────────────────────────────────


def test_differences_of_a_table_are_those_of_the_planned_model(monkeypatch):
    """Of records that are the model's; otherwise there are none, and a table has Student's."""
    base = group("Baseline", 61, 70.5, 81, eta=0.1)
    runs = [one | {"digest": f"{n}"} for n, one in enumerate([*OURS, *THEIRS, *base])]
    read = claims(it=TOP_K | {"at_least": 0})
    named = {lab.training.configuration.record_file_name(one): one for one in runs}
    monkeypatch.setattr(
        lab.evidence.planned_model, "load_planned_records", lambda profile, results: (read, named)
    )
    gaps = lab.estimate_gaps("evidence", [*runs[:3], *runs[6:]])
    row = lab.estimate_difference(read, named, ("TCS", 0.5), ("Baseline", 0.1))
    assert set(gaps) == {"TCS"} and gaps["TCS"]["difference_n"] == row["n"] == 3
    keys = {"difference": "measured", "difference_low": "low", "difference_high": "high"}
    for key, of_row in keys.items():
        assert 100 * gaps["TCS"][key] == pytest.approx(row[of_row])
    other = OURS[0] | {"digest": "of another setting"}
    assert lab.estimate_gaps("evidence", [other, *runs[6:]]) is None
    assert lab.estimate_gaps("small", runs) is None  # has no plan
    assert lab.estimate_gaps("evidence", runs[:3]) == {}  # no Baseline among them


def test_a_plan_beside_what_is_made(tmp_path):
    table = lab.count_made(lab.plan_runs(PLAN), tmp_path)
    assert table.planned[0] == 35 and table.stage[0] == "1"
    assert not table[["made", "diverged", "hours"]].to_numpy().any()


# For a person ─────────────────────────────────────────────────────────────────────────────────────


def test_what_a_person_reads(tmp_path):
    named = {"bits": {"measure": "uplink", "at_least": 80}, "acc": TOP_K | {"at_least": -0.4},
             "none": TOP_K | {"at_least": 0, "second": ["FedAvg", 0.5]}}  # fmt: skip
    runs = [record("TCS", s, a, bits=0.4) for s, a in enumerate((0.6, 0.7, 0.8))]
    table = lab.judge_claims(claims(**named), files(*runs, *THEIRS))
    assert set(table.verdict) <= set(lab.VERDICTS)
    text = lab.readable_claims(table)
    assert list(text["Supported if"]) == ["≥ 80", "≥ −0.4"]
    assert list(text["n"]) == ["3", "3 of 3"]
    assert list(text["Verdict"]) == [
        "**by construction: the bound is met**",
        "**open (the bootstrap's interval says supported)**",
    ]
    assert text["Ours (interval)"][0] == "×80"
    assert lab.list_unmeasured(table) == "Not measured: none."
    lab.save_table(
        table, tmp_path / "claims", "All", lab.readable_claims, lab.list_unmeasured(table)
    )
    assert (
        (tmp_path / "claims.md").read_text(encoding="utf-8").endswith("|\n\nNot measured: none.\n")
    )


@pytest.mark.parametrize(
    ("low", "shown"),
    [(-0.501, "−0.501"), (-0.5004, "−0.5004"), (-0.499, "−0.50"), (-0.51, "−0.51")],
)
def test_a_rounded_end_never_says_another_verdict(low, shown):
    table = lab.judge_claims(claims(it=TOP_K | {"at_least": -0.5}), files(*OURS, *THEIRS))
    assert f"({shown} to " in lab.readable_claims(table.assign(low=low))["Ours (interval)"][0]


@pytest.mark.parametrize(("bits", "shown"), [(32 / 79.997, "×79.997"), (0.4, "×80")])
def test_a_rounded_ratio_never_does_either(bits, shown):
    table = lab.judge_claims(claims(it={"measure": "uplink", "at_least": 80}),
                       files(record("TCS", 0, 0.5, bits=bits)))  # fmt: skip
    assert list(lab.readable_claims(table)["Ours (interval)"]) == [shown]
