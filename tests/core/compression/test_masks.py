"""Section 2: S_top, plain and layer-wise."""

import math
from unittest import mock

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import tcs_core as tcs

VECTORS = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-40, -3.5, math.inf]), min_size=1, max_size=60
)


@given(VECTORS, st.data())
def test_exactly_k_with_ties_to_the_lower_index(values, data):
    k = data.draw(st.integers(0, len(values)))
    expected = reference.s_top(values, k)
    vector = torch.tensor(values)
    assert tcs.top_k_positions(vector, k).tolist() == expected
    with mock.patch.object(tcs, "is_on_cpu", lambda tensor: False):  # a GPU's
        assert tcs.top_k_positions(vector, k).tolist() == expected
    floor = data.draw(st.sampled_from([0.0, 1e-41, 1.0, 2.0, 100.0]))
    with mock.patch.object(tcs, "estimate_floor", lambda *given: floor):  # whatever is estimated
        assert tcs.top_k_positions(vector, k).tolist() == expected


@given(
    st.sampled_from(["ties", "zeros", "equal", "spike", "huge", "tiny", "noise"]),
    st.integers(1, 40_000),
    st.floats(-2.0, 2.0),
    st.sampled_from([0.01, 0.2, 1.0]),
    st.integers(0, 2**31),
)
def test_whatever_a_sample_says_the_result_is_that_of_sorting(kind, dimension, log, phi, seed):
    """The estimated floor may be too low or too high by a factor of 100. From 16,384 entries on,
    there is a sample."""
    generator = torch.Generator().manual_seed(seed)
    noise_D = torch.randn(dimension, generator=generator)
    vector_D = {
        "ties": (3 * noise_D).round(), "zeros": noise_D * 0, "equal": noise_D * 0 - 2.0,
        "spike": noise_D.index_fill(0, torch.tensor([seed % dimension]), 1e30),
        "huge": noise_D * 1e36, "tiny": noise_D * 1e-36, "noise": noise_D,
    }[kind]  # fmt: skip
    excluded_D = torch.rand(dimension, generator=generator) < 0.3
    eligible = dimension - int(excluded_D.sum())
    k = min(tcs.kept(phi, dimension), eligible)
    estimate = tcs.estimate_floor
    with mock.patch.object(tcs, "estimate_floor", lambda *given: 10.0**log * estimate(*given)):
        found_K = tcs.top_k_positions(vector_D, k, excluded_D)
    sizes_D = vector_D.abs().masked_fill(excluded_D, -1.0)
    assert torch.equal(
        found_K, sizes_D.sort(descending=True, stable=True).indices[:k].sort().values
    )


@pytest.mark.parametrize("k", [1, 5, 60, 400, 4999])
@pytest.mark.parametrize("change", ["none", "ties", "zeros", "infinite", "excluded"])
def test_a_long_vector_gives_what_a_full_sort_gives(k, change):
    """Long ones are narrowed first by the maxima of columns."""
    vector = torch.randn(5003, generator=torch.Generator().manual_seed(k))
    vector = {"ties": vector.mul(3).round(), "zeros": vector * 0}.get(change, vector)
    if change == "infinite":
        vector[[7, 4000]] = math.inf
    out = torch.arange(0, 5003, 2000) if change == "excluded" else None
    allowed = [i for i in range(5003) if change != "excluded" or i % 2000]
    expected = reference.s_top(vector.tolist(), k, allowed)
    assert tcs.top_k_positions(vector, k, out).tolist() == expected


@pytest.mark.parametrize("place", [0, 2500, 5002])
def test_a_nan_in_a_long_vector_is_found(place):
    vector = torch.randn(5003)
    vector[place] = math.nan
    for floor in (0.0, 1.5, 1e9):
        with (
            mock.patch.object(tcs, "estimate_floor", lambda *given, f=floor: f),
            pytest.raises(ValueError, match="holds a NaN"),
        ):
            tcs.top_k_positions(vector, 5)


def test_a_shared_mask_is_excluded_from_own_masks_alone():
    rule = tcs.TCS(tcs.Scheme.named("TCS", phi_global=0.2, phi_local=0.2), [10])
    vector = torch.arange(10.0, 0.0, -1.0)
    for shared, own in [([0, 1], [2, 3]), ([1, 2], [0, 3]), ([], [0, 1])]:
        shared_D = tcs.positions_to_mask(torch.tensor(shared).long(), 10)
        assert rule.own_mask(vector, shared_D, 2).tolist() == own
        assert rule.select(vector, 2, None).tolist() == [0, 1]
    assert rule.own_mask(vector, shared_D, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_type(dtype):
    vector = torch.tensor([5.0, 1.0, 1.0, -6.0], dtype=dtype)
    for excluded, expected in [([3], [0]), ([0], [3]), ([], [3])]:
        excluded_K = torch.tensor(excluded).long()
        assert tcs.top_k_positions(vector, 1, excluded_K).tolist() == expected
        excluded_D = tcs.positions_to_mask(excluded_K, 4)
        assert tcs.top_k_positions(vector, 1, excluded_D).tolist() == expected


@given(VECTORS, st.data())
def test_excluded_entries_never_enter(values, data):
    excluded = sorted(data.draw(st.sets(st.integers(0, len(values) - 1))))
    allowed = [i for i in range(len(values)) if i not in excluded]
    k = data.draw(st.integers(0, len(allowed)))
    found = tcs.top_k_positions(torch.tensor(values), k, excluded=torch.tensor(excluded).long())
    assert found.tolist() == reference.s_top(values, k, allowed)
    with mock.patch.object(tcs, "is_on_cpu", lambda tensor: False):  # a GPU's
        again = tcs.top_k_positions(torch.tensor(values), k, excluded=torch.tensor(excluded).long())
    assert torch.equal(again, found)


def test_mask_has_k_ones_even_if_all_entries_tie():
    mask = tcs.top_k_mask(torch.ones(100), 7)
    assert mask.dtype == torch.bool
    assert mask.nonzero().squeeze(1).tolist() == list(range(7))


def test_the_vector_is_left_alone(random):
    vector = torch.randn(50, generator=random)
    before = vector.clone()
    tcs.top_k_positions(vector, 5, excluded=torch.tensor([1, 2]))
    tcs.layerwise_top_k_positions(vector, 5, [20, 30], 0.1)
    assert torch.equal(vector, before)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
    st.integers(0, 2**31),
    st.data(),
)
def test_layerwise_agrees_with_the_reference(sizes, phi_min, seed, data):
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randint(-4, 5, (sum(sizes),), generator=generator).float()
    k = data.draw(st.integers(1, sum(sizes)))
    expected = reference.s_top_fair(vector.tolist(), k, sizes, phi_min)
    found = tcs.layerwise_top_k_positions(vector, k, sizes, phi_min)
    assert found.tolist() == expected
    with mock.patch.object(tcs, "is_on_cpu", lambda tensor: False):  # a GPU's
        assert torch.equal(tcs.layerwise_top_k_positions(vector, k, sizes, phi_min), found)


def test_what_is_excluded_may_be_positions_or_a_mask():
    vector, positions = torch.tensor([5.0, 4.0, 3.0, 2.0]), torch.tensor([0, 2])
    for excluded in (positions, tcs.positions_to_mask(positions, 4)):
        assert tcs.top_k_positions(vector, 2, excluded).tolist() == [1, 3]
        assert tcs.layerwise_top_k_positions(vector, 2, [4], 0.1, excluded).tolist() == [1, 3]


def test_every_layer_gets_its_fair_share():
    vector = torch.cat([torch.full((900,), 5.0), torch.arange(1.0, 101.0)])
    positions = tcs.layerwise_top_k_positions(vector, 150, [900, 100], 0.1)
    assert positions.tolist() == [*range(90), *range(940, 1000)]
    weak = torch.cat([torch.full((900,), 500.0), torch.arange(1.0, 101.0)])
    positions = tcs.layerwise_top_k_positions(weak, 150, [900, 100], 0.1)
    assert positions[positions >= 900].tolist() == list(range(990, 1000))


@pytest.mark.parametrize(
    ("phi", "dimension", "k"),
    [(1e-2, 11_173_962, 111_740), (1e-3, 11_173_962, 11_174), (1.0, 5, 5), (1e-6, 10, 1), (0.07, 100, 7),
     (0.07, 10**8, 7_000_000), (0.554, 10**7, 5_540_000), (0.07, 10**8 + 1, 7_000_001)],
)  # fmt: skip
def test_kept(phi, dimension, k):
    assert tcs.kept(phi, dimension) == k


@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, -2.0]), min_size=1, max_size=40), st.data())
def test_mostly_zeros_and_excluded_entries(values, data):
    """Of the zeros, which all tie, the first that are not excluded."""
    dimension = len(values)
    excluded = sorted(data.draw(st.sets(st.integers(0, dimension - 1))))
    k = data.draw(st.integers(0, dimension - len(excluded)))
    free = [i for i in range(dimension) if i not in excluded]
    expected = sorted(sorted(free, key=lambda i: (-abs(values[i]), i))[:k])
    vector = torch.tensor(values)
    compressed = tcs.layerwise_top_k_positions(
        vector, k, [dimension], 1e-9, torch.tensor(excluded).long()
    )
    assert compressed.tolist() == expected


def test_a_fair_mask_names_the_k_that_was_asked_for():
    with pytest.raises(ValueError, match="k: got 20, allowed: a whole number from 0 to 10, "):
        tcs.layerwise_top_k_positions(torch.randn(10), 20, [5, 5], 0.2)


def test_what_is_excluded_and_what_is_known_to_be_zero_are_not_given_together():
    vector_D, some_K = torch.randn(10), torch.arange(5)
    with pytest.raises(ValueError, match="among_K"):
        tcs.top_k_positions(vector_D, 2, excluded=some_K, among_K=some_K)


@pytest.mark.parametrize(
    "kind",
    ["steep", "ties", "few that are not 0", "all 0", "no sampled entry is large",
     "all sampled entries are large", "an infinity"],
)  # fmt: skip
def test_of_a_long_vector_a_sample_that_misleads_changes_nothing(kind):
    """Every 269th entry is the sample from which the floor is estimated."""
    generator = torch.Generator().manual_seed(5)
    dimension, k = 1_100_003, 1000
    vector_D = torch.randn(dimension, generator=generator)
    vector_D = {
        "steep": vector_D**7, "ties": vector_D.round(), "all 0": vector_D * 0,
        "few that are not 0": vector_D * (torch.rand(dimension, generator=generator) < 1e-4),
        "no sampled entry is large": vector_D.index_fill(0, torch.arange(0, dimension, 269), 1e-9),
        "all sampled entries are large": vector_D.index_fill(0, torch.arange(0, dimension, 269), 9.0),
        "an infinity": vector_D.index_fill(0, torch.tensor([dimension - 1]), math.inf),
    }[kind]  # fmt: skip
    excluded_D = torch.rand(dimension, generator=generator) < 0.01
    sizes_D = vector_D.abs().masked_fill(excluded_D, -1.0)
    expected_K = sizes_D.sort(descending=True, stable=True).indices[:k].sort().values
    assert torch.equal(tcs.top_k_positions(vector_D, k, excluded_D), expected_K)
    vector_D[excluded_D.logical_not().nonzero()[1, 0]] = math.nan  # outside of the sample
    with pytest.raises(ValueError, match="NaN"):
        tcs.top_k_positions(vector_D, k, excluded_D)
