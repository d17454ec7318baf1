"""Section 4: fractional quantization and the scaled sign."""

import math
from unittest import mock

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import tcs_core as tcs

LIMIT = float(np.float32(1e30))
FLOATS = st.floats(-LIMIT, LIMIT, width=32)
VALUES = st.lists(FLOATS, min_size=1, max_size=50)


def quantized(u, intervals):
    return tcs.fractional_dequantize(*tcs.fractional_quantize(u, intervals))


@given(VALUES, st.sampled_from([1, 2, 4, 16, 64]))
def test_agrees_with_the_reference(values, intervals):
    u = torch.tensor(values, dtype=torch.float32)
    expected = reference.quantize(u.tolist(), intervals)
    found = quantized(u, intervals)
    np.testing.assert_allclose(found.numpy(), np.array(expected, np.float32), rtol=3e-7)
    with mock.patch.object(torch.Tensor, "is_cuda", True):  # as on a GPU
        on_gpu = quantized(u, intervals)
    np.testing.assert_allclose(on_gpu.numpy(), np.array(expected, np.float32), rtol=3e-7)


@given(VALUES, st.sampled_from([1, 2, 4, 16, 64]))
def test_the_error_bound_holds(values, intervals):
    """|Q(u) - u| <= (1 - sigma) / sigma |u| for u != 0, Eq. 23; one float32 rounding on top."""
    u = torch.tensor(values, dtype=torch.float32)
    magnitudes = u[u != 0].abs().double()
    sigma = (magnitudes.min() / magnitudes.max()) ** (1 / intervals) if len(magnitudes) else 1.0
    error = (quantized(u, intervals).double() - u.double()).abs()
    bound = (1 - sigma) / sigma * u.double().abs()
    slack = 2**-23 * u.double().abs() / sigma + 2e-45
    assert ((error <= bound + slack) | (u == 0)).all()


def test_the_bound_is_tight():
    """Values just above an interval's lower edge with all the others at its top."""
    u = torch.tensor([1.0] * 10_000 + [0.5000001, 0.25])
    sigma = 0.5  # the square root of 0.25 / 1
    relative = abs(float(quantized(u, 2)[-2]) / 0.5000001 - 1)
    assert relative == pytest.approx((1 - sigma) / sigma, rel=1e-3)


def test_intervals_are_half_open():
    """u_max sigma^p itself belongs to interval p + 1: with sigma = 1/2, [4, 2, 1] and P = 2."""
    codes, means = tcs.fractional_quantize(torch.tensor([4.0, 2.0, -1.0, 2.5]), 2)
    assert codes.tolist() == [0, 1, 3, 0]
    assert means.tolist() == [3.25, 1.5]


def test_zeros_take_the_last_interval_and_stay_out_of_its_mean():
    codes, means = tcs.fractional_quantize(torch.tensor([8.0, 0.0, -1.0, -0.0]), 4)
    assert codes.tolist() == [0, 3, 7, 3]
    assert means.tolist() == [8.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("values", [[0.0, 0.0], [3.0], [-2.0, -2.0], [1e-45, 1.0, -1e38]])
@pytest.mark.parametrize("intervals", [1, 16])
def test_edge_cases_are_valid(values, intervals):
    u = torch.tensor(values, dtype=torch.float32)
    codes, means = tcs.fractional_quantize(u, intervals)
    assert len(means) == intervals and means.isfinite().all()
    found = tcs.fractional_dequantize(codes, means)
    assert found.shape == u.shape and found.isfinite().all()
    if intervals == 16:
        assert torch.allclose(found, u, rtol=1e-6)


@given(st.lists(FLOATS.filter(lambda v: v != 0), min_size=1, max_size=30))
def test_one_interval_is_the_scaled_sign(values):
    u = torch.tensor(values, dtype=torch.float32)
    torch.testing.assert_close(quantized(u, 1), tcs.scaled_sign(u), rtol=1e-5, atol=1e-38)


def test_scaled_sign_by_hand():
    found = tcs.scaled_sign(torch.tensor([1.0, -3.0, 0.0, 4.0]))
    assert found.tolist() == [2.0, -2.0, 0.0, 2.0]
    assert tcs.scaled_sign(torch.empty(0)).tolist() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad):
    with pytest.raises(ValueError, match="NaN or infinity"):
        tcs.fractional_quantize(torch.tensor([1.0, bad]), 4)


def test_bad_arguments():
    with pytest.raises(ValueError, match="intervals: got 0"):
        tcs.fractional_quantize(torch.ones(3), 0)
    with pytest.raises(ValueError, match="values: got none"):
        tcs.fractional_quantize(torch.empty(0), 4)
    with pytest.raises(ValueError, match="codes"):
        tcs.fractional_dequantize(torch.tensor([0, 4]), torch.ones(2))
