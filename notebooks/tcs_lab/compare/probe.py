"""Probes: a few rounds of a method beside TCS in one process. They show how long a round takes, how much
shorter a better code makes its bytes, and whether its messages can be decoded."""

from __future__ import annotations

import copy
import difflib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tcs_core import TCS, Client, Link, MaskRule, Scheme, unchanged
from tcs_lab.schemes.packing import recoded_size, tensor_bytes
from tcs_lab.schemes.tensors import TensorClient
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.training import Data, Training


@dataclass(frozen=True)
class Probe:
    """What a probe found. `seconds` is the time of a round on this machine, and `beside_tcs` its ratio to
    that of TCS. `recoded` is the share of the bytes that a shorter code leaves, and 1 where none was
    tried. `decodes` says whether messages that became bytes gave the same update."""

    seconds: float
    beside_tcs: float
    recoded: float
    decodes: bool


def probe_method(config: RunConfig, tcs: RunConfig, data: Data, turns: int = 15) -> Probe:
    """Probe a method's run beside one of TCS. Rounds take turns, and the time is the processor's time of
    this process. The ratio is the median over the turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        sides = [_skip_start(Training(one, data)) for one in (config, tcs)]
        times: list[list[float]] = [[], []]
        for _ in range(turns):
            for took, rounds in zip(times, sides, strict=True):
                start = time.process_time()
                next(rounds)
                took.append(time.process_time() - start)
        ratios = [one / other for one, other in zip(*times, strict=True)]
        return Probe(
            median(times[0]),
            median(ratios),
            _measure_recoding(config, data),
            _check_decoding(config, data),
        )
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Played:
    """What the fourth round in `play_rounds` was like. `bytes_up` are those of all clients together,
    and `clients` their number. `remark` says what looks like a mistake and is allowed."""

    bytes_up: int
    clients: int
    dense: bool
    remark: str = ""


def play_rounds(config: RunConfig, data: Data) -> Played:
    """Play four rounds of a method, so that mistakes in it are found in seconds. Then play two more, here and
    in a training that has loaded the saved state. Describe the fourth round.

    Raises ValueError if the two do not give the same update, if a rule changes a tensor that it is given,
    if the shared mask cannot be known to everybody, if a client's own mask depends on other clients, and if
    a class with `compress` and `decompress` changes an attribute of the class, which both sides would see.
    """
    training, resumed = Training(config, data), Training(config, data)
    compressor = training.compressor
    with _refuse_changes(compressor.rule), _refuse_shared_attributes(compressor.clients):
        _replay_masks(training)
    played = Played(
        compressor.bytes_up, len(compressor.traffic.heard), compressor.known.dense, _find_misspelling(compressor.rule)
    )  # fmt: skip
    resumed.load_state_dict(training.state_dict())
    forgotten = _list_forgotten(compressor.rule, resumed.compressor.rule)
    for _ in range(2):
        if not torch.equal(training.federation.round(), resumed.federation.round()):
            got = f"attributes that change and are not in `keeps`: {', '.join(forgotten)}"
            raise ValueError(
                "a run that is stopped and goes on must give the same numbers as one that is not: "
                f"{got if forgotten else 'got others'}, allowed: a class that lists in `keeps` all attributes "
                "that change, and draws random numbers from self.seed and self.round"
            )
    return played


@contextmanager
def _refuse_changes(rule: MaskRule) -> Iterator[None]:
    """Raise ValueError if `observe` or `own_mask` changes the tensor that it is given."""

    def watch(name: str) -> None:
        method = getattr(rule, name)

        def watched(given_D: Tensor, *others: Any) -> Any:
            before_D = given_D.clone()
            result = method(given_D, *others)
            if not torch.equal(given_D, before_D):
                raise ValueError(
                    f"{name}: changed its tensor in place, allowed: a copy (tensor.clone())"
                )
            return result

        setattr(rule, name, watched)

    names = ("observe", "own_mask")
    for name in names:
        watch(name)
    try:
        yield
    finally:
        for name in names:
            delattr(rule, name)


@contextmanager
def _refuse_shared_attributes(clients: Mapping[int, Client]) -> Iterator[None]:
    """Raise ValueError if attributes of a per-tensor method's class change, as a dictionary to which one
    side adds and from which the other side reads."""
    kinds = {type(c.side.instance) for c in clients.values() if isinstance(c, TensorClient)}
    bases = {base for kind in kinds for base in kind.__mro__ if base.__module__ == kind.__module__}
    before = {kind: {name: repr(value) for name, value in vars(kind).items()} for kind in bases}
    yield
    for kind, attributes in before.items():
        changed = [
            name for name, value in vars(kind).items() if attributes.get(name) != repr(value)
        ]
        if changed:
            raise ValueError(
                f"{kind.__name__}: {changed[0]}: got an attribute of the class that changes, which clients and "
                "server would share, allowed: attributes of the instance (self), which each side has for itself"
            )


def _replay_masks(training: Training) -> None:
    """Play four rounds, and let a second rule follow them that sees only what the server and all clients
    know: the updates, the model, and the round's number. Raises ValueError if it chooses another shared
    mask, or another own mask for a client than the rule that has seen the other clients of the round."""
    known, rule = training.compressor.known, training.compressor.rule
    outsider = type(rule)(rule.scheme, rule.layer_sizes, rule.device, rule.seed)
    chosen = list[tuple[tuple[Any, ...], Any]]()
    own_mask = rule.own_mask

    def noted(intended_D: Tensor, *others: Any) -> Any:
        mask = own_mask(intended_D, *others)
        chosen.append(
            ((intended_D.clone(), *others), mask.clone() if isinstance(mask, Tensor) else mask)
        )
        return mask

    rule.own_mask = noted  # type: ignore[method-assign]
    rounds = _repeat_epoch(training)
    for _ in range(4):
        theta_D = training.theta_D.clone()
        chosen.clear()
        update_D = next(rounds)
        outsider.round = rule.round
        outsider.begin(theta_D, rule.mask_factor)
        for arguments, mask in chosen:
            alone = copy.deepcopy(outsider).own_mask(*arguments)
            if not torch.equal(known.positions_of(alone), known.positions_of(mask)):
                raise ValueError(
                    "own_mask: each client must find its mask by itself, but in round "
                    f"{outsider.round}, a second object of the class, which had not been asked by other clients, "
                    "found another one, allowed: a mask that follows from `intended_D`, `shared_D`, k and what "
                    "everybody knows"
                )
        mask = outsider.shared_mask()
        if mask is None and not rule.scheme.dense_warmup:
            mask = known.shared_K[:0]  # as in `Known.begin`: nothing is shared yet
        guess_K = None if mask is None else known.positions_of(mask)
        if not known.dense and (guess_K is None or not torch.equal(guess_K, known.shared_K)):
            raise ValueError(
                "shared_mask: the server and each client must find the same mask, but in round "
                f"{outsider.round}, a second object of the class found another one, allowed: a mask that follows "
                "from the updates given to `observe`, the parameters given to `begin`, self.round and self.seed"
            )
        outsider.observe(update_D.clone())


def _find_misspelling(rule: MaskRule) -> str:
    """Name a method of a user's rule that is spelt almost like one that the core calls."""
    calls = [name for name in dir(MaskRule) if not name.startswith("_")]
    own = [
        cls
        for cls in type(rule).__mro__
        if issubclass(cls, MaskRule) and cls.__module__ != "tcs_core"
    ]
    for name in (name for cls in own for name in vars(cls) if name not in dir(TCS)):
        if meant := difflib.get_close_matches(name.strip("_"), calls, 1, 0.8):
            return f"The class has `{name}`, which the core does not call. Is `{meant[0]}` meant?"
    return ""


def _list_forgotten(rule: MaskRule, resumed: MaskRule) -> list[str]:
    """List the attributes that a rule has lost after its state was saved and loaded, those of the core
    excepted."""
    cores = vars(TCS(Scheme.named("TCS"), [1])).keys() | {"round"}
    return [
        name
        for name, value in vars(rule).items()
        if name not in cores and not _are_equal(value, getattr(resumed, name, None))
    ]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


def _skip_start(training: Training) -> Any:
    """Return the rounds after the start of a training, the first three of them played."""
    rounds = _repeat_epoch(training)
    for _ in range(3):
        next(rounds)
    return rounds


def _repeat_epoch(training: Training) -> Any:
    """Yield the rounds of the first epoch after the warm-up again and again."""
    epoch = min(training.config.warmup, training.config.epochs - 1)
    while True:
        yield from training.rounds(epoch)


def _measure_recoding(config: RunConfig, data: Data) -> float:
    """Return the share of the bytes of a per-tensor method's messages that a shorter code leaves."""
    training = Training(config, data)
    clients = [c for c in training.compressor.clients.values() if isinstance(c, TensorClient)]
    if not clients:
        return 1.0
    going = _skip_start(training)
    for client in clients:
        client.side.instance = _RecodingCounter(client.side.instance)
    for _ in range(3):
        next(going)
    seen = [client.side.instance for client in clients]
    return sum(one.recoded for one in seen) / max(1, sum(one.sent for one in seen))


class _RecodingCounter:
    """A method's instance that counts the bytes that it sends, also in a shorter code."""

    def __init__(self, instance: Any):
        self.instance, self.sent, self.recoded = instance, 0, 0

    def compress(self, tensor: Tensor, name: str) -> Any:
        tensors, added = self.instance.compress(tensor, name)
        for part in [tensors] if isinstance(tensors, Tensor) else tensors:
            self.sent += len(tensor_bytes(part))
            self.recoded += recoded_size(part)
        return tensors, added

    def decompress(self, tensors: Any, context: Any) -> Any:
        return self.instance.decompress(tensors, context)


def _check_decoding(config: RunConfig, data: Data) -> bool:
    """Return whether messages as bytes give the same updates in four rounds. The messages of a per-tensor
    method become bytes in every run anyway."""
    plain = Training(config, data)
    if any(isinstance(c, TensorClient) for c in plain.compressor.clients.values()):
        return True
    coded = Training(config, data, link=Link(unchanged))
    pairs = zip(range(4), _repeat_epoch(plain), _repeat_epoch(coded), strict=False)
    try:
        return all(torch.equal(one, other) for _, one, other in pairs)
    except ValueError:
        return False
