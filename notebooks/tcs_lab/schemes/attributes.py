"""The attributes of a method's instance: what a checkpoint keeps of them, and how they get it back.

Plain values are kept as they are. Of random generators, of the dictionaries and queues of
`collections`, and of objects with methods state_dict and load_state_dict, the content is kept. It is
put back into the object that the class makes when it is made again. The attributes of other objects
are kept in the same way as those of the instance. What never changes, such as a function, is not kept.
"""

from __future__ import annotations

import enum
import functools
import json
import random
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcs_lab.schemes.packing import pack

Path = tuple[str, ...]  # of an attribute: ("memory", "residuals") is self.memory.residuals

_PLAIN = (
    type(None), bool, int, float, str, bytes, torch.Size, torch.dtype, torch.Generator, Tensor, np.ndarray,
)  # fmt: skip
_FIXED = (
    type(None), bool, int, float, complex, str, bytes, range, slice, re.Pattern, enum.Enum, type, property,
    types.FunctionType, types.ModuleType, types.GenericAlias, np.ufunc, type(np.dot), np.dtype, torch.dtype,
    torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_DICTS = (defaultdict, OrderedDict, Counter)
ALLOWED = (
    "allowed: numbers, strings, tensors, arrays, and lists, tuples and dicts of these; or give the class "
    "the methods state_dict and load_state_dict"
)


def list_attributes(
    thing: Any, path: Path = (), seen: dict[int, Any] | None = None
) -> Iterator[tuple[Path, Any]]:
    """List the attributes of an instance and those of the objects in them, each with its path."""
    seen = {} if seen is None else seen
    seen[id(thing)] = thing
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        yield (*path, name), value
        if id(value) not in seen and not has_state_dict(value) and _is_object(value):
            yield from list_attributes(value, (*path, name), seen)


def save_attributes(instance: Any, first: dict[Path, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of an instance, whose attributes were `first` when it was made.

    Raises ValueError, which names the attribute, if a resumed run could not get back what is in it.
    """
    kind = type(instance).__name__
    if not _is_object(instance):
        where = "outside of its attributes, as in slots or in a base class such as dict"
        raise ValueError(f"{kind}: got a class with state {where}, {ALLOWED}")
    seen = dict[int, Any]()
    saved: dict[str, dict[Path, Any]] = {"kept": {}, "again": {}, "inside": {}, "same": {}}
    paths = dict[int, Path]()
    for path, value in list(list_attributes(instance, (), seen)):
        try:
            how, content = _keep(value, first.get(path), seen)
        except ValueError as error:
            raise ValueError(f"attribute {'.'.join(path)} of {kind}: {error}, {ALLOWED}") from None
        if how == "kept" and paths.setdefault(id(value), path) != path:
            how, content = "again", paths[id(value)]  # the same value under another name
        saved[how][path] = content
    return saved


def load_attributes(instance: Any, saved: dict[str, Any]) -> None:
    """Give an instance the attributes that `save_attributes` returned, and no others."""
    known = {path for part in saved.values() for path in part}
    for path, _ in reversed(list(list_attributes(instance))):
        if path not in known:
            del _owner(instance, path)[path[-1]]
    for path, value in saved["kept"].items():
        _owner(instance, path)[path[-1]] = value
    for path, other in saved["again"].items():
        _owner(instance, path)[path[-1]] = _owner(instance, other)[other[-1]]
    for path, content in saved["inside"].items():
        _refill(_owner(instance, path)[path[-1]], content)


def _owner(instance: Any, path: Path) -> dict[str, Any]:
    """Return the attributes among which a path ends."""
    for name in path[:-1]:
        instance = vars(instance)[name]
    return vars(instance)


def _keep(value: Any, was: Any, seen: dict[int, Any]) -> tuple[str, Any]:
    """Return how an attribute is kept and what of it, or raise ValueError. At the start it `was` this;
    `seen` are the objects whose attributes are kept anyway."""
    content, how = _content(value), "inside"
    if content is None:
        content, how = value, "kept"
    elif _build(value) != _build(was):
        raise ValueError(f"got {type(value).__name__} that was made after the start")
    problem = _find_problem(content)
    if not problem:
        return how, content
    if was is value and (id(value) in seen or _is_fixed(value, seen)):
        return "same", None
    raise ValueError(problem)


# Kinds of values ──────────────────────────────────────────────────────────────────────────────────


def has_state_dict(value: Any) -> bool:
    """Return whether an object can say what it keeps, and get it back."""
    both = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return both and not isinstance(value, type)


def _is_object(value: Any) -> bool:
    """Return whether all that an object keeps is in `vars`: it has no slots, and its classes are not
    written in C and do not say how it is to be copied."""
    kind = type(value)
    if any(
        getattr(kind, name) is not getattr(object, name)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    ):
        return False
    try:
        _, made_of, state, *items = value.__reduce_ex__(2)
    except TypeError:  # a module, a file or a lock, for example
        return False
    return (
        made_of == (kind,)
        and (state is None or isinstance(state, dict))
        and not any(item is not None for item in items)
    )


def _is_fixed(value: Any, seen: dict[int, Any]) -> bool:
    """Return whether the content of a value cannot change, apart from that of the objects in `seen`."""
    if type(value) in (tuple, frozenset):
        return all(_is_fixed(part, seen) for part in value)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return all(_is_fixed(part, seen) for part in parts)
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        owner = value.__self__
        return owner is None or isinstance(owner, type | types.ModuleType) or id(owner) in seen
    return isinstance(value, _FIXED)


def _find_problem(value: Any) -> str:
    """Say what of a value would not come back as it was; "" if all of it would."""
    parts: list[Any] = []
    if type(value) in (list, tuple, set):
        parts = list(value)
    elif type(value) is dict:
        parts = [part for pair in value.items() for part in pair]
    elif type(value) not in _PLAIN and not isinstance(value, np.generic):
        return f"got {type(value).__name__}"
    if found := next(filter(None, map(_find_problem, parts)), ""):
        return found
    try:
        if not parts:
            pack(value)
    except ValueError as error:
        return str(error).partition(", allowed")[0]
    return ""


# Values that keep something inside ────────────────────────────────────────────────────────────────


def _content(value: Any) -> Any:
    """Return what can be put back into an object of the same kind; None for other values."""
    if has_state_dict(value):
        return dict(value.state_dict())
    kind = type(value)
    if kind is random.Random:
        return value.getstate()
    if kind in (np.random.Generator, np.random.RandomState):
        is_new = kind is np.random.Generator
        state = value.bit_generator.state if is_new else value.get_state(legacy=False)
        return json.dumps(state, default=np.ndarray.tolist)  # with whole numbers of any length
    if kind in _DICTS:
        return dict(value)
    return list(value) if kind is deque else None


def _refill(value: Any, content: Any) -> None:
    """Put back into an object what `_content` returned."""
    if has_state_dict(value):
        value.load_state_dict(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = json.loads(content)
    elif isinstance(value, np.random.RandomState):
        value.set_state(json.loads(content))
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)


def _build(value: Any) -> tuple[Any, ...]:
    """Return what an object has from its constructor, so that its content alone does not give it back."""
    own = id(value) if has_state_dict(value) else None
    names = ("default_factory", "maxlen")
    source = type(getattr(value, "bit_generator", None))
    return type(value), own, source, *(getattr(value, name, None) for name in names)
