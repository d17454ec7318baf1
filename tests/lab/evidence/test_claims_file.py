"""The files of claims: what is refused, what they quote, and that results/ is rebuilt from them."""

import pytest
import tcs_lab as lab
from common import READERS

CLAIMS = lab.ROOT / "params" / "claims.yaml"
GOOD = "says: it, measure: uplink, first: [TCS, 0.5], at_least: 1"
MORE = "confidence: 0.95\nclaims: {{a: {{{}}}}}".format
PAIR = "pairs: [[[TCS, 0.5], [FedAvg, 0.5]]]"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[]", "allowed: a mapping"),
        ("confidence: 2.0\nclaims: {a: {" + GOOD + "}}", "confidence: got 2.0"),
        ("confidence: 0.95\nclaims: []", "claims: got []"),
        ("confidence: 0.95\nclaims: {}", "claims: got {}"),
        (MORE("says: it"), "claims: a: measure: "),
        (MORE(f"{GOOD}, bound: 3"), "claims: a: bound: got 3"),
        (MORE(f"{GOOD}, needs: [dense]"), "claims: a: needs: got ['dense']"),
        (MORE(f"{GOOD}, at_most: 3"), "claims: a: got at_least, at_most"),
        (MORE(GOOD.replace(", at_least: 1", "")), "got no bound"),
        (
            MORE(f"{GOOD}, paper: 1, paper_interval: [2, 1]"),
            "paper_interval: got [2.0, 1.0] with paper 1",
        ),
        (MORE(f"{GOOD}, paper: 3, paper_interval: [1, 2]"), "got [1.0, 2.0] with paper 3.0"),
        (MORE(f"{GOOD}, paper_interval: [1, 2]"), "got [1.0, 2.0] with paper None"),
        (MORE(f"{GOOD}, paper_interval: 2"), "paper_interval: got 2"),
        (MORE(f"{GOOD}, paper_interval: [1, x]"), "got 'x'"),
        (MORE(f"{GOOD}, n: 0"), "n: got 0"),
        (MORE(f"{GOOD}, main: true"), "main: got true for a claim on uplink"),
        (MORE(f"{GOOD}, second: [TCS, 0.5]"), "second: got ('TCS', 0.5), allowed: another"),
        (MORE(GOOD.replace("1", "x")), "at_least: got 'x'"),
        (MORE(GOOD.replace("uplink", "luck")), "measure: got 'luck'"),
        (MORE(GOOD.replace("uplink", "accuracy")), "second: missing"),
        (MORE(GOOD.replace("[TCS, 0.5]", "TCS")), "first: got 'TCS'"),
        (MORE(GOOD.replace("TCS", "TCX")), "'TCX' is unknown"),
        (MORE(GOOD.replace("TCS", "tcs")), "got 'tcs', allowed: 'TCS'"),
        (MORE(GOOD) + "\nclams: {}", "clams: got {}"),
        (MORE(GOOD) + "\ngates: {}", "gates: got {}"),
        (
            MORE(GOOD) + "\ndecomposition: [[[TCS, 0.5]]]",
            "decomposition: value 1: got [['TCS', 0.5]]",
        ),
        (MORE(GOOD) + "\nunequal: {" + PAIR + ", settings: {}}", "unequal: settings: got {}"),
        (
            MORE(GOOD) + "\nunequal: {" + PAIR + ", settings: {x: {participation: 2.0}}}",
            "settings: x: participation: got 2.0",
        ),
        (
            MORE(GOOD) + "\nunequal: {" + PAIR + ", settings: {x: {luck: 2}}}",
            "settings: x: unknown setting: luck",
        ),
    ],
)
def test_a_claim_that_cannot_be_judged_is_named(tmp_path, text, names):
    path = tmp_path / "claims.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        lab.read_claims(path)
    assert str(error.value).startswith(str(path)) and names in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_claims_of_the_paper_can_be_read_and_quote_its_tables():
    """What stands under `paper` follows from the tables' own figures."""
    printed = {}
    for table in (1, 2, 3):
        read = lab.read_params([lab.ROOT / f"params/table{table}.yaml"])
        for name, row in read["paper"].items():
            eta = 0.1 if name.startswith("Baseline") else read["learning_rate"]
            printed.setdefault((name, eta), row)
    checked = 0
    for name, claim in lab.read_claims(CLAIMS).claims.items():
        sides = [printed.get(side) for side in claim.schemes]
        if claim.paper is None or None in sides:
            continue
        if claim.measure == "accuracy":
            mean, *interval = lab.welch_interval(*(side[:2] for side in sides))
            assert claim.paper == pytest.approx(mean, abs=0.0101), name
            shifted = [end - mean + claim.paper for end in interval]
            assert claim.paper_interval == pytest.approx(shifted, abs=1e-3), name
        elif claim.measure == "uplink":
            expected = (sides[1][2] if len(sides) > 1 else 32) / sides[0][2]
            assert claim.paper == pytest.approx(expected, rel=1e-3), name
        checked += 1
    assert checked >= 18


def test_every_scheme_that_is_judged_is_planned():
    """With equal clients, and in every setting of unequal ones."""
    read, own = lab.read_claims(CLAIMS), lab.read_params([CLAIMS.with_stem("evidence")])
    plans = lab.plan_runs(CLAIMS.with_stem("evidence_plan"))
    planned = {run.digest for runs in plans.values() for run in runs}
    asked = [{"schemes": [name], "learning_rate": eta} for name, eta in read.schemes]
    asked += [
        change | {"schemes": ["TCS"], "learning_rate": 0.5}
        for change in read.unequal.settings.values()
    ]
    for change in asked:
        (run,) = lab.plan(own | change | {"seeds": [1]})
        assert run.digest in planned, change


def judged_again(path):
    """A profile's claims, from nothing but params/ and its records."""
    files = [CLAIMS.with_stem(f"table{n}") for n in (1, 2, 3)]
    tables = [lab.read_params([file]) for file in files]
    read, profile = lab.read_claims(CLAIMS), lab.read_params([CLAIMS.with_stem(path.parent.name)])
    return lab.judge_claims(read, lab.load_claim_records(read, profile, tables))


FILES = [f for f in lab.ROOT.glob("results/*/claims.csv") if f.parent.name not in READERS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_the_judged_claims_are_rebuilt_from_the_records(path, tmp_path):
    """The same bytes."""
    table, title = (
        judged_again(path),
        path.with_suffix(".md").read_text(encoding="utf-8").split("**")[1],
    )
    note = f"{lab.CLAIM_UNITS} {lab.list_unmeasured(table)}".strip()
    lab.save_table(table, tmp_path / "claims", title, lab.readable_claims, note)
    for suffix in (".csv", ".md"):
        assert (tmp_path / f"claims{suffix}").read_bytes() == path.with_suffix(suffix).read_bytes()
