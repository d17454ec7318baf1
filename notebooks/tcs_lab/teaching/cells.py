"""What the cells of notebooks share: checks of their parameters, a link that keeps messages, statements
with verdicts, and gains over seeds."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

import tcs_core as tcs
from tcs_lab.runs.parameters import read_literals
from tcs_lab.support.errors import reject_unknown, text_hint, to_python, validate
from tcs_lab.tables.tables import CONFIDENCE, half_interval
from tcs_lab.tables.verdicts import (
    CONTRADICTED,
    NOT_MEASURED,
    OPEN,
    SUPPORTED,
    WORDS,
    read_verdicts,
    write_verdicts,
)


def check_values(namespace: dict[str, Any], **kinds: Any) -> None:
    """Raise ValueError, in one line, if a parameter of a notebook is missing or not of its kind (a
    pydantic type, such as `lab.WholeNumber`)."""
    missing = [name for name in kinds if name not in namespace]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: missing, allowed: a value in the notebook's cell of parameters"
        )
    for name, kind in kinds.items():
        check = partial(validate, kind, source=name, strict=True)
        given = to_python(namespace[name])
        try:
            check(given)
        except ValueError as error:
            raise ValueError(f"{error}{text_hint(name, given, check)}") from None


class ListeningLink(tcs.Link):
    """A link that keeps the clients' messages of the current round."""

    def __init__(self, channel: Callable[[int, bytes], bytes] | None = None):
        super().__init__(channel)
        self.round, self.messages = -1, list[tcs.Message]()

    def to_server(
        self, known: tcs.Known, n: int, message: tcs.Message
    ) -> tuple[tcs.Message | None, int]:
        if known.round != self.round:
            self.round, self.messages = known.round, []
        arrived, bits = super().to_server(known, n, message)
        if arrived is not None:
            self.messages.append(arrived)
        return arrived, bits


def show_code(*things: Any) -> None:
    """Show functions, methods and classes as they stand in their files, one below the other, each moved
    to the left margin and otherwise unchanged."""
    from IPython.display import Markdown, display

    texts = [textwrap.dedent(inspect.getsource(thing)).rstrip() for thing in things]
    display(Markdown("```python\n" + "\n\n".join(texts) + "\n```"))


def show_figures() -> None:
    """Show the open figures as plt.show() does. Their titles and the names of their axes become the
    pictures' alternative text, for readers who cannot see them."""
    import matplotlib.pyplot as plt
    from IPython.display import display

    for number in plt.get_fignums():
        figure = plt.figure(number)
        display(figure, metadata={"image/png": {"alt": describe_figure(figure)}})
        plt.close(figure)


def describe_figure(figure: Any) -> str:
    """Describe a figure in one line: its title, and the title and the axes of each part."""
    parts = [figure.get_suptitle()]
    for axes in figure.axes:
        sides = [name for name in (axes.get_ylabel(), axes.get_xlabel()) if name.strip()]
        words = [axes.get_title(), " against ".join(sides)]
        parts.append(": ".join(word for word in words if word))
    return " ".join("; ".join(part for part in parts if part).split())


def bold(word: str) -> str:
    """Return a word that `print` shows in bold, in a notebook or on a terminal."""
    return f"\x1b[1m{word}\x1b[0m"


class Statements:
    """Checks the statements of a notebook, prints a verdict on each and keeps the verdicts.

    Make it in the cell after the parameters, with globals() and the notebook's name. If the
    parameters are those of results/verdicts/<notebook>.json, every statement must be supported;
    with other parameters the verdict is only printed.
    """

    def __init__(self, namespace: dict[str, Any], notebook: str):
        cells = (read_literals(cell) for cell in namespace.get("In", []))
        names = next((list(values) for values in cells if values), [])
        self.notebook = notebook
        self.parameters = {name: namespace.get(name) for name in names}
        kept = read_verdicts(notebook)
        self.asserted = kept is not None and kept.parameters == self.parameters
        self.words: dict[str, str] = {}

    def __call__(self, text: str, ok: bool | str | None, numbers: str = "") -> None:
        """Print the verdict on a statement that is `ok`: True, False, None (not measured), or a verdict.

        With the notebook's own parameters, raises AssertionError unless the verdict is "supported".
        """
        word = self._word(ok)
        line = f"{text} ({numbers})" if numbers else text
        assert word == SUPPORTED or not self.asserted, f"{word}: {line}"
        self.judge(text, word, numbers)

    def judge(self, text: str, word: str, numbers: str = "") -> None:
        """Print and keep a verdict that may come out either way, such as one on the paper. Raises
        ValueError for any other word than those of verdicts."""
        reject_unknown([word], WORDS, "verdict")
        self.words[text] = word
        print(f"{bold(word)}: {text}" + (f" ({numbers})" if numbers else ""))

    @staticmethod
    def _word(ok: bool | str | None) -> str:
        if ok is None:
            return NOT_MEASURED
        if isinstance(ok, str):
            return ok
        return SUPPORTED if ok else CONTRADICTED

    def summary(self, strong: str = "\x1b[1m{}\x1b[0m") -> str:
        """Say how many of the page's statements hold, and the verdict on each of the others, as text for
        `print`, or as Markdown with `strong` "**{}**". This also saves the verdicts if the
        parameters are the notebook's own."""
        self.save()
        held = list(self.words.values()).count(SUPPORTED)
        others = {text: word for text, word in self.words.items() if word != SUPPORTED}
        rest = [f"\n{strong.format(word)}: {text}" for text, word in others.items()]
        count = f"{held} of {len(self.words)} statements checked on this page"
        return f"{count} are {strong.format(SUPPORTED)}." + "".join(rest)

    def save(self) -> None:
        """Write the verdicts to results/verdicts if the parameters are the notebook's own."""
        if self.asserted:
            write_verdicts(self.notebook, self.parameters, self.words)


def judge_mean(mean: float, half: float, least: float = 0.0) -> str:
    """Judge whether a mean, known to ± `half`, is above `least`: supported, contradicted or open."""
    if mean - half > least:
        return SUPPORTED
    return CONTRADICTED if mean + half < least else OPEN


def paired_gain(ours: Iterable[float], theirs: Iterable[float]) -> tuple[float, float]:
    """Return the mean of the differences, pair by pair, and half of Student's interval for it.

    For one pair there is no interval, and half is infinite. ValueError if the counts differ.
    """
    gains = np.array([a - b for a, b in zip(ours, theirs, strict=True)], dtype=float)
    mean = float(gains.mean()) if len(gains) else math.nan
    return mean, half_interval(gains, CONFIDENCE)
