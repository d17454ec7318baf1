"""Shorter codes (+, ++): what they lose is nothing, what a stranger sends is refused."""

import math
import tracemalloc
import zlib

import pytest
import tcs_lab.schemes.variants  # noqa: F401  (+, ++)
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import DIMENSION, SIZES, attack, example, like_training, round_trip, same, sealed
from tcs_lab.schemes import shorter_codes

import tcs_core as tcs

SCHEMES = ["TCS+", "TCS-Q5+", "TCS-LF-Q1+", "top-K+", "top-K-Q8+", "rand-K-Q5+", "FedAvg-Q3+", "TCS-Q16+",
           "TCS-M3+"]  # fmt: skip


@given(st.sampled_from(SCHEMES), st.integers(1, 30) | st.just(DIMENSION), st.data())
def test_what_is_decoded_is_what_was_encoded_at_the_length_that_was_counted(name, dimension, data):
    encoded, bits = round_trip(data, name, dimension)
    assert len(encoded) == -(-bits // 8) + tcs.OVERHEAD_BYTES


@pytest.mark.parametrize("name", ["TCS", "TCS-L4-Q5", "top-K"])
def test_at_the_papers_size_they_are_shorter(name):
    sizes = [p.numel() for p in tcs.resnet18().parameters()]
    wire, message, shared = example(name, sizes)
    better = tcs.Wire.up(tcs.Scheme.named(name + "+"), sizes)
    encoded = tcs.encode_message(message, better)
    same(message, tcs.decode_message(encoded, better, shared))
    assert len(encoded) < len(tcs.encode_message(message, wire))


@pytest.mark.parametrize("k", [100, 1000, 11_174])
def test_gaps_of_positions_anywhere_cost_little_more_than_their_entropy(k):
    """log2 of the number of sets of k in D, by Stirling's series in math.lgamma."""
    dimension = 1000 * k
    generator = torch.Generator().manual_seed(k)
    positions = torch.randperm(dimension, generator=generator)[:k].sort().values
    logs = [math.lgamma(n + 1) for n in (dimension, k, dimension - k)]
    bound = (logs[0] - logs[1] - logs[2]) / math.log(2)
    code = shorter_codes.encode_gaps(positions.numpy(), (dimension,))
    assert bound < 8 * len(code) <= 1.02 * bound


def test_positions_in_one_layer_are_shorter_layer_by_layer():
    """And are so coded."""
    sizes = (1, 60_000, 3, 4_000_000)
    generator = torch.Generator().manual_seed(3)
    positions = 1 + torch.randperm(60_000, generator=generator)[:30_000].sort().values
    by_layer = shorter_codes.encode_gaps(positions.numpy(), sizes)
    whole = shorter_codes.encode_gaps(positions.numpy(), (sum(sizes),))
    assert len(by_layer) < 0.5 * len(whole)
    for code, layers in ((by_layer, sizes), (whole, (sum(sizes),))):
        found = shorter_codes._decode_gaps(memoryview(code), 30_000, layers)
        assert torch.equal(found, positions)


ATTACKED = ["TCS-Q5+", "top-K-Q5+", "TCS+", "rand-K-Q5+", "FedAvg-Q3+"]


@pytest.mark.parametrize("seal", [False, True], ids=["as is", "resealed"])
@pytest.mark.parametrize("name", ATTACKED)
def test_bytes_from_anyone_are_a_valid_message_or_a_value_error(name, seal):
    accepted, refused = attack(name, seal, 5600)
    assert refused > 5600 / 3 and (accepted or not seal)


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


def test_positions_of_the_shared_mask_are_refused():
    wire, message, shared = example("TCS-Q5+")
    inside = tcs.Message(message.values, shared[:1], 3, 7, message.codes, message.means)
    with pytest.raises(ValueError, match="shared mask"):
        tcs.decode_message(tcs.encode_message(inside, wire), wire, shared)


@pytest.mark.parametrize(
    "name", ["TCS-LF-Q5+", "top-K-Q5++", "FedAvg-Q3++", "TCS-L2-Q5++", "TCS-D5", "TCS-Q5-NW", "TCS-M2-E3++",
             "top-K-M3"]
)  # fmt: skip
def test_a_compressor_on_real_messages_gives_the_same_bit_for_bit(name):
    links = (tcs.Link(), tcs.Link(tcs.unchanged))
    counted, real = (tcs.Compressor(name, SIZES, 3, link=link) for link in links)
    for round_ in range(6):
        deltas = torch.stack([like_training(seed=10 * round_ + n) for n in range(3)])
        who = [0, 2] if round_ == 4 else None
        one, two = (c.step(deltas, dense=round_ == 3, clients=who) for c in (counted, real))
        assert torch.equal(one, two)
        assert torch.equal(counted.errors_ND, real.errors_ND)
        if counted.server.downlink is not None:
            errors = [c.server.downlink.errors_D for c in (counted, real)]
            assert torch.equal(*errors)
        assert counted.traffic == real.traffic
        assert min(counted.traffic[:4]) > 0
