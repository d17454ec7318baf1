"""Methods to compare: those that have a name, and those in a file.

A method is a scheme. Either the file registers it, as a mask rule or with its client and server classes
(`tcs_core.register_scheme`), or the file has a class with `compress` and `decompress`, which
`tcs_lab.schemes.tensors` makes a scheme.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import linecache
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tcs_core import FAMILIES, RULES, Scheme
from tcs_lab.schemes.tensors import TensorRule, register_tensors
from tcs_lab.support.errors import one_line, shorten
from tcs_lab.training.configuration import RunConfig

FORMS = (
    "a class with compress(tensor, name) and decompress(tensors, context), or a mask rule below "
    "@tcs.register_scheme(...)"
)
SMALLER = ("-K4", "-K16")  # suffixes of the further densities of a method with masks


@dataclass(frozen=True)
class Method:
    """A method to compare. `names` are its schemes, that with the usual density first.

    A method from a `file` has the `source` that was executed. Its runs, in this process or in a worker,
    are made in a `with` block of `guard`.
    """

    name: str
    names: tuple[str, ...]
    file: Path | None = None
    source: bytes = b""

    @property
    def sha256(self) -> str | None:
        """The hash of the source; None for a method without a file."""
        return None if self.file is None else hashlib.sha256(self.source).hexdigest()

    @property
    def folder(self) -> str:
        """The name of its folder under results/compare/."""
        return re.sub(r"[^\w.+-]+", "_", self.name)[:64]

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return self.name if self.file is None else f"{self.file.name}: {self.name}"

    @contextlib.contextmanager
    def guard(self, config: RunConfig, what: str = "run") -> Iterator[None]:
        """Read the file, if there is one, so that it is known in this process. An error of the run in
        this block is told in one line that names the file, the run and the round. `what` says what kind
        of run it is."""
        if self.file is None:
            yield
            return
        read_method_file(self.file, self.name, self.source)
        try:
            yield
        except (MemoryError, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            run = f"{what} with eta {config.eta:g} and seed {config.seed}{_round_of(error)}"
            line = _line_in(self.file, error)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            said = f"{kind}{one_line(error)}{_advice(error)}"
            raise ValueError(f"{self.file}{line}: {config.scheme.name}: {run}: {said}") from error


def find_method(given: str) -> Method:
    """Find a method by FILE, FILE:NAME or the name of a scheme.

    A file is executed, so that it can do whatever its author likes. Raises ValueError or
    FileNotFoundError in one line.
    """
    path, colon, name = given.rpartition(":") if ".py:" in given else (given, "", "")
    if not path.endswith(".py") and not Path(path).is_file():
        return find_stored_method(given)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist, allowed: a Python file, or {_A_SCHEME}")
    return read_method_file(Path(path), name if colon else "")


_A_SCHEME = "the name of a scheme (tcs compare --list shows some)"


def find_stored_method(name: str) -> Method:
    """Find a method of the core or of the lab, with the densities that its suffixes give."""
    try:
        usual = Scheme.named(name).name
    except ValueError as error:
        raise ValueError(f"METHOD: {error}; allowed: a Python file, or {_A_SCHEME}") from None
    _check_suffixes(usual)
    return Method(usual, list_densities(usual))


def _check_suffixes(name: str) -> None:
    """Raise ValueError for a scheme of a class with `compress` and `decompress` whose suffixes say what is
    sent, because the class itself decides that."""
    scheme = Scheme.named(name)
    if issubclass(rule := RULES[scheme.rule], TensorRule):
        rule(scheme, [1])


def list_densities(name: str) -> tuple[str, ...]:
    """List a scheme and its two further densities, which are other ranks of a class, or smaller masks."""
    rule = Scheme.named(name).rule
    if others := getattr(RULES[rule], "densities", ()):
        suffixes = name.removeprefix(rule)
        return (name, *(Scheme.named(other + suffixes).name for other in others if other != rule))
    names, stem = [name], name.rstrip("+")  # a plus comes after all suffixes
    for suffix in SMALLER:
        with contextlib.suppress(ValueError):
            names.append(Scheme.named(stem + suffix + name[len(stem) :]).name)
    return tuple(names)


# A file ───────────────────────────────────────────────────────────────────────────────────────────


def read_method_file(path: Path, name: str = "", source: bytes | None = None) -> Method:
    """Read the method of a file: the only one in it, or that of this name, which may have suffixes
    (Mine-L4).

    `source` is the content of the file if it was read before. Raises ValueError, which names the file
    and says what is in it.
    """
    source = path.read_bytes() if source is None else source
    families = _execute(path, source)
    if not families:
        raise ValueError(f"{path}: got no method in it, allowed: {FORMS}")
    if not name and len(families) > 1:
        names = " or ".join(f"{path}:{family}" for family in families)
        raise ValueError(f"{path}: got {len(families)} methods in it, allowed: one; give {names}")
    wanted = name or next(iter(families))
    fitting = [one for one in families if wanted == one or wanted.startswith(f"{one}-")]
    if not fitting:
        raise ValueError(f"{path}: got {wanted}, allowed: the methods in it, {', '.join(families)}")
    if wrong := families[max(fitting, key=len)]:
        raise ValueError(wrong)
    try:
        usual = Scheme.named(wanted).name
    except ValueError as error:
        raise ValueError(f"{path}: {wanted}: {error}") from None
    try:
        _check_suffixes(usual)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Method(usual, list_densities(usual), path, source)


@lru_cache(maxsize=1)  # of two versions of a file, the one that was asked for last is registered
def _execute(path: Path, source: bytes) -> dict[str, str]:
    """Execute the source of a file, once. Return the families of schemes that it adds, each with the error
    that it has, or "". If the file fails, the families and rules that it registered are removed again."""
    families, rules = dict(FAMILIES), dict(RULES)
    built_in = {name.lower() for name, fields in FAMILIES.items() if not _is_of_a_file(fields)}
    try:
        module = _make_module(path, source)
        added = [name for name, fields in FAMILIES.items() if families.get(name) is not fields]
        classes = _name_classes(path, module, added)
        for name in [*added, *classes]:
            if name == "runs":
                raise ValueError(
                    f"{path}: got {name}, the name of the folder of records; choose another one"
                )
            if name.lower() in built_in:
                raise ValueError(f"{path}: got {name}, a built-in's name; choose another name")
        sha256 = hashlib.sha256(source).hexdigest()
        for family in added:
            _add_hash(family, module, sha256)
        wrong = {name: _register_class(path, name, kind, sha256) for name, kind in classes.items()}
        return dict.fromkeys(added, "") | wrong
    except BaseException:
        FAMILIES.clear()
        FAMILIES.update(families)
        RULES.clear()
        RULES.update(rules)
        raise


_PREFIX = "compared_"  # of the names of modules that are made of files


def _make_module(path: Path, source: bytes) -> types.ModuleType:
    """Make the module that an import of the file would give, from these bytes."""
    module = types.ModuleType(_PREFIX + hashlib.sha256(source).hexdigest()[:16])
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        text = importlib.util.decode_source(source)
        linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
        exec(compile(text, str(path), "exec"), vars(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file can raise anything, also SystemExit
        what = f"{type(error).__name__}: {shorten(one_line(error))}{_advice(error)}"
        line = _line_in(path, error)
        raise ValueError(f"{path}{line}: got an error when it was executed ({what})") from error
    return module


def _register_class(path: Path, name: str, kind: type, sha256: str) -> str:
    """Register a class of a file. Return "", or the error if it cannot be made, which is no reason to
    refuse another class of the file."""
    try:
        register_tensors(kind, name, file_sha256=sha256)
    except (Exception, SystemExit) as error:  # the method's own code can raise anything
        sort = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        what = f"{sort}{one_line(error)}{_advice(error)}"
        return f"{path}{_line_in(path, error)}: {name}: {what}"
    return ""


def _name_classes(path: Path, module: types.ModuleType, added: list[str]) -> dict[str, type]:
    """Return the classes of a file with `compress` and `decompress`, by name.

    Raises ValueError for two names that differ at most in upper and lower case, the `added` ones of
    schemes included, because names of schemes are matched without case.
    """
    kinds = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and _is_per_tensor(kind)
    ]
    classes, taken = dict[str, type](), {family.lower(): family for family in added}
    for kind in dict.fromkeys(kinds):  # a class can have two names in its module
        given = getattr(kind, "name", None)
        name = given if isinstance(given, str) and given else kind.__name__
        said = f"{name} (class {kind.__name__})"
        if other := taken.get(name.lower()):
            raise ValueError(
                f"{path}: got {other} and {said}, allowed: methods whose names differ in more than upper and "
                "lower case"
            )
        classes[name], taken[name.lower()] = kind, said
    return classes


def _add_hash(family: str, module: types.ModuleType, sha256: str) -> None:
    """Make the hash of a file a part of the identity of the runs of a family that the file has added.

    A rule from elsewhere gets it, too, in a subclass: the family's quantizer or code may be of the file.
    """
    fields = FAMILIES[family]
    rule: Any = RULES[fields.get("rule", "TCS")]
    if rule.__module__ != module.__name__:
        rule = type(rule.__name__, (rule,), {"__module__": module.__name__})
        RULES[family], FAMILIES[family] = rule, fields | {"rule": family}
    rule.file_sha256 = sha256


def _is_of_a_file(fields: dict[str, Any]) -> bool:
    """Return whether a family is from a file that was executed before, perhaps from an older version."""
    rule = RULES.get(fields.get("rule", "TCS"))
    return rule is not None and rule.__module__.startswith(_PREFIX)


def _is_per_tensor(kind: type) -> bool:
    both = all(callable(getattr(kind, call, None)) for call in ("compress", "decompress"))
    return both and not inspect.isabstract(kind)


def _line_in(path: Path, error: BaseException) -> str:
    """Return text like ", line 12" with the last line of the file in a traceback, or in that of the
    error's cause; "" if there is none."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    line, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return line if line or error.__cause__ is None else _line_in(path, error.__cause__)


# What an error says ───────────────────────────────────────────────────────────────────────────────


def _advice(error: BaseException) -> str:
    """Return what to do about an error of a file whose message does not say it, or ""."""
    if isinstance(error, ModuleNotFoundError):
        return "; allowed: installed modules, because a method must be in one file"
    if isinstance(error, AttributeError) and error.name in getattr(error.obj, "keeps", ()):
        return f"; `keeps` lists it, so give it a first value in the class, such as {error.name} = None"
    return ""


def _round_of(error: BaseException) -> str:
    """Return text like ", client 2, round 17", which the compressor has noted on the error, or ""."""
    for note in getattr(error, "__notes__", ()):
        if match := re.match(r"(client \d+, )?round \d+", note):
            return f", {match[0]}"
    return ""
