"""The paper's claims: how they are read and judged, gates, and that what stands in results/ is
rebuilt."""

import math

import pytest
import tcs_lab as lab
from common import READERS

CLAIMS = lab.ROOT / "params" / "claims.yaml"


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
    scheme = {"name": name, "centralized": False, "local_steps": 1, "rule": "TCS", "value_bits": 32,
              "phi_global": 0.01, "phi_local": 0.001}  # fmt: skip
    rows = [
        {"rounds": 10, "dense_rounds": dense, "accuracy": accuracy,
         "bits_up": 32 * 1000 * dense + bits * 1000 * (10 - dense), "bits_down": 0}
        | ({"update_overlap": overlap, "update_overlap_chance": 0.2} if overlap else {})
        for dense in (10, 0, 0)
    ]  # fmt: skip
    config = {"scheme": scheme, "seed": seed, "learning_rate": eta}
    return {"config": config, "dimension": 1000, "rows": rows, "status": "finished"}


def claims(gates=None, confidence=0.95, **named):
    """What a file with these claims says."""
    filled = {n: {"says": n, "first": ["TCS", 0.5]} | claim for n, claim in named.items()}
    gates = {n: {"says": n, "measure": "accuracy"} | gate for n, gate in (gates or {}).items()}
    return lab.claims.Claims(confidence=confidence, gates=gates, claims=filled)


def judge(claim, *records, gates=None):
    """The row of one claim, among these records."""
    named = {f"{i}.json": one for i, one in enumerate(records)}
    return lab.judged(claims(gates, it=claim), named).iloc[-1]


AGAINST_TOP_K = {"measure": "accuracy", "second": ["top-K", 0.5]}


def test_accuracies_are_paired_by_seed():
    """Seeds differ by ten points, pairs by a tenth: only pairing can decide."""
    claim = AGAINST_TOP_K | {"more_than": 0.8}
    ours = [record("TCS", s, 0.5 + 0.1 * s) for s in range(4)]
    gaps = (0.0110, 0.0100, 0.0090, 0.0100)
    theirs = [record("top-K", s, 0.5 + 0.1 * s - gap) for s, gap in enumerate(gaps)]
    alone = record("top-K", 9, 0.1)
    row = judge(claim, *ours, *theirs, alone)
    assert (row.n, row.planned, row.verdict, row.reason) == (4, 3, "holds", "")
    assert row.measured == pytest.approx(1.0)
    assert row.first_records.split() == ["0.json", "1.json", "2.json", "3.json"]
    assert row.second_records.split() == ["4.json", "5.json", "6.json", "7.json"]
    assert judge(claim, ours[0], theirs[0]).verdict == "not decided"
    row = judge(claim, ours[0], alone)
    assert (row.verdict, row.reason) == ("not measured", "its records do not say")
    row = judge(claim, ours[0])
    assert (row.verdict, row.reason) == ("not measured", "no records of top-K")


def test_a_seed_that_diverged_is_not_left_out():
    """The two others alone would hold."""
    runs = [record(name, s, a) for name, a in (("TCS", 0.6), ("top-K", 0.5)) for s in range(3)]
    assert judge(AGAINST_TOP_K | {"more_than": 0}, *runs).verdict == "holds"
    runs[1] |= {"status": "diverged", "rows": []}
    row = judge(AGAINST_TOP_K | {"more_than": 0}, *runs)
    assert (row.n, row.verdict, row.reason) == (0, "not measured", "diverged: 1.json")


def test_bits():
    one = record("TCS", 0, 0.5, bits=0.4)
    assert judge({"measure": "uplink", "at_least": 80}, one).measured == pytest.approx(80)
    assert judge({"measure": "uplink", "at_least": 80}, one).verdict == "holds"
    whole = judge({"measure": "uplink_whole", "at_least": 80}, one)
    assert whole.measured == pytest.approx(32 / ((32 + 0.4 + 0.4) / 3))
    assert whole.verdict == "does not hold"
    against = {"measure": "uplink", "second": ["top-K", 0.5], "at_least": 1.1}
    row = judge(against, one, record("top-K", 0, 0.5, bits=0.5))
    assert row.measured == pytest.approx(1.25)


def test_the_overlap_of_dense_updates_is_what_is_beyond_chance():
    """(0.6 - 0.2) / (1 - 0.2); one record decides nothing; records without it say nothing."""
    claim = {"measure": "dense_overlap", "at_least": 0.4}
    one = record("TCS", 0, 0.5, overlap=0.6)
    assert judge(claim, one).measured == pytest.approx(0.5)
    assert judge(claim, one).verdict == "not decided"
    row = judge(claim, one, record("TCS", 1, 0.5, overlap=0.601), record("TCS", 2, 0.5))
    assert (row.n, row.verdict) == (2, "holds")
    assert judge(claim, record("TCS", 2, 0.5)).reason == "its records do not say"
    more = claim | {"second": ["top-K", 0.5]}
    row = judge(more, one, record("top-K", 0, 0.5, overlap=0.4))
    assert row.measured == pytest.approx(0.25)


def test_the_own_share_of_a_message_is_by_construction():
    """K_global = 10 and K_local = 1 of 1,000."""
    row = judge({"measure": "own_share", "at_most": 0.1, "n": 1}, record("TCS", 0, 0.5))
    assert (row.measured, row.verdict) == (1 / 11, "holds")
    made = record("top-K", 0, 0.5)
    made["config"]["scheme"] |= {"phi_global": None, "phi_local": 0.01}
    row = judge({"measure": "own_share", "first": ["top-K", 0.5], "at_most": 0.1, "n": 1}, made)
    assert (row.measured, row.verdict) == (1.0, "does not hold")


GATE = {"dense": {"first": ["FedAvg", 0.5], "second": ["TCS", 0.5], "at_least": -0.5}}
NEEDS = AGAINST_TOP_K | {"more_than": 0, "needs": ["dense"]}


@pytest.mark.parametrize(
    ("gaps", "verdict", "reason"),  # of the gate's dense trainings, by seed
    [
        ([0.001, -0.001, 0.002], "holds", ""),
        ([-0.02, 0.02], "holds", ""),  # the mean counts, not the interval
        ([-0.006, -0.0064], "not testable here", "gate dense: −0.62, needs ≥ −0.5"),
        ([-0.005, -0.00506], "not testable here", "gate dense: −0.503, needs ≥ −0.5"),
        ([-0.006], "not measured", "gate dense: not decided yet"),  # one seed decides no gate
        ([], "not measured", "gate dense: not measured yet"),
    ],
)
def test_a_gate_goes_first_and_by_its_mean(gaps, verdict, reason):
    ours = [record("TCS", s, 0.5) for s in range(3)]
    theirs = [record("top-K", s, 0.49 + 0.0001 * s) for s in range(3)]
    dense = [record("FedAvg", s, 0.5 + gap) for s, gap in enumerate(gaps)]
    row = judge(NEEDS, *ours, *theirs, *dense, gates=GATE)
    assert (row.verdict, row.reason) == (verdict, reason)


def test_a_gate_that_fails_says_so_even_where_nothing_else_is_measured():
    dense = [
        record(name, s, 0.4 + 0.1 * (name == "TCS")) for name in ("FedAvg", "TCS") for s in (0, 1)
    ]
    assert judge(NEEDS, *dense, gates=GATE).verdict == "not testable here"
    row = judge(NEEDS, record("TCS", 0, 0.5), gates=GATE)
    assert (row.verdict, row.reason) == ("not measured", "no records of top-K")


def test_what_a_person_reads_has_bound_and_planned_n_beside_every_verdict():
    named = {"a.json": record("TCS", 0, 0.5, bits=0.4)}
    table = lab.judged(claims(GATE, bits={"measure": "uplink", "at_least": 80}, acc=NEEDS), named)
    assert set(table.verdict) <= set(lab.VERDICTS) and list(table.gate) == [True, False, False]
    text = lab.readable_claims(table)
    assert list(text["Holds if"]) == ["≥ −0.5", "≥ 80", "> 0"]
    assert list(text["n"]) == ["0", "1", "0"] and list(text["Planned n"]) == ["3"] * 3
    assert list(text["Verdict"])[1:] == ["holds", "not measured (no records of top-K)"]
    assert text["Ours (interval)"][1] == "×80"


@pytest.mark.parametrize(
    ("low", "shown"),
    [(-0.501, "−0.501"), (-0.5004, "−0.5004"), (-0.499, "−0.50"), (-0.51, "−0.51")],
)
def test_a_rounded_end_never_says_another_verdict(low, shown):
    accuracies = [(low - 0.1) / 100, (low + 0.1) / 100]  # some interval; its low end is replaced
    runs = [record("TCS", s, 0.5 + a) for s, a in enumerate(accuracies)]
    runs += [record("top-K", s, 0.5) for s in range(2)]
    read = claims(it={"measure": "accuracy", "second": ["top-K", 0.5], "at_least": -0.5})
    table = lab.judged(read, {f"{i}.json": one for i, one in enumerate(runs)})
    table["low"] = low
    assert f"({shown} to " in lab.readable_claims(table)["Ours (interval)"][0]


@pytest.mark.parametrize(("bits", "shown"), [(32 / 79.997, "×79.997"), (0.4, "×80")])
def test_a_rounded_ratio_never_does_either(bits, shown):
    read = claims(it={"measure": "uplink", "at_least": 80})
    table = lab.judged(read, {"a.json": record("TCS", 0, 0.5, bits=bits)})
    assert list(lab.readable_claims(table)["Ours (interval)"]) == [shown]


@pytest.mark.parametrize(("base", "said"), [(0.6, "open"), (0.7, "shut")])
def test_a_gate_is_open_or_shut(base, said):
    runs = [record("FedAvg", s, a) for s, a in enumerate((0.6, 0.7))]
    runs += [record("TCS", s, base) for s in (0, 1)]
    table = lab.judged(claims(GATE, acc=NEEDS), {f"{i}.json": one for i, one in enumerate(runs)})
    assert lab.readable_claims(table)["Verdict"][0] == f"gate: {said}, by its mean"


def test_trainings_beside_each_other():
    """A column each: the verdict in front of what decides; a gate is open or shut."""
    dense = [record("FedAvg", s, 0.5) for s in (0, 1)]
    short = [record("TCS", s, 0.6) for s in (0, 1)]  # the gate is shut
    long = [record(name, s, 0.5 + 0.001 * s) for name in ("TCS", "top-K") for s in (0, 1)]
    found = {"short": [*dense, *short], "long": [*dense, *long]}
    found = {t: {f"{i}.json": one for i, one in enumerate(runs)} for t, runs in found.items()}
    read = claims(GATE, acc=NEEDS)
    table = lab.claims_beside({title: lab.judged(read, runs) for title, runs in found.items()})
    assert list(table["Claim"]) == ["Gate: dense", "acc"]
    assert list(table["short, n = 2"]) == ["shut: −10.00", "–"]
    assert list(table["long, n = 2"]) == ["open: −0.05 (−0.69 to +0.59)", "does not hold: +0.00"]
    found["long"] |= {"one.json": record("FedAvg", 2, 0.5), "two.json": record("TCS", 2, 0.5)}
    table = lab.claims_beside({title: lab.judged(read, runs) for title, runs in found.items()})
    assert list(table["long"])[1] == "does not hold: +0.00, n = 2"


# The file ─────────────────────────────────────────────────────────────────────────────────────────


GOOD = "says: it, measure: uplink, first: [TCS, 0.5], at_least: 1"
MORE = "confidence: 0.95\nclaims: {{a: {{{}}}}}".format


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[]", "allowed: a mapping"),
        ("confidence: 2.0\nclaims: {a: {" + GOOD + "}}", "confidence: got 2.0"),
        ("confidence: 0.95\nclaims: []", "claims: got []"),
        ("confidence: 0.95\nclaims: {}", "claims: got {}"),
        (MORE("says: it"), "claims: a: measure: "),
        (MORE(f"{GOOD}, bound: 3"), "claims: a: bound: got 3"),
        (MORE(f"{GOOD}, at_most: 3"), "claims: a: allowed: one number"),
        (MORE(GOOD.replace(", at_least: 1", "")), "allowed: one number"),
        (MORE(f"{GOOD}, paper_interval: [2, 1]"), "two numbers, rising"),
        (MORE(f"{GOOD}, paper_interval: 2"), "paper_interval: got 2"),
        (MORE(f"{GOOD}, paper_interval: [1, x]"), "got 'x'"),
        (MORE(f"{GOOD}, n: 0"), "n: got 0"),
        (MORE(f"{GOOD}, needs: [dense]"), "a: needs: got 'dense', allowed: []"),
        (MORE(GOOD.replace("1", "x")), "at_least: got 'x'"),
        (MORE(GOOD.replace("uplink", "luck")), "measure: got 'luck'"),
        (MORE(GOOD.replace("uplink", "accuracy")), "second"),
        (MORE(GOOD.replace("[TCS, 0.5]", "TCS")), "first: got 'TCS'"),
        (MORE(GOOD.replace("TCS", "TCX")), "'TCX' is unknown"),
        (MORE(GOOD.replace("TCS", "tcs")), "got 'tcs', allowed: 'TCS'"),
        (MORE(GOOD) + "\nclams: {}", "clams: got {}"),
        (
            MORE(GOOD) + "\ngates: {a: {" + GOOD + "}}",
            "got a gate and a claim 'a', allowed: a name",
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
        sides = [printed.get(side) for side in claim.sides]
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
    assert checked >= 22


def test_gates_are_comparisons_of_dense_trainings():
    import tcs_core as tcs

    gates = lab.read_claims(CLAIMS).gates
    assert set(gates) == {"dense", "local-steps"}
    sides = [tcs.Scheme.named(name) for gate in gates.values() for name, _ in gate.sides]
    assert all(scheme.rule == "dense" for scheme in sides)


FILES = [f for f in lab.ROOT.glob("results/*/claims*.csv") if f.parent.name not in READERS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_judged_claims_are_rebuilt_from_the_records(path, tmp_path):
    """The same bytes, from nothing but params/ and the records."""
    read, epochs = lab.read_claims(CLAIMS), path.stem.partition("_")[2]
    params = lab.read_params([lab.ROOT / f"params/{path.parent.name}.yaml"])
    records = lab.claim_records(read, params | ({"epochs": int(epochs)} if epochs else {}))
    table = lab.judged(read, records)
    title = path.with_suffix(".md").read_text(encoding="utf-8").split("**")[1]
    lab.save_table(table, tmp_path / path.stem, title, lab.readable_claims)
    for suffix in (".csv", ".md"):
        made, there = tmp_path / path.with_suffix(suffix).name, path.with_suffix(suffix)
        assert made.read_bytes() == there.read_bytes()
