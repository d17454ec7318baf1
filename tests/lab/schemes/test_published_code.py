"""The published code's rules, beside the paper's: errors in gradients (-GE), masks from weights."""

import pytest
import torch
from common import deltas_like_training
from torch import nn

import tcs_core as tcs

SIZES = [40, 160]
DROP = 5  # the round in which the rate falls to a tenth


class Linear(nn.Module):
    """Parameters whose gradient is what the batch says: differences are -eta times that."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([torch.linspace(-2, 1, size) for size in SIZES])

    def forward(self, gradient_D):
        flat_D = torch.cat(list(self.layers))
        return flat_D @ gradient_D


def federation(scheme, schedule):
    rounds = deltas_like_training(10, 2, SIZES)
    feed = list(zip(*rounds, strict=True))  # a list a client
    return tcs.Federation(Linear(), feed, scheme, schedule, loss=lambda model, batch: model(batch))


def falling(t):
    return tcs.Phase(0.5 if t < DROP else 0.05)


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "top-K-L2", "TCS-Momentum"])
def test_at_a_constant_rate_the_unit_of_errors_is_the_same_to_the_bit(name):
    plain, gradient = federation(name, 0.5), federation(name + "-GE", 0.5)
    for _ in range(10 // plain.scheme.local_steps):
        assert torch.equal(plain.round(), gradient.round())
    assert torch.equal(plain.theta_D, gradient.theta_D)
    assert torch.equal(plain.compressor.errors_ND, gradient.compressor.errors_ND)
    assert plain.compressor.errors_ND.any()


@pytest.mark.parametrize("name", ["TCS-GE-D2", "TCS-D2"])
def test_when_the_rate_falls_to_a_tenth_so_do_errors_in_gradients(name):
    made = federation(name, falling)
    for _ in range(DROP):
        made.round()
    compressor, seen, down = made.compressor, [], []
    before, before_D = compressor.errors_ND.clone(), compressor.server.downlink.errors_D.clone()

    def look(n, _):
        seen.append(compressor.errors_ND[n].clone())
        down.append(compressor.server.downlink.errors_D.clone())

    made.on_delta = look
    made.round()
    less = 0.05 / 0.5 if "GE" in name else 1.0
    torch.testing.assert_close(torch.stack(seen), before * less, rtol=1e-6, atol=0)
    torch.testing.assert_close(down[0], before_D * less, rtol=1e-6, atol=0)
    assert before.any() and before_D.any()
    made.round()  # only once
    assert not torch.equal(seen[2], made.compressor.errors_ND[0] / 10)


def test_a_rate_that_starts_at_zero_scales_no_errors():
    made = federation("TCS-GE", lambda t: tcs.Phase(0.1 * t))
    for _ in range(4):
        made.round()
    assert made.compressor.errors_ND.isfinite().all() and made.compressor.errors_ND.any()


@pytest.mark.parametrize("name", ["TCS", "top-K"])
def test_errors_in_gradients_are_compression_before_the_rate(name):
    """As the published code has it: gradients are compressed, their average times the rate."""
    made = federation(name + "-GE", falling)
    compressor = tcs.Compressor(tcs.Scheme.named(name), SIZES, 2)
    plain, apart = federation(name, falling), False
    for t, gradients_ND in enumerate(deltas_like_training(10, 2, SIZES)):
        update_D, eta = made.round(), falling(t).eta
        expected = -eta * compressor.step(gradients_ND)
        torch.testing.assert_close(update_D, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(made.compressor.errors_ND, -eta * compressor.errors_ND,
                                   rtol=1e-5, atol=1e-6)  # fmt: skip
        apart |= not torch.allclose(plain.round(), expected, rtol=1e-2)
        assert apart == (t >= DROP)


def test_with_momentum_errors_are_in_gradients_anyway():
    plain, gradient = (federation(name, falling) for name in ("TCS-Momentum", "TCS-GE-Momentum"))
    for _ in range(10):
        assert torch.equal(plain.round(), gradient.round())


@pytest.mark.parametrize("name", ["TCS-WLF", "TCS-WPLF-Q5"])
def test_the_fair_shared_mask_may_come_from_the_weights(name):
    made = federation(name, 0.5)
    made.round()
    for _ in range(5):
        of_weights = tcs.layerwise_top_k_positions(made.theta_D, tcs.kept(1e-2, 200), SIZES, 1e-3)
        update_D = made.round()
        assert torch.equal(made.compressor.known.shared_K, of_weights)
        assert bool((update_D != 0)[of_weights].all())
        of_update = tcs.layerwise_top_k_positions(update_D, 2, SIZES, 1e-3)
        assert not torch.equal(of_update, of_weights)


def test_a_compressor_alone_has_no_weights_to_take_a_mask_from():
    compressor = tcs.Compressor(tcs.Scheme.named("TCS-WLF"), SIZES, 2)
    compressor.step(torch.ones(2, 200))
    with pytest.raises(ValueError, match=r"^TCS-WLF: got no weights .*\nround 1: nobody"):
        compressor.step(torch.ones(2, 200))
