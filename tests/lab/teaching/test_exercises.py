"""Exercises of the notebooks: a right solution is right, a wrong one is told what is wrong."""

import itertools
import re

import jupytext
import pytest
import tcs_lab as lab
import torch
from tcs_lab.teaching.exercises import EXERCISES, RIGHT, UNWRITTEN, judge_solution

import tcs_core as tcs

NOTEBOOKS = sorted((lab.ROOT / "notebooks").glob("0[1-7]_*.py"))
MISTAKES = [(name, *one) for name, found in EXERCISES.items() for one in found.mistakes]
by_name = {"ids": lambda path: path.stem}


def cells_of(path):
    return jupytext.read(path).cells


def imports_of(cells):
    """What a notebook's own imports give, and nothing else of it."""
    namespace = {}
    exec(next(cell.source for cell in cells if cell.source.startswith("import ")), namespace)
    return namespace


def solutions(cells):
    """Every folded solution, with the cell below it."""
    for cell, below in itertools.pairwise(cells):
        if "<summary>Solution" in cell.source:
            assert cell.metadata["tags"] == ["solution"]
            yield re.search(r"```python\n(.*?)\n```\n\n</details>", cell.source, re.S)[1], below


@pytest.mark.parametrize("path", NOTEBOOKS, **by_name)
def test_the_folded_solution_is_the_one_that_is_executed_and_right(path):
    cells = cells_of(path)
    namespace, solved = imports_of(cells), []
    for folded, below in solutions(cells):
        assert "solution" in below.metadata["tags"]  # README's command for students removes both
        code, asserts = below.source.split("\n\n\nassert ")[0], below.source.count("\nassert ")
        assert code == folded
        exec(below.source, namespace)
        solved += re.findall(r"^def (\w+)", folded, re.M)
        assert asserts == folded.count("def ")
    assert solved and {judge_solution(name, namespace[name]) for name in solved} == {RIGHT}


@pytest.mark.parametrize("path", NOTEBOOKS, **by_name)
def test_run_all_passes_while_nothing_is_written(path, capsys):
    cells = cells_of(path)
    namespace = imports_of(cells)
    for cell in cells:
        if "return None  # yours" in cell.source:
            exec(cell.source, namespace)
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.endswith(f": {UNWRITTEN}") for line in lines)


def test_every_exercise_is_in_one_notebook():
    text = "".join(path.read_text(encoding="utf-8") for path in NOTEBOOKS)
    assert sorted(re.findall(r'^lab\.check_exercise\("(\w+)"', text, re.M)) == sorted(EXERCISES)


@pytest.mark.parametrize(("name", "mistaken", "hint"), MISTAKES)
def test_a_typical_mistake_is_recognized(name, mistaken, hint):
    said = judge_solution(name, mistaken)
    assert re.search(r"(got|is) .*, wanted .*\. " + re.escape(hint) + " Given: ", said)
    assert "\n" not in said


S_TOP = "positions: got [3], wanted [1] (counted from 0). Given: vector_D = [1, -3, 2, 0], k = 1"


@pytest.mark.parametrize(
    ("name", "function", "says"),
    [
        ("s_top", lambda vector_D, k: [3], S_TOP),
        ("s_top", lambda vector_D, k: torch.tensor([3]), S_TOP),
        ("s_top", lambda v, k: tcs.top_k_mask(v, k), "got a mask of True and False"),
        ("s_top", lambda v, k: 1, "positions: got 1, wanted a vector or a list"),
        ("s_top", lambda v, k: {"a": 1}, "wanted a vector or a list"),
        ("s_top", lambda v, k: v[99], "it raises IndexError: "),
        ("s_top", lambda v: v, "it raises TypeError: "),
        ("s_top", [1], "give the function itself: its name, without brackets"),
        ("s_tup", print, "fedavg_round, "),
        ("decode", lambda bits, block: [one + 1 for one in right_decode(bits, block)], "from 1?"),
        ("decode", lambda bits, block: right_decode(bits, block)[::-1], "not in ascending order"),
        ("accumulate", lambda e, d, k: d, "wanted 2 results (sent_D, errors_D), got one"),
        ("accumulate", lambda e, d, k: (None, d), "sent_D: nothing came back (None)"),
        ("accumulate", lambda e, d, k: (d[1:], d), "sent_D: got 4 entries, wanted 5"),
        ("accumulate", lambda e, d, k: (e.add_(d) * 0, e), "Given: round 1, errors_D = [0, 0"),
        ("accumulate", lambda e, d, k: e.add_(d).sort()[99], "it raises IndexError"),
        ("code_bits", lambda *given: "many", "a str came back"),
        ("code_bits", lambda *given: float("nan"), "bits: got nan, wanted 14"),
        ("loss_changes", lambda g, eta: (1e9, -1e9), "printed: got 1000000000, wanted 12.717"),
    ],
)
def test_what_is_off_is_said_in_one_line(name, function, says):
    said = judge_solution(name, function)
    assert says in said and "\n" not in said


def right_decode(bits, block):
    namespace = imports_of(cells := cells_of(NOTEBOOKS[5]))
    exec(next(solutions(cells))[0], namespace)
    return namespace["decode"](bits, block)


def momentum_in_place(theta_D, w_D, g_D, eta, beta):
    w_D.mul_(beta).add_(g_D)
    return theta_D - eta * w_D, w_D


def difference_in_place(theta_D, gradient, eta, steps):
    start_D = theta_D
    for _ in range(steps):
        theta_D -= eta * gradient(theta_D)
    return theta_D - start_D  # always zero: both names are of one tensor


def fedavg_without_return(theta_D, differences_ND, weights_N):
    theta_D += differences_ND.mean(0)


@pytest.mark.parametrize(
    ("name", "function", "changed"),
    [
        ("momentum_step", momentum_in_place, "w_D"),
        ("local_difference", difference_in_place, "theta_D"),
        ("fedavg_round", fedavg_without_return, "theta_D"),
    ],
)
def test_working_in_place_is_named_before_what_comes_of_it(name, function, changed):
    said = judge_solution(name, function)
    assert said.startswith(f"it changes what it was given ({changed}). Make a new one instead")
    assert "\n" not in said


def test_check_prints_one_line_and_gives_nothing_back(capsys):
    assert lab.check_exercise("s_top", lambda vector_D, k: None) is None
    assert capsys.readouterr().out == f"s_top: {UNWRITTEN}\n"
