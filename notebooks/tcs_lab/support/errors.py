"""Errors in one line: how bad input is refused, and how a notebook shows a refusal."""

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
    """Return the repr of a value, shortened: a YAML file can hold huge values."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a number of thousands of digits"


def shorten(text: str) -> str:
    """Return a text unchanged, or its beginning if it has more than 120 characters."""
    return text if len(text) <= 120 else text[:117] + "..."


def one_line(error: BaseException) -> str:
    """Return the message of an exception in a single line."""
    return " ".join(str(error).split())


def reject_unknown(given: Iterable[Any], known: Iterable[str], what: str) -> None:
    """Raise ValueError if `given` has entries that are not `known`; it lists both. `what` names one."""
    known = set(known)
    unknown = sorted(k if isinstance(k, str) else format_value(k) for k in set(given) - known)
    if unknown:
        listed = ", ".join(map(shorten, unknown[:20]))
        # a name with a comma in it would look like several
        quoted = [repr(name) if "," in name else name for name in sorted(known)]
        raise ValueError(f"unknown {what}: {listed}; allowed: {', '.join(quoted)}")


def to_python(value: Any) -> Any:
    """Return plain Python numbers for those of numpy and torch, also inside of lists, tuples, arrays and
    dictionaries."""
    if hasattr(value, "tolist") and hasattr(value, "ndim"):  # neither is imported for this
        return value.tolist()
    if isinstance(value, dict):
        return {key: to_python(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_python, value))
    return value


def validate(kind: Any, given: Any, source: object, strict: bool | None = None) -> Any:
    """Return `given` as a value of a pydantic model or type.

    Raises ValueError in one line: the source (such as a file), the place in it, the value, and what
    is wrong with it.
    """
    try:
        return TypeAdapter(kind).validate_python(given, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    steps = first["loc"][:-1] if first["type"] == "invalid_key" else first["loc"]
    place = "".join(f"{_step(step)}: " for step in steps)
    if first["type"] == "value_error":  # it comes from a validator that names the value itself
        raise ValueError(f"{source}: {place}{first['ctx']['error']}")
    if first["type"] == "missing" and isinstance(first["input"], dict):
        there = ", ".join(shorten(str(key)) for key in list(first["input"])[:20]) or "nothing"
        raise ValueError(f"{source}: {place}got none, but it is needed; there is {there}")
    raise ValueError(f"{source}: {place}got {format_value(first['input'])}; {first['msg']}")


def _step(step: str | int) -> str:
    """Name one step of the path to a value. Entries of a list are counted from one."""
    return f"value {step + 1}" if isinstance(step, int) else shorten(step)


def text_hint(name: str, given: Any, fits: Callable[[Any], Any]) -> str:
    """Return advice for a value that is text where another type is meant, or "".

    `fits` raises for a value that would not be allowed; advice is given only if the text, read as a
    number or as YAML, would be.
    """
    if not isinstance(given, str) or len(given) > 200:
        return ""
    with contextlib.suppress(Exception):
        fits(float(given))
        return " (YAML reads 1e-3 as text; write 1.0e-3)"
    with contextlib.suppress(Exception):  # tags of YAML raise many kinds
        fits(yaml.safe_load(given))
        return f' (papermill\'s -p passes this on as text; write -y "{name}: {given}")'
    return ""


# In a notebook ────────────────────────────────────────────────────────────────────────────────────

_OURS = (str(Path(tcs_core.__file__)), str(LAB))  # where refusals are raised
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")  # where files that we ask for fail to open


def short_errors() -> None:
    """In a notebook, show some errors as one line from now on.

    This concerns a value or a file that the package refuses, a claim that does not hold, a name that
    is not defined in a cell, and an interruption while the package works. `%tb` shows the whole
    traceback. Errors in the reader's own functions and in other libraries keep their tracebacks.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        kinds = (ValueError, AssertionError, NameError, OSError, KeyboardInterrupt)
        shell.set_custom_exc(kinds, _show)


def _show(shell: Any, kind: type, error: BaseException, trace: TracebackType, **_: Any) -> None:
    """Show an exception, as IPython's handler for it."""
    line = _shorten(error, trace)
    if line is None:
        shell.showtraceback((kind, error, trace))
        return
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %tb
    shell._showtraceback(kind, error, [f"\x1b[1m{line}\x1b[0m  (%tb shows the whole traceback)"])


def _shorten(error: BaseException, trace: TracebackType) -> str | None:
    """Return the line that stands for a traceback, or None if the traceback should be shown."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    files = [frame.f_code.co_filename for frame in frames]
    if isinstance(error, KeyboardInterrupt):
        ours = [name for name in files if name.startswith(_OURS)]
        goes_on = "; run the cell again to go on: the epochs that are finished are kept"
        runs = any(name.startswith(str(LAB / "runs")) for name in ours)
        return "interrupted" + goes_on * runs if ours else None
    if isinstance(error, OSError):
        asked = [
            name for name in files
            if "site-packages" in name or not name.startswith(_STANDARD_LIBRARY)
        ]  # fmt: skip
        return one_line(error) if asked and asked[-1].startswith(_OURS) and str(error) else None
    if isinstance(error, NameError):
        of_a_cell = frames[-1].f_globals is frames[-1].f_locals
        missing = f"{error.name} is not defined; first run the cells above, from the parameters on"
        return missing if of_a_cell else None
    return one_line(error) if files[-1].startswith(_OURS) and str(error) else None
