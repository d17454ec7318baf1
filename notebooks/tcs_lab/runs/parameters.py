"""Parameters: read and checked from files under params/ and from notebooks, and made into runs."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from tcs_core import Scheme
from tcs_lab.support.errors import (
    format_value,
    one_line,
    reject_unknown,
    short_errors,
    shorten,
    to_python,
)
from tcs_lab.support.paths import ROOT
from tcs_lab.training.configuration import (
    RUN_CHECKS,
    RUN_KEYS,
    RunConfig,
    Seed,
    Text,
    WholeNumber,
    check_value,
    make_check,
)

# What a table says about itself, beside the fields of RunConfig.

PAPER = "a mapping: scheme: [accuracy, deviation, bits]"
_Number = Annotated[float, Field(gt=-1e9, lt=1e9)] | None
_PaperRow = Annotated[list[_Number] | tuple[_Number, ...], Field(min_length=3, max_length=3)]
_Names = Annotated[list[str] | tuple[str, ...], Field(min_length=1, max_length=1000)]
_Seeds = Annotated[list[Seed] | tuple[Seed, ...], Field(min_length=1)]
_TABLE = {
    "table": WholeNumber | None,
    "figure": WholeNumber | None,
    "title": Annotated[Text, Field(max_length=1000)] | None,
    "paper": Annotated[dict[str, _PaperRow], Field(description=PAPER)] | None,
    "jobs": Annotated[int, Field(ge=1, le=256)],
    "schemes": Annotated[_Names, Field(description="a list of scheme names")],
    "seeds": Annotated[
        Annotated[int, Field(ge=1, le=10_000)] | _Seeds,
        Field(description="a number of seeds from 1 to 10000, or a list of them"),
    ],
}

SCHEME_KEYS = {"phi_global", "phi_local", "phi_down", "phi_min_global", "phi_min_local"}
PARAMETERS = set(_TABLE) | SCHEME_KEYS | RUN_KEYS

_CHECKS = RUN_CHECKS | {key: make_check(kind) for key, kind in _TABLE.items()}
_CHECKS |= dict.fromkeys(SCHEME_KEYS, make_check(Annotated[float, Field(ge=1e-12, le=1)] | None))


def check_parameter(key: str, value: Any) -> Any:
    """Check the value of the parameter `key`, and return it; a whole number becomes a float where the
    parameter is one.

    Raises ValueError naming the key, the value and what is allowed.
    """
    return check_value(key, value, _CHECKS[key])


def params_file(key: str, value: Any) -> Path:
    """Return the file under params/ that a notebook's parameter names: a `table` by its number, a
    profile by its name. ValueError names the parameter, what was given, and which files there are.
    """
    value, prefix = to_python(value), "table" if key.startswith("table") else ""
    known = sorted(_named_files(prefix or "profile"))
    if type(value) not in (str, int) or str(value) not in known:
        allowed = f"{', '.join(known)}, because there are files params/{prefix}….yaml of these"
        raise ValueError(f"{key}: got {format_value(value)}, allowed: {allowed}")
    return ROOT / "params" / f"{prefix}{value}.yaml"


def profile_params(key: str, name: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Read the file of a profile. A profile without a file raises ValueError, unless the reader's own
    settings, `given`, say how long it trains; then {} is returned."""
    exists = isinstance(name, str) and (ROOT / "params" / f"{name}.yaml").is_file()
    if "epochs" in given and not exists and key == "profile":
        return {}
    return read_params([params_file(key, name)])


@cache
def _named_files(kind: str) -> list[str]:
    """Return the names of the tables, or of the profiles, that have a file under params/."""
    names = []
    for path in (ROOT / "params").glob("*.yaml"):
        name = read_params([path]).get(kind)
        if name is not None and path.stem == ("table" if kind == "table" else "") + str(name):
            names.append(str(name))
    return names


def notebook_params(namespace: dict[str, Any], keys: Iterable[str] = PARAMETERS) -> dict[str, Any]:
    """Take the parameters of runs from a notebook's variables; call it with globals(), in the cell
    below the parameters.

    `keys` are those that the notebook takes; the reader may set them all, also those that are not in
    the cell of parameters. Raises ValueError for other names, as `check_notebook_params` does.
    """
    check_notebook_params(namespace, keys)
    return {key: namespace[key] for key in sorted(keys) if key in namespace}


def given_notebook_params(namespace: dict[str, Any]) -> dict[str, Any]:
    """Take what the reader or papermill has set in a notebook in which None means "as the files say".

    Raises ValueError for names that are no parameters, as `check_notebook_params` does.
    """
    params = notebook_params(namespace)
    injected, _ = _papermill_names(namespace)
    return {key: value for key, value in params.items() if value is not None or key in injected}


def check_notebook_params(namespace: dict[str, Any], beyond: Iterable[str] = ()) -> None:
    """Raise ValueError for a name that has been assigned like a parameter and is none.

    papermill only warns about a name that is not in the notebook's cell of parameters; here such a
    name is refused. A name that the reader adds in this cell, or in a cell of assignments below it,
    counts as a parameter if the notebook's file uses that name anywhere. The names `beyond` are
    parameters in any case. From here on the notebook's errors are one line.
    """
    short_errors()
    beyond = set(beyond)
    injected, defaults = _papermill_names(namespace)
    reject_unknown(injected, defaults | beyond, "parameter")
    *before, running = namespace.get("In") or [""]
    if (used := _used_names(running)) is None:
        return
    assigned = set[str]()
    for cell in reversed(before):
        if not _only_assigns(cell):
            break
        assigned |= _assigned_names(cell)
    reject_unknown(assigned, assigned & used | beyond, "parameter")


def _used_names(cell: str) -> set[str] | None:
    """Return the names that a notebook uses in its file, if there is one with this cell.

    A name in quotes in a tuple or a list counts as well, since some cells look up globals() by names.
    """
    paths = (ROOT / "notebooks").glob("[0-9]*.py")
    texts = (path.read_text(encoding="utf-8") for path in sorted(paths))
    text = next((text for text in texts if cell and cell in text), None)
    if text is None:
        return None
    used = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Tuple | ast.List):
            constants = [part.value for part in node.elts if isinstance(part, ast.Constant)]
            used |= {value for value in constants if isinstance(value, str)}
    return used


def _papermill_names(namespace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names that papermill assigned, and those of the cell before, the notebook's
    parameters."""
    injected, defaults = set[str](), set[str]()
    cells = namespace.get("In", [])
    for before, cell in itertools.pairwise(["", *cells]):
        if cell.startswith("# Parameters\n"):
            injected |= _assigned_names(cell)
            defaults |= _assigned_names(before)
    return injected, defaults


def _only_assigns(cell: str) -> bool:
    """Return whether a cell looks like one of parameters: it has assignments and comments, but no
    call."""
    try:
        nodes = ast.parse(cell).body
    except SyntaxError:
        return False
    calls = any(isinstance(part, ast.Call) for node in nodes for part in ast.walk(node))
    return not calls and all(isinstance(node, ast.Assign | ast.AnnAssign) for node in nodes)


def _assigned_names(cell: str) -> set[str]:
    nodes = ast.parse(cell).body
    targets = [t for n in nodes for t in getattr(n, "targets", [getattr(n, "target", None)])]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def read_literals(cell: str) -> dict[str, Any] | None:
    """Read what a cell of parameters assigns, by name; None if there is anything else in the cell."""
    try:
        nodes: list[Any] = ast.parse(cell).body
        values = {node.targets[0].id: ast.literal_eval(node.value) for node in nodes}
    except (SyntaxError, ValueError, AttributeError):
        return None
    return values or None


def plan(params: dict[str, Any]) -> list[RunConfig]:
    """Plan every run that a table and a profile ask for, scheme by scheme, seed by seed.

    `params` is what params/table1.yaml and params/quick.yaml say together: `schemes` (names),
    `seeds` (how many, or a list) and fields of RunConfig; phi_global, phi_local, phi_min_global and
    phi_min_local replace the value of every scheme that has one, as does phi_down (which grows with
    phi_global if it is not given).
    Raises ValueError naming the key, the value and what is allowed.
    """
    reject_unknown(params, PARAMETERS, "parameter")
    params = to_python(params)
    for key in sorted(params.keys() - RUN_KEYS):
        check_parameter(key, params[key])
    names, seeds = check_parameter("schemes", params.get("schemes")), params.get("seeds", 1)
    fields = {k: v for k, v in params.items() if k in RUN_KEYS}
    schemes = [build_scheme(name, params) for name in names]
    each = range(seeds) if isinstance(seeds, int) else seeds
    runs = (RunConfig(scheme=s, seed=seed, **fields) for s in schemes for seed in each)
    return list(dict.fromkeys(runs))  # what is named twice is one run


def build_scheme(name: str, params: dict[str, Any]) -> Scheme:
    """Build the named scheme, with the phis that `params` replaces, where the scheme has one at all."""
    scheme = Scheme.named(name)
    given = {k: params[k] for k in SCHEME_KEYS if params.get(k) is not None}
    if scheme.rule == "dense":
        return scheme
    changes = {k: v for k, v in given.items() if getattr(scheme, k) is not None}
    whole = "phi_local" if scheme.phi_global is None else "phi_global"
    if scheme.phi_down is not None and whole in changes:
        ratio = scheme.phi_down / getattr(scheme, whole)
        changes = {"phi_down": min(1.0, ratio * changes[whole])} | changes
    return dataclasses.replace(scheme, **changes)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, except that a key that stands twice in a mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1]:
            what = f"{shorten(twice[0])} stands twice"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """Read a text as YAML; ValueError names the source and the place."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # constructors of tags raise many kinds
        raise ValueError(f"{source}: not readable as YAML: {one_line(error)}") from error


MAX_PARAMS_BYTES = 1 << 20


def _like(path: Path) -> str:
    """Return the files beside a path, as text: those whose names begin alike (rivals_…), or all."""
    there = sorted(other.name for other in path.parent.glob(f"*{path.suffix}"))
    family = path.name.split("_")[0] + "_"
    return ", ".join([name for name in there if name.startswith(family)] or there) or "a file"


def read_params(paths: Iterable[str | Path]) -> dict[str, Any]:
    """Read YAML files and merge them, a later file over an earlier one. ValueError names a file that
    is no mapping, FileNotFoundError one that does not exist."""
    merged: dict[str, Any] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist, allowed: {_like(path)}")
        if path.is_file() and (size := path.stat().st_size) > MAX_PARAMS_BYTES:
            raise ValueError(
                f"{path}: got {size} bytes, allowed: at most {MAX_PARAMS_BYTES} (is it a file of parameters?)"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not readable as YAML: {error}") from error
        loaded = read_yaml(text, str(path))
        if not isinstance(loaded, dict):
            got = f"{path}: got {type(loaded).__name__}"
            raise ValueError(f"{got}, allowed: a mapping of parameters, with lines like key: value")
        merged |= loaded
    return merged
