"""The configuration of a run: what is trained, on what and for how long, and when two runs are the same."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

import tcs_lab.schemes  # noqa: F401  (registers what records name)
from tcs_core import CODES, QUANTIZERS, STAGES, Scheme, kept, rule_of
from tcs_lab.support.errors import format_value, text_hint, to_python

# Kinds of values. A new setting is one line in RunConfig. Its check, and the words of an error about it,
# follow from its kind.


def _check_rising(shares: tuple[float, ...]) -> tuple[float, ...]:
    if list(shares) != sorted(shares):
        raise ValueError("not rising")
    return shares


TEXT_MODEL = "gpt"  # the only model for dataset text, and for no other data set
MODELS = (*STAGES, TEXT_MODEL)


def _check_model(name: str) -> str:
    if name not in MODELS:
        raise ValueError("unknown")
    return name


MAX_COUNT = 10**9  # the largest number of anything
WholeNumber = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
PositiveNumber = Annotated[float, Field(gt=0, le=1e6)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Drops = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)], ...],
    # `strict=False` also allows a list.
    Field(strict=False, description="fractions of the epochs, between 0 and 1, in rising order"),
    AfterValidator(_check_rising),
]
Text = Annotated[str, Field(pattern=r"^[^\x00]+$")]
Model = Annotated[str, AfterValidator(_check_model), Field(description=" or ".join(MODELS))]
PROFILE = {
    "pattern": r"^[\w-][\w.+-]{0,63}$",
    "description": "up to 64 letters, digits, -, _ and, not as the first of them, . and +",
}
DEVICE = {
    "pattern": r"^(auto|cpu|cuda(:[0-9]{1,3})?)$",
    "description": "auto, cpu, cuda or cuda:<n>",
}

# Settings of where and how fast a run is made. They are not part of its identity.
WHERE_KEYS = {"profile", "data_root", "threads", "device", "graph", "side_by_side",
              "client_threads"}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run: scheme, data, model, federation and schedule.

    Numbers are in the paper's units. A scheme may be given by its name. Raises ValueError, which names
    the field, its value and what is allowed.
    """

    scheme: Scheme
    # eta at a batch of reference_batch (Tables 1 and 2: 0.5, 0.8)
    learning_rate: PositiveNumber = 0.5
    seed: Seed = 0  # of everything random
    profile: Annotated[str, Field(**PROFILE)] = "ci"  # the folder under results/
    # What is learned.
    dataset: Literal["synthetic", "synthetic-compare", "cifar10", "folder", "text"] = "synthetic"
    # of cifar10 the download folder; of folder a folder or a tar
    data_root: Annotated[Text, Field(max_length=4000)] | None = None
    data_label: Annotated[Text, Field(max_length=200)] | None = None  # its name in tables
    train_samples: WholeNumber | None = None  # null: all
    test_samples: WholeNumber | None = None
    # after the last epoch, the unused training images are tested on, too
    test_unused: bool = False
    image_size: Annotated[int, Field(ge=1, le=256)] | None = None  # pixels per side; null: as it is
    crop_padding: Annotated[int, Field(ge=0, le=32)] = 4  # pixels around an image, for random crops
    context: Annotated[int, Field(ge=1, le=4096)] = 64  # characters in a sample of a text
    model: Model = "resnet18"  # Sec. III-A; for a text: gpt
    width: Annotated[int, Field(ge=1, le=1024)] = 64  # channels of the first stage, or of the gpt
    clients: WholeNumber = 10  # N, Sec. III-A
    participation: Fraction = 1.0  # share of the clients, drawn in each round, Alg. 1
    batch_size: WholeNumber = 64  # B, samples per local step
    epochs: Annotated[int, Field(ge=1, le=10**6)] = 300  # passes over the data
    # dense epochs with a rising learning rate, Sec. III-B; null: 1/60 of the epochs
    warmup_epochs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    warmup_learning_rate: PositiveNumber = 0.1  # eta of the first round, scaled like eta
    drops: Drops = (0.5, 0.75)  # fractions of the epochs at which eta is divided by 10, Sec. III-B
    # cumulative batch at which learning_rate holds (10 clients x 64); null: no linear scaling
    reference_batch: WholeNumber | None = 640
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 1e-4  # L2, in the local gradient
    # class skew among clients; null: IID
    dirichlet_alpha: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    precision: Literal["fp32", "bf16"] = "fp32"  # autocast of the passes
    wire: bool = False  # every message becomes bytes and is decoded; the same numbers, slower
    # with wire: a client's message that cannot be accepted ends the run, or is left out
    bad_message: Literal["stop", "skip"] = "stop"
    # rounds with static shapes; on a GPU a CUDA graph in which clients train at once. Masks are the
    # same, numbers up to rounding
    graph: bool = False
    # all clients in one pass, for small nets; null: if the net is small. The same up to rounding
    side_by_side: bool | None = None
    # each thread trains one client at a time, for larger nets; the same bits for any number of them
    client_threads: bool = False
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # of the CPU; null: as torch has it
    device: Annotated[str, Field(**DEVICE)] = "auto"  # where it runs
    # eta of centralized training, at a fifth of reference_batch (Sec. III-B); of no other run
    centralized_learning_rate: PositiveNumber = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.scheme, str):
            object.__setattr__(self, "scheme", Scheme.named(self.scheme))
        if not isinstance(self.scheme, Scheme):
            raise ValueError(
                f"scheme: got {format_value(self.scheme)}, allowed: a Scheme or its name"
            )
        for key in ("seed", *sorted(RUN_KEYS)):
            object.__setattr__(self, key, check_value(key, getattr(self, key), RUN_CHECKS[key]))
        if self.warmup > (most := max(1, self.epochs - 1)):
            allowed = f"at most {most} of {self.epochs} epochs"
            raise ValueError(f"warmup_epochs: got {self.warmup}, allowed: {allowed}")
        self._check_task()
        if self.bad_message != "stop" and not self.wire:
            got = f"got {self.bad_message!r}, allowed: 'stop', or any value with wire: true"
            raise ValueError(f"bad_message: {got}")
        if self.graph and self.client_threads:
            raise ValueError("client_threads: got True, allowed: false with graph: true")
        if self.side_by_side and self.client_threads:
            raise ValueError("client_threads: got True, allowed: false with side_by_side: true")

    def _check_task(self) -> None:
        """Raise ValueError for a model, or a setting, that does not go with the data set."""
        text = self.dataset == "text"
        if self.data_root is not None and self.dataset not in ("cifar10", "folder"):
            got = f"got {format_value(self.data_root)}, allowed with dataset {self.dataset}: null"
            raise ValueError(f"data_root: {got}; only folder and cifar10 read files")
        if text != (self.model == TEXT_MODEL):
            allowed = TEXT_MODEL if text else " or ".join(STAGES)
            got = f"got {self.model!r}, allowed with dataset {self.dataset}: {allowed}"
            raise ValueError(f"model: {got}")
        of_images = ["train_samples", "test_samples", "test_unused", "image_size"]
        of_images += ["dirichlet_alpha", "graph"]
        for key in of_images if text else ():
            if value := getattr(self, key):
                usual = json.dumps(getattr(RunConfig, key))
                raise ValueError(f"{key}: got {value!r}, allowed with dataset text: {usual}")
        other = "crop_padding" if text else "context"  # it has no effect with this data set
        if (value := getattr(self, other)) != (usual := getattr(RunConfig, other)):
            allowed = f"allowed with dataset {self.dataset}, which does not use it: {usual}"
            raise ValueError(f"{other}: got {value!r}, {allowed}")

    # Derived numbers. Centralized training is one client with twice the batch, eta = 0.1 at 128 and no
    # warm-up, whatever the settings of the federation are (Sec. III-B).

    @property
    def client_count(self) -> int:
        """The number of clients: one in centralized training."""
        return 1 if self.scheme.centralized else self.clients

    @property
    def batch(self) -> int:
        """The number of samples in one local step of a client."""
        return 2 * self.batch_size if self.scheme.centralized else self.batch_size

    @property
    def participants(self) -> int:
        """The number of clients that take part in a round."""
        share = 1.0 if self.scheme.centralized else self.participation
        return kept(share, self.client_count)

    @property
    def warmup(self) -> int:
        """The number of epochs of warm-up.

        They are dense, with a rising learning rate, or sparse with larger masks and the full rate
        (errors that pile up make a soft start, too). Their number is the configured one, or the paper's
        5 of 300 in proportion. It is 0 for a scheme that is equally sparse from the first round.
        """
        sparse_start = not self.scheme.dense_warmup and self.scheme.warmup_masks == 1
        if self.scheme.centralized or sparse_start:
            return 0
        if self.warmup_epochs is None:
            return max(1, round(self.epochs / 60))
        return self.warmup_epochs

    @property
    def scale(self) -> float:
        """The factor of linear scaling: the cumulative batch divided by the batch at which the learning
        rate holds.

        Centralized training has a fifth of the federated rate at a fifth of the batch, 0.1 at 128
        where federated training has 0.5 at 640 (Sec. III-B), so that one rule serves both.
        """
        if self.reference_batch is None:
            return 1.0
        reference = self.reference_batch / 5 if self.scheme.centralized else self.reference_batch
        return self.participants * self.batch / reference

    @property
    def eta(self) -> float:
        """The learning rate as in the paper's tables. Centralized training has another one (0.1)."""
        centralized = self.scheme.centralized
        return self.centralized_learning_rate if centralized else self.learning_rate

    def learning_rate_at(self, epoch: float) -> float:
        """Return eta_t at a fractional epoch, counted from 0: a linear warm-up, then divisions by 10."""
        if epoch < self.warmup and self.scheme.dense_warmup:
            start = self.warmup_learning_rate
            return self.scale * (start + (self.eta - start) * epoch / self.warmup)
        passed = sum(epoch >= round(share * self.epochs, 9) for share in self.drops)
        return self.scale * self.eta * 0.1**passed

    def identity(self) -> dict[str, Any]:
        """Return what makes two runs the same run, in types of JSON. Where and how fast is left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # "learning_rate" is the rate of this run, centralized or not: a second key would repeat it or
        # have no effect
        left_out = {"scheme", "centralized_learning_rate", *WHERE_KEYS}
        values = {k: v for k, v in fields.items() if k not in left_out}
        values |= {
            "drops": list(self.drops), "learning_rate": self.eta, "clients": self.client_count,
            "batch_size": self.batch, "warmup_epochs": self.warmup,
        }  # fmt: skip
        if self.dataset not in ("cifar10", "folder"):
            values["data_label"] = None  # what the program makes has a name of its own
        if self.scheme.centralized:
            values |= {"participation": 1.0, "dirichlet_alpha": None, "warmup_learning_rate": None}
            if self.reference_batch is not None:
                fifth, rest = divmod(self.reference_batch, 5)
                values["reference_batch"] = self.reference_batch / 5 if rest else fifth
        return {
            "scheme": dataclasses.asdict(self.scheme),
            **values,
            **_hash_outside_parts(self.scheme),
        }

    @property
    def digest(self) -> str:
        """The ten hex digits that name this run."""
        return digest_of(self.identity())

    @property
    def record_name(self) -> str:
        """The name of the file of this run's record."""
        return record_file_name({"config": self.identity(), "digest": self.digest})

    @property
    def torch_device(self) -> torch.device:
        """The device on which this run is made. Raises ValueError if this machine has no such device."""
        per_tensor = self.scheme.code == "tensors"  # a class with compress and decompress
        auto = "cuda" if torch.cuda.is_available() and not per_tensor else "cpu"
        device = torch.device(auto if self.device == "auto" else self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            gpus = f"cpu, cuda:0 to cuda:{count - 1}" if count else "cpu, as torch sees no GPU"
            raise ValueError(f"device: got {self.device!r}, allowed on this machine: {gpus}")
        return device


def record_file_name(record: dict[str, Any]) -> str:
    """Return the name of a record's file."""
    config = record["config"]
    safe = re.sub(r"[^\w.+-]+", "_", config["scheme"]["name"])
    return f"{safe}-{config['learning_rate']:g}-{config['seed']}-{record['digest']}.json"


def digest_of(identity: dict[str, Any]) -> str:
    """Return ten hex digits that name a run.

    Fields that have their default do not enter, so that a field that is added later, with a default
    that changes nothing, leaves the names of older records as they are.
    """

    def list_changes(values: dict[str, Any], cls: type) -> dict[str, Any]:
        usual = {f.name: f.default for f in dataclasses.fields(cls)}
        # as a record has them, with lists for tuples
        defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in usual.items()}
        return {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}

    named = list_changes(identity, RunConfig) | {"scheme": list_changes(identity["scheme"], Scheme)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:10]


_OURS = ("tcs_core", "builtins")
_OUR_ROOM = "tcs_lab.schemes."


def list_outside_parts(scheme: Scheme) -> list[Any]:
    """List the classes of a scheme's rule, of its client and server types and of its code, and its
    quantizers that belong neither to the core nor to the lab. Worker processes do not know them."""
    rule = rule_of(scheme)
    types = [kind for kind in (rule.client_type, rule.server_type) if kind]
    sides = [base for kind in types for base in kind.__mro__]
    parts: list[Any] = [*rule.__mro__, *sides]
    parts += [QUANTIZERS[name] for name in {scheme.quantizer, scheme.down_quantizer}]
    parts += type(CODES[scheme.code]).__mro__
    homes = [(part, part.__module__) for part in parts]
    return [part for part, home in homes if home not in _OURS and not home.startswith(_OUR_ROOM)]


def _hash_outside_parts(scheme: Scheme) -> dict[str, str]:
    """Hash the code of a scheme that comes from outside. It is part of a run's identity, so that changed
    code makes a new run."""
    outside = list_outside_parts(scheme)
    if not outside:
        return {}
    classes = [part for part in outside if inspect.isclass(part)]
    parts = sorted(_read_source("", part) for part in outside if part not in classes)
    members = [item for cls in classes for item in sorted(vars(cls).items())]
    written = [(n, v) for n, v in members if inspect.isfunction(v) or not n.startswith("__")]
    parts = [_read_source(name, value) for name, value in written] + parts
    return {"rule_sha256": hashlib.sha256("\n".join(parts).encode()).hexdigest()}


_text_of = cache(inspect.getsource)  # as it was when first read, since the file may be edited


def _read_source(name: str, value: Any) -> str:
    """Return a method as its source, and anything else as text. (A class that was defined in a notebook
    has no source as a whole.)"""
    if isinstance(value, property | staticmethod | classmethod | cached_property):
        parts = (getattr(value, key, None) for key in ("fget", "fset", "__func__", "func"))
        return "\n".join(_read_source(name, part) for part in parts if part)
    try:
        if isinstance(value, set | frozenset):  # their order differs from run to run
            value = sorted(map(repr, value))
        text = _text_of(value) if inspect.isfunction(value) else f"{name} = {value!r}"
    except OSError:
        code = value.__code__
        text = f"{name} {code.co_code.hex()} {code.co_names} {code.co_consts}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # addresses in memory differ from run to run


# Kinds, checked ────────────────────────────────────────────────────────────────────────────────────

RUN_KEYS = {f.name for f in dataclasses.fields(RunConfig)} - {"scheme", "seed"}
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # true is not 1, and "3" is not 3


def make_check(kind: Any) -> TypeAdapter:
    """Make the check of a kind of value, for `check_value`."""
    return TypeAdapter(kind, config=_STRICT)


_KINDS = get_type_hints(RunConfig, include_extras=True)
RUN_CHECKS = {key: make_check(_KINDS[key]) for key in RUN_KEYS | {"seed"}}


def check_value(key: str, value: Any, check: TypeAdapter) -> Any:
    """Return `value` as its kind: a whole number becomes a float where a float is meant.

    Raises ValueError, which names the key, the value and what is allowed.
    """
    value = to_python(value)
    try:
        return check.validate_python(value)
    except ValidationError:
        allowed = _describe_kind(check.json_schema())
    hint = text_hint(key, value, check.validate_python)
    raise ValueError(
        f"{key}: got {format_value(value)} ({type(value).__name__}), allowed: {allowed}{hint}"
    )


_WORDS = {"integer": "a whole number", "number": "a number", "string": "text", "null": "null",
          "boolean": "true or false"}  # fmt: skip
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<",
           "maxLength": "of length 1 to"}  # fmt: skip


def _describe_kind(schema: dict[str, Any]) -> str:
    """Describe a kind of value in words, by its JSON schema."""
    if "description" in schema:
        return schema["description"]
    if "anyOf" in schema:
        return ", or ".join(map(_describe_kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(schema["enum"])
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([_WORDS[schema["type"]], " and ".join(bounds)]).strip()
