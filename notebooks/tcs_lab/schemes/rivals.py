"""Methods by other authors, built from the parts of the core.

    STC           sparse ternary compression: the largest entries, with one magnitude for all of them, in both
                  directions (Sattler et al., 2019, arXiv:1903.02891)
    EF-signSGD    one sign per parameter, with error feedback (Karimireddy et al., 2019, arXiv:1901.09847);
                  with -D1 also from the server to the clients (dist-EF-SGD, Zheng et al., 2019,
                  arXiv:1905.10936)
    QSGD          all entries, rounded at random without bias (Alistarh et al., 2017, arXiv:1610.02132);
                  with -L<H> this is FedPAQ (Reisizadeh et al., 2020, arXiv:1909.13014)
    CocktailSGD   a random part of the entries, of these the largest, and of these quantized values, in both
                  directions (Wang et al., 2023, ICML)
    DGC           top-K with momentum at the clients (Lin et al., 2018, arXiv:1712.01887)

Without a suffix, STC and DGC keep 1 % of the entries, as TCS and top-K do here. (The paper of STC
keeps 1/400; this is "STC-K4" here.) The suffixes of the core can be added where they make sense. This
module registers two more quantizers: -S<q> rounds at random, and -R<q> rounds to the nearest of evenly
spaced values. None of the methods begins with dense rounds, because none of their papers does. DGC begins
with an epoch in which it sends 25 times its usual entries: a quarter of all, and with -K4 and -K16 fewer.

DGC stores more than errors, so it has a client class of its own. Records are named by the fields of a
scheme alone. So if you change what one of these methods computes, give it another name.

What differs from their papers:

- STC and EF-signSGD have one magnitude for the whole model, as in their algorithms. (The published code of
  STC has one per layer.)
- QSGD and CocktailSGD scale the values by the largest magnitude of all values in a message. In their papers,
  each bucket of values is scaled by itself. QSGD is not scaled by the norm, because this would round most
  values to zero.
- The clients of CocktailSGD all train the same model, and what was not sent is added to the next message. In
  its published code, a client trains a model to which this has been added already.
- DGC sends 1 % of the entries instead of 0.1 %, does not clip gradients, and its warm-up has one level of
  sparsity instead of four.
- Messages have the format of the core. So they contain P means where QSGD and CocktailSGD need one value, a
  sign also for zeros, and positions of CocktailSGD among all entries instead of among the random part.

Four methods were left out. PowerSGD needs two all-reduces per round, of which the second depends on the
result of the first, and its messages are matrices. rAge-k needs a request from the server to each client in
the middle of a round. FAIR-k and AgeTop-k choose masks by age and are made for an analogue channel. (A mask
from a running average of the updates is the example of notebook 09.)
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

import tcs_lab.schemes.variants  # noqa: F401  (registers what the names below use)
from tcs_core import (
    FAMILIES,
    Client,
    Known,
    MaskRule,
    Message,
    TopK,
    kept,
    random_positions,
    register_quantizer,
    register_scheme,
)

# Families of the core's own rules ─────────────────────────────────────────────────────────────────
#    One bit per value with quantizer "lloyd" is a sign and the mean magnitude: ||v||_1 / K sign(v).

_SIGNS = {"value_bits": 1, "quantizer": "lloyd"}
FAMILIES["STC"] = {
    "rule": "top-K", "phi_global": None, "phi_local": 1e-2, **_SIGNS, "phi_down": 1e-2,
    "down_value_bits": 1, "down_quantizer": "lloyd", "code": "entropy", "dense_warmup": False,
}  # fmt: skip
_DENSE = {"rule": "dense", "phi_global": 1.0, "phi_local": None, "dense_warmup": False}
FAMILIES["EF-signSGD"] = _DENSE | _SIGNS
FAMILIES["QSGD"] = _DENSE | {
    "value_bits": 4, "quantizer": "stochastic", "error_accumulation": False, "code": "entropy",
}  # fmt: skip


# Quantizers with evenly spaced values ─────────────────────────────────────────────────────────────


@register_quantizer("S", "stochastic")
def stochastic_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Round at random, as QSGD does. Return codes (K,) int32 and means (P,) float32; E[Q(v)] = v.

    Magnitudes are rounded to p / (P - 1) of the largest, up or down with the chances that make it
    unbiased (Alistarh et al., Sec. 3.1, with the largest magnitude for the norm). The random numbers
    are made of the bits of the values, mixed as in the last steps of MurmurHash3. So the same values
    are rounded in the same way in any process, and a run that was killed goes on as it would have.
    Raises ValueError for P = 1.
    """
    means_P, scaled_K = _space_evenly(values_K, intervals)
    low_32 = 0xFFFFFFFF
    bits_K = values_K.contiguous().view(torch.int32).long() & low_32
    places_K = torch.arange(len(values_K), device=values_K.device)
    mixed_K = (bits_K + 0x9E3779B9 * (places_K + bits_K.sum())) & low_32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed_K = (mixed_K ^ mixed_K >> shift) * factor & low_32
    random_K = (mixed_K ^ mixed_K >> 16).double() / 2**32  # in [0, 1)
    level_K = (scaled_K + random_K).floor().clamp(max=intervals - 1)
    return (level_K + intervals * (values_K < 0)).int(), means_P


@register_quantizer("R", "nearest")
def nearest_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Round magnitudes to the nearest p / (P - 1) of the largest, as CocktailSGD does.

    Returns codes (K,) int32 and means (P,) float32. Raises ValueError for P = 1.
    """
    means_P, scaled_K = _space_evenly(values_K, intervals)
    return (scaled_K.round() + intervals * (values_K < 0)).int(), means_P


def _space_evenly(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Return P magnitudes from 0 to the largest, (P,) float32, and every value's magnitude as a multiple
    of the step between two of them, (K,) float64."""
    if intervals < 2:
        raise ValueError("value_bits: got 1, allowed: 2 or more with the quantizers -S and -R")
    magnitudes_K = values_K.abs().double()
    largest = torch.cat([magnitudes_K, magnitudes_K.new_zeros(1)]).max()
    step = torch.where(largest > 0, largest / (intervals - 1), 1.0)
    means_P = step * torch.arange(intervals, device=values_K.device) * (largest > 0)
    return means_P.float(), magnitudes_K / step


# CocktailSGD: its mask ────────────────────────────────────────────────────────────────────────────


@register_scheme(
    "CocktailSGD", phi_global=None, phi_local=1e-2, value_bits=4, quantizer="nearest",
    phi_down=1e-2, down_value_bits=4, down_quantizer="nearest", code="entropy", dense_warmup=False,
)  # fmt: skip
class Cocktail(MaskRule):
    """S_top among a tenth of all entries, which server and clients draw at random from one seed. The
    server's own S_top is taken among the same entries."""

    share = 0.1
    _outside_D: Tensor | None = None  # all but the round's random entries

    def begin(self, theta_D: Tensor | None = None, mask_factor: int = 1) -> None:
        super().begin(theta_D, mask_factor)
        k_down = self.size(self.scheme.phi_down, self.dimension)
        count = max(kept(self.share, self.dimension), self.k_local, k_down)
        chosen_K = random_positions(count, self.dimension, self.seed, self.round)
        self._outside_D = torch.ones(self.dimension, dtype=torch.bool, device=self.device)
        self._outside_D[chosen_K.to(self.device)] = False

    def own_mask(self, intended_D: Tensor, shared_D: Tensor, k: int) -> Tensor:
        return super().own_mask(intended_D, cast(Tensor, self._outside_D), k)


# A scheme whose clients keep more than errors ─────────────────────────────────────────────────────


class DGCClient(Client):
    """A client that accumulates its momentum u <- 0.9 u + delta in place of delta, and sets the entries
    that were sent to zero (Lin et al., Alg. 4: momentum correction, momentum factor masking)."""

    keeps = ("momentum_D",)
    momentum = 0.9

    def __init__(self, known: Known, number: int = 0, errors_D: Tensor | None = None):
        super().__init__(known, number, errors_D)
        self.momentum_D = torch.zeros(known.dimension, dtype=torch.float32, device=known.device)

    def intended(self, delta_D: Tensor) -> Tensor:
        return super().intended(self.momentum_D.mul_(self.momentum).add_(delta_D))

    def arrived(self, received: Message | None = None) -> None:
        flight = self.in_flight
        super().arrived(received)
        if flight is not None:
            self.momentum_D[slice(None) if flight.dense else flight.positions_K] = 0.0


@register_scheme(
    "DGC", phi_global=None, phi_local=1e-2, dense_warmup=False, warmup_masks=25,
    error_unit="gradient",
)  # fmt: skip
class DGC(TopK):
    """Top-K of accumulated momentum. In its warm-up 25 times as many entries are sent."""

    client_type = DGCClient
