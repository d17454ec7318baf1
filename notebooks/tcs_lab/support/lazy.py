"""Lazy names: a package that offers the names of its modules and imports a module when it is asked
for one of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(
    package: str, names: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: `names` lists, module by module, what it offers.

    Nothing is kept: a name is always the one that its module has now.
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
