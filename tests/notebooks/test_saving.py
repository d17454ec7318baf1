"""Opening and saving in JupyterLab: changes nothing but what was changed by hand."""

import itertools
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
import tcs_lab as lab
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


def test_run_all_and_saving_change_nothing_but_results():
    """JupyterLab joins what a cell printed in pieces: so must be what is committed."""
    for ipynb in IPYNB:
        cells = nbformat.read(ipynb, 4).cells
        names = [[o.get("name") for o in cell.get("outputs", [])] for cell in cells]
        pieces = [pair for row in names for pair in itertools.pairwise(row)]
        assert not any(a and a == b for a, b in pieces), ipynb.stem


def closed(notebook):
    """Places of the code cells that JupyterLab shows closed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [i for i, c in enumerate(code) if c.metadata.get("jupyter", {}).get("source_hidden")]


def test_what_is_closed_stays_so(tmp_path):
    """Through opening and saving, and through an edit of the .py."""
    ipynb = NOTEBOOKS / "08_tables_and_curves.ipynb"
    notebook = nbformat.read(ipynb, 4)
    manager, model = opened(ipynb, tmp_path)
    manager.save(model, model["path"])
    copied = tmp_path / "notebooks" / ipynb.name
    assert closed(nbformat.read(copied, 4)) == closed(notebook) != []
    py = copied.with_suffix(".py")
    text = py.read_text(encoding="utf-8")
    py.write_text(text.replace("\n\n# %% [", "\n\n# %%\nmore = 1\n\n# %% [", 1), encoding="utf-8")
    jupytext_command(["--to", "ipynb", "--update", "--quiet", str(py)])
    after = closed(nbformat.read(copied, 4))
    assert after == [place + 1 for place in closed(notebook)]


def test_a_change_is_saved_in_both(tmp_path):
    manager, model = opened(NOTEBOOKS / "08_tables_and_curves.ipynb", tmp_path)
    model["content"]["cells"][0]["source"] += "\n\nA sentence added by hand."
    manager.save(model, model["path"])
    text = (tmp_path / model["path"]).with_suffix(".py").read_text(encoding="utf-8")
    before = (NOTEBOOKS / "08_tables_and_curves.py").read_text(encoding="utf-8")
    first_code = re.compile(r"\n\n# %%(?! \[)")
    assert text == first_code.sub(r"\n#\n# A sentence added by hand.\g<0>", before, count=1)


def test_the_server_extension_that_does_so_is_enabled():
    command = [sys.executable, "-m", "jupyter", "server", "extension", "list"]
    listed = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert re.search(r"jupytext.*enabled", listed.stdout + listed.stderr)
