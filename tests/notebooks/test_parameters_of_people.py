"""What a reader types into a notebook's cell of parameters: wrong names and numbers are one line."""

import re

import nbformat
import pytest
import tcs_lab as lab
from nbclient import NotebookClient

NOTEBOOKS = lab.ROOT / "notebooks"


def first_cells(notebook, last, **changes):
    """The code cells up to the one that contains `last`, the parameters as a reader changes them."""
    read = nbformat.read(next(NOTEBOOKS.glob(f"{notebook}_*.ipynb")), 4)
    cells = [cell for cell in read.cells if cell.cell_type == "code"]
    for cell in cells:
        if "parameters" in cell.metadata.get("tags", []):
            for name, value in changes.items():
                line = f"{name} = {value!r}"
                cell.source, found = re.subn(rf"(?m)^{name} = .*$", line, cell.source)
                cell.source += "" if found else f"\n{line}"
    return cells[: next(i for i, cell in enumerate(cells) if last in cell.source) + 1]


def told(cells):
    """The last cell's error, without colours; None if there is none."""
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, allow_errors=True, kernel_name="python3", timeout=120)
    client.execute(cwd=str(NOTEBOOKS))
    errors = [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    lines = ["\n".join(error.traceback) for error in errors]
    return re.sub(r"\x1b\[[0-9;]*m", "", lines[0]) if lines else None


WRONG = {
    "profile: got 'quik', allowed: ci,": ("08", {"profile": "quik"}),
    "profile: got 'table1', allowed: ci,": ("08", {"profile": "table1"}),
    "table: got 7, allowed: 1, 2, 3": ("08", {"table": 7}),
    "table: got '1b', allowed: 1, 2, 3": ("08", {"table": "1b"}),
    "evidence: got 'evidense', allowed: ci,": ("08", {"evidence": "evidense"}),
    "unknown parameter: seed; allowed:": ("08", {"seed": 3}),
    "unknown parameter: epoch; allowed:": ("08", {"epoch": 3, "profile": "quick"}),
    "tables: got 4, allowed: 1, 2, 3": ("00", {"tables": [4]}),
    "profile: got 'paper2', allowed: ci,": ("00", {"profile": "paper2"}),
    "unknown parameter: tabels; allowed:": ("00", {"tabels": [1]}),
    "evidence: got 'quck', allowed: ci,": ("14", {"evidence": "quck"}),
    "profile: got 'smal', allowed: ci,": ("17", {"profile": "smal"}),
}

CHECKED = {
    "00": "given_notebook_params",
    "08": "given_notebook_params",
    "14": "params_file",
    "17": "params_file",
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_parameter_is_one_line_that_names_it(says):
    notebook, changes = WRONG[says]
    line = told(first_cells(notebook, CHECKED[notebook], **changes))
    assert line and line.startswith(says) and "\n" not in line, line


def test_a_profile_of_ones_own_says_its_epochs():
    assert told(first_cells("08", "given_notebook_params", profile="mine", epochs=2)) is None
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
    "compression": "made = tcs.Compressor('TCS', [10**6], 2)\nwhile True:\n    made.step(torch.ones(2, 10**6))",
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_reader_interrupts_ends_in_one_line(loop, tmp_path, monkeypatch):
    monkeypatch.setenv("TCS_CACHE", str(tmp_path))
    cell = nbformat.v4.new_code_cell(INTERRUPTED + LOOPS[loop])
    line = told([cell])
    assert line and line.startswith("interrupted") and "\n" not in line, line
    assert ("it goes on" in line) == (loop == "runs")


def test_an_interrupted_loop_of_ones_own_keeps_its_traceback():
    cell = nbformat.v4.new_code_cell(INTERRUPTED + "import time\nwhile True:\n    time.sleep(0.1)")
    assert "Traceback" in told([cell])
