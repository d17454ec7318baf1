"""Methods that compress one tensor at a time: a class with `compress` and `decompress` becomes a scheme.

    class Mine:
        def compress(self, tensor, name):           # the client's difference of one parameter
            return [values, positions], context     # tensors to send, and whatever else to send
        def decompress(self, tensors, context):     # at the server
            return tensor

GRACE and other benchmarks have methods in this form. Each client has an instance of its own, and the
server has a twin of each, made in the same way, which sees nothing but what was sent: tensors and
context become bytes, and it reads them from these bytes. So a method must not share anything else, such
as a variable of its module or of its class, between the two sides. (`tcs compare` refuses attributes of a
class that change; variables of a module it does not see.)

A difference with an entry of 1e6 or more counts as not finite, because the training is diverging.

If `compress` returns None as the context, `decompress` gets the `Context` that both sides know: name,
shape, dtype. Otherwise it gets what `compress` returned, which is sent and counted. A part of it that
equals the parameter's name, shape, number of entries or dtype takes one byte. If the context, and the
dtypes and shapes of the tensors, are the same as in this client's last message, all of them together
take one bit.

A run that was killed goes on with the attributes that the instances had. These can be numbers,
strings, tensors, arrays, a torch.Generator, and lists, tuples, sets and dicts of these. An attribute
that holds something else is refused, unless it never changes, as a function. A class with the methods
state_dict and load_state_dict says itself what is kept.

Attributes of the class that the adapter looks at, all of them optional:

    error_feedback = True    what the server did not get is added to the client's next difference
    densities = (0.01, ...)  numbers, one for each density; the class is usually made with the first
    dense_warmup = True      training begins with one dense epoch, as that of TCS does
    downlink = True          the server's update is compressed, too, by another instance; without it, the
                             server sends every entry in 32 bits, and these bytes are counted
"""

from __future__ import annotations

import contextlib
import math
import random
import reprlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    Dense,
    InFlight,
    Known,
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
    pack,
    read_shape,
    read_tensor,
    shape_bytes,
    tensor_bytes,
    unpack,
)

_MOST_TENSORS = 255  # for one parameter: their number is sent in a byte
_LARGE = 1e6  # a difference with larger entries means that the training diverges
_LARGEST_HALF = 65_504  # of float16, in which a larger entry or norm becomes infinity


class TensorRule(Dense):
    """A rule by which everything is sent: of each parameter, the tensors that a method makes of it."""

    make: Callable[[], Any]  # an instance of the method
    compresses_downlink = False
    model: Any = None  # a `tcs_core.FlatView` of the trained model, once it is set

    def __init__(self, scheme: Scheme, layer_sizes: list[int], device: Any = "cpu", seed: int = 0):
        super().__init__(scheme, layer_sizes, device, seed)
        name, usual = scheme.name, {"code": "tensors", "value_bits": 32, "phi_global": 1.0}
        usual |= dict.fromkeys(("phi_local", "phi_min_global", "phi_min_local", "phi_down"))
        usual |= {"down_value_bits": 32} if self.compresses_downlink else {}
        if any(getattr(scheme, field) != value for field, value in usual.items()):
            what = "a class with compress and decompress decides itself what is sent"
            raise ValueError(
                f"{name}: got a suffix about what is sent, but {what}, allowed: -L<H> and momentum"
            )
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"{name}: device: got {device}, allowed with compress and decompress: cpu"
            )

    def set_model(self, flat: Any) -> None:
        """Set the model, which has the names and shapes of the parameters.

        Without it, each parameter is a flat tensor, and its name is a number.
        """
        self.model = flat

    def views(self, vector_D: Tensor) -> list[Tensor]:
        """Return a vector (D,) as tensors of the parameters' shapes, which share its memory."""
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
    """A message with a payload, which only the receiver's instance of the method can decode.

    A receiver sets `decode`, which `add_to_` calls. Without it, values are zeros, and `add_to_` raises
    ValueError, unless `is_decoded`: then the values are those of the payload already.
    """

    payload: bytes = b""
    is_decoded: bool = False
    decode: Callable[[], Tensor] | None = None

    def add_to_(self, sum_D: Tensor, shared_K: Tensor | None, weight: float = 1.0) -> None:
        if self.decode is not None:
            Message(self.decode(), self.positions).add_to_(sum_D, shared_K, weight)
            return
        if not self.is_decoded:
            what = "a message of a class with `downlink = True` cannot be read from its bytes"
            raise ValueError(f"{what}, allowed: no wire, or a class without `downlink`")
        super().add_to_(sum_D, shared_K, weight)

    @staticmethod
    def of_payload(payload: bytes, dimension: int, sender: int, round: int) -> TensorMessage:
        none = torch.empty(0, dtype=torch.int64)
        return TensorMessage(torch.zeros(1).expand(dimension), none, sender, round, payload=payload)


class TensorCode(BlockCode):
    """Send the payload unchanged. Other messages, such as a dense downlink, are in the code "block"."""

    def encode(self, message: Message, wire: Wire) -> tuple[bytes, bool]:
        if isinstance(message, TensorMessage):
            return message.payload, False
        return super().encode(message, wire)[0], True

    def decode(self, code: memoryview, shared: int, own: int, wire: Wire) -> Message:
        return TensorMessage.of_payload(bytes(code), wire.dimension, 0, 0)


CODES["tensors"] = TensorCode()


# A sender or a receiver ──────────────────────────────────────────────────


class Side:
    """A sender or a receiver: an instance of a method, and the headers of the last message.

    A sender assumes that the receiver has these headers once `has_arrived` is True. If a message was
    lost, the next one contains all headers again.

    `who` names it. A method that draws random numbers draws others at the server than at a client,
    unless it makes them from a seed that it has sent.
    """

    def __init__(self, rule: TensorRule, who: str, *numbers: int):
        self.rule, self.who, self.numbers = rule, who, numbers
        self.instance = rule.make()
        self.headers: list[bytes] = []  # for each parameter, the header of its last tensors
        self.has_arrived = True  # the message of which these are
        self.first_attributes = dict(getattr(self.instance, "__dict__", {}))

    def compress(self, vector_D: Tensor, round: int) -> bytes:
        """Return what the method makes of a difference (D,), as bytes. The difference is not changed.

        One bit for each parameter says whether its header is new; the new headers follow, then the
        tensors. Raises NotFiniteError if the difference is so large that half precision overflows.
        """
        contexts = self.rule.contexts()
        headers, data = [], []
        is_large = float(vector_D.norm()) > _LARGEST_HALF
        with self._fix_seeds(round):
            for context, view in zip(contexts, self.rule.views(vector_D), strict=True):
                tensor = view.clone(memory_format=torch.contiguous_format)
                given = self.instance.compress(tensor, context.name)
                header, content = _encode_tensors(given, context)
                if is_large and not _is_finite(given):
                    raise NotFiniteError(*self.numbers or (SERVER,))
                headers.append(header)
                data.append(content)
        before = (self.has_arrived and self.headers) or [b""] * len(headers)
        changed = [one != other for one, other in zip(headers, before, strict=True)]
        self.headers, self.has_arrived = headers, False
        news = [h for h, is_new in zip(headers, changed, strict=True) if is_new]
        lengths = b"".join(len(header).to_bytes(4, "little") for header in news)
        return np.packbits(changed).tobytes() + lengths + b"".join(news + data)

    def decompress(self, payload: bytes, round: int) -> Tensor:
        """Return what the method makes of the payload of the other side, (D,)."""
        contexts, headers, at = self._read_headers(payload)
        vector_D = torch.empty(self.rule.dimension, dtype=torch.float32)
        views = self.rule.views(vector_D)
        with self._fix_seeds(round):
            for context, header, view in zip(contexts, headers, views, strict=True):
                tensors, added, at = _decode_tensors(header, context, payload, at)
                view.copy_(_check_tensor(self.instance.decompress(tensors, added), context))
        if not math.isfinite(float(vector_D.sum())):
            for context, view in zip(contexts, views, strict=True):
                if not view.isfinite().all():
                    got = "got NaN or infinity, allowed: finite numbers"
                    raise ValueError(f"decompress: {context.name}: {got}")
        self.headers = headers
        return vector_D

    def _read_headers(self, payload: bytes) -> tuple[list[Context], list[bytes], int]:
        """Return contexts and headers of all parameters, and where in the payload the tensors begin."""
        contexts = self.rule.contexts()
        flags = -(-len(contexts) // 8)
        changed = np.unpackbits(np.frombuffer(payload[:flags], np.uint8))[: len(contexts)]
        headers = list(self.headers or [b""] * len(contexts))
        at = flags + 4 * int(changed.sum())
        for place, which in enumerate(np.flatnonzero(changed)):
            start = flags + 4 * place
            length = int.from_bytes(payload[start : start + 4], "little")
            headers[which], at = payload[at : at + length], at + length
        return contexts, headers, at

    @contextlib.contextmanager
    def _fix_seeds(self, round: int) -> Iterator[None]:
        """Make the random numbers in a `with` block depend on seed, round and side alone. Afterwards,
        the generators of torch, Python and numpy go on as if nothing had been drawn."""
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

    # What a resumed run needs. In the state, "said" are the headers.

    def state(self) -> Tensor:
        """Return what the instance keeps as bytes, in a tensor. Raises ValueError, which names the
        attribute, if a resumed run would go on without what is in it."""
        kept = self.instance.state_dict() if _has_state_dict(self.instance) else self._attributes()
        data = pack({"said": self.headers if self.has_arrived else [], "kept": kept})
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _attributes(self) -> dict[str, Any]:
        kind, kept = type(self.instance).__name__, {}
        if not hasattr(self.instance, "__dict__"):
            raise ValueError(f"{kind}: got a class with __slots__, {_ALLOWED}")
        for name, value in vars(self.instance).items():
            if _is_plain(value):
                kept[name] = value
            elif (
                not isinstance(value, _FIXED) or self.first_attributes.get(name, self) is not value
            ):
                got = f"got {type(value).__name__}"
                raise ValueError(f"attribute {name} of {kind}: {got}, {_ALLOWED}")
        return kept

    def load(self, state: Tensor) -> None:
        read = unpack(state.cpu().numpy().tobytes())
        self.headers, self.has_arrived = read["said"], True
        if _has_state_dict(self.instance):
            self.instance.load_state_dict(read["kept"])
        else:
            now = vars(self.instance)
            for name in now.keys() - read["kept"].keys() - self.first_attributes.keys():
                del now[name]  # it is younger than the state
            now.update(read["kept"])


_ALLOWED = (
    "allowed: numbers, strings, tensors, arrays, and lists, tuples, sets and dicts of these; or give the "
    "class the methods state_dict and load_state_dict"
)
_FIXED = (  # what such an attribute is cannot change, so it need not be kept
    type, property, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, partial,
    np.ufunc, np.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _has_state_dict(instance: Any) -> bool:
    return hasattr(instance, "state_dict") and hasattr(instance, "load_state_dict")


def _is_plain(value: Any) -> bool:
    """Return whether a value comes back from its bytes as it was. A dictionary of another class, such as
    a defaultdict, would come back as a plain one."""
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, dict | list | tuple | set) and type(value) is not torch.Size:
        return False
    try:
        pack(value)
    except ValueError:
        return False
    return True


def _is_finite(given: Any) -> bool:
    """Return whether there is no NaN or infinity in what `compress` returned."""
    if isinstance(given, list | tuple):
        return all(map(_is_finite, given))
    if isinstance(given, dict):
        return all(map(_is_finite, given.values()))
    if isinstance(given, Tensor):
        return bool(given.isfinite().all())
    return not isinstance(given, float | np.floating) or math.isfinite(given)


def _encode_tensors(given: Any, context: Context) -> tuple[bytes, bytes]:
    """Return the header of what `compress` returned, and the bytes of its tensors."""
    what = f"compress: {context.name}"
    if not isinstance(given, tuple) or len(given) != 2:
        got = f"got {type(given).__name__}"
        raise ValueError(f"{what}: {got}, allowed: (tensors, context), a tuple of two values")
    tensors, added = given
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    is_list = isinstance(tensors, list | tuple)
    wrong = [t for t in tensors if not isinstance(t, Tensor)] if is_list else [tensors]
    if wrong:
        got = f"payload: got a {type(wrong[0]).__name__}"
        raise ValueError(f"{what}: {got}, allowed: a list of tensors")
    if len(tensors) > _MOST_TENSORS:
        got = f"payload: got {len(tensors)} tensors"
        raise ValueError(f"{what}: {got}, allowed: at most {_MOST_TENSORS} for one parameter")
    try:
        packed = pack(added, context)
        shapes = b"".join(map(shape_bytes, tensors))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    header = len(packed).to_bytes(4, "little") + packed + bytes([len(tensors)]) + shapes
    return header, b"".join(map(tensor_bytes, tensors))


def _decode_tensors(
    header: bytes, context: Context, payload: bytes, at: int
) -> tuple[list[Tensor], Any, int]:
    """Return the tensors and the context for `decompress`, and where the next tensors begin."""
    length = int.from_bytes(header[:4], "little")
    added = unpack(header[4 : 4 + length], context)
    place, tensors = 5 + length, []
    for _ in range(header[4 + length]):
        dtype, shape, place = read_shape(header, place)
        tensor, at = read_tensor(payload, at, dtype, shape)
        tensors.append(tensor)
    return tensors, context if added is None else added, at


def _check_tensor(tensor: Any, context: Context) -> Tensor:
    """Return what `decompress` returned. Raises ValueError unless it has the parameter's shape."""
    what = f"decompress: {context.name}"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what}: got a {type(tensor).__name__}, allowed: a tensor")
    if tensor.shape != context.shape:
        got = tuple(tensor.shape)
        raise ValueError(f"{what}: got shape {got}, allowed: {tuple(context.shape)}")
    return tensor.detach()


# A scheme of a class ───────────────────────────────────────────────────────────────────────────────


def register_tensors(kind: type, name: str, **identity: Any) -> None:
    """Register schemes for a class with `compress` and `decompress`.

    There is one for each density: `name` for the first, and name-<density> for the others. `identity`
    becomes attributes of the rule, on which the digests of its runs depend.
    """
    given = getattr(kind, "densities", None)
    are_numbers = isinstance(given, list | tuple) and all(
        isinstance(one, int | float) and not isinstance(one, bool) and -math.inf < one < math.inf
        for one in given
    )
    if given is not None and not (are_numbers and given):
        allowed = "a list or tuple of one or more numbers, or no such attribute"
        got = " ".join(reprlib.repr(given).split())  # an array has several lines
        raise ValueError(f"{kind.__name__}: densities: got {got}, allowed: {allowed}")
    densities: list[Any] = [()] if given is None else [(density,) for density in given]
    names = [name, *(f"{name}-{density:g}" for (density,) in densities[1:])]
    for arguments in densities:
        _instance(kind, arguments)  # before anything is registered: can it be made?
    for one, arguments in zip(names, densities, strict=True):
        makes = partial(_instance, kind, arguments)  # its name is part of the digests of runs
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


def _instance(kind: type, arguments: tuple[Any, ...]) -> Any:
    try:
        return kind(*arguments)
    except TypeError as error:
        allowed = "a class that can be made without arguments, or with one of its `densities`"
        raise ValueError(f"{kind.__name__}: got {error}; allowed: {allowed}") from error


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
            sent_D = self.side.decompress(payload, known.round)
            flight = InFlight(known.round, known.shared_K, intended_D.clone(), sent_D, False)
        self.in_flight = flight
        return TensorMessage.of_payload(payload, known.dimension, self.number, known.round)

    def arrived(self, received: Message | None = None) -> None:
        is_dense = self.in_flight is not None and self.in_flight.dense
        super().arrived(received)
        if not is_dense:  # which has no headers
            self.side.has_arrived = True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"method": self.side.state()}

    def check_state(self, state: dict[str, Any]) -> None:
        _check_method_state(state.get("method"))
        super().check_state({key: value for key, value in state.items() if key != "method"})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.side.load(state["method"])


class TensorDownlink(Client):
    """The server as a sender, with an instance of the method and, with error feedback, errors. The
    instances at the clients that decode its messages are all alike, so that one stands for them."""

    def __init__(self, known: Known):
        super().__init__(known)
        self.number = SERVER
        rule = cast(TensorRule, known.rule)
        self.side, self.twin = Side(rule, "server"), Side(rule, "clients")

    def reply_to(self, update_D: Tensor, explored_D: Tensor) -> Message:
        known = self.known
        if known.dense:
            return Message.dense_of(update_D.clone(), SERVER, known.round)
        intended_D = update_D if self.errors_D is None else self.errors_D + update_D
        payload = self.side.compress(intended_D, known.round)
        sent_D = self.twin.decompress(payload, known.round)
        self.side.has_arrived = True
        if self.errors_D is not None:
            self.errors_D = intended_D - sent_D
        none_K, now = known.shared_K[:0], known.round
        return TensorMessage(sent_D, none_K, SERVER, now, payload=payload, is_decoded=True)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"method": [self.side.state(), self.twin.state()]}

    def check_state(self, state: dict[str, Any]) -> None:
        parts = state.get("method")
        if not isinstance(parts, list) or len(parts) != 2:
            got = f"{len(parts)} states" if isinstance(parts, list) else type(parts).__name__
            raise ValueError(
                f"state: method: got {got}, allowed: those of the server and the clients"
            )
        for part in parts:
            _check_method_state(part)
        super().check_state({key: value for key, value in state.items() if key != "method"})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for side, part in zip((self.side, self.twin), state["method"], strict=True):
            side.load(part)


class TensorServer(Server):
    """A server that decodes the messages of each client with an instance of the method for that client."""

    def __init__(self, known: Known, weights: list[float] | None = None):
        super().__init__(known, weights)
        self.rule, self.twins = cast(TensorRule, known.rule), dict[int, Side]()
        if self.rule.compresses_downlink:
            self.downlink = cast(Any, TensorDownlink(known))

    def add(self, number: int, message: Message) -> None:
        if isinstance(message, TensorMessage):
            payload, now = message.payload, self.known.round
            decode = lambda: self._twin(number).decompress(payload, now)  # noqa: E731
            message = replace(message, decode=decode)  # which `Server.add` calls after its checks
        super().add(number, message)

    def _twin(self, number: int) -> Side:
        if number not in self.twins:
            self.twins[number] = Side(self.rule, "twin", number)
        return self.twins[number]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"twins": {n: t.state() for n, t in self.twins.items()}}

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        if not isinstance(state["twins"], dict):
            raise ValueError("state of Server: twins: got no dictionary, allowed: one of states")
        for part in state["twins"].values():
            _check_method_state(part)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.twins = {}
        for number, part in state["twins"].items():
            self._twin(number).load(part)


def _check_method_state(part: Any) -> None:
    if not isinstance(part, Tensor) or part.dtype != torch.uint8 or part.dim() != 1:
        got = "none" if part is None else f"a {type(part).__name__}"
        raise ValueError(f"state: method: got {got}, allowed: the uint8 tensor that was saved")
    try:
        read = unpack(part.cpu().numpy().tobytes())
    except Exception as error:  # bytes that were not made here: struct and torch raise many kinds
        raise ValueError(f"state: method: got bytes that cannot be read ({error})") from None
    if not isinstance(read, dict) or read.keys() != {"said", "kept"}:
        got = f"the bytes of a {type(read).__name__}"
        raise ValueError(f"state: method: got {got}, allowed: the uint8 tensor that was saved")
