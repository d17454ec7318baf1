"""Opening and saving in JupyterLab: changes nothing but what was changed by hand."""

import copy
import itertools
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
import tcs_lab as lab
from execute_notebooks import fold
from jupyter_client.kernelspec import get_kernel_spec
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.cli import jupytext as jupytext_command
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class

NOTEBOOKS = lab.ROOT / "notebooks"
IPYNB = sorted(NOTEBOOKS.glob("*.ipynb"))


def opened(ipynb, folder):
    """The server's contents manager on a copy of a pair, and the notebook as JupyterLab gets it."""
    (folder / "notebooks").mkdir()
    for path in (NOTEBOOKS / "jupytext.toml", ipynb, ipynb.with_suffix(".py")):
        shutil.copy(path, folder / "notebooks" / path.name)
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(folder))
    return manager, manager.get(f"notebooks/{ipynb.name}", type="notebook")


@pytest.mark.parametrize("ipynb", IPYNB, ids=lambda path: path.stem)
def test_opening_and_saving_change_nothing(ipynb, tmp_path):
    """JupyterLab writes the running kernel's name and language into a notebook that it opens."""
    manager, model = opened(ipynb, tmp_path)
    metadata, spec = model["content"]["metadata"], get_kernel_spec("python3")
    metadata["kernelspec"] |= {"display_name": spec.display_name, "language": spec.language}
    language = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
    language |= {"nbconvert_exporter": "python", "pygments_lexer": "ipython3"}
    language |= {"codemirror_mode": {"name": "ipython", "version": 3}}
    version = metadata["language_info"].get("version")  # of the Python that ran it
    assert re.fullmatch(r"3\.\d+\.\d+", version)
    metadata["language_info"] = language | {"version": version}
    manager.save(model, model["path"])
    for path in (ipynb, ipynb.with_suffix(".py")):
        assert (tmp_path / "notebooks" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("ipynb", IPYNB, ids=lambda path: path.stem)
def test_run_all_and_saving_change_nothing_but_results(ipynb):
    """JupyterLab joins what a cell printed in pieces: so must be what is committed."""
    cells = nbformat.read(ipynb, 4).cells
    names = [[o.get("name") for o in cell.get("outputs", [])] for cell in cells]
    assert not any(a and a == b for row in names for a, b in itertools.pairwise(row))


def closed(notebook):
    """Places of the code cells that JupyterLab shows closed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [i for i, c in enumerate(code) if c.metadata.get("jupyter", {}).get("source_hidden")]


CELLS = [
    ("import math", [], True),
    ("a = 1", ["parameters"], True),
    ("lab.check_notebook_params(globals())", [], True),
    ("b = a + 1", [], False),
    ("plt.plot([1, 2])\nplt.show()", [], True),
    ("lab.show_code(tcs.kept)", [], False),
    ("def f():\n    return None\nlab.check_exercise('f', f)", [], False),
    ("def f():\n    return 1", ["solution"], True),
    ("print('core 1')", [], True),
]


def test_cells_that_teach_nothing_are_closed():
    cells = [nbformat.v4.new_code_cell(s, metadata={"tags": tags}) for s, tags, _ in CELLS]
    cells[3].metadata["jupyter"] = {"source_hidden": True}  # by a reader
    notebook = nbformat.v4.new_notebook(cells=cells)
    fold(notebook)
    assert closed(notebook) == [i for i, (_, _, wanted) in enumerate(CELLS) if wanted]


@pytest.mark.parametrize("ipynb", IPYNB, ids=lambda path: path.stem)
def test_what_is_closed_stays_so(ipynb, tmp_path):
    """Through opening and saving, and through an edit of the .py; it is nowhere in the .py."""
    notebook = nbformat.read(ipynb, 4)
    wanted = copy.deepcopy(notebook)
    fold(wanted)
    assert closed(notebook) in ([], closed(wanted))  # none: executed before there was such a thing
    manager, model = opened(ipynb, tmp_path)
    manager.save(model, model["path"])
    copied = tmp_path / "notebooks" / ipynb.name
    assert closed(nbformat.read(copied, 4)) == closed(notebook)
    py = copied.with_suffix(".py")
    text = py.read_text(encoding="utf-8")
    assert "source_hidden" not in text
    py.write_text(text.replace("\n\n# %%\n", "\n#\n# A sentence.\n\n# %%\n", 1), encoding="utf-8")
    jupytext_command(["--to", "ipynb", "--update", "--quiet", str(py)])
    assert closed(nbformat.read(copied, 4)) == closed(notebook)


def test_a_change_is_saved_in_both(tmp_path):
    manager, model = opened(NOTEBOOKS / "08_tables_and_curves.ipynb", tmp_path)
    model["content"]["cells"][0]["source"] += "\n\nA sentence added by hand."
    manager.save(model, model["path"])
    text = (tmp_path / model["path"]).with_suffix(".py").read_text(encoding="utf-8")
    before = (NOTEBOOKS / "08_tables_and_curves.py").read_text(encoding="utf-8")
    assert text == before.replace("\n\n# %%\n", "\n#\n# A sentence added by hand.\n\n# %%\n", 1)


def test_the_server_extension_that_does_so_is_enabled():
    command = [sys.executable, "-m", "jupyter", "server", "extension", "list"]
    listed = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert re.search(r"jupytext.*enabled", listed.stdout + listed.stderr)
