"""Arguments that would give a wrong result, or an error that helps nobody, are refused by a line that names
the value; and what is right but unusual works."""

import random
import subprocess
import sys

import pytest
import torch
from common import same_state
from torch import nn
from torch.utils.data import DataLoader, random_split

import tcs_core as tcs

VECTOR = torch.tensor([3.0, -1.0, 0.5, 2.0])


def small_federation(**settings):
    batch = torch.ones(2, 3), torch.tensor([0, 1])
    given = {"schedule": 0.1, "scheme": "TCS"} | settings
    return tcs.Federation(nn.Linear(3, 2), [[batch]] * 2, **given)


# Sections 1 and 2 ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("excluded, says", [
    ([0], "got a list"), (torch.zeros(4), "float32"), (torch.tensor([-1]), "-1 to -1"),
    (torch.tensor([4]), "4 to 4"), (torch.ones(5, dtype=torch.bool), r"shape \(5,\)"),
    (torch.ones(3, dtype=torch.bool), r"shape \(3,\)"),
])  # fmt: skip
def test_excluded_entries_that_do_not_fit_are_refused(excluded, says):
    with pytest.raises(ValueError, match=says):
        tcs.top_k_positions(VECTOR, 1, excluded)
    with pytest.raises(ValueError, match=says):
        tcs.layerwise_top_k_positions(VECTOR, 1, [2, 2], 0.1, excluded)


@pytest.mark.parametrize("k", [1.0, 2.5, -1, 5, "2", None])
def test_a_k_that_is_no_whole_number_of_entries_is_refused(k):
    for choose in (tcs.top_k_positions, tcs.top_k_mask):
        with pytest.raises(ValueError, match=r"^k: got"):
            choose(VECTOR, k)


def test_a_matrix_is_refused():
    for choose in (tcs.top_k_positions, tcs.top_k_mask):
        with pytest.raises(ValueError, match=r"got shape \(2, 2\)"):
            choose(VECTOR.view(2, 2), 1)
    with pytest.raises(ValueError, match=r"got shape \(2, 2\)"):
        tcs.layerwise_top_k_positions(VECTOR.view(2, 2), 1, [2], 0.1)


@pytest.mark.parametrize("sizes, phi_min, says", [
    ([4, 0], 0.1, "layer_sizes"), ([5, -1], 0.1, "layer_sizes"), ([3], 0.1, "layer_sizes"),
    ([2, 2], 1.5, "phi_min"), ([2, 2], 0.0, "phi_min"), ([2, 2], float("nan"), "phi_min"),
])  # fmt: skip
def test_layers_and_shares_that_do_not_fit_are_refused(sizes, phi_min, says):
    with pytest.raises(ValueError, match=f"^{says}: got"):
        tcs.layerwise_top_k_positions(VECTOR, 2, sizes, phi_min)


def test_a_field_that_no_scheme_has_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"unknown field: foo; allowed: .*phi_global"):
        tcs.Scheme.named("TCS", foo=1)


@pytest.mark.parametrize("rule", [object, tcs.Client, lambda: None, 3])
def test_only_mask_rules_are_schemes(rule):
    with pytest.raises(ValueError, match="a class derived from MaskRule"):
        tcs.register_scheme("Mine", phi_local=0.1)(rule)
    assert "Mine" not in tcs.RULES and "Mine" not in tcs.FAMILIES


def test_names_of_what_is_kept_are_a_tuple():
    class Forgot(tcs.TCS):
        keeps = "average_D"  # a comma is missing

    with pytest.raises(ValueError, match=r"keeps: got 'average_D', allowed: a tuple"):
        tcs.register_scheme("Mine", phi_global=0.1, phi_local=0.1)(Forgot)


# Sections 5 to 7 ──────────────────────────────────────────────────────────────────────────────────


def test_links_and_channels_are_checked_before_the_first_round():
    with pytest.raises(ValueError, match=r"^link: got"):
        small_federation(link=tcs.unchanged)
    with pytest.raises(ValueError, match=r"^channel: got 'foo'"):
        tcs.Link("foo")


@pytest.mark.parametrize("errors_D", [
    torch.zeros(2, 30), torch.zeros(29), torch.zeros(30, dtype=torch.float64), [0.0] * 30
])  # fmt: skip
def test_errors_of_another_shape_or_type_are_refused(errors_D):
    with pytest.raises(ValueError, match=r"^errors_D: got"):
        tcs.Client(tcs.Known("TCS", [30]), 0, errors_D)


def used_compressor():
    compressor = tcs.Compressor("TCS", [30, 20], 2)
    for _ in range(2):
        compressor.step(torch.randn(2, 50, generator=torch.Generator().manual_seed(0)))
    return compressor


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), "2", None])
def test_errors_are_not_multiplied_by_what_is_not_finite(factor):
    compressor = used_compressor()
    before = compressor.state_dict()
    with pytest.raises(ValueError, match=r"^factor: got"):
        compressor.scale_errors_(factor)
    assert same_state(compressor.state_dict(), before)


def test_errors_are_not_lost_to_other_memory():
    compressor = used_compressor()
    before = compressor.state_dict()
    with pytest.raises(ValueError, match="before the first round"):
        compressor.keep_errors_in(torch.zeros(2, 50))
    assert same_state(compressor.state_dict(), before)


def test_a_state_with_errors_that_are_not_finite_is_refused():
    compressor = used_compressor()
    state = compressor.state_dict()
    state["clients"][1]["errors_D"][3] = float("nan")
    before = compressor.state_dict()
    with pytest.raises(ValueError, match="errors_D: got NaN or infinity"):
        compressor.load_state_dict(state)
    assert same_state(compressor.state_dict(), before)


def test_weights_of_a_model_are_no_state():
    federation = small_federation()
    with pytest.raises(ValueError, match=r"without `version`, with the keys .*weight"):
        federation.load_state_dict(federation.averaged_state_dict())


@pytest.mark.parametrize("name", ["TCS", "TCS-W10"])
def test_a_first_update_that_is_all_zero_makes_no_mask_on_any_device(name, monkeypatch):
    """A learning rate that rises from 0 has one. The next round is then dense, too."""
    made = []
    for on_cpu in (True, False):
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor, on_cpu=on_cpu: on_cpu)
        compressor = tcs.Compressor(name, [30, 20], 2)
        generator = torch.Generator().manual_seed(0)
        updates = []
        for number in range(4):
            deltas_ND = torch.randn(2, 50, generator=generator) * (number > 0)
            updates.append(compressor.step(deltas_ND, dense=number == 0))
        made.append((torch.stack(updates), compressor.bits_up))
    assert torch.equal(made[0][0], made[1][0]) and made[0][1] == made[1][1]


# Section 8 ────────────────────────────────────────────────────────────────────────────────────────


class Samples(list):
    """A data set that is a list, and says who goes through it."""

    def __iter__(self):
        raise AssertionError("somebody goes through all samples")


def test_a_data_set_that_is_a_list_is_not_gone_through():
    samples = Samples((torch.tensor([float(i)]), i) for i in range(20))
    halves = random_split(samples, [10, 10], torch.Generator().manual_seed(0))
    loaders = [DataLoader(samples, 5, shuffle=True), DataLoader(halves[0], 5),
               DataLoader(samples, 5, sampler=list(range(20)))]  # fmt: skip
    feed = tcs.Feed(loaders)
    seen = [feed.batch(n, 0, tau)[1].tolist() for n in range(3) for tau in range(2)]
    assert seen[4:] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and len({*seen[0], *seen[1]}) == 10


def test_an_iterator_that_has_begun_cannot_go_back():
    feed = tcs.Feed([iter(range(100))])
    assert [feed.batch(0, 0, tau) for tau in range(3)] == [0, 1, 2]
    state = feed.state_dict()
    assert [feed.batch(0, 0, tau) for tau in range(3)] == [3, 4, 5]
    with pytest.raises(ValueError, match=r"client 0: got an iterator .* cannot go back"):
        feed.load_state_dict(state)
    assert feed.batch(0, 0, 0) == 6
    again = tcs.Feed([iter(range(100))])  # a fresh one, as after a restart
    again.load_state_dict(state)
    assert again.batch(0, 0, 0) == 3


def test_random_numbers_are_those_of_the_models_own_gpu(monkeypatch):
    """torch.cuda.manual_seed means the current GPU, which may be another one than the model's."""
    current, seeded = [], []

    class Current:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *raised):
            current.pop()

    federation = small_federation()
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append(list(current)))
    monkeypatch.setattr(federation.trainer.flat, "device", torch.device("cuda:1"))
    next(federation.trainer._steps(0, 0))
    assert seeded == [[torch.device("cuda:1")]]


# Section 9 ────────────────────────────────────────────────────────────────────────────────────────


def test_a_torch_without_distributed_can_use_all_but_the_hook():
    code = (
        "import torch.distributed as dist; dist.is_available = lambda: False; del dist.GradBucket\n"
        "import tcs_core; print(tcs_core.Compressor('TCS', [30], 2).known.round)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("group", [0.02, 2, "gloo", nn.Linear(2, 2)])
def test_a_first_argument_that_is_no_process_group_is_refused(group):
    with pytest.raises(ValueError, match=r"^process_group: got"):
        tcs.TCSState(group)


def test_the_hook_needs_a_state():
    with pytest.raises(ValueError, match=r"^tcs_hook: state: got None, allowed: a TCSState"):
        tcs.tcs_hook(None, object())


def test_the_code_of_many_positions_needs_little_memory():
    """Positions that a stranger sends, at most some dozen bytes for each byte of the code."""
    tracemalloc = pytest.importorskip("tracemalloc")
    dimension, block = 2**20, 64
    chosen = sorted(random.Random(0).sample(range(dimension), 20_000))
    bits = tcs.encode_positions(torch.tensor(chosen), dimension, block)
    tracemalloc.start()
    found = tcs.decode_positions(bits, dimension, block)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tolist() == chosen
    assert peak < 8 * len(bits)  # what numpy and Python allocate; a list of numbers takes more
