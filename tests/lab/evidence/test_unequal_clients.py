"""Unequal clients beside equal ones: which runs stand in which cell, and what is left out."""

import pytest
import tcs_lab as lab
from common import config

PAIRS = [[["TCS", 0.5], ["top-K", 0.5]], [["TCS", 0.5], ["rand-K", 0.5]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real ones, of two seeds there and three of equal clients; of rand-K there is none."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for share, seeds in ((0.5, (1, 2)), (1.0, (1, 2, 3))):
        configs = [config(s, seed=n, participation=share, learning_rate=0.5)
                   for s in ("TCS", "top-K") for n in seeds]  # fmt: skip
        made[share] = {f"{one.scheme.name} {one.seed}": lab.run(one, folder) for one in configs}
    return made[1.0], {"half": made[0.5], "both": {}}


@pytest.fixture
def read(tmp_path):
    text = f"""
    confidence: 0.95
    claims: {{it: {{says: it, where: here, main: true, measure: accuracy, first: [TCS, 0.5],
                   second: [top-K, 0.5], at_least: 0, n: 3, paper: null}}}}
    unequal: {{pairs: {PAIRS}, settings: {{half: {{participation: 0.5}}, both: {{clients: 2}}}}}}
    """
    path = tmp_path / "claims.yaml"
    path.write_text(text, encoding="utf-8")
    return lab.read_claims(path)


def first(cell):
    """The mean in front of an interval."""
    return float(cell.partition(",")[0].partition(" ")[0].replace("−", "-"))


def points(made, seed, epoch=-1):
    one, other = (
        made[f"{scheme} {seed}"]["rows"][epoch]["accuracy"] for scheme in ("TCS", "top-K")
    )
    return 100 * (one - other)


def test_costs_there_and_with_equal_clients(runs, read):
    """Two seeds there; with equal clients all three, as everywhere."""
    equal, there = runs
    (row,) = lab.unequal_costs(read, equal, there).to_dict("records")
    assert (row["clients"], row["difference, points"]) == ("half", "TCS − top-K")
    own = sum(points(there["half"], n) for n in (1, 2)) / 2
    usual = sum(points(equal, n) for n in (1, 2, 3)) / 3
    expected = {"there": (own, 2), "equal": (usual, 3), "there − equal": (own - usual, 2)}
    for where, (mean, n) in expected.items():
        assert first(row[where]) == pytest.approx(mean, abs=0.006)
        assert row[where].endswith(f"n = {n}")


def test_differences_seed_by_seed_at_the_end_and_before(runs, read):
    """The mean of the last two epochs is by hand; of rand-K there is no run, and no row."""
    (row,) = lab.unequal_by_seed(read, runs[1]["half"], last=2).to_dict("records")
    assert row["difference, points, by seed"] == "TCS − top-K"
    ends = [float(gap.replace("−", "-")) for gap in row["last epoch"].split(", ")]
    assert ends == pytest.approx([points(runs[1]["half"], n) for n in (1, 2)], abs=0.006)
    means = [float(gap.replace("−", "-")) for gap in row["mean of the last 2"].split(", ")]
    before = [points(runs[1]["half"], n, epoch=-2) for n in (1, 2)]
    assert means == pytest.approx(
        [(a + b) / 2 for a, b in zip(ends, before, strict=True)], abs=0.012
    )


def test_masks_there_and_with_equal_clients_of_the_same_seeds(runs):
    equal, there = runs
    (row,) = lab.unequal_masks(equal, there).to_dict("records")
    assert (row["clients"], row["n"]) == ("half", "2")
    for where, made in (("there", there["half"]), ("equal", equal)):
        found = [lab.measure_coincidence(made[f"TCS {n}"]) for n in (1, 2)]
        for key, title, digits in (
            ("stay", "the mask stays", 3),
            ("clients", "clients per entry", 2),
        ):
            mean = sum(one[key] for one in found) / 2
            assert first(row[f"{title}, {where}"]) == pytest.approx(mean, abs=0.6 * 10**-digits)
    ends = [row[f"clients per entry, {where}"][-5:] for where in ("there", "equal")]
    assert ends == [" of 2", " of 3"]


def test_without_runs_there_are_no_rows(read):
    assert not len(lab.unequal_costs(read, {}, {"half": {}}))
    assert not len(lab.unequal_masks({}, {"half": {}}))
    assert not len(lab.unequal_by_seed(read, {}))


def test_without_a_common_seed_the_reason_is_named(runs, read):
    equal, there = runs
    apart = {"half": {name: r for name, r in there["half"].items() if not name.endswith(" 1")}}
    others = {name: r for name, r in equal.items() if not name.endswith(" 2")}
    rows = lab.compare_unequal_clients(read, others, apart).to_dict("records")
    row = next(r for r in rows if r["where"] == "there − equal" and r["second"] == "top-K")
    assert row["reason"] == "no seed in common with equal clients"
