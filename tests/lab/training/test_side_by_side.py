"""Clients side by side: the numbers of one client after another, to rounding."""

from dataclasses import replace

import pytest
import tcs_lab as lab
import torch
from common import config
from tcs_lab.training.client_streams import ClientStreams
from tcs_lab.training.client_threads import ClientThreads
from tcs_lab.training.side_by_side import SideBySide, uses_side_by_side
from tcs_lab.training.training import ImageFeed, Training, load_data

import tcs_core

NET = {"train_samples": 60, "clients": 5, "batch_size": 3, "width": 4}


def made(side_by_side, scheme, changes):
    of = config(scheme, **(NET | changes), side_by_side=side_by_side)
    return Training(of, load_data(of))


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
    """After one epoch. In the second, rounding may put a ReLU on the other side of its kink: there
    the way that the model went is compared, of which a client mixed up would leave nothing alike."""
    changes = changes | {"model": model}
    turns, together = (made(way, scheme, changes) for way in (False, True))
    assert isinstance(together.federation.trainer, SideBySide)
    assert not isinstance(turns.federation.trainer, SideBySide)
    start_D = turns.theta_D.clone()
    for epoch, near in enumerate((1e-5, 5e-2)):
        rows, found = turns.epoch(epoch), together.epoch(epoch)
        moved_D, off_D = turns.theta_D - start_D, together.theta_D - turns.theta_D
        assert off_D.norm() < near * moved_D.norm()
        off_NS = together.statistics_NS - turns.statistics_NS
        assert off_NS.norm() < near * turns.statistics_NS.norm()
        losses_N = turns.federation.losses_N
        assert torch.allclose(together.federation.losses_N, losses_N, rtol=near)
        assert found["bits_up"] == rows["bits_up"]


def test_one_value_a_channel_is_said_as_in_turns(small):
    alone = made(True, "TCS", {"model": "resnet8", "batch_size": 1, "image_size": 4})
    with pytest.raises(ValueError, match=r"image_size: got 1 value .* allowed: 2 or more"):
        alone.epoch(0)


def test_half_precision_is_near(small):
    changes = {"model": "resnet8", "precision": "bf16"}
    losses = [made(way, "TCS", changes).epoch(0)["train_loss"] for way in (False, True)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_the_sizes_choose():
    small, large = (
        config(model="resnet8", width=8),
        config(model="resnet18", width=64, batch_size=64),
    )
    assert uses_side_by_side(small) and not uses_side_by_side(large)
    assert uses_side_by_side(replace(large, side_by_side=True))
    assert not uses_side_by_side(replace(small, side_by_side=False))
    assert not uses_side_by_side(config("Baseline", model="resnet8", width=8))
    assert not lab.runs.records.rounding(large)["side_by_side"]


def test_all_clients_batches_at_once_are_those_of_each(small):
    feed = made(True, "TCS-L2", {}).feed
    feed.hold(range(feed.rounds, 2 * feed.rounds))
    t = torch.tensor(1)
    for tau in range(2):
        each = zip(*(feed.batch(n, t, tau) for n in range(5)), strict=True)
        for found, parts in zip(feed.batches_of_all(t, tau), each, strict=True):
            assert torch.equal(found, torch.stack(parts))


def test_a_feed_that_changes_batches_is_asked_for_each(small):
    """Though what it comes from can give all at once."""

    class Zeros(ImageFeed):
        def batch(self, n, round, tau):
            images, labels = super().batch(n, round, tau)
            return images, torch.zeros_like(labels)

    training = made(True, "TCS", {"graph": True})
    training.federation.feed.__class__ = Zeros
    training.federation.feed.hold(range(training.feed.rounds))
    for t in (0, torch.tensor(0)):
        _, labels_NB = training.federation.trainer._batches(list(range(5)), t, 0)
        assert labels_NB.sum() == 0


def test_batch_norms_with_another_momentum_are_refused():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2, momentum=0.2))
    batches = [[(torch.randn(4, 3, 2, 2), torch.zeros(4).long())]] * 2
    with pytest.raises(ValueError, match=r"^model: got the momentum 0\.2 of a batch norm, allowed"):
        tcs_core.Federation(net, batches, "TCS", 0.1, trainer=SideBySide)


@pytest.mark.parametrize("trainer", [SideBySide, ClientStreams, ClientThreads])
def test_optimizers_of_the_clients_own_are_refused(trainer):
    batches = [[(torch.randn(4, 6), torch.arange(4) % 3)]] * 2
    with pytest.raises(
        ValueError, match=r"^local_optimizer: got one, allowed: none with .*LocalTrainer$"
    ):
        tcs_core.Federation(
            torch.nn.Linear(6, 3), batches, "TCS", 0.1, local_optimizer=torch.optim.SGD,
            trainer=trainer,
        )  # fmt: skip


def test_batches_of_different_sizes_are_refused_with_the_way_out():
    """A last batch that is smaller for one client than for another cannot be stacked."""
    inputs, labels = torch.randn(7, 6), torch.arange(7) % 3
    loaders = [
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs[:count], labels[:count]), batch_size=4
        )
        for count in (7, 6)
    ]
    federation = tcs_core.Federation(
        torch.nn.Linear(6, 3), loaders, "FedAvg", 0.1, trainer=SideBySide
    )
    federation.round()
    with pytest.raises(ValueError, match=r"\[3, 2\].*drop_last=True"):
        federation.round()


@pytest.mark.parametrize(
    ("last", "loss", "says"),
    [(torch.nn.Linear(8, 2), tcs_core.cross_entropy, "loss: got cross_entropy, allowed with SideBySide"),
     (torch.nn.Linear(8, 2, bias=False), tcs_core.cross_entropy, "model: got a Linear without bias")],
)  # fmt: skip
def test_what_cannot_train_side_by_side_is_refused(last, loss, says):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), last
    )
    batches = [[(torch.randn(4, 3, 2, 2), torch.zeros(4).long())]] * 2
    with pytest.raises(ValueError, match=f"^{says}"):
        tcs_core.Federation(net, batches, "TCS", 0.1, loss=loss, trainer=SideBySide)
