"""The paper's tables 1 to 3, each with its figure, put together and saved.

The rows come from `tables.tables`, the figures 3 to 5 from `tables.figures`, and the differences to the
Baseline from the planned model, by which claims are judged, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tcs_lab.evidence.planned_model import estimate_gaps
from tcs_lab.tables.figures import draw_accuracy_figure, save_figure
from tcs_lab.tables.tables import NOTE_PLANNED, save_table, summary
from tcs_lab.training.configuration import RunConfig


class Drawn(NamedTuple):
    """A table of the paper as rows and as Markdown, and its figure as a .png (b"" without records)."""

    table: pd.DataFrame
    text: str
    picture: bytes


def draw_table(
    params: dict[str, Any], records: Sequence[dict[str, Any]], planned: Iterable[RunConfig],
    folder: Path | None, results: str | Path | None = None,
) -> Drawn:  # fmt: skip
    """Draw a table of the paper and, if there are records, its figure, and save both in the folder, if
    one is given and can be written: table<n>.csv and .md, figure<m>.png and .svg.

    `params` is what the files of table and profile say together. If the profile has a planned model,
    the differences are those of the model of all records in the folder `results`. Raises ValueError if the number of the table or of its figure, or
    its title, is missing.
    """
    needed = ("table", "figure", "title", "profile")
    if missing := [key for key in needed if params.get(key) is None]:
        raise ValueError(
            f"{', '.join(missing)}: missing; a table's file such as params/table1.yaml says table, figure "
            "and title, and a profile's file says profile"
        )
    gaps = estimate_gaps(params["profile"], records, results)
    table = summary(records, params.get("paper"), planned, gaps)
    setting, picture = f"profile {params['profile']}", b""
    if records:
        made, epochs = records[0]["provenance"], records[0]["config"]["epochs"]
        setting += f", {made['dataset']}, {epochs} epochs"
        title = f"Fig. {params['figure']}: {setting}\nbands and bars: ± one std of (n) seeds"
        if records[0]["config"].get("test_unused"):
            title += "; the last epoch is tested on more images"
        target = None if folder is None else folder / f"figure{params['figure']}"
        picture = save_figure(draw_accuracy_figure(records, title), target)
    note = NOTE_PLANNED if gaps is not None else None
    target = None if folder is None else folder / f"table{params['table']}"
    text = save_table(table, target, f"{params['title']}: {setting}", note=note)
    return Drawn(table, text, picture)
