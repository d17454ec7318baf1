"""Section 7: what a failed round leaves behind: nothing that spoils the rounds after it."""

import pytest
import torch
from torch import nn

import tcs_core as tcs


def mse(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def batches(clients, count=4):
    generator = torch.Generator().manual_seed(0)
    draw = lambda size: torch.randn(8, size, generator=generator)  # noqa: E731
    return [[(draw(6), draw(3)) for _ in range(count)] for _ in range(clients)]


def with_one_bad_round(model, **settings):
    """A federation after a good round and one in which client 0's batch was NaN, put right again."""
    data = batches(3)
    good = data[0][1]
    data[0][1] = (good[0] * torch.nan, good[1])
    federation = tcs.Federation(model, data, "TCS", loss=mse, **settings)
    federation.round()
    before_NS = federation.statistics_NS.clone()
    with pytest.raises(tcs.NotFiniteError, match=r"^client 0: "):
        federation.round()
    assert torch.equal(federation.statistics_NS, before_NS)
    return federation


def test_statistics_of_norms_are_as_before_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    federation = with_one_bad_round(model, schedule=0.01)
    for _ in range(2):
        federation.round()
    assert federation.statistics_NS.isfinite().all() and model[1].running_var.isfinite().all()
    means_NS = federation.statistics_NS[:, :6]
    assert not torch.equal(means_NS[0], means_NS[1])  # each client still has its own


def test_the_module_has_the_statistics_of_those_who_were_active_before_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    fails = []
    loss = lambda model, batch: mse(model, batch) * (torch.nan if fails else 1.0)  # noqa: E731
    federation = tcs.Federation(model, batches(3), "TCS", 0.01, loss=loss)
    federation.round()
    federation.round(clients=[0, 2])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fails.append(1)
    with pytest.raises(tcs.NotFiniteError, match=r"^client 1: "):
        federation.round(clients=[1])
    assert federation.active == federation.state_dict()["active"] == [0, 2]
    assert torch.equal(model[1].running_mean, before["1.running_mean"])
    assert torch.equal(model[1].running_var, before["1.running_var"])


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)]
)
def test_a_client_whose_difference_was_not_finite_trains_on_with_a_new_optimizer(optimizer):
    torch.manual_seed(0)
    federation = with_one_bad_round(nn.Linear(6, 3), local_optimizer=optimizer)
    assert sorted(federation.trainer.optimizers) == [1, 2]
    for _ in range(2):
        assert federation.round().isfinite().all()
    assert sorted(federation.trainer.optimizers) == [0, 1, 2]


class Interrupted(tcs.TCS):
    """A rule that Ctrl-C meets in one of its methods, once."""

    where = ""

    def _met(self, where):
        if Interrupted.where == where:
            Interrupted.where = ""
            raise KeyboardInterrupt

    def begin(self, theta_D=None, masks=1):
        self._met("begin")

    def observe(self, update_D):
        self._met("observe")
        super().observe(update_D)


@pytest.fixture
def interrupted():
    tcs.register_scheme("Interrupted", phi_global=0.2, phi_local=0.1)(Interrupted)
    yield tcs.Compressor("Interrupted", [20], 2)
    tcs.FAMILIES.pop("Interrupted")
    tcs.RULES.pop("Interrupted")


@pytest.mark.parametrize("where", ["begin", "observe"])
def test_ctrl_c_in_a_rule_is_a_round_in_which_nobody_was_heard(interrupted, where):
    deltas_ND = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        interrupted.step(deltas_ND)
    errors_ND, mask = interrupted.errors_ND.clone(), interrupted.rule.positions
    Interrupted.where = where
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted.step(deltas_ND)
    assert any("round 2: nobody was heard in it" in note for note in caught.value.__notes__)
    assert torch.equal(interrupted.rule.positions, mask)
    kept_ND = errors_ND if where == "begin" else errors_ND + deltas_ND
    assert torch.equal(interrupted.errors_ND, kept_ND)
    interrupted.step(deltas_ND)
    assert interrupted.known.round == 4


def test_on_a_gpu_what_was_not_read_accuses_nobody_in_the_next_round(monkeypatch):
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    compressor = tcs.Compressor("TCS", [20], 2)
    compressor.step(torch.randn(2, 20))

    def difference(n):
        if n:
            raise ArithmeticError
        return torch.full((20,), torch.nan)

    with pytest.raises(ArithmeticError):
        compressor.round(difference, [0, 1])
    assert compressor.step(torch.ones(2, 20)).isfinite().all()


@pytest.mark.parametrize("way", ["bytes", "reply"])
def test_on_a_gpu_a_lone_clients_nan_is_found_before_it_leaves_or_the_round_ends(way, monkeypatch):
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    known = tcs.Known("TCS", [20])
    client = tcs.Client(known)
    known.begin(dense=True)
    message = client.send(torch.full((20,), torch.nan))
    with pytest.raises(tcs.NotFiniteError, match=r"^client 0: "):
        if way == "bytes":
            known.to_bytes(message)
        client.receive(tcs.Message.dense_of(torch.zeros(20), tcs.SERVER, 0))
    assert known.round == 0


def test_a_server_gives_no_average_of_a_round_that_is_over():
    known = tcs.Known("TCS", [20])
    server = tcs.Server(known)
    known.begin(dense=True)
    server.add(0, tcs.Message.dense_of(torch.ones(20)))
    known.lose()
    known.begin(dense=True)
    with pytest.raises(tcs.MessageError, match=r"^server: no message was accepted in round 1,"):
        server.finish()
