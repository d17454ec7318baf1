"""Notebooks as files: whether the one that runs has the code that stands in its .py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path


def check_twin(run: Sequence[str], folder: Path) -> None:
    """ValueError if the notebook that runs is one of the folder's, and its .py has other code and
    was edited after it: what runs is the old one.

    `run` are the sources of the cells that have been run, from the first on; the notebook is known
    by them. Without a .py, or where a notebook was edited itself, there is nothing to say.
    """
    for py in sorted(folder.glob("*.py")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # somebody is saving it
            if not _is_old(run, py):
                continue
            name = py.with_suffix(".ipynb").name
            break
    else:
        return
    raise ValueError(
        f"{name}: {py.name} was edited after it and has other code, so that the old one would run; "
        f"first: uv run jupytext --to ipynb --update {py}"
    )


def _is_old(run: Sequence[str], py: Path) -> bool:
    ipynb = py.with_suffix(".ipynb")
    if not ipynb.is_file() or py.stat().st_mtime_ns <= ipynb.stat().st_mtime_ns:
        return False
    cells = json.loads(ipynb.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]).strip() for c in cells if c["cell_type"] == "code"]
    begun = [cell.strip() for cell in run]
    return bool(begun) and code[: len(begun)] == begun and not _stands_in(code, py)


def _stands_in(code: Sequence[str], py: Path) -> bool:
    """Whether these are the code cells of a .py, in its order, and all of them."""
    text = py.read_text(encoding="utf-8")
    marks = [line for line in text.splitlines() if line.startswith("# %%")]
    place = 0
    for source in code:
        place = text.find(f"\n{source}\n", place)
        if place < 0:
            return False
        place += len(source)
    return len(code) == sum("[markdown]" not in mark for mark in marks)
