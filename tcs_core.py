"""Time-Correlated Sparsification (TCS) for communication-efficient federated learning.

This module contains the paper's whole method. It needs only torch and numpy. The paper is E.
Ozfatura, K. Ozfatura and D. Gunduz, "Time-Correlated Sparsification for Communication-Efficient
Federated Learning". In this file, "Alg.", "Eq." and "Sec." refer to the paper, and "line" alone
means a line of Alg. 2. "Norm" means a normalization layer with running statistics, such as batch
norm.

    theta_D -> local training -> delta_D -> (+ errors_D) -> masks -> values -> Message
            -> server: average -> update_D -> theta_D

Alg. 2, the paper's main algorithm, is in section 6. `Known` holds the shared mask (line 5),
`Client` does what a client does (lines 9 to 13), and `Server` does what the server does (lines 15
and 16). They may run in one process or in separate processes. Local training (line 7) is done by
`LocalTrainer`, and the model is updated (line 6) by `Federation.move`, both in section 7.

Contents, with the main names of each section
    1 schemes          Scheme, register_scheme, register_quantizer, register_suffix
    2 masks            top_k_mask, top_k_positions, layerwise_top_k_positions (S_top)
    3 positions        encode_positions, decode_positions (Alg. 4)
    4 quantizers       scaled_sign, fractional_quantize, fractional_dequantize
    5 messages         Message, encode_message, decode_message, message_bits, bit_budget
    6 Alg. 2           MaskRule, TCS, Known, Client, Server, Link, Compressor
    7 the federation   Federation, LocalTrainer, Phase, Feed, layer_sizes, parameters_to_vector
                       (Alg. 1, 3)
    8 models           resnet18, build_model
    9 a hook for DDP   TCSState, tcs_hook
   10 states           check_same_state

Symbols (a suffix of a name, such as _D or _NS, gives the dimensions of a tensor)
    D parameters   N clients   K kept entries   L layers   H local steps   B batch   P intervals
    S entries of the norms' running statistics
    theta_D      model parameters            (D,) float32, in the order in which they lie in memory
    delta_D      a client's model difference (D,) float32: parameters after minus before training
    errors_D     accumulated errors e        (D,) float32: what has not reached the server yet
    intended     delta + errors              what a client means to send
    sent         the quantized kept entries  what a client sends
    update_D     the server's average        (D,) float32
    phi          the fraction that is KEPT   K = ceil(phi * D), at least 1
    shared mask  the paper's global mask     the same at the server and all clients: phi_global
    own mask     the paper's local mask      of one client, outside the shared mask: phi_local

Differences from the paper
     1. Bits are counted in two ways: by the paper's formula, and as the length of a code that can
        be decoded. This length is also counted for the downlink and for the rounds of the dense
        warm-up. The paper leaves out the warm-up.
     2. S_top keeps exactly K entries; of equal magnitudes the lower index wins. (The paper keeps
        every entry that ties with the K-th.)
     3. In the rounds of a dense warm-up every entry is sent. The first sparse round takes its mask
        from the last dense update. Without a warm-up, TCS begins with one dense round, unless the
        scheme's `dense_warmup` is False.
     4. Error accumulation keeps the quantization error, too, so that sent + errors == intended.
        Without quantization this holds exactly in float32. With quantization it holds exactly if
        every value is at most twice its quantized value and at least half of it (Sterbenz's lemma).
        This is so if sigma, the ratio of neighbouring interval edges in 7, is at least 1/2. For
        smaller sigma it holds up to one rounding of the subtraction. Errors are in units of the
        model difference, as in the paper's text. In the authors' published code they are in units
        of gradients; error_unit "gradient" selects this. With global momentum clients send sums of
        gradients, and errors are in units of these.
     5. Global momentum follows the paper's text, w <- beta w + g, theta <- theta - eta w. (The
        algorithm box puts beta on the wrong term, and the text has a plus before eta.) A round ends
        with the server's step, at this round's learning rate. In the paper's algorithm boxes, the
        next round begins with this step.
     6. The paper writes phi^max with ">=" in its condition for layer-wise fairness. We read it as
        phi^min, the smallest fraction that is kept of each layer. A layer is one parameter tensor.
        The mask always has K entries. If the layers' minimum numbers add up to more than K, only
        the K largest of the entries that fill these minimums are kept.
     7. The P intervals of fractional quantization are (sigma^p u_max, sigma^(p-1) u_max] with sigma
        = (u_min / u_max)^(1/P). The last one includes u_min, the smallest magnitude that is NOT
        ZERO. Zeros get the last interval's code and are left out of its mean. All values of a
        message, on the shared mask and on the client's own mask, are quantized together.
     8. The position code divides the D entries into blocks. In the paper, a block has 1/phi
        entries. There, a position takes log2(1/phi) bits, rounded up to a whole number. Here the
        number of entries is a power of two near 1/phi, namely the one that makes the code shortest.
     9. Batch norm's running statistics never influence training. After a round the module has the
        clients' average. (The authors evaluate with the test batch's statistics.)
    10. Weight decay is part of every local gradient.
    11. Each round of the warm-up has H local steps, too. One published version of the method
        averages after every single step during the warm-up.
    12. The shortcuts of the ResNets are 1x1 convolutions, since only these give 11,173,962
        parameters. Where the paper says "H = 2 and H = 2", we take H = 2 and H = 4. The "sum" of
        updates in the text is the mean, as in the algorithm box.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import re
import struct
import sys
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, zip_longest
from numbers import Real
from reprlib import repr as shorten
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [  # noqa: RUF022
    "CODES", "FAMILIES", "OVERHEAD_BYTES", "PAPER_SHARES", "QUANTIZERS", "RULES", "SERVER",
    "SHARED_FROM", "STAGES", "SUFFIXES", "BlockCode", "Client", "ClientError", "Compressor",
    "Federation", "Feed", "Known", "Link", "LocalTrainer", "MaskRule", "Message", "MessageError",
    "NotFiniteError", "Phase", "RandK", "Scheme", "Server", "Suffix", "TCS", "TCSState", "TopK",
    "Traffic", "Wire",
    "bit_budget", "block_for", "build_model", "cross_entropy", "decode_message", "decode_positions",
    "encode_message", "encode_positions", "estimate_floor", "fractional_dequantize",
    "fractional_quantize", "kept", "layer_sizes", "layerwise_top_k_positions", "layout_of",
    "mask_to_positions", "message_bits", "parameters_to_vector", "positions_to_mask",
    "random_positions",
    "register_quantizer", "register_scheme", "register_suffix", "resnet18", "scaled_sign",
    "tcs_hook", "top_k_mask", "top_k_positions", "unchanged", "vector_to_parameters",
]  # fmt: skip

# ══ 1. Schemes: what a client sends in one round, by name and by field ════════════════════════════
#    The defaults are the paper's (Sec. III-B). The paper's names are registered here by the same
#    functions with which you can register yours.

Quantize = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (K,), P to codes (K,) and means (P,)

RULES: dict[str, type[MaskRule]] = {}  # values of the scheme's field `rule`
QUANTIZERS: dict[str, Quantize] = {}  # values of the scheme's field `quantizer`
CODES: dict[str, BlockCode] = {}  # values of the scheme's field `code`: how a message becomes bytes
FAMILIES: dict[str, dict[str, Any]] = {}  # names without suffixes, and the fields that each sets
SUFFIXES: list[Suffix] = []
# Rules that replace TCS in schemes whose field `shared_from` is their key. The core defines none.
SHARED_FROM: dict[str, type[TCS]] = {}


# Records are named by the fields and defaults of this class: you may add fields, but change none.
@dataclass(frozen=True)
class Scheme:
    """What a client sends in one round, and what it receives. Make a scheme from a name, as in
    `Scheme.named("TCS-L4-Q5")`, or from its fields.

    The *shared mask* consists of the positions that the server and all clients know. A client's
    *own mask* consists of further positions at which this client sends values. Each phi is a
    fraction of all D entries, or of the entries of a layer, from 1e-12 to 1, or None.

    Which entries are sent

    - `name`: 1 to 100 characters.
    - `rule`: which mask rule chooses the masks, a key of RULES: "TCS", "top-K", "rand-K", "dense"
      (every entry, as in FedAvg), or a name that was registered with `register_scheme`.
    - `phi_global`, `phi_local`: the fraction of entries in the shared mask (Eq. 6), and in each
      client's own mask (Sec. II-A). None means that the scheme has no such mask: top-K has only own
      masks, and rand-K has only a shared one. They cannot both be None.
    - `phi_min_global`, `phi_min_local`: the smallest fraction that is kept of every layer, in the
      shared mask and in an own mask (layer-wise fairness, Sec. II-C). None: no minimum.
    - `shared_from`: what TCS takes its shared mask from. "update" means the largest entries of the
      last update, as in the paper. Other values are the keys of SHARED_FROM. Importing
      tcs_lab.schemes adds three: "stale" (of the update of ten rounds ago), "weights" (of the
      model's weights) and "random" (a mask that is drawn in each round from the seed). Rules other
      than "TCS" need "update".
    - `dense_warmup`: whether a round is dense (every entry is sent, in 32 bits) as long as the rule
      has no shared mask yet. With False, clients then send only own masks, which are larger by
      the size of the shared mask.
    - `warmup_masks`: how many times as large masks are in a sparse warm-up, from 1 to 1000. This
      module only looks at whether it is 1: then `Phase.mask_factor` is ignored, and otherwise it is
      applied. (The schedules of tcs_lab set `mask_factor` to this number in the first rounds.)

    How they are sent

    - `value_bits`: q, the bits per value, one of which is the sign (Sec. II-F): 1 to 16, or 32 for
      float32 values that are not quantized.
    - `quantizer`: how values of less than 32 bits are made, a key of QUANTIZERS. "fractional" is
      the paper's.
    - `code`: how a message becomes bytes, a key of CODES. "block" is the paper's.
    - `phi_down`: the fraction of entries that the server sends outside the shared mask. None: all
      entries that any client sent.
    - `down_value_bits`, `down_quantizer`: like `value_bits` and `quantizer`, for the server's
      messages.

    How clients train

    - `local_steps`: H, the number of a client's local steps in a round, from 1 to 10^9 (the paper's
      Algorithm 1).
    - `momentum`: beta of global momentum, at least 0 and below 1 (Algorithm 3). 0: no momentum.
    - `error_accumulation`: whether a client adds what it has not sent to its next difference (Sec.
      II-B).
    - `error_unit`: what happens to errors when the learning rate changes. With "difference", they
      stay as they are, since they are differences of models. With "gradient", as in the authors'
      code, a `Federation` multiplies them by the new rate divided by the last one that was not 0.
      With momentum, errors are sums of gradients and always stay as they are.
    - `centralized`: True for centralized training, which has one client and sends nothing.

    The fields `phi_down`, `down_value_bits`, `down_quantizer`, `dense_warmup`, `warmup_masks`,
    `error_unit` and `shared_from` are not in the paper. A scheme cannot be changed, but
    `dataclasses.replace` makes a changed copy. Raises ValueError for a field that is not allowed.
    """

    name: str
    rule: str = "TCS"
    phi_global: float | None = 1e-2
    phi_local: float | None = 1e-3
    phi_min_global: float | None = None
    phi_min_local: float | None = None
    local_steps: int = 1
    value_bits: int = 32
    momentum: float = 0.0
    error_accumulation: bool = True
    centralized: bool = False
    quantizer: str = "fractional"
    code: str = "block"
    # Beyond the paper.
    down_value_bits: int = 32
    down_quantizer: str = "fractional"
    phi_down: float | None = None
    dense_warmup: bool = True
    warmup_masks: int = 1
    error_unit: str = "difference"
    shared_from: str = "update"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _number(getattr(self, field.name)))
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 100:
            _refuse("name", self.name, "1 to 100 characters")
        _check_one_of("rule", self.rule, RULES)
        _check_one_of("quantizer", self.quantizer, QUANTIZERS)
        _check_one_of("down_quantizer", self.down_quantizer, QUANTIZERS)
        _check_one_of("code", self.code, CODES)
        _check_one_of("error_unit", self.error_unit, ("difference", "gradient"))
        # Those of tcs_lab.schemes are allowed here without it, so that `rule_of` can say what to
        # import.
        sources = ("update", "stale", "weights", "random", *SHARED_FROM)
        _check_one_of("shared_from", self.shared_from, dict.fromkeys(sources))
        if self.shared_from != "update" and self.rule != "TCS":
            _refuse("shared_from", self.shared_from, f"'update' with rule {self.rule}")
        _check_whole("local_steps", self.local_steps, 1, 10**9)
        _check_whole("warmup_masks", self.warmup_masks, 1, 1000)
        _check_bits("value_bits", self.value_bits)
        _check_bits("down_value_bits", self.down_value_bits)
        for key in ("error_accumulation", "centralized", "dense_warmup"):
            _check_flag(key, getattr(self, key))
        object.__setattr__(self, "momentum", _check_momentum(self.momentum))
        for key in _PHIS:
            share = getattr(self, key)
            if share is None:
                continue
            if type(share) not in (int, float) or not 1e-12 <= share <= 1:
                _refuse(key, share, "a fraction from 1e-12 to 1, or None")
            object.__setattr__(self, key, float(share))
        if self.phi_global is None and self.phi_local is None:
            raise ValueError(f"{self.name}: phi_global and phi_local are None: nothing is sent")

    @cached_property
    def intervals(self) -> int:
        """The number of the quantizer's intervals: P = 2^(q-1) for values of q bits, one of which
        is the sign. 0 means that values are not quantized."""
        return _intervals(self.value_bits)

    @cached_property
    def compresses_downlink(self) -> bool:
        """Whether the server sends only a part of its average, or quantizes it, and so keeps
        errors."""
        return self.down_value_bits != 32 or self.phi_down is not None

    @cached_property
    def always_dense(self) -> bool:
        """Whether every entry is sent in 32 bits, in every round."""
        return self.rule == "dense" and not self.intervals and not self.compresses_downlink

    @cached_property
    def keeps_errors(self) -> bool:
        """Whether a client adds what was not sent to its next difference."""
        return self.error_accumulation and not self.always_dense

    @staticmethod
    def named(name: str, **changes: Any) -> Scheme:
        """Return the scheme with this name, such as "TCS-L4-Q5" or "FedAvg".

        A name is a family and any number of suffixes, in any order; upper and lower case count as
        the same. Families are the keys of FAMILIES: TCS, top-K, rand-K, FedAvg (also called FedSGD
        here), Baseline (centralized training), and those registered with `register_scheme`.
        Suffixes are listed in SUFFIXES. This module defines

        - `-L<H>`: H local steps,
        - `-Q<q>`: values of q bits,
        - `-LF`: layer-wise fairness of all masks (`phi_min_global` 1e-3, `phi_min_local` 4e-4),
        - `-PLF`: layer-wise fairness of the shared mask only,
        - `-Global Momentum`, or `-Momentum` for Baseline: momentum 0.9.

        Importing tcs_lab.schemes adds more, and so does `register_suffix`. `changes` replaces
        fields other than `name` and `rule`: `Scheme.named("TCS", phi_global=0.02)`.

        Raises ValueError for an unknown name, for a suffix that makes no sense with the family, for
        two suffixes that set the same field, and for a change that contradicts the name, such as
        local_steps=2 for "TCS-L4". A scheme of the paper also refuses a `phi_global` or `phi_local`
        for a mask that it does not have, such as phi_global for top-K, and another `centralized`.
        """
        family, parts = _split_name(name)
        _check_fields(changes)
        changes = {field: _number(value) for field, value in changes.items()}
        _check_phis(family, changes)
        found = [(part, *_suffix_of(part, name)) for part in parts]
        fields, said = dict(FAMILIES[family]), {False: set[str](), True: set[str]()}
        for part, suffix, number in sorted(found, key=lambda one: one[1].last):
            _check_needs(suffix, part, fields, name)
            sets = suffix.change(dict(fields), number)
            if not isinstance(sets, dict):
                _refuse(f"suffix {suffix.form}", sets, "a dictionary of fields, returned by it")
            _check_fields(sets, f"suffix {suffix.form}: ")
            if said[suffix.last] & sets.keys():  # the last ones change what others have set
                what = f"{part!r} sets what another suffix sets"
                raise ValueError(f"scheme {shorten(name)}: {what}")
            for field in sets.keys() & changes.keys():
                # `changes` may replace a suffix's phis and beta, which are only defaults, but not
                # its number or its switch
                is_said = number or type(sets[field]) in (bool, str)
                if is_said and field not in _PHIS and changes[field] != sets[field]:
                    got = f"got {changes[field]!r} beside {part!r}, which says {sets[field]!r}"
                    raise ValueError(
                        f"scheme {shorten(name)}: {field}: {got}, allowed: one of them"
                    )
            said[suffix.last] |= sets.keys()
            fields |= sets
        spelt = "".join(_spelling(suffix, number, fields) for _, suffix, number in found)
        return Scheme(name=family + spelt, **(fields | changes))


def _split_name(name: str) -> tuple[str, list[str]]:
    """Split a scheme's name into its family, the longest one that fits, and its suffixes."""
    text = re.sub(r"-\s+", "-", str(name).strip())
    stem = text.rstrip("+")
    for family in sorted(FAMILIES, key=len, reverse=True):
        if stem.lower() == family.lower() or stem.lower().startswith(family.lower() + "-"):
            parts = stem[len(family) :].split("-")[1:]
            pluses = text[len(stem) :]
            return family, [*parts, pluses] if pluses else parts
    raise ValueError(f"scheme {shorten(name)} is unknown; {_known_schemes()}")


def _known_schemes() -> str:
    suffixes = ", ".join(suffix.form for suffix in SUFFIXES)
    more = "" if SHARED_FROM else "; import tcs_lab.schemes adds others, such as STC and DGC"
    return f"known: {', '.join(FAMILIES)}, with {suffixes} where it makes sense (TCS-L4-Q5){more}"


class Suffix(NamedTuple):
    """A part of scheme names, such as "-L<H>". For the fields see `register_suffix`."""

    form: str
    pattern: str
    says: str
    change: Callable[[dict[str, Any], int], dict[str, Any]]
    needs: tuple[str, ...] = ()
    last: bool = False


def phis_of(fields: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return phi_global and phi_local from `fields`, or Scheme's default where one is missing."""
    shared = fields.get("phi_global", Scheme.phi_global)
    own = fields.get("phi_local", Scheme.phi_local)
    return shared, own


def _suffix_of(part: str, name: str) -> tuple[Suffix, int]:
    """Return the suffix that matches a part of a name, and its number (0 if it has none)."""
    for suffix in SUFFIXES:
        match = re.fullmatch(suffix.pattern, part.lower())
        if match:
            digits = (match[1] if match.groups() else None) or "0"
            if not digits.isdecimal():
                got = f"the part {digits!r} of {part!r} matches its group"
                raise ValueError(f"suffix {suffix.form}: {got}, allowed: a whole number")
            return suffix, int(digits)
    raise ValueError(f"scheme {shorten(name)}: {shorten(part)} is unknown; {_known_schemes()}")


_NEEDS = {  # what a suffix may need, and the words for it in an error
    "own": "masks of the clients' own (phi_local)",
    "shared": "a shared mask (phi_global)",
    "masks": "masks",
    "S_top": "masks of the largest entries",
    "any scheme": "",
}


def _check_needs(suffix: Suffix, part: str, fields: dict[str, Any], name: str) -> None:
    shared, own = phis_of(fields)
    rule = fields.get("rule", Scheme.rule)
    has = {
        "own": bool(own),
        "shared": bool(shared),
        "masks": rule != "dense",
        "S_top": rule not in ("dense", "rand-K"),
        "any scheme": True,  # centralized training, too
    }
    lacking = [_NEEDS[need] for need in suffix.needs if not has[need]]
    if fields.get("centralized") and "any scheme" not in suffix.needs:
        lacking = ["clients that send something"]
    if lacking:
        what = f"{shorten(part)} makes no sense without {lacking[0]}"
        raise ValueError(f"scheme {shorten(name)}: {what}; {_known_schemes()}")


def _check_phis(family: str, changes: dict[str, Any]) -> None:
    """Raise ValueError if changes give a family of the paper a mask that it does not have, or make
    it centralized or not."""
    if family not in _THE_PAPERS:
        return
    fields = FAMILIES[family]
    is_central = fields.get("centralized", False)
    if changes.get("centralized", is_central) != is_central:
        _refuse(f"{family}: centralized", changes["centralized"], f"{is_central}")
    for key in ("phi_global", "phi_local"):
        settled = key in fields and (fields["rule"] == "dense" or fields[key] is None)
        if settled and changes.get(key, fields[key]) != fields[key]:
            allowed = f"{fields[key]}, since another value has no meaning there"
            other = "phi_local" if key == "phi_global" else "phi_global"
            if fields["rule"] != "dense":
                allowed += f" (set {other})"
            _refuse(f"{family}: {key}", changes[key], allowed)


def _spelling(suffix: Suffix, number: int, fields: dict[str, Any]) -> str:
    """Return a suffix as it is written in the names of records, whichever way the user wrote it."""
    if suffix.form == "-Global Momentum" and fields.get("centralized"):
        return "-Momentum"
    return re.sub("<.*>", str(number), suffix.form)


# Checks that the whole module uses ────────────────────────────────────────────────────────────────

_PHIS = ("phi_global", "phi_local", "phi_min_global", "phi_min_local", "phi_down")


def _check_fields(given: Iterable[str], what: str = "") -> None:
    """Raise ValueError unless these are names of fields of Scheme other than `name` and `rule`."""
    allowed = {field.name for field in dataclasses.fields(Scheme)} - {"name", "rule"}
    if unknown := sorted(set(given) - allowed):
        known = ", ".join(sorted(allowed))
        raise ValueError(f"{what}unknown field: {', '.join(unknown)}; allowed: {known}")


def _refuse(key: str, value: Any, allowed: str) -> NoReturn:
    raise ValueError(f"{key}: got {shorten(value)} ({type(value).__name__}), allowed: {allowed}")


def _number(value: Any) -> Any:
    """Convert a numpy number or a tensor with zero dimensions to a Python number; return others
    unchanged.

    Such numbers become part of states, and torch.load refuses numpy's types.
    """
    if isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0:
        return value.item()
    return value


def _check_whole(key: str, value: Any, low: int, high: int | None = None) -> int:
    """Return the number as a Python int. Raises ValueError for a bool, a float, or one out of
    range."""
    number = _number(value)
    if type(number) is not int or number < low or (high is not None and number > high):
        span = f">= {low}" if high is None else f"from {low} to {high}"
        _refuse(key, number, f"a whole number {span}")
    return number


def _check_flag(key: str, value: Any, more: str = "") -> bool:
    """Return the flag as a Python bool. Raises ValueError for anything but True and False."""
    flag = _number(value)
    if type(flag) is not bool:
        _refuse(key, value, f"True or False{more}")
    return flag


def _check_tensor(key: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{key}: got a {type(value).__name__}, allowed: a tensor")
    return value


def _check_momentum(value: Any) -> float:
    """Return a momentum as a float. Raises ValueError for a bool, for NaN, or for one out of
    range."""
    number = _number(value)
    if type(number) not in (int, float) or not 0 <= number < 1:
        _refuse("momentum", number, "a number in [0, 1)")
    return float(number)


def _check_bits(key: str, value: Any) -> None:
    if type(value) is not int or not (1 <= value <= 16 or value == 32):
        _refuse(key, value, "1 to 16, or 32 for float32")


def _listed(key: str, value: Any) -> list[Any]:
    """Return what an iterable contains. Raises ValueError for anything else, and for a string."""
    value = _number(value)  # a tensor with zero dimensions counts as iterable
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict):
        _refuse(key, value, "a list")
    return list(value)


def _check_text(key: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        _refuse(key, value, "a string that is not empty")


def _check_one_of(key: str, value: Any, known: Iterable[str]) -> None:
    names = list(known)
    if not isinstance(value, str) or value not in names:
        _refuse(key, value, ", ".join(names))


def _intervals(value_bits: int) -> int:
    return 0 if value_bits == 32 else 2 ** (value_bits - 1)


# Schemes, suffixes and quantizers of your own ─────────────────────────────────────────────────────


def register_suffix(
    form: str, pattern: str, says: str, needs: tuple[str, ...] = (), last: bool = False
) -> Callable[[Callable], Callable]:
    """Register a suffix of scheme names. Use this as a decorator of the suffix's function
    `change(fields, number)`.

        @register_suffix("-G<n>", r"g([1-9])", "a shared mask of n/1000", ("shared",))
        def _shared_mask(fields, number):
            return {"phi_global": number / 1000}

    `change` returns the fields of Scheme, other than `name` and `rule`, that the suffix sets. It is
    called with the fields that
    the family and earlier suffixes have set (a field that is missing has its default) and with the
    suffix's number, or 0 if it has none.

    - `form`: the suffix as it is written in names and in error messages. If it has a number, write
      the number as a letter in angle brackets.
    - `pattern`: a regular expression for the suffix in lower case, without the dash. If it has a
      group, the group matches the number.
    - `says`: a description in a few words.
    - `needs`: what a scheme must have so that the suffix makes sense with it. Any number of these
      can be given: "own" (own masks of the clients), "shared" (a shared mask), "masks" (masks of
      any kind), "S_top" (masks of the largest entries) and "any scheme". The last one requires
      nothing: it allows the suffix for centralized training, which otherwise refuses it.
    - `last`: True for a suffix that changes what other suffixes have set. It is applied after them.

    A suffix with the same form is replaced. If several suffixes match a part of a name, the one
    that was registered first is used. Raises ValueError for a need that is not in this list, for a
    pattern that is no regular expression, and for anything but a function. If the function does not
    return a dictionary, `Scheme.named` raises ValueError when the suffix is used.
    """
    for key, text in (("form", form), ("pattern", pattern), ("says", says)):
        _check_text(f"suffix: {key}", text)
    try:
        re.compile(pattern)
    except re.error as error:
        got = f"got {pattern!r} ({error})"
        raise ValueError(f"suffix {form}: pattern: {got}, allowed: a regular expression") from None
    needs, last = tuple(_listed("needs", needs)), _check_flag("last", last)
    for need in needs:
        _check_one_of("needs", need, _NEEDS)

    def register(change: Callable) -> Callable:
        if not callable(change):
            _refuse(f"suffix {form}", change, "a function of the fields and a number")
        SUFFIXES[:] = [suffix for suffix in SUFFIXES if suffix.form != form]
        SUFFIXES.append(Suffix(form, pattern, says, change, needs, last))
        return change

    return register


@register_suffix("-L<H>", r"l([1-9]\d{0,8})", "H local steps")
def _local_steps(fields: dict[str, Any], number: int) -> dict[str, Any]:
    return {"local_steps": number}


@register_suffix("-LF", "lf", "layer-wise fairness of both masks (Sec. II-C)", ("S_top",))
def _fair(fields: dict[str, Any], _: int) -> dict[str, Any]:
    shared, own = phis_of(fields)
    return {"phi_min_global": 1e-3 if shared else None, "phi_min_local": 4e-4 if own else None}


@register_suffix("-PLF", "plf|pfl", "fairness of the shared mask only", ("S_top", "shared"))
def _partly_fair(fields: dict[str, Any], _: int) -> dict[str, Any]:
    return {"phi_min_global": 1e-3}


_MOMENTUM = "global momentum with beta = 0.9 (after Baseline, write -Momentum)"


@register_suffix("-Global Momentum", "(?:global )?momentum", _MOMENTUM, ("any scheme",))
def _global_momentum(fields: dict[str, Any], _: int) -> dict[str, Any]:
    return {"momentum": 0.9}


def register_scheme(name: str, **fields: Any) -> Callable[[type[MaskRule]], type[MaskRule]]:
    """Register a family of schemes. Use this as a decorator of the family's mask rule, a class
    derived from `MaskRule`. Suffixes such as -L<H> and -Q<q> can then follow its name.

        @register_scheme("TCS-Average", phi_global=1e-2, phi_local=1e-3)
        class RunningAverage(TCS):
            keeps = ("average_D",)  # those of TCS are added
            average_D = 0.0

            def observe(self, update_D):
                self.average_D = 0.9 * self.average_D + update_D.abs()
                super().observe(self.average_D)

    `fields` are fields of Scheme other than `name` and `rule`; the others have their defaults,
    which are those of TCS. So if there is no shared mask, give phi_global=None, and if there are no
    own masks, phi_local=None. A family with the same name is replaced. Raises ValueError for a
    field that is not allowed, for a name that the paper uses, for a name such as "TCS-L4", which
    already means a family with suffixes, and for anything but a class derived from `MaskRule`.
    """
    _check_text("scheme: name", name)
    if name != re.sub(r"-\s+", "-", name.strip()):
        _refuse("scheme: name", name, "one without blanks at its ends or after a dash")
    _check_fields(fields)
    if fields.get("shared_from", "update") != "update":
        _refuse("shared_from", fields["shared_from"], "'update' with a rule of your own")
    papers = name in _THE_PAPERS and (name in FAMILIES or name in RULES)
    if papers or name.endswith("+") or _has_suffixes(name):
        raise ValueError(f"scheme {name!r} is known already: choose another name")
    Scheme(name=name, rule="dense", **fields)  # raises for a field that is wrong

    def register(rule: type[MaskRule]) -> type[MaskRule]:
        if not isinstance(rule, type) or not issubclass(rule, MaskRule):
            raise ValueError(
                f"scheme {name!r}: got {shorten(rule)}, allowed: a class derived from MaskRule"
            )
        if isinstance(rule.keeps, str):
            got = f"got {rule.keeps!r}, allowed: a tuple, such as ({rule.keeps!r},)"
            raise ValueError(f"scheme {name!r}: keeps: {got}")
        RULES[name] = rule
        FAMILIES[name] = {"rule": name, **fields}
        return rule

    return register


_THE_PAPERS = ("TCS", "top-K", "rand-K", "dense", "FedAvg", "FedSGD", "Baseline")


def _has_suffixes(name: str) -> bool:
    """Return whether this is the name of a known family with suffixes."""
    if name in FAMILIES:
        return False
    try:
        Scheme.named(name)
    except ValueError:
        return False
    return True


def register_quantizer(letter: str, name: str) -> Callable[[Quantize], Quantize]:
    """Register a quantizer for the suffix -<letter><q> of scheme names. This is a decorator.

        @register_quantizer("U", "uniform")
        def uniform_quantize(values_K, intervals):
            edge = (values_K.abs().max() / intervals).clamp(min=1e-30)  # they may all be 0
            interval_K = (values_K.abs() / edge).ceil().clamp(1, intervals).long() - 1
            means_P = edge * (torch.arange(intervals, device=edge.device) + 0.5)
            return (interval_K + intervals * (values_K < 0)).int(), means_P

    A quantizer takes one or more finite values (K,) float32 and the number of intervals P =
    2^(q-1). It returns codes (K,) int32 and the mean magnitude of each interval, (P,) float32 >= 0.
    A code is the index of the value's interval, plus P if the value is negative. The quantizer must
    not change the values, and on a GPU it should not read any of them on the host.

    The suffix applies to what clients send. For what the server sends, set the field
    `down_quantizer`. The same letter and name together replace an earlier quantizer. Raises
    ValueError if only one of the two is already used, and for the name "fractional".
    """
    if not isinstance(letter, str):
        _refuse("letter", letter, "letters that begin no other suffix")
    _check_text("quantizer: name", name)
    form, pattern = f"-{letter}<q>", rf"{letter.lower()}([1-9]\d?)"
    says = f"values of q bits, quantizer {name}"
    others = [suffix for suffix in SUFFIXES if (suffix.form, suffix.says) != (form, says)]
    taken = any(re.fullmatch(suffix.pattern, f"{letter.lower()}5") for suffix in others)
    if taken or not letter.isalpha():
        raise ValueError(f"letter: got {letter!r}, allowed: letters that begin no other suffix")
    if name == "fractional" and name in QUANTIZERS:
        raise ValueError(f"quantizer {name!r} is the paper's: choose another name")
    if any(suffix.says == says for suffix in others):
        raise ValueError(f"name: got {name!r}, which another letter stands for: choose a new name")

    def _quantized(fields: dict[str, Any], number: int) -> dict[str, Any]:
        return {"value_bits": number, "quantizer": name}

    def register(quantize: Quantize) -> Quantize:
        if not callable(quantize):
            _refuse(f"quantizer {name}", quantize, "a function of values and intervals")
        register_suffix(form, pattern, says)(_quantized)
        QUANTIZERS[name] = quantize
        return quantize

    return register


# ══ 2. Masks: S_top(v, K), plain and layer-wise (Sec. II-B, II-C) ═════════════════════════════════
#    A mask is a (D,) bool tensor, or its K positions in ascending order, as in messages.


def kept(phi: float, dimension: int) -> int:
    """Return how many of D = `dimension` entries are kept, K = ceil(phi * D), at least 1.

    `phi` is a fraction above 0 and at most 1, which is not checked.
    """
    product = _number(phi) * _number(dimension)
    whole = round(product)
    # rounding errors of phi and of the product (5e-10, or 4e-16 of it) must not increase K
    is_whole = math.isclose(product, whole, rel_tol=4e-16, abs_tol=5e-10)
    return max(1, whole if is_whole else math.ceil(product))


def top_k_positions(
    vector_D: Tensor, k: int, excluded: Tensor | None = None, among_K: Tensor | None = None
) -> Tensor:
    """Return the positions of the k entries of largest magnitude (S_top), int64 (k,), ascending.

    The result is exact on every device. Of equal magnitudes, the entry with the lower index is
    chosen. Entries in `excluded`, a bool mask (D,) or int64 positions, are never chosen. `among_K`
    (int64, ascending) are positions outside of which the vector is known to be 0.

    Raises ValueError if `vector_D` has several dimensions, if k is not a whole number between 0 and
    the number of entries that are not excluded, if an entry that may be chosen is NaN, or if both
    `excluded` and `among_K` are given.

    On a GPU, values are not checked, because the host would have to wait for them. There, NaN
    counts as the largest number, and if a mask leaves fewer than k entries, excluded ones are used.
    """
    if among_K is not None and excluded is not None:
        raise ValueError("among_K: got one together with excluded, allowed: only one of the two")
    _check_vector(vector_D)
    k, numbers_D = _number(k), vector_D.detach()
    _check_k(k, len(numbers_D))
    taken_D = None if excluded is None else _as_mask(excluded, numbers_D)
    if not k:
        return torch.empty(0, dtype=torch.int64, device=numbers_D.device)
    if not is_on_cpu(numbers_D) or numbers_D.dtype != torch.float32:
        magnitudes_D, eligible = numbers_D.abs(), len(numbers_D)
        if taken_D is not None:
            magnitudes_D.masked_fill_(taken_D, -1.0)
            eligible -= int(taken_D.sum()) if is_on_cpu(taken_D) else 0
        _check_k(k, eligible)
        return _largest_by_topk(magnitudes_D.unsqueeze(0), k)[0]
    # For float32 on a CPU, a threshold somewhat below the k-th largest magnitude is estimated from
    # a sample. We call it the floor. Few entries reach it, and S_top is chosen exactly among these.
    # If fewer than k entries reach it, half of the floor is tried, and then 0, which includes all
    # entries. So the estimate never changes the result.
    values_D = numbers_D.numpy()
    if among_K is not None and len(among_K) >= k:
        near = among_K.numpy()
        found = near[_largest_by_numpy(abs(values_D[near]), k)]
        if values_D[found].all():  # otherwise zeros are chosen; the first may lie outside among_K
            return torch.from_numpy(found)
    excluded_D = None if taken_D is None else taken_D.numpy()
    floor = estimate_floor(values_D, k, excluded_D)
    for lowest in (floor, floor / 2, 0.0):
        near = _not_below(lowest, values_D, excluded_D)
        if len(near) >= k:
            break
    _check_k(k, len(near))
    return torch.from_numpy(near[_largest_by_numpy(abs(values_D[near]), k)])


def top_k_mask(vector_D: Tensor, k: int) -> Tensor:
    """Return S_top(v, K) as a mask, Sec. II-B: (D,) bool with exactly k ones.

    Of equal magnitudes, the entry with the lower index is chosen. Raises what `top_k_positions`
    raises.
    """
    return positions_to_mask(top_k_positions(vector_D, k), len(vector_D))


_LEAST = 2.0**-149  # the least float32 number above 0


def estimate_floor(values_D: np.ndarray, k: int, excluded_D: np.ndarray | None = None) -> float:
    """Estimate a magnitude somewhat below the k-th largest from a sample of some 4,000 entries.

    The estimate can be too high: then `top_k_positions` tries lower magnitudes.

    `values_D` is a float32 array. Entries in the bool array `excluded_D` (D,) do not count. For a
    vector of fewer than 16,384 entries, or if the sample has too few entries for this k, returns
    the least float32 number above 0, which excludes only entries that are 0.
    """
    # The sample consists of every n-th entry (n is `step`), so about k/n of the k largest are in
    # it. The result is the m-th largest magnitude of the sample (m is `wanted`). To be safe, m is
    # 1.2 k/n plus four standard deviations of how many of the k largest are in a sample.
    step = len(values_D) >> 12 | 1
    if step < 4:
        return _LEAST
    sample = abs(values_D[::step])
    if excluded_D is not None:
        sample = sample[~excluded_D[::step]]
    wanted = int(1.2 * k / step + 4 * math.sqrt(k / step)) + 1
    if wanted >= len(sample):
        return _LEAST
    return float(np.partition(sample, len(sample) - wanted)[len(sample) - wanted]) or _LEAST


_PIECE = 1 << 17  # this many entries fit the cache of a CPU core


def _not_below(floor: float, values_D: np.ndarray, excluded_D: np.ndarray | None) -> np.ndarray:
    """Return positions outside a mask at which the magnitude is >= floor or NaN, ascending.

    Each entry is read once. The vector is processed in pieces, without a copy of any piece.
    """
    found = []
    below = np.empty(min(len(values_D), _PIECE), dtype=bool)
    above = np.empty_like(below)
    for start in range(0, len(values_D), _PIECE):
        piece = values_D[start : start + _PIECE]
        is_below = np.less(piece, floor, out=below[: len(piece)])
        is_below &= np.greater(piece, -floor, out=above[: len(piece)])
        near = np.logical_not(is_below, out=is_below).nonzero()[0]
        near += start
        found.append(near)
    near = found[0] if len(found) == 1 else np.concatenate(found)
    return near if excluded_D is None else near[~excluded_D[near]]


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether the host can read values of this tensor without waiting.

    On a GPU it would have to wait until all earlier work of the GPU is done.
    """
    return tensor.device.type == "cpu"


_TOGETHER = 1 << 28  # this many float32 numbers take a gigabyte


def top_k_of_each(vectors: list[Tensor], k: int, excluded_K: Tensor) -> Tensor:
    """Return S_top of each of N vectors (D,) outside of some positions: int64 (N, k), rows
    ascending.

    Each row equals what `top_k_positions` returns for this vector. The vectors are processed
    together, which takes less time on a GPU: the number of calls hardly grows with N. On a GPU no
    value is checked. As many vectors are copied at a time as fit into a gigabyte, but at least one.
    """
    dimension, device = len(vectors[0]), vectors[0].device
    found, together = [], max(1, _TOGETHER // dimension)
    for start in range(0, len(vectors), together):
        part = vectors[start : start + together]
        magnitudes_ND = torch.empty((len(part), dimension), dtype=torch.float32, device=device)
        for vector_D, magnitudes_D in zip(part, magnitudes_ND, strict=True):
            torch.abs(vector_D.detach(), out=magnitudes_D)
        magnitudes_ND.index_fill_(1, excluded_K, -1.0)
        found.append(_largest_by_topk(magnitudes_ND, k))
    return torch.cat(found)


def _largest_by_topk(numbers_ND: Tensor, k: int) -> Tensor:
    """Return the positions of each row's k >= 1 largest numbers, ascending: int64 (N, k). On a GPU
    the host reads none."""
    largest_NK, positions_NK = numbers_ND.topk(k, sorted=False)
    kth_N = largest_NK.amin(1, keepdim=True)
    if is_on_cpu(kth_N) and kth_N.isnan().any():
        raise ValueError(_NOT_A_NUMBER)
    # Of several entries equal to the k-th, topk returns any. Replace the n-th of them by the n-th
    # such entry of the whole row, so that lower indices win.
    is_tie_NK = largest_NK == kth_N
    # `nonzero_static` finds each row's first k ties without counting all of them on the host.
    ties_NK = [
        torch.nonzero_static(is_tie_D, size=k, fill_value=0).squeeze(1)
        for is_tie_D in numbers_ND == kth_N
    ]
    first_ties_NK = torch.stack(ties_NK)
    nth_tie_NK = (is_tie_NK.cumsum(1) - 1).clamp_(min=0)  # before the first tie it is not used
    positions_NK = torch.where(is_tie_NK, first_ties_NK.gather(1, nth_tie_NK), positions_NK)
    return positions_NK.sort(1).values


def _largest_by_numpy(numbers_D: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k >= 1 largest numbers, ascending."""
    near, width = numbers_D, max(8 * k, 512)
    if len(near) > 4 * width:
        # The maxima of k columns are at least `bound`, so the k-th largest entry is, too.
        rows = len(near) // width
        maxima = near[: rows * width].reshape(rows, width).max(0)
        bound = np.partition(maxima, width - k)[width - k]
        near = near[~(near < bound)]
    kth = np.partition(near, len(near) - k)[len(near) - k :].min()  # a NaN comes last here
    if np.isnan(kth):
        raise ValueError(_NOT_A_NUMBER)
    chosen = (numbers_D >= kth).nonzero()[0]
    if len(chosen) > k:  # of the entries equal to the k-th, keep the first ones
        tied = numbers_D[chosen] == kth
        room = k - (len(chosen) - int(tied.sum()))
        chosen = chosen[~(tied & (tied.cumsum() > room))]
    return chosen


_NOT_A_NUMBER = "the vector holds a NaN: its largest entries are not defined"


def _check_vector(vector_D: Tensor) -> None:
    if _check_tensor("vector_D", vector_D).dim() != 1:
        raise ValueError(f"vector_D: got shape {tuple(vector_D.shape)}, allowed: one dimension")


def _check_k(k: int, eligible: int) -> None:
    if type(k) is not int or not 0 <= k <= eligible:
        allowed = f"a whole number from 0 to {eligible}, the entries that may be chosen"
        raise ValueError(f"k: got {shorten(k)}, allowed: {allowed}")


def _as_mask(mask: Tensor, vector_D: Tensor) -> Tensor:
    """Return a mask, or positions, as a (D,) mask. Positions are moved to the vector's device."""
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.int64):
        got = f"{mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(
            f"excluded: got {got}, allowed: a tensor of positions (int64) or of booleans (D,)"
        )
    if mask.dtype == torch.int64:
        return positions_to_mask(mask.to(vector_D.device), len(vector_D))
    if mask.shape != vector_D.shape:
        got = f"a mask of shape {tuple(mask.shape)}"
        raise ValueError(f"excluded: got {got}, allowed: {tuple(vector_D.shape)}")
    return mask


def random_positions(k: int, dimension: int, *seed: int) -> Tensor:
    """Draw k different positions out of D = `dimension`: int64 (k,), ascending, on the CPU.

    `seed` are whole numbers >= 0. With the same version of numpy, the same numbers always give the
    same positions, so these need not be sent. Raises ValueError if k is larger than D, and for
    other numbers that are not allowed.
    """
    dimension = _check_whole("dimension", dimension, 1)
    k = _check_whole("k", k, 0, dimension)
    numbers = [_check_whole("seed", number, 0) for number in seed]
    chosen = np.random.default_rng(numbers).choice(dimension, k, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(chosen))


def positions_to_mask(positions_K: Tensor, dimension: int) -> Tensor:
    """Return a (D,) bool mask with ones at the positions, int64 (K,), on their device.

    On a CPU, raises ValueError for a position that is out of range. On a GPU this is not checked:
    such a position leads to an error of CUDA or to a wrong mask.
    """
    dimension = _number(dimension)
    if _check_tensor("positions", positions_K).dtype != torch.int64 or positions_K.dim() != 1:
        got = f"{tuple(positions_K.shape)} {positions_K.dtype}"
        raise ValueError(f"positions: got shape {got}, allowed: one dimension, torch.int64")
    if is_on_cpu(positions_K) and len(positions_K):
        low, high = positions_K.aminmax()
        if low < 0 or high >= dimension:
            got = f"{int(low)} to {int(high)}"
            raise ValueError(f"positions: got {got}, allowed: 0 to {dimension - 1}")
    mask_D = torch.zeros(dimension, dtype=torch.bool, device=positions_K.device)
    return mask_D.index_fill_(0, positions_K, True)


def mask_to_positions(mask_D: Tensor) -> Tensor:
    """Return the positions of a (D,) bool mask's ones: int64 (K,), ascending, on its device.

    The mask is not checked. On a GPU the host waits, because it has to know K.
    """
    if is_on_cpu(mask_D):  # numpy's call costs less
        return torch.from_numpy(mask_D.numpy().nonzero()[0])
    return mask_D.nonzero(as_tuple=True)[0]


# Layer-wise fairness ──────────────────────────────────────────────────────────────────────────────


def layerwise_top_k_positions(
    vector_D: Tensor, k: int, layer_sizes: list[int], phi_min: float, excluded: Tensor | None = None
) -> Tensor:
    """Return the k positions that S_top chooses under layer-wise fairness (Eq. 14, 15): int64 (k,),
    ascending.

    First, every layer l nominates its ceil(phi_min * d_l) largest entries. Here d_l, from
    `layer_sizes`, is the number of its entries. Entries in `excluded` (see `top_k_positions`) are
    never nominated, so a layer with too few others nominates all of these. If k or more entries are
    nominated in all, the k largest of them are chosen. Otherwise all of them are chosen, and then
    the largest of the entries that are left, until there are k.

    Raises ValueError for sizes or a k that do not fit, for a `phi_min` that is not above 0 and at
    most 1, or if an entry that may be chosen is NaN. On a GPU the host waits for these checks.
    """
    k, layer_sizes = _number(k), _check_layer_sizes(layer_sizes)
    _check_vector(vector_D)
    if sum(layer_sizes) != len(vector_D):
        got = f"layer_sizes: got {sum(layer_sizes)} in all"
        raise ValueError(f"{got}, allowed: {len(vector_D)}")
    phi_min = _number(phi_min)
    if not isinstance(phi_min, Real) or not 0 < float(phi_min) <= 1:
        _refuse("phi_min", phi_min, "a fraction in (0, 1]")
    magnitudes_D = vector_D.detach().abs()
    eligible = len(vector_D)
    if excluded is not None:
        taken_D = _as_mask(excluded, magnitudes_D)
        magnitudes_D[taken_D] = -1.0
        eligible -= int(taken_D.sum())
    _check_k(k, eligible)
    if magnitudes_D.isnan().any():
        raise ValueError(_NOT_A_NUMBER)
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=vector_D.device)
    fair = []
    for end, size in zip(accumulate(layer_sizes), layer_sizes, strict=True):
        layer = magnitudes_D[end - size : end]
        fair.append(_largest(layer, kept(phi_min, size)) + (end - size))
    fair_F = torch.cat(fair)
    fair_F = fair_F[magnitudes_D[fair_F] >= 0]  # a layer may have fewer eligible entries
    if len(fair_F) >= k:
        return fair_F[_largest(magnitudes_D[fair_F], k)]
    magnitudes_D[fair_F] = -1.0
    rest_F = _largest(magnitudes_D, k - len(fair_F))
    return torch.cat([fair_F, rest_F]).sort().values


def _check_layer_sizes(given: Iterable[int]) -> list[int]:
    """Return the sizes as Python ints. Raises ValueError unless they are one or more, each >= 1."""
    sizes = [_number(size) for size in _listed("layer_sizes", given)]
    if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        allowed = "one or more whole numbers, each >= 1"
        raise ValueError(f"layer_sizes: got {shorten(sizes)}, allowed: {allowed}")
    return sizes


def _largest(magnitudes_D: Tensor, k: int) -> Tensor:
    """Return the positions of the k >= 1 largest, ascending, with the faster method on their
    device."""
    if not is_on_cpu(magnitudes_D) or magnitudes_D.dtype != torch.float32:
        return _largest_by_topk(magnitudes_D.unsqueeze(0), k)[0]
    values = magnitudes_D.numpy()
    if k == 1:  # of equal numbers, argmax returns the first
        return torch.from_numpy(values.argmax(0, keepdims=True))
    return torch.from_numpy(_largest_by_numpy(values, k))


# ══ 3. Positions on the wire: the sparse position code (Sec. II-E, Alg. 4) ════════════════════════
#    The D entries are divided into blocks of about 1/phi entries. Every position is coded as "1"
#    and its offset inside the block, and every block ends with "0". If a fraction phi of the
#    entries is sent, this takes log2(1/phi) + 2 bits per position.


def encode_positions(positions_K: Tensor, dimension: int, block: int) -> Tensor:
    """Encode positions as bits, the inverse of the paper's Algorithm 4: uint8 tensor of 0 and 1.

    `positions_K` must be int64, strictly ascending, and from 0 to `dimension` - 1. The D =
    `dimension` entries are divided into blocks of `block` entries. Each position is coded as a "1"
    and its offset inside its block, which takes w = ceil(log2(block)) bits. Each block ends with a
    "0". So the code has K (1 + w) + ceil(D / block) bits. The receiver needs the same `block`; the
    function `block_for(K, D)` returns the power of two with which the code is shortest.

    Raises ValueError for positions out of range or out of order.
    """
    dimension = _check_whole("dimension", dimension, 1)
    block = _check_whole("block", block, 1)
    check_positions(positions_K, dimension)
    width = intra_block_bits(block)
    order = torch.arange(len(positions_K), device=positions_K.device)
    # Before position i, which lies in block b, there are i coded positions and b ends of blocks.
    starts_K = order * (1 + width) + positions_K // block
    length = position_bits(len(positions_K), dimension, block)
    bits = torch.zeros(length, dtype=torch.uint8, device=positions_K.device)
    bits[starts_K] = 1
    shifts = torch.arange(width - 1, -1, -1, device=positions_K.device)
    inside = (positions_K % block).unsqueeze(1) >> shifts & 1
    bits[starts_K.unsqueeze(1) + torch.arange(1, width + 1, device=bits.device)] = inside.byte()
    return bits


def decode_positions(bits: Tensor, dimension: int, block: int) -> Tensor:
    """Decode positions from bits, the paper's Algorithm 4: int64 (K,), ascending.

    `bits` must be a uint8 tensor of 0 and 1, exactly one code long, that `encode_positions` has
    made with the same `dimension` and `block`. Raises ValueError for anything that is not the code
    of some set of positions.
    """
    dimension = _check_whole("dimension", dimension, 1)
    block = _check_whole("block", block, 1)
    _check_tensor("bits", bits)
    if bits.dim() != 1 or bits.dtype != torch.uint8 or (bits > 1).any():
        got = f"{tuple(bits.shape)} {bits.dtype}"
        raise ValueError(f"bits: got {got}, allowed: a one-dimensional uint8 tensor of 0 and 1")
    width = intra_block_bits(block)
    # Alg. 4 reads bit by bit. Here a loop only looks for the places at which encoded positions
    # begin, each with a "1". The offsets of all positions are then read together.
    starts_K = torch.from_numpy(_flag_starts(bits, width)).to(bits.device)
    count = len(starts_K)
    length = position_bits(count, dimension, block)
    if len(bits) != length:
        raise ValueError(f"bits: got {len(bits)} with {count} positions, allowed: {length}")
    block_index_K = starts_K - torch.arange(count, device=bits.device) * (1 + width)
    inside_K = torch.zeros_like(starts_K)
    for place in range(1, width + 1):  # one bit of all positions at a time takes little memory
        inside_K = inside_K.mul_(2).add_(bits[starts_K + place])
    if (inside_K >= block).any():
        got = f"position {int(inside_K.max())} inside a block"
        raise ValueError(f"bits: got {got}, allowed: 0 to {block - 1}")
    positions_K = block_index_K * block + inside_K
    check_positions(positions_K, dimension)
    return positions_K


def _flag_starts(bits: Tensor, width: int) -> np.ndarray:
    """Return the index of the "1" with which the code of each position begins."""
    stream, starts = bits.cpu().numpy().tobytes(), array("q")
    find, place = stream.find, stream.find(b"\x01")
    while place >= 0:
        starts.append(place)
        place = find(b"\x01", place + 1 + width)
    if starts and starts[-1] + width >= len(stream):
        raise ValueError("bits: got a stream that ends inside a position, allowed: whole positions")
    return np.array(starts, np.int64)


def intra_block_bits(block: int) -> int:
    """Return how many bits a position takes inside a block of `block` entries:
    ceil(log2(block))."""
    return (block - 1).bit_length()


def position_bits(count: int, dimension: int, block: int) -> int:
    """Return the exact length in bits of the code of `count` positions in `dimension` entries."""
    return count * (1 + intra_block_bits(block)) + -(-dimension // block)


def block_for(count: int, dimension: int) -> int:
    """Return the block size, a power of two, that makes the code of `count` positions out of
    `dimension` entries shortest. Raises ValueError unless 0 <= count <= dimension."""
    dimension = _check_whole("dimension", dimension, 1)
    count = _check_whole("count", count, 0, dimension)
    powers = [2**i for i in range(dimension.bit_length() + 1)]
    return min(powers, key=lambda block: position_bits(count, dimension, block))


def check_positions(positions_K: Tensor, dimension: int, taken_D: Tensor | None = None) -> None:
    """Raise ValueError unless positions are int64 (K,), strictly ascending and in range.

    On a CPU you can give a mask `taken_D` (D,). Then no position may lie inside it.
    """
    _check_tensor("positions", positions_K)
    if positions_K.dim() != 1 or positions_K.dtype != torch.int64:
        got = f"{tuple(positions_K.shape)} {positions_K.dtype}"
        raise ValueError(f"positions: got shape {got}, allowed: one dimension, int64")
    numbers = positions_K.cpu().numpy()  # numpy's calls cost less
    if not numbers.size:
        return
    if not (numbers[1:] > numbers[:-1]).all():
        raise ValueError("positions: not strictly ascending, allowed: sorted, each position once")
    if numbers[0] < 0 or numbers[-1] >= dimension:
        got = f"{numbers[0]} to {numbers[-1]}"
        raise ValueError(f"positions: got {got}, allowed: 0 to {dimension - 1}")
    if taken_D is not None and taken_D.numpy()[numbers].any():
        raise ValueError("own mask: got entries of the shared mask, allowed: only others")


# ══ 4. Values on the wire: fractional quantization and the scaled sign (Sec. II-F) ════════════════


def scaled_sign(values_K: Tensor) -> Tensor:
    """Return Q(u) = ||u||_1 / K * sign(u), Eq. 19, for K floating-point values: (K,), same dtype.

    If no value is 0, this can be sent as one bit per value and one mean. A value of 0 stays 0 here,
    which is a third level that one bit could not represent. Values are not checked: if one is NaN
    or infinite, the result is NaN or infinite everywhere.
    """
    _check_tensor("values", values_K)
    return values_K.abs().mean() * values_K.sign() if len(values_K) else values_K.clone()


def interval_edges(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Return the P - 1 inner edges sigma^p * u_max, ascending, in float64, and sigma = (u_min /
    u_max)^(1/P) (Eq. 20, 21)."""
    magnitudes_K = values_K.abs().double()
    u_max, u_min = magnitudes_K.max(), torch.where(magnitudes_K > 0, magnitudes_K, math.inf).min()
    sigma = torch.where(u_max > 0, u_min / u_max, 1.0) ** (1.0 / intervals)
    powers = torch.arange(intervals - 1, 0, -1, device=magnitudes_K.device)
    return u_max * sigma**powers, sigma


def fractional_quantize(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Quantize values by fractional quantization, Eq. 20 to 22: codes (K,) int32 and means (P,)
    float32, where P is the number of `intervals`.

    Let u_max be the largest magnitude of all values, u_min the smallest magnitude that is not 0,
    and sigma = (u_min / u_max)^(1/P). Interval p = 1..P contains magnitudes in (sigma^p u_max,
    sigma^(p-1) u_max], and the last one also the smallest, sigma^P u_max. A value and the mean of
    its interval differ by a factor of at most 1 / sigma, so |Q(u) - u| <= (1 - sigma) / sigma * |u|
    for every u != 0. A code is p - 1, plus P for a negative value. If P is a power of two, it takes
    q = log2(P) + 1 bits. Zeros get the code of the last interval with a positive sign, and are left
    out of its mean. Empty intervals have mean 0.

    Raises ValueError unless `values_K` has one dimension and at least one value, all of them finite
    in float32, and unless the number of intervals is a whole number >= 1.
    """
    intervals = _check_whole("intervals", intervals, 1)
    values_K = _check_tensor("values", values_K).detach()
    if values_K.dim() != 1:
        raise ValueError(f"values: got shape {tuple(values_K.shape)}, allowed: one dimension")
    if not len(values_K) or not values_K.float().isfinite().all():
        what = "NaN or infinity" if len(values_K) else "none"
        raise ValueError(f"values: got {what}, allowed: finite numbers of float32")
    return _fractional(values_K, intervals)


@register_quantizer("Q", "fractional")
def _fractional(values_K: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Do `fractional_quantize` without checks, so that the host reads no values."""
    magnitudes_K = values_K.abs().double()
    edges, _ = interval_edges(magnitudes_K, intervals)
    interval_K = intervals - 1 - torch.bucketize(magnitudes_K, edges, right=False)
    interval_K.masked_fill_(magnitudes_K == 0, intervals - 1)
    parts = magnitudes_K, (magnitudes_K > 0).double()  # give sums and counts per interval
    if intervals <= 64 and magnitudes_K.is_cuda:
        # on a GPU, index_add_ to few places is slow, and its order of additions varies
        is_of_PK = interval_K == torch.arange(intervals, device=interval_K.device)[:, None]
        sums_2P = torch.stack([torch.where(is_of_PK, part_K, 0.0).sum(1) for part_K in parts])
    else:
        sums_2P = magnitudes_K.new_zeros(2, intervals)
        for sums_P, part_K in zip(sums_2P, parts, strict=True):
            sums_P.index_add_(0, interval_K, part_K)
    means_P = (sums_2P[0] / sums_2P[1].clamp(min=1)).float()
    return (interval_K + intervals * (values_K < 0)).int(), means_P


def fractional_dequantize(codes_K: Tensor, means_P: Tensor) -> Tensor:
    """Return Q_f(u), Eq. 22: the mean of each code's interval with the code's sign, (K,) float32.

    `codes_K` (K,) int32 and `means_P` (P,) float32 are those that `fractional_quantize` returns.
    Raises ValueError for a code outside 0..2P - 1.
    """
    intervals = len(_check_tensor("means", means_P))
    if (
        len(_check_tensor("codes", codes_K))
        and not 0 <= int(codes_K.min()) <= int(codes_K.max()) < 2 * intervals
    ):
        got = f"{int(codes_K.min())} to {int(codes_K.max())}"
        raise ValueError(f"codes: got {got}, allowed: 0 to {2 * intervals - 1}")
    return _dequantize(codes_K, means_P)


def _dequantize(codes_K: Tensor, means_P: Tensor) -> Tensor:
    return torch.cat([means_P, -means_P]).index_select(0, codes_K)


# ══ 5. Messages and the bit budget (Sec. II-A, II-E; the last column of Tables 1 and 2) ═══════════
#    Sizes are counted in three ways: in bits by the paper's formula, in bits as the exact length of
#    a message's code, and in bytes of a message that can be decoded. Such a message is the code,
#    rounded up to whole bytes, and OVERHEAD_BYTES.


def bit_budget(scheme: Scheme | str, dimension: int | None = None) -> float:
    """Return the paper's bit budget: the bits that a client sends per parameter per local step.

    With q bits per value (`value_bits`) and H local steps per round (`local_steps`), this is (q
    (phi_global + phi_local) + phi_local (log2(1 / phi_local) + 2)) / H. The terms of a phi that is
    None are left out. With a `dimension` D, each phi is replaced by kept(phi, D) / D, and the 32 P
    bits of the quantizer's P means are counted, too. For centralized training, where nothing is
    sent, the result is nan.
    """
    scheme = _scheme(scheme)
    if dimension is not None:
        dimension = _check_whole("dimension", dimension, 1)
    if scheme.centralized:
        return math.nan
    phi_global, phi_local = scheme.phi_global or 0.0, scheme.phi_local or 0.0
    if scheme.rule == "dense":  # which sends everything, whatever these fields say
        phi_global, phi_local = 1.0, 0.0
    elif scheme.rule == "top-K":  # which shares no mask
        phi_global = 0.0
    means = 0.0
    if dimension is not None:
        phi_global = kept(phi_global, dimension) / dimension if phi_global else 0.0
        phi_local = kept(phi_local, dimension) / dimension if phi_local else 0.0
        means = 32 * scheme.intervals / dimension
    values = scheme.value_bits * (phi_global + phi_local)
    positions = phi_local * (math.log2(1 / phi_local) + 2) if phi_local else 0.0
    return (values + means + positions) / scheme.local_steps


def _scheme(scheme: Scheme | str) -> Scheme:
    return scheme if isinstance(scheme, Scheme) else Scheme.named(scheme)


SERVER = 0xFFFF  # the sender of a downlink message
MESSAGE_VERSION = 3  # raise it with any change of the contents of a message


class ClientError(ValueError):
    """A ValueError about what a client or the server sends: base class of `NotFiniteError` and
    `MessageError`.

    `client` is the client's number, or SERVER for the server. `round` is the number of the round,
    if a round of a `Compressor` or a `Federation` failed with this error. Otherwise it is None.
    """

    round: int | None = None

    def __init__(self, client: int, what: str):
        super().__init__(f"{'server' if client == SERVER else f'client {client}'}: {what}")
        self.client = client

    def __reduce__(self) -> Any:
        """Support pickling, so that the error can come from another process."""
        return ValueError.__new__, (type(self), *self.args), vars(self)


class NotFiniteError(ClientError):
    """A `ClientError`: an update contains NaN or infinity. It is a client's update or, if a sum has
    overflowed, the server's."""

    def __init__(self, client: int):
        super().__init__(client, "the update is not finite (NaN or infinity)")


class MessageError(ClientError):
    """A `ClientError`: a message cannot be accepted, or there is no message to be averaged.

    `Known.from_bytes`, `Known.check_message`, `Server.add`, `Server.average` and `Client.receive`
    raise it. (`decode_message` alone raises a plain ValueError.)
    """


@dataclass(frozen=True, eq=False)
class Message:
    """The message of a client or of the server in one round.

    - `values` (K,) float32: the values as the receiver will see them, first those on the shared
      positions, then those on `positions`.
    - `positions` (K_own,) int64, ascending: the sender's own positions, outside the shared mask.
    - `sender`: the client's number, or SERVER for the server.
    - `round`: the number of the round.
    - `codes` (K,) int32 and `means` (P,) float32: None unless values are quantized. With q bits per
      value, a quantizer divides the magnitudes into P = 2^(q-1) intervals. `means` are the mean
      magnitudes in these. A code is the index of a value's interval, from 0 to P - 1, plus P if the
      value is negative.
    - `dense`: True for a message with all values (D,) and no positions.

    Two messages are equal if all their fields are equal and on the same devices.
    """

    values: Tensor
    positions: Tensor
    sender: int = 0
    round: int = 0
    codes: Tensor | None = None
    means: Tensor | None = None
    dense: bool = False

    def __post_init__(self) -> None:
        for key in ("sender", "round"):
            object.__setattr__(self, key, _number(getattr(self, key)))

    @staticmethod
    def of(
        intended_K: Tensor, positions: Tensor, value_bits: int, sender: int = 0, round: int = 0,
        quantizer: str = "fractional",
    ) -> Message:  # fmt: skip
        """Make the message of a sparse round.

        `intended_K` (K,) float32 are the values that are meant to be sent, all of them finite:
        first those on the shared positions, then those on the sender's own `positions` (int64,
        ascending). With 32 `value_bits` they are sent unchanged. With fewer, `quantizer`, a key of
        QUANTIZERS, turns them into codes and means. The message's `values` are what the receiver
        will compute from these.

        Raises ValueError for a number of bits that is not allowed or, with fewer than 32 bits, for
        an unknown quantizer, and if a quantizer other than the paper's returns codes or means that
        are not allowed (see `register_quantizer`).
        """
        value_bits = _number(value_bits)
        _check_bits("value_bits", value_bits)
        if value_bits == 32:
            return Message(intended_K, positions, sender, round)
        intervals = _intervals(value_bits)
        if not len(intended_K):
            codes, means = intended_K.int(), intended_K.new_zeros(intervals)
        else:
            _check_one_of("quantizer", quantizer, QUANTIZERS)
            given = QUANTIZERS[quantizer](intended_K, intervals)
            if quantizer != "fractional":
                _check_quantized(quantizer, given, len(intended_K), intervals)
            codes, means = given
        return Message(_dequantize(codes, means), positions, sender, round, codes, means)

    @staticmethod
    def dense_of(values_D: Tensor, sender: int = 0, round: int = 0) -> Message:
        """Make the message of a dense round, as in a warm-up or in FedAvg: all values (D,), in 32
        bits each."""
        none = torch.empty(0, dtype=torch.int64, device=values_D.device)
        return Message(values_D, none, sender, round, dense=True)

    def add_to_(self, sum_D: Tensor, shared_K: Tensor | None, weight: float = 1.0) -> None:
        """Add the values, times `weight`, to a vector (D,) at their positions.

        `shared_K` are the shared positions; a dense message does not need them.
        """
        values_K, weight = self.values.detach(), _number(weight)
        if self.dense:
            sum_D.add_(values_K, alpha=weight)
            return
        positions_K = torch.cat([cast(Tensor, shared_K), self.positions])
        sum_D.index_add_(0, positions_K, values_K, alpha=weight)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(
            (one.dtype, one.device) == (two.dtype, two.device) and torch.equal(one, two)
            if isinstance(one, Tensor) and isinstance(two, Tensor)
            else type(one) is type(two) and one == two
            for one, two in pairs
        )

    def to(self, device: Any) -> Message:
        """Return the message with all its tensors on another device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **cast(Any, moved))


def _check_quantized(name: str, given: Any, count: int, intervals: int) -> None:
    """Raise ValueError unless `given` are codes (count,) int32 and means (P,) float32.

    On a CPU, the numbers are checked, too: codes have to lie in 0..2P - 1, and means have to be
    finite and at least 0. `name` is the quantizer's name for the error message. This checks the
    results of quantizers other than the paper's, and every quantized message that is to become
    bytes.
    """
    two = isinstance(given, tuple | list) and len(given) == 2
    if not two or not all(isinstance(part, Tensor) for part in given):
        raise ValueError(f"quantizer {name}: got {shorten(given)}, allowed: codes and means")
    codes, means = given
    got = tuple(codes.shape), codes.dtype, tuple(means.shape), means.dtype
    fit = (count,), torch.int32, (intervals,), torch.float32
    if got != fit:
        words = "codes {} {} and means {} {}"
        allowed = words.format(*fit)
        raise ValueError(f"quantizer {name}: got {words.format(*got)}, allowed: {allowed}")
    if not is_on_cpu(codes):
        return
    low, high = (int(codes.min()), int(codes.max())) if count else (0, 0)
    if not 0 <= low <= high < 2 * intervals:
        allowed = f"0 to {2 * intervals - 1}"
        raise ValueError(f"quantizer {name}: got codes {low} to {high}, allowed: {allowed}")
    if not (means.isfinite() & (means >= 0)).all():
        what = f"got means {shorten(means.tolist())}, allowed: finite numbers >= 0"
        raise ValueError(f"quantizer {name}: {what}")


@dataclass(frozen=True)
class Wire:
    """The format of messages in one direction, which sender and receiver must know in advance.

    A `Known` has two of them, `wire_up` and `wire_down`. For a format without a `Known`, call `up`
    or `down`:

        wire = Wire.up(Scheme.named("TCS-Q5"), layer_sizes=[1000, 10])  # from clients to the server

    - `value_bits`: 1 to 16, or 32 for float32 values.
    - `code`: a key of CODES.
    - `layer_sizes`: the number of entries of each parameter tensor.
    - `order`: how each parameter lies in memory, as in `Known`. Two participants that give
      different orders refuse each other's messages. If both give (), this is not checked.

    Raises ValueError for anything else.
    """

    value_bits: int
    code: str
    layer_sizes: tuple[int, ...]
    order: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _check_bits("value_bits", self.value_bits)
        _check_one_of("code", self.code, CODES)
        sizes = _check_layer_sizes(self.layer_sizes)
        order = [tuple(_listed("order", layer)) for layer in _listed("order", self.order)]
        whole = all(type(axis) is int and axis >= 0 for layer in order for axis in layer)
        if not whole or len(order) not in (0, len(sizes)):
            allowed = "(), or for each parameter what layout_of(parameter) returns"
            raise ValueError(f"order: got {shorten(self.order)}, allowed: {allowed}")
        object.__setattr__(self, "layer_sizes", tuple(sizes))
        object.__setattr__(self, "order", tuple(order))

    @staticmethod
    def up(scheme: Scheme | str, layer_sizes: Iterable[int], order: Iterable[Any] = ()) -> Wire:
        """Return the format of a scheme's messages from clients to the server."""
        scheme, sizes = _scheme(scheme), _listed("layer_sizes", layer_sizes)
        return Wire(scheme.value_bits, scheme.code, tuple(sizes), tuple(_listed("order", order)))

    @staticmethod
    def down(scheme: Scheme | str, layer_sizes: Iterable[int], order: Iterable[Any] = ()) -> Wire:
        """Return the format of a scheme's messages from the server to clients."""
        wire = Wire.up(scheme, layer_sizes, order)
        return dataclasses.replace(wire, value_bits=_scheme(scheme).down_value_bits)

    @cached_property
    def dimension(self) -> int:
        """The number of entries of the whole model, D."""
        return sum(self.layer_sizes)

    @property
    def intervals(self) -> int:
        """The number of the quantizer's intervals, P; 0 if values are not quantized."""
        return _intervals(self.value_bits)

    @cached_property
    def tag(self) -> int:
        """A checksum, four bytes long, which is equal for equal formats."""
        return zlib.crc32(repr(dataclasses.astuple(self)).encode())


def message_bits(message: Message, wire: Wire) -> int:
    """Return the exact length of the message's code in bits, without header and checksum.

    On the `wire` of a code other than "block", a sparse message is encoded to find its length.
    """
    if message.dense:
        return 32 * wire.dimension
    if wire.code != "block":  # the length is known only after encoding
        return 8 * len(CODES[wire.code].encode(message, wire)[0])
    count, own = len(message.values), len(message.positions)
    return block_code_bits(wire.value_bits, count, own, wire.dimension)


@lru_cache(1024)
def block_code_bits(value_bits: int, values: int, own: int, dimension: int) -> int:
    """Return the exact length in bits of the code that `BlockCode` makes of a sparse message.

    It depends only on the bits per value, on the numbers of values and own positions, and on D.
    """
    bits = value_bits * values + 32 * _intervals(value_bits)
    if own:
        bits += position_bits(own, dimension, block_for(own, dimension))
    return bits


# Kinds of messages: in the wire's code, dense, or in code "block" although the wire has another.
_AGREED, _DENSE, _PLAIN = range(3)
# Little-endian header: version, kind, sender, round, exclusive or of Wire.tag and the shared mask's
# tag, number of own positions. After it come the code, and the CRC-32 of header and code.
_HEADER, _CHECKSUM = struct.Struct("<BBHIII"), struct.Struct("<I")
OVERHEAD_BYTES = _HEADER.size + _CHECKSUM.size  # 20


def encode_message(message: Message, wire: Wire, mask_tag: int = 0) -> bytes:
    """Encode the message as bytes: header, code, checksum.

    `mask_tag` identifies the shared mask (`Known.mask_tag`); with 0, the mask is not identified.
    The result has message_bits(message, wire) bits, rounded up to whole bytes, plus OVERHEAD_BYTES.

    Raises ValueError for a message that could not be decoded to the same message: one with NaN,
    infinity, or a sender, round or position out of range. Also raises it for values of another type
    or of another number of bits than the wire's, and for values that differ from what their codes
    and means stand for. (It does not know the shared mask, so only `decode_message` refuses own
    positions inside it.)
    """
    mask_tag = _check_whole("mask_tag", mask_tag, 0, 2**32 - 1)
    who, when = message.sender, message.round
    whole = type(who) is int and type(when) is int
    if not whole or not 0 <= who <= SERVER or not 0 <= when < 2**32:
        raise ValueError(f"sender, round: got {who}, {when}, allowed: below 2^16 and 2^32")
    check_positions(message.positions, wire.dimension)
    _check_values(message, wire)
    if message.dense:
        kind, code = _DENSE, float_bytes(message.values)
    else:
        code, plain = CODES[wire.code].encode(message, wire)
        kind = _PLAIN if plain else _AGREED
    tag, own = wire.tag ^ mask_tag, len(message.positions)
    data = _HEADER.pack(MESSAGE_VERSION, kind, who, when, tag, own) + code
    return data + _CHECKSUM.pack(zlib.crc32(data))


def _check_values(message: Message, wire: Wire) -> None:
    """Raise ValueError for values that cannot be encoded without a change in this format."""
    values, codes, means = message.values, message.codes, message.means
    if values.dim() != 1 or values.dtype != torch.float32:
        got = f"{tuple(values.shape)} {values.dtype}"
        raise ValueError(f"values: got shape {got}, allowed: one dimension, torch.float32")
    if not values.isfinite().all():
        raise ValueError("values: got NaN or infinity, allowed: finite numbers")
    if message.dense:
        if len(values) != wire.dimension or len(message.positions):
            got = f"{len(values)} values and {len(message.positions)} positions"
            allowed = f"{wire.dimension} values and no positions"
            raise ValueError(f"values: got {got}, allowed in a dense message: {allowed}")
    elif not len(message.positions) <= len(values) <= wire.dimension:
        got = f"{len(values)} for {len(message.positions)} positions"
        allowed = f"at least one per position, and at most {wire.dimension}"
        raise ValueError(f"values: got {got}, allowed: {allowed}")
    intervals = 0 if message.dense else wire.intervals
    if (codes is not None, means is not None) != (bool(intervals), bool(intervals)):
        got = "float32 values" if codes is None else "quantized values"
        bits = 32 if message.dense else wire.value_bits
        raise ValueError(f"values: got {got}, allowed in this message: {bits} bits per value")
    if codes is not None and means is not None:
        on_host = codes.cpu(), means.cpu()  # where the numbers are checked, too
        _check_quantized("of the message", on_host, len(values), wire.intervals)
        if not torch.equal(_dequantize(codes, means), values):
            what = "got values that differ from those that the codes and means stand for"
            raise ValueError(f"values: {what}, allowed: the same values")


def decode_message(
    data: bytes, wire: Wire, shared_K: Tensor | None = None, sender: int | None = None,
    round: int | None = None, count: int | None = None, mask_tag: int = 0,
) -> Message:  # fmt: skip
    """Decode a message. The result equals the message that was encoded, moved to the CPU.

    `shared_K` (int64, ascending) are the positions of the shared mask; None if a dense message is
    expected. If `sender`, `round` and `count` (the number of own positions) are given, the message
    must agree with them. `mask_tag` is the one that was given to `encode_message`.

    `data` may be untrusted. All of it is checked, including values (finite) and positions (in
    range, ascending, not in the shared mask). Memory stays within about 150 times its length,
    and a small multiple of the number of shared positions. Raises ValueError for anything that is
    not a valid message.
    """
    kind, who, when, own = _check_header(data, wire.tag ^ mask_tag, round)
    dense = shared_K is None
    _expect("dense", kind == _DENSE, dense)
    if kind > _PLAIN:
        raise ValueError(f"message: kind: got {kind}, allowed: 0 to {_PLAIN}")
    _expect("sender", who, sender)
    _expect("own positions", own, 0 if dense else count)
    code = memoryview(data)[_HEADER.size : -_CHECKSUM.size]
    if shared_K is None:
        message = Message.dense_of(floats_of(code, wire.dimension), who, when)
    else:
        shared_K = shared_K.cpu()
        most = wire.dimension - len(shared_K)
        if own > most:
            raise ValueError(f"message: got {own} own positions, allowed: 0 to {most}")
        reader = CODES["block" if kind == _PLAIN else wire.code]
        found = reader.decode(code, len(shared_K), own, wire)
        message = dataclasses.replace(found, sender=who, round=when)
        # both are ascending; `isin` would need several times the memory
        places_K = torch.searchsorted(shared_K, message.positions).clamp_(max=len(shared_K) - 1)
        if len(shared_K) and (shared_K[places_K] == message.positions).any():
            raise ValueError("message: got positions of the shared mask, allowed: only others")
    if not message.values.isfinite().all():
        raise ValueError("message: a value is NaN or infinity, allowed: finite values")
    return message


def _check_header(data: bytes, wanted: int, round: int | None) -> tuple[int, int, int, int]:
    has_bytes = isinstance(data, bytes | bytearray | memoryview)
    has_bytes = has_bytes and getattr(data, "c_contiguous", True)
    if not has_bytes or len(data) < OVERHEAD_BYTES:
        got = f"{len(data)} bytes" if has_bytes else f"a {type(data).__name__}"
        raise ValueError(f"message: got {got}, allowed: {OVERHEAD_BYTES} bytes or more")
    end = len(data) - _CHECKSUM.size
    if zlib.crc32(memoryview(data)[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        raise ValueError("message: wrong checksum: these bytes are not as they were sent")
    version, kind, who, when, tag, own = _HEADER.unpack_from(data)
    _expect("version", version, MESSAGE_VERSION)
    if round is not None and when != round:  # before the tag, since another round has another mask
        way = "a client that has missed rounds loads Known.state_dict() and theta of the server"
        raise ValueError(f"message: round: got {when}, allowed: {round} ({way})")
    if tag != wanted:
        other = "another scheme, shared mask or order in memory, or other layers"
        raise ValueError(f"message: tag: got {tag:08x}, allowed: {wanted:08x} ({other})")
    return kind, who, when, own


def _expect(name: str, got: Any, allowed: Any) -> None:
    if allowed is not None and got != allowed:
        raise ValueError(f"message: {name}: got {got}, allowed: {allowed}")


def float_bytes(values_K: Tensor) -> bytes:
    """Return (K,) values as little-endian float32 bytes."""
    return values_K.detach().cpu().numpy().astype("<f4").tobytes()


def floats_of(data: memoryview, count: int) -> Tensor:
    """Return (count,) float32 from bytes. Raises ValueError for another number of bytes."""
    if len(data) != 4 * count:
        raise ValueError(f"message: got {len(data)} bytes of values, allowed: {4 * count}")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


def means_of(data: memoryview, intervals: int) -> Tensor:
    """Return means (P,) float32 from bytes. Raises ValueError unless they are finite and at least
    0."""
    means_P = floats_of(data[: 4 * intervals], intervals)
    if (means_P.isfinite() & (means_P >= 0)).all():
        return means_P
    got = f"{means_P.min().item():g} to {means_P.max().item():g}"
    raise ValueError(f"message: means: got {got}, allowed: finite numbers >= 0")


def quantized_message(codes: np.ndarray, means_P: Tensor, positions: Tensor) -> Message:
    """Return the message with these codes (K,), means and positions, and the values they stand
    for."""
    codes_K = torch.from_numpy(codes.astype(np.int32))
    return Message(fractional_dequantize(codes_K, means_P), positions, codes=codes_K, means=means_P)


class BlockCode:
    """The code of the paper: how values and own positions of a sparse message become bytes.

    Values that are not quantized are sent first, in 32 bits each. Quantized values are sent as the
    means of the quantizer's intervals, in 32 bits each, followed by one code per value in q =
    `value_bits` bits (see `Message`). After the values come the own positions, encoded as the
    paper's Algorithm 4 reads them (see `encode_positions`). Codes and positions form one stream of
    bits, which is filled up with zeros to whole bytes.

    To add another code, derive a class with the same two methods, and put an object of it into the
    dictionary CODES. Its key there is the value of Scheme's field `code` for schemes that use it.
    `decode` is called only for messages that are marked as encoded by this code, but their bytes
    may be untrusted. It must raise ValueError for bytes that `encode` does not produce, and its
    memory must stay within a small multiple of their length and of the number of values.
    """

    def encode(self, message: Message, wire: Wire) -> tuple[bytes, bool]:
        """Return the values and own positions of a sparse message as bytes, and a flag.

        A derived class sets the flag to True if it has encoded this message as `BlockCode` does
        instead of with its own code. Then `BlockCode` will decode it. Here the flag is False.
        """
        own, streams = len(message.positions), []
        if message.codes is not None and message.means is not None:
            floats = float_bytes(message.means)
            streams.append(to_bits(message.codes.cpu().numpy(), wire.value_bits))
        else:
            floats = float_bytes(message.values)
        if own:
            block = block_for(own, wire.dimension)
            places = encode_positions(message.positions.cpu(), wire.dimension, block)
            streams.append(places.numpy())
        return floats + pack_bits(streams), False

    def decode(self, code: memoryview, shared: int, own: int, wire: Wire) -> Message:
        """Return the message from the bytes that `encode` has made.

        `shared` is the number of shared positions, and `own` the number of the sender's own
        positions. The message's sender and round are set by the caller. Raises ValueError for bytes
        that are not the code of such a message.
        """
        count = shared + own
        length = block_code_bits(wire.value_bits, count, own, wire.dimension)
        size = -(-length // 8)
        if len(code) != size:
            raise ValueError(f"message: got {len(code)} bytes of code, allowed: {size}")
        floats = 4 * (wire.intervals or count)
        coded = wire.value_bits * count if wire.intervals else 0
        bits = unpack_bits(code[floats:], length - 8 * floats)
        positions = torch.empty(0, dtype=torch.int64, device="cpu")
        if own:
            block = block_for(own, wire.dimension)
            positions = decode_positions(torch.from_numpy(bits[coded:]), wire.dimension, block)
        if not wire.intervals:
            return Message(floats_of(code[:floats], count), positions)
        codes = from_bits(bits[:coded], wire.value_bits)
        return quantized_message(codes, means_of(code[:floats], wire.intervals), positions)


CODES["block"] = BlockCode()


def to_bits(numbers: np.ndarray, width: int) -> np.ndarray:
    """Return numbers (K,) below 2^width as K * width bits, highest bit first: uint8 of 0 and 1."""
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < 2**width:
        got = f"{numbers.min()} to {numbers.max()}"
        raise ValueError(f"codes: got {got}, allowed: 0 to {2**width - 1}")
    shifts = np.arange(width - 1, -1, -1, dtype=np.uint16)
    return (numbers.astype(np.uint16)[:, None] >> shifts & 1).astype(np.uint8).reshape(-1)


def from_bits(bits: np.ndarray, width: int) -> np.ndarray:
    """Return numbers (K,) uint16 from K * width bits."""
    columns = bits.reshape(-1, width)
    numbers = columns[:, 0].astype(np.uint16)
    for place in range(1, width):
        numbers = numbers << 1 | columns[:, place]
    return numbers


def pack_bits(streams: list[np.ndarray]) -> bytes:
    """Concatenate streams of 0 and 1 and pack eight bits into a byte. The last byte is filled with
    zeros."""
    return np.packbits(np.concatenate(streams)).tobytes() if streams else b""


def unpack_bits(data: memoryview, count: int) -> np.ndarray:
    """Return the first `count` bits of the data.

    Raises ValueError unless the data has just the necessary length and ends in zeros.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if len(data) != -(-count // 8) or bits[count:].any():
        raise ValueError(
            f"message: got {8 * len(data)} bits, allowed: {count}, filled up with zeros"
        )
    return bits[:count]


# ══ 6. Alg. 2: which entries are sent, shared knowledge, a client, the server ═════════════════════
#    One round, in the order of its calls. On the left, server and clients are separate processes,
#    each with its own `Known`. On the right, a `Compressor` does the whole round in one process,
#    where the server and all clients have the same `Known`.
#
#      separate processes                     Compressor      what changes
#      ------------------                     ----------      ------------
#      all:    known.begin()                  the same        the rule gives the shared mask
#      client: client.send(delta)             message_of      lines 9 to 12: the errors become what
#                                                             is intended; the message is in flight
#      client: known.to_bytes(message)        link.to_server  (this one counts the bits, too)
#      server: known.from_bytes(data, n)
#      server: server.add(n, message)         the same        the sum
#      server: server.finish()                link.to_clients lines 15 and 16: the average, and the
#      server: known.to_bytes(reply)                          reply that brings it to the clients
#      server: known.observe(update)          the same        line 5 of the next round: the rule
#                                                             chooses its mask; the round is closed
#      client: known.from_bytes(data, SERVER)
#      client: client.receive(reply)          arrived         line 13: what was sent leaves the
#                                                             errors; `receive` also calls `observe`
#
#    A `Compressor` does not call `send`, because it has checked the difference itself, nor
#    `receive`, because there is only one `Known` to be closed. On a GPU it does line 9 for all
#    clients before line 10, because choosing all their masks together takes less time there.


class MaskRule:
    """Decide which entries are sent. To define a new scheme, derive a class from this one or from
    `TCS` and register it with `register_scheme`.

    `Known` makes one object with the arguments `scheme`, `layer_sizes` (the number of entries of
    each parameter tensor), `device` and `seed`, and stores it as `known.rule`. In each round, these
    methods are called, which a derived class may replace:

    - `begin(theta_D, mask_factor)`: the round begins.
    - `shared_mask()`: the mask that the server and all clients share.
    - `own_count(shared)`: how many entries an own mask has.
    - `own_mask(intended_D, shared_D, k)`: a sender's own mask, chosen from `intended_D`.
    - `observe(update_D)`: the round ends with this average update.

    A mask may be returned as a bool tensor (D,) or as ascending int64 positions. All tensors are on
    `device`.

    `keeps` names the attributes that a resumed run needs, such as tensors and numbers. A derived
    class lists only the attributes that it adds; those of its base classes are included
    automatically. Assign new values to these attributes and never change their tensors in place,
    because the old values are restored after a round that fails.

    `round` is the number of the round that began last, and `dimension` is D. `k_global` and
    `k_local` are the sizes of the shared mask and of an own mask in that round: `mask_factor` times
    the usual sizes. The factor is the one given to `begin` if the scheme's field `warmup_masks` is
    not 1. Otherwise it is always 1. (In a `Federation`, it comes from the `Phase` of the round.)
    TCS takes its shared mask from the last update. When masks become larger, its shared mask
    therefore follows one round later; when they become smaller, it shrinks at once.
    """

    keeps: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()  # those of `keeps` that can have another length in any round
    # For schemes whose clients, or whose server, store more than errors. None means `Client` and
    # `Server`.
    client_type: type[Client] | None = None
    server_type: type[Server] | None = None
    round = 0
    mask_factor = 1

    def __init__(self, scheme: Scheme, layer_sizes: list[int], device: Any = "cpu", seed: int = 0):
        self.scheme, self.layer_sizes = scheme, layer_sizes
        self.device, self.seed = device, seed
        self.dimension = sum(layer_sizes)
        self._set_sizes()

    def _set_sizes(self) -> None:
        """Set the sizes of the shared mask and of a client's own mask in this round."""
        self.k_global = self.size(self.scheme.phi_global, self.dimension)
        self.k_local = self.size(self.scheme.phi_local, self.dimension - self.k_global)

    def size(self, phi: float | None, most: int) -> int:
        """Return how many entries a mask with the fraction `phi` has in this round.

        This is `mask_factor` times ceil(phi * D), but at most `most`. It is 0 if `phi` is None.
        """
        return min(self.mask_factor * kept(phi, self.dimension), most) if phi else 0

    def begin(self, theta_D: Tensor | None = None, mask_factor: int = 1) -> None:
        """Set the sizes of all masks for the round that begins now. An override has to call
        `super().begin(theta_D, mask_factor)`.

        `theta_D` (D,) contains the model's parameters, for a rule that looks at them. It is None
        where there is no model, as in `Compressor.step`. Raises ValueError for a `mask_factor` that
        is not a whole number from 1 to 1000, if it is used.
        """
        if self.scheme.warmup_masks != 1:
            self.mask_factor = _check_whole("mask_factor", mask_factor, 1, 1000)
            self._set_sizes()

    def shared_mask(self) -> Tensor | None:
        """Return the mask that the server and all clients share in this round, or None if there is
        none yet.

        Here it is an empty mask: nothing is shared. If the result is None, the round is dense. If
        the scheme's `dense_warmup` is False, the round has no shared mask instead.
        """
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def own_count(self, shared: int) -> int | None:
        """Return how many entries each client's own mask has in a round whose shared mask has
        `shared` entries.

        The server and the clients compute this number independently, so that the server can refuse
        a message of another length. If clients choose the number themselves, return None: then the
        server accepts the number that the message contains.
        """
        wanted = self.k_local
        if not shared and not self.scheme.dense_warmup:
            wanted += self.k_global  # nothing is shared yet, so the own mask is larger
        return min(wanted, self.dimension - shared)

    def own_mask(self, intended_D: Tensor, shared_D: Tensor, k: int) -> Tensor:
        """Choose a sender's own mask: k entries outside the shared mask `shared_D` (D,) bool.

        `intended_D` (D,) float32 is what the sender means to send: its difference plus its errors.
        Here the k largest entries outside the shared mask are chosen (S_top, line 10 of Algorithm
        2). Do not change `intended_D` or `shared_D`, which are used again afterwards.
        """
        return self.select(intended_D, k, self.scheme.phi_min_local, shared_D)

    def observe(self, update_D: Tensor) -> None:
        """Use the average update (D,) of a round that ends, for instance to choose the next shared
        mask.

        This is called at the end of every round, including dense ones. Do not change `update_D` in
        place, because it is added to the model afterwards.
        """

    def select(
        self, vector_D: Tensor, k: int, phi_min: float | None, excluded_D: Tensor | None = None,
        among_K: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return S_top, the k largest entries of a vector (D,), as positions int64 (k,), ascending.

        Entries in the mask `excluded_D` (D,) are not chosen. If `phi_min` is not None, the choice
        is layer-wise fair: of every layer, at least this fraction is chosen, as far as k and
        `excluded_D` allow (see `layerwise_top_k_positions`). Then `among_K` is ignored. Otherwise
        it is given to `top_k_positions`, which refuses it together with `excluded_D`.
        """
        if k == 0:
            return torch.empty(0, dtype=torch.int64, device=vector_D.device)
        if phi_min is not None:
            return layerwise_top_k_positions(vector_D, k, self.layer_sizes, phi_min, excluded_D)
        return top_k_positions(vector_D, k, excluded_D, among_K)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the attributes that `keeps` names."""
        return _by_value(kept_by(self))

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that this rule cannot load.

        `load_state_dict` calls this before it changes anything. The state must have exactly the
        names in `keeps`. Which values are allowed depends on what the attribute is now:

        - If it is a tensor, a number or None, any of these three is allowed. But if it is a tensor
          and the state has a tensor, too, both need the same dtype and number of dimensions and, if
          the attribute is a vector (D,) that `resized` does not name, the same length.
        - If it is anything else, such as a string, a value of the same type is allowed.

        A rule that knows more about its values extends this method.
        """
        if not isinstance(state, dict):
            _refuse("state: rule", state, "a dictionary")
        wanted = kept_by(self)
        check_same_state("state: rule", dict.fromkeys(state), dict.fromkeys(wanted))
        for key, given in state.items():
            mine, numbers = wanted[key], (Tensor, int, float, type(None))
            is_number = isinstance(_number(mine), numbers)  # numpy's are saved as Python's
            if not isinstance(given, numbers if is_number else type(mine)):
                allowed = "a tensor, a number or None" if is_number else f"a {type(mine).__name__}"
                _refuse(f"state: rule: {key}", given, allowed)
            if isinstance(mine, Tensor) and isinstance(given, Tensor):
                other_type = mine.dtype != given.dtype or mine.dim() != given.dim()
                is_whole = mine.shape == (self.dimension,) and key not in self.resized
                if other_type or (is_whole and mine.shape != given.shape):
                    check_same_state(f"state: rule: {key}", given, mine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of a state.

        Raises ValueError, with nothing changed, for a state that `check_state` refuses.
        """
        self.check_state(state)
        for key, value in state.items():
            is_tensor = isinstance(value, Tensor)
            copied = value.to(self.device, copy=True) if is_tensor else copy.deepcopy(value)
            setattr(self, key, copied)


def kept_by(owner: Any) -> dict[str, Any]:
    """Return the attributes that an object's class and its base classes name in `keeps`.

    Raises ValueError for a `keeps` that is a string, because a comma is missing.
    """
    named = dict[str, Any]()
    for base in type(owner).__mro__:
        keeps = vars(base).get("keeps", ())
        if isinstance(keeps, str):
            _refuse(f"{base.__name__}: keeps", keeps, f"a tuple, such as ({keeps!r},)")
        named |= dict.fromkeys(keeps)
    return {name: getattr(owner, name) for name in named}


class Dense(MaskRule):
    """Send every entry (FedAvg).

    With -Q<bits>, values are quantized, and the shared mask is the whole vector. Such a round does
    not count as dense (`Known.dense` is False), because in a dense round each value is sent in 32
    bits.
    """

    def shared_mask(self) -> Tensor:
        """Return all positions."""
        return torch.arange(self.dimension, device=self.device)


RULES["dense"] = Dense
_EVERYTHING = {"rule": "dense", "phi_global": 1.0, "phi_local": None}
FAMILIES["FedAvg"] = FAMILIES["FedSGD"] = _EVERYTHING
FAMILIES["Baseline"] = _EVERYTHING | {"centralized": True}


@register_scheme("top-K", phi_global=None, phi_local=1e-2)
class TopK(MaskRule):
    """Top-K (Sec. I-C): there is no shared mask. Each client sends its own S_top, with all
    positions."""

    def _set_sizes(self) -> None:
        """Set the size of a client's own mask. A `phi_global` has no meaning here."""
        self.k_global, self.k_local = 0, self.size(self.scheme.phi_local, self.dimension)


@register_scheme("rand-K", phi_global=1e-2, phi_local=None)
class RandK(MaskRule):
    """Rand-K (Sec. I-C): the server and all clients draw the same random mask from one seed, so no
    positions are sent."""

    def shared_mask(self) -> Tensor:
        """Return the positions that are drawn for this round."""
        drawn_K = random_positions(self.k_global, self.dimension, self.seed, self.round)
        return drawn_K.to(self.device, non_blocking=True)


@register_scheme("TCS")
class TCS(MaskRule):
    """Time-correlated sparsification (the paper's Algorithm 2): the shared mask is S_top of the
    last update."""

    keeps: tuple[str, ...] = ("positions", "magnitudes_K")
    resized = keeps
    positions: Tensor | None = None  # of the shared mask, ascending; None before the first update
    # |last update| at `positions`, kept only after a round whose masks were larger than usual
    magnitudes_K: Tensor | None = None
    # Ascending positions outside of which the next update is 0. Only `tcs_hook` sets them.
    among_K: Tensor | None = None

    def shared_mask(self) -> Tensor | None:
        """Return the shared mask, or None before the first update."""
        if not self.k_global:
            return super().shared_mask()
        if self.magnitudes_K is not None and len(self.magnitudes_K) > self.k_global:
            # Masks were larger until now, in a sparse warm-up. Keep the largest entries.
            last_D = torch.zeros(self.dimension, dtype=torch.float32, device=self.device)
            last_D[self.positions] = self.magnitudes_K
            self.positions = self.select(last_D, self.k_global, self.scheme.phi_min_global)
            self.magnitudes_K = last_D[self.positions] if self.mask_factor != 1 else None
        return self.positions

    def observe(self, update_D: Tensor) -> None:
        """Choose the next round's shared mask: S_top of the update (D,), line 5 of Algorithm 2.

        If all entries of the update are zero, as after a step at rate 0, it does not say which
        entries are large. Then the mask stays as it is; if there is none yet, there is still none.
        """
        if not self.k_global:
            return
        before_K, fair = self.positions, self.scheme.phi_min_global
        among_K, self.among_K = self.among_K, None
        chosen_K = self.select(update_D, self.k_global, fair, among_K=among_K)  # line 5
        magnitudes_K = update_D[chosen_K].abs().float() if self.mask_factor != 1 else None
        if is_on_cpu(update_D):
            # Usually the first of these entries is nonzero, so that the others need not be read.
            if not update_D[chosen_K[:1]].any() and not update_D[chosen_K].any():
                return
        elif before_K is None or len(before_K) != len(chosen_K):
            if not _host_reads(update_D[chosen_K].any()):
                return
        else:
            # `where` chooses without making the host wait, but it needs masks of the same size.
            is_update = update_D[chosen_K].any()
            chosen_K = torch.where(is_update, chosen_K, before_K)
            if magnitudes_K is not None and self.magnitudes_K is not None:
                magnitudes_K = torch.where(is_update, magnitudes_K, self.magnitudes_K)
        self.positions, self.magnitudes_K = chosen_K, magnitudes_K

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that this rule cannot load."""
        super().check_state(state)
        positions_K, magnitudes_K = state["positions"], state["magnitudes_K"]
        like = None
        if positions_K is not None:
            check_positions(positions_K, self.dimension)
            if magnitudes_K is not None:
                like = torch.empty(len(positions_K), dtype=torch.float32, device="cpu")
        check_same_state("state: rule: magnitudes_K", magnitudes_K, like)


def rule_of(scheme: Scheme) -> type[MaskRule]:
    """Return the class of a scheme's mask rule.

    Raises ValueError if the scheme's `shared_from` is neither "update" nor a key of SHARED_FROM,
    and for a `phi_down` of a rule that shares every entry, since none is left for the server.
    """
    if scheme.rule == "dense" and scheme.phi_down is not None:
        allowed = "None with rule dense, whose shared mask has every entry"
        _refuse(f"{scheme.name}: phi_down", scheme.phi_down, allowed)
    if scheme.shared_from == "update":
        return RULES[scheme.rule]
    if scheme.shared_from not in SHARED_FROM:
        way = "import tcs_lab.schemes, or put your rule into tcs_core.SHARED_FROM"
        raise ValueError(f"{scheme.name}: shared_from {scheme.shared_from!r} is not known: {way}")
    return SHARED_FROM[scheme.shared_from]


# Alg. 2 ───────────────────────────────────────────────────────────────────────────────────────────

# The status of a round. Only the server sets "averaged"; then it accepts no more messages.
CLOSED, OPEN, AVERAGED = "closed", "open", "averaged"


class Known:
    """What the server and all clients know without exchanging it: the number of the round, whether
    it is dense, and the mask that they share in it.

    In one process, the server and all clients can use the same object. In several processes, each
    makes its own from the same scheme, `layer_sizes`, `seed` and `order`.

    Arguments

    - `scheme`: a `Scheme` or its name. Raises ValueError for one with momentum or with `error_unit`
      "gradient", which need a `Federation`. (A `Federation` does both itself, and makes its own
      `Known` from the scheme without them.)
    - `layer_sizes`: the numbers of entries of the parameter tensors. Their sum is D.
    - `seed`: a whole number >= 0 and below 2^64, for rules that draw random masks.
    - `device`: where the tensors are stored.
    - `order`: how each parameter lies in memory. For each parameter, this is a tuple of its
      dimensions, outermost first. The function `tcs_core.layout_of(parameter)` returns it: for the
      weight of a 3x3 convolution (0, 1, 2, 3), or (0, 2, 3, 1) if it has the memory format
      channels_last. Without `order`, nothing checks that the server and the clients flatten their
      models in the same order.

    Attributes, besides these: `round` is the number of the open round or, if none is open, of the
    next one. `dense` says whether the round is dense. In a sparse round, `shared_K` (int64,
    ascending) and `shared_D` (D,) bool are the shared mask, and `own_count` is the size of a
    client's own mask (None if clients choose it). `rule` is the scheme's `MaskRule`. `wire_up` and
    `wire_down` are the formats of messages (`Wire`).

    `status` says where the round stands. It is one of the strings "closed", "open" and "averaged",
    which are also the constants tcs_core.CLOSED, OPEN and AVERAGED. `begin` sets "open", and
    `Server.average` sets "averaged", after which the server refuses further messages. `observe`,
    `lose` and `load_state_dict` set "closed". If a client has a separate `Known`, its status goes
    from "open" to "closed" directly.
    """

    def __init__(
        self, scheme: Scheme | str, layer_sizes: list[int], seed: int = 0, device: Any = "cpu",
        order: Iterable[tuple[int, ...]] = (),
    ):  # fmt: skip
        self.scheme = _scheme(scheme)
        self.wire_up = Wire.up(self.scheme, layer_sizes, order)
        self.layer_sizes = list(self.wire_up.layer_sizes)
        for field in ("momentum", "error_unit"):
            got = getattr(self.scheme, field)
            if got != getattr(Scheme, field):
                what = f"{field} {got!r} needs more than compression"
                raise ValueError(f"{self.scheme.name}: {what}: use tcs_core.Federation")
        self.seed = _check_whole("seed", seed, 0, 2**64 - 1)
        self.dimension, self.device = sum(self.layer_sizes), device
        self.rule = rule_of(self.scheme)(self.scheme, self.layer_sizes, device, self.seed)
        self.wire_down = Wire.down(self.scheme, self.layer_sizes, self.wire_up.order)
        self.round = 0  # the number of the open round, or of the next one if none is open
        self.status = CLOSED  # of the round: CLOSED, OPEN or AVERAGED
        # Clients that have sent through this object in this round; SERVER, if its downlink has.
        self.senders: set[int] = set()
        self.opening = 0  # how often `begin` was called; a `Server` recognizes a new round by it
        # Pairs of a sender and a bool () tensor, which says whether its values were finite.
        # `require_finite` adds them, on a GPU.
        self.flags: list[tuple[int, Tensor]] = []
        # On a GPU, bool () tensors that say whether a rule's own mask overlaps the shared mask.
        self.overlaps: list[Tensor] = []
        self.dense = True  # in this round every entry is sent in 32 bits, and no mask is used
        self.shared_K = torch.empty(0, dtype=torch.int64, device=device)  # of a sparse round
        none = torch.zeros(1, dtype=torch.bool, device=device)
        self.shared_D = none.expand(self.dimension)  # needs no memory until there is a mask
        self.own_count: int | None = 0  # size of a client's own mask; None: clients decide
        self._mask_tag: int | None = 0  # None: not computed yet in this round
        self.on_cpu = is_on_cpu(self.shared_D)

    def begin(
        self, dense: bool = False, theta_D: Tensor | None = None, mask_factor: int = 1
    ) -> None:
        """Open a round, and ask the rule for its shared mask unless the round is `dense`.

        The round is also dense if the scheme sends every entry in 32 bits in every round, as FedAvg
        does (its property `always_dense` says so), or if the rule has no mask yet and the scheme's
        `dense_warmup` is True. `theta_D` (D,) contains the model's parameters, for a rule that
        looks at them. All masks of this round are `mask_factor` times as large as usual, if the
        scheme's `warmup_masks` is not 1 (see `Phase`). Raises ValueError unless the last round is
        closed.
        """
        dense = _check_flag("dense", dense)
        if self.status != CLOSED:
            what = f"round {self.round} is {self.status}"
            way = "after observe, which ends that round, or lose, which gives it up"
            raise ValueError(f"begin: {what}, allowed: {way}")
        self.rule.round = self.round
        self.rule.begin(theta_D, mask_factor)
        dense = dense or self.scheme.always_dense
        mask = None if dense else self.rule.shared_mask()
        if mask is None and not dense and not self.scheme.dense_warmup:
            mask = torch.empty(0, dtype=torch.int64, device=self.device)  # nothing is shared yet
        if mask is not None:
            self.shared_K = self.positions_of(mask)
            self.shared_D = positions_to_mask(self.shared_K, self.dimension)
            own, most = self.rule.own_count(len(self.shared_K)), self.dimension - len(self.shared_K)
            self.own_count = None if own is None else _check_whole("own_count", own, 0, most)
        self.dense = mask is None  # then nothing uses the mask, which is still the last one
        self._mask_tag = 0 if self.dense else None
        self.status = OPEN
        self.senders = set()
        self.opening += 1

    def observe(self, update_D: Tensor) -> None:
        """Close the round with its update (D,), from which the rule chooses the next round's mask.

        This must be called after a dense round, too. Raises ValueError for another shape, if no
        round is open, or if the rule changes the update in place. Raises what `check_flags` raises,
        if it turns out only now, on a GPU, that what was sent is not allowed.
        """
        if self.status == CLOSED:
            raise ValueError(f"observe: round {self.round} is not open, allowed: after begin")
        if tuple(_check_tensor("update_D", update_D).shape) != (self.dimension,):
            got = tuple(update_D.shape)
            raise ValueError(f"update_D: got shape {got}, allowed: ({self.dimension},)")
        given_D = update_D.detach()
        self.check_flags()  # there are none unless a round is closed without `Server.finish`
        before = _version(given_D)
        self.rule.observe(given_D)  # line 5 of the next round
        if _version(given_D) != before:
            what = "observe: update_D was changed in place, but it is added to the model afterwards"
            raise ValueError(f"scheme {self.scheme.name}: {what}, allowed: {_A_COPY}")
        self.round += 1
        self.status = CLOSED

    def lose(self, round: int | None = None) -> None:
        """Close a round whose average is not used. The mask is left as it is, and the next round
        has the next number.

        `round` is the number of the round to close. By default this is the open round or, if none
        is open, the next one, whose number is then skipped. Give the number if you do not know
        whether `observe` has closed the round already, as after an interrupt. In any case, the next
        round gets the number `round` + 1. What `observe` has done to the mask is not undone. Raises
        ValueError for anything but a round's number.
        """
        last = self.round if round is None else _check_whole("round", round, 0, 2**32 - 1)
        self.round = last + 1
        self.status = CLOSED
        self.flags.clear()
        self.overlaps.clear()

    def positions_of(self, mask: Any, taken_D: Tensor | None = None) -> Tensor:
        """Return the mask that a rule chose, (D,) bool or positions, as ascending positions int64
        (K,).

        Raises ValueError unless it is a valid mask with no entry inside another mask, `taken_D`
        (D,). On a GPU the positions themselves are not checked here, because reading them would
        make the host wait. (`check_flags` finds entries inside the shared mask at the end of the
        round.)
        """
        if not isinstance(mask, Tensor):
            got = type(mask).__name__
            allowed = "a tensor, either bool (D,) or positions"
            raise ValueError(f"scheme {self.scheme.name}: mask: got a {got}, allowed: {allowed}")
        if mask.dtype == torch.bool:
            if tuple(mask.shape) != (self.dimension,):
                shape = tuple(mask.shape)
                got = f"scheme {self.scheme.name}: mask: got shape {shape}"
                raise ValueError(f"{got}, allowed: ({self.dimension},)")
            mask = mask_to_positions(mask)
        try:
            if self.on_cpu:
                check_positions(mask, self.dimension, taken_D)
        except ValueError as error:
            raise ValueError(f"scheme {self.scheme.name}: mask: {error}") from None
        return mask

    def check_vector(self, key: str, vector_D: Any) -> Tensor:
        """Return a vector, detached from autograd.

        Raises ValueError unless it is (D,) float32 and on the device of this object.
        """
        shape = tuple(_check_tensor(key, vector_D).shape)
        if shape != (self.dimension,):
            raise ValueError(f"{key}: got shape {shape}, allowed: ({self.dimension},)")
        if vector_D.dtype != torch.float32:
            raise ValueError(f"{key}: got {vector_D.dtype}, allowed: torch.float32")
        if vector_D.device != self.shared_D.device:
            got = f"got one on {vector_D.device}"
            raise ValueError(f"{key}: {got}, allowed: one on {self.shared_D.device}")
        return vector_D.detach()

    def require_finite(self, values: Tensor, sender: int) -> Tensor:
        """Return the values if all of them are finite. `Client` and `Server` call this for
        differences, messages and averages.

        On a CPU, raises NotFiniteError, which names the sender, if any value is NaN or infinite. On
        a GPU the host would have to wait for the answer. There, zeros are returned instead of
        `values` if any of them is not finite, and a flag is stored. `check_flags`, at the end of a
        round, reads all flags together and raises the error.
        """
        if self.on_cpu:
            if not _all_finite(values):
                raise NotFiniteError(sender)
            return values
        # a sum of finite float32 values cannot overflow in float64
        is_finite = values.sum(dtype=torch.float64).abs() < math.inf
        self.flags.append((sender, is_finite))
        return torch.where(is_finite, values, 0.0)

    def check_flags(self, counted_D: Tensor | None = None) -> int:
        """Raise NotFiniteError for the first sender whose stored flag says that its values were not
        finite, and ValueError if a rule has chosen own positions inside the shared mask.

        `to_bytes`, `observe`, `Server.finish`, `Server.reply` with a compressed downlink,
        `Client.receive` and `Link.to_clients` call this. On a CPU `require_finite` has raised the
        error already, and flags are not read.

        Returns how many entries of the mask `counted_D` (D,) are set, or 0 without a mask.
        `Link.to_clients` needs this number for the length of the server's message.
        """
        # On a GPU this is the round's only wait for values, which is why the flags and the count
        # are read together. An ordinary round does not wait anywhere else. Layer-wise fairness,
        # masks that a rule returns as bool tensors, codes other than "block", `Server.reply`, a
        # compressed downlink and `to_bytes` wait once more or a few times.
        if self.on_cpu:
            return 0 if counted_D is None else int(np.count_nonzero(counted_D.numpy()))
        asked = [is_finite.long() for _, is_finite in self.flags]
        asked += [overlaps.long() for overlaps in self.overlaps]
        asked += [] if counted_D is None else [counted_D.sum()]
        said = torch.stack(asked).tolist() if asked else []
        senders, count = [sender for sender, _ in self.flags], len(self.flags)
        is_overlapping = any(said[count : count + len(self.overlaps)])
        self.flags.clear()
        self.overlaps.clear()
        for sender, is_finite in zip(senders, said, strict=False):
            if not is_finite:
                raise NotFiniteError(sender)
        if is_overlapping:
            what = "own mask: got entries of the shared mask, allowed: only others"
            raise ValueError(f"scheme {self.scheme.name}: {what}")
        return 0 if counted_D is None else said[-1]

    def expand_message(self, message: Message) -> Tensor:
        """Return a message's values as a new vector (D,), with zeros where the message has no
        value."""
        if message.dense:
            return message.values.detach().clone()
        full_D = torch.zeros(self.dimension, dtype=torch.float32, device=self.device)
        message.add_to_(full_D, self.shared_K)
        return full_D

    def check_message(self, message: Message, sender: int) -> None:
        """Raise MessageError unless this is the message of `sender` in the open round, with the
        right size and type.

        `sender` is a client's number, or SERVER for the server. On a CPU the numbers are checked,
        too: positions must be ascending, in range and outside the shared mask, and values must be
        finite. (Values in a client's dense message are not checked one by one, since the average of
        all messages is checked.)
        """
        if self.status == CLOSED:
            call = "receive" if sender == SERVER else "add"
            what = f"{call}: round {self.round} is not open, allowed: after Known.begin"
            raise MessageError(sender, what)
        if not isinstance(message, Message):
            got = type(message).__name__
            raise MessageError(sender, f"message: got a {got}, allowed: a Message")
        values, positions = message.values, message.positions
        for name, part, wanted_type in (
            ("values", values, torch.float32), ("positions", positions, torch.int64),
        ):  # fmt: skip
            if not isinstance(part, Tensor) or part.dim() != 1 or part.dtype != wanted_type:
                is_tensor = isinstance(part, Tensor)
                got = f"{tuple(part.shape)} {part.dtype}" if is_tensor else type(part).__name__
                want = f"a tensor of one dimension, {wanted_type}"
                raise MessageError(sender, f"message: {name}: got {got}, allowed: {want}")
        wire, own = self._format_of(sender)
        count = len(positions) if own is None else own
        wanted = {
            "sender": (message.sender, sender),
            "round": (message.round, self.round),
            "dense": (message.dense, self.dense),
            "quantized": (message.codes is not None, wire.value_bits != 32 and not self.dense),
            "own positions": (len(positions), 0 if self.dense else count),
            "values": (len(values), self.dimension if self.dense else len(self.shared_K) + count),
        }
        for name, (found, allowed) in wanted.items():
            if found != allowed:
                raise MessageError(sender, f"message: {name}: got {found}, allowed: {allowed}")
        if not self.on_cpu:
            return
        try:
            check_positions(positions, self.dimension, None if self.dense else self.shared_D)
        except ValueError as error:
            raise MessageError(sender, f"message: {error}") from error
        if sender != SERVER and self.dense:
            return
        if not _all_finite(values):
            what = "message: a value is NaN or infinity, allowed: finite values"
            raise MessageError(sender, what)

    @property
    def mask_tag(self) -> int:
        """A checksum of the shared mask, four bytes long; 0 in a dense round.

        It is part of every message that becomes bytes. A receiver with another mask therefore
        refuses the message.
        """
        if self._mask_tag is None:
            self._mask_tag = zlib.crc32(self.shared_K.cpu().numpy().astype("<i8").tobytes())
        return self._mask_tag

    def to_bytes(self, message: Message) -> bytes:
        """Return a message of this round, from a client or from the server, as bytes.

        Raises NotFiniteError if it turns out only now, on a GPU, that a client's values were not
        finite, and ValueError for a message that `encode_message` refuses.
        """
        self.check_flags()
        return encode_message(message, self._format_of(message.sender)[0], self.mask_tag)

    def from_bytes(self, data: bytes, sender: int) -> Message:
        """Return the message of this round that `sender` (SERVER: the server) sent, from its bytes.

        `data` may be untrusted. Raises MessageError for anything but that message. Whether the
        round is still open is checked by `Server.add` and `Client.receive`.
        """
        wire, count = self._format_of(sender)
        shared_K = None if self.dense else self.shared_K
        try:
            message = decode_message(data, wire, shared_K, sender, self.round, count, self.mask_tag)
            return message.to(self.device)
        except ValueError as error:
            closed = "; no round is open here: call begin first" if self.status == CLOSED else ""
            raise MessageError(sender, f"{error}{closed}") from error

    def _format_of(self, sender: int) -> tuple[Wire, int | None]:
        """Return the wire format of a sender's messages, and how many positions of its own each
        has.

        This is None where the sender chooses the number. The sender is a client or SERVER.
        """
        return (self.wire_down, None) if sender == SERVER else (self.wire_up, self.own_count)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that a resumed run needs.

        Send this state and theta to a client that has missed rounds.
        """
        return self._identity() | {"round": self.round, "rule": self.rule.state_dict()}

    def _identity(self) -> dict[str, Any]:
        """Return what two participants, or a state and the object that loads it, must have in
        common."""
        return {
            "version": STATE_VERSION, "scheme": scheme_state(self.scheme), "seed": self.seed,
            "layer_sizes": list(self.layer_sizes), "order": self.wire_up.order,
        }  # fmt: skip

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that this object cannot load.

        It refuses a state of another scheme, seed or model, a state of a model whose parameters lie
        in memory in another order, and an incomplete state. `load_state_dict` calls this first.
        Call it yourself to check the states of several objects before you load any of them.
        """
        check_state_version("state of Known", state)
        wanted = self._identity()
        check_same_state("state", dict.fromkeys(state), dict.fromkeys([*wanted, "round", "rule"]))
        check_same_scheme("state: scheme", state["scheme"], self.scheme)
        for key in ("seed", "layer_sizes", "order"):
            if repr(state[key]) != repr(wanted[key]):  # so that 1, 1.0 and True differ
                got = shorten(state[key])
                raise ValueError(f"state: {key}: got {got}, allowed: {shorten(wanted[key])}")
        if type(state["round"]) is not int or state["round"] < 0:
            _refuse("state: round", state["round"], "a whole number >= 0")
        self.rule.check_state(state["rule"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; the next round is the one that the state names.

        A round that is open here is discarded. Raises ValueError, with nothing changed, for a state
        that `check_state` refuses.
        """
        self.check_state(state)
        self.rule.load_state_dict(state["rule"])
        self.round = state["round"]
        self.status = CLOSED
        self.flags.clear()
        self.overlaps.clear()


_A_COPY = "a changed copy (tensor.clone())"


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for one of inference mode, which does
    not count this."""
    return None if tensor.is_inference() else tensor._version


def _all_finite(values: Tensor) -> bool:
    """Return whether all values of a tensor on a CPU are finite.

    A sum is quick and needs no temporary vector. It can overflow, so then every value is checked.
    """
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


class InFlight(NamedTuple):
    """A message that a client has sent and that has not been acknowledged yet.

    For a dense message `positions_K`, `intended_K` and `values_K` are empty.
    """

    round: int
    positions_K: Tensor  # where its values belong, shared positions first
    intended_K: Tensor  # what the client meant to send there
    values_K: Tensor  # what it has sent
    dense: bool


class Client:
    """A client of the paper's Algorithm 2. "Line" in its methods means a line of this algorithm.

    `known` is the `Known` of this process, and `number` the client's number, 0 to 65,534. If the
    scheme has clients of a class of its own (`known.rule.client_type` is not None), make objects of
    that class instead; this class refuses such a scheme.

    `errors_D` (D,) float32, on the device of `known`, is what the server has not received yet. If
    none are given, it begins as zeros, or is None if the scheme keeps no errors. Its unit is that
    of the vectors given to `send`: model differences or, in a federation with global momentum, sums
    of gradients.

    `send` makes a message. From then until `arrived`, `errors_D` is the whole sum of the difference
    and the earlier errors, including what the message contains. Only `arrived` subtracts the values
    that were sent. So if a message is lost, its content stays in the errors.

    A derived class must change `errors_D` in place, because a `Compressor` has the errors of all
    clients in one tensor. In `keeps`, a class names the tensors (D,) that a resumed run needs.
    Those of its base classes are included automatically. All of them have to be in the unit of the
    errors, since `scale_` scales them together.
    """

    keeps: tuple[str, ...] = ("errors_D",)

    def __init__(self, known: Known, number: int = 0, errors_D: Tensor | None = None):
        self.known = _check_known(known)
        _check_type(known, type(self), Client, "client_type")
        self.number = _check_whole("number", number, 0, SERVER - 1)
        if errors_D is not None:
            if not known.scheme.keeps_errors:
                what = f"got some, but {known.scheme.name} keeps no errors"
                raise ValueError(f"errors_D: {what}, allowed: None")
            known.check_vector("errors_D", errors_D)
        elif known.scheme.keeps_errors:
            errors_D = torch.zeros(known.dimension, dtype=torch.float32, device=known.device)
        self.errors_D = errors_D
        self.in_flight: InFlight | None = None
        self.value_bits, self.quantizer = known.scheme.value_bits, known.scheme.quantizer

    def send(self, delta_D: Tensor) -> Message:
        """Make this round's message of a model difference (lines 9 to 12): add the errors to it,
        choose the own positions, and quantize the values.

        `delta_D` (D,) float32, on the device of `known`, is not changed. Before anything is
        changed, this raises NotFiniteError for NaN or infinity. It raises ValueError for another
        shape or type, a round that is not open, or a second message in one round. If an entry that
        is to be sent overflows when the difference is added, NotFiniteError is raised as well, and
        the errors are reset to 0.

        If a rule raises or returns a mask that is not allowed, give the round up with `Known.lose`.
        The errors then contain the difference already.

        On a GPU, NotFiniteError is not raised here but by `Known.to_bytes` or at the end of the
        round. Until then, a `delta_D` with NaN or infinity counts as all zero, and if a value that
        is to be sent has overflowed, the message contains only zeros. Then call `forget_overflow`,
        since errors that have overflowed would stop every later round, too. (A `Compressor` does.)
        """
        known, what = self.known, f"client {self.number}: send"
        if known.status != OPEN:
            got = f"round {known.round} is {known.status}"
            raise ValueError(f"{what}: {got}, allowed: after Known.begin")
        # The second is for a client whose state was loaded: `known` may not know of the message.
        if self.number in known.senders or self.sent_in(known.round):
            got = f"has sent in round {known.round} already"
            raise ValueError(f"{what}: {got}, allowed: once per round")
        return self.message_of(self.check_difference(delta_D))

    def check_difference(self, delta_D: Tensor) -> Tensor:
        """Check a difference and return it, detached from autograd.

        Raises ValueError for another shape or type, and NotFiniteError for NaN or infinity. On a
        GPU, a difference that is not finite is returned as zeros (see `Known.require_finite`).
        """
        known = self.known
        return known.require_finite(known.check_vector("delta_D", delta_D), self.number)

    def message_of(self, delta_D: Tensor) -> Message:
        """Make this round's message of a difference (D,) that has been checked: add the errors to
        it (line 9), and continue with `message_from` (lines 10 to 12)."""
        return self.message_from(self.intended(delta_D))  # line 9

    def message_from(self, intended_D: Tensor, own_K: Tensor | None = None) -> Message:
        """Make the message of `intended_D` (D,), the sum of the difference and the errors: choose
        own positions (line 10) unless they are given as `own_K`, take the values on the shared and
        own positions (line 11), and quantize them (line 12). In a dense round, take all values."""
        known, shared_K, who = self.known, self.known.shared_K, (self.number, self.known.round)
        known.senders.add(self.number)
        try:
            if known.dense:
                # A copy, so that the message shares no memory with the errors.
                values_D = known.require_finite(intended_D, self.number).clone()
                none = values_D[:0].clone()
                self.in_flight = InFlight(known.round, none.long(), none, none, True)
                return Message.dense_of(values_D, *who)
            if own_K is None:
                own_K = self.own_positions(intended_D)  # line 10: explore outside the shared mask
            positions_K = torch.cat([shared_K, own_K])
            intended_K = intended_D.index_select(0, positions_K)  # line 11: exploit and explore
            finite_K = known.require_finite(intended_K, self.number).clone()
            bits, quantizer = self.value_bits, self.quantizer
            message = Message.of(finite_K, own_K, bits, *who, quantizer)  # line 12: quantize, send
        except NotFiniteError:
            known.senders.discard(self.number)  # it has sent nothing
            self.forget_overflow()
            raise
        values_K = message.values.clone()  # a copy, in case the message is changed
        self.in_flight = InFlight(known.round, positions_K, intended_K, values_K, False)
        return message

    def intended(self, delta_D: Tensor) -> Tensor:
        """Line 9: return the sum of the difference and the errors, (D,). The difference is added to
        `errors_D` in place, and `errors_D` is returned. If error accumulation is switched off, the
        difference itself is returned."""
        return delta_D if self.errors_D is None else self.errors_D.add_(delta_D)

    def own_positions(self, intended_D: Tensor) -> Tensor:
        """Line 10: return this client's own positions (int64, ascending), which the scheme's rule
        chooses outside the shared mask."""
        known, rule, k = self.known, self.known.rule, self.known.own_count
        given = intended_D, known.shared_D
        before = [*map(_version, given)]
        mask = rule.own_mask(*given, rule.k_local if k is None else k)
        if [*map(_version, given)] != before:
            what = "own_mask: one of its tensors was changed in place, but they are used afterwards"
            raise ValueError(f"scheme {known.scheme.name}: {what}, allowed: {_A_COPY}")
        own_K = known.positions_of(mask, known.shared_D)
        if not known.on_cpu and type(rule).own_mask is not MaskRule.own_mask:
            known.overlaps.append(known.shared_D[own_K].any())  # `check_flags` reads it
        if k is not None and len(own_K) != k:
            way = "as own_count has returned; let it return None if clients choose the number"
            raise ValueError(f"own_mask: got {len(own_K)} entries, allowed: {k} ({way})")
        return own_K

    def arrived(self, received: Message | None = None) -> None:
        """Line 13: subtract the values of the message in flight from the errors, because it has
        arrived.

        Give the message as it was `received` if its values have changed on the way, for instance
        because an all-reduce has rounded them: then those values are subtracted. Raises ValueError
        if nothing is in flight, if `received` has another number of values than the message that
        was sent, or if only one of the two is dense. The values themselves are not compared.
        """
        what = f"client {self.number}: arrived"
        if self.in_flight is None:
            got = f"has sent nothing that could have arrived in round {self.known.round}"
            raise ValueError(f"{what}: {got}, allowed: once after each send")
        _, positions_K, intended_K, values_K, dense = self.in_flight
        if received is not None:
            count = self.known.dimension if dense else len(values_K)
            if received.dense != dense or tuple(received.values.shape) != (count,):
                got = f"dense {received.dense}, {tuple(received.values.shape)} values"
                raise ValueError(f"{what}: got {got}, allowed: dense {dense}, ({count},) values")
            values_K = received.values.detach()
        if self.errors_D is not None:
            if not dense:
                left_K = intended_K - values_K
                self.errors_D.index_copy_(0, positions_K, left_K)  # line 13: keep what was not sent
            elif received is None:
                self.errors_D.zero_()
            else:
                self.errors_D.sub_(values_K)
        self.in_flight = None

    def receive(self, reply: Message, heard: bool = True) -> Tensor:
        """End the round with the server's message and return the update (D,). This is for a client
        with a separate `Known`.

        `heard` says whether this client's message of this round is in the average. The reply does
        not contain this: a client in another process has to learn it from whatever carries the
        messages. With True, the default, the client subtracts what it sent from its errors. Give
        False if the server refused the message or averaged without it: then the errors keep all of
        it for the next round. Give False, too, at a client that did not take part.

        Raises MessageError, with nothing changed, for a message of another round. Raises ValueError
        if `heard` is True and this client has sent nothing in this round. Raises NotFiniteError if
        it turns out only now, on a GPU, that values which were sent are not finite.
        """
        known = self.known
        heard = _check_flag("heard", heard, ", whether this client was heard")
        known.check_message(reply, SERVER)
        known.check_flags()
        if heard and not self.sent_in(known.round):
            what = f"has sent nothing in round {known.round}, allowed: heard=False"
            raise ValueError(f"client {self.number}: receive: heard: got True, but it {what}")
        update_D = known.expand_message(reply)
        known.observe(update_D)
        if heard:
            self.arrived()
        else:
            self.in_flight = None
        return update_D

    def sent_in(self, round: int) -> bool:
        """Return whether a message of this round is in flight."""
        return self.in_flight is not None and self.in_flight.round == round

    def withdraw(self, delta_D: Tensor) -> None:
        """Undo what `send` added to the errors: subtract `delta_D` from them. This is for a round
        that all participants discard.

        Give the vector that `send` was called with. If nothing was subtracted from the errors since
        then, they return to their values before `send`, except for rounding. The message in flight
        is forgotten, so `sent_in` returns False. But `Known.senders` still contains this client, so
        that `send` refuses a second message in this round. Raises ValueError for another shape or
        type and, on a CPU, for NaN or infinity. (If `send` raised NotFiniteError for its vector,
        nothing was added, and there is nothing to withdraw.)
        """
        given_D = self.known.check_vector("delta_D", delta_D)
        if self.known.on_cpu and not _all_finite(given_D):
            what = "got NaN or infinity, allowed: the vector that `send` has added"
            raise ValueError(f"client {self.number}: withdraw: delta_D: {what}")
        self.in_flight = None
        if self.errors_D is not None:
            self.errors_D.sub_(given_D)

    def forget_overflow(self) -> None:
        """Set all kept tensors to 0 if an entry of the errors, or of another kept tensor, is not
        finite.

        Without this, the client could not send in any later round.
        """
        if not all(tensor.isfinite().all() for tensor in self._kept_tensors().values()):
            self.forget()

    def forget(self) -> None:
        """Set the errors and all other kept tensors to 0."""
        for tensor in self._kept_tensors().values():
            tensor.zero_()

    def scale_(self, factor: float) -> None:
        """Multiply the errors, all other tensors that `keeps` names, and what is remembered of a
        message in flight by a factor, because their unit changes.

        `Compressor.scale_errors_` calls this and says when. Raises ValueError for a factor that is
        not finite.
        """
        factor = _check_factor(factor)
        for tensor in self._kept_tensors().values():
            tensor.mul_(factor)
        if (flight := self.in_flight) is not None:
            intended_K, values_K = flight.intended_K * factor, flight.values_K * factor
            self.in_flight = flight._replace(intended_K=intended_K, values_K=values_K)

    def _kept_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `keeps` names, without those that are None."""
        return {name: tensor for name, tensor in kept_by(self).items() if tensor is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the tensors that `keeps` names (here, of the errors) and of the message
        in flight, if there is one."""
        flight = None if self.in_flight is None else self.in_flight._asdict()
        parts = {"number": self.number, "in_flight": flight} | kept_by(self)
        return _by_value({"version": STATE_VERSION} | parts)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that this client cannot load.

        It refuses the state of a client with another number, a state with errors of another size,
        and a state in which something is missing or has the wrong type. `load_state_dict` calls
        this first.
        """
        check_state_version("state of Client", state)
        flight, kept_tensors = state.get("in_flight"), kept_by(self)  # `flight` is checked below
        wanted = {"version": STATE_VERSION, "number": self.number, "in_flight": flight}
        check_same_state("state", state, wanted | kept_tensors)
        for name in kept_tensors:
            if isinstance(state[name], Tensor) and state[name].isnan().any():
                raise ValueError(f"state: {name}: got NaN, allowed: numbers")
        if state["number"] != self.number:
            raise ValueError(
                f"state: number of the client: got {state['number']}, allowed: {self.number}"
            )
        if flight is not None:
            self._check_in_flight(flight)

    def _check_in_flight(self, flight: Any) -> None:
        """Raise ValueError for a message in flight that this client cannot load."""
        if not isinstance(flight, dict):
            _refuse("state: in_flight", flight, f"None, or {', '.join(InFlight._fields)}")
        positions_K: Any = flight.get("positions_K")
        is_vector = isinstance(positions_K, Tensor) and positions_K.dim() == 1
        count = len(positions_K) if is_vector else 0
        values_K = torch.empty(count, dtype=torch.float32, device="cpu")
        like = InFlight(0, values_K.long(), values_K, values_K, False)
        check_same_state("state: in_flight", flight, like._asdict())
        _check_whole("state: in_flight: round", flight["round"], 0, 2**32 - 1)
        if flight["dense"] and len(positions_K):
            raise ValueError("state: in_flight: got positions of a dense message, allowed: none")
        try:  # sorted, because the shared positions come first, and then the client's own
            check_positions(positions_K.sort().values, self.known.dimension)
        except ValueError as error:
            raise ValueError(f"state: in_flight: {error}") from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of a state.

        Raises ValueError, with nothing changed, for a state that `check_state` refuses.
        """
        self.check_state(state)
        for name, tensor in self._kept_tensors().items():
            tensor.copy_(state[name])
        flight, device = state["in_flight"], self.known.device
        if flight is None:
            self.in_flight = None
            return
        moved = {key: flight[key].to(device, copy=True) for key in InFlight._fields[1:4]}
        self.in_flight = InFlight(round=flight["round"], dense=flight["dense"], **moved)


class Downlink(Client):
    """The server as a sender of compressed updates: lines 9 to 13, applied to the update.

    `Server` has one if the scheme does not send the whole average in 32 bits. Outside the shared
    mask, the server sends the entries that `phi_down` selects or, without it, all that any client
    has sent. Values are quantized if `down_value_bits` is below 32.
    """

    def __init__(self, known: Known):
        super().__init__(known)
        if self.errors_D is None:  # the server keeps errors in any case
            self.errors_D = torch.zeros(known.dimension, dtype=torch.float32, device=known.device)
        self.number = SERVER  # which is not a client's number, so `Client` would refuse it
        self.value_bits, self.quantizer = known.scheme.down_value_bits, known.scheme.down_quantizer

    def reply_to(self, update_D: Tensor, explored_D: Tensor) -> Message:
        """Make the server's message for an update (D,), and subtract its values from the server's
        errors.

        They are subtracted at once, because a reply is assumed to arrive. `explored_D` (D,) bool
        says where clients sent entries outside the shared mask. Without `phi_down`, these are the
        server's own positions. Raises NotFiniteError if the sum of errors and update overflows;
        then the errors become 0.
        """
        known, before_D = self.known, self.errors_D
        follows_clients = known.scheme.phi_down is None and not known.dense
        own_K = mask_to_positions(explored_D) if follows_clients else None
        try:
            message = self.message_from(self.intended(update_D), own_K)
            self.arrived()
            known.check_flags()  # on a GPU, whether the errors overflowed
        except BaseException as error:
            self.errors_D, self.in_flight = before_D, None
            if isinstance(error, NotFiniteError) and error.client == SERVER:
                cast(Tensor, before_D).zero_()  # otherwise they might overflow in every round
            raise
        return message

    def intended(self, delta_D: Tensor) -> Tensor:
        """Do line 9 in new memory, so that the errors can be restored after a failed round."""
        self.errors_D = cast(Tensor, self.errors_D) + delta_D
        return self.errors_D

    def own_positions(self, intended_D: Tensor) -> Tensor:
        """Return the positions outside the shared mask that the server chooses with `phi_down`,
        from which their number follows.

        In a round without a shared mask, there are k_global more, as many as the shared mask would
        have.
        """
        known, rule, shared = self.known, self.known.rule, len(self.known.shared_K)
        k = rule.size(known.scheme.phi_down, known.dimension - rule.k_global)
        k = min(k + (0 if shared else rule.k_global), known.dimension - shared)
        mask = rule.own_mask(intended_D, known.shared_D, k)
        return known.positions_of(mask, known.shared_D)


class Server:
    """The server of the paper's Algorithm 2, whose lines its methods name. It adds each message to
    a sum as soon as the message arrives.

    `weights` has one number from 1e-18 to 1e18 per client. The weighted sum of the messages is
    divided by the sum of the weights of those clients that were heard, that is, whose messages were
    added. Without weights, all clients count equally. `heard` lists these clients in an open round.

    If the scheme has a server of a class of its own (`known.rule.server_type` is not None), make an
    object of that class instead; this class refuses such a scheme.

    The server's messages are compressed if the scheme's field `phi_down` is not None or its
    `down_value_bits` is not 32. Then `downlink` is an object of the class Downlink, a kind of
    `Client` that sends the updates and keeps their errors. Otherwise `downlink` is None.
    """

    def __init__(self, known: Known, weights: Iterable[float] | None = None):
        self.known = _check_known(known)
        _check_type(known, type(self), Server, "server_type")
        self.weights = _check_weights(weights)
        self.downlink = Downlink(known) if known.scheme.compresses_downlink else None
        self.explored_D = torch.zeros(known.dimension, dtype=torch.bool, device=known.device)
        self.heard: list[int] = []  # clients whose messages are in the sum
        self.opening: int | None = None  # `Known.opening` in the round of these messages
        self.sum_D = torch.zeros(0, dtype=torch.float32, device=known.device)
        self.average_D: Tensor | None = None  # once `average` has computed it

    def add(self, number: int, message: Message) -> None:
        """Add client `number`'s message of this round to the sum.

        Raises MessageError, with nothing changed, for a message that `Known.check_message` refuses,
        from a client without a weight, for a client's second message in this round, and after
        `average`.
        """
        known, weights = self.known, self.weights
        limit = SERVER if weights is None else len(weights)
        number = _number(number)
        if type(number) is not int:
            _refuse("number", number, f"a client's number, 0 to {limit - 1}")
        if not 0 <= number < limit:
            raise MessageError(number, f"add: has no weight, allowed: clients 0 to {limit - 1}")
        known.check_message(message, number)
        if known.status == AVERAGED:
            raise MessageError(
                number, f"add: too late, round {known.round} has been averaged without it"
            )
        is_first = self.opening != known.opening  # the first message of a round
        if number in self.heard and not is_first:
            raise MessageError(
                number, f"add: a second message in round {known.round}, allowed: one"
            )
        if is_first:
            self.drop()  # messages of a round that was never finished
            self.opening = known.opening
            self.sum_D = torch.zeros(known.dimension, dtype=torch.float32, device=known.device)
        weight = 1.0 if weights is None else weights[number]
        message.add_to_(self.sum_D, known.shared_K, weight)
        self.heard.append(number)
        self.explored_D.index_fill_(0, message.positions, True)

    def average(self) -> Tensor:
        """Line 15: return the average (D,) of the messages that were added, by their weights.

        Messages that come later in this round are refused. Raises MessageError if there is no
        message, and NotFiniteError if the sum has overflowed.
        """
        known = self.known
        if not self.heard or self.opening != known.opening or known.status == CLOSED:
            way = "allowed: finish after add, or Known.lose, which gives the round up"
            what = f"no message was accepted in round {known.round}"
            if known.status == AVERAGED:
                what = f"finish: round {known.round} is averaged already"
                way = "allowed: Known.observe with its update, or Known.lose if finish has raised"
            raise MessageError(SERVER, f"{what}, {way}")
        if self.average_D is None:
            shares = self.weights
            total = len(self.heard) if shares is None else sum(shares[n] for n in self.heard)
            update_D = self.sum_D.div_(total)  # line 15
            self.average_D = known.require_finite(update_D, SERVER)
            known.status = AVERAGED
        return self.average_D

    def reply(self, update_D: Tensor) -> Message:
        """Line 16: make the server's message to all clients from the update (D,).

        In a dense round it contains all D entries. Otherwise it contains the values at the shared
        positions and, with their positions, the values at all other positions that clients have
        sent. With a compressed downlink (see `Server`), `downlink` makes the message, and
        NotFiniteError is raised if its errors overflow.
        """
        known = self.known
        if self.downlink is not None:
            return self.downlink.reply_to(update_D, self.explored_D)
        if known.dense:
            return Message.dense_of(update_D.clone(), SERVER, known.round)
        own_K = mask_to_positions(self.explored_D)
        values_K = update_D.index_select(0, torch.cat([known.shared_K, own_K]))
        return Message(values_K, own_K, SERVER, known.round)  # line 16

    def finish(self) -> tuple[Tensor, Message]:
        """Return the update that the server and all clients apply, (D,), and the message that
        contains it.

        If the downlink is compressed, the update is what the message contains, not the average. The
        round ends when you give the update to `Known.observe`. This method empties the list
        `heard`, so read it before if you want to know whose messages were averaged.

        Raises what `average` raises. On a GPU it may turn out only now that a client's message is
        not finite: then NotFiniteError is raised and the round is lost; end it with `Known.lose`.

        With a compressed downlink, its errors no longer contain what the reply contains. If the
        round may still be lost after this, for instance because the reply cannot be sent, save
        `state_dict()` before, and load it then.
        """
        update_D = self.average()
        try:
            self.known.check_flags()
            reply = self.reply(update_D)
        except NotFiniteError:
            self.drop()
            raise
        if self.downlink is not None:
            update_D = self.known.expand_message(reply)
        self.drop()
        return update_D, reply

    def drop(self) -> None:
        """Forget the messages that were added, because the round is over or has failed.

        You need not call this: `finish` and `load_state_dict` do, and so does `add` for the first
        message of a new round. A derived class can extend it to reset its own attributes.
        """
        if self.heard:
            self.explored_D.zero_()
        self.heard, self.average_D, self.opening = [], None, None
        self.sum_D = self.sum_D.new_zeros(0)

    def scale_(self, factor: float) -> None:
        """Multiply the errors of a compressed downlink by a factor, because their unit changes.
        `Compressor.scale_errors_` calls this and says when."""
        if self.downlink is not None:
            self.downlink.scale_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the errors of a compressed downlink. Messages of an open round are not
        included."""
        down = None if self.downlink is None else self.downlink.state_dict()
        return {"version": STATE_VERSION, "downlink": down}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that does not fit this server's downlink, or one in which
        something is missing. `load_state_dict` calls this first."""
        check_state_version("state of Server", state)
        wanted = dict.fromkeys(self.state_dict())
        check_same_state("state of Server", dict.fromkeys(state), wanted)
        if (state["downlink"] is None) != (self.downlink is None):
            got, allowed = ("no", "some") if state["downlink"] is None else ("some", "no")
            what = f"got {got} errors of a downlink, allowed: {allowed} such errors"
            raise ValueError(f"state of Server: {what} ({self.known.scheme.name})")
        if self.downlink is not None:
            self.downlink.check_state(state["downlink"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of a state; messages of an open round are dropped.

        Raises ValueError, with nothing changed, for a state that `check_state` refuses.
        """
        self.check_state(state)
        if self.downlink is not None:
            self.downlink.load_state_dict(state["downlink"])
        self.drop()


def _check_known(value: Any) -> Known:
    if not isinstance(value, Known):
        _refuse("known", value, "a Known, such as Known(scheme, layer_sizes)")
    return value


def _check_type(known: Known, made: type, plain: type, key: str) -> None:
    """Raise ValueError for a plain client or server of a scheme that has its own class for it."""
    wanted = getattr(known.rule, key)
    if made is plain and wanted is not None and not issubclass(plain, wanted):
        got = f"got a {plain.__name__}, allowed: a {wanted.__name__}"
        raise ValueError(f"{known.scheme.name}: {got} (make it by known.rule.{key}(known, ...))")


def _check_weights(
    weights: Iterable[float] | None, clients: int | None = None
) -> list[float] | None:
    if weights is None:
        return None
    numbers = [_number(weight) for weight in _listed("weights", weights)]
    clients = max(len(numbers), 1) if clients is None else clients
    real = all(isinstance(weight, Real) and type(weight) is not bool for weight in numbers)
    if len(numbers) != clients or not real or not all(1e-18 <= n <= 1e18 for n in numbers):
        allowed = f"{clients} positive numbers, 1e-18 to 1e18 (leave out clients without samples)"
        raise ValueError(f"weights: got {numbers}, allowed: {allowed}")
    return [float(weight) for weight in numbers]


# How messages travel ──────────────────────────────────────────────────────────────────────────────


class Link:
    """How messages travel between the server and the clients of a `Compressor`.

    Without a `channel`, messages arrive exactly as they were sent, and their exact sizes are
    counted. With one, every message becomes bytes and is decoded before it is used.
    `channel(sender, data)` returns the bytes that arrive; `sender` is a client's number or SERVER.
    Give the function `unchanged` for a channel without errors, or your own function, such as a
    transport or a simulated attack.

    A client's message that cannot be decoded raises MessageError. With `on_bad` "skip" it is left
    out instead: the average is that of the others, and the client's errors keep everything that it
    meant to send. (In a scheme without errors, it is lost.) If no client's message can be decoded,
    or the server's cannot, MessageError is raised all the same.

    A derived class may replace two methods. `to_server(known, n, message)` returns a pair, client
    n's message as it arrives and its length in bits. To leave out a message, for whatever reason,
    return (None, 0). `to_clients(server)` calls `server.finish()`, and returns a pair, the update
    (D,) that the clients receive and the length of the server's message in bits. Both lengths are
    those of `message_bits`, without header and checksum.
    """

    channel: Callable[[int, bytes], bytes] | None = None
    on_bad = "stop"

    def __init__(self, channel: Callable[[int, bytes], bytes] | None = None, on_bad: str = "stop"):
        if channel is not None and not callable(channel):
            _refuse("channel", channel, "a function of a client's number and bytes, or None")
        if on_bad not in ("stop", "skip"):
            raise ValueError(f"on_bad: got {on_bad!r}, allowed: stop or skip")
        self.channel, self.on_bad = channel, on_bad

    def to_server(self, known: Known, n: int, message: Message) -> tuple[Message | None, int]:
        """Return client n's message as the server receives it, and its length in bits, without
        header and checksum.

        With `on_bad` "skip", returns (None, 0) for a message that cannot be decoded. Otherwise
        raises MessageError for it.
        """
        if self.channel is not None:
            data = self.channel(n, known.to_bytes(message))
            try:
                message = known.from_bytes(data, n)
            except MessageError:
                if self.on_bad == "stop":
                    raise
                return None, 0
        return message, message_bits(message, known.wire_up)

    def to_clients(self, server: Server) -> tuple[Tensor, int]:
        """Return the update that all clients receive, (D,), and the length of the server's message
        in bits, without header and checksum. Raises what `Server.finish` raises, and MessageError
        for a message that cannot be decoded."""
        known = server.known
        own_way = type(server).finish is not Server.finish or type(server).reply is not Server.reply
        plain = server.downlink is None and not own_way and known.scheme.code == "block"
        if self.channel is None and plain:
            # `Server.finish` without the reply, whose length follows from the number of its values
            update_D = server.average()
            explored = known.check_flags(None if known.dense else server.explored_D)
            server.drop()
            if known.dense:
                return update_D, 32 * known.dimension
            bits, count = known.wire_down.value_bits, len(known.shared_K) + explored
            return update_D, block_code_bits(bits, count, explored, known.dimension)
        update_D, reply = server.finish()
        bits = message_bits(reply, known.wire_down)
        if self.channel is not None:
            data = self.channel(SERVER, known.to_bytes(reply))
            update_D = known.expand_message(known.from_bytes(data, SERVER))
        return update_D, bits


def unchanged(sender: int, data: bytes) -> bytes:
    """Return the data unchanged: a channel without errors, for `Link(unchanged)`."""
    return data


def bytes_of(bits: int) -> int:
    """Return the length in bytes of a message whose code has this many bits, with OVERHEAD_BYTES
    for header and checksum."""
    return OVERHEAD_BYTES + -(-bits // 8)


# All of it in one process ─────────────────────────────────────────────────────────────────────────


class Traffic(NamedTuple):
    """What was sent in one round.

    - `bits_up`: the length of a client's message in bits, without header and checksum, on average
      over the clients in `heard` and rounded up to a whole number.
    - `bits_down`: the length of the server's message in bits, without header and checksum.
    - `bytes_up`: the length of all messages of the clients in `heard` together, in bytes. Each has
      OVERHEAD_BYTES (20) for header and checksum.
    - `bytes_down`: the length of the server's message in bytes, also with header and checksum.
    - `heard`: the numbers of the clients whose messages were averaged.
    - `refused`: the numbers of the clients whose messages were left out of the average (see
      `Link`). The lengths above do not include these messages.

    Centralized training (Baseline) sends nothing. Nevertheless, its round is counted here as one
    dense message in each direction. (The function `bit_budget` returns nan for such a scheme.)
    """

    bits_up: int = 0
    bits_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    heard: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


class Compressor:
    """N clients and a server that share one `Known`: the compression of the paper's Algorithm 2 in
    one method, `step`.

    `clients` is N, and `link` decides how messages travel. The other arguments are those of `Known`
    and `Server`.

    Attributes

    - `errors_ND` (N, D) float32: what the server has not received yet, in the unit of the vectors
      that `step` is given. Its shape is (0, D) if the scheme keeps no errors.
    - `traffic`: the `Traffic` of the last round of this object that succeeded; all 0 before the
      first. `bits_up`, `bits_down`, `bytes_up` and `bytes_down` are its fields of the same names.
      (`bits_up` is that of one client, and `bytes_up` that of all clients together. `bytes_down`
      is one message, which every client receives.)
    - `known`, `server` and `clients`: the `Known`, the `Server`, and a dictionary from the clients'
      numbers to the `Client` objects. `rule` is the `MaskRule`.

    Raises ValueError for a scheme with momentum or with `error_unit` "gradient", which need a
    `Federation`. (A `Federation` does both itself. It makes its own `Compressor` from the scheme
    without them.)
    """

    def __init__(
        self, scheme: Scheme | str, layer_sizes: list[int], clients: int, device: Any = "cpu",
        seed: int = 0, link: Link | None = None, weights: Iterable[float] | None = None,
        order: Iterable[tuple[int, ...]] = (),
    ):  # fmt: skip
        self.scheme = _scheme(scheme)
        clients = _check_whole("clients", clients, 1, SERVER)
        if self.scheme.centralized and clients > 1:
            name = self.scheme.name
            raise ValueError(f"clients: got {clients}, allowed: 1 ({name} is centralized)")
        if link is not None and not isinstance(link, Link):
            _refuse("link", link, "a Link, such as Link(function), or None")
        self.known = Known(self.scheme, layer_sizes, seed, device, order)
        self.link = link or Link()
        rows = clients if self.scheme.keeps_errors else 0
        # numpy's zeros use no memory until they are written to
        lazy_ND = np.zeros((rows, self.known.dimension), np.float32)
        self.errors_ND = torch.from_numpy(lazy_ND).to(device)
        errors = list(self.errors_ND) if rows else [None] * clients
        client_type = self.rule.client_type or Client
        server_type = self.rule.server_type or Server
        made = [client_type(self.known, n, errors_D) for n, errors_D in enumerate(errors)]
        self.clients = dict(enumerate(made))
        self.server = server_type(self.known, _check_weights(weights, clients))
        self.traffic = Traffic()
        self._is_whole = True  # False during a round, and after one whose end was interrupted

    def step(
        self, deltas_ND: Tensor, dense: bool = False, clients: Iterable[int] | None = None
    ) -> Tensor:
        """Do one round: take the clients' model differences (N, D) and return their compressed
        average (D,), both float32.

        Each client adds its errors, sends the values on the shared mask and on its own mask, and
        keeps the rest as its errors (lines 9 to 13 of Algorithm 2). The server averages what was
        sent and sends the average back (lines 15 and 16), from which the next shared mask is chosen
        (line 5). With `dense`, as in a warm-up, every entry is sent and nothing is quantized. A
        scheme that takes its mask from an update makes its first round dense unless its
        `dense_warmup` is False. `clients` lists who takes part; the others keep their errors, and
        their rows are not looked at. (If few take part, `round` needs no rows of the others.)
        `deltas_ND` is not changed.

        Raises NotFiniteError or ValueError, with nothing changed, for deltas or clients that cannot
        be used. On a GPU it turns out only at the end of the round that a delta is not finite: then
        the round is lost. A round can be lost for other reasons, too, such as an error of the link.
        Then the errors contain the differences already, as `round` describes, so do not give the
        same differences again.
        """
        self.check_usable(begins=True)
        dense = _check_flag("dense", dense, "; for those who take part, clients=[...]")
        expected = (len(self.clients), self.known.dimension)
        if tuple(_check_tensor("deltas_ND", deltas_ND).shape) != expected:
            raise ValueError(f"deltas_ND: got shape {tuple(deltas_ND.shape)}, allowed: {expected}")
        chosen = self.check_clients(clients)
        # All differences are checked before anything is changed.
        deltas = {n: self.clients[n].check_difference(deltas_ND[n]) for n in chosen}
        return self._round(deltas.__getitem__, chosen, dense)

    def round(
        self, difference: Callable[[int], Tensor], chosen: list[int], dense: bool = False,
        theta_D: Tensor | None = None, mask_factor: int = 1,
    ) -> Tensor:  # fmt: skip
        """Do one round like `step`, but call `difference(n)` for each client's difference (D,) when
        it is needed. Returns the compressed average (D,).

        `chosen` lists the clients that take part. For `theta_D` and `mask_factor` see
        `Known.begin`.

        If anything is raised during the round, no message counts as received: errors hold what was
        meant to be sent, the mask is the same as before, and the next round has the next number.
        (Errors that have overflowed become 0. If the server's sum of the messages, or of its own
        errors and the average, has overflowed, the errors of all clients that were heard become 0,
        too, since it might overflow again in the next round.)
        In a scheme without errors, what was sent in this round is lost. If a round is interrupted
        at its very end, while errors are updated, `step`, `round`, `scale_errors_` and `state_dict`
        raise ValueError until a state is loaded.
        """
        self.check_usable(begins=True)
        dense = _check_flag("dense", dense)
        checked = lambda n: self.clients[n].check_difference(difference(n))  # noqa: E731
        return self._round(checked, self.check_clients(chosen), dense, theta_D, mask_factor)

    def _round(
        self, checked: Callable[[int], Tensor], chosen: list[int], dense: bool,
        theta_D: Tensor | None = None, mask_factor: int = 1,
    ) -> Tensor:  # fmt: skip
        """Do lines 9 to 13, 15, 16 and the next line 5; `checked(n)` is n's checked difference."""
        known, server, t = self.known, self.server, self.known.round
        lengths = dict[int, int]()  # of the messages that reach the server, in bits, by client
        heard = tuple[int, ...]()  # clients whose messages are averaged
        asked: int | None = None  # the client whose message is being made
        message: Message | None
        parts = [part for part in (known.rule, server, server.downlink) if part is not None]
        before = [(part, vars(part).copy()) for part in parts]  # for `_put_back`
        is_closing = False  # True once clients' errors change, which cannot be undone
        try:
            self._is_whole = False
            known.begin(dense, theta_D, mask_factor)
            own = dict[int, Tensor]()  # chosen for all clients together, on a GPU
            if self._chooses_together():
                for asked in chosen:
                    self.clients[asked].intended(checked(asked))  # line 9
                asked, intended = None, [cast(Tensor, self.clients[n].errors_D) for n in chosen]
                k = cast(int, known.own_count)
                own_NK = top_k_of_each(intended, k, known.shared_K)  # line 10
                own = dict(zip(chosen, own_NK, strict=True))
            for asked in chosen:
                client = self.clients[asked]
                if own:
                    message = client.message_from(cast(Tensor, client.errors_D), own[asked])
                else:
                    message = client.message_of(checked(asked))
                message, length = self._sent_up(asked, message)
                if message is not None:
                    server.add(asked, message)
                    lengths[asked] = length
                del message  # a dense message is as large as the model
            asked, heard = None, tuple(server.heard)
            update_D, bits_down = self._sent_down()  # lines 15 and 16
            traffic = self._traffic([lengths[n] for n in heard], bits_down, heard, chosen)
            known.observe(update_D)  # line 5 of the next round
            is_closing = True
            for n in heard:
                self.clients[n].arrived()  # line 13
        except BaseException as error:
            if is_closing:
                error.add_note(f"round {t}: its end was interrupted; {_WAY_ON}")
                raise
            self._put_back(before, t, asked, heard, error)
            raise
        self.traffic = traffic
        self._is_whole = True
        return update_D

    def _sent_up(self, n: int, message: Message) -> tuple[Message | None, int]:
        """Let the link carry client n's message. Raises ValueError for a result that
        `Link.to_server` does not allow."""
        found = self.link.to_server(self.known, n, message)
        allowed = "a pair of a message, or None, and its length in bits"
        return self._carried("to_server", found, Message | None, allowed)

    def _sent_down(self) -> tuple[Tensor, int]:
        """Let the link carry the server's message. Raises ValueError for a result that
        `Link.to_clients` does not allow, and, on a CPU, MessageError for an update that is not
        finite."""
        link, found = self.link, self.link.to_clients(self.server)
        allowed = "a pair of the update (D,) and the length in bits of the server's message"
        update_D, bits = self._carried("to_clients", found, Tensor, allowed)
        update_D = self.known.check_vector("update_D", update_D)
        # Link's own method makes sure that all values are finite.
        is_checked = type(link).to_clients is Link.to_clients or not self.known.on_cpu
        if not is_checked and not _all_finite(update_D):
            raise MessageError(SERVER, "update_D: got NaN or infinity, allowed: finite values")
        return update_D, bits

    def _carried(self, call: str, found: Any, kind: Any, allowed: str) -> Any:
        """Return what a method of the link has returned. Raises ValueError unless it is a pair of
        an object of this kind and a length in bits."""
        is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], kind)
        if not is_pair or type(found[1]) is not int or found[1] < 0:
            _refuse(f"{type(self.link).__name__}.{call}", found, allowed)
        return found

    def _traffic(
        self, lengths_up: list[int], bits_down: int, heard: tuple[int, ...], chosen: list[int]
    ) -> Traffic:
        """Return the traffic of a round, from the lengths in bits of the messages of the clients in
        `heard` and of the server's message. `chosen` took part."""
        average_up = -(-sum(lengths_up) // max(len(heard), 1))
        bytes_up = sum(map(bytes_of, lengths_up))
        found = set(heard)
        refused = tuple(n for n in chosen if n not in found)
        return Traffic(average_up, bits_down, bytes_up, bytes_of(bits_down), heard, refused)

    def _chooses_together(self) -> bool:
        """Return whether the clients' own masks are chosen in one batch of calls.

        This is done on a GPU, if each mask is S_top of the client's errors after line 9. On a CPU
        it would take longer than one client after the other.
        """
        known, rule = self.known, self.rule
        is_plain = rule.client_type is None and type(rule).own_mask is MaskRule.own_mask
        sends_own = not known.dense and bool(known.own_count)
        is_fair = self.scheme.phi_min_local is not None
        return (
            not known.on_cpu and is_plain and sends_own and not is_fair and len(self.errors_ND) > 0
        )

    def _put_back(
        self, before: list[tuple[Any, dict[str, Any]]], t: int, asked: int | None,
        heard: tuple[int, ...], error: BaseException,
    ) -> None:  # fmt: skip
        """Undo round t, which failed with `error` before any message was acknowledged.

        `before` has the attributes of the rule, the server and its downlink, which are restored.
        The docstring of `round` says what becomes of the errors of all clients, and of those in
        `heard`. A note is added to the error, which names the round and, unless the error does so
        already, the client whose message was being made (`asked`).
        """
        # `before` holds no copies of tensors, since the rule and the downlink replace their tensors
        # and never change them in place. Of the server's tensors, `sum_D` is a new one in each
        # round. `explored_D` does change in place, but it is clear at the beginning of a round.
        is_named = asked is None or isinstance(error, ClientError)  # which names its client itself
        who = "" if is_named else f"client {asked}, "
        lost = "" if self.scheme.keeps_errors else "; what was sent is lost"
        error.add_note(f"{who}round {t}: nobody was heard in it{lost}")
        self.server.drop()  # clears `explored_D`; all else that it sets is replaced now
        for part, attributes in before:
            part.__dict__ = attributes
        self.known.lose(t)
        if isinstance(error, ClientError):
            error.round = t
        if isinstance(error, NotFiniteError):
            sender = (self.clients | {SERVER: self.server.downlink}).get(error.client)
            if sender is not None:
                sender.forget_overflow()
            for n in heard if error.client == SERVER else ():
                self.clients[n].forget()
        self._is_whole = True

    def check_usable(self, begins: bool = False) -> None:
        """Raise ValueError inside a round, or after one whose end was interrupted.

        With `begins`, because a new round is to begin, also raise it if a round is open in `known`.
        """
        if not self._is_whole:
            got = "a round is under way, or its end was interrupted"
            raise ValueError(f"Compressor: {got}; {_WAY_ON}")
        if begins and self.known.status != CLOSED:
            got = f"round {self.known.round} is {self.known.status}"
            way = "after Known.observe, which ends it, or Known.lose, which gives it up"
            raise ValueError(f"Compressor: {got}, allowed: {way}")

    def check_clients(self, chosen: Iterable[int] | None) -> list[int]:
        """Return the list of clients that take part; None means all clients.

        Raises ValueError unless they are one or more integers from 0 to N - 1, each given once.
        """
        if chosen is None:
            return list(self.clients)
        numbers = list(map(_number, _listed("clients", chosen)))
        whole = set(map(type, numbers)) == {int}  # not bool; and False for an empty list
        if not whole or len({*numbers} & self.clients.keys()) < len(numbers):
            allowed = f"one or more of 0 to {len(self.clients) - 1}, each once"
            raise ValueError(f"clients: got {shorten(numbers)}, allowed: {allowed}")
        return numbers

    rule = property(lambda self: self.known.rule)
    bits_up = property(lambda self: self.traffic.bits_up)
    bits_down = property(lambda self: self.traffic.bits_down)
    bytes_up = property(lambda self: self.traffic.bytes_up)
    bytes_down = property(lambda self: self.traffic.bytes_down)

    def keep_errors_in(self, errors_ND: Tensor) -> None:
        """Use the memory of this tensor for the errors. It may, for instance, be a tensor that is
        mapped to a file (`torch.from_file`), if the errors do not fit into memory.

        `errors_ND` must have the shape and the dtype (float32) of the attribute `errors_ND`, be on
        the compressor's device, and hold zeros. The last two are not checked. Call this before the
        first round. Raises ValueError for another shape or type, and after a round has begun.
        """
        check_same_state("errors_ND", errors_ND, self.errors_ND)
        if self.known.round or self.known.status != CLOSED:
            got = f"got a call in round {self.known.round}"
            raise ValueError(f"keep_errors_in: {got}, allowed: before the first round")
        self._use_errors(errors_ND)

    def _use_errors(self, errors_ND: Tensor) -> None:
        self.errors_ND = errors_ND
        for client, errors_D in zip(self.clients.values(), errors_ND, strict=False):
            client.errors_D = errors_D

    def scale_errors_(self, factor: float) -> None:
        """Multiply the errors of all clients and of the server by a factor, to convert them to
        another unit.

        With the scheme's `error_unit` "gradient", `Federation.round` calls this when the learning
        rate changes, because the same gradient then stands for another model difference. Raises
        ValueError for a factor that is not finite.
        """
        self.check_usable()
        factor = _check_factor(factor)
        if factor == 1:
            return
        self._is_whole = False
        for client in self.clients.values():
            client.scale_(factor)
        self.server.scale_(factor)
        self._is_whole = True

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that a resumed run needs, the clients' and the server's
        errors included."""
        self.check_usable()
        clients = [client.state_dict() for client in self.clients.values()]
        parts = {"known": self.known.state_dict(), "clients": clients}
        return {"version": STATE_VERSION} | parts | {"server": self.server.state_dict()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for the state of another scheme, seed or model, or an incomplete one.
        `load_state_dict` calls this first."""
        check_state_version("state of Compressor", state)
        wanted = dict.fromkeys(("version", "known", "clients", "server"))
        check_same_state("state of Compressor", dict.fromkeys(state), wanted)
        states = state["clients"]
        got = len(states) if isinstance(states, list) else "no list"
        if got != len(self.clients):
            raise ValueError(f"state: clients: got {got}, allowed: {len(self.clients)}")
        self.known.check_state(state["known"])
        for client, own_state in zip(self.clients.values(), states, strict=True):
            client.check_state(own_state)
        self.server.check_state(state["server"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of a state.

        Raises ValueError, with nothing changed, for a state that `check_state` refuses.
        """
        self.check_state(state)
        self._is_whole = False
        self.known.load_state_dict(state["known"])
        for client, own_state in zip(self.clients.values(), state["clients"], strict=True):
            client.load_state_dict(own_state)
        self.server.load_state_dict(state["server"])
        self._is_whole = True

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickling or a deep copy. The clients are without their errors,
        which are rows of `errors_ND`: with each row, pickle would store the memory of all."""
        clients = {n: copy.copy(client) for n, client in self.clients.items()}
        for client in clients.values():
            client.errors_D = None
        return vars(self) | {"clients": clients}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the object after pickling or a deep copy. The clients' errors become rows of
        `errors_ND` again."""
        self.__dict__ |= state
        self._use_errors(self.errors_ND)


_WAY_ON = "allowed: load_state_dict of a saved state, or a new Compressor"


def _check_factor(value: Any) -> float:
    factor = _number(value)
    if not isinstance(factor, Real) or not math.isfinite(factor):
        _refuse("factor", factor, "a finite number")
    return cast(float, factor)


# ══ 7. The federation: local training, FedAvg, global momentum (Alg. 1, 3) ════════════════════════
#    `Federation` does the training, round by round; `LocalTrainer` does a client's part of a round.
#    Clients take turns on one module: a client's difference is computed, compressed, sent and then
#    discarded.


class Phase(NamedTuple):
    """What a schedule returns for a round. A schedule is a function from the round's number,
    counted from 0, to a Phase or a learning rate.

    - `eta`: the learning rate of the local steps, a finite number >= 0. (Without a schedule,
      `Federation.schedule` returns a Phase whose `eta` is NaN: the local optimizer has its own
      rate.)
    - `dense`: whether every entry is sent in this round.
    - `mask_factor`: a whole number from 1 to 1000. In this round the shared mask and the clients'
      own masks have this many times their usual numbers of entries (but not more than there are).
      It is ignored if the scheme's field `warmup_masks` is 1, its default.

    If a schedule returns another `eta`, `Federation.round` raises ValueError. The same is true of
    another `mask_factor`, unless it is ignored.
    """

    eta: float
    dense: bool = False
    mask_factor: int = 1


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy loss of a batch of inputs and class labels, a scalar tensor.

    Raises ValueError for anything but a pair of inputs and labels of one or more samples.
    """
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not pair or not isinstance(batch[1], Tensor):
        got = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
        got = f"labels of type {type(batch[1]).__name__}" if pair else got
        raise ValueError(f"batch: got {got}, allowed: a pair of inputs and a tensor of labels")
    inputs, labels = batch
    if not labels.dim() or not labels.numel():
        got = f"labels of shape {tuple(labels.shape)}"
        way = "(a data set gives single samples: put a DataLoader around it)"
        raise ValueError(f"batch: {got}, allowed: one or more samples {way}")
    return F.cross_entropy(model(inputs).float(), labels)


class Federation:
    """Train a model with N clients and a server. Call `round` once per round.

    In a round, every client trains from the same parameters, which we call theta, and sends what
    its training has changed. The server averages these differences, and theta is moved by the
    average. This is the paper's Algorithm 1 (averaging after local steps) with the compression of
    Algorithm 2. If the scheme has momentum, it is Algorithm 3 (global momentum) instead of
    Algorithm 1.

    Arguments

    - `model`: any module with float32 parameters. It is trained itself, not a copy of it: for
      another training, make a new one. After every round its parameters are theta. Its modes (train
      or eval) and gradients are restored after every round. If you load other weights or running
      statistics into it between two rounds, training continues from these. If you change which
      parameters are trained, the next round raises a ValueError that names the parameter: make a
      new Federation of the module. A forward pass may also change other state of the module, such
      as a teacher model or the vectors of nn.utils.spectral_norm. All clients share it: each
      continues from what the client before it has left. It is not averaged, and it is not restored
      after a failed round. With plain SGD, a forward pass must not change the parameters
      themselves. If it does, the round fails; but a change of `p.data` is not noticed and is lost.
    - `feed`: a list with one iterable of batches per client, or an object like `Feed`. The batches
      have to be on the model's device.
    - `scheme`: a `Scheme` or its name. It also says how many batches a client takes in a round:
      one, or H with the suffix -L<H>. Other fractions than the usual ones are fields of a scheme,
      as in `Scheme.named("TCS", phi_global=0.05)`.
    - `schedule`: the learning rate of the local steps, or a function from a round's number to its
      rate or `Phase`. None leaves the rate to `local_optimizer`.
    - `loss`: `loss(model, batch)` returns a scalar tensor. The default is cross-entropy.
    - `weight_decay`: this number times the parameters is added to every gradient of plain SGD,
      also of parameters that the loss does not use. It cannot be combined with `local_optimizer`,
      which does its own weight decay.
    - `local_optimizer`: a function from parameters to an optimizer, for local steps other than
      plain SGD. It is called for each client in its first round, and again if the client's
      optimizer has to be made anew (in a copy, for a loaded state, or after a difference that was
      not finite). With a schedule, the schedule sets the optimizer's learning rate. Then give the
      optimizer no rate, or the one with which the schedule begins. (Another one is refused, unless
      it is the default of the optimizer's class, which cannot be told from none.) To clip
      gradients, let this function call the optimizer's `register_step_pre_hook`.
    - `server_optimizer`: a function from parameters to an optimizer, for the server's step. The
      optimizer sees minus the average update as the gradient.
    - `weights`: the clients' weights in the average (see `Server`), also in the average of running
      statistics. Without it, all are equal.
    - `link`: how messages travel (see `Link`).
    - `seed`: for all masks that are drawn at random (such as those of rand-K), for the random
      numbers that clients draw in torch, and for the order of batches if `feed` is a list. Torch's
      own random state is restored after every round.
    - `trainer`: a function that is called with the arguments of `LocalTrainer` and returns one. A
      class derived from `LocalTrainer` can run the same local steps in another way.

    All parameters that are trained are averaged, including those of a head or of a normalization
    layer. If each client is to have a separate head, keep it outside the module that is given here,
    and let `loss` apply it (notebook 15 shows how). The weights of a batch norm inside the module
    are always averaged. Only its running statistics differ between clients; `evaluated` uses their
    average.

    Attributes

    - `theta_D` (D,): the parameters. `round` and `state_dict` first read them from the module, and
      `load_state_dict` writes them into it, so writing to `theta_D` itself has no effect. This and
      all other vectors (D,) have the trained parameters in the order of `model.parameters()`, each
      as it lies in memory. (The networks here have the memory format channels_last.) The shapes of
      a vector's parts are given by `federation.flat.views(theta_D)`, one view per parameter.
    - `statistics_NS` (N, S): one row per client with the running means and variances of all
      normalization layers. S is the number of entries of these.
    - `momentum_D` (D,): the server's momentum, or None if the scheme has no global momentum.
    - `compressor`: the `Compressor`. Its errors are in units of model differences or, with global
      momentum, of gradients. Its scheme has `momentum` 0 and `error_unit` "difference", because
      the Federation itself applies momentum and converts errors.
    - `active`: the clients whose messages were averaged in the last round.
    - `t`: the number of rounds begun.
    - `losses_N`: each client's sum of losses over local steps, including those of failed rounds,
      since you last called `losses_N.zero_()`. It is not saved.
    - `on_delta`: if you set it, `on_delta(n, delta_D)` is called with every difference before it is
      compressed. The next difference overwrites `delta_D`.

    Raises ValueError for a model, a feed or a combination of arguments that cannot be used.
    """

    def __init__(
        self, model: nn.Module, feed: Any, scheme: Scheme | str,
        schedule: float | Callable[[int], Phase | float] | None = None, *,
        loss: Callable[[nn.Module, Any], Tensor] = cross_entropy, weight_decay: float = 0.0,
        local_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        server_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        weights: Iterable[float] | None = None, link: Link | None = None, seed: int = 0,
        trainer: Callable[..., LocalTrainer] | None = None,
    ):  # fmt: skip
        if not isinstance(model, nn.Module):
            _refuse("model", model, "an nn.Module")
        if not callable(loss) or isinstance(loss, nn.modules.loss._Loss):
            way = "lambda model, batch: nn.CrossEntropyLoss()(model(batch[0]), batch[1])"
            _refuse("loss", loss, f"a function of the model and a batch, such as {way}")
        seed, weight_decay = _check_whole("seed", seed, 0, 2**64 - 1), _number(weight_decay)
        self.scheme, self._schedule = _scheme(scheme), schedule
        self.feed = feed if hasattr(feed, "batch") else Feed(feed, seed)
        if not hasattr(self.feed, "clients"):
            allowed = "a list of one iterable per client, or an object with `clients` and `batch`"
            raise ValueError(
                f"feed: got a {type(feed).__name__} without `clients`, allowed: {allowed}"
            )
        self.clients = _check_whole("feed: clients", self.feed.clients, 1, SERVER)
        _check_optimizers(self.scheme, schedule, weight_decay, local_optimizer, server_optimizer)
        self.trainer = (trainer or LocalTrainer)(
            model, self.feed, self.scheme, loss=loss, weight_decay=weight_decay,
            local_optimizer=local_optimizer, seed=seed)  # fmt: skip
        plain = dataclasses.replace(self.scheme, momentum=0.0, error_unit="difference")
        self.compressor = Compressor(
            plain, self.flat.layer_sizes, self.clients, device=self.flat.device, seed=seed,
            link=link, weights=weights, order=self.flat.order,
        )  # fmt: skip
        if local_optimizer is not None and schedule is not None:
            self.trainer.first_eta = float(self.schedule(0).eta)
        self.momentum_D = torch.zeros_like(self.theta_D) if self.scheme.momentum else None
        self.on_delta: Callable[[int, Tensor], None] | None = None
        self.active, self.t = list(range(self.clients)), 0
        self.is_whole = True  # False if the last part of a round was interrupted
        self._hidden_S: Tensor | None = None  # inside `evaluated`, the module's own statistics
        self.server_optimizer: torch.optim.Optimizer | None = None
        if server_optimizer is not None:
            self.server_theta = nn.Parameter(self.theta_D.clone())  # what it updates
            self._make_server_optimizer = server_optimizer
            self.server_optimizer = server_optimizer([self.server_theta])
            _check_made("server_optimizer", self.server_optimizer, [self.server_theta])
            decays = [group.get("weight_decay") for group in self.server_optimizer.param_groups]
            if weight_decay and any(decays):
                got = f"got {weight_decay}, and the server_optimizer has {decays[0]}"
                raise ValueError(f"weight_decay: {got}, allowed: one of the two")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the object after pickling or a deep copy. The optimizer is made anew, because a
        copy of it would be without its hooks. A copy that was made inside `evaluated` is outside of
        it, with the module's own statistics; its module is still in eval mode."""
        self.__dict__ |= state
        if self._hidden_S is not None:
            self.flat.put_statistics(self._hidden_S)
            self._hidden_S = None
        if self.server_optimizer is not None:
            copied = self._make_server_optimizer([self.server_theta])
            copied.load_state_dict(self.server_optimizer.state_dict())
            self.server_optimizer = copied

    # Attributes of the trainer.
    model = property(lambda self: self.trainer.model)
    flat = property(lambda self: self.trainer.flat)
    theta_D = property(lambda self: self.trainer.theta_D)
    statistics_NS = property(lambda self: self.trainer.statistics_NS)
    losses_N = property(lambda self: self.trainer.losses_N)

    def round(self, clients: Iterable[int] | None = None) -> Tensor:
        """Do one round and return the update (D,) that the server sent. All clients take part, or
        those whose numbers are given.

        The update is in units of model differences or, with global momentum, of gradients. Raises
        ValueError, before the round begins, for clients, a `Phase` or a changed module that cannot
        be used. After that, a round can fail, for instance if a gradient is NaN
        (NotFiniteError), a feed ends (ValueError) or the user presses Ctrl-C. The exception is
        passed on, with a note that names the round and the client. No client's message counts:
        theta, momentum, running statistics and masks stay the same. Errors keep the differences of
        the clients that had sent, so the next update can be about twice as large. `t`, the feed and
        the local optimizers have advanced. The optimizer of a client whose difference was not
        finite is discarded; a new one is made when this client trains next.

        If an exception comes at the end of the round, while theta is updated, `round`, `evaluated`,
        `averaged_state_dict` and `state_dict` raise ValueError until a state is loaded. During a
        round, for instance in `on_delta`, these and `load_state_dict` raise it, too.
        """
        chosen = self.compressor.check_clients(clients)
        self.check_usable("round")
        self._check_not_shown("round")
        self.compressor.check_usable(begins=True)
        self.trainer.read_module()
        phase, t = self.schedule(self.t), self.t
        if self.scheme.error_unit == "gradient" and phase.eta and self.momentum_D is None:
            # Errors are stored as model differences at the last rate that was not 0, and are now
            # converted to this rate. With momentum this is not needed: clients send gradients.
            rates = (self.schedule(before).eta for before in range(t - 1, -1, -1))
            before = next((eta for eta in rates if eta), 0.0)
            self.compressor.scale_errors_(phase.eta / before if before else 1.0)
        self.t += 1
        try:
            with self.trainer.lend_module():
                update_D = self.exchange(chosen, t, phase.eta, phase.dense, phase.mask_factor)
                self.is_whole = False  # until all below is done
                heard = list(self.compressor.traffic.heard)
                weights = self.compressor.server.weights
                average_S = self.trainer.average_statistics(heard, weights)
                self.move(update_D, phase.eta)
                self.trainer.left_S = average_S
        except BaseException as error:
            if isinstance(error, NotFiniteError):
                self.trainer.optimizers.pop(error.client, None)  # its moments are not finite either
            if "more than 1 value per channel" in str(error):  # torch's message for a batch norm
                error.add_note(
                    "a batch of one sample: DataLoader(drop_last=True) leaves out such a rest"
                )
            if not self.is_whole:
                error.add_note(f"round {t} is half done: load a state, or make a new Federation")
            raise
        self.active, self.is_whole = heard, True
        return update_D

    def schedule(self, t: int) -> Phase:
        """Return the `Phase` of round t. Raises ValueError for a field that `Phase` does not
        allow."""
        if self._schedule is None:
            return Phase(math.nan)  # the local optimizer keeps its own rate
        found = self._schedule(t) if callable(self._schedule) else self._schedule
        phase = found if isinstance(found, Phase) else Phase(found)
        eta = _number(phase.eta)
        if not isinstance(eta, Real) or not 0 <= cast(float, eta) < math.inf:
            allowed = "a learning rate >= 0, or a Phase with one"
            if hasattr(phase.eta, "get_last_lr"):  # torch's scheduler, which steps an optimizer
                allowed += ": give a function of the round, as lambda t: 0.1 * 0.5 ** (t // 50)"
            _refuse(f"schedule: round {t}", phase.eta, allowed)
        dense, factor = _check_flag(f"schedule: round {t}: dense", phase.dense), phase.mask_factor
        if self.scheme.warmup_masks != 1:  # otherwise it is ignored
            factor = _check_whole(f"schedule: round {t}: mask_factor", factor, 1, 1000)
        return Phase(cast(float, eta), dense, factor)

    def exchange(
        self, chosen: list[int], t: int | Tensor, eta: float | Tensor, dense: bool = False,
        mask_factor: int = 1,
    ) -> Tensor:  # fmt: skip
        """Let these clients train, send and receive in round t; return the update (D,).

        `round` calls this. It has to run inside `LocalTrainer.lend_module`. `eta` is the learning
        rate of the local steps. `t` and `eta` may be tensors with one number, so that a round can
        be captured as a CUDA graph. The other arguments are those of `Compressor.round`.
        """

        def difference(n: int) -> Tensor:
            delta_D = self.trainer.difference(n, t, eta)  # Alg. 2, line 7
            if self.on_delta is not None:
                self.compressor.known.require_finite(delta_D, n)
                self.on_delta(n, delta_D)
            return delta_D

        self.trainer.begin(chosen, t, eta)
        return self.compressor.round(difference, chosen, dense, self.trainer.theta_D, mask_factor)

    def move(self, update_D: Tensor, eta: float | Tensor) -> None:
        """Update theta and the module's parameters with the average update (D,), at the end of a
        round."""
        theta_D = self.trainer.theta_D
        if self.server_optimizer is not None:
            self.server_theta.data.copy_(theta_D)
            self.server_theta.grad = -update_D
            self.server_optimizer.step()
            theta_D.copy_(self.server_theta.detach())
        elif self.momentum_D is None:
            theta_D.add_(update_D)  # Alg. 2, line 6 of the next round
        else:
            self.momentum_D.mul_(self.scheme.momentum).add_(update_D)  # Alg. 3, line 7
            _descend(theta_D, self.momentum_D, eta, out=theta_D)  # Alg. 3, line 8
        self.trainer.put_theta()

    def _check_between_rounds(self, what: str) -> None:
        """Raise ValueError during a round, when the module is a client's."""
        if self.trainer.is_lent:
            got = f"got called during round {self.t - 1}"
            raise ValueError(f"{what}: {got}, allowed: between two rounds")

    def check_usable(self, what: str) -> None:
        """Raise ValueError during a round, and after an interrupted one."""
        self._check_between_rounds(what)
        if not self.is_whole:
            got = f"{what}: round {self.t - 1} was interrupted while theta moved, and is half done"
            raise ValueError(
                f"{got}, allowed: load_state_dict of a saved state, or a new Federation"
            )

    def _check_not_shown(self, what: str) -> None:
        """Raise ValueError inside of `evaluated`."""
        if self._hidden_S is not None:
            raise ValueError(f"{what}: got called inside `evaluated`, allowed: after its block")

    # Evaluation.

    @contextlib.contextmanager
    def evaluated(self, statistics_S: Tensor | None = None) -> Iterator[nn.Module]:
        """Provide the module in eval mode, with the parameters after the last round.

        Use it as `with fed.evaluated() as model`.

        Inside, normalization layers use the running statistics that the module has between two
        rounds. These are averages over the clients that were heard in the last round. To use
        others, give them as `statistics_S` (S,), such as a row of `statistics_NS`. Afterwards modes
        and statistics are restored. Inside, `round` and `load_state_dict` raise ValueError.
        """
        self.check_usable("evaluated")
        modules = list(self.model.modules())
        modes = [m.training for m in modules]
        buffers, before_S = self.flat.statistics_buffers(), self._hidden_S
        # In a block inside another one, the module's own statistics are hidden already.
        own_S = self.flat.statistics() if before_S is None else before_S
        if statistics_S is not None:
            check_same_state("statistics_S", statistics_S, own_S)
        shown_S = (own_S if statistics_S is None else statistics_S).clone()
        try:
            self._hidden_S = own_S
            self.flat.lend(list(shown_S.split(self.flat.norm_sizes)))
            self.model.eval()
            yield self.model
        finally:
            self.flat.lend(buffers)
            self._hidden_S = before_S
            _set_modes(modules, modes)

    def averaged_state_dict(self) -> dict[str, Any]:
        """Return a copy of the module's state, in which normalization layers have averaged running
        statistics. Save it for later use of the model."""
        self.check_usable("averaged_state_dict")
        buffers = self.flat.statistics_buffers()
        if self._hidden_S is not None:
            self.flat.lend(list(self._hidden_S.split(self.flat.norm_sizes)))
        try:
            with self.trainer.in_training_modes():
                return {key: _by_value(value) for key, value in self.model.state_dict().items()}
        finally:
            self.flat.lend(buffers)

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that a resumed run needs.

        This includes the position in the feed, the optimizers, and what you have changed in the
        module since the last round. It does not include buffers that are not persistent, nor the
        module's `get_extra_state`.
        """
        self.check_usable("state_dict")
        # Inside `evaluated`, the norms may use other statistics than the module's own.
        self.trainer.read_module(self._hidden_S)
        server = self.server_optimizer
        with self.trainer.in_training_modes():
            tensors = _by_value(self._tensors())
        others = {
            "version": STATE_VERSION,
            "scheme": scheme_state(self.scheme),
            "t": int(self.t),
            "active": self.active,
            "layers": self._layers(),
            "feed": self.feed.state_dict() if hasattr(self.feed, "state_dict") else None,
            "optimizers": {n: _optimizer_state(o) for n, o in self.trainer.optimizers.items()},
            "server_optimizer": None if server is None else _optimizer_state(server),
        }
        return tensors | _by_value(others) | {"compressor": self.compressor.state_dict()}

    def _layers(self) -> dict[str, list[int]]:
        """Return the shapes of the parameters that are trained, by name and in their order."""
        shapes = zip(self.flat.names, self.flat.shapes, strict=True)
        return {name.replace("_orig_mod.", ""): list(shape) for name, shape in shapes}

    def _check_layers(self, given: Any) -> None:
        """Raise ValueError, which names the first parameter that differs, for a state of another
        model."""
        if not isinstance(given, dict):
            _refuse("state: layers", given, "a dictionary of shapes by parameter")
        for got, allowed in zip_longest(given.items(), self._layers().items()):
            if got != allowed:
                way = "as in this federation's model, in the same order"
                raise ValueError(f"state: layers: got {got}, allowed: {allowed}, {way}")

    def _tensors(self) -> dict[str, Any]:
        """Return the parts of a state that have a fixed shape. Loading a state copies into them."""
        return {
            "theta_D": self.theta_D,
            "momentum_D": self.momentum_D,
            "statistics_NS": self.statistics_NS,
            "left_S": self.trainer.left_S,
            "buffers": self.flat.other_buffers(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into this object and the module, and continue where it was saved.

        Raises ValueError, with nothing changed, for a state of another scheme, seed, model or
        number of clients, and for one with other kinds of optimizers. The other arguments (`loss`,
        `schedule`, `weight_decay`, `weights`, `link`, the batches themselves) are not part of a
        state: give the same ones again.
        """
        self._check_between_rounds("load_state_dict")
        self._check_not_shown("load_state_dict")
        self.flat.check_unchanged()
        made = self._check_state(state)
        pairs = [(optimizer, state["optimizers"][n]) for n, optimizer in made.items()]
        if self.server_optimizer is not None:
            pairs.append((self.server_optimizer, state["server_optimizer"]))
        with contextlib.ExitStack() as undo:  # a user's feed or optimizer may still raise
            if state["feed"] is not None and hasattr(self.feed, "load_state_dict"):
                undo.callback(self.feed.load_state_dict, self.feed.state_dict())
                self.feed.load_state_dict(state["feed"])
            for optimizer, saved in pairs:
                undo.callback(optimizer.load_state_dict, optimizer.state_dict())
                # without a copy, the optimizer would share tensors with the state
                optimizer.load_state_dict(_by_value(saved["state"]))
            self.compressor.load_state_dict(state["compressor"])
            undo.pop_all()
        self.is_whole = False  # until all below is done
        self.trainer.optimizers = made
        with self.trainer.in_training_modes():
            self.trainer.load(state["theta_D"], state["statistics_NS"], state["left_S"])
            for name, buffer in self.flat.other_buffers().items():
                buffer.copy_(state["buffers"][name])
        if self.momentum_D is not None:
            self.momentum_D.copy_(state["momentum_D"])
        self.t, self.active = int(state["t"]), list(state["active"])
        self.is_whole = True

    def _check_state(self, state: dict[str, Any]) -> dict[int, torch.optim.Optimizer]:
        """Return the optimizers into which a state's clients' optimizers are to be loaded.

        An optimizer is made for each client that has none yet. Raises ValueError, with nothing
        changed, for a state that cannot be loaded here.
        """
        check_state_version("state", state)
        tensors = self._tensors()
        others = ("version", "scheme", "t", "active", "feed", "optimizers", "server_optimizer")
        keys = (*others, "layers", *tensors, "compressor")
        # States that were saved before they had layers can be loaded, too.
        check_same_state("state", dict.fromkeys(["layers", *state]), dict.fromkeys(keys))
        if "layers" in state:
            self._check_layers(state["layers"])
        check_same_scheme("state: scheme", state["scheme"], self.scheme)
        self.compressor.check_state(state["compressor"])  # first, as it compares numbers of clients
        for key, like in tensors.items():
            check_same_state(f"state: {key}", state[key], like)
        _check_whole("state: t", state["t"], 0, 2**63 - 1)
        active = state["active"]
        known = isinstance(active, list) and all(type(n) is int for n in active)
        if not known or not active or set(active) - set(range(self.clients)):
            _refuse("state: active", active, f"a list of clients, 0 to {self.clients - 1}")
        if hasattr(self.feed, "check_state"):
            self.feed.check_state(state["feed"])
        server = self.server_optimizer
        if (state["server_optimizer"] is not None) != (server is not None):
            got, allowed = ("one", "none") if server is None else ("none", "one")
            why = "as this federation has it"
            raise ValueError(f"state: server_optimizer: got {got}, allowed: {allowed}, {why}")
        if server is not None:
            _check_optimizer_state("state: server_optimizer", state["server_optimizer"], server)
        if not isinstance(state["optimizers"], dict):
            _refuse("state: optimizers", state["optimizers"], "a dictionary, by client")
        if state["optimizers"] and self.trainer.local_optimizer is None:
            raise ValueError("state: optimizers: got some, allowed: none without local_optimizer")
        made = dict(self.trainer.optimizers)
        for n, saved in state["optimizers"].items():
            if type(n) is not int or not 0 <= n < self.clients:
                _refuse("state: optimizers: client", n, f"0 to {self.clients - 1}")
            key = f"state: optimizer of client {n}"
            _check_optimizer_state(key, saved, self.trainer.optimizer_of(n, made))
        return {n: made[n] for n in state["optimizers"]}


class LocalTrainer:
    """Compute each client's model difference from theta (the paper's Algorithm 1, lines 3 to 6). A
    `Federation` makes one and calls its methods.

    Clients take turns on the module, which is used for training during a round and restored after
    it. All of them start from `theta_D` (D,). Each client has a row in `statistics_NS` with the
    running statistics of its normalization layers, a sum of losses in `losses_N` and, with
    `local_optimizer`, an optimizer. The arguments are those of `Federation`. A class derived from
    this one may train several clients at the same time: `begin` tells it which clients come next.
    """

    first_eta: float | None = None  # the first rate of a schedule that sets optimizers' rates
    is_lent = False  # whether the module is in a round, see `lend_module`

    def __init__(
        self, model: nn.Module, feed: Any, scheme: Scheme, *,
        loss: Callable[[nn.Module, Any], Tensor], weight_decay: float,
        local_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
        seed: int,
    ):  # fmt: skip
        self.feed, self.scheme, self.loss, self.weight_decay = feed, scheme, loss, weight_decay
        self.local_optimizer, self.seed = local_optimizer, seed
        self.optimizers: dict[int, torch.optim.Optimizer] = {}  # by client, from its first round on
        self._modes = _training_modes(model)
        self.use(model)
        self.theta_D = torch.empty_like(self.gradient_D)
        self.left_S = self.flat.statistics()  # the module's statistics between two rounds
        self.statistics_NS = self.left_S.repeat(feed.clients, 1)
        self.losses_N = torch.zeros(feed.clients, dtype=torch.float32, device=self.flat.device)
        self.make_views()
        with self.in_training_modes():
            self.flat.read_(self.theta_views)

    def use(self, model: nn.Module) -> None:
        """Train on this module from now on, and allocate memory for gradients.

        The constructor calls this, and then `make_views`. If you want to train on a copy of the
        module, copy the trainer, and call these two methods of the copy.
        """
        self.model, self.flat = model, FlatView(model)
        moves = self.scheme.local_steps > 1 or self.local_optimizer is not None
        kind: Any = {"dtype": torch.float32, "device": self.flat.device}
        self.gradient_D = torch.zeros(self.flat.dimension, **kind)  # sum of a client's gradients
        self.local_D = torch.empty(self.flat.dimension if moves else 0, **kind)  # its parameters

    def make_views(self) -> None:
        """Make views of the flat vectors in the parameters' shapes, and of each client's
        statistics. This is needed after `use`, and after any of these tensors was replaced."""
        self.theta_views: list[Tensor] = self.flat.views(self.theta_D)
        self.gradient_views = self.flat.views(self.gradient_D)
        self.local_views = self.flat.views(self.local_D) if len(self.local_D) else []
        rows = [row.split(self.flat.norm_sizes) for row in self.statistics_NS]
        # `data` gives each view a version counter of its own. Otherwise autograd would refuse a
        # backward pass because another norm's statistics have changed.
        self.statistics_views = [[part.data for part in row] for row in rows]

    def begin(self, chosen: list[int], t: int | Tensor, eta: float | Tensor) -> None:
        """Prepare for round t, in which `difference` will be called for these clients, in this
        order.

        Here nothing is done, since each difference is computed when it is asked for.
        """

    def difference(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Return client n's model difference in round t (Eq. 3) or, with global momentum, the sum
        of its gradients. Both have the shape (D,).

        The next call overwrites the vector that is returned.
        """
        if self.local_optimizer is not None:
            return self._train_with_optimizer(n, t, eta)
        gradient_D = self.local_training(n, t, eta)
        return gradient_D if self.scheme.momentum else gradient_D.mul_(-eta)

    def local_training(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Do client n's H local steps from theta (Alg. 1, lines 3 to 6); return the sum of its
        gradients, (D,).

        Each gradient includes weight decay. Only this sum is stored: with plain SGD the client's
        parameters are always theta minus eta times the sum so far.
        """
        steps, decay = self.scheme.local_steps, self.weight_decay
        gradient_D = torch.mul(self.theta_D, decay, out=self.gradient_D)
        try:
            for tau in self._steps(n, t):
                self.flat.add_gradients_(self.gradient_views)
                if tau + 1 < steps:
                    _descend(self.theta_D, gradient_D, eta, out=self.local_D)  # Alg. 1, line 6
                    self.flat.put(self.local_views)
                    gradient_D.add_(self.local_D, alpha=decay)
        finally:
            if steps > 1:
                self.put_theta()
        return gradient_D

    def _train_with_optimizer(self, n: int, t: int | Tensor, eta: float | Tensor) -> Tensor:
        """Do the local steps with the client's optimizer; return its parameters minus theta,
        (D,)."""
        optimizer = self.optimizer_of(n, self.optimizers)
        if not math.isnan(eta):  # NaN: there is no schedule
            rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
            if len(rates) > 1:
                got = f"got learning rates {', '.join(f'{rate:g}' for rate in rates)}"
                way = "one, which the schedule sets (schedule=None keeps the optimizer's own)"
                raise ValueError(f"local_optimizer: {got}, allowed: {way}")
            for group in optimizer.param_groups:
                group["lr"] = eta
        try:
            for _ in self._steps(n, t):
                optimizer.step()
                torch.clear_autocast_cache()  # of the parameters before the step
                for p in self.flat.parameters:  # also those that are not the optimizer's
                    p.grad = None
            self.flat.read_(self.local_views)
        finally:
            self.put_theta()
        return torch.sub(self.local_D, self.theta_D, out=self.gradient_D)

    def optimizer_of(
        self, n: int, made: dict[int, torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:  # fmt: skip
        """Return client n's optimizer. If it has none yet, make one with `local_optimizer`.

        `made` is a dictionary from clients to the optimizers that exist so far; a new one is added
        to it. In training, this is the attribute `optimizers`. When a state is checked before it is
        loaded, it is a copy of the attribute, which therefore does not change.

        Raises ValueError if `local_optimizer` returns something else than an optimizer of the
        module's parameters, returns an optimizer that is in `made` already, or has given it another
        learning rate than the schedule's first.
        """
        if n not in made:
            found = cast(Any, self.local_optimizer)(self.flat.parameters)
            _check_made("local_optimizer", found, self.flat.parameters)
            if any(found is other for other in made.values()):
                raise ValueError(
                    "local_optimizer: gave one optimizer twice, allowed: a new one per call"
                )
            if self.first_eta is not None:
                _check_rate(found, self.first_eta)
            made[n] = found
        else:  # a copied trainer has another module, but its original's optimizers
            _check_made("local_optimizer", made[n], self.flat.parameters)
        return made[n]

    def _steps(self, n: int, t: int | Tensor) -> Iterator[int]:
        """Do client n's H backward passes (Alg. 1, line 5). After each, its gradients are in the
        parameters' `grad`."""
        self.flat.lend(self.statistics_views[n])
        if isinstance(t, int):  # seeds the random numbers that this client draws from here on
            seed = random_seed(self.seed, t, n)
            torch.default_generator.manual_seed(seed)
            if self.flat.device.type == "cuda":
                with torch.cuda.device(self.flat.device):  # manual_seed means the current GPU
                    torch.cuda.manual_seed(seed)
        for tau in range(self.scheme.local_steps):
            versions = [p._version for p in self.flat.parameters]
            batch = self.feed.batch(n, t, tau)
            try:
                loss = self.loss(self.model, batch)
            except TypeError as error:
                error.add_note("the loss is called as loss(model, batch) with a batch of the feed")
                raise
            if not isinstance(loss, Tensor) or loss.dim():
                kind = type(loss).__name__
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {kind}"
                raise ValueError(f"loss: got {got}, allowed: a scalar tensor")
            if not loss.requires_grad:
                way = "computed from the module, and not under torch.no_grad"
                raise ValueError(f"loss: got one without a gradient, allowed: one that is {way}")
            loss.backward()
            self._check_step(versions)
            buffers = self.flat.statistics_buffers()
            for view, buffer in zip(self.statistics_views[n], buffers, strict=True):
                if buffer is not view:  # a norm that has assigned a new tensor
                    view.copy_(buffer)
                    self.flat.lend(self.statistics_views[n])
            self.losses_N[n].add_(loss.detach())
            yield tau

    def _check_step(self, versions: list[int]) -> None:
        """Raise ValueError after a backward pass that left no gradient or, with plain SGD, a
        forward pass that changed parameters."""
        if all(p.grad is None for p in self.flat.parameters):
            what = "got one after whose backward() no trained parameter has a gradient"
            way = "a loss that is computed from the module that the function is called with"
            raise ValueError(f"loss: {what}, allowed: {way}")
        if self.local_optimizer is not None:
            return
        for name, p, version in zip(self.flat.names, self.flat.parameters, versions, strict=True):
            if p._version != version:
                what = f"{name}: changes in the forward pass"  # an embedding with max_norm
                way = "with local_optimizer=torch.optim.SGD, which goes on from there"
                raise ValueError(f"model: {what}, allowed: {way}")

    # The module during a round.

    def read_module(self, own_S: Tensor | None = None) -> None:
        """Read theta and running statistics from the module, which may have been loaded into it
        since the last round. `own_S` are its statistics, (S,), if it has others at the moment.

        Raises ValueError, with nothing changed, if the module now trains other parameters.
        """
        self.flat.check_unchanged()
        now_S = self.flat.statistics() if own_S is None else own_S.clone()
        check_same_state("model: statistics of its norms", now_S, self.left_S)
        with self.in_training_modes():
            self.flat.read_(self.theta_views)
        changed = (now_S != self.left_S).any()  # loaded, or trained elsewhere
        if is_on_cpu(changed) and not changed:
            return  # on a GPU, `where` decides below without making the host wait
        self.statistics_NS.copy_(torch.where(changed, now_S, self.statistics_NS))
        self.left_S = now_S

    def put_theta(self) -> None:
        """Copy theta into the module's parameters."""
        self.flat.put(self.theta_views)

    @contextlib.contextmanager
    def in_training_modes(self) -> Iterator[None]:
        """Put all modules into the modes that they have in training, and restore their modes
        afterwards.

        Parameters are read and written only there, because in eval mode a module may hold other
        values in them, such as weights with adapters merged in.
        """
        modules = list(self.model.modules())
        modes = [m.training for m in modules]
        # A module that is in training mode shows the modes that its owner wants in training.
        if self.model.training or len(self._modes) != len(modes):
            self._modes = _training_modes(self.model)
        try:
            if modes != self._modes:
                _set_modes(modules, self._modes)
            yield
        finally:
            _set_modes(modules, modes)

    @contextlib.contextmanager
    def lend_module(self) -> Iterator[None]:
        """Put the module into training mode for a round, and restore it afterwards. This is a
        context manager; `Federation.round` does the round inside of it.

        After the round, the module gets its earlier modes and gradients back. It also gets the
        running statistics in the attribute `left_S` (S,). At the end of a successful round,
        `Federation.round` has stored the clients' average there. Otherwise, `left_S` still has the
        statistics from before the round. If anything is raised, theta is copied into the module,
        and the clients' statistics are restored, too. Torch's random state is restored in any case.
        """
        buffers, gradients = self.flat.statistics_buffers(), [p.grad for p in self.flat.parameters]
        devices = [self.flat.device] if self.flat.device.type == "cuda" else []
        before_NS, was_training = self.statistics_NS.clone(), self.model.training
        with self.in_training_modes():
            self.is_lent = True
            try:
                if not was_training:
                    self.put_theta()  # merging and splitting weights would leave rounding errors
                for p in self.flat.parameters:
                    p.grad = None
                with torch.random.fork_rng(devices):  # restores torch's generators after the round
                    yield
            except BaseException:
                self.statistics_NS.copy_(before_NS)
                self.put_theta()
                raise
            finally:
                self.is_lent = False
                self.flat.lend(buffers)
                self.flat.put_statistics(self.left_S)
                self.left_S = self.flat.statistics()
                for p, gradient in zip(self.flat.parameters, gradients, strict=True):
                    p.grad = gradient

    def average_statistics(self, clients: list[int], weights: list[float] | None) -> Tensor:
        """Return the average of these clients' running statistics by their weights, (S,)."""
        rows_NS = self.statistics_NS[clients]
        if weights is None:
            return rows_NS.mean(0)
        shares = [weights[n] for n in clients]
        weights_N = torch.tensor(shares, dtype=torch.float32, device=rows_NS.device)
        with torch.autocast(rows_NS.device.type, enabled=False):  # which would take 16 bits
            return (weights_N / weights_N.sum()) @ rows_NS

    def load(self, theta_D: Tensor, statistics_NS: Tensor, left_S: Tensor) -> None:
        """Load theta and statistics from a saved state, also into the module, which is in its
        training modes."""
        self.theta_D.copy_(theta_D)
        self.put_theta()
        self.statistics_NS.copy_(statistics_NS)
        self.flat.put_statistics(left_S)
        self.left_S = self.flat.statistics()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the object after pickling or a deep copy, where each tensor received separate
        memory. Optimizers are made anew, because copies of them would be without their hooks."""
        self.__dict__ |= state
        self.make_views()
        copied, self.optimizers = self.optimizers, {}
        for n, optimizer in copied.items():
            self.optimizer_of(n, self.optimizers).load_state_dict(optimizer.state_dict())


def random_seed(*numbers: int) -> int:
    """Return one seed that depends on all of these numbers."""
    return zlib.crc32(repr(numbers).encode()) | zlib.crc32(repr(numbers[::-1]).encode()) << 32


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"kind": type(optimizer).__name__, "state": optimizer.state_dict()}


def _check_optimizer_state(key: str, saved: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a state of another kind of optimizer, or of other parameters."""
    like, kind = optimizer.state_dict(), type(optimizer).__name__
    parts: Any = saved.get("state") if isinstance(saved, dict) else None
    whole = isinstance(parts, dict) and saved.keys() == {"kind", "state"}
    if not whole or parts.keys() != like.keys():
        _refuse(key, saved, "the kind and the state of an optimizer, as state_dict gives them")
    if saved["kind"] != kind:
        raise ValueError(f"{key}: got one of {saved['kind']}, allowed: {kind}")
    groups, entries, sizes = parts["param_groups"], parts["state"], list[int]()
    if not isinstance(groups, list) or not isinstance(entries, dict):
        _refuse(key, parts, "a list of groups, and a dictionary by parameter")
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            _refuse(f"{key}: group", group, "a dictionary with a list of `params`")
        sizes.append(len(group["params"]))
    wanted = [len(group["params"]) for group in like["param_groups"]]
    if sizes != wanted:
        raise ValueError(f"{key}: got groups of {sizes} parameters, allowed: {wanted}")
    for group, of_own in zip(groups, like["param_groups"], strict=True):
        for name, value in of_own.items():
            kinds = {int: Real | Tensor, float: Real | Tensor, tuple: tuple | list}.get(type(value))
            if kinds and not isinstance(group.get(name), kinds):  # other types are not compared
                _refuse(f"{key}: {name}", group.get(name), f"such as {value!r}")
    for place, given in entries.items():
        if place not in range(sum(wanted)) or not isinstance(given, dict):
            allowed = f"a dictionary for each of the parameters 0 to {sum(wanted) - 1}"
            _refuse(f"{key}: parameter {place}", given, allowed)
        if place in like["state"]:
            check_same_state(f"{key}: parameter {place}", given, like["state"][place])


def _training_modes(model: nn.Module) -> list[bool]:
    """Return the modes of all modules in training, where a module may keep parts in eval mode."""
    modules = list(model.modules())
    modes = now = [module.training for module in modules]
    if not model.training:
        model.train()
        modes = [module.training for module in modules]
        _set_modes(modules, now)
    return modes


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    """Set the mode of each module; the first one contains the others."""
    if modules[0].training != modes[0]:
        modules[0].train(modes[0])  # a module may do more there, such as split its weights
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            module.training = mode


def _check_optimizers(
    scheme: Scheme, schedule: Any, weight_decay: float, local: Any, server: Any
) -> None:
    """Raise ValueError for settings that contradict each other or have no meaning."""
    for key, given in (("local_optimizer", local), ("server_optimizer", server)):
        if given is not None and not callable(given):
            allowed = "a function from parameters to an optimizer, such as its class"
            raise ValueError(f"{key}: got a {type(given).__name__}, allowed: {allowed}")
    if not isinstance(weight_decay, Real) or not 0 <= weight_decay < math.inf:
        _refuse("weight_decay", weight_decay, "a number >= 0")
    if local is None and schedule is None:
        allowed = "a learning rate, a function of the round, or None beside a local_optimizer"
        raise ValueError(f"schedule: got None, allowed: {allowed}")
    if local is not None and weight_decay:
        way = "0 beside a local_optimizer, which is given its decay itself"
        raise ValueError(f"weight_decay: got {weight_decay}, allowed: {way}")
    for key, given in (("local_optimizer", local), ("server_optimizer", server)):
        if given is not None and (scheme.momentum or scheme.error_unit == "gradient"):
            what = "allowed: with neither global momentum nor errors in units of gradients"
            raise ValueError(f"{key}: got one with {scheme.name}, {what}")


def _check_made(key: str, made: Any, given: list[nn.Parameter]) -> None:
    """Raise ValueError unless `made` is an optimizer of at least one of the given parameters."""
    allowed = "an optimizer of the parameters that it is called with"
    if not hasattr(made, "param_groups"):
        raise ValueError(f"{key}: gave a {type(made).__name__}, allowed: {allowed}")
    steps = {id(p) for group in made.param_groups for p in group["params"]}
    if steps.isdisjoint(map(id, given)):
        raise ValueError(f"{key}: gave an optimizer of other parameters, allowed: {allowed}")


def _check_rate(optimizer: torch.optim.Optimizer, first_eta: float) -> None:
    """Raise ValueError if the optimizer was given another rate than the schedule begins with, or
    has none."""
    if any("lr" not in group for group in optimizer.param_groups):
        way = "one that has a learning rate, or schedule=None"
        raise ValueError(f"local_optimizer: got one without `lr` beside a schedule, allowed: {way}")
    given, *others = {float(group["lr"]) for group in optimizer.param_groups}
    parameter = inspect.signature(type(optimizer)).parameters.get("lr")
    usual = None if parameter is None else parameter.default  # not a number if it is required
    is_given = not others and isinstance(usual, Real) and given != usual
    if is_given and not math.isclose(given, first_eta, rel_tol=1e-6):
        got = f"got the learning rate {given:g} beside a schedule that begins with {first_eta:g}"
        way = "no rate in the optimizer, or schedule=None, which keeps the optimizer's own"
        raise ValueError(f"local_optimizer: {got}, allowed: {way}")


def _descend(start_D: Tensor, gradient_D: Tensor, eta: float | Tensor, out: Tensor) -> None:
    """Write start - eta * gradient into `out`.

    The rate and the number of a round are tensors where a whole round is recorded as a CUDA graph
    (tcs_lab.training.cuda_graph).
    """
    if isinstance(eta, Tensor):
        torch.addcmul(start_D, gradient_D, eta, value=-1.0, out=out)
    else:
        torch.add(start_D, gradient_D, alpha=-eta, out=out)


class FlatView:
    """A module's trained parameters, and its norms' running statistics, as flat vectors.

    The entries of a flat vector (D,) stand in the order in which the parameters lie in memory.
    Raises ValueError for a module that cannot be trained in this way.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        named = trained_parameters(model)
        for name, p in model.named_parameters():
            if p.requires_grad and p.dtype != torch.float32:
                way = "keep parameters in float32 and use autocast in the loss"
                raise ValueError(f"model: {name}: got {p.dtype}, allowed: torch.float32 ({way})")
        if not named:
            raise ValueError(
                "model: got no parameter that is trained, allowed: one or more (p.requires_grad_())"
            )
        self.names, self.parameters = list(named), list(named.values())
        _check_memory(named)
        for name, m in model.named_modules():
            scripted = isinstance(m, torch.jit.ScriptModule)
            if scripted and getattr(m, "running_mean", None) is not None:
                what = "got a scripted norm with running statistics"
                raise ValueError(f"model: {name}: {what}, allowed: one that is not scripted")
        self.shapes = [p.shape for p in self.parameters]
        self.device = self.parameters[0].device
        devices = sorted({str(p.device) for p in self.parameters})
        if len(devices) > 1:
            raise ValueError(f"model: got parameters on {', '.join(devices)}, allowed: one device")
        self.kinds = [(p.shape, p.stride(), p.dtype, p.device) for p in self.parameters]
        self.order = tuple(layout_of(p) for p in self.parameters)
        self.layer_sizes = [p.numel() for p in self.parameters]
        self.dimension = sum(self.layer_sizes)
        self.norms = _norms(model)
        for name, m in model.named_modules():
            if m in self.norms:
                _check_norm(f"model: {name or type(m).__name__}", m)
        self.norm_sizes = [m.num_features for m in self.norms for _ in range(2)]

    def views(self, flat_D: Tensor) -> list[Tensor]:
        """Return views of a vector (D,) in the parameters' shapes, which share its memory."""
        views = []
        parts = flat_D.split(self.layer_sizes)
        for part, shape, order in zip(parts, self.shapes, self.order, strict=True):
            dimensions = _all_of(order, len(shape))
            inside = part.view([shape[d] for d in dimensions])
            back = sorted(range(len(shape)), key=dimensions.__getitem__)
            views.append(inside.permute(back))
        return views

    @torch.no_grad()
    def read_(self, views: list[Tensor]) -> None:
        """Copy the module's parameters into views that `views` has made."""
        torch._foreach_copy_(views, [*self.parameters])

    @torch.no_grad()
    def put(self, views: list[Tensor]) -> None:
        """Copy views that `views` has made into the module's parameters."""
        torch._foreach_copy_([*self.parameters], views)
        torch.clear_autocast_cache()  # it may hold casts of the old parameters

    @torch.no_grad()
    def add_gradients_(self, views: list[Tensor]) -> None:
        """Add the parameters' gradients to views that `views` has made, and set the gradients to
        None.

        A parameter that was not used in the forward pass has no gradient and is skipped.
        """
        used, gradients = [], []
        for view, p in zip(views, self.parameters, strict=True):
            if p.grad is not None:
                used.append(view)
                gradients.append(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        if gradients:
            torch._foreach_add_(used, gradients)
        for p in self.parameters:
            p.grad = None

    def check_unchanged(self) -> None:
        """Raise ValueError unless the module trains the same parameters and has the same norms as
        before.

        "Before" means when this object was made. Shapes, strides, types and devices are compared,
        too. The error names the parameter that differs.
        """
        now = [*trained_parameters(self.model).values(), *_norms(self.model)]
        same = list(map(id, now)) == list(map(id, [*self.parameters, *self.norms]))
        kinds = [(p.shape, p.stride(), p.dtype, p.device) for p in self.parameters]
        if same and kinds == self.kinds:
            return
        name, got, allowed = self._change()
        way = "to continue with other parameters, make a new Federation of the module"
        raise ValueError(f"model: {name}: got {got}, allowed: {allowed}, as at the start ({way})")

    def _change(self) -> tuple[str, str, str]:
        """Return the name of the first parameter or norm that has changed, what it is now, and what
        it was."""
        now = dict(self.model.named_parameters())
        for name, old, kind in zip(self.names, self.parameters, self.kinds, strict=True):
            p, (shape, stride, dtype, device) = now.pop(name, None), kind
            if p is None:
                return name, "no parameter of this name", "one that is trained"
            if p.dtype != dtype:
                return name, f"{p.dtype}", f"{dtype}"
            if p.device != device:
                return name, f"one on {p.device}", f"{device}"
            if (p.shape, p.stride()) != (shape, stride):
                got = f"shape {tuple(p.shape)} and strides {p.stride()}"
                return name, got, f"{tuple(shape)} and {stride}"
            if p is not old:
                return name, "another tensor", "the same one"
            if not p.requires_grad:
                return name, "one that is frozen", "one that is trained"
        for name, p in now.items():
            if p.requires_grad and p.numel():
                return name, "one that is trained", "one that is not"
        names = {m: name for name, m in self.model.named_modules()}
        for new, old in zip_longest(_norms(self.model), self.norms):
            if new is not old:
                name = names.get(new, names.get(old, "norms"))
                return name, "another norm with running statistics", "the norms"
        return ", ".join(self.names), "another order of parameters", "the order"

    # Running statistics: mean and variance of every norm in turn, (S,).

    def statistics(self) -> Tensor:
        """Return a copy of the statistics that the module has now, (S,)."""
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        return torch.cat([empty, *self.statistics_buffers()])

    def statistics_buffers(self) -> list[Tensor]:
        """Return the running mean and the running variance of every norm, in turn."""
        buffers = list[Tensor]()
        for norm in self.norms:
            buffers += [norm._buffers["running_mean"], norm._buffers["running_var"]]
        return buffers

    def put_statistics(self, statistics_S: Tensor) -> None:
        """Copy statistics (S,) into the tensors that the norms use now."""
        if buffers := self.statistics_buffers():
            parts = statistics_S.to(self.device).split(self.norm_sizes)
            torch._foreach_copy_(buffers, list(parts))

    def lend(self, views: list[Tensor]) -> None:
        """Let the norms use these tensors as their running statistics from now on."""
        pairs = iter(views)
        # Module.__setattr__ would take a tenth of the time of a small net's forward pass
        for norm in self.norms:
            norm._buffers["running_mean"] = next(pairs)
            norm._buffers["running_var"] = next(pairs)

    def other_buffers(self) -> dict[str, Tensor]:
        """Return the rest of the module's state, without copies: all but theta and statistics.

        Clients share it. It includes frozen parameters.
        """
        others = {id(b) for b in [*self.statistics_buffers(), *self.parameters]}
        state = self.model.state_dict(keep_vars=True)
        return {
            name.replace("_orig_mod.", ""): b.detach()  # a prefix that torch.compile adds
            for name, b in state.items()
            if isinstance(b, Tensor)
            and id(b) not in others
            and name.rpartition(".")[2] != "_extra_state"
        }


def _check_norm(key: str, norm: Any) -> None:
    """Raise ValueError, which begins with `key`, for a norm whose running statistics cannot be
    averaged."""
    if norm.momentum is None:
        raise ValueError(f"{key}: momentum of a norm: got None, allowed: a number, as 0.1")
    if nn.parameter.is_lazy(norm.running_mean):
        way = "after one batch has passed through the model, which gives it its shape"
        raise ValueError(f"{key}: got a norm without a shape, allowed: {way}")
    for statistic in (norm.running_mean, norm.running_var):
        if statistic.dtype != torch.float32:
            got = f"running statistics of a norm: got {statistic.dtype}"
            way = "torch.float32 (keep norms in float32, also frozen ones, and use autocast)"
            raise ValueError(f"{key}: {got}, allowed: {way}")


def _norms(model: nn.Module) -> list[Any]:
    """Return a module's norms with running statistics."""
    kind = nn.modules.batchnorm._NormBase  # batch norms and others that keep running statistics
    found = (m for m in model.modules() if isinstance(m, kind))
    return [m for m in found if m._buffers.get("running_mean") is not None]


def _check_memory(named: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if an entry of these parameters has the memory of another one."""
    owners: dict[int, dict[str, nn.Parameter]] = {}  # by storage
    for name, p in named.items():
        owners.setdefault(p.untyped_storage()._cdata, {})[name] = p
        if any(step == 0 for step, d in zip(p.stride(), p.shape, strict=True) if d > 1):
            what = "got one whose entries share memory, allowed: each its own (p.clone())"
            raise ValueError(f"model: {name}: {what}")
    for parts in owners.values():
        if len(parts) == 1:
            continue
        names, some = list(parts), next(iter(parts.values()))
        size = some.untyped_storage().nbytes() // some.element_size()
        taken = torch.full((size,), -1, dtype=torch.int32, device="cpu")  # by which of the names
        for place, (name, p) in enumerate(parts.items()):
            part = taken.as_strided(p.shape, p.stride(), p.storage_offset())
            if (other := int(part.max())) >= 0:
                got = f"model: {name}: got the memory of {names[other]}"
                raise ValueError(f"{got}, allowed: its own (tie the nn.Parameter itself)")
            part.fill_(place)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, each once. Frozen and empty ones are left
    out.

    Raises ValueError for a parameter whose shape is not known yet, as in nn.LazyLinear.
    """
    named = list(model.named_parameters())
    for name, p in named:
        if nn.parameter.is_lazy(p):
            way = "after one batch has passed through the model, which gives it its shape"
            raise ValueError(f"model: {name}: got a parameter without a shape, allowed: {way}")
    return {name: p for name, p in named if p.requires_grad and p.numel()}


def layer_sizes(model: nn.Module) -> list[int]:
    """Return the numbers of entries of the parameters that are trained."""
    return [p.numel() for p in trained_parameters(model).values()]


def parameters_to_vector(model: nn.Module) -> Tensor:
    """Return a copy of the parameters that are trained as one vector (D,) float32.

    They stand there in the order of `Federation.theta_D` and of `layer_sizes`, each as it lies in
    memory. (The function of this name in torch includes frozen parameters, and refuses those with
    the memory format channels_last.) The model difference of a `Client` is this vector after local
    training minus the one before. Running statistics of norms are not part of it. Raises ValueError
    for a module that a `Federation` could not train.
    """
    flat = FlatView(model)
    vector_D = torch.empty(flat.dimension, dtype=torch.float32, device=flat.device)
    flat.read_(flat.views(vector_D))
    return vector_D


def vector_to_parameters(vector_D: Tensor, model: nn.Module) -> None:
    """Copy a vector (D,), as `parameters_to_vector` returns it, into the module's parameters.

    Raises ValueError, with nothing changed, for another shape or type.
    """
    flat = FlatView(model)
    like = torch.empty(1, dtype=torch.float32, device="cpu").expand(flat.dimension)
    check_same_state("vector_D", vector_D, like)
    flat.put(flat.views(vector_D.detach().contiguous()))


def layout_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's dimensions in the order in which they lie in memory, outermost first.

    Dimensions with a single entry are left out. For a tensor with gaps, or with entries that share
    memory, this is the order of its dimensions: (0, 1, 2, ...).
    """
    long = [d for d in range(parameter.dim()) if parameter.shape[d] > 1]
    order = sorted(long, key=parameter.stride, reverse=True)
    if not parameter.permute(_all_of(order, parameter.dim())).is_contiguous():
        return tuple(long)
    return tuple(order)


def _all_of(order: Iterable[int], dimensions: int) -> list[int]:
    """Return all dimensions: those that are missing in `order` first, then `order`."""
    order = list(order)
    return [d for d in range(dimensions) if d not in order] + order


class Feed:
    """Batches from one iterable per client, such as a DataLoader. An iterable that ends is started
    again.

    At the beginning of every pass over a client's iterable, `set_epoch` is called with the number
    of the pass, counted from 0, on everything that has such a method: the iterable, its data set,
    its samplers, and the objects that these contain. If several clients share one of these, such as
    a data set of which each has a part, it is called again whenever the next batch belongs to
    another pass than the last one. At the beginning of a pass, torch's random numbers are seeded
    from (seed, client, pass), so that a loader shuffles in the same way again when a run is
    resumed. The `generator` of the loader and those of its samplers and data sets are seeded, too.
    Once the pass has begun, torch's global random state is restored, but not these generators. Some
    random numbers are not repeated after a resume: those that are drawn later in a pass, such as
    for a shuffle buffer, and those that numpy or Python's `random` draw.

    Your own feed class needs `clients`, the number of clients, and `batch(n, round, tau)`. It may
    have `state_dict`, `check_state` and `load_state_dict`, for states of a `Federation`.

    Raises ValueError for anything but a list of iterables, for an iterator that two clients share,
    and for loaders with more than 16 workers in all. To allow more, set the class attribute
    `Feed.most_workers` before you make a feed. A loader with persistent workers is refused if two
    clients share it, or if its data set has `set_epoch`. (These workers have their own copies of
    the data set, on which `set_epoch` is not called. If the data set has a tensor or a value in
    shared memory, where it can store the number, the loader is accepted.)
    """

    # for all loaders together: each worker is a process that keeps files open during the training
    most_workers = 16

    def __init__(self, sources: Iterable[Iterable[Any]], seed: int = 0):
        seed = _check_whole("seed", seed, 0, 2**64 - 1)
        if not isinstance(sources, list | tuple):
            got = type(sources).__name__
            raise ValueError(f"feed: got a {got}, allowed: a list of one iterable per client")
        if not sources:
            raise ValueError("feed: got an empty list, allowed: one iterable per client")
        workers = sum(getattr(source, "num_workers", 0) for source in sources)
        if workers > self.most_workers:
            got = f"got loaders with {workers} workers in all, which would all be open at once"
            way = f"at most {self.most_workers} (num_workers=0 loads in this process)"
            raise ValueError(f"feed: {got}, allowed: {way}, or set Feed.most_workers")
        for n, source in enumerate(sources):
            if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
                raise ValueError(
                    f"feed: client {n}: got {shorten(source)}, allowed: an iterable of batches"
                )
            one_pass = isinstance(source, Iterator) or getattr(source, "persistent_workers", False)
            if one_pass and any(source is other for other in sources[:n]):
                what = "iterator" if isinstance(source, Iterator) else "persistent loader"
                raise ValueError(f"feed: client {n}: got another's {what}, allowed: its own")
            if getattr(source, "persistent_workers", False):
                _check_workers_hear(n, source)
        self.sources, self.seed = list(sources), seed
        self.clients = len(self.sources)
        self.passes = [0] * self.clients  # how many passes each client has begun
        self.given = [0] * self.clients  # how many batches of its current pass it has received
        self._running: list[Iterator[Any] | None] = [None] * self.clients
        hearing = [
            [part for part in _parts_of(source) if callable(getattr(part, "set_epoch", None))]
            for source in self.sources
        ]
        owners = Counter(id(part) for parts in hearing for part in parts)
        self._shared = [[part for part in parts if owners[id(part)] > 1] for parts in hearing]
        self._told: dict[int, int] = {}  # the last number of a pass, by id of a shared part

    def batch(self, n: int, round: Any, tau: int) -> Any:
        """Return client n's next batch. It is meant for local step `tau` of round `round`; both are
        counted from 0, and a `Feed` uses neither of them to choose the batch.

        Raises ValueError if the client's iterable gives no batch. If the iterable raises, the next
        call begins its pass again and skips the batches that were given, as after a resume. (So a
        batch that always fails stops the client. An iterator cannot begin again, and goes on.)
        """
        running = self._running[n]
        if running is None and self.given[n]:  # a loaded state continues in the middle of a pass
            running = self._begin_pass(n, self.passes[n], skip=self.given[n])
        if running is not None:
            self._tell_epoch(self._shared[n], self.passes[n] - 1)
        try:
            batch = _END if running is None else next(running, _END)
        except BaseException:
            if not isinstance(self.sources[n], Iterator):
                self._running[n] = None  # begin this pass again, and skip what was given
            raise
        if batch is _END:
            batch = next(self._begin_pass(n, self.passes[n] + 1), _END)
        if batch is _END:
            what = "its iterable has ended, or is empty"
            if getattr(self.sources[n], "drop_last", False):
                what += (
                    " (drop_last leaves out a batch that is not full: take a smaller batch_size)"
                )
            raise ValueError(f"feed: client {n} has no batch for step {tau + 1}: {what}")
        self.given[n] += 1
        return batch

    def _begin_pass(self, n: int, number: int, skip: int = 0) -> Iterator[Any]:
        """Begin client n's pass of this number, counted from 1, and skip the first `skip` batches.
        If the iterable raises, nothing is changed."""
        # The 1 keeps this seed apart from that of a client's round of the same number (`_steps`).
        source, seed = self.sources[n], random_seed(self.seed, number, n, 1)
        parts = _parts_of(source)
        self._told.clear()  # so that all of them are told
        self._tell_epoch(parts, number - 1)
        with torch.random.fork_rng(devices=[]):
            if self._running[n] is None and getattr(source, "persistent_workers", False):
                iter(source)  # the first iterator of such a loader draws one number more
            torch.default_generator.manual_seed(seed)
            for part in parts:
                if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                    generator.manual_seed(seed)
            running = iter(source)
            first = next(running, _END)  # now the loader draws its order, with the seed from above
            running = chain([first], running)
            for _ in range(skip):
                next(running, _END)
        self._running[n], self.passes[n], self.given[n] = running, number, skip
        return running

    def _tell_epoch(self, parts: list[Any], number: int) -> None:
        """Call `set_epoch` with the number of a pass on those parts that have it, unless this was
        their last call."""
        for part in parts:
            tell = getattr(part, "set_epoch", None)
            if callable(tell) and self._told.get(id(part)) != number:
                tell(number)
                self._told[id(part)] = number

    def state_dict(self) -> dict[str, Any]:
        """Return how many passes each client has begun, and how many batches of the current one it
        received."""
        return {
            "version": STATE_VERSION, "passes": list(self.passes), "given": list(self.given)
        }  # fmt: skip

    def check_state(self, state: Any) -> None:
        """Raise ValueError for the state of a feed with another number of clients, and if batches
        have been taken from an iterator, which cannot go back. `load_state_dict` calls this first,
        and a `Federation` calls it before it loads anything."""
        check_state_version("state: feed", state)
        check_same_state("state: feed", state, self.state_dict())
        for count in (*state["passes"], *state["given"]):
            _check_whole("state: feed: passes or batches", count, 0, 2**63 - 1)
        for n, (source, running) in enumerate(zip(self.sources, self._running, strict=True)):
            if isinstance(source, Iterator) and running is not None:
                got = "got an iterator from which batches have been taken, which cannot go back"
                raise ValueError(f"feed: client {n}: {got}, allowed: a DataLoader or a list")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state: batches that had been given before it was saved are skipped.

        Raises ValueError, with nothing changed, for a state that `check_state` refuses.
        """
        self.check_state(state)
        self.passes, self.given = list(state["passes"]), list(state["given"])
        self._running = [None] * self.clients

    def __getstate__(self) -> dict[str, Any]:
        """Support copying and pickling, also in the middle of a pass: what can begin again does so
        in the copy, as after `load_state_dict`."""
        pairs = zip(self.sources, self._running, strict=True)
        running = [now if isinstance(source, Iterator) else None for source, now in pairs]
        return self.__dict__ | {"_running": running, "_told": {}}


_END: Any = object()  # stands for "no more batches"


_INNER = ("sampler", "batch_sampler", "dataset", "datasets", "data_source")


def _parts_of(source: Any) -> list[Any]:
    """Return a loader, its samplers and data sets, and the objects that these contain, each
    once."""
    found, seen, todo = list[Any](), set[int](), [source]
    while todo:
        part = todo.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        for name in _INNER:
            inner = getattr(part, name, None)
            if not isinstance(inner, list | tuple | dict):
                todo.append(inner)
            elif name == "datasets":  # those of a ConcatDataset or a StackDataset
                todo += inner.values() if isinstance(inner, dict) else inner
            # Any other list holds samples or their numbers, which may be very many.
    return found


def _check_workers_hear(n: int, source: Any) -> None:
    """Raise ValueError for a data set whose `set_epoch` would not reach persistent workers.

    Each worker has a copy of the data set. Only what the data set keeps in shared memory reaches
    it.
    """
    for part in _parts_of(source.dataset):
        kept_values = list(getattr(part, "__dict__", {}).values())
        shared = [value for value in kept_values if hasattr(value, "get_lock")]
        shared += [
            value for value in kept_values if isinstance(value, Tensor) and value.is_shared()
        ]
        if callable(getattr(part, "set_epoch", None)) and not shared:
            got = f"got persistent workers with a {type(part).__name__} that has set_epoch"
            way = "persistent_workers=False, or an epoch in shared memory (a tensor, a Value)"
            raise ValueError(f"feed: client {n}: {got}, which they would not hear, allowed: {way}")


# ══ 8. Models: the CIFAR ResNet-18 of the paper (11,173,962 parameters) and small ones ════════════
#    Convolutions lie in memory with channels last, the layout that CPU and GPU kernels prefer.

# Numbers of basic blocks in each stage; a stage without blocks is a single convolution.
STAGES = {"resnet18": (2, 2, 2, 2), "resnet8": (1, 1, 1), "conv3": (0, 0, 0)}


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        first, second = _conv(inputs, outputs, 3, stride), _conv(outputs, outputs, 3, 1)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        same, thin = stride == 1 and inputs == outputs, stride > 1 and inputs < 16
        # Thin inputs are pooled, since a stride in this convolution overruns: oneDNN issue 6035.
        step = [nn.MaxPool2d(1, stride)] if thin else []
        conv = [] if same else _conv(inputs, outputs, 1, 1 if thin else stride)
        self.shortcut = nn.Sequential(*step, *conv)

    def forward(self, x: Tensor) -> Tensor:  # (B, inputs, h, w) -> (B, outputs, h/stride, w/stride)
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def build_model(name: str, width: int, classes: int = 10) -> nn.Module:
    """Return a convolutional net for images (B, 3, h, w), with logits (B, classes) as its output.

    `name` is "resnet18" (4 stages of 2 residual blocks), "resnet8" (3 stages of 1 block) or "conv3"
    (3 stages of 1 convolution without shortcut). The first stage has `width` channels. Each later
    stage has twice the channels, and half the height and width, of the one before. Raises
    ValueError for another name, and for numbers that are not allowed.
    """
    width = _check_whole("width", width, 1, 2**16)
    classes = _check_whole("classes", classes, 1, 2**31 - 1)
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
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """Return the paper's model, Sec. III-A: 11,173,962 trainable parameters at width 64."""
    return build_model("resnet18", width, classes)


# ══ 9. A communication hook for PyTorch's DistributedDataParallel ═════════════════════════════════
#    Values on the shared mask are summed by an all-reduce, since all ranks know their positions.
#    The values on each rank's own mask are gathered with their positions. Within a step, everything
#    stays on its device, as tensors.


def tcs_hook(
    state: TCSState, bucket: dist.GradBucket, *others: Any
) -> torch.futures.Future[Tensor]:
    """DDP communication hook: average gradients by TCS over the process group of the state.

    1. The first `start_iter` steps are DDP's plain all-reduce. The last of them gives the first
       shared mask.
    2. After that, each rank does lines 9 to 12 of the paper's Algorithm 2 for the bucket's
       gradient: it adds its errors, and chooses its own mask outside the shared one. It divides the
       values on both masks by the number of ranks and rounds them to the gradients' type.
    3. These values on the shared mask are summed by an all_reduce, in the gradients' type.
    4. Those on the ranks' own masks are exchanged by an all_gather. Each takes 8 bytes: a position
       and a float32 value.
    5. All ranks put the same average into the bucket, and S_top of it is the next shared mask. Line
       13: from its errors, this rank subtracts what it contributed to the average.

    Register it as in the example of `TCSState`. Returns a future of the averaged gradient of the
    `bucket`, a flat tensor with the length and type of `bucket.buffer()`. Raises ValueError for
    sparse or complex gradients, for parameters of a second model, if the caller is not DDP (FSDP
    calls its hooks with `others`) or is `hook_with_zero_step`, and if the ranks' states differ.
    """
    _check_caller(state, bucket, others)
    gives_mask = state.iter + 1 >= state.start_iter  # before `begin`, which may count the step
    client = state.begin(bucket)
    buffer, known, ranks = bucket.buffer(), client.known, state.group.size()

    # 1. A dense step. With momentum, the gradient stays in the buffer until the average is there.
    if known.dense:
        done = state.all_reduce(client.accumulated(buffer).to(buffer.dtype).div_(ranks), "dense")
        opened = client, buffer, known.round
        return done.then(lambda sums: _dense_average(*opened, sums.value()[0], gives_mask))

    # 2. What this rank sends. If its gradient is not finite, it sends only errors and sets a flag.
    used_L = _used(buffer, known.layer_sizes)
    message, is_finite = _message_of(client, client.accumulated(buffer))
    shares_K = _shares(message.values, ranks, buffer.dtype)
    shared_K, own_K = shares_K.split([len(known.shared_K), len(message.positions)])

    # 3. Flags say which parameters have a gradient, and whether this rank's is not finite. (If any
    # rank's is not, the step is void.)
    flags = torch.cat([used_L, ~is_finite.view(1)]).to(buffer.dtype)
    summed = torch.cat([shared_K, flags])
    # 4. The ranks' own masks all have the same size.
    packed = torch.cat([message.positions.int(), own_K.float().view(torch.int32)])
    gathered = [torch.empty_like(packed) for _ in range(ranks)]
    futures = [state.all_reduce(summed, "shared"), *state.all_gather(gathered, packed)]

    # 5. Keep little in memory meanwhile: the intended values are in the errors, too.
    client.in_flight, known.shared_D = None, known.shared_D.new_empty(0)
    used = used_L.any()
    step = UnderWay(client, buffer, known.round, used, is_finite, summed, packed, gathered)
    return torch.futures.collect_all(futures).then(lambda done: _average(step, done.value()))


if dist.is_available():  # some builds of torch are without it
    # DDP compares these annotations with types, but in this module annotations are text (PEP 563).
    tcs_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


class UnderWay(NamedTuple):
    """A bucket's sparse step while its collectives are running."""

    client: BucketClient
    buffer: Tensor
    round: int  # its number; `TCSState.undo` may have closed it meanwhile
    is_used: Tensor  # whether this rank's gradient has an entry that is not 0, bool ()
    is_finite: Tensor  # whether it is finite, bool ()
    summed: Tensor  # shares on the shared mask, then flags
    packed: Tensor  # int32, this rank's own positions, then the bits of its values
    gathered: list[Tensor]  # `packed` of every rank


def _check_caller(state: TCSState, bucket: Any, others: tuple[Any, ...]) -> None:
    """Raise ValueError if the caller is FSDP, or a hook of PyTorch that steps a
    ZeroRedundancyOptimizer during the backward pass."""
    allowed = "DistributedDataParallel.register_comm_hook(state, tcs_hook)"
    if not isinstance(state, TCSState):
        raise ValueError(f"tcs_hook: state: got {shorten(state)}, allowed: a TCSState")
    if others or isinstance(bucket, Tensor):
        got = "gradients from FSDP, which has no buckets and may shard them"
        raise ValueError(f"tcs_hook: got {got}, allowed: {allowed}")
    frame = None if state._agreed else sys._getframe(1)  # checked only before the first step
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith("ddp_comm_hooks.ddp_zero_hook"):
            got = "a call from hook_with_zero_step, which steps before all buckets are averaged"
            also = "ZeroRedundancyOptimizer(overlap_with_ddp=False)"
            raise ValueError(f"tcs_hook: got {got}, allowed: {allowed}, with {also}")
        frame = frame.f_back


def _dense_average(
    client: BucketClient, buffer: Tensor, round: int, update_D: Tensor, gives_mask: bool
) -> Tensor:
    """Step 1: return the average of round `round`, in the bucket's buffer. If `gives_mask` and it
    is finite, it gives the first shared mask. With momentum, the buffer still contains the
    gradient."""
    known, before_D = client.known, client.momentum_D
    if known.round != round:  # `undo` has taken the step back
        return buffer
    if before_D is not None:
        counts = update_D.sum(dtype=torch.float64).isfinite()  # needs no vector of flags
        torch.where(counts, client.accumulated(buffer), before_D, out=before_D)
        update_D = buffer.copy_(update_D)
    if gives_mask and _host_reads(update_D.float().isfinite().all()):
        known.observe(update_D.float())
    else:
        known.lose()
    return update_D


def _host_reads(flag: Tensor) -> bool:
    """Return a flag as a Python bool. On a GPU the host waits for it, so ordinary steps avoid
    this."""
    return bool(flag)


def _used(buffer: Tensor, sizes: list[int]) -> Tensor:
    """Return which parameters have a gradient with an entry that is not 0, (L,) bool."""
    parts = buffer.split(sizes)
    if not is_on_cpu(buffer):
        return torch.stack(torch._foreach_norm(parts, math.inf)) != 0  # NaN counts, too
    few = 1024  # usually enough to see an entry that is not 0
    used = [bool(part[:few].any()) or bool(part.any()) for part in parts]
    return torch.tensor(used, device=buffer.device)


def _message_of(client: Client, gradient: Tensor) -> tuple[Message, Tensor]:
    """Step 2: do lines 9 to 12 for a bucket's gradient. Return the message and a flag, bool ().

    The flag says whether the gradient was finite. If not, it counts as 0, so that the message
    contains only errors.
    """
    flags, gradient_D = client.known.flags, gradient.float()
    is_finite = torch.ones((), dtype=torch.bool, device=gradient.device)
    try:
        message = client.send(gradient_D)
    except NotFiniteError:  # on a CPU only; on a GPU `send` adds a flag
        message = client.send(torch.zeros_like(gradient_D))
        is_finite = ~is_finite
    for _, flag in flags:
        is_finite = is_finite & flag
    flags.clear()
    return message, is_finite


def _shares(values_K: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    """Return values divided by the number of ranks, in the bucket's type.

    They are clamped so that the sum over all ranks fits this type, and float32, too. What is cut
    off stays in the errors.
    """
    most = min(torch.finfo(kind).max for kind in (dtype, torch.float32))  # float16: 65504
    most /= 1 + torch.finfo(dtype).eps * (ranks - 1)  # shares are rounded, and so are their sums
    return values_K.clamp(-most, most).div_(ranks).to(dtype)


def _average(step: UnderWay, done: list[torch.futures.Future]) -> Tensor:
    """Step 5: return the average of all ranks, in the bucket's buffer."""
    for future in done:
        future.wait()
    client, buffer, known = step.client, step.buffer, step.client.known
    if known.round != step.round:  # `undo` has taken the step back
        return buffer
    shared_K = known.shared_K
    sums_K, flags = step.summed.split([len(shared_K), len(step.summed) - len(shared_K)])
    halves = [part.view(2, -1) for part in step.gathered] if len(step.packed) else []
    explored = [(own_K.long(), values.view(torch.float32)) for own_K, values in halves]

    # 5.1. If something was not finite on some rank, the step is void on all ranks, and no value
    # counts. Otherwise all values count, except those of parameters that no rank has used.
    finite = [part.isfinite().all() for part in (sums_K, *(values_K for _, values_K in explored))]
    void = (flags[-1] > 0) | ~torch.stack(finite).all()
    counts_L = (flags[:-1] > 0) & ~void
    client.counted = counts_L.any() & step.is_used
    may_be_void = not is_on_cpu(void) or bool(void)  # on a GPU the host does not read `void`
    only_L = None if is_on_cpu(void) and bool(counts_L.all()) else counts_L  # None: all count

    # 5.2. Line 13. A void step leaves the errors as they were before it, except for rounding.
    sent_K = torch.cat([shared_K, step.packed[: len(step.packed) // 2].long()])  # by this rank
    if client.errors_D is not None:
        meant_K, ranks = client.errors_D.index_select(0, sent_K), len(step.gathered)
        received_K = _shares(meant_K, ranks, buffer.dtype).float() * ranks
        received_K = _counted(known, only_L, received_K, sent_K)
        client.errors_D.index_copy_(0, sent_K, meant_K - received_K)  # keep what rounding has lost
    if client.momentum_D is not None:
        _keep_momentum(step, sent_K, only_L)
    elif may_be_void:
        client.withdraw(torch.where(void & step.is_finite, buffer.float(), 0.0))
    if may_be_void and client.errors_D is not None:  # otherwise all later steps would be void, too
        client.errors_D.masked_fill_(void & ~client.errors_D.isfinite().all(), 0.0)

    # 5.3. The average. The ranks' own masks lie outside the shared mask.
    fits = buffer.dtype == torch.float32
    update_D = buffer.zero_() if fits else torch.zeros_like(buffer, dtype=torch.float32)
    for positions_K, values_K in explored:
        update_D.index_add_(0, positions_K, _counted(known, only_L, values_K, positions_K))
    update_D.index_copy_(0, shared_K, _counted(known, only_L, sums_K.float(), shared_K))

    # 5.4. The next shared mask. A void step's average is all zero, and then `TCS.observe` keeps the
    # old mask. Where the host need not wait for `void`, it saves this search.
    if is_on_cpu(void) and bool(void):
        known.lose()
    else:
        if known.rule.k_global:
            cast(TCS, known.rule).among_K = _merged(shared_K, [own_K for own_K, _ in explored])
        known.observe(update_D)
    if may_be_void:
        update_D.masked_fill_(void, math.nan)
    return buffer if fits else buffer.copy_(update_D)


def _counted(known: Known, only_L: Tensor | None, values_K: Tensor, positions_K: Tensor) -> Tensor:
    """Return values, with 0 at positions in parameters that do not count. `only_L` (L,) bool says
    which parameters count; None means all."""
    if only_L is None:
        return values_K
    ends_L = torch.tensor(list(accumulate(known.layer_sizes)), device="cpu")
    # A copy that is not `non_blocking` would make the host wait.
    ends_L = ends_L.to(positions_K.device, non_blocking=True)
    parameters_K = torch.searchsorted(ends_L, positions_K, right=True)
    return torch.where(only_L[parameters_K], values_K, 0.0)


def _keep_momentum(step: UnderWay, sent_K: Tensor, only_L: Tensor | None) -> None:
    """Store what was accumulated in this step, with 0 at `sent_K`, where this rank has sent it.

    Parameters that do not count, which after a void step are all, keep their momentum from before
    the step. For them, what was accumulated is subtracted from the errors again.
    """
    client, sizes = step.client, step.client.known.layer_sizes
    accumulated_D, before_D = client.accumulated(step.buffer), cast(Tensor, client.momentum_D)
    if only_L is None:
        client.momentum_D = accumulated_D.index_fill_(0, sent_K, 0.0)
        return
    counts_D = torch.cat([c.expand(size) for c, size in zip(only_L, sizes, strict=True)])
    client.withdraw(torch.where(counts_D | ~step.is_finite, 0.0, accumulated_D))
    accumulated_D.index_fill_(0, sent_K, 0.0)
    torch.where(counts_D, accumulated_D, before_D, out=before_D)


def _merged(shared_K: Tensor, explored: list[Tensor]) -> Tensor | None:
    """Return all positions of a bucket at which something was sent, ascending; None on a GPU.

    There, the host would have to wait to learn how many there are.
    """
    if not is_on_cpu(shared_K):
        return None
    # A stable sort is fast here, because it merges runs that are already ascending.
    all_K = np.sort(np.concatenate([part.numpy() for part in (shared_K, *explored)]), kind="stable")
    # Several ranks may have sent the same position.
    return torch.from_numpy(all_K[np.diff(all_K, prepend=-1) > 0])


PAPER_SHARES = {"phi_global": 1e-2, "phi_local": 1e-3}  # for TCSState(**PAPER_SHARES)


class TCSState:
    """Settings and memory of `tcs_hook`. It averages over the process group of the `model`, or over
    `process_group`. If neither is given, it averages over all ranks, even if the model is on some
    of them only.

        >>> from torch.nn.parallel import DistributedDataParallel
        >>> torch.distributed.init_process_group("gloo")  # torchrun says how many processes
        >>> model = DistributedDataParallel(torch.nn.Linear(1000, 10))
        >>> state = tcs_core.TCSState(start_iter=2, model=model)
        >>> model.register_comm_hook(state, tcs_core.tcs_hook)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in range(5):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 1000)).square().mean().backward()
        ...     optimizer.step()
        >>> state.iter
        5
        >>> state.bytes_sent
        {'dense': 80080, 'shared': 1248, 'explored': 1224}

    Make one state per model and rank.

    1. `phi_global` and `phi_local` are the fractions of a bucket's entries that are sent: on the
       mask that all ranks share, and on each rank's own mask. None means that there is no such
       mask; without phi_global, the method is top-K. `PAPER_SHARES` has the paper's fractions. In
       our trainings with two ranks, the defaults were better (notebook 12).
    2. The first `start_iter` (at least 1) steps are a plain all-reduce. We used 100 of 5,100 steps,
       those of the learning rate's warm-up. We have not searched for the best number.
    3. `error_accumulation` adds what was not sent to the next gradient. Leave it on.
    4. `model` is the DistributedDataParallel module. With it, the process group is the model's, and
       errors and masks are stored by parameter name. A state can then be loaded even if parameters
       come in another order or in other buckets. Without `model`, give `process_group` if the model
       is on some ranks only. Errors and masks are then stored in the order in which parameters come
       in the first step. A loaded state is refused if, in the first step after loading, parameters
       come in other shapes, another order or other buckets than in the first step of the run that
       saved it. Only an exchange of two parameters of equal shape is not noticed.
    5. `can_undo` allows `undo` to take the last step back. It costs one float32 copy of the
       gradients, and with `momentum` two.
    6. `momentum` is for SGD with momentum: give it to the hook, and give the optimizer none. (The
       default, 0, changes nothing.) Each rank then adds its gradient to `momentum` times what it
       has accumulated so far. This sum takes the gradient's place in all steps. What a rank has
       sent is set to 0 in its accumulated momentum; otherwise it would push the parameter on in an
       outdated direction. This is momentum correction and momentum factor masking of Deep Gradient
       Compression (Lin et al., 2018). It costs one float32 copy of the gradients. It is not for
       Adam or AdamW, which would average over the steps a second time, with beta_1. The optimizer's
       weight decay then acts once instead of accumulating: multiply it by 1 / (1 - momentum). A
       threshold for clipping then applies to the accumulated gradient, which can be larger by this
       factor, so the threshold should be larger, too.

    Each backward pass is a step. What it does not send stays in the errors and is sent in later
    steps, even if you discard the gradients. Therefore run a pass whose gradients no optimizer will
    use under `model.no_sync()`. Examples are a GAN's generator pass through its discriminator, the
    first of sharpness-aware minimization's two passes, and a pass that only inspects gradients. If
    gradients are accumulated over several passes, run all passes but the last one under
    `model.no_sync()`. The forward pass has to be inside, too. If you skip a step because of the
    values of its averaged gradients, take it back with `undo`. With `error_accumulation`, the state
    warns once if no optimizer step followed a sparse backward pass. It notices this when the next
    backward pass finds the parameters unchanged.

    Masks are chosen per bucket, so that buckets are sent while the backward pass is still running.
    (On a GPU, by our reading of PyTorch's code, the rest of the backward pass waits for each bucket
    of a sparse step. We have not measured this.) If `bucket_cap_mb` is large enough for the whole
    model, there is one bucket, and the selection is that of the paper's Algorithm 2.

    Attributes

    - `iter`: the number of steps so far.
    - `bytes_sent`: the bytes that this rank has passed to collectives in all steps. "dense" and
      "shared" went to all_reduce, "explored" to all_gather. In a sparse step, "shared" also has a
      number for each parameter, which says whether this rank has used it, and one for each bucket,
      which says whether its gradient is finite. (In the example above, a sparse step sends 101
      values on the shared mask and 3 such numbers: 4 x 104 = 416 bytes.) The few bytes with which
      the ranks compare their states in the first step are not counted.
    - `group`: the process group. `start_iter`, `momentum` and `can_undo` are the settings, and
      `scheme` has the fractions.

    Errors and momentum are float32, on the device of the gradients. On a GPU, the host waits for
    results in the first step and in the last dense one, and rarely in others.

    Each rank saves its own `state_dict` between two steps, and loads it into a new state with the
    same settings. All errors, that is, everything that was not sent yet, are kept in this way. If
    the state was saved by another rank, or with another number of ranks, its masks and counters can
    be loaded, but not its errors: see `load_state_dict`. The object itself cannot be copied or
    pickled, which raises TypeError, because a process group cannot be.

    A resumed run can differ slightly from one without a stop. Every run of DDP begins with the same
    buckets and usually rebuilds them after its first step. So in the first step after loading,
    masks may be chosen within other buckets than in the step before the stop, or entries may come
    in another order. (Without `model`, too, the buckets must equal those of the saving run's first
    step, not those of its last one.)

    Values are not quantized, since an all-reduce has to add them up. PyTorch's own
    bf16_compress_wrapper(tcs_hook) halves the bytes of "dense" and "shared". It rounds each
    gradient to 16 bits before the hook sees it, and this rounding is lost. What the hook itself
    rounds, a value divided by the number of ranks, stays in the errors. The rounding of a sum is
    lost, too.

    If a gradient is not finite on some rank, a sparse step makes the bucket's gradient NaN on all
    ranks, so that every GradScaler skips the step. (In a dense step, only the affected entries are
    not finite, as with plain DDP.) Errors, mask and momentum of this bucket then stay the same,
    except for rounding. Those of other buckets change as usual, so what these have sent is lost
    with the skipped step, unless you take this step back with `undo`. If a rank's errors themselves
    overflow float32, the step is void as well, and this rank's errors in the bucket become 0.

    DDP does not give the average to parameters that no rank has used, so what was sent for them has
    no effect. It is therefore not subtracted from the errors, and their momentum stays the same.
    (In a dense step, the momentum of such a parameter decays.) A rank counts as having used a
    parameter if an entry of the parameter's gradient is not 0 on this rank. What an earlier pass
    has left in the `grad` of a parameter that the pass did not use counts as 0.

    Errors and momentum are in the units of the gradients that DDP passes to the hook. When a
    GradScaler changes its scale, they are not converted to the new scale.

    Raises ValueError for a fraction, a start_iter or a momentum that is not allowed, for a group
    that this rank is not in, or for a model that is not a DistributedDataParallel or has another
    process group.
    """

    def __init__(
        self, process_group: Any = None, phi_global: float | None = 1e-2,
        phi_local: float | None = 5e-3, start_iter: int = 10, error_accumulation: bool = True,
        model: nn.parallel.DistributedDataParallel | None = None, can_undo: bool = False,
        momentum: float = 0.0,
    ):  # fmt: skip
        self.start_iter = _check_whole("start_iter", start_iter, 1)
        self.iter, self.momentum = 0, _check_momentum(momentum)
        self.scheme = Scheme(
            "DDP hook", "TCS", phi_global, phi_local, error_accumulation=error_accumulation
        )
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("process_group: got one without this rank, allowed: one that has it")
        is_group = hasattr(process_group, "rank") and hasattr(process_group, "size")
        if process_group is not None and not is_group:
            allowed = "a process group or None (give other settings by name, as phi_global=0.02)"
            _refuse("process_group", process_group, allowed)
        self.process_group = process_group
        self.can_undo = _check_flag("can_undo", can_undo)
        self.bytes_sent = dict.fromkeys(("dense", "shared", "explored"), 0)
        self._buckets: dict[tuple[Name, ...], BucketClient] = {}  # by their parameters' names
        self._loose: dict[Name, dict[str, Tensor | None]] = {}  # of parameters in no bucket now
        # A parameter's name in the model or, without the model, its number in the first step.
        self._names: dict[Tensor, Name] = {}
        self._layouts: dict[Name, dict[str, list[int]]] = {}
        self._packing: list[int] = []  # numbers of parameters in the buckets of the first step
        self._came: list[int] = []  # during the first step: those of the buckets so far
        self._settled = False  # the first step, also the first after loading a state, is over
        self._agreed = False  # the ranks have compared their states
        self._saved_by: dict[str, int | None] = dict.fromkeys(("rank", "world_size"))
        self._noted: set[Tensor] = set()  # parameters with a hook that puts them into `_passed`
        self._passed: set[Tensor] = set()  # those that passes have used since the last step
        self._watches = error_accumulation  # still looks for gradients that were not used
        self._by_name = model is not None
        if model is None:
            return
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            got = type(model).__name__
            raise ValueError(f"model: got a {got}, allowed: a DistributedDataParallel")
        if process_group not in (None, model.process_group):
            raise ValueError(
                "process_group: got another one than the model's, allowed: the model's, or none"
            )
        self.process_group = model.process_group
        for name, p in trained_parameters(model.module).items():
            if name not in model.parameters_to_ignore:
                name = name.replace("_orig_mod.", "")  # a prefix that torch.compile adds
                self._names[p], self._layouts[name] = name, _layout(p)

    @property
    def group(self) -> Any:
        """The process group over which the hook averages."""
        return dist.group.WORLD if self.process_group is None else self.process_group

    def begin(self, bucket: dist.GradBucket) -> BucketClient:
        """Begin a step for one bucket. `tcs_hook` calls this; you need not.

        The hook does for each bucket what a client of Algorithm 2 does: a step is a round, and the
        gradient is the difference. Returns the object that does this on this rank, a kind of
        `Client`. With the last bucket of a backward pass, `iter` advances. Raises ValueError for
        gradients or parameters that are not allowed.
        """
        buffer, last = bucket.buffer(), bucket.is_last()
        if buffer.is_sparse:
            allowed = "dense (nn.Embedding(sparse=False))"
            raise ValueError(f"gradients: got sparse ones, allowed: {allowed}")
        parameters = [p for p in bucket.parameters() if p.numel()]
        sizes = [p.numel() for p in parameters]
        if sum(sizes) != len(buffer):
            got = f"{len(buffer)} entries for parameters of {sum(sizes)}"
            raise ValueError(f"gradients: got {got}, allowed: as many (no complex parameters)")
        if not self._agreed:
            if not self._by_name and any(p not in self._names for p in parameters):
                self._names, self._came = {}, []  # a loaded state continues with new parameters
            self._agree(buffer.device)
        names = self._names_of(parameters, last)
        if names not in self._buckets:
            self._buckets[names] = self._assemble(names, sizes, buffer.device)
        client = self._buckets[names]
        if client.known.status != CLOSED:  # the last backward pass was abandoned
            client.known.lose()
        self._clear_left_over(parameters, buffer.split(sizes), last)
        if self._watches:
            self._watch(client, parameters)
        client.counted = None
        if self.iter >= self.start_iter:
            client.hold_errors()
        if self.can_undo:
            client.remember(self.iter, sparse=self.iter >= self.start_iter)
        client.known.begin(dense=self.iter < self.start_iter)
        self.iter += last
        return client

    def _clear_left_over(
        self, parameters: list[Tensor], gradients: Iterable[Tensor], last: bool
    ) -> None:
        """Set to 0 the gradients of parameters that no pass since the last step has used.

        DDP puts into the bucket what an earlier pass has left in their `grad`, for instance if
        another optimizer sets it to zero. Without this, it would enter the errors again and again.
        """
        for p, gradient in zip(parameters, gradients, strict=True):
            if p.requires_grad and p not in self._noted:  # from the next pass on
                self._noted.add(p)
                p.register_post_accumulate_grad_hook(self._passed.add)
            elif self._passed and p not in self._passed:
                gradient.zero_()
        if last:
            self._passed.clear()

    def _watch(self, client: BucketClient, parameters: list[Tensor]) -> None:
        """Warn, once, if gradients that were averaged have not been used by any optimizer.

        This is so if the parameters are still the same as when the bucket's last gradients were
        averaged. Only gradients that counted in the average matter.

        Parameters are taken to be the same if their version counters are. An optimizer that writes
        to `p.data` does not advance these counters. Therefore sums of the parameters are compared,
        too, until a counter has advanced at least once.
        """
        before, sums_before = client.versions, client.sums
        client.versions = [p._version for p in parameters]
        client.versions_tell |= bool(before) and before != client.versions
        client.sums = None
        if not client.versions_tell:
            client.sums = torch.stack([p.detach().float().sum() for p in parameters])
        if client.counted is None or before != client.versions or not _host_reads(client.counted):
            return
        self._watches = False
        sums = client.sums
        if sums is None or torch.equal(sums, cast(Tensor, sums_before)):
            warnings.warn(_THROWN_AWAY, stacklevel=2)

    def undo(self) -> None:
        """Take the last step back. Call it between two steps and on all ranks.

        Errors, masks, momentum and `iter` become exactly what they were before the step.
        `bytes_sent` stays, since these bytes were sent. After an exception in a backward pass, this
        takes back what that pass had done. (If the pass failed before DDP had averaged any
        gradient, it had done nothing, and the step before it is taken back.)

        Raises ValueError without `can_undo`, or if there is no step to take back: before the first
        one, right after `load_state_dict`, and after `undo`.
        """
        if not self.can_undo:
            raise ValueError("undo: got can_undo=False, allowed: TCSState(can_undo=True)")
        made = [client for client in self._buckets.values() if client.before is not None]
        if not made:
            what = "no step that could be taken back"
            raise ValueError(f"undo: got {what}, allowed: once after a step")
        self.iter = max(cast(Before, client.before).iter for client in made)
        for client in made:
            client.go_back(self.iter)

    def all_reduce(self, tensor: Tensor, kind: str) -> torch.futures.Future[list[Tensor]]:
        """Start an all_reduce of a tensor, which sums it in place, and return its future.

        `tcs_hook` calls this. The bytes are counted in `bytes_sent[kind]`. The future's value is a
        list with the tensor.
        """
        self.bytes_sent[kind] += tensor.nbytes
        return dist.all_reduce(tensor, group=self.group, async_op=True).get_future()

    def all_gather(self, tensors: list[Tensor], tensor: Tensor) -> list[torch.futures.Future]:
        """Start an all_gather of a tensor into `tensors`, one per rank. Return a list with its
        future.

        `tcs_hook` calls this. The bytes are counted in `bytes_sent["explored"]`. For an empty
        tensor, nothing is done, and the list is empty.
        """
        if not len(tensor):
            return []
        self.bytes_sent["explored"] += tensor.nbytes
        return [dist.all_gather(tensors, tensor, group=self.group, async_op=True).get_future()]

    def _agree(self, device: Any) -> None:
        """Compare the states of all ranks before the first step.

        Raises ValueError on all ranks, which names the first rank whose state differs.
        """
        rank, ranks = self.group.rank(), self.group.size()
        masks = [part["mask"] for part in self._loose.values()]
        known = [bytes(mask.cpu().numpy().data) for mask in masks if mask is not None]
        alike = {  # must be equal on all ranks
            "step": self.iter,
            "start_iter": self.start_iter,
            "phi_global, phi_local, error_accumulation or momentum": zlib.crc32(
                repr((self.scheme, self.momentum)).encode()
            ),
            "shared mask": zlib.crc32(b"".join(known)),
            "set of parameters": zlib.crc32(repr((self._layouts, self._packing)).encode()),
        }
        saved_rank, saved_ranks = self._saved_by.values()
        zero = {  # must be 0: is a loaded state the one that this rank saved?
            "has loaded the state of another rank": saved_rank not in (None, rank),
            "has loaded a state of another world size": saved_ranks not in (None, ranks),
        }
        numbers = torch.tensor([*alike.values(), *zero.values()], device=device)
        gathered = [torch.empty_like(numbers) for _ in range(ranks)]
        dist.all_gather(gathered, numbers, group=self.group)
        said = torch.stack(gathered).tolist()
        wanted = [*said[0][: len(alike)], *(0 for _ in zero)]
        for other in range(ranks):
            for name, got, allowed in zip([*alike, *zero], said[other], wanted, strict=True):
                if got != allowed:
                    what = f"{name}, allowed: {_OWN_STATE}"
                    if name in alike:
                        what = f"begins with another {name} than rank 0, allowed: the same"
                    raise ValueError(f"TCSState: rank {other} {what}")
        self._agreed = True

    def _names_of(self, parameters: list[Tensor], last: bool) -> tuple[Name, ...]:
        """Return the names of a bucket's parameters.

        Without a model, each parameter gets the next number as its name in the first step. If a
        state was loaded, the parameter is compared with the one that has this number in the state.
        """
        new = [p for p in parameters if p not in self._names]
        # A loaded state says which parameters must come in the first step.
        expects = bool(self._packing) and not self._settled
        if new and (self._by_name or self._settled):
            whose = "that came in the first step"
            if self._by_name:
                whose = "of the given model that were trained when this state was made"
            got = f"a parameter {tuple(new[0].shape)} of another model"
            raise ValueError(f"TCSState: got {got}, allowed: those {whose} (one state per model)")
        for p in parameters if new or expects else ():
            name, layout = self._names.setdefault(p, len(self._names)), _layout(p)
            if expects and self._layouts.get(name) != layout:
                raise _another_model(f"parameter {name} {tuple(p.shape)}")
            self._layouts[name] = layout
        if new:
            self._came.append(len(new))
        if expects and self._came != self._packing[: None if last else len(self._came)]:
            raise _another_model(f"buckets of {self._came} parameters")
        if last and not self._settled:
            self._settled, self._packing = True, list(self._came)
        return tuple(self._names[p] for p in parameters)

    def _assemble(self, names: tuple[Name, ...], sizes: list[int], device: Any) -> BucketClient:
        """Make a client for a new bucket, with the errors, the shared mask and the momentum of the
        bucket's parameters.

        These come from the parameters' earlier buckets, or from a loaded state.
        """
        for other in [key for key in self._buckets if not set(key).isdisjoint(names)]:
            self._loose |= _parts(other, self._buckets.pop(other))
        parts = [self._loose.pop(name, {}) for name in names]
        client = BucketClient(Known(self.scheme, sizes, device=device), self.momentum)
        filled = {"momentum": client.momentum_D}
        if self.iter >= self.start_iter:  # before that, errors are 0
            client.hold_errors()
            filled["errors"] = client.errors_D
        for key, own_D in filled.items():
            for own, part in zip([] if own_D is None else own_D.split(sizes), parts, strict=False):
                if part.get(key) is not None:
                    own.copy_(part[key])
        masks = [part.get("mask") for part in parts]
        if all(mask is not None for mask in masks):  # otherwise the bucket's next step is dense
            mask_D = torch.cat(cast(list[Tensor], masks)).to(device)
            cast(TCS, client.known.rule).positions = mask_to_positions(mask_D)
        return client

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's errors, masks and momentum, parameter by parameter, and of
        the counters.

        Before the first step, it contains no parameters.
        """
        parts = dict(self._loose)
        for names, client in self._buckets.items():
            parts |= _parts(names, client)
        parameters = {
            name: layout | {key: None if t is None else t.clone() for key, t in parts[name].items()}
            for name, layout in self._layouts.items()
            if self.iter and name in parts
        }
        saved_by = self._saved_by  # of a loaded state; otherwise None, and filled in here
        if saved_by["rank"] is None and (self.process_group is not None or dist.is_initialized()):
            saved_by = {"rank": self.group.rank(), "world_size": self.group.size()}
        return {
            "version": STATE_VERSION, "scheme": scheme_state(self.scheme),
            "start_iter": self.start_iter, "iter": self.iter, "bytes_sent": dict(self.bytes_sent),
            "parameters": parameters, **saved_by,
            # after `undo` of the first step, no parameters are saved
            "packing": list(self._packing) if self.iter else [],
            **({"momentum": self.momentum} if self.momentum else {}),
        }  # fmt: skip

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that cannot be loaded here. `load_state_dict` calls this
        first.

        It refuses a state with other settings, an incomplete state, and a state of other
        parameters, as far as the parameters are known yet.
        """
        key = "TCSState: state"
        check_state_version(key, state)
        names = ("version", "scheme", "start_iter", "iter", "bytes_sent", "parameters", "packing")
        momentum = state.get("momentum", 0.0)  # states without momentum do not name it
        if type(momentum) is not float or momentum != self.momentum:
            _refuse(f"{key}: momentum", momentum, str(self.momentum))
        own = dict.fromkeys([*names, *self._saved_by, *(["momentum"] if self.momentum else [])])
        check_same_state(key, dict.fromkeys(state), own)
        check_same_scheme(f"{key}: scheme", state["scheme"], self.scheme)
        if state["start_iter"] != self.start_iter:
            _refuse(f"{key}: start_iter", state["start_iter"], str(self.start_iter))
        for name in ("iter", *self._saved_by):
            number = 0 if state[name] is None and name != "iter" else state[name]
            if type(number) is not int or not 0 <= number <= 2**53:
                _refuse(f"{key}: {name}", number, "a whole number from 0 to 2^53")
        check_same_state(f"{key}: bytes_sent", state["bytes_sent"], self.bytes_sent)
        parameters = state["parameters"]
        if type(parameters) is not dict or bool(parameters) != bool(state["iter"]):
            allowed = "a dictionary with at least one" if state["iter"] else "an empty dictionary"
            _refuse(f"{key}: parameters", parameters, f"{allowed}, since iter is {state['iter']}")
        for name, part in parameters.items():
            _check_part(f"{key}: parameters: {name}", part, self.scheme.keeps_errors, momentum)
        self._check_names(state)

    def _check_names(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless the state's parameter names, and the shapes under them, are those
        of this object."""
        parameters, packing = state["parameters"], state["packing"]
        found = {name: {key: part[key] for key in _LAYOUT} for name, part in parameters.items()}
        if not self._by_name:
            if list(parameters) != list(range(len(parameters))):
                raise _another_model(f"names such as {next(iter(parameters))!r}")
            is_whole = type(packing) is list and all(type(n) is int and n > 0 for n in packing)
            if not is_whole or sum(packing) != len(parameters):
                _refuse("TCSState: state: packing", packing, "numbers of all the parameters")
            if self._settled and parameters and (found, packing) != (self._layouts, self._packing):
                raise _another_model("parameters that did not come in the first step")
            return
        if any(type(name) is not str for name in parameters):
            raise ValueError("TCSState: state: parameters: got numbers, allowed: names (a state "
                             "that was saved without model= is loaded without it)")  # fmt: skip
        for name in found | self._layouts if parameters else ():
            got, own = found.get(name), self._layouts.get(name)
            if got != own:
                raise ValueError(f"TCSState: state: parameters: {name}: got {got}, allowed: {own}")

    def load_state_dict(self, state: dict[str, Any], errors: bool = True) -> None:
        """Load a state between two steps, and continue from it.

        Raises ValueError, with nothing changed, for a state that `check_state` refuses. Without a
        `model`, parameters are compared with the state when they come in the next step.

        Each rank has different errors, and together they are what is still to be sent. So the next
        step refuses the state of another rank, or of another number of ranks. After an elastic
        restart with more or fewer ranks, give `errors=False` on all of them: masks and counters
        continue, and errors and momentum begin at 0. All ranks may then load the same file.
        """
        self.check_state(state)
        self.iter, self.bytes_sent = state["iter"], dict(state["bytes_sent"])
        # otherwise any rank may load the state
        has_own = errors and (self.scheme.keeps_errors or self.momentum > 0)
        self._saved_by = {key: state[key] if has_own else None for key in self._saved_by}
        self._buckets, self._agreed = {}, False
        parts = state["parameters"].items()
        self._loose = {
            name: {key: _by_value(t) for key, t in part.items() if key not in _LAYOUT}
            for name, part in parts
        }
        for part in self._loose.values() if not errors else ():
            for own in (part["errors"], part.get("momentum")):
                if own is not None:
                    own.zero_()
        if self._by_name:
            return
        self._layouts = {name: {key: list(part[key]) for key in _LAYOUT} for name, part in parts}
        self._packing, self._settled = list(state["packing"]), False
        if not parts:
            self._names, self._came = {}, []

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because process groups cannot be copied or pickled."""
        what = "a TCSState cannot be copied or pickled, since process groups cannot be"
        way = "save its state_dict() and load it into a new TCSState; copy model.module, not model"
        raise TypeError(f"{what}: {way}")


Name = str | int  # a parameter's name or number
_LAYOUT = ("shape", "order")  # of a parameter in a state, to recognize the parameter by
_OWN_STATE = (
    "the state that this rank saved in a run with as many ranks, or load_state_dict(state, "
    "errors=False) on all ranks, which keeps the masks and drops the errors"
)
_THROWN_AWAY = (
    "TCSState: two backward passes with the same parameters. What the first of them did not send "
    "comes back in later steps, even if its gradients were thrown away. Run a pass whose gradients "
    "no optimizer uses under model.no_sync(). If you accumulate gradients, run all passes but the "
    "last one under it, too. To skip a step after its backward pass, use TCSState(can_undo=True) "
    "and state.undo()."
)


class Before(NamedTuple):
    """A backup for `undo`: the values that everything had before step `iter`."""

    iter: int
    positions_K: Tensor | None  # the shared mask
    errors_D: Tensor | None  # None if the step does not change them
    momentum_D: Tensor | None  # None without momentum


class BucketClient(Client):
    """A client for one bucket on this rank, with what the state needs to know about its last
    step.

    `momentum_D` (D,) is the momentum that this rank has accumulated, or None without momentum. It
    only changes at the end of a step.
    """

    before: Before | None = None  # with `can_undo`, the values from before the last step
    counted: Tensor | None = None  # bool (): whether any gradient counted in a sparse step
    versions: list[int] | None = None  # version counters of the parameters at the last gradients
    versions_tell = False  # a version counter has advanced at least once
    sums: Tensor | None = None  # sums of the parameters then, until a version counter has advanced

    def __init__(self, known: Known, momentum: float):
        zero = torch.zeros(1, dtype=torch.float32, device=known.device)
        zeros_D = zero.expand(known.dimension)  # no memory until it is used
        super().__init__(known, errors_D=zeros_D if known.scheme.keeps_errors else None)
        self.momentum = momentum
        self.momentum_D = zeros_D.clone() if momentum else None

    def accumulated(self, gradient_D: Tensor) -> Tensor:
        """Return the gradient (D,). With momentum, return a new float32 vector: the gradient plus
        `momentum` times what was accumulated before this step."""
        if self.momentum_D is None:
            return gradient_D
        return (self.momentum_D * self.momentum).add_(gradient_D.float())

    def hold_errors(self) -> None:
        """Allocate memory for errors. Until then, in dense steps, they are a view of a single 0."""
        if self.errors_D is not None and not self.errors_D.is_contiguous():
            self.errors_D = self.errors_D.contiguous()

    def remember(self, iter: int, sparse: bool) -> None:
        """Store what `go_back` will need.

        Errors and momentum are copied, because they change in place. A mask is not copied, because
        the next one replaces it.
        """
        last = self.before
        errors_D = _copy_of(self.errors_D if sparse else None, last and last.errors_D)
        momentum_D = _copy_of(self.momentum_D, last and last.momentum_D)
        positions_K = cast(TCS, self.known.rule).positions
        self.before = Before(iter, positions_K, errors_D, momentum_D)

    def go_back(self, iter: int) -> None:
        """Restore the values from before the step `iter`, if this bucket was part of that step."""
        before, self.before, self.counted = self.before, None, None
        if before is None or before.iter != iter:
            return
        self.known.lose()  # if the step was abandoned, its round is still open
        cast(TCS, self.known.rule).positions = before.positions_K
        if before.errors_D is not None:
            self.errors_D = before.errors_D
        self.momentum_D = before.momentum_D


def _copy_of(tensor: Tensor | None, memory: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor, in the memory of an earlier copy if there is one."""
    if tensor is None:
        return None
    return tensor.clone() if memory is None else memory.copy_(tensor)


def _layout(parameter: Tensor) -> dict[str, list[int]]:
    """Return a parameter's shape, and the order in which its dimensions lie in memory and in
    buckets."""
    return {"shape": list(parameter.shape), "order": list(layout_of(parameter))}


def _another_model(got: str) -> ValueError:
    what = f"TCSState: the loaded state is of other parameters: got {got}"
    same = "the same shapes in the same order and buckets"
    way = "if you save and load with TCSState(model=...), parameters are matched by name instead"
    return ValueError(f"{what}, allowed: {same} ({way})")


def _check_part(key: str, part: Any, keeps_errors: bool, momentum: float) -> None:
    """Raise ValueError unless `part` is what a state contains for a parameter."""
    wanted = dict.fromkeys([*_LAYOUT, "errors", "mask", *(["momentum"] if momentum else [])])
    check_same_state(key, dict.fromkeys(part) if isinstance(part, dict) else part, wanted)
    for name in _LAYOUT:
        if type(part[name]) is not list or any(type(n) is not int or n < 0 for n in part[name]):
            _refuse(f"{key}: {name}", part[name], "a list of whole numbers >= 0")
    like = torch.empty(math.prod(part["shape"]), dtype=torch.float32, device="meta")
    check_same_state(f"{key}: errors", part["errors"], like if keeps_errors else None)
    check_same_state(f"{key}: momentum", part.get("momentum"), like if momentum else None)
    for name in ("errors", "momentum"):
        if part.get(name) is not None and not part[name].isfinite().all():
            raise ValueError(f"{key}: {name}: got NaN or infinity, allowed: finite numbers")
    if part["mask"] is not None:
        check_same_state(f"{key}: mask", part["mask"], like.bool())


def _parts(names: tuple[Name, ...], client: BucketClient) -> dict[Name, dict[str, Tensor | None]]:
    """Return a bucket's errors and shared mask, and momentum if there is any, by the names of its
    parameters. Errors and momentum are views."""
    known, sizes = client.known, client.known.layer_sizes
    errors = [None] * len(sizes) if client.errors_D is None else client.errors_D.split(sizes)
    positions_K = cast(TCS, known.rule).positions
    masks = [None] * len(sizes)
    if positions_K is not None:
        masks = positions_to_mask(positions_K, known.dimension).split(sizes)
    found = zip(names, errors, masks, strict=True)
    parts = {name: {"errors": own, "mask": mask} for name, own, mask in found}
    if client.momentum_D is not None:
        for name, momentum in zip(names, client.momentum_D.split(sizes), strict=True):
            parts[name]["momentum"] = momentum
    return parts


# ══ 10. States that are loaded ════════════════════════════════════════════════════════════════════
#    Each `load_state_dict` first compares the whole state with its object, and only then assigns
#    the first part. (A `TCSState` without a model compares parameters in its next step.)

# Of every state_dict here but that of a rule, which is part of `Known`'s. Raise it when the keys or
# their meaning change.
STATE_VERSION = 2


def check_state_version(key: str, given: Any) -> None:
    """Raise ValueError unless `given` is a state of this version.

    `key` names the kind of object that the state belongs to, for the error message.
    """
    if not isinstance(given, dict):
        got = f"got a {type(given).__name__}"
        raise ValueError(f"{key}: {got}, allowed: a dictionary, as state_dict() returns it")
    if "version" not in given:
        got = f"got a dictionary without `version`, with the keys {shorten(list(given))}"
        way = "what state_dict() of this class returned (earlier versions of it cannot be loaded)"
        raise ValueError(f"{key}: {got}, allowed: {way}")
    version = given["version"]
    if type(version) is not int or version != STATE_VERSION:
        way = "load it with the version of tcs_core that saved it, or begin anew"
        raise ValueError(
            f"{key}: version: got {shorten(version)}, allowed: {STATE_VERSION} ({way})"
        )


def check_same_state(key: str, given: Any, like: Any) -> None:
    """Raise ValueError unless `given` can replace `like`, a state of the object that loads it.

    Dictionaries need the same keys, lists the same length, tensors the same shape and dtype, and
    all other values the same type (a whole number may replace a float). Values are not compared.
    `key` names the state; the error names the part of it that differs, what it is and what is
    allowed.
    """
    if isinstance(like, dict):
        if not isinstance(given, dict):
            raise ValueError(f"{key}: got a {type(given).__name__}, allowed: a dictionary")
        missing, unknown = like.keys() - given.keys(), given.keys() - like.keys()
        if missing or unknown:
            names = "is missing" if missing else "is not known"
            raise ValueError(f"{key}: {', '.join(sorted(map(str, missing or unknown)))} {names}")
        for name, value in like.items():
            check_same_state(f"{key}: {name}", given[name], value)
    elif isinstance(like, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(like):
            got = len(given) if isinstance(given, list | tuple) else f"a {type(given).__name__}"
            raise ValueError(f"{key}: got {got}, allowed: {len(like)} entries")
        for place, value in enumerate(like):
            check_same_state(f"{key}: {place}", given[place], value)
    elif isinstance(like, Tensor):
        wanted = f"{tuple(like.shape)} {like.dtype}"
        if not isinstance(given, Tensor):
            raise ValueError(f"{key}: got {shorten(given)}, allowed: a tensor {wanted}")
        if given.shape != like.shape or given.dtype != like.dtype:
            got = f"{tuple(given.shape)} {given.dtype}"
            raise ValueError(f"{key}: got shape {got}, allowed: {wanted}")
    elif type(given) is not type(like) and not (type(like) is float and type(given) is int):
        wanted = "none" if like is None else f"a {type(like).__name__}"
        raise ValueError(f"{key}: got {shorten(given)}, allowed: {wanted}")


def _by_value(value: Any) -> Any:
    """Return a copy for a state, at any depth: tensors are cloned, and numpy's numbers become
    Python's."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {_number(key): _by_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inside = [_by_value(inner) for inner in value]
        return inside if isinstance(value, list) else tuple(inside)
    return copy.deepcopy(_number(value))


def scheme_state(scheme: Scheme) -> dict[str, Any]:
    """Return the fields of a scheme that differ from their defaults, for a state.

    States therefore stay the same if a later version adds a field with a default.
    """
    fields = dataclasses.fields(scheme)
    return {f.name: getattr(scheme, f.name) for f in fields if getattr(scheme, f.name) != f.default}


def check_same_scheme(key: str, given: Any, like: Scheme) -> None:
    """Raise ValueError if a state's scheme (see `scheme_state`) differs from this one.

    The error names the fields that differ. A field that is missing in the state has its default.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{key}: got a {type(given).__name__}, allowed: a dictionary")
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Scheme)}
    defaults["name"] = None  # the name has no default, so a state without it is refused
    if unknown := given.keys() - defaults.keys():
        raise ValueError(f"{key}: {', '.join(sorted(map(str, unknown)))} is not known")
    said = []
    for field, allowed in dataclasses.asdict(like).items():
        got = given.get(field, defaults[field])
        if type(got) is not type(allowed) or got != allowed:
            said.append(f"{field}: got {shorten(got)}, allowed: {allowed!r}")
    if said:
        raise ValueError(f"{key}: {'; '.join(said)}")
