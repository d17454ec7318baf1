"""Do clients send at the same places? Read off a record: the length of the server's message says how
many places it has."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from tcs_core import block_for, kept, position_bits
from tcs_lab.tables.tables import participants


def coinciding(record: dict[str, Any]) -> dict[str, float]:
    """Of a sparse round at a run's end, float values on the downlink: "all" and "own", which share
    of all values that clients send, or of those outside the shared mask, is at places where another
    client sends, at least; "clients", how many send at a place, on average; and "stay", which share
    of TCS's shared mask was in it a round before, over the run (nan for other schemes)."""
    shared, own = _mask_sizes(record)
    clients = participants(record)
    places = explored_places(record)
    again = clients * own - places  # own values where another client has one, too
    sent = clients * (shared + own)
    stay = pd.DataFrame(record["rows"], columns=["mask_overlap"]).astype(float).mean().item()
    return {
        "all": (clients * shared + again) / sent,
        "own": again / (clients * own) if own else math.nan,
        "clients": sent / (shared + places),
        "stay": stay,
    }


def explored_places(record: dict[str, Any]) -> int:
    """Places outside the shared mask in the server's message: mean over the last epoch's rounds."""
    dimension, row = record["dimension"], record["rows"][-1]
    bits = row["bits_down"] / row["rounds"] - 32 * _mask_sizes(record)[0]
    low, high = 0, dimension
    while high - low > 1:  # the code of more places is longer
        middle = (low + high) // 2
        code = position_bits(middle, dimension, block_for(middle, dimension))
        low, high = (middle, high) if 32 * middle + code <= bits else (low, middle)
    return low


def _mask_sizes(record: dict[str, Any]) -> tuple[int, int]:
    """Entries of the shared mask, and of a client's own."""
    scheme, dimension = record["config"]["scheme"], record["dimension"]
    shared, own = (scheme[key] for key in ("phi_global", "phi_local"))
    return kept(shared, dimension) if shared else 0, kept(own, dimension) if own else 0
