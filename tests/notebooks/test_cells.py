"""What notebooks share: parameters checked in one line, claims said or asserted."""

import json
import math
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import tcs_lab as lab
from tcs_lab.runs.parameters import read_literals

import tcs_core as tcs

CELL = "phi = 0.25  # share\npositions = [1, 3]  # which\n"


def namespace(**changed):
    """After a parameters cell and, as papermill does it, another one."""
    return {
        "In": ["import math", CELL, "# Parameters\nphi = 1"],
        "phi": 0.25,
        "positions": [1, 3],
    } | changed


@pytest.fixture
def verdicts(tmp_path, monkeypatch):
    """A folder of verdicts that belongs to the test, with one notebook that has not run yet."""
    monkeypatch.setattr(lab.tables.verdicts, "VERDICTS_FOLDER", tmp_path)
    parameters = {"phi": 0.25, "positions": [1, 3]}
    lab.support.files.write_json(tmp_path / "here.json", {"parameters": parameters, "verdicts": {}})
    return tmp_path


def kept(folder):
    return json.loads((folder / "here.json").read_text(encoding="utf-8"))["verdicts"]


def test_a_statement_is_asserted_at_the_notebooks_own_parameters_only(verdicts, capsys):
    own, other = (lab.Statements(space, "here") for space in (namespace(), namespace(phi=0.5)))
    assert own.asserted and not other.asserted
    own("it is so", True, "3 of 3")
    with pytest.raises(AssertionError, match=r"contradicted: it is so \(2 of 3\)"):
        own("it is so", False, "2 of 3")
    with pytest.raises(AssertionError, match="not measured: it is so"):
        own("it is so", None)
    assert capsys.readouterr().out == "\x1b[1msupported\x1b[0m: it is so (3 of 3)\n"
    for ok in (True, False, None, "open"):
        other("it", ok)
    words = ["supported", "contradicted", "not measured", "open"]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"\x1b[1m{word}\x1b[0m: it" for word in words]
    assert own.summary().startswith("1 of 1 statements")
    first, *others = other.summary("**{}**").splitlines()
    assert first.startswith("0 of 1 statements") and others == ["**open**: it"]
    assert kept(verdicts) == {"it is so": "supported"}


def test_verdicts_are_kept_at_the_notebooks_own_parameters_and_read_as_data(verdicts):
    assert lab.tables.verdicts.verdict_on("elsewhere", "it is so") == "not measured"
    own = lab.Statements(namespace(), "here")
    own("it is so", True)
    own.judge("the paper says so", "contradicted", "1 of 3")
    with pytest.raises(ValueError, match="unknown verdict: contradicts; allowed: contradicted"):
        own.judge("the paper says so", "contradicts")
    own.summary()
    assert lab.tables.verdicts.verdict_on("here", "the paper says so") == "contradicted"
    with pytest.raises(ValueError, match="here: got the statement 'it', allowed: it is so; the pa"):
        lab.tables.verdicts.verdict_on("here", "it")
    again = lab.Statements(namespace(), "here")
    again("it is so", True)  # a reader runs a part of the notebook: the rest stays
    before = (verdicts / "here.json").stat().st_mtime_ns
    again.summary()
    assert kept(verdicts) == {"it is so": "supported", "the paper says so": "contradicted"}
    assert (verdicts / "here.json").stat().st_mtime_ns == before  # nothing new, nothing written


def test_a_folder_that_cannot_be_written_to_is_said_in_one_line(verdicts, capsys, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(lab.tables.verdicts, "write_json", full)
    own = lab.Statements(namespace(), "here")
    own("it is so", True)
    capsys.readouterr()
    own.save()
    (line,) = capsys.readouterr().out.splitlines()
    assert "not saved" in line and "No space left" in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "this is not JSON"),
        ("{}", "parameters"),
        ('{"parameters": {}, "verdicts": {"it": "true"}}', "verdicts"),
        ('{"parameters": {}, "verdicts": {}, "more": 1}', "more"),
    ],
)
def test_a_broken_file_of_verdicts_is_named(verdicts, text, says):
    (verdicts / "here.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"here\.json.*{says}"):
        lab.tables.verdicts.read_verdicts("here")


def test_a_parameter_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"^steps, links: missing"):
        lab.check_values(
            {"phi": 0.5}, phi=lab.Fraction, steps=lab.WholeNumber, links=lab.WholeNumber
        )


def test_only_a_cell_of_literals_is_one_of_parameters():
    assert read_literals(CELL) == {"phi": 0.25, "positions": [1, 3]}
    assert (
        read_literals("import math")
        is read_literals("a = b")
        is read_literals("a = 1\nprint(a)")
        is None
    )
    assert read_literals("") is read_literals("%matplotlib inline") is None


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (lab.Fraction, 0, "phi: got 0; Input should be greater than 0"),
        (lab.Fraction, 2.0, "phi: got 2.0; Input should be less than or equal to 1"),
        (lab.Fraction, math.nan, "phi: got nan; Input should be less than or equal to 1"),
        (lab.WholeNumber, 12.5, "phi: got 12.5; Input should be a valid integer"),
        (lab.WholeNumber, True, "phi: got True; Input should be a valid integer"),
        (
            list[lab.WholeNumber],
            [1, 0],
            "phi: value 2: got 0; Input should be greater than or equal to 1",
        ),
        (list[lab.WholeNumber], 3, "phi: got 3; Input should be a valid list"),
    ],
)
def test_a_bad_parameter_gets_one_line(kind, value, says):
    with pytest.raises(ValueError, match="^" + says) as error:
        lab.check_values({"phi": value}, phi=kind)
    assert "\n" not in str(error.value)


def test_a_gain_is_taken_pair_by_pair():
    mean, half = lab.paired_gain([3, 5, 7], [2, 3, 4])
    assert mean == 2 and half == pytest.approx(4.302653 / math.sqrt(3))  # t for 95 % and n = 3
    assert lab.paired_gain([3], [2]) == (1, math.inf)
    assert lab.judge_mean(2, 1) == "supported" and lab.judge_mean(-2, 1) == "contradicted"
    assert lab.judge_mean(1, 2) == lab.judge_mean(1, math.inf) == "open"
    assert lab.judge_mean(0, 0.3, least=-0.5) == "supported"


def test_code_is_shown_as_it_stands_but_for_its_margin(monkeypatch):
    """The names of the core that 03 is about: whole, one below the other, none changed."""
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    lab.show_code(tcs.Client.arrived, tcs.block_code_bits)
    first, *lines, last = shown[0].data.splitlines()
    assert (first, last) == ("```python", "```")
    assert lines[0] == "def arrived(self, received: Message | None = None) -> None:"
    assert lines[1] == '    """' + tcs.Client.arrived.__doc__.splitlines()[0]
    source = Path(tcs.__file__).read_text(encoding="utf-8").splitlines()
    assert {line.strip() for line in lines} <= {line.strip() for line in source}
    start_of_second = lines.index("@lru_cache(1024)")
    assert lines[start_of_second - 1] == "" and "return" in "".join(lines[start_of_second:])


def test_a_figure_is_shown_with_words_for_those_who_cannot_see_it(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *what, **how: shown.append((what, how)))
    figure, (left, right) = plt.subplots(1, 2)
    figure.suptitle("TCS needs\nfewer bytes")
    left.set(title="Up", xlabel="round", ylabel="MB")
    right.set(xlabel="round")
    lab.show_figures()
    ((what, how),) = shown
    words = "TCS needs fewer bytes; Up: MB against round; round"
    assert what == (figure,) and how["metadata"]["image/png"]["alt"] == words
    assert not plt.get_fignums()  # else the next cell would show it again


@pytest.mark.parametrize(("pause", "lines"), [(0.0, False), (1.1, True)])
def test_a_slow_loop_has_a_line_that_is_gone_at_the_end(pause, lines, monkeypatch, capsys):
    """A quick one leaves alone what the cell has put out."""
    cleared = []
    monkeypatch.setattr(lab.runs.progress, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.clear_output", lambda wait=False: cleared.append(wait))
    for _ in lab.follow(range(4), "rounds"):
        time.sleep(pause)
    said = capsys.readouterr().out
    assert bool(said) == bool(cleared) == lines
    if lines:
        assert "rounds |" in said and "/4, " in said and not cleared[-1]


def test_elsewhere_a_loop_is_just_a_loop(capsys):
    assert list(lab.follow((n for n in range(3)), "rounds")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
