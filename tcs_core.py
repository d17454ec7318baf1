"""Time-Correlated Sparsification (TCS) for communication-efficient federated learning.

The paper's machinery in one module: torch and numpy, nothing else. It reproduces E. Ozfatura,
K. Ozfatura and D. Gunduz, "Time-Correlated Sparsification for Communication-Efficient Federated
Learning"; "Alg.", "Eq." and "Sec." below are that paper's.

    theta_D -> local training -> delta_D -> (+ errors_D) -> masks -> values -> Message -> Link
            -> server: average -> update_D -> theta_D

Alg. 2 is `TCS.observe` (line 5), `Federation.play` (6) and `.difference` (7), `Compressor.client`
(lines 9 to 13; Alg. 3, 10 to 14), in it `MaskRule.local_mask` (10), and `.server` (15, 16; Alg. 3,
16, 17); schedules: see `Phase`.

Contents
     1 schemes                           7 the compressor (Alg. 2)
     2 masks (S_top)                     8 the federation (Alg. 1, 3)
     3 positions on the wire (Alg. 4)    9 static rounds: one CUDA graph
     4 values on the wire               10 models
     5 messages and bit budget          11 a communication hook for PyTorch's DDP
     6 links: how a message travels

Symbols (an axis suffix names a tensor's dimensions)
    D parameters   N clients   K kept entries   L layers   H local steps   B batch   P intervals
    theta_D      model parameters            (D,) float32; the model's parameters are views into it
    delta_D      a client's model difference (D,) float32: minus eta times the summed gradients
    errors_ND    accumulated errors e        (N, D) float32
    intended     delta + errors              what a client means to send
    sent         the quantized kept entries  what it sends
    update_D     the server's average        (D,) float32
    phi          share of entries KEPT       K = ceil(phi * D), at least 1

Differences from the paper
     1. Bits: beside the paper's formula, those of the code that really decodes are counted, with
        and without the dense warm-up, which the paper leaves out, and for the downlink.
     2. S_top keeps exactly K entries; of equal magnitudes the lower index wins. (The paper keeps
        every entry that ties with the K-th.)
     3. The first sparse round takes its mask from the last dense (warm-up) update; a run with no
        warm-up makes one dense round first, but for "-NW": every client starts with its own S_top.
     4. Error accumulation keeps the quantization error too: sent + errors == intended. Exact in
        float32 without quantization, and with it while sigma >= 1/2 (Sterbenz); beyond, to one
        rounding of the subtraction. Errors are in units of the model difference, as in the text;
        the authors' published code has them in units of gradients ("-GE" in a scheme's name).
     5. Global momentum follows the paper's text, w <- beta w + g, theta <- theta - eta w; the
        algorithm box puts beta on the wrong term, and the text has a plus before eta. A round ends
        with the server's step, at its own rate; in the boxes the next round begins with it.
     6. Layer-wise fairness: phi^max with ">=" in the paper means phi^min. A layer is one parameter
        tensor. The total stays K; if the fair shares alone exceed K, the K largest of them win. The
        published code takes the fair shared mask from the weights ("-WLF", "-WPLF").
     7. Fractional quantization: intervals (sigma^p u_max, sigma^(p-1) u_max], the last with u_min,
        the smallest NON-ZERO magnitude; zeros take its code and do not enter its mean.
     8. The position code's blocks hold not 1/phi entries but a power of two near it, the one with
        the shortest code: ceil(log2(1/phi)) bits inside a block of 1/phi would waste up to one.
     9. Batch norm's running statistics never influence training; the clients' are averaged only
        when the model is evaluated. (The authors evaluate with the test batch's statistics.)
    10. Weight decay is part of every local gradient.
    11. With local steps a round of the warm-up has H of them too; one published version averages
        after every single step there.
    12. Shortcuts of the ResNets are 1x1 convolutions: only they give 11,173,962 parameters. "H = 2
        and H = 2" means H = 2 and H = 4. The text's "sum" of updates is the algorithm box's mean.

Beyond the paper: suffixes of scheme names, in the table `SUFFIXES`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from reprlib import repr as shorten
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ══ 1. Schemes: what a client sends in one round, by name and by field ════════════════════════════
#    Defaults are the paper's (Sec. III-B). `SUFFIXES` is the one table of what a name can say.


# What lives in other sections, by name: `register_scheme` and `register_quantizer` fill them.
RULES: dict[str, type[MaskRule]] = {}
QUANTIZERS: dict[str, Quantize] = {}  # by the scheme's `quantizer`
FAMILIES: dict[str, dict[str, Any]] = {}  # of names: what each sets beyond the defaults below

Quantize = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (K,), P to codes (K,) and means (P,)


def _between(low: float, high: float, *kinds: type) -> Callable[[Any], bool]:
    return lambda v: type(v) in (kinds or (int, float)) and low <= v <= high


_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("1 to 100 characters", lambda v: isinstance(v, str) and 0 < len(v) <= 100),
    "rule": ("a registered rule", lambda v: isinstance(v, str) and v in RULES),
    "share": ("a share from 1e-12 to 1, or null", lambda v: v is None or _between(1e-12, 1)(v)),
    "count": ("a whole number >= 1", _between(1, 10**9, int)),
    "bits": ("1 to 16, or 32 for float32", lambda v: type(v) is int and (1 <= v <= 16 or v == 32)),
    "beta": ("a number in [0, 1)", lambda v: _between(0, 1)(v) and v < 1),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "times": ("a whole number from 1 to 1000", _between(1, 1000, int)),
    "quantizer": ("a registered quantizer", lambda v: isinstance(v, str) and v in QUANTIZERS),
    "code": ("block or entropy", lambda v: v in ("block", "entropy")),
    "unit": ("difference or gradient", lambda v: v in ("difference", "gradient")),
    "source": ("update or weights", lambda v: v in ("update", "weights")),
}


def _field(default: Any, allowed: str, doc: str) -> Any:
    return field(default=default, metadata={"allowed": allowed, "doc": doc})


@dataclass(frozen=True)  # records are named by its fields and defaults: add, but change none
class Scheme:
    """What a client sends in one round. Make one by name, `Scheme.named("TCS-L4-Q5")`.

    None for a phi means that the scheme has no such mask: top-K has only masks of the clients' own,
    rand-K only a shared one. Raises ValueError naming the field, its value and what is allowed.
    """

    name: str = field(metadata={"allowed": "name"})
    rule: str = _field("TCS", "rule", "which mask rule: a key of RULES")
    phi_global: float | None = _field(1e-2, "share", "of the mask all sides know, Eq. 6")
    phi_local: float | None = _field(1e-3, "share", "of a client's own mask, Sec. II-A")
    phi_min_global: float | None = _field(None, "share", "least of every layer, shared mask")
    phi_min_local: float | None = _field(None, "share", "least of every layer, own mask, Sec. II-C")
    local_steps: int = _field(1, "count", "H, Alg. 1")
    value_bits: int = _field(32, "bits", "q of a value, one of them the sign, Sec. II-F")
    momentum: float = _field(0.0, "beta", "beta, Alg. 3")
    error_accumulation: bool = _field(True, "flag", "Sec. II-B")
    centralized: bool = _field(False, "flag", "one client, no traffic")
    quantizer: str = _field("fractional", "quantizer", "of the clients' values")
    code: str = _field("block", "code", "Alg. 4 and fixed-width values, or both shorter (sec. 5)")
    down_value_bits: int = _field(32, "bits", "of a value from the server")
    down_quantizer: str = _field("fractional", "quantizer", "of the server's values")
    phi_down: float | None = _field(None, "share", "of the server's own mask; null: all that came")
    dense_warmup: bool = _field(True, "flag", "false: sparse from the first round, by own S_top")
    warmup_masks: int = _field(1, "times", "masks so many times as large in a sparse warm-up")
    error_unit: str = _field("difference", "unit", "of errors: the text's, or the authors' code's")
    shared_from: str = _field("update", "source", "what the shared mask is S_top of")

    def __post_init__(self) -> None:
        for key, known in ((f.name, f.metadata["allowed"]) for f in dataclasses.fields(self)):
            value, (allowed, fits) = getattr(self, key), _ALLOWED[known]
            if not fits(value):
                listed = {"rule": ", ".join(RULES), "quantizer": ", ".join(QUANTIZERS)}
                got = f"{key}: got {shorten(value)} ({type(value).__name__})"
                raise ValueError(f"{got}, allowed: {listed.get(known, allowed)}")
            if known in ("share", "beta") and value is not None:
                object.__setattr__(self, key, float(value))
        if self.phi_global is None and self.phi_local is None:
            raise ValueError(f"{self.name}: phi_global and phi_local are null: nothing is sent")

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
        return self.rule == "dense" and not (self.intervals or self.compresses_downlink)

    @staticmethod
    def named(name: str, **changes: Any) -> Scheme:
        """The scheme that the paper, or `register_scheme`, calls `name`.

        A family (TCS, top-K, rand-K, FedAvg, FedSGD, Baseline, or your own) and any suffixes of
        `SUFFIXES` that make sense with it and each other. `changes` replaces fields.
        Raises ValueError for an unknown name or a suffix that makes no sense.
        """
        text = re.sub(r"-\s+", "-", str(name).strip())
        stem = re.sub(r"\+{1,2}$", "", text)
        families = sorted(FAMILIES, key=len, reverse=True)
        family = next((f for f in families if re.match(re.escape(f) + r"(-|$)", stem, re.I)), None)
        if family is None:
            raise ValueError(f"scheme {shorten(name)} is unknown; {_known_schemes()}")
        fields, suffixed = dict(FAMILIES[family]), dict[str, Any]()
        parts, plus = stem[len(family) :].split("-")[1:], text[len(stem) :]
        for part in [*parts, *([plus] if plus else [])]:
            found = _suffix_fields(name, part, fields, suffixed)
            if suffixed.keys() & found.keys():
                raise ValueError(f"scheme {shorten(name)}: {part!r} sets what another suffix sets")
            suffixed |= found
        fields = _with_smaller_masks(fields | suffixed)
        spelt = "-".join([family, *(_spelt(part, fields) for part in parts)]) + plus
        return Scheme(name=spelt, **(fields | changes))


def _intervals(value_bits: int) -> int:
    return 0 if value_bits == 32 else 2 ** (value_bits - 1)


class Suffix(NamedTuple):
    """One line of `SUFFIXES`. `fields` says what it sets, from the family's fields and its number;
    `needs` is what the family must have: "own" and "shared" masks, chosen by "S_top"."""

    form: str
    pattern: str
    says: str
    fields: Callable[[dict, int], dict]
    needs: tuple[str, ...] = ()


def _shares(fields: dict) -> tuple[float | None, float | None]:
    return tuple(fields.get(key, getattr(Scheme, key)) for key in ("phi_global", "phi_local"))


def _down_fields(fields: dict, bits: int) -> dict:
    """Few bits a value leave room for more positions of the server's own than one client has: with
    0.4 of phi_global and 2-bit values, a message is about as long as TCS-Q5's uplink."""
    shared, own = _shares(fields)
    phi_down = 0.4 * shared if shared and own else own
    return {"down_value_bits": bits, "down_quantizer": "lloyd", "phi_down": phi_down}


def _fair(fields: dict, source: str, both: bool) -> dict:
    """Layer-wise fairness of the shared mask and, if asked, of a client's own one (Sec. II-C)."""
    shared, own = _shares(fields)
    found = {"phi_min_global": 1e-3 if shared else None}
    found |= {"phi_min_local": 4e-4 if own else None} if both else {}
    return found if source == "update" else found | {"shared_from": source}


_BOTH, _MASKS = ("S_top", "own", "shared"), ("S_top", "shared")
SUFFIXES: list[Suffix] = [
    Suffix("-L<H>", r"l([1-9]\d{0,8})", "H local steps", lambda f, n: {"local_steps": n}),
    Suffix("-LF", "lf", "layer-wise fairness of both masks",
           lambda f, _: _fair(f, "update", True), ("S_top",)),
    Suffix("-PLF", "plf|pfl", "fairness of the shared mask only",
           lambda f, _: _fair(f, "update", False), _MASKS),
    Suffix("-WLF", "wlf", "like -LF, the shared mask from the weights, as in the authors' code",
           lambda f, _: _fair(f, "weights", True), _BOTH),
    Suffix("-WPLF", "wplf", "like -PLF, from the weights",
           lambda f, _: _fair(f, "weights", False), _BOTH),
    Suffix("-Global Momentum", "(?:global )?momentum", "beta = 0.9; of a Baseline -Momentum",
           lambda f, _: {"momentum": 0.9}, ("anything",)),
    Suffix("-GE", "ge", "errors in units of gradients, as in the authors' code",
           lambda f, _: {"error_unit": "gradient"}),
    Suffix("-E<n>", r"e([1-9]\d?)", "phi_local = n/1000",
           lambda f, n: {"phi_local": n / 1000}, _BOTH),
    Suffix("-K<n>", r"k([1-9]\d?)", "all masks n times smaller",
           lambda f, n: {"smaller": n}, ("masks",)),
    Suffix("-D<q>", r"d([1-9]\d?)", "a compressed downlink", _down_fields),
    Suffix("-NW", "nw", "no warm-up", lambda f, _: {"dense_warmup": False}),
    Suffix("-W<n>", r"w([1-9]\d{0,2})", "a sparse warm-up, masks n times as large",
           lambda f, n: {"dense_warmup": False, "warmup_masks": n}, _BOTH),
    Suffix("+", r"\+", "shorter codes, losing nothing", lambda f, _: {"code": "entropy"}),
    Suffix("++", r"\+\+", "+, -D2 and (but for -W) -NW",
           lambda f, _: {"code": "entropy", "dense_warmup": False, **_down_fields(f, 2)}),
]  # fmt: skip


def _suits(needs: Iterable[str], fields: dict) -> bool:
    """Whether a family has what a suffix needs."""
    rule, (shared, own) = fields.get("rule"), _shares(fields)
    has = {"S_top": rule not in ("dense", "rand-K"), "masks": rule != "dense"}
    has |= {"anything": True, "own": bool(own), "shared": bool(shared)}
    return all(has[need] for need in needs)


def _suffix_fields(name: str, part: str, fields: dict, suffixed: dict) -> dict:
    """The fields that one suffix of a scheme's name sets."""
    found = ((s, re.fullmatch(s.pattern, part.lower())) for s in SUFFIXES)
    suffix, match = next(((s, m) for s, m in found if m), (None, None))
    if fields.get("centralized") and (suffix is None or "anything" not in suffix.needs):
        what = f"{shorten(part)} makes no sense in centralized training"
        raise ValueError(f"scheme {shorten(name)}: {what}")
    if suffix is None or not _suits(suffix.needs, fields):
        raise ValueError(f"scheme {shorten(name)}: {shorten(part)} is unknown; {_known_schemes()}")
    set_ = suffix.fields(fields, int(match[1]) if match.groups() and match[1] else 0)
    if part == "++" and suffixed.get("warmup_masks"):
        set_.pop("dense_warmup")
    return set_


def _spelt(part: str, fields: dict) -> str:
    """A suffix as names of records have it, however it was typed."""
    if part.lower().endswith("momentum"):
        return "Momentum" if fields.get("centralized") else "Global Momentum"
    return part.upper().replace("PFL", "PLF")


def _known_schemes() -> str:
    suffixes = ", ".join(s.form for s in SUFFIXES)
    return f"known: {', '.join(FAMILIES)}, with {suffixes} where it makes sense (TCS-L4-Q5++)"


def _with_smaller_masks(fields: dict) -> dict:
    """-K<n>: every share that the rest of the name sets, divided by n."""
    fields = dict(fields)
    times = fields.pop("smaller", 1)
    keys = ("phi_global", "phi_local", "phi_min_global", "phi_min_local", "phi_down")
    shares = {key: fields.get(key, getattr(Scheme, key)) for key in keys if times > 1}
    return fields | {key: share / times for key, share in shares.items() if share}


def register_scheme(name: str, **fields: Any) -> Callable[[type[MaskRule]], type[MaskRule]]:
    """Class decorator: a family of schemes of your own, with -L<H>, -Q<q>, ... for free.

        @register_scheme("TCS-Average", phi_global=1e-2, phi_local=1e-3)
        class RunningAverage(TCS):
            def observe(self, update_D):
                self.average_D = 0.9 * getattr(self, "average_D", 0.0) + update_D.abs()
                super().observe(self.average_D)

    `fields` are those of Scheme. A name of your own is replaced; one that is known can't be taken.
    """
    again = name in RULES and RULES[name].__module__ != __name__
    try:
        known = bool(Scheme.named(name))
    except ValueError:
        known = name in RULES or name.endswith("+")
    if known and not again:
        raise ValueError(f"scheme {name!r} is one of the core's own: choose another name")
    allowed = sorted({f.name for f in dataclasses.fields(Scheme)} - {"name", "rule"})
    if unknown := sorted(fields.keys() - set(allowed)):
        raise ValueError(f"unknown field: {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    Scheme(name=name, rule="dense", **fields)  # raises for a field that is wrong

    def register(cls: type[MaskRule]) -> type[MaskRule]:
        RULES[name], FAMILIES[name] = cls, {"rule": name, **fields}
        return cls

    return register


def register_quantizer(letter: str, name: str) -> Callable[[Quantize], Quantize]:
    """Decorator: a quantizer of your own, which -<letter><q> in a scheme's name then asks for.

        @register_quantizer("U", "uniform")
        def uniform_quantize(values_K, intervals):
            edge = (values_K.abs().max() / intervals).clamp(min=1e-30)  # they may all be 0
            interval_K = (values_K.abs() / edge).ceil().clamp(1, intervals).long() - 1
            means_P = edge * (torch.arange(intervals, device=edge.device) + 0.5)
            return (interval_K + intervals * (values_K < 0)).int(), means_P

    It maps finite values (K,) float32, one or more, and P = 2^(q-1) to codes (K,) int32, which
    interval and plus P for a negative value, and each interval's mean magnitude, (P,) float32 >= 0.
    In static rounds the host may look at none of its values. The suffix is for what clients send;
    the field `down_quantizer` for what the server sends. ValueError for a letter taken or a name of
    the core's.
    """  # fmt: skip
    form, pattern = f"-{letter}<q>", rf"{letter.lower()}([1-9]\d?)"
    says = f"values of q bits, quantizer {name}"
    others = [s for s in SUFFIXES if s.says != says]
    if not letter.isalpha() or any(re.fullmatch(s.pattern, f"{letter.lower()}5") for s in others):
        raise ValueError(f"letter: got {letter!r}, allowed: letters that no suffix has")
    if getattr(QUANTIZERS.get(name), "__module__", None) == __name__:
        raise ValueError(f"quantizer {name!r} is one of the core's own: choose another name")
    suffix = Suffix(form, pattern, says, lambda f, n: {"value_bits": n, "quantizer": name})
    SUFFIXES[:] = [*others, suffix]

    def register(quantize: Quantize) -> Quantize:
        QUANTIZERS[name] = quantize
        return quantize

    return register


# ══ 2. Masks: S_top(v, K), plain and layer-wise (Sec. II-B, II-C) ═════════════════════════════════
#    A mask is a (D,) bool tensor, or its sorted positions: K numbers, the compressor's form.


@lru_cache
def kept(phi: float, dimension: int) -> int:
    """K = ceil(phi * D), at least 1; rounding errors above a whole number do not count."""
    return max(1, math.ceil(round(phi * dimension, 9)))


def top_k_positions(
    vector_D: Tensor, k: int, excluded: Tensor | None = None, floor: float = 0.0
) -> Tensor:
    """Positions of the k entries of largest magnitude: S_top as int64 (k,), ascending.

    Of equal magnitudes the lower index wins. `excluded`, positions or a mask, never enter. `floor`,
    a guess of the k-th magnitude from below, makes it faster, and of numbers no other choice.
    ValueError if k is not in 0..D minus the excluded, or for a NaN, which a floor may pass over.
    """
    return _filtered(vector_D.detach(), k, _outside(vector_D, excluded), floor)[0]


def _outside(vector_D: Tensor, excluded: Tensor | None) -> Tensor | None:
    """The excluded positions, or mask, as a mask on the vector's device; None if there are none."""
    if excluded is None or excluded.dtype == torch.bool:
        return excluded
    return positions_to_mask(excluded.to(vector_D.device), len(vector_D))


Array = Any  # Tensor or np.ndarray


def _array(tensor: Tensor) -> Array:
    """On the CPU an array, since numpy's calls cost less, if numpy has the type."""
    plain = tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16
    return tensor.numpy() if plain else tensor


def _filtered(
    vector_D: Tensor, k: int, excluded_D: Tensor | None, floor: float
) -> tuple[Tensor, float]:
    """S_top and the k-th magnitude. Magnitudes change slowly, so a `floor` from last time leaves
    few candidates to choose from; if too few, it is lowered, and at last all are looked at."""
    values_D, outside_D = _array(vector_D), cast(Any, excluded_D)
    if outside_D is not None and isinstance(values_D, np.ndarray):
        outside_D = outside_D.numpy()
    for lowered in (floor, floor / 2) if floor > 0 and k else ():
        near = _at_least(values_D, lowered)
        if outside_D is not None:
            near = near[~outside_D[near]]
        if len(near) >= k:
            chosen, kth = _largest(abs(values_D[near]), k, len(near))
            return torch.as_tensor(near[chosen]), kth
    magnitudes_D, eligible = abs(values_D), len(values_D)
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
    starts = range(0, len(values_D), _PIECE)
    return np.concatenate([_places(abs(values_D[s : s + _PIECE]) >= floor) + s for s in starts])


def _places(mask_D: Array) -> Array:
    """Positions of a mask's ones, ascending."""
    return (mask_D.nonzero(as_tuple=True) if isinstance(mask_D, Tensor) else mask_D.nonzero())[0]


def _largest(magnitudes_D: Array, k: int, eligible: int) -> tuple[Array, float]:
    """Positions of the k largest of `magnitudes_D`, ascending, and the k-th largest itself."""
    if not 0 <= k <= eligible:
        raise ValueError(f"k: got {k}, allowed: 0 to {eligible} (entries that may be chosen)")
    if k == 0:
        return _places(magnitudes_D[:0] > 0), math.inf
    kth = _kth_largest(magnitudes_D, k)
    if math.isnan(kth):
        raise ValueError("the vector holds a NaN: its largest entries are not defined")
    chosen = _places(magnitudes_D >= kth)
    if len(chosen) > k:
        tied = magnitudes_D[chosen] == kth
        surplus = tied & (tied.cumsum(0) > k - (len(chosen) - tied.sum()))
        chosen = chosen[~surplus]
    return chosen, kth


def _top(magnitudes_D: Array, k: int) -> Array:
    if k == 1 and isinstance(magnitudes_D, np.ndarray):  # whose argmax is the first of equals
        return magnitudes_D.argmax(0, keepdims=True)
    return _largest(magnitudes_D, k, len(magnitudes_D))[0]


def _kth_largest(magnitudes_D: Array, k: int) -> float:
    """The k-th largest number; NaN if one of the k is NaN."""
    if isinstance(magnitudes_D, Tensor):
        return float(magnitudes_D.topk(k, sorted=False).values.min())
    width = max(8 * k, 512)
    if len(magnitudes_D) > 4 * width:  # the k-th of the columns' maxima bounds it from below
        maxima = magnitudes_D[: len(magnitudes_D) // width * width].reshape(-1, width).max(0)
        magnitudes_D = magnitudes_D[~(magnitudes_D < _kth_largest(maxima, k))]
    parted = np.partition(magnitudes_D, len(magnitudes_D) - k)
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

    Every layer l gets its ceil(phi_min * d_l) largest entries, or all that are eligible; the rest
    of k goes by magnitude. Shares that add up to more than k compete by magnitude for k places.
    """
    magnitudes_D, eligible = abs(_array(vector_D.detach())), len(vector_D)
    if sum(layer_sizes) != eligible:
        raise ValueError(f"layer_sizes: got {sum(layer_sizes)} in all, allowed: {eligible}")
    if excluded is not None:
        magnitudes_D[_array(excluded)] = -1.0
        eligible -= int(excluded.sum()) if excluded.dtype == torch.bool else len(excluded)
    if not 0 <= k <= eligible:
        raise ValueError(f"k: got {k}, allowed: 0 to {eligible} (entries that may be chosen)")
    if (magnitudes_D != magnitudes_D).any():
        raise ValueError("the vector holds a NaN: its largest entries are not defined")
    top = static_top_k if vector_D.is_cuda else _top  # a GPU would wait every time
    join = torch.cat if isinstance(magnitudes_D, Tensor) else np.concatenate
    layers = zip(layer_sizes, accumulate(layer_sizes), strict=True)
    fair_F = join([e - d + top(magnitudes_D[e - d : e], kept(phi_min, d)) for d, e in layers])
    fair_F = fair_F[magnitudes_D[fair_F] >= 0]
    if len(fair_F) >= k:
        return torch.as_tensor(fair_F[_top(magnitudes_D[fair_F], k)])
    magnitudes_D[fair_F] = -1.0
    rest, _ = _largest(magnitudes_D, k - len(fair_F), eligible - len(fair_F))
    return torch.as_tensor(join([fair_F, rest])).sort().values


def in_common(one_K: Tensor, other_K: Tensor) -> Tensor:
    """How many positions two masks of K entries share, both ascending: int64 ()."""
    nearest_K = torch.searchsorted(one_K, other_K).clamp_(max=len(one_K) - 1)
    return (one_K[nearest_K] == other_K).sum()


def positions_to_mask(positions_K: Tensor, dimension: int) -> Tensor:
    """(D,) bool mask with ones at the positions."""
    mask_D = torch.zeros(dimension, dtype=torch.bool, device=positions_K.device)
    return mask_D.index_fill_(0, positions_K, True)


def mask_to_positions(mask_D: Tensor) -> Tensor:
    """Positions of a (D,) bool mask's ones, ascending: int64 (K,)."""
    return torch.as_tensor(_places(_array(mask_D)))


def top_k_mask(vector_D: Tensor, k: int) -> Tensor:
    """S_top(v, K), Sec. II-B: (D,) bool with exactly k ones; of ties the lower index wins."""
    return positions_to_mask(top_k_positions(vector_D, k), len(vector_D))


# ══ 3. Positions on the wire: the sparse position code (Sec. II-E, Alg. 4) ════════════════════════
#    Blocks of about 1/phi entries. "1" and the place inside its block for every entry, "0" at the
#    end of every block: log2(1/phi) + 2 bits an entry when phi of them are set.


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
    if dimension < 1 or not block >= 1:
        raise ValueError(f"dimension, block: got {dimension}, {block}, allowed: >= 1")


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
        got = f"{tuple(positions_K.shape)} {positions_K.dtype}"
        raise ValueError(f"positions: got shape {got}, allowed: one dimension, int64")
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
    width = intra_block_bits(block)
    starts_K = torch.from_numpy(_flag_starts(bits, width)).to(bits.device)
    count = len(starts_K)
    if len(bits) != (length := position_bits(count, dimension, block)):
        raise ValueError(f"bits: got {len(bits)} with {count} entries, allowed: {length}")
    block_index_K = starts_K - torch.arange(count, device=bits.device) * (1 + width)
    inside = bits[starts_K.unsqueeze(1) + torch.arange(1, width + 1, device=bits.device)].long()
    inside_K = (inside << torch.arange(width - 1, -1, -1, device=bits.device)).sum(1)
    if (inside_K >= block).any():
        raise ValueError(f"bits: a position of {int(inside_K.max())} inside a block of {block}")
    positions_K = block_index_K * block + inside_K
    _check_positions(positions_K, dimension)
    return positions_K


def _flag_starts(bits: Tensor, width: int) -> np.ndarray:
    """Where the "1" flags of the entries stand: after a flag, the next 1 beyond its position."""
    stream, starts = bits.cpu().numpy().tobytes(), []
    find, place = stream.find, stream.find(b"\x01")
    while place >= 0:
        starts.append(place)
        place = find(b"\x01", place + 1 + width)
    if starts and starts[-1] + width >= len(stream):
        raise ValueError("bits: the stream ends inside an entry")
    return np.fromiter(starts, np.int64, len(starts))


# ══ 4. Values on the wire: fractional quantization and the scaled sign (Sec. II-F) ════════════════


def scaled_sign(values_K: Tensor) -> Tensor:
    """Q(u) = ||u||_1 / d * sign(u), Eq. 19: (K,) float32; one bit a value and one mean."""
    return values_K.abs().mean() * values_K.sign() if len(values_K) else values_K.clone()


def interval_edges(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """The P - 1 inner edges sigma^p * u_max, ascending, in float64, and sigma (Eq. 20, 21)."""
    magnitudes_K = values_K.abs().double()
    u_max, u_min = magnitudes_K.max(), torch.where(magnitudes_K > 0, magnitudes_K, math.inf).min()
    sigma = torch.where(u_max > 0, u_min / u_max, 1.0) ** (1.0 / intervals)
    powers = torch.arange(intervals - 1, 0, -1, device=magnitudes_K.device)
    return u_max * sigma**powers, sigma


def fractional_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Fractional quantization, Eq. 20 to 22: codes (K,) int32 and means (P,) float32.

    Interval p = 1..P holds magnitudes in (sigma^p u_max, sigma^(p-1) u_max]. A code is p - 1, plus
    P for a negative value: q = log2(P) + 1 bits. Zeros take the last interval, a positive sign, and
    stay out of its mean, so |Q(u) - u| <= (1 - sigma) / sigma * |u| for every u != 0. Empty
    intervals have mean 0. ValueError for no value, one that is not finite, or intervals < 1.
    """
    if intervals < 1:
        raise ValueError(f"intervals: got {intervals}, allowed: a whole number >= 1")
    if not len(values_K) or not values_K.isfinite().all():
        what = "NaN or infinity" if len(values_K) else "none"
        raise ValueError(f"values: got {what}, allowed: finite numbers")
    return _fractional(values_K, intervals)


def _sums(interval_K: Tensor, magnitudes_K: Tensor, intervals: int) -> Tensor:
    """Every interval's sum of magnitudes and number of magnitudes that are not 0, (2, P)."""
    sums_2P = magnitudes_K.new_zeros(2, intervals)
    sums_2P[0].index_add_(0, interval_K, magnitudes_K)
    sums_2P[1].index_add_(0, interval_K, (magnitudes_K > 0).double())
    return sums_2P


def _sums_at_once(interval_K: Tensor, magnitudes_K: Tensor, intervals: int) -> Tensor:
    """`_sums` for a GPU, where additions to a place wait for each other and come in any order."""
    own_PK = interval_K == torch.arange(intervals, device=interval_K.device)[:, None]
    parts_2K = torch.stack([magnitudes_K, (magnitudes_K > 0).double()])
    return torch.stack([torch.where(own_PK, part_K, 0.0).sum(1) for part_K in parts_2K])


@register_quantizer("Q", "fractional")
def _fractional(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """`fractional_quantize`, the values never looked at by the host."""
    magnitudes_K = values_K.abs().double()
    edges, _ = interval_edges(magnitudes_K, intervals)
    interval_K = intervals - 1 - torch.bucketize(magnitudes_K, edges, right=False)
    interval_K.masked_fill_(magnitudes_K == 0, intervals - 1)
    several = intervals <= 64 and magnitudes_K.is_cuda
    sums_2P = (_sums_at_once if several else _sums)(interval_K, magnitudes_K, intervals)
    means_P = (sums_2P[0] / sums_2P[1].clamp(min=1)).float()
    return (interval_K + intervals * (values_K < 0)).int(), means_P


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


def fractional_dequantize(codes_K: Tensor, means_P: Tensor) -> Tensor:
    """Q_f(u), Eq. 22: the mean of the code's interval with the code's sign, (K,) float32.

    Raises ValueError for a code outside 0..2P - 1.
    """
    intervals = len(means_P)
    if len(codes_K) and not 0 <= int(codes_K.min()) <= int(codes_K.max()) < 2 * intervals:
        raise ValueError(f"codes: allowed: 0 to {2 * intervals - 1}")
    return _dequantize(codes_K, means_P)


def _dequantize(codes_K: Tensor, means_P: Tensor) -> Tensor:
    return torch.cat([means_P, -means_P]).index_select(0, codes_K)


# ══ 5. Messages and the bit budget (Sec. II-A, II-E; the last column of Tables 1 and 2) ═══════════
#    Bits are counted three ways, kept apart: by the paper's formula, as the exact length of a
#    message's code, and as bytes that really decode: the code in whole bytes, and OVERHEAD_BYTES.
#    Code "block" is the paper's, q bits a value and Alg. 4; "entropy" has fewer bits for the same.


def bit_budget(scheme: Scheme | str, dimension: int | None = None) -> float:
    """The paper's formula: uplink bits per parameter per local iteration.

    (q (phi_global + phi_local) + phi_local (log2(1 / phi_local) + 2)) / H. With a `dimension` D,
    the phis are those of whole numbers K and the 32 P bits of the quantizer's means count too.
    nan for centralized training: nothing is sent.
    """
    scheme = scheme if isinstance(scheme, Scheme) else Scheme.named(scheme)
    if scheme.centralized:
        return math.nan
    phi_global, phi_local = scheme.phi_global or 0.0, scheme.phi_local or 0.0
    means = 32 * scheme.intervals / dimension if dimension else 0.0
    if dimension is not None:
        phis = (kept(phi, dimension) / dimension if phi else 0.0 for phi in (phi_global, phi_local))
        phi_global, phi_local = phis
    values = scheme.value_bits * (phi_global + phi_local)
    positions = phi_local * (math.log2(1 / phi_local) + 2) if phi_local else 0.0
    return (values + means + positions) / scheme.local_steps


SERVER = 0xFFFF  # the sender of a downlink message
MESSAGE_VERSION = 1  # to be raised with any change of what stands in a message
_AGREED, _DENSE, _PLAIN = range(3)  # kinds: in the code agreed on, dense, in code "block"
# Little-endian: version, kind, sender, round, Wire.tag, own positions; the code; their CRC-32.
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
        """Finite values on shared and own positions, quantized if `value_bits` is not 32."""
        if value_bits == 32:
            return Message(intended_K, positions, sender, round)
        intervals = _intervals(value_bits)
        codes, means = intended_K.int(), intended_K.new_zeros(intervals)
        if len(intended_K):
            codes, means = QUANTIZERS[quantizer](intended_K, intervals)
        got = codes.dtype, tuple(codes.shape), means.dtype, tuple(means.shape)
        fit = torch.int32, tuple(intended_K.shape), torch.float32, (intervals,)
        if got != fit:
            raise ValueError(f"quantizer {quantizer}: got {got}; allowed: {fit}, codes and means")
        return Message(_dequantize(codes, means), positions, sender, round, codes, means)

    @staticmethod
    def dense_of(values_D: Tensor, sender: int = 0, round: int = 0) -> Message:
        """Everything, in 32 bits a value: a round of the warm-up, or of FedAvg."""
        none = torch.empty(0, dtype=torch.int64, device=values_D.device)
        return Message(values_D, none, sender, round, dense=True)

    def add_to_(self, sum_D: Tensor, shared_K: Tensor | None, weight: float = 1.0) -> None:
        """Adds the values, `weight` times, where they belong in (D,)."""
        if self.dense:
            sum_D.add_(self.values, alpha=weight)
        else:
            places = torch.cat([shared_K, self.positions])
            sum_D.index_add_(0, places, self.values, alpha=weight)

    def to(self, device: Any) -> Message:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **cast(Any, moved))


@dataclass(frozen=True)  # its fields, in this order, are the tag in every message
class Wire:
    """One direction of a scheme's traffic, as both sides know it before the first message."""

    value_bits: int
    entropy: bool
    layer_sizes: tuple[int, ...]

    @staticmethod
    def up(scheme: Scheme, layer_sizes: Iterable[int]) -> Wire:
        return Wire(scheme.value_bits, scheme.code == "entropy", tuple(map(int, layer_sizes)))

    @staticmethod
    def down(scheme: Scheme, layer_sizes: Iterable[int]) -> Wire:
        return Wire(scheme.down_value_bits, scheme.code == "entropy", tuple(map(int, layer_sizes)))

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

    def bits(self, message: Message) -> int:
        """Exact length of the message's code in bits, without the overhead."""
        if message.dense:
            return 32 * self.dimension
        if self.entropy:
            return 8 * len(_code(message, self)[1])
        return self.block_code_bits(len(message.values), len(message.positions))

    def block_code_bits(self, values: int, own: int) -> int:
        """Bits of code "block" for so many values and positions."""
        bits = self.value_bits * values + 32 * self.intervals
        block = block_for(own, self.dimension)
        return bits + (position_bits(own, self.dimension, block) if own else 0)


def encode_message(message: Message, wire: Wire) -> bytes:
    """The message as bytes: header, code, checksum.

    8 * len(bytes) is wire.bits(message), rounded up to whole bytes, plus 8 * OVERHEAD_BYTES.
    Raises ValueError for NaN, infinity, or a sender, round or position out of range.
    """
    who, when = message.sender, message.round
    if not 0 <= who <= SERVER or not 0 <= when < 2**32:
        raise ValueError(f"sender, round: got {who}, {when}, allowed: below 2^16 and 2^32")
    if not message.values.isfinite().all():
        raise ValueError("values: NaN or infinity can't be sent")
    _check_positions(message.positions, wire.dimension)
    kind, code = _code(message, wire)
    data = _HEADER.pack(MESSAGE_VERSION, kind, who, when, wire.tag, len(message.positions)) + code
    return data + _CHECKSUM.pack(zlib.crc32(data))


def _code(message: Message, wire: Wire) -> tuple[int, bytes]:
    """The message's kind and code. Code "entropy" gives way to "block" where that is shorter."""
    if message.dense:
        return _DENSE, _float_bytes(message.values)
    if not wire.entropy:
        return _AGREED, _block_code(message, wire)
    code = _entropy_code(message, wire)
    if 8 * len(code) < 8 + wire.block_code_bits(len(message.values), len(message.positions)):
        return _AGREED, code
    return _PLAIN, _block_code(message, wire)


def decode_message(
    data: bytes, wire: Wire, shared_K: Tensor | None = None, sender: int | None = None,
    round: int | None = None, count: int | None = None,
) -> Message:  # fmt: skip
    """The message in `data`, on the CPU: exactly what was encoded, or ValueError.

    `shared_K` int64, ascending: the positions that both sides know; None if a dense message is
    expected. `sender`, `round` and `count` (of own positions), if given, are those expected. `data`
    may come from anyone: all of it is checked, values (finite) and positions (in range, ascending,
    not shared) too; memory stays within a small multiple of its length and of the shared positions.
    """
    version, kind, who, when, own = _checked_header(data, wire)
    plain = kind == _PLAIN and wire.entropy
    found = (version, _AGREED if plain else kind, who, when, own)
    dense = shared_K is None
    wanted = (MESSAGE_VERSION, int(dense), sender, round, 0 if dense else count)
    names = ("version", "kind", "sender", "round", "own positions")
    for name, got, expected in zip(names, found, wanted, strict=True):
        if expected is not None and got != expected:
            raise ValueError(f"message: {name}: got {got}, allowed: {expected}")
    code = memoryview(data)[_HEADER.size : -_CHECKSUM.size]
    if shared_K is None:
        message = Message.dense_of(_floats(code, wire.dimension), who, when)
    else:
        read = _read_entropy_code if wire.entropy and not plain else _read_block_code
        shared_K = shared_K.cpu()
        if own > wire.dimension - len(shared_K):
            raise ValueError(f"message: {own} positions, allowed: those that are not shared")
        message = dataclasses.replace(read(code, len(shared_K), own, wire), sender=who, round=when)
        if torch.isin(message.positions, shared_K).any():
            raise ValueError("message: positions of the shared mask, allowed: only others")
    if not message.values.isfinite().all():
        raise ValueError("message: a value is NaN or infinity")
    return message


def _checked_header(data: bytes, wire: Wire) -> tuple[int, int, int, int, int]:
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) < OVERHEAD_BYTES:
        raise ValueError(f"message: allowed: {OVERHEAD_BYTES} bytes or more")
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
    if len(code) != (size := floats + -(-(coded + places) // 8)):
        raise ValueError(f"message: got {len(code)} bytes of code, allowed: {size}")
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
#    Signs a bit each; intervals Huffman-coded by zlib; positions as Golomb-Rice coded gaps.


def _entropy_code(message: Message, wire: Wire) -> bytes:
    own, shared = len(message.positions), len(message.values) - len(message.positions)
    if wire.intervals:
        codes = message.codes.cpu().numpy()
        interval = (codes & wire.intervals - 1).astype(np.uint16)
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
    symbols, codes = numbers.astype(np.uint8).tobytes(), {}
    for choice in (1, 2) if width <= 8 else ():
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, _STRATEGIES[choice])
        codes[choice] = deflate.compress(symbols) + deflate.flush()
    sizes = {0: -(-len(numbers) * width // 8)} | {key: len(code) for key, code in codes.items()}
    best = min(sizes, key=lambda key: sizes[key])
    return bytes([best]) + (codes[best] if best else _packed([_to_bits(numbers, width)]))


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
    coded = _rice_code(counts, np.full(len(counts), width))
    return [_to_bits(np.array([width]), _WIDTH_BITS), *coded]


def _gap_code(positions: np.ndarray, layer_sizes: Iterable[int]) -> bytes:
    """A bit that says "by layers" and their counts, or not; gaps. The shorter of the two."""
    sizes = np.array(layer_sizes)
    whole_or_layers = enumerate((sizes.sum(keepdims=True), sizes))
    options = [[np.array([i], np.uint8), *_gap_bits(positions, s)] for i, s in whole_or_layers]
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


# ══ 6. Links: how a message gets to the other side ════════════════════════════════════════════════
#    Counted only; as real bytes, from which a message that can't be accepted is left out; between
#    processes. A compressor is handed one, and asks it nothing about what it is.


class ClientError(ValueError):
    """Something is wrong with what a client sends; `client` says whose (or SERVER)."""

    round: int | None = None  # where a static round says so

    def __init__(self, client: int, what: str):
        super().__init__(f"{'server' if client == SERVER else f'client {client}'}: {what}")
        self.client = client

    def __reduce__(self) -> Any:  # by pickle, from another process
        return ValueError.__new__, (type(self), *self.args), vars(self)


class NotFiniteError(ClientError):
    """An update holds NaN or infinity: a client's or, by a sum that overflows, the server's."""

    def __init__(self, client: int):
        super().__init__(client, "the update is not finite (NaN or infinity)")


class MessageError(ClientError):
    """A message that can't be accepted: see `decode_message`."""


Send = Callable[[], "list[Message | None]"]  # sends what a process's clients have to send


class Agreed(NamedTuple):
    """What both sides know before a round's messages: `shared_K` is None if it is dense, `own` the
    number of a client's own positions, None if that is open."""

    up: Wire
    down: Wire
    clients: int
    round: int
    shared_K: Tensor | None
    own: int | None
    device: Any


class Link:
    """Messages arrive as they were sent; their exact sizes are counted.

    After a round `up` has every accepted message's bits of code and bytes in all, `down` the
    server's, `refused` the clients whose message was left out.
    """

    def __init__(self) -> None:
        self.up: list[tuple[int, int]] = []
        self.down = (0, 0)
        self.refused: list[int] = []

    def begin(self, agreed: Agreed) -> None:
        """A round begins."""
        self.agreed, self.up, self.refused = agreed, [], []

    def clients(self, count: int) -> range:
        """Which of `count` clients are of this process."""
        return range(count)

    def gather(self, send: Send, chosen: list[int]) -> list[Message | None]:
        """All chosen clients' messages, in their order; `send` sends those of this process."""
        return send()

    def send_up(self, message: Message) -> Message | None:
        """A client's message as the server has it; None if it is left out."""
        self.up.append(_size(self.agreed.up.bits(message)))
        return message

    def send_down(self, message: Message) -> Message:
        """The server's message as all clients have it."""
        self.down = _size(self.agreed.down.bits(message))
        return message


def _size(bits: int) -> tuple[int, int]:
    return bits, OVERHEAD_BYTES + -(-bits // 8)


class ByteLink(Link):
    """Every message becomes bytes and is decoded before it is used.

    A client's message that can't be accepted raises MessageError or, with `on_bad` "skip", is left
    out: the average is over the others, and the client keeps all that it meant to send (of a dense
    scheme, which keeps no errors, it is lost).
    `channel(sender, data)` is what the network makes of the bytes: a transport, or an attack.
    """

    def __init__(self, on_bad: str = "stop", channel: Callable[[int, bytes], bytes] | None = None):
        super().__init__()
        if on_bad not in ("stop", "skip"):
            raise ValueError(f"on_bad: got {on_bad!r}, allowed: stop or skip")
        self.on_bad, self.channel = on_bad, channel or (lambda sender, data: data)

    def send_up(self, message: Message) -> Message | None:
        data = self.channel(message.sender, encode_message(message, self.agreed.up))
        return self._accept(data, message.sender)

    def send_down(self, message: Message) -> Message:
        data = self.channel(SERVER, encode_message(message, self.agreed.down))
        arrived, self.down = self._decoded(data, self.agreed.down, SERVER, None)
        return arrived

    def _accept(self, data: bytes, sender: int) -> Message | None:
        try:
            message, size = self._decoded(data, self.agreed.up, sender, self.agreed.own)
        except MessageError:
            if self.on_bad == "stop":
                raise
            self.refused.append(sender)
            return None
        self.up.append(size)
        return message

    def _decoded(self, data: bytes, wire: Wire, sender: int, own: int | None) -> tuple:
        """The message, and its size as `up` has it."""
        agreed = self.agreed
        try:
            message = decode_message(data, wire, agreed.shared_K, sender, agreed.round, own)
        except ValueError as error:
            raise MessageError(sender, str(error)) from error
        bits = 8 * (len(data) - OVERHEAD_BYTES) if wire.entropy else wire.bits(message)
        return message.to(agreed.device), (bits, len(data))


class ProcessLink(ByteLink):
    """Clients in several processes, a block of them in each; every process is the server too.

    `exchange(work)` gives what `work()`, a list of bytes, returned in every process, in their
    order; what it raises in one, all raise. Everything that all know is computed in each alike.
    """

    def __init__(
        self, exchange: Callable[[Callable[[], list[bytes]]], list[list[bytes]]],
        process: int, processes: int, on_bad: str = "stop",
    ):  # fmt: skip
        super().__init__(on_bad)
        self.exchange, self.process, self.processes = exchange, process, processes
        self._outbox: list[bytes] = []

    def clients(self, count: int, process: int | None = None) -> range:
        process = self.process if process is None else process
        return range(process * count // self.processes, (process + 1) * count // self.processes)

    def _accept(self, data: bytes, sender: int) -> Message | None:
        self._outbox.append(data)
        return super()._accept(data, sender)

    def gather(self, send: Send, chosen: list[int]) -> list[Message | None]:
        def sent() -> list[bytes]:
            self._outbox = []
            send()
            return self._outbox

        arrived = [data for part in self.exchange(sent) for data in part]
        owned = [self.clients(self.agreed.clients, p) for p in range(self.processes)]
        senders = [n for own in owned for n in chosen if n in own]
        data = dict(zip(senders, arrived, strict=True))
        self.up, self.refused = [], []  # counted anew, of all clients
        return [self._accept(data[n], n) for n in chosen]


# ══ 7. The compressor: top-K, rand-K, TCS, LF and PLF, with error accumulation (Alg. 2) ═══════════
#    One `Compressor` for all schemes; what differs is a `MaskRule`, for the shared and own masks.


class Host:
    """What the host does with a round's values: in an eager round it looks at them."""

    def top_k(
        self, vector_D: Tensor, k: int, excluded_D: Tensor | None, floor: float
    ) -> tuple[Tensor, float]:
        """S_top outside the excluded entries, (k,), and a floor for the next time (`_filtered`)."""
        positions_K, kth = _filtered(vector_D.detach(), k, excluded_D, floor)
        return positions_K, 0.85 * kth if k else 0.0

    def check_finite(self, values: Tensor, client: int) -> None:
        """NotFiniteError unless all are finite: sums of finite numbers can overflow."""
        if not math.isfinite(values.sum().item()) and not values.isfinite().all():
            raise NotFiniteError(client)

    def places(self, mask_D: Tensor) -> Tensor | None:
        """Positions of a mask's ones; None where their number is not to be known."""
        return mask_to_positions(mask_D)

    def stored(self, before: Tensor | None, now: Tensor) -> Tensor:
        """The tensor that holds `now` from here on."""
        return now


class MaskRule:
    """Which entries travel. Subclass it, with `register_scheme`, to make a scheme of your own.

    Methods may return a (D,) bool mask or its ascending int64 positions. Tensors and numbers kept
    as attributes without a leading underscore are saved in checkpoints.
    """

    positions: Tensor | None = None  # of the shared mask, where it depends on updates
    _theta_D: Tensor | None = None

    def __init__(self, scheme: Scheme, layer_sizes: list[int], device: Any = "cpu", seed: int = 0):
        self._scheme, self._layer_sizes, self._device = scheme, layer_sizes, device
        self._seed, self._dimension, self._host = seed, sum(layer_sizes), Host()
        self._taken_D: Tensor | None = None  # the round's shared mask, (D,) bool, None if empty
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

    def begin(self, shared_K: Tensor) -> None:
        """A sparse round begins; `shared_K` (K,) are the positions of its shared mask."""
        self._taken_D = positions_to_mask(shared_K, self._dimension) if len(shared_K) else None

    def local_mask(self, intended_D: Tensor, shared_K: Tensor) -> Tensor:
        """A client's own mask, disjoint from the shared one: S_top of the rest (Alg. 2, l. 10)."""
        k, fair = self.own_count(shared_K), self._scheme.phi_min_local
        return self.select(intended_D, k, fair, self._taken_D, "client")

    def own_count(self, shared_K: Tensor) -> int | None:
        """How many positions `local_mask` gives, which both sides know; None if that is open.
        Where nothing is shared yet, a client sends k_global more."""
        wanted = self.k_local + (0 if len(shared_K) else self.k_global)
        return min(wanted, self._dimension - len(shared_K))  # of a small DDP bucket all is shared

    def server_mask(self, intended_D: Tensor, shared_K: Tensor) -> Tensor:
        """The server's own mask in the downlink, for a scheme with a phi_down."""
        k = self.k_down + (0 if len(shared_K) else self.k_global)
        return self.select(intended_D, k, self._scheme.phi_min_local, self._taken_D, "server")

    def observe(self, update_D: Tensor) -> None:
        """Called with every round's update, dense ones too, after it was averaged."""

    def select(
        self, vector_D: Tensor, k: int, phi_min: float | None, excluded: Tensor | None = None,
        whose: str = "global",
    ) -> Tensor:  # fmt: skip
        """S_top outside `excluded` (a mask, or positions), layer-wise fair if `phi_min` says so:
        positions (k,). The threshold of last time, for the same `whose`, speeds it up."""
        if phi_min is not None:
            return layerwise_top_k_positions(vector_D, k, self._layer_sizes, phi_min, excluded)
        excluded = _outside(vector_D, excluded)
        floor = self._floors.get(whose, 0.0)
        positions_K, self._floors[whose] = self._host.top_k(vector_D, k, excluded, floor)
        return positions_K

    def state_dict(self) -> dict[str, Any]:
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in vars(self).items()}
        kinds = (Tensor, int, float)
        return {k: v for k, v in plain.items() if k[0] != "_" and isinstance(v, kinds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own, ours = self.state_dict(), type(self).__module__ == __name__
        sizes = ("k_global", "k_local", "k_down") if self._scheme.warmup_masks == 1 and ours else ()
        for key in sizes:
            if own[key] != state[key]:
                raise ValueError(f"{key}: got {state[key]}, allowed: {own[key]} (another scheme)")
        for key in own.keys() - state.keys():
            delattr(self, key)  # a rule that had seen less did not have it
        for key, value in state.items():
            vars(self)[key] = value.to(self._device, copy=True) if torch.is_tensor(value) else value


class Dense(MaskRule):
    """Everything travels (FedAvg); with -Q<bits>, quantized."""

    def global_mask(self) -> Tensor:
        return torch.arange(self._dimension, device=self._device)


RULES["dense"] = Dense
_EVERYTHING = {"rule": "dense", "phi_global": 1.0, "phi_local": None}
FAMILIES |= {"FedAvg": _EVERYTHING, "FedSGD": _EVERYTHING}
FAMILIES["Baseline"] = _EVERYTHING | {"centralized": True}


@register_scheme("top-K", phi_global=None, phi_local=1e-2)
class TopK(MaskRule):
    """Top-K: no shared mask; each client's own S_top, all its positions sent (Sec. I-C)."""


@register_scheme("rand-K", phi_global=1e-2, phi_local=None)
class RandK(MaskRule):
    """Rand-K: a random mask that all sides draw from one seed; no positions sent (Sec. I-C)."""

    round = 0

    def global_mask(self) -> Tensor:
        generator = np.random.default_rng([self._seed, self.round])
        chosen = generator.choice(self._dimension, self.k_global, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(chosen)).to(self._device)

    def observe(self, update_D: Tensor) -> None:
        self.round = self.round + 1


@register_scheme("TCS")
class TCS(MaskRule):
    """Time-correlated sparsification: the shared mask is S_top of the last update (Alg. 2)."""

    magnitudes: Tensor | None = None  # the last update there, if the mask is to shrink

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        # of all masks since this was last set to 0: entries that were in the mask before, entries
        self.shared = torch.zeros(2, dtype=torch.int64, device=self._device)

    def widen(self, times: int) -> None:
        """Of a mask that has become too large, the entries that were largest stay."""
        super().widen(times)
        if self.positions is not None and len(self.positions) > self.k_global:
            last_D = torch.zeros(self._dimension, device=self._device)
            last_D[self.positions] = self.magnitudes
            fair = self._scheme.phi_min_global
            self.positions = self.select(last_D, self.k_global, fair, None, "widen")
            self.magnitudes = last_D[self.positions]

    def global_mask(self) -> Tensor | None:
        sparse_start = self.positions is None and not self._scheme.dense_warmup
        if sparse_start or not self.k_global:
            return super().global_mask()
        if self._scheme.shared_from == "weights" and self.positions is not None:
            if self._theta_D is None:
                raise ValueError(f"{self._scheme.name}: its mask is of a federation's model")
            fair = self._scheme.phi_min_global  # the published code: S_top of the weights
            return self.select(self._theta_D, self.k_global, fair, None, "weights")
        return self.positions

    def observe(self, update_D: Tensor) -> None:
        if not self.k_global:
            return
        before, fair = self.positions, self._scheme.phi_min_global
        now = self.select(update_D, self.k_global, fair)  # line 5 of the next round
        if self._scheme.warmup_masks > 1:
            self.magnitudes = update_D[now].abs()
        if self._scheme.shared_from == "update" and before is not None and len(before) == len(now):
            self.shared[0] += in_common(before, now)
            self.shared[1] += len(now)
        self.positions = self._host.stored(before, now)


class Compressor:
    """Alg. 2's compression for all clients: error accumulation, masks, values, averaging.

    A round is `open`, then `client` for each that takes part, then `server`; `step` is all three.
    `layer_sizes` are the numbers of entries of the parameter tensors, D in all; `device` is where
    differences come from and state lies; all sides give the same `seed`, for rand-K's masks.
    `errors_ND` (N, D) float32 is what the server has not received yet; a dense scheme has none. N
    counts the clients of this process, `own`, as `link` has them (section 6); most often all.
    `server_errors_D` (D,), if the downlink is compressed, is what the clients have not.
    `weights`, one of each client, are their shares of the average, equal without.
    """

    def __init__(
        self, scheme: Scheme | str, layer_sizes: list[int], clients: int, device: Any = "cpu",
        seed: int = 0, link: Link | None = None, weights: Iterable[float] | None = None,
    ):  # fmt: skip
        scheme = scheme if isinstance(scheme, Scheme) else Scheme.named(scheme)
        if clients < 1 or not layer_sizes or min(layer_sizes) < 1:
            raise ValueError(f"layer_sizes, clients: got {layer_sizes}, {clients}; allowed: >= 1")
        self.scheme, self.layer_sizes, self.clients = scheme, list(layer_sizes), clients
        self.dimension, self.link = sum(layer_sizes), cast(Any, link or Link())
        self.own = self.link.clients(clients)
        self.weights = None if weights is None else [float(w) for w in weights]
        positive = [0 < w < math.inf for w in self.weights or ()]
        if self.weights is not None and positive != [True] * clients:
            raise ValueError(f"weights: got {self.weights}, allowed: {clients} positive numbers")
        self.rule = RULES[scheme.rule](scheme, self.layer_sizes, device, seed)
        self.use(Host())
        rows, down = len(self.own) * (not scheme.dense), self.dimension * scheme.compresses_downlink
        lazy_ND = np.zeros((rows, self.dimension), np.float32)  # memory only where it is written
        self.errors_ND = torch.from_numpy(lazy_ND).to(device)
        self.server_errors_D = torch.zeros(down, device=device)
        self._explored_D = torch.zeros(self.dimension, dtype=torch.bool, device=device)
        self.up, self.down = Wire.up(scheme, layer_sizes), Wire.down(scheme, layer_sizes)
        self.bits_up = self.bits_down = self.bytes_up = self.bytes_down = self.round = 0
        self.shared_K: Tensor | None = None
        self.last_dense = False

    def use(self, host: Host) -> Host:
        """Rounds have this host from here on (section 9); returns the one before."""
        before, self.host, self.rule._host = self.rule._host, host, host
        return before

    def step(
        self, deltas_ND: Tensor, dense: bool = False, clients: Iterable[int] | None = None
    ) -> Tensor:
        """One round, Alg. 2 lines 8 to 16: (N, D) model differences in, their (D,) average out.

        `dense` sends everything, unquantized (warm-up). `clients` says who takes part; the others
        keep their errors. A scheme that needs an update to take its mask from makes its first round
        dense. Leaves `deltas_ND` as it is. Raises NotFiniteError or ValueError, with nothing
        changed in this process, for deltas or clients that can't be used. In the middle of a round,
        which can't go on then: NotFiniteError for sums that overflow, MessageError for messages.

        Of this last round `bits_up` is one client's average message and `bits_down` the server's,
        in bits of code; `bytes_up`, of all clients, and `bytes_down` have the overhead too.
        """
        chosen = list(range(self.clients)) if clients is None else [int(n) for n in clients]
        if tuple(deltas_ND.shape) != (expected := (len(self.own), self.dimension)):
            raise ValueError(f"deltas_ND: got shape {tuple(deltas_ND.shape)}, allowed: {expected}")
        self.check_clients(chosen)
        mine = [n for n in chosen if n in self.own]

        def send() -> list[Message | None]:
            for n in mine:  # before any is changed
                self.host.check_finite(deltas_ND[self.own.index(n)], n)
            return [self.client(n, deltas_ND[self.own.index(n)]) for n in mine]

        self.open(dense)
        return self.server(self.link.gather(send, chosen))

    def check_clients(self, chosen: list[int]) -> None:
        """ValueError unless these can take part in a round."""
        if not chosen or len(set(chosen)) != len(chosen) or set(chosen) - set(range(self.clients)):
            allowed = f"one or more of 0 to {self.clients - 1}, each once"
            raise ValueError(f"clients: got {chosen}, allowed: {allowed}")

    def open(self, dense: bool = False) -> None:
        """A round begins: all sides know its shared mask, or that it is dense."""
        mask = None if dense or self.scheme.dense else self.rule.global_mask()
        self.shared_K = None if mask is None else self._positions(mask)
        self.last_dense, own = self.shared_K is None, None
        if self.shared_K is not None:
            self.rule.begin(self.shared_K)
            own = self.rule.own_count(self.shared_K)
        agreed = (self.clients, self.round, self.shared_K, own, self._explored_D.device)
        self.link.begin(Agreed(self.up, self.down, *agreed))

    def client(self, n: int, delta_D: Tensor) -> Message | None:
        """Client n's side of a round, Alg. 2 lines 9 to 13: its difference (D,) to its message.

        Returned is what the server has, None if it was refused; the rest stays in the client's
        errors (of a dense round all, until `server`). A difference has to be finite: `step` and
        `Federation` see to that. Raises NotFiniteError for sums that overflow.
        """
        delta_D = delta_D.detach()
        if self.scheme.dense:  # nothing is ever left to send
            return self.link.send_up(Message.dense_of(delta_D.clone(), n, self.round))
        errors_D, accumulate = self.errors_ND[self.own.index(n)], self.scheme.error_accumulation
        intended_D = errors_D.add_(delta_D) if accumulate else errors_D.copy_(delta_D)  # line 9
        if self.shared_K is None:
            self.host.check_finite(intended_D, n)
            return self.link.send_up(Message.dense_of(intended_D, n, self.round))
        mask = self.rule.local_mask(intended_D, self.shared_K)  # line 10: explore outside shared_K
        own_K = self._positions(mask, self.shared_K, self.link.agreed.own)
        how = n, self.scheme.value_bits, self.scheme.quantizer
        places, intended, message = self._message(intended_D, own_K, *how)  # line 11; Q: Sec. II-F
        sent = self.link.send_up(message)  # line 12
        if sent is not None:
            errors_D.scatter_(0, places, intended - sent.values)  # line 13: what stays behind
        return sent

    def _message(
        self, intended_D: Tensor, own_K: Tensor, sender: int, bits: int = 32, quantizer: str = ""
    ) -> tuple[Tensor, Tensor, Message]:
        """Places (K,), the values intended there, and the message that quantizes them."""
        places = torch.cat([self.shared_K, own_K])  # line 11: exploit | explore
        intended = intended_D.index_select(0, places)
        self.host.check_finite(intended, sender)
        return places, intended, Message.of(intended, own_K, bits, sender, self.round, quantizer)

    def server(self, messages: Iterable[Message | None]) -> Tensor:
        """The server's side, Alg. 2 lines 15 and 16: what all clients have after it of the average,
        (D,), from which the rule takes the next shared mask. Raises MessageError if no message was
        accepted, NotFiniteError for sums that overflow."""
        accepted = [message for message in messages if message is not None]
        update_D = self._downlink(self._average(accepted))  # line 15, line 16
        self.link.up = self.link.up or [_size(self.up.bits(m)) for m in accepted]  # from elsewhere
        self.count()
        self.rule.observe(update_D)
        self.round += 1
        return update_D

    def _average(self, messages: list[Message]) -> Tensor:
        if not messages:
            raise MessageError(SERVER, f"no message was accepted, of clients {self.link.refused}")
        update_D, total = torch.zeros(self.dimension, device=self._explored_D.device), 0.0
        self._explored_D.zero_()
        for message in messages:
            weight = 1.0 if self.weights is None else self.weights[message.sender]
            message.add_to_(update_D, self.shared_K, weight)
            self._explored_D.index_fill_(0, message.positions, True)
            total += weight
            if message.dense and len(self.errors_ND) and message.sender in self.own:
                self.errors_ND[self.own.index(message.sender)].zero_()  # l. 13: they were sent
        return update_D.div_(total)  # line 15

    def _downlink(self, update_D: Tensor) -> Tensor:
        """What the clients have of the update: all that came up or, with errors at the server, what
        its own mask and quantizer let through."""
        if self.shared_K is None:
            if len(self.server_errors_D):
                update_D += self.server_errors_D
                self.server_errors_D.zero_()
            self.host.check_finite(update_D, SERVER)
            return self.link.send_down(Message.dense_of(update_D, SERVER, self.round)).values
        if self.scheme.compresses_downlink:
            message = self._compressed_down(update_D)
        elif (own_K := self.host.places(self._explored_D)) is None:
            self.host.check_finite(update_D, SERVER)
            return update_D
        else:
            _, _, message = self._message(update_D, own_K, SERVER)
        arrived = self.link.send_down(message)
        if arrived is not message or self.scheme.compresses_downlink:
            update_D.zero_()
            arrived.add_to_(update_D, self.shared_K)
        return update_D

    def _compressed_down(self, update_D: Tensor) -> Message:
        """Lines 9 to 13 for the server itself."""
        intended_D, scheme = self.server_errors_D.add_(update_D), self.scheme
        if scheme.phi_down is None:
            own_K = mask_to_positions(self._explored_D)
        else:
            mask = self.rule.server_mask(intended_D, self.shared_K)
            own_K = self._positions(mask, self.shared_K)
        how = SERVER, scheme.down_value_bits, scheme.down_quantizer
        places, intended, message = self._message(intended_D, own_K, *how)
        intended_D.scatter_(0, places, intended - message.values)
        return message

    def _positions(
        self, mask: Tensor, taken_K: Tensor | None = None, count: int | None = None
    ) -> Tensor:
        """What a rule returned, as positions; checked if the rule is not one of the core's."""
        positions_K = mask_to_positions(mask) if mask.dtype == torch.bool else mask
        if type(self.rule).__module__ == __name__:
            return positions_K
        if mask.dtype == torch.bool and tuple(mask.shape) != (self.dimension,):
            raise ValueError(f"mask: got shape {tuple(mask.shape)}, allowed: ({self.dimension},)")
        _check_positions(positions_K, self.dimension)
        if taken_K is not None and torch.isin(positions_K, taken_K).any():
            raise ValueError("own mask: entries of the shared mask, allowed: only others")
        if count is not None and len(positions_K) != count:
            advice = "own_count says so; let it return None if their number is open"
            raise ValueError(f"local_mask: got {len(positions_K)}, allowed: {count} ({advice})")
        return positions_K

    def count(self) -> None:
        """Bits and bytes of the last round, from its link."""
        bits, self.bytes_up = (sum(column) for column in zip(*self.link.up, strict=True))
        self.bits_up = -(-bits // len(self.link.up))
        self.bits_down, self.bytes_down = self.link.down

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: errors, the mask rule's state, the round's number."""
        state = {"errors_ND": self.errors_ND, "server_errors_D": self.server_errors_D}
        return state | {"rule": self.rule.state_dict(), "round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore_(self.state_dict(), state, lambda: self.rule.load_state_dict(state["rule"]))
        self.round = int(state["round"])


def restore_(own: dict[str, Any], state: dict[str, Any], inner: Callable[[], None]) -> None:
    """A state's tensors into those of `own`, after `inner`, what lies inside; ValueError, with
    nothing changed, names one that has another shape, or is missing."""
    tensors = {key: value for key, value in own.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        got, allowed = tuple(getattr(state.get(key), "shape", ())), tuple(tensor.shape)
        if got != allowed or state.get(key) is None:
            raise ValueError(f"{key}: got shape {got}, allowed: {allowed}")
    inner()
    for key, tensor in tensors.items():
        tensor.copy_(state[key])


# ══ 8. The federation: local training, FedAvg, global momentum (Alg. 1, 3) ════════════════════════
#    Clients take turns on one model: a difference is made, compressed, sent and forgotten.


class Phase(NamedTuple):
    """What a schedule says of a round: learning rate, dense or not, masks so many times as large.
    A schedule is any function from the round's number, counted from 0, to a Phase."""

    eta: float
    dense: bool = False
    masks: int = 1  # of a scheme with -W<n> alone: n in its warm-up


class Feed:
    """Batches from one iterable a client, such as a DataLoader, begun anew when it ends.

    A feed of your own needs `clients` and `batch`, and for static rounds `hold` (section 9). Raises
    ValueError for a client with no batches.
    """

    def __init__(self, sources: Iterable[Iterable[Any]]):
        self.sources = list(sources)
        self.clients = len(self.sources)
        self._running = [iter(source) for source in self.sources]

    def batch(self, n: int, round: Any, tau: int) -> Any:
        """What client n trains on in its local step tau of a round, counted from 0."""
        for _ in range(2):
            for batch in self._running[n]:
                return batch
            self._running[n] = iter(self.sources[n])
        raise ValueError(f"feed: client {n} has no batch for round {round + 1}, step {tau + 1}")


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean loss of a batch of inputs and class labels."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float(), labels)


class Federation:
    """N clients and a server (Alg. 1 with Alg. 2's compression, or Alg. 3): `round` by `round`.

    `model` is any module with float32 parameters; it is trained in place, its parameters become
    views of `theta_D`. `feed` is a list of one iterable a client, or a `Feed`; its batches have to
    be on the model's device. `loss(model, batch)` is a scalar. Local steps are those of plain SGD;
    `schedule` is their learning rate, or gives that of a round or its `Phase`, and `weight_decay`
    times the parameters is added to each gradient. `weights` are the clients' shares of the
    average, equal without; `seed` is for rand-K's masks; `link` says how messages travel.
    `on_delta(n, delta_D)`, if set, sees every difference before it is compressed.

    `theta_D`, `statistics_NS` (batch norm's running means and variances, a row a client of this
    process), `momentum_D`, `compressor`, `active` clients and `t`, the rounds made, are the state.
    Other buffers than batch norm's are the model's: clients share them, one after the other.
    Evaluate after `model.eval()`, with the statistics of the clients of the last round averaged:
    flat.use(flat.statistics_views(statistics_NS[active].mean(0))); `round` undoes both. (A process
    with some of the clients has only their rows.) ValueError for a model or feed of no use.
    """

    def __init__(
        self, model: nn.Module, feed: Any, scheme: Scheme | str,
        schedule: float | Callable[[int], Phase | float], *,
        loss: Callable[[nn.Module, Any], Tensor] = cross_entropy, weight_decay: float = 0.0,
        seed: int = 0, link: Link | None = None, weights: Iterable[float] | None = None,
    ):  # fmt: skip
        self.feed = feed if hasattr(feed, "batch") else Feed(feed)
        self.clients, self.loss, self.weight_decay = self.feed.clients, loss, weight_decay
        self._schedule = schedule
        self.flat = FlatModel(model)
        self.model, self.theta_D = model, self.flat.theta_D
        sizes, device = self.flat.layer_sizes, self.theta_D.device
        self.compressor = Compressor(scheme, sizes, self.clients, device, seed, link, weights)
        self.scheme = self.compressor.scheme
        self.compressor.rule._theta_D = self.theta_D
        self.own = self.compressor.own
        self.start_D = torch.empty_like(self.theta_D) if self.scheme.local_steps > 1 else None
        self.momentum_D = torch.zeros_like(self.theta_D) if self.scheme.momentum else None
        self.statistics_NS = self.flat.statistics().repeat(len(self.own), 1)
        self.statistics_views = [self.flat.statistics_views(row) for row in self.statistics_NS]
        self.losses_N = torch.zeros(len(self.own), device=device)  # sums over local steps
        self.active, self.t = list(range(self.clients)), 0
        self.on_delta: Callable[[int, Tensor], None] | None = None

    def schedule(self, t: int) -> Phase:
        """Round t's phase."""
        found = self._schedule(t) if callable(self._schedule) else self._schedule
        return found if isinstance(found, Phase) else Phase(float(found))

    def round(self, clients: Iterable[int] | None = None) -> Tensor:
        """One round with all clients, or with these: local training, compression, the server's
        step; the update_D (D,) that it sent to all.

        Raises NotFiniteError or MessageError, theta_D as after the last good round.
        """
        phase, compressor = self.schedule(self.t), self.compressor
        chosen = list(range(self.clients)) if clients is None else [int(n) for n in clients]
        compressor.check_clients(chosen)
        if self.flat.parameters[0].data_ptr() != self.theta_D.data_ptr():
            raise ValueError("model: it was moved, or is in another federation by now")
        if self.scheme.warmup_masks > 1:
            compressor.rule.widen(phase.masks)
        if self.scheme.error_unit == "gradient" and self.t and self.momentum_D is None:
            before = self.schedule(self.t - 1).eta  # with momentum all differences are gradients
            for errors in (compressor.errors_ND, compressor.server_errors_D):
                errors.mul_(phase.eta / before if before else 1.0)
        update_D = self.play(chosen, self.t, phase.eta, phase.dense)
        self.t += 1
        return update_D

    def play(
        self, chosen: list[int], t: int | Tensor, eta: float | Tensor, dense: bool = False
    ) -> Tensor:
        """`round` with all that it depends on given; numbers may be tensors (section 9)."""
        self.active, compressor = chosen, self.compressor
        if not self.model.training:
            self.model.train()

        def send() -> list[Message | None]:
            mine = [n for n in chosen if n in self.own]
            return [compressor.client(n, self.difference(n, t, eta)) for n in mine]

        compressor.open(dense)
        update_D = compressor.server(compressor.link.gather(send, chosen))
        if self.momentum_D is None:
            self.theta_D.add_(update_D)  # Alg. 2, line 6
        else:
            self.momentum_D.mul_(self.scheme.momentum).add_(update_D)  # Alg. 3, line 7
            _descend(self.theta_D, self.momentum_D, eta, out=self.theta_D)  # Alg. 3, line 8
        return update_D

    def difference(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Client n's model difference in round t (Eq. 3), (D,), valid until the next client's.
        With global momentum, its summed gradients."""
        gradient_D = self._local_training(n, t, eta)
        delta_D = gradient_D if self.scheme.momentum else gradient_D.mul_(-eta)
        self.compressor.host.check_finite(delta_D, n)
        if self.on_delta:
            self.on_delta(n, delta_D)
        return delta_D

    def _local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Alg. 1, l. 3 to 6: H steps of client n; its summed gradients."""
        theta_D, steps, row = self.theta_D, self.scheme.local_steps, self.own.index(n)
        gradient_D = torch.mul(theta_D, self.weight_decay, out=self.flat.gradient_D)
        self.flat.use(self.statistics_views[row])
        if steps > 1:
            self.start_D.copy_(theta_D)  # line 3
        try:
            for tau in range(steps):
                loss = self.loss(self.model, self.feed.batch(n, t, tau))
                loss.backward()  # line 5; adds to gradient_D
                self.losses_N[row].add_(loss.detach())
                if tau + 1 < steps:
                    _descend(self.start_D, gradient_D, eta, out=theta_D)  # line 6
                    gradient_D.add_(theta_D, alpha=self.weight_decay)
        finally:
            if steps > 1:
                theta_D.copy_(self.start_D)
        return gradient_D

    def state_dict(self) -> dict[str, Any]:
        keys = ("theta_D", "statistics_NS", "momentum_D", "t", "active")
        state = {key: vars(self)[key] for key in keys if vars(self)[key] is not None}
        return state | self.flat.buffers() | {"compressor": self.compressor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        inner = partial(self.compressor.load_state_dict, state["compressor"])
        restore_(self.state_dict(), state, inner)
        self.active, self.t = list(state["active"]), int(state["t"])


def _descend(start_D: Tensor, gradient_D: Tensor, eta: float | Tensor, out: Tensor) -> None:
    """start - eta * gradient, into `out`."""
    if isinstance(eta, Tensor):
        torch.addcmul(start_D, gradient_D, eta, value=-1.0, out=out)
    else:
        torch.add(start_D, gradient_D, alpha=-eta, out=out)


# ══ 9. Static rounds: no shape depends on a value, and the host looks at none ═════════════════════
#    A GPU is fast if the host never waits for it. Every message of TCS and top-K has a fixed size,
#    so that a whole round can be like that; on a GPU it is captured once as a CUDA graph.


class StaticHost(Host):
    """The host that looks at no value: it learns later, from tensors, what an eager one sees."""

    def __init__(self) -> None:
        self.finite: dict[int, Tensor] = {}  # by client: bool ()
        self.explored: Tensor | None = None  # int64 (): entries that only some clients sent

    def top_k(
        self, vector_D: Tensor, k: int, excluded_D: Tensor | None, floor: float
    ) -> tuple[Tensor, float]:
        magnitudes_D = vector_D.abs()
        if excluded_D is not None:
            magnitudes_D.masked_fill_(excluded_D, -1.0)
        return static_top_k(magnitudes_D, k), 0.0

    def check_finite(self, values: Tensor, client: int) -> None:
        finite = values.sum(dtype=torch.float64).isfinite()  # no sum of float32 overflows that
        self.finite[client] = self.finite[client] & finite if client in self.finite else finite

    def places(self, mask_D: Tensor) -> None:
        self.explored = mask_D.sum()

    def stored(self, before: Tensor | None, now: Tensor) -> Tensor:
        return now if before is None else before.copy_(now)


class StaticRounds:
    """Rounds of a federation without host synchronization, up to `most` of them at once.

    `Federation.round` is the reference: the same masks, the same numbers to rounding. In place of a
    round's number the feed gets a tensor, which counts from the first of the rounds it was last
    told to `hold`: it keeps what they need in tensors that stay where they are.
    """

    def __init__(self, federation: Federation, most: int):
        device = federation.theta_D.device
        self.federation = weakref.proxy(federation)  # which may hold this
        self.compressor, self.host = federation.compressor, StaticHost()
        self.index = torch.zeros((), dtype=torch.int64, device=device)
        self.eta = torch.zeros((), device=device)
        self.explored_T = torch.zeros(most, dtype=torch.int64, device=device)
        shape = (most, federation.clients + 1)  # the last is the server
        self.finite_TN = torch.ones(shape, dtype=torch.bool, device=device)
        self.graph: Any = None
        self.held: list[Tensor | None] = []  # what the graph was captured with

    @staticmethod
    def suits(scheme: Scheme, link: Link) -> bool:
        """Whether static rounds can stand in for this scheme's sparse rounds of all clients."""
        fair = scheme.phi_min_global is not None or scheme.phi_min_local is not None
        plain = scheme.code == "block" and not scheme.compresses_downlink and not fair
        usual = (scheme.error_unit, scheme.shared_from) == ("difference", "update")
        return RULES[scheme.rule] in (TCS, TopK) and plain and usual and type(link) is Link

    def ready(self, rounds: range) -> bool:
        """Whether these rounds, judged by the first, are sparse and have a mask to start with."""
        rule, first = self.compressor.rule, self.federation.schedule(rounds.start)
        mask = None if first.dense else rule.global_mask()
        return mask is not None and len(mask) == rule.k_global and first.masks == 1

    def play(self, rounds: range) -> list[int]:
        """Makes these rounds; of each, how many entries only some clients sent (see `count`).

        Raises NotFiniteError, with the round as `error.round`, after the last; the state is void.
        """
        federation, before = self.federation, self.compressor.round
        self.compressor.rule.widen(1)
        federation.feed.hold(rounds)
        for index, t in enumerate(rounds):
            self._play(index, federation.schedule(t).eta)
        federation.t, self.compressor.round = rounds.stop, before + len(rounds)
        for index, n in (~self.finite_TN[: len(rounds)]).nonzero().tolist()[:1]:
            error = NotFiniteError(n if n < federation.clients else SERVER)
            error.round = rounds[index]
            raise error
        return self.explored_T[: len(rounds)].tolist()

    def count(self, explored: int) -> None:
        """Puts one of these rounds into the compressor's counts of bits and bytes."""
        compressor, rule = self.compressor, self.compressor.rule
        down = compressor.down.block_code_bits(rule.k_global + explored, explored)
        up = compressor.up.block_code_bits(rule.k_global + rule.k_local, rule.k_local)
        compressor.link.up = [_size(up)] * self.federation.clients
        compressor.link.down = _size(down)
        compressor.count()

    def _play(self, index: int, eta: float) -> None:
        self.index.fill_(index)
        self.eta.fill_(eta)
        if self.index.device.type != "cuda":
            self._round()
            return
        with torch.cuda.device(self.index.device):
            same = [one is two for one, two in zip(self._masks(), self.held, strict=False)]
            if self.graph is None or not all(same):
                self.graph, self.held = self._captured(), self._masks()
            self.graph.replay()

    def _round(self) -> None:
        federation, everyone = self.federation, list(range(self.federation.clients))
        self.host.finite.clear()
        eager = self.compressor.use(self.host)
        try:
            federation.play(everyone, self.index, self.eta)
        finally:
            self.compressor.use(eager)
        now, finite = self.index.view(1), [self.host.finite[n] for n in (*everyone, SERVER)]
        self.finite_TN.index_copy_(0, now, torch.stack(finite).view(1, -1))
        self.explored_T.index_copy_(0, now, self.host.explored.view(1))

    def _masks(self) -> list[Tensor | None]:
        """Tensors that an eager round or a checkpoint replaces."""
        return [getattr(self.compressor.rule, name, None) for name in ("positions", "shared")]

    def _captured(self) -> Any:
        """The round as a CUDA graph. What the trial rounds before it change is put back."""
        federation = self.federation
        state = [federation.theta_D, federation.statistics_NS, federation.losses_N]
        state += [self.compressor.errors_ND, self.explored_T, self.finite_TN]
        state += [t for t in (federation.momentum_D, *self._masks()) if t is not None]
        before = [(tensor, tensor.clone()) for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._round()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # the default one is of the first device used
            self._round()
        for tensor, value in before:
            tensor.copy_(value)
        return graph


# ══ 10. Models: the CIFAR ResNet-18 of the paper (11,173,962 parameters) and small ones ═══
#    Convolutions lie in memory with channels last, which is what CPU and GPU kernels want.

# Basic blocks of each stage; where there are none, a single convolution.
STAGES = {"resnet18": (2, 2, 2, 2), "resnet8": (1, 1, 1), "conv3": (0, 0, 0)}


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, 1x1 where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        first, second = _conv(inputs, outputs, 3, stride), _conv(outputs, outputs, 3, 1)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        same, thin = stride == 1 and inputs == outputs, stride > 1 and inputs < 16
        step = [nn.MaxPool2d(1, stride)] if thin else []  # a stride overruns: oneDNN's issue 6035
        conv = [] if same else _conv(inputs, outputs, 1, 1 if thin else stride)
        self.shortcut = nn.Sequential(*step, *conv)

    def forward(self, x: Tensor) -> Tensor:  # (B, inputs, h, w) -> (B, outputs, h/stride, w/stride)
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def build_model(name: str, width: int, classes: int = 10) -> nn.Module:
    """A net for (B, 3, h, w) images: stages of blocks, each twice as wide at half the size."""
    if name not in STAGES:
        raise ValueError(f"model: got {shorten(name)}, allowed: {', '.join(STAGES)}")
    layers: list[nn.Module] = [*_conv(3, width, 3, 1), nn.ReLU(inplace=True)]
    inputs = width
    for stage, blocks in enumerate(STAGES[name]):
        for block in range(blocks):
            layers.append(BasicBlock(inputs, width * 2**stage, 2 if stage and not block else 1))
            inputs = width * 2**stage
        if stage and not blocks:
            layers += [*_conv(inputs, 2 * inputs, 3, 2), nn.ReLU(inplace=True)]
            inputs *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """The paper's model, Sec. III-A: 11,173,962 trainable parameters at width 64."""
    return build_model("resnet18", width, classes)


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class FlatModel:
    """A model whose parameters are views into one flat tensor, `theta_D`, and their gradients into
    another, `gradient_D`, to which backward passes add. `use` points the batch-norm statistics at
    any row of a flat tensor, so that clients can take turns without copies."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters or any(p.dtype != torch.float32 for p in self.parameters):
            raise ValueError("model: allowed: one with parameters to train, all of them float32")
        if any(isinstance(m, _NORMS) and m.momentum is None for m in model.modules()):
            raise ValueError("model: a batch norm's momentum: got None, allowed: a number")
        self.layer_sizes = [p.numel() for p in self.parameters]
        self.norms = [m for m in model.modules() if isinstance(m, _NORMS) and m.track_running_stats]
        self.theta_D = torch.empty(sum(self.layer_sizes), device=self.parameters[0].device)
        self.gradient_D = torch.zeros_like(self.theta_D)
        self.gradients = self.views(self.gradient_D)
        for parameter, view in zip(self.parameters, self.views(self.theta_D), strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def views(self, flat_D: Tensor) -> list[Tensor]:
        """(D,) as tensors of the parameters' shapes, sharing memory; convolutions channels last."""
        kernels = {id(m.weight) for m in self.model.modules() if type(m) is nn.Conv2d}
        views = []
        for part, p in zip(flat_D.split(self.layer_sizes), self.parameters, strict=True):
            if id(p) in kernels:
                part = part.view(len(p), *p.shape[2:], p.shape[1]).permute(0, 3, 1, 2)
            views.append(part.view(p.shape))
        return views

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

    def buffers(self) -> dict[str, Tensor]:
        """What a model's state has besides parameters and batch norms'; clients share it."""
        norms = {id(b) for m in self.norms for b in m.buffers()}
        named = {f"buffer {k}": b for k, b in self.model.state_dict(keep_vars=True).items()}
        others = {k: b for k, b in named.items() if not isinstance(b, nn.Parameter)}
        return {k: b for k, b in others.items() if isinstance(b, Tensor) and id(b) not in norms}

    def statistics(self) -> Tensor:
        """The model's batch-norm running means and variances, (S,)."""
        parts = [s for m in self.norms for s in (m.running_mean, m.running_var)]
        return torch.cat([self.theta_D.new_empty(0), *parts])


# ══ 11. A communication hook for PyTorch's DistributedDataParallel ════════════════════════════════
#    Values whose places all ranks know are one dense all-reduce; the rest is gathered.


class TCSState:
    """What `tcs_hook` keeps between steps, and its settings. One for a model and a rank.

    1. `phi_global`, `phi_local`: shares of a bucket's entries that are kept, by the mask that all
       ranks know and by each rank's own. None for no such mask; without phi_global it is top-K.
    2. `start_iter` >= 1: so many steps of plain all-reduce, the last of which gives the mask, come
       first. 10 % of all steps is a good start; warm-up of the learning rate belongs there.
    3. `error_accumulation`: what was not sent is added to the next gradient. Leave it on.

    Masks are chosen bucket by bucket, so that buckets travel while the backward pass still runs; a
    `bucket_cap_mb` large enough for the model gives one bucket, and the selection of Alg. 2.

    `iter` counts steps. `bytes_sent` is what this rank has handed to collectives, in bytes:
    "dense" and "shared" to all_reduce, "explored" to all_gather. Every rank saves its own
    `state_dict`; load it before the first step, into the same model with the same bucket_cap_mb.

    Values are not quantized, since an all-reduce adds up on the way; PyTorch's own
    bf16_compress_wrapper(tcs_hook) halves the bits of "dense" and "shared". A gradient that is not
    finite becomes NaN on every rank, so that all GradScalers skip the step; its bucket's errors and
    mask stay as they were. Errors are in the units of the gradients that DDP hands over: where a
    GradScaler changes its scale, they count by the old one.
    Raises ValueError for a share, or start_iter, that is none.
    """  # fmt: skip

    def __init__(
        self, process_group: Any = None, phi_global: float | None = 1e-2,
        phi_local: float | None = 1e-3, start_iter: int = 10, error_accumulation: bool = True,
    ):  # fmt: skip
        if type(start_iter) is not int or start_iter < 1:
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

    def __getstate__(self) -> None:  # a copy would not know its model's parameters
        raise TypeError("TCSState: can't be pickled or copied; save its state_dict()")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned; before the first step."""
        self.iter, self.bytes_sent = int(state["iter"]), dict(state["bytes_sent"])
        self._buckets, self._loose = {}, dict(state["slots"])

    def _compressor(self, bucket: dist.GradBucket) -> Compressor:
        """The bucket's own, with what its parameters brought along from other buckets."""
        parameters = bucket.parameters()
        key = tuple(self._slots.setdefault(p, len(self._slots)) for p in parameters)
        if key in self._buckets:
            return self._buckets[key]
        for other in [k for k in self._buckets if set(k) & set(key)]:
            self._loose |= _loosened(other, self._buckets.pop(other))
        sizes = [p.numel() for p in parameters]
        compressor = Compressor(self.scheme, sizes, 1, bucket.buffer().device, link=_CastLink())
        _take_up(compressor, [self._loose.pop(slot, None) for slot in key])
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
        same = f"{compressor.layer_sizes}, as saved (the same model and bucket_cap_mb)"
        raise ValueError(f"TCSState: got parameters of {sizes} entries, allowed: {same}")
    compressor.errors_ND[0] = torch.cat([part["errors"] for part in found])
    if all("mask" in part for part in found):
        mask_D = torch.cat([part["mask"] for part in found]).to(compressor.errors_ND.device)
        compressor.rule.positions = mask_to_positions(mask_D)


def tcs_hook(state: TCSState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: gradients averaged over ranks by TCS, with error accumulation.

    1. The first `start_iter` steps are DDP's all-reduce; the last of them gives the shared mask.
    2. This rank's side of Alg. 2, lines 9 to 13, for the bucket's gradient: `Compressor.client`.
    3. Values on the shared mask: all_reduce, in the gradients' own type.
    4. Values and positions of its own: all_gather of one encoded message a rank.
    5. Their average is the bucket's gradient on every rank, and gives the next shared mask.

        >>> from torch.nn.parallel import DistributedDataParallel
        >>> torch.distributed.init_process_group("gloo")  # torchrun says how many processes
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
tcs_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}

_SIGNS = struct.Struct("<?I")  # in front of a message: all finite, and the shared mask's CRC-32


class _CastLink(Link):
    """What all_reduce adds up is in the gradients' own type: the rest of a value stays behind."""

    dtype = torch.float32

    def send_up(self, message: Message) -> Message:
        shared = len(self.agreed.shared_K)
        most = min(torch.finfo(kind).max for kind in (self.dtype, torch.float32))  # float16: 65504
        values = message.values.clamp(-most, most)
        cast = values[:shared].to(self.dtype).float()
        return dataclasses.replace(message, values=torch.cat([cast, values[shared:]]))


def _exchanged(
    state: TCSState, bucket: dist.GradBucket, compressor: Compressor, step: int, group: Any
) -> torch.futures.Future[Tensor]:
    """Steps 2 to 5."""
    buffer, ranks = bucket.buffer(), group.size()
    compressor.link.dtype = buffer.dtype
    compressor.open()
    shared_K = compressor.shared_K
    message, finite = _own_message(compressor, buffer)  # step 2
    sent = message.values[: len(shared_K)].to(buffer.dtype)
    values = message.values[len(shared_K) :]
    own = dataclasses.replace(message, values=values, sender=group.rank(), round=step)
    reduced = (sent if finite else sent + math.nan) / ranks  # step 3
    futures = [dist.all_reduce(reduced, group=group, async_op=True).get_future()]
    state.bytes_sent["shared"] += reduced.nbytes
    signs = _SIGNS.pack(finite, zlib.crc32(shared_K.cpu().numpy().data))
    gathered: list[Tensor] = []
    if len(own.positions):  # step 4
        data = bytearray(signs + encode_message(own, compressor.up))
        parts = torch.frombuffer(data, dtype=torch.uint8).to(buffer.device)
        gathered = [torch.empty_like(parts) for _ in range(ranks)]
        futures.append(dist.all_gather(gathered, parts, group=group, async_op=True).get_future())
        state.bytes_sent["explored"] += parts.nbytes

    def averaged(done: torch.futures.Future[list[torch.futures.Future]]) -> Tensor:  # step 5
        for future in done.value():
            future.wait()
        update_D = compressor.errors_ND.new_zeros(compressor.dimension)
        well = _add_explored_(update_D, gathered, signs[1:], compressor.up, step)
        update_D.div_(ranks)[shared_K] = reduced.float()
        if not (well and reduced.isfinite().all()):
            if finite:
                _take_back_(compressor, buffer, shared_K, sent, own)
            return buffer.fill_(math.nan)
        compressor.rule.observe(update_D)
        return buffer.copy_(update_D)

    return torch.futures.collect_all(futures).then(averaged)


def _own_message(compressor: Compressor, buffer: Tensor) -> tuple[Message, bool]:
    """This rank's side of Alg. 2; False and zeros, all errors kept, for a not finite gradient."""
    gradient_D, finite = buffer.float(), bool(buffer.isfinite().all())
    if finite:
        try:
            return compressor.client(0, gradient_D), True
        except NotFiniteError:  # the errors themselves have grown beyond float32
            compressor.errors_ND.zero_()
    zeros_D, shared_K = torch.zeros_like(gradient_D), compressor.shared_K
    own_K = compressor.rule.local_mask(zeros_D, shared_K)
    return Message(zeros_D[: len(shared_K) + len(own_K)], own_K), False


def _add_explored_(
    update_D: Tensor, gathered: list[Tensor], mask: bytes, wire: Wire, step: int
) -> bool:
    """Adds every rank's own values; whether all of them were finite."""
    nothing, well = torch.empty(0, dtype=torch.int64), True
    for rank, part in enumerate(gathered):
        data = part.cpu().numpy().tobytes()
        well = well and bool(data[0])
        if data[1 : _SIGNS.size] != mask:
            raise ValueError(f"rank {rank}: its shared mask is another than here")
        try:
            own = decode_message(data[_SIGNS.size :], wire, nothing, rank, step)
        except ValueError as error:
            raise ValueError(f"rank {rank}, {error}") from error
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
