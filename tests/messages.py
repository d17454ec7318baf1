"""Messages for tests: drawn ones, ones as of a training, and what a stranger makes of them."""

import random as python_random
import zlib

import torch
from hypothesis import strategies as st

import tcs_core as tcs

SIZES = (700, 1, 250, 49)
DIMENSION = sum(SIZES)


def drawn_message(data, wire, dimension):
    """Any shared and own positions, any finite values; and the shared positions."""
    order = data.draw(st.permutations(range(dimension))) if dimension < 40 else None
    if order is None:
        seed = data.draw(st.integers(0, 2**32 - 1))
        order = torch.randperm(dimension, generator=torch.Generator().manual_seed(seed)).tolist()
    shared = data.draw(st.integers(0, dimension))
    own = data.draw(st.integers(0, dimension - shared))
    positions = [
        torch.tensor(sorted(p)).long() for p in (order[:shared], order[shared : shared + own])
    ]
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    kind = data.draw(st.sampled_from(["any", "zeros", "equal", "normal", "denormal"]))
    count = shared + own
    if kind == "any":
        values = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)))
    else:
        noise = torch.randn(count, generator=torch.Generator().manual_seed(count))
        one = {"zeros": 0.0, "equal": -2.5, "normal": noise, "denormal": noise * 1e-42}[kind]
        values = torch.zeros(count) + one
    values = values.float()
    round_, sender = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(0, 0xFFFF))
    return tcs.Message.of(values, positions[1], wire.value_bits, sender, round_), positions[0]


def same(one, two):
    """Equal in every field, bit for bit (-0.0 is not 0.0)."""
    for key, value in vars(one).items():
        other = getattr(two, key)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and value.shape == other.shape, key
            assert value.numpy().tobytes() == other.numpy().tobytes(), key
        else:
            assert value == other, key


def like_training(dimension=DIMENSION, seed=0):
    """Heavy-tailed values, whose large ones lie in some layers more than in others."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.ones(dimension)
    scale[: dimension // 3] = 4.0
    return scale * torch.randn(dimension, generator=generator) ** 3


def example(name, sizes=SIZES, seed=0):
    """A wire, a message and the shared positions of one round."""
    scheme = tcs.Scheme.named(name)
    values = like_training(sum(sizes), seed)
    compressor = tcs.Compressor(scheme, sizes, 1)
    compressor.step(values[None])
    shared = compressor.rule.shared_mask()
    compressor.known.begin()
    own = compressor.clients[0].own_positions(values.roll(1))
    chosen = values[torch.cat([shared, own])]
    message = tcs.Message.of(chosen, own, scheme.value_bits, sender=3, round=7)
    return tcs.Wire.up(scheme, sizes), message, shared


def sealed(data):
    """With a right checksum, so that what is inside is looked at."""
    return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


def mutated(data, rng):
    """Flipped, cut, lengthened, overwritten or all new."""
    data, kind = bytearray(data), rng.randrange(6)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data[rng.randrange(len(data)) :] = rng.randbytes(rng.randint(0, 60))
    elif kind == 3:
        place = rng.randrange(16, len(data))
        data[place : place + rng.randint(0, 9)] = rng.randbytes(rng.randint(0, 9))
    elif kind == 4:
        data[12:16] = rng.choice([0, 1, 5, DIMENSION, 2**31, 2**32 - 1]).to_bytes(4, "little")
    else:
        data = bytearray(rng.randbytes(rng.randint(0, 80)))
    return bytes(data)


def round_trip(data, name, dimension):
    """Asserts that what is decoded is what was encoded: the bytes, and the bits that are counted."""
    sizes = SIZES if dimension == DIMENSION else (dimension,)
    wire = tcs.Wire.up(tcs.Scheme.named(name), sizes)
    message, shared = drawn_message(data, wire, dimension)
    encoded = tcs.encode_message(message, wire)
    same(message, tcs.decode_message(encoded, wire, shared, message.sender, message.round))
    return encoded, tcs.message_bits(message, wire)


def attack(name, seal, attempts):
    """How many changed messages are accepted, and refused by a ValueError; what is accepted is
    asserted to be a message like any other."""
    rng = python_random.Random(name)
    if name == "FedAvg":
        wire, shared = tcs.Wire.up(tcs.Scheme.named("FedAvg"), SIZES), None
        good = tcs.encode_message(tcs.Message.dense_of(like_training()), wire)
    else:
        wire, message, shared = example(name)
        good = tcs.encode_message(message, wire)
    accepted = refused = 0
    for _ in range(attempts):
        data = mutated(good, rng)
        data = sealed(data) if seal and len(data) > 20 else data
        try:
            found = tcs.decode_message(data, wire, shared)
        except ValueError:
            refused += 1
            continue
        accepted += 1
        same(found, tcs.decode_message(tcs.encode_message(found, wire), wire, shared))
    return accepted, refused
