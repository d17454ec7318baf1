"""Section 7: a round that fails is one in which nobody was heard; what was meant to be sent stays."""

import pytest
import torch
from torch import nn

import tcs_core as tcs

CLIENTS, GOOD = 3, 3  # the third client breaks the fourth round


class Broken:
    """A net, three feeds and a loss, of which client 2 breaks round `GOOD` in one of several ways."""

    def __init__(self, how, scheme="TCS", dense=False, rounds=8):
        self.how, self.passes, self.link = how, [0] * CLIENTS, None
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 3)
        )
        self.model[1].eval() if how != "a batch of one" else None
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(CLIENTS, rounds, 6, 8, generator=generator)
        feed = [[(n, x, x[:, :3] + n) for x in rows] for n, rows in enumerate(inputs)]
        if how == "a batch of one":
            n, x, y = feed[2][GOOD]
            feed[2][GOOD] = n, x[:1], y[:1]
        if how == "its feed ends":
            feed[2] = iter(feed[2][:GOOD])
        if how == "a refused message":
            self.link = tcs.Link(self.channel)
        schedule = lambda t: tcs.Phase(0.05, dense=dense and t >= GOOD)  # noqa: E731
        self.made = tcs.Federation(
            self.model, feed, scheme, schedule, loss=self.loss, link=self.link
        )
        self.meant = {}
        self.made.on_delta = lambda n, delta_D: self.meant.update({n: delta_D.clone()})

    def channel(self, sender, data):
        broken = sender == 2 and self.made.t == GOOD + 1
        return data[:-1] if broken else data

    def loss(self, model, batch):
        n, x, y = batch
        self.passes[n] += 1
        broken = n == 2 and self.passes[n] == GOOD + 1
        if broken and self.how == "Ctrl-C":
            raise KeyboardInterrupt
        if broken and self.how == "an error of the loss":
            raise ArithmeticError("odd")
        loss = (model(x) - y).square().mean()
        return loss * torch.nan if broken and self.how == "its loss is NaN" else loss


WAYS = {
    "its loss is NaN": (tcs.NotFiniteError, r"^client 2: the update is not finite \(NaN or infinity\)\n.*round 3: nobody was heard"),
    "its feed ends": (ValueError, r"^feed: client 2 has no batch .*\nclient 2, round 3: nobody was heard"),
    "a batch of one": (ValueError, r"more than 1 value per channel(.|\n)*\nclient 2, round 3: nobody was heard"),
    "an error of the loss": (ArithmeticError, r"^odd\nclient 2, round 3: nobody was heard in it$"),
    "a refused message": (tcs.MessageError, r"^client 2: message: wrong checksum.*\nround 3: nobody was heard"),
    "Ctrl-C": (KeyboardInterrupt, None),
}  # fmt: skip


def fails(broken):
    error, text = WAYS[broken.how]
    with pytest.raises(error, match=text) as raised:
        broken.made.round()
    if isinstance(raised.value, tcs.ClientError):
        assert (raised.value.client, raised.value.round) == (2, GOOD)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_after_a_round_that_failed_all_is_as_before_but_for_errors_and_time(how, dense):
    broken = Broken(how, dense=dense)
    made, compressor, model = broken.made, broken.made.compressor, broken.model
    for _ in range(GOOD):
        made.round()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    gradients, modes = [p.grad for p in model.parameters()], [m.training for m in model.modules()]
    theta_D, errors_ND = made.theta_D.clone(), compressor.errors_ND.clone()
    mask, traffic = compressor.rule.shared_mask().clone(), compressor.traffic
    values = [v.clone() for v in nn.utils.parameters_to_vector(model.parameters())]
    drawn = torch.get_rng_state()
    broken.meant.clear()
    fails(broken)
    assert torch.equal(made.theta_D, theta_D) and torch.equal(compressor.rule.shared_mask(), mask)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), torch.stack(values))
    assert (made.t, compressor.known.round) == (GOOD + 1, GOOD + 1)
    assert compressor.traffic == traffic
    sent = (0, 1, 2) if how == "a refused message" else (0, 1)
    for n in range(CLIENTS):
        expected_D = errors_ND[n] + broken.meant[n] if n in sent else errors_ND[n]
        assert torch.equal(compressor.errors_ND[n], expected_D), n
    assert [m.training for m in model.modules()] == modes
    now = [p.grad for p in model.parameters()]
    assert all(a is b for a, b in zip(now, gradients, strict=True))
    assert all((g == 3.0).all() for g in now) and torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("how", [how for how in WAYS if how != "its feed ends"])
def test_the_next_round_works_and_what_was_meant_before_goes_with_it_once(how, dense):
    broken = Broken(how, dense=dense)
    made, errors_ND = broken.made, broken.made.compressor.errors_ND
    for _ in range(GOOD):
        made.round()
    fails(broken)
    intended_ND = errors_ND.clone()
    update_D = made.round()
    intended_ND += torch.stack([broken.meant[n] for n in range(CLIENTS)])
    torch.testing.assert_close(update_D + errors_ND.mean(0), intended_ND.mean(0))
    assert update_D.isfinite().all() and not (dense and errors_ND.any())
    assert made.t == made.compressor.known.round == GOOD + 2
    assert made.compressor.traffic.heard == (0, 1, 2)


def test_the_feed_goes_on_after_a_round_that_failed():
    """The clients that had sent do not train on the same batch again."""
    broken = Broken("its loss is NaN")
    for _ in range(GOOD):
        broken.made.round()
    fails(broken)
    broken.made.round()
    assert broken.made.feed.given == [GOOD + 2] * CLIENTS


@pytest.mark.parametrize("scheme", ["TCS-Momentum", "top-K-Momentum", "FedAvg-Momentum"])
def test_momentum_is_as_before_too(scheme):
    broken = Broken("an error of the loss", scheme)
    for _ in range(GOOD):
        broken.made.round()
    momentum_D, theta_D = broken.made.momentum_D.clone(), broken.made.theta_D.clone()
    with pytest.raises(ArithmeticError):
        broken.made.round()
    assert torch.equal(broken.made.momentum_D, momentum_D) and momentum_D.any()
    assert torch.equal(broken.made.theta_D, theta_D)
    assert not torch.equal(broken.made.round(), torch.zeros_like(theta_D))


def test_a_scheme_without_errors_loses_what_was_sent_and_says_so():
    broken = Broken("an error of the loss", "FedAvg")
    for _ in range(GOOD):
        broken.made.round()
    with pytest.raises(ArithmeticError, match=r"nobody was heard in it; what was sent is lost$"):
        broken.made.round()
    update_D = broken.made.round()
    torch.testing.assert_close(update_D, torch.stack([broken.meant[n] for n in range(3)]).mean(0))


def test_a_compressor_that_refuses_a_message_keeps_all_that_was_meant():
    channel = lambda sender, data: data[:-1] if sender == 1 else data  # noqa: E731
    compressor = tcs.Compressor("top-K", [20], 3, link=tcs.Link(tcs.unchanged))
    compressor.step(torch.randn(3, 20))
    before_ND, delta_ND = compressor.errors_ND.clone(), torch.randn(3, 20)
    compressor.link.channel = channel
    with pytest.raises(tcs.MessageError, match="client 1"):
        compressor.step(delta_ND)
    expected_ND = before_ND + delta_ND * torch.tensor([[1.0], [1.0], [0.0]])  # client 2 had no turn
    assert torch.equal(compressor.errors_ND, expected_ND)
    assert compressor.server.heard == [] and not compressor.server.explored_D.any()
