"""Methods: what can be compared by a name, and what a file has in it.

A method is a scheme. A file registers it itself, as a mask rule or with a client and a server of its
own (`tcs_core.register_scheme`), or it has a class with `compress` and `decompress`, of which a scheme
is made here (tensors.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import linecache
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tcs_core import FAMILIES, RULES, Scheme
from tcs_lab.schemes.tensors import register_tensors
from tcs_lab.support.errors import one_line, shorten
from tcs_lab.training.configuration import RunConfig

FORMS = (
    "a class with compress(tensor, name) and decompress(tensors, context), or a mask rule below "
    "@tcs.register_scheme(...)"
)
SMALLER = ("-K4", "-K16")  # suffixes of the further densities of a method with masks


@dataclass(frozen=True)
class Method:
    """Something to compare: `names` are its schemes, the usual density first. One from a `file` has
    the `source` that was executed."""

    name: str
    names: tuple[str, ...]
    file: Path | None = None
    source: bytes = b""

    @property
    def sha256(self) -> str | None:
        return None if self.file is None else hashlib.sha256(self.source).hexdigest()

    @property
    def folder(self) -> str:
        """Under results/compare/."""
        return re.sub(r"[^\w-]+", "_", self.name)[:64]

    @property
    def label(self) -> str:
        return self.name if self.file is None else f"{self.file.name}: {self.name}"


def find_method(given: str) -> Method:
    """FILE, FILE:NAME or the name of a stored method. A file is executed: it can do whatever its
    author likes. ValueError or FileNotFoundError in one line."""
    path, colon, name = given.rpartition(":") if ".py:" in given else (given, "", "")
    if not path.endswith(".py") and not Path(path).is_file():
        return find_stored_method(given)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist, allowed: a Python file, or {_STORED}")
    return read_method_file(Path(path), name if colon else "")


_STORED = "the name of a stored method (tcs compare --list)"


def find_stored_method(name: str) -> Method:
    """One of the core's and the lab's own, with the densities that it has by its suffixes."""
    try:
        usual = Scheme.named(name).name
    except ValueError as error:
        raise ValueError(f"{error}; or allowed: a file, or {_STORED}") from None
    return Method(usual, list_densities(usual))


def list_densities(name: str) -> tuple[str, ...]:
    """A scheme and its two further densities: other ranks of a class, or smaller masks."""
    scheme = Scheme.named(name)
    rule = RULES[scheme.rule]
    others = getattr(rule, "densities", ())
    if name in others:
        return (name, *(other for other in others if other != name))
    found = [name]
    for suffix in SMALLER:
        with contextlib.suppress(ValueError):
            found.append(Scheme.named(name + suffix).name)
    return tuple(found)


# A file ───────────────────────────────────────────────────────────────────────────────────────────


def read_method_file(path: Path, name: str = "", source: bytes | None = None) -> Method:
    """The method of a file: the only one in it, or the one with this name, which may have suffixes
    (Mine-L4). `source` is what the file said when it was read. ValueError names the file and says
    what is in it."""
    source = path.read_bytes() if source is None else source
    families = _execute(path, source)
    if not families:
        raise ValueError(f"{path}: got no method in it, allowed: {FORMS}")
    if not name and len(families) > 1:
        way = " or ".join(f"{path}:{family}" for family in families)
        raise ValueError(f"{path}: got several methods in it, allowed: {way}")
    wanted = name or next(iter(families))
    if not any(wanted == family or wanted.startswith(f"{family}-") for family in families):
        raise ValueError(f"{path}: got {wanted}, allowed: what is in it, {', '.join(families)}")
    try:
        found = Scheme.named(wanted).name
    except ValueError as error:
        raise ValueError(f"{path}: {wanted}: {families.get(wanted, error)}") from None
    return Method(found, list_densities(found), path, source)


@cache
def _execute(path: Path, source: bytes) -> dict[str, str]:
    """Runs a file's source once; the families of schemes that it adds, each with what is wrong with
    it, or "". What it registered is taken out again if something is wrong with all of it."""
    before = dict(FAMILIES), dict(RULES)
    try:
        sha256 = hashlib.sha256(source).hexdigest()
        return _register_families(path, _make_module(path, source), before[0], sha256)
    except BaseException:
        tables: tuple[dict, dict] = (FAMILIES, RULES)
        entries: tuple[dict, dict] = before
        for table, was in zip(tables, entries, strict=True):
            table.clear()
            table.update(was)
        raise


_PREFIX = "compared_"  # of the names of modules that are made of files


def _make_module(path: Path, source: bytes) -> types.ModuleType:
    """What an import of the file gives, made of just these bytes."""
    module = types.ModuleType(_PREFIX + hashlib.sha256(source).hexdigest()[:16])
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        text = source.decode()
        linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
        exec(compile(text, str(path), "exec"), vars(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a file does, SystemExit too
        what = f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
        line = _line_in(path, error)
        raise ValueError(f"{path}{line}: got an error when it was executed ({what})") from error
    return module


def _register_families(
    path: Path, module: types.ModuleType, before: dict[str, dict[str, Any]], sha256: str
) -> dict[str, str]:
    """The families that a file has registered, and those made of its classes: a class that cannot be
    made is no reason to refuse another one."""
    found = [family for family, fields in FAMILIES.items() if before.get(family) is not fields]
    classes = {
        str(getattr(kind, "name", None) or kind.__name__): kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and _is_per_tensor(kind)
    }
    for name in [*found, *classes]:
        if name == "runs":  # the folder of the stored rows' records
            raise ValueError(f"{path}: got {name}, allowed: another name")
        built_in = next((one for one in before if one.lower() == name.lower()), None)
        if built_in is not None and not _is_of_a_file(before[built_in]):
            raise ValueError(f"{path}: got {name}, a built-in's name, allowed: another name")
    for family in found:
        rule: Any = RULES[FAMILIES[family]["rule"]]
        if rule.__module__ == module.__name__:
            rule.file_sha256 = sha256  # a part of its runs' identity
    wrong = dict.fromkeys([*found, *classes], "")
    for name, kind in classes.items():
        try:
            register_tensors(kind, name, file_sha256=sha256)
        except ValueError as error:
            wrong[name] = str(error)
            FAMILIES.pop(name, None)
    return wrong


def _is_of_a_file(fields: dict[str, Any]) -> bool:
    """Whether a family is from a file that was executed before: perhaps the same one, edited."""
    rule = RULES.get(fields.get("rule", "TCS"))
    return rule is not None and rule.__module__.startswith(_PREFIX)


def _is_per_tensor(kind: type) -> bool:
    both = all(callable(getattr(kind, call, None)) for call in ("compress", "decompress"))
    return both and not inspect.isabstract(kind)


def _line_in(path: Path, error: BaseException) -> str:
    """Like ", line 12": the last line of the file on the way to an error; "" if there is none."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            found = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


# A run of a method from a file ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class MethodFile:
    """Stands around every run of a method from a file, in this process or in a worker: brings the
    file with it, and says in one line what goes wrong in it, and in which run and round."""

    path: Path
    name: str
    source: bytes

    def __call__(self, config: RunConfig) -> contextlib.AbstractContextManager[None]:
        return self._named(config)

    @contextlib.contextmanager
    def _named(self, config: RunConfig) -> Iterator[None]:
        read_method_file(self.path, self.name, self.source)
        try:
            yield
        except (MemoryError, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            run = f"run with eta {config.eta:g} and seed {config.seed}, {_round_of(error)}"
            line = _line_in(self.path, error)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            what = f"{self.path}{line}: {config.scheme.name}: {run}: {kind}{one_line(error)}"
            raise ValueError(what) from error


def _round_of(error: BaseException) -> str:
    """Like "client 2, round 17"; what the compressor has noted of the round that failed."""
    for note in getattr(error, "__notes__", ()):
        if found := re.match(r"(client \d+, )?round \d+", note):
            return found[0]
    return "before its first round"
