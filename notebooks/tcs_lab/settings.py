"""Settings: what is trained, on what, for how long; params files; the plan of a table."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tcs_core import (
    MOST,
    RULES,
    STAGES,
    Scheme,
    _check_fields,
    _check_value,
    _cut,
    _param,
    _positive,
    _reject_unknown,
    _shown,
    _text,
    _whole,
    kept,
)

ROOT = Path(__file__).resolve().parents[2]

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
    outside = [c for c in RULES[rule].__mro__ if c.__module__ not in ("tcs_core", "builtins")]
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
