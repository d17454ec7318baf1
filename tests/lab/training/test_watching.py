"""What is counted about masks: by looking on, outside of the algorithm's state."""

import itertools
from unittest import mock

import pytest
import tcs_lab.training.watching as watching
import torch
from common import config
from hypothesis import given
from hypothesis import strategies as st
from tcs_lab.training.training import Training, load_data


@pytest.mark.parametrize("looks", [True, False])
@given(pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1))
def test_positions_in_common(looks, pairs):
    """As sets have it, on a GPU's way, too."""
    one, other = (sorted(set(part)) for part in zip(*pairs, strict=True))
    with mock.patch.object(watching, "is_on_cpu", lambda tensor: looks):
        common = watching.count_common(torch.tensor(one), torch.tensor(other))
    assert int(common) == len(set(one) & set(other))


def masks_of(name):
    """The shared mask after each round of an epoch, and what the row says of them."""
    settings = config(name, epochs=2)
    training, masks = Training(settings, load_data(settings)), []
    training.epoch(0)
    training.watch.begin()
    masks.append(set(training.compressor.rule.positions.tolist()))
    for update_D in training.rounds(1):
        training.watch.observe(update_D)
        masks.append(set(training.compressor.rule.positions.tolist()))
    return masks, training.watch.row()


@pytest.mark.parametrize("name", ["TCS", "TCS-Stale", "TCS-L2-Q5"])
def test_the_overlap_of_masks_is_that_of_consecutive_ones(name):
    masks, row = masks_of(name)
    shared = sum(len(one & two) for one, two in itertools.pairwise(masks))
    assert row["mask_overlap"] == shared / sum(map(len, masks[1:]))


@pytest.mark.parametrize("name", ["TCS-Random", "TCS-WPLF", "top-K"])
def test_masks_that_do_not_follow_the_updates_have_no_overlap(name):
    settings = config(name, epochs=1)
    training = Training(settings, load_data(settings))
    assert "mask_overlap" not in training.epoch(0)


def test_the_overlap_of_updates_is_that_of_sets_and_so_is_chance():
    """Layers of 300, 100 and 600 entries with unequal scales; the 20 largest entries of five updates."""
    sizes, watch = [300, 100, 600], watching.UpdateWatch([300, 100, 600], phi=0.02)
    generator = torch.Generator().manual_seed(1)
    tops, layer_of = list[set[int]](), [0] * 300 + [1] * 100 + [2] * 600
    for _ in range(5):
        update_D = torch.randn(1000, generator=generator)
        update_D *= torch.tensor([1.0, 2.0, 1.2])[torch.tensor(layer_of)]
        watch.observe(update_D)
        tops.append(set(sorted(range(1000), key=lambda i: -abs(float(update_D[i])))[:20]))
    counts = [[sum(layer_of[i] == n for i in top) for n in range(3)] for top in tops]
    pairs = list(itertools.pairwise(zip(tops, counts, strict=True)))
    shared = sum(len(one & two) for (one, _), (two, _) in pairs) / 20 / len(pairs)
    by_chance = [
        sum(a * b / d for a, b, d in zip(one, two, sizes, strict=True))
        for (_, one), (_, two) in pairs
    ]
    row = watch.row()
    assert row["update_overlap"] == pytest.approx(shared)
    assert row["update_overlap_chance"] == pytest.approx(sum(by_chance) / 20 / len(pairs))
