"""A method of a tensor: a class with `compress` and `decompress`, as a scheme's clients and server.

    class Mine:
        def compress(self, tensor, name):           # a client's difference of one parameter
            return [values, positions], context     # tensors to send, and what else there is to say
        def decompress(self, tensors, context):     # at the server
            return tensor

GRACE and other benchmarks have methods in this form. Each client has an instance of its own, and the
server has a twin of each, made in the same way, which sees nothing but what was sent: tensors and
context become bytes, and it reads them from these bytes. So a method that hands something on behind
the adapter's back does not work here.

If `compress` returns None as the context, `decompress` gets the `Context` that both sides know: name,
shape, dtype. Otherwise it gets what `compress` returned, which is sent and counted. A part that is
the tensor's own name, shape, number of entries or dtype takes one byte. What says the same as in this
client's last message, dtypes and shapes of the tensors too, takes one bit.

Attributes of the class that the adapter looks at, all of them optional:

    error_feedback = True    what the server did not get is added to the client's next difference
    densities = (0.01, ...)  what the class is made with, one for each density; the first is the usual
    dense_warmup = True      it begins with one dense epoch, as TCS does
    downlink = True          the server's update is compressed, too, by an instance of its own
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tcs_core import (
    CODES,
    SERVER,
    BlockCode,
    Client,
    InFlight,
    Known,
    MaskRule,
    Message,
    NotFiniteError,
    Scheme,
    Server,
    Wire,
    random_seed,
    register_scheme,
)
from tcs_lab.schemes.packing import (
    Context,
    make_tensor,
    pack,
    read_shape,
    shape_bytes,
    tensor_bytes,
    tensor_size,
    unpack,
)

_LARGE = 1e6  # a difference with larger entries is of a training that diverges


class TensorRule(MaskRule):
    """Everything travels, each parameter's tensor in whatever tensors a method makes of it."""

    make: Callable[[], Any]  # an instance of the method
    compresses_downlink = False
    model: Any = None  # the trained model as flat vectors (`tcs_core.FlatView`), once it is known

    def shared_mask(self) -> Tensor:
        return torch.arange(self.dimension, device=self.device)

    def own_count(self, shared: int) -> int:
        return 0

    def set_model(self, flat: Any) -> None:
        """Names and shapes of the parameters. Without them each one is flat, and has a number."""
        self.model = flat

    def views(self, vector_D: Tensor) -> list[Tensor]:
        """(D,) as tensors of the parameters' shapes, which share its memory."""
        if self.model is None:
            return list(vector_D.split(self.layer_sizes))
        return self.model.views(vector_D)

    def contexts(self) -> list[Context]:
        if self.model is None:
            numbered = enumerate(self.layer_sizes)
            return [Context(str(i), torch.Size([size]), torch.float32) for i, size in numbered]
        pairs = zip(self.model.names, self.model.shapes, strict=True)
        return [Context(name, shape, torch.float32) for name, shape in pairs]


# Messages ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class TensorMessage(Message):
    """A message whose values nobody knows before the other side's twin has decoded the payload. Until
    then they stand as zeros."""

    payload: bytes = b""

    @staticmethod
    def of_payload(payload: bytes, dimension: int, sender: int, round: int) -> TensorMessage:
        none = torch.empty(0, dtype=torch.int64)
        return TensorMessage(torch.zeros(1).expand(dimension), none, sender, round, payload=payload)


class TensorCode(BlockCode):
    """The payload as it is. What else there is to say, such as a dense downlink, is in code "block"."""

    def encode(self, message: Message, wire: Wire) -> tuple[bytes, bool]:
        if isinstance(message, TensorMessage):
            return message.payload, False
        return super().encode(message, wire)[0], True

    def decode(self, code: memoryview, shared: int, own: int, wire: Wire) -> Message:
        return TensorMessage.of_payload(bytes(code), wire.dimension, 0, 0)


CODES["tensors"] = TensorCode()


# One side of the way from a client to the server ──────────────────────────────────────────────────


class Side:
    """An instance of a method at one end, and what was said in the last message.

    `who` tells the sides apart: a method that draws random numbers draws others at the server, unless
    it makes them from a seed that it has sent.
    """

    def __init__(self, rule: TensorRule, who: str, *numbers: int):
        self.rule, self.who, self.numbers = rule, who, numbers
        self.instance = rule.make()
        self.said: list[bytes] = []  # of each parameter, what it said of its tensors last time
        self.at_first = dict(_attributes(self.instance))

    def compress(self, vector_D: Tensor, round: int) -> bytes:
        """What the method makes of a difference (D,), which stays as it is: one bit for each parameter,
        if what it says has changed; then that; then the tensors."""
        contexts = self.rule.contexts()
        said, data = [], []
        with self._seeded(round):
            for context, view in zip(contexts, self.rule.views(vector_D), strict=True):
                tensor = view.clone(memory_format=torch.contiguous_format)
                header, content = _encode_tensors(
                    self.instance.compress(tensor, context.name), context
                )
                said.append(header)
                data.append(content)
        before = self.said or [b""] * len(said)
        changed = [one != other for one, other in zip(said, before, strict=True)]
        self.said = said
        news = [h for h, is_new in zip(said, changed, strict=True) if is_new]
        lengths = b"".join(len(header).to_bytes(4, "little") for header in news)
        return np.packbits(changed).tobytes() + lengths + b"".join(news + data)

    def decompress(self, payload: bytes, round: int) -> Tensor:
        """What the method makes of the other side's payload, (D,)."""
        contexts, headers, at = self._headers(payload)
        self.said = headers
        vector_D = torch.empty(self.rule.dimension, dtype=torch.float32)
        views = self.rule.views(vector_D)
        with self._seeded(round):
            for context, header, view in zip(contexts, headers, views, strict=True):
                tensors, added, at = _decode_tensors(header, context, payload, at)
                found = self.instance.decompress(tensors, added)
                view.copy_(_check_tensor(found, context))
        if not math.isfinite(float(vector_D.sum())):
            named = zip(contexts, views, strict=True)
            for name in [context.name for context, view in named if not view.isfinite().all()]:
                what = f"decompress: {name}: got NaN or infinity, allowed: finite numbers"
                raise ValueError(what)
        return vector_D

    def _headers(self, payload: bytes) -> tuple[list[Context], list[bytes], int]:
        """What is said of each parameter's tensors, and where in the payload these begin."""
        contexts = self.rule.contexts()
        flags = -(-len(contexts) // 8)
        changed = np.unpackbits(np.frombuffer(payload[:flags], np.uint8))[: len(contexts)]
        headers = list(self.said or [b""] * len(contexts))
        at = flags + 4 * int(changed.sum())
        for place, which in enumerate(np.flatnonzero(changed)):
            start = flags + 4 * place
            length = int.from_bytes(payload[start : start + 4], "little")
            headers[which], at = payload[at : at + length], at + length
        return contexts, headers, at

    @contextlib.contextmanager
    def _seeded(self, round: int) -> Iterator[None]:
        """Random numbers that follow from seed, round and side alone; those of all others go on as if
        nothing had been drawn."""
        seed = random_seed(self.rule.seed, round, *self.numbers, *self.who.encode())
        generator = torch.default_generator  # torch.manual_seed would look for GPUs each time
        before = generator.get_state(), random.getstate(), np.random.get_state()
        generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            generator.set_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])

    # What a resumed run needs.

    def state(self) -> Tensor:
        """By value, as bytes: the instance's attributes, those left out that cannot be saved and are
        as they were at the start. ValueError names one that is not."""
        if hasattr(self.instance, "state_dict") and hasattr(self.instance, "load_state_dict"):
            kept = self.instance.state_dict()
        else:
            kept = {}
            for name, value in _attributes(self.instance).items():
                try:
                    pack(value)
                    kept[name] = value
                except ValueError as error:
                    if self.at_first.get(name, self) is not value:
                        way = "allowed: such values, or state_dict and load_state_dict of the class"
                        raise ValueError(
                            f"attribute {name} of the method: {error}; {way}"
                        ) from None
        data = pack({"said": self.said, "kept": kept})
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def load(self, state: Tensor) -> None:
        read = unpack(state.cpu().numpy().tobytes())
        self.said = read["said"]
        if hasattr(self.instance, "state_dict") and hasattr(self.instance, "load_state_dict"):
            self.instance.load_state_dict(read["kept"])
        else:
            vars(self.instance).update(read["kept"])


def _attributes(instance: Any) -> dict[str, Any]:
    return vars(instance) if hasattr(instance, "__dict__") else {}


def _encode_tensors(given: Any, context: Context) -> tuple[bytes, bytes]:
    """What `compress` returned: what is said of the tensors, and their bytes."""
    what = f"compress: {context.name}"
    if not isinstance(given, tuple) or len(given) != 2:
        got = f"got {type(given).__name__}"
        raise ValueError(f"{what}: {got}, allowed: (tensors, context), two values")
    tensors, added = given
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    wrong = [t for t in tensors if not isinstance(t, Tensor)] if _is_list(tensors) else [tensors]
    if wrong:
        got = f"payload: got a {type(wrong[0]).__name__}"
        raise ValueError(f"{what}: {got}, allowed: a list of tensors")
    try:
        said = pack(added, context)
        shapes = b"".join(map(shape_bytes, tensors))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    header = len(said).to_bytes(4, "little") + said + bytes([len(tensors)]) + shapes
    return header, b"".join(map(tensor_bytes, tensors))


def _is_list(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) < 256


def _decode_tensors(
    header: bytes, context: Context, payload: bytes, at: int
) -> tuple[list[Tensor], Any, int]:
    """The tensors and the context that `decompress` gets, and where the next ones begin."""
    length = int.from_bytes(header[:4], "little")
    added = unpack(header[4 : 4 + length], context)
    place, tensors = 5 + length, []
    for _ in range(header[4 + length]):
        dtype, shape, place = read_shape(header, place)
        end = at + tensor_size(dtype, shape)
        tensors.append(make_tensor(payload[at:end], dtype, shape))
        at = end
    return tensors, context if added is None else added, at


def _check_tensor(found: Any, context: Context) -> Tensor:
    """What `decompress` returned; ValueError unless it is a tensor of the parameter's shape."""
    what = f"decompress: {context.name}"
    if not isinstance(found, Tensor):
        raise ValueError(f"{what}: got a {type(found).__name__}, allowed: a tensor")
    if found.shape != context.shape:
        got = tuple(found.shape)
        raise ValueError(f"{what}: got shape {got}, allowed: {tuple(context.shape)}")
    return found.detach()


# A scheme of a class ───────────────────────────────────────────────────────────────────────────────


def register_tensors(kind: type, name: str, **identity: Any) -> str:
    """Registers a family of schemes for each density of a class in the form of tensors.py: its name,
    and name-<density>. The name of the first. `identity` is kept with the rule, whose attributes
    name its runs."""
    given = getattr(kind, "densities", None)
    densities: list[Any] = [()] if given is None else [(density,) for density in given]
    if not densities:
        raise ValueError("densities: got none, allowed: one or more")
    numbers = [f"-{density[0]:g}" for density in densities[1:]]
    names = [name, *(f"{name}{number}" for number in numbers)]
    for one, arguments in zip(names, densities, strict=True):
        makes = partial(_instance, kind, arguments)
        attributes = {
            "make": staticmethod(makes), "client_type": TensorClient, "server_type": TensorServer,
            "compresses_downlink": bool(getattr(kind, "downlink", False)), "densities": tuple(names),
            "method": kind.__qualname__, "arguments": repr(arguments), "__module__": kind.__module__,
        }  # fmt: skip
        rule = type(f"{kind.__name__}Rule", (TensorRule,), attributes | identity)
        register_scheme(
            one, phi_global=1.0, phi_local=None, code="tensors",
            error_accumulation=bool(getattr(kind, "error_feedback", False)),
            dense_warmup=bool(getattr(kind, "dense_warmup", False)),
        )(rule)  # fmt: skip
        Side(rule(Scheme.named(one), [1]), "trial")  # can it be made?
    return name


def _instance(kind: type, arguments: tuple[Any, ...]) -> Any:
    try:
        return kind(*arguments)
    except TypeError as error:
        way = "allowed: one that can be made without arguments, or with one of its `densities`"
        raise ValueError(f"{kind.__name__}: {error}; {way}") from error


# Clients and server ───────────────────────────────────────────────────────────────────────────────


class TensorClient(Client):
    """A client whose message is what its instance of the method makes of its difference."""

    def __init__(self, known: Known, number: int = 0, errors_D: Tensor | None = None):
        super().__init__(known, number, errors_D)
        self.side = Side(cast(TensorRule, known.rule), "client", number)

    def message_of(self, delta_D: Tensor) -> Message:
        known = self.known
        if known.dense:
            return super().message_of(delta_D)
        intended_D = self.intended(delta_D)
        if not float(intended_D.abs().max()) < _LARGE:
            raise NotFiniteError(self.number)
        known.senders.add(self.number)
        payload = self.side.compress(intended_D, known.round)
        none_D = intended_D[:0]
        flight = InFlight(known.round, known.shared_K[:0], none_D, none_D, False)
        if self.errors_D is not None:
            said_D = self.side.decompress(payload, known.round)
            flight = InFlight(known.round, known.shared_K, intended_D.clone(), said_D, False)
        self.in_flight = flight
        return TensorMessage.of_payload(payload, known.dimension, self.number, known.round)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"method": self.side.state()}

    def check_state(self, state: dict[str, Any]) -> None:
        _check_method_state(state.get("method"))
        super().check_state({key: value for key, value in state.items() if key != "method"})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.side.load(state["method"])


class TensorDownlink(Client):
    """The server as a sender, with an instance of its own and, with error feedback, errors. The
    clients' twins are all alike: one stands for them."""

    def __init__(self, known: Known):
        errors_D = torch.zeros(known.dimension) if known.scheme.keeps_errors else None
        super().__init__(known, 0, errors_D)
        self.number = SERVER
        rule = cast(TensorRule, known.rule)
        self.side, self.twin = Side(rule, "server"), Side(rule, "clients")

    def reply_to(self, update_D: Tensor, explored_D: Tensor) -> Message:
        known = self.known
        if known.dense:
            return Message.dense_of(update_D.clone(), SERVER, known.round)
        intended_D = update_D if self.errors_D is None else self.errors_D + update_D
        payload = self.side.compress(intended_D, known.round)
        said_D = self.twin.decompress(payload, known.round)
        if self.errors_D is not None:
            self.errors_D = intended_D - said_D
        none_K = known.shared_K[:0]
        return TensorMessage(said_D, none_K, SERVER, known.round, payload=payload)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"method": [self.side.state(), self.twin.state()]}

    def check_state(self, state: dict[str, Any]) -> None:
        for part in state.get("method", [None]):
            _check_method_state(part)
        super().check_state({key: value for key, value in state.items() if key != "method"})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for side, part in zip((self.side, self.twin), state["method"], strict=True):
            side.load(part)


class TensorServer(Server):
    """A server with a twin of every client's instance, which sees what that client has sent."""

    def __init__(self, known: Known, weights: list[float] | None = None):
        super().__init__(known, weights)
        self.rule, self.twins = cast(TensorRule, known.rule), dict[int, Side]()
        if self.rule.compresses_downlink:
            self.downlink = cast(Any, TensorDownlink(known))

    def add(self, number: int, message: Message) -> None:
        if isinstance(message, TensorMessage):
            self.known.check_message(message, number)
            values_D = self._twin(number).decompress(message.payload, self.known.round)
            message = Message(values_D, message.positions, number, self.known.round)
        super().add(number, message)

    def _twin(self, number: int) -> Side:
        if number not in self.twins:
            self.twins[number] = Side(self.rule, "twin", number)
        return self.twins[number]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"twins": {n: t.state() for n, t in self.twins.items()}}

    def check_state(self, state: dict[str, Any]) -> None:
        for part in state.get("twins", {}).values():
            _check_method_state(part)
        super().check_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.twins = {}
        for number, part in state["twins"].items():
            self._twin(number).load(part)


def _check_method_state(part: Any) -> None:
    if not isinstance(part, Tensor) or part.dtype != torch.uint8 or part.dim() != 1:
        raise ValueError("state: method: got none, allowed: what the adapter saved, as bytes")
    try:
        unpack(part.cpu().numpy().tobytes())
    except Exception as error:  # bytes that were not made here: struct and torch raise many kinds
        raise ValueError(f"state: method: {error}") from None
