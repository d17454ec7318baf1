"""The paper's tables and figures, drawn from records, with the differences that claims are judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tcs_lab.evidence.claims import planned_gaps
from tcs_lab.tables.figures import accuracy_figure, save_figure
from tcs_lab.tables.tables import NOTE_PLANNED, save_table, summary
from tcs_lab.training.configuration import RunConfig


def draw_table(
    params: dict[str, Any], records: Sequence[dict[str, Any]], planned: Iterable[RunConfig],
    folder: Path,
) -> pd.DataFrame:  # fmt: skip
    """Saves a table of the paper in the folder, table<n>.csv and .md, and, if there are records,
    its curves, figure<m>.png and .svg; the table. `params` is what table and profile say. Where the
    profile has a planned model, differences are the model's.

    Raises ValueError if they lack the table's number, its figure's or its title."""
    needed = ("table", "figure", "title", "profile")
    if lacking := [key for key in needed if params.get(key) is None]:
        raise ValueError(f"{', '.join(lacking)}: missing, a table's or a profile's file says it")
    gaps = planned_gaps(params["profile"], records)
    table = summary(records, params.get("paper"), planned, gaps)
    setting = f"profile {params['profile']}"
    if records:
        made, epochs = records[0]["provenance"], records[0]["config"]["epochs"]
        setting += f", {made['dataset']}, {epochs} epochs"
        title = f"Fig. {params['figure']}: {setting}\nbands and bars: ± one std of (n) seeds"
        if records[0]["config"].get("test_unused"):
            title += "; the last epoch is tested on more images"
        save_figure(accuracy_figure(records, title), folder / f"figure{params['figure']}")
    note = NOTE_PLANNED if gaps else None
    target, title = folder / f"table{params['table']}", f"{params['title']}: {setting}"
    save_table(table, target, title, note=note)
    return table
