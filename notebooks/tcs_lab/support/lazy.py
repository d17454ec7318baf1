"""Lazy names: a package offers names of its modules, and imports a module when one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(
    package: str, names: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package. `names` lists, for each module, what it offers.

    Nothing is stored: a name always stands for what its module has under that name now.
    """
    module_of = {name: module for module, offered in names.items() for name in offered.split()}
    parts = {module.split(".")[0] for module in names}

    def get(name: str) -> Any:
        if name in module_of:
            return getattr(import_module(f"{package}.{module_of[name]}"), name)
        if name in parts:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*parts, *module_of})
