"""Clients side by side: the numbers of one client after another, to rounding."""

from dataclasses import replace

import pytest
import tcs_lab as lab
import torch
from common import config
from tcs_lab.side_by_side import SideBySide, goes_side_by_side
from tcs_lab.training import Training, load_data

NET = {"train_samples": 60, "clients": 5, "batch_size": 3, "width": 4}


def played(side_by_side, scheme, changes):
    """A training after two epochs, and its rows."""
    of = config(scheme, **(NET | changes), side_by_side=side_by_side)
    training = Training(of, load_data(of))
    return training, [training.epoch(0), training.epoch(1)]


@pytest.mark.parametrize("model", ["conv3", "resnet8"])
@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("FedAvg", {}),
        ("TCS-L2", {}),
        ("top-K-L2", {"participation": 0.6}),
        ("TCS-Global Momentum", {"image_size": 8}),
    ],
)
def test_it_is_the_same_to_rounding(small, model, scheme, changes):
    changes = changes | {"model": model}
    (turns, rows), (together, found) = (played(way, scheme, changes) for way in (False, True))
    assert isinstance(together.federation, SideBySide)
    assert not isinstance(turns.federation, SideBySide)
    assert torch.allclose(together.theta_D, turns.theta_D, atol=1e-4)
    assert torch.allclose(together.statistics_NS, turns.statistics_NS, rtol=1e-3, atol=1e-4)
    assert torch.allclose(together.federation.losses_N, turns.federation.losses_N, rtol=1e-3)
    assert found[1]["bits_up"] == rows[1]["bits_up"]


def test_half_precision_is_near(small):
    changes = {"model": "resnet8", "precision": "bf16"}
    (_, rows), (_, found) = (played(way, "TCS", changes) for way in (False, True))
    assert found[0]["train_loss"] == pytest.approx(rows[0]["train_loss"], rel=2e-2)


def test_the_sizes_choose():
    small, large = (
        config(model="resnet8", width=8),
        config(model="resnet18", width=64, batch_size=64),
    )
    assert goes_side_by_side(small) and not goes_side_by_side(large)
    assert goes_side_by_side(replace(large, side_by_side=True))
    assert not goes_side_by_side(replace(small, side_by_side=False))
    assert not goes_side_by_side(config("Baseline", model="resnet8", width=8))
    assert not lab.records.rounding(large)["side_by_side"]
