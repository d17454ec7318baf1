"""What would pass in silence and be wrong: mistakes of users, and states that are not whole."""

import copy

import pytest
import torch
from classifier import Classifier, batches, federation
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import tcs_core as tcs

# Feeds ────────────────────────────────────────────────────────────────────────────────────────────


def loader_with_a_samplers_generator(of_batches=False):
    data = TensorDataset(torch.arange(12.0))
    sampler = SubsetRandomSampler(range(12), generator=torch.Generator())
    if of_batches:
        return DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 4, False))
    return DataLoader(data, 4, sampler=sampler)


@pytest.mark.parametrize("of_batches", [False, True])
def test_a_samplers_own_generator_draws_the_same_order_after_a_resume(of_batches):
    feed = tcs.Feed([loader_with_a_samplers_generator(of_batches)])
    for step in range(4):  # into the second pass
        feed.batch(0, step, 0)
    other = tcs.Feed([loader_with_a_samplers_generator(of_batches)])
    other.load_state_dict(feed.state_dict())
    for step in range(4, 10):
        assert torch.equal(feed.batch(0, step, 0)[0], other.batch(0, step, 0)[0])


def test_a_loader_with_persistent_workers_is_one_clients():
    loader = DataLoader(TensorDataset(torch.arange(8.0)), num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match=r"^feed: client 1: got another's persistent loader"):
        tcs.Feed([loader, loader])


# Models and losses ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_a_loss_of_another_module(optimizer):
    model = Classifier()
    made = federation(
        copy.deepcopy(model),
        loss=lambda _, batch: tcs.cross_entropy(model, batch),
        local_optimizer=optimizer,
    )
    with pytest.raises(ValueError, match="gives no trained parameter of the model a gradient"):
        made.round()


def test_two_parameters_in_one_memory():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"^model: 1\.weight: got the memory of 0\.weight"):
        tcs.Federation(model, [[0]], "TCS", 0.1)


def squared(model, batch):
    return model(batch).square().mean()


def bounded_embedding():
    """Its forward pass changes it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 3, max_norm=0.5))


def test_a_module_that_changes_its_parameters_in_the_forward_pass():
    model, words = bounded_embedding(), [[torch.tensor([0, 1, 2])]]
    made = tcs.Federation(model, words, "FedAvg", 0.1, loss=squared)
    before_D = made.theta_D.clone()
    with pytest.raises(ValueError, match=r"^model: 0\.weight: changes in the forward pass"):
        made.round()
    assert torch.equal(model[0].weight.flatten(), before_D)  # a failed round leaves theta
    with_own = tcs.Federation(
        bounded_embedding(), words, "FedAvg", 0.1, loss=squared, local_optimizer=torch.optim.SGD
    )
    alone = bounded_embedding()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        with_own.round()
        optimizer.zero_grad()
        squared(alone, words[0][0]).backward()
        optimizer.step()
    torch.testing.assert_close(with_own.model[0].weight, alone[0].weight)


def test_pruning_keeps_the_errors_of_what_it_renames():
    made = federation(nn.Sequential(nn.Flatten(), nn.Linear(108, 10)))
    for _ in range(2):
        made.round()
    before_ND = made.compressor.errors_ND.clone()
    assert before_ND.any()
    prune.l1_unstructured(made.model[1], "weight", 0.5)
    made.look_at_module()
    assert "1.weight_orig" in made.flat.names
    torch.testing.assert_close(made.compressor.errors_ND.norm(), before_ND.norm())


# Evaluation ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("given", [False, True])
def test_what_is_done_in_an_evaluation_leaves_no_statistics(given):
    made = federation(Classifier(), clients=3)
    made.round()
    before_NS, module = made.statistics_NS.clone(), copy.deepcopy(made.model.state_dict())
    statistics_S = torch.full_like(before_NS[0], 2.0) if given else None
    with made.evaluated(statistics_S) as model:
        assert torch.equal(made.state_dict()["statistics_NS"], before_NS)
        model.train()
        model(10 * batches(3)[0][0])
    assert torch.equal(made.statistics_NS, before_NS)
    assert not given or (statistics_S == 2).all()
    for key, value in made.model.state_dict().items():
        assert "tracked" in key or torch.equal(value, module[key]), key


# Schemes and sides ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "key"),
    [("top-K", "phi_global"), ("rand-K", "phi_local"), ("FedAvg", "phi_global"),
     ("Baseline", "phi_local")],
)  # fmt: skip
def test_the_share_of_a_mask_that_is_not_there(name, key):
    with pytest.raises(ValueError, match=rf"^{name}: {key}: got 0.1"):
        tcs.Scheme.named(name, **{key: 0.1})


@pytest.mark.parametrize("changes", [{"momentum": 0.9}, {"error_unit": "gradient"}])
def test_what_only_a_federation_does(changes):
    with pytest.raises(ValueError, match="is a federation's"):
        tcs.Known(tcs.Scheme.named("TCS", **changes), [10])


def test_a_part_of_no_field():
    with pytest.raises(ValueError, match=r"^field: got 'phi_down'"):
        tcs.register_part("phi_down")


def test_an_average_is_taken_once():
    known = tcs.Known("FedAvg", [3])
    server, client = tcs.Server(known), tcs.Client(known)
    late = tcs.Client(known, 1)
    known.begin(dense=True)
    server.add(0, client.send(torch.ones(3)))
    assert server.average().tolist() == server.average().tolist() == [1.0] * 3
    with pytest.raises(tcs.MessageError, match="round 0 has been averaged without it"):
        server.add(1, late.send(torch.ones(3)))
    assert server.finish()[0].tolist() == [1.0] * 3


class Part(tcs.Link):
    """A process with some of the clients."""

    def __init__(self, own):
        self.numbers = own

    def own(self, clients):
        return self.numbers


def test_another_processes_state_changes_nothing():
    one, other = (tcs.Compressor("TCS", [40], 4, link=Part(own)) for own in (range(2), range(2, 4)))
    other.known.begin(dense=True)
    other.known.observe(torch.ones(40))
    with pytest.raises(ValueError, match="client: got 2, allowed: 0"):
        one.load_state_dict(other.state_dict())
    assert one.known.round == 0 and one.rule.positions is None


def test_after_all_have_sent_a_failure_accuses_nobody(monkeypatch):
    compressor = tcs.Compressor("TCS", [40], 3)

    def observe(update_D):
        raise RuntimeError("mine")

    monkeypatch.setattr(compressor.rule, "observe", observe)
    with pytest.raises(RuntimeError) as error:
        compressor.step(torch.ones(3, 40))
    assert error.value.__notes__ == ["round 0: nobody was heard in it"]


class Listing(tcs.TCS):
    keeps = ("seen", *tcs.TCS.keeps)

    def __init__(self, *settings):
        super().__init__(*settings)
        self.seen = []

    def observe(self, update_D):
        self.seen.append(float(update_D.sum()))
        super().observe(update_D)


def test_what_a_rule_keeps_is_saved_by_value(monkeypatch):
    monkeypatch.setitem(tcs.RULES, "Listing", Listing)
    compressor = tcs.Compressor(tcs.Scheme("Listing", "Listing"), [40], 2)
    compressor.step(torch.ones(2, 40))
    state = compressor.state_dict()
    compressor.step(torch.ones(2, 40))
    assert len(state["known"]["rule"]["seen"]) == 1 and len(compressor.rule.seen) == 2


def test_a_hooks_state_that_is_not_whole():
    state = tcs.TCSState(phi_global=0.1, phi_local=0.01)
    with pytest.raises(ValueError, match=r"^TCSState: state: slots is missing$"):
        state.load_state_dict({"iter": 5, "bytes_sent": {}})
    assert state.iter == 0
