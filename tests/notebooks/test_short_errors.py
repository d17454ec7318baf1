"""In a notebook a refused value is one line; errors of a reader's own code keep their traceback."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELLS = {
    "parameters": "epochs = 0\nschemes = ['TCX']\nsteps = [1, 0]",
    "no kind": "import tcs_lab as lab\nimport tcs_core as tcs\nimport torch\nlab.check_notebook_params(globals())",
    "unknown": "# Parameters\nepochz = 3",  # as papermill puts it in
    "an unknown one": "lab.check_notebook_params(globals())",
    "a parameter": "lab.check_values(globals(), epochs=lab.WholeNumber)",
    "in a list": "lab.check_values(globals(), steps=list[lab.WholeNumber])",
    "none given": "lab.check_values(globals(), seeds=lab.WholeNumber)",
    "the core's": "tcs.Scheme.named(schemes[0])",
    "a statement": (
        "statements = lab.Statements({}, 'a notebook')\n"
        "statements.asserted = True  # as at the parameters of a notebook that has been executed\n"
        "statements('so', False)"
    ),
    "a name": "print(data)",
    "their own": "def mine(x):\n    raise ValueError(f'mine: {x}')\n\nmine(3)",
    "a name of theirs": "def theirs():\n    return dato\n\ntheirs()",
    "a library's": "torch.ones(2) @ torch.ones(3)",
    "whole": "%tb",
}


@pytest.fixture(scope="module")
def executed():
    """The cells after their execution, and the names of those after which "Run All" stops."""
    cells = {name: nbformat.v4.new_code_cell(source) for name, source in CELLS.items()}
    # what stands in the cell before "whole" is the last error
    names = list(CELLS)
    order = [*names[:8], "whole", *names[8:-1]]
    notebook = nbformat.v4.new_notebook(cells=[cells[name] for name in order])
    client, stops = NotebookClient(notebook, kernel_name="python3", timeout=120), set()
    with client.setup_kernel():
        for place, name in enumerate(order):
            try:
                client.execute_cell(cells[name], place)
            except CellExecutionError:
                stops.add(name)
    return cells, stops


@pytest.fixture(scope="module")
def shown(executed):
    """The text of every cell's error."""
    return {name: told(cell) for name, cell in executed[0].items()}


def told(cell):
    errors = [o for o in cell.outputs if o.output_type == "error"]
    text = "\n".join("\n".join(error.traceback) for error in errors)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("an unknown one", "unknown parameter: epochz"),
        ("a parameter", "epochs: got 0; Input should be greater than or equal to 1"),
        ("in a list", "steps: value 2: got 0; Input should be greater than or equal to 1"),
        ("none given", "seeds: missing, allowed: "),
        ("the core's", "scheme 'TCX' is unknown"),
        ("a statement", "contradicted: so"),
        ("a name", "data is not defined"),
    ],
)
def test_what_the_package_refuses_is_one_line(shown, name, says):
    assert says in shown[name] and "\n" not in shown[name], shown[name]
    assert "%tb" in shown[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("their own", "ValueError: mine: 3"),
        ("a name of theirs", "NameError: name 'dato' is not defined"),
        ("a library's", "RuntimeError: "),
    ],
)
def test_other_errors_say_where_they_are(shown, name, says):
    assert says in shown[name] and shown[name].count("\n") > 3


def test_the_whole_traceback_is_there_on_request(shown):
    assert "scheme 'TCX' is unknown" in shown["whole"]
    assert shown["whole"].count("\n") > 5
    assert not shown["no kind"]


def test_the_cells_below_do_not_run(executed):
    assert executed[1] == CELLS.keys() - {"parameters", "no kind", "unknown", "whole"}
