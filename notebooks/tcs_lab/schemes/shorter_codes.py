"""Code "entropy": the values and positions of a message in fewer bits, without loss.

Signs take a bit each, intervals are Huffman-coded by zlib, and positions are sent as gaps in a
Golomb-Rice code. Where the paper's code "block" is shorter, that is sent instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from tcs_core import (
    CODES,
    BlockCode,
    Message,
    Wire,
    block_code_bits,
    float_bytes,
    floats_of,
    from_bits,
    means_of,
    pack_bits,
    quantized_message,
    to_bits,
    unpack_bits,
)


class EntropyCode(BlockCode):
    """A code whose length depends on the values: a message has to be encoded to know it."""

    def encode(self, message: Message, wire: Wire) -> tuple[bytes, bool]:
        code = encode_entropy(message, wire)
        count, own = len(message.values), len(message.positions)
        if 8 * len(code) < 8 + block_code_bits(wire.value_bits, count, own, wire.dimension):
            return code, False
        return super().encode(message, wire)[0], True

    def decode(self, code: memoryview, shared: int, own: int, wire: Wire) -> Message:
        return _decode_entropy(code, shared, own, wire)


CODES["entropy"] = EntropyCode()


def encode_entropy(message: Message, wire: Wire) -> bytes:
    own, shared = len(message.positions), len(message.values) - len(message.positions)
    if message.codes is not None and message.means is not None:
        codes = message.codes.cpu().numpy()
        interval = (codes & wire.intervals - 1).astype(np.uint16)
        values = [float_bytes(message.means), pack_bits([codes >= wire.intervals])]
        width = wire.value_bits - 1
        values += [encode_shortest(part, width) for part in (interval[:shared], interval[shared:])]
    else:
        values = [float_bytes(message.values)]
    positions = message.positions.cpu().numpy()
    return b"".join([*values, encode_gaps(positions, wire.layer_sizes) if own else b""])


def _decode_entropy(code: memoryview, shared: int, own: int, wire: Wire) -> Message:
    count = shared + own
    floats = 4 * (wire.intervals or count)
    head, rest = code[:floats], code[floats:]
    if not wire.intervals:
        positions = _decode_gaps(rest, own, wire.layer_sizes)
        return Message(floats_of(head, count), positions)
    signs = unpack_bits(rest[: -(-count // 8)], count)
    rest, width = rest[-(-count // 8) :], wire.value_bits - 1
    parts = []
    for length in (shared, own):
        part, rest = _decode_shortest(rest, length, width)
        parts.append(part)
    positions = _decode_gaps(rest, own, wire.layer_sizes)
    codes = np.concatenate(parts) + wire.intervals * signs.astype(np.uint16)
    return quantized_message(codes, means_of(head, wire.intervals), positions)


# The byte before a stream is an index into these; 0 stands for plain bits of fixed width.
_STRATEGIES = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)


def encode_shortest(numbers: np.ndarray, width: int) -> bytes:
    """Encode numbers below 2^width in the shortest of three codes. The first byte says in which."""
    if not len(numbers) or not width:
        return b""
    symbols, codes = numbers.astype(np.uint8).tobytes(), {}
    for choice in (1, 2) if width <= 8 else ():
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, _STRATEGIES[choice])
        codes[choice] = deflate.compress(symbols) + deflate.flush()
    sizes = {0: -(-len(numbers) * width // 8)} | {key: len(code) for key, code in codes.items()}
    best = min(sizes, key=lambda key: sizes[key])
    return bytes([best]) + (codes[best] if best else pack_bits([to_bits(numbers, width)]))


def _decode_shortest(data: memoryview, count: int, width: int) -> tuple[np.ndarray, memoryview]:
    """Read `count` numbers from the start of `data`. Return them and the rest of the data."""
    if not count or not width:
        return np.zeros(count, np.uint16), data
    if not len(data) or data[0] >= len(_STRATEGIES) or (data[0] and width > 8):
        raise ValueError(
            f"message: values: got code {bytes(data[:1])!r}, allowed: one of {len(_STRATEGIES)} codes"
        )
    choice, data = data[0], data[1:]
    if not choice:
        size = -(-count * width // 8)
        return from_bits(unpack_bits(data[:size], count * width), width), data[size:]
    symbols, rest = _inflate(data, count)
    numbers = np.frombuffer(symbols, np.uint8).astype(np.uint16)
    if numbers.max() >> width:
        raise ValueError(
            f"message: values: got the code {numbers.max()}, allowed: codes of {width} bits"
        )
    return numbers, rest


def _inflate(data: memoryview, size: int) -> tuple[bytes, memoryview]:
    """Decompress exactly `size` bytes of a raw deflate stream, and never hold more of them in memory.

    Returns them and what follows the stream. Raises ValueError for a stream of another length.
    """
    inflate = zlib.decompressobj(-15)
    try:
        symbols = inflate.decompress(data, size)
        extra = inflate.decompress(inflate.unconsumed_tail, 1)  # reads on to the end mark
    except zlib.error as error:
        raise ValueError(
            f"message: values: got bytes that zlib cannot decompress ({error})"
        ) from error
    if len(symbols) != size or extra or not inflate.eof:
        raise ValueError(f"message: values: got more or fewer of them, allowed: {size}")
    return symbols, data[len(data) - len(inflate.unused_data) :]


def _rice_widths(counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Choose how many bits the remainder of a gap has, for `counts` positions in layers of `sizes`: log2
    of ln 2 times the mean gap."""
    mean_256 = 177 * (sizes - counts) // np.maximum(counts, 1)  # ln 2 = 177 / 256
    return np.array([max(0, (int(m) >> 8).bit_length() - 1) for m in mean_256], np.int64)


def _encode_rice(numbers: np.ndarray, widths: np.ndarray) -> list[np.ndarray]:
    """Encode numbers by Golomb and Rice: first all quotients, each as zeros and a one, then the
    remainders."""
    ends = np.cumsum((numbers >> widths) + 1) - 1
    quotients = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    quotients[ends] = 1
    remainders = np.zeros(int(widths.sum()), np.uint8)
    for fields, places, shifts in _columns(widths):
        remainders[places] = numbers[fields] >> shifts & 1
    return [quotients, remainders]


def _columns(widths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Go through the bits of fields that have these widths and stand side by side: first the first bits
    of all fields, then the second bits, and so on. Each time yield the fields that have such a bit,
    the bit's index, and its distance from the field's right end."""
    starts = np.cumsum(widths) - widths
    for column in range(int(widths.max(initial=0))):
        fields = np.flatnonzero(widths > column)
        yield fields, starts[fields] + column, widths[fields] - 1 - column


_TOO_SHORT = "message: positions: got a code that ends too early, allowed: the whole of a code"


def _decode_rice(bits: np.ndarray, count: int, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read `count` numbers whose remainders have these widths. Return them and the bits behind them."""
    ones = np.flatnonzero(bits)[:count]
    if len(ones) < count:
        raise ValueError(_TOO_SHORT)
    quotients = np.diff(ones, prepend=-1) - 1
    bits = bits[ones[-1] + 1 :] if count else bits
    length = int(widths.sum())
    if len(bits) < length:
        raise ValueError(_TOO_SHORT)
    remainders = np.zeros(count, np.int64)
    for fields, places, _ in _columns(widths):
        remainders[fields] = remainders[fields] << 1 | bits[places]
    return (quotients << widths) + remainders, bits[length:]


def _split_by_layer(positions: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the positions in each layer, and return every position's gap to the one before it there."""
    ends = np.cumsum(sizes)
    layer_K = np.searchsorted(ends, positions, side="right")
    previous = np.concatenate([[-1], positions[:-1]])
    previous = np.maximum(previous, (ends - sizes)[layer_K] - 1)
    return np.bincount(layer_K, minlength=len(sizes)), positions - previous - 1


_WIDTH_BITS = 5  # they say how wide the remainders of the layers' counts are


def _gap_bits(positions: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    counts, gaps = _split_by_layer(positions, sizes)
    streams = [] if len(sizes) == 1 else _count_bits(counts)
    return streams + _encode_rice(gaps, np.repeat(_rice_widths(counts, sizes), counts))


def _count_bits(counts: np.ndarray) -> list[np.ndarray]:
    width = min(range(20), key=lambda w: int((counts >> w).sum()) + w * len(counts))
    coded = _encode_rice(counts, np.full(len(counts), width))
    return [to_bits(np.array([width]), _WIDTH_BITS), *coded]


def encode_gaps(positions: np.ndarray, layer_sizes: Iterable[int]) -> bytes:
    """Encode positions as gaps. The first bit says whether layers are coded apart, in which case their
    counts follow; the shorter way is taken."""
    sizes = np.array(layer_sizes)
    whole_or_layers = enumerate((sizes.sum(keepdims=True), sizes))
    options = [[np.array([i], np.uint8), *_gap_bits(positions, s)] for i, s in whole_or_layers]
    return pack_bits(min(options, key=lambda streams: sum(map(len, streams))))


def _decode_gaps(data: memoryview, own: int, layer_sizes: Iterable[int]) -> Tensor:
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if not own or not len(bits):
        if own or len(bits):
            raise ValueError(f"message: positions: got {len(bits)} bits for {own} positions")
        return torch.empty(0, dtype=torch.int64, device="cpu")
    sizes, by_layer, bits = np.array(layer_sizes), bits[0], bits[1:]
    counts = np.array([own])
    if by_layer:
        if len(bits) < _WIDTH_BITS:
            raise ValueError(_TOO_SHORT)
        width = int(from_bits(bits[:_WIDTH_BITS], _WIDTH_BITS)[0])
        widths = np.full(len(sizes), width)
        counts, bits = _decode_rice(bits[_WIDTH_BITS:], len(sizes), widths)
    else:
        sizes = sizes.sum(keepdims=True)
    if counts.sum() != own or (counts > sizes).any():
        raise ValueError(
            f"message: positions: got counts per layer of {counts.sum()} in all, allowed: {own} in all, and "
            "no more in a layer than it has entries"
        )
    gaps, bits = _decode_rice(bits, own, np.repeat(_rice_widths(counts, sizes), counts))
    if len(bits) > 7 or bits.any():
        raise ValueError(
            f"message: positions: got {len(bits)} bits behind the last one, allowed: up to 7, all zero"
        )
    return torch.from_numpy(_sum_gaps(gaps, counts, sizes))


def _sum_gaps(gaps: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return positions from gaps, which start anew in each layer.

    Raises ValueError for a position outside of its layer.
    """
    ends, firsts = np.cumsum(sizes), np.cumsum(counts) - counts
    steps = np.cumsum(gaps + 1)
    before = np.concatenate([[0], steps])[firsts]  # the sum of all steps in earlier layers
    positions = steps - np.repeat(before - (ends - sizes), counts) - 1
    if (gaps > sizes.sum()).any() or (positions >= np.repeat(ends, counts)).any():
        raise ValueError(
            "message: positions: got one outside of its layer, allowed: below its size"
        )
    return positions
