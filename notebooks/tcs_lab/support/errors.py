"""Errors: what the one line about bad input shows of it."""

from __future__ import annotations

import contextlib
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

import tcs_core
from tcs_lab.support.paths import LAB

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 120, 120
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 10


def format_value(value: Any) -> str:
    """repr, but short whatever the value is: YAML can hold huge ones."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a number of thousands of digits"


def shorten(text: str) -> str:
    """At most 120 characters of a text."""
    return text if len(text) <= 120 else text[:117] + "..."


def one_line(error: BaseException) -> str:
    """What an exception says, without its line breaks."""
    return " ".join(str(error).split())


def reject_unknown(given: Iterable[Any], known: Iterable[str], what: str) -> None:
    """ValueError that lists what is unknown among `given`, and all that is known."""
    unknown = sorted(k if isinstance(k, str) else format_value(k) for k in set(given) - set(known))
    if unknown:
        found = ", ".join(map(shorten, unknown[:20]))
        raise ValueError(f"unknown {what}: {found}; allowed: {', '.join(sorted(known))}")


def to_python(value: Any) -> Any:
    """Numbers of numpy and torch as Python's, alone or in lists, tuples, arrays and dictionaries."""
    if hasattr(value, "tolist") and hasattr(value, "ndim"):  # neither is imported for this
        return value.tolist()
    if isinstance(value, dict):
        return {key: to_python(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_python, value))
    return value


def validate(kind: Any, given: Any, source: object, strict: bool | None = None) -> Any:
    """`given` as a pydantic model or type; ValueError in one line: the source, the place, what is
    wrong."""
    try:
        return TypeAdapter(kind).validate_python(given, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place = "".join(f"{_step(step)}: " for step in first["loc"])
    if first["type"] == "value_error":  # of a check of the model's own, which names the value
        raise ValueError(f"{source}: {place}{first['ctx']['error']}")
    raise ValueError(f"{source}: {place}got {format_value(first['input'])}; {first['msg']}")


def _step(step: str | int) -> str:
    """One step of the way to a value; of a list, its place as a person counts."""
    return f"value {step + 1}" if isinstance(step, int) else shorten(step)


def text_hint(name: str, given: Any, fits: Callable[[Any], Any]) -> str:
    """For a text where something else is meant: how to say it, if what stands in the text `fits`
    (does not raise). Else nothing."""
    if not isinstance(given, str) or len(given) > 200:
        return ""
    with contextlib.suppress(Exception):
        fits(float(given))
        return " (YAML reads 1e-3 as text: write 1.0e-3)"
    with contextlib.suppress(Exception):  # tags of YAML raise many kinds
        fits(yaml.safe_load(given))
        return f' (papermill\'s -p hands that on as text: write -y "{name}: {given}")'
    return ""


# In a notebook ────────────────────────────────────────────────────────────────────────────────────

_OURS = (str(Path(tcs_core.__file__)), str(LAB))  # where refusals are raised
_PYTHONS = sysconfig.get_path("stdlib")  # its functions fail with files that ours asked for


def short_errors() -> None:
    """In a notebook, from here on: one line where the package refuses a value or a file, where a
    claim does not hold, where a name is missing in a cell, and where the reader interrupts what the
    package does; `%tb` shows the whole way to it.

    Errors in functions of the reader's own, and in other libraries, keep their traceback."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        kinds = (ValueError, AssertionError, NameError, OSError, KeyboardInterrupt)
        shell.set_custom_exc(kinds, _show)


def _show(shell: Any, kind: type, error: BaseException, trace: TracebackType, **_: Any) -> None:
    """IPython's handler of these exceptions."""
    line = _shorten(error, trace)
    if line is None:
        shell.showtraceback((kind, error, trace))
        return
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %tb
    shell._showtraceback(kind, error, [f"\x1b[1m{line}\x1b[0m  (%tb: the whole traceback)"])


def _shorten(error: BaseException, trace: TracebackType) -> str | None:
    """The line in place of a traceback; None if that should be seen."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    if isinstance(error, KeyboardInterrupt):
        ours = [name for name in files if name.startswith(_OURS)]
        goes_on = "; run the cell again: finished epochs are kept, and it goes on after them"
        runs = any(name.startswith(str(LAB / "runs")) for name in ours)
        return "interrupted" + goes_on * runs if ours else None
    if isinstance(error, OSError):
        of_python = [name.startswith(_PYTHONS) and "site-packages" not in name for name in files]
        asked = [name for name, is_python in zip(files, of_python, strict=True) if not is_python]
        return one_line(error) if asked and asked[-1].startswith(_OURS) and str(error) else None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if isinstance(error, NameError):
        of_a_cell = trace.tb_frame.f_globals is trace.tb_frame.f_locals
        missing = f"{error.name}: missing; the cells above make it, first of all that of parameters"
        return missing if of_a_cell else None
    refused = code.co_filename.startswith(_OURS) and str(error)
    return one_line(error) if refused else None
