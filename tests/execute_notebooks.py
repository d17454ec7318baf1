"""Rebuild the committed notebooks: uv run python tests/execute_notebooks.py [name ...]

For every notebooks/*.py (or those whose name starts with an argument): the .ipynb takes its cells,
is executed from top to bottom in the notebooks folder, and is written without what changes from
run to run (timings, widgets). Cell ids are kept. Commit the pair.

With an argument results/<profile>: 08 is executed once per table, from the finished records that are
there, into results/<profile>/table1.ipynb and so on; the table and its figure are written beside it.
"""

import hashlib
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
import papermill
import tcs_lab as lab
from jupytext.cli import jupytext as command
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from tcs_lab.runs.parameters import read_literals
from tcs_lab.support.files import write_json
from tcs_lab.tables.verdicts import VERDICTS_FOLDER

NOTEBOOKS = lab.ROOT / "notebooks"


def fresh_id(number: int, cell: nbformat.NotebookNode) -> str:
    return hashlib.sha256(f"{number} {cell.source}".encode()).hexdigest()[:8]


def paired(py: Path) -> nbformat.NotebookNode:
    """The notebook of a .py, with the cell ids of the .ipynb beside it."""
    ipynb = py.with_suffix(".ipynb")
    notebook = jupytext.read(py, config=load_jupytext_config(str(py)))
    old = nbformat.read(ipynb, 4).cells if ipynb.exists() else []
    ids = {cell.source: cell.id for cell in reversed(old)}
    for number, cell in enumerate(notebook.cells):
        cell.id = ids.pop(cell.source, fresh_id(number, cell))
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """What a cell printed in pieces is one output, as JupyterLab saves it."""
    whole: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and whole and whole[-1].get("name") == output.name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without timings, so that two runs differ only where results do; else as JupyterLab saves it."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("jupytext", {}).pop("text_representation", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def tables(profile: str) -> None:
    for table in (1, 2, 3):
        params = {"table": table, "evidence": profile}
        of_profile("08_tables_and_curves", params, profile, f"table{table}")
        beside = lab.results_folder(profile) / f"table{table}.md"
        if not beside.exists():  # not all of its rows have runs yet
            beside.with_suffix(".ipynb").unlink()


def linked(source: str) -> str:
    """A text cell whose links lead from results/<profile>/ where they led from notebooks/."""
    source = re.sub(r"\]\((?=\w+\.ipynb)", "](../../notebooks/", source)
    return source.replace("](../results/", "](../")


def of_profile(name: str, params: dict, profile: str, target: str) -> None:
    """A notebook executed with these parameters, into results/<profile>/."""
    source, path = NOTEBOOKS / f"{name}.ipynb", lab.results_folder(profile) / f"{target}.ipynb"
    notebook = papermill.execute_notebook(str(source), None, params, progress_bar=False)
    del notebook.metadata["papermill"], notebook.metadata["jupytext"]
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source)
        cell.id = fresh_id(number, cell)  # papermill's own cell has a new one each time
        del cell.metadata["papermill"]
    nbformat.write(cleaned(notebook), path)
    print(path.relative_to(lab.ROOT), flush=True)


def begin_verdicts(name: str, notebook: nbformat.NotebookNode) -> None:
    """An empty file of verdicts for the parameters that the notebook now has: it fills the file."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    if any("lab.Statements(" in source for source in cells):
        (parameters,) = [
            c.source for c in notebook.cells if "parameters" in c.metadata.get("tags", [])
        ]
        content = {"parameters": read_literals(parameters), "verdicts": {}}
        write_json(VERDICTS_FOLDER / f"{name}.json", content)


def execute(py: Path) -> None:
    start = time.perf_counter()
    command(["--to", "ipynb", "--update", "--quiet", str(py)])  # else it would be the old one
    notebook = paired(py)
    begin_verdicts(py.stem, notebook)
    client = NotebookClient(
        notebook,
        timeout=900,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        record_timing=False,
    )
    client.execute()
    nbformat.write(cleaned(notebook), py.with_suffix(".ipynb"))
    size = py.with_suffix(".ipynb").stat().st_size
    print(f"{py.stem}: {time.perf_counter() - start:.0f} s, {size // 1000} kB", flush=True)


def main(names: list[str]) -> None:
    profiles = [name.removeprefix("results/") for name in names if name.startswith("results/")]
    stems = tuple(name for name in names if not name.startswith("results/"))
    found = [py for py in sorted(NOTEBOOKS.glob("*.py")) if py.stem.startswith(stems or "")]
    if not found:
        sys.exit(f"no notebook has a name that begins with {' or '.join(stems)}")
    for py in found if stems or not profiles else ():
        execute(py)
    for profile in profiles:
        tables(profile)


if __name__ == "__main__":
    main(sys.argv[1:])
