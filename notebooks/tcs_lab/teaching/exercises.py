"""Exercises: they compare what a learner has written with the core, and say in one line what is off."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Case(NamedTuple):
    """One input, by the names of its arguments, and the result of the core."""

    given: dict[str, Any]
    wanted: Any
    when: str = ""  # such as "round 2,"


Cases = Callable[[], Iterator[Case]]
Mistake = tuple[Callable[..., Any], str]  # a wrong solution, and a hint for who has written it


class Exercise(NamedTuple):
    """An exercise. `returns` names what the learner's function returns: positions, numbers or vectors, in
    the form in which the core has them."""

    returns: tuple[str, ...]
    cases: Cases
    mistakes: tuple[Mistake, ...]


EXERCISES: dict[str, Exercise] = {}
RIGHT, UNWRITTEN = "right", "not written yet, or it returns nothing"


def exercise(name: str, *returns: str, mistakes: tuple[Mistake, ...] = ()) -> Callable:
    """Decorate the function that yields the cases of an exercise, and register the exercise."""

    def register(cases: Cases) -> Cases:
        EXERCISES[name] = Exercise(returns, cases, mistakes)
        return cases

    return register


def check_exercise(name: str, function: Any) -> None:
    """Print one line: "right", that nothing was returned, or what is off. A mistake never raises an error."""
    print(f"{name}: {judge_solution(name, function)}")


def judge_solution(name: str, function: Any) -> str:
    """Judge a solution: the text that `check_exercise` prints after the name."""
    if name not in EXERCISES:
        return f"no exercise has this name, allowed: {', '.join(EXERCISES)}"
    if not callable(function):
        return "give the function itself: its name, without brackets"
    found = EXERCISES[name]
    cases = list(found.cases())
    for number, case in enumerate(cases):
        given = copy.deepcopy(case.given)
        try:
            got = function(*given.values())
        except Exception as error:
            return _line(f"it raises {type(error).__name__}: {error}", "", case)
        if changed := [key for key in given if not _same(given[key], case.given[key])]:
            return _line(f"it changes what it was given ({', '.join(changed)})", IN_PLACE, case)
        if got is None and number == 0:
            return UNWRITTEN
        try:
            off = _off(found.returns, case.wanted, got)
            hint = off and _hint(found, cases[: number + 1], got)
        except Exception:
            return _line(
                f"a {type(got).__name__} came back that cannot be compared with the result",
                "",
                case,
            )
        if off:
            return _line(off, hint, case)
    return RIGHT


IN_PLACE = "Make a new one instead: `a = a - b`, not `a -= b`, and no methods that end in `_`."


def _line(off: str, hint: str, case: Case) -> str:
    return " ".join(f"{off}. {hint} Given: {case.when} {_inputs(case.given)}".split())


def _hint(found: Exercise, cases: list[Case], got: Any) -> str:
    """Return a hint, if the result is that of a typical mistake (which, like the learner, had all
    cases but the last one right)."""
    for mistaken, text in found.mistakes:
        *before, now = (mistaken(*copy.deepcopy(list(case.given.values()))) for case in cases)
        pairs = zip(before, cases, strict=False)
        well = not any(_off(found.returns, case.wanted, one) for one, case in pairs)
        if well and not _off(found.returns, now, got):
            return text
    wanted = cases[-1].wanted
    if isinstance(wanted, Tensor) and _plain(got) == (wanted + 1).tolist():
        return "Are these counted from 1?"
    return ""


# What is off ──────────────────────────────────────────────────────────────────────────────────────


def _off(returns: tuple[str, ...], wanted: Any, got: Any) -> str:
    """Say what is off in a result; "" if nothing is."""
    if len(returns) == 1:
        return _off_in(returns[0], wanted, got)
    if not isinstance(got, (tuple, list)) or len(got) != len(returns):
        count = len(got) if isinstance(got, (tuple, list)) else "one"
        return f"wanted {len(returns)} results ({', '.join(returns)}), got {count}"
    parts = zip(returns, wanted, got, strict=True)
    return next((off for part in parts if (off := _off_in(*part))), "")


def _off_in(name: str, wanted: Any, got: Any) -> str:
    if got is None:
        return f"{name}: nothing came back (None)"
    values = _plain(got)
    if not isinstance(wanted, Tensor):
        single = not isinstance(values, list) and _close(values, wanted)
        return "" if single else f"{name}: got {shown_value(values)}, wanted {shown_value(wanted)}"
    if not isinstance(values, list):
        return f"{name}: got {shown_value(values)}, wanted a vector or a list"
    if wanted.dtype == torch.int64:
        return _off_in_positions(name, wanted.tolist(), values)
    return _off_in_vector(name, wanted.tolist(), values)


def _off_in_positions(name: str, wanted: list[int], got: list[Any]) -> str:
    if got and all(isinstance(one, bool) for one in got):
        return f"{name}: got a mask of True and False, wanted positions: {shown_value(wanted)}"
    if got == wanted:
        return ""
    if sorted(got) == wanted:
        return f"{name}: the right positions, but not in ascending order: {shown_value(got)}"
    return f"{name}: got {shown_value(got)}, wanted {shown_value(wanted)} (counted from 0)"


def _off_in_vector(name: str, wanted: list[float], got: list[Any]) -> str:
    if len(got) != len(wanted):
        return f"{name}: got {len(got)} entries, wanted {len(wanted)}"
    pairs = zip(got, wanted, strict=True)
    places = [i for i, (one, other) in enumerate(pairs) if not _close(one, other)]
    if not places:
        return ""
    first, rest = places[0], len(places) - 1
    entry = f"entry {first} (counted from 0) is {shown_value(got[first])}"
    also = f"; {rest} more of {len(wanted)} off" if rest else ""
    return f"{name}: {entry}, wanted {shown_value(wanted[first])}{also}"


def _close(got: Any, wanted: float) -> bool:
    return math.isclose(got, wanted, rel_tol=1e-4, abs_tol=1e-5)


def _same(one: Any, other: Any) -> bool:
    """Return whether an argument is still what it was."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return callable(one) or one == other


def _plain(value: Any) -> Any:
    """Tensors and arrays, also those in a list, as Python's numbers and lists of them."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [_plain(one) for one in value]
    return value


def shown_value(value: Any) -> str:
    """Return a number with at most four decimals, a list of such, a function by what it says of
    itself."""
    if callable(value):
        return str(value.__doc__)
    value = _plain(value)
    if isinstance(value, list):
        return f"[{', '.join(map(shown_value, value))}]"
    if isinstance(value, float) and math.isfinite(value):
        text = f"{value:.4f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text
    return value if isinstance(value, str) else repr(value)[:80]


def _inputs(given: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {shown_value(value)}" for key, value in given.items())
