"""What claims measure: numbers that are read off one record, or off a few records alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import pandas as pd

from tcs_core import block_for, kept, position_bits
from tcs_lab.tables.tables import Record, bits_per_parameter, participants

OVERLAP_SHARE = 1e-2  # of a dense update's entries, the largest: what `UpdateWatch` compares


def _final_accuracy(record: Record) -> float:
    return 100 * record["rows"][-1]["accuracy"]


def _dense_overlap(record: Record) -> float:
    """Return how much consecutive dense updates have their largest entries in common: the share
    beyond chance, divided by what chance leaves, mean over the epochs. nan if no row says it."""
    rows = pd.DataFrame(record["rows"], columns=["update_overlap", "update_overlap_chance"])
    chance = rows["update_overlap_chance"].astype(float)
    return float(((rows["update_overlap"].astype(float) - chance) / (1 - chance)).mean())


def _own_share(record: Record) -> float:
    """Return the share of a client's message that is outside the shared mask."""
    shared, own = _mask_sizes(record)
    return own / (shared + own)


# Each measure is a number of one record, and how a person reads it. Two schemes are compared by the
# difference; bits are compared by how many times fewer the first scheme needs than the second one,
# or than 32 if it stands alone.
MEASURES = {
    "accuracy": (_final_accuracy, "{:+.2f}"),
    "dense_overlap": (_dense_overlap, "{:+.3f}"),
    "own_share": (_own_share, "{:.4f}"),
    "uplink": (lambda record: bits_per_parameter(record)["uplink"], "×{:,.4g}"),
    "uplink_whole": (lambda r: bits_per_parameter(r)["uplink with warm-up"], "×{:,.4g}"),
    "downlink": (lambda record: bits_per_parameter(record)["downlink"], "×{:,.4g}"),
}
DIFFERENCES = ("accuracy", "dense_overlap", "own_share")
COUNTED = ("own_share", "uplink", "uplink_whole", "downlink")  # not drawn by chance


def compare_measures(measure: str, records: list[Record]) -> float:
    """Return a measure of one record, or of the first of two beside the second."""
    one, *other = map(MEASURES[measure][0], records)
    if measure in DIFFERENCES:
        return one - sum(other)
    return (other or [32])[0] / one


# Do important entries stay important? ─────────────────────────────────────────────────────────────


def measure_recurrence(records: Iterable[Record]) -> dict[str, float]:
    """Measure how many of the largest entries of a dense update are among those of the next round.

    Returns shares, as means over the records: `seen`; `by_layers`, what two masks with as many
    entries in every layer have in common by chance; `by_chance`, what two masks have in common that
    are drawn from all entries alike.
    """
    records = list(records)
    columns = ["update_overlap", "update_overlap_chance"]
    rows = [pd.DataFrame(record["rows"], columns=columns) for record in records]
    means = pd.DataFrame([frame.astype(float).mean() for frame in rows]).mean()
    uniform = [kept(OVERLAP_SHARE, r["dimension"]) / r["dimension"] for r in records]
    seen, by_layers = means
    return {"seen": float(seen), "by_layers": float(by_layers), "by_chance": fmean(uniform)}


# Do clients send at the same positions? ───────────────────────────────────────────────────────────


def measure_coincidence(record: Record) -> dict[str, float]:
    """Measure how far clients send at the same positions in a sparse round at a run's end, if the
    values on the downlink are floats.

    "all" is the share of all values that clients send, and "own" that of the values outside the
    shared mask, whose position another client sends, too (at least so many). "clients" is how many
    clients send at a position, on average. "stay" is the share of TCS's shared mask that was in it
    one round before, over the whole run (nan for other schemes).
    """
    shared, own = _mask_sizes(record)
    clients = participants(record)
    explored = count_explored(record)
    again = clients * own - explored  # own values where another client has one, too
    sent = clients * (shared + own)
    stay = pd.DataFrame(record["rows"], columns=["mask_overlap"]).astype(float).mean().item()
    return {
        "all": (clients * shared + again) / sent,
        "own": again / (clients * own) if own else math.nan,
        "clients": sent / (shared + explored),
        "stay": stay,
    }


def count_explored(record: Record) -> int:
    """Count the positions outside the shared mask in the server's message, mean over the last epoch's
    rounds. The length of the message tells it."""
    dimension, row = record["dimension"], record["rows"][-1]
    bits = row["bits_down"] / row["rounds"] - 32 * _mask_sizes(record)[0]
    low, high = 0, dimension
    while high - low > 1:  # the code of more positions is longer
        middle = (low + high) // 2
        code = position_bits(middle, dimension, block_for(middle, dimension))
        low, high = (middle, high) if 32 * middle + code <= bits else (low, middle)
    return low


def _mask_sizes(record: dict[str, Any]) -> tuple[int, int]:
    """Return how many entries the shared mask has, and a client's own mask."""
    scheme, dimension = record["config"]["scheme"], record["dimension"]
    shared, own = (scheme[key] for key in ("phi_global", "phi_local"))
    return kept(shared, dimension) if shared else 0, kept(own, dimension) if own else 0
