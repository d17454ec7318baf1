"""Variants beyond the paper: suffixes of scheme names, and what the fields that they set do.

    -Random     control: the shared mask is drawn anew each round, from a seed that all sides know
    -Stale      control: the shared mask follows the update of ten rounds ago, not the last one
    -GE         errors in units of gradients, as in the authors' published code
    -WLF -WPLF  the fair shared mask from the weights, as in the authors' published code
    -E<n> -K<n> a client's own mask of n/1000; all masks n times smaller
    -M<q>       values of q bits by Lloyd's and Max's quantizer
    -D<q>       a compressed downlink, with errors at the server
    -NW -W<n>   no warm-up; a sparse warm-up with masks n times as large
    + ++        shorter codes (shorter_codes.py); + with -D2 and (but for -W) -NW

All of it is registered at the doors of the core that anybody has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tcs_lab.shorter_codes  # noqa: F401  (registers the code "entropy")
from tcs_core import (
    SERVER,
    Client,
    Known,
    MaskRule,
    Message,
    Scheme,
    kept,
    mask_to_positions,
    random_positions,
    register_downlink,
    register_part,
    register_quantizer,
    register_suffix,
    shares_of,
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
    """Few bits a value leave room for more positions of the server's own than one client has: with
    0.4 of phi_global and 2-bit values, a message is about as long as TCS-Q5's uplink."""
    shared, own = shares_of(fields)
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


@register_suffix("++", r"\+\+", "+, -D2 and (but for -W) -NW")
def _shortest(fields: Fields, _: int) -> Fields:
    found = {"code": "entropy", **_downlink(fields, 2)}
    return found if fields.get("warmup_masks") else found | {"dense_warmup": False}


# Rules ────────────────────────────────────────────────────────────────────────────────────────────


@register_part("dense_warmup")
class SparseStart(MaskRule):
    """No dense round: while nothing is shared, every client sends its own S_top of as many."""

    def shared_mask(self) -> Tensor | None:
        found = super().shared_mask()
        return torch.empty(0, dtype=torch.int64, device=self.device) if found is None else found

    def own_count(self, shared: int) -> int | None:
        wanted = self.k_local + (0 if shared else self.k_global)
        return min(wanted, self.dimension - shared)


@register_part("warmup_masks")
class WideMasks(MaskRule):
    """Masks are `masks` times as large in a round that says so; of one that has become too large
    the entries that were largest stay."""

    keeps = ("positions", "magnitudes_K")
    _masks = 1

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.positions: Tensor | None = None  # of the shared mask
        self.magnitudes_K: Tensor | None = None  # of the last update there

    def size(self, phi: float | None, most: int) -> int:
        return min(self._masks * kept(phi, self.dimension), most) if phi else 0

    def begin(self, theta_D: Tensor | None = None, masks: int = 1) -> None:
        super().begin(theta_D, masks)
        self._masks = masks
        self.k_global = self.size(self.scheme.phi_global, self.dimension)
        self.k_local = self.size(self.scheme.phi_local, self.dimension - self.k_global)
        last_K, magnitudes_K = self.positions, self.magnitudes_K
        if last_K is not None and magnitudes_K is not None and len(last_K) > self.k_global:
            self._shrink(last_K, magnitudes_K)

    def _shrink(self, last_K: Tensor, magnitudes_K: Tensor) -> None:
        last_D = torch.zeros(self.dimension, device=self.device)
        last_D[last_K] = magnitudes_K
        self.positions = self.select(
            last_D, self.k_global, self.scheme.phi_min_global, None, "last"
        )
        self.magnitudes_K = last_D[self.positions]

    def observe(self, update_D: Tensor) -> None:
        super().observe(update_D)
        if self.positions is not None:
            self.magnitudes_K = update_D[self.positions].abs()


@register_part("shared_from", "random")
class FromSeed(MaskRule):
    """A control for TCS: the shared mask has as many entries, but it is drawn anew each round from
    the seed and the round, and does not look at any update. Messages are as long as those of TCS.
    """

    keeps = ("updates_seen",)
    overlap_2: Tensor

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.updates_seen = 0

    def shared_mask(self) -> Tensor | None:
        found = super().shared_mask()
        if found is None or not len(found):
            return found  # as in TCS, the first round is dense where there was no update yet
        drawn_K = random_positions(self.k_global, self.dimension, self.seed, self.updates_seen)
        return drawn_K.to(self.device)

    def observe(self, update_D: Tensor) -> None:
        super().observe(update_D)
        self.updates_seen += 1
        self.overlap_2.zero_()  # it counts masks of the last update, which are not used


@register_part("shared_from", "stale")
class FromOlderUpdate(MaskRule):
    """A control for TCS: the shared mask is S_top of the update ten rounds ago (of the oldest one,
    while there are fewer), so that it is nine rounds older than that of TCS."""

    keeps = ("history_MK",)
    rounds_ago = 10

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        # masks of the last updates, the oldest first: at most `rounds_ago` rows of K positions
        self.history_MK = torch.empty(0, self.k_global, dtype=torch.int64, device=self.device)

    def shared_mask(self) -> Tensor | None:
        latest_K, history_MK = super().shared_mask(), self.history_MK
        if latest_K is None or not len(history_MK) or len(latest_K) != history_MK.shape[1]:
            return latest_K
        return history_MK[0]

    def observe(self, update_D: Tensor) -> None:
        super().observe(update_D)
        latest_K = super().shared_mask()
        if latest_K is None:
            return
        if len(latest_K) != self.history_MK.shape[1]:  # masks have shrunk after a wide warm-up
            self.history_MK = torch.empty(0, len(latest_K), dtype=torch.int64, device=self.device)
        self.history_MK = torch.cat([self.history_MK, latest_K[None]])[-self.rounds_ago :]


@register_part("shared_from", "weights")
class FromWeights(MaskRule):
    """The shared mask is S_top of the weights, once there was an update: the published code's."""

    overlap_2: Tensor

    def begin(self, theta_D: Tensor | None = None, masks: int = 1) -> None:
        super().begin(theta_D, masks)
        self._theta_D = theta_D

    def shared_mask(self) -> Tensor | None:
        found = super().shared_mask()
        if found is None or not len(found):
            return found
        if self._theta_D is None:
            raise ValueError(f"{self.scheme.name}: its mask is of a federation's model")
        fair = self.scheme.phi_min_global
        return self.select(self._theta_D, self.k_global, fair, None, "weights")

    def observe(self, update_D: Tensor) -> None:
        super().observe(update_D)
        self.overlap_2.zero_()  # of masks that are not used


# The downlink ─────────────────────────────────────────────────────────────────────────────────────


@register_downlink
class Downlink(Client):
    """Lines 9 to 13 for the server itself: its own positions are a mask of its own, or all that
    came up, and its values are quantized."""

    def __init__(self, known: Known):
        super().__init__(known, SERVER, torch.zeros(known.dimension, device=known.device))
        self.explored_D = known.shared_D[:0]  # what came up in this round, (D,)

    def reply_to(self, update_D: Tensor, explored_D: Tensor) -> Message:
        """What it says of an update (D,); it will arrive."""
        self.explored_D = explored_D
        message = self.send(update_D)
        self.arrived()
        return message

    def own_mask(self, intended_D: Tensor) -> Tensor:
        known, scheme = self.known, self.known.scheme
        if scheme.phi_down is None:
            return mask_to_positions(self.explored_D)
        rule, shared = known.rule, len(known.shared_K)
        k = rule.size(scheme.phi_down, known.dimension - rule.k_global)
        k += 0 if shared else rule.k_global
        return known.checked_mask(rule.own_mask(intended_D, known.shared_D, k), known.shared_D)

    def quantized(self, intended_K: Tensor, own_K: Tensor) -> Message:
        known, scheme = self.known, self.known.scheme
        intended_K = known.checks.finite_part(intended_K, SERVER)
        how = scheme.down_value_bits, SERVER, known.round, scheme.down_quantizer
        return Message.of(intended_K, own_K, *how)


# A quantizer ──────────────────────────────────────────────────────────────────────────────────────


@register_quantizer("M", "lloyd")
def lloyd_max_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Lloyd's and Max's quantizer of the magnitudes: codes and means as of `fractional_quantize`.

    Beyond the paper: its intervals hang on the smallest magnitude, so that with few bits most
    values share one of them; these are placed for a small squared error: an edge goes halfway
    between two means and a mean to the middle of its values, a fixed number of times (S. Lloyd,
    1982; J. Max, 1960). One value or more, all finite; the host looks at none.
    """
    magnitudes_K, count = values_K.abs().double(), len(values_K)
    if intervals == 1:
        return (values_K < 0).int(), magnitudes_K.mean(0, keepdim=True).float()
    sorted_K = magnitudes_K.sort().values
    sums_K = F.pad(sorted_K.cumsum(0), (1, 0))
    shares_P = (torch.arange(intervals, device=values_K.device) + 0.5) / intervals
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
