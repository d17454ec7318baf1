"""Section 6: the compressor against an independent slow reference, and its invariants."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from common import deltas_like_training
from reference import Reference

import tcs_core as tcs

LAYERS = [1200, 300, 1000, 10, 490]  # D = 3000
CLIENTS, ROUNDS = 3, 50


@pytest.mark.parametrize("suffix", ["", "-Q5"])
@pytest.mark.parametrize(
    ("name", "fair"),
    [("TCS", {}), ("TCS-LF", {"min_global": 1e-3, "min_local": 4e-4}), ("TCS-PLF", {"min_global": 1e-3}),
     ("top-K", {})],
)  # fmt: skip
def test_agrees_with_the_slow_reference_over_50_rounds(name, fair, suffix):
    compressor = tcs.Compressor(tcs.Scheme.named(name + suffix), LAYERS, CLIENTS)
    kind, phis = ("top-K", (1e-2, 1e-2)) if name == "top-K" else ("TCS", (1e-2, 1e-3))
    slow = Reference(kind, LAYERS, CLIENTS, *phis, intervals=16 if suffix else 0, **fair)
    for deltas_ND in deltas_like_training(ROUNDS, CLIENTS, LAYERS):
        mask = compressor.rule.shared_mask()
        errors_before = compressor.errors_ND.clone()
        update_D = compressor.step(deltas_ND)
        expected = np.array(slow.step([list(row) for row in deltas_ND.numpy()]), np.float32)
        np.testing.assert_allclose(update_D.numpy(), expected, rtol=1e-5, atol=1e-7)
        errors = np.array(slow.errors, np.float32)
        np.testing.assert_allclose(compressor.errors_ND.numpy(), errors, rtol=1e-5, atol=1e-6)
        assert (mask.tolist() if mask is not None else []) == slow.global_mask
        if slow.local_masks:
            changed_ND = compressor.errors_ND != errors_before + deltas_ND
            for changed_D, local in zip(changed_ND, slow.local_masks, strict=True):
                assert changed_D.nonzero().squeeze(1).tolist() == sorted(slow.global_mask + local)


@pytest.mark.parametrize(
    "name", ["TCS", "TCS-Q5", "TCS-LF-Q5", "TCS-PLF", "top-K", "top-K-Q5", "rand-K", "rand-K-Q3", "FedAvg-Q5"]
)  # fmt: skip
def test_sent_plus_errors_is_what_was_intended_exactly(name):
    compressor = tcs.Compressor(tcs.Scheme.named(name), LAYERS, 1)
    for deltas_ND in deltas_like_training(30, 1, LAYERS):
        intended = compressor.errors_ND + deltas_ND
        sent = compressor.step(deltas_ND)
        total = sent + compressor.errors_ND[0]
        if name in ("rand-K-Q3", "FedAvg-Q5"):  # sigma < 1/2: one float32 rounding (header, 4)
            torch.testing.assert_close(total, intended[0], rtol=0, atol=1e-6)
        else:
            assert torch.equal(total, intended[0])


def test_nothing_is_lost_over_many_rounds_and_clients():
    """What was sent in all, plus what is still in the errors, is the sum of all deltas."""
    compressor = tcs.Compressor("TCS-Q5", LAYERS, CLIENTS)  # as Scheme.named has it
    total, sent = torch.zeros(3000).double(), torch.zeros(3000).double()
    for deltas_ND in deltas_like_training(40, CLIENTS, LAYERS):
        total += deltas_ND.double().sum(0)
        sent += CLIENTS * compressor.step(deltas_ND).double()
    torch.testing.assert_close(
        sent + compressor.errors_ND.double().sum(0), total, rtol=0, atol=1e-3
    )


def test_the_first_step_is_dense_and_the_second_uses_its_mask():
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), LAYERS, 2)
    first, second = deltas_like_training(2, 2, LAYERS)
    update_D = compressor.step(first)
    torch.testing.assert_close(update_D, first.mean(0))
    expected = tcs.top_k_mask(update_D, 30)
    assert tcs.positions_to_mask(compressor.rule.shared_mask(), 3000).equal(expected)
    assert int((compressor.step(second) != 0).sum()) <= 30 + 2 * 3


def test_phi_one_is_dense_fedavg():
    full = tcs.Scheme.named("TCS", phi_global=1.0, phi_local=None)
    sparse = tcs.Compressor(full, LAYERS, CLIENTS)
    dense = tcs.Compressor(tcs.Scheme.named("FedAvg"), LAYERS, CLIENTS)
    for deltas_ND in deltas_like_training(5, CLIENTS, LAYERS):
        assert torch.equal(sparse.step(deltas_ND), dense.step(deltas_ND))


def test_without_a_local_part_the_mask_never_moves():
    fixed = tcs.Compressor(tcs.Scheme.named("TCS", phi_local=None), LAYERS, 2)
    steps = list(deltas_like_training(10, 2, LAYERS))
    first = tcs.top_k_mask(fixed.step(steps[0]), 30)
    for deltas_ND in steps[1:]:
        assert not (fixed.step(deltas_ND) != 0)[~first].any()


def test_without_error_accumulation_every_round_starts_afresh():
    scheme = tcs.Scheme.named("top-K", error_accumulation=False)
    compressor = tcs.Compressor(scheme, LAYERS, 1)
    for deltas_ND in deltas_like_training(3, 1, LAYERS):
        mask = tcs.top_k_mask(deltas_ND[0], 30)
        assert torch.equal(compressor.step(deltas_ND), deltas_ND[0] * mask)


def test_rand_k_masks_come_from_the_shared_seed_and_change():
    def masks(seed):
        compressor = tcs.Compressor(tcs.Scheme.named("rand-K"), LAYERS, 2, seed=seed)
        deltas = torch.ones(2, 3000)
        return [(compressor.step(deltas) != 0).nonzero().squeeze(1).tolist() for _ in range(3)]

    one, again, other = masks(1), masks(1), masks(2)
    assert one == again and one != other
    assert len({tuple(m) for m in one}) == 3 and all(len(m) == 30 for m in one)


def test_absent_clients_keep_their_errors():
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), LAYERS, 3)
    steps = list(deltas_like_training(3, 3, LAYERS))
    compressor.step(steps[0])
    compressor.step(steps[1])
    before = compressor.errors_ND.clone()
    update_D = compressor.step(steps[2], clients=[0, 2])
    assert torch.equal(compressor.errors_ND[1], before[1])
    intended = before[[0, 2]] + steps[2][[0, 2]]
    torch.testing.assert_close(update_D, (intended - compressor.errors_ND[[0, 2]]).mean(0))


def test_a_dense_round_empties_the_errors():
    compressor = tcs.Compressor(tcs.Scheme.named("top-K"), LAYERS, 2)
    one, two = deltas_like_training(2, 2, LAYERS)
    compressor.step(one)
    expected = (compressor.errors_ND + two).mean(0)
    torch.testing.assert_close(compressor.step(two, dense=True), expected)
    assert not compressor.errors_ND.any()
    assert compressor.bits_up == compressor.bits_down == 32 * 3000


@pytest.mark.parametrize("name", ["TCS-LF-Q5", "rand-K", "top-K"])
def test_a_restored_compressor_goes_on_the_same(name):
    scheme = tcs.Scheme.named(name)
    steps = list(deltas_like_training(6, 2, LAYERS))
    one, two = (tcs.Compressor(scheme, LAYERS, 2) for _ in range(2))
    for deltas_ND in steps[:3]:
        one.step(deltas_ND)
    two.load_state_dict(one.state_dict())
    for deltas_ND in steps[3:]:
        assert torch.equal(one.step(deltas_ND), two.step(deltas_ND))
        assert (one.bits_up, one.bits_down) == (two.bits_up, two.bits_down)


@pytest.mark.parametrize(
    ("deltas", "clients", "message"),
    [(torch.zeros(2, 9), None, "deltas_ND"), (torch.zeros(3, 10), None, "deltas_ND"),
     (torch.zeros(2, 10), [], "clients"), (torch.zeros(2, 10), [2], "clients"),
     (torch.zeros(2, 10), [0, 0], "clients")],
)  # fmt: skip
def test_bad_arguments(deltas, clients, message):
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [10], 2)
    with pytest.raises(ValueError, match=message):
        compressor.step(deltas, clients=clients)


@pytest.mark.parametrize("name", ["TCS", "TCS-LF-Q5", "top-K-Q5", "rand-K"])
@pytest.mark.parametrize("dimension", [1, 2, 7])
def test_tiny_and_zero_updates(name, dimension):
    compressor = tcs.Compressor(tcs.Scheme.named(name), [1] * dimension, 2)
    for _ in range(3):
        update_D = compressor.step(torch.zeros(2, dimension))
        assert torch.equal(update_D, torch.zeros(dimension))


# Schemes of one's own ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def registered():
    """A scheme as a notebook would add it; taken out again afterwards."""

    @tcs.register_scheme("TCS-Average", phi_global=1e-2, phi_local=1e-3)
    class RunningAverage(tcs.TCS):
        keeps = ("average_D", *tcs.TCS.keeps)
        average_D = 0.0

        def observe(self, update_D):
            self.average_D = 0.9 * self.average_D + update_D.abs()
            super().observe(self.average_D)

    yield RunningAverage
    del tcs.RULES["TCS-Average"], tcs.FAMILIES["TCS-Average"]


def test_a_scheme_of_ones_own_takes_suffixes_and_saves_its_state(registered):
    scheme = tcs.Scheme.named("TCS-Average-L4-Q5")
    assert (scheme.local_steps, scheme.value_bits, scheme.rule) == (4, 5, "TCS-Average")
    assert tcs.bit_budget(scheme) == pytest.approx(0.01674, rel=1e-3)
    one, two = (tcs.Compressor(scheme, LAYERS, 2) for _ in range(2))
    steps = list(deltas_like_training(5, 2, LAYERS))
    for deltas_ND in steps[:3]:
        one.step(deltas_ND)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.rule.average_D, two.rule.average_D)
    for deltas_ND in steps[3:]:
        assert torch.equal(one.step(deltas_ND), two.step(deltas_ND))


def test_a_rule_saves_what_it_says_it_keeps_numbers_of_numpy_too(registered):
    """A resumed rule goes on with them."""

    @tcs.register_scheme("TCS-Average")
    class Growing(tcs.TCS):
        keeps = ("seen", "k_local", *tcs.TCS.keeps)
        seen = 0

        def observe(self, update_D):
            self.seen = self.seen + np.int64(np.count_nonzero(update_D.numpy()))
            self.k_local = self.k_local + 1
            super().observe(update_D)

    one, two = (tcs.Compressor("TCS-Average", LAYERS, 2) for _ in range(2))
    for deltas_ND in deltas_like_training(3, 2, LAYERS):
        one.step(deltas_ND)
    two.load_state_dict(one.state_dict())
    seen = one.state_dict()["known"]["rule"]["seen"]
    assert two.rule.seen == one.rule.seen > 0 and type(seen) is int
    assert two.rule.k_local == one.rule.k_local == tcs.Compressor("TCS", LAYERS, 2).rule.k_local + 3


def test_a_rule_may_return_a_bool_mask():
    @tcs.register_scheme("Every-Third", phi_global=None, phi_local=1 / 3)
    class EveryThird(tcs.MaskRule):
        def own_mask(self, intended_D, shared_D, k):
            assert k == 3 and not shared_D.any()
            return torch.arange(len(intended_D)) % 3 == 0

    try:
        compressor = tcs.Compressor(tcs.Scheme.named("Every-Third"), [9], 1)
        assert compressor.step(torch.ones(1, 9)).tolist() == [1, 0, 0] * 3
        assert compressor.bits_up == 3 * 32 + 3 * (1 + 1) + 5  # blocks of two
    finally:
        del tcs.RULES["Every-Third"], tcs.FAMILIES["Every-Third"]


@pytest.mark.parametrize(
    ("mask", "message"),
    [(torch.tensor([0, 1]), "only others"), (torch.ones(10, dtype=torch.bool), "only others"),
     (torch.tensor([10]), "allowed: 0 to 9"), (torch.tensor([5, 4]), "ascending"),
     (torch.tensor([4.0]), "int64"), (torch.ones(9, dtype=torch.bool), r"allowed: \(10,\)"),
     (torch.ones(10, 1, dtype=torch.bool), r"allowed: \(10,\)")],
)  # fmt: skip
def test_a_rule_that_returns_nonsense_is_told_so(mask, message):
    class Rule(tcs.MaskRule):
        def shared_mask(self):
            return torch.tensor([0])

        def own_mask(self, intended_D, shared_D, k):
            return mask

    tcs.register_scheme("Nonsense")(Rule)
    try:
        compressor = tcs.Compressor(tcs.Scheme.named("Nonsense"), [10], 1)
        with pytest.raises(ValueError, match=message):
            compressor.step(torch.ones(1, 10))
    finally:
        del tcs.RULES["Nonsense"], tcs.FAMILIES["Nonsense"]


@pytest.mark.parametrize("sizes", [[], [3, 0]])
def test_a_compressor_needs_entries(sizes):
    with pytest.raises(ValueError, match=r"^layer_sizes: got .*, allowed: .*>= 1$"):
        tcs.Compressor("TCS", sizes, 2)


@pytest.mark.parametrize("clients", [0, -1, True, 2.0, "2", 65_536])
def test_clients_are_as_many_as_messages_can_number(clients):
    text = rf"^clients: got {clients!r} \(\w+\), allowed: a whole number from 1 to 65535$"
    with pytest.raises(ValueError, match=text):
        tcs.Compressor("TCS", [3, 4], clients)


def test_there_can_be_as_many_clients_as_messages_can_number():
    assert len(tcs.Compressor("FedAvg", [3, 4], 65_535).clients) == tcs.SERVER


@pytest.mark.parametrize("name", ["Baseline", "Baseline-Momentum"])
def test_centralized_training_has_one_client(name):
    text = rf"^clients: got 2, allowed: 1 \({name} is centralized\)$"
    with pytest.raises(ValueError, match=text):
        tcs.Federation(torch.nn.Linear(3, 2), [[], []], name, 0.1)


def test_a_restored_rule_has_what_was_saved_and_no_more():
    fresh, used = (tcs.Compressor("TCS", LAYERS, 2) for _ in range(2))
    for deltas_ND in deltas_like_training(3, 2, LAYERS):
        used.step(deltas_ND)
    used.load_state_dict(fresh.state_dict())
    first, again = fresh.step(deltas_ND), used.step(deltas_ND)
    assert fresh.known.dense and used.known.dense and torch.equal(first, again)
    elsewhere = tcs.Compressor("TCS", LAYERS, 2, device="meta")
    elsewhere.load_state_dict(used.state_dict())
    assert elsewhere.rule.positions.device.type == "meta"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which is Linux's")
def test_errors_take_memory_only_where_they_are_written():
    """A thousand clients of which few take part need the errors of these few."""

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    compressor = tcs.Compressor("top-K", [500_000], 300)  # 600 MB
    compressor.step(torch.ones(1, 500_000).expand(300, -1), clients=[7])
    assert compressor.errors_ND.nbytes == 600_000_000 and resident() - before < 150_000_000
    assert compressor.errors_ND[7].any() and not compressor.errors_ND[6].any()
