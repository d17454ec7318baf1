"""Uses at the edge: modules with modes of their own, derived servers, schemes from fields."""

import pytest
import torch
from torch import nn

import tcs_core as tcs


class Merging(nn.Linear):
    """Adds a trained part to its weight in eval mode and takes it out in training, as LoRA layers do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.more, self.merged = nn.Parameter(torch.zeros(outputs, inputs)), False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight += self.more if not mode else -self.more
            self.merged = not mode
        return self

    def forward(self, x):
        more = 0.0 if self.merged else self.more
        return nn.functional.linear(x, self.weight + more, self.bias)


def batches(count=2):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, 8, 6, generator=generator)
    return [[(x, x[:, :3].argmax(1)) for x in of] for of in inputs]


def net():
    torch.manual_seed(0)
    return nn.Sequential(Merging(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_evaluations_change_no_training_of_a_module_that_merges():
    ends = []
    for looks in (False, True):
        made = tcs.Federation(net(), batches(), "FedAvg", 0.1)
        for _ in range(5):
            made.round()
            if looks:
                with made.evaluated():
                    pass
                made.averaged_state_dict()
        ends.append(made.model[0].more.detach().clone())
    assert ends[0].any() and torch.equal(*ends)


def fails(*_):
    raise ZeroDivisionError


def test_a_module_that_merges_may_stay_in_eval_mode():
    ends = []
    for stays in (False, True):
        made = tcs.Federation(net().train(not stays), batches(), "FedAvg", 0.1)
        for _ in range(4):
            made.round()
            made.model.train(not stays)
            made.on_delta = fails
            with pytest.raises(ZeroDivisionError):
                made.round()
            made.on_delta = None
            state = made.state_dict()
            with made.evaluated():
                torch.testing.assert_close(made.state_dict()["theta_D"], state["theta_D"])
        ends.append(state["theta_D"])
    torch.testing.assert_close(*ends)
    made = tcs.Federation(net().eval(), batches(), "FedAvg", 0.1)
    made.load_state_dict(state)
    torch.testing.assert_close(made.state_dict()["theta_D"], state["theta_D"])


class LowRank(nn.Linear):
    """Merges trained factors into its frozen weight in eval mode, as LoRA layers do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.up, self.down = (nn.Parameter(torch.randn(n, 2)) for n in (outputs, inputs))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight += (-1 if mode else 1) * self.up @ self.down.T
            self.merged = not mode
        return self

    def forward(self, x):
        found = super().forward(x)
        return found if self.merged else found + x @ self.down @ self.up.T


def low_rank_net():
    torch.manual_seed(3)
    return nn.Sequential(LowRank(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("loads_in_eval", [False, True])
@pytest.mark.parametrize("saves", ["in training", "in eval mode", "evaluated"])
def test_states_of_a_module_that_merges_into_frozen_weights_are_those_of_training(
    saves, loads_in_eval
):
    made = tcs.Federation(low_rank_net(), batches(), "FedAvg", 0.1)
    made.round()
    x = torch.ones(1, 6)
    with made.evaluated() as model:
        wanted = model(x)
        if saves == "evaluated":
            state, averaged = made.state_dict(), made.averaged_state_dict()
    if saves != "evaluated":
        made.model.train(saves == "in training")
        state, averaged = made.state_dict(), made.averaged_state_dict()
    other = tcs.Federation(low_rank_net().train(not loads_in_eval), batches(), "FedAvg", 0.1)
    other.load_state_dict(state)
    with other.evaluated() as model:
        torch.testing.assert_close(model(x), wanted)
    plain = low_rank_net()
    plain.load_state_dict(averaged)
    torch.testing.assert_close(plain.eval()(x), wanted)


class Frozen(nn.Sequential):
    """Keeps its first module in eval mode."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


def test_a_module_given_in_eval_mode_trains_as_in_training_mode():
    ends = []
    for mode in (True, False):
        torch.manual_seed(0)
        model = Frozen(nn.BatchNorm1d(6), nn.Linear(6, 3)).train(mode)
        made = tcs.Federation(model, batches(), "FedAvg", 0.1)
        for _ in range(3):
            made.round()
        assert not model[0].running_mean.any() and model.training == mode
        ends.append(made.theta_D.clone())
    assert torch.equal(*ends)


class Assigning(nn.BatchNorm1d):
    """Assigns new tensors to its statistics instead of changing them in place."""

    def forward(self, x):
        if self.training:
            mean, variance = x.detach().mean(0), x.detach().var(0)
            self.running_mean = 0.1 * mean + 0.9 * self.running_mean
            self.running_var = 0.1 * variance + 0.9 * self.running_var
            x = (x - x.mean(0)) / (x.var(0, unbiased=False) + self.eps).sqrt()
            return x * self.weight + self.bias
        return super().forward(x)


def test_norms_that_assign_new_statistics_have_those_of_the_others():
    ends = []
    for kind in (nn.BatchNorm1d, Assigning):
        torch.manual_seed(0)
        made = tcs.Federation(nn.Sequential(kind(6), nn.Linear(6, 3)), batches(), "FedAvg-L2", 0.1)
        for _ in range(2):
            made.round()
        ends.append(made.statistics_NS.clone())
    torch.testing.assert_close(*ends)


def test_an_autocast_around_a_round_with_an_optimizer_uses_the_new_weights():
    def inside(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return tcs.cross_entropy(model, batch)

    ends = []
    for loss, around in ((inside, False), (tcs.cross_entropy, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        made = tcs.Federation(
            model, batches(), "FedAvg-L4", 0.1, loss=loss, local_optimizer=torch.optim.SGD
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            made.round()
        ends.append(made.theta_D.clone())
    assert torch.equal(*ends)


def test_a_saved_model_has_the_averaged_statistics_even_while_others_are_shown():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    made = tcs.Federation(model, batches(), "FedAvg", 0.1)
    made.round()
    mean_D = model[0].running_mean.clone()
    with made.evaluated(made.statistics_NS[0]):
        assert not torch.equal(model[0].running_mean, mean_D)
        assert torch.equal(made.averaged_state_dict()["0.running_mean"], mean_D)
        with made.evaluated():
            assert torch.equal(model[0].running_mean, mean_D)


class Clipping(tcs.Server):
    def finish(self):
        update_D, reply = super().finish()
        update_D = update_D.clamp(-0.1, 0.1)
        if reply.dense:
            return update_D, tcs.Message.dense_of(update_D, tcs.SERVER, reply.round)
        places_K = torch.cat([self.known.shared_K, reply.positions])
        return update_D, tcs.Message(update_D[places_K], reply.positions, tcs.SERVER, reply.round)


@pytest.mark.parametrize("link", [tcs.Link(), tcs.Link(tcs.unchanged)], ids=["counted", "bytes"])
def test_a_derived_servers_finish_is_called(link, registry):
    @tcs.register_scheme("TCS-Clipped", phi_global=0.1, phi_local=0.05)
    class Clipped(tcs.TCS):
        server_type = Clipping

    compressor = tcs.Compressor("TCS-Clipped", [50], 2, link=link)
    for _ in range(3):
        assert compressor.step(torch.randn(2, 50)).abs().max() <= 0.1


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"rule": "dense"}, "FedAvg"), ({"rule": "top-K", "phi_local": 0.01}, "top-K"),
     ({"rule": "top-K", "phi_local": 0.01, "dense_warmup": False}, "top-K")],
)  # fmt: skip
def test_the_budget_of_a_scheme_from_fields_is_that_of_its_rule(fields, named):
    scheme = tcs.Scheme(name="mine", **fields)
    assert tcs.bit_budget(scheme) == tcs.bit_budget(named)
    compressor = tcs.Compressor(scheme, [1000], 2)
    compressor.step(torch.randn(2, 1000))
    assert compressor.known.dense or compressor.known.own_count == (named == "top-K") * 10


def test_a_top_k_scheme_from_fields_has_no_shared_mask_anywhere():
    known = tcs.Known(tcs.Scheme(name="mine", rule="top-K", phi_local=1.0), [1000])
    known.begin()
    assert known.own_count == 1000
    scheme = tcs.Scheme(name="mine", rule="top-K", phi_local=0.1, phi_down=0.01)
    known = tcs.Known(scheme, [1000])
    known.begin()
    server = tcs.Server(known)
    server.add(0, tcs.Client(known).send(torch.randn(1000)))
    assert len(server.finish()[1].positions) == 10


def test_what_would_compress_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^FedAvg: phi_down: got 0\.01"):
        tcs.Compressor(tcs.Scheme.named("FedAvg", phi_down=0.01), [100], 2)


def test_what_is_withdrawn_is_finite():
    known = tcs.Known("TCS", [40])
    client = tcs.Client(known)
    known.begin()
    with pytest.raises(ValueError, match=r"^client 0: withdraw: delta_D: got NaN"):
        client.withdraw(torch.full((40,), torch.nan))
    assert not client.errors_D.any()


def test_messages_with_values_of_other_types_are_not_equal():
    one = tcs.Message.dense_of(torch.ones(3))
    assert one != tcs.Message.dense_of(torch.ones(3).double()) and one == tcs.Message.dense_of(
        torch.ones(3)
    )


def test_every_second_byte_is_no_message():
    data = memoryview(bytes(200))[::2]
    with pytest.raises(ValueError, match=r"^message: got a"):
        tcs.decode_message(data, tcs.Wire.up("TCS", [10]))


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_server_goes_on_after_the_errors_of_its_downlink_have_overflowed(on_a_gpu, monkeypatch):
    if on_a_gpu:
        monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    scheme = tcs.Scheme("both ways", phi_down=0.1, phi_global=0.1, phi_local=0.1)
    client = tcs.Client(tcs.Known(scheme, [40]))
    server = tcs.Server(tcs.Known(scheme, [40]))
    failed = []
    for number, size in enumerate((1.0, 2e38, 1.0, 1.0)):
        if size > 1:  # in the first sparse round
            server.downlink.errors_D.fill_(3e38)
        for known in (client.known, server.known):
            known.begin()
        server.add(0, client.send(torch.full((40,), size)))
        try:
            update_D, reply = server.finish()
        except tcs.NotFiniteError as error:
            failed.append((number, error.client))
            assert server.heard == [] and not server.downlink.errors_D.any()
            client.known.lose()
            server.known.lose()
            continue
        server.known.observe(update_D)
        assert torch.equal(client.receive(reply), update_D)
    assert failed == [(1, tcs.SERVER)]
