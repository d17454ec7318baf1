"""Places: where the project's own files lie."""

from __future__ import annotations

from pathlib import Path

_CODE = Path(__file__).resolve().parents[3]
IS_CLONE = (_CODE / "tcs_core.py").is_file() and (_CODE / "params").is_dir()
ROOT = _CODE if IS_CLONE else Path.cwd()  # of params and results; installed: where it is called
LAB = Path(__file__).parents[1]  # as Python names its files
