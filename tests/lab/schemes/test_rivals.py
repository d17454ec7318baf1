"""Rivals: several rounds of each beside a plain version in numpy, what waits, bits, resuming."""

import dataclasses
import math

import numpy as np
import pytest
import tcs_lab as lab
import torch
from common import config, deltas_like_training
from tcs_lab.schemes.rivals import nearest_quantize, stochastic_quantize
from torch import nn

import tcs_core as tcs

SIZES = [300, 200, 137]
D, N, ROUNDS, SEED = sum(SIZES), 3, 5, 7
K = math.ceil(0.01 * D)
NAMES = ["STC", "STC-K4", "EF-signSGD", "EF-signSGD-D1", "QSGD", "CocktailSGD", "DGC"]


def compressor_of(name, link=None):
    """Of differences that are all of one unit, as long as the learning rate does not change."""
    scheme = dataclasses.replace(tcs.Scheme.named(name), error_unit="difference")
    return tcs.Compressor(scheme, SIZES, N, seed=SEED, link=link)


# Plain versions: rounds of (N, D) differences in, every round's update (D,) out ───────────────────


def top(vector_D, k=K):
    """S_top as a vector: what is not among the k largest is 0."""
    kept_D = np.zeros_like(vector_D)
    largest = np.argsort(-np.abs(vector_D), kind="stable")[:k]
    kept_D[largest] = vector_D[largest]
    return kept_D


def ternary(vector_D):
    """Sattler et al., Alg. 1: +mu, 0 or -mu."""
    kept_D = top(vector_D)
    return np.abs(kept_D).sum() / K * np.sign(kept_D)


def scaled_sign(vector_D):
    return np.abs(vector_D).sum() / D * np.sign(vector_D)


def with_errors(compress, compress_down, rounds_ND):
    """Error feedback at every client and, if the downlink is compressed, at the server; a
    compression may depend on the round's number."""
    errors_ND, server_D = np.zeros((N, D)), np.zeros(D)
    for t, deltas_ND in enumerate(rounds_ND):
        meant_ND = errors_ND + deltas_ND
        sent_ND = np.stack([compress(meant_D, t) for meant_D in meant_ND])
        errors_ND = meant_ND - sent_ND
        update_D = sent_ND.mean(0)
        if compress_down:
            meant_D = server_D + update_D
            update_D = compress_down(meant_D, t)
            server_D = meant_D - update_D
        yield update_D


def cocktail(vector_D, t):
    """Wang et al.: a tenth of all entries at random, the largest of them, to 7 steps of a scale."""
    rng = np.random.default_rng([SEED, t])
    chosen = rng.choice(D, math.ceil(0.1 * D), replace=False, shuffle=False)
    random_D = np.zeros(D)
    random_D[chosen] = vector_D[chosen]
    kept_D = top(random_D)
    step = np.abs(kept_D).max() / 7
    return step * np.round(kept_D / step)


def dgc(rounds_ND):
    """Lin et al., Alg. 4 without clipping: u <- 0.9 u + g, v <- v + u; both empty where sent."""
    u_ND, v_ND = np.zeros((N, D)), np.zeros((N, D))
    for deltas_ND in rounds_ND:
        u_ND = 0.9 * u_ND + deltas_ND
        v_ND = v_ND + u_ND
        sent_ND = np.stack([top(row) for row in v_ND])
        u_ND, v_ND = u_ND * (sent_ND == 0), v_ND - sent_ND
        yield sent_ND.mean(0)


PLAIN = {
    "STC": lambda r: with_errors(lambda v, t: ternary(v), lambda v, t: ternary(v), r),
    "EF-signSGD": lambda r: with_errors(lambda v, t: scaled_sign(v), None, r),
    "EF-signSGD-D1": lambda r: with_errors(
        lambda v, t: scaled_sign(v), lambda v, t: scaled_sign(v), r
    ),
    "CocktailSGD": lambda r: with_errors(cocktail, cocktail, r),
    "DGC": dgc,
}


@pytest.mark.parametrize("name", PLAIN)
def test_rounds_are_those_of_a_plain_version(name):
    compressor, rounds_ND = compressor_of(name), list(deltas_like_training(ROUNDS, N, SIZES))
    plain = PLAIN[name]([deltas_ND.double().numpy() for deltas_ND in rounds_ND])
    for deltas_ND, expected_D in zip(rounds_ND, plain, strict=True):
        update_D = compressor.step(deltas_ND).double().numpy()
        assert np.abs(update_D - expected_D).max() < 1e-5 * np.abs(expected_D).max()


def mixed(values, place, total):
    """MurmurHash3's finalizer of a value's bits, its place and the sum of all bits, in [0, 1)."""
    x = (values[place] + 0x9E3779B9 * (place + total)) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return (x ^ (x >> 16)) / 2**32


def test_qsgd_rounds_up_or_down_as_the_bits_of_the_values_say():
    values_D = next(deltas_like_training(1, 1, SIZES))[0]
    bits = [int(b) for b in values_D.numpy().view(np.uint32)]
    largest, sent = float(values_D.abs().max()), []
    for place, value in enumerate(values_D.double().tolist()):
        steps = 7 * abs(value) / largest
        up = mixed(bits, place, sum(bits)) >= 1 - (steps - math.floor(steps))
        sent.append(math.copysign((math.floor(steps) + up) * largest / 7, value))
    compressor = compressor_of("QSGD")
    update_D = compressor.step(values_D.repeat(N, 1))
    assert np.allclose(update_D.numpy(), sent, rtol=1e-6, atol=1e-9)
    again_D = compressor.step(torch.zeros(N, D))
    assert not again_D.any(), "it keeps no errors"


def test_random_rounding_is_unbiased_and_two_calls_are_independent():
    """The mean over 4,000 roundings of one number; roundings of neighbours and of the next call
    (another number changed) agree no more often than by chance."""
    values_K = torch.full((4001,), 0.3)
    values_K[-1] = 1.0  # with 2 values, 0 and 1: up with chance 0.3
    found = []
    for last in (1.0, -1.0):
        values_K[-1] = last
        codes_K, means_P = stochastic_quantize(values_K, 2)
        assert means_P.tolist() == [0.0, 1.0]
        found.append(codes_K[:-1].double())
    four_deviations = 4 * math.sqrt(0.3 * 0.7 / 4000)
    for ups in found:
        assert abs(ups.mean() - 0.3) < four_deviations
        assert abs((ups[1:] * ups[:-1]).mean() - 0.09) < four_deviations
    assert abs((found[0] * found[1]).mean() - 0.09) < four_deviations


@pytest.mark.parametrize("quantize", [stochastic_quantize, nearest_quantize])
@pytest.mark.parametrize("values", [[], [0.0, 0.0], [-2.5], [1e-38, -3e38]])
def test_quantizers_of_even_steps_at_their_limits(quantize, values):
    values_K = torch.tensor(values)
    codes_K, means_P = quantize(values_K, 4)
    arrived_K = tcs.fractional_dequantize(codes_K, means_P)
    step = max(map(abs, values), default=0.0) / 3
    assert ((arrived_K.double() - values_K.double()).abs() <= step * (1 + 1e-6)).all()
    assert arrived_K.isfinite().all()


# What waits, bits, resuming ───────────────────────────────────────────────────────────────────────


def sent_of(compressor, messages, n):
    """The sum of all that client n has sent, (D,) float64."""
    sent_D, shared_K = torch.zeros(D, dtype=torch.float64), compressor.known.shared_K
    for message in messages:
        if message.sender == n:
            places = torch.cat([shared_K, message.positions])
            sent_D.index_add_(0, places, message.values.double())
    return sent_D


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("QSGD", "DGC")])
def test_what_was_meant_is_what_was_sent_and_what_waits(name):
    messages, meant_ND = [], torch.zeros(N, D, dtype=torch.float64)
    compressor, got_D = (
        compressor_of(name, lab.ListeningLink()),
        torch.zeros(D, dtype=torch.float64),
    )
    for deltas_ND in deltas_like_training(ROUNDS, N, SIZES):
        meant_ND += deltas_ND
        got_D += compressor.step(deltas_ND)
        messages += compressor.link.messages
    all_sent_ND = torch.stack([sent_of(compressor, messages, n) for n in range(N)])
    assert torch.allclose(all_sent_ND + compressor.errors_ND, meant_ND, atol=1e-5)
    if compressor.scheme.compresses_downlink:
        got_D += compressor.server.downlink.errors_D
    assert torch.allclose(got_D, all_sent_ND.mean(0), atol=1e-5)


def test_dgc_lets_nothing_wait_where_it_sent():
    compressor = compressor_of("DGC", lab.ListeningLink())
    for deltas_ND in deltas_like_training(2, N, SIZES):
        compressor.step(deltas_ND)
    for n in range(N):
        client = compressor.clients[n]
        errors_D, momentum_D = client.errors_D, client.momentum_D
        places = compressor.link.messages[n].positions
        assert len(places) == K
        assert not errors_D[places].any() and not momentum_D[places].any()
        assert int((momentum_D == 0).sum()) == K and errors_D.count_nonzero() >= D - 2 * K


@pytest.mark.parametrize("name", NAMES)
def test_bits_counted_are_those_of_messages_that_decode(name):
    counted, sent = compressor_of(name), compressor_of(name, tcs.Link(tcs.unchanged))
    for deltas_ND in deltas_like_training(ROUNDS, N, SIZES):
        assert torch.equal(counted.step(deltas_ND), sent.step(deltas_ND))
        for key in ("bits_up", "bits_down", "bytes_up", "bytes_down"):
            assert getattr(counted, key) == getattr(sent, key), key


def golomb_bits(positions, width):
    """Gaps between positions, each a unary quotient and `width` bits."""
    gaps = np.diff(positions, prepend=-1) - 1
    return int(sum((gap >> width) + 1 + width for gap in gaps))


def test_bits_of_stc_are_its_papers():
    """One mean, a sign each, and Golomb-coded gaps: counted by hand with the parameter that Sattler
    et al. compute, and near the number that they expect for random places."""
    phi, dimension = 0.01, 100_000
    scheme = tcs.Scheme.named("STC", phi_down=phi)
    compressor = tcs.Compressor(scheme, [dimension], 1)
    delta_D = torch.randn(dimension, generator=torch.Generator().manual_seed(0))
    compressor.step(delta_D[None])
    positions, count = tcs.top_k_positions(delta_D, 1000).numpy(), 1000
    width = 1 + math.floor(math.log2(math.log((math.sqrt(5) - 1) / 2) / math.log(1 - phi)))
    bits = 32 + count + 1 + golomb_bits(positions, width)  # 1: positions not layer by layer
    assert bits <= compressor.bits_up < bits + 16
    expected = 32 + count * (1 + width + 1 / (1 - (1 - phi) ** 2**width))
    assert abs(compressor.bits_up / expected - 1) < 0.02


def test_bits_of_the_others_by_formula():
    found = {}
    for name in NAMES:
        compressor = compressor_of(name)
        compressor.step(next(deltas_like_training(1, N, SIZES)))
        found[name] = compressor.bits_up, compressor.bits_down
    assert found["EF-signSGD"] == (32 + D, 32 * D)
    assert found["EF-signSGD-D1"] == (32 + D, 32 + D)
    assert D + 8 * 32 < found["QSGD"][0] < 4 * D + 8 * 32 and found["QSGD"][1] == 32 * D
    places = tcs.position_bits(K, D, tcs.block_for(K, D))
    assert found["DGC"][0] == 32 * K + places
    assert found["CocktailSGD"][0] < 8 * 32 + 4 * K + places + 24


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_goes_on_bit_for_bit(name):
    rounds = list(deltas_like_training(ROUNDS, N, SIZES))
    first, second = compressor_of(name), compressor_of(name)
    for deltas_ND in rounds[:3]:
        first.step(deltas_ND)
    second.load_state_dict(first.state_dict())
    for deltas_ND in rounds[3:]:
        assert torch.equal(first.step(deltas_ND), second.step(deltas_ND))


# In a federation, in workers ──────────────────────────────────────────────────────────────────────


def federation_of(name, schedule=0.1, **more):
    torch.manual_seed(0)
    feed = [[(torch.randn(8, 20), torch.randint(0, 3, (8,))) for _ in range(4)] for _ in range(N)]
    return tcs.Federation(nn.Linear(20, 3), feed, name, schedule, **more)


def test_rounding_at_random_needs_two_bits():
    with pytest.raises(ValueError, match=r"value_bits: got 1, allowed: 2 or more"):
        stochastic_quantize(torch.ones(3), 1)


def test_weights_and_link_go_along():
    link = tcs.Link(tcs.unchanged)
    federation = federation_of("DGC", link=link, weights=[1, 2, 3])
    compressor = federation.compressor
    assert compressor.link is link and compressor.server.weights == [1.0, 2.0, 3.0]


def test_the_rivals_runs_have_names_that_do_not_hang_on_a_source():
    assert not any("rule_sha256" in config(name).identity() for name in ("QSGD", "STC"))


def test_another_client_is_another_run():
    """Of a rule from elsewhere, whose clients are part of what it is."""
    digests = []
    for factor in (1, 2):
        kind = type("Mine", (lab.schemes.rivals.DGCClient,), {"momentum": 0.1 * factor})
        tcs.register_scheme("Mine")(type("Mine", (tcs.TCS,), {"client_type": kind}))
        digests.append(config("Mine").digest)
    del tcs.RULES["Mine"], tcs.FAMILIES["Mine"]
    assert len(set(digests)) == 2
