"""Tables: intervals, bits by hand, rows of schemes, what a person reads, and that what stands in
results/ is rebuilt."""

import ast
import math
import re

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
import tcs_lab as lab
from common import READERS
from execute_notebooks import linked

import tcs_core as tcs

# Numbers and names ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(1.87e3, 3, "1,870"), (2e3, 3, "2,000"), (0.0123456, 3, "0.0123"), (-3.73e-3, 3, "−0.00373"),
     (4.2e-7, 3, "4.2\u00a0×\u00a010⁻⁷"), (-1e-15, 3, "−1\u00a0×\u00a010⁻¹⁵"), (1e18, 3, "1\u00a0×\u00a010¹⁸"),
     (9.51e6, 2, "9,500,000"), (999.6, 3, "1,000"), (99.95, 4, "99.95"), (0.36397, 4, "0.364"), (0, 3, "0"),
     (100.0, 3, "100"), (9.9996e-5, 3, "0.0001"), (math.nan, 3, "–"), (math.inf, 3, "∞")],
)  # fmt: skip
def test_a_number_is_written_as_a_person_does(value, digits, text):
    assert lab.format_number(value, digits) == text


def test_factors_have_three_digits_at_most():
    assert [lab.format_times(x) for x in (8.76, 87.9, 156.6, 1911.4)] == [
        "8.8",
        "88",
        "157",
        "1,910",
    ]


def test_the_papers_factor_is_that_of_the_budget_it_prints():
    """To three digits: the budget is printed with four."""
    paper = lab.read_params([lab.ROOT / "params/table1.yaml"])["paper"]
    for name, printed in (("TCS", 88), ("TCS-L4-Q5", 1910)):
        assert (
            lab.format_times(lab.paper_factor(name))
            == lab.format_times(32 / paper[name][2])
            == f"{printed:,}"
        )


def test_names_and_numbers_of_a_table_are_not_broken():
    table = pd.DataFrame([["TCS-M2-E3-K4++", "−0.49 (−0.97 to −0.01), n = 5", "at one-half, 2 MB"]],
                         columns=["Scheme", "of TCS-L4-Q5, points", "said"])  # fmt: skip
    head, _, row = lab.markdown(table).splitlines()
    assert head == "| Scheme | of <nobr>TCS-L4-Q5</nobr>, points | said |"
    assert row.split(" | ")[0] == "| <nobr>TCS-M2-E3-K4++</nobr>"
    assert row.split(" | ")[1] == "−0.49 (−0.97\u00a0to\u00a0−0.01), n\u00a0=\u00a05"
    assert row.split(" | ")[2].replace("\u00a0", " ") == "at one-half, 2 MB |"
    assert (
        lab.plain_markdown(table).splitlines()[2].startswith("| TCS-M2-E3-K4++ | −0.49 (−0.97 to")
    )
    prose = "TCS-L4-Q5 and n = 5 outside a table"
    assert lab.prevent_line_breaks(prose) == prose


# Intervals ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("confidence", "n", "quantile"),  # from a printed table of Student's distribution
    [(0.95, 2, 12.706), (0.95, 3, 4.303), (0.95, 5, 2.776), (0.95, 31, 2.042), (0.99, 10, 3.250)],
)
def test_students_interval(confidence, n, quantile):
    values = np.linspace(-1, 1, n)
    mean, low, high = lab.mean_interval(values, confidence)
    assert mean == pytest.approx(0, abs=1e-12) and low == pytest.approx(-high)
    assert high == pytest.approx(quantile * values.std(ddof=1) / math.sqrt(n), rel=2e-4)


def test_an_interval_of_one_value_or_none():
    assert lab.mean_interval([5.0]) == (5.0, -math.inf, math.inf)
    assert all(map(math.isnan, lab.mean_interval([])))
    assert lab.mean_interval([2.0, 2.0]) == (2.0, 2.0, 2.0)


def test_welchs_interval():
    def half(one, other):
        mean, low, high = lab.welch_interval((3.0, one), (1.0, other))
        assert mean == 2 and high - mean == pytest.approx(mean - low)
        return high - mean

    assert half(1.0, 1.0) == pytest.approx(2.306 * math.sqrt(0.4), abs=1e-3)  # t of 8
    assert half(1.0, 0.0) == pytest.approx(2.776 * math.sqrt(0.2), abs=1e-3)  # t of 4
    assert half(0.0, 0.0) == 0


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.5, 0.25, 0.75), "+0.50 (+0.25 to +0.75)"),
        ((-0.5, -math.inf, math.inf), "−0.50"),
        ((-0.5, math.nan, math.nan), "−0.50"),
        ((0.5, 0.5, 0.5), "+0.50"),
        ((math.nan, math.nan, math.nan), "–"),
        ((-0.004, -0.25, 0.004), "0.00 (−0.25 to 0.00)"),
    ],
)
def test_an_interval_as_text(numbers, text):
    assert lab.format_interval(*numbers) == text


def test_words_stand_on_the_left_of_their_column_and_numbers_on_the_right():
    columns = {
        "method": ["TCS", "5-bit values lose nothing"],
        "n": ["3 of 8", "–"],
        "gap": ["−0.17 (−0.34 to −0.01), n = 8", "**+0.2**"],
        "if": ["≥ −0.5", "×88.2"],
        "verdict": ["**open**", "–"],
        "rate": ["not made", "77.83"],
        "later": ["–", "–"],
    }
    marks = lab.plain_markdown(pd.DataFrame(columns)).splitlines()[1]
    assert marks == "| :--- | ---: | ---: | ---: | :--- | ---: | ---: |"


# Records as rows ──────────────────────────────────────────────────────────────────────────────────


def fake(name, accuracy, seed, warmup=1, status="finished"):
    """A record with three epochs of ten rounds at D = 1000; the first `warmup` dense."""
    rows = [
        {"epoch": e + 1, "accuracy": accuracy, "rounds": 10, "dense_rounds": 10 * dense,
         "bits_up": 320_000 if dense else 4_000, "bits_down": 320_000 if dense else 8_000,
         "bytes_up": 400_000 if dense else 5_000, "bytes_down": 40_000 if dense else 1_000,
         "train_loss": 1.0 - accuracy}
        for e, dense in enumerate([True] * warmup + [False] * (3 - warmup))
    ]  # fmt: skip
    identity = lab.RunConfig(tcs.Scheme.named(name), seed=seed, epochs=3).identity()
    return {
        "config": identity, "digest": lab.digest_of(identity), "status": status, "reason": None,
        "dimension": 1000, "rows": rows, "provenance": {"fingerprint": "images"},
    }  # fmt: skip


def test_bits_per_parameter_by_hand():
    """20 sparse rounds of 400 bits and 10 dense ones of 32,000, over 1000 parameters, H = 2."""
    bits = lab.bits_per_parameter(fake("TCS-L2", 0.5, 0))
    assert bits["uplink"] == pytest.approx(400 / 1000 / 2)
    assert bits["uplink with warm-up"] == pytest.approx((20 * 400 + 10 * 32_000) / 30 / 1000 / 2)
    assert bits["downlink"] == pytest.approx(800 / 1000 / 2)
    assert math.isnan(lab.bits_per_parameter(fake("Baseline", 0.5, 0))["uplink"])


def test_dense_fedavg_costs_32_bits():
    bits = lab.bits_per_parameter(fake("FedAvg", 0.5, 0, warmup=3))
    assert bits["uplink"] == bits["downlink"] == bits["uplink with warm-up"] == pytest.approx(32)


def test_a_dense_scheme_with_a_compressed_downlink_has_a_warm_up_of_its_own():
    bits = lab.bits_per_parameter(fake("FedAvg-D2", 0.5, 0))
    assert bits["downlink"] == pytest.approx(0.8)
    assert bits["downlink with warm-up"] == pytest.approx((320_000 + 2 * 8_000) / 30 / 1000)


def test_where_nothing_is_sparse_no_traffic_is_said():
    bits = lab.bits_per_parameter(fake("TCS", 0.5, 0, warmup=3))
    assert math.isnan(bits["uplink"]) and bits["uplink with warm-up"] == pytest.approx(32)
    wide = fake("TCS-W10", 0.5, 0, warmup=0)
    wide["config"]["warmup_epochs"] = 3
    assert math.isnan(lab.bits_per_parameter(wide)["uplink"])


def test_the_traffic_of_a_run_is_that_of_one_client_with_its_start():
    """Ten clients share the bytes up; each receives all bytes down. The dense epoch takes ten rounds of
    4 bytes for each of 1000 values, and 20 bytes around them, in both directions."""
    sent = lab.traffic(fake("TCS", 0.5, 0))
    assert sent["up"] == pytest.approx((400_000 + 2 * 5_000) / 10)
    assert sent["down"] == pytest.approx(40_000 + 2 * 1_000)
    assert sent["warm-up"] == pytest.approx(10 * 2 * (4_000 + 20))
    some = fake("TCS", 0.5, 0)
    some["config"]["participation"] = 0.5  # five clients send the bytes of a round
    assert lab.traffic(some)["up"] == pytest.approx(2 * sent["up"])
    assert lab.traffic(some)["down"] == sent["down"]


def test_a_start_with_larger_masks_is_counted_once():
    """All bytes of its epoch, of which one round was dense in addition."""
    wide = fake("TCS-W10", 0.5, 0, warmup=0)
    wide["config"]["warmup_epochs"] = 1
    wide["rows"][0]["dense_rounds"] = 1
    assert lab.traffic(wide)["warm-up"] == pytest.approx(5_000 / 10 + 1_000)
    wide["config"]["warmup_epochs"] = 0
    assert lab.traffic(wide)["warm-up"] == pytest.approx(2 * (4_000 + 20))


def test_megabytes_of_a_whole_run_are_those_of_finished_ones():
    stopped = fake("TCS", 0.1, 1, status="diverged") | {"rows": []}
    both, one = lab.summary([fake("TCS", 0.5, 0), stopped]), lab.summary([fake("TCS", 0.5, 0)])
    assert both["megabytes_up"].iloc[0] == one["megabytes_up"].iloc[0] > 0


def test_summary_means_deviations_and_the_papers_figures():
    records = [fake("TCS", a, s) for s, a in enumerate((0.80, 0.82, 0.84))]
    table = lab.summary([*records, fake("top-K", 0.7, 0)], {"TCS": [92.44, 0.143, 0.363]})
    tcs_row, top_row = table.itertuples()
    assert (tcs_row.n, top_row.n) == (3, 1)
    named = [lab.RunConfig("TCS", seed=s, epochs=3).record_name for s in range(3)]
    assert tcs_row.records.split() == named
    assert tcs_row.accuracy == pytest.approx(0.82) and tcs_row.accuracy_std == pytest.approx(0.02)
    assert tcs_row.train_loss == pytest.approx(0.18)
    assert tcs_row.paper_accuracy == pytest.approx(0.9244) and tcs_row.paper_bits == 0.363
    assert math.isnan(top_row.accuracy_std) and math.isnan(top_row.paper_accuracy)
    text = lab.readable(table)
    assert list(text["Ours: accuracy %"]) == ["82.00 ± 2.00", "70.00"]
    assert list(text["Paper: accuracy %"]) == ["92.44 ± 0.143", "–"]
    assert not [column for column in text if "Baseline" in column]
    assert list(text["Bits up: formula / sent"]) == ["0.364 / 0.4", "0.4064 / 0.4"]


PAPER = {"TCS": [92.44, 0.143, 0.363], "Baseline": [92.228, 0.232, None]}


def test_differences_are_paired_by_seed_and_the_papers_are_welchs():
    """Seeds differ by ten points, pairs by a tenth: only pairing can decide."""
    gaps = (0.011, 0.010, 0.009)
    base = [fake("Baseline", 0.5 + 0.1 * s, s) for s in range(4)]
    ours = [fake("TCS", 0.5 + 0.1 * s + gap, s) for s, gap in enumerate(gaps)] + [fake("TCS", 0, 9)]
    first, last = lab.summary(ours + base, PAPER).itertuples()
    assert (first.n, first.difference_n) == (4, 3)
    assert first.difference == pytest.approx(0.01)
    expected = lab.mean_interval(gaps)
    assert (first.difference_low, first.difference_high) == pytest.approx(expected[1:])
    theirs = lab.welch_interval((92.44, 0.143), (92.228, 0.232))
    assert 100 * first.paper_difference_low == pytest.approx(theirs[1])
    assert math.isnan(last.difference) and last.difference_n == 0
    text = lab.readable(lab.summary(ours + base, PAPER))
    assert list(text["Ours − Baseline, points"]) == ["+1.00 (+0.75 to +1.25), n = 3", "–"]
    assert text["Paper − Baseline, points"][0].startswith("+0.21 (−0.0")
    lost = [*base[:3], fake("Baseline", 0.1, 7, status="diverged")]
    assert math.isnan(lab.summary(ours + lost)["difference"][0])


def test_the_paper_may_print_no_deviation_or_nothing():
    paper = {"TCS": [92.44, 0.143, None], "top-K": [None] * 3, "Baseline": [92.228, None, None]}
    rows = [fake(name, 0.5, 0) for name in ("TCS", "top-K", "Baseline")]
    text = lab.readable(lab.summary(rows, paper))
    assert list(text["Paper − Baseline, points"]) == ["+0.21", "–", "–"]


def test_what_is_planned_and_not_recorded_is_one_line(tmp_path):
    planned = lab.plan({"schemes": ["TCS", "top-K", "Baseline"], "epochs": 3, "seeds": 3})
    table = lab.summary([fake("top-K", 0.7, 0)], PAPER, planned)
    assert list(table["scheme"]) == ["TCS", "top-K", "Baseline"] and list(table["n"]) == [0, 1, 0]
    assert list(lab.readable(table)["Ours: accuracy %"]) == ["70.00"]
    nothing = lab.summary([], {}, planned)
    for rows, missing in ((table, "TCS, Baseline"), (nothing, "TCS, top-K, Baseline")):
        lab.save_table(rows, tmp_path / "table", "A title")
        text = (tmp_path / "table.md").read_text(encoding="utf-8")
        assert f"\n\nNot measured yet: {missing}.\n" in text and "not measured" not in text
        assert len(pd.read_csv(tmp_path / "table.csv")) == 3
    assert text.count("|") == 0, "no table without a row"


def test_what_is_there_has_one_data_set_and_hides_no_run_that_diverged(monkeypatch, tmp_path):
    """Records that only lie there get no other means than those that were made just now."""
    planned = lab.plan({"schemes": ["TCS"], "epochs": 3, "seeds": 3})
    made = dict(zip(planned, (fake("TCS", 0.5, 0), fake("TCS", 0.9, 1)), strict=False))
    for config in made:
        path = lab.record_path(config, tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(lab.runs.records, "read_record", lambda path, config: made[config])
    assert len(lab.load_records(planned, tmp_path)) == 2
    made[planned[1]]["status"] = "diverged"
    assert list(lab.load_records(planned, tmp_path, diverged=False)) == [planned[0].record_name]
    table = lab.readable(lab.summary(lab.load_records(planned, tmp_path).values()))
    assert list(table["Ours: accuracy %"]) == ["diverged (1 of 2)"]
    made[planned[1]]["provenance"] = {"fingerprint": "others"}
    with pytest.raises(ValueError, match=r"ci.*runs: got records of different data"):
        lab.load_records(planned, tmp_path)


def test_a_saved_table_reads_as_it_was(tmp_path):
    records = [fake("TCS", 0.8, 0), fake("TCS", 0.7, 1), fake("Baseline", 0.9, 0)]
    table = lab.summary(records)
    lab.save_table(table, tmp_path / "table1", "A title")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "table1.csv"), table, check_dtype=False)
    text = (tmp_path / "table1.md").read_text(encoding="utf-8")
    assert text.startswith("**A title**\n") and lab.plain_markdown(lab.readable(table)) in text


def test_a_dot_in_a_name_is_part_of_it(tmp_path):
    table = lab.summary([fake("TCS", 0.8, 0)])
    for name in ("eta0.5", "eta0.8"):
        lab.save_table(table, tmp_path / name, "A title")
    assert {p.name for p in tmp_path.iterdir()} == {
        f"eta0.{n}.{s}" for n in "58" for s in ("csv", "md")
    }


def test_two_runs_of_one_seed_are_never_one_row():
    runs = [fake("TCS", 0.8, 0), fake("TCS", 0.7, 0)]
    with pytest.raises(ValueError, match="TCS: got two runs of one seed"):
        lab.summary(runs)


def test_a_table_without_a_title_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="figure, title, profile: missing"):
        lab.draw_table({"table": 1, "title": None}, [], [], tmp_path)
    assert not list(tmp_path.iterdir())


def test_where_a_profile_lists_its_seeds_no_others_are_drawn():
    """So that a run that tuned a learning rate is in no table."""
    assert lab.with_every_seed({"seeds": [1, 2], "epochs": 3})["seeds"] == [1, 2]
    assert lab.with_every_seed({"seeds": 3})["seeds"] == lab.with_every_seed({})["seeds"] == 100


def test_differences_that_are_given_take_the_place_of_students():
    records = [fake("TCS", 0.8, 0), fake("TCS", 0.7, 1), fake("Baseline", 0.9, 0)]
    given = {
        "difference": -0.01,
        "difference_low": -0.02,
        "difference_high": 0.0,
        "difference_n": 7,
    }
    table = lab.summary(records, gaps={"TCS": given}).set_index("scheme")
    assert table.loc["TCS", list(given)].tolist() == list(given.values())
    assert table["accuracy"].equals(lab.summary(records).set_index("scheme")["accuracy"])
    assert math.isnan(lab.summary(records, gaps={}).set_index("scheme")["difference"]["TCS"])


# What stands in results/ ──────────────────────────────────────────────────────────────────────────


TABLES = [p for p in sorted(lab.ROOT.glob("results/*/table?.csv")) if p.parent.name not in READERS]
EXECUTED = [path.with_suffix(".ipynb") for path in TABLES]


@pytest.mark.parametrize("path", TABLES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_tables_and_figures_are_rebuilt_from_the_records(path, tmp_path):
    """The same bytes, from nothing but params/ and the records."""
    import matplotlib

    files = [lab.ROOT / f"params/{name}.yaml" for name in (path.stem, path.parent.name)]
    params = lab.read_params(files)
    records = list(lab.load_records(lab.plan(lab.with_every_seed(params))).values())
    lab.draw_table(params, records, lab.plan(params), tmp_path)
    project = (lab.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    tested = f'"matplotlib=={matplotlib.__version__}"' in project
    rebuilt = [f for f in tmp_path.iterdir() if tested or f.suffix in (".csv", ".md")]
    assert len(rebuilt) == (4 if tested else 2)
    assert not [f.name for f in rebuilt if (path.parent / f.name).read_bytes() != f.read_bytes()]


@pytest.mark.parametrize("path", sorted(lab.ROOT.glob("results/*/table1_*.md")))
def test_the_table_of_longer_runs_is_rebuilt_from_the_records(path):
    params = lab.read_params(
        [lab.ROOT / f"params/{name}.yaml" for name in ("table1", path.parent.name)]
    )
    params |= {"epochs": int(path.stem.partition("_")[2])}
    records = lab.load_records(lab.plan(params | {"seeds": 100})).values()
    table = lab.summary(records, params["paper"], lab.plan(params))
    assert lab.plain_markdown(lab.readable(table[table["n"] > 0])) in path.read_text(
        encoding="utf-8"
    )


# The notebooks that draw them ─────────────────────────────────────────────────────────────────────


DRAWS = lab.ROOT / "notebooks" / "08_tables_and_curves.ipynb"
NO_TABLE = {
    "claims",
    "sensitivity",
    "claims_text",
    "compare_plan",
    "controls_plan",
    "evidence_plan",
    "fair_plan",
    "gpu_plan",
    "hook_plan",
    "links",
    "optimizers",
    "prediction",
    "rivals_small",
    "rivals_text",
    "sentences",
}  # read by their own functions
PARAMS = sorted({p.stem for p in (lab.ROOT / "params").glob("*.yaml")} - NO_TABLE)


def defaults(path):
    found = papermill.inspect_notebook(str(path))
    return {key: ast.literal_eval(value["default"]) for key, value in found.items()}


def test_every_parameter_of_a_run_can_be_given_and_none_has_a_default_of_the_notebooks_own():
    everything, table = (defaults(DRAWS.with_stem(n)) for n in ("00_reproduce", DRAWS.stem))
    assert set(table) == lab.PARAMETERS | {"evidence", "results"}
    runs = lab.PARAMETERS - {"table", "figure", "title", "schemes", "paper", "learning_rate"}
    assert set(everything) == runs | {"evidence", "results", "tables", "points"}
    assert all(everything[key] is None for key in runs)
    assert all(value is None for key, value in table.items() if key not in ("table", "evidence"))


@pytest.mark.parametrize("profile", PARAMS)
def test_every_params_key_is_a_parameter_of_the_table_notebook(profile):
    assert set(lab.read_params([lab.ROOT / f"params/{profile}.yaml"])) <= set(defaults(DRAWS))


@pytest.mark.parametrize("profile", ["quick", "short", "cpu", "gpu", "paper"])
def test_the_notebooks_runs_are_those_of_the_command_line(profile, monkeypatch):
    """To the digit of their names: as after papermill has put in a cell of its own."""
    monkeypatch.setattr(lab, "forecast", lambda *_: "")  # it times rounds of the paper's model
    files = [lab.ROOT / f"params/{name}.yaml" for name in ("table2", profile)]
    params = lab.read_params(files)
    injected = "# Parameters\n" + "\n".join(f"{key} = {v!r}" for key, v in params.items())
    namespace = {"lab": lab, "In": [injected], **defaults(DRAWS), **params}
    code = [c.source for c in nbformat.read(DRAWS, 4).cells if c.cell_type == "code"]
    (named,) = [source for source in code if source.startswith("given = ")]
    exec(named, namespace)
    by_notebook = [config.record_name for config in namespace["configs"]]
    assert by_notebook == [config.record_name for config in lab.plan(params)]


def test_nothing_recorded_is_said_and_no_error(tmp_path):
    """A profile that has no record, by 08 and 00."""
    folder = lab.results_folder("paper")
    before = sorted(folder.rglob("*"))
    for path in (DRAWS, DRAWS.with_stem("00_reproduce")):
        made = papermill.execute_notebook(
            str(path), None, {"evidence": "paper"}, progress_bar=False, cwd=str(tmp_path)
        )
        text = "".join(o.get("text", "") for c in made.cells for o in c.get("outputs", []))
        assert re.search(r"without a record: TCS( \(all \d seeds\))?, TCS-L2", text)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("path", EXECUTED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_the_executed_notebook_beside_a_table_shows_it(path):
    """And has the code of today's 08. Made by: tests/execute_notebooks.py results/<profile>"""
    cells = nbformat.read(path, 4).cells
    outputs = [o for c in cells if c.cell_type == "code" for o in c.outputs]
    shown = [o.get("data", {}).get("text/markdown", "").strip() for o in outputs]
    assert (
        lab.prevent_line_breaks(path.with_suffix(".md").read_text(encoding="utf-8")).strip()
        in shown
    )
    drawn = nbformat.read(DRAWS, 4).cells
    own = [linked(c.source) if c.cell_type == "markdown" else c.source for c in drawn]
    assert [c.source for c in cells if "injected-parameters" not in c.metadata.tags] == own
