"""Packing: values as bytes, for messages of a method and for its state in a checkpoint.

Only plain values are packed: None, numbers, text, bytes, tuples, lists, dictionaries, sets, torch.Size,
torch.dtype, torch.Generator, tensors and numpy's arrays. Nothing is pickled, so that bytes from a stranger
cannot run code.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
        "uint16", "uint32", "complex64",
    )
}  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES.values())}
_BY_CODE = list(_DTYPES.values())
_COUNT, _INT, _FLOAT = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")


class Context(NamedTuple):
    """What client and server both know of a parameter tensor, so that it need not be sent."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def known(self) -> list[Any]:
        """The values that take a single byte wherever they occur in a method's context."""
        return [self.name, self.shape, self.shape.numel(), self.dtype]


# Values ───────────────────────────────────────────────────────────────────────────────────────────


def pack(value: Any, context: Context | None = None) -> bytes:
    """Return a value as bytes. Parts of it that `context` knows take one byte each.

    Raises ValueError, which names the type, for a value that is not plain.
    """
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"T", False: b"F"}[value]
    if context is not None:
        for place, known in enumerate(context.known):
            if type(value) is type(known) and value == known:
                return b"k" + bytes([place])
    if isinstance(value, np.generic):
        if context is None:  # in a state, it comes back as it was
            return b"n" + pack(np.asarray(value))
        return pack(value.item(), context)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return b"i" + _INT.pack(value)
    if isinstance(value, float):
        return b"f" + _FLOAT.pack(value)
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return (b"s" if isinstance(value, str) else b"b") + _COUNT.pack(len(data)) + data
    if isinstance(value, torch.dtype) and value in _CODES:
        return b"d" + bytes([_CODES[value]])
    if isinstance(value, Tensor):
        return b"t" + shape_bytes(value) + tensor_bytes(value)
    if isinstance(value, np.ndarray):
        return b"a" + pack(_from_numpy(value))
    if isinstance(value, torch.Generator):
        return b"g" + pack(value.get_state())
    if isinstance(value, dict):
        return b"m" + pack([part for pair in value.items() for part in pair], context)
    for kind, tag in _SEQUENCES.items():
        if isinstance(value, kind):
            parts: list[Any] = sorted(value, key=repr) if kind is set else list(value)
            return tag + _COUNT.pack(len(parts)) + b"".join(pack(part, context) for part in parts)
    raise ValueError(
        f"got a {type(value).__name__}, allowed: tensors, numbers, text, and lists of these"
    )


_SEQUENCES: dict[Any, bytes] = {torch.Size: b"z", tuple: b"(", list: b"[", set: b"{"}
_MAKERS: dict[bytes, Any] = {tag: kind for kind, tag in _SEQUENCES.items()}


def _from_numpy(array: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    except TypeError:
        raise ValueError(f"got an array of {array.dtype}, allowed: arrays of numbers") from None


def unpack(data: bytes, context: Context | None = None) -> Any:
    """Return the value that `pack` made bytes of. For other bytes, raises ValueError, or what struct,
    torch and Python raise for them."""
    value, end = _read(data, 0, context)
    if end != len(data):
        raise ValueError(
            f"got {len(data)} bytes, allowed: {end}, the length of the value that was packed"
        )
    return value


def _read(data: bytes, at: int, context: Context | None) -> tuple[Any, int]:
    """Read the value that begins at `at`. Return it and the position of the next one."""
    tag, at = data[at : at + 1], at + 1
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], at
    if tag == b"k" and context is not None:
        return context.known[data[at]], at + 1
    if tag in (b"i", b"f"):
        return (_INT if tag == b"i" else _FLOAT).unpack_from(data, at)[0], at + 8
    if tag in (b"s", b"b"):
        start = at + _COUNT.size
        end = start + _COUNT.unpack_from(data, at)[0]
        return (data[start:end].decode() if tag == b"s" else data[start:end]), end
    if tag == b"d":
        return _BY_CODE[data[at]], at + 1
    if tag == b"t":
        dtype, shape, at = read_shape(data, at)
        return read_tensor(data, at, dtype, shape)
    if tag == b"a":
        tensor, at = _read(data, at, None)
        return tensor.numpy(), at
    if tag == b"n":
        array, at = _read(data, at, None)
        return array[()], at
    if tag == b"g":
        state, at = _read(data, at, None)
        return torch.Generator().set_state(state), at
    if tag == b"m":
        parts, at = _read(data, at, context)
        return dict(zip(parts[::2], parts[1::2], strict=True)), at
    if tag in _MAKERS:
        count, at = _COUNT.unpack_from(data, at)[0], at + _COUNT.size
        parts = []
        for _ in range(count):
            part, at = _read(data, at, context)
            parts.append(part)
        return _MAKERS[tag](parts), at
    raise ValueError(f"got the tag {tag!r}, allowed: bytes that `pack` made, unchanged")


# Tensors ──────────────────────────────────────────────────────────────────────────────────────────


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the entries of a tensor as they lie in memory: as many bytes each as the dtype has."""
    if tensor.dtype == torch.bfloat16:  # which numpy does not have
        tensor = tensor.contiguous().view(torch.int16)
    return tensor.numpy(force=True).tobytes()


def shape_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's dtype and shape as bytes.

    Raises ValueError for a dtype or a layout that cannot be sent.
    """
    if tensor.layout != torch.strided:
        raise ValueError(
            f"got a tensor of layout {tensor.layout}, allowed: dense tensors (torch.strided)"
        )
    if tensor.dtype not in _CODES:
        raise ValueError(f"got a tensor of {tensor.dtype}, allowed: {', '.join(_DTYPES)}")
    sizes = b"".join(map(_COUNT.pack, tensor.shape))
    return bytes([_CODES[tensor.dtype], tensor.dim()]) + sizes


def read_shape(data: bytes, at: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Read the dtype and the shape that begin at `at`. Return them and the position behind them."""
    dtype, dimensions = _BY_CODE[data[at]], data[at + 1]
    end = at + 2 + _COUNT.size * dimensions
    shape = tuple(size for (size,) in _COUNT.iter_unpack(data[at + 2 : end]))
    return dtype, shape, end


def read_tensor(
    data: bytes, at: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[Tensor, int]:
    """Read the entries that begin at `at`, which are copied. Return the tensor and the position behind it."""
    end = at + math.prod(shape) * dtype.itemsize
    copied = bytearray(data[at:end])
    whole = torch.frombuffer(copied, dtype=dtype) if copied else torch.empty(0, dtype=dtype)
    return whole.reshape(shape), end


def recoded_size(tensor: Tensor) -> int:
    """Count the bytes of a tensor in a shorter code that loses nothing.

    The code puts the first bytes of all entries first, then their second bytes and so on, and
    compresses them with zlib. Where that is not shorter, the tensor's own bytes count.
    """
    data = np.frombuffer(tensor_bytes(tensor), np.uint8)
    if not len(data):
        return 0
    columns = data.reshape(-1, tensor.element_size()).T
    return min(len(data), len(zlib.compress(columns.tobytes(), 6)))
