"""Section 5: messages of bytes. They decode to what was encoded, at the length that was counted, and
nothing that a stranger sends does more than raise ValueError."""

import dataclasses
import random as python_random
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tcs_core as tcs

SCHEMES = ["TCS", "TCS-Q5", "TCS-LF-Q1", "top-K", "top-K-Q8", "rand-K-Q5", "FedAvg-Q3", "TCS-Q16"]
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


@pytest.mark.parametrize("plus", ["", "+"])
@given(st.sampled_from(SCHEMES), st.integers(1, 30) | st.just(DIMENSION), st.data())
def test_what_is_decoded_is_what_was_encoded_at_the_length_that_was_counted(
    plus, name, dimension, data
):
    sizes = SIZES if dimension == DIMENSION else (dimension,)
    wire = tcs.Wire.up(tcs.Scheme.named(name + plus), sizes)
    message, shared = drawn_message(data, wire, dimension)
    encoded = tcs.encode_message(message, wire)
    same(message, tcs.decode_message(encoded, wire, shared, message.sender, message.round))
    assert len(encoded) == -(-wire.bits(message) // 8) + tcs.OVERHEAD_BYTES


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50)
)
def test_dense_messages(values):
    wire = tcs.Wire.down(tcs.Scheme.named("TCS"), (len(values),))
    message = tcs.Message.dense_of(torch.tensor(values), tcs.SERVER, 3)
    encoded = tcs.encode_message(message, wire)
    same(message, tcs.decode_message(encoded, wire, None, tcs.SERVER, 3))
    assert 8 * len(encoded) == wire.bits(message) + 8 * tcs.OVERHEAD_BYTES == 32 * len(values) + 160


def test_bits_by_hand():
    """100 entries, 2 shared and 1 own value, 3 bits each, 4 means; one position in blocks of 64."""
    scheme = tcs.Scheme.named("TCS-Q3", phi_global=0.02, phi_local=0.02)
    wire = tcs.Wire.up(scheme, [100])
    message = tcs.Message.of(torch.tensor([1.0, -2.0, 4.0]), torch.tensor([60]), 3)
    assert wire.bits(message) == 3 * 3 + 4 * 32 + (1 + 6) + 2
    encoded = tcs.encode_message(message, wire)
    assert len(encoded) == 16 + (16 + 3) + 4  # header; means, 18 bits in 3 bytes; checksum
    # values 4 > 2 > 1 in four intervals of sigma = 2 ** -0.5: 1 in the last, 2 in the second after the
    # first; code = interval, plus 4 if negative; then an entry at 60 of block 0, its end, the end of block 1
    bits = "".join(f"{byte:08b}" for byte in encoded[32:35])
    codes = [int(bits[i : i + 3], 2) for i in (0, 3, 6)]
    assert codes == message.codes.tolist() and codes[0] == 3 and codes[1] >= 4 and codes[2] == 0
    assert bits[9:] == "1" + f"{60:06b}" + "0" + "0" + "000000"


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
    compressor.rule.begin(shared)
    own = compressor.rule.local_mask(values.roll(1), shared)
    chosen = values[torch.cat([shared, own])]
    message = tcs.Message.of(chosen, own, scheme.value_bits, sender=3, round=7)
    return tcs.Wire.up(scheme, sizes), message, shared


@pytest.mark.parametrize(
    ("name", "bits"), [("TCS", 0.364), ("TCS-L4-Q5", 0.0168), ("top-K", 0.407)]
)
def test_bytes_at_the_papers_size(name, bits):
    """ResNet-18: bits per parameter and local iteration, overhead and all, by the formula of design."""
    sizes = [p.numel() for p in tcs.resnet18().parameters()]
    wire, message, shared = example(name, sizes)
    encoded = tcs.encode_message(message, wire)
    same(message, tcs.decode_message(encoded, wire, shared))
    steps = tcs.Scheme.named(name).local_steps
    assert 8 * len(encoded) / sum(sizes) / steps == pytest.approx(bits, rel=5e-3)
    better = tcs.encode_message(message, tcs.Wire.up(tcs.Scheme.named(name + "+"), sizes))
    assert len(better) < len(encoded)


@pytest.mark.parametrize("k", [100, 1000, 11_174])
def test_gaps_of_positions_anywhere_cost_little_more_than_their_entropy(k):
    """log2 of the number of sets of k in D, by Stirling's series in math.lgamma."""
    import math

    dimension = 1000 * k
    generator = torch.Generator().manual_seed(k)
    positions = torch.randperm(dimension, generator=generator)[:k].sort().values
    logs = [math.lgamma(n + 1) for n in (dimension, k, dimension - k)]
    bound = (logs[0] - logs[1] - logs[2]) / math.log(2)
    code = tcs._gap_code(positions.numpy(), (dimension,))
    assert bound < 8 * len(code) <= 1.02 * bound


# What a stranger sends ────────────────────────────────────────────────────────────────────────────

ATTACKED = ["TCS", "TCS-Q5", "TCS-Q5+", "top-K-Q5", "top-K-Q5+", "TCS+", "rand-K-Q5+", "FedAvg-Q3+",
            "FedAvg"]  # fmt: skip
ATTEMPTS = 100_000 // (2 * len(ATTACKED)) + 1


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


@pytest.mark.parametrize("seal", [False, True], ids=["as is", "resealed"])
@pytest.mark.parametrize("name", ATTACKED)
def test_bytes_from_anyone_are_a_valid_message_or_a_value_error(name, seal):
    rng = python_random.Random(name)
    if name == "FedAvg":
        wire, shared = tcs.Wire.up(tcs.Scheme.named("FedAvg"), SIZES), None
        good = tcs.encode_message(tcs.Message.dense_of(like_training()), wire)
    else:
        wire, message, shared = example(name)
        good = tcs.encode_message(message, wire)
    accepted = refused = 0
    for _ in range(ATTEMPTS):
        data = mutated(good, rng)
        data = sealed(data) if seal and len(data) > 20 else data
        try:
            found = tcs.decode_message(data, wire, shared)
        except ValueError:
            refused += 1
            continue
        accepted += 1
        same(found, tcs.decode_message(tcs.encode_message(found, wire), wire, shared))
    assert refused > ATTEMPTS / 3
    assert accepted or not seal


def test_memory_is_bounded_by_the_input():
    """A deflate stream of a million equal values, and counts that promise everything."""
    wire, message, shared = example("TCS-Q5+")
    good = tcs.encode_message(message, wire)
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflate.compress(bytes(50_000_000)) + deflate.flush()
    start = 16 + 64 + -(-len(message.values) // 8)
    attacks = [good[:start] + b"\1" + bomb, good[:12] + b"\xff" * 4 + good[16:]]
    tracemalloc.start()
    for data in attacks:
        before, data = tracemalloc.get_traced_memory()[0], sealed(data + bytes(4))
        tracemalloc.reset_peak()
        with pytest.raises(ValueError, match="message"):
            tcs.decode_message(data, wire, shared)
        assert tracemalloc.get_traced_memory()[1] - before < 20 * len(data) + 20_000
    tracemalloc.stop()


def tampered(message, **changes):
    return dataclasses.replace(message, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"sender": 4}, "sender: got 4, allowed: 3"), ({"round": 6}, "round: got 6, allowed: 7")],
)  # fmt: skip
def test_another_clients_message_and_a_replayed_round(changes, text):
    wire, message, shared = example("TCS-Q5")
    data = tcs.encode_message(tampered(message, **changes), wire)
    with pytest.raises(ValueError, match=text):
        tcs.decode_message(data, wire, shared, sender=3, round=7)


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5+"])
def test_positions_of_the_shared_mask_are_refused(name):
    wire, message, shared = example(name)
    inside = tampered(message, positions=shared[:1])
    with pytest.raises(ValueError, match="shared mask"):
        tcs.decode_message(tcs.encode_message(inside, wire), wire, shared)


def test_another_scheme_another_layout_and_a_dense_message_are_refused():
    wire, message, shared = example("TCS-Q5")
    data = tcs.encode_message(message, wire)
    for other in (
        tcs.Wire.up(tcs.Scheme.named("TCS-Q6"), SIZES),
        tcs.Wire.up(tcs.Scheme.named("TCS-Q5"), (1000,)),
    ):
        with pytest.raises(ValueError, match="another scheme"):
            tcs.decode_message(data, other, shared)
    with pytest.raises(ValueError, match="kind: got 0, allowed: 1"):
        tcs.decode_message(data, wire, None)
    dense = tcs.encode_message(tcs.Message.dense_of(torch.zeros(DIMENSION)), wire)
    with pytest.raises(ValueError, match="kind: got 1, allowed: 0"):
        tcs.decode_message(dense, wire, shared)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_neither_sent_nor_received(bad):
    wire, message, shared = example("TCS")
    values = message.values.clone()
    values[2] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        tcs.encode_message(tampered(message, values=values), wire)
    data = bytearray(tcs.encode_message(message, wire))
    data[16 + 8 : 16 + 12] = values[2:3].numpy().tobytes()
    with pytest.raises(ValueError, match="NaN or infinity"):
        tcs.decode_message(sealed(bytes(data)), wire, shared)


# Training on messages ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    ["TCS", "TCS-Q5", "TCS-LF-Q5+", "top-K", "top-K-Q5++", "rand-K", "FedAvg", "FedAvg-Q3++", "TCS-L2-Q5++",
     "TCS-D5", "TCS-Q5-NW", "TCS-Momentum++", "TCS-L4-M2-E3++", "top-K-M3"],
)  # fmt: skip
def test_a_compressor_on_real_messages_gives_the_same_bit_for_bit(name):
    scheme = tcs.Scheme.named(name)
    links = (tcs.Link(), tcs.ByteLink())
    counted, real = (tcs.Compressor(scheme, SIZES, 3, link=link) for link in links)
    for round_ in range(6):
        deltas = torch.stack([like_training(seed=10 * round_ + n) for n in range(3)])
        who = [0, 2] if round_ == 4 else None
        one, two = (c.step(deltas, dense=round_ == 3, clients=who) for c in (counted, real))
        assert torch.equal(one, two)
        assert torch.equal(counted.errors_ND, real.errors_ND)
        assert torch.equal(counted.server_errors_D, real.server_errors_D)
        for key in ("bits_up", "bits_down", "bytes_up", "bytes_down"):
            assert getattr(counted, key) == getattr(real, key) > 0, key


@pytest.mark.parametrize("name", ["TCS-D5", "TCS-M2-E3++", "top-K-D3", "FedAvg-Q3++", "rand-K-D5"])
def test_what_the_server_does_not_send_stays_in_its_errors(name):
    """Sum of all updates sent plus both sides' errors is the sum of all deltas."""
    compressor = tcs.Compressor(tcs.Scheme.named(name), SIZES, 3)
    total, sent = torch.zeros(DIMENSION).double(), torch.zeros(DIMENSION).double()
    for round_ in range(20):
        deltas = torch.stack([like_training(seed=10 * round_ + n) for n in range(3)])
        total += deltas.double().mean(0)
        sent += compressor.step(deltas).double()
    left = compressor.errors_ND.double().mean(0) + compressor.server_errors_D.double()
    torch.testing.assert_close(sent + left, total, rtol=0, atol=1e-3)
    assert compressor.server_errors_D.any()


def test_without_a_dense_warm_up_all_start_with_their_own_largest_entries():
    scheme = tcs.Scheme.named("TCS-NW", phi_global=0.02, phi_local=0.01)
    compressor = tcs.Compressor(scheme, SIZES, 1)
    first = like_training(seed=1)
    assert torch.equal(compressor.step(first[None]), first * tcs.top_k_mask(first, 30))
    assert not compressor.known.dense
    mask = compressor.rule.shared_mask()
    assert torch.equal(mask, tcs.top_k_positions(first * tcs.top_k_mask(first, 30), 20))


def test_a_downlink_compressed_like_the_uplink_is_as_small():
    compressor = tcs.Compressor(tcs.Scheme.named("TCS-Q5-D5", phi_down=1e-3), SIZES, 3)
    for round_ in range(3):
        compressor.step(torch.stack([like_training(seed=10 * round_ + n) for n in range(3)]))
    assert compressor.bits_down == compressor.bits_up
    assert compressor.bytes_up == 3 * compressor.bytes_down


def test_two_bits_and_a_larger_mask_down_are_as_short_as_the_papers_five_bits_up():
    """At the paper's size: TCS-Q5's way up, and the way down that -D2 makes of it."""
    scheme, dimension = tcs.Scheme.named("TCS-Q5-D2"), 11_173_962
    sizes = [dimension]
    shared = tcs.kept(scheme.phi_global, dimension)
    ways = ((tcs.Wire.up(scheme, sizes), scheme.phi_local),
            (tcs.Wire.down(scheme, sizes), scheme.phi_down))  # fmt: skip
    up, down = (
        wire.block_code_bits(shared + tcs.kept(phi, dimension), tcs.kept(phi, dimension))
        for wire, phi in ways
    )
    assert down <= 1.02 * up
