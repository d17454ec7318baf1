"""Tables: records to rows, rows to tables that a person reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tcs_core import OVERHEAD_BYTES, Scheme, bit_budget, kept
from tcs_lab.files import _write_whole
from tcs_lab.settings import _record_file
from tcs_lab.training import Row

# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 13. Tables and figures, from records
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def bits_per_parameter(record: dict[str, Any]) -> dict[str, float]:
    """Measured traffic of a run, in bits per parameter per local iteration.

    "uplink" and "downlink" leave the warm-up out, as the paper does; "... with warm-up" do not. nan
    for centralized training, which sends nothing.
    """
    scheme, dimension = record["config"]["scheme"], record["dimension"]
    names = ("uplink", "downlink")
    if scheme["centralized"] or not record["rows"]:
        return dict.fromkeys([n + w for n in names for w in ("", " with warm-up")], math.nan)
    after = [r for r in record["rows"] if not _wide_epoch(record["config"], r)] or record["rows"]
    dense = 0 if _always_dense(scheme) else sum(r["dense_rounds"] for r in after)
    values, unit = {}, dimension * scheme["local_steps"]
    for name, key in zip(names, ("bits_up", "bits_down"), strict=True):
        sparse = sum(r[key] for r in after) - 32 * dimension * dense
        sparse_rounds = sum(r["rounds"] for r in after) - dense
        total, rounds = (sum(r[k] for r in record["rows"]) for k in (key, "rounds"))
        values[name] = sparse / (unit * sparse_rounds) if sparse_rounds else 0
        values[f"{name} with warm-up"] = total / (unit * rounds)
    return values


def traffic(record: dict[str, Any]) -> dict[str, float]:
    """Bytes of one client's messages in a whole run, all overhead in: "up", "down", and "warm-up",
    the part of both that its dense rounds, or those of larger masks, took. Zeros for centralized
    training.

    Records made before messages had bytes counted bits only: theirs are rounded up by the round.
    """
    config, dimension = record["config"], record["dimension"]
    total = dict.fromkeys(("up", "down", "warm-up"), 0.0)
    if config["scheme"]["centralized"]:
        return total
    clients = kept(config["participation"], config["clients"])
    sparse = not _always_dense(config["scheme"])
    for row in record["rows"]:
        for way, share in (("up", clients), ("down", 1)):
            counted = math.ceil(row[f"bits_{way}"] / 8) + OVERHEAD_BYTES * row["rounds"]
            sent = row[f"bytes_{way}"] / share if f"bytes_{way}" in row else counted
            total[way] += sent
            total["warm-up"] += sent * _wide_epoch(config, row)
        total["warm-up"] += sparse * row["dense_rounds"] * 2 * (4 * dimension + OVERHEAD_BYTES)
    return total


def _wide_epoch(config: dict[str, Any], row: Row) -> bool:
    """Whether an epoch belongs to a sparse warm-up, with larger masks."""
    wide = config["scheme"].get("warmup_masks", 1) > 1
    return wide and row["epoch"] <= config["warmup_epochs"]


def _always_dense(scheme: dict[str, Any]) -> bool:
    return scheme["rule"] == "dense" and scheme["value_bits"] == 32


def summary(
    records: Iterable[dict[str, Any]], paper: dict[str, list] | None = None
) -> pd.DataFrame:
    """One row a scheme: accuracy over seeds (0..1) and bits, beside the paper's figures.

    `paper` maps a scheme's name to its accuracy in percent, standard deviation and bit budget (None
    where the paper has none). A scheme with a diverged seed has no mean: `diverged` counts them.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["config"]["scheme"]["name"], []).append(record)
    return pd.DataFrame([_summary_row(n, g, (paper or {}).get(n)) for n, g in groups.items()])


def _summary_row(name: str, records: list[dict[str, Any]], paper: list | None) -> dict[str, Any]:
    config = records[0]["config"]
    final = [r["rows"][-1]["accuracy"] for r in records if r["status"] == "finished"]
    diverged = len(records) - len(final)
    bits = pd.DataFrame([bits_per_parameter(r) for r in records]).mean()
    sent = pd.DataFrame([traffic(r) for r in records]).mean() / 1e6
    if config["scheme"]["centralized"]:
        sent[:] = math.nan
    accuracy, deviation, budget = (math.nan if v is None else v for v in paper or [None] * 3)
    return {
        "scheme": name,
        "eta": config["learning_rate"],
        "n": len(final),
        "diverged": diverged,
        "accuracy": float(np.mean(final)) if final and not diverged else math.nan,
        "accuracy_std": float(np.std(final, ddof=1)) if len(final) > 1 else math.nan,
        "paper_accuracy": accuracy / 100,
        "paper_accuracy_std": deviation / 100,
        "paper_bits": budget,
        "formula_bits": bit_budget(Scheme(**config["scheme"])),
        "uplink_bits": bits["uplink"],
        "uplink_bits_with_warmup": bits["uplink with warm-up"],
        "downlink_bits": bits["downlink"],
        "downlink_bits_with_warmup": bits["downlink with warm-up"],
        "megabytes_up": sent["up"],
        "megabytes_down": sent["down"],
        "megabytes_warmup": sent["warm-up"],
        "records": " ".join(_record_file(record) for record in records),
    }


def _percent(mean: float, deviation: float, form: str) -> str:
    if math.isnan(mean):
        return "–"
    spread = "" if math.isnan(deviation) else f" ± {100 * deviation:{form}}"
    return f"{100 * mean:{form}}{spread}"


def _ours(row: Any) -> str:
    """Accuracy over the seeds of one row of a table."""
    if row.diverged:
        return f"diverged ({row.diverged} of {row.n + row.diverged})"
    return _percent(row.accuracy, row.accuracy_std, ".2f")


def _digits(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The summary as a person reads it: percent, mean ± std, digits that mean something."""
    rows = [
        {
            "Scheme": r.scheme,
            "η": f"{r.eta:g}",
            "Paper: accuracy %": _percent(r.paper_accuracy, r.paper_accuracy_std, ".5g"),
            "Ours: accuracy %": _ours(r),
            "n": str(r.n),
            "Paper: bits": _digits(r.paper_bits),
            "Formula": _digits(r.formula_bits),
            "Sent up": _digits(r.uplink_bits),
            "… with warm-up": _digits(r.uplink_bits_with_warmup),
            "Sent down": _digits(r.downlink_bits),
            "MB both ways": _digits(r.megabytes_up + r.megabytes_down),
        }
        for r in table.itertuples()
    ]
    return pd.DataFrame(rows)


def save_table(
    table: pd.DataFrame, path: str | Path, title: str,
    reader: Callable[[pd.DataFrame], pd.DataFrame] = readable,
) -> None:  # fmt: skip
    """The summary as .csv (numbers) and .md (as a person reads it, by `reader`)."""
    csv = table.to_csv(index=False, lineterminator="\n")
    _write_whole(Path(path).with_suffix(".csv"), lambda f: f.write(csv.encode()))
    text = f"**{title}**\n\n{markdown(reader(table))}\n"
    _write_whole(Path(path).with_suffix(".md"), lambda f: f.write(text.encode()))


def markdown(table: pd.DataFrame) -> str:
    """A table of text as a Markdown table."""
    lines = [list(table.columns), ["---"] + ["---:"] * (len(table.columns) - 1), *table.values]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
