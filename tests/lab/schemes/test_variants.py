"""Variants beyond the paper: their names, masks, downlink and quantizer, at the core's own doors."""

import dataclasses
import itertools
import pickle
import re

import numpy as np
import pytest
import tcs_lab as lab
import torch
from common import config, same_state
from hypothesis import given
from hypothesis import strategies as st
from messages import DIMENSION, SIZES, like_training
from tcs_lab.schemes.variants import lloyd_max_quantize

import tcs_core as tcs

LIMIT = float(np.float32(1e30))
VALUES = st.lists(st.floats(-LIMIT, LIMIT, width=32), min_size=1, max_size=50)

# Names ────────────────────────────────────────────────────────────────────────────────────────────


def test_names_beyond_the_paper():
    s = tcs.Scheme.named("TCS-L4-M2-E3++")
    assert (s.value_bits, s.quantizer, s.phi_local) == (2, "lloyd", 3e-3)
    assert (s.down_value_bits, s.down_quantizer, s.phi_down) == (2, "lloyd", 4e-3)
    assert (s.code, s.dense_warmup) == ("entropy", False)
    assert tcs.Scheme.named("TCS-Q5").quantizer == "fractional"
    assert tcs.Scheme.named("top-K-M3").quantizer == "lloyd"


def test_smaller_masks_are_all_smaller_whatever_else_the_name_says():
    s = tcs.Scheme.named("TCS-K2-L2-LF-E3++")
    assert (s.phi_global, s.phi_local, s.phi_down) == (5e-3, 1.5e-3, 2e-3)
    assert (s.phi_min_global, s.phi_min_local, s.local_steps) == (5e-4, 2e-4, 2)
    top_k, rand_k = tcs.Scheme.named("top-K-K4"), tcs.Scheme.named("rand-K-K4")
    assert (top_k.phi_global, top_k.phi_local) == (None, 2.5e-3)
    assert (rand_k.phi_global, rand_k.phi_local) == (2.5e-3, None)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [("tcs-l4-q5++", "TCS-L4-Q5++"), ("tcs-wplf", "TCS-WPLF"), ("top-k-ge", "top-K-GE")],
)
def test_a_name_is_read_in_any_case_and_kept_in_one_form(typed, kept):
    assert tcs.Scheme.named(typed) == tcs.Scheme.named(kept)
    assert tcs.Scheme.named(typed).name == kept


@pytest.mark.parametrize(
    "name", ["TCS-Q5-M2", "TCS-M0", "top-K-E3", "FedAvg-E3", "TCS-E0", "FedAvg-K2", "Baseline-K2", "TCS-K0",
             "top-K-WLF", "rand-K-W2", "TCS+++"]
)  # fmt: skip
def test_names_that_mean_nothing_are_refused_with_what_exists(name):
    with pytest.raises(ValueError, match="scheme") as raised:
        tcs.Scheme.named(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("suffix", tcs.SUFFIXES, ids=lambda s: s.form)
def test_every_suffix_can_be_asked_for_and_is_listed(suffix):
    name = "TCS" + re.sub(r"<\w+>", "2", suffix.form)
    asked, plain = tcs.Scheme.named(name), tcs.Scheme.named("TCS")
    assert asked.name == name and dataclasses.replace(asked, name="TCS") != plain
    with pytest.raises(ValueError, match="is unknown; known: ") as raised:
        tcs.Scheme.named("SignSGD")
    assert suffix.form in re.split(", | where", str(raised.value).split(", with ")[1])


@pytest.mark.parametrize("letter", ["M", "K", "E", "D", "W"])
def test_a_letter_that_is_taken(registry, letter):
    before = registry()
    with pytest.raises(
        ValueError, match=r"letter: got .*, allowed: letters that begin no other suffix"
    ):
        tcs.register_quantizer(letter, "mine")
    assert registry() == before


@pytest.mark.parametrize("name", ["TCS+", "TCS-E3"])
def test_a_scheme_of_ones_own_cannot_take_a_variants_name(registry, name):
    before = registry()
    with pytest.raises(ValueError, match="known already: choose another name"):
        tcs.register_scheme(name)(tcs.TCS)
    assert registry() == before


# Masks ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sparse_warm_up_has_larger_masks_and_then_the_largest_of_them():
    data = lab.synthetic_dataset(train=120, test=40).resize(16)
    settings = config("TCS-Q5-W10++", epochs=3, warmup_epochs=1)
    one, other = (lab.Training(settings, data) for _ in range(2))
    dimension = len(one.theta_D)
    plain = tcs.kept(1e-2, dimension)
    for update_D in one.rounds(0):
        assert len(one.compressor.rule.positions) == 10 * plain
        assert not one.compressor.known.dense and len(update_D.nonzero()) > 2 * plain
    other.load_state_dict(one.state_dict())
    for run in (one, other):  # the second as after a resume
        run.compressor.rule.begin(mask_factor=1)
        assert torch.equal(run.compressor.rule.shared_mask(), tcs.top_k_positions(update_D, plain))
        assert run.compressor.rule.k_local == tcs.kept(1e-3, dimension)
    assert torch.equal(next(one.rounds(1)), next(other.rounds(1)))


def test_the_masks_that_stay_after_a_wide_warm_up_are_fair_to_layers():
    """Every layer keeps its minimum, though all large entries are in one."""
    scheme = tcs.Scheme.named("TCS-LF-W8", phi_min_global=0.005)
    rule = tcs.Known(scheme, [300, 200, 500]).rule
    rule.begin(mask_factor=8)
    update_D = torch.linspace(-1, 2, 1000)
    rule.observe(update_D)
    rule.begin(mask_factor=1)
    mask_D = tcs.positions_to_mask(rule.shared_mask(), 1000)
    assert [int(part.sum()) for part in mask_D.split([300, 200, 500])] == [2, 1, 7]
    assert torch.equal(rule.shared_mask(), rule.positions) and len(rule.positions) == rule.k_global


@pytest.mark.parametrize("name", ["TCS-NW", "TCS-D2", "TCS-L4-Q5++", "TCS-W8"])
def test_a_pickled_variant_goes_on(name):
    """Though the class of a rule with parts is in no module."""
    torch.manual_seed(0)
    rounds = [torch.randn(2, 1000) for _ in range(4)]
    one = tcs.Compressor(name, [600, 400], 2)
    for deltas_ND in rounds[:2]:
        one.step(deltas_ND)
    other = pickle.loads(pickle.dumps(one))
    for deltas_ND in rounds[2:]:
        assert torch.equal(one.step(deltas_ND), other.step(deltas_ND))
    assert torch.equal(one.errors_ND, other.errors_ND)


# Controls: a shared mask that does not follow the last update ──────────────────────────────────────

CONTROLS = ["TCS-Random", "TCS-Stale"]
MORE = ["", "-Q5", "-K4", "-LF", "-L2"]


def rounds_of(name, count=16, seed=5, **changes):
    """A compressor after each of its rounds, the first of them dense."""
    scheme = dataclasses.replace(tcs.Scheme.named(name), **changes)
    compressor = tcs.Compressor(scheme, SIZES, 3, seed=seed)
    for round_ in range(count):
        mask_K = None if compressor.known.rule.shared_mask() is None else shared(compressor)
        compressor.step(torch.stack([like_training(seed=10 * round_ + n) for n in range(3)]))
        yield compressor, mask_K


def shared(compressor):
    return compressor.known.rule.shared_mask().clone()


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_sends_as_much_as_tcs(control, more):
    plain, compared = rounds_of("TCS" + more), rounds_of(control + more)
    for t, ((one, one_K), (other, other_K)) in enumerate(zip(plain, compared, strict=True)):
        rules = one.known.rule, other.known.rule
        assert rules[0].k_global == rules[1].k_global and rules[0].k_local == rules[1].k_local
        assert (one.bits_up, one.bytes_up) == (other.bits_up, other.bytes_up)
        assert one.known.dense == other.known.dense == (t == 0)
        if t:
            assert len(one_K) == len(other_K) == rules[0].k_global
            assert torch.equal(other_K, other_K.unique())


@pytest.mark.parametrize("more", ["", "-Q5", "-K4"])
def test_a_random_mask_is_another_one_each_round_and_follows_from_the_seed(more):
    def masks(seed):
        made = rounds_of("TCS-Random" + more, seed=seed, phi_global=0.08)
        return [mask_K for _, mask_K in made][1:]

    drawn = masks(5)
    assert all(map(torch.equal, drawn, masks(5)))
    pairs = [*itertools.pairwise(drawn), *zip(drawn, masks(6), strict=True)]
    assert max(len(np.intersect1d(*pair)) for pair in pairs) < 40  # of 80; 6 by chance


@pytest.mark.parametrize("name", [*CONTROLS, "TCS-Random-Q5", "TCS-Stale-K4"])
def test_a_client_and_a_server_apart_know_the_same_mask(name):
    """Each from its own `Known`, by nothing but the seed and the updates."""
    server, client = (tcs.Known(name, SIZES, seed=5) for _ in range(2))
    one, hub = tcs.Client(client, 0), tcs.Server(server, [1.0])
    for t in range(13):
        for known in (client, server):
            known.begin()
        assert client.dense == server.dense == (t == 0)
        assert torch.equal(client.shared_K, server.shared_K)
        data = client.to_bytes(one.send(like_training(seed=t)))
        hub.add(0, server.from_bytes(data, 0))
        one.arrived()
        update_D, reply = hub.finish()
        server.observe(update_D)
        received = client.from_bytes(server.to_bytes(reply), tcs.SERVER)
        client.observe(client.expand_message(received))


@pytest.mark.parametrize("more", ["", "-Q5", "-K4", "-W4", "-W4-Q5"])
@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_that_was_saved_goes_on_with_the_same_masks(control, more):
    """Saved in a wide warm-up, when masks shrink, and when the history is short or full."""
    data = lab.synthetic_dataset(train=120, test=40).resize(16)
    settings = config(control + more, epochs=3, warmup_epochs=1)
    whole = lab.Training(settings, data)
    states, masks = [whole.state_dict()], []
    for epoch in range(3):
        for _ in whole.rounds(epoch):
            masks.append(whole.compressor.known.shared_K.clone())
        states.append(whole.state_dict())
    count = whole.rounds_per_epoch
    for epoch in (1, 2):
        resumed = lab.Training(settings, data)
        resumed.load_state_dict(states[epoch])
        again = [resumed.compressor.known.shared_K.clone() for _ in resumed.rounds(epoch)]
        assert all(map(torch.equal, again, masks[epoch * count :]))
        assert same_state(resumed.state_dict(), states[epoch + 1])


@pytest.mark.parametrize("more", ["", "-Q5", "-K4", "-LF"])
def test_a_stale_mask_is_the_one_of_the_update_ten_rounds_ago(more):
    """The oldest update's, while there are fewer: the mask that TCS would take of it."""
    scheme = dataclasses.replace(tcs.Scheme.named("TCS-Stale" + more), phi_global=0.03)
    compressor = tcs.Compressor(scheme, SIZES, 3)
    updates = []
    for t in range(25):
        if t:
            wanted_D = updates[max(0, t - 10)]
            plain = tcs.Known(dataclasses.replace(scheme, shared_from="update"), SIZES).rule
            plain.observe(wanted_D)
            assert torch.equal(shared(compressor), plain.shared_mask())
        deltas_ND = torch.stack([like_training(seed=10 * t + n) for n in range(3)])
        updates.append(compressor.step(deltas_ND).clone())


@pytest.mark.parametrize("name", CONTROLS)
def test_the_masks_of_a_control_shrink_after_a_wide_warm_up(name):
    """Wide masks first; afterwards those of TCS, also of a history that holds wide ones."""
    data = lab.synthetic_dataset(train=120, test=40).resize(16)
    one, plain = (
        lab.Training(config(kind + "-W10", epochs=3, warmup_epochs=1), data)
        for kind in (name, "TCS")
    )
    k = tcs.kept(1e-2, len(one.theta_D))
    counts = []
    for epoch in range(3):
        for _ in zip(one.rounds(epoch), plain.rounds(epoch), strict=True):
            counts.append(len(one.compressor.known.shared_K))
            assert one.compressor.bits_up == plain.compressor.bits_up
    rounds = one.rounds_per_epoch
    assert counts == [0] + [10 * k] * (rounds - 1) + [k] * 2 * rounds


# The downlink ─────────────────────────────────────────────────────────────────────────────────────


def test_a_dense_uplink_may_have_a_compressed_downlink():
    compressor = tcs.Compressor("FedAvg-D2", [1000], 2)
    deltas_ND = torch.randn(2, 1000)
    for _ in range(3):
        before_D = compressor.server.downlink.errors_D.clone()
        update_D = compressor.step(deltas_ND)
        meant_D = deltas_ND.mean(0) + before_D
        torch.testing.assert_close(update_D + compressor.server.downlink.errors_D, meant_D)
    assert compressor.bits_up == 32000 and compressor.bits_down == 2 * 1000 + 32 * 2


@pytest.mark.parametrize("name", ["TCS-D5", "TCS-M2-E3++", "top-K-D3", "FedAvg-Q3++", "rand-K-D5"])
def test_what_the_server_does_not_send_stays_in_its_errors(name):
    """Sum of all updates sent plus both sides' errors is the sum of all deltas."""
    compressor = tcs.Compressor(tcs.Scheme.named(name), SIZES, 3)
    total, sent = torch.zeros(DIMENSION).double(), torch.zeros(DIMENSION).double()
    for round_ in range(20):
        deltas = torch.stack([like_training(seed=10 * round_ + n) for n in range(3)])
        total += deltas.double().mean(0)
        sent += compressor.step(deltas).double()
    left = compressor.errors_ND.double().mean(0) + compressor.server.downlink.errors_D.double()
    torch.testing.assert_close(sent + left, total, rtol=0, atol=1e-3)
    assert compressor.server.downlink.errors_D.any()


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
        tcs.block_code_bits(
            wire.value_bits, shared + tcs.kept(phi, dimension), tcs.kept(phi, dimension), dimension
        )
        for wire, phi in ways
    )
    assert down <= 1.02 * up


# A quantizer ──────────────────────────────────────────────────────────────────────────────────────


@given(VALUES, st.sampled_from([1, 2, 4, 16]))
def test_lloyd_and_maxs_values_are_the_nearest_means(values, intervals):
    """Codes are those of the nearest mean, signs are kept, and means stay within the magnitudes."""
    u = torch.tensor(values, dtype=torch.float32)
    codes, means = lloyd_max_quantize(u, intervals)
    assert means.shape == (intervals,) and (means.diff() <= 0).all()
    largest = float(u.abs().max())
    assert float(u.abs().min()) * (1 - 1e-6) <= means.min() <= means.max() <= largest * (1 + 1e-6)
    sent = tcs.fractional_dequantize(codes, means)
    assert ((codes >= intervals) == (u < 0)).all()
    nearest = (u.double().abs()[:, None] - means.double()).abs().min(1).values
    # the last edges belong to means of one step before; those are still settling
    settled = (sent.double().abs() - u.double().abs()).abs() <= nearest + 0.25 * largest
    assert settled.all()


@pytest.mark.parametrize("intervals", [1, 2, 4])
def test_lloyd_and_maxs_error_is_near_the_best_there_is(intervals):
    """Against all ways to cut twelve sorted magnitudes into P groups (Lloyd's is a local optimum)."""
    generator = torch.Generator().manual_seed(intervals)
    total = np.zeros(2)
    for _ in range(30):
        u = torch.randn(12, generator=generator) ** 3
        magnitudes = np.sort(np.abs(u.numpy().astype(np.float64)))
        best = min(
            sum(((part - part.mean()) ** 2).sum() for part in np.split(magnitudes, cuts))
            for cuts in itertools.combinations(range(1, 12), intervals - 1)
        )
        sent = tcs.fractional_dequantize(*lloyd_max_quantize(u, intervals))
        error = float(((sent.double() - u.double()) ** 2).sum())
        assert error >= best * (1 - 1e-5)
        total += error, best
    assert total[0] <= (1.01 if intervals == 1 else 4) * total[1], total


def test_lloyd_and_max_lose_less_than_the_papers_quantizer_with_few_bits():
    """Heavy tails, as updates have them: 3 bits here are worth more than 5 there."""
    u = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) ** 3

    def error(quantize, bits):
        sent = tcs.fractional_dequantize(*quantize(u, 2 ** (bits - 1)))
        return float(((sent - u) ** 2).sum() / (u**2).sum())

    assert error(lloyd_max_quantize, 3) < 0.6 * error(tcs.fractional_quantize, 5)
    assert error(lloyd_max_quantize, 2) < 0.5 * error(tcs.fractional_quantize, 3)
