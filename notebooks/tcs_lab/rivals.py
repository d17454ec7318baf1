"""Rivals of TCS: schemes that came before and after it, on the core's extension points.

    STC           sparse ternary compression, both ways (Sattler et al., 2019, arXiv:1903.02891)
    EF-signSGD    one sign a parameter, with errors (Karimireddy et al., 2019, arXiv:1901.09847);
                  with -D1 the downlink too (dist-EF-SGD, Zheng et al., 2019, arXiv:1905.10936)
    QSGD          dense, unbiased random rounding (Alistarh et al., 2017, arXiv:1610.02132);
                  with -L<H> it is FedPAQ (Reisizadeh et al., 2020, arXiv:1909.13014)
    CocktailSGD   random, then top-K, then quantized, both ways (Wang et al., 2023, ICML)
    EF21          top-K of what is new in a gradient (Richtarik et al., 2021, arXiv:2106.05203)
    DGC           top-K with momentum at the clients (Lin et al., 2018, arXiv:1712.01887)

All suffixes of the core go with them where they make sense: "STC-K4" keeps 1/400, as in its paper.
Two quantizers are new: -S<q> rounds at random, -R<q> to the nearest of evenly spaced values.
EF21 and DGC keep more at the clients than errors, so they have compressors of their own:
`with_own_compressor` gives it to a federation. Records are named by a scheme's fields alone, as those
of the core's schemes are: whoever changes what one of these computes gives it another name.

Shares kept are those of TCS and top-K here, 1 %, unless the paper's point is another. None of these
has a dense warm-up: their papers have none.

Departures. STC and EF-signSGD have one magnitude for the whole model, as in their algorithms (STC's
published code has one a layer). QSGD and CocktailSGD scale by the largest magnitude of all values
that are sent, not by one a bucket, and QSGD not by the norm, which would leave most values at zero.
CocktailSGD's clients train from one model, and what waits is added to what they send; in its
published code each trains a model that already has it. DGC clips no gradients, and its warm-up has
one step of sparsity, not four. Messages are the core's: P means travel where QSGD and CocktailSGD
need one, a zero has a sign too, and CocktailSGD's positions are coded among all entries, not among
the random ones.

Left out: PowerSGD needs two all-reduces a round, the second of what the first gave, and messages of
matrices; rAge-k a request from the server to each client in the middle of a round; FAIR-k and
AgeTop-k, other masks by age, are made for an analogue channel. A running average as a mask is the
example of notebook 09.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcs_core import (
    FAMILIES,
    RULES,
    Compressor,
    Federation,
    MaskRule,
    Message,
    TopK,
    kept,
    register_quantizer,
    register_scheme,
)

# Families of the core's own rules ─────────────────────────────────────────────────────────────────
#    One bit a value with quantizer "lloyd" is a sign and the mean magnitude: ||v||_1 / K sign(v).

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
    """QSGD's random rounding: codes (K,) int32 and means (P,) float32, E[Q(v)] = v.

    Magnitudes are rounded to p / (P - 1) of the largest, up or down with the chances that make it
    unbiased (Alistarh et al., Sec. 3.1, with the largest magnitude for the norm). What is random
    comes from the bits of the values, mixed as MurmurHash3 ends: the same values are rounded the
    same way in any process, and a killed run goes on as it would have. Raises ValueError for P = 1.
    """
    means_P, scaled_K = _evenly_spaced(values_K, intervals)
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
    """CocktailSGD's rounding: magnitudes to the nearest p / (P - 1) of the largest; codes (K,)
    int32 and means (P,) float32. Raises ValueError for P = 1."""
    means_P, scaled_K = _evenly_spaced(values_K, intervals)
    return (scaled_K.round() + intervals * (values_K < 0)).int(), means_P


def _evenly_spaced(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """P magnitudes from 0 to the largest, (P,) float32; every magnitude in steps of them, float64."""
    if intervals < 2:
        raise ValueError("value_bits: got 1, allowed: 2 or more with evenly spaced values (-S, -R)")
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
    """S_top among random entries, a tenth of all, that all sides draw from one seed; the server's
    own S_top is among the same."""

    share, round = 0.1, 0

    def begin(self, shared_K: Tensor) -> None:
        """All but the round's random entries are excluded from its masks."""
        generator = np.random.default_rng([self._seed, self.round])
        count = max(kept(self.share, self._dimension), self.k_local, self.k_down)
        chosen = generator.choice(self._dimension, count, replace=False, shuffle=False)
        self._taken_D = torch.ones(self._dimension, dtype=torch.bool, device=self._device)
        self._taken_D[torch.from_numpy(chosen).to(self._device)] = False

    def observe(self, update_D: Tensor) -> None:
        self.round = self.round + 1


# Schemes with compressors of their own ────────────────────────────────────────────────────────────


class OwnCompressor(Compressor):
    """A compressor with `more_rows` rows behind the clients' errors. There they are saved, and
    scaled when the rate changes, as errors in units of gradients ("gradient") are."""

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        if len(self.own) != self.clients:
            raise ValueError(f"{self.scheme.name}: got several processes, allowed: one")
        rows = self.clients + self.more_rows()
        self.errors_ND = self.errors_ND.new_zeros(rows, self.dimension)
        vars(self.rule)["_with_own"] = True

    def more_rows(self) -> int:
        raise NotImplementedError


class EF21Compressor(OwnCompressor):
    """A client sends what is new: c_n = S_top(delta_n - g_n), g_n <- g_n + c_n, and the server the
    average of that; all sides step by g = mean of the g_n (Richtarik et al., Alg. 2; with
    stochastic gradients EF21-SGD, Fatkhullin et al., 2021). Row n holds -g_n, the last row g."""

    def more_rows(self) -> int:
        return 1

    def open(self, dense: bool = False) -> None:
        if dense:
            raise ValueError(f"{self.scheme.name}: got a dense round, allowed: sparse ones")
        super().open()

    def client(self, n: int, delta_D: Tensor) -> Message | None:
        known_D = self.errors_ND[n].clone()
        message = super().client(n, delta_D)  # of delta_D + known_D
        if message is not None:
            known_D.index_add_(0, message.positions, message.values, alpha=-1)
        self.errors_ND[n] = known_D
        return message

    def server(self, messages: Iterable[Message | None]) -> Tensor:
        messages = list(messages)
        if None in messages or len(messages) != self.clients:
            raise ValueError(f"{self.scheme.name}: allowed: messages of all {self.clients} clients")
        return self.errors_ND[-1].add_(super().server(messages)).clone()


class DGCCompressor(OwnCompressor):
    """A client's momentum u_n <- 0.9 u_n + delta_n is accumulated in place of delta_n, and emptied
    where it was sent (Lin et al., Alg. 4: momentum correction, momentum factor masking). Row N + n
    holds u_n."""

    momentum = 0.9

    def more_rows(self) -> int:
        return self.clients

    def client(self, n: int, delta_D: Tensor) -> Message | None:
        momentum_D = self.errors_ND[self.clients + n].mul_(self.momentum).add_(delta_D)
        message = super().client(n, momentum_D)
        if message is not None:
            momentum_D[slice(None) if message.dense else message.positions] = 0.0
        return message


class _WithOwn(TopK):
    """Top-K that is wrong without its compressor, and says so."""

    compressor: type[OwnCompressor]
    _with_own = False

    def begin(self, shared_K: Tensor) -> None:
        if not self._with_own:
            raise ValueError(
                f"{self._scheme.name}: allowed: with {self.compressor.__name__}, which "
                "tcs_lab.with_own_compressor gives a federation"
            )
        super().begin(shared_K)


@register_scheme("EF21", phi_global=None, phi_local=1e-2, dense_warmup=False, error_unit="gradient")
class EF21(_WithOwn):
    """Top-K of differences to what the server knows of a client's gradient."""

    compressor = EF21Compressor


@register_scheme(
    "DGC", phi_global=None, phi_local=1e-2, dense_warmup=False, warmup_masks=25,
    error_unit="gradient",
)  # fmt: skip
class DGC(_WithOwn):
    """Top-K of accumulated momentum; its warm-up keeps a quarter of all entries."""

    compressor = DGCCompressor


def with_own_compressor(federation: Federation) -> Federation:
    """The federation, before its first round, with the compressor that its scheme's rule asks for,
    if it does; the same object."""
    kind, old = getattr(RULES[federation.scheme.rule], "compressor", None), federation.compressor
    if kind is not None:
        weights = {"link": old.link, "weights": old.weights}
        settings = (old.layer_sizes, old.clients, federation.theta_D.device, old.rule._seed)
        federation.compressor = kind(federation.scheme, *settings, **weights)
        federation.compressor.rule._theta_D = federation.theta_D
    return federation
