"""The table of the paper's sentences: verdicts are found, never typed in; what it names is there."""

import math
from itertools import chain

import nbformat
import pandas as pd
import pytest
import tcs_lab as lab
from tcs_lab.evidence.sentences import combine_verdicts, extra_claims, link, read_sentences
from tcs_lab.tables.verdicts import verdict_on

NOTEBOOKS = lab.ROOT / "notebooks"
SENTENCES = read_sentences(lab.ROOT / "params/sentences.yaml")
CLAIMS = lab.read_claims(lab.ROOT / "params/claims.yaml")


def cells(notebook):
    return nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", 4).cells


def test_no_sentence_stands_there_twice():
    assert len({(sentence.where, sentence.says) for sentence in SENTENCES}) == len(SENTENCES)


def test_every_claim_on_the_paper_is_said_by_a_sentence():
    asked = {name for sentence in SENTENCES for name in sentence.claims}
    ours = {name for name, claim in CLAIMS.claims.items() if claim.where == "our question"}
    assert set(CLAIMS.claims) - ours <= asked <= set(CLAIMS.claims)


@pytest.mark.parametrize("place", sorted({place for s in SENTENCES for place in s.shown}))
def test_what_it_is_shown_in_is_there(place):
    notebook, _, section = place.partition("#")
    heads = [
        line
        for cell in cells(notebook)
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
    ]
    assert not section or f"## {section}" in heads
    assert link(place).startswith(f"[{notebook.split('_')[0]}]({notebook}.ipynb)")


@pytest.mark.parametrize(
    ("notebook", "text"),
    sorted(
        (name, text)
        for name, texts in chain.from_iterable(s.statements.items() for s in SENTENCES)
        for text in set(texts)
    ),
)
def test_a_statement_is_one_on_which_the_notebook_gives_a_verdict(notebook, text):
    assert verdict_on(notebook, text) in ("supported", "contradicted", "open")


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["supported"] * 2, "supported"),
        (["not measured"], "not measured"),
        (["not measured", "open"], "1 not measured, 1 open"),
        (["by construction", "supported"], "supported"),
        (["by construction", "by construction"], "by construction"),
        (["supported", "contradicted", "supported"], "2 supported, 1 contradicted"),
    ],
)
def test_several_verdicts_are_all_said(words, verdict):
    assert combine_verdicts(words) == verdict


def judged_as(words):
    """What `judged` gives of the claims: `words` of some, not measured of the others."""
    rows = [
        {
            "claim": name,
            "verdict": words.get(name, "not measured"),
            "kept": name != "x2000",
            "measured": math.nan,
            "bootstrap": math.nan,
        }
        for name in CLAIMS.claims
    ]
    return pd.DataFrame(rows)


def row_of(table, says):
    (row,) = table[table["says"] == says].to_dict("records")
    return row


def sentence_on(*claims):
    """The one sentence whose verdict comes from exactly these claims, in this order."""
    (sentence,) = [s for s in SENTENCES if s.claims == list(claims)]
    return sentence.says


def test_verdicts_follow_the_claims_and_are_not_measured_until_these_stand():
    nothing = lab.sentences_table(SENTENCES, judged_as({}), CLAIMS, {})
    asked = [s for s in SENTENCES if s.claims and not s.statements]
    assert {row_of(nothing, s.says)["verdict"] for s in asked} == {"not measured"}
    words = {"parity": "contradicted", "slowly": "supported", "x2000": "by construction"}
    some = lab.sentences_table(SENTENCES, judged_as(words), CLAIMS, {})
    assert row_of(some, sentence_on("slowly"))["verdict"] == "supported"
    (again,) = [s.says for s in SENTENCES if s.claims == ["parity", "x100"] and s.judged]
    assert row_of(some, again)["verdict"] == "1 contradicted, 2 not measured"
    bits = sentence_on("x2000", "x2000-parity")  # the bound of x2000 is not kept
    assert row_of(some, bits)["verdict"] == "1 contradicted, 1 not measured"


def test_a_verdict_that_the_bootstrap_does_not_share_is_named_beside_it():
    sentence = next(s for s in SENTENCES if s.claims == ["q5"])
    weak = {"claim": "q5", "verdict": "supported", "kept": None, "first": "A", "second": "B",
            "measure": "accuracy", "eta": 0.5, "second_eta": 0.5, "low": -0.3, "high": 0.3, "measured": 0.0, "bootstrap": 0.6, "bound": "at_least", "bound_value": -0.5}  # fmt: skip
    for bootstrap, is_named in ((0.6, True), (0.4, False)):
        table = pd.DataFrame([weak | {"bootstrap": bootstrap}])
        (row,) = lab.sentences_table([sentence], table, CLAIMS, {}).to_dict("records")
        assert row["verdict"] == "supported in part"
        measured, note = row["because"].split(sentence.because)
        assert measured == "A − B: 0.00 (−0.30 to +0.30) points. Not tested: speech. "
        assert ("A − B" in note and "open" in note) if is_named else not note


def test_only_what_is_supported_is_so_in_part():
    (sentence,) = [s for s in SENTENCES if s.untested and s.claims == ["q5"]]
    for word in ("contradicted", "open", "not measured"):
        (row,) = lab.sentences_table([sentence], judged_as({"q5": word}), CLAIMS, {}).to_dict(
            "records"
        )
        assert row["verdict"] == word and "Not tested: speech." in row["because"]


def test_each_of_several_verdicts_stands_beside_its_number():
    (sentence,) = [s for s in SENTENCES if s.says.startswith("Global momentum goes well")]
    row = {"measure": "accuracy", "second": "B", "eta": 0.8, "second_eta": 0.1, "low": -0.3, "high": 0.3,
           "measured": 0.0, "kept": None, "bootstrap": math.nan, "bound": "at_least", "bound_value": -0.5}  # fmt: skip
    verdicts = {"momentum": "supported", "momentum-parity": "open"}
    table = pd.DataFrame(
        [row | {"claim": c, "verdict": v, "first": c} for c, v in verdicts.items()]
    )
    (found,) = lab.sentences_table([sentence], table, CLAIMS, {}).to_dict("records")
    assert found["verdict"] == "1 supported, 1 open"
    for claim, verdict in verdicts.items():
        said = f"omentum{claim[8:]} at η 0.8 − B: 0.00 (−0.30 to +0.30) points ({verdict})."
        assert said in found["because"]


def test_what_a_notebook_has_found_is_the_verdict(tmp_path, monkeypatch):
    sentence = next(
        s for s in SENTENCES if len(s.statements.get("03_tcs", [])) == 1 and not s.claims
    )
    (text,) = sentence.statements["03_tcs"]
    monkeypatch.setattr(lab.tables.verdicts, "VERDICTS_FOLDER", tmp_path)
    for word in ("supported", "contradicted"):
        lab.tables.verdicts.write_verdicts("03_tcs", {}, {text: word})
        table = lab.sentences_table([sentence], judged_as({}), CLAIMS, {})
        assert table["verdict"].tolist() == [word]


def test_comparisons_beside_the_claims_are_none_of_them():
    ours = [
        (c.first, c.second, c.bounds) for c in CLAIMS.claims.values() if c.measure == "accuracy"
    ]
    extra = [(c.first, c.second, c.bounds) for c in extra_claims(SENTENCES, CLAIMS).claims.values()]
    assert extra and all([*ours, *extra].count(one) == 1 for one in extra)


DIFFERENCE = {"first": ["TCS", 0.5], "second": ["Baseline", 0.1]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "got neither a word nor claims"),
        ({"word": "open", "claims": ["parity"]}, "got both a word and claims"),
        ({"word": "supported", "because": "so"}, "word: got 'supported'"),
        ({"word": "out of scope"}, "because: missing.* out of scope"),
        ({"word": "contradicted"}, "because: missing.* contradicted"),
        ({"word": "by construction", "shown": []}, "shown: got none"),
        ({"claims": ["parity"], "judge": 1}, "judge: got 1"),
        ({"word": "open", "because": "so", "untested": "speech"}, "untested: got 'speech'"),
        ({"judged": [DIFFERENCE]}, "sentences: value 1: judged: value 1: got no bound, allowed"),
        (
            {"judged": [DIFFERENCE | {"at_least": 0, "more_than": 1}]},
            "got at_least, more_than, all",
        ),
    ],
)
def test_a_sentence_without_a_verdict_of_its_kind_is_refused(tmp_path, changes, says):
    sentence = {"where": "Abstract", "says": "it", "shown": ["01_fedavg"]} | changes
    file = tmp_path / "s.yaml"
    file.write_text(f"sentences: [{sentence}]\n".replace("'", '"'), encoding="utf-8")
    with pytest.raises(ValueError, match=says) as error:
        read_sentences(file)
    assert str(file) in str(error.value)
