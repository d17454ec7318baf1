"""What a reader types into a notebook's cell of parameters: wrong names and numbers are one line."""

import re

import nbformat
import pytest
import tcs_lab as lab
from nbclient import NotebookClient

NOTEBOOKS = lab.ROOT / "notebooks"


def changed(cell, changes):
    """The cell of parameters as a reader changes it."""
    source = cell.source
    for name, value in changes.items():
        line = f"{name} = {value!r}"
        source, found = re.subn(rf"(?m)^{name} = .*$", line, source)
        source += "" if found else f"\n{line}"
    return nbformat.v4.new_code_cell(source)


def told(cells):
    """Each cell's error, without colours; None where there is none. All in one kernel."""
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, allow_errors=True, kernel_name="python3", timeout=300)
    client.execute(cwd=str(NOTEBOOKS))
    errors = [[out for out in cell.outputs if out.output_type == "error"] for cell in cells]
    texts = ["\n".join(found[0].traceback) if found else None for found in errors]
    return [text and re.sub(r"\x1b\[[0-9;]*m", "", text) for text in texts]


def told_of(notebook, last, variants):
    """What a notebook says of each variant of its parameters, up to the cell that contains `last`."""
    read = nbformat.read(next(NOTEBOOKS.glob(f"{notebook}_*.ipynb")), 4)
    code = [cell for cell in read.cells if cell.cell_type == "code"]
    imports, parameters, *after = code[
        : next(i for i, c in enumerate(code) if last in c.source) + 1
    ]
    cells = [imports]
    for changes in variants:
        cells += [
            changed(parameters, changes),
            *(nbformat.v4.new_code_cell(c.source) for c in after),
        ]
    lines = told(cells)[1:]
    step = 1 + len(after)
    return [next(filter(None, lines[i : i + step]), None) for i in range(0, len(lines), step)]


WRONG = {
    "08": {
        "profile: got 'quik', allowed: ci,": {"profile": "quik"},
        "profile: got 'table1', allowed: ci,": {"profile": "table1"},
        "table: got 7, allowed: 1, 2, 3": {"table": 7},
        "table: got '1b', allowed: 1, 2, 3": {"table": "1b"},
        "evidence: got 'evidense', allowed: ci,": {"evidence": "evidense"},
        "unknown parameter: seed; allowed:": {"seed": 3},
        "unknown parameter: epoch; allowed:": {"epoch": 3, "profile": "quick"},
    },
    "00": {
        "tables: got 4, allowed: 1, 2, 3": {"tables": [4]},
        "profile: got 'paper2', allowed: ci,": {"profile": "paper2"},
        "unknown parameter: tabels; allowed:": {"tabels": [1]},
    },
    "14": {"evidence: got 'quck', allowed: ci,": {"evidence": "quck"}},
    "17": {
        "below: got -1": {"below": -1},
        "links: got []": {"links": []},
        "unknown parameter: profile; allowed:": {"profile": "small"},
    },
}
# of a profile without records, rounds are timed: small ones, not those of the paper's model
MINE = {"profile": "mine", "epochs": 2, "model": "resnet8", "width": 2, "clients": 2, "batch_size": 8,
        "train_samples": 100, "test_samples": 50, "image_size": 16, "threads": 1}  # fmt: skip
RIGHT = {"00": {"tables": [2]}, "08": MINE, "14": {}, "17": {}}
CHECKED = {"00": "given_notebook_params", "08": "given_notebook_params", "17": "check_values"}


@pytest.mark.parametrize("notebook", WRONG)
def test_a_wrong_parameter_is_one_line_that_names_it(notebook):
    variants = [*WRONG[notebook].values(), RIGHT[notebook]]
    *lines, nothing = told_of(notebook, CHECKED.get(notebook, "params_file"), variants)
    assert nothing is None
    for says, line in zip(WRONG[notebook], lines, strict=True):
        assert line and line.startswith(says) and "\n" not in line, (says, line)


def test_a_profile_of_ones_own_says_its_epochs():
    given = {"epochs": 3}
    assert lab.profile_params("profile", "quick", given)["epochs"] == 100
    assert lab.profile_params("profile", "mine", given) == {}
    with pytest.raises(ValueError, match=r"^evidence: got 'mine', allowed: "):
        lab.profile_params("evidence", "mine", given)


INTERRUPTED = """
import os, signal, threading
import tcs_core as tcs
import tcs_lab as lab
import torch
lab.check_notebook_params(globals())
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
"""
BATCHES = "[[(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))]]"
LOOPS = {
    "runs": (
        "import tempfile\nconfig = lab.RunConfig('TCS', model='conv3', width=8, epochs=10**6, train_samples=400, "
        "test_samples=50, image_size=8, clients=2, batch_size=8, device='cpu')\nlab.run_all([config], tempfile.mkdtemp())"
    ),
    "rounds": (
        f"federation = tcs.Federation(torch.nn.Linear(6, 3), {BATCHES}, 'TCS', 0.1)\n"
        "while True:\n    federation.round()"
    ),
    "compression": "made = tcs.Compressor('TCS', [10**6], 2)\ndeltas = torch.ones(2, 10**6)\nwhile True:\n    made.step(deltas)",
}  # fmt: skip


def test_what_a_reader_interrupts_ends_in_one_line(tmp_path, monkeypatch):
    """But a loop of the reader's own keeps its traceback."""
    monkeypatch.setenv("TCS_CACHE", str(tmp_path))
    loops = LOOPS | {"own": "import time\nwhile True:\n    time.sleep(0.1)"}
    lines = told([nbformat.v4.new_code_cell(INTERRUPTED + loop) for loop in loops.values()])
    for loop, line in zip(loops, lines, strict=True):
        if loop == "own":
            assert "Traceback" in line
        else:
            assert line.startswith("interrupted") and "\n" not in line, line
            assert ("to go on" in line) == (loop == "runs")
