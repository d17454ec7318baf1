"""The paper's claims: how they are read and judged, and that what stands in results/ is rebuilt."""

import math

import pytest
import tcs_lab as lab


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),  # from a printed table of Student's distribution
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 4, 2.776), (0.95, 30, 2.042), (0.99, 9, 3.250)],
)
def test_students_quantiles(confidence, freedom, quantile):
    assert lab.student_quantile(confidence, freedom) == pytest.approx(quantile, abs=6e-4)


def test_an_interval_of_a_mean():
    mean, low, high = lab.mean_interval([1.0, 2.0, 3.0], 0.95)
    assert (mean, low, high) == pytest.approx((2, 2 - 2.4843, 2 + 2.4843), abs=1e-3)
    assert lab.mean_interval([5.0], 0.95) == (5.0, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("low", "high", "bound", "value", "verdict"),
    [
        (-0.4, 0.9, "at_least", -0.5, "holds"),
        (-0.6, 0.9, "at_least", -0.5, "not decided"),
        (-0.9, -0.6, "at_least", -0.5, "does not hold"),
        (0.0, 0.9, "more_than", 0, "not decided"),
        (-0.9, 0.0, "more_than", 0, "does not hold"),
        (-0.9, 0.5, "at_most", 0.5, "holds"),
        (0.6, 0.7, "at_most", 0.5, "does not hold"),
        (-0.9, -0.1, "less_than", 0, "holds"),
        (0.0, 0.4, "less_than", 0, "does not hold"),
        (-math.inf, math.inf, "at_least", -100, "not decided"),
    ],
)
def test_verdicts(low, high, bound, value, verdict):
    assert lab.verdict(low, high, bound, value) == verdict


def record(name, seed, accuracy, bits=0.0, eta=0.5, overlap=None):
    """A record as far as claims look at it: one dense epoch, two sparse ones."""
    scheme = {"name": name, "centralized": False, "local_steps": 1, "rule": "TCS", "value_bits": 32}
    rows = [
        {"rounds": 10, "dense_rounds": dense, "accuracy": accuracy, "mask_overlap": overlap,
         "bits_up": 32 * 1000 * dense + bits * 1000 * (10 - dense), "bits_down": 0}
        for dense in (10, 0, 0)
    ]  # fmt: skip
    config = {"scheme": scheme, "seed": seed, "learning_rate": eta}
    return {"config": config, "dimension": 1000, "rows": rows}


def judge(claim, *records):
    named = {f"{i}.json": one for i, one in enumerate(records)}
    return next(lab.judged({"it": claim}, named, 0.95).itertuples())


def test_accuracies_are_paired_by_seed():
    """Seeds differ by ten points, pairs by a tenth: only pairing can decide."""
    claim = {"says": "", "measure": "accuracy", "first": ["TCS", 0.5], "second": ["top-K", 0.5]}
    ours = [record("TCS", s, 0.5 + 0.1 * s) for s in range(4)]
    gaps = (0.0110, 0.0100, 0.0090, 0.0100)
    theirs = [record("top-K", s, 0.5 + 0.1 * s - gap) for s, gap in enumerate(gaps)]
    alone = record("top-K", 9, 0.1)
    row = judge(claim | {"more_than": 0.8}, *ours, *theirs, alone)
    assert (row.n, row.verdict) == (4, "holds")
    assert row.measured == pytest.approx(1.0)
    assert row.first_records.split() == ["0.json", "1.json", "2.json", "3.json"]
    assert row.second_records.split() == ["4.json", "5.json", "6.json", "7.json"]
    assert judge(claim | {"more_than": 0.8}, ours[0], theirs[0]).verdict == "not decided"
    assert judge(claim | {"more_than": 0.8}, ours[0], alone).verdict == "not measured"


def test_bits_and_overlap():
    claim = {"says": "", "first": ["TCS", 0.5], "at_least": 80}
    one = record("TCS", 0, 0.5, bits=0.4, overlap=0.7)
    assert judge(claim | {"measure": "uplink"}, one).measured == pytest.approx(80)
    assert judge(claim | {"measure": "uplink"}, one).verdict == "holds"
    whole = judge(claim | {"measure": "uplink_whole"}, one)
    assert whole.measured == pytest.approx(32 / ((32 + 0.4 + 0.4) / 3))
    assert whole.verdict == "does not hold"
    against = {"measure": "uplink", "second": ["top-K", 0.5], "at_least": 1.1}
    row = judge(claim | against, one, record("top-K", 0, 0.5, bits=0.5))
    assert row.measured == pytest.approx(1.25)
    overlap = claim | {"measure": "overlap", "at_least": 0.5}
    assert judge(overlap, one).verdict == "not decided"  # one trial
    again = record("TCS", 1, 0.5, overlap=0.71), record("TCS", 2, 0.5, overlap=None)
    row = judge(overlap, one, *again)
    assert (row.n, row.verdict) == (2, "holds")


GOOD = "says: it, measure: uplink, first: [TCS, 0.5], at_least: 1"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("confidence: 2.0\nclaims: {a: {says: it}}", "confidence: got 2.0"),
        ("confidence: 0.95\nclaims: []", "claims: allowed"),
        ("confidence: 0.95\nclaims: {a: {says: it}}", "'a': allowed: a mapping"),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD}, bound: 3}}}}", "'bound' is unknown"),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD}, at_most: 3}}}}", "allowed: one number"),
        (
            f"confidence: 0.95\nclaims: {{a: {{{GOOD}, paper_interval: [2, 1]}}}}",
            "two numbers, rising",
        ),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD}, paper_interval: 2}}}}", "two numbers, rising"),
        (
            f"confidence: 0.95\nclaims: {{a: {{{GOOD}, paper_interval: [1, x]}}}}",
            "two numbers, rising",
        ),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD.replace('1', 'x')}}}}}", "allowed: one number"),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD.replace('uplink', 'luck')}}}}}", "'luck'"),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD.replace('uplink', 'accuracy')}}}}}", "second"),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD.replace('[TCS, 0.5]', 'TCS')}}}}}", "'TCS'"),
        (f"confidence: 0.95\nclaims: {{a: {{{GOOD.replace('TCS', 'TCX')}}}}}", "'TCX' is unknown"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_named(tmp_path, text, names):
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="(?s)" + names.replace("[", r"\[")):
        lab.read_claims(path)


def welch(one, other, trials=5):
    """Half the 95 % interval of a difference of two means with these standard deviations."""
    a, b = one**2 / trials, other**2 / trials
    freedom = (a + b) ** 2 / ((a**2 + b**2) / (trials - 1))
    return lab.student_quantile(0.95, freedom) * math.sqrt(a + b)


def test_welchs_interval():
    assert welch(1.0, 1.0) == pytest.approx(2.306 * math.sqrt(0.4), abs=1e-3)  # t of 8
    assert welch(1.0, 0.0) == pytest.approx(2.776 * math.sqrt(0.2), abs=1e-3)  # t of 4


def test_the_claims_of_the_paper_can_be_read_and_quote_its_tables():
    """What stands under `paper` follows from the tables' own figures."""
    _, claims = lab.read_claims(lab.ROOT / "params" / "claims.yaml")
    printed, deviations = {}, {}
    for table in (1, 2, 3):
        read = lab.read_params([lab.ROOT / f"params/table{table}.yaml"])
        for name, (accuracy, deviation, bits) in read["paper"].items():
            eta = 0.1 if name.startswith("Baseline") else read["learning_rate"]
            printed.setdefault((name, eta), (accuracy, bits))
            deviations.setdefault((name, eta), deviation)
    checked = 0
    for name, claim in claims.items():
        sides = [printed[tuple(claim[side])] for side in ("first", "second") if side in claim]
        if claim["measure"] == "accuracy":
            assert claim["paper"] == pytest.approx(sides[0][0] - sides[1][0], abs=0.0101), name
            half = welch(*(deviations[tuple(claim[side])] for side in ("first", "second")))
            expected = (claim["paper"] - half, claim["paper"] + half)
            assert claim["paper_interval"] == pytest.approx(expected, abs=1e-3), name
        elif claim["measure"] == "uplink":
            expected = (sides[1][1] if len(sides) > 1 else 32) / sides[0][1]
            assert claim["paper"] == pytest.approx(expected, rel=1e-3), name
        else:
            continue
        checked += 1
    assert checked >= 18


FOLDERS = [f for f in (lab.ROOT / "results").iterdir() if (f / "claims.csv").is_file()]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_and_figures_are_rebuilt_from_the_records(folder, tmp_path):
    """The same bytes, from nothing but params/ and the records."""
    import matplotlib

    profile = lab.read_params([lab.ROOT / f"params/{folder.name}.yaml"])
    plans = {t: lab.read_params([lab.ROOT / f"params/table{t}.yaml"]) | profile for t in (1, 2, 3)}
    records = {t: lab.recorded(lab.plan(params)) for t, params in plans.items()}
    for t, params in plans.items():
        if not (folder / f"table{t}.csv").exists():
            continue
        summary = lab.summary(records[t].values(), params["paper"])
        lab.save_table(summary, tmp_path / f"table{t}", params["title"])
        made = next(iter(records[t].values()))["provenance"]["dataset"]
        title = f"Fig. {params['figure']}: test accuracy, {made}, profile {folder.name}"
        figure = lab.accuracy_figure(records[t].values(), title)
        lab.save_figure(figure, tmp_path / f"figure{params['figure']}")
    confidence, claims = lab.read_claims(lab.ROOT / "params" / "claims.yaml")
    more = [lab.plan(params | {"seeds": 100}) for params in plans.values()]  # claims take all seeds
    everything = {file: one for plan in more for file, one in lab.recorded(plan).items()}
    title = (folder / "claims.md").read_text().split("**")[1]
    judged = lab.judged(claims, everything, confidence)
    lab.save_table(judged, tmp_path / "claims", title, lab.readable_claims)
    figure = lab.claims_figure(judged, f"Accuracy claims, profile {folder.name}")
    lab.save_figure(figure, tmp_path / "claims")
    tested = f'"matplotlib=={matplotlib.__version__}"' in (lab.ROOT / "pyproject.toml").read_text()
    suffixes = (".csv", ".md", ".png", ".svg") if tested else (".csv", ".md")
    rebuilt = sorted(f.name for f in tmp_path.iterdir() if f.suffix in suffixes)
    assert len(rebuilt) >= len(suffixes)
    different = [n for n in rebuilt if (folder / n).read_bytes() != (tmp_path / n).read_bytes()]
    assert not different
