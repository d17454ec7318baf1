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

import argparse
import ast
import contextlib
import ctypes
import dataclasses
import glob
import hashlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import reprlib
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parent

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


# Where and how fast a run is made; not part of what it is.
WHERE_KEYS = {"profile", "data_root", "threads", "device", "graph"}


@dataclass(frozen=True)
class RunConfig:
    """One training run: scheme, data, model, federation, schedule. Fields in the paper's units."""

    scheme: Scheme
    learning_rate: float = _param(
        0.5, float, "a positive number up to 1e6", _positive,
        "eta at a cumulative batch of reference_batch (Tables 1 and 2: 0.5, 0.8)",
    )  # fmt: skip
    seed: int = _param(
        0, int, "a whole number >= 0, below 2^32", lambda v: 0 <= v < 2**32,
        "seed of everything random",
    )  # fmt: skip
    profile: str = _param(
        "ci", str, "up to 64 letters, digits, - and _",
        lambda v: re.fullmatch(r"[\w-]{1,64}", v) is not None,
        "folder under results/",
    )  # fmt: skip
    dataset: str = _param(
        "synthetic", str, "synthetic, cifar10 or folder",
        lambda v: v in ("synthetic", "cifar10", "folder"), "what is learned",
    )  # fmt: skip
    data_root: str | None = _param(
        None,
        str,
        "a path, or null",
        _text(4000),
        "cifar10: download folder; folder: a folder or a tar",
    )
    data_label: str | None = _param(
        None,
        str,
        "a name of up to 200 characters, or null",
        _text(200),
        "data set's name in tables",
    )
    train_samples: int | None = _param(
        None, int, "a whole number >= 1, or null for all", _whole, ""
    )
    test_samples: int | None = _param(None, int, "a whole number >= 1, or null for all", _whole, "")
    image_size: int | None = _param(
        None, int, "a whole number from 1 to 256, or null for images as they are",
        lambda v: 1 <= v <= 256,
        "pixels a side; smaller than the images: each pixel the mean of an area",
    )  # fmt: skip
    model: str = _param(
        "resnet18", str, "resnet18 or resnet8", lambda v: v in STAGES, "depth, Sec. III-A"
    )
    width: int = _param(
        64, int, "a whole number from 1 to 1024", lambda v: 1 <= v <= 1024,
        "channels of the first stage",
    )  # fmt: skip
    clients: int = _param(10, int, "a whole number >= 1", _whole, "N, Sec. III-A")
    participation: float = _param(
        1.0, float, "a share in (0, 1]", lambda v: 0 < v <= 1, "clients drawn each round, Alg. 1"
    )
    batch_size: int = _param(64, int, "a whole number >= 1", _whole, "B, samples a local step")
    epochs: int = _param(
        300, int, "a whole number from 1 to 1000000", lambda v: 1 <= v <= 10**6,
        "passes over the data",
    )  # fmt: skip
    warmup_epochs: int | None = _param(
        None, int, "a whole number >= 0, or null for 1/60 of the epochs", lambda v: 0 <= v <= MOST,
        "dense epochs with a rising learning rate, Sec. III-B",
    )  # fmt: skip
    warmup_learning_rate: float = _param(
        0.1,
        float,
        "a positive number up to 1e6",
        _positive,
        "eta of the first round, scaled like eta",
    )
    drops: tuple[float, ...] = _param(
        (0.5, 0.75), tuple, "shares of the epochs in (0, 1), rising",
        lambda v: all(isinstance(x, float) and 0 < x < 1 for x in v) and list(v) == sorted(v),
        "when eta is divided by 10, Sec. III-B",
    )  # fmt: skip
    reference_batch: int | None = _param(
        640, int, "a whole number >= 1, or null for no scaling", _whole,
        "cumulative batch at which learning_rate holds (10 clients x 64), linear scaling",
    )  # fmt: skip
    weight_decay: float = _param(
        1e-4, float, "a number from 0 to 1e6", lambda v: 0 <= v <= 1e6, "L2, in the local gradient"
    )
    dirichlet_alpha: float | None = _param(
        None,
        float,
        "a number from 1e-6 to 1e6, or null for IID",
        lambda v: 1e-6 <= v <= 1e6,
        "class skew among clients",
    )
    precision: str = _param(
        "fp32", str, "fp32 or bf16", lambda v: v in ("fp32", "bf16"), "autocast of the passes"
    )
    wire: bool = _param(
        False, bool, "true or false", lambda v: True,
        "every message becomes bytes and is decoded; the same numbers, slower",
    )  # fmt: skip
    bad_message: str = _param(
        "stop", str, "stop or skip", lambda v: v in ("stop", "skip"),
        "with wire: a client's message that can't be accepted ends the run, or is left out",
    )  # fmt: skip
    graph: bool = _param(
        False, bool, "true or false", lambda v: True,
        "rounds of static shapes, on a GPU one CUDA graph; the same masks, numbers to rounding",
    )  # fmt: skip
    threads: int | None = _param(
        None, int, "a whole number from 1 to 1024, or null", lambda v: 1 <= v <= 1024, "CPU threads"
    )
    device: str = _param(
        "auto", str, "auto, cpu, cuda or cuda:<n>",
        lambda v: re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", v) is not None, "where it runs",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if isinstance(self.scheme, str):
            object.__setattr__(self, "scheme", Scheme.named(self.scheme))
        _check_fields(self)
        if self.warmup > max(1, self.epochs - 1):
            raise ValueError(
                f"warmup_epochs: got {self.warmup}, allowed: less than epochs ({self.epochs})"
            )
        if self.bad_message != "stop" and not self.wire:
            raise ValueError(f"bad_message: got {self.bad_message!r}, allowed without wire: 'stop'")

    # Derived numbers. Centralized training is one client with twice the batch, eta = 0.1 at 128 and
    # no warm-up, whatever the federated settings beside it say (Sec. III-B).

    @property
    def client_count(self) -> int:
        return 1 if self.scheme.centralized else self.clients

    @property
    def batch(self) -> int:
        """Samples of one client's local step."""
        return 2 * self.batch_size if self.scheme.centralized else self.batch_size

    @property
    def participants(self) -> int:
        """Clients that take part in a round."""
        share = 1.0 if self.scheme.centralized else self.participation
        return kept(share, self.client_count)

    @property
    def warmup(self) -> int:
        """Epochs at the start that are dense, with a rising learning rate, or sparse with larger
        masks, without: errors that pile up are a soft start too. As configured, or the paper's 5 of
        300 in proportion. None where the scheme is as sparse as ever from the first round."""
        sparse_start = not self.scheme.dense_warmup and self.scheme.warmup_masks == 1
        if self.scheme.centralized or sparse_start:
            return 0
        if self.warmup_epochs is None:
            return max(1, round(self.epochs / 60))
        return self.warmup_epochs

    @property
    def scale(self) -> float:
        """Linear scaling: cumulative batch over the batch at which the learning rate holds.

        Centralized training has a fifth of the federated rate at a fifth of the batch, 0.1 at 128
        beside 0.5 at 640 (Sec. III-B): one rule for both."""
        if self.reference_batch is None:
            return 1.0
        reference = self.reference_batch / 5 if self.scheme.centralized else self.reference_batch
        return self.participants * self.batch / reference

    @property
    def eta(self) -> float:
        """The table's learning rate; centralized training has the paper's 0.1."""
        return 0.1 if self.scheme.centralized else self.learning_rate

    def learning_rate_at(self, epoch: float) -> float:
        """eta_t at a fractional epoch, counted from 0: linear warm-up, then steps down by 10."""
        if epoch < self.warmup and self.scheme.dense_warmup:
            start = self.warmup_learning_rate
            return self.scale * (start + (self.eta - start) * epoch / self.warmup)
        passed = sum(epoch >= share * self.epochs for share in self.drops)
        return self.scale * self.eta * 0.1**passed

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run: JSON types only. Where and how fast is left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values = {k: v for k, v in fields.items() if k not in {"scheme", *WHERE_KEYS}}
        values["drops"] = list(self.drops)
        values |= {
            "learning_rate": self.eta,
            "clients": self.client_count,
            "batch_size": self.batch,
        }
        values["warmup_epochs"] = self.warmup
        if self.scheme.centralized:
            values |= {"participation": 1.0, "dirichlet_alpha": None, "warmup_learning_rate": None}
            if self.reference_batch is not None:
                values["reference_batch"] = self.reference_batch // 5
        return {
            "scheme": dataclasses.asdict(self.scheme),
            **values,
            **_rule_source(self.scheme.rule),
        }

    @property
    def digest(self) -> str:
        return digest_of(self.identity())

    @property
    def record_name(self) -> str:
        return _record_file({"config": self.identity(), "digest": self.digest})

    @property
    def torch_device(self) -> torch.device:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(auto if self.device == "auto" else self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            there = torch.cuda.device_count()
            raise ValueError(f"device: got {self.device!r}, allowed here: cpu and {there} GPUs")
        return device


def _record_file(record: dict[str, Any]) -> str:
    config = record["config"]
    safe = re.sub(r"[^\w.+-]+", "_", config["scheme"]["name"])
    return f"{safe}-{config['learning_rate']:g}-{config['seed']}-{record['digest']}.json"


def digest_of(identity: dict[str, Any]) -> str:
    """Ten hex digits that name a run. Fields at their default do not enter, so that a field added
    later, with a default that means "as before", leaves the names of older records alone."""

    def changed(values: dict[str, Any], cls: type) -> dict[str, Any]:
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
        defaults["drops"] = list(defaults.get("drops", ()))
        return {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}

    named = changed(identity, RunConfig) | {"scheme": changed(identity["scheme"], Scheme)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:10]


def _rule_source(rule: str) -> dict[str, str]:
    """A rule from outside this module is part of a run's identity: a changed rule is a new run."""
    outside = [c for c in RULES[rule].__mro__ if c.__module__ not in (__name__, "builtins")]
    if not outside:
        return {}
    members = [item for cls in outside for item in sorted(vars(cls).items())]
    own = [(n, v) for n, v in members if inspect.isfunction(v) or not n.startswith("__")]
    parts = [_member_source(name, value) for name, value in own]
    return {"rule_sha256": hashlib.sha256("\n".join(parts).encode()).hexdigest()}


def _member_source(name: str, value: Any) -> str:
    """A method as its source (a class in a notebook has none as a whole), anything else as text."""
    try:
        return inspect.getsource(value) if inspect.isfunction(value) else f"{name} = {value!r}"
    except OSError:
        code = value.__code__
        return f"{name} {code.co_code.hex()} {code.co_names} {code.co_consts}"


def _is_paper(value: dict) -> bool:
    """Scheme: [accuracy %, standard deviation, bit budget], each a number or null."""
    rows = [v for v in value.values() if isinstance(v, list | tuple) and len(v) == 3]
    numbers = [x for row in rows for x in row if x is not None]
    return len(rows) == len(value) and all(
        type(x) in (int, float) and -1e9 < x < 1e9 for x in numbers
    )


# What a table says of itself, beside fields of RunConfig.
TABLE_FIELDS = {
    "table": _param(None, int, "a whole number >= 1, or null", _whole, ""),
    "figure": _param(None, int, "a whole number >= 1, or null", _whole, ""),
    "title": _param(None, str, "up to 1000 characters, or null", _text(1000), ""),
    "paper": _param(None, dict, "scheme: [accuracy, deviation, bits], or null", _is_paper, ""),
    "jobs": _param(1, int, "a whole number from 1 to 256", lambda v: 1 <= v <= 256, ""),
}
TABLE_KEYS = {*TABLE_FIELDS, "schemes", "seeds"}
SCHEME_KEYS = {"phi_global", "phi_local", "phi_down", "phi_min_global", "phi_min_local"}
RUN_KEYS = {f.name for f in dataclasses.fields(RunConfig)} - {"scheme", "seed"}


PARAMETERS = TABLE_KEYS | SCHEME_KEYS | RUN_KEYS


def notebook_params(namespace: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    """The known parameters among a notebook's variables; call it with globals().

    papermill only warns of unknown parameters: here a name that it injected raises ValueError if
    it is neither a parameter of runs nor in the notebook's own cell of parameters. So does, unless
    `complete` is false, a profile that leaves out a key for which the notebook's own default, made
    for profile ci, is not the core's.
    """
    injected, own = _papermill_names(namespace)
    _reject_unknown(injected, PARAMETERS | own, "parameter")
    params = {key: namespace[key] for key in sorted(PARAMETERS) if key in namespace}
    defaults = {f.name: f.default for f in dataclasses.fields(RunConfig)}
    for key in sorted(
        params.keys() & RUN_KEYS - injected if complete and "profile" in injected else ()
    ):
        if params[key] != defaults[key] and params[key] != list(defaults["drops"]):
            raise ValueError(
                f"{key}: profile {params['profile']} does not set it, and the notebook's "
                f"{params[key]!r} is for profile ci; allowed: a profile with {key} in it"
            )
    return params


def check_notebook_params(namespace: dict[str, Any]) -> None:
    """For notebooks that know their own parameters only: ValueError if papermill brought others."""
    _reject_unknown(*_papermill_names(namespace), "parameter")


def _papermill_names(namespace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """What papermill assigned, and what the cell before it did: the notebook's own parameters."""
    injected, own = set[str](), set[str]()
    for before, cell in itertools.pairwise(["", *namespace.get("In", [])]):
        if cell.startswith("# Parameters\n"):
            injected, own = injected | _assigned(cell), own | _assigned(before)
    return injected, own


def _assigned(cell: str) -> set[str]:
    nodes = ast.parse(cell).body
    targets = [t for n in nodes for t in getattr(n, "targets", [getattr(n, "target", None)])]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def plan(params: dict[str, Any]) -> list[RunConfig]:
    """Every run that a table and a profile ask for, scheme by scheme, seed by seed.

    `params` is what params/table1.yaml and params/quick.yaml say together: `schemes` (names),
    `seeds` (how many, or a list) and fields of RunConfig; phi_global, phi_local, phi_min_global and
    phi_min_local replace the value of every scheme that has one, as does phi_down (which grows with
    phi_global if it is not given).
    Raises ValueError naming the key, the value and what is allowed.
    """
    _reject_unknown(params, PARAMETERS, "parameter")
    phis = {f.name: f for f in dataclasses.fields(Scheme) if f.name in SCHEME_KEYS}
    for key, field_ in (TABLE_FIELDS | phis).items():
        if key in params:
            _check_value(key, params[key], dict(field_.metadata))
    names = params.get("schemes")
    if not isinstance(names, list | tuple) or not 0 < len(names) <= 1000:
        raise ValueError(f"schemes: got {_shown(names)}, allowed: a list of scheme names")
    seeds = _seeds(params.get("seeds", 1))
    fields = {k: v for k, v in params.items() if k in RUN_KEYS}
    schemes = [_named_with(name, params) for name in names]
    return [RunConfig(scheme=s, seed=seed, **fields) for s in schemes for seed in seeds]


def _seeds(given: Any) -> list[int]:
    if type(given) is int and 1 <= given <= 10_000:
        return list(range(given))
    seeds = list(given) if isinstance(given, list | tuple) else []
    if seeds and all(type(s) is int and 0 <= s < 2**32 for s in seeds):
        return seeds
    raise ValueError(
        f"seeds: got {_shown(given)}, allowed: a number of seeds from 1 to 10000 or a list of them"
    )


def _named_with(name: Any, params: dict[str, Any]) -> Scheme:
    """The named scheme with the phis that `params` replaces, where the scheme has one at all."""
    if not isinstance(name, str):
        raise ValueError(f"schemes: got [{_shown(name)}], allowed: scheme names (text)")
    scheme = Scheme.named(name)
    given = {k: params[k] for k in SCHEME_KEYS if params.get(k) is not None}
    if scheme.rule == "dense":
        return scheme
    changes = {k: v for k, v in given.items() if getattr(scheme, k) is not None}
    whole = "phi_local" if scheme.phi_global is None else "phi_global"
    if scheme.phi_down is not None and whole in changes:
        ratio = scheme.phi_down / getattr(scheme, whole)
        changes = {"phi_down": min(1.0, ratio * changes[whole])} | changes
    return dataclasses.replace(scheme, **changes)


class _Loader(yaml.SafeLoader):
    """safe_load, but a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"{_cut(twice[0])} stands twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _read_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())  # an error is one line
        raise ValueError(f"{source}: not readable as YAML: {why}") from error


MAX_PARAMS_BYTES = 1 << 20


def read_params(paths: Iterable[str | Path]) -> dict[str, Any]:
    """YAML files merged, the later over the earlier. ValueError names a file that is no mapping."""
    merged: dict[str, Any] = {}
    for path in map(Path, paths):
        if path.is_file() and path.stat().st_size > MAX_PARAMS_BYTES:
            raise ValueError(f"{path}: allowed: at most {MAX_PARAMS_BYTES} bytes of parameters")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not readable as YAML: {error}") from error
        loaded = _read_yaml(text, str(path))
        if not isinstance(loaded, dict):
            raise ValueError(
                f"{path}: got {type(loaded).__name__}, allowed: a mapping of parameters"
            )
        merged |= loaded
    return merged


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
# 7. The federation: local training, FedAvg, global momentum (Alg. 1, 3)
#    All clients live in one process and take turns on one model. A client's backward passes add up
#    in one flat gradient, which Eq. 3's factor takes into its row of deltas_ND.
# ══════════════════════════════════════════════════════════════════════════════════════════════════

Row = dict[str, Any]  # of a record: what one epoch did

# Purposes of random numbers; with seed, epoch, client they name one independent stream each, so
# that no draw depends on the order of work, the number of processes or where a run was resumed.
_INIT, _PARTITION, _SAMPLING, _PARTICIPANTS, _MASKS = range(5)


def generator_for(seed: int, *path: int) -> torch.Generator:
    """The CPU generator of one purpose: the same numbers for the same (seed, path), everywhere."""
    state = np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class Federation:
    """N clients and a server on one machine (Alg. 1 with Alg. 2's compression, or Alg. 3).

    `theta_D`, `deltas_ND`, `statistics_NS` and `compressor` are the whole state, beside
    `momentum_D`. Over several `ranks`, N is the number of this rank's `own` clients, and what the
    server knows is the same on all of them. Raises ValueError if the data can't feed the configured
    clients, batches or local steps.
    """

    def __init__(self, config: RunConfig, data: Dataset, ranks: Ranks | None = None):
        self.config, self.device, self.fingerprint = config, config.torch_device, data.fingerprint
        clients, self.ranks = config.client_count, ranks or Ranks()
        self.own = self.ranks.own(clients)
        self.samples_NM = _client_samples(config, data)[self.own.start : self.own.stop]
        self.batches = Batches(data, self.device)
        self.staged: dict[int, Staged] = {}
        if self.ranks.size > 1:
            self.samples_NM = self.batches.keep(self.samples_NM)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(config.seed, _INIT).initial_seed())
            model = build_model(config.model, config.width, data.classes)
        self.flat = FlatModel(model.to(self.device))
        self.theta_D, dimension = self.flat.theta_D, len(self.flat.theta_D)
        self.start_D = torch.empty_like(self.theta_D) if config.scheme.local_steps > 1 else None
        self.deltas_ND = torch.zeros(len(self.own), dimension, device=self.device)
        self.statistics_NS = self.flat.statistics().repeat(len(self.own), 1)
        self.statistics_views = [self.flat.statistics_views(row) for row in self.statistics_NS]
        self.momentum_D = torch.zeros_like(self.theta_D) if config.scheme.momentum else None
        sizes, seed = self.flat.layer_sizes, config.seed * 8 + _MASKS
        wire = (config.wire, config.bad_message, self.ranks)
        self.compressor = Compressor(config.scheme, sizes, clients, self.device, seed, *wire)
        self.static = StaticRound(self) if config.graph and StaticRound.suits(self) else None
        self.active = list(range(clients))
        self.loss_sums_N = torch.zeros(len(self.own), device=self.device)

    @property
    def loss_sum(self) -> Tensor:
        """All local steps' losses in this epoch so far: the clients' own sums, added up."""
        return self.ranks.rows(self.loss_sums_N).sum()

    @property
    def rounds_per_epoch(self) -> int:
        return self.samples_NM.shape[1] // self.config.batch // self.config.scheme.local_steps

    def rounds(self, epoch: int) -> Iterator[Tensor]:
        """The rounds of one epoch (counted from 0), each as the update_D (D,) it sent to all.

        Between two of them, `theta_D`, `deltas_ND` and `compressor` may be looked at.
        Raises NotFiniteError, or MessageError, with the round in its text; theta_D is as after the
        last good round.
        """
        self.loss_sums_N.zero_()
        self._widen(epoch)
        draws, count = self._draws(epoch), self.rounds_per_epoch
        for index in range(count):
            eta = self.config.learning_rate_at(epoch + index / count)
            self.active = self._participants(epoch, index)
            try:
                dense = epoch < self.config.warmup and self.config.scheme.dense_warmup
                yield self.round(draws, index, eta, dense)
            except ClientError as error:
                error.args = (f"{error.args[0]}; epoch {epoch + 1}, round {index + 1} of {count}",)
                raise

    def epoch(self, epoch: int) -> Row:
        """All rounds of one epoch; its row of the record, without the evaluation."""
        row = {"epoch": epoch + 1, "rounds": self.rounds_per_epoch, "dense_rounds": 0}
        traffic = ("bits_up", "bits_down", "bytes_up", "bytes_down")
        row |= dict.fromkeys(traffic, 0)
        self._widen(epoch)
        static = self.static is not None and self.static.ready(epoch)
        if isinstance(self.compressor.rule, TCS):
            self.compressor.rule.shared.zero_()
        watch = Watch(self.flat.layer_sizes) if self.config.scheme.dense else None
        for update_D in self.static.rounds(epoch) if static else self.rounds(epoch):
            if watch:
                watch.see(update_D)
            for key in traffic:
                row[key] += getattr(self.compressor, key)
            row["dense_rounds"] += self.compressor.last_dense
            if self.config.bad_message == "skip":  # messages left out
                row["refused"] = row.get("refused", 0) + len(self.compressor.refused)
        steps = row["rounds"] * self.config.scheme.local_steps * len(self.active)
        eta = self.config.learning_rate_at(epoch + 1 - 1 / row["rounds"])
        self.ranks.check_same(self.theta_D, f"theta_D after epoch {epoch + 1}")
        row |= {"learning_rate": eta, "train_loss": float(self.loss_sum) / steps}
        return row | self._mask_overlap() | (watch.row() if watch else {})

    def _widen(self, epoch: int) -> None:
        """Larger masks in a sparse warm-up, and no longer after it."""
        scheme = self.config.scheme
        if scheme.warmup_masks > 1:
            self.compressor.rule.widen(scheme.warmup_masks if epoch < self.config.warmup else 1)

    def _mask_overlap(self) -> Row:
        """Which share of the shared mask was in it a round before, in this epoch so far."""
        rule = self.compressor.rule
        kept, total = rule.shared.tolist() if isinstance(rule, TCS) else (0, 0)
        return {"mask_overlap": kept / total} if total else {}

    def _draws(self, epoch: int) -> list[Draws]:
        """Every own client's order of samples, crops and flips for one epoch."""
        steps = self.rounds_per_epoch * self.config.scheme.local_steps
        seeds = [(self.config.seed, _SAMPLING, epoch, n) for n in self.own]
        need = steps * self.config.batch
        return [
            Draws.of(samples_M, need, generator_for(*seed)).to(self.device)
            for samples_M, seed in zip(self.samples_NM, seeds, strict=True)
        ]

    def _participants(self, epoch: int, index: int) -> list[int]:
        if self.config.participants == self.config.client_count:
            return list(range(self.config.client_count))
        generator = generator_for(self.config.seed, _PARTICIPANTS, epoch, index)
        order = torch.randperm(self.config.client_count, generator=generator)
        return sorted(order[: self.config.participants].tolist())

    def round(
        self, draws: list[Draws], index: int | Tensor, eta: float | Tensor, dense: bool = False,
        compress: Callable[..., Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Round `index` of an epoch: local training, compression, the server's step; update_D.

        A static round gives `index` and `eta` as tensors, and its own `compress`.
        """
        scheme, compress = self.config.scheme, compress or self.compressor.step
        if not self.flat.model.training:
            self.flat.model.train()
        scale = 1.0 if scheme.momentum else -eta  # Eq. 3: gradients to a model difference
        for row in [self.own.index(n) for n in self.active if n in self.own]:
            self._local_training_(row, draws[row], index, eta)
            torch.mul(self.flat.gradient_D, scale, out=self.deltas_ND[row])
        update_D = compress(self.deltas_ND, dense, self.active)
        if scheme.momentum:
            self.momentum_D.mul_(scheme.momentum).add_(update_D)  # Alg. 3, line 7
            _descend(self.theta_D, self.momentum_D, eta, out=self.theta_D)  # Alg. 3, line 8
        else:
            self.theta_D.add_(update_D)  # Alg. 2, line 6
        return update_D

    def _local_training_(
        self, n: int, draws: Draws, index: int | Tensor, eta: float | Tensor
    ) -> None:
        """Alg. 1, l. 3 to 6: H steps of client n; its summed gradients are in `flat.gradient_D`."""
        config, theta_D = self.config, self.theta_D
        steps, batch = config.scheme.local_steps, config.batch
        gradient_D = torch.mul(theta_D, config.weight_decay, out=self.flat.gradient_D)
        self.flat.use(self.statistics_views[n])
        if steps > 1:
            self.start_D.copy_(theta_D)  # line 3
        for tau in range(steps):
            first = (index * steps + tau) * batch
            images, labels = self._batch(n, draws, first)
            loss = self._loss(images, labels)
            loss.backward()  # line 5; adds to gradient_D
            self.loss_sums_N[n].add_(loss.detach())
            if tau + 1 < steps:
                _descend(self.start_D, gradient_D, eta, out=theta_D)  # line 6
                gradient_D.add_(theta_D, alpha=config.weight_decay)
        if steps > 1:
            theta_D.copy_(self.start_D)

    def _batch(self, n: int, draws: Draws, first: int | Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, h, w) and labels (B,) from `first` on; augmented many batches at a time."""
        if isinstance(first, Tensor):
            return self.batches.augmented(draws.at(first + self.static.offsets))
        staged = self.staged.get(n)
        if staged is None or staged.draws is not draws or first not in staged.batches:
            self.staged[n] = staged = self._stage(draws, first)
        return staged.batches[first]

    def _stage(self, draws: Draws, first: int) -> Staged:
        size = self.config.batch
        ahead = max(1, _STAGED_SAMPLES // len(self.samples_NM) // size) * size
        images, labels = self.batches.augmented(draws[first : first + ahead])
        pairs = zip(images.split(size), labels.split(size), strict=True)
        return Staged(draws, dict(zip(range(first, first + len(labels), size), pairs, strict=True)))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            scores = self.flat.model(images)
        return F.cross_entropy(scores.float(), labels)

    def _autocast(self) -> contextlib.AbstractContextManager:
        enabled = self.config.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    @torch.no_grad()
    def evaluate(self, batch: int = 500) -> dict[str, float]:
        """Accuracy (0..1) and mean loss on the test images; the clients' statistics averaged. Sums
        are over so many images as `batch` says, and ranks share them out so."""
        self.flat.model.eval()
        average_S = self.ranks.rows(self.statistics_NS)[self.active].mean(0)
        self.flat.use(self.flat.statistics_views(average_S))
        count = len(self.batches.test_labels)
        starts, found = range(0, count, batch), []
        for start in (starts[i] for i in self.ranks.own(len(starts))):
            images, labels = self.batches.test(slice(start, start + batch))
            pieces = images.split(batch if self.device.type == "cuda" else _CACHED_IMAGES)
            with self._autocast():
                scores = torch.cat([self.flat.model(piece) for piece in pieces]).float()
            loss = float(F.cross_entropy(scores, labels, reduction="sum"))
            found.append((loss, int((scores.argmax(1) == labels).sum())))
        found = self.ranks.rows(torch.tensor(found, dtype=torch.float64).view(-1, 2)).tolist()
        loss, right = (sum(column) for column in zip(*found, strict=True))
        return {"accuracy": right / count, "loss": loss / count}

    def state_dict(self) -> dict[str, Any]:
        state = {"theta_D": self.theta_D, "statistics_NS": self.statistics_NS}
        state |= {"active": self.active, "compressor": self.compressor.state_dict()}
        return state if self.momentum_D is None else state | {"momentum_D": self.momentum_D}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in ("theta_D", "statistics_NS"):
            _restore_(getattr(self, key), state[key], key)
        self.active = list(state["active"])
        self.compressor.load_state_dict(state["compressor"])
        if self.momentum_D is not None:
            _restore_(self.momentum_D, state["momentum_D"], "momentum_D")


class Watch:
    """How slowly the important entries of dense updates change: "update_overlap", the share of an
    update's 1 % largest entries (the paper's phi_global) that were among those of the one before,
    and "update_overlap_chance", what masks with as many entries in every layer would share by
    chance. Means over the rounds seen, but for the first."""

    def __init__(self, layer_sizes: list[int], phi: float = 1e-2):
        self.sizes_L = torch.tensor(layer_sizes)
        self.k, self.before_K = kept(phi, sum(layer_sizes)), None
        self.found: list[tuple[float, float]] = []
        self.floor = 0.0

    def see(self, update_D: Tensor) -> None:
        now_K, kth = _filtered(update_D, self.k, None, self.floor)
        before_K, self.before_K, self.floor = self.before_K, now_K, 0.85 * kth
        if before_K is not None:
            chance = (self._layers(before_K) * self._layers(now_K) / self.sizes_L).sum()
            self.found.append((int(in_common(before_K, now_K)) / self.k, float(chance) / self.k))

    def _layers(self, positions_K: Tensor) -> Tensor:
        """How many of the positions every layer has, (L,)."""
        layers = torch.bucketize(positions_K.cpu(), self.sizes_L.cumsum(0), right=True)
        return torch.bincount(layers, minlength=len(self.sizes_L))

    def row(self) -> Row:
        names = ("update_overlap", "update_overlap_chance")
        means = torch.tensor(self.found, dtype=torch.float64).mean(0).tolist()
        return dict(zip(names, means, strict=True)) if self.found else {}


def _descend(start_D: Tensor, gradient_D: Tensor, eta: float | Tensor, out: Tensor) -> None:
    """start - eta * gradient, into `out`."""
    if isinstance(eta, Tensor):
        torch.addcmul(start_D, gradient_D, eta, value=-1.0, out=out)
    else:
        torch.add(start_D, gradient_D, alpha=-eta, out=out)


def _client_samples(config: RunConfig, data: Dataset) -> Tensor:
    """Which training samples each client has, (N, M); ValueError if they are too few."""
    total, clients = len(data.train_labels), config.client_count
    if clients > total:
        raise ValueError(f"clients: got {clients}, allowed: at most the {total} training samples")
    own = total // clients
    if config.batch > own:
        raise ValueError(
            f"batch_size: got {config.batch_size} (a step of {config.batch} samples), "
            f"allowed: at most the {own} samples of a client"
        )
    if config.scheme.local_steps > own // config.batch:
        raise ValueError(
            f"local_steps: got {config.scheme.local_steps} ({config.scheme.name}), allowed: at "
            f"most {own // config.batch}, the batches of {config.batch} in a client's {own} samples"
        )
    alpha = None if config.scheme.centralized else config.dirichlet_alpha
    generator = generator_for(config.seed, _PARTITION)
    return partition(data.train_labels, clients, alpha, generator)


# Static rounds ────────────────────────────────────────────────────────────────────────────────────
#    A GPU is fast if the host never waits for it: then no shape may depend on a value, and no value
#    may be looked at. Every message of TCS and top-K has a fixed size, so that a whole round can be
#    like that; on a GPU it is captured once as a CUDA graph and replayed.


def static_top_k(magnitudes_D: Tensor, k: int) -> Tensor:
    """S_top without looking at a value: int64 (k,), ascending; of ties the lower index wins."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=magnitudes_D.device)
    kth = magnitudes_D.topk(k, sorted=False).values.min()
    above, tied = magnitudes_D > kth, magnitudes_D == kth
    chosen = above | (tied & (tied.cumsum(0, dtype=torch.int32) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k, fill_value=0).squeeze(1)  # 0: a NaN among them


class StaticRound:
    """Rounds of a federation with static shapes and no host synchronization.

    `Federation.round` with `Compressor.step` is the reference: the same masks, the same numbers to
    rounding. What the host needs to know (entries explored, updates that are not finite) stays on
    the device until the epoch's end.
    """

    def __init__(self, federation: Federation):
        device, config = federation.device, federation.config
        self.federation = weakref.proxy(federation)  # which holds this: freed without a collection
        self.compressor = federation.compressor
        shape = (federation.rounds_per_epoch, config.client_count)
        self.index = torch.zeros((), dtype=torch.int64, device=device)
        self.eta = torch.zeros((), device=device)
        self.offsets = torch.arange(config.batch, device=device)
        self.explored_T = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self.finite_TN = torch.ones(shape, dtype=torch.bool, device=device)
        self.draws: list[Draws] = []
        self.graph: Any = None
        self.held: list[Tensor | None] = []  # what the graph was captured with

    @staticmethod
    def suits(federation: Federation) -> bool:
        """Whether static rounds can stand in for the sparse rounds of this federation."""
        config, scheme = federation.config, federation.config.scheme
        fair = scheme.phi_min_global is not None or scheme.phi_min_local is not None
        plain = scheme.code == "block" and not scheme.compresses_downlink and not config.wire
        everyone = config.participants == config.client_count and federation.ranks.size == 1
        return RULES[scheme.rule] in (TCS, TopK) and plain and everyone and not fair

    def ready(self, epoch: int) -> bool:
        """Whether all rounds of this epoch are sparse: no warm-up, and a first mask is there."""
        warm = epoch < self.federation.config.warmup
        mask = self.compressor.rule.global_mask()
        return not warm and mask is not None and len(mask) == self.compressor.rule.k_global

    def rounds(self, epoch: int) -> Iterator[None]:
        """All rounds of an epoch; then, one by one, what each left in the compressor's counts.

        Raises NotFiniteError, naming client and round, after the epoch; the state is then void.
        """
        federation, count = self.federation, self.federation.rounds_per_epoch
        federation.loss_sums_N.zero_()
        self._take(federation._draws(epoch))
        for index in range(count):
            self.play(index, federation.config.learning_rate_at(epoch + index / count))
        self.compressor.round += count
        for index, n in (~self.finite_TN).nonzero().tolist()[:1]:
            error = NotFiniteError(n)
            error.args = (f"{error.args[0]}; epoch {epoch + 1}, round {index + 1} of {count}",)
            raise error
        for explored in self.explored_T.tolist():
            self._count(explored)
            yield

    def _count(self, explored: int) -> None:
        compressor, rule = self.compressor, self.compressor.rule
        shared, clients = rule.k_global, self.finite_TN.shape[1]
        up = compressor.up.block_code_bits(shared + rule.k_local, rule.k_local)
        down = compressor.down.block_code_bits(shared + explored, explored)
        sizes = [(bits, OVERHEAD_BYTES + -(-bits // 8)) for bits in (up, down)]
        compressor._count([sizes[0]] * clients, sizes[1])
        compressor.last_dense = False

    def _take(self, draws: list[Draws]) -> None:
        """This epoch's samples, in the buffers that the graph reads."""
        self.draws = self.draws or draws
        for buffer, new in zip(self.draws, draws, strict=True):
            for name in ("samples", "crops", "flips"):
                getattr(buffer, name).copy_(getattr(new, name))

    def play(self, index: int, eta: float) -> None:
        """Round `index` of the epoch whose draws were taken."""
        self.index.fill_(index)
        self.eta.fill_(eta)
        if self.federation.device.type != "cuda":
            self._round()
            return
        with torch.cuda.device(self.federation.device):
            if self.graph is None or any(one is not two for one, two in self._masks_and_held()):
                self.graph, self.held = self._captured(), self._masks()
            self.graph.replay()

    def _masks(self) -> list[Tensor | None]:
        """What eager rounds and checkpoints put another tensor in the place of."""
        return [getattr(self.compressor.rule, name, None) for name in ("positions", "shared")]

    def _masks_and_held(self) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        return zip(self._masks(), self.held, strict=True)

    def _captured(self) -> Any:
        """The round as a CUDA graph. What the trial rounds before it change is put back."""
        before = [(tensor, tensor.clone()) for tensor in self._state()]
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

    def _state(self) -> list[Tensor]:
        federation, masks = self.federation, self._masks()
        state = [federation.theta_D, federation.statistics_NS, federation.loss_sums_N]
        state += [self.compressor.errors_ND, self.explored_T, self.finite_TN]
        return state + [t for t in (federation.momentum_D, *masks) if t is not None]

    def _round(self) -> None:
        self.federation.active = list(range(len(self.draws)))
        self.federation.round(self.draws, self.index, self.eta, compress=self._compress)

    def _compress(self, deltas_ND: Tensor, *_: object) -> Tensor:
        """`Compressor._sparse_round`, its values never looked at."""
        rule, explored_D = self.compressor.rule, self.compressor._explored_D.zero_()
        global_K, update_D = rule.global_mask(), torch.zeros_like(deltas_ND[0])
        finite_N = []
        for n, delta_D in enumerate(deltas_ND):
            local_K, sent, finite = self._client(n, delta_D, global_K)
            finite_N.append(finite)
            update_D.index_add_(0, torch.cat([global_K, local_K]), sent)
            explored_D.index_fill_(0, local_K, True)
        update_D.div_(len(deltas_ND))
        now = self.index.view(1)
        self.finite_TN.index_copy_(0, now, torch.stack(finite_N).view(1, -1))
        self.explored_T.index_copy_(0, now, explored_D.sum().view(1))
        if rule.k_global:
            next_K = static_top_k(update_D.abs(), rule.k_global)
            rule.count_shared(global_K, next_K)
            global_K.copy_(next_K)
        return update_D

    def _client(self, n: int, delta_D: Tensor, global_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One client's own positions, the values it sends, and whether they are finite."""
        errors_D, scheme = self.compressor.errors_ND[n], self.compressor.scheme
        keep_errors = scheme.error_accumulation
        intended_D = errors_D.add_(delta_D) if keep_errors else errors_D.copy_(delta_D)
        magnitudes_D = intended_D.abs().index_fill_(0, global_K, -1.0)
        local_K = static_top_k(magnitudes_D, self.compressor.rule.k_local)
        positions = torch.cat([global_K, local_K])
        intended = sent = intended_D.index_select(0, positions)
        if scheme.intervals:
            quantize = _quantize if scheme.quantizer == "fractional" else _lloyd_max
            sent = _dequantize(*quantize(intended, scheme.intervals))
        errors_D.scatter_(0, positions, intended - sent)
        return local_K, sent, intended.isfinite().all() & delta_D.sum().isfinite()


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
# 9. Data and partition
#    Images stay uint8, on the device that trains; crop, flip and normalization are tensor
#    operations on a batch. Three sources: synthetic (no download), cifar10 (torchvision), folder
#    (or a tar).
# ══════════════════════════════════════════════════════════════════════════════════════════════════

PADDING = 4  # pixels around an image, for random crops


@dataclass(frozen=True)
class Dataset:
    """Images (n, h, w, 3) uint8 and labels (n,) int64 on the CPU; `fingerprint` is their sha256."""

    label: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    fingerprint: str
    classes: int = 10

    def first(self, train: int | None, test: int | None) -> Dataset:
        """Only the first so many samples; ValueError if there are fewer."""
        for key, want, labels in (
            ("train_samples", train, self.train_labels),
            ("test_samples", test, self.test_labels),
        ):
            if want is not None and want > len(labels):
                raise ValueError(
                    f"{key}: got {want}, allowed: at most {len(labels)} ({self.label})"
                )
        cut = (self.train_images[:train], self.train_labels[:train])
        cut += (self.test_images[:test], self.test_labels[:test])
        return Dataset(self.label, *cut, self.fingerprint, self.classes)

    def resized(self, size: int | None) -> Dataset:
        """Images of size x size pixels, each the mean of an area; None: as they are. Training takes
        that much less arithmetic. ValueError for more pixels than there are."""
        side = min(self.train_images.shape[1:3])
        if size is None or (size, size) == self.train_images.shape[1:3]:
            return self
        if type(size) is not int or not 1 <= size <= side:
            raise ValueError(f"image_size: got {size!r}, allowed: 1 to {side} ({self.label})")
        train, test = (_areas(i, size) for i in (self.train_images, self.test_images))
        label, arrays = f"{self.label}, {size} x {size}", (train, self.train_labels, test)
        return _dataset(label, *arrays, self.test_labels, classes=self.classes)


def _areas(images: Tensor, size: int) -> Tensor:
    """(n, h, w, 3) to (n, size, size, 3) uint8, each pixel the mean of the area it stands for."""
    pieces = [i.permute(0, 3, 1, 2).float() for i in images.split(1000)]
    means = [F.adaptive_avg_pool2d(piece, size).round().byte() for piece in pieces]
    return torch.cat(means).permute(0, 2, 3, 1).contiguous()


def _dataset(label: str, *arrays: np.ndarray | Tensor, classes: int = 10) -> Dataset:
    tensors = [torch.as_tensor(a) for a in arrays]
    return Dataset(label, *tensors, _fingerprint(tensors), classes)


def _fingerprint(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()


@cache
def load_dataset(name: str, root: str | Path | None = None, label: str | None = None) -> Dataset:
    """A data set by name: "synthetic", "cifar10" or "folder".

    `root` is cifar10's download folder (default: the cache folder) or, for "folder", a folder or
    tar of train/<class>/* and test/<class>/*. `label` is its name in tables. Loaded once a process.
    Raises ValueError or FileNotFoundError that say what is wrong and what to do.
    """
    if name == "synthetic":
        return synthetic_dataset()
    if name == "cifar10":
        return _cifar10(_user_path(root) if root else cache_folder() / "cifar10", label)
    if name == "folder":
        return _folder_dataset(root, label)
    raise ValueError(f"dataset: got {name!r}, allowed: synthetic, cifar10, folder")


def _user_path(root: str | Path) -> Path:
    try:
        return Path(root).expanduser()
    except RuntimeError as error:
        raise ValueError(f"data_root: {_shown(str(root))}: {error}") from error


def cache_folder() -> Path:
    """Where decoded data and checkpoints live: $TCS_CACHE, or tcs-core in the user's cache."""
    try:
        if given := os.environ.get("TCS_CACHE"):
            return Path(given).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcs-core"
    except RuntimeError as error:  # no home folder
        raise ValueError(f"the cache folder: {error} Set $TCS_CACHE to a folder") from error


def synthetic_dataset(train: int = 8000, test: int = 2000, seed: int = 2021) -> Dataset:
    """Ten classes of 32x32 RGB images, made from a seed.

    A class is a smooth pattern; an image is its class's, shifted by up to 4 pixels and perhaps
    mirrored, over a fainter pattern of any class, with noise.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10, 3, 6, 6, generator=generator)
    patterns = F.interpolate(patterns, 32, mode="bicubic", align_corners=False)
    patterns = (patterns / patterns.std((1, 2, 3), keepdim=True)).permute(0, 2, 3, 1)
    labels = torch.randint(0, 10, (train + test,), generator=generator)
    parts = [_synthetic_images(patterns, part, generator) for part in labels.split(1000)]
    halves = [t for i in (torch.cat(parts), labels) for t in i.split([train, test])]
    return _dataset("synthetic", halves[0], halves[2], halves[1], halves[3])


def _synthetic_images(patterns: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """(n, 32, 32, 3) uint8 images of the labels' classes, from patterns (10, 32, 32, 3)."""
    count = len(labels)

    def shifted(which: Tensor) -> Tensor:
        offset = torch.randint(-4, 5, (count, 2, 1), generator=generator)
        rows, columns = ((torch.arange(32) + offset) % 32).unbind(1)
        mirror = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(mirror, columns.flip(1), columns)
        pixels = (32 * which[:, None, None] + rows[:, :, None]) * 32 + columns[:, None, :]
        return F.embedding(pixels, patterns.reshape(-1, 3))

    other = torch.randint(0, 10, (count,), generator=generator)
    noise = torch.randn(count, 32, 32, 3, generator=generator)
    mixed = shifted(labels).add_(shifted(other).mul_(SYNTHETIC_OTHER))
    mixed.add_(noise.mul_(SYNTHETIC_NOISE))
    return mixed.mul_(32).add_(128).round_().clamp_(0, 255).byte()


SYNTHETIC_OTHER, SYNTHETIC_NOISE = 0.8, 1.5  # strengths beside a class's own pattern


def _cifar10(root: Path, label: str | None) -> Dataset:
    from torchvision.datasets import CIFAR10

    try:
        with _alone(root, _say_waiting):  # two downloads into one folder spoil each other
            parts = [CIFAR10(str(root), train=train, download=True) for train in (True, False)]
    except Exception as error:  # torchvision raises what urllib, tarfile and pickle raise
        raise ValueError(
            f"dataset cifar10: {root} holds no whole CIFAR-10 and the download failed ({error}). "
            f"Delete a partial file there and try again with a network; or put "
            f"{CIFAR10.filename} (md5 {CIFAR10.tgz_md5}) there; or use dataset: synthetic"
        ) from error
    arrays = [a for part in parts for a in (part.data, np.asarray(part.targets, np.int64))]
    return _dataset(label or "CIFAR-10", *arrays)


MAX_IMAGE_BYTES, MAX_IMAGE_SIDE = 1 << 20, 256  # of one file, and in pixels
MAX_DATASET_BYTES = 4 << 30  # of all images, decoded
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")  # Pillow knows others that start programs


def _folder_dataset(root: str | Path | None, label: str | None) -> Dataset:
    """Class folders, or a tar of them, decoded once into the cache."""
    if root is None:
        raise ValueError("data_root: got None, allowed: a folder or tar with train/<class>/* in it")
    path = _user_path(root)
    if not path.exists():
        raise FileNotFoundError(f"data_root: {path} does not exist")
    cached = cache_folder() / "datasets" / f"{_source_key(path)}.npz"
    label = label or path.name.split(".")[0]
    if found := _read_cached(cached, label):
        return found
    with _alone(cached, lambda _: _say_waiting(f"the images in {path}")):
        if found := _read_cached(cached, label):
            return found
        files = _tar_files(path) if path.is_file() else _folder_files(path)
        dataset = _decode_files(files, path, label)
        arrays = {k: getattr(dataset, k).numpy() for k in _ARRAYS}
        sealed = {"fingerprint": dataset.fingerprint, "classes": dataset.classes}
        _write_whole(cached, lambda f: np.savez(f, **arrays, **sealed))
        return dataset


_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def _read_cached(path: Path, label: str) -> Dataset | None:
    """The decoded data set, or None if there is no file, or not the one that was written."""
    try:
        with np.load(path, allow_pickle=False) as z:
            dataset = _dataset(label, *(z[k] for k in _ARRAYS), classes=int(z["classes"]))
            return dataset if dataset.fingerprint == str(z["fingerprint"]) else None
    except Exception:
        return None


def _source_key(path: Path) -> str:
    """Changes when the source does: a tar's content; a folder's names, sizes and times."""
    sha = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()[:32]
    for file in sorted(path.rglob("*")):
        _check_link(file, path)
        status = file.stat()
        sha.update(os.fsencode(file.relative_to(path)))
        sha.update(f" {status.st_size} {status.st_mtime_ns}\n".encode())
    return sha.hexdigest()[:32]


def _check_link(file: Path, root: Path) -> None:
    if not file.exists() or not file.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{root}: {file.name!r} is a link that leads nowhere, or outside")


def _folder_files(root: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(root.rglob("*")):
        if file.is_file():
            _check_size(str(file), file.stat().st_size)
            yield file.relative_to(root).as_posix(), file.read_bytes()


class _Member(tarfile.TarInfo):
    """Of any member, also one that only holds a long name, the declared size is checked first."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        member = super().frombuf(buf, encoding, errors)
        _check_size(member.name, member.size)
        return member


def _tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files of an archive, any compression; nothing is unpacked to disk."""
    try:
        with tarfile.open(path, tarinfo=_Member) as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or ".." in Path(member.name).parts or member.name[0] == "/":
                    raise ValueError(f"{path}: {member.name!r} is a link or points outside")
                _check_size(f"{path}: {member.name}", member.size)
                yield member.name.removeprefix("./"), archive.extractfile(member).read()
            archive.fileobj.seek(archive.offset)
            end = archive.fileobj.read(1 << 20)  # reading on to the end checks a compressed stream
            if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
                raise EOFError("no end-of-archive mark")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not a whole tar archive ({error}); fetch it again") from error
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: broken archive ({error}); fetch it again") from error


def _check_size(name: str, size: int) -> None:
    if size > MAX_IMAGE_BYTES:
        raise ValueError(f"{name}: {size} bytes, allowed: at most {MAX_IMAGE_BYTES}")


def _decode_files(files: Iterable[tuple[str, bytes]], source: Path, label: str) -> Dataset:
    """train/<class>/* and test/<class>/* as arrays; classes in alphabetical order."""
    images: dict[str, list[tuple[str, str, np.ndarray]]] = {"train": [], "test": []}
    shape, size = None, 0
    for name, content in tqdm(files, desc=f"decoding {source.name}", unit=" images", leave=False,
                              disable=not sys.stderr.isatty()):  # fmt: skip
        parts = name.split("/")
        if len(parts) != 3 or parts[0] not in images or parts[2].startswith("."):
            continue
        pixels = _decode_image(f"{source}: {name}", content)
        shape = shape or pixels.shape
        if pixels.shape != shape:
            raise ValueError(
                f"{source}: {name}: size {pixels.shape}, allowed: {shape}, as the first"
            )
        size += pixels.nbytes
        if size > MAX_DATASET_BYTES:
            raise ValueError(f"{source}: allowed: at most {MAX_DATASET_BYTES} bytes, decoded")
        images[parts[0]].append((parts[1], parts[2], pixels))
    classes = sorted({c for c, _, _ in images["train"]})
    if len(classes) < 2 or {c for c, _, _ in images["test"]} != set(classes):
        found = sorted({c for c, _, _ in images["test"]})
        raise ValueError(
            f"{source}: classes {classes} in train/, {found} in test/; "
            "allowed: the same two or more, as train/<class>/* and test/<class>/*"
        )
    arrays: list[np.ndarray] = []
    for part in images.values():
        part.sort(key=lambda entry: entry[:2])
        arrays.append(np.stack([pixels for _, _, pixels in part]))
        arrays.append(np.array([classes.index(c) for c, _, _ in part], np.int64))
    return _shuffled(_dataset(label, *arrays, classes=len(classes)))


def _shuffled(dataset: Dataset) -> Dataset:
    """In a fixed random order, so that the first n samples are of all classes."""
    arrays = []
    for images, labels in (
        (dataset.train_images, dataset.train_labels),
        (dataset.test_images, dataset.test_labels),
    ):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        arrays += [images[order], labels[order]]
    return _dataset(dataset.label, *arrays, classes=dataset.classes)


def _decode_image(name: str, content: bytes) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            if max(image.size) > MAX_IMAGE_SIDE:
                raise ValueError(f"{image.size} pixels, allowed: {MAX_IMAGE_SIDE} a side at most")
            if image.mode != "RGB":
                raise ValueError(f"mode {image.mode}, allowed: RGB")
            return np.asarray(image, np.uint8)
    except Exception as error:  # Pillow's decoders raise many kinds
        raise ValueError(f"{name}: not a readable RGB image ({error})") from error


def partition(
    labels: Tensor, clients: int, alpha: float | None, generator: torch.Generator
) -> Tensor:
    """Disjoint, equally many samples for every client: (N, floor(n / N)) int64.

    `alpha` None deals them out at random (IID). Otherwise a client's classes follow its own draw
    from a Dirichlet distribution with that alpha, as far as samples of the class are left.
    """
    own = len(labels) // clients
    order = torch.randperm(len(labels), generator=generator)
    if alpha is None:
        return order[: own * clients].view(clients, own)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    rng, shuffled = np.random.default_rng(seed), labels[order].numpy()
    classes = int(labels.max()) + 1
    pools = [order[torch.from_numpy(shuffled == c)] for c in range(classes)]
    used = np.zeros(classes, np.int64)
    sizes = np.array([len(pool) for pool in pools])
    rows = []
    for _ in range(clients):
        share = rng.dirichlet(np.full(classes, alpha))
        counts = _class_counts(share, sizes - used, own, rng)
        rows.append(torch.cat([p[u : u + c] for p, u, c in zip(pools, used, counts, strict=True)]))
        used += counts
    return torch.stack(rows)


def _class_counts(
    share: np.ndarray, left: np.ndarray, need: int, rng: np.random.Generator
) -> np.ndarray:
    """How many of each class: drawn by `share`, redrawn over the rest where a class runs out."""
    counts = np.zeros_like(left)
    while (missing := need - counts.sum()) > 0:
        open_share = np.where(left > counts, share + 1e-12, 0.0)
        drawn = rng.multinomial(missing, open_share / open_share.sum())
        counts = np.minimum(counts + drawn, left)
    return counts


@dataclass(frozen=True)
class Draws:
    """A client's samples, in order, each with its crop offset (2,) and its flip."""

    samples: Tensor
    crops: Tensor
    flips: Tensor

    @staticmethod
    def of(samples_M: Tensor, need: int, generator: torch.Generator) -> Draws:
        """`need` draws without replacement from a client's samples."""
        order = torch.randperm(len(samples_M), generator=generator)[:need]
        crops = torch.randint(0, 2 * PADDING + 1, (need, 2), generator=generator)
        return Draws(samples_M[order], crops, torch.rand(need, generator=generator) < 0.5)

    def __getitem__(self, part: slice) -> Draws:
        return Draws(self.samples[part], self.crops[part], self.flips[part])

    def at(self, where: Tensor) -> Draws:
        return Draws(self.samples[where], self.crops[where], self.flips[where])

    def to(self, device: torch.device) -> Draws:
        return Draws(*(t.to(device) for t in (self.samples, self.crops, self.flips)))


_STAGED_SAMPLES = 4096  # augmented ahead, of all clients together
_CACHED_IMAGES = 100  # evaluated at once on a CPU, for the sake of its cache


@dataclass(frozen=True)
class Staged:
    """The next batches of one client's `draws`, augmented, by the first sample of each."""

    draws: Draws
    batches: dict[int, tuple[Tensor, Tensor]]


class Batches:
    """A data set on the training device: augmented training batches, plain test batches."""

    def __init__(self, data: Dataset, device: torch.device):
        pixels = data.train_images.numpy().reshape(-1, 3)
        part = pixels[:: max(1, len(pixels) // 4_000_000)].astype(np.float64)
        self.mean = self._everywhere(part.mean(0), data, device)
        self.scale = self._everywhere(1 / np.maximum(part.std(0), 1.0), data, device)
        padding = (0, 0, PADDING, PADDING, PADDING, PADDING)
        padded = F.pad(data.train_images.to(device), padding)
        self.padded = padded.contiguous()  # (n, h + 8, w + 8, 3) uint8
        self.train_labels = data.train_labels.to(device)
        self.test_images = data.test_images.to(device)
        self.test_labels = data.test_labels.to(device)

    @staticmethod
    def _everywhere(colours: np.ndarray, data: Dataset, device: torch.device) -> Tensor:
        """A number a colour as (h, w, 3): broadcasting three at a time takes six times as long."""
        numbers = torch.tensor(colours, dtype=torch.float32, device=device)
        return numbers.expand(data.train_images.shape[1:]).contiguous()

    def keep(self, samples_NM: Tensor) -> Tensor:
        """Drops all training samples but these; where each is from now on, (N, M) int64."""
        places = samples_NM.reshape(-1).to(self.padded.device)
        self.padded, self.train_labels = self.padded[places], self.train_labels[places]
        return torch.arange(len(places)).view_as(samples_NM)

    def normalized(self, pixels: Tensor) -> Tensor:
        """(B, h, w, 3) uint8 to (B, 3, h, w) float32, channels last in memory."""
        return pixels.float().sub_(self.mean).mul_(self.scale).permute(0, 3, 1, 2)

    def augmented(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Cropped and flipped images (B, 3, h, w) float32 and labels (B,) of the draws."""
        count, height, width, colours = self.padded.shape
        lines, pixels = height - 2 * PADDING, width - 2 * PADDING
        most = ((count - 1) * height + 2 * PADDING) * width + 2 * PADDING  # a crop starts there
        crops = self.padded.as_strided(
            (most + 1, lines, pixels * colours), (colours, width * colours, 1)
        )
        starts = (draws.samples * height + draws.crops[:, 0]) * width + draws.crops[:, 1]
        images = crops.index_select(0, starts).view(-1, lines, pixels, colours)
        images = _mirrored(images, draws.flips)
        return self.normalized(images), self.train_labels[draws.samples]

    def test(self, part: slice) -> tuple[Tensor, Tensor]:
        return self.normalized(self.test_images[part]), self.test_labels[part]


def _mirrored(images: Tensor, flips_B: Tensor) -> Tensor:
    """(B, h, w, 3) uint8, those with a flip from right to left; chosen in words, not in bytes."""
    plain, mirrored = images.flatten(1), images.flip(2).flatten(1)
    word = torch.int64 if plain.shape[1] % 8 == 0 else torch.uint8
    chosen = torch.where(flips_B.view(-1, 1), mirrored.view(word), plain.view(word))
    return chosen.view(torch.uint8).view_as(images)


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 10. Runs, records, checkpoints
#     One run, one JSON record: results/<profile>/runs/<scheme>-<eta>-<seed>-<hash>.json, written
#     whole or not at all. Checkpoints live in the cache folder and disappear with the end of their
#     run.
# ══════════════════════════════════════════════════════════════════════════════════════════════════

RECORD_VERSION = 1


def run(
    config: RunConfig,
    results: str | Path | None = None,
    on_epoch: Callable[[Row], None] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Train one configuration and return its record; a record or checkpoint that exists is used.

    `results` is the results folder (default: the one beside this module). `on_epoch` is called with
    every row as it is made. An update that is not finite ends the run: its record has status
    "diverged", says at which client and round, and holds the epochs before. If another process
    makes the same run, this one waits for it (and says so on stderr) and takes its record. With
    several `ranks` (`joined_ranks`) all of them call this; rank 0 writes, all return the record.
    Raises ValueError or FileNotFoundError for data or files that can't be used.
    """
    ranks = ranks or Ranks()
    while (record := _run(config, results, on_epoch, _say_waiting, ranks)) is None:
        time.sleep(_POLL_SECONDS)  # of several ranks none may wait alone
    return record


def _run(
    config: RunConfig, results: str | Path | None, on_epoch: Callable[[Row], None] | None,
    waiting: Callable[[str], None] | None, ranks: Ranks,
) -> dict[str, Any] | None:  # fmt: skip
    """`run`; without a `waiting` it gives None at once if another process makes the run."""
    path = record_path(config, results)
    if ranks.first(path.exists):
        return ranks.first(lambda: read_record(path, config))
    with contextlib.ExitStack() as until:
        alone = _alone(_checkpoint_path(config), waiting if ranks.size == 1 else None)
        if not ranks.first(lambda: until.enter_context(alone)):
            return None
        if ranks.first(path.exists):  # made while this process waited
            return ranks.first(lambda: read_record(path, config))
        source = (config.dataset, config.data_root, config.data_label)
        data = ranks.in_turn(lambda: load_dataset(*source))
        data = data.first(config.train_samples, config.test_samples).resized(config.image_size)
        with _arithmetic(config.threads), _memory_kept():
            record = _train(config, data, on_epoch, ranks)
        return ranks.first(lambda: _keep_record(path, record, config))


def _keep_record(path: Path, record: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    _write_whole(path, lambda f: f.write(text.encode()))
    _checkpoint_path(config).unlink(missing_ok=True)
    _sweep(_checkpoint_path(config))
    return record


def _train(
    config: RunConfig, data: Dataset, on_epoch: Callable[[Row], None] | None, ranks: Ranks
) -> dict[str, Any]:
    _git_state()  # now: the code may be edited while this runs
    federation = ranks.together(lambda: Federation(config, data, ranks))
    rows, ways = _load_checkpoint(config, federation)
    ways += [way for way in [_rounding(config)] if way not in ways]
    status, reason, saved = "finished", None, _Pace()
    for epoch in range(len(rows), config.epochs):
        start = time.perf_counter()
        try:
            row = federation.epoch(epoch) | federation.evaluate()
        except NotFiniteError as error:
            status, reason = "diverged", str(error)
            break
        losses = {"training": row["train_loss"], "test": row["loss"]}
        if wrong := [which for which, loss in losses.items() if not math.isfinite(loss)]:
            status, reason = "diverged", f"the {wrong[0]} loss is not finite; epoch {epoch + 1}"
            break
        rows.append(row | {"seconds": round(time.perf_counter() - start, 3)})
        if on_epoch:
            on_epoch(rows[-1])
        if epoch + 1 < config.epochs and ranks.first(saved.due):
            saved.took(lambda: _save_checkpoint(config, federation, rows, ways))
    return _record(config, federation, data, rows, ways, status, reason)


class _Pace:
    """Spends at most a twentieth of the time on checkpoints."""

    def __init__(self) -> None:
        self.next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self.next

    def took(self, work: Callable[[], None]) -> None:
        start = time.monotonic()
        work()
        self.next = time.monotonic() + 20 * (time.monotonic() - start)


@contextlib.contextmanager
def _arithmetic(threads: int | None) -> Iterator[None]:
    """So many CPU threads; and fp32 is fp32 on a GPU too, whose convolutions would be in TF32."""
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads or before[0])
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def _memory_kept() -> Iterator[None]:
    """What a step frees, the next one asks for again: meanwhile glibc keeps it.

    By default the kernel gets it back and clears every page anew, which is about a tenth of a round
    of ResNet-18. Without glibc nothing changes.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        yield
        return
    _TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_MMAP_THRESHOLD, 2**30)
    try:
        yield
    finally:  # the most that glibc sets by itself for programs that free large blocks
        libc.mallopt(_TRIM_THRESHOLD, 2**26)
        libc.mallopt(_MMAP_THRESHOLD, 2**25)
        libc.malloc_trim(0)


def record_path(config: RunConfig, results: str | Path | None = None) -> Path:
    return results_folder(config.profile, results) / "runs" / config.record_name


def results_folder(profile: str, results: str | Path | None = None) -> Path:
    return (Path(results) if results else ROOT / "results") / profile


def _record(
    config: RunConfig, federation: Federation, data: Dataset, rows: list[Row],
    ways: list[dict[str, Any]], status: str, reason: str | None,
) -> dict[str, Any]:  # fmt: skip
    made = provenance(config, federation.ranks) | {
        "dataset": data.label,
        "fingerprint": data.fingerprint,
    }
    if len(ways) > 1:
        made |= {"repeats": _REPEATS["mixed"], "ways": ways}
    made["wall_seconds"] = round(sum(row["seconds"] for row in rows), 1)
    record = {
        "version": RECORD_VERSION,
        "digest": config.digest,
        "status": status,
        "reason": reason,
        "config": config.identity(),
        "dimension": len(federation.theta_D),
        "batch_norm_bits": 32 * federation.statistics_NS.shape[1],
        "rows": rows,
        "provenance": made,
    }
    return record | {"sha256": _content_sha256(record)}


def _content_sha256(record: dict[str, Any]) -> str:
    """Of a record without its own "sha256": an accident or a slip of the hand is noticed. (Whoever
    wants to deceive can compute it anew.)"""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_REPEATS = {
    "cpu": "bit for bit, on this kind of processor with these threads and versions",
    "cuda": "within rounding: sums on a GPU have no fixed order",
    "mixed": "within rounding: it went on from a checkpoint that was made in another of these ways",
}


def _rounding(config: RunConfig) -> dict[str, Any]:
    """What decides how sums are rounded, beside the code."""
    device = config.torch_device
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": config.threads or torch.get_num_threads(),
        "graph": config.graph,
    }


def provenance(config: RunConfig, ranks: Ranks | None = None) -> dict[str, Any]:
    """Which code, on which machine, when."""
    return {
        "core_sha256": core_sha256(),
        **_git_state(),
        "python": platform.python_version(),
        **_rounding(config),
        "ranks": ranks.size if ranks else 1,
        "repeats": _REPEATS[config.torch_device.type],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


_CORE_SHA256 = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # of what was imported


def core_sha256() -> str:
    """Of this module's file, as it was when it was imported."""
    return _CORE_SHA256


@cache
def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def _git_state() -> dict[str, Any]:
    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def read_record(path: str | Path, config: RunConfig | None = None) -> dict[str, Any]:
    """A record from its file, checked; ValueError names the file and what is wrong with it. With
    the `config` of a run that wants it, it must be that run's."""
    advice = "; delete it to run again" if config else ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable record ({error}){advice}") from error
    try:
        problem = _record_problem(record, config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"a value has the wrong type ({_cut(repr(error))})"
    if problem:
        raise ValueError(f"{path}: {problem}{advice}")
    return record


def config_of(record: dict[str, Any], **where: Any) -> RunConfig:
    """The configuration that makes a record's run again, in the same way; `where` sets what
    a record does not hold (data_root, device) or changes how it is made (threads, graph).

    Raises ValueError if this core has no such run: a rule from outside the module, a field that it
    does not know.
    """
    given, made = dict(record["config"]), record["provenance"]
    how = {"threads": made.get("threads"), "graph": made.get("graph", False)}
    scheme = Scheme(**given.pop("scheme"))
    if scheme.centralized:  # a record holds what centralized training makes of its settings
        given |= {"batch_size": given["batch_size"] // 2, "warmup_learning_rate": 0.1}
        if given["reference_batch"] is not None:
            given["reference_batch"] *= 5
    given = {key: value for key, value in given.items() if key != "rule_sha256"}
    _reject_unknown(given, RUN_KEYS | {"seed"}, "field of a record")
    config = RunConfig(scheme, **({"profile": "again"} | how | given | where))
    if config.digest != record["digest"]:
        raise ValueError(f"record {record['digest']}: its run, {config.digest}, is another here")
    return config


def differences(record: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two records of one run do not have in common, epoch by epoch, but for times: the first
    is the older. Numbers that only one of them has do not count."""
    found = []
    for was, row in zip(record["rows"], other["rows"], strict=False):
        keys = [k for k in was if k in row and k != "seconds" and was[k] != row[k]]
        found += [f"epoch {row['epoch']}: {k} {row[k]!r}, was {was[k]!r}" for k in keys]
    if len(record["rows"]) != len(other["rows"]):
        found.append(f"{len(other['rows'])} epochs, were {len(record['rows'])}")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _record_problem(record: Any, config: RunConfig | None) -> str | None:
    keys = {"version", "digest", "status", "config", "dimension", "rows", "provenance"}
    if not isinstance(record, dict) or not keys <= set(record):
        return f"not a record: allowed: a mapping with {', '.join(sorted(keys))}"
    if record["version"] != RECORD_VERSION:
        return f"version: got {record['version']!r}, allowed: {RECORD_VERSION}"
    if record["status"] not in ("finished", "diverged"):
        return f"status: got {record['status']!r}, allowed: finished or diverged"
    own = digest_of(record["config"])
    if own != record["digest"] or (config is not None and own != config.digest):
        return "config: is that of another run"
    if problem := _rows_problem(record["rows"]):
        return f"rows: {problem}"
    if record["status"] == "finished" and len(record["rows"]) != record["config"]["epochs"]:
        return f"rows: got {len(record['rows'])} epochs, allowed: {record['config']['epochs']}"
    if not _is_count(record["dimension"]) or not record["dimension"]:
        return f"dimension: got {_shown(record['dimension'])}, allowed: {WHOLE}"
    if record.get("sha256", own_sum := _content_sha256(record)) != own_sum:
        return "its content is not what was written (sha256)"
    return None


_COUNTS = ("epoch", "rounds", "dense_rounds", "bits_up", "bits_down")


def _rows_problem(rows: Any) -> str | None:
    needed = {"accuracy", *_COUNTS}
    if not isinstance(rows, list) or any(
        not isinstance(r, dict) or not needed <= set(r) for r in rows
    ):
        return f"allowed: a list of mappings with {', '.join(sorted(needed))}"
    if not all(type(r["accuracy"]) in (int, float) and 0 <= r["accuracy"] <= 1 for r in rows):
        return "accuracy outside 0..1"
    overlaps = [r["mask_overlap"] for r in rows if r.get("mask_overlap") is not None]
    if not all(type(v) in (int, float) and 0 <= v <= 1 for v in overlaps):
        return "mask_overlap outside 0..1"
    for key in (*_COUNTS, "bytes_up", "bytes_down"):
        if not all(_is_count(r.get(key, 0)) for r in rows):
            return f"{key}: allowed: whole numbers >= 0"
    if [r["epoch"] for r in rows] != list(range(1, len(rows) + 1)):
        return "epochs are missing"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _write_whole(path: Path, write: Callable[[Any], Any]) -> None:
    """The file appears complete under its name, or not at all, also if the process is killed.

    What a killed process left behind of an earlier try is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    file, part = _new_part(path)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(part, 0o644)
            if fcntl:
                os.replace(part, path)
        if not fcntl:  # Windows renames no open file, so nobody sweeps one away either
            os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def _new_part(path: Path) -> tuple[Any, Path]:
    """A new file beside `path`, open and locked, so that `_sweep` leaves it alone; its name."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
        file = os.fdopen(handle, "wb")
        if _try_lock(file) and os.path.exists(name):
            return file, Path(name)
        file.close()


def _sweep(path: Path) -> None:
    """Removes what killed processes left of `path`; a part that is being written is locked."""
    for part in path.parent.glob(f".{glob.escape(path.name)}-*.part"):
        with contextlib.suppress(OSError), part.open("r+b") as file:
            if _try_lock(file):
                part.unlink()


def _checkpoint_path(config: RunConfig) -> Path:
    return cache_folder() / "checkpoints" / f"{config.profile}-{config.record_name[:-5]}.pt"


def _save_checkpoint(
    config: RunConfig, federation: Federation, rows: list[Row], ways: list[dict[str, Any]]
) -> None:
    """One file, the same whatever the number of ranks; `ways` in which its rows were made."""
    state = {"identity": _state_identity(config, federation), "rows": json.dumps(rows)}
    state["ways"] = json.dumps(ways)
    state["federation"] = federation.ranks.merged(federation.state_dict())

    def write() -> None:
        state["sha256"] = _state_sha256(state)
        _write_whole(_checkpoint_path(config), lambda f: _torch_save(state, f))

    federation.ranks.first(write)


def _torch_save(state: dict[str, Any], file: Any) -> None:
    """torch.save; it says RuntimeError where the disk is full."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__ or error
        raise cause if isinstance(cause, OSError) else OSError(_cut(str(error))) from error


def _state_identity(config: RunConfig, federation: Federation) -> str:
    """A checkpoint continues the same run, on the same data, by the same code."""
    return f"{config.digest} {federation.fingerprint} {core_sha256()}"


def _state_sha256(state: dict[str, Any]) -> str:
    """torch.load does not notice a flipped bit."""
    sha = hashlib.sha256()

    def absorb(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                sha.update(f"{key}:".encode())
                absorb(value[key])
        elif isinstance(value, Tensor):
            sha.update(_fingerprint([value.cpu()]).encode())
        else:
            sha.update(f"{value!r};".encode())

    absorb({key: value for key, value in state.items() if key != "sha256"})
    return sha.hexdigest()


def _load_checkpoint(
    config: RunConfig, federation: Federation
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Puts the federation where the run stopped; its rows so far, and the ways they were made in.

    The state of other code or data is not used: the run starts afresh.
    """
    path, ranks, state = _checkpoint_path(config), federation.ranks, {}
    try:
        rows, ways = ranks.first(lambda: _read_checkpoint(config, federation, state))
        if rows:
            whole, clients = state.get("federation"), config.client_count
            federation.load_state_dict(ranks.split(whole, clients, federation.device))
        if sum(row["rounds"] for row in rows) != federation.compressor.round:
            raise ValueError("rows and state are of different rounds")
        return rows, ways
    except RankError:
        raise
    except Exception as error:  # unpickling hostile or cut-off files raises many kinds
        raise ValueError(f"{path}: not a usable checkpoint ({error}); delete it") from error


def _read_checkpoint(
    config: RunConfig, federation: Federation, state: dict[str, Any]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows and ways of a checkpoint that this run can go on from, if any; fills `state`."""
    path = _checkpoint_path(config)
    if not path.exists():
        return [], []
    state.update(torch.load(path, map_location=federation.device, weights_only=True))
    if state["identity"] != _state_identity(config, federation):
        return [], []
    if state["sha256"] != _state_sha256(state):
        raise ValueError("its content is not what was written")
    rows = json.loads(state["rows"])
    if problem := _rows_problem(rows) or ("" if rows else "there are none"):
        raise ValueError(f"rows: {problem}")
    if not rows:
        raise ValueError("it has no rows")
    return rows, json.loads(state["ways"])


# One at a time ────────────────────────────────────────────────────────────────────────────────────
#    A lock is a file in the cache folder that the operating system locks for a process: it ends
#    with the process, however that ends. Processes with different cache folders do not see each
#    other's: they may do the same work twice, but every file is still written whole.

_POLL_SECONDS = 0.2  # how often a waiting process looks again


def _try_lock(file: Any) -> bool:
    """Locks an open file for this process until it is closed; False if another process has it."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks: go on without
        return True
    return True


def _lock_file(path: Path) -> Any | None:
    """The open and locked file at `path`, made if need be; None if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+b")
        if not _try_lock(file):
            file.close()
            return None
        with contextlib.suppress(OSError):  # its last owner may have removed it meanwhile
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


@contextlib.contextmanager
def _alone(path: Path, waiting: Callable[[str], None] | None) -> Iterator[bool]:
    """One process at a time has the lock that belongs to `path`: True, or False if it is taken.

    With `waiting`, a function that is told what for, waits for the other process.
    """
    mark = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]
    lock = cache_folder() / "locks" / f"{path.stem[:80]}-{mark}.lock"
    file = _lock_file(lock)
    if file is None and waiting:
        waiting(path.stem)
        while file is None:
            time.sleep(_POLL_SECONDS)
            file = _lock_file(lock)
    try:
        yield file is not None
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # Windows removes no open file
                lock.unlink()
            file.close()


def _say_waiting(what: str) -> None:
    print(f"waiting for another process, which works on {what}", file=sys.stderr, flush=True)


# Many runs ────────────────────────────────────────────────────────────────────────────────────────


def run_all(
    configs: Iterable[RunConfig], results: str | Path | None = None, jobs: int = 1,
    progress: bool = True, ranks: Ranks | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every configuration's record, in order; made once where it is asked for twice.

    `jobs` processes work side by side (rules defined outside this module run in this one). A run
    that a process started elsewhere is making comes last, and its record is taken. A bar shows
    which run of how many, epoch, accuracy, bits and time left. With several `ranks` all walk the
    list together, whatever `jobs` says.
    """
    _check_value("jobs", jobs, dict(TABLE_FIELDS["jobs"].metadata))
    configs, ranks = list(configs), ranks or Ranks()
    jobs = jobs if ranks.size == 1 else 1
    wanted = {record_path(c, results): c for c in configs}
    missing = ranks.first(lambda: [not path.exists() for path in wanted])
    todo = [c for c, new in zip(wanted.values(), missing, strict=True) if new]
    apart = [c for c in todo if jobs > 1 and RULES[c.scheme.rule].__module__ == __name__]
    here = [c for c in todo if c not in apart]
    with Progress(todo, enabled=progress and not ranks.rank) as bar:
        if apart:
            _run_apart(apart, results, jobs, bar)
        _run_here(here, results, bar, ranks)
    records = ranks.first(lambda: [read_record(path, c) for path, c in wanted.items()])
    done = dict(zip(wanted, records, strict=True))
    return [done[record_path(c, results)] for c in configs]


def _run_here(
    configs: list[RunConfig], results: str | Path | None, bar: Progress, ranks: Ranks
) -> None:
    """The runs in this process, one by one; those that another process is making come last."""
    left = deque(configs)
    busy = 0  # runs in a row that others were making
    while left:
        config = left.popleft()
        if _run(config, results, lambda row, c=config: bar.epoch(c, row), None, ranks):
            bar.ended(config)
            busy = 0
            continue
        left.append(config)
        busy += 1
        if busy >= len(left):  # nothing else to do
            bar.waiting(config)
            time.sleep(_POLL_SECONDS)


_rows_queue: Any = None  # set in worker processes


def _start_worker(rows: Any) -> None:
    """In a worker process: it reports to `rows` and ends when the process that started it ends."""
    global _rows_queue
    _rows_queue = rows
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(config: RunConfig, results: str | Path | None) -> bool:
    """In a worker process: makes a run; False if a process started elsewhere is making it."""
    if _run(config, results, lambda row: _rows_queue.put((config.digest, row)), None, Ranks()):
        return True
    time.sleep(_POLL_SECONDS)
    return False


def _run_apart(
    configs: list[RunConfig], results: str | Path | None, jobs: int, bar: Progress
) -> None:
    """The runs in `jobs` processes, each with its share of the machine's threads: the same however
    many runs are left, so that a run that goes on has as many as before."""
    share = max(1, torch.get_num_threads() // jobs)
    load_dataset(configs[0].dataset, configs[0].data_root, configs[0].data_label)  # decode once
    context = multiprocessing.get_context("spawn")
    rows = context.SimpleQueue()
    with ProcessPoolExecutor(min(jobs, len(configs)), context, _start_worker, (rows,)) as pool:

        def submit(config: RunConfig) -> Future:
            own = dataclasses.replace(config, threads=config.threads or share)
            with _interrupts_held():
                return pool.submit(_work, own, results)

        try:
            _follow({submit(config): config for config in configs}, submit, rows, bar)
        except BaseException as error:
            workers = list(pool._processes.values())  # which shutdown forgets
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    "a worker process was killed (out of memory?); the same command goes on"
                ) from error
            raise


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C comes after the block; processes that are started inside do not see it at all."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(
    running: dict[Future, RunConfig], submit: Callable[[RunConfig], Future], rows: Any,
    bar: Progress,
) -> None:  # fmt: skip
    """Feeds the bar until all are done; then raises what the first failed run raised.

    A run that is made elsewhere goes to the end of the queue.
    """
    by_digest = {config.digest: config for config in running.values()}
    ended: list[Future] = []
    while running:
        done, _ = wait_for(running, _POLL_SECONDS, FIRST_COMPLETED)
        while not rows.empty():
            digest, row = rows.get()
            bar.epoch(by_digest[digest], row)
        for future in done:
            config = running.pop(future)
            if future.exception() is None and not future.result():
                bar.waiting(config)
                running[submit(config)] = config
            else:
                ended.append(future)
                bar.ended(config)
    for future in ended:
        future.result()


class Progress:
    """One line that follows runs: on a terminal, in a notebook, under papermill.

    In a notebook the line replaces itself and is gone at the end, so saved notebooks stay clean.
    """

    def __init__(self, configs: list[RunConfig], enabled: bool = True):
        self.left = {c.digest: c.epochs for c in configs}
        self.runs, self.finished = len(configs), 0
        self.enabled, self.told = enabled, set()
        notebook = _in_notebook()
        self.line = _NotebookLine() if notebook else None
        quiet = not enabled or not configs or not (notebook or sys.stderr.isatty())
        self.bar = tqdm(
            total=sum(self.left.values()), unit=" epochs", disable=quiet, leave=False,
            file=self.line or sys.stderr, mininterval=1.0 if notebook else 0.1,
            ncols=130 if notebook else None, ascii=False, dynamic_ncols=not notebook,
            bar_format="{desc} |{bar:16}| {n_fmt}/{total_fmt} epochs, {remaining} left",
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        shown = not self.bar.disable
        self.bar.close()
        if self.line and shown:
            self.line.clear()

    def epoch(self, config: RunConfig, row: Row) -> None:
        """Shows a row; one that another process sent before its run was counted may come late."""
        if config.digest not in self.left:
            return
        bits = row["bits_up"] / (row["rounds"] * config.scheme.local_steps)
        traffic = "" if config.scheme.centralized else f", {bits / 8e3:,.1f} kB up a step"
        self.left[config.digest] -= 1
        self.bar.set_description_str(
            f"run {min(self.finished + 1, self.runs)}/{self.runs}: {config.scheme.name} eta "
            f"{config.eta:g} seed {config.seed}, epoch {row['epoch']}/{config.epochs}, "
            f"{100 * row['accuracy']:.1f} %{traffic}",
            refresh=False,
        )
        self.bar.update(1)

    def waiting(self, config: RunConfig) -> None:
        """Says, once a run, that another process is making it."""
        if config.digest in self.told:
            return
        self.told.add(config.digest)
        what = f"{config.scheme.name} eta {config.eta:g} seed {config.seed}"
        if not self.bar.disable:
            self.bar.set_description_str(f"waiting for another process, which works on {what}")
        elif self.enabled:
            _say_waiting(what)

    def ended(self, config: RunConfig) -> None:
        """Counts the run; epochs that were reused, or never came, are taken off the total."""
        self.finished += 1
        self.bar.total -= self.left.pop(config.digest, 0)
        self.bar.refresh()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    shell = shell.get_ipython() if shell else None
    return shell is not None and hasattr(shell, "kernel")


class _NotebookLine(io.TextIOBase):
    """A text file for tqdm whose last line is the cell's only output."""

    def write(self, text: str) -> int:
        from IPython.display import clear_output

        line = text.strip("\r\n ")
        if line and "\x1b" not in line:
            clear_output(wait=True)
            print(line, flush=True)
        return len(text)

    def clear(self) -> None:
        from IPython.display import clear_output

        clear_output()


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 11. Ranks: one federation, many processes
#     torchrun --nproc-per-node 4 tcs_core.py run ... starts ranks; each has a block of the clients.
#     What crosses between them is the clients' encoded messages. Every rank decodes and averages
#     them in client order, so all know what the server knows, and a record is the same, bit for
#     bit, for any number of ranks.
# ══════════════════════════════════════════════════════════════════════════════════════════════════


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


_SHORT = 240  # bytes that travel with their length, in one collective
_PATIENCE = 3.0  # seconds in which ranks that saw a failure say so; those that did not are named
_LENGTH = struct.Struct("<Q")


class ProcessRanks(Ranks):
    """Ranks joined by torch.distributed: gloo between CPUs, nccl between GPUs.

    `store` is the key-value store that all were started with: before a rank waits for others it
    writes there how often it has, so that those who wait too long can say for whom.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, device: Any):
        self.rank, self.size, self.timeout, self.device = rank, size, timeout, device
        self._store, self._count = store, 0
        self._arrive()

    def exchange(self, work: Callable[[], list[bytes]]) -> list[list[bytes]]:
        error = None
        try:
            sent = _framed([b"", *work()])
        except Exception as raised:  # any: the others must not wait for a rank that went wrong
            error, sent = raised, _framed([_error_json(raised)])
        with self._waiting():
            parts = [_frames(part) for part in self._all_gathered(sent)]
        failed = [(rank, part[0]) for rank, part in enumerate(parts) if part[0]]
        if failed:
            raise _first_error(failed, self.rank, error)
        return [part[1:] for part in parts]

    def together(self, work: Callable[[], Any]) -> Any:
        done: list[Any] = []
        self.exchange(lambda: done.append(work()) or [])
        return done[0]

    def first(self, work: Callable[[], Any]) -> Any:
        made = self.exchange(lambda: [] if self.rank else [json.dumps(work()).encode()])
        return json.loads(made[0][0])

    def in_turn(self, work: Callable[[], Any]) -> Any:
        leads = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        early = self.together(work if leads else lambda: None)
        late = self.together((lambda: None) if leads else work)
        return early if leads else late

    def rows(self, rows_N: Tensor) -> Tensor:
        parts = self.exchange(lambda: [rows_N.cpu().contiguous().numpy().tobytes()])
        joined = bytearray(b"".join(part[0] for part in parts))
        return (
            torch.frombuffer(joined, dtype=rows_N.dtype)
            .view(-1, *rows_N.shape[1:])
            .to(rows_N.device)
        )

    def check_same(self, tensor: Tensor, what: str) -> None:
        sums = self.rows(
            torch.tensor([zlib.crc32(tensor.cpu().contiguous().numpy().data)])
        ).tolist()
        others = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
        if others:
            raise RankError(
                f"{what}: rank {', '.join(others)} got another than rank 0, allowed: the same "
                "(machines of one kind; a scheme of your own may keep state in observe only)"
            )

    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        own = _client_rows(state)
        if self.rank:
            self._send(_saved(own), 0)
            return state
        parts = [own] + [_loaded(self._receive(rank)) for rank in range(1, self.size)]
        cat = {key: torch.cat([part[key].cpu() for part in parts]) for key in own}
        return _with_client_rows(state, cat)

    def split(self, state: dict[str, Any], clients: int, device: Any) -> dict[str, Any]:
        if self.rank:
            return _loaded(self._receive(0), device)
        rows = _client_rows(state)
        for rank in reversed(range(self.size)):
            own = self.own(clients, rank)
            part = {key: value[own.start : own.stop].clone() for key, value in rows.items()}
            part = _with_client_rows(state, part)
            if rank:
                self._send(_saved(part), rank)
        return part

    # Transport ───────────────────────────────────────────────────────────────────────────────────

    def _all_gathered(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length."""
        heads = self._gathered(
            _LENGTH.pack(len(data)) + data[:_SHORT], _LENGTH.size + _SHORT, "cpu"
        )
        lengths = [_LENGTH.unpack_from(head)[0] for head in heads]
        if max(lengths) <= _SHORT:
            bodies = [head[_LENGTH.size :] for head in heads]
        else:
            bodies = self._gathered(data, max(lengths), self.device)
        return [body[:length] for body, length in zip(bodies, lengths, strict=True)]

    def _gathered(self, data: bytes, size: int, device: Any) -> list[bytes]:
        own = torch.zeros(size, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(self.size)]
        dist.all_gather(parts, own.to(device))
        return [part.cpu().numpy().tobytes() for part in parts]

    def _send(self, data: bytes, rank: int) -> None:
        with self._waiting():
            dist.send(torch.tensor([len(data)]), rank)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)

    def _receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        with self._waiting():
            dist.recv(length, rank)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, rank)
        return data.numpy().tobytes()

    def _arrive(self) -> None:
        self._count += 1
        self._store.set(f"at/{self.rank}", str(self._count))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around whatever waits for other ranks: what goes wrong there is put into words."""
        try:
            self._arrive()
            yield
        except RuntimeError as error:  # torch.distributed's own, DistError, is one
            raise RankError(f"rank {self.rank}: {self._absence(error)}") from error

    def _absence(self, error: RuntimeError) -> str:
        try:
            absent = self._absent()
        except RuntimeError:
            return "the ranks' store is gone: torchrun, or rank 0, has ended"
        names = ", ".join(f"rank {rank}" for rank in absent) or "no rank"
        reason = str(error).strip().split("\n")[0]
        return f"{names} did not come within {self.timeout:g} s, or has ended ({reason})"

    def _absent(self) -> list[int]:
        """Ranks that do not report a failure as well; first of all those that came here less often.

        Some of those are stuck one step behind, waiting for the same rank: they will report.
        """
        silent = [rank for rank in range(self.size) if rank != self.rank]
        behind = [rank for rank in silent if int(self._store.get(f"at/{rank}")) < self._count]
        self._store.set(f"failed/{self.rank}", "1")
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):  # rank 0, with the store, has left
            while silent and time.monotonic() < until:
                time.sleep(0.05)
                silent = [rank for rank in silent if not self._store.check([f"failed/{rank}"])]
        return [rank for rank in silent if rank in behind] or silent or behind


def _error_json(error: Exception) -> bytes:
    diverged = error.client if isinstance(error, NotFiniteError) else None
    text = str(error) if isinstance(error, ValueError | OSError) else repr(error)
    return json.dumps({"text": text, "diverged": diverged}).encode()


def _first_error(failed: list[tuple[int, bytes]], rank: int, own: Exception | None) -> Exception:
    """The error that one process would have met first, marked as told to all."""
    told = [(who, json.loads(text)) for who, text in failed]
    diverged = [error["diverged"] for _, error in told]
    who, first = told[0]
    if None not in diverged:
        error: Exception = NotFiniteError(min(diverged))
    else:
        error = own if own and who == rank else RankError(f"rank {who}: {first['text']}")
    error.told_to_all = True
    return error


def _framed(parts: list[bytes]) -> bytes:
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def _frames(data: bytes) -> list[bytes]:
    parts, place = [], 0
    while place < len(data):
        end = place + _LENGTH.size + _LENGTH.unpack_from(data, place)[0]
        parts.append(data[place + _LENGTH.size : end])
        place = end
    return parts


def _saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded(data: bytes, device: Any = "cpu") -> dict[str, Any]:
    return torch.load(io.BytesIO(data), map_location=device, weights_only=True)


_CLIENT_ROWS = ("statistics_NS", "errors_ND")  # of a federation's state: one row a client


def _client_rows(state: dict[str, Any]) -> dict[str, Tensor]:
    items = [*state.items(), *state["compressor"].items()]
    return {key: value for key, value in items if key in _CLIENT_ROWS}


def _with_client_rows(state: dict[str, Any], rows: dict[str, Tensor]) -> dict[str, Any]:
    def put(part: dict[str, Any]) -> dict[str, Any]:
        return part | {key: value for key, value in rows.items() if key in part}

    return put(state) | {"compressor": put(state["compressor"])}


TIMEOUT = 600.0  # seconds that a rank waits for another, unless $TCS_TIMEOUT or --timeout says so


def _world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun tells; alone without it."""
    keys = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(os.environ.get(key) for key in keys):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def joined_ranks(
    device: str | torch.device = "cpu", timeout: float | None = None
) -> Iterator[Ranks]:
    """All processes that torchrun started, as `Ranks`; a process of its own is alone.

        with joined_ranks() as ranks:
            record = run(config, ranks=ranks)

    On a GPU every rank takes the one of its number on the machine. `timeout`, in seconds, is how
    long a rank waits for another, start-up included; it must be longer than a round, an evaluation
    or a checkpoint takes (default: $TCS_TIMEOUT, or 600).
    Raises RankError naming ranks that do not come, ValueError for a timeout that is none.
    """  # fmt: skip
    rank, size = _world()
    if size == 1:
        yield Ranks()
        return
    timeout, local = _timeout(timeout), int(os.environ.get("LOCAL_RANK", rank))
    gpus = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    nccl = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", size))  # nccl wants a GPU a rank
    if gpus:
        torch.cuda.set_device(local % gpus)
    store = _common_store(rank, size, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo", store=store, rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    there = f"cuda:{local % gpus}" if nccl else "cpu"
    yield ProcessRanks(dist.PrefixStore("ranks", store), rank, size, timeout, there)
    dist.destroy_process_group()


def _timeout(given: float | None) -> float:
    text = os.environ.get("TCS_TIMEOUT", TIMEOUT) if given is None else given
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not _positive(timeout):
        raise ValueError(f"timeout: got {text!r}, allowed: a positive number of seconds")
    return timeout


def _common_store(rank: int, size: int, timeout: float) -> dist.Store:
    """The store that torchrun, or rank 0, keeps; all ranks have come to it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent, wait = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        timedelta(seconds=timeout),
    )
    try:
        store = dist.TCPStore(
            host, port, size, rank == 0 and not agent, wait, wait_for_workers=False
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: rank 0 did not come within {timeout:g} s: "
            f"nobody answers at {host}:{port}"
        ) from error
    store = dist.PrefixStore(f"tcs/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, wait)
    except RuntimeError as error:
        late = ", ".join(f"rank {r}" for r in range(size) if not store.check([keys[r]]))
        if rank == 0:
            time.sleep(_PATIENCE)  # the store may live here: the others read it too
        raise RankError(
            f"rank {rank}: {late} of {size} did not come within {timeout:g} s"
        ) from error
    return store


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


# The paper's claims, judged ──────────────────────────────────────────────────────────────────────


def recorded(
    configs: Iterable[RunConfig], results: str | Path | None = None, diverged: bool = False
) -> dict[str, dict[str, Any]]:
    """The records of these runs that are there and finished, by file name; no run is made.

    With `diverged`, also of those that did not get to their end.
    """
    paths = {record_path(config, results): config for config in configs}
    found = {p.name: read_record(p, config) for p, config in paths.items() if p.is_file()}
    return {n: record for n, record in found.items() if diverged or record["status"] == "finished"}


BOUNDS = {"at_least": "≥", "at_most": "≤", "more_than": ">", "less_than": "<"}
_CLAIM_KEYS = {"says", "where", "measure", "first", "second", "paper", "paper_interval"}


def _bits_of(key: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: bits_per_parameter(record)[key]


def _overlap(record: dict[str, Any]) -> float:
    """Mean over the sparse epochs of the share of the shared mask that was in it a round before."""
    rows = [row for row in record["rows"] if not row["dense_rounds"]]
    shares = [row["mask_overlap"] for row in rows if row.get("mask_overlap") is not None]
    return float(np.mean(shares)) if shares else math.nan


# What a claim can be about: a number of one record.
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "accuracy": lambda record: 100 * record["rows"][-1]["accuracy"],
    "overlap": _overlap,
    "uplink": _bits_of("uplink"),
    "uplink_whole": _bits_of("uplink with warm-up"),
    "downlink": _bits_of("downlink"),
}


_TWO_NUMBERS = [[one, other] for one in (int, float) for other in (int, float)]


def read_claims(path: str | Path) -> tuple[float, dict[str, dict[str, Any]]]:
    """The confidence and the claims, by name, of a file like params/claims.yaml.

    Raises ValueError naming the claim and what is allowed.
    """
    read = read_params([path])
    confidence, claims = read.get("confidence"), read.get("claims")
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise ValueError(f"{path}: confidence: got {_shown(confidence)}, allowed: between 0 and 1")
    if not isinstance(claims, dict) or not claims:
        raise ValueError(f"{path}: claims: allowed: a mapping from names to claims")
    for name, claim in claims.items():
        if problem := _claim_problem(claim):
            raise ValueError(f"{path}: {_shown(name)}: {problem}")
    return confidence, claims


def _claim_problem(claim: Any) -> str | None:
    if not isinstance(claim, dict) or not {"says", "measure", "first"} <= claim.keys():
        return "allowed: a mapping with says, measure and first"
    if unknown := claim.keys() - _CLAIM_KEYS - BOUNDS.keys():
        return f"{_shown(min(unknown, key=str))} is unknown"
    if claim["measure"] not in MEASURES:
        return f"measure: got {_shown(claim['measure'])}, allowed: {', '.join(MEASURES)}"
    bounds = [claim[b] for b in BOUNDS if b in claim]
    if len(bounds) != 1 or type(bounds[0]) not in (int, float) or not math.isfinite(bounds[0]):
        return f"allowed: one number as {', '.join(BOUNDS)}"
    interval = claim.get("paper_interval", [0, 0])
    numbers = isinstance(interval, list) and [type(v) for v in interval] in _TWO_NUMBERS
    if not numbers or not interval[0] <= interval[1]:
        return f"paper_interval: got {_shown(interval)}, allowed: two numbers, rising"
    if claim["measure"] == "accuracy" and "second" not in claim:
        return "second: an accuracy is claimed against another scheme's"
    for run in (claim[key] for key in ("first", "second") if key in claim):
        if not isinstance(run, list) or len(run) != 2 or type(run[1]) not in (int, float):
            return f"got {_shown(run)}, allowed: [scheme, learning rate]"
        Scheme.named(str(run[0]))
    return None


def student_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| < t) = confidence, T being Student's with `freedom` degrees of freedom.

    T = sqrt(freedom) tan(a) turns its density into cos(a)^(freedom - 1).
    """
    angles = np.linspace(0, math.pi / 2, 200_001)
    heights = np.cos(angles) ** (freedom - 1)
    inside = np.concatenate([[0], np.cumsum(heights[1:] + heights[:-1])])
    angle = np.interp(confidence, inside / inside[-1], angles)
    return math.sqrt(freedom) * math.tan(angle)


def mean_interval(values: Iterable[float], confidence: float) -> tuple[float, float, float]:
    """Mean of the values and Student's interval for it; of one value, no interval (infinite)."""
    values = np.asarray(list(values), dtype=float)
    if len(values) < 2:
        return float(values.mean()), -math.inf, math.inf
    error = values.std(ddof=1) / math.sqrt(len(values))
    half = student_quantile(confidence, len(values) - 1) * error
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def verdict(low: float, high: float, bound: str, value: float) -> str:
    """What an interval says of a bound: "holds", "does not hold" or "not decided"."""
    keeps = {
        "at_least": (low >= value, high < value),
        "at_most": (high <= value, low > value),
        "more_than": (low > value, high <= value),
        "less_than": (high < value, low >= value),
    }
    always, never = keeps[bound]
    return "holds" if always else "does not hold" if never else "not decided"


def judged(
    claims: dict[str, dict[str, Any]], records: dict[str, dict[str, Any]], confidence: float
) -> pd.DataFrame:
    """One row a claim: the paper's number, ours with its interval over n seeds, the verdict.

    `records` maps file names to records, all of one profile and all finished; those of a claim's
    two schemes are paired by seed. Columns first_records and second_records name the files.
    """
    runs: dict[tuple[str, float], dict[int, str]] = {}
    for file, record in records.items():
        config = record["config"]
        key = (config["scheme"]["name"], config["learning_rate"])
        runs.setdefault(key, {})[config["seed"]] = file
    return pd.DataFrame([_judgement(n, c, runs, records, confidence) for n, c in claims.items()])


def _judgement(
    name: str, claim: dict[str, Any], runs: dict[tuple[str, float], dict[int, str]],
    records: dict[str, dict[str, Any]], confidence: float,
) -> dict[str, Any]:  # fmt: skip
    sides = [runs.get(tuple(claim[key]), {}) for key in ("first", "second") if key in claim]
    measure = MEASURES[claim["measure"]]
    files, values = [], []
    for seed in sorted(set.intersection(*(set(side) for side in sides))):
        pair = [side[seed] for side in sides]
        value = _compared(claim["measure"], [measure(records[file]) for file in pair])
        if not math.isnan(value):
            files.append(pair)
            values.append(value)
    mean, low, high = mean_interval(values, confidence) if values else (math.nan,) * 3
    if len(values) == 1 and claim["measure"] not in ("accuracy", "overlap"):
        low = high = mean  # counted, not drawn by chance
    bound = next(b for b in BOUNDS if b in claim)
    named = [" ".join(pair[i] for pair in files) if i < len(sides) else "" for i in (0, 1)]
    return {
        "claim": name,
        "says": claim["says"],
        "where": claim.get("where", ""),
        "measure": claim["measure"],
        "first": claim["first"][0],
        "second": claim["second"][0] if "second" in claim else "",
        "eta": claim["first"][1],
        "bound": bound,
        "bound_value": claim[bound],
        "paper": claim.get("paper"),
        "paper_low": claim.get("paper_interval", [math.nan])[0],
        "paper_high": claim.get("paper_interval", [math.nan])[-1],
        "measured": mean,
        "low": low,
        "high": high,
        "n": len(values),
        "verdict": verdict(low, high, bound, claim[bound]) if values else "not measured",
        "first_records": named[0],
        "second_records": named[1],
    }


def _compared(measure: str, values: list[float]) -> float:
    """Points between two accuracies; how many times fewer bits than the second, or than dense."""
    if measure == "overlap":
        return values[0]
    if measure == "accuracy":
        return values[0] - values[1]
    return (values[1] if len(values) > 1 else 32) / values[0]


def readable_claims(table: pd.DataFrame) -> pd.DataFrame:
    """The judged claims as a person reads them."""

    forms = {"accuracy": "{:+.2f}", "overlap": "{:.2f}"}

    def number(row: Any, value: float | None) -> str:
        if value is None or math.isnan(value):
            return "–"
        return forms.get(row.measure, "×{:,.4g}").format(value).replace("-", "−")

    def with_interval(row: Any, *values: float | None) -> str:
        mean, low, high = (number(row, v) for v in values)
        return f"{mean} ({low} to {high})" if math.isfinite(values[1]) and low != high else mean

    rows = [
        {
            "The paper says": row.says,
            "Where": row.where,
            "Holds if": f"{BOUNDS[row.bound]} {row.bound_value:g}".replace("-", "−"),
            "Paper (interval)": with_interval(row, row.paper, row.paper_low, row.paper_high),
            "Ours (interval)": with_interval(row, row.measured, row.low, row.high),
            "n": str(row.n),
            "Verdict": row.verdict,
        }
        for row in table.itertuples()
    ]
    return pd.DataFrame(rows)


# Sensitivity: one setting at a time ──────────────────────────────────────────────────────────────

_SETTING_KEYS = {"label", "values", "named", "schemes", "paper", "given"}


def read_sensitivity(path: str | Path) -> dict[str, Any]:
    """A file like params/sensitivity.yaml, checked: `margin`, `base` and `settings`.

    Raises ValueError naming the file, the setting, the key, its value and what is allowed.
    """
    sweep = read_params([path])
    try:
        _check_sweep(sweep)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return sweep


def _check_sweep(sweep: dict[str, Any]) -> None:
    _reject_unknown(sweep, {"margin", "base", "settings"}, "key")
    points = {"kind": float, "allowed": "points from 0 to 100", "ok": lambda v: 0 <= v <= 100}
    _check_value("margin", sweep.get("margin"), points)
    base, settings = sweep.get("base"), sweep.get("settings")
    if not isinstance(base, dict):
        raise ValueError(f"base: got {_shown(base)}, allowed: a mapping of parameters")
    plan(base)
    if not isinstance(settings, dict) or not settings:
        raise ValueError(f"settings: got {_shown(settings)}, allowed: a mapping from names")
    for name, setting in settings.items():
        try:
            _check_setting(name, setting)
        except ValueError as error:
            raise ValueError(f"{_shown(name)}: {error}") from error


def _check_setting(name: Any, setting: Any) -> None:
    if not isinstance(setting, dict) or "label" not in setting:
        raise ValueError(f"got {_shown(setting)}, allowed: a mapping with label and values")
    _reject_unknown(setting, _SETTING_KEYS, "key")
    if ("values" in setting) == ("named" in setting):
        raise ValueError("allowed: either values or named")
    for key, kind, allowed in (("label", str, "text"), ("given", bool, "true or false")):
        if not isinstance(setting.get(key, kind()), kind):
            raise ValueError(f"{key}: got {_shown(setting[key])}, allowed: {allowed}")
    check = _check_values if "values" in setting else _check_named
    check(name, setting)
    shown = _as_shown(setting)
    if "paper" in setting and _word(setting["paper"]) not in shown:
        got = _shown(setting["paper"])
        raise ValueError(f"paper: got {got}, allowed: one of {', '.join(shown)}, or no such key")


def _check_values(name: Any, setting: dict[str, Any]) -> None:
    varied = {f.name: f for cls in (Scheme, RunConfig) for f in dataclasses.fields(cls)}
    allowed = SCHEME_KEYS | RUN_KEYS - WHERE_KEYS
    if name not in allowed:
        raise ValueError(f"is no parameter that values can be given for: {', '.join(allowed)}")
    values, schemes = setting["values"], setting.get("schemes", ["TCS"])
    if not isinstance(values, list | dict) or len(values) < 2:
        got = _shown(values)
        raise ValueError(f"values: got {got}, allowed: a list, or word: value, of two or more")
    for value in values.values() if isinstance(values, dict) else values:
        _check_value(name, value, dict(varied[name].metadata))
    if not isinstance(schemes, list) or not schemes:
        raise ValueError(f"schemes: got {_shown(schemes)}, allowed: a list of scheme names")
    for scheme in schemes:
        _named_with(scheme, {})


def _check_named(name: Any, setting: dict[str, Any]) -> None:
    named = setting["named"]
    allowed = {f.name for f in dataclasses.fields(Scheme)} - {"name"}
    if name not in allowed:
        raise ValueError(f"is nothing that a scheme's name says: {', '.join(sorted(allowed))}")
    if "schemes" in setting:
        raise ValueError("schemes: allowed only beside values")
    if not isinstance(named, dict) or len(named) < 2:
        raise ValueError(f"named: got {_shown(named)}, allowed: value: scheme, two or more")
    for value, scheme in named.items():
        if (real := getattr(_named_with(scheme, {}), name)) != value:
            raise ValueError(f"named: {scheme} has {_shown(real)}, not {_shown(value)}")


def _word(value: Any) -> str:
    if type(value) not in (str, int, float):
        raise ValueError(f"got {_shown(value)}, allowed: numbers, or word: value")
    return value if isinstance(value, str) else f"{value:g}"


def _trials(curve: pd.DataFrame) -> str:
    """How many trials its points have: "3", or "1 to 3"."""
    return " to ".join(map(str, sorted({curve["n"].min(), curve["n"].max()})))


def _as_shown(setting: dict[str, Any]) -> list[str]:
    """The values as tables and figures write them, in order."""
    words = [_word(value) for value in setting.get("values", setting.get("named"))]
    if len(set(words)) < len(words):
        raise ValueError(f"values: got {', '.join(words)}, allowed: each once")
    return words


def sensitivity_plan(
    sweep: dict[str, Any], params: dict[str, Any], name: str
) -> dict[tuple[str, str], list[RunConfig]]:
    """The runs of one setting: value as shown and scheme's name -> its runs, seed by seed.

    `params` is a profile. A run that several settings ask for has one record name.
    """
    if name not in sweep["settings"]:
        known = ", ".join(sweep["settings"])
        raise ValueError(f"setting: got {_shown(name)}, allowed: {known}")
    setting = sweep["settings"][name]
    if "named" in setting:
        changes = [{"schemes": [scheme]} for scheme in setting["named"].values()]
    else:
        values, own = setting["values"], {k: v for k, v in setting.items() if k == "schemes"}
        values = values.values() if isinstance(values, dict) else values
        changes = [{name: value} | own for value in values]
    points: dict[tuple[str, str], list[RunConfig]] = {}
    for shown, change in zip(_as_shown(setting), changes, strict=True):
        try:
            configs = plan(sweep["base"] | params | change)
        except ValueError as error:
            raise ValueError(f"{name} {shown}: {error}") from error
        for config in configs:
            points.setdefault((shown, config.scheme.name), []).append(config)
    return points


def sensitivity_table(
    sweep: dict[str, Any], params: dict[str, Any], names: Iterable[str] | None = None,
    results: str | Path | None = None,
) -> pd.DataFrame:  # fmt: skip
    """One row a value (and scheme) of every setting, from the records that are there: those whose
    seed all values of the setting have, so that none is compared with luckier seeds.

    Accuracy over seeds is 0..1; a value with a diverged seed has no mean. Megabytes are one
    client's in the whole run, mean over seeds, "warmup" the dense part of both ways.
    """
    rows = []
    for name in sweep["settings"] if names is None else names:
        plans = sensitivity_plan(sweep, params, name)
        found = {point: recorded(plan, results, diverged=True) for point, plan in plans.items()}
        alike = _of_common_seeds(found)
        rows += [_sensitivity_row(name, *point, records) for point, records in alike.items()]
    return pd.DataFrame(rows)


def _of_common_seeds(found: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Of each point's records those with a seed that all points with records have, if any is."""
    seeds = [{r["config"]["seed"] for r in group.values()} for group in found.values() if group]
    common = set.intersection(*seeds) if seeds else set()
    return {
        point: {f: r for f, r in group.items() if not common or r["config"]["seed"] in common}
        for point, group in found.items()
    }


def _sensitivity_row(
    name: str, shown: str, scheme: str, records: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    row = _summary_row(scheme, list(records.values()), None) if records else {}
    numbers = ("accuracy", "accuracy_std", "megabytes_up", "megabytes_down", "megabytes_warmup")
    return {
        "setting": name,
        "value": shown,
        "scheme": scheme,
        "n": row.get("n", 0),
        "diverged": row.get("diverged", 0),
        **{key: row.get(key, math.nan) for key in numbers},
        "records": " ".join(sorted(records)),
    }


def readable_sensitivity(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a sensitivity table as a person reads them; the files stay in the csv."""
    rows = [
        {
            "Setting": r.setting,
            "Value": r.value,
            "Scheme": r.scheme,
            "Accuracy %": _ours(r),
            "n": str(r.n),
            "MB up": _digits(r.megabytes_up),
            "MB down": _digits(r.megabytes_down),
            "of both: warm-up": _digits(r.megabytes_warmup),
        }
        for r in table.itertuples()
    ]
    return pd.DataFrame(rows)


def sensitivity_curves(rows: pd.DataFrame, setting: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """The rows of one setting that have a record, a curve for each scheme; schemes that are
    themselves the values share one. Empty if fewer than two values have a record."""
    rows = rows[rows["n"] + rows["diverged"] > 0]
    if rows["value"].nunique() < 2:
        return {}
    if "named" in setting:
        return {" … ".join(rows["scheme"].iloc[[0, -1]]): rows}
    return {name: curve for name, curve in rows.groupby("scheme", sort=False)}


def cheapest_near_best(curve: pd.DataFrame, margin: float) -> tuple[Any, Any] | None:
    """The row to choose and the most accurate one. None without a mean and bytes to go by.

    Chosen are the fewest bytes both ways among all accuracies within `margin` percentage points of
    the best, or within the best one's standard deviation if that is more.
    """
    cost = (curve["megabytes_up"] + curve["megabytes_down"]).dropna()
    curve = curve.loc[cost.index].dropna(subset="accuracy")
    if curve.empty:
        return None
    best = curve.loc[curve["accuracy"].idxmax()]
    deviation = 0.0 if math.isnan(best["accuracy_std"]) else best["accuracy_std"]
    floor = best["accuracy"] - max(margin / 100, deviation) - 1e-12
    near = curve[curve["accuracy"] >= floor].sort_values("accuracy", ascending=False)
    return near.loc[cost[near.index].idxmin()], best


def sensitivity_choices(table: pd.DataFrame, sweep: dict[str, Any]) -> pd.DataFrame:
    """What `cheapest_near_best` chooses, a row a curve; of what is given, what the worst costs."""
    rows = []
    for name, setting in sweep["settings"].items():
        curves = sensitivity_curves(table[table["setting"] == name], setting)
        for scheme, curve in curves.items():
            if found := cheapest_near_best(curve, sweep["margin"]):
                rows.append(_choice(name, scheme, curve, setting, *found))
    return pd.DataFrame(rows)


def _choice(
    name: str, scheme: str, curve: pd.DataFrame, setting: dict[str, Any], chosen: Any, best: Any
) -> dict[str, str]:
    """One line of text: the most accurate value, the chosen one, and the differences."""
    if setting.get("given"):
        chosen = curve.loc[curve["accuracy"].idxmin()]
    cost = [_digits(row["megabytes_up"] + row["megabytes_down"]) for row in (chosen, best)]
    points = 100 * (chosen["accuracy"] - best["accuracy"])
    return {
        "Setting": name,
        "Scheme": scheme,
        "Most accurate": f"{best['value']} ({_ours(best)} %)",
        "Choose": f"given; worst: {chosen['value']}" if setting.get("given") else chosen["value"],
        "Points": f"{points:+.2f}".replace("-", "−") if points else "0",
        "MB both ways": " instead of ".join(dict.fromkeys(cost)),
        "Paper": _word(setting["paper"]) if "paper" in setting else "–",
        "n": _trials(curve),
    }


# Okabe and Ito's colours, which colour-blind readers tell apart; markers and dashes do it in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS, DASHES = "os^Dv*PX", ("-", "--", "-.", ":")
_DRAWN = ("Baseline", "TCS", "top-K", "TCS-L4", "TCS-L4-Q5", "TCS-LF", "TCS-PLF", "TCS-L2")


def curve_style(name: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Colour, dashes and marker of a scheme's curve, the same in all figures for the paper's.

    Another name takes what none of the `others` in the figure has.
    """
    if name in _DRAWN:
        place = _DRAWN.index(name)
    else:
        free = [i for i, drawn in enumerate(_DRAWN) if drawn not in others] or list(range(8))
        unknown = [other for other in others if other not in _DRAWN] or [name]
        place = free[unknown.index(name) % len(free)]
    return {"color": COLOURS[place], "linestyle": DASHES[place % 4], "marker": MARKERS[place]}


def accuracy_figure(records: Iterable[dict[str, Any]], title: str) -> Any:
    """Test accuracy over epochs, one curve a scheme: the mean over seeds, a band of one std."""
    from matplotlib.figure import Figure

    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["config"]["scheme"]["name"], []).append(record)
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, group in groups.items():
        curves = [pd.Series({r["epoch"]: 100 * r["accuracy"] for r in g["rows"]}) for g in group]
        table = pd.DataFrame(curves)
        mean, deviation = table.mean(), table.std().fillna(0.0)
        style = curve_style(name, list(groups)) | {"markersize": 4.5, "linewidth": 1.5}
        every = max(1, len(mean) // 8)
        axes.plot(mean.index, mean, label=name, markevery=every, **style)
        band = mean - deviation, mean + deviation
        axes.fill_between(mean.index, *band, color=style["color"], alpha=0.12, linewidth=0)
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", title=title)
    axes.grid(alpha=0.25)
    axes.locator_params(axis="x", integer=True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


VERDICTS = {"holds": COLOURS[3], "does not hold": COLOURS[2], "not decided": COLOURS[7]}


def claims_figure(table: pd.DataFrame, title: str) -> Any:
    """The judged claims about accuracy: interval, mean, what the paper has, and the bound."""
    from matplotlib.figure import Figure

    rows = table[(table["measure"] == "accuracy") & (table["n"] > 1)].iloc[::-1]
    figure = Figure(figsize=(9.2, 1.5 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows.itertuples()):
        colour = VERDICTS[row.verdict]
        axes.plot([row.low, row.high], [at, at], color=colour, lw=2.2, solid_capstyle="butt")
        axes.plot(row.measured, at, "o", color=colour, markersize=7)
        theirs = [row.paper_low, row.paper_high], [at + 0.25] * 2
        axes.plot(*theirs, color="black", linewidth=0.9)
        axes.plot(row.paper, at + 0.25, "D", color="white", markeredgecolor="black", markersize=5)
        side = {"marker": 9 if BOUNDS[row.bound] in "≥>" else 8, "color": "black", "markersize": 7}
        axes.plot(row.bound_value, at - 0.25, **side)
    for name, colour in VERDICTS.items():
        axes.plot([], [], "o-", color=colour, linewidth=2.2, label=f"ours: {name}")
    look = {"color": "black", "linewidth": 0.9, "marker": "D", "markerfacecolor": "white"}
    axes.plot([], [], **look, markersize=5, label="the paper's difference")
    axes.plot([], [], marker=9, color="black", linestyle="", label="bound, and the side that holds")
    axes.axvline(0, color=COLOURS[7], linewidth=0.8)
    axes.set_yticks(range(len(rows)), [textwrap.fill(says, 48) for says in rows["says"]])
    axes.set(xlabel="difference of final test accuracies (points)", title=title)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def sensitivity_figure(curves: dict[str, pd.DataFrame], setting: dict[str, Any], title: str) -> Any:
    """Accuracy over the values of one setting (mean, one std over seeds), and below the megabytes
    of one client, both ways: all, and what is left without the dense warm-up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    words = _as_shown(setting)
    for name, curve in curves.items():
        style = curve_style(name, list(curves)) | {"markersize": 6, "linewidth": 1.5}
        at = [words.index(value) for value in curve["value"]]
        style |= {"label": f"{name} (n = {_trials(curve)})"}
        mean, deviation = 100 * curve["accuracy"], 100 * curve["accuracy_std"]
        upper.errorbar(at, mean, yerr=deviation, capsize=4, **style)
        both = curve["megabytes_up"] + curve["megabytes_down"]
        lower.plot(at, both, **(style | {"label": None}))
        thin = {"markerfacecolor": "white", "linewidth": 0.8, "label": None}
        lower.plot(at, both - curve["megabytes_warmup"], **(style | thin))
    grey = {"color": COLOURS[7], "marker": "o", "linewidth": 1.2}
    lower.plot([], [], **grey, label="whole run")
    lower.plot([], [], **(grey | thin | {"label": "without the dense warm-up"}))
    if "paper" in setting:
        at = words.index(_word(setting["paper"]))
        for axes, label in ((upper, "the paper's choice"), (lower, None)):
            axes.axvspan(
                at - 0.12, at + 0.12, color=COLOURS[5], alpha=0.3, linewidth=0, label=label
            )
    lost = pd.concat(curves.values()).groupby("value")["diverged"].sum()
    ticks = [f"{word}\n{lost[word]} diverged" if lost.get(word) else word for word in words]
    lower.set_xticks(range(len(words)), ticks)
    lower.set(xlabel=setting["label"], xlim=(-0.4, len(words) - 0.6))
    lower.set(yscale="log", ylabel="MB of one client")
    _plain_log(lower.yaxis)
    upper.set_title(title, fontsize=10)
    upper.set(ylabel="test accuracy (%)")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _plain_log(axis: Any) -> None:
    """A log axis whose ticks read 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_locator(NullLocator())


def save_figure(figure: Any, path: str | Path) -> None:
    """As .png and .svg beside each other; the same bytes every time."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tcs", "svg.fonttype": "none"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            target = Path(path).with_suffix(suffix)
            _write_whole(
                target,
                lambda f, s=suffix, m=metadata: figure.savefig(
                    f, format=s[1:], dpi=150, metadata=m
                ),
            )


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


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 14. Benchmarks: python tcs_core.py bench
#     What is compared runs in one process, in turns; medians with quartiles, and the provenance, go
#     to results/bench/. Every case is a few lines below; `BENCHES` names them.
# ══════════════════════════════════════════════════════════════════════════════════════════════════

Timing = dict[str, Any]  # one row of a bench record


def _in_turns(works: dict[str, Callable[[], Any]], repeat: int, device: Any) -> dict[str, Timing]:
    """Seconds of every work, called in turns after one warm-up each: median and quartiles."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeat + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: _quartiles(values) for name, values in seconds.items()}


def _quartiles(values: list[float]) -> Timing:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high), "n": len(values)}


@dataclass
class Bench:
    """What all cases share. `rows` is what the record will hold."""

    repeat: int = 7
    device: str = "auto"
    precision: str = "fp32"
    rows: list[Timing] = field(default_factory=list)

    @property
    def torch_device(self) -> torch.device:
        return RunConfig(Scheme.named("TCS"), device=self.device).torch_device

    def measure(
        self, part: str, case: str, works: dict[str, Callable[[], Any]], times: int = 1,
        turns: int = 1, **numbers: float,
    ) -> None:  # fmt: skip
        """Every work does the same thing so many `times`; what is kept is the time of one. There
        are `repeat` times `turns` turns."""
        for name, timing in _in_turns(works, self.repeat * turns, self.torch_device).items():
            timing |= {key: timing[key] / times for key in ("median", "low", "high")}
            self.rows.append({"part": part, "case": case, "work": name, **timing, **numbers})


def _bench_federation(
    bench: Bench, scheme: str, model: str, width: int, batch: int, graph: bool = False
) -> Federation:
    """Ten clients with samples for a few rounds: eight of a small batch, one of a large one."""
    scheme_ = Scheme.named(scheme)
    one = batch * scheme_.local_steps
    each = max(one, min(8 * one, 128))
    config = RunConfig(
        scheme_, 1e-3, model=model, width=width, batch_size=batch, epochs=2, warmup_epochs=0,
        precision=bench.precision, device=bench.device, graph=graph,
    )  # fmt: skip
    return Federation(config, synthetic_dataset(train=10 * each, test=10))


def _replays(federation: Federation) -> Callable[[], None]:
    """An epoch's rounds, static; `federation` has a graph, and no rounds but these from now on."""
    draws, static = federation._draws(0), federation.static
    federation.round(draws, 0, 1e-3)  # dense: the first mask
    static._take(draws)

    def replays() -> None:
        for index in range(federation.rounds_per_epoch):
            static.play(index, 1e-3)

    return replays


def bench_round(
    bench: Bench, scheme: str, model: str, width: int, batch: int, threads: int | None = None,
    turns: int = 1,
) -> None:  # fmt: skip
    """An epoch's rounds over the same forward and backward passes with no federation around them;
    with so many CPU `threads`, where a profile sets them for this net."""
    federation = _bench_federation(bench, scheme, model, width, batch)
    flat, steps = federation.flat, federation.config.scheme.local_steps
    draws, rounds = federation._draws(0), federation.rounds_per_epoch
    ready = [federation.batches.augmented(draw) for draw in draws]
    federation.round(draws, 0, 1e-3)  # the dense first round

    def passes() -> None:
        flat.model.train()
        flat.use(federation.statistics_views[0])
        for first in range(0, batch * steps * rounds, batch):
            for images, labels in ready:
                part = slice(first, first + batch)
                federation._loss(images[part], labels[part]).backward()

    def whole() -> None:
        federation.staged.clear()
        for index in range(rounds):
            federation.round(draws, index, 1e-3)

    def compression() -> None:
        for _ in range(rounds):
            federation.compressor.step(federation.deltas_ND)

    def augmentation() -> None:
        for n in range(10):
            federation.batches.augmented(draws[n][: batch * steps * rounds])

    works = {
        "passes": passes, "round": whole, "compression": compression, "augmentation": augmentation
    }  # fmt: skip
    if bench.torch_device.type == "cuda":
        works["graph"] = _replays(_bench_federation(bench, scheme, model, width, batch, graph=True))
    net = f"{model} width {width}" + (f", threads {threads}" if threads else "")
    numbers = {"dimension": len(federation.theta_D), "local_steps": steps}
    with _arithmetic(threads), _memory_kept():
        case = f"{net}, N 10, B {batch}, {scheme}"
        numbers["threads"] = torch.get_num_threads()
        bench.measure("round", case, works, rounds, turns, **numbers)


def _textbook_round(
    deltas_ND: Tensor, errors: list[Tensor], mask_D: Tensor, k_global: int, k_local: int
) -> Tensor:
    """TCS as one would write it down first: clone, topk, multiply by masks."""
    update_D = torch.zeros_like(deltas_ND[0])
    for n, delta_D in enumerate(deltas_ND):
        intended_D = delta_D.clone() + errors[n]
        own_D = torch.zeros_like(mask_D)
        own_D[(intended_D * ~mask_D).abs().topk(k_local).indices] = True
        sent_D = intended_D * (mask_D | own_D)
        errors[n] = intended_D - sent_D
        update_D = update_D + sent_D
    update_D = update_D / len(deltas_ND)
    mask_D.zero_()[update_D.abs().topk(k_global).indices] = True
    return update_D


def _drifting(dimension: int, clients: int, device: Any) -> tuple[Tensor, Callable[[], Tensor]]:
    """Deltas (N, D) that change a little from call to call, as in training."""
    generator = torch.Generator().manual_seed(0)
    base_ND = torch.randn(clients, dimension, generator=generator).pow_(3).to(device)
    state = {"call": 0}

    def next_ND() -> Tensor:
        state["call"] += 1
        return base_ND.mul_(1.01 if state["call"] % 2 else 1 / 1.01)

    return base_ND, next_ND


def bench_step(bench: Bench, dimension: int, clients: int, textbook: bool = True) -> None:
    """`Compressor.step` of TCS for all clients, beside the textbook version and a plain copy."""
    device, scheme = bench.torch_device, Scheme.named("TCS")
    before = _resident(device)
    deltas_ND, change = _drifting(dimension, clients, device)
    compressor = Compressor(scheme, [dimension], clients, device)
    compressor.step(deltas_ND)
    works = {"change": change, "step": lambda: compressor.step(deltas_ND)}
    if textbook:
        mask_D = positions_to_mask(compressor.rule.global_mask(), dimension)
        errors = [torch.zeros(dimension, device=device) for _ in range(clients)]
        ks = compressor.rule.k_global, compressor.rule.k_local
        works["textbook"] = lambda: _textbook_round(deltas_ND, errors, mask_D, *ks)
        works["copy of one row"] = lambda: errors[0].copy_(deltas_ND[0])
    _reset_peak(device)
    numbers = {"dimension": dimension, "clients": clients}
    part = "step" if textbook else "growth"
    bench.measure(part, f"D {dimension:,}, N {clients}", works, **numbers)
    allowed = (2 * clients + 8) * 4 * dimension
    if not textbook and before is not None:
        used = _peak(device) - before
        bench.rows.append(
            {"part": "memory", "case": f"D {dimension:,}, N {clients}", "work": "step",
             "bytes": used, "allowed": allowed, **numbers}
        )  # fmt: skip


def _resident(device: torch.device) -> int | None:
    """Bytes in use now: of the device, or of this process (Linux)."""
    return _memory(device, "VmRSS", torch.cuda.memory_allocated)


def _peak(device: torch.device) -> int | None:
    return _memory(device, "VmHWM", torch.cuda.max_memory_allocated)


def _memory(device: torch.device, key: str, of_cuda: Callable[[Any], int]) -> int | None:
    if device.type == "cuda":
        return of_cuda(device)
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{key}:\s*(\d+) kB", status)[1])
    return None


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def bench_codecs(bench: Bench, dimension: int = 11_173_962) -> None:
    """Positions and whole messages of one client, both ways, at the paper's size."""
    deltas_ND, _ = _drifting(dimension, 1, "cpu")
    sizes = [dimension // 2, dimension - dimension // 2]
    for name in ("TCS", "TCS-Q5", "TCS-Q5+"):
        scheme = Scheme.named(name)
        compressor = Compressor(scheme, sizes, 1)
        compressor.step(deltas_ND)
        shared_K = compressor.rule.global_mask()
        own_K = compressor.rule.local_mask(deltas_ND[0].roll(7), shared_K)
        intended = deltas_ND[0][torch.cat([shared_K, own_K])]
        wire, message = compressor.up, Message.of(intended, own_K, scheme.value_bits)
        data = encode_message(message, wire)
        works = {
            "quantize": lambda i=intended, o=own_K, s=scheme: Message.of(i, o, s.value_bits),
            "encode": lambda m=message, w=wire: encode_message(m, w),
            "decode": lambda d=data, w=wire, s=shared_K: decode_message(d, w, s),
        }
        if name == "TCS":
            bits = encode_positions(own_K, dimension, 512)
            works |= {
                "encode positions": lambda o=own_K: encode_positions(o, dimension, 512),
                "decode positions": lambda b=bits: decode_positions(b, dimension, 512),
            }
        bench.measure("codecs", name, works, dimension=dimension, bytes=len(data))


_GROWTH_N = (2, 5, 10, 20, 40)
_GROWTH_D = (10**5, 10**6, 10**7, 10**8)
BENCHES: dict[str, list[Callable[[Bench], None]]] = {
    "round": [
        lambda b: bench_round(b, "TCS", "resnet18", 64, 64),
        lambda b: bench_round(b, "TCS-L4", "resnet18", 64, 64),
        lambda b: bench_round(b, "TCS-L4-Q5++", "resnet18", 64, 64),
        lambda b: bench_round(b, "TCS", "resnet18", 16, 64, turns=5),
        lambda b: bench_round(b, "TCS", "resnet8", 16, 16, threads=1, turns=15),  # params/cpu.yaml
        lambda b: bench_round(b, "TCS", "resnet8", 8, 4, threads=1, turns=15),  # params/quick.yaml
    ],
    "step": [lambda b: bench_step(b, 11_173_962, 10)],
    "codecs": [bench_codecs],
    "growth": [lambda b, n=n: bench_step(b, 10**6, n, textbook=False) for n in _GROWTH_N]
    + [lambda b, d=d: bench_step(b, d, 2, textbook=False) for d in _GROWTH_D],
}


def run_benches(
    parts: Iterable[str] = tuple(BENCHES), repeat: int = 7, device: str = "auto",
    precision: str = "fp32", threads: int | None = None, results: str | Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure the named parts; the record, also written to results/bench/. Takes minutes.

    Raises ValueError for an unknown part.
    """
    _reject_unknown(parts, BENCHES, "part")
    config = RunConfig(
        Scheme.named("TCS"), device=device, precision=precision, threads=threads, profile="bench"
    )
    bench = Bench(repeat, device, precision)
    cases = [case for part in parts for case in BENCHES[part]]
    with _arithmetic(threads):
        for case in tqdm(cases, desc="bench", leave=False, disable=not sys.stderr.isatty()):
            case(bench)
        made = provenance(config) | {"precision": precision, "cores": os.cpu_count()}
    record = {"version": RECORD_VERSION, "rows": bench.rows, "provenance": made}
    device_name = re.sub(r"\W+", "-", made["device"]).strip("-")
    name = f"{device_name}-{precision}-{'-'.join(parts)}.json"
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path = results_folder("bench", results) / name
    _write_whole(path, lambda f: f.write(text.encode()))
    return record


def bench_table(record: dict[str, Any]) -> pd.DataFrame:
    """A bench record as a person reads it: milliseconds, and each work over the case's first."""
    rows, first = [], {}
    for row in record["rows"]:
        if "median" not in row:
            continue
        case = (row["part"], row["case"])
        base = first.setdefault(case, row["median"])
        spread = f"{1e3 * row['low']:,.4g} – {1e3 * row['high']:,.4g}"
        rows.append(
            {"Case": f"{row['part']}: {row['case']}", "Work": row["work"],
             "Median, ms": f"{1e3 * row['median']:,.4g}", "Quartiles": spread,
             "Over the first": f"{row['median'] / base:.3f}", "n": str(row["n"])}
        )  # fmt: skip
    return pd.DataFrame(rows)


# ══════════════════════════════════════════════════════════════════════════════════════════════════
# 15. Command line: python tcs_core.py run --params params/table1.yaml params/quick.yaml
# ══════════════════════════════════════════════════════════════════════════════════════════════════


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tcs_core.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run_ = commands.add_parser("run", help="make the runs of a table in a profile; print the table")
    vary = commands.add_parser("sensitivity", help="make the runs that vary one setting at a time")
    for command in (run_, vary):
        add = command.add_argument
        add("--params", nargs="+", required=True, help="YAML files, later over earlier")
        add("--scheme", action="append", help="only this scheme (may be repeated)")
        add("--seed", action="append", type=int, help="only this seed (may be repeated)")
        add("--set", action="append", default=[], metavar="KEY=VALUE",
            help="one more parameter, its value read as YAML")  # fmt: skip
        add("--results", help="results folder (default: beside this module)")
        add("--jobs", type=int, help="processes side by side")
        add("--timeout", type=float, metavar="SECONDS",
            help="wait for a rank (default: $TCS_TIMEOUT, or 600)")  # fmt: skip
    run_.set_defaults(main=_main_run)
    vary.add_argument("--setting", action="append", help="only this setting (may be repeated)")
    vary.add_argument("--sweep", default=ROOT / "params" / "sensitivity.yaml", metavar="FILE",
                      help="what is varied (default: params/sensitivity.yaml)")  # fmt: skip
    vary.set_defaults(main=_main_sensitivity)
    again = commands.add_parser("again", help="make a record's run again and compare the two")
    again.add_argument("record", metavar="RECORD", help="a file in results/<profile>/runs/")
    again.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                       help=f"where: {', '.join(sorted(WHERE_KEYS - {'profile'}))}")  # fmt: skip
    again.add_argument("--results", help="keep the new record in this results folder")
    again.set_defaults(main=_main_again)
    bench = commands.add_parser("bench", help="measure speed and memory; write results/bench/")
    bench.add_argument("--part", action="append", choices=list(BENCHES), help="only this part")
    bench.add_argument(
        "--repeat", type=int, default=7, help="turns of each measurement; short ones take more"
    )
    bench.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    bench.add_argument("--precision", default="fp32", help="fp32 or bf16")
    bench.add_argument("--threads", type=int, help="CPU threads")
    bench.add_argument("--results", help="results folder (default: beside this module)")
    bench.set_defaults(main=_main_bench)
    return parser


def _set_params(pairs: list[str]) -> dict[str, Any]:
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set: got {_shown(pair)}, allowed: KEY=VALUE")
        params[key] = _read_yaml(value, f"--set {_cut(key)}")
    return params


def _command_params(arguments: argparse.Namespace) -> dict[str, Any]:
    params = read_params(arguments.params) | _set_params(arguments.set)
    if arguments.seed is not None:
        params["seeds"] = arguments.seed
    if arguments.jobs is not None:
        params["jobs"] = arguments.jobs
    return params


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the command like Ctrl-C."""


@contextlib.contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Terminated

    waits = _world()[1] > 1  # in a collective, where Python sees no signal: then it just ends
    if waits or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if all went well, 1 if a run diverged, 2 for input that can't be used,
    3 if another rank is late, gone or wrong, 130 after Ctrl-C, 141 if nobody reads what it prints,
    143 after SIGTERM.

    Under torchrun all ranks call it; what all of them know, rank 0 says.
    """
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding without eta spoils no table
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        with _sigterm_like_ctrl_c():
            code = arguments.main(arguments)
            _flush_output()
            return code
    except BrokenPipeError:  # as after `| head`
        return 141
    except (ValueError, OSError, RankError) as error:
        lost = isinstance(error, RankError)
        if _world()[0] == 0 or not hasattr(error, "told_to_all"):
            hint = "; the same command goes on from the last checkpoint" if lost else ""
            print(f"error: {error}{hint}", file=sys.stderr, flush=True)
        return 3 if lost else 2
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not full and ("memory" not in str(error) or "illegal" in str(error)):
            raise
        print(f"error: not enough memory: {_cut(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        how, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        kept = "nothing is kept" if arguments.main is _main_bench else _GOES_ON
        print(f"{how}; {kept}", file=sys.stderr)
        return code


_GOES_ON = "the same command goes on where it stopped"


def _flush_output() -> None:
    """Raises here, not when the interpreter ends, if what was printed can't be written."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _main_run(arguments: argparse.Namespace) -> int:
    params = _command_params(arguments)
    if arguments.scheme:
        params["schemes"] = arguments.scheme
    return _make(
        plan(params), params, arguments,
        lambda records: readable(summary(records, params.get("paper"))),
    )  # fmt: skip


def _main_sensitivity(arguments: argparse.Namespace) -> int:
    sweep, params = read_sensitivity(arguments.sweep), _command_params(arguments)
    names = arguments.setting or list(sweep["settings"])
    planned = [config for name in names for runs in sensitivity_plan(sweep, params, name).values()
               for config in runs]  # fmt: skip
    known = dict.fromkeys(config.scheme.name for config in planned)
    _reject_unknown(arguments.scheme or (), known, "scheme in these settings")
    wanted = arguments.scheme or known
    configs = {c.record_name: c for c in planned if c.scheme.name in wanted}
    return _make(
        list(configs.values()), params, arguments,
        lambda _: readable_sensitivity(sensitivity_table(sweep, params, names, arguments.results)),
    )  # fmt: skip


def _make(
    configs: list[RunConfig], params: dict[str, Any], arguments: argparse.Namespace,
    table: Callable[[list[dict[str, Any]]], pd.DataFrame],
) -> int:  # fmt: skip
    """Make the runs; rank 0 prints the table of their records and what diverged."""
    with joined_ranks(configs[0].torch_device, arguments.timeout) as ranks:
        records = run_all(configs, arguments.results, params.get("jobs", 1), ranks=ranks)
    diverged = [r for r in records if r["status"] == "diverged"]
    if ranks.rank == 0:
        print(markdown(table(records)))
        for record in diverged:
            name = record["config"]["scheme"]["name"]
            print(f"diverged: {name}: {record['reason']}", file=sys.stderr)
    return 1 if diverged else 0


def _main_again(arguments: argparse.Namespace) -> int:
    """A record's run once more, from the record alone; exit code 1 if its numbers are others."""
    record, where = read_record(arguments.record), _set_params(arguments.set)
    _reject_unknown(where, WHERE_KEYS - {"profile"}, "place to run")
    config = config_of(record, **where)
    with contextlib.ExitStack() as stack:
        folder = arguments.results or stack.enter_context(tempfile.TemporaryDirectory())
        if (there := record_path(config, folder)).exists():
            raise ValueError(f"--results: {there} exists, allowed: a folder without this record")
        (made,) = run_all([config], folder)
    found = differences(record, made)
    name = Path(arguments.record).name
    print(f"{name}: {found[0]}" if found else f"{name}: the same in all {len(made['rows'])} epochs")
    return 1 if found else 0


def _main_bench(arguments: argparse.Namespace) -> int:
    if arguments.repeat < 1:
        raise ValueError(f"--repeat: got {arguments.repeat}, allowed: a whole number >= 1")
    options = (arguments.repeat, arguments.device, arguments.precision, arguments.threads)
    record = run_benches(arguments.part or list(BENCHES), *options, arguments.results)
    print(markdown(bench_table(record)))
    return 0


if __name__ == "__main__":
    code = main()
    if code and _world()[1] > 1:  # gloo's threads may abort an interpreter that ends
        os._exit(code)
    sys.exit(code)
