"""Section 3: the position code, Alg. 4."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tcs_core as tcs


def test_the_papers_worked_example():
    """d = 12, phi = 1/4, positions 1, 3, 10 counted from one (Sec. II-E)."""
    positions = torch.tensor([1, 3, 10]) - 1
    bits = tcs.encode_positions(positions, 12, 4)
    assert "".join(map(str, bits.tolist())) == "1 00 1 10 0 0 1 01 0".replace(" ", "")
    assert torch.equal(tcs.decode_positions(bits, 12, 4), positions)


def walk(bits, block):
    """Algorithm 4 as the paper prints it, bit by bit."""
    width = math.ceil(math.log2(block)) if block > 1 else 0
    pointer, block_index, found = 0, 0, []
    while pointer < len(bits):
        if bits[pointer] == 0:
            block_index += 1
            pointer += 1
        else:
            inside = "".join(map(str, bits[pointer + 1 : pointer + 1 + width]))
            found.append(block * block_index + int(inside or "0", 2))
            pointer += width + 1
    return found


@given(st.integers(1, 400), st.integers(1, 500), st.data())
def test_round_trip_length_and_algorithm_4(dimension, block, data):
    positions = sorted(data.draw(st.sets(st.integers(0, dimension - 1), max_size=60)))
    bits = tcs.encode_positions(torch.tensor(positions).long(), dimension, block)
    assert len(bits) == tcs.position_bits(len(positions), dimension, block)
    assert tcs.decode_positions(bits, dimension, block).tolist() == positions
    assert walk(bits.tolist(), block) == positions


def test_length_is_the_papers_at_its_own_size():
    """log2(1/phi) + 2 bits a position, rounded up to whole bits: 10 + 2 at phi = 1e-3."""
    dimension, k = 11_173_962, 11_174
    generator = torch.Generator().manual_seed(0)
    positions = torch.randperm(dimension, generator=generator)[:k].sort().values
    bits = tcs.encode_positions(positions, dimension, 1000)
    assert len(bits) == k * 11 + 11_174
    assert torch.equal(tcs.decode_positions(bits, dimension, 1000), positions)


@pytest.mark.parametrize(
    ("positions", "message"),
    [([3, 1], "ascending"), ([1, 1], "ascending"), ([-1], "allowed: 0 to 9"), ([10], "allowed: 0 to 9")],
)  # fmt: skip
def test_positions_that_are_none(positions, message):
    with pytest.raises(ValueError, match=message):
        tcs.encode_positions(torch.tensor(positions), 10, 4)


def test_wrong_kind_of_positions():
    with pytest.raises(ValueError, match="int64"):
        tcs.encode_positions(torch.tensor([1.0]), 10, 4)


@given(st.lists(st.integers(0, 1), max_size=40), st.integers(1, 30), st.integers(1, 12))
def test_any_bits_decode_to_what_encodes_to_them_or_are_refused(stream, dimension, block):
    bits = torch.tensor(stream, dtype=torch.uint8)
    try:
        positions = tcs.decode_positions(bits, dimension, block)
    except ValueError:
        return
    assert torch.equal(tcs.encode_positions(positions, dimension, block), bits)


@pytest.mark.parametrize("stream", ["", "100110001", "10011000101", "1001100010", "111111111"])
def test_streams_that_are_no_code_of_twelve_entries(stream):
    with pytest.raises(ValueError, match="bits"):
        tcs.decode_positions(torch.tensor([int(b) for b in stream]).byte(), 12, 4)


def test_not_bits():
    with pytest.raises(ValueError, match="0 and 1"):
        tcs.decode_positions(torch.tensor([2, 0, 0], dtype=torch.uint8), 12, 4)


@pytest.mark.parametrize(
    ("dimension", "block", "what"),
    [(0, 4, "dimension: got 0"), (12, 0, "block: got 0"), (12, -4, "block: got -4")],
)
def test_a_code_of_no_entries_or_blocks_is_refused_on_both_sides(dimension, block, what):
    with pytest.raises(ValueError, match=rf"^{what} .* >= 1$"):
        tcs.encode_positions(torch.tensor([0]), dimension, block)
    with pytest.raises(ValueError, match=rf"^{what} .* >= 1$"):
        tcs.decode_positions(torch.zeros(3, dtype=torch.uint8), dimension, block)


def test_the_best_block_is_that_of_the_present_number():
    """Numbers may be tensors, which change, and what was found for an int is not given for a float."""
    count = torch.tensor(3)
    assert tcs.block_for(count, 1000) == tcs.block_for(3, 1000)
    count.fill_(500)
    assert (
        tcs.block_for(count, 1000) == tcs.block_for(500, 1000) == tcs.block_for(np.array(500), 1000)
    )
    for wrong in (3.0, True):
        with pytest.raises(ValueError, match=r"^count: got"):
            tcs.block_for(wrong, 1000)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
def test_no_other_power_of_two_makes_a_shorter_code(count):
    lengths = {2**i: tcs.position_bits(count, 7, 2**i) for i in range(6)}
    assert lengths[tcs.block_for(count, 7)] == min(lengths.values())
