"""Time-Correlated Sparsification (TCS) for communication-efficient federated learning.

The whole machinery in one module. It reproduces E. Ozfatura, K. Ozfatura and D. Gunduz,
"Time-Correlated Sparsification for Communication-Efficient Federated Learning"; "Alg.", "Eq." and
"Sec." below are that paper's.

    theta_D -> local training -> deltas_ND -> (+ errors_ND) -> masks -> values -> bits
            -> average -> update_D -> theta_D

Contents
     1 schemes and configuration          9 data and partition
     2 masks (S_top)                     10 runs, records, checkpoints
     3 positions on the wire (Alg. 4)    11 ranks: one federation, many processes
     4 values on the wire                12 a communication hook for PyTorch's DDP
     5 messages and bit budget           13 tables and figures
     6 compressors (Alg. 2)              14 benchmarks
     7 the federation (Alg. 1, 3)        15 command line
     8 model

Symbols (an axis suffix names a tensor's dimensions)
    D parameters   N clients   K kept entries   L layers   H local steps   B batch   P intervals
    theta_D      model parameters            (D,) float32; the model's parameters are views into it
    deltas_ND    model differences           (N, D) float32: minus eta times the summed gradients
    errors_ND    accumulated errors e        (N, D) float32
    intended     deltas + errors             what a client means to send
    sent         the quantized kept entries  what it sends
    update_D     the server's average        (D,) float32
    phi          share of entries KEPT       K = ceil(phi * D), at least 1

Differences from the paper
     1. Bits: beside the paper's formula, the bits of the code that really decodes are counted, with
        and without the dense warm-up, which the paper's budget leaves out, and for the downlink.
     2. S_top keeps exactly K entries; of equal magnitudes the lower index wins. (The paper keeps
        every entry that ties with the K-th.)
     3. The first sparse round takes its mask from the last dense (warm-up) update; a run with no
        warm-up makes one dense round first.
     4. Error accumulation keeps the quantization error too: sent + errors == intended. Exact in
        float32 without quantization, and with it while sigma >= 1/2 (Sterbenz); beyond, to one
        rounding of the subtraction.
     5. Global momentum follows the paper's text, w <- beta w + g, theta <- theta - eta w; the
        algorithm box puts beta on the wrong term, and the text has a plus before eta.
     6. Layer-wise fairness: phi^max with ">=" in the paper means phi^min. A layer is one parameter
        tensor. The total stays K; if the fair shares alone exceed K, the K largest of them win.
     7. Fractional quantization: intervals (sigma^p u_max, sigma^(p-1) u_max]; u_min is the smallest
        NON-ZERO magnitude; zeros take the last interval's code and do not enter its mean.
     8. The position code's blocks hold not 1/phi entries but a power of two near it, the one with
        the shortest code: ceil(log2(1/phi)) bits inside a block of 1/phi would waste up to one.
     9. Batch norm's running statistics never influence training; the clients' are averaged only
        when the model is evaluated. Their bits are reported apart.
    10. Augmentation (random crop with 4 px of padding, flip) and sampling (without replacement; an
        incomplete last batch, or last round of H batches, is dropped) are not in the paper.
    11. Schedules keep the paper's proportions at other lengths: warm-up 1/60 of the epochs (at
        least one), drops after 1/2 and 3/4. Rates scale linearly with the cumulative batch.
    12. "H = 2 and H = 2" in the paper means H = 2 and H = 4.

Beyond the paper (suffixes of scheme names, Sec. 1, 4 and 5)
    Messages are real bytes with a checksum; "+" codes them in fewer bits, losing nothing. "-M<q>"
    quantizes to q bits as Lloyd and Max do; "-E<n>" makes the client's own mask n/1000 of all
    entries; "-K<n>" makes all masks n times smaller; "-D<q>" quantizes (likewise) and sparsifies
    the downlink too, with error accumulation at the server; "-NW" has no warm-up, dense or rising;
    "-W<n>" has a sparse one, with masks n times as large; "++" is "+", "-D2" and "-NW".
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import reprlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 1. Schemes and configuration
#    A scheme says what travels; a RunConfig says what is trained, on what, for how long. Both are
#    frozen and checked when they are made. Defaults are the paper's (Sec. III-B).
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def _param(default: Any, kind: type, allowed: str, ok: Callable[[Any], bool], doc: str) -> Any:
    """A dataclass field that knows its type, what it allows and what it means."""
    metadata = {"kind": kind, "allowed": allowed, "ok": ok, "doc": doc}
    return field(default=default, metadata=metadata)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 120, 120
        self.maxlist = self.maxtuple = self.maxdict = 10


def _shown(value: Any) -> str:
    """repr for an error message: short, whatever the value is (YAML can hold huge ones)."""
    try:
        return _Short().repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a number of thousands of digits"


def _check_value(key: str, value: Any, metadata: dict) -> Any:
    """`value` as the field's type; ValueError with key, value and what is allowed."""
    kind, optional = metadata["kind"], "or null" in metadata["allowed"]
    if value is None and optional:
        return None
    given = value
    right = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value, right = (float(value), True) if abs(value) < 2**1000 else (value, False)
    if kind is tuple and isinstance(value, list):
        value, right = tuple(value), True
    if not right or not metadata["ok"](value):
        hint = ""
        if kind in (int, float) and isinstance(value, str):
            hint = " (YAML reads 1e-3 as text: write 1.0e-3)"
        raise ValueError(
            f"{key}: got {_shown(given)} ({type(given).__name__}), "
            f"allowed: {metadata['allowed']}{hint}"
        )
    return value


def _check_fields(instance: Any) -> None:
    for f in dataclasses.fields(instance):
        if f.metadata:
            value = _check_value(f.name, getattr(instance, f.name), dict(f.metadata))
            object.__setattr__(instance, f.name, value)


def _reject_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    unknown = sorted(k if isinstance(k, str) else _shown(k) for k in set(given) - set(known))
    if unknown:
        found = ", ".join(map(_cut, unknown[:20]))
        raise ValueError(f"unknown {what}: {found}; allowed: {', '.join(sorted(known))}")


def _cut(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _whole(value: int) -> bool:
    return 1 <= value <= MOST


MOST = 10**9  # of anything counted
WHOLE = "a whole number >= 1"


def _positive(value: float) -> bool:
    return 0 < value <= 1e6


def _text(most: int) -> Callable[[str], bool]:
    return lambda value: 0 < len(value) <= most and "\0" not in value


def _share(default: float | None, doc: str) -> Any:
    return _param(
        default, float, "a share in (0, 1], or null for none", lambda v: 1e-12 <= v <= 1, doc
    )


@dataclass(frozen=True)
class Scheme:
    """What a client sends in one round. Make one by name, `Scheme.named("TCS-L4-Q5")`.

    None for a phi means that the scheme has no such mask: top-K has only masks of the clients' own,
    rand-K only a shared one.
    """

    name: str
    rule: str = "TCS"
    phi_global: float | None = _share(1e-2, "share kept by the mask all sides know, Eq. 6")
    phi_local: float | None = _share(1e-3, "share kept by a client's own mask, Sec. II-A")
    phi_min_global: float | None = _share(
        None, "least share of every layer, global mask, Sec. II-C"
    )
    phi_min_local: float | None = _share(None, "least share of every layer, local mask, Sec. II-C")
    local_steps: int = _param(1, int, WHOLE, _whole, "H, Alg. 1")
    value_bits: int = _param(
        32, int, "1 to 16, or 32 for float32", lambda v: 1 <= v <= 16 or v == 32,
        "q, bits of a value, one of them the sign, Sec. II-F",
    )  # fmt: skip
    momentum: float = _param(0.0, float, "a number in [0, 1)", lambda v: 0 <= v < 1, "beta, Alg. 3")
    error_accumulation: bool = _param(True, bool, "true or false", lambda v: True, "Sec. II-B")
    centralized: bool = _param(
        False, bool, "true or false", lambda v: True, "one client, no traffic"
    )
    # Beyond the paper: its Sec. IV names a compressed downlink as future work.
    quantizer: str = _param(
        "fractional", str, "fractional or lloyd", lambda v: v in ("fractional", "lloyd"),
        "of the clients' values: the paper's, or Lloyd's and Max's (Sec. 4 here)",
    )  # fmt: skip
    code: str = _param(
        "block", str, "block or entropy", lambda v: v in ("block", "entropy"),
        "block: Alg. 4 and fixed-width values; entropy: both shorter, lossless (Sec. 5 here)",
    )  # fmt: skip
    down_value_bits: int = _param(
        32, int, "1 to 16, or 32 for float32", lambda v: 1 <= v <= 16 or v == 32,
        "bits of a value from the server; less than 32 with error accumulation there",
    )  # fmt: skip
    down_quantizer: str = _param(
        "fractional", str, "fractional or lloyd", lambda v: v in ("fractional", "lloyd"),
        "of the server's values",
    )  # fmt: skip
    phi_down: float | None = _share(None, "share of the server's own mask; null: all that came up")
    dense_warmup: bool = _param(
        True, bool, "true or false", lambda v: True,
        "false: sparse from the first round, where all send their own S_top at phi_global",
    )  # fmt: skip
    warmup_masks: int = _param(
        1, int, "a whole number from 1 to 1000", lambda v: 1 <= v <= 1000,
        "without a dense warm-up: all masks so many times as large in the warm-up epochs",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.rule not in RULES:
            raise ValueError(f"rule: got {_shown(self.rule)}, allowed: {', '.join(RULES)}")
        if not isinstance(self.name, str) or not _text(100)(self.name):
            raise ValueError(f"name: got {_shown(self.name)}, allowed: up to 100 characters")
        if self.phi_global is None and self.phi_local is None:
            raise ValueError(
                f"{self.name}: phi_global and phi_local are both null: nothing is sent"
            )

    @property
    def intervals(self) -> int:
        """P = 2^(q-1) intervals of the quantizer, one of q bits is the sign; 0: no quantizer."""
        return _intervals(self.value_bits)

    @property
    def compresses_downlink(self) -> bool:
        """The server keeps errors of its own: what it sends is not all that it means to send."""
        return self.down_value_bits != 32 or self.phi_down is not None

    @property
    def dense(self) -> bool:
        """Every entry is sent as it is, in 32 bits."""
        return self.rule == "dense" and not self.intervals

    @staticmethod
    def named(name: str, **changes: Any) -> Scheme:
        """The scheme that the paper, or `register_scheme`, calls `name`.

        A family (TCS, top-K, rand-K, FedAvg, FedSGD, Baseline, or your own) and any of: -L<H> local
        steps, -Q<q> bits per value, -LF or -PLF layer-wise fairness, -Momentum or -Global Momentum;
        beyond the paper, -M<q> a better quantizer, -E<n> phi_local = n/1000, -K<n> all masks n
        times smaller, -D<q> a compressed downlink, -NW no warm-up, -W<n> a sparse one with masks n
        times as large, and at the end + for shorter lossless codes or ++ for +, -D2 and (but for
        -W) -NW.
        `changes` replaces fields. Raises ValueError for an unknown name or a suffix that makes no
        sense.
        """
        text, plus = _split_plus(re.sub(r"-\s+", "-", name.strip()))
        families = sorted(FAMILIES, key=len, reverse=True)
        family = next((f for f in families if re.match(re.escape(f) + r"(-|$)", text, re.I)), None)
        if family is None:
            raise ValueError(f"scheme {_shown(name)} is unknown; {_known_schemes()}")
        fields, suffixed = dict(FAMILIES[family]), {}
        for suffix in text[len(family) :].split("-")[1:]:
            found = _suffix_fields(name, fields, suffix)
            if suffixed.keys() & found.keys():
                raise ValueError(
                    f"scheme {_shown(name)}: {_shown(suffix)} sets what another suffix sets"
                )
            suffixed |= found
        suffixed |= _plus_fields(name, fields | suffixed, plus)
        fields = _with_smaller_masks(fields | suffixed)
        name = family + text[len(family) :] + plus
        return Scheme(name=name, **(fields | changes))


def _intervals(value_bits: int) -> int:
    return 0 if value_bits == 32 else 2 ** (value_bits - 1)


def _known_schemes() -> str:
    return (
        f"known: {', '.join(FAMILIES)}, each with -L<steps>, -Q<bits>, -LF, -PLF, "
        "-Momentum or -Global Momentum, -M<bits>, -E<n>, -K<n>, -D<bits>, -NW, -W<n>, + or ++ "
        "where it makes sense (TCS-L4-Q5++)"
    )


def _split_plus(text: str) -> tuple[str, str]:
    stem = re.sub(r"\+{1,2}$", "", text)
    return stem, text[len(stem) :]


def _plus_fields(name: str, fields: dict, plus: str) -> dict:
    """+: shorter codes. ++: them, the downlink compressed, no dense warm-up."""
    if not plus:
        return {}
    if fields.get("centralized"):
        raise ValueError(f"scheme {_shown(name)}: {plus!r} makes no sense in centralized training")
    if plus == "+":
        return {"code": "entropy"}
    if "down_value_bits" in fields or ("dense_warmup" in fields and "warmup_masks" not in fields):
        raise ValueError(f"scheme {_shown(name)}: '++' sets what another suffix sets")
    return {"code": "entropy", "dense_warmup": False, **_down_fields(2, fields)}


_SHARES = ("phi_global", "phi_local", "phi_min_global", "phi_min_local", "phi_down")
_DOWN_SHARE = 0.4  # of phi_global: with 2-bit values, a message about as long as TCS-Q5's way up


def _down_fields(bits: int, fields: dict) -> dict:
    """Few bits a value leave room for more positions of the server's own than one client has."""
    own, shared = fields.get("phi_local", 1e-3), fields.get("phi_global", 1e-2)
    phi_down = _DOWN_SHARE * shared if own and shared else own
    return {"down_value_bits": bits, "down_quantizer": "lloyd", "phi_down": phi_down}


def _with_smaller_masks(fields: dict) -> dict:
    """-K<n>: every share that the rest of the name sets, divided by n."""
    fields = dict(fields)
    times = fields.pop("smaller", 1)
    if times == 1:
        return fields
    shares = {key: fields.get(key, getattr(Scheme, key)) for key in _SHARES}
    return fields | {key: share / times for key, share in shares.items() if share}


def _suffix_fields(name: str, fields: dict, suffix: str) -> dict:
    """The fields that one suffix of a scheme's name sets."""
    own, shared = fields.get("phi_local", 1e-3), fields.get("phi_global", 1e-2)
    selects = fields.get("rule") not in ("dense", "rand-K")
    lower = suffix.lower()
    if lower in ("momentum", "global momentum"):
        return {"momentum": 0.9}
    if fields.get("centralized"):
        raise ValueError(
            f"scheme {_shown(name)}: {_shown(suffix)} makes no sense in centralized training"
        )
    if match := re.fullmatch(r"l([1-9]\d{0,8})", lower):
        return {"local_steps": int(match[1])}
    if match := re.fullmatch(r"q([1-9]\d?)", lower):
        return {"value_bits": int(match[1])}
    if match := re.fullmatch(r"m([1-9]\d?)", lower):
        return {"value_bits": int(match[1]), "quantizer": "lloyd"}
    if (match := re.fullmatch(r"e([1-9]\d?)", lower)) and selects and own and shared:
        return {"phi_local": int(match[1]) / 1000}
    if (match := re.fullmatch(r"k([1-9]\d?)", lower)) and (selects or fields["rule"] == "rand-K"):
        return {"smaller": int(match[1])}
    if match := re.fullmatch(r"d([1-9]\d?)", lower):
        return _down_fields(int(match[1]), fields)
    if lower == "nw":
        return {"dense_warmup": False}
    if (match := re.fullmatch(r"w([1-9]\d{0,2})", lower)) and selects and own and shared:
        return {"dense_warmup": False, "warmup_masks": int(match[1])}
    if lower == "lf" and selects:
        return {"phi_min_global": 1e-3 if shared else None, "phi_min_local": 4e-4 if own else None}
    if lower in ("plf", "pfl") and selects and shared:
        return {"phi_min_global": 1e-3}
    raise ValueError(
        f"scheme {_shown(name)}: suffix {_shown(suffix)} is unknown here; {_known_schemes()}"
    )


# Families of scheme names: what each sets beyond the defaults above. `register_scheme` adds to it.
FAMILIES: dict[str, dict[str, Any]] = {
    "TCS": {},
    "top-K": {"rule": "top-K", "phi_global": None, "phi_local": 1e-2},
    "rand-K": {"rule": "rand-K", "phi_global": 1e-2, "phi_local": None},
    "FedAvg": {"rule": "dense", "phi_global": 1.0, "phi_local": None},
    "FedSGD": {"rule": "dense", "phi_global": 1.0, "phi_local": None},
    "Baseline": {"rule": "dense", "phi_global": 1.0, "phi_local": None, "centralized": True},
}


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 2. Masks: S_top(v, K), plain and layer-wise (Sec. II-B, II-C)
#    A mask has two forms: a (D,) bool tensor, which reads like the paper, and its sorted positions,
#    which is what the compressor works with: K numbers instead of D.
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def kept(phi: float, dimension: int) -> int:
    """K = ceil(phi * D), at least 1; rounding errors above a whole number do not count."""
    return max(1, math.ceil(round(phi * dimension, 9)))


def top_k_positions(
    vector_D: Tensor, k: int, excluded: Tensor | None = None, floor: float = 0.0
) -> Tensor:
    """Positions of the k entries of largest magnitude: S_top as int64 (k,), ascending.

    Of equal magnitudes the lower index wins. `excluded` (positions) never enter. `floor`, a guess
    of the k-th magnitude from below, only makes it faster: the result is the same with any.
    Raises ValueError if k is not in 0..D minus the excluded, or if the vector holds a NaN.
    """
    return _filtered(vector_D.detach(), k, _outside(vector_D, excluded), floor)[0]


def _outside(vector_D: Tensor, excluded: Tensor | None) -> Tensor | None:
    """The excluded positions as a mask of the vector, on its device; None if there are none."""
    if excluded is None or not len(excluded):
        return None
    return positions_to_mask(excluded.to(vector_D.device), len(vector_D))


Array = Tensor | np.ndarray


def _array(tensor: Tensor) -> Array:
    """What the functions below work on: on the CPU an array, since numpy's calls cost less, if
    numpy has the type."""
    plain = tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16
    return tensor.numpy() if plain else tensor


def _filtered(
    vector_D: Tensor, k: int, excluded_D: Tensor | None, floor: float
) -> tuple[Tensor, float]:
    """S_top and the k-th magnitude. Masks and magnitudes change slowly, so a `floor` from last time
    leaves few candidates to choose from; too few, and it is lowered, and at last all are looked at.
    """
    values_D, outside_D = _array(vector_D), excluded_D
    if outside_D is not None and isinstance(values_D, np.ndarray):
        outside_D = outside_D.numpy()
    for lowered in (floor, floor / 2) if floor > 0 and k else ():
        near = _at_least(values_D, lowered)
        if outside_D is not None:
            near = near[~outside_D[near]]
        if len(near) >= k:
            chosen, kth = _largest(abs(values_D[near]), k, len(near))
            return torch.as_tensor(near[chosen]), kth
    magnitudes_D = abs(values_D)
    eligible = len(values_D)
    if outside_D is not None:
        magnitudes_D[outside_D] = -1.0
        eligible -= int(outside_D.sum())
    positions_K, kth = _largest(magnitudes_D, k, eligible)
    return torch.as_tensor(positions_K), kth


_PIECE = 1 << 17  # entries that stay in a core's cache


def _at_least(values_D: Array, floor: float) -> Array:
    """Positions of magnitudes >= floor, ascending; of an array piece by piece, each read once."""
    if isinstance(values_D, Tensor) or len(values_D) <= _PIECE:
        return _places(abs(values_D) >= floor)
    found = []
    for start in range(0, len(values_D), _PIECE):
        found.append(_places(abs(values_D[start : start + _PIECE]) >= floor) + start)
    return np.concatenate(found)


def _places(mask_D: Array) -> Array:
    """Positions of a mask's ones, ascending."""
    if isinstance(mask_D, Tensor):
        return mask_D.nonzero().squeeze(1)
    return mask_D.nonzero()[0]


def _largest(magnitudes_D: Array, k: int, eligible: int) -> tuple[Array, float]:
    """Positions of the k largest of `magnitudes_D`, ascending, and the k-th largest itself."""
    if not 0 <= k <= eligible:
        raise ValueError(f"k: got {k}, allowed: 0 to {eligible} (entries that may be chosen)")
    if k == 0:
        return _places(magnitudes_D[:0] > 0), math.inf
    kth = _kth_largest(magnitudes_D, k)
    if math.isnan(kth):
        raise ValueError("the vector holds a NaN: its largest entries are not defined")
    if kth == 0 and (chosen := _with_first_zeros(magnitudes_D, k, eligible)) is not None:
        return chosen, kth
    chosen = _places(magnitudes_D >= kth)
    if len(chosen) > k:
        tied = magnitudes_D[chosen] == kth
        surplus = tied & (tied.cumsum(0) > k - (len(chosen) - tied.sum()))
        chosen = chosen[~surplus]
    return chosen, kth


def _top(magnitudes_D: Tensor, k: int) -> Tensor:
    return torch.as_tensor(_largest(_array(magnitudes_D), k, len(magnitudes_D))[0])


def _with_first_zeros(magnitudes_D: Array, k: int, eligible: int) -> Array | None:
    """All positive entries and the first zeros, k in all: a list of all zeros, which tie, would
    take several times the vector's memory. None if the zeros do not stand where they should."""
    mask_D = magnitudes_D > 0
    first = magnitudes_D[: k + len(magnitudes_D) - eligible]  # none of the others can be chosen
    mask_D[_places(first == 0)[: k - int(mask_D.sum())]] = True
    chosen = _places(mask_D)
    return chosen if len(chosen) == k else None


def _kth_largest(magnitudes_D: Array, k: int) -> float:
    """The k-th largest number; NaN if one of the k is NaN."""
    if isinstance(magnitudes_D, Tensor):
        return float(magnitudes_D.topk(k, sorted=False).values.min())
    parted = magnitudes_D.copy()
    parted.partition(len(parted) - k)
    return float(parted[len(parted) - k :].min())  # NaN is last, and wins


def static_top_k(magnitudes_D: Tensor, k: int) -> Tensor:
    """S_top without looking at a value: int64 (k,), ascending; of ties the lower index wins."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=magnitudes_D.device)
    kth = magnitudes_D.topk(k, sorted=False).values.min()
    above, tied = magnitudes_D > kth, magnitudes_D == kth
    chosen = above | (tied & (tied.cumsum(0, dtype=torch.int32) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k, fill_value=0).squeeze(1)  # 0: a NaN among them


def layerwise_top_k_positions(
    vector_D: Tensor, k: int, layer_sizes: list[int], phi_min: float, excluded: Tensor | None = None
) -> Tensor:
    """S_top under layer-wise fairness (Eq. 14, 15): int64 (k,), ascending.

    Every layer l gets its ceil(phi_min * d_l) largest entries (all it has, if fewer are eligible);
    the rest of k goes by magnitude over what is left. Shares that add up to more than k compete
    for the k places by magnitude, so that the budget holds.
    """
    magnitudes_D = vector_D.detach().abs()
    if excluded is not None:
        magnitudes_D[excluded] = -1.0
    eligible = len(magnitudes_D) - (0 if excluded is None else len(excluded))
    shares = [kept(phi_min, size) for size in layer_sizes]
    starts = [sum(layer_sizes[:i]) for i in range(len(layer_sizes))]
    layers = zip(magnitudes_D.split(layer_sizes), shares, starts, strict=True)
    if magnitudes_D.is_cuda and magnitudes_D.isnan().any():
        raise ValueError("the vector holds a NaN: its largest entries are not defined")
    top = static_top_k if magnitudes_D.is_cuda else _top  # a GPU would wait in every layer
    fair = torch.cat([start + top(part, k) for part, k, start in layers])
    fair = fair[magnitudes_D[fair] >= 0]
    if len(fair) >= k:
        return fair[_top(magnitudes_D[fair], k)]
    magnitudes_D[fair] = -1.0
    rest, _ = _largest(_array(magnitudes_D), k - len(fair), eligible - len(fair))
    return torch.cat([fair, torch.as_tensor(rest)]).sort().values


def in_common(one_K: Tensor, other_K: Tensor) -> Tensor:
    """How many positions two masks of K entries share, both ascending: int64 ()."""
    nearest_K = torch.searchsorted(one_K, other_K).clamp_(max=len(one_K) - 1)
    return (one_K[nearest_K] == other_K).sum()


def positions_to_mask(positions_K: Tensor, dimension: int) -> Tensor:
    """(D,) bool mask with ones at the positions."""
    mask_D = torch.zeros(dimension, dtype=torch.bool, device=positions_K.device)
    mask_D[positions_K] = True
    return mask_D


def mask_to_positions(mask_D: Tensor) -> Tensor:
    """Positions of a (D,) bool mask's ones, ascending: int64 (K,)."""
    return torch.as_tensor(_places(_array(mask_D)))


def top_k_mask(vector_D: Tensor, k: int) -> Tensor:
    """S_top(v, K), Sec. II-B: (D,) bool with exactly k ones; of ties the lower index wins."""
    return positions_to_mask(top_k_positions(vector_D, k), len(vector_D))


def layerwise_top_k_mask(
    vector_D: Tensor, k: int, layer_sizes: list[int], phi_min: float
) -> Tensor:
    """`layerwise_top_k_positions` as a (D,) bool mask."""
    positions = layerwise_top_k_positions(vector_D, k, layer_sizes, phi_min)
    return positions_to_mask(positions, len(vector_D))


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 3. Positions on the wire: the sparse position code (Sec. II-E, Alg. 4)
#    Blocks of 1/phi entries. "1" and the position inside its block for every entry, "0" at the end
#    of every block: log2(1/phi) + 2 bits an entry when phi of them are set.
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def intra_block_bits(block: int) -> int:
    """Bits of a position inside a block of `block` entries: ceil(log2(block))."""
    return (block - 1).bit_length()


def position_bits(count: int, dimension: int, block: int) -> int:
    """Exact length of the code of `count` positions in `dimension` entries, in bits."""
    return count * (1 + intra_block_bits(block)) + -(-dimension // block)


@lru_cache(1024)
def block_for(count: int, dimension: int) -> int:
    """The power of two whose blocks give `count` positions in `dimension` the shortest code."""
    powers = [2**i for i in range(dimension.bit_length())]
    return min(powers, key=lambda block: position_bits(count, dimension, block))


def _check_code(dimension: int, block: int) -> None:
    if dimension < 1:
        raise ValueError(f"dimension: got {dimension}, allowed: a whole number >= 1")
    if not block >= 1:
        raise ValueError(f"block: got {block}, allowed: a whole number >= 1")


def encode_positions(positions_K: Tensor, dimension: int, block: int) -> Tensor:
    """Positions as bits, the inverse of Alg. 4: uint8 tensor of 0 and 1.

    `positions_K` int64, 0-based, strictly ascending, below `dimension`. Entry i of block b starts
    after i earlier entries and b block ends: its place in the stream is i * (1 + width) + b.
    Raises ValueError for positions out of range or out of order.
    """
    _check_code(dimension, block)
    _check_positions(positions_K, dimension)
    width = intra_block_bits(block)
    order = torch.arange(len(positions_K), device=positions_K.device)
    starts_K = order * (1 + width) + positions_K // block
    length = position_bits(len(positions_K), dimension, block)
    bits = torch.zeros(length, dtype=torch.uint8, device=positions_K.device)
    bits[starts_K] = 1
    shifts = torch.arange(width - 1, -1, -1, device=positions_K.device)
    inside = (positions_K % block).unsqueeze(1) >> shifts & 1
    bits[starts_K.unsqueeze(1) + torch.arange(1, width + 1, device=bits.device)] = inside.byte()
    return bits


def _check_positions(positions_K: Tensor, dimension: int) -> None:
    if positions_K.dim() != 1 or positions_K.dtype != torch.int64:
        raise ValueError(
            f"positions: got shape {tuple(positions_K.shape)} {positions_K.dtype}, "
            "allowed: a one-dimensional int64 tensor"
        )
    if not len(positions_K):
        return
    low, high = int(positions_K.min()), int(positions_K.max())
    if low < 0 or high >= dimension:
        raise ValueError(f"positions: got {low} to {high}, allowed: 0 to {dimension - 1}")
    if (positions_K.diff() <= 0).any():
        raise ValueError("positions: not strictly ascending")


def decode_positions(bits: Tensor, dimension: int, block: int) -> Tensor:
    """Positions from bits, Alg. 4: int64 (K,), ascending.

    `bits` uint8 tensor of 0 and 1, exactly one code long. The walk of Alg. 4 goes from entry to
    entry, over all block ends between two of them at once; what it finds is read side by side.
    Raises ValueError for anything that is not the code of some set of positions.
    """
    _check_code(dimension, block)
    if bits.dim() != 1 or bits.dtype != torch.uint8 or (bits > 1).any():
        raise ValueError("bits: allowed: a one-dimensional uint8 tensor of 0 and 1")
    width, blocks = intra_block_bits(block), -(-dimension // block)
    starts_K = torch.tensor(_flag_starts(bits, width), dtype=torch.int64, device=bits.device)
    count = len(starts_K)
    if len(bits) != position_bits(count, dimension, block):
        raise ValueError(
            f"bits: got {len(bits)} of them with {count} entries, "
            f"allowed: {position_bits(count, dimension, block)} ({blocks} block ends)"
        )
    block_index_K = starts_K - torch.arange(count, device=bits.device) * (1 + width)
    inside_K = torch.zeros_like(starts_K)
    for offset in range(1, width + 1):
        inside_K = 2 * inside_K + bits[starts_K + offset]
    if (inside_K >= block).any():
        raise ValueError(f"bits: a position of {int(inside_K.max())} inside a block of {block}")
    positions_K = block_index_K * block + inside_K
    _check_positions(positions_K, dimension)
    return positions_K


def _flag_starts(bits: Tensor, width: int) -> list[int]:
    """Where the "1" flags of the entries stand: after a flag, the next 1 beyond its position."""
    stream, starts = bits.cpu().numpy().tobytes(), []
    find, place = stream.find, stream.find(b"\x01")
    while place >= 0:
        starts.append(place)
        place = find(b"\x01", place + 1 + width)
    if starts and starts[-1] + width >= len(stream):
        raise ValueError("bits: the stream ends inside an entry")
    return starts


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 4. Values on the wire: fractional quantization and the scaled sign (Sec. II-F)
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def scaled_sign(values_K: Tensor) -> Tensor:
    """Q(u) = ||u||_1 / d * sign(u), Eq. 19: (K,) float32; one bit a value and one mean."""
    return values_K.abs().mean() * values_K.sign() if len(values_K) else values_K.clone()


def interval_edges(values_K: Tensor, intervals: int) -> tuple[Tensor, float]:
    """The P - 1 inner edges sigma^p * u_max, ascending, in float64, and sigma (Eq. 20, 21)."""
    edges, sigma = _edges(values_K.abs().double(), intervals)
    return edges, float(sigma)


def _edges(magnitudes_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    u_max = torch.cat([magnitudes_K, magnitudes_K.new_zeros(1)]).max()
    nonzero = torch.where(magnitudes_K > 0, magnitudes_K, math.inf)
    u_min = torch.cat([nonzero, nonzero.new_full((1,), math.inf)]).min()
    sigma = torch.where(u_max > 0, u_min / u_max, 1.0) ** (1.0 / intervals)
    powers = torch.arange(intervals - 1, 0, -1, device=magnitudes_K.device)
    return u_max * sigma**powers, sigma


def fractional_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Fractional quantization, Eq. 20 to 22: codes (K,) int32 and means (P,) float32.

    Interval p = 1..P holds magnitudes in (sigma^p u_max, sigma^(p-1) u_max]. A code is p - 1, plus
    P for a negative value: q = log2(P) + 1 bits. Zeros take the last interval, a positive sign, and
    stay out of its mean, so |Q(u) - u| <= (1 - sigma) / sigma * |u| for every u != 0. Empty
    intervals have mean 0. Raises ValueError for values that are not finite, or intervals < 1.
    """
    _check_quantizable(values_K, intervals)
    return _quantize(values_K, intervals)


def _check_quantizable(values_K: Tensor, intervals: int) -> None:
    if intervals < 1:
        raise ValueError(f"intervals: got {intervals}, allowed: a whole number >= 1")
    if not values_K.isfinite().all():
        raise ValueError("values: NaN or infinity can't be quantized")


def _sums(interval_K: Tensor, magnitudes_K: Tensor, intervals: int) -> Tensor:
    """Every interval's sum of magnitudes and number of magnitudes that are not 0, (2, P)."""
    sums_2P = magnitudes_K.new_zeros(2, intervals)
    sums_2P[0].index_add_(0, interval_K, magnitudes_K)
    sums_2P[1].index_add_(0, interval_K, (magnitudes_K > 0).double())
    return sums_2P


def _sums_at_once(interval_K: Tensor, magnitudes_K: Tensor, intervals: int) -> Tensor:
    """`_sums` for a GPU, where many additions to a few places wait for each other and come in any
    order."""
    own_PK = interval_K == torch.arange(intervals, device=interval_K.device)[:, None]
    parts_2K = torch.stack([magnitudes_K, (magnitudes_K > 0).double()])
    return torch.stack([torch.where(own_PK, part_K, 0.0).sum(1) for part_K in parts_2K])


def _quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """`fractional_quantize`, the values never looked at by the host."""
    magnitudes_K = values_K.abs().double()
    edges, _ = _edges(magnitudes_K, intervals)
    interval_K = intervals - 1 - torch.bucketize(magnitudes_K, edges, right=False)
    interval_K.masked_fill_(magnitudes_K == 0, intervals - 1)
    several = intervals <= 64 and magnitudes_K.is_cuda
    sums_2P = (_sums_at_once if several else _sums)(interval_K, magnitudes_K, intervals)
    means_P = (sums_2P[0] / sums_2P[1].clamp(min=1)).float()
    return (interval_K + intervals * (values_K < 0)).int(), means_P


_LLOYD_ROUNDS = 15


def lloyd_max_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Lloyd's and Max's quantizer of the magnitudes: codes and means as of `fractional_quantize`.

    Beyond the paper: its intervals hang on the smallest magnitude, so that with few bits most
    values share one of them; these are placed for a small squared error. Starting with equal shares
    of the sum of the magnitudes' roots, an edge goes halfway between two means and a mean to the
    middle of its values, a fixed number of times (S. Lloyd, 1982; J. Max, 1960). Raises ValueError
    as `fractional_quantize` does.
    """
    _check_quantizable(values_K, intervals)
    return _lloyd_max(values_K, intervals)


def _lloyd_max(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """`lloyd_max_quantize`, the values never looked at by the host."""
    magnitudes_K, count = values_K.abs().double(), len(values_K)
    if not count:
        return values_K.int(), values_K.new_zeros(intervals)
    sorted_K = magnitudes_K.sort().values
    sums_K = F.pad(sorted_K.cumsum(0), (1, 0))
    shares_P = (torch.arange(intervals, device=values_K.device) + 0.5) / intervals
    roots_K = sorted_K.sqrt().cumsum(0)
    start_P = torch.searchsorted(roots_K, shares_P * roots_K[-1]).clamp_(max=count - 1)
    means_P = sorted_K[start_P]  # ascending
    for _ in range(_LLOYD_ROUNDS):
        edges = (means_P[1:] + means_P[:-1]) / 2
        cuts = F.pad(torch.searchsorted(sorted_K, edges, right=True), (1, 0))
        cuts = F.pad(cuts, (0, 1), value=count)
        counts_P = cuts.diff()
        centres_P = sums_K[cuts].diff() / counts_P.clamp(min=1)
        means_P = torch.where(counts_P > 0, centres_P, means_P)
    interval_K = intervals - 1 - torch.bucketize(magnitudes_K, edges)
    return (interval_K + intervals * (values_K < 0)).int(), means_P.flip(0).float()


QUANTIZERS = {"fractional": fractional_quantize, "lloyd": lloyd_max_quantize}


def fractional_dequantize(codes_K: Tensor, means_P: Tensor) -> Tensor:
    """Q_f(u), Eq. 22: the mean of the code's interval with the code's sign, (K,) float32.

    Raises ValueError for a code outside 0..2P - 1.
    """
    intervals = len(means_P)
    if len(codes_K) and not 0 <= int(codes_K.min()) <= int(codes_K.max()) < 2 * intervals:
        raise ValueError(f"codes: allowed: 0 to {2 * intervals - 1}")
    return _dequantize(codes_K, means_P)


def _dequantize(codes_K: Tensor, means_P: Tensor) -> Tensor:
    intervals = len(means_P)
    magnitudes_K = means_P[codes_K.long() % intervals]
    return torch.where(codes_K >= intervals, -magnitudes_K, magnitudes_K)


def quantized(values_K: Tensor, intervals: int) -> Tensor:
    """What the receiver sees of the values: themselves if `intervals` is 0 (32 bits each)."""
    if not intervals or not len(values_K):
        return values_K
    return fractional_dequantize(*fractional_quantize(values_K, intervals))


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 5. Messages and the bit budget (Sec. II-A, II-E; the last column of Tables 1 and 2)
#    A message is what one side sends in one round. Its bits are counted three ways, kept apart: by
#    the paper's formula, as the exact length of its code, and as bytes that really decode: the code
#    rounded up to bytes, and OVERHEAD_BYTES. Code "block" is the paper's, q bits a value and Alg.
#    4; code "entropy" holds the same message in fewer bits.
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def bit_budget(scheme: Scheme | str, dimension: int | None = None) -> float:
    """The paper's formula: uplink bits per parameter per local iteration.

    (q (phi_global + phi_local) + phi_local (log2(1 / phi_local) + 2)) / H. With a `dimension` D,
    the phis are those of whole numbers K and the 32 P bits of the quantizer's means count too.
    nan for centralized training: nothing is sent.
    """
    scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
    if scheme.centralized:
        return math.nan
    phi_global, phi_local = scheme.phi_global or 0.0, scheme.phi_local or 0.0
    means = 0.0
    if dimension is not None:
        phi_global = kept(phi_global, dimension) / dimension if phi_global else 0.0
        phi_local = kept(phi_local, dimension) / dimension if phi_local else 0.0
        means = 32 * scheme.intervals / dimension
    values = scheme.value_bits * (phi_global + phi_local)
    positions = phi_local * (math.log2(1 / phi_local) + 2) if phi_local else 0.0
    return (values + means + positions) / scheme.local_steps


SERVER = 0xFFFF  # the sender of a downlink message
MESSAGE_VERSION = 1
# Little-endian: version, kind (1: dense), sender, round, what was agreed on (Wire.tag), own
# positions; the code; a CRC-32 of all before it.
_HEADER, _CHECKSUM = struct.Struct("<BBHIII"), struct.Struct("<I")
OVERHEAD_BYTES = _HEADER.size + _CHECKSUM.size  # 20


@dataclass(frozen=True)
class Message:
    """What one side sends in one round.

    `positions` int64 (K_own,), ascending, are those that the other side does not know; `values`
    (K,) float32, as the receiver will see them, are on the shared positions first, then on these.
    Quantized values have `codes` (K,) int32 and `means` (P,) too. A dense message has (D,) values.
    """

    values: Tensor
    positions: Tensor
    sender: int = 0
    round: int = 0
    codes: Tensor | None = None
    means: Tensor | None = None
    dense: bool = False

    @staticmethod
    def of(
        intended_K: Tensor, positions: Tensor, value_bits: int, sender: int = 0, round: int = 0,
        quantizer: str = "fractional",
    ) -> Message:  # fmt: skip
        """Values on shared and own positions, quantized if `value_bits` is not 32."""
        if value_bits == 32:
            return Message(intended_K, positions, sender, round)
        codes, means = QUANTIZERS[quantizer](intended_K, _intervals(value_bits))
        values = fractional_dequantize(codes, means)
        return Message(values, positions, sender, round, codes, means)

    @staticmethod
    def dense_of(values_D: Tensor, sender: int = 0, round: int = 0) -> Message:
        """Everything, in 32 bits a value: a round of the warm-up, or of FedAvg."""
        none = torch.empty(0, dtype=torch.int64, device=values_D.device)
        return Message(values_D, none, sender, round, dense=True)

    def to(self, device: Any) -> Message:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class Wire:
    """One direction of a scheme's traffic, as both sides know it before the first message."""

    value_bits: int
    entropy: bool
    layer_sizes: tuple[int, ...]

    @staticmethod
    def up(scheme: Scheme, layer_sizes: Iterable[int]) -> Wire:
        return Wire(scheme.value_bits, scheme.code == "entropy", tuple(layer_sizes))

    @staticmethod
    def down(scheme: Scheme, layer_sizes: Iterable[int]) -> Wire:
        return Wire(scheme.down_value_bits, scheme.code == "entropy", tuple(layer_sizes))

    @cached_property
    def dimension(self) -> int:
        return sum(self.layer_sizes)

    @property
    def intervals(self) -> int:
        return _intervals(self.value_bits)

    @cached_property
    def tag(self) -> int:
        """Four bytes that two sides agree on if they mean the same code, layers and dimension."""
        return zlib.crc32(repr(dataclasses.astuple(self)).encode())

    @property
    def most_bytes(self) -> int:
        """No message is longer: a receiver need not read on. At most 4 bytes for a value and for a
        position each, the quantizer's means, and a little."""
        return 8 * self.dimension + 4 * self.intervals + OVERHEAD_BYTES + 64

    def bits(self, message: Message) -> int:
        """Exact length of the message's code in bits, without the overhead."""
        if message.dense:
            return 32 * self.dimension
        own = len(message.positions)
        if self.entropy:
            return 8 * len(_entropy_code(message, self))
        return self.block_code_bits(len(message.values), own)

    def block_code_bits(self, values: int, own: int) -> int:
        """Bits of code "block" for so many values and positions."""
        bits = self.value_bits * values + 32 * self.intervals
        block = block_for(own, self.dimension)
        return bits + (position_bits(own, self.dimension, block) if own else 0)


def encode_message(message: Message, wire: Wire) -> bytes:
    """The message as bytes: header, code, checksum.

    8 * len(bytes) is wire.bits(message), rounded up to whole bytes, plus 8 * OVERHEAD_BYTES.
    Raises ValueError for a message that can't be decoded again (see `decode_message`).
    """
    own, kind = len(message.positions), int(message.dense)
    if not 0 <= message.sender <= SERVER or not 0 <= message.round < 2**32:
        got = f"{message.sender}, {message.round}"
        raise ValueError(f"sender, round: got {got}, allowed: below 2^16 and 2^32")
    if not message.values.isfinite().all():
        raise ValueError("values: NaN or infinity can't be sent")
    _check_positions(message.positions, wire.dimension)
    header = (MESSAGE_VERSION, kind, message.sender, message.round, wire.tag, own)
    if message.dense:
        code = _float_bytes(message.values)
    else:
        code = _entropy_code(message, wire) if wire.entropy else _block_code(message, wire)
    data = _HEADER.pack(*header) + code
    return data + _CHECKSUM.pack(zlib.crc32(data))


def decode_message(
    data: bytes, wire: Wire, shared_K: Tensor | None = None, sender: int | None = None,
    round: int | None = None, count: int | None = None,
) -> Message:  # fmt: skip
    """The message in `data`, on the CPU: exactly what was encoded, or ValueError.

    `shared_K` int64, ascending: the positions that both sides know; None if a dense message is
    expected. `sender`, `round` and `count` (of own positions), if given, are those expected. `data`
    may come from anyone: its checksum, length, sender, round, agreement on the code, every value
    (finite) and every position (in range, ascending, not a shared one) are checked, and memory
    stays within a small multiple of its length and of the shared positions.
    """
    version, kind, who, when, own = _checked_header(data, wire)
    for name, got, expected in (
        ("version", version, MESSAGE_VERSION),
        ("kind", kind, int(shared_K is None)),
        ("sender", who, sender),
        ("round", when, round),
        ("own positions", own, count),
    ):
        if expected is not None and got != expected:
            raise ValueError(f"message: {name}: got {got}, allowed: {expected}")
    code = memoryview(data)[_HEADER.size : -_CHECKSUM.size]
    if shared_K is None:
        message = Message.dense_of(_floats(code, wire.dimension), who, when)
    else:
        read = _read_entropy_code if wire.entropy else _read_block_code
        shared_K = shared_K.cpu()
        if own > wire.dimension - len(shared_K):
            raise ValueError(f"message: {own} positions, allowed: those that are not shared")
        message = dataclasses.replace(read(code, len(shared_K), own, wire), sender=who, round=when)
        if torch.isin(message.positions, shared_K).any():
            raise ValueError("message: positions of the shared mask, allowed: only others")
    if shared_K is None and own:
        raise ValueError(f"message: got {own} positions in a dense message, allowed: 0")
    if not message.values.isfinite().all():
        raise ValueError("message: a value is NaN or infinity")
    return message


def _checked_header(data: bytes, wire: Wire) -> tuple[int, int, int, int, int]:
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) < OVERHEAD_BYTES:
        raise ValueError(f"message: allowed: {OVERHEAD_BYTES} bytes or more")
    if len(data) > wire.most_bytes:
        raise ValueError(f"message: got {len(data)} bytes, allowed: at most {wire.most_bytes}")
    end = len(data) - _CHECKSUM.size
    if zlib.crc32(memoryview(data)[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        raise ValueError("message: wrong checksum")
    version, kind, who, when, tag, own = _HEADER.unpack_from(data)
    if tag != wire.tag:
        raise ValueError(f"message: tag: got {tag:08x}, allowed: {wire.tag:08x} (another scheme)")
    return version, kind, who, when, own


def _float_bytes(values_K: Tensor) -> bytes:
    return values_K.detach().cpu().numpy().astype("<f4").tobytes()


def _floats(data: memoryview, count: int) -> Tensor:
    if len(data) != 4 * count:
        raise ValueError(f"message: got {len(data)} bytes of values, allowed: {4 * count}")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


def _means(data: memoryview, intervals: int) -> Tensor:
    means_P = _floats(data[: 4 * intervals], intervals)
    if (means_P.isfinite() & (means_P >= 0)).all():
        return means_P
    raise ValueError("message: means of intervals, allowed: finite numbers >= 0")


# Code "block": the paper's ────────────────────────────────────────────────────────────────────────


def _block_code(message: Message, wire: Wire) -> bytes:
    """Values at 32 bits, or means and codes of q bits; then Alg. 4. One stream of bits."""
    own = len(message.positions)
    code, streams = _float_bytes(message.means if wire.intervals else message.values), []
    if wire.intervals:
        streams.append(_to_bits(message.codes.cpu().numpy(), wire.value_bits))
    if own:
        block = block_for(own, wire.dimension)
        streams.append(encode_positions(message.positions.cpu(), wire.dimension, block).numpy())
    return code + _packed(streams)


def _read_block_code(code: memoryview, shared: int, own: int, wire: Wire) -> Message:
    count = shared + own
    block = block_for(own, wire.dimension)
    places = position_bits(own, wire.dimension, block) if own else 0
    coded = wire.value_bits * count if wire.intervals else 0
    floats = 4 * (wire.intervals or count)
    if len(code) != floats + -(-(coded + places) // 8):
        raise ValueError(
            f"message: got {len(code)} bytes of code with {own} positions, "
            f"allowed: {floats + -(-(coded + places) // 8)}"
        )
    bits = _unpacked(code[floats:], coded + places)
    positions = torch.empty(0, dtype=torch.int64)
    if own:
        positions = decode_positions(torch.from_numpy(bits[coded:]), wire.dimension, block)
        if len(positions) != own:
            raise ValueError(f"message: got {len(positions)} positions, allowed: {own}")
    if not wire.intervals:
        return Message(_floats(code[:floats], count), positions)
    codes = _from_bits(bits[:coded], wire.value_bits)
    return _quantized_message(codes, _means(code[:floats], wire.intervals), positions)


def _quantized_message(codes: np.ndarray, means_P: Tensor, positions: Tensor) -> Message:
    codes_K = torch.from_numpy(codes.astype(np.int32))
    return Message(fractional_dequantize(codes_K, means_P), positions, codes=codes_K, means=means_P)


def _to_bits(numbers: np.ndarray, width: int) -> np.ndarray:
    """(K,) numbers below 2^width as K * width bits, the highest first: uint8 of 0 and 1."""
    shifts = np.arange(width - 1, -1, -1, dtype=np.uint16)
    return (numbers.astype(np.uint16)[:, None] >> shifts & 1).astype(np.uint8).reshape(-1)


def _from_bits(bits: np.ndarray, width: int) -> np.ndarray:
    """(K,) uint16 from K * width bits."""
    columns = bits.reshape(-1, width)
    numbers = columns[:, 0].astype(np.uint16)
    for place in range(1, width):
        numbers = numbers << 1 | columns[:, place]
    return numbers


def _packed(streams: list[np.ndarray]) -> bytes:
    return np.packbits(np.concatenate(streams)).tobytes() if streams else b""


def _unpacked(data: memoryview, count: int) -> np.ndarray:
    """The first `count` bits; ValueError unless `data` is just as long and ends in zeros."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if len(data) != -(-count // 8) or bits[count:].any():
        raise ValueError(f"message: got {8 * len(data)} bits, allowed: {count}, filled with zeros")
    return bits[:count]


# Code "entropy": the same message in fewer bits ───────────────────────────────────────────────────
#    Signs a bit each; which of the P intervals, Huffman-coded by zlib (they are far from equally
#    likely), shared and own apart; positions as Golomb-Rice coded gaps, layer by layer if shorter.


def _entropy_code(message: Message, wire: Wire) -> bytes:
    own, shared = len(message.positions), len(message.values) - len(message.positions)
    if wire.intervals:
        codes = message.codes.cpu().numpy()
        interval = (codes % wire.intervals).astype(np.uint16)
        values = [_float_bytes(message.means), _packed([codes >= wire.intervals])]
        width = wire.value_bits - 1
        values += [_shortest(part, width) for part in (interval[:shared], interval[shared:])]
    else:
        values = [_float_bytes(message.values)]
    positions = message.positions.cpu().numpy()
    return b"".join([*values, _gap_code(positions, wire.layer_sizes) if own else b""])


def _read_entropy_code(code: memoryview, shared: int, own: int, wire: Wire) -> Message:
    count = shared + own
    floats = 4 * (wire.intervals or count)
    head, rest = code[:floats], code[floats:]
    if wire.intervals:
        signs = _unpacked(rest[: -(-count // 8)], count)
        rest, width = rest[-(-count // 8) :], wire.value_bits - 1
        parts = []
        for length in (shared, own):
            part, rest = _read_shortest(rest, length, width)
            parts.append(part)
    positions = _read_gap_code(rest, own, wire.layer_sizes)
    if not wire.intervals:
        return Message(_floats(head, count), positions)
    codes = np.concatenate(parts) + wire.intervals * signs.astype(np.uint16)
    return _quantized_message(codes, _means(head, wire.intervals), positions)


# zlib's strategies, in the order of the byte before a stream; 0 is plain bits of fixed width.
_STRATEGIES = (None, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)


def _shortest(numbers: np.ndarray, width: int) -> bytes:
    """Numbers below 2^width in the shortest of three codes, with a byte that says which."""
    if not len(numbers) or not width:
        return b""
    plain = _packed([_to_bits(numbers, width)])
    if width > 8:
        return b"\0" + plain
    symbols, candidates = numbers.astype(np.uint8).tobytes(), [plain]
    for strategy in _STRATEGIES[1:]:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
        candidates.append(deflate.compress(symbols) + deflate.flush())
    best = min(range(len(candidates)), key=lambda i: len(candidates[i]))
    return bytes([best]) + candidates[best]


def _read_shortest(data: memoryview, count: int, width: int) -> tuple[np.ndarray, memoryview]:
    """`count` numbers from the start of `data`, and the rest of it."""
    if not count or not width:
        return np.zeros(count, np.uint16), data
    if not len(data) or data[0] >= len(_STRATEGIES) or (data[0] and width > 8):
        raise ValueError("message: values in no known code")
    choice, data = data[0], data[1:]
    if not choice:
        size = -(-count * width // 8)
        return _from_bits(_unpacked(data[:size], count * width), width), data[size:]
    symbols, rest = _inflated(data, count)
    numbers = np.frombuffer(symbols, np.uint8).astype(np.uint16)
    if numbers.max() >> width:
        raise ValueError(f"message: a value's code of {numbers.max()}, allowed: {width} bits")
    return numbers, rest


def _inflated(data: memoryview, size: int) -> tuple[bytes, memoryview]:
    """Exactly `size` bytes from a raw deflate stream, never more in memory, and what follows it."""
    inflate = zlib.decompressobj(-15)
    try:
        symbols = inflate.decompress(data, size)
        extra = inflate.decompress(inflate.unconsumed_tail, 1)  # reads on to the end mark
    except zlib.error as error:
        raise ValueError(f"message: values: {error}") from error
    if len(symbols) != size or extra or not inflate.eof:
        raise ValueError(f"message: values, allowed: {size} of them")
    return symbols, data[len(data) - len(inflate.unused_data) :]


def _rice_widths(counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Bits of the remainder of a gap among `counts` in `sizes`: log2 of ln 2 times the mean gap."""
    mean_256 = 177 * (sizes - counts) // np.maximum(counts, 1)  # ln 2 = 177 / 256
    return np.array([max(0, (int(m) >> 8).bit_length() - 1) for m in mean_256], np.int64)


def _rice_code(numbers: np.ndarray, widths: np.ndarray) -> list[np.ndarray]:
    """Golomb-Rice: all quotients first, n zeros and a one each; then the remainders."""
    ends = np.cumsum((numbers >> widths) + 1) - 1
    quotients = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    quotients[ends] = 1
    remainders = np.zeros(int(widths.sum()), np.uint8)
    for fields, places, shifts in _columns(widths):
        remainders[places] = numbers[fields] >> shifts & 1
    return [quotients, remainders]


def _columns(widths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For fields of these widths, side by side: the first bits of all, the second bits, ...: which
    fields have one, where it stands, and how far from the field's right end."""
    starts = np.cumsum(widths) - widths
    for column in range(int(widths.max(initial=0))):
        fields = np.flatnonzero(widths > column)
        yield fields, starts[fields] + column, widths[fields] - 1 - column


def _read_rice_code(
    bits: np.ndarray, count: int, widths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`count` numbers whose remainders have these widths, and the bits behind them."""
    ones = np.flatnonzero(bits)[:count]
    if len(ones) < count:
        raise ValueError("message: positions end early")
    quotients = np.diff(ones, prepend=-1) - 1
    bits = bits[ones[-1] + 1 :] if count else bits
    length = int(widths.sum())
    if len(bits) < length:
        raise ValueError("message: positions end early")
    remainders = np.zeros(count, np.int64)
    for fields, places, _ in _columns(widths):
        remainders[fields] = remainders[fields] << 1 | bits[places]
    return (quotients << widths) + remainders, bits[length:]


def _segments(positions: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many positions each layer has, and every position's gap to the one before it there."""
    ends = np.cumsum(sizes)
    layer_K = np.searchsorted(ends, positions, side="right")
    previous = np.concatenate([[-1], positions[:-1]])
    previous = np.maximum(previous, (ends - sizes)[layer_K] - 1)
    return np.bincount(layer_K, minlength=len(sizes)), positions - previous - 1


_WIDTH_BITS = 5  # in front of the layers' counts: the width of their remainders


def _gap_bits(positions: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    counts, gaps = _segments(positions, sizes)
    streams = [] if len(sizes) == 1 else _count_bits(counts)
    return streams + _rice_code(gaps, np.repeat(_rice_widths(counts, sizes), counts))


def _count_bits(counts: np.ndarray) -> list[np.ndarray]:
    width = min(range(20), key=lambda w: int((counts >> w).sum()) + w * len(counts))
    return [
        _to_bits(np.array([width]), _WIDTH_BITS),
        *_rice_code(counts, np.full(len(counts), width)),
    ]


def _gap_code(positions: np.ndarray, layer_sizes: Iterable[int]) -> bytes:
    """A bit that says "by layers" and their counts, or not; gaps. The shorter of the two."""
    sizes = np.array(layer_sizes)
    options = [
        [np.array([flag], np.uint8), *_gap_bits(positions, s)]
        for flag, s in ((0, sizes.sum(keepdims=True)), (1, sizes))
    ]
    return _packed(min(options, key=lambda streams: sum(map(len, streams))))


def _read_gap_code(data: memoryview, own: int, layer_sizes: Iterable[int]) -> Tensor:
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if not own or not len(bits):
        if own or len(bits):
            raise ValueError(f"message: got {len(bits)} bits for {own} positions")
        return torch.empty(0, dtype=torch.int64)
    sizes, by_layer, bits = np.array(layer_sizes), bits[0], bits[1:]
    counts = np.array([own])
    if by_layer:
        if len(bits) < _WIDTH_BITS:
            raise ValueError("message: positions end early")
        width = int(_from_bits(bits[:_WIDTH_BITS], _WIDTH_BITS)[0])
        widths = np.full(len(sizes), width)
        counts, bits = _read_rice_code(bits[_WIDTH_BITS:], len(sizes), widths)
    else:
        sizes = sizes.sum(keepdims=True)
    if counts.sum() != own or (counts > sizes).any():
        raise ValueError(f"message: counts of positions, allowed: {own} in all, as layers hold")
    gaps, bits = _read_rice_code(bits, own, np.repeat(_rice_widths(counts, sizes), counts))
    if len(bits) > 7 or bits.any():
        raise ValueError("message: bits behind the last position")
    return torch.from_numpy(_from_gaps(gaps, counts, sizes))


def _from_gaps(gaps: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Positions from gaps; each layer's start afresh. ValueError outside the layer."""
    ends, firsts = np.cumsum(sizes), np.cumsum(counts) - counts
    steps = np.cumsum(gaps + 1)
    before = np.concatenate([[0], steps])[firsts]  # the sum of all steps in earlier layers
    positions = steps - np.repeat(before - (ends - sizes), counts) - 1
    if (gaps > sizes.sum()).any() or (positions >= np.repeat(ends, counts)).any():
        raise ValueError("message: positions outside their layer")
    return positions


class RankError(RuntimeError):
    """Another rank is late, gone, or went wrong; the text names it."""


@contextlib.contextmanager
def _of_rank(rank: int) -> Iterator[None]:
    """Puts the rank in front of what is wrong with a message."""
    try:
        yield
    except ValueError as error:
        error.args = (f"rank {rank}, {error}",)
        raise


class Ranks:
    """The processes that share a federation. This one is alone; `joined_ranks` gives the others.

    Every method but `own` is called by all ranks, in the same order.
    """

    rank, size = 0, 1

    def own(self, count: int, rank: int | None = None) -> range:
        """Which of `count` things are this rank's (or that one's): a block, perhaps empty."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def exchange(self, work: Callable[[], list[bytes]]) -> list[list[bytes]]:
        """What `work` returns on every rank, in rank order; what it raises on one, all raise."""
        return [work()]

    def together(self, work: Callable[[], Any]) -> Any:
        """`work()` of this rank, if it went well on all."""
        return work()

    def first(self, work: Callable[[], Any]) -> Any:
        """`work()` of rank 0, a value that JSON can hold, on all ranks."""
        return work()

    def in_turn(self, work: Callable[[], Any]) -> Any:
        """`work()`, by one rank of every machine before the others: downloads, cached files."""
        return work()

    def rows(self, rows_N: Tensor) -> Tensor:
        """The rows of all ranks, in rank order, on this rank's device."""
        return rows_N

    def check_same(self, tensor: Tensor, what: str) -> None:
        """Raises RankError if the tensor is not the same, bit for bit, on all ranks."""

    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """A federation's state with all clients' rows on rank 0; elsewhere as it is."""
        return state

    def split(self, state: dict[str, Any], clients: int, device: Any) -> dict[str, Any]:
        """The inverse: rank 0's whole state, as the part of it that is this rank's."""
        return state


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 6. Compressors: top-K, rand-K, TCS, LF and PLF, with error accumulation (Alg. 2)
#    One skeleton, `Compressor`, for all schemes. What differs is a `MaskRule`: which entries both
#    sides know without being told, and which a client adds of its own.
# ══════════════════════════════════════════════════════════════════════════════════════════════════


class ClientError(ValueError):
    """Something is wrong with what a client sends; `client` says whose (or SERVER)."""

    def __init__(self, client: int, what: str):
        super().__init__(f"{'server' if client == SERVER else f'client {client}'}: {what}")
        self.client = client


class NotFiniteError(ClientError):
    """An update holds NaN or infinity: a client's or, by a sum that overflows, the server's."""

    def __init__(self, client: int):
        super().__init__(client, "the update is not finite (NaN or infinity)")


class MessageError(ClientError):
    """A message that can't be accepted: see `decode_message`."""


def _check_finite(values: Tensor, client: int) -> None:
    """NotFiniteError unless all are finite: sums of finite numbers can overflow."""
    if not math.isfinite(float(values.sum())) and not values.isfinite().all():
        raise NotFiniteError(client)


class MaskRule:
    """Which entries travel. Subclass it, with `register_scheme`, to make a scheme of your own.

    Methods may return a (D,) bool mask or its ascending int64 positions. Tensors and numbers kept
    as attributes without a leading underscore are saved in checkpoints.
    """

    def __init__(self, scheme: Scheme, layer_sizes: list[int], device: Any = "cpu", seed: int = 0):
        self._scheme, self._layer_sizes, self._device, self._seed = (
            scheme,
            layer_sizes,
            device,
            seed,
        )
        self._dimension = sum(layer_sizes)
        self._shared_K: Tensor | None = None  # see `_hold`
        self._shared_D: Tensor | None = None
        self._floors: dict[str, float] = {}  # last thresholds, a little lowered: only for speed
        MaskRule.widen(self, 1)

    def widen(self, times: int) -> None:
        """From here on, all masks are so many times as large as the scheme says."""
        scheme, dimension = self._scheme, self._dimension

        def size(phi: float | None, most: int) -> int:
            return min(times * kept(phi, dimension), most) if phi else 0

        self.k_global = size(scheme.phi_global, dimension)
        free = dimension - self.k_global
        self.k_local, self.k_down = size(scheme.phi_local, free), size(scheme.phi_down, free)

    def global_mask(self) -> Tensor | None:
        """The mask all sides know in this round; None if not known yet: the round is dense."""
        return torch.empty(0, dtype=torch.int64, device=self._device)

    def local_mask(self, intended_D: Tensor, global_positions_K: Tensor) -> Tensor:
        """A client's own mask, disjoint from the global one: S_top of the rest (Alg. 2, l. 10)."""
        return self._own_mask(intended_D, self.k_local, global_positions_K, "client")

    def server_mask(self, intended_D: Tensor, global_positions_K: Tensor) -> Tensor:
        """The server's own mask in the downlink, for a scheme with a phi_down."""
        return self._own_mask(intended_D, self.k_down, global_positions_K, "server")

    def _own_mask(self, intended_D: Tensor, k: int, shared_K: Tensor, whose: str) -> Tensor:
        """S_top of what is not shared; where nothing is shared yet, k_global more of it."""
        k = self.own_count(k, shared_K)
        return self.select(intended_D, k, self._scheme.phi_min_local, shared_K, whose)

    def own_count(self, k: int, shared_K: Tensor) -> int:
        return k + (0 if len(shared_K) else self.k_global)

    def observe(self, update_D: Tensor) -> None:
        """Called with every round's update, dense ones too, after it was averaged."""

    def select(
        self, vector_D: Tensor, k: int, phi_min: float | None, excluded: Tensor | None = None,
        whose: str = "global",
    ) -> Tensor:  # fmt: skip
        """S_top, layer-wise fair if `phi_min` says so; the threshold of last time, for the same
        `whose`, speeds it up."""
        if phi_min is not None:
            return layerwise_top_k_positions(vector_D, k, self._layer_sizes, phi_min, excluded)
        floor, excluded_D = self._floors.get(whose, 0.0), self._excluded_mask(vector_D, excluded)
        positions_K, kth = _filtered(vector_D.detach(), k, excluded_D, floor)
        self._floors[whose] = 0.85 * kth if k else 0.0
        return positions_K

    def _hold(self, shared_K: Tensor | None) -> None:
        """The shared mask of a round, the same for all clients, which `select` turns into a (D,)
        mask only once; None at the round's end."""
        self._shared_K, self._shared_D = shared_K, None

    def _excluded_mask(self, vector_D: Tensor, excluded: Tensor | None) -> Tensor | None:
        if excluded is None or excluded is not self._shared_K or len(vector_D) != self._dimension:
            return _outside(vector_D, excluded)
        if self._shared_D is None:
            self._shared_D = _outside(vector_D, excluded)
        return self._shared_D

    def state_dict(self) -> dict[str, Any]:
        saved = (Tensor, int, float)
        state = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return {k: v for k, v in state.items() if isinstance(v, saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()})


class TopK(MaskRule):
    """Top-K: no shared mask; each client's own S_top, all its positions sent (Sec. I-C)."""


class RandK(MaskRule):
    """Rand-K: a random mask that all sides draw from one seed; no positions sent (Sec. I-C)."""

    round = 0

    def global_mask(self) -> Tensor:
        generator = np.random.default_rng([self._seed, self.round])
        chosen = generator.choice(self._dimension, self.k_global, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(chosen)).to(self._device)

    def observe(self, update_D: Tensor) -> None:
        self.round = self.round + 1


class Dense(MaskRule):
    """Everything travels (FedAvg); with -Q<bits>, quantized."""

    def global_mask(self) -> Tensor:
        return torch.arange(self._dimension, device=self._device)


class TCS(MaskRule):
    """Time-correlated sparsification: the shared mask is S_top of the last update (Alg. 2)."""

    positions: Tensor | None = None
    magnitudes: Tensor | None = None  # the last update there, if the mask is to shrink

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        # of all masks since this was last set to 0: entries that were in the mask before, entries
        self.shared = torch.zeros(2, dtype=torch.int64, device=self._device)

    def widen(self, times: int) -> None:
        """Of a mask that has become too large, the entries that were largest stay."""
        super().widen(times)
        if self.positions is not None and len(self.positions) > self.k_global:
            largest = top_k_positions(self.magnitudes, self.k_global)
            self.positions, self.magnitudes = self.positions[largest], self.magnitudes[largest]

    def global_mask(self) -> Tensor | None:
        sparse_start = self.positions is None and not self._scheme.dense_warmup
        return super().global_mask() if sparse_start or not self.k_global else self.positions

    def observe(self, update_D: Tensor) -> None:
        if not self.k_global:
            return
        before, fair = self.positions, self._scheme.phi_min_global
        self.positions = self.select(update_D, self.k_global, fair)
        if self._scheme.warmup_masks > 1:
            self.magnitudes = update_D[self.positions].abs()
        if before is not None and len(before) == len(self.positions):
            self.count_shared(before, self.positions)

    def count_shared(self, before_K: Tensor, after_K: Tensor) -> None:
        self.shared[0] += in_common(before_K, after_K)
        self.shared[1] += len(after_K)


RULES: dict[str, type[MaskRule]] = {"TCS": TCS, "top-K": TopK, "rand-K": RandK, "dense": Dense}


def register_scheme(name: str, **fields: Any) -> Callable[[type[MaskRule]], type[MaskRule]]:
    """Class decorator: a family of schemes of your own, with -L<H>, -Q<q>, ... for free.

        @register_scheme("TCS-Average", phi_global=1e-2, phi_local=1e-3)
        class RunningAverage(TCS):
            def observe(self, update_D):
                self.average_D = 0.9 * getattr(self, "average_D", 0.0) + update_D.abs()
                super().observe(self.average_D)

    `fields` are those of Scheme. Registering a name again replaces it, so a cell can be run twice;
    the names of the core's own families can't be taken.
    """  # fmt: skip
    taken = FAMILIES.get(name, {"rule": name}).get("rule", "TCS") != name
    if taken or RULES.get(name, object).__module__ == __name__:
        raise ValueError(f"scheme {name!r} is one of the core's own: choose another name")
    _reject_unknown(
        fields, {f.name for f in dataclasses.fields(Scheme)} - {"name", "rule"}, "field"
    )

    def register(cls: type[MaskRule]) -> type[MaskRule]:
        previous = RULES.get(name)
        RULES[name] = cls
        try:
            Scheme(name=name, rule=name, **fields)
        except (TypeError, ValueError):
            RULES.pop(name) if previous is None else RULES.update({name: previous})
            raise
        FAMILIES[name] = {"rule": name, **fields}
        return cls

    return register


def _restore_(own: Tensor, saved: Tensor, key: str) -> None:
    if saved.shape != own.shape:
        got, allowed = tuple(saved.shape), tuple(own.shape)
        raise ValueError(f"{key}: got shape {got}, allowed: {allowed}")
    own.copy_(saved)


Arrived = tuple[Message, tuple[int, int]]  # with its size: bits of code, bytes in all


class Compressor:
    """Alg. 2's compression for all clients: error accumulation, masks, values, averaging.

    `errors_ND` (N, D) float32 is what the server has not received yet; a dense scheme has no
    errors. `server_errors_D` (D,), for a scheme that compresses the downlink, is what the clients
    have not. With `wire`, every message becomes bytes and is decoded before it is used; those of a
    client that can't be accepted raise MessageError or, with `bad_message` "skip", are left out:
    the average is over the others, the client keeps in its errors all that it meant to send.
    `channel(sender, data)` is what the network makes of a message's bytes: a place for a transport,
    or for an attack. Over several `ranks` messages always are bytes, and N is the number of this
    rank's `own` clients.
    """

    def __init__(
        self,
        scheme: Scheme,
        layer_sizes: list[int],
        clients: int,
        device: Any = "cpu",
        seed: int = 0,
        wire: bool = False,
        bad_message: str = "stop",
        ranks: Ranks | None = None,
    ):
        self.scheme, self.layer_sizes, self.clients = scheme, list(layer_sizes), clients
        self.dimension, self.wire, self.ranks = sum(layer_sizes), wire, ranks or Ranks()
        self.own = self.ranks.own(clients)
        self.rule = RULES[scheme.rule](scheme, self.layer_sizes, device, seed)
        rows = 0 if scheme.dense else len(self.own)
        self.errors_ND = torch.zeros(rows, self.dimension, device=device)
        down = self.dimension if scheme.compresses_downlink else 0
        self.server_errors_D = torch.zeros(down, device=device)
        self._explored_D = torch.zeros(self.dimension, dtype=torch.bool, device=device)
        self.up, self.down = Wire.up(scheme, layer_sizes), Wire.down(scheme, layer_sizes)
        self.bits_up = self.bits_down = self.bytes_up = self.bytes_down = self.round = 0
        self.last_dense = False
        self.bad_message = bad_message
        self.refused: list[int] = []  # clients whose message was left out of the last round
        self.channel: Callable[[int, bytes], bytes] = lambda sender, data: data

    def step(
        self, deltas_ND: Tensor, dense: bool = False, clients: Iterable[int] | None = None
    ) -> Tensor:
        """One round, Alg. 2 lines 8 to 16: (N, D) model differences in, their (D,) average out.

        `dense` sends everything, unquantized (warm-up). `clients` says who takes part; the others
        keep their errors. A scheme that needs an update to take its mask from makes its first round
        dense. Leaves `deltas_ND` as it is. Raises NotFiniteError or ValueError, with nothing
        changed, for deltas or clients that can't be used. In the middle of a round, which can't go
        on then: NotFiniteError for sums that overflow, MessageError for messages.

        Afterwards `bits_up` is one client's average message, `bits_down` the server's, in bits of
        code; `bytes_up`, all clients' messages together, and `bytes_down` have the overhead too.
        """
        chosen = list(range(self.clients)) if clients is None else [int(n) for n in clients]
        self._check(deltas_ND, chosen)
        self.refused = []
        global_K = None if dense or self.scheme.dense else self.rule.global_mask()
        self.last_dense = global_K is None
        if global_K is None:
            update_D = self._dense_round(deltas_ND, chosen)
        else:
            global_K = self._positions(global_K)
            self.rule._hold(global_K)
            try:
                update_D = self._sparse_round(deltas_ND, chosen, global_K)
            finally:
                self.rule._hold(None)
        self.rule.observe(update_D)
        self.round += 1
        return update_D

    def _check(self, deltas_ND: Tensor, chosen: list[int]) -> None:
        if tuple(deltas_ND.shape) != (len(self.own), self.dimension):
            expected = (len(self.own), self.dimension)
            raise ValueError(f"deltas_ND: got shape {tuple(deltas_ND.shape)}, allowed: {expected}")
        if not chosen or sorted(set(chosen)) != sorted(chosen):
            raise ValueError(f"clients: got {chosen}, allowed: one or more, each once")
        if not 0 <= min(chosen) <= max(chosen) < self.clients:
            raise ValueError(f"clients: got {chosen}, allowed: 0 to {self.clients - 1}")
        self.ranks.together(lambda: self._check_deltas(deltas_ND, chosen))

    def _check_deltas(self, deltas_ND: Tensor, chosen: list[int]) -> None:
        rows = [self.own.index(n) for n in sorted(chosen) if n in self.own]
        if len(rows) == len(deltas_ND) and math.isfinite(float(deltas_ND.sum())):
            return
        sums = torch.stack([deltas_ND[row].sum() for row in rows]).tolist() if rows else []
        for row, total in zip(rows, sums, strict=True):
            if not math.isfinite(total) and not deltas_ND[row].isfinite().all():
                raise NotFiniteError(self.own[row])

    def _dense_round(self, deltas_ND: Tensor, chosen: list[int]) -> Tensor:
        """Everything is sent in 32 bits, in both directions: no error is left."""
        update_D, sent_up = deltas_ND.new_zeros(self.dimension), []
        for message, arrived in self._received(self._dense_client, deltas_ND, chosen):
            if arrived is None:
                continue
            sent_up.append(arrived[1])
            update_D += arrived[0].values
            if message and len(self.errors_ND):
                self.errors_ND[self.own.index(message.sender)].zero_()
        update_D.div_(self._accepted(sent_up))
        if len(self.server_errors_D):
            update_D += self.server_errors_D
            self.server_errors_D.zero_()
        _check_finite(update_D, SERVER)
        down, sent = self._carried(Message.dense_of(update_D, SERVER, self.round), self.down)
        self._count(sent_up, sent)
        return down.values

    def _sparse_round(self, deltas_ND: Tensor, chosen: list[int], global_K: Tensor) -> Tensor:
        update_D, sent_up = deltas_ND.new_zeros(self.dimension), []
        self._explored_D.zero_()
        for message, arrived in self._received(self._client, deltas_ND, chosen, global_K):
            if arrived is None:
                self._take_back(message, global_K)
                continue
            message, sent = arrived
            sent_up.append(sent)
            positions = torch.cat([global_K, message.positions])
            update_D.index_add_(0, positions, message.values)  # server, line 15
            self._explored_D[message.positions] = True
        message = self._server(update_D.div_(self._accepted(sent_up)), global_K)
        message, sent = self._sent_down(message, global_K)
        self._count(sent_up, sent)
        if self.wire or self.scheme.compresses_downlink:
            positions = torch.cat([global_K, message.positions])
            update_D.zero_().scatter_(0, positions, message.values)
        return update_D

    def _dense_client(self, n: int, delta_D: Tensor, _: None) -> Message:
        if len(self.errors_ND) and self.scheme.error_accumulation:
            delta_D = self.errors_ND[self.own.index(n)].add_(delta_D)
            _check_finite(delta_D, n)
        return Message.dense_of(delta_D, n, self.round)

    def _client(self, n: int, delta_D: Tensor, global_K: Tensor) -> Message:
        """One client's side of a round: its own positions, the values it sends on both masks."""
        errors_D = self.errors_ND[self.own.index(n)]
        keep_errors = self.scheme.error_accumulation
        intended_D = errors_D.add_(delta_D) if keep_errors else errors_D.copy_(delta_D)  # line 9
        local_K = self._positions(self.rule.local_mask(intended_D, global_K), global_K)  # line 10
        positions = torch.cat([global_K, local_K])  # line 11: exploit | explore
        intended = intended_D.index_select(0, positions)
        _check_finite(intended, n)
        how = self.scheme.value_bits, n, self.round, self.scheme.quantizer
        message = Message.of(intended, local_K, *how)  # line 12
        errors_D.scatter_(0, positions, intended - message.values)  # line 13: what stays behind
        return message

    def _server(self, update_D: Tensor, global_K: Tensor) -> Message:
        """The server's side: all that came up or, with errors of its own, a mask of its own."""
        if not self.scheme.compresses_downlink:
            own_K = mask_to_positions(self._explored_D)
            values = update_D.index_select(0, torch.cat([global_K, own_K]))
            _check_finite(values, SERVER)
            return Message.of(values, own_K, 32, SERVER, self.round)
        intended_D = self.server_errors_D.add_(update_D)
        if self.scheme.phi_down is None:
            own_K = mask_to_positions(self._explored_D)
        else:
            own_K = self._positions(self.rule.server_mask(intended_D, global_K), global_K)
        positions = torch.cat([global_K, own_K])
        intended = intended_D.index_select(0, positions)
        _check_finite(intended, SERVER)
        how = self.scheme.down_value_bits, SERVER, self.round, self.scheme.down_quantizer
        message = Message.of(intended, own_K, *how)
        intended_D.scatter_(0, positions, intended - message.values)
        return message

    def _take_back(self, message: Message | None, global_K: Tensor) -> None:
        """All that an own client meant to send is still to be sent: the server left it out."""
        if message is not None:
            positions = torch.cat([global_K, message.positions])
            errors_D = self.errors_ND[self.own.index(message.sender)]
            errors_D.index_add_(0, positions, message.values)

    def _received(
        self, client: Callable[..., Message], deltas_ND: Tensor, chosen: list[int],
        global_K: Tensor | None = None,
    ) -> Iterator[tuple[Message | None, Arrived | None]]:  # fmt: skip
        """Every chosen client's message, in their order: as it was sent, if it is a client of this
        rank, and as the server has it (see `_arrived`)."""
        own = (n for n in chosen if n in self.own)
        sent = (client(n, deltas_ND[self.own.index(n)], global_K) for n in own)
        if self.ranks.size == 1:
            yield from ((m, self._arrived(m, m.sender, global_K)) for m in sent)
            return
        mine: dict[int, Message] = {}

        def encoded() -> list[bytes]:
            mine.update((message.sender, message) for message in sent)
            return [self.channel(n, encode_message(m, self.up)) for n, m in mine.items()]

        parts = self.ranks.exchange(encoded)
        owners = {n: rank for rank in range(self.ranks.size) for n in self._chosen_of(rank, chosen)}
        data = dict(zip(owners, (one for part in parts for one in part), strict=True))
        for n in chosen:
            with _of_rank(owners[n]):
                arrived = self._arrived(data[n], n, global_K)
            yield mine.get(n), arrived

    def _chosen_of(self, rank: int, chosen: list[int]) -> list[int]:
        return [n for n in chosen if n in self.ranks.own(self.clients, rank)]

    def _arrived(
        self, message: Message | bytes, sender: int, shared_K: Tensor | None = None
    ) -> Arrived | None:
        """A client's message as the server has it, and its size; None if it is left out."""
        count = None
        if shared_K is not None and type(self.rule).local_mask is MaskRule.local_mask:
            count = self.rule.own_count(self.rule.k_local, shared_K)
        try:
            if isinstance(message, Message):
                return self._carried(message, self.up, shared_K, count)
            return self._decoded(message, self.up, shared_K, sender, count)
        except MessageError:
            if self.bad_message != "skip":
                raise
            self.refused.append(sender)
            return None

    def _sent_down(self, message: Message, global_K: Tensor) -> Arrived:
        """The server's message as all have it: rank 0's, if the server quantizes or selects."""
        if self.ranks.size == 1 or not self.scheme.compresses_downlink:
            return self._carried(message, self.down, global_K)
        first = self.ranks.rank == 0
        parts = self.ranks.exchange(lambda: [encode_message(message, self.down)] if first else [])
        return self._decoded(parts[0][0], self.down, global_K, SERVER)

    def _accepted(self, sent_up: list[tuple[int, int]]) -> int:
        if not sent_up:
            raise MessageError(SERVER, f"no message was accepted, of clients {self.refused}")
        return len(sent_up)

    def _carried(
        self, message: Message, wire: Wire, shared_K: Tensor | None = None, count: int | None = None
    ) -> Arrived:
        """The message as the other side has it, and its size: bits of code, bytes in all."""
        if not self.wire:
            bits = wire.bits(message)
            return message, (bits, OVERHEAD_BYTES + -(-bits // 8))
        data = self.channel(message.sender, encode_message(message, wire))
        return self._decoded(data, wire, shared_K, message.sender, count)

    def _decoded(
        self, data: bytes, wire: Wire, shared_K: Tensor | None, sender: int,
        count: int | None = None,
    ) -> Arrived:  # fmt: skip
        try:
            message = decode_message(data, wire, shared_K, sender, self.round, count)
        except ValueError as error:
            raise MessageError(sender, str(error)) from error
        bits = 8 * (len(data) - OVERHEAD_BYTES) if wire.entropy else wire.bits(message)
        return message.to(self._explored_D.device), (bits, len(data))

    def _count(self, up: list[tuple[int, int]], down: tuple[int, int]) -> None:
        bits, self.bytes_up = (sum(column) for column in zip(*up, strict=True))
        self.bits_up = -(-bits // len(up))
        self.bits_down, self.bytes_down = down

    def _positions(self, mask: Tensor, taken_K: Tensor | None = None) -> Tensor:
        """What a rule returned, as positions; checked if the rule is not one of the core's."""
        ours = type(self.rule).__module__ == __name__
        if mask.dtype == torch.bool and not ours and tuple(mask.shape) != (self.dimension,):
            shape = f"got shape {tuple(mask.shape)}, allowed: ({self.dimension},)"
            raise ValueError(f"mask: {shape}")
        positions_K = mask_to_positions(mask) if mask.dtype == torch.bool else mask
        if ours:
            return positions_K
        _check_positions(positions_K, self.dimension)
        if taken_K is not None and torch.isin(positions_K, taken_K).any():
            raise ValueError("local_mask: entries of the global mask, allowed: only others")
        return positions_K

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: errors, the mask rule's state, the round's number."""
        state = {"errors_ND": self.errors_ND, "server_errors_D": self.server_errors_D}
        return state | {"rule": self.rule.state_dict(), "round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in ("errors_ND", "server_errors_D"):
            _restore_(getattr(self, key), state[key], key)
        self.rule.load_state_dict(state["rule"])
        self.round = int(state["round"])


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 8. Model: the CIFAR ResNet-18 of the paper (11,173,962 parameters) and its small relative
#    Convolutions lie in memory with channels last, which is what CPU and GPU kernels want.
# ══════════════════════════════════════════════════════════════════════════════════════════════════

STAGES = {"resnet18": (2, 2, 2, 2), "resnet8": (1, 1, 1)}  # basic blocks of each stage


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, 1x1 where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        first, second = _conv(inputs, outputs, 3, stride), _conv(outputs, outputs, 3, 1)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential(*([] if same else _conv(inputs, outputs, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:  # (B, inputs, h, w) -> (B, outputs, h/stride, w/stride)
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def build_model(name: str, width: int, classes: int = 10) -> nn.Module:
    """A CIFAR ResNet, (B, 3, h, w) in: stages of blocks, each twice as wide at half the size."""
    layers: list[nn.Module] = [*_conv(3, width, 3, 1), nn.ReLU(inplace=True)]
    inputs = width
    for stage, blocks in enumerate(STAGES[name]):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(BasicBlock(inputs, width * 2**stage, stride))
            inputs = width * 2**stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers, *head)


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """The paper's model, Sec. III-A: 11,173,962 trainable parameters at width 64."""
    return build_model("resnet18", width, classes)


def resnet8(width: int = 16, classes: int = 10) -> nn.Module:
    """The small relative: one block in each of three stages; 78,042 parameters at width 16."""
    return build_model("resnet8", width, classes)


class FlatModel:
    """A model whose parameters are views into one flat tensor, `theta_D`, and their gradients into
    another, `gradient_D`: a backward pass adds to it.

    `use` points the batch-norm statistics at any row of a flat tensor, so that clients can take
    turns without copies.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = list(model.parameters())
        self.layer_sizes = [p.numel() for p in self.parameters]
        self.norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        self.theta_D = torch.empty(sum(self.layer_sizes), device=self.parameters[0].device)
        self.gradient_D = torch.zeros_like(self.theta_D)
        self.gradients = self.views(self.gradient_D)
        for parameter, view in zip(self.parameters, self.views(self.theta_D), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        for norm in self.norms:
            norm.num_batches_tracked = None  # only counts, at the price of a kernel each

    def views(self, flat_D: Tensor) -> list[Tensor]:
        """(D,) as tensors of the parameters' shapes, sharing memory; convolutions channels last."""
        parts = flat_D.split(self.layer_sizes)
        return [_as_shape(part, p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def statistics_views(self, statistics_S: Tensor) -> list[Tensor]:
        """(S,) as mean and variance of every batch norm in turn, sharing memory."""
        return list(statistics_S.split([m.num_features for m in self.norms for _ in range(2)]))

    def use(self, statistics_views: list[Tensor]) -> None:
        """From here on running statistics live in these views, and gradients in `gradient_D`."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not gradient:  # at first, and after a `zero_grad`
                parameter.grad = gradient
        views = iter(statistics_views)
        for norm in self.norms:  # Module.__setattr__ would check each: 1/10 of a small net's pass
            norm._buffers["running_mean"], norm._buffers["running_var"] = next(views), next(views)

    def statistics(self) -> Tensor:
        """The model's batch-norm running means and variances, (S,)."""
        return torch.cat([s for m in self.norms for s in (m.running_mean, m.running_var)])


def _as_shape(part: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 4:
        return part.view(shape)
    outputs, inputs, height, width = shape
    return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 12. A communication hook for PyTorch's DistributedDataParallel
#     TCS in anyone's training: the values whose places all ranks know are one dense all-reduce;
#     only what each rank found for itself is gathered. Every bucket has its `Compressor`.
# ══════════════════════════════════════════════════════════════════════════════════════════════════


class TCSState:
    """What `tcs_hook` keeps between steps, and its settings. One for a model and a rank.

    1. `phi_global`, `phi_local`: shares of a bucket's entries that are kept, by the mask that all
       ranks know and by each rank's own. None for no such mask; without phi_global it is top-K.
    2. `start_iter` >= 1: so many steps of plain all-reduce come first. The mask is taken from the
       last of them. 10 % of all steps is a good start; warm-up of the learning rate belongs there.
    3. `error_accumulation`: what was not sent is added to the next gradient. Leave it on.

    Masks are chosen bucket by bucket: one mask over the whole model would have to wait for the last
    bucket, and nothing could travel while the backward pass still runs. K is ceil(phi * entries) of
    every bucket, so the total is the same within one entry a bucket; `bucket_cap_mb` large enough
    for the model gives one bucket, and the selection of Alg. 2.

    `iter` counts steps. `bytes_sent` is what this rank has handed to collectives, in bytes:
    "dense" and "shared" to all_reduce, "explored" to all_gather.

    It survives DDP's rebuilding of buckets after the first step, and checkpoints, in either of two
    ways; every rank saves its own, since errors differ: `state_dict` (tensors and numbers, good for
    torch.load(weights_only=True)), or pickling the state, which leaves the process group out. Load
    before the first step, into the same model with the same bucket_cap_mb.

    Values are not quantized: an all-reduce adds up on the way, and sums of quantized values with a
    scale of their own on every rank need 32 bits again. Half the bits come with PyTorch's own
    bf16_compress_wrapper(tcs_hook). A gradient that is not finite (fp16 and a GradScaler that
    tries) becomes NaN on every rank, so that all scalers skip the step; errors and masks stay as
    they were, in units of the scale.
    Raises ValueError for a share, or start_iter, that is none.
    """  # fmt: skip

    def __init__(
        self,
        process_group: Any = None,
        phi_global: float | None = 1e-2,
        phi_local: float | None = 1e-3,
        start_iter: int = 10,
        error_accumulation: bool = True,
    ):
        if not isinstance(start_iter, int) or isinstance(start_iter, bool) or start_iter < 1:
            raise ValueError(f"start_iter: got {start_iter!r}, allowed: a whole number >= 1")
        self.process_group, self.start_iter, self.iter = process_group, start_iter, 0
        self.scheme = Scheme(
            "DDP hook", "TCS", phi_global, phi_local, error_accumulation=error_accumulation
        )
        self.bytes_sent = dict.fromkeys(("dense", "shared", "explored"), 0)
        self._slots: dict[Tensor, int] = {}  # parameters, in the order of their first bucket
        self._buckets: dict[tuple[int, ...], Compressor] = {}
        self._loose: dict[int, dict[str, Tensor]] = {}  # by slot, what no bucket has taken up

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors and mask, parameter by parameter, and the counters."""
        slots = dict(self._loose)
        for key, compressor in self._buckets.items():
            slots |= _loosened(key, compressor)
        return {"iter": self.iter, "bytes_sent": dict(self.bytes_sent), "slots": slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned; before the first step."""
        self.iter, self.bytes_sent = int(state["iter"]), dict(state["bytes_sent"])
        self._buckets, self._loose = {}, dict(state["slots"])

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "start_iter": self.start_iter, "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.process_group, self._slots = None, {}
        self.scheme, self.start_iter = saved["scheme"], saved["start_iter"]
        self.load_state_dict(saved["state"])

    def _compressor(self, bucket: dist.GradBucket) -> Compressor:
        """The bucket's own, with what its parameters brought along from other buckets."""
        parameters = bucket.parameters()
        key = tuple(self._slots.setdefault(p, len(self._slots)) for p in parameters)
        if key in self._buckets:
            return self._buckets[key]
        for other in [k for k in self._buckets if set(k) & set(key)]:
            self._loose |= _loosened(other, self._buckets.pop(other))
        sizes = [p.numel() for p in parameters]
        found = [self._loose.pop(slot, None) for slot in key]
        compressor = Compressor(self.scheme, sizes, 1, bucket.buffer().device)
        _take_up(compressor, found)
        self._buckets[key] = compressor
        return compressor


def _loosened(key: tuple[int, ...], compressor: Compressor) -> dict[int, dict[str, Tensor]]:
    """A bucket's errors and shared mask, taken apart: by slot."""
    sizes, shared_K = compressor.layer_sizes, compressor.rule.positions
    errors = compressor.errors_ND[0].split(sizes)
    slots = {slot: {"errors": part.clone()} for slot, part in zip(key, errors, strict=True)}
    if shared_K is not None:
        masks = positions_to_mask(shared_K, compressor.dimension).split(sizes)
        for slot, mask in zip(key, masks, strict=True):
            slots[slot]["mask"] = mask.clone()
    return slots


def _take_up(compressor: Compressor, found: list[dict[str, Tensor] | None]) -> None:
    """The inverse: errors and shared mask of a bucket whose parameters come with these."""
    if None in found:
        return
    sizes = [part["errors"].numel() for part in found]
    if sizes != compressor.layer_sizes:
        raise ValueError(
            f"TCSState: got parameters of {sizes} entries, allowed: {compressor.layer_sizes}, as "
            "saved (the same model with the same bucket_cap_mb)"
        )
    compressor.errors_ND[0] = torch.cat([part["errors"] for part in found])
    if all("mask" in part for part in found):
        mask_D = torch.cat([part["mask"] for part in found]).to(compressor.errors_ND.device)
        compressor.rule.positions = mask_to_positions(mask_D)


def tcs_hook(state: TCSState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: gradients averaged over ranks by TCS, with error accumulation.

    1. The first `start_iter` steps are DDP's all-reduce; the last of them gives the shared mask.
    2. The bucket's gradient is added to this rank's errors; what is largest outside the shared mask
       is this rank's own (Alg. 2, lines 9 to 11).
    3. Values on the shared mask: all_reduce, in the gradients' own type.
    4. Values and positions of its own: all_gather of one encoded message a rank.
    5. Their average is the bucket's gradient on every rank, and its largest entries the next
       shared mask (lines 15 and 5).

        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo")  # torchrun says how many processes there are
        >>> model = DistributedDataParallel(torch.nn.Linear(1000, 10))
        >>> state = tcs_core.TCSState(phi_global=1e-2, phi_local=1e-3, start_iter=2)
        >>> model.register_comm_hook(state, tcs_core.tcs_hook)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in range(5):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 1000)).square().mean().backward()
        ...     optimizer.step()
        >>> state.iter
        5
        >>> state.bytes_sent
        {'dense': 80080, 'shared': 1212, 'explored': 258}

    Raises ValueError naming the rank whose message can't be used or whose mask is another.
    """
    group = state.process_group or dist.group.WORLD
    compressor = state._compressor(bucket)
    step, state.iter = state.iter, state.iter + bucket.is_last()
    if step < state.start_iter or (state.scheme.phi_global and compressor.rule.positions is None):
        return _reduced(state, bucket, compressor, step + 1 >= state.start_iter, group)
    return _exchanged(state, bucket, compressor, step, group)


def _reduced(
    state: TCSState, bucket: dist.GradBucket, compressor: Compressor, last: bool, group: Any
) -> torch.futures.Future[Tensor]:
    """Step 1: plain all-reduce."""
    buffer = bucket.buffer().div_(group.size())
    state.bytes_sent["dense"] += buffer.nbytes
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()

    def averaged(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        update_D = done.value()[0]
        if last and update_D.isfinite().all():
            compressor.rule.observe(update_D.float())
        return update_D

    return future.then(averaged)


# DDP compares annotations with the types themselves; here they are text (PEP 563).
tcs_hook.__annotations__ |= {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[Tensor],
}

_AGREED = struct.Struct("<?I")  # in front of a message: all finite, and the shared mask's CRC-32


def _exchanged(
    state: TCSState, bucket: dist.GradBucket, compressor: Compressor, step: int, group: Any
) -> torch.futures.Future[Tensor]:
    """Steps 2 to 5."""
    buffer, ranks = bucket.buffer(), group.size()
    shared_K = compressor.rule.global_mask()
    message, finite = _own_message(compressor, buffer, shared_K)  # step 2
    sent = message.values[: len(shared_K)].to(buffer.dtype)
    compressor.errors_ND[0, shared_K] += message.values[: len(shared_K)] - sent.float()
    own = dataclasses.replace(
        message, values=message.values[len(shared_K) :], sender=group.rank(), round=step
    )
    reduced = (sent if finite else sent + math.nan) / ranks  # step 3
    futures = [dist.all_reduce(reduced, group=group, async_op=True).get_future()]
    state.bytes_sent["shared"] += reduced.nbytes
    agreed = _AGREED.pack(finite, zlib.crc32(shared_K.cpu().numpy().data))
    gathered: list[Tensor] = []
    if len(own.positions):  # step 4
        data = bytearray(agreed + encode_message(own, compressor.up))
        parts = torch.frombuffer(data, dtype=torch.uint8).to(buffer.device)
        gathered = [torch.empty_like(parts) for _ in range(ranks)]
        futures.append(dist.all_gather(gathered, parts, group=group, async_op=True).get_future())
        state.bytes_sent["explored"] += parts.nbytes

    def averaged(done: torch.futures.Future[list[torch.futures.Future]]) -> Tensor:  # step 5
        for future in done.value():
            future.wait()
        update_D = compressor.errors_ND.new_zeros(compressor.dimension)
        well = _add_explored_(update_D, gathered, agreed[1:], compressor.up, step)
        update_D.div_(ranks)[shared_K] = reduced.float()
        if not (well and reduced.isfinite().all()):
            if finite:
                _take_back_(compressor, buffer, shared_K, sent, own)
            return buffer.fill_(math.nan)
        compressor.rule.observe(update_D)
        return buffer.copy_(update_D)

    return torch.futures.collect_all(futures).then(averaged)


def _own_message(compressor: Compressor, buffer: Tensor, shared_K: Tensor) -> tuple[Message, bool]:
    """This rank's side of Alg. 2. False, and zeros, for a gradient that is not finite: its errors
    stay as they were."""
    gradient_D, finite = buffer.float(), bool(buffer.isfinite().all())
    if finite:
        try:
            return compressor._client(0, gradient_D, shared_K), True
        except NotFiniteError:  # the errors themselves have grown beyond float32
            compressor.errors_ND.zero_()
    zeros_D = torch.zeros_like(gradient_D)
    own_K = compressor.rule.local_mask(zeros_D, shared_K)
    return Message(zeros_D[: len(shared_K) + len(own_K)], own_K), False


def _add_explored_(
    update_D: Tensor, gathered: list[Tensor], agreed: bytes, wire: Wire, step: int
) -> bool:
    """Adds every rank's own values; whether all of them were finite."""
    nothing, well = torch.empty(0, dtype=torch.int64), True
    for rank, part in enumerate(gathered):
        data = part.cpu().numpy().tobytes()
        well = well and bool(data[0])
        if data[1 : _AGREED.size] != agreed:
            raise ValueError(f"rank {rank}: its shared mask is another than here")
        with _of_rank(rank):
            own = decode_message(data[_AGREED.size :], wire, nothing, rank, step)
        own = own.to(update_D.device)
        update_D.index_add_(0, own.positions, own.values)
    return well


def _take_back_(
    compressor: Compressor, buffer: Tensor, shared_K: Tensor, sent: Tensor, own: Message
) -> None:
    """Errors as before a step that is void on some other rank, but for rounding."""
    errors_D = compressor.errors_ND[0]
    errors_D[shared_K] += sent.float()
    errors_D[own.positions] += own.values
    errors_D -= buffer
