"""All bits that the core computes are those of another checkout.

    git worktree add ../before COMMIT
    TCS_ORACLE=../before uv run pytest -n 0 tests/core/test_oracle.py
    git worktree remove ../before

Each checkout runs the cases of tests/oracle_cases.py in a process of its own, about a minute each.
A test is one case; where it fails, it names the first round and quantity that differ. Choose some
cases with -k. Bits that change on purpose need a commit whose message says so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle_cases import CASES

HERE = Path(__file__).parents[2]
OTHER = os.environ.get("TCS_ORACLE")
HOW = (
    "TCS_ORACLE does not name another checkout; to compare with one: git worktree add ../before "
    "HEAD~1 && TCS_ORACLE=../before uv run pytest -n 0 tests/core/test_oracle.py"
)


def started(checkout, answers, cases):
    """A process in which a checkout's own core and lab run the cases."""
    path = os.pathsep.join([str(checkout), str(checkout / "notebooks")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "tests" / "oracle_cases.py"), str(answers), *cases]
    return subprocess.Popen(command, env=environment)


def answers_of(checkout, exit_status, answers):
    assert exit_status == 0, f"{checkout}: the cases have not been run: see above"
    found = json.loads(answers.read_text(encoding="utf-8"))
    for part, place in (("core", checkout), ("lab", checkout / "notebooks" / "tcs_lab")):
        assert Path(found[part]) == place, f"{part}: got {found[part]}, allowed: {place}"
    return found["cases"]


@pytest.fixture(scope="session")
def both(request, tmp_path_factory):
    """What this checkout and the other one answer to the cases that are to be tested."""
    if not OTHER:
        pytest.skip(HOW)
    other, folder = Path(OTHER).resolve(), tmp_path_factory.mktemp("oracle")
    if not (other / "tcs_core.py").exists():
        pytest.fail(f"TCS_ORACLE: got {OTHER!r}, allowed: the folder of another checkout")
    items = [item for item in request.session.items if item.path == Path(__file__)]
    cases = [item.callspec.params["case"] for item in items]
    files = {HERE: folder / "here.json", other: folder / "other.json"}
    processes = {place: started(place, file, cases) for place, file in files.items()}
    ended = {place: process.wait() for place, process in processes.items()}
    return [answers_of(place, ended[place], files[place]) for place in (HERE, other)]


def first_difference(here, other):
    """Where two logs part, in words; "" if nowhere."""
    for (where, what, got), (other_where, other_what, wanted) in zip(here, other, strict=False):
        if (where, what) != (other_where, other_what):
            return f"{where}: {what}, where the other checkout has {other_where}: {other_what}"
        if got != wanted:
            return f"{where}: {what}: got {got}, the other checkout: {wanted}"
    longer = here[len(other) :] or other[len(here) :]
    which = "this" if len(here) > len(other) else "the other"
    return f"{longer[0][0]}: {longer[0][1]}: only {which} checkout has it" if longer else ""


@pytest.mark.parametrize("case", CASES if OTHER else ["all of them"])
def test_bits_are_those_of_the_other_checkout(both, case):
    here, other = (answers[case] for answers in both)
    for answer, whose in ((here, "this"), (other, "the other")):
        assert "error" not in answer, f"{whose} checkout:\n{answer['error']}"
    difference = first_difference(here["log"], other["log"])
    assert not difference, difference
    assert here["log"], "the case has compared nothing"
