"""Variants beyond the paper: suffixes of scheme names, and the code behind the fields that they set.

    -Random     control: the shared mask is drawn anew each round, from a seed that everybody knows
    -Stale      control: the shared mask follows the update of ten rounds ago, not the last one
    -GE         errors in units of gradients, as in the authors' published code
    -WLF -WPLF  the fair shared mask from the weights, as in the authors' published code
    -E<n> -K<n> a client's own mask of n/1000; all masks n times smaller
    -M<q>       values of q bits by Lloyd's and Max's quantizer
    -D<q>       a compressed downlink, with errors at the server
    -NW -W<n>   no warm-up; a sparse warm-up with masks n times as large
    + ++        a shorter code (shorter_codes.py); ++ that with -D2, and with -NW unless there is -W

All of it is registered with the same functions of the core that users have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tcs_lab.schemes.shorter_codes  # noqa: F401  (registers the code "entropy")
from tcs_core import (
    SHARED_FROM,
    TCS,
    Scheme,
    check_positions,
    check_same_state,
    is_on_cpu,
    phis_of,
    random_positions,
    register_quantizer,
    register_suffix,
)

Fields = dict[str, Any]
_S_TOP = ("S_top", "own", "shared")

# Names ────────────────────────────────────────────────────────────────────────────────────────────


@register_suffix("-GE", "ge", "errors in units of gradients, as in the authors' code")
def _gradient_errors(fields: Fields, _: int) -> Fields:
    return {"error_unit": "gradient"}


@register_suffix("-WLF", "wlf", "like -LF, the shared mask from the weights", _S_TOP)
def _fair_from_weights(fields: Fields, _: int) -> Fields:
    return {"phi_min_global": 1e-3, "phi_min_local": 4e-4, "shared_from": "weights"}


@register_suffix("-WPLF", "wplf", "like -PLF, from the weights", _S_TOP)
def _partly_fair_from_weights(fields: Fields, _: int) -> Fields:
    return {"phi_min_global": 1e-3, "shared_from": "weights"}


@register_suffix("-Random", "random", "a shared mask drawn anew each round", _S_TOP)
def _random_mask(fields: Fields, _: int) -> Fields:
    return {"shared_from": "random"}


@register_suffix("-Stale", "stale", "the shared mask of the update ten rounds ago", _S_TOP)
def _stale_mask(fields: Fields, _: int) -> Fields:
    return {"shared_from": "stale"}


@register_suffix("-E<n>", r"e([1-9]\d?)", "phi_local = n/1000", _S_TOP)
def _explore(fields: Fields, number: int) -> Fields:
    return {"phi_local": number / 1000}


@register_suffix("-K<n>", r"k([1-9]\d?)", "all masks n times smaller", ("masks",), last=True)
def _smaller(fields: Fields, number: int) -> Fields:
    keys = ("phi_global", "phi_local", "phi_min_global", "phi_min_local", "phi_down")
    shares = {key: fields.get(key, getattr(Scheme, key)) for key in keys}
    return {key: share / number for key, share in shares.items() if share}


@register_suffix("-D<q>", r"d([1-9]\d?)", "a compressed downlink")
def _downlink(fields: Fields, bits: int) -> Fields:
    """Compress the downlink. With few bits per value there is room for more positions than one client
    sends: with 0.4 of phi_global and 2-bit values, a message is about as long as one of TCS-Q5."""
    shared, own = phis_of(fields)
    phi_down = 0.4 * shared if shared and own else own
    return {"down_value_bits": bits, "down_quantizer": "lloyd", "phi_down": phi_down}


@register_suffix("-NW", "nw", "no warm-up")
def _no_warmup(fields: Fields, _: int) -> Fields:
    return {"dense_warmup": False}


@register_suffix("-W<n>", r"w([1-9]\d{0,2})", "a sparse warm-up, masks n times as large", _S_TOP)
def _sparse_warmup(fields: Fields, times: int) -> Fields:
    return {"dense_warmup": False, "warmup_masks": times}


@register_suffix("+", r"\+", "shorter codes, losing nothing")
def _shorter(fields: Fields, _: int) -> Fields:
    return {"code": "entropy"}


@register_suffix("++", r"\+\+", "+ and -D2; without -W also -NW")
def _shortest(fields: Fields, _: int) -> Fields:
    chosen = {"code": "entropy", **_downlink(fields, 2)}
    return chosen if fields.get("warmup_masks") else chosen | {"dense_warmup": False}


# Rules ────────────────────────────────────────────────────────────────────────────────────────────


class FromSeed(TCS):
    """A control for TCS: the shared mask has as many entries, but it is drawn anew each round from
    the seed and the round, and does not look at any update. Messages are as long as those of TCS.
    """

    def shared_mask(self) -> Tensor | None:
        if super().shared_mask() is None:
            return None  # as in TCS, a round is dense while there was no update yet
        drawn_K = random_positions(self.k_global, self.dimension, self.seed, self.round)
        return drawn_K.to(self.device)


class FromOlderUpdate(TCS):
    """A control for TCS: the shared mask is S_top of the update ten rounds ago (of the oldest one,
    while there are fewer), so that it is nine rounds older than that of TCS."""

    keeps = ("history_MK",)
    history_MK: Tensor | None = None  # masks of the last updates, the oldest first: rows of K
    rounds_ago = 10

    def shared_mask(self) -> Tensor | None:
        latest_K, history_MK = super().shared_mask(), self.history_MK
        if latest_K is None or history_MK is None or len(latest_K) != history_MK.shape[1]:
            return latest_K
        return history_MK[0]

    def observe(self, update_D: Tensor) -> None:
        super().observe(update_D)
        latest_K, history_MK = super().shared_mask(), self.history_MK
        if latest_K is None:
            return
        if history_MK is None or len(latest_K) != history_MK.shape[1]:
            history_MK = latest_K[None][:0]  # the first mask, or masks have shrunk after a warm-up
        self.history_MK = torch.cat([history_MK, latest_K[None]])[-self.rounds_ago :]

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        history_MK = state["history_MK"]
        if history_MK is None:
            return
        is_tensor = isinstance(history_MK, Tensor) and history_MK.dim() == 2
        rows = len(history_MK) if is_tensor else 1
        count = history_MK.shape[1] if is_tensor else self.k_global
        like = torch.empty(min(rows, self.rounds_ago), count, dtype=torch.int64, device="cpu")
        check_same_state("state: rule: history_MK", history_MK, like)
        if is_on_cpu(history_MK):
            for positions_K in history_MK:
                check_positions(positions_K, self.dimension)


class FromWeights(TCS):
    """As in the authors' published code, the shared mask is S_top of the weights once there was an
    update."""

    _theta_D: Tensor | None = None

    def begin(self, theta_D: Tensor | None = None, mask_factor: int = 1) -> None:
        super().begin(theta_D, mask_factor)
        self._theta_D = theta_D

    def shared_mask(self) -> Tensor | None:
        if super().shared_mask() is None:
            return None
        if self._theta_D is None:
            raise ValueError(
                f"{self.scheme.name}: got no weights to take the shared mask from, allowed: rounds of a "
                "Federation, or known.begin(theta_D=...) before each round"
            )
        fair = self.scheme.phi_min_global
        return self.select(self._theta_D, self.k_global, fair)


SHARED_FROM.update(random=FromSeed, stale=FromOlderUpdate, weights=FromWeights)


# A quantizer ──────────────────────────────────────────────────────────────────────────────────────


@register_quantizer("M", "lloyd")
def lloyd_max_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Quantize the magnitudes by Lloyd's and Max's method. Codes and means are as those of
    `fractional_quantize`.

    This is beyond the paper, whose intervals depend on the smallest magnitude, so that with few bits
    most values share one interval. Here the intervals are placed for a small squared error: a fixed
    number of times, each edge moves halfway between two means and each mean to the average of its
    values (S. Lloyd, 1982; J. Max, 1960). Needs at least one value, and finite ones. A GPU is not
    waited for.
    """
    magnitudes_K, count = values_K.abs().double(), len(values_K)
    if intervals == 1:
        return (values_K < 0).int(), magnitudes_K.mean(0, keepdim=True).float()
    sorted_K = magnitudes_K.sort().values
    sums_K = F.pad(sorted_K.cumsum(0), (1, 0))
    places_P = torch.arange(intervals, dtype=torch.float32, device=values_K.device)
    shares_P = (places_P + 0.5) / intervals
    roots_K = sorted_K.sqrt().cumsum(0)
    start_P = torch.searchsorted(roots_K, shares_P * roots_K[-1]).clamp_(max=count - 1)
    means_P = sorted_K[start_P]  # ascending
    for _ in range(15):
        edges = (means_P[1:] + means_P[:-1]) / 2
        cuts = F.pad(torch.searchsorted(sorted_K, edges, right=True), (1, 0))
        cuts = F.pad(cuts, (0, 1), value=count)
        counts_P = cuts.diff()
        centres_P = sums_K[cuts].diff() / counts_P.clamp(min=1)
        means_P = torch.where(counts_P > 0, centres_P, means_P)
    interval_K = intervals - 1 - torch.bucketize(magnitudes_K, edges)
    return (interval_K + intervals * (values_K < 0)).int(), means_P.flip(0).float()
