"""Section 7: a trainer of one's own takes the place of `LocalTrainer`, and nothing else changes."""

import pytest
import torch
from classifier import Classifier, federation, flat
from common import same_state

import tcs_core as tcs


class Ahead(tcs.LocalTrainer):
    """Trains all clients of a round before the first of them is asked for."""

    def __init__(self, *settings, **more):
        super().__init__(*settings, **more)
        self.made, self.fails = {}, False

    def begin(self, chosen, t, eta):
        plain = super().difference
        self.made = {n: plain(n, t, eta).clone() for n in chosen}
        if self.fails:
            raise ArithmeticError("ahead")

    def difference(self, n, t, eta):
        return self.made.pop(n)


class Watched(tcs.LocalTrainer):
    """Keeps whom it trained, and when."""

    def __init__(self, *settings, **more):
        super().__init__(*settings, **more)
        self.seen = []

    def local_training(self, n, t, eta):
        self.seen.append((t, n))
        return super().local_training(n, t, eta)


@pytest.mark.parametrize("scheme", ["TCS", "TCS-L2-Q5", "TCS-Global Momentum", "FedAvg"])
@pytest.mark.parametrize("trainer", [Ahead, Watched])
def test_a_trainer_that_does_the_same_gives_the_same_bits(scheme, trainer):
    plain, own = (
        federation(Classifier(), scheme, 3, **more) for more in ({}, {"trainer": trainer})
    )
    assert isinstance(own.trainer, trainer)
    for clients in (None, [2, 0], [1], None):
        assert torch.equal(plain.round(clients), own.round(clients))
    assert same_state(plain.state_dict(), own.state_dict())
    assert torch.equal(plain.losses_N, own.losses_N)


@pytest.mark.parametrize("scheme", ["TCS", "FedAvg-L2", "top-K"])
def test_a_trainer_that_fails_ahead_leaves_theta_statistics_and_module_as_they_were(scheme):
    made = federation(Classifier(), scheme, 3, trainer=Ahead)
    made.round()
    theta_D, statistics_NS = made.theta_D.clone(), made.statistics_NS.clone()
    made.trainer.fails = True
    with pytest.raises(ArithmeticError, match="ahead"):
        made.round()
    assert torch.equal(made.theta_D, theta_D) and torch.equal(flat(made.model), theta_D)
    assert torch.equal(made.statistics_NS, statistics_NS) and made.is_whole
    made.trainer.fails = False
    assert made.round().isfinite().all()


def test_what_a_trainer_has_a_federation_shows_and_nobody_sets_there():
    made = federation(Classifier())
    for name in ("model", "flat", "theta_D", "statistics_NS", "losses_N"):
        assert getattr(made, name) is getattr(made.trainer, name)
        with pytest.raises(AttributeError):
            setattr(made, name, None)


def test_losses_are_summed_until_their_owner_sets_them_to_zero():
    seen = []

    def loss(model, batch):
        seen.append(tcs.cross_entropy(model, batch))
        return seen[-1]

    made = federation(Classifier(), "TCS-L2", loss=loss)
    made.round(), made.round()
    assert len(seen) == 8
    torch.testing.assert_close(made.losses_N.sum(), torch.stack(seen).sum())
    made.losses_N.zero_()
    seen.clear()
    made.round([1])
    torch.testing.assert_close(made.losses_N, torch.stack([torch.tensor(0.0), sum(seen)]))
