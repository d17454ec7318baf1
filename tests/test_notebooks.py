"""The notebooks: pairs in sync, executed, clean, parameters known. nbval runs their cells."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import matplotlib
import nbformat
import papermill
import pytest
import tcs_lab as lab
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.config import load_jupytext_config
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class

import tcs_core as tcs

NOTEBOOKS = lab.ROOT / "notebooks"
PY = sorted(NOTEBOOKS.glob("*.py"))
IPYNB = sorted(NOTEBOOKS.glob("*.ipynb"))
by_name = {"ids": lambda path: path.stem}


def test_every_notebook_has_its_pair():
    assert [p.stem for p in PY] == [p.stem for p in IPYNB] != []


@pytest.mark.parametrize("py", PY, **by_name)
def test_the_pair_is_in_sync(py):
    """By content: what the .ipynb would write as text is the .py."""
    ipynb = py.with_suffix(".ipynb")
    config = load_jupytext_config(str(ipynb))
    text = jupytext.writes(jupytext.read(ipynb, config=config), fmt="py:percent", config=config)
    assert text == py.read_text()


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_executed_clean_and_small(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1)), "not run in order"
    outputs = [o for c in code for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert path.stat().st_size < 1_000_000
    text = path.read_text()
    assert "/root/" not in text and "/home/" not in text and 'papermill": {' not in text


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_form(path):
    """Title with the number and a claim; parameters as literals; an asserted claim; short cells."""
    cells = nbformat.read(path, 4).cells
    assert cells[0].source.startswith(f"# {path.stem[:2]} · ") and "**Claim" in cells[0].source
    (parameters,) = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    for node in ast.parse(parameters.source).body:
        assert isinstance(node, ast.Assign), ast.unparse(node)
        ast.literal_eval(node.value)
    code = [c.source for c in cells if c.cell_type == "code"]
    assert any(re.search(r"^\s*assert ", source, re.M) for source in code)
    for source in code:
        statements = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        assert not [f.name for f in statements if f.end_lineno - f.lineno > 12]


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_the_code_it_shows_is_the_code_it_runs(path):
    """Execute a notebook again when a function that it prints has changed."""
    core = {line.strip() for line in Path(tcs.__file__).read_text().splitlines()}
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code" and "inspect.getsource(" in cell.source:
            shown = "".join(o.text for o in cell.outputs).splitlines()
            assert shown and not [line for line in shown if line.strip() not in core]


def test_an_unknown_parameter_stops_the_notebook(tmp_path):
    source = str(NOTEBOOKS / "08_tables_and_curves.ipynb")
    with pytest.raises(papermill.PapermillExecutionError, match="unknown parameter: epochz"):
        papermill.execute_notebook(
            source,
            str(tmp_path / "out.ipynb"),
            {"epochz": 3},
            progress_bar=False,
            cwd=str(tmp_path),
        )


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem[:2])
def test_no_notebook_takes_a_parameter_that_it_does_not_know(path):
    """Its own cells up to the check, as after papermill has put in a cell of its own."""
    cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    checked = next(n for n, cell in enumerate(cells) if "notebook_params(globals()" in cell.source)
    (own,) = (n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    assert checked == own + 1
    namespace = {"In": [cells[own].source, "# Parameters\nevidenz = 'cpu'\n"]}
    with matplotlib.rc_context():
        for cell in cells[:checked]:
            exec(cell.source, namespace)
        with pytest.raises(ValueError, match="unknown parameter: evidenz"):
            exec(cells[checked].source, namespace)


def test_the_top_level_keeps_its_shape():
    allowed = {
        "pyproject.toml",
        "README.md",
        "notebooks",
        "tcs_core.py",
        "params",
        "results",
        "tests",
    }
    there = {p.name for p in Path(lab.ROOT).iterdir() if not p.name.startswith((".", "__"))}
    assert there - {"uv.lock"} <= allowed


def test_saving_in_jupyterlab_keeps_the_pair_in_sync(tmp_path):
    """Through the contents manager that jupytext gives the server, from the repository's root."""
    (tmp_path / "notebooks").mkdir()
    for path in (NOTEBOOKS / "jupytext.toml", *NOTEBOOKS.glob("08_*")):
        shutil.copy(path, tmp_path / "notebooks" / path.name)
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(tmp_path))
    path = "notebooks/08_tables_and_curves.ipynb"
    model = manager.get(path, type="notebook")
    model["content"]["cells"][0]["source"] += "\n\nA sentence added by hand."
    manager.save(model, path)
    text = (tmp_path / path).with_suffix(".py").read_text()
    assert text == (NOTEBOOKS / "08_tables_and_curves.py").read_text().replace(
        "Read before*: README.", "Read before*: README.\n#\n# A sentence added by hand."
    )


def test_the_server_extension_that_does_so_is_enabled():
    command = [sys.executable, "-m", "jupyter", "server", "extension", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"jupytext.*enabled", listed.stdout + listed.stderr)
