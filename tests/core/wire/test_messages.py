"""Section 5: messages of bytes. They decode to what was encoded, at the length that was counted, and
nothing that a stranger sends does more than raise ValueError."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import DIMENSION, SIZES, attack, example, like_training, round_trip, same, sealed

import tcs_core as tcs

SCHEMES = ["TCS", "TCS-Q5", "TCS-LF-Q1", "top-K", "top-K-Q8", "rand-K-Q5", "FedAvg-Q3", "TCS-Q16"]


@given(st.sampled_from(SCHEMES), st.integers(1, 30) | st.just(DIMENSION), st.data())
def test_what_is_decoded_is_what_was_encoded_at_the_length_that_was_counted(name, dimension, data):
    encoded, bits = round_trip(data, name, dimension)
    assert len(encoded) == -(-bits // 8) + tcs.OVERHEAD_BYTES


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50)
)
def test_dense_messages(values):
    wire = tcs.Wire.down(tcs.Scheme.named("TCS"), (len(values),))
    message = tcs.Message.dense_of(torch.tensor(values), tcs.SERVER, 3)
    encoded = tcs.encode_message(message, wire)
    same(message, tcs.decode_message(encoded, wire, None, tcs.SERVER, 3))
    assert (
        8 * len(encoded)
        == tcs.message_bits(message, wire) + 8 * tcs.OVERHEAD_BYTES
        == 32 * len(values) + 160
    )


def test_bits_by_hand():
    """100 entries, 2 shared and 1 own value, 3 bits each, 4 means; one position in blocks of 64."""
    scheme = tcs.Scheme.named("TCS-Q3", phi_global=0.02, phi_local=0.02)
    wire = tcs.Wire.up(scheme, [100])
    message = tcs.Message.of(
        torch.tensor([1.0, -2.0, 4.0]), torch.tensor([60]), 3, sender=3, round=7
    )
    assert tcs.message_bits(message, wire) == 3 * 3 + 4 * 32 + (1 + 6) + 2
    encoded = tcs.encode_message(message, wire)
    assert len(encoded) == 16 + (16 + 3) + 4  # header; means, 18 bits in 3 bytes; checksum
    # values 4 > 2 > 1 in four intervals of sigma = 2 ** -0.5: 1 in the last, 2 in the second after the
    # first; code = interval, plus 4 if negative; then an entry at 60 of block 0, its end, the end of block 1
    bits = "".join(f"{byte:08b}" for byte in encoded[32:35])
    codes = [int(bits[i : i + 3], 2) for i in (0, 3, 6)]
    assert codes == message.codes.tolist() and codes[0] == 3 and codes[1] >= 4 and codes[2] == 0
    assert bits[9:] == "1" + f"{60:06b}" + "0" + "0" + "000000"
    # As bytes, which no change of this version's code may alter: peers would misread them.
    assert encoded.hex() == (
        "03000300070000008d499213010000000000804000000000000000400000803f787c0028fce870"
    )


def test_the_entries_that_a_seed_draws_are_the_same_everywhere():
    assert tcs.random_positions(5, 100, 7, 0).tolist() == [57, 60, 67, 88, 90]


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


# What a stranger sends ────────────────────────────────────────────────────────────────────────────

ATTACKED = ["TCS", "TCS-Q5", "top-K-Q5", "FedAvg"]


@pytest.mark.parametrize("seal", [False, True], ids=["as is", "resealed"])
@pytest.mark.parametrize("name", ATTACKED)
def test_bytes_from_anyone_are_a_valid_message_or_a_value_error(name, seal):
    accepted, refused = attack(name, seal, 1500)
    assert refused > 1500 / 3 and (accepted or not seal)


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


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5"])
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
    with pytest.raises(ValueError, match="dense: got False, allowed: True"):
        tcs.decode_message(data, wire, None)
    dense = tcs.encode_message(tcs.Message.dense_of(torch.zeros(DIMENSION)), wire)
    with pytest.raises(ValueError, match="dense: got True, allowed: False"):
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


def test_what_would_be_decoded_to_another_message_is_refused():
    none, kind = torch.empty(0, dtype=torch.int64), torch.int32
    plain, quantized = (tcs.Wire.up(name, [10]) for name in ("TCS", "TCS-Q5"))
    dense, means = tcs.Message.dense_of(torch.ones(10)), torch.ones(16)
    empty = tcs.Message.of(torch.empty(0), none, 5)
    for message, wire, text in (
        (dataclasses.replace(dense, codes=torch.zeros(10, dtype=kind), means=means), quantized, "quantized"),
        (tcs.Message(torch.ones(2), none, codes=torch.zeros(2, dtype=kind)), plain, "quantized"),
        (tcs.Message(torch.ones(2), none), quantized, "float32"),
        (tcs.Message(torch.ones(20), none), plain, "20 for 0 positions"),
        (dataclasses.replace(empty, means=torch.full((16,), float("nan"))), quantized, "means"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"got {text}"):
            tcs.encode_message(message, wire)


# Training on messages ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    ["TCS", "TCS-Q5", "TCS-LF-Q5", "TCS-PLF", "top-K", "top-K-Q5", "rand-K", "FedAvg", "FedAvg-Q3"],
)  # fmt: skip
def test_a_compressor_on_real_messages_gives_the_same_bit_for_bit(name):
    scheme = tcs.Scheme.named(name)
    links = (tcs.Link(), tcs.Link(tcs.unchanged))
    counted, real = (tcs.Compressor(scheme, SIZES, 3, link=link) for link in links)
    for round_ in range(6):
        deltas = torch.stack([like_training(seed=10 * round_ + n) for n in range(3)])
        who = [0, 2] if round_ == 4 else None
        one, two = (c.step(deltas, dense=round_ == 3, clients=who) for c in (counted, real))
        assert torch.equal(one, two)
        assert torch.equal(counted.errors_ND, real.errors_ND)
        for key in ("bits_up", "bits_down", "bytes_up", "bytes_down"):
            assert getattr(counted, key) == getattr(real, key) > 0, key
