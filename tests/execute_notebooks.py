"""Rebuild the committed notebooks: uv run python tests/execute_notebooks.py [name ...]

For every notebooks/*.py (or those whose name starts with an argument): the .ipynb takes its cells,
is executed from top to bottom in the notebooks folder, and is written without what changes from
run to run (timings, versions, paths). Cell ids are kept. Commit the pair.
"""

import hashlib
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def paired(py: Path) -> nbformat.NotebookNode:
    """The notebook of a .py, with the cell ids of the .ipynb beside it."""
    ipynb = py.with_suffix(".ipynb")
    notebook = jupytext.read(py, config=load_jupytext_config(str(py)))
    old = nbformat.read(ipynb, 4).cells if ipynb.exists() else []
    ids = {cell.source: cell.id for cell in reversed(old)}
    for number, cell in enumerate(notebook.cells):
        fresh = hashlib.sha256(f"{number} {cell.source}".encode()).hexdigest()[:8]
        cell.id = ids.pop(cell.source, fresh)
    return notebook


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without timings and versions, so that two runs differ only where results do."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


def main(names: list[str]) -> None:
    for py in sorted(NOTEBOOKS.glob("*.py")):
        if names and not py.stem.startswith(tuple(names)):
            continue
        start = time.perf_counter()
        notebook = paired(py)
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


if __name__ == "__main__":
    main(sys.argv[1:])
