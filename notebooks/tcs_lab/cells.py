"""What notebooks' own cells share: parameters checked, messages heard, claims said, gains taken
seed by seed."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field

import tcs_core as tcs
from tcs_lab.errors import plain, text_hint, validated
from tcs_lab.tables import CONFIDENCE, half_interval

# The one vocabulary of verdicts; tcs_lab/claims.py adds one word for what is counted.
SUPPORTED, CONTRADICTED, OPEN, NOT_MEASURED = WORDS = (
    "supported",
    "contradicted",
    "open",
    "not measured",
)

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def check_values(namespace: dict[str, Any], **kinds: Any) -> None:
    """ValueError in one line if a notebook's own parameter is not of its kind (a pydantic type), or
    missing."""
    missing = [name for name in kinds if name not in namespace]
    if missing:
        raise ValueError(f"{', '.join(missing)}: missing in the cell of parameters")
    for name, kind in kinds.items():
        check = partial(validated, kind, source=name, strict=True)
        given = plain(namespace[name])
        try:
            check(given)
        except ValueError as error:
            raise ValueError(f"{error}{text_hint(name, given, check)}") from None


class Listening(tcs.Link):
    """Keeps the clients' messages of a round."""

    messages: list[tcs.Message]

    def gather(
        self, known: tcs.Known, chosen: list[int], send: Callable[[int], tcs.Message]
    ) -> Iterator[tcs.Arrival]:
        self.messages = []
        for arrival in super().gather(known, chosen, send):
            if arrival.message is not None:
                self.messages.append(arrival.message)
            yield arrival


def show_code(*things: Any) -> None:
    """Functions, methods and classes as they stand in their files, one below the other, each moved
    to the left margin and nothing else."""
    from IPython.display import Markdown, display

    texts = [textwrap.dedent(inspect.getsource(thing)).rstrip() for thing in things]
    display(Markdown("```python\n" + "\n\n".join(texts) + "\n```"))


def bold(word: str) -> str:
    """For print, in a notebook or on a terminal."""
    return f"\x1b[1m{word}\x1b[0m"


def parameter_digest(values: dict[str, Any]) -> str:
    """Six letters that stand for a notebook's parameters and their values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def literals(cell: str) -> dict[str, Any] | None:
    """What a cell of parameters assigns, by name; None if there is anything else in the cell."""
    try:
        nodes: list[Any] = ast.parse(cell).body
        values = {node.targets[0].id: ast.literal_eval(node.value) for node in nodes}
    except (SyntaxError, ValueError, AttributeError):
        return None
    return values or None


class Claims:
    """Says of each claim whether it is supported; at the notebook's own parameters each must be.

    Make it in the cell after the parameters, with globals() and the digest of the values for which
    the claims are asserted (a test says when it is not that of the committed cell).
    """

    def __init__(self, namespace: dict[str, Any], own: str):
        found = (literals(cell) for cell in namespace.get("In", []))
        names = next((list(values) for values in found if values), [])
        self.asserted = own == parameter_digest({name: namespace.get(name) for name in names})
        self.words: dict[str, str] = {}

    def __call__(self, text: str, ok: bool | str | None, numbers: str = "") -> None:
        """Prints the word: for True, False or None (not measured), or a word itself.

        Raises AssertionError, at the notebook's own parameters, unless the claim is supported.
        """
        word = self._word(ok)
        rest = f": {text}" + (f" ({numbers})" if numbers else "")
        assert word == SUPPORTED or not self.asserted, word + rest
        self.words[text] = word
        print(bold(word) + rest)

    @staticmethod
    def _word(ok: bool | str | None) -> str:
        if ok is None:
            return NOT_MEASURED
        if isinstance(ok, str):
            return ok
        return SUPPORTED if ok else CONTRADICTED

    def summary(self, strong: str = "\x1b[1m{}\x1b[0m") -> str:
        """How many of the page's own statements hold, and which word the others came to; to be
        printed, or as Markdown with `strong` "**{}**"."""
        held = list(self.words.values()).count(SUPPORTED)
        count = f"{held} of {len(self.words)} statements checked on this page"
        others = {text: word for text, word in self.words.items() if word != SUPPORTED}
        rest = [f"\n{strong.format(word)}: {text}" for text, word in others.items()]
        return f"{strong.format(SUPPORTED)}: {count}" + "".join(rest)


def decided(mean: float, half: float, least: float = 0.0) -> str:
    """Whether a mean, known to ± `half`, is above `least`: supported, contradicted or open."""
    if mean - half > least:
        return SUPPORTED
    return CONTRADICTED if mean + half < least else OPEN


def paired_gain(ours: Iterable[float], theirs: Iterable[float]) -> tuple[float, float]:
    """Mean of the differences, pair by pair, and half of Student's interval for it.

    Of one pair there is no interval: half is infinite. ValueError if the counts differ.
    """
    gains = np.array([a - b for a, b in zip(ours, theirs, strict=True)], dtype=float)
    mean = float(gains.mean()) if len(gains) else math.nan
    return mean, half_interval(gains, CONFIDENCE)
