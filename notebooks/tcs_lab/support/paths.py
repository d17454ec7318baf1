"""Paths of the project: its root, and the lab's own folder."""

from __future__ import annotations

from pathlib import Path

_CODE = Path(__file__).resolve().parents[3]
IS_CLONE = (_CODE / "tcs_core.py").is_file() and (_CODE / "params").is_dir()
# The folder of params/ and results/. If the package is installed, this is the current folder.
ROOT = _CODE if IS_CLONE else Path.cwd()
LAB = Path(__file__).parents[1]  # as it stands in the file names of tracebacks
