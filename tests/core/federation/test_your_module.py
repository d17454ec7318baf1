"""Section 7 leaves the module to its owner: modes, memory, gradients; what the owner changes counts."""

import copy
import io
import re

import pytest
import torch
from classifier import Classifier, batches, federation, flat, modes
from torch import nn
from torch.nn.utils import prune

import tcs_core as tcs

# Modes, statistics, gradients ─────────────────────────────────────────────────────────────────────


def test_a_frozen_stem_keeps_its_modes_weights_and_statistics():
    model, seen = Classifier().frozen(), []
    before, before_modes = copy.deepcopy(model.stem.state_dict()), modes(model)

    def loss(model, batch):
        seen.append(modes(model))
        return tcs.cross_entropy(model, batch)

    made = federation(model, loss=loss)
    start_D = flat(model)
    for _ in range(3):
        made.round()
    assert modes(model) == before_modes and not before_modes["stem.1"] and before_modes["drop"]
    assert seen == [before_modes] * 6  # dropout drops, the stem's norm does not learn
    for key, value in model.stem.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not torch.equal(flat(model), start_D)


def test_a_module_left_in_eval_mode_trains_as_it_did_and_is_given_back_so():
    model, seen = Classifier().frozen(), []
    training = modes(model)

    def loss(model, batch):
        seen.append(modes(model))
        return tcs.cross_entropy(model, batch)

    made = federation(model, loss=loss)
    made.round()
    model.eval()
    made.round()
    assert seen == [training] * 4 and not any(modes(model).values())


def test_after_a_round_the_module_has_the_clients_averaged_statistics():
    model = Classifier()
    made = federation(model, "FedAvg", clients=3)
    made.round()
    stem, body = model.stem[1], model.body[1]
    now_S = torch.cat([stem.running_mean, stem.running_var, body.running_mean, body.running_var])
    torch.testing.assert_close(now_S, made.statistics_NS.mean(0))
    assert len({tuple(row.tolist()) for row in made.statistics_NS}) == 3
    made.round([1])
    torch.testing.assert_close(model.stem[1].running_mean, made.statistics_NS[1, :4])


def test_evaluated_is_the_module_in_eval_mode_as_it_is_saved():
    model = Classifier()
    made = federation(model)
    made.round()
    x, _ = batches(1)[0]
    before, plain = modes(model), copy.deepcopy(model).eval()(x)
    with made.evaluated() as lent:
        assert lent is model and not any(modes(lent).values())
        assert torch.equal(lent(x), plain)
    assert modes(model) == before
    saved = made.averaged_state_dict()
    other = Classifier()
    other.load_state_dict(saved)
    assert torch.equal(other.eval()(x), plain)
    kept = {key: value.clone() for key, value in saved.items()}
    made.round()
    assert all(torch.equal(saved[key], kept[key]) for key in kept)  # by value
    with pytest.raises(ArithmeticError), made.evaluated():
        raise ArithmeticError
    assert modes(model) == before


def test_evaluated_takes_other_statistics_and_puts_the_modules_back():
    model = Classifier()
    made = federation(model)
    made.round()
    before, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    wild_S = torch.full_like(made.statistics_NS[0], 9.0)
    with made.evaluated(wild_S):
        assert (model.stem[1].running_mean == 9.0).all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(b is buffers[name] for name, b in model.named_buffers())


def test_gradients_and_random_numbers_of_its_owner_are_left_alone():
    model = Classifier()
    made = federation(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    gradients, drawn = [p.grad for p in model.parameters()], torch.get_rng_state()
    made.round()
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all((g == 2.0).all() for g in gradients) and torch.equal(torch.get_rng_state(), drawn)


def test_a_loss_that_takes_gradients_away_trains_all_the_same():
    """As adversarial training and penalties do before their own pass."""

    def takes_away(model, batch):
        model.zero_grad()
        return tcs.cross_entropy(model, batch)

    one, other = federation(Classifier(), loss=takes_away), federation(Classifier())
    for _ in range(3):
        assert torch.equal(one.round(), other.round())
    assert not torch.equal(one.theta_D, tcs.parameters_to_vector(Classifier()))


# Memory ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
def test_parameters_stay_ordinary_tensors_in_their_own_memory(kind):
    model = Classifier().to(memory_format=kind)
    strides = [p.stride() for p in model.parameters()]
    held = list(model.parameters())
    made = federation(model, "TCS-L2-Q5")
    for _ in range(3):
        made.round()
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    assert [p.stride() for p in model.parameters()] == strides
    for p in model.parameters():  # what safetensors asks for, and small files need
        assert p.untyped_storage().nbytes() == 4 * p.numel() and p.storage_offset() == 0
    if kind is torch.contiguous_format:
        assert all(p.is_contiguous() for p in model.parameters())
        assert torch.equal(torch.cat([p.view(-1) for p in model.parameters()]), made.theta_D)
        assert torch.equal(flat(model), made.theta_D)
    head, whole = io.BytesIO(), io.BytesIO()
    torch.save(model.head.state_dict(), head), torch.save(torch.zeros(63), whole)
    assert head.tell() < whole.tell() + 2000


# What its owner changes between two rounds ────────────────────────────────────────────────────────


def test_a_state_loaded_between_rounds_counts_with_its_statistics():
    """One client, no compression: the next round is a step of SGD from there."""
    model, other = Classifier(), Classifier()
    for p in other.parameters():
        p.data.mul_(0.5)
    other.stem[1].running_mean.fill_(5.0)
    made = tcs.Federation(model, [batches(3)], "FedSGD", 0.1)
    made.round()
    model.load_state_dict(other.state_dict())
    with made.evaluated():
        assert (model.stem[1].running_mean == 5.0).all()
    fresh = tcs.Federation(other, [batches(3)[1:]], "FedSGD", 0.1)
    made.model.drop.p = other.drop.p = 0.0
    assert torch.equal(made.round(), fresh.round())
    assert torch.equal(flat(model), flat(other))
    assert torch.equal(model.stem[1].running_mean, other.stem[1].running_mean)
    assert float(model.stem[1].running_mean.mean()) > 4


def assigned(model):
    state = {key: value.clone() for key, value in model.head.state_dict().items()}
    model.head.load_state_dict(state, assign=True)


def replaced(model):
    model.head = nn.Linear(20, 3)


def of_another_size(model):
    model.head = nn.Linear(20, 7)


def frozen(model):
    model.body.requires_grad_(False)


def unfrozen(model):
    model.stem.requires_grad_(True)


def added(model):
    model.head.register_parameter("scale", nn.Parameter(torch.ones(1)))


def gone(model):
    model.head.bias = None


def pruned(model):
    prune.l1_unstructured(model.head, "weight", 0.5)


def put_in_front(model):
    model.drop = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5))


def in_another_order(model):
    weight = model.head.weight
    del model.head.weight
    model.head.weight = weight


def tied(model):
    model.body[1].bias = model.body[1].weight


def in_another_layout(model):
    model.body[0].to(memory_format=torch.channels_last)


def in_double_precision(model):
    model.head.double()


def another_norm(model):
    model.body[1] = copy.deepcopy(model.body[1]).requires_grad_(False)


def a_bare_norm(model):
    model.drop = nn.BatchNorm1d(20, affine=False)


def a_norm_without_statistics(model):
    model.body[1].running_mean = model.body[1].running_var = None


CHANGES = {
    assigned: "head.weight", replaced: "head.weight", of_another_size: "head.weight",
    frozen: "body.0.weight", unfrozen: "stem.0.weight", added: "head.scale", gone: "head.bias",
    pruned: "head.weight", put_in_front: "drop.0.weight", in_another_order: "head.weight",
    tied: "body.1.bias", in_another_layout: "body.0.weight", in_double_precision: "head.weight",
    another_norm: "body.1.weight", a_bare_norm: "drop", a_norm_without_statistics: "body.1",
}  # fmt: skip


@pytest.mark.parametrize("optimizer", [None, "local_optimizer", "server_optimizer"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_module_that_trains_others_is_refused_by_the_name_of_the_first(change, optimizer):
    model = Classifier().frozen()
    sgd = {optimizer: lambda parameters: torch.optim.SGD(parameters, 0.1)} if optimizer else {}
    made = federation(model, **sgd)
    made.round(), made.round()
    before = made.state_dict()
    errors_ND, mask = made.compressor.errors_ND.clone(), made.compressor.rule.positions.clone()
    change(model)
    named = rf"^model: {re.escape(CHANGES[change])}: got .*, allowed: .*make a new Federation"
    if change is in_another_order:
        named = r"^model: .*head\.weight.*: got .*, allowed: .*make a new Federation"
    calls = made.round, made.state_dict, lambda: made.load_state_dict(before)
    for call in calls:
        with pytest.raises(ValueError, match=named):
            call()
    assert made.t == 2 and made.feed.state_dict() == before["feed"]
    assert torch.equal(made.theta_D, before["theta_D"])
    assert torch.equal(made.compressor.errors_ND, errors_ND)
    assert torch.equal(made.compressor.rule.positions, mask)


@pytest.mark.parametrize("change", [replaced, frozen, unfrozen, added, pruned, put_in_front])
def test_a_new_federation_of_a_changed_module_trains_what_it_has_now(change):
    model = Classifier().frozen()
    federation(model).round()
    change(model)
    before_D, made = flat(model), federation(model)
    made.round()
    assert len(made.theta_D) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert not torch.equal(flat(model), before_D)


def test_a_parameter_that_is_trained_again_lets_the_federation_go_on():
    one, other = federation(Classifier()), federation(Classifier())
    one.round(), other.round()
    one.model.stem.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^model: stem\.0\.weight: got one that is frozen"):
        one.round()
    one.model.stem.requires_grad_(True)
    assert torch.equal(one.round(), other.round())


def test_tied_weights_are_one_and_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x))

    model, batch = Tied(), (torch.arange(7), torch.arange(7).roll(1))
    assert tcs.layer_sizes(model) == [35]
    plain = copy.deepcopy(model)
    made = tcs.Federation(model, [[batch]], "FedSGD", 0.1)
    for _ in range(3):
        made.round()
        loss = tcs.cross_entropy(plain, batch)
        (gradient,) = torch.autograd.grad(loss, [plain.embed.weight])
        plain.embed.weight.data.sub_(0.1 * gradient)
    assert model.out.weight is model.embed.weight
    torch.testing.assert_close(model.embed.weight, plain.embed.weight)


def test_sparse_gradients_and_empty_parameters_work():
    class Words(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3)
            self.nothing = nn.Parameter(torch.empty(0, 4))

        def forward(self, x):
            return self.out(self.embed(x))

    batch = torch.tensor([1, 1, 5]), torch.tensor([0, 2, 1])
    made = [
        tcs.Federation(Words(sparse), [[batch]] * 2, "TCS-L2", 0.1, weight_decay=1e-3)
        for sparse in (True, False)
    ]
    assert tcs.layer_sizes(made[0].model) == [36, 12, 3]
    for _ in range(3):
        updates = [one.round() for one in made]
        torch.testing.assert_close(*updates)
    assert made[0].model.nothing.shape == (0, 4)


# Clients and feeds ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "clients", [[True], [1.0], [False, 1], ["1"], [None], [0, 0], [2], [-1], []]
)
def test_clients_are_whole_numbers_each_once(clients):
    made = federation(Classifier())
    with pytest.raises(
        ValueError, match=r"^clients: got .*, allowed: one or more of 0 to 1, each once$"
    ):
        made.round(clients)
    assert made.t == 0 and made.feed.given == [0, 0]


@pytest.mark.parametrize(
    ("feed", "text"),
    [({0: batches(1)}, "feed: got a dict, allowed: a list of one iterable per client$"),
     (torch.utils.data.DataLoader(torch.zeros(4, 8)), "feed: got a DataLoader, allowed: a list of one"),
     ([], "feed: got an empty list, allowed: one iterable per client$"),
     ([batches(1), 5], "feed: client 1: got 5, allowed: an iterable of batches$"),
     ([torch.utils.data.DataLoader(torch.zeros(4, 8), num_workers=1)] * 64,
      "feed: got loaders with 64 workers in all, which would all be open at once, allowed: at most 16")],
)  # fmt: skip
def test_feeds_that_are_none(feed, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        tcs.Federation(Classifier(), feed, "TCS", 0.1)


def test_a_few_loaders_with_workers_are_a_feed():
    """As many of them as are allowed; beyond, see above."""
    data = torch.utils.data.TensorDataset(torch.randn(8, 3, 6, 6), torch.arange(8) % 3)
    loaders = [torch.utils.data.DataLoader(data, 4, num_workers=n) for n in (1, 0)]
    assert tcs.Feed([loaders[0]] * tcs.Feed.most_workers).clients == tcs.Feed.most_workers
    here = tcs.Federation(Classifier(), [loaders[1]] * 2, "TCS", 0.1)
    there = tcs.Federation(Classifier(), loaders, "TCS", 0.1)
    for _ in range(3):
        here.round()
        there.round()
    assert torch.equal(here.theta_D, there.theta_D)


# What can't be meant is refused by name ───────────────────────────────────────────────────────────


NORMALIZED = [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm,
              nn.utils.parametrizations.orthogonal]  # fmt: skip


@pytest.mark.parametrize("norm", NORMALIZED)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_that_are_calculated_from_parameters_train_and_resume(norm):
    """Of these, torch cannot copy the first, nor pickle the others."""

    def make():
        model = Classifier()
        norm(model.head)
        return federation(model)

    one, other = make(), make()
    before = one.theta_D.clone()
    one.round()
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.round(), other.round())
    assert torch.equal(one.theta_D, other.theta_D) and not torch.equal(one.theta_D, before)
    with one.evaluated() as here, other.evaluated() as there:
        assert torch.equal(here(batches(1)[0][0]), there(batches(1)[0][0]))


def test_a_scheduler_of_torchs_is_refused_with_what_to_give_instead():
    optimizer = torch.optim.SGD(Classifier().parameters(), 0.1)
    made = federation(Classifier(), eta=torch.optim.lr_scheduler.StepLR(optimizer, 50))
    with pytest.raises(ValueError, match=r"^schedule: round 0: got .*StepLR.* lambda t: "):
        made.round()


@pytest.mark.parametrize(
    ("eta", "shown"), [(-0.1, "-0.1"), (torch.nan, "nan"), (torch.inf, "inf"), ("0.1", "'0.1'"), (lambda t: None, "None")]
)  # fmt: skip
def test_a_schedule_that_gives_no_rate_begins_no_round(eta, shown):
    made = federation(Classifier(), eta=eta)
    with pytest.raises(ValueError, match=rf"^schedule: round 0: got {shown} .* >= 0, or a Phase"):
        made.round()
    assert made.t == 0 and made.feed.given == [0, 0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"weight_decay": -1e-4}, "weight_decay: got -0.0001 .*, allowed: a number >= 0$"),
     ({"weight_decay": None}, "weight_decay: got None .*, allowed: a number >= 0$"),
     ({"seed": "a"}, "seed: got 'a' .*, allowed: a whole number from 0 to"),
     ({"seed": -1}, "seed: got -1 .*, allowed: a whole number from 0 to"),
     ({"seed": 2**64}, "seed: got 18446744073709551616 .*, allowed: a whole number from 0 to"),
     ({"local_optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)},
      "local_optimizer: got a SGD, allowed: a function from parameters to an optimizer"),
     ({"server_optimizer": 0.1}, "server_optimizer: got a float, allowed: a function from")],
)  # fmt: skip
def test_settings_that_mean_nothing(settings, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        federation(Classifier(), **settings)


def test_two_clients_with_one_iterator():
    one = iter(batches(9))
    with pytest.raises(
        ValueError, match=r"^feed: client 1: got another's iterator, allowed: its own$"
    ):
        tcs.Federation(Classifier(), [one, one], "TCS", 0.1)
    same = batches(3)
    assert tcs.Federation(Classifier(), [same, same], "TCS", 0.1).round().any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(3),
        lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3)),
    ],
)
def test_a_parameter_that_has_no_shape_yet_is_named(make):
    model, batch = make(), (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match=r"^model: (0\.)?weight: got a parameter without a shape"):
        tcs.Federation(model, [[batch]], "TCS", 0.1)
    model(batch[0])
    tcs.Federation(model, [[batch]], "TCS", 0.1).round()
