"""Errors: what the one line about bad input shows of it."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 120, 120
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 10


def shown(value: Any) -> str:
    """repr, but short whatever the value is: YAML can hold huge ones."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a number of thousands of digits"


def cut(text: str) -> str:
    """At most 120 characters of a text."""
    return text if len(text) <= 120 else text[:117] + "..."


def one_line(error: Exception) -> str:
    """What an exception says, without its line breaks."""
    return " ".join(str(error).split())


def reject_unknown(given: Iterable[Any], known: Iterable[str], what: str) -> None:
    """ValueError that lists what is unknown among `given`, and all that is known."""
    unknown = sorted(k if isinstance(k, str) else shown(k) for k in set(given) - set(known))
    if unknown:
        found = ", ".join(map(cut, unknown[:20]))
        raise ValueError(f"unknown {what}: {found}; allowed: {', '.join(sorted(known))}")


def validated(kind: Any, given: Any, source: object, strict: bool | None = None) -> Any:
    """`given` as a pydantic model or type; ValueError in one line: the source, the place, what is
    wrong."""
    try:
        return TypeAdapter(kind).validate_python(given, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place = "".join(f"{cut(str(step))}: " for step in first["loc"])
    if first["type"] == "value_error":  # of a check of the model's own, which names the value
        raise ValueError(f"{source}: {place}{first['ctx']['error']}")
    raise ValueError(f"{source}: {place}got {shown(first['input'])}; {first['msg']}")


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
